"""Any method from flags to files; bad input ends in one line and leaves nothing."""

import csv
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lib import command, report, runner
from experiments.lib.data import DataSettings, load_clients
from experiments.lib.references import has_one_width
from experiments.run import main
from jaxfedmvc import Federation, checks, data, engine
from jaxfedmvc.algorithms import METHODS, FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.fmcsc.networks import init_model
from tests.helpers import binaries, pictures

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "experiments" / "fmcsc" / "presets"
DIMS = (4, 3)
METRICS = {"acc", "nmi", "ari", "purity"}
TINY = (
    "--algorithm=e_fkmvc",
    "--n_clients=4",
    "--ratio=1:1",
    "--compilation_cache=",
    "--noprogress",
)


def launch(*arguments):
    return binaries.launch(main, *arguments)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Data sets by name; the folder has a space in its name."""
    folder = tmp_path_factory.mktemp("data") / "some where"
    folder.mkdir()
    rng = np.random.default_rng(0)
    labels = np.arange(32) % 3
    views = [rng.normal(size=(32, d)) + 3 * np.eye(3, d)[labels] for d in DIMS]
    holed = views[1].copy()
    holed[4, 2] = np.nan
    contents = {
        "toy": {"view_0": views[0], "view_1": views[1], "labels": labels},
        "unlabelled": {"view_0": views[0], "view_1": views[1]},
        "ragged": {"view_0": views[0], "view_1": views[1][:-1], "labels": labels},
        "holed": {"view_0": views[0], "view_1": holed, "labels": labels},
    }
    for name, arrays in contents.items():
        np.savez(folder / f"{name}.npz", **arrays)
    return {name: str(folder / f"{name}.npz") for name in contents} | {"folder": str(folder)}


# --- A job that runs ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(files, tmp_path_factory):
    """Two seeds, two rounds: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("job") / "new" / "results"
    code, out, err = launch(
        *TINY,
        f"--dataset={files['toy']}",
        "--rounds=2",
        "--tol=0",
        "--seeds=2",
        "--seed=3",
        f"--output_dir={folder}",
    )
    assert (code, err) == (0, "")
    return folder, out


def read_summary(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "summary.json").read_text(), parse_constant=refuse)


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_summary(job):
    summary = read_summary(job[0])
    expected = {
        "algorithm": "e_fkmvc",
        "dataset": "toy",
        "n_clients": 4,
        "n_clusters": 3,
        "rounds": 2,
        "rounds_made": [2, 2],
        "seeds": [3, 4],
    }
    assert {key: summary[key] for key in expected} == expected
    assert set(summary["metrics"]) == METRICS
    for name, statistics in summary["metrics"].items():
        values = statistics["per_seed"]
        assert len(values) == 2
        assert all((-1 if name == "ari" else 0) <= value <= 1 for value in values)
        assert statistics["mean"] == pytest.approx(np.mean(values))
        assert statistics["std"] == pytest.approx(np.std(values, ddof=1))
    assert set(summary["seconds"]) == {"compile", "run"} and min(summary["seconds"].values()) > 0
    assert "cpu" in summary["device"] and summary["versions"]["jax"] == jax.__version__
    assert {"no collaboration", "pooled k-means", "e_fkmvc"} <= set(summary["groups"])
    assert summary["privacy"] == {"kind": "none"}


def test_rounds_have_a_row_for_each_round_of_each_seed(job):
    rows, summary = read_rows(job[0] / "rounds.csv"), read_summary(job[0])
    places = [(row["seed"], row["round"]) for row in rows]
    assert places == [("3", "1"), ("3", "2"), ("4", "1"), ("4", "2")]
    for row in rows:
        assert np.isfinite([float(row[f"all/pooled/{name}"]) for name in METRICS]).all()
        assert np.isfinite([float(row[key]) for key in row if key.startswith("loss")]).all()
        assert np.isnan(float(row["non_participating/pooled/acc"]))  # there are none
        assert int(row["bytes_up"]) == summary["bytes_per_round"]["up"]
    assert summary["bytes_rounds"]["up"] == [2 * summary["bytes_per_round"]["up"]] * 2
    last = [float(row["all/pooled/acc"]) for row in rows if row["round"] == "2"]
    assert last == pytest.approx(summary["metrics"]["acc"]["per_seed"])


def test_labels_name_the_row_of_the_data_set(job, files):
    rows = read_rows(job[0] / "labels.csv")
    for seed in ("3", "4"):
        mine = [row for row in rows if row["seed"] == seed]
        assert sorted(int(row["row"]) for row in mine) == list(range(32))
    truth = np.load(files["toy"])["labels"]
    found = [(truth[int(row["row"])], int(row["cluster"])) for row in mine]
    table = np.zeros((3, 3))
    np.add.at(table, tuple(np.array(found).T), 1)
    purity = read_summary(job[0])["metrics"]["purity"]["per_seed"][1]
    assert table.max(axis=0).sum() / 32 == pytest.approx(purity)


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_pictures_and_no_leftovers(job):
    folder, _ = job
    names = {"summary.json", "rounds.csv", "labels.csv", "flags.txt", "curves.png"}
    names |= {"report.html", "data.json", ".lock"}
    assert {path.name for path in folder.iterdir()} == names
    assert is_png(folder / "curves.png")


def test_the_table_shows_the_references_in_both_ways(job):
    folder, out = job
    lines = out.splitlines()
    assert "2 clients with all views, 8 samples each, 16 in all" in lines
    assert sum(line.startswith(("   3 ", "   4 ")) for line in lines) == 4
    for name in ("e_fkmvc", "no collaboration", "pooled k-means"):
        assert sum(line.startswith(f"{name}  ") for line in lines) == 2, name
    assert any(line.startswith("pooled labels, one matching") for line in lines)
    assert any(line.startswith("mean over clients, each matched") for line in lines)
    mean = read_summary(folder)["metrics"]["acc"]["mean"]
    (first, _) = (line for line in lines if line.startswith("e_fkmvc  "))
    assert first.split()[1] == f"{mean:.3f}"
    assert str(folder) in lines[-1]


@pytest.mark.slow
def test_flags_txt_runs_the_job_again_to_the_same_bits(job, tmp_path):
    """In a process of its own, with the progress bar, which changes nothing."""
    folder, _ = job
    again = tmp_path / "again"
    code, _, err = binaries.alone(
        "experiments.run",
        f"--flagfile={folder / 'flags.txt'}",
        f"--output_dir={again}",
        "--progress",
    )
    assert code == 0, err
    # Which of the programs the bar is seen to wait for depends on how long each of them takes.
    assert re.search(r"compiling \d+ of ", err) and "100%" in err and "Traceback" not in err
    assert (again / "rounds.csv").read_text() == (folder / "rounds.csv").read_text()
    first, second = read_summary(folder), read_summary(again)
    for key in first.keys() - {"seconds", "command"}:
        assert first[key] == second[key], key
    kept = [(path / "flags.txt").read_text().splitlines() for path in (folder, again)]
    assert set(kept[0]) ^ set(kept[1]) == {"--noprogress", "--progress"}


@pytest.mark.slow
def test_without_labels_nothing_is_scored(files, tmp_path):
    folder = tmp_path / "results"
    code, out, _ = launch(
        *TINY,
        f"--dataset={files['unlabelled']}",
        "--n_clusters=2",
        "--rounds=1",
        "--participation=0.5,1",
        f"--output_dir={folder}",
    )
    assert code == 0
    assert "no labels, no scores" in out and "ACC" not in out
    table = out.split("no labels, no scores")[1]
    assert re.search(r"\npooled k-means +-?\d\.\d+ +\d", table)
    sizes = re.search(r"rows of each cluster, seed \d+: ([\d, ]+)", table)[1]
    assert sum(map(int, sizes.split(", "))) == len(read_rows(folder / "labels.csv"))
    summary, (row,) = read_summary(folder), read_rows(folder / "rounds.csv")
    assert summary["metrics"] == {} and summary["n_clusters"] == 2
    assert np.isnan(float(row["all/pooled/acc"])) and np.isfinite(float(row["loss"]))


def test_bytes_of_fmcsc_by_hand():
    """Two clients with all views train all three models; two clients one model each."""
    config = FMCSCConfig(3, hidden=(), latent_dim=4, head_hidden=8)

    def size(kind):
        model = jax.eval_shape(lambda key: init_model(key, config, DIMS, kind), jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(model))

    parts = data.hybrid_partition(0, n_samples=32, n_views=2, n_clients=4, ratio=(1, 1))
    federation = Federation.from_arrays([np.zeros((32, d)) for d in DIMS], partition=parts)
    full, first, second = size((0, 1)), size((0,)), size((1,))
    down = 4 * (2 * (full + first + second) + first + second)
    n_weights = 2 * 3 + 2
    found = engine.traffic(fmcsc(config), federation)["round"]
    assert found == (down + 4 * n_weights, down)


# --- Bad input ------------------------------------------------------------------------------------

# Flags, with names of `files` in braces, and what the line must tell.
BAD = {
    "unknown data set": (["--dataset=nonsense"], "unknown data set 'nonsense'.*digits.*mnist_usps"),
    "absent named set": (
        ["--dataset=bdgp", "--data_dir={folder}"],
        "bdgp: no BDGP.npz/.mat in .*some where, .*data; get BDGP.mat of .*, and put it there",
    ),
    "absent file": (["--dataset={folder}/absent.npz"], "absent.npz: no such file"),
    "unequal rows": (["--dataset={ragged}"], r"views must have the same .* rows; got \[32, 31\]"),
    "NaN": (["--dataset={holed}"], "view 1 has 1 values that are NaN"),
    "no labels and no K": (["--dataset={unlabelled}"], "give --n_clusters"),
    "skew without labels": (
        ["--dataset={unlabelled}", "--n_clusters=2", "--dirichlet=1.0"],
        "dirichlet needs labels",
    ),
    "more clients than samples": (["--n_clients=33"], "n_clients: got 33; allowed is 1 to 32"),
    "more clusters than samples": (
        ["--algorithm=fmcsc", "--samples_per_client=2"],
        r"client 0 \(views \(0, 1\)\) has 2 samples; allowed is 3",
    ),
    "more samples than there are": (
        ["--samples_per_client=9"],
        "samples_per_client: got 9; allowed is 1 to 8",
    ),
    "no multi-view client": (["--ratio=0:1"], "ratio 0:1 leaves no multi-view client"),
    "ratio of words": (["--ratio=many"], "ratio must be two whole numbers.*'many'"),
    "negative seed": (["--seed=-1"], "seed"),
    "seed beyond the key's range": (["--seed=8589934592"], "seed"),
    "more partial views than views": (
        ["--partial_views=2"],
        "partial_views: got 2; allowed is 1 to 1",
    ),
    "flagfile of no text": (["--flagfile={toy}"], "codec"),
    "unknown flag": (["--no_such_flag=1"], "no_such_flag: is no flag of e_fkmvc"),
    "misspelt flag": (["--fuzifier=1"], "did you mean --fuzzifier"),
    "absent flagfile": (["--flagfile={folder}/absent.flags"], "absent.flags"),
    "no flag at all": (["digits"], "unexpected arguments .*'digits'"),
    "unknown method": (["--algorithm=nothing"], "algorithm: got 'nothing'; allowed are .*fmcsc"),
    "misspelt method": (["--algorithm=e_fkvmc"], "got 'e_fkvmc'; did you mean 'e_fkmvc'"),
    "misspelt set": (["--dataset=digitz"], "set 'digitz': did you mean 'digits'"),
    "a flag that went": (["--method=tucker"], "method: is no flag any more; give --algorithm="),
    "enum": (["--hkc=cosine"], "hkc=cosine.*bandwidth or minmax or absmean"),
    "no number": (["--n_clients=few"], "n_clients.*few"),
    "below the bound": (["--rounds=-1"], "rounds: got -1"),
    "chunk": (["--client_chunk=0"], "client_chunk: got 0"),
    "no cluster": (["--n_clusters=0"], "n_clusters"),
    "hidden": (["--algorithm=fmcsc", "--hidden=8,wide"], "hidden=8,wide"),
    "hidden of width zero": (["--algorithm=fmcsc", "--hidden=8,0"], r"hidden: got \(8, 0\)"),
    "components": (["--algorithm=fmcsc", "--components=ABZ"], "components: got 'ABZ'"),
    "learning rate": (["--algorithm=fmcsc", "--learning_rate=0"], r"learning_rate: got 0\.0"),
    "temperature": (["--algorithm=fmcsc", "--tau_m=nan"], "tau_m: got nan"),
    "nobody takes part": (["--participation=0"], r"participation: got .*\(0, 1\]"),
    "more than all take part": (["--participation=1.5"], "participation: got"),
    "three shares": (["--participation=1,1,1"], "participation: got '1.0,1.0,1.0'"),
    "nothing to assign by": (
        ["--algorithm=lmvsc", "--participation=0.5"],
        r"participation: got \(0.5,\) for lmvsc",
    ),
    "clients that come too late": (
        ["--participation=0.5", "--resample_participants"],
        "resample_participants: who was not in the setup of e_fkmvc adds nothing to its rounds",
    ),
    "columns of what is no file": (
        ["--dataset=unequal_0", "--labels=kind"],
        "labels, categories, missing: are for files; unequal_0 is none",
    ),
    "share of words": (["--participation=half"], "participation=half"),
    "a message that would be read": (
        ["--algorithm=e_fkmvc", "--ratio=1:0", "--secure_aggregation"],
        r"setup\[2\]: its server reads single messages",
    ),
    "counts beside a privacy that does not cover them": (
        ["--algorithm=private_e_fkmvc", "--ratio=1:0", "--until_stable=0.9"],
        "until_stable: epsilon of private_e_fkmvc covers no counts",
    ),
    "counts of clusters that are kept back": (
        [
            *("--algorithm=fmcsc", "--until_stable=0.9"),
            *("--centroids=federated", "--min_cluster_size=3"),
        ],
        "until_stable: min_cluster_size keeps small clusters back",
    ),
    "a round before the first": (["--keep_from=0"], "keep_from: got 0"),
    "a round after the last": (
        ["--algorithm=fmcsc", "--rounds=3", "--keep_from=4"],
        "keep_from: got 4 with 3 rounds",
    ),
    "sizes beside a privacy that does not cover them": (
        ["--algorithm=private_e_fkmvc", "--ratio=1:0", "--keep_from=2"],
        "keep_from: epsilon of private_e_fkmvc covers no cluster sizes",
    ),
    "clients that share nothing": (
        ["--algorithm=local_fmcsc", "--rounds=3", "--keep_from=2"],
        "keep_from: clients of local_fmcsc share no clusters",
    ),
    "checkpoints": (["--checkpoint_every=-3"], "checkpoint_every: got -3"),
    "bits without masks": (["--fraction_bits=8"], "fraction_bits: got 8; .*--secure_aggregation"),
    "clear phases without masks": (["--in_clear=finish"], "in_clear: got .*secure_aggregation"),
    "a reserved name": (
        ["--algorithm=lsimvc", "--lambda=-1"],
        r"lam \(--lambda\): got",
    ),
    "a mesh of rows": (["--mesh=rows:2"], "mesh: got 'rows:2'"),
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [((0.9,), [5, 3, 2]), ((0.5,), [3, 2, 1]), ((1.0, 0.1), [6, 1, 1]), ((1.0,), [6, 3, 3])],
)
def test_a_share_counts_over_all_partial_clients(given, expected):
    parts = data.hybrid_partition(0, n_samples=48, n_views=2, n_clients=12, ratio=(1, 1))
    views = [np.zeros((48, d)) for d in DIMS]
    federation = Federation.from_arrays(views, partition=parts)
    shares = runner.participation_shares(federation, command.JobSettings(participation=given))
    taking_part = engine.draw_participants(federation, jax.random.key(0), shares)
    assert [len(places) for places in taking_part] == expected


def test_rows_of_a_table_that_lack_a_view_are_hybrid_clients(tmp_path):
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.random((12, 4)), columns=["a0", "a1", "b0", "b1"])
    table.loc[8:, ["b0", "b1"]] = np.nan
    table["kind"], table["name"] = ["x", "y"] * 6, [f"p{i}" for i in range(12)]
    table.to_csv(tmp_path / "mine.csv", index=False)
    given = [
        f"--dataset={tmp_path / 'mine.csv'}",
        "--views=a=a*;b=b*",
        "--labels=kind",
        "--id=name",
    ]
    job = runner.prepare(command.parse([*TINY, *given]))
    (problem,) = job.problems
    assert [(c.view_ids, c.n_clients) for c in job.federation.cohorts] == [((0, 1), 3), ((0,), 1)]
    assert job.n_clusters == 2 and problem.rows[3] == "p3"
    assert "4 of 12 rows lack a view" in problem.notes
    agents = runner.prepare(command.parse(["--algorithm=feddmvc", *given]))
    assert [int(c.mask.sum()) for c in agents.federation.cohorts] == [12, 8]
    assert problem.view_names == agents.problems[0].view_names == ("a", "b")
    for algorithm, more, text in (
        ("e_fkmvc", "--dirichlet=1.0", "dirichlet, samples_per_client: are for data whose rows"),
        ("feddmvc", "--hybrid=1:1", "hybrid: got '1:1'; the data say who lacks what already"),
        ("feddmvc", "--split=features", "split: rows lack views"),
        ("mgcd", "--split=views", "its samples differ .* it has 8 and the first 12"),
    ):
        with pytest.raises(ValueError, match=text):
            runner.prepare(command.parse([f"--algorithm={algorithm}", *given, more]))


def test_a_file_that_becomes_several_clients_is_named_with_them(tmp_path):
    pytest.importorskip("pandas")
    (tmp_path / "x.csv").write_text("a,b\n1,2\n3,\n5,6\n")
    (tmp_path / "y.csv").write_text("a,b\n1,2\n,4\n5,6\n")
    given = [f"--dataset={tmp_path}", "--views=a=a;b=b", "--n_clusters=2"]
    (problem,) = runner.prepare(command.parse([*TINY, *given])).problems
    assert "files, a client each: 0 x.csv, 1 y.csv" in problem.notes
    (note,) = [note for note in problem.notes if "a client for each kind" in note]
    assert note.endswith("kind: file 0 clients 0, 1; file 1 clients 2, 3")
    owners = {
        int(client): set(ids[ids >= 0] // 3)
        for cohort in problem.federation.cohorts
        for client, ids in zip(cohort.client_ids, np.asarray(cohort.sample_ids), strict=True)
    }
    assert owners == {0: {0}, 1: {0}, 2: {1}, 3: {1}}


def test_settings_of_data_are_given_by_name():
    with pytest.raises(ValueError, match="views: got 'digits'"):
        DataSettings("digits")  # not by name
    found = command.parse(["--algorithm=mgcd", "--dataset=digits", "--data_dir=here"]).data
    assert (found.dataset, found.data_dir, found.views) == ("digits", "here", None)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAXFEDMVC_DATA", raising=False)
    arguments, expected = BAD[case]
    arguments = [argument.format(**files) for argument in arguments]
    code, out, err = launch(
        *TINY, f"--dataset={files['toy']}", *arguments, f"--output_dir={tmp_path / 'results'}"
    )
    assert_one_line(code, out, err, expected)
    assert not list(tmp_path.iterdir())


def assert_one_line(code, out, err, expected):
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
    with pytest.raises(ValueError, match=expected):
        raise ValueError(err)


def test_a_folder_that_cannot_be_made(files, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "results"
    code, out, err = launch(*TINY, f"--dataset={files['toy']}", f"--output_dir={folder}")
    assert_one_line(code, out, err, f"output_dir: cannot write to '{folder}'")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pictures.unpainted()
def test_a_number_of_clusters_that_a_method_does_not_take_is_said(files, tmp_path):
    more = ["--n_clusters=2", "--noprogress", f"--output_dir={tmp_path / 'out'}"]
    code, out, _ = launch("--algorithm=label_consensus", f"--dataset={files['toy']}", *more)
    assert code == 0
    assert "label_consensus finds the number of shared clusters itself; 2 is that of the" in out
    assert "--shared_clusters sets its own" in out
    assert "found by the method" in (tmp_path / "out" / "report.html").read_text()


@pictures.unpainted()
def test_the_page_says_a_number_of_shared_clusters_that_was_given(files, tmp_path):
    more = ["--shared_clusters=3", "--noprogress", f"--output_dir={tmp_path / 'out'}"]
    code, _, _ = launch("--algorithm=label_consensus", f"--dataset={files['toy']}", *more)
    page = (tmp_path / "out" / "report.html").read_text()
    assert code == 0 and "found by the method" not in page


@pictures.unpainted()
def test_a_model_that_turned_nan_is_said_to_have_failed(files, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "has_nan", lambda states: True)
    more = ["--algorithm=local_kmeans", "--seeds=2", f"--output_dir={tmp_path / 'out'}"]
    more.append("--rounds=1")
    code, out, _ = launch(*TINY, f"--dataset={files['toy']}", *more)
    assert code == 0
    for seed in (0, 1):
        assert f"seed {seed}: failed, NaN in the model; no row is in any cluster" in out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert "rounds: local_kmeans exchanges nothing in them" in out
    assert summary["metrics"] == {}  # no number of which there would be a mean
    assert summary["groups"]["local_kmeans"]["internal"] == {} and summary["failed"] == [0, 1]
    assert "failed, and in no mean: seed 0, seed 1\n" in out
    alone = summary["groups"]["no collaboration"]["all"]["per_client"]["acc"]["per_seed"]
    assert min(alone) > 0
    assert "pooled k-means on H" not in summary["groups"]
    clusters = (tmp_path / "out" / "labels.csv").read_text().split()[1:]
    assert {line.split(",")[-1] for line in clusters} == {"-1"}


@pictures.unpainted()
def test_masked_sums_are_checked_where_clusters_are_found_too(files, tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(runner, "check_masked_sums", lambda job, info: checked.append(info))
    more = ["--algorithm=local_kmeans", f"--output_dir={tmp_path / 'out'}"]
    assert launch(*TINY, f"--dataset={files['toy']}", *more)[0] == 0
    assert len(checked) == 2  # before the rounds, of which there are none, and after them


def test_nan_is_found_in_trees_with_keys():
    tree = {"key": jax.random.key(0), "n": np.arange(3), "x": np.ones(2)}
    assert not checks.has_nan(tree)
    assert checks.has_nan(tree | {"y": jnp.array([1.0, np.nan])})


def test_results_are_not_overwritten(files, job):
    folder, _ = job
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, out, err = launch(*TINY, f"--dataset={files['toy']}", f"--output_dir={folder}")
    assert_one_line(code, out, err, "output_dir: .* holds results already")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_help_shows_the_settings_of_the_method_and_leaves():
    code, out, _ = launch("--algorithm=vertcohirf", "--help")
    assert code == 0
    for text in ("--relaxed", "--level", "--overlap", "--rounds", "Threshold of the relaxed"):
        assert text in out, text
    assert "--dirichlet" not in out  # its agents hold the same samples


# --- Presets --------------------------------------------------------------------------------------

# Of the paper's table 4 and appendix D.2: data set, clients, local epochs.
PAPER = {
    "mnist_usps": ("mnist_usps", 24, 25),
    "bdgp": ("bdgp", 12, 10),
    "multi_fashion": ("multi_fashion", 48, 25),
    "nuswide": ("nuswide", 24, 25),
}


def parsed(*names):
    return command.parse([f"--flagfile={PRESETS / name}.flags" for name in names])


def test_every_preset_is_known():
    ours = {"best", "best_digits", "best_images", "best_multi_fashion", "quick", "digits"}
    assert {path.stem for path in PRESETS.iterdir()} == set(PAPER) | ours


@pytest.mark.parametrize("name", PAPER)
def test_a_preset_is_the_papers_setting(name):
    dataset, n_clients, local_epochs = PAPER[name]
    found = parsed(name)
    assert found.data.dataset == dataset and dataset in data.names()
    assert (found.split.n_clients, found.split.ratio, found.rounds) == (n_clients, "1:1", 5)
    assert (found.split.samples_per_client, found.split.dirichlet) == (None, None)
    assert found.config(10, n_clients) == FMCSCConfig(10, local_epochs=local_epochs)
    assert found.hyperparams() == FMCSCHyperparams()


def test_the_best_preset_lies_over_a_sets_own():
    found = parsed("bdgp", "best")
    config = found.config(5, 12)
    assert (found.data.dataset, found.split.n_clients, found.rounds) == ("bdgp", 12, 5)
    assert (config.local_epochs, config.components) == (10, "ABCD")
    assert (config.partial_models, config.centroids) == ("branch", "federated")
    assert not config.partial_rounds
    assert found.hyperparams().mask_rate == 0.3 and config.leader_epochs == 0


def test_every_method_can_be_parsed_from_nothing():
    for name in METHODS:
        found = command.parse([], algorithm=name)
        assert found.name == name
        found.config(3, 4), found.hyperparams()


def test_representations_of_different_widths_are_not_pooled():
    # Local k-means represents clients by their own views, which have different widths.
    narrow, wide = np.zeros((1, 2, 3)), np.zeros((1, 2, 4))
    assert has_one_width([narrow, narrow])
    assert not has_one_width([narrow, wide]) and not has_one_width(None)


def test_methods_that_need_all_views_have_them_by_default():
    for name, method in METHODS.items():
        if method.topology != "vertical":
            ratio = command.parse([f"--algorithm={name}"]).flags["ratio"].value
            assert ratio == "1:0" or not method.complete
    given = command.parse(["--algorithm=lmvsc", "--ratio=1:1"])
    assert given.flags["ratio"].value == "1:1"


def test_a_view_that_is_the_same_in_all_rows_is_named(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", view_0=rng.normal(size=(20, 3)), view_1=np.ones((20, 2)))
    job = command.parse(["--algorithm=lsimvc", f"--dataset={tmp_path}/a.npz", "--n_clusters=2"])
    (problem,) = load_clients(job.data, job.split, [0])
    assert "view 1 is the same in all rows: leave it out" in problem.notes


def test_a_private_run_says_what_it_spent():
    told = {"kind": "noise", "epsilon": 7.994, "delta": 1e-5, "covered": "sums"}
    (line,) = report._of_privacy({"privacy": told})
    assert line == "noise: epsilon 7.99, delta 1e-05; it covers sums (what else: summary.json)"
    assert "epsilon infinite" in next(report._of_privacy({"privacy": told | {"epsilon": None}}))
    assert not list(report._of_privacy({"privacy": {"kind": "none"}}))
    assert not list(report._of_privacy({}))


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) > 8, reason="a device for each core would be too many")
def test_factorisations_end_on_as_many_devices_as_there_are_cores(tmp_path):
    n = max(2, os.cpu_count() or 1)
    clients = ("--ratio=1:0", f"--n_clients={2 * n}", "--samples_per_client=20")
    code, _, err = binaries.alone(
        "experiments.run",
        *("--algorithm=hcp_imsc", "--dataset=digits", *clients, f"--mesh=clients:{n}"),
        *("--noprogress", f"--output_dir={tmp_path / 'out'}"),
    )
    assert code == 0, err
