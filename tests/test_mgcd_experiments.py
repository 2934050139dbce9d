"""MGCD's binary and the tables made of its runs, from their flags to their files."""

import csv
import json

import numpy as np
import pytest

from experiments import mgcd_runs, mgcd_tables
from experiments import reproduce_vertical as reproduce
from jaxfedmvc.algorithms.mgcd import MGCDConfig, MGCDHyperparams
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.federation import Federation
from tests.helpers import binaries

COMMON = ("--compilation_cache=", "--noprogress")
PICTURES = {"graph.png", "embedding.png", "curves.png"}


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Two views, of different width, of three well separated groups."""
    rng = np.random.default_rng(0)
    labels = np.arange(45) % 3
    views = {
        f"view_{v}": (rng.normal(size=(45, d)) + 20 * np.eye(3, d)[labels]).astype(np.float32)
        for v, d in enumerate((3, 5))
    }
    path = tmp_path_factory.mktemp("data") / "toy.npz"
    np.savez(path, labels=labels, **views)
    return path


@pytest.fixture(scope="module")
def job(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job") / "out"
    code, out, err = binaries.alone(
        "experiments.mgcd",
        *COMMON,
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


def test_a_job_finds_the_groups_and_says_so(job):
    folder, out = job
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metrics"]["acc"]["per_seed"] == [1.0, 1.0]
    assert set(mgcd_runs.REFERENCES) < set(summary["rows"])
    assert "1.000 +- 0.000" in out and "MB" in out
    assert {path.name for path in folder.iterdir()} >= PICTURES | {"flags.txt", "labels.csv"}


def test_every_round_has_a_row_with_losses_scores_and_bytes(job):
    folder, _ = job
    rows = rows_of(folder / "rounds.csv")
    assert {row["seed"] for row in rows} == {"0", "1"}
    for row in rows:
        assert float(row["server_loss"]) < float("inf") and float(row["client_loss"]) >= 0
        assert float(row["consistency/acc"]) == 1.0 and float(row["separation"]) > 1
        # Two factors of N x d and d x N for each view; d is 3 and 5.
        assert int(row["bytes_up"]) == 2 * 45 * (3 + 5) * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--losses=r,x",), "losses: got"),
        (("--transport=dense", "--memory_limit=1e-5"), "dense=False"),
        (("--lambda=-1",), "lambda: got -1.0; allowed is a finite number 0 or more"),
    ],
)
def test_bad_input_is_one_line(toy, tmp_path, arguments, message):
    folder = tmp_path / "never"
    code, _, err = binaries.alone(
        "experiments.mgcd", *COMMON, f"--dataset={toy}", f"--output_dir={folder}", *arguments
    )
    assert code == 2 and message in err and "Traceback" not in err
    assert not folder.exists()


# --- Tables -----------------------------------------------------------------------------------


def tiny(mode):
    return mgcd_tables.Setting(
        mode,
        {
            "server": "average",
            "hidden": (4,),
            "latent_dim": 2,
            "pretrain_epochs": 1,
            "local_epochs": 1,
            "n_init": 1,
        },
        rounds=1,
    )


def test_cells_run_once_and_are_read_back(toy, tmp_path, monkeypatch):
    monkeypatch.setitem(mgcd_tables.SETS, "Mfeat", str(toy))
    path, cells = tmp_path / "runs.csv", {"Mfeat": {"MGCD, literal, average": tiny("literal")}}
    reproduce.FLAGS.set_default("progress", False)
    reproduce.FLAGS.mark_as_parsed()
    first = mgcd_tables.run_cells(cells, [0, 1], path)
    size = path.stat().st_size
    again = mgcd_tables.run_cells(cells, [0, 1], path)
    assert path.stat().st_size == size and first == again
    found = mgcd_tables.summarise(again, list(mgcd_tables.published(2)))
    assert [row["row"] for row in found][:2] == ["paper: MGCD", "paper: FedDMVC"]
    by_row = {row["row"]: row for row in found}
    assert by_row["paper: MGCD"]["acc"] == 0.939
    assert by_row["MGCD, literal, average"]["seeds"] == 2
    assert by_row["k-means, all views"]["acc"] == 1.0
    assert len(list(mgcd_tables.lines(found))) == 1 + len(found)


def test_what_the_tables_are_made_of():
    for table in (2, 3, 4):
        for settings in mgcd_tables.cells(table, None, [], []).values():
            for setting in settings.values():
                setting.settings(3), setting.numbers()  # every one is a valid configuration
    assert list(mgcd_tables.cells(2, None, ["Mfeat"], ["MGCD; literal"])["Mfeat"]) == [
        "MGCD, literal"
    ]
    with pytest.raises(ValueError, match="methods: got 'nothing'"):
        mgcd_tables.cells(3, None, [], ["nothing"])
    with pytest.raises(ValueError, match="sets: got 'here'"):
        mgcd_tables.cells(2, None, ["here"], [])
    assert mgcd_tables.ablation(3)["literal: without L_cl"].settings(2).losses == ("r", "s", "dd")


@pytest.mark.parametrize(
    "arguments", [("--table=2,3",), ("--table=5",), ("--figure=1",), ("--table=2", "--figure=3")]
)
def test_tables_and_figures_that_there_are_not(arguments, tmp_path):
    code, _, err = binaries.launch(
        reproduce, *COMMON, "--paper=mgcd", f"--output_dir={tmp_path / 'never'}", *arguments
    )
    assert code == 2 and "allowed for mgcd" in err


def test_a_program_is_compiled_once_for_seeds_and_hyperparameters():
    rng = np.random.default_rng(0)
    views = [rng.normal(size=(20, 3)).astype(np.float32) for _ in range(2)]
    federation = Federation.from_arrays(views, partition=vertical_partition(20, 2))
    program = mgcd_runs.Program(MGCDConfig(2, server="average", n_neighbours=3, n_init=1))
    for seed, ridge in ((0, 1.0), (1, 2.0)):
        run = program.run(federation, None, seed, 1, MGCDHyperparams(ridge=ridge))
        assert np.isnan(run.rounds[0]["consistency/acc"]) and set(run.labels) == {0, 1}
    assert program._round._cache_size() == 1
