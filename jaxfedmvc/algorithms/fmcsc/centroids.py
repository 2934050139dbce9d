"""FMCSC's clusters, eq. (12): what follows the last round.

One client's centroids give every client the same numbering; or those of all clients do.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxfedmvc.algorithm import Phase
from jaxfedmvc.algorithms.fmcsc.model import (
    FMCSCConfig,
    Kept,
    Kind,
    Model,
    PyTree,
    ServerState,
    features,
    send_model,
)
from jaxfedmvc.clustering import kmeans, predict
from jaxfedmvc.federation import Cohort


def phases(config: FMCSCConfig) -> tuple[Phase, ...]:
    """The exchanges by which clients come to common centroids."""
    if config.centroids == "leader":
        return (
            Phase(send_model, partial(_seed_centroids, config), _pass_centroids, who="leader"),
            Phase(_send_result, _receive, _keep, reduce="sum"),
        )
    lloyd = Phase(_send_centroids, partial(_tally, config), _move_centroids, reduce="sum")
    return (
        Phase(send_model, partial(_own_centroids, config), partial(_cluster_centroids, config)),
        *(lloyd,) * config.centroid_rounds,
        Phase(_send_centroids, _receive, _keep, reduce="sum"),
    )


def assign(config: FMCSCConfig, h: jax.Array, centroids: jax.Array, mask: jax.Array) -> jax.Array:
    """k-means on a client's own H [rows, d], from the centroids [K, d] that were passed on.

    With federated centroids the nearest of them. -1: padding.
    """
    if config.centroids == "federated":
        return jnp.where(mask, predict(h, centroids), -1)
    return kmeans(None, h, config.n_clusters, where=mask, centroids=centroids).labels


# --- One client's centroids -----------------------------------------------------------------------


def _seed_centroids(
    config: FMCSCConfig, key: jax.Array, sent: Model, state: PyTree, client: Cohort
) -> tuple[PyTree, jax.Array, dict]:
    h = features(config, sent, client.by_view()).h
    found = kmeans(key, h, config.n_clusters, where=client.mask, n_init=config.n_init)
    return state, found.centroids, {"inertia": found.inertia}


def _pass_centroids(
    key: jax.Array, server: ServerState, messages: tuple, weights: tuple
) -> tuple[ServerState, dict]:
    return server._replace(centroids=messages[0][0]), {}


def _send_result(server: ServerState, view_ids: Kind) -> tuple[Model, jax.Array]:
    """What a client clusters its rows with, in `assign`."""
    return server.models[view_ids], server.centroids


def _receive(
    key: jax.Array, sent: PyTree, state: PyTree, client: Cohort
) -> tuple[PyTree, tuple[()], dict]:
    return state, (), {}


def _keep(
    key: jax.Array, server: ServerState, messages: tuple, counts: tuple
) -> tuple[ServerState, dict]:
    return server, {}


# --- Federated k-means ----------------------------------------------------------------------------


def _send_centroids(server: ServerState, view_ids: Kind) -> jax.Array:
    return server.centroids


def _own_centroids(
    config: FMCSCConfig, key: jax.Array, sent: Model, state: Kept, client: Cohort
) -> tuple[Kept, tuple[jax.Array, jax.Array], dict]:
    """The client's own centroids [K, d] and their numbers of rows [K]."""
    h = features(config, sent, client.by_view()).h
    found = kmeans(key, h, config.n_clusters, where=client.mask, n_init=config.n_init)
    sizes = jnp.sum(jax.nn.one_hot(found.labels, config.n_clusters), axis=0)  # -1: padding
    return state._replace(h=h), (found.centroids, sizes), {"inertia": found.inertia}


def _cluster_centroids(
    config: FMCSCConfig, key: jax.Array, server: ServerState, messages: tuple, weights: tuple
) -> tuple[ServerState, dict]:
    """k-means of all clients' centroids, each as often as it has rows."""
    centroids = jnp.concatenate([c.reshape(-1, config.latent_dim) for c, _ in messages])
    sizes = jnp.concatenate(
        [(n * w[:, None]).ravel() for (_, n), w in zip(messages, weights, strict=True)]
    )
    found = kmeans(
        key, centroids, config.n_clusters, where=sizes > 0, weights=sizes, n_init=config.n_init
    )
    return server._replace(centroids=found.centroids), {}


def _tally(
    config: FMCSCConfig, key: jax.Array, centroids: jax.Array, state: Kept, client: Cohort
) -> tuple[Kept, tuple[jax.Array, jax.Array], dict]:
    """Sum [K, d] and number [K] of the client's rows of H nearest to each centroid."""
    nearest = jax.nn.one_hot(predict(state.h, centroids), config.n_clusters)
    nearest *= client.mask[:, None]
    return state, (nearest.T @ state.h, jnp.sum(nearest, axis=0)), {}


def _move_centroids(
    key: jax.Array, server: ServerState, messages: tuple, counts: tuple
) -> tuple[ServerState, dict]:
    """Means of all clients' rows; a cluster without rows stays where it is."""
    sums, sizes = (sum(parts) for parts in zip(*messages, strict=True))
    means = sums / jnp.maximum(sizes, 1.0)[:, None]
    return server._replace(centroids=jnp.where(sizes[:, None] > 0, means, server.centroids)), {}
