"""Accounting of differential privacy: what noisy releases cost, and how much noise they need.

Neighbours are data sets of which one has one person's row more than the other (add/remove);
replacing a row is removing one and adding one. Rows are protected, not clients.

Repeated Gaussian releases (`gaussian_epsilon`, `gaussian_noise_multiplier` and the closed bound
`zcdp_noise_multiplier`). A release is all that one round publishes of all rows, of L2 sensitivity
Delta, with N(0, sigma^2) added to every entry; the noise multiplier is z = sigma / Delta. What
Delta is, the method says: the most that one row changes the release, and twice that for replacing
a row. Releases may depend on those before. Where m clients each add N(0, sigma^2 / m) and only the
sum is seen (`secure.secure_aggregation`), the sum is such a release, as long as no client keeps its
part of the noise from it.

Laplace noise on several queries (`laplace_scale`).

The noise is drawn in floating point, which leaks where an adversary sees all its bits (Mironov,
"On significance of the least significant bits for differential privacy", 2012); nothing is done
against that here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax

from jaxfedmvc import checks

# Multipliers of all releases below this spend an epsilon of some 5000, on grids of 10^5 points.
_HARDLY_ANY_NOISE = 0.01


def gaussian_epsilon(noise_multiplier: float, n_releases: int, delta: float) -> float:
    """Computes the epsilon that T Gaussian releases spend together at delta, tight.

    T releases of multiplier z are together as private as one of z / sqrt(T) (Dong, Roth and Su,
    "Gaussian differential privacy", 2022, corollary 3.3), whose privacy loss distribution N(mu^2 /
    2, mu^2) with mu = sqrt(T) / z is evaluated on a grid, rounded up. Its tails are cut off: below
    a delta of 1e-22 or so, which they may exceed, the answer is infinite unless z is far below 1.

    Args:
      noise_multiplier: z = sigma / Delta, positive; infinite for pure noise.
      n_releases: T.
      delta: In (0, 1).

    Returns:
      Epsilon, 0 or more; 0 for an infinite multiplier.

    Raises:
      ValueError: An argument is out of range.
      ImportError: dp-accounting is not installed.
    """
    _check(noise_multiplier=noise_multiplier, n_releases=n_releases, delta=delta)
    return _gaussian_epsilon(float(noise_multiplier), int(n_releases), float(delta))


@functools.lru_cache(maxsize=1024)
def _gaussian_epsilon(noise_multiplier: float, n_releases: int, delta: float) -> float:
    if math.isinf(noise_multiplier):
        return 0.0
    of_all = noise_multiplier / math.sqrt(n_releases)
    if of_all < _HARDLY_ANY_NOISE:
        from scipy.special import ndtri

        # The tail of the loss at delta bounds epsilon, within a hundredth here, and needs no grid.
        mu = math.sqrt(n_releases) / noise_multiplier
        return mu * (0.5 * mu - float(ndtri(delta)))
    # A grid relative to the spread mu of the loss is as fine at any multiplier.
    loss = _accountant().from_gaussian_mechanism(
        of_all, value_discretization_interval=1e-3 / of_all
    )
    return float(loss.get_epsilon_for_delta(delta))


def gaussian_noise_multiplier(epsilon: float, delta: float, n_releases: int) -> float:
    """Finds the least multiplier z = sigma / Delta with which T releases are (epsilon, delta)-DP.

    By bisection of `gaussian_epsilon`, to a part in 10^4 and from above; where that is infinite,
    below a delta of 1e-22 or so, `zcdp_noise_multiplier` is the answer.

    Args:
      epsilon: Of all releases, positive; infinite for no noise.
      delta: In (0, 1).
      n_releases: T.

    Returns:
      The multiplier of each release; 0 for infinite epsilon.

    Raises:
      ValueError: An argument is out of range.
      ImportError: dp-accounting is not installed.
    """
    _check(n_releases=n_releases, epsilon=epsilon, delta=delta)
    return _gaussian_noise_multiplier(float(epsilon), float(delta), int(n_releases))


@functools.lru_cache(maxsize=1024)
def _gaussian_noise_multiplier(epsilon: float, delta: float, n_releases: int) -> float:
    high = zcdp_noise_multiplier(epsilon, delta, n_releases)
    if high == 0:
        return 0.0

    def enough(multiplier: float) -> bool:
        return gaussian_epsilon(multiplier, n_releases, delta) <= epsilon

    low = high / 2
    while enough(low):
        low /= 2
    return _least(enough, low, high)


def zcdp_noise_multiplier(epsilon: float, delta: float, n_releases: int) -> float:
    """Computes a multiplier sigma / Delta that is enough; see `gaussian_noise_multiplier`.

    In closed form, rho = (sqrt(ln(1/delta) + epsilon) - sqrt(ln(1/delta)))^2 and sigma / Delta =
    sqrt(T / (2 rho)) (Bun and Steinke, "Concentrated differential privacy", 2016, propositions 1.3
    and 1.6). The arguments, and what is returned, are those of `gaussian_noise_multiplier`.

    Raises:
      ValueError: An argument is out of range.
    """
    _check(n_releases=n_releases, epsilon=epsilon, delta=delta)
    epsilon = float(epsilon)  # of a scalar of 32 bits what follows would have as many
    if math.isinf(epsilon):
        return 0.0
    log = -math.log(delta)
    root_rho = epsilon / (math.sqrt(log + epsilon) + math.sqrt(log))  # without cancellation
    return math.sqrt(n_releases / 2) / root_rho


def laplace_scale(n_queries: int, epsilon: float, delta: float) -> float:
    """Finds the least scale b of Laplace noise with which n queries are (epsilon, delta)-DP.

    Each query changes by at most 1 between neighbours. Found by bisection, to a part in 10^4 and
    from above, with the privacy loss distribution of the n-fold composition. It lies between the
    scale that one query needs, 1 / (epsilon - 2 ln(1 - delta)), and that of basic composition,
    n / epsilon.

    Args:
      n_queries: n.
      epsilon: Positive; infinite for no noise.
      delta: In (0, 1).

    Returns:
      b; 0 for infinite epsilon.

    Raises:
      ValueError: An argument is out of range.
      ImportError: dp-accounting is not installed.
    """
    _check(n_queries=n_queries, epsilon=epsilon, delta=delta)
    return _laplace_scale(int(n_queries), float(epsilon), float(delta))


@functools.lru_cache(maxsize=1024)
def _laplace_scale(n_queries: int, epsilon: float, delta: float) -> float:
    if math.isinf(epsilon):
        return 0.0
    pld = _accountant()

    def composed(scale: float) -> float:
        # One query's loss lies within 1 / b of zero: a grid relative to that is as fine at any b.
        # Rounding up on it makes the answer an upper bound.
        one = pld.from_laplace_mechanism(scale, value_discretization_interval=1 / (100 * scale))
        return one.self_compose(n_queries).get_epsilon_for_delta(delta)

    low = 1 / (epsilon - 2 * math.log1p(-delta))
    return _least(lambda scale: composed(scale) <= epsilon, low, n_queries / epsilon)


def _least(enough: Callable[[float], bool], low: float, high: float) -> float:
    """Finds the least number from `low` to `high` that is enough, to 1e-4 of it and from above."""
    while high > low * (1 + 1e-4):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _accountant() -> Any:
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise ImportError(
            "noise scales are computed by dp-accounting, which is not installed;"
            " pip install 'jaxfedmvc[dp]'"
        ) from error
    return privacy_loss_distribution


def _check(**arguments: float) -> None:
    """Checks arguments, by their names: counts (n_...), budgets and multipliers.

    Before they are looked up in a cache, which no array and no list can be.

    Raises:
      ValueError: Names the first argument that is out of range, or traced: nothing is computed of
        numbers that are not known yet.
    """
    for name, value in arguments.items():
        if isinstance(value, jax.core.Tracer):
            raise checks.wrong(name, value, "a number that is known while tracing")
        if name.startswith("n_"):
            checks.whole(name, value, 1)
        if name == "delta":
            checks.number(name, value, (lambda x: 0 < x < 1, "a number between 0 and 1"))
        if name in ("epsilon", "noise_multiplier"):
            checks.number(name, value, (lambda x: x > 0, "more than 0"))
