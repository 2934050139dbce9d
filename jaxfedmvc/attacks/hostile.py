"""Hostile clients: they keep to the protocol, and send what does harm.

    attacked(algorithm, sign_flip(parts=(0,)), clients=[8, 9])

An attack is a function `(phase, clients) -> phase`. The clients' ids may be traced, and ids that
nobody has, such as -1, stand for no client: the number of attackers can then be swept in one
program. Attacks chain, each with clients of its own, and go before or after a robust reduction;
collusion goes after it, since it reads single messages.

Which `parts` of a message are changed matters. A message may hold numerators and denominators of a
mean, and whoever flips the sign of both, or multiplies both, says the same as before: the harm is
in changing the numerators alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, phases_by_name, with_phases
from jaxfedmvc.checks import wrong
from jaxfedmvc.federation import Cohort
from jaxfedmvc.messages import transformed
from jaxfedmvc.messages.robust import alike

PyTree = Any
Attack = Callable[[Phase, Sequence[int]], Phase]


def attacked(
    algorithm: FederatedAlgorithm,
    attack: Attack,
    clients: Sequence[int],
    phases: Collection[str] | None = None,
) -> FederatedAlgorithm:
    """Returns the same method with some clients hostile.

    Args:
      algorithm: Any method.
      attack: What they do.
      clients: Their ids; may be traced.
      phases: Where they do it, by names such as "setup[0]" or "round[0]"; None: in all of the
        rounds' exchanges.

    Raises:
      ValueError: A phase is not there.
    """
    known = phases_by_name(algorithm)
    chosen = [name for name in known if name.startswith("round")] if phases is None else phases
    for name in chosen:
        if name not in known:
            raise wrong("phases", name, ", ".join(known))
    return with_phases(
        algorithm, lambda name, phase: attack(phase, clients) if name in chosen else phase
    )


def scaled(factor: ArrayLike, parts: Sequence[int] | None = None) -> Attack:
    """Multiplies what is sent.

    Args:
      factor: May be traced.
      parts: Places in the tuple that the message is; None: all of it.
    """

    def change(key: Array, x: Array) -> Array:
        return x * jnp.asarray(factor, x.dtype)

    return _changing(change, parts)


def sign_flip(parts: Sequence[int] | None = None) -> Attack:
    """Sends the opposite; see `scaled`."""
    return scaled(-1.0, parts)


def permuted_rows(parts: Sequence[int] | None = None) -> Attack:
    """Sends matrices with their rows in random order: right numbers under wrong names.

    What flipped labels are to supervised learning: centres go to other clusters, graphs to other
    samples, weights to other units. Rows are those of the last but one axis, or of the only one;
    arrays of the same number of rows are permuted alike. See `scaled` for `parts`.
    """

    def change(key: Array, x: Array) -> Array:
        if x.ndim == 0:
            return x
        axis = max(x.ndim - 2, 0)
        return jnp.take(x, jax.random.permutation(key, x.shape[axis]), axis=axis)

    return _changing(change, parts)


def claimed(
    value: ArrayLike, weight: ArrayLike, numerators: int = 0, denominators: int = 1
) -> Attack:
    """Claims a great weight of everything, as of rows of every cluster, and one value for it.

    Where honest clients have rows of few clusters each, whoever claims them all is heard where few
    others are.

    Args:
      value: Of all quotients; may be traced.
      weight: Of all denominators; may be traced.
      numerators: Place of this part of the message, a tuple.
      denominators: Place of this part.
    """

    def transform(key: Array, message: PyTree, sent: PyTree) -> PyTree:
        for place, number in ((numerators, jnp.multiply(value, weight)), (denominators, weight)):
            fill = partial(jax.tree.map, lambda x, number=number: jnp.full_like(x, number))
            message = _of_parts(fill, (place,), message)
        return message

    return lambda phase, clients: transformed(phase, transform, clients)


def _changing(
    change: Callable[[Array, Array], Array], parts: Sequence[int] | None
) -> Callable[[Phase, Sequence[int]], Phase]:
    def transform(key: Array, message: PyTree, sent: PyTree) -> PyTree:
        return _of_parts(lambda part: jax.tree.map(lambda x: change(key, x), part), parts, message)

    return lambda phase, clients: transformed(phase, transform, clients)


def _of_parts(
    function: Callable[[PyTree], PyTree], parts: Sequence[int] | None, message: PyTree
) -> PyTree:
    """Applies a function to some parts of a message."""
    if parts is None:
        return function(message)
    if not isinstance(message, tuple) or not set(parts) <= set(range(len(message))):
        n = len(message) if isinstance(message, tuple) else 0
        raise wrong("parts", tuple(parts), f"places in the message, a tuple of {n} parts")
    new = [function(part) if i in parts else part for i, part in enumerate(message)]
    return type(message)(*new) if hasattr(message, "_fields") else tuple(new)


def little_is_enough(z: ArrayLike = 1.5, parts: Sequence[int] | None = None) -> Attack:
    """Lets attackers collude: all send the mean of their honest messages less z deviations.

    Mean and deviation are of every coordinate, over the attackers whose messages are alike: what
    they know of the others is what they computed themselves. A z of 1 to 1.5 hides among honest
    clients while it shifts every coordinate to the same side. One attacker alone knows no deviation
    and sends what it would have sent. In this simulation they meet where messages are collected, by
    a mark that costs a message one byte and is no part of the protocol.

    Args:
      z: Deviations to go down; may be traced.
      parts: See `scaled`.

    Source: Baruch, Baruch and Goldberg, "A little is enough: circumventing defenses for distributed
    learning", NeurIPS 2019.
    """

    def attack(phase: Phase, clients: Sequence[int]) -> Phase:
        chosen = jnp.asarray(clients, jnp.int32)

        def client(key: Array, sent: PyTree, state: PyTree, client: Cohort) -> tuple:
            state, message, info = phase.client(key, sent, state, client)
            return state, (message, jnp.any(client.client_ids == chosen)), info

        def server(key: Array, state: PyTree, messages: tuple, weights: tuple) -> tuple:
            known = _shifted([m for m, _ in messages], [mask for _, mask in messages], z, parts)
            if phase.reduce == "stack":
                return phase.server(key, state, known, weights)
            counted = [weight > 0 for weight in weights]
            sums = tuple(
                jax.tree.map(lambda x, m=mask: jnp.sum(x, axis=0, where=_along(m, x)), message)
                for message, mask in zip(known, counted, strict=True)
            )
            return phase.server(key, state, sums, tuple(jnp.sum(weight) for weight in weights))

        return phase._replace(client=client, server=server, reduce="stack")

    return attack


def _shifted(
    messages: Sequence[PyTree], masks: Sequence[Array], z: ArrayLike, parts: Sequence[int] | None
) -> tuple[PyTree, ...]:
    """Puts mean - z deviations in the place of messages in `masks`, of those that are alike."""
    found = list(messages)
    for places in alike(messages):
        stack = jax.tree.map(lambda *x: jnp.concatenate(x), *(messages[p] for p in places))
        mask = jnp.concatenate([masks[p] for p in places])

        def shift(x: Array, mask: Array = mask) -> Array:
            where, n = _along(mask, x), jnp.maximum(jnp.sum(mask), 1)
            mean = jnp.sum(x, axis=0, where=where, keepdims=True) / n
            variance = jnp.sum((x - mean) ** 2, axis=0, where=where, keepdims=True) / n
            return jnp.where(where, mean - z * jnp.sqrt(variance), x)

        stack = _of_parts(partial(jax.tree.map, shift), parts, stack)
        start = 0
        for place in places:
            end = start + len(masks[place])
            found[place] = jax.tree.map(lambda x, a=start, b=end: x[a:b], stack)
            start = end
    return tuple(found)


def _along(mask: Array, x: Array) -> Array:
    """Gives `mask` [n] the shape of x [n, ...]."""
    return jnp.broadcast_to(mask.reshape(-1, *(1,) * (x.ndim - 1)), x.shape)
