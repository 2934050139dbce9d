"""MGCD's binary, from its flags to its files."""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from experiments import run
from experiments.mgcd import hooks
from tests.experiments.mgcd.toy import save_toy
from tests.helpers import binaries

COMMON = ("--compilation_cache=", "--noprogress")
PICTURES = {"graph.png", "embedding.png", "curves.png"}


def launch(*arguments):
    return binaries.launch(functools.partial(run.main, algorithm="mgcd"), *COMMON, *arguments)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return save_toy(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def job(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job") / "out"
    code, out, err = launch(
        f"--dataset={toy}",
        f"--output_dir={folder}",
        "--seeds=2",
        "--server=trained",
        "--server_hidden=4",
        "--server_epochs=1",
        "--rounds=2",
        "--lambda=0.5",
        "--n_neighbours=5",
    )
    assert code == 0, err
    return folder, out


@pytest.mark.ci
def test_a_job_finds_the_groups_and_says_so(job):
    folder, out = job
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metrics"]["acc"]["per_seed"] == [1.0, 1.0]
    assert {"pooled k-means", hooks.BEST_VIEW, hooks.SPECTRAL} < set(summary["groups"])
    assert "1.000 +- 0.000" in out and "MB" in out
    assert {path.name for path in folder.iterdir()} >= PICTURES | {"flags.txt", "labels.csv"}


@pytest.mark.ci
def test_every_round_has_a_row_with_losses_scores_and_bytes(job):
    rows = pd.read_csv(job[0] / "rounds.csv")
    assert set(rows["seed"]) == {0, 1}
    assert np.isfinite(rows["server_loss"]).all() and (rows["loss"] >= 0).all()
    assert (rows["consistency/acc"] == 1).all() and (rows["separation"] > 1).all()
    # Two factors of N x d and d x N for each view; d is 3 and 5.
    assert (rows["bytes_up"] == 2 * 45 * (3 + 5) * 4).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--losses=r,x",), "losses: got"),
        (("--dense", "--memory_limit=1e-5"), "dense=False"),
        (("--transport=dense",), "give --dense"),
        (("--lambda=-1",), "got -1.0; allowed is a finite number, 0 or more"),
    ],
)
def test_bad_input_is_one_line(toy, tmp_path, arguments, message):
    folder = tmp_path / "never"
    code, _, err = launch(f"--dataset={toy}", f"--output_dir={folder}", *arguments)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not folder.exists()


def test_graphs_have_scores_where_there_are_labels():
    """Columns of NaN would be printed otherwise."""
    found, truth = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 0])
    server = {"of_each": 0.5, "labels": dict.fromkeys(hooks.REPORTED, found)}
    scored, plain = (
        hooks.HOOKS.columns([{"server": server}], SimpleNamespace(labels=labels))
        for labels in (truth, None)
    )
    assert [scored[f"{name}/acc"] for name in hooks.REPORTED] == [0.75] * len(hooks.REPORTED)
    assert plain and plain.keys() == {name for name in scored if "/" not in name}
