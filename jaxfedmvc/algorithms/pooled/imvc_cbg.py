"""IMVC-CBG: consensus bipartite graphs between samples and few anchors, with views missing.

    min  sum_v a_v^2 |X_v - W_v A Z diag(O_v)|_F^2 + lambda |Z|_F^2
    s.t. W_v^T W_v = I (D_v x c), A A^T = I (c x m), columns of Z on the simplex, sum_v a_v = 1

In turn each variable takes its best value for the others; all steps are exact for m = c anchors.
With more anchors and lambda > 0 the step for Z is the authors', and the objective may rise.

Source: Wang et al., "Highly-efficient incomplete large-scale multi-view clustering with consensus
bipartite graph", CVPR 2022, and the authors' readable version of their code, whose rows of the
embedding have length 1. The start is that of their code; the author says that versions of it
differ in their starts. Results that ship with the code are reached within 0 to 7 points only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.pooled.adapter import (
    Fitted,
    needs_features,
    needs_linked_views,
    needs_varied_views,
    pooled,
)
from jaxfedmvc.algorithms.pooled.rows import check_widths, is_real, unit_samples
from jaxfedmvc.algorithms.shared.matrices import (
    alternate,
    left_singular_vectors,
    polar,
    simplex,
    view_weights,
)
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.losses import l2_normalize
from jaxfedmvc.precision import in_32_bits

_WHY = "as many as clusters"


@dataclasses.dataclass(frozen=True)
class IMVCCBGConfig:
    """Static settings of IMVC-CBG.

    Attributes:
      n_clusters: Number of clusters c, and the width of what the anchors live in.
      anchors_per_cluster: Number of anchors m as a multiple of c.
      max_iter: Most passes over all variables.
      n_init: Starts of the last k-means, of which the best is kept.
    """

    n_clusters: int
    anchors_per_cluster: int = 1
    max_iter: int = 50
    n_init: int = 20

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "anchors_per_cluster", "max_iter", "n_init")


@struct.dataclass
class IMVCCBGHyperparams:
    """Numbers of IMVC-CBG that may be traced.

    Attributes:
      lam: Weight lambda of the graph's norm, 0 or more.
      tol: Relative change of the objective at which it stops.
    """

    lam: Array | float = struct.field(default=0.0, metadata={"flag": "lambda"})
    tol: Array | float = 1e-3


def imvc_cbg(
    config: IMVCCBGConfig, hyperparams: IMVCCBGHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns IMVC-CBG on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: a view has fewer features than
        there are clusters, or is constant, or there are fewer samples, or no samples link the
        views.
    """
    hyper = checks.settings(config, IMVCCBGConfig, hyperparams, IMVCCBGHyperparams)
    checks.numbers(hyper, {"lam": checks.NOT_NEGATIVE, "tol": checks.NOT_NEGATIVE})
    wide = needs_features("imvc_cbg", config.n_clusters, _WHY)
    linked, varied = needs_linked_views("imvc_cbg"), needs_varied_views("imvc_cbg")
    return pooled(fit, config, hyper, wide, linked, varied)


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
@jax.default_matmul_precision("highest")
def fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: IMVCCBGConfig,
    hyperparams: IMVCCBGHyperparams,
) -> Fitted:
    """Clusters N rows, of which some views are missing; see `pooled.adapter.Fit`.

    Raises:
      ValueError: A view has fewer features than there are clusters.
    """
    check_widths("imvc_cbg", [x.shape[1] for x in views], config.n_clusters, _WHY)
    x, c = unit_samples(views, observed), config.n_clusters
    n, m = len(observed), c * config.anchors_per_cluster
    real = is_real(observed)[:, None]
    seen, held = observed.astype(jnp.float32), jnp.any(observed, axis=0)
    columns = [seen[:, v, None] for v in range(len(x))]

    spread = jnp.stack([jnp.sum(x_v**2) for x_v in x])

    def errors(projected: list[Array], embedded: Array) -> Array:
        """Computes squared residuals M_v, [V], from X W_v and Z^T A^T, none as wide as a view.

        |x - W y|^2 = |x|^2 - |W^T x|^2 + |W^T x - y|^2, since W^T W = I.
        """
        outside = spread - jnp.stack([jnp.sum(xw**2) for xw in projected])
        within = [jnp.sum((xw - embedded * columns[v]) ** 2) for v, xw in enumerate(projected)]
        return jnp.maximum(outside, 0.0) + jnp.stack(within)

    def step(state: Any) -> tuple[Any, Array]:
        anchors, z, a = state
        embedded = z @ anchors.T  # [N, c]
        projected = [x_v @ polar(x_v.T @ embedded) for x_v in x]  # X W_v, [N, c] each
        mixed = sum(a[v] ** 2 * xw for v, xw in enumerate(projected))
        anchors = polar(mixed.T @ z)
        weight = seen @ a**2 + hyperparams.lam
        z = simplex(mixed @ anchors / jnp.where(weight > 0, weight, 1.0)[:, None]) * real
        found = errors(projected, z @ anchors.T)
        a = view_weights(found, 2.0, held)
        value = jnp.sum(a**2 * found) + hyperparams.lam * jnp.sum(z**2)
        return (anchors, z, a), value

    first = jnp.eye(n, m) * real  # the first rows are the anchors; they come in random order
    start = jnp.zeros((c, m)), first, jnp.full(len(x), 1 / len(x))
    (_, z, _), trace = alternate(step, start, config.max_iter, hyperparams.tol)
    rows = l2_normalize(left_singular_vectors(z, c))
    labels = kmeans(key, rows, c, where=real[:, 0], n_init=config.n_init).labels
    return Fitted(labels, rows, trace)
