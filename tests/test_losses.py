"""Losses against worked cases, plain loops over the printed formulas, and padding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import losses

N, D, TAU = 6, 3, 0.5


def norm_rows(x):
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.where(length > 0, x / np.where(length > 0, length, 1.0), 0.0)


def loop_mean_squared_error(x, target):
    return sum(
        (a - b) ** 2 for p, q in zip(x, target, strict=True) for a, b in zip(p, q, strict=True)
    ) / (x.size)


def loop_feature_contrast(h, h_view, tau):
    h, h_view = norm_rows(h), norm_rows(h_view)
    total = 0.0
    for i in range(len(h)):
        negatives = [math.exp(h[i] @ h_view[j] / tau) for j in range(len(h)) if j != i]
        if negatives:
            total += h[i] @ h_view[i] / tau - math.log(sum(negatives))
    return -total / len(h)


def loop_ntxent(h, h_view, tau):
    n, both = len(h), np.concatenate([h_view, h])
    total = 0.0
    for i in range(2 * n):
        others = sum(math.exp(both[i] @ both[j] / tau) for j in range(2 * n) if j != i)
        total -= math.log(math.exp(both[i] @ both[(i + n) % (2 * n)] / tau) / others)
    return total / (2 * n)


def loop_model_contrast(h, h_global, z, tau):
    h, h_global, z = norm_rows(h), norm_rows(h_global), norm_rows(z)
    total = 0.0
    for a, b, c in zip(h, h_global, z, strict=True):
        up, down = math.exp(a @ b / tau), math.exp(a @ c / tau)
        total -= math.log(up / (up + down))
    return total / len(h)


def histogram_information(a, b, n_bins):
    joint, _, _ = np.histogram2d(a.ravel(), b.ravel(), bins=n_bins)
    joint /= joint.sum()
    outer = np.outer(joint.sum(1), joint.sum(0))
    seen = joint > 0
    return float((joint[seen] * np.log2(joint[seen] / outer[seen])).sum())


# Each loss as f(arrays, mask, tau), with the loop that it must equal on the real rows.
LOSSES = {
    "masked_mean": (
        lambda x, m, t: losses.masked_mean(x[0][:, 0], m),
        lambda x, t: sum(row[0] for row in x[0]) / len(x[0]),
    ),
    "mean_squared_error": (
        lambda x, m, t: losses.mean_squared_error(x[0], x[1], m),
        lambda x, t: loop_mean_squared_error(x[0], x[1]),
    ),
    "cosine": (
        lambda x, m, t: losses.masked_mean(losses.cosine(x[0], x[1]) / t, m),
        lambda x, t: (
            np.mean([a @ b for a, b in zip(norm_rows(x[0]), norm_rows(x[1]), strict=True)]) / t
        ),
    ),
    "feature_contrast": (
        lambda x, m, t: losses.feature_contrast(x[0], x[1], m, t),
        lambda x, t: loop_feature_contrast(x[0], x[1], t),
    ),
    "ntxent": (
        lambda x, m, t: losses.ntxent(x[0], x[1], m, t),
        lambda x, t: loop_ntxent(x[0], x[1], t),
    ),
    "model_contrast": (
        lambda x, m, t: losses.model_contrast(x[0], x[1], x[2], m, t),
        lambda x, t: loop_model_contrast(x[0], x[1], x[2], t),
    ),
}
VALUE_AND_GRAD = {
    name: jax.jit(jax.value_and_grad(lambda x, m, t, f=f: f(x, m, t)))
    for name, (f, _) in LOSSES.items()
}


masked_mean, mean_squared_error = map(jax.jit, (losses.masked_mean, losses.mean_squared_error))
cosine, l2_normalize = map(jax.jit, (losses.cosine, losses.l2_normalize))
feature_contrast, ntxent = map(jax.jit, (losses.feature_contrast, losses.ntxent))


def draw(seed, n=N):
    """Three matrices [n, D], of different scales."""
    return np.random.default_rng(seed).normal(size=(3, n, D)).astype(np.float32) * 1.5


def value_and_grad(name, x, mask, tau=TAU):
    value, grad = VALUE_AND_GRAD[name](tuple(x), mask, tau)
    return float(value), np.stack(grad)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tau", [TAU, 2.0])
def test_equals_a_loop_over_the_formula(name, tau):
    x = draw(0)
    value, _ = value_and_grad(name, x, np.ones(N, bool), tau)
    np.testing.assert_allclose(value, LOSSES[name][1](x.astype(float), tau), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_equals_finite_differences_of_the_loop(name):
    x = draw(1).astype(float)
    _, grad = value_and_grad(name, x, np.ones(N, bool))
    if name == "model_contrast":
        grad[1] = 0.0  # h_global is a constant of this loss; the loop does not know
    rng = np.random.default_rng(2)
    for _ in range(4):
        way = rng.normal(size=x.shape)
        if name == "model_contrast":
            way[1] = 0.0
        loop = LOSSES[name][1]
        slope = (loop(x + 1e-5 * way, TAU) - loop(x - 1e-5 * way, TAU)) / 2e-5
        np.testing.assert_allclose((grad * way).sum(), slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [0.0, 1e4])
def test_masked_rows_change_neither_value_nor_gradient(name, garbage):
    x, real = draw(3), np.array([1, 0, 1, 1, 0, 1], bool)
    x[:, ~real] = garbage * draw(4)[:, ~real]
    value, grad = value_and_grad(name, x, real)
    expected, expected_grad = value_and_grad(name, x[:, real], np.ones(4, bool))
    np.testing.assert_allclose(value, LOSSES[name][1](x[:, real].astype(float), TAU), rtol=1e-5)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(grad[:, real], expected_grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(grad[:, ~real], 0.0)


def degenerate(case):
    x, mask, tau = draw(5), np.ones(N, bool), TAU
    if case == "no rows":
        mask = np.zeros(N, bool)
    elif case == "one row":
        mask = np.arange(N) == 2
    elif case == "zero vectors":
        x = np.zeros_like(x)
    elif case == "some zero vectors":
        x[0, :2] = x[1, 1:3] = x[2, 2:4] = 0.0
    elif case == "duplicates":
        x = np.broadcast_to(x[:1, :1], x.shape)
    elif case == "huge logits":
        tau = 1e-3
    return x, mask, tau


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "case",
    ["no rows", "one row", "zero vectors", "some zero vectors", "duplicates", "huge logits"],
)
def test_degenerate_rows_leave_value_and_gradient_finite(name, case):
    x, mask, tau = degenerate(case)
    value, grad = value_and_grad(name, x, mask, tau)
    assert np.isfinite(value) and np.isfinite(grad).all()
    if case == "no rows":
        assert value == 0.0
        np.testing.assert_array_equal(grad, 0.0)


def test_huge_logits_have_the_value_of_their_limit():
    # For tau -> 0 log-sum-exp is the largest logit: terms are differences of cosines over tau.
    x, tau = draw(5), 1e-3
    cosines = norm_rows(x[0].astype(float)) @ norm_rows(x[1].astype(float)).T
    best = np.where(np.eye(N, dtype=bool), -np.inf, cosines).max(1)
    value, _ = value_and_grad("feature_contrast", x, np.ones(N, bool), tau)
    np.testing.assert_allclose(value, ((best - np.diag(cosines)) / tau).mean(), rtol=1e-3)


def test_one_row_has_no_negative():
    one = np.arange(N) == 2
    assert value_and_grad("feature_contrast", draw(6), one)[0] == 0.0
    # Of the two anchors of NT-Xent each has the other as its only other row: log(e / e).
    np.testing.assert_allclose(value_and_grad("ntxent", draw(6), one)[0], 0.0, atol=1e-6)


def test_values_worked_by_hand():
    ones = np.ones(2, bool)
    a = np.float32([[3.0, 4.0], [0.0, 2.0]])
    b = np.float32([[4.0, 3.0], [5.0, 0.0]])
    np.testing.assert_allclose(l2_normalize(a), [[0.6, 0.8], [0.0, 1.0]], rtol=1e-6)
    np.testing.assert_allclose(cosine(a, b), [0.96, 0.0], atol=1e-6)
    # Squares 1, 1 and 25, 4 over two rows of two features.
    np.testing.assert_allclose(mean_squared_error(a, b, ones), 31 / 4, rtol=1e-6)
    np.testing.assert_allclose(masked_mean(np.float32([1.0, 5.0]), ones), 3.0)
    np.testing.assert_allclose(masked_mean(np.float32([1.0, np.nan]), np.array([True, False])), 1.0)

    # Two orthogonal unit rows, both sides equal, tau 1/2: s_ii = 2, the one negative 0.
    eye = np.eye(2, dtype=np.float32)
    np.testing.assert_allclose(feature_contrast(eye, 3 * eye, ones, 0.5), -2.0, rtol=1e-6)
    # NT-Xent on [eye; eye]: positive 2, two others 0: log(e^2 + 2) - 2 for all four anchors.
    np.testing.assert_allclose(ntxent(eye, eye, ones, 0.5), math.log(math.e**2 + 2) - 2, rtol=1e-6)
    # Dot products, not cosines: a view of length 3 has positive 3/tau, others 0, one of them for
    # the anchors in h (1: itself is left out, the other of h is 0, views 6 and 0).
    expected = math.log(math.e**6 + 2) - 6
    np.testing.assert_allclose(ntxent(eye, 3 * eye, ones, 0.5), expected, rtol=1e-4)
    # cos(h, h_global) = 1 and cos(h, z) = 0 in both rows, tau 1/2: log(1 + e^-2).
    np.testing.assert_allclose(
        jax.jit(losses.model_contrast)(eye, 2 * eye, eye[::-1], ones, 0.5), math.log1p(math.exp(-2))
    )


def test_model_contrast_passes_no_gradient_to_the_global_model():
    _, grad = value_and_grad("model_contrast", draw(7), np.ones(N, bool))
    np.testing.assert_array_equal(grad[1], 0.0)
    assert np.abs(grad[0]).max() > 1e-3 and np.abs(grad[2]).max() > 1e-3


def test_l2_normalize_keeps_a_zero_row_with_a_finite_gradient():
    x = np.float32([[0, 0, 0], [1, 2, 2]])
    np.testing.assert_allclose(l2_normalize(x), [[0, 0, 0], [1 / 3, 2 / 3, 2 / 3]], 1e-6)
    grad = jax.jit(jax.jacobian(losses.l2_normalize))(x)
    assert np.isfinite(grad).all()


information = jax.jit(losses.mutual_information, static_argnums=3)


@pytest.mark.parametrize("n_bins", [2, 5, 10])
def test_mutual_information_equals_the_histogram_formula(n_bins):
    rng = np.random.default_rng(8)
    a = rng.normal(size=(20, D)).astype(np.float32)
    b = (a + 0.4 * rng.normal(size=a.shape)).astype(np.float32)
    np.testing.assert_allclose(
        information(a, b, np.ones(20, bool), n_bins),
        histogram_information(a, b, n_bins),
        rtol=1e-5,
    )


def test_mutual_information_worked_by_hand():
    ones = np.ones(4, bool)
    a = np.array([[0.0], [0.0], [1.0], [1.0]])
    np.testing.assert_allclose(information(a, 5 - 2 * a, ones, 2), 1.0, rtol=1e-6)  # one bit
    np.testing.assert_allclose(information(a, a[[0, 2, 1, 3]], ones, 2), 0.0, atol=1e-6)
    # P(1, 1) = 1/2, P(0, 0) = P(0, 1) = 1/4: I = log2(4/3) / 2 + 1/4 + log2(2/3) / 4.
    b = np.array([[0.0], [1.0], [1.0], [1.0]])
    expected = math.log2(4 / 3) / 2 + math.log2(2) / 4 + math.log2(2 / 3) / 4
    np.testing.assert_allclose(information(a, b, ones, 2), expected, rtol=1e-5)


def test_mutual_information_of_identical_inputs_is_their_entropy_and_of_a_constant_is_zero():
    a = np.random.default_rng(9).normal(size=(20, D)).astype(np.float32)
    share = np.histogram(a, bins=10)[0] / a.size
    entropy = -sum(p * math.log2(p) for p in share if p > 0)
    ones = np.ones(20, bool)
    np.testing.assert_allclose(information(a, a, ones, 10), entropy, rtol=1e-5)
    np.testing.assert_allclose(information(a, np.full_like(a, 7.0), ones, 10), 0.0, atol=1e-6)
    np.testing.assert_allclose(information(np.full_like(a, 7.0), a, ones, 10), 0.0, atol=1e-6)


def test_mutual_information_ignores_masked_rows():
    rng = np.random.default_rng(10)
    a, b = rng.normal(size=(2, 20, D)).astype(np.float32)
    b += a
    real = rng.random(20) < 0.6
    a[~real], b[~real] = 1e6, -1e6  # would stretch the range of the bins
    np.testing.assert_allclose(
        information(a, b, real, 5), histogram_information(a[real], b[real], 5), rtol=1e-5
    )
    assert information(a, b, np.zeros(20, bool), 5) == 0.0


def test_mutual_information_has_no_nan_in_its_gradient():
    a = np.random.default_rng(11).normal(size=(4, D)).astype(np.float32)
    grad = jax.jit(jax.grad(losses.mutual_information, (0, 1)))
    for mask in (np.ones(4, bool), np.zeros(4, bool), np.arange(4) == 1):
        assert all(np.isfinite(g).all() for g in grad(a, np.zeros_like(a), mask))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    """In float16 sums overflow, and 1e-12, which keeps a zero row zero, is zero itself."""
    mask = np.ones(100, bool)
    assert masked_mean(np.full(100, 1000, dtype), mask) == 1000
    zeros = np.zeros((100, 3), dtype)
    assert mean_squared_error(np.full((100, 3), 256, dtype), zeros, mask) == 256**2
    np.testing.assert_array_equal(l2_normalize(zeros), np.zeros((100, 3)))
    gradient = jax.jit(jax.grad(losses.ntxent))(zeros, zeros, mask, 0.5)
    assert gradient.dtype == dtype and np.isfinite(np.float32(gradient)).all()
    assert jax.eval_shape(losses.feature_contrast, zeros, zeros, mask, 0.5).dtype == jnp.float32
