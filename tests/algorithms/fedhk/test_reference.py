"""The NumPy E-FKMVC, which benchmarks trust: both forms, and the library, agree round by round."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from benchmarks.references.fedhk import (
    Model,
    assigned,
    bandwidths,
    membership,
    one_round,
    pass_by_sample,
    pass_vectorised,
    reference,
)
from jaxfedmvc import engine
from jaxfedmvc.algorithms.fedhk import FedHKConfig, FedHKHyperparams, centres, e_fkmvc
from jaxfedmvc.federation import Federation

SIZES, DIMS, CLUSTERS, ROUNDS = (9, 17, 1, 30), (5, 2, 3), 3, 6
FUZZIFIER = 1.3


def make_clients():
    """Overlapping blobs far from the origin; sizes, and shares of the clusters, differ."""
    rng = np.random.default_rng(3)
    middles = [10 + 2 * rng.normal(size=(CLUSTERS, d)) for d in DIMS]
    clients = []
    for n in SIZES:
        own = rng.choice(CLUSTERS, n, p=rng.dirichlet(np.ones(CLUSTERS)))
        clients.append([m[own] + rng.normal(size=(n, m.shape[1])) for m in middles])
    return clients


CLIENTS = make_clients()


@pytest.fixture(scope="module")
def library():
    """`alpha -> (start, end, log J before each round, labels)` of the library."""
    federation = Federation.from_clients([dict(enumerate(views)) for views in CLIENTS])
    key = jax.random.key(0)

    @jax.jit
    def run(alpha):
        hyper = FedHKHyperparams(fuzzifier=FUZZIFIER, alpha=alpha, tol=0.0)
        algorithm = e_fkmvc(FedHKConfig(CLUSTERS), hyper)
        state = engine.start(algorithm, federation, key)
        state, _ = engine.setup(algorithm, federation, key, state)

        def body(state, r):
            state, _ = engine.one_round(algorithm, federation, key, state, r)
            return state, state.server.models.log_objective[0]

        end, history = jax.lax.scan(body, state, np.arange(ROUNDS))
        labels = engine.assign(algorithm, federation, end)
        return centres(state.server), centres(end.server), history, labels[0]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("one_pass", [pass_by_sample, pass_vectorised])
@pytest.mark.parametrize("alpha", [4.0, math.inf])
def test_agrees_with_the_library(library, one_pass, alpha):
    (start, _), (end, weights), history, labels = library(alpha)
    result = reference(
        CLIENTS,
        [np.asarray(a, float) for a in start.values()],
        one_pass,
        rounds=ROUNDS,
        fuzzifier=FUZZIFIER,
        alpha=alpha,
    )
    np.testing.assert_allclose(result.log_objectives, history, atol=1e-5)
    assert history[0] > history[-1] + 1e-3  # the rounds had something to do
    np.testing.assert_allclose(result.model.view_weights, weights, rtol=1e-4)
    for ours, theirs in zip(result.model.centres, end.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    for ours, theirs in zip(result.labels, np.asarray(labels), strict=True):
        np.testing.assert_array_equal(ours, theirs[: len(ours)])
    assert len(np.unique(np.concatenate(result.labels))) == CLUSTERS


@pytest.mark.parametrize("one_pass", [pass_by_sample, pass_vectorised])
def test_a_round_worked_by_hand(one_pass):
    # One feature, samples -1 and 1 at different clients: the variance is 1 and delta 1/2. Centres
    # -1 and 1: each sample lies on one and has phi = 2 to the other, memberships 1 and 0.
    clients = [[np.array([[-1.0]])], [np.array([[1.0]])]]
    delta = bandwidths(clients)
    np.testing.assert_allclose(delta, [0.5])
    same = Model([np.array([[-1.0], [1.0]])], np.ones(1))
    model, _ = one_round(clients, delta, same, one_pass, 2.0, math.inf)
    np.testing.assert_allclose(model.centres[0], [[-1], [1]], atol=1e-5)
    # Centres 0 and 0: memberships 1/2, KED = 1 - exp(-1/2), J = 4 (1/2)^2 KED; N is 0.
    tied = Model([np.zeros((2, 1))], np.ones(1))
    model, objective = one_round(clients, delta, tied, one_pass, 2.0, math.inf)
    np.testing.assert_allclose(model.centres[0], 0, atol=1e-12)
    np.testing.assert_allclose(objective, math.log(1 - math.exp(-0.5)), rtol=1e-12)
    labels = [assigned(views, delta, same, math.inf).tolist() for views in clients]
    assert labels == [[0], [1]]


def test_membership():
    np.testing.assert_allclose(membership([1.0, 4.0], 2.0), [0.8, 0.2])
    np.testing.assert_allclose(membership([1.0, 4.0], 3.0), [2 / 3, 1 / 3])
    np.testing.assert_allclose(membership([0.0, 0.5, 0.0], 1.05), [0.5, 0.0, 0.5], atol=1e-12)
    np.testing.assert_allclose(membership([1e-9, 1e-9], 1.05), [0.5, 0.5])
