"""Federated heat-kernel multi-view clustering: E-FKMVC and the frame that FedHK's methods share.

    setup:   means -> variances [-> ranges] -> summaries of every client -> views [-> basis]
    round:   clients evaluate the model on their samples and send sums; the server makes of them
             view weights and centres
    finish:  every client is sent the model and, if asked for, makes it its own

The clients' sums are those of the method on pooled data, so that the federation computes just what
one place with all data would, whoever holds what (`aggregation="statistics"`). The paper's own rule
averages the clients' centres by their sizes (`aggregation="average"`); a client that has no sample
of a cluster then still votes on its centre. How centres are represented and sent is a `Codec`:
whole here, compressed in `fedhk_tucker` and `fedhk_parafac2`.

Centres, and whatever travels of samples, are relative to the mean of all samples. Several starts
share the rounds on a leading axis; the one of least objective is kept. Equations as in
`fedhk.heat_kernel`: K. P. Sinaga, arXiv 2509.16101, 2025.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, keep
from jaxfedmvc.algorithms.fedhk.client import nearest, personalised, samples_of
from jaxfedmvc.algorithms.fedhk.model import (
    Centres,
    ClientState,
    Codec,
    Model,
    PyTree,
    Scale,
    ServerState,
    whole,
    widths,
)
from jaxfedmvc.algorithms.fedhk.rounds import average_round, guarded, statistics_round
from jaxfedmvc.algorithms.fedhk.settings import (
    FedHKConfig,
    FedHKHyperparams,
    check_hyperparams,
)
from jaxfedmvc.algorithms.fedhk.setup import (
    may_leave_out,
    n_starts,
    setup_phases,
    warn_of_few_summaries,
)
from jaxfedmvc.federation import Cohort, Federation, check_views
from jaxfedmvc.messages.transforms import transformed

# Of the objective: starts that find the same clusters, under other numbers, differ by rounding.
_EQUAL = 1e-4


def best_start(models: Model) -> Array:
    """Returns the place of the first start whose objective is the least but for rounding."""
    return jnp.argmax(models.log_objective <= jnp.nanmin(models.log_objective) + _EQUAL)


def best(models: Model, tree: PyTree | None = None) -> Any:
    """Returns the best start, or its part of another tree with an axis of starts."""
    place = best_start(models)
    return jax.tree.map(lambda x: x[place], models if tree is None else tree)


def finish_phase(config: FedHKConfig, hyper: FedHKHyperparams, codec: Codec) -> Phase:
    """Returns the last exchange: clients are sent the best start, and may make it their own."""

    def broadcast_best(
        state: ServerState, view_ids: tuple[int, ...]
    ) -> tuple[PyTree, Array, Array]:
        model = best(state.models)
        held = model.view_weights[jnp.array(view_ids)]
        return codec.sent(model.fit, view_ids), held, best_start(state.models)

    def client(key: Array, sent: tuple, state: ClientState, client: Cohort) -> tuple:
        if not _has_own(config, codec):
            return state, (), {}
        fit, weights, place = sent
        basis = jax.tree.map(lambda x: x[place], state.basis) if codec.own else state.basis
        own = codec.centres(fit, basis, widths(state.scales))
        if config.personal != "none":
            samples = samples_of(config, hyper, state.scales, client)
            own, weights = personalised(config, hyper, samples, own, weights)
        state = dataclasses.replace(
            state, personal=own, personal_weights=weights, took_part=jnp.ones((), bool)
        )
        return state, (), {}

    return Phase(broadcast_best, client, keep)


def _has_own(config: FedHKConfig, codec: Codec) -> bool:
    """Returns whether clients end with centres of their own."""
    return codec.own or config.personal != "none"


def e_fkmvc(
    config: FedHKConfig,
    hyperparams: FedHKHyperparams | None = None,
    codec: Codec | None = None,
) -> FederatedAlgorithm:
    """Returns E-FKMVC as a federation; with a codec, FedHK with compressed centres.

    Clients may lack views; one with all views and two samples, at least, must take part. The others
    may have any number of samples, one included. One that joins after the setup adds nothing to the
    rounds, whose model it is sent like the others. See `centres` for the model.

    Args:
      config: Static settings.
      hyperparams: Numbers that may be traced; the defaults if None.
      codec: How centres are represented and sent; whole if None.

    Returns:
      The algorithm; its rounds find their own end.

    Raises:
      ValueError: A hyper-parameter out of range, where it is concrete. From `init`: no client has
        all views and samples enough to start from, there are fewer samples than clusters, or a
        client has fewer than `min_cluster_size` samples.
    """
    hyper = checks.settings(config, FedHKConfig, hyperparams, FedHKHyperparams)
    if hyper.limit is not None and codec is not None:
        raise checks.wrong("limit", hyper.limit, "None with compressed centres")
    codec = codec or whole()
    check_hyperparams(hyper)
    checks.numbers(hyper, {"limit": checks.up_to(config.n_clusters)})

    def init(key: Array, federation: Federation) -> tuple[ServerState, tuple[ClientState, ...]]:
        check_federation(config, federation)
        states = first_states(config, codec, federation)
        warn_of_few_summaries(config, hyper.limit, federation)
        return states

    def assign(server: ServerState, state: ClientState, client: Cohort) -> Array:
        check_views(client, widths(server.scales))
        model = best(server.models)
        basis = best(server.models, server.basis) if codec.own else server.basis
        held = widths({v: server.scales[v] for v in client.view_ids})
        found = codec.centres(codec.sent(model.fit, client.view_ids), basis, held)
        weights = model.view_weights[jnp.array(client.view_ids)]
        if _has_own(config, codec):
            found = {v: jnp.where(state.took_part, state.personal[v], found[v]) for v in found}
            weights = jnp.where(state.took_part, state.personal_weights, weights)
        samples = samples_of(config, hyper, server.scales, client)
        return jnp.where(client.mask, nearest(hyper, samples, found, weights), -1)

    def done(server: ServerState) -> Array:
        return jnp.all(server.models.change <= hyper.tol)

    make = statistics_round if config.aggregation == "statistics" else average_round
    each = make(config, hyper, codec)
    if config.min_cluster_size is not None:
        each = transformed(each, guarded(config.min_cluster_size))
    return FederatedAlgorithm(
        init,
        setup_phases(config, hyper, codec),
        (each,),
        (finish_phase(config, hyper, codec),),
        assign,
        done=done,
    )


def first_states(
    config: FedHKConfig, codec: Codec, federation: Federation
) -> tuple[ServerState, tuple[ClientState, ...]]:
    """Returns the states before anything was sent."""
    scales = {v: _no_scale(config, d) for v, d in enumerate(federation.view_dims)}
    n_restarts = n_starts(config, federation)
    centres = {
        v: jnp.zeros((n_restarts, config.n_clusters, d)) for v, d in enumerate(federation.view_dims)
    }
    rows = {v: jnp.zeros((2 * config.n_clusters, d)) for v, d in enumerate(federation.view_dims)}
    basis, fits = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(codec.start, rows, jnp.zeros(2 * config.n_clusters), centres),
    )
    n_views = federation.n_views
    nothing = jnp.full(n_restarts, jnp.inf)
    views = jnp.full((n_restarts, n_views), 1 / n_views)
    server = ServerState(
        dict.fromkeys(scales, jnp.float32(0.0)),
        scales,
        basis,
        Model(fits, views, nothing, nothing),
        centres if may_leave_out(config, n_views) else {},
    )
    return server, tuple(
        _no_state(config, codec, server, federation, c) for c in federation.cohorts
    )


def _no_scale(config: FedHKConfig, width: int) -> Scale:
    ranged = width if config.hkc == "minmax" else 0
    return Scale(
        jnp.zeros(width),
        jnp.float32(jnp.inf),
        jnp.full(ranged, jnp.inf),
        jnp.full(ranged, -jnp.inf),
    )


def _no_state(
    config: FedHKConfig, codec: Codec, server: ServerState, federation: Federation, cohort: Cohort
) -> ClientState:
    """Returns a cohort's client states before anything was sent, stacked."""
    personal = _has_own(config, codec)
    one = ClientState(
        scales={v: server.scales[v] for v in cohort.view_ids},
        basis=server.basis if codec.shares_basis else (),
        personal={
            v: jnp.zeros((config.n_clusters, federation.view_dims[v]))
            for v in (cohort.view_ids if personal else ())
        },
        personal_weights=jnp.zeros(len(cohort.view_ids) if personal else 0),
        took_part=jnp.zeros((), bool),
        holds_all=federation.holds_all_views(cohort),
    )
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (cohort.n_clients, *x.shape)), one)


def centres(server: ServerState, codec: Codec | None = None) -> tuple[Centres, Array]:
    """Returns the model of a finished run: every view's centres [c, d_h] and view weights [s]."""
    codec = codec or whole()
    model = best(server.models)
    view_ids = tuple(server.scales)
    basis = best(server.models, server.basis) if codec.own else server.basis
    found = codec.centres(codec.sent(model.fit, view_ids), basis, widths(server.scales))
    return {v: a + server.scales[v].origin[None] for v, a in found.items()}, model.view_weights


def check_federation(config: FedHKConfig, federation: Federation) -> None:
    """Checks that one client has all views, and that there are samples enough.

    Raises:
      ValueError: Says what is missing.
    """
    if not any(federation.holds_all_views(cohort) for cohort in federation.cohorts):
        raise ValueError(
            "federation: no client holds all views; one at least is needed, to tell which clusters"
            " of different views belong together"
        )
    if config.min_cluster_size is not None:
        federation.check_rows(config.min_cluster_size, "min_cluster_size")
    if not federation.is_traced:
        n = sum(int(np.asarray(cohort.mask).sum()) for cohort in federation.cohorts)
        if n < config.n_clusters:
            raise ValueError(
                f"n_clusters: got {config.n_clusters} for {n} samples in all; allowed is no more"
                " than there are samples"
            )
