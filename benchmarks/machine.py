"""What this machine can do at most, and how functions are timed against each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TRIAD_SIZE, TRIADS = 2**26, 16


def seconds(function: Callable[[], Any]) -> float:
    """Measures the wall time of one call, computation included."""
    began = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - began


def take_turns(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Measures the median time of each; they alternate, so that a noisy minute hits all of them.

    What is soon over is measured ten times a turn. The least time would favour it then: a peak
    would be that of a lucky tenth of a second, and a long run never has one.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, function in variants.items():
            took = seconds(function)
            if turn:  # the first turn warms up
                again = [seconds(function) for _ in range(9)] if took < 0.5 else []
                times[name] += [took, *again]
    return {name: float(np.median(found)) for name, found in times.items()}


def matmul_size() -> int:
    """Returns the rows of the peak's square matrices: large for the device, quick on it."""
    return 3072 if jax.default_backend() == "cpu" else 8192


def machine_peaks() -> dict[str, Callable[[], Any]]:
    """Returns a large float32 product, and a triad that streams through memory, as calls."""
    a = jnp.ones((matmul_size(), matmul_size()))
    x, y = jnp.zeros(TRIAD_SIZE), jnp.ones(TRIAD_SIZE)
    # Accelerators round the factors of a float32 product unless they are told not to.
    matmul = jax.jit(partial(jnp.matmul, precision="highest"))
    # Repeated in place, as Adam's state is: the pages are there from the second time on.
    triad = jax.jit(lambda x, y: jax.lax.fori_loop(0, TRIADS, lambda _, x: 0.5 * x + y, x))
    return {"matmul": lambda: matmul(a, a), "triad": lambda: triad(x, y)}


def peak_of(matmul_seconds: float) -> float:
    """Returns the FLOP/s of `machine_peaks`' product."""
    return 2 * matmul_size() ** 3 / matmul_seconds


def bandwidth_of(triad_seconds: float) -> float:
    """Returns the bytes/s of `machine_peaks`' triad."""
    return 3 * 4 * TRIAD_SIZE * TRIADS / triad_seconds
