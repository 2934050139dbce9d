"""FMCSC's losses, eq. (1) to (8), and the weights of its models, section 3.4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import losses, nn
from jaxfedmvc.algorithms.fmcsc.networks import (
    Features,
    Kind,
    Model,
    Views,
    by_place,
    features,
    side_by_side,
)
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig, SquaredError

# --- Losses, eq. (1) to (8) -----------------------------------------------------------------------


def squared_error(
    x: jax.Array, target: jax.Array, mask: jax.Array, form: SquaredError = "mean"
) -> jax.Array:
    """Computes the squared error of real rows, [rows, d] -> scalar, averaged over them.

    Over features it is a mean, or, as eq. (1) and (2) are printed, a sum.
    """
    error = losses.mean_squared_error(x, target, mask)
    return error if form == "mean" else error * x.shape[-1]


def reconstruction_loss(
    reconstruction: Mapping[int, jax.Array],
    views: Views,
    mask: jax.Array,
    form: SquaredError = "mean",
) -> jax.Array:
    """Computes eq. (1) and (2): the squared error, added up over views."""
    return sum(
        (squared_error(r, views[v], mask, form) for v, r in reconstruction.items()),
        start=jnp.zeros(()),
    )


def view_contrasts(
    config: FMCSCConfig, tau_m: jax.Array | float, out: Features, mask: jax.Array
) -> list[jax.Array]:
    """Computes eq. (5) for each view: H against H^v of the same rows."""
    contrast = losses.feature_contrast if config.contrast == "paper" else losses.ntxent
    h_views = jnp.stack(list(out.h_views.values()))
    return list(jax.vmap(lambda h_view: contrast(out.h, h_view, mask, tau_m))(h_views))


def partial_contrast(
    tau_p: jax.Array | float, out: Features, h_global: jax.Array, mask: jax.Array
) -> jax.Array:
    """Computes eq. (7), averaged over the client's views."""
    contrast = [losses.model_contrast(out.h, h_global, z, mask, tau_p) for z in out.z.values()]
    return sum(contrast, start=jnp.zeros(())) / len(contrast)


def multi_view_loss(
    config: FMCSCConfig,
    tau_m: jax.Array | float,
    model: Model,
    views: Views,
    mask: jax.Array,
    seen: Views | None = None,
) -> jax.Array:
    """Computes eq. (8) on a client with all views: eq. (1) plus eq. (5).

    Args:
      config: The form of the contrast, and of the error of reconstruction.
      tau_m: Temperature.
      model: Parameters of a model for all views.
      views: [rows, D_v] for every view; what is to be reconstructed.
      mask: bool [rows].
      seen: The model's input, where it is not the views themselves.
    """
    out = features(model, views if seen is None else seen)
    reconstruction = reconstruction_loss(out.reconstruction, views, mask, config.squared_error)
    return sum(view_contrasts(config, tau_m, out, mask), start=reconstruction)


def partial_view_loss(
    config: FMCSCConfig,
    tau_p: jax.Array | float,
    model: Model,
    views: Views,
    h_global: jax.Array,
    mask: jax.Array,
) -> jax.Array:
    """Computes eq. (8) on a partial client: eq. (2) plus eq. (7)."""
    out = features(model, views)
    contrast = partial_contrast(tau_p, out, h_global, mask)
    return reconstruction_loss(out.reconstruction, views, mask, config.squared_error) + contrast


def distillation_loss(
    config: FMCSCConfig,
    models: Mapping[Kind, Model],
    views: Views,
    h_joint: jax.Array,
    mask: jax.Array,
    seen: Views | None = None,
) -> jax.Array:
    """Computes eq. (6): H of every partial model against the client's joint H, a constant.

    Reconstruction is added, so that decoders keep fitting their encoders. The arguments are those
    of `multi_view_loss`, and `h_joint` [rows, d].
    """
    kinds = {name: tuple(sorted(model.autoencoders)) for name, model in models.items()}
    placed = {name: by_place(model) for name, model in models.items()}
    return distillation_of(config, kinds, nn.alike(placed, stack=False), views, h_joint, mask, seen)


def distillation_of(
    config: FMCSCConfig,
    kinds: Mapping[Any, Kind],
    models: nn.Alike,
    views: Views,
    h_joint: jax.Array,
    mask: jax.Array,
    seen: Views | None = None,
) -> jax.Array:
    """Computes `distillation_loss` of models `by_place`, whose kinds are told by name."""
    form = config.squared_error

    def of_model(model: Model, views: Views, seen: Views) -> jax.Array:
        out = features(model, seen)
        loss = squared_error(out.h, h_joint, mask, form)
        if form == "sum":  # eq. (6) is printed as a sum over rows, too
            loss *= jnp.sum(mask)
        return loss + reconstruction_loss(out.reconstruction, views, mask, form)

    def placed(views: Views) -> dict[Any, Views]:
        return {name: {i: views[v] for i, v in enumerate(kind)} for name, kind in kinds.items()}

    found = nn.each(of_model, models, placed(views), placed(views if seen is None else seen))
    return sum(found.values(), start=jnp.zeros(()))


def hide_features(key: jax.Array, views: Views, rate: jax.Array | float) -> Views:
    """Sets this share of the entries of [rows, D_v] to zero, each drawn independently.

    What is drawn for a row depends on its place and not on the number of rows.
    """
    # One draw for all views side by side, of which each row has the same number.
    ids, rows = sorted(views), side_by_side(views)
    kept = rows * jax.random.bernoulli(key, 1 - rate, rows.shape)
    ends = np.cumsum([views[v].shape[1] for v in ids])
    return dict(zip(ids, jnp.split(kept, ends[:-1], axis=1), strict=True))


# --- Weights, section 3.4 -------------------------------------------------------------------------


def multi_view_weight(config: FMCSCConfig, out: Features, mask: jax.Array) -> jax.Array:
    """Computes the weight of f_m: the sum over views of I(H, H^v), in bits."""
    shared = [
        losses.mutual_information(out.h, h_view, mask, config.n_bins)
        for h_view in out.h_views.values()
    ]
    return sum(shared, start=jnp.zeros(()))


def partial_view_weight(
    config: FMCSCConfig, out: Features, h_global: jax.Array, mask: jax.Array
) -> jax.Array:
    """Computes the weight of f_p and f_m^v: I(H, H_g) minus I(H, Z^v) averaged over views."""
    own = [losses.mutual_information(out.h, z, mask, config.n_bins) for z in out.z.values()]
    return losses.mutual_information(out.h, h_global, mask, config.n_bins) - sum(own) / len(own)
