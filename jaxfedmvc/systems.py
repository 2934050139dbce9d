"""Linear systems of equations: several of them are solved one after the other on a CPU.

jaxlib 0.10.2 hands the matrices of a batch to XLA's threads and blocks the one that asked. Two such
calls at once wait for each other for ever on two cores, as a vmapped run has them for two views. On
other devices all systems are solved at once. None of these functions is differentiated in reverse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax


def _in_turn(function: Callable[..., Array]) -> Callable[..., Array]:
    """Makes `jax.vmap` of a function call it once for each entry, where the device is a CPU."""
    sequential = jax.custom_batching.sequential_vmap(function)

    @functools.wraps(function)
    def chosen(*matrices: Array) -> Array:
        return lax.platform_dependent(*matrices, cpu=sequential, default=function)

    return chosen


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
