"""FedMVL: one factor of all views, found by alternating directions; agents may lack rows.

    min  sum_v a_v^r |X_v - V_v U_v^T|_F^2 + mu/2 |G^T W - I|_F^2
    s.t. V_v >= 0, V_v = W, G = W, sum_v a_v = 1

    round: the server sends W and a_v; agent v makes one step of U_v (D_v x c) and V_v (N x c), and
        sends Phi_v + rho V_v and its residual; the server updates W, its copy G and the weights a
    finish: the server clusters the rows of W by k-means and sends the labels

Phi_v and Psi are the multipliers of V_v = W and G = W. The server's two systems have N unknowns a
column, and a matrix of rank c plus a diagonal: they cost O(N c^2).

Source: Huang, Shi, Xu, Tsang and Lv, "Efficient federated multi-view learning", Pattern Recognition
2022, by the authors' MATLAB code (huangsd/federated-multi-view-learning), whose demonstration has
the settings that are the defaults here. The code multiplies U^T U by the number of views in the
step of V, where the minimum asks for 2 a_v^r, and then moves so little that 35 rounds can end near
their random start; `step` chooses. Which of the two the paper prints, and how it draws the rows of
slow agents, could not be established. The code ends where the objective changes by less than an
absolute number, here it is a share of the objective. The code knows no missing rows: here an agent
has no term for a row that it lacks, and W there follows the agents that hold it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxfedmvc import checks, keys
from jaxfedmvc.algorithm import (
    FederatedAlgorithm,
    Phase,
    answer_nothing,
    by_agent,
    keep,
    send_nothing,
)
from jaxfedmvc.algorithms.shared.agents import keep_labels, kept_labels, n_features
from jaxfedmvc.algorithms.shared.matrices import view_weights
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.federation import Cohort, Federation, has_features
from jaxfedmvc.linalg import solve_positive
from jaxfedmvc.precision import matmul

Kind = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FedMVLConfig:
    """Static settings of FedMVL.

    Attributes:
      n_clusters: Number of clusters c, and of columns of the factors.
      step: Curvature of an agent's step. published: the number of views times U^T U, as in the
        authors' code; exact: 2 a^r U^T U, which goes to the minimum before negative entries are
        cut off.
      n_init: Starts of the last k-means, of which the best is kept.
    """

    n_clusters: int
    step: Literal["published", "exact"] = "published"
    n_init: int = 10

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "n_init")
        checks.choices(self)


@struct.dataclass
class FedMVLHyperparams:
    """Numbers of FedMVL that may be traced.

    Attributes:
      mu: Weight of orthogonality, 0 or more; the authors search 1e-5 to 1e3 by powers of ten.
      rho: Penalty on V_v = W, above 0; the authors search 0.1 to 102 by factors of 2^0.5.
      eta: Penalty on G = W, above 0; searched like rho.
      r: Exponent of the view weights, above 1; the authors search powers of ten from 0.1 to 1.9.
      least_share: Least share of its rows that an agent updates in a round, above 0; shares are
        drawn from here to 1.
      tol: Relative change of the objective at which the rounds end, 0 or more.
    """

    mu: Array | float = 1e3
    rho: Array | float = 0.1 * 2**0.5
    eta: Array | float = 0.1 * 2**0.5
    r: Array | float = 10**0.5
    least_share: Array | float = 1.0
    tol: Array | float = 1e-6


class ServerState(NamedTuple):
    """What the server keeps.

    Attributes:
      holders: Number of agents that hold each row, float32 [N]; 0 for padding.
      consensus: W [N, c]; zero for padding, like the two below.
      copy: G [N, c].
      multiplier: Psi [N, c].
      weights: a_v by the views of the agent.
      objective: After the last round; infinite before the first.
      finished: Whether it stands.
      labels: int32 [N]; -1 for padding, and before `finish`.
    """

    holders: Array
    consensus: Array
    copy: Array
    multiplier: Array
    weights: dict[Kind, Array]
    objective: Array
    finished: Array
    labels: Array


class ClientState(NamedTuple):
    """What an agent keeps.

    Attributes:
      factor: V_v [N, c], zero in rows that it lacks.
      multiplier: Phi_v [N, c], likewise.
      n_views: Number of agents.
      started: Whether it has taken part in a round.
      labels: int32 [N], once the server has sent them; -1 before.
    """

    factor: Array
    multiplier: Array
    n_views: Array
    started: Array
    labels: Array


def fedmvl(
    config: FedMVLConfig, hyperparams: FedMVLHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns FedMVL for a vertical federation; agents may lack rows.

    It is done when the objective stands, and otherwise runs for the rounds asked for. What an agent
    sends is its factor up to the multiplier, which the server can follow: no secret.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: as `Federation.check_vertical`, an
        agent has fewer samples than clusters, or its samples are one and the same once they are
        `standardised`, or no samples link the views.
    """
    hyper = checks.settings(config, FedMVLConfig, hyperparams, FedMVLHyperparams)
    _check_hyperparams(hyper)
    return FederatedAlgorithm(
        init=_build_init(config),
        setup=(),
        round=(Phase(_send_consensus, _build_step(config, hyper), _build_update(hyper)),),
        finish=(
            Phase(send_nothing, answer_nothing, _build_cluster(config)),
            Phase(lambda state, view_ids: state.labels, keep_labels, keep),
        ),
        assign=kept_labels,
        embed=lambda server, state, client: server.consensus,
        done=lambda state: state.finished,
    )


def _check_hyperparams(hyper: FedMVLHyperparams) -> None:
    rules: dict[str, tuple[Callable[[Any], Any], str]] = {
        "mu": checks.NOT_NEGATIVE,
        "rho": checks.POSITIVE,
        "eta": checks.POSITIVE,
        "r": checks.ABOVE_ONE,
        "least_share": (lambda x: (x > 0) & (x <= 1), "above 0, and 1 or less"),
        "tol": checks.NOT_NEGATIVE,
    }
    checks.numbers(hyper, rules)


def _build_init(config: FedMVLConfig) -> Callable[..., Any]:
    def init(key: Array, federation: Federation) -> tuple[ServerState, tuple[ClientState, ...]]:
        federation.check_vertical(complete=False)
        federation.check_rows(config.n_clusters, "as many as clusters")
        _check_widths(federation)
        _check_varied(federation)
        federation.check_linked("FedMVL")
        cohorts, c = federation.cohorts, config.n_clusters
        masks = jnp.stack([cohort.mask[0] for cohort in cohorts])
        holders = jnp.sum(masks.astype(jnp.float32), axis=0)
        n = len(holders)
        none = jnp.full(n, -1, jnp.int32)

        def start(key: Array, rows: Array) -> Array:
            # More rows change none of the first ones.
            return jnp.where(rows[:, None], jax.random.uniform(key, (n, c)), 0.0)

        states = []
        for cohort, mask in zip(cohorts, masks, strict=True):
            state = ClientState(
                start(jax.random.fold_in(key, cohort.client_ids[0]), mask),
                jnp.zeros((n, c)),
                jnp.float32(len(cohorts)),
                jnp.bool_(False),
                none,
            )
            states.append(jax.tree.map(lambda x: x[None], state))
        key_w, key_g = jax.random.split(jax.random.fold_in(key, keys.SERVER))
        server = ServerState(
            holders,
            start(key_w, holders > 0),
            start(key_g, holders > 0),
            jnp.zeros((n, c)),
            {cohort.view_ids: jnp.float32(1 / len(cohorts)) for cohort in cohorts},
            jnp.float32(jnp.inf),
            jnp.bool_(False),
            none,
        )
        return server, tuple(states)

    return init


def _check_widths(federation: Federation) -> None:
    """Raises ValueError for an agent of one feature: nothing of it would be left, at no error."""
    for cohort in federation.cohorts:
        if (width := n_features(cohort)) < 2:
            raise ValueError(
                f"FedMVL standardises the features of each sample, but the agent of view"
                f" {cohort.view_ids[0]} has {width}; allowed are 2 or more"
            )


def _check_varied(federation: Federation) -> None:
    """Raises ValueError for an agent whose rows are all alike: they fit well and tell nothing."""
    if not has_features(federation):
        return
    for cohort in federation.cohorts:
        views = [np.asarray(view)[0] for view in cohort.views]
        x = np.concatenate(views, axis=1)[np.asarray(cohort.mask)[0]]
        x, scale = x - x.mean(1, keepdims=True), x.std(1, ddof=1, keepdims=True)
        if not (np.ptp(x / np.where(scale > 0, scale, 1), axis=0) > 1e-4).any():
            raise ValueError(
                f"FedMVL: samples of view {cohort.view_ids[0]} are all the same once the features"
                " of each are standardised; it tells none apart and would be taken for the best of"
                " views, leave it out"
            )


# --- Round ----------------------------------------------------------------------------------------


def _send_consensus(state: ServerState, view_ids: Kind) -> dict[str, Array]:
    return {"consensus": state.consensus, "weight": state.weights[view_ids]}


def _build_step(config: FedMVLConfig, hyper: FedMVLHyperparams) -> Callable[..., Any]:
    def step(key: Array, sent: dict[str, Array], state: ClientState, client: Cohort) -> Any:
        w, mask = sent["consensus"], client.mask
        x = standardised(jnp.concatenate(client.views, axis=-1), mask)
        # The last round's ascent, made here because V never leaves the agent alone.
        ascent = jnp.where(mask[:, None] & state.started, state.factor - w, 0.0)
        phi = state.multiplier + hyper.rho * ascent
        u = basis(x, state.factor)
        pull = 2 * sent["weight"] ** hyper.r
        curvature = state.n_views if config.step == "published" else pull
        moved = factor_step(x, u, state.factor, w, phi, pull, curvature, hyper.rho)
        chosen = random_rows(key, mask, hyper.least_share)
        v = jnp.maximum(jnp.where(chosen[:, None], moved, state.factor), 0.0)
        residual = jnp.sum((x - matmul(v, u.T)) ** 2)
        message = {"pull": phi + hyper.rho * v, "residual": residual}
        new = state._replace(factor=v, multiplier=phi, started=jnp.bool_(True))
        return new, {client.view_ids: message}, {"loss": residual}

    return step


def standardised(x: Array, mask: Array) -> Array:
    """Gives each row of `x` [N, D] mean 0 and variance 1 over its features.

    The variance is the one that divides by D - 1. Constant rows and those outside `mask` are zero.
    """
    x = jnp.where(mask[:, None], x, 0.0)
    x = x - jnp.mean(x, axis=1, keepdims=True)
    variance = jnp.sum(x * x, axis=1, keepdims=True) / max(x.shape[1] - 1, 1)
    return jnp.where(variance > 0, x * jax.lax.rsqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)


def basis(x: Array, v: Array) -> Array:
    """Returns U = X^T V (V^T V + e I)^-1 [D, c], with e a millionth of the trace of V^T V.

    A column of V that is zero gets a zero one.
    """
    gram = matmul(v.T, v)
    ridge = 1e-6 * jnp.trace(gram) + 1e-30  # columns may be zero, or alike
    inverse_times = solve_positive(gram + ridge * jnp.eye(len(gram)), matmul(v.T, x))
    return inverse_times.T


def factor_step(
    x: Array,
    u: Array,
    v: Array,
    w: Array,
    phi: Array,
    pull: Array,
    curvature: Array,
    rho: Array | float,
) -> Array:
    """Returns V moved by its step, before negative entries are cut off.

    V + [rho (W - V) - Phi + p (X - V U^T) U] (s U^T U + rho I)^-1, with p = `pull` = 2 a^r and
    s = `curvature`. It is the minimum of a^r |X - V U^T|^2 + <Phi, V> + rho/2 |V - W|^2 at s = p.
    """
    slope = rho * (w - v) - phi + pull * matmul(x - matmul(v, u.T), u)
    hessian = curvature * matmul(u.T, u) + rho * jnp.eye(u.shape[1])
    return v + solve_positive(hessian, slope.T).T


def random_rows(key: Array, mask: Array, least_share: Array | float) -> Array:
    """Draws the rows that a slow agent comes to: a share of its own from U[least_share, 1]."""
    key_share, key_rows = jax.random.split(key)
    share = least_share + (1 - least_share) * jax.random.uniform(key_share)
    # The first draws of a longer sequence are those of a shorter one: padding changes none.
    draws = jnp.where(mask, jax.random.uniform(key_rows, mask.shape), jnp.inf)
    rank = jnp.argsort(jnp.argsort(draws))
    return mask & (rank < jnp.floor(share * jnp.sum(mask)))


def _build_update(hyper: FedMVLHyperparams) -> Callable[..., Any]:
    def update(key: Array, state: ServerState, messages: Any, weights: Any) -> Any:
        agents = by_agent(messages)
        there = state.holders > 0
        pulls = jnp.sum(jnp.stack([agent["pull"] for agent in agents.values()]), axis=0)
        own = jnp.where(there[:, None], pulls, 0.0) - state.multiplier
        weight = hyper.mu + hyper.eta
        w = low_rank_solve(hyper.mu, state.copy, hyper.eta + hyper.rho * state.holders, weight, own)
        g = low_rank_solve(
            hyper.mu, w, jnp.broadcast_to(hyper.eta, there.shape), weight, state.multiplier
        )
        residuals = jnp.stack([agent["residual"] for agent in agents.values()])
        a = view_weights(residuals, hyper.r)
        value = objective(residuals, w, g, hyper.mu)
        new = state._replace(
            consensus=w,
            copy=g,
            multiplier=state.multiplier + hyper.eta * (w - g),
            weights={kind: a[i] for i, kind in enumerate(agents)},
            objective=value,
            finished=jnp.abs(state.objective - value) <= hyper.tol * value,
        )
        return new, {"objective": value, "weights": a}

    return update


def low_rank_solve(
    mu: Array | float, y: Array, diagonal: Array, weight: Array | float, b: Array
) -> Array:
    """Solves (mu Y Y^T + diag(d)) Z = weight Y + B for Z [N, c], in O(N c^2).

    Z = D^-1 [B + Y (I + mu Y^T D^-1 Y)^-1 (weight I - mu Y^T D^-1 B)] by Woodbury's identity. The
    share of Y goes through the small inverse, and not through a difference of large numbers.

    Args:
      mu: Factor of the product.
      y: [N, c].
      diagonal: d [N], positive.
      weight: Factor of Y on the right-hand side.
      b: The rest of the right-hand side, [N, c].
    """
    c, scaled = y.shape[1], y / diagonal[:, None]
    small = jnp.eye(c) + mu * matmul(y.T, scaled)
    right = weight * jnp.eye(c) - mu * matmul(scaled.T, b)
    inner = solve_positive(small, right)
    return b / diagonal[:, None] + matmul(scaled, inner)


def objective(residuals: Array, w: Array, g: Array, mu: Array | float) -> Array:
    """Computes (sum_v E_v + mu/2 |G^T W - I|^2) / V, by which the authors' code ends.

    It has no view weights, so that it compares settings of r too.
    """
    orthogonality = jnp.sum((matmul(g.T, w) - jnp.eye(w.shape[1])) ** 2)
    return (jnp.sum(residuals) + mu / 2 * orthogonality) / len(residuals)


# --- Finish ---------------------------------------------------------------------------------------


def _build_cluster(config: FedMVLConfig) -> Callable[..., Any]:
    def cluster(key: Array, state: ServerState, messages: Any, weights: Any) -> Any:
        where = state.holders > 0
        found = kmeans(key, state.consensus, config.n_clusters, where=where, n_init=config.n_init)
        return state._replace(labels=found.labels), {}

    return cluster
