"""A function that is called again with other numbers of the same shapes compiles nothing."""

import jax
import numpy as np
import pytest

from jaxfedmvc import clustering, metrics
from jaxfedmvc.tensor import parafac2, tucker

RNG = np.random.default_rng(0)
KEYS = jax.random.split(jax.random.key(0), 2)
X = RNG.normal(size=(2, 20, 4)).astype(np.float32)
CUBE = RNG.normal(size=(2, 4, 5, 6)).astype(np.float32)
LABELS = RNG.integers(0, 3, (2, 20))

FUNCTIONS = {
    "kmeans": lambda i: clustering.kmeans(KEYS[i], X[i], 3, n_init=2, tol=10.0**-i),
    "kmeans_plusplus": lambda i: clustering.kmeans_plusplus(KEYS[i], X[i], 3, limit=3 - i),
    "lloyd": lambda i: clustering.lloyd(X[i], X[i, :3], weights=X[i, :, 0] ** 2),
    "kernel_kmeans": lambda i: clustering.kernel_kmeans(KEYS[i], X[i], 3, 0.5 + i),
    "dbscan": lambda i: clustering.dbscan(X[i], 1.0 + i, 3 + i),
    "sc_srgf": lambda i: clustering.sc_srgf(KEYS[i], X[i], 3, n_graphs=3, ratio=0.4 + 0.1 * i),
    "spectral": lambda i: clustering.spectral(KEYS[i], np.abs(X[i] @ X[i].T), 3),
    "hooi": lambda i: tucker.hooi(CUBE[i], (2, 2, 2), tol=10.0**-i),
    "parafac2": lambda i: parafac2.parafac2(KEYS[i], CUBE[i], 2, n_init=2),
    "scores": lambda i: metrics.scores(LABELS[i], LABELS[1 - i], 3, 3),
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_a_second_call_compiles_nothing(name, compiled):
    FUNCTIONS[name](0)
    first = len(compiled)
    FUNCTIONS[name](1)
    assert len(compiled) == first


def test_compilations_are_counted(compiled):
    before = len(compiled)
    jax.jit(lambda x: x * 3.5 + before)(X[0])
    assert len(compiled) > before
