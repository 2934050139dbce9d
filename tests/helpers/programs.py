"""Compiled programs take memory maps, of which a process may have 65530 on Linux."""

from pathlib import Path

import jax

_MANY_MAPS = 30_000


def make_room():
    """Lets go of compiled programs before they use up the memory maps."""
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > _MANY_MAPS:
        jax.clear_caches()
