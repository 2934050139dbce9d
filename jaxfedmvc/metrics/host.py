"""Scores on the host, from contingency tables, which are what a real federation would exchange.

Tables are small, add up over clients and take a program no longer to compile than a matrix product;
matching clusters to classes is scipy's. `metrics.federation.tables` counts them inside a program.
Labels reach nothing but these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxfedmvc.checks import wrong
from jaxfedmvc.data.dataset import some
from jaxfedmvc.federation import Federation

GROUPS = ("all", "multi_view", "partial_view", "participating", "non_participating")
METRICS = ("acc", "nmi", "ari", "purity")
WAYS = ("pooled", "per_client")
# {group: {way: {metric: value}}}
Scores = Mapping[str, Mapping[str, Mapping[str, float]]]


def table_scores(table: np.ndarray) -> dict[str, float]:
    """Computes ACC, NMI, ARI and purity of a contingency table [n_classes, n_clusters].

    ACC matches clusters to classes one to one (Kuhn, 1955), NMI is normalised by the arithmetic
    mean of the entropies (Vinh et al., 2010), ARI is adjusted for chance (Hubert & Arabie, 1985).

    Returns:
      The four scores; NaN for a table without rows.
    """
    # Deferred: they take a second to import, and most of `import jaxfedmvc` would be theirs.
    from scipy.optimize import linear_sum_assignment
    from scipy.stats import entropy
    from sklearn.metrics import mutual_info_score

    table = np.asarray(table, np.float64)
    n = table.sum()
    if n == 0:
        return dict.fromkeys(METRICS, float("nan"))
    classes, clusters = table.sum(axis=1), table.sum(axis=0)
    mean_entropy = (entropy(classes) + entropy(clusters)) / 2
    information = mutual_info_score(None, None, contingency=table)
    # Ordered pairs of rows that are together in both labelings, in one, or in neither.
    both = np.sum(table**2) - n
    only_classes, only_clusters = np.sum(classes**2) - n - both, np.sum(clusters**2) - n - both
    neither = n * (n - 1) - both - only_classes - only_clusters
    spread = (both + only_classes) * (only_classes + neither)
    spread += (both + only_clusters) * (only_clusters + neither)
    same = only_classes == only_clusters == 0
    return {
        "acc": float(table[linear_sum_assignment(-table)].sum() / n),
        "nmi": float(np.clip(information / mean_entropy, 0, 1)) if mean_entropy > 0 else 1.0,
        "ari": 1.0 if same else float(2 * (both * neither - only_classes * only_clusters) / spread),
        "purity": float(table.max(axis=0).sum() / n),
    }


def client_tables(labels: Any, predicted: Any, mask: Any, shape: tuple[int, int]) -> np.ndarray:
    """Counts rows by class and cluster for each client of a cohort.

    Args:
      labels: Integer [clients, rows].
      predicted: Integer [clients, rows]; -1 for rows that are in no cluster.
      mask: Rows to count, bool [clients, rows].
      shape: Numbers of classes and of clusters.

    Returns:
      int64 [clients, n_classes, n_clusters]. A row whose class or cluster is out of range, such as
      one of -1, counts nowhere, as in `metrics.contingency`.
    """
    labels, predicted = np.asarray(labels), np.asarray(predicted)
    n_classes, n_clusters = shape
    counted = np.asarray(mask) & (labels >= 0) & (labels < n_classes)
    counted &= (predicted >= 0) & (predicted < n_clusters)
    client = np.broadcast_to(np.arange(len(labels))[:, None], labels.shape)
    cell = (client * n_classes + labels) * n_clusters + predicted
    counts = np.bincount(cell[counted], minlength=len(labels) * n_classes * n_clusters)
    return counts.reshape(len(labels), n_classes, n_clusters)


def tables(federation: Federation, predicted: Sequence[Any]) -> np.ndarray:
    """Returns the contingency tables of all clients, cohort after cohort; see `client_tables`.

    Raises:
      ValueError: There is no federation, or it has no labels, or `predicted` other shapes than
        they, or numbers that are not whole.
    """
    if not isinstance(federation, Federation):
        raise wrong("federation", type(federation).__name__, "a Federation")
    if federation.labels is None or federation.n_classes is None:
        raise ValueError("labels: the federation has none to score against")
    if hasattr(predicted, "labels"):
        raise wrong("predicted", type(predicted).__name__, "its labels")
    shapes = [np.shape(labels) for labels in predicted]
    if shapes != (wanted := [np.shape(labels) for labels in federation.labels]):
        got = f"shapes [{some(shapes)}]"
        raise wrong("predicted", got, f"{wanted}, an array for each cohort")
    for labels in map(np.asarray, predicted):
        if labels.dtype.kind not in "biu":
            raise wrong("predicted", f"an array of {labels.dtype}", "arrays of integers")
    n_clusters = 1 + max(int(np.max(labels, initial=-1)) for labels in map(np.asarray, predicted))
    shape = (federation.n_classes, max(n_clusters, 1))
    return np.concatenate(
        [
            client_tables(labels, found, cohort.mask, shape)
            for cohort, labels, found in zip(
                federation.cohorts, federation.labels, predicted, strict=True
            )
        ]
    )


def members(
    federation: Federation, participants: Sequence[Any] | None = None
) -> dict[str, np.ndarray]:
    """Returns for each of `GROUPS` which clients belong to it, bool [clients of all cohorts].

    Args:
      federation: The data.
      participants: For each cohort the places of those that take part; None means all.

    Raises:
      ValueError: `participants` has not as many entries as there are cohorts.
    """
    n = len(federation.cohorts)
    if participants is not None and len(participants) != n:
        raise wrong("participants", participants, f"places for each of the {n} cohorts")
    full, took_part = [], []
    for c, cohort in enumerate(federation.cohorts):
        full += [federation.holds_all_views(cohort)] * cohort.n_clients
        mine = np.ones(cohort.n_clients, bool)
        if participants is not None:
            mine = np.isin(np.arange(cohort.n_clients), np.asarray(participants[c]))
        took_part.append(mine)
    holds_all, active = np.array(full), np.concatenate(took_part)
    found = (np.ones(len(holds_all), bool), holds_all, ~holds_all, active, ~active)
    return dict(zip(GROUPS, found, strict=True))


def group_scores(tables: np.ndarray, groups: Mapping[str, np.ndarray]) -> Scores:
    """Scores groups of clients in two ways.

    "pooled": the rows of all its clients in one table with one matching of clusters to classes,
    which is what a common clustering must stand. "per_client": the mean over clients with a table
    and a matching of their own, which is kinder to clusterings that agree on nothing.

    Args:
      tables: [clients, n_classes, n_clusters].
      groups: Name -> bool [clients].

    Returns:
      `{group: {way: {metric: value}}}`, NaN for groups without rows.
    """
    each = [table_scores(table) for table in tables]
    result = {}
    for name, chosen in groups.items():
        mine = [each[i] for i in np.flatnonzero(chosen) if tables[i].any()]
        result[name] = {
            "pooled": table_scores(tables[chosen].sum(axis=0)),
            "per_client": {
                m: float(np.mean([s[m] for s in mine])) if mine else np.nan for m in METRICS
            },
        }
    return result


def score(
    federation: Federation, predicted: Sequence[Any], participants: Sequence[Any] | None = None
) -> Scores:
    """Scores the clusters of a federation; see `group_scores`.

    A row labelled -1 is in no cluster, as those of a client that a method gives none, and counts
    nowhere: leaving hard rows out raises every score. How many were scored stands beside them.

    Args:
      federation: With labels.
      predicted: For each cohort int [clients, rows]; any number of clusters.
      participants: For each cohort the places of those that take part; None means all.

    Returns:
      As `group_scores`, and for each group `{"clustered": {"share": share of its rows}}`, of those
      that are in a cluster.

    Raises:
      ValueError: As `tables` and `members`.
    """
    counts, groups = tables(federation, predicted), members(federation, participants)
    clustered = counts.sum(axis=(1, 2))
    masks = [np.asarray(cohort.mask) for cohort in federation.cohorts]
    rows = np.concatenate([np.sum(mask, axis=1) for mask in masks])

    def share(chosen: np.ndarray) -> float:
        n = rows[chosen].sum()
        return float(clustered[chosen].sum() / n) if n else float("nan")

    return {
        name: {**scores, "clustered": {"share": share(groups[name])}}
        for name, scores in group_scores(counts, groups).items()
    }
