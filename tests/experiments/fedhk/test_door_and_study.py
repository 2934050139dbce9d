"""FedHK's door and its study, from their flags to their files."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from experiments.fedhk import study
from experiments.fedhk.__main__ import main as door
from experiments.fedhk.__main__ import translated
from experiments.lib import charts
from experiments.lib.command import parse
from jaxfedmvc.data.dataset import Dataset
from tests.helpers import binaries

COMMON = ("--noprogress", "--compilation_cache=")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Three clusters in two views."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    views = {
        f"view_{v}": 5 * np.eye(3, d)[labels] + rng.normal(size=(60, d))
        for v, d in enumerate((4, 3))
    }
    path = tmp_path_factory.mktemp("data") / "toy.npz"
    np.savez(path, labels=labels, **views)
    return str(path)


def launch(main, *arguments):
    return binaries.launch(main, *COMMON, *arguments)


def of_clients(toy):
    return f"--dataset={toy}", "--n_clients=4", "--ratio=1:0", "--rounds=30"


# --- The door -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], []),
        (["--method=e_fkmvc", "--seeds=2"], ["--algorithm=e_fkmvc", "--seeds=2"]),
        (["--seeds=2", "--method", "tucker"], ["--algorithm=fedhk_tucker", "--seeds=2"]),
        (
            ["--method=person_parafac2"],
            ["--algorithm=fedhk_parafac2", "--personal=proximal"],
        ),
        (["--privacy=none"], []),
        (["--privacy=secagg"], ["--secure_aggregation", "--in_clear=setup[2]"]),
        (["--privacy=dp"], ["--algorithm=private_e_fkmvc", "--secure_aggregation"]),
        (["--privacy=dp", "--noise=local"], ["--algorithm=private_e_fkmvc", "--noise=local"]),
    ],
)
def test_methods_and_privacy_are_said_in_flags_of_the_runner(arguments, expected):
    found = translated(arguments)
    assert found == expected
    parse(found, algorithm="e_fkmvc")  # and it knows them


@pytest.mark.ci
def test_a_run_ends_by_itself_and_leaves_its_folder(toy, tmp_path):
    folder = tmp_path / "out"
    code, out, err = launch(
        door, *of_clients(toy), "--method=person_tucker", "--seeds=2", f"--output_dir={folder}"
    )
    assert code == 0, err
    assert "fedhk_tucker" in out and "pooled k-means" in out
    summary = json.loads((folder / "summary.json").read_text())
    # Seeds end when they have converged, each at its own round.
    made = pd.read_csv(folder / "rounds.csv").groupby("seed").size().to_list()
    assert summary["rounds_made"] == made and all(0 < n < 30 for n in made)
    assert summary["metrics"]["ari"]["mean"] > 0.9
    assert summary["privacy"] == {"kind": "none"}
    assert (folder / "curves.png").stat().st_size > 10_000
    assert "--personal=proximal" in (folder / "flags.txt").read_text().splitlines()


@pytest.mark.slow
def test_secure_aggregation_changes_no_label_and_says_what_it_covers(toy, tmp_path):
    results = {}
    for privacy in ("none", "secagg"):
        folder = tmp_path / privacy
        code, _, err = launch(
            door, *of_clients(toy), f"--privacy={privacy}", f"--output_dir={folder}"
        )
        assert code == 0, err
        results[privacy] = json.loads((folder / "summary.json").read_text())
    assert results["secagg"]["metrics"] == results["none"]["metrics"]
    statement = results["secagg"]["privacy"]
    assert statement["kind"] == "secure aggregation"
    assert any("summaries" in line for line in statement["not_covered"])
    # A masked value is as wide as a plain one; the check and the participants' ids come on top.
    up = [results[p]["bytes_per_round"]["up"] for p in ("none", "secagg")]
    assert up[1] == up[0] + 4 * 4


@pytest.mark.slow
def test_private_runs_say_what_they_spent(toy, tmp_path):
    folder = tmp_path / "out"
    code, _, err = launch(
        door,
        *of_clients(toy),
        "--rounds=2",
        "--privacy=dp",
        "--dp_epsilon=2",
        f"--output_dir={folder}",
    )
    assert code == 0, err
    summary = json.loads((folder / "summary.json").read_text())
    statement = summary["privacy"]
    assert summary["rounds_made"] == [2]
    assert statement["epsilon"] == pytest.approx(2, rel=1e-2) and statement["delta"] == 1e-5
    assert statement["kind"] == "differential privacy, central noise"
    assert "one sample more" in statement["neighbours"]
    for part in ("clients (all", "seeds", "ranges", "losses and scores"):
        assert any(part in line for line in statement["not_covered"]), part


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fuzzifier=1"], "fuzzifier: got 1.0; allowed is more than 1"),
        (["--alpha=0.5"], "alpha: got 0.5; allowed is more than 1"),
        (["--alpha=nan"], "alpha: got nan"),
        (["--method=tucker", "--ranks=3,x,2"], "ranks=3,x,2"),
        (["--method=tucker", "--ranks=3,2"], r"ranks: got \(3, 2\); allowed is three"),
        (["--method=tucker", "--ranks=9,3,2"], r"ranks: got \(9, 3, 2\)"),
        (["--method=tucker", "--alignment=procrustes"], "alignment: got 'procrustes'"),
        (["--method=parafac2", "--rank=7"], "rank: got 7; allowed is 1 to 3"),
        (["--method=parafac2", "--aggregation=average"], "aggregation: got 'average'"),
        (["--method=tucker", "--hkc=minmax"], "got 'minmax'; allowed is .* with compressed sums"),
        (["--privacy=dp", "--method=tucker"], "method: got tucker with --privacy=dp"),
        (["--privacy=dp", "--dp_epsilon=0"], "dp_epsilon: got 0.0; allowed is more than 0"),
        (
            ["--privacy=dp", "--dp_delta=2"],
            "dp_delta: got 2.0; allowed is a number between 0 and 1",
        ),
        (["--privacy=dp", "--fraction_bits=1", "--dp_epsilon=100"], "fraction_bits: got 1; allow"),
        (["--privacy=maybe"], "privacy: got 'maybe'; allowed are none, secagg, dp"),
        (["--privacy=secagg", "--participation=0.5"], "participation: got .*0.5.* masked sums"),
        (["--privacy=secagg", "--n_clients=1"], "n_clients: one client alone holds"),
        (["--privacy=secagg", "--hkc=minmax"], "hkc: got minmax with masked sums"),
        (["--ranks=1,2,3"], "ranks: is no flag of e_fkmvc"),
        (["--local_steps=5"], "local_steps: has no effect with --aggregation=statistics"),
        (["--tau=1"], "tau: has no effect with --personal=none; leave it out, or give"),
        (["--method=k_means"], "method: got 'k_means'; allowed are e_fkmvc, tucker"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(toy, tmp_path, arguments, message):
    folder = tmp_path / "out"
    code, _, err = launch(door, *of_clients(toy), *arguments, f"--output_dir={folder}")
    assert code == 2 and not folder.exists()
    assert len(err.strip().splitlines()) == 1
    assert re.search(message, err), err


@pytest.mark.slow
def test_numbers_too_large_for_masked_sums_end_the_run(toy, tmp_path):
    code, _, err = launch(
        door,
        *of_clients(toy),
        "--privacy=secagg",
        "--fraction_bits=31",
        f"--output_dir={tmp_path / 'out'}",
    )
    assert code == 2 and re.search(r"fraction_bits: got 31, and \d+ values", err)


# --- The study ------------------------------------------------------------------------------------


def launch_study(*arguments):
    return launch(study.main, *arguments)


@pytest.fixture(scope="module")
def studied(toy, tmp_path_factory):
    """Two rows of "methods" with two seeds: the folder and what was printed."""
    folder = tmp_path_factory.mktemp("study") / "out"
    code, out, err = launch_study(
        f"--study_sets={toy}",
        "--study_parts=methods",
        "--rows=E-FKMVC,k-means of each client",
        "--study_clients=3",
        "--max_rounds=4",
        "--seeds=2",
        f"--output_dir={folder}",
    )
    assert code == 0, err
    return folder, out


@pytest.mark.ci
def test_the_study_runs_its_rows(studied):
    folder, out = studied
    summary = pd.read_csv(folder / "summary.csv").set_index(["method", "clients"])
    assert list(summary.index) == [
        ("k-means of pooled samples", "pooled"),
        ("E-FKMVC", "alike"),
        ("E-FKMVC", "skewed"),
        ("k-means of each client", "alike"),
        ("k-means of each client", "skewed"),
    ]
    assert summary.loc[("E-FKMVC", "skewed"), "pooled/ari/mean"] > 0.9
    pooled = pd.read_csv(folder / "pooled.csv")["pooled/ari"]
    assert len(pooled) == 2
    assert pooled.mean() == pytest.approx(summary["pooled/ari/mean"].iloc[0])
    assert summary.loc[("k-means of each client", "alike"), "kilobytes"] == 0
    assert summary.loc[("E-FKMVC", "alike"), "kilobytes"] > 0
    assert "| E-FKMVC | skewed |" in out and (folder / "methods.png").stat().st_size > 10_000
    assert (folder / "methods.md").read_text() in out


@pytest.mark.ci
def test_the_summary_is_made_of_the_runs_under_their_own_headings(studied):
    folder, _ = studied
    runs = pd.read_csv(folder / "runs.csv")
    assert len(runs) == 4 * 2 and set(runs["status"]) == {"ok"}
    summary = pd.read_csv(folder / "summary.csv").set_index(["method", "clients"])
    for cell, own in runs.groupby(["method", "clients"]):
        for name in ("pooled/ari", "per_client/acc"):
            assert own[f"all/{name}"].mean() == pytest.approx(summary.loc[cell, f"{name}/mean"])
            assert own[f"all/{name}"].std(ddof=1) == pytest.approx(summary.loc[cell, f"{name}/std"])
    assert (runs.loc[runs["method"] == "E-FKMVC", "rounds_made"] <= 4).all()


@pytest.mark.ci
def test_a_finished_study_goes_on_to_its_tables(studied):
    folder, out = studied
    before = (folder / "summary.csv").read_bytes()
    code, again, err = launch_study(
        f"--flagfile={folder / 'flags.txt'}", f"--output_dir={folder}", "--resume"
    )
    assert code == 0, err
    assert (folder / "summary.csv").read_bytes() == before and again == out


@pytest.mark.slow
def test_every_cell_of_the_study_is_a_command(toy):
    sets = {"toy": study.data.load(toy)}
    settings = study.StudySettings(
        study_sets=("toy",), rank_sets=("toy",), private_sets=("toy",), study_clients=4
    )
    commands = [
        (names, parse(["--rounds=50", *flags])) for names, flags in study.cells(settings, sets)
    ]
    for _, command in commands:
        command.method.make(command.config(3, 4), command.hyperparams())
    private = [command for names, command in commands if names["part"] == "privacy"]
    assert {command.rounds for command in private} == {5}
    multipliers = [float(np.asarray(c.hyperparams().noise_multiplier)) for c in private[:7]]
    # From infinite to small epsilons: ever more noise.
    assert multipliers[0] == 0 and multipliers == sorted(multipliers)
    x = {names["x"] for names, _ in commands if names["part"] == "personal"}
    assert {float(tau) for tau in x} == set(study._TAUS)


def test_clients_differ_by_construction():
    def spread(drift):
        federation = study.drifting(0, drift, 5)
        (cohort,) = federation.cohorts
        centres = [
            np.asarray(x)[np.asarray(truth) == 0].mean(axis=0)
            for x, truth in zip(cohort.views[0], federation.labels[0], strict=True)
        ]
        return np.std(centres, axis=0).mean()

    assert spread(0.0) < 0.5 < 2.0 < spread(4.0)


def test_kilobytes_are_a_clients_of_both_ways_and_runs_that_failed_count_nowhere():
    names = dict.fromkeys(study._CELL, "") | {"seed": "0", "status": "ok", "rounds_made": "3"}
    row = names | {"bytes_up": "1000", "bytes_down": "5000"}
    row |= {f"all/{name}": "0.5" for name in study._SCORES}
    runs = study.finished_runs([row, row | {"status": "failed: NaN", "seed": "1"}], n_clients=2)
    assert len(runs) == 1 and runs["kilobytes"][0] == 3 and runs["rounds"][0] == 3


def test_pooled_views_weigh_the_same(monkeypatch):
    """Whatever their units; who finds the classes has 1 in every column."""
    rng, truth, seen = np.random.default_rng(0), np.arange(30) % 3, []

    def k_means(x, n_clusters, seed):
        seen.append((x, n_clusters, seed))
        return (truth + 1) % 3

    monkeypatch.setattr(study, "k_means", k_means)
    sets = {"a": Dataset("a", (rng.normal(size=(30, 2)), 1e3 * rng.normal(size=(30, 5))), truth)}
    settings = study.StudySettings(study_parts=("methods",), study_sets=("a",))
    runs = study.pooled_runs(settings, sets, [4, 7])
    assert [rest for _, *rest in seen] == [[3, 4], [3, 7]] and list(runs["seed"]) == [4, 7]
    for x, *_ in seen:
        variances = x.var(axis=0)
        np.testing.assert_allclose([variances[:2].sum(), variances[2:].sum()], 1)
    assert (runs[study._SCORES] == 1).all(axis=None) and runs["kilobytes"].isna().all()


def test_noise_is_for_the_start_and_all_rounds(monkeypatch):
    """A release of moments, two of the start's steps, and five rounds."""
    asked = []
    monkeypatch.setattr(study, "gaussian_noise_multiplier", lambda *told: asked.append(told) or 3.0)
    assert "--noise_multiplier=3.0" in study._private_flags("central", 8.0)
    assert "--noise_multiplier=0.0" in study._private_flags("local", float("inf"))
    assert asked == [(8.0, 1e-5, 8)]


def test_pictures_show_each_part_with_its_own_clients_score_and_bytes(tmp_path, monkeypatch):
    drawn = {}

    def keep(path, panels, *rest, **how):
        drawn[path.stem] = panels

    monkeypatch.setattr(charts, "bars", keep)
    monkeypatch.setattr(charts, "lines", keep)
    rows = [
        dict(zip(study._CELL, cell, strict=True)) | {"kilobytes": 7.0 + i}
        for i, cell in enumerate(
            (
                ("methods", "a", "alike", "m", ""),
                ("methods", "a", "skewed", "m", ""),
                ("methods", "a", "pooled", "k", ""),
                ("bytes", "a", "skewed", "m", "R"),
                ("personal", "a", "skewed", "m", "0.0"),
            )
        )
    ]
    for i, row in enumerate(rows):
        for name, low in (("pooled/ari", 0.0), ("per_client/ari", 0.5)):
            row |= {f"{name}/mean": low + i / 16, f"{name}/std": i / 64}
    study.draw(tmp_path, pd.DataFrame(rows), study.StudySettings(study_clients=2), 5)
    assert drawn["methods"] == {
        "clients alike, 2 of them": {"a": {"m": (0, 0), "k": (2 / 16, 2 / 64)}},
        "clients skewed, 2 of them": {"a": {"m": (1 / 16, 1 / 64), "k": (2 / 16, 2 / 64)}},
    }
    assert drawn["bytes"] == {"a": {"m": [(10, 3 / 16, 3 / 64)]}}
    assert drawn["personal"] == {"2 clients": {"a": [(0.03, 12 / 16, 4 / 64)]}}


def test_the_study_names_what_it_does_not_know(tmp_path):
    for argument, line in (
        ("--rows=E-FCM", "rows: got ['E-FCM']; allowed are E-FKMVC"),
        ("--study_parts=speed", "study_parts: got ['speed']; allowed are methods"),
        ("--study_clients=0", "study_clients: got 0; allowed is 1 or more"),
        ("--study_set=digits", "study_set: is no flag here; did you mean --study_sets?"),
    ):
        code, _, err = launch_study(argument, f"--output_dir={tmp_path / 'out'}")
        assert code == 2 and line in err and not (tmp_path / "out").exists()
