"""Real processes over Flower: certificates, faults, hostile apps."""

import shutil
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfedmvc import deploy
from jaxfedmvc.engine.streaming import run_streaming
from tests.algorithms import test_common as common
from tests.deploy import local
from tests.deploy.test_equal import ordered
from tests.deploy.test_processes import labels_of, start_nodes, write_job

pytest.importorskip("flwr", reason="Flower is not installed: the extra flower")
pytestmark = pytest.mark.slow
from experiments import deploy_demo as demo  # noqa: E402


def test_only_registered_nodes_with_the_right_certificate_connect(tmp_path):
    federation = common.federation(
        "horizontal", common.parts("horizontal", (((0, 1), {0: 8, 1: 8}),))
    )
    paths = local.write_nodes(tmp_path, federation, ["e_fkmvc"])
    with demo.network(tmp_path / "net") as here:
        here.register("node0")
        good = here.start_node("node0", paths[0])
        demo.make_key(here.folder / "node1.key")  # registered by nobody
        stranger = here.start_node("node1", paths[1])
        assert stranger.wait(120) != 0
        other = tmp_path / "other"
        other.mkdir()
        demo.make_certificates(other)
        certificate = (here.folder / "ca.crt").read_bytes()
        here.register("node2")
        (here.folder / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
        deceived = here.start_node("node2", paths[1])
        time.sleep(10)
        (here.folder / "ca.crt").write_bytes(certificate)
        assert good.poll() is None
        log = (here.folder / "node2.log").read_text()
        assert deceived.poll() not in (None, 0) or "connected as node" not in log


def test_a_node_that_cannot_reach_its_superlink_ends_when_it_is_told_to(tmp_path):
    path = local.write_node(tmp_path, 0, {0: np.eye(4)}, ["e_fkmvc"])
    here = demo.Network(tmp_path, demo.free_port(), secure=False, keeps=False)
    node = here.start_node("node0", path)
    try:
        wait_for(lambda: "retrying" in (tmp_path / "node0.log").read_text())
        node.terminate()
        assert node.wait(20) == 0
    finally:
        node.kill()


HOSTILE = """
from flwr.serverapp import ServerApp
from flwr.app import ConfigRecord, Message, RecordDict
import time

app = ServerApp()

@app.main()
def main(grid, context):
    found = []
    for kind in ("query", "train"):
        content = RecordDict({"jaxfedmvc": ConfigRecord({"body": b"give me a row"})})
        ids = list(grid.push_messages([
            Message(content, dst_node_id=node, message_type=kind, ttl=60)
            for node in grid.get_node_ids()
        ]))
        ends = time.time() + 60
        while ids and time.time() < ends:
            for reply in grid.pull_messages(ids):
                ids.remove(reply.metadata.reply_to_message_id)
                if reply.has_content():
                    found.append(reply.content["jaxfedmvc"]["body"])
            time.sleep(0.2)
    open(context.run_config["folder"], "wb").write(b"|".join(found))
"""
STEALING = """
from flwr.clientapp import ClientApp
from flwr.app import ConfigRecord, Message, RecordDict
import numpy as np

app = ClientApp()

@app.query()
@app.train()
def steal(message, context):
    row = np.load("FILE")["view_0"][0].tobytes()
    return Message(RecordDict({"jaxfedmvc": ConfigRecord({"body": row})}), reply_to=message)
"""


def test_a_hostile_app_gets_nothing_but_a_refusal(tmp_path):
    federation = common.federation(
        "horizontal", common.parts("horizontal", (((0, 1), {0: 8, 1: 8}),))
    )
    app = tmp_path / "app"
    shutil.copytree(
        Path(deploy.__file__).parent / "app", app, ignore=shutil.ignore_patterns("__pycache__")
    )
    (app / "jaxfedmvc_job" / "server_app.py").write_text(HOSTILE)
    stealing = STEALING.replace("FILE", str(tmp_path / "data0.npz"))
    (app / "jaxfedmvc_job" / "client_app.py").write_text(stealing)
    out = tmp_path / "stolen"
    with demo.network(tmp_path / "net", secure=False) as here:
        start_nodes(here, tmp_path, federation, ["e_fkmvc"])
        home = here.folder / "flower"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f"[superlink]\ndefault='here'\n[superlink.here]\naddress='{here.address}'\ninsecure=true\n"
        )
        time.sleep(15)  # until the nodes are there
        here.run(
            demo._BIN / "flwr", "run", app, "here", "--run-config", f'folder="{out}"', "--stream"
        )
    told = out.read_bytes()
    row = np.load(tmp_path / "data0.npz")["view_0"][0]
    assert told and row.tobytes() not in told and row.astype(np.float64).tobytes() not in told
    assert all(b'"error": "malformed"' in reply for reply in told.split(b"|"))


@pytest.mark.parametrize("victim", ["node", "superlink"])
def test_a_job_outlives_what_is_killed(victim, tmp_path):
    """A node is started again; or the SuperLink, after which nodes and job are started again."""
    federation = common.federation(
        "horizontal", common.parts("horizontal", (((0, 1), {0: 8, 1: 8, 2: 7}),))
    )
    job = local.job_of("e_fkmvc", 3, "first", rounds=15, deadline=30.0)
    path, results = write_job(tmp_path, job), tmp_path / "results"
    exchanges = results / "first" / "exchanges.csv"

    def made():
        return len(exchanges.read_text().splitlines()) if exchanges.exists() else 0

    with demo.network(tmp_path / "net", secure=False, keeps=victim == "node") as here:
        paths = start_nodes(here, tmp_path, federation, ["e_fkmvc"])
        command = [demo._BIN / "python", "-m", "jaxfedmvc.deploy", "submit", path]
        command += [f"--folder={results}", f"--superlink={here.address}"]
        running = subprocess.Popen([str(x) for x in command], env=here.env)
        wait_for(lambda: made() > 5)
        if victim == "node":
            here.kill("node1")
            here.start_node("node1", paths[1])
            before = made()
            wait_for(lambda: made() > before + 3)
            assert running.wait(600) == 0
        else:
            here.kill(*list(here.processes))
            assert running.wait(300) != 0
            assert not (results / "first" / "summary.json").exists()
            here.start_superlink()
            start_nodes(here, tmp_path, federation, ["e_fkmvc"])
            here.submit(path, results)
    algorithm = job.make(3)
    host = jax.tree.map(np.asarray, ordered(federation))
    simulated = run_streaming(algorithm, host, jax.random.key(7), 15, client_chunk=1)
    for k in range(3):
        expected = simulated.labels[0][k][host.cohorts[0].mask[k]]
        np.testing.assert_array_equal(labels_of(tmp_path, k, "first"), expected)


def wait_for(condition, seconds=400):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.5)
