"""Comparison methods: run once, refused in a line, scored once a sample, beside a paper."""

import numpy as np
import pandas as pd
import pytest

from experiments import published
from experiments.fmcsc import rows as fmcsc_rows
from experiments.lib import folder, peers, peers_grid
from experiments.lib.data import DataSettings, Problem, VerticalSettings, load_agents
from experiments.lib.progress import Progress
from experiments.mgcd import runs as mgcd_runs
from experiments.mgcd import tables as mgcd_tables
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.data import hybrid_partition

N, DIMS = 24, (4, 3)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "toy.npz"
    rng = np.random.default_rng(0)
    labels = np.arange(N) % 3
    views = [rng.normal(size=(N, d)) + 9 * np.eye(3, d)[labels] for d in DIMS]
    np.savez(path, view_0=views[0], view_1=views[1], labels=labels)
    return str(path)


@pytest.fixture(scope="module")
def ran(toy, tmp_path_factory):
    """A method that fits, and one that asks for more features than there are."""
    path = tmp_path_factory.mktemp("runs") / "peers.csv"
    good = peers.cell(toy, "1:1", "imvc_cbg", 4)
    bad = good._replace(
        x="too many", command=peers.parse([*good.command.arguments, "--n_clusters=4"])
    )
    with Progress(False) as progress:
        runs = peers.run_peers([good, bad], [0, 1], path, progress)
    return path, [good, bad], runs


@pytest.mark.ci
def test_rows_say_what_made_them_and_what_it_cost(ran):
    rows = ran[2][ran[2]["x"] == "1:1"]
    assert list(rows["seed"]) == [0, 1] and (rows["status"] == "ok").all()
    assert rows["command"].str.contains("--algorithm=imvc_cbg").all()
    # 12 rows hold both views and 6 each of the others, in clients of 6 rows: floats, flags, an id.
    assert set(rows["bytes_up"]) == {4 * (12 * 7 + 6 * 4 + 6 * 3) + N + 4 * 4}
    assert rows["acc"].between(0, 1).all() and (rows["rounds"] == 0).all()


def test_a_method_that_refuses_says_why_and_the_others_go_on(ran):
    rows = ran[2][ran[2]["x"] == "too many"]
    assert rows["status"].str.startswith("refused: imvc_cbg: view 1 has 3 features").all()
    assert rows["acc"].isna().all()


def test_where_all_methods_refuse_there_is_no_picture(ran, tmp_path):
    runs = ran[2]
    paper = pd.DataFrame()
    table = peers.compare(runs[runs["x"] == "too many"], paper)
    assert peers.draw(tmp_path / "a.png", table, {}, "none") == []
    assert not (tmp_path / "a.png").exists()
    assert peers.draw(tmp_path / "b.png", peers.compare(runs, paper), {}, "one") == ["b.png"]
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_what_is_there_is_not_run_again(ran, monkeypatch):
    path, cells, runs = ran
    before = path.read_text()
    monkeypatch.setattr(peers, "run_cell", None)
    with Progress(False) as progress:
        again = peers.run_peers(cells, [0, 1], path, progress)
        fewer = peers.run_peers(cells[:1], [1], path, progress)
    assert path.read_text() == before and again.equals(runs)
    assert fewer.equals(runs[(runs["x"] == "1:1") & (runs["seed"] == 1)])


def test_runs_with_other_settings_are_not_taken_for_these(ran):
    path, (good, _), _ = ran
    before = path.read_text()
    other = good._replace(command=peers.parse([*good.command.arguments, "--scale=none"]))
    told = "other settings: .*--scale=none differ; allowed is another file"
    with Progress(False) as progress, pytest.raises(ValueError, match=told):
        peers.run_peers([other], [0, 1, 2], path, progress)
    assert path.read_text() == before


def test_a_share_of_the_training_is_a_share_of_epochs_or_of_runs():
    assert peers.shortened("cpspan", 0.1) == ["--pretrain_epochs=20", "--align_epochs=5"]
    assert peers.shortened("simvc", 0.1) == ["--n_runs=2"]
    assert peers.shortened("simvc", 0.08) == ["--n_runs=2"]  # 1.6 of 20
    assert peers.shortened("simvc", 0.001) == ["--n_runs=1"]
    assert peers.shortened("lsimvc", 0.1) == []
    assert peers.shortened("cpspan", 1.0) == []
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"peers_training: got {share}; allowed"):
            peers.shortened("cpspan", share)


def test_a_picture_says_how_much_of_the_training_there_was():
    assert peers.title_of("Table 1", 3, 1.0) == "Table 1: comparison methods, 3 seeds"
    assert peers.title_of("Table 1", 1, 0.1).endswith("methods, 1 seed, 0.1 of the training")


def test_means_and_sample_deviations_stand_beside_the_papers(ran):
    runs = ran[2].copy()
    runs.loc[runs["x"] == "1:1", "acc"] = [0.5, 0.7]
    runs.loc[runs["x"] == "1:1", ["bytes_up", "bytes_down"]] = [[10**6, 2 * 10**6], [10**6, 0]]
    name = runs["set"].iloc[0]
    index = pd.MultiIndex.from_tuples([(name, "1:1", "IMVC-CBG")])
    table = peers.compare(runs, pd.DataFrame({"acc": [0.9]}, index=index))
    line = table.iloc[0]
    np.testing.assert_allclose([line["acc"], line["acc_std"]], [0.6, 0.02**0.5])
    assert line["megabytes"] == 2
    assert line["acc_published"] == 0.9 and np.isnan(line["nmi_published"])
    text = peers.markdown(table, {name: "Toy"})
    assert "| Toy | 1:1 | IMVC-CBG | 2 | 0.600 +- 0.141 | 0.900 |" in text
    assert "| Toy | too many | IMVC-CBG | 0 | - |" in text
    assert "- IMVC-CBG, Toy too many: imvc_cbg: view 1 has 3 features" in text
    assert "no run" not in text
    assert peers.markdown(table, {}, {"Lost": "Get it"}).endswith("\n- Lost: no run. Get it\n")


def test_a_sample_of_several_agents_is_scored_once(toy):
    problem = load_agents(
        DataSettings(dataset=toy), VerticalSettings(hybrid="1:1", hybrid_clients=4), 0
    )
    held = [np.asarray(cohort.mask)[0] for cohort in problem.federation.cohorts]
    parts = hybrid_partition(0, n_samples=N, n_views=2, n_clients=4, ratio=(1, 1))
    for v in range(2):
        ids = np.concatenate([part.sample_ids.ravel() for part in parts if v in part.view_ids])
        np.testing.assert_array_equal(np.flatnonzero(held[v]), np.sort(ids[ids >= 0]))
    wrong = problem.labels.copy()
    wrong[~held[1]] = 0  # 6 samples, 4 of which are of other classes or not
    labels = [np.where(mask, wrong, -1)[None] for mask in held]
    expected = np.mean(wrong == problem.labels)
    assert peers.sample_scores(problem, labels)["acc"] == pytest.approx(expected)
    both = held[0] & held[1]
    labels[1] = np.where(both, labels[1] + 1, labels[1])
    with pytest.raises(ValueError, match="labels of their own"):
        peers.sample_scores(problem, labels)
    assert isinstance(problem, Problem)


def test_every_comparison_method_of_the_papers_is_known():
    assert set(peers.TITLES) <= set(METHODS)
    assert {"MFLVC", "LMVSC"} <= set(mgcd_tables.published_peers().index.get_level_values("method"))


def test_every_set_of_the_papers_tables_has_rows_or_a_line_that_says_why_not():
    fmcsc = published.FMCSC, published.published_fmcsc(), fmcsc_rows.SETS, fmcsc_rows.ABSENT
    mgcd = published.MGCD, mgcd_tables.published_peers(), published.mgcd_titles(), mgcd_runs.ABSENT
    for measured, paper, titles, absent in (fmcsc, mgcd):
        ran = set(peers.read_peers(measured / "peers.csv")["set"])
        lacking = set(paper.index.get_level_values(0)) - ran
        assert {titles.get(name, name) for name in lacking} == set(absent)


# --- Grids ----------------------------------------------------------------------------------------


def test_settings_of_a_grid_are_all_combinations_and_zero_is_the_default():
    assert len(peers_grid.settings("imvc_cbg")) == 16
    found = peers_grid.settings("lmvsc")
    assert len(found) == 9 and found[:2] == [["--alpha=0.01"], ["--alpha=0.01", "--n_anchors=50"]]


def test_every_grid_holds_what_its_method_takes():
    for method in peers_grid.GRIDS:
        for flags in peers_grid.settings(method):
            peers.cell("digits", "1:0", method, 4, settings=flags)


def test_a_grid_is_run_once_by_few_programs(toy, tmp_path, monkeypatch):
    grid = {"lambda": (0.001, 1.0), "anchors_per_cluster": (1, 2)}
    monkeypatch.setattr(peers_grid, "GRIDS", {"imvc_cbg": grid})
    cells = [peers.cell(toy, "1:1", method, 4) for method in ("imvc_cbg", "lsimvc")]
    compiled, original = [], peers.run_cell

    def run_cell(one, seeds, path, progress, programs, *said):
        found = original(one, seeds, path, progress, programs, *said)
        compiled.append(len(programs))
        return found

    monkeypatch.setattr(peers, "run_cell", run_cell)
    path = tmp_path / "peers_grid.csv"
    with Progress(False) as progress:
        runs = peers_grid.run_grids(cells, [0, 1], path, progress)
        assert len(runs) == 8 and set(runs["method"]) == {"imvc_cbg"}
        assert compiled == [1, 2, 2, 2]  # lambda is a number, anchors are a shape
        before = path.read_text()
        again = peers_grid.run_grids(cells, [0, 1], path, progress)
    assert len(compiled) == 4 and path.read_text() == before and again.equals(runs)
    best = peers_grid.best_of_grid(runs)
    assert (
        list(best["tuned_of"]) == [4]
        and best["acc_tuned"][0]
        == runs.groupby("command")["acc"]
        .mean()
        .groupby(lambda text: text.split("--seed")[0])
        .mean()
        .max()
    )


def test_the_best_of_a_grid_is_of_means_over_seeds():
    """By hand: .8 and .8 beat .9 and .6; a setting with one seed of two does not count."""
    accs = {"--lambda=1": (0.9, 0.6), "--lambda=10": (0.8, 0.8), "--lambda=0.1": (0.99,)}
    rows = [
        {"set": "s", "x": "1:1", "method": "imvc_cbg", "seed": seed, "status": "ok", "acc": acc}
        | {"command": f"--algorithm=imvc_cbg {flag} --seed={seed}"}
        for flag, values in accs.items()
        for seed, acc in enumerate(values)
    ]
    best = peers_grid.best_of_grid(pd.DataFrame(rows)).iloc[0]
    assert best["tuned"] == "--lambda=10" and best["tuned_of"] == 2
    assert best["acc_tuned"] == pytest.approx(0.8) and best["acc_tuned_std"] == 0


def test_rows_of_other_partitions_and_grids_are_no_rows_of_a_grid(tmp_path, monkeypatch):
    """Of four clients and lambda 1 there is one row, .5; the others are better."""
    monkeypatch.setattr(peers_grid, "GRIDS", {"imvc_cbg": {"lambda": (1.0,)}})
    path, cells = tmp_path / "peers_grid.csv", {}
    for n_clients, flag, acc in ((4, "1", 0.5), (8, "1", 0.9), (4, "10", 0.8)):
        cells[n_clients] = cell = peers.cell("digits", "1:1", "imvc_cbg", n_clients)
        made = folder.made_by([*cell.command.arguments, f"--lambda={flag}", "--seed=0"])
        row = {**dict.fromkeys(peers.COLUMNS, 0), "status": "ok", "acc": acc, **made}
        folder.append_rows(path, [row | dict(zip(peers.COLUMNS[:3], cell[:3], strict=True))])
    with Progress(False) as progress:
        runs = peers_grid.run_grids([cells[4]], [0], path, progress)
    best = peers_grid.best_of_grid(runs).iloc[0]
    assert (len(runs), best["acc_tuned"], best["tuned_of"]) == (1, 0.5, 1)


def test_the_best_of_a_grid_stands_beside_the_defaults(ran, tmp_path):
    table = peers.compare(ran[2], pd.DataFrame())
    name = "ACC, best of a grid by labels"
    assert name not in peers.shown(table, {})
    best = {"set": table["set"][0], "x": "1:1", "method": "IMVC-CBG", "acc_tuned": 0.9}
    best |= {"acc_tuned_std": 0.01, "tuned_of": 16, "tuned": "--lambda=1"}
    table = peers_grid.with_best(table, pd.DataFrame([best]))
    assert list(peers.shown(table, {})[name]) == ["0.900 +- 0.010 of 16", ""]
    assert peers.draw(tmp_path / "a.png", table, {}, "one") == ["a.png"]


def test_a_file_of_something_else_is_no_grid(ran, tmp_path):
    (tmp_path / "peers_grid.csv").write_text("a,b\n1,2\n")
    told = "peers_grid: .*peers_grid.csv holds something else"
    with Progress(False) as progress, pytest.raises(ValueError, match=told):
        table = peers.compare(ran[2], pd.DataFrame())
        peers_grid.with_grids(table, ran[1], [0], tmp_path / "peers.csv", progress)
    assert (tmp_path / "peers_grid.csv").read_text() == "a,b\n1,2\n"
