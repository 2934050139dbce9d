"""Shares of the budget, scales of sketch noise, and what a run of DPFMPS spends."""

import collections
import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, dlaplace, geom

from jaxfedmvc.algorithms.dpfmps import budget

jit_noise = jax.jit(budget.sketch_noise, static_argnums=1)
jit_delta = jax.jit(budget.sketches_delta, static_argnums=(1, 2))
jit_laplace = jax.jit(budget.discrete_laplace, static_argnums=2)


@settings(deadline=None, max_examples=25)
@given(st.floats(1e-3, 1e3), st.integers(1, 8), st.sampled_from([0.02, 0.05, 0.5]))
def test_shares_compose_to_epsilon(epsilon, n_agents, size_share):
    shares = budget.split(epsilon, n_agents, size_share)
    # A person is in the size once, and in the centres and memberships of every agent.
    total = shares.size
    for _ in range(n_agents):
        total += shares.counts + shares.sums + shares.memberships
    assert total == pytest.approx(epsilon, rel=1e-12)
    assert min(shares) > 0


def test_shares_of_a_hand_worked_case():
    shares = budget.split(1.0, 2, 0.05)
    np.testing.assert_allclose(shares, (0.05, 0.0475, 0.19, 0.2375, 2), rtol=1e-12)


def test_delta_of_a_run_is_that_of_sums_and_of_all_sketches_together():
    shares = budget.split(1.0, 3, 0.05)
    epsilon, delta = jax.jit(lambda size: budget.spent(shares, size, 100))(1000)
    assert epsilon == pytest.approx(1.0)
    noise = jit_noise(shares.memberships, 100, 1e-3)
    sketches = jit_delta(3 * shares.memberships, 3, 100, noise)
    assert float(delta) == pytest.approx(3e-6 + float(sketches), rel=1e-5)
    # A small size must not stand for "anything may be published".
    assert float(budget.sketch_delta(1)) == pytest.approx(0.01)
    nothing = budget.split(math.inf, 3, 0.05)
    assert jax.jit(lambda size: budget.spent(nothing, size, 100))(1000)[1] == 0


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("epsilon", (0.0, 2, 0.05)),
        ("epsilon", (math.nan, 2, 0.05)),
        ("n_agents", (1.0, 0, 0.05)),
        ("size_share", (1.0, 2, 1.0)),
    ],
)
def test_split_names_the_bad_argument(name, arguments):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        budget.split(*arguments)


def epsilon_for_share(share, m, delta):
    """The epsilon of m sketches of which each gets this share."""
    return share * 4 * math.sqrt(m * math.log(1 / delta))


def test_sketch_noise_of_a_hand_worked_case():
    # e^share = 1.3: 1/0.3 = 3.3 and -log2(1 - 1/1.3) = 2.1, both rounded up.
    noise = jit_noise(epsilon_for_share(math.log(1.3), 50, 1e-3), 50, 1e-3)
    np.testing.assert_array_equal(noise, (4, 3))


@pytest.mark.parametrize("m", [10, 50, 100, 1000, 4096])
def test_rounding_takes_no_phantom_and_no_least_value_away(m):
    epsilons, delta = np.geomspace(0.01, 20, 2000).astype(np.float32), np.float32(1e-4)
    noise = jax.jit(jax.vmap(lambda e: budget.sketch_noise(e, m, delta)))(epsilons)
    share = epsilons / (4 * np.sqrt(-m * np.log(np.float64(delta))))
    exact = 1 / np.expm1(share), -np.log2(-np.expm1(-share))
    for found, value in zip(noise, exact, strict=True):
        assert (found >= np.ceil(value)).all()
        assert (found <= np.ceil(value * (1 + 1e-5))).all()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.5])
def test_one_more_person_changes_no_sketch_value_by_more_than_its_share(share):
    """The exact distribution of a published value, for sets of n and of n + 1 elements."""
    noise = jit_noise(epsilon_for_share(share, 50, 1e-3), 50, 1e-3)
    least = int(noise.least)
    values = np.arange(least, 40)

    def published(n):
        at_most = np.power(1 - 2.0**-values, n + float(noise.n_phantoms))
        return np.diff(at_most, prepend=0.0)  # all that lies below the floor is on it

    for n in [0, 1, 5, 50]:
        fewer, more = published(n), published(n + 1)
        kept = (fewer > 1e-9) & (more > 1e-9)  # beyond, differences of float64 are rounding
        assert kept.sum() > 5
        assert np.abs(np.log(more[kept] / fewer[kept])).max() <= share * (1 + 1e-5)


@settings(deadline=None, max_examples=25)
@given(st.floats(1e-3, 20.0), st.sampled_from([10, 500, 4096]), st.floats(1e-6, 0.01))
def test_shares_of_sketches_compose_to_at_most_epsilon(epsilon, m, delta):
    """Advanced composition (Dwork, Rothblum and Vadhan, 2010) of m mechanisms."""
    share = epsilon / (4 * math.sqrt(m * math.log(1 / delta)))
    composed = share * math.sqrt(2 * m * math.log(1 / delta)) + m * share * math.expm1(share)
    assert composed <= epsilon


def published(n_agents, noise, with_row):
    """Exact: what agents of one hash function publish of a row alone in its clusters, or of none.

    Returns the probabilities of their values, [34, ..., 34].
    """
    values = np.arange(34)
    phantoms = (1 - 2.0**-values) ** float(noise.n_phantoms)
    phantoms[33] = 1.0
    joint = 0.0
    for value in range(1, 34) if with_row else [0]:
        own = 2.0 ** -min(value, 32) if with_row else 1.0
        at_most = np.where(values >= max(value, int(noise.least)), phantoms, 0.0)
        of_agent = np.diff(at_most, prepend=0.0)
        joint = joint + own * functools.reduce(np.multiply.outer, [of_agent] * n_agents)
    return joint


@pytest.mark.parametrize("n_agents, m", [(1, 1), (2, 1), (3, 1), (2, 200), (3, 200)])
def test_delta_of_sketches_is_little_above_the_exact_one(n_agents, m):
    """By enumeration for one hash function, and by the accountant's composition for more."""
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

    epsilon, grid = 0.8, 1e-3
    noise = budget.SketchNoise(np.float32(40.0 * math.sqrt(m)), np.int32(7))
    first, second = (published(n_agents, noise, row).ravel() for row in (True, False))
    exact = []
    for one, other in ((first, second), (second, first)):
        if m == 1:
            exact.append(np.maximum(one - math.exp(epsilon) * other, 0.0).sum())
            continue
        some = (one > 0) & (other > 0)
        losses = np.floor(np.log(one[some] / other[some]) / grid).astype(int)  # a lower bound
        table = collections.Counter()
        for loss, chance in zip(losses.tolist(), one[some].tolist(), strict=True):
            table[loss] += chance
        pmf = pld_pmf.create_pmf(table, grid, one[other == 0].sum(), False)
        composed = PrivacyLossDistribution(pmf).self_compose(m)
        exact.append(composed.get_delta_for_epsilon(epsilon))
    found = float(jit_delta(epsilon, n_agents, m, noise))
    assert 0.98 * max(exact) <= found <= 4 * max(exact) + 1e-9
    # More agents give a rare value away, of which one alone hardly tells.
    assert n_agents > 1 or found < 1e-12


def test_sketches_that_hide_nothing_spend_a_delta_of_one():
    nothing = budget.SketchNoise(np.float32(1.0), np.int32(1))
    assert float(jit_delta(0.1, 3, 5000, nothing)) == 1.0
    hardly = jit_noise(1e-6, 100, 1e-3)
    assert 0 < float(jit_delta(3e-6, 3, 100, hardly)) < 1e-3


def test_discrete_laplace_has_its_distribution():
    draws = np.asarray(jit_laplace(jax.random.key(1), 0.7, (20_000,)))
    assert draws.dtype == np.int32
    values = np.arange(-8, 9)
    expected = dlaplace(0.7).pmf(values)
    inside = np.abs(draws) <= 8
    counts = np.bincount(draws[inside] + 8, minlength=17)
    observed = [*counts, (~inside).sum()]
    whole = 20_000 * np.array([*expected, 1 - expected.sum()])
    assert chisquare(observed, whole).pvalue > 1e-3


def test_discrete_laplace_reaches_to_the_quantiles_of_63_bits(monkeypatch):
    """The difference of two geometric variables, of probability 2^-65 and of nearly one."""
    words = np.zeros((2, 2, 2), np.uint32)
    words[1] = [[0, 1], [1, 0]]  # of which half of its distribution each one is
    monkeypatch.setattr(jax.random, "bits", lambda *_: words)
    most, other = np.asarray(budget.discrete_laplace(jax.random.key(0), 0.01, (2,)))
    assert most == -other
    beyond = geom(-math.expm1(-0.01), loc=-1).logsf  # by 23 bits the most is 1600
    assert beyond(most) <= -65 * math.log(2) < beyond(most - 1)


def test_noise_is_jittable_with_traced_numbers():
    traces = []

    @jax.jit
    def noise(epsilon, delta):
        traces.append(None)
        return budget.sketch_noise(epsilon, 20, delta)

    for epsilon in (0.5, 2.0):
        expected = budget.sketch_noise(epsilon, 20, 0.01)
        np.testing.assert_array_equal(noise(np.float32(epsilon), np.float32(0.01)), expected)
    assert len(traces) == 1


def test_no_noise_for_infinite_epsilon():
    np.testing.assert_array_equal(budget.sketch_noise(math.inf, 10, 0.01), (0, 0))
    np.testing.assert_array_equal(budget.discrete_laplace(jax.random.key(0), math.inf, (9,)), 0)
