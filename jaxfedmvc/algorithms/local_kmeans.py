"""No collaboration: every client runs k-means on its own raw views. The reference to beat.

Nothing is exchanged, so cluster numbers of different clients have nothing to do with each other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.federation import Cohort, Federation


def local_kmeans(
    n_clusters: int, n_init: int = 10, *, limit: ArrayLike | None = None
) -> FederatedAlgorithm:
    """k-means on the concatenated views of each client; its state is the client's key.

    Args:
      n_clusters: k, static.
      n_init: k-means++ starts.
      limit: If given, the traced number of clusters, at most `n_clusters`.

    `init` raises ValueError where a client has fewer samples than clusters.
    """

    def init(key: jax.Array, federation: Federation) -> tuple[tuple, tuple[jax.Array, ...]]:
        federation.check_rows(n_clusters, "as many as clusters, for k-means to start from")
        keys = tuple(
            jax.vmap(jax.random.fold_in, (None, 0))(key, cohort.client_ids)
            for cohort in federation.cohorts
        )
        return (), keys

    def embed(server: tuple, key: jax.Array, client: Cohort) -> jax.Array:
        return jnp.concatenate(client.views, axis=-1)

    def assign(server: tuple, key: jax.Array, client: Cohort) -> jax.Array:
        x = embed(server, key, client)
        return kmeans(key, x, n_clusters, where=client.mask, n_init=n_init, limit=limit).labels

    return FederatedAlgorithm(init, (), (), (), assign, embed)
