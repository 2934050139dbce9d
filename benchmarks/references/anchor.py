"""IMVC-CBG in plain NumPy, and LMVSC in NumPy and SciPy.

They are oracles, small enough to check by eye, and the peers that `benchmarks.pooled` measures
against. k-means is scikit-learn's.

IMVC-CBG: its equations, samples in columns as the paper writes them. Everything is computed for all
samples at once, which is kinder to NumPy than a loop over samples for their projections onto the
simplex, and in the type of the views. Source: Wang et al., "Highly-efficient incomplete large-scale
multi-view clustering with consensus bipartite graph", CVPR 2022; what is minimised, and where it
starts, is said in `jaxfedmvc.algorithms.pooled.imvc_cbg`.

LMVSC: one quadratic program after the other, a sample each, as its authors solve it. Source: Kang
et al., "Large-scale multi-view subspace clustering in linear time", AAAI 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import nnls
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits


class AnchorGraph(NamedTuple):
    """A fit.

    Attributes:
      z: The graph Z, [m, N].
      trace: The objective after each pass.
    """

    z: np.ndarray
    trace: list[float]


def anchor_graph(
    views: Sequence[np.ndarray],
    observed: np.ndarray,
    n_clusters: int,
    *,
    n_anchors: int | None = None,
    lam: float = 0.0,
    max_iter: int = 50,
    tol: float = 1e-3,
) -> AnchorGraph:
    """Fits the graph between samples and anchors.

    Args:
      views: [N, D_v] each.
      observed: bool [N, V].
      n_clusters: c.
      n_anchors: m; c if None.
      lam: Weight of the graph's norm.
      max_iter: Most passes.
      tol: Relative change of the objective at which it stops.
    """
    c, n = n_clusters, len(observed)
    m = n_anchors or c
    dtype = views[0].dtype
    seen = observed.T.astype(dtype)  # [V, N]
    x = [np.where(o, view.T, 0) for o, view in zip(observed.T, views, strict=True)]
    x = [part / norms(part) for part in x]
    a = np.full(len(x), 1 / len(x), dtype)
    anchors, z = np.zeros((c, m), dtype), np.eye(m, n, dtype=dtype)
    trace: list[float] = []
    for _ in range(max_iter):
        w = [polar(part @ z.T @ anchors.T) for part in x]
        mixed = sum(s**2 * u.T @ part for s, u, part in zip(a, w, x, strict=True))  # [c, N]
        anchors = polar(mixed @ z.T)
        weight = a**2 @ seen + dtype.type(lam)
        z = simplex(anchors.T @ mixed / weight)
        errors = np.array(
            [
                np.sum((part - u @ (anchors @ z) * o) ** 2)
                for u, part, o in zip(w, x, seen, strict=True)
            ]
        )
        a = (1 / errors / np.sum(1 / errors)).astype(dtype)
        trace.append(float(np.sum(a**2 * errors) + lam * np.sum(z**2)))
        if len(trace) > 1 and abs(trace[-1] - trace[-2]) <= tol * abs(trace[-1]):
            break
    return AnchorGraph(z, trace)


def norms(x: np.ndarray) -> np.ndarray:
    """Returns the lengths of columns, safe to divide by."""
    return np.maximum(np.linalg.norm(x, axis=0), 1e-12).astype(x.dtype)


def polar(c: np.ndarray) -> np.ndarray:
    """Returns U V^T of the thin SVD; the identity's first columns for a zero matrix."""
    if not c.any():
        return np.eye(*c.shape, dtype=c.dtype)
    u, _, vt = np.linalg.svd(c, full_matrices=False)
    return u @ vt


def simplex(v: np.ndarray) -> np.ndarray:
    """Projects columns [m, n] onto the simplex {z >= 0, sum z = 1}, by sorting."""
    ordered = -np.sort(-v, axis=0)
    place = np.arange(1, len(v) + 1, dtype=v.dtype)[:, None]
    excess = (np.cumsum(ordered, axis=0) - 1) / place
    last = np.sum(ordered > excess, axis=0) - 1
    return np.maximum(v - np.take_along_axis(excess, last[None], axis=0), 0)


def imvc_cbg_labels(
    views: Sequence[np.ndarray],
    observed: np.ndarray,
    n_clusters: int,
    *,
    n_init: int = 20,
    **settings: Any,
) -> np.ndarray:
    """Clusters the rows [N] by k-means of the graph's left singular vectors, of length 1.

    Args:
      views: See `anchor_graph`.
      observed: See `anchor_graph`.
      n_clusters: c.
      n_init: Starts of k-means.
      **settings: Of `anchor_graph`.
    """
    z = anchor_graph(views, observed, n_clusters, **settings).z
    rows = np.linalg.svd(z.T, full_matrices=False)[0][:, :n_clusters]
    return k_means(rows / norms(rows.T)[:, None], n_clusters, n_init)


def anchor_weights(x: np.ndarray, anchors: np.ndarray, alpha: float) -> np.ndarray:
    """Returns LMVSC's weights of the anchors, argmin |x - S H|^2 + alpha |S|^2, [N, m], float64.

    Non-negative least squares of each row: with R^T R = H H^T + alpha I the objective is, but for a
    constant, |R s - R^-T H x|^2. That weights sum to 1 is a row that outweighs the others.

    Args:
      x: [N, D].
      anchors: H, [m, D].
      alpha: Weight of the squares, above 0.
    """
    m, heavy = len(anchors), 1e4
    h = anchors.astype(np.float64)
    r = np.linalg.cholesky(h @ h.T + alpha * np.eye(m)).T
    right = solve_triangular(r, h @ x.T, trans="T")  # [m, N]
    left = np.vstack([r, np.full((1, m), heavy)])
    return np.stack([nnls(left, np.append(column, heavy))[0] for column in right.T])


def lmvsc_labels(
    views: Sequence[np.ndarray], n_clusters: int, *, n_anchors: int, alpha: float, n_init: int
) -> np.ndarray:
    """Clusters the rows [N] by k-means of the weights' left singular vectors.

    Args:
      views: [N, D_v] each.
      n_clusters: c.
      n_anchors: m, centroids of each view.
      alpha: See `anchor_weights`.
      n_init: Starts of each k-means.
    """
    parts = []
    for x in views:
        found = KMeans(n_anchors, n_init=n_init, max_iter=100, random_state=0).fit(x)
        parts.append(anchor_weights(x, found.cluster_centers_, alpha))
    rows = np.linalg.svd(np.hstack(parts) / len(views) ** 0.5, full_matrices=False)[0]
    return k_means(rows[:, :n_clusters], n_clusters, n_init)


def k_means(rows: np.ndarray, n_clusters: int, n_init: int) -> np.ndarray:
    """Clusters rows by scikit-learn's k-means, on one core: it loses by several on small data."""
    with threadpool_limits(1, "openmp"):
        return KMeans(n_clusters, n_init=n_init, random_state=0).fit_predict(rows)
