"""Refines the shared clusters: every sample goes to the cluster that agents rank nearest to it.

Consensus alone is coarse: a sample that one agent labels otherwise is torn from its cluster, and an
agent whose features tell nothing tears all of them. Here each agent computes the means of its own
features over the shared clusters and sends, for every sample, its four nearest clusters in order;
the sample joins the cluster of least rank sum, as the medoid of a cluster is the member of least
rank sum in section 2.2 of the paper, which has no such step.

    mu_k^a = mean of x_i^a over the members i of k,
    r_ik^a = min(4, #{k' : |x_i^a - mu_k'^a| < |x_i^a - mu_k^a|}),
    label_i = argmin_k sum_a r_ik^a.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxfedmvc.precision import matmul

# More clusters than this are pieces, and not refined.
MOST_CLUSTERS = 128
# Clusters that an agent lists for a sample: as many bytes as a label. Longer lists gain nothing.
LISTED = 4


def nearest_clusters(x: Array, labels: Array) -> Array:
    """Returns what an agent sends: the clusters that are nearest to every sample, in order.

    Args:
      x: The agent's features of all samples, [n, p].
      labels: Shared clusters, int32 [n], below `MOST_CLUSTERS`; -1 for padding.

    Returns:
      uint8 [n, LISTED]; clusters without members come last, and padding has zeros.
    """
    where = labels >= 0
    x = jnp.where(where[:, None], x, 0.0)
    members = jax.nn.one_hot(labels, MOST_CLUSTERS)
    sizes = jnp.sum(members, axis=0)
    # Distances are expanded into products, which is accurate about the mean.
    origin = jnp.sum(x, axis=0, keepdims=True) / jnp.maximum(jnp.sum(where), 1)
    x = jnp.where(where[:, None], x - origin, 0.0)
    means = matmul(members.T, x) / jnp.maximum(sizes, 1.0)[:, None]
    closeness = 2 * matmul(x, means.T) - jnp.sum(means * means, axis=1)[None]
    _, nearest = lax.top_k(jnp.where(sizes[None] > 0, closeness, -jnp.inf), LISTED)
    return jnp.where(where[:, None], nearest, 0).astype(jnp.uint8)


def of_least_rank_sum(nearest: Array, labels: Array) -> Array:
    """Returns the cluster of least rank sum of every sample, its own among several of them.

    Args:
      nearest: uint8 [agents, n, LISTED] as `nearest_clusters` gives.
      labels: Clusters so far, int32 [n]; -1 for padding.

    Returns:
      int32 [n]; -1 for padding.
    """
    n = len(labels)
    rows = jnp.broadcast_to(jnp.arange(n)[None, :, None], nearest.shape)
    # What a rank is less than that of clusters which are not listed.
    gains = jnp.broadcast_to(LISTED - jnp.arange(LISTED)[None, None], nearest.shape)
    total = jnp.zeros((n, MOST_CLUSTERS), jnp.int32).at[rows, nearest].add(gains)
    own = jax.nn.one_hot(labels, MOST_CLUSTERS, dtype=jnp.int32)
    return jnp.where(labels >= 0, jnp.argmax(2 * total + own, axis=1), -1).astype(jnp.int32)
