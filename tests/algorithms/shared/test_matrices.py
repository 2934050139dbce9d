"""Matrices of the shallow methods against NumPy, SciPy and scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import linalg, optimize
from scipy.spatial.distance import cdist

from jaxfedmvc.algorithms.shared import matrices
from jaxfedmvc.algorithms.shared.matrices import (
    alternate,
    inverse_root,
    left_singular_vectors,
    neighbours,
    polar,
    right_singular_vectors,
    simplex,
    soft,
    spectral_rows,
    squared_distances,
    view_weights,
)

RNG = np.random.default_rng(0)
jit_polar, jit_simplex, jit_weights = map(jax.jit, (polar, simplex, view_weights))
jit_vectors = jax.jit(left_singular_vectors, static_argnums=1)
jit_neighbours, jit_rows = (jax.jit(f, static_argnums=2) for f in (neighbours, spectral_rows))


@pytest.mark.parametrize("shape", [(7, 3), (4, 4), (3, 7)])
def test_polar_is_the_orthonormal_factor(shape):
    c = RNG.normal(size=shape).astype(np.float32)
    found = np.asarray(jit_polar(c))
    expected = linalg.polar(c)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    small = found.T @ found if shape[0] >= shape[1] else found @ found.T
    np.testing.assert_allclose(small, np.eye(min(shape)), atol=1e-5)


def test_polar_of_zeros_is_the_identity():
    np.testing.assert_array_equal(jit_polar(np.zeros((5, 2))), np.eye(5, 2))
    np.testing.assert_array_equal(jit_polar(np.zeros((2, 5))), np.eye(2, 5))


def test_simplex_is_the_nearest_point():
    v = RNG.normal(size=(6, 5)).astype(np.float32)
    found = np.asarray(jit_simplex(v))
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)
    for row, point in zip(v.astype(float), found, strict=True):
        best = optimize.minimize(
            lambda z, row=row: ((z - row) ** 2).sum(),
            np.full(5, 0.2),
            jac=lambda z, row=row: 2 * (z - row),
            bounds=[(0, 1)] * 5,
            constraints={"type": "eq", "fun": lambda z: z.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-12},
        )
        np.testing.assert_allclose(point, best.x, atol=1e-5)


def test_simplex_is_that_of_sorted_rows():
    """In float64, by the sorting form of Held, Wolfe and Crowder (1974)."""
    rng = np.random.default_rng(1)
    for scale in (0.01, 1.0, 100.0):
        v = (scale * rng.normal(size=(200, 40))).astype(np.float32)
        ordered = -np.sort(-v.astype(float), axis=1)
        excess = (ordered.cumsum(axis=1) - 1) / np.arange(1, 41)
        last = (ordered > excess).sum(axis=1) - 1
        expected = np.maximum(v - excess[np.arange(200), last][:, None], 0)
        np.testing.assert_allclose(jit_simplex(v), expected, atol=1e-5 * max(scale, 0.1))


def test_simplex_ends_where_a_row_is_not_a_number():
    found = np.asarray(jit_simplex(np.float32([[np.nan, 1.0], [0.2, 0.8]])))
    assert np.isnan(found[0]).any()
    np.testing.assert_allclose(found[1], [0.2, 0.8], atol=1e-6)


def test_simplex_keeps_points_on_it_and_takes_corners_and_ties():
    points = np.float32([[0.2, 0.3, 0.5], [9.0, 0.0, 0.0], [4.0, 4.0, -1.0], [0.0, 0.0, 0.0]])
    expected = [[0.2, 0.3, 0.5], [1, 0, 0], [0.5, 0.5, 0], [1 / 3] * 3]
    np.testing.assert_allclose(jit_simplex(points), expected, atol=1e-6)


def test_soft_threshold():
    np.testing.assert_allclose(
        jax.jit(soft)(np.float32([-2.0, -0.1, 0.0, 0.3, 5.0]), 0.5), [-1.5, 0, 0, 0, 4.5]
    )


@pytest.mark.parametrize("r", [1.5, 2.0, 7.0])
def test_view_weights_minimise_the_weighted_errors(r):
    errors = np.float32([3.0, 1.0, 0.4])
    found = np.asarray(jit_weights(errors, r))
    assert abs(found.sum() - 1) < 1e-6
    best = (found**r * errors).sum()
    for step in RNG.normal(size=(20, 3)) * 0.01:
        other = found + step - step.mean()
        assert (other**r * errors).sum() >= best


def test_view_weights_of_two_and_of_an_exact_fit():
    np.testing.assert_allclose(jit_weights(np.float32([1.0, 3.0]), 2.0), [0.75, 0.25], rtol=1e-5)
    np.testing.assert_allclose(jit_weights(np.float32([0.0, 3.0]), 2.0), [1, 0], atol=1e-6)
    np.testing.assert_allclose(jit_weights(np.zeros(2), 2.0), [0.5, 0.5])


def test_view_weights_of_views_without_rows_are_zero():
    held = np.array([True, False, True])
    found = jit_weights(np.float32([1.0, 0.0, 3.0]), 2.0, held)
    np.testing.assert_allclose(found, [0.75, 0, 0.25], rtol=1e-5)
    np.testing.assert_allclose(jit_weights(np.zeros(2), 2.0, np.zeros(2, bool)), [0.5, 0.5])


def test_singular_vectors_are_those_of_the_decomposition():
    z = RNG.normal(size=(20, 5)).astype(np.float32)
    left, _, right = np.linalg.svd(z)
    pairs = ((jit_vectors, left), (jax.jit(right_singular_vectors, static_argnums=1), right.T))
    for vectors, expected in pairs:
        found, expected = np.asarray(vectors(z, 3)), expected[:, :3]
        signs = np.sign((found * expected).sum(axis=0, keepdims=True))
        np.testing.assert_allclose(found * signs, expected, atol=1e-4)


def test_inverse_roots_of_zeros_are_zero():
    np.testing.assert_allclose(jax.jit(inverse_root)(np.float32([4, 0, 0.25])), [0.5, 0, 2])


def test_left_singular_vectors_beyond_the_rank_are_zero():
    z = RNG.normal(size=(20, 2)) @ RNG.normal(size=(2, 5))
    found = np.asarray(jit_vectors(np.float32(z), 4))
    np.testing.assert_allclose(found.T @ found, np.diag([1.0, 1, 0, 0]), atol=1e-4)


def test_neighbours_are_the_nearest_selected_rows(monkeypatch):
    x = RNG.normal(size=(23, 4)).astype(np.float32)
    where = RNG.uniform(size=23) < 0.7
    distances = cdist(x, x) ** 2
    distances[:, ~where] = np.inf
    np.fill_diagonal(distances, np.inf)
    expected = np.argsort(distances, axis=1)[:, :4]
    for block in (2**23, 100):  # all rows at once, and a few at a time with a rest
        monkeypatch.setattr(matrices, "_BLOCK", block)
        found, squares = jax.jit(lambda x, where: neighbours(x, where, 4))(x, where)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(
            squares, np.take_along_axis(distances, expected, axis=1), rtol=1e-4, atol=1e-5
        )
    squares = jax.jit(squared_distances)(x, x[:3])
    np.testing.assert_allclose(squares, cdist(x, x[:3]) ** 2, atol=1e-4)


def test_missing_neighbours_are_at_infinity():
    squares = jit_neighbours(np.ones((4, 2)), np.array([True, True, False, False]), 9)[1]
    np.testing.assert_array_equal(np.isfinite(squares).sum(axis=1), [1, 1, 2, 2])
    assert squares.shape == (4, 3)


def test_spectral_rows_are_the_leading_vectors_of_the_normalised_graph():
    points = RNG.normal(size=(14, 3))
    affinity = np.exp(-cdist(points, points)).astype(np.float32)  # with a diagonal
    where = np.arange(14) < 11
    dirty = np.where(where[:, None] & where[None], affinity, 7.0).astype(np.float32)
    found = np.asarray(jit_rows(dirty, where, 3))
    inner = affinity[:11, :11]
    degrees = inner.sum(axis=0)
    vectors = linalg.eigh(inner / np.sqrt(np.outer(degrees, degrees)))[1][:, ::-1][:, :3]
    rows = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(found[:11] @ found[:11].T, rows @ rows.T, atol=1e-4)
    assert not found[11:].any()


def test_spectral_rows_tell_components_apart():
    blocks = linalg.block_diag(*[np.ones((4, 4))] * 3)
    rows = np.asarray(jit_rows(np.float32(blocks), np.ones(12, bool), 3))
    np.testing.assert_allclose(rows @ rows.T, blocks, atol=1e-4)


def halving(state):
    return state / 2, state / 2 + 1


def test_alternate_stops_where_the_objective_stands():
    state, trace = alternate(halving, jnp.float32(1.0), 20, 0.01)
    steps = round(-np.log2(float(state)))
    expected = [2.0**-i + 1 for i in range(1, steps + 1)]
    np.testing.assert_allclose(trace, expected + [expected[-1]] * (20 - steps))
    assert 0.005 < expected[-2] - expected[-1] <= 0.01 * expected[-1]


@pytest.mark.parametrize(
    ("limits", "passes"), [((4, 0.0, 1), 4), ((9, 9.0, 1), 2), ((9, 9.0, 5), 5)]
)
def test_alternate_keeps_to_the_number_of_passes(limits, passes):
    state, _ = alternate(halving, jnp.float32(1.0), *limits)
    assert state == 2.0**-passes
