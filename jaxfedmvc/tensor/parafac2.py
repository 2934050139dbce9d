"""PARAFAC2 decomposition of a stack of slices by alternating least squares, on padded data.

Slices X_k [n_k, J], k = 1..K, which may differ in their number of rows, are approximated by
X_k ~ P_k H diag(s_k) Q^T with P_k^T P_k = I_R (Kiers, ten Berge and Bro, "PARAFAC2 - Part I. A
direct fitting algorithm for the PARAFAC2 model", 1999). P_k [n_k, R] and s_k [R] belong to their
slice; H [R, R] and Q [J, R] are common to all. The fit does not depend on the order of the rows of
a slice.

A step of a sweep is one function, for ONE slice or for sums over slices, so that slices may lie at
different places. With H and Q known to all, a sweep is

    slices: P_k = projection(X_k, H, Q, s_k), Y_k = P_k^T X_k
            s_k = update_s(Y_k, H, Q, s_k)                        terms h_terms(Y_k, Q, s_k)
    sums:   H = update_h(sum of terms, Q, H)
    slices:                                                       terms q_terms(Y_k, H, s_k)
    sums:   Q = update_q(sum of terms, sum of s_k s_k^T, H, Q)
    all:    H, Q, scale = normalised(H, Q), s_k = s_k * scale

which never increases sum_k |X_k - P_k H diag(s_k) Q^T|^2. To weight this sum with c_k > 0, multiply
the terms of slice k by c_k; nothing else changes, for P_k and s_k see their own slice only.

The least-squares steps are proximal: they minimise the error plus 1e-5 times the squared change of
the unknown, in units of the fit. That is a ridge towards the previous value instead of towards 0:
it keeps the normal equations solvable in float32 where components are collinear or vanish, leaves
the fixed points where they are, and never increases the error.

Conventions of a result (`canonical`), so that equal data gives equal factors: columns of H and Q
have norm 1; each column of Q has its entry of largest magnitude positive; s_1 is not negative;
components come by decreasing sum of s_k^2. Rows of padding are zero in P_k; their data is never
read. All functions are pure, jit- and vmap-able, with the rank and numbers of sweeps static.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc import checks, linalg
from jaxfedmvc.precision import in_32_bits
from jaxfedmvc.tensor.tucker import largest_entry_signs, polar, relative_error

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

# Weight of the proximal term, for Gram matrices of unit diagonal. Near 1e-7, what these lose to
# rounding, sweeps with more components than the data has diverge.
_RIDGE = 1e-5


class Parafac2(NamedTuple):
    """A stack of slices in PARAFAC2 form.

    Attributes:
        projections: P_k, orthonormal columns, zero rows of padding, float32 [K, n_max, R].
        h: Common cross-product factor H, float32 [R, R].
        q: Common factor of the columns Q, float32 [J, R].
        s: Scales s_k of the slices, float32 [K, R].
    """

    projections: Array
    h: Array
    q: Array
    s: Array


_State = tuple[Parafac2, Array, Array, Array]  # form, error, previous error, number of sweeps


class Parafac2Result(NamedTuple):
    """Result of `parafac2`.

    Attributes:
        parafac2: The decomposition.
        error: Its distance to the slices over their norm, scalar; 0 for slices of zeros.
        n_sweeps: Number of sweeps made from the best start, scalar int32.
    """

    parafac2: Parafac2
    error: Array
    n_sweeps: Array


@in_32_bits
def parafac2(
    key: Array | None,
    slices: ArrayLike,
    rank: int,
    *,
    where: ArrayLike | None = None,
    max_sweeps: int = 200,
    tol: ArrayLike = 1e-6,
    n_init: int = 1,
    n_inner: int = 5,
) -> Parafac2Result:
    """Fits PARAFAC2 by alternating least squares (Kiers et al., 1999), the best of some starts.

    The first start has the leading eigenvectors of sum_k X_k^T X_k for Q, and needs no key; the
    others have random orthonormal Q. All have H = I and s = 1, for slices whose largest entry is
    between a half and 1: they are divided by a power of two first, since products of two scales
    overflow where entries pass 1e9 or so. Slices of zeros give an error of 0.

    Args:
        key: PRNG key of the random starts; unused, and may be None, if `n_init` is 1.
        slices: X_k, float32 [K, n_max, J].
        rank: R, static.
        where: Real rows, bool [K, n_max], at least R of each slice; all if None.
        max_sweeps: Largest number of sweeps per start, static.
        tol: The sweeps end when the relative error changed by no more than this; may be traced.
        n_init: Number of starts, static. They run side by side.
        n_inner: Number of times that a sweep updates s, H and Q for one P, static. P costs most;
            with 5 the sweeps are a third of those with 1.

    Returns:
        The result of the start with the least error, with the module's conventions.

    Raises:
        ValueError: `slices` or `where` has the wrong shape, `rank` is not from 1 to min(n_max, J),
            `where` is concrete and a slice has fewer than `rank` rows, `max_sweeps`, `n_init` or
            `n_inner` is below 1, `tol` is negative or NaN, or `key` is None though `n_init` is
            above 1.
    """
    slices, where = _check(slices, where, rank)
    for name, size in (("max_sweeps", max_sweeps), ("n_init", n_init), ("n_inner", n_inner)):
        checks.whole(name, size, 1)
    checks.number("tol", tol, checks.NOT_NEGATIVE)
    if n_init > 1 and key is None:
        raise checks.wrong("key", key, "a PRNG key, or None if n_init is 1")
    return _best(key, slices, where, tol, rank, max_sweeps, n_init, n_inner)


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7), inline=True)
def _best(
    key: Array | None,
    slices: Array,
    where: Array,
    tol: ArrayLike,
    rank: int,
    max_sweeps: int,
    n_init: int,
    n_inner: int,
) -> Parafac2Result:
    n_slices, n_rows, n_columns = slices.shape
    exponent = jnp.frexp(jnp.max(jnp.abs(slices)))[1]
    unit = jnp.ldexp(jnp.float32(1), jnp.clip(exponent, -126, 126))
    slices = slices / unit
    gram = _einsum("knj,kni->ji", slices, slices)
    starts = linalg.eigh(gram)[1][None, :, : -rank - 1 : -1]
    if key is not None and n_init > 1:
        drawn = jax.random.normal(key, (n_init - 1, n_columns, rank))
        starts = jnp.concatenate([starts, jax.vmap(polar)(drawn)])

    def unfinished(state: _State) -> Array:
        _, error, previous, n_sweeps = state
        return (n_sweeps < max_sweeps) & (jnp.abs(previous - error) > tol)

    def update(state: _State) -> _State:
        old, error, _, n_sweeps = state
        new = sweep(slices, old, where=where, n_inner=n_inner)
        return new, relative_error(slices, reconstruct(new)), error, n_sweeps + 1

    def run(q: Array) -> Parafac2Result:
        blank = jnp.zeros((n_slices, n_rows, rank))  # the first sweep starts with P
        start = Parafac2(blank, jnp.eye(rank), q, jnp.ones((n_slices, rank)))
        no_error = jnp.float32(jnp.inf)
        state = start, no_error, -no_error, jnp.int32(0)
        last, error, _, n_sweeps = lax.while_loop(unfinished, update, state)
        return Parafac2Result(canonical(last), error, n_sweeps)

    runs = jax.vmap(run)(starts)
    best = jnp.argmin(runs.error)
    form, error, n_sweeps = jax.tree.map(lambda leaf: leaf[best], runs)
    return Parafac2Result(form._replace(s=form.s * unit), error, n_sweeps)


@in_32_bits
def reconstruct(parafac2: Parafac2) -> Array:
    """Returns the slices P_k H diag(s_k) Q^T, float32 [K, n_max, J]; zero rows of padding."""
    projections, h, q, s = parafac2
    return _einsum("knr,krj->knj", projections, _einsum("rc,kc,jc->krj", h, s, q))


@in_32_bits
def from_slice(x: ArrayLike, rank: int, *, where: ArrayLike | None = None) -> Parafac2:
    """Returns the form of a single slice (K = 1), from its truncated SVD.

    P = U, H = I, s = sigma and Q = V. Exact where the slice's rank is at most `rank`.

    Args:
        x: The slice, float32 [n_max, J].
        rank: R, static.
        where: Real rows, bool [n_max], at least R; all rows if None.

    Returns:
        The form, in the module's conventions; float32 [1, n_max, R], [R, R], [J, R] and [1, R].

    Raises:
        ValueError: `x` or `where` has the wrong shape, `rank` is not from 1 to min(n_max, J), or
            `where` is concrete and has fewer than `rank` rows.
    """
    x = checks.floats("x", x)
    if x.ndim != 2 or 0 in x.shape:
        raise checks.wrong("x", x.shape, "a shape [n, J], neither of them 0")
    slices, mask = _check(x[None], checks.mask(where, x.shape[:1])[None], rank)
    _, scales, right = linalg.svd(slices[0])
    h, q, scales = jnp.eye(rank), right[:rank].T, scales[:rank]
    # Not the left singular vectors: where sigma vanishes, theirs may have entries in the padding.
    p = projection(slices[0], h, q, jnp.ones(rank), where=mask[0])
    return canonical(Parafac2(p[None], h, q, scales[None]))


# --- The steps of a sweep -------------------------------------------------------------------------


def sweep(
    slices: ArrayLike,
    parafac2: Parafac2,
    *,
    where: ArrayLike | None = None,
    n_inner: int = 1,
) -> Parafac2:
    """Makes one sweep of the steps in the module's docstring.

    Args:
        slices: X_k, float32 [K, n_max, J], with zeros in rows of padding.
        parafac2: The form to improve; its P is not used.
        where: Real rows, bool [K, n_max]; all rows if None.
        n_inner: Number of times that s, H and Q are updated for one P, static.

    Returns:
        The new form; its columns have norm 1.
    """
    _, h, q, s = parafac2
    slices = jnp.asarray(slices, jnp.float32)
    where = checks.mask(where, slices.shape[:2])
    add = functools.partial(jnp.sum, axis=0)
    p = jax.vmap(functools.partial(projection, h=h, q=q))(slices, s_k=s, where=where)
    y = _einsum("knr,knj->krj", p, slices)

    def inner(_: Array, factors: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        h, q, s = factors
        # Scales first: those of a start are no more than a guess, and would lead H and Q astray.
        s = jax.vmap(update_s, (0, None, None, 0))(y, h, q, s)
        products, squares = map(add, jax.vmap(h_terms, (0, None, 0))(y, q, s))
        h = update_h((products, squares), q, h)
        q = update_q(add(jax.vmap(q_terms, (0, None, 0))(y, h, s)), squares, h, q)
        h, q, scale = normalised(h, q)
        return h, q, s * scale[None]

    return Parafac2(p, *lax.fori_loop(0, n_inner, inner, (h, q, s)))


def projection(
    x_k: Array, h: Array, q: Array, s_k: Array, *, where: ArrayLike | None = None
) -> Array:
    """Finds the P_k [n_max, R] with orthonormal columns of least |X_k - P_k H diag(s_k) Q^T|.

    The polar factor of A = X_k Q diag(s_k) H^T (Kiers et al., 1999, eq. 6). Where A lacks rank the
    rest of P_k is free. A matrix of full rank on the real rows, 1e-6 as large as A, is added, so
    that this rest lies in the real rows and does not depend on the padding.

    From X_k [n_max, J] with zeros in rows of padding, H [R, R], Q [J, R], the slice's scales s_k
    [R] and its real rows `where`, bool [n_max], at least R; all rows if None.
    """
    where = checks.mask(where, x_k.shape[:1])
    order = jnp.argsort(~where)  # real rows first: zeros below them stay zeros in an SVD
    real = where[order][:, None]
    product = _einsum("nj,jc,c,rc->nr", x_k, q, s_k, h)[order]
    # sin((r + 1) t) = sin(t) U_r(cos t) with Chebyshev polynomials: any R rows are independent.
    angles = jnp.arange(1.0, len(x_k) + 1)[:, None] * jnp.arange(1.0, len(s_k) + 1)[None]
    spread = jnp.where(real, jnp.sin(angles), 0.0) / jnp.sqrt(jnp.maximum(real.sum(), 1))
    size = jnp.sqrt(jnp.sum(jnp.square(product)))
    nearest = polar(product + jnp.where(size > 0, 1e-6 * size, 1.0) * spread)
    return jnp.where(real, nearest, 0.0)[jnp.argsort(order)]


def h_terms(y_k: Array, q: Array, s_k: Array) -> tuple[Array, Array]:
    """Computes a slice's terms of `update_h`: Y_k Q diag(s_k) and s_k s_k^T, both [R, R].

    From Y_k = P_k^T X_k [R, J], Q [J, R] and the slice's scales s_k [R].
    """
    return _einsum("rj,jc,c->rc", y_k, q, s_k), s_k[:, None] * s_k[None]


def update_h(sum_terms: tuple[Array, Array], q: Array, h: Array) -> Array:
    """Computes H = (sum_k Y_k Q diag(s_k)) [(Q^T Q) o (sum_k s_k s_k^T)]^+ [R, R], proximal.

    From the sums over the slices of what `h_terms` returns, Q [J, R] and the previous H [R, R].
    """
    products, squares = sum_terms
    return _proximal(_gram(q) * squares, products, h)


def q_terms(y_k: Array, h: Array, s_k: Array) -> Array:
    """Computes a slice's term of `update_q`: Y_k^T H diag(s_k), float32 [J, R].

    From Y_k = P_k^T X_k [R, J], the new H [R, R] and the slice's scales s_k [R].
    """
    return _einsum("rj,rc,c->jc", y_k, h, s_k)


def update_q(sum_q_terms: Array, sum_ss: Array, h: Array, q: Array) -> Array:
    """Computes Q = (sum_k Y_k^T H diag(s_k)) [(H^T H) o (sum_k s_k s_k^T)]^+ [J, R], proximal.

    From the sum over the slices of what `q_terms` returns [J, R], the sum of s_k s_k^T [R, R] that
    `update_h` had, the new H [R, R] and the previous Q [J, R].
    """
    return _proximal(_gram(h) * sum_ss, sum_q_terms, q)


def update_s(y_k: Array, h: Array, q: Array, s_k: Array) -> Array:
    """Computes s_k = [(H^T H) o (Q^T Q)]^+ diag(H^T Y_k Q), float32 [R], proximal.

    From Y_k = P_k^T X_k [R, J], H [R, R], Q [J, R] and the slice's previous scales s_k [R].
    """
    products = _einsum("rc,rj,jc->c", h, y_k, q)
    return _proximal(_gram(h) * _gram(q), products[None], s_k[None])[0]


def normalised(h: Array, q: Array) -> tuple[Array, Array, Array]:
    """Returns H and Q with columns of norm 1, and the factor [R] that every s_k is multiplied by.

    Columns of zeros stay zero.
    """
    norms = [jnp.sqrt(jnp.sum(jnp.square(factor), axis=0)) for factor in (h, q)]
    h_norm, q_norm = (jnp.where(norm > 0, norm, 1.0) for norm in norms)
    return h / h_norm[None], q / q_norm[None], h_norm * q_norm


@in_32_bits
def canonical(parafac2: Parafac2) -> Parafac2:
    """Brings a form to the scales, signs and order of the module's docstring; the slices stay."""
    h, q, scale = normalised(parafac2.h, parafac2.q)
    q_signs = largest_entry_signs(q)
    s = parafac2.s * scale[None] * q_signs
    s_signs = jnp.where(s[:1] < 0, -1.0, 1.0)
    order = jnp.argsort(-jnp.sum(jnp.square(s), axis=0))
    h, q, s = ((h * s_signs)[:, order], (q * q_signs)[:, order], (s * s_signs)[:, order])
    return Parafac2(parafac2.projections, h, q, s)


def _gram(matrix: Array) -> Array:
    return _einsum("ij,ik->jk", matrix, matrix)


def _proximal(gram: Array, products: Array, old: Array) -> Array:
    """Solves for rows x of least x G x^T - 2 x.b + ridge |x - x_old|^2.

    The ridge is in units of diag(G). From G [r, r], positive semi-definite, and the rows b [m, r]
    and x_old [m, r].
    """
    diagonal = jnp.diagonal(gram)
    unit = jnp.where(diagonal > 0, lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1.0)), 1.0)
    damped = gram * unit[:, None] * unit[None] + _RIDGE * jnp.eye(len(gram))
    residual = (products - _einsum("mi,ij->mj", old, gram)) * unit[None]
    return old + linalg.solve(damped, residual.T).T * unit[None]


def _check(slices: ArrayLike, where: ArrayLike | None, rank: int) -> tuple[Array, Array]:
    """Returns checked slices with zeros in rows of padding, and `where` as an array."""
    slices = checks.floats("slices", slices)
    if slices.ndim != 3 or 0 in slices.shape:
        raise checks.wrong("slices", slices.shape, "a shape [K, n, J], none of them 0")
    n_rows, n_columns = slices.shape[1:]
    checks.whole("rank", rank, 1, min(n_rows, n_columns))
    where = checks.mask(where, slices.shape[:2])
    if not isinstance(where, jax.core.Tracer) and (least := int(where.sum(axis=1).min())) < rank:
        raise checks.wrong(
            "where", least, f"{rank} rows of each slice or more, as many as the rank"
        )
    return jnp.where(where[:, :, None], slices, 0.0), where
