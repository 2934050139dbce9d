"""HCP-IMSC: graphs of all samples in each view, low-rank together, that fill in missing views.

In a pass, with unit rows X_v [N, D_v], zero at first where a view is missing:

    Z_v = ((w_v + l2) I + X_v X_v^T)^-1 (X_v X_v^T + w_v R + l2 G_v), symmetric, off-diagonal, >= 0
    R = sum_v w_v Z_v / sum_v w_v,   w_v = 1 / (2 |Z_v - R|_F)
    missing rows of X_v minimise tr X_v^T ((Z_v - I) (Z_v - I)^T + l1 L) X_v, at unit length
    G = the tensor of Z with slices of rank c along the Fourier transform over views

L is the Laplacian of R's nearest rows, in the first pass of a graph and then of a hypergraph.
Spectral clustering of R has the last word. It stops where sum_v |X_v - Z_v X_v|^2 stands.

Source: Li et al., "High-order correlation preserved incomplete multi-view subspace clustering",
IEEE Transactions on Image Processing, 2022, the authors' code, and the GSPBox whose hypergraphs it
uses. They ask that box for 15 neighbours under a wrong name, and get its 10; and the box takes an
edge's weight from entries of other edges, here from its own. They search l1 and l2 from 0.001 to 50
by the labels of the truth; 1 and 1 are the defaults here. Numbers are float32 here: an l2 below 0.1
would need float64 and is refused. The first factors of the slices are found by subspace iteration.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from jaxfedmvc import checks, linalg
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.pooled.adapter import (
    Fitted,
    needs_at_most,
    needs_features,
    needs_linked_views,
    pooled,
)
from jaxfedmvc.algorithms.pooled.rows import UNIT_ROWS, is_real, unit_samples
from jaxfedmvc.algorithms.shared.matrices import (
    alternate,
    inverse_root,
    neighbours,
    spectral_rows,
)
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.linalg import solve, solve_positive
from jaxfedmvc.losses import l2_normalize
from jaxfedmvc.precision import in_32_bits

_MOST_ROWS = 6000
_WHY = "every pass inverts dense matrices of that size, in cubic time"
# Neighbours of a vertex in the graph of the first pass, and vertices of an edge afterwards.
_GRAPH, _EDGE = 15, 10
# Of the subspace iteration: vectors beyond the rank, and steps.
_BEYOND, _STEPS = 10, 15


@dataclasses.dataclass(frozen=True)
class HCPIMSCConfig:
    """Static settings of HCP-IMSC.

    Attributes:
      n_clusters: Number of clusters c, and rank of the slices.
      max_iter: Most passes over all variables.
      n_init: Starts of the last k-means, of which the best is kept.
    """

    n_clusters: int
    max_iter: int = 20
    n_init: int = 20

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "max_iter", "n_init")


@struct.dataclass
class HCPIMSCHyperparams:
    """Numbers of HCP-IMSC that may be traced.

    Attributes:
      lam1: Weight l1 of the Laplacian in what missing rows become, 0 or more.
      lam2: Weight l2 of the low-rank tensor, 0.1 or more.
      tol: Relative change of the reconstruction's error at which it stops.
    """

    lam1: Array | float = struct.field(default=1.0, metadata={"flag": "lambda1"})
    lam2: Array | float = struct.field(default=1.0, metadata={"flag": "lambda2"})
    tol: Array | float = 1e-4


def hcp_imsc(
    config: HCPIMSCConfig, hyperparams: HCPIMSCHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns HCP-IMSC on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: there are too many samples, or
        fewer than clusters, a view of one feature, or views that no samples link.
    """
    hyper = checks.settings(config, HCPIMSCConfig, hyperparams, HCPIMSCHyperparams)
    tenth = (
        lambda x: (x >= 0.1) & np.isfinite(x),
        "a finite number, 0.1 or more (less would need float64)",
    )
    checks.numbers(hyper, {"lam1": checks.NOT_NEGATIVE, "lam2": tenth, "tol": checks.NOT_NEGATIVE})
    return pooled(
        fit,
        config,
        hyper,
        needs_at_most("hcp_imsc", lambda n_views: _MOST_ROWS, _WHY),
        needs_features("hcp_imsc", 2, UNIT_ROWS),
        needs_linked_views("hcp_imsc"),
    )


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
@jax.default_matmul_precision("highest")
def fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: HCPIMSCConfig,
    hyperparams: HCPIMSCHyperparams,
) -> Fitted:
    """Clusters N rows, of which some views are missing; see `pooled.adapter.Fit`."""
    known, c, real = unit_samples(views, observed), config.n_clusters, is_real(observed)
    n, n_views = observed.shape
    rank = min(c, n)
    key_start, key_labels = jax.random.split(key)

    def step(state: Any) -> tuple[Any, Array]:
        number, x, weights, common, low_rank, right = state
        z = jnp.stack(
            [
                graph(
                    x_v,
                    weights[v] * common + hyperparams.lam2 * low_rank[v],
                    weights[v] + hyperparams.lam2,
                )
                for v, x_v in enumerate(x)
            ]
        )
        common = jnp.einsum("v,vij->ij", weights / jnp.sum(weights), z)
        distances = jnp.sqrt(jnp.sum((z - common[None]) ** 2, axis=(1, 2)))
        weights = 0.5 / (distances + jnp.finfo(z.dtype).eps)
        laplacian = lax.cond(number == 0, graph_laplacian, hypergraph_laplacian, common, real)
        x = tuple(
            filled(known_v, real & ~observed[:, v], z[v], hyperparams.lam1 * laplacian)
            for v, known_v in enumerate(known)
        )
        slices = jnp.fft.rfft(z, axis=0)
        right = lax.cond(
            number == 0, lambda: leading_right_vectors(key_start, slices, rank), lambda: right
        )
        left, right = factors(slices, right)
        low_rank = jnp.fft.irfft(left @ right, n=n_views, axis=0)
        errors = [jnp.sum((x_v - z[v] @ x_v) ** 2) for v, x_v in enumerate(x)]
        return (number + 1, x, weights, common, low_rank, right), jnp.sum(jnp.stack(errors))

    square = jnp.zeros((n_views, n, n))
    right = jnp.zeros((n_views // 2 + 1, rank, n), jnp.complex64)
    start = jnp.int32(0), known, jnp.full(n_views, 1 / n_views), square[0], square, right
    state, trace = alternate(step, start, config.max_iter, hyperparams.tol, min_iter=3)
    rows = spectral_rows(state[3], real, c)
    labels = kmeans(key_labels, rows, c, where=real, n_init=config.n_init).labels
    return Fitted(labels, rows, trace)


# --- Each variable for the others -----------------------------------------------------------------


def graph(x: Array, targets: Array, shift: Array) -> Array:
    """Returns Z = (shift I + X X^T)^-1 (X X^T + targets), made symmetric, off-diagonal and >= 0."""
    n, d = x.shape
    if 2 * d < n:
        # By a d x d inverse, and without large numbers that cancel.
        inverse = solve_positive(shift * jnp.eye(d) + x.T @ x, x.T)
        z = x @ inverse + (targets - x @ (inverse @ targets)) / shift
    else:
        gram = x @ x.T
        z = solve_positive(shift * jnp.eye(n) + gram, gram + targets)
    z = jnp.where(jnp.eye(n, dtype=bool), 0.0, z)
    return jnp.maximum((z + z.T) / 2, 0.0)


def filled(known: Array, missing: Array, z: Array, laplacian: Array) -> Array:
    """Returns the rows X [N, D] with the missing ones -M_uu^-1 M_uo X_o, at unit length.

    M = (Z - I) (Z - I)^T + `laplacian`. In the other rows the system is the identity.
    """
    n = len(z)
    off = z - jnp.eye(n)
    m = off @ off.T + laplacian
    system = jnp.where(missing[:, None] & missing[None], m, jnp.eye(n))
    targets = jnp.where(missing[:, None], -m @ known, known)
    rows = solve(system, targets)
    return jnp.where(missing[:, None], l2_normalize(rows), known)


# --- The low-rank tensor --------------------------------------------------------------------------


def leading_right_vectors(key: Array, slices: Array, rank: int) -> Array:
    """Returns the leading right singular vectors [F, rank, N] of slices [F, N, N]."""
    n = slices.shape[1]
    # A real start: slices that are real stay so.
    start = jax.random.normal(key, (n, min(n, rank + _BEYOND))).astype(slices.dtype)

    def once(_: int, basis: Array) -> Array:
        return jax.vmap(linalg.qr)(_adjoint(slices) @ (slices @ basis))[0]

    basis = lax.fori_loop(
        0, _STEPS, once, jnp.broadcast_to(start[None], (len(slices), *start.shape))
    )
    small = jax.vmap(linalg.svd)(slices @ basis)[2]
    return small[:, :rank] @ _adjoint(basis)


def factors(slices: Array, right: Array) -> tuple[Array, Array]:
    """Improves slices ~ left @ right, each for the other: [F, N, c] and [F, c, N]."""
    inverses = jax.vmap(linalg.pinv_hermitian)
    left = slices @ _adjoint(right) @ inverses(right @ _adjoint(right))
    right = inverses(_adjoint(left) @ left) @ (_adjoint(left) @ slices)
    return left, right


def _adjoint(matrices: Array) -> Array:
    return jnp.conj(jnp.swapaxes(matrices, 1, 2))


# --- Laplacians -----------------------------------------------------------------------------------


def graph_laplacian(rows: Array, where: Array) -> Array:
    """Returns D - W of the graph of 15 nearest rows, with the weights of Nie, Wang and Huang, 2014.

    A row's weights (d_16 - d_j) / sum_j (d_16 - d_j) fall to zero at the first that is no
    neighbour; of fewer rows, at the last.
    """
    n = len(rows)
    found, distances = neighbours(rows, where, _GRAPH + 1)
    valid = where[:, None] & jnp.isfinite(distances)
    distances = jnp.where(valid, distances, 0.0)
    closer = jnp.where(valid, jnp.max(distances, axis=1, keepdims=True) - distances, 0.0)
    total = jnp.sum(closer, axis=1, keepdims=True)
    weights = closer / jnp.where(total > 0, total, 1.0)
    w = jnp.zeros((n, n)).at[jnp.arange(n)[:, None], found].add(weights)
    w = (w + w.T) / 2
    return jnp.diag(jnp.sum(w, axis=1)) - w


def hypergraph_laplacian(rows: Array, where: Array) -> Array:
    """Returns I - Dv^-1/2 B diag(w) De^-1 B^T Dv^-1/2, an edge for each row: it and 9 nearest ones.

    An edge weighs w_i = sum_j exp(-d_ij^2 / s^2), s the mean of all these distances.
    """
    n = len(rows)
    found, distances = neighbours(rows, where, _EDGE - 1)
    members = jnp.concatenate([jnp.arange(n)[:, None], found], axis=1)
    distances = jnp.concatenate([jnp.zeros((n, 1)), distances], axis=1)
    valid = where[:, None] & jnp.isfinite(distances)
    distances = jnp.where(valid, distances, 0.0)
    width = jnp.sum(jnp.sqrt(distances)) / jnp.maximum(jnp.sum(valid), 1)
    heat = jnp.where(valid, jnp.exp(-distances / jnp.where(width > 0, width, 1.0) ** 2), 0.0)
    weights, sizes = jnp.sum(heat, axis=1), jnp.maximum(jnp.sum(valid, axis=1), 1)
    degrees = jnp.zeros(n).at[members].add(valid * weights[:, None])
    share = valid * inverse_root(degrees)[members]
    pairs = (weights / sizes)[:, None, None] * share[:, :, None] * share[:, None]
    return jnp.eye(n).at[members[:, :, None], members[:, None]].add(-pairs)
