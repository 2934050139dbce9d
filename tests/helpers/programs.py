"""Compiled programs take memory, and memory maps, of which a process may have 65530 on Linux."""

import contextlib
import ctypes
import gc
import os
from pathlib import Path

import jax

_MANY_MAPS = 30_000
_MANY_BYTES = 10**9


def make_room():
    """Lets go of compiled programs before they use up the memory, or the memory maps."""
    process = Path("/proc/self")
    if not process.exists():
        return
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > _MANY_BYTES or len((process / "maps").read_bytes().splitlines()) > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # glibc keeps what was freed, else
