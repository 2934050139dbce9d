"""IMVC-CBG on planted clusters, and against its equations in NumPy."""

import functools

import jax
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithms.pooled.imvc_cbg import (
    IMVCCBGConfig,
    IMVCCBGHyperparams,
    fit,
    imvc_cbg,
)
from tests.algorithms.pooled import planted
from tests.algorithms.pooled.planted import KEY, OBSERVED, VIEWS, K, N

CONFIG = IMVCCBGConfig(K, max_iter=6, n_init=4)
HYPER = IMVCCBGHyperparams(lam=0.1, tol=0.0)


@functools.cache
def program(config=CONFIG):
    return jax.jit(lambda views, observed: fit(KEY, views, observed, config, HYPER))


def polar(c):
    u, _, vt = np.linalg.svd(c, full_matrices=False)
    return u @ vt


def project(v):
    """The simplex by bisection of what is taken off."""
    low, high = v.min(axis=1, keepdims=True) - 1, v.max(axis=1, keepdims=True)
    for _ in range(60):
        middle = (low + high) / 2
        over = np.maximum(v - middle, 0).sum(axis=1, keepdims=True) > 1
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    return np.maximum(v - high, 0)


def reference(lam, n_iter):
    """The objective after each pass, sample by column, in float64."""
    o = OBSERVED.astype(float)
    x = [v.T.astype(float) * o[:, i] for i, v in enumerate(VIEWS)]
    x = [m / np.maximum(np.linalg.norm(m, axis=0, keepdims=True), 1e-12) for m in x]
    z, anchors, a, trace = np.eye(K, N), np.zeros((K, K)), np.full(2, 0.5), []
    for _ in range(n_iter):
        c = [m @ z.T @ anchors.T for m in x]
        w = [polar(m) if m.any() else np.eye(*m.shape) for m in c]
        anchors = polar(sum(s**2 * u.T @ m @ z.T for s, u, m in zip(a, w, x, strict=True)))
        top = sum(s**2 * anchors.T @ u.T @ m for s, u, m in zip(a, w, x, strict=True))
        z = project((top / (o @ a**2 + lam)).T).T
        pairs = enumerate(zip(w, x, strict=True))
        errors = np.array([((m - u @ anchors @ z * o[:, i]) ** 2).sum() for i, (u, m) in pairs])
        a = 1 / errors / (1 / errors).sum()
        trace.append((a**2 * errors).sum() + lam * (z**2).sum())
    return trace


@pytest.mark.slow
def test_planted_clusters_are_found_and_padding_changes_only_rounding():
    planted.padding_changes_only_rounding(program())


@pytest.mark.ci
def test_what_is_not_observed_is_never_read():
    planted.never_reads_what_is_not_observed(program())


def test_objective_is_that_of_the_equations_and_never_rises():
    trace = program()(VIEWS, OBSERVED).trace
    np.testing.assert_allclose(trace, reference(0.1, 6), rtol=1e-4)
    planted.never_rises(trace)


@pytest.mark.slow
def test_more_anchors_than_clusters():
    config = IMVCCBGConfig(K, anchors_per_cluster=3, max_iter=6, n_init=4)
    found = program(config)(VIEWS, OBSERVED)
    assert found.embedding.shape == (N, K)
    planted.finds_the_clusters(found)


def test_refusals():
    with pytest.raises(ValueError, match="anchors_per_cluster: got 0"):
        IMVCCBGConfig(K, anchors_per_cluster=0)
    with pytest.raises(ValueError, match=r"lam \(--lambda\): got -1"):
        imvc_cbg(CONFIG, IMVCCBGHyperparams(lam=-1.0))
    with pytest.raises(ValueError, match="view 1 has 5 features; allowed is 6"):
        engine.start(imvc_cbg(IMVCCBGConfig(6)), planted.federation(OBSERVED), KEY)
