"""FMCSC's models, section 3.2 and eq. (3)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfedmvc import losses, nn
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig

PyTree = Any
Kind = tuple[int, ...]
Views = Mapping[int, jax.Array]
Shapes = dict[Hashable, tuple[int, Sequence[int]]]


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


def init_autoencoders(
    key: jax.Array, config: FMCSCConfig, view_dims: Mapping[int, int]
) -> dict[int, Autoencoder]:
    """Returns fresh E^v and D^v of each view v, of `view_dims[v]` features."""
    drawn = nn.init_mlps(key, _autoencoder_shapes(config, view_dims))
    return {v: Autoencoder(drawn["encoder", v], drawn["decoder", v]) for v in view_dims}


def _autoencoder_shapes(config: FMCSCConfig, view_dims: Mapping[int, int]) -> Shapes:
    shapes: Shapes = {}
    for v, dim in view_dims.items():
        shapes["encoder", v] = dim, (*config.hidden, config.latent_dim)
        shapes["decoder", v] = config.latent_dim, (*config.hidden[::-1], dim)
    return shapes


def init_models(
    key: jax.Array, config: FMCSCConfig, view_dims: tuple[int, ...], kinds: Collection[Kind]
) -> dict[Kind, Model]:
    """Returns fresh parameters of a model of each kind; what they have in common starts equal.

    A model for some of the views starts as the part of the model for all views that their Z reach,
    if that is among the kinds. The paper says nothing of the heads' start, and much depends on it:
    eq. (6) draws all models to one H, which models with heads of their own leave as soon as clients
    train apart.

    Args:
      key: PRNG key.
      config: Widths.
      view_dims: D_v of all views of the federation.
      kinds: Views of each model.
    """
    full = tuple(range(len(view_dims)))
    latent, head = config.latent_dim, (config.head_hidden, config.latent_dim)
    shapes = _autoencoder_shapes(config, {v: view_dims[v] for v in sorted(set().union(*kinds))})
    if full in kinds:
        shapes |= {("head", v): (latent, head) for v in full}
    shapes |= {("joint", kind): (latent * len(kind), head) for kind in sorted(kinds)}
    drawn = nn.init_mlps(key, shapes)

    # Where all kinds take theirs from f_g's, the others are drawn in vain: f_g keeps the start that
    # it has in the runs of docs/results.md.
    heads = {kind: drawn["joint", kind] for kind in kinds}
    if full in kinds:
        heads = {kind: head_of(heads[full], kind, latent) for kind in kinds}
    return {
        kind: Model(
            {v: Autoencoder(drawn["encoder", v], drawn["decoder", v]) for v in kind},
            {v: drawn["head", v] for v in kind if kind == full},
            heads[kind],
        )
        for kind in kinds
    }


def head_of(head: PyTree, kind: Kind, latent_dim: int) -> PyTree:
    """Returns the part of a head of all views, H([Z^1, ..., Z^V]), that the Z of these views reach.

    On their Z it computes what the head does where those of the other views are zero.

    Args:
      head: Parameters.
      kind: Views that are left.
      latent_dim: Width of each Z.
    """
    first = head["params"]["Dense_0"]
    by_view = first["kernel"].reshape(-1, latent_dim, first["kernel"].shape[-1])
    kernel = jnp.concatenate([by_view[v] for v in kind])
    return {"params": {**head["params"], "Dense_0": {**first, "kernel": kernel}}}


def init_model(
    key: jax.Array, config: FMCSCConfig, view_dims: tuple[int, ...], kind: Kind
) -> Model:
    """Returns fresh parameters of a model of one kind; see `init_models`."""
    return init_models(key, config, view_dims, (kind,))[kind]


def features(model: Model, views: Views) -> Features:
    """Computes Z^v, reconstructions, H^v and H = H([Z^1, ..., Z^V]), eq. (3), with unit rows of H.

    Args:
      model: Parameters, or what `stacked` makes of them.
      views: [rows, D_v] for every view of the model.
    """

    def autoencoded(params: Autoencoder, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = nn.apply(params.encoder, x)
        return z, nn.apply(params.decoder, z)

    found = nn.each(autoencoded, model.autoencoders, views)
    z = {v: z for v, (z, _) in found.items()}
    joint = side_by_side(z)
    return Features(
        reconstruction={v: x for v, (_, x) in found.items()},
        z=z,
        h_views=nn.each(nn.apply, model.view_heads, z),
        h=losses.l2_normalize(nn.apply(model.joint_head, joint)),
    )


def side_by_side(views: Views) -> jax.Array:
    """Returns what there is of these views [rows, D_v] as [rows, sum of D_v], by their numbers."""
    return jnp.concatenate([views[v] for v in sorted(views)], axis=-1)


def view_dims(model: Model) -> dict[int, int]:
    """Returns the features of each view that a model takes."""
    kernels = {v: a.encoder["params"]["Dense_0"]["kernel"] for v, a in model.autoencoders.items()}
    return {v: kernel.shape[0] for v, kernel in kernels.items()}


def stacked(config: FMCSCConfig, model: Model) -> Model:
    """Returns a model as it is trained: networks of equal shapes are one stack, if config says so.

    Its autoencoders and heads are `nn.Alike`s; `unstacked` makes them dictionaries again.
    """
    stack = nn.stacks(config.stack_views)
    autoencoders: Any = nn.alike(model.autoencoders, stack)
    view_heads: Any = nn.alike(model.view_heads, stack)
    return Model(autoencoders, view_heads, model.joint_head)


def unstacked(model: Model) -> Model:
    """Returns the model that `stacked` was given."""
    networks: Any = model
    return Model(nn.apart(networks.autoencoders), nn.apart(networks.view_heads), model.joint_head)


def by_place(model: Model) -> Model:
    """Returns a model with its views numbered by their order, and not as the federation does."""
    views = sorted(model.autoencoders)
    return model._replace(autoencoders={i: model.autoencoders[v] for i, v in enumerate(views)})


def by_view(model: Model, kind: Kind) -> Model:
    """Returns the model of this kind that `by_place` was given."""
    views = sorted(kind)
    return model._replace(autoencoders={v: model.autoencoders[i] for i, v in enumerate(views)})


def branch(model: Model, view: int) -> Model:
    """Returns the part of a model for all views that needs one view alone.

    Its H is the view's H^v with unit rows: eq. (5) draws H and H^v of the same sample together, so
    that one can stand in for the other.
    """
    return Model({view: model.autoencoders[view]}, {}, model.view_heads[view])
