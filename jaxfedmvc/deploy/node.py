"""One client on its own machine: it answers requests from its own file, and keeps its own state.

    node = Node("node.toml")
    reply = node.handle(request)        # bytes in, bytes out

A request is `hello`, `join`, `keys`, `exchange`, `assign` or `inform`; see `server`. Exchanges of a
job are numbered. The state after the last one and its answer lie in one file, so that a request
that is repeated has the same answer, whether or not the node was killed in between; a request with
an earlier number, or another one under the same number, is refused, and so is a place in the run
that was answered or left behind, or that the job does not have. Clusters are found once, too, by
one model, after which no exchange is answered, and what views tell of them is told once. What an
operator did not agree to is refused with a reason, also where the file has changed since the node
joined. An error in here is told to nobody but the node's own log.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import hashlib
import json
import logging
import secrets
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import files
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.deploy import scores, wire
from jaxfedmvc.deploy.exchanges import (
    Place,
    advanced,
    asked_of,
    digest_of,
    following,
    job_shapes,
    key_of,
    may_follow,
    relayed_shapes,
)
from jaxfedmvc.deploy.holding import load
from jaxfedmvc.deploy.job import Job, is_name
from jaxfedmvc.deploy.masks import Party
from jaxfedmvc.deploy.plan import Card, Plan, agreement, hashed_ids, participants, versions
from jaxfedmvc.deploy.wire import Refused
from jaxfedmvc.engine import checkpoint, streaming
from jaxfedmvc.federation import Cohort
from jaxfedmvc.messages import secure
from jaxfedmvc.metrics.information import sum_log_q
from jaxfedmvc.precision import in_32_bits

PyTree = Any

_LOG = logging.getLogger(__name__)
# Jobs at hand in memory; others are read from their folders when they are asked for.
_MOST_JOBS = 8
_sum_log_q = jax.jit(sum_log_q)


class _Joined:
    """A job that this node takes part in: what was agreed, and the states after an exchange.

    Attributes:
      job: What runs.
      plan: Who takes part.
      agreement: Hash of both.
      participants: The clients of this one's kind that are asked in exchanges.
      exchange: Number of the last exchange that was answered; 0 before the first.
      place: Where in the run that was, among peers.
      state: This client's state, with an axis of one.
      known: The server's state, which every peer keeps; None where there is a server.
      asked: Hash of what all clients of this kind were asked so far, one after another.
      party: In secure sums, once keys are agreed on.
    """

    def __init__(self, job: Job, plan: Plan, client: int) -> None:
        self.job, self.plan, self.agreement = job, plan, agreement(job, plan)
        self.shapes = job_shapes(job, plan)
        self.algorithm = self.shapes.algorithm
        self.cohort, _ = plan.find(client)
        self.participants = participants(job, plan)[self.cohort]
        self.exchange = 0
        self.place: Place | None = None
        self.state: PyTree = None
        self.known: PyTree = None
        self.asked = ""
        self.party: Party | None = None


class Node:
    """A client of a federation."""

    def __init__(self, path: str | Path) -> None:
        """Reads the node's file and its data.

        Args:
          path: The TOML file that its operator wrote; see `holding`.

        Raises:
          ValueError, OSError: Says what is wrong with it.
        """
        self.holding = load(path)
        self._jobs: dict[str, _Joined] = {}
        # States are made of rows, and clusters stand beside ids: not for others of this machine.
        self.holding.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # For as long as it lives: two of a folder would answer an exchange twice, with one mask.
        self._lock = files.locked(self.holding.folder)

    @in_32_bits
    def handle(self, request: bytes) -> bytes:
        """Answers a request; whatever is wrong becomes a reply that says so.

        Args:
          request: An envelope.

        Returns:
          An envelope; one with "error" and "text" is a refusal.
        """
        try:
            meta, body = wire.unpack(request, self.holding.policy.most_bytes)
            answers = {
                "hello": self._hello,
                "join": self._join,
                "keys": self._keys,
                "exchange": self._exchange,
                "assign": self._assign,
                "inform": self._inform,
            }
            answer = answers.get(str(meta.get("kind")))
            if answer is None:
                raise Refused("malformed", "request: of no known kind")
            return answer(meta, body)
        except Refused as refusal:
            # It may quote what was asked: one line of the log, and no more than a reply holds.
            text = str(refusal)[:500]
            text = text if text.isprintable() else ascii(text)
            _LOG.warning("client %d refuses: %s", self.holding.client, text)
            return wire.pack({"error": refusal.code, "text": text})
        except Exception:
            _LOG.exception("client %d: a request failed", self.holding.client)
            return wire.pack({"error": "internal", "text": "an error; see the node's log"})

    # --- Requests ---------------------------------------------------------------------------------

    def _hello(self, meta: dict[str, Any], body: bytes) -> bytes:
        """Answers with the node's card, if it may take part in this job."""
        job, holding = _job_of(meta), self.holding
        ours = versions()
        if meta.get("versions") != ours:
            raise Refused(
                "version", f"versions: {meta.get('versions')}; this node has {json.dumps(ours)}"
            )
        holding.policy.check(job, job.clients, holding.n_rows)
        self._check_room(job.name)
        return wire.pack({"card": self._card(job)})

    def _card(self, job: Job) -> dict[str, Any]:
        holding, samples = self.holding, ""
        if METHODS[job.method].topology == "vertical":
            ids = np.arange(holding.n_rows) if holding.ids is None else holding.ids
            samples = hashed_ids(ids)
            self._check_agent()
        card = Card(
            holding.client,
            {v: x.shape[1] for v, x in holding.views.items()},
            holding.n_rows,
            samples,
            holding.hashed_columns(),
        )
        return dataclasses.asdict(card)

    def _as_joined(self, job: Job) -> dict[str, Any]:
        """Returns what must be alike whenever this node goes on with a job, as JSON has it."""
        return json.loads(json.dumps({"card": self._card(job), "versions": versions()}))

    def _check_as_joined(self, job: Job, told: dict[str, Any]) -> None:
        """Refuses a job that was joined with other data, or in other versions.

        The server does not ask a node that starts again, with its key, who it is.
        """
        ours = self._as_joined(job)
        if told.get("versions") != ours["versions"]:
            then, now = json.dumps(told.get("versions")), json.dumps(ours["versions"])
            raise Refused("version", f"job {job.name}: joined with {then}; this node has {now}")
        if told.get("card") != ours["card"]:
            raise Refused("identity", f"job {job.name}: joined with other data")

    def _check_room(self, name: str) -> None:
        """Refuses a job that is new here, where as many lie as the operator wants at most."""
        there = {file.parent.name for file in self.holding.folder.glob("*/job.json")}
        most = self.holding.policy.most_jobs
        if name not in there and len(there) >= most:
            raise Refused("policy", f"jobs: {most} lie in this node's folder, its agrees.most_jobs")

    def _check_agent(self) -> None:
        """What the server of a vertical federation cannot check."""
        rows = np.concatenate(list(self.holding.views.values()), axis=1)
        if len(rows) > 1 and not np.ptp(rows, axis=0).any():
            raise Refused("data", "features: all of them are constant and tell no samples apart")

    def _join(self, meta: dict[str, Any], body: bytes) -> bytes:
        """Takes the plan of a job, and makes this client's initial state from it and the seed.

        A state that the server sent could be another one for each client.
        """
        if body:
            raise Refused("wrong_size", f"join: got {len(body)} bytes beside the plan; allowed: 0")
        job, holding = _job_of(meta), self.holding
        plan = self._plan_of(meta, job)
        if (joined := self._known(job.name)) is not None:
            if joined.agreement != agreement(job, plan):
                raise Refused("settings", f"job {job.name}: known here with other settings")
            return wire.pack({"exchange": joined.exchange})
        self._check_room(job.name)
        joined = _Joined(job, plan, holding.client)
        joined.state, joined.known = _initial(joined, holding.client)
        folder = self._folder(job.name)
        folder.mkdir(parents=True, exist_ok=True)
        self._save(joined, "", b"")
        told = {"job": job.to_json(), "plan": plan.to_json()} | self._as_joined(job)
        files.write_text(folder / "job.json", json.dumps(told))
        self._hold(joined)
        _LOG.info(
            "client %d: joined job %s: %s, %d rounds at most, with clients %s",
            *(holding.client, job.name, job.method, job.n_rounds, sorted(plan.clients)),
        )
        return wire.pack({"exchange": 0})

    def _plan_of(self, meta: dict[str, Any], job: Job) -> Plan:
        """Reads the plan of a job.

        Raises:
          Refused: It is none, has other views or fewer rows of this client than it holds, asks for
            more memory than its operator agreed to, or for what the settings do not allow.
        """
        holding, most = self.holding, self.holding.policy.most_bytes
        try:
            plan = Plan.from_json(meta["plan"])
            c, _ = plan.find(holding.client)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Refused("malformed", "plan: unreadable, or without this client") from error
        try:
            plan.check_rows()
        except ValueError as error:
            raise Refused("plan", str(error)) from error
        if plan.vertical != (METHODS[job.method].topology == "vertical"):
            raise Refused(
                "plan",
                f"plan: vertical: got {plan.vertical} for {job.method}; allowed is"
                f" {not plan.vertical}",
            )
        holding.policy.check(job, len(plan.clients), holding.n_rows)
        n = len(plan.clients)
        try:
            dataclasses.replace(job, clients=n)  # noise is shared by those there are
            job.check_sums_fit(n, plan.view_dims, max(g.capacity for g in plan.groups))
        except ValueError as error:
            raise Refused("plan", f"plan: {n} clients; {error}") from error
        group = plan.groups[c]
        widths = tuple(plan.view_dims[v] for v in group.view_ids)
        own = tuple(holding.views[v].shape[1] for v in sorted(holding.views))
        if group.view_ids != tuple(sorted(holding.views)) or widths != own:
            raise Refused("plan", "plan: has other views of this client than it holds")
        if group.capacity < holding.n_rows:
            raise Refused("plan", "plan: has fewer rows of this client than it holds")
        padding = 4 * (group.capacity - holding.n_rows) * sum(own)
        if padding > most:
            raise Refused(
                "plan",
                f"plan: groups[{c}].capacity: got {group.capacity} rows, to which this node would"
                f" pad its own by {padding} bytes; allowed are {most}, its agrees.most_bytes",
            )
        # This node makes those of all clients, and others' views may be as wide as the plan says.
        states = job_shapes(job, plan).initial_size()
        if states > most:
            raise Refused(
                "plan",
                f"plan: initial states of {n} clients with views of {list(plan.view_dims)} features"
                f" are {states} bytes; allowed are {most}, this node's agrees.most_bytes",
            )
        return plan

    def _keys(self, meta: dict[str, Any], body: bytes) -> bytes:
        """Offers this node's key of a job's secure sums, or takes those of its cohort."""
        joined, _, _ = self._of_request(meta)
        holding, group = self.holding, joined.plan.groups[joined.cohort]
        least = max(2, holding.policy.least_clients)
        if len(group.clients) < least:
            raise Refused(
                "policy",
                f"clients: {len(group.clients)} of this kind are too few for secure sums; this"
                f" node wants {least} or more with the same views",
            )
        if holding.identity is None:
            raise Refused("keys", "identity: this node has none, which secure sums need")
        if "offers" not in meta:
            return wire.pack({"offer": self._party(joined).offer(holding.identity)})
        try:
            offers = {i: meta["offers"][str(i)] for i in group.clients}
        except (KeyError, TypeError) as error:
            raise Refused("keys", "keys: those of a client of this kind are missing") from error
        party = self._party(joined)
        party.agree(offers, holding.identities)
        files.write_text(self._folder(joined.job.name) / "offers.json", json.dumps(offers))
        joined.party = party
        return wire.pack({"agreed": len(offers)})

    def _party(self, joined: _Joined) -> Party:
        secret = _secret(self._folder(joined.job.name) / "secret")
        return Party(secret, self.holding.client, joined.agreement)

    def _exchange(self, meta: dict[str, Any], body: bytes) -> bytes:
        """Makes this client's part of one exchange."""
        joined, number, place = self._of_request(meta)
        asked = hashlib.sha256(json.dumps(meta, sort_keys=True).encode() + body).hexdigest()
        if number <= joined.exchange:
            return self._again(joined, number, asked)
        if (self._folder(joined.job.name) / "assigned").exists():
            # The model that found clusters once would find others by the state that comes of it.
            raise Refused("place", f"exchange {number}: asked for after clusters were found")
        known, sent = self._told(joined, number, place, body)
        phase, so_far = joined.shapes.phase(place), joined.asked
        if phase.who == "everyone":
            so_far = hashlib.sha256(f"{so_far} {asked}".encode()).hexdigest()
        party = self._masking(joined, place)
        old = jax.tree.map(jnp.array, joined.state)  # given away to the program
        new, message, _, info = streaming.client_program(
            phase,
            *(self._key(joined, place, number, so_far), sent, old, self._client(joined)),
            np.ones(1, bool),
        )
        if party is None:
            reply = wire.encode(message)
        else:
            reply = party.masked(wire.encode(message), number, so_far)
            if np.sum(info.clipped) or not np.all(message.check):
                # A refusal would tell the server about this client alone, as often as it asks. And
                # a sum with what was clipped is to be read by nobody: noise is clipped with it, so
                # that of the others little may be left.
                _LOG.warning(
                    "client %d: fraction_bits of job %s: too many, values overflow, or one is NaN;"
                    " the sum of exchange %d cannot be read",
                    *(self.holding.client, joined.job.name, number),
                )
                reply = secrets.token_bytes(len(reply))
        after = copy.copy(joined)
        after.state = jax.tree.map(_kept, new, joined.state)
        after.known, after.exchange, after.place = known, number, place
        after.asked = so_far
        self._save(after, asked, reply)
        # Only then: what a full disk did not take is asked for again, and was not answered.
        self._hold(after)
        return wire.pack(self._signed(after, number), reply)

    def _assign(self, meta: dict[str, Any], body: bytes) -> bytes:
        """Finds the clusters of this client's rows and writes them to its own folder."""
        joined, _, _ = self._of_request(meta)
        peers, folder = joined.algorithm.peers, self._folder(joined.job.name)
        server = self._learned(joined, body) if peers else self._received(joined, body)
        if not _has_ended(joined, server):
            raise Refused("place", "clusters: asked for before the last exchange")
        model, answered = hashlib.sha256(body).hexdigest(), folder / "assigned"
        _check_alike(answered, model, "clusters: found already, by another model")
        labels = streaming.assign_program(
            joined.algorithm.assign, server, joined.state, self._client(joined)
        )
        found = np.asarray(labels)[0, : self.holding.n_rows]
        files.write_text(answered, model)
        ids = np.arange(len(found)) if self.holding.ids is None else self.holding.ids
        with files.replacing(folder / "labels.csv") as opened:
            writer = csv.writer(opened, lineterminator="\n")
            writer.writerow(("id", "cluster"))
            writer.writerows(zip(ids.tolist(), found.tolist(), strict=True))
        _LOG.info(
            "client %d: clusters of job %s: %s",
            *(self.holding.client, joined.job.name, folder / "labels.csv"),
        )
        return wire.pack(self._shared(found))

    def _inform(self, meta: dict[str, Any], body: bytes) -> bytes:
        """Tells how much this client's views tell of its clusters, given everybody's sizes."""
        joined, _, _ = self._of_request(meta)
        holding, folder = self.holding, self._folder(joined.job.name)
        if not holding.policy.share_information:
            raise Refused("policy", "information: not shared by this node")
        if not (folder / "labels.csv").exists():
            raise Refused("place", "information: asked for before clusters are found")
        with open(folder / "labels.csv", encoding="utf-8", newline="") as opened:
            found = np.asarray([int(row["cluster"]) for row in csv.DictReader(opened)], np.int32)
        if (own := scores.sizes_of(found)) is None:
            raise Refused("oversized", "information: this node has too many clusters")
        sizes = scores.checked_total(meta.get("sizes"), own, holding)
        others = json.dumps(sizes.tolist())
        _check_alike(folder / "informed", others, "information: told already, with other sizes")
        told = _sum_log_q(list(holding.views.values()), found, sizes / sizes.sum())
        files.write_text(folder / "informed", others)
        return wire.pack({"sum_log_q": float(told)})

    # --- Parts of them ----------------------------------------------------------------------------

    def _again(self, joined: _Joined, number: int, asked: str) -> bytes:
        """Returns the answer to a request that was answered before."""
        if number < joined.exchange:
            raise Refused("replayed", f"exchange {number}: {joined.exchange} is answered already")
        file = self._folder(joined.job.name) / "state.npz"
        tree, saved = checkpoint.restore(file, self._like(joined), any_shape=True)
        if saved["asked"] != asked:
            raise Refused("replayed", f"exchange {number}: answered already, to another request")
        return wire.pack(self._signed(joined, number), tree["reply"].tobytes())

    def _signed(self, joined: _Joined, number: int) -> dict[str, Any]:
        told: dict[str, Any] = {"exchange": number, "client": self.holding.client}
        if joined.algorithm.peers:
            told["known"] = digest_of(joined.known)
        return told

    def _told(self, joined: _Joined, number: int, place: Place, body: bytes) -> tuple:
        """Returns what a peer knows before an exchange (None with a server), and what is sent.

        Raises:
          Refused: The exchange is none of the method's, or none that follows; among peers, not the
            one that does.
        """
        shapes, algorithm = joined.shapes, joined.algorithm
        if algorithm.peers:
            known = self._learned(joined, body)
            if place != following(algorithm, joined.place, joined.job.n_rounds, known):
                raise Refused("place", f"exchange {number}: not the one that follows")
            view_ids = joined.plan.groups[joined.cohort].view_ids
            return known, streaming.broadcast_program(shapes.phase(place), known, view_ids)
        try:
            like = shapes.at(place)[0][joined.cohort].sent
        except KeyError as error:
            raise Refused("place", f"exchange {number}: not one of this client's") from error
        # What a leader sends may be readable: no server reads it of every client.
        if self.holding.client not in asked_of(shapes.phase(place), joined.participants):
            raise Refused("place", f"exchange {number}: not one of this client's")
        if not may_follow(joined.place, place, joined.job.n_rounds):
            raise Refused("place", f"exchange {number}: none that follows the last one answered")
        return None, wire.decode(body, like, "what was sent")

    def _learned(self, joined: _Joined, body: bytes) -> PyTree:
        """Returns what a peer knows once it has all messages of the last exchange."""
        if joined.place is None:
            if body:
                raise Refused("wrong_size", "messages of peers: before the first exchange")
            return joined.known
        like = relayed_shapes(joined.shapes, joined.place, joined.known)
        messages = wire.decode(body, like, "messages of peers", finite=True)
        # All peers draw alike here, from the job's seed.
        key = jax.random.key(joined.job.seed)
        return advanced(joined.shapes, joined.place, joined.known, messages, key)

    def _received(self, joined: _Joined, body: bytes) -> PyTree:
        """Returns the server's state with the leaves that `assign` reads; zeros elsewhere."""
        shapes = joined.shapes.last()
        leaves, tree = jax.tree.flatten(shapes)
        needed = joined.shapes.needed(joined.cohort, shapes)
        wanted = [x for x, used in zip(leaves, needed, strict=True) if used]
        there = iter(wire.decode(body, wanted, "final state"))
        zeros = iter(wire.decode(bytes(wire.size(leaves)), leaves, "zeros"))
        filled = [next(there) if used else zero for used, zero in zip(needed, zeros, strict=True)]
        return jax.tree.unflatten(tree, filled)

    def _masking(self, joined: _Joined, place: Place) -> Party | None:
        """Returns what masks the message of an exchange; None where it is in no secure sum.

        Raises:
          Refused: Keys are not agreed on.
        """
        if joined.algorithm.peers:
            return None
        message = joined.shapes.at(place)[0][joined.cohort].message
        if not isinstance(message, secure.Masked):
            return None
        if joined.party is None:
            raise Refused("keys", "keys: not agreed on")
        return joined.party

    def _client(self, joined: _Joined) -> Cohort:
        """Returns the node's own data, padded, as a cohort of one."""
        group, holding = joined.plan.groups[joined.cohort], self.holding
        rows, missing = holding.n_rows, group.capacity - holding.n_rows
        ids = np.where(np.arange(group.capacity) < rows, np.arange(group.capacity), -1)
        of_arrays: Any = Cohort  # of NumPy's, which the host keeps
        return of_arrays(
            views=tuple(
                np.pad(holding.views[v], ((0, missing), (0, 0)))[None] for v in group.view_ids
            ),
            mask=(ids >= 0)[None],
            sample_ids=ids.astype(np.int32)[None],
            client_ids=np.asarray([holding.client], np.int32),
            view_ids=group.view_ids,
        )

    def _key(self, joined: _Joined, place: Place, number: int, asked: str) -> jax.Array:
        """Returns the key of an exchange, from the job's seed or from the node's own secret.

        From its secret it is another one for whatever else is `asked`.
        """
        if joined.job.keys == "shared":
            return key_of(jax.random.key(joined.job.seed), place)
        # Drawn when the node joined: a job that is begun anew has other noise.
        secret = _secret(self._folder(joined.job.name) / "secret")
        data = hashlib.sha256(secret + f"exchange {number} {asked}".encode()).digest()
        impl = jax.random.key_impl(jax.random.key(0))
        n = jax.random.key_data(jax.random.key(0)).size
        return jax.random.wrap_key_data(
            jnp.asarray(np.frombuffer(data[: 4 * n], np.uint32)), impl=impl
        )

    def _shared(self, found: np.ndarray) -> dict[str, Any]:
        """Returns what the operator shares of the clusters, and a reply holds."""
        policy, labels = self.holding.policy, self.holding.labels
        told: dict[str, Any] = {}
        if policy.share_counts and labels is not None:
            told["counts"] = scores.counts_of(labels, found)
        if policy.share_information:
            told["sizes"] = scores.sizes_of(found)
        for name in (name for name, numbers in told.items() if numbers is None):
            _LOG.warning("client %d: %s: too many to be told", self.holding.client, name)
        return {name: numbers for name, numbers in told.items() if numbers is not None}

    # --- Files ------------------------------------------------------------------------------------

    def _folder(self, name: str) -> Path:
        return self.holding.folder / name

    def _of_request(self, meta: dict[str, Any]) -> tuple[_Joined, int, Place]:
        """Returns the job, the number and the place of a request.

        Raises:
          Refused: The job is not known here, or has other settings.
        """
        try:
            name, number = str(meta["job"]), int(meta["exchange"])
            stage, r, p = meta.get("place", ("finish", 0, 0))
            place = Place(str(stage), int(r), int(p))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Refused("malformed", "request: without a job, a number or a place") from error
        joined = self._known(name) if is_name(name) else None
        if joined is None:
            raise Refused("unknown_job", f"job {name}: not joined")
        if meta.get("agreement") != joined.agreement:
            raise Refused("settings", f"job {name}: known here with other settings")
        return joined, number, place

    def _hold(self, joined: _Joined) -> None:
        """Has a job at hand, and puts those away that were at hand longest: their folders stay."""
        self._jobs.pop(joined.job.name, None)
        self._jobs[joined.job.name] = joined
        while len(self._jobs) > _MOST_JOBS:
            del self._jobs[next(iter(self._jobs))]

    def _like(self, joined: _Joined) -> PyTree:
        return {
            "state": joined.shapes.states[joined.cohort],
            "known": joined.shapes.start if joined.algorithm.peers else (),
            "reply": jax.ShapeDtypeStruct((0,), np.uint8),
        }

    def _save(self, joined: _Joined, asked: str, reply: bytes) -> None:
        tree = {
            "state": joined.state,
            "known": joined.known if joined.algorithm.peers else (),
            "reply": np.frombuffer(reply, np.uint8),
        }
        meta = {"exchange": joined.exchange, "place": joined.place, "asked": asked}
        meta["asked so far"] = joined.asked
        checkpoint.save(self._folder(joined.job.name) / "state.npz", tree, meta)

    def _known(self, name: str) -> _Joined | None:
        """Returns a job that this node joined, at hand or as it lies in its folder."""
        folder = self._folder(name)
        if not (folder / "job.json").exists():
            return None
        if name in self._jobs:
            return self._jobs[name]
        told = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        job, plan = Job.from_json(told["job"]), Plan.from_json(told["plan"])
        # Its operator may have thought better of it since.
        self.holding.policy.check(job, len(plan.clients), self.holding.n_rows)
        self._check_as_joined(job, told)
        joined = _Joined(job, plan, self.holding.client)
        tree, meta = checkpoint.restore(folder / "state.npz", self._like(joined), any_shape=True)
        joined.state = tree["state"]
        joined.known = tree["known"] if joined.algorithm.peers else None
        joined.exchange, joined.asked = meta["exchange"], meta["asked so far"]
        joined.place = None if meta["place"] is None else Place(*meta["place"])
        if (folder / "offers.json").exists():
            offers = json.loads((folder / "offers.json").read_text(encoding="utf-8"))
            party = self._party(joined)
            party.agree({int(i): x for i, x in offers.items()}, self.holding.identities)
            joined.party = party
        self._hold(joined)
        return joined


def _initial(joined: _Joined, client: int) -> tuple[PyTree, PyTree]:
    """Returns this client's initial state and, among peers, the common one, else None."""
    c, place = joined.plan.find(client)
    started = joined.shapes.initial_states(jax.random.key(joined.job.seed))
    mine = jax.tree.map(  # copied, as a part would keep the states of all
        lambda x: x[place : place + 1].copy(), started.clients[c]
    )
    return mine, started.server if joined.algorithm.peers else None


def _has_ended(joined: _Joined, server: PyTree) -> bool:
    """Says whether this client has answered the last exchange; who came late has answered none.

    Args:
      joined: The job.
      server: Among peers, what they know after the exchange that was answered last.
    """
    if joined.algorithm.peers:
        return following(joined.algorithm, joined.place, joined.job.n_rounds, server) is None
    if joined.exchange == 0 or joined.job.late == "skip":
        return True
    asked = [phase for phase in joined.algorithm.finish if phase.who == "everyone"]
    return not asked or (joined.place is not None and joined.place.stage == "finish")


def _check_alike(file: Path, asked: str, text: str) -> None:
    """Refuses what was answered already, to another request.

    Args:
      file: Where what was asked for is written once it is answered.
      asked: What is asked for now.
      text: Of the refusal.
    """
    if file.exists() and file.read_text(encoding="utf-8") != asked:
        raise Refused("replayed", text)


def _secret(file: Path) -> bytes:
    """Returns a secret of the node, which is drawn once and never leaves it."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(file, "wb", private=True) as opened:
            opened.write(secrets.token_bytes(32))
    return file.read_bytes()


def _kept(x: Any, before: Any) -> Any:
    """Returns a leaf of the client's state on the host, in the type that it had."""
    return x if wire.is_key(x) else np.asarray(x, before.dtype)


def _job_of(meta: dict[str, Any]) -> Job:
    try:
        return Job.from_json(meta.get("settings"))
    except (ValueError, TypeError) as error:
        raise Refused("settings", str(error)) from error
