"""FMCSC without its federation: every client trains alone. The reference that FMCSC must beat.

A client with all views reconstructs and contrasts them, eq. (1) and (5), and clusters its H. A
client with fewer views has no global model to be contrasted with, so eq. (2) is all that is left to
it, and it clusters its Z. Epochs are those of `fmcsc`: pre-training, then E in every round, where
eq. (5) is given what `mask_rate` leaves of the features.

Nothing is exchanged, so cluster numbers of different clients have nothing to do with each other.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxfedmvc import nn
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.fmcsc.model import (
    FMCSCConfig,
    FMCSCHyperparams,
    Model,
    Views,
    features,
    init_model,
)
from jaxfedmvc.algorithms.fmcsc.objective import (
    hide_features,
    multi_view_loss,
    reconstruction_loss,
)
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.federation import Cohort, Federation

PyTree = Any


def local_fmcsc(
    config: FMCSCConfig, hyperparams: FMCSCHyperparams | None = None
) -> FederatedAlgorithm:
    """FMCSC's client training, with nothing sent; a client's state is its `Model` and a key.

    Args:
      config: As for `fmcsc`; only widths, epochs of pre-training and rounds, batches, the contrast
        and k-means matter here.
      hyperparams: As for `fmcsc`.

    `init` raises ValueError where a client has fewer samples than clusters.
    """
    hyper = FMCSCHyperparams() if hyperparams is None else hyperparams

    def init(key: jax.Array, federation: Federation) -> tuple[tuple, tuple[PyTree, ...]]:
        federation.check_rows(config.n_clusters, "as many as clusters, for k-means to start from")

        def client(kind: tuple[int, ...], client_id: jax.Array) -> tuple[Model, jax.Array]:
            own = jax.random.fold_in(key, client_id)
            return init_model(own, config, federation.view_dims, kind), own

        return (), tuple(
            jax.vmap(lambda i, kind=cohort.view_ids: client(kind, i))(cohort.client_ids)
            for cohort in federation.cohorts
        )

    def nothing(server: tuple, view_ids: tuple[int, ...]) -> tuple:
        return ()

    def keep(
        key: jax.Array, server: tuple, messages: tuple, counts: tuple
    ) -> tuple[tuple[()], dict]:
        return (), {}

    def pretrain(
        key: jax.Array, sent: tuple, state: tuple[Model, jax.Array], client: Cohort
    ) -> tuple[PyTree, tuple[()], dict]:
        return train(key, state, client, config.pretrain_epochs, contrast=False)

    def one_round(
        key: jax.Array, sent: tuple, state: tuple[Model, jax.Array], client: Cohort
    ) -> tuple[PyTree, tuple[()], dict]:
        contrast = bool(state[0].view_heads)
        return train(key, state, client, config.local_epochs, contrast=contrast)

    def train(
        key: jax.Array,
        state: tuple[Model, jax.Array],
        client: Cohort,
        epochs: int,
        *,
        contrast: bool,
    ) -> tuple[PyTree, tuple[()], dict]:
        model, own_key = state
        rate = hyper.mask_rate if contrast else None

        def loss(model: Model, views: Views, mask: jax.Array, *key: jax.Array) -> jax.Array:
            if contrast:
                seen = None if rate is None else hide_features(key[0], views, rate)
                return multi_view_loss(config, hyper.tau_m, model, views, mask, seen)
            return reconstruction_loss(features(config, model, views).reconstruction, views, mask)

        model, history = nn.fit(
            key,
            model,
            loss,
            client.by_view(),
            client.mask,
            epochs=epochs,
            batch_size=config.batch_size,
            learning_rate=hyper.learning_rate,
            keyed=rate is not None,
        )
        return (model, own_key), (), {"loss": history[-1:].sum()}

    def embed(server: tuple, state: tuple[Model, jax.Array], client: Cohort) -> jax.Array:
        out = features(config, state[0], client.by_view())
        return out.h if state[0].view_heads else jnp.concatenate(list(out.z.values()), axis=-1)

    def assign(server: tuple, state: tuple[Model, jax.Array], client: Cohort) -> jax.Array:
        return kmeans(
            state[1],
            embed(server, state, client),
            config.n_clusters,
            where=client.mask,
            n_init=config.n_init,
        ).labels

    return FederatedAlgorithm(
        init=init,
        setup=(Phase(nothing, pretrain, keep, reduce="sum"),),
        round=(Phase(nothing, one_round, keep, reduce="sum"),),
        finish=(),
        assign=assign,
        embed=embed,
    )
