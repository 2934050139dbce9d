"""From signed, asymmetric consistency graphs to clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc.algorithms.mgcd import graph as graphs_lib
from jaxfedmvc.algorithms.mgcd.graph import Graph
from jaxfedmvc.algorithms.mgcd.model import Clusters
from jaxfedmvc.algorithms.mgcd.settings import ResolvedConfig
from jaxfedmvc.algorithms.mgcd.sizes import n_edges
from jaxfedmvc.algorithms.mgcd.sparse_spectral import Neighbours, heaviest_edges, sparse_embedding
from jaxfedmvc.clustering.kmeans import kmeans
from jaxfedmvc.losses import l2_normalize
from jaxfedmvc.metrics.contingency import ari_from_contingency, contingency
from jaxfedmvc.metrics.views import agreeing, mean_agreement, pairs

# Eigenvalues are known to about this.
_EPS = 1e-6


def clusters(
    key: Array,
    refined: Sequence[Graph],
    mean: Graph,
    where: Array,
    config: ResolvedConfig,
    kept: Array | None = None,
) -> Clusters:
    """Clusters an affinity made of consistency graphs spectrally (Ng, Jordan & Weiss, 2001).

    Two affinities are sound for different data. Where views agree on which samples are alike, the
    largest entries of the views' MEAN graph are those that all support. Where each view links a
    sample to others of its cluster than the next view does, the mean of EACH view's own largest
    entries keeps all these links, and the views bridge each other's gaps. BOTH is the mean of the
    two at equal totals: seldom the best, and seldom far from it where one of them fails. "auto"
    takes the one whose spectrum has the largest separation, (1 - e_{K+1}) / (1 - e_K) for the
    eigenvalues e of the normalised affinity: the ratio by which theory says that spectral
    clustering works (Peng, Sun & Zanetti, 2017, there with the K-way expansion for 1 - e_K). No
    label is needed for it.

    Args:
      key: Key of the starts of k-means.
      refined: The views' refined consistency graphs G_{c_v}.
      mean: Their mean G_c.
      where: Real samples, bool [N].
      config: The settings.
      kept: Views that count, bool [V], of which `mean` is the mean; all if None.
    """
    rule = config.affinity
    width = n_edges(config, len(refined), graphs_lib.n_samples(mean))
    together = _strongest(mean, where, config)
    if rule == "absolute":
        whole = jnp.abs(graphs_lib.dense(mean))
        found = _cut(key, (whole + whole.T) / 2, where, config)
        return Clusters(*found, jnp.float32(0), _widened(together, width))
    # By the share that the views' own affinities have in it; "auto" tries all three.
    asked = {"each": (1.0,), "mean": (0.0,), "both": (0.5,), "auto": (1.0, 0.0, 0.5)}[rule]
    apart = of_each_view(refined, where, config, kept) if max(asked) else together
    affinities = {1.0: apart, 0.0: together, 0.5: _mixed(apart, together)}
    tried = [_widened(affinities[share], width) for share in asked]
    stack = jax.tree.map(lambda *x: jnp.stack(x), *tried)
    # One after another: the program of one cut serves all three.
    cuts = lax.map(lambda affinity: _cut(key, affinity, where, config), stack)
    best = jnp.argmax(cuts[2])  # of equal separations the first
    labels, rows, separation, share, affinity = jax.tree.map(
        lambda x: x[best], (*cuts, jnp.array(asked), stack)
    )
    return Clusters(labels, rows, separation, share, affinity)


def _mixed(first: Neighbours, second: Neighbours) -> Neighbours:
    """Returns the mean of two graphs, of which the second is brought to the first one's total."""
    ratio = jnp.sum(first.weight) / jnp.maximum(jnp.sum(second.weight), 1e-30)
    return Neighbours(
        jnp.concatenate([first.index, second.index], axis=1),
        jnp.concatenate([first.weight, ratio * second.weight], axis=1) / 2,
    )


def better(first: Clusters, second: Clusters, factor: float = 1.0) -> Clusters:
    """Returns the second clusters if they separate by more than `factor` times the first ones."""
    chosen = second.separation > factor * first.separation
    return jax.tree.map(lambda a, b: jnp.where(chosen, b, a), first, second)


def of_each_view(
    refined: Sequence[Graph], where: Array, config: ResolvedConfig, kept: Array | None = None
) -> Neighbours:
    """Returns the mean of the own affinities of the views that count: up to V k edges a row."""
    strongest = [_strongest(graph, where, config) for graph in refined]
    index = jnp.concatenate([s.index for s in strongest], axis=1)
    weights = [s.weight for s in strongest]
    if kept is None:
        return Neighbours(index, jnp.concatenate(weights, axis=1) / len(refined))
    weights = [weight * kept[v] for v, weight in enumerate(weights)]
    return Neighbours(index, jnp.concatenate(weights, axis=1) / jnp.sum(kept))


def views_that_agree(
    key: Array,
    graphs: Sequence[Graph],
    where: Array,
    config: ResolvedConfig,
    least: ArrayLike,
) -> Array:
    """Returns the views whose own clusters agree with other views', bool [V]; see `agreeing`.

    Args:
      key: Key of the starts of k-means.
      graphs: The views' graphs.
      where: Real samples, bool [N].
      config: The settings.
      least: Share of the greatest agreement.
    """
    own = jax.tree.map(lambda *x: jnp.stack(x), *(_strongest(g, where, config) for g in graphs))
    labels = lax.map(lambda affinity: _cut(key, affinity, where, config)[0], own)
    size = config.n_clusters

    def agreement(one: Array, other: Array) -> Array:
        return ari_from_contingency(contingency(labels[one], labels[other], size, size))

    n_views = len(graphs)
    return agreeing(mean_agreement(jax.vmap(agreement)(*pairs(n_views)), n_views), least)


def _strongest(graph: Graph, where: Array, config: ResolvedConfig) -> Neighbours:
    n = graphs_lib.n_samples(graph)
    return heaviest_edges(
        lambda index: graphs_lib.rows(graph, index),
        n,
        min(config.n_neighbours, n - 1),
        absolute=config.affinity == "absolute",
        where=where,
    )


def _widened(affinity: Neighbours, width: int) -> Neighbours:
    """Returns the same edges with room for `width` a row."""
    n, k = affinity.index.shape
    own = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None], (n, width - k))
    return Neighbours(
        jnp.concatenate([affinity.index, own], axis=1),
        jnp.pad(affinity.weight, ((0, 0), (0, width - k))),
    )


def _cut(
    key: Array, affinity: Any, where: Array, config: ResolvedConfig
) -> tuple[Array, Array, Array]:
    """Returns the first three fields of `Clusters`."""
    k = config.n_clusters
    found = sparse_embedding(affinity, k + 1, where=where)
    rows = l2_normalize(found.vectors[:, :k])
    labels = kmeans(key, rows, k, where=where, n_init=config.n_init).labels
    separation = (1 - found.values[k] + _EPS) / (1 - found.values[k - 1] + _EPS)
    return labels, rows, separation
