"""The exchanges of a job: the order in which they are made, and the shapes of all that travels.

From the plan both sides derive these by tracing the method, so that no message has to say what it
is.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval as pe

from jaxfedmvc import keys
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.deploy import wire
from jaxfedmvc.deploy.job import Job
from jaxfedmvc.deploy.plan import Plan, skeleton
from jaxfedmvc.engine import streaming
from jaxfedmvc.engine.phases import RunState, check_phases, leading_cohort, named
from jaxfedmvc.federation import Cohort
from jaxfedmvc.messages import secure

PyTree = Any


class Place(NamedTuple):
    """One exchange of a run: its stage, the round, counted from 0, and the phase of the stage."""

    stage: str
    round: int
    phase: int


# --- Shapes ---------------------------------------------------------------------------------------


def shapes_of(tree: PyTree) -> PyTree:
    """Returns the shapes and types of a tree, without weak types."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), tree)


def stack_of(tree: PyTree, n: int) -> PyTree:
    """Returns the shapes of a stack of `n` clients' parts, from those of another number's."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), tree)


class Travels(NamedTuple):
    """Shapes of what travels in one exchange between the server and one client of a cohort."""

    sent: PyTree
    message: PyTree


class Shapes:
    """The shapes of everything that travels in a job, found by tracing the method once."""

    def __init__(self, algorithm: FederatedAlgorithm, plan: Plan) -> None:
        """Traces `init`; exchanges are traced when they are asked for.

        Args:
          algorithm: The method.
          plan: Who holds what.

        Raises:
          ValueError: A phase whose `reduce` or `who` there is not.
        """
        check_phases(algorithm)
        self.algorithm, self.plan = algorithm, plan
        self.federation = shapes_of(skeleton(plan))
        self.key = jax.eval_shape(lambda: jax.random.key(0))
        server, clients = jax.eval_shape(algorithm.init, self.key, self.federation)
        self.start: PyTree = shapes_of(server)
        self.states: list[PyTree] = [shapes_of(stack_of(c, 1)) for c in clients]
        self._found: dict[Any, tuple[dict[int, Travels], PyTree]] = {}

    def initial_states(self, key: jax.Array, rows: Mapping[int, int] | None = None) -> RunState:
        """Makes the initial states.

        Args:
          key: The job's.
          rows: As in `skeleton`; they change no client's state.
        """
        return streaming.start_on_host(self.algorithm, skeleton(self.plan, rows), key, 1.0)

    def initial_size(self) -> int:
        """Returns the bytes of the initial states of the server and of all clients."""
        clients = zip(self.plan.groups, self.states, strict=True)
        return wire.size(self.start) + sum(len(g.clients) * wire.size(one) for g, one in clients)

    def phase(self, place: Place) -> Phase:
        """Returns the phase of an exchange."""
        return getattr(self.algorithm, place.stage)[place.phase]

    def places(self) -> list[Place]:
        """Lists the exchanges of a run of one round."""
        return [
            Place(stage, 0, p)
            for stage in keys.STAGES
            for p in range(len(getattr(self.algorithm, stage)))
        ]

    def exchange(self, place: Place, server: PyTree) -> tuple[dict[int, Travels], PyTree]:
        """Returns what travels to and from one client of each cohort that takes part.

        Args:
          place: The exchange.
          server: Shapes of the server's state before it.

        Returns:
          By cohort, and the shapes of the server's state afterwards.
        """
        leaves, tree = jax.tree.flatten(server)
        known = place.stage, place.phase, tree, tuple((x.shape, str(x.dtype)) for x in leaves)
        if known not in self._found:
            with named(place.stage, place.phase):
                self._found[known] = self._traced(place, server)
        return self._found[known]

    def _traced(self, place: Place, server: PyTree) -> tuple[dict[int, Travels], PyTree]:
        phase, travels, messages, weights = self.phase(place), {}, [], []
        for c in self.taking_part(phase):
            cohort = self.federation.cohorts[c]
            sent = shapes_of(
                jax.eval_shape(lambda s, p=phase, v=cohort.view_ids: p.broadcast(s, v), server)
            )
            real = jax.ShapeDtypeStruct((1,), np.bool_)
            one = stack_of(cohort, 1)
            _, message, weight, _ = jax.eval_shape(
                lambda *args, p=phase: streaming.client_program(p, *args),
                *(self.key, sent, self.states[c], one, real),
            )
            travels[c] = Travels(sent, shapes_of(message))
            if phase.reduce == "stack":
                n = cohort.n_clients if phase.who == "everyone" else 1
                message, weight = stack_of((message, weight), n)
            messages.append(message)
            weights.append(weight)
        after, _ = jax.eval_shape(
            lambda *args: streaming.server_program(phase, *args),
            *(self.key, server, tuple(messages), tuple(weights)),
        )
        return travels, shapes_of(after)

    def taking_part(self, phase: Phase) -> list[int]:
        """Lists the cohorts that take part in a phase."""
        if phase.who == "everyone":
            return list(range(len(self.federation.cohorts)))
        return [leading_cohort(self.federation)]

    def at(self, place: Place) -> tuple[dict[int, Travels], PyTree]:
        """Returns what travels in an exchange, and the shapes of the server's state before it.

        For methods whose server state has the same shapes in every round.

        Raises:
          KeyError: The method has no such exchange.
        """
        server = self.start
        for before in self.places():
            found, after = self.exchange(before, server)
            if (before.stage, before.phase) == (place.stage, place.phase):
                return found, server
            server = after
        raise KeyError(place)

    def last(self) -> PyTree:
        """Returns the shapes of the server's state after `finish`."""
        server = self.start
        for place in self.places():
            _, server = self.exchange(place, server)
        return server

    def needed(self, c: int, server: PyTree) -> list[bool]:
        """Says which leaves of the server's state `assign` reads for clients of a cohort."""
        cohort, assign = stack_of(self.federation.cohorts[c], 1), self.algorithm.assign
        leaves, tree = jax.tree.flatten(server)

        def of_leaves(leaves: list[Any], states: PyTree, clients: Cohort) -> jax.Array:
            state = jax.tree.unflatten(tree, leaves)
            return streaming.assign_program(assign, state, states, clients)

        traced = jax.make_jaxpr(of_leaves)(leaves, self.states[c], cohort)
        _, used = pe.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
        return list(used[: len(leaves)])


def job_shapes(job: Job, plan: Plan) -> Shapes:
    """Returns the shapes of a job; for jobs that compute the same one object, with its programs."""
    # Without what no program depends on: whose job it is, its randomness, who is waited for.
    alike = dataclasses.replace(
        job,
        name="any",
        seed=0,
        keys="own",
        late="wait",
        deadline=1.0,
        patience=1.0,
        participation=1.0,
    )
    return _job_shapes(json.dumps([alike.to_json(), plan.to_json()], sort_keys=True))


@functools.lru_cache(maxsize=4)
def _job_shapes(text: str) -> Shapes:
    told, plan_told = json.loads(text)
    job, plan = Job.from_json(told), Plan.from_json(plan_told)
    algorithm = job.make(len(plan.clients))
    if job.fraction_bits is not None:
        algorithm = secure.secure_aggregation(
            algorithm,
            skeleton(plan),
            jax.random.key(0),  # draws nothing: nodes mask what is encoded
            fraction_bits=job.fraction_bits,
            in_clear=job.in_clear,
            masked=False,
        )
    return Shapes(algorithm, plan)


# --- Order ----------------------------------------------------------------------------------------


def asked_of(phase: Phase, clients: list[int]) -> list[int]:
    """Lists the clients, of a cohort that takes part in a phase, which are asked."""
    return [min(clients)] if phase.who == "leader" else clients


def following(
    algorithm: FederatedAlgorithm, place: Place | None, rounds: int, server: PyTree
) -> Place | None:
    """Returns the exchange after `place`, None after the last; the first one after None."""
    if place is not None and place.phase + 1 < len(getattr(algorithm, place.stage)):
        return place._replace(phase=place.phase + 1)
    if place is None and algorithm.setup:
        return Place("setup", 0, 0)
    if place is not None and place.stage == "finish":
        return None
    made = 0 if place is None or place.stage == "setup" else place.round + 1
    is_done = algorithm.done is not None and bool(streaming.done_program(algorithm.done, server))
    if algorithm.round and made < rounds and not is_done:
        return Place("round", made, 0)
    return Place("finish", max(made - 1, 0), 0) if algorithm.finish else None


def may_follow(before: Place | None, place: Place, rounds: int) -> bool:
    """Says whether a node may answer an exchange after the last one that it answered.

    A client may have been left out of any number of exchanges, and only the server knows whether
    further rounds would change anything. Never twice the same exchange: a message with noise of
    its own each time could be averaged.

    Args:
      before: The last exchange that was answered; None before the first.
      place: The exchange that is asked for, one of the method's stages and phases.
      rounds: Most rounds of the job.
    """

    def when(place: Place) -> tuple[int, int, int]:
        made = place.round if place.stage == "round" else 0  # `finish` has that of the last one
        return list(keys.STAGES).index(place.stage), made, place.phase

    most = 1 if place.stage == "setup" else rounds if place.stage == "round" else max(rounds, 1)
    return 0 <= place.round < most and (before is None or when(place) > when(before))


def key_of(key: jax.Array, place: Place) -> jax.Array:
    """Returns the key of an exchange, as the engine derives it."""
    return keys.of_phase(key, keys.STAGES[place.stage], place.round, place.phase)


# --- Peers ----------------------------------------------------------------------------------------


def relayed_shapes(shapes: Shapes, place: Place, known: PyTree) -> tuple[PyTree, ...]:
    """Returns the shapes of all peers' messages of an exchange."""
    travels, _ = shapes.exchange(place, shapes_of(known))
    groups = shapes.plan.groups
    return tuple(stack_of(x.message, len(groups[c].clients)) for c, x in travels.items())


def advanced(
    shapes: Shapes, place: Place, known: PyTree, messages: tuple[PyTree, ...], key: jax.Array
) -> PyTree:
    """Returns what every peer knows after an exchange; compacted, where that ends a round.

    Args:
      shapes: Of the job.
      place: The exchange.
      known: What they knew before.
      messages: Of all peers.
      key: The job's, from which all draw alike.
    """
    algorithm, phase = shapes.algorithm, shapes.phase(place)
    weights = tuple(
        np.ones(len(shapes.plan.groups[c].clients), np.float32) for c in shapes.taking_part(phase)
    )
    known, _ = streaming.server_program(phase, key_of(key, place), known, messages, weights)
    ends_round = place.stage == "round" and place.phase + 1 == len(algorithm.round)
    if algorithm.compact is not None and ends_round:
        known = algorithm.compact(known)
    return known


def digest_of(tree: PyTree) -> str:
    """Returns a hash of all bits of a tree."""
    return hashlib.sha256(wire.encode(tree)).hexdigest()
