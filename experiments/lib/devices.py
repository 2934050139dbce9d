"""Runs of a study on several devices at once, each whole on one of them: `--mesh=sweep:n`."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

Item = TypeVar("Item")
Found = TypeVar("Found")


def each(run: Callable[[Item], Found], items: Sequence[Item], mesh: Mesh | None) -> Iterator[Found]:
    """Yields `run(item)` of every item, in their order.

    What a run computes depends on its item alone. Programs are compiled for each device; CPU
    devices share the cores, and so round differently than one does.

    Args:
      run: May be called from several threads at once, each with a default device of its own.
      items: What is run.
      mesh: Whose devices take an item each, as they get free; None: one after another, here.
    """
    if mesh is None:
        yield from map(run, items)
        return
    free: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for device in mesh.devices.flat:
        free.put(device)

    def on_a_free_device(item: Item) -> Found:
        device = free.get()
        try:
            with jax.default_device(device):
                return run(item)
        finally:
            free.put(device)

    with ThreadPoolExecutor(mesh.devices.size) as pool:
        yield from pool.map(on_a_free_device, items)
