"""Private k-means centres of one table: noisy leaf means of a tree of random half-spaces.

Level l of the tree splits the rows by the sign of their product with the l-th random direction
(SimHash). A node with many rows, by its noisy count, branches; the means of the leaves, noisy too,
are clustered with their counts as weights.

Every child gets a noisy count, also one without rows, and nothing but noisy counts decides what
becomes of a node. Where only children with rows are looked at, the mere presence of a node tells
that somebody is there. The price is that noise makes empty nodes branch. The tree therefore has
CAPACITY places for leaves; when they run short, the nodes of the greatest noisy counts branch.

Source: Li, Wang and Li, "Differentially private vertical federated clustering", 2023, with the
local centres of Chang and Kamath, "Practical differentially private clustering", 2021.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc.algorithms.dpfmps.budget import SUMS_DELTA, Budget, discrete_laplace
from jaxfedmvc.algorithms.shared.cells import exact_segment_sum
from jaxfedmvc.clustering.kmeans import kmeans
from jaxfedmvc.messages.transforms import laplace_numbers
from jaxfedmvc.precision import matmul
from jaxfedmvc.privacy import laplace_scale

# Splits between the root and the deepest leaf. A row is counted in DEPTH + 1 nodes at most.
DEPTH = 20
# Most nodes that are alive at once, static: with the noise off, most leaves.
CAPACITY = 1024


class TreeNoise(NamedTuple):
    """Noise of one agent's tree; `tree_noise` returns it for a budget.

    Attributes:
      count_epsilon: Epsilon of the counts of one level.
      scale_one: b_1, the Laplace scale if a leaf's sum had one coordinate; sets the least count.
      scale_all: b_d, the Laplace scale of each of the d coordinates of a leaf's sum.
    """

    count_epsilon: ArrayLike
    scale_one: ArrayLike
    scale_all: ArrayLike


class Leaves(NamedTuple):
    """Private leaves of a tree.

    Attributes:
      means: float32 [CAPACITY, d] within [-1, 1].
      counts: Noisy counts, float32 [CAPACITY], 1 or more; 0 where there is no leaf.
    """

    means: Array
    counts: Array


def tree_noise(budget: Budget, n_features: int) -> TreeNoise:
    """Returns the noise that spends an agent's budget for counts and sums on d features exactly.

    A row is in one node of each level and in one leaf.
    """
    return TreeNoise(
        count_epsilon=budget.counts / (DEPTH + 1),
        scale_one=laplace_scale(1, budget.sums, SUMS_DELTA),
        scale_all=laplace_scale(n_features, budget.sums, SUMS_DELTA),
    )


def private_centres(
    key: Array, x: Array, n_clusters: int, where: Array, noise: TreeNoise, *, n_init: int = 10
) -> Array:
    """Finds k private centres of rows in [-1, 1]^d by k-means of the leaves of a private tree.

    Args:
      key: PRNG key.
      x: Data, float32 [n, d], entries in [-1, 1], at most 2^20 rows.
      n_clusters: k, static.
      where: Rows that count, bool [n].
      noise: See `tree_noise`.
      n_init: Starts of k-means, static.

    Returns:
      float32 [k, d] in [-1, 1]^d. With fewer leaves than k the remaining centres are uniform there.
    """
    tree_key, kmeans_key, fill_key = jax.random.split(key, 3)
    leaves = private_leaves(tree_key, x, n_clusters, where, noise)
    is_leaf = leaves.counts > 0
    n_leaves = jnp.sum(is_leaf)
    limit = jnp.clip(n_leaves, 1, n_clusters)
    found = best_centroids(kmeans_key, leaves.means, n_clusters, leaves.counts, limit, n_init)
    missing = jax.random.uniform(fill_key, found.shape, minval=-1.0, maxval=1.0)
    return jnp.where(jnp.arange(n_clusters)[:, None] < n_leaves, found, missing)


def best_centroids(
    key: Array, x: Array, n_clusters: int, weights: Array, limit: ArrayLike, n_init: int
) -> Array:
    """Returns centroids [k, d] of the best of some starts of `kmeans` of weighted rows.

    One start after another, so that one alone needs memory and none waits for the slowest.
    """

    def run(key: Array) -> tuple[Array, Array]:
        result = kmeans(key, x, n_clusters, weights=weights, limit=limit, n_init=1)
        return result.centroids, result.inertia

    centroids, inertia = lax.map(run, jax.random.split(key, n_init))
    return centroids[jnp.argmin(inertia)]


def private_leaves(key: Array, x: Array, n_clusters: int, where: Array, noise: TreeNoise) -> Leaves:
    """Grows a private tree and returns its leaves; arguments as for `private_centres`.

    A node branches from three times the least count on; a child below the least count is dropped
    with its rows.
    """
    n, d = x.shape
    x = jnp.where(where[:, None], x, 0.0)
    direction_key, count_key, sum_key = jax.random.split(key, 3)
    directions = jax.random.normal(direction_key, (DEPTH, d))
    sides = matmul(directions, x.T) > 0
    slots = jnp.arange(CAPACITY)

    count_noise = discrete_laplace(count_key, noise.count_epsilon, (DEPTH + 1, CAPACITY))

    def split_level(
        state: tuple[Array, Array, Array, Array], level: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array, Array, Array], None]:
        node, counts, alive, may_branch = state
        side, count_noise = level
        asks = may_branch & (counts >= 3 * least)
        # One child takes its parent's place, the other a free one; the greatest count comes first.
        order = jnp.argsort(jnp.where(asks, -counts, 1))
        granted = asks[order] & (slots < CAPACITY - jnp.sum(alive))
        free = jnp.where(granted, jnp.argsort(alive), CAPACITY)
        other = jnp.zeros_like(slots).at[order].set(free)
        branch = other < CAPACITY
        moves = branch.at[node].get(mode="fill", fill_value=False) & side
        node = jnp.where(moves, other.at[node].get(mode="clip"), node)
        born = branch.at[other].set(True, mode="drop")
        sizes = jax.ops.segment_sum(jnp.ones(n, jnp.int32), node, CAPACITY)
        counts = jnp.where(born, sizes + count_noise, counts)
        may_branch = born & (counts >= least)
        alive = (alive & ~born) | may_branch
        # Rows of a dropped node are out for good, whoever takes its place.
        node = jnp.where(alive.at[node].get(mode="fill", fill_value=False), node, CAPACITY)
        return (node, counts, alive, may_branch), None

    counts = jnp.where(slots == 0, jnp.sum(where, dtype=jnp.int32) + count_noise[0], 0)
    least = least_count(counts[0], n_clusters, d, noise.scale_one)
    alive = (slots == 0) & (counts >= least)
    start = jnp.where(where & alive[0], 0, CAPACITY), counts, alive, alive
    (node, counts, alive, _), _ = lax.scan(split_level, start, (sides, count_noise[1:]))
    weights = jnp.where(alive, counts, 0).astype(jnp.float32)
    sums = exact_segment_sum(x, node, CAPACITY)
    sums += noise.scale_all * laplace_numbers(sum_key, sums.shape)
    means = jnp.clip(sums / jnp.maximum(weights, 1.0)[:, None], -1.0, 1.0)
    return Leaves(jnp.where(alive[:, None], means, 0.0), weights)


def least_count(total: Array, n_clusters: int, n_features: int, scale_one: ArrayLike) -> Array:
    """Returns the least count of a node, int32, for a noisy total.

    It is max(1, min(floor(10 sqrt(d) sqrt(2) b_1), floor(total / (2 k)))) (Li et al. 2023). The
    first is where the noise of a mean, ten times over, is as small as the data's range; the second
    lets each cluster have leaves.
    """
    low_noise = jnp.floor(10 * jnp.sqrt(2.0 * n_features) * scale_one)
    return jnp.maximum(jnp.minimum(low_noise, total // (2 * n_clusters)), 1).astype(jnp.int32)
