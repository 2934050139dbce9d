"""Compiled programs take memory, and memory maps; see `experiments.lib.programs`."""

import contextlib
import ctypes
import functools
import gc
import os
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import jax

from experiments.lib.programs import many_maps

_MANY_BYTES = 12 * 10**8
# Compiling one program of training leaves up to 800 MB behind that are free and not given back.
_FREE_FROM = 11 * 10**8
_PROCESS = Path("/proc/self")


def one_context():
    """Lowers programs in one MLIR context: with one for each, tests take a tenth longer.

    It keeps the constants of all of them, so that it is for a while only.
    """
    if not version("jax").startswith("0.10."):
        return contextlib.nullcontext()  # the function is private, and may not be there
    from jax._src.interpreters import mlir

    return mock.patch.object(mlir, "make_ir_context", functools.cache(mlir.make_ir_context))


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
