"""Bytes on the wire and seconds of an exchange over Flower: `python -m benchmarks.deploy`.

A SuperLink and nodes, each a process of its own, on this machine. Every node connects through a
proxy of its own that counts what passes, so that the bytes are those of the node's line: Flower's
headers, signatures and acknowledgements, HTTP, and the looks for messages in between; TLS too with
--secure. Beside them stands what an exchange counts, the arrays alone. The first exchanges compile
and are left out.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from absl import flags

from benchmarks import commands
from benchmarks.commands import define_list, whole
from experiments import deploy_demo as demo

FLAGS = flags.FLAGS
flags.DEFINE_integer("nodes", 4, "Nodes.", lower_bound=1)
flags.DEFINE_integer("rounds", 8, "Rounds of each job.", lower_bound=3)
define_list("hidden", [16, 128, 512], "Widths of FMCSC's networks, a job each.", whole(1))
flags.DEFINE_boolean("secure", False, "With TLS and keys of nodes.")
flags.DEFINE_string("json", None, "Also write the numbers to this file.")

ROWS, WIDTHS = 32, (64, 48)


class Proxy:
    """Passes bytes on to a SuperLink, and counts them.

    Attributes:
      port: Where it listens.
      up, down: Bytes from the node and to it.
    """

    def __init__(self, target: str) -> None:
        """Listens at once."""
        host, port = target.split(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.up = self.down = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._target)
            for pair, way in (((near, far), "up"), ((far, near), "down")):
                threading.Thread(target=self._pass, args=(*pair, way), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 16):
                setattr(self, way, getattr(self, way) + len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one side is gone


def write_nodes(folder: Path) -> list[Path]:
    """Writes the files of nodes with two views each."""
    rng, files = np.random.default_rng(0), []
    for client in range(FLAGS.nodes):
        views = {f"view_{v}": rng.random((ROWS, d)) for v, d in enumerate(WIDTHS)}
        np.savez(folder / f"node{client}.npz", **views)  # type: ignore[arg-type]
        file = folder / f"node{client}.toml"
        file.write_text(
            f'client = {client}\ndata = "node{client}.npz"\nfolder = "node{client}"\n'
            '[agrees]\nmethods = ["fmcsc"]\nleast_clients = 1\n'
        )
        files.append(file)
    return files


def write_job(folder: Path, width: int) -> Path:
    """Writes a job whose messages are models of this width."""
    file = folder / f"width{width}.toml"
    file.write_text(
        f'name = "width{width}"\nmethod = "fmcsc"\nclients = {FLAGS.nodes}\n'
        f"rounds = {FLAGS.rounds}\n[settings]\nn_clusters = 3\nhidden = [{width}]\n"
        "pretrain_epochs = 1\nlocal_epochs = 1\ndistill_epochs = 1\nn_init = 1\n"
    )
    return file


def measured(here: demo.Network, job: Path, proxies: list[Proxy]) -> dict[str, float]:
    """Runs a job; returns the medians over the rounds but the first two, for one node."""
    results = here.folder / "results"
    file = results / job.stem / "exchanges.csv"
    command = [sys.executable, "-m", "jaxfedmvc.deploy", "submit", job]
    command += [f"--folder={results}", f"--superlink={here.address}"]
    command += [f"--root_certificates={here.folder / 'ca.crt'}"] if FLAGS.secure else []
    running = subprocess.Popen([str(x) for x in command], env=here.env, stdout=subprocess.DEVNULL)
    seen: list[tuple[int, int]] = []  # bytes of all nodes by exchange
    while running.poll() is None:
        made = len(file.read_text().splitlines()) - 1 if file.exists() else 0
        while len(seen) < made:
            seen.append((sum(p.up for p in proxies), sum(p.down for p in proxies)))
        time.sleep(0.01)
    if running.returncode:
        raise RuntimeError(f"the job failed; see the logs in {here.folder}")
    rows = np.genfromtxt(file, delimiter=",", names=True, dtype=None, encoding="utf-8")
    # The last ones may have been made after the last look.
    stages = list(zip(rows["stage"], rows["round"], strict=True))[: len(seen)]
    rounds = [i for i, (stage, r) in enumerate(stages) if stage == "round" and r > 1 and i]
    found: dict[str, float] = {}
    for k, way in enumerate(("up", "down")):
        passed = [(seen[i][k] - seen[i - 1][k]) / len(proxies) for i in rounds]
        counted = [rows[f"bytes_{way}"][i] / len(proxies) for i in rounds]
        found |= {f"counted_{way}": statistics.median(counted)}
        found |= {f"wire_{way}": statistics.median(passed)}
    return found | {"seconds": statistics.median(float(rows["seconds"][i]) for i in rounds)}


def main() -> None:
    """Measures and prints."""
    write = commands.results_to(FLAGS.json)
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_nodes(folder)
        with demo.network(folder / "net", secure=FLAGS.secure) as here:
            proxies = []
            for file in files:
                proxies.append(Proxy(here.address))
                if FLAGS.secure:
                    here.register(file.stem)
                here.start_node(file.stem, file, f"127.0.0.1:{proxies[-1].port}")
            for width in FLAGS.hidden:
                found[width] = measured(here, write_job(folder, width), proxies)
    print(f"one exchange, one node of {FLAGS.nodes}, medians over rounds")
    print("width  counted up     wire up   counted down   wire down   seconds")
    for width, f in found.items():
        print(
            f"{width:5d} {f['counted_up']:11.0f} {f['wire_up']:11.0f} {f['counted_down']:14.0f}"
            f" {f['wire_down']:11.0f} {f['seconds']:9.2f}"
        )
    write(found)


if __name__ == "__main__":
    commands.run(main)
