"""Clusters of single views, learned from clients that hold all views. Not in the paper.

Eq. (12) puts a row of a partial client to the centroid that its view's H is nearest to, and eq. (5)
draws that H towards the joint H without ever asking which cluster it falls into. Clients with all
views know the cluster of each of their rows by all of them: with one view of these rows that is a
labelled set. A linear classifier on random features phi(x) (Rahimi and Recht, "Random features for
large-scale kernel machines", NeurIPS 2007) is fitted to it, by ridge regression of the indicators:

    W = (sum phi phi^T + ridge I)^-1 sum phi (y - share)^T,    cluster = argmax W^T phi + share

The sums are over the rows of all these clients, who send theirs, so that W is what one client with
all rows would find. Half of the features are of a view's own features, the other half of its Z.

WHAT THE SUMS GIVE AWAY. phi is a function that everybody knows. Where a client has fewer rows than
there are features, sum phi phi^T has their number as its rank: a row lies in its span exactly if it
is one of the client's, and rows can be found from it. Smallest clusters or not, a server that reads
such sums one by one reads rows. Secure aggregation shows it the sum of all clients alone, which is
of more rows than features where it should be.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import checks
from jaxfedmvc.algorithm import Phase, answer_nothing, keep
from jaxfedmvc.algorithms.fmcsc.centroids import assign_rows
from jaxfedmvc.algorithms.fmcsc.client import ClientState
from jaxfedmvc.algorithms.fmcsc.networks import Kind, Model, PyTree, Views, branch, features
from jaxfedmvc.algorithms.fmcsc.server import ServerState
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig, FMCSCHyperparams
from jaxfedmvc.algorithms.fmcsc.training import Info
from jaxfedmvc.federation import Cohort, Federation

# Of the regression, unless hyper-parameters have one.
RIDGE = 0.3
_EXACT = jax.lax.Precision.HIGHEST


class Block(NamedTuple):
    """What random features are made of, before they are drawn.

    Attributes:
      centre: Mean of all rows, [d].
      scale: One over the root of their total variance, a scalar.
    """

    centre: jax.Array
    scale: jax.Array


class Taught(NamedTuple):
    """A classifier of rows in one kind of views.

    Attributes:
      seed: What all clients draw the random features from, uint32 [2].
      blocks: The views' own features, and Z.
      weights: W [m, K].
      shares: Share of each cluster in the rows that it was learned from, [K].
    """

    seed: jax.Array
    blocks: tuple[Block, Block]
    weights: jax.Array
    shares: jax.Array


class Known(NamedTuple):
    """What a client with all views keeps between the exchanges.

    Attributes:
      z: Z of its rows in each kind of views, [rows, latent_dim of each view side by side].
      labels: Their clusters, [rows]; -1 for padding, and for what is not taught.
    """

    z: dict[Kind, jax.Array]
    labels: jax.Array


# --- Exchanges ------------------------------------------------------------------------------------


def phases(config: FMCSCConfig, hyper: FMCSCHyperparams) -> tuple[Phase, ...]:
    """Returns the exchanges that follow the clustering: scales, sums, and the classifiers."""
    if not config.teach_features:
        return ()
    return (
        Phase(partial(_send_models, config), partial(_describe, config, hyper), _scale, "sum"),
        Phase(_send_blocks, partial(_sum_up, config), partial(_solve, config, hyper), "sum"),
        Phase(_send_taught, answer_nothing, keep, "sum"),
    )


def check_federation(config: FMCSCConfig, federation: Federation) -> None:
    """Warns where sums are of so few rows that they give these away; not while tracing.

    Raises:
      ValueError: There is one view, so that there is nothing to teach.
    """
    if federation.n_views == 1:
        raise checks.wrong("teach_features", config.teach_features, "0 with a single view")
    if federation.is_traced:
        return
    masks = [c.mask for c in federation.cohorts if federation.holds_all_views(c)]
    least = min(int(np.asarray(mask).sum(axis=1).min()) for mask in masks)
    if least <= config.teach_features:
        warnings.warn(
            f"teach_features: got {config.teach_features}, and a client with all views has"
            f" {least} rows: who reads its sums can find them. Use secure aggregation, or fewer"
            " features",
            stacklevel=2,
        )


def blank(config: FMCSCConfig, models: dict[Kind, Model], view_dims: tuple[int, ...]) -> PyTree:
    """Returns the classifiers that the server has at first; () where nothing is taught."""
    if not config.teach_features:
        return ()

    def one(kind: Kind) -> Taught:
        own, z = (
            Block(jnp.zeros(width), jnp.zeros(()))
            for width in (sum(view_dims[v] for v in kind), config.latent_dim * len(kind))
        )
        weights = jnp.zeros((config.teach_features, config.n_clusters))
        return Taught(jnp.zeros(2, jnp.uint32), (own, z), weights, jnp.zeros(config.n_clusters))

    return {kind: one(kind) for kind, model in models.items() if not model.view_heads}


def unknown(config: FMCSCConfig, models: dict[Kind, Model], cohort: Cohort) -> PyTree:
    """Returns what a cohort's clients know at first; () of those that are taught."""
    if not (config.teach_features and models[cohort.view_ids].view_heads):
        return ()
    shape, kinds = cohort.mask.shape, [k for k, model in models.items() if not model.view_heads]
    z = {kind: jnp.zeros((*shape, config.latent_dim * len(kind))) for kind in kinds}
    return Known(z, jnp.full(shape, -1, jnp.int32))


def assign_taught(
    config: FMCSCConfig,
    taught: Taught,
    model: Model,
    views: Views,
    mask: jax.Array,
    otherwise: jax.Array,
) -> jax.Array:
    """Returns the clusters of rows in some of the views, [rows]; -1 for padding.

    `otherwise` [rows] are those of the nearest centroids, for where nobody taught anything.
    """
    rows = side_by_side(views), _z(config, model, views)
    phi = random_features(config.teach_features, taught.seed, taught.blocks, rows)
    scores = jnp.matmul(phi, taught.weights, precision=_EXACT) + taught.shares[None]
    found = jnp.where(jnp.sum(taught.shares) > 0, jnp.argmax(scores, axis=1), otherwise)
    return jnp.where(mask, found, -1)


# --- The first exchange: scales -------------------------------------------------------------------


def _send_models(config: FMCSCConfig, server: ServerState, view_ids: Kind) -> PyTree:
    """Sends f_g, partial models that are no branches of it, and the centroids."""
    if not server.models[view_ids].view_heads:
        return ()
    if config.takes_branches:
        return {view_ids: server.models[view_ids]}, server.centroids
    return server.models, server.centroids


def _describe(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    sent: PyTree,
    state: ClientState,
    client: Cohort,
) -> tuple[ClientState, PyTree, Info]:
    """Sends the sum of the rows that are taught, their mean squared entries, and their number."""
    if not sent:
        return state, (), {}
    models, centroids = sent
    views, mask, full = client.by_view(), client.mask, client.view_ids
    h = features(config, models[full], views).h
    labels = assign_rows(config, hyper.limit, h, centroids, mask)
    if config.min_cluster_size is not None:
        sizes = jnp.sum(jax.nn.one_hot(labels, config.n_clusters), axis=0)
        labels = jnp.where(sizes[labels] >= config.min_cluster_size, labels, -1)
    if config.takes_branches:
        models = {(v,): branch(models[full], v) for v in full}
    is_taught = labels >= 0
    z, message = {}, {}
    for kind in sorted(models.keys() - {full}):
        held = {v: views[v] for v in kind}
        rows = side_by_side(held), _z(config, models[kind], held)
        rows = jax.tree.map(lambda x: jnp.where(is_taught[:, None], x, 0.0), rows)
        z[kind] = rows[1]
        # Divided by the width: masked sums have a largest number.
        message[kind] = tuple(
            (jnp.sum(x, axis=0), jnp.sum(jnp.square(x)) / x.shape[1]) for x in rows
        )
    n = jnp.sum(is_taught).astype(jnp.float32)
    return state._replace(known=Known(z, labels)), (message, n), {}


def _scale(
    key: jax.Array, server: ServerState, messages: tuple, counts: tuple
) -> tuple[ServerState, dict]:
    """Finds centres and scales, and draws the seeds of the random features."""
    message, n = _total(messages)
    n = jnp.maximum(n, 1.0)

    def block(total: jax.Array, squares: jax.Array) -> Block:
        centre = total / n
        variance = len(total) * squares / n - jnp.sum(jnp.square(centre))
        return Block(centre, jnp.where(variance > 0, jax.lax.rsqrt(variance), 1.0))

    taught = {
        kind: server.taught[kind]._replace(
            seed=jax.random.bits(jax.random.fold_in(key, place), (2,), jnp.uint32),
            blocks=tuple(block(*sums) for sums in message[kind]),
        )
        for place, kind in enumerate(sorted(message))
    }
    return server._replace(taught=taught), {}


# --- The second exchange: sums of random features -------------------------------------------------


def _send_blocks(server: ServerState, view_ids: Kind) -> PyTree:
    """Sends what rows are described by, and no weights yet."""
    if not server.models[view_ids].view_heads:
        return ()
    return {kind: (one.seed, one.blocks) for kind, one in server.taught.items()}


def _sum_up(
    config: FMCSCConfig, key: jax.Array, sent: PyTree, state: ClientState, client: Cohort
) -> tuple[ClientState, PyTree, Info]:
    """Sends, for each kind, sum phi phi^T as its upper triangle and sum phi y^T; and sum y."""
    if not sent:
        return state, (), {}
    views, known = client.by_view(), state.known
    y = jax.nn.one_hot(known.labels, config.n_clusters)
    is_taught = (known.labels >= 0)[:, None]
    above = np.triu_indices(config.teach_features)

    def sums(kind: Kind) -> tuple[jax.Array, jax.Array, jax.Array]:
        seed, blocks = sent[kind]
        rows = side_by_side({v: views[v] for v in kind})
        phi = random_features(config.teach_features, seed, blocks, (rows, known.z[kind]))
        phi = jnp.where(is_taught, phi, 0.0)
        gram, cross = (jnp.matmul(phi.T, other, precision=_EXACT) for other in (phi, y))
        return gram[above], cross, jnp.sum(phi, axis=0)

    return state, ({kind: sums(kind) for kind in sent}, jnp.sum(y, axis=0)), {}


def _solve(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    server: ServerState,
    messages: tuple,
    counts: tuple,
) -> tuple[ServerState, dict]:
    """Solves the ridge regression of each kind."""
    message, sizes = _total(messages)
    shares = sizes / jnp.maximum(jnp.sum(sizes), 1.0)
    ridge = RIDGE if hyper.teach_ridge is None else hyper.teach_ridge
    m = config.teach_features
    above = np.triu_indices(m)

    def weights(triangle: jax.Array, cross: jax.Array, total: jax.Array) -> jax.Array:
        gram = jnp.zeros((m, m)).at[above].set(triangle)
        # Not below zero: rounding, and robust rules by entries, make matrices that are no sums.
        values, vectors = jnp.linalg.eigh(gram + jnp.triu(gram, 1).T)
        inverses = 1 / (jnp.maximum(values, 0.0) + ridge)
        right = cross - total[:, None] * shares[None]
        along = jnp.matmul(vectors.T, right, precision=_EXACT)
        return jnp.matmul(vectors, inverses[:, None] * along, precision=_EXACT)

    taught = {
        kind: one._replace(weights=weights(*message[kind]), shares=shares)
        for kind, one in server.taught.items()
    }
    return server._replace(taught=taught), {}


def _send_taught(server: ServerState, view_ids: Kind) -> PyTree:
    """Sends a partial client its classifier."""
    return server.taught.get(view_ids, ())


def _total(messages: tuple) -> PyTree:
    """Adds up the sums of the cohorts that sent any."""
    return jax.tree.map(lambda *parts: sum(parts), *(message for message in messages if message))


# --- What rows are described by -------------------------------------------------------------------


def random_features(
    n_features: int,
    seed: jax.Array,
    blocks: tuple[Block, Block],
    rows: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Computes phi [rows, m], half of it of each block.

    With x in units of the block's total variance, phi(x) . phi(y) is about the sum over blocks of
    exp(-|x - y|^2 / 2).

    Args:
      n_features: m, even.
      seed: uint32 [2]; the same seed, the same features, wherever they are drawn.
      blocks: Centre and scale of each block.
      rows: [rows, d] of each block.
    """
    key, half = jax.random.wrap_key_data(seed, impl="threefry2x32"), n_features // 2

    def of_block(place: int, block: Block, x: jax.Array) -> jax.Array:
        key_directions, key_phases = jax.random.split(jax.random.fold_in(key, place))
        directions = jax.random.normal(key_directions, (x.shape[1], half))
        phases = jax.random.uniform(key_phases, (half,), maxval=2 * jnp.pi)
        scaled = (x - block.centre[None]) * block.scale
        angles = jnp.matmul(scaled, directions, precision=_EXACT) + phases[None]
        return jnp.sqrt(2 / half) * jnp.cos(angles)

    parts = [of_block(i, block, x) for i, (block, x) in enumerate(zip(blocks, rows, strict=True))]
    return jnp.concatenate(parts, axis=1)


def _z(config: FMCSCConfig, model: Model, views: Views) -> jax.Array:
    """Computes Z of these views, side by side."""
    return side_by_side(features(config, model, views).z)


def side_by_side(views: Views) -> jax.Array:
    """Returns the features of these views [rows, sum of D_v], in the order of their numbers."""
    return jnp.concatenate([views[v] for v in sorted(views)], axis=1)
