import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn import cluster, datasets
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc.clustering.sc_srgf import (
    diffuse,
    draw_subspaces,
    fused_graph,
    neighbour_graph,
    sc_srgf,
    strongest_edges,
)

N, P, K = 48, 10, 5
jit_draw = jax.jit(draw_subspaces, static_argnums=(1, 2))
compiled_graph = jax.jit(functools.partial(fused_graph, n_steps=6))
compiled = jax.jit(functools.partial(sc_srgf, n_clusters=4, n_graphs=5, n_steps=6, n_init=2))


def fuse(x, features, where=None, graphs_limit=4, alpha=1.0):
    """Fused graph by one program for all tests, of up to 4 subspaces and 6 steps."""
    where = np.ones(N, bool) if where is None else where
    return np.asarray(
        compiled_graph(x, features, where=where, graphs_limit=graphs_limit, alpha=alpha)
    )


def run(seed, x, where=None, limit=4, graphs_limit=5, ratio=0.5):
    """Labels by one program for all tests."""
    where = np.ones(N, bool) if where is None else where
    options = {"where": where, "limit": limit, "graphs_limit": graphs_limit, "ratio": ratio}
    return np.asarray(compiled(jax.random.key(seed), x, alpha=1.0, **options))


def blobs(n=N, std=1.0, seed=0):
    x, truth = datasets.make_blobs(n, P, centers=4, cluster_std=std, random_state=seed)
    return x.astype(np.float32), truth


def subspaces(m=4, seed=0):
    features = np.random.default_rng(seed).uniform(size=(m, P)) < 0.5
    features[:, 0] = True
    return features


def reference(x, features, n_neighbours=K, n_steps=6, alpha=1.0):
    """The fused graph with dense products, in float64."""
    n, m = len(x), len(features)
    rows, k = np.arange(n)[:, None], min(n_neighbours, n)

    def symmetric(a):
        return (a + a.T) / 2

    def per_row(a):
        return a / a.sum(axis=1, keepdims=True)

    def top(a):
        kept, best = np.zeros_like(a), np.argsort(-a, axis=1, kind="stable")[:, :k]
        kept[rows, best] = a[rows, best]
        return kept

    graphs = []
    for subspace in features:
        d = cdist(x[:, subspace], x[:, subspace])
        near = np.argsort(d, axis=1, kind="stable")[:, :k]
        graph = np.zeros((n, n))
        graph[rows, near] = np.exp(-d / (2 * d.mean()))[rows, near]
        graphs.append(symmetric(per_row(graph)))
    transitions = [per_row(top(graph)) for graph in graphs]
    for _ in range(n_steps):
        total = sum(graphs)
        graphs = [
            symmetric(s @ ((total - w) / (m - 1)) @ s.T + alpha * np.eye(n))
            for s, w in zip(transitions, graphs, strict=True)
        ]
    fused = per_row(sum(graphs) / m)
    return (fused + fused.T + np.eye(n)) / 2


@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_fused_graph_matches_the_dense_reference(alpha):
    x, _ = blobs(std=5.0)
    expected = reference(x, subspaces(), alpha=alpha)
    np.testing.assert_allclose(fuse(x, subspaces(), alpha=alpha), expected, atol=1e-5)


@pytest.mark.parametrize("n_selected", [1, 2, 3, K, 30])
def test_padding_and_fewer_rows_than_neighbours(n_selected):
    x, _ = blobs(std=5.0)
    where = np.zeros(N, bool)
    where[np.random.default_rng(0).choice(N, n_selected, replace=False)] = True
    spoilt = np.where(where[:, None], x, np.nan)
    graph = fuse(spoilt, subspaces(), where)
    expected = np.zeros((N, N))
    # A single row has sigma = 0, of which the reference makes NaN. F = 1, so (F + F + 1) / 2.
    expected[np.ix_(where, where)] = reference(x[where], subspaces()) if n_selected > 1 else 1.5
    np.testing.assert_allclose(graph, expected, atol=1e-5)


def test_capacity_below_the_number_of_neighbours():
    x, _ = blobs(3)
    graph = jax.jit(fused_graph)(x, subspaces())
    np.testing.assert_allclose(graph, reference(x, subspaces(), n_steps=20), atol=1e-5)


def test_graphs_limit_equals_fewer_graphs():
    x, _ = blobs(std=5.0)
    expected = reference(x, subspaces()[:2])
    np.testing.assert_allclose(fuse(x, subspaces(), graphs_limit=2), expected, atol=1e-5)


def test_hand_worked_neighbour_graph_on_a_line():
    # Rows at 0, 1, 2: sigma = 8 / 9, a step weighs exp(-9 / 16), and of the two neighbours of row 1
    # at equal distance row 0 is taken.
    step = np.exp(-9 / 16)
    own, other = 1 / (1 + step), step / (1 + step)
    expected = [[own, other, 0], [other, own, other / 2], [0, other / 2, own]]
    distances = np.abs(np.arange(3.0)[:, None] - np.arange(3.0)[None]).astype(np.float32)
    graph = jax.jit(neighbour_graph, static_argnums=2)(distances, jnp.ones(3, bool), 2)
    np.testing.assert_allclose(graph, expected, rtol=1e-5, atol=1e-7)


def test_diffusion_is_the_dense_product():
    rng = np.random.default_rng(0)
    graph, other = (a + a.T for a in rng.uniform(size=(2, 9, 9)).astype(np.float32))
    neighbours, weights = strongest_edges(jnp.asarray(graph), 3)
    dense = np.where(graph >= np.sort(graph, axis=1)[:, [-3]], graph, 0)
    dense /= dense.sum(axis=1, keepdims=True)
    diffused = diffuse(jnp.asarray(other), neighbours, weights)
    np.testing.assert_allclose(diffused, dense @ other @ dense.T, rtol=1e-5)


def test_ties_of_strongest_edges_go_to_the_lower_index():
    neighbours, weights = strongest_edges(jnp.ones((4, 4)), 2)
    np.testing.assert_array_equal(neighbours, np.tile([0, 1], (4, 1)))
    np.testing.assert_array_equal(weights, np.full((4, 2), 0.5))


@pytest.mark.parametrize(
    "ratio, size", [(0.29, 29), (0.57, 57), (0.079, 7), (0.999, 99), (0.001, 1), (1.0, 100)]
)
def test_size_of_subspaces(ratio, size):
    drawn = jit_draw(jax.random.key(0), 100, 5, ratio)
    np.testing.assert_array_equal(drawn.sum(axis=1), np.full(5, size))


def test_subspaces_differ_and_do_not_depend_on_their_number():
    five = np.asarray(jit_draw(jax.random.key(1), 100, 5, 0.5))
    assert len(np.unique(five, axis=0)) == 5
    np.testing.assert_array_equal(five[:3], jit_draw(jax.random.key(1), 100, 3, 0.5))


def test_features_are_drawn_equally_often():
    drawn = sum(jit_draw(jax.random.key(seed), 100, 5, 0.3).sum(axis=0) for seed in range(100))
    # 150 of 500 with a standard deviation of 10.
    np.testing.assert_allclose(drawn, 150, atol=50)


@pytest.mark.slow
def test_clusters_match_the_reference_and_the_truth():
    x, truth = blobs()
    labels = run(0, x)
    assert adjusted_rand_score(labels, truth) == 1 and labels.dtype == np.int32
    theirs = cluster.SpectralClustering(4, affinity="precomputed", random_state=0)
    affinity = reference(x, subspaces()) + 1e-9  # in one piece, as scikit-learn asks for
    assert adjusted_rand_score(labels, theirs.fit_predict(affinity)) == 1


@pytest.mark.slow
def test_padding_rows_get_no_label_and_change_no_other():
    x, truth = blobs()
    where = np.arange(N) % 3 > 0
    labels = run(1, np.where(where[:, None], x, np.nan), where)
    np.testing.assert_array_equal(labels, run(1, np.where(where[:, None], x, 1e6), where))
    np.testing.assert_array_equal(labels >= 0, where)
    assert adjusted_rand_score(labels[where], truth[where]) == 1


@pytest.mark.slow
def test_limits_equal_smaller_static_sizes_and_vmap_equals_loop():
    x, _ = blobs(std=5.0)
    fewer = functools.partial(sc_srgf, n_clusters=3, n_graphs=4, n_steps=6, n_init=2)
    batched = jax.jit(jax.vmap(fewer, in_axes=(0, None)))(
        jax.vmap(jax.random.key)(jnp.arange(3)), x
    )
    for seed, labels in enumerate(batched):
        np.testing.assert_array_equal(labels, run(seed, x, limit=3, graphs_limit=4))


def test_one_trace_serves_all_limits_and_weights():
    chex.clear_trace_counter()
    traced = jax.jit(
        chex.assert_max_traces(lambda *a: fused_graph(a[0], a[1], graphs_limit=a[2], alpha=a[3]), 1)
    )
    x, _ = blobs(12)
    for limit, alpha in ((2, 1.0), (4, 0.5)):
        graph = traced(x, subspaces(), limit, alpha)
        expected = reference(x, subspaces()[:limit], n_steps=20, alpha=alpha)
        np.testing.assert_allclose(graph, expected, atol=1e-5)


@pytest.mark.parametrize("n_selected", [0, 1, 2, N])
def test_equal_and_too_few_rows_have_labels(n_selected):
    where = np.arange(N) < n_selected
    for x in (np.full((N, P), 3.3, np.float32), blobs()[0]):
        graph = fuse(x, subspaces(), where)
        chex.assert_tree_all_finite(graph)
        labels = run(0, x, where)
        np.testing.assert_array_equal(labels >= 0, where)
        assert labels.max() < 4
        if n_selected < 4:
            assert len(np.unique(labels[where])) == n_selected


@pytest.mark.parametrize(
    "kwargs, name",
    [
        ({"n_clusters": 0}, "n_clusters"),
        ({"limit": 0}, "limit"),
        ({"n_graphs": 1}, "n_graphs"),
        ({"graphs_limit": 1}, "graphs_limit"),
        ({"graphs_limit": 3}, "graphs_limit"),
        ({"graphs_limit": 2.5, "n_graphs": 3}, "graphs_limit"),
        ({"n_graphs": 2.5}, "n_graphs"),
        ({"ratio": 1.5}, "ratio"),
        ({"ratio": "half"}, "ratio"),
        ({"ratio": np.array([0.5, 0.5])}, "ratio"),
        ({"n_neighbours": 2.5}, "n_neighbours"),
        ({"n_steps": 2.5}, "n_steps"),
        ({"alpha": np.inf}, "alpha"),
        ({"n_neighbours": 0}, "n_neighbours"),
        ({"n_steps": -1}, "n_steps"),
        ({"alpha": -1.0}, "alpha"),
        ({"x": jnp.ones(4)}, "x"),
        ({"where": jnp.ones(3, bool)}, "where"),
    ],
)
def test_wrong_arguments_are_named(kwargs, name):
    defaults = {"key": jax.random.key(0), "x": jnp.ones((4, 2)), "n_clusters": 2}
    # Traced as a whole: a wrong argument is refused before anything is computed.
    with pytest.raises(ValueError, match=f"^{name}(:| must)"):
        jax.eval_shape(lambda: sc_srgf(**({"n_graphs": 2} | defaults | kwargs)))


def test_features_of_wrong_shape_are_refused():
    for features in (jnp.ones((1, 2)), jnp.ones((2, 3))):
        with pytest.raises(ValueError, match=r"^features must have shape \[m, 2\]"):
            fused_graph(jnp.ones((4, 2)), features)
