"""FedMVL: its equations against dense solves and a few lines of NumPy, and planted clusters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import mannwhitneyu
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fedmvl import (
    FedMVLConfig,
    FedMVLHyperparams,
    basis,
    factor_step,
    fedmvl,
    low_rank_solve,
    objective,
    random_rows,
    standardised,
    view_weights,
)
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation

# Compiled code runs for milliseconds here and takes seconds to optimise.
jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
K, N, ROUNDS = 3, 40, 8
TRUTH = np.arange(N) % K
# Only row 6 is held by nobody; each other row lacks at most one agent's.
HELD = np.ones((2, N), bool)
HELD[0, [3, 6, 7, 20]] = HELD[1, [0, 6, 12, 39]] = False


def views(seed=0):
    """Two views in which the three groups are three directions."""
    rng = np.random.default_rng(seed)
    centers = [5 * rng.normal(size=(K, d)) for d in (8, 5)]
    return [c[TRUTH] + 0.1 * rng.normal(size=(N, c.shape[1])) for c in centers]


def vertical(x, held=None, fill=0.0):
    """One agent for each view; what an agent lacks is `fill` there."""
    held = np.ones((len(x), len(x[0])), bool) if held is None else held
    ids = np.where(held, np.arange(len(x[0]))[None], -1).astype(np.int32)
    federation = Federation.from_arrays(
        x, TRUTH, partition=[Part((a,), ids[a : a + 1], np.array([a])) for a in range(len(x))]
    )

    def filled(cohort):
        return cohort.replace(
            views=tuple(jnp.where(cohort.mask[..., None], x, fill) for x in cohort.views)
        )

    return federation.replace(cohorts=tuple(map(filled, federation.cohorts)))


@functools.partial(jit, static_argnames="step")
def program_of_step(federation, key, hyper, step):
    algorithm = fedmvl(FedMVLConfig(K, step=step, n_init=5), hyper)
    return engine.run(algorithm, federation, key, ROUNDS)


def program(federation, key, hyper, step="exact"):
    # A default that is given would be compiled once more.
    return program_of_step(federation, key, hyper, step)


# Weak orthogonality: at the defaults the published method moves little in few rounds.
WORKING = FedMVLHyperparams(mu=1e-3, rho=1.0, eta=1.0)


@pytest.fixture(scope="module")
def incomplete():
    return program(vertical(views(), HELD), jax.random.key(0), WORKING)


# --- Equations ------------------------------------------------------------------------------------


def test_low_rank_solve_is_the_dense_solve():
    rng = np.random.default_rng(0)
    y, b = rng.random((N, 4)), rng.normal(size=(N, 4))
    d = rng.uniform(0.1, 0.5, N)
    solve = jit(low_rank_solve)
    for mu in (0.0, 1e-3, 1e3):
        expected = np.linalg.solve(mu * y @ y.T + np.diag(d), (mu + 0.1) * y + b)
        found = solve(mu, *map(np.float32, (y, d, mu + 0.1, b)))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_zero_rows_stay_zero():
    y = np.stack([np.ones(N), np.arange(N)], axis=1).astype(np.float32)
    y[5:9] = 0
    found = jit(low_rank_solve)(2.0, y, np.ones(N, np.float32), 1.0, 3 * y)
    assert (np.asarray(found)[5:9] == 0).all() and (np.asarray(found)[:5] != 0).all()


def test_step_of_the_exact_form_is_the_minimum_of_its_row():
    """The gradient of a^r |X - V U^T|^2 + <Phi, V> + rho/2 |V - W|^2 is zero there."""
    rng = np.random.default_rng(0)
    x, u = rng.normal(size=(N, 6)), rng.normal(size=(6, K))
    v, w, phi = (rng.normal(size=(N, K)) for _ in range(3))
    pull, rho = 0.6, 0.4
    arrays = map(np.float32, (x, u, v, w, phi, pull, pull, rho))
    step = jit(factor_step)
    found = np.asarray(step(*arrays))
    gradient = pull * (found @ u.T - x) @ u + phi + rho * (found - w)
    np.testing.assert_allclose(gradient, 0, atol=1e-4)
    # As published: the number of views in the place of 2 a^r.
    arrays = map(np.float32, (x, u, v, w, phi, pull, 2.0, rho))
    slope = rho * (w - v) - phi + pull * (x - v @ u.T) @ u
    expected = v + slope @ np.linalg.inv(2.0 * u.T @ u + rho * np.eye(K))
    np.testing.assert_allclose(step(*arrays), expected, rtol=1e-3, atol=1e-4)


def test_basis_is_least_squares_and_survives_empty_columns():
    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(N, 6)), rng.random((N, K))
    expected = np.linalg.lstsq(v, x, rcond=None)[0].T
    fitted = jit(lambda v: basis(np.float32(x), v))
    np.testing.assert_allclose(fitted(np.float32(v)), expected, atol=1e-3)
    empty = np.asarray(fitted(np.float32(v * [1, 0, 1])))
    assert np.isfinite(empty).all() and (empty[:, 1] == 0).all()
    assert (np.asarray(fitted(np.zeros((N, K), np.float32))) == 0).all()
    # Columns that are alike share what one of them would have.
    twice = np.float32(v[:, [0, 0, 2]])
    expected = np.linalg.lstsq(v[:, [0, 2]], x, rcond=None)[0]
    np.testing.assert_allclose(twice @ fitted(twice).T, v[:, [0, 2]] @ expected, atol=1e-3)


def test_rows_are_standardised_over_their_features():
    x = np.random.default_rng(0).normal(3.0, 2.0, size=(N, 6)).astype(np.float32)
    x[4] = 7.0
    mask = np.arange(N) != 5
    found = np.asarray(jit(standardised)(np.where(mask[:, None], x, np.float32(np.nan)), mask))
    rows = [i for i in range(N) if i not in (4, 5)]
    expected = (x - x.mean(1, keepdims=True))[rows] / x.std(1, ddof=1, keepdims=True)[rows]
    np.testing.assert_allclose(found[rows], expected, rtol=1e-4, atol=1e-5)
    assert (found[[4, 5]] == 0).all()
    assert (np.asarray(standardised(jnp.ones((3, 1)), mask[:3])) == 0).all()


def test_view_weights_minimise_their_term():
    errors, r = np.array([2, 1, 5], np.float32), 1.5
    weigh = jit(view_weights)
    a = np.asarray(weigh(errors, r))
    powers = (r * errors) ** (1 / (1 - r))
    np.testing.assert_allclose(a, powers / powers.sum(), rtol=1e-5)
    # Equal derivatives r a^(r-1) E: no exchange of weight between views helps.
    slopes = r * a ** (r - 1) * errors
    np.testing.assert_allclose(slopes, slopes[0], rtol=1e-4)
    assert np.isfinite(weigh(np.array([0, 1, 2], np.float32), r)).all()


def test_slow_agents_update_a_share_of_their_own_rows():
    mask = jnp.arange(N) < 30
    program = jit(random_rows)

    def draw(key, least):
        return program(key, mask, least)

    counts = []
    for i in range(30):
        assert (np.asarray(draw(jax.random.key(i), 1.0)) == np.asarray(mask)).all()
        rows = np.asarray(draw(jax.random.key(i), 0.5))
        assert not rows[30:].any()
        counts.append(rows.sum())
    assert 15 <= min(counts) < 19 and 26 < max(counts) <= 30
    # Of one row a share below one is none.
    one = jnp.arange(N) == 4
    assert not any(program(jax.random.key(i), one, 0.01).any() for i in range(5))


def test_all_factors_start_at_draws_of_their_own():
    """Of agents, W and G; zero where nobody, or the agent, holds the row."""
    federation = vertical(views(), HELD)
    init = jit(fedmvl(FedMVLConfig(K)).init)
    server, clients = init(jax.random.key(0), federation)
    factors = [np.asarray(x) for x in (*(c.factor[0] for c in clients), *server[1:3])]
    held = [*HELD, HELD.any(axis=0), HELD.any(axis=0)]
    for x, there in zip(factors, held, strict=True):
        assert (x[~there] == 0).all() and (x[there] > 0).all() and (x < 1).all()
    for i, x in enumerate(factors):
        for y in factors[:i]:
            assert not (x[HELD.all(axis=0)] == y[HELD.all(axis=0)]).any()


def rounds_in_numpy(x, held, v, w, g, hyper, published, rounds):
    """The published iteration in float64, with rows that agents lack; `v` is replaced in place."""
    mu, rho, eta, r = hyper.mu, hyper.rho, hyper.eta, hyper.r
    n, c = w.shape
    count, a = len(x), np.full(len(x), 1 / len(x))
    x = [
        np.where(h[:, None], (y - y.mean(1, keepdims=True)) / y.std(1, ddof=1, keepdims=True), 0)
        for y, h in zip(x, held, strict=True)
    ]
    psi, phi = np.zeros((n, c)), [np.zeros((n, c)) for _ in x]
    values = []
    for _ in range(rounds):
        residuals = []
        for m in range(count):
            u = x[m].T @ v[m] @ np.linalg.inv(v[m].T @ v[m])
            p = 2 * a[m] ** r
            slope = rho * (w - v[m]) - phi[m] + p * (x[m] - v[m] @ u.T) @ u
            curvature = count if published else p
            step = slope @ np.linalg.inv(curvature * u.T @ u + rho * np.eye(c))
            v[m] = np.maximum(v[m] + step, 0) * held[m][:, None]
            residuals.append(((x[m] - v[m] @ u.T) ** 2).sum())
        there = held.any(axis=0)[:, None]
        left = mu * g @ g.T + np.diag(eta + rho * held.sum(axis=0))
        w = np.linalg.solve(left, (mu + eta) * g - psi + sum(phi) + rho * sum(v)) * there
        g = np.linalg.solve(mu * w @ w.T + eta * np.eye(n), (mu + eta) * w + psi)
        psi = psi + eta * (w - g)
        phi = [phi[m] + rho * (v[m] - w) * held[m][:, None] for m in range(count)]
        a = (r * np.array(residuals)) ** (1 / (1 - r))
        a = a / a.sum()
        values.append((sum(residuals) + mu / 2 * ((g.T @ w - np.eye(c)) ** 2).sum()) / count)
    return w, np.array(values), a


def start_in_numpy(federation, key):
    """The factors that a run of this key starts with: V of the agents, W and G in float64."""
    start = engine.start(fedmvl(FedMVLConfig(K)), federation, key)
    factors = *(state.factor[0] for state in start.clients), *start.server[1:3]
    *v, w, g = (np.asarray(x, np.float64) for x in factors)
    return v, w, g


def test_a_published_step_is_as_long_as_views_are_many():
    """An agent's first step, in NumPy in double precision."""
    federation, key = vertical(views(), HELD), jax.random.key(3)
    algorithm = fedmvl(FedMVLConfig(K, step="published"))
    start = engine.start(algorithm, federation, key)
    phase, cohort = algorithm.round[0], federation.cohorts[0]
    state, client = jax.tree.map(lambda x: x[0], (start.clients[0], cohort))
    found, _, _ = jit(phase.client)(key, phase.broadcast(start.server, (0,)), state, client)
    v, w, g = start_in_numpy(federation, key)
    rounds_in_numpy(views(), HELD, v, w, g, FedMVLHyperparams(), True, 1)
    np.testing.assert_allclose(found.factor, v[0], rtol=1e-3, atol=1e-3)


def test_objective_of_a_hand_worked_case():
    """G^T W = [[2, 0], [3, 1]] is 1 + 9 from I in squares: (1 + 2 + 5 + 4 / 2 * 10) / 3."""
    w = jnp.array([[2.0, 0.0], [0.0, 1.0]])
    g = jnp.array([[1.0, 1.5], [0.0, 1.0]])
    assert objective(jnp.array([1.0, 2.0, 5.0]), w, g, 4.0) == pytest.approx(28 / 3)


@pytest.mark.parametrize("step", ["exact", pytest.param("published", marks=pytest.mark.slow)])
def test_rounds_are_the_published_iteration(step):
    """Against NumPy in double precision, at the authors' settings, from the same start."""
    hyper = FedMVLHyperparams(tol=0.0)
    federation, key = vertical(views(), HELD), jax.random.key(3)
    result = program(federation, key, hyper, step=step)
    w, values, a = rounds_in_numpy(
        views(), HELD, *start_in_numpy(federation, key), hyper, step == "published", ROUNDS
    )
    assert result.n_rounds == ROUNDS
    server = result.state.server
    found = result.info["rounds"][0]["server"]["objective"]
    np.testing.assert_allclose(found, values, rtol=2e-3)
    np.testing.assert_allclose([server.weights[(v,)] for v in range(2)], a, rtol=2e-3)
    np.testing.assert_allclose(server.consensus, w, atol=2e-3 * np.abs(w).max())


# --- The method -----------------------------------------------------------------------------------


def test_planted_clusters_are_found_with_rows_missing(incomplete):
    for labels, held in zip(incomplete.labels, HELD, strict=True):
        labels = np.asarray(labels[0])
        assert (labels[~held] == -1).all()
        assert adjusted_rand_score(TRUTH[held], labels[held]) == 1.0
    server = incomplete.state.server
    rows = np.arange(N) != 6
    assert adjusted_rand_score(TRUTH[rows], np.asarray(server.labels)[rows]) == 1.0
    assert server.labels[6] == -1 and (np.asarray(server.consensus)[6] == 0).all()


@pytest.mark.slow
def test_the_order_of_rows_decides_no_more_than_the_start_does():
    """Its random start is drawn by place, and not every start finds the clusters."""

    def scores(order):
        clients = vertical([x[order] for x in views()], HELD[:, order])
        rows = HELD.any(axis=0)[order]
        for key in map(jax.random.key, range(12)):
            labels = np.asarray(program(clients, key, WORKING).state.server.labels)
            yield adjusted_rand_score(TRUTH[order][rows], labels[rows])

    as_filed = list(scores(np.arange(N)))
    shuffled = list(scores(np.random.default_rng(3).permutation(N)))
    assert np.mean(as_filed) > 0.9 and np.mean(shuffled) > 0.9
    assert mannwhitneyu(as_filed, shuffled).pvalue > 0.05


@pytest.mark.slow
def test_fewer_distinct_rows_than_clusters_give_numbers():
    x = [np.where((np.arange(N) % 2)[:, None], x[:1], -x[:1]) for x in views()]
    found = program(vertical(x, HELD), jax.random.key(0), WORKING)
    leaves = jax.tree.leaves((found.labels, found.state.server.consensus))
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in leaves)


@pytest.mark.ci
def test_rows_that_an_agent_lacks_are_never_read(incomplete):
    for fill in (9.0, np.nan):
        found = program(vertical(views(), HELD, fill), jax.random.key(0), WORKING)
        for one, two in zip(found.labels, incomplete.labels, strict=True):
            np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(
            found.state.server.consensus, incomplete.state.server.consensus
        )


def test_it_ends_when_the_objective_stands():
    result = program(vertical(views()), jax.random.key(0), FedMVLHyperparams(mu=1e-3, tol=0.5))
    assert 1 < result.n_rounds < ROUNDS
    assert result.state.server.finished


def test_bytes_are_a_factor_each_way_and_the_labels():
    algorithm = fedmvl(FedMVLConfig(K))
    traffic = engine.traffic(algorithm, vertical(views()))
    assert traffic["setup"] == (0, 0)
    assert traffic["round"] == (2 * 4 * (N * K + 1), 2 * 4 * (N * K + 1))
    assert traffic["finish"] == (0, 2 * 4 * N)


def test_bad_input_is_named():
    for settings in ({"n_clusters": 0}, {"n_init": 0}, {"step": "newton"}):
        with pytest.raises(ValueError, match=f"^{next(iter(settings))}: got"):
            FedMVLConfig(**({"n_clusters": 2} | settings))
    for name, value in {"mu": -1, "rho": 0, "eta": 0, "r": 1, "least_share": 0, "tol": -1}.items():
        with pytest.raises(ValueError, match=f"^{name}: got {value}"):
            fedmvl(FedMVLConfig(2), FedMVLHyperparams(**{name: value}))
    shared = Federation.from_arrays(
        views(), partition=[Part((0, 1), np.array([[0, 1], [2, 3]]), np.arange(2))]
    )
    with pytest.raises(ValueError, match="vertical"):
        engine.start(fedmvl(FedMVLConfig(2)), shared, jax.random.key(0))
    few = vertical(views(), np.stack([np.arange(N) < 2, np.ones(N, bool)]))
    with pytest.raises(ValueError, match=r"client 0 .* 2 samples; allowed is 3"):
        engine.start(fedmvl(FedMVLConfig(3)), few, jax.random.key(0))
    apart = vertical(views(), np.stack([np.arange(N) < 20, np.arange(N) >= 20]))
    with pytest.raises(ValueError, match=r"FedMVL: no sample has views of both \(0,\) and \(1,\)"):
        engine.start(fedmvl(FedMVLConfig(3)), apart, jax.random.key(0))
    # Rows that are all the same fit almost without an error, and take the weight of the others.
    for x in (np.ones((N, 1)) * np.arange(4), np.stack([TRUTH, TRUTH + 1.0], axis=1)):
        alike = vertical([*views(), x])
        with pytest.raises(ValueError, match=r"FedMVL: samples of view 2 are all the same once"):
            engine.start(fedmvl(FedMVLConfig(3)), alike, jax.random.key(0))
    # Its rows would be zero and fit without an error.
    narrow = vertical([*views(), views()[0][:, :1]])
    with pytest.raises(ValueError, match="agent of view 2 has 1; allowed are 2 or more"):
        engine.start(fedmvl(FedMVLConfig(3)), narrow, jax.random.key(0))
