"""What travels: sizes of messages, and changes made to them on the way.

A transformation is a function `(key, message, sent) -> message` of the same shapes and types, where
`sent` is what the client was sent. A codec changes shapes and types, and the server undoes it
before it uses the messages; `messages.codecs` has some. `transformed` and `coded` put one or the
other between a client and the wire, and the results chain, the last applied being the last before
the wire:

    coded(transformed(transformed(phase, clipped(1.0)), gaussian_noise(0.3)), quantised(8))

Noise is drawn in floating point, which leaks where an adversary sees all its bits (Mironov, "On
significance of the least significant bits for differential privacy", 2012); nothing is done against
that here. Clipping bounds what a whole CLIENT changes; noise that shall hide one sample needs a
bound of what a sample changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc import checks, keys
from jaxfedmvc.algorithm import Phase
from jaxfedmvc.federation import Cohort

PyTree = Any
Transform = Callable[[Array, PyTree, PyTree], PyTree]

# An infinite bound bounds nothing, and is one.
_NOT_NEGATIVE = (lambda x: x >= 0, "a number not below zero")


class Codec(NamedTuple):
    """A form of messages for the wire, of other shapes and types than the message has.

    Attributes:
      encode: `(key, message, sent) -> wire`, on the client; `sent` is what the client was sent.
        The wire is a pytree of arrays, which are what is counted as bytes, and what decoding needs
        beside them is public: static in the structure of the wire, or known to both ends.
      decode: `wire -> message`, on the server, for the wire of one client: the message or an
        estimate of it, of its structure and shapes.
    """

    encode: Callable[[Array, PyTree, PyTree], PyTree]
    decode: Callable[[PyTree], PyTree]


def nbytes(tree: Any) -> int:
    """Counts the bytes of a pytree as sent uncompressed.

    Args:
      tree: Of arrays, of shapes that stand for them, or of Python's numbers, which travel as the
        scalars that JAX makes of them.
    """
    arrays = (
        leaf if hasattr(leaf, "dtype") else jax.ShapeDtypeStruct((), jnp.result_type(leaf))
        for leaf in jax.tree.leaves(tree)
    )
    return sum(x.size * x.dtype.itemsize for x in arrays)


def check_floating(message: PyTree, what: str, selected: Sequence[bool] | None = None) -> None:
    """Checks that the leaves of a message, or the selected ones, are floating-point arrays.

    Raises:
      ValueError: Names the first leaf that is none, and `what` it cannot.
    """
    for i, (path, x) in enumerate(jax.tree.leaves_with_path(message)):
        dtype = jnp.result_type(x)
        if (selected is None or selected[i]) and not jnp.issubdtype(dtype, jnp.floating):
            name = jax.tree_util.keystr(path)
            raise ValueError(f"message{name}: is {dtype}; only floating-point leaves can {what}")


@dataclasses.dataclass(frozen=True, eq=False)  # hashed as a function is
class _Transformed:
    """A client function with a transformation, or the encoding of a codec, behind it.

    `depth` counts those before this one.
    """

    inner: Callable[..., tuple[PyTree, PyTree, PyTree]]
    transform: Transform
    chosen: Array | None
    depth: int

    def __call__(
        self, key: Array, sent: PyTree, state: PyTree, client: Cohort
    ) -> tuple[PyTree, PyTree, PyTree]:
        state, message, info = self.inner(key, sent, state, client)
        # The key follows the depth, so that no two transformations of a chain share their noise.
        changed = self.transform(
            jax.random.fold_in(key, keys.TRANSFORM + self.depth), message, sent
        )
        if self.chosen is not None:
            is_chosen = jnp.any(client.client_ids == self.chosen)
            changed = jax.tree.map(lambda a, b: jnp.where(is_chosen, a, b), changed, message)
        return state, changed, info


def transformed(phase: Phase, transform: Transform, clients: Sequence[int] | None = None) -> Phase:
    """Returns the same exchange with the messages of clients changed before they leave.

    The client's own randomness is what it was. Chain calls directly: a client function that wraps
    another one in between hides how many transformations there are already, and they would share
    keys.

    Args:
      phase: Any exchange, transformed ones too.
      transform: `(key, message, sent) -> message` of the same shapes and types; `sent` is what the
        client was sent.
      clients: Ids of the clients whose messages are changed; everybody's if None.
    """
    _check_phase(phase)
    chosen = None if clients is None else jnp.asarray(clients, jnp.int32)
    return _followed_by(phase, transform, chosen)


def _check_phase(phase: Any) -> None:
    if not isinstance(phase, Phase):
        allowed = "one exchange, a Phase, such as algorithm.round[0]"
        raise checks.wrong("phase", type(phase).__name__, allowed)


def coded(phase: Phase, codec: Codec) -> Phase:
    """Returns the same exchange with messages in the form of a codec while they travel.

    Clients send `encode(message)`; the server is given the decoded messages of every client, so
    that its own memory is that of plain ones. The client's randomness, state and info are what
    they were. Calls chain as those of `transformed` do, and with them: what was encoded last is
    decoded first.

    Args:
      phase: An exchange with `reduce="stack"`, a coded or transformed one too.
      codec: Of everybody's messages.

    Raises:
      ValueError: `phase.reduce` is "sum": the sum of encoded messages encodes no sum.
    """
    _check_phase(phase)
    if phase.reduce != "stack":
        raise ValueError(
            f'reduce: got "{phase.reduce}"; allowed is "stack", since encoded messages do not add'
            " up to an encoded sum"
        )

    def server(
        key: Array, state: PyTree, wires: tuple[PyTree, ...], weights: tuple[Array, ...]
    ) -> tuple[PyTree, PyTree]:
        messages = tuple(jax.vmap(codec.decode)(wire) for wire in wires)
        return phase.server(key, state, messages, weights)

    return _followed_by(phase, codec.encode, None)._replace(server=server)


def _followed_by(phase: Phase, transform: Transform, chosen: Array | None) -> Phase:
    depth = phase.client.depth + 1 if isinstance(phase.client, _Transformed) else 0
    return phase._replace(client=_Transformed(phase.client, transform, chosen, depth))


def clipped(max_norm: ArrayLike, leaves: PyTree = True) -> Transform:
    """Scales a message down to an L2 norm of at most `max_norm`, up to rounding.

    The norm is that of all selected leaves together, and one factor scales them all. A message
    within the bound does not change; one whose norm is not finite becomes zeros, so that a finite
    bound holds whatever a client computes.

    Args:
      max_norm: The bound, a scalar not below zero; may be traced.
      leaves: Static booleans, one for all leaves or a pytree of which the message's is an
        extension: which leaves count and are scaled. The others pass as they are.

    Raises:
      ValueError: A concrete `max_norm` below zero or NaN; at trace time, a selected leaf is no
        floating-point array.
    """
    checks.number("max_norm", max_norm, _NOT_NEGATIVE)

    def transform(key: Array, message: PyTree, sent: PyTree) -> PyTree:
        selected = jax.tree.leaves(jax.tree.broadcast(leaves, message))
        values, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, message))
        check_floating(message, "be scaled", selected)
        # Squares of narrow floats overflow: in float16 from 256 on.
        squares = [
            jnp.sum(jnp.square(_widened(x))) for x, s in zip(values, selected, strict=True) if s
        ]
        norm = jnp.sqrt(jnp.sum(jnp.asarray(squares)))
        factor = jnp.where(jnp.isfinite(norm), max_norm / norm, 0.0)

        def scale(x: Array) -> Array:
            wide = _widened(x)
            less = jnp.where(factor > 0, wide * factor.astype(wide.dtype), jnp.zeros_like(wide))
            return jnp.where(norm <= max_norm, x, less.astype(x.dtype))

        scaled = [scale(x) if s else x for x, s in zip(values, selected, strict=True)]
        return jax.tree.unflatten(tree, scaled)

    return transform


def _widened(x: ArrayLike) -> Array:
    """Returns floats of float32 at least."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))


def gaussian_noise(scale: PyTree) -> Transform:
    """Adds normal noise of standard deviation `scale` to every entry of a message.

    It reaches to nine deviations, where `jax.random.normal` ends at 5.4; see `tails_and_signs`. Its
    draw follows the shape of a leaf: where a message has an axis of rows, as graphs and rows
    themselves have, a client that is padded further draws other noise for the same rows.

    Args:
      scale: A scalar not below zero, or a pytree of them of which the message's is an extension,
        so that leaves may differ; may be traced. Zero changes no bit.

    Raises:
      ValueError: A concrete scale below zero or NaN; at trace time, a leaf of the message is no
        floating-point array.
    """
    return _noise(lambda tail: -jax.scipy.special.ndtri(tail), scale)


def laplace_noise(scale: PyTree) -> Transform:
    """Adds Laplace noise of density exp(-|z| / scale) / (2 scale); see `gaussian_noise`."""
    return _noise(_laplace_size, scale)


def _laplace_size(tail: Array) -> Array:
    return -jnp.log(2 * tail)


def laplace_numbers(key: Array, shape: tuple[int, ...]) -> Array:
    """Draws Laplace numbers of scale 1 from 63 bits, float32; see `tails_and_signs`."""
    tail, sign = _tails_and_signs_of(key, shape)
    return sign * _laplace_size(tail)


def exponential_numbers(key: Array, shape: tuple[int, ...]) -> Array:
    """Draws exponential numbers of mean 1, float32, with the whole of both ends.

    They reach from 2^-65 to 45, and those of `jax.random.exponential` from 0 to 16. The sign says
    which half of the distribution a number is of: -log u of u below 1/2, or of 1 - u.
    """
    tail, sign = _tails_and_signs_of(key, shape)
    return jnp.where(sign > 0, -jnp.log(tail), -jnp.log1p(-tail))


def _tails_and_signs_of(key: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    return tails_and_signs(jax.random.bits(key, (2, *shape), jnp.uint32), jnp.float32)


def tails_and_signs(words: Array, dtype: Any) -> tuple[Array, Array]:
    """Returns the probability of what lies farther out on its side, from 2^-65 to 1/2, and a sign.

    By `jax.random.normal` no float32 is beyond 5.22 and -5.42 deviations, nor is a Laplace number
    beyond 16 scales, and few values lie near these ends. Out there a release gives away which of
    two neighbours it is of, with a probability above a delta of 1e-5 at epsilon 8.

    Args:
      words: Random bits, uint32 [2, ...]: 63 of them say the probability, the last one the sign.
      dtype: float32 or float64.
    """
    high, low = words
    tail = 2.0**-33 * high.astype(dtype) + 2.0**-64 * ((low >> 1).astype(dtype) + 0.5)
    return tail, jnp.where(low & 1, -1.0, 1.0).astype(dtype)


def _noise(size: Callable[[Array], Array], scale: PyTree) -> Transform:
    """Returns what adds noise whose absolute value is `size` of its tail's probability."""
    for s in jax.tree.leaves(scale):
        checks.number("scale", s, _NOT_NEGATIVE)

    def transform(key: Array, message: PyTree, sent: PyTree) -> PyTree:
        scales = jax.tree.leaves(jax.tree.broadcast(scale, message))
        values, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, message))
        check_floating(message, "take noise")

        def add(i: int, x: Array, s: ArrayLike) -> Array:
            s = jnp.asarray(s, x.dtype)
            words = jax.random.bits(jax.random.fold_in(key, i), (2, *x.shape), jnp.uint32)
            tail, sign = tails_and_signs(words, jnp.promote_types(x.dtype, jnp.float32))
            noise = s * (sign * size(tail)).astype(x.dtype)
            return jnp.where(s == 0, x, x + noise)  # x + 0 would lose the sign of -0

        return jax.tree.unflatten(
            tree, [add(i, x, s) for i, (x, s) in enumerate(zip(values, scales, strict=True))]
        )

    return transform


def nearest_only(k: int) -> Transform:
    """Makes a graph of neighbours: of each row of a matrix the k largest positive entries stay.

    The others become zero, so that a signed graph loses all that tells samples apart and a row
    without positive entries is empty. Of ties the lowest columns stay; NaN is no positive entry.
    Shapes do not change: for fewer bytes let `codecs.top_k_rows(k)` follow, which loses nothing
    then. Every floating-point leaf is a matrix of its own, so a graph has to be a whole one: of its
    factors each would lose entries, and their product would mean nothing.

    Args:
      k: Entries of a row that stay at most, static, at least 1.

    Raises:
      ValueError: `k` below 1; at trace time, a leaf is no floating-point matrix [m, n] with n of k
        or more.
    """
    checks.whole("k", k, 1)

    def nearest(x: Array) -> Array:
        if x.ndim != 2 or x.shape[1] < k:
            raise ValueError(
                f"message: got a leaf of shape {x.shape}; allowed are matrices [m, n] with n of"
                f" {k} or more"
            )
        values, index = jax.lax.top_k(jnp.where(x > 0, x, 0.0), k)
        return jnp.put_along_axis(jnp.zeros_like(x), index, values, axis=1, inplace=False)

    def transform(key: Array, message: PyTree, sent: PyTree) -> PyTree:
        check_floating(message, "be compared with others of their row")
        return jax.tree.map(nearest, message)

    return transform
