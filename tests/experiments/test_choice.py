"""--n_clusters=auto: the number is found without labels, kept, and what cannot be is refused."""

import json
import types

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot
from sklearn.datasets import make_blobs

from experiments.lib import choice, criterion, plots, runner
from experiments.lib.command import parse
from experiments.lib.progress import Progress
from experiments.run import main
from jaxfedmvc.engine import Traffic
from jaxfedmvc.federation import Federation
from tests.helpers import binaries, pictures

K = 4
FLAGS = (
    "--n_clusters=auto",
    "--clusters_tried=2,3,4,5,6",
    "--clusters_draws=3",
    "--compilation_cache=",
    "--noprogress",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Four blobs in two views, without labels and with wrong ones."""
    folder = tmp_path_factory.mktemp("data")
    x, _ = make_blobs(160, 7, centers=K, cluster_std=1.5, random_state=3)
    views = {"view_0": x[:, :4], "view_1": x[:, 4:]}
    np.savez(folder / "plain.npz", **views)
    np.savez(folder / "wrong.npz", **views, labels=np.arange(160) % 7)
    return folder


@pytest.mark.ci
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(("distr_kmeans",), marks=pytest.mark.slow),  # one program for all numbers
        pytest.param(
            ("e_fkmvc", "--rounds=10", "--n_clients=4", "--ratio=1:0"), marks=pytest.mark.slow
        ),
        pytest.param(("lmvsc", "--n_clients=2", "--ratio=1:0"), marks=pytest.mark.slow),
    ],
    ids=lambda method: method[0],
)
def test_blobs_are_counted_without_labels(method, data, tmp_path):
    name, *own = method
    given = (f"--algorithm={name}", *own, *FLAGS, f"--output_dir={tmp_path / 'out'}")
    code, out, err = binaries.launch(main, *given, f"--dataset={data / 'plain.npz'}")
    assert code == 0, err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["n_clusters"] == K
    assert "<- chosen" in out
    tried = pd.read_csv(tmp_path / "out" / "n_clusters.csv")
    assert list(tried["n_clusters"]) == [2, 3, 4, 5, 6]
    assert list(tried.loc[tried["chosen"], "n_clusters"]) == [K]
    for way in ("up", "down"):
        assert summary["bytes_choice"][way] == tried[f"bytes_{way}"].sum() > 0
    assert f"{tried['bytes_up'].sum() / 1e6:.3f} MB up" in out
    assert summary["seconds_choice"] == pytest.approx(tried["seconds"].sum())
    assert (tmp_path / "out" / "n_clusters.png").stat().st_size > 5000
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Number of clusters: silhouette" in page and "Number of clusters: stability" in page


# --- The draws, the runs and what is compared -----------------------------------------------------


def test_each_draw_leaves_other_rows_out(data):
    flags = ("--algorithm=distr_kmeans", f"--dataset={data / 'plain.npz'}", "--n_clusters=auto")
    plan = choice._planned(parse(flags), choice.ChoiceSettings((3, 2), 3))
    assert plan.numbers == [2, 3]
    held = [
        {tuple(np.asarray(c.sample_ids)[np.asarray(c.mask)]) for c in federation.cohorts}
        for federation in plan.drawn
    ]
    assert all(len(of_agents) == 1 for of_agents in held)  # the same rows of every agent
    assert len(set.union(*held)) == 3
    assert all(110 < len(ids) < 146 for ids in set.union(*held))  # about four fifths of 160


def test_rows_that_stay_keep_their_features_and_padding_comes_last():
    """Of samples 0 to 2 number 1 goes."""
    ids = np.arange(3)
    federation = Federation.from_agents([(ids, 10.0 * ids[:, None]), (ids, 5.0 * ids[:, None])])
    draws = types.SimpleNamespace(random=lambda n: np.array([0.2, 0.19, 0.9]))
    for cohort, unit in zip(choice._thinned(federation, draws).cohorts, (10, 5), strict=True):
        mask, ids = np.asarray(cohort.mask)[0], np.asarray(cohort.sample_ids)[0]
        assert sorted(ids[mask]) == [0, 2] and list(mask[:3]) == [True, True, False]
        np.testing.assert_array_equal(np.asarray(cohort.views[0])[0, mask, 0], unit * ids[mask])
        assert (ids[~mask] == -1).all() and not np.asarray(cohort.views[0])[0, ~mask].any()


@pytest.mark.parametrize("reads", [{"finish"}, {"round"}])
def test_what_all_numbers_share_is_made_and_counted_once(reads, monkeypatch):
    """Seven bytes before the rounds, five in each of three, and one at the end."""
    evaluated, trained = [], []

    class Programs:
        def __init__(self, k=None):
            self.k = k

        def stages_that_read(self, name):
            return reads

        def with_numbers(self, k):
            return Programs(k)

        def traffic(self):
            sizes = {"setup": 7, "round": 5, "finish": 1}
            return {stage: Traffic(n, 2 * n) for stage, n in sizes.items()}

        def evaluate(self, federation, key, state, made):
            evaluated.append(made)
            return types.SimpleNamespace(labels=[self.k], embedding=["H"], info=None)

    monkeypatch.setattr(choice, "_limited", lambda *_: (Programs(), lambda k: k))
    monkeypatch.setattr(runner, "trained", lambda *_: trained.append(1) or (None, 3))
    monkeypatch.setattr(choice, "_expect", lambda *_: None)
    monkeypatch.setattr(runner, "check_masked_sums", lambda *_: None)
    job = runner.Job(*[None] * len(runner.Job._fields))._replace(
        command=types.SimpleNamespace(job=types.SimpleNamespace(seed=0))
    )
    with Progress(False) as progress:
        runs = list(choice._runs(job, ["a", "b"], [2, 3], progress))
    assert [(run.draw, run.n_clusters) for run in runs] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert [run.labels for run in runs] == [[2], [3], [2], [3]]
    assert evaluated == [2] * 4  # the last of three rounds
    once = reads == {"finish"}
    assert len(trained) == (2 if once else 4)
    assert [run.sent.up for run in runs] == ([23, 1] * 2 if once else [23] * 4)
    # One that differs with the number of clusters has no silhouettes to compare.
    assert [run.embedding for run in runs] == ([["H"]] * 4 if once else [None] * 4)


def test_a_number_is_told_by_all_draws(monkeypatch):
    """Two groups at 0 and 1: two clusters find them in both draws, three are torn otherwise."""
    ids, x = np.arange(8), np.repeat([0.0, 1.0], 4)[:, None]
    whole = Federation.from_agents([(ids, x)])
    torn = [np.array([0, 0, 1, 1, 2, 2, 2, 2]), np.array([0, 1, 0, 1, 2, 2, 2, 2])]
    runs = [
        choice._Run(draw, k, [labels[None]], None, Traffic(10, 1))
        for draw in (0, 1)
        for k, labels in ((2, ids // 4), (3, torn[draw]))
    ]
    monkeypatch.setattr(choice, "_runs", lambda *_: iter(runs))
    silhouettes = iter([0.5, 0.9, 0.7, 0.9])
    monkeypatch.setattr(choice.criteria, "silhouette", lambda parts: next(silhouettes))
    job = runner.Job(*[None] * len(runner.Job._fields))._replace(
        command=types.SimpleNamespace(method=types.SimpleNamespace(topology="vertical")),
        problems=[types.SimpleNamespace(rows=ids, views=[x], held=None)],
    )
    with Progress(False) as progress:
        found = choice._chosen(choice._Plan(job, [whole, whole], [2, 3], []), progress)
    tried = found.tried.set_index("n_clusters")
    assert found.n_clusters == 2 and tried.loc[2, "stability"] == 1 > tried.loc[3, "stability"]
    assert list(tried["silhouette"]) == pytest.approx([0.6, 0.9])
    assert list(tried["silhouette_std"]) == pytest.approx([np.sqrt(0.02), 0])
    assert list(tried["silhouette_1"]) == [0.7, 0.9]
    assert list(tried["bytes_up"]) == [20, 20] and list(tried["bytes_down"]) == [2, 2]


def test_caution_is_said_where_no_number_is_stable():
    tried = pd.DataFrame({"n_clusters": [2, 3], "stability": [0.74, 0.76]})
    assert not criterion.Choice(3, tried).is_unstable
    assert criterion.Choice(3, tried.assign(stability=0.74)).is_unstable


# --- What is left behind --------------------------------------------------------------------------


def test_each_criterion_has_a_scale_of_its_own(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    draws = np.array([[0.21, 0.22, 0.20], [0.23, 0.24, 0.22]])  # [draws, numbers]
    tried = pd.DataFrame({"n_clusters": [2, 3, 4], "stability": [0.9, 0.8, 0.5]})
    tried["silhouette"], tried["silhouette_std"] = draws.mean(axis=0), draws.std(axis=0, ddof=1)
    tried["silhouette_0"], tried["silhouette_1"] = draws
    found = criterion.Choice(3, tried)
    criterion._draw(tmp_path / "n_clusters.png", found, "e_fkmvc on digits")
    silhouette, stability = drawn[0].axes
    pyplot.close(drawn[0])
    np.testing.assert_allclose(silhouette.lines[0].get_ydata(), [0.22, 0.23, 0.21])
    low, high = silhouette.get_ylim()
    assert 0.15 < low < high < 0.3
    np.testing.assert_allclose(stability.lines[0].get_ydata(), [0.9, 0.8, 0.5])
    assert stability.get_ylim() == (0, 1.05)
    first, second = found.figures()
    np.testing.assert_allclose(first.traces[-1]["y"], [0.22, 0.23, 0.21])
    np.testing.assert_allclose(second.traces[-1]["y"], [0.9, 0.8, 0.5])
    assert second.note.startswith("3 clusters: ")


@pytest.mark.slow
def test_networks_are_trained_once_for_all_numbers(data, tmp_path):
    given = ("--algorithm=fmcsc", "--n_clients=2", "--ratio=1:0", "--hidden=16", "--latent_dim=4")
    given += ("--pretrain_epochs=5", "--local_epochs=2", "--rounds=1", "--components=A")
    given += (*FLAGS, f"--dataset={data / 'plain.npz'}", f"--output_dir={tmp_path / 'out'}")
    code, out, err = binaries.launch(main, *given)
    assert code == 0, err
    assert "no number of clusters is stable" in out  # networks that have learnt nothing yet
    tried = pd.read_csv(tmp_path / "out" / "n_clusters.csv")
    assert len(tried) == 5
    # Training counts with the first number; the others are what evaluating a number costs.
    assert (tried["bytes_up"][1:] == tried["bytes_up"][1]).all()
    assert tried["bytes_up"][0] > 2 * tried["bytes_up"][1]


@pytest.mark.ci
@pictures.unpainted()
def test_labels_do_not_matter_and_a_choice_that_was_made_is_kept(data, tmp_path, monkeypatch):
    tables = {}
    common = ("--algorithm=distr_kmeans", *FLAGS, "--clusters_tried=2,3", "--clusters_draws=2")
    for name in ("plain", "wrong"):
        given = (*common, f"--dataset={data / name}.npz", f"--output_dir={tmp_path / name}")
        with monkeypatch.context() as patched:  # as if it were killed after its choice
            patched.setattr(runner, "run", lambda *_: None)
            assert binaries.launch(main, *given)[0] == 0
        table = pd.read_csv(tmp_path / name / "n_clusters.csv")
        tables[name] = table.drop(columns="seconds")
    pd.testing.assert_frame_equal(tables["plain"], tables["wrong"], check_exact=True)
    # The job goes on with its choice, whatever it would choose now.
    edited = pd.read_csv(tmp_path / "wrong" / "n_clusters.csv")
    edited["chosen"] = ~edited["chosen"]
    (other,) = edited.loc[edited["chosen"], "n_clusters"]
    edited.to_csv(tmp_path / "wrong" / "n_clusters.csv", index=False)
    code, out, _ = binaries.launch(main, *given, "--resume")
    assert code == 0
    assert "draws" not in out
    assert json.loads((tmp_path / "wrong" / "summary.json").read_text())["n_clusters"] == other


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--algorithm=vertcohirf",), "finds the number of clusters itself"),
        (("--algorithm=local_kmeans",), "exchange nothing"),
        (("--algorithm=private_e_fkmvc", "--ratio=1:0"), "epsilon of private_e_fkmvc is of one"),
        (("--algorithm=e_fkmvc", "--clusters_tried=3"), "clusters_tried: got '3'"),
        (("--algorithm=e_fkmvc", "--clusters_tried=1,3"), "clusters_tried: got '1,3'"),
        (("--algorithm=e_fkmvc", "--clusters_draws=1"), "clusters_draws: got 1"),
        (("--algorithm=e_fkmvc", "--n_clusters=some"), "a whole number or auto, or none"),
        (("--algorithm=e_fkmvc", "--mesh=clients:2"), "mesh: is for a number of clusters"),
        (("--algorithm=distr_kmeans", "--clusters_tried=4,300"), "300 clusters are not tried"),
    ],
)
def test_what_cannot_be_chosen_is_refused(flags, told, data, tmp_path):
    given = ("--n_clusters=auto", f"--dataset={data / 'plain.npz'}", *flags)
    code, _, err = binaries.launch(main, *given, f"--output_dir={tmp_path / 'out'}")
    assert code == 2
    assert told in err
    assert err.strip().count("\n") == 0
    assert not (tmp_path / "out").exists()
