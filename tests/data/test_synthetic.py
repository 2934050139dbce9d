"""Generated sets have the geometry that they promise, and clusterings that fit it find it."""

import numpy as np
import pytest
from sklearn.cluster import DBSCAN, KMeans
from sklearn.datasets import make_blobs
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc.data import blobs, load, multimodal, simplex, unequal

SEEDS = range(3)


def assert_equal(a, b):
    assert a.name == b.name
    for left, right in zip((*a.views, a.labels), (*b.views, b.labels), strict=True):
        np.testing.assert_array_equal(left, right)


def assert_layout(dataset, n, dims):
    assert [view.shape for view in dataset.views] == [(n, d) for d in dims]
    assert {view.dtype for view in dataset.views} == {np.dtype(np.float32)}
    assert dataset.labels.shape == (n,) and dataset.labels.dtype == np.int32


@pytest.mark.parametrize(
    ("variant", "n", "radii", "sigma", "eps"),
    [("text", 1200, (3, 7), 0.3, (2.2, 2.3)), ("table1", 2000, (0.5, 1), 0.01, (0.25, 0.42))],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_modality_shows_its_own_clusters(variant, n, radii, sigma, eps, seed):
    dataset = multimodal(seed, variant)
    assert_layout(dataset, n, (3, 2))
    counts = np.bincount(dataset.labels)
    assert len(counts) == 6 and np.ptp(counts) <= 1
    spheres, square = dataset.views
    sphere, corner = np.divmod(dataset.labels, 3)
    norms = np.linalg.norm(spheres, axis=1)
    for s, radius in enumerate(radii):
        # Five standard errors of the mean, of the deviation and of the directions' mean.
        m = np.sum(sphere == s)
        assert abs(norms[sphere == s].mean() - radius) < 5 * sigma / m**0.5
        assert abs(norms[sphere == s].std() - sigma) < 5 * sigma / (2 * m) ** 0.5
        direction = spheres[sphere == s] / norms[sphere == s, None]
        np.testing.assert_array_less(abs(direction.mean(0)), 5 / (3 * m) ** 0.5)
        np.testing.assert_allclose(np.square(direction).mean(0), 1 / 3, atol=5 * 0.3 / m**0.5)
    for radius in eps:
        found = DBSCAN(eps=radius, min_samples=5).fit_predict(spheres)
        assert adjusted_rand_score(sphere, found) == 1
    square = (square - square.mean(0)) / square.std(0)  # else k-means may cut a stretched corner
    found = KMeans(3, n_init=10, random_state=0).fit_predict(square)
    assert adjusted_rand_score(corner, found) == 1


def test_rows_are_in_no_order():
    labels = multimodal(0).labels
    assert 0.1 < np.mean(labels[1:] == labels[:-1]) < 0.24  # 1/6 is expected


@pytest.mark.parametrize(
    "make", [multimodal, unequal, lambda seed: simplex(seed, 0.1), lambda seed: blobs(seed, 30)]
)
def test_a_seed_is_a_data_set(make):
    assert_equal(make(5), make(5))
    assert (make(5).views[0][:5, 0] != make(6).views[0][:5, 0]).any()


def test_load_knows_the_multimodal_sets():
    assert_equal(load("multimodal"), multimodal(0, "text"))
    assert_equal(load("Multimodal_Table1"), multimodal(0, "table1"))
    assert load("multimodal", scale="minmax").views[1].max() == 1


def test_unequal_sets_differ_in_shape_and_their_first_view_tells_most():
    shapes, told = set(), {"first": [], "noise": []}
    for seed in range(24):
        dataset = unequal(seed)
        n, dims = len(dataset.labels), [view.shape[1] for view in dataset.views]
        assert_layout(dataset, n, dims)
        sizes = np.bincount(dataset.labels)
        assert 210 <= n <= 600 and 5 <= len(sizes) <= 10 and sizes.min() >= 4
        assert 2 <= len(dims) <= 5 and all(5 <= d <= 60 for d in dims)
        shapes.add((n, len(sizes), *dims))
        scores = [
            adjusted_rand_score(
                dataset.labels, KMeans(len(sizes), n_init=3, random_state=0).fit_predict(view)
            )
            for view in dataset.views
        ]
        told["first"].append(scores[0] - np.mean(scores[1:]))
        if len(dims) > 3:
            told["noise"].append(scores[-1])
    assert len(shapes) == 24 and np.mean(told["first"]) > 0.1
    assert len(told["noise"]) > 3 and np.abs(told["noise"]).max() < 0.05


def test_load_knows_the_unequal_sets():
    assert_equal(load("Unequal_3", scale="none"), unequal(3))
    assert load("unequal_3").views[0].max() == 1


def test_simplex_without_spread_is_a_turned_tetrahedron():
    turns = []
    for seed in SEEDS:
        dataset = simplex(seed, 0.0)
        assert_layout(dataset, 1000, (2, 2, 2))
        np.testing.assert_array_equal(np.bincount(dataset.labels), [250] * 4)
        signal = np.stack([view[:, 0] for view in dataset.views], axis=1)
        corners = np.stack([signal[dataset.labels == c][0] for c in range(4)])
        np.testing.assert_array_equal(signal, corners[dataset.labels])
        edges = np.linalg.norm(corners[:, None] - corners, axis=-1)
        np.testing.assert_allclose(edges, 1 - np.eye(4), atol=1e-6)
        turns.append(corners)
        noise = np.stack([view[:, 1] for view in dataset.views], axis=1)
        np.testing.assert_allclose(np.cov(noise.T), np.eye(3), atol=0.25)
        np.testing.assert_allclose(noise.mean(0), 0, atol=0.16)
    assert abs(turns[0] - turns[1]).max() > 0.1


def test_simplex_spreads_by_sigma_in_every_direction():
    exact, spread = simplex(1, 0.0, 4001), simplex(1, 0.4, 4001)
    np.testing.assert_array_equal(np.bincount(spread.labels), [1001, 1000, 1000, 1000])
    np.testing.assert_array_equal(exact.labels, spread.labels)
    moved = np.stack([a[:, 0] - b[:, 0] for a, b in zip(spread.views, exact.views, strict=True)])
    np.testing.assert_allclose(np.cov(moved), 0.16 * np.eye(3), atol=0.02)


def test_blobs_are_those_of_sklearn_cut_in_columns():
    dataset = blobs(3, 50, 7, 4, 3, cluster_std=0.5)
    assert_layout(dataset, 50, (3, 2, 2))
    x, labels = make_blobs(50, 7, centers=4, cluster_std=0.5, random_state=3)
    np.testing.assert_array_equal(np.concatenate(dataset.views, axis=1), x.astype(np.float32))
    np.testing.assert_array_equal(dataset.labels, labels)


@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        (multimodal, (0, "table2"), "variant must be one of text, table1; got 'table2'"),
        (multimodal, (-1,), "seed: got"),
        (unequal, (-1,), "seed: got"),
        (simplex, (0, -0.1), "sigma: got -0.1; allowed is a finite number, 0 or more"),
        (simplex, (0, float("nan")), "sigma: got nan; allowed is a finite number"),
        (simplex, (0, None), "sigma: got None; allowed is a finite number"),
        (simplex, (0, 0.1, 3), "n_samples: got 3; allowed is 4 or more"),
        (blobs, (2**32, 10), "seed: got"),
        (blobs, (0, 0), "n_samples: got"),
        (blobs, (0, 10, 4, 2, 5), "n_agents: got 5; allowed is 1 to 4"),
        (blobs, (0, 10, 4, 0), "n_centers: got"),
        (blobs, (0, 10, 4, 2, 2, float("inf")), "cluster_std: got inf; allowed is a finite number"),
    ],
)
def test_bad_arguments_are_named(make, args, message):
    with pytest.raises(ValueError, match=message):
        make(*args)
