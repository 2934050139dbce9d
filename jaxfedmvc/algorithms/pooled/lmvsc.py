"""LMVSC: subspace clustering of complete rows by few anchors in each view, in linear time.

    S_v = argmin |X_v - S_v H_v|_F^2 + alpha |S_v|_F^2,  rows of S_v on the simplex

with H_v [m, D_v] the centres that k-means finds in view v. The leading c left singular vectors of
[S_1, ..., S_V] / sqrt V are clustered by k-means, as they are.

Source: Kang et al., "Large-scale multi-view subspace clustering in linear time", AAAI 2020, and the
authors' code. They search m in {c, 50, 100} and alpha in {0.01, 1, 100} by the labels of the truth;
here m = c and alpha = 1, the middle, are the defaults. Their quadratic programs, one a row, are
solved here for all rows at once by accelerated projected gradients. Rows are taken as they are
scaled, as there; a few unscaled features of large numbers, with more anchors than features and a
small alpha, make programs that float32 and `max_steps` do not solve to the end.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxfedmvc import checks, linalg
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.pooled.adapter import (
    Fitted,
    needs_complete_rows,
    needs_samples,
    pooled,
)
from jaxfedmvc.algorithms.pooled.rows import blank, is_real
from jaxfedmvc.algorithms.shared.matrices import left_singular_vectors, simplex
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.precision import in_32_bits


@dataclasses.dataclass(frozen=True)
class LMVSCConfig:
    """Static settings of LMVSC.

    Attributes:
      n_clusters: Number of clusters c.
      n_anchors: Number of anchors m in each view, c or more, and no more than samples; none: c.
      max_steps: Most gradient steps for the weights of the anchors.
      n_init: Starts of each k-means, of which the best is kept.
    """

    n_clusters: int
    n_anchors: int | None = None
    max_steps: int = 1000
    n_init: int = 10

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "max_steps", "n_init")
        checks.at_least(self, self.n_clusters, "n_anchors")


@struct.dataclass
class LMVSCHyperparams:
    """Numbers of LMVSC that may be traced.

    Attributes:
      alpha: Weight alpha of the squares of the anchors' weights, 0 or more.
      tol: Largest change of any weight in a gradient step at which these stop.
    """

    alpha: Array | float = 1.0
    tol: Array | float = 1e-6


def lmvsc(config: LMVSCConfig, hyperparams: LMVSCHyperparams | None = None) -> FederatedAlgorithm:
    """Returns LMVSC on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: a client does not hold all views,
        or there are fewer samples than clusters or anchors.
    """
    hyper = checks.settings(config, LMVSCConfig, hyperparams, LMVSCHyperparams)
    checks.numbers(hyper, {"alpha": checks.NOT_NEGATIVE, "tol": checks.NOT_NEGATIVE})
    # Among more anchors than rows some are one and the same, whose row then weighs more.
    enough = needs_samples("n_anchors", config.n_anchors or 1)
    return pooled(fit, config, hyper, needs_complete_rows("lmvsc"), enough)


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
@jax.default_matmul_precision("highest")
def fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: LMVSCConfig,
    hyperparams: LMVSCHyperparams,
) -> Fitted:
    """Clusters N complete rows; see `pooled.adapter.Fit`. The trace is the objective in the end."""
    x, c = blank(views, observed), config.n_clusters
    real = is_real(observed)
    key_anchors, key_labels = jax.random.split(key)
    parts, objective = [], jnp.float32(0.0)
    for v, x_v in enumerate(x):
        anchors = kmeans(
            jax.random.fold_in(key_anchors, v),
            x_v,
            config.n_anchors or c,
            where=real,
            n_init=config.n_init,
            max_iter=100,
        ).centroids
        s = anchor_weights(x_v, anchors, real, hyperparams, config.max_steps)
        residual = jnp.where(real[:, None], x_v - s @ anchors, 0.0)
        objective += jnp.sum(residual**2) + hyperparams.alpha * jnp.sum(s**2)
        parts.append(s)
    rows = left_singular_vectors(jnp.concatenate(parts, axis=1) / len(x) ** 0.5, c)
    labels = kmeans(key_labels, rows, c, where=real, n_init=config.n_init, max_iter=100).labels
    return Fitted(labels, rows, objective[None])


def anchor_weights(
    x: Array, anchors: Array, where: Array, hyper: LMVSCHyperparams, max_steps: int
) -> Array:
    """Returns argmin |x - S H|_F^2 + alpha |S|_F^2 with rows on the simplex, [N, m]; else zero.

    Projected gradients with Nesterov's momentum, which a row starts anew where it leads uphill:
    O'Donoghue and Candès, "Adaptive restart for accelerated gradient schemes", 2015.
    """
    n, m = len(x), len(anchors)
    # Weights sum to 1: with anchors around their mean the residuals are the same, and the steps
    # longer.
    middle = jnp.mean(anchors, axis=0, keepdims=True)
    around = anchors - middle
    gram = around @ around.T + hyper.alpha * jnp.eye(m)
    linear = (x - middle) @ around.T
    top = linalg.eigvalsh(gram)[-1]
    step = 1 / jnp.where(top > 0, top, 1.0)

    def unfinished(state: tuple[Array, Array, Array, Array, Array]) -> Array:
        number, _, _, _, moved = state
        return (number < max_steps) & (moved > hyper.tol)

    def once(
        state: tuple[Array, Array, Array, Array, Array],
    ) -> tuple[Array, Array, Array, Array, Array]:
        number, s, ahead, momentum, _ = state
        new = simplex(ahead - step * (ahead @ gram - linear))
        uphill = jnp.sum((ahead - new) * (new - s), axis=1, keepdims=True) > 0
        momentum = jnp.where(uphill, 1.0, momentum)
        grown = (1 + jnp.sqrt(1 + 4 * momentum**2)) / 2
        ahead = new + (momentum - 1) / grown * (new - s)
        moved = jnp.max(jnp.where(where[:, None], jnp.abs(new - s), 0.0))
        return number + 1, new, ahead, grown, moved

    first = jnp.full((n, m), 1 / m)
    start = jnp.int32(0), first, first, jnp.ones((n, 1)), jnp.float32(jnp.inf)
    return jnp.where(where[:, None], lax.while_loop(unfinished, once, start)[1], 0.0)
