"""What the server computes: it fills in what agents lack, and finds clusters of all rows.

FCUIF's networks, which fill in and align, are in `networks.py`.

Arrays of all agents have the axes [N, A, ...], agents in the order of the views that they hold.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from jaxfedmvc.algorithms.fcuif.client import Upload, sharpen, soft_assignment
from jaxfedmvc.algorithms.fcuif.networks import Aligner, Imputer, extension
from jaxfedmvc.algorithms.fcuif.settings import FedDMVCConfig
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.losses import masked_mean


class Clusters(NamedTuple):
    """What the server finds from the uploads of all agents.

    Attributes:
      centroids: C [c, A, d].
      targets: P [N, c]; zero for padding.
      guides: Which rows agents are to follow, bool [N].
      labels: argmax qbar, int32 [N]; -1 for padding.
      embedding: Z with its missing blocks filled in, [N, A d]; zero for padding.
      imputed: Whether rows that are not complete guide agents.
      places: Where the server puts each agent's rows, int32 [N, A]; None: where they are.
    """

    centroids: Array
    targets: Array
    guides: Array
    labels: Array
    embedding: Array
    imputed: Array
    places: Array | None = None


def aggregate(
    key: Array,
    uploads: Upload,
    held: Array,
    before: Clusters | None,
    config: FedDMVCConfig,
    imputer: Imputer | None,
    align: Aligner | None = None,
    same: Array | None = None,
) -> Clusters:
    """Finds the clusters of all rows.

    Args:
      key: PRNG key.
      uploads: Z [N, A, d] and P [N, A, c] of all agents.
      held: Which agent holds which row, bool [N, A].
      before: What was found last time; None the first time.
      config: Static settings.
      imputer: FCUIF's networks; None: FedDMVC, which extends rows by prototypes.
      align: FCUIF's alignment, see `networks.network_aligner`; None: rows are aligned.
      same: Which rows are one sample at all agents, bool [N], for `align`.
    """
    key_complete, key_impute, key_all = jax.random.split(key, 3)
    real, complete = jnp.any(held, axis=1), jnp.all(held, axis=1)
    if same is not None:
        complete &= same
    z = l1_rows(uploads.z) if config.normalise == "l1" else uploads.z
    n, agents, width = z.shape
    first = kmeans(
        key_complete,
        z.reshape(n, -1),
        config.n_clusters,
        where=complete,
        n_init=config.n_init,
        centroids=None if before is None else before.centroids.reshape(-1, agents * width),
    )
    prototypes = first.centroids.reshape(-1, agents, width)
    # Agents have numbered their clusters each for itself until they have taken C over.
    p = uploads.p if before is not None else matched(uploads.p, first.labels, complete)
    places = None
    if align is not None and same is not None:
        key_impute, key_align = jax.random.split(key_impute)
        z, p, places = align(key_align, z, p, prototypes, complete, real & ~same)
    qbar = mean_over_agents(p, held)
    if imputer is None:
        filled = jnp.where(held[..., None], z, extension(qbar, prototypes))
    else:
        filled = imputer(key_impute, z, p, qbar, prototypes, held)
    embedding = jnp.where(real[:, None], filled.reshape(n, -1), 0.0)
    found = kmeans(key_all, embedding, config.n_clusters, where=real, n_init=config.n_init)
    targets = sharpen(soft_assignment(embedding, found.centroids), real)
    centroids = found.centroids.reshape(-1, agents, width)
    labels = jnp.where(real, jnp.argmax(qbar, axis=1), -1).astype(jnp.int32)
    imputed = jnp.bool_(False)
    if before is not None:
        old = jnp.argmax(before.targets, axis=1)
        order = renumbering(jnp.argmax(targets, axis=1), old, real, config.n_clusters)
        targets, centroids = targets[:, order], centroids[order]
        imputed = jnp.bool_(True)
        if imputer is not None:
            of_all, of_qbar = (
                simplified_silhouette(z, held, of, config.n_clusters)
                for of in (found.labels, labels)
            )
            imputed = of_all >= of_qbar
            centroids = jnp.where(imputed, centroids, prototypes)
    guides = complete | (real & imputed)
    return Clusters(centroids, targets, guides, labels, embedding, imputed, places)


def l1_rows(z: Array) -> Array:
    """Scales rows of `z` [..., d] so that absolute values sum to 1; a zero row stays zero."""
    total = jnp.sum(jnp.abs(z), axis=-1, keepdims=True)
    return z / jnp.where(total > 0, total, 1.0)


def mean_over_agents(p: Array, held: Array) -> Array:
    """Computes qbar_i [N, c], the mean of P^v_i over the agents that hold row i."""
    total = jnp.sum(jnp.where(held[..., None], p, 0.0), axis=1)
    return total / jnp.maximum(jnp.sum(held, axis=1), 1)[:, None]


def matched(p: Array, labels: Array, where: Array) -> Array:
    """Renumbers each agent's clusters, the columns of P [N, A, c], like `labels` [N]."""

    def of_agent(p: Array) -> Array:
        return p[:, renumbering(jnp.argmax(p, axis=1), labels, where, p.shape[1])]

    return jax.vmap(of_agent, in_axes=1, out_axes=1)(p)


def renumbering(new: Array, old: Array, where: Array, n_clusters: int) -> Array:
    """Returns which new cluster takes each old number, [c], so that most rows keep theirs.

    Args:
      new: Clusters, int [N].
      old: Clusters before, int [N].
      where: Which rows count, bool [N].
      n_clusters: c, static.
    """
    of_new, of_old = (jax.nn.one_hot(labels, n_clusters) for labels in (new, old))
    overlap = (of_new * where[:, None]).T @ of_old  # exact in any precision of the factors
    numbers, places = optax.assignment.hungarian_algorithm(-overlap)
    return jnp.zeros(n_clusters, jnp.int32).at[places].set(numbers.astype(jnp.int32))


def simplified_silhouette(z: Array, held: Array, labels: Array, n_clusters: int) -> Array:
    """Computes the mean over rows of (b - a) / max(a, b), of distances to centroids.

    a is the distance to the row's own cluster, b that to the nearest other. Only what agents hold
    counts, in centroids and distances, so that no filled-in value judges its own labels: the
    distance is over the agents that hold the row, and a cluster of which one of these holds nothing
    is far away. Rows without another cluster count as 0.

    Args:
      z: [N, A, d].
      held: bool [N, A].
      labels: Clusters, int [N]; -1 for padding.
      n_clusters: c, static.
    """
    member = jax.nn.one_hot(labels, n_clusters)[:, None] * held[..., None]  # [N, A, c]
    sizes = jnp.sum(member, axis=0)  # [A, c]
    sums = jnp.einsum("nac,nad->acd", member, z, precision=lax.Precision.HIGHEST)
    centroids = sums / jnp.maximum(sizes, 1)[..., None]

    def squares(z: Array, centroids: Array, sizes: Array, held: Array) -> Array:
        """Computes those of one agent, [N, c]; 0 in rows that it lacks."""
        distance = jnp.sum((z[:, None] - centroids[None]) ** 2, axis=-1)
        return jnp.where(held[:, None], jnp.where(sizes > 0, distance, jnp.inf), 0.0)

    total = jnp.sum(jax.vmap(squares, in_axes=(1, 0, 0, 1))(z, centroids, sizes, held), axis=0)
    distance = jnp.sqrt(jnp.where(jnp.any(sizes > 0, axis=0)[None], total, jnp.inf))
    own = jnp.arange(n_clusters)[None] == labels[:, None]
    a = jnp.min(jnp.where(own, distance, jnp.inf), axis=1)
    b = jnp.min(jnp.where(own, jnp.inf, distance), axis=1)
    largest = jnp.maximum(a, b)
    known = (labels >= 0) & jnp.isfinite(largest) & (largest > 0)
    value = jnp.where(known, (b - a) / jnp.where(known, largest, 1.0), 0.0)
    return masked_mean(value, labels >= 0)
