"""Contingency tables of a clustered federation inside a program; `metrics.host` scores them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxfedmvc import metrics
from jaxfedmvc.federation import Federation
from jaxfedmvc.precision import in_32_bits


@in_32_bits
def tables(federation: Federation, predicted: Sequence[jax.Array], n_clusters: int) -> jax.Array:
    """Counts rows by class and cluster for each client, cohort after cohort; jit-able.

    Args:
      federation: With labels.
      predicted: For each cohort int32 [clients, rows].
      n_clusters: Static number of clusters.

    Returns:
      float32 [clients, n_classes, n_clusters], exact up to 2^24 rows of a client.

    Raises:
      ValueError: The federation has no labels, `n_clusters` is below 1, or `predicted` has other
        shapes than they, or no integers.
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
