"""GCFAgg on small examples with known answers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

from jaxfedmvc.algorithms.pooled.gcfagg import (
    GCFAggConfig,
    GCFAggHyperparams,
    aggregate,
    aggregate_all,
    drop,
    fit,
    gcfagg,
    init,
    structure_contrast,
)
from jaxfedmvc.algorithms.pooled.networks import encode
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation
from jaxfedmvc.losses import ntxent
from jaxfedmvc.metrics import accuracy

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
TRUTH = np.arange(40) % 3
VIEWS = tuple(
    (RNG.uniform(size=(3, d))[TRUTH] + 0.03 * RNG.normal(size=(40, d))).astype(np.float32)
    for d in (8, 6)
)
REAL = np.arange(40) < 38
CONFIG = GCFAggConfig(
    3,
    hidden=(16,),
    latent_dim=8,
    feature_dim=8,
    attention_hidden=8,
    pretrain_epochs=30,
    contrast_epochs=10,
    batch_size=16,
    n_init=3,
)
HYPER = GCFAggHyperparams(learning_rate=0.01)


@functools.cache
def program():
    observed = jnp.array(np.stack([REAL, REAL], axis=1))
    return jax.jit(lambda views: fit(KEY, views, observed, CONFIG, HYPER))


@functools.cache
def networks():
    """Small ones, and z [V, rows, d] of their encoders."""

    @jax.jit
    def make():
        drawn = init(KEY, VIEWS, CONFIG)
        return drawn, encode(drawn, VIEWS)

    return make()


@pytest.mark.slow
def test_planted_clusters_are_found_and_padding_is_not_labelled():
    found = program()(VIEWS)
    assert (found.labels[38:] == -1).all() and not np.asarray(found.embedding[38:]).any()
    assert accuracy(TRUTH[:38], found.labels[:38], 3, 3) == 1
    np.testing.assert_allclose(np.linalg.norm(found.embedding[:38], axis=1), 1, rtol=1e-5)
    assert found.trace.shape == (40,)
    assert found.trace[29] < found.trace[0] and found.trace[39] < found.trace[30]


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, 50.0])
def test_padding_is_never_read(value):
    other = tuple(np.where(REAL[:, None], x, value).astype(np.float32) for x in VIEWS)
    jax.tree.map(np.testing.assert_array_equal, program()(other), program()(VIEWS))


def np_layer(params, x):
    layer = params["params"]["Dense_0"]
    return x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])


def np_aggregate(heads, rows):
    """One layer of PyTorch's TransformerEncoderLayer(nhead=1) in evaluation, and U with l2."""

    def norm(x):
        return (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)

    q, k, v = np.split(np_layer(heads["queries_keys_values"], rows), 3, axis=1)
    attention = softmax(q @ k.T / np.sqrt(rows.shape[1]), axis=1)
    rows = norm(rows + np_layer(heads["attended"], attention @ v))
    inner = np.maximum(np_layer(heads["forward_in"], rows), 0)
    rows = norm(rows + np_layer(heads["forward_out"], inner))
    found = np_layer(heads["common"], rows)
    return found / np.linalg.norm(found, axis=1, keepdims=True), attention


def test_rows_gather_by_attention_from_the_real_rows_of_their_batch():
    drawn, z = networks()
    found, attention = jax.jit(aggregate)(drawn, z, REAL)
    rows = np.concatenate(list(np.asarray(z)), axis=1)
    expected, weights = np_aggregate(drawn.heads, rows[:38])
    np.testing.assert_allclose(found[:38], expected, atol=2e-5)
    np.testing.assert_allclose(attention[:38, :38], weights, atol=1e-6)
    assert not np.asarray(attention[:, 38:]).any()


def test_start_of_attention_is_of_the_width_that_its_authors_framework_draws():
    kernel = np.asarray(networks()[0].heads["queries_keys_values"]["params"]["Dense_0"]["kernel"])
    assert kernel.shape == (16, 48)
    assert 0.95 * np.sqrt(6 / 64) < np.abs(kernel).max() <= np.sqrt(6 / 64)


def test_all_rows_gather_in_random_batches():
    drawn, z = networks()
    program = jax.jit(aggregate_all, static_argnums=4)
    rows = np.concatenate(list(np.asarray(z)), axis=1)
    # One batch: whichever order it has, rows gather from all.
    found = np.asarray(program(KEY, drawn, VIEWS, REAL, 64))
    np.testing.assert_allclose(found[:38], np_aggregate(drawn.heads, rows[:38])[0], atol=2e-5)
    assert not found[38:].any()
    # Batches of one: a row gathers from itself.
    found = np.asarray(program(KEY, drawn, VIEWS, REAL, 1))
    alone = np.concatenate([np_aggregate(drawn.heads, rows[[i]])[0] for i in range(38)])
    np.testing.assert_allclose(found[:38], alone, atol=2e-5)
    # Of several, the key decides who gathers from whom.
    found = [np.asarray(program(jax.random.key(i), drawn, VIEWS, REAL, 8)) for i in (0, 0, 1)]
    np.testing.assert_array_equal(found[0], found[1])
    assert (np.abs(found[0] - found[2])[:38].max(axis=1) > 1e-4).any()


def test_structure_contrast_scales_negatives():
    h, gathered = RNG.normal(size=(2, 6, 3)).astype(np.float32)
    attention = RNG.uniform(size=(6, 6)).astype(np.float32)
    mask = np.arange(6) < 5
    both = np.concatenate([h[:5], gathered[:5]])
    logits = both @ both.T / 0.7
    scaled = logits * (1 - np.tile(attention[:5, :5], (2, 2)))
    total = 0.0
    for i in range(10):
        partner = (i + 5) % 10
        negatives = [scaled[i, j] for j in range(10) if j not in (i, partner)]
        total += logsumexp([*negatives, logits[i, partner]]) - logits[i, partner]
    contrast = jax.jit(structure_contrast)
    assert contrast(h, gathered, attention, mask, 0.7) == pytest.approx(total / 10, rel=1e-5)
    plain = ntxent(h, gathered, jnp.array(mask), 0.7)
    assert contrast(h, gathered, 0 * attention, mask, 0.7) == pytest.approx(float(plain), rel=1e-5)


def test_dropout_keeps_the_mean_and_draws_by_row_and_column():
    draw = jax.jit(drop, static_argnums=(2, 3, 4))
    found, shorter = draw(KEY, 0.1, 60, 40, 20), draw(KEY, 0.1, 7, 40, 20)
    assert [part.shape for part in found] == [(60, 40), (60, 20), (60, 40), (60, 60)]
    for part, first in zip(found, shorter, strict=True):
        assert set(np.unique(part)) == {0, np.float32(1 / 0.9)}
        assert 0.06 < np.mean(np.asarray(part) == 0) < 0.14
        np.testing.assert_array_equal(first, part[:7, : first.shape[1]])


def test_dropout_acts_on_attention_and_what_follows():
    drawn, z = networks()
    program = jax.jit(aggregate)
    kept = jax.tree.map(np.asarray, jax.jit(drop, static_argnums=(2, 3, 4))(KEY, 0.5, 40, 16, 8))
    nothing = jax.tree.map(np.ones_like, kept)
    plain, attention = program(drawn, z, REAL, nothing)
    for name, factors in kept._asdict().items():
        found, dropped = program(drawn, z, REAL, nothing._replace(**{name: factors}))
        assert not np.allclose(found[:38], plain[:38], atol=1e-3)
        expected = attention * factors if name == "attention" else attention
        np.testing.assert_allclose(dropped, expected, rtol=1e-6)


def test_a_batch_without_rows_has_a_finite_gradient():
    drawn, z = networks()

    def loss(z):
        gathered, attention = aggregate(drawn, z, jnp.zeros(40, bool))
        return structure_contrast(z[0], gathered, attention, jnp.zeros(40, bool), 0.5)

    value, gradient = jax.jit(jax.value_and_grad(loss))(z)
    assert value == 0 and np.isfinite(gradient).all()


def test_incomplete_rows_are_refused():
    ids = np.arange(8, dtype=np.int32).reshape(2, 1, 4)
    kinds = ((0, 1), (1,))
    parts = [Part(k, ids[i], np.array([i], np.int32)) for i, k in enumerate(kinds)]
    federation = Federation.from_arrays([RNG.normal(size=(8, 2))] * 2, partition=parts)
    with pytest.raises(ValueError, match="gcfagg needs complete rows"):
        gcfagg(CONFIG).init(KEY, federation)


def test_wrong_settings_and_numbers_are_named():
    with pytest.raises(ValueError, match="attention_hidden"):
        GCFAggConfig(3, attention_hidden=0)
    with pytest.raises(ValueError, match="dropout: got 1"):
        gcfagg(CONFIG, GCFAggHyperparams(dropout=1.0))
