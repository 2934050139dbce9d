"""What this machine can do at most, and how functions are compiled and timed against each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.commands import timed
from jaxfedmvc.engine.programs import compiler_options

TRIAD_SIZE, TRIADS = 2**26, 16


def device() -> str:
    """Names the device and jax's version."""
    return f"{jax.devices()[0].device_kind}, jax {jax.__version__}"


def compiled(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    """Compiles a function as the library's runs are; returns the program and what that took.

    Args:
      function: To be compiled.
      *arguments: Of it, or their shapes.
      **options: Of `jax.jit`.
    """
    began = time.perf_counter()
    program = jax.jit(function, **options).lower(*arguments).compile(compiler_options())
    return program, time.perf_counter() - began


def seconds(function: Callable[[], Any]) -> float:
    """Measures the wall time of one call, computation included."""
    return timed(lambda: jax.block_until_ready(function())).seconds


def take_turns(
    variants: Mapping[str, Callable[[], Any]], repeats: int, in_a_turn: int = 10
) -> dict[str, list[float]]:
    """Measures the times of each; they alternate, so that a noisy minute hits all of them.

    Take the median. The least time would favour what is soon over: a peak would be that of a lucky
    tenth of a second, and a long run never has one.

    Args:
      variants: Calls by name.
      repeats: Turns, after one that warms up.
      in_a_turn: How often what takes less than half a second is measured then.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, function in variants.items():
            took = seconds(function)
            if turn:  # the first turn warms up
                more = in_a_turn - 1 if took < 0.5 else 0
                times[name] += [took, *(seconds(function) for _ in range(more))]
    return times


def warmed(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """Returns what a first call returns, which warms up, and the median seconds of the next."""
    first = jax.block_until_ready(call())
    return first, statistics.median(seconds(call) for _ in range(repeats))


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Measures the median seconds of several calls; one before them warms up."""
    return warmed(call, repeats)[1]


def matmul_size() -> int:
    """Returns the rows of the peak's square matrices: large for the device, quick on it."""
    return 3072 if jax.default_backend() == "cpu" else 8192


def triad(size: int) -> tuple[Any, Callable[[], Any]]:
    """Returns `TRIADS` passes x = x/2 + y of so many entries, in place: the program, and a call.

    In place as Adam's state is: its memory is given to the result, so that nothing is copied and
    all pages are there from the second call on.
    """
    x, y = jnp.zeros(size), jnp.ones(size)

    def passes(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, TRIADS, lambda _, x: 0.5 * x + y, x)

    program, _ = compiled(passes, x, y, donate_argnums=0)

    def call() -> jax.Array:
        nonlocal x
        x = program(x, y)
        return x

    return program, call


def machine_peaks() -> dict[str, Callable[[], Any]]:
    """Returns a large float32 product, and a triad that streams through memory, as calls."""
    # Random: on zeros and ones an accelerator draws less power, and is faster than on any data.
    a = jax.random.normal(jax.random.key(0), (matmul_size(), matmul_size()))
    # Accelerators round the factors of a float32 product unless they are told not to.
    matmul = jax.jit(partial(jnp.matmul, precision="highest"))
    return {"matmul": lambda: matmul(a, a), "triad": triad(TRIAD_SIZE)[1]}


def peak_of(matmul_seconds: float) -> float:
    """Returns the FLOP/s of `machine_peaks`' product."""
    return 2 * matmul_size() ** 3 / matmul_seconds


def bandwidth_of(triad_seconds: float) -> float:
    """Returns the bytes/s of `machine_peaks`' triad."""
    return 3 * 4 * TRIAD_SIZE * TRIADS / triad_seconds
