"""With `jax_enable_x64` set the library computes what it computes without, to the bit."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import Federation, clustering, engine, losses, metrics
from jaxfedmvc.algorithms import FedHKConfig, FedHKHyperparams, e_fkmvc
from jaxfedmvc.algorithms.pooled import lsimvc
from jaxfedmvc.clustering.kernel_kmeans import random_fourier_features
from jaxfedmvc.engine.steps import Steps
from jaxfedmvc.engine.streaming import run_streaming
from jaxfedmvc.estimators import FederatedClusterer
from jaxfedmvc.precision import in_32_bits
from jaxfedmvc.tensor import parafac2, tucker

RNG = np.random.default_rng(0)
TRUTH = np.arange(24) % 3
X = 3.0 * np.eye(3, 5)[TRUTH] + RNG.normal(size=(24, 5))
H = RNG.normal(size=(24, 4))
CUBE = RNG.normal(size=(4, 5, 6))
EDGES = np.exp(-((X[:, None] - X[None]) ** 2).sum(-1))
VIEWS = [{0: X[:12], 1: H[:12]}, {0: X[12:18], 1: H[12:18]}, {1: H[18:]}]
KEY = jax.random.key(0)

FUNCTIONS = {
    "kmeans": lambda x: clustering.kmeans(KEY, x(X), 3, n_init=2),
    "kmeans_predict": lambda x: clustering.predict(x(X), x(X[:3])),
    "kernel_kmeans": lambda x: clustering.kernel_kmeans(KEY, x(X), 3, 0.5),
    "random_fourier_features": lambda x: random_fourier_features(KEY, x(X), 0.5, 6),
    "dbscan": lambda x: clustering.dbscan(x(X), 1.5, 3),
    "sc_srgf": lambda x: clustering.sc_srgf(KEY, x(X), 3),
    "spectral": lambda x: clustering.spectral(KEY, x(EDGES), 3),
    "hooi": lambda x: tucker.hooi(x(CUBE), (2, 2, 2)),
    "hosvd": lambda x: tucker.hosvd(x(CUBE), (2, 2, 2)),
    "polar": lambda x: tucker.polar(x(X)),
    "parafac2": lambda x: parafac2.parafac2(KEY, x(CUBE), 2),
    "scores": lambda x: metrics.scores(TRUTH, TRUTH[::-1].copy(), 3, 3),
    "silhouette": lambda x: metrics.simplified_silhouette(x(X), jnp.asarray(TRUTH), 3),
    "ntxent": lambda x: losses.ntxent(x(H), x(X[:, :4]), jnp.ones(24, bool), 0.5),
    "mutual_information": lambda x: losses.mutual_information(
        x(H), x(X[:, :4]), jnp.ones(24, bool)
    ),
    "lsimvc": lambda x: lsimvc.fit(
        KEY,
        (x(X), x(H)),
        jnp.ones((24, 2), bool),
        lsimvc.LSIMVCConfig(3),
        lsimvc.LSIMVCHyperparams(),
    ),
}


def assert_same(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


SLOW = ("lsimvc", "parafac2", "sc_srgf")
# Made of dozens of operations, which would be dozens of programs.
WHOLE = ("hosvd", "mutual_information", "ntxent", "scores", "silhouette", "spectral")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in sorted(FUNCTIONS)],
)
def test_functions_round_what_they_are_given(name):
    function = FUNCTIONS[name]
    if name in WHOLE:
        function = jax.jit(function, static_argnums=0)
    narrow = function(lambda x: jnp.asarray(x, jnp.float32))
    with jax.enable_x64(True):
        assert_same(function(jnp.asarray), narrow)


CONFIG = FedHKConfig(3, n_restarts=1, choose_views=False)


def clusters(key, fuzzifier):
    method = e_fkmvc(CONFIG, FedHKHyperparams(fuzzifier=fuzzifier))
    return engine.run(method, Federation.from_clients(VIEWS[::2]), key, 2).labels


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_runs_are_the_same_inside_a_program_of_64_bits():
    keys = jax.random.split(KEY, 2)
    program = jax.vmap(clusters)
    narrow = jax.jit(program)(keys, jnp.array([1.05, 1.1]))
    with jax.enable_x64(True):
        numbers = jnp.array([1.05, 1.1])
        assert numbers.dtype == jnp.float64
        assert_same(jax.jit(program)(keys, numbers), narrow)


def of_steps():
    steps = Steps(
        lambda hyper: e_fkmvc(CONFIG, hyper),
        FedHKHyperparams(),
        federation := Federation.from_clients(VIEWS[:2]),
    )
    steps.compile(until_ready=False)
    state, _ = steps.setup(federation, KEY, steps.start(federation, KEY))
    state, _ = steps.one_round(federation, KEY, state, 0)
    return steps.evaluate(federation, KEY, state, 0).labels, steps.traffic()


def of_a_stream():
    method = e_fkmvc(CONFIG, FedHKHyperparams())
    return run_streaming(method, Federation.from_clients(VIEWS), KEY, 1, client_chunk=1).labels


def of_an_estimator():
    model = FederatedClusterer("e_fkmvc", 3, rounds=1, random_state=0, n_restarts=1)
    model.fit(VIEWS[:2])
    return model.labels_, model.predict(VIEWS[:1])


@pytest.mark.parametrize(
    "run", [of_steps, of_an_estimator, pytest.param(of_a_stream, marks=pytest.mark.slow)]
)
def test_jobs_are_the_same(run):
    narrow = jax.tree.map(np.asarray, run())
    with jax.enable_x64(True):
        assert_same(jax.tree.map(np.asarray, run()), narrow)


def test_gradients_have_the_precision_of_their_arguments():
    def loss(x):
        return jnp.sum(in_32_bits(lambda x: jnp.sum(x**2 + jnp.zeros(2)))(x))

    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient = jax.grad(loss)(jnp.array([1.0, 3.0]))
        assert gradient.dtype == jnp.float64
    np.testing.assert_array_equal(gradient, [2.0, 6.0])
