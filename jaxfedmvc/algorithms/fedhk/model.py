"""The types of FedHK: settings, states, messages, and how centres are represented."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc.algorithms.fedhk import heat_kernel as hk

PyTree = Any
Centres = dict[int, Array]  # [c, d_h] for each view held


@struct.dataclass
class FedHKHyperparams:
    """What may be swept.

    Attributes:
      fuzzifier: m > 1. With many features larger values let clusters collapse.
      alpha: Exponent of the view weights, above 1; infinite for views of equal weight. The weights
        favour compact views, that is those of few features, whether they are informative or not.
      beta: Scale of the bandwidth coefficient, positive.
      tolerance: Rounds end when log J changes by no more.
      tau: Pull of personal centres towards the global ones, relative to the client's mean weight.
      mix: Share of the global centres in (102), in [0, 1].
      view_mix: Share of the global view weights in personal ones, in [0, 1].
      step_size: eta of (62) and (63).
      quality: kappa of the clients' weights n_l exp(-kappa J_l / n_l), for "average" only.
    """

    fuzzifier: ArrayLike = 1.05
    alpha: ArrayLike = jnp.inf
    beta: ArrayLike = 1.0
    tolerance: ArrayLike = 1e-6
    tau: ArrayLike = 10.0
    mix: ArrayLike = 0.7
    view_mix: ArrayLike = 1.0
    step_size: ArrayLike = 0.01
    quality: ArrayLike = 0.0


@dataclasses.dataclass(frozen=True)
class FedHKConfig:
    """What is compiled in.

    Attributes:
      n_clusters: c.
      hkc: Heat-kernel coefficients delta: "bandwidth", one for each view; or for each sample and
        feature "minmax" (23) or "absmean" (24), both divided by the view's number of features.
      centre_rule: "stationary", or "printed" for (30) to the letter; they differ for coefficients
        of each sample only.
      aggregation: "statistics", or "average" for (60) and (61).
      local_steps: Steps of a client in a round, for "average" only.
      personal: How the model is made a client's own at the end: "none"; "proximal" steps; "mix",
        (102) after as many local steps; "gradient", (62) and (63) as often.
      personal_steps: Number of these steps.
      n_restarts: Starts, which share the rounds and multiply their bytes.
    """

    n_clusters: int
    hkc: Literal["bandwidth", "minmax", "absmean"] = "bandwidth"
    centre_rule: Literal["stationary", "printed"] = "stationary"
    aggregation: Literal["statistics", "average"] = "statistics"
    local_steps: int = 1
    personal: Literal["none", "proximal", "mix", "gradient"] = "none"
    personal_steps: int = 20
    n_restarts: int = 1

    def __post_init__(self) -> None:
        """Checks the settings; ValueError names the one that is wrong."""
        for name in ("n_clusters", "local_steps", "personal_steps", "n_restarts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed is 1 or more")
        for name, allowed in (
            ("hkc", ("bandwidth", "minmax", "absmean")),
            ("centre_rule", ("stationary", "printed")),
            ("aggregation", ("statistics", "average")),
            ("personal", ("none", "proximal", "mix", "gradient")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r}; allowed are {', '.join(allowed)}"
                )


class Scale(NamedTuple):
    """What the distances in one view depend on, the same for all clients.

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
      log_objective: log J of the model before this one, as the last round's messages told it;
        under "average" of the clients' own models after their steps.
      change: By how much that was below the value before, infinite at first.
    """

    fit: PyTree
    view_weights: Array
    log_objective: Array
    change: Array


class ServerState(NamedTuple):
    """What the server knows.

    Attributes:
      counts: Samples of each view.
      scales: One `Scale` for each view.
      basis: What a codec shares with the clients before the rounds.
      models: Stack of the starts.
    """

    counts: dict[int, Array]
    scales: dict[int, Scale]
    basis: PyTree
    models: Model


@struct.dataclass
class ClientState:
    """What a client keeps.

    Attributes:
      scales: Of the views it holds.
      basis: As it was sent.
      personal: Its own centres of the views it holds; empty where they are not asked for.
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
    """A client's message of a round under "average", each but the last times its weight.

    Attributes:
      payload: A_l of each held view, or what a codec makes of them.
      view_weights: V_l of each held view.
      weight: omega_l.
      objective: J_l, with no weight.
    """

    payload: PyTree
    view_weights: dict[int, Array]
    weight: Array
    objective: Array


class Codec(NamedTuple):
    """How centres are represented and what of them travels.

    Attributes:
      start: `(summaries [rows, D], counts [rows], centres of all views) -> (basis, fits)`. Rows and
        centres are about the origin; the centres have a leading axis of starts, and so do fits.
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
    sent: Callable[..., PyTree]
    centres: Callable[..., Centres]
    compress: Callable[..., dict[int, Array]]
    update: Callable[..., PyTree]
    encode: Callable[..., PyTree]
    decode: Callable[..., PyTree]
    shares_basis: bool = False
    own: bool = False


def whole() -> Codec:
    """Centres as they are."""

    def update(
        fit: Centres, numerators: Centres, weights: dict, relevance: Array, *_: Any
    ) -> Centres:
        return {v: hk.centres_from(numerators[v], weights[v], fit[v]) for v in fit}

    def decode(payloads: Any, weights: Any, fit: Centres, *_: Any) -> Centres:
        return averaged(payloads, weights, fit)

    return Codec(
        start=lambda rows, counts, centres: ((), centres),
        sent=lambda fit, view_ids: {v: fit[v] for v in view_ids},
        centres=lambda sent, basis, widths: sent,
        compress=lambda numerators, basis: numerators,
        update=update,
        encode=lambda centres, sent, basis: centres,
        decode=decode,
    )


def unused(*_: Any) -> Any:
    """Stands where a codec has nothing to do."""
    raise AssertionError("a codec was asked for what its aggregation does not need")


def averaged(
    payloads: Sequence[dict[int, Array]], weights: Sequence[Array], old: dict[int, Array]
) -> dict[int, Array]:
    """(60), (61), (99), (100): sum_l omega_l A_l / sum_l omega_l, over the holders of each view."""
    totals = by_view(payloads)
    shares = by_view([dict.fromkeys(part, w) for part, w in zip(payloads, weights, strict=True)])
    return {v: jnp.where(shares[v] > 0, totals[v] / positive(shares[v]), old[v]) for v in old}


def widths(scales: dict[int, Scale]) -> dict[int, int]:
    """d_v of each view."""
    return {v: scale.origin.shape[0] for v, scale in scales.items()}


def by_view(parts: Sequence[dict[int, Any]]) -> dict[int, Any]:
    """Sums over cohorts of what each has for its views."""
    totals: dict[int, Any] = {}
    for part in parts:
        for v, value in part.items():
            totals[v] = totals[v] + value if v in totals else value
    return dict(sorted(totals.items()))


def positive(x: Array) -> Array:
    """`x` made safe to divide by."""
    return jnp.where(x > 0, x, 1.0)
