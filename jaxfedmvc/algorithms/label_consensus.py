"""Consensus of labels: agents cluster alone with several numbers of clusters, and share one cut.

Agents hold the same samples and each its own features. Each of them clusters its features by
k-means with several numbers of clusters, C = 2 to 20, and sends the labels, once; nothing else
travels, and there is no server. Everybody who has all labels joins samples and clusters in a
bipartite graph, a sample to each cluster that it is in, and the normalised cut of this graph into K
parts is the shared clustering. K is the number whose parts agree best with what the agents found
alone.

Sources: Fern & Brodley, "Solving cluster ensemble problems by bipartite graph partitioning", ICML
2004, for the graph and its cut; Fred & Jain, "Combining multiple clusterings using evidence
accumulation", IEEE TPAMI 27, 2005, for lists of different numbers of clusters; Strehl & Ghosh,
"Cluster ensembles", JMLR 3, 2002, for agreement with the lists as the criterion. Ours are the
weights of agents, and that the criterion is of the half of each agent's lists that agree best. Both
were chosen by ARI, on generated sets above all (docs/notebook/vertcohirf.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, by_agent, send_nothing
from jaxfedmvc.algorithms.registry import NoHyperparams
from jaxfedmvc.algorithms.shared.matrices import inverse_root, left_singular_vectors
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.losses import l2_normalize
from jaxfedmvc.metrics.contingency import ari_from_contingency
from jaxfedmvc.precision import in_32_bits

# Labels travel in a byte each.
MOST_CLUSTERS = 127
# Samples for each cluster of a list: with fewer, an agent's clusters are chance.
LEAST_SAMPLES = 10
# Of an agent that agrees with no other, beside 1 of the one that agrees most.
_LEAST_WEIGHT = 1e-3


@dataclasses.dataclass(frozen=True)
class LabelConsensusConfig:
    """Static settings of the consensus of labels.

    Attributes:
      local_clusters: Numbers of clusters of an agent's lists, from 1 to 127, each once. Those that
        leave fewer than ten samples for a cluster do not count, but for the smallest.
      shared_clusters: Number of shared clusters, from 1 to 127; none: the one of local_clusters
        that agrees best with the lists.
      n_init: Starts of every k-means, of which the best is kept.
    """

    local_clusters: tuple[int, ...] = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
    shared_clusters: int | None = None
    n_init: int = 10

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.widths(self, "local_clusters")
        checks.at_least(self, 1, "shared_clusters", "n_init")
        numbers = self.local_clusters
        if not numbers or len(set(numbers)) < len(numbers) or max(numbers) > MOST_CLUSTERS:
            raise checks.wrong(
                "local_clusters",
                numbers,
                f"one or more numbers from 1 to {MOST_CLUSTERS}, each once",
            )
        if (self.shared_clusters or 1) > MOST_CLUSTERS:
            raise checks.wrong("shared_clusters", self.shared_clusters, f"1 to {MOST_CLUSTERS}")


class Consensus(NamedTuple):
    """What all agents know in the end.

    Attributes:
      labels: Shared cluster of each sample, int32 [n]; -1 for padding, and before the exchange.
      n_clusters: K, int32.
      agreement: Of each number that was tried with the lists, float32 [numbers]; see `agreement`.
    """

    labels: Array
    n_clusters: Array
    agreement: Array


def label_consensus(
    config: LabelConsensusConfig | None = None, hyperparams: NoHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns one exchange of labels among peers, and the cut of the graph that they make.

    The exchange is made in `setup`; a round does nothing, so run it for 0 rounds. `init` raises
    ValueError as `Federation.check_vertical` does, and for fewer samples than clusters.
    """
    config = LabelConsensusConfig() if config is None else config
    checks.settings(config, LabelConsensusConfig, hyperparams, NoHyperparams)
    return FederatedAlgorithm(
        init=partial(_init, config),
        setup=(_exchange(config),),
        round=(),
        finish=(),
        assign=lambda state, _, client: state.labels,
        peers=True,
    )


def _init(config: LabelConsensusConfig, key: Array, federation: Federation) -> tuple[Any, Any]:
    federation.check_vertical()
    federation.check_rows(min(config.local_clusters), "as many as an agent's fewest clusters")
    federation.check_rows(config.shared_clusters or 1, "as many as shared clusters")
    n = federation.cohorts[0].mask.shape[1]
    state = Consensus(
        labels=jnp.full(n, -1, jnp.int32),
        n_clusters=jnp.int32(0),
        agreement=jnp.zeros(len(_tried(config))),
    )
    return state, ((),) * len(federation.cohorts)


def _tried(config: LabelConsensusConfig) -> tuple[int, ...]:
    """Returns the numbers of shared clusters to choose from, in ascending order."""
    if config.shared_clusters is not None:
        return (config.shared_clusters,)
    return tuple(sorted(config.local_clusters))


def _exchange(config: LabelConsensusConfig) -> Phase:
    def client(key: Array, sent: Any, state: tuple, client: Cohort) -> Any:
        x = jnp.concatenate(client.views, axis=-1)
        lists = labels_of(key, x, client.mask, config)
        return state, {client.view_ids: lists.astype(jnp.int8)}, {}

    def server(key: Array, state: Consensus, messages: Any, weights: Any) -> tuple[Any, dict]:
        lists = jnp.stack(list(by_agent(messages).values())).astype(jnp.int32)
        found = consensus(key, lists, config)
        return found, {"n_clusters": found.n_clusters, "agreement": jnp.max(found.agreement)}

    return Phase(send_nothing, client, server)


def labels_of(key: Array, x: Array, where: Array, config: LabelConsensusConfig) -> Array:
    """Clusters an agent's features with each number of clusters.

    Args:
      key: PRNG key.
      x: Features [n, p].
      where: Rows that are not padding, bool [n].
      config: Says how often.

    Returns:
      int32 [lists, n], the numbers of clusters in ascending order; -1 outside `where`.
    """
    most = max(config.local_clusters)

    def one(c: Array) -> Array:
        own = jax.random.fold_in(key, c)
        return kmeans(own, x, most, where=where, n_init=config.n_init, limit=c).labels

    return lax.map(one, jnp.array(sorted(config.local_clusters)))


@in_32_bits
@jax.default_matmul_precision("highest")
def consensus(
    key: Array,
    lists: Array,
    config: LabelConsensusConfig,
    sizes: Sequence[int] | None = None,
) -> Consensus:
    """Cuts the graph of samples and clusters, and chooses into how many parts.

    Args:
      key: PRNG key of the k-means starts, the same for all who shall find the same.
      lists: Labels of every agent, int32 [agents, lists, n], the lists in ascending order of their
        numbers of clusters; -1 in all of them for padding.
      config: Says which numbers these are, and which are tried.
      sizes: How many labels there are in the lists of each number, static; the numbers if None.
        Samples with a larger label are in no cluster of the list.

    Returns:
      The number of best agreement, the first of several, and its clusters.
    """
    numbers, tried = sorted(config.local_clusters), _tried(config)
    sizes = numbers if sizes is None else sizes
    where = lists[0, 0] >= 0
    # The smallest number counts however few samples there are.
    fits = jnp.array(numbers) * LEAST_SAMPLES <= jnp.sum(where)
    used = fits | (jnp.arange(len(numbers)) == 0)
    weights = agent_weights(lists, used, max(sizes))
    rows = embedding(lists, jnp.sqrt(weights)[:, None] * used[None], sizes, max(tried))

    def cut(k: Array) -> tuple[Array, Array]:
        labels = parts(jax.random.fold_in(key, k), rows, where, k, config.n_init)
        return labels, agreement(labels, lists, used, max(tried), max(sizes))

    labels, agreements = lax.map(cut, jnp.array(tried))
    if config.shared_clusters is None:
        agreements = jnp.where(used, agreements, -jnp.inf)
    best = jnp.argmax(agreements)
    return Consensus(labels[best], jnp.array(tried, jnp.int32)[best], agreements)


def agent_weights(lists: Array, used: Array, n_clusters: int) -> Array:
    """Computes how much an agent's lists agree with those of the others.

    The mean ARI of an agent's lists with the others' lists of as many clusters, where it is
    positive, over the largest such mean. Two agents always count alike, and a single one has 1.

    Args:
      lists: int32 [agents, lists, n]; -1 for padding.
      used: Lists that count, bool [lists].
      n_clusters: Largest number of clusters, static.

    Returns:
      float32 [agents], from 0.001 to 1.
    """
    n_agents = len(lists)
    if n_agents == 1:
        return jnp.ones(1)

    def of_one_number(labels: Array) -> Array:
        member = jax.nn.one_hot(labels, n_clusters)  # [agents, n, C]
        tables = jnp.einsum("anc,bnd->abcd", member, member)
        return jax.vmap(jax.vmap(ari_from_contingency))(tables)

    pairs = lax.map(of_one_number, lists.swapaxes(0, 1))  # [lists, agents, agents]
    others = used[:, None, None] & ~jnp.eye(n_agents, dtype=bool)[None]
    mean = jnp.maximum(jnp.mean(pairs, axis=(0, 2), where=others), 0.0)
    most = jnp.max(mean)
    return jnp.maximum(
        jnp.where(most > 0, mean / jnp.where(most > 0, most, 1.0), 1.0), _LEAST_WEIGHT
    )


def embedding(lists: Array, edges: Array, sizes: Sequence[int], n_components: int) -> Array:
    """Embeds the samples by the bipartite graph of samples and clusters.

    The left singular vectors of D_s^(-1/2) H D_c^(-1/2), with H the edges from samples to clusters
    and D_s and D_c their sums at a sample and at a cluster (Fern & Brodley, 2004; Dhillon, 2001).

    Args:
      lists: int32 [agents, lists, n]; -1 for padding.
      edges: Weight of the edges to the clusters of each list, float32 [agents, lists].
      sizes: Number of clusters of each list.
      n_components: Number of singular vectors, the largest first, static.

    Returns:
      float32 [n, n_components]; zero for padding, and in vectors that the graph does not have.
    """
    members = [
        jnp.moveaxis(jax.nn.one_hot(lists[:, i], c) * edges[:, i, None, None], 0, 1)
        for i, c in enumerate(sizes)
    ]
    graph = jnp.concatenate([m.reshape(lists.shape[2], -1) for m in members], axis=1)
    of_samples, of_clusters = graph.sum(axis=1, keepdims=True), graph.sum(axis=0, keepdims=True)
    graph = inverse_root(of_samples) * graph * inverse_root(of_clusters)
    rows = left_singular_vectors(graph, n_components)
    return jnp.pad(rows, ((0, 0), (0, n_components - rows.shape[1])))


def parts(key: Array, rows: Array, where: Array, k: Array, n_init: int) -> Array:
    """Clusters the directions of the first k coordinates by k-means (Ng, Jordan & Weiss, 2002).

    Args:
      key: PRNG key.
      rows: [n, components].
      where: Rows that are not padding, bool [n].
      k: Number of clusters and of coordinates, may be traced.
      n_init: Starts.

    Returns:
      int32 [n]; -1 outside `where`.
    """
    first = jnp.where(jnp.arange(rows.shape[1])[None] < k, rows, 0.0)
    return kmeans(
        key, l2_normalize(first), rows.shape[1], where=where, n_init=n_init, limit=k
    ).labels


def agreement(labels: Array, lists: Array, used: Array, n_clusters: int, n_local: int) -> Array:
    """Computes how well clusters agree with what the agents found alone.

    Of each agent the mean ARI with the half of its lists that agree best, rounded down, one at
    least; and the mean of these over the agents. Lists of far more, or far fewer, clusters than K
    agree little with any K clusters, and would draw the choice to the middle of the numbers.

    Args:
      labels: int32 [n]; -1 for padding.
      lists: int32 [agents, lists, n].
      used: Lists that count, bool [lists].
      n_clusters: Largest number of clusters in `labels`, static.
      n_local: The same of the lists, static.

    Returns:
      Scalar, at most 1; about 0 where they have no more in common than chance gives.
    """
    member = jax.nn.one_hot(labels, n_clusters)

    def with_list(other: Array) -> Array:
        own = jax.nn.one_hot(other, n_local)
        table = jnp.matmul(member.T, own)
        return ari_from_contingency(table)

    scores = lax.map(with_list, lists.reshape(-1, lists.shape[2])).reshape(lists.shape[:2])
    half = jnp.maximum(jnp.sum(used) // 2, 1)
    ordered = jnp.sort(jnp.where(used[None], scores, -jnp.inf), axis=1, descending=True)
    counts = jnp.arange(ordered.shape[1]) < half
    return jnp.mean(jnp.sum(ordered, axis=1, where=counts[None]) / half)


def lists_in_order(by_number: dict[int, np.ndarray]) -> tuple[tuple[int, ...], np.ndarray]:
    """Returns the numbers of clusters in ascending order, and their lists as one array.

    Args:
      by_number: C -> labels of the agents with C clusters, int32 [agents, n].

    Returns:
      The numbers, and int32 [agents, lists, n].
    """
    numbers = tuple(sorted(by_number))
    return numbers, np.stack([by_number[c] for c in numbers], axis=1)
