"""Graphs over N samples, whole or as two factors: what clients and server exchange.

A graph G is a real [N, N] matrix with a zero diagonal, signed and not symmetric: row i says how
sample i is made up of the others. It is held as an array [N, N], or as `Factored`, whose 2 N r
numbers stand for N^2. Every function takes either, and returns the same for both up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfedmvc import linalg
from jaxfedmvc.precision import matmul


class Factored(NamedTuple):
    """The graph `left @ right` without its diagonal.

    Attributes:
      left: float32 [N, r].
      right: float32 [r, N].
    """

    left: Array
    right: Array


Graph = Array | Factored


def n_samples(graph: Graph) -> int:
    """Returns N."""
    return graph.left.shape[0] if isinstance(graph, Factored) else graph.shape[0]


def without_diagonal(matrix: Array) -> Array:
    """Returns [N, N] with zeros on the diagonal."""
    return jnp.where(jnp.eye(matrix.shape[0], dtype=bool), 0.0, matrix)


def rows(graph: Graph, index: Array) -> Array:
    """Returns the rows `index` [b] of the graph, [b, N]."""
    if not isinstance(graph, Factored):
        return graph[index]
    block = matmul(graph.left[index], graph.right)
    return jnp.where(index[:, None] == jnp.arange(n_samples(graph))[None], 0.0, block)


def diagonal(graph: Factored) -> Array:
    """Returns the diagonal of the product of the factors, which the graph leaves out, [N]."""
    return jnp.sum(graph.left * graph.right.T, axis=1)


def times(graph: Graph, x: Array) -> Array:
    """Returns `G @ x` for x [N, m], without ever forming a factored G."""
    if not isinstance(graph, Factored):
        return matmul(graph, x)
    through = matmul(graph.left, matmul(graph.right, x))
    return through - diagonal(graph)[:, None] * x


def dense(graph: Graph) -> Array:
    """Returns the graph as an array [N, N]."""
    if not isinstance(graph, Factored):
        return graph
    return without_diagonal(matmul(graph.left, graph.right))


def scaled(graph: Graph, factor: Array | float) -> Graph:
    """Returns `factor * G`."""
    if not isinstance(graph, Factored):
        return factor * graph
    return Factored(factor * graph.left, graph.right)


def side_by_side(graphs: Sequence[Factored]) -> Factored:
    """Returns the sum of factored graphs, with their factors side by side: ranks add up."""
    return Factored(
        jnp.concatenate([g.left for g in graphs], axis=1),
        jnp.concatenate([g.right for g in graphs]),
    )


def total(graphs: Sequence[Graph]) -> Graph:
    """Returns the sum of graphs, factored where all are; one whole graph makes the sum whole."""
    factored = [g for g in graphs if isinstance(g, Factored)]
    if len(factored) == len(graphs):
        return side_by_side(factored)
    return sum((dense(g) for g in graphs[1:]), start=dense(graphs[0]))


def squared_norm(graph: Graph) -> Array:
    """Returns ||G||_F^2."""
    if not isinstance(graph, Factored):
        return jnp.sum(graph * graph)
    grams = matmul(graph.left.T, graph.left) * matmul(graph.right, graph.right.T)
    # The difference of two close sums: rounding must not make it negative.
    return jnp.maximum(jnp.sum(grams) - jnp.sum(diagonal(graph) ** 2), 0.0)


def of_rank(graph: Graph, rank: int) -> Graph:
    """Returns a factored graph in factors of exactly this rank; a whole graph as it is.

    Of a higher rank, the best approximation of `left @ right` in the Frobenius norm is kept (the
    truncated singular value decomposition; Eckart & Young, 1936); of a lower one, nothing is lost.
    O(N r^2).
    """
    if not isinstance(graph, Factored):
        return graph
    r = graph.left.shape[1]
    if r <= rank:
        more = rank - r
        return Factored(
            jnp.pad(graph.left, ((0, 0), (0, more))), jnp.pad(graph.right, ((0, more), (0, 0)))
        )
    q_left, r_left = linalg.qr(graph.left)
    q_right, r_right = linalg.qr(graph.right.T)
    u, s, vt = linalg.svd(matmul(r_left, r_right.T))
    kept = min(rank, s.shape[0])
    factored = Factored(matmul(q_left, u[:, :kept] * s[None, :kept]), matmul(vt[:kept], q_right.T))
    return of_rank(factored, rank)


def zeros(n: int, rank: int | None) -> Graph:
    """Returns the graph without edges: [n, n], or factors of this rank."""
    if rank is None:
        return jnp.zeros((n, n))
    return Factored(jnp.zeros((n, rank)), jnp.zeros((rank, n)))


def choose(condition: Array, first: Graph, second: Graph) -> Graph:
    """Returns the first graph where the condition holds, else the second; ranks may differ."""
    if isinstance(first, Factored) and isinstance(second, Factored):
        rank = max(first.left.shape[1], second.left.shape[1])
        first, second = of_rank(first, rank), of_rank(second, rank)
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)
