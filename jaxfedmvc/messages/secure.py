"""Secure aggregation: the server learns the sum of a cohort's messages and no message.

Every pair of participants of a cohort shares a secret. From it and the number of the exchange both
draw the same random vector; the client of the lower id adds it to its message and the other one
subtracts it, modulo 2^32, so that all masks cancel exactly in the sum and every message on its own
is uniform noise. Values travel as fixed-point integers: with b fraction bits and n participants

    a value is rounded to a multiple of 2^-b, after clipping to +-2^(31 - b) / n (to 24 bits);
    the sum is off by at most n 2^-b / 2 and by the rounding of a float32 where nothing is clipped.

A masked one travels with each message. The ones add up to the number of participants only if all
masks cancel, so that a sum of wrong messages is refused: it becomes NaN, see `check_sums`.

NOT covered:
  * Key agreement. One `key` stands for all pairwise secrets; clients of a deployment agree on them
    by Diffie-Hellman, and draw the masks with a cryptographic generator (`deploy.masks`).
  * Dropout recovery. Where a message is missing the sum is lost, and with it the exchange; the
    protocol of the paper recovers the missing masks from secret shares.
  * Malicious parties. The server is taken to follow the protocol and to tell all clients the same
    participants; it must not collude with all participants but one. A client may send anything.
  * What the sum itself tells: that of a cohort of one participant is its message, and two sums over
    participants that differ in one client differ by that client's message. That is what noise is
    for: `messages.gaussian_noise`, applied before `secure_aggregation`; 2^-b is to be far below the
    noise of one client, whose value is rounded with its noise.

Source: Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning",
CCS 2017, section 4 (masking with one-time pads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, phases_by_name, with_phases
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.messages.transforms import check_floating

PyTree = Any

# Beyond, 2^bits is no float32.
_MOST_BITS = 64


class SecureState(NamedTuple):
    """Server state: the method's own, and the number of rounds made, int32."""

    inner: PyTree
    rounds: Array


class Announced(NamedTuple):
    """What is sent: the method's own, the number of the exchange, and who takes part.

    Attributes:
      inner: What the method sends.
      exchange: int32, different in all exchanges of a run.
      participants: Client ids, int32 [taking part].
    """

    inner: PyTree
    exchange: Array
    participants: Array


class Masked(NamedTuple):
    """A masked message, or the sum of some: uint32 leaves in the message's shapes.

    Attributes:
      values: The fixed-point values.
      check: A one, scalar; a zero from a client whose message holds a NaN.
    """

    values: PyTree
    check: Array


class SecureInfo(NamedTuple):
    """A client's info: the method's own, and how many entries it clipped, int32."""

    inner: PyTree
    clipped: Array


class SumReport(NamedTuple):
    """The server's info: the method's own, and whether the sums can be read; [cohorts] each.

    Attributes:
      inner: The method's own info.
      agreed: Number of clients that were to take part, int32.
      received: Number of clients whose messages are in the sum, int32.
      garbled: Whether the masks did not cancel or a client had a NaN, bool.
    """

    inner: PyTree
    agreed: Array
    received: Array
    garbled: Array


def secure_aggregation(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: Array,
    *,
    fraction_bits: int | Mapping[str, PyTree],
    participants: Callable[[Array], tuple[Array, ...]] | None = None,
    in_clear: Collection[str] = (),
    masked: bool = True,
) -> FederatedAlgorithm:
    """Returns the same method with the messages of its sums masked.

    The clients' and the server's own randomness is what it was, so that a run differs from the
    plain one by fixed-point rounding alone. Phases are named "setup[0]", "round[0]", "finish[0]"
    and so on. The state of a run is a `SecureState`, its info holds `SecureInfo` and `SumReport`.

    Args:
      algorithm: The method. Each phase must be a "sum" over "everyone", or its messages empty, or
        its name in `in_clear`.
      federation: The one that is run; only client ids are read.
      key: Of the secrets that pairs of clients agreed on: not the run's key, unknown to the server,
        and a new one for every run (two runs with the same masks give away the difference of
        messages).
      fraction_bits: b, for all phases, or for each masked phase by its name; there an integer or a
        pytree of integers of which the message's is an extension. A client's value must lie within
        2^(31 - b) divided by the number of its cohort's participants; what lies outside is clipped
        and counted in the client's info.
      participants: `round -> places` of the clients that take part, for each cohort, as the run
        draws them; everybody if None. For `engine.run(..., run_key, participation=0.5)` it is
        `lambda r: engine.draw_participants(federation, run_key, 0.5)`, and with
        `resample_participants` r is its last argument. Where they differ the sums become NaN.
      in_clear: Names of phases whose messages the server may read, such as an initialisation that
        collects local centroids.
      masked: Whether masks are added here. On real nodes they are not: a node adds its own, drawn
        from secrets that it agreed on with each other node, once its message is encoded.

    Raises:
      ValueError: `fraction_bits` is out of range or lacks a phase, it or `in_clear` names no phase.
        At trace time: a phase that is no sum over everyone sends a message that is not empty, a
        leaf of a message is no floating-point array.
    """
    ids = {cohort.view_ids: cohort.client_ids for cohort in federation.cohorts}
    cohorts = tuple(ids)
    names = list(phases_by_name(algorithm))
    by_name = fraction_bits if isinstance(fraction_bits, Mapping) else ()
    for argument, given in (("in_clear", in_clear), ("fraction_bits", by_name)):
        for name in given:
            if name not in names:
                raise ValueError(f"{argument}: got {name!r}; allowed are {', '.join(names)}")

    def of_round(r: Array) -> tuple[Array, ...]:
        if participants is None:
            return tuple(ids.values())
        return tuple(of[p] for of, p in zip(ids.values(), participants(r), strict=True))

    def wrapped(name: str, phase: Phase) -> Phase:
        if phase.reduce == "sum" and phase.who == "everyone" and name not in in_clear:
            # After the last round the counter is one ahead of the round that chose.
            late = int(name.startswith("finish"))
            secure = _masked(
                phase,
                key,
                _bits_of(fraction_bits, name),
                cohorts,
                lambda state: of_round(jnp.maximum(state.rounds - late, 0)),
                lambda state: state.rounds * len(names) + names.index(name),
                masked,
            )
        else:
            secure = _readable(phase, name, name in in_clear)
        is_last = name == f"round[{len(algorithm.round) - 1}]"
        return _counting(secure) if is_last else secure

    def init(key: Array, federation: Federation) -> tuple[SecureState, tuple[PyTree, ...]]:
        server, clients = algorithm.init(key, federation)
        return SecureState(server, jnp.int32(0)), clients

    assign, embed, done, compact = (
        algorithm.assign,
        algorithm.embed,
        algorithm.done,
        algorithm.compact,
    )
    return with_phases(algorithm, wrapped)._replace(
        init=init,
        assign=lambda state, mine, client: assign(state.inner, mine, client),
        embed=None if embed is None else lambda state, *args: embed(state.inner, *args),
        done=None if done is None else lambda state: done(state.inner),
        compact=None
        if compact is None
        else lambda state: state._replace(inner=compact(state.inner)),
    )


def check_sums(info: PyTree) -> None:
    """Checks on the host that no secure sum was refused.

    Args:
      info: Of a run, a round or a phase, as the engine returns it: anything with `SumReport`s.

    Raises:
      ValueError: Says of which sum how many messages are missing, or that it is garbled.
    """
    reports = jax.tree.leaves(info, is_leaf=lambda x: isinstance(x, SumReport))
    for report in reports:
        if not isinstance(report, SumReport):
            continue
        agreed, received = np.asarray(report.agreed), np.asarray(report.received)
        for place in np.argwhere((agreed != received) | np.asarray(report.garbled)):
            at = tuple(place)
            # The last axis is the cohort, the one before it, if there is one, the round.
            where = f"cohort {at[-1]}" + (f", round {at[-2]}" if len(at) > 1 else "")
            if agreed[at] != received[at]:
                raise ValueError(
                    f"secure sum ({where}): {agreed[at] - received[at]} of {agreed[at]} clients'"
                    " messages are missing; the masks of the others do not cancel without them"
                )
            raise ValueError(
                f"secure sum ({where}): the masks do not cancel, for its clients are not the"
                " participants that were announced, or a client's message holds a NaN or, on a"
                " node, what its fraction_bits do not hold (its log says so)"
            )


def any_unread(info: PyTree) -> Array:
    """Says if a secure sum was refused or a client clipped what it sent; traced, for a whole run.

    Args:
      info: As `check_sums` takes it. Without secure sums in it, False.
    """
    kinds = (SumReport, SecureInfo)
    bad = jnp.zeros((), bool)
    for report in jax.tree.leaves(info, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(report, SecureInfo):
            bad |= jnp.any(report.clipped > 0)
        elif isinstance(report, SumReport):
            bad |= jnp.any((report.agreed != report.received) | report.garbled)
    return bad


def encode(x: Array, fraction_bits: int, n_clients: int) -> tuple[Array, Array]:
    """Encodes one client's values in fixed point: round(x 2^b) modulo 2^32.

    Clipped so that the sum over `n_clients` fits 32 bits with its sign. Exact but for rounding to
    integers: 2^b is a power of two, and integers from 2^24 are float32 as they are.

    Args:
      x: Of any shape.
      fraction_bits: b.
      n_clients: Number of clients whose values are added.

    Returns:
      uint32 of x's shape (0 for NaN), and the number of clipped entries, int32.
    """
    most = (2**31 - 1) // n_clients
    surplus = max(most.bit_length() - 24, 0)
    bound = float(most >> surplus << surplus)  # a float32 that is no more than `most`
    units = jnp.round(x.astype(jnp.float32) * 2.0**fraction_bits)
    clipped = jnp.sum(jnp.abs(units) > bound, dtype=jnp.int32)
    units = jnp.where(jnp.isnan(units), 0.0, jnp.clip(units, -bound, bound))
    return lax.bitcast_convert_type(units.astype(jnp.int32), jnp.uint32), clipped


def decode(total: Array, fraction_bits: int) -> Array:
    """Decodes a sum, modulo 2^32, of what `encode` gives: float32 of its shape."""
    signed = lax.bitcast_convert_type(total.astype(jnp.uint32), jnp.int32)
    return signed.astype(jnp.float32) * 2.0**-fraction_bits


def pairwise_mask(key: Array, own: Array, participants: Array, like: PyTree) -> PyTree:
    """Draws a client's mask: sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij), modulo 2^32.

    Bonawitz et al. 2017, section 4. One pair at a time, so that memory does not grow with the
    number of participants.

    Args:
      key: Of the exchange; s_ij derives from it and the two ids.
      own: Id of this client, i.
      participants: Ids j of all participants, its own among them, int32 [n].
      like: A pytree of arrays, one at least.

    Returns:
      uint32 leaves in the shapes of `like`.
    """
    participants = jnp.asarray(participants)  # taken by traced places
    shapes = [jnp.shape(x) for x in jax.tree.leaves(like)]
    ends = np.cumsum([math.prod(shape) for shape in shapes])

    def add_pair(p: Array, total: Array) -> Array:
        other = participants[p]
        secret = jax.random.fold_in(
            jax.random.fold_in(key, jnp.minimum(own, other)), jnp.maximum(own, other)
        )
        mask = jax.random.bits(secret, total.shape, jnp.uint32)
        signed = jnp.where(other > own, mask, -mask)
        return jnp.where(other == own, total, total + signed)

    zeros = jnp.zeros(ends[-1], jnp.uint32)
    total = lax.fori_loop(0, participants.shape[0], add_pair, zeros)
    parts = jnp.split(total, ends[:-1])
    masks = [x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(like), masks)


def _masked(
    phase: Phase,
    key: Array,
    fraction_bits: PyTree,
    cohorts: tuple[tuple[int, ...], ...],
    participants: Callable[[SecureState], tuple[Array, ...]],
    number: Callable[[SecureState], Array],
    masked: bool,
) -> Phase:
    """A phase with masked messages.

    `cohorts` are their view ids, `participants` the ids of those who take part in each of them,
    `number` is that of the exchange, different in all exchanges of a run.
    """

    def broadcast(state: SecureState, view_ids: tuple[int, ...]) -> Announced:
        ids = participants(state)[cohorts.index(view_ids)]
        return Announced(phase.broadcast(state.inner, view_ids), number(state), ids)

    def client(
        client_key: Array, sent: Announced, state: PyTree, client: Cohort
    ) -> tuple[PyTree, Masked, SecureInfo]:
        state, message, info = phase.client(client_key, sent.inner, state, client)
        check_floating(message, "be masked")
        leaves, tree = jax.tree.flatten(message)
        bits = jax.tree.leaves(jax.tree.broadcast(fraction_bits, message))
        n = sent.participants.shape[0]
        coded = [encode(x, b, n) for x, b in zip(leaves, bits, strict=True)]
        clipped = sum((count for _, count in coded), jnp.int32(0))
        is_number = jnp.asarray([~jnp.any(jnp.isnan(x)) for x in leaves], bool)
        plain = Masked(
            jax.tree.unflatten(tree, [values for values, _ in coded]),
            jnp.all(is_number).astype(jnp.uint32),
        )
        if not masked:
            return state, plain, SecureInfo(info, clipped)
        exchange_key = jax.random.fold_in(key, sent.exchange)
        mask = pairwise_mask(exchange_key, client.client_ids, sent.participants, plain)
        return state, jax.tree.map(jnp.add, plain, mask), SecureInfo(info, clipped)

    def server(
        server_key: Array, state: SecureState, messages: tuple[Masked, ...], weights: tuple
    ) -> tuple[SecureState, SumReport]:
        agreed = jnp.asarray([ids.shape[0] for ids in participants(state)], jnp.int32)
        received = jnp.asarray(weights).astype(jnp.int32)
        ones = jnp.stack([m.check for m in messages]).astype(jnp.uint32)
        garbled = ones != agreed.astype(jnp.uint32)
        readable = (agreed == received) & ~garbled
        sums = tuple(
            jax.tree.map(
                lambda x, b, ok=ok: jnp.where(ok, decode(x, b), jnp.nan),
                m.values,
                jax.tree.broadcast(fraction_bits, m.values),
            )
            for m, ok in zip(messages, readable, strict=True)
        )
        inner, info = phase.server(server_key, state.inner, sums, weights)
        return state._replace(inner=inner), SumReport(info, agreed, received, garbled)

    return phase._replace(broadcast=broadcast, client=client, server=server)


def _readable(phase: Phase, name: str, allowed: bool) -> Phase:
    """A phase that is not masked; its messages must be empty unless that is allowed."""

    def client(
        key: Array, sent: PyTree, state: PyTree, client: Cohort
    ) -> tuple[PyTree, PyTree, PyTree]:
        state, message, info = phase.client(key, sent, state, client)
        if jax.tree.leaves(message) and not allowed:
            raise ValueError(
                f"{name}: its server reads single messages (reduce={phase.reduce!r},"
                f" who={phase.who!r}), which secure aggregation cannot hide; allowed are sums over"
                " everyone, empty messages, and phases that are named in in_clear"
            )
        return state, message, info

    def server(
        key: Array, state: SecureState, messages: tuple, weights: tuple
    ) -> tuple[SecureState, PyTree]:
        inner, info = phase.server(key, state.inner, messages, weights)
        return state._replace(inner=inner), info

    return phase._replace(
        broadcast=lambda state, view_ids: phase.broadcast(state.inner, view_ids),
        client=client,
        server=server,
    )


def _counting(phase: Phase) -> Phase:
    """The last phase of a round, whose server counts the round."""

    def server(*args: Any) -> tuple[SecureState, PyTree]:
        state, info = phase.server(*args)
        return state._replace(rounds=state.rounds + 1), info

    return phase._replace(server=server)


def _bits_of(fraction_bits: int | Mapping[str, PyTree], name: str) -> PyTree:
    """The fraction bits of one phase, checked."""
    if isinstance(fraction_bits, Mapping) and name not in fraction_bits:
        raise ValueError(f"fraction_bits: got nothing for the masked phase {name}")
    bits = fraction_bits[name] if isinstance(fraction_bits, Mapping) else fraction_bits
    for b in jax.tree.leaves(bits):
        is_whole = isinstance(b, int | np.integer) and not isinstance(b, bool)
        if not is_whole or abs(b) > _MOST_BITS:
            raise ValueError(
                f"fraction_bits: got {b!r} for {name}; allowed is an integer from {-_MOST_BITS} to"
                f" {_MOST_BITS}"
            )
    return jax.tree.map(int, bits)
