"""Bytes on the wire: an envelope of JSON and arrays, which are checked against expected shapes.

    envelope = b"JFMV" | version, uint8 | length of the JSON, uint32 | JSON | body
    body     = the leaves of a pytree one after another, in the order of the tree, little-endian

What a leaf is follows from the method and the plan, which both sides know, and not from the
message: a receiver says which shapes and types it expects, and a body of another length is refused.
Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import checks

PyTree = Any

_MAGIC, _VERSION = b"JFMV", 1
_HEAD = struct.Struct("<4sBI")
_MOST_META = 2**20


class Refused(Exception):
    """A request or a reply that is not accepted.

    Attributes:
      code: One word, for programs.
    """

    def __init__(self, code: str, text: str) -> None:
        """Takes the word, and a sentence that carries no data."""
        super().__init__(text)
        self.code = code


def pack(meta: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Returns an envelope.

    Args:
      meta: What goes through JSON.
      body: Of `encode`.

    Raises:
      ValueError: The JSON is longer than `unpack` takes.
    """
    text = json.dumps(meta).encode()
    if len(text) > _MOST_META:
        many = "a plan, keys or counts of so many clients or labels do not fit"
        raise checks.wrong("meta", f"{len(text)} bytes", f"{_MOST_META} or less ({many})")
    return _HEAD.pack(_MAGIC, _VERSION, len(text)) + text + body


def unpack(data: bytes, most: int | None = None) -> tuple[dict[str, Any], bytes]:
    """Returns the JSON and the body of an envelope.

    Args:
      data: The envelope.
      most: Bytes that the body may have; any number if None.

    Raises:
      Refused: It is no envelope, of another version, truncated, or longer than allowed.
    """
    if len(data) < _HEAD.size:
        raise Refused("malformed", f"message of {len(data)} bytes: no envelope")
    magic, version, length = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise Refused("malformed", "message: no envelope of jaxfedmvc")
    if version != _VERSION:
        raise Refused("version", f"envelope: version {version}; known is {_VERSION}")
    if length > _MOST_META or len(data) < _HEAD.size + length:
        raise Refused("malformed", "envelope: truncated, or its JSON is too long")
    try:
        meta = json.loads(data[_HEAD.size : _HEAD.size + length])
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Refused("malformed", "envelope: its JSON cannot be read") from error
    if not isinstance(meta, dict):
        raise Refused("malformed", "envelope: its JSON is no object")
    body = data[_HEAD.size + length :]
    if most is not None and len(body) > most:
        raise Refused("oversized", f"body: {len(body)} bytes; allowed are {most}")
    return meta, body


def encode(tree: PyTree) -> bytes:
    """Returns the leaves of a tree as bytes; typed keys as their numbers."""
    leaves = jax.device_get([_numbers(x) for x in jax.tree.leaves(tree)])
    arrays = (np.asarray(x) for x in leaves)
    return b"".join(x.astype(_little(x.dtype), copy=False).tobytes() for x in arrays)


def decode(body: bytes, like: PyTree, what: str, *, finite: bool = False) -> PyTree:
    """Returns the tree that `encode` was given.

    Args:
      body: The bytes.
      like: Arrays or ShapeDtypeStructs in the tree's structure.
      what: Of whom and what, for the error.
      finite: Whether NaN and infinite numbers are refused, one of which would be in every sum.

    Raises:
      Refused: The body is not as long as `like` says, or holds what is refused.
    """
    wanted = size(like)
    if len(body) != wanted:
        raise Refused("wrong_size", f"{what}: {len(body)} bytes; expected are {wanted}")
    leaves, tree = jax.tree.flatten(like)
    found, at = [], 0
    for leaf in leaves:
        shape, dtype = _stored(leaf)
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(body, _little(dtype), count, at).reshape(shape).astype(dtype)
        at += count * dtype.itemsize
        if dtype == np.bool_ and (array.view(np.uint8) > 1).any():
            raise Refused("malformed", f"{what}: a truth value is neither 0 nor 1")
        if finite and jnp.issubdtype(dtype, jnp.floating) and not np.isfinite(array).all():
            raise Refused("not_finite", f"{what}: holds a NaN or an infinite number")
        found.append(_keyed(array, leaf))
    return jax.tree.unflatten(tree, found)


def size(like: PyTree) -> int:
    """Returns how many bytes `encode` makes of such a tree."""
    stored = [_stored(leaf) for leaf in jax.tree.leaves(like)]
    return sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for shape, dtype in stored)


def _little(dtype: np.dtype) -> np.dtype:
    """Returns a type with the order of bytes of the wire; bfloat16 and its like have one alone."""
    return dtype.newbyteorder("<") if dtype.isbuiltin == 1 else dtype


def is_key(leaf: Any) -> bool:
    """Says whether a leaf is an array of typed keys, which NumPy cannot hold."""
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)


def _numbers(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _stored(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and the type of a leaf on the wire."""
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return data.shape, np.dtype(data.dtype)
    return tuple(np.shape(leaf)), np.dtype(leaf.dtype)


def _keyed(array: np.ndarray, leaf: Any) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(array)) if is_key(leaf) else array
