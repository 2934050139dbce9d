"""Cells of samples that several columns of labels tell apart, and sums over them.

Labels are integers >= 0. Rows outside `where` are padding. Cells come back as codes 0.. in a fixed
order, so that all who evaluate these functions on the same labels get the same numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def strict_consensus(labels: Array, where: Array, used: Array | None = None) -> tuple[Array, Array]:
    """Returns the partition in which rows are together if and only if all columns agree.

    Args:
      labels: int32 [columns, c].
      where: Rows in use, bool [c].
      used: Columns that count, bool [columns]; all if None.

    Returns:
      Codes int32 [c], the ranks of the distinct label rows in lexicographic order with column 0
      the most significant, -1 outside `where`; and their number.
    """
    if used is not None:
        labels = jnp.where(used[:, None], labels, 0)
    position = jnp.arange(labels.shape[1], dtype=jnp.int32)
    keys = (~where, *labels)
    *ordered, places = lax.sort((*keys, position), num_keys=len(keys))
    differs = jnp.any(jnp.stack([k[1:] != k[:-1] for k in ordered]), axis=0)
    codes = jnp.cumsum(jnp.pad(differs, (1, 0)), dtype=jnp.int32)
    codes = jnp.where(where, jnp.zeros_like(codes).at[places].set(codes), -1)
    return codes, jnp.max(codes) + 1


# Sums of more rows would not fit the fixed point of `exact_segment_sum`.
MOST_SUMMED = 2**20


def exact_segment_sum(x: Array, cells: Array, n_cells: int) -> Array:
    """Sums rows [c, p] with entries in [-1, 1] over cells, to the same bits in any order.

    In fixed point, so that neither padding nor the device's order of summation matters: two limbs
    of 10 and 11 bits, whose sums over up to `MOST_SUMMED` rows fit int32; the resolution is 2^-21.
    """
    high = jnp.round(x * 2.0**10)
    low = jnp.round((x * 2.0**10 - high) * 2.0**11)
    high, low = (
        jax.ops.segment_sum(limb.astype(jnp.int32), cells, n_cells) for limb in (high, low)
    )
    return high * 2.0**-10 + low * 2.0**-21


def segment_sizes(codes: Array, where: Array) -> Array:
    """Counts the rows of each code, int32 [c] for codes [c] below c."""
    cells = jnp.where(where, codes, len(codes))
    return jax.ops.segment_sum(jnp.ones_like(codes), cells, len(codes))
