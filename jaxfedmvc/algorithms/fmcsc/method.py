"""FMCSC, algorithm 1, in the paper's order: pre-training, rounds, clustering."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.fmcsc import centroids, teaching
from jaxfedmvc.algorithms.fmcsc.client import ClientState, Part, lead, pretrain, train
from jaxfedmvc.algorithms.fmcsc.networks import PyTree, features, init_models, view_dims
from jaxfedmvc.algorithms.fmcsc.server import (
    ServerState,
    adopt,
    aggregate,
    average_autoencoders,
    send_all,
    send_models,
    send_own,
    send_start,
)
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig, FMCSCHyperparams, check_hyperparams
from jaxfedmvc.algorithms.fmcsc.uploads import protected
from jaxfedmvc.federation import Cohort, Federation, check_views


def fmcsc(config: FMCSCConfig, hyperparams: FMCSCHyperparams | None = None) -> FederatedAlgorithm:
    """Returns FMCSC, algorithm 1, as a `FederatedAlgorithm`.

    The server's state is a `ServerState`, a client's a `ClientState`. Its `init` raises ValueError
    where no client holds all views, a client has fewer samples than clusters, or partial models are
    branches and a partial client holds several views; `assign` and `embed` where there is no global
    model for the client's subset of views.

    Args:
      config: Static settings.
      hyperparams: Numbers that may be traced; the paper's if None.

    Raises:
      ValueError: A hyper-parameter is out of range.
    """
    hyper = checks.settings(config, FMCSCConfig, hyperparams, FMCSCHyperparams)
    check_hyperparams(hyper)
    checks.numbers(hyper, {"limit": checks.up_to(config.n_clusters)})
    if config.teach_features and (hyper.upload_noise is not None or hyper.upload_clip is not None):
        raise checks.wrong(
            "teach_features",
            config.teach_features,
            "0 with upload_noise or upload_clip, which bound no sums of rows",
        )
    return FederatedAlgorithm(
        init=partial(_init, config, hyper),
        setup=_setup(config, hyper),
        round=_round(config, hyper),
        finish=(*centroids.phases(config, hyper), *teaching.phases(config, hyper)),
        assign=partial(_assign, config, hyper),
        embed=_embed,
    )


def _init(
    config: FMCSCConfig, hyper: FMCSCHyperparams, key: jax.Array, federation: Federation
) -> tuple[ServerState, tuple[ClientState, ...]]:
    """Draws one model for each kind, which partial clients of that kind keep too."""
    _check_federation(config, federation)
    full = tuple(range(federation.n_views))
    kinds = {cohort.view_ids for cohort in federation.cohorts} | {(v,) for v in full}
    models = init_models(key, config, federation.view_dims, kinds)

    def clients(cohort: Cohort) -> ClientState:
        model: PyTree = ()
        started: PyTree = ()
        if cohort.view_ids != full and not config.takes_branches:
            model = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (cohort.n_clients, *x.shape)), models[cohort.view_ids]
            )
            started = jnp.zeros(cohort.n_clients, bool)
        h = jnp.zeros((*cohort.mask.shape, config.latent_dim))
        known = teaching.unknown(config, models, cohort)
        return ClientState(model, started, h if config.centroids == "federated" else (), known)

    centroids = jnp.zeros((config.n_clusters, config.latent_dim))
    starts = jnp.zeros((config.centroid_starts, *centroids.shape))
    server = ServerState(
        models,
        centroids,
        starts if config.centroid_starts > 1 else (),
        () if hyper.settle_rounds is None else jnp.zeros(()),
        teaching.blank(config, models, federation.view_dims),
    )
    return server, tuple(clients(cohort) for cohort in federation.cohorts)


def _check_federation(config: FMCSCConfig, federation: Federation) -> None:
    held = sorted(cohort.view_ids for cohort in federation.cohorts)
    if not any(len(kind) == federation.n_views for kind in held):
        raise ValueError(
            f"federation: no client holds all {federation.n_views} views; FMCSC needs at least one,"
            " to learn what the views have in common"
        )
    several = [kind for kind in held if 1 < len(kind) < federation.n_views]
    if config.takes_branches and several:
        raise ValueError(
            f"partial_models: got 'branch' with a client that holds views {several[0]}, and f_g has"
            " a branch for each view and for all; allowed is 'distilled'"
        )
    federation.check_rows(config.n_clusters, "as many as clusters, for k-means to start from")
    if config.teach_features:
        teaching.check_federation(config, federation)


def _setup(config: FMCSCConfig, hyper: FMCSCHyperparams) -> tuple[Phase, ...]:
    """Returns pre-training, section 3.2: with component A a leader's, and from it everyone's."""

    phase = Phase(
        partial(send_start, config),
        partial(pretrain, config, hyper),
        partial(average_autoencoders, config),
        reduce="sum",
    )
    pretraining = protected(hyper, phase)
    if "A" not in config.components:
        return (pretraining,)
    consensus = (pretraining._replace(who="leader"), pretraining)
    if not config.leader_epochs:
        return consensus
    leading = Phase(
        send_own if config.takes_branches else send_all,
        partial(lead, config, hyper),
        partial(adopt, config),
        who="leader",
    )
    return (*consensus, protected(hyper, leading))


def _round(config: FMCSCConfig, hyper: FMCSCHyperparams) -> tuple[Phase, ...]:
    """Returns local training and aggregation, sections 3.3 and 3.4.

    One exchange, or two where partial models are fitted to the new f_g: own models, then the rest.
    """

    def exchange(send: PyTree, *parts: Part, ends_round: bool = True) -> Phase:
        phase = Phase(
            send,
            partial(train, config, hyper, parts),
            partial(aggregate, config, hyper, ends_round),
            reduce="sum",
        )
        return protected(hyper, phase)

    send_trained = partial(send_models, config)
    if config.takes_branches:
        return (exchange(send_own, "own"),)
    if config.target == "global" and config.fits_partial_models:
        first = exchange(send_own, "own", ends_round=False)
        return first, exchange(send_trained, "copies")
    return (exchange(send_trained, "own", "copies"),)


def _embed(server: ServerState, state: PyTree, client: Cohort) -> jax.Array:
    """Computes H [rows, d] of a client's rows by the global model of its views."""
    if client.view_ids not in server.models:
        raise ValueError(
            f"client: holds views {client.view_ids}; there are global models for"
            f" {sorted(server.models)}. Drop a view, or train with such a client"
        )
    model = server.models[client.view_ids]
    check_views(client, view_dims(model))
    return features(model, client.by_view()).h


def _assign(
    config: FMCSCConfig,
    hyper: FMCSCHyperparams,
    server: ServerState,
    state: PyTree,
    client: Cohort,
) -> jax.Array:
    h = _embed(server, state, client)
    nearest = centroids.assign_rows(config, hyper.limit, h, server.centroids, client.mask)
    taught = teaching.taught_to(config, server, client.view_ids)
    if not taught:
        return nearest
    views, mask = client.by_view(), client.mask
    return teaching.assign_taught(config, taught, server.models, views, mask, nearest)
