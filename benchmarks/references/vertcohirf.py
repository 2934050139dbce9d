"""VertCoHiRF in plain NumPy and scikit-learn, as its paper's text suggests writing it.

It is an oracle, small enough to check by eye, and the peer that `benchmarks.vertcohirf` measures
against: float64, a Python loop over agents and clusters, and for each ranking the full matrix of
cosines within a cluster. Source: "VertCoHiRF: decentralized vertical clustering beyond k-means",
algorithm 1 and sections 2.2 and 2.3; the local step is CoHiRF's (Meziani et al., 2025).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.cluster import DBSCAN, KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.pairwise import cosine_similarity

# `absorbed_at` of samples that no medoid has absorbed.
NEVER = np.iinfo(np.int32).max

# Mean cosines are compared in steps of this size: what differs by rounding only is a tie.
_STEP = 2.0**-20

# (agent, iteration, the agent's active rows [m, p_a]) -> labels [m], negative for noise.
Cluster = Callable[[int, int, np.ndarray], np.ndarray]
# (iteration, ids of a cluster's members [c]) -> which of them are ranked, bool [c].
Candidates = Callable[[int, np.ndarray], np.ndarray]


class ReferenceResult(NamedTuple):
    """A run over n samples.

    Attributes:
      labels: [n], position of each sample's root among the last medoids.
      parents: [n], the medoid that absorbed each sample, itself if none has.
      absorbed_at: [n], the iteration (from 0) in which that was; NEVER if none has.
      roots: Final medoids in the order of their clusters.
      n_iter: Iterations made, the last of which merged nothing unless `max_iter` came first.
      active_per_iteration: Active samples before each iteration.
      seconds: Wall time of the parts "cluster", "consensus" and "ranking".
    """

    labels: np.ndarray
    parents: np.ndarray
    absorbed_at: np.ndarray
    roots: np.ndarray
    n_iter: int
    active_per_iteration: list[int]
    seconds: dict[str, float]


def reference(
    views: Sequence[np.ndarray],
    cluster: Cluster,
    *,
    candidates: Candidates | None = None,
    max_iter: int = 100,
) -> ReferenceResult:
    """Runs algorithm 1.

    Args:
      views: One array [n, p_a] for each agent.
      cluster: The local step, such as `kmeans_step` gives; its noise is made singletons here.
      candidates: Whom the agents rank, such as `random_candidates` gives; all members if None.
      max_iter: Most iterations.
    """
    views = [np.asarray(view, np.float64) for view in views]
    n = len(views[0])
    parents = np.arange(n)
    absorbed_at = np.full(n, NEVER)
    active = np.arange(n)
    history: list[int] = []
    seconds = dict.fromkeys(("cluster", "consensus", "ranking"), 0.0)
    done = False
    while not done and len(history) < max_iter:
        iteration = len(history)
        history.append(len(active))
        began = time.perf_counter()
        labels = [
            noise_apart(cluster(agent, iteration, view[active])) for agent, view in enumerate(views)
        ]
        clustered = time.perf_counter()
        codes = strict_consensus(np.stack(labels, axis=1))
        clusters = members_of(codes)
        agreed = time.perf_counter()
        medoids = np.array(
            [choose_medoid(views, active[places], iteration, candidates) for places in clusters]
        )
        parents[active] = medoids[codes]
        absorbed_at[active[parents[active] != active]] = iteration
        done = len(medoids) == len(active)
        active = medoids
        seconds["cluster"] += clustered - began
        seconds["consensus"] += agreed - clustered
        seconds["ranking"] += time.perf_counter() - agreed
    roots = parents
    while (roots != parents[roots]).any():
        roots = parents[roots]
    position = np.full(n, -1)
    position[active] = np.arange(len(active))
    return ReferenceResult(
        position[roots], parents, absorbed_at, active, len(history), history, seconds
    )


# --- Phase 1: structural consensus ----------------------------------------------------------------


def noise_apart(labels: np.ndarray) -> np.ndarray:
    """Gives every noise point (label below 0) a label of its own, above the others'."""
    labels = np.array(labels)
    noise = labels < 0
    labels[noise] = max(labels.max(), -1) + 1 + np.arange(noise.sum())
    return labels


def strict_consensus(labels: np.ndarray) -> np.ndarray:
    """Returns codes [m] of label rows [m, columns]: ranks of distinct rows, lexicographically."""
    return np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)


def relaxed_consensus(labels: np.ndarray, threshold: float) -> np.ndarray:
    """Drops the columns at odds with the rest, and returns the strict consensus of those left.

    As long as there are two columns or more: ARI_i compares the consensus of all with that of all
    but i; if the least is below the threshold h, its column (the first of equals) goes.
    """
    columns = list(range(labels.shape[1]))
    codes = strict_consensus(labels)
    while len(columns) > 1:
        without = [strict_consensus(labels[:, [j for j in columns if j != i]]) for i in columns]
        agreement = [adjusted_rand_score(codes, other) for other in without]
        worst = int(np.argmin(agreement))
        if agreement[worst] >= threshold:
            break
        del columns[worst]
        codes = without[worst]
    return codes


def members_of(codes: np.ndarray) -> list[np.ndarray]:
    """Returns for each code the places of its members, ascending."""
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.cumsum(np.bincount(codes))[:-1])


# --- Phase 2: representative consensus ------------------------------------------------------------


def choose_medoid(
    views: Sequence[np.ndarray],
    members: np.ndarray,
    iteration: int = 0,
    candidates: Candidates | None = None,
) -> int:
    """Returns the id of the candidate of least S(m) = sum_a rank_a(m), the first of equals.

    Args:
      views: One array [n, p_a] for each agent.
      members: Ids of one consensus cluster in the order of their active positions.
      iteration: Passed to `candidates`.
      candidates: See `reference`.
    """
    if candidates is not None:
        members = members[candidates(iteration, members)]
    if len(members) == 1:
        return members[0]
    total = sum(ranks(mean_cosine(view[members])) for view in views)
    return members[np.argmin(total)]


def mean_cosine(x: np.ndarray) -> np.ndarray:
    """Computes sum_i cos(x_i, x_j) / c for each of c rows [c, p]; a zero vector has cosine 0.

    Two rows have the same sum by symmetry, whatever their angle: they score 1, or 0 if zero.
    """
    if len(x) == 2:
        return np.where(x.any(axis=1), 1.0, 0.0)
    return np.mean(cosine_similarity(x), axis=0)


def ranks(scores: np.ndarray) -> np.ndarray:
    """Ranks scores, 0 the greatest; those that are equal but for rounding rank by place."""
    best_first = np.argsort(-np.round(scores / _STEP), kind="stable")
    rank = np.empty(len(scores), np.int64)
    rank[best_first] = np.arange(len(scores))
    return rank


def random_candidates(n_candidates: int, seed: int) -> Candidates:
    """Draws N_s members of each cluster, or all if there are no more, alike for all agents."""

    def draw(iteration: int, members: np.ndarray) -> np.ndarray:
        if len(members) <= n_candidates:
            return np.ones(len(members), bool)
        rng = np.random.default_rng([seed, iteration, members[0]])
        chosen = np.zeros(len(members), bool)
        chosen[rng.choice(len(members), n_candidates, replace=False)] = True
        return chosen

    return draw


# --- Local steps ----------------------------------------------------------------------------------


def kmeans_step(
    n_clusters: int,
    repetitions: int,
    feature_share: float | int,
    seed: int,
    relaxed: float | None = None,
) -> Cluster:
    """Makes GetClusters with scikit-learn's k-means, one greedy k-means++ start each time."""

    def fit(x: np.ndarray, random_state: int) -> np.ndarray:
        clusterer = KMeans(min(n_clusters, len(x)), n_init=1, random_state=random_state)
        with warnings.catch_warnings():  # fewer distinct rows than clusters are no accident here
            warnings.simplefilter("ignore", ConvergenceWarning)
            return clusterer.fit_predict(x)

    return _local_step(fit, repetitions, feature_share, seed, relaxed)


def dbscan_step(
    eps: float,
    min_samples: int,
    repetitions: int = 1,
    feature_share: float | int = 1.0,
    seed: int = 0,
    relaxed: float | None = None,
) -> Cluster:
    """Makes GetClusters with scikit-learn's DBSCAN."""

    def fit(x: np.ndarray, random_state: int) -> np.ndarray:
        return DBSCAN(eps=eps, min_samples=min_samples).fit_predict(x)

    return _local_step(fit, repetitions, feature_share, seed, relaxed)


def _local_step(
    fit: Callable[[np.ndarray, int], Any],
    repetitions: int,
    feature_share: float | int,
    seed: int,
    relaxed: float | None,
) -> Cluster:
    """Makes the consensus of R fits to max(1, int(q p)) features, or min(q, p) for a whole q."""

    def step(agent: int, iteration: int, x: np.ndarray) -> np.ndarray:
        p = x.shape[1]
        size = min(feature_share, p) if isinstance(feature_share, int) else int(feature_share * p)
        columns = []
        for repetition in range(repetitions):
            rng = np.random.default_rng([seed, agent, iteration, repetition])
            features = rng.choice(p, max(1, size), replace=False)
            columns.append(noise_apart(fit(x[:, features], int(rng.integers(2**31)))))
        labels = np.stack(columns, axis=1)
        return strict_consensus(labels) if relaxed is None else relaxed_consensus(labels, relaxed)

    return step
