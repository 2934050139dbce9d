"""Phase 1 within one agent: consensus of clusterings of random feature subsets.

GetClusters of CoHiRF (Meziani et al., "CoHiRF: hierarchical consensus for interpretable
clustering", 2025).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc.algorithms.shared.cells import strict_consensus
from jaxfedmvc.algorithms.vertcohirf.consensus import relaxed_consensus
from jaxfedmvc.algorithms.vertcohirf.settings import (
    COUNT,
    RAND_INDEX,
    SHARE,
    Base,
    VertCoHiRFConfig,
    VertCoHiRFHyperparams,
)
from jaxfedmvc.checks import at_least, numbers, wrong
from jaxfedmvc.clustering import local
from jaxfedmvc.clustering.local import LocalMethod


class LocalStep(NamedTuple):
    """How an agent clusters its active samples.

    Attributes:
      method: The base clusterer, closed over its own settings.
      feature_share: Share of its features in (0, 1] that a repetition sees (q), or a number of
        features as a whole number; at least one feature. Traced.
      repetitions: Number of repetitions (R); static.
      limit: If not None, only the first `limit` repetitions count: a sweep over R is one program.
      threshold: Threshold of the relaxed consensus (h); None for the strict one. Traced.
    """

    method: LocalMethod
    feature_share: ArrayLike = 1.0
    repetitions: int = 1
    limit: ArrayLike | None = None
    threshold: ArrayLike | None = None


def make_step(base: Base, config: VertCoHiRFConfig, hp: VertCoHiRFHyperparams) -> LocalStep:
    """Makes the step of an agent from the name of its base clusterer.

    Raises:
      ValueError: The clusterer needs a number of clusters and none is known, or `limit` is beyond
        it.
    """
    if base == "dbscan":
        method = local.dbscan_method(hp.eps, hp.min_samples)
    else:
        n_clusters, most = _local_clusters(config, hp)
        if base == "sc_srgf":
            return LocalStep(
                local.sc_srgf_method(n_clusters, config.n_graphs, hp.sampling_ratio, most)
            )
        if base == "kernel_kmeans":
            method = local.kernel_kmeans_method(n_clusters, hp.gamma, most)
        else:
            method = local.kmeans_method(n_clusters, most)
    return LocalStep(method, hp.feature_share, config.repetitions, threshold=hp.relaxed)


def _local_clusters(
    config: VertCoHiRFConfig, hp: VertCoHiRFHyperparams
) -> tuple[ArrayLike, int | None]:
    """Returns C, and its static bound where it is traced.

    Raises:
      ValueError: It is not known, or `limit` is beyond it.
    """
    n_clusters = config.local_clusters or config.n_clusters
    if isinstance(n_clusters, str):
        raise wrong(
            "local_clusters", n_clusters, "a number here; experiments.run and `choice` find one"
        )
    if n_clusters is None:
        raise wrong("local_clusters", None, "1 or more, where n_clusters is not known")
    if hp.limit is None:
        return n_clusters, None
    numbers(hp, {"limit": (lambda c: c <= n_clusters, f"at most {n_clusters}, local_clusters")})
    return hp.limit, n_clusters


def check_step(step: LocalStep) -> None:
    """Checks the numbers of a step that are not traced.

    Raises:
      ValueError: Names the first one that is out of range.
    """
    at_least(step, 1, "repetitions")
    numbers(step, {"limit": COUNT, "feature_share": SHARE, "threshold": RAND_INDEX})


def local_codes(key: Array, x: Array, where: Array, step: LocalStep) -> Array:
    """Returns the consensus of R clusterings of random feature subsets (GetClusters).

    Args:
      key: Key of this agent and round; repetition r draws from `fold_in(key, r)`.
      x: The agent's active rows [c, p].
      where: Which of them are in use, bool [c].
      step: The agent's settings.

    Returns:
      int32 [c], 0.. in lexicographic order of the repetitions' labels; -1 outside `where`. A
      noise point has a label of its own.
    """

    def repetition(r: Array) -> Array:
        subset_key, method_key = jax.random.split(jax.random.fold_in(key, r))
        subset = feature_subset(subset_key, x.shape[1], step.feature_share)
        # Features left out are zero and not cut out: they add nothing to a distance, and the
        # number of features may then be traced.
        return step.method(method_key, jnp.where(subset, x, 0.0), where)

    repetitions = jnp.arange(step.repetitions)
    if step.repetitions == 1:
        labels = repetition(repetitions[0])[None]
    elif step.limit is None:
        labels = jax.vmap(repetition)(repetitions)
    else:  # one after another, and no more than count
        labels = lax.fori_loop(
            0,
            jnp.minimum(step.limit, step.repetitions),
            lambda r, rows: rows.at[r].set(repetition(r)),
            jnp.zeros((step.repetitions, len(x)), jnp.int32),
        )
    position = jnp.arange(x.shape[0], dtype=jnp.int32)
    labels = jnp.where(labels < 0, jnp.max(labels) + 1 + position[None], labels)
    used = jnp.ones(step.repetitions, bool) if step.limit is None else repetitions < step.limit
    if step.threshold is None or step.repetitions == 1:
        return strict_consensus(labels, where, used)[0]
    return relaxed_consensus(labels, where, used, step.threshold)


def feature_subset(key: Array, n_features: int, share: ArrayLike) -> Array:
    """Draws max(1, int(q p)) of p features without replacement, or min(q, p) for a whole number q.

    Returns:
      bool [p].
    """
    share = jnp.asarray(share)
    if jnp.issubdtype(share.dtype, jnp.integer):
        n = jnp.minimum(share, n_features)
    else:
        # In float32 a product may fall just short: 0.29 of 100 is meant as 29.
        n = jnp.floor(share * n_features + 1e-4).astype(jnp.int32)
    return jax.random.permutation(key, n_features) < jnp.maximum(n, 1)
