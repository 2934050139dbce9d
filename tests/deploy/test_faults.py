"""What the documentation promises of networks, nodes and messages that fail."""

import csv
import dataclasses
import io
import json
import os
import re
import shutil

import jax
import numpy as np
import pytest

from jaxfedmvc import files, keys
from jaxfedmvc.deploy import Job, Node, Server, Stopped, scores, wire
from jaxfedmvc.deploy import node as node_module
from jaxfedmvc.deploy import server as server_module
from jaxfedmvc.deploy.exchanges import Shapes, may_follow
from jaxfedmvc.deploy.plan import Plan, skeleton
from jaxfedmvc.engine import checkpoint
from jaxfedmvc.metrics.information import information
from tests.algorithms import test_common as common
from tests.deploy import local
from tests.helpers import locks

METHOD, SMALL = "e_fkmvc", {"n_restarts": 1}
FEDERATION = common.federation("horizontal", common.parts("horizontal"))
N = FEDERATION.n_clients


class Lab:
    """Nodes of one federation in a folder, and a quiet server."""

    def __init__(self, folder, more="share_information = true", **job):
        self.folder = folder
        self.paths = local.write_nodes(folder, FEDERATION, [METHOD], more=more)
        self.transport = local.Local(local.nodes_of(self.paths))
        self.job = local.job_of(
            METHOD, N, small=SMALL, **({"patience": 0.5, "deadline": 0.1} | job)
        )
        self.lines = []

    def server(self, name="server", job=None):
        return Server(job or self.job, self.transport, self.folder / name, say=self.lines.append)

    def labels(self, name="job"):
        return {
            i: (self.folder / f"state{i}" / name / "labels.csv").read_text() for i in self.paths
        }

    def node(self, client):
        """The identity of a client's node."""
        return next(
            k for k, node in self.transport.handles.items() if node.holding.client == client
        )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("undisturbed"))
    summary = lab.server().run()
    return lab, summary


def kind(request):
    return wire.unpack(request)[0]["kind"]


def exchange_of(request):
    return wire.unpack(request)[0].get("exchange")


# --- Networks and nodes that fail -----------------------------------------------------------------


@pytest.mark.ci
def test_replies_that_are_lost_are_asked_for_again(undisturbed, tmp_path):
    lab, lost = Lab(tmp_path, patience=60), []

    def change(identity, reply):
        if len(lab.transport.log) % 3 == 1 and identity not in lost[-2:]:
            lost.append(identity)
            raise ConnectionError
        return reply

    ask = lab.transport.ask

    def ask_one_by_one(requests, seconds):
        replies = {}
        for identity, request in requests.items():
            try:
                replies |= ask({identity: request}, seconds)
            except ConnectionError:
                lab.transport.log.append((identity, request, b""))
        return replies

    lab.transport.change, lab.transport.ask = change, ask_one_by_one
    own = dict.fromkeys(("seconds", "job", "bytes_beside"))  # the other job has less patience
    assert lab.server().run() | own == undisturbed[1] | own
    assert len(lost) > 5 and lab.labels() == undisturbed[0].labels()


def test_a_job_says_for_whom_it_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "_QUIET", 0.0)
    lab = Lab(tmp_path)
    del lab.transport.handles[lab.node(0)]
    with pytest.raises(Stopped):
        lab.server().run()
    waits = f"waits for more: {N - 1} of {N} clients have come; stops after 0.5 s"
    assert lab.lines.count(waits) == 1


def test_a_client_that_does_not_answer_is_said_once(tmp_path):
    lab = Lab(tmp_path)
    silent = lab.node(1)
    lab.transport.lose = lambda node, request: node == silent and kind(request) != "hello"
    with pytest.raises(Stopped, match=r"clients \[1\]: no answer within 0.5 s"):
        lab.server().run()
    assert lab.lines.count("waits for clients [1], who do not answer yet") == 1


def test_a_node_that_is_killed_and_comes_back_goes_on_to_the_same_bits(undisturbed, tmp_path):
    lab, seen = Lab(tmp_path, patience=60), []

    def lose(identity, request):
        client = lab.transport.handles[identity].holding.client
        if client == 3 and exchange_of(request) == 5 and not seen:
            # It answers, but dies before the answer leaves, and starts again as another node.
            seen.append(lab.transport.handles.pop(identity).handle(request))
            lab.transport.handles[999] = Node(lab.paths[3])
            return True
        return False

    lab.transport.lose = lose
    lab.server().run()
    assert seen and lab.labels() == undisturbed[0].labels()


def test_an_exchange_that_a_full_disk_did_not_take_is_made_again(
    undisturbed, tmp_path, monkeypatch
):
    lab, save = Lab(tmp_path), checkpoint.save

    def full(path, tree, meta):
        if path.parent == tmp_path / "state3" / "job" and meta["exchange"] == 3:
            raise OSError(28, "No space left on device")
        save(path, tree, meta)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(Stopped, match="client 3: an error; see the node's log"):
        lab.server().run()
    monkeypatch.setattr(checkpoint, "save", save)
    lab.server().run()
    assert lab.labels() == undisturbed[0].labels()


def test_a_node_goes_on_with_a_job_after_any_number_of_others(undisturbed, tmp_path, monkeypatch):
    """It stays for years: what it has in memory may not grow with the jobs that it joined."""
    monkeypatch.setattr(node_module, "_MOST_JOBS", 2)
    lab, joins = Lab(tmp_path), {}

    def lose(identity, request):
        if kind(request) == "join":
            joins[identity] = wire.unpack(request)[0]
        node = lab.transport.handles[identity]
        for name in ("a", "b", "c") if exchange_of(request) == 5 else ():
            meta = joins[identity]
            other = meta | {"settings": meta["settings"] | {"name": name}}
            assert wire.unpack(node.handle(wire.pack(other)))[0] == {"exchange": 0}
            assert len(node._jobs) <= 2
        return False

    lab.transport.lose = lose
    lab.server().run()
    assert joins and lab.labels() == undisturbed[0].labels()


def test_a_node_joins_no_more_jobs_than_its_operator_wants(undisturbed, tmp_path):
    lab, _ = undisturbed
    asked = {kind(r): wire.unpack(r)[0] for i, r, _ in lab.transport.log if i == lab.node(0)}
    node = Node(local.write_nodes(tmp_path, FEDERATION, [METHOD], more="most_jobs = 2")[0])

    def answers(name):
        for what in ("hello", "join"):
            other = asked[what] | {"settings": asked[what]["settings"] | {"name": name}}
            yield wire.unpack(node.handle(wire.pack(other)))[0]

    for name in ("a", "b", "a"):
        assert [list(answer) for answer in answers(name)] == [["card"], ["exchange"]]
    text = "jobs: 2 lie in this node's folder, its agrees.most_jobs"
    assert list(answers("c")) == [{"error": "policy", "text": text}] * 2
    shutil.rmtree(tmp_path / "state0" / "a")
    assert list(answers("c"))[1] == {"exchange": 0} and list(answers("a"))[1]["text"] == text


def test_a_node_that_comes_back_before_its_death_is_known_is_taken_later(undisturbed, tmp_path):
    lab, asked = Lab(tmp_path, patience=60), []
    dead = lab.node(3)

    def lose(identity, request):
        if identity == dead and exchange_of(request) == 5:
            asked.append(identity)
            lab.transport.handles.setdefault(999, Node(lab.paths[3]))
            if len(asked) == 3:  # heartbeats were missed
                del lab.transport.handles[dead]
            return True
        return False

    lab.transport.ask = copying(lab.transport.ask)
    lab.transport.lose = lose
    lab.server().run()
    assert len(asked) == 3 and any("client 3: has a node already" in line for line in lab.lines)
    assert lab.labels() == undisturbed[0].labels()


def test_a_server_that_is_killed_after_any_exchange_goes_on_to_the_same_bits(
    undisturbed, tmp_path, monkeypatch
):
    """Also between the last exchange's save and the summary, by which the job is finished."""
    lab = Lab(tmp_path)
    save, last = Server._save, []

    class Killed(BaseException):
        pass

    def save_and_die(self):
        save(self)
        last.append(self.rows[-1]["stage"] if self.rows else "")
        if len(last) % 2:
            raise Killed

    monkeypatch.setattr(Server, "_save", save_and_die)
    for _ in range(20):
        try:
            summary = lab.server().run()
            break
        except Killed:
            pass
    own = dict.fromkeys(("seconds", "bytes_beside"))
    assert summary | own == undisturbed[1] | own and lab.labels() == undisturbed[0].labels()
    # The clusters were asked for again, and that is counted.
    assert last[-2:] == ["inform"] * 2 and len(last) > 5
    stages = [row["stage"] for row in rows_of(lab.folder / "server")]
    assert stages[-4:] == ["assign", "inform"] * 2


def test_a_client_that_stays_away_stops_the_job_which_goes_on_later(undisturbed, tmp_path):
    lab = Lab(tmp_path)
    gone = lab.node(4)
    lab.transport.lose = lambda identity, request: identity == gone and exchange_of(request) == 6
    with pytest.raises(Stopped, match=r"clients \[4\]: no answer"):
        lab.server().run()
    lab.transport.lose = lambda identity, request: False
    lab.server().run()
    assert lab.labels() == undisturbed[0].labels()


def test_a_client_that_is_skipped_is_in_no_sum(tmp_path):
    lab = Lab(tmp_path, late="skip")
    gone = lab.node(4)
    lab.transport.lose = lambda identity, request: identity == gone and exchange_of(request) == 6
    lab.server().run()
    assert any("client 4: left out of exchange 6" in line for line in lab.lines)
    rows = rows_of(lab.folder / "server")
    assert [r["answered"] == r["asked"] for r in rows] == [r["exchange"] != "6" for r in rows]


def test_the_sum_without_a_client_is_that_of_the_others(tmp_path):
    lab = Lab(tmp_path, late="skip")
    server = lab.server()
    server._check_folder()
    server._register()
    server._begin()
    place = server_module.following(server.shapes.algorithm, None, 1, server.server)
    place = place._replace(stage="round", phase=0)
    travels = server.shapes.at(place)[0]
    rng = np.random.default_rng(0)
    draw = lambda s: rng.normal(size=s.shape).astype(s.dtype)  # noqa: E731
    asked = server._asked(place)
    answers = {
        i: jax.tree.map(draw, travels[c].message) for c, ids in asked.items() for i in ids if i != 4
    }
    messages, weights = server._reduced(place, asked, travels, answers)
    for c, ids in asked.items():
        here = [i for i in ids if i != 4]
        assert float(np.sum(weights[c])) == len(here)
        expected = jax.tree.map(lambda *xs: sum(xs), *(answers[i] for i in here))
        jax.tree.map(np.testing.assert_allclose, messages[c], expected)


def test_what_is_no_exchange_is_counted_too(undisturbed):
    """Known answers: the lengths of all envelopes that were sent, and of what came back."""
    lab, summary = undisturbed
    rows = rows_of(lab.folder / "server")
    for stage in ("join", "assign", "inform"):
        sent = [(q, r) for _, q, r in lab.transport.log if kind(q) == stage]
        up, down = (sum(len(pair[k]) for pair in sent) for k in (1, 0))
        (row,) = (row for row in rows if row["stage"] == stage)
        assert (int(row["bytes_up"]), int(row["bytes_down"])) == (up, down) and down > 900
        assert row["asked"] == row["answered"] == str(N)
        assert summary["bytes_beside"][stage] == {"up": up, "down": down}
    assert summary["bytes_beside"]["keys"] == {"up": 0, "down": 0}
    made = [row for row in rows if row["stage"] not in ("join", "assign", "inform")]
    assert [row["exchange"] for row in made] == [str(i + 1) for i in range(summary["exchanges"])]
    assert summary["bytes_down"] == sum(int(row["bytes_down"]) for row in made)


def rows_of(folder):
    with (folder / "exchanges.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# --- Messages that are wrong ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """A node in the middle of a job, and the last request that it answered."""
    lab = Lab(tmp_path_factory.mktemp("joined"))
    lab.transport.lose = lambda identity, request: exchange_of(request) == 6
    with pytest.raises(Stopped):
        lab.server().run()
    identity = lab.node(0)
    request = [r for i, r, _ in lab.transport.log if i == identity][-1]
    return lab.transport.handles[identity], request


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"exchange": 2}, "replayed"),
        ({"exchange": 5, "place": ["round", 1, 0]}, "replayed"),
        ({"exchange": 6, "place": ["round", 0, 7]}, "place"),
        ({"exchange": 6, "place": ["nowhere", 0, 0]}, "place"),
        # What was answered is not answered anew under another number, nor what no job asks for.
        ({"exchange": 6}, "place"),
        ({"exchange": 6, "place": ["setup", 0, 2]}, "place"),
        ({"exchange": 6, "place": ["setup", 1, 0]}, "place"),
        ({"exchange": 6, "place": ["round", -1, 0]}, "place"),
        ({"exchange": 6, "place": ["round", common.ROUNDS, 0]}, "place"),
        ({"exchange": 6, "place": [1]}, "malformed"),
        ({"exchange": "x"}, "malformed"),
        ({"exchange": float("inf")}, "malformed"),
        ({"job": "x" * 1000}, "unknown_job"),
        ({"job": "x" * 2**18}, "unknown_job"),
        ({"job": "other"}, "unknown_job"),
        ({"job": "../state1/job"}, "unknown_job"),
        ({"agreement": "0"}, "settings"),
        ({"kind": "upload"}, "malformed"),
        ({"kind": ["exchange"]}, "malformed"),
    ],
)
def test_a_wrong_request_is_refused(changed, code, joined):
    node, request = joined
    meta, body = wire.unpack(request)
    answer, rest = wire.unpack(node.handle(wire.pack(meta | changed, body)))
    assert answer["error"] == code and rest == b""


def test_only_who_takes_part_answers(tmp_path):
    """A server that asks clients which were not drawn has one message of each more than agreed."""
    lab, asked = Lab(tmp_path, participation=0.5), {}

    def lose(identity, request):
        if exchange_of(request) == 1:
            asked[identity] = request
        return exchange_of(request) == 1

    lab.transport.lose = lose
    with pytest.raises(Stopped):
        lab.server().run()
    others = [node for i, node in lab.transport.handles.items() if i not in asked]
    told = set(asked.values())
    assert others and asked
    for node in others:
        for request in told:
            assert wire.unpack(node.handle(request))[0]["error"] == "place"
    for identity, request in asked.items():
        assert "error" not in wire.unpack(lab.transport.handles[identity].handle(request))[0]


def test_only_the_leader_answers_what_is_asked_of_one(tmp_path):
    lab = common.Lab("fmcsc")
    nodes = local.nodes_of(local.write_nodes(tmp_path, lab.federation, ["fmcsc"]))
    transport, asked = local.Local(nodes), {}

    def lose(identity, request):
        if exchange_of(request) == 1:
            asked[transport.handles[identity].holding.client] = request
        return exchange_of(request) == 1

    transport.lose = lose
    job = local.job_of("fmcsc", len(nodes), patience=0.1, deadline=0.1)
    with pytest.raises(Stopped):
        Server(job, transport, tmp_path / "server", say=lambda line: None).run()
    ((leader, request),) = asked.items()
    views = {len(node.holding.views) for node in nodes}
    kind = [n for n in nodes if len(n.holding.views) == max(views)]
    others = [n for n in kind if n.holding.client != leader]
    assert others
    for node in others:
        answer, body = wire.unpack(node.handle(request))
        assert answer["error"] == "place" and body == b""


def test_a_nodes_log_says_what_it_took_part_in(tmp_path, caplog):
    caplog.set_level("INFO", logger="jaxfedmvc.deploy.node")
    lab = Lab(tmp_path)
    lab.server().run()
    labels = tmp_path / "state0" / "job" / "labels.csv"
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("client 0:")] == [
        f"client 0: joined job job: {METHOD}, {common.ROUNDS} rounds at most, with clients"
        f" {sorted(lab.paths)}",
        f"client 0: clusters of job job: {labels}",
    ]


def test_what_is_asked_writes_one_line_of_the_nodes_log(joined, caplog):
    node, request = joined
    meta, body = wire.unpack(request)
    node.handle(wire.pack(meta | {"job": "x\nclient 0: connected as node 5"}, body))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("client 0 refuses: ") and line.isprintable()


@pytest.mark.parametrize("number", [float("inf"), float("nan"), "x", None, [1]])
def test_a_card_that_is_none_ends_no_job(number, tmp_path):
    lab = Lab(tmp_path)
    bad = lab.node(5)

    def change(identity, reply):
        meta, body = wire.unpack(reply)
        if identity == bad and "card" in meta:
            meta["card"]["rows"] = number
        return wire.pack(meta, body)

    lab.transport.change = change
    with pytest.raises(Stopped, match=r"clients: 5 of 6 have come \(card: unreadable\)"):
        lab.server().run()


def test_nothing_is_answered_after_the_end(undisturbed):
    lab, _ = undisturbed
    identity = lab.node(0)
    requests = [r for i, r, _ in lab.transport.log if i == identity and kind(r) == "exchange"]
    last = exchange_of(requests[-1])
    for number, request in enumerate(requests, start=last + 1):
        meta, body = wire.unpack(request)
        for r in range(common.ROUNDS):
            place = [meta["place"][0], r, meta["place"][2]]
            again = wire.pack(meta | {"exchange": number, "place": place}, body)
            answer, rest = wire.unpack(lab.transport.handles[identity].handle(again))
            assert answer["error"] == "place" and rest == b""


def test_clusters_are_found_at_the_end_and_by_one_model(undisturbed, joined):
    lab, _ = undisturbed
    identity = lab.node(0)
    (request,) = [r for i, r, _ in lab.transport.log if i == identity and kind(r) == "assign"]
    meta, body = wire.unpack(request)
    answer, _ = wire.unpack(lab.transport.handles[identity].handle(request))
    assert answer["counts"]  # the same ones again
    other = np.frombuffer(body, "<f4").copy()
    other[0] += 1
    changed = wire.pack(meta, other.tobytes())
    for node in (lab.transport.handles[identity], Node(lab.paths[0])):
        answer, _ = wire.unpack(node.handle(changed))
        assert answer["error"] == "replayed" and "counts" not in answer
    node, earlier = joined
    meta = wire.unpack(earlier)[0] | {"kind": "assign"}
    assert wire.unpack(node.handle(wire.pack(meta, body)))[0]["error"] == "place"


def test_peers_find_no_clusters_before_the_last_exchange(tmp_path):
    """Of what they have been told so far, a table of counts would be one more model's."""
    lab = common.Lab("label_consensus")
    nodes = local.nodes_of(local.write_nodes(tmp_path, lab.federation, ["label_consensus"]))
    transport, early = local.Local(nodes), []

    def lose(identity, request):
        meta, body = wire.unpack(request)
        if meta["kind"] == "exchange":
            asked = wire.pack(meta | {"kind": "assign"}, body)
            early.append(wire.unpack(transport.handles[identity].handle(asked))[0])
        return False

    transport.lose = lose
    job = local.job_of("label_consensus", len(nodes))
    assert Server(job, transport, tmp_path / "server", say=lambda line: None).run()["scores"]
    assert early and {answer.get("error") for answer in early} == {"place"}


def test_a_plan_that_names_a_client_twice_is_refused(undisturbed, tmp_path):
    lab, _ = undisturbed
    identity = lab.node(0)
    (request,) = [r for i, r, _ in lab.transport.log if i == identity and kind(r) == "join"]
    meta, body = wire.unpack(request)
    shutil.copy(lab.folder / "data0.npz", tmp_path)
    (tmp_path / "node0.toml").write_text(lab.paths[0].read_text())
    node = Node(tmp_path / "node0.toml")
    for clients in ([0, 3, 3], [3, 0]):
        groups = [dict(group) for group in meta["plan"]["groups"]]
        (mine,) = [group for group in groups if 0 in group["clients"]]
        mine["clients"] = clients
        crowd = meta | {"plan": meta["plan"] | {"groups": groups}}
        answer, _ = wire.unpack(node.handle(wire.pack(crowd, body)))
        assert answer["error"] == "malformed" and "plan" in answer["text"]


def test_those_of_the_plan_must_be_enough_for_the_operator_and_for_the_settings(
    undisturbed, tmp_path
):
    """A server could tell of many clients in the job, and plan with few."""
    lab, _ = undisturbed
    identity = lab.node(0)
    (request,) = [r for i, r, _ in lab.transport.log if i == identity and kind(r) == "join"]
    meta, body = wire.unpack(request)
    (mine,) = [group for group in meta["plan"]["groups"] if 0 in group["clients"]]
    few = meta | {"plan": meta["plan"] | {"groups": [mine | {"clients": [0]}]}}
    shutil.copy(lab.folder / "data0.npz", tmp_path)
    for least, rule, code, text in (
        (2, None, "policy", "clients: 1; this node wants 2 or more"),
        # A third of all are left out, which of one is nobody.
        (1, {"rule": "trimmed_mean", "share": 0.34}, "plan", "plan: 1 clients; robust: share"),
    ):
        path = tmp_path / "node0.toml"
        told = lab.paths[0].read_text()
        path.write_text(told.replace("least_clients = 2", f"least_clients = {least}"))
        job = dataclasses.replace(lab.job, robust=rule)
        told = wire.pack(few | {"settings": job.to_json()}, body)
        answer, _ = wire.unpack(Node(path).handle(told))
        assert answer["error"] == code and answer["text"].startswith(text), answer


@pytest.mark.parametrize(
    ("plan", "group", "text"),
    [
        ({"vertical": True}, {}, "plan: vertical: got True for e_fkmvc; allowed is False"),
        # A view of another client, of which this one would make a part of the initial state.
        ({"view_dims": [*common.DIMS["horizontal"], 2**28]}, {}, "plan: initial states of 7 cl"),
        # Of two clients, where the ids of the plan alone would take 8 GiB and more.
        ({}, {"capacity": 2**30}, r"plan: groups\[0\].capacity: got 1073741824 rows for each of"),
        ({}, {"capacity": 10**7}, r"plan: groups\[0\].capacity: got 10000000 rows, to which this"),
    ],
)
def test_a_plan_that_asks_for_what_no_job_needs_is_refused(
    undisturbed, tmp_path, plan, group, text
):
    lab, _ = undisturbed
    identity = lab.node(0)
    (request,) = [r for i, r, _ in lab.transport.log if i == identity and kind(r) == "join"]
    meta, body = wire.unpack(request)
    groups = [meta["plan"]["groups"][0] | group, *meta["plan"]["groups"][1:]]
    assert 0 in groups[0]["clients"]
    if "view_dims" in plan:
        groups.append({"view_ids": [0, 1, 2], "clients": [9], "capacity": 5})
    shutil.copy(lab.folder / "data0.npz", tmp_path)
    (tmp_path / "node0.toml").write_text(
        lab.paths[0].read_text().replace("[agrees]", "[agrees]\nmost_bytes = 100000000")
    )
    told = meta | {"plan": meta["plan"] | {"groups": groups} | plan}
    answer, _ = wire.unpack(Node(tmp_path / "node0.toml").handle(wire.pack(told, body)))
    assert answer["error"] == "plan" and re.match(text, answer["text"]), answer


def test_a_node_makes_its_initial_state_itself(undisturbed, tmp_path):
    """One that a server sends could be another for each client, and tell clients apart."""
    lab, _ = undisturbed
    joins = {i: r for i, r, _ in lab.transport.log if kind(r) == "join"}
    assert len(joins) == N and len(set(joins.values())) == 1  # all are told the same
    meta, body = wire.unpack(joins[lab.node(0)])
    assert body == b"" and meta.keys() == {"kind", "settings", "plan"}
    shutil.copy(lab.folder / "data0.npz", tmp_path)
    (tmp_path / "node0.toml").write_text(lab.paths[0].read_text())
    answer, _ = wire.unpack(Node(tmp_path / "node0.toml").handle(wire.pack(meta, b"0000")))
    assert answer["error"] == "wrong_size" and answer["text"].startswith("join")


def test_an_operator_who_thinks_better_of_it_is_obeyed(tmp_path):
    lab = Lab(tmp_path)
    lab.transport.lose = lambda identity, request: exchange_of(request) == 6
    with pytest.raises(Stopped):
        lab.server().run()
    lab.transport.lose = lambda identity, request: False
    path = lab.paths[0]
    path.write_text(path.read_text().replace("least_clients = 2", "least_clients = 50"))
    lab.transport.handles[lab.node(0)] = Node(path)
    with pytest.raises(Stopped, match=r"policy|clients"):
        lab.server().run()


def test_a_folder_belongs_to_one_process(tmp_path):
    path = local.write_node(tmp_path, 0, {0: np.ones((3, 2), np.float32)}, ["fmcsc"])
    with locks.held(tmp_path / "state0"):
        with pytest.raises(ValueError, match=r"folder: .*state0 is in use by another process"):
            Node(path)
    assert Node(path).holding.client == 0


@pytest.mark.parametrize(
    ("before", "place", "rounds", "may"),
    [
        (None, ("setup", 0, 0), 3, True),
        (None, ("round", 2, 1), 3, True),  # left out of all before
        (("setup", 0, 1), ("round", 0, 0), 3, True),
        (("round", 0, 1), ("round", 2, 0), 3, True),
        (("round", 0, 1), ("round", 1, 0), 1, False),
        (("round", 1, 0), ("round", 0, 1), 3, False),
        (("round", 1, 0), ("setup", 0, 1), 3, False),
        (("round", 1, 0), ("finish", 1, 0), 3, True),
        (("round", 1, 0), ("finish", 3, 0), 3, False),
        (("finish", 1, 0), ("finish", 1, 1), 3, True),
        (("finish", 1, 0), ("finish", 2, 0), 3, False),
        (("finish", 0, 0), ("round", 1, 0), 3, False),
        (("setup", 0, 0), ("finish", 0, 0), 0, True),
    ],
)
def test_a_client_may_be_asked_for_what_comes_later_in_the_run(before, place, rounds, may):
    before = None if before is None else server_module.Place(*before)
    assert may_follow(before, server_module.Place(*place), rounds) is may


def test_a_request_with_another_body_is_refused(joined):
    node, request = joined
    meta, body = wire.unpack(request)
    later = meta | {"exchange": meta["exchange"] + 1, "place": ["round", 1, 0]}
    answer, _ = wire.unpack(node.handle(wire.pack(later, body + b"1")))
    assert answer["error"] == "wrong_size"
    answer, _ = wire.unpack(node.handle(wire.pack(meta, body[:-1])))
    assert answer["error"] == "replayed"


def test_an_error_tells_the_server_nothing(joined, monkeypatch):
    node, request = joined

    def fail(*_):
        raise RuntimeError("row 17 is 3.14")

    monkeypatch.setattr(Node, "_exchange", fail)
    answer, body = wire.unpack(node.handle(request))
    assert answer == {"error": "internal", "text": "an error; see the node's log"} and not body


# --- Nodes that are not who they should be --------------------------------------------------------


def test_another_version_is_refused_and_both_are_named(tmp_path, monkeypatch):
    lab = Lab(tmp_path)
    monkeypatch.setattr(server_module, "versions", lambda: {"jaxfedmvc": "9.9"})
    with pytest.raises(Stopped, match=r"9\.9.*this node has"):
        lab.server().run()


def test_two_nodes_with_one_identity_are_refused(tmp_path):
    lab = Lab(tmp_path)
    lab.transport.handles[500] = Node(lab.paths[2])
    with pytest.raises(ValueError, match=r"client 2: two nodes .*, \d+ and 500"):
        lab.server().run()


def test_a_second_node_of_a_client_takes_no_part_in_a_job_that_runs(undisturbed, tmp_path):
    lab = Lab(tmp_path)

    def lose(identity, request):
        if exchange_of(request) == 3:
            lab.transport.handles.setdefault(500, Node(lab.paths[2]))
        return False

    lab.transport.ask = copying(lab.transport.ask)
    lab.transport.lose = lose
    lab.server().run()
    assert any("client 2: has a node already" in line for line in lab.lines)
    assert lab.labels() == undisturbed[0].labels()


def test_a_node_that_does_not_say_who_it_is_holds_up_no_exchange(undisturbed, tmp_path):
    """An answer is waited for until the deadline: once, and not in every exchange."""
    lab, asked = Lab(tmp_path), []
    lab.transport.handles[500] = None
    lab.transport.lose = lambda identity, request: identity == 500 and not asked.append(request)
    lab.server().run()
    assert [kind(request) for request in asked] == ["hello"]
    assert lab.labels() == undisturbed[0].labels()


def test_who_is_refused_is_asked_again_once_it_was_gone(tmp_path):
    lab, asked = Lab(tmp_path), []
    good = lab.node(2)
    right = lab.transport.handles[good]
    views = {0: np.ones((8, 4), np.float32)}
    lab.transport.handles[good] = Node(local.write_node(tmp_path, 9, views, ["fmcsc"]))
    lab.transport.lose = lambda identity, request: asked.append(identity)
    server = lab.server()
    for _ in range(2):
        server._greet()
    assert asked.count(good) == 1 and list(server.told) == [good]
    lab.transport.handles.pop(good)
    server._greet()
    assert not server.told
    lab.transport.handles[good] = right
    server._greet()
    assert asked.count(good) == 2 and server.node_of[2] == good and len(asked) == N + 1


def test_who_is_silent_is_asked_again_while_somebody_is_missing(tmp_path):
    lab, asked = Lab(tmp_path), []
    slow, other = lab.node(2), lab.node(3)
    lab.transport.lose = lambda identity, request: asked.append(identity) or identity == slow
    server = lab.server()
    server._greet()
    server._greet()
    assert asked.count(slow) == 2 and server.silent == {slow} and 2 not in server.cards
    lab.transport.lose = lambda identity, request: False
    server._greet()
    assert not server.silent and server.cards.keys() == set(range(N))
    server.server = ()  # the job has begun
    lab.transport.lose = lambda identity, request: asked.append(identity) or identity == 500
    lab.transport.handles[500] = None
    server._greet()
    server._greet()
    assert asked.count(500) == 1
    lab.transport.handles[501] = lab.transport.handles.pop(other)
    del lab.transport.handles[slow]
    server._greet()
    server._greet()
    assert asked.count(500) == 3 and asked.count(501) == 1  # client 2 is missing


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"client": -1}, False),
        ({"client": keys.CLIENT_IDS - 1}, True),
        ({"client": keys.CLIENT_IDS}, False),
        ({"rows": 0}, False),
        ({"rows": 2**31 - 1}, True),
        ({"rows": 2**31}, False),
        ({"views": {}}, False),
        ({"views": {"-1": 3}}, False),
        ({"views": {"0": 0}}, False),
        ({"views": {"0": 2**31}}, False),
        ({"columns": {"0": "a hash"}}, True),
        ({"columns": {"1": "of a view of others"}}, False),
    ],
)
def test_numbers_of_a_card_that_cannot_be_are_refused(changed, fits, tmp_path):
    job = local.job_of(METHOD, N, small=SMALL)
    reply = wire.pack(
        {
            "card": {"client": 3, "views": {"0": 2}, "rows": 5, "samples": "", "columns": {}}
            | changed
        }
    )
    server = Server(job, local.Local([]), tmp_path)
    if fits:
        assert server._card(reply).views == {0: 2}
    else:
        with pytest.raises(wire.Refused, match="card: numbers that cannot be"):
            server._card(reply)


def test_a_job_is_saved_before_any_client_hears_of_it(tmp_path, monkeypatch):
    """Else one that is killed then begins anew with whoever is there, whom those refuse."""
    lab, there = Lab(tmp_path), []
    started, initial = [], Shapes.initial_states
    monkeypatch.setattr(
        Shapes, "initial_states", lambda *args: started.append(args[2]) or initial(*args)
    )

    def lose(identity, request):
        there.append(kind(request) == "hello" or (tmp_path / "server" / "server.npz").exists())
        return kind(request) == "join"

    lab.transport.lose = lose
    with pytest.raises(Stopped, match="no answer"):
        lab.server().run()
    assert len(there) > N and all(there)
    nodes = lab.transport.handles.values()
    assert started == [{node.holding.client: node.holding.n_rows for node in nodes}]


def copying(ask):
    return lambda requests, seconds: ask(dict(requests), seconds)


def test_a_client_that_comes_back_with_other_data_is_refused(tmp_path):
    lab = Lab(tmp_path)
    lab.transport.lose = lambda identity, request: exchange_of(request) == 5
    with pytest.raises(Stopped):
        lab.server().run()
    fewer = {v: x[:-1] for v, x in lab.transport.handles[lab.node(1)].holding.views.items()}
    del lab.transport.handles[lab.node(1)]
    local.write_node(tmp_path, 1, fewer, [METHOD])
    lab.transport.handles[777] = Node(lab.paths[1])
    lab.transport.lose = lambda identity, request: False
    # Who comes late to the job stands for nobody.
    late = lab.transport.handles[lab.node(0)].holding.views
    lab.transport.handles[888] = Node(local.write_node(tmp_path, 9, late, [METHOD]))
    with pytest.raises(Stopped, match=r"clients: 5 of 6.*other data"):
        lab.server().run()


@pytest.mark.parametrize("what", ["data", "versions", "both"])
def test_a_node_that_starts_again_with_its_key_and_something_else_is_refused(
    what, joined, tmp_path, monkeypatch
):
    """Flower knows it by its key as the same node, so that the server does not ask who it is."""
    node, request = joined
    folder = node.holding.folder.parent
    shutil.copy(folder / "node0.toml", tmp_path)
    shutil.copytree(folder / "state0", tmp_path / "state0")
    views, text = node.holding.views, "job job: joined with other data"
    if what != "versions":
        views = {v: x[:-1] for v, x in views.items()}
    if what != "data":  # of another version the card may be another, too
        ours = node_module.versions()
        monkeypatch.setattr(node_module, "versions", lambda: ours | {"jax": "9.9"})
        text = f'"jax": "{ours["jax"]}".*this node has .*"jax": "9.9"'
    np.savez(tmp_path / "data0.npz", **{f"view_{v}": x for v, x in views.items()})
    answer, body = wire.unpack(Node(tmp_path / "node0.toml").handle(request))
    assert re.search(text, answer["text"]) and body == b""


@pytest.mark.parametrize("wrong", ["number", "data"])
def test_a_node_that_is_mended_before_the_job_begins_is_taken_as_it_is(wrong, tmp_path):
    """One that came under another number would be waited for, and the job could never begin."""
    lab = Lab(tmp_path)
    views = lab.transport.handles[lab.node(0)].holding.views
    if wrong == "data":
        views = {v: x[:-1] for v, x in views.items()}
    path = local.write_node(tmp_path, 9, views, [METHOD])
    if wrong == "data":
        path.write_text(path.read_text().replace("client = 9", "client = 0"))
    right, last = lab.node(0), lab.node(1)
    nodes = {i: lab.transport.handles.pop(i) for i in (right, last)}
    lab.transport.handles[900] = Node(path)
    server = lab.server()
    server._greet()
    assert server.cards.keys() == set(range(2, N)) | {9 if wrong == "number" else 0}
    del lab.transport.handles[900]
    lab.transport.handles |= nodes
    server._greet()
    assert server.cards.keys() == set(range(N))
    assert server.cards[0].rows == nodes[right].holding.n_rows


def test_the_same_name_with_other_settings_is_refused(undisturbed, tmp_path):
    lab, _ = undisturbed
    other = local.job_of(METHOD, N, small=SMALL, patience=0.5, deadline=0.1, rounds=1)
    with pytest.raises(ValueError, match="holds another job"):
        lab.server(job=other).run()
    nodes = local.Local(lab.transport.handles.values())
    with pytest.raises(Stopped, match="known here with other settings"):
        Server(other, nodes, tmp_path / "elsewhere", say=lambda line: None).run()


def test_a_job_that_was_refused_before_it_began_can_be_mended_under_its_name(tmp_path):
    lab = Lab(tmp_path)
    wrong = dataclasses.replace(lab.job, fraction_bits=16)
    with pytest.raises(ValueError, match="in_clear"):
        lab.server(job=wrong).run()
    lab.server()._check_folder()
    assert json.loads((lab.folder / "server" / "job.json").read_text())["fraction_bits"] is None


def test_two_servers_do_not_run_one_job(tmp_path):
    """A job whose `submit` was ended still runs on the SuperLink."""
    job = local.job_of(METHOD, N, small=SMALL, patience=0.1, deadline=0.1)
    server = Server(job, local.Local([]), tmp_path / "server", say=lambda line: None)
    with locks.held(tmp_path / "server"), pytest.raises(ValueError, match="in use by another"):
        server.run()
    with pytest.raises(Stopped, match="0 of 6 have come"):
        server.run()


def test_a_job_with_a_tuple_among_its_settings_goes_on(tmp_path):
    """JSON has lists alone."""
    settings = {"n_clusters": 3, "hidden": (8, 4)}
    for _ in range(2):
        Server(Job("a", "fmcsc", 3, settings), local.Local([]), tmp_path)._check_folder()
        (tmp_path / "server.npz").touch()
    other = Job("a", "fmcsc", 3, settings | {"hidden": (8, 5)})
    with pytest.raises(ValueError, match="holds another job"):
        Server(other, local.Local([]), tmp_path)._check_folder()


def test_a_node_that_refuses_says_why(tmp_path):
    lab = Lab(tmp_path)
    path = local.write_node(
        tmp_path, 2, {0: np.ones((8, 4), np.float32)}, ["fmcsc"], shared="false"
    )
    del lab.transport.handles[lab.node(2)]
    lab.transport.handles[300] = Node(path)
    with pytest.raises(Stopped, match=r"5 of 6 have come .method: e_fkmvc;"):
        lab.server().run()


# --- Clients that come later ----------------------------------------------------------------------


def test_a_client_that_comes_after_the_end_gets_its_clusters(undisturbed, tmp_path):
    first, _ = undisturbed
    seen = first.transport.handles[first.node(0)].holding.views
    paths = {9: local.write_node(tmp_path, 9, {v: x[:4] for v, x in seen.items()}, [METHOD])}
    names = ["Doe, J.", 'the "first"', "two\nlines", "4"]
    np.savez(tmp_path / "data9.npz", ids=names, **{f"view_{v}": x[:4] for v, x in seen.items()})
    lab = Lab.__new__(Lab)
    lab.__dict__ |= first.__dict__
    shutil.copytree(first.folder / "server", tmp_path / "server")
    # One whose first view has another width cannot be served, and stops nobody.
    other = local.write_node(tmp_path, 8, {v: x[:4, : 3 - v] for v, x in seen.items()}, [METHOD])
    # Nor does one whose operator wants no more clients than there were.
    bound = f"[agrees.settings]\nn_clients = {{most = {N}}}"
    wary = local.write_node(tmp_path, 7, {v: x[:4] for v, x in seen.items()}, [METHOD], more=bound)
    _, *stayed = first.transport.handles.values()  # who is not there any more is not waited for
    nodes = [*stayed, Node(wary), Node(other), Node(paths[9])]
    said: list[str] = []
    lab.transport = local.Local(nodes)
    Server(lab.job, lab.transport, tmp_path / "server", say=said.append).run()
    assert any(re.match("client 8: came later, and cannot be served: .*", line) for line in said)
    assert f"client 7: came later, and cannot be served: client 7: n_clients: {N + 1};" in str(said)
    assert not any((tmp_path / f"state{i}" / "job" / "labels.csv").exists() for i in (7, 8))
    with (tmp_path / "state9" / "job" / "labels.csv").open(newline="", encoding="utf-8") as file:
        late = list(csv.reader(file))
    assert late[0] == ["id", "cluster"] and [row[0] for row in late[1:]] == names
    # Rows that are those of a client that took part are in the clusters of that client's.
    theirs = list(csv.reader(first.labels()[0].splitlines()))
    assert [row[1] for row in late[1:]] == [row[1] for row in theirs[1:5]]
    # The plan stays that of those who took part, when the job is submitted again, too.
    kept = checkpoint.read_meta(tmp_path / "server" / "server.npz")["cards"]
    assert {card["client"] for card in kept} == set(first.paths)
    assert [row["stage"] for row in rows_of(tmp_path / "server")][-4:] == [
        "assign",  # of all who took part
        "inform",
        "join",
        "assign",
    ]


# --- What travels, and what does not --------------------------------------------------------------


def test_registration_tells_shapes_and_nothing_else(undisturbed):
    lab, _ = undisturbed
    hellos = [r for _, q, r in lab.transport.log if kind(q) == "hello"]
    assert len(hellos) == N
    for reply in hellos:
        meta, body = wire.unpack(reply)
        assert body == b"" and meta.keys() == {"card"}
        assert meta["card"].keys() == {"client", "views", "rows", "samples", "columns"}


def test_nobody_is_told_the_row_counts_of_others(undisturbed):
    lab, _ = undisturbed
    for _, request, _ in lab.transport.log:
        meta, _ = wire.unpack(request)
        if meta["kind"] == "join":
            assert meta["plan"].keys() == {"groups", "view_dims", "vertical"}
            for group in meta["plan"]["groups"]:
                assert group.keys() == {"view_ids", "clients", "capacity"}


def test_what_views_tell_of_the_clusters_is_the_simulations(undisturbed):
    lab, summary = undisturbed
    labels = [np.full(cohort.mask.shape, -1, np.int32) for cohort in FEDERATION.cohorts]
    for found, cohort in zip(labels, FEDERATION.cohorts, strict=True):
        for k, client in enumerate(np.asarray(cohort.client_ids).tolist()):
            rows = [
                int(row["cluster"]) for row in csv.DictReader(io.StringIO(lab.labels()[client]))
            ]
            found[k, np.asarray(cohort.mask[k])] = rows
    expected = float(jax.jit(information, static_argnums=2)(FEDERATION, labels, common.K))
    assert summary["information"]["clients"] == N
    assert summary["information"]["information"] == pytest.approx(expected, abs=1e-5)
    assert any("information: " in line and "nats" in line for line in lab.lines)


def test_what_views_tell_is_told_once_and_of_real_sizes(undisturbed, joined, monkeypatch):
    lab, _ = undisturbed
    identity = lab.node(0)
    ((request, reply),) = [
        (r, a) for i, r, a in lab.transport.log if i == identity and kind(r) == "inform"
    ]
    meta, _ = wire.unpack(request)
    for node in (lab.transport.handles[identity], Node(lab.paths[0])):
        assert node.handle(request) == reply  # the same again
        policy = dataclasses.replace(node.holding.policy, most_bytes=10**5)
        monkeypatch.setattr(node, "holding", dataclasses.replace(node.holding, policy=policy))
        for sizes, error in (
            ([*meta["sizes"], 1], "replayed"),
            ([0] * len(meta["sizes"]), "malformed"),
            ([10**9, -1, *meta["sizes"][2:]], "malformed"),
            ("none", "malformed"),
            ([10**300] * len(meta["sizes"]), "malformed"),  # whose sum would be infinite
            ([99] * 10**4, "oversized"),
        ):
            answer, _ = wire.unpack(node.handle(wire.pack(meta | {"sizes": sizes})))
            assert answer["error"] == error and "sum_log_q" not in answer
    node, earlier = joined
    meta = wire.unpack(earlier)[0] | {"kind": "inform"}
    assert wire.unpack(node.handle(wire.pack(meta)))[0]["error"] == "place"


def test_no_exchange_is_answered_once_clusters_are_found(undisturbed, tmp_path):
    """The state that comes of it would make other clusters, and sizes, by the same model."""
    lab, _ = undisturbed
    identity = lab.node(0)
    asked = {kind(r): r for i, r, _ in reversed(lab.transport.log) if i == identity}
    node = Node(local.write_nodes(tmp_path, FEDERATION, [METHOD])[0])
    for name in ("join", "assign"):  # as of one that came late
        assert "error" not in wire.unpack(node.handle(asked[name]))[0]
    answer, _ = wire.unpack(node.handle(asked["exchange"]))
    assert answer["error"] == "place" and "after clusters were found" in answer["text"]
    assert "error" not in wire.unpack(node.handle(asked["assign"]))[0]


def test_clusters_of_high_numbers_take_no_memory_and_are_not_told():
    """Of MGCD and others the server names the clusters, as it likes."""
    assert scores.sizes_of(np.array([0, scores.MOST_CLUSTERS], np.int32)) is None
    most = scores.sizes_of(np.array([0, scores.MOST_CLUSTERS - 1], np.int32))
    assert len(most) == scores.MOST_CLUSTERS and sum(most) == 2
    assert scores.sizes_of(np.full(2, -1, np.int32)) == []


def test_labels_and_sizes_stay_unless_the_operator_shares_them(undisturbed, tmp_path):
    _, summary = undisturbed
    assert summary["scores"]["clients"] == N and 0 < summary["scores"]["pooled"]["acc"] <= 1
    alone = Lab(tmp_path)
    local.write_nodes(tmp_path, FEDERATION, [METHOD], counts="false")
    alone.transport = local.Local(local.nodes_of(alone.paths))
    summary = alone.server().run()
    assert summary["scores"] is None and summary["information"] is None
    assert all(
        b"counts" not in reply and b"sizes" not in reply for *_, reply in alone.transport.log
    )
    assert "inform" not in {kind(request) for _, request, _ in alone.transport.log}
    meta = {"kind": "inform", "job": "job", "exchange": 0, "sizes": [99] * common.K}
    known = next(r for _, r, _ in alone.transport.log if kind(r) == "assign")
    asked = wire.pack(meta | {"agreement": wire.unpack(known)[0]["agreement"]})
    answer, _ = wire.unpack(alone.transport.handles[alone.node(0)].handle(asked))
    assert answer["error"] == "policy"


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([["a", 0, 7]], "more than its 6 rows"),
        ([["a", 0, 4], ["b", 0, 4]], "more than its 6 rows"),
        ([["a", -1, 1]], "below zero"),
        ([["a", 0, 0]], "below zero"),
        ([["a", 0]], "unreadable"),
        ([["a", 0, float("inf")]], "unreadable"),
        (3, "unreadable"),
    ],
)
def test_counts_of_no_rows_of_a_client_are_refused(counts, text):
    with pytest.raises(wire.Refused, match=f"counts: .*{text}"):
        scores.checked_counts(counts, 6)


def test_counts_that_cannot_be_are_left_out_and_the_job_is_finished(undisturbed, tmp_path):
    lab = Lab(tmp_path)
    false = lab.node(0)

    def lie(identity, reply):
        meta, body = wire.unpack(reply)
        is_its = identity == false and "counts" in meta
        return wire.pack(meta | {"counts": [["a", 0, 10**6]]}, body) if is_its else reply

    lab.transport.change = lie
    summary = lab.server().run()
    assert summary["scores"]["clients"] == N - 1
    assert any(line.startswith("no scores of client 0: counts: ") for line in lab.lines)
    assert summary["information"] == undisturbed[1]["information"]


def test_a_client_that_counts_in_high_numbers_takes_no_memory():
    counts = scores.checked_counts([["a", 10**15, 3], ["b", 2, 3]], 6)
    assert scores.scores([counts], False)["pooled"]["acc"] == 1


def test_a_client_of_many_classes_and_clusters_ends_no_job():
    """Tens of GB of a message of a megabyte, at the end of the job."""
    told = [[str(i), i, 1] for i in range(6 * 10**4)]
    counts = scores.checked_counts(told, 2**31 - 1)
    assert scores.scores([counts], False) is None


def test_rows_in_no_cluster_are_not_counted():
    labels = np.array(["a", "a", "b", "b"])
    told = scores.counts_of(labels, np.array([1, -1, 1, 0], np.int32))
    assert told == [["a", 1, 1], ["b", 0, 1], ["b", 1, 1]]
    nowhere = scores.counts_of(labels, np.full(4, -1, np.int32))
    assert nowhere == []
    assert np.isnan(scores.scores([nowhere], False)["pooled"]["acc"])


def test_counts_that_no_reply_holds_are_not_told_and_the_job_ends(tmp_path, caplog):
    """Of labels that are names, for instance: an error would stop the job in its end, for ever."""
    views, labels = {0: np.ones((2, 2), np.float32)}, np.array(["a" * 2**18, "b" * 2**18])
    node = Node(local.write_node(tmp_path, 0, views, [METHOD], labels))
    assert scores.counts_of(labels[:1], np.zeros(1, np.int32)) == [["a" * 2**18, 0, 1]]
    assert node._shared(np.zeros(2, np.int32)) == {}
    assert "client 0: counts: too many to be told" in caplog.text


def test_own_keys_make_other_draws_than_the_seed_and_the_same_ones_again(tmp_path):
    """With keys of its own a node's noise cannot be drawn again from what the server knows."""
    path = local.write_node(tmp_path, 0, {0: np.ones((3, 2), np.float32)}, ["fmcsc"])
    node = Node(path)

    class Joined:
        job = local.job_of("fmcsc", 2, keys="own")

    place = server_module.Place("round", 0, 0)
    own = jax.random.key_data(node._key(Joined, place, 3, "a"))
    again = jax.random.key_data(Node(path)._key(Joined, place, 3, "a"))
    np.testing.assert_array_equal(own, again)
    for number, asked in ((4, "a"), (3, "b")):
        assert (own != jax.random.key_data(node._key(Joined, place, number, asked))).any()
    Joined.job = local.job_of("fmcsc", 2, keys="shared")
    assert (own != jax.random.key_data(node._key(Joined, place, 3, "a"))).any()
    assert (tmp_path / "state0" / "job" / "secret").stat().st_mode & 0o77 == 0


def test_what_a_node_keeps_is_for_its_owner_alone(tmp_path):
    """From the moment that a file is there: one that is opened before it is closed to others."""
    before = os.umask(0o022)
    try:
        Node(local.write_node(tmp_path, 0, {0: np.ones((3, 2), np.float32)}, ["fmcsc"]))
        assert (tmp_path / "state0").stat().st_mode & 0o77 == 0
        partial = files.partial_path(tmp_path / "secret")
        partial.touch()  # of a process that died
        with files.replacing(tmp_path / "secret", "wb", private=True) as opened:
            assert os.fstat(opened.fileno()).st_mode & 0o777 == 0o600
            opened.write(b"1")
        assert (tmp_path / "secret").read_bytes() == b"1" and not partial.exists()
    finally:
        os.umask(before)


def test_a_full_disk_is_known_by_the_file_that_it_did_not_take(tmp_path):
    path = tmp_path / "labels.csv"
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"), files.replacing(path):
        raise OSError(28, "No space left on device")
    assert not path.exists()


@pytest.mark.parametrize("name", ["e_fkmvc", "fmcsc", "mgcd", "vertcohirf"])
def test_assign_is_sent_only_what_it_reads(name):
    lab = common.Lab(name)
    cards = [
        server_module.Card(
            int(i), {v: lab.federation.view_dims[v] for v in c.view_ids}, int(m.sum()), ""
        )
        for c in lab.federation.cohorts
        for i, m in zip(np.asarray(c.client_ids), np.asarray(c.mask), strict=True)
    ]
    plan = Plan.of_cards(
        [c.__class__(c.client, c.views, cards[0].rows, "") for c in cards], lab.vertical
    )
    shapes = Shapes(lab.algorithm, plan)
    last = shapes.last()
    needed = [shapes.needed(c, last) for c in range(len(plan.groups))]
    assert all(len(used) == len(jax.tree.leaves(last)) for used in needed)
    assert skeleton(plan).n_clients == len(cards)
    if name == "fmcsc":  # a client of one view does not read the model of all
        assert not all(needed[-1])
    assert any(any(used) for used in needed) or name == "mgcd"


def test_a_summary_is_json(undisturbed):
    lab, summary = undisturbed
    text = (lab.folder / "server" / "summary.json").read_text()
    assert json.loads(text) == summary
