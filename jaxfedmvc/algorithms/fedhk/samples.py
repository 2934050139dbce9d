"""FedHK-PARAFAC2 on samples: X_l ~ P_l H diag(s_l) Q^T, and E-FKMVC on the scores P_l H diag(s_l).

The slices are the clients' samples [n_l, D], all views side by side, each about its mean and over
its total standard deviation. The factors are found by federated sweeps before the rounds; then the
scores are the one view that is clustered. As Q is common, a score means the same everywhere, much
as in a federated principal component analysis. Q is a basis of the samples' own subspace: it tells
more of them than centres do.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, keep
from jaxfedmvc.algorithms.fedhk.client import standardised
from jaxfedmvc.algorithms.fedhk.method import e_fkmvc
from jaxfedmvc.algorithms.fedhk.model import (
    ClientState,
    Codec,
    Scale,
    ServerState,
    positive,
    side_by_side,
    widths,
)
from jaxfedmvc.algorithms.fedhk.settings import FedHKHyperparams, FedHKParafac2Config
from jaxfedmvc.algorithms.fedhk.setup import setup_phases
from jaxfedmvc.algorithms.shared.matrices import right_singular_vectors
from jaxfedmvc.federation import Cohort, Federation, check_views
from jaxfedmvc.precision import matmul
from jaxfedmvc.tensor import parafac2 as pf

# Federated sweeps before the rounds, and passes in which a client finds P_l and s_l from H and Q.
_SWEEPS = 5
_PASSES = 3


class Server(NamedTuple):
    """State of the server.

    Attributes:
      raw: Scales of the views; after the summaries its basis is the first Q.
      h: H [R, R].
      q: Q [D, R].
      squares: Sum of s_l s_l^T, [R, R].
      scores: Of E-FKMVC on the scores.
    """

    raw: ServerState
    h: Array
    q: Array
    squares: Array
    scores: ServerState


@struct.dataclass
class Client:
    """State of a client.

    Attributes:
      raw: Scales of its views.
      h: H as it was last sent.
      q: Q as it was last sent.
      scales: s_l [R].
      inner: Y_l = P_l^T X_l [R, D].
      scores: Of E-FKMVC on the scores.
    """

    raw: ClientState
    h: Array
    q: Array
    scales: Array
    inner: Array
    scores: ClientState


def of_samples(config: FedHKParafac2Config, hyper: FedHKHyperparams) -> FederatedAlgorithm:
    """Returns E-FKMVC on PARAFAC2 scores of the samples; see `fedhk_parafac2` for arguments.

    `init` raises ValueError also where a client lacks a view, or has fewer samples than R; `assign`
    does where a client that comes later has fewer than R, or other views.
    """
    r = config.n_clusters if config.rank is None else config.rank
    cluster = e_fkmvc(config, hyper)
    summary_config = dataclasses.replace(config, hkc="bandwidth", n_restarts=1, personal="none")

    def start(rows: dict[int, Array], counts: Array, centres: Any) -> tuple[Array, tuple]:
        """Returns the first Q: leading directions of the clients' summaries."""
        scaled = {v: x / jnp.sqrt(positive(_total(x, counts))) for v, x in rows.items()}
        return right_singular_vectors(side_by_side(scaled) * jnp.sqrt(counts)[:, None], r), ()

    codec = Codec(start)
    raw = e_fkmvc(summary_config, hyper, codec)

    def init(key: Array, federation: Federation) -> tuple[Server, tuple[Client, ...]]:
        if len(federation.cohorts) != 1 or len(federation.cohorts[0].view_ids) < federation.n_views:
            raise ValueError(
                "federation: some clients lack views; with slices of samples all of them must hold"
                " all views"
            )
        width = sum(federation.view_dims)
        if not 1 <= r <= width:
            raise checks.wrong("rank", r, f"1 to {width}, the number of features")
        federation.check_rows(r, f"as many as the rank {r} of the model of samples")
        server, (client,) = raw.init(key, federation)
        scored, (own,) = cluster.init(key, _of_scores(federation, r))
        n = federation.cohorts[0].n_clients
        state = Server(server, jnp.eye(r), jnp.zeros((width, r)), jnp.zeros((r, r)), scored)
        many = Client(
            client,
            jnp.tile(state.h[None], (n, 1, 1)),
            jnp.zeros((n, width, r)),
            jnp.ones((n, r)),
            jnp.zeros((n, r, width)),
            own,
        )
        return state, (many,)

    def assign(server: Server, state: Client, client: Cohort) -> Array:
        # The P_l of fewer rows has no R orthonormal columns.
        if (n := client.mask.shape[0]) < r:
            raise ValueError(f"client: has {n} samples; allowed is {r} or more, the rank")
        check_views(client, widths(server.raw.scales), complete=True)
        scored = _scored(server.raw.scales, server.h, server.q, client)
        return cluster.assign(server.scores, state.scores, scored)

    before = map(_on_raw, setup_phases(summary_config, hyper, codec))
    sweeps = (_h_phase(), _q_phase()) * _SWEEPS
    return cluster._replace(
        init=init,
        setup=(*before, *sweeps, _last(), *map(_on_scores, cluster.setup)),
        round=tuple(map(_on_scores, cluster.round)),
        finish=tuple(map(_on_scores, cluster.finish)),
        assign=assign,
        done=lambda server: cluster.done(server.scores),  # type: ignore[misc]
    )


def scores(rows: Array, h: Array, q: Array, where: Array) -> Array:
    """Computes P_l H diag(s_l) [n, R] of one client from H and Q, zero on padding."""

    def better(_: int, s: Array) -> Array:
        p = pf.projection(rows, h, q, s, where=where)
        return pf.update_s(matmul(p.T, rows), h, q, s)

    s = lax.fori_loop(0, _PASSES, better, jnp.ones(h.shape[1]))
    p = pf.projection(rows, h, q, s, where=where)
    return matmul(p, h) * s[None]


def _scored(scales: dict[int, Scale], h: Array, q: Array, client: Cohort) -> Cohort:
    """Returns the client with the scores of its samples in the place of its views."""
    rows = scores(standardised(scales, client), h, q, client.mask)
    return dataclasses.replace(client, views=(rows,), view_ids=(0,))


def _on_scores(phase: Phase) -> Phase:
    """Returns an exchange of E-FKMVC with the scores in place of the views."""

    def client(key: Array, sent: Any, state: Client, client: Cohort) -> tuple:
        scored = _scored(state.raw.scales, state.h, state.q, client)
        new, message, info = phase.client(key, sent, state.scores, scored)
        return dataclasses.replace(state, scores=new), message, info

    def server(key: Array, state: Server, messages: tuple, weights: tuple) -> tuple:
        new, info = phase.server(key, state.scores, messages, weights)
        return state._replace(scores=new), info

    return phase._replace(
        broadcast=lambda state, view_ids: phase.broadcast(state.scores, (0,)),
        client=client,
        server=server,
    )


def _on_raw(phase: Phase) -> Phase:
    """Returns an exchange about the scales of the views, on the states of this method."""

    def client(key: Array, sent: Any, state: Client, client: Cohort) -> tuple:
        new, message, info = phase.client(key, sent, state.raw, client)
        return dataclasses.replace(state, raw=new), message, info

    def server(key: Array, state: Server, messages: tuple, weights: tuple) -> tuple:
        new, info = phase.server(key, state.raw, messages, weights)
        return state._replace(raw=new, q=new.basis), info

    return phase._replace(
        broadcast=lambda state, view_ids: phase.broadcast(state.raw, view_ids),
        client=client,
        server=server,
    )


def _h_phase() -> Phase:
    """Updates P_l and s_l on the client, and H from the sums."""

    def client(key: Array, sent: tuple, state: Client, client: Cohort) -> tuple:
        h, q = sent
        rows = standardised(state.raw.scales, client)
        p = pf.projection(rows, h, q, state.scales, where=client.mask)
        y = matmul(p.T, rows)
        s = pf.update_s(y, h, q, state.scales)
        state = dataclasses.replace(state, h=h, q=q, scales=s, inner=y)
        return state, pf.h_terms(y, q, s), {}

    def server(key: Array, state: Server, messages: tuple, weights: tuple) -> tuple:
        (terms,) = messages
        return state._replace(h=pf.update_h(terms, state.q, state.h), squares=terms[1]), {}

    return Phase(lambda state, view_ids: (state.h, state.q), client, server, reduce="sum")


def _q_phase() -> Phase:
    """Updates Q from the sums."""

    def client(key: Array, sent: Array, state: Client, client: Cohort) -> tuple:
        message = pf.q_terms(state.inner, sent, state.scales)
        return dataclasses.replace(state, h=sent), message, {}

    def server(key: Array, state: Server, messages: tuple, weights: tuple) -> tuple:
        q = pf.update_q(messages[0], state.squares, state.h, state.q)
        return state._replace(q=q), {}

    return Phase(lambda state, view_ids: state.h, client, server, reduce="sum")


def _last() -> Phase:
    """Sends the final factors to every client."""

    def client(key: Array, sent: tuple, state: Client, client: Cohort) -> tuple:
        return dataclasses.replace(state, h=sent[0], q=sent[1]), (), {}

    return Phase(lambda state, view_ids: (state.h, state.q), client, keep)


def _total(rows: Array, counts: Array) -> Array:
    """Computes the total variance of weighted rows about the origin."""
    return jnp.sum(jnp.square(rows) * counts[:, None]) / positive(jnp.sum(counts))


def _of_scores(federation: Federation, rank: int) -> Federation:
    """Returns a federation of the same clients with scores as the one view; for its shapes only."""
    (cohort,) = federation.cohorts
    blank = jnp.zeros((*cohort.mask.shape, rank))
    return Federation((cohort.replace(views=(blank,), view_ids=(0,)),), None, (rank,), None)  # type: ignore[attr-defined]
