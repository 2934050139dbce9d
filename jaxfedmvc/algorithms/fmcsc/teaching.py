"""Clusters of single views, learned from clients that hold all views. Not in the paper.

Eq. (12) puts a row of a partial client to the centroid that its view's H is nearest to, and eq. (5)
draws that H towards the joint H without ever asking which cluster it falls into. Clients with all
views know the cluster of each of their rows by all of them: with one view of these rows that is a
labelled set. A linear classifier on random features phi(x), those of `random_features`, is fitted
to it, by ridge regression of the indicators:

    W = (sum phi phi^T + ridge I)^-1 sum phi (y - share)^T,    cluster = argmax W^T phi + share

The sums are over the rows of all these clients, who send theirs, so that W is what one client with
all rows would find. Where all views are images of one kind, say photographs of one thing, one
classifier serves them, for which a row is as many examples as it has views (`teach_together`).

What the views say together may also be righter than the clusters that taught them. With
`teach_again` clients with all views put each row where the mean of its views' classifiers does, and
the regression is solved once more. Its own y would speak loudest there, with the weight
h = phi^T (sum phi phi^T + ridge I)^-1 phi. Without it the prediction is

    (W^T phi - h (y - share)) / (1 - h) + share,

in which all rows have the mean of h, as in generalized cross-validation (Golub, Heath and Wahba,
Technometrics 1979): the server knows it from the eigenvalues. Where it is above a quarter, there
are too few rows to know better, and they stay where they are. Clients with all views then take the
mean of the classifiers too.

With `teach_back` clients with some of the views add their own rows, in the clusters that they were
taught, to the sums: those whose largest score is ahead of the next by a fifth, with a weight of .3.
Where few clients hold all views, these are most of the rows that there are.

WHAT THE SUMS GIVE AWAY. phi is a function that everybody knows. Where a client has fewer rows than
there are features, sum phi phi^T has their number as its rank: a row lies in its span exactly if it
is one of the client's, and rows can be found from it. Smallest clusters or not, a server that reads
such sums one by one reads rows. Secure aggregation shows it the sum of all clients alone, which is
of more rows than features where it should be. Second sums differ from the first in those rows alone
that moved, which may be few.
"""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import checks, linalg
from jaxfedmvc.algorithm import Phase, answer_nothing, keep
from jaxfedmvc.algorithms.fmcsc.centroids import assign_rows
from jaxfedmvc.algorithms.fmcsc.client import ClientState
from jaxfedmvc.algorithms.fmcsc.networks import (
    Kind,
    Model,
    PyTree,
    Views,
    branch,
    features,
    side_by_side,
)
from jaxfedmvc.algorithms.fmcsc.random_features import CELLS, Block, row_features
from jaxfedmvc.algorithms.fmcsc.server import ServerState
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig, FMCSCHyperparams
from jaxfedmvc.algorithms.fmcsc.training import Info
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.precision import matmul

# The key of a classifier that clients of all kinds share.
TOGETHER: Kind = ()
# Of the regression, unless hyper-parameters have one; with features of patches.
RIDGE = 0.3
PATCH_RIDGE = 0.01
# Mean leverage of rows above which their clusters are not known better by others.
_LARGEST_LEVERAGE = 0.25
# By how much a row's best score is ahead where it is taught back, and the weight of such rows.
_SURE, _BACK = 0.2, 0.3


class Sums(NamedTuple):
    """What a regression is solved from.

    Attributes:
      gram: sum phi phi^T, [m, m]; its upper triangle in a message.
      cross: sum phi y^T, [m, K].
      total: sum phi, [m].
    """

    gram: jax.Array
    cross: jax.Array
    total: jax.Array


class Second(NamedTuple):
    """What a client sends when it teaches again, or back.

    Attributes:
      crosses: With all views: sum phi y^T of each kind, in the rows' new clusters; {} of others.
      sizes: With all views: sum y, [K]; () of others.
      back: With some of the views: the sums of the rows of which it is sure; {} of others.
    """

    crosses: dict[Kind, jax.Array]
    sizes: jax.Array | tuple[()]
    back: dict[Kind, Sums]


class Taught(NamedTuple):
    """A classifier of rows in one kind of views.

    Attributes:
      seed: What all clients draw the random features from, uint32 [2].
      blocks: The views' own features, and Z; () with features of patches, which need none.
      weights: W [m, K].
      shares: Share of each cluster in the rows that it was learned from, [K].
      leverage: Mean of h over these rows, a scalar; () where it is solved once.
      sums: What the server keeps of it; () where it is solved once, and where it is sent.
    """

    seed: jax.Array
    blocks: tuple[Block, ...]
    weights: jax.Array
    shares: jax.Array
    leverage: PyTree = ()
    sums: PyTree = ()


class Known(NamedTuple):
    """What a client with all views keeps between the exchanges.

    Attributes:
      z: Z of its rows in each kind of views, [rows, latent_dim of each view side by side]; {} with
        features of patches.
      labels: Their clusters, [rows]; -1 for padding, and for what is not taught.
      is_in: Whether its rows are in the sums that the server keeps, a scalar; () where nothing is
        solved again.
    """

    z: dict[Kind, jax.Array]
    labels: jax.Array
    is_in: jax.Array | tuple[()] = ()


# --- Exchanges ------------------------------------------------------------------------------------


def phases(config: FMCSCConfig, hyper: FMCSCHyperparams) -> tuple[Phase, ...]:
    """Returns the exchanges that follow the clustering: scales, sums, and the classifiers."""
    if not config.teach_features:
        return ()
    solve = partial(_solve, config, hyper)
    solve_again = partial(_solve_again, config, hyper)
    again = Phase(
        partial(_send_classifiers, config), partial(_sum_up_again, config), solve_again, "sum"
    )
    return (
        Phase(partial(_send_models, config), partial(_describe, config, hyper), _scale, "sum"),
        Phase(_send_blocks, partial(_sum_up, config), solve, "sum"),
        *((again,) if config.solves_again else ()),
        Phase(partial(taught_to, config), answer_nothing, keep, "sum"),
    )


def check_federation(config: FMCSCConfig, federation: Federation) -> None:
    """Warns where sums are of so few rows that they give these away; not while tracing.

    Raises:
      ValueError: There is one view, so that there is nothing to teach; or, with `teach_patches`, a
        view is no square image or `teach_features` cannot be divided among the parts of images.
    """
    if federation.n_views == 1:
        raise checks.wrong("teach_features", config.teach_features, "0 with a single view")
    if config.teach_patches:
        _check_images(config, federation)
    if federation.is_traced:
        return
    least = min(
        int(np.asarray(cohort.mask).sum(axis=1).min())
        * (len(cohort.view_ids) if config.teach_together else 1)
        for cohort in federation.cohorts
        if config.teach_back or federation.holds_all_views(cohort)
    )
    if least <= config.teach_features:
        examples = "images" if config.teach_together else "rows"
        warnings.warn(
            f"teach_features: got {config.teach_features}, and a client that teaches has {least}"
            f" {examples}: who reads its sums can find them. Use secure aggregation, or fewer"
            " features",
            stacklevel=2,
        )


def _check_images(config: FMCSCConfig, federation: Federation) -> None:
    for v, width in enumerate(federation.view_dims):
        if math.isqrt(width) ** 2 != width:
            raise checks.wrong(
                "teach_patches",
                config.teach_patches,
                f"0 with view {v} of {width} features, which are no square image",
            )
    narrowest = math.isqrt(min(federation.view_dims))
    checks.whole("teach_patches", config.teach_patches, 2, narrowest - CELLS + 1)
    held = {len(c.view_ids) for c in federation.cohorts if not federation.holds_all_views(c)}
    for n in {1} if config.teach_together else held | {1}:
        if config.teach_features % (n * CELLS**2):
            raise checks.wrong(
                "teach_features",
                config.teach_features,
                f"a multiple of {n * CELLS**2} with teach_patches and clients that hold {n} views",
            )


def blank(config: FMCSCConfig, models: dict[Kind, Model], view_dims: tuple[int, ...]) -> PyTree:
    """Returns the classifiers that the server has at first; () where nothing is taught.

    One for each kind of clients with some of the views; all of these kinds have the same with
    `teach_together`, which is kept once.
    """
    if not config.teach_features:
        return ()

    def one(kind: Kind) -> Taught:
        widths = sum(view_dims[v] for v in kind), config.latent_dim * len(kind)
        blocks = tuple(Block(jnp.zeros(width), jnp.zeros(())) for width in widths)
        m = config.teach_features
        weights = jnp.zeros((m, config.n_clusters))
        seed, shares = jnp.zeros(2, jnp.uint32), jnp.zeros(config.n_clusters)
        first = Taught(seed, () if config.teach_patches else blocks, weights, shares)
        if not config.solves_again:
            return first
        kept = Sums(jnp.zeros((m, m)), jnp.zeros_like(weights), jnp.zeros(m))
        return first._replace(leverage=jnp.zeros(()), sums=kept)

    kinds = _partial(models)
    if config.teach_together:
        return {TOGETHER: one(kinds[0])}
    return {kind: one(kind) for kind in kinds}


def taught_to(config: FMCSCConfig, server: ServerState, view_ids: Kind) -> dict[Kind, Taught]:
    """Sends a client the classifiers that cluster its rows, by the views that each takes.

    That of its views, or the one for all views; with `teach_again` a client with all views has
    those of the single views. Empty where a client takes the nearest centroids.
    """
    taught = {kind: one._replace(sums=()) for kind, one in (server.taught or {}).items()}
    if not server.models[view_ids].view_heads:
        return {kind: one for kind, one in taught.items() if kind in (view_ids, TOGETHER)}
    if not config.teach_again:
        return {}
    return {kind: one for kind, one in taught.items() if len(kind) <= 1}


def unknown(config: FMCSCConfig, models: dict[Kind, Model], cohort: Cohort) -> PyTree:
    """Returns what a cohort's clients know at first; () of those that are taught."""
    if not (config.teach_features and models[cohort.view_ids].view_heads):
        return ()
    shape, kinds = cohort.mask.shape, () if config.teach_patches else _partial(models)
    z = {kind: jnp.zeros((*shape, config.latent_dim * len(kind))) for kind in kinds}
    is_in = jnp.zeros(len(cohort.mask), bool) if config.solves_again else ()
    return Known(z, jnp.full(shape, -1, jnp.int32), is_in)


def _partial(models: dict[Kind, Model]) -> list[Kind]:
    return sorted(kind for kind, model in models.items() if not model.view_heads)


def assign_taught(
    config: FMCSCConfig,
    taught: dict[Kind, Taught],
    models: dict[Kind, Model],
    views: Views,
    mask: jax.Array,
    otherwise: jax.Array,
) -> jax.Array:
    """Returns the clusters that classifiers of these views say on average, [rows]; -1 for padding.

    `otherwise` [rows] are those of the nearest centroids, for where nobody taught anything.
    """
    scores = [_said(config, kind, one, models, views) for kind, one in taught.items()]
    best = jnp.argmax(sum(scores), axis=1)
    is_told = jnp.sum(next(iter(taught.values())).shares) > 0
    return jnp.where(mask, jnp.where(is_told, best, otherwise), -1)


def _said(
    config: FMCSCConfig, kind: Kind, one: Taught, models: dict[Kind, Model], views: Views
) -> jax.Array:
    """Computes what a classifier says of rows, W^T phi + share, [rows, K]."""
    held = {v: views[v] for v in kind} or views
    z = None if config.teach_patches else _z(models[kind], held)
    phi = row_features(config, one.seed, one.blocks, held, z)
    return matmul(phi, one.weights) + one.shares[None]


def _z(model: Model, views: Views) -> jax.Array:
    """Computes Z of these views, side by side."""
    return side_by_side(features(model, views).z)


# --- The first exchange: scales -------------------------------------------------------------------


def _send_models(config: FMCSCConfig, server: ServerState, view_ids: Kind) -> PyTree:
    """Sends f_g and the centroids; for Z, partial models too where they are no branches of f_g."""
    if not server.models[view_ids].view_heads:
        return ()
    if config.takes_branches or config.teach_patches:
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
    """Sends the sum of the rows that are taught, their mean squared entries, and their number.

    With features of patches the number alone.
    """
    if not sent:
        return state, (), {}
    models, centroids = sent
    views, mask, full = client.by_view(), client.mask, client.view_ids
    h = features(models[full], views).h
    labels = assign_rows(config, hyper.limit, h, centroids, mask)
    if config.min_cluster_size is not None:
        sizes = jnp.sum(jax.nn.one_hot(labels, config.n_clusters), axis=0)
        labels = jnp.where(sizes[labels] >= config.min_cluster_size, labels, -1)
    is_taught = labels >= 0
    z, message = {}, {}
    for kind in state.known.z:
        held = {v: views[v] for v in kind}
        model = branch(models[full], kind[0]) if config.takes_branches else models[kind]
        rows = side_by_side(held), _z(model, held)
        rows = jax.tree.map(lambda x: jnp.where(is_taught[:, None], x, 0.0), rows)
        z[kind] = rows[1]
        # Divided by the width: masked sums have a largest number.
        message[kind] = tuple(
            (jnp.sum(x, axis=0), jnp.sum(jnp.square(x)) / x.shape[1]) for x in rows
        )
    n = jnp.sum(is_taught).astype(jnp.float32)
    return state._replace(known=state.known._replace(z=z, labels=labels)), (message, n), {}


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
            blocks=tuple(block(*sums) for sums in message.get(kind, ())),
        )
        for place, kind in enumerate(sorted(server.taught))
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
    """Sends, for each kind, sum phi phi^T as its upper triangle and sum phi y^T; and sum y.

    With `teach_together` the sums are over the views, too: each image is an example.
    """
    if not sent:
        return state, (), {}
    known = state.known
    is_taught = known.labels >= 0
    y = jax.nn.one_hot(known.labels, config.n_clusters)

    def sums(kind: Kind) -> Sums:
        seed, blocks = sent[kind]
        phi = _examples(config, kind, seed, blocks, client, known.z.get(kind))
        return _sums(jnp.where(is_taught[:, None], phi, 0.0), y)

    if config.solves_again:
        state = state._replace(known=known._replace(is_in=jnp.ones((), bool)))
    return state, ({kind: sums(kind) for kind in sent}, jnp.sum(y, axis=0)), {}


def _examples(
    config: FMCSCConfig,
    kind: Kind,
    seed: jax.Array,
    blocks: tuple[Block, ...],
    client: Cohort,
    z: jax.Array | None,
) -> jax.Array:
    """Computes phi of what a client with all views teaches a kind by, [examples of a row, rows, m].

    One of each row, or with `teach_together` one of each of its images.
    """
    views = client.by_view()
    examples = [(v,) for v in views] if kind == TOGETHER else [kind]
    held = ({v: views[v] for v in example} for example in examples)
    return jnp.stack([row_features(config, seed, blocks, one, z) for one in held])


def _sums(phi: jax.Array, y: jax.Array) -> Sums:
    """Computes the sums of phi [examples of a row, rows, m] and y [rows, K], as they are sent."""
    total = jnp.sum(phi, axis=(0, 1))
    flat = phi.reshape(-1, phi.shape[-1])
    return Sums(matmul(flat.T, flat)[np.triu_indices(phi.shape[-1])], _cross(phi, y), total)


def _cross(phi: jax.Array, y: jax.Array) -> jax.Array:
    """Computes sum phi y^T of phi [examples of a row, rows, m] and y [rows, K]."""
    return matmul(jnp.sum(phi, axis=0).T, y)


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
    n_rows = jnp.maximum(jnp.sum(sizes), 1.0)

    def solved(kind: Kind, sums: Sums) -> Taught:
        sums = sums._replace(gram=_symmetric(sums.gram, config.teach_features))
        one = server.taught[kind]._replace(shares=sizes / n_rows)
        one, freedom = _regress(config, hyper, one, sums)
        if not config.solves_again:
            return one
        n_examples = n_rows * (max(map(len, server.models)) if kind == TOGETHER else 1)
        return one._replace(leverage=freedom / n_examples, sums=sums)

    taught = {kind: solved(kind, message[kind]) for kind in server.taught}
    return server._replace(taught=taught), {}


def _symmetric(triangle: jax.Array, m: int) -> jax.Array:
    """Returns the matrix [m, m] of an upper triangle."""
    upper = jnp.zeros((m, m)).at[np.triu_indices(m)].set(triangle)
    return upper + jnp.triu(upper, 1).T


def _regress(
    config: FMCSCConfig, hyper: FMCSCHyperparams, one: Taught, sums: Sums
) -> tuple[Taught, jax.Array]:
    """Computes W, and the degrees of freedom of the regression, the sum of h over all examples."""
    ridge = hyper.teach_ridge
    if ridge is None:
        ridge = PATCH_RIDGE if config.teach_patches else RIDGE
    values, vectors = linalg.eigh(sums.gram)
    # Not below zero: rounding, and robust rules by entries, make matrices that are no sums.
    values = jnp.maximum(values, 0.0)
    along = matmul(vectors.T, sums.cross - sums.total[:, None] * one.shares[None])
    weights = matmul(vectors, along / (values + ridge)[:, None])
    return one._replace(weights=weights), jnp.sum(values / (values + ridge))


# --- The same again, with the clusters that were learned ------------------------------------------


def _send_classifiers(
    config: FMCSCConfig, server: ServerState, view_ids: Kind
) -> tuple[dict[Kind, Taught], PyTree]:
    """Sends the classifiers of all kinds, or a partial client's own and its model, for Z."""
    taught = {kind: one._replace(sums=()) for kind, one in server.taught.items()}
    if server.models[view_ids].view_heads:
        return (taught if config.teach_again else {}), ()
    if not config.teach_back:
        return {}, ()
    model = () if config.teach_patches else server.models[view_ids]
    return taught_to(config, server, view_ids), model


def _sum_up_again(
    config: FMCSCConfig,
    key: jax.Array,
    sent: tuple[dict[Kind, Taught], PyTree],
    state: ClientState,
    client: Cohort,
) -> tuple[ClientState, PyTree, Info]:
    """Sends what a client teaches the second time."""
    taught, model = sent
    if not taught:
        return state, (), {}
    if state.known:
        return _relabelled(config, taught, state, client)
    return state, Second({}, (), _taught_back(config, taught, model, client)), {}


def _relabelled(
    config: FMCSCConfig, taught: dict[Kind, Taught], state: ClientState, client: Cohort
) -> tuple[ClientState, PyTree, Info]:
    """Puts rows where all views' classifiers do, and sends sum phi y^T of each kind, and sum y."""
    known = state.known
    is_taught = (known.labels >= 0) & known.is_in
    y = jax.nn.one_hot(known.labels, config.n_clusters)
    phis, scores, leverages = {}, [], []
    for kind, one in taught.items():
        phi = _examples(config, kind, one.seed, one.blocks, client, known.z.get(kind))
        phis[kind] = jnp.where(is_taught[:, None], phi, 0.0)
        if len(kind) <= 1:
            said = matmul(jnp.mean(phi, axis=0), one.weights)
            own = one.leverage * (y - one.shares[None])
            scores.append((said - own) / (1 - one.leverage) + one.shares[None])
            leverages.append(one.leverage)
    knows_better = jnp.mean(jnp.stack(leverages)) <= _LARGEST_LEVERAGE
    labels = jnp.where(knows_better, jnp.argmax(sum(scores), axis=1), known.labels)
    labels = jnp.where(is_taught, labels, -1)
    y = jax.nn.one_hot(labels, config.n_clusters)
    crosses = {kind: _cross(phi, y) for kind, phi in phis.items()}
    state = state._replace(known=known._replace(labels=labels))
    return state, Second(crosses, jnp.sum(y, axis=0), {}), {}


def _taught_back(
    config: FMCSCConfig, taught: dict[Kind, Taught], model: PyTree, client: Cohort
) -> dict[Kind, Sums]:
    """Sums up a partial client's rows of which it is sure, in the clusters that it was taught."""
    ((kind, one),), views = taught.items(), client.by_view()
    scores = _said(config, kind, one, {kind: model}, views)
    y = jax.nn.one_hot(jnp.argmax(scores, axis=1), config.n_clusters)
    second = jnp.max(jnp.where(y > 0, -jnp.inf, scores), axis=1)
    is_sure = client.mask & (jnp.max(scores, axis=1) > second + _SURE) & (jnp.sum(one.shares) > 0)
    z = None if config.teach_patches else _z(model, views)
    phi = _examples(config, kind, one.seed, one.blocks, client, z)
    return {kind: _sums(jnp.where(is_sure[:, None], phi, 0.0), y)}


def _solve_again(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    key: jax.Array,
    server: ServerState,
    messages: tuple,
    counts: tuple,
) -> tuple[ServerState, dict]:
    """Solves the regressions with other clusters of the same rows, and with rows taught back.

    Rows of a client that sends nothing now stay in the sums, in no cluster.
    """
    relabelled = tuple(message for message in messages if message and message.crosses)
    backs = [message.back for message in messages if message]

    def solved(kind: Kind, one: Taught) -> Taught:
        sums = one.sums
        if relabelled:
            again = _total(relabelled)
            one = one._replace(shares=again.sizes / jnp.maximum(jnp.sum(again.sizes), 1.0))
            sums = sums._replace(cross=again.crosses[kind])
        for back in backs:
            if kind in back:
                gram = _symmetric(back[kind].gram, config.teach_features)
                added = back[kind]._replace(gram=gram)
                sums = jax.tree.map(lambda x, y: x + _BACK * y, sums, added)
        return _regress(config, hyper, one, sums)[0]

    taught = {kind: solved(kind, one) for kind, one in server.taught.items()}
    return server._replace(taught=taught), {}


def _total(messages: tuple) -> PyTree:
    """Adds up the sums of the cohorts that sent any."""
    return jax.tree.map(lambda *parts: sum(parts), *(message for message in messages if message))
