"""Scores of clusters that stay on their nodes: what a node tells of its own, and what comes of it.

Counts are a client's rows by class and cluster, `(class, cluster, number)`, and sizes its rows by
cluster; a node tells them if its operator shares them. Each side checks what the other one says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxfedmvc.deploy.holding import Holding
from jaxfedmvc.deploy.wire import Refused
from jaxfedmvc.metrics import host
from jaxfedmvc.metrics.information import MOST_ROWS

Counts = list[tuple[str, int, int]]
# Clusters whose sizes are told, and characters of counts: both fit beside a request.
MOST_CLUSTERS = 5 * 10**4
_MOST_TOLD = 2**19
# Entries of the tables of all clients' classes against clusters, of 8 bytes.
_MOST_COUNTS = 10**8
# More nats than any sum of a client's is; a few of these add up to a finite number.
_MOST_NATS = 1e30


# --- A node ---------------------------------------------------------------------------------------


def counts_of(labels: np.ndarray, found: np.ndarray) -> list[list[Any]] | None:
    """Counts a client's rows by class and cluster; None where a reply does not hold so many.

    Args:
      labels: Classes [rows].
      found: Clusters [rows]; a row of -1 is in none and counts nowhere, as in `metrics.host`.
    """
    names, classes = np.unique(labels, return_inverse=True)
    rows = np.stack([classes, found])[:, found >= 0]
    pairs, n = np.unique(rows, axis=1, return_counts=True)
    counts = [[str(names[c]), int(k), int(m)] for (c, k), m in zip(pairs.T, n, strict=True)]
    return counts if len(json.dumps(counts)) <= _MOST_TOLD else None


def sizes_of(found: np.ndarray) -> list[int] | None:
    """Counts a client's rows in each cluster, from 0 on.

    None where clusters have too high numbers: where the server names them, it may name any, and the
    list would take whatever memory there is.
    """
    if found.max(initial=0) >= MOST_CLUSTERS:
        return None
    return np.bincount(found[found >= 0]).tolist()


def checked_total(told: Any, own: Sequence[int], holding: Holding) -> np.ndarray:
    """Returns the sizes of everybody's clusters in a request, float64 [K].

    Raises:
      Refused: They are no sizes, fewer than this client's `own`, or of more clusters than memory is
        agreed on for.
    """
    try:
        sizes = np.asarray([int(n) for n in told], np.int64).astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused("malformed", "sizes: unreadable") from error
    if len(sizes) < len(own) or (sizes < np.pad(own, (0, len(sizes) - len(own)))).any():
        raise Refused("malformed", "sizes: less than this client's own rows make")
    if not sizes.any():
        raise Refused("malformed", "sizes: no row is in any cluster")
    # Numbers of each row and cluster that are held at once: indicators, and what each view says.
    held = (2 + len(holding.views)) * len(sizes) * min(holding.n_rows, MOST_ROWS)
    if len(sizes) > MOST_CLUSTERS or 4 * held > holding.policy.most_bytes:
        raise Refused("oversized", f"sizes: {len(sizes)} clusters are too many for this node")
    return sizes


# --- The server -----------------------------------------------------------------------------------


def checked_counts(told: Any, n_rows: int) -> Counts:
    """Returns a client's counts.

    Raises:
      Refused: They are unreadable, or not of rows that the client has.
    """
    try:
        found = [(str(name), int(cluster), int(n)) for name, cluster, n in told]
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused("malformed", "counts: unreadable") from error
    if any(k < 0 or n < 1 for _, k, n in found) or sum(n for *_, n in found) > n_rows:
        raise Refused("malformed", f"counts: below zero, or more than its {n_rows} rows")
    return found


def checked_sizes(told: Any, n_rows: int) -> np.ndarray:
    """Returns the sizes of a client's clusters, int64.

    Raises:
      Refused: They are unreadable, or not of rows that the client has.
    """
    try:
        found = np.asarray([int(n) for n in told], np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused("malformed", "sizes: unreadable") from error
    if (found < 0).any() or (found > n_rows).any() or found.sum() > n_rows:
        raise Refused("malformed", f"sizes: below zero, or more than its {n_rows} rows")
    return found


def checked_sum(told: Any) -> float:
    """Returns how much a client's views tell of its clusters.

    Raises:
      Refused: It is no sum of logarithms of shares.
    """
    if type(told) is not float or not -_MOST_NATS < told <= 0:
        raise Refused("malformed", "information: no number of zero or less")
    return told


def scores(counts: Sequence[Counts], vertical: bool) -> dict[str, Any] | None:
    """Returns the scores of the clusters of the clients that share counts.

    None if no client does, or if the tables of all would be larger than is held.
    """
    if not counts:
        return None
    # Only which clusters are the same counts, and a number may be as large as a client says.
    classes, clusters = (
        {name: i for i, name in enumerate(sorted({row[which] for told in counts for row in told}))}
        for which in (0, 1)
    )
    if len(counts) * len(classes) * len(clusters) > _MOST_COUNTS:
        return None  # a message of a node may name as many of both as it has rows, or says to have
    tables = np.zeros((len(counts), len(classes), len(clusters)))
    for table, told in zip(tables, counts, strict=True):
        for name, cluster, n in told:
            table[classes[name], clusters[cluster]] += n
    each = [host.table_scores(table) for table in tables]
    per_client = {m: float(np.mean([of_one[m] for of_one in each])) for m in each[0]}
    if vertical:  # all have the same samples
        return {"clients": len(counts), "per_client": per_client}
    pooled = host.table_scores(tables.sum(axis=0))
    return {"clients": len(counts), "pooled": pooled, "per_client": per_client}
