"""Factors and systems of equations: on a CPU several matrices are worked on one after the other.

jaxlib 0.10.2 hands the matrices of a batch to XLA's threads and blocks the one that asked. Two such
calls at once wait for each other for ever on two cores, as a vmapped run has them for two views. On
other devices a batch is one call. Arguments are single matrices; `jax.vmap` makes batches.
Derivatives are JAX's own, also in batches, which may wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def _in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `jax.vmap` of a function call it once for each entry, where the device is a CPU.

    One loop takes the entries of all nested `vmap`s and leaves their axes in order. A loop for each
    (`sequential_vmap`) turns them round, and XLA does not compile every product of two batches of
    three axes that were turned: "Expected instruction to have shape" or the end of the process.
    """

    def one_by_one(*batches: Array) -> Any:
        return lax.map(lambda matrices: function(*matrices), batches)

    @jax.custom_batching.custom_vmap
    def of_all(*arrays: Array) -> Any:
        axes = arrays[0].shape[:-2]
        if not axes:
            return function(*arrays)
        batches = [x.reshape(-1, *x.shape[-2:]) for x in arrays]
        found = lax.platform_dependent(*batches, cpu=one_by_one, default=jax.vmap(function))
        return jax.tree.map(lambda x: x.reshape(*axes, *x.shape[1:]), found)

    @of_all.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: Array) -> tuple[Any, Any]:
        arrays = tuple(
            x if by_entry else jnp.broadcast_to(x[None], (size, *x.shape))
            for x, by_entry in zip(arrays, batched, strict=True)
        )
        found = of_all(*arrays)
        return found, jax.tree.map(lambda _: True, found)

    @jax.custom_jvp
    @functools.wraps(function)
    def of_one(*matrices: Array) -> Any:
        return of_all(*matrices)

    @of_one.defjvp
    def _(matrices: tuple[Array, ...], changes: tuple[Array, ...]) -> tuple[Any, Any]:
        return jax.jvp(function, matrices, changes)

    return of_one


@_in_turn
def inverse(matrix: Array) -> Array:
    """Inverts a matrix [n, n]."""
    return jnp.linalg.inv(matrix)


@_in_turn
def solve(matrix: Array, targets: Array) -> Array:
    """Solves A X = B for X [n, k], of A [n, n] and B [n, k]."""
    return jnp.linalg.solve(matrix, targets)


@_in_turn
def solve_positive(matrix: Array, targets: Array) -> Array:
    """Solves A X = B for X [n, k], of a positive definite A [n, n] and B [n, k]."""
    return jax.scipy.linalg.solve(matrix, targets, assume_a="pos")


@_in_turn
def eigh(matrix: Array) -> tuple[Array, Array]:
    """Returns the eigenvalues [n], ascending, and eigenvectors [n, n] of a Hermitian matrix."""
    values, vectors = jnp.linalg.eigh(matrix)
    return values, vectors


@_in_turn
def svd(matrix: Array) -> tuple[Array, Array, Array]:
    """Returns U [n, r], the singular values [r] and V^H [r, m] of [n, m], r = min(n, m)."""
    u, values, vh = jnp.linalg.svd(matrix, full_matrices=False)
    return u, values, vh


@_in_turn
def qr(matrix: Array) -> tuple[Array, Array]:
    """Returns Q [n, r] with orthonormal columns and R [r, m] of [n, m], r = min(n, m)."""
    q, r = jnp.linalg.qr(matrix)
    return q, r


@_in_turn
def eigvalsh(matrix: Array) -> Array:
    """Returns the eigenvalues [n], ascending, of a Hermitian matrix [n, n]."""
    return jnp.linalg.eigvalsh(matrix)


@_in_turn
def pinv_hermitian(matrix: Array) -> Array:
    """Returns the pseudo-inverse of a Hermitian matrix [n, n]."""
    return jnp.linalg.pinv(matrix, hermitian=True)
