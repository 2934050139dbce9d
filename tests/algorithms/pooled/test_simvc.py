"""SiMVC and CoMVC: terms against NumPy, masks, choice of the best state, refusals."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import engine, metrics
from jaxfedmvc.algorithms.pooled import simvc as module
from jaxfedmvc.algorithms.pooled.networks import batch_norm
from jaxfedmvc.algorithms.pooled.simvc import (
    CoMVCConfig,
    CoMVCHyperparams,
    SiMVCConfig,
    SiMVCHyperparams,
    comvc,
    simvc,
)
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation

N, C = 60, 3
TRUTH = np.arange(N) % C
TINY = {"hidden": (16,), "latent_dim": 8, "head_hidden": 8, "epochs": 24, "batch_size": 25}
RNG = np.random.default_rng(0)
MASK = np.arange(9) < 7
HIDDEN = RNG.normal(size=(9, 4)).astype(np.float32)
ASSIGNED = RNG.dirichlet(np.ones(C), size=9).astype(np.float32)


def planted(fill=0.0):
    """Three blocks in two views, and four rows of padding behind them."""
    rng = np.random.default_rng(1)
    views = [(3 * rng.normal(size=(C, d)))[TRUTH] + 0.3 * rng.normal(size=(N, d)) for d in (6, 5)]
    views = [np.pad(x, ((0, 4), (0, 0)), constant_values=fill) for x in views]
    observed = np.pad(np.ones((N, 2), bool), ((0, 4), (0, 0)))
    return tuple(jnp.asarray(x, jnp.float32) for x in views), jnp.asarray(observed)


CASES = [
    (module.fit, SiMVCConfig(n_clusters=C, n_runs=3, **TINY), SiMVCHyperparams(0.01)),
    (module.fit_comvc, CoMVCConfig(n_clusters=C, n_runs=1, **TINY), CoMVCHyperparams(0.01)),
]


@functools.cache
def program(fit, config):
    return jax.jit(lambda key, x, o, hyper: fit(key, x, o, config, hyper))


def fitted(fit, config, hyper, fill=0.0):
    found = program(fit, config)(jax.random.key(0), *planted(fill), hyper)
    return jax.tree.map(np.asarray, found)


# --- Terms ----------------------------------------------------------------------------------------


def test_contrast_is_weighted_by_the_least_view_and_moves_no_weight(monkeypatch):
    """softmax([log 3, 0]) is 3/4 and 1/4."""
    monkeypatch.setattr(module, "_fit", lambda *arguments: arguments[-1])
    config, hyper = CoMVCConfig(n_clusters=C, **TINY), CoMVCHyperparams(delta=0.7)
    term = inspect.unwrap(module.fit_comvc)(jax.random.key(0), *planted(), config, hyper)
    codes = np.stack([HIDDEN, HIDDEN[::-1]])
    found = module.Found(codes, HIDDEN, ASSIGNED)
    n_negatives = int(0.25 * 2 * TINY["batch_size"])
    fusion = jnp.log(jnp.array([3.0, 1.0]))

    @jax.jit
    def both(fusion):
        value, slope = jax.value_and_grad(
            lambda fusion: term(jax.random.key(1), {"fusion": fusion}, found, MASK)
        )(fusion)
        plain = module.contrast(jax.random.key(1), codes, ASSIGNED, MASK, n_negatives, 0.1)
        return value, slope, plain

    value, slope, plain = both(fusion)
    np.testing.assert_allclose(value, 0.7 / 4 * plain, rtol=1e-5)
    assert value > 0 and not slope.any()


def distances(x, y):
    return np.sum((x[:, None] - y[None]) ** 2, axis=2)


def np_kernel(hidden, rel_sigma=0.15):
    d = distances(hidden, hidden)
    s = rel_sigma * np.sort(d.ravel())[(d.size - 1) // 2]
    return np.exp(-d / (2 * max(s, 1e-9)))


def np_divergence(a, gram):
    n = np.maximum(a.T @ gram @ a, 1e-9)
    pairs = [n[k, m] / np.sqrt(n[k, k] * n[m, m]) for k in range(C) for m in range(k)]
    return np.mean(pairs)


def test_terms_are_those_of_the_real_rows_in_numpy():
    a, gram = ASSIGNED[MASK].astype(float), np_kernel(HIDDEN[MASK].astype(float))
    corners = np.exp(-distances(a, np.eye(C)))
    pairs = [a[i] @ a[j] for i in range(7) for j in range(i)]
    expected = [np_divergence(a, gram), np.mean(pairs), np_divergence(corners, gram)]
    found = module.Found(jnp.zeros((2, 9, 3)), jnp.asarray(HIDDEN), jnp.asarray(ASSIGNED))
    terms = jax.jit(module.clustering_terms)(found, jnp.asarray(MASK), 0.15)
    np.testing.assert_allclose(terms, expected, rtol=1e-4)


@pytest.mark.parametrize("real", [0, 1])
def test_terms_and_gradients_of_an_empty_or_a_single_row_are_finite(real):
    def total(hidden, a):
        found = module.Found(jnp.zeros((2, 9, 3)), hidden, a)
        return jnp.sum(module.clustering_terms(found, jnp.arange(9) < real, 0.15))

    value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(HIDDEN, ASSIGNED)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)


def test_the_width_of_the_kernel_has_no_gradient():
    """With |x - y|^2 in place of d^2, K is the same and s is constant."""
    d = np.float32(distances(HIDDEN, HIDDEN))
    s = -d[0, 1] / 2 / np.log(np_kernel(HIDDEN[MASK])[0, 1])

    @jax.jit
    @jax.grad
    def found(hidden):
        return jnp.sum(module.kernel(hidden, jnp.asarray(MASK), 0.15))

    differences = HIDDEN[:, None] - HIDDEN[None]
    expected = np.sum(-2 / s * np.exp(-d / (2 * s))[..., None] * differences, axis=1)
    np.testing.assert_allclose(found(HIDDEN), expected, rtol=1e-3, atol=1e-5)


def test_criterion_is_the_mean_over_batches_by_rows():
    found = module.Found(jnp.zeros((2, 9, 3)), jnp.asarray(HIDDEN), jnp.asarray(ASSIGNED))
    value = jax.jit(module.criterion, static_argnums=2)(found, jnp.asarray(MASK), 4, 0.15)
    parts = [(4, slice(0, 4)), (3, slice(4, 7))]
    expected = sum(n * np_divergence(ASSIGNED[i], np_kernel(HIDDEN[i])) for n, i in parts) / 7
    np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_batch_norm_is_that_of_the_real_rows():
    params = {"scale": jnp.arange(1.0, 5), "bias": jnp.ones(4)}
    filled = np.where(MASK[:, None], HIDDEN, 1e3)
    found = jax.jit(batch_norm)(filled, params, jnp.asarray(MASK))
    x = HIDDEN[MASK]
    expected = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * np.arange(1, 5) + 1
    np.testing.assert_allclose(found[:7], expected, rtol=1e-4, atol=1e-5)


def test_weights_start_with_the_variance_of_he():
    config = SiMVCConfig(n_clusters=10)
    params = jax.jit(lambda key: module.start(key, [300, 200], config))(jax.random.key(0))
    for name, n in (("view_0", 300), ("view_1", 200), ("hidden", 256)):
        kernel = params[name]["params"]["Dense_0"]["kernel"]
        assert len(kernel) == n and np.std(kernel) == pytest.approx((2 / n) ** 0.5, rel=0.02)
    np.testing.assert_array_equal(params["fusion"], [0.5, 0.5])


# --- Contrast -------------------------------------------------------------------------------------


def test_draws_take_every_row_of_other_clusters_in_every_view_alike():
    clusters = np.array([2, 0, 1, 2, 0, 0, 1, 0, 0])
    n_views, mask = 3, np.arange(9) < 7
    draw = jax.jit(module.draw_other_clusters, static_argnums=1)
    for i in range(7):
        others = [j for j in range(7) if clusters[j] != clusters[i]]
        m = n_views * len(others)
        draws = np.broadcast_to((np.arange(m, dtype=np.float32) + 0.5) / m, (9, 1, m))
        view, row, count = draw(draws, n_views, np.eye(C)[clusters], mask)
        drawn = sorted(zip(np.asarray(view[i, 0]), np.asarray(row[i, 0]), strict=True))
        assert drawn == sorted((v, j) for v in range(n_views) for j in others)
        assert count[i] == len(others)


def test_contrast_is_the_cross_entropy_of_its_draws():
    codes = RNG.normal(size=(3, 9, 5)).astype(np.float32)
    key, n, tau = jax.random.key(3), 4, 0.5
    found = jax.jit(module.contrast, static_argnums=4)(key, codes, ASSIGNED, MASK, n, tau)
    draws = jax.random.uniform(key, (9, 6, n))
    draw = jax.jit(module.draw_other_clusters, static_argnums=1)
    view, row, _ = map(np.asarray, draw(draws, 3, ASSIGNED, MASK))
    unit = codes / np.linalg.norm(codes, axis=2, keepdims=True)
    entropies, best = [], ASSIGNED.argmax(1)
    pairs = [(v, w) for v in range(3) for w in range(3) if v != w]
    for i in range(7):
        for p, (v, w) in enumerate(pairs):
            positive = np.exp(unit[v, i] @ unit[w, i] / tau)
            negatives = [
                np.exp(unit[v, i] @ unit[view[i, p, r], row[i, p, r]] / tau) for r in range(n)
            ]
            assert all(best[row[i, p, r]] != best[i] for r in range(n))
            entropies.append(-np.log(positive / (positive + sum(negatives))))
    np.testing.assert_allclose(found, np.mean(entropies), rtol=1e-4)


def test_a_batch_of_one_predicted_cluster_has_no_contrast():
    codes = RNG.normal(size=(2, 9, 5)).astype(np.float32)
    one = np.tile(np.float32([0.1, 0.8, 0.1]), (9, 1))

    @jax.jit
    @jax.value_and_grad
    def program(codes):
        return module.contrast(jax.random.key(0), codes, one, MASK, 4, 0.1)

    value, grads = program(codes)
    assert value == 0 and not np.any(grads)


# --- Whole runs -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], pytest.param(CASES[1], marks=pytest.mark.slow)])
def test_planted_clusters_are_found_and_padding_is_never_read(case):
    found = fitted(*case)
    assert metrics.accuracy(TRUTH, found.labels[:N], C, C) == 1
    assert found.trace.shape == (6,) and found.embedding.shape == (N + 4, 8)
    assert np.isfinite(found.trace).all() and np.isfinite(found.embedding).all()
    assert (found.labels[N:] == -1).all() and not np.any(found.embedding[N:])
    jax.tree.map(np.testing.assert_array_equal, found, fitted(*case, fill=np.nan))


@pytest.mark.slow
def test_the_best_of_the_runs_is_kept():
    """The first run of SiMVC is CoMVC without weight; it is kept, or one that is better."""
    three, (fit, config, hyper) = fitted(*CASES[0]), CASES[1]
    first = fitted(fit, config, hyper.replace(delta=0.0)).trace
    assert np.allclose(three.trace, first, rtol=1e-2) or three.trace.min() < first.min()
    fit, config, hyper = CASES[0]
    together = fitted(fit, dataclasses.replace(config, runs_at_once=3), hyper)
    np.testing.assert_allclose(together.trace, three.trace, rtol=1e-2)


@pytest.mark.slow
def test_the_state_of_the_lowest_criterion_is_kept(monkeypatch):
    monkeypatch.setattr(module, "criterion", lambda found, *_: found.hidden[0, 0])
    fit, config, hyper = CASES[0]
    found = fitted(fit, dataclasses.replace(config, check_every=1, epochs=9), hyper)
    assert found.embedding[0, 0] == found.trace.min() < found.trace[-1]


# --- Refusals -------------------------------------------------------------------------------------


def federation(n_views, kinds):
    views = [np.ones((8, 3)) for _ in range(n_views)]
    parts = [
        Part(kind, np.arange(4 * i, 4 * i + 4, dtype=np.int32)[None], np.array([i], np.int32))
        for i, kind in enumerate(kinds)
    ]
    return Federation.from_arrays(views, np.zeros(8, int), partition=parts)


@pytest.mark.parametrize(
    ("make", "config"), [(simvc, SiMVCConfig(n_clusters=2)), (comvc, CoMVCConfig(n_clusters=2))]
)
def test_incomplete_rows_are_refused(make, config):
    with pytest.raises(ValueError, match=f"{make.__name__} needs complete rows"):
        engine.start(make(config), federation(2, [(0, 1), (1,)]), jax.random.key(0))


def test_a_single_view_has_nothing_to_contrast():
    algorithm = comvc(CoMVCConfig(n_clusters=2))
    with pytest.raises(ValueError, match="allowed is 2 or more"):
        engine.start(algorithm, federation(1, [(0,)]), jax.random.key(0))


@pytest.mark.parametrize(
    "wrong",
    [{"negatives": 0.0}, {"epochs": 3}, {"batch_size": 1}, {"hidden": (0,)}, {"n_runs": 0}],
)
def test_settings_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CoMVCConfig(**{"n_clusters": 2, **wrong})


@pytest.mark.parametrize("wrong", [{"tau": 0.0}, {"delta": -1.0}, {"rel_sigma": float("nan")}])
def test_numbers_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        comvc(CoMVCConfig(n_clusters=2), CoMVCHyperparams(**wrong))
