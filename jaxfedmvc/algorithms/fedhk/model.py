"""The types of FedHK: states, messages, and how centres are represented."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxfedmvc.algorithms.fedhk import heat_kernel as hk

PyTree = Any
Centres = dict[int, Array]  # [c, d_h] for each view held


class Scale(NamedTuple):
    """Scale of one view, which the distances in it depend on; the same for all clients.

    Attributes:
      origin: Mean of all samples, [d].
      variance: Sum of the features' variances, a scalar; infinite where it is not known yet.
      low, high: Range of the features about the origin, [d]; empty but for "minmax".
    """

    origin: Array
    variance: Array
    low: Array
    high: Array


class Model(NamedTuple):
    """One start.

    Attributes:
      fit: The centres as the codec represents them.
      view_weights: v, [s].
      log_objective: log J of the model before this one, by the last round's messages;
        under "average" of the clients' own models after their steps.
      change: By how much that was below the value before, infinite at first.
    """

    fit: PyTree
    view_weights: Array
    log_objective: Array
    change: Array


class ServerState(NamedTuple):
    """State of the server.

    Attributes:
      counts: Samples of each view.
      scales: One `Scale` for each view.
      basis: What a codec shares with the clients before the rounds.
      models: Stack of the starts. Views that are left out have weight 0 in each.
      of_views: Centres of every view's own clusters, about the origin, by which views are chosen,
        with an axis of as many clusterings as starts; empty where none may be left out.
    """

    counts: dict[int, Array]
    scales: dict[int, Scale]
    basis: PyTree
    models: Model
    of_views: Centres


@struct.dataclass
class ClientState:
    """State of a client.

    Attributes:
      scales: Of the views it holds.
      basis: As it was sent.
      personal: Its own centres of the views it holds; empty for methods that have none.
      personal_weights: Its own weights of these views.
      took_part: Whether the last two are set.
      holds_all: Whether it holds all views of the federation (static).
    """

    scales: dict[int, Scale]
    basis: PyTree
    personal: Centres
    personal_weights: Array
    took_part: Array
    holds_all: bool = struct.field(pytree_node=False)


class Sums(NamedTuple):
    """A client's message of a round; all of it adds up over clients.

    Attributes:
      numerators: N of each held view, [c, d_h], or what a codec makes of it.
      weights: W of each held view, [c] or [c, d_h].
      costs: C of each held view.
      n_samples: n_l.
      objective: J_l.
    """

    numerators: dict[int, Array]
    weights: dict[int, Array]
    costs: dict[int, Array]
    n_samples: Array
    objective: Array


class Averages(NamedTuple):
    """A client's message of a round under "average".

    Attributes:
      payload: A_l of each held view, or what a codec makes of them, times omega_l.
      view_weights: V_l of each held view, times omega_l.
      weight: omega_l.
      objective: J_l.
    """

    payload: PyTree
    view_weights: dict[int, Array]
    weight: Array
    objective: Array


def _unused(*_: Any) -> Any:
    """Stands in a codec for a function that its aggregation never calls."""
    raise AssertionError("a function of a codec was called that its aggregation does not need")


class Codec(NamedTuple):
    """How centres are represented and what of them travels.

    Attributes:
      start: `(summaries {v: [rows, d_v]}, counts [rows], centres of all views) -> (basis, fits)`.
        Rows and centres are about the origin; the centres have a leading axis of starts, and so do
        fits.
      sent: `(fit, view_ids) -> what a client is sent of it`.
      centres: `(sent, basis, widths) -> centres`, with widths `{v: d_v}` of the views wanted.
      compress: `(numerators, basis) -> numerators as sent`.
      update: `(fit, numerators, weights, relevance, basis, widths) -> fit`, of sums over all
        clients; relevance [s] weighs the views, as their coefficients delta v^alpha do.
      encode: `(centres, sent, basis) -> payload`, for "average".
      decode: `(payloads, weights, fit, basis, widths) -> fit`: sums of weighted payloads and of
        weights, one of each cohort.
      shares_basis: Whether the basis is sent to the clients before the rounds.
      own: Whether clients have centres of their own, which the basis is a part of; it then has a
        leading axis of starts, and changes in every client's state.
    """

    start: Callable[..., tuple[PyTree, PyTree]]
    sent: Callable[..., PyTree] = _unused
    centres: Callable[..., Centres] = _unused
    compress: Callable[..., dict[int, Array]] = _unused
    update: Callable[..., PyTree] = _unused
    encode: Callable[..., PyTree] = _unused
    decode: Callable[..., PyTree] = _unused
    shares_basis: bool = False
    own: bool = False


def whole() -> Codec:
    """Returns the codec of centres as they are."""

    def update(
        fit: Centres, numerators: Centres, weights: dict, relevance: Array, *_: Any
    ) -> Centres:
        return {v: hk.centres_from(numerators[v], weights[v], fit[v]) for v in fit}

    return Codec(
        start=lambda rows, counts, centres: ((), centres),
        sent=lambda fit, view_ids: {v: fit[v] for v in view_ids},
        centres=lambda sent, basis, widths: sent,
        compress=lambda numerators, basis: numerators,
        update=update,
        encode=lambda centres, sent, basis: centres,
        decode=lambda payloads, weights, fit, *_: averaged(payloads, weights, fit),
    )


def averaged(
    payloads: Sequence[dict[int, Array]], weights: Sequence[Array], old: dict[int, Array]
) -> dict[int, Array]:
    """Averages by (60), (61), (99), (100): sum omega_l A_l / sum omega_l over a view's holders."""
    totals = by_view(payloads)
    shares = by_view([dict.fromkeys(part, w) for part, w in zip(payloads, weights, strict=True)])
    return {v: jnp.where(shares[v] > 0, totals[v] / positive(shares[v]), old[v]) for v in old}


def widths(scales: dict[int, Scale]) -> dict[int, int]:
    """Returns the width d_v of each view."""
    return {v: scale.origin.shape[0] for v, scale in scales.items()}


def side_by_side(parts: Mapping[int, Array], axis: int = -1) -> Array:
    """Returns what there is of the views as one array, [..., sum of d_v], in their order."""
    return jnp.concatenate(list(parts.values()), axis=axis)


def split_by_view(x: Array, widths: Mapping[int, int], axis: int = -1) -> dict[int, Array]:
    """Undoes `side_by_side` for views of these widths d_v."""
    ends = list(itertools.accumulate(widths.values()))[:-1]
    return dict(zip(widths, jnp.split(x, ends, axis=axis), strict=True))


def by_view(parts: Sequence[dict[int, Any]]) -> dict[int, Any]:
    """Sums, view by view, what the cohorts have for the views that they hold."""
    totals: dict[int, Any] = {}
    for part in parts:
        for v, value in part.items():
            totals[v] = totals[v] + value if v in totals else value
    return dict(sorted(totals.items()))


def positive(x: Array) -> Array:
    """Returns `x` with ones where it is not positive: safe to divide by."""
    return jnp.where(x > 0, x, 1.0)
