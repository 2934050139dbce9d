"""Three hospitals and a late one on this machine, over Flower with certificates:
`python -m experiments.deploy_demo`.

Every hospital is a process with its own file, its own key and its own settings; the fourth one
comes when the job is finished. Certificates are made for this run and are worth nothing elsewhere.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from experiments.lib.command import checked

_BIN = Path(sys.executable).parent
_NODE = """client = {client}
data = "hospital{client}.npz"
folder = "hospital{client}"

[agrees]
methods = ["e_fkmvc"]
least_clients = 3
share_counts = true
share_information = true
"""
_JOB = """name = "demo"
method = "e_fkmvc"
clients = 3
rounds = 5

[settings]
n_clusters = 10
"""


# --- Certificates and keys ------------------------------------------------------------------------


def make_certificates(folder: Path) -> None:
    """Writes ca.crt, server.pem and server.key, for 127.0.0.1 and a day."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    ca, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    def signed(name: str, key: Any, is_ca: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        built = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named("demo ca"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(ca, hashes.SHA256())
        )
        return built.public_bytes(serialization.Encoding.PEM)

    (folder / "ca.crt").write_bytes(signed("demo ca", ca, is_ca=True))
    (folder / "server.pem").write_bytes(signed("localhost", server, is_ca=False))
    (folder / "server.key").write_bytes(
        server.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def make_key(file: Path) -> None:
    """Writes a node's key pair in OpenSSH's form: `file` and `file.pub`."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    file.write_bytes(private)
    file.chmod(0o600)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    file.with_suffix(".pub").write_bytes(public + b"\n")


# --- Processes ------------------------------------------------------------------------------------


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of Flower's commands: its own home, no calls elsewhere."""
    return os.environ | {
        "FLWR_HOME": str(folder / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "PATH": f"{_BIN}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nobody uses."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Network:
    """A SuperLink on this machine, and nodes that connect to it.

    Attributes:
      address: Of the SuperLink, "host:port".
      folder: Where everything lies.
      secure: Whether with TLS and keys of nodes.
      keeps: Whether the SuperLink's database is a file.
      env: The environment of all processes.
      processes: Those that were started, by name.
    """

    def __init__(self, folder: Path, port: int, secure: bool, keeps: bool) -> None:
        """Starts nothing yet."""
        self.folder, self.address = folder, f"127.0.0.1:{port}"
        self.secure, self.keeps = secure, keeps
        self.env = environment(folder)
        self.processes: dict[str, subprocess.Popen] = {}

    def _start(self, name: str, command: Sequence[Any]) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(part) for part in command], env=self.env, stdout=log, stderr=log
            )
        return self.processes[name]

    def start_superlink(self) -> None:
        """Starts the SuperLink, and waits until it answers.

        Raises:
          OSError: It ends, or does not answer in two minutes.
        """
        host, port = self.address.split(":")
        command: list[Any] = [_BIN / "flower-superlink", "--host", host, "--port", port]
        command += ["--disable-runtime-dependency-installation"]
        if self.keeps:
            command += ["--database", self.folder / "superlink.db"]
        if self.secure:
            command += ["--ssl-ca-certfile", self.folder / "ca.crt"]
            command += ["--ssl-certfile", self.folder / "server.pem"]
            command += ["--ssl-keyfile", self.folder / "server.key", "--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        process = self._start("superlink", command)
        ends = time.monotonic() + 120
        while time.monotonic() < ends and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
                return
            time.sleep(0.2)
        raise OSError(f"the SuperLink does not start; see {self.folder / 'superlink.log'}")

    def register(self, name: str) -> None:
        """Makes a key for a node, and has the SuperLink's operator register it."""
        make_key(self.folder / f"{name}.key")
        home = self.folder / "flower"
        home.mkdir(exist_ok=True)
        certificate = json.dumps(str(self.folder / "ca.crt"))
        (home / "config.toml").write_text(
            "[superlink]\ndefault = 'here'\n[superlink.here]\n"
            f"address = '{self.address}'\nroot-certificates = {certificate}\n"
        )
        self.run(_BIN / "flwr", "supernode", "register", self.folder / f"{name}.pub", "here")

    def start_node(self, name: str, file: Path, address: str | None = None) -> subprocess.Popen:
        """Starts a node; with `address` it connects to that, and not to the SuperLink itself."""
        command = [sys.executable, "-m", "jaxfedmvc.deploy", "node", file]
        command += [f"--superlink={address or self.address}", *self._certificates()]
        if self.secure:
            command += [f"--auth_key={self.folder / name}.key"]
        return self._start(name, command)

    def submit(self, job: Path, folder: Path, **options: Any) -> subprocess.CompletedProcess:
        """Runs a job to its end."""
        command = [sys.executable, "-m", "jaxfedmvc.deploy", "submit", job, f"--folder={folder}"]
        return self.run(*command, f"--superlink={self.address}", *self._certificates(), **options)

    def run(self, *command: Any, **options: Any) -> subprocess.CompletedProcess:
        """Runs a command to its end."""
        return subprocess.run(
            [str(part) for part in command], env=self.env, **({"check": True} | options)
        )

    def _certificates(self) -> list[str]:
        return [f"--root_certificates={self.folder / 'ca.crt'}"] if self.secure else []

    def kill(self, *names: str) -> None:
        """Ends processes as a power failure would."""
        for name in names:
            process = self.processes.pop(name)
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Stops all processes."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        self.processes.clear()


@contextlib.contextmanager
def network(folder: Path, secure: bool = True, keeps: bool = False) -> Iterator[Network]:
    """Yields a network whose SuperLink runs; stops everything in the end.

    Args:
      folder: Where everything lies.
      secure: Whether with TLS and keys of nodes.
      keeps: Whether the SuperLink's database is a file, which outlives it and costs seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if secure:
        make_certificates(folder)
    made = Network(folder, free_port(), secure, keeps)
    try:
        made.start_superlink()
        yield made
    finally:
        made.stop()


# --- The demonstration ----------------------------------------------------------------------------


def write_hospitals(folder: Path) -> list[Path]:
    """Deals digits out to four hospitals, the last two with one view; returns the nodes' files."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[:640]
    files = []
    for client, rows in enumerate(np.array_split(order, 4)):
        views = {"view_0": pixels[rows, :32] / 16, "view_1": pixels[rows, 32:] / 16}
        if client >= 2:
            del views["view_0"]
        np.savez(folder / f"hospital{client}.npz", labels=labels[rows], **views)
        file = folder / f"hospital{client}.toml"
        file.write_text(_NODE.format(client=client))
        files.append(file)
    return files


def demonstrate(folder: Path) -> None:
    """Runs the job of three hospitals, and then serves the fourth.

    Raises:
      ImportError: Flower is not installed.
    """
    from jaxfedmvc.deploy.flower import require_flower

    require_flower()
    folder.mkdir(parents=True, exist_ok=True)
    files = write_hospitals(folder)
    job, results = folder / "job.toml", folder / "results"
    job.write_text(_JOB)
    with network(folder) as here:
        print(f"the SuperLink listens at {here.address}, with TLS and keys of nodes", flush=True)
        for file in files[:3]:
            here.register(file.stem)
            here.start_node(file.stem, file)
        here.submit(job, results)
        print("\na fourth hospital comes", flush=True)
        here.register(files[3].stem)
        here.start_node(files[3].stem, files[3])
        time.sleep(5)
        here.submit(job, results)
    _report(folder, results / "demo")


def _report(folder: Path, results: Path) -> None:
    summary = json.loads((results / "summary.json").read_text())
    scores = summary["scores"]["pooled"]
    print(
        f"\nlabels against clusters, as counts of {summary['scores']['clients']} hospitals: "
        + (", ".join(f"{name.upper()} {value:.3f}" for name, value in scores.items()))
    )
    told = summary["information"]
    print(f"information, without labels, of {told['clients']}: {told['information']:.3f} nats")
    for client in range(4):
        lines = (folder / f"hospital{client}" / "demo" / "labels.csv").read_text().splitlines()
        print(f"hospital {client}: {len(lines) - 1} rows have clusters, in its own folder")
    print(f"written: {results}/ (summary.json, exchanges.csv, server.npz)")


def _asked(argv: Sequence[str]) -> None:
    """Runs what the command line asks for."""
    folder = Path(flags.FLAGS.folder).resolve()

    def run() -> None:
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"folder: {folder} is not empty; allowed is a new one")
        demonstrate(folder)

    if argv[1:]:
        raise app.UsageError(f"{argv[1]!r} is no flag")
    checked(run)


def main() -> None:
    """Reads the command line."""
    flags.DEFINE_string("folder", "results/deploy-demo", "Where everything is written; a new one.")
    app.run(_asked)


if __name__ == "__main__":
    main()
