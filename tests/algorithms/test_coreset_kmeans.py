"""CoresetKMeans: sensitivities and weights against NumPy, draws against their distribution."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc import engine
from jaxfedmvc.algorithms.coreset_kmeans import (
    CoresetKMeansConfig,
    CoresetKMeansHyperparams,
    coreset_kmeans,
    draw_rows,
    importance_weights,
    sensitivities,
)
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation

N, K = 200, 3
WIDTHS = (2, 4, 3)
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


@functools.cache
def blobs():
    x, y = make_blobs(N, sum(WIDTHS), centers=K, cluster_std=2.0, random_state=3)
    return np.split(x.astype(np.float32), np.cumsum(WIDTHS)[:-1], axis=1), y


TRACED = []  # one entry for each time that `program` is traced


@jit
def program(federation, key, limit):
    """One program for each shape, and for all numbers of clusters up to five."""
    TRACED.append(federation.cohorts[0].view_ids)
    hyper = CoresetKMeansHyperparams(limit=limit)
    algorithm = coreset_kmeans(CoresetKMeansConfig(5, n_init=3), hyper)
    return engine.run(algorithm, federation, key, rounds=0)


def run(federation, key=0, limit=K):
    return program(federation, jax.random.key(key), jnp.int32(limit))


@pytest.fixture(scope="module")
def result():
    return run(vertical(blobs()[0]))


# Sensitivities.


def by_definition(x, labels, centroids, alpha):
    """A loop over rows, in float64."""
    x, centroids = x.astype(np.float64), centroids.astype(np.float64)
    d2 = np.array([np.square(row - centroids[b]).sum() for row, b in zip(x, labels, strict=True)])
    mean, s = d2.mean(), []
    for own, b in zip(d2, labels, strict=True):
        size, cost = (labels == b).sum(), d2[labels == b].sum()
        terms = [(alpha * own, mean), (2 * alpha * cost, size * mean), (4 * len(x), size)]
        s.append(sum(top / bottom for top, bottom in terms if bottom > 0))
    return np.array(s)


@pytest.mark.parametrize("alpha", [2.0, 0.5])
def test_sensitivities_are_those_of_a_loop(alpha):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 2)).astype(np.float32)
    labels, centroids = rng.integers(0, 3, 30), rng.normal(size=(4, 2)).astype(np.float32)
    padded = np.concatenate([x, np.full((5, 2), np.nan, np.float32)])
    found = jax.jit(sensitivities)(
        padded, np.append(labels, np.full(5, -1)), centroids, np.arange(35) < 30, alpha
    )
    np.testing.assert_allclose(found[:30], by_definition(x, labels, centroids, alpha), rtol=1e-5)
    np.testing.assert_array_equal(found[30:], np.zeros(5))


def test_hand_worked_sensitivities():
    # Cluster 0 is {0, 2} around 1 with cost 2, cluster 1 is {9} with cost 0; c = 2/3.
    x = jnp.array([[0.0], [2.0], [9.0]])
    found = sensitivities(
        x, jnp.array([0, 0, 1]), jnp.array([[1.0], [9.0]]), jnp.ones(3, bool), alpha=2.0
    )
    np.testing.assert_allclose(found, [3 + 6 + 6, 3 + 6 + 6, 12], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.0, 1e-7])
def test_no_cost_leaves_the_sizes_of_clusters(offset):
    """All rows on their centroids, exactly or but for the rounding of a mean."""
    x = jnp.array([[0.0, 1.0], [0.0, 1.0], [3.0, 3.0], [3.0, 3.0], [3.0, 3.0]])
    labels, centroids = jnp.array([0, 0, 1, 1, 1]), jnp.array([[0.0, 1 + offset], [3.0, 3.0]])
    found = sensitivities(x, labels, centroids, jnp.ones(5, bool), alpha=2.0)
    np.testing.assert_allclose(found, np.array([10, 10, 20 / 3, 20 / 3, 20 / 3]), rtol=1e-6)


# Draws and weights.


def test_draws_follow_successive_sampling_without_replacement():
    """P(first i, then j) = p_i p_j / (1 - p_i); the row without a chance is padding."""
    chances = jnp.array([1.0, 0.0, 2.0, 5.0])
    draw = jax.jit(jax.vmap(lambda key: draw_rows(key, chances, 2)))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 20_000)))
    p = np.asarray(chances, np.float64) / 8
    pairs = list(itertools.permutations((0, 2, 3), 2))
    expected = [p[i] * p[j] / (1 - p[i]) for i, j in pairs]
    counts = [(drawn == pair).all(axis=1).sum() for pair in pairs]
    assert sum(counts) == len(drawn)
    assert chisquare(counts, len(drawn) * np.array(expected)).pvalue > 0.01


@pytest.mark.slow
def test_padding_and_further_draws_do_not_change_the_first():
    key, chances = jax.random.key(1), jnp.arange(1.0, 21.0)
    few = draw_rows(key, chances, 4)
    more = draw_rows(key, jnp.pad(chances, (0, 12)), 20)
    np.testing.assert_array_equal(more[:4], few)
    assert sorted(more.tolist()) == list(range(20))


def test_weights_are_inverse_sensitivities_that_sum_to_one():
    weights = importance_weights(jnp.array([1.0, 4.0, 2.0, 0.0]), jnp.array([2, 1, -1]))
    np.testing.assert_allclose(weights, [2 / 3, 1 / 3, 0.0], rtol=1e-6)


# The method.


@pytest.mark.slow
def test_agents_find_the_groups_from_a_tenth_of_the_rows(result):
    _, truth = blobs()
    server = result.state.server
    rows = np.asarray(server.rows)
    assert server.n_drawn == len(rows) == N // 10 == len(set(rows.tolist()))
    scores = [adjusted_rand_score(truth, np.asarray(labels[0])) for labels in result.labels]
    assert min(scores) > 0.85
    numberings = [np.asarray(labels[0]) for labels in result.labels]
    assert np.mean(numberings[0] == numberings[1]) > 0.9  # clusters have the same numbers


@pytest.mark.slow
def test_server_clusters_the_drawn_rows_and_agents_take_their_own_columns(result):
    views, _ = blobs()
    server = result.state.server
    x = np.concatenate(views, axis=1)[np.asarray(server.rows)]
    theirs = KMeans(K, n_init=10, random_state=0).fit(x, sample_weight=server.weights)
    assert server.n_centroids == K
    ours = np.concatenate([server.centroids[(a,)][:K] for a in range(3)], axis=1)
    order, their_order = np.lexsort(ours.T), np.lexsort(theirs.cluster_centers_.T)
    np.testing.assert_allclose(ours[order], theirs.cluster_centers_[their_order], rtol=1e-4)
    for a, (view, labels) in enumerate(zip(views, result.labels, strict=True)):
        distance = np.square(view[:, None] - np.asarray(server.centroids[(a,)])[:K]).sum(axis=2)
        np.testing.assert_array_equal(labels[0], distance.argmin(axis=1))
        assert labels.dtype == jnp.int32


@pytest.mark.slow
def test_coreset_of_all_rows_with_equal_weights_is_plain_kmeans():
    """Replacing the sensitivities by ones gives equal weights, as one can at the server."""
    views, _ = blobs()
    algorithm = coreset_kmeans(CoresetKMeansConfig(K, n_coreset=N, n_init=3))
    state = engine.start(algorithm, vertical(views), jax.random.key(0)).server
    draw, collect = (jit(phase.server) for phase in algorithm.setup)
    key = jax.random.key(0)
    state, _ = draw(key, state, tuple({(a,): jnp.ones((1, N))} for a in range(3)), ())
    np.testing.assert_allclose(state.weights, np.full(N, 1 / N), rtol=1e-6)
    rows = np.asarray(state.rows)
    assert sorted(rows.tolist()) == list(range(N))
    state, _ = collect(key, state, tuple({(a,): v[rows][None]} for a, v in enumerate(views)), ())
    x = np.concatenate(views, axis=1)
    theirs = KMeans(K, n_init=5, random_state=0).fit(x).cluster_centers_
    ours = np.concatenate([state.centroids[(a,)] for a in range(3)], axis=1)
    np.testing.assert_allclose(
        ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)], rtol=1e-3, atol=1e-3
    )


def test_rows_are_drawn_by_the_sum_of_the_agents_sensitivities():
    own = np.array([[8.0, 2, 3, 4], [1, 8, 2, 3], [1, 0, 0, 8]], np.float32)
    algorithm = coreset_kmeans(CoresetKMeansConfig(2, n_coreset=1))
    state = engine.start(algorithm, vertical([own.T[:, [a]] for a in range(3)]), jax.random.key(0))
    messages = tuple({(a,): jnp.array(s[None])} for a, s in enumerate(own))
    draw = jit(jax.vmap(lambda k: algorithm.setup[0].server(k, state.server, messages, ())[0].rows))
    counts = np.bincount(np.ravel(draw(jax.random.split(jax.random.key(0), 20_000))), minlength=4)
    assert chisquare(counts, 20_000 * np.array([0.25, 0.25, 0.125, 0.375])).pvalue > 0.01


@pytest.mark.slow
def test_padding_and_the_order_of_cohorts_change_only_rounding(result):
    """25 rows more make room for two slots more, which stay empty."""
    order = (2, 0, 1)
    found = run(vertical(blobs()[0], 25, order))
    server, expected = found.state.server, result.state.server
    assert (len(server.rows), len(expected.rows)) == (22, 20)
    np.testing.assert_array_equal(server.rows, np.append(expected.rows, [-1, -1]))
    np.testing.assert_allclose(server.weights, np.append(expected.weights, [0, 0]), rtol=1e-4)
    for a, labels in zip(order, found.labels, strict=True):
        np.testing.assert_allclose(
            server.centroids[(a,)][:K], expected.centroids[(a,)][:K], rtol=1e-4, atol=1e-4
        )
        np.testing.assert_array_equal(labels[0], np.append(result.labels[a], np.full(25, -1)))


def test_empty_slots_of_the_coreset_are_not_sent():
    federation = vertical(blobs()[0])
    phase = coreset_kmeans(CoresetKMeansConfig(K)).setup[1]
    client = jax.tree.map(lambda x: x[0], federation.cohorts[1])
    _, message, _ = phase.client(jax.random.key(0), jnp.array([7, -1]), (), client)
    np.testing.assert_array_equal(message[(1,)], [blobs()[0][1][7], np.zeros(4)])


@pytest.mark.slow
def test_same_key_gives_same_bits_and_another_draws_other_rows(result):
    federation = vertical(blobs()[0])
    again, other = (run(federation, key=seed) for seed in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, again.state.server, result.state.server)
    assert set(np.asarray(other.state.server.rows).tolist()) != set(
        np.asarray(result.state.server.rows).tolist()
    )


@pytest.mark.slow
def test_limit_is_the_number_of_clusters_in_one_program(result):
    federation = vertical(blobs()[0])
    before = len(TRACED)
    for k in (1, 2, 5):
        found = run(federation, limit=k)
        assert found.state.server.n_centroids == k
        assert all(set(np.unique(own)) == set(range(k)) for own in found.labels)
    assert len(TRACED) == before


@pytest.mark.slow
def test_no_more_clusters_than_drawn_rows():
    federation = vertical(blobs()[0])
    algorithm = coreset_kmeans(CoresetKMeansConfig(K, n_coreset=2, n_init=2))
    with pytest.warns(UserWarning, match="n_coreset: 2 rows are drawn, .* no more than 2 of 3"):
        state = engine.start(algorithm, federation, jax.random.key(0)).server
    state = state._replace(rows=jnp.array([5, 9]), weights=jnp.array([0.3, 0.7]))
    messages = tuple({(a,): v[None, [5, 9]]} for a, v in enumerate(blobs()[0]))
    state, _ = jit(algorithm.setup[1].server)(jax.random.key(0), state, messages, ())
    assert state.n_centroids == 2
    for a, cohort in enumerate(federation.cohorts):
        client = jax.tree.map(lambda x: x[0], cohort)
        labels = algorithm.assign(state, (), client)
        assert set(np.asarray(labels).tolist()) == {0, 1}
        assert labels[5] != labels[9], a


def test_bytes_are_sensitivities_and_raw_rows_up_and_centroids_down():
    algorithm = coreset_kmeans(CoresetKMeansConfig(K, n_coreset=30))
    traffic = engine.traffic(algorithm, vertical(blobs()[0]))
    agents, p = len(WIDTHS), sum(WIDTHS)
    assert traffic["setup"] == (4 * (agents * N + 30 * p), 4 * agents * 30)
    assert traffic["round"] == (0, 0)
    assert traffic["finish"] == (0, 4 * (K * p + agents))


def test_bad_input_is_named():
    federation, key = vertical([v[:4] for v in blobs()[0]]), jax.random.key(0)
    with pytest.raises(ValueError, match=r"n_coreset: got 0; allowed is 1 or more"):
        CoresetKMeansConfig(2, n_coreset=0)
    for alpha in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=rf"alpha: got {alpha}; allowed is a finite"):
            coreset_kmeans(CoresetKMeansConfig(2), CoresetKMeansHyperparams(alpha=alpha))
    with pytest.raises(ValueError, match=r"has 4 samples; allowed is 5 .* clusters"):
        engine.start(coreset_kmeans(CoresetKMeansConfig(5)), federation, key)
    with pytest.raises(ValueError, match=r"has 4 samples; allowed is 6 .* coreset"):
        engine.start(coreset_kmeans(CoresetKMeansConfig(2, n_coreset=6)), federation, key)
    shared = Federation.from_arrays(
        [v[:4] for v in blobs()[0]],
        partition=[Part((0, 1, 2), np.array([[0, 1], [2, 3]]), np.arange(2))],
    )
    with pytest.raises(ValueError, match="vertical"):
        engine.start(coreset_kmeans(CoresetKMeansConfig(2)), shared, key)


def test_of_fewer_rows_than_clusters_each_is_a_centroid():
    algorithm = coreset_kmeans(CoresetKMeansConfig(2, n_coreset=1, n_init=1))
    federation = Federation.from_agents([(range(9), np.eye(9, 2, dtype=np.float32))])
    with pytest.warns(UserWarning, match="n_coreset: 1 rows are drawn"):
        state, _ = algorithm.init(jax.random.key(0), federation)
    state = state._replace(rows=jnp.array([4]), weights=jnp.array([0.5]))
    message = {(0,): jnp.array([[[3.0, 1.0]]])}
    state, _ = jit(algorithm.setup[1].server)(jax.random.key(0), state, (message,), ())
    assert state.n_centroids == 1
    np.testing.assert_array_equal(state.centroids[0,][0], [3.0, 1.0])


def test_the_server_weighs_the_rows_that_were_drawn():
    """One cluster: its centroid is the weighted mean."""
    views = [np.eye(9, 2, dtype=np.float32), np.eye(9, 1, dtype=np.float32)]
    algorithm = coreset_kmeans(CoresetKMeansConfig(1, n_coreset=3, n_init=1))
    state = algorithm.init(
        jax.random.key(0), Federation.from_agents([(range(9), v) for v in views])
    )
    state = state[0]._replace(rows=jnp.array([4, 0, 2]), weights=jnp.array([0.5, 0.3, 0.2]))
    rows = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), jnp.array([[0.0], [0.0], [1.0]])
    messages = {(0,): rows[0][None]}, {(1,): rows[1][None]}
    server, _ = algorithm.setup[1].server(jax.random.key(0), state, messages, ())
    np.testing.assert_allclose(server.centroids[0,], [[0.5, 0.3]], rtol=1e-6)
    np.testing.assert_allclose(server.centroids[1,], [[0.2]], rtol=1e-6)
