"""What an agent computes: an autoencoder of its view, and soft clusters of what it encodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfedmvc import nn
from jaxfedmvc.algorithms.fcuif.settings import FedDMVCConfig, FedDMVCHyperparams
from jaxfedmvc.clustering.kmeans import kmeans
from jaxfedmvc.losses import masked_mean, mean_squared_error

PyTree = Any


class ClientState(NamedTuple):
    """What an agent keeps.

    Attributes:
      networks: Parameters of its "encoder" and "decoder".
      centroids: mu [c, d], in the space of the encodings.
      guided: Whether it has trained by the server's targets.
      labels: int32 [N], of its rows, once the server has sent them; -1 before.
    """

    networks: dict[str, PyTree]
    centroids: Array
    guided: Array
    labels: Array


class Upload(NamedTuple):
    """What an agent sends; zero in rows that it lacks.

    Attributes:
      z: Its encodings Z [N, d].
      p: Its sharpened soft clusters P [N, c].
    """

    z: Array
    p: Array


class Guidance(NamedTuple):
    """What an agent is sent in a round.

    Attributes:
      centroids: Its view's part of the server's centres, C_v [c, d].
      targets: Rows of the server's P [N, c]; zero where the agent is to follow none.
    """

    centroids: Array
    targets: Array


def xavier_mlps(
    key: Array, shapes: Mapping[Any, tuple[int, Sequence[int]]]
) -> dict[Any, dict[str, PyTree]]:
    """Returns parameters of MLPs as `nn.init_mlps`, from Glorot & Bengio's start with gain 2^0.5.

    Weights are U(-b, b) with b = gain (6 / (fan_in + fan_out))^0.5, where `nn.init_mlps` has
    b = fan_in^-0.5: its draws are rescaled. Biases are zero.
    """

    def rescaled(x: Array) -> Array:
        return x * (12 * x.shape[0] / sum(x.shape)) ** 0.5 if x.ndim == 2 else x

    return jax.tree.map(rescaled, nn.init_mlps(key, shapes))


def init_autoencoder(key: Array, config: FedDMVCConfig, n_features: int) -> dict[str, PyTree]:
    """Draws an autoencoder of a view."""
    return xavier_mlps(
        key,
        {
            "encoder": (n_features, (*config.hidden, config.latent_dim)),
            "decoder": (config.latent_dim, (*config.hidden[::-1], n_features)),
        },
    )


def soft_assignment(z: Array, centroids: Array) -> Array:
    """Computes q_ik ~ 1 / (1 + |z_i - mu_k|^2), rows of sum 1, [N, c]."""
    squares = jnp.sum((z[:, None] - centroids[None]) ** 2, axis=-1)
    q = 1 / (1 + squares)
    return q / jnp.sum(q, axis=1, keepdims=True)


def sharpen(q: Array, mask: Array) -> Array:
    """Computes p_ik ~ q_ik^2 / sum_i q_ik, rows of sum 1; rows outside `mask` are zero."""
    q = jnp.where(mask[:, None], q, 0.0)
    sizes = jnp.sum(q, axis=0, keepdims=True)
    p = q * q / jnp.where(sizes > 0, sizes, 1.0)
    total = jnp.sum(p, axis=1, keepdims=True)
    return p / jnp.where(total > 0, total, 1.0)


def divergence(p: Array, q: Array) -> Array:
    """Computes KL(p_i || q_i) of each row, [n]."""
    return jnp.sum(p * (jnp.log(p + 1e-12) - jnp.log(q + 1e-12)), axis=1)


def pretrain(
    key: Array,
    state: ClientState,
    x: Array,
    mask: Array,
    config: FedDMVCConfig,
    hyper: FedDMVCHyperparams,
) -> tuple[ClientState, Array]:
    """Trains the autoencoder alone, and puts mu where k-means finds clusters; returns losses."""
    key_fit, key_kmeans = jax.random.split(key)

    def loss(networks: PyTree, x: Array, mask: Array) -> Array:
        decoded = nn.apply(networks["decoder"], nn.apply(networks["encoder"], x))
        return mean_squared_error(decoded, x, mask)

    networks, losses = nn.fit(
        key_fit,
        state.networks,
        loss,
        x,
        mask,
        epochs=config.pretrain_epochs,
        batch_size=config.batch_size,
        learning_rate=hyper.learning_rate,
    )
    z = nn.apply(networks["encoder"], x)
    found = kmeans(key_kmeans, z, config.n_clusters, where=mask, n_init=config.n_init)
    return state._replace(networks=networks, centroids=found.centroids), losses


def train(
    key: Array,
    state: ClientState,
    sent: Guidance,
    x: Array,
    mask: Array,
    config: FedDMVCConfig,
    hyper: FedDMVCHyperparams,
) -> tuple[ClientState, Array]:
    """Trains the autoencoder and mu by the server's targets; returns the state and the losses.

    Mean squared error plus `guidance` times the mean divergence over the rows that have a target.
    Adam starts anew, and the first time mu takes the place of the server's centres, whose numbers
    the targets have; later it goes on from its own.
    """
    centroids = jnp.where(state.guided, state.centroids, sent.centroids)
    has_target = mask & (jnp.sum(sent.targets, axis=1) > 0)

    def loss(params: PyTree, batch: tuple[Array, Array, Array], mask: Array) -> Array:
        networks, centroids = params
        x, p, has_target = batch
        z = nn.apply(networks["encoder"], x)
        error = mean_squared_error(nn.apply(networks["decoder"], z), x, mask)
        away = masked_mean(divergence(p, soft_assignment(z, centroids)), mask & has_target)
        return error + hyper.guidance * away

    (networks, centroids), losses = nn.fit(
        key,
        (state.networks, centroids),
        loss,
        (x, sent.targets, has_target),
        mask,
        epochs=config.local_epochs,
        batch_size=config.batch_size,
        learning_rate=hyper.learning_rate,
    )
    new = state._replace(networks=networks, centroids=centroids, guided=jnp.bool_(True))
    return new, losses


def upload(state: ClientState, x: Array, mask: Array) -> Upload:
    """Returns what an agent sends after training."""
    z = jnp.where(mask[:, None], nn.apply(state.networks["encoder"], x), 0.0)
    return Upload(z, sharpen(soft_assignment(z, state.centroids), mask))
