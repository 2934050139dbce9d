"""FMCSC without its federation: every client trains alone. The reference that FMCSC must beat.

A client with all views reconstructs and contrasts them, eq. (1) and (5), and clusters its H. A
client with fewer views has no global model to be contrasted with, so that only eq. (2) is left to
it, and it clusters its Z. Epochs are those of `fmcsc`: pre-training, then E in every round, where
models see what `mask_rate` leaves of the features in eq. (5).

Nothing is exchanged, so cluster numbers of different clients have nothing to do with each other.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, keep, send_nothing
from jaxfedmvc.algorithms.fmcsc.networks import (
    Kind,
    Model,
    features,
    init_model,
    side_by_side,
    view_dims,
)
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig, FMCSCHyperparams, check_hyperparams
from jaxfedmvc.algorithms.fmcsc.training import Info, fit_autoencoders, fit_multi_view
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.federation import Cohort, Federation, check_views
from jaxfedmvc.nn import last

Nothing = tuple[()]


class LocalState(NamedTuple):
    """What a client keeps: its model, and the key of its k-means."""

    model: Model
    key: jax.Array


def local_fmcsc(
    config: FMCSCConfig, hyperparams: FMCSCHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns FMCSC's client training with nothing sent; a client's state is a `LocalState`.

    Its `init` raises ValueError where a client has fewer samples than clusters.

    Args:
      config: As for `fmcsc`; only widths, epochs of pre-training and rounds, batches, the contrast
        and k-means matter here.
      hyperparams: As for `fmcsc`; only the learning rate, tau_m and the mask rate matter here.

    Raises:
      ValueError: A hyper-parameter is out of range.
    """
    hyper = checks.settings(config, FMCSCConfig, hyperparams, FMCSCHyperparams)
    check_hyperparams(hyper)
    checks.numbers(hyper, {"limit": checks.up_to(config.n_clusters)})
    return FederatedAlgorithm(
        init=partial(_init, config),
        setup=(Phase(send_nothing, partial(_pretrain, config, hyper), keep, reduce="sum"),),
        round=(Phase(send_nothing, partial(_train, config, hyper), keep, reduce="sum"),),
        finish=(),
        assign=partial(_assign, config, hyper.limit),
        embed=_embed,
    )


def _init(
    config: FMCSCConfig, key: jax.Array, federation: Federation
) -> tuple[Nothing, tuple[LocalState, ...]]:
    federation.check_rows(config.n_clusters, "as many as clusters, for k-means to start from")

    def client(kind: Kind, client_id: jax.Array) -> LocalState:
        own = jax.random.fold_in(key, client_id)
        return LocalState(init_model(own, config, federation.view_dims, kind), own)

    return (), tuple(
        jax.vmap(partial(client, cohort.view_ids))(cohort.client_ids)
        for cohort in federation.cohorts
    )


def _pretrain(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    sent: Nothing,
    state: LocalState,
    client: Cohort,
) -> tuple[LocalState, Nothing, Info]:
    """Minimises eq. (1) or (2)."""
    model, history = fit_autoencoders(
        config, hyper, key, state.model, client, config.pretrain_epochs
    )
    return state._replace(model=model), (), {"loss": last(history)}


def _train(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    sent: Nothing,
    state: LocalState,
    client: Cohort,
) -> tuple[LocalState, Nothing, Info]:
    """Minimises eq. (8) on clients with all views and eq. (2) on others."""
    fit = fit_multi_view if state.model.view_heads else fit_autoencoders
    model, history = fit(config, hyper, key, state.model, client, config.local_epochs)
    return state._replace(model=model), (), {"loss": last(history)}


def _embed(server: Nothing, state: LocalState, client: Cohort) -> jax.Array:
    """Computes H [rows, d] on clients with all views, and Z^v side by side on others."""
    check_views(client, view_dims(state.model), complete=True)
    out = features(state.model, client.by_view())
    return out.h if state.model.view_heads else side_by_side(out.z)


def _assign(
    config: FMCSCConfig,
    limit: jax.Array | int | None,
    server: Nothing,
    state: LocalState,
    client: Cohort,
) -> jax.Array:
    x, k = _embed(server, state, client), config.n_clusters
    return kmeans(state.key, x, k, where=client.mask, n_init=config.n_init, limit=limit).labels
