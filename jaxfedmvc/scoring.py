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
    if federation.labels is None or federation.n_classes is None:
        raise ValueError("score: the federation has no labels to score against")
    n_classes = federation.n_classes

    def rows_of(labels: jax.Array, predicted: jax.Array, where: jax.Array) -> dict[str, jax.Array]:
        return metrics.scores(labels, predicted, n_classes, n_clusters, where=where)

    truth = jnp.concatenate([labels.ravel() for labels in federation.labels])
    labels = jnp.concatenate([p.ravel() for p in predicted])
    real = [cohort.mask for cohort in federation.cohorts]
    single = [
        jax.vmap(rows_of)(t, p, m)
        for t, p, m in zip(federation.labels, predicted, real, strict=True)
    ]
    by_client = {name: jnp.concatenate([scores[name] for scores in single]) for name in single[0]}
    has_rows = jnp.concatenate([jnp.any(m, axis=1) for m in real])

    result = {}
    for group, members in _groups(federation, participants).items():
        rows = jnp.concatenate(
            [(m & chosen[:, None]).ravel() for m, chosen in zip(real, members, strict=True)]
        )
        chosen = jnp.concatenate(members) & has_rows
        count = jnp.sum(chosen)
        result[group] = {
            "pooled": rows_of(truth, labels, rows),
            "per_client": {
                name: jnp.sum(jnp.where(chosen, values, 0.0)) / count
                for name, values in by_client.items()
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
