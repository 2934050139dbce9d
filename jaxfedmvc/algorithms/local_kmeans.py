"""No collaboration: every client runs k-means on its own raw views. The reference to beat.

Nothing is exchanged, so cluster numbers of different clients have nothing to do with each other.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.federation import Cohort, Federation


@dataclasses.dataclass(frozen=True)
class LocalKMeansConfig:
    """Static settings of k-means on every client.

    Attributes:
      n_clusters: Number of clusters k of every client.
      n_init: Starts of a client's k-means, of which the best is kept.
    """

    n_clusters: int
    n_init: int = 10

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "n_init")


@struct.dataclass
class LocalKMeansHyperparams:
    """Numbers of k-means on every client that may be traced.

    Attributes:
      limit: Number of clusters in use, at most n_clusters, so that one program serves a search over
        the number of clusters; none: all.
    """

    limit: Array | int | None = None


def local_kmeans(
    config: LocalKMeansConfig, hyperparams: LocalKMeansHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns k-means on the concatenated views of each client; its state is the client's key.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: a client has fewer samples than
        clusters.
    """
    hyper = checks.settings(config, LocalKMeansConfig, hyperparams, LocalKMeansHyperparams)
    checks.numbers(hyper, {"limit": checks.up_to(config.n_clusters)})

    def init(key: Array, federation: Federation) -> tuple[tuple, tuple[Array, ...]]:
        federation.check_rows(config.n_clusters, "as many as clusters, for k-means to start from")
        keys = tuple(
            jax.vmap(jax.random.fold_in, (None, 0))(key, cohort.client_ids)
            for cohort in federation.cohorts
        )
        return (), keys

    def embed(server: tuple, key: Array, client: Cohort) -> Array:
        return jnp.concatenate(client.views, axis=-1)

    def assign(server: tuple, key: Array, client: Cohort) -> Array:
        return kmeans(
            key,
            embed(server, key, client),
            config.n_clusters,
            where=client.mask,
            n_init=config.n_init,
            limit=hyper.limit,
        ).labels

    return FederatedAlgorithm(init, (), (), (), assign, embed)
