"""Scores of a clustered federation: who is scored together, and how.

Two ways. `pooled`: the labels of all clients of a group in one contingency table with one matching
of clusters to classes, which is what a common clustering must stand. `per_client`: every client
with a table and a matching of its own, averaged over clients, which is kinder to clusterings that
agree on nothing between clients. Labels reach nothing but these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfedmvc import metrics
from jaxfedmvc.federation import Federation

GROUPS = ("all", "multi_view", "partial_view", "participating", "non_participating")


def tables(federation: Federation, predicted: Sequence[jax.Array], n_clusters: int) -> jax.Array:
    """Counts rows by class and cluster for each client, cohort after cohort; jit-able.

    Args:
      federation: With labels.
      predicted: For each cohort int32 [clients, rows].
      n_clusters: Static number of clusters.

    Returns:
      float32 [clients, n_classes, n_clusters], exact up to 2^24 rows of a client.

    Raises:
      ValueError: The federation has no labels.
    """
    if federation.labels is None or federation.n_classes is None:
        raise ValueError("labels: the federation has no labels to score against")
    n_classes = federation.n_classes

    def table(labels: jax.Array, predicted: jax.Array, where: jax.Array) -> jax.Array:
        return metrics.contingency(labels, predicted, n_classes, n_clusters, where=where)

    masks = [cohort.mask for cohort in federation.cohorts]
    return jnp.concatenate(
        [jax.vmap(table)(*c) for c in zip(federation.labels, predicted, masks, strict=True)]
    )


def score(
    federation: Federation,
    predicted: Sequence[jax.Array],
    n_clusters: int,
    participants: Sequence[jax.Array] | None = None,
) -> dict[str, dict[str, dict[str, jax.Array]]]:
    """ACC, NMI, ARI and purity of every group of clients; jit-able.

    Args:
      federation: With labels.
      predicted: For each cohort int32 [clients, rows].
      n_clusters: Static number of clusters.
      participants: For each cohort the places of those that took part; None means all.

    Returns:
      `{group: {"pooled" | "per_client": {"acc" | "nmi" | "ari" | "purity": fraction}}}` for the
      groups of `GROUPS`; NaN where a group has no rows.

    Raises:
      ValueError: The federation has no labels.
    """
    by_client = tables(federation, predicted, n_clusters)
    n_clients = by_client.shape[0]
    members = jnp.stack(
        [jnp.concatenate(chosen) for chosen in _groups(federation, participants).values()]
    )
    # Counts of clients add up to those of their group. Matching clusters to classes takes long to
    # compile, so that all tables go through one.
    pooled = jnp.sum(jnp.where(members[:, :, None, None], by_client, 0.0), axis=1)
    scores = jax.vmap(metrics.scores_from_contingency)(jnp.concatenate([by_client, pooled]))

    has_rows = jnp.concatenate([jnp.any(c.mask, axis=1) for c in federation.cohorts])
    result = {}
    for g, group in enumerate(GROUPS):
        chosen = members[g] & has_rows
        count = jnp.sum(chosen)
        result[group] = {
            "pooled": {name: values[n_clients + g] for name, values in scores.items()},
            "per_client": {
                name: jnp.sum(jnp.where(chosen, values[:n_clients], 0.0)) / count
                for name, values in scores.items()
            },
        }
    return result


def _groups(
    federation: Federation, participants: Sequence[jax.Array] | None
) -> dict[str, list[jax.Array]]:
    """For each group, bool [clients] of each cohort: who belongs to it."""
    sizes = [cohort.n_clients for cohort in federation.cohorts]
    full = [federation.holds_all_views(cohort) for cohort in federation.cohorts]
    took_part = (
        [jnp.ones(n, bool) for n in sizes]
        if participants is None
        else [
            jnp.zeros(n, bool).at[places].set(True)
            for n, places in zip(sizes, participants, strict=True)
        ]
    )
    members = (
        [jnp.ones(n, bool) for n in sizes],
        [jnp.full(n, is_full) for n, is_full in zip(sizes, full, strict=True)],
        [jnp.full(n, not is_full) for n, is_full in zip(sizes, full, strict=True)],
        took_part,
        [~part for part in took_part],
    )
    return dict(zip(GROUPS, members, strict=True))
