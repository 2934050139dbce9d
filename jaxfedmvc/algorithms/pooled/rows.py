"""Preparing rows of which some views are missing."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from jaxfedmvc.losses import l2_normalize

# Why a view needs two features, for those who use `unit_samples`.
UNIT_ROWS = "rows are scaled to length 1; join it with another view"


def blank(views: Sequence[Array], observed: Array) -> tuple[Array, ...]:
    """Puts zeros in the place of what is not observed, whatever lies there.

    Args:
      views: [N, D_v] each.
      observed: bool [N, V].

    Raises:
      ValueError: Shapes do not agree.
    """
    shape = observed.shape
    for v, x in enumerate(views):
        if x.ndim != 2 or len(x) != len(views[0]):
            raise ValueError(f"views[{v}]: has the shape {x.shape}; allowed is [N, D_v], one N")
    if shape != (len(views[0]), len(views)):
        raise ValueError(
            f"observed: has the shape {shape}; allowed is {(len(views[0]), len(views))}, [N, V]"
        )
    return tuple(jnp.where(observed[:, v, None], x, 0.0) for v, x in enumerate(views))


def unit_samples(views: Sequence[Array], observed: Array) -> tuple[Array, ...]:
    """Scales observed rows to length 1, of whatever magnitude; the others become zero.

    By a power of two first, which changes no digit: squares neither overflow nor vanish.
    """

    def scaled(x: Array) -> Array:
        _, power = jnp.frexp(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
        return l2_normalize(jnp.ldexp(x, -power))

    return tuple(scaled(x) for x in blank(views, observed))


def min_max(views: Sequence[Array], observed: Array) -> tuple[Array, ...]:
    """Maps every feature to [0, 1] over its observed rows; rows that are not observed are zero."""
    scaled = []
    for v, x in enumerate(blank(views, observed)):
        there = observed[:, v, None]
        low = jnp.min(jnp.where(there, x, jnp.inf), axis=0, keepdims=True)
        high = jnp.max(jnp.where(there, x, -jnp.inf), axis=0, keepdims=True)
        span = jnp.where(high > low, high - low, 1.0)
        scaled.append(jnp.where(there, (x - jnp.where(jnp.isfinite(low), low, 0.0)) / span, 0.0))
    return tuple(scaled)


def check_widths(method: str, widths: Sequence[int], least: int, why: str) -> None:
    """Checks that every view has as many features.

    Raises:
      ValueError: Names the first that has fewer.
    """
    for v, width in enumerate(widths):
        if width < least:
            raise ValueError(
                f"{method}: view {v} has {width} feature{'s' * (width != 1)}; allowed is {least} or"
                f" more ({why})"
            )


def is_real(observed: Array) -> Array:
    """Tells which rows have any view, bool [N]; the others are padding."""
    return jnp.any(observed, axis=1)
