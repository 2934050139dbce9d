"""Matrices that several shallow methods solve for, and the graphs that they build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxfedmvc import linalg
from jaxfedmvc.losses import l2_normalize
from jaxfedmvc.precision import matmul

PyTree = Any

# Numbers in a block of distances: 32 MB.
_BLOCK = 2**23


def polar(c: Array) -> Array:
    """Returns the matrix with orthonormal columns (rows, of a wide one) that is closest to `c`.

    It is U V^T of the thin singular value decomposition, and maximises <Q, C> over such matrices Q.
    That of a zero matrix are the first columns (rows) of the identity.
    """
    u, _, vt = linalg.svd(c)
    return jnp.where(jnp.any(c != 0), u @ vt, jnp.eye(c.shape[0], c.shape[1]))


def simplex(v: Array) -> Array:
    """Projects rows [n, m] onto the simplex {z >= 0, sum z = 1}.

    z = max(v - t, 0), with t raised to where the entries above it sum to 1 until none falls below
    it: Michelot, "A finite algorithm for finding the projection of a point onto the canonical
    simplex of R^n", 1986. A few passes do, where a sort of each row takes far longer on a CPU.
    """
    total = jnp.sum(v, axis=-1, keepdims=True)
    least = jnp.maximum((total - 1) / v.shape[-1], jnp.max(v, axis=-1, keepdims=True) - 1)

    def once(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        t, n_before, _ = state
        above = v > t
        n_above = jnp.sum(above, axis=-1, keepdims=True)
        excess = jnp.sum(jnp.where(above, v, 0.0), axis=-1, keepdims=True) - 1
        t = jnp.maximum(t, excess / jnp.maximum(n_above, 1))
        return t, n_above, jnp.any(n_above != n_before)

    start = least, jnp.full(least.shape, v.shape[-1] + 1), jnp.bool_(True)
    return jnp.maximum(v - lax.while_loop(lambda state: state[2], once, start)[0], 0.0)


def soft(x: Array, by: Array | float) -> Array:
    """Moves every number towards zero by `by`: the least |y - x|^2 / 2 + by |y|_1."""
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - by, 0.0)


def view_weights(errors: Array, r: Array | float, held: Array | None = None) -> Array:
    """Returns a_v ~ M_v^(1/(1-r)) with sum 1, which minimise sum_v a_v^r M_v, for r > 1.

    Args:
      errors: M_v, [V].
      r: Above 1.
      held: Which views have any row, bool [V]; beside them the others get no weight. None: all.
    """
    logs = jnp.log(jnp.maximum(errors, jnp.finfo(errors.dtype).tiny)) / (1 - r)
    if held is not None:
        logs = jnp.where(held | ~jnp.any(held), logs, -jnp.inf)
    return jax.nn.softmax(logs)


def left_singular_vectors(z: Array, rank: int) -> Array:
    """Returns the leading left singular vectors [n, rank] of a tall `z` [n, m], by its Gram matrix.

    Vectors of singular values that are zero but for rounding are zero.
    """
    values, vectors = linalg.eigh(z.T @ z)
    values, vectors = values[::-1][:rank], vectors[:, ::-1][:, :rank]
    kept = values > values[0] * z.shape[1] * jnp.finfo(z.dtype).eps
    scales = jnp.where(kept, 1 / jnp.sqrt(jnp.where(kept, values, 1.0)), 0.0)
    return z @ vectors * scales[None]


def right_singular_vectors(x: Array, rank: int) -> Array:
    """Returns the leading right singular vectors [d, rank] of `x` [n, d], by its Gram matrix.

    They are the principal directions of rows about zero; d of them where `rank` is more.
    """
    return linalg.eigh(matmul(x.T, x))[1][:, ::-1][:, :rank]


def inverse_root(sums: Array) -> Array:
    """Returns 1 / sqrt of sums, such as degrees, and zero for those that are zero."""
    return jnp.where(sums > 0, lax.rsqrt(jnp.where(sums > 0, sums, 1.0)), 0.0)


def squared_distances(x: Array, y: Array) -> Array:
    """Returns |x_i - y_j|^2 of rows [n, d] and [m, d], as [n, m]."""
    norms = jnp.sum(x**2, axis=1)[:, None] + jnp.sum(y**2, axis=1)[None]
    return jnp.maximum(norms - 2 * x @ y.T, 0.0)


def neighbours(x: Array, where: Array, k: int) -> tuple[Array, Array]:
    """Finds the k nearest selected rows of each row but itself, nearest first, in O(n) memory.

    Args:
      x: [n, d].
      where: Rows that may be found, bool [n].
      k: Static; n - 1 where that is less.

    Returns:
      Their places int32 [n, k] and squared distances [n, k]; infinite ones where there are fewer.
    """
    n = len(x)

    def of_row(row: tuple[Array, Array]) -> tuple[Array, Array]:
        # Batched by `map`, this is one product for a block of rows.
        values, place = row
        allowed = where & (jnp.arange(n) != place)
        distances = squared_distances(values[None], x)[0]
        nearness, found = lax.top_k(jnp.where(allowed, -distances, -jnp.inf), min(k, n - 1))
        return found, -nearness

    return lax.map(of_row, (x, jnp.arange(n)), batch_size=min(n, max(1, _BLOCK // n)))


def spectral_rows(affinity: Array, where: Array, rank: int) -> Array:
    """Embeds the vertices of a graph as Ng, Jordan and Weiss do, in O(n^3).

    Args:
      affinity: Symmetric, 0 or more, [n, n]; the diagonal counts.
      where: Vertices of the graph, bool [n]; the others' rows are not read.
      rank: Number of eigenvectors, static.

    Returns:
      The leading eigenvectors of D^-1/2 A D^-1/2 with rows of length 1, [n, rank]; zero outside
      `where`.
    """
    affinity = jnp.where(where[:, None] & where[None], affinity, 0.0)
    roots = inverse_root(jnp.sum(affinity, axis=1))
    # The eigenvalues of a graph are in [-1, 1]: those of padding are put behind them.
    padding = jnp.diag(jnp.where(where, 0.0, -2.0))
    vectors = linalg.eigh(affinity * roots[:, None] * roots[None] + padding)[1]
    return l2_normalize(jnp.where(where[:, None], vectors[:, ::-1][:, :rank], 0.0))


def alternate(
    step: Callable[[PyTree], tuple[PyTree, Array]],
    start: PyTree,
    max_iter: int,
    tol: Array | float,
    min_iter: int = 1,
) -> tuple[PyTree, Array]:
    """Repeats `step: state -> (state, objective)` until the objective stands.

    Args:
      step: One pass over all variables.
      start: The first state.
      max_iter: Most passes, static.
      tol: May be traced; it stops once the objective changes by no more than this share of itself.
      min_iter: Fewest passes, static; two at least are made where `max_iter` allows.

    Returns:
      The last state, and the objective after each pass [max_iter], the last one repeated.
    """

    def unfinished(carry: tuple[Array, PyTree, Array, Array]) -> Array:
        n, _, trace, change = carry
        return (n < max_iter) & ((n < min_iter) | (change > tol * jnp.abs(trace[-1])))

    def once(carry: tuple[Array, PyTree, Array, Array]) -> tuple[Array, PyTree, Array, Array]:
        n, state, trace, _ = carry
        state, value = step(state)
        change = jnp.where(n == 0, jnp.inf, jnp.abs(value - trace[-1]))
        trace = jnp.where(jnp.arange(max_iter) >= n, value, trace)
        return n + 1, state, trace, change

    first = (jnp.int32(0), start, jnp.zeros(max_iter), jnp.float32(jnp.inf))
    _, state, trace, _ = lax.while_loop(unfinished, once, first)
    return state, trace
