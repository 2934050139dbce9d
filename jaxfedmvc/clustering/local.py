"""Base clusterers in one form, as a protocol plugs them in: `(key, x, where) -> labels`.

`x` is [n, d], `where` bool [n] the rows to cluster; labels are int32 [n], 0.. for clusters and -1
for noise and outside `where`. Each constructor closes over the settings; those that may be swept
can be traced, and static bounds beside them keep the shapes. As CoHiRF does, the number of
clusters is capped at the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc.clustering.dbscan import dbscan
from jaxfedmvc.clustering.kernel_kmeans import kernel_kmeans
from jaxfedmvc.clustering.kmeans import kmeans
from jaxfedmvc.clustering.sc_srgf import sc_srgf

LocalMethod = Callable[[Array, Array, Array], Array]


def kmeans_method(n_clusters: ArrayLike, max_clusters: int | None = None) -> LocalMethod:
    """k-means from one greedy k-means++ start.

    Args:
      n_clusters: Number of clusters; traced if `max_clusters` is given.
      max_clusters: Its static bound.
    """
    slots = _slots(n_clusters, max_clusters)

    def method(key: Array, x: Array, where: Array) -> Array:
        limit = jnp.minimum(n_clusters, jnp.sum(where))
        return kmeans(key, x, slots, where=where, limit=limit, n_init=1).labels

    return method


def kernel_kmeans_method(
    n_clusters: ArrayLike, gamma: ArrayLike, max_clusters: int | None = None, n_features: int = 500
) -> LocalMethod:
    """Kernel k-means with exp(-gamma d^2), on random features drawn anew at every call.

    Args:
      n_clusters: As for `kmeans_method`.
      gamma: Of the kernel; traced.
      max_clusters: As for `kmeans_method`.
      n_features: Static number of random features.
    """
    slots = _slots(n_clusters, max_clusters)

    def method(key: Array, x: Array, where: Array) -> Array:
        limit = jnp.minimum(n_clusters, jnp.sum(where))
        return kernel_kmeans(
            key, x, slots, gamma, where=where, limit=limit, n_features=n_features
        ).labels

    return method


def dbscan_method(eps: ArrayLike, min_samples: ArrayLike) -> LocalMethod:
    """DBSCAN; both settings traced."""

    def method(key: Array, x: Array, where: Array) -> Array:
        return dbscan(x, eps, min_samples, where=where)

    return method


def sc_srgf_method(
    n_clusters: ArrayLike,
    n_graphs: ArrayLike = 20,
    ratio: ArrayLike = 0.5,
    max_clusters: int | None = None,
    max_graphs: int | None = None,
) -> LocalMethod:
    """SC-SRGF; it draws its own subspaces, so it is meant for R = 1 and q = 1.

    Args:
      n_clusters: As for `kmeans_method`.
      n_graphs: Number of subspaces; traced if `max_graphs` is given.
      ratio: Share of features of a subspace; traced.
      max_clusters: As for `kmeans_method`.
      max_graphs: Static bound of `n_graphs`.
    """
    slots = _slots(n_clusters, max_clusters)
    graphs = _slots(n_graphs, max_graphs)

    def method(key: Array, x: Array, where: Array) -> Array:
        limit = jnp.minimum(n_clusters, jnp.sum(where))
        return sc_srgf(
            key,
            x,
            slots,
            where=where,
            limit=limit,
            n_graphs=graphs,
            graphs_limit=n_graphs,
            ratio=ratio,
        )

    return method


def _slots(n_clusters: ArrayLike, max_clusters: int | None) -> int:
    return int(n_clusters) if max_clusters is None else max_clusters  # type: ignore[arg-type]
