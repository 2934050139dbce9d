"""FMCSC's clusters, eq. (12): what follows the last round.

Clients come to one numbering of the clusters either by the centroids of one of them (a leader's) or
by a k-means of the rows of all (federated).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfedmvc.algorithm import Phase, answer_nothing, keep
from jaxfedmvc.algorithms.fmcsc.client import ClientState
from jaxfedmvc.algorithms.fmcsc.networks import Kind, Model, features
from jaxfedmvc.algorithms.fmcsc.server import ServerState, send_model
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig, FMCSCHyperparams
from jaxfedmvc.algorithms.fmcsc.training import Info
from jaxfedmvc.clustering import kmeans, kmeans_plusplus, predict
from jaxfedmvc.clustering.kmeans import means_of
from jaxfedmvc.federation import Cohort
from jaxfedmvc.messages.clusters import min_cluster_size
from jaxfedmvc.messages.transforms import transformed
from jaxfedmvc.precision import matmul

# Number of clusters in use; None: all.
Limit = jax.Array | int | None


def phases(config: FMCSCConfig, hyper: FMCSCHyperparams) -> tuple[Phase, ...]:
    """Returns the exchanges by which clients come to common centroids."""
    limit = hyper.limit
    if config.centroids == "leader":
        return (
            Phase(
                send_model, partial(_seed_centroids, config, limit), _pass_centroids, who="leader"
            ),
            Phase(_send_result, answer_nothing, keep, reduce="sum"),
        )
    lloyd = Phase(_send_starts, partial(_tally, config, limit), _move_centroids, reduce="sum")
    own = Phase(
        send_model,
        partial(_own_centroids, config, limit),
        partial(_cluster_centroids, config, limit),
    )
    if config.min_cluster_size is not None:
        own, lloyd = (
            transformed(p, min_cluster_size(config.min_cluster_size)) for p in (own, lloyd)
        )
    return (
        own,
        *(lloyd,) * config.centroid_rounds,
        Phase(_send_centroids, answer_nothing, keep, reduce="sum"),
    )


def assign_rows(
    config: FMCSCConfig, limit: Limit, h: jax.Array, centroids: jax.Array, mask: jax.Array
) -> jax.Array:
    """Clusters a client's rows of H, eq. (12).

    A leader's centroids are what the client's own k-means starts from; federated ones are final,
    and a row belongs to the nearest.

    Args:
      config: Which centroids they are.
      limit: Number of centroids in use.
      h: [rows, d].
      centroids: [K, d].
      mask: bool [rows].

    Returns:
      Labels [rows]; -1 for padding.
    """
    if config.centroids == "federated":
        return jnp.where(mask, predict(h, centroids, limit=limit), -1)
    return kmeans(None, h, config.n_clusters, where=mask, centroids=centroids, limit=limit).labels


# --- One client's centroids -----------------------------------------------------------------------


def _seed_centroids(
    config: FMCSCConfig,
    limit: Limit,
    key: jax.Array,
    sent: Model,
    state: ClientState,
    client: Cohort,
) -> tuple[ClientState, jax.Array, Info]:
    """Sends the centroids [K, d] of the leader's own rows."""
    h = features(sent, client.by_view()).h
    found = kmeans(key, h, config.n_clusters, where=client.mask, n_init=config.n_init, limit=limit)
    return state, found.centroids, {"inertia": found.inertia}


def _pass_centroids(
    key: jax.Array, server: ServerState, messages: tuple, weights: tuple
) -> tuple[ServerState, dict]:
    return server._replace(centroids=messages[0][0]), {}


def _send_result(server: ServerState, view_ids: Kind) -> tuple[Model, jax.Array]:
    """Sends what a client clusters its rows with, in `assign_rows`."""
    return server.models[view_ids], server.centroids


# --- Federated k-means ----------------------------------------------------------------------------


def _send_centroids(server: ServerState, view_ids: Kind) -> jax.Array:
    return server.centroids


def _own_centroids(
    config: FMCSCConfig,
    limit: Limit,
    key: jax.Array,
    sent: Model,
    state: ClientState,
    client: Cohort,
) -> tuple[ClientState, tuple[jax.Array, jax.Array, jax.Array], Info]:
    """Sends the client's own centroids [K, d], their numbers of rows [K] and its id; keeps H."""
    h = features(sent, client.by_view()).h
    found = kmeans(key, h, config.n_clusters, where=client.mask, n_init=config.n_init, limit=limit)
    means, sizes = means_of(h, found.labels, config.n_clusters)
    # The guard counts the rows that are behind a mean.
    centroids = found.centroids if config.min_cluster_size is None else means
    return state._replace(h=h), (centroids, sizes, client.client_ids), {"inertia": found.inertia}


def _cluster_centroids(
    config: FMCSCConfig,
    limit: Limit,
    key: jax.Array,
    server: ServerState,
    messages: tuple,
    weights: tuple,
) -> tuple[ServerState, dict]:
    """Clusters all clients' centroids by k-means, each counted as often as it has rows.

    For several starts it draws the seeds of each from them by k-means++. Seeds are drawn by place:
    by the lowest client id of a cohort and then by client id, so that the order in which cohorts
    and clients came makes no difference.
    """
    ids = [mine for *_, mine in messages]
    lowest = jnp.concatenate([jnp.full_like(mine, jnp.min(mine)) for mine in ids])
    order = jnp.lexsort((jnp.concatenate(ids), lowest))
    rows = jnp.concatenate([c for c, *_ in messages])[order]
    counts = [n * w[:, None] for (_, n, _), w in zip(messages, weights, strict=True)]
    centroids = rows.reshape(-1, config.latent_dim)
    sizes = jnp.concatenate(counts)[order].ravel()
    k = config.n_clusters
    known: dict[str, Any] = {"weights": sizes, "limit": limit}
    if config.centroid_starts == 1:
        found = kmeans(key, centroids, k, where=sizes > 0, n_init=config.n_init, **known)
        return server._replace(centroids=found.centroids), {}
    # Seeds and no more: k-means of the clients' centroids would bring many of them to one place.
    keys = jax.random.split(key, config.centroid_starts)
    seeds = jax.vmap(lambda key: kmeans_plusplus(key, centroids, k, where=sizes > 0, **known))(keys)
    return server._replace(starts=seeds), {}


def _send_starts(server: ServerState, view_ids: Kind) -> jax.Array:
    """Sends the centroids of all starts [starts, K, d], or of the one [K, d]."""
    return server.centroids if isinstance(server.starts, tuple) else server.starts


def _tally(
    config: FMCSCConfig,
    limit: Limit,
    key: jax.Array,
    centroids: jax.Array,
    state: ClientState,
    client: Cohort,
) -> tuple[ClientState, tuple[jax.Array, ...], Info]:
    """Sends the sum [K, d] and the number [K] of the rows of H nearest to each centroid.

    Of several starts, [starts, K, d] and [starts, K], and the sums of squared distances [starts].
    """

    def one_start(centroids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        labels = predict(state.h, centroids, limit=limit)
        nearest = jax.nn.one_hot(labels, config.n_clusters) * client.mask[:, None]
        squares = jnp.sum(jnp.square(state.h - centroids[labels]), axis=1)
        total = jnp.sum(jnp.where(client.mask, squares, 0.0))
        return matmul(nearest.T, state.h), jnp.sum(nearest, axis=0), total

    if config.centroid_starts == 1:
        return state, one_start(centroids)[:2], {}
    return state, jax.vmap(one_start)(centroids), {}


def _move_centroids(
    key: jax.Array, server: ServerState, messages: tuple, counts: tuple
) -> tuple[ServerState, dict]:
    """Moves centroids to the means of all clients' rows; one without rows stays where it is."""
    sums, sizes, *squares = (sum(parts) for parts in zip(*messages, strict=True))
    old = _send_starts(server, ())
    means = sums / jnp.maximum(sizes, 1.0)[..., None]
    new = jnp.where(sizes[..., None] > 0, means, old)
    if not squares:
        return server._replace(centroids=new), {}
    # The distances are those before the step; a step lowers each start's sum.
    best = jnp.argmin(squares[0])
    return server._replace(starts=new, centroids=new[best]), {"inertia": squares[0]}
