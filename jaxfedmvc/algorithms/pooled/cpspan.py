"""CPSPAN: autoencoders whose embeddings of the same sample are pulled together across views.

    first:  sum_v mean (X^v - D^v(E^v(X^v)))^2 over the rows of each view and its features
    then:   that + instance_weight * sum_{v<w} mean (1 - cos(z_i^v, z_i^w))^2 over paired rows
            + prototype_weight * the prototype term
    last:   missing embeddings are filled from neighbours, and k-means clusters all side by side

Source: Jin et al., "Deep incomplete multi-view clustering with cross-view partial sample and
prototype alignment", CVPR 2023, and the authors' code, github.com/jinjiaqi1998/CPSPAN.

Two things differ from that code. It looks for the neighbours of a missing instance by the
instance's own embedding, which it computes from the data that are said to be missing, and among
2000 rows at a time. Here they are sought in a view that the sample has: of all its views and all
samples that hold this view and the missing one, the pair with the greatest cosine decides whose
embedding is taken. And its prototype term draws the cosines of all pairs of embedding dimensions to
1, not those of matched ones; its relaxed permutation is in a file that nothing calls. This form is
the option "code". Which form the paper itself computes could not be established, so that the term
is off by default.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array

from jaxfedmvc import checks, nn
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.pooled.adapter import Fitted, pooled
from jaxfedmvc.algorithms.pooled.networks import (
    Networks,
    columns,
    encode,
    fit_autoencoders,
    init_networks,
    neighbours_by_view,
    reconstruction_loss,
    sum_over_pairs,
)
from jaxfedmvc.algorithms.pooled.rows import is_real, min_max
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.federation import Federation
from jaxfedmvc.losses import cosine, l2_normalize, masked_mean
from jaxfedmvc.precision import in_32_bits


@dataclasses.dataclass(frozen=True)
class CPSPANConfig:
    """Static settings of CPSPAN.

    Attributes:
      n_clusters: Number of clusters.
      hidden: Widths of the encoders' hidden layers; the decoders mirror them.
      latent_dim: Width of a view's embedding. The authors' code has 10 for all sets, and a comment
        there that this is the number of clusters.
      pretrain_epochs: Epochs of reconstruction alone.
      align_epochs: Epochs of reconstruction and alignment.
      batch_size: Rows in one step of training.
      prototypes: The prototype term. "none": off. "code": that of the authors' code, which draws
        the cosines of all pairs of embedding dimensions to 1.
      n_init: Starts of the last k-means, of which the best is kept.
      stack_views: Whether networks of views of equal width are trained as one stack; None: on
        accelerators. See `nn.Alike`.
    """

    n_clusters: int
    hidden: tuple[int, ...] = (500, 500, 2000)
    latent_dim: int = 10
    pretrain_epochs: int = 200
    align_epochs: int = 50
    batch_size: int = 256
    prototypes: Literal["none", "code"] = "none"
    n_init: int = 10
    stack_views: bool | None = None

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(
            self, 1, "n_clusters", "latent_dim", "pretrain_epochs", "batch_size", "n_init"
        )
        checks.at_least(self, 0, "align_epochs")
        checks.choices(self)
        checks.widths(self, "hidden")


@struct.dataclass
class CPSPANHyperparams:
    """Numbers of CPSPAN that may be traced.

    Attributes:
      learning_rate: Adam's step size in pre-training.
      align_rate: That of a fresh Adam in alignment.
      instance_weight: Weight of the alignment of samples.
      prototype_weight: Weight of the prototype term, where there is one.
    """

    learning_rate: Array | float = 5e-4
    align_rate: Array | float = 1e-4
    instance_weight: Array | float = 1e-3
    prototype_weight: Array | float = 1e-3


def cpspan(
    config: CPSPANConfig, hyperparams: CPSPANHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns CPSPAN on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: nobody holds a view that some
        clients lack together with one that they have, or there are fewer samples than clusters.
    """
    hyper = checks.settings(config, CPSPANConfig, hyperparams, CPSPANHyperparams)
    checks.numbers(
        hyper,
        {
            "learning_rate": checks.POSITIVE,
            "align_rate": checks.POSITIVE,
            "instance_weight": checks.NOT_NEGATIVE,
            "prototype_weight": checks.NOT_NEGATIVE,
        },
    )
    return pooled(fit, config, hyper, _check_pairs)


def _check_pairs(federation: Federation) -> None:
    """Checks that each missing view can be filled: see `fill`."""
    kinds = [set(cohort.view_ids) for cohort in federation.cohorts]
    for kind in kinds:
        for v in set(range(federation.n_views)) - kind:
            if not any(v in other and other & kind for other in kinds):
                raise ValueError(
                    f"cpspan: clients hold the views {tuple(sorted(kind))} and lack view {v}, which"
                    " nobody holds together with one of them; allowed are federations where"
                    " somebody does"
                )


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
def fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: CPSPANConfig,
    hyperparams: CPSPANHyperparams,
) -> Fitted:
    """Clusters N rows, of which some views are missing; see `pooled.adapter.Fit`."""
    x, real = min_max(views, observed), is_real(observed)
    key_init, key_rows, key_first, key_then, key_kmeans = jax.random.split(key, 5)
    networks = init_networks(
        key_init, x, config.hidden, config.latent_dim, stack=config.stack_views
    )

    rows, mask = unpaired(key_rows, x, observed)
    networks, _, first = fit_autoencoders(
        key_first,
        networks,
        optax.adam(hyperparams.learning_rate).init(networks),
        rows,
        mask,
        epochs=config.pretrain_epochs,
        batch_size=config.batch_size,
        learning_rate=hyperparams.learning_rate,
    )

    def loss(networks: Networks, rows: tuple[tuple[Array, ...], Array], mask: Array) -> Array:
        x, seen = rows[0], rows[1] & mask[:, None]
        z = encode(networks, x)
        return reconstruction_loss(networks, x, z, seen) + alignment(z, seen, config, hyperparams)

    networks, then = nn.fit(
        key_then,
        networks,
        loss,
        (x, observed),
        real,
        epochs=config.align_epochs,
        batch_size=config.batch_size,
        learning_rate=hyperparams.align_rate,
    )
    z = fill(encode(networks, x), observed)
    embedding = jnp.concatenate(list(z), axis=1) * real[:, None]
    found = kmeans(key_kmeans, embedding, config.n_clusters, where=real, n_init=config.n_init)
    return Fitted(found.labels, embedding, jnp.concatenate([first, then]))


def unpaired(
    key: Array, views: tuple[Array, ...], observed: Array
) -> tuple[tuple[Array, ...], Array]:
    """Returns the observed rows of each view in an order of its own, and which places are filled.

    Views with fewer rows than others have rows twice, so that all fill as many places.

    Args:
      key: PRNG key.
      views: [N, D_v] each.
      observed: bool [N, V].
    """
    counts = jnp.sum(observed, axis=0)
    places = jnp.arange(len(observed))
    rows = []
    for v, x in enumerate(views):
        draws = jax.random.uniform(jax.random.fold_in(key, v), places.shape)
        order = jnp.argsort(jnp.where(observed[:, v], draws, jnp.inf))
        rows.append(x[order[places % jnp.maximum(counts[v], 1)]])
    return tuple(rows), places < jnp.max(counts)


def alignment(z: Array, seen: Array, config: CPSPANConfig, hyper: CPSPANHyperparams) -> Array:
    """Computes the weighted terms of all pairs of views; z [V, rows, d], seen bool [rows, V]."""

    def term(left: tuple[Array, Array], right: tuple[Array, Array]) -> Array:
        paired = left[1] & right[1]
        value = hyper.instance_weight * instance_term(left[0], right[0], paired)
        if config.prototypes == "code":
            value += hyper.prototype_weight * prototype_term(left[0], right[0], paired)
        return value

    return sum_over_pairs(term, (z, seen.T))


def instance_term(z: Array, z_other: Array, paired: Array) -> Array:
    """Computes the mean of (1 - cos)^2 of the paired rows of two views, [rows, d] each."""
    return masked_mean((1 - cosine(z, z_other)) ** 2, paired)


def prototype_term(z: Array, z_other: Array, paired: Array) -> Array:
    """Computes the mean of (1 - cos)^2 of all pairs of columns; 0 without paired rows."""
    cosines = columns(z, paired) @ columns(z_other, paired).T
    return jnp.where(jnp.any(paired), jnp.mean((1 - cosines) ** 2), 0.0)


def fill(z: Array, observed: Array) -> Array:
    """Puts another row's embedding in the place of each that is missing.

    It is that of the row with the greatest cosine in a view that both have, among rows that hold
    the missing view.

    Args:
      z: [V, N, d].
      observed: bool [N, V].
    """
    cosines, rows = neighbours_by_view(l2_normalize(z), observed, 1)  # [N, V, V, 1]
    view = jnp.argmax(cosines, axis=2, keepdims=True)
    nearest = jnp.take_along_axis(rows, view, axis=2)[:, :, 0, 0].T  # [V, N]
    found = jnp.take_along_axis(z, nearest[:, :, None], axis=1)
    return jnp.where(observed.T[:, :, None], z, found)
