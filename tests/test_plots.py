"""Pictures reach the disk whole, or not at all."""

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from jaxfedmvc import plots

pyplot = pytest.importorskip("matplotlib.pyplot")


def assert_one_png(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data[-8:-4] == b"IEND"
    assert list(path.parent.iterdir()) == [path]  # nothing half written beside it
    assert not pyplot.get_fignums()


SCORES = {"ACC": np.array([[0.4, 0.6, 0.7], [0.5, 0.5, 0.8]])}
LOSSES = {"reconstruction": np.array([[3.0, 2.0, 1.0]]), "contrast": np.ones((2, 3))}


@pytest.mark.parametrize(
    ("scores", "losses", "references"),
    [
        (SCORES, LOSSES, {"pooled k-means": 0.6, "local k-means": 0.4, "another": 0.5}),
        ({}, LOSSES, {}),
        (SCORES, {}, {}),
        ({}, {}, {}),
        ({"ACC": np.array([[0.5]])}, {"loss": np.array([[1.0]])}, {"pooled k-means": 0.6}),
    ],
    ids=["everything", "no scores", "no losses", "nothing", "one round of one seed"],
)
def test_curves_write_a_whole_png(tmp_path, scores, losses, references):
    plots.curves(tmp_path / "curves.png", scores, losses, references, "title")
    assert_one_png(tmp_path / "curves.png")


def test_curves_replace_an_older_picture(tmp_path):
    (tmp_path / "curves.png").write_bytes(b"old")
    plots.curves(tmp_path / "curves.png", SCORES, LOSSES, {}, "title")
    assert_one_png(tmp_path / "curves.png")


@pytest.mark.parametrize(("n", "max_points"), [(4, 2000), (12, 10)])
def test_embedding_writes_a_whole_png(tmp_path, n, max_points):
    rng = np.random.default_rng(0)
    colourings = {
        "class": rng.integers(-1, 3, size=n),
        "cluster": np.arange(n) % 13,  # more than the ten colours of the smaller palette
    }
    with threadpool_limits(1):  # t-SNE's idle threads starve whatever else runs
        plots.embedding(
            tmp_path / "map.png", rng.normal(size=(n, 5)), colourings, np.arange(n) % 2,
            ("multi-view", "partial"), "title", max_points=max_points,
        )  # fmt: skip
    assert_one_png(tmp_path / "map.png")


def test_embedding_draws_each_point_where_its_row_says(tmp_path, monkeypatch):
    # The map is replaced by the first two features, thinned to 6 of 20 points: what is scattered
    # must be rows of the input with their own marker and their own colour.
    n, drawn = 20, []

    class FirstTwo:
        def __init__(self, **_):
            pass

        def fit_transform(self, points):
            return points[:, :2]

    points = np.arange(2.0 * n).reshape(n, 2)
    values, markers = np.arange(n) % 4 - 1, np.arange(n) % 3
    monkeypatch.setattr(plots, "TSNE", FirstTwo)
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    names = ("a", "b", "c")
    plots.embedding(tmp_path / "map.png", points, {"k": values}, markers, names, "t", 6)
    (axis,) = drawn[0].axes
    pyplot.close(drawn[0])
    palette, seen = pyplot.get_cmap("tab10"), 0
    for marker, scatter in enumerate(axis.collections):
        assert scatter.get_label() == names[marker]
        xy = np.asarray(scatter.get_offsets())
        for place, colour in zip(xy, scatter.get_facecolors(), strict=True):
            row = int(place[0]) // 2
            np.testing.assert_array_equal(place, points[row])
            assert markers[row] == marker
            grey = (0.7, 0.7, 0.7, 1.0)
            np.testing.assert_allclose(colour, palette(values[row]) if values[row] >= 0 else grey)
            seen += 1
    assert seen == 6


@pytest.mark.parametrize("shape", [(10, 1), (2, 3), (1, 5)])
def test_embedding_draws_what_cannot_be_flattened(tmp_path, shape):
    points = np.random.default_rng(0).random(shape)
    kinds = np.zeros(len(points), int)
    plots.embedding(tmp_path / "map.png", points, {"k": kinds}, kinds, ("one",), "t")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
