"""The computations of one FedHK client, from its own samples and the model it was sent."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfedmvc.algorithms.fedhk import heat_kernel as hk
from jaxfedmvc.algorithms.fedhk.model import Centres, Scale, Sums, positive, side_by_side
from jaxfedmvc.algorithms.fedhk.settings import FedHKConfig, FedHKHyperparams
from jaxfedmvc.federation import Cohort

# v_min of (63).
_LEAST_VIEW_WEIGHT = 1e-3


class Samples(NamedTuple):
    """A client's views about the origin, zeros on padding, their coefficients, and the mask."""

    views: dict[int, Array]
    deltas: dict[int, Array]
    mask: Array


def samples_of(
    config: FedHKConfig, hyper: FedHKHyperparams, scales: dict[int, Scale], client: Cohort
) -> Samples:
    """Centres a client's views and computes delta of each, a scalar or [n, d].

    A client that was not there when the scales were sent has no samples to show.
    """
    known = jnp.isfinite(jnp.stack([scale.variance for scale in scales.values()]))
    mask = client.mask & jnp.all(known)
    views = {
        v: jnp.where(mask[:, None], x - scales[v].origin[None], 0.0)
        for v, x in client.by_view().items()
    }

    def delta(v: int, x: Array) -> Array:
        if config.hkc == "bandwidth":
            return hk.bandwidth(scales[v].variance, hyper.beta)
        if config.hkc == "minmax":
            return hk.minmax_coefficients(x, scales[v].low, scales[v].high)
        return hk.absmean_coefficients(x, jnp.zeros(x.shape[1]))

    return Samples(views, {v: delta(v, x) for v, x in views.items()}, mask)


def standardised(scales: dict[int, Scale], client: Cohort) -> Array:
    """Returns a client's views side by side, [n, D], about the mean and in total deviations.

    Zero on padding.
    """
    rows = {
        v: (x - scales[v].origin[None]) / jnp.sqrt(positive(scales[v].variance))
        for v, x in client.by_view().items()
    }
    return jnp.where(client.mask[:, None], side_by_side(rows), 0.0)


def distances(
    hyper: FedHKHyperparams, samples: Samples, centres: Centres, weights: Array
) -> tuple[dict[int, Array], dict[int, Array], Array]:
    """Computes phi and KED of held views, and D_ik = sum_h (v_h / max v)^alpha KED_ik^h [n, c].

    D is infinite for centres beyond the limit, whose memberships then are zero.
    """
    phis = {v: hk.exponents(x, centres[v], samples.deltas[v]) for v, x in samples.views.items()}
    keds = {v: hk.kernel_distance(phi) for v, phi in phis.items()}
    relevance = jnp.exp(hk.log_relevance(weights, hyper.alpha))
    combined = sum(r * ked for r, ked in zip(relevance, keds.values(), strict=True))
    if hyper.limit is not None:
        used = jnp.arange(jnp.shape(combined)[1]) < hyper.limit
        combined = jnp.where(used[None], combined, jnp.inf)
    return phis, keds, jnp.asarray(combined)


def nearest(hyper: FedHKHyperparams, samples: Samples, centres: Centres, weights: Array) -> Array:
    """Returns the centre of the least D_ik of each sample, int32 [n].

    So far from all centres that all KED round to 1, sum_h (v_h / max v)^alpha phi_ik^h tells.
    """
    phis, _, combined = distances(hyper, samples, centres, weights)
    relevance = jnp.exp(hk.log_relevance(weights, hyper.alpha))
    far = sum(r * phi for r, phi in zip(relevance, phis.values(), strict=True))
    is_least = combined <= jnp.min(combined, axis=1, keepdims=True)
    return jnp.argmin(jnp.where(is_least, far, jnp.inf), axis=1).astype(jnp.int32)


def powers_of(hyper: FedHKHyperparams, samples: Samples, combined: Array) -> Array:
    """Computes mu_ik^m of (29), zero on padding, [n, c]."""
    return hk.powered(hk.memberships(combined, hyper.fuzzifier), hyper.fuzzifier, samples.mask)


def local_sums(
    config: FedHKConfig, hyper: FedHKHyperparams, samples: Samples, centres: Centres, weights: Array
) -> Sums:
    """Makes one pass over a client's samples: (29), and the sums of (30) and (31).

    Args:
      config: Of the method.
      hyper: Of the method.
      samples: Of the client.
      centres: Of the held views.
      weights: v of the held views, [views].
    """
    phis, keds, combined = distances(hyper, samples, centres, weights)
    powers = powers_of(hyper, samples, combined)
    printed = config.centre_rule == "printed"
    sums = {
        v: hk.centre_sums(x, phis[v], samples.deltas[v], powers, printed)
        for v, x in samples.views.items()
    }
    costs = {v: hk.view_cost(ked, powers) for v, ked in keds.items()}
    return Sums(
        {v: numerator for v, (numerator, _) in sums.items()},
        {v: weight for v, (_, weight) in sums.items()},
        costs,
        jnp.sum(samples.mask).astype(jnp.float32),
        jnp.exp(hk.log_objective(jnp.stack(list(costs.values())), weights, hyper.alpha)),
    )


def local_step(
    config: FedHKConfig,
    hyper: FedHKHyperparams,
    samples: Samples,
    centres: Centres,
    weights: Array,
    anchor: Centres | None = None,
) -> tuple[Centres, Array]:
    """Makes one step: (29), then (30) or its proximal form, then (31) with the new distances.

    The weights of the held views keep their sum, and views that are left out their weight of 0:
    what the others have is not the client's to say.
    """
    _, _, combined = distances(hyper, samples, centres, weights)
    sums = local_sums(config, hyper, samples, centres, weights)
    if anchor is None:
        moved = {
            v: hk.centres_from(sums.numerators[v], sums.weights[v], centres[v]) for v in centres
        }
    else:
        moved = {
            v: hk.proximal_centres(sums.numerators[v], sums.weights[v], anchor[v], hyper.tau)
            for v in centres
        }
    powers = powers_of(hyper, samples, combined)
    _, keds, _ = distances(hyper, samples, moved, weights)
    costs = jnp.stack([hk.view_cost(ked, powers) for ked in keds.values()])
    return moved, jnp.sum(weights) * hk.view_weights(costs, hyper.alpha, weights > 0)


def gradient_step(
    config: FedHKConfig, hyper: FedHKHyperparams, samples: Samples, centres: Centres, weights: Array
) -> tuple[Centres, Array]:
    """Makes one step of (62) and (63), with J and its gradient per sample: eta is free of the size.

    dJ/da_kj = -2 v^alpha (N_kj - W_kj a_kj) and dJ/dv_h = alpha v_h^(alpha-1) C_h at the
    memberships of (29). Weights that an infinite alpha fixes stay, as does the weights' sum.
    """
    stationary = dataclasses.replace(config, centre_rule="stationary")
    sums = local_sums(stationary, hyper, samples, centres, weights)
    n = jnp.maximum(sums.n_samples, 1.0)
    fixed = jnp.isinf(hyper.alpha)
    alpha = jnp.where(fixed, 1.0, hyper.alpha)
    factors = jnp.where(fixed, 1.0, weights**alpha) / n
    moved = {}
    for v, factor in zip(centres, factors, strict=True):
        weight, delta = sums.weights[v], samples.deltas[v]
        # A scalar delta is left out of N and W, where it cancels; the gradient has it.
        scale = delta if delta.ndim == 0 else jnp.float32(1.0)
        weight = weight if weight.ndim == 2 else weight[:, None]
        pull = sums.numerators[v] - weight * centres[v]
        moved[v] = centres[v] + 2 * hyper.step_size * factor * scale * pull
    slope = alpha * weights ** (alpha - 1) * jnp.stack(list(sums.costs.values())) / n
    lowered = jnp.maximum(weights - hyper.step_size * slope, _LEAST_VIEW_WEIGHT)
    lowered = jnp.where(weights > 0, lowered, 0.0)
    share = jnp.sum(weights) / positive(jnp.sum(lowered))
    return moved, jnp.where(fixed, weights, share * lowered)


def personalised(
    config: FedHKConfig, hyper: FedHKHyperparams, samples: Samples, centres: Centres, weights: Array
) -> tuple[Centres, Array]:
    """Returns a client's own centres and view weights, made from the global ones."""
    anchor = centres if config.personal == "proximal" else None

    def step(carry: tuple[Centres, Array], _: None) -> tuple[tuple[Centres, Array], None]:
        if config.personal == "gradient":
            return gradient_step(config, hyper, samples, *carry), None
        own, local = local_step(config, hyper, samples, *carry, anchor)
        share = jnp.asarray(hyper.view_mix)
        return (own, share * weights + (1 - share) * local), None

    (own, mixed), _ = jax.lax.scan(step, (centres, weights), None, length=config.personal_steps)
    if config.personal == "gradient":
        return own, mixed
    if config.personal == "mix":  # (102)
        mix = jnp.asarray(hyper.mix)
        own = {v: mix * centres[v] + (1 - mix) * own[v] for v in own}
    return own, mixed
