"""Fuzzy clustering of several views by heat-kernel distances: the equations of E-FKMVC.

    J = sum_h v_h^alpha sum_i sum_k mu_ik^m KED_ik^h,   KED_ik^h = 1 - exp(-phi_ik^h)

over memberships mu that all views share, one weight v_h for each view, and centres a_k^h. Every
function is one equation, for one client and one view where nothing else is said; rows outside
`where` are padding and count nowhere.

Equations are numbered as in K. P. Sinaga, "Personalized federated heat-kernel enhanced multi-view
clustering via advanced tensor decomposition techniques", arXiv 2509.16101, 2025. Where the printed
form is not sound, the docstring says what differs and why.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc.precision import matmul

# Least distance, as a share of the row's largest: a sample on a centre belongs to it alone.
_FLOOR = 1e-7
_TINY = 1e-30
# A cluster with less than this share of the mean weight cannot be told from an empty one.
EMPTY = 1e-10


def bandwidth(variance: ArrayLike, beta: ArrayLike = 1.0) -> Array:
    """Computes one coefficient for a view, delta = beta / (2 total variance); 0 if nothing varies.

    It makes phi about beta for a random pair of samples, whatever the number and the scale of the
    features. It stands for (23) and (24), whose coefficient of a feature depends on the sample: the
    same displacement then costs nothing at the feature's minimum, or at its mean.

    Args:
      variance: Sum over the view's features of their variances.
      beta: Scale, traced.
    """
    variance = jnp.asarray(variance, jnp.float32)
    return jnp.where(variance > 0, beta / (2 * jnp.where(variance > 0, variance, 1.0)), 0.0)


def minmax_coefficients(x: Array, low: Array, high: Array) -> Array:
    """Computes (23) for one view, divided by its number of features: delta_ij [n, d].

    Undivided, phi grows with d, all distances become 1 and nothing is learned. Zero for a constant
    feature, where the authors' code has 0.5: there is nothing to tell samples apart by. Values
    outside the range, as clients that took no part may have, count as its ends.

    Args:
      x: float32 [n, d].
      low: Least value of each feature over all clients, [d].
      high: Greatest value, [d].
    """
    span = high - low
    share = jnp.clip((x - low[None]) / jnp.where(span > 0, span, 1.0)[None], 0.0, 1.0)
    return jnp.where(span[None] > 0, share, 0.0) / x.shape[1]


def absmean_coefficients(x: Array, mean: Array) -> Array:
    """Computes the absolute value of (24) for one view, divided by the number of features: [n, d].

    Signed, as printed, it makes phi negative and J unbounded below.

    Args:
      x: float32 [n, d].
      mean: Of each feature over all clients, [d].
    """
    return jnp.abs(x - mean[None]) / x.shape[1]


def exponents(x: Array, centres: Array, delta: ArrayLike) -> Array:
    """Computes phi of (4) for one view: phi_ik = sum_j delta_ij (x_ij - a_kj)^2, float32 [n, c].

    Expanded into matrix products; `x` should lie around the origin, where that is accurate.

    Args:
      x: [n, d].
      centres: [c, d].
      delta: Scalar or [n, d], not negative.
    """
    delta = jnp.asarray(delta)
    if x.shape[1] == 1:  # nothing to multiply, and expanded it would be less accurate
        return delta * jnp.square(x - centres.T)
    if delta.ndim == 0:
        squares = jnp.sum(x * x, axis=1)[:, None] + jnp.sum(centres * centres, axis=1)[None]
        return jnp.maximum(delta * (squares - 2 * matmul(x, centres.T)), 0.0)
    own = jnp.sum(delta * x * x, axis=1)[:, None]
    theirs = matmul(delta, (centres * centres).T)
    return jnp.maximum(own - 2 * matmul(delta * x, centres.T) + theirs, 0.0)


def kernel_distance(phi: Array) -> Array:
    """Computes (4), (22): KED = 1 - exp(-phi) in [0, 1), one exponential for each view.

    Summing the views inside the exponent would give them all the same cost, and equal weights.
    """
    return -jnp.expm1(-phi)


def log_relevance(view_weights: Array, alpha: ArrayLike) -> Array:
    """Computes log (v_h / max v)^alpha, [s]: the weight of each view relative to the heaviest.

    v_h^alpha itself underflows; its scale cancels in memberships and centres. Zeros for an infinite
    alpha, which stands for views of equal weight. A view of weight 0 has next to none beside others
    and all of it alone: who holds no other view still belongs to some cluster.
    """
    logs = jnp.log(jnp.maximum(view_weights, _TINY))
    logs = jnp.where(jnp.isinf(alpha) & (view_weights > 0), 0.0, logs)
    finite = jnp.where(jnp.isinf(alpha), 1.0, alpha)
    return finite * (logs - jnp.max(logs, keepdims=True))


def memberships(distances: Array, fuzzifier: ArrayLike) -> Array:
    """Computes (29) = (39): mu_ik = D_ik^(-1/(m-1)) / sum_k' D_ik'^(-1/(m-1)), by a softmax.

    A sample that lies on a centre belongs to it, on several to them equally. The floor under D is
    a share of the row's own largest distance, so that it depends on no other sample.

    Args:
      distances: D_ik = sum_h v_h^alpha KED_ik^h up to a common factor, [n, c]; inf for centres that
        nothing may belong to.
      fuzzifier: m > 1, traced.
    """
    finite = jnp.where(jnp.isposinf(distances), 0.0, distances)
    floor = jnp.maximum(_FLOOR * jnp.max(finite, axis=1, keepdims=True), _TINY)
    return jax.nn.softmax(-jnp.log(jnp.maximum(distances, floor)) / (fuzzifier - 1), axis=1)


def powered(memberships: Array, fuzzifier: ArrayLike, where: Array) -> Array:
    """Returns mu_ik^m on real rows and zero on padding, [n, c]."""
    return jnp.where(where[:, None], memberships**fuzzifier, 0.0)


def centre_sums(
    x: Array, phi: Array, delta: ArrayLike, powers: Array, printed: bool = False
) -> tuple[Array, Array]:
    """Computes numerators and denominators of the centres, a_kj = N_kj / W_kj.

    With omega_ikj = mu_ik^m delta_ij exp(-phi_ik), N_kj = sum_i omega_ikj x_ij and W_kj their sum.
    As 1 - exp(-phi) is concave in phi, a = N / W minimises a quadratic function that touches J at
    the present centres and lies above it elsewhere: J never rises. (30) = (51) as printed drops
    delta from omega although it depends on i, and J may rise. With a scalar delta both agree.
    v_h^alpha cancels.

    Args:
      x: [n, d].
      phi: [n, c].
      delta: Scalar or [n, d].
      powers: mu_ik^m, zero on padding, [n, c].
      printed: Whether (30) is followed to the letter.

    Returns:
      N [c, d], and W: [c, d] where delta differs from row to row and counts, else [c].
    """
    # exp(-phi) from the same exponential as KED: half of the work. It is zero beyond phi = 17,
    # where a sample moves nothing.
    weights = powers * (1 + jnp.expm1(-phi))
    delta = jnp.asarray(delta)
    if printed or delta.ndim == 0:
        return matmul(weights.T, x), jnp.sum(weights, axis=0)
    return matmul(weights.T, delta * x), matmul(weights.T, delta)


def centres_from(numerators: Array, weights: Array, previous: Array) -> Array:
    """Returns N / W [c, d]; a coordinate without weight keeps its previous value."""
    weights = jnp.broadcast_to(weights if weights.ndim == 2 else weights[:, None], previous.shape)
    empty = weights <= jnp.maximum(EMPTY * jnp.mean(weights), 0.0)
    return jnp.where(empty, previous, numerators / jnp.where(empty, 1.0, weights))


def view_cost(distances: Array, powers: Array) -> Array:
    """Computes C_h = sum_i sum_k mu_ik^m KED_ik^h of one view, a scalar."""
    return jnp.sum(powers * distances)


def view_weights(costs: Array, alpha: ArrayLike, where: Array | None = None) -> Array:
    """Computes (31) = (59): v_h = C_h^(-1/(alpha-1)) / sum_h' C_h'^(-1/(alpha-1)), [s].

    alpha > 1: near 1 the cheapest view takes all, towards infinity v becomes equal (the paper has
    it the other way round). What counts is v_h^alpha, though, which tends to 1 / C_h; an infinite
    alpha stands for views of equal weight, which no finite one gives. Cheap means compact, which
    favours views of few features. A view that does not vary costs nothing and tells nothing: it
    gets next to no weight, not all.

    Args:
      costs: C_h, [s].
      alpha: Exponent, traced.
      where: Views that count, bool [s], whose weights stay above 0; the others' are 0. All if None.
    """
    costs = jnp.where(costs > _TINY, costs, 1 / _TINY)
    logits = -jnp.log(costs) / (alpha - 1)
    if where is None:
        return jax.nn.softmax(logits)
    weights = jax.nn.softmax(jnp.where(where, logits, -jnp.inf))
    # Never zero: a view of weight 0 is left out for good, and this one may become cheap again.
    return jnp.where(where, jnp.maximum(weights, _TINY), 0.0)


def log_objective(costs: Array, view_weights: Array, alpha: ArrayLike) -> Array:
    """Computes log J of (25) from the view costs [s]; with an infinite alpha J = sum_h C_h.

    Views of weight 0 add nothing to it.
    """
    logs = jnp.log(jnp.maximum(view_weights, _TINY))
    logs = jnp.where(jnp.isinf(alpha) & (view_weights > 0), 0.0, logs)
    powers = jnp.where(jnp.isinf(alpha), 1.0, alpha) * logs
    return jax.nn.logsumexp(powers + jnp.log(jnp.maximum(costs, _TINY)))


def proximal_centres(numerators: Array, weights: Array, anchor: Array, tau: ArrayLike) -> Array:
    """Minimises the quadratic bound of J plus gamma |a - anchor|^2, gamma = tau mean(W); [c, d].

    The block step of (93) in closed form: a cluster of much weight takes its own mean, one of none
    the anchor. tau = 0 keeps no anchor but where there is no weight, infinity nothing else.

    Args:
      numerators: N [c, d].
      weights: W [c] or [c, d].
      anchor: The global centres [c, d].
      tau: Penalty relative to the client's mean weight, not negative, traced.
    """
    weights = jnp.broadcast_to(weights if weights.ndim == 2 else weights[:, None], anchor.shape)
    mean = jnp.mean(weights)
    own = centres_from(numerators, weights, anchor)
    share = weights / jnp.where(mean > 0, weights + tau * mean, 1.0)
    return jnp.where((mean > 0) & (share > 0), share * own + (1 - share) * anchor, anchor)
