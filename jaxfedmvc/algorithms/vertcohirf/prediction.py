"""Assigns new samples to the final clusters, by the same two kinds of message as training."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc.checks import wrong


def medoid_rankings(x: ArrayLike, medoids: ArrayLike) -> Array:
    """Returns what an agent sends of new samples: positions of the medoids, nearest first.

    Args:
      x: The agent's features of the new samples [r, p].
      medoids: Its features of the final medoids [m, p], in the order of their clusters; where
        clusters were refined, which no medoid speaks for, the means of its features over each.

    Returns:
      int32 [r, m].

    Raises:
      ValueError: The shapes do not fit together.
    """
    x, medoids = jnp.asarray(x, jnp.float32), jnp.asarray(medoids, jnp.float32)
    if x.ndim != 2 or medoids.ndim != 2 or x.shape[1] != medoids.shape[1]:
        raise ValueError(
            f"x: got {x.shape} beside medoids {medoids.shape}; allowed are [r, p] and [m, p]"
        )
    distance = jnp.sum(jnp.square(x[:, None] - medoids[None]), axis=2)
    return jnp.argsort(distance, axis=1, stable=True).astype(jnp.int32)


def predict(rankings: ArrayLike, rule: Literal["strict", "ranked"] = "strict") -> Array:
    """Returns the clusters of new samples by consensus on their nearest medoids.

    Args:
      rankings: int32 [agents, r, m] as `medoid_rankings` gives.
      rule: "strict", the rule of the first exchange: a sample joins the cluster whose medoid is
        nearest to it for all agents, and is -1 where they differ. "ranked", the rule of the second:
        the medoid of least rank sum, the first of equals; every sample joins one.

    Returns:
      int32 [r].

    Raises:
      ValueError: Unknown rule, wrong shape.
    """
    rankings = jnp.asarray(rankings, jnp.int32)
    if rankings.ndim != 3 or not (len(rankings) and rankings.shape[2]):
        raise ValueError(
            f"rankings: got shape {rankings.shape}; allowed is [agents, r, m], with an agent and a"
            " medoid at least"
        )
    if rule == "strict":
        nearest = rankings[:, :, 0]
        return jnp.where(jnp.all(nearest == nearest[:1], axis=0), nearest[0], -1)
    if rule == "ranked":
        return jnp.argmin(jnp.sum(jnp.argsort(rankings, axis=2), axis=0), axis=1).astype(jnp.int32)
    raise wrong("rule", rule, "'strict' or 'ranked'")
