"""The binaries of FedHK, from their flags to their files."""

import csv
import json
import re

import numpy as np
import pytest
from absl import app, flags

from experiments import fedhk, fedhk_study
from tests.helpers import binaries

FLAGS = flags.FLAGS
app.define_help_flags()  # else the first launch defines them, and restoring flags removes them
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


def launch(module, *arguments):
    return binaries.launch(module, *COMMON, *arguments)


def of_clients(toy):
    return f"--dataset={toy}", "--n_clients=4", "--ratio=1:0", "--rounds=30"


def test_a_run_ends_by_itself_and_leaves_its_folder(toy, tmp_path):
    folder = tmp_path / "out"
    code, out, err = launch(
        fedhk, *of_clients(toy), "--method=person_tucker", "--seeds=2", f"--output_dir={folder}"
    )
    assert code == 0, err
    assert "person_tucker" in out and "pooled k-means" in out
    summary = json.loads((folder / "summary.json").read_text())
    with (folder / "rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    # Seeds end when they have converged, each at its own round.
    made = [sum(int(row["seed"]) == seed for row in rows) for seed in (0, 1)]
    assert summary["rounds_made"] == made and all(0 < n < 30 for n in made)
    assert summary["metrics"]["ari"]["mean"] > 0.9
    assert summary["privacy"] == {"kind": "none"}
    assert (folder / "curves.png").stat().st_size > 10_000
    assert {path.name for path in folder.iterdir()} == {
        "summary.json",
        "rounds.csv",
        "flags.txt",
        "curves.png",
    }


def test_secure_aggregation_changes_no_label_and_says_what_it_covers(toy, tmp_path):
    results = {}
    for privacy in ("none", "secagg"):
        folder = tmp_path / privacy
        code, _, err = launch(
            fedhk, *of_clients(toy), f"--privacy={privacy}", f"--output_dir={folder}"
        )
        assert code == 0, err
        results[privacy] = json.loads((folder / "summary.json").read_text())
    assert results["secagg"]["metrics"] == results["none"]["metrics"]
    told = results["secagg"]["privacy"]
    assert told["kind"] == "secure aggregation"
    assert any("summaries" in line for line in told["not_covered"])
    # A masked value is as wide as a plain one; the check and the participants' ids come on top.
    up = [results[p]["bytes_per_round"]["up"] for p in ("none", "secagg")]
    assert up[1] == up[0] + 4 * 4


def test_private_runs_say_what_they_spent(toy, tmp_path):
    folder = tmp_path / "out"
    code, _, err = launch(
        fedhk,
        f"--dataset={toy}",
        "--n_clients=4",
        "--ratio=1:0",
        "--rounds=2",
        "--privacy=dp",
        "--dp_epsilon=2",
        f"--output_dir={folder}",
    )
    assert code == 0, err
    summary = json.loads((folder / "summary.json").read_text())
    told = summary["privacy"]
    assert summary["rounds_made"] == [2]
    assert told["epsilon"] == pytest.approx(2, rel=1e-2) and told["delta"] == 1e-5
    assert told["kind"] == "differential privacy, central noise"
    assert "one sample more" in told["neighbours"]
    for part in ("clients (all", "seeds", "ranges", "losses and scores"):
        assert any(part in line for line in told["not covered"]), part


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fuzzifier=1"], "fuzzifier: got 1.0; allowed is more than 1"),
        (["--alpha=0.5"], "alpha: got 0.5; allowed is more than 1"),
        (["--alpha=nan"], "alpha: got nan"),
        (["--method=tucker", "--ranks=3,x,2"], "ranks: got '3,x,2'; allowed are three"),
        (["--method=tucker", "--ranks=9,3,2"], r"ranks: got \(9, 3, 2\)"),
        (["--method=tucker", "--alignment=procrustes"], "alignment: got 'procrustes'"),
        (["--method=parafac2", "--rank=7"], "rank: got 7; allowed is 1 to 3"),
        (["--method=parafac2", "--aggregation=average"], "aggregation: got 'average'"),
        (["--method=tucker", "--hkc=minmax"], "got 'minmax' with compressed sums"),
        (["--privacy=dp", "--method=tucker"], "method: got tucker with --privacy=dp"),
        (["--privacy=dp", "--dp_epsilon=0"], "dp_epsilon: got 0.0; allowed is more than 0"),
        (
            ["--privacy=dp", "--dp_delta=2"],
            "dp_delta: got 2.0; allowed is a number between 0 and 1",
        ),
        (["--privacy=dp", "--fraction_bits=1", "--dp_epsilon=100"], "fraction_bits: got 1, which"),
        (["--privacy=secagg", "--participation=0.5"], "participation: got 0.5 with masked sums"),
        (["--privacy=secagg", "--n_clients=1"], "n_clients: one client alone holds"),
        (["--privacy=secagg", "--hkc=minmax"], "hkc: got minmax with masked sums"),
        (["--ranks=1,2,3"], "ranks: has no effect on method e_fkmvc"),
        (["--local_steps=5"], "local_steps: has no effect"),
        (["--tau=1"], "tau: has no effect"),
        (["--method=k_means"], "--method=k_means"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(toy, tmp_path, arguments, message):
    folder = tmp_path / "out"
    code, _, err = launch(fedhk, *of_clients(toy), *arguments, f"--output_dir={folder}")
    assert code == 2 and not folder.exists()
    assert len(err.strip().splitlines()) == 1
    assert re.search(message, err), err


def test_the_study_runs_its_parts(toy, tmp_path):
    folder = tmp_path / "study"
    code, out, err = launch(
        fedhk_study,
        f"--study_sets={toy}",
        "--study_parts=methods",
        "--rows=E-FKMVC,k-means of each client",
        "--study_clients=3",
        "--max_rounds=4",
        "--seeds=2",
        f"--output_dir={folder}",
    )
    assert code == 0, err
    with (folder / "summary.csv").open(newline="") as file:
        rows = {(row["method"], row["clients"]): row for row in csv.DictReader(file)}
    assert rows.keys() == {
        ("k-means, pooled", "pooled"),
        ("E-FKMVC", "alike"),
        ("E-FKMVC", "skewed"),
        ("k-means of each client", "alike"),
        ("k-means of each client", "skewed"),
    }
    assert float(rows["E-FKMVC", "skewed"]["pooled/ari/mean"]) > 0.9
    assert float(rows["k-means of each client", "alike"]["kilobytes"]) == 0
    assert "| E-FKMVC | skewed |" in out and (folder / "methods.png").stat().st_size > 10_000
    with (folder / "methods.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 5 * 2
    # Every run stands under its own heading, and the summary is made of the same numbers.
    for (method, clients), row in rows.items():
        own = [r for r in runs if (r["method"], r["clients"]) == (method, clients)]
        for name in ("pooled/ari", "per_client/acc"):
            mean = np.mean([float(r[name]) for r in own])
            assert mean == pytest.approx(float(row[f"{name}/mean"]))


def test_numbers_too_large_for_masked_sums_end_the_run(toy, tmp_path):
    code, _, err = launch(
        fedhk,
        *of_clients(toy),
        "--privacy=secagg",
        "--fraction_bits=31",
        f"--output_dir={tmp_path / 'out'}",
    )
    assert code == 2 and re.search(r"fraction_bits: got 31, and \d+ values", err)


def test_the_study_names_what_it_does_not_know(tmp_path):
    code, _, err = launch(fedhk_study, "--rows=E-FCM", f"--output_dir={tmp_path / 'out'}")
    assert code == 2 and "rows: got ['E-FCM']; allowed are E-FKMVC" in err
    code, _, err = launch(fedhk_study, "--study_parts=speed", f"--output_dir={tmp_path / 'out'}")
    assert code == 2 and "study_parts: got ['speed']; allowed are methods" in err
