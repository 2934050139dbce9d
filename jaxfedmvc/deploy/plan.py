"""Who takes part with what: all that the server and a node know of the other clients.

From the plan both sides derive the shapes of everything that travels, by tracing the method, so
that no message has to say what it is.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.interpreters import partial_eval as pe

import jaxfedmvc
from jaxfedmvc import keys
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.deploy import wire
from jaxfedmvc.deploy.job import Job
from jaxfedmvc.engine import streaming
from jaxfedmvc.engine.phases import RunState, check_phases, leading_cohort, named
from jaxfedmvc.engine.run import draw_participants
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.messages import secure

PyTree = Any
# Rows of a plan, each client's padded to its cohort's capacity: the ids of so many take some 1.3 GB
# on every node and on the server, before a method has computed anything.
_MOST_ROWS = 10**8


class Place(NamedTuple):
    """One exchange of a run: its stage, the round, counted from 0, and the phase of the stage."""

    stage: str
    round: int
    phase: int


@dataclasses.dataclass(frozen=True)
class Card:
    """What a node says of itself when it registers.

    Attributes:
      client: Its number, which the operators agreed on; unique.
      views: Width of each view that it holds, by view id.
      rows: Number of its samples.
      samples: In a vertical federation a hash of the ids of its samples, in order; else empty.
      columns: Of each view that is made of a table's columns, a hash of their names, in order, and
        of the ranges that they were scaled by.
    """

    client: int
    views: Mapping[int, int]
    rows: int
    samples: str = ""
    columns: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> Card:
        """Reads what `dataclasses.asdict` made of one, once it went through JSON.

        Raises:
          AttributeError, KeyError, TypeError, ValueError, OverflowError: It is something else.
        """
        views = {int(v): int(width) for v, width in entries["views"].items()}
        columns = {int(v): str(hashed) for v, hashed in entries["columns"].items()}
        of_rows = int(entries["rows"]), str(entries["samples"])
        return cls(int(entries["client"]), views, *of_rows, columns)


@dataclasses.dataclass(frozen=True)
class Group:
    """A cohort of the plan: the clients that hold the same views, without their row counts.

    Attributes:
      view_ids: Which views.
      clients: Numbers of the clients, ascending.
      capacity: Rows that each pads to: the most that one of them has.
    """

    view_ids: tuple[int, ...]
    clients: tuple[int, ...]
    capacity: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cohorts of a job.

    Attributes:
      groups: In the order of `Federation.from_clients`.
      view_dims: Width of every view of the federation.
      vertical: Whether all clients hold the same samples.
    """

    groups: tuple[Group, ...]
    view_dims: tuple[int, ...]
    vertical: bool

    @property
    def clients(self) -> tuple[int, ...]:
        """All clients, cohort by cohort."""
        return tuple(i for group in self.groups for i in group.clients)

    def find(self, client: int) -> tuple[int, int]:
        """Returns the cohort of a client and its place there.

        Raises:
          KeyError: There is no such client.
        """
        for c, group in enumerate(self.groups):
            if client in group.clients:
                return c, group.clients.index(client)
        raise KeyError(client)

    def check_rows(self) -> None:
        """Checks that its rows are some that a federation may have, before any memory holds them.

        Raises:
          ValueError: Names the cohort that has most of them.
        """
        padded = [len(group.clients) * group.capacity for group in self.groups]
        if sum(padded) > _MOST_ROWS:
            c = padded.index(max(padded))
            raise ValueError(
                f"plan: groups[{c}].capacity: got {self.groups[c].capacity} rows for each of"
                f" {len(self.groups[c].clients)} clients, with the others {sum(padded)} in all;"
                f" allowed are {_MOST_ROWS}"
            )

    def to_json(self) -> dict[str, Any]:
        """Returns what goes through JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> Plan:
        """Reads what `to_json` returned.

        Raises:
          KeyError, TypeError, ValueError, OverflowError: It is something else.
        """
        groups = tuple(
            Group(
                tuple(int(v) for v in g["view_ids"]),
                tuple(int(i) for i in g["clients"]),
                int(g["capacity"]),
            )
            for g in entries["groups"]
        )
        plan = cls(groups, tuple(int(d) for d in entries["view_dims"]), bool(entries["vertical"]))
        views = [v for g in groups for v in g.view_ids]
        if sorted(set(views)) != list(range(max(len(plan.view_dims), 1))):
            raise ValueError("plan: a view that nobody holds")
        if not all(g.clients and 0 < g.capacity < 2**31 for g in groups):
            raise ValueError("plan: an empty cohort")
        # A client that is there twice would stand for two.
        if len(set(plan.clients)) < len(plan.clients):
            raise ValueError("plan: a client that is there twice")
        ordered = (ids for g in groups for ids in (g.clients, g.view_ids))
        if any(tuple(sorted(set(ids))) != ids for ids in ordered):
            raise ValueError("plan: clients or views that do not ascend")
        if not all(0 <= i < keys.CLIENT_IDS for i in plan.clients):
            raise ValueError("plan: a client of a number that there is not")
        if not all(0 < d < 2**31 for d in plan.view_dims):
            raise ValueError("plan: a view without features")
        return plan

    @classmethod
    def of_cards(cls, cards: Sequence[Card], vertical: bool) -> Plan:
        """Makes a plan of the nodes that registered.

        Raises:
          ValueError: Two nodes are the same client, differ in the width or the columns of a view,
            hold views that are not 0..V-1, or, in a vertical federation, different samples; or
            there are too many rows.
        """
        by_client: dict[int, Card] = {}
        widths: dict[int, tuple[int, int]] = {}
        columns: dict[int, tuple[int, str]] = {}
        for card in cards:
            if card.client in by_client:
                raise ValueError(f"client {card.client}: two nodes say that they are this client")
            by_client[card.client] = card
            for v, width in card.views.items():
                other, known = widths.setdefault(v, (card.client, width))
                if known != width:
                    raise ValueError(
                        f"client {card.client}: view {v} has {width} features; client {other} has"
                        f" {known}"
                    )
            for v, hashed in card.columns.items():
                other, there = columns.setdefault(v, (card.client, hashed))
                if hashed != there:
                    raise ValueError(
                        f"client {card.client}: view {v} has columns of other names, in another"
                        f" order, or in other ranges than client {other}'s"
                    )
        if sorted(widths) != list(range(len(widths))):
            raise ValueError(f"views: {sorted(widths)} are held; allowed are 0..V-1, each")
        if vertical:
            _check_samples([by_client[i] for i in sorted(by_client)])
        members: dict[tuple[int, ...], list[int]] = {}
        for i in sorted(by_client):
            members.setdefault(tuple(sorted(by_client[i].views)), []).append(i)
        groups = tuple(
            Group(ids, tuple(members[ids]), max(by_client[i].rows for i in members[ids]))
            for ids in sorted(members, key=lambda ids: (-len(ids), ids))
        )
        plan = cls(groups, tuple(widths[v][1] for v in range(len(widths))), vertical)
        plan.check_rows()
        return plan


def _check_samples(cards: Sequence[Card]) -> None:
    for card in cards:
        if (card.rows, card.samples) != (cards[0].rows, cards[0].samples):
            raise ValueError(
                f"client {card.client}: its samples differ from those of client"
                f" {cards[0].client}, or their order does; all agents must hold the same samples in"
                " the same order"
            )


def hashed_ids(ids: Any) -> str:
    """Returns a hash of sample ids in their order."""
    return hashlib.sha256("\n".join(map(str, np.asarray(ids).tolist())).encode()).hexdigest()


# --- Skeletons ------------------------------------------------------------------------------------


def skeleton(plan: Plan, rows: Mapping[int, int] | None = None) -> Federation:
    """Returns the federation without its data: views of zeros that take no memory.

    Args:
      plan: Who holds what.
      rows: Number of samples of each client, which the server knows; every client's capacity if
        None.
    """
    first, cohorts = 0, []
    of_arrays: Any = Cohort  # of NumPy's, which the host keeps
    for group in plan.groups:
        n, capacity = len(group.clients), group.capacity
        counts = [capacity if rows is None else rows[i] for i in group.clients]
        mask = np.arange(capacity) < np.asarray(counts)[:, None]
        starts = np.zeros(n, int) if plan.vertical else first + np.cumsum([0, *counts[:-1]])
        ids = np.where(mask, starts[:, None] + np.arange(capacity), -1)
        first += sum(counts)
        cohorts.append(
            of_arrays(
                views=tuple(
                    np.broadcast_to(np.zeros((), np.float32), (n, capacity, plan.view_dims[v]))
                    for v in group.view_ids
                ),
                mask=mask,
                sample_ids=ids.astype(np.int32),
                client_ids=np.asarray(group.clients, np.int32),
                view_ids=group.view_ids,
            )
        )
    return Federation(tuple(cohorts), None, plan.view_dims, None)


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


class Wire:
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


def wire_of(job: Job, plan: Plan) -> Wire:
    """Returns the shapes of a job; for the same job the same object, with its programs."""
    return _wire_of(json.dumps([job.to_json(), plan.to_json()], sort_keys=True))


@functools.lru_cache(maxsize=4)
def _wire_of(text: str) -> Wire:
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
    return Wire(algorithm, plan)


def participants(job: Job, plan: Plan) -> list[list[int]]:
    """Lists the clients of each cohort that take part in the exchanges, ascending."""
    key = jax.random.key(job.seed)
    drawn = draw_participants(skeleton(plan), key, job.participation)
    places = [np.asarray(of_cohort).tolist() for of_cohort in drawn]
    return [[g.clients[k] for k in mine] for g, mine in zip(plan.groups, places, strict=True)]


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


def versions() -> dict[str, str]:
    """Returns what must be alike on all sides of a job."""
    return {
        "jaxfedmvc": jaxfedmvc.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def agreement(job: Job, plan: Plan) -> str:
    """Returns a hash of what both sides of a job must have alike."""
    text = job.digest() + json.dumps(plan.to_json(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def key_of(key: jax.Array, place: Place) -> jax.Array:
    """Returns the key of an exchange, as the engine derives it."""
    return keys.of_phase(key, keys.STAGES[place.stage], place.round, place.phase)


# --- Peers ----------------------------------------------------------------------------------------


def relayed_shapes(shapes: Wire, place: Place, known: PyTree) -> tuple[PyTree, ...]:
    """Returns the shapes of all peers' messages of an exchange."""
    travels, _ = shapes.exchange(place, shapes_of(known))
    groups = shapes.plan.groups
    return tuple(stack_of(x.message, len(groups[c].clients)) for c, x in travels.items())


def advanced(
    shapes: Wire, place: Place, known: PyTree, messages: tuple[PyTree, ...], key: jax.Array
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
