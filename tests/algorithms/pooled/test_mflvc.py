"""MFLVC on small examples with known answers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from scipy.special import log_softmax, softmax

from jaxfedmvc.algorithms.pooled.mflvc import (
    MFLVCConfig,
    MFLVCHyperparams,
    contrasts,
    feature_clusters,
    fit,
    mflvc,
    names,
    tuning,
)
from jaxfedmvc.algorithms.pooled.networks import (
    column_contrast,
    encode,
    init_networks,
    unevenness,
)
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation
from jaxfedmvc.losses import l2_normalize, ntxent
from jaxfedmvc.metrics import accuracy

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
TRUTH = np.arange(40) % 3
VIEWS = tuple(
    (RNG.uniform(size=(3, d))[TRUTH] + 0.03 * RNG.normal(size=(40, d))).astype(np.float32)
    for d in (8, 6)
)
REAL = np.arange(40) < 38
CONFIG = MFLVCConfig(
    3,
    hidden=(16,),
    latent_dim=8,
    feature_dim=8,
    pretrain_epochs=30,
    contrast_epochs=30,
    tune_epochs=20,
    batch_size=16,
    n_init=3,
)
HYPER = MFLVCHyperparams(learning_rate=0.01)


@functools.cache
def program():
    observed = jnp.array(np.stack([REAL, REAL], axis=1))
    return jax.jit(lambda views: fit(KEY, views, observed, CONFIG, HYPER))


@pytest.mark.slow
def test_planted_clusters_are_found_and_padding_is_not_labelled():
    found = program()(VIEWS)
    assert (found.labels[38:] == -1).all()
    assert accuracy(TRUTH[:38], found.labels[:38], 3, 3) == 1
    assert found.embedding.shape == (40, 3) and found.trace.shape == (80,)
    np.testing.assert_allclose(found.embedding[:38].sum(axis=1), 1, rtol=1e-5)
    for phase in (found.trace[:30], found.trace[30:60], found.trace[60:]):
        assert phase[-1] < phase[0]


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, 50.0])
def test_padding_is_never_read(value):
    other = tuple(np.where(REAL[:, None], x, value).astype(np.float32) for x in VIEWS)
    jax.tree.map(np.testing.assert_array_equal, program()(other), program()(VIEWS))


def test_contrasts_are_those_of_all_pairs_of_views():
    views = tuple(RNG.normal(size=(6, 3)).astype(np.float32) for _ in range(3))
    shapes = {"feature": (4, (5,)), "label": (4, (3,))}
    mask = np.arange(6) < 5

    @jax.jit
    def both():
        networks = init_networks(KEY, views, (), 4, shapes)
        z = encode(networks, views)
        h, q = (
            [x @ net["params"]["Dense_0"]["kernel"] for x in z]
            for net in (networks.heads["feature"], networks.heads["label"])
        )
        h, q = [l2_normalize(x) for x in h], [jax.nn.softmax(x) for x in q]
        expected = 0.0
        for v, w in ((0, 1), (0, 2), (1, 2)):
            expected += ntxent(h[v], h[w], mask, 0.5) + column_contrast(q[v], q[w], mask, 1.0)
            expected += unevenness(q[v], mask) + unevenness(q[w], mask)
        return contrasts(networks, z, jnp.array(mask), MFLVCHyperparams()), expected

    found, expected = both()
    assert found == pytest.approx(float(expected), rel=1e-5)


def np_names(clusters, predicted, c):
    shared = np.zeros((c, c))
    np.add.at(shared, (clusters, predicted), 1)
    return linear_sum_assignment(-shared)[1][clusters]


def test_clusters_get_the_names_that_most_rows_have():
    clusters, predicted = RNG.integers(4, size=(2, 30))
    mask = np.arange(30) < 25
    found = jax.jit(names, static_argnums=3)(clusters, predicted, mask, 4)
    expected = np_names(clusters[:25], predicted[:25], 4)
    assert (found[:25] == predicted[:25]).sum() == (expected == predicted[:25]).sum()
    assert len(set(zip(clusters.tolist(), np.asarray(found).tolist(), strict=True))) == 4


@pytest.mark.parametrize("twice", [True, False])
def test_tuning_is_cross_entropy_to_renamed_clusters(twice):
    logits = 3 * RNG.normal(size=(2, 12, 3)).astype(np.float32)
    # One row in four is elsewhere than its logits say, under other names.
    clusters = (np.argmax(logits, axis=2) + 1) % 3
    clusters[:, ::4] = (clusters[:, ::4] + 1) % 3
    mask = np.arange(12) < 11
    config = MFLVCConfig(3, softmax_twice=twice)
    expected = 0.0
    for v in range(2):
        rows, kept = logits[v, :11], clusters[v, :11]
        named = np_names(kept, rows.argmax(axis=1), 3)
        logs = log_softmax(softmax(rows, axis=1) if twice else rows, axis=1)
        expected -= logs[np.arange(11), named].mean()
    clusters[:, 11] = -1
    found = jax.jit(tuning, static_argnums=3)(logits, clusters, mask, config)
    assert found == pytest.approx(expected, rel=1e-5)


def test_every_view_is_clustered_by_itself():
    """View 0 says what is first, view 1 what is second."""
    first, second = np.arange(24) % 2, np.arange(24) // 2 % 2
    views = tuple(
        np.stack([1.0 + t, 2.0 - t], axis=1).astype(np.float32) + 0.01 * RNG.normal(size=(24, 2))
        for t in (first, second)
    )
    config = MFLVCConfig(2, hidden=(), latent_dim=4, feature_dim=4, n_init=2)
    real = jnp.arange(24) < 23

    @jax.jit
    def run(views):
        networks = init_networks(KEY, views, (), 4, {"feature": (4, (4,))})
        return feature_clusters(KEY, networks, views, real, config)

    found = np.asarray(run(tuple(x.astype(np.float32) for x in views)))
    assert (found[:, 23] == -1).all()
    for labels, truth in zip(found[:, :23], (first[:23], second[:23]), strict=True):
        assert np.array_equal(labels, truth) or np.array_equal(labels, 1 - truth)


def test_incomplete_rows_are_refused():
    ids = np.arange(8, dtype=np.int32).reshape(2, 1, 4)
    kinds = ((0, 1), (1,))
    parts = [Part(k, ids[i], np.array([i], np.int32)) for i, k in enumerate(kinds)]
    federation = Federation.from_arrays([RNG.normal(size=(8, 2))] * 2, partition=parts)
    with pytest.raises(ValueError, match="mflvc needs complete rows"):
        mflvc(CONFIG).init(KEY, federation)


@pytest.mark.parametrize("settings", [{"hidden": (0,)}, {"feature_dim": 0}, {"tune_epochs": -1}])
def test_wrong_settings_are_named(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        MFLVCConfig(3, **settings)


def test_wrong_numbers_are_named():
    with pytest.raises(ValueError, match="tau_label: got 0"):
        mflvc(CONFIG, MFLVCHyperparams(tau_label=0.0))
