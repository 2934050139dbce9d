"""Settings without labels: criteria of clusterings, and the choice of how many clusters by them.

A number of clusters is good where the same clusters come back when some of the rows are left out
(stability; Ben-Hur, Elisseeff & Guyon, 2002), and where rows lie nearer to their own cluster than
to the next one (silhouette, in its form with centroids; Rousseeuw, 1987, Hruschka et al., 2006).
Both are what a federation can compute: ARI needs the clients' contingency tables of two runs, the
silhouette the sums of their rows by cluster and one number from each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from jaxfedmvc.metrics import host
from jaxfedmvc.precision import in_32_bits

# Clusters with less agreement than this are chance as much as structure.
LEAST_STABILITY = 0.75


class Rows(NamedTuple):
    """Rows that have the same views, and their clusters.

    Attributes:
      views: View id -> [rows, d_v].
      labels: Integer [rows]; -1 for rows that are in no cluster, which do not count.
    """

    views: Mapping[int, np.ndarray]
    labels: np.ndarray


def stability(labelings: Sequence[np.ndarray]) -> float:
    """Computes the mean ARI of all pairs of clusterings, each on the rows that both have.

    Args:
      labelings: Two or more, of integers [n] each; -1 for rows that were left out.

    Returns:
      At most 1; 0 is what chance gives. NaN where two clusterings have no row in common.

    Raises:
      ValueError: Fewer than two clusterings, or of different numbers of rows.
    """
    if len(labelings) < 2:
        raise ValueError(f"labelings: got {len(labelings)}; allowed are 2 or more")
    if len(sizes := {np.size(labels) for labels in labelings}) > 1:
        raise ValueError(f"labelings: got {sorted(sizes)} rows; allowed is one number of rows")
    scores = []
    for one, other in combinations(map(np.asarray, labelings), 2):
        both = (one >= 0) & (other >= 0)
        shape = (int(one.max(initial=0)) + 1, int(other.max(initial=0)) + 1)
        (table,) = host.client_tables(one[None], other[None], both[None], shape)
        scores.append(host.table_scores(table)["ari"])
    return float(np.mean(scores))


@in_32_bits
def silhouette(parts: Sequence[Rows]) -> float:
    """Computes the mean over rows of (b - a) / max(a, b), rows with some views included.

    a is the distance to the centroid of the other rows of the row's cluster, and b that to the
    nearest centroid of another cluster: a^2 = sum_v |x_v - c_v|^2 / s_v over the views that the row
    has, with s_v the variance of view v over all rows that have it. A centroid's view is the mean
    of the cluster's rows that have it; a view that no other row of the row's cluster has does not
    count for it. A row that is alone in its cluster has 0, so that clusters of one row, or two, are
    no way to a good mean.

    Args:
      parts: Rows of each kind, by the views that they have.

    Returns:
      From -1 to 1; NaN with fewer than two clusters.
    """
    views = sorted({v for part in parts for v in part.views})
    n_clusters = 1 + max(int(part.labels.max(initial=-1)) for part in parts)
    sizes = np.zeros(n_clusters)
    squares = [np.zeros((len(part.labels), n_clusters)) for part in parts]
    for part in parts:
        sizes += np.bincount(part.labels[part.labels >= 0], minlength=n_clusters)
    if np.count_nonzero(sizes) < 2:
        return float("nan")
    for v in views:
        held = [part for part in parts if v in part.views]
        rows = np.concatenate([np.asarray(part.views[v], np.float64) for part in held])
        labels = np.concatenate([part.labels for part in held])
        if not (labels >= 0).any():  # a view of rows that do not count
            continue
        member = np.eye(n_clusters)[labels] * (labels >= 0)[:, None]
        counts = member.sum(axis=0)[:, None]
        origin = rows[labels >= 0].mean(axis=0)
        centred = rows - origin
        centroids = member.T @ centred / np.maximum(counts, 1)
        spread = np.mean(np.sum(centred[labels >= 0] ** 2, axis=1))
        norms = np.sum(centroids**2, axis=1)[None] - 2 * centred @ centroids.T
        distances = np.maximum(norms + np.sum(centred**2, axis=1)[:, None], 0) / (spread or 1.0)
        # Without the row itself its centroid lies n / (n - 1) as far away.
        distances *= np.where(member > 0, (counts.T / np.maximum(counts.T - 1, 1)) ** 2, 1.0)
        # Nobody who has the view is in the cluster: nothing is near it.
        distances[:, counts[:, 0] == 0] = np.inf
        # The only one of its cluster that has the view: there are no others to be near to.
        distances[np.any((member > 0) & (counts.T == 1), axis=1)] = 0.0
        start = 0
        for part, total in zip(parts, squares, strict=True):
            if v in part.views:
                total += distances[start : start + len(part.labels)]
                start += len(part.labels)
    values = [_row_silhouettes(np.sqrt(d), p.labels) for d, p in zip(squares, parts, strict=True)]
    return float(np.mean(np.concatenate(values)))


def _row_silhouettes(distances: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Computes those of the rows that are in a cluster, from distances [rows, clusters]."""
    distances, labels = distances[labels >= 0], labels[labels >= 0]
    rows = np.arange(len(labels))
    own = distances[rows, labels]
    others = distances.copy()
    others[rows, labels] = np.inf
    nearest = others.min(axis=1)
    larger = np.maximum(own, nearest)
    known = np.isfinite(nearest) & (larger > 0)
    return np.where(known, (nearest - own) / np.where(known, larger, 1.0), 0.0)


def chosen(numbers: Sequence[int], stabilities: np.ndarray, silhouettes: np.ndarray) -> int:
    """Returns the number of clusters with the best silhouette, of those that are stable.

    Stable is a mean ARI of `LEAST_STABILITY` or more; where no number is, all count.

    Args:
      numbers: Of clusters.
      stabilities: Of each, see `stability`.
      silhouettes: Of each, see `silhouette`.

    Raises:
      ValueError: No number has a silhouette.
    """
    stable = np.asarray(stabilities) >= LEAST_STABILITY
    values = np.where(stable | ~stable.any(), silhouettes, np.nan)
    if not np.isfinite(values).any():
        raise ValueError("silhouettes: no number of clusters has one; allowed are two clusters")
    return int(np.asarray(numbers)[np.nanargmax(values)])
