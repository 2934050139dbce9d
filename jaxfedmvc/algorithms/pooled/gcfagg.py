"""GCFAgg: samples attend to each other, and views are contrasted with what they gather.

    z^v = E^v(x^v),  h^v = l2(W z^v),  all views share W
    hh, S = l2(U T(z^1 .. z^V)) and the attention of T, one layer of a transformer whose sequence
    is the batch: each row gathers from all rows like it

    first:   sum_v mean (x^v - D^v(z^v))^2 over rows and features
    then:    that + sum_v NT-Xent(h^v, hh), where rows i, j repel each other by 1 - S_ij as much
    labels:  k-means of hh

Source: Yan et al., "GCFAgg: Global and cross-view feature aggregation for multi-view clustering",
CVPR 2023, and the authors' code, github.com/Galaxy922/GCFAggMVC, with what they say there of how S
comes out of PyTorch's layer: after dropout, and with its gradient.

Values are taken as they come: scale pixels to [0, 1], and other features by minimum and maximum.
The authors compute hh of the clustered data in batches of the file's order, where samples of
files that are sorted by class attend to their own class alone. Here the batches are random.
PyTorch's Adam counts steps for each parameter, so that what only the second phase uses starts with
a fresh count there. Here it shares that of the autoencoders, and its first few hundred steps are
larger, at most seven times.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import Array, lax

from jaxfedmvc import checks, nn
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.pooled.adapter import Fitted, needs_complete_rows, pooled
from jaxfedmvc.algorithms.pooled.networks import (
    Networks,
    apply,
    encode,
    fit_autoencoders,
    init_networks,
    init_norm,
    layer_norm,
    reconstruction_loss,
)
from jaxfedmvc.algorithms.pooled.rows import blank, is_real
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.losses import l2_normalize, log_sum_exp, masked_mean
from jaxfedmvc.precision import in_32_bits


@dataclasses.dataclass(frozen=True)
class GCFAggConfig:
    """Static settings of GCFAgg.

    Attributes:
      n_clusters: Number of clusters.
      hidden: Widths of the encoders' hidden layers; the decoders mirror them.
      latent_dim: Width of a view's z^v.
      feature_dim: Width of h^v and hh.
      attention_hidden: Hidden width of what follows attention in the transformer layer.
      pretrain_epochs: Epochs of reconstruction alone.
      contrast_epochs: Epochs of reconstruction and contrasts.
      batch_size: Rows in one step of training, and rows that attend to each other.
      n_init: Starts of the last k-means, of which the best is kept.
      stack_views: Whether networks of views of equal width are trained as one stack; None: on
        accelerators. See `nn.Alike`.
    """

    n_clusters: int
    hidden: tuple[int, ...] = (500, 500, 2000)
    latent_dim: int = 512
    feature_dim: int = 128
    attention_hidden: int = 256
    pretrain_epochs: int = 200
    contrast_epochs: int = 100
    batch_size: int = 256
    n_init: int = 100
    stack_views: bool | None = None

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "latent_dim", "feature_dim", "attention_hidden")
        checks.at_least(self, 1, "pretrain_epochs", "batch_size", "n_init")
        checks.at_least(self, 0, "contrast_epochs")
        checks.choices(self)
        checks.widths(self, "hidden")


@struct.dataclass
class GCFAggHyperparams:
    """Numbers of GCFAgg that may be traced.

    Attributes:
      learning_rate: Adam's step size in both phases.
      tau: Temperature of the contrast.
      dropout: Share of the transformer layer's entries that training leaves out.
    """

    learning_rate: Array | float = 3e-4
    tau: Array | float = 0.5
    dropout: Array | float = 0.1


def gcfagg(
    config: GCFAggConfig, hyperparams: GCFAggHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns GCFAgg on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: a client lacks a view, or there
        are fewer samples than clusters.
    """
    hyper = checks.settings(config, GCFAggConfig, hyperparams, GCFAggHyperparams)
    positive = dict.fromkeys(("learning_rate", "tau"), checks.POSITIVE)
    checks.numbers(hyper, positive | {"dropout": checks.BELOW_ONE})
    return pooled(fit, config, hyper, needs_complete_rows("gcfagg"))


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
def fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: GCFAggConfig,
    hyperparams: GCFAggHyperparams,
) -> Fitted:
    """Clusters N rows that have all views; see `pooled.adapter.Fit`."""
    x, real = blank(views, observed), is_real(observed)
    key_init, key_first, key_then, key_order, key_kmeans = jax.random.split(key, 5)
    networks = init(key_init, x, config)
    batches: dict[str, Any] = {
        "batch_size": config.batch_size,
        "learning_rate": hyperparams.learning_rate,
    }
    state = optax.adam(hyperparams.learning_rate).init(networks)  # one for both phases
    networks, state, first = fit_autoencoders(
        key_first, networks, state, x, real, epochs=config.pretrain_epochs, **batches
    )

    def loss(networks: Networks, x: tuple[Array, ...], mask: Array, key: Array) -> Array:
        z = encode(networks, x)
        h = l2_normalize(apply(networks.heads["view"], z))
        width = config.latent_dim * len(x)
        kept = drop(key, hyperparams.dropout, len(mask), width, config.attention_hidden)
        gathered, attention = aggregate(networks, z, mask, kept)
        terms = [
            structure_contrast(h_view, gathered, attention, mask, hyperparams.tau) for h_view in h
        ]
        seen = jnp.repeat(mask[:, None], len(x), axis=1)
        return reconstruction_loss(networks, x, z, seen) + sum(terms)

    networks, _, then = nn.fit_on(
        key_then,
        networks,
        state,
        loss,
        x,
        real,
        epochs=config.contrast_epochs,
        keyed=True,
        **batches,
    )
    embedding = aggregate_all(key_order, networks, x, real, config.batch_size)
    found = kmeans(key_kmeans, embedding, config.n_clusters, where=real, n_init=config.n_init)
    return Fitted(found.labels, embedding, jnp.concatenate([first, then]))


def init(key: Array, views: tuple[Array, ...], config: GCFAggConfig) -> Networks:
    """Returns fresh parameters: the transformer layer's are among the heads."""
    width = config.latent_dim * len(views)
    heads = {
        "view": (config.latent_dim, (config.feature_dim,)),
        "common": (width, (config.feature_dim,)),
        "queries_keys_values": (width, (3 * width,)),
        "attended": (width, (width,)),
        "forward_in": (width, (config.attention_hidden,)),
        "forward_out": (config.attention_hidden, (width,)),
    }
    networks = init_networks(
        key, views, config.hidden, config.latent_dim, heads, config.stack_views
    )
    # PyTorch draws these three together from +-sqrt(6 / (width + 3 width)).
    together = jax.tree.map(lambda w: 1.5**0.5 * w, networks.heads["queries_keys_values"])
    norms = {name: init_norm(width) for name in ("norm_attention", "norm_forward")}
    return networks._replace(heads=networks.heads | norms | {"queries_keys_values": together})


# --- The transformer layer ------------------------------------------------------------------------


class Kept(NamedTuple):
    """What dropout leaves of the layer's parts: factors of entries, 0 or 1/(1 - rate).

    Attributes:
      attended: Of what attention returns, [rows, width].
      inner: Of the hidden layer after it, [rows, attention_hidden].
      outer: Of what this layer returns, [rows, width].
      attention: Of S, [rows, rows].
    """

    attended: Array | float = 1.0
    inner: Array | float = 1.0
    outer: Array | float = 1.0
    attention: Array | float = 1.0


def drop(key: Array, rate: Array | float, n_rows: int, width: int, hidden: int) -> Kept:
    """Draws what dropout leaves; an entry depends on its row and column, not on how many rows."""
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(n_rows))
    # One draw for all, with the part that grows with the rows at its end.
    draws = jax.vmap(lambda key: jax.random.uniform(key, (2 * width + hidden + n_rows,)))(keys)
    kept = jnp.where(draws >= rate, 1 / (1 - rate), 0.0)
    return Kept(*jnp.split(kept, np.cumsum([width, hidden, width]), axis=1))


def aggregate(
    networks: Networks, z: Array, mask: Array, kept: Kept | None = None
) -> tuple[Array, Array]:
    """Computes hh [rows, feature_dim] and S [rows, rows] of a batch z [V, rows, d].

    The layer normalises after each of its two sums, and has one head.
    """
    heads, kept = networks.heads, kept or Kept()
    rows = jnp.concatenate(list(z), axis=1)
    queries, keys, values = jnp.split(apply(heads["queries_keys_values"], rows), 3, axis=1)
    products = queries @ keys.T / rows.shape[1] ** 0.5
    # A finite number, so that batches without any real row have finite gradients.
    weights = jax.nn.softmax(jnp.where(mask[None], products, -1e9), axis=1)
    attention = weights * kept.attention
    rows = rows + apply(heads["attended"], attention @ values) * kept.attended
    rows = layer_norm(rows, heads["norm_attention"])
    inner = jax.nn.relu(apply(heads["forward_in"], rows)) * kept.inner
    rows = rows + apply(heads["forward_out"], inner) * kept.outer
    rows = layer_norm(rows, heads["norm_forward"])
    return l2_normalize(apply(heads["common"], rows)), attention


def aggregate_all(
    key: Array, networks: Networks, x: tuple[Array, ...], real: Array, batch_size: int
) -> Array:
    """Computes hh of all rows [N, feature_dim], which attend to each other in random batches.

    Args:
      key: For the batches.
      networks: Parameters.
      x: [N, D_v] each.
      real: bool [N]; the other rows get zeros.
      batch_size: Rows of a batch.
    """
    n, n_batches = len(real), -(-len(real) // batch_size)
    draws = jax.random.uniform(key, (n,))
    order = jnp.argsort(jnp.where(real, draws, jnp.inf))
    padded = jnp.pad(order, (0, n_batches * batch_size - n)).reshape(n_batches, batch_size)
    places = jnp.arange(n_batches * batch_size).reshape(n_batches, batch_size)

    def of_batch(batch: tuple[Array, Array]) -> Array:
        index, place = batch
        z = encode(networks, [x_v[index] for x_v in x])
        return aggregate(networks, z, place < jnp.sum(real))[0]

    gathered = lax.map(of_batch, (padded, places)).reshape(n_batches * batch_size, -1)[:n]
    return gathered[jnp.argsort(order)] * real[:, None]


def structure_contrast(
    h: Array, gathered: Array, attention: Array, mask: Array, tau: Array | float
) -> Array:
    """Computes NT-Xent of [h; hh], in which the logit of rows i and j is scaled by 1 - S_ij.

    Between the halves too; positive pairs, of the same row in both, are not scaled.

    Args:
      h: h^v of a batch, [rows, d].
      gathered: hh, [rows, d].
      attention: S, [rows, rows].
      mask: bool [rows].
      tau: Temperature.
    """
    n = len(mask)
    both, real = jnp.concatenate([h, gathered]), jnp.concatenate([mask, mask])
    logits = both @ both.T / tau
    partner = np.roll(np.eye(2 * n, dtype=bool), n, axis=1)
    scaled = jnp.where(partner, logits, logits * (1 - jnp.tile(attention, (2, 2))))
    others = real[:, None] & real[None] & ~np.eye(2 * n, dtype=bool)
    positive = jnp.tile(jnp.sum(h * gathered, axis=1) / tau, 2)
    return masked_mean(log_sum_exp(scaled, others) - positive, real)
