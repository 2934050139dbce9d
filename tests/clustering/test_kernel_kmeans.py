import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.kernel_approximation import RBFSampler
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.pairwise import rbf_kernel

from jaxfedmvc.clustering import kernel_kmeans, kmeans
from jaxfedmvc.clustering.kernel_kmeans import random_fourier_features


@pytest.mark.parametrize("gamma", [0.2, 2.0])
def test_inner_products_approach_the_kernel(gamma):
    """The error of a mean of D bounded terms is of the order D^-1/2; four of them."""
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    z = np.asarray(random_fourier_features(jax.random.key(0), x, gamma, 20000))
    np.testing.assert_allclose(z @ z.T, rbf_kernel(x, gamma=gamma), atol=4 / np.sqrt(20000))


def test_features_have_the_moments_of_scikit_learns():
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    ours = np.asarray(random_fourier_features(jax.random.key(1), x, 0.7, 20000))
    theirs = RBFSampler(gamma=0.7, n_components=20000, random_state=0).fit_transform(x)
    np.testing.assert_allclose(ours @ ours.T, theirs @ theirs.T, atol=6 / np.sqrt(20000))


def rings(n=120):
    rng = np.random.default_rng(0)
    truth = np.arange(n) % 2
    angle = rng.uniform(0, 2 * np.pi, n)
    radius = np.where(truth, 4.0, 0.3)
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return (x + 0.05 * rng.normal(size=(n, 2))).astype(np.float32), truth


def test_separates_a_ring_from_what_it_surrounds():
    """A kernel sees how dense things lie: all within, and a far ring that is spread thin."""
    x, truth = rings()
    found = kernel_kmeans(jax.random.key(0), x, 2, 1.0, n_init=10)
    assert adjusted_rand_score(truth, found.labels) == 1.0
    plain = kmeans(jax.random.key(0), x, 2)
    assert adjusted_rand_score(truth, plain.labels) < 0.5


def test_padding_and_limit():
    x, _ = rings(40)
    where = np.arange(50) < 40
    padded = np.concatenate([x, np.full((10, 2), np.nan, np.float32)])
    run = jax.jit(kernel_kmeans, static_argnames=("n_clusters", "n_features"))
    one = run(jax.random.key(0), x, 3, 0.5, n_features=64)
    other = run(jax.random.key(0), padded, 5, 0.5, where=where, limit=3, n_features=64)
    np.testing.assert_array_equal(one.labels, other.labels[:40])
    assert (np.asarray(other.labels)[40:] == -1).all()


def test_gamma_is_swept_in_one_program():
    x, _ = rings(40)
    traces = []

    def run(gamma):
        traces.append(1)
        return kernel_kmeans(jax.random.key(0), x, 2, gamma, n_features=32).labels

    program = jax.jit(jax.vmap(run))
    found = program(jnp.array([0.1, 1.0]))
    program(jnp.array([0.2, 2.0]))
    assert len(traces) == 1
    np.testing.assert_array_equal(found[1], run(1.0))


def test_bad_arguments():
    with pytest.raises(ValueError, match="x must have shape"):
        random_fourier_features(jax.random.key(0), np.zeros(3), 1.0, 10)
    with pytest.raises(ValueError, match="n_features must be"):
        random_fourier_features(jax.random.key(0), np.zeros((3, 2)), 1.0, 0)
