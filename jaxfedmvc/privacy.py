"""Differential privacy: what releases cost, how much noise they need, and the vertical k-means.

Two parts. Neighbours in both are data sets of which one has one person's row more than the other
(add/remove); replacing a row is removing one and adding one.

Repeated Gaussian releases (`gaussian_epsilon`, `gaussian_noise_multiplier` and the closed bound
`zcdp_noise_multiplier`). A release is all that one round publishes of all rows, of L2 sensitivity
Delta, with N(0, sigma^2) added to every entry; the noise multiplier is z = sigma / Delta. What
Delta is, the method says: the most that one row changes the release, and twice that for replacing
a row. Releases may depend on those before. Where m clients each add N(0, sigma^2 / m) and only the
sum is seen (`secure.secure_aggregation`), the sum is such a release, as long as no client keeps its
part of the noise from it. Rows are protected, not clients.

Vertical k-means (the rest): the shares of the budget, noise scales and what is spent. The row lies
in the tables of all agents at once. Features lie in [-1, 1]. One row then changes the number of
rows by 1, the count of one node in each level of a tree by 1, the sum over one leaf by at most 1 in
each coordinate, and the members of one cluster by one. Replacing a row costs at most twice the
epsilon. Source: Li, Wang and Li, "Differentially private vertical federated clustering", 2023.

The noise is drawn in floating point, which leaks where an adversary sees all its bits (Mironov,
"On significance of the least significant bits for differential privacy", 2012); nothing is done
against that here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

# --- Repeated Gaussian releases -------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def gaussian_epsilon(noise_multiplier: float, n_releases: int, delta: float) -> float:
    """Epsilon that T Gaussian releases spend together at delta, tight.

    T releases of multiplier z are together as private as one of z / sqrt(T) (Dong, Roth and Su,
    "Gaussian differential privacy", 2022, corollary 3.3), whose privacy loss distribution N(mu^2 /
    2, mu^2) with mu = sqrt(T) / z is evaluated on a grid, rounded up.

    Args:
      noise_multiplier: z = sigma / Delta, positive; infinite for pure noise.
      n_releases: T.
      delta: In (0, 1).

    Raises:
      ValueError: An argument is out of range.
      ImportError: dp-accounting is not installed.
    """
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier: got {noise_multiplier}; allowed is more than 0")
    _check_at_least_one("n_releases", n_releases)
    _check_delta(delta)
    if math.isinf(noise_multiplier):
        return 0.0
    of_all = noise_multiplier / math.sqrt(n_releases)
    # A grid relative to the spread mu of the loss is as fine at any multiplier.
    return (
        _accountant()
        .from_gaussian_mechanism(of_all, value_discretization_interval=1e-3 / of_all)
        .get_epsilon_for_delta(delta)
    )


@functools.lru_cache(maxsize=1024)
def gaussian_noise_multiplier(epsilon: float, delta: float, n_releases: int) -> float:
    """Least multiplier sigma / Delta with which T Gaussian releases are (epsilon, delta)-DP.

    By bisection of `gaussian_epsilon`, to a part in 10^4 and from above.

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
    """A multiplier sigma / Delta that is enough, in closed form; see `gaussian_noise_multiplier`.

    rho = (sqrt(ln(1/delta) + epsilon) - sqrt(ln(1/delta)))^2 and sigma / Delta = sqrt(T / (2 rho))
    (Bun and Steinke, "Concentrated differential privacy", 2016, propositions 1.3 and 1.6).

    Raises:
      ValueError: An argument is out of range.
    """
    _check_at_least_one("n_releases", n_releases)
    _check_budget(epsilon, delta)
    if math.isinf(epsilon):
        return 0.0
    log = -math.log(delta)
    root_rho = epsilon / (math.sqrt(log + epsilon) + math.sqrt(log))  # without cancellation
    return math.sqrt(n_releases / 2) / root_rho


def _least(enough: Callable[[float], bool], low: float, high: float) -> float:
    """The least number between `low` and `high` that is enough, to 1e-4 of it and from above."""
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


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: got {value}; allowed is 1 or more")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta: got {delta}; allowed is a number between 0 and 1")


def _check_budget(epsilon: float, delta: float) -> None:
    if not epsilon > 0:
        raise ValueError(f"epsilon: got {epsilon}; allowed is more than 0")
    _check_delta(delta)


# --- Vertical k-means -----------------------------------------------------------------------------

# Of an agent's budget for its centres, the share that goes to the counts of its tree; the sums get
# the rest.
COUNTS_SHARE = 0.2
# The probability with which the sums of one agent may break their epsilon.
SUMS_DELTA = 1e-6
# The size is noisy and may come out small; the sketches' delta = 1 / size stays below this.
MAX_DELTA = 0.01


class Budget(NamedTuple):
    """Epsilon of every mechanism; `spent` adds them up.

    Attributes:
      size: Of the noisy number of rows, published once.
      counts: Of all node counts of one agent's tree.
      sums: Of the leaf sums of one agent's tree.
      memberships: Of all sketches of one agent.
      n_agents: How many agents spend the last three, on features of the same persons.
    """

    size: float
    counts: float
    sums: float
    memberships: float
    n_agents: int


def split(epsilon: float, n_agents: int, size_share: float) -> Budget:
    """Shares epsilon out: the size's part first, then as much to each agent, half for centres.

    Args:
      epsilon: Of the whole run, positive; infinite for no privacy and no noise.
      n_agents: Number of agents.
      size_share: Part of it for the number of rows, in (0, 1).

    Raises:
      ValueError: An argument is out of range.
    """
    if not epsilon > 0:
        raise ValueError(
            f"epsilon: got {epsilon}; allowed is more than 0, or infinity for no noise"
        )
    _check_at_least_one("n_agents", n_agents)
    if not 0 < size_share < 1:
        raise ValueError(f"size_share: got {size_share}; allowed is a number between 0 and 1")
    half = (1 - size_share) * epsilon / (2 * n_agents)
    return Budget(
        size=size_share * epsilon,
        counts=COUNTS_SHARE * half,
        sums=(1 - COUNTS_SHARE) * half,
        memberships=half,
        n_agents=n_agents,
    )


def spent(budget: Budget, size: ArrayLike) -> tuple[ArrayLike, Array]:
    """(epsilon, delta) of a whole run, by sequential composition.

    All agents hold features of the same persons, so that their parts add up. Within an agent the
    leaves are disjoint, and so are the clusters: their mechanisms do not add up.

    Args:
      budget: As `split` gives it.
      size: The published noisy number of rows, which sets the sketches' delta.

    Returns:
      Epsilon, a float if the budget holds floats; and the probability delta with which it may be
      broken, float32, zero for infinite epsilon.
    """
    of_agent = budget.counts + budget.sums + budget.memberships
    epsilon = budget.size + budget.n_agents * of_agent
    delta = budget.n_agents * (SUMS_DELTA + sketch_delta(size))
    return epsilon, jnp.where(jnp.isinf(epsilon), 0.0, delta)


@functools.lru_cache(maxsize=1024)
def laplace_scale(n_queries: int, epsilon: float, delta: float) -> float:
    """Least scale b of Laplace noise with which n queries together are (epsilon, delta)-DP.

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
    _check_at_least_one("n_queries", n_queries)
    _check_budget(epsilon, delta)
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


def sketch_delta(size: ArrayLike) -> Array:
    """delta = 1 / size of an agent's sketches, at most MAX_DELTA.

    Without that bound a size that came out as 1 would mean that anything may be published.
    """
    return jnp.minimum(1.0 / jnp.asarray(size, jnp.float32), MAX_DELTA)


class SketchNoise(NamedTuple):
    """What makes a Flajolet-Martin sketch differentially private; zeros for infinite epsilon.

    Attributes:
      n_phantoms: k_p, the elements that are added to every set, float32 and a whole number.
      least: alpha_min, the least value that is published, int32.
    """

    n_phantoms: Array
    least: Array


def sketch_noise(epsilon: ArrayLike, n_sketches: int, delta: ArrayLike) -> SketchNoise:
    """Phantoms and floor with which m sketches of one set are together (epsilon, delta)-DP.

    eps_1 = epsilon / (4 sqrt(m ln(1/delta))) is the share of one sketch by advanced composition,
    k_p = ceil(1 / (e^eps_1 - 1)), alpha_min = ceil(-log2(1 - e^-eps_1)). Li et al. 2023 after
    Smith, Song and Thakurta, "The Flajolet-Martin sketch itself preserves differential privacy",
    2020. The hash must be random and unknown to whoever sees the sketches. The composition holds
    while (sqrt(2) + sqrt(m / ln(1/delta)) (e^eps_1 - 1)) / 4 <= 1, which only an epsilon in the
    tens or more breaks.

    Args:
      epsilon: Of all m sketches of an agent's clusters.
      n_sketches: m.
      delta: In (0, 1).
    """
    share = jnp.asarray(epsilon, jnp.float32) / (4 * jnp.sqrt(-n_sketches * jnp.log(delta)))
    return SketchNoise(
        n_phantoms=jnp.ceil(1 / jnp.expm1(share)),
        least=jnp.ceil(-jnp.log2(-jnp.expm1(-share))).astype(jnp.int32),
    )


def discrete_laplace(key: Array, epsilon: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Noise z with P(z) proportional to exp(-epsilon |z|), int32; 0 for infinite epsilon.

    The difference of two geometric variables.
    """
    draws = jax.random.geometric(key, -jnp.expm1(-jnp.asarray(epsilon)), (2, *shape))
    return draws[0] - draws[1]
