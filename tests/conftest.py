"""Strict numerics for the whole suite."""

import os
from pathlib import Path

# Known answers are known to float32: no accelerator, where products may be coarser.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

# A silently broadcast [n] against [n, 1] is the commonest wrong reduction: make it an error.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Of the 65530 that Linux grants.
_MANY_MAPS = 30_000


@pytest.fixture(scope="module", autouse=True)
def room_for_programs():
    """Lets go of compiled programs before they use up the memory maps that a process may have."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > _MANY_MAPS:
        jax.clear_caches()
