"""k-means by Lloyd's algorithm from greedy k-means++ starts, on padded data.

All functions are pure, and jit- and vmap-able with their sizes static. Rows outside `where` are
padding: their values are never read, and appending such rows changes results only by the rounding
of sums. Random choices keep to this too: each is an exponential race, whose times for the first
rows are the first of one draw and do not depend on the padded length.

Two options are common to all of them. `weights` counts rows: a weight of 2 means what the row
written twice means, and a row of weight 0 gets a label and moves nothing. `limit` is the number of
clusters where that is traced: the first min(limit, k) of the k centroids are used, no label names
another, and the labels are those of a run with `limit` centroids (seeding included, for k up to
1096). One compilation then serves all numbers of clusters up to k. A limit below 1, such as the
number of rows where there are none, counts as 1.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc.checks import NOT_NEGATIVE, floats, mask, number, whole
from jaxfedmvc.precision import in_32_bits, matmul

# Rows per block of a draw from many rows. At 10^6 rows blocks and rows of a block are as many.
_BLOCK = 1024
# Rows have numbers for as many draws, so that the first ones are the same however many are made.
# A centroid takes 2 + floor(log k) of them, which are enough up to k = 1096.
_MOST_DRAWS = 8


class KMeansResult(NamedTuple):
    """A clustering of n rows of d features into k clusters.

    Attributes:
        centroids: Cluster means, float32 [k, d].
        labels: Nearest centroid of each row, int32 [n]; -1 for rows outside `where`.
        inertia: Weighted sum of squared distances of the rows to their centroids, scalar.
        n_iter: Number of Lloyd updates made, scalar int32.
    """

    centroids: Array
    labels: Array
    inertia: Array
    n_iter: Array


@in_32_bits
def kmeans(
    key: Array | None,
    x: ArrayLike,
    n_clusters: int,
    *,
    where: ArrayLike | None = None,
    centroids: ArrayLike | None = None,
    n_init: int = 10,
    max_iter: int = 300,
    tol: float = 1e-4,
    weights: ArrayLike | None = None,
    limit: ArrayLike | None = None,
) -> KMeansResult:
    """Minimises sum_i w_i min_j |x_i - c_j|^2 over k centroids c, keeping the best of some starts.

    Degenerate data gives finite results: with fewer distinct selected rows than clusters some
    centroids coincide and all but the first of them stay empty; with no selected row the inertia is
    zero, and the centroids are, or as they were given. Centroids beyond `limit` are finite and mean
    nothing.

    Args:
        key: PRNG key of the starts; unused, and may be None, if `centroids` is given.
        x: Data, float32 [n, d]. Distances are squared in float32: scale what lies further apart
            than 1e15, or less than 1e-15.
        n_clusters: Number of clusters k, static.
        where: Rows to cluster, bool [n]; all of them if None.
        centroids: Start of a single run, float32 [k, d]; k-means++ starts if None.
        n_init: Number of k-means++ starts, static. They run side by side and take
            O(n_init * n * k) memory.
        max_iter: Largest number of Lloyd updates per start, static.
        tol: Convergence threshold, see `lloyd`.
        weights: Weights w of the rows, finite and non-negative, float32 [n]; ones if None.
        limit: Number of centroids in use, a scalar integer that may be traced; all k if None.

    Returns:
        The result of the start with the least inertia.

    Raises:
        ValueError: If `n_clusters`, `n_init` or `max_iter` is below 1, if `x`, `where`, `weights`,
            `limit` or `centroids` has the wrong shape, if `x`, `weights` or `centroids` is not of
            real numbers, or concrete and not finite, if `weights` or `tol` is negative, or if both
            `key` and `centroids` are None.
    """
    x, where = check_data(x, where)
    _check_at_least_one(n_clusters=n_clusters, n_init=n_init, max_iter=max_iter)
    number("tol", tol, NOT_NEGATIVE)
    if centroids is not None:
        centroids = _check_centroids(centroids, (n_clusters, x.shape[1]))
        return lloyd(
            x,
            centroids,
            where=where,
            max_iter=max_iter,
            tol=tol,
            weights=weights,
            limit=limit,
        )
    if key is None:
        raise ValueError("key must be given unless centroids are")
    weights, limit = _check_weights(weights, where), _check_limit(limit, n_clusters)
    return _best(key, x, where, weights, limit, tol, n_clusters, n_init, max_iter)


@partial(jax.jit, static_argnums=(6, 7, 8), inline=True)
def _best(
    key: Array,
    x: Array,
    where: Array,
    weights: Array | None,
    limit: Array | None,
    tol: ArrayLike,
    n_clusters: int,
    n_init: int,
    max_iter: int,
) -> KMeansResult:
    def run(key: Array) -> KMeansResult:
        start = _plusplus(key, x, where, weights, limit, n_clusters)
        return _lloyd(x, start, where, weights, limit, tol, max_iter)

    runs = jax.vmap(run)(jax.random.split(key, n_init))
    best = jnp.argmin(runs.inertia)
    return KMeansResult(*(leaf[best] for leaf in runs))


@in_32_bits
def lloyd(
    x: ArrayLike,
    centroids: ArrayLike,
    *,
    where: ArrayLike | None = None,
    max_iter: int = 300,
    tol: float = 1e-4,
    weights: ArrayLike | None = None,
    limit: ArrayLike | None = None,
) -> KMeansResult:
    """Makes Lloyd's steps from given centroids (Lloyd, 1982).

    Alternates nearest-centroid labels with cluster means until the centroids together move by at
    most `tol` times the mean feature variance, as a squared distance. A cluster that loses all its
    weight keeps its previous centroid.

    Args:
        x: Data, float32 [n, d].
        centroids: First centroids, float32 [k, d].
        where: Rows to cluster, bool [n]; all of them if None.
        max_iter: Largest number of updates, static.
        tol: Threshold relative to the weighted variance of the selected rows, averaged over
            features. At 0 the loop ends when no label changes.
        weights: Weights of the rows, finite and non-negative, float32 [n]; ones if None.
        limit: Number of centroids in use, a scalar integer that may be traced; all k if None.

    Returns:
        The last centroids with the labels and the inertia that belong to them.

    Raises:
        ValueError: If `max_iter` is below 1, `x`, `where`, `centroids`, `weights` or `limit` has
            the wrong shape, `x`, `weights` or `centroids` is not of real numbers, or concrete and
            not finite, or `weights` or `tol` is negative.
    """
    x, where = check_data(x, where)
    _check_at_least_one(max_iter=max_iter)
    number("tol", tol, NOT_NEGATIVE)
    centroids = _check_centroids(centroids, (None, x.shape[1]))
    weights, limit = _check_weights(weights, where), _check_limit(limit, len(centroids))
    return _lloyd(x, centroids, where, weights, limit, tol, max_iter)


@partial(jax.jit, static_argnums=6, inline=True)
def _lloyd(
    x: Array,
    centroids: Array,
    where: Array,
    weights: Array | None,
    limit: Array | None,
    tol: ArrayLike,
    max_iter: int,
) -> KMeansResult:
    counted, weights = weights is None, _or_ones(weights, where)
    used = _in_use(limit, len(centroids))
    # Far from the origin |x|^2 - 2 x.c + |c|^2 is a small difference of large numbers.
    selected, weight = where[:, None], weights[:, None]
    # A count is an integer, exact for any number of rows.
    total = jnp.maximum(where.sum(), 1) if counted else _one_if_zero(weights.sum())
    origin = jnp.sum(x * weight, axis=0, where=selected, keepdims=True) / total
    x = jnp.where(selected, x - origin, 0.0)
    centroids = centroids - origin
    threshold = tol * jnp.sum(jnp.square(x) * weight) / (total * x.shape[1])

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        _, moved, n_iter = state
        # Unchanged labels give bit-equal means, so a move of zero also means no label changed.
        return (n_iter < max_iter) & (moved > threshold)

    def update(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        old, _, n_iter = state
        # Product with one-hot labels, not a scatter: it has a fixed order of summation everywhere.
        member = jax.nn.one_hot(_nearest(x, old, used), len(old)) * (where * weights)[:, None]
        sizes = member.sum(axis=0)[:, None]
        means = matmul(member.T, x) / _one_if_zero(sizes)
        new = jnp.where(sizes > 0, means, old)
        return new, jnp.sum(jnp.square(new - old)), n_iter + 1

    start = centroids, jnp.float32(jnp.inf), jnp.int32(0)
    centroids, _, n_iter = lax.while_loop(unfinished, update, start)
    labels = _nearest(x, centroids, used)
    inertia = jnp.sum(jnp.square(x - centroids[labels]) * weight, where=selected)
    return KMeansResult(centroids + origin, jnp.where(where, labels, -1), inertia, n_iter)


@in_32_bits
def kmeans_plusplus(
    key: Array,
    x: ArrayLike,
    n_clusters: int,
    *,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    limit: ArrayLike | None = None,
) -> Array:
    """Draws seeds by greedy k-means++ (Arthur & Vassilvitskii, 2007).

    The first centroid is a row chosen by weight. For each further one, 2 + floor(log k) candidate
    rows are drawn with probability proportional to their weight times the squared distance to the
    nearest centroid so far, and the candidate that lowers the sum of these products most is kept.
    Once all these products are zero, rows are again drawn by weight, or alike where all weigh
    nothing.

    Args:
        key: PRNG key.
        x: Data, float32 [n, d].
        n_clusters: Number of centroids k, static.
        where: Rows to choose from, bool [n]; all of them if None.
        weights: Weights of the rows, finite and non-negative, float32 [n]; ones if None.
        limit: Number of centroids to choose, a scalar integer that may be traced; all k if None.

    Returns:
        Centroids, float32 [k, d], each a selected row of `x`; zeros beyond `limit`, and everywhere
        if no row is selected.

    Raises:
        ValueError: If `n_clusters` is below 1, `x`, `where`, `weights` or `limit` has the wrong
            shape, `x` or `weights` is not of real numbers, or concrete and not finite, or `weights`
            is negative.
    """
    x, where = check_data(x, where)
    _check_at_least_one(n_clusters=n_clusters)
    weights, limit = _check_weights(weights, where), _check_limit(limit, n_clusters)
    return _plusplus(key, x, where, weights, limit, n_clusters)


@partial(jax.jit, static_argnums=5, inline=True)
def _plusplus(
    key: Array,
    x: Array,
    where: Array,
    weights: Array | None,
    limit: Array | None,
    n_clusters: int,
) -> Array:
    weights = jnp.where(where, _or_ones(weights, where), 0.0)
    # Rows that all weigh nothing are drawn alike, or the first would be, which may be padding.
    drawn_by = jnp.where(jnp.any(weights > 0), weights, where.astype(weights.dtype))
    last = n_clusters if limit is None else limit
    n_trials = [2 + int(math.log(k)) for k in range(1, n_clusters + 1)]
    last_trial = jnp.array(n_trials)[last - 1] - 1

    def add(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        centroids, costs = state
        first = i == 0
        chances = jnp.where(first | ~jnp.any(costs > 0), drawn_by, costs)
        candidates = x[_draw_rows(jax.random.fold_in(key, i), chances, n_trials[-1])]
        tried = jnp.arange(n_trials[-1]) <= jnp.where(first, 0, last_trial)
        # Differences are squared directly here, so that a row chosen before has a distance of
        # exactly zero and is not drawn again.
        distances = jnp.sum(jnp.square(x[None] - candidates[:, None]), axis=2)
        lowered = jnp.minimum(costs[None], weights[None] * distances)
        best = jnp.argmin(jnp.where(tried, lowered.sum(axis=1), jnp.inf))
        return centroids.at[i].set(candidates[best]), lowered[best]

    start = jnp.zeros((n_clusters, x.shape[1])), jnp.where(weights > 0, jnp.inf, 0.0)
    return lax.fori_loop(0, last, add, start)[0]


@in_32_bits
def predict(x: ArrayLike, centroids: ArrayLike, *, limit: ArrayLike | None = None) -> Array:
    """Finds the nearest centroid of each row, the first of several equally near.

    Args:
        x: Data, float32 [n, d].
        centroids: Centroids, float32 [k, d].
        limit: Number of centroids in use, a scalar integer that may be traced; all k if None.

    Returns:
        Labels, int32 [n].

    Raises:
        ValueError: If `x`, `centroids` or `limit` has the wrong shape, or `x` or `centroids` is not
            of real numbers, or concrete and not finite.
    """
    x, _ = check_data(x, None)
    centroids = _check_centroids(centroids, (None, x.shape[1]))
    used = _in_use(_check_limit(limit, len(centroids)), len(centroids))
    # See `lloyd`; centroids that are not in use may lie anywhere.
    origin = centroids.mean(axis=0, keepdims=True, where=used[:, None])
    return _nearest(x - origin, centroids - origin, used)


def _nearest(x: Array, centroids: Array, used: Array) -> Array:
    """Labels [n] by least |x - c|^2 - |x|^2 = |c|^2 - 2 x.c over the centroids in use."""
    norms = jnp.where(used, jnp.sum(jnp.square(centroids), axis=1), jnp.inf)
    return jnp.argmin(norms[None] - 2 * matmul(x, centroids.T), axis=1)


def _draw_rows(key: Array, weights: Array, n_draws: int) -> Array:
    """Indices [n_draws] drawn with replacement, with probability proportional to `weights` [n].

    Of many rows a block is drawn first, by its sum, and then a row of this block: the same
    probabilities, by noise for some rows only. Blocks beyond the first have no weight if only
    padding lies there, so that short data gives the same draws however it is padded.
    """
    n = len(weights)
    if n <= _BLOCK:
        return _race(key, weights, n_draws)
    blocks = jnp.pad(weights, (0, -n % _BLOCK)).reshape(-1, _BLOCK)
    drawn = _race(jax.random.fold_in(key, 0), blocks.sum(axis=1), n_draws)

    def draw_within(draw: Array, block: Array) -> Array:
        own = jnp.where(block == 0, key, jax.random.fold_in(key, block))
        return block * _BLOCK + _race(own, blocks[block], n_draws)[draw]

    return jax.vmap(draw_within)(jnp.arange(n_draws), drawn)


def _race(key: Array, weights: Array, n_draws: int) -> Array:
    """Draws positions [n_draws] in proportion to `weights` [n].

    The first to arrive, of exponential times with these rates: the same as Gumbel's maximum.
    """
    bits = jax.random.bits(key, (len(weights), max(n_draws, _MOST_DRAWS)))[:, :n_draws]
    # Winners have short times, which the 23 bits of a uniform float32 would not resolve.
    uniform = (bits.astype(jnp.float32) + 0.5) / 2.0**32
    return jnp.argmin(-jnp.log1p(-uniform) / weights[:, None], axis=0)


def means_of(x: Array, labels: Array, k: int) -> tuple[Array, Array]:
    """Computes the mean of each cluster's rows, and how many they are.

    `kmeans` labels rows by its last centroids, which are the means of the labels before: who counts
    the rows behind a mean needs both of one kind.

    Args:
      x: [n, d].
      labels: int32 [n], 0..k-1; rows of -1 belong to no cluster.
      k: Number of clusters, static.

    Returns:
      Means [k, d], zeros for an empty cluster, and numbers [k], float32.
    """
    member = jax.nn.one_hot(labels, k)
    sizes = member.sum(axis=0)
    x = jnp.where((labels >= 0)[:, None], x, 0.0)
    return matmul(member.T, x) / _one_if_zero(sizes)[:, None], sizes


def _one_if_zero(totals: Array) -> Array:
    """`totals` made safe to divide by."""
    return jnp.where(totals > 0, totals, 1.0)


def check_data(x: ArrayLike, where: ArrayLike | None) -> tuple[Array, Array]:
    """Checks rows; returns `x` with zeros for the unselected ones, and `where` as an array.

    Args:
        x: Data [n, d].
        where: Rows that count, bool [n]; all of them if None.

    Raises:
        ValueError: If `x` or `where` has the wrong shape, `x` is not of real numbers, or a selected
            row that is not traced holds one that is not finite.
    """
    x = floats("x", x)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must have shape [n, d] with n, d >= 1, got {x.shape}")
    where = mask(where, x.shape[:1])
    x = jnp.where(where[:, None], x, 0.0)
    if not isinstance(x, jax.core.Tracer) and not np.isfinite(x).all():
        raise ValueError("x must be finite in the rows of where, got NaN or an infinite number")
    return x, where


def _check_weights(weights: ArrayLike | None, where: Array) -> Array | None:
    """Checked `weights`, float32 [n], with zeros for the unselected rows."""
    if weights is None:
        return None
    weights = floats("weights", weights)
    if weights.shape != where.shape:
        raise ValueError(f"weights must have shape {where.shape}, got {weights.shape}")
    weights = jnp.where(where, weights, 0.0)
    if not isinstance(weights, jax.core.Tracer):
        bad = weights[~(jnp.isfinite(weights) & (weights >= 0))]
        if len(bad):
            raise ValueError(f"weights must be finite and non-negative, got {bad[0]}")
    return weights


def _or_ones(weights: Array | None, where: Array) -> Array:
    return jnp.ones(len(where)) if weights is None else weights


def _in_use(limit: Array | None, n_clusters: int) -> Array:
    """Whether a centroid is in use, bool [k]."""
    return jnp.arange(n_clusters) < (n_clusters if limit is None else limit)


def _check_limit(limit: ArrayLike | None, n_clusters: int) -> Array | None:
    """Number of centroids in use, clipped to 1..`n_clusters`."""
    if limit is None:
        return None
    limit = limit if isinstance(limit, Array) else np.asarray(limit)
    if limit.shape != () or not jnp.issubdtype(limit.dtype, jnp.integer):
        raise ValueError(f"limit must be a scalar integer, got {limit.dtype} of {limit.shape}")
    return jnp.clip(limit, 1, n_clusters)


def _check_centroids(centroids: ArrayLike, shape: tuple[int | None, int]) -> Array:
    """Checked `centroids`; None in `shape` stands for any number of clusters."""
    centroids = floats("centroids", centroids)
    k, d = shape
    fits = centroids.ndim == 2 and centroids.shape[1] == d and len(centroids) >= 1
    if not fits or k not in (None, len(centroids)):
        expected = f"[{'k' if k is None else k}, {d}]"
        raise ValueError(f"centroids must have shape {expected}, got {centroids.shape}")
    # One that is NaN would be the nearest of all rows.
    if not isinstance(centroids, jax.core.Tracer) and not np.isfinite(centroids).all():
        raise ValueError("centroids must be finite, got NaN or an infinite number")
    return centroids


def _check_at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        whole(name, size, 1)
