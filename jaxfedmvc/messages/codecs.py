"""Codecs: what a message looks like on the wire, for fewer bytes or for privacy.

Each is put between the clients and the server by `messages.coded`, and they chain:

    coded(coded(phase, top_k_rows(50)), quantised(4))

sends 50 indices and 50 numbers of four bits for each row of a matrix. Sizes are static; the
epsilon of `randomised_response` may be traced. Randomness is drawn for each row by itself, so that
appending rows to a message changes nothing in the others; columns, which a graph has then more of,
change what `quantised` draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc import checks
from jaxfedmvc.messages.transforms import Codec

PyTree = Any

_ROWS = 256


@struct.dataclass
class Leafwise:
    """A message whose leaves are encoded one by one.

    Attributes:
      leaves: Of each leaf of the message its encoded form, or the leaf itself.
      structure: Of the message (static).
    """

    leaves: tuple[Any, ...]
    structure: Any = struct.field(pytree_node=False)


@struct.dataclass
class SparseRows:
    """Some entries of each row of a matrix [m, n]; the others are zero.

    Attributes:
      index: Their columns, distinct in a row, int32 [m, k].
      values: [m, k].
      n_columns: n (static).
    """

    index: Array
    values: Array
    n_columns: int = struct.field(pytree_node=False)


@struct.dataclass
class QuantisedRows:
    """An array on a grid of its own for each row, a row being what lies along the last axis.

    Attributes:
      codes: The places on the grid, 8 / bits in a byte, uint8 [rows, bytes].
      low: The least entry of each row, float32 [rows].
      step: The distance of the grid's points, float32 [rows].
      shape: The array's (static).
      dtype: The array's (static).
    """

    codes: Array
    low: Array
    step: Array
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: Any = struct.field(pytree_node=False)


def top_k_rows(k: int) -> Codec:
    """Sends of each row of a matrix the k entries of largest magnitude, and where they are.

    Of ties the lowest columns are sent; NaN is larger than all numbers. What is decoded is biased:
    entries that are not sent count as zero, and nothing makes up for them. A floating-point leaf
    [m, n] takes k * (4 + the bytes of an entry) bytes a row. Other leaves pass as they are.

    Args:
      k: Entries a row, static, at least 1.

    Raises:
      ValueError: `k` below 1; at trace time, a floating-point leaf is no matrix, or has fewer than
        k columns.
    """
    checks.whole("k", k, 1)

    def encode(key: Array, x: Array, name: str) -> SparseRows | Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if x.ndim != 2:
            raise ValueError(f"{name}: got shape {x.shape}; allowed are matrices [m, n]")
        if k > x.shape[1]:
            raise ValueError(f"k: got {k}; allowed is at most {x.shape[1]}, the columns of {name}")
        _, index = jax.lax.top_k(jnp.abs(x), k)
        return SparseRows(index, jnp.take_along_axis(x, index, axis=1), x.shape[1])

    def decode(wire: SparseRows | Array) -> Array:
        if not isinstance(wire, SparseRows):
            return wire
        zeros = jnp.zeros((len(wire.index), wire.n_columns), wire.values.dtype)
        return jnp.put_along_axis(zeros, wire.index, wire.values, axis=1, inplace=False)

    return _leafwise(encode, decode)


def quantised(bits: int) -> Codec:
    """Sends floating-point entries as numbers of a few bits, rounded at random without bias.

    A row, which is what lies along the last axis of a leaf, has a grid of its own: 2^bits points
    from its least entry to its largest. An entry between two points becomes one of them with the
    probability at which its expectation is the entry (QSGD: Alistarh et al., 2017, there on the
    grid of a norm). The error is below one step, (largest - least) / (2^bits - 1); entries on the
    grid, and so rows of one value, are exact; all of this up to float32 rounding.

    A grid for each row rather than for a leaf costs 8 bytes a row, and rows of small entries keep
    their accuracy beside those of large ones. A leaf takes ceil(columns * bits / 8) + 8 bytes a
    row. Leaves that are not floating-point or have no entries pass as they are.

    A row with an entry that is not finite, or whose range is not finite in float32, is decoded to
    NaN throughout.

    Args:
      bits: 1, 2, 4 or 8, static.

    Raises:
      ValueError: Another `bits`.
    """
    is_whole = isinstance(bits, int | np.integer) and not isinstance(bits, bool)
    if not is_whole or bits not in (1, 2, 4, 8):
        raise ValueError(f"bits: got {bits}; allowed is 1, 2, 4 or 8")
    levels = 2**bits - 1

    def encode(key: Array, x: Array, name: str) -> QuantisedRows | Array:
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.size == 0:
            return x
        rows = x.reshape(-1, *(x.shape[-1:] or (1,))).astype(jnp.float32)
        low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
        step = (high - low) / levels
        place = (rows - low) / step
        place = jnp.where(jnp.isfinite(place), place, 0.0)  # a row of one value has step 0
        draw = jax.random.uniform(key, rows.shape)
        below = jnp.floor(place)
        # The last point has none above it, though rounding may put the largest entry beyond it.
        code = jnp.minimum(below + (draw < place - below), levels)
        packed = _pack(code.astype(jnp.uint8), bits)
        return QuantisedRows(packed, low[:, 0], step[:, 0], x.shape, x.dtype)

    def decode(wire: QuantisedRows | Array) -> Array:
        if not isinstance(wire, QuantisedRows):
            return wire
        code = _unpack(wire.codes, bits, math.prod(wire.shape[-1:]))
        rows = wire.low[:, None] + code.astype(jnp.float32) * wire.step[:, None]
        return rows.reshape(wire.shape).astype(wire.dtype)

    return _leafwise(encode, decode)


def randomised_response(epsilon: ArrayLike) -> Codec:
    """Sends a graph's edges as bits that may be lies, each with probability 1 / (1 + e^epsilon).

    Warner, "Randomized response: a survey technique for eliminating evasive answer bias", 1965.
    Every leaf is an adjacency [n, n] of which entry (i, j) is a directed edge where it is above
    zero; weights are lost, NaN is no edge, and no sample is its own neighbour. With q the
    probability of a lie, a bit b is decoded to (b - q) / (1 - 2 q), float32, whose expectation is
    1 for an edge and 0 for none, and whose variance is q (1 - q) / (1 - 2 q)^2; the diagonal is
    zero. A leaf takes n * ceil(n / 8) bytes.

    This is edge-level local differential privacy: for two graphs that differ in ONE directed edge
    the probabilities of any wire differ by a factor of at most e^epsilon. That is much less than
    privacy of a sample. Where k neighbours of a sample are replaced, 2 k bits of its row change,
    which costs 2 k epsilon; and in a graph made of features, those of one sample decide of edges in
    other rows too, into it and between others, each at the cost of epsilon. A symmetric graph tells
    every edge twice, and a graph that is sent again spends epsilon again. All this holds where
    nobody else can know the client's key.

    Args:
      epsilon: Above zero, a scalar that may be traced; infinity sends the plain edges.

    Raises:
      ValueError: A concrete `epsilon` that is not above zero (all bits would be coin tosses, of
        which nothing can be estimated); at trace time, a leaf is no square matrix.
    """
    checks.number("epsilon", epsilon, (lambda x: x > 0, "a number above zero"))

    def lie_probability() -> Array:
        return jax.nn.sigmoid(-jnp.asarray(epsilon, jnp.float32))

    def encode(key: Array, x: Array, name: str) -> Array:
        if x.ndim != 2 or x.shape[0] != x.shape[1]:
            raise ValueError(f"{name}: got shape {x.shape}; allowed are adjacencies [n, n]")
        samples, q = jnp.arange(len(x)), lie_probability()

        def one_row(row: tuple[Array, Array]) -> Array:
            i, edges = row
            # A key for each entry, so that samples may be appended, which adds columns too.
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, i), samples)
            # Draws are multiples of 2^-23, so that lies are at least as frequent as they should be.
            lies = jax.vmap(jax.random.uniform)(keys) < q
            bits = (edges ^ lies) & (samples != i)
            return _pack(bits.astype(jnp.uint8)[None], 1)[0]

        # Some rows at a time, for their keys and draws are many times the size of the graph.
        return jax.lax.map(one_row, (samples, x > 0), batch_size=_ROWS)

    def decode(wire: Array) -> Array:
        n = len(wire)
        q = lie_probability()
        # 1 - 2 q would be a difference of near numbers where epsilon is small.
        estimate = (_unpack(wire, 1, n) - q) / jnp.tanh(jnp.asarray(epsilon, jnp.float32) / 2)
        return jnp.where(jnp.eye(n, dtype=bool), 0.0, estimate)

    return _leafwise(encode, decode)


def _leafwise(encode: Callable[[Array, Array, str], Any], decode: Callable[[Any], Array]) -> Codec:
    """A codec of messages from one of leaves; `encode` is given the leaf's name for its errors."""

    def encode_all(key: Array, message: PyTree, sent: PyTree) -> Leafwise:
        paths, structure = jax.tree.flatten_with_path(message)
        # The structure is kept apart from the encoded leaves: they may have structure themselves,
        # also that of this very codec, where it is applied twice.
        leaves = [
            encode(jax.random.fold_in(key, i), jnp.asarray(x), f"message{jax.tree_util.keystr(p)}")
            for i, (p, x) in enumerate(paths)
        ]
        return Leafwise(tuple(leaves), structure)

    def decode_all(wire: Leafwise) -> PyTree:
        return jax.tree.unflatten(wire.structure, [decode(leaf) for leaf in wire.leaves])

    return Codec(encode_all, decode_all)


def _pack(codes: Array, bits: int) -> Array:
    """Numbers below 2^bits, uint8 [rows, n], put into bytes, uint8 [rows, ceil(n * bits / 8)]."""
    per_byte = 8 // bits
    codes = jnp.pad(codes, ((0, 0), (0, -codes.shape[1] % per_byte)))
    groups = codes.reshape(len(codes), codes.shape[1] // per_byte, per_byte)
    return jnp.sum(groups << _shifts(bits), axis=-1, dtype=jnp.uint8)


def _unpack(packed: Array, bits: int, n: int) -> Array:
    """The first n numbers of each row that `_pack` put into bytes, uint8 [rows, n]."""
    groups = (packed[:, :, None] >> _shifts(bits)) & (2**bits - 1)
    return groups.reshape(len(packed), groups.shape[1] * groups.shape[2])[:, :n]


def _shifts(bits: int) -> Array:
    return jnp.arange(0, 8, bits, dtype=jnp.uint8)[None, None]
