"""The binary of sweeps, in processes of its own: every algorithm's flags become its own."""

import contextlib
import csv
import importlib
import io
import json
import multiprocessing
import os
import re
import sys
import traceback

import jax
import numpy as np
import pytest
from absl import app, flags
from absl.testing import flagsaver

from experiments import base
from tests.helpers import kills

KILLS = 20
FMCSC = (
    "--hidden=",
    "--latent_dim=3",
    "--head_hidden=4",
    "--pretrain_epochs=2",
    "--local_epochs=2",
    "--n_init=2",
    "--n_clients=2",
    "--ratio=1:0",
    "--rounds=2",
    "--n_clusters=3",
    "--seeds=2",
    "--noprogress",
)
GRID = "--grid=tau_m=0.3,0.6; components=C,CD"


def call(binary, arguments):
    """Exit code, stdout and stderr of a binary, in this process."""
    module = importlib.import_module(f"experiments.{binary}")

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    app.define_help_flags()  # else the first launch defines them, and restoring flags removes them
    saved = flagsaver.save_flag_values()
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = [f"experiments.{binary}", *arguments]
    start = getattr(module, "launch", None) or (lambda: base.launch(module.main))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            start()
        except SystemExit as left:
            code = left.code or 0
    if set(saved) <= set(flags.FLAGS):
        flagsaver.restore_flag_values({n: saved.get(n) or _now(n) for n in flags.FLAGS})
    return code, out.getvalue(), err.getvalue()


def _now(name):
    """What a flag that a call has defined is put back to: its default."""
    flag = flags.FLAGS[name]
    flag.unparse()
    return flagsaver.save_flag_values()[name]


def calls(binary, lists, answers):
    for arguments in lists:
        try:
            answers.put(call(binary, arguments))
        except BaseException:
            answers.put((1, "", traceback.format_exc()))


def several(*lists):
    """`several_of` the binary of sweeps."""
    return several_of("sweep", *lists)


def several_of(binary, *lists):
    """Answers to several calls of one process, so that it imports and compiles once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(kills.PRELOAD)
    answers = context.Queue()
    process = context.Process(target=calls, args=(binary, lists, answers))
    process.start()
    found = [answers.get(timeout=300) for _ in lists]
    process.join()
    return found


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Flags of a small set of two views, and of a cache for programs."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    truth = np.arange(40) % 3
    views = {
        f"view_{v}": 3 * rng.normal(size=(3, 4))[truth] + rng.normal(size=(40, 4)) for v in (0, 1)
    }
    np.savez(folder / "toy.npz", labels=truth, **views)
    return f"--dataset={folder / 'toy.npz'}", f"--compilation_cache={folder / 'cache'}"


def rows_of(path):
    return list(csv.DictReader(path.open()))


def test_a_grid_of_settings_and_what_can_be_wrong_with_it(toy, tmp_path):
    folder = tmp_path / "out"
    job = (*FMCSC, *toy, GRID, f"--output_dir={folder}")
    wrong = {
        ("--algorithm=nope",): "algorithm: got 'nope'; allowed are coreset_kmeans, ",
        ("--grid=tau_x=1",): "no hyper-parameter 'tau_x'; allowed are learning_rate, tau_m, tau_p",
        ("--grid=tau_m=0.1,,0.3",): "grid: at character 11",
        ("--grid=tau_m=-1",): "tau_m: got -1.0; allowed is above 0",
        ("--grid=batch_size=small",): "grid: batch_size=small: ",
        ("--grid=n_clients=2,60",): "n_clients must be a whole number, 1 to 40; got 60",
        ("--random=3",): "random: there are no axes to draw from",
        ("--batch=0",): "batch: got '0'; allowed is auto, or a whole number",
        ("--mesh=rows:2",): "mesh: got 'rows:2'; allowed are sweep:m, clients:n",
        ("--coordinator=127.0.0.1:1",): "coordinator: --coordinator, --num_processes, --",
        ("--resume",): "resume: needs --output_dir",
        (GRID, f"--output_dir={folder}", "--resume", "--rounds=9"): "rounds (2 then, 9 now)",
        (GRID, f"--output_dir={folder}"): "holds results already",
    }
    shared = (*FMCSC, *toy)
    (code, out, err), (_, plan, _), *answers = several(
        job, (*shared, GRID, "--dry_run"), *((*shared, *more) for more in wrong)
    )
    assert code == 0, err
    for (code, _, err), message in zip(answers, wrong.values(), strict=True):
        assert code == 2 and err.count("\n") == 1 and err.startswith("error: ")
        assert message in err

    assert plan.startswith("8 runs, 2 compilations\n")
    cells = plan.splitlines()[-1].split()
    assert cells[:2] == ["1", "4"] and float(cells[-1]) > 0
    rows = rows_of(folder / "runs.csv")
    settings = [(row["tau_m"], row["components"], row["seed"]) for row in rows]
    # The two programs one after the other; every setting meets both seeds.
    assert settings == [(t, c, s) for c in ("C", "CD") for t in ("0.3", "0.6") for s in "01"]
    assert {row["status"] for row in rows} == {"ok"}
    assert len({row["loss"] for row in rows}) == 8
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["runs"] == 8 and summary["compilations_here"] == 2 and summary["failed"] == 0
    (first,) = (
        r for r in rows_of(folder / "summary.csv") if (r["tau_m"], r["components"]) == ("0.6", "CD")
    )
    mine = [float(row["acc"]) for row in rows if (row["tau_m"], row["components"]) == ("0.6", "CD")]
    assert float(first["acc_mean"]) == pytest.approx(np.mean(mine))
    assert float(first["acc_std"]) == pytest.approx(np.std(mine))
    assert {path.name for path in folder.iterdir()} == {
        "runs.csv",
        "batches.csv",
        "summary.csv",
        "summary.json",
        "flags.txt",
        "heatmap.png",
    }
    assert re.search(r"best by mean ACC \(needs labels\): tau_m=0\.\d, components=CD?: ", out)
    assert "first by silhouette (no labels): " in out


@pytest.mark.parametrize(
    ("algorithm", "more", "traced", "static"),
    [
        ("vertcohirf", ["--local_clusters=3"], "feature_share=0.5,1.0", "repetitions=1,2"),
        ("mgcd", ["--latent_dim=2", "--n_neighbours=5"], "ridge=0.1,10", "losses=r+s,r"),
    ],
)
def test_vertical_algorithms_are_swept_alike(toy, tmp_path, algorithm, more, traced, static):
    ((code, _, err),) = several(
        (
            f"--algorithm={algorithm}",
            f"--grid={traced}; {static}",
            "--seeds=2",
            "--noprogress",
            *toy,
            *more,
            f"--output_dir={tmp_path / 'out'}",
        )
    )
    assert code == 0, err
    rows = rows_of(tmp_path / "out" / "runs.csv")
    assert len(rows) == 8 and {row["status"] for row in rows} == {"ok"}
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["compilations_here"] == 2
    assert all(0.3 < float(row["acc"]) <= 1 for row in rows)
    assert all(3 <= float(row["clusters"]) <= 40 for row in rows)


def job(folder, *arguments):
    """Begins the sweep of the folder or goes on with it: what runs in processes that are killed."""
    begun = (folder / "flags.txt").exists()
    code, _, err = call("sweep", (*arguments, f"--output_dir={folder}", *["--resume"] * begun))
    if code:
        raise AssertionError(err)


def test_killed_at_random_moments_a_sweep_ends_with_the_same_bytes(toy, tmp_path):
    # Quick to trace and to compile: most processes are killed before they get far.
    grid = "--grid=n_clusters=2,3,4"
    arguments = ("--algorithm=local_kmeans", "--noprogress", *toy, grid, "--seeds=20", "--batch=1")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    kills.until_done(job, (whole, *arguments), 0, 0, whole / "batches.csv")
    lives = kills.until_done(job, (killed, *arguments), KILLS, 1, killed / "batches.csv", 0.01)
    print([life.changes for life in lives])
    assert len(lives) > 10 and sum(life.changes > 0 for life in lives[:-1]) > 3
    for name in ("runs.csv", "summary.csv", "flags.txt"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert len(rows_of(killed / "runs.csv")) == 60
    assert not [path for path in os.listdir(killed) if "partial" in path]
