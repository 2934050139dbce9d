"""Flajolet-Martin sketches of sets, private ones too, and counts of the cells of a grid.

A sketch of a set is, for each of m random hash functions, the greatest of its elements' values, of
which a value j has probability 2^-j. The sketch of a union is the elementwise greater one, so that
parties who hash alike estimate the size of a union, and by that of an intersection, from sketches.

The grid: A agents each cut the same persons into k clusters. A cell is one cluster of each agent;
its persons are those that are in none of the other clusters of any agent, and the sketch of these
is at hand.

Source: Li, Wang and Li, "Differentially private vertical federated clustering", 2023; the estimate
is that of Flajolet et al., "HyperLogLog", 2007.
"""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxfedmvc.algorithms.dpfmps.budget import GREATEST_VALUE, SketchNoise
from jaxfedmvc.messages.transforms import exponential_numbers

# Rows that are hashed, and cells that are estimated, at once: so many times m values in memory.
_BLOCK = 256
# Least mass of a cell of the fitted grid.
_FLOOR = 1e-5


def sketch_clusters(
    key: Array, ids: Array, labels: Array, n_clusters: int, n_sketches: int
) -> Array:
    """Sketches the members of each cluster.

    A row's value is ceil(log2(1/u)) for u in (0, 1) hashed from its id: one more than the leading
    zeros of a random word.

    Args:
      key: The hash functions, shared by all agents and by no one else.
      ids: int32 [n], what is hashed; the same person has the same id with all agents.
      labels: int32 [n], clusters; -1 for rows that are in none.
      n_clusters: k, static.
      n_sketches: m, static.

    Returns:
      uint8 [k, m]; 0 for an empty set.
    """
    padding = (0, -len(ids) % _BLOCK)
    ids = jnp.pad(ids, padding).reshape(-1, _BLOCK)
    labels = jnp.pad(labels, padding, constant_values=-1).reshape(-1, _BLOCK)

    def add(sketches: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        ids, labels = block
        words = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i), (n_sketches,)))(ids)
        values = (lax.clz(words) + 1).astype(jnp.uint8)
        place = jnp.where(labels >= 0, labels, n_clusters)
        return sketches.at[place].max(values, mode="drop"), None

    empty = jnp.zeros((n_clusters, n_sketches), jnp.uint8)
    return lax.scan(add, empty, (ids, labels))[0]


def add_noise(key: Array, sketches: Array, noise: SketchNoise) -> Array:
    """Adds k_p phantom elements to every sketch, and raises values below alpha_min.

    Args:
      key: Known to the agent alone.
      sketches: uint8 [k, m].
      noise: See `budget.sketch_noise`.

    Returns:
      uint8 [k, m].
    """
    # The greatest of k_p geometric variables, by its distribution (1 - 2^-a)^k_p.
    draw = exponential_numbers(key, sketches.shape) / noise.n_phantoms
    greatest = jnp.maximum(jnp.ceil(-jnp.log2(-jnp.expm1(-draw))), 1.0)
    greatest = jnp.where(noise.n_phantoms > 0, greatest, 0.0)
    return jnp.maximum(sketches, jnp.clip(greatest, noise.least, GREATEST_VALUE).astype(jnp.uint8))


def estimate_size(weights: Array) -> Array:
    """Estimates the elements of a set: D = 0.7213 / (1 + 1.079/m) * m / sum 2^-alpha.

    Its relative standard deviation is 1.04 / sqrt(m), for sets of many elements.

    Args:
      weights: 2^-alpha for the sketch alpha, float32 [..., m].

    Returns:
      float32 [...].
    """
    m = weights.shape[-1]
    return 0.7213 / (1 + 1.079 / m) / jnp.mean(weights, axis=-1)


def complement_weights(sketches: Array) -> Array:
    """Returns 2^-alpha for the union of all clusters of an agent but one, [k, m] from [k, m]."""
    k = len(sketches)
    others = jnp.where(jnp.eye(k, dtype=bool)[:, :, None], jnp.uint8(0), sketches[None])
    return jnp.exp2(-jnp.max(others, axis=1).astype(jnp.float32))


def complement_counts(sketches: Array, total: Array, n_phantoms: Array) -> Array:
    """Counts all cells: max(0, total - (D - k_p A (k - 1))), D of the others' union.

    Args:
      sketches: uint8 [A, k, m].
      total: Noisy number of persons.
      n_phantoms: k_p.

    Returns:
      float32 [k, ..., k] with A axes.
    """
    n_agents, k, _ = sketches.shape
    size = _union_sizes(jax.vmap(complement_weights)(sketches))
    return jnp.maximum(total - (size - n_phantoms * n_agents * (k - 1)), 0.0)


def _union_sizes(weights: Array) -> Array:
    """Returns D of the union of one set of each agent: [k, ..., k] from weights [A, k, m]."""
    n_agents, k, _ = weights.shape

    def one(cell: Array) -> Array:
        places = jnp.unravel_index(cell, (k,) * n_agents)
        union = weights[0, places[0]]
        for agent in range(1, n_agents):
            union = jnp.minimum(union, weights[agent, places[agent]])
        return estimate_size(union)

    sizes = lax.map(one, jnp.arange(k**n_agents), batch_size=_BLOCK)
    return sizes.reshape((k,) * n_agents)


def marginals(sketches: Array, total: Array, n_phantoms: Array) -> tuple[Array, Array]:
    """Counts the clusters of each agent and the cells of each pair of agents.

    One-way D - k_p; two-way total - (D - 2 k_p (k - 1)) with D of the others' union; each set of
    counts is projected to those of sum total (`norm_sub`).

    Args:
      sketches: uint8 [A, k, m].
      total: Noisy number of persons, positive.
      n_phantoms: k_p.

    Returns:
      float32 [A, k], and [A (A - 1) / 2, k, k] in the order of itertools.combinations.
    """
    n_agents, k, _ = sketches.shape
    project = jax.vmap(norm_sub, (0, None))
    sizes = estimate_size(jnp.exp2(-sketches.astype(jnp.float32)))
    one_way = project(sizes - n_phantoms, total)
    weights = jax.vmap(complement_weights)(sketches)
    pairs = jnp.array(list(itertools.combinations(range(n_agents), 2)))
    sizes = lax.map(lambda pair: _union_sizes(weights[pair]), pairs)
    counts = total - (sizes - 2 * n_phantoms * (k - 1))
    return one_way, project(counts.reshape(-1, k * k), total).reshape(-1, k, k)


def norm_sub(values: Array, total: Array) -> Array:
    """Returns the nearest counts that are 0 or more and add up to a total.

    They are max(v + s, 0) with one shift s:
    Wang et al., "Locally differentially private frequency estimation with consistency", 2020.

    Args:
      values: float32 [n].
      total: Positive.
    """
    ordered = jnp.sort(values, descending=True)
    shifts = (total - jnp.cumsum(ordered)) / jnp.arange(1, len(values) + 1)
    last = jnp.sum(ordered + shifts > 0) - 1
    return jnp.maximum(values + shifts[last], 0.0)


def fit_grid(key: Array, one_way: Array, two_way: Array, total: Array) -> Array:
    """Fits a grid of cells to marginals (P2Est).

    Starts with the product of the one-way marginals. Each of A (A - 1) 20 steps (15 for more than
    four agents) draws a pair of agents and adds to the cells a part of what the pair's two-way
    counts exceed the grid's marginal by; every cell stays above a floor. The part begins at 0.5
    and decays. From four agents on it is shared out over the cells that a two-way count sums up;
    with three each of them gets all of it, an over-correction that the decay ends.

    Args:
      key: PRNG key.
      one_way: float32 [A, k].
      two_way: float32 [A (A - 1) / 2, k, k] as `marginals` returns them.
      total: What each set of marginals adds up to.

    Returns:
      float32 [k, ..., k] with A axes.
    """
    n_agents, k = one_way.shape
    pairs = list(itertools.combinations(range(n_agents), 2))
    n_steps = n_agents * (n_agents - 1) * (20 if n_agents <= 4 else 15)
    decay, period = (0.96, 1) if n_agents < 4 else (0.95, 10 if n_agents == 4 else 50)
    cells = 1 if n_agents < 4 else k ** (n_agents - 2)

    def nudge(pair: tuple[int, int], grid: Array, target: Array, part: Array) -> Array:
        others = tuple(a for a in range(n_agents) if a not in pair)
        shape = tuple(k if a in pair else 1 for a in range(n_agents))
        return grid + part * (target.reshape(shape) - grid.sum(others, keepdims=True))

    moves = [partial(nudge, pair) for pair in pairs]

    def step(t: Array, grid: Array) -> Array:
        drawn = jax.random.randint(jax.random.fold_in(key, t), (), 0, len(pairs))
        part = 0.5 * decay ** (t // period) / cells
        return jnp.maximum(lax.switch(drawn, moves, grid, two_way[drawn], part), _FLOOR)

    grid = total
    for shares in one_way / total:
        grid = jnp.expand_dims(grid, -1) * shares.reshape((1,) * grid.ndim + (k,))
    return lax.fori_loop(0, n_steps, step, grid)
