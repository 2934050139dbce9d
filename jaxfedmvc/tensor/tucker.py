"""Tucker decomposition of dense tensors by HOSVD and HOOI, on tensors of any order.

A tensor X [I_1, ..., I_N] is approximated by a core G [R_1, ..., R_N] times a matrix U_n [I_n, R_n]
with orthonormal columns in every mode: X ~ G x_1 U_1 x_2 U_2 ... x_N U_N. Modes count from 0 here.

The functions are pure, jit- and vmap-able, with ranks and numbers of sweeps static. The model
fixes its factors up to a rotation of each only. `hosvd`, `hooi` and `hooi_sweep` return the
singular vectors that they found in decreasing order of their singular values, each with its entry
of largest magnitude positive, so that equal tensors get equal factors; `procrustes` turns factors
towards others.

References: Kolda and Bader, "Tensor decompositions and applications" (2009); De Lathauwer, De Moor
and Vandewalle, "A multilinear singular value decomposition" (HOSVD) and "On the best rank-1 and
rank-(R1, ..., RN) approximation of higher-order tensors" (HOOI), both 2000.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc import checks, linalg
from jaxfedmvc.precision import in_32_bits, matmul


class Tucker(NamedTuple):
    """A tensor in Tucker form.

    Attributes:
        core: float32 [R_1, ..., R_N].
        factors: One matrix with orthonormal columns for each mode, float32 [I_n, R_n].
    """

    core: Array
    factors: tuple[Array, ...]


class HooiResult(NamedTuple):
    """Result of `hooi`.

    Attributes:
        tucker: The decomposition.
        error: Its distance to the tensor over the tensor's norm, scalar; 0 for a tensor of zeros.
        n_sweeps: Number of sweeps made, scalar int32.
    """

    tucker: Tucker
    error: Array
    n_sweeps: Array


@in_32_bits
def unfold(x: ArrayLike, mode: int) -> Array:
    """Returns the matrix X_(mode) [I_mode, product of the others]: its columns are a mode's fibres.

    The index of the lowest other mode runs fastest over the columns (Kolda & Bader, 2009), so that
    X_(0) = U_0 G_(0) (U_2 kron U_1)^T for a Tucker form of three modes.

    Raises:
        ValueError: `x` has no mode `mode`, or is not of real numbers.
    """
    x = checks.floats("x", x)
    _check_mode(x, mode)
    others = [other for other in reversed(range(x.ndim)) if other != mode]
    n_fibres = math.prod(x.shape[other] for other in others)  # of an empty mode -1 tells nothing
    return jnp.transpose(x, (mode, *others)).reshape(x.shape[mode], n_fibres)


@in_32_bits
def mode_product(x: ArrayLike, matrix: ArrayLike, mode: int) -> Array:
    """Computes X x_mode M: multiplies every fibre of a mode by a matrix.

    Args:
        x: Tensor, float32 [I_1, ..., I_N].
        matrix: float32 [J, I_mode].
        mode: The mode, from 0.

    Returns:
        float32, the shape of `x` with J in place of I_mode.

    Raises:
        ValueError: `x` has no mode `mode`, `matrix` does not fit it, or an array is not of
            real numbers.
    """
    x, matrix = checks.floats("x", x), checks.floats("matrix", matrix)
    _check_mode(x, mode)
    if matrix.ndim != 2 or matrix.shape[1] != x.shape[mode]:
        raise checks.wrong("matrix", matrix.shape, f"shape [J, {x.shape[mode]}]")
    product = jnp.tensordot(matrix, x, (1, mode), precision=lax.Precision.HIGHEST)
    return jnp.moveaxis(product, 0, mode)


@in_32_bits
def reconstruct(tucker: Tucker) -> Array:
    """Returns the tensor G x_1 U_1 ... x_N U_N, float32 [I_1, ..., I_N]."""
    x = tucker.core
    for mode, factor in enumerate(tucker.factors):
        x = mode_product(x, factor, mode)
    return x


@in_32_bits
def project(x: ArrayLike, factors: Sequence[Array]) -> Tucker:
    """Fits the core for fixed factors by least squares: X x_1 U_1^T ... x_N U_N^T.

    The core is linear in `x`: averaging cores of shared factors projects the averaged tensor.

    Raises:
        ValueError: There is not one factor for each mode, one does not fit its mode, or an array is
            not of real numbers.
    """
    core = checks.floats("x", x)
    _check_factors(core, factors)
    for mode, factor in enumerate(factors):
        core = mode_product(core, factor.T, mode)
    return Tucker(core, tuple(factors))


@in_32_bits
def hosvd(x: ArrayLike, ranks: Sequence[int]) -> Tucker:
    """Computes the truncated higher-order SVD (De Lathauwer et al., 2000).

    U_n holds the leading R_n left singular vectors of X_(n). The squared error is at most the sum
    over modes of the squared singular values left out, and at most N times the least possible one.

    Args:
        x: Tensor, float32 [I_1, ..., I_N], N >= 2.
        ranks: R_1, ..., R_N, static.

    Returns:
        The decomposition; see the module's docstring for order and signs.

    Raises:
        ValueError: `x` has fewer than two modes or an empty one, or `ranks` does not hold one rank
            for each mode with 1 <= R_n <= I_n and R_n <= product of the other ranks.
    """
    x, ranks = _check(x, ranks)
    return project(x, [_leading(unfold(x, mode), rank) for mode, rank in enumerate(ranks)])


@in_32_bits
def hooi_sweep(x: ArrayLike, factors: Sequence[Array]) -> tuple[Array, ...]:
    """Makes one sweep of higher-order orthogonal iteration (De Lathauwer et al., 2000).

    In every mode in turn U_n becomes the leading R_n left singular vectors of the unfolding of
    X x_{m != n} U_m^T. With the core of `project`, the error never increases.

    Args:
        x: Tensor, float32 [I_1, ..., I_N].
        factors: U_1, ..., U_N with orthonormal columns, float32 [I_n, R_n].

    Returns:
        The new factors.

    Raises:
        ValueError: As `project`.
    """
    x, factors = checks.floats("x", x), list(factors)
    _check_factors(x, factors)
    for mode, factor in enumerate(factors):
        projected = x
        for other, other_factor in enumerate(factors):
            if other != mode:
                projected = mode_product(projected, other_factor.T, other)
        factors[mode] = _leading(unfold(projected, mode), factor.shape[1])
    return tuple(factors)


@in_32_bits
def hooi(
    x: ArrayLike, ranks: Sequence[int], *, max_sweeps: int = 20, tol: ArrayLike = 1e-6
) -> HooiResult:
    """Lowers the squared error of a Tucker form by sweeps of `hooi_sweep`, starting from `hosvd`.

    A tensor of zeros gives a core of zeros.

    Args:
        x: Tensor, float32 [I_1, ..., I_N], N >= 2.
        ranks: R_1, ..., R_N, static.
        max_sweeps: Largest number of sweeps, static.
        tol: The sweeps end when the relative error changed by no more than this; may be traced.

    Returns:
        The decomposition; see the module's docstring for order and signs.

    Raises:
        ValueError: As `hosvd`, `max_sweeps` is below 1, or `tol` is negative or NaN.
    """
    x, ranks = _check(x, ranks)
    checks.whole("max_sweeps", max_sweeps, 1)
    checks.number("tol", tol, checks.NOT_NEGATIVE)
    return _hooi(x, tol, ranks, max_sweeps)


@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _hooi(x: Array, tol: ArrayLike, ranks: tuple[int, ...], max_sweeps: int) -> HooiResult:
    def unfinished(state: tuple[Tucker, Array, Array, Array]) -> Array:
        _, error, previous, n_sweeps = state
        return (n_sweeps < max_sweeps) & (jnp.abs(previous - error) > tol)

    def update(
        state: tuple[Tucker, Array, Array, Array],
    ) -> tuple[Tucker, Array, Array, Array]:
        old, error, _, n_sweeps = state
        new = project(x, hooi_sweep(x, old.factors))
        return new, relative_error(x, reconstruct(new)), error, n_sweeps + 1

    first = hosvd(x, ranks)
    error = relative_error(x, reconstruct(first))
    start = first, error, jnp.float32(jnp.inf), jnp.int32(0)
    best, error, _, n_sweeps = lax.while_loop(unfinished, update, start)
    return HooiResult(best, error, n_sweeps)


@in_32_bits
def polar(matrix: ArrayLike) -> Array:
    """Returns the nearest matrix with orthonormal columns (Schönemann, 1966).

    It is U V^T of the singular value decomposition U S V^T.

    Args:
        matrix: float32 [n, r], n >= r.

    Returns:
        float32 [n, r]. One of several nearest ones if the rank of `matrix` is below r.

    Raises:
        ValueError: `matrix` is not a matrix with at least as many rows as columns.
    """
    matrix = checks.floats("matrix", matrix)
    if matrix.ndim != 2 or matrix.shape[0] < matrix.shape[1]:
        raise checks.wrong("matrix", matrix.shape, "shape [n, r] with n >= r")
    left, _, right = linalg.svd(matrix)
    return matmul(left, right)


@in_32_bits
def procrustes(tucker: Tucker, reference_factors: Sequence[ArrayLike]) -> Tucker:
    """Rotates the factors as near as possible to reference factors; the tensor stays the same.

    U_n becomes U_n O and the core G x_n O^T, with O the polar factor of U_n^T U_n^ref (orthogonal
    Procrustes problem; Schönemann, 1966). Factors of several clients can then be averaged.

    Args:
        tucker: The decomposition.
        reference_factors: One matrix [I_n, R_n] for each mode.

    Returns:
        The rotated decomposition; `reconstruct` gives what it gave before.

    Raises:
        ValueError: `reference_factors` has other shapes than the factors of `tucker`.
    """
    references = [checks.floats("reference_factors", x) for x in reference_factors]
    shapes = [factor.shape for factor in tucker.factors]
    if [reference.shape for reference in references] != shapes:
        got = [reference.shape for reference in references]
        raise checks.wrong("reference_factors", got, f"the shapes of the factors, {shapes}")
    core, factors = tucker.core, []
    for mode, (factor, reference) in enumerate(zip(tucker.factors, references, strict=True)):
        rotation = polar(matmul(factor.T, reference))
        factors.append(matmul(factor, rotation))
        core = mode_product(core, rotation.T, mode)
    return Tucker(core, tuple(factors))


@in_32_bits
def weighted_target(target: ArrayLike, fitted: ArrayLike, weights: ArrayLike) -> Array:
    """Returns the target of a plain least-squares step that lowers a weighted error (Kiers, 1997).

    T = F + (w / max w) o (M - F). For every C, max w * |T - C|^2 plus a constant is at least
    sum w (C - M)^2, with equality at C = F: whatever lowers |T - C|^2 from C = F does not raise
    the weighted error.

    Args:
        target: M, float32, of any shape. Its entries of weight 0 are never read.
        fitted: F, the current approximation, of the same shape.
        weights: w, finite and non-negative, of the same shape. All zero gives T = F.

    Returns:
        T, float32 of the same shape.

    Raises:
        ValueError: Shapes differ, or an array is not of real numbers.
    """
    target, fitted = checks.floats("target", target), checks.floats("fitted", fitted)
    weights = checks.floats("weights", weights)
    for name, array in (("fitted", fitted), ("weights", weights)):
        if array.shape != target.shape:
            raise checks.wrong(name, array.shape, f"the shape of target, {target.shape}")
    peak = weights.max()
    share = weights / jnp.where(peak > 0, peak, 1.0)
    return fitted + jnp.where(weights > 0, share * (target - fitted), 0.0)


@in_32_bits
def relative_error(x: Array, fitted: Array) -> Array:
    """Computes |x - fitted| / |x| in Frobenius norms; 0 where `x` is zero and fitted exactly.

    Raises:
        ValueError: Shapes differ, or an array is not of real numbers.
    """
    x, fitted = checks.floats("x", x), checks.floats("fitted", fitted)
    if fitted.shape != x.shape:
        raise checks.wrong("fitted", fitted.shape, f"the shape of x, {x.shape}")
    # By a power of two, which rounds nothing: squares leave float32 from 1e19 and below 1e-19.
    exponent = jnp.frexp(jnp.max(jnp.abs(x), initial=0.0))[1]
    unit = jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -126, 126))
    x, fitted = x / unit, fitted / unit
    # From the difference: |x|^2 - |core|^2 would leave no digits of a small error.
    norm = jnp.sqrt(jnp.sum(jnp.square(x)))
    return jnp.sqrt(jnp.sum(jnp.square(x - fitted))) / jnp.where(norm > 0, norm, 1.0)


def largest_entry_signs(matrix: Array) -> Array:
    """Returns the sign of each column's entry of largest magnitude, [1, r]; 1 for zeros."""
    largest = jnp.argmax(jnp.abs(matrix), axis=0)[None]
    return jnp.where(jnp.take_along_axis(matrix, largest, axis=0) < 0, -1.0, 1.0)


def _leading(matrix: Array, rank: int) -> Array:
    """Returns the leading left singular vectors [n, rank], signs fixed."""
    # Not from the eigenvectors of the Gram matrix: it squares the condition number, and float32
    # would lose whatever is below 1/3000 of the largest singular value.
    vectors = linalg.svd(matrix)[0][:, :rank]
    return vectors * largest_entry_signs(vectors)


def _check(x: ArrayLike, ranks: Sequence[int]) -> tuple[Array, tuple[int, ...]]:
    """Returns the checked tensor and ranks."""
    x = checks.floats("x", x)
    if x.ndim < 2 or 0 in x.shape:
        raise checks.wrong("x", x.shape, "a shape of two or more modes, none empty")
    if not isinstance(ranks, Sequence | np.ndarray) or len(ranks) != x.ndim:
        raise checks.wrong("ranks", ranks, f"one rank for each of {x.ndim} modes")
    ranks = tuple(ranks)
    for rank, size in zip(ranks, x.shape, strict=True):
        checks.whole("ranks", rank, 1)
        if not 1 <= rank <= size or rank**2 > math.prod(ranks):
            raise checks.wrong(
                "ranks",
                ranks,
                f"1 to the sizes {x.shape}, and no more than the product of the other ranks",
            )
    return x, ranks


def _check_factors(x: Array, factors: Sequence[Array]) -> None:
    if len(factors) != x.ndim:
        raise checks.wrong("factors", f"{len(factors)} matrices", f"one for each of {x.ndim} modes")


def _check_mode(x: Array, mode: int) -> None:
    checks.whole("mode", mode, 0, x.ndim - 1)
