"""Which views tell of the clusters that others tell of: by how views' own clusters agree."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

# Of two views nothing says which one to leave out.
LEAST_VIEWS = 3
# Two views that agree have each other; one alone agrees with nobody.
_LEAST_KEPT = 2


def pairs(n_views: int) -> tuple[Array, Array]:
    """Returns the places of the first and of the second view of every pair, in order."""
    return jnp.triu_indices(n_views, 1)


def mean_agreement(of_pairs: Array, n_views: int) -> Array:
    """Computes each view's mean agreement with all others.

    Args:
      of_pairs: Agreement of each of the `pairs`, such as the adjusted Rand index.
      n_views: Number of views s, two or more.

    Returns:
      float32 [s].
    """
    first, second = pairs(n_views)
    total = jnp.zeros(n_views).at[first].add(of_pairs).at[second].add(of_pairs)
    return total / (n_views - 1)


def agreeing(agreement: Array, least: ArrayLike) -> Array:
    """Returns the views whose agreement is a share `least` of the greatest one's or more.

    The two that agree most are always among them. All are where no view agrees with others better
    than by chance, or where the agreement is not known (NaN).

    Args:
      agreement: Of each view with the others, 0 for what chance gives, [s].
      least: Share, from 0 to 1, traced.

    Returns:
      bool [s].
    """
    greatest = jnp.max(agreement)
    places = jnp.argsort(-agreement, stable=True)
    first = jnp.zeros(len(agreement), bool).at[places[:_LEAST_KEPT]].set(True)
    unknown = ~(greatest > 0)
    return unknown | first | (agreement >= least * greatest)
