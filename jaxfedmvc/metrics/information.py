"""How much a view tells of the clusters: a score that needs no classes.

Views of one thing should each tell which cluster it is in. Clusters that no view can tell by itself
are of one view, or of chance; clusters that are told but few say little. So what is measured is how
many nats a view tells of the cluster of a row that it has not seen the cluster of:

    information = H(shares of the clusters) + mean over rows and views of log q(cluster of the row)

H is the entropy, and q comes from the other rows: kernel ridge regression of the clusters'
indicators y on one view,

    f_i = shares + (y_i - mean y) - (B (y - mean y))_i / B_ii,      B = (J G J + ridge I)^-1,
    G_ij = exp(-|x_i - x_j|^2 / s),      q_i proportional to max(f_i, 1 / K),

with J the centring matrix and s the total variance of the view. All of f_i but the shares is what
the regression without row i says of it (G. Wahba, "Spline models for observational data", 1990).
Means of y are a client's own and the shares are everybody's, so that a client whose rows are all in
one cluster learns nothing from that. The most is H - log(2 - 1 / K).

It compares clusterings of the same rows in about as many clusters: more clusters tell more. Where
clients hold the rows, each needs the shares and its own rows, and sums log q over them: what leaves
it is that number. Who holds a view of all rows does the same, and no row leaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc import checks, linalg
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics.contingency import entropy
from jaxfedmvc.precision import in_32_bits, matmul

RIDGE = 0.3
# Rows of a client that are compared with each other; of more, as many in a fixed random order.
MOST_ROWS = 500
# Clients' views that are compared at once.
_AT_ONCE = 8


def squared_distances(x: Array) -> Array:
    """Computes |x_i - x_j|^2 of rows x [n, d], [n, n]."""
    x = x - jnp.mean(x, axis=0)[None]
    norms = jnp.sum(jnp.square(x), axis=1)
    return jnp.maximum(norms[:, None] + norms[None, :] - 2.0 * matmul(x, x.T), 0.0)


def mean_log_q(x: Array, labels: Array, where: Array, shares: Array) -> Array:
    """Computes the mean of log q over rows, a scalar, from one view; 0 without rows.

    Args:
      x: The view, float32 [n, d].
      labels: Clusters, int32 [n], 0 to n_clusters - 1.
      where: Rows that count, bool [n]; nothing is known of the others.
      shares: Of each cluster in all rows, [K].
    """
    n_clusters = len(shares)
    counted = where.astype(jnp.float32)
    n = jnp.maximum(jnp.sum(counted), 1.0)
    pairs = counted[:, None] * counted[None, :]
    squares = squared_distances(x * counted[:, None])
    variance = jnp.sum(squares * pairs) / (2.0 * n**2)
    gram = pairs * jnp.exp(-squares / jnp.where(variance > 0, variance, 1.0))
    along = jnp.sum(gram, axis=0) / n
    centred = pairs * (gram - along[:, None] - along[None, :] + jnp.sum(along) / n)
    inverse = linalg.inverse(centred + RIDGE * jnp.eye(len(x)))
    own = jax.nn.one_hot(labels, n_clusters) * counted[:, None]
    y = own - counted[:, None] * jnp.sum(own, axis=0)[None] / n
    told = shares[None] + y - matmul(inverse, y) / jnp.diagonal(inverse)[:, None]
    q = jnp.maximum(told, 1.0 / n_clusters)
    share = jnp.where(where, jnp.sum(q * own, axis=1) / jnp.sum(q, axis=1), 1.0)
    return jnp.sum(jnp.log(share)) / n


@in_32_bits
def sum_log_q(views: Sequence[ArrayLike], labels: ArrayLike, shares: ArrayLike) -> Array:
    """Sums log q over a client's rows in clusters and its views: all that it tells.

    With the sizes of everybody's clusters it makes `information`: the entropy, and the sum of these
    numbers over clients, by the sum of their rows in clusters times their views.

    Args:
      views: Each float32 [rows, D_v].
      labels: Its rows' clusters, int32 [rows]; outside 0 to K - 1 in none.
      shares: Of each cluster in everybody's rows, float32 [K].

    Returns:
      A scalar. Of more than 500 rows as many are compared, and stand for all.
    """
    labels, shares = jnp.asarray(labels), jnp.asarray(shares)
    where = (labels >= 0) & (labels < len(shares))
    rows = _compared(jnp.ones_like(where))
    means = [mean_log_q(jnp.asarray(x)[rows], labels[rows], where[rows], shares) for x in views]
    return jnp.sum(where) * jnp.sum(jnp.stack(means))


@in_32_bits
def information(federation: Federation, labels: Sequence[ArrayLike], n_clusters: int) -> Array:
    """Computes how many nats a view tells of a row's cluster, each client's of its own rows.

    Args:
      federation: The data; classes are not looked at. Distances are taken of features as they are,
        which should be on a common scale.
      labels: For each cohort int32 [clients, rows]; -1 in no cluster.
      n_clusters: K, static.

    Returns:
      A scalar: the entropy of all clients' clusters, and the mean of log q over rows and views. Of
      a client's rows 500 are compared at most. NaN where no row is in a cluster.

    Raises:
      ValueError: `n_clusters` is below 1, shapes do not fit, or labels are no integers.
    """
    checks.whole("n_clusters", n_clusters, 1)
    if len(labels) != (n_cohorts := len(federation.cohorts)):
        raise checks.wrong(
            "labels", f"{len(labels)} arrays", f"one for each of {n_cohorts} cohorts"
        )
    views, found, weights = [], [], []
    sizes = jnp.zeros(n_clusters)
    for c, (cohort, mine) in enumerate(zip(federation.cohorts, labels, strict=True)):
        mine = jnp.asarray(mine)
        if mine.shape != cohort.mask.shape:
            raise checks.wrong(f"labels[{c}]", mine.shape, f"the shape {cohort.mask.shape}")
        if not jnp.issubdtype(mine.dtype, jnp.integer):
            raise checks.wrong(f"labels[{c}]", f"an array of {mine.dtype}", "an array of integers")
        where = cohort.mask & (mine >= 0) & (mine < n_clusters)
        sizes += jnp.sum(jax.nn.one_hot(mine, n_clusters) * where[..., None], axis=(0, 1))
        rows = jax.vmap(_compared)(cohort.mask)  # whatever the clusters are
        mine = jnp.take_along_axis(jnp.where(where, mine, -1), rows, axis=1)
        for x in cohort.views:
            views.append(jnp.take_along_axis(x, rows[..., None], axis=1))
            found.append(mine)
            weights.append(jnp.sum(where, axis=1))

    # One program for all clients and views: zeros beside all rows change no distance.
    n, d = (max(x.shape[axis] for x in views) for axis in (1, 2))
    padded = [jnp.pad(x, ((0, 0), (0, n - x.shape[1]), (0, d - x.shape[2]))) for x in views]
    found = [jnp.pad(y, ((0, 0), (0, n - y.shape[1])), constant_values=-1) for y in found]

    def told(of: tuple[Array, Array]) -> Array:
        x, mine = of
        return mean_log_q(x, mine, mine >= 0, shares)

    shares = sizes / jnp.maximum(jnp.sum(sizes), 1.0)
    each = jax.lax.map(told, (jnp.concatenate(padded), jnp.concatenate(found)), batch_size=_AT_ONCE)
    weight = jnp.concatenate(weights)
    return entropy(sizes) + jnp.sum(each * weight) / jnp.sum(weight)


def _compared(where: Array) -> Array:
    """Returns the places of the rows that are compared, [at most `MOST_ROWS`], padding last."""
    n = len(where)
    if n <= MOST_ROWS:
        return jnp.arange(n)
    # The first numbers of a longer draw are those of a shorter one: padding changes no row's.
    order = jnp.asarray(np.random.default_rng(0).random(n), jnp.float32)
    return jnp.argsort(jnp.where(where, order, jnp.inf))[:MOST_ROWS]
