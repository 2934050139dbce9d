import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse.linalg import ArpackNoConvergence
from sklearn import manifold

from jaxfedmvc.algorithms.mgcd import sparse_spectral as module
from jaxfedmvc.algorithms.mgcd.sparse_spectral import (
    Neighbours,
    device_embedding,
    heaviest_edges,
    sparse_embedding,
    to_sparse,
)

N = 90  # more than is decomposed densely
jit_checked = jax.jit(module._check_graph)
jit_embedding = jax.jit(sparse_embedding, static_argnames="n_components")


@functools.partial(jax.jit, static_argnames=("k", "absolute", "block"))
def strongest(graph, k=6, **options):
    graph = jnp.asarray(graph)
    return heaviest_edges(lambda ids: graph[ids], len(graph), k, **options)


def signed_graph(n=N, seed=0):
    """Asymmetric, with a diagonal that is larger than all else."""
    return np.random.default_rng(seed).normal(size=(n, n)).astype(np.float32) + 9 * np.eye(
        n, dtype=np.float32
    )


def spectrum(affinity, c):
    """Leading eigenvectors and eigenvalues by the definition."""
    scale = 1 / np.sqrt(affinity.sum(axis=1))
    values, vectors = np.linalg.eigh(scale[:, None] * affinity * scale)
    return vectors[:, ::-1][:, :c], values[::-1][:c]


def align(vectors, like):
    return vectors * np.sign(np.sum(np.asarray(vectors) * like, axis=0, keepdims=True))


def pad(neighbours, extra):
    """The graph with rows of garbage behind it, and edges into them."""
    n, k = neighbours.index.shape
    index = np.concatenate([neighbours.index, np.full((extra, k), 0, np.int32)])
    weight = np.concatenate([neighbours.weight, np.full((extra, k), np.nan, np.float32)])
    index = np.concatenate([index, np.full((n + extra, 1), n, np.int32)], axis=1)
    weight = np.concatenate([weight, np.full((n + extra, 1), np.inf, np.float32)], axis=1)
    return Neighbours(index, weight), np.arange(n + extra) < n


@pytest.mark.parametrize("absolute", [False, True])
def test_heaviest_edges_matches_numpy(absolute):
    graph = signed_graph(23)
    graph[4, 5:9] = 7.0  # ties
    found = strongest(graph, 4, absolute=absolute, block=8)
    chex.assert_shape(found, (23, 4))
    assert found.index.dtype == jnp.int32 and found.weight.dtype == jnp.float32
    weights = np.abs(graph) if absolute else np.maximum(graph, 0)
    np.fill_diagonal(weights, -1)
    order = np.argsort(-weights, axis=1, kind="stable")[:, :4]
    np.testing.assert_array_equal(found.index, order)
    np.testing.assert_array_equal(found.weight, np.take_along_axis(weights, order, axis=1))


def test_missing_edges_have_no_weight_and_stay_at_home():
    graph = -np.ones((4, 4), np.float32)
    graph[1, 3], graph[2, 0] = 2.0, 0.0
    found = strongest(graph, 2)
    np.testing.assert_array_equal(found.index, [[0, 0], [3, 1], [2, 2], [3, 3]])
    np.testing.assert_array_equal(found.weight, [[0, 0], [2, 0], [0, 0], [0, 0]])


def test_heaviest_edges_never_reads_padding():
    graph, where = signed_graph(23), np.arange(31) % 31 < 23
    padded = np.full((31, 31), np.nan, np.float32)
    padded[:23, :23] = graph
    plain = strongest(graph, 4, block=8)
    masked = strongest(padded, 4, where=where, block=8)
    masked = jax.device_get(masked)
    chex.assert_trees_all_equal(Neighbours(masked.index[:23], masked.weight[:23]), plain)
    np.testing.assert_array_equal(masked.weight[23:], 0)


def test_heaviest_edges_is_made_in_blocks():
    left, right = np.ones((1000, 2), np.float32), np.ones((2, 1000), np.float32)
    run = jax.jit(lambda a, b: heaviest_edges(lambda i: a[i] @ b, 1000, 3, block=16))
    memory = run.lower(left, right).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1000 * 1000 * 4 / 4


def test_to_sparse_by_hand():
    # An edge 0 -> 1 of 2, edges 1 -> 2 of 4 and 2 -> 1 of 1, a loop at 2, and 0 -> 2 of no weight.
    found = to_sparse(
        Neighbours(np.array([[1, 2], [2, 0], [1, 2]]), np.array([[2, 0], [4, 0], [1, 9]]))
    )
    assert found.format == "csr" and found.dtype == np.float64 and found.nnz == 4
    np.testing.assert_array_equal(found.toarray(), [[0, 1, 0], [1, 0, 2.5], [0, 2.5, 0]])


@pytest.mark.parametrize("n", [40, N])
def test_embedding_matches_numpy_and_sklearn(n):
    graph = strongest(signed_graph(n))
    affinity = to_sparse(graph).toarray()
    vectors, values = spectrum(affinity, 4)
    ours = jax.device_get(jit_embedding(graph, n_components=4))
    np.testing.assert_allclose(ours.values, values, atol=1e-6)
    np.testing.assert_allclose(align(ours.vectors, vectors), vectors, atol=2e-6)
    theirs = manifold.spectral_embedding(
        affinity, n_components=4, drop_first=False, eigen_tol=1e-12
    )
    theirs = theirs * np.sqrt(affinity.sum(axis=1, keepdims=True))
    theirs /= np.linalg.norm(theirs, axis=0)
    np.testing.assert_allclose(align(ours.vectors, theirs), theirs, atol=1e-4)
    dense = jit_embedding(affinity.astype(np.float32), n_components=4)
    chex.assert_trees_all_close(dense, ours, atol=2e-6)
    # Of every vector the first entry of at least half its size is positive.
    large = np.abs(ours.vectors) >= 0.5 * np.abs(ours.vectors).max(axis=0)
    assert (ours.vectors[large.argmax(axis=0), range(4)] > 0).all()


@pytest.mark.parametrize("dense", [True, False])
def test_devices_without_a_host_find_the_same(dense, monkeypatch):
    monkeypatch.setattr(module, "_DENSE", 10_000 if dense else 0)
    graph, where = pad(strongest(signed_graph()), 13)
    checked, _ = jit_checked(graph, where)
    found = jax.jit(lambda g, w: device_embedding(g, 4, w))(checked, where)
    expected = jit_embedding(graph, n_components=4, where=where)
    np.testing.assert_allclose(found.values, expected.values, atol=1e-5)
    vectors = np.asarray(expected.vectors)
    np.testing.assert_allclose(align(found.vectors, vectors), vectors, atol=1e-3)
    np.testing.assert_array_equal(np.asarray(found.vectors)[~np.asarray(where)], 0)


def test_of_more_components_than_vertices_the_rest_is_empty_on_devices_too():
    graph, where = jit_checked(*pad(strongest(signed_graph(9), 3), 4))
    found = jax.device_get(jax.jit(device_embedding, static_argnums=1)(graph, 12, where))
    np.testing.assert_array_equal(found.values[9:], -1)
    np.testing.assert_array_equal(found.vectors[:, 9:], 0)
    assert np.all(np.abs(found.values[:9]) <= 1 + 1e-5)


def test_padding_changes_nothing():
    graph = strongest(signed_graph())
    plain = jit_embedding(graph, n_components=4)
    padded, where = pad(graph, 13)
    masked = jax.device_get(jit_embedding(padded, n_components=4, where=where))
    np.testing.assert_array_equal(masked.vectors[:N], plain.vectors)
    np.testing.assert_array_equal(masked.vectors[N:], 0)
    np.testing.assert_array_equal(masked.values, plain.values)


def test_permutation_permutes_the_embedding():
    order = np.random.default_rng(3).permutation(N)
    graph = to_sparse(strongest(signed_graph())).toarray().astype(np.float32)
    plain = jit_embedding(graph, n_components=4)
    moved = jit_embedding(graph[order][:, order], n_components=4)
    np.testing.assert_allclose(moved.values, plain.values, atol=1e-6)
    like = np.asarray(plain.vectors)[order]
    np.testing.assert_allclose(align(moved.vectors, like), like, atol=2e-6)


def test_components_have_vectors_of_their_own():
    # Pieces of 50, 30 and 9 vertices, and one without edges.
    piece = np.repeat([0, 1, 2, 3], [30, 50, 9, 1])
    graph = np.where(piece[:, None] == piece, 1 + np.abs(signed_graph()), 0).astype(np.float32)
    graph = (graph + graph.T) / 2
    result = jax.device_get(jit_embedding(graph, n_components=4))
    chex.assert_tree_all_finite(result)
    np.testing.assert_allclose(result.values[:3], 1, atol=1e-6)
    assert 0 < result.values[3] < 0.9
    np.fill_diagonal(graph, 0)
    for column, number in enumerate([1, 0, 2]):  # the largest first
        expected = np.sqrt(np.where(piece == number, graph.sum(axis=1), 0))
        expected /= np.linalg.norm(expected)
        np.testing.assert_allclose(result.vectors[:, column], expected, atol=1e-6)
    few = jit_embedding(graph, n_components=2)
    np.testing.assert_allclose(few.vectors, result.vectors[:, :2], atol=1e-6)


def test_a_graph_without_edges_has_the_eigenvalue_zero():
    result = jit_embedding(np.zeros((5, 5), np.float32), n_components=3)
    np.testing.assert_array_equal(result.vectors, np.eye(5, 3))
    np.testing.assert_array_equal(result.values, np.zeros(3))


@pytest.mark.parametrize("n_selected", [0, 1, 3])
def test_fewer_vertices_than_components(n_selected):
    graph, where = strongest(np.ones((N, N)), N - 1), np.arange(N) < n_selected
    result = jax.device_get(jit_embedding(graph, n_components=4, where=where))
    # A complete graph of m vertices has the eigenvalues 1 and -1 / (m - 1).
    expected = {0: [-1.0] * 4, 1: [0.0, -1, -1, -1], 3: [1, -0.5, -0.5, -1]}[n_selected]
    np.testing.assert_allclose(result.values, expected, atol=1e-6)
    np.testing.assert_array_equal(result.vectors[:, n_selected:], 0)
    np.testing.assert_array_equal(result.vectors[n_selected:], 0)
    inside = result.vectors[:, :n_selected]
    np.testing.assert_allclose(inside.T @ inside, np.eye(n_selected), atol=1e-6)


@pytest.mark.skipif(not module._SEEDED, reason="SciPy draws by itself before 1.17")
def test_repeated_eigenvalues_give_the_same_bits():
    # A complete bipartite graph has three distinct eigenvalues: 1, 0 and -1.
    side = np.arange(N) % 2
    graph = (side[:, None] != side).astype(np.float32)
    first, second = jax.device_get([jit_embedding(graph, n_components=4) for _ in range(2)])
    chex.assert_trees_all_equal(first, second)
    np.testing.assert_allclose(first.values, [1, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(first.vectors.T @ first.vectors, np.eye(4), atol=1e-5)


def test_vmap_equals_loop():
    graphs = [strongest(signed_graph(seed=seed)) for seed in range(3)]
    where = np.arange(N)[None] < np.array([[N], [70], [20]])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *graphs)
    run = jax.vmap(lambda graph, where: sparse_embedding(graph, 3, where=where))
    batch = jax.device_get(jax.jit(run)(stacked, where))
    for i, graph in enumerate(graphs):
        alone = jit_embedding(graph, n_components=3, where=where[i])
        chex.assert_trees_all_close(
            jax.tree.map(lambda leaf, i=i: leaf[i], batch), alone, atol=1e-6
        )


def test_without_convergence_another_way_or_an_error(monkeypatch):
    graph = strongest(signed_graph())
    expected = jax.block_until_ready(jit_embedding(graph, n_components=4))
    sizes = []

    def fail(*args, ncv, **options):
        sizes.append(ncv)
        raise ArpackNoConvergence("none", np.zeros(0), np.zeros((0, 0)))

    monkeypatch.setattr(module.sparse_linalg, "eigsh", fail)
    found = jit_embedding(graph, n_components=4)
    chex.assert_trees_all_close(found, expected, atol=2e-6)
    assert sizes == [28, N]
    monkeypatch.setattr(module, "_MEDIUM", N - 1)
    with pytest.raises((RuntimeError, ValueError), match=r"RuntimeError: .* 4 eigenvectors of 90"):
        jax.block_until_ready(jit_embedding(graph, n_components=4))


GRAPH = Neighbours(np.ones((3, 2), np.int32), np.ones((3, 2), np.float32))


@pytest.mark.parametrize(
    "message, call",
    [
        ("k: got 3; allowed is 1 to", lambda: strongest(np.ones((3, 3)), 3)),
        ("k: got 0", lambda: strongest(np.ones((3, 3)), 0)),
        ("block: got 0", lambda: strongest(np.ones((3, 3)), 1, block=0)),
        ("where: got", lambda: strongest(np.ones((3, 3)), 1, where=np.ones(2, bool))),
        ("rows: got", lambda: heaviest_edges(lambda ids: jnp.ones((2, 3)), 3, 1)),
        ("n_components: got 4", lambda: sparse_embedding(GRAPH, 4)),
        ("n_components: got 0", lambda: sparse_embedding(GRAPH, 0)),
        ("where: got", lambda: sparse_embedding(GRAPH, 1, where=np.ones(2, bool))),
        ("one shape", lambda: sparse_embedding(GRAPH._replace(weight=np.ones((3, 1))), 1)),
        (r"affinity: got \(2, 3\)", lambda: sparse_embedding(np.ones((2, 3)), 1)),
        (
            "affinity: got -1.0; allowed is weights of 0",
            lambda: sparse_embedding(-np.ones((3, 3)), 1),
        ),
        (
            "graphs: got NaN or infinite entries; .* smaller step sizes",
            lambda: to_sparse(GRAPH._replace(weight=np.full((3, 2), np.nan))),
        ),
        (
            "affinity: got 3; allowed is indices 0 to 2",
            lambda: sparse_embedding(GRAPH._replace(index=3 * GRAPH.index), 1),
        ),
    ],
)
def test_bad_input_is_named(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_weights_inside_compiled_code():
    with pytest.raises((RuntimeError, ValueError), match=r"ValueError: affinity: got -1\.0"):
        jax.block_until_ready(jit_embedding(-np.ones((3, 3), np.float32), n_components=1))
