"""Base clusterers in one form, `(key, x, where) -> labels`, for methods that take any of them.

`x` is [n, d], `where` bool [n] the rows to cluster; labels are int32 [n], 0.. for clusters and -1
for noise and outside `where`. Each constructor closes over the settings. Numbers of clusters may
be traced where a static bound keeps the shapes; as in CoHiRF, they are capped at the number of
rows. Clusterers of scikit-learn come by `clustering.host.host_method`.
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
    """Makes k-means from one greedy k-means++ start.

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
    """Makes kernel k-means with exp(-gamma d^2), on random features drawn anew at every call.

    Args:
      n_clusters: As for `kmeans_method`.
      gamma: Inverse squared width of the kernel; traced.
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
    """Makes DBSCAN; both settings are traced."""

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
    """Makes SC-SRGF, which draws subspaces of its own and needs no feature subsets around it.

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
        limit = jnp.clip(jnp.sum(where), 1, n_clusters)  # one where there are no rows, too
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


def _slots(n: ArrayLike, bound: int | None) -> int:
    """Returns the static bound of a number, which is the number itself where there is none."""
    return int(n) if bound is None else bound  # type: ignore[arg-type]
