"""The server of a job: it waits for nodes, makes one exchange after another, and can go on.

    Server(job, transport, "results/first").run()

It is `engine.streaming.run_streaming` with the clients elsewhere: the same programs, one client a
chunk, sums taken in the order of the cohorts whoever answers first. After each exchange its state
is saved, so that the same job with the same folder goes on where it was; an exchange that was asked
for already is asked for again, and nodes answer as before.

Among peers the server only passes messages on, of which it can read the labels and rankings of
sample ids; every peer computes what follows from them by itself, and all are compared.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import scipy.stats

from jaxfedmvc import files, keys
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.deploy import scores, wire
from jaxfedmvc.deploy.exchanges import (
    Place,
    Shapes,
    advanced,
    asked_of,
    digest_of,
    following,
    job_shapes,
    key_of,
    shapes_of,
)
from jaxfedmvc.deploy.job import Job
from jaxfedmvc.deploy.plan import Card, Plan, agreement, participants, versions
from jaxfedmvc.deploy.wire import Refused
from jaxfedmvc.engine import checkpoint, streaming
from jaxfedmvc.messages import secure
from jaxfedmvc.precision import in_32_bits

PyTree = Any
# Seconds of waiting for nodes before it is said, which come one after another.
_QUIET = 2.0
# Requests that are no exchanges of the method, as rows of exchanges.csv name them.
_BESIDE = ("join", "keys", "assign", "inform")


class Transport(Protocol):
    """Whatever brings bytes to nodes and back."""

    def nodes(self) -> Collection[int]:
        """Returns the identities of the nodes that can be reached now."""

    def ask(self, requests: Mapping[int, bytes], seconds: float) -> dict[int, bytes]:
        """Sends a request to each node; returns the replies that came in time."""


class Stopped(Exception):
    """A job that cannot go on now; what was done is saved."""


class Server:
    """One job."""

    def __init__(
        self,
        job: Job,
        transport: Transport,
        folder: str | Path,
        say: Callable[[str], None] = print,
    ) -> None:
        """Prepares a job; nothing is asked yet.

        Args:
          job: What is to run.
          transport: How nodes are reached.
          folder: Of the results; a job that lies there goes on.
          say: Takes lines for whoever watches.
        """
        self.job, self.transport, self.folder, self.say = job, transport, Path(folder), say
        self.key = jax.random.key(job.seed)
        self.node_of: dict[int, int] = {}
        self.cards: dict[int, Card] = {}
        self.late: dict[int, Card] = {}  # of clients that came once the job had begun
        self.told: dict[int, str] = {}  # what nodes said that are not part of the job
        self.silent: set[int] = set()  # nodes that were asked who they are, and did not say
        self.exchange = 0
        self.rows: list[dict[str, Any]] = []  # of exchanges.csv: exchanges, and what is beside
        self.place: Place | None = None
        self.relayed = b""
        self.server: PyTree = None

    # --- The job ----------------------------------------------------------------------------------

    @in_32_bits
    def run(self) -> dict[str, Any]:
        """Runs the job, or what is left of it; a finished one serves clients that came later.

        Returns:
          The summary, as in summary.json.

        Raises:
          Stopped: A client does not answer, or what it answers cannot be used.
          ValueError: The nodes do not make a federation, or the folder is another job's,
            or in use by one that runs.
        """
        with files.locked(self.folder):  # a job whose `submit` was ended goes on, and has it
            return self._run()

    def _run(self) -> dict[str, Any]:
        self._check_folder()
        saved = (self.folder / "server.npz").exists()
        if saved:
            self._reopen()
        self._register()
        if not saved:
            self._begin()
        if (self.folder / "summary.json").exists():
            return self._serve_late()
        if self.exchange == 0:
            self._join(self.plan, self.plan.clients)
        if self.job.fraction_bits is not None:
            self._agree_on_keys()
        self.say(f"job {self.job.name}: {self.job.method}, {len(self.plan.clients)} clients")
        while place := following(self.shapes.algorithm, self.place, self.job.n_rounds, self.server):
            self._make(place)
        return self._finish()

    def _check_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.job.check_folder(self.folder)
        if not (self.folder / "server.npz").exists():  # nothing of a job is known to nodes yet
            text = json.dumps(self.job.to_json(), indent=1) + "\n"
            files.write_text(self.folder / "job.json", text)

    def _make_plan(self) -> None:
        """Makes the plan of the nodes that registered, and what follows from it."""
        vertical = METHODS[self.job.method].topology == "vertical"
        self.plan = Plan.of_cards(list(self.cards.values()), vertical)
        self.shapes = job_shapes(self.job, self.plan)
        self.agreement = agreement(self.job, self.plan)
        self.participants = participants(self.job, self.plan)

    def _begin(self) -> None:
        """Makes the plan and the initial states."""
        self._make_plan()
        if self.job.robust is not None or self.job.fraction_bits is not None:
            self.shapes.last()  # what these do not fit is found before anybody is asked
        rows = {i: self.cards[i].rows for i in self.plan.clients}
        self.job.check_sums_fit(len(rows), self.plan.view_dims, max(rows.values()))
        self.server = self.shapes.initial_states(self.key, rows).server
        self._save()

    # --- Nodes ------------------------------------------------------------------------------------

    def _register(self) -> None:
        """Waits until all clients of the job have a node."""
        wanted = set(self.cards)
        began, is_said = time.monotonic(), False
        while True:
            self._greet()
            missing = wanted - set(self.node_of) if wanted else None
            if missing is not None and (not missing or (self.folder / "summary.json").exists()):
                return
            if missing is None and len(self.cards) >= self.job.clients:
                return
            if time.monotonic() - began > self.job.patience:
                heard = "; ".join(self.told.values())
                raise Stopped(
                    f"clients: {len(self.cards) - len(missing or ())} of"
                    f" {len(wanted) or self.job.clients} have come"
                    + (f" ({heard})" if heard else "")
                )
            if not is_said and time.monotonic() - began > _QUIET:
                here = f"{len(self.node_of)} of {self.job.clients} clients have come"
                who = f"clients {sorted(missing)}" if missing else f"more: {here}"
                self.say(f"waits for {who}; stops after {self.job.patience:g} s")
                is_said = True
            time.sleep(0.2)

    def _greet(self) -> None:
        """Asks nodes that are new who they are, and forgets those that are gone."""
        there = set(self.transport.nodes())
        gone = {i for i, node in self.node_of.items() if node not in there}
        self.node_of = {i: node for i, node in self.node_of.items() if i not in gone}
        if self.server is None:  # no plan has them: they may come with another number or other data
            self.cards = {i: card for i, card in self.cards.items() if i not in gone}
        # Whoever was refused because a client had a node already may be asked once it has none.
        self.told = {node: text for node, text in self.told.items() if node in there and not gone}
        new = there - set(self.node_of.values()) - set(self.told)
        if self.server is not None and self.cards.keys() <= self.node_of.keys():
            new -= self.silent  # nobody is missing: they would hold up every exchange
        if not new:
            return
        request = self._hello()
        replies = self.transport.ask(dict.fromkeys(new, request), self.job.deadline)
        self.silent = (self.silent | new) - set(replies)
        for node, reply in sorted(replies.items()):
            try:
                self._meet(node, self._card(reply))
            except Refused as refusal:
                self.told[node] = str(refusal)
                self.say(f"node {node} takes no part: {refusal}")

    def _hello(self) -> bytes:
        return wire.pack({"kind": "hello", "settings": self.job.to_json(), "versions": versions()})

    def _card(self, reply: bytes) -> Card:
        meta, _ = _opened(reply, 0)
        try:
            card = Card.from_json(meta["card"])
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise Refused("malformed", "card: unreadable") from error
        is_right = 0 <= card.client < keys.CLIENT_IDS and 0 < card.rows < 2**31
        has_views = card.views and all(0 <= v and 0 < w < 2**31 for v, w in card.views.items())
        # Columns of a view that it does not hold would be compared with those of others who do.
        if not (is_right and has_views and card.columns.keys() <= card.views.keys()):
            raise Refused("malformed", "card: numbers that cannot be")
        return card

    def _meet(self, node: int, card: Card) -> None:
        """Takes a node for the client that it says it is.

        Raises:
          Refused: The client has a node already, or came back with other data.
          ValueError: Two nodes that came before the job began are the same client.
        """
        if card.client in self.node_of:
            if self.exchange == 0 and self.server is None:
                raise ValueError(
                    f"client {card.client}: two nodes say that they are this client,"
                    f" {self.node_of[card.client]} and {node}"
                )
            raise Refused("identity", f"client {card.client}: has a node already")
        known = self.cards.get(card.client)
        if known is not None and known != card:
            raise Refused("identity", f"client {card.client}: came back with other data")
        if known is None:
            if self.server is None:
                self.cards[card.client] = card
                self.say(f"client {card.client}: {card.rows} rows, views {sorted(card.views)}")
            else:
                self.late[card.client] = card
        self.node_of[card.client] = node

    def _ask(
        self,
        requests: Mapping[int, bytes],
        read: Callable[[int, bytes], Any],
        skippable: bool = False,
    ) -> dict[int, Any]:
        """Asks clients, and reads what they answer.

        Args:
          requests: By client.
          read: `(client, reply) -> what it says`; raises Refused on what cannot be used.
          skippable: Whether the job's `late` may do without a client.

        Raises:
          Stopped: A client did not answer before the job's patience was over, or its answer cannot
            be used.
        """
        began, answers, left, is_said = time.monotonic(), {}, dict(requests), False
        skips = skippable and self.job.late == "skip"
        while True:
            self._greet()
            here = {self.node_of[i]: i for i in left if i in self.node_of}
            replies = self.transport.ask(
                {node: left[i] for node, i in here.items()}, self.job.deadline
            )
            for node, reply in replies.items():
                i = here[node]
                try:
                    answers[i] = read(i, reply)
                except Refused as refusal:
                    if not skips:
                        raise Stopped(f"client {i}: {refusal}") from refusal
                    self.say(f"client {i}: left out of exchange {self.exchange + 1}: {refusal}")
                    answers[i] = None
                del left[i]
            if not left or skips:
                break
            if not is_said:
                self.say(f"waits for clients {sorted(left)}, who do not answer yet")
                is_said = True
            if time.monotonic() - began > self.job.patience:
                raise Stopped(
                    f"clients {sorted(left)}: no answer within {self.job.patience:g} s; the job is"
                    " saved and goes on when it is started again"
                )
            if not replies:  # nobody is there, or says something: that may have taken no time
                time.sleep(0.2)
        for i in left:
            self.say(f"client {i}: left out of exchange {self.exchange + 1}: no answer")
        return {i: answer for i, answer in answers.items() if answer is not None}

    def _ask_beside(
        self, stage: str, requests: Mapping[int, bytes], read: Callable[[int, bytes], Any]
    ) -> dict[int, Any]:
        """Asks clients what is no exchange of the method, and counts it in a row of its own.

        Args:
          stage: What is asked, one of `_BESIDE`.
          requests: By client.
          read: As `_ask`.

        Raises:
          Stopped: As `_ask`.
        """
        began, up = time.monotonic(), 0

        def counted(i: int, reply: bytes) -> Any:
            nonlocal up
            up += len(reply)
            return read(i, reply)

        answers = self._ask(requests, counted)
        down = sum(len(request) for request in requests.values())
        seconds = time.monotonic() - began
        self._note(Place(stage, 0, 0), len(requests), len(answers), up, down, seconds)
        return answers

    # --- Exchanges --------------------------------------------------------------------------------

    def _join(self, plan: Plan, clients: Collection[int]) -> None:
        """Sends clients the plan, from which each makes its initial state."""
        meta = {"kind": "join", "settings": self.job.to_json(), "plan": plan.to_json()}
        requests = dict.fromkeys(clients, wire.pack(meta))
        self._ask_beside("join", requests, lambda i, reply: _opened(reply, 0))

    def _agree_on_keys(self) -> None:
        """Passes the clients' signed keys on, so that pairs of them have secrets; learns none."""
        ask = wire.pack(self._meta("keys", 0))

        def read(i: int, reply: bytes) -> Any:
            return _opened(reply, 0)[0]

        told = self._ask_beside("keys", dict.fromkeys(self.plan.clients, ask), read)
        offers = {str(i): answer.get("offer") for i, answer in told.items()}
        passed = wire.pack(self._meta("keys", 0) | {"offers": offers})
        self._ask_beside("keys", dict.fromkeys(self.plan.clients, passed), read)

    def _make(self, place: Place) -> None:
        """Makes one exchange, from what is sent to what is saved."""
        began = time.monotonic()
        phase, travels, asked = self.shapes.phase(place), self._travels(place), self._asked(place)
        peers = self.shapes.algorithm.peers
        meta = self._meta("exchange", self.exchange + 1) | {"place": place}
        requests: dict[int, bytes] = {}
        down = 0
        for c, clients in asked.items():
            body = self.relayed
            if not peers:
                view_ids = self.plan.groups[c].view_ids
                body = wire.encode(streaming.broadcast_program(phase, self.server, view_ids))
            # One request for all of a kind, which may be large.
            requests |= dict.fromkeys(clients, wire.pack(meta, body))
            down += len(clients) * len(body)
        before = digest_of(self.server) if peers else ""

        def read(i: int, reply: bytes) -> PyTree:
            like = travels[self.plan.find(i)[0]].message
            meta, body = _opened(reply, wire.size(like))
            if meta.get("exchange") != self.exchange + 1 or meta.get("client") != i:
                raise Refused("replayed", f"{_words(place)}: answers another exchange")
            if peers and meta.get("known") != before:
                raise Refused("peers", f"{_words(place)}: what it computed differs from the others")
            return wire.decode(body, like, f"message of {_words(place)}", finite=True)

        answers = self._ask(requests, read, skippable=True)
        messages, weights = self._reduced(place, asked, travels, answers)
        if peers:
            self.relayed = wire.encode(messages)
            self.server = advanced(self.shapes, place, self.server, messages, self.key)
        else:
            self.server, info = streaming.server_program(
                phase, key_of(self.key, place), self.server, messages, weights
            )
            try:
                secure.check_sums(info)
            except ValueError as error:
                raise Stopped(f"{_words(place)}: {error}") from error
        self.exchange, self.place = self.exchange + 1, place
        up = sum(wire.size(travels[self.plan.find(i)[0]].message) for i in answers)
        if peers:  # every message goes to all others
            up *= len(answers) - 1
            down = up
        self._note(place, len(requests), len(answers), up, down, time.monotonic() - began)
        self._save()

    def _meta(self, kind: str, number: int) -> dict[str, Any]:
        return {
            "kind": kind,
            "job": self.job.name,
            "agreement": self.agreement,
            "exchange": number,
        }

    def _travels(self, place: Place) -> dict[int, Any]:
        if self.shapes.algorithm.peers:
            return self.shapes.exchange(place, shapes_of(self.server))[0]
        return self.shapes.at(place)[0]

    def _asked(self, place: Place) -> dict[int, list[int]]:
        """Returns by cohort the clients that take part in an exchange, in the cohort's order."""
        phase = self.shapes.phase(place)
        cohorts = self.shapes.taking_part(phase)
        return {c: asked_of(phase, self.participants[c]) for c in cohorts}

    def _reduced(
        self, place: Place, asked: dict[int, list[int]], travels: Any, answers: dict[int, Any]
    ) -> tuple[tuple, tuple]:
        """Returns the messages and weights of the cohorts as the method's server takes them.

        A client that did not answer has weight zero, or is in no sum.
        """
        messages: list[PyTree] = []
        weights: list[Any] = []
        for c, clients in asked.items():
            here = [i for i in clients if i in answers]
            if not here:
                raise Stopped(f"{_words(place)}: no client of views {self.plan.groups[c].view_ids}")
            if self.shapes.phase(place).reduce == "sum":
                total = (answers[here[0]], np.float32(1))
                for i in here[1:]:
                    total = streaming.add(total, (answers[i], np.float32(1)))
                messages.append(total[0])
                weights.append(total[1])
            else:
                zeros = wire.decode(
                    bytes(wire.size(travels[c].message)), travels[c].message, "zeros"
                )
                parts = [answers.get(i, zeros) for i in clients]
                messages.append(jax.tree.map(lambda *xs: np.concatenate(xs), *parts))
                weights.append(np.asarray([i in answers for i in clients], np.float32))
        return tuple(messages), tuple(weights)

    # --- The end ----------------------------------------------------------------------------------

    def _finish(self) -> dict[str, Any]:
        """Has all clients find their clusters; writes the summary."""
        told = self._assign(self.plan, self.shapes, self.plan.clients)
        counts, information = self._counts(told), self._inform(told)
        summary = self._summary() | {
            "scores": scores.scores(counts, self.plan.vertical),
            "information": information,
        }
        if counts and summary["scores"] is None:
            self.say(f"no scores: the classes and clusters of {len(counts)} clients are too many")
        # The summary says that the job is finished: what was asked in its end is saved before.
        self._save()
        text = json.dumps(summary, indent=1) + "\n"
        files.write_text(self.folder / "summary.json", text)
        if information is not None:
            self.say(f"information: {information['information']:.3f} nats (no labels)")
        self.say(
            f"finished: {summary['rounds']} rounds, {summary['bytes_up'] / 1e6:.3f} MB up,"
            f" {summary['bytes_down'] / 1e6:.3f} MB down; each node has its clusters in its folder"
        )
        return json.loads(text)

    def _summary(self) -> dict[str, Any]:
        """Returns what summary.json says of the job and of its exchanges."""

        def total(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
            rows = list(rows)
            return {way: sum(row[f"bytes_{way}"] for row in rows) for way in ("up", "down")}

        rows = [row for row in self.rows if row["stage"] in keys.STAGES]
        of_rows = total(rows)
        return {
            "job": self.job.to_json(),
            "versions": versions(),
            "clients": {str(i): dataclasses.asdict(self.cards[i]) for i in self.plan.clients},
            "rounds": 1 + max((r["round"] for r in rows if r["stage"] == "round"), default=-1),
            "exchanges": self.exchange,
            "bytes_up": of_rows["up"],
            "bytes_down": of_rows["down"],
            "bytes_beside": {  # whole requests and answers that are no exchange
                stage: total(row for row in self.rows if row["stage"] == stage) for stage in _BESIDE
            },
            "seconds": round(sum(row["seconds"] for row in rows), 3),
        }

    def _assign(
        self, plan: Plan, shapes: Shapes, clients: Collection[int]
    ) -> dict[int, dict[str, Any]]:
        """Sends clients what finding clusters reads; returns what each says of its own."""
        leaves, meta = jax.tree.leaves(self.server), self._meta("assign", self.exchange)
        requests: dict[int, bytes] = {}
        for c in sorted({plan.find(i)[0] for i in clients}):
            body = self.relayed
            if not shapes.algorithm.peers:
                needed = shapes.needed(c, shapes.last())
                body = wire.encode([x for x, used in zip(leaves, needed, strict=True) if used])
            mine = (i for i in plan.groups[c].clients if i in clients)
            requests |= dict.fromkeys(mine, wire.pack(meta, body))
        return self._ask_beside("assign", requests, lambda i, reply: _opened(reply, 0)[0])

    def _counts(self, told: Mapping[int, Mapping[str, Any]]) -> list[scores.Counts]:
        """Returns the counts of the clients that share some; those that cannot be are left out.

        All have their clusters by now, so that nothing in here is a reason to stop the job.

        Args:
          told: What clients said when they found their clusters.
        """
        found = []
        for i, reply in told.items():
            if "counts" in reply:
                try:
                    found.append(scores.checked_counts(reply["counts"], self.cards[i].rows))
                except Refused as refusal:
                    self.say(f"no scores of client {i}: {refusal}")
        return found

    def _inform(self, told: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
        """Returns how much a view tells of the clusters of the clients that share it.

        Args:
          told: What clients said when they found their clusters.

        Returns:
          Their number and `metrics.information` of their rows; None without any, or where what one
          of them tells cannot be used.
        """
        # As with counts, whatever is wrong here is no reason to stop the job.
        sizes: dict[int, np.ndarray] = {}
        for i, reply in told.items():
            if "sizes" in reply:
                try:
                    sizes[i] = scores.checked_sizes(reply["sizes"], self.cards[i].rows)
                except Refused as refusal:
                    self.say(f"no information: client {i}: {refusal}")
                    return None
        if not sizes:
            return None
        asked = self.job.settings.get("n_clusters")  # clusters that nobody found count, too
        k = max(asked if isinstance(asked, int) else 0, *map(len, sizes.values()))
        if k > scores.MOST_CLUSTERS:
            self.say(f"no information: {k} clusters are too many")
            return None
        total = np.sum(
            [np.pad(of_client, (0, k - len(of_client))) for of_client in sizes.values()], axis=0
        )
        if not total.any():
            return None
        request = wire.pack(self._meta("inform", self.exchange) | {"sizes": total.tolist()})

        def read(i: int, reply: bytes) -> float:
            try:
                return scores.checked_sum(_opened(reply, 0)[0].get("sum_log_q"))
            except Refused as refusal:
                self.say(f"no information: client {i}: {refusal}")
                return math.nan

        sums = self._ask_beside("inform", dict.fromkeys(sizes, request), read)
        if math.isnan(sum(sums.values())):
            return None
        rows = sum(sizes[i].sum() * len(self.cards[i].views) for i in sizes)
        return {
            "clients": len(sizes),
            "information": float(scipy.stats.entropy(total)) + sum(sums.values()) / float(rows),
        }

    def _serve_late(self) -> dict[str, Any]:
        """Has clients that came after the job was finished find their clusters, too."""
        summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        if not self.late:
            self.say(f"job {self.job.name}: finished already, and nobody new has come")
            return summary
        if self.plan.vertical:
            raise ValueError(f"clients {sorted(self.late)}: came late to a vertical federation")
        for i, card in sorted(self.late.items()):
            known = [self.cards[j] for j in self.plan.clients]
            try:
                plan = Plan.of_cards([*known, card], False)
                shapes = job_shapes(self.job, plan)
                self._check_late(plan, shapes, i)
                self.cards[i], self.agreement = card, agreement(self.job, plan)
                self._join(plan, [i])
                self._assign(plan, shapes, [i])
            except (ValueError, Stopped) as error:  # the others are served all the same
                self.say(f"client {i}: came later, and cannot be served: {error}")
                continue
            self._save()
            self.say(f"client {i}: came later, and has its clusters in its folder")
        return summary

    def _check_late(self, plan: Plan, shapes: Shapes, i: int) -> None:
        """Checks that a client that came later can read what the server has for it.

        Raises:
          ValueError: The method's state has other shapes with this client.
        """
        if shapes.algorithm.peers:
            return
        expected = shapes.last()
        leaves = zip(
            jax.tree.leaves(self.server),
            jax.tree.leaves(expected),
            shapes.needed(plan.find(i)[0], expected),
            strict=True,
        )
        if any(used and np.shape(ours) != theirs.shape for ours, theirs, used in leaves):
            raise ValueError("this method cannot take clients later")

    # --- Files ------------------------------------------------------------------------------------

    def _save(self) -> None:
        tree = {"server": self.server, "relayed": np.frombuffer(self.relayed, np.uint8)}
        cards = [dataclasses.asdict(self.cards[i]) for i in self.plan.clients]
        meta = {"exchange": self.exchange, "place": self.place, "cards": cards, "rows": self.rows}
        checkpoint.save(self.folder / "server.npz", tree, meta)
        if self.rows:  # from the checkpoint's rows, so that none is lost or there twice
            with files.replacing(self.folder / "exchanges.csv") as opened:
                writer = csv.DictWriter(opened, list(self.rows[0]))
                writer.writeheader()
                writer.writerows(self.rows)

    def _reopen(self) -> None:
        """Goes on from the folder."""
        file = self.folder / "server.npz"
        meta = checkpoint.read_meta(file)
        for told in meta["cards"]:
            if "columns" not in told:
                raise ValueError(
                    f"folder: {self.folder} holds a job of an earlier version; allowed is another"
                    " name of the job, or another folder"
                )
            self.cards[told["client"]] = Card.from_json(told)
        self._make_plan()
        self.exchange, self.rows = meta["exchange"], meta["rows"]
        self.place = None if meta["place"] is None else Place(*meta["place"])
        shapes = self._shapes_after(self.place)
        like = {"server": shapes, "relayed": jax.ShapeDtypeStruct((0,), np.uint8)}
        tree, _ = checkpoint.restore(file, like, any_shape=True)
        self.server, self.relayed = tree["server"], tree["relayed"].tobytes()
        self.say(f"job {self.job.name}: goes on after exchange {self.exchange}")

    def _shapes_after(self, place: Place | None) -> PyTree:
        if place is None:
            return self.shapes.start
        _, before = self.shapes.at(place)
        return self.shapes.exchange(place, before)[1]

    def _note(
        self, place: Place, asked: int, answered: int, up: int, down: int, seconds: float
    ) -> None:
        row = {
            "exchange": self.exchange,
            "stage": place.stage,
            "round": place.round,
            "phase": place.phase,
            "asked": asked,
            "answered": answered,
            "bytes_up": up,
            "bytes_down": down,
            "seconds": round(seconds, 3),
        }
        self.rows.append(row)
        self.say(
            f"exchange {self.exchange:4d}  {_words(place):18s} {answered}/{asked} clients"
            f"  {up / 1e3:9.1f} kB up {down / 1e3:9.1f} kB down  {seconds:6.2f} s"
        )


def _opened(reply: bytes, most: int) -> tuple[dict[str, Any], bytes]:
    """Returns what a node answered.

    Raises:
      Refused: The node refused, or its reply is malformed.
    """
    meta, body = wire.unpack(reply, most)
    if "error" in meta:
        text = str(meta.get("text", ""))[:500]
        raise Refused(str(meta["error"])[:50], text if text.isprintable() else "unreadable text")
    return meta, body


def _words(place: Place) -> str:
    if place.stage not in keys.STAGES:
        return place.stage
    within = f" {place.round + 1}" if place.stage == "round" else ""
    return f"{place.stage}{within}, phase {place.phase}"
