"""Compiled programs take memory, and memory maps; see `experiments.lib.programs`."""

import contextlib
import ctypes
import gc
import os
from pathlib import Path

import jax

from experiments.lib.programs import many_maps

_MANY_BYTES = 12 * 10**8
# Compiling one program of training leaves up to 800 MB behind that are free and not given back.
_FREE_FROM = 11 * 10**8
_PROCESS = Path("/proc/self")


def make_room():
    """Lets go of compiled programs before they use up the memory, or the memory maps."""
    if not _PROCESS.exists():
        return
    if _resident() > _MANY_BYTES or many_maps():
        jax.clear_caches()
        gc.collect()
        _trim()


def give_back():
    """Gives memory that compilers have freed back to the system; glibc keeps it, else."""
    if _PROCESS.exists() and _resident() > _FREE_FROM:
        _trim()


def _resident():
    return int((_PROCESS / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _trim():
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
