"""LMVSC on planted clusters, and its weights of anchors against an exact solver."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.references import anchor
from jaxfedmvc import engine
from jaxfedmvc.algorithms.pooled import lmvsc as lmvsc_lib
from jaxfedmvc.algorithms.pooled.lmvsc import (
    LMVSCConfig,
    LMVSCHyperparams,
    anchor_weights,
    fit,
    lmvsc,
)
from jaxfedmvc.clustering.kmeans import KMeansResult
from tests.algorithms.pooled import planted
from tests.algorithms.pooled.planted import COMPLETE, KEY, OBSERVED, VIEWS, K, N

CONFIG = LMVSCConfig(K, n_anchors=5, max_steps=50, n_init=3)
HYPER = LMVSCHyperparams()
RNG = np.random.default_rng(1)


@functools.cache
def program():
    return jax.jit(lambda views, observed: fit(KEY, views, observed, CONFIG, HYPER))


@pytest.mark.parametrize("alpha", [0.01, 1.0, 100.0])
def test_weights_of_anchors_solve_the_quadratic_programs(alpha):
    x = RNG.normal(size=(12, 6)).astype(np.float32) + 3
    anchors = RNG.normal(size=(8, 6)).astype(np.float32) + 3
    where = np.arange(12) < 10
    hyper = LMVSCHyperparams(alpha=alpha)
    solve = jax.jit(lambda x: anchor_weights(x, anchors, where, hyper, 500))
    found = np.asarray(solve(x))
    np.testing.assert_allclose(found[:10], anchor.anchor_weights(x[:10], anchors, alpha), atol=1e-4)
    assert not found[10:].any()


def test_more_anchors_than_rows_and_equal_anchors_are_finite():
    x = jnp.ones((4, 3))
    found = anchor_weights(x, jnp.ones((6, 3)), jnp.ones(4, bool), LMVSCHyperparams(alpha=0.0), 9)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.slow
def test_planted_clusters_are_found_and_padding_changes_only_rounding():
    planted.padding_changes_only_rounding(program(), COMPLETE)


@pytest.mark.ci
def test_padding_is_never_read():
    observed = COMPLETE & (np.arange(N) % 9 > 0)[:, None]
    planted.never_reads_what_is_not_observed(program(), observed)


def test_embedding_is_orthonormal_and_spans_the_clusters():
    rows = np.asarray(program()(VIEWS, COMPLETE).embedding)
    np.testing.assert_allclose(rows.T @ rows, np.eye(K), atol=1e-4)


@pytest.mark.parametrize("alpha", [0.01, 1.0])
def test_embedding_and_objective_are_those_of_exact_weights(monkeypatch, alpha):
    """With anchors that are given; SciPy solves the quadratic programs, NumPy decomposes."""
    given = [x[3:8] + np.float32(0.1) for x in VIEWS]
    rows = iter([*given, None])

    def kmeans(key, x, n_clusters, **_):
        labels = jnp.zeros(len(x), jnp.int32)
        return KMeansResult(next(rows), labels, jnp.float32(0), jnp.int32(1))

    monkeypatch.setattr(lmvsc_lib, "kmeans", kmeans)
    config, hyper = LMVSCConfig(K, n_anchors=5), LMVSCHyperparams(alpha=alpha)
    found = jax.jit(lambda views: inspect.unwrap(fit)(KEY, views, COMPLETE, config, hyper))(VIEWS)
    pairs = list(zip(VIEWS, given, strict=True))
    weights = [anchor.anchor_weights(x, h, alpha) for x, h in pairs]
    left, values, _ = np.linalg.svd(np.hstack(weights) / len(VIEWS) ** 0.5, full_matrices=False)
    assert values[K - 1] > 1.1 * values[K]
    embedding = np.asarray(found.embedding)
    np.testing.assert_allclose(embedding @ embedding.T, left[:, :K] @ left[:, :K].T, atol=1e-3)
    objective = sum(
        ((x - s @ h) ** 2).sum() + alpha * (s**2).sum()
        for (x, h), s in zip(pairs, weights, strict=True)
    )
    np.testing.assert_allclose(found.trace, [objective], rtol=1e-4)


def test_refusals():
    with pytest.raises(ValueError, match="n_anchors: got 2; allowed is 3 or more"):
        LMVSCConfig(K, n_anchors=2)
    with pytest.raises(ValueError, match=f"n_anchors: got {N + 1} for {N} samples in all"):
        engine.start(lmvsc(LMVSCConfig(K, n_anchors=N + 1)), planted.federation(), KEY)
    planted.starts_with_rows(lmvsc(LMVSCConfig(K, n_anchors=5)), 5)
    with pytest.raises(ValueError, match="alpha: got -1"):
        lmvsc(CONFIG, LMVSCHyperparams(alpha=-1.0))
    with pytest.raises(ValueError, match="needs complete rows"):
        engine.start(lmvsc(CONFIG), planted.federation(OBSERVED), KEY)
