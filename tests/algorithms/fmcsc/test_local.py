"""The reference without a federation: nothing travels, and every client is as if it were alone."""

import functools

import chex
import jax
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, local_fmcsc
from jaxfedmvc.algorithms.fmcsc.networks import features
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.federation import Federation

CONFIG = FMCSCConfig(
    2, hidden=(8,), latent_dim=3, head_hidden=8, pretrain_epochs=3, local_epochs=2, n_init=2
)
KEY = jax.random.key(1)


def federation(scale=1.0):
    """Two clients with both views, one with the second; `scale` changes the first's rows."""
    rng = np.random.default_rng(0)
    held = [
        {v: rng.normal(size=(8, d)) * (scale if i == 0 else 1.0) for v, d in views.items()}
        for i, views in enumerate(({0: 4, 1: 3}, {0: 4, 1: 3}, {1: 3}))
    ]
    return Federation.from_clients(held, None)


@functools.cache
def program():
    algorithm = local_fmcsc(CONFIG, FMCSCHyperparams(learning_rate=0.01))
    return algorithm, jax.jit(functools.partial(engine.run, algorithm, rounds=2))


@pytest.fixture(scope="module")
def result():
    return program()[1](federation(), KEY)


@pytest.mark.slow
def test_nothing_travels(result):
    for stage in engine.traffic(program()[0], federation()).values():
        assert stage == (0, 0)


@pytest.mark.slow
def test_a_client_learns_from_its_own_rows_only(result):
    other = program()[1](federation(3.0), KEY)
    mine, theirs = result.state.clients, other.state.clients
    for c, i in ((0, 1), (1, 0)):
        pair = [jax.tree.map(lambda x, i=i: x[i], state[c][0]) for state in (mine, theirs)]
        chex.assert_trees_all_equal(*pair)
    moved = [
        np.asarray(state[0][0].joint_head["params"]["Dense_0"]["kernel"][0])
        for state in (mine, theirs)
    ]
    assert np.abs(moved[0] - moved[1]).max() > 1e-3


@pytest.mark.slow
def test_features_are_hidden_from_the_contrast_of_multi_view_clients_alone(result):
    algorithm = local_fmcsc(CONFIG, FMCSCHyperparams(learning_rate=0.01, mask_rate=0.3))
    hidden = jax.jit(functools.partial(engine.run, algorithm, rounds=2))(federation(), KEY)
    for stage, phase in (("setup", 0), ("rounds", 0)):
        losses = [
            [np.asarray(c["loss"]) for c in r.info[stage][phase]["clients"]]
            for r in (result, hidden)
        ]
        np.testing.assert_array_equal(losses[0][1], losses[1][1])
        assert (losses[0][0] == losses[1][0]).all() == (stage == "setup")


@pytest.mark.slow
def test_losses_fall_and_heads_train_where_a_loss_reaches_them(result):
    start = engine.start(program()[0], federation(), KEY).clients
    setup, rounds = result.info["setup"][0], result.info["rounds"][0]
    assert set(setup) == {"clients", "server"} and len(rounds["clients"]) == 2
    changed = [
        np.abs(
            np.asarray(a[0].joint_head["params"]["Dense_1"]["kernel"])
            - np.asarray(b[0].joint_head["params"]["Dense_1"]["kernel"])
        ).max()
        for a, b in zip(result.state.clients, start, strict=True)
    ]
    assert changed[0] > 1e-3 and changed[1] == 0.0
    partial = np.asarray(rounds["clients"][1]["loss"])[:, 0]
    assert partial[1] < partial[0] < np.asarray(setup["clients"][1]["loss"])[0]


@pytest.mark.slow
def test_clusters_are_kmeans_of_h_or_of_z(result):
    data = federation()
    for c, cohort in enumerate(data.cohorts):
        model, key = jax.tree.map(lambda x: x[0], result.state.clients[c])
        client = jax.tree.map(lambda x: x[0], cohort)
        out = features(model, client.by_view())
        x = out.h if c == 0 else out.z[1]
        expected = kmeans(key, x, 2, where=client.mask, n_init=2).labels
        np.testing.assert_array_equal(result.labels[c][0], expected)
