"""What one run of DPFMPS spends: shares of the budget, scales of noise, and their composition.

Neighbours are data sets of which one has one person's row more than the other; the row lies in the
tables of all agents at once. Features lie in [-1, 1]. One row then changes the number of rows by 1,
the count of one node in each level of a tree by 1, the sum over one leaf by at most 1 in each
coordinate, and the members of one cluster by one. Replacing a row costs at most twice the epsilon.

Epsilon adds up over agents, but the delta of their sketches does not. All agents hash alike, as the
server must intersect their sets, so that a row of a rare value shows it in one cluster of each
agent at once, where phantoms, which agents draw apart, hardly ever agree. `sketches_delta` is of
all sketches together.

Source: Li, Wang and Li, "Differentially private vertical federated clustering", 2023, who add the
deltas up as if each agent's hash functions were its own. Accounting
of the Laplace noise, and what floating point leaks: `jaxfedmvc.privacy`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import gammaln
from jax.typing import ArrayLike

from jaxfedmvc import checks
from jaxfedmvc.messages.transforms import exponential_numbers

# Of an agent's budget for its centres, the share that goes to the counts of its tree; the sums get
# the rest.
COUNTS_SHARE = 0.2
# The probability with which the sums of one agent may break their epsilon.
SUMS_DELTA = 1e-6
# The size is noisy and may come out small; the sketches' delta = 1 / size stays below this.
MAX_DELTA = 0.01
# Hashes have 32 bits: the value of a hash of zero.
GREATEST_VALUE = 33


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
        raise checks.wrong("epsilon", epsilon, "more than 0, or infinity for no noise")
    checks.whole("n_agents", n_agents, 1)
    if not 0 < size_share < 1:
        raise checks.wrong("size_share", size_share, "a number between 0 and 1")
    half = (1 - size_share) * epsilon / (2 * n_agents)
    return Budget(
        size=size_share * epsilon,
        counts=COUNTS_SHARE * half,
        sums=(1 - COUNTS_SHARE) * half,
        memberships=half,
        n_agents=n_agents,
    )


def spent(budget: Budget, size: ArrayLike, n_sketches: int) -> tuple[ArrayLike, Array]:
    """Computes (epsilon, delta) of a whole run, by sequential composition.

    All agents hold features of the same persons, so that their parts add up, and all agents'
    sketches are one part, see above. Within an agent the leaves are disjoint, and so are the
    clusters: their mechanisms do not add up.

    Args:
      budget: As `split` returns it; `n_agents` static.
      size: The published noisy number of rows, which sets the sketches' noise.
      n_sketches: m of each cluster.

    Returns:
      Epsilon, a float if the budget holds floats; and the probability delta with which it may be
      broken, float32, zero for infinite epsilon.
    """
    of_agent = budget.counts + budget.sums + budget.memberships
    epsilon = budget.size + budget.n_agents * of_agent
    noise = sketch_noise(budget.memberships, n_sketches, sketch_delta(size))
    sketches = sketches_delta(
        budget.n_agents * budget.memberships, budget.n_agents, n_sketches, noise
    )
    delta = jnp.minimum(budget.n_agents * SUMS_DELTA + sketches, 1.0)
    return epsilon, jnp.where(jnp.isinf(epsilon), 0.0, delta)


def sketch_delta(size: ArrayLike) -> Array:
    """Returns delta = 1 / size that an agent's sketches have their noise for, at most MAX_DELTA.

    Without that bound a size that came out as 1 would mean that anything may be published.
    """
    return jnp.minimum(1.0 / jnp.asarray(size, jnp.float32), MAX_DELTA)


class SketchNoise(NamedTuple):
    """Noise of a differentially private Flajolet-Martin sketch; zeros for infinite epsilon.

    Attributes:
      n_phantoms: k_p, the elements that are added to every set, float32 and a whole number.
      least: alpha_min, the least value that is published, int32.
    """

    n_phantoms: Array
    least: Array


def sketch_noise(epsilon: ArrayLike, n_sketches: int, delta: ArrayLike) -> SketchNoise:
    """Computes the noise with which m sketches of one set are together (epsilon, delta)-DP.

    eps_1 = epsilon / (4 sqrt(m ln(1/delta))) is the share of one sketch by advanced composition,
    k_p = ceil(1 / (e^eps_1 - 1)), alpha_min = ceil(-log2(1 - e^-eps_1)). Li et al. 2023 after
    Smith, Song and Thakurta, "The Flajolet-Martin sketch itself preserves differential privacy",
    2020. The hash must be random and unknown to whoever sees the sketches. The composition holds
    while (sqrt(2) + sqrt(m / ln(1/delta)) (e^eps_1 - 1)) / 4 <= 1, which only an epsilon in the
    tens or more breaks. It is of one agent's sketches; see `sketches_delta` for all agents'.

    Args:
      epsilon: Of all m sketches of an agent's clusters.
      n_sketches: m.
      delta: In (0, 1).
    """
    share = jnp.asarray(epsilon, jnp.float32) / (4 * jnp.sqrt(-n_sketches * jnp.log(delta)))
    share *= 1 - 2e-6  # more than float32 may be off by: never a phantom less
    return SketchNoise(
        n_phantoms=jnp.ceil(1 / jnp.expm1(share)),
        least=jnp.ceil(-jnp.log2(-jnp.expm1(-share))).astype(jnp.int32),
    )


def sketches_delta(epsilon: ArrayLike, n_agents: int, n_sketches: int, noise: SketchNoise) -> Array:
    """Bounds the delta with which the sketches of agents that hash alike are together (epsilon, .).

    Other rows only raise values, of both neighbours alike, so that the worst row is alone in its
    cluster of every agent. One hash function then publishes, of each agent, the greater one of the
    row's value and a phantom's, or the phantom's alone. With F and G the distributions of the two,
    p and g their probabilities, and c agents at the least published value a, the likelihood ratio
    of these is

        r(a, c) = F(a - 1) + p(a) (G(a) / g(a))^c,    and F(alpha_min) at a = alpha_min.

    Nearly p / (k_p p)^c at a large value: an agent alone (c = 1) can tell no more than a phantom
    more would, but c agents do. The m functions are independent. Their delta comes from the moments
    of r (Canonne, Kamath and Steinke, "The discrete Gaussian for differential privacy", 2020,
    proposition 12), at the best order, with rows of a value beyond the best bound left to delta.

    Args:
      epsilon: Of all sketches of all agents.
      n_agents: Static.
      n_sketches: m, of each cluster.
      noise: See `sketch_noise`.

    Returns:
      float32, at most 1.
    """
    a = jnp.arange(1, GREATEST_VALUE + 1)[:, None]
    c = jnp.arange(1, n_agents + 1, dtype=jnp.float32)[None]
    share = jnp.exp2(-jnp.minimum(a, GREATEST_VALUE - 1).astype(jnp.float32))  # p
    beyond = jnp.where(a < GREATEST_VALUE, share, 0.0)  # 1 - F(a)
    before = jnp.exp2(1.0 - a)  # 1 - F(a - 1)
    at_most = noise.n_phantoms * jnp.log1p(-beyond)  # log G
    # log(g / G), of all that lies below on alpha_min.
    is_least = a == jnp.maximum(noise.least, 1)
    ratio = jnp.where(
        is_least, 0.0, _log1mexp(noise.n_phantoms * (jnp.log1p(-before) - jnp.log1p(-beyond)))
    )
    # Without the row c agents are at a, and the others above, with a binomial probability.
    ways = gammaln(n_agents + 1.0) - gammaln(c + 1) - gammaln(n_agents - c + 1)
    above = jnp.where(c < n_agents, (n_agents - c) * _log1mexp(at_most), 0.0)
    chance = jnp.where(a >= noise.least, jnp.exp(ways + c * (at_most + ratio) + above), 0.0)
    excess = jnp.where(is_least, -beyond, share * jnp.exp(-c * ratio) - before)  # r - 1
    excess = jnp.where(chance > 0, excess, 0.0)

    def moment(logs: Array, order: Array) -> Array:
        """Computes the log of the moment of all m functions; exact where it is near zero."""
        terms = jnp.where(chance > 0, chance * jnp.expm1(order * logs), 0.0)
        return n_sketches * jnp.log1p(jnp.maximum(jnp.sum(terms), -1.0))

    orders = jnp.asarray(1 + np.geomspace(0.02, 4000, 100), jnp.float32)
    weights = (orders - 1) * (jnp.log1p(-1 / orders) - epsilon) - jnp.log(orders)

    def more(bound: Array, left: Array) -> Array:
        """Computes delta of a row more; values beyond `bound`, of probability `left`, are lost."""
        logs = jnp.log1p(jnp.where(a <= bound, excess, -left))
        moments = jax.vmap(lambda order: moment(logs, order))(orders)
        return n_sketches * left + jnp.exp(jnp.minimum(jnp.min(moments + weights), 0.0))

    fewer = jax.vmap(lambda order: moment(jnp.log1p(excess), 1 - order))(orders)
    without = jnp.exp(jnp.minimum(jnp.min(fewer + weights), 0.0))
    with_row = jnp.min(jax.vmap(more)(a[:, 0], beyond[:, 0]))
    return jnp.minimum(jnp.maximum(with_row, without), 1.0)


def _log1mexp(x: Array) -> Array:
    """Computes log(1 - e^x) for x of 0 or less."""
    return jnp.log(-jnp.expm1(x))


def discrete_laplace(key: Array, epsilon: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Draws noise z with P(z) proportional to exp(-epsilon |z|), int32; 0 for infinite epsilon.

    The difference of two geometric variables, each the floor of an exponential one.
    """
    draws = exponential_numbers(key, (2, *shape)) / jnp.asarray(epsilon, jnp.float32)
    whole = jnp.floor(draws).astype(jnp.int32)
    return whole[0] - whole[1]
