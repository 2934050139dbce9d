"""FMCSC's settings, its models and what travels, section 3.2 and eq. (3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.flatten_util import ravel_pytree

from jaxfedmvc import losses, nn

PyTree = Any
Kind = tuple[int, ...]
Views = Mapping[int, jax.Array]


@dataclass(frozen=True)
class FMCSCConfig:
    """What changes shapes, loop lengths or the program; the defaults are the paper's (D.2).

    Attributes:
      n_clusters: K.
      hidden: Widths of the encoder's hidden layers; the decoder mirrors them.
      latent_dim: d_v = d, the width of Z^v, H^v and H. One number, since eq. (7) compares them.
      head_hidden: Hidden width of the heads H^v and H.
      pretrain_epochs: Epochs of reconstruction before the rounds.
      leader_epochs: Epochs for which one multi-view client then trains all global models, with eq.
        (8) and (6), before the first round: all clients begin from one common space of H and not
        from random heads. 0: off, as in the paper, whose consensus is on autoencoders alone.
      local_epochs: E, epochs of a round.
      distill_epochs: Epochs of eq. (6) in a round.
      batch_size: Rows of a step.
      contrast: "paper" for eq. (5) as printed, "ntxent" for the form of the published code.
      components: Letters that are switched on. A: consensus pre-training (without it every client
        pre-trains from a start of its own). B: multi-view clients optimise the partial global
        models, eq. (6). C: model contrast, eq. (7), on models that partial clients keep (without
        it they restart from the global model and only reconstruct). D: mutual-information
        weights (without it a plain average).
      n_bins: Bins of the mutual information's histogram.
      n_init: k-means++ restarts of the client whose centroids are passed on.
      partial_rounds: Whether partial clients train and send their models in the rounds. If not,
        they pre-train at most, and receive the models in the end: C, eq. (7), is without effect.
      partial_models: What the global models for one view are. "distilled": those that multi-view
        clients fit by eq. (6), as in the paper. "branch": f_g's own branch for the view, E^v, D^v
        and H^v, which eq. (5) has drawn to H as f_g was trained: nothing more is trained or sent,
        and partial clients train nothing, before the rounds or in them. Their rows move
        centroids, if these are federated, and no model.
      target: Of eq. (6). "own": H of the client's own f_m, as printed. "global": H of the round's
        new f_g, in an exchange of its own after f_m are averaged: what is averaged then was fitted
        to one space by all clients.
      centroids: "leader": one client's centroids are what all others start from, as in the paper.
        "federated": every client sends centroids and sizes of a k-means of its own, the server
        clusters these, and Lloyd's steps follow, for which clients send the sum and the number of
        their rows of H in each cluster. Rows go to the nearest of the common centroids.
      centroid_rounds: Lloyd's steps of federated k-means.
    """

    n_clusters: int
    hidden: tuple[int, ...] = (500, 500, 2000)
    latent_dim: int = 20
    head_hidden: int = 256
    pretrain_epochs: int = 250
    local_epochs: int = 25
    distill_epochs: int = 50
    batch_size: int = 256
    contrast: str = "paper"
    components: str = "ABCD"
    n_bins: int = 10
    n_init: int = 100
    leader_epochs: int = 0
    partial_rounds: bool = True
    partial_models: str = "distilled"
    target: str = "own"
    centroids: str = "leader"
    centroid_rounds: int = 10

    def __post_init__(self) -> None:
        """Raises ValueError that names the field."""
        for name in (
            "n_clusters",
            "latent_dim",
            "head_hidden",
            "batch_size",
            "n_bins",
            "n_init",
            "centroid_rounds",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed is 1 or more")
        for name in ("pretrain_epochs", "leader_epochs", "local_epochs", "distill_epochs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed is 0 or more")
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden: got {self.hidden}; allowed are widths of 1 or more")
        if self.contrast not in ("paper", "ntxent"):
            raise ValueError(f"contrast: got {self.contrast!r}; allowed is 'paper' or 'ntxent'")
        if self.target not in ("own", "global"):
            raise ValueError(f"target: got {self.target!r}; allowed is 'own' or 'global'")
        if self.partial_models not in ("distilled", "branch"):
            raise ValueError(
                f"partial_models: got {self.partial_models!r}; allowed is 'distilled' or 'branch'"
            )
        if self.partial_models == "branch" and self.partial_rounds:
            raise ValueError(
                "partial_rounds: got True; allowed is False with partial_models='branch', where"
                " nothing that partial clients could send is used"
            )
        if self.centroids not in ("leader", "federated"):
            raise ValueError(
                f"centroids: got {self.centroids!r}; allowed is 'leader' or 'federated'"
            )
        if not set(self.components) <= set("ABCD"):
            raise ValueError(f"components: got {self.components!r}; allowed are letters of 'ABCD'")


@struct.dataclass
class FMCSCHyperparams:
    """Numbers that may be swept: every leaf may be traced or batched.

    Attributes:
      learning_rate: Adam's step size.
      tau_m: Temperature of the feature contrast, eq. (5).
      tau_p: Temperature of the model contrast, eq. (7).
      weight_floor: Least mutual-information weight of a model, in bits, before normalisation.
        The difference of section 3.4 can be negative, and a weight cannot.
      mask_rate: Share of the features that are set to zero, drawn anew in every step, before a
        multi-view client's models see them in eq. (5) and (6); what they reconstruct is whole.
        None: off.
      upload_noise: Scale b of Laplace noise on every parameter that a client sends. None: off.
      upload_clip: C, largest L1 norm of a client's update, sent minus received, over all its
        models; what is longer is scaled down, and models are then averaged plainly, since weights
        would tell of the data without noise. None: off. A client's whole data changes an upload by
        2 C in L1 at most: T uploads are (2 C T / b)-differentially private for clients, the
        centroids apart.
    """

    learning_rate: jax.Array | float = 3e-4
    tau_m: jax.Array | float = 0.5
    tau_p: jax.Array | float = 0.5
    weight_floor: jax.Array | float = 1e-3
    mask_rate: jax.Array | float | None = None
    upload_noise: jax.Array | float | None = None
    upload_clip: jax.Array | float | None = None


class Autoencoder(NamedTuple):
    """Parameters of one view's encoder E^v and decoder D^v."""

    encoder: PyTree
    decoder: PyTree


class Model(NamedTuple):
    """Parameters of a model of one kind.

    Attributes:
      autoencoders: E^v and D^v of each view of the kind.
      view_heads: H^v of each view, on models for all views; empty on partial models, where no loss
        would train them.
      joint_head: H, from the concatenated Z.
    """

    autoencoders: dict[int, Autoencoder]
    view_heads: dict[int, PyTree]
    joint_head: PyTree


class Features(NamedTuple):
    """Outputs of a model: [rows, d] each; `reconstruction` [rows, D_v]."""

    reconstruction: dict[int, jax.Array]
    z: dict[int, jax.Array]
    h_views: dict[int, jax.Array]
    h: jax.Array


class Kept(NamedTuple):
    """What a client keeps, with federated centroids: its model, and H of its rows [rows, d]."""

    model: PyTree
    h: jax.Array


class ServerState(NamedTuple):
    """The global models, f_g and f_g^v, by kind, and the centroids that are passed on [K, d]."""

    models: dict[Kind, Model]
    centroids: jax.Array


class Update(NamedTuple):
    """A client's message of a round: everything is a sum's summand, eq. (10).

    Attributes:
      models: For each kind that the client trained, its parameters TIMES the weight.
      weights: For each of these kinds the weight, a scalar.
    """

    models: dict[Kind, Model]
    weights: dict[Kind, jax.Array]


# --- The model, section 3.2 and eq. (3) -----------------------------------------------------------


def init_autoencoder(key: jax.Array, config: FMCSCConfig, view_dim: int) -> Autoencoder:
    """Fresh parameters for one view."""
    key_encoder, key_decoder = jax.random.split(key)
    return Autoencoder(
        nn.init_mlp(key_encoder, view_dim, (*config.hidden, config.latent_dim)),
        nn.init_mlp(key_decoder, config.latent_dim, (*config.hidden[::-1], view_dim)),
    )


def init_model(
    key: jax.Array, config: FMCSCConfig, view_dims: tuple[int, ...], kind: Kind
) -> Model:
    """Fresh parameters of a model of this kind; `view_dims` are those of the federation."""
    head = (config.head_hidden, config.latent_dim)
    keys = {v: jax.random.split(jax.random.fold_in(key, v)) for v in kind}
    is_full = len(kind) == len(view_dims)
    key_joint = jax.random.fold_in(key, len(view_dims))
    return Model(
        {v: init_autoencoder(keys[v][0], config, view_dims[v]) for v in kind},
        {v: nn.init_mlp(keys[v][1], config.latent_dim, head) for v in kind if is_full},
        nn.init_mlp(key_joint, config.latent_dim * len(kind), head),
    )


def features(config: FMCSCConfig, model: Model, views: Views) -> Features:
    """Z^v, reconstruction, H^v and H = H([Z^1, ..., Z^V]), eq. (3), with unit rows of H.

    Args:
      config: Widths.
      model: Parameters.
      views: [rows, D_v] of every view of the model.
    """
    head = (config.head_hidden, config.latent_dim)
    z, reconstruction = {}, {}
    for v, params in model.autoencoders.items():
        z[v] = nn.apply_mlp(params.encoder, (*config.hidden, config.latent_dim), views[v])
        widths = (*config.hidden[::-1], views[v].shape[-1])
        reconstruction[v] = nn.apply_mlp(params.decoder, widths, z[v])
    joint = jnp.concatenate([z[v] for v in sorted(z)], axis=-1)
    return Features(
        reconstruction,
        z,
        h_views={v: nn.apply_mlp(params, head, z[v]) for v, params in model.view_heads.items()},
        h=losses.l2_normalize(nn.apply_mlp(model.joint_head, head, joint)),
    )


def branch(model: Model, view: int) -> Model:
    """The part of a model for all views that needs one view alone: its H is H^v, with unit rows.

    Eq. (5) draws H and H^v of the same sample together, so that H^v stands in for H.
    """
    return Model({view: model.autoencoders[view]}, {}, model.view_heads[view])


# --- What travels ---------------------------------------------------------------------------------


def send_model(server: ServerState, view_ids: Kind) -> Model:
    """The global model of a client's views."""
    return server.models[view_ids]


def released(hyper: FMCSCHyperparams, key: jax.Array, trained: PyTree, received: PyTree) -> PyTree:
    """What of the parameters leaves the client: with noise, and with a bounded update, if asked."""
    update = jax.tree.map(jnp.subtract, trained, received)
    if hyper.upload_clip is not None:
        norm = sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(update))
        share = jnp.minimum(1.0, hyper.upload_clip / jnp.maximum(norm, 1e-12))
        trained = jax.tree.map(lambda x, u: x + share * u, received, update)
    if hyper.upload_noise is None:
        return trained
    # One draw for all parameters: a draw for each takes minutes to compile.
    flat, unravel = ravel_pytree(trained)
    return unravel(flat + hyper.upload_noise * jax.random.laplace(key, flat.shape))


def average(parts: list[tuple[PyTree, jax.Array]], otherwise: PyTree) -> PyTree:
    """Eq. (10): sum of the sums over the sum of the weights; `otherwise` where no weight came."""
    if not parts:
        return otherwise
    weight = sum((w for _, w in parts), start=jnp.zeros(()))
    safe = jnp.where(weight > 0, weight, 1.0)

    def mean(old: jax.Array, *sums: jax.Array) -> jax.Array:
        return jnp.where(weight > 0, sum(sums[1:], start=sums[0]) / safe, old)

    return jax.tree.map(mean, otherwise, *(s for s, _ in parts))
