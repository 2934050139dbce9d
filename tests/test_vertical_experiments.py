"""The binaries of vertical methods, from their flags to their files."""

import csv
import json
from unittest import mock

import numpy as np
import pytest
from absl import app, flags

from experiments import reproduce_vertical as reproduce
from experiments import vertcohirf, vertcohirf_attack, vertical
from experiments import vertcohirf_tables as tables
from jaxfedmvc.algorithms.vertcohirf.hierarchy import Hierarchy
from tests.helpers import binaries

FLAGS = flags.FLAGS
COMMON = ("--compilation_cache=", "--noprogress")

app.define_help_flags()


def launch(module, *arguments):
    return binaries.launch(module, *COMMON, *arguments)


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
        vertcohirf, f"--dataset={toy}", f"--output_dir={folder}", "--seeds=2", "--relaxed=0.8"
    )
    assert code == 0, err
    return folder, out


def test_a_job_finds_the_groups_and_says_so(job):
    folder, out = job
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metrics"]["ari"]["per_seed"] == [1.0, 1.0]
    assert set(summary["rows"]) == {
        "vertcohirf",
        "local k-means",
        "local k-means, agent 0",
        "local k-means, agent 1",
    }
    assert "vertcohirf" in out and "clusters" in out and "1.000 +- 0.000" in out


def test_every_iteration_has_a_row_with_its_bits(job):
    folder, _ = job
    rows = [{name: int(x) for name, x in row.items()} for row in rows_of(folder / "rounds.csv")]
    assert {row["seed"] for row in rows} == {0, 1}
    first = rows[0]
    assert (first["iteration"], first["active"], first["clusters"]) == (1, 30, 3)
    # Two agents, three labels of 2 bits; 30 ids of 5 bits; one link each way.
    assert first["bits_labels"] == 2 * 30 * 2 and first["bits_rankings"] == 2 * 30 * 5
    assert first["bits_bound"] >= first["bits_labels"] + first["bits_rankings"]
    assert first["bytes_int32"] == 2 * (30 + 30) * 4


def test_the_hierarchy_is_left_in_three_forms(job):
    folder, _ = job
    hierarchy = Hierarchy.from_json(folder / "hierarchy_seed1.json")
    assert len(hierarchy.roots) == 3 and len(hierarchy.parents) == 30
    labels = [int(row["label"]) for row in rows_of(folder / "hierarchy_seed1.csv")]
    final = [int(r["agent_0"]) for r in rows_of(folder / "labels.csv") if r["seed"] == "1"]
    assert labels == final == hierarchy.labels().tolist()
    assert (folder / "hierarchy.png").read_bytes()[:4] == b"\x89PNG"


def test_masked_mode_gives_the_same_hierarchy_and_a_level_cuts_it(job, toy, tmp_path):
    folder, _ = job
    code, out, _ = launch(
        vertcohirf,
        f"--dataset={toy}",
        f"--output_dir={tmp_path / 'm'}",
        "--mode=masked",
        "--relaxed=0.8",
        "--level=-1",
    )
    assert code == 0 and "level -1" in out and "one program" in out
    cut = [int(row["agent_0"]) for row in rows_of(tmp_path / "m" / "labels.csv")]
    assert sorted(cut) == list(range(30))  # before the first iteration everybody is alone
    masked = Hierarchy.from_json(tmp_path / "m" / "hierarchy.json")
    compacting = Hierarchy.from_json(folder / "hierarchy_seed0.json")
    np.testing.assert_array_equal(masked.parents, compacting.parents)


@pytest.mark.parametrize("name", ["distr_kmeans", "coreset_kmeans"])
def test_baselines_run_under_the_same_binary(name, toy, tmp_path):
    code, out, err = launch(
        vertcohirf, f"--dataset={toy}", f"--output_dir={tmp_path / 'b'}", f"--algorithm={name}"
    )
    assert code == 0, err
    assert name in out and "kB up" in out
    assert not (tmp_path / "b" / "hierarchy.json").exists()
    summary = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert summary["bytes_padded"]["setup"]["up"] > 0


@pytest.mark.parametrize(
    ("flags_", "line"),
    [
        (["--base=0:dbscan"], "base: got '0:dbscan', which gives agent 1 None"),
        (["--base=7:dbscan,kmeans"], "allowed are the agents 0 to 1"),
        (["--algorithm=distr_kmeans", "--level=0"], "level: distr_kmeans has no hierarchy"),
        (["--n_clusters=0"], "n_clusters"),
        (["--base=ward"], "base: got 'ward'"),
        (["--feature_share=0"], "feature_share: got 0.0; allowed is"),
        (["--repetitions=0"], "repetitions: got 0; allowed is 1 or more"),
        (["--relaxed=3"], "threshold: got 3.0"),
        (["--n_candidates=0"], "n_candidates: got 0"),
        (["--eps=-1", "--base=dbscan"], "eps: got -1.0; allowed is a finite number above 0"),
        (["--split=features", "--agents=9"], "an agent with no features|no features"),
        (["--categorical=a", "--split=features"], "categorical: got 'a'"),
        (["--algorithm=dpfmps", "--epsilon=0"], "epsilon: got 0.0"),
        (["--n_clusters=31", "--algorithm=distr_kmeans"], "30 samples; allowed is 31 or more"),
    ],
)
def test_bad_flags_end_in_one_line_and_leave_nothing(flags_, line, toy, tmp_path):
    folder = tmp_path / "bad"
    code, _, err = launch(vertcohirf, f"--dataset={toy}", f"--output_dir={folder}", *flags_)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert any(part in err for part in line.split("|")), err
    assert not folder.exists()


def test_rows_of_the_set_are_known_after_shuffling(toy):
    agents = vertical.load_agents(str(toy), 3, vertical.SplitOptions(2), split="features")
    assert sorted(agents.rows) == list(range(30)) and agents.rows.tolist() != list(range(30))
    np.testing.assert_array_equal(agents.labels, agents.rows % 3)


def test_a_set_without_labels_needs_no_k(toy, tmp_path):
    with np.load(toy) as file:
        np.savez(tmp_path / "bare.npz", view_0=file["view_0"], view_1=file["view_1"])
    code, out, err = launch(
        vertcohirf,
        f"--dataset={tmp_path / 'bare.npz'}",
        f"--output_dir={tmp_path / 'o'}",
        "--local_clusters=3",
        "--relaxed=0.8",
    )
    assert code == 0, err
    assert "local k-means" not in out and "vertcohirf" in out
    code, _, err = launch(vertcohirf, f"--dataset={tmp_path / 'bare.npz'}")
    assert code == 2 and "local_clusters: the data set has no labels" in err


def test_split_features_standardises_and_deals_out(toy):
    agents = vertical.load_agents(str(toy), 0, vertical.SplitOptions(3), split="features")
    assert [view.shape for view in agents.views] == [(30, 2)] * 3
    pooled = np.concatenate(agents.views, axis=1)
    np.testing.assert_allclose(pooled.std(axis=0), 1, atol=1e-5)


def test_scores_of_a_partition():
    agents = vertical.load_agents("multimodal", 0, vertical.SplitOptions())
    truth = agents.labels
    scores = vertical.rate(agents, [truth, truth])
    assert (scores["ari"], scores["nmi"], scores["acc"], scores["clusters"]) == (1, 1, 1, 6)
    one = vertical.rate(agents, [np.zeros_like(truth)] * 2)
    assert one["ari"] == 0 and np.isnan(one["silhouette"])


# --- The attack study -----------------------------------------------------------------------------


def test_attack_study_writes_every_trial_and_its_picture(tmp_path):
    folder = tmp_path / "attack"
    code, out, err = launch(
        vertcohirf_attack,
        f"--output_dir={folder}",
        "--samples=40",
        "--trials=5",
        "--batch=3",
        "--sigmas=0.05,1",
        "--attack_max_iter=3",
        "--attacks=inverse_ranking",
    )
    assert code == 0, err
    rows = rows_of(folder / "trials.csv")
    assert len(rows) == 2 * 2 * 5
    honest = [float(r["ari"]) for r in rows if (r["sigma"], r["variant"]) == ("0.05", "no attack")]
    summary = json.loads((folder / "summary.json").read_text())
    np.testing.assert_allclose(summary["ari"]["0.05"]["no attack"]["mean"], np.mean(honest))
    assert (folder / "attack.png").exists() and "paired by seed" in out


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--sigmas=a", "sigmas: got 'a'"),
        ("--attacks=nope", "attack: got 'nope'"),
        ("--sigmas=0", "sigmas: got '0'"),
    ],
)
def test_attack_study_refuses(flag, line, tmp_path):
    code, _, err = launch(vertcohirf_attack, f"--output_dir={tmp_path / 'a'}", flag)
    assert code == 2 and line in err
    assert not (tmp_path / "a").exists()


# --- Tables ---------------------------------------------------------------------------------------


def trial(method, seed, ari, silhouette, search="random:any"):
    return {
        "dataset": "coil-20",
        "method": method,
        "seed": seed,
        "search": search,
        "params": "{}",
        "ARI": json.dumps(ari),
        "Silhouette": json.dumps(silhouette),
        "clusters": "3",
    }


def test_table_by_hand():
    """Tuned takes the best agent-mean of the score, unsupervised that of the silhouette."""
    trials = [
        trial(tables.LOCAL, "0", [0.4, 0.2, 0.3], [0.1, 0.1, 0.1]),
        trial(tables.LOCAL, "0", [0.1, 0.1, 0.1], [0.2, 0.2, 0.2]),
        trial("Distr.KMeans", "0", [0.6, 0.6, 0.6], [0.0, 0.0, 0.0]),
        trial("Distr.KMeans", "0", [0.5, 0.5, 0.5], [0.3, 0.3, 0.3]),
        trial("Distr.KMeans", "0", [0.9, 0.9, 0.9], [0.0, 0.0, 0.0], "tpe:Silhouette"),
    ]
    rows = {row["method"]: row for row in tables.table("coil-20", "ARI", trials)}
    assert set(rows) == {tables.LOCAL, "Distr.KMeans"}
    row = rows["Distr.KMeans"]
    np.testing.assert_allclose(row["tuned_mean"], 0.6)
    np.testing.assert_allclose(row["tuned_diff"], np.median([0.2, 0.4, 0.3]))
    np.testing.assert_allclose(row["unsupervised_mean"], 0.5)
    np.testing.assert_allclose(row["unsupervised_diff"], 0.4)
    assert row["paper_collab_mean"] is not None
    assert any("Distr.KMeans" in line for line in tables.lines(list(rows.values())))


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_searches_keep_to_their_space_and_to_their_seed(kind):
    if kind == "tpe":
        pytest.importorskip("optuna", reason="the extra hpo is not installed")
    space = {"n_clusters": (2, 5, True), "feature_share": (0.1, 1.0, False)}

    def ask():
        search = tables.Search(kind, space, 0, "ARI")
        first = search.ask(3)
        search.tell([{"ARI": [float(p["n_clusters"])], "Silhouette": [0.0]} for p in first])
        return first + search.ask(2)

    settings = ask()
    assert settings == ask() and len(settings) == 5
    for p in settings:
        assert p["n_clusters"] in range(2, 6) and isinstance(p["n_clusters"], int)
        assert 0.1 <= p["feature_share"] <= 1.0


def test_trials_of_one_set_do_not_stand_for_another(tmp_path, monkeypatch):
    """Two sets in one file; a killed TPE search goes on as if it had not been."""
    pytest.importorskip("optuna", reason="the extra hpo is not installed")
    ran = []

    def evaluate(federation, key, settings):
        ran.append(len(settings))
        return [[np.arange(6) % p["n_clusters"]] * 2 for p in settings]

    views = np.random.default_rng(0).normal(size=(2, 6, 2))
    agents = vertical._agents(list(views), np.arange(6) % 2, np.arange(6))
    monkeypatch.setattr(tables, "load_agents", lambda *_, **__: agents)
    monkeypatch.setattr(tables, "evaluator", lambda *_: evaluate)
    given = tables.Budget(
        4, 2, "tpe", [0], None, [tables.LOCAL], vertical.SplitOptions(), max_local=5
    )
    path = tmp_path / "trials.csv"
    for dataset in ("coil-20", "shuttle"):
        tables.run_trials(dataset, given, path, mock.Mock())
    rows = path.read_text()
    assert ran == [2] * 8 and len(rows_of(path)) == 16
    path.write_text("".join(rows.splitlines(keepends=True)[:-2]))
    tables.run_trials("shuttle", given, path, mock.Mock())
    assert path.read_text() == rows and ran == [2] * 9


def test_published_tables_are_complete():
    published = tables._read(tables.PUBLISHED / "vertcohirf_tables5_16.csv")
    for dataset, metric in tables.TABLES.values():
        names = {r["method"] for r in published if (r["dataset"], r["metric"]) == (dataset, metric)}
        assert {m.published for m in tables.methods(dataset).values()} == names


def test_reproducing_a_table_resumes_from_its_trials(tmp_path):
    try:
        tables.load_agents("chowdary_2006", 0, vertical.SplitOptions())
    except FileNotFoundError as error:
        pytest.skip(str(error))
    arguments = (
        "--table=7",
        "--search_trials=2",
        "--search_batch=2",
        "--seeds=1",
        f"--methods={tables.LOCAL},VertCoHiRF(kmeans)",
        "--max_local_clusters=3",
        f"--trials_file={tmp_path / 'trials.csv'}",
    )
    code, out, err = launch(reproduce, *arguments, f"--output_dir={tmp_path / 'one'}")
    assert code == 0, err
    assert "chowdary-2006, ARI" in out and "0.060 +- 0.000" in out  # the paper's
    before = (tmp_path / "trials.csv").read_text()
    assert len(rows_of(tmp_path / "trials.csv")) == 4
    code, again, _ = launch(reproduce, *arguments, f"--output_dir={tmp_path / 'two'}")
    assert code == 0 and (tmp_path / "trials.csv").read_text() == before
    other = [a.replace("trials=2", "trials=4").replace("batch=2", "batch=4") for a in arguments]
    refused, _, err = launch(reproduce, *other, f"--output_dir={tmp_path / 'three'}")
    assert refused == 2 and "holds another search" in err
    assert again.splitlines()[1:6] == out.splitlines()[1:6]
    assert (tmp_path / "two" / "boxes_chowdary_2006.png").exists()


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--table=4", "table: got '4'; allowed are 1 and 5 to 16"),
        ("--figure=2", "figure: got 2"),
        ("--methods=SVM", "methods: got 'SVM'"),
        ("--seed=0", "give either --table or --figure"),
        ("--table=5 --figure=5", "give either --table or --figure"),
    ],
)
def test_reproduce_refuses(flag, line):
    more = ["--table=5"] if "methods" in flag else []
    code, _, err = launch(reproduce, *more, *flag.split())
    assert code == 2 and line in err
