"""How many bytes travel, counted from the leaves of the messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from jaxfedmvc import keys
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.engine.phases import Exchanged, Traffic, run_phases
from jaxfedmvc.engine.run import start
from jaxfedmvc.federation import Federation
from jaxfedmvc.precision import in_32_bits


@in_32_bits
def traffic(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    *,
    participation: float | Sequence[float] = 1.0,
) -> dict[str, Traffic]:
    """Counts the bytes of `setup`, of one `round` and of `finish`, from the leaves that travel.

    Nothing is computed: the exchanges are only traced. Among peers a message goes to every other
    client, and nothing is broadcast.

    Args:
      algorithm: The method.
      federation: The data, of which shapes are read.
      participation: As in `start`.

    Returns:
      `{stage: Traffic}`, bytes of all clients together.

    Raises:
      ValueError: As `start`.
    """
    ledgers: dict[str, list[Exchanged]] = {stage: [] for stage in keys.STAGES}
    n_clients = 0

    def trace(key: jax.Array, federation: Federation) -> None:
        nonlocal n_clients
        state = start(algorithm, federation, key, participation=participation)
        n_clients = sum(len(places) for places in state.participants)
        for stage, ledger in ledgers.items():
            phases = getattr(algorithm, stage)
            state, _ = run_phases(phases, stage, federation, key, state, None, None, ledger)

    # Traced, so that shapes suffice and data may be zeros that take no memory.
    jax.eval_shape(trace, jax.random.key(0), federation)
    return {
        stage: total(ledger, n_clients if algorithm.peers else None)
        for stage, ledger in ledgers.items()
    }


def total(exchanged: Sequence[Exchanged], peers: int | None) -> Traffic:
    """Adds up the bytes of exchanges; among `peers` clients every message goes to all others."""
    up = sum(e.clients * e.message_bytes for e in exchanged)
    if peers is not None:
        return Traffic(up * (peers - 1), up * (peers - 1))
    return Traffic(up, sum(e.clients * e.sent_bytes for e in exchanged))


def of_run(stages: Mapping[str, Traffic], rounds: int) -> Traffic:
    """Adds up the bytes of a run of so many rounds, each of which sends as much as the others.

    Args:
      stages: As `traffic` returns them.
      rounds: Rounds made.
    """
    times = {"setup": 1, "round": rounds, "finish": 1}
    up, down = (
        sum(getattr(stages[stage], way) * n for stage, n in times.items()) for way in ("up", "down")
    )
    return Traffic(up, down)
