"""What FMCSC's clients do: pre-training, section 3.2, and local training, sections 3.3 and 3.4."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfedmvc.algorithms.fmcsc.networks import (
    Autoencoder,
    Kind,
    Model,
    PyTree,
    features,
    init_autoencoders,
)
from jaxfedmvc.algorithms.fmcsc.objective import (
    multi_view_weight,
    partial_contrast,
    partial_view_weight,
    reconstruction_loss,
    view_contrasts,
)
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig, FMCSCHyperparams
from jaxfedmvc.algorithms.fmcsc.training import (
    Info,
    fit_autoencoders,
    fit_copies,
    fit_multi_view,
    fit_partial_view,
)
from jaxfedmvc.federation import Cohort
from jaxfedmvc.nn import last

# What a multi-view client trains in an exchange: its own f_m, its copies of the partial models.
Part = Literal["own", "copies"]


class ClientState(NamedTuple):
    """What a client keeps.

    Attributes:
      model: A partial client's own `Model`; () on clients with all views, which start every round
        from f_g, and where branches of f_g are the models for single views.
      started: Whether `model` is one to go on from; () without one. Until then its client starts
        from the global model: where the leader trained these, and where it was not there for
        pre-training.
      h: H of the client's rows [rows, d], for Lloyd's steps; () with a leader's centroids.
      known: What the client teaches, `teaching.Known`; () where it teaches nothing.
    """

    model: PyTree
    started: PyTree
    h: PyTree
    known: PyTree = ()


class Update(NamedTuple):
    """A client's message in a round: the summands of eq. (10).

    Attributes:
      models: For each kind that the client trained, its parameters TIMES the weight.
      weights: For each of these kinds the weight, a scalar.
    """

    models: dict[Kind, Model]
    weights: dict[Kind, jax.Array]


# --- Before the rounds, section 3.2 ---------------------------------------------------------------


def pretrain(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    sent: Model | tuple[()],
    state: ClientState,
    client: Cohort,
) -> tuple[ClientState, dict[int, Autoencoder], Info]:
    """Pre-trains by eq. (1) or (2); the message is the autoencoders and nothing else."""
    if not sent:
        return state, {}, {}
    key_start, key_fit = jax.random.split(key)
    start = sent
    if "A" not in config.components:
        widths = {v: x.shape[-1] for v, x in client.by_view().items()}
        start = sent._replace(autoencoders=init_autoencoders(key_start, config, widths))
    model, history = fit_autoencoders(config, hyper, key_fit, start, client, config.pretrain_epochs)
    if state.model:  # a partial client, which keeps its model
        state = state._replace(model=model, started=jnp.bool_(config.leader_epochs == 0))
    return state, model.autoencoders, {"loss": last(history)}


def lead(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    sent: dict[Kind, Model],
    state: ClientState,
    client: Cohort,
) -> tuple[ClientState, dict[Kind, Model], Info]:
    """Trains all models on one client, the partial ones from the encoders of its own f_m."""
    key_own, key_copies = jax.random.split(key)
    full, epochs = client.view_ids, config.leader_epochs
    own, history = fit_multi_view(config, hyper, key_own, sent[full], client, epochs)
    copies = {
        kind: model._replace(autoencoders={v: own.autoencoders[v] for v in kind})
        for kind, model in sent.items()
        if kind != full
    }
    if copies:
        target = features(own, client.by_view()).h
        copies, _ = fit_copies(config, hyper, key_copies, copies, target, client, epochs)
    return state, {full: own, **copies}, {"loss": last(history)}


# --- In the rounds, sections 3.3 and 3.4 ----------------------------------------------------------


def train(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    parts: tuple[Part, ...],
    key: jax.Array,
    sent: dict[Kind, Model],
    state: ClientState,
    client: Cohort,
) -> tuple[ClientState, Update, Info]:
    """Trains what the client was sent, if anything; multi-view clients train only `parts` of it."""
    if not sent:
        return state, Update({}, {}), {}
    if sent[client.view_ids].view_heads:
        update, info = train_multi_view(config, hyper, parts, key, sent, client)
        return state, update, info
    return train_partial_view(config, hyper, key, sent, state, client)


def train_multi_view(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    parts: tuple[Part, ...],
    key: jax.Array,
    sent: dict[Kind, Model],
    client: Cohort,
) -> tuple[Update, Info]:
    """Trains f_m from f_g by eq. (8), and then the copies of partial models towards its H, eq. (6).

    Copies alone (`parts`) are trained towards H of f_g as it was sent.
    """
    views, mask, full = client.by_view(), client.mask, client.view_ids
    key_own, key_copies = jax.random.split(key)
    trained: dict[Kind, Model] = {}
    bits: dict[Kind, jax.Array] = {}
    info: Info = {}
    out = features(sent[full], views)
    if "own" in parts:
        trained[full], history = fit_multi_view(
            config, hyper, key_own, sent[full], client, config.local_epochs
        )
        out = features(trained[full], views)
        bits[full] = multi_view_weight(config, out, mask)
        contrasts = view_contrasts(config, hyper.tau_m, out, mask)
        info |= {
            "loss": last(history),
            "reconstruction": reconstruction_loss(
                out.reconstruction, views, mask, config.squared_error
            ),
            "contrast": sum(contrasts, start=jnp.zeros(())),
            "weight": bits[full],
        }
    received = {kind: model for kind, model in sent.items() if kind != full}
    if "copies" in parts and received:
        copies, history = fit_copies(
            config, hyper, key_copies, received, out.h, client, config.distill_epochs
        )
        info["distillation"] = last(history)
        for kind, copy in copies.items():
            h_global = features(received[kind], views).h
            trained[kind] = copy
            bits[kind] = partial_view_weight(config, features(copy, views), h_global, mask)
    return weighted(config, hyper, trained, bits), info


def train_partial_view(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    sent: dict[Kind, Model],
    state: ClientState,
    client: Cohort,
) -> tuple[ClientState, Update, Info]:
    """Trains the client's own model by eq. (8), against the global one as it was sent.

    Without component C it restarts from the global model and only reconstructs, eq. (2).
    """
    views, mask, kind = client.by_view(), client.mask, client.view_ids
    has_contrast, epochs = "C" in config.components, config.local_epochs
    h_global = features(sent[kind], views).h
    if has_contrast:
        start = jax.tree.map(partial(jnp.where, state.started), state.model, sent[kind])
        own, history = fit_partial_view(config, hyper, key, start, h_global, client, epochs)
    else:
        own, history = fit_autoencoders(config, hyper, key, sent[kind], client, epochs)
    out = features(own, views)
    bits = partial_view_weight(config, out, h_global, mask)
    info = {
        "loss": last(history),
        "reconstruction": reconstruction_loss(
            out.reconstruction, views, mask, config.squared_error
        ),
        "contrast": partial_contrast(hyper.tau_p, out, h_global, mask) * has_contrast,
        "weight": bits,
    }
    update = weighted(config, hyper, {kind: own}, {kind: bits})
    return state._replace(model=own, started=jnp.bool_(True)), update, info


def weighted(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    models: dict[Kind, Model],
    bits: dict[Kind, jax.Array],
) -> Update:
    """Returns models times their weights, eq. (10): `bits` with a floor, or ones without D.

    Clipped updates are averaged with equal weights too, since weights are sent without noise.
    """
    is_weighted = "D" in config.components and hyper.upload_clip is None
    weights = {
        kind: jnp.maximum(b, hyper.weight_floor) if is_weighted else jnp.ones(())
        for kind, b in bits.items()
    }
    scaled = {
        kind: jax.tree.map(lambda x, w=weights[kind]: w * x, model)
        for kind, model in models.items()
    }
    return Update(scaled, weights)
