"""FMCSC's models, section 3.2 and eq. (3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfedmvc import losses, nn
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig

PyTree = Any
Kind = tuple[int, ...]
Views = Mapping[int, jax.Array]


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
    """Outputs of a model.

    Attributes:
      reconstruction: [rows, D_v] for each view of the model.
      z: Z^v, the low-level features [rows, d] of each view.
      h_views: H^v, the high-level features [rows, d] of each view that has a head.
      h: H, the common semantics [rows, d], with unit rows.
    """

    reconstruction: dict[int, jax.Array]
    z: dict[int, jax.Array]
    h_views: dict[int, jax.Array]
    h: jax.Array


def init_autoencoder(key: jax.Array, config: FMCSCConfig, view_dim: int) -> Autoencoder:
    """Returns fresh parameters for a view of `view_dim` features."""
    key_encoder, key_decoder = jax.random.split(key)
    return Autoencoder(
        nn.init_mlp(key_encoder, view_dim, (*config.hidden, config.latent_dim)),
        nn.init_mlp(key_decoder, config.latent_dim, (*config.hidden[::-1], view_dim)),
    )


def init_model(
    key: jax.Array, config: FMCSCConfig, view_dims: tuple[int, ...], kind: Kind
) -> Model:
    """Returns fresh parameters for a kind of model; `view_dims` are those of the federation."""
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
    """Computes Z^v, reconstructions, H^v and H = H([Z^1, ..., Z^V]), eq. (3), with unit rows of H.

    Args:
      config: Widths.
      model: Parameters.
      views: [rows, D_v] for every view of the model.
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
    """Returns the part of a model for all views that needs one view alone.

    Its H is the view's H^v with unit rows: eq. (5) draws H and H^v of the same sample together, so
    that one can stand in for the other.
    """
    return Model({view: model.autoencoders[view]}, {}, model.view_heads[view])
