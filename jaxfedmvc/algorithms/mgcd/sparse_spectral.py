"""Spectral embedding of large graphs that are kept as the strongest edges of each vertex.

Ng, Jordan & Weiss, "On spectral clustering: analysis and an algorithm", NIPS 2001, on a graph of k
edges a vertex, so that n = 50 000 vertices need no [n, n] array. Rows outside `where` are padding:
their values are never read, and appending them changes results by rounding at most.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.sparse.linalg import lobpcg_standard
from jax.typing import ArrayLike
from scipy import sparse
from scipy.sparse import csgraph
from scipy.sparse import linalg as sparse_linalg

from jaxfedmvc import linalg
from jaxfedmvc.algorithms.shared.matrices import inverse_root
from jaxfedmvc.checks import mask, whole, wrong
from jaxfedmvc.clustering.host import on_host
from jaxfedmvc.clustering.spectral import fix_signs

# Up to here a dense eigendecomposition is the quicker one.
_SMALL = 60
# Up to here (seconds and 100 MB) it stands in where the iteration does not converge.
_MEDIUM = 3000
# Up to here a dense one is made on other devices than a CPU: 64 MB. Not measured on any.
_DENSE = 4096
# Of LOBPCG at most; it ends when residuals are those of float32.
_STEPS = 200
# Residual of the eigenvectors, far below what float32 can tell.
_TOLERANCE = 1e-9
# When a start is used up, as on graphs of few distinct eigenvalues, ARPACK draws another. SciPy
# from 1.17 on lets us seed the draw; without, it differs from call to call.
_SEEDED = {"rng": 0} if "rng" in inspect.signature(sparse_linalg.eigsh).parameters else {}


class Neighbours(NamedTuple):
    """A directed graph of at most k edges from each of n vertices.

    Attributes:
        index: Vertices that the edges of each row lead to, int32 [n, k], each in [0, n).
        weight: Weights of these edges, finite and non-negative, float32 [n, k]; 0 means no edge.
    """

    index: Array  # type: ignore[assignment]  # a tuple has a method of this name
    weight: Array


class Embedding(NamedTuple):
    """The leading eigenvectors of a normalised graph.

    Attributes:
        vectors: Eigenvectors, float32 [n, c], columns of unit length; see `sparse_embedding`.
        values: Their eigenvalues in [-1, 1], descending, float32 [c].
    """

    vectors: Array
    values: Array


def heaviest_edges(
    rows: Callable[[Array], Array],
    n: int,
    k: int,
    *,
    absolute: bool = False,
    where: ArrayLike | None = None,
    block: int = 256,
) -> Neighbours:
    """Returns the k heaviest edges of every vertex of a graph whose rows are made when needed.

    An edge weighs max(g, 0) for an entry g of the graph, which may be signed and asymmetric. Of
    equal entries those of lowest index are taken. Memory is O(block * n + n * k).

    Args:
        rows: Maps row numbers, int32 [b], to these rows of the graph, finite, [b, n]; traced, with
            b no larger than `block`.
        n: Number of vertices, static.
        k: Number of edges of a vertex, static, in [1, n - 1].
        absolute: Whether an edge weighs |g| instead, static.
        where: Vertices of the graph, bool [n]; all of them if None. No edge leaves or enters the
            others.
        block: Number of rows made at a time, static.

    Returns:
        The edges, heaviest first. The diagonal is not among them. Where a row has fewer than k
        entries of positive weight, the rest are of weight 0 and lead from the vertex to itself.

    Raises:
        ValueError: If `k` is not in [1, n - 1], `block` is below 1, or `where` or the result of
            `rows` has the wrong shape.
    """
    if not 1 <= k <= n - 1:
        raise wrong("k", k, f"1 to n - 1 = {n - 1}")
    whole("block", block, 1)
    where, block = mask(where, (n,)), min(block, n)

    def strongest(ids: Array) -> Neighbours:
        values = jnp.asarray(rows(ids), jnp.float32)
        if values.shape != (block, n):
            raise wrong("rows", values.shape, f"a function that returns shape {(block, n)}")
        values = jnp.abs(values) if absolute else values
        edges = where[ids][:, None] & where[None] & (ids[:, None] != jnp.arange(n)[None])
        weight, index = lax.top_k(jnp.where(edges, values, 0.0), k)
        # A NaN counts as largest and stays an edge, so that `to_sparse` finds it.
        return Neighbours(jnp.where(weight <= 0, ids[:, None], index), jnp.maximum(weight, 0.0))

    # The last block is filled up with the last row, made again and cut off.
    ids = jnp.minimum(jnp.arange(-(-n // block) * block, dtype=jnp.int32), n - 1)
    found = lax.map(strongest, ids.reshape(-1, block))
    return Neighbours(*(leaf.reshape(-1, k)[:n] for leaf in found))


def to_sparse(affinity: Neighbours) -> sparse.csr_array:
    """Returns the symmetric affinity A = (S + S^T) / 2 of a directed graph S, on the host.

    Args:
        affinity: The graph S, as arrays that are not traced. Edges of a vertex to itself are left
            out, and edges written twice add up.

    Returns:
        A, float64 [n, n] in compressed rows, with a diagonal of zeros that are not stored.

    Raises:
        ValueError: If the arrays of `affinity` differ in shape or are no matrices, an index is not
            in [0, n), or a weight is negative or not finite.
    """
    index, weight = np.asarray(affinity.index), np.asarray(affinity.weight, np.float64)
    n, k = _check_shapes(index, weight)
    _check_values(index, weight)
    source = np.repeat(np.arange(n, dtype=np.int32), k)
    target, weight = index.ravel(), weight.ravel()
    kept = (weight > 0) & (source != target)
    directed = sparse.coo_array((weight[kept], (source[kept], target[kept])), (n, n)).tocsr()
    return sparse.csr_array((directed + directed.T) / 2)


def sparse_embedding(
    affinity: Neighbours | ArrayLike, n_components: int, *, where: ArrayLike | None = None
) -> Embedding:
    """Computes leading eigenvectors of D^-1/2 A D^-1/2 (Ng, Jordan & Weiss, 2001).

    A = (S + S^T) / 2 without its diagonal for the graph S, and D holds the degrees of A.
    On a CPU found on the host, in float64, by ARPACK (Lehoucq, Sorensen & Yang, 1998) from a fixed
    start: same graph, same bits. May be jitted and vmapped; a batch runs one after the other. On
    other devices found there, see `device_embedding`.

    The eigenvalue 1 comes once for each connected component that has edges, with a vector that is
    zero on all others. With more of these than `n_components`, the largest ones have vectors; the
    rows of the others are zero. A vertex without edges is a component of eigenvalue 0.

    Args:
        affinity: Graph S, or a matrix of non-negative and finite edge weights, float32 [n, n].
        n_components: Number of eigenvectors c, static, at most n.
        where: Vertices of the graph, bool [n]; all of them if None.

    Returns:
        Vectors, zero in rows outside `where` and in columns beyond the number of selected
        vertices, and values, -1 for such columns. In each column the first entry of at least half
        the largest magnitude is positive. Rows are not normalised.

    Raises:
        ValueError: If `affinity` or `where` has the wrong shape, `n_components` is not in [1, n],
            or `affinity` is concrete and, in selected rows, has a weight that is negative or not
            finite, or an index out of range.
        RuntimeError: If the iteration does not converge, or a traced weight is not allowed. By way
            of jax, which quotes it in an error of its own: some releases and some calls make that
            a ValueError.
    """
    neighbours, where = _check_graph(affinity, where)
    n = len(where)
    if not 1 <= n_components <= n:
        raise wrong("n_components", n_components, f"1 to n = {n}")

    def solve(index: Array, weight: Array, where: Array) -> tuple[np.ndarray, np.ndarray]:
        selected = np.asarray(where)
        matrix = to_sparse(Neighbours(index, weight))[selected][:, selected]
        vectors = np.zeros((n, n_components), np.float32)
        values = np.full(n_components, -1, np.float32)
        found, largest = _leading(matrix, min(n_components, selected.sum()))
        vectors[selected, : len(largest)], values[: len(largest)] = found, largest
        return vectors, values

    shapes = (
        jax.ShapeDtypeStruct((n, n_components), jnp.float32),
        jax.ShapeDtypeStruct((n_components,), jnp.float32),
    )

    def instead(index: Array, weight: Array, where: Array) -> tuple[Array, ...]:
        return tuple(device_embedding(Neighbours(index, weight), n_components, where))

    vectors, values = on_host(solve, shapes, *neighbours, where, instead=instead)
    return Embedding(fix_signs(vectors), values)


def device_embedding(affinity: Neighbours, n_components: int, where: Array) -> Embedding:
    """Computes the same in float32 in jax: by a dense decomposition, or LOBPCG where n is large.

    LOBPCG: Knyazev, "Toward the optimal preconditioned eigensolver", SIAM J. Sci. Comput., 2001,
    with 2 c vectors, from a fixed start; it needs n > 10 c. Of vectors of the same eigenvalue any
    basis may be found, and a weight that is not finite gives NaN and no error.

    Args:
        affinity: Graph S with edges of weight 0 at padding and on the diagonal.
        n_components: Number of eigenvectors c, static, at most n.
        where: Vertices of the graph, bool [n].
    """
    n, _ = affinity.index.shape

    def product(x: Array) -> Array:
        """Computes (S + S^T) / 2 times a vector [n]."""
        edges = affinity.weight * x[:, None]
        there = jnp.sum(affinity.weight * x[affinity.index], axis=1)
        return (there + jnp.zeros(n).at[affinity.index].add(edges)) / 2

    scale = inverse_root(product(jnp.ones(n)))
    if n <= max(_DENSE, 10 * n_components):
        rows = jnp.arange(n)[:, None]
        directed = jnp.zeros((n, n)).at[rows, affinity.index].add(affinity.weight)
        matrix = scale[:, None] * (directed + directed.T) / 2 * scale[None]
        # Padding comes last: every eigenvalue of a vertex is -1 or more.
        matrix = matrix + jnp.diag(jnp.where(where, 0.0, -2.0))
        values, vectors = linalg.eigh(matrix)
        values, vectors = values[::-1][:n_components], vectors[:, ::-1][:, :n_components]
    else:
        # Moved by 1, so that padding, which stays at 0, comes last.
        moved = jax.vmap(lambda y: scale * product(scale * y) + where * y, 1, 1)
        start = jax.random.normal(jax.random.key(0), (n, 2 * n_components)) * where[:, None]
        values, vectors, _ = lobpcg_standard(moved, start, m=_STEPS)
        values, vectors = values[:n_components] - 1, vectors[:, :n_components]
    beyond = jnp.arange(n_components) >= jnp.sum(where)
    vectors = jnp.where(where[:, None] & ~beyond[None], vectors, 0.0)
    return Embedding(vectors, jnp.where(beyond, -1.0, values))


def _leading(matrix: sparse.csr_array, n_components: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns eigenvectors [n, c] and eigenvalues of a normalised symmetric affinity.

    It goes component by component, for ARPACK may miss copies of a repeated eigenvalue, and the
    largest one of a connected graph is simple (Perron and Frobenius). As every component with edges
    has an eigenvalue of 1, the c largest components have the c largest eigenvalues.
    """
    degrees = matrix.sum(axis=1)
    scale = sparse.diags_array(1 / np.sqrt(np.where(degrees > 0, degrees, 1.0)))
    matrix = sparse.csr_array(scale @ matrix @ scale)
    component = csgraph.connected_components(matrix, directed=False)[1]
    largest = np.argsort(-np.bincount(component), kind="stable")[:n_components]
    vectors, values = [np.zeros((len(component), 0))], [np.zeros(0)]
    for number in largest:
        rows = np.flatnonzero(component == number)
        found, value = _eigenvectors(matrix[rows][:, rows], min(n_components, len(rows)))
        vectors.append(np.zeros((len(component), len(value))))
        vectors[-1][rows] = found
        values.append(value)
    # By float32 numbers, so that the ones of several components are equal and the larger leads.
    order = np.argsort(-np.concatenate(values).astype(np.float32), kind="stable")[:n_components]
    return np.concatenate(vectors, axis=1)[:, order], np.concatenate(values)[order]


def _eigenvectors(matrix: sparse.csr_array, n_components: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns leading eigenvectors [n, c] and eigenvalues [c] of a symmetric matrix."""
    n = matrix.shape[0]
    if n > max(_SMALL, n_components + 1):
        start = np.random.default_rng(0).normal(size=n)
        for size in (2 * n_components + 20, 8 * n_components + 80):
            try:
                values, vectors = sparse_linalg.eigsh(
                    matrix,
                    n_components,
                    which="LA",
                    v0=start,
                    ncv=min(size, n),
                    maxiter=500,
                    tol=_TOLERANCE,
                    **_SEEDED,
                )
                return vectors[:, ::-1], values[::-1]
            except sparse_linalg.ArpackNoConvergence:
                continue
        if n > _MEDIUM:
            raise RuntimeError(f"ARPACK found no {n_components} eigenvectors of {n} vertices")
    values, vectors = np.linalg.eigh(matrix.toarray())
    return vectors[:, : -n_components - 1 : -1], values[: -n_components - 1 : -1]


def _check_graph(
    affinity: Neighbours | ArrayLike, where: ArrayLike | None
) -> tuple[Neighbours, Array]:
    """Returns checked edges, of weight 0 at padding and on the diagonal, and `where`."""
    if not isinstance(affinity, Neighbours):
        weight = jnp.asarray(affinity, jnp.float32)
        if weight.ndim != 2 or weight.shape[0] != weight.shape[1]:
            raise wrong("affinity", weight.shape, "Neighbours, or weights [n, n]")
        columns = jnp.arange(len(weight), dtype=jnp.int32)[None]
        affinity = Neighbours(jnp.broadcast_to(columns, weight.shape), weight)
    index, weight = jnp.asarray(affinity.index), jnp.asarray(affinity.weight, jnp.float32)
    n, _ = _check_shapes(index, weight)
    where = mask(where, (n,))
    index = jnp.where(where[:, None], index, 0)
    edges = where[:, None] & where[index] & (index != jnp.arange(n)[:, None])
    weight = jnp.where(edges, weight, 0.0)
    if not isinstance(index, jax.core.Tracer) and not isinstance(weight, jax.core.Tracer):
        _check_values(np.asarray(index), np.asarray(weight))
    return Neighbours(index.astype(jnp.int32), weight), where


def _check_shapes(index: ArrayLike, weight: ArrayLike) -> tuple[int, int]:
    """Returns the sizes (n, k) of a graph."""
    shapes = np.shape(index), np.shape(weight)
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or 0 in shapes[0]:
        raise wrong("affinity", shapes, "index and weight of one shape [n, k]")
    return shapes[0]


def _check_values(index: np.ndarray, weight: np.ndarray) -> None:
    bad = index[(index < 0) | (index >= len(index))]
    if len(bad):
        raise wrong("affinity", int(bad[0]), f"indices 0 to {len(index) - 1}")
    if not np.isfinite(weight).all():
        raise ValueError(
            "graphs: got NaN or infinite entries; allowed are finite ones, which smaller step"
            " sizes (pretrain_rate, local_rate, server_rate) help to keep"
        )
    if (weight < 0).any():
        raise wrong("affinity", float(weight.min()), "weights of 0 or more")
