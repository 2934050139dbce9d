import chex
import jax
import numpy as np
import pytest
import tensorly as tl
from tensorly.decomposition import tucker as tensorly_tucker

from jaxfedmvc.tensor.tucker import (
    Tucker,
    hooi,
    hooi_sweep,
    hosvd,
    mode_product,
    polar,
    procrustes,
    project,
    reconstruct,
    relative_error,
    unfold,
    weighted_target,
)

SHAPE, RANKS = (6, 9, 4), (3, 4, 2)
jit_hooi = jax.jit(hooi, static_argnums=1, static_argnames="max_sweeps")
jit_hosvd = jax.jit(hosvd, static_argnums=1)
jit_reconstruct = jax.jit(reconstruct)
jit_procrustes, jit_target, jit_polar = map(jax.jit, (procrustes, weighted_target, polar))
jit_product = jax.jit(mode_product, static_argnums=2)
jit_project = jax.jit(project)
jit_unfold = jax.jit(unfold, static_argnums=1)


def unfolded(x, mode):
    """As `unfold`, NumPy."""
    return np.asarray(jit_unfold(x, mode))


@pytest.fixture(autouse=True)
def numpy_backend():
    tl.set_backend("numpy")


def tensor(kind, seed=0):
    """Normal entries, or a Tucker form with noise of a tenth ("planted") or none ("exact")."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=SHAPE)
    if kind != "random":
        noise, x = x, rng.normal(size=RANKS)
        for mode, size in enumerate(SHAPE):
            factor = np.linalg.qr(rng.normal(size=(size, RANKS[mode])))[0]
            x = np.moveaxis(np.tensordot(factor, x, (1, mode)), 0, mode)
        x += (kind == "planted") * 0.1 * np.linalg.norm(x) / np.linalg.norm(noise) * noise
    return x.astype(np.float32)


def distance(x, y):
    return np.linalg.norm(np.float64(x) - np.float64(y)) / np.linalg.norm(x)


def rotations(ranks, seed=0):
    rng = np.random.default_rng(seed)
    return [np.linalg.qr(rng.normal(size=(r, r)))[0].astype(np.float32) for r in ranks]


def test_unfolding_and_mode_products_by_hand():
    # Kolda and Bader (2009), example 2.1: frontal slices of 1..12 and 13..24, columns first.
    x = np.arange(1, 25, dtype=np.float32).reshape((3, 4, 2), order="F")
    np.testing.assert_array_equal(unfolded(x, 0)[0], [1, 4, 7, 10, 13, 16, 19, 22])
    np.testing.assert_array_equal(unfolded(x, 1)[0], [1, 2, 3, 13, 14, 15])
    np.testing.assert_array_equal(unfolded(x, 2)[0], np.arange(1, 13))
    # The same paper's example of a product.
    product = jit_product(x, np.float32([[1, 3, 5], [2, 4, 6]]), 0)
    expected = [[22, 49, 76, 103], [28, 64, 100, 136]], [[130, 157, 184, 211], [172, 208, 244, 280]]
    np.testing.assert_array_equal(np.moveaxis(np.asarray(product), 2, 0), expected)


def test_an_empty_mode_unfolds():
    assert unfold(np.zeros((0, 3, 2)), 0).shape == (0, 6)
    assert unfold(np.zeros((0, 3, 2)), 1).shape == (3, 0)


def test_unfolding_of_a_tucker_form_is_a_kronecker_product():
    form = jit_hosvd(tensor("random"), RANKS)
    a, b, c = jax.device_get(form.factors)
    x = jit_reconstruct(form)
    for mode, (left, outer, inner) in enumerate([(a, c, b), (b, c, a), (c, b, a)]):
        expected = left @ unfolded(form.core, mode) @ np.kron(outer, inner).T
        np.testing.assert_allclose(unfolded(x, mode), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["random", "planted", "exact"])
def test_error_matches_tensorly(kind):
    x = tensor(kind)
    ours = jit_hooi(x, RANKS, max_sweeps=100, tol=1e-6)
    theirs = tensorly_tucker(x.astype(float), RANKS, n_iter_max=100, tol=1e-6, init="svd")
    fitted = jit_reconstruct(ours.tucker)
    np.testing.assert_allclose(
        distance(x, fitted), distance(x, tl.tucker_to_tensor(theirs)), atol=1e-4
    )
    np.testing.assert_allclose(ours.error, distance(x, fitted), atol=1e-6)
    assert 1 <= ours.n_sweeps < 100
    if kind == "exact":
        assert ours.error < 1e-5
    chex.assert_shape(ours.tucker.core, RANKS)
    factors = jax.device_get(ours.tucker.factors)
    for factor, size, rank in zip(factors, SHAPE, RANKS, strict=True):
        chex.assert_shape(factor, (size, rank))
        np.testing.assert_allclose(factor.T @ factor, np.eye(rank), atol=1e-5)


def test_of_matrices_it_is_the_truncated_svd():
    x = tensor("random")[0]
    left, scales, right = np.linalg.svd(x)
    best = (left[:, :2] * scales[:2]) @ right[:2]
    form = jit_hosvd(x, (2, 2))
    np.testing.assert_allclose(jit_reconstruct(form), best, atol=1e-5)
    np.testing.assert_allclose(np.abs(form.core), np.diag(scales[:2]), atol=1e-5)


@pytest.mark.parametrize("kind", ["random", "planted"])
def test_tail_bound_and_order_of_errors(kind):
    x = tensor(kind, seed=1)
    start = jit_hosvd(x, RANKS)
    tails = [
        np.sum(np.linalg.svd(unfolded(x, mode), compute_uv=False)[rank:] ** 2)
        for mode, rank in enumerate(RANKS)
    ]
    errors = [distance(x, jit_reconstruct(start))]
    assert (errors[0] * np.linalg.norm(x)) ** 2 <= sum(tails)
    # The best error is at least any one tail.
    factors = start.factors
    sweep = jax.jit(hooi_sweep)
    for _ in range(5):
        factors = sweep(x, factors)
        errors.append(distance(x, jit_reconstruct(jit_project(x, factors))))
    assert (np.diff(errors) <= 1e-6).all() and errors[-1] < errors[0]
    assert (errors[-1] * np.linalg.norm(x)) ** 2 >= max(tails)
    # `hooi` is these sweeps.
    np.testing.assert_allclose(
        jit_hooi(x, RANKS, max_sweeps=5, tol=-1.0).error, errors[-1], atol=1e-6
    )


def test_tolerance_ends_the_sweeps():
    x = tensor("random")
    assert jit_hooi(x, RANKS, tol=1.0).n_sweeps == 1
    assert jit_hooi(x, RANKS, tol=-1.0).n_sweeps == 20


def test_signs_are_fixed():
    x = tensor("planted")
    form = jax.device_get(jit_hooi(x, RANKS).tucker)
    for factor in form.factors:
        largest = np.take_along_axis(factor, np.argmax(np.abs(factor), axis=0)[None], axis=0)
        assert (largest > 0).all()
    opposite = jit_hooi(-x, RANKS).tucker
    chex.assert_trees_all_close(opposite.factors, form.factors, atol=1e-5)
    np.testing.assert_allclose(opposite.core, -form.core, atol=1e-5)
    # Leading first.
    energy = np.sum(np.square(unfolded(form.core, len(SHAPE) - 1)), axis=1)
    assert (np.diff(energy) < 0).all()


def test_rotated_factors_make_the_same_tensor_and_procrustes_undoes_it():
    form = jax.device_get(jit_hooi(tensor("planted"), RANKS).tucker)
    core, factors = form.core, []
    for mode, (factor, rotation) in enumerate(zip(form.factors, rotations(RANKS), strict=True)):
        factors.append(factor @ rotation)
        core = jit_product(core, rotation.T, mode)
    rotated = Tucker(core, tuple(factors))
    np.testing.assert_allclose(jit_reconstruct(rotated), jit_reconstruct(form), atol=1e-5)
    assert np.abs(rotated.factors[0] - form.factors[0]).max() > 0.1
    chex.assert_trees_all_close(jit_procrustes(rotated, form.factors), form, atol=1e-5)
    # Towards factors of another tensor: nearer to them, and the same tensor.
    others = jit_hooi(tensor("planted", seed=1), RANKS).tucker.factors
    turned, others = jax.device_get((jit_procrustes(form, others), others))
    np.testing.assert_allclose(jit_reconstruct(turned), jit_reconstruct(form), atol=1e-5)
    for new, old, other in zip(turned.factors, form.factors, others, strict=True):
        assert np.linalg.norm(new - other) < np.linalg.norm(old - other)


def test_polar_is_the_nearest():
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(7, 3)).astype(np.float32)
    nearest = np.asarray(jit_polar(matrix))
    np.testing.assert_allclose(nearest.T @ nearest, np.eye(3), atol=1e-6)
    # matrix = nearest times a symmetric positive definite matrix, which is unique.
    stretch = nearest.T @ matrix
    np.testing.assert_allclose(stretch, stretch.T, atol=1e-5)
    assert (np.linalg.eigvalsh(stretch) > 0).all()
    np.testing.assert_allclose(nearest @ stretch, matrix, atol=1e-5)


def test_a_weighted_target_moves_by_the_share_of_the_largest_weight():
    target, fitted = np.float32([[8, 8, np.nan]]), np.float32([[0, 4, 1]])
    for unit in (1.0, 0.01):  # weights have no unit
        found = jit_target(target, fitted, unit * np.array([[4.0, 1.0, 0.0]]))
        np.testing.assert_allclose(found, [[8, 5, 1]], rtol=1e-6)


def test_weighted_target_majorises():
    rng = np.random.default_rng(0)
    target, fitted, other = rng.normal(size=(3, 5, 4)).astype(np.float32)
    weights = rng.exponential(size=(5, 4)).astype(np.float32) * (rng.uniform(size=(5, 4)) > 0.2)
    spoilt = np.where(weights > 0, target, np.nan)
    plain = np.asarray(jit_target(spoilt, fitted, weights))

    def majoriser(c):
        return weights.max() * np.sum(np.square(plain - c))

    def error(c):
        return np.sum(weights * np.square(target - c))

    constant = error(fitted) - majoriser(fitted)
    assert majoriser(other) + constant > error(other)
    np.testing.assert_array_equal(jit_target(spoilt, fitted, 0 * weights), fitted)
    np.testing.assert_allclose(jit_target(target, fitted, np.ones((5, 4))), target, atol=1e-6)


def test_vmap_equals_loop():
    x = np.stack([tensor("planted", seed) for seed in range(3)])
    batched = jax.device_get(jax.jit(jax.vmap(lambda x: hooi(x, RANKS)))(x))
    for i in range(3):
        alone = jit_hooi(x[i], RANKS)
        chex.assert_trees_all_close(
            jax.tree.map(lambda leaf, i=i: leaf[i], batched), alone, atol=1e-5
        )


def test_same_bits_and_one_trace():
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(lambda x, tol: hooi(x, RANKS, tol=tol), n=1))
    x = tensor("planted")
    chex.assert_trees_all_equal(traced(x, 1e-6), traced(x, 1e-6))
    traced(x + 1, 1e-4)


@pytest.mark.parametrize("unit", [1e-25, 1e25])
def test_the_error_does_not_depend_on_the_unit(unit):
    """Whose squares are no float32."""
    x = np.random.default_rng(0).normal(size=SHAPE)
    found, scaled = jit_hooi(x, RANKS), jit_hooi(unit * x, RANKS)
    np.testing.assert_allclose(scaled.error, found.error, rtol=1e-5)
    assert scaled.n_sweeps == found.n_sweeps


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda x: unfold(x, 0), "x"),
        (lambda x: mode_product(x, x[:, :1].T, 0), "x"),
        (lambda x: project(x, ()), "x"),
        (polar, "matrix"),
        (lambda x: weighted_target(x, x.real, x.real), "target"),
    ],
)
def test_complex_numbers_are_refused(call, name):
    """A cast would leave their real parts."""
    with pytest.raises(ValueError, match=f"^{name} must be an array of real numbers"):
        call(np.full((3, 2), 1j))


def test_a_weighted_target_has_one_shape():
    with pytest.raises(ValueError, match=r"^fitted: got"):
        weighted_target([1.0, 2.0], [0.0], [1.0, 1.0])


def test_zeros_stay_finite():
    x = np.zeros(SHAPE, np.float32)
    result = jit_hooi(x, RANKS)
    chex.assert_tree_all_finite(result)
    assert result.error == 0 and jax.jit(relative_error)(x, x) == 0
    np.testing.assert_array_equal(result.tucker.core, np.zeros(RANKS))
    chex.assert_tree_all_finite(jit_procrustes(result.tucker, result.tucker.factors))


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda x: hosvd(x, (3, 4)), "ranks"),
        (lambda x: hosvd(x, (7, 4, 2)), "ranks"),
        (lambda x: hosvd(x, (0, 4, 2)), "ranks"),
        (lambda x: hosvd(x, (2, 5, 2)), "ranks"),
        (lambda x: hosvd(x[0, 0], (1,)), "x"),
        (lambda x: hooi(x, (2, 5, 2)), "ranks"),
        (lambda x: hooi(x, RANKS, max_sweeps=0), "max_sweeps"),
        (lambda x: hooi(x, RANKS, tol=float("nan")), "tol"),
        (lambda x: hooi(x, 2), "ranks"),
        (lambda x: hosvd(x, (2.5, 2, 2)), "ranks"),
        (lambda x: hosvd(x, ("2", 2, 2)), "ranks"),
        (lambda x: unfold(x, 3), "mode"),
        (lambda x: unfold(x, 1.0), "mode"),
        (lambda x: mode_product(x, np.ones((2, 5)), 0), "matrix"),
        (lambda x: polar(x[0].T[:, :6]), "matrix"),
        (lambda x: project(x, jit_hosvd(x, RANKS).factors[:2]), "factors"),
        (lambda x: hooi_sweep(x, jit_hosvd(x, RANKS).factors[:2]), "factors"),
        (lambda x: relative_error(x, x[:1]), "fitted"),
        (lambda x: procrustes(jit_hosvd(x, RANKS), [np.ones((6, 3))]), "reference_factors"),
    ],
)
def test_bad_input(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: got"):
        call(tensor("random"))
