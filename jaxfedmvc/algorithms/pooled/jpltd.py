"""JPLTD: projections of the views, and graphs of all samples as one tensor, low-rank plus sparse.

    min  sum_v |E_v|_{2,1} + lambda |L|_* + theta |S|_1,   Z_v = L_v + S_v
    s.t. rows E_v = o_v * (T_v - Z_v^T T_v),  T_v = X_v W_v,  W_v^T W_v = I (D_v x k)

Column j of Z_v [N, N] makes sample j of view v up from the others; |.|_* is the nuclear norm of
the tensor's slices along the Fourier transform over these others; o_v is 1 where view v is there.
It is solved by alternating directions with multipliers Y_v and F_v. Spectral clustering of
sum_v (|L_v| + |L_v|^T) / 2V has the last word.

Source: Lv et al., "Joint projection learning and tensor decomposition-based incomplete multiview
clustering", IEEE Transactions on Neural Networks and Learning Systems, 2023, and the authors' code,
whose demonstration on ORL sets the numbers that are the defaults here; those for other data could
not be established. Their step for Z is a Sylvester equation with entries of 1e10 for what is
missing; here it is the limit, which has a closed form. Their projections start as the first k
coordinates, and where these are the blank border of images little is learnt (`start`). Their rule
to stop early, at residuals of 1e-5, is left out: float32 does not get there. By its Fourier
transform the result depends on the order of the samples, which is random.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

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
    polar,
    right_singular_vectors,
    soft,
    spectral_rows,
)
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.linalg import solve_positive
from jaxfedmvc.precision import in_32_bits

# By the compiler's account a run takes 29 bytes for each pair of rows and view: 8.4 GB for 12 000
# rows in two views.
_BYTES, _MOST_BYTES = 29, 10e9
_WHY = "it holds a dozen dense matrices of that size for each view, and takes their eigenvectors"
_MOST_RHO = 1e6


@dataclasses.dataclass(frozen=True)
class JPLTDConfig:
    """Static settings of JPLTD.

    Attributes:
      n_clusters: Number of clusters.
      dim: Width k of the projections; views with fewer features are rotated only.
      start: First projections: "pca", the leading principal directions around zero, or "code", the
        first coordinates, as in the authors' code.
      max_iter: Passes over all variables.
      n_init: Starts of the last k-means, of which the best is kept.
    """

    n_clusters: int
    dim: int = 100
    start: Literal["pca", "code"] = "pca"
    max_iter: int = 30
    n_init: int = 20

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.choices(self)
        checks.at_least(self, 1, "n_clusters", "dim", "max_iter", "n_init")


@struct.dataclass
class JPLTDHyperparams:
    """Numbers of JPLTD that may be traced.

    Attributes:
      lam: Weight lambda of the low-rank part's nuclear norm, 0 or more.
      theta: Weight theta of the sparse part's absolute values, 0 or more.
      rho: First penalty of the constraints, above 0.
      growth: Factor of the penalty from pass to pass up to 1e6, 1 or more.
    """

    lam: Array | float = struct.field(default=5.0, metadata={"flag": "lambda"})
    theta: Array | float = 0.1
    rho: Array | float = 1e-3
    growth: Array | float = 1.3


class State(NamedTuple):
    """Variables of one pass; V views of N samples.

    Attributes:
      e: Errors E, [V, N, k].
      y: Multipliers Y of the reconstruction, [V, N, k].
      z: Graphs Z, [V, N, N].
      low: Low-rank part L, [V, N, N].
      sparse: Sparse part S, [V, N, N].
      f: Multipliers F of the decomposition, [V, N, N].
      rho: Penalty.
    """

    e: Array
    y: Array
    z: Array
    low: Array
    sparse: Array
    f: Array
    rho: Array


def _most_rows(n_views: int) -> int:
    """Returns for how many rows ten gigabytes suffice."""
    return int((_MOST_BYTES / (_BYTES * n_views)) ** 0.5)


def jpltd(config: JPLTDConfig, hyperparams: JPLTDHyperparams | None = None) -> FederatedAlgorithm:
    """Returns JPLTD on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: there are too many samples, or
        fewer than clusters, a view of one feature, or views that no samples link.
    """
    hyper = checks.settings(config, JPLTDConfig, hyperparams, JPLTDHyperparams)
    growing = (lambda x: (x >= 1) & np.isfinite(x), "a finite number, 1 or more")
    checks.numbers(
        hyper,
        {
            "lam": checks.NOT_NEGATIVE,
            "theta": checks.NOT_NEGATIVE,
            "rho": checks.POSITIVE,
            "growth": growing,
        },
    )
    return pooled(
        fit,
        config,
        hyper,
        needs_at_most("jpltd", _most_rows, _WHY),
        needs_features("jpltd", 2, UNIT_ROWS),
        needs_linked_views("jpltd"),
    )


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
@jax.default_matmul_precision("highest")
def fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: JPLTDConfig,
    hyperparams: JPLTDHyperparams,
) -> Fitted:
    """Clusters N rows, of which some views are missing; see `pooled.adapter.Fit`.

    The trace is the larger of the constraints' residuals: the largest sum of a row's magnitudes.
    """
    x, k, real = unit_samples(views, observed), config.dim, is_real(observed)
    (n, n_views), there = observed.shape, observed.T
    first = principal if config.start == "pca" else coordinates
    starts = [first(x_v, k) for x_v in x]

    def one_pass(state: State, _: None) -> tuple[State, Array]:
        rho = state.rho
        c = jnp.where(there[:, :, None], state.e - state.y / rho, 0.0)
        t = jnp.stack(
            [x_v @ projection(x_v, c[v] - state.z[v] @ c[v], starts[v]) for v, x_v in enumerate(x)]
        )
        e = shrink_rows(residual(t, state.z, there) + state.y / rho, 1 / rho)
        q = jnp.where(there[:, :, None], t - e + state.y / rho, 0.0)
        z = graphs(t, q, state.low + state.sparse - state.f / rho, there)
        low = shrink_slices(z - state.sparse + state.f / rho, hyperparams.lam / rho, real)
        sparse = soft(z - low + state.f / rho, hyperparams.theta / rho)
        off, apart = residual(t, z, there) - e, z - low - sparse
        y, f = state.y + rho * off, state.f + rho * apart
        worst = jnp.maximum(
            jnp.max(jnp.sum(jnp.abs(off), axis=1)), jnp.max(jnp.sum(jnp.abs(apart), axis=2))
        )
        grown = jnp.minimum(rho * hyperparams.growth, _MOST_RHO)
        return State(e, y, z, low, sparse, f, grown), worst

    errors, square = jnp.zeros((n_views, n, k)), jnp.zeros((n_views, n, n))
    start = State(errors, errors, square, square, square, square, jnp.float32(hyperparams.rho))
    state, trace = lax.scan(one_pass, start, None, length=config.max_iter)
    affinity = jnp.sum(jnp.abs(state.low), axis=0)
    affinity = (affinity + affinity.T) / (2 * n_views)
    rows = spectral_rows(affinity, real, config.n_clusters)
    labels = kmeans(key, rows, config.n_clusters, where=real, n_init=config.n_init).labels
    return Fitted(labels, rows, trace)


# --- Each variable for the others -----------------------------------------------------------------


def coordinates(x: Array, k: int) -> Array:
    """Returns the projection [D, k] of rows [N, D] to their first k coordinates."""
    return jnp.eye(x.shape[1], k)


def principal(x: Array, k: int) -> Array:
    """Returns the projection [D, k] of rows [N, D] to their k leading directions around zero."""
    vectors = right_singular_vectors(x, k)
    return jnp.pad(vectors, ((0, 0), (0, k - vectors.shape[1])))


def projection(x: Array, targets: Array, start: Array) -> Array:
    """Returns the W [D, k] that maximises <X W, targets>; `start` where all are equally good."""
    products = x.T @ targets
    return jnp.where(jnp.any(products != 0), polar(products), start)


def residual(t: Array, z: Array, there: Array) -> Array:
    """Returns o * (T - Z^T T), [V, N, k]."""
    return jnp.where(there[:, :, None], t - jnp.einsum("vij,vik->vjk", z, t), 0.0)


def shrink_rows(x: Array, by: Array) -> Array:
    """Shortens rows [..., k] by `by`: the least |y - x|^2 / 2 + by |y|_{2,1}."""
    lengths = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x * jnp.maximum(1 - by / jnp.where(lengths > 0, lengths, jnp.inf), 0.0)


def graphs(t: Array, q: Array, p: Array, there: Array) -> Array:
    """Returns Z: (I + T T^T)^-1 (P + T Q^T) in columns that are there, and P in the others.

    By the inverse of a k x k matrix, in O(N^2 k).
    """

    def of_view(t: Array, q: Array, p: Array, there: Array) -> Array:
        right = p + t @ q.T
        inner = jnp.eye(t.shape[1]) + t.T @ t
        solved = right - t @ solve_positive(inner, t.T @ right)
        return jnp.where(there[None], solved, p)

    return jax.vmap(of_view)(t, q, p, there)


# --- The nuclear norm of the rotated tensor -------------------------------------------------------


def shrink_slices(x: Array, by: Array, real: Array) -> Array:
    """Lowers by `by` the singular values of all slices N x V of the tensor [V, N, N].

    The slices are those along the Fourier transform over the first samples' axis. They are tall:
    their Gram matrices V x V say which singular vectors to shorten.
    """
    slices = transform(x, real)
    grams = jnp.einsum("vij,wij->ivw", jnp.conj(slices), slices)
    values, vectors = jax.vmap(linalg.eigh)(grams)
    sizes = jnp.sqrt(jnp.maximum(values, 0.0))
    kept = jnp.maximum(1 - by / jnp.where(sizes > 0, sizes, jnp.inf), 0.0)
    maps = jnp.einsum("iva,ia,iwa->ivw", vectors, kept, jnp.conj(vectors))
    return inverse_transform(jnp.einsum("vij,ivw->wij", slices, maps), real)


def transform(x: Array, real: Array) -> Array:
    """Returns the first half of the discrete Fourier transform of [V, N, N] over axis 1.

    Over the real samples only: with padding, whose number is not static, as a matrix product.
    """

    def by_product(x: Array) -> Array:
        cosines, sines, _ = waves(real)
        parts = [jnp.einsum("fi,vij->vfj", wave, x) for wave in (cosines, -sines)]
        return lax.complex(*parts)

    return _unpadded(real, lambda x: jnp.fft.rfft(x, axis=1), by_product, x)


def inverse_transform(slices: Array, real: Array) -> Array:
    """Undoes `transform`; zero for padding."""
    n = len(real)

    def by_product(slices: Array) -> Array:
        cosines, sines, weights = waves(real)
        parts = weights[None, :, None] * slices
        return jnp.einsum("fi,vfj->vij", cosines, parts.real) - jnp.einsum(
            "fi,vfj->vij", sines, parts.imag
        )

    return _unpadded(real, lambda f: jnp.fft.irfft(f, n=n, axis=1), by_product, slices)


def _unpadded(
    real: Array, fast: Callable[[Array], Array], general: Callable[[Array], Array], x: Array
) -> Array:
    return lax.cond(jnp.all(real), fast, general, x)


def waves(real: Array) -> tuple[Array, Array, Array]:
    """Returns cosines and sines [F, N] over the n real ones of N samples, and weights [F].

    There are F = N // 2 + 1 frequencies; those above n / 2 and padding have zeros. By the weights a
    sum over this half of the frequencies is the mean over all.
    """
    n = jnp.maximum(jnp.sum(real), 1)
    place, frequency = jnp.cumsum(real) - 1, jnp.arange(len(real) // 2 + 1)
    # Whole turns are left out while numbers are integers.
    angles = 2 * jnp.pi / n * ((frequency[:, None] * place[None]) % n)
    used = (2 * frequency <= n)[:, None] & real[None]
    once = (frequency == 0) | (2 * frequency == n)
    weights = jnp.where(once, 1.0, 2.0) / n
    return jnp.where(used, jnp.cos(angles), 0.0), jnp.where(used, jnp.sin(angles), 0.0), weights
