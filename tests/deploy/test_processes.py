"""A job over Flower, in processes of their own, finds what the simulation finds."""

import contextlib
import json
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.deploy import Job, Node, flower
from jaxfedmvc.federation import Federation
from tests.algorithms import test_common as common
from tests.deploy import local
from tests.deploy.test_equal import LABELS_ALONE, ordered, simulate
from tests.helpers import programs

pytest.importorskip("flwr", reason="Flower is not installed: the extra flower")
from experiments import deploy_demo as demo

# As many rows as VertCoHiRF's smallest arrays hold: its programs are compiled for one size.
N = 16
SMALL = {"e_fkmvc": {"n_restarts": 1}}  # the others as in the common tests


def write_job(folder, job):
    told = {k: v for k, v in job.to_json().items() if v is not None}
    settings = told.pop("settings")
    lines = [f"{k} = {json.dumps(v)}" for k, v in told.items()]
    lines += ["[settings]", *(f"{k} = {json.dumps(v)}" for k, v in settings.items())]
    path = folder / f"{job.name}.toml"
    path.write_text("\n".join(lines) + "\n")
    assert Job.from_toml(path) == job
    return path


def start_nodes(here, folder, federation, methods, **options):
    paths = local.write_nodes(folder, federation, methods, **options)
    for client, path in paths.items():
        here.start_node(f"node{client}", path)
    return paths


def labels_of(folder, client, job):
    file = folder / f"state{client}" / job / "labels.csv"
    return np.loadtxt(file, delimiter=",", skiprows=1, dtype=int, ndmin=2)[:, 1]


def test_a_node_whose_connection_ends_does_not_end_as_if_all_were_well(tmp_path, monkeypatch):
    """Flower's connection logs what a reply that cannot be read raises, and passes nothing on."""

    @contextlib.contextmanager
    def connection(*_):
        def receive():
            raise IndexError

        with contextlib.suppress(Exception):
            yield 5, receive, *[None] * 6

    monkeypatch.setattr(flower, "_connection", connection)
    node = Node(local.write_node(tmp_path, 0, {0: np.eye(4)}, ["e_fkmvc"]))
    with pytest.raises(ConnectionError, match="superlink: the connection to here:1 ended"):
        flower.serve(node, "here:1")


def test_a_node_outlives_a_message_that_is_lost(tmp_path, monkeypatch):
    came, answered = [("first", None), ("second", None)], []

    @contextlib.contextmanager
    def connection(*_):
        with contextlib.suppress(IndexError):
            yield 5, lambda: came.pop(0), *[None] * 6

    def answer(node, message, *_):
        answered.append(message)
        raise ConnectionError(f"of the {message}")

    monkeypatch.setattr(flower, "_connection", connection)
    monkeypatch.setattr(flower, "_answer", answer)
    node = Node(local.write_node(tmp_path, 0, {0: np.eye(4)}, ["e_fkmvc"]))
    with pytest.raises(ConnectionError, match="superlink: the connection to here:1 ended"):
        flower.serve(node, "here:1")
    assert answered == ["first", "second"]


class Grid:
    """What Flower hands to an app: some messages are taken, some of them are replied to."""

    def __init__(self, taken, replies):
        self.taken, self.replies, self.asked = taken, replies, []

    def push_messages(self, messages):
        self.pushed = messages
        return self.taken

    def pull_messages(self, identities):
        self.asked.append(sorted(identities))
        return self.replies.pop(0) if self.replies else []


def reply(identity, body=None, reason=None):
    return SimpleNamespace(
        metadata=SimpleNamespace(reply_to_message_id=identity),
        has_error=lambda: reason is not None,
        has_content=lambda: reason is None,
        content=SimpleNamespace(config_records={"jaxfedmvc": {"body": body}}),
        error=SimpleNamespace(reason=reason),
    )


def test_replies_belong_to_who_was_asked_and_what_is_none_is_left_out(monkeypatch):
    monkeypatch.setattr(flower, "_POLL", 0.0)
    monkeypatch.setattr(flower, "_message", lambda body, **told: SimpleNamespace(body=body, **told))
    # Node 7 cannot be reached, 8 fails, and what 9 sends are no bytes.
    replies = [[reply("b", b"six")], [], [reply("d", reason="gone"), reply("e", "text")]]
    grid = Grid(["a", "b", "", "d", "e"], [*replies, [reply("a", b"five")]])
    asked = {5: b"5", 6: b"6", 7: b"7", 8: b"8", 9: b"9"}
    assert flower.Asker(grid).ask(asked, 600.0) == {5: b"five", 6: b"six"}
    assert [(m.dst_node_id, m.body, m.ttl) for m in grid.pushed] == [
        (node, body, 600.0) for node, body in asked.items()
    ]
    assert grid.asked == [["a", "b", "d", "e"], ["a", "d", "e"], ["a", "d", "e"], ["a"]]


def test_who_does_not_reply_is_waited_for_until_the_deadline(monkeypatch):
    monkeypatch.setattr(flower, "_POLL", 0.0)
    monkeypatch.setattr(flower, "_message", lambda body, **told: body)
    clock = iter(range(100))
    monkeypatch.setattr(flower, "time", SimpleNamespace(monotonic=clock.__next__, sleep=bool))
    grid = Grid(["a"], [[]] * 99)
    assert flower.Asker(grid).ask({5: b"5"}, 10.0) == {}
    assert len(grid.asked) == 9  # a second each, from the first look at the clock on
    assert flower.Asker(None).ask({}, 10.0) == {}


def hospitals():
    """Three clients, of whom one lacks a view."""
    clients = (((0, 1), {3: 8, 0: 5}), ((1,), {1: 7}))
    return common.federation("horizontal", common.parts("horizontal", clients))


def agents():
    """Three agents with a view each of the same samples."""
    rng = np.random.default_rng(0)
    truth = np.arange(N) % common.K
    views = [2 * rng.normal(size=(common.K, d))[truth] + rng.normal(size=(N, d)) for d in (4, 3, 4)]
    return Federation.from_arrays(views, truth, partition=vertical_partition(N, 3))


def job_of(name, n):
    return local.job_of(name, n, name, small=SMALL.get(name))


def of_common_tests(kind):
    return common.federation(kind, common.parts(kind))


def all_methods(kind):
    return [name for name in local.DEPLOYED if common.Lab(name).kind == kind]


@pytest.mark.parametrize(
    ("federation", "methods"),
    [
        # `.ci/run` has the first two beside the default tests.
        pytest.param(hospitals, lambda: ["e_fkmvc"], id="sums", marks=pytest.mark.slow),
        pytest.param(
            agents,
            lambda: ["mgcd", "vertcohirf"],
            id="stacks-and-peers",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(
                partial(of_common_tests, kind),
                partial(all_methods, kind),
                id=kind,
                marks=pytest.mark.slow,
            )
            for kind in common.CLIENTS
        ),
    ],
)
def test_processes_find_the_simulations_clusters(federation, methods, tmp_path):
    federation, methods = federation(), methods()
    n = federation.n_clients
    with demo.network(tmp_path / "net", secure=False) as here:
        start_nodes(here, tmp_path, federation, methods)
        for name in methods:
            here.submit(write_job(tmp_path, job_of(name, n)), tmp_path / "results")
    host = jax.tree.map(np.asarray, ordered(federation))
    for name in methods:
        algorithm = job_of(name, n).make(n)
        simulated = simulate(algorithm, host)
        for cohort, labels in zip(host.cohorts, simulated.labels, strict=True):
            for k, client in enumerate(cohort.client_ids.tolist()):
                expected = np.asarray(labels)[k][cohort.mask[k]]
                np.testing.assert_array_equal(labels_of(tmp_path, client, name), expected)
        summary = json.loads((tmp_path / "results" / name / "summary.json").read_text())
        assert summary["rounds"] == (int(simulated.n_rounds) if algorithm.round else 0)
        if name in LABELS_ALONE:
            continue
        count = engine.traffic(algorithm, host)
        times = {"setup": 1, "round": int(simulated.n_rounds), "finish": 1}
        for way in ("up", "down"):
            expected = sum(n * getattr(count[stage], way) for stage, n in times.items())
            assert summary[f"bytes_{way}"] == expected
        programs.make_room()
