"""Attacks on messages: what they must find where it is planted, and must not where it is not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score

from jaxfedmvc.algorithms.mgcd.graph import Factored, dense, without_diagonal
from jaxfedmvc.attacks import reconstruction as leakage
from jaxfedmvc.attacks.reconstruction import InverterConfig

KEY = jax.random.key(0)
N, D, RANK = 60, 4, 5
RNG = np.random.default_rng(0)
Z = RNG.normal(size=(N, D)).astype(np.float32) * np.array([4, 3, 2, 1], np.float32) + 1
X = (Z @ RNG.normal(size=(D, 6)) + 0.3).astype(np.float32)
GRAPH = Factored(jnp.asarray(Z), jnp.asarray(np.linalg.solve(Z.T @ Z + 6 * np.eye(D), Z.T)))

points_of = jax.jit(leakage.coordinates, static_argnums=1)
leading = jax.jit(leakage.leading, static_argnums=1)
linear_r2, r2 = jax.jit(leakage.linear_r2), jax.jit(leakage.r2)
prototype_r2 = jax.jit(leakage.best_prototype_r2)
drawn_of = jax.jit(leakage._drawn)
CONFIG = InverterConfig(hidden=(16,), epochs=20, snapshots=2)
invert = jax.jit(partial(leakage.invert, config=CONFIG))


def padded(x, rows, columns=0):
    """With junk after the real entries."""
    return np.pad(x, ((0, rows), (0, columns)), constant_values=np.nan)


# --- Singular vectors -----------------------------------------------------------------------------


def test_of_factors_the_decomposition_is_that_of_their_product():
    found = jax.device_get(leading(GRAPH, RANK))
    u, s, _ = np.linalg.svd(np.asarray(GRAPH.left) @ np.asarray(GRAPH.right))
    np.testing.assert_allclose(found.values[:D], s[:D], rtol=1e-4)
    assert found.values[D] == 0 and not found.vectors[:, D].any()  # wider than the factors
    np.testing.assert_allclose(np.abs(found.vectors[:, :D]), np.abs(u[:, :D]), atol=1e-4)


@pytest.mark.parametrize("shape", [(N, N), (N, 7)])
def test_of_an_array_the_decomposition_is_numpys(shape):
    left, right = RNG.normal(size=(N, 6)), RNG.normal(size=(6, shape[1]))
    x = (left * 2.0 ** -np.arange(6)) @ right + 1e-4 * RNG.normal(size=shape)
    found = leading(jnp.asarray(x, jnp.float32), RANK)
    u, s, _ = np.linalg.svd(x)
    np.testing.assert_allclose(found.values, s[:RANK], rtol=1e-4)
    np.testing.assert_allclose(np.abs(found.vectors), np.abs(u[:, :RANK]), atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [GRAPH, dense(GRAPH)], ids=["factors", "array"])
def test_padding_and_order_of_samples(graph):
    points = np.asarray(points_of(graph, RANK))
    where = np.arange(N + 3) < N
    if isinstance(graph, Factored):
        more = Factored(padded(graph.left, 3), padded(graph.right.T, 3).T)
    else:
        more = padded(graph, 3, 3)
    with_padding = np.asarray(points_of(more, RANK, where))
    assert not with_padding[N:].any()
    np.testing.assert_allclose(with_padding[:N, :D], points[:, :D], atol=2e-3)
    order = RNG.permutation(N)
    moved = (
        Factored(graph.left[order], graph.right[:, order])
        if isinstance(graph, Factored)
        else graph[order][:, order]
    )
    np.testing.assert_allclose(
        np.asarray(points_of(moved, RANK))[:, :D], points[order, :D], atol=2e-3
    )


def test_signs_do_not_depend_on_those_of_the_message():
    points = np.asarray(points_of(Z, D))
    assert np.all(np.sum(points**3, axis=0) > 0)
    np.testing.assert_allclose(points_of(-Z, D), points, atol=1e-4)
    # Of unit scale whatever the number of samples: the mean square is that of the message.
    np.testing.assert_allclose(np.sum(points**2), N * np.sum(Z**2), rtol=1e-4)


# --- Shares of variance ---------------------------------------------------------------------------


def test_a_planted_subspace_is_found_and_noise_reaches_chance():
    assert linear_r2(Z, points_of(GRAPH, RANK)) > 0.9999
    # Without its diagonal the graph still spans the space, but for what the diagonal mixes in.
    assert linear_r2(Z, points_of(jax.jit(without_diagonal)(dense(GRAPH)), RANK)) > 0.98
    draws = jax.random.normal(KEY, (200, N, RANK))
    chance = jax.jit(jax.vmap(leakage.linear_r2, (None, 0)))(Z, draws)
    np.testing.assert_allclose(np.mean(np.asarray(chance)), RANK / (N - 1), atol=0.02)


def test_linear_r2_is_that_of_least_squares():
    basis = np.concatenate([Z[:, :2] + RNG.normal(size=(N, 2)), np.zeros((N, 1))], axis=1)
    basis = np.concatenate([basis, basis[:, :1] * 2], axis=1).astype(np.float32)  # of rank 2
    fitted = LinearRegression().fit(basis[:, :2], X).predict(basis[:, :2])
    expected = 1 - np.sum((X - fitted) ** 2) / np.sum((X - X.mean(axis=0)) ** 2)
    np.testing.assert_allclose(linear_r2(X, basis), expected, rtol=1e-4)
    where = np.arange(N + 4) < N
    np.testing.assert_allclose(
        linear_r2(padded(X, 4), padded(basis, 4), where), expected, rtol=1e-4
    )


def test_r2_weights_columns_by_their_variance():
    guess = X + RNG.normal(size=X.shape).astype(np.float32)
    expected = r2_score(X, guess, multioutput="variance_weighted")
    np.testing.assert_allclose(r2(X, guess), expected, rtol=1e-4)
    where = np.arange(N + 2) < N
    np.testing.assert_allclose(r2(padded(X, 2), padded(guess, 2), where), expected, rtol=1e-4)


def test_a_constant_has_no_r2():
    for guess in (np.ones((3, 1)), np.zeros((3, 1))):
        assert np.isnan(r2(np.ones((3, 1)), guess))


def test_prototypes_a_hand_worked_case():
    x = np.float32([[0.0], [1.0], [10.0], [np.nan]])
    where = np.array([True, True, True, False])
    # Errors 0, 1 and 1 around a variance of (11/3)^2 + (8/3)^2 + (19/3)^2 = 182 / 3.
    value = prototype_r2(x, np.float32([[0.0], [11.0]]), where)
    np.testing.assert_allclose(value, 1 - 2 / (182 / 3), rtol=1e-6)
    assert prototype_r2(x[:3], x[:3]) == 1


# --- Inversion ------------------------------------------------------------------------------------


def test_a_planted_linear_map_is_learned_and_disorder_is_not():
    points = np.asarray(points_of(GRAPH, RANK))
    known, unknown = slice(0, 30), slice(30, N)
    found = invert(KEY, points[known], X[known], points[unknown])
    again = invert(KEY, points[known], X[known], points[unknown])
    np.testing.assert_array_equal(again.features, found.features)
    assert r2(X[unknown], found.features) > 0.999
    assert found.validation.shape == (len(CONFIG.penalties) + CONFIG.snapshots,)
    mixed = np.random.default_rng(0).permutation(points)
    lost = invert(KEY, mixed[known], X[known], mixed[unknown])
    assert r2(X[unknown], lost.features) < 0.1


@pytest.mark.slow
def test_what_is_chosen_is_best_on_known_samples_and_padding_does_not_count():
    points = np.asarray(points_of(GRAPH, RANK))
    found = invert(KEY, points[:30], X[:30], points[30:])
    where = np.arange(33) < 30
    more = invert(KEY, padded(points[:30], 3), padded(X[:30], 3), points[30:], where=where)
    np.testing.assert_allclose(more.validation, found.validation, atol=1e-3)
    np.testing.assert_allclose(more.features, found.features, atol=0.02)


@pytest.mark.slow
def test_a_network_finds_what_no_line_does():
    angle = RNG.uniform(-1, 1, size=(400, 1)).astype(np.float32)
    bowl = angle**2
    config = InverterConfig(hidden=(32,), epochs=150, snapshots=1, learning_rate=1e-2)
    learn = jax.jit(partial(leakage.invert, config=config))
    found = learn(KEY, angle[:300], bowl[:300], angle[300:])
    assert found.validation[-1] > 0.95 and np.max(found.validation[:-1]) < 0.3
    assert leakage.r2(bowl[300:], found.features) > 0.95


def test_candidates_are_judged_by_known_samples_that_they_have_not_seen():
    """By scikit-learn's ridge regression; of noise, where what was seen is fitted all the same."""
    points = np.random.default_rng(1).normal(size=(N, RANK)).astype(np.float32)
    held = np.asarray(drawn_of(jax.random.split(KEY, 3)[0], np.ones(30, bool), 0.2))
    points[np.argmax(held)] *= 50  # far from all others: it must not blow up
    seen, x, y = ~held, points[:30], X[:30]
    x = np.clip((x - x[seen].mean(axis=0)) / x[seen].std(axis=0), -4, 4)
    expected = []
    for penalty in CONFIG.penalties:
        ridge = Ridge(penalty * seen.sum()).fit(x[seen], y[seen])
        guess = ridge.predict(x[held])
        expected.append(r2_score(y[held], guess, multioutput="variance_weighted"))
    found = invert(KEY, points[:30], X[:30], points[30:])
    assert held.sum() == 6
    np.testing.assert_allclose(found.validation[: len(expected)], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("n", "expected"), [(5, 1), (6, 2), (10, 2), (11, 3)])
def test_a_share_of_known_samples_is_rounded_up(n, expected):
    where = np.arange(12) < n
    drawn = np.asarray(drawn_of(KEY, where, 0.2))
    assert drawn.sum() == expected and not (drawn & ~where).any()


def test_features_that_do_not_differ_are_guessed():
    points = np.asarray(points_of(GRAPH, RANK))
    found = invert(KEY, points[:30], np.full((30, 6), 3.0, np.float32), points[30:])
    np.testing.assert_allclose(found.features, 3.0, atol=0.5)


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ({"epochs": 0}, "epochs: got 0; allowed is 1 or more"),
        ({"snapshots": 0}, "snapshots: got 0"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"hidden": (0,)}, r"hidden: got \(0,\)"),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0; allowed is above 0"),
        ({"penalties": (0.0,)}, r"penalties: got \(0.0,\)"),
        ({"penalties": ()}, r"penalties: got \(\)"),
        ({"held_out": 1.0}, "held_out: got 1.0"),
    ],
)
def test_bad_settings_are_named(setting, line):
    with pytest.raises(ValueError, match=line):
        InverterConfig(**setting)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match="rank: got 0"):
        leakage.leading(GRAPH, 0)
    for shapes in [((3, 2), (3, 1), (1, 2)), ((5, 2), (4, 1), (1, 2)), ((5, 2), (5, 1), (1, 3))]:
        with pytest.raises(ValueError, match="points: got shapes"):
            leakage.invert(KEY, *(np.zeros(shape, np.float32) for shape in shapes))
    with pytest.raises(ValueError, match=r"where: got \(1,\); allowed is the shape \(3,\)"):
        leakage.r2(np.zeros((3, 2)), np.zeros((3, 2)), [True])
