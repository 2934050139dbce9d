"""Distr.KMeans: k-means on features that lie with several agents, by a grid of local clusters.

Agents hold the same samples and each its own features. Each agent clusters its features and sends
its centroids and every sample's local label. A combination of local labels is a cell of a grid
whose axes are the agents; the server clusters the cells, each at its concatenated centroids and
weighted by its number of samples, and a sample takes the label of its cell. One exchange.

Source: Ding, Liu, Huang & Li, "K-means clustering with distributed dimensions", ICML 2016. The
grid is sparse here: it holds the cells that some sample lies in, n at most, and not all k^A. A
feature that two agents hold counts twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxfedmvc import checks
from jaxfedmvc.algorithm import (
    FederatedAlgorithm,
    Phase,
    answer_nothing,
    by_agent,
    keep,
    send_nothing,
)
from jaxfedmvc.algorithms.shared.cells import segment_sizes, strict_consensus
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.federation import Cohort, Federation


@dataclasses.dataclass(frozen=True)
class DistrKMeansConfig:
    """Static settings of Distr.KMeans.

    Attributes:
      n_clusters: Number of clusters k, of every agent and of the server.
      n_init: Starts of every k-means, of which the best is kept.
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
class DistrKMeansHyperparams:
    """Numbers of Distr.KMeans that may be traced.

    Attributes:
      limit: Number of clusters in use, at most n_clusters, so that one program serves a search over
        the number of clusters; messages keep their size for n_clusters; none: all.
    """

    limit: Array | int | None = None


class Grid(NamedTuple):
    """The occupied cells of the grid, in capacity c, in lexicographic order of local labels.

    Attributes:
      points: Concatenated centroids of each cell, float32 [c, p], meaningless past the last cell.
      sizes: Number of samples in each cell, float32 [c]; zero past the last cell.
      n_cells: Number of occupied cells, int32.
      cells: Cell of each sample, int32 [n]; -1 for padding.
    """

    points: Array
    sizes: Array
    n_cells: Array
    cells: Array


def distr_kmeans(
    config: DistrKMeansConfig, hyperparams: DistrKMeansHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns k-means of each agent, then weighted k-means of the grid of their clusters.

    The exchange is made in `setup`; a round does nothing, so run it for 0 rounds. The server
    state is the label of every sample, int32 [n], -1 for padding: all agents share one partition.
    The server learns all centroids and local labels, without any noise.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: as `Federation.check_vertical`,
        or an agent has fewer samples than clusters.
    """
    hyper = checks.settings(config, DistrKMeansConfig, hyperparams, DistrKMeansHyperparams)
    checks.numbers(hyper, {"limit": checks.up_to(config.n_clusters)})

    def init(key: Array, federation: Federation) -> tuple[Array, tuple[tuple, ...]]:
        federation.check_vertical()
        federation.check_rows(config.n_clusters, "as many as clusters, for k-means to start from")
        labels = jnp.where(federation.cohorts[0].mask[0], jnp.int32(0), jnp.int32(-1))
        return labels, ((),) * len(federation.cohorts)

    def assign(labels: Array, state: tuple, client: Cohort) -> Array:
        return labels

    return FederatedAlgorithm(
        init=init,
        setup=(_cluster(config, hyper),),
        round=(),
        finish=(_share_labels(),),
        assign=assign,
    )


def _cluster(config: DistrKMeansConfig, hyper: DistrKMeansHyperparams) -> Phase:
    """Returns the exchange: agents send their clusters, and the server clusters the grid."""

    def client(key: Array, sent: tuple, state: tuple, client: Cohort) -> Any:
        x = jnp.concatenate(client.views, axis=-1)
        found = kmeans(
            key,
            x,
            config.n_clusters,
            where=client.mask,
            n_init=config.n_init,
            limit=hyper.limit,
        )
        message = {"centroids": found.centroids, "labels": found.labels}
        return state, {client.view_ids: message}, {}

    def server(
        key: Array, labels: Array, messages: Any, weights: Any
    ) -> tuple[Array, dict[str, Array]]:
        agents = by_agent(messages).values()
        grid = occupied_cells(
            jnp.stack([agent["labels"] for agent in agents]),
            [agent["centroids"] for agent in agents],
            labels >= 0,
        )
        limit = config.n_clusters if hyper.limit is None else hyper.limit
        found = kmeans(
            key,
            grid.points,
            config.n_clusters,
            where=grid.sizes > 0,
            n_init=config.n_init,
            weights=grid.sizes,
            limit=jnp.minimum(limit, grid.n_cells),
        )
        # A sample takes its cell's label.
        labels = jnp.where(labels >= 0, found.labels[grid.cells], -1)
        return labels, {"n_cells": grid.n_cells}

    return Phase(send_nothing, client, server)


def _share_labels() -> Phase:
    """Returns the last exchange: every agent is sent the labels."""
    return Phase(lambda labels, view_ids: labels, answer_nothing, keep)


def occupied_cells(labels: Array, centroids: Sequence[Array], where: Array) -> Grid:
    """Builds the grid of Ding et al. (2016): the product of local clusters, where samples lie.

    Args:
      labels: Local labels, int32 [agents, n].
      centroids: For each agent its centroids [k, p_a].
      where: Samples that are not padding, bool [n].

    Returns:
      The grid in a capacity of min(n, k^agents), which holds all cells there can be.
    """
    cells, n_cells = strict_consensus(labels, where)
    capacity = min(len(where), math.prod(len(c) for c in centroids))
    slots = jnp.where(where, cells, capacity)
    points = []
    for own_labels, own_centroids in zip(labels, centroids, strict=True):
        # All samples of a cell write the same label.
        axis = jnp.zeros(capacity, jnp.int32).at[slots].set(own_labels, mode="drop")
        points.append(own_centroids[axis])
    sizes = segment_sizes(cells, where)[:capacity].astype(jnp.float32)
    return Grid(jnp.concatenate(points, axis=1), sizes, n_cells, cells)
