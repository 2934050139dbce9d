"""Binaries, from their flags to their files; bad input ends in one line and leaves nothing."""

import csv
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import app, flags
from absl.testing import flagsaver

from experiments import common
from experiments import fmcsc as binary
from jaxfedmvc import Federation, data, engine
from jaxfedmvc.algorithms import FMCSCConfig, FMCSCHyperparams
from jaxfedmvc.algorithms.fmcsc.model import init_model
from tests.helpers import binaries

ROOT = Path(__file__).parents[1]
PRESETS = ROOT / "experiments" / "presets"
FLAGS = flags.FLAGS
DIMS = (4, 3)
METRICS = {"acc", "nmi", "ari", "purity"}
TINY = (
    "--hidden=",
    "--latent_dim=4",
    "--head_hidden=8",
    "--pretrain_epochs=2",
    "--local_epochs=2",
    "--distill_epochs=2",
    "--n_init=2",
    "--n_clients=4",
    "--compilation_cache=",
    "--noprogress",
)

app.define_help_flags()  # else the first launch defines them, and restoring flags removes them


def launch(*arguments):
    return binaries.launch(binary, *arguments)


def spawn(*arguments):
    """The same in a process of its own."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "experiments.fmcsc", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


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
    done = spawn(
        *TINY,
        f"--dataset={files['toy']}",
        "--rounds=2",
        "--seeds=2",
        "--seed=3",
        f"--compilation_cache={tmp_path_factory.mktemp('cache')}",
        f"--output_dir={folder}",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder, done.stdout


def read_summary(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "summary.json").read_text(), parse_constant=refuse)


def read_rounds(folder):
    with (folder / "rounds.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_summary(job):
    summary = read_summary(job[0])
    expected = {
        "algorithm": "fmcsc",
        "dataset": "toy",
        "n_clients": 4,
        "n_clusters": 3,
        "rounds": 2,
        "seeds": [3, 4],
    }
    assert {key: summary[key] for key in expected} == expected
    assert set(summary["metrics"]) == METRICS
    for name, statistics in summary["metrics"].items():
        values = statistics["per_seed"]
        assert len(values) == 2
        assert all((-1 if name == "ari" else 0) <= value <= 1 for value in values)
        assert statistics["mean"] == pytest.approx(np.mean(values))
        assert statistics["std"] == pytest.approx(np.std(values))
    assert set(summary["seconds"]) == {"compile", "run"} and min(summary["seconds"].values()) > 0
    assert "cpu" in summary["device"] and summary["versions"]["jax"] == jax.__version__
    assert {"no collaboration", "pooled k-means", "fmcsc"} <= set(summary["groups"])


def test_bytes_of_a_round_by_hand(job):
    """Two clients with all views train all three models; two clients one model each."""
    config = FMCSCConfig(3, hidden=(), latent_dim=4, head_hidden=8)

    def size(kind):
        model = jax.eval_shape(lambda key: init_model(key, config, DIMS, kind), jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(model))

    full, first, second = size((0, 1)), size((0,)), size((1,))
    down = 4 * (2 * (full + first + second) + first + second)
    n_weights = 2 * 3 + 2
    found = read_summary(job[0])["bytes_per_round"]
    assert found == {"up": down + 4 * n_weights, "down": down}


def test_rounds_have_a_row_for_each_round_of_each_seed(job):
    rows, summary = read_rounds(job[0]), read_summary(job[0])
    assert [(r["seed"], r["round"]) for r in rows] == [
        ("3", "1"),
        ("3", "2"),
        ("4", "1"),
        ("4", "2"),
    ]
    for row in rows:
        assert np.isfinite([float(row[f"all/pooled/{name}"]) for name in METRICS]).all()
        assert np.isfinite([float(row[key]) for key in row if key.startswith("loss")]).all()
        assert np.isnan(float(row["non_participating/pooled/acc"]))  # there are none
    last = [float(row["all/pooled/acc"]) for row in rows if row["round"] == "2"]
    assert last == pytest.approx(summary["metrics"]["acc"]["per_seed"])


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_pictures_and_no_leftovers(job):
    folder, _ = job
    assert {path.name for path in folder.iterdir()} == {
        "summary.json",
        "rounds.csv",
        "flags.txt",
        "curves.png",
        "embedding.png",
    }
    assert is_png(folder / "curves.png") and is_png(folder / "embedding.png")


def test_the_table_shows_the_references_in_both_ways(job):
    folder, out = job
    lines = out.splitlines()
    assert "2 clients with all views, 8..8 samples each, 16 in all" in lines
    assert sum(line.startswith(("   3 ", "   4 ")) for line in lines) == 4
    shown = [line.split("|")[0].strip() for line in lines]
    for name in ("fmcsc", "no collaboration", "pooled k-means"):
        assert shown.count(name) == 2, name
    assert any(line.startswith("pooled labels, one matching") for line in lines)
    assert any(line.startswith("mean over clients, each matched") for line in lines)
    mean = read_summary(folder)["metrics"]["acc"]["mean"]
    assert lines[shown.index("fmcsc")].split("|")[1].split()[0] == f"{mean:.3f}"
    assert str(folder) in lines[-1]


def test_flags_txt_runs_the_job_again_to_the_same_bits(job, tmp_path):
    """With the progress bar, which changes nothing."""
    folder, _ = job
    again = tmp_path / "again"
    done = spawn(f"--flagfile={folder / 'flags.txt'}", f"--output_dir={again}", "--progress")
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stderr and "Traceback" not in done.stderr
    assert (again / "rounds.csv").read_text() == (folder / "rounds.csv").read_text()
    first, second = read_summary(folder), read_summary(again)
    for key in first.keys() - {"seconds"}:
        assert first[key] == second[key], key
    kept = [(path / "flags.txt").read_text().splitlines() for path in (folder, again)]
    assert set(kept[0]) ^ set(kept[1]) == {"--noprogress", "--progress"}


def test_without_labels_nothing_is_scored(files, tmp_path):
    folder = tmp_path / "results"
    code, out, _ = launch(
        *TINY,
        f"--dataset={files['unlabelled']}",
        "--n_clusters=2",
        "--rounds=1",
        "--components=ABC",
        "--participation=0.5,1",
        "--resample_participants",
        "--partial_models=branch",
        "--partial_rounds=false",
        "--centroids=federated",
        "--centroid_rounds=1",
        "--mask_rate=0.2",
        f"--output_dir={folder}",
    )
    assert code == 0
    assert "no labels: nothing is scored" in out and "k-means" not in out
    summary, (row,) = read_summary(folder), read_rounds(folder)
    assert summary["metrics"] == {} and summary["n_clusters"] == 2
    assert np.isnan(float(row["all/pooled/acc"])) and np.isfinite(float(row["loss"]))
    assert is_png(folder / "curves.png") and is_png(folder / "embedding.png")


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
    "more clients than samples": (["--n_clients=33"], "n_clients must be .* 1 to 32; got 33"),
    "more clusters than samples": (
        ["--samples_per_client=2"],
        r"client 0 \(views \(0, 1\)\) has 2 samples; allowed is 3",
    ),
    "more samples than there are": (["--samples_per_client=9"], "samples_per_client .* 1 to 8"),
    "no multi-view client": (["--ratio=0:1"], "ratio 0:1 leaves no multi-view client"),
    "ratio of words": (["--ratio=many"], "ratio must be two whole numbers.*'many'"),
    "negative seed": (["--seed=-1"], "seed"),
    "seed beyond the key's range": (["--seed=8589934592"], "seed"),
    "more partial views than views": (["--partial_views=2"], "partial_views must be .* 1 to 1"),
    "flagfile of no text": (["--flagfile={toy}"], "codec"),
    "unknown flag": (["--no_such_flag=1"], "Unknown command line flag 'no_such_flag'"),
    "absent flagfile": (["--flagfile={folder}/absent.flags"], "absent.flags"),
    "no flag at all": (["digits"], "unexpected arguments .*'digits'"),
    "enum": (["--contrast=cosine"], "contrast.*cosine.*paper.*ntxent"),
    "no number": (["--n_clients=few"], "n_clients.*few"),
    "below the bound": (["--rounds=0"], "rounds.*0"),
    "chunk": (["--client_chunk=0"], "client_chunk: got 0"),
    "no cluster": (["--n_clusters=0"], "n_clusters=0: 0 is not a positive integer"),
    "hidden": (["--hidden=8,wide"], "hidden: got '8,wide'"),
    "hidden of width zero": (["--hidden=8,0"], r"hidden: got \(8, 0\)"),
    "components": (["--components=ABZ"], "components: got 'ABZ'"),
    "learning rate": (["--learning_rate=0"], r"learning_rate: got 0\.0; allowed is above 0"),
    "temperature": (["--tau_m=nan"], "tau_m: got nan"),
    "nobody takes part": (["--participation=0"], r"participation: got .*\(0, 1\]"),
    "more than all take part": (["--participation=1.5"], "participation: got"),
    "three shares": (["--participation=1,1,1"], "participation: got '1,1,1'"),
    "share of words": (["--participation=half"], "participation: got 'half'"),
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [(["0.9"], [5, 3, 2]), (["0.5"], [3, 2, 1]), (["1", "0.1"], [6, 1, 1]), (["1.0"], [6, 3, 3])],
)
def test_a_share_counts_over_all_partial_clients(given, expected):
    parts = data.hybrid_partition(0, n_samples=48, n_views=2, n_clients=12, ratio=(1, 1))
    views = [np.zeros((48, d)) for d in DIMS]
    federation = Federation.from_arrays(views, partition=parts)
    with flagsaver.flagsaver(participation=given):
        FLAGS.mark_as_parsed()
        shares = common.participation_shares(federation)
    taking_part = engine.draw_participants(federation, jax.random.key(0), shares)
    assert [len(places) for places in taking_part] == expected


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAXFEDMVC_DATA", raising=False)
    arguments, told = BAD[case]
    arguments = [argument.format(**files) for argument in arguments]
    code, out, err = launch(
        *TINY, f"--dataset={files['toy']}", *arguments, f"--output_dir={tmp_path / 'results'}"
    )
    assert_one_line(code, out, err, told)
    assert not list(tmp_path.iterdir())


def assert_one_line(code, out, err, told):
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
    with pytest.raises(ValueError, match=told):
        raise ValueError(err)


def test_a_folder_that_cannot_be_made(files, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "results"
    code, out, err = launch(*TINY, f"--dataset={files['toy']}", f"--output_dir={folder}")
    assert_one_line(code, out, err, f"output_dir: cannot write to '{folder}'")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_results_are_not_overwritten(files, job):
    folder, _ = job
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, out, err = launch(*TINY, f"--dataset={files['toy']}", f"--output_dir={folder}")
    assert_one_line(code, out, err, "output_dir: .* holds results already")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_bad_input_of_a_real_process(tmp_path):
    done = spawn("--dataset=digits", "--ratio=0:1", f"--output_dir={tmp_path / 'results'}")
    assert_one_line(done.returncode, done.stdout, done.stderr, "ratio 0:1")
    assert not list(tmp_path.iterdir())


# --- Presets --------------------------------------------------------------------------------------

# Of the paper's table 4 and appendix D.2: data set, clients, local epochs.
PAPER = {
    "fmcsc_mnist_usps": ("mnist_usps", 24, 25),
    "fmcsc_bdgp": ("bdgp", 12, 10),
    "fmcsc_multi_fashion": ("multi_fashion", 48, 25),
    "fmcsc_nuswide": ("nuswide", 24, 25),
}


def test_every_preset_is_known():
    ours = {"fmcsc_best", "fmcsc_best_multi_fashion", "fmcsc_quick", "fmcsc_digits"}
    assert {path.stem for path in PRESETS.iterdir()} == set(PAPER) | ours


@pytest.mark.parametrize("name", PAPER)
def test_a_preset_is_the_papers_setting(name):
    dataset, n_clients, local_epochs = PAPER[name]
    saved = flagsaver.save_flag_values()
    try:
        assert FLAGS(["fmcsc", f"--flagfile={PRESETS / name}.flags"]) == ["fmcsc"]
        assert FLAGS.dataset == dataset and dataset in data.names()
        assert (FLAGS.n_clients, FLAGS.ratio, FLAGS.rounds) == (n_clients, "1:1", 5)
        assert (FLAGS.samples_per_client, FLAGS.dirichlet) == (None, None)
        assert binary.config(10) == FMCSCConfig(10, local_epochs=local_epochs)
        assert binary.hyperparams() == FMCSCHyperparams()
    finally:
        flagsaver.restore_flag_values(saved)


def test_the_best_preset_lies_over_a_sets_own():
    saved = flagsaver.save_flag_values()
    try:
        FLAGS(
            [
                "fmcsc",
                *(f"--flagfile={PRESETS / name}.flags" for name in ("fmcsc_bdgp", "fmcsc_best")),
            ]
        )
        config = binary.config(5)
        assert (FLAGS.dataset, FLAGS.n_clients, FLAGS.rounds) == ("bdgp", 12, 5)
        assert (config.local_epochs, config.components) == (10, "ABCD")
        assert (config.partial_models, config.centroids) == ("branch", "federated")
        assert not config.partial_rounds
        assert binary.hyperparams().mask_rate == 0.3 and config.leader_epochs == 0
    finally:
        flagsaver.restore_flag_values(saved)


def test_work_of_a_round_of_two_exchanges():
    flagged = flagsaver.flagsaver(
        local_epochs=25, distill_epochs=50, leader_epochs=5, target="global", partial_rounds=False
    )
    with flagged:
        if not FLAGS.is_parsed():
            FLAGS.mark_as_parsed()
        cost = functools.partial(binary.cost, n_views=2)
        assert cost("setup", 2, 2) == 2 * 2 * 5
        assert [cost("round", phase, 2) for phase in (0, 1)] == [2 * 25, 2 * 50]
        assert [cost("round", phase, 1) for phase in (0, 1)] == [0, 0]
        FLAGS.partial_rounds = True
        assert [cost("round", phase, 1) for phase in (0, 1)] == [0, 25]
        FLAGS.partial_rounds, FLAGS.partial_models = False, "branch"  # one exchange
        assert (cost("round", 0, 2), cost("round", 0, 1)) == (2 * 25, 0)
        assert (cost("setup", 1, 2), cost("setup", 1, 1)) == (2 * FLAGS.pretrain_epochs, 0)


@pytest.mark.parametrize("components", ["ABCD", "ACD"])
def test_work_of_a_client_grows_with_its_views_and_epochs(components):
    """What the time left is reckoned from."""
    flagged = flagsaver.flagsaver(
        components=components, pretrain_epochs=250, local_epochs=25, distill_epochs=50
    )
    with flagged:
        if not FLAGS.is_parsed():
            FLAGS.mark_as_parsed()
        cost = functools.partial(binary.cost, n_views=2)
        assert cost("setup", 0, 2) == 2 * cost("setup", 0, 1) == 500
        assert cost("round", 0, 1) == 25
        assert cost("round", 0, 2) == 2 * (75 if "B" in components else 25)
