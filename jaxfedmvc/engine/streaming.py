"""Federations larger than the device: data and client states on the host, sent chunk by chunk.

    run_streaming = engine.run, with the loops over rounds, phases and chunks on the host

The same exchanges with the same keys and participants, so the same result but for the rounding of
sums. Only the clients that take part in a round are read. While the device computes one chunk, the
host gathers the next and sends it off; no more than these two are on the device at a time. A host
federation is a `Federation` whose arrays are numpy's, in memory or mapped from files:

    arrays = open_mapped("folder")  # of view0.npy, view1.npy, mask.npy, ... by numpy.save
    cohort = Cohort((arrays["view0"], arrays["view1"]), arrays["mask"], ..., view_ids=(0, 1))
    federation = Federation((cohort,), None, view_dims=(784, 784), n_classes=None)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import checks, keys
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.engine.phases import (
    RunState,
    batched,
    chunk_sizes,
    joined,
    labelled,
    map_chunk,
    named,
    serve,
    taking_part,
)
from jaxfedmvc.engine.run import RunResult, check_rounds, draw_participants, of_rounds, start
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.precision import in_32_bits

PyTree = Any


# --- Programs, compiled once for each phase, shape of a cohort and size of a chunk ----------------


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def client_program(
    phase: Phase, key: jax.Array, sent: PyTree, states: PyTree, clients: Cohort, real: jax.Array
) -> tuple[PyTree, PyTree, jax.Array, PyTree]:
    """Computes what a chunk of clients does in a phase; see `phases.map_chunk`."""
    return map_chunk(phase, key, sent, states, clients, real)[:4]


def strong(tree: PyTree) -> PyTree:
    """Returns arrays without weak types, which a round may add or drop, and which compile anew."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


@partial(jax.jit, static_argnums=(0, 2))
def broadcast_program(phase: Phase, server: PyTree, view_ids: tuple[int, ...]) -> PyTree:
    """Computes what clients that hold these views are sent."""
    return phase.broadcast(server, view_ids)


@partial(jax.jit, static_argnums=0)
def server_program(
    phase: Phase, key: jax.Array, server: PyTree, messages: tuple, weights: tuple
) -> tuple[PyTree, PyTree]:
    """Computes the server's part of a phase; `key` is the phase's."""
    server, info = serve(phase, key, server, messages, weights)
    return strong(server), info


@partial(jax.jit, static_argnums=0)
def assign_program(
    assign: Callable[..., jax.Array], server: PyTree, states: PyTree, clients: Cohort
) -> jax.Array:
    """Computes the clusters of a chunk of clients' rows."""
    return batched(partial(labelled, assign, server), clients.n_clients)(states, clients)


@partial(jax.jit, static_argnums=0)
def done_program(done: Callable[[PyTree], jax.Array], server: PyTree) -> jax.Array:
    """Computes whether further rounds would change nothing."""
    return done(server)


@partial(jax.jit, donate_argnums=0)
def add(total: PyTree, more: PyTree) -> PyTree:
    """Adds two trees leaf by leaf."""
    return jax.tree.map(jnp.add, total, more)


@partial(jax.jit, static_argnums=2)
def draw(
    federation: Federation, key: jax.Array, shares: float | tuple[float, ...], r: jax.Array
) -> tuple[jax.Array, ...]:
    """Draws who takes part in round `r`; see `run.draw_participants`."""
    return draw_participants(federation, key, shares, r)


# --- Chunks ---------------------------------------------------------------------------------------


def _chunks(
    places: np.ndarray, cohort: Cohort, states: PyTree, client_chunk: int
) -> Iterator[tuple[np.ndarray, PyTree, Cohort, np.ndarray]]:
    """Yields chunks of the clients at `places`, each gathered when it is asked for.

    A chunk is its places, their states and their data on the device, and which are no padding.
    """
    n_chunks, size = chunk_sizes(len(places), client_chunk)
    # The last chunk is padded by repeating a client, as where the data lies on the device.
    padded = np.pad(places, (0, n_chunks * size - len(places)), mode="edge")
    for first in range(0, len(padded), size):
        mine = padded[first : first + size]
        gathered = jax.tree.map(lambda x, at=mine: x[at], (states, cohort))
        real = np.arange(first, first + size) < len(places)
        yield mine, *jax.device_put(gathered), real


def _one_behind(items: Iterator[Any]) -> Iterator[Any]:
    """Yields each item once the next has been made: who waits for it lets nothing stand still."""
    before = next(items)
    for item in items:
        yield before
        before = item
    yield before


def _stream_phase(
    phase: Phase,
    cohort: Cohort,
    key: jax.Array,
    sent: PyTree,
    states: PyTree,
    places: np.ndarray,
    client_chunk: int,
) -> tuple[PyTree, PyTree, PyTree]:
    """Makes one phase of the clients at `places`, whose states on the host are replaced.

    Returns the messages and the weights (stacked on the host, or their sums), and the infos.
    """
    total: Any = None
    stacked, infos = [], []

    def dispatched() -> Iterator[tuple]:
        nonlocal total
        for mine, old, clients, real in _chunks(places, cohort, states, client_chunk):
            new, message, weight, info = client_program(phase, key, sent, old, clients, real)
            if phase.reduce == "sum":
                part = message, weight
                total = part if total is None else add(total, part)
                yield mine[real], new, (), info
            else:
                yield mine[real], new, (message, weight), info

    for mine, *made in _one_behind(dispatched()):
        new, message, info = jax.device_get(made)
        del made  # before another chunk comes
        for old, x in zip(jax.tree.leaves(states), jax.tree.leaves(new), strict=True):
            old[mine] = x[: len(mine)]
        stacked.append(message)
        infos.append(info)
    n = len(places)
    message, weight = total if phase.reduce == "sum" else joined(np.concatenate, stacked, n)
    return message, weight, joined(np.concatenate, infos, n)


def _stream_phases(
    phases: Sequence[Phase],
    stage: str,
    federation: Federation,
    key: jax.Array,
    state: RunState,
    client_chunk: int,
) -> tuple[RunState, list[Any]]:
    """As `phases.run_phases`; the client states are replaced in place."""
    all_infos = []
    for p, phase in enumerate(phases):
        phase_key = jax.random.fold_in(key, p)
        with named(stage, p):
            state, info = _one_phase(phase, federation, phase_key, state, client_chunk)
        all_infos.append(info)
    return state, all_infos


def _one_phase(
    phase: Phase, federation: Federation, key: jax.Array, state: RunState, client_chunk: int
) -> tuple[RunState, Any]:
    messages, weights, infos = [], [], []
    for c, places in taking_part(phase, federation, state.participants):
        cohort = federation.cohorts[c]
        sent = broadcast_program(phase, state.server, cohort.view_ids)
        message, weight, info = _stream_phase(
            phase, cohort, key, sent, state.clients[c], np.asarray(places), client_chunk
        )
        messages.append(message)
        weights.append(weight)
        infos.append(info)
    server, server_info = server_program(phase, key, state.server, tuple(messages), tuple(weights))
    info = {"clients": tuple(infos), "server": jax.device_get(server_info)}
    return state._replace(server=server), info


def _stream_assign(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    state: RunState,
    client_chunk: int,
) -> tuple[np.ndarray, ...]:
    result = []
    for cohort, states in zip(federation.cohorts, state.clients, strict=True):
        places = np.arange(cohort.n_clients)
        labels = (
            assign_program(algorithm.assign, state.server, mine, clients)
            for _, mine, clients, _ in _chunks(places, cohort, states, client_chunk)
        )
        found = [np.asarray(x) for x in _one_behind(labels)]
        result.append(joined(np.concatenate, found, cohort.n_clients))
    return tuple(result)


# --- A run ----------------------------------------------------------------------------------------


@in_32_bits
def run_streaming(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: jax.Array,
    rounds: int,
    *,
    client_chunk: int,
    participation: float | Sequence[float] = 1.0,
    resample_participants: bool = False,
    assign: bool = True,
    on_round: Callable[[int, RunState, list[Any]], None] | None = None,
) -> RunResult:
    """Runs a method as `engine.run` on data that stay on the host; sums are rounded otherwise.

    Cannot be jitted or mapped. Programs are compiled once for each phase, shape of a cohort and
    size of a chunk, and are kept for further runs of the same `algorithm` object. On the device are
    two chunks of clients, the server state, and, of exchanges that are not sums, what the server
    asks for: all messages. The client states are made by `algorithm.init` at once, for all clients,
    and lie on the host from then on.

    Args:
      algorithm: The method. Its client states, messages and infos hold numbers and no typed keys.
      federation: The data, in numpy arrays, memory-mapped ones included.
      key: The run's key: same key, same bits.
      rounds: Most rounds to make; fewer where the method finds its own end.
      client_chunk: Number of clients that are computed at once.
      participation: As in `engine.start`.
      resample_participants: Whether who takes part is drawn anew every round.
      assign: Whether to assign clusters to all clients' rows in the end, which reads all data.
      on_round: Called after each round with the number of rounds made, the state and the info. The
        client states are those that the next round will change: copy what shall be kept.

    Returns:
      As `engine.run`, on the host but for the server state. The info of "rounds" is [] where none
      was made, and has entries of the rounds made alone; there are no tables, and without `assign`
      no labels, ().

    Raises:
      ValueError: A bad `rounds`, `client_chunk` or `participation`, or client states with keys.
    """
    check_rounds(algorithm, rounds)
    checks.whole("client_chunk", client_chunk, 1)
    # A memory map becomes a plain array that lies in the file, whose rows are plain arrays.
    host = jax.tree.map(np.asarray, federation.without_labels())
    state = start_on_host(algorithm, host, key, participation)
    if not all(isinstance(x, np.ndarray) for x in jax.tree.leaves(state.clients)):
        raise ValueError("algorithm: its client states hold typed keys; allowed are numbers")
    shares = participation if np.ndim(participation) == 0 else tuple(participation)  # type: ignore[arg-type]
    drawable = _reduced(host, lambda c: c.replace(views=(), mask=(), sample_ids=()))

    def stage(name: str, r: int, state: RunState) -> tuple:
        stage_key = keys.of_stage(key, keys.STAGES[name], r)
        phases = getattr(algorithm, name)
        return _stream_phases(phases, name, host, stage_key, state, client_chunk)

    state, setup_info = stage("setup", 0, state)
    infos: list[Any] = []
    while len(infos) < rounds:
        if algorithm.done is not None and done_program(algorithm.done, state.server):
            break
        r = len(infos)
        if resample_participants:
            drawn = draw(drawable, key, shares, jnp.int32(r))
            state = state._replace(participants=jax.device_get(drawn))
        state, info = stage("round", r, state)
        infos.append(info)
        if on_round is not None:
            on_round(len(infos), state, info)
    last = max(len(infos) - 1, 0)
    state, finish_info = stage("finish", last, state)
    labels: tuple = _stream_assign(algorithm, host, state, client_chunk) if assign else ()
    return of_rounds(state, labels, setup_info, infos, finish_info)


def _reduced(federation: Federation, change: Callable[[Any], Cohort]) -> Federation:
    cohorts = tuple(change(cohort) for cohort in federation.cohorts)
    return federation.replace(cohorts=cohorts)  # type: ignore[attr-defined]


@in_32_bits
def start_on_host(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: jax.Array,
    participation: float | Sequence[float],
) -> RunState:
    """Makes what `engine.start` does, on the host; features are zeros that take no memory."""

    def empty(cohort: Any) -> Cohort:
        zeros = tuple(np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in cohort.views)
        return cohort.replace(views=zeros)

    state = start(algorithm, _reduced(federation, empty), key, participation=participation)
    server, participants = strong(state.server), jax.device_get(state.participants)
    leaves, structure = jax.tree.flatten(state.clients)
    del state
    for i in range(len(leaves)):  # one by one, so that no second stack of all exists
        if not jnp.issubdtype(leaves[i].dtype, jax.dtypes.prng_key):  # NumPy holds none
            leaves[i] = np.array(leaves[i])
    return RunState(server, jax.tree.unflatten(structure, leaves), participants)


# --- Files ----------------------------------------------------------------------------------------


def open_mapped(path: str | Path) -> dict[str, np.ndarray]:
    """Opens the .npy files of a folder, or a single one, without reading them.

    Args:
      path: The folder, or the file.

    Returns:
      `{name without .npy: read-only memory-mapped array}`.

    Raises:
      ValueError: There is no .npy file, or one holds Python objects.
    """
    path = Path(path)
    files = sorted(path.glob("*.npy")) if path.is_dir() else [path]
    if not files or any(file.suffix != ".npy" or not file.is_file() for file in files):
        raise checks.wrong(
            "path",
            str(path),
            "a folder of .npy files, or one such file. Members of an .npz cannot be mapped: write"
            " each of its arrays with numpy.save(f'folder/{name}.npy', array)",
        )
    return {file.stem: _mapped(file) for file in files}


def _mapped(file: Path) -> np.ndarray:
    """Opens an .npy file without reading it."""
    try:
        return np.load(file, mmap_mode="r")
    except ValueError as error:
        raise ValueError(f"path: {file} cannot be mapped: {error}") from error
