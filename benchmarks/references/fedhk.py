"""E-FKMVC federated by sums, in plain NumPy: as its pseudo-code is written, and vectorised.

It is an oracle, small enough to check by eye, and the peer that `benchmarks.fedhk` measures
against. `pass_by_sample` loops over samples, clusters and views as the pseudo-code does, with NumPy
for the sums over features only; `pass_vectorised` is the same over all samples of a client at once,
with matrix products. All clients hold all views. Computed in the type of the clients' arrays.

Source: K. P. Sinaga, "Personalized federated heat-kernel enhanced multi-view clustering via
advanced tensor decomposition techniques", arXiv 2509.16101, 2025, whose numbers of equations these
are; delta and what the clients send are as in `jaxfedmvc.algorithms.fedhk.heat_kernel` and
`jaxfedmvc.algorithms.fedhk`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Views = Sequence[np.ndarray]  # one array for each view

# Least distance, as a share of the row's largest, and least share of the mean weight of a cluster.
_FLOOR = 1e-7
_EMPTY = 1e-10


class Sums(NamedTuple):
    """What a client sends, and what the server adds up.

    Attributes:
      numerators: N of each view, [c, d_h].
      weights: W, [s, c].
      costs: C, [s].
    """

    numerators: list[np.ndarray]
    weights: np.ndarray
    costs: np.ndarray


class Model(NamedTuple):
    """What the server sends.

    Attributes:
      centres: Of each view, [c, d_h].
      view_weights: v, [s].
    """

    centres: Views
    view_weights: np.ndarray


class ReferenceResult(NamedTuple):
    """A run.

    Attributes:
      labels: For each client the clusters of its samples, [n_l].
      model: After the last round.
      log_objectives: log J of the model before each round.
    """

    labels: list[np.ndarray]
    model: Model
    log_objectives: list[float]


# (views of a client, delta [s], model, m, alpha) -> the client's sums.
Pass = Callable[[Views, np.ndarray, Model, float, float], Sums]


def reference(
    clients: Sequence[Views],
    start: Views,
    one_pass: Pass,
    *,
    rounds: int,
    fuzzifier: float = 1.05,
    alpha: float = math.inf,
    beta: float = 1.0,
) -> ReferenceResult:
    """Makes all rounds, from centres and equal view weights.

    Args:
      clients: For each client its views [n_l, d_h].
      start: First centres of each view, [c, d_h].
      one_pass: `pass_by_sample` or `pass_vectorised`.
      rounds: How many to make; it does not stop earlier.
      fuzzifier: m > 1.
      alpha: Above 1, or infinite.
      beta: Of the bandwidth.
    """
    delta = bandwidths(clients, beta)
    model = Model(start, np.full(len(start), 1 / len(start)))
    history = []
    for _ in range(rounds):
        model, objective = one_round(clients, delta, model, one_pass, fuzzifier, alpha)
        history.append(objective)
    labels = [assigned(views, delta, model, alpha) for views in clients]
    return ReferenceResult(labels, model, history)


def one_round(
    clients: Sequence[Views],
    delta: np.ndarray,
    model: Model,
    one_pass: Pass,
    fuzzifier: float,
    alpha: float,
) -> tuple[Model, float]:
    """Makes a pass of every client and the server's step: the next model, and log J of this."""
    total = added([one_pass(views, delta, model, fuzzifier, alpha) for views in clients])
    objective = log_objective(total.costs, model.view_weights, alpha)
    return Model(moved(total, model.centres), view_weights(total.costs, alpha)), objective


# --- The server -----------------------------------------------------------------------------------


def bandwidths(clients: Sequence[Views], beta: float = 1.0) -> np.ndarray:
    """Computes delta_h = beta / (2 total variance of view h), [s], from the clients' sums."""
    n = sum(len(views[0]) for views in clients)
    out = []
    for h in range(len(clients[0])):
        mean = sum(np.sum(views[h], axis=0) for views in clients) / n
        variance = sum(np.sum((views[h] - mean) ** 2) for views in clients) / n
        out.append(beta / (2 * variance))
    return np.array(out, clients[0][0].dtype)


def added(sums: Sequence[Sums]) -> Sums:
    """Adds up the sums of clients."""
    return Sums(
        [np.sum(parts, axis=0) for parts in zip(*(s.numerators for s in sums), strict=True)],
        np.sum([s.weights for s in sums], axis=0),
        np.sum([s.costs for s in sums], axis=0),
    )


def view_weights(costs: np.ndarray, alpha: float) -> np.ndarray:
    """Computes (31): v_h = C_h^(-1/(alpha-1)) / sum_h' C_h'^(-1/(alpha-1)), [s]."""
    shares = (costs / np.min(costs)) ** (-1 / (alpha - 1))
    return shares / np.sum(shares)


def moved(total: Sums, centres: Views) -> list[np.ndarray]:
    """Computes a_k = N_k / W_k; a cluster without weight stays."""
    out = []
    for numerators, weights, previous in zip(total.numerators, total.weights, centres, strict=True):
        empty = weights <= _EMPTY * np.mean(weights)
        own = numerators / np.where(empty, 1, weights)[:, None]
        out.append(np.where(empty[:, None], previous, own))
    return out


def log_objective(costs: np.ndarray, weights: np.ndarray, alpha: float) -> float:
    """Computes log J of (25), J = sum_h v_h^alpha C_h; with an infinite alpha sum_h C_h."""
    powers = np.ones(len(costs)) if math.isinf(alpha) else weights**alpha
    return float(np.log(np.sum(powers * costs)))


def relevance(weights: np.ndarray, alpha: float) -> np.ndarray:
    """Computes (v_h / max v)^alpha, [s]: v_h^alpha but for a factor that cancels in (29)."""
    return np.ones(len(weights)) if math.isinf(alpha) else (weights / np.max(weights)) ** alpha


# --- A client, sample by sample -------------------------------------------------------------------


def pass_by_sample(
    views: Views, delta: np.ndarray, model: Model, fuzzifier: float, alpha: float
) -> Sums:
    """Computes (4), (29) and the sums of (30), (31), a sample, cluster and view at a time."""
    centres = model.centres
    n, n_clusters, n_views = len(views[0]), len(centres[0]), len(views)
    share = relevance(model.view_weights, alpha)
    numerators = [np.zeros(a.shape) for a in centres]
    totals, costs = np.zeros((n_views, n_clusters)), np.zeros(n_views)
    for i in range(n):
        phi = [[0.0] * n_clusters for _ in range(n_views)]
        distance = [0.0] * n_clusters
        for k in range(n_clusters):
            for h in range(n_views):
                phi[h][k] = delta[h] * np.sum((views[h][i] - centres[h][k]) ** 2)
                distance[k] += share[h] * -math.expm1(-phi[h][k])
        mu = membership(distance, fuzzifier)
        for k in range(n_clusters):
            power = mu[k] ** fuzzifier
            for h in range(n_views):
                omega = power * math.exp(-phi[h][k])
                numerators[h][k] += omega * views[h][i]
                totals[h, k] += omega
                costs[h] += power * -math.expm1(-phi[h][k])
    return Sums(numerators, totals, costs)


def membership(distance: Sequence[float], fuzzifier: float) -> list[float]:
    """Computes (29) for one sample: D_k^(-1/(m-1)) / sum_k' D_k'^(-1/(m-1)), [c]."""
    floored = [max(d, _FLOOR * max(distance), 1e-30) for d in distance]
    # Relative to the least one: the powers themselves overflow.
    closeness = [(min(floored) / d) ** (1 / (fuzzifier - 1)) for d in floored]
    return [value / sum(closeness) for value in closeness]


# --- A client, all samples at once ----------------------------------------------------------------


def pass_vectorised(
    views: Views, delta: np.ndarray, model: Model, fuzzifier: float, alpha: float
) -> Sums:
    """Does what `pass_by_sample` does, with arrays [n_l, c] and matrix products."""
    keds = [
        kernel_distances(x, scale, a)
        for x, scale, a in zip(views, delta, model.centres, strict=True)
    ]
    distance = np.zeros_like(keds[0])
    for share, ked in zip(relevance(model.view_weights, alpha), keds, strict=True):
        distance += ked.dtype.type(share) * ked
    np.maximum(distance, np.maximum(_FLOOR * distance.max(1, keepdims=True), 1e-30), out=distance)
    mu = (distance.min(1, keepdims=True) / distance) ** (1 / (fuzzifier - 1))
    mu /= mu.sum(1, keepdims=True)
    powers = mu**fuzzifier
    numerators, totals, costs = [], [], []
    for x, ked in zip(views, keds, strict=True):
        omega = powers * (1 - ked)
        numerators.append(omega.T @ x)
        totals.append(omega.sum(0))
        costs.append(np.vdot(powers, ked))
    return Sums(numerators, np.stack(totals), np.array(costs))


def kernel_distances(x: np.ndarray, delta: float, centres: np.ndarray) -> np.ndarray:
    """Computes (4) of a view, KED = 1 - exp(-delta |x_i - a_k|^2), [n, c], by expanded squares."""
    centres = centres.astype(x.dtype)
    phi = x @ (-2 * centres.T)
    phi += np.einsum("ij,ij->i", x, x)[:, None]
    phi += np.einsum("kj,kj->k", centres, centres)
    phi *= -delta
    np.minimum(phi, 0, out=phi)
    np.expm1(phi, out=phi)
    return np.negative(phi, out=phi)


def assigned(views: Views, delta: np.ndarray, model: Model, alpha: float) -> np.ndarray:
    """Returns the cluster of least D_ik for each sample, [n_l]."""
    shares = relevance(model.view_weights, alpha)
    distance = sum(
        share * kernel_distances(x, scale, a)
        for share, x, scale, a in zip(shares, views, delta, model.centres, strict=True)
    )
    return np.argmin(distance, axis=1)
