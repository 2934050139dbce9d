"""Training on one client's rows: the minimisation of each of FMCSC's losses."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxfedmvc import nn
from jaxfedmvc.algorithms.fmcsc.networks import (
    Kind,
    Model,
    PyTree,
    Views,
    by_place,
    by_view,
    features,
    stacked,
    unstacked,
)
from jaxfedmvc.algorithms.fmcsc.objective import (
    distillation_of,
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

    start = stacked(config, model)

    def loss(autoencoders: PyTree, views: Views, mask: jax.Array) -> jax.Array:
        out = features(start._replace(autoencoders=autoencoders), views)
        return reconstruction_loss(out.reconstruction, views, mask, config.squared_error)

    trained, history = _fit(
        config, hyper, key, start.autoencoders, loss, client.by_view(), client.mask, epochs
    )
    return unstacked(start._replace(autoencoders=trained)), history


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

    start, rows = stacked(config, model), client.by_view()
    trained, history = _fit(config, hyper, key, start, loss, rows, client.mask, epochs, keyed=True)
    return unstacked(trained), history


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

    start, rows = stacked(config, model), (client.by_view(), h_global)
    trained, history = _fit(config, hyper, key, start, loss, rows, client.mask, epochs)
    return unstacked(trained), history


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
        models: nn.Alike, rows: tuple[Views, jax.Array], mask: jax.Array, key: jax.Array
    ) -> jax.Array:
        return distillation_of(config, kinds, models, *rows, mask, _seen(hyper, key, rows[0]))

    kinds = {kind: tuple(sorted(kind)) for kind in models}
    placed = {kind: by_place(model) for kind, model in models.items()}
    start = nn.alike(placed, nn.stacks(config.stack_views))
    rows = client.by_view(), target
    trained, history = _fit(config, hyper, key, start, loss, rows, client.mask, epochs, keyed=True)
    return {kind: by_view(model, kind) for kind, model in nn.apart(trained).items()}, history


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
        least_steps=config.least_steps,
    )


def _seen(hyper: FMCSCHyperparams, key: jax.Array, views: Views) -> Views:
    return views if hyper.mask_rate is None else hide_features(key, views, hyper.mask_rate)
