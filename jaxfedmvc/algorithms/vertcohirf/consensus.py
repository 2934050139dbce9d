"""Consensus of several partitions of the same rows, as pure functions of label vectors.

Labels are integers >= 0. Rows outside `where` are padding. All partitions come back as codes 0..
in a fixed order, so that all who evaluate these functions on the same labels get the same numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc.algorithms.shared.cells import segment_sizes, strict_consensus


def relaxed_consensus(labels: Array, where: Array, used: Array, threshold: ArrayLike) -> Array:
    """Returns the strict consensus of the columns that agree with the rest.

    While there are two columns or more: with ARI_i the agreement of the consensus of all with that
    of all but i, drop the column of least ARI_i (the first of several) if that is below the
    threshold h (CoHiRF; "*" in the paper's tables).

    Args:
      labels: int32 [columns, c].
      where: Rows in use, bool [c].
      used: Columns to begin with, bool [columns].
      threshold: h.

    Returns:
      Codes as `strict_consensus` gives.
    """
    columns = jnp.arange(len(labels))

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        used, _, go = state
        return go & (jnp.sum(used) > 1)

    def drop(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        used, codes, _ = state
        without = lax.map(
            lambda i: strict_consensus(labels, where, used & (columns != i))[0], columns
        )
        agreement = jax.vmap(lambda coarse: ari_of_refinement(codes, coarse, where))(without)
        agreement = jnp.where(used, agreement, jnp.inf)
        worst = jnp.argmin(agreement)
        go = agreement[worst] < threshold
        used = jnp.where(go, used & (columns != worst), used)
        return used, jnp.where(go, without[worst], codes), go

    codes, _ = strict_consensus(labels, where, used)
    return lax.while_loop(unfinished, drop, (used, codes, jnp.bool_(True)))[1]


def ari_of_refinement(fine: Array, coarse: Array, where: Array) -> Array:
    """Computes the adjusted Rand index of two partitions of which the first refines the second.

    Every cell of their contingency table is then a cluster of the first, so that with f and g the
    shares of pairs of rows that are together in each, ARI = 2 f (1 - g) / (f + g - 2 f g).

    Args:
      fine: Codes int32 [c], below c.
      coarse: Codes int32 [c] of a partition that never splits a cluster of `fine`.
      where: Rows in use, bool [c].
    """
    everything = jnp.maximum(_pairs(segment_sizes(jnp.zeros_like(fine), where)), 1.0)
    f = _pairs(segment_sizes(fine, where)) / everything
    g = _pairs(segment_sizes(coarse, where)) / everything
    spread = f + g - 2 * f * g
    same = (f == g) | (spread == 0)
    return jnp.where(same, 1.0, 2 * f * (1 - g) / jnp.where(same, 1.0, spread))


def _pairs(sizes: Array) -> Array:
    """Returns sum n (n - 1) / 2 over groups of these sizes [c], float32.

    Counted in integers where these suffice, so that equal partitions compare as equal however
    their groups are numbered.
    """
    if len(sizes) > 46340:  # n (n - 1) of one group no longer fits
        sizes = sizes.astype(jnp.float32)
        return jnp.sum(sizes * (sizes - 1) / 2)
    return jnp.sum(sizes * (sizes - 1) // 2).astype(jnp.float32)
