"""FedHK-PARAFAC2: centres that share a PARAFAC2 model (Kiers, ten Berge and Bro, 1999).

The model that is printed under this name, (69) = (78), is Tucker's letter for letter: PARAFAC2 has
no core, and one of its factors differs from slice to slice with a common cross product,
X_k ~ P_k H diag(s_k) Q^T with P_k^T P_k = I. What the slices are is left open by the text; three
placements make sense of a sentence of it each:

    "clients"   slices A_l [c, D], the centres of every client. P_l and s_l stay with the client, H
                and Q are common: what a centre can be is shared, not which clusters there are.
    "views"     slices A^h [c, d_h]^T, the centres of every view, the same for all clients. With P_h
                fixed before the rounds the clients' sums shrink from d_h to R numbers a cluster.
    "samples"   slices X_l [n_l, D], the clients' samples, of which the scores P_l H diag(s_l) are
                clustered; see `fedhk.samples`.

The fit goes to the quadratic bound of J through a second majorisation (Kiers, 1997), one sweep a
round, so that no round raises J.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.fedhk import heat_kernel as hk
from jaxfedmvc.algorithms.fedhk.client import local_sums, samples_of
from jaxfedmvc.algorithms.fedhk.method import e_fkmvc
from jaxfedmvc.algorithms.fedhk.model import (
    Centres,
    ClientState,
    Codec,
    Model,
    ServerState,
    by_view,
    positive,
    side_by_side,
    split_by_view,
    widths,
)
from jaxfedmvc.algorithms.fedhk.rounds import progress, relative_deltas, reweighted
from jaxfedmvc.algorithms.fedhk.samples import of_samples
from jaxfedmvc.algorithms.fedhk.settings import FedHKHyperparams, FedHKParafac2Config
from jaxfedmvc.algorithms.shared.matrices import right_singular_vectors
from jaxfedmvc.federation import Cohort
from jaxfedmvc.precision import matmul
from jaxfedmvc.tensor import parafac2 as pf
from jaxfedmvc.tensor.tucker import weighted_target


def fedhk_parafac2(
    config: FedHKParafac2Config, hyperparams: FedHKHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns E-FKMVC with centres, or samples, in PARAFAC2 form.

    Raises:
      ValueError: As `e_fkmvc`. From `init` also: a rank that the slices cannot have.
    """
    hyper = checks.settings(config, FedHKParafac2Config, hyperparams, FedHKHyperparams)
    if config.placement == "clients":
        return _of_clients(config, hyper)
    if config.placement == "views":
        return e_fkmvc(config, hyper, views_codec(config))
    return of_samples(config, hyper)


def _rank(config: FedHKParafac2Config, largest: int, why: str) -> int:
    """Returns R, the largest one unless it is set.

    Raises:
      ValueError: The slices cannot have it.
    """
    rank = largest if config.rank is None else config.rank
    if not 1 <= rank <= largest:
        raise checks.wrong("rank", rank, f"1 to {largest}, {why}")
    return rank


# Slices are the clients' centres.


class Own(NamedTuple):
    """State of a client beyond E-FKMVC's, for one start.

    Attributes:
      projection: P_l [c, R].
      scales: s_l [R].
      h: H as it was last sent, [R, R].
      q: Q as it was last sent, [d_v, R] for each view.
      numerators: N of each held view.
      weights: W of each held view.
      inner: Y_l = P_l^T A~_l [R, D].
      peak: Greatest weight of the bound, by which the slice counts.
    """

    projection: Array
    scales: Array
    h: Array
    q: Centres
    numerators: Centres
    weights: dict[int, Array]
    inner: Array
    peak: Array


class Shared(NamedTuple):
    """Common part of the fit of one start.

    Attributes:
      h: H [R, R].
      q: Q, [d_v, R] for each view.
      squares: Sum of the weighted s_l s_l^T, which H and Q of a round are both made with, [R, R].
    """

    h: Array
    q: Centres
    squares: Array


def clients_codec(config: FedHKParafac2Config) -> Codec:
    """Returns the codec of clients' centres P_l H diag(s_l) Q^T: fit `Shared`, basis `Own`."""

    def start(rows: dict[int, Array], counts: Array, centres: Centres) -> tuple[Own, Shared]:
        width = sum(part.shape[-1] for part in centres.values())
        largest = min(config.n_clusters, width)
        r = _rank(config, largest, "the number of clusters, or of features if less")
        ragged = config.hkc != "bandwidth" and config.centre_rule == "stationary"

        def one(centres: Centres) -> tuple[Own, Shared]:
            form = pf.from_slice(side_by_side(centres), r)
            q = split_by_view(form.q, {v: x.shape[1] for v, x in centres.items()}, axis=0)
            nothing = jax.tree.map(jnp.zeros_like, centres)
            weights = {v: part if ragged else part[:, 0] for v, part in nothing.items()}
            own = Own(
                form.projections[0],
                form.s[0],
                form.h,
                q,
                nothing,
                weights,
                jnp.zeros((r, width)),
                jnp.zeros(()),
            )
            return own, Shared(own.h, own.q, jnp.zeros((r, r)))

        return jax.vmap(one)(centres)

    def centres(sent: tuple, basis: Own, widths: dict[int, int]) -> Centres:
        h, q = sent
        left = matmul(basis.projection, h) * basis.scales[None]
        return {v: matmul(left, q[v].T) for v in widths}

    return Codec(
        start=start,
        sent=lambda fit, view_ids: (fit.h, fit.q),
        centres=centres,
        shares_basis=True,
        own=True,
    )


def _of_clients(config: FedHKParafac2Config, hyper: FedHKHyperparams) -> FederatedAlgorithm:
    codec = clients_codec(config)
    base = e_fkmvc(config, hyper, codec)
    place, *earlier = base.setup[::-1]
    return base._replace(
        setup=(*earlier[::-1], _places(place)),
        round=(_costs(config, hyper, codec), _common_h(config, hyper), _common_q()),
    )


def _places(phase: Phase) -> Phase:
    """Sends P and s of the basis, once; the rest is the client's own to fill."""

    def client(key: Array, sent: tuple, state: ClientState, client: Cohort) -> tuple:
        own = state.basis._replace(projection=sent[0], scales=sent[1])
        return dataclasses.replace(state, basis=own), (), {}

    return phase._replace(
        broadcast=lambda state, view_ids: (state.basis.projection, state.basis.scales),
        client=client,
    )


def _costs(config: FedHKParafac2Config, hyper: FedHKHyperparams, codec: Codec) -> Phase:
    """Returns the first exchange: (29) with the client's own centres, and the view weights (31)."""

    def broadcast(state: ServerState, view_ids: tuple[int, ...]) -> tuple[tuple, Array]:
        fit = state.models.fit
        return (fit.h, fit.q), state.models.view_weights

    def client(key: Array, sent: tuple, state: ClientState, client: Cohort) -> tuple:
        samples = samples_of(config, hyper, state.scales, client)
        held = jnp.array(client.view_ids)

        def one_start(fit: tuple, weights: Array, own: Own) -> tuple[Own, tuple]:
            centres = codec.centres(fit, own, widths(state.scales))
            sums = local_sums(config, hyper, samples, centres, weights[held])
            h, q = fit
            kept = {v: jnp.zeros_like(x) for v, x in own.numerators.items()}
            none = {v: jnp.zeros_like(x) for v, x in own.weights.items()}
            own = own._replace(
                h=h, q=q, numerators=kept | sums.numerators, weights=none | sums.weights
            )
            return own, (sums.costs, sums.n_samples, sums.objective)

        fits, view_weights = sent
        own, message = jax.vmap(one_start)(fits, view_weights, state.basis)
        loss = jnp.min(message[2] / jnp.maximum(message[1], 1.0))
        return dataclasses.replace(state, basis=own), message, {"loss": loss}

    def server(key: Array, state: ServerState, messages: tuple, weights: tuple) -> tuple:
        costs = by_view([message[0] for message in messages])

        def one_start(model: Model, costs: dict[int, Any]) -> Model:
            return reweighted(model, [costs[v] for v in state.scales], hyper.alpha)

        models = jax.vmap(one_start)(state.models, costs)
        return state._replace(models=models), progress(models)

    return Phase(broadcast, client, server, reduce="sum")


def _common_h(config: FedHKParafac2Config, hyper: FedHKHyperparams) -> Phase:
    """Returns the second exchange: P_l and s_l on the client, H from the clients' terms.

    Columns are scaled by the square root of delta, so that the bound weighs all views as J does.
    """

    def broadcast(state: ServerState, view_ids: tuple[int, ...]) -> tuple[Array, Array]:
        return state.models.view_weights, relative_deltas(config, state.scales)

    def client(key: Array, sent: tuple, state: ClientState, client: Cohort) -> tuple:
        view_weights, deltas = sent

        def one_start(weights: Array, own: Own) -> tuple[Own, tuple[Array, Array]]:
            relevance = jnp.exp(hk.log_relevance(weights, hyper.alpha))
            wanted, fitted, strengths = {}, {}, {}
            for place, (v, q) in enumerate(own.q.items()):
                old = matmul(matmul(own.projection, own.h) * own.scales[None], q.T)
                weight = own.weights[v]
                wanted[v] = hk.centres_from(own.numerators[v], weight, old)
                weight = weight if weight.ndim == 2 else weight[:, None]
                strengths[v] = jnp.broadcast_to(relevance[place] * weight, old.shape)
                fitted[v] = old
            strength = side_by_side(strengths)
            plain = weighted_target(side_by_side(wanted), side_by_side(fitted), strength)
            scale = _column_scales(own.q, deltas)
            scaled = side_by_side(own.q, axis=0) * scale[:, None]
            p = pf.projection(plain * scale[None], own.h, scaled, own.scales)
            y = matmul(p.T, plain)
            s = pf.update_s(y * scale[None], own.h, scaled, own.scales)
            peak = jnp.max(strength)
            terms = jax.tree.map(lambda x: peak * x, pf.h_terms(y * scale[None], scaled, s))
            return own._replace(projection=p, scales=s, inner=y, peak=peak), terms

        own, message = jax.vmap(one_start)(view_weights, state.basis)
        return dataclasses.replace(state, basis=own), message, {}

    def server(key: Array, state: ServerState, messages: tuple, weights: tuple) -> tuple:
        deltas = relative_deltas(config, state.scales)

        def one_start(fit: Shared, terms: tuple[Array, Array]) -> Shared:
            scaled = side_by_side(fit.q, axis=0) * _column_scales(fit.q, deltas)[:, None]
            return Shared(pf.update_h(terms, scaled, fit.h), fit.q, terms[1])

        total = jax.tree.map(lambda *parts: sum(parts), *messages)
        fits = jax.vmap(one_start)(state.models.fit, total)
        return state._replace(models=state.models._replace(fit=fits)), {}

    return Phase(broadcast, client, server, reduce="sum")


def _common_q() -> Phase:
    """Returns the third exchange: Q from the clients' terms."""

    def client(key: Array, sent: Array, state: ClientState, client: Cohort) -> tuple:
        def one_start(h: Array, own: Own) -> tuple[Own, Array]:
            return own._replace(h=h), own.peak * pf.q_terms(own.inner, h, own.scales)

        own, message = jax.vmap(one_start)(sent, state.basis)
        return dataclasses.replace(state, basis=own), message, {}

    def server(key: Array, state: ServerState, messages: tuple, weights: tuple) -> tuple:
        def one_start(fit: Shared, terms: Array) -> Shared:
            new = pf.update_q(terms, fit.squares, fit.h, side_by_side(fit.q, axis=0))
            of_views = {v: len(part) for v, part in fit.q.items()}
            return fit._replace(q=split_by_view(new, of_views, axis=0))

        fits = jax.vmap(one_start)(state.models.fit, sum(messages))
        return state._replace(models=state.models._replace(fit=fits)), {}

    return Phase(lambda state, view_ids: state.models.fit.h, client, server, reduce="sum")


def _column_scales(q: Centres, deltas: Array) -> Array:
    """Returns sqrt(delta) of every column, [D]."""
    return jnp.concatenate(
        [jnp.full(len(part), jnp.sqrt(d)) for part, d in zip(q.values(), deltas, strict=True)]
    )


# Slices are views.


def views_codec(config: FedHKParafac2Config) -> Codec:
    """Returns the codec of centres (P_h H diag(s_h) Q^T)^T of every view, P_h fixed beforehand.

    The fit is (H, Q [c, R], S [s, R]), the basis P_h [d_h, R] of each view, from the clients'
    summaries.
    """

    def start(
        rows: dict[int, Array], counts: Array, centres: Centres
    ) -> tuple[dict[int, Array], tuple]:
        narrowest = min(part.shape[-1] for part in centres.values())
        r = _rank(
            config,
            min(config.n_clusters, narrowest),
            "the number of clusters, or of the features of the narrowest view if less",
        )
        weighted = {v: part * jnp.sqrt(counts)[:, None] for v, part in rows.items()}
        basis = {v: right_singular_vectors(part, r) for v, part in weighted.items()}

        def one(centres: Centres) -> tuple:
            inner = jnp.stack([matmul(part, basis[v]).T for v, part in centres.items()])
            h = jnp.eye(r)
            q = pf.from_slice(inner.reshape(-1, inner.shape[2]), r).q
            s = jnp.ones((len(centres), r))
            equal = jnp.ones(len(inner))
            return lax.fori_loop(
                0, _FIRST_SWEEPS, lambda _, fit: _sweep(inner, equal, *fit), (h, q, s)
            )

        return basis, jax.vmap(one)(centres)

    return Codec(
        start=start,
        sent=lambda fit, view_ids: fit,
        centres=_of_slices,
        compress=lambda numerators, basis: {v: matmul(n, basis[v]) for v, n in numerators.items()},
        update=_update,
        shares_basis=True,
    )


# Sweeps of the server: in a round, and to begin with.
_SWEEPS = 10
_FIRST_SWEEPS = 20


def _inner(fit: tuple) -> Array:
    """Returns the slices H diag(s_h) Q^T without their P_h, [s, R, c]."""
    h, q, s = fit
    return jnp.einsum("ir,sr,kr->sik", h, s, q, precision=lax.Precision.HIGHEST)


def _of_slices(sent: tuple, basis: dict[int, Array], widths: dict[int, int]) -> Centres:
    """Returns the centres of these views."""
    inner = _inner(sent)
    return {v: matmul(basis[v], inner[v]).T for v in widths}


def _update(
    fit: tuple,
    numerators: Centres,
    weights: dict[int, Array],
    relevance: Array,
    basis: Any,
    widths: dict[int, int],
) -> tuple:
    """Moves the slices nearer to the centres N / W by sweeps, all in the coordinates of P_h."""
    targets = jnp.stack(
        [
            hk.centres_from(numerators[v], weights[v], jnp.zeros_like(numerators[v])).T
            for v in widths
        ]
    )
    strengths = relevance[:, None] * jnp.stack([weights[v] for v in widths])
    strengths = jnp.broadcast_to(strengths[:, None], targets.shape)
    peaks = jnp.max(strengths, axis=(1, 2))

    def sweep(_: int, fit: tuple) -> tuple:
        inner = jax.vmap(weighted_target)(targets, _inner(fit), strengths)
        return _sweep(inner, peaks / positive(jnp.max(peaks)), *fit)

    return lax.fori_loop(0, _SWEEPS, sweep, fit)


def _sweep(inner: Array, weights: Array, h: Array, q: Array, s: Array) -> tuple:
    """Makes one sweep over slices [s, R, c] whose P is fixed: H, Q, then s."""

    def add(terms: Array) -> Array:
        return jnp.einsum("s,sij->ij", weights, terms, precision=lax.Precision.HIGHEST)

    products, squares = map(add, jax.vmap(pf.h_terms, (0, None, 0))(inner, q, s))
    h = pf.update_h((products, squares), q, h)
    q = pf.update_q(add(jax.vmap(pf.q_terms, (0, None, 0))(inner, h, s)), squares, h, q)
    return h, q, jax.vmap(pf.update_s, (0, None, None, 0))(inner, h, q, s)
