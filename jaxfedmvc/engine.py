"""Runs a federated algorithm on a federation: vmap over clients, scan over rounds, all pure.

    run = start -> setup -> scan(one_round) -> finish

Each of these is a pure function of (federation, key, state), so a whole run jits, vmaps over keys
and hyper-parameters, and a binary can jit the parts and report between them.

Keys. `fold_in(fold_in(fold_in(fold_in(key, stage), round), phase), client id)`: a client's
randomness depends on neither chunking, nor participation, nor the order of clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.exchange import Exchanged, Progress, RunState, Traffic, over_clients, run_phases
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.scoring import score

PyTree = Any

_INIT, _SETUP, _ROUND, _FINISH, _PARTICIPATION = range(5)


class RunResult(NamedTuple):
    """What `run` returns.

    Attributes:
      state: After the last round and `finish`.
      labels: For each cohort the cluster of every row, int32 [clients, rows].
      info: `{"setup", "rounds", "finish"}`, each a list with what the clients and the server
        reported in each phase; leaves of "rounds" have a leading axis [rounds].
      scores: Per round, `scoring.score` with leaves [rounds]; None when not asked for.
      n_rounds: Rounds made, int32; fewer than asked for where the method found its own end, and
        then the further entries of "rounds" and of `scores` are zero.
    """

    state: RunState
    labels: tuple[jax.Array, ...]
    info: dict[str, Any]
    scores: dict[str, Any] | None
    n_rounds: jax.Array


def start(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: jax.Array,
    *,
    participation: float | Sequence[float] = 1.0,
) -> RunState:
    """Initial states, and who takes part.

    Args:
      algorithm: The method.
      federation: The data; labels are not shown to the algorithm.
      key: The run's key.
      participation: Share of clients, in (0, 1], that take part, of every cohort or one share for
        each cohort; rounded, at least one client of a cohort. The others take part in nothing and
        are assigned clusters afterwards, as new clients would be.

    Raises:
      ValueError: A share outside (0, 1], or not one for each cohort.
    """
    server, clients = algorithm.init(jax.random.fold_in(key, _INIT), federation.without_labels())
    return RunState(server, clients, draw_participants(federation, key, participation))


def draw_participants(
    federation: Federation,
    key: jax.Array,
    participation: float | Sequence[float],
    round_index: jax.Array | int = 0,
) -> tuple[jax.Array, ...]:
    """Draws the clients that take part, for each cohort; see `start`."""
    n_cohorts = len(federation.cohorts)
    shares = (
        [float(participation)] * n_cohorts  # type: ignore[arg-type]
        if np.ndim(participation) == 0
        else [float(share) for share in participation]  # type: ignore[union-attr]
    )
    if len(shares) != n_cohorts or not all(0.0 < share <= 1.0 for share in shares):
        raise ValueError(
            f"participation: got {participation}; allowed is one share in (0, 1], or one for each"
            f" of the {n_cohorts} cohorts"
        )
    key = jax.random.fold_in(jax.random.fold_in(key, _PARTICIPATION), round_index)
    return tuple(
        _lowest_draws(key, cohort, max(1, round(share * cohort.n_clients)))
        for cohort, share in zip(federation.cohorts, shares, strict=True)
    )


def _lowest_draws(key: jax.Array, cohort: Cohort, n: int) -> jax.Array:
    """Places of the n clients with the lowest draw; a client's draw derives from its id."""
    if n == cohort.n_clients:
        return jnp.arange(n)
    draws = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(cohort.client_ids)
    return jnp.sort(jnp.argsort(draws)[:n])


def setup(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: jax.Array,
    state: RunState,
    *,
    client_chunk: int | None = None,
    progress: Progress | None = None,
) -> tuple[RunState, list[Any]]:
    """The exchanges before the first round; returns the state and each phase's info."""
    key = jax.random.fold_in(jax.random.fold_in(key, _SETUP), 0)
    return run_phases(algorithm.setup, "setup", federation, key, state, client_chunk, progress)


def one_round(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: jax.Array,
    state: RunState,
    round_index: jax.Array | int,
    *,
    resample: float | Sequence[float] | None = None,
    client_chunk: int | None = None,
    progress: Progress | None = None,
) -> tuple[RunState, list[Any]]:
    """All exchanges of round `round_index` (traced, from 0).

    With `resample` who takes part is drawn anew, with these shares; see `start`.
    """
    if resample is not None:
        chosen = draw_participants(federation, key, resample, round_index)
        state = state._replace(participants=chosen)
    key = jax.random.fold_in(jax.random.fold_in(key, _ROUND), round_index)
    return run_phases(algorithm.round, "round", federation, key, state, client_chunk, progress)


def finish(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: jax.Array,
    state: RunState,
    round_index: jax.Array | int,
    *,
    client_chunk: int | None = None,
) -> tuple[RunState, list[Any]]:
    """The exchanges after the last round, as they would be made after round `round_index`."""
    key = jax.random.fold_in(jax.random.fold_in(key, _FINISH), round_index)
    return run_phases(algorithm.finish, "finish", federation, key, state, client_chunk, None)


def assign(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    state: RunState,
    *,
    client_chunk: int | None = None,
) -> tuple[jax.Array, ...]:
    """Clusters of all clients' rows, participating or not; state as `finish` left it."""
    return over_clients(algorithm.assign, federation, state, client_chunk)


def embed(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    state: RunState,
    *,
    client_chunk: int | None = None,
) -> tuple[jax.Array, ...]:
    """Every client's representation, for each cohort [clients, rows, d].

    Raises:
      ValueError: The method has no representation.
    """
    if algorithm.embed is None:
        raise ValueError("embed: this algorithm has no representation of samples")
    return over_clients(algorithm.embed, federation, state, client_chunk)


def run(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: jax.Array,
    rounds: int,
    *,
    participation: float | Sequence[float] = 1.0,
    resample_participants: bool = False,
    client_chunk: int | None = None,
    n_clusters: int | None = None,
) -> RunResult:
    """A whole federation, from initialisation to every sample's cluster.

    Pure; jit it, vmap it over `key` or over hyper-parameters that `algorithm` was built with.

    Args:
      algorithm: The method.
      federation: The data.
      key: The run's key: same key, same bits.
      rounds: Static number of rounds.
      participation: See `start`.
      resample_participants: Whether who takes part is drawn anew every round. A client that has
        not taken part yet then starts from its initial state.
      client_chunk: Static number of clients that are computed at once; None means all of a cohort.
        Bounds memory; changes results by rounding at most.
      n_clusters: If given, every round is scored against the labels, as if it were the last.

    Raises:
      ValueError: A bad `rounds`, `client_chunk` or `participation`, or no labels to score with.
    """
    if rounds < 0:
        raise ValueError(f"rounds: got {rounds}; allowed is 0 or more")
    if n_clusters is not None and federation.labels is None:
        raise ValueError("n_clusters: asks for scores; the federation has no labels to score with")
    state = start(algorithm, federation, key, participation=participation)
    state, setup_info = setup(algorithm, federation, key, state, client_chunk=client_chunk)

    anew = participation if resample_participants else None

    def body(state: RunState, r: jax.Array) -> tuple[RunState, Any]:
        state, info = one_round(
            algorithm, federation, key, state, r, resample=anew, client_chunk=client_chunk
        )
        scores = None
        if n_clusters is not None:
            finished, _ = finish(algorithm, federation, key, state, r, client_chunk=client_chunk)
            labels = assign(algorithm, federation, finished, client_chunk=client_chunk)
            scores = score(federation, labels, n_clusters, state.participants)
        return state, (info, scores)

    state, (round_info, scores), n_rounds = _rounds(algorithm, body, state, rounds)
    last = jnp.maximum(n_rounds - 1, 0)
    state, finish_info = finish(algorithm, federation, key, state, last, client_chunk=client_chunk)
    labels = assign(algorithm, federation, state, client_chunk=client_chunk)
    info = {"setup": setup_info, "rounds": round_info, "finish": finish_info}
    return RunResult(state, labels, info, scores, n_rounds)


def _rounds(
    algorithm: FederatedAlgorithm,
    body: Callable[[RunState, jax.Array], tuple[RunState, Any]],
    state: RunState,
    rounds: int,
) -> tuple[RunState, Any, jax.Array]:
    """`body` over the rounds, until the method is done; its outputs stacked on a leading axis."""
    if algorithm.done is None or rounds == 0:
        state, out = jax.lax.scan(body, state, jnp.arange(rounds))
        return state, out, jnp.int32(rounds)
    shapes = jax.eval_shape(body, state, jnp.int32(0))[1]
    empty = jax.tree.map(lambda s: jnp.zeros((rounds, *s.shape), s.dtype), shapes)

    def unfinished(carry: tuple[jax.Array, RunState, Any]) -> jax.Array:
        r, state, _ = carry
        return (r < rounds) & ~algorithm.done(state.server)  # type: ignore[misc]

    def step(carry: tuple[jax.Array, RunState, Any]) -> tuple[jax.Array, RunState, Any]:
        r, state, out = carry
        state, new = body(state, r)
        return r + 1, state, jax.tree.map(lambda rows, row: rows.at[r].set(row), out, new)

    n_rounds, state, out = jax.lax.while_loop(unfinished, step, (jnp.int32(0), state, empty))
    return state, out, n_rounds


@partial(jax.jit, static_argnums=0, static_argnames="client_chunk")
def _made_round(
    make: Callable[[Any], FederatedAlgorithm], hyperparams: Any, *arguments: Any, **keywords: Any
) -> tuple[RunState, list[Any]]:
    return one_round(make(hyperparams), *arguments, **keywords)


@partial(jax.jit, static_argnums=0, static_argnames="client_chunk")
def _made_assign(
    make: Callable[[Any], FederatedAlgorithm], hyperparams: Any, *arguments: Any, **keywords: Any
) -> tuple[jax.Array, ...]:
    return assign(make(hyperparams), *arguments, **keywords)


def run_compacting(
    make: Callable[[Any], FederatedAlgorithm],
    federation: Federation,
    key: jax.Array,
    rounds: int,
    *,
    hyperparams: Any = None,
    client_chunk: int | None = None,
    on_round: Callable[[int, RunState, list[Any]], None] | None = None,
) -> RunResult:
    """As `run`, with the loop on the host, which shrinks the state's arrays between rounds.

    The same rounds with the same keys, so the same result but for rounding; each round then costs
    what is left to do. For large inputs; cannot be vmapped. One round is compiled for every size
    that `compact` leaves; these programs are kept for further calls with the same `make`.

    Args:
      make: `hyperparams -> algorithm`, a method with `done` and `compact`; its static settings are
        what `make` closes over.
      federation: The data.
      key: The run's key.
      rounds: Most rounds to make.
      hyperparams: A pytree of what may differ from call to call without compiling anew.
      client_chunk: As in `run`.
      on_round: Called after each round with the number of rounds made, the state and the info.

    Raises:
      ValueError: The method cannot be compacted, or `rounds` is below 0.
    """
    algorithm = make(hyperparams)
    if algorithm.done is None or algorithm.compact is None:
        raise ValueError("algorithm: has no `done` and `compact`; use run")
    if rounds < 0:
        raise ValueError(f"rounds: got {rounds}; allowed is 0 or more")
    state = start(algorithm, federation, key)
    state, setup_info = setup(algorithm, federation, key, state, client_chunk=client_chunk)
    infos: list[Any] = []
    while len(infos) < rounds and not algorithm.done(state.server):
        r = jnp.int32(len(infos))
        state, info = _made_round(
            make, hyperparams, federation, key, state, r, client_chunk=client_chunk
        )
        infos.append(jax.device_get(info))
        if on_round is not None:
            on_round(len(infos), state, infos[-1])
        state = state._replace(server=algorithm.compact(state.server))
    last = max(len(infos) - 1, 0)
    state, finish_info = finish(algorithm, federation, key, state, last, client_chunk=client_chunk)
    labels = _made_assign(make, hyperparams, federation, state, client_chunk=client_chunk)
    stacked = jax.tree.map(lambda *rows: np.stack(rows), *infos) if infos else []
    info = {"setup": setup_info, "rounds": stacked, "finish": finish_info}
    return RunResult(state, labels, info, None, jnp.int32(len(infos)))


def traffic(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    *,
    participation: float | Sequence[float] = 1.0,
) -> dict[str, Traffic]:
    """Bytes of `setup`, of one `round` and of `finish`, counted from the leaves that travel.

    Nothing is computed: the exchanges are only traced. Among peers a message goes to every other
    client, and nothing is broadcast.
    """
    ledgers: dict[str, list[Exchanged]] = {"setup": [], "round": [], "finish": []}
    n_clients = 0

    def trace(key: jax.Array) -> None:
        nonlocal n_clients
        state = start(algorithm, federation, key, participation=participation)
        n_clients = sum(len(places) for places in state.participants)
        for stage, ledger in ledgers.items():
            phases = getattr(algorithm, stage)
            state, _ = run_phases(phases, stage, federation, key, state, None, None, ledger)

    jax.eval_shape(trace, jax.random.key(0))
    result = {}
    for stage, ledger in ledgers.items():
        up = sum(e.clients * e.message_bytes for e in ledger)
        down = sum(e.clients * e.sent_bytes for e in ledger)
        if algorithm.peers:
            up *= n_clients - 1
            down = up
        result[stage] = Traffic(up, down)
    return result
