import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.kernel_approximation import RBFSampler
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.pairwise import rbf_kernel

from jaxfedmvc.clustering.kernel_kmeans import (
    _frequencies,
    kernel_kmeans,
    random_fourier_features,
)

GAMMA = 2.0


@functools.cache
def rings():
    """A narrow ring of 60 points inside a wide one of 60, and which one each point is on."""
    rng = np.random.default_rng(0)
    y = np.repeat([0, 1], 60)
    angle = rng.uniform(0, 2 * np.pi, 120)
    radius = np.where(y == 0, 0.3, 1.5) + rng.normal(scale=0.03, size=120)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return x.astype(np.float32), y


jit_kernel = jax.jit(kernel_kmeans, static_argnames=("n_clusters", "n_features", "n_init"))
jit_features = jax.jit(random_fourier_features, static_argnums=3)


def clustered(key, x, gamma=GAMMA, where=None, limit=2):
    where = np.ones(len(x), bool) if where is None else where
    gamma, limit = jnp.asarray(gamma, jnp.float32), jnp.asarray(limit, jnp.int32)
    return jit_kernel(key, x, 3, gamma, where=where, limit=limit, n_init=3)


@pytest.mark.parametrize("gamma", [0.1, 1.0, 5.0])
def test_products_of_features_approach_the_kernel(gamma):
    # A product is a mean of 20 000 terms 2 cos cos in [-2, 2] of standard deviation 1 at most, so
    # that 0.04 is more than 5 of its standard deviations.
    x, _ = rings()
    z = np.asarray(jit_features(jax.random.key(0), x, gamma, 20_000))
    np.testing.assert_allclose(z @ z.T, rbf_kernel(x, gamma=gamma), atol=0.04)


def test_frequencies_are_those_of_sklearn():
    d, gamma, n = 3, 0.7, 20_000
    w, b = _frequencies(jax.random.key(0), d, jnp.float32(gamma), n)
    theirs = RBFSampler(gamma=gamma, n_components=n, random_state=0).fit(np.zeros((1, d)))
    # Second moments of n normal numbers are known to 2 gamma sqrt(2 / n) = 0.014.
    np.testing.assert_allclose(w @ w.T / n, 2 * gamma * np.eye(d), atol=0.06)
    np.testing.assert_allclose(np.cov(w), np.cov(theirs.random_weights_), atol=0.08)
    assert 0 <= b.min() and b.max() < 2 * np.pi + 1e-6
    np.testing.assert_allclose(
        [b.mean(), b.std()], [theirs.random_offset_.mean(), theirs.random_offset_.std()], atol=0.09
    )


def test_rings_are_told_apart_as_by_the_exact_kernel():
    x, y = rings()
    found = clustered(jax.random.key(0), x)
    assert adjusted_rand_score(y, found.labels) == 1
    straight = KMeans(2, n_init=10, random_state=0).fit_predict(x)
    assert adjusted_rand_score(y, straight) < 0.5
    # Kernel k-means maximises the sum over clusters of sum K / size: the rings beat any halves.
    kernel = rbf_kernel(x, gamma=GAMMA)

    def objective(labels):
        onehot = np.eye(2)[labels]
        return np.trace(onehot.T @ kernel @ onehot / onehot.sum(axis=0))

    angles = np.linspace(0, np.pi, 20)
    halves = [(x @ [np.cos(a), np.sin(a)] > 0).astype(int) for a in angles]
    assert objective(y) > max(objective(half) for half in halves)


def test_padding_and_its_values_change_nothing():
    x, _ = rings()
    where = np.arange(137) < len(x)
    plain = clustered(jax.random.key(1), x)
    for garbage in (1e6, np.nan):
        padded = np.concatenate([x, np.full((17, 2), garbage, np.float32)])
        masked = clustered(jax.random.key(1), padded, where=where)
        np.testing.assert_array_equal(masked.labels, np.append(plain.labels, np.full(17, -1)))
        np.testing.assert_allclose(masked.inertia, plain.inertia, rtol=1e-5)


@pytest.mark.slow
def test_gamma_and_limit_are_traced_and_vmap_is_a_loop():
    x, _ = rings()
    gammas, limits = jnp.array([0.5, 2.0, 4.0]), jnp.array([1, 2, 3])

    def run(gamma, limit):
        return clustered(jax.random.key(0), x, gamma, limit=limit).labels

    batch = jax.vmap(run)(gammas, limits)
    alone = [run(gamma, limit) for gamma, limit in zip(gammas, limits, strict=True)]
    np.testing.assert_array_equal(batch, np.stack(alone))
    np.testing.assert_array_equal(batch.max(axis=1) + 1, limits)


@pytest.mark.parametrize(
    "kwargs, name",
    [
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": jnp.nan}, "gamma"),
        ({"gamma": jnp.ones(2)}, "gamma"),
        ({"n_features": 0}, "n_features"),
        ({"x": jnp.ones(4)}, "x"),
        ({"n_clusters": 0}, "n_clusters"),
    ],
)
def test_wrong_arguments_are_named(kwargs, name):
    arguments = {"key": jax.random.key(0), "x": jnp.ones((4, 2)), "n_clusters": 2, "gamma": 1.0}
    with pytest.raises(ValueError, match=f"^{name}(:| must)"):
        kernel_kmeans(**(arguments | kwargs))
