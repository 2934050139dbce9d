"""What one run of DPFMPS spends: shares of the budget, scales of noise, and their composition.

Neighbours are data sets of which one has one person's row more than the other; the row lies in the
tables of all agents at once. Features lie in [-1, 1]. One row then changes the number of rows by 1,
the count of one node in each level of a tree by 1, the sum over one leaf by at most 1 in each
coordinate, and the members of one cluster by one. Replacing a row costs at most twice the epsilon.

Source: Li, Wang and Li, "Differentially private vertical federated clustering", 2023. Accounting
of the Laplace noise, and what floating point leaks: `jaxfedmvc.privacy`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc import checks

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


def spent(budget: Budget, size: ArrayLike) -> tuple[ArrayLike, Array]:
    """Computes (epsilon, delta) of a whole run, by sequential composition.

    All agents hold features of the same persons, so that their parts add up. Within an agent the
    leaves are disjoint, and so are the clusters: their mechanisms do not add up.

    Args:
      budget: As `split` returns it.
      size: The published noisy number of rows, which sets the sketches' delta.

    Returns:
      Epsilon, a float if the budget holds floats; and the probability delta with which it may be
      broken, float32, zero for infinite epsilon.
    """
    of_agent = budget.counts + budget.sums + budget.memberships
    epsilon = budget.size + budget.n_agents * of_agent
    delta = budget.n_agents * (SUMS_DELTA + sketch_delta(size))
    return epsilon, jnp.where(jnp.isinf(epsilon), 0.0, delta)


def sketch_delta(size: ArrayLike) -> Array:
    """Returns delta = 1 / size of an agent's sketches, at most MAX_DELTA.

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
    """Draws noise z with P(z) proportional to exp(-epsilon |z|), int32; 0 for infinite epsilon.

    The difference of two geometric variables.
    """
    draws = jax.random.geometric(key, -jnp.expm1(-jnp.asarray(epsilon)), (2, *shape))
    return draws[0] - draws[1]
