"""What the library computes in: 32 bits, whatever `jax_enable_x64` says, and full float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")

_NARROW = {
    jnp.dtype(wide): jnp.dtype(narrow)
    for wide, narrow in (("float64", "float32"), ("int64", "int32"), ("uint64", "uint32"))
}


def in_32_bits(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Makes a function compute in float32 and int32 also where `jax_enable_x64` is set.

    It does what it does without that switch, to the bit: arrays of 64 bits among its arguments are
    rounded first, and none is made. A program that needs 64 bits elsewhere can so call it, under
    `jax.jit` and `jax.vmap`, too.
    """

    @functools.wraps(function)
    def narrow(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
        if not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            return function(*args, **kwargs)
        args, kwargs = jax.tree.map(_rounded, (args, kwargs))
        with jax.enable_x64(False):
            return function(*args, **kwargs)

    return narrow


def matmul(a: Array, b: Array) -> Array:
    """Returns `a @ b` in full float32, also on accelerators whose default is less."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _rounded(leaf: Any) -> Any:
    """Returns an array of 64 bits in 32; all else as it is."""
    if isinstance(leaf, jax.Array) and leaf.dtype in _NARROW:
        return leaf.astype(_NARROW[leaf.dtype])
    return leaf
