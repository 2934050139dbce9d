"""JPLTD on planted clusters, and its steps against dense matrices in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import solve_sylvester

from jaxfedmvc.algorithms.pooled.jpltd import (
    JPLTDConfig,
    JPLTDHyperparams,
    fit,
    graphs,
    inverse_transform,
    jpltd,
    principal,
    projection,
    shrink_rows,
    shrink_slices,
    transform,
)
from tests.algorithms.fmcsc import tiny  # compiles fast, runs slowly
from tests.algorithms.pooled import planted
from tests.algorithms.pooled.planted import KEY, OBSERVED, VIEWS, K, N

CONFIG = JPLTDConfig(K, dim=6, max_iter=20, n_init=4)
HYPER = JPLTDHyperparams(lam=0.5, theta=0.01, rho=0.01)  # S is zero with more
RNG = np.random.default_rng(1)


@functools.cache
def program(config=CONFIG):
    return jax.jit(lambda views, observed: fit(KEY, views, observed, config, HYPER))


def polar(c):
    u, _, vt = np.linalg.svd(c, full_matrices=False)
    return u @ vt


def lowered(x, by):
    """Singular values of the slices along the Fourier transform over axis 1 of [V, N, N]."""
    slices = np.fft.fft(x, axis=1)
    for f in range(x.shape[1]):
        u, s, vt = np.linalg.svd(slices[:, f].T, full_matrices=False)
        slices[:, f] = ((u * np.maximum(s - by, 0)) @ vt).T
    return np.fft.ifft(slices, axis=1).real


def test_graphs_are_the_limit_of_the_sylvester_equation():
    n, k = 40, 6
    t, q = RNG.normal(size=(2, n, k))
    p = RNG.normal(size=(n, n))
    there = RNG.uniform(size=n) < 0.6
    t[~there] = q[~there] = 0
    right = 1 / (there + 1e-10)
    expected = solve_sylvester(t @ t.T, np.diag(right), (p + t @ q.T) * right)
    arguments = (jnp.array(a, jnp.float32)[None] for a in (t, q, p))
    found = graphs(*arguments, jnp.array(there)[None])[0]
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("n", [11, 12])
@pytest.mark.parametrize("where", ["all", "some"])
def test_slices_of_the_real_samples_are_shrunk(n, where):
    real = np.ones(n, bool) if where == "all" else np.arange(n) % 4 != 1
    x = RNG.normal(size=(3, n, n)).astype(np.float32) * real[None, :, None] * real[None, None]
    kept = np.ix_(range(3), real, real)
    expected = np.zeros_like(x)
    expected[kept] = lowered(x[kept], 2.0)
    found = jax.jit(lambda x, real: shrink_slices(x, 2.0, real))(x, real)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    back = inverse_transform(transform(jnp.array(x), jnp.array(real)), jnp.array(real))
    np.testing.assert_allclose(back, x, atol=1e-5)


def test_rows_are_shrunk_and_zeros_stay():
    x = jnp.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    np.testing.assert_allclose(shrink_rows(x, 1.0), [[2.4, 3.2], [0, 0], [0, 0]], rtol=1e-6)


def test_projections_are_orthonormal_and_begin_at_the_start():
    x = jnp.array(RNG.normal(size=(20, 5)), jnp.float32)
    wide, narrow = principal(x, 7), principal(x, 2)
    np.testing.assert_allclose(wide @ wide.T, np.eye(5), atol=1e-5)
    vectors = np.linalg.svd(x)[2][:2].T
    np.testing.assert_allclose(narrow @ narrow.T, vectors @ vectors.T, atol=1e-4)
    np.testing.assert_array_equal(projection(x, jnp.zeros((20, 2)), narrow), narrow)
    targets = jnp.array(RNG.normal(size=(20, 2)), jnp.float32)
    np.testing.assert_allclose(projection(x, targets, narrow), polar(x.T @ targets), atol=1e-5)


def reference(first, n_iter, k=6):
    """Residuals after each pass, with samples in columns as the paper has them, in float64."""
    lam, theta, rho = 0.5, 0.01, 0.01
    o = OBSERVED.T.astype(float)[:, None, :]  # [V, 1, N]
    x = [v.T.astype(float) * o[i] for i, v in enumerate(VIEWS)]
    x = [m / np.maximum(np.linalg.norm(m, axis=0, keepdims=True), 1e-12) for m in x]
    e = y = np.zeros((2, k, N))
    z = low = sparse = f = np.zeros((2, N, N))
    trace = []
    for number in range(n_iter):
        w, t = [], []
        for v, m in enumerate(x):
            c = (m - m @ z[v]) * o[v] @ (e[v] - y[v] / rho).T
            start = np.linalg.svd(m)[0] if first == "pca" else np.eye(len(m))
            start = np.pad(start, ((0, 0), (0, max(k - len(start), 0))))[:, :k]
            w.append((polar(c) if number else start).T)
            t.append(w[v] @ m)
        t = np.stack(t)
        a = (t - t @ z) * o + y / rho
        e = a * np.maximum(
            1 - 1 / rho / np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-30), 0
        )
        p, q = low + sparse - f / rho, (t - e + y / rho) * o
        solved = [np.linalg.solve(np.eye(N) + m.T @ m, p[v] + m.T @ q[v]) for v, m in enumerate(t)]
        z = np.where(o > 0, np.stack(solved), p)
        low = lowered(z - sparse + f / rho, lam / rho)
        s = z - low + f / rho
        sparse = np.sign(s) * np.maximum(np.abs(s) - theta / rho, 0)
        off, apart = (t - t @ z) * o - e, z - low - sparse
        y, f, rho = y + rho * off, f + rho * apart, rho * 1.3
        trace.append(max(np.abs(r).sum(axis=2).max() for r in (off, apart)))
    return trace


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "n_iter"), [("pca", 20), pytest.param("code", 3, marks=pytest.mark.slow)]
)
def test_passes_are_those_of_the_equations(start, n_iter):
    config = dataclasses.replace(CONFIG, start=start, max_iter=n_iter)
    trace = program(config)(VIEWS, OBSERVED).trace
    np.testing.assert_allclose(trace[:12], reference(start, min(n_iter, 12)), rtol=5e-3)


@pytest.mark.slow
def test_the_penalty_stays_below_a_million():
    config, hyper = dataclasses.replace(CONFIG, max_iter=5, n_init=1), HYPER.replace(growth=1e12)
    found = tiny.jit(lambda x, o: fit(KEY, x, o, config, hyper))(VIEWS, OBSERVED)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


@pytest.mark.slow
def test_planted_clusters_are_found_and_padding_changes_only_rounding():
    planted.padding_changes_only_rounding(program(), rtol=1e-2)


@pytest.mark.ci
def test_what_is_not_observed_is_never_read():
    planted.never_reads_what_is_not_observed(program())


def test_refusals():
    with pytest.raises(ValueError, match="start: got 'svd'"):
        JPLTDConfig(K, start="svd")
    with pytest.raises(ValueError, match="growth: got 0"):
        jpltd(CONFIG, JPLTDHyperparams(growth=0.0))
    with pytest.raises(ValueError, match="18569 or fewer with 1 view "):  # sqrt(10e9 / 29)
        planted.starts_with_rows(jpltd(CONFIG), 18_570)
