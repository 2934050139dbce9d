"""Who takes part with what: all that the server and a node know of the other clients."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np

import jaxfedmvc
from jaxfedmvc import keys
from jaxfedmvc.deploy.job import Job
from jaxfedmvc.engine.run import draw_participants
from jaxfedmvc.federation import Cohort, Federation

# Rows of a plan, each client's padded to its cohort's capacity: the ids of so many take some 1.3 GB
# on every node and on the server, before a method has computed anything.
_MOST_ROWS = 10**8


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


def participants(job: Job, plan: Plan) -> list[list[int]]:
    """Lists the clients of each cohort that take part in the exchanges, ascending."""
    key = jax.random.key(job.seed)
    drawn = draw_participants(skeleton(plan), key, job.participation)
    places = [np.asarray(of_cohort).tolist() for of_cohort in drawn]
    return [[g.clients[k] for k in mine] for g, mine in zip(plan.groups, places, strict=True)]


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
