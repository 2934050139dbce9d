"""Agreement of a clustering with known classes, as pure functions of two label vectors.

Every score is a function of the contingency matrix alone, and contingency matrices of disjoint
groups of rows add up. `contingency` and `scores_from_contingency` are therefore public: the score
of a whole federation needs each client's [n_classes, n_clusters] counts, not its labels.

Counts are float32, exact up to 2**24 rows. The sums below are arranged so that everything
subtracted is an exact integer, which keeps the scores within about 1e-6 of double precision even
when nearly all rows share one cluster.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from optax import assignment

from jaxfedmvc import checks
from jaxfedmvc.precision import in_32_bits, matmul


@in_32_bits
def contingency(
    labels: ArrayLike,
    predicted: ArrayLike,
    n_classes: int,
    n_clusters: int,
    where: ArrayLike | None = None,
) -> Array:
    """Counts how many rows of each class fell into each cluster.

    Args:
        labels: Class of each row, integer [n].
        predicted: Cluster of each row, integer [n].
        n_classes: Number of classes, static.
        n_clusters: Number of clusters, static; it may differ from `n_classes`.
        where: Rows to count, bool [n]; all of them if None.

    Returns:
        Counts, float32 [n_classes, n_clusters]. A row whose label or prediction is out of range,
        such as the -1 of padding, is counted nowhere, whether selected or not.

    Raises:
        ValueError: If `n_classes` or `n_clusters` is below 1, or if `labels`, `predicted` and
            `where` are not vectors of one length, or `labels` or `predicted` not of integers.
    """
    labels, predicted = _numbers("labels", labels), _numbers("predicted", predicted)
    checks.whole("n_classes", n_classes, 1)
    checks.whole("n_clusters", n_clusters, 1)
    if labels.ndim != 1:
        raise ValueError(f"labels must have shape [n], got {labels.shape}")
    if predicted.shape != labels.shape:
        raise ValueError(f"predicted must have shape {labels.shape}, got {predicted.shape}")
    counted = (labels >= 0) & (labels < n_classes) & (predicted >= 0) & (predicted < n_clusters)
    if where is not None:
        counted &= checks.mask(where, labels.shape)
    # Uncounted rows add zero to cell (0, 0): a negative index would wrap around, not be dropped.
    cells = jnp.where(counted, labels, 0), jnp.where(counted, predicted, 0)
    return jnp.zeros((n_classes, n_clusters), jnp.float32).at[cells].add(counted)


def _numbers(name: str, labels: ArrayLike) -> Array:
    """Returns labels as int32: a narrower type may not hold the number of classes."""
    if not any(isinstance(leaf, Array) for leaf in jax.tree.leaves(labels)):
        try:
            labels = np.asarray(labels)
        except ValueError as error:
            raise ValueError(f"{name} must be integers [n]: {error}") from error
        if labels.dtype.kind not in "biuf":
            raise ValueError(f"{name} must be integers, got {labels.dtype}")
        if labels.dtype.kind in "iu" and labels.dtype.itemsize > 4:
            # Beyond int32 all are out of range; a cast would make some of them small numbers.
            inside = (labels >= 0) & (labels < 2**31)
            labels = np.where(inside, labels.astype(np.int64), -1)
    array = jnp.asarray(labels)
    if not (jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == bool):
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    return array.astype(jnp.int32)


@in_32_bits
def scores_from_contingency(table: ArrayLike) -> dict[str, Array]:
    """Computes all scores of one contingency matrix.

    Args:
        table: Counts, float32 [n_classes, n_clusters], as returned by `contingency`, or the sum
            of several such matrices. Integers become float32, as products of them overflow.

    Returns:
        Scalars under the keys `acc`, `nmi`, `ari` and `purity`; all NaN if `table` is all zero.

    Raises:
        ValueError: If `table` is not a matrix of real numbers with a row and a column.
    """
    table = _counts(table)
    return {
        "acc": _acc(table),
        "nmi": _nmi(table),
        "ari": ari_from_contingency(table),
        "purity": _purity(table),
    }


def _counts(table: ArrayLike) -> Array:
    """Returns `table` as float32: sums of products of counts are too large for int32."""
    table = checks.floats("table", table)
    if table.ndim != 2 or 0 in table.shape:
        raise ValueError(f"table must have shape [n_classes, n_clusters], got {table.shape}")
    return table


@in_32_bits
def scores(
    labels: ArrayLike,
    predicted: ArrayLike,
    n_classes: int,
    n_clusters: int,
    where: ArrayLike | None = None,
) -> dict[str, Array]:
    """Computes all scores of one clustering, sharing one contingency matrix.

    Rows that are in no cluster, -1, are not scored: leaving hard ones out raises every score.

    Args:
        labels: Class of each row, integer [n].
        predicted: Cluster of each row, integer [n].
        n_classes: Number of classes, static.
        n_clusters: Number of clusters, static.
        where: Rows to score, bool [n]; all of them if None.

    Returns:
        Scalars under the keys `acc`, `nmi`, `ari` and `purity`, as returned by `accuracy`, `nmi`,
        `ari` and `purity`. All are NaN if no row is counted: a group without rows has no score.

    Raises:
        ValueError: As `contingency` does.
    """
    return scores_from_contingency(contingency(labels, predicted, n_classes, n_clusters, where))


@in_32_bits
def accuracy(
    labels: ArrayLike,
    predicted: ArrayLike,
    n_classes: int,
    n_clusters: int,
    where: ArrayLike | None = None,
) -> Array:
    """Computes the share of rows that are right under the best one-to-one naming of clusters.

    With N the contingency matrix of n rows, max over matchings M of sum_{(i, j) in M} N_ij / n,
    found by the Hungarian method (Kuhn, 1955). With more clusters than classes the surplus
    clusters stay unmatched and their rows count as wrong, and likewise for surplus classes.

    Args:
        labels: Class of each row, integer [n].
        predicted: Cluster of each row, integer [n].
        n_classes: Number of classes, static.
        n_clusters: Number of clusters, static.
        where: Rows to score, bool [n]; all of them if None.

    Returns:
        Scalar in [0, 1]; NaN if no row is counted.

    Raises:
        ValueError: As `contingency` does.
    """
    return _acc(contingency(labels, predicted, n_classes, n_clusters, where))


@in_32_bits
def nmi(
    labels: ArrayLike,
    predicted: ArrayLike,
    n_classes: int,
    n_clusters: int,
    where: ArrayLike | None = None,
) -> Array:
    """Computes the normalised mutual information 2 I(U; V) / (H(U) + H(V)) (Vinh et al., 2010).

    Args:
        labels: Class of each row, integer [n].
        predicted: Cluster of each row, integer [n].
        n_classes: Number of classes, static.
        n_clusters: Number of clusters, static.
        where: Rows to score, bool [n]; all of them if None.

    Returns:
        Scalar in [0, 1]; NaN if no row is counted. It is 1 if both labelings put all rows into one
        group and 0 if only one of them does.

    Raises:
        ValueError: As `contingency` does.
    """
    return _nmi(contingency(labels, predicted, n_classes, n_clusters, where))


@in_32_bits
def ari(
    labels: ArrayLike,
    predicted: ArrayLike,
    n_classes: int,
    n_clusters: int,
    where: ArrayLike | None = None,
) -> Array:
    """Computes the Rand index adjusted for chance (Hubert & Arabie, 1985).

    Over ordered pairs of distinct rows, with `tp` pairs together in both labelings, `fn` only in
    `labels`, `fp` only in `predicted` and `tn` in neither:

        2 (tp tn - fn fp) / ((tp + fn) (fn + tn) + (tp + fp) (fp + tn)).

    Args:
        labels: Class of each row, integer [n].
        predicted: Cluster of each row, integer [n].
        n_classes: Number of classes, static.
        n_clusters: Number of clusters, static.
        where: Rows to score, bool [n]; all of them if None.

    Returns:
        Scalar, 1 for equal partitions, about 0 for unrelated ones and as low as -0.5; NaN if no row
        is counted.

    Raises:
        ValueError: As `contingency` does.
    """
    return ari_from_contingency(contingency(labels, predicted, n_classes, n_clusters, where))


@in_32_bits
def purity(
    labels: ArrayLike,
    predicted: ArrayLike,
    n_classes: int,
    n_clusters: int,
    where: ArrayLike | None = None,
) -> Array:
    """Computes the share of rows in the commonest class of their cluster, sum_j max_i N_ij / n.

    Args:
        labels: Class of each row, integer [n].
        predicted: Cluster of each row, integer [n].
        n_classes: Number of classes, static.
        n_clusters: Number of clusters, static.
        where: Rows to score, bool [n]; all of them if None.

    Returns:
        Scalar in [0, 1]; NaN if no row is counted.

    Raises:
        ValueError: As `contingency` does.
    """
    return _purity(contingency(labels, predicted, n_classes, n_clusters, where))


@partial(jax.jit, inline=True)
def _acc(table: Array) -> Array:
    matched = assignment.hungarian_algorithm(-table)  # accepts rectangular costs
    return table[matched].sum() / table.sum()


def _purity(table: Array) -> Array:
    return table.max(axis=0).sum() / table.sum()


def _nmi(table: Array) -> Array:
    n = table.sum()
    classes, clusters, only_class, only_cluster, neither = _margins(table)
    # I = sum_ij p_ij log(n N_ij / (a_i b_j)). The argument minus one, n N_ij / (a_i b_j) - 1, has
    # the numerator below; log1p of it survives p_ij near 1, where log(p_ij) is all rounding.
    excess = (table * neither - only_class * only_cluster) / jnp.maximum(classes * clusters, 1.0)
    # Empty cells have p_ij = 0 and an excess of -1, hence 0 * -inf without the guard.
    information = jnp.sum(table * jnp.log1p(jnp.where(table > 0, excess, 0.0))) / n
    normaliser = (entropy(classes) + entropy(clusters)) / 2
    trivial = normaliser == 0  # one class and one cluster
    score = jnp.clip(information / jnp.where(trivial, 1.0, normaliser), 0.0, 1.0)
    return jnp.where(n > 0, jnp.where(trivial, 1.0, score), jnp.nan)


@in_32_bits
def ari_from_contingency(table: ArrayLike) -> Array:
    """Computes the Rand index adjusted for chance of one contingency matrix, see `ari`.

    Args:
        table: Counts, float32 [n_classes, n_clusters]; see `scores_from_contingency`.

    Returns:
        Scalar; NaN if nothing is counted.

    Raises:
        ValueError: If `table` is not a matrix of real numbers with a row and a column.
    """
    table = _counts(table)
    _, _, only_class, only_cluster, neither = _margins(table)
    # Sums of non-negative terms with exact factors: nothing cancels before tp tn - fn fp.
    tp = jnp.sum(table * (table - 1))
    fn = jnp.sum(table * only_class)
    fp = jnp.sum(table * only_cluster)
    tn = jnp.sum(table * neither)
    same = (fn == 0) & (fp == 0)  # equal partitions, including those that leave 0 / 0 below
    spread = (tp + fn) * (fn + tn) + (tp + fp) * (fp + tn)
    score = 2 * (tp * tn - fn * fp) / jnp.where(same, 1.0, spread)
    return jnp.where(table.sum() > 0, jnp.where(same, 1.0, score), jnp.nan)


def _margins(table: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Sizes of each cell's class and cluster, and the rows in one or neither of them.

    Returns:
        Class sizes [n_classes, 1], cluster sizes [1, n_clusters], and per cell the rows that share
        only its class, only its cluster, and neither, each [n_classes, n_clusters].
    """
    classes = table.sum(axis=1, keepdims=True)
    clusters = table.sum(axis=0, keepdims=True)
    only_class = classes - table
    only_cluster = clusters - table
    return classes, clusters, only_class, only_cluster, table.sum() - classes - only_cluster


def entropy(sizes: Array) -> Array:
    """Computes the entropy, in nats, of a partition with these group sizes."""
    n = sizes.sum()
    # -log(s / n) as log1p((n - s) / s), which stays accurate when one group holds nearly all rows.
    return jnp.sum(sizes * jnp.log1p((n - sizes) / jnp.maximum(sizes, 1.0))) / jnp.maximum(n, 1.0)


@in_32_bits
def simplified_silhouette(
    x: ArrayLike, labels: ArrayLike, n_clusters: int, where: ArrayLike | None = None
) -> Array:
    """Computes how much nearer rows are to their own centroid than to the next; needs no classes.

    The mean over rows of (b - a) / max(a, b), a the distance to the own centroid and b to the
    nearest other one: the silhouette with centroids in place of members, which costs n K distances
    instead of n^2. E. R. Hruschka et al., "Evolutionary search for optimal fuzzy c-means
    clustering", 2004; L. Vendramin et al., "Relative clustering validity criteria", 2010.

    Args:
        x: float32 [n, d].
        labels: Cluster of each row, integer [n], 0 to n_clusters - 1.
        n_clusters: Static number of clusters; those without rows do not count.
        where: Rows to count, bool [n]; all of them if None.

    Returns:
        A scalar in [-1, 1]; 0 counts for a row whose two distances are both zero. NaN with fewer
        than two clusters that have rows.

    Raises:
        ValueError: If `n_clusters` is below 1, the shapes do not fit, `x` is not of real numbers,
            or not traced and not finite in a row that counts, or `labels` not of integers.
    """
    x, labels = checks.floats("x", x), _numbers("labels", labels)
    checks.whole("n_clusters", n_clusters, 1)
    if x.ndim != 2 or labels.shape != x.shape[:1]:
        raise ValueError(f"x and labels must be [n, d] and [n], got {x.shape} and {labels.shape}")
    where = checks.mask(where, labels.shape) & (labels >= 0) & (labels < n_clusters)
    x = jnp.where(where[:, None], x, 0.0)
    # A NaN is larger than no distance, and its row would count as one of two distances of zero.
    if not isinstance(x, jax.core.Tracer) and not np.isfinite(x).all():
        raise ValueError("x must be finite in the rows that count, got NaN or an infinite number")
    own = (labels[:, None] == jnp.arange(n_clusters)[None, :]) & where[:, None]
    members = own.astype(x.dtype)
    sizes = jnp.sum(members, axis=0)
    centroids = matmul(members.T, x) / jnp.maximum(sizes, 1.0)[:, None]
    squares = jnp.sum(jnp.square(x[:, None, :] - centroids[None]), axis=-1)
    distances = jnp.where(sizes[None, :] > 0, jnp.sqrt(squares), jnp.inf)
    a = jnp.min(jnp.where(own, distances, jnp.inf), axis=1)
    b = jnp.min(jnp.where(own, jnp.inf, distances), axis=1)
    largest = jnp.maximum(a, b)
    values = jnp.where(largest > 0, (b - a) / jnp.where(largest > 0, largest, 1.0), 0.0)
    mean = jnp.sum(jnp.where(where, values, 0.0)) / jnp.maximum(jnp.sum(where), 1)
    return jnp.where(jnp.sum(sizes > 0) >= 2, mean, jnp.nan)
