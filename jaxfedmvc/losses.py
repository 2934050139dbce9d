"""Losses of deep multi-view clustering on masked rows.

Every loss takes `mask`, bool [rows]; False rows count nowhere: not in a mean, not as anchors, not
as negatives. Their values must be finite all the same, as padding is, or gradients would not be.
Without any real row a loss is 0. Features of other types, such as bfloat16, become float32 first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfedmvc.precision import in_32_bits


@in_32_bits
def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mean of `values` [rows] over the real rows."""
    values = jnp.asarray(values, jnp.float32)
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


@in_32_bits
def l2_normalize(x: jax.Array) -> jax.Array:
    """Scales rows of `x` [..., d] to length 1; a zero row stays zero, with a finite gradient.

    For features of a network: 1e-12 is added to the squared length, so that rows much shorter than
    1e-5 stay short.
    """
    x = jnp.asarray(x, jnp.float32)  # in which 1e-12 is not zero
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12)


@in_32_bits
def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes each row's cosine of `a` and `b`, [rows, d] -> [rows]; FMCSC's eq. (4)."""
    return jnp.sum(l2_normalize(a) * l2_normalize(b), axis=-1)


@in_32_bits
def mean_squared_error(x: jax.Array, target: jax.Array, mask: jax.Array) -> jax.Array:
    """Computes the mean squared difference over real rows and features, [rows, d] -> scalar.

    FMCSC's eq. (1), (2) and (6) print sums over features; the mean keeps the term comparable to a
    contrastive loss, whatever the width of the view.
    """
    x, target = jnp.asarray(x, jnp.float32), jnp.asarray(target, jnp.float32)
    return masked_mean(jnp.mean((x - target) ** 2, axis=-1), mask)


@in_32_bits
def log_sum_exp(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Computes log-sum-exp of the allowed entries of the last axis; 0 where none is allowed."""
    logits, some = jnp.asarray(logits, jnp.float32), jnp.any(allowed, axis=-1)
    top = jax.lax.stop_gradient(jnp.max(jnp.where(allowed, logits, -jnp.inf), axis=-1))
    top = jnp.where(some, top, 0.0)
    # Masked before the exponential: an excluded logit must not overflow into a NaN gradient.
    terms = jnp.where(allowed, jnp.exp(jnp.where(allowed, logits - top[..., None], 0.0)), 0.0)
    total = jnp.sum(terms, axis=-1)
    return jnp.where(some, jnp.log(jnp.where(some, total, 1.0)) + top, 0.0)


@in_32_bits
def feature_contrast(
    h: jax.Array, h_view: jax.Array, mask: jax.Array, tau: jax.Array | float
) -> jax.Array:
    """Computes one view's term of FMCSC's eq. (5), as printed.

    `-1/n sum_i [ s_ii - log sum_{j != i} exp(s_ij) ]` with `s_ij = cos(h_i, h_view_j) / tau`: the
    positive pair is not in the denominator. A row without negatives counts as 0.

    Args:
      h: [rows, d] common semantics H.
      h_view: [rows, d] high-level features H^v of the view.
      mask: bool [rows].
      tau: Temperature tau_m.
    """
    similarity = l2_normalize(h) @ l2_normalize(h_view).T / tau
    negatives = mask[None, :] & mask[:, None] & ~jnp.eye(mask.shape[0], dtype=bool)
    per_row = log_sum_exp(similarity, negatives) - jnp.diagonal(similarity)
    return masked_mean(jnp.where(jnp.any(negatives, axis=-1), per_row, 0.0), mask)


@in_32_bits
def ntxent(h: jax.Array, h_view: jax.Array, mask: jax.Array, tau: jax.Array | float) -> jax.Array:
    """Computes symmetric NT-Xent over the 2n rows [h_view; h], as FMCSC's published code does.

    Similarities are dot products divided by `tau`; all other rows of both halves are in an anchor's
    denominator, the positive too. The mean is over the 2n anchors. In FMCSC `h` has unit rows and
    `h_view` has not.

    Args:
      h: [rows, d].
      h_view: [rows, d].
      mask: bool [rows].
      tau: Temperature tau_m.
    """
    n = mask.shape[0]
    h, h_view = jnp.asarray(h, jnp.float32), jnp.asarray(h_view, jnp.float32)
    both = jnp.concatenate([h_view, h])
    both_mask = jnp.concatenate([mask, mask])
    similarity = both @ both.T / tau
    others = both_mask[None, :] & both_mask[:, None] & ~jnp.eye(2 * n, dtype=bool)
    positive = jnp.sum(h * h_view, axis=-1) / tau
    per_row = log_sum_exp(similarity, others) - jnp.concatenate([positive, positive])
    return masked_mean(per_row, both_mask)


@in_32_bits
def model_contrast(
    h: jax.Array, h_global: jax.Array, z: jax.Array, mask: jax.Array, tau: jax.Array | float
) -> jax.Array:
    """Computes FMCSC's eq. (7): towards the global model's H, away from the low-level feature.

    `-1/n sum_i log( e^{a_i} / (e^{a_i} + e^{b_i}) )`, `a = cos(h, h_global)/tau`,
    `b = cos(h, z)/tau`, which is the mean softplus of b - a.

    Args:
      h: [rows, d] output of the local model.
      h_global: [rows, d] output of the received global model; no gradient passes.
      z: [rows, d] low-level feature of the local model.
      mask: bool [rows].
      tau: Temperature tau_p.
    """
    positive = cosine(h, jax.lax.stop_gradient(h_global)) / tau
    negative = cosine(h, z) / tau
    return masked_mean(jax.nn.softplus(negative - positive), mask)


@in_32_bits
def mutual_information(a: jax.Array, b: jax.Array, mask: jax.Array, n_bins: int = 10) -> jax.Array:
    """Estimates the mutual information, in bits, of the paired entries of two feature matrices.

    It is that of the joint histogram with `n_bins` x `n_bins` equal cells over the range of each
    matrix, which FMCSC weighs models by (section 3.4); 0 where a matrix is constant.

    Args:
      a: [rows, d].
      b: [rows, d].
      mask: bool [rows].
      n_bins: Static number of bins of each axis.
    """
    a, b = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
    selected = jnp.broadcast_to(mask[:, None], a.shape).ravel()

    def bins(x: jax.Array) -> jax.Array:
        x = x.ravel()
        low = jnp.min(jnp.where(selected, x, jnp.inf))
        high = jnp.max(jnp.where(selected, x, -jnp.inf))
        span = jnp.where(high > low, high - low, 1.0)
        place = jnp.where(selected, (x - low) / span * n_bins, 0.0)
        return jnp.clip(place.astype(jnp.int32), 0, n_bins - 1)

    one_hot_a = jax.nn.one_hot(bins(a), n_bins) * selected[:, None]
    joint = one_hot_a.T @ jax.nn.one_hot(bins(b), n_bins)
    joint = joint / jnp.maximum(jnp.sum(joint), 1.0)
    outer = jnp.sum(joint, axis=1, keepdims=True) * jnp.sum(joint, axis=0, keepdims=True)
    ratio = jnp.where(joint > 0, joint / jnp.where(outer > 0, outer, 1.0), 1.0)
    return jnp.sum(joint * jnp.log2(ratio))
