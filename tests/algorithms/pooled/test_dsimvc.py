"""DSIMVC on small examples with known answers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from jaxfedmvc.algorithms.pooled.dsimvc import (
    DSIMVCConfig,
    DSIMVCHyperparams,
    cut,
    dsimvc,
    feature_terms,
    fill,
    fit,
    init,
    label_loss,
    outputs,
    pair_loss,
    passes,
    train,
    weigh,
)
from jaxfedmvc.algorithms.pooled.networks import unevenness
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics import accuracy
from jaxfedmvc.nn import init_mlp

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
TRUTH = np.arange(45) % 3
VIEWS = tuple(
    (RNG.uniform(size=(3, d))[TRUTH] + 0.03 * RNG.normal(size=(45, d))).astype(np.float32)
    for d in (8, 6)
)
OBSERVED = np.ones((45, 2), bool)
OBSERVED[:10, 0] = OBSERVED[10:20, 1] = OBSERVED[44] = False  # the last row is padding
SEEN = jnp.array(OBSERVED)
CONFIG = DSIMVCConfig(
    3,
    hidden=(),
    latent_dim=8,
    feature_dim=6,
    pretrain_epochs=20,
    neighbour_pretrain_epochs=20,
    neighbour_epochs=10,
    steps=60,
    batch_size=16,
    weight_hidden=5,
)
HYPER = DSIMVCHyperparams(learning_rate=0.02)


@functools.cache
def program():
    return jax.jit(lambda views: fit(KEY, views, SEEN, CONFIG, HYPER))


@pytest.mark.slow
def test_planted_clusters_are_found_and_padding_is_not_labelled():
    found = program()(VIEWS)
    assert found.labels[44] == -1
    assert accuracy(TRUTH[:44], found.labels[:44], 3, 3) == 1
    assert found.embedding.shape == (45, 3) and found.trace.shape == (110,)
    np.testing.assert_allclose(found.embedding[:44].sum(axis=1), 1, rtol=1e-5)
    for phase in (found.trace[:20], found.trace[20:40], found.trace[40:50], found.trace[50:]):
        assert phase[-1] < phase[0]


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, 50.0])
def test_what_is_not_observed_is_never_read(value):
    other = tuple(np.where(OBSERVED[:, [v]], x, value) for v, x in enumerate(VIEWS))
    other = tuple(x.astype(np.float32) for x in other)
    jax.tree.map(np.testing.assert_array_equal, program()(other), program()(VIEWS))


def np_cut(z):
    return z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True) / np.sqrt(3), 1)


def np_feature_terms(z, other):
    products = np_cut(z) @ np_cut(other).T
    return -2 * np.diag(products) + ((products**2).sum(1) - np.diag(products) ** 2) / (len(z) - 1)


def np_label_loss(q, other):
    c, total = q.shape[1], 0.0
    a, b = (x / np.linalg.norm(x, axis=0) for x in (q, other))
    for one, two in ((a, b), (b, a)):
        for k in range(c):
            positive = one[:, k] @ two[:, k]
            negatives = [one[:, k] @ one[:, j] for j in range(c) if j != k]
            total += logsumexp([positive, *negatives]) - positive
    return total / (2 * c) + sum(float(unevenness(x, np.ones(len(x), bool))) for x in (q, other))


def batch():
    h = RNG.normal(size=(3, 7, 4)).astype(np.float32)
    q = RNG.dirichlet(np.ones(3), size=(3, 7)).astype(np.float32)
    assert (np.linalg.norm(h, axis=2) > 3**0.5).any()
    assert (np.linalg.norm(h, axis=2) < 3**0.5).any()
    return h, q, np.arange(7) < 6


def test_terms_of_a_pair_of_views():
    h, q, mask = batch()
    found = jax.jit(feature_terms)(h[0], h[1], mask)[:6]
    np.testing.assert_allclose(found, np_feature_terms(h[0, :6], h[1, :6]), rtol=1e-4, atol=1e-5)
    found = jax.jit(label_loss)(q[0], q[1], mask)
    assert found == pytest.approx(np_label_loss(q[0, :6], q[1, :6]), rel=1e-5)


def test_pair_loss_weighs_features_alone_and_divides_them_by_the_batch():
    h, q, mask = batch()
    weights = np.append(RNG.dirichlet(np.ones(6)), 9.0).astype(np.float32)
    plain = weighted = 0.0
    for v, w in ((0, 1), (0, 2), (1, 2)):
        terms = np_feature_terms(h[v, :6], h[w, :6])
        labels = np_label_loss(q[v, :6], q[w, :6])
        plain += terms.mean() + labels
        weighted += terms @ weights[:6] / 6 + labels
    assert jax.jit(pair_loss)(h, q, mask) == pytest.approx(plain, rel=1e-4)
    both = jax.jit(jax.value_and_grad(pair_loss))
    assert both(h, q, mask, weights)[0] == pytest.approx(weighted, rel=1e-4)
    value, gradient = both(0 * h, q, 0 * mask > 0, weights)  # nobody
    assert value == 0 and np.isfinite(gradient).all()


def test_short_vectors_are_not_cut():
    z = np.array([[0.0, 0.0], [1.0, 1.0], [3.0, 4.0]], np.float32)
    np.testing.assert_allclose(cut(z), [[0, 0], [1, 1], [0.6 * 3**0.5, 0.8 * 3**0.5]], rtol=1e-6)


def np_fill(x, features, observed, count):
    filled = [view.copy() for view in x]
    for v, i in np.argwhere(~observed.T):
        taken = []
        for w in np.flatnonzero(observed[i]):
            products = features[w] @ features[w, i]
            nearest = [j for j in np.argsort(-products) if observed[j, v] and observed[j, w]]
            for j in nearest[: max(count - len(taken), 1)]:
                taken.append(x[v][j])
        filled[v][i] = np.mean(taken, axis=0) if taken else 0
    return filled


@pytest.mark.parametrize("count", [1, 3])
def test_missing_views_are_means_over_neighbours(count):
    observed = RNG.uniform(size=(12, 3)) < 0.6
    observed[:2] = True
    x = [RNG.normal(size=(12, d)).astype(np.float32) for d in (3, 2, 4)]
    features = RNG.normal(size=(3, 12, 5)).astype(np.float32)
    found = jax.jit(fill, static_argnums=3)(x, features, observed, count)
    for view, expected in zip(found, np_fill(x, features, observed, count), strict=True):
        np.testing.assert_allclose(view, expected, rtol=1e-5, atol=1e-6)


def test_passes_are_random_orders_of_the_rows_one_after_another():
    draw = jax.jit(passes, static_argnums=2)
    mask = np.arange(9) % 2 == 0  # five rows
    found = np.asarray(draw(KEY, mask, 23))
    for start in range(0, 20, 5):
        np.testing.assert_array_equal(np.sort(found[start : start + 5]), [0, 2, 4, 6, 8])
    assert len({tuple(found[s : s + 5]) for s in range(0, 20, 5)}) > 1
    assert set(found[20:]) < {0, 2, 4, 6, 8} and len(set(found[20:])) == 3
    np.testing.assert_array_equal(draw(KEY, np.append(mask, [False] * 4), 23), found)
    assert ((draw(KEY, 0 * mask > 0, 23) >= 0) & (draw(KEY, 0 * mask > 0, 23) < 9)).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uniform", "bilevel"])
def test_a_step_is_adam_on_the_losses_of_complete_and_of_weighted_filled_rows(kind):
    config = dataclasses.replace(CONFIG, steps=1, batch_size=12, latent_dim=4, weights=kind)
    kinds = jnp.arange(24) < 12, jnp.arange(24) >= 12
    x = [jnp.array(20 * RNG.uniform(size=(24, d)), jnp.float32) for d in (3, 2)]
    hyper = DSIMVCHyperparams(learning_rate=0.01, trial_rate=0.5, weight_rate=3.0)
    key_weigher = jax.random.split(KEY, 3)[2]

    @jax.jit
    def run():
        model, all_rows = init(KEY, x, config)._replace(decoders=()), jnp.ones(12, bool)

        def complete_loss(model):
            return pair_loss(*outputs(model, [v[:12] for v in x]), all_rows)

        def loss(model, weights):
            filled = outputs(model, [v[12:] for v in x])
            return complete_loss(model) + pair_loss(*filled, all_rows, weights)

        def weights(weigher, model):
            return weigh(weigher, outputs(model, [v[12:] for v in x])[1])

        def trial(weigher):
            gradient = jax.grad(lambda m: loss(m, weights(weigher, m)))(model)
            return complete_loss(jax.tree.map(lambda p, g: p - 0.5 * g, model, gradient))

        given = uniform = jnp.full(12, 1 / 12)
        if kind == "bilevel":
            # A first step of Adam goes by its size along each gradient's sign.
            weigher = init_mlp(key_weigher, 3, (5, 1))
            slope = jax.grad(trial)(weigher)
            given = weights(jax.tree.map(lambda p, g: p - 3 * jnp.sign(g), weigher, slope), model)
        expected = jax.value_and_grad(loss)(model, given)
        return model, expected, train(KEY, model, x, kinds, config, hyper), loss(model, uniform)

    model, (value, gradient), (new, losses), uniform = run()
    assert losses[0] == pytest.approx(float(value), rel=1e-4)
    assert (kind == "uniform") == (abs(value - uniform) < 1e-3 * abs(value))
    for p, q, g in zip(*map(jax.tree.leaves, (model, new, gradient)), strict=True):
        p, q, g = np.asarray(p), np.asarray(q), np.asarray(g)
        steep = np.abs(g) > 1e-3
        np.testing.assert_allclose((p - q)[steep], 0.01 * np.sign(g[steep]), rtol=0.01)


def test_federations_without_complete_rows_are_refused():
    ids = np.arange(8, dtype=np.int32).reshape(2, 1, 4)
    parts = [Part(k, ids[i], np.array([i], np.int32)) for i, k in enumerate(((0,), (1,)))]
    federation = Federation.from_arrays([RNG.normal(size=(8, 2))] * 2, partition=parts)
    with pytest.raises(ValueError, match="no client holds all views"):
        dsimvc(CONFIG).init(KEY, federation)


@pytest.mark.parametrize("settings", [{"hidden": (0,)}, {"steps": 0}, {"weights": "learnt"}])
def test_wrong_settings_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        DSIMVCConfig(3, **settings)


def test_wrong_numbers_are_named():
    with pytest.raises(ValueError, match="trial_rate: got 0"):
        dsimvc(CONFIG, DSIMVCHyperparams(trial_rate=0.0))
