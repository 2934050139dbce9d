"""Commands of real nodes:

python -m jaxfedmvc.deploy check node.toml
python -m jaxfedmvc.deploy node node.toml --superlink=HOST:PORT --root_certificates=ca.crt
python -m jaxfedmvc.deploy submit job.toml --superlink=HOST:PORT --folder=results
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jaxfedmvc.data.dataset import some
from jaxfedmvc.deploy.holding import load
from jaxfedmvc.deploy.job import Job


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the commands."""
    whole = argparse.ArgumentParser(
        "python -m jaxfedmvc.deploy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check", help="read a node's file and its data, and say what it has"
    )
    check.add_argument("file", type=Path)
    node = commands.add_parser("node", help="connect a node and answer requests")
    node.add_argument("file", type=Path, help="what the node holds and agrees to")
    node.add_argument("--auth_key", type=Path, help="private key of the node, in OpenSSH's form")
    submit = commands.add_parser("submit", help="run a job on the nodes that are connected")
    submit.add_argument("file", type=Path, help="the job")
    submit.add_argument("--folder", type=Path, default=Path("results"), help="of the results")
    for command in (node, submit):
        command.add_argument("--superlink", type=_address, required=True, help="HOST:PORT")
        command.add_argument("--root_certificates", type=Path, help="PEM; no TLS without it")
    return whole


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed is HOST:PORT")
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; bad input ends it with one line on stderr."""
    asked = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # A line for every look for messages, and for every kind of device that is not there.
    for name in ("httpx", "jax"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        for name in ("file", "auth_key", "root_certificates"):
            path = getattr(asked, name, None)
            if path is not None and not path.is_file():
                raise ValueError(f"{name}: {path} is not there; allowed is a file")
        return {"check": _check, "node": _node, "submit": _submit}[asked.command](asked)
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = "; a job that was submitted goes on, until `flwr stop RUN CONNECTION` ends it"
        print(f"stopped{goes_on * (asked.command == 'submit')}", file=sys.stderr)
        return 1


def _check(asked: argparse.Namespace) -> int:
    holding = load(asked.file)
    has = {"ids": holding.ids is not None, "labels": holding.labels is not None}
    parts = ", ".join(
        f"{name}: {'there' if is_there else 'none'}" for name, is_there in has.items()
    )
    print(f"client {holding.client}: {holding.n_rows} rows; {parts}")
    hashed = holding.hashed_columns()
    for v, x in sorted(holding.views.items()):
        # Of a column in other units than elsewhere nobody but its operator can know.
        print(f"  view {v}: {x.shape[1]} features, from {x.min():.4g} to {x.max():.4g}")
        if names := holding.columns.get(v):
            # Nodes compare hashes alone: by these their operators find out whose is another.
            print(f"    columns: {some(names)} (hash {hashed[v][:8]})")
            if holding.ranges is not None and (outside := ((x < 0) | (x > 1)).sum(axis=0)).any():
                most = int(outside.argmax())
                print(
                    f"    outside their ranges: {int(outside.sum())} of {x.size} numbers, most in"
                    f" {names[most]} ({int(outside[most])})"
                )
    print(f"  agrees to {', '.join(holding.policy.methods)}; states in {holding.folder}")
    if holding.n_rows < holding.policy.least_rows:
        raise ValueError(
            f"agrees.least_rows: got {holding.policy.least_rows}, where this node has"
            f" {holding.n_rows} rows; it would take part in nothing"
        )
    return 0


def _node(asked: argparse.Namespace) -> int:
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    import jax

    from jaxfedmvc.deploy import flower
    from jaxfedmvc.deploy.node import Node

    flower.require_flower()
    certificates = asked.root_certificates and asked.root_certificates.read_bytes()
    node = Node(asked.file)
    # A node that starts again finds its programs compiled.
    jax.config.update("jax_compilation_cache_dir", str(node.holding.folder.resolve() / "programs"))

    # Wherever it is: what was answered lies in the folder, and Flower tries again and again without
    # an end to reach a SuperLink that is not there.
    def end(number: int, _: object) -> None:
        logging.info("client %d: ends (%s)", node.holding.client, signal.Signals(number).name)
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    logging.info(
        "client %d: connecting to %s %s",
        node.holding.client,
        asked.superlink,
        "without TLS" if certificates is None else "with TLS",
    )
    flower.serve(
        node,
        asked.superlink,
        root_certificates=certificates,
        key_file=asked.auth_key,
    )
    return 0


def _submit(asked: argparse.Namespace) -> int:
    """Submits the app that runs the job with Flower's own command; 0 if the job is finished."""
    from jaxfedmvc.deploy import flower

    flower.require_flower()
    job = Job.from_toml(asked.file)  # so that what is wrong with it is said here
    job.check_folder(asked.folder / job.name)  # another job's summary would pass for this one's
    with tempfile.TemporaryDirectory() as home:
        text = "[superlink]\ndefault = 'job'\n[superlink.job]\n"
        text += f"address = {_quoted(asked.superlink)}\n"
        if asked.root_certificates is None:
            text += "insecure = true\n"
        else:
            text += f"root-certificates = {_quoted(asked.root_certificates.resolve())}\n"
        Path(home, "config.toml").write_text(text, encoding="utf-8")
        given = Path(home, "run.toml")
        text = (
            f"job = {_quoted(asked.file.resolve())}\nfolder = {_quoted(asked.folder.resolve())}\n"
        )
        given.write_text(text, encoding="utf-8")
        command = [str(Path(sys.executable).with_name("flwr")), "run", str(_APP), "job"]
        code = subprocess.run(
            [*command, "--run-config", str(given), "--stream"],
            env=os.environ | {"FLWR_HOME": home, "FLWR_TELEMETRY_ENABLED": "0"},
            check=False,
        ).returncode
    if (asked.folder / job.name / "summary.json").exists():
        return code
    # Flower says 0 whatever became of the run, and no word of a server that was killed.
    print(
        f"job {job.name}: is not finished; submit it again, with the same folder, to go on after"
        " its last exchange",
        file=sys.stderr,
    )
    return code or 1


def _quoted(value: object) -> str:
    """Returns a string of TOML, which has no escapes for halves of a character as JSON has."""
    return json.dumps(str(value), ensure_ascii=False)


_APP = Path(__file__).parent / "app"


if __name__ == "__main__":
    sys.exit(main())
