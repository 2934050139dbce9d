"""What FMCSC's server sends and keeps: the global models, and their averages, eq. (10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfedmvc.algorithms.fmcsc.client import Update
from jaxfedmvc.algorithms.fmcsc.networks import Autoencoder, Kind, Model, PyTree, branch
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig, FMCSCHyperparams


class ServerState(NamedTuple):
    """What the server keeps.

    Attributes:
      models: The global models by kind: f_g for all views, f_g^v for view v alone, and one for
        every other subset that a client holds.
      centroids: The common centroids [K, d]; zeros before the last exchanges.
      starts: Those of all starts of federated k-means, [starts, K, d]; () where there is one.
      rounds: Rounds that were averaged so far, a scalar; () where all are averaged alike.
      taught: `teaching.Taught` of each kind of partial clients; () where nothing is taught.
    """

    models: dict[Kind, Model]
    centroids: jax.Array
    starts: jax.Array | tuple[()] = ()
    rounds: jax.Array | tuple[()] = ()
    taught: PyTree = ()


# --- What is sent ---------------------------------------------------------------------------------


def send_model(server: ServerState, view_ids: Kind) -> Model:
    """Sends the global model of a client's views."""
    return server.models[view_ids]


def send_start(config: FMCSCConfig, server: ServerState, view_ids: Kind) -> Model | tuple[()]:
    """Sends what is pre-trained from: nothing to partial clients that would train it in vain."""
    if config.takes_branches and not _is_full(server, view_ids):
        return ()
    return send_model(server, view_ids)


def send_all(server: ServerState, view_ids: Kind) -> dict[Kind, Model]:
    """Sends all global models."""
    return server.models


def send_own(server: ServerState, view_ids: Kind) -> dict[Kind, Model]:
    """Sends f_g to clients with all views, and nothing to others."""
    return {view_ids: server.models[view_ids]} if _is_full(server, view_ids) else {}


def send_models(config: FMCSCConfig, server: ServerState, view_ids: Kind) -> dict[Kind, Model]:
    """Sends what will be trained: all global models to multi-view clients, their own to others."""
    is_full = _is_full(server, view_ids)
    if not (is_full or config.partial_rounds):
        return {}
    if is_full and "B" in config.components:
        return server.models
    return {view_ids: server.models[view_ids]}


def _is_full(server: ServerState, kind: Kind) -> bool:
    return bool(server.models[kind].view_heads)


# --- What is made of the messages -----------------------------------------------------------------


def average_autoencoders(
    config: FMCSCConfig,
    key: jax.Array,
    server: ServerState,
    messages: tuple[dict[int, Autoencoder], ...],
    counts: tuple[jax.Array, ...],
) -> tuple[ServerState, dict]:
    """Gives every global model the mean autoencoders of the clients that hold its views.

    As in eq. (10), multi-view clients count for the partial models too.
    """
    models = {}
    for kind, model in server.models.items():
        sums = [
            ({v: message[v] for v in kind}, count)
            for message, count in zip(messages, counts, strict=True)
            if set(kind) <= set(message)
        ]
        models[kind] = model._replace(autoencoders=average(sums, model.autoencoders))
    return with_models(config, server, models), {}


def adopt(
    config: FMCSCConfig,
    key: jax.Array,
    server: ServerState,
    messages: tuple[dict[Kind, Model]],
    weights: tuple[jax.Array],
) -> tuple[ServerState, dict]:
    """Takes over the models of the leader, whose message is the only one."""
    models = jax.tree.map(lambda x: x[0], messages[0])
    return with_models(config, server, {**server.models, **models}), {}


def aggregate(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    ends_round: bool,
    key: jax.Array,
    server: ServerState,
    messages: tuple[Update, ...],
    counts: tuple[jax.Array, ...],
) -> tuple[ServerState, dict]:
    """Averages models of each kind by their weights, eq. (10); what nobody sent stays as it was.

    With `settle_rounds` the global models go a share of the way to the average, see `settled`; a
    round counts as made by the last of its exchanges.
    """
    models = {
        kind: average(
            [(m.models[kind], m.weights[kind]) for m in messages if kind in m.models], model
        )
        for kind, model in server.models.items()
    }
    if hyper.settle_rounds is not None:
        made = server.rounds + 1  # type: ignore[operator]
        models = settled(hyper.settle_rounds, made, server.models, models)
        server = server._replace(rounds=made if ends_round else server.rounds)
    return with_models(config, server, models), {}


def settled(settle_rounds: jax.Array | float, made: jax.Array, old: PyTree, new: PyTree) -> PyTree:
    """Moves models from `old` towards `new`: the whole way, and less in each round that follows.

    In round `made`, counted from 1, by the share min(1, (settle_rounds / made)^2). These add up to
    less than 2 settle_rounds + 1 whole steps, however many rounds there are: contrast that goes on
    for too long takes clusters apart. Not in the paper.
    """
    share = jnp.minimum(1.0, (settle_rounds / made) ** 2)
    return jax.tree.map(lambda a, b: a + share * (b - a), old, new)


def average(sums: Sequence[tuple[PyTree, jax.Array]], otherwise: PyTree) -> PyTree:
    """Computes eq. (10): the sum of all cohorts' sums over the sum of all their weights.

    Args:
      sums: For each cohort the sum of its clients' models times their weights, and the sum of the
        weights.
      otherwise: What is returned where the weights add up to zero.
    """
    if not sums:
        return otherwise
    weight = sum((w for _, w in sums), start=jnp.zeros(()))
    safe = jnp.where(weight > 0, weight, 1.0)

    def mean(old: jax.Array, *sums: jax.Array) -> jax.Array:
        return jnp.where(weight > 0, sum(sums[1:], start=sums[0]) / safe, old)

    return jax.tree.map(mean, otherwise, *(s for s, _ in sums))


def with_models(config: FMCSCConfig, server: ServerState, models: dict[Kind, Model]) -> ServerState:
    """Returns the server with these global models; branches, if on, follow the new f_g."""
    if config.takes_branches:
        (full,) = (kind for kind, model in models.items() if model.view_heads)
        models = {**{(v,): branch(models[full], v) for v in full}, full: models[full]}
    return server._replace(models=models)
