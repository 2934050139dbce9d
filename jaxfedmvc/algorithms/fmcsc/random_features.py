"""What rows are described by where their clusters are taught: random features phi, see `teaching`.

Half of the features are of a view's own features, the other half of its Z (Rahimi and Recht,
"Random features for large-scale kernel machines", NeurIPS 2007). Where views are images, phi may be
made of their patches instead: how much of each of many random patterns is in each part of the
image, as in Coates, Lee and Ng, "An analysis of single-layer networks in unsupervised feature
learning", AISTATS 2011, whose patterns may be random.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc.algorithms.fmcsc.networks import Views, side_by_side
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig
from jaxfedmvc.precision import matmul

# Parts of an image, on each side, over which features of patches are averaged.
CELLS = 4
# Contrast of a patch that counts as none, as a share of the image's.
_FLAT = 0.01
# Images whose patches are in memory at once.
_AT_ONCE = 128
_EXACT = jax.lax.Precision.HIGHEST


class Block(NamedTuple):
    """What random features are made of, before they are drawn.

    Attributes:
      centre: Mean of all rows, [d].
      scale: One over the root of their total variance, a scalar.
    """

    centre: jax.Array
    scale: jax.Array


def row_features(
    config: FMCSCConfig,
    seed: jax.Array,
    blocks: tuple[Block, ...],
    views: Views,
    z: jax.Array | None,
) -> jax.Array:
    """Computes phi [rows, teach_features] of rows of these views.

    Of the views and Z [rows, width] side by side; without Z, of the patches of each view's images,
    side by side, too, or with `teach_together` the mean of phi over the views, which have the same
    patterns, so that a row's scores are the mean of its images'.
    """
    if z is not None:
        rows = side_by_side(views), z
        return random_features(config.teach_features, seed, blocks, rows)
    if config.teach_together:
        n_filters = config.teach_features // CELLS**2
        each = [patch_features(n_filters, config.teach_patches, seed, x) for x in views.values()]
        return jnp.mean(jnp.stack(each), axis=0)
    n_filters = config.teach_features // (len(views) * CELLS**2)
    parts = [
        patch_features(n_filters, config.teach_patches, jnp.stack([seed[0], seed[1] + v]), views[v])
        for v in sorted(views)
    ]
    return jnp.concatenate(parts, axis=1) / math.sqrt(len(views))


def random_features(
    n_features: int,
    seed: jax.Array,
    blocks: tuple[Block, ...],
    rows: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Computes phi [rows, m], half of it of each block.

    With x in units of the block's total variance, phi(x) . phi(y) is about the sum over blocks of
    exp(-|x - y|^2 / 2).

    Args:
      n_features: m, even.
      seed: uint32 [2]; the same seed, the same features, wherever they are drawn.
      blocks: Centre and scale of each block.
      rows: [rows, d] of each block.
    """
    key, half = jax.random.wrap_key_data(seed, impl="threefry2x32"), n_features // 2

    def of_block(place: int, block: Block, x: jax.Array) -> jax.Array:
        key_directions, key_phases = jax.random.split(jax.random.fold_in(key, place))
        directions = jax.random.normal(key_directions, (x.shape[1], half))
        phases = jax.random.uniform(key_phases, (half,), maxval=2 * jnp.pi)
        scaled = (x - block.centre[None]) * block.scale
        angles = matmul(scaled, directions) + phases[None]
        return jnp.sqrt(2 / half) * jnp.cos(angles)

    parts = [of_block(i, block, x) for i, (block, x) in enumerate(zip(blocks, rows, strict=True))]
    return jnp.concatenate(parts, axis=1)


def patch_features(n_filters: int, side: int, seed: jax.Array, x: jax.Array) -> jax.Array:
    """Computes features of square grey images, n_filters for each of their CELLS x CELLS parts.

    With w a random pattern of mean 0 and norm 1 and p a patch less its mean, a feature is the root
    of the mean of max(w . p / |p|, 0) over the patches of a part; |p|^2 is raised by a hundredth of
    what it would be were the image's contrast the same everywhere, so that noise in flat patches
    does not count. All features of an image have norm 1, or 0 where there is no contrast.

    Args:
      n_filters: Number of patterns.
      side: Of a patch, in pixels.
      seed: uint32 [2]; the same seed, the same patterns, wherever they are drawn.
      x: Images [rows, pixels], row by row.

    Returns:
      [rows, n_filters CELLS^2].
    """
    key, width = jax.random.wrap_key_data(seed, impl="threefry2x32"), math.isqrt(x.shape[1])
    patterns = jax.random.normal(key, (side, side, n_filters))
    patterns -= jnp.mean(patterns, axis=(0, 1), keepdims=True)
    patterns /= jnp.linalg.norm(patterns, axis=(0, 1), keepdims=True)
    pooling = _pooling(width - side + 1)

    def along(images: jax.Array, kernels: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            images,
            kernels,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision=_EXACT,
        )

    def some(x: jax.Array) -> jax.Array:
        brightness = jnp.mean(jnp.square(x))
        x -= jnp.mean(x)
        x = jnp.where(jnp.mean(jnp.square(x)) > 1e-10 * brightness, x, 0.0)  # not mere rounding
        image, ones = x.reshape(1, width, width, 1), jnp.ones((side, side, 1, 1))
        squares = along(jnp.square(image), ones) - jnp.square(along(image, ones)) / side**2
        flat = _FLAT * side**2 * jnp.mean(jnp.square(x))
        norms = jnp.sqrt(jnp.maximum(squares, 0.0) + jnp.where(flat > 0, flat, 1.0))
        found = jnp.maximum(along(image, patterns[:, :, None]), 0.0) / norms
        means = jnp.einsum("hwf,ah,bw->abf", found[0], pooling, pooling, precision=_EXACT)
        # The norm of the roots is the root of the sum.
        return jnp.sqrt(means.ravel() / jnp.maximum(jnp.sum(means), 1e-12))

    return jax.lax.map(some, x, batch_size=_AT_ONCE)


def _pooling(n_places: int) -> np.ndarray:
    """Returns means over the places of each part of an image along one side, [CELLS, n_places]."""
    bounds = np.round(np.linspace(0, n_places, CELLS + 1)).astype(int)
    pooling = np.zeros((CELLS, n_places), np.float32)
    for part, (first, end) in enumerate(itertools.pairwise(bounds)):
        pooling[part, first:end] = 1 / (end - first)
    return pooling
