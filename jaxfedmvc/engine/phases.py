"""One exchange: what each participant is sent, computes and sends back, and what is made of it.

What a chunk of clients computes (`map_chunk`) is here alone; who walks over the chunks is this
module, where the data lies on the device, and `streaming`, where it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfedmvc import checks, keys
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, phases_by_name
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.messages.transforms import nbytes

PyTree = Any
_ALLOWED = {"reduce": ("stack", "sum"), "who": ("everyone", "leader")}
Progress = Callable[[str, int, int, int], None]


class RunState(NamedTuple):
    """Everything that a run carries from one exchange to the next.

    Attributes:
      server: The algorithm's server state.
      clients: The algorithm's client states, one stack for each cohort.
      participants: For each cohort the places [taking part] of the clients that take part, in
        increasing order.
    """

    server: PyTree
    clients: tuple[PyTree, ...]
    participants: tuple[jax.Array, ...]


class Traffic(NamedTuple):
    """Bytes that all clients together send (`up`) and receive (`down`) in one stage."""

    up: int
    down: int


class Exchanged(NamedTuple):
    """What one cohort's part in one exchange costs: its clients, and the bytes of one of each."""

    clients: int
    message_bytes: int
    sent_bytes: int


def check_phases(algorithm: FederatedAlgorithm) -> None:
    """Checks what the phases of a method say of themselves.

    Raises:
      ValueError: Names the first stage that is no tuple of phases, or the first phase with another
        `reduce` or `who` than there are.
    """
    for stage in keys.STAGES:
        found = getattr(algorithm, stage)
        # A phase is a tuple, too: of its functions.
        is_one = isinstance(found, Phase) or not isinstance(found, tuple | list)
        wrong = [found] if is_one else [x for x in found if not isinstance(x, Phase)]
        if wrong:
            got = type(wrong[0]).__name__ + ("" if is_one else " among the phases")
            raise ValueError(f"{stage}: got {got}; allowed is a tuple of Phase, as (phase,)")
    for place, phase in phases_by_name(algorithm).items():
        for name, allowed in _ALLOWED.items():
            if getattr(phase, name) not in allowed:
                what = " or ".join(map(repr, allowed))
                raise checks.wrong(f"{place}.{name}", getattr(phase, name), what)


class _WrongReturn(ValueError):
    """A function of a phase returned something else than it must."""


@contextmanager
def named(stage: str, place: int) -> Iterator[None]:
    """Says in which phase it was that a function returned something else than it must.

    Raises:
      ValueError: Names the phase, the function, what it returned and what is allowed.
    """
    try:
        yield
    except _WrongReturn as error:
        raise ValueError(f"{stage}[{place}].{error}") from None


def returned(result: Any, function: str, *parts: str) -> tuple:
    """Returns what a phase's `client` or `server` returned, once it has as many parts as it must.

    Raises:
      ValueError: It has others; `named` adds the phase.
    """
    if isinstance(result, tuple | list) and len(result) == len(parts):
        return tuple(result)
    is_some = isinstance(result, tuple | list)
    got = f"{len(result)} values" if is_some else f"one value, {type(result).__name__}"
    raise _WrongReturn(f"{function}: returned {got}; allowed is ({', '.join(parts)})")


def _check_kept(function: str, before: PyTree, after: PyTree, *, shapes: bool) -> None:
    """Checks that a state has the structure that it had, and the shapes where these are asked for.

    Raises:
      ValueError: Names the first place that differs; `named` adds the phase.
    """

    def forms(tree: PyTree) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {
            jax.tree_util.keystr(path): f"shape {list(jnp.shape(x))}" if shapes else "an array"
            for path, x in leaves
        }

    old, new = forms(before), forms(after)
    for place in [*old, *new]:
        if old.get(place) != new.get(place):
            got, allowed = (found.get(place, "nothing") for found in (new, old))
            raise _WrongReturn(
                f"{function}: returned {got} at state{place}; allowed is {allowed}, as before"
            )
    got, allowed = map(jax.tree.structure, (after, before))
    if got != allowed:
        raise _WrongReturn(f"{function}: returned a state {got}; allowed is {allowed}, as before")


def _check_message(message: PyTree) -> None:
    """Checks that a message can be put on a wire.

    Raises:
      ValueError: Names the first leaf that is no number; `named` adds the phase.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(message):
        kind = getattr(leaf, "dtype", type(leaf))
        if not any(jnp.issubdtype(kind, known) for known in (jnp.number, jnp.bool_)):
            place, name = jax.tree_util.keystr(path), getattr(kind, "__name__", kind)
            raise _WrongReturn(
                f"client: returned message{place} of type {name}; allowed are arrays of numbers"
            )


def serve(
    phase: Phase, key: jax.Array, server: PyTree, messages: tuple, weights: tuple
) -> tuple[PyTree, PyTree]:
    """Calls the server function of a phase; `key` is the phase's."""
    key = jax.random.fold_in(key, keys.SERVER)
    after, info = returned(phase.server(key, server, messages, weights), "server", "state", "info")
    _check_kept("server", server, after, shapes=False)
    return after, info


def labelled(
    assign: Callable[[PyTree, PyTree, Cohort], jax.Array],
    server: PyTree,
    state: PyTree,
    client: Cohort,
) -> jax.Array:
    """Calls the `assign` of a method.

    Raises:
      ValueError: What it returned are no labels of the client's rows.
    """
    labels = assign(server, state, client)
    shape, kind = jnp.shape(labels), jnp.result_type(labels)
    if shape != client.mask.shape or not jnp.issubdtype(kind, jnp.integer):
        allowed = f"whole numbers of shape {list(client.mask.shape)}, a label for each row"
        raise ValueError(f"assign: returned {kind}{list(shape)}; allowed are {allowed}")
    return labels


def run_phases(
    phases: Sequence[Phase],
    stage: str,
    federation: Federation,
    key: jax.Array,
    state: RunState,
    client_chunk: int | None,
    progress: Progress | None,
    ledger: list[Exchanged] | None = None,
) -> tuple[RunState, list[Any]]:
    """Runs phases one after another.

    Args:
      phases: Of one stage.
      stage: Its name, for `progress`.
      federation: The data.
      key: Of this stage and round.
      state: Before the phases.
      client_chunk: Static number of clients computed at once; None means all of a cohort.
      progress: Called on the host as `(stage, phase, cohort, clients done)` after every chunk.
      ledger: Receives the bytes of every cohort's exchange, while tracing.

    Returns:
      The state after the phases, and `{"clients", "server"}` with the info of each phase.

    Raises:
      ValueError: `client_chunk` is no whole number of 1 or more, or a function of a phase returned
        something else than it must.
    """
    checks.whole("client_chunk", client_chunk, 1, optional=True)
    infos = []
    for p, phase in enumerate(phases):
        report = None if progress is None else _reporter(progress, stage, p)
        phase_key = jax.random.fold_in(key, p)
        with named(stage, p):
            state, info = _run_phase(
                phase, federation, phase_key, state, client_chunk, report, ledger
            )
        infos.append(info)
    return state, infos


def _reporter(
    progress: Progress, stage: str, phase: int
) -> Callable[[int, jax.Array, PyTree], None]:
    def report(cohort: int, n: jax.Array, done: PyTree) -> None:
        # The unused operand ties the report to the end of the chunk's computation.
        jax.debug.callback(lambda n, _: progress(stage, phase, cohort, int(n)), n, done)

    return report


def _run_phase(
    phase: Phase,
    federation: Federation,
    key: jax.Array,
    state: RunState,
    client_chunk: int | None,
    report: Callable[[int, jax.Array, PyTree], None] | None,
    ledger: list[Exchanged] | None,
) -> tuple[RunState, Any]:
    client_states = list(state.clients)
    messages, weights, infos = [], [], []
    for c, places in taking_part(phase, federation, state.participants):
        cohort = federation.cohorts[c]
        sent = phase.broadcast(state.server, cohort.view_ids)
        client_states[c], message, weight, info, message_bytes = map_clients(
            phase,
            key,
            sent,
            client_states[c],
            cohort,
            places,
            client_chunk,
            None if report is None else partial(report, c),
        )
        messages.append(message)
        weights.append(weight)
        infos.append(info)
        if ledger is not None:
            n = places.shape[0]
            ledger.append(Exchanged(n, message_bytes, nbytes(sent)))
    server, server_info = serve(phase, key, state.server, tuple(messages), tuple(weights))
    info = {"clients": tuple(infos), "server": server_info}
    return RunState(server, tuple(client_states), state.participants), info


def taking_part(
    phase: Phase, federation: Federation, participants: tuple[jax.Array, ...]
) -> list[tuple[int, jax.Array]]:
    """Returns the cohorts that take part in a phase, with the places of their clients that do."""
    if phase.who == "everyone":
        return list(enumerate(participants))
    widest = leading_cohort(federation)
    places = participants[widest]
    first = jnp.argmin(federation.cohorts[widest].client_ids[places])
    return [(widest, places[first][None])]


def leading_cohort(federation: Federation) -> int:
    """Returns the place of the cohort with the most views; of several, of the lowest view ids."""
    views = [cohort.view_ids for cohort in federation.cohorts]
    return min(range(len(views)), key=lambda c: (-len(views[c]), views[c]))


def map_clients(
    phase: Phase,
    key: jax.Array,
    sent: PyTree,
    states: PyTree,
    cohort: Cohort,
    places: jax.Array,
    client_chunk: int | None,
    report: Callable[[jax.Array, PyTree], None] | None,
) -> tuple[PyTree, PyTree, jax.Array, PyTree, int]:
    """Makes one phase of one cohort's participants, a chunk at a time.

    Returns the states of the whole cohort, the messages (stacked, or their sum), the weights
    (stacked, or their sum), the participants' infos, and the bytes of one message.
    """
    n = places.shape[0]
    n_chunks, size = chunk_sizes(n, client_chunk)
    message_bytes: list[int] = []

    def chunk(mine: PyTree, clients: Cohort, real: jax.Array) -> tuple:
        *results, info, one = map_chunk(phase, key, sent, mine, clients, real)
        message_bytes.append(one)
        if report is not None:
            report(jnp.sum(real), (results[2], info))
        return *results, info

    if n_chunks == 1 and n == cohort.n_clients:
        # Everyone, in order: nothing to gather or to scatter, and shards stay where they are.
        new, message, weight, info = chunk(states, cohort, jnp.ones(n, bool))
        states = jax.tree.map(lambda old, x: jnp.asarray(x, old.dtype), states, new)
        return states, message, weight, info, message_bytes[0]

    def chunk_at(states: PyTree, places: jax.Array) -> tuple:
        # A place beyond the cohort is padding of the last chunk: it repeats a client, with weight
        # zero, and its state is dropped.
        real = places < cohort.n_clients
        new, *results = chunk(_take(states, places), _take(cohort, places), real)
        states = jax.tree.map(lambda old, x: old.at[places].set(x, mode="drop"), states, new)
        return states, *results

    if n_chunks == 1:
        states, message, weight, info = chunk_at(states, places)
        return states, message, weight, info, message_bytes[0]

    padded = jnp.pad(places, (0, n_chunks * size - n), constant_values=cohort.n_clients)
    stacked = padded.reshape(n_chunks, size)
    # With "sum" the running sum is carried, so that no more than one chunk's messages exist. Traced
    # once for its shapes and for the loop.
    chunk_at = jax.jit(chunk_at, inline=True)
    summed = phase.reduce == "sum"
    shapes = jax.eval_shape(chunk_at, states, stacked[0])[1:3] if summed else ()
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def step(carry: PyTree, places: jax.Array) -> tuple[PyTree, PyTree]:
        states, total = carry
        states, message, weight, info = chunk_at(states, places)
        if summed:
            return (states, jax.tree.map(jnp.add, total, (message, weight))), ((), info)
        return (states, total), ((message, weight), info)

    (states, total), (each, info) = jax.lax.scan(step, (states, zeros), stacked)
    message, weight = total if summed else jax.tree.map(lambda x: _unchunk(x, n), each)
    info = jax.tree.map(lambda x: _unchunk(x, n), info)
    return states, message, weight, info, message_bytes[0]


def map_chunk(
    phase: Phase, key: jax.Array, sent: PyTree, states: PyTree, clients: Cohort, real: jax.Array
) -> tuple[PyTree, PyTree, jax.Array, PyTree, int]:
    """Computes what a chunk of clients does in a phase.

    Args:
      phase: The phase.
      key: Of the phase.
      sent: What these clients were sent.
      states: Their states, stacked [chunk, ...].
      clients: The clients [chunk].
      real: bool [chunk], False for a client that is there as padding.

    Returns:
      The new states; the messages stacked, or, with `reduce="sum"`, their weighted sum; the
      weights [chunk], or their sum; the infos, stacked; the bytes of one client's message.
    """
    size = clients.n_clients

    def one(key: jax.Array, state: PyTree, client: Cohort) -> tuple:
        result = phase.client(key, sent, state, client)
        after, message, info = returned(result, "client", "state", "message", "info")
        _check_kept("client", state, after, shapes=True)
        _check_message(message)
        return after, message, info

    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, clients.client_ids)
    states, message, info = batched(one, size)(keys, states, clients)
    message_bytes = nbytes(message) // size
    weight = (real & jnp.any(clients.mask, axis=-1)).astype(jnp.float32)
    if phase.reduce == "sum":
        message = jax.tree.map(lambda m: _weighted_sum(m, weight), message)
        weight = jnp.sum(weight)
    return states, message, weight, info, message_bytes


def chunk_sizes(n: int, client_chunk: int | None) -> tuple[int, int]:
    """Returns the number of chunks, and their size, so that the last is padded least."""
    n_chunks = -(-n // min(client_chunk or n, n))
    return n_chunks, -(-n // n_chunks)


def batched(function: Callable[..., PyTree], size: int) -> Callable[..., PyTree]:
    """Returns `jax.vmap(function)`; for one client without the axis, whose products are slower."""
    if size > 1:
        return jax.vmap(function)

    def one(*args: PyTree) -> PyTree:
        result = function(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

    return one


def _take(tree: PyTree, places: jax.Array) -> PyTree:
    return jax.tree.map(lambda x: x.at[places].get(mode="clip"), tree)


def joined(concatenate: Callable[..., Any], chunks: Sequence[PyTree], n: int) -> PyTree:
    """Returns the first n rows of the chunks one after another; `concatenate` of NumPy or JAX."""
    return jax.tree.map(lambda *xs: concatenate(xs)[:n], *chunks)


def _unchunk(x: jax.Array, n: int) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])[:n]


def _weighted_sum(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Sums entries of non-zero weight over the leading axis; a NaN of weight 0 is no NaN."""
    keep = weight.reshape(-1, *(1,) * (x.ndim - 1)) > 0
    return jnp.sum(jnp.where(keep, x, jnp.zeros_like(x)), axis=0)


def over_clients(
    function: Callable[[PyTree, PyTree, Cohort], jax.Array],
    federation: Federation,
    state: RunState,
    client_chunk: int | None,
) -> tuple[jax.Array, ...]:
    """Computes `function(server_state, client_state, client)` for all clients of all cohorts.

    Raises:
      ValueError: `client_chunk` is no whole number of 1 or more, or `state` that of no run.
    """
    checks.whole("client_chunk", client_chunk, 1, optional=True)
    if not isinstance(state, RunState):
        raise checks.wrong("state", type(state).__name__, "a RunState, as run(...).state is")
    results = []
    for cohort, states in zip(federation.cohorts, state.clients, strict=True):
        n = cohort.n_clients
        n_chunks, size = chunk_sizes(n, client_chunk)
        mapped = batched(partial(function, state.server), size)
        if n_chunks == 1:
            results.append(mapped(states, cohort))
            continue
        places = jnp.minimum(jnp.arange(n_chunks * size), n - 1).reshape(n_chunks, size)
        out = jax.lax.map(
            lambda p, c=cohort, s=states, f=mapped: f(_take(s, p), _take(c, p)),
            places,
        )
        results.append(_unchunk(out, n))
    return tuple(results)
