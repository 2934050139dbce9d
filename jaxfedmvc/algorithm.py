"""The two types that every method of this library is made of.

In each exchange every client computes a MESSAGE from what it holds and what it was sent; a
reduction turns the messages into what is sent next. The message is the only thing that leaves a
client: it is what is counted, clipped, noised and put on the wire. `info` is what a simulation may
look at (losses, norms): it is never sent, never counted, and a deployed node drops it.

Shapes: a `client` function sees ONE client and no client axis. The engine vmaps it over a cohort.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from jaxfedmvc import keys
from jaxfedmvc.federation import Cohort, Federation

PyTree = Any


class Phase(NamedTuple):
    """One exchange between the clients and the server.

    Attributes:
      broadcast: `(server_state, view_ids) -> sent`, what clients that hold these views are sent.
        It is given the views' ids and no data: a server knows no more of a cohort.
      client: `(key, sent, client_state, client) -> (client_state, message, info)`. `client` is one
        client of a `Cohort`. The state keeps its structure and shapes; the message is a pytree of
        arrays; info a pytree of small arrays.
      server: `(key, server_state, messages, weights) -> (server_state, info)`. The state keeps its
        structure, and in rounds its shapes. Messages and weights have one entry for each cohort
        that takes part. With `reduce="stack"`: messages stacked on a leading client axis
        and weights [clients], zero for a client whose message must not count. With
        `reduce="sum"`: the sum of the messages over the clients of non-zero weight, and the
        number of these clients. In a protocol without a server every peer evaluates this
        function on the messages that it collected.
      reduce: "sum" declares that the server needs no more than the sum of the messages. The engine
        then adds them up as they come, so that memory follows the chunk and not the number of
        clients, and secure aggregation can hide every single message.
      who: "everyone" who takes part in the run, or the "leader" alone: the participant of lowest
        client id in the cohort with the most views (of several, the one of lowest view ids).
    """

    broadcast: Callable[[PyTree, tuple[int, ...]], PyTree]
    client: Callable[[jax.Array, PyTree, PyTree, Cohort], tuple[PyTree, PyTree, PyTree]]
    server: Callable[
        [jax.Array, PyTree, tuple[PyTree, ...], tuple[jax.Array, ...]], tuple[PyTree, PyTree]
    ]
    reduce: Literal["stack", "sum"] = "stack"
    who: Literal["everyone", "leader"] = "everyone"


def send_nothing(state: PyTree, view_ids: tuple[int, ...]) -> tuple[()]:
    """Sends clients nothing; for `Phase.broadcast`."""
    return ()


def answer_nothing(
    key: jax.Array, sent: PyTree, state: PyTree, client: Cohort
) -> tuple[PyTree, tuple[()], dict]:
    """Leaves a client as it is, and sends nothing; for `Phase.client`.

    What it was sent is counted all the same: `assign` reads it off the server's state.
    """
    return state, (), {}


def keep(
    key: jax.Array, state: PyTree, messages: tuple[PyTree, ...], weights: tuple[jax.Array, ...]
) -> tuple[PyTree, dict]:
    """Leaves the server as it is; for `Phase.server`, where messages say nothing."""
    return state, {}


def by_agent(messages: tuple[dict[Any, PyTree], ...]) -> dict[Any, PyTree]:
    """Returns `{agent: message}` in ascending order of agents, which cohorts do not follow.

    For `Phase.server`, where each cohort is one agent and sends `{agent: message}`, an agent named
    by the views that it holds, say. The client axis, of one agent, is gone.
    """
    sent = {agent: m for message in messages for agent, m in message.items()}
    return {agent: jax.tree.map(lambda x: x[0], sent[agent]) for agent in sorted(sent)}


class FederatedAlgorithm(NamedTuple):
    """A method: pure functions over explicit states.

    Attributes:
      init: `(key, federation) -> (server_state, client_states)`, client_states one stack for each
        cohort. Reads shapes, row counts and client ids of the federation, never feature values.
      setup: Exchanges made once, before the rounds.
      round: The exchanges of one round.
      finish: Exchanges made once, after the rounds. After them every client that took part has been
        sent what `assign` uses, so that the bytes are complete.
      assign: `(server_state, client_state, client) -> labels [rows]`, after `finish`.
      embed: `(server_state, client_state, client) -> [rows, d]`, the representation that `assign`
        clusters, or None where a method has none. For pictures and for scores that pool it.
      done: `server_state -> bool`, whether further rounds would change nothing, for methods that
        find their own end; None for methods that are run for a number of rounds.
      compact: `server_state -> server_state` with smaller arrays and the same meaning, for methods
        whose rounds need ever less; None for others. Reads values, so it runs on the host.
      peers: There is no server: every message goes to every other client, each evaluates `server`
        on what it collected, and `broadcast` hands out what a client then knows already, so that
        it costs no bytes.
      least_clients: Fewest clients that must take part, for methods whose sums are of no use with
        fewer messages.
      most_rounds: Most rounds that a run may have, for methods whose noise was calibrated for so
        many; None where there is no limit.
    """

    init: Callable[[jax.Array, Federation], tuple[PyTree, tuple[PyTree, ...]]]
    setup: tuple[Phase, ...]
    round: tuple[Phase, ...]
    finish: tuple[Phase, ...]
    assign: Callable[[PyTree, PyTree, Cohort], jax.Array]
    embed: Callable[[PyTree, PyTree, Cohort], jax.Array] | None = None
    done: Callable[[PyTree], jax.Array] | None = None
    compact: Callable[[PyTree], PyTree] | None = None
    peers: bool = False
    least_clients: int = 1
    most_rounds: int | None = None


def phases_by_name(algorithm: FederatedAlgorithm) -> dict[str, Phase]:
    """Returns the exchanges of a method by name: "setup[0]", "round[0]", "finish[0]" and so on."""
    return {
        f"{stage}[{i}]": phase
        for stage in keys.STAGES
        for i, phase in enumerate(getattr(algorithm, stage))
    }


def with_phases(
    algorithm: FederatedAlgorithm, change: Callable[[str, Phase], Phase]
) -> FederatedAlgorithm:
    """Returns the same method with what `change` makes of each exchange and its name."""
    of_stage: dict[str, Any] = {
        stage: tuple(change(f"{stage}[{i}]", p) for i, p in enumerate(getattr(algorithm, stage)))
        for stage in keys.STAGES
    }
    return algorithm._replace(**of_stage)
