"""LSIMVC on planted clusters, and its steps against dense matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.preprocessing import normalize

from jaxfedmvc import engine
from jaxfedmvc.algorithms.pooled import lsimvc as module
from jaxfedmvc.algorithms.pooled.lsimvc import (
    LSIMVCConfig,
    LSIMVCHyperparams,
    common_codes,
    error,
    fit,
    lsimvc,
    mean_distance,
    neighbour_graph,
    product,
    view_codes,
)
from tests.algorithms.pooled import planted
from tests.algorithms.pooled.planted import KEY, OBSERVED, VIEWS, K, N

CONFIG = LSIMVCConfig(K, n_neighbours=3, max_iter=20, n_init=4)
HYPER = LSIMVCHyperparams(tol=0.0)
RNG = np.random.default_rng(1)
CODES = [RNG.normal(size=(N, K)).astype(np.float32) * OBSERVED[:, [v]] for v in range(2)]
COMMON = RNG.normal(size=(N, K)).astype(np.float32)


@functools.cache
def program():
    return jax.jit(lambda views, observed: fit(KEY, views, observed, CONFIG, HYPER))


def units(v):
    return normalize(VIEWS[v]) * OBSERVED[:, [v]]


def dense_graph(v, k=3):
    """W_v with its zero rows, from all distances of the observed rows."""
    there = np.flatnonzero(OBSERVED[:, v])
    d = cdist(units(v)[there], units(v)[there])
    order = np.argsort(d + np.diag(np.full(len(d), np.inf)), axis=1)[:, :k]
    w = np.zeros_like(d)
    np.put_along_axis(w, order, 1.0, axis=1)
    w = np.maximum(w, w.T) * np.exp(-(d**2) / (2 * d.mean() ** 2)) + np.eye(len(d))
    full = np.zeros((N, N))
    full[np.ix_(there, there)] = w
    return full


@functools.cache
def graphs():
    build = jax.jit(lambda x, o: neighbour_graph(x, o, 3))
    return [build(np.pad(units(v), ((0, 0), (0, 2 * v))), OBSERVED[:, v]) for v in range(2)]


def test_lists_of_neighbours_are_the_dense_graph():
    for v, graph in enumerate(graphs()):
        dense = dense_graph(v)
        np.testing.assert_allclose(
            jax.jit(product)(graph, COMMON), dense @ COMMON, rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(graph.degrees, dense.sum(axis=0), rtol=1e-4)


def test_width_is_the_mean_distance_of_a_sample(monkeypatch):
    x, there = units(0), np.flatnonzero(OBSERVED[:, 0])
    found = jax.jit(mean_distance)(x, OBSERVED[:, 0])
    np.testing.assert_allclose(found, cdist(x[there], x[there]).mean(), rtol=1e-4)
    monkeypatch.setattr(module, "_SAMPLE", 8)
    found = jax.jit(lambda *args: mean_distance(*args))(x, OBSERVED[:, 0])  # compiled anew
    np.testing.assert_allclose(found, cdist(x[there[:8]], x[there[:8]]).mean(), rtol=1e-4)


def test_error_is_the_sum_over_all_pairs():
    basis = np.linalg.qr(RNG.normal(size=(7, K)))[0].astype(np.float32)
    hyper = LSIMVCHyperparams(lam=0.7, beta=0.3)
    found = jax.jit(error)(units(0), basis, CODES[0], graphs()[0], COMMON, hyper)
    expected = (
        ((units(0) - CODES[0] @ basis.T) ** 2).sum()
        + 0.3 * np.abs(CODES[0]).sum()
        + 0.7 * (dense_graph(0) * cdist(CODES[0], COMMON) ** 2).sum()
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_steps_take_the_best_values():
    weights = np.float32([0.2, 0.5])
    bases = [np.linalg.qr(RNG.normal(size=(d, K)))[0].astype(np.float32) for d in (7, 5)]
    hyper = LSIMVCHyperparams(lam=0.7, beta=0.3)

    @jax.jit
    def value(common, codes):
        errors = [error(units(v), bases[v], codes[v], graphs()[v], common, hyper) for v in range(2)]
        return weights @ jnp.stack(errors)

    common = jax.jit(common_codes)(graphs(), tuple(CODES), weights)
    find = jax.jit(view_codes)
    codes = [find(units(v), bases[v], graphs()[v], common, hyper) for v in range(2)]
    assert not np.asarray(codes[0])[~OBSERVED[:, 0]].any()
    assert (np.asarray(codes[0]) == 0).sum() > (~OBSERVED[:, 0]).sum() * K  # the l1 norm bites
    # Where a value is not zero the objective is smooth, and stands still.
    np.testing.assert_allclose(jax.grad(value)(common, tuple(CODES)), 0, atol=1e-4)
    slopes = jax.grad(value, argnums=1)(common, tuple(codes))
    for slope, p in zip(slopes, codes, strict=True):
        np.testing.assert_allclose(np.where(p == 0, 0, slope), 0, atol=1e-4)
    for _ in range(10):
        moved = common + 0.01 * RNG.normal(size=common.shape)
        assert value(moved, CODES) > value(common, CODES)
        moved = [
            p + 0.01 * RNG.normal(size=p.shape) * OBSERVED[:, [v]] for v, p in enumerate(codes)
        ]
        assert value(common, moved) > value(common, codes)


@pytest.mark.slow
def test_objective_never_rises():
    planted.never_rises(program()(VIEWS, OBSERVED).trace)


@pytest.mark.slow
def test_planted_clusters_are_found_and_padding_changes_only_rounding():
    planted.padding_changes_only_rounding(program())


@pytest.mark.ci
def test_what_is_not_observed_is_never_read():
    planted.never_reads_what_is_not_observed(program())


def test_permuted_rows_have_permuted_codes():
    order = RNG.permutation(N)
    found = program()(tuple(x[order] for x in VIEWS), OBSERVED[order])
    expected = program()(VIEWS, OBSERVED).embedding
    np.testing.assert_allclose(found.embedding, expected[order], atol=1e-3)


def test_equal_rows_and_fewer_rows_than_neighbours_are_finite():
    observed = OBSERVED & (np.arange(N) < 10)[:, None]
    found = program()(tuple(np.ones_like(x) for x in VIEWS), observed)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_refusals():
    with pytest.raises(ValueError, match="n_neighbours: got 0"):
        LSIMVCConfig(K, n_neighbours=0)
    with pytest.raises(ValueError, match="r: got 1"):
        lsimvc(CONFIG, LSIMVCHyperparams(r=1.0))
    with pytest.raises(ValueError, match="view 1 has 5 features; allowed is 6"):
        engine.start(lsimvc(LSIMVCConfig(6)), planted.federation(OBSERVED), KEY)
