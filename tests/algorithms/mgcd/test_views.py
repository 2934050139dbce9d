"""MGCD on data of which an agent's view tells nothing: which views count, and what that changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc import engine
from jaxfedmvc.algorithms.mgcd import MGCDConfig, MGCDHyperparams, affinity, mgcd
from jaxfedmvc.algorithms.mgcd.graph import Factored
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.federation import Federation

K, N, NOISE = 3, 60, 1
KEY = jax.random.key(0)
CONFIG = MGCDConfig(K, n_neighbours=5, n_init=3)
# Compiled code runs for milliseconds here and takes seconds to optimise.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def make_views(n_views=4):
    """Three groups that all views but one show; that one has groups of its own, far apart."""
    rng = np.random.default_rng(0)
    truth = np.arange(N) % K
    views = []
    for v in range(n_views):
        seen = rng.permutation(truth) if v == NOISE else truth
        spread, apart = (0.3, 4.0) if v == NOISE else (1.0, 1.2)
        means = apart * rng.normal(size=(K, 4 + v))
        views.append((means[seen] + spread * rng.normal(size=(N, 4 + v))).astype(np.float32))
    return views, truth


def agents(views):
    return Federation.from_arrays(views, partition=vertical_partition(N, len(views)))


@functools.cache
def finished(config, n_views=4):
    views, truth = make_views(n_views)
    algorithm = mgcd(config)
    run = jax.jit(lambda fed: engine.run(algorithm, fed, KEY, 2), compiler_options=FAST)
    result = run(agents(views))
    return np.asarray(result.labels[0][0]), result.state.server, truth


def test_a_view_whose_clusters_are_its_own_is_left_out():
    labels, server, truth = finished(CONFIG)
    np.testing.assert_array_equal(server.kept, [True, False, True, True])
    assert adjusted_rand_score(truth, labels) > 0.8
    # Just as if the agent were not there.
    views, _ = make_views()
    fed = agents([x for v, x in enumerate(views) if v != NOISE])
    algorithm = mgcd(dataclasses.replace(CONFIG, choose_views=False))
    without = jax.jit(lambda fed: engine.run(algorithm, fed, KEY, 2), compiler_options=FAST)(fed)
    assert adjusted_rand_score(without.labels[0][0], labels) == 1


def test_affinities_are_those_of_the_views_that_count():
    rng = np.random.default_rng(1)
    graphs = [
        Factored(*(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((20, 3), (3, 20))))
        for _ in range(3)
    ]
    where, config = jnp.ones(20, bool), CONFIG.resolved()
    kept = jnp.array([True, False, True])
    found = affinity.of_each_view(graphs, where, config, kept)
    expected = affinity.of_each_view([graphs[0], graphs[2]], where, config)
    k = config.n_neighbours
    counts = np.r_[0:k, 2 * k : 3 * k]
    np.testing.assert_array_equal(np.asarray(found.index)[:, counts], expected.index)
    np.testing.assert_allclose(np.asarray(found.weight)[:, counts], expected.weight, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(found.weight)[:, k : 2 * k], 0)
    whole = affinity.of_each_view(graphs, where, config)
    same = affinity.of_each_view(graphs, where, config, jnp.ones(3, bool))
    np.testing.assert_array_equal(whole.weight, same.weight)


@pytest.mark.slow
def test_with_the_view_fewer_are_found():
    labels, _, truth = finished(CONFIG)
    everything, server, _ = finished(dataclasses.replace(CONFIG, choose_views=False))
    assert np.asarray(server.kept).all()
    assert adjusted_rand_score(truth, everything) < adjusted_rand_score(truth, labels)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"dense": True}, {"affinity": "absolute"}, {"affinity": "mean"}])
def test_every_affinity_leaves_the_view_out(more):
    _, server, _ = finished(dataclasses.replace(CONFIG, **more))
    np.testing.assert_array_equal(server.kept, [True, False, True, True])


@pytest.mark.slow
def test_of_two_views_none_is_left_out():
    chosen, server, _ = finished(CONFIG, 2)
    assert np.asarray(server.kept).all()
    plain = finished(dataclasses.replace(CONFIG, choose_views=False), 2)[0]
    np.testing.assert_array_equal(chosen, plain)


def test_a_trained_server_cannot_leave_views_out():
    for more in ({"server": "trained"}, {"mode": "literal"}):
        with pytest.raises(ValueError, match=r"choose_views: got True; .* server='average'"):
            MGCDConfig(K, choose_views=True, **more)
        assert not MGCDConfig(K, **more).resolved().chooses_views
    assert MGCDConfig(K, choose_views=True).resolved().chooses_views
    with pytest.raises(ValueError, match=r"least_agreement: got 2; allowed is from 0 to 1"):
        mgcd(CONFIG, MGCDHyperparams(least_agreement=2))
