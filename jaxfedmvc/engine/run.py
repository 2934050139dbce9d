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

from jaxfedmvc import checks, keys
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.engine.phases import (
    Progress,
    RunState,
    check_phases,
    labelled,
    over_clients,
    run_phases,
)
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.metrics.federation import tables
from jaxfedmvc.precision import in_32_bits


class RunResult(NamedTuple):
    """What `run` returns.

    Attributes:
      state: After the last round and `finish`.
      labels: For each cohort the cluster of every row, int32 [clients, rows].
      info: `{"setup", "rounds", "finish"}`, each a list with what the clients and the server
        reported in each phase; leaves of "rounds" have a leading axis [rounds].
      tables: After each round, as if it were the last, every client's contingency table, float32
        [rounds, clients, n_classes, n_clusters]; None when not asked for. They are scored by
        `metrics.scores_from_contingency`, or on the host by `metrics.host.group_scores`.
      participants: With `tables`, for each cohort the places of those that took part, [rounds, n].
      n_rounds: Rounds made, int32; fewer than asked for where the method found its own end, and
        then the further entries of "rounds", `tables` and `participants` are zero.
      kept: With `keep`, the round that these are the state and the labels of, from 1 on, int32.
    """

    state: RunState
    labels: tuple[jax.Array, ...]
    info: dict[str, Any]
    tables: jax.Array | None
    participants: tuple[jax.Array, ...] | None
    n_rounds: jax.Array
    kept: jax.Array | None = None


@in_32_bits
def start(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: jax.Array,
    *,
    participation: float | Sequence[float] = 1.0,
) -> RunState:
    """Makes the initial states, and draws who takes part.

    Args:
      algorithm: The method.
      federation: The data; labels are not shown to the algorithm.
      key: The run's key.
      participation: Share of clients, in (0, 1], that take part, of every cohort or one share for
        each cohort; rounded, halves to even, at least one client of a cohort. The others take part
        in nothing and are assigned clusters afterwards, as new clients would be.

    Raises:
      ValueError: A share outside (0, 1], or not one for each cohort, or of fewer clients than the
        method needs; a phase whose `reduce` or `who` there is not; an `init` that returned
        something else than it must; or no algorithm, federation or key.
    """
    if not isinstance(algorithm, FederatedAlgorithm):
        allowed = "a FederatedAlgorithm, as METHODS[name].make(config, hyperparams) returns it"
        raise checks.wrong("algorithm", type(algorithm).__name__, allowed)
    if not isinstance(federation, Federation):
        raise checks.wrong("federation", type(federation).__name__, "a Federation")
    if not isinstance(key, jax.Array | np.ndarray):
        raise checks.wrong("key", key, "a key of JAX, such as jax.random.key(0)")
    check_phases(algorithm)
    made = algorithm.init(jax.random.fold_in(key, keys.INIT), federation.without_labels())
    server, clients = _first_states(made, federation)
    participants = draw_participants(federation, key, participation)
    n = sum(len(places) for places in participants)
    if n < algorithm.least_clients:
        raise checks.wrong(
            "participation",
            participation,
            f"a share of which {algorithm.least_clients} clients or more take part, here {n}",
        )
    return RunState(server, clients, participants)


def _first_states(made: Any, federation: Federation) -> tuple[Any, tuple[Any, ...]]:
    """Returns what `init` made, once it is a server state and a stack for each cohort.

    Raises:
      ValueError: Says what it is instead.
    """
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise ValueError(
            f"init: returned {type(made).__name__}; allowed is (server state, client states)"
        )
    server, clients = made
    n_cohorts = len(federation.cohorts)
    if not isinstance(clients, tuple | list) or len(clients) != n_cohorts:
        is_some = isinstance(clients, tuple | list)
        got = f"{len(clients)} stacks" if is_some else type(clients).__name__
        raise ValueError(
            f"init: returned {got} of client states; allowed is a tuple with one for each cohort,"
            f" here {n_cohorts}; one is () where clients have no state"
        )
    for cohort, stack in zip(federation.cohorts, clients, strict=True):
        for leaf in jax.tree.leaves(stack):
            if jnp.shape(leaf)[:1] != (cohort.n_clients,):
                raise ValueError(
                    f"init: returned client states of shape {list(jnp.shape(leaf))} for views"
                    f" {cohort.view_ids}; allowed is a leading axis of {cohort.n_clients} clients"
                )
    return server, tuple(clients)


def check_rounds(algorithm: FederatedAlgorithm, rounds: Any) -> None:
    """Checks a number of rounds, also against what a private method's noise was calibrated for.

    Raises:
      ValueError: No whole number of 0 or more, or more than `most_rounds`.
    """
    checks.whole("rounds", rounds, 0)
    most = getattr(algorithm, "most_rounds", None)  # what is no algorithm, `start` says
    if most is not None and rounds > most:
        allowed = f"0 to {most}, for which the method's noise was calibrated"
        raise checks.wrong("rounds", rounds, allowed)


@in_32_bits
def draw_participants(
    federation: Federation,
    key: jax.Array,
    participation: float | Sequence[float],
    round_index: jax.Array | int = 0,
) -> tuple[jax.Array, ...]:
    """Draws the clients that take part, for each cohort.

    Args:
      federation: The data; only client ids are read.
      key: The run's key.
      participation: As for `start`.
      round_index: Of the draw, from 0, traced; `start` makes that of round 0.

    Returns:
      For each cohort the places [taking part] of these clients, in increasing order.

    Raises:
      ValueError: A share outside (0, 1], or not one for each cohort.
    """
    n_cohorts = len(federation.cohorts)
    shares: list[float]
    try:
        shares = (
            [float(participation)] * n_cohorts  # type: ignore[arg-type]
            if np.ndim(participation) == 0
            else [float(share) for share in participation]  # type: ignore[union-attr]
        )
    except (TypeError, ValueError):  # no numbers, and so refused below
        shares = []
    if len(shares) != n_cohorts or not all(0.0 < share <= 1.0 for share in shares):
        raise ValueError(
            f"participation: got {participation!r}; allowed is one share in (0, 1], or one for each"
            f" of the {n_cohorts} cohorts"
        )
    key = keys.of_stage(key, keys.PARTICIPATION, round_index)
    return tuple(
        _lowest_draws(key, cohort, max(1, round(share * cohort.n_clients)))
        for cohort, share in zip(federation.cohorts, shares, strict=True)
    )


def _lowest_draws(key: jax.Array, cohort: Cohort, n: int) -> jax.Array:
    """Returns the places of the n clients of lowest draw; a client's draw derives from its id."""
    if n == cohort.n_clients:
        return jnp.arange(n)
    draws = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(cohort.client_ids)
    return jnp.sort(jnp.argsort(draws)[:n])


@in_32_bits
def setup(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: jax.Array,
    state: RunState,
    *,
    client_chunk: int | None = None,
    progress: Progress | None = None,
) -> tuple[RunState, list[Any]]:
    """Makes the exchanges before the first round.

    Args:
      algorithm: The method.
      federation: The data.
      key: The run's key.
      state: As `start` returned it.
      client_chunk: As in `run`.
      progress: Called on the host as `(stage, phase, cohort, clients done)` after every chunk.

    Returns:
      The state, and for each phase `{"clients", "server"}`, what was reported in it.

    Raises:
      ValueError: As `run`, or a function of a phase returned something else than it must.
    """
    key = keys.of_stage(key, keys.SETUP, 0)
    return run_phases(algorithm.setup, "setup", federation, key, state, client_chunk, progress)


@in_32_bits
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
    """Makes all exchanges of a round.

    Args:
      algorithm: The method.
      federation: The data.
      key: The run's key.
      state: After the setup, or after the round before.
      round_index: From 0, traced.
      resample: Shares with which who takes part is drawn anew, as for `start`; None: it stays.
      client_chunk: As in `run`.
      progress: As in `setup`.

    Returns:
      As `setup`.

    Raises:
      ValueError: As `setup`, or a bad `resample`, or a round, where it is not traced, after the
        method's `most_rounds`.
    """
    if algorithm.most_rounds is not None and not isinstance(round_index, jax.core.Tracer):
        check_rounds(algorithm, int(round_index) + 1)
    if resample is not None:
        chosen = draw_participants(federation, key, resample, round_index)
        state = state._replace(participants=chosen)
    key = keys.of_stage(key, keys.ROUND, round_index)
    return run_phases(algorithm.round, "round", federation, key, state, client_chunk, progress)


@in_32_bits
def finish(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: jax.Array,
    state: RunState,
    round_index: jax.Array | int,
    *,
    client_chunk: int | None = None,
) -> tuple[RunState, list[Any]]:
    """Makes the exchanges after the last round.

    Args:
      algorithm: The method.
      federation: The data.
      key: The run's key.
      state: After the last round.
      round_index: Of the last round, from 0, traced; 0 where none was made.
      client_chunk: As in `run`.

    Returns:
      As `setup`.

    Raises:
      ValueError: As `setup`.
    """
    key = keys.of_stage(key, keys.FINISH, round_index)
    return run_phases(algorithm.finish, "finish", federation, key, state, client_chunk, None)


@in_32_bits
def assign(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    state: RunState,
    *,
    client_chunk: int | None = None,
) -> tuple[jax.Array, ...]:
    """Finds the clusters of all clients' rows, of those that took no part, too.

    Args:
      algorithm: The method.
      federation: The data.
      state: As `finish` left it.
      client_chunk: As in `run`.

    Returns:
      For each cohort int32 [clients, rows]; -1 for padding.

    Raises:
      ValueError: A bad `client_chunk`, or what the method returned are no labels of rows.
    """
    return over_clients(partial(labelled, algorithm.assign), federation, state, client_chunk)


@in_32_bits
def embed(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    state: RunState,
    *,
    client_chunk: int | None = None,
) -> tuple[jax.Array, ...]:
    """Computes every client's representation of its rows, which `assign` clusters.

    Args:
      algorithm: The method.
      federation: The data.
      state: As `finish` left it.
      client_chunk: As in `run`.

    Returns:
      For each cohort float32 [clients, rows, d].

    Raises:
      ValueError: The method has no representation, or a bad `client_chunk`.
    """
    if algorithm.embed is None:
        raise ValueError("embed: this algorithm has no representation of samples")
    return over_clients(algorithm.embed, federation, state, client_chunk)


@in_32_bits
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
    keep: Callable[[tuple[jax.Array, ...]], jax.Array] | None = None,
    keep_from: int = 1,
) -> RunResult:
    """Runs a whole federation, from initialisation to every sample's cluster.

    Pure; jit it, vmap it over `key` or over hyper-parameters that `algorithm` was built with. What
    is traced cannot be checked: a hyper-parameter out of range gives labels, and no error.
    Outside of `jit` every call compiles its loops anew.

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
      n_clusters: If given, clusters are counted against the labels after every round, as if it were
        the last; static.
      keep: `labels -> number`. If given, the run ends as if the round for which it is largest had
        been the last; where it is NaN throughout, with the last. No classes are seen with
        `lambda labels: information(federation, labels, n_clusters)` of `metrics.information`.
      keep_from: The first round that may be kept, from 1 to `rounds`; static.

    Raises:
      ValueError: A bad `rounds`, `client_chunk`, `participation` or `keep_from`, no labels to
        count, or `keep` for a method that finds its own end or makes no rounds. More rounds than a
        private method's noise was calibrated for are bad, too.
    """
    check_rounds(algorithm, rounds)
    if keep is not None:
        if algorithm.done is not None or not algorithm.round:
            raise ValueError("keep: is for methods that make all their rounds; allowed is None")
        checks.whole("keep_from", keep_from, 1)
        if keep_from > rounds:
            raise checks.wrong("keep_from", keep_from, f"one of the {rounds} rounds")
    state = start(algorithm, federation, key, participation=participation)
    if n_clusters is not None and federation.labels is None:
        raise ValueError("n_clusters: asks for tables; the federation has no labels to count")
    state, setup_info = setup(algorithm, federation, key, state, client_chunk=client_chunk)

    anew = participation if resample_participants else None

    def body(carry: tuple[RunState, Any], r: jax.Array) -> tuple[tuple[RunState, Any], Any]:
        state, best = carry
        state, info = one_round(
            algorithm, federation, key, state, r, resample=anew, client_chunk=client_chunk
        )
        if n_clusters is None and keep is None:
            return (state, best), (info, None, None)
        finished, _ = finish(algorithm, federation, key, state, r, client_chunk=client_chunk)
        labels = assign(algorithm, federation, finished, client_chunk=client_chunk)
        if keep is not None:
            score = jnp.where(r + 1 >= keep_from, keep(labels), -jnp.inf)
            # NaN is larger than nothing.
            is_best = score > best[0]
            best = jax.tree.map(partial(jnp.where, is_best), (score, r, state), best)
        if n_clusters is None:
            return (state, best), (info, None, None)
        counted = tables(federation, labels, n_clusters)
        return (state, best), (info, counted, state.participants)

    best = None if keep is None else (-jnp.inf, jnp.int32(0), state)
    (state, best), out, n_rounds = _rounds(algorithm, body, (state, best), rounds)
    round_info, counted, participants = out
    last, kept = jnp.maximum(n_rounds - 1, 0), None
    if best is not None:
        score, *found = best
        is_found = partial(jnp.where, score > -jnp.inf)
        last, state = jax.tree.map(is_found, tuple(found), (last, state))
        kept = last + 1
    state, finish_info = finish(algorithm, federation, key, state, last, client_chunk=client_chunk)
    labels = assign(algorithm, federation, state, client_chunk=client_chunk)
    info = {"setup": setup_info, "rounds": round_info, "finish": finish_info}
    return RunResult(state, labels, info, counted, participants, n_rounds, kept)


def of_rounds(
    state: RunState,
    labels: tuple[jax.Array, ...],
    setup_info: list[Any],
    round_infos: list[Any],
    finish_info: list[Any],
) -> RunResult:
    """Returns the result of a run whose rounds the host made, of what was reported in each."""
    stacked = jax.tree.map(lambda *rows: np.stack(rows), *round_infos) if round_infos else []
    info = {"setup": setup_info, "rounds": stacked, "finish": finish_info}
    return RunResult(state, labels, info, None, None, jnp.int32(len(round_infos)))


def _rounds(
    algorithm: FederatedAlgorithm,
    body: Callable[[Any, jax.Array], tuple[Any, Any]],
    state: tuple[RunState, Any],
    rounds: int,
) -> tuple[Any, Any, jax.Array]:
    """Scans `body` over the rounds until the method is done; stacks what it puts out."""
    if algorithm.done is None or rounds == 0:
        state, out = jax.lax.scan(body, state, jnp.arange(rounds))
        return state, out, jnp.int32(rounds)
    shapes = jax.eval_shape(body, state, jnp.int32(0))[1]
    empty = jax.tree.map(lambda s: jnp.zeros((rounds, *s.shape), s.dtype), shapes)

    def unfinished(carry: tuple[jax.Array, Any, Any]) -> jax.Array:
        r, (state, _), _ = carry
        return (r < rounds) & ~algorithm.done(state.server)  # type: ignore[misc]

    def step(carry: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, Any, Any]:
        r, state, out = carry
        state, new = body(state, r)
        return r + 1, state, jax.tree.map(lambda rows, row: rows.at[r].set(row), out, new)

    n_rounds, state, out = jax.lax.while_loop(unfinished, step, (jnp.int32(0), state, empty))
    return state, out, n_rounds
