"""Private vertical k-means as a whole: with noise off it clusters, with noise on it runs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import make_blobs
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc import engine
from jaxfedmvc.algorithms.dpfmps import DPFMPSConfig, DPFMPSP2EstConfig, dpfmps, dpfmps_p2est
from jaxfedmvc.algorithms.dpfmps import agent as agent_lib
from jaxfedmvc.algorithms.dpfmps import server as server_lib
from jaxfedmvc.algorithms.dpfmps.agent import scaled
from jaxfedmvc.algorithms.dpfmps.budget import MAX_DELTA, sketch_noise, spent, split
from jaxfedmvc.algorithms.dpfmps.fm_sketch import add_noise, complement_counts, sketch_clusters
from jaxfedmvc.algorithms.dpfmps.server import grid_centres
from jaxfedmvc.algorithms.dpfmps.settings import MAX_CELLS
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Cohort, Federation, single_client

K = 3
N = 150
WIDTHS = (2, 4, 3)
M = 1000
FAST = {"xla_llvm_disable_expensive_passes": True}
jit_sketch = jax.jit(sketch_clusters, static_argnums=(3, 4))
jit_sketch_noise = jax.jit(sketch_noise, static_argnums=1)

X, Y = make_blobs(N, sum(WIDTHS), centers=K, cluster_std=0.8, random_state=3)


def federation(order=(0, 1, 2), n_padding=0):
    """Agent a holds view a; the cohorts come in any order; rows of padding are NaN."""
    views = np.split(X, np.cumsum(WIDTHS)[:-1], axis=1)
    ids = np.append(np.arange(N), np.full(n_padding, -1)).astype(np.int32)
    parts = [Part((a,), ids[None], np.array([a], np.int32)) for a in order]
    of = Federation.from_arrays(views, Y, partition=parts)
    poisoned = [
        cohort.replace(
            views=(np.where(cohort.mask[..., None], cohort.views[0], np.float32(np.nan)),)
        )
        for cohort in of.cohorts
    ]
    return of.replace(cohorts=tuple(poisoned))


# What the programs below run on: two agents, not in order, with padding.
ORDER = (1, 0)
PADDED = federation(ORDER, n_padding=6)


@functools.cache
def program():
    """All that follows `start`, compiled: epsilon is part of the state, so one serves all."""
    algorithm = dpfmps(DPFMPSConfig(K, n_sketches=M, n_init=4))

    def rest(key, state):
        state, info = engine.setup(algorithm, PADDED, key, state)
        state, _ = engine.finish(algorithm, PADDED, key, state, 0)
        return engine.assign(algorithm, PADDED, state), state, info

    return jax.jit(rest, compiler_options=FAST)


def results(epsilon, key=0):
    key = jax.random.key(key)
    algorithm = dpfmps(DPFMPSConfig(K, dp_epsilon=epsilon, n_sketches=M, n_init=4))
    state = engine.start(algorithm, PADDED, key)
    return program()(key, state)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [math.inf, 1e5])
def test_separate_groups_are_found_by_every_agent(epsilon):
    labels, state, info = results(epsilon)
    for of_agent in labels:
        assert adjusted_rand_score(Y, of_agent[0, :N]) > 0.95
        np.testing.assert_array_equal(of_agent[0, N:], -1)
    # Both agents' labels name the same global clusters.
    assert np.mean(np.asarray(labels[0]) == np.asarray(labels[1])) > 0.95
    for of_agent, agent in zip(state.clients, ORDER, strict=True):
        assert of_agent.centres.shape == (1, K, WIDTHS[agent])
        np.testing.assert_array_equal(of_agent.centres[0], state.server.centres[agent])
    assert float(info[1]["server"]["epsilon"]) == pytest.approx(epsilon, rel=1e-6)
    assert abs(float(state.server.size) - N) <= 1
    # What is left in the state is what the exchange said.
    told = [float(info[1]["server"][name]) for name in ("epsilon", "delta")]
    assert [float(x) for x in state.server.spent] == told


@pytest.mark.slow
def test_a_private_run_is_finite_and_differs_from_key_to_key():
    labels, state, info = results(1.0)
    for of_agent in labels:
        assert set(np.unique(of_agent)) <= {-1, *range(K)}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.server, info)))
    assert float(info[1]["server"]["epsilon"]) == pytest.approx(1.0, rel=1e-6)
    _, delta = spent(split(1.0, 2, 0.05), state.server.size, M)
    assert float(info[1]["server"]["delta"]) == pytest.approx(float(delta), rel=1e-4)

    same, other = results(1.0)[1].server, results(1.0, key=1)[1].server
    jax.tree.map(np.testing.assert_array_equal, state.server, same)
    assert not np.allclose(same.centres[0], other.centres[0])


def test_the_size_carries_laplace_noise():
    """Over many keys: the published number of rows, with the share of a twentieth of epsilon."""
    algorithm = dpfmps(DPFMPSConfig(K, dp_epsilon=2.0, n_sketches=M))
    send = algorithm.setup[0].client

    @jax.jit
    def sent(of, keys):
        state = engine.start(algorithm, of, jax.random.key(0))
        agent, client = jax.tree.map(lambda leaf: leaf[0], (state.clients[0], of.cohorts[0]))
        return jax.vmap(lambda key: send(key, (), agent, client)[1]["size"])(keys)

    sizes = sent(federation(), jax.random.split(jax.random.key(0), 2000))
    errors = np.asarray(sizes) - N
    assert np.abs(errors).mean() == pytest.approx(1 / (0.05 * 2.0), rel=0.1)
    assert abs(errors.mean()) < 2


def test_sketches_are_of_an_agents_own_rows_with_the_noise_of_their_budget(monkeypatch):
    """Around given centres; what is sketched and noised, its parts do by tests of their own."""
    centres = np.float32([[-0.5, -0.5], [0.5, 0.5], [0.5, -0.5]])

    def near(key, *_, **__):
        return centres + 0.1 * jax.random.uniform(key, centres.shape)

    monkeypatch.setattr(agent_lib, "private_centres", near)
    algorithm = dpfmps(DPFMPSConfig(K, dp_epsilon=4.0, n_sketches=40))
    start = jax.jit(functools.partial(engine.start, algorithm))
    state = start(PADDED, jax.random.key(0)).clients[1]
    agent = jax.tree.map(lambda leaf: leaf[0], state)
    client = jax.tree.map(lambda leaf: leaf[0], jax.device_get(PADDED.cohorts[1]))
    # Ids are not the places of the rows, and most rows are padding.
    ids = 7 * np.arange(len(client.mask)) + 3
    client = client.replace(sample_ids=ids, mask=client.mask & (ids < 200))
    size, key = np.int32(140), jax.random.key(1)
    _, message, _ = jax.jit(algorithm.setup[1].client)(key, size, agent, client)
    x = np.asarray(jax.jit(scaled)(client))
    of_tree, of_phantoms = jax.random.split(key)
    expected = np.asarray(jax.jit(near)(of_tree))
    labels = np.argmin(((x[:, None] - expected[None]) ** 2).sum(-1), axis=1)
    labels = np.where(client.mask, labels, -1)
    plain = jit_sketch(agent.hash_key, ids, labels, K, 40)
    noise = jit_sketch_noise(agent.budget.memberships, 40, 1 / 140)
    np.testing.assert_allclose(message[0]["centres"], expected, rtol=1e-6)
    noisy = jax.jit(add_noise)(of_phantoms, plain, noise)
    np.testing.assert_array_equal(message[0]["sketches"], noisy)
    assert not np.array_equal(message[0]["sketches"], plain)


def test_the_server_takes_the_phantoms_out_and_a_size_of_one_at_least(monkeypatch):
    monkeypatch.setattr(server_lib, "grid_centres", lambda key, local, *_: local)
    algorithm = dpfmps(DPFMPSConfig(K, dp_epsilon=60.0, n_sketches=40))
    start = jax.jit(functools.partial(engine.start, algorithm))
    state = start(PADDED, jax.random.key(0)).server
    told = ({"size": np.array([-5])},)
    low, _ = jax.jit(algorithm.setup[0].server)(jax.random.key(0), state, told, ())
    assert low.size == 1
    noise = jit_sketch_noise(state.budget.memberships, 40, MAX_DELTA)
    # The greatest of fifteen geometric variables and the phantoms', for each cluster and function.
    n = 15 + int(noise.n_phantoms)
    draws = np.random.default_rng(0).uniform(size=(2, K, 40))
    sketches = np.ceil(-np.log2(1 - draws ** (1 / n))).astype(np.uint8)
    messages = tuple(
        {a: {"centres": np.zeros((1, K, WIDTHS[a])), "sketches": sketches[a][None]}} for a in ORDER
    )
    state = state._replace(size=np.int32(90))
    _, info = jax.jit(algorithm.setup[1].server)(jax.random.key(0), state, messages, ())
    counts = jax.jit(complement_counts)
    with_them, without = (
        np.asarray(counts(sketches, np.float32(90), phantoms)).sum()
        for phantoms in (0.0, noise.n_phantoms)
    )
    assert info["mass"] == pytest.approx(without, rel=1e-6) and abs(without - with_them) > 1


@pytest.mark.slow
def test_whole_run_of_the_variant_by_pairs():
    """Three agents whose cohorts are not in the order of their numbers."""
    algorithm = dpfmps_p2est(DPFMPSP2EstConfig(K, dp_epsilon=math.inf, n_sketches=M, n_init=4))
    run = jax.jit(
        lambda federation, key: engine.run(algorithm, federation, key, 0), compiler_options=FAST
    )
    result = run(federation(order=(2, 0, 1)), jax.random.key(0))
    for labels in result.labels:
        assert adjusted_rand_score(Y, labels[0]) > 0.95
    assert float(result.info["setup"][1]["server"]["mass"]) == pytest.approx(N, rel=0.05)


jit_grid_centres = jax.jit(grid_centres, static_argnums=(3, 4), compiler_options=FAST)


def test_every_agent_receives_its_own_columns():
    """Three heavy cells: the final centres are their agents' local centres, side by side."""
    rng = np.random.default_rng(0)
    local = [rng.uniform(-1, 1, (K, d)).astype(np.float32) for d in (1, 5, 2)]
    heavy = [(0, 2, 1), (1, 0, 0), (2, 2, 2)]
    counts = np.zeros((K, K, K), np.float32)
    for cell in heavy:
        counts[cell] = 50.0
    found = jit_grid_centres(jax.random.key(0), local, counts, K, 8)
    assert [columns.shape for columns in found] == [(K, 1), (K, 5), (K, 2)]
    expected = [np.concatenate([c[i] for c, i in zip(local, cell, strict=True)]) for cell in heavy]
    rows = np.concatenate(found, axis=1)
    np.testing.assert_allclose(
        sorted(rows.tolist()), sorted(np.stack(expected).tolist()), atol=1e-3
    )


def test_final_centres_are_means_of_cells_by_count():
    """Two near cells of 30 and 10 persons make one centre, two far ones one each."""
    near = np.array([[-0.2, 0, 0, 0, 0.1], [0.2, 0, 0, 0, 0.3], [0.0, 1, 1, 1, 0]], np.float32)
    local = [
        np.array([[-1], [1], [0]], np.float32),
        near,
        np.array([[0.5, 0.5], [-1, 1], [1, -1]], np.float32),
    ]
    counts = np.zeros((K, K, K), np.float32)
    counts[0, 0, 0], counts[0, 1, 0], counts[1, 2, 1], counts[2, 2, 2] = 30, 10, 40, 40
    found = jit_grid_centres(jax.random.key(0), local, counts, K, 8)
    found = jax.device_get(found)
    merged = int(np.argmin(found[0][:, 0]))
    np.testing.assert_allclose(found[0][merged], [-1.0], atol=1e-3)
    np.testing.assert_allclose(found[1][merged], [-0.1, 0, 0, 0, 0.15], atol=1e-3)
    np.testing.assert_allclose(found[2][merged], [0.5, 0.5], atol=1e-3)


def test_features_are_scaled_one_by_one():
    client = single_client(
        {0: np.array([[0.0, 7.0], [5.0, 7.0], [10.0, 7.0]]), 1: -np.eye(3)[:, :1]}
    )
    expected = [[-1, 0, -1], [0, 0, 1], [1, 0, 1]]
    np.testing.assert_allclose(jax.jit(scaled)(client), expected, atol=1e-6)
    padded = client.replace(
        views=tuple(
            np.append(v, np.float32([[np.nan] * v.shape[1]]), axis=0) for v in client.views
        ),
        mask=np.array([True, True, True, False]),
    )
    np.testing.assert_allclose(jax.jit(scaled)(padded), [*expected, [0, 0, 0]], atol=1e-6)


def test_agents_share_the_hash_functions_and_the_server_has_no_key():
    start = jax.jit(functools.partial(engine.start, dpfmps(DPFMPSConfig(K, dp_epsilon=1.0))))
    state = start(federation(), jax.random.key(0))
    data = [np.asarray(jax.random.key_data(agent.hash_key[0])) for agent in state.clients]
    assert all(np.array_equal(data[0], other) for other in data)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state.server)]
    assert not any(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) for dtype in dtypes)


@pytest.mark.parametrize("n_sketches, m", [(None, N // 10), (40, 40)])
def test_what_travels(n_sketches, m):
    traffic = engine.traffic(dpfmps(DPFMPSConfig(K, n_sketches=n_sketches)), federation())
    assert traffic["setup"].up == 4 + sum(4 * K * d + K * m for d in WIDTHS)
    assert traffic["setup"].down == 3 * 4
    assert traffic["round"] == (0, 0)
    assert traffic["finish"] == (0, sum(4 * K * d for d in WIDTHS))


@pytest.mark.parametrize(
    "settings",
    [
        {"n_clusters": 1},
        {"dp_epsilon": 0.0},
        {"dp_epsilon": math.nan},
        {"n_sketches": 0},
        {"n_sketches": 2.5},
        {"n_init": True},
        {"estimator": "union"},
        {"n_init": 0},
    ],
)
def test_a_bad_setting_is_named(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"^{name}: got"):
        DPFMPSConfig(**({"n_clusters": K} | settings))


def test_too_many_cells_are_refused():
    """Nine agents of one feature each, six clusters."""
    ids = np.arange(N, dtype=np.int32)[None]
    parts = [Part((a,), ids, np.array([a], np.int32)) for a in range(9)]
    many = Federation.from_arrays(np.split(X, 9, axis=1), partition=parts)
    with pytest.raises(ValueError, match=rf"{6**9} cells; allowed is {MAX_CELLS} or less"):
        engine.start(dpfmps(DPFMPSConfig(6)), many, jax.random.key(0))


def test_more_rows_than_the_sums_hold_are_refused():
    ids = jax.ShapeDtypeStruct((1, 2**20 + 1), jnp.int32)
    cohorts = tuple(
        Cohort(
            views=(jax.ShapeDtypeStruct((*ids.shape, 1), jnp.float32),),
            mask=jax.ShapeDtypeStruct(ids.shape, jnp.bool_),
            sample_ids=ids,
            client_ids=jax.ShapeDtypeStruct((1,), jnp.int32),
            view_ids=(a,),
        )
        for a in range(2)
    )
    large = Federation(cohorts, None, (1, 1), None)
    with pytest.raises(ValueError, match=f"got {2**20 + 1}; allowed is {2**20} samples or fewer"):
        jax.eval_shape(
            functools.partial(engine.start, dpfmps(DPFMPSConfig(K))), large, jax.random.key(0)
        )


def test_one_agent_alone_is_refused():
    alone = Federation.from_arrays(
        [X], partition=[Part((0,), np.arange(N, dtype=np.int32)[None], np.array([0], np.int32))]
    )
    with pytest.raises(ValueError, match="allowed is 2 agents or more"):
        engine.start(dpfmps(DPFMPSConfig(K)), alone, jax.random.key(0))
