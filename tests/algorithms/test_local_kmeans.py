"""The reference without collaboration: k-means of every client on its own raw views."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import KMeans

from jaxfedmvc import engine
from jaxfedmvc.algorithms.local_kmeans import (
    LocalKMeansConfig,
    LocalKMeansHyperparams,
    local_kmeans,
)
from jaxfedmvc.federation import Federation

K = 3
ROWS = (12, 9, 10)


def clients(offset=0.0):
    """Three clients with views {0, 1}, {0, 1} and {1}; groups of samples far apart in each view."""
    rng = np.random.default_rng(3)
    held, labels = [], []
    for i, (n, views) in enumerate(zip(ROWS, ((0, 1), (0, 1), (1,)), strict=True)):
        truth = np.arange(n) % K
        centers = {0: 20 * np.eye(K)[:, :2], 1: 20 * np.eye(K)}
        held.append(
            {
                v: centers[v][truth] + rng.normal(size=(n, centers[v].shape[1])) + offset * (i == 1)
                for v in views
            }
        )
        labels.append(truth)
    return held, labels


@functools.cache
def program():
    """Compiled once: every federation here has the same shapes."""
    run = functools.partial(engine.run, local_kmeans(LocalKMeansConfig(K, n_init=100)), rounds=0)
    return jax.jit(run, compiler_options={"xla_llvm_disable_expensive_passes": True})


@pytest.fixture(scope="module")
def federation():
    return Federation.from_clients(*clients())


@pytest.fixture(scope="module")
def result(federation):
    return program()(federation, jax.random.key(0))


@pytest.mark.slow
def test_every_client_finds_its_own_groups(federation, result):
    for cohort, labels, truth in zip(
        federation.cohorts, result.labels, federation.labels, strict=True
    ):
        for client in range(cohort.n_clients):
            real = np.asarray(cohort.mask[client])
            found, classes = np.asarray(labels[client])[real], np.asarray(truth[client])[real]
            assert len(set(zip(found.tolist(), classes.tolist(), strict=True))) == K
            assert len(set(found.tolist())) == K


def test_inertia_is_that_of_sklearn_on_the_concatenated_views(federation, result):
    """Known answer on data without structure, where a poor start would show."""
    rng = np.random.default_rng(0)
    held = [{0: rng.normal(size=(n, 2)), 1: rng.normal(size=(n, 3))} for n in ROWS[:2]]
    held.append({1: rng.normal(size=(ROWS[2], 3))})
    noise = Federation.from_clients(held, clients()[1])
    labels = program()(noise, jax.random.key(0)).labels
    found = [np.asarray(labels[0][0])[:12], np.asarray(labels[0][1])[:9], np.asarray(labels[1][0])]
    for views, assigned in zip(held, found, strict=True):
        x = np.concatenate([views[v] for v in sorted(views)], axis=1)
        inertia = sum(
            np.square(x[assigned == c] - x[assigned == c].mean(axis=0)).sum() for c in range(K)
        )
        best = KMeans(K, n_init=40, random_state=0).fit(x).inertia_
        assert inertia == pytest.approx(best, rel=1e-4)


def test_every_client_has_a_key_of_its_own(federation):
    state = engine.start(local_kmeans(LocalKMeansConfig(K)), federation, jax.random.key(0))
    keys = np.concatenate([jax.random.key_data(keys) for keys in state.clients])
    assert len(np.unique(keys, axis=0)) == len(keys) == len(ROWS)


def test_nothing_is_exchanged(federation):
    algorithm = local_kmeans(LocalKMeansConfig(K))
    assert (algorithm.setup, algorithm.round, algorithm.finish) == ((), (), ())
    assert all(t == (0, 0) for t in engine.traffic(algorithm, federation).values())


def test_a_client_is_clustered_without_the_others(federation, result):
    """Bits of a client follow from the run's key, its id and its data alone."""
    other = Federation.from_clients(*clients(offset=100.0))
    labels = program()(other, jax.random.key(0)).labels
    assert not np.array_equal(other.cohorts[0].views[0][1], federation.cohorts[0].views[0][1])
    np.testing.assert_array_equal(labels[0][0], result.labels[0][0])
    np.testing.assert_array_equal(labels[1], result.labels[1])


def test_clusters_of_different_clients_are_not_matched(federation):
    """Nothing travels, so that clients number the same groups each in their own way."""
    numberings = set()
    for seed in range(4):
        labels = program()(federation, jax.random.key(seed)).labels
        first, second = np.asarray(labels[0])[:, :K]  # one sample of each group, in one order
        assert sorted(first) == sorted(second) == list(range(K))
        numberings.add(np.array_equal(first, second))
    assert False in numberings


def test_embedding_is_the_concatenated_views(federation, result):
    found = engine.embed(local_kmeans(LocalKMeansConfig(K)), federation, result.state)
    both = federation.cohorts[0]
    np.testing.assert_array_equal(found[0], jnp.concatenate(both.views, axis=-1))
    np.testing.assert_array_equal(found[1], federation.cohorts[1].views[0])


def test_too_few_samples_name_the_client(federation):
    with pytest.raises(ValueError, match=r"client 1 .* has 9 samples; allowed is 10"):
        engine.start(local_kmeans(LocalKMeansConfig(10)), federation, jax.random.key(0))


@pytest.mark.slow
def test_limit_is_the_number_of_clusters_in_one_program(federation):
    traced = []

    @jax.jit
    def program(federation, limit):
        traced.append(limit)
        algorithm = local_kmeans(LocalKMeansConfig(5, n_init=3), LocalKMeansHyperparams(limit))
        return engine.run(algorithm, federation, jax.random.key(0), 0).labels

    for k in (1, 3):
        for labels, cohort in zip(program(federation, k), federation.cohorts, strict=True):
            assert set(np.unique(labels[cohort.mask])) == set(range(k))
    assert len(traced) == 1


def test_bad_settings_are_named():
    for settings in ({"n_clusters": 0}, {"n_init": 0}):
        with pytest.raises(ValueError, match=f"^{next(iter(settings))}: got 0; allowed is 1"):
            LocalKMeansConfig(**({"n_clusters": 2} | settings))
    with pytest.raises(ValueError, match=r"^limit: got 0; allowed is 1 to"):
        local_kmeans(LocalKMeansConfig(2), LocalKMeansHyperparams(0))
