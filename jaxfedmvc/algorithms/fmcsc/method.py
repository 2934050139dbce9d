"""FMCSC, algorithm 1, in the paper's order: pre-training, rounds, clustering."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfedmvc import keys, nn
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.fmcsc import centroids
from jaxfedmvc.algorithms.fmcsc.model import (
    Autoencoder,
    Features,
    FMCSCConfig,
    FMCSCHyperparams,
    Kept,
    Kind,
    Model,
    PyTree,
    ServerState,
    Update,
    Views,
    average,
    branch,
    features,
    init_autoencoder,
    init_model,
    released,
    send_model,
)
from jaxfedmvc.algorithms.fmcsc.objective import (
    distillation_loss,
    hide_features,
    multi_view_loss,
    multi_view_weight,
    partial_contrast,
    partial_view_loss,
    partial_view_weight,
    reconstruction_loss,
    view_contrasts,
)
from jaxfedmvc.federation import Cohort, Federation


def fmcsc(config: FMCSCConfig, hyperparams: FMCSCHyperparams | None = None) -> FederatedAlgorithm:
    """FMCSC, algorithm 1, as a `FederatedAlgorithm`.

    Server state: `ServerState`. Client state: a partial client's own `Model`, which it keeps from
    round to round; nothing on a client with all views, which starts every round from f_g, nor
    where partial models are branches. With federated centroids that is the model of a `Kept`.

    `init` raises ValueError where no client holds all views, a client has fewer samples than
    clusters, or partial models are branches and a partial client holds several views; `assign`
    and `embed` where there is no global model for the client's subset of views.
    """
    hyper = FMCSCHyperparams() if hyperparams is None else hyperparams
    has = {letter: letter in config.components for letter in "ABCD"}
    # Without B nothing is done for partial models.
    branched = has["B"] and config.partial_models == "branch"

    def init(key: jax.Array, federation: Federation) -> tuple[ServerState, tuple[PyTree, ...]]:
        full = tuple(range(federation.n_views))
        held = {cohort.view_ids for cohort in federation.cohorts}
        if full not in held:
            raise ValueError(
                f"federation: no client holds all {federation.n_views} views; FMCSC needs one at"
                " least, to learn what the views have in common"
            )
        several = [kind for kind in sorted(held) if 1 < len(kind) < federation.n_views]
        if branched and several:
            raise ValueError(
                f"partial_models: got 'branch' with a client that holds views {several[0]}, and"
                " f_g has a branch for each view and for all; allowed is 'distilled'"
            )
        federation.check_rows(config.n_clusters, "as many as clusters, for k-means to start from")
        models = {
            kind: init_model(key, config, federation.view_dims, kind)
            for kind in held | {(v,) for v in full}
        }
        clients = tuple(
            kept(
                ()
                if cohort.view_ids == full or branched
                else jax.tree.map(
                    lambda x, n=cohort.n_clients: jnp.broadcast_to(x, (n, *x.shape)),
                    models[cohort.view_ids],
                ),
                jnp.zeros((*cohort.mask.shape, config.latent_dim)),
            )
            for cohort in federation.cohorts
        )
        return ServerState(models, jnp.zeros((config.n_clusters, config.latent_dim))), clients

    def fit(
        key: jax.Array,
        params: PyTree,
        loss: Any,
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

    fit_masked = partial(fit, keyed=hyper.mask_rate is not None)

    def seen(views: Views, *key: jax.Array) -> Views | None:
        """What models are given instead of the views, with the key of a step of `fit_masked`."""
        if hyper.mask_rate is None:
            return None
        return hide_features(key[0], views, hyper.mask_rate)

    def kept(model: PyTree, h: jax.Array) -> PyTree:
        return Kept(model, h) if config.centroids == "federated" else model

    def model_of(state: PyTree) -> PyTree:
        return state.model if isinstance(state, Kept) else state

    def with_model(state: PyTree, model: Model) -> PyTree:
        return state._replace(model=model) if isinstance(state, Kept) else model

    def updated(server: ServerState, models: dict[Kind, Model]) -> ServerState:
        """The server with these global models; partial models follow f_g if they are branches."""
        if branched:
            (full,) = (kind for kind, model in models.items() if model.view_heads)
            models = {**{(v,): branch(models[full], v) for v in full}, full: models[full]}
        return server._replace(models=models)

    # Setup: (consensus) pre-training, section 3.2.

    def send_start(server: ServerState, view_ids: Kind) -> Model | tuple[()]:
        """Nothing to partial clients where branches of f_g stand for what they would train."""
        return () if branched and not _is_full(view_ids, server) else send_model(server, view_ids)

    def pretrain(
        key: jax.Array, sent: Model | tuple[()], state: PyTree, client: Cohort
    ) -> tuple[PyTree, dict[int, Autoencoder], dict[str, jax.Array]]:
        """Eq. (1), (2); the message is the client's autoencoders and nothing else."""
        if not sent:
            return state, {}, {}
        start = sent.autoencoders
        key_start, key_fit = jax.random.split(key)
        key_noise = jax.random.fold_in(key, keys.UPLOAD_NOISE)
        if not has["A"]:
            start = {
                v: init_autoencoder(jax.random.fold_in(key_start, v), config, x.shape[-1])
                for v, x in client.by_view().items()
            }

        def loss(autoencoders: dict[int, Autoencoder], views: Views, mask: jax.Array) -> jax.Array:
            model = sent._replace(autoencoders=autoencoders)
            out = features(config, model, views).reconstruction
            return reconstruction_loss(out, views, mask)

        trained, history = fit(
            key_fit, start, loss, client.by_view(), client.mask, config.pretrain_epochs
        )
        if model_of(state):  # a partial client, which keeps its model
            state = with_model(state, sent._replace(autoencoders=trained))
        trained = released(hyper, key_noise, trained, sent.autoencoders)
        return state, trained, {"loss": history[-1:].sum()}

    def average_autoencoders(
        key: jax.Array, server: ServerState, messages: tuple, counts: tuple
    ) -> tuple[ServerState, dict]:
        """Every global model takes the mean autoencoders of the clients that hold its views.

        As in eq. (10), multi-view clients count for the partial models too.
        """
        models = {}
        for kind, model in server.models.items():
            parts = [
                ({v: message[v] for v in kind}, count)
                for message, count in zip(messages, counts, strict=True)
                if set(kind) <= set(message)
            ]
            models[kind] = model._replace(autoencoders=average(parts, model.autoencoders))
        return updated(server, models), {}

    def pretrain_phase(who: Any) -> Phase:
        return Phase(send_start, pretrain, average_autoencoders, reduce="sum", who=who)

    # What clients with all views train, in the rounds and before.

    def train_own(
        key: jax.Array, model: Model, client: Cohort, epochs: int
    ) -> tuple[Model, Features, jax.Array]:
        """Eq. (8); also what the trained model makes of the rows."""
        views = client.by_view()

        def loss(model: Model, views: Views, mask: jax.Array, *key: jax.Array) -> jax.Array:
            return multi_view_loss(config, hyper.tau_m, model, views, mask, seen(views, *key))

        own, history = fit_masked(key, model, loss, views, client.mask, epochs)
        return own, features(config, own, views), history

    def train_copies(
        key: jax.Array, models: dict[Kind, Model], target: jax.Array, client: Cohort, epochs: int
    ) -> tuple[dict[Kind, Model], jax.Array]:
        """Eq. (6)."""

        def loss(
            models: dict[Kind, Model],
            rows: tuple[Views, jax.Array],
            mask: jax.Array,
            *key: jax.Array,
        ) -> jax.Array:
            return distillation_loss(config, models, *rows, mask, seen(rows[0], *key))

        rows = client.by_view(), jax.lax.stop_gradient(target)
        return fit_masked(key, models, loss, rows, client.mask, epochs)

    def send_all(server: ServerState, view_ids: Kind) -> dict[Kind, Model]:
        return server.models

    def lead(
        key: jax.Array, sent: dict[Kind, Model], state: PyTree, client: Cohort
    ) -> tuple[PyTree, dict[Kind, Model], dict[str, jax.Array]]:
        """All models, the partial ones from the encoders of the model of all views."""
        key_own, key_copies = jax.random.split(key)
        full = client.view_ids
        own, out, history = train_own(key_own, sent[full], client, config.leader_epochs)
        starts = {
            kind: model._replace(autoencoders={v: own.autoencoders[v] for v in kind})
            for kind, model in sent.items()
            if kind != full
        }
        copies = starts
        if starts:
            copies, _ = train_copies(key_copies, starts, out.h, client, config.leader_epochs)
        models = released(
            hyper, jax.random.fold_in(key, keys.UPLOAD_NOISE), {full: own, **copies}, sent
        )
        return state, models, {"loss": history[-1:].sum()}

    def adopt(
        key: jax.Array, server: ServerState, messages: tuple, weights: tuple
    ) -> tuple[ServerState, dict]:
        models = jax.tree.map(lambda x: x[0], messages[0])
        return updated(server, {**server.models, **models}), {}

    # Rounds: sections 3.3 and 3.4.

    def send_models(server: ServerState, view_ids: Kind) -> dict[Kind, Model]:
        """A multi-view client receives every global model that it will train, others their own."""
        is_full = _is_full(view_ids, server)
        if not (is_full or config.partial_rounds):
            return {}
        return {k: m for k, m in server.models.items() if (has["B"] and is_full) or k == view_ids}

    def send_own(server: ServerState, view_ids: Kind) -> dict[Kind, Model]:
        return {view_ids: server.models[view_ids]} if _is_full(view_ids, server) else {}

    def local_training(
        key: jax.Array,
        sent: dict[Kind, Model],
        state: PyTree,
        client: Cohort,
        parts: tuple[str, ...] = ("own", "copies"),
    ) -> tuple[PyTree, Update, dict[str, jax.Array]]:
        """What a client does with what it was sent; clients with all views these parts of it."""
        if not sent:
            return state, Update({}, {}), {}
        if not sent[client.view_ids].view_heads:
            return train_partial_view(key, sent, state, client)
        return train_multi_view(key, sent, state, client, parts)

    def train_multi_view(
        key: jax.Array,
        sent: dict[Kind, Model],
        state: PyTree,
        client: Cohort,
        parts: tuple[str, ...],
    ) -> tuple[PyTree, Update, dict[str, jax.Array]]:
        views, mask = client.by_view(), client.mask
        key_own, key_copies = jax.random.split(key)
        key_noise = jax.random.fold_in(key, keys.UPLOAD_NOISE)
        trained: dict[Kind, Model] = {}
        bits: dict[Kind, jax.Array] = {}
        info: dict[str, jax.Array] = {}
        target = features(config, sent[client.view_ids], views).h
        if "own" in parts:
            own, out, history = train_own(
                key_own, sent[client.view_ids], client, config.local_epochs
            )
            trained[client.view_ids], target = own, out.h
            bits[client.view_ids] = info["weight"] = multi_view_weight(config, out, mask)
            info["loss"] = history[-1:].sum()
            info["reconstruction"] = reconstruction_loss(out.reconstruction, views, mask)
            contrasts = view_contrasts(config, hyper.tau_m, out, mask)
            info["contrast"] = sum(contrasts, start=jnp.zeros(()))
        received = {kind: m for kind, m in sent.items() if kind != client.view_ids}
        if "copies" in parts and received:
            copies, history = train_copies(
                key_copies, received, target, client, config.distill_epochs
            )
            info["distillation"] = history[-1:].sum()
            for kind, copy in copies.items():
                h_global = features(config, received[kind], views).h
                copied = features(config, copy, views)
                trained[kind] = copy
                bits[kind] = partial_view_weight(config, copied, h_global, mask)
        return state, upload(key_noise, trained, sent, bits), info

    def train_partial_view(
        key: jax.Array, sent: dict[Kind, Model], state: PyTree, client: Cohort
    ) -> tuple[PyTree, Update, dict[str, jax.Array]]:
        views, mask = client.by_view(), client.mask
        received = sent[client.view_ids]
        h_global = features(config, received, views).h

        def loss(model: Model, rows: tuple[Views, jax.Array], mask: jax.Array) -> jax.Array:
            if has["C"]:
                return partial_view_loss(config, hyper.tau_p, model, *rows, mask)
            out = features(config, model, rows[0])
            return reconstruction_loss(out.reconstruction, rows[0], mask)

        own, history = fit(
            key,
            model_of(state) if has["C"] else received,
            loss,
            (views, h_global),
            mask,
            config.local_epochs,
        )
        out = features(config, own, views)
        bits = partial_view_weight(config, out, h_global, mask)
        info = {
            "loss": history[-1:].sum(),
            "reconstruction": reconstruction_loss(out.reconstruction, views, mask),
            "contrast": partial_contrast(hyper.tau_p, out, h_global, mask) * has["C"],
            "weight": bits,
        }
        key_noise, mine = jax.random.fold_in(key, keys.UPLOAD_NOISE), client.view_ids
        message = upload(key_noise, {mine: own}, sent, {mine: bits})
        return with_model(state, own), message, info

    def upload(
        key: jax.Array,
        models: dict[Kind, Model],
        sent: dict[Kind, Model],
        bits: dict[Kind, jax.Array],
    ) -> Update:
        models = released(hyper, key, models, {kind: sent[kind] for kind in models})
        weighted = has["D"] and hyper.upload_clip is None
        weights = {
            kind: jnp.maximum(b, hyper.weight_floor) if weighted else jnp.ones(())
            for kind, b in bits.items()
        }
        scaled = {
            kind: jax.tree.map(lambda x, w=weights[kind]: w * x, model)
            for kind, model in models.items()
        }
        return Update(scaled, weights)

    def aggregate(
        key: jax.Array, server: ServerState, messages: tuple[Update, ...], counts: tuple
    ) -> tuple[ServerState, dict]:
        """Eq. (10), for each kind of model; a kind that nobody sent stays as it was."""
        models = {
            kind: average(
                [(m.models[kind], m.weights[kind]) for m in messages if kind in m.models], model
            )
            for kind, model in server.models.items()
        }
        return updated(server, models), {}

    def embed(server: ServerState, state: PyTree, client: Cohort) -> jax.Array:
        if client.view_ids not in server.models:
            raise ValueError(
                f"client: holds views {client.view_ids}; there are global models for"
                f" {sorted(server.models)}. Drop a view, or train with such a client"
            )
        return features(config, server.models[client.view_ids], client.by_view()).h

    def assign(server: ServerState, state: PyTree, client: Cohort) -> jax.Array:
        return centroids.assign(config, embed(server, state, client), server.centroids, client.mask)

    setup: tuple[Phase, ...] = (pretrain_phase("everyone"),)
    if has["A"]:
        setup = (pretrain_phase("leader"), *setup)
        if config.leader_epochs:
            sent = send_own if branched else send_all
            setup = (*setup, Phase(sent, lead, adopt, who="leader"))
    rounds: tuple[Phase, ...] = (Phase(send_models, local_training, aggregate, reduce="sum"),)
    own_only = partial(local_training, parts=("own",))
    if branched:
        rounds = (Phase(send_own, own_only, aggregate, reduce="sum"),)
    elif config.target == "global" and has["B"]:
        the_others = partial(local_training, parts=("copies",))
        rounds = (
            Phase(send_own, own_only, aggregate, reduce="sum"),
            Phase(send_models, the_others, aggregate, reduce="sum"),
        )
    return FederatedAlgorithm(
        init=init,
        setup=setup,
        round=rounds,
        finish=centroids.phases(config),
        assign=assign,
        embed=embed,
    )


def _is_full(kind: Kind, server: ServerState) -> bool:
    return bool(server.models[kind].view_heads)
