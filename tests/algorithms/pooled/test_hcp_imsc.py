"""HCP-IMSC on planted clusters, and its steps against dense matrices in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial.distance import cdist

from jaxfedmvc.algorithms.pooled.hcp_imsc import (
    HCPIMSCConfig,
    HCPIMSCHyperparams,
    factors,
    filled,
    fit,
    graph,
    graph_laplacian,
    hcp_imsc,
    hypergraph_laplacian,
    leading_right_vectors,
)
from tests.algorithms.pooled import planted
from tests.algorithms.pooled.planted import KEY, OBSERVED, VIEWS, K, N

CONFIG = HCPIMSCConfig(K, max_iter=6, n_init=4)
HYPER = HCPIMSCHyperparams(lam1=0.5, lam2=0.7, tol=0.0)
RNG = np.random.default_rng(1)


@functools.cache
def program():
    return jax.jit(lambda views, observed: fit(KEY, views, observed, CONFIG, HYPER))


def graph_by_solving(x, targets, shift):
    k = x @ x.T
    z = np.linalg.solve(shift * np.eye(len(x)) + k, k + targets)
    np.fill_diagonal(z, 0)
    return np.maximum((z + z.T) / 2, 0)


def filled_by_blocks(x, missing, m):
    """Samples in rows; the blocks of M are taken out."""
    m_ou, m_uu = m[np.ix_(~missing, missing)], m[np.ix_(missing, missing)]
    rows = np.linalg.solve(m_uu, -m_ou.T @ x[~missing])
    result = x.copy()
    result[missing] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return result


def laplacian_of_graph(r, k=15):
    n = len(r)
    d, w = cdist(r, r) ** 2, np.zeros((len(r), len(r)))
    for i in range(n):
        near = [j for j in np.argsort(d[i], kind="stable") if j != i][: k + 1]
        far = d[i, near[-1]]
        w[i, near] = (far - d[i, near]) / (k * far - d[i, near[:k]].sum())
    w = (w + w.T) / 2
    return np.diag(w.sum(axis=1)) - w


def laplacian_of_hypergraph(r, k=10):
    n = len(r)
    d = cdist(r, r)
    edges = [
        [i, *[j for j in np.argsort(d[i], kind="stable") if j != i][: k - 1]] for i in range(n)
    ]
    width = np.mean([d[i, e] for i, e in enumerate(edges)])
    w = np.array([np.exp(-(d[i, e] ** 2) / width**2).sum() for i, e in enumerate(edges)])
    b = np.zeros((n, n))
    for i, e in enumerate(edges):
        b[e, i] = 1
    inner = b @ np.diag(w / k) @ b.T
    degrees = b @ w
    return np.eye(n) - inner / np.sqrt(np.outer(degrees, degrees))


def truncated(slices, rank):
    """The nearest slices of a rank."""
    u, s, vt = np.linalg.svd(slices)
    return (u[..., :rank] * s[..., None, :rank]) @ vt[..., :rank, :]


@pytest.mark.parametrize("d", [4, 20])  # by a matrix of features, and by one of samples
def test_graph_is_the_solution_of_the_system(d):
    x = RNG.normal(size=(14, d)).astype(np.float32)
    targets = RNG.normal(size=(14, 14)).astype(np.float32)
    found = graph(jnp.array(x), jnp.array(targets), 0.6)
    np.testing.assert_allclose(found, graph_by_solving(x, targets, 0.6), atol=1e-4)


def test_missing_rows_solve_their_block_of_the_system():
    x, missing = RNG.normal(size=(12, 5)), np.arange(12) % 3 == 1
    x[missing] = 0
    z, extra = RNG.uniform(size=(12, 12)) / 12, np.diag(RNG.uniform(size=12))
    z = (z + z.T) / 2
    expected = filled_by_blocks(x, missing, (z - np.eye(12)) @ (z - np.eye(12)).T + extra)
    found = filled(*(jnp.array(a) for a in (x.astype(np.float32), missing, z, extra)))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("n_views", [2, 3])
def test_slices_are_the_nearest_of_their_rank(n_views):
    z = RNG.normal(size=(n_views, 12, 3)) @ RNG.normal(size=(n_views, 3, 12))
    z = (z + 0.1 * RNG.normal(size=(n_views, 12, 12))).astype(np.float32)

    @jax.jit
    def low_rank(z):
        slices = jnp.fft.rfft(z, axis=0)
        left, right = factors(slices, leading_right_vectors(KEY, slices, 3))
        return jnp.fft.irfft(left @ right, n=n_views, axis=0)

    expected = np.fft.ifft(truncated(np.fft.fft(z, axis=0), 3), axis=0)
    np.testing.assert_allclose(expected.imag, 0, atol=1e-9)
    np.testing.assert_allclose(low_rank(z), expected.real, atol=1e-3)


def test_factors_come_nearer_and_bear_zero_slices():
    slices = jnp.array(RNG.normal(size=(2, 9, 9)), jnp.complex64).at[1].set(0)
    right = jnp.array(RNG.normal(size=(2, 2, 9)), jnp.complex64)
    errors = []
    for _ in range(4):
        left, right = factors(slices, right)
        errors.append(float(jnp.sum(jnp.abs(slices - left @ right) ** 2)))
    planted.never_rises(errors)
    assert np.isfinite(errors).all()


def test_laplacians_are_those_of_dense_loops():
    real = np.arange(26) % 5 != 2
    rows = RNG.uniform(size=(26, 26)).astype(np.float32) * real[None] * real[:, None]
    inner = np.ix_(real, real)
    for found, expected in (
        (graph_laplacian, laplacian_of_graph),
        (hypergraph_laplacian, laplacian_of_hypergraph),
    ):
        result = np.asarray(jax.jit(found)(rows, real))
        np.testing.assert_allclose(result[inner], expected(rows[inner]), atol=1e-4)
        assert not (result - np.diag(np.diag(result)))[~real].any()


def test_laplacians_of_few_or_equal_rows_are_finite():
    few = jnp.arange(20) < 4
    for laplacian in (graph_laplacian, hypergraph_laplacian):
        for rows in (RNG.uniform(size=(20, 20)), np.ones((20, 20))):
            result = np.asarray(jax.jit(laplacian)(jnp.array(rows, jnp.float32), few))
            assert np.isfinite(result).all()
            assert (np.linalg.eigvalsh(result) > -1e-4).all()


def reference(n_iter, l1=0.5, l2=0.7):
    """Errors of reconstruction after each pass, in float64."""
    known = [v.astype(float) * OBSERVED[:, [i]] for i, v in enumerate(VIEWS)]
    known = [m / np.maximum(np.linalg.norm(m, axis=1, keepdims=True), 1e-12) for m in known]
    x, w, r, g, right, trace = (
        known,
        np.full(2, 0.5),
        np.zeros((N, N)),
        np.zeros((2, N, N)),
        None,
        [],
    )
    for number in range(n_iter):
        z = np.stack(
            [graph_by_solving(m, w[v] * r + l2 * g[v], w[v] + l2) for v, m in enumerate(x)]
        )
        r = (w[:, None, None] * z).sum(axis=0) / w.sum()
        w = 0.5 / np.linalg.norm(z - r, axis=(1, 2))
        laplacian = laplacian_of_hypergraph(r) if number else laplacian_of_graph(r)
        ms = [(m - np.eye(N)) @ (m - np.eye(N)).T + l1 * laplacian for m in z]
        x = [filled_by_blocks(m, ~OBSERVED[:, v], ms[v]) for v, m in enumerate(known)]
        slices = np.fft.fft(z, axis=0)
        if right is None:
            right = np.linalg.svd(slices)[2][:, :K]
        left = [s @ np.linalg.pinv(v) for s, v in zip(slices, right, strict=True)]
        right = [np.linalg.pinv(u) @ s for s, u in zip(slices, left, strict=True)]
        g = np.fft.ifft(np.stack(left) @ np.stack(right), axis=0).real
        trace.append(sum(((m - z[v] @ m) ** 2).sum() for v, m in enumerate(x)))
    return trace


@pytest.mark.slow
def test_passes_are_those_of_the_equations():
    trace = program()(VIEWS, OBSERVED).trace
    np.testing.assert_allclose(trace, reference(6), rtol=2e-3)


@pytest.mark.slow
def test_planted_clusters_are_found_and_padding_changes_only_rounding():
    planted.padding_changes_only_rounding(program())


@pytest.mark.ci
def test_what_is_not_observed_is_never_read():
    planted.never_reads_what_is_not_observed(program())


def test_permuted_rows_have_permuted_graphs():
    order = RNG.permutation(N)
    found = program()(tuple(x[order] for x in VIEWS), OBSERVED[order]).embedding
    expected = np.asarray(program()(VIEWS, OBSERVED).embedding)[order]
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-2)


def test_refusals():
    with pytest.raises(ValueError, match="max_iter: got 0"):
        HCPIMSCConfig(K, max_iter=0)
    with pytest.raises(ValueError, match=r"lam2 \(--lambda2\): got 0\.01; .* float64"):
        hcp_imsc(CONFIG, HCPIMSCHyperparams(lam2=0.01))
    with pytest.raises(ValueError, match="6000 or fewer"):
        planted.starts_with_rows(hcp_imsc(CONFIG), 6001)
