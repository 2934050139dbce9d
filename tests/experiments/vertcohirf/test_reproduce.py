"""VertCoHiRF's tables: what is searched, what is read from trials, and one end to end."""

import functools
import json
import types
from unittest import mock

import chex
import jax
import numpy as np
import pandas as pd
import pytest
from sklearn import metrics

from experiments.lib.data import DataSettings, Problem, VerticalSettings, load_agents
from experiments.vertcohirf import reproduce, tables, trials
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.federation import Federation
from tests.helpers import binaries, pictures

COMMON = ("--compilation_cache=", "--noprogress")


@pytest.fixture(scope="module", autouse=True)
def unpainted():
    with pictures.unpainted():
        yield


def launch(*arguments):
    return binaries.launch(reproduce.main, *COMMON, *arguments)


def trial(method, ari, silhouette, search="random:any"):
    scores = {"ARI": ari, "Silhouette": silhouette}
    return {"dataset": "coil-20", "method": method, "seed": 0, "search": search} | scores


def test_each_seed_and_each_batch_of_a_search_has_a_key_of_its_own(monkeypatch):
    used = []

    def evaluate(federation, key, settings):
        used.append(tuple(jax.random.key_data(key).tolist()))
        return [[np.zeros((1, 1), int)] for _ in settings]

    monkeypatch.setattr(trials, "scores", lambda *_: {})
    problem = types.SimpleNamespace(federation=mock.Mock())
    for seed, start in ((0, 0), (0, 10), (1, 0), (1, 10)):
        trials._run_batch(problem, evaluate, seed, start, [{}, {}], None)
    assert len(set(used)) == 4
    # What a kill has cut off is made with the key of its batch.
    trials._run_batch(problem, evaluate, 1, 10, [{}], None)
    assert used[-1] == used[-2]


def test_table_by_hand():
    """Tuned takes the best agent-mean of the score, unsupervised that of the silhouette."""
    found = [
        trial(trials.LOCAL, [0.4, 0.2, 0.3], [0.1, 0.1, 0.1]),
        trial(trials.LOCAL, [0.1, 0.1, 0.1], [0.2, 0.2, 0.2]),
        trial("Distr.KMeans", [0.6, 0.6, 0.6], [0.0, 0.0, 0.0]),
        trial("Distr.KMeans", [0.5, 0.5, 0.5], [0.3, 0.3, 0.3]),
        trial("Distr.KMeans", [0.9, 0.9, 0.9], [0.0, 0.0, 0.0], "tpe:Silhouette"),
    ]
    table = tables.table("coil-20", "ARI", pd.DataFrame(found)).set_index("method")
    assert list(table.index) == [trials.LOCAL, "Distr.KMeans"]
    row = table.loc["Distr.KMeans"]
    np.testing.assert_allclose(row["tuned_mean"], 0.6)
    np.testing.assert_allclose(row["tuned_diff"], np.median([0.2, 0.4, 0.3]))
    np.testing.assert_allclose(row["unsupervised_mean"], 0.5)
    np.testing.assert_allclose(row["unsupervised_diff"], 0.4)
    assert row["seeds"] == 1 and np.isfinite(row["paper_mean"])
    (line,) = (x for x in tables.text(table.reset_index()).splitlines() if "Distr" in x)
    assert line.split()[1:3] == ["0.600", "+0.300"]


def test_tables_can_be_made_of_the_chosen_trials_alone():
    rng = np.random.default_rng(0)
    methods = [trials.LOCAL, "Distr.KMeans", "VertCoHiRF(kmeans)"]
    found = pd.DataFrame(
        [
            trial(method, list(rng.random(3)), list(rng.random(3))) | {"seed": seed, "number": n}
            for method in methods
            for seed in (0, 1)
            for n in range(20)
        ]
    )
    chosen = tables.chosen(found)
    assert len(chosen) == 12 and set(chosen["tried"]) == {20}
    assert chosen.groupby("chosen_by").size().to_dict() == {"ARI": 6, "Silhouette": 6}
    for metric in trials.OBJECTIVES:
        pd.testing.assert_frame_equal(
            tables.table("coil-20", metric, chosen), tables.table("coil-20", metric, found)
        )


def test_a_method_alone_has_no_difference():
    found = pd.DataFrame([trial("DPFMPS", [0.6, 0.6], [0.0, 0.0])])
    table = tables.table("coil-20", "Silhouette", found)
    assert np.isnan(table["tuned_diff"]).all() and "-" in tables.text(table)


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_searches_keep_to_their_space_and_to_their_seed(kind):
    if kind == "tpe":
        pytest.importorskip("optuna", reason="the extra hpo is not installed")
    space = {"n_clusters": (2, 5, True), "feature_share": (0.1, 1.0, False)}

    def ask():
        search = trials.Search(kind, space, 0, "ARI")
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
    # Seconds would tell apart what is the same.
    monkeypatch.setattr(trials.time, "perf_counter", lambda: 0.0)

    def evaluate(federation, key, params):
        ran.append(len(params))
        return [[np.arange(6)[None] % p["n_clusters"]] * 2 for p in params]

    views = np.random.default_rng(0).normal(size=(2, 6, 2))
    federation = Federation.from_arrays(
        list(views), np.arange(6) % 2, partition=vertical_partition(6, 2)
    )
    problem = Problem(federation, list(views), np.arange(6) % 2, np.arange(6))
    monkeypatch.setattr(trials, "evaluator", lambda *_: evaluate)
    settings = trials.SearchSettings(4, 2, "tpe", 5, (trials.LOCAL,))
    path, progress = tmp_path / "trials.csv", mock.Mock()

    def search(*sets):
        return trials.run_trials(sets, settings, [0], lambda *_: problem, path, progress)

    found, whole = search("coil-20", "shuttle"), path.read_text()
    assert ran == [2] * 8 and len(found) == 16
    assert progress.expect.call_args.args[0] == {
        f"coil-20, {trials.LOCAL}": 8,
        f"shuttle, {trials.LOCAL}": 8,
    }
    path.write_text("".join(whole.splitlines(keepends=True)[:-2]))
    assert len(search("shuttle")) == 8
    assert path.read_text() == whole and ran == [2] * 9
    assert progress.expect.call_args.args[0] == {f"shuttle, {trials.LOCAL}": 2}
    path.write_text(whole[:-5])  # within the last line of a batch of two
    assert len(search("shuttle")) == 8
    assert path.read_text() == whole and ran == [*[2] * 9, 1]


@pytest.mark.slow
def test_table_1_keeps_every_run(tmp_path):
    folder = tmp_path / "out"
    code, out, err = launch("--table=1", "--seeds=2", f"--output_dir={folder}")
    assert code == 0 and "paper" in out, err
    rows = pd.read_csv(folder / "table1_runs.csv")
    shown = json.loads((folder / "summary.json").read_text())["table 1"]
    assert set(rows["method"]) == {*trials.BASELINES, "VertCoHiRF"} == set(shown)
    means = rows.groupby("method")[["ari_0", "ari_1"]].mean()
    for name, line in shown.items():
        np.testing.assert_allclose(means.loc[name], line["mean"])
    assert (rows[rows["method"] == "VertCoHiRF"]["ari_0"] == 1).all()
    assert (rows["command"] == "--paper=vertcohirf --table=1").all()

    table = (folder / "table1_runs.csv").read_text()
    lines = table.splitlines(keepends=True)
    (folder / "table1_runs.csv").write_text("".join(lines[:-3]) + lines[-3][:9])
    code, again, err = launch("--table=1", "--seeds=2", f"--output_dir={folder}", "--resume")
    assert code == 0 and again == out, err
    assert (folder / "table1_runs.csv").read_text() == table


def test_published_tables_are_complete():
    for dataset, metric in tables.TABLES.values():
        rows = trials.methods(dataset).values()
        assert {row.published for row in rows} == set(tables.published(dataset, metric).index)


@pytest.mark.parametrize("dataset", ["coil-20", "nursery", "garber-2001"])
def test_settings_at_both_ends_of_every_space_are_valid(dataset):
    for row in trials.methods(dataset, max_local=5).values():
        for end in (0, 1):
            row.make({name: bounds[end] for name, bounds in row.space.items()})


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Three groups in eight features, in place of a set of the paper."""
    rng = np.random.default_rng(0)
    labels = np.arange(45) % 3
    path = tmp_path / "toy.npz"
    np.savez(path, view_0=rng.normal(size=(45, 8)) + 9 * np.eye(3, 8)[labels], labels=labels)
    monkeypatch.setitem(trials.STEMS, "chowdary-2006", str(path))
    return path


@pytest.mark.ci
def test_reproducing_a_table_resumes_from_its_trials(toy, tmp_path):
    file = tmp_path / "one" / "trials.csv"
    arguments = (
        "--table=7",
        "--search_trials=2",
        "--search_batch=1",
        "--seeds=1",
        f"--methods={trials.LOCAL},VertCoHiRF(kmeans)",
        "--max_local_clusters=3",
    )
    code, out, err = launch(*arguments, f"--output_dir={tmp_path / 'one'}")
    assert code == 0, err
    assert "chowdary-2006, ARI" in out and "0.060 +- 0.000" in out  # the paper's
    before = file.read_text()
    assert len(trials.read_trials(file)) == 4
    whole = trials.read_trials(file).drop(columns="seconds")
    file.write_text(before[:-9])  # killed while the last row was written
    code, again, err = launch(*arguments, f"--output_dir={tmp_path / 'one'}", "--resume")
    assert code == 0 and again == out, err
    pd.testing.assert_frame_equal(trials.read_trials(file).drop(columns="seconds"), whole)
    before = file.read_text()
    arguments += (f"--trials_file={file}",)
    code, again, _ = launch(*arguments, f"--output_dir={tmp_path / 'two'}")
    assert code == 0 and file.read_text() == before
    assert again.splitlines()[1:6] == out.splitlines()[1:6]
    assert {path.name for path in (tmp_path / "two").iterdir()} == {
        "boxes_toy.png",
        "chosen_trials.csv",
        "data.json",
        "flags.txt",
        ".lock",
        "summary.json",
        "tables.csv",
    }
    kept = pd.read_csv(tmp_path / "two" / "chosen_trials.csv")
    assert set(kept["chosen_by"]) == {"ARI", "Silhouette"} and set(kept["tried"]) == {2}
    assert (kept["seconds"] > 0).all()
    assert kept["command"].str.startswith("--paper=vertcohirf --table=7 --search=random").all()
    header, *rows = before.splitlines()
    file.write_text("\n".join([header, *rows[::-1]]) + "\n")  # settings that were not asked for
    code, _, err = launch(*arguments, f"--output_dir={tmp_path / 'three'}")
    assert code == 2 and "holds another search" in err


@pytest.mark.slow
def test_every_way_to_run_settings_gives_each_agent_its_clusters(toy, monkeypatch):
    """A program for all, one for each, and arrays that shrink between rounds agree."""
    problem = load_agents(DataSettings(dataset=str(toy)), VerticalSettings(agents=2), seed=0)
    hidden, key = problem.federation.without_labels(), jax.random.key(0)

    def run(row, *ks):
        least = {name: bounds[0] for name, bounds in row.space.items()}
        params = [least | {"n_clusters": k} for k in ks]
        return trials.evaluator(row, 45)(hidden, key, params)

    baseline = trials.methods("coil-20")[trials.LOCAL]
    together = run(baseline, 2, 3)
    chex.assert_trees_all_equal(together[1:], run(baseline._replace(static=True), 3))
    assert [[x.shape for x in labels] for labels in together] == [[(1, 45)] * 2] * 2
    found = trials.scores(problem, together[1])
    for agent, (view, (labels,)) in enumerate(zip(problem.views, together[1], strict=True)):
        ari = metrics.adjusted_rand_score(problem.labels, labels)
        np.testing.assert_allclose(found["ARI"][agent], ari)
        own = metrics.silhouette_score(view, labels)
        np.testing.assert_allclose(found["Silhouette"][agent], own)
    monkeypatch.setattr(trials, "_MAX_REPETITIONS", 2)
    row = trials.vertcohirf_row("kmeans", None, 3)
    together = run(row, 3)
    monkeypatch.setattr(trials, "_COMPACT_ABOVE", 10)
    chex.assert_trees_all_equal(together, run(row, 3))


def test_ari_against_the_number_of_agents(toy, tmp_path, monkeypatch):
    """Searches apart, each with its file; a method that is not in all of them is not drawn."""
    asked = []

    def run_trials(sets, settings, seeds, load, path, progress, mesh, command):
        problem = load("chowdary-2006", 0)
        asked.append((len(problem.views), path.name))
        names = ["DPFMPS"] * (len(problem.views) < 4) + ["Distr.KMeans"]
        rows = [trial(name, [0.1 * len(problem.views)], [0.0]) for name in names]
        return pd.DataFrame([row | {"seed": s, "dataset": sets[0]} for row in rows for s in seeds])

    monkeypatch.setattr(reproduce, "run_trials", run_trials)
    progress, file = mock.Mock(), tmp_path / "trials.csv"
    settings, load = trials.SearchSettings(), functools.partial(reproduce._load, None)
    found = reproduce.figure_4(settings, [0, 1], load, file, tmp_path, progress)
    assert asked == [(agents, f"trials_{agents}_agents.csv") for agents in range(2, 7)]
    np.testing.assert_allclose(found["Distr.KMeans"], [[0.1 * n] * 2 for n in range(2, 7)])
    assert len(found["DPFMPS"]) == 2 and (tmp_path / "figure4.png").exists()
    *_, line = progress.write.call_args.args[0].splitlines()
    assert line.split() == ["Distr.KMeans", "0.200", "0.300", "0.400", "0.500", "0.600"]


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--table=4", "table: got '4'; allowed are 1 and 5 to 16"),
        ("--figure=2", "figure: got 2"),
        ("--table=7 --resume", "resume: needs --output_dir"),
        ("--table=7 --scale=none", "scale: is no flag here; it had no effect"),
        ("--table=7 --search_trial=3", "did you mean --search_trials?"),
        ("--methods=SVM", "methods: got 'SVM'"),
        ("--seed=0", "give either --table or --figure"),
        ("--table=5 --figure=5", "give either --table or --figure"),
    ],
)
def test_reproduce_refuses(flag, line):
    more = ["--table=5"] if "methods" in flag else []
    code, _, err = launch(*more, *flag.split())
    assert code == 2 and line in err
