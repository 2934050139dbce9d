"""Gaussian releases and Laplace scales against closed forms."""

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from jaxfedmvc import privacy


@pytest.mark.parametrize("epsilon, delta", [(0.1, 1e-6), (1.0, 1e-3), (3.0, 0.2)])
def test_laplace_scale_of_one_query_is_the_closed_form(epsilon, delta):
    exact = 1 / (epsilon - 2 * math.log1p(-delta))
    found = privacy.laplace_scale(1, epsilon, delta)
    assert exact <= found <= 1.0002 * exact


@pytest.mark.parametrize("n_queries, epsilon", [(3, 0.13), (40, 0.13), (40, 5.0), (300, 0.02)])
def test_laplace_scale_is_the_least_that_the_accountant_admits(n_queries, epsilon):
    from dp_accounting.pld import privacy_loss_distribution as pld

    def composed(scale, pessimistic):
        one = pld.from_laplace_mechanism(
            scale,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,
            value_discretization_interval=2e-3 / scale,
        )
        return one.self_compose(n_queries).get_epsilon_for_delta(1e-6)

    found = privacy.laplace_scale(n_queries, epsilon, 1e-6)
    assert composed(found, True) <= epsilon * (1 + 1e-5)
    assert composed(0.999 * found, True) > epsilon
    assert composed(0.98 * found, False) > epsilon  # not an artefact of rounding up
    assert 1 / epsilon <= 1.001 * found <= 1.001 * n_queries / epsilon


def test_hardly_any_noise_is_bounded_without_a_grid(monkeypatch):
    """By the exact curve delta(epsilon) of a Gaussian mechanism (Balle and Wang, 2018)."""

    def exact(mu, delta):
        def excess(epsilon):
            first, second = norm.logcdf([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu])
            return math.exp(first) * -math.expm1(epsilon + second - first) - delta

        return brentq(excess, 0, mu**2)

    for multiplier, delta in ((0.0099, 1e-5), (0.001, 1e-5), (0.005, 0.2)):
        right = exact(1 / multiplier, delta)
        assert right <= privacy.gaussian_epsilon(multiplier, 1, delta) <= 1.01 * right
    monkeypatch.setattr(privacy, "_accountant", None)
    assert privacy.gaussian_epsilon(2e-6, 4, 1e-5) == pytest.approx(0.5e12, rel=1e-4)
    assert privacy.gaussian_epsilon(1e-170, 4, 1e-5) == math.inf  # whose square is 0


def test_many_queries_need_less_than_basic_composition():
    assert privacy.laplace_scale(300, 0.13, 1e-6) < 0.5 * 300 / 0.13


def test_no_noise_for_infinite_epsilon():
    assert privacy.laplace_scale(7, math.inf, 1e-6) == 0


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("n_queries", (0, 1.0, 1e-6)),
        ("n_queries", (2.5, 1.0, 1e-6)),
        ("epsilon", (1, -1.0, 1e-6)),
        ("epsilon", (1, None, 1e-6)),
        ("delta", (1, 1.0, 0.0)),
        ("delta", (1, 1.0, 1.0)),
    ],
)
def test_laplace_scale_names_the_bad_argument(name, arguments):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        privacy.laplace_scale(*arguments)


def test_numbers_may_be_scalars_of_numpy_and_jax():
    """No array can be looked up in a cache."""
    for number in (np.float64, np.array, jnp.float32):
        assert privacy.gaussian_epsilon(number(2.0), 3, 1e-5) == privacy.gaussian_epsilon(
            2, 3, 1e-5
        )
        same = privacy.gaussian_noise_multiplier(number(2.0), 1e-5, np.int64(3))
        assert same == privacy.gaussian_noise_multiplier(2.0, 1e-5, 3)
        assert privacy.laplace_scale(3, number(2.0), 1e-5) == privacy.laplace_scale(3, 2.0, 1e-5)
        closed = privacy.zcdp_noise_multiplier(number(2.0), 1e-5, np.int64(3))
        assert type(closed) is float and closed == privacy.zcdp_noise_multiplier(2.0, 1e-5, 3)


def test_what_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"^noise_multiplier: got"):
        privacy.gaussian_epsilon([1.0], 1, 1e-5)
    with pytest.raises(ValueError, match=r"^epsilon: got"):
        privacy.laplace_scale(3, [1.0], 1e-5)
    with pytest.raises(ValueError, match=r"^epsilon: got.*known while tracing"):
        jax.jit(lambda e: privacy.gaussian_noise_multiplier(e, 1e-5, 1))(1.0)


def test_a_missing_accountant_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxfedmvc\[dp\]'"):
        privacy.laplace_scale(2, 0.777, 1e-6)


# --- Repeated Gaussian releases -------------------------------------------------------------------


def analytic_delta(multiplier, n_releases, epsilon):
    """Exact: theorem 8 of Balle and Wang (2018) for one release of multiplier z / sqrt(T)."""
    mu = math.sqrt(n_releases) / multiplier
    low = norm.logcdf(-mu / 2 - epsilon / mu)
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + low)


def analytic_epsilon(multiplier, n_releases, delta):
    return brentq(lambda e: analytic_delta(multiplier, n_releases, e) - delta, 0, 1e4, rtol=1e-12)


@pytest.mark.parametrize(
    "multiplier, n_releases, delta",
    [(15.5, 10, 1e-5), (2.18, 10, 1e-5), (1.0, 1, 1e-3), (40.0, 1000, 1e-8), (0.1, 1, 1e-6)],
)
def test_gaussian_epsilon_is_the_closed_form(multiplier, n_releases, delta):
    exact = analytic_epsilon(multiplier, n_releases, delta)
    found = privacy.gaussian_epsilon(multiplier, n_releases, delta)
    assert exact * (1 - 1e-7) <= found <= exact * (1 + 1e-5) + 1e-7


def test_gaussian_epsilon_is_that_of_a_composition():
    from dp_accounting.pld import privacy_loss_distribution as pld

    composed = pld.from_gaussian_mechanism(4.0, value_discretization_interval=1e-3)
    composed = composed.self_compose(10).get_epsilon_for_delta(1e-5)
    assert privacy.gaussian_epsilon(4.0, 10, 1e-5) == pytest.approx(composed, rel=1e-4)


@pytest.mark.parametrize("epsilon, multiplier", [(1.0, 15.5), (8.0, 2.18)])
def test_zcdp_multiplier_of_known_cases(epsilon, multiplier):
    found = privacy.zcdp_noise_multiplier(epsilon, 1e-5, 10)
    assert found == pytest.approx(multiplier, rel=3e-3)
    # The bound's own equation: epsilon = rho + 2 sqrt(rho ln(1 / delta)) with rho = T / (2 z^2).
    rho = 10 / (2 * found**2)
    assert rho + 2 * math.sqrt(rho * math.log(1e5)) == pytest.approx(epsilon, rel=1e-12)
    assert privacy.zcdp_noise_multiplier(epsilon, 1e-5, 40) == pytest.approx(2 * found, rel=1e-12)


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("n_releases", [1, 10])
def test_noise_multiplier_is_the_least_that_is_enough(epsilon, n_releases):
    found = privacy.gaussian_noise_multiplier(epsilon, 1e-5, n_releases)
    assert analytic_delta(found, n_releases, epsilon) <= 1e-5
    assert analytic_delta(0.9998 * found, n_releases, epsilon) > 1e-5
    assert found <= privacy.zcdp_noise_multiplier(epsilon, 1e-5, n_releases)


def test_far_less_than_the_closed_bound_may_be_enough():
    """Where most of the budget is delta, that bound is ten times too much."""
    found = privacy.gaussian_noise_multiplier(0.1, 0.9, 1)
    assert 0.9998 * found <= brentq(lambda z: analytic_delta(z, 1, 0.1) - 0.9, 0.1, 1) <= found
    assert found < 0.1 * privacy.zcdp_noise_multiplier(0.1, 0.9, 1)


def test_more_noise_is_needed_for_less_epsilon_less_delta_and_more_releases():
    least = privacy.gaussian_noise_multiplier
    base = least(1.0, 1e-5, 10)
    assert least(2.0, 1e-5, 10) < base < least(0.5, 1e-5, 10)
    assert least(1.0, 1e-4, 10) < base < least(1.0, 1e-6, 10)
    assert least(1.0, 1e-5, 9) < base < least(1.0, 1e-5, 11)
    assert (
        privacy.gaussian_epsilon(base, 10, 1e-5) <= 1.0 < privacy.gaussian_epsilon(base, 11, 1e-5)
    )


def test_the_ends_of_the_gaussian_range():
    assert privacy.zcdp_noise_multiplier(math.inf, 1e-5, 3) == 0
    assert privacy.gaussian_noise_multiplier(math.inf, 1e-5, 3) == 0
    assert privacy.gaussian_epsilon(math.inf, 3, 1e-5) == 0
    # So much delta that no epsilon is needed.
    assert privacy.gaussian_epsilon(10.0, 1, 0.5) == 0


@pytest.mark.parametrize(
    "name, function, arguments",
    [
        ("noise_multiplier", privacy.gaussian_epsilon, (0.0, 1, 1e-5)),
        ("noise_multiplier", privacy.gaussian_epsilon, (math.nan, 1, 1e-5)),
        ("n_releases", privacy.gaussian_epsilon, (1.0, 0, 1e-5)),
        ("n_releases", privacy.gaussian_epsilon, (1.0, 2.5, 1e-5)),
        ("n_releases", privacy.gaussian_epsilon, (1.0, math.nan, 1e-5)),
        ("noise_multiplier", privacy.gaussian_epsilon, ("a", 1, 1e-5)),
        ("delta", privacy.gaussian_epsilon, (1.0, 1, 0.0)),
        ("delta", privacy.gaussian_epsilon, (1.0, 1, "a")),
        ("epsilon", privacy.gaussian_noise_multiplier, (0.0, 1e-5, 1)),
        ("delta", privacy.gaussian_noise_multiplier, (1.0, 1.0, 1)),
        ("n_releases", privacy.zcdp_noise_multiplier, (1.0, 1e-5, 0)),
        ("epsilon", privacy.zcdp_noise_multiplier, (-1.0, 1e-5, 1)),
    ],
)
def test_gaussian_accounting_names_the_bad_argument(name, function, arguments):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        function(*arguments)


def test_gaussian_accounting_without_the_accountant_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxfedmvc\[dp\]'"):
        privacy.gaussian_epsilon(0.777, 2, 1e-6)
