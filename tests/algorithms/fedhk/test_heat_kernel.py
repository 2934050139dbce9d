"""The equations of E-FKMVC against plain loops in double precision, and at their limits."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc.algorithms.fedhk import heat_kernel as hk

N, C, WIDTHS = 9, 3, (4, 3)


def make(seed, per_sample):
    """Views, centres, coefficients, view weights, and a mask that leaves two rows out."""
    rng = np.random.default_rng(seed)
    views = [rng.normal(size=(N, d)).astype(np.float32) for d in WIDTHS]
    centres = [rng.normal(size=(C, d)).astype(np.float32) for d in WIDTHS]
    shapes = [(N, d) if per_sample else () for d in WIDTHS]
    deltas = [np.float32(rng.uniform(0.0, 0.6, shape)) for shape in shapes]
    weights = rng.dirichlet(np.ones(len(WIDTHS))).astype(np.float32)
    return views, centres, deltas, weights, np.arange(N) < N - 2


def loops(views, centres, deltas, weights, where, m, alpha):
    """Every equation as it is written, one scalar after the other."""
    effective = np.ones(len(views)) if np.isinf(alpha) else weights.astype(float) ** alpha
    phi = np.zeros((len(views), N, C))
    for h, (x, a, delta) in enumerate(zip(views, centres, deltas, strict=True)):
        delta = np.broadcast_to(delta, x.shape)
        for i in range(N):
            for k in range(C):
                for j in range(x.shape[1]):
                    phi[h, i, k] += float(delta[i, j]) * (float(x[i, j]) - float(a[k, j])) ** 2
    ked = 1 - np.exp(-phi)
    mu = np.zeros((N, C))
    for i in range(N):
        distances = [sum(e * ked[h, i, k] for h, e in enumerate(effective)) for k in range(C)]
        for k in range(C):
            mu[i, k] = 1 / sum((distances[k] / other) ** (1 / (m - 1)) for other in distances)
    moved, printed, costs = [], [], []
    for h, (x, a, delta) in enumerate(zip(views, centres, deltas, strict=True)):
        delta = np.broadcast_to(delta, x.shape)
        of_rule, of_print = np.zeros(a.shape), np.zeros(a.shape)
        for k in range(C):
            for j in range(x.shape[1]):
                rule = print_ = rule_sum = print_sum = 0.0
                for i in np.flatnonzero(where):
                    weight = mu[i, k] ** m * np.exp(-phi[h, i, k])
                    print_, print_sum = print_ + weight * x[i, j], print_sum + weight
                    weight *= delta[i, j]
                    rule, rule_sum = rule + weight * x[i, j], rule_sum + weight
                of_rule[k, j], of_print[k, j] = rule / rule_sum, print_ / print_sum
        moved.append(of_rule)
        printed.append(of_print)
        costs.append(
            sum(mu[i, k] ** m * ked[h, i, k] for i in np.flatnonzero(where) for k in range(C))
        )
    objective = sum(e * cost for e, cost in zip(effective, costs, strict=True))
    new = np.array(
        [1 / sum((cost / other) ** (1 / (alpha - 1)) for other in costs) for cost in costs]
    )
    return {
        "phi": list(phi),
        "ked": list(ked),
        "mu": mu,
        "costs": np.array(costs),
        "moved": moved,
        "printed": printed,
        "log_objective": np.log(objective),
        "weights": new,
    }


@jax.jit
def library(views, centres, deltas, weights, where, m, alpha):
    phis = [hk.exponents(*of) for of in zip(views, centres, deltas, strict=True)]
    keds = [hk.kernel_distance(phi) for phi in phis]
    relevance = jnp.exp(hk.log_relevance(weights, alpha))
    mu = hk.memberships(sum(r * ked for r, ked in zip(relevance, keds, strict=True)), m)
    powers = hk.powered(mu, m, where)
    costs = jnp.stack([hk.view_cost(ked, powers) for ked in keds])

    def moved(printed):
        return [
            hk.centres_from(*hk.centre_sums(x, phi, delta, powers, printed), a)
            for x, phi, delta, a in zip(views, phis, deltas, centres, strict=True)
        ]

    return {
        "phi": phis,
        "ked": keds,
        "mu": mu,
        "costs": costs,
        "moved": moved(False),
        "printed": moved(True),
        "log_objective": hk.log_objective(costs, weights, alpha),
        "weights": hk.view_weights(costs, alpha),
    }


# For what is tested alone: one program for all arguments of the same shapes.
exponents, kernel_distance, bandwidth = map(
    jax.jit, (hk.exponents, hk.kernel_distance, hk.bandwidth)
)
memberships, powered, view_cost = map(jax.jit, (hk.memberships, hk.powered, hk.view_cost))
log_relevance, log_objective = map(jax.jit, (hk.log_relevance, hk.log_objective))
view_weights, centres_from = map(jax.jit, (hk.view_weights, hk.centres_from))
proximal_centres = jax.jit(hk.proximal_centres)
minmax_coefficients, absmean_coefficients = map(
    jax.jit, (hk.minmax_coefficients, hk.absmean_coefficients)
)


# --- Each equation --------------------------------------------------------------------------------


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("m, alpha", [(1.1, 1.5), (1.5, 5.0), (3.0, np.inf)])
def test_equations_are_those_of_plain_loops(per_sample, m, alpha):
    data = make(0, per_sample)
    expected = loops(*data, m, alpha)
    found = library(*data, m, alpha)
    chex.assert_trees_all_close(found, expected, rtol=2e-4, atol=2e-5)
    differ = np.abs(np.concatenate(found["moved"], 1) - np.concatenate(found["printed"], 1)).max()
    # Only with a coefficient of each sample do the two rules differ.
    assert differ > 1e-3 if per_sample else differ < 1e-6


def test_memberships_and_view_weights_by_hand():
    # m = 2: shares of 1/1 and 1/4; m = 1.5: of 1/1 and 1/16. alpha = 2 and 1.5 likewise.
    row = np.float32([[1.0, 4.0]])
    np.testing.assert_allclose(memberships(row, 2.0), [[0.8, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(memberships(row, 1.5), [[16 / 17, 1 / 17]], rtol=1e-5)
    # Nothing belongs to a centre that is not in use, and it changes no other membership.
    limited = memberships(np.append(row, np.float32([[np.inf]]), axis=1), 2.0)
    np.testing.assert_allclose(limited, [[0.8, 0.2, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(view_weights(row[0], 2.0), [0.8, 0.2], rtol=1e-6)
    np.testing.assert_allclose(view_weights(row[0], 1.5), [16 / 17, 1 / 17], rtol=1e-5)


def test_memberships_are_shares_of_one_at_the_least_fuzzifier():
    """Logarithms of up to 69 over 1e-6; over 1e-8 their rounding overflows in some rows."""
    rng = np.random.default_rng(0)
    distances = 10 ** rng.uniform(-30, 0, size=(500, 1)) * rng.uniform(size=(500, 3)) ** 4
    found = jax.jit(lambda x: memberships(x, 1.000001))(distances.astype(np.float32))
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)


def test_kernel_distance_is_exact_near_the_centre():
    phi = np.array([0.0, 1e-9, 1e-4, 1.0, 200.0], np.float32)
    np.testing.assert_allclose(kernel_distance(phi), -np.expm1(-phi.astype(float)), rtol=1e-6)


@pytest.mark.parametrize("per_sample", [False, True])
def test_exponents_of_one_feature_lose_nothing_to_rounding(per_sample):
    x = np.float32([[0.9], [0.9001], [0.1]])
    a = np.float32([[0.90005], [0.1]])
    delta = np.full((3, 1), 2.0, np.float32) if per_sample else np.float32(2.0)
    exact = 2 * (x.astype(float) - a.T.astype(float)) ** 2
    np.testing.assert_allclose(exponents(x, a, delta), exact, rtol=1e-6)


def test_a_coefficient_may_be_a_number_of_python():
    x = np.float32([[0.0, 1.0], [2.0, 0.0]])
    np.testing.assert_array_equal(hk.exponents(x, x, 0.5), [[0, 2.5], [2.5, 0]])


def test_bandwidth_makes_the_exponent_of_a_random_pair_beta():
    x = np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32) * 7
    delta = bandwidth(x.var(axis=0).sum(), 0.3)
    x -= x.mean(axis=0)
    phi = exponents(x, x, delta)
    np.testing.assert_allclose(np.mean(phi), 0.3, rtol=1e-5)
    # To the mean it is half of that.
    phi = exponents(x, np.zeros((1, 5)), delta)
    np.testing.assert_allclose(np.mean(phi), 0.15, rtol=1e-5)
    assert bandwidth(0.0) == 0.0


def test_coefficients_of_samples():
    x = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    x[:, 1] = 2.0  # constant: tells nothing apart
    low, high, mean = x.min(axis=0), x.max(axis=0), x.mean(axis=0)
    found = minmax_coefficients(x, low, high)
    expected = np.divide(x - low, high - low, out=np.zeros_like(x), where=high > low) / 3
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.max() == np.float32(1 / 3) and found.min() == 0 and not found[:, 1].any()
    found = absmean_coefficients(x, mean)
    np.testing.assert_allclose(found, np.abs(x - mean) / 3, rtol=1e-5, atol=1e-7)


def test_coefficients_of_samples_outside_the_range_are_those_of_its_ends():
    """As of clients that took no part; below the range a coefficient would be negative."""
    x = np.float32([[-3.0], [0.0], [1.0], [5.0]])
    found = minmax_coefficients(x, np.zeros(1), np.ones(1))
    assert found[:, 0].tolist() == [0, 0, 1, 1]


def test_signed_coefficients_let_the_objective_fall_without_end():
    """(24) as printed: delta < 0 below the mean, where far centres make phi very negative."""
    x = np.array([[-2.0], [-1.0], [3.0]])
    signed = x - x.mean()
    powers = np.ones((3, 1))
    costs = [
        float(view_cost(kernel_distance(signed * (x - a) ** 2), powers))
        for a in (0.0, 2.0, 4.0, 6.0)
    ]
    assert costs[1] < 0 and costs[3] < -1e20
    assert all(later < earlier for earlier, later in itertools.pairwise(costs))
    delta = absmean_coefficients(np.float32(x), np.float32([x.mean()]))
    for a in (0.0, 2.0, 6.0):
        phi = exponents(np.float32(x), np.full((1, 1), a), delta)
        assert view_cost(kernel_distance(phi), powers) >= 0


# --- One exponential for each view ----------------------------------------------------------------


def test_view_weights_move_with_one_exponential_for_each_view_and_not_with_a_joint_one():
    rng = np.random.default_rng(2)
    phi = np.float32(rng.uniform(0.1, 1, (2, 12, 3)) * [[[1.0]], [[0.2]]])
    powers = powered(memberships(phi.sum(axis=0), 1.3), 1.3, np.ones(12, bool))
    costs = np.stack([view_cost(kernel_distance(p), powers) for p in phi])
    found = view_weights(costs, 2.0)
    np.testing.assert_allclose(found, (1 / costs) / np.sum(1 / costs), rtol=1e-5)
    assert found[1] > 0.7
    joint = view_cost(kernel_distance(phi.sum(axis=0)), powers)
    np.testing.assert_allclose(view_weights(np.stack([joint, joint]), 2.0), 0.5)
    # Identical views cost the same.
    np.testing.assert_allclose(view_weights(costs[[0, 0]], 2.0), 0.5)


# --- Degenerate samples, extreme exponents --------------------------------------------------------


@pytest.mark.parametrize("m", [1.001, 1.2, 2.0, 10.0])
def test_a_sample_on_centres_belongs_to_them_equally(m):
    distances = jnp.array(
        [
            [0.0, 0.5, 0.9],  # on one
            [0.0, 0.0, 0.9],  # on two
            [0.0, 0.0, 0.0],  # on all
            [0.3, 0.3, 0.3],
            [0.0, 1e-9, 1e-9],  # in a tiny scale
            [0.0, 5e-8, 0.9],  # on two, but for rounding
        ]
    )
    mu = np.asarray(memberships(distances, m))
    np.testing.assert_allclose(mu.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(mu[[2, 3]], 1 / 3, rtol=1e-5)
    np.testing.assert_allclose(mu[[1, 5], 0], mu[[1, 5], 1], rtol=1e-6)
    assert (mu[0, 0] > mu[0, 1]) and (mu[4, 0] > mu[4, 1])
    if m <= 2:  # beyond, the floor of the distance keeps memberships from being crisp
        np.testing.assert_allclose(mu[0], [1, 0, 0], atol=1e-5)
        np.testing.assert_allclose(mu[1], [0.5, 0.5, 0], atol=1e-5)
        np.testing.assert_allclose(mu[4], [1, 0, 0], atol=1e-5)


@functools.cache
def batched(per_sample):
    def objective(centres, views, deltas, weights, where, m, alpha):
        return library(views, centres, deltas, weights, where, m, alpha)["log_objective"]

    def both(views, centres, *rest):
        return library(views, centres, *rest), jax.grad(objective)(centres, views, *rest)

    return jax.jit(jax.vmap(both, (None,) * 5 + (0, 0)))


@pytest.mark.parametrize("case", ["random", "duplicates", "centre on sample", "all the same"])
def test_extreme_exponents_and_degenerate_data_stay_finite_with_finite_gradients(case):
    views, centres, deltas, weights, where = make(3, True)
    if case == "duplicates":
        views = [np.repeat(x[:1], N, axis=0) for x in views]
    elif case == "centre on sample":
        centres = [x[:C] for x in views]
    elif case == "all the same":
        views = [np.ones_like(x) for x in views]
        centres = [np.ones_like(a) for a in centres]
    ms, alphas = np.meshgrid([1.001, 1.2, 2.0, 10.0], [1.001, 2.0, 30.0, 100.0, np.inf])
    found, gradients = batched(True)(
        views,
        centres,
        deltas,
        weights,
        where,
        ms.ravel().astype(np.float32),
        alphas.ravel().astype(np.float32),
    )
    found = jax.device_get(found)
    chex.assert_tree_all_finite((found, gradients))
    np.testing.assert_allclose(found["mu"].sum(axis=2), 1, rtol=1e-5)
    np.testing.assert_allclose(found["weights"].sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(found["weights"][alphas.ravel() == np.inf], 0.5, rtol=1e-6)
    if case == "centre on sample":
        own = found["mu"][:, np.arange(C), np.arange(C)]
        np.testing.assert_allclose(own[ms.ravel() <= 2], 1, atol=1e-4)
    if case == "all the same":
        np.testing.assert_allclose(found["mu"], 1 / 3, rtol=1e-5)


def test_large_exponents_do_not_underflow():
    """v^100 of six views is 1e-78, no float32: relevances and log J are right all the same."""
    weights = np.array([0.1, 0.15, 0.15, 0.2, 0.2, 0.2], np.float32)
    costs = np.array([3.0, 1.0, 2.0, 5.0, 0.5, 1.0], np.float32)
    exact = weights.astype(float)
    for alpha in (2.0, 30.0, 100.0):
        found = log_objective(costs, weights, alpha)
        np.testing.assert_allclose(found, np.log((exact**alpha * costs).sum()), rtol=1e-5)
        relevance = np.exp(log_relevance(weights, alpha))
        np.testing.assert_allclose(relevance, (exact / exact.max()) ** alpha, rtol=1e-4, atol=1e-30)
    found = log_objective(costs, weights, np.inf)
    np.testing.assert_allclose(found, np.log(costs.sum()), rtol=1e-6)
    assert not log_relevance(weights, np.inf).any()


def test_alpha_near_one_takes_one_view_and_large_alpha_all():
    costs = np.float32([1.0, 1.1, 2.0])
    np.testing.assert_allclose(view_weights(costs, 1.001), [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(view_weights(costs, 1e6), 1 / 3, atol=1e-6)
    heaviest = [float(view_weights(costs, alpha)[0]) for alpha in (1.1, 2.0, 5.0, 30.0)]
    assert sorted(heaviest, reverse=True) == heaviest


# --- Padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_sample", [False, True])
def test_values_of_padding_do_not_matter(per_sample):
    views, centres, deltas, weights, where = make(4, per_sample)
    other = [np.where(where[:, None], x, np.float32(0.0)) for x in views]
    first = library(views, centres, deltas, weights, where, 1.3, 3.0)
    second = library(other, centres, deltas, weights, where, 1.3, 3.0)
    for name in ("moved", "printed", "costs", "weights", "log_objective"):
        chex.assert_trees_all_equal(first[name], second[name])
    # Not even memberships that are no number.
    assert not powered(np.full((2, 3), np.nan), 1.3, np.zeros(2, bool)).any()


def test_padding_rows_are_as_if_they_were_not_there():
    views, centres, deltas, weights, where = make(5, True)
    padded = library(views, centres, deltas, weights, where, 1.3, 3.0)
    n = where.sum()
    alone = library(
        [x[:n] for x in views], centres, [d[:n] for d in deltas], weights, where[:n], 1.3, 3.0
    )
    for name in ("moved", "printed", "costs", "weights", "log_objective"):
        chex.assert_trees_all_close(padded[name], alone[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(padded["mu"][:n], alone["mu"], rtol=1e-5, atol=1e-7)


# --- Centres --------------------------------------------------------------------------------------


def test_a_view_of_next_to_no_weight_is_not_left_out():
    """Its weight of (1e6)^-10 rounds to 0, which would leave it out for good."""
    found = view_weights(np.float32([1, 1e6]), 1.1, np.array([True, True]))
    np.testing.assert_allclose(found, [1, 0], atol=1e-20)
    again = view_weights(np.float32([1, 1]), 1.1, np.asarray(found) > 0)
    np.testing.assert_allclose(again, 0.5)
    alone = view_weights(np.float32([1, 1]), 1.1, np.array([True, False]))
    np.testing.assert_array_equal(alone, [1, 0])


def test_centres_without_weight_keep_their_place():
    previous = np.float32([[7.0, 8.0], [9.0, 10.0]])
    numerators = np.float32([[2.0, 4.0], [0.0, 0.0]])
    found = centres_from(numerators, np.float32([2.0, 0.0]), previous)
    assert found.tolist() == [[1, 2], [9, 10]]
    # Weights of each feature: a single coordinate may be without.
    found = centres_from(numerators, np.float32([[2.0, 0.0], [1.0, 1e-12]]), previous)
    assert found.tolist() == [[1, 8], [0, 10]]
    found = centres_from(numerators, np.zeros(2), previous)
    assert found.tolist() == previous.tolist()


@pytest.mark.parametrize("ndim", [1, 2])
def test_proximal_centres_minimise_the_bound_and_its_penalty(ndim):
    """gamma = tau mean(W): with W = (1, 3) and tau = 1 the shares are 1/3 and 3/5."""
    weights = np.float32([1.0, 3.0]) if ndim == 1 else np.float32([[1.0, 1.0], [3.0, 3.0]])
    numerators, anchor = np.float32([[4.0, 6.0], [3.0, 6.0]]), np.float32([[1.0, 0.0], [6.0, 7.0]])
    found = proximal_centres(numerators, weights, anchor, 1.0)
    np.testing.assert_allclose(found, [[2, 2], [3, 4]], rtol=1e-6)

    def penalised(a):
        broad = weights if ndim == 2 else weights[:, None]
        own = numerators / broad
        return jnp.sum(broad * (a - own) ** 2) + 2 * jnp.sum((a - anchor) ** 2)

    np.testing.assert_allclose(jax.jit(jax.grad(penalised))(found), 0, atol=1e-4)
    np.testing.assert_allclose(
        proximal_centres(numerators, weights, anchor, 0.0), [[4, 6], [1, 2]], rtol=1e-6
    )
    assert (proximal_centres(numerators, weights, anchor, np.inf) == anchor).all()


@pytest.mark.parametrize("tau", [0.0, 1.0, np.inf])
def test_proximal_centres_without_weight_are_the_anchor(tau):
    anchor = np.float32([[1.0, 0.0], [6.0, 7.0]])
    found = proximal_centres(
        np.float32([[4.0, 6.0], [0.0, 0.0]]), np.float32([2.0, 0.0]), anchor, tau
    )
    assert found[1].tolist() == [6, 7]
    empty = proximal_centres(np.zeros((2, 2)), np.zeros(2), anchor, tau)
    assert empty.tolist() == anchor.tolist()
