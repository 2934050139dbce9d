"""Compiled programs of a long job keep memory maps, of which Linux grants a process 65530."""

from __future__ import annotations

import gc
from pathlib import Path

import jax

_MANY = 30_000
_MAPS = Path("/proc/self/maps")


def many_maps() -> bool:
    """Says whether this process has used up half of its memory maps; False where nobody knows."""
    return _MAPS.exists() and len(_MAPS.read_bytes().splitlines()) > _MANY


def make_room() -> None:
    """Lets go of compiled programs before their memory maps run out and the process is killed."""
    if many_maps():
        jax.clear_caches()
        gc.collect()
