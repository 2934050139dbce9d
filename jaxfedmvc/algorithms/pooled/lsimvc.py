"""LSIMVC: sparse codes of each view, pulled to a common one along neighbour graphs.

    min  sum_v a_v^r E_v,  U_v^T U_v = I,  sum_v a_v = 1
    E_v = |X_v - P_v U_v^T|_F^2 + beta |P_v|_1 + lambda sum_ij W_v,ij |p_v,i - p*_j|^2

over the rows X_v of unit length that hold view v. W_v = I + the heat kernel exp(-d^2 / (2 t^2)) on
pairs of which one is among the other's nearest rows, t the mean distance of two rows. In turn each
variable takes its best value for the others. Rows of P* of length 1 are clustered by k-means.

Source: Liu et al., "Localized sparse incomplete multi-view clustering", IEEE Transactions on
Multimedia, 2023, and the authors' code, whose demonstration sets the numbers that are the defaults
here; what the paper chooses for its data sets could not be established. Rows are scaled to length 1
as by their loader. Their code stops where the objective moves by 1e-6, which in float32 it hardly
does; here the change is relative.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxfedmvc import checks, linalg
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
    neighbours,
    polar,
    soft,
    squared_distances,
    view_weights,
)
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.losses import l2_normalize
from jaxfedmvc.precision import in_32_bits

_WHY = "as many as clusters"
# Rows whose distances the width of the heat kernel is taken from.
_SAMPLE = 3000


@dataclasses.dataclass(frozen=True)
class LSIMVCConfig:
    """Static settings of LSIMVC.

    Attributes:
      n_clusters: Number of clusters c, and the width of the codes.
      n_neighbours: Nearest rows that a row is tied to, in each view.
      max_iter: Most passes over all variables.
      n_init: Starts of the last k-means, of which the best is kept.
    """

    n_clusters: int
    n_neighbours: int = 5
    max_iter: int = 100
    n_init: int = 20

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "n_neighbours", "max_iter", "n_init")


@struct.dataclass
class LSIMVCHyperparams:
    """Numbers of LSIMVC that may be traced.

    Attributes:
      lam: Weight lambda of the ties to the common codes, 0 or more.
      beta: Weight beta of the codes' absolute values, 0 or more.
      r: Exponent of the views' weights, above 1; large ones make views weigh alike.
      tol: Relative change of the objective at which it stops.
    """

    lam: Array | float = struct.field(default=1.0, metadata={"flag": "lambda"})
    beta: Array | float = 0.01
    r: Array | float = 2.0
    tol: Array | float = 1e-6


class Graph(NamedTuple):
    """A symmetric matrix W [N, N] as a list of its entries; those of weight 0 are none.

    Attributes:
      rows: int32 [M].
      columns: int32 [M].
      weights: [M].
      degrees: Sums of W's rows, [N].
    """

    rows: Array
    columns: Array
    weights: Array
    degrees: Array


def lsimvc(
    config: LSIMVCConfig, hyperparams: LSIMVCHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns LSIMVC on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: a view has fewer features than
        there are clusters, or is constant, or there are fewer samples, or no samples link the
        views.
    """
    hyper = checks.settings(config, LSIMVCConfig, hyperparams, LSIMVCHyperparams)
    checks.numbers(
        hyper,
        {
            "lam": checks.NOT_NEGATIVE,
            "beta": checks.NOT_NEGATIVE,
            "r": checks.ABOVE_ONE,
            "tol": checks.NOT_NEGATIVE,
        },
    )
    wide = needs_features("lsimvc", config.n_clusters, _WHY)
    linked, varied = needs_linked_views("lsimvc"), needs_varied_views("lsimvc")
    return pooled(fit, config, hyper, wide, linked, varied)


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
@jax.default_matmul_precision("highest")
def fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: LSIMVCConfig,
    hyperparams: LSIMVCHyperparams,
) -> Fitted:
    """Clusters N rows, of which some views are missing; see `pooled.adapter.Fit`.

    Raises:
      ValueError: A view has fewer features than there are clusters.
    """
    check_widths("lsimvc", [x.shape[1] for x in views], config.n_clusters, _WHY)
    x, c = unit_samples(views, observed), config.n_clusters
    real = is_real(observed)[:, None]
    graphs = [neighbour_graph(x_v, observed[:, v], config.n_neighbours) for v, x_v in enumerate(x)]
    key_start, key_labels = jax.random.split(key)
    starts = [
        random_basis(jax.random.fold_in(key_start, v), x_v.shape[1], c) for v, x_v in enumerate(x)
    ]

    def step(state: Any) -> tuple[Any, Array]:
        codes, weights, _ = state
        common = common_codes(graphs, codes, weights)
        bases = [polar(x_v.T @ p) for x_v, p in zip(x, codes, strict=True)]
        codes = tuple(
            view_codes(x_v, basis, graph, common, hyperparams)
            for x_v, basis, graph in zip(x, bases, graphs, strict=True)
        )
        errors = jnp.stack(
            [
                error(x_v, basis, p, graph, common, hyperparams)
                for x_v, basis, p, graph in zip(x, bases, codes, graphs, strict=True)
            ]
        )
        a = view_weights(errors, hyperparams.r, jnp.any(observed, axis=0))
        return (codes, a**hyperparams.r, common), jnp.sum(a**hyperparams.r * errors)

    codes = tuple(x_v @ basis for x_v, basis in zip(x, starts, strict=True))
    start = codes, jnp.ones(len(x)), jnp.zeros((len(observed), c))
    (_, _, common), trace = alternate(step, start, config.max_iter, hyperparams.tol, min_iter=4)
    rows = l2_normalize(common) * real
    labels = kmeans(key_labels, rows, c, where=real[:, 0], n_init=config.n_init).labels
    return Fitted(labels, rows, trace)


def random_basis(key: Array, d: int, c: int) -> Array:
    """Returns an orthonormal basis [d, c] of what uniform draws span, the singular vectors."""
    return linalg.svd(jax.random.uniform(key, (d, c)))[0]


# --- Each variable for the others -----------------------------------------------------------------


def common_codes(graphs: list[Graph], codes: tuple[Array, ...], weights: Array) -> Array:
    """Returns P* = sum_v a_v^r W_v P_v / sum_v a_v^r deg_v [N, c], for weights a_v^r."""
    total = sum(w * product(g, p) for w, g, p in zip(weights, graphs, codes, strict=True))
    degrees = sum(w * g.degrees for w, g in zip(weights, graphs, strict=True))
    return total / jnp.maximum(degrees, 1e-8)[:, None]


def view_codes(
    x: Array, basis: Array, graph: Graph, common: Array, hyper: LSIMVCHyperparams
) -> Array:
    """Returns P_v [N, c], zero where the view is missing."""
    degrees = (hyper.lam * graph.degrees + 1)[:, None]
    return soft(
        (hyper.lam * product(graph, common) + x @ basis) / degrees, hyper.beta / (2 * degrees)
    )


def error(
    x: Array, basis: Array, codes: Array, graph: Graph, common: Array, hyper: LSIMVCHyperparams
) -> Array:
    """Returns E_v."""
    ties = graph.weights * jnp.sum((codes[graph.rows] - common[graph.columns]) ** 2, axis=1)
    return (
        jnp.sum((x - codes @ basis.T) ** 2)
        + hyper.beta * jnp.sum(jnp.abs(codes))
        + hyper.lam * jnp.sum(ties)
    )


# --- Graphs ---------------------------------------------------------------------------------------


def neighbour_graph(x: Array, where: Array, k: int) -> Graph:
    """Returns W_v of the selected rows of `x` [N, D], from each row's k nearest ones."""
    n = len(x)
    found, distances = neighbours(x, where, k)
    width = mean_distance(x, where)
    heat = jnp.exp(-distances / jnp.maximum(2 * width**2, jnp.finfo(x.dtype).tiny))
    heat = jnp.where(where[:, None] & jnp.isfinite(distances), heat, 0.0)
    # A pair that names each other is one entry and its mirror image, not two.
    mutual = jnp.any(found[found] == jnp.arange(n)[:, None, None], axis=2)
    here = jnp.broadcast_to(jnp.arange(n)[:, None], found.shape).ravel()
    there = found.ravel()
    diagonal = jnp.arange(n)
    rows = jnp.concatenate([diagonal, here, there])
    columns = jnp.concatenate([diagonal, there, here])
    once = jnp.where(mutual, 0.0, heat)
    weights = jnp.concatenate([where.astype(x.dtype), heat.ravel(), once.ravel()])
    return Graph(rows, columns, weights, jax.ops.segment_sum(weights, rows, n))


def mean_distance(x: Array, where: Array) -> Array:
    """Returns the mean distance of two selected rows, each with itself too; of 3000 at most.

    The first ones are a sample, as rows come in random order.
    """
    first = jnp.argsort(~where)[:_SAMPLE]
    taken = where[first]
    distances = jnp.sqrt(squared_distances(x[first], x[first]))
    both = taken[:, None] & taken[None]
    return jnp.sum(jnp.where(both, distances, 0.0)) / jnp.maximum(jnp.sum(taken), 1) ** 2


def product(graph: Graph, p: Array) -> Array:
    """Returns W P of codes [N, c]."""
    entries = graph.weights[:, None] * p[graph.columns]
    return jax.ops.segment_sum(entries, graph.rows, len(p))
