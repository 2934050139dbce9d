"""MFLVC: low-level features reconstruct, high-level features and cluster assignments agree.

    z^v = E^v(x^v),  h^v = l2(W z^v),  q^v = softmax(U z^v); all views share W and U

    first:   sum_v mean (x^v - D^v(z^v))^2 over rows and features
    then:    that + sum_{v<w} [NT-Xent(h^v, h^w) + NT-Xent(columns of q^v, of q^w)
             + unevenness(q^v) + unevenness(q^w)]
    last:    each view's high-level features are clustered once, and q^v is fitted to the clusters
             found, which are named after argmax q^v anew in every step
    labels:  argmax of the mean of q^v

Source: Xu et al., "Multi-level feature learning for contrastive multi-view clustering", CVPR 2022,
and the authors' code, github.com/SubmissionsIn/MFLVC.

Values are taken as they come: scale pixels to [0, 1], and other features by minimum and maximum.
The authors choose epochs and seeds for each data set; here one setting holds for all. PyTorch's
Adam counts steps for each parameter, so that W and U start with a fresh count in the second phase.
Here they share the count of the autoencoders, and their first few hundred steps are larger, at most
seven times.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from jaxfedmvc import checks, nn
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.pooled.adapter import (
    Fitted,
    needs_complete_rows,
    needs_varied_views,
    needs_views,
    pooled,
)
from jaxfedmvc.algorithms.pooled.networks import (
    Networks,
    apply,
    column_contrast,
    encode,
    fit_autoencoders,
    init_networks,
    reconstruction_loss,
    sum_over_pairs,
    unevenness,
)
from jaxfedmvc.algorithms.pooled.rows import blank, is_real, min_max
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.losses import l2_normalize, masked_mean, ntxent
from jaxfedmvc.precision import in_32_bits


@dataclasses.dataclass(frozen=True)
class MFLVCConfig:
    """Static settings of MFLVC.

    Attributes:
      n_clusters: Number of clusters.
      hidden: Widths of the encoders' hidden layers; the decoders mirror them.
      latent_dim: Width of the low-level features z^v.
      feature_dim: Width of the high-level features h^v.
      pretrain_epochs: Epochs of reconstruction alone.
      contrast_epochs: Epochs with contrasts. The authors take 10 for BDGP, 50 for MNIST-USPS and
        100 for Multi-Fashion.
      tune_epochs: Steps, of all rows, that fit assignments to clusters of high-level features.
      batch_size: Rows in one step of the other phases.
      softmax_twice: Whether the last phase's cross-entropy takes q for logits, as the authors'
        code does, and not for the probabilities that it is.
      n_init: Starts of each view's k-means, of which the best is kept.
      stack_views: Whether networks of views of equal width are trained as one stack; None: on
        accelerators. See `nn.Alike`.
    """

    n_clusters: int
    hidden: tuple[int, ...] = (500, 500, 2000)
    latent_dim: int = 512
    feature_dim: int = 128
    pretrain_epochs: int = 200
    contrast_epochs: int = 50
    tune_epochs: int = 50
    batch_size: int = 256
    softmax_twice: bool = True
    n_init: int = 100
    stack_views: bool | None = None

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "latent_dim", "feature_dim", "pretrain_epochs")
        checks.at_least(self, 1, "batch_size", "n_init")
        checks.at_least(self, 0, "contrast_epochs", "tune_epochs")
        checks.choices(self)
        checks.widths(self, "hidden")


@struct.dataclass
class MFLVCHyperparams:
    """Numbers of MFLVC that may be traced.

    Attributes:
      learning_rate: Adam's step size in all phases.
      tau_feature: Temperature of the contrast of high-level features.
      tau_label: Temperature of the contrast of clusters.
    """

    learning_rate: Array | float = 3e-4
    tau_feature: Array | float = 0.5
    tau_label: Array | float = 1.0


def mflvc(config: MFLVCConfig, hyperparams: MFLVCHyperparams | None = None) -> FederatedAlgorithm:
    """Returns MFLVC on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: there is one view only, or one is
        constant, a client lacks a view, or there are fewer samples than clusters.
    """
    hyper = checks.settings(config, MFLVCConfig, hyperparams, MFLVCHyperparams)
    checks.numbers(
        hyper, dict.fromkeys(("learning_rate", "tau_feature", "tau_label"), checks.POSITIVE)
    )
    two = needs_views("mflvc", 2, "contrasts views")
    varied = needs_varied_views("mflvc", "may draw all clusters into one")
    return pooled(fit, config, hyper, two, needs_complete_rows("mflvc"), varied)


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
def fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: MFLVCConfig,
    hyperparams: MFLVCHyperparams,
) -> Fitted:
    """Clusters N rows that have all views; see `pooled.adapter.Fit`."""
    x, real = blank(views, observed), is_real(observed)
    key_init, key_first, key_then, key_clusters, key_last = jax.random.split(key, 5)
    heads = {
        "feature": (config.latent_dim, (config.feature_dim,)),
        "label": (config.latent_dim, (config.n_clusters,)),
    }
    networks = init_networks(
        key_init, x, config.hidden, config.latent_dim, heads, config.stack_views
    )
    batches: dict[str, Any] = {
        "batch_size": config.batch_size,
        "learning_rate": hyperparams.learning_rate,
    }
    state = optax.adam(hyperparams.learning_rate).init(networks)  # one for all phases
    networks, state, first = fit_autoencoders(
        key_first, networks, state, x, real, epochs=config.pretrain_epochs, **batches
    )

    def loss(networks: Networks, x: tuple[Array, ...], mask: Array) -> Array:
        z = encode(networks, x)
        seen = jnp.repeat(mask[:, None], len(x), axis=1)
        return reconstruction_loss(networks, x, z, seen) + contrasts(networks, z, mask, hyperparams)

    networks, state, then = nn.fit_on(
        key_then, networks, state, loss, x, real, epochs=config.contrast_epochs, **batches
    )

    clusters = feature_clusters(key_clusters, networks, x, real, config)

    def tuning_loss(networks: Networks, x: tuple[Array, ...], mask: Array) -> Array:
        logits = apply(networks.heads["label"], encode(networks, x))
        return tuning(logits, clusters, mask, config)

    networks, _, last = nn.fit_on(
        key_last,
        networks,
        state,
        tuning_loss,
        x,
        real,
        epochs=config.tune_epochs,
        **(batches | {"batch_size": len(real)}),
    )
    q = jax.nn.softmax(apply(networks.heads["label"], encode(networks, x)))
    mean = jnp.mean(q, axis=0) * real[:, None]
    labels = jnp.where(real, jnp.argmax(mean, axis=1).astype(jnp.int32), -1)
    return Fitted(labels, mean, jnp.concatenate([first, then, last]))


def contrasts(networks: Networks, z: Array, mask: Array, hyper: MFLVCHyperparams) -> Array:
    """Computes what the second phase adds, of low-level features [V, rows, d].

    An assignment's unevenness counts once for every pair that its view is in.
    """

    def pair(left: tuple[Array, Array], right: tuple[Array, Array]) -> Array:
        (h, q), (h_other, q_other) = left, right
        features = ntxent(h, h_other, mask, hyper.tau_feature)
        labels = column_contrast(q, q_other, mask, hyper.tau_label)
        return features + labels + unevenness(q, mask) + unevenness(q_other, mask)

    h = l2_normalize(apply(networks.heads["feature"], z))
    return sum_over_pairs(pair, (h, jax.nn.softmax(apply(networks.heads["label"], z))))


def feature_clusters(
    key: Array, networks: Networks, x: tuple[Array, ...], real: Array, config: MFLVCConfig
) -> Array:
    """Clusters each view's high-level features, scaled to [0, 1], by k-means; int32 [V, N]."""
    h = l2_normalize(apply(networks.heads["feature"], encode(networks, x)))
    scaled = jnp.stack(min_max(list(h), jnp.repeat(real[:, None], len(h), axis=1)))

    def of_view(keyed: tuple[Array, Array]) -> Array:
        return kmeans(*keyed, config.n_clusters, where=real, n_init=config.n_init).labels

    return jax.lax.map(of_view, (jax.random.split(key, len(h)), scaled))


def tuning(logits: Array, clusters: Array, mask: Array, config: MFLVCConfig) -> Array:
    """Computes the sum over views of the cross-entropy of q to clusters under their best names.

    Args:
      logits: Of q, [V, rows, c].
      clusters: int32 [V, rows]; -1 where rows are masked.
      mask: bool [rows].
      config: Settings.
    """

    def of_view(logits: Array, clusters: Array) -> Array:
        q = jax.nn.softmax(logits)
        named = names(clusters, jnp.argmax(q, axis=1), mask, config.n_clusters)
        logs = jax.nn.log_softmax(q if config.softmax_twice else logits)
        return -masked_mean(jnp.take_along_axis(logs, named[:, None], axis=1)[:, 0], mask)

    return jnp.sum(jax.vmap(of_view)(logits, clusters))


def names(clusters: Array, predicted: Array, mask: Array, n_clusters: int) -> Array:
    """Renames `clusters` one-to-one so that most rows are as `predicted`; int32 [rows]."""
    one_hot = [jax.nn.one_hot(labels, n_clusters) for labels in (clusters, predicted)]
    shared = (one_hot[0] * mask[:, None]).T @ one_hot[1]
    rows, columns = optax.assignment.hungarian_algorithm(-shared)
    return jnp.zeros(n_clusters, columns.dtype).at[rows].set(columns)[clusters]
