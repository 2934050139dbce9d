"""Flower as the transport: `serve` is a node, `Asker` the server's side.

    serve(Node("node.toml"), "127.0.0.1:8000")            # on every client's machine
    app = server_app()                                    # in the app that is submitted

A node here is one process that stays: it speaks to the SuperLink as a SuperNode does and hands
every request to `Node.handle`. It never fetches the app that was submitted and runs nothing of it,
so that whoever may submit jobs can ask no more than a node's own code answers. Programs stay
compiled.

Written for Flower 1.41, of whose modules that of a SuperNode's connection is not public.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxfedmvc import files
from jaxfedmvc.deploy.job import Job
from jaxfedmvc.deploy.node import Node
from jaxfedmvc.deploy.server import Server, Stopped

_LOG = logging.getLogger(__name__)
# Seconds between two looks for messages: short while a job runs, longer the longer nothing comes.
_POLL, _IDLE_POLL = 0.1, 2.0
# Why a SuperLink takes no node, by the status of its answer.
_REFUSALS = {
    401: "its clock is more than five seconds ahead of the SuperLink's, or five minutes behind, or"
    " its registration was taken back",
    412: "it is not registered there, or a node with it was there in the last minute; then start"
    " this one again",
}
# Of products, everywhere: nodes on accelerators would round what others, and simulations, do not.
PRECISION = "float32"


def require_flower() -> None:
    """Checks that Flower is installed.

    Raises:
      ImportError: Says how to install it.
    """
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "real nodes need Flower: python -m pip install 'jaxfedmvc[flower]'"
        ) from error


def _message(body: bytes, **options: Any) -> Any:
    from flwr.app import ConfigRecord, Message, RecordDict

    return Message(RecordDict({"jaxfedmvc": ConfigRecord({"body": body})}), **options)


def _body(message: Any) -> bytes | None:
    """Returns the bytes of a message; None where there are none."""
    if not message.has_content() or "jaxfedmvc" not in message.content.config_records:
        return None
    body = message.content.config_records["jaxfedmvc"].get("body")
    return body if isinstance(body, bytes) else None


# --- The server's side ----------------------------------------------------------------------------


class Asker:
    """Nodes behind a SuperLink, as `server.Transport` has them."""

    def __init__(self, grid: Any) -> None:
        """Takes the grid that Flower hands to an app."""
        self._grid = grid

    def nodes(self) -> Collection[int]:
        """Returns the ids of the connected nodes."""
        return list(self._grid.get_node_ids())

    def ask(self, requests: Mapping[int, bytes], seconds: float) -> dict[int, bytes]:
        """Sends a request to each node; returns the replies that came in time."""
        if not requests:
            return {}
        messages = [
            _message(body, dst_node_id=node, message_type="query", ttl=seconds)
            for node, body in requests.items()
        ]
        asked = dict(zip(self._grid.push_messages(messages), requests, strict=True))
        left, found = {i for i in asked if i}, {}
        ends = time.monotonic() + seconds
        while left and time.monotonic() < ends:
            for reply in self._grid.pull_messages(list(left)):
                identity = reply.metadata.reply_to_message_id
                left.discard(identity)
                body = None if reply.has_error() else _body(reply)
                if body is not None:
                    found[asked[identity]] = body
                else:
                    _LOG.warning("node %d: no answer (%s)", asked[identity], _reason(reply))
            if left:
                time.sleep(_POLL)
        return found


def _reason(reply: Any) -> str:
    return str(reply.error.reason) if reply.has_error() else "its message is empty"


def server_app() -> Any:
    """Returns the app that runs a job: `flwr run` gives it `job` and `folder` in its run config."""
    require_flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        given = context.run_config
        name = str(given["job"])
        try:
            job = Job.from_toml(name)
            name = job.name
            folder = Path(str(given["folder"])) / name
            with jax.default_matmul_precision(PRECISION):
                Server(job, Asker(grid), folder, say=_say).run()
        except (Stopped, ValueError, OSError, ImportError) as error:
            # And returns: Flower drops the last lines of an app that exits, and adds a stack of its
            # own calls to those of one that raises. `submit` sees that there is no summary.
            _say(f"job {name}: stopped: {error}")

    return app


def _say(line: str) -> None:
    print(line, flush=True)


# --- A node ---------------------------------------------------------------------------------------


def serve(
    node: Node,
    superlink: str,
    *,
    root_certificates: bytes | None = None,
    key_file: str | Path | None = None,
) -> None:
    """Connects a node to a SuperLink and answers its requests until the process ends.

    Args:
      node: The node.
      superlink: "host:port".
      root_certificates: Of the SuperLink's certificate, PEM; None connects without TLS.
      key_file: The node's private key in OpenSSH's form, which the SuperLink's operator registered;
        a new identity without one.

    Raises:
      ValueError: The key is no ECDSA key, has a password, or other users may read it.
      OSError: It cannot be read; or the connection ended.
    """
    require_flower()
    from flwr.supercore.run import RunNotRunningException

    with _connection(superlink, root_certificates, key_file) as connection:
        identity, receive, send, _, _, pull, push, confirm = connection
        _LOG.info("client %d: connected as node %d", node.holding.client, identity)
        last = time.monotonic()
        while True:
            received = receive()
            if received is None:
                idle = time.monotonic() - last
                time.sleep(min(max(_POLL, idle / 50), _IDLE_POLL))
                continue
            try:
                message, tree = received
                with jax.default_matmul_precision(PRECISION):
                    _answer(node, message, tree, send, pull, push, confirm)
            except RunNotRunningException:  # no Exception: it would end the node
                _LOG.warning("client %d: a job ended before it was answered", node.holding.client)
            except Exception:  # a message that is lost is asked for again
                _LOG.exception("client %d: a message was lost", node.holding.client)
            last = time.monotonic()
    # Flower's connection takes what is raised within it, and logs it.
    raise ConnectionError(f"superlink: the connection to {superlink} ended; see above")


@contextlib.contextmanager
def _connection(
    superlink: str, root_certificates: bytes | None, key_file: str | Path | None
) -> Iterator[Any]:
    from flwr.supernode.fleet_http_connection import http_request_response

    keys = None if key_file is None else _keys(Path(key_file))
    try:
        with http_request_response(
            superlink, root_certificates is None, root_certificates, keys
        ) as connection:
            yield connection
    except SystemExit as ends:
        # Flower says the same of a node that was killed as of one that nobody registered, and
        # nothing at all of a wrong signature: it interrupts its own process.
        response = getattr(ends.__context__, "response", None)
        why = _REFUSALS.get(getattr(response, "status_code", 0))
        if why is None:
            raise
        _LOG.error("superlink: %s takes no node with this key: %s", superlink, why)
        raise SystemExit(1) from ends


def _keys(file: Path) -> tuple[Any, Any]:
    """Returns a node's key pair, as Flower takes them."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        private = load_ssh_private_key(file.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"auth_key: {file} is no private key without a password") from error
    if not isinstance(private, EllipticCurvePrivateKey):
        raise ValueError(f"auth_key: {file} is no ECDSA key")
    files.check_private(file, "auth_key")
    return private, private.public_key()


def _answer(
    node: Node, message: Any, tree: Any, send: Any, pull: Any, push: Any, confirm: Any
) -> None:
    """Fetches one message, and sends what the node answers."""
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        pull_and_inflate_object_from_tree,
        push_objects,
    )

    run_id = message.metadata.run_id
    whole = pull_and_inflate_object_from_tree(
        tree,
        lambda identity: pull(run_id, identity),
        lambda identity: confirm(run_id, identity),
        return_type=Message,
    )
    whole.metadata.__dict__["_message_id"] = tree.object_id
    began = time.monotonic()
    body = _body(whole)
    answer = node.handle(b"" if body is None else body)
    reply = _message(answer, reply_to=whole)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with no_object_id_recompute():
        wanted, session = send(reply, get_object_tree(reply), time.monotonic() - began)
        push_objects(
            get_all_nested_objects(reply),
            lambda identity, content: push(run_id, session, identity, content),
            object_ids_to_push=wanted,
        )
