"""Runs of methods whose rounds need ever less: the loop on the host, arrays shrunk in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.engine.phases import RunState
from jaxfedmvc.engine.run import (
    RunResult,
    assign,
    check_rounds,
    finish,
    of_rounds,
    one_round,
    setup,
    start,
)
from jaxfedmvc.federation import Federation
from jaxfedmvc.precision import in_32_bits


@partial(jax.jit, static_argnums=(0, 1), static_argnames="client_chunk")
def _of_made(
    part: Callable[..., Any],
    make: Callable[[Any], FederatedAlgorithm],
    hyperparams: Any,
    *arguments: Any,
    client_chunk: int | None,
) -> Any:
    """Computes a part of a run, such as `one_round`, of the method that `make` makes."""
    return part(make(hyperparams), *arguments, client_chunk=client_chunk)


@in_32_bits
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
    """Runs as `run`, with the loop on the host, which shrinks the state's arrays between rounds.

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
      ValueError: The method cannot be compacted, or a bad `rounds` or `client_chunk`.
    """
    algorithm = make(hyperparams)
    if algorithm.done is None or algorithm.compact is None:
        raise ValueError("algorithm: has no `done` and `compact`; use run")
    check_rounds(algorithm, rounds)
    state = start(algorithm, federation, key)
    state, setup_info = setup(algorithm, federation, key, state, client_chunk=client_chunk)
    infos: list[Any] = []
    while len(infos) < rounds and not algorithm.done(state.server):
        r = jnp.int32(len(infos))
        state, info = _of_made(
            one_round, make, hyperparams, federation, key, state, r, client_chunk=client_chunk
        )
        infos.append(jax.device_get(info))
        if on_round is not None:
            on_round(len(infos), state, infos[-1])
        state = state._replace(server=algorithm.compact(state.server))
    last = max(len(infos) - 1, 0)
    state, finish_info = finish(algorithm, federation, key, state, last, client_chunk=client_chunk)
    labels = _of_made(assign, make, hyperparams, federation, state, client_chunk=client_chunk)
    return of_rounds(state, labels, setup_info, infos, finish_info)
