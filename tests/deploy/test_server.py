"""A server alone: what it makes of answers, without nodes and without a method."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxfedmvc import keys
from jaxfedmvc.algorithm import Phase
from jaxfedmvc.deploy import Server, Stopped, scores, wire
from jaxfedmvc.deploy import server as server_module
from jaxfedmvc.deploy.exchanges import Place, advanced, digest_of
from jaxfedmvc.deploy.plan import Card, Plan
from jaxfedmvc.engine import checkpoint
from tests.deploy import local

N = 3
PLACE = Place("round", 1, 0)
LIKE = {"x": jax.ShapeDtypeStruct((1, 4), np.float32)}  # a message of 16 bytes


class Echo:
    """Nodes that answer with their number, four times; `answers` are those of others.

    Attributes:
      asked: Requests, by client, of one time after another.
    """

    def __init__(self):
        self.answers, self.asked, self.told = {}, [], {}

    def nodes(self):
        return [100 + i for i in range(N)]

    def ask(self, requests, seconds):
        self.asked.append({node - 100: request for node, request in requests.items()})
        replies = {node: self.answers.get(node - 100, self.reply(node - 100)) for node in requests}
        return {node: reply for node, reply in replies.items() if reply is not None}

    def reply(self, i, exchange=1):
        told = {"exchange": exchange, "client": i} | self.told
        return wire.pack(told, np.full((1, 4), i, np.float32).tobytes())


def server_of(folder, monkeypatch, peers=False, reduce="sum", **job):
    """Returns a server in the middle of a job of three clients of one kind, and its nodes."""
    told = {"patience": 0.05, "deadline": 0.01} | job
    method = ("e_fkmvc", {"n_restarts": 1})
    nodes = Echo()
    made = Server(
        local.job_of(method[0], N, small=method[1], **told), nodes, folder, say=lambda line: None
    )
    made.plan = Plan.of_cards([Card(i, {0: 2}, 5) for i in range(N)], False)
    made.cards = {i: Card(i, {0: 2}, 5) for i in range(N)}
    made.node_of = {i: 100 + i for i in range(N)}
    made.participants, made.agreement = [list(range(N))], "agreed"
    phase = Phase(None, None, None, reduce)
    travels = {0: SimpleNamespace(message=LIKE)}
    made.shapes = SimpleNamespace(
        algorithm=SimpleNamespace(peers=peers),
        phase=lambda place: phase,
        taking_part=lambda phase: [0],
        exchange=lambda place, server: (travels, None),
        at=lambda place: (travels, None),
    )
    made.server = {"known": np.float32(1)}
    monkeypatch.setattr(Server, "_save", lambda self: None)
    programs = server_module.streaming
    monkeypatch.setattr(programs, "broadcast_program", lambda phase, server, views: np.zeros(5))
    return made, nodes


def test_what_a_server_makes_of_an_exchange(tmp_path, monkeypatch):
    made, nodes = server_of(tmp_path, monkeypatch)
    seen = []

    def program(phase, key, server, messages, weights):
        seen.append((jax.random.key_data(key).tolist(), messages, weights))
        return {"known": np.float32(2)}, {}

    monkeypatch.setattr(server_module.streaming, "server_program", program)
    made._make(PLACE)
    ((key, (message,), (weight,)),) = seen
    of_the_exchange = keys.of_phase(jax.random.key(7), keys.STAGES["round"], 1, 0)
    assert key == jax.random.key_data(of_the_exchange).tolist()
    np.testing.assert_array_equal(message["x"], np.full((1, 4), 0 + 1 + 2))
    assert float(weight) == N and made.exchange == 1 and made.place == PLACE
    (row,) = made.rows
    assert (row["bytes_up"], row["bytes_down"]) == (N * 16, N * 5 * 8)
    assert {wire.unpack(request)[0]["exchange"] for request in nodes.asked[0].values()} == {1}
    assert made.server == {"known": np.float32(2)}


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({"exchange": 0}, "round 2, phase 0: answers another exchange"),
        ({"exchange": 2}, "round 2, phase 0: answers another exchange"),
        ({"client": 2}, "round 2, phase 0: answers another exchange"),
        ({"error": "policy", "text": "a\nline"}, "unreadable text"),
        ({"error": "policy", "text": "x" * 600}, "^client 1: x{500}$"),
    ],
)
def test_an_answer_that_is_none_stops_the_job(told, text, tmp_path, monkeypatch):
    made, nodes = server_of(tmp_path, monkeypatch)
    body = bytes(0 if "error" in told else 16)
    nodes.answers[1] = wire.pack({"exchange": 1, "client": 1} | told, body)
    with pytest.raises(Stopped, match=text):
        made._make(PLACE)
    assert made.exchange == 0 and not made.rows


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda reply: reply[:-3], "13 bytes; expected are 16"),
        (lambda reply: reply + bytes(10**6), "1000016 bytes; allowed are 16"),
        (lambda reply: reply[:-4] + np.float32(np.nan).tobytes(), "holds a NaN or an infinite"),
        (lambda reply: reply[:-4] + np.float32(-np.inf).tobytes(), "holds a NaN or an infinite"),
        (lambda reply: b"\x80\x04\x95" + bytes(40), "no envelope of jaxfedmvc"),
    ],
)
def test_a_message_that_is_none_stops_the_job(change, text, tmp_path, monkeypatch):
    made, nodes = server_of(tmp_path, monkeypatch)
    nodes.answers[1] = change(nodes.reply(1))
    with pytest.raises(Stopped, match=f"^client 1: .*{text}"):
        made._make(PLACE)
    assert made.exchange == 0 and not made.rows


def test_peers_send_every_message_to_all_others(tmp_path, monkeypatch):
    made, nodes = server_of(tmp_path, monkeypatch, peers=True, reduce="stack")
    monkeypatch.setattr(
        server_module,
        "advanced",
        lambda shapes, place, known, messages, key: {"known": known["known"] + len(messages)},
    )
    nodes.told = {"known": digest_of(made.server)}
    made._make(PLACE)
    stacked = np.repeat(np.arange(N, dtype=np.float32), 4).tobytes()
    assert made.relayed == stacked and made.server == {"known": np.float32(2)}
    (row,) = made.rows
    assert row["bytes_up"] == row["bytes_down"] == N * 16 * (N - 1)
    assert {wire.unpack(request)[1] for request in nodes.asked[0].values()} == {b""}
    # The next one brings the messages of this one; who has computed something else is named.
    nodes.told = {"known": digest_of(made.server), "exchange": 2}
    nodes.answers[2] = wire.pack({"exchange": 2, "client": 2, "known": "other"}, bytes(16))
    with pytest.raises(Stopped, match="client 2: round 3, phase 0: what it computed differs"):
        made._make(Place("round", 2, 0))
    assert {wire.unpack(request)[1] for request in nodes.asked[1].values()} == {stacked}


def test_who_is_skipped_has_no_weight_in_a_stack(tmp_path, monkeypatch):
    made, nodes = server_of(tmp_path, monkeypatch, reduce="stack", late="skip")
    seen = []

    def program(phase, key, server, messages, weights):
        seen.append((messages[0]["x"][:, 0].tolist(), weights[0].tolist()))
        return server, {}

    monkeypatch.setattr(server_module.streaming, "server_program", program)
    nodes.answers[1] = None
    made._make(PLACE)
    nodes.answers = {0: wire.pack({"error": "internal", "text": "no"}), 2: nodes.reply(2, 2)}
    nodes.told = {"exchange": 2}
    made._make(Place("round", 2, 0))
    assert seen == [([0, 0, 2], [1, 0, 1]), ([0, 1, 2], [0, 1, 1])]
    assert [row["answered"] for row in made.rows] == [2, 2] and len(nodes.asked) == 2
    assert [row["bytes_up"] for row in made.rows] == [2 * 16] * 2
    nodes.answers = dict.fromkeys(range(N))
    with pytest.raises(Stopped, match=r"no client of views \(0,\)"):
        made._make(Place("round", 3, 0))


def test_nobody_is_skipped_where_clusters_are_found(tmp_path, monkeypatch):
    made, nodes = server_of(tmp_path, monkeypatch, late="skip")
    nodes.answers[1] = None
    with pytest.raises(Stopped, match=r"clients \[1\]: no answer within 0.05 s"):
        made._ask_beside("assign", dict.fromkeys(range(N), b"?"), lambda i, reply: i)


def test_who_does_not_answer_is_asked_until_patience_is_over(tmp_path, monkeypatch):
    """And nobody else is asked again; nor at once, where a transport knows that nobody is there."""
    made, nodes = server_of(tmp_path, monkeypatch, patience=10, deadline=1)
    clock, slept = [0.0], []
    seconds = SimpleNamespace(monotonic=lambda: clock[0], sleep=slept.append)
    monkeypatch.setattr(server_module, "time", seconds)
    ask = nodes.ask

    def slow(requests, seconds):
        clock[0] += 4
        return ask(requests, seconds)

    nodes.ask, nodes.answers = slow, {1: None}
    with pytest.raises(Stopped, match=r"clients \[1\]: no answer within 10 s"):
        made._ask(dict.fromkeys(range(N), b"?"), lambda i, reply: i)
    assert [sorted(asked) for asked in nodes.asked] == [[0, 1, 2], [1], [1]]
    assert len(slept) == 1


def test_what_peers_know_is_compacted_at_the_end_of_a_round():
    def serve(key, known, messages, weights):
        total = known["total"] + messages[0].sum() * weights[0].sum()
        return {"total": total, "key": jax.random.key_data(key)}, {}

    phase = Phase(None, None, serve, "stack")
    shapes = SimpleNamespace(
        algorithm=SimpleNamespace(
            round=(phase, phase), compact=lambda known: known | {"total": known["total"] + 100}
        ),
        plan=Plan.of_cards([Card(i, {0: 2}, 5) for i in range(N)], False),
        phase=lambda place: phase,
        taking_part=lambda phase: [0],
    )
    key, known = jax.random.key(7), {"total": np.float32(1), "key": np.zeros(2, np.uint32)}
    for place, total in ((PLACE, 10), (Place("round", 1, 1), 110), (Place("finish", 1, 1), 10)):
        found = advanced(shapes, place, known, (np.ones((N, 1), np.float32),), key)
        assert float(found["total"]) == total
        of_the_exchange = keys.of_phase(key, keys.STAGES[place.stage], place.round, place.phase)
        drawn_from = jax.random.fold_in(of_the_exchange, keys.SERVER)
        np.testing.assert_array_equal(found["key"], jax.random.key_data(drawn_from))


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_summary_adds_up_what_was_noted(rounds, tmp_path, monkeypatch):
    made, _ = server_of(tmp_path, monkeypatch)
    monkeypatch.setattr(made, "_assign", lambda *_: {})
    made._note(Place("join", 0, 0), N, N, 1000, 100, 9.0)
    made._note(Place("setup", 0, 0), N, N, 1, 10, 0.25)
    for r in range(rounds):
        made._note(Place("round", r, 0), N, N, 2, 20, 0.25)
    made._note(Place("finish", max(rounds - 1, 0), 0), N, N, 4, 40, 0.25)
    made._note(Place("keys", 0, 0), N, N, 3000, 300, 0.25)
    made._note(Place("keys", 0, 0), N, N, 3000, 300, 0.25)
    made._note(Place("assign", 0, 0), N, N, 5000, 500, 0.25)
    made.exchange = rounds + 2
    summary = made._finish()
    assert (summary["rounds"], summary["exchanges"]) == (rounds, rounds + 2)
    assert (summary["bytes_up"], summary["bytes_down"]) == (5 + 2 * rounds, 50 + 20 * rounds)
    assert summary["bytes_beside"] == {
        "join": {"up": 1000, "down": 100},
        "keys": {"up": 6000, "down": 600},
        "assign": {"up": 5000, "down": 500},
        "inform": {"up": 0, "down": 0},
    }
    assert summary["seconds"] == 0.5 + 0.25 * rounds and summary["scores"] is None
    assert summary["information"] is None
    assert summary["clients"].keys() == {"0", "1", "2"}
    assert [row["stage"] for row in made.rows][:2] == ["join", "setup"]


def test_scores_are_of_each_client_and_of_all_rows_that_are_not_the_same_samples():
    """By hand: one client alone is right, two that swap their clusters are half right together."""
    counts = [[("a", 0, 3), ("b", 1, 3)], [("a", 1, 3), ("b", 0, 3)]]
    found = scores.scores(counts, False)
    assert found["per_client"]["acc"] == 1 and found["pooled"]["acc"] == 0.5
    vertical = scores.scores(counts, True)
    assert vertical == {"clients": 2, "per_client": found["per_client"]}


def test_a_client_may_count_all_its_rows_and_words_count_rounds_from_one():
    assert scores.checked_counts([["a", 0, 6]], 6) == [("a", 0, 6)]
    told = [
        server_module._words(Place(*x)) for x in (("round", 0, 1), ("setup", 0, 2), ("join", 0, 0))
    ]
    assert told == ["round 1, phase 1", "setup, phase 2", "join"]


def test_information_is_of_the_clients_that_share_it(tmp_path, monkeypatch):
    """By hand, of clients with 5 rows and a view; two of the four clusters are nobody's."""
    made, nodes = server_of(tmp_path, monkeypatch)
    made.job = dataclasses.replace(made.job, settings={"n_clusters": 4})
    told = {0: {"sizes": [2, 3]}, 1: {"counts": []}, 2: {"sizes": [4]}}
    for i in (0, 2):
        nodes.answers[i] = wire.pack({"sum_log_q": -0.5 * (i + 1)})
    found = made._inform(told)
    shares = np.array([6, 3]) / 9
    expected = -(shares @ np.log(shares)) - (0.5 + 1.5) / 9
    assert found["clients"] == 2 and found["information"] == pytest.approx(expected)
    (asked,) = nodes.asked
    assert {i: wire.unpack(request)[0]["sizes"] for i, request in asked.items()} == {
        0: [6, 3, 0, 0],
        2: [6, 3, 0, 0],
    }
    assert made._inform({0: {"sizes": []}, 1: {}}) is None and len(nodes.asked) == 1
    monkeypatch.setattr(scores, "MOST_CLUSTERS", 3)
    assert made._inform(told) is None and len(nodes.asked) == 1


def test_a_client_that_tells_no_information_stops_no_job(tmp_path, monkeypatch):
    """By then all have their clusters. One is asked in vain once it has told of other sizes."""
    made, nodes = server_of(tmp_path, monkeypatch)
    said: list[str] = []
    made.say = said.append
    nodes.answers[0] = wire.pack({"sum_log_q": -0.5})
    nodes.answers[2] = wire.pack({"error": "replayed", "text": "information: told already"})
    assert made._inform({0: {"sizes": [2, 3]}, 1: {}, 2: {"sizes": [4]}}) is None
    assert "no information: client 2: information: told already" in said
    assert made._inform({0: {"sizes": [2, 3]}, 2: {"sizes": [6]}}) is None
    assert said[-1].startswith("no information: client 2: sizes: ") and len(nodes.asked) == 1


def test_a_folder_of_a_version_whose_cards_had_no_columns_is_named(tmp_path, monkeypatch):
    made, _ = server_of(tmp_path, monkeypatch)
    card = {"client": 0, "views": {"0": 2}, "rows": 5, "samples": ""}
    checkpoint.save(tmp_path / "server.npz", {}, {"cards": [card]})
    with pytest.raises(ValueError, match=f"folder: {tmp_path} holds a job of an earlier version"):
        made._reopen()


@pytest.mark.parametrize(
    ("sizes", "text"),
    [([5, 1], "more than"), ([-1, 2], "below zero"), ([[1]], "unreadable"), (7, "unreadable")],
)
def test_sizes_of_no_rows_of_a_client_are_refused(sizes, text):
    with pytest.raises(wire.Refused, match=f"sizes: .*{text}"):
        scores.checked_sizes(sizes, 5)


@pytest.mark.parametrize("told", [0.5, np.nan, -np.inf, -1e308, None, "-1.0", -1])
def test_what_is_no_sum_of_logarithms_is_refused(told):
    assert scores.checked_sum(-1.0) == -1 and scores.checked_sum(0.0) == 0
    with pytest.raises(wire.Refused, match="no number of zero or less"):
        scores.checked_sum(told)


def test_the_rows_of_exchanges_are_written_anew_each_time(tmp_path, monkeypatch):
    save = Server._save
    made, _ = server_of(tmp_path, monkeypatch)
    made.place = None
    for r in range(2):
        made._note(Place("round", r, 0), N, N, 2, 20, 0.25)
        save(made)
    head, *lines = (tmp_path / "exchanges.csv").read_text().splitlines()
    assert head == "exchange,stage,round,phase,asked,answered,bytes_up,bytes_down,seconds"
    assert lines == ["0,round,0,0,3,3,2,20,0.25", "0,round,1,0,3,3,2,20,0.25"]


@pytest.mark.parametrize(("rows", "fits"), [((2, 9), True), ((3, 3), False)])
def test_who_comes_late_is_sent_no_state_of_other_shapes(rows, fits, tmp_path, monkeypatch):
    """Where a method's state has other shapes with one client more; what is not read may differ."""
    made, _ = server_of(tmp_path, monkeypatch)
    said, sent = [], []
    expected = {"read": jax.ShapeDtypeStruct((2,), np.float32), "rest": LIKE["x"]}
    shapes = SimpleNamespace(
        algorithm=SimpleNamespace(peers=False),
        last=lambda: expected,
        needed=lambda c, server: [True, False],
    )
    monkeypatch.setattr(server_module, "job_shapes", lambda job, plan: shapes)
    monkeypatch.setattr(made, "_join", lambda plan, clients: sent.append(clients))
    monkeypatch.setattr(made, "_assign", lambda plan, shapes, clients: sent.append(clients))
    made.say, made.late = said.append, {9: Card(9, {0: 2}, 5)}
    made.server = {"read": np.zeros(rows[0]), "rest": np.zeros(rows[1])}
    (tmp_path / "summary.json").write_text("{}")
    assert made._serve_late() == {}
    assert sent == ([[9], [9]] if fits else [])
    assert ("this method cannot take clients later" in said[-1]) != fits
