"""VertCoHiRF's binary and its baselines', from their flags to their files."""

import csv
import functools
import json

import numpy as np
import pytest

from experiments import run
from experiments.lib.data import DataSettings, VerticalSettings, load_agents
from experiments.lib.references import internal_scores
from jaxfedmvc.algorithms.vertcohirf.hierarchy import Hierarchy
from jaxfedmvc.metrics import host
from tests.helpers import binaries

COMMON = ("--compilation_cache=", "--noprogress")


def launch(*arguments):
    main = functools.partial(run.main, algorithm="vertcohirf")
    return binaries.launch(main, *COMMON, *arguments)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Two views of three well separated groups."""
    rng = np.random.default_rng(0)
    labels = np.arange(30) % 3
    views = {f"view_{v}": rng.normal(size=(30, 3)) + 20 * np.eye(3)[labels] for v in range(2)}
    path = tmp_path_factory.mktemp("data") / "toy.npz"
    np.savez(path, labels=labels, **views)
    return path


@pytest.fixture(scope="module")
def job(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job") / "out"
    code, out, err = launch(
        f"--dataset={toy}", f"--output_dir={folder}", "--seeds=2", "--relaxed=0.8"
    )
    assert code == 0, err
    return folder, out


@pytest.mark.slow
def test_a_job_finds_the_groups_and_says_so(job):
    folder, out = job
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metrics"]["ari"]["per_seed"] == [1.0, 1.0]
    assert set(summary["groups"]) == {"vertcohirf", "no collaboration", "pooled k-means"}
    assert "vertcohirf" in out and "clusters" in out and "1.000 +- 0.000" in out


@pytest.mark.slow
def test_every_iteration_has_a_row_with_its_bits(job):
    folder, _ = job
    names = ("seed", "round", "active", "clusters")
    names += ("bits_labels", "bits_rankings", "bits_bound", "bytes_int32")
    rows = [{name: int(row[name]) for name in names} for row in rows_of(folder / "rounds.csv")]
    assert {row["seed"] for row in rows} == {0, 1}
    first = rows[0]
    assert (first["round"], first["active"], first["clusters"]) == (1, 30, 3)
    # Two agents, three labels of 2 bits; 30 ids of 5 bits; one link each way.
    assert first["bits_labels"] == 2 * 30 * 2 and first["bits_rankings"] == 2 * 30 * 5
    assert first["bits_bound"] >= first["bits_labels"] + first["bits_rankings"]
    assert first["bytes_int32"] == 2 * (30 + 30) * 4


@pytest.mark.slow
def test_the_hierarchy_is_left_in_three_forms(job):
    folder, _ = job
    hierarchy = Hierarchy.from_json(folder / "hierarchy_seed1.json")
    assert len(hierarchy.roots) == 3 and len(hierarchy.parents) == 30
    labels = [int(row["label"]) for row in rows_of(folder / "hierarchy_seed1.csv")]
    final = [int(r["agent_0"]) for r in rows_of(folder / "labels.csv") if r["seed"] == "1"]
    assert labels == final == hierarchy.labels().tolist()
    assert (folder / "hierarchy.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_arrays_of_one_size_give_the_same_hierarchy_and_a_level_cuts_it(job, toy, tmp_path):
    folder, _ = job
    path = tmp_path / "m"
    flags = ("--nocompact", "--relaxed=0.8", "--level=-1")
    code, _, err = launch(f"--dataset={toy}", f"--output_dir={path}", *flags)
    assert code == 0, err
    cut = [int(row["agent_0"]) for row in rows_of(path / "labels.csv")]
    assert sorted(cut) == list(range(30))  # before the first iteration everybody is alone
    masked = Hierarchy.from_json(path / "hierarchy.json")
    compacting = Hierarchy.from_json(folder / "hierarchy_seed0.json")
    np.testing.assert_array_equal(masked.parents, compacting.parents)


@pytest.mark.parametrize("name", ["distr_kmeans", "coreset_kmeans"])
@pytest.mark.slow
def test_baselines_run_under_the_same_binary(name, toy, tmp_path):
    path = tmp_path / "b"
    code, out, err = launch(f"--dataset={toy}", f"--output_dir={path}", f"--algorithm={name}")
    assert code == 0, err
    assert name in out and "MB up" in out
    assert not (path / "hierarchy.json").exists()
    assert json.loads((path / "summary.json").read_text())["bytes_setup"]["up"] > 0


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--base=0:dbscan"], "base: got '0:dbscan', which gives agent 1 None"),
        (["--base=7:dbscan,kmeans"], "allowed are the agents 0 to 1"),
        (["--algorithm=distr_kmeans", "--level=0"], "level: is no flag of distr_kmeans"),
        (["--max_iter=3"], "max_iter: is no flag any more; give --rounds"),
        (["--mode=masked"], "give --nocompact"),
        (["--level=-2"], "level: got -2"),
        (["--n_clusters=0"], "n_clusters"),
        (["--base=ward"], "base: got 'ward'"),
        (["--feature_share=0"], "feature_share: got 0; allowed is"),
        (["--repetitions=0"], "repetitions: got 0; allowed is 1 or more"),
        (["--relaxed=3"], "relaxed: got 3.0"),
        (["--n_candidates=0"], "n_candidates: got 0"),
        (["--eps=-1", "--base=dbscan"], "eps: got -1.0; allowed is a finite number above 0"),
        (["--split=features", "--agents=9"], "no features"),
        (
            ["--agents=5"],
            "agents: got 5, but each of the 2 views is an agent's; allowed is --split=",
        ),
        (["--overlap=0.2"], "overlap: is for features that are split, not for views"),
        (["--categorical=a", "--split=features"], "--categorical=a: allowed is whole numbers"),
        (["--algorithm=dpfmps", "--dp_epsilon=0"], "dp_epsilon: got 0.0"),
        (["--n_clusters=31", "--algorithm=distr_kmeans"], "30 samples; allowed is 31 or more"),
    ],
)
def test_bad_flags_end_in_one_line_and_leave_nothing(flags, line, toy, tmp_path):
    folder = tmp_path / "bad"
    code, _, err = launch(f"--dataset={toy}", f"--output_dir={folder}", *flags)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert line in err and not folder.exists()


@pytest.mark.slow
def test_a_set_without_labels_needs_no_k(toy, tmp_path):
    bare, path = tmp_path / "bare.npz", tmp_path / "o"
    with np.load(toy) as file:
        np.savez(bare, view_0=file["view_0"], view_1=file["view_1"])
    arguments = ("--local_clusters=3", "--relaxed=0.8")
    code, out, err = launch(f"--dataset={bare}", f"--output_dir={path}", *arguments)
    assert code == 0, err
    assert (
        "rows of each cluster, seed 0, agent 1: " in out and len(rows_of(path / "labels.csv")) == 30
    )
    code, _, err = launch(f"--dataset={bare}", "--repetitions=2")
    assert code == 2 and "local_clusters" in err


# --- Agents' data ---------------------------------------------------------------------------------


def test_rows_of_the_set_are_known_after_shuffling(toy):
    split = VerticalSettings(split="features", agents=2)
    problem = load_agents(DataSettings(dataset=str(toy)), split, seed=3)
    assert sorted(problem.rows) == list(range(30)) and problem.rows.tolist() != list(range(30))
    np.testing.assert_array_equal(problem.labels, problem.rows % 3)


def test_rows_that_repeat_others_are_counted(toy, tmp_path):
    with np.load(toy) as file:
        arrays = {name: np.concatenate([file[name], file[name][:4]]) for name in file.files}
    np.savez(tmp_path / "twice.npz", **arrays)
    settings = DataSettings(dataset=str(tmp_path / "twice.npz"))
    problem = load_agents(settings, VerticalSettings(split="features", agents=2), seed=0)
    assert len(problem.rows) == 30
    assert any(note.startswith("4 rows repeat the features of others") for note in problem.notes)
    rows, places = problem.repeats
    assert sorted(rows) == [30, 31, 32, 33]
    np.testing.assert_array_equal(problem.rows[places], rows - 30)


def test_split_features_standardises_and_deals_out(toy):
    problem = load_agents(
        DataSettings(dataset=str(toy)), VerticalSettings(split="features"), seed=0
    )
    assert [view.shape for view in problem.views] == [(30, 2)] * 3
    pooled = np.concatenate(problem.views, axis=1)
    np.testing.assert_allclose(pooled.std(axis=0), 1, atol=1e-5)


def test_scores_of_a_partition():
    problem = load_agents(DataSettings(dataset="multimodal"), VerticalSettings(), seed=0)
    truth = problem.labels[None]
    found = host.score(problem.federation, [truth, truth])["all"]["per_client"]
    assert (found["ari"], found["nmi"], found["acc"]) == (1, 1, 1)
    assert internal_scores(problem.federation, [truth, truth])["clusters"] == 6
    one = [np.zeros_like(truth)] * 2
    assert host.score(problem.federation, one)["all"]["per_client"]["ari"] == 0
    assert np.isnan(internal_scores(problem.federation, one)["silhouette"])
