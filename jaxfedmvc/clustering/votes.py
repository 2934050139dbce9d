"""Votes of the rounds of a federation on the cluster of each row.

    held = start(labels, n_clusters)
    for r in ...:                          # rounds, from the one on that is the first to vote
        held = cast(held, labels_of_round, 1 / r)
    leaders(held)

Nobody knows which round to end with, and the clusters of single rounds differ. So rounds vote: each
row has votes for each cluster, and is in the one that has most. A round numbers its clusters as it
pleases; they are renumbered first, so that as many rows as possible are where the vote has them
(Dudoit & Fridlyand, Bioinformatics 19, 2003; cumulative voting: Ayad & Kamel, IEEE TPAMI 30, 2008).
A client keeps its rows' votes and sends a table, how many of its rows are in each pair of clusters
of the vote and of the round; the server adds the tables up, and sends one number for each cluster.
Nothing else travels. That a round weighs 1 / r is ours.

Everything here is computed on the host, as scores are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxfedmvc.checks import wrong
from jaxfedmvc.metrics.host import client_tables


def start(labels: Sequence[np.ndarray], n_clusters: int) -> list[np.ndarray]:
    """Returns no votes for rows of these shapes, float32 [clients, rows, n_clusters] a cohort."""
    return [np.zeros((*np.shape(mine), n_clusters), np.float32) for mine in labels]


def leaders(held: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the cluster with most votes, the first of several: int32 [clients, rows] a cohort.

    -1 where there are no votes.
    """
    return [
        np.where(votes.any(axis=-1), votes.argmax(axis=-1), -1).astype(np.int32) for votes in held
    ]


def cast(
    held: Sequence[np.ndarray],
    labels: Sequence[np.ndarray],
    weight: float,
    *,
    shared: bool = True,
) -> list[np.ndarray]:
    """Adds the votes of a round.

    Args:
      held: Votes until now, float32 [clients, rows, n_clusters] a cohort.
      labels: Clusters of the round, integer [clients, rows] a cohort; -1 for rows that are in none.
      weight: Of the round's votes.
      shared: Whether clients number their clusters alike. If not, each renumbers its own.

    Returns:
      As `held`.

    Raises:
      ValueError: `labels` has other shapes, or more clusters than there can be votes for.
    """
    shapes, n_clusters = [votes.shape[:-1] for votes in held], held[0].shape[-1]
    if [np.shape(mine) for mine in labels] != shapes:
        raise wrong("labels", [np.shape(mine) for mine in labels], f"{shapes}, as of the votes")
    most = max(int(np.max(mine, initial=-1)) for mine in labels)
    if most >= n_clusters:
        raise wrong("labels", most, f"-1 to {n_clusters - 1}, clusters that there are votes for")
    tables = [
        table(leading, np.asarray(mine), n_clusters)
        for leading, mine in zip(leaders(held), labels, strict=True)
    ]
    if shared:
        total = np.sum(np.concatenate(tables), axis=0)
        tables = [np.broadcast_to(total, mine.shape) for mine in tables]
    return [
        _added(votes, np.asarray(mine), np.stack([renumbered(t) for t in of_cohort]), weight)
        for votes, mine, of_cohort in zip(held, labels, tables, strict=True)
    ]


def table(leading: np.ndarray, labels: np.ndarray, n_clusters: int) -> np.ndarray:
    """Counts the rows of each client by the vote's cluster and the round's, what a client sends.

    Args:
      leading: Integer [clients, rows], as of `leaders`.
      labels: Integer [clients, rows]; rows that are -1 in either do not count.
      n_clusters: K.

    Returns:
      int64 [clients, K, K].
    """
    return client_tables(leading, labels, leading >= 0, (n_clusters, n_clusters))


def renumbered(table: np.ndarray) -> np.ndarray:
    """Finds the vote's cluster for each of a round's, one to one, so that most rows agree.

    What the server does with the sum of the tables (Kuhn, 1955).

    Args:
      table: Numbers of rows [K, K], by the vote's cluster and the round's.

    Returns:
      Integer [K], the vote's cluster of each of the round's.
    """
    from scipy.optimize import linear_sum_assignment  # deferred: takes long to import

    of_vote, of_round = linear_sum_assignment(-np.asarray(table))
    return of_vote[np.argsort(of_round)]


def _added(votes: np.ndarray, labels: np.ndarray, numbers: np.ndarray, weight: float) -> np.ndarray:
    """Returns the votes of clients [clients, rows, K] with those for their `labels` renumbered."""
    own = np.take_along_axis(numbers, np.maximum(labels, 0), axis=1)
    for_them = np.eye(votes.shape[-1], dtype=np.float32)[own] * np.float32(weight)
    return votes + np.where((labels >= 0)[..., None], for_them, np.float32(0))
