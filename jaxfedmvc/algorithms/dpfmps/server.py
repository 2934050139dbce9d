"""What the server of DPFMPS knows and computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfedmvc import linalg
from jaxfedmvc.algorithm import by_agent
from jaxfedmvc.algorithms.dpfmps.budget import Budget, sketch_delta, sketch_noise, spent
from jaxfedmvc.algorithms.dpfmps.fm_sketch import complement_counts, fit_grid, marginals
from jaxfedmvc.algorithms.dpfmps.lsh_tree import best_centroids
from jaxfedmvc.algorithms.dpfmps.settings import DPFMPSConfig
from jaxfedmvc.precision import matmul

# Added to the count of every cell before k-means.
_LEAST_WEIGHT = 1e-5


class ServerState(NamedTuple):
    """State of the server.

    Attributes:
      budget: Every mechanism's epsilon; public.
      size: The noisy number of rows, int32, at least 1; 0 before it is published.
      centres: For each agent, by its number, its columns [k, p_a] of the final centres, in the
        agent's scaled units.
      spent: (epsilon, delta) of the run, see `budget.spent`; zeros before its sketches are sent.
    """

    budget: Budget
    size: Array
    centres: dict[int, Array]
    spent: tuple[Array, Array]


def keep_size(key: Array, state: ServerState, messages: Any, weights: Any) -> Any:
    """Keeps the noisy number of rows, which one agent sent."""
    (message,) = messages
    return state._replace(size=jnp.maximum(message["size"][0], 1)), {}


def cluster_grid(
    config: DPFMPSConfig, key: Array, state: ServerState, messages: Any, weights: Any
) -> Any:
    """Counts the cells of the grid from sketches alone, and clusters the grid."""
    agents = by_agent(messages)
    sketches = jnp.stack([sent["sketches"] for sent in agents.values()])
    local = [sent["centres"] for sent in agents.values()]
    noise = sketch_noise(state.budget.memberships, sketches.shape[-1], sketch_delta(state.size))
    fit_key, kmeans_key = jax.random.split(key)
    total = state.size.astype(jnp.float32)
    if config.estimator == "complement":
        counts = complement_counts(sketches, total, noise.n_phantoms)
    else:
        one_way, two_way = marginals(sketches, total, noise.n_phantoms)
        counts = fit_grid(fit_key, one_way, two_way, total)
    final = grid_centres(kmeans_key, local, counts, config.n_clusters, config.n_init)
    budget = state.budget._replace(n_agents=len(agents))  # static, and in the state an array
    epsilon, delta = spent(budget, state.size, sketches.shape[-1])
    info = {"epsilon": epsilon, "delta": delta, "mass": jnp.sum(counts)}
    centres = dict(zip(agents, final, strict=True))
    return state._replace(centres=centres, spent=(jnp.float32(epsilon), delta)), info


def grid_centres(
    key: Array, local: list[Array], counts: Array, n_clusters: int, n_init: int
) -> list[Array]:
    """Clusters the cells of a grid by weighted k-means.

    Args:
      key: PRNG key.
      local: The local centres [k, p_a] of each agent.
      counts: float32 [k, ..., k], persons in each cell.
      n_clusters: Static.
      n_init: Starts, static.

    Returns:
      The columns [n_clusters, p_a] of the final centres for each agent.
    """
    # A rotation into the span of the local centres, at most k dimensions for an agent, changes no
    # distance and makes wide data cheap.
    bases, coordinates = zip(*(linalg.qr(centres.T) for centres in local), strict=True)
    cells = jnp.unravel_index(jnp.arange(counts.size), counts.shape)
    points = jnp.concatenate(
        [r.T[place] for r, place in zip(coordinates, cells, strict=True)], axis=1
    )
    weights = counts.reshape(-1) + _LEAST_WEIGHT

    best = best_centroids(key, points, n_clusters, weights, n_clusters, n_init)
    ends = np.cumsum([len(r) for r in coordinates])[:-1]
    parts = jnp.split(best, ends, axis=1)
    return [matmul(part, q.T) for part, q in zip(parts, bases, strict=True)]
