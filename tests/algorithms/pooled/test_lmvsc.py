"""LMVSC on planted clusters, and its weights of anchors against an exact solver."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.references import anchor
from jaxfedmvc import engine
from jaxfedmvc.algorithms.pooled.lmvsc import (
    LMVSCConfig,
    LMVSCHyperparams,
    anchor_weights,
    fit,
    lmvsc,
)
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


def test_refusals():
    with pytest.raises(ValueError, match="n_anchors: got 2; allowed is 3 or more"):
        LMVSCConfig(K, n_anchors=2)
    with pytest.raises(ValueError, match="alpha: got -1"):
        lmvsc(CONFIG, LMVSCHyperparams(alpha=-1.0))
    with pytest.raises(ValueError, match="needs complete rows"):
        engine.start(lmvsc(CONFIG), planted.federation(OBSERVED), KEY)
