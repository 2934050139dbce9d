"""Secure sums with real keys: the server reads the sum, and nothing but the sum."""

import jax
import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from jaxfedmvc.deploy import Node, Server, exchanges, server, wire
from jaxfedmvc.deploy.job import Job
from jaxfedmvc.deploy.masks import Party, _stream, read_identity, read_public
from jaxfedmvc.deploy.plan import Card, Plan
from jaxfedmvc.deploy.wire import Refused
from jaxfedmvc.engine.streaming import run_streaming
from jaxfedmvc.messages.secure import secure_aggregation
from tests.algorithms import test_common as common
from tests.deploy import local
from tests.deploy.test_equal import ordered

METHOD, SMALL = "e_fkmvc", {"n_restarts": 1}
CLIENTS = (((0, 1), {3: 8, 0: 5, 5: 6}), ((1,), {1: 7, 4: 6}))
FEDERATION = common.federation("horizontal", common.parts("horizontal", CLIENTS))
SECURE = {"fraction_bits": 16, "in_clear": ("setup[2]",)}


def write_identities(folder, clients):
    """Writes a private key for each client; returns the public lines."""
    lines = {}
    for i in clients:
        key = ed25519.Ed25519PrivateKey.generate()
        (folder / f"identity{i}").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.OpenSSH,
                serialization.NoEncryption(),
            )
        )
        (folder / f"identity{i}").chmod(0o600)
        public = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        lines[i] = public.decode()
    return lines


def laboratory(folder, agrees='secure = true\nin_clear = ["setup[2]"]', **job):
    clients = [3, 0, 5, 1, 4]
    lines = write_identities(folder, clients)
    paths = local.write_nodes(folder, FEDERATION, [METHOD], more=agrees)
    table = "".join(f'{i} = "{line}"\n' for i, line in lines.items())
    for i, path in paths.items():
        text = f'identity = "identity{i}"\n' + path.read_text()
        path.write_text(text + "\n[identities]\n" + table)
    transport = local.Local(local.nodes_of(paths))
    options = {"patience": 0.5, "deadline": 0.1} | SECURE | job
    return paths, transport, local.job_of(METHOD, 5, small=SMALL, **options)


def quiet(job, transport, folder):
    return Server(job, transport, folder / "server", say=lambda line: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secure")
    _, transport, job = laboratory(folder)
    made = quiet(job, transport, folder)
    made.run()
    return folder, transport, job, made


@pytest.mark.ci
def test_the_sums_are_those_of_the_simulation(finished):
    _, _, job, made = finished
    host = jax.tree.map(np.asarray, ordered(FEDERATION))
    algorithm = secure_aggregation(job.make(5), host, jax.random.key(1), **SECURE)
    simulated = run_streaming(algorithm, host, jax.random.key(7), common.ROUNDS, client_chunk=1)
    jax.tree.map(np.testing.assert_array_equal, made.server, simulated.state.server)


def test_the_bytes_of_keys_are_counted(finished):
    _, transport, _, made = finished
    keys = [(len(q), len(r)) for _, q, r in transport.log if wire.unpack(q)[0]["kind"] == "keys"]
    down, up = (sum(lengths) for lengths in zip(*keys, strict=True))
    rows = [row for row in made.rows if row["stage"] == "keys"]
    assert sum(row["bytes_up"] for row in rows) == up > 0
    assert sum(row["bytes_down"] for row in rows) == down > 0
    assert [row["asked"] for row in rows] == [5, 5]  # offers, and all of them passed on


def test_no_message_of_a_sum_looks_like_its_values(finished):
    """A masked message is uniform: its bytes are, and no two clients' are near each other."""
    _, transport, _, _ = finished
    bodies = []
    for _, request, reply in transport.log:
        meta, body = wire.unpack(request)[0], wire.unpack(reply)[1]
        if meta["kind"] == "exchange" and meta["place"][0] == "round":
            bodies.append(np.frombuffer(body, np.uint8))
    counts = np.bincount(np.concatenate(bodies), minlength=256)
    expected = counts.sum() / 256
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 255 + 6 * np.sqrt(2 * 255)  # six deviations


def test_masks_cancel_and_only_in_the_sum_of_all():
    parties = {i: Party(bytes([i]) * 32, i, "agreed") for i in (2, 7, 9)}
    keys = {i: ed25519.Ed25519PrivateKey.generate() for i in parties}
    offers = {i: party.offer(keys[i]) for i, party in parties.items()}
    for party in parties.values():
        party.agree(offers, {i: key.public_key() for i, key in keys.items()})
    values = {i: np.arange(5, dtype=np.uint32) * i for i in parties}
    sent = {i: parties[i].masked(values[i].tobytes(), 3, "a") for i in parties}
    total = sum(np.frombuffer(x, np.uint32) for x in sent.values())
    np.testing.assert_array_equal(total, sum(values.values()))
    part = np.frombuffer(sent[2], np.uint32) + np.frombuffer(sent[7], np.uint32)
    assert (part != values[2] + values[7]).all()
    assert sent[2] != parties[2].masked(values[2].tobytes(), 4, "a")
    assert sent[2] == parties[2].masked(values[2].tobytes(), 3, "a")
    # Asked for something else, it has other masks, and the sum is lost.
    sent[2] = parties[2].masked(values[2].tobytes(), 3, "b")
    total = sum(np.frombuffer(x, np.uint32) for x in sent.values())
    assert (total != sum(values.values())).all()


def test_a_stream_is_chacha20():
    """RFC 8439, A.1, first vector: zeros for key, nonce and counter."""
    assert _stream(bytes(32), 8).tobytes().hex() == "76b8e0ada0f13d90"


@pytest.mark.parametrize(
    "how",
    [
        *("another key", "another client", "another job", "another of the same identity"),
        *("unsigned", "missing", "unknown"),
    ],
)
def test_a_server_in_the_middle_is_refused(how):
    parties = {i: Party(bytes([i]) * 32, i, "agreed") for i in (1, 2)}
    keys = {i: ed25519.Ed25519PrivateKey.generate() for i in parties}
    identities = {i: key.public_key() for i, key in keys.items()}
    offers = {i: party.offer(keys[i]) for i, party in parties.items()}
    if how == "another key":
        offers[2] = Party(bytes(32), 2, "agreed").offer(keys[1]) | {
            "signature": offers[2]["signature"]
        }
    elif how == "another client":
        offers[2] = offers[1]
    elif how == "another job":
        offers[2] = Party(bytes([2]) * 32, 2, "agreed before").offer(keys[2])
    elif how == "another of the same identity":
        offers[2] = Party(bytes([2]) * 32, 3, "agreed").offer(keys[2])
    elif how == "unsigned":
        offers[2] = {"public": offers[2]["public"]}
    elif how == "missing":
        offers[2] = None
    else:
        identities = {}
    with pytest.raises(Refused, match="client 2: "):
        parties[1].agree(offers, identities)
    with pytest.raises(Refused, match="not agreed on"):
        parties[1].masked(bytes(8), 1, "")


def test_a_nodes_key_is_of_one_job():
    of_jobs = {Party(bytes(32), 1, job).public for job in ("one", "other")}
    assert len(of_jobs) == 2 and Party(bytes(32), 1, "one").public in of_jobs


def test_keys_that_are_refused_leave_no_mask_of_some():
    parties = {i: Party(bytes([i]) * 32, i, "agreed") for i in (1, 2, 3)}
    keys = {i: ed25519.Ed25519PrivateKey.generate() for i in parties}
    identities = {i: key.public_key() for i, key in keys.items()}
    offers = {i: party.offer(keys[i]) for i, party in parties.items()}
    with pytest.raises(Refused, match="client 3: "):
        parties[1].agree(offers | {3: None}, identities)
    with pytest.raises(Refused, match="not agreed on"):
        parties[1].masked(bytes(8), 1, "")


def test_a_node_without_all_keys_answers_no_secure_sum(tmp_path):
    _, transport, job = laboratory(tmp_path)

    def change(identity, reply):  # of client 5, to the others: an offer that nobody signed
        if transport.handles[identity].holding.client == 5 and b'"offer"' in reply:
            meta, body = wire.unpack(reply)
            meta["offer"]["signature"] = "00" * 64
            return wire.pack(meta, body)
        return reply

    transport.change = change
    with pytest.raises(server.Stopped, match="client 5: its key is not signed"):
        quiet(job, transport, tmp_path).run()
    identity = next(k for k, n in transport.handles.items() if n.holding.client == 0)
    mine = [wire.unpack(q)[0] for i, q, _ in transport.log if i == identity]
    (joined,) = [meta for meta in mine if meta["kind"] == "join"]
    meta = mine[-1]
    asked = {key: meta[key] for key in ("job", "agreement")}
    place = server.Place("setup", 0, 0)
    told = exchanges.job_shapes(job, Plan.from_json(joined["plan"])).at(place)[0][0].sent
    request = wire.pack(
        asked | {"kind": "exchange", "exchange": 1, "place": place}, bytes(wire.size(told))
    )
    answer, body = wire.unpack(transport.handles[identity].handle(request))
    assert answer["error"] == "keys" and body == b""


def test_what_is_no_sum_is_found_before_anybody_is_asked(tmp_path):
    _, transport, job = laboratory(tmp_path, in_clear=())
    with pytest.raises(ValueError, match=r"setup\[2\]: its server reads single messages"):
        quiet(job, transport, tmp_path).run()
    assert {wire.unpack(request)[0]["kind"] for _, request, _ in transport.log} == {"hello"}


def test_values_that_overflow_are_told_to_nobody_but_the_nodes_log(tmp_path, caplog):
    _, transport, job = laboratory(tmp_path, fraction_bits=30)
    with pytest.raises(server.Stopped, match="what its fraction_bits do not hold"):
        quiet(job, transport, tmp_path).run()
    replies = [wire.unpack(reply)[0] for _, _, reply in transport.log]
    assert not any("error" in reply for reply in replies)
    assert "values overflow" in caplog.text
    # Asked anew, with whatever else, it has answered.
    identity, request = [(i, q) for i, q, _ in transport.log if exchange(q)][-1]
    meta, body = wire.unpack(request)
    other = wire.pack(meta, bytes(len(body)) if body else b"1")
    assert wire.unpack(transport.handles[identity].handle(other))[0]["error"] == "replayed"


def test_a_sum_with_what_was_clipped_is_read_by_nobody(tmp_path):
    """Not by a server, either, that adds the messages up and ignores that they are refused."""
    _, transport, job = laboratory(tmp_path, fraction_bits=30)
    with pytest.raises(server.Stopped, match="what its fraction_bits do not hold"):
        quiet(job, transport, tmp_path).run()
    asked = [(i, wire.unpack(q)[0], wire.unpack(r)[1]) for i, q, r in transport.log if exchange(q)]
    last, ones = asked[-1][1]["exchange"], {(0, 1): 0, (1,): 0}
    for identity, meta, body in asked:
        if meta["exchange"] == last:
            kind = tuple(sorted(transport.handles[identity].holding.views))
            ones[kind] += int(np.frombuffer(body, "<u4")[-1])  # the last leaf is the check
    wrong = {kind: n % 2**32 for kind, n in ones.items() if n % 2**32 != {2: 3, 1: 2}[len(kind)]}
    assert wrong and all(n > 5 for n in wrong.values())  # no number of clients: nothing cancels


def test_a_private_sum_that_might_not_fit_is_refused_before_it_tells_of_a_client(tmp_path):
    """Whether it does would be a bit of a message with a part of the noise."""
    ((_, clients), _) = CLIENTS
    federation = common.federation("horizontal", common.parts("horizontal", (((0, 1), clients),)))
    paths = local.write_nodes(tmp_path, federation, ["private_e_fkmvc"])
    transport = local.Local(local.nodes_of(paths))
    job = Job(
        "job",
        "private_e_fkmvc",
        len(clients),
        {"n_clusters": 2, "noise_multiplier": 1.0},
        rounds=1,
        fraction_bits=27,
        deadline=0.1,
        patience=0.5,
    )
    with pytest.raises(ValueError, match=r"fraction_bits: got 27; allowed is .* sums of 8 rows"):
        quiet(job, transport, tmp_path).run()
    cards = [Card.from_json(wire.unpack(reply)[0]["card"]) for _, _, reply in transport.log]
    plan = Plan.of_cards(cards, False).to_json()
    join = wire.pack({"kind": "join", "settings": job.to_json(), "plan": plan})
    for node in transport.handles.values():
        refusal = wire.unpack(node.handle(join))[0]
        assert refusal["error"] == "plan" and "fraction_bits: got 27" in refusal["text"]


def exchange(request):
    return wire.unpack(request)[0]["kind"] == "exchange"


def test_a_client_that_is_asked_for_something_else_spoils_the_sum(tmp_path):
    _, transport, job = laboratory(tmp_path)
    ask, changed = transport.ask, []

    def ask_one_otherwise(requests, seconds):
        for identity, request in requests.items():
            meta, body = wire.unpack(request)
            client = transport.handles[identity].holding.client
            if client == 0 and meta["kind"] == "exchange" and meta["place"][0] == "round":
                sent = np.frombuffer(body, "<f4").copy()
                sent[-1] += 0.25
                requests = requests | {identity: wire.pack(meta, sent.tobytes())}
                changed.append(meta["place"])
        return ask(requests, seconds)

    transport.ask = ask_one_otherwise
    with pytest.raises(server.Stopped, match=r"round 1.*the masks do not cancel"):
        quiet(job, transport, tmp_path).run()
    assert len(changed) == 1


@pytest.mark.parametrize("number", [1, 5])
def test_a_client_that_drops_out_costs_time_and_no_secret(number, finished, tmp_path):
    """At any step: the server gets no sum without it, and the same bits once it is back."""
    _, transport, job = laboratory(tmp_path)
    gone = next(k for k, n in transport.handles.items() if n.holding.client == 3)

    def lose(identity, request):
        return identity == gone and wire.unpack(request)[0].get("exchange") == number

    transport.lose = lose
    with pytest.raises(server.Stopped, match="no answer"):
        quiet(job, transport, tmp_path).run()
    first = {i: r for i, q, r in transport.log if wire.unpack(q)[0].get("exchange") == number}
    transport.lose = lambda identity, request: False
    made = quiet(job, transport, tmp_path)
    made.run()
    jax.tree.map(np.testing.assert_array_equal, made.server, finished[3].server)
    # What those who were there had sent is what they send again, so that nothing can be subtracted.
    again = {
        i: r
        for i, q, r in transport.log
        if (m := wire.unpack(q)[0]).get("exchange") == number and m["kind"] == "exchange"
    }
    assert first and all(again[i] == reply for i, reply in first.items())


def test_a_node_that_starts_again_has_its_keys(finished, tmp_path):
    paths, transport, job = laboratory(tmp_path)
    seen = []

    def lose(identity, request):
        if wire.unpack(request)[0].get("exchange") == 5 and not seen:
            seen.append(identity)
            client = transport.handles[identity].holding.client
            transport.handles[identity] = Node(paths[client])
        return False

    transport.lose = lose
    made = quiet(job, transport, tmp_path)
    made.run()
    assert seen
    jax.tree.map(np.testing.assert_array_equal, made.server, finished[3].server)


@pytest.mark.parametrize(
    ("agrees", "job", "text"),
    [
        ("secure = true", {}, r"in_clear: \['setup\[2\]'\]; not agreed"),
        (
            'secure = true\nin_clear = ["setup[2]"]',
            {"fraction_bits": None, "in_clear": ()},
            "wants",
        ),
    ],
)
def test_what_an_operator_did_not_agree_to_is_refused(agrees, job, text, tmp_path):
    _, transport, job = laboratory(tmp_path, agrees, **job)
    with pytest.raises(server.Stopped, match=text):
        quiet(job, transport, tmp_path).run()


def test_too_few_of_a_kind_are_refused(tmp_path):
    """Three clients of one kind are enough for these operators, two of the other are not."""
    paths, _, job = laboratory(tmp_path)
    for path in paths.values():
        path.write_text(path.read_text().replace("least_clients = 2", "least_clients = 3"))
    transport = local.Local(local.nodes_of(paths))
    with pytest.raises(server.Stopped, match=r"2 of this kind are too few .*wants 3 or more with"):
        quiet(job, transport, tmp_path).run()


def test_identities_that_are_none_are_named(tmp_path):
    write_identities(tmp_path, [0])
    assert read_identity(tmp_path / "identity0") is not None
    (tmp_path / "wrong").write_text("-----BEGIN")
    with pytest.raises(ValueError, match="identity: "):
        read_identity(tmp_path / "wrong")
    (tmp_path / "identity0").chmod(0o640)
    with pytest.raises(ValueError, match=r"identity: other users .* chmod 600 .*identity0"):
        read_identity(tmp_path / "identity0")
    with pytest.raises(ValueError, match=r"identities\.3: got 'ssh-rsa x'"):
        read_public("ssh-rsa x", 3)
