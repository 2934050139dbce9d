"""FMCSC as a whole: sweeps, who takes part, and that it learns."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from jaxfedmvc import data, engine
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.federation import Federation
from tests.algorithms.fmcsc.tiny import (
    CLIENTS,
    CONFIG,
    FULL,
    KEY,
    NOTHING,
    PAIR,
    at,
    build,
    close,
    jit,
    largest_difference,
    make_federation,
)


@pytest.mark.slow
def test_numbers_that_may_be_swept_are_traced(federation, pretrained):
    """vmap over every leaf of the hyper-parameters is a loop over them."""
    config = dataclasses.replace(CONFIG, components="ACD")
    full, pair = at(federation.cohorts[0], 0), at(federation.cohorts[2], 0)

    def updates(hyper):
        phase = fmcsc(config, hyper).round[0]
        state = at(pretrained.clients[2], 0)
        result = []
        for client, kept in ((full, NOTHING), (pair, state)):
            sent = phase.broadcast(pretrained.server, client.view_ids)
            result.append(phase.client(KEY, sent, kept, client)[1:])
        return result

    values = FMCSCHyperparams(
        learning_rate=jnp.array([0.01, 0.02, 0.01, 0.01]),
        tau_m=jnp.array([0.5, 0.5, 0.1, 0.5]),
        tau_p=jnp.array([0.5, 0.5, 0.5, 0.1]),
        weight_floor=jnp.array([1e-3, 1e-3, 1e-3, 9.0]),
    )
    together, alone = jit(jax.vmap(updates))(values), jit(updates)
    for i in range(4):
        close(at(together, i), alone(at(values, i)), rtol=1e-3, atol=1e-4)
    (_, full_info), (pair_update, pair_info) = together
    assert full_info["loss"][2] != full_info["loss"][0] == full_info["loss"][3]
    assert pair_info["loss"][3] != pair_info["loss"][0] == pair_info["loss"][2]
    assert pair_update.weights[PAIR][3] == 9.0 > pair_update.weights[PAIR][0]
    first, second = (at(pair_update.models, i) for i in (0, 1))
    assert largest_difference(first, second) > 1e-3


@pytest.mark.slow
def test_who_takes_no_part_has_no_influence():
    federation = make_federation(CLIENTS[:2])
    algorithm, shares = build("ACD"), [0.67, 0.5]

    @jit
    def train(federation):
        start = engine.start(algorithm, federation, KEY, participation=shares)
        state, _ = engine.setup(algorithm, federation, KEY, start)
        return start, engine.one_round(algorithm, federation, KEY, state, 0)[0]

    start, result = train(federation)
    took = [np.asarray(places) for places in result.participants]
    assert [len(places) for places in took] == [2, 1]

    def turned(who):
        cohorts = []
        for cohort, places in zip(federation.cohorts, took, strict=True):
            chosen = np.isin(np.arange(cohort.n_clients), places) == (who == "participants")
            views = tuple(jnp.where(chosen[:, None, None], -2 * x, x) for x in cohort.views)
            cohorts.append(cohort.replace(views=views))
        return federation.replace(cohorts=tuple(cohorts))

    chex.assert_trees_all_equal(train(turned("others"))[1], result)
    _, changed = train(turned("participants"))
    for kind in (FULL, (1,)):
        assert largest_difference(changed.server.models[kind], result.server.models[kind]) > 1e-3
    # Who takes no part keeps its initial state.
    (other,) = {0, 1} - set(took[1].tolist())
    chex.assert_trees_all_equal(at(result.clients[1], other), at(start.clients[1], other))
    assert largest_difference(*(at(x.clients[1].model, 1 - other) for x in (result, start))) > 1e-3


def test_the_federation_needs_a_client_with_all_views():
    with pytest.raises(ValueError, match="no client holds all 3 views"):
        engine.start(build(), make_federation(CLIENTS[1:]), KEY)


def accuracy(cohorts, labels, truth, k):
    """Share of all clients' samples under one matching of clusters to classes."""
    table = np.zeros((k, k), int)
    for cohort, found in zip(cohorts, labels, strict=True):
        real = np.asarray(cohort.mask)
        np.add.at(table, (np.asarray(found)[real], truth[np.asarray(cohort.sample_ids)[real]]), 1)
    return table[linear_sum_assignment(-table)].sum() / table.sum()


@pytest.mark.slow
def test_it_learns_one_clustering_of_blobs_that_every_view_sees_differently():
    rng = np.random.default_rng(0)
    truth = np.arange(108) % 3
    source = 6 * np.array([[1, 0], [-0.5, 0.8], [-0.5, -0.8]])[truth] + rng.normal(size=(108, 2))
    views = [source @ rng.normal(size=(2, 5)) + 0.3 * rng.normal(size=(108, 5)) for _ in range(3)]
    views = [(x - x.min(axis=0)) / np.ptp(x, axis=0) for x in views]
    federation = Federation.from_arrays(views, partition=data.hybrid_partition(0, 108, 3, 6))
    assert len(federation.cohorts) == 4
    config = FMCSCConfig(
        3,
        hidden=(32,),
        latent_dim=6,
        head_hidden=32,
        pretrain_epochs=60,
        local_epochs=30,
        distill_epochs=60,
        n_init=10,
    )
    algorithm = fmcsc(config, FMCSCHyperparams(learning_rate=3e-3))

    def begin(federation):
        state = engine.start(algorithm, federation, KEY)
        return engine.setup(algorithm, federation, KEY, state)[0]

    def evaluate(federation, state):
        return engine.assign(
            algorithm, federation, engine.finish(algorithm, federation, KEY, state, 0)[0]
        )

    one_round = jit(functools.partial(engine.one_round, algorithm))
    evaluate, state = jit(evaluate), jit(begin)(federation)
    before = accuracy(federation.cohorts, evaluate(federation, state), truth, 3)
    for r in range(4):
        state, _ = one_round(federation, KEY, state, r)
    after = accuracy(federation.cohorts, evaluate(federation, state), truth, 3)
    assert after > 0.9 > before, (before, after)
