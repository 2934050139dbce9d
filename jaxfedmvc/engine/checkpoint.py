"""One file that holds a pytree of arrays and what is to be known of it, to the same bits.

The file is a `.npz` without pickle: the leaves, and a JSON that says what each one is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import files

PyTree = Any

_TOLD = "checkpoint.json"


def save(path: str | os.PathLike[str], tree: PyTree, meta: Mapping[str, Any]) -> None:
    """Writes all or nothing: whenever the process dies, `path` is whole, old or new.

    Args:
      path: Of the file; it is replaced if it exists.
      tree: A pytree of arrays; typed PRNG keys and bfloat16 are kept as such.
      meta: What goes through JSON, NaN and infinities included.

    Raises:
      ValueError: A leaf is neither an array of numbers nor one of keys.
      TypeError: `meta` is more than JSON holds.
    """
    places, leaves = _named(tree)
    told = [
        {"leaf": place, "dtype": _dtype(leaf), "shape": list(np.shape(leaf)), "key": _impl(leaf)}
        for place, leaf in zip(places, leaves, strict=True)
    ]
    fetched = jax.device_get([jax.random.key_data(x) if _impl(x) else x for x in leaves])
    arrays = [_plain(place, x) for place, x in zip(places, fetched, strict=True)]
    text = json.dumps({"leaves": told, "meta": meta})
    with files.replacing(path, "wb") as file:
        contents = {_entry(i): array for i, array in enumerate(arrays)}
        contents[_TOLD] = np.frombuffer(text.encode(), np.uint8)
        np.savez(file, allow_pickle=False, **contents)


def restore(
    path: str | os.PathLike[str], like: PyTree, *, any_shape: bool = False
) -> tuple[PyTree, dict[str, Any]]:
    """Returns the tree and the meta of a file that `save` wrote.

    Args:
      path: Of the file.
      like: Arrays or ShapeDtypeStructs in the structure of the tree.
      any_shape: Whether leaves may have other shapes than those of `like`.

    Returns:
      The tree, in NumPy but for typed PRNG keys; and the meta.

    Raises:
      OSError: The file cannot be read.
      ValueError: It is no checkpoint, or damaged, or its leaves are not those of `like`.
    """
    told, meta, arrays = _read(path)
    places, leaves = _named(like)
    for words, some, others in (
        ("has no leaf", places, told),
        ("has a leaf too many,", told, places),
    ):
        for place in some:
            if place not in others:
                raise ValueError(f"{path}: {words} {place}")
    result = []
    for place, leaf in zip(places, leaves, strict=True):
        is_there = told[place]
        shape = is_there["shape"] if any_shape else list(np.shape(leaf))
        wanted = (_dtype(leaf), shape)
        if (is_there["dtype"], is_there["shape"]) != wanted:
            raise ValueError(
                f"{path}: leaf {place} is {is_there['dtype']}{is_there['shape']}; wanted is"
                f" {wanted[0]}{wanted[1]}"
            )
        array = arrays[place]
        if is_there["key"]:
            result.append(jax.random.wrap_key_data(jnp.asarray(array), impl=is_there["key"]))
        else:
            # Python's numbers have no type of their own.
            result.append(array.view(getattr(leaf, "dtype", array.dtype)))
    return jax.tree.unflatten(jax.tree.structure(like), result), meta


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the meta of a file that `save` wrote, without its tree.

    Raises:
      OSError: The file cannot be read.
      ValueError: It is no checkpoint, or damaged.
    """
    return _read(path)[1]


def delete(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint, if it is there, and what a process that died left half-written."""
    files.partial_path(path).unlink(missing_ok=True)
    Path(path).unlink(missing_ok=True)


def _read(
    path: str | os.PathLike[str],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """Returns what is told of each leaf by its place, the meta, and the arrays by their places.

    Raises:
      OSError: The file cannot be read.
      ValueError: It is no checkpoint, or damaged.
    """
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as contents:
                text = json.loads(contents[_TOLD].tobytes())
                told = {entry["leaf"]: entry for entry in text["leaves"]}
                arrays = {place: contents[_entry(i)] for i, place in enumerate(told)}
            return told, text["meta"], arrays
        except Exception as error:  # whatever damage makes zipfile, NumPy and JSON stumble over
            raise ValueError(f"{path}: no checkpoint, or a damaged one ({error})") from error


def _entry(i: int) -> str:
    return f"leaf_{i}"


def _named(tree: PyTree) -> tuple[list[str], list[Any]]:
    leaves = jax.tree.leaves_with_path(tree)
    return [jax.tree_util.keystr(place) for place, _ in leaves], [leaf for _, leaf in leaves]


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)


def _impl(leaf: Any) -> str | None:
    """Returns the implementation of typed PRNG keys; None for anything else."""
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return str(jax.random.key_impl(leaf)) if is_key else None


def _plain(place: str, leaf: Any) -> np.ndarray:
    """Returns a leaf in a dtype that a .npz knows; bfloat16 and its like as unsigned integers.

    Raises:
      ValueError: It is no array of numbers.
    """
    array = np.asarray(leaf)
    if array.dtype.isbuiltin == 2:  # registered with NumPy by another library
        return array.view(f"u{array.dtype.itemsize}")
    if array.dtype.kind not in "biufc":
        raise ValueError(f"tree: leaf {place} is {array.dtype}; allowed are numbers and keys")
    return array
