"""What the deep methods share: autoencoders of the views, heads on them, and terms of losses.

MFLVC, GCFAgg, DSIMVC and CPSPAN start from the same autoencoders, D-500-500-2000-d and back, of
Xie, Girshick and Farhadi, "Unsupervised deep embedding for clustering analysis", ICML 2016. Biases
start at zero, where the authors' codes have PyTorch's draws, and a last, smaller batch makes a step
like any other, where most of their loaders drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfedmvc import nn
from jaxfedmvc.losses import l2_normalize, masked_mean, mean_squared_error, ntxent
from jaxfedmvc.nn import apply

PyTree = Any


class Networks(NamedTuple):
    """Parameters of a method.

    Attributes:
      encoders: E^v by view, those of equal shapes stacked if that was asked for.
      decoders: D^v by view, likewise.
      heads: What is on top of all encoders, by name.
    """

    encoders: nn.Alike
    decoders: nn.Alike
    heads: dict[str, PyTree]


def init_networks(
    key: Array,
    views: Sequence[Array],
    hidden: Sequence[int],
    latent_dim: int,
    heads: Mapping[str, tuple[int, Sequence[int]]] | None = None,
    stack: bool | None = False,
) -> Networks:
    """Returns fresh parameters, of one draw.

    Args:
      key: PRNG key.
      views: [N, D_v] each; only their widths are used.
      hidden: Widths of the encoders' hidden layers; the decoders mirror them.
      latent_dim: Width of what the encoders return.
      heads: By name `(n_inputs, widths)`.
      stack: Whether networks of views of equal width are trained as one stack, in half the kernels
        for two views; None: on accelerators.
    """
    heads, shapes = heads or {}, {}
    for v, x in enumerate(views):
        shapes["encoder", v] = x.shape[1], (*hidden, latent_dim)
        shapes["decoder", v] = latent_dim, (*hidden[::-1], x.shape[1])
    drawn = nn.init_mlps(key, shapes | {("head", name): shape for name, shape in heads.items()})
    encoders, decoders = (
        nn.alike({v: drawn[part, v] for v in range(len(views))}, nn.stacks(stack))
        for part in ("encoder", "decoder")
    )
    return Networks(encoders, decoders, {name: drawn["head", name] for name in heads})


def encode(networks: Networks, views: Sequence[Array]) -> Array:
    """Computes Z^v of all views, [V, N, d]."""
    encoded = nn.each(apply, networks.encoders, dict(enumerate(views)))
    return jnp.stack([encoded[v] for v in range(len(views))])


def reconstruction_loss(networks: Networks, views: Sequence[Array], z: Array, seen: Array) -> Array:
    """Computes the sum over views of the mean squared error of what is observed.

    Args:
      networks: Parameters.
      views: [N, D_v] each, finite where they are not observed.
      z: What `encode` returns of them, [V, N, d].
      seen: bool [N, V].
    """
    decoded = nn.each(apply, networks.decoders, dict(enumerate(z)))
    terms = [mean_squared_error(decoded[v], x, seen[:, v]) for v, x in enumerate(views)]
    return sum(terms, start=jnp.zeros(()))


def fit_autoencoders(
    key: Array,
    networks: Networks,
    opt_state: PyTree,
    views: Sequence[Array],
    mask: Array,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: Array | float,
) -> tuple[Networks, PyTree, Array]:
    """Minimises the reconstruction loss over rows that hold all views; see `nn.fit_on`.

    Args:
      key: PRNG key.
      networks: Where training starts; its heads stay.
      opt_state: State of Adam.
      views: [N, D_v] each.
      mask: Which rows to fit, bool [N].
      epochs: Number of passes.
      batch_size: Rows in a step.
      learning_rate: Adam's step size.
    """

    def loss(networks: Networks, views: tuple[Array, ...], mask: Array) -> Array:
        seen = jnp.repeat(mask[:, None], len(views), axis=1)
        return reconstruction_loss(networks, views, encode(networks, views), seen)

    return nn.fit_on(
        key,
        networks,
        opt_state,
        loss,
        tuple(views),
        mask,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
    )


# --- Normalisation --------------------------------------------------------------------------------


def init_norm(*shape: int) -> dict[str, Array]:
    """Returns parameters that leave what was normalised as it is; for the functions below."""
    return {"scale": jnp.ones(shape), "bias": jnp.zeros(shape)}


def batch_norm(x: Array, params: PyTree, mask: Array) -> Array:
    """Normalises features of `x` [B, d] by mean and variance of the real rows, and scales them."""
    real, n = mask[:, None], jnp.maximum(jnp.sum(mask), 1)
    centred = x - jnp.sum(jnp.where(real, x, 0.0), axis=0, keepdims=True) / n
    variance = jnp.sum(jnp.where(real, centred, 0.0) ** 2, axis=0, keepdims=True) / n
    return centred * lax.rsqrt(variance + 1e-5) * params["scale"][None] + params["bias"][None]


def layer_norm(x: Array, params: PyTree) -> Array:
    """Normalises each row of [rows, d], and scales features."""
    x = x - jnp.mean(x, axis=1, keepdims=True)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-5)
    return x * params["scale"][None] + params["bias"][None]


# --- Terms of losses ------------------------------------------------------------------------------


def sum_over_pairs(loss: Callable[[PyTree, PyTree], Array], per_view: PyTree) -> Array:
    """Sums `loss(of view v, of view w)` over the pairs v < w.

    Args:
      loss: A function of two views, returning a scalar.
      per_view: Arrays with leading axis [V].
    """
    n_views = len(jax.tree.leaves(per_view)[0])
    if n_views == 1:
        return jnp.zeros(())
    first, second = np.triu_indices(n_views, 1)
    left, right = (jax.tree.map(lambda a, i=i: a[i], per_view) for i in (first, second))
    return jnp.sum(jax.vmap(loss)(left, right))


def columns(q: Array, mask: Array) -> Array:
    """Returns the columns of `q` [rows, c] as unit rows [c, rows], zero where rows are masked."""
    return l2_normalize(jnp.where(mask[:, None], q, 0.0).T)


def column_contrast(q: Array, q_other: Array, mask: Array, tau: Array | float) -> Array:
    """Computes NT-Xent of the columns of two views' assignments [rows, c], by their cosines."""
    all_clusters = jnp.ones(q.shape[1], bool)
    return ntxent(columns(q, mask), columns(q_other, mask), all_clusters, tau)


def unevenness(q: Array, mask: Array) -> Array:
    """Computes log c + sum_k p_k log p_k of the mean assignment p; 0 where clusters are even.

    Authors take the logarithm of p itself, which is NaN once a cluster is empty.
    """
    p = jax.vmap(masked_mean, (1, None))(q, mask)
    p = p / jnp.maximum(jnp.sum(p), 1e-12)
    return jnp.where(jnp.any(mask), jnp.log(q.shape[1]) + jnp.sum(p * jnp.log(p + 1e-12)), 0.0)


# --- Neighbours -----------------------------------------------------------------------------------


def neighbours_by_view(z: Array, observed: Array, count: int) -> tuple[Array, Array]:
    """Finds for all rows i and views v, w the rows nearest in w among those that hold v and w.

    A row that holds v and w is its own neighbour; rows that lack v are what this is for.

    Args:
      z: [V, N, d]; rows of views that are not observed play no part.
      observed: bool [N, V].
      count: Most neighbours to find, static.

    Returns:
      Their inner products z_i^w . z_j^w in descending order, [N, V, V, count], -inf behind the last
      and where i lacks w, and which rows they are, int32 [N, V, V, count].
    """
    holds_both = observed.T[:, None] & observed.T[None]  # [V, V, N]
    count = min(count, len(observed))

    def of_row(row: tuple[Array, Array]) -> tuple[Array, Array]:
        z_row, seen = row
        products = jnp.einsum("wd,wnd->wn", z_row, z)[None]
        allowed = holds_both & seen[None, :, None]
        values, rows = lax.top_k(jnp.where(allowed, products, -jnp.inf), count)
        return values, rows

    return lax.map(of_row, (jnp.swapaxes(z, 0, 1), observed), batch_size=64)
