import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import csgraph
from sklearn import cluster, datasets, manifold
from sklearn.metrics import adjusted_rand_score
from sklearn.neighbors import kneighbors_graph

from jaxfedmvc.clustering.spectral import spectral, spectral_embedding

jit_embedding = jax.jit(spectral_embedding, static_argnames="n_components")
compiled = jax.jit(functools.partial(spectral, n_clusters=4, n_init=3))


def run(seed, affinity, limit, where=None):
    """Labels by one program for all tests."""
    where = np.ones(60, bool) if where is None else where
    return np.asarray(compiled(jax.random.key(seed), affinity, where=where, limit=limit))


def random_graph(n=60, seed=0):
    """Weights in [0, 1] of a graph in one piece with distinct eigenvalues, self-loops included."""
    weights = np.random.default_rng(seed).uniform(size=(n, n))
    weights = np.where(weights < 0.7, 0.05, weights)
    return ((weights + weights.T) / 2).astype(np.float32)


def block_graph(n=60, k=3, between=0.05):
    truth = np.arange(n) % k
    return np.where(truth[:, None] == truth, 1.0, between).astype(np.float32), truth


def moons_graph(n=60):
    x, truth = datasets.make_moons(n, noise=0.03, random_state=0)
    graph = kneighbors_graph(x, 5, include_self=True).toarray()
    return (np.maximum(graph, graph.T) + 1e-4).astype(np.float32), truth  # in one piece


def align(vectors, like):
    """`vectors` with the signs of `like`, column by column."""
    return vectors * np.sign(np.sum(vectors * like, axis=0, keepdims=True))


def pad(affinity, n, garbage=np.nan):
    padded = np.full((n, n), garbage, np.float32)
    padded[: len(affinity), : len(affinity)] = affinity
    return padded, np.arange(n) < len(affinity)


def test_embedding_matches_sklearn_up_to_signs():
    affinity = random_graph()
    ours = np.asarray(jit_embedding(affinity, n_components=4))
    theirs = manifold.spectral_embedding(
        affinity.astype(np.float64), n_components=4, drop_first=False, eigen_tol=1e-12
    )
    np.testing.assert_allclose(align(ours, theirs), theirs, atol=1e-5)


def test_embedding_solves_the_normalised_laplacian():
    affinity = random_graph(seed=1).astype(np.float64)
    laplacian, roots = csgraph.laplacian(affinity, normed=True, return_diag=True)
    values = np.linalg.eigvalsh(laplacian)
    vectors = np.asarray(jit_embedding(affinity, n_components=4)) * roots[:, None]
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(4), atol=1e-5)
    np.testing.assert_allclose(laplacian @ vectors, vectors * values[None, :4], atol=1e-5)


def test_hand_worked_path():
    # Path 0 - 1 - 2: eigenvalues 0, 1, 2 with vectors sqrt(d) = (1, sqrt 2, 1) / 2,
    # (1, 0, -1) / sqrt 2 and (1, -sqrt 2, 1) / 2, to be divided by sqrt(d).
    path = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], np.float32)
    half = np.sqrt(0.5)
    expected = [[0.5, half, 0.5], [0.5, 0, -0.5], [0.5, -half, 0.5]]
    np.testing.assert_allclose(jit_embedding(path, n_components=3), expected, atol=1e-6)


def test_embedding_of_disconnected_blocks_is_constant_on_each():
    affinity, truth = block_graph(between=0.0)
    vectors = np.asarray(jit_embedding(affinity, n_components=4))[:, :3]
    means = np.stack([vectors[truth == j].mean(axis=0) for j in range(3)])
    np.testing.assert_allclose(vectors, means[truth], atol=1e-5)
    # The rows of an orthonormal basis of the three indicators, over the root of 19: orthogonal.
    np.testing.assert_allclose(means @ means.T, np.eye(3) / 20 / 19, atol=1e-5)


@pytest.mark.parametrize("graph, k", [(block_graph, 3), (moons_graph, 2)])
def test_clusters_match_sklearn_and_the_truth(graph, k):
    affinity, truth = graph()
    ours = run(0, affinity, k)
    theirs = cluster.SpectralClustering(k, affinity="precomputed", random_state=0).fit(affinity)
    assert adjusted_rand_score(ours, theirs.labels_) == 1
    assert adjusted_rand_score(ours, truth) == 1
    assert ours.dtype == jnp.int32


def test_padding_changes_nothing():
    affinity = random_graph(40)
    padded, where = pad(affinity, 60)
    plain = jit_embedding(affinity, n_components=4)
    masked = jit_embedding(padded, n_components=4, where=where)
    np.testing.assert_allclose(masked[:40], plain, atol=1e-5)
    np.testing.assert_array_equal(masked[40:], np.zeros((20, 4)))


def test_padding_rows_get_no_label_and_their_values_are_never_read():
    affinity, truth = block_graph(40)
    runs = []
    for garbage in (np.nan, 7.0):
        padded, where = pad(affinity, 60, garbage)
        runs.append(run(0, padded, 3, where))
    np.testing.assert_array_equal(*runs)
    assert adjusted_rand_score(runs[0][:40], truth) == 1
    np.testing.assert_array_equal(runs[0] >= 0, where)


def test_limit_equals_fewer_clusters():
    affinity = random_graph(seed=2)
    limited = run(3, affinity, 3)
    fewer = jax.jit(functools.partial(spectral, n_clusters=3, n_init=3))
    np.testing.assert_array_equal(limited, fewer(jax.random.key(3), affinity))
    assert set(np.unique(limited)) == {0, 1, 2}


@pytest.mark.parametrize("n_selected", [0, 1, 3])
def test_fewer_vertices_than_clusters_are_clusters_of_their_own(n_selected):
    where = np.arange(60) < n_selected
    labels = run(0, random_graph(), 4, where)
    assert len(np.unique(labels[where])) == n_selected
    np.testing.assert_array_equal(labels >= 0, where)
    vectors = jit_embedding(random_graph(), n_components=4, where=where)
    np.testing.assert_array_equal(vectors[:, n_selected:], np.zeros((60, 4 - n_selected)))


def test_more_clusters_than_capacity():
    # What the labels are in this case is seen above, on padded vertices.
    labels = jax.eval_shape(lambda: spectral(jax.random.key(0), jnp.ones((2, 2)), 3))
    assert labels.shape == (2,)


def test_vertices_without_edges_stay_finite_and_do_not_hide_the_blocks():
    affinity, truth = block_graph(between=0.0)
    lonely = np.arange(60) >= 57
    affinity[lonely] = affinity[:, lonely] = 0
    vectors = jit_embedding(affinity, n_components=4)
    chex.assert_tree_all_finite(vectors)
    np.testing.assert_allclose(vectors[lonely, :3], 0, atol=1e-5)
    labels = run(0, affinity, 3)
    assert adjusted_rand_score(labels[~lonely], truth[~lonely]) == 1
    chex.assert_tree_all_finite(jit_embedding(np.zeros((60, 60), np.float32), n_components=4))


def test_signs_are_fixed_by_the_first_large_entry():
    vectors = np.asarray(jit_embedding(random_graph(seed=4), n_components=4))
    for column in vectors.T:
        assert column[np.abs(column) >= np.abs(column).max() / 2][0] > 0


@pytest.mark.parametrize(
    "kwargs, name",
    [
        ({"n_clusters": 0}, "n_clusters"),
        ({"n_init": 0}, "n_init"),
        ({"limit": 0}, "limit"),
        ({"limit": np.array([1, 2])}, "limit"),
        ({"limit": "two"}, "limit"),
        ({"affinity": jnp.ones((4, 3))}, "affinity"),
        ({"affinity": np.full((4, 4), 1j)}, "affinity"),
        ({"affinity": jnp.ones((0, 0))}, "affinity"),
        ({"where": jnp.ones(3, bool)}, "where"),
    ],
)
def test_wrong_arguments_are_named(kwargs, name):
    # Traced as a whole: a wrong argument is refused before anything is computed.
    arguments = {"key": jax.random.key(0), "affinity": jnp.ones((4, 4)), "n_clusters": 2} | kwargs
    with pytest.raises(ValueError, match=f"^{name}(:| must)"):
        jax.eval_shape(lambda: spectral(**arguments))


def test_an_edge_that_is_no_number_is_named_where_it_is_read():
    affinity = np.ones((3, 3), np.float32)
    affinity[0, 0] = np.nan  # a self-loop, which is not read
    assert np.isfinite(spectral_embedding(affinity, 1)).all()
    affinity[0, 1] = np.nan
    with pytest.raises(ValueError, match=r"^affinity must be finite"):
        spectral_embedding(affinity, 1)


def test_a_negative_edge_is_named_where_it_is_read():
    affinity = 1 - 2 * np.eye(3, dtype=np.float32)  # self-loops are not read
    assert np.isfinite(spectral_embedding(affinity, 2)).all()
    affinity[0, 1] = affinity[1, 0] = -0.5
    with pytest.raises(ValueError, match=r"^affinity must be 0 or more .* got -0\.5"):
        spectral_embedding(affinity, 2)
    assert np.isfinite(spectral_embedding(affinity, 1, where=np.arange(3) > 0)).all()


def test_a_graph_that_is_not_symmetric_is_named_and_one_that_is_but_for_rounding_is_not():
    affinity = np.ones((3, 3), np.float32)
    affinity[0, 1] += 1e-5
    assert np.isfinite(spectral_embedding(affinity, 2)).all()
    affinity[0, 1] = 0
    with pytest.raises(ValueError, match=r"^affinity must be symmetric between"):
        spectral_embedding(affinity, 2)
    assert np.isfinite(spectral_embedding(affinity, 1, where=np.arange(3) > 0)).all()


@pytest.mark.parametrize("n_components", [0, 5, 2.5, "two"])
def test_number_of_components_is_checked(n_components):
    with pytest.raises(ValueError, match=r"^n_components: got .*1 to 4$"):
        spectral_embedding(jnp.ones((4, 4)), n_components)
