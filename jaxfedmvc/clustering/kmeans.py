"""k-means by Lloyd's algorithm from greedy k-means++ starts, on padded data.

All functions are pure, and jit- and vmap-able with their sizes static. Rows outside `where` are
padding: their values are never read, and appending such rows changes results only by the rounding
of sums. Random choices keep to this too. Each is a Gumbel-max draw whose noise for row i comes
from `fold_in(key, i)`, so that it does not depend on the padded length.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike


class KMeansResult(NamedTuple):
    """A clustering of n rows of d features into k clusters.

    Attributes:
        centroids: Cluster means, float32 [k, d].
        labels: Nearest centroid of each row, int32 [n]; -1 for rows outside `where`.
        inertia: Sum of squared distances of the selected rows to their centroids, scalar.
        n_iter: Number of Lloyd updates made, scalar int32.
    """

    centroids: Array
    labels: Array
    inertia: Array
    n_iter: Array


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
) -> KMeansResult:
    """Minimises sum_i min_j |x_i - c_j|^2 over k centroids c, keeping the best of several starts.

    Degenerate data gives finite results: with fewer distinct selected rows than clusters some
    centroids coincide and all but the first of them stay empty; with no selected row the centroids
    and the inertia are zero.

    Args:
        key: PRNG key of the starts; unused, and may be None, if `centroids` is given.
        x: Data, float32 [n, d].
        n_clusters: Number of clusters k, static.
        where: Rows to cluster, bool [n]; all of them if None.
        centroids: Start of a single run, float32 [k, d]; k-means++ starts if None.
        n_init: Number of k-means++ starts, static. They run side by side and take
            O(n_init * n * k) memory.
        max_iter: Largest number of Lloyd updates per start, static.
        tol: Convergence threshold, see `lloyd`.

    Returns:
        The result of the start with the least inertia.

    Raises:
        ValueError: If `n_clusters`, `n_init` or `max_iter` is below 1, if `x`, `where` or
            `centroids` has the wrong shape, or if both `key` and `centroids` are None.
    """
    x, where = _check_data(x, where)
    _check_at_least_one(n_clusters=n_clusters, n_init=n_init, max_iter=max_iter)
    if centroids is not None:
        centroids = _check_centroids(centroids, (n_clusters, x.shape[1]))
        return lloyd(x, centroids, where, max_iter, tol)
    if key is None:
        raise ValueError("key must be given unless centroids are")

    def run(key: Array) -> KMeansResult:
        return lloyd(x, kmeans_plusplus(key, x, n_clusters, where), where, max_iter, tol)

    runs = jax.vmap(run)(jax.random.split(key, n_init))
    best = jnp.argmin(runs.inertia)
    return KMeansResult(*(leaf[best] for leaf in runs))


def lloyd(
    x: ArrayLike,
    centroids: ArrayLike,
    where: ArrayLike | None = None,
    max_iter: int = 300,
    tol: float = 1e-4,
) -> KMeansResult:
    """Lloyd's algorithm from given centroids (Lloyd, 1982).

    Alternates nearest-centroid labels with cluster means until the centroids together move by at
    most `tol` times the mean feature variance, as a squared distance. A cluster that loses all its
    rows keeps its previous centroid.

    Args:
        x: Data, float32 [n, d].
        centroids: First centroids, float32 [k, d].
        where: Rows to cluster, bool [n]; all of them if None.
        max_iter: Largest number of updates, static.
        tol: Threshold relative to the variance of the selected rows, averaged over features. At 0
            the loop ends when no label changes.

    Returns:
        The last centroids with the labels and the inertia that belong to them.

    Raises:
        ValueError: If `max_iter` is below 1, or `x`, `where` or `centroids` has the wrong shape.
    """
    x, where = _check_data(x, where)
    _check_at_least_one(max_iter=max_iter)
    centroids = _check_centroids(centroids, (None, x.shape[1]))
    # Far from the origin |x|^2 - 2 x.c + |c|^2 is a small difference of large numbers.
    n = jnp.maximum(where.sum(), 1)
    origin = jnp.sum(x, axis=0, where=where[:, None], keepdims=True) / n
    x = jnp.where(where[:, None], x - origin, 0.0)
    centroids = centroids - origin
    threshold = tol * jnp.sum(jnp.square(x)) / (n * x.shape[1])

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        _, moved, n_iter = state
        # Unchanged labels give bit-equal means, so a move of zero also means no label changed.
        return (n_iter < max_iter) & (moved > threshold)

    def update(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        old, _, n_iter = state
        # Product with one-hot labels, not a scatter: it has a fixed order of summation everywhere.
        member = jax.nn.one_hot(_nearest(x, old), len(old)) * where[:, None]
        sizes = member.sum(axis=0)[:, None]
        means = jnp.matmul(member.T, x, precision=lax.Precision.HIGHEST) / jnp.maximum(sizes, 1.0)
        new = jnp.where(sizes > 0, means, old)
        return new, jnp.sum(jnp.square(new - old)), n_iter + 1

    start = centroids, jnp.float32(jnp.inf), jnp.int32(0)
    centroids, _, n_iter = lax.while_loop(unfinished, update, start)
    labels = _nearest(x, centroids)
    inertia = jnp.sum(jnp.square(x - centroids[labels]), where=where[:, None])
    return KMeansResult(centroids + origin, jnp.where(where, labels, -1), inertia, n_iter)


def kmeans_plusplus(
    key: Array, x: ArrayLike, n_clusters: int, where: ArrayLike | None = None
) -> Array:
    """Greedy k-means++ seeding (Arthur & Vassilvitskii, 2007).

    The first centroid is a uniformly chosen row. For each further one, 2 + floor(log k) candidate
    rows are drawn with probability proportional to the squared distance to the nearest centroid so
    far, and the candidate that lowers the sum of these distances most is kept. Once all these
    distances are zero, rows are again drawn uniformly.

    Args:
        key: PRNG key.
        x: Data, float32 [n, d].
        n_clusters: Number of centroids k, static.
        where: Rows to choose from, bool [n]; all of them if None.

    Returns:
        Centroids, float32 [k, d], each a selected row of `x`; zeros if no row is selected.

    Raises:
        ValueError: If `n_clusters` is below 1, or `x` or `where` has the wrong shape.
    """
    x, where = _check_data(x, where)
    _check_at_least_one(n_clusters=n_clusters)
    n_trials = 2 + int(math.log(n_clusters))
    first_key, key = jax.random.split(key)
    first = x[_draw_rows(first_key, where.astype(x.dtype), 1)]
    # Differences are squared directly here, so that a row chosen before has a distance of exactly
    # zero and is not drawn again.
    distances = _masked_distances(x, where, first)[0]
    centroids = jnp.zeros((n_clusters, x.shape[1]), x.dtype).at[0].set(first[0])

    def add(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        centroids, distances = state
        weights = jnp.where(jnp.any(distances > 0), distances, where.astype(x.dtype))
        candidates = x[_draw_rows(jax.random.fold_in(key, i), weights, n_trials)]
        lowered = jnp.minimum(distances[None], _masked_distances(x, where, candidates))
        best = jnp.argmin(lowered.sum(axis=1))
        return centroids.at[i].set(candidates[best]), lowered[best]

    return lax.fori_loop(1, n_clusters, add, (centroids, distances))[0]


def predict(x: ArrayLike, centroids: ArrayLike) -> Array:
    """Nearest centroid of each row, the first of several equally near.

    Args:
        x: Data, float32 [n, d].
        centroids: Centroids, float32 [k, d].

    Returns:
        Labels, int32 [n].

    Raises:
        ValueError: If `x` or `centroids` has the wrong shape.
    """
    x, _ = _check_data(x, None)
    centroids = _check_centroids(centroids, (None, x.shape[1]))
    origin = centroids.mean(axis=0, keepdims=True)  # see `lloyd`
    return _nearest(x - origin, centroids - origin)


def _nearest(x: Array, centroids: Array) -> Array:
    """Labels [n] by least |x - c|^2 - |x|^2 = |c|^2 - 2 x.c."""
    products = jnp.matmul(x, centroids.T, precision=lax.Precision.HIGHEST)
    return jnp.argmin(jnp.sum(jnp.square(centroids), axis=1)[None] - 2 * products, axis=1)


def _masked_distances(x: Array, where: Array, centroids: Array) -> Array:
    """Squared distances [k, n] of all rows to each centroid; zero outside `where`."""
    distances = jnp.sum(jnp.square(x[None] - centroids[:, None]), axis=2)
    return jnp.where(where[None], distances, 0.0)


def _draw_rows(key: Array, weights: Array, n_draws: int) -> Array:
    """Indices [n_draws] drawn with replacement, with probability proportional to `weights` [n]."""

    def noise(row: Array) -> Array:
        # The winner of n draws lies in their upper tail, which only the high mode resolves.
        return jax.random.gumbel(jax.random.fold_in(key, row), (n_draws,), mode="high")

    gumbel = jax.vmap(noise)(jnp.arange(len(weights)))
    return jnp.argmax(jnp.log(weights)[:, None] + gumbel, axis=0)


def _check_data(x: ArrayLike, where: ArrayLike | None) -> tuple[Array, Array]:
    """Checked `x` with zeros for the unselected rows, and `where` as an array."""
    x = jnp.asarray(x, jnp.float32)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must have shape [n, d] with n, d >= 1, got {x.shape}")
    where = jnp.ones(len(x), bool) if where is None else jnp.asarray(where, bool)
    if where.shape != x.shape[:1]:
        raise ValueError(f"where must have shape {x.shape[:1]}, got {where.shape}")
    return jnp.where(where[:, None], x, 0.0), where


def _check_centroids(centroids: ArrayLike, shape: tuple[int | None, int]) -> Array:
    """Checked `centroids`; None in `shape` stands for any number of clusters."""
    centroids = jnp.asarray(centroids, jnp.float32)
    k, d = shape
    fits = centroids.ndim == 2 and centroids.shape[1] == d and len(centroids) >= 1
    if not fits or k not in (None, len(centroids)):
        expected = f"[{'k' if k is None else k}, {d}]"
        raise ValueError(f"centroids must have shape {expected}, got {centroids.shape}")
    return centroids


def _check_at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
