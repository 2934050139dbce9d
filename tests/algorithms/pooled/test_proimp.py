"""ProImp: attention and terms against NumPy, matching, what is filled in, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from jaxfedmvc import engine, losses, metrics
from jaxfedmvc.algorithms.pooled import proimp as module
from jaxfedmvc.algorithms.pooled.proimp import ProImpConfig, ProImpHyperparams, Read, proimp
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation

V, B, C, D = 3, 12, 4, 6
RNG = np.random.default_rng(0)
SEEN = RNG.random((B, V)) < 0.7
SEEN[0] = False
CONFIG = ProImpConfig(n_clusters=C, hidden=(8, 8), latent_dim=D, epochs=2, pretrain_epochs=1)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


@functools.cache
def params():
    """Parameters of which none is 0 or 1."""
    fresh = jax.jit(lambda key: module.start(key, [5, 4, 3], CONFIG))(jax.random.key(0))
    return jax.tree.map(lambda x: np.asarray(x) + 0.3 * normal(*x.shape), fresh)


@functools.cache
def found():
    attention = RNG.dirichlet(np.ones(C), size=(V, B)).astype(np.float32)
    return Read(normal(V, B, D), attention, normal(V, C, D), normal(V, C, D))


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def np_linear(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def np_layer_norm(x, norm):
    x = x - x.mean(1, keepdims=True)
    return x / np.sqrt(x.var(1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]


def np_mlp(layers, x, mask):
    for layer in layers[:-1]:
        x = np_linear(layer, x)
        x = (x - x[mask].mean(0)) / np.sqrt(x[mask].var(0) + 1e-5)
        x = np.maximum(x * layer["norm"]["scale"] + layer["norm"]["bias"], 0)
    return np_linear(layers[-1], x)


def np_cross_entropy(positive, negatives):
    return np.log(np.exp(positive) + np.sum(np.exp(negatives))) - positive


# --- The network ----------------------------------------------------------------------------------


def test_views_are_standardised_as_matrices_in_which_what_misses_is_zero():
    observed = np.array([[1, 1], [0, 1], [1, 0], [0, 0], [1, 1]], bool)
    views = [normal(5, 3) + 2, normal(5, 2)]
    dirty = tuple(np.where(observed[:, v, None], x, np.nan) for v, x in enumerate(views))
    result = jax.jit(module.standardised)(dirty, observed)
    for v, x in enumerate(views):
        x = np.where(observed[:, v, None], x, 0)[observed.any(1)]
        expected = (x - x.mean()) / x.std(ddof=1)
        there = observed[:, v]
        np.testing.assert_allclose(result[v][there], expected[there[observed.any(1)]], rtol=1e-4)
        assert not np.any(result[v][~there])


def test_codes_attend_to_prototypes_as_in_numpy():
    z = normal(V, B, D)
    result = jax.jit(module.read)(params(), z, SEEN)
    for v in range(V):
        own = jax.tree.map(lambda x, v=v: x[v], params()["attention"])
        p, r = unit(params()["prototypes"][v]), np_mlp(params()["rep"], unit(z[v]), SEEN[:, v])
        normed, rows = np_layer_norm(p, own["prototype_norm"]), np_layer_norm(r, own["row_norm"])
        scores = np_linear(own["query"], rows) @ np_linear(own["key"], normed).T / D**0.5
        a = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        moved = (a * SEEN[:, v, None]).T @ np_linear(own["row_value"], rows)
        expected = Read(r, a, np_linear(own["value"], normed), unit(moved) + p)
        for got, want in zip(result, expected, strict=True):
            np.testing.assert_allclose(got[v], want, rtol=1e-3, atol=1e-4)


def test_encoders_count_seen_rows():
    x = tuple(normal(B, d) for d in (5, 4, 3))
    for v, z in enumerate(jax.jit(module.encode)(params(), x, SEEN)):
        expected = np_mlp(params()["encoders"][v], x[v], SEEN[:, v])
        np.testing.assert_allclose(z, expected, rtol=1e-3, atol=1e-4)


def test_units_are_dropped_behind_all_hidden_layers_but_the_last():
    config = dataclasses.replace(CONFIG, hidden=(50, 40, 30))
    program = jax.jit(module.dropout_factors, static_argnums=(1, 2, 3))
    factors = program(jax.random.key(0), 100, V, config, 0.2)
    assert [[f.shape for f in view] for view in factors] == [[(100, 50), (100, 40)]] * V
    drawn = np.concatenate([np.ravel(f) for view in factors for f in view])
    np.testing.assert_allclose(np.unique(drawn), [0, 1.25])
    assert drawn.mean() == pytest.approx(1, abs=0.02)
    # Nothing passes the first layer: the second one sees zeros, of which the norm leaves the bias.
    layers = params()["encoders"][0]
    found = module.normed_mlp(layers, normal(B, 5), SEEN[:, 0], [np.zeros((B, 8), np.float32)])
    last = np.maximum(layers[1]["norm"]["bias"], 0)
    np.testing.assert_allclose(found, np.tile(np_linear(layers[2], last), (B, 1)), rtol=1e-3)


# --- Terms of the loss ----------------------------------------------------------------------------


def test_row_contrast_is_the_mean_of_nt_xent_over_pairs_of_views():
    value = jax.jit(module.row_contrast)(params(), found(), SEEN, 0.5)
    h = []
    for v in range(V):
        z = unit(found().attention[v] @ found().values[v]) + unit(found().rows[v])
        z = np_linear(params()["out"], z)
        h.append(unit(np_mlp(params()["project_rows"], z, SEEN[:, v])))
    both = [(v, w, jnp.asarray(SEEN[:, v] & SEEN[:, w])) for w in range(V) for v in range(w)]
    expected = np.mean([losses.ntxent(h[v], h[w], mask, 0.5) for v, w, mask in both])
    np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_attention_terms_are_those_of_seen_rows():
    a, expected = found().attention, []
    for v in range(V):
        p = a[v][SEEN[:, v]]
        mean, entropies = p.mean(0), -np.sum(p * np.log(p + 1e-8), axis=1)
        expected.append(np.log(C) + np.sum(mean * np.log(mean)) + 0.02 * entropies.mean())
    value = jax.jit(module.attention_terms)(a, SEEN, 0.02)
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-4)


def test_prototype_contrast_is_nt_xent_with_a_margin():
    order = np.array([2, 0, 3, 1])  # prototype k of view 0 is order[k] of view 1
    match = np.tile(np.eye(C, dtype=np.float32), (2, 2, 1, 1))
    match[0, 1] = np.eye(C)[order]
    match[1, 0] = match[0, 1].T
    p = found().prototypes[:2]
    value = jax.jit(module.prototype_contrast)(params(), p, match, 0.2, 2.0)
    both = np.concatenate([p[1], p[0][np.argsort(order)]])
    h = unit(np_mlp(params()["project_prototypes"], both, np.ones(2 * C, bool)))
    expected = []
    for i in range(2 * C):
        partner = (i + C) % (2 * C)
        others = [j for j in range(2 * C) if j not in (i, partner)]
        positive = 0.2 - abs(h[i] @ h[partner] - 0.2)
        expected.append(np_cross_entropy(positive / 2, h[others] @ h[i] / 2))
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-4)


@pytest.mark.slow
def test_batches_without_a_pair_or_without_a_view_are_finite():
    @jax.jit
    @jax.value_and_grad
    def program(params, seen):
        x = tuple(jnp.zeros((B, d)) for d in (5, 4, 3))
        read = module.read(params, module.encode(params, x, seen), seen)
        match = jnp.broadcast_to(jnp.eye(C), (V, V, C, C))
        return (
            module.row_contrast(params, read, seen, 0.5)
            + module.attention_terms(read.attention, seen, 0.02)
            + module.prototype_contrast(params, read.prototypes, match, 0.75, 2.0)
        )

    for seen in (np.zeros((B, V), bool), np.tile(np.array([True, False, False]), (B, 1))):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(program(params(), seen)))


# --- Prototypes of one view for another -----------------------------------------------------------


def test_matching_is_the_best_assignment_of_common_rows():
    match = np.asarray(jax.jit(module.matching)(found().attention, SEEN))
    chosen = found().attention.argmax(2)
    for v in range(V):
        np.testing.assert_array_equal(match[v, v], np.eye(C))
        for w in range(v):
            counts = np.zeros((C, C))
            for i in np.flatnonzero(SEEN[:, v] & SEEN[:, w]):
                counts[chosen[v, i], chosen[w, i]] += 1
            best = counts[scipy.optimize.linear_sum_assignment(-counts)].sum()
            assert np.sum(match[v, w] * counts) == best
            np.testing.assert_array_equal(match[v, w].sum(0), 1)
            np.testing.assert_array_equal(match[v, w], match[w, v].T)


def test_missing_views_are_filled_from_matched_prototypes():
    orders = RNG.permuted(np.tile(np.arange(C), (V, 1)), axis=1)  # of each view's prototypes
    places = np.eye(C, dtype=np.float32)[orders]
    match = np.einsum("vik,wil->vwkl", places, places)
    result = np.asarray(jax.jit(module.fill)(params(), found(), match, SEEN))
    f = found()
    for i in range(B):
        for v in range(V):
            guesses = []
            for w in [v] if SEEN[i, v] else np.flatnonzero(SEEN[i]):
                a = np.array(
                    [f.attention[w, i, np.flatnonzero(match[v, w, k])[0]] for k in range(C)]
                )
                z = unit(a @ f.values[v]) + unit(f.rows[w, i])
                guesses.append(unit(np_linear(params()["out"], z)))
            expected = unit(np.mean(guesses, axis=0)) if guesses else np.zeros(D)
            np.testing.assert_allclose(result[v, i], expected, rtol=1e-3, atol=1e-4)


# --- Whole runs -----------------------------------------------------------------------------------

N = 90
TRUTH = np.arange(N) % 3


def planted(fill=0.0):
    """Three blocks in two views, of which 50 rows have both and 40 one, and padding."""
    rng = np.random.default_rng(1)
    views = [(3 * rng.normal(size=(3, d)))[TRUTH] + 0.1 * rng.normal(size=(N, d)) for d in (6, 5)]
    held = rng.permutation(np.array([[1, 1]] * 50 + [[1, 0], [0, 1]] * 20, bool))
    observed = np.pad(held, ((0, 4), (0, 0)))
    views = [np.pad(x, ((0, 4), (0, 0))) for x in views]
    views = [np.where(observed[:, v, None], x, fill) for v, x in enumerate(views)]
    return tuple(jnp.asarray(x, jnp.float32) for x in views), jnp.asarray(observed)


@functools.cache
def program():
    config = ProImpConfig(
        n_clusters=3,
        hidden=(32,),
        latent_dim=8,
        epochs=60,
        pretrain_epochs=45,
        batch_size=100,
        n_init=3,
    )
    return jax.jit(lambda key, x, o, hyper: module.fit(key, x, o, config, hyper))


@pytest.mark.slow
def test_planted_clusters_are_found_and_missing_entries_are_never_read():
    hyper = ProImpHyperparams(learning_rate=0.01)
    result = program()(jax.random.key(0), *planted(), hyper)
    result = jax.tree.map(np.asarray, result)
    assert metrics.accuracy(TRUTH, result.labels[:N], 3, 3) == 1
    assert (result.labels[N:] == -1).all() and not np.any(result.embedding[N:])
    assert result.embedding.shape == (N + 4, 16) and result.trace.shape == (60,)
    assert np.isfinite(result.embedding).all() and np.isfinite(result.trace).all()
    for fill in (7.0, np.nan):
        again = program()(jax.random.key(0), *planted(fill), hyper)
        jax.tree.map(np.testing.assert_array_equal, result, again)


def federation(kinds, n_views=2):
    parts = [
        Part(kind, np.arange(4 * i, 4 * i + 4, dtype=np.int32)[None], np.array([i], np.int32))
        for i, kind in enumerate(kinds)
    ]
    return Federation.from_arrays([np.ones((8, 3))] * n_views, np.zeros(8, int), partition=parts)


def test_a_federation_of_single_views_is_refused():
    algorithm = proimp(ProImpConfig(n_clusters=2, hidden=(4,), latent_dim=4))
    with pytest.raises(ValueError, match="two views or more"):
        engine.start(algorithm, federation([(0,), (1,)]), jax.random.key(0))
    engine.start(algorithm, federation([(0, 1), (1,)]), jax.random.key(0))


@pytest.mark.parametrize("kinds", [[(0, 1), (2,)], [(0, 1), (1, 2)]])
def test_prototypes_of_two_views_that_no_client_holds_both_cannot_be_matched(kinds):
    algorithm = proimp(ProImpConfig(n_clusters=2, hidden=(4,), latent_dim=4))
    with pytest.raises(ValueError, match="no client holds 0 and 2; allowed are"):
        engine.start(algorithm, federation(kinds, 3), jax.random.key(0))
    engine.start(algorithm, federation([(0, 1, 2), (2,)], 3), jax.random.key(0))


@pytest.mark.parametrize("wrong", [{"epochs": 50}, {"batch_size": 1}, {"hidden": (0,)}])
def test_settings_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ProImpConfig(**{"n_clusters": 2, **wrong})


@pytest.mark.parametrize("wrong", [{"tau": 0.0}, {"dropout": 1.0}, {"margin": 1.5}])
def test_numbers_out_of_range_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        proimp(ProImpConfig(n_clusters=2), ProImpHyperparams(**wrong))
