"""Real messages: MGCD's in the forms that they may travel in, and those of any other method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfedmvc import engine, messages
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.federation import Federation
from jaxfedmvc.messages import codecs


class Form(NamedTuple):
    """A form of a message.

    Attributes:
      dense: Whether graphs are arrays, and not factors.
      change: What is done to messages on their way.
    """

    dense: bool
    change: Callable[[Phase], Phase]


def forms_of_graphs(k: int) -> dict[str, Form]:
    """Returns all forms by name; graphs of neighbours have `k` edges a row."""

    def nearest(phase: Phase) -> Phase:
        return messages.transformed(phase, messages.nearest_only(k))

    def coded(codec: messages.Codec) -> Form:
        return Form(True, lambda phase: messages.coded(phase, codec))

    def nearest_coded(codec: messages.Codec) -> Form:
        return Form(True, lambda phase: messages.coded(nearest(phase), codec))

    def noisy(level: float) -> Form:
        return Form(True, lambda phase: messages.transformed(phase, relative_noise(level)))

    return {
        "factors": Form(False, lambda phase: phase),
        "dense": Form(True, lambda phase: phase),
        f"top {k}": coded(codecs.top_k_rows(k)),
        f"nearest {k}": nearest_coded(codecs.top_k_rows(k)),
        "8 bits": coded(codecs.quantised(8)),
        "2 bits": coded(codecs.quantised(2)),
        "noise 1x": noisy(1.0),
        "noise 10x": noisy(10.0),
        "response 8": nearest_coded(codecs.randomised_response(8.0)),
        "response 4": nearest_coded(codecs.randomised_response(4.0)),
    }


def relative_noise(level: float) -> messages.transforms.Transform:
    """Returns Gaussian noise of `level` times the root mean square of a message's entries.

    A scale that follows the data is no mechanism of differential privacy.
    """

    def transform(key: jax.Array, message: jax.Array, sent: Any) -> jax.Array:
        scale = level * jnp.sqrt(jnp.mean(message**2))
        return messages.gaussian_noise(scale)(key, message, sent)

    return transform


def recording(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    """Returns MGCD whose server keeps what it was sent, in its info; phases compiled one by one."""
    (prepare,), (exchange,) = algorithm.setup, algorithm.round

    def server(key: jax.Array, state: Any, sent: Any, weights: Any) -> Any:
        state, info = exchange.server(key, state, sent, weights)
        return state, info | {"messages": sent}

    return algorithm._replace(
        setup=(prepare._replace(client=jax.jit(prepare.client)),),
        round=(exchange._replace(server=jax.jit(server)),),
    )


def overheard(phase: Phase) -> Phase:
    """Returns an exchange whose clients' info holds what they were sent, and their messages."""

    def client(key: jax.Array, sent: Any, state: Any, client: Any) -> Any:
        state, message, info = phase.client(key, sent, state, client)
        # Who has nothing to report says so by ().
        return state, message, dict(info) | {"sent": sent, "message": message}

    return phase._replace(client=client)


def in_form(
    algorithm: FederatedAlgorithm, form: Form
) -> tuple[FederatedAlgorithm, FederatedAlgorithm]:
    """Returns a recording algorithm with messages of this form, and one without its server.

    The second is what somebody has who runs the clients' public code. All forms share the compiled
    server, and the two algorithms the compiled clients.
    """

    def keep(key: jax.Array, state: Any, sent: Any, weights: Any) -> Any:
        return state, {"messages": sent}

    (phase,) = algorithm.round
    client = jax.jit(form.change(phase).client)
    federated, clients_alone = (
        algorithm._replace(round=(form.change(p)._replace(client=client),))
        for p in (phase, phase._replace(server=keep))
    )
    return federated, clients_alone


class Recorded(NamedTuple):
    """A run that was read along.

    Attributes:
      messages: Each client's of the first round.
      latents: Each client's latent vectors Z [n, d_v].
      labels: The final clusters [n].
    """

    messages: list[Any]
    latents: list[jax.Array]
    labels: jax.Array


def record(
    algorithm: FederatedAlgorithm, federation: Federation, key: jax.Array, rounds: int = 1
) -> Recorded:
    """Runs MGCD stage by stage."""
    state = engine.start(algorithm, federation, key)
    state, _ = engine.setup(algorithm, federation, key, state)
    received = []
    for r in range(rounds):
        state, info = engine.one_round(algorithm, federation, key, state, r)
        received.append(info[0]["server"]["messages"])
        if algorithm.done(state.server):  # type: ignore[misc]
            break
    first = [jax.tree.map(lambda x: x[0], message) for message in received[0]]
    return Recorded(first, [s.latent[0] for s in state.clients], state.server.clusters.labels)
