"""Matrices that several shallow methods solve for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

PyTree = Any


def polar(c: Array) -> Array:
    """Returns the matrix with orthonormal columns (rows, of a wide one) that is closest to `c`.

    It is U V^T of the thin singular value decomposition, and maximises <Q, C> over such matrices Q.
    """
    u, _, vt = jnp.linalg.svd(c, full_matrices=False)
    return u @ vt


def simplex(v: Array) -> Array:
    """Projects rows [n, m] onto the simplex {z >= 0, sum z = 1}.

    Sorting form: Held, Wolfe and Crowder, "Validation of subgradient optimization", 1974.
    """
    m = v.shape[-1]
    ordered = jnp.flip(jnp.sort(v, axis=-1), axis=-1)
    excess = (jnp.cumsum(ordered, axis=-1) - 1) / jnp.arange(1, m + 1)[None]
    last = jnp.sum(ordered > excess, axis=-1, keepdims=True) - 1
    return jnp.maximum(v - jnp.take_along_axis(excess, last, axis=-1), 0.0)


def left_singular_vectors(z: Array, rank: int) -> Array:
    """Returns the leading left singular vectors [n, rank] of a tall `z` [n, m], by its Gram matrix.

    Vectors of singular values that are zero but for rounding are zero.
    """
    values, vectors = jnp.linalg.eigh(z.T @ z)
    values, vectors = values[::-1][:rank], vectors[:, ::-1][:, :rank]
    kept = values > values[0] * z.shape[1] * jnp.finfo(z.dtype).eps
    scales = jnp.where(kept, 1 / jnp.sqrt(jnp.where(kept, values, 1.0)), 0.0)
    return z @ vectors * scales[None]


def alternate(
    step: Callable[[PyTree], tuple[PyTree, Array]], start: PyTree, max_iter: int, tol: Array | float
) -> tuple[PyTree, Array]:
    """Repeats `step: state -> (state, objective)` until the objective stands.

    Args:
      step: One pass over all variables.
      start: The first state.
      max_iter: Most passes, static.
      tol: May be traced; it stops once the objective changes by no more than this share of itself.

    Returns:
      The last state, and the objective after each pass [max_iter], the last one repeated.
    """

    def unfinished(carry: tuple[Array, PyTree, Array, Array]) -> Array:
        n, _, trace, change = carry
        return (n < max_iter) & (change > tol * jnp.abs(trace[-1]))

    def once(carry: tuple[Array, PyTree, Array, Array]) -> tuple[Array, PyTree, Array, Array]:
        n, state, trace, _ = carry
        state, value = step(state)
        change = jnp.where(n == 0, jnp.inf, jnp.abs(value - trace[-1]))
        trace = jnp.where(jnp.arange(max_iter) >= n, value, trace)
        return n + 1, state, trace, change

    first = (jnp.int32(0), start, jnp.zeros(max_iter), jnp.float32(jnp.inf))
    _, state, trace, _ = lax.while_loop(unfinished, once, first)
    return state, trace
