"""Distr.KMeans: the grid of local clusters against a dictionary, and against known partitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc import engine
from jaxfedmvc.algorithm import by_agent
from jaxfedmvc.algorithms.distr_kmeans import (
    DistrKMeansConfig,
    DistrKMeansHyperparams,
    distr_kmeans,
    occupied_cells,
)
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation

# Compiled code runs for milliseconds here and takes seconds to optimise.
jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


def vertical(views, padding=0, order=None):
    """One agent for each view, in cohorts of one, in this order; padding rows are NaN."""
    ids = np.append(np.arange(len(views[0])), np.full(padding, -1))[None]
    order = range(len(views)) if order is None else order
    federation = Federation.from_arrays(
        views, partition=[Part((a,), ids, np.array([a], np.int32)) for a in order]
    )
    return federation.replace(cohorts=tuple(map(spoil_padding, federation.cohorts)))


def spoil_padding(cohort):
    views = tuple(jnp.where(cohort.mask[..., None], view, jnp.nan) for view in cohort.views)
    return cohort.replace(views=views)


def blobs():
    """Three agents of four features each; no single one can tell the five groups well."""
    x, y = make_blobs(300, 12, centers=5, cluster_std=1.5, center_box=(-5, 5), random_state=0)
    return np.split(x.astype(np.float32), 3, axis=1), y


TRACED = []  # one entry for each time that `program` is traced


@jit
def program(federation, key, limit):
    """One program for each shape, and for all numbers of clusters up to six."""
    TRACED.append(federation.cohorts[0].view_ids)
    algorithm = distr_kmeans(DistrKMeansConfig(6, n_init=3), DistrKMeansHyperparams(limit))
    return engine.run(algorithm, federation, key, rounds=0)


def run(federation, key=0, limit=5):
    return program(federation, jax.random.key(key), jnp.int32(limit))


@pytest.fixture(scope="module")
def result():
    return run(vertical(blobs()[0]))


# The grid.


def random_grid(n=40, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, size=(3, n)).astype(np.int32)
    centroids = [rng.normal(size=(3, p)).astype(np.float32) for p in (1, 4, 2)]
    where = rng.random(n) < 0.8
    return np.where(where, labels, -1), centroids, where


def test_grid_is_the_dictionary_of_label_combinations():
    labels, centroids, where = random_grid()
    grid = jax.jit(occupied_cells)(labels, centroids, where)
    samples = {}
    for i in np.flatnonzero(where):
        samples.setdefault(tuple(labels[:, i].tolist()), []).append(i)
    assert 10 < len(samples) < 27 and grid.n_cells == len(samples)
    assert len(grid.points) == 27  # as many as there can be, fewer than samples
    for cell, (combination, members) in enumerate(sorted(samples.items())):
        expected = np.concatenate([c[j] for c, j in zip(centroids, combination, strict=True)])
        np.testing.assert_array_equal(grid.points[cell], expected)
        assert grid.sizes[cell] == len(members)
        np.testing.assert_array_equal(np.flatnonzero(np.asarray(grid.cells) == cell), members)
    assert (np.asarray(grid.sizes)[len(samples) :] == 0).all()
    assert (np.asarray(grid.cells)[~where] == -1).all()


def test_grid_of_few_samples_has_no_more_cells_than_samples():
    labels, centroids, where = random_grid(n=6)
    grid = occupied_cells(jnp.array(labels), centroids, jnp.array(where))
    assert len(grid.points) == 6 and grid.sizes.sum() == where.sum()


def test_messages_are_put_in_the_order_of_views():
    one = {(1,): {"x": jnp.ones((1, 2))}}
    two = {(0,): {"x": jnp.zeros((1, 2))}}
    merged = by_agent((one, two))
    assert list(merged) == [(0,), (1,)]
    np.testing.assert_array_equal(merged[(1,)]["x"], [1.0, 1.0])


# The method.


def test_hand_worked_cells_and_their_weights():
    """Corners of a 2 x 2 grid with 1, 6, 4 and 6 samples: where the weights decide.

    Agent 0 sees 0 or 10, agent 1 sees 0 or 9. Into three clusters, two of the four corners are
    joined, which costs |.|^2 n m / (n + m): along agent 0 100 * 6/7 and 100 * 24/10, along agent 1
    81 * 4/5 and 81 * 3. The least, 64.8, joins the corners with 1 and 4 samples. With equal
    weights the other pair along agent 1 would be joined as often.
    """
    corners = np.repeat([[0, 0], [10, 0], [0, 9], [10, 9]], (1, 6, 4, 6), axis=0)
    values = {(0,): [[0.0], [10.0], [99.0]], (1,): [[0.0], [9.0], [99.0]]}
    messages = tuple(
        {agent: {"centroids": jnp.array([v]), "labels": jnp.array(column[None] > 5, jnp.int32)}}
        for (agent, v), column in zip(values.items(), corners.T, strict=True)
    )
    server = distr_kmeans(DistrKMeansConfig(3)).setup[0].server
    state, weights = jnp.zeros(len(corners), jnp.int32), (jnp.ones(1), jnp.ones(1))
    many = jit(jax.vmap(lambda key: server(key, state, messages, weights)))
    labels, info = many(jax.random.split(jax.random.key(0), 10))
    assert (info["n_cells"] == 4).all()
    for found in labels:
        assert adjusted_rand_score(np.repeat([0, 1, 0, 2], (1, 6, 4, 6)), found) == 1.0


@pytest.mark.slow
def test_three_agents_find_the_groups(result):
    """The axes of the grid must belong to their agents, which shows from three agents on."""
    views, truth = blobs()
    found = np.asarray(result.labels[0][0])
    assert adjusted_rand_score(truth, found) > 0.98
    alone = [KMeans(5, n_init=3, random_state=0).fit(v).labels_ for v in views]
    assert max(adjusted_rand_score(truth, labels) for labels in alone) < 0.93
    for labels in result.labels:  # one partition for all
        np.testing.assert_array_equal(labels, result.labels[0])
    assert result.labels[0].dtype == jnp.int32
    assert 5 < result.info["setup"][0]["server"]["n_cells"] <= 5**3


@pytest.mark.slow
def test_one_agent_is_plain_kmeans():
    x = np.concatenate(blobs()[0], axis=1)
    found = run(vertical([x]))
    theirs = KMeans(5, n_init=5, random_state=0).fit(x).labels_
    assert found.info["setup"][0]["server"]["n_cells"] == 5
    assert adjusted_rand_score(theirs, found.labels[0][0]) == 1.0


@pytest.mark.slow
def test_fewer_cells_than_clusters_give_a_cluster_to_each_cell():
    values = np.repeat([[0.0], [1.0]], 150, axis=0).astype(np.float32)
    found = run(vertical([values * np.ones(4)] * 3))
    assert found.info["setup"][0]["server"]["n_cells"] == 2
    assert adjusted_rand_score(values[:, 0], found.labels[0][0]) == 1.0
    assert set(np.asarray(found.labels[0][0]).tolist()) == {0, 1}


@pytest.mark.slow
def test_padding_and_the_order_of_cohorts_change_nothing(result):
    turned = vertical(blobs()[0], padding=9, order=(2, 0, 1))
    found = run(turned)
    for labels in found.labels:
        np.testing.assert_array_equal(labels[0], np.append(result.labels[0], np.full(9, -1)))


@pytest.mark.slow
def test_same_key_gives_same_bits(result):
    again = run(vertical(blobs()[0]))
    np.testing.assert_array_equal(again.labels, result.labels)


def test_limit_is_the_number_of_clusters_in_one_program(result):
    federation = vertical(blobs()[0])
    before = len(TRACED)
    for k in (1, 3, 6):
        assert set(np.asarray(run(federation, limit=k).labels[0][0]).tolist()) == set(range(k))
    assert set(np.asarray(result.labels[0][0]).tolist()) == set(range(5))
    assert len(TRACED) == before


def test_bytes_are_centroids_and_labels_up_and_labels_down():
    traffic = engine.traffic(distr_kmeans(DistrKMeansConfig(5)), vertical(blobs()[0]))
    assert traffic["setup"] == (4 * (5 * 12 + 3 * 300), 0)
    assert traffic["round"] == (0, 0)
    assert traffic["finish"] == (0, 4 * 3 * 300)


def test_bad_input_is_named():
    key = jax.random.key(0)
    views = [v[:4] for v in blobs()[0]]
    with pytest.raises(ValueError, match=r"client 0 .* has 4 samples; allowed is 5"):
        engine.start(distr_kmeans(DistrKMeansConfig(5)), vertical(views), key)
    shared = Federation.from_arrays(
        views, partition=[Part((0, 1, 2), np.array([[0, 1], [2, 3]]), np.arange(2))]
    )
    with pytest.raises(ValueError, match="vertical"):
        engine.start(distr_kmeans(DistrKMeansConfig(2)), shared, key)
    for settings in ({"n_clusters": 0}, {"n_init": 0}):
        with pytest.raises(ValueError, match=f"^{next(iter(settings))}: got 0; allowed is 1"):
            DistrKMeansConfig(**({"n_clusters": 2} | settings))
    with pytest.raises(ValueError, match=r"^limit: got 0; allowed is 1 to"):
        distr_kmeans(DistrKMeansConfig(2), DistrKMeansHyperparams(0))
