"""Training on one client's rows: the minimisation of each of FMCSC's losses."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxfedmvc import nn
from jaxfedmvc.algorithms.fmcsc.networks import (
    Autoencoder,
    Kind,
    Model,
    PyTree,
    Views,
    features,
)
from jaxfedmvc.algorithms.fmcsc.objective import (
    distillation_loss,
    hide_features,
    multi_view_loss,
    partial_view_loss,
    reconstruction_loss,
)
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig, FMCSCHyperparams
from jaxfedmvc.federation import Cohort

Info = dict[str, jax.Array]


def fit_autoencoders(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    model: Model,
    client: Cohort,
    epochs: int,
) -> tuple[Model, jax.Array]:
    """Minimises eq. (1) or (2) over the autoencoders; the heads stay.

    Returns:
      The trained model and the mean loss of each epoch, [epochs].
    """

    def loss(autoencoders: dict[int, Autoencoder], views: Views, mask: jax.Array) -> jax.Array:
        out = features(config, model._replace(autoencoders=autoencoders), views)
        return reconstruction_loss(out.reconstruction, views, mask, config.squared_error)

    trained, history = _fit(
        config, hyper, key, model.autoencoders, loss, client.by_view(), client.mask, epochs
    )
    return model._replace(autoencoders=trained), history


def fit_multi_view(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    model: Model,
    client: Cohort,
    epochs: int,
) -> tuple[Model, jax.Array]:
    """Minimises eq. (8) on a client with all views; see `fit_autoencoders`."""

    def loss(model: Model, views: Views, mask: jax.Array, key: jax.Array) -> jax.Array:
        return multi_view_loss(config, hyper.tau_m, model, views, mask, _seen(hyper, key, views))

    return _fit(config, hyper, key, model, loss, client.by_view(), client.mask, epochs, keyed=True)


def fit_partial_view(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    model: Model,
    h_global: jax.Array,
    client: Cohort,
    epochs: int,
) -> tuple[Model, jax.Array]:
    """Minimises eq. (8) on a partial client, given H [rows, d] of the global model."""

    def loss(model: Model, rows: tuple[Views, jax.Array], mask: jax.Array) -> jax.Array:
        return partial_view_loss(config, hyper.tau_p, model, *rows, mask)

    rows = client.by_view(), h_global
    return _fit(config, hyper, key, model, loss, rows, client.mask, epochs)


def fit_copies(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    models: dict[Kind, Model],
    target: jax.Array,
    client: Cohort,
    epochs: int,
) -> tuple[dict[Kind, Model], jax.Array]:
    """Minimises eq. (6) over a multi-view client's copies of partial models; target [rows, d]."""

    def loss(
        models: dict[Kind, Model], rows: tuple[Views, jax.Array], mask: jax.Array, key: jax.Array
    ) -> jax.Array:
        return distillation_loss(config, models, *rows, mask, _seen(hyper, key, rows[0]))

    rows = client.by_view(), jax.lax.stop_gradient(target)
    return _fit(config, hyper, key, models, loss, rows, client.mask, epochs, keyed=True)


def _fit(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    params: PyTree,
    loss: Callable[..., jax.Array],
    rows: PyTree,
    mask: jax.Array,
    epochs: int,
    keyed: bool = False,
) -> tuple[PyTree, jax.Array]:
    return nn.fit(
        key,
        params,
        loss,
        rows,
        mask,
        epochs=epochs,
        batch_size=config.batch_size,
        learning_rate=hyper.learning_rate,
        keyed=keyed,
    )


def _seen(hyper: FMCSCHyperparams, key: jax.Array, views: Views) -> Views:
    return views if hyper.mask_rate is None else hide_features(key, views, hyper.mask_rate)


def last(history: jax.Array) -> jax.Array:
    """Returns the mean loss of the last epoch; 0 without epochs."""
    return history[-1:].sum()
