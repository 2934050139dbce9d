"""E-FKMVC on data of which a view tells nothing: which views count, and what that changes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.cluster import contingency_matrix

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fedhk import (
    FedHKConfig,
    FedHKHyperparams,
    FedHKParafac2Config,
    FedHKTuckerConfig,
    e_fkmvc,
    fedhk_parafac2,
    fedhk_tucker,
)
from jaxfedmvc.algorithms.fedhk import heat_kernel as hk
from jaxfedmvc.algorithms.fedhk.client import gradient_step, local_step, samples_of
from jaxfedmvc.algorithms.fedhk.model import ClientState, Scale
from jaxfedmvc.clustering import predict
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation

C, N, NOISE = 3, 96, 2
KEY = jax.random.key(0)


def make_views(n_views=4):
    """Three groups that all views but view 2 show; view 2 has groups of its own, far apart."""
    rng = np.random.default_rng(0)
    truth = np.repeat(np.arange(C), N // C)
    views = []
    for v in range(n_views):
        seen = rng.permutation(truth) if v == NOISE else truth
        spread, apart = (0.3, 3.0) if v == NOISE else (1.0, 1.2)
        means = apart * rng.normal(size=(C, 3 + v))
        views.append((means[seen] + spread * rng.normal(size=(N, 3 + v))).astype(np.float32))
    return views, truth


def federation(views, single=()):
    """Six clients of sixteen rows; those in `single` hold one view each: client -> view."""
    rows = np.random.default_rng(1).permutation(N).reshape(6, -1).astype(np.int32)
    alone = dict(single)
    whole = [i for i in range(6) if i not in alone]
    parts = [Part(tuple(range(len(views))), rows[whole], np.array(whole, np.int32))]
    parts += [Part((v,), rows[[i]], np.array([i], np.int32)) for i, v in alone.items()]
    return Federation.from_arrays(views, partition=parts)


@functools.cache
def finished(algorithm, single=()):
    """Labels by sample, the run, the truth and the clients."""
    views, truth = make_views()
    fed = federation(views, single)
    result = jax.jit(lambda fed: engine.run(algorithm, fed, KEY, 12))(fed)
    labels = np.full(N, -1)
    for own, cohort in zip(result.labels, fed.cohorts, strict=True):
        labels[np.asarray(cohort.sample_ids)] = np.asarray(own)
    return labels, result, truth, fed


CHOSEN = e_fkmvc(FedHKConfig(C, n_restarts=2))
ALL = e_fkmvc(FedHKConfig(C, n_restarts=2, choose_views=False))
SINGLE = ((4, 0), (5, NOISE))


def test_a_view_whose_clusters_are_its_own_is_left_out():
    labels, result, truth, fed = finished(CHOSEN, SINGLE)
    whole = np.asarray(fed.cohorts[0].sample_ids).ravel()
    report = jax.device_get(result.info["setup"][3]["server"])
    np.testing.assert_array_equal(report["kept"], [True, True, False, True])
    assert abs(report["agreement"][NOISE]) < 0.02 < 0.15 < report["agreement"][0]
    weights = result.state.server.models.view_weights
    np.testing.assert_allclose(weights, np.float32([[1, 1, 0, 1]] * 2) / 3, rtol=1e-6)
    assert adjusted_rand_score(truth[whole], labels[whole]) > 0.9
    assert adjusted_rand_score(truth, finished(ALL)[0]) < 0.6


@pytest.mark.ci
def test_only_real_samples_are_counted_in_pairs_of_views():
    """Six pairs of four views, twice; a client of 16 rows, three of them padding."""
    (cohort,) = federation(make_views()[0]).cohorts
    client = jax.tree.map(lambda x: x[0], jax.device_get(cohort))
    client = client.replace(mask=np.arange(16) < 13)
    scale = {v: Scale(np.zeros(3 + v), np.float32(1), None, None) for v in range(4)}
    state = ClientState(scale, (), {}, np.ones(4), False, True)
    centres = {v: np.stack([x[:C], x[C : 2 * C]]) for v, x in client.by_view().items()}
    _, tables, _ = jax.device_get(jax.jit(CHOSEN.setup[3].client)(KEY, centres, state, client))
    assert tables.shape == (2, 6, C, C) and (np.sum(tables, axis=(2, 3)) == 13).all()
    for table, *own in zip(tables, centres[0], centres[1], strict=True):
        one, other = (np.asarray(jax.jit(predict)(client.views[v], own[v]))[:13] for v in (0, 1))
        np.testing.assert_array_equal(table[0], contingency_matrix(one, other))


@pytest.mark.slow
def test_values_of_the_left_out_view_do_not_matter():
    """Other values in it give the same clusters, though it helps to find where to start."""
    views, _ = make_views()
    shuffled = list(views)
    shuffled[NOISE] = np.random.default_rng(9).permutation(views[NOISE])
    run = jax.jit(lambda fed: engine.run(CHOSEN, fed, KEY, 12).labels[0])
    one, other = run(federation(views)), run(federation(shuffled))
    assert adjusted_rand_score(np.ravel(one), np.ravel(other)) == 1.0


def test_agreement_is_of_the_clusters_of_all_rows_of_clients_with_all_views():
    """Of two starts; each has clusters of every view."""
    views, _ = make_views()
    _, result, _, fed = finished(CHOSEN, SINGLE)
    server = jax.device_get(result.state.server)
    rows = np.asarray(fed.cohorts[0].sample_ids).ravel()
    assert len(rows) == 64
    expected = []
    for start in range(2):
        labels = [
            jax.jit(predict)(views[v][rows] - server.scales[v].origin, server.of_views[v][start])
            for v in range(4)
        ]
        expected.append(
            [
                np.mean([adjusted_rand_score(labels[a], labels[b]) for b in range(4) if b != a])
                for a in range(4)
            ]
        )
    found = result.info["setup"][3]["server"]["agreement"]
    np.testing.assert_allclose(found, np.mean(expected, axis=0), atol=1e-5)


def test_a_client_that_holds_nothing_else_is_still_assigned_by_it():
    labels, result, truth, fed = finished(CHOSEN, SINGLE)
    whole, seen, noise = (np.asarray(c.sample_ids).ravel() for c in fed.cohorts)
    assert adjusted_rand_score(truth[whole], labels[whole]) > 0.9
    assert adjusted_rand_score(truth[seen], labels[seen]) > 0.2
    assert len(set(labels[noise])) > 1
    chex.assert_tree_all_finite((result.state.server, result.state.clients))
    # The one that holds the noise sends no samples of any view but that one.
    sums = result.state.server.counts
    assert [int(sums[v]) for v in range(4)] == [80, 64, 80, 64]


@pytest.mark.parametrize(
    "make",
    [
        lambda: fedhk_tucker(FedHKTuckerConfig(C, n_restarts=2)),
        pytest.param(
            lambda: e_fkmvc(FedHKConfig(C, aggregation="average", n_restarts=2)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: e_fkmvc(
                FedHKConfig(C, personal="mix", n_restarts=1), FedHKHyperparams(view_mix=0)
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: e_fkmvc(
                FedHKConfig(C, personal="gradient", n_restarts=1), FedHKHyperparams(alpha=5.0)
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: fedhk_parafac2(FedHKParafac2Config(C, n_restarts=2)), marks=pytest.mark.slow
        ),
        pytest.param(
            lambda: fedhk_parafac2(FedHKParafac2Config(C, placement="views", n_restarts=2)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tucker", "average", "mix", "gradient and alpha", "parafac2", "parafac2 views"],
)
def test_every_form_leaves_the_view_out(make):
    labels, result, truth, fed = finished(make(), ((5, NOISE),))
    server = result.state.server
    weights = np.asarray(server.models.view_weights)
    assert (weights[:, NOISE] == 0).all() and (np.delete(weights, NOISE, axis=1) > 0).all()
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    chex.assert_tree_all_finite((server, result.state.clients))
    for state in result.state.clients:
        if state.personal_weights.size:
            held = np.asarray(state.personal_weights)
            assert (held >= 0).all() and np.isfinite(held).all()
    rows = np.asarray(fed.cohorts[0].sample_ids).ravel()
    assert adjusted_rand_score(truth[rows], labels[rows]) > 0.8


def test_of_two_views_none_is_left_out_and_nothing_is_sent():
    views, _ = make_views(2)
    fed = federation(views)
    algorithm = e_fkmvc(FedHKConfig(C))
    server, (states,) = jax.jit(algorithm.init)(KEY, fed)
    assert server.of_views == {} and algorithm.setup[3].broadcast(server, (0, 1)) == {}
    state, client = jax.tree.map(lambda x: x[0], jax.device_get((states, fed.cohorts[0])))
    _, message, _ = algorithm.setup[3].client(KEY, {}, state, client)
    assert message == ()
    new, _ = algorithm.setup[3].server(KEY, server, ((),), (jnp.float32(6),))
    chex.assert_trees_all_equal(new, server)


@pytest.mark.slow
def test_a_least_share_of_0_keeps_what_agrees_at_all_and_1_keeps_two():
    fed = federation(make_views()[0])

    @jax.jit
    def kept(least):
        algorithm = e_fkmvc(FedHKConfig(C, n_restarts=2), FedHKHyperparams(least_agreement=least))
        _, info = engine.setup(algorithm, fed, KEY, engine.start(algorithm, fed, KEY))
        return info[3]["server"]["kept"]

    assert int(kept(1.0).sum()) == 2
    assert kept(0.0)[jnp.array([0, 1, 3])].all()


# --- The equations with weights of 0 --------------------------------------------------------------


@pytest.mark.parametrize("alpha", [np.inf, 3.0])
def test_a_view_of_weight_0_counts_nothing_beside_others_and_all_alone(alpha):
    relevance, view_weights, objective = (
        jax.jit(f) for f in (hk.log_relevance, hk.view_weights, hk.log_objective)
    )
    beside = np.exp(relevance(np.float32([0.5, 0.0, 0.5]), alpha))
    np.testing.assert_allclose(beside, [1, 0, 1], atol=1e-20)
    np.testing.assert_array_equal(relevance(np.float32([0.0]), alpha), [0])
    costs = np.float32([2.0, 7.0, 3.0])
    weights = view_weights(costs, alpha, np.array([True, False, True]))
    expected = np.asarray(view_weights(costs[[0, 2]], alpha))
    np.testing.assert_allclose(weights, [expected[0], 0, expected[1]], rtol=1e-6)
    np.testing.assert_allclose(
        objective(costs, weights, alpha),
        objective(costs[[0, 2]], expected, alpha),
        rtol=1e-6,
    )
    none = view_weights(costs, alpha, np.zeros(3, bool))
    np.testing.assert_array_equal(none, 0)


@pytest.mark.parametrize("step", [local_step, gradient_step])
def test_steps_of_a_client_keep_weights_of_0(step):
    views, _ = make_views()
    fed = federation(views)
    config, hyper = FedHKConfig(C), FedHKHyperparams(alpha=3.0)
    client = jax.tree.map(lambda x: x[0], jax.device_get(fed.cohorts[0]))
    empty = np.zeros(0, np.float32)
    scales = {
        v: Scale(x.mean(axis=0), np.float32(x.var(axis=0).sum()), empty, empty)
        for v, x in enumerate(views)
    }

    @jax.jit
    def stepped(weights):
        samples = samples_of(config, hyper, scales, client)
        centres = {v: x[:C] for v, x in samples.views.items()}
        return step(config, hyper, samples, centres, weights)

    for weights in np.float32([[0.5, 0.3, 0.0, 0.2], [0.0] * 4]):
        moved, after = jax.device_get(stepped(weights))
        np.testing.assert_allclose(after.sum(), weights.sum(), rtol=1e-5)
        assert after[NOISE] == 0
        chex.assert_tree_all_finite(moved)


# --- Bad input ------------------------------------------------------------------------------------


def test_what_cannot_leave_views_out_says_so():
    with pytest.raises(ValueError, match=r"choose_views: got True; .* with min_cluster_size"):
        FedHKConfig(C, choose_views=True, min_cluster_size=2)
    with pytest.raises(ValueError, match=r"choose_views: got True; .* placement='samples'"):
        FedHKParafac2Config(C, placement="samples", choose_views=True)
    assert not FedHKParafac2Config(C, placement="samples").chooses_views
    assert not FedHKConfig(C, min_cluster_size=2).chooses_views
    for least in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"least_agreement: got .*; allowed is from 0 to 1"):
            e_fkmvc(FedHKConfig(C), FedHKHyperparams(least_agreement=least))
