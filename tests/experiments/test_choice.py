"""--n_clusters=auto: the number is found without labels, kept, and what cannot be is refused."""

import json

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot
from sklearn.datasets import make_blobs

from experiments.lib import criterion, plots
from experiments.run import main
from tests.helpers import binaries

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


def test_each_criterion_has_a_scale_of_its_own(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    draws = np.array([[0.21, 0.22, 0.20], [0.23, 0.24, 0.22]])  # [draws, numbers]
    tried = pd.DataFrame({"n_clusters": [2, 3, 4], "stability": [0.9, 0.8, 0.5]})
    tried["silhouette"], tried["silhouette_std"] = draws.mean(axis=0), draws.std(axis=0, ddof=1)
    tried["silhouette_0"], tried["silhouette_1"] = draws
    found = criterion.Choice(3, tried)
    criterion._draw(tmp_path / "n_clusters.png", found)
    silhouette, stability = drawn[0].axes
    pyplot.close(drawn[0])
    np.testing.assert_allclose(silhouette.lines[0].get_ydata(), [0.22, 0.23, 0.21])
    low, high = silhouette.get_ylim()
    assert 0.15 < low < high < 0.3
    np.testing.assert_allclose(stability.lines[0].get_ydata(), [0.9, 0.8, 0.5])
    assert stability.get_ylim() == (0, 1.02)
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
def test_labels_do_not_matter_and_a_choice_that_was_made_is_kept(data, tmp_path):
    tables = {}
    common = ("--algorithm=distr_kmeans", *FLAGS)
    for name in ("plain", "wrong"):
        given = (*common, f"--dataset={data / name}.npz", f"--output_dir={tmp_path / name}")
        assert binaries.launch(main, *given)[0] == 0
        table = pd.read_csv(tmp_path / name / "n_clusters.csv")
        tables[name] = table.drop(columns="seconds")
    pd.testing.assert_frame_equal(tables["plain"], tables["wrong"], check_exact=True)
    # A job that was killed after its choice goes on with it, whatever it would choose now.
    (tmp_path / "wrong" / "summary.json").unlink()
    edited = pd.read_csv(tmp_path / "wrong" / "n_clusters.csv")
    edited["chosen"] = edited["n_clusters"] == 3
    edited.to_csv(tmp_path / "wrong" / "n_clusters.csv", index=False)
    code, out, _ = binaries.launch(main, *given, "--resume")
    assert code == 0
    assert "draws" not in out
    assert json.loads((tmp_path / "wrong" / "summary.json").read_text())["n_clusters"] == 3


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
