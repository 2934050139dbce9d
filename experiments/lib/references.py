"""Clusterings to compare a method with: no collaboration, and no privacy. All by scikit-learn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeGuard

import jax
import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score

from experiments.lib.data import Problem
from jaxfedmvc.engine.programs import compiler_options
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.metrics.information import information

ALONE, POOLED, POOLED_EMBEDDING = "no collaboration", "pooled k-means", "pooled k-means on H"
# Silhouettes of more samples than this are estimated on as many, drawn with a fixed seed.
_SILHOUETTE_ROWS = 5000


def k_means(x: np.ndarray, n_clusters: int, seed: int) -> np.ndarray:
    """Clusters rows by k-means with ten starts; with fewer rows than clusters, each by itself."""
    found = KMeans(min(n_clusters, len(x)), n_init=10, random_state=seed).fit_predict(x)
    return np.asarray(found, np.int32)


def references(
    problem: Problem, n_clusters: int, seed: int, embedding: Sequence[np.ndarray] | None
) -> dict[str, list[np.ndarray]]:
    """Returns clusterings by name, for each cohort int32 [clients, rows].

    "no collaboration": k-means of each client on its own views side by side. "pooled k-means": one
    k-means on all views of all samples that anybody holds, which sees more than all clients
    together; none where rows have not all views. "pooled k-means on H": one k-means on all clients'
    representations.
    """
    federation = problem.federation
    found = {ALONE: _each_client(federation, n_clusters, seed)}
    if problem.held is None:
        pooled = np.concatenate(problem.views, axis=1)
        found[POOLED] = _of_samples(federation, pooled, n_clusters, seed)
    if has_one_width(embedding):
        found[POOLED_EMBEDDING] = _of_rows(federation, embedding, n_clusters, seed)
    return found


def has_one_width(
    embedding: Sequence[np.ndarray] | None,
) -> TypeGuard[Sequence[np.ndarray]]:
    """Tells whether all cohorts' representations have one width; those of raw views may not."""
    return embedding is not None and len({h.shape[-1] for h in embedding}) == 1


def _each_client(federation: Federation, n_clusters: int, seed: int) -> list[np.ndarray]:
    found = []
    for cohort in federation.cohorts:
        labels = np.full(np.shape(cohort.mask), -1, np.int32)
        for i, (x, mask) in enumerate(
            zip(own_features(cohort), np.asarray(cohort.mask), strict=True)
        ):
            labels[i, mask] = k_means(x[mask], n_clusters, seed)
        found.append(labels)
    return found


def _of_samples(
    federation: Federation, pooled: np.ndarray, n_clusters: int, seed: int
) -> list[np.ndarray]:
    """Clusters the samples that somebody holds once; all who hold one get its cluster."""
    ids = [np.asarray(cohort.sample_ids) for cohort in federation.cohorts]
    held = np.unique(np.concatenate([i[i >= 0] for i in ids]))
    labels = np.full(len(pooled) + 1, -1, np.int32)  # the last entry is padding's
    labels[held] = k_means(pooled[held], n_clusters, seed)
    return [labels[i] for i in ids]


def _of_rows(
    federation: Federation, embedding: Sequence[np.ndarray], n_clusters: int, seed: int
) -> list[np.ndarray]:
    """Clusters the rows of all clients as one set."""
    masks = [np.asarray(cohort.mask) for cohort in federation.cohorts]
    rows = np.concatenate([np.asarray(h)[m] for h, m in zip(embedding, masks, strict=True)])
    clusters = iter(np.split(k_means(rows, n_clusters, seed), np.cumsum([m.sum() for m in masks])))
    found = []
    for mask in masks:
        labels = np.full(mask.shape, -1, np.int32)
        labels[mask] = next(clusters)
        found.append(labels)
    return found


def own_features(cohort: Cohort) -> np.ndarray:
    """Returns the views of a cohort's clients side by side, [clients, rows, d]."""
    return np.concatenate([np.asarray(view) for view in cohort.views], axis=-1)


def silhouette(x: np.ndarray, labels: np.ndarray) -> float:
    """Computes the mean silhouette; NaN with one cluster, or one for every sample."""
    if len(x) > _SILHOUETTE_ROWS:
        rows = np.random.default_rng(0).choice(len(x), _SILHOUETTE_ROWS, replace=False)
        x, labels = x[rows], labels[rows]
    if not 1 < len(np.unique(labels)) < len(labels):
        return float("nan")
    return float(silhouette_score(x, labels))


def internal_scores(
    federation: Federation, labels: Sequence[np.ndarray], n_clusters: int | None = None
) -> dict[str, float]:
    """Scores clusters without classes.

    Args:
      federation: The data.
      labels: For each cohort int32 [clients, rows].
      n_clusters: K, or more where there are more.

    Returns:
      "information" (`jaxfedmvc.metrics.information`); "silhouette", the mean over clients
      of that of their rows on their own views (those with one cluster do not count), and
      "clusters", the mean number of clusters that a client has. Rows in no cluster, -1, count for
      none of them; all are NaN where no row is in any, as of a failed run.
    """
    values, counts = [], []
    for cohort, found in zip(federation.cohorts, labels, strict=True):
        for x, mask, mine in zip(own_features(cohort), np.asarray(cohort.mask), found, strict=True):
            found_in = mask & (mine >= 0)
            values.append(silhouette(x[found_in], mine[found_in]))
            counts.append(len(np.unique(mine[found_in])))
    known = [v for v in values if not np.isnan(v)]
    mean = float(np.mean(known)) if known else float("nan")
    return {
        "information": told(federation, labels, n_clusters),
        "silhouette": mean,
        "clusters": float(np.mean(counts)) if any(counts) else float("nan"),
    }


def told(
    federation: Federation, labels: Sequence[np.ndarray], n_clusters: int | None = None
) -> float:
    """Computes how much a view tells of the clusters, as `internal_scores`; NaN without any."""
    most = max(int(np.max(mine, initial=-1)) for mine in labels) + 1
    if not most:
        return float("nan")
    k = max(most, n_clusters or 0)
    return float(_information()(federation.without_labels(), list(labels), k))


@functools.cache
def _information() -> Callable[..., jax.Array]:
    return jax.jit(information, static_argnums=2, compiler_options=compiler_options(False))
