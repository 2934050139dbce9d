"""A guard for messages that hold sums of a client's rows, one for each cluster.

The sum over one row is that row, and the sum over two is no secret either. A client with the guard
sends nothing of a cluster that has too few of its rows: neither their sum nor their number.

The guard looks at one message. Who sees the sums of two rounds sees their difference too, which may
be over fewer rows than either; and what is known from elsewhere of all rows but one gives the last
one away. Against these only noise or secure aggregation helps.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxfedmvc.checks import whole, wrong
from jaxfedmvc.messages.transforms import Transform

PyTree = Any

# What a message must have at least.
_SUMS_AND_SIZES = 2


def large_only(sums: PyTree, sizes: Array, least: int) -> tuple[PyTree, Array]:
    """Sets sums and sizes of clusters below a size to zero.

    Sizes may be sums of weights of rows instead of counts. Where each weight is 1 or less, a
    cluster that stays has `least` rows or more, and none of them makes up more than a share of
    1 / `least` of its weight.

    Args:
      sums: A pytree of arrays that begin with the axes of `sizes`, such as [K, d].
      sizes: Number of rows in each cluster, such as [K]; NaN counts as too few.
      least: Least size that stays, static.
    """
    stays = sizes >= least

    def kept(x: Array) -> Array:
        return jnp.where(stays.reshape(*stays.shape, *[1] * (x.ndim - stays.ndim)), x, 0)

    return jax.tree.map(kept, sums), kept(sizes)


def min_cluster_size(least: int) -> Transform:
    """Sets what a message tells of clusters of fewer than `least` rows to zero.

    The message is sums (or means) and sizes, as `large_only` takes them; what comes after them is
    not of clusters, and stays.

    Raises:
      ValueError: `least` is below 1, or no whole number; at trace time, the message is no tuple of
        sums and sizes, or the sums of a leaf do not begin with the axes of the sizes.
    """
    whole("least", least, 1)

    def transform(key: Array, message: tuple, sent: PyTree) -> Any:
        if not isinstance(message, tuple | list) or len(message) < _SUMS_AND_SIZES:
            raise wrong(
                "message", type(message).__name__, "a tuple that begins with sums and sizes"
            )
        sums, sizes, *rest = message
        axes = jnp.shape(sizes)
        for x in jax.tree.leaves(sums):
            if jnp.shape(x)[: len(axes)] != axes:
                allowed = f"sums that begin with the axes of the sizes, {axes}"
                raise wrong("message", f"sums of shape {jnp.shape(x)}", allowed)
        return *large_only(sums, sizes, least), *rest

    return transform
