"""MGCD against its equations, written apart: by loops in NumPy, in closed form, by hand."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc import engine
from jaxfedmvc.algorithms.mgcd import (
    MGCDConfig,
    MGCDHyperparams,
    affinity,
    client,
    method,
    mgcd,
    server,
    sparse_spectral,
)
from jaxfedmvc.algorithms.mgcd import graph as graphs
from jaxfedmvc.algorithms.mgcd.client import on_sphere
from jaxfedmvc.algorithms.mgcd.graph import Factored
from jaxfedmvc.algorithms.mgcd.method import REPORTED
from jaxfedmvc.algorithms.mgcd.model import (
    ClientState,
    Layer,
    decode,
    encode,
    init_autoencoder,
)
from jaxfedmvc.algorithms.mgcd.settings import BY_MODE, diversity_weight
from jaxfedmvc.algorithms.mgcd.sizes import predicted_bytes
from jaxfedmvc.algorithms.mgcd.sparse_spectral import to_sparse
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.nn import apply

K, N, ROUNDS = 3, 24, 4
KEY = jax.random.key(3)
HYPER = MGCDHyperparams(lam=1.0, server_rate=1e-3, local_rate=1e-3)
BASE = MGCDConfig(
    K,
    server="trained",
    latent_dim=3,
    hidden=(8,),
    server_hidden=6,
    pretrain_epochs=2,
    local_epochs=1,
    server_epochs=2,
    batch_size=10,
    n_neighbours=4,
    n_init=2,
).resolved()
# What whole runs are made of: settings, and the widths of the views.
RUNS = {
    "average": (dataclasses.replace(BASE, server="average"), (5, 4, 6)),
    "trained": (dataclasses.replace(BASE, batch_size=N), (5, 4)),
    "literal": (dataclasses.replace(BASE, mode="literal", affinity="mean", batch_size=N), (5, 4)),
}

# Compiled code runs for milliseconds here and takes seconds to optimise.
jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


# --- Tools ----------------------------------------------------------------------------------------


def planted(dims, n=N, seed=0):
    """Well separated clusters in every view, and the truth."""
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.arange(n) % K)
    views = [8 * np.eye(K, d)[truth] + rng.normal(size=(n, d)) for d in dims]
    return [v.astype(np.float32) for v in views], truth


def make_federation(views, extra=0):
    parts = vertical_partition(len(views[0]), len(views))
    ids = [np.pad(p.sample_ids, ((0, 0), (0, extra)), constant_values=-1) for p in parts]
    parts = [p._replace(sample_ids=i) for p, i in zip(parts, ids, strict=True)]
    return Federation.from_arrays(views, partition=parts)


TRACES = collections.Counter()


@functools.cache
def program(name, dense):
    """A whole run, `(hyperparams, federation, key) -> RunResult`, compiled once."""

    def run(hyper, federation, key):
        TRACES[name, dense] += 1
        config = dataclasses.replace(RUNS[name][0], dense=dense)
        return engine.run(mgcd(config, hyper), federation, key, ROUNDS)

    return jit(run)


@functools.cache
def result(name, dense):
    """Of whole graphs with three rows of padding, which are not even numbers."""
    federation = make_federation(planted(RUNS[name][1])[0], extra=3 * dense)
    cohorts = tuple(
        c.replace(views=tuple(np.where(c.mask[..., None], x, np.float32(np.nan)) for x in c.views))
        for c in federation.cohorts
    )
    return program(name, dense)(HYPER, federation.replace(cohorts=cohorts), KEY)


def random_graph(rank=3, seed=0, n=N):
    rng = np.random.default_rng(seed)
    left, right = 0.5 * rng.normal(size=(2, n, rank)).astype(np.float32)
    return Factored(jnp.asarray(left), jnp.asarray(right.T))


def random_networks(config, seed=0, n=N, n_real=N):
    """Networks of which no weight is zero."""
    start = jit(lambda key: server.init_networks(key, config, n, jnp.int32(n_real)))
    networks = jax.device_get(start(jax.random.key(seed)))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape).astype(np.float32), networks)


def on_paper(layer, x):
    a, b, c, d = (np.asarray(p, np.float64) for p in layer)
    return np.maximum(x @ a + b, 0) @ c + d


def refined_on_paper(networks, config, diversity, consistency, where=1.0):
    """All rows of every G_{c_v}, the diagonal too."""
    result = []
    for graph in diversity:
        distilled = on_paper(networks.pre, graph) * where if config.distillation else graph
        if config.mode == "literal":
            result.append(on_paper(networks.post, distilled + consistency) * where)
        else:
            h = graph + (distilled if config.distillation else 0) + consistency
            result.append(h + on_paper(networks.post, h) * where)
    return np.stack(result)


def contrast_on_paper(refined, mask, tau, infonce=False):
    """Eq. (4) by loops over samples and views."""
    n_views, _, _ = refined.shape
    rows = [i for i in range(len(mask)) if mask[i]]

    def s(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b) / tau

    total = 0.0
    for i in rows:
        for v, q in itertools.permutations(range(n_views), 2):
            anchor, positive = refined[v, i], s(refined[v, i], refined[q, i])
            others = [
                np.exp(s(anchor, refined[p, j])) for j in rows if j != i for p in range(n_views)
            ]
            total += 0.5 * (positive - np.log(sum(others) + infonce * np.exp(positive)))
    return -total / len(rows)


def traces_on_paper(diversity):
    """Eq. (5) as printed."""
    return sum(np.trace(a @ b.T) for a in diversity for b in diversity)


def float64(x):
    return np.asarray(x, np.float64)


def whole(graph):
    """[N, N], float64."""
    if not isinstance(graph, Factored):
        return float64(graph)
    product = float64(graph.left) @ float64(graph.right)
    return product * (1 - np.eye(len(product)))


def close(actual, expected, rtol=1e-4, atol=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


# --- Eq. (4) to (6): the server ------------------------------------------------------------------

contrast_loss = jit(server.graph_contrast, static_argnames="infonce")
diversity_loss = jit(server.diversity_loss)


@pytest.mark.parametrize("n_views", [2, 3])
@pytest.mark.parametrize("infonce", [False, True])
def test_contrast_is_the_double_loop(n_views, infonce):
    refined = np.random.default_rng(n_views).normal(size=(n_views, 6, 8)).astype(np.float32)
    for mask in (np.ones(6, bool), np.array([1, 0, 1, 1, 0, 1], bool)):
        value = contrast_loss(jnp.asarray(refined), mask, 0.5, infonce=infonce)
        close(value, contrast_on_paper(float64(refined), mask, 0.5, infonce))
        spoilt = np.where(mask[None, :, None], refined, 1e3)
        close(contrast_loss(jnp.asarray(spoilt), mask, 0.5, infonce=infonce), value)
    # Views and samples may come in any order.
    value = contrast_loss(jnp.asarray(refined), mask, 0.5, infonce=infonce)
    turned, order = refined[::-1], np.array([3, 0, 5, 1, 4, 2])
    close(contrast_loss(jnp.asarray(turned), mask, 0.5, infonce=infonce), value)
    shuffled = jnp.asarray(refined[:, order])
    close(contrast_loss(shuffled, mask[order], 0.5, infonce=infonce), value)


def test_contrast_of_two_samples_by_hand():
    # Views agree, samples are orthogonal: positive 1 / tau, two others of similarity 0 an anchor.
    refined = np.stack([np.eye(2), 3 * np.eye(2)])
    close(contrast_loss(refined, np.ones(2, bool), 0.5), -(2 - np.log(2)))
    one = np.array([True, False])  # a sample without others counts its positive alone
    close(contrast_loss(refined, one, 0.5), -2.0)


def test_sum_of_traces_is_a_squared_norm():
    diversity = np.random.default_rng(0).normal(size=(3, 6, 6)).astype(np.float32)
    expected = traces_on_paper(float64(diversity))
    close(6 * diversity_loss(diversity, np.ones(6, bool)), expected)
    mask = np.array([1, 1, 0, 1, 0, 0], bool)
    expected = traces_on_paper(float64(diversity[:, mask])) / 3
    close(diversity_loss(diversity, mask), expected)


def identity_networks(n=N):
    """x = relu(x) - relu(-x)."""
    both = np.concatenate([np.eye(n), -np.eye(n)]).astype(np.float32)
    layer = Layer(both.T, np.zeros(2 * n, np.float32), both, np.zeros(n, np.float32))
    return server.Networks(layer, layer)


UPLOADS = [random_graph(3, seed=1), random_graph(2, seed=2)]
OLD = random_graph(4, seed=3)
EVERYONE = np.ones(N, bool)


@jax.jit
def average_of(uploads, old):
    return graphs.total([old, graphs.scaled(graphs.total(uploads), 1 / len(uploads))])


def test_diversity_loss_is_zero_at_the_average():
    """Literal networks that hand their input on make the average, the minimum of eq. (5)."""
    config = dataclasses.replace(BASE, mode="literal", server_hidden=2 * N)
    average, networks = average_of(UPLOADS, OLD), identity_networks()

    @jit
    def apply(networks, uploads, old, average):
        _, spread = server.server_losses(
            networks, jnp.arange(N), EVERYONE, uploads, old, EVERYONE, config, HYPER
        )
        return spread, server.refined_graphs(networks, config, uploads, old, average, EVERYONE)[1]

    spread, new = apply(networks, UPLOADS, OLD, average)
    close(spread, 0.0)
    close(whole(new), whole(average))


@functools.cache
def trained(config):
    def train(key, networks, uploads, old):
        opt_state = optax.adam(HYPER.server_rate).init(networks)
        networks, _, losses = server.server_training(
            key, networks, opt_state, uploads, old, EVERYONE, config, HYPER
        )
        average = average_of(uploads, old)
        refined = server.refined_graphs(networks, config, uploads, old, average, EVERYONE)
        return networks, losses, *refined

    return jit(train)


@pytest.mark.slow
def test_training_by_diversity_alone_stays_at_the_average():
    config = dataclasses.replace(BASE, losses=("r", "s", "dd"))
    networks = server.init_networks(KEY, config, N, jnp.int32(N))
    after, losses, _, new = trained(config)(KEY, networks, UPLOADS, OLD)
    jax.tree.map(np.testing.assert_array_equal, after, networks)
    np.testing.assert_array_equal(losses, 0.0)
    close(whole(new), whole(average_of(UPLOADS, OLD)))


@pytest.mark.slow
def test_permuting_samples_permutes_what_is_learnt():
    config = dataclasses.replace(BASE, batch_size=N)
    order = np.random.default_rng(4).permutation(N)

    def turned(graph):
        return Factored(graph.left[order], graph.right[:, order])

    networks = server.init_networks(KEY, config, N, jnp.int32(N))
    moved = server.Networks(*(Layer(x.a[order], x.b, x.c[:, order], x.d[order]) for x in networks))
    _, losses, refined, new = trained(config)(KEY, networks, UPLOADS, OLD)
    _, again, refined_again, new_again = trained(config)(
        KEY, moved, [turned(g) for g in UPLOADS], turned(OLD)
    )
    assert losses[-1] < losses[0]
    close(again, losses)
    for graph, other in zip([*refined, new], [*refined_again, new_again], strict=True):
        close(whole(other), whole(graph)[order][:, order], 1e-3, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["literal", "robust"])
@pytest.mark.parametrize("distillation", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_refined_graphs_are_the_formula(mode, distillation):
    """Rows in a batch, and the factors of all rows, with two rows of padding."""
    config = dataclasses.replace(BASE, mode=mode, distillation=distillation)
    where = np.arange(N) < N - 2
    cut = [Factored(g.left * where[:, None], g.right * where[None]) for g in (*UPLOADS, OLD)]
    uploads, old = cut[:2], cut[2]
    networks, index = random_networks(config), np.arange(N - 2)
    dense = [whole(g) for g in cut]
    expected = refined_on_paper(networks, config, dense[:2], dense[2], where)
    rows = server.refined_rows(
        networks,
        config,
        jnp.stack([graphs.rows(g, index) for g in uploads]),
        graphs.rows(old, index),
        where,
    )
    close(rows, expected[:, index])
    parts = server.learned_parts(networks, config, uploads, old, where)
    for part, graph, full in zip(parts, dense[:2], expected, strict=True):
        given = graph + dense[2] if mode == "robust" else 0
        close((float64(part.left) @ float64(part.right) + given)[index], full[index], atol=1e-4)
        np.testing.assert_array_equal(part.left[~where], 0.0)
    # Their mean loses its diagonal, and in the robust mode has the norm of the average.
    average = average_of(uploads, old)
    _, new = server.refined_graphs(networks, config, uploads, old, average, where)
    mean = expected.mean(axis=0) * where[:, None]
    np.fill_diagonal(mean, 0)
    if mode == "robust":
        mean *= np.linalg.norm(whole(average)) / np.linalg.norm(mean)
    close(whole(new), mean, atol=1e-4)
    if mode == "literal":
        mean = expected.mean(axis=0)[index]
        assert np.linalg.matrix_rank(mean) == new.left.shape[1] == config.server_hidden + 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["literal", "robust"])
def test_loss_on_all_rows_is_the_full_formula(mode):
    config = dataclasses.replace(BASE, mode=mode)
    networks = random_networks(config)
    dense = [whole(g) for g in (*UPLOADS, OLD)]
    refined = refined_on_paper(networks, config, dense[:2], dense[2])
    contrast, spread = server.server_losses(
        networks, jnp.arange(N), EVERYONE, UPLOADS, OLD, EVERYONE, config, HYPER
    )
    close(contrast, contrast_on_paper(refined, np.ones(N, bool), HYPER.tau))
    traces = traces_on_paper(dense[2] + np.stack(dense[:2]) - refined)
    close(spread * N, traces)
    # The same by how far the mean of the refined graphs is from the old one plus the mean upload.
    gap = refined.mean(axis=0) - dense[2] - (dense[0] + dense[1]) / 2
    close(traces, 2**2 * np.sum(gap**2))
    for losses in (("cl",), ("dd",), ("cl", "dd")):
        only = dataclasses.replace(config, losses=losses)
        value = server.weighted(contrast, spread, EVERYONE, only, MGCDHyperparams(lam=0.3))
        scale = 1 if mode == "literal" else 1 / N
        expected = ("cl" in losses) * contrast + ("dd" in losses) * 0.3 * scale * traces
        close(value, expected)


@pytest.mark.parametrize("mode", ["literal", "robust"])
def test_gradients_are_finite_where_all_graphs_are_zero(mode):
    config = dataclasses.replace(BASE, mode=mode)
    networks = random_networks(config)

    @jit
    @jax.grad
    def gradient(networks, uploads, old):
        parts = server.server_losses(
            networks, jnp.arange(N), EVERYONE, uploads, old, EVERYONE, config, HYPER
        )
        return server.weighted(*parts, EVERYONE, config, HYPER)

    none = jax.tree.map(np.zeros_like, (UPLOADS, OLD))
    without = jax.tree.map(np.zeros_like, networks)  # what it makes of nothing is zero as well
    for found in (
        gradient(networks, *none),
        gradient(without, *none),
        gradient(networks, UPLOADS, none[1]),
    ):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


# --- Eq. (1) to (3): the clients -----------------------------------------------------------------


def test_self_representation_by_hand():
    z = np.float32([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    graph = np.float32([[0.0, 0.5, 0.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    # Residuals (1, -1), (-2, 1), (1, 1).
    loss = jit(client.self_representation_loss)
    close(loss(z, graph, z, np.ones(3, bool)), (2 + 5 + 2) / 3)
    close(loss(z[:2], graph[:2], z, np.array([False, True])), 5.0)


LITERAL = dataclasses.replace(BASE, mode="literal")


@pytest.fixture(scope="module")
def literal_client():
    """A client of 10 samples and two rows of padding, its networks and the old graph."""
    x, mask = np.zeros((12, 5), np.float32), np.arange(12) < 10
    x[:10] = planted((5,), n=10)[0][0]
    params = jax.device_get(jit(lambda: init_autoencoder(KEY, LITERAL, 5))())
    # Padding has a latent vector, too.
    params = jax.tree.map(lambda a: a + 0.2 if a.ndim == 1 else a, params)
    rng = np.random.default_rng(2)
    params["graph"] = np.float32(0.3 * rng.normal(size=(3, 12)))
    old = Factored(*(0.3 * np.asarray(g) for g in random_graph(2, seed=6, n=12)))
    old = Factored(old.left * mask[:, None], old.right * mask[None])
    return x, mask, params, old


@functools.cache
def local_program(batch_size):
    config = dataclasses.replace(LITERAL, batch_size=batch_size, local_epochs=2)

    def train(params, old, x, mask, rate):
        state = ClientState(params, optax.adam(rate).init(params), (), jnp.zeros(12))
        hyper = dataclasses.replace(HYPER, local_rate=rate)
        return client.local_training(KEY, state, old, x, mask, config, hyper)

    return jit(train)


@jit
def coded(params, x):
    """Z, Z_d and what is decoded of Z."""
    z, z_d = encode(params, LITERAL, x)
    return z, z_d, decode(params, z)


def local_loss_on_paper(params, old, x, mask):
    """Eq. (3) of all samples at once."""
    z, z_d, decoded = jax.device_get(coded(params, x))
    decoded = float64(decoded)[mask]
    graph = float64(z_d @ params["graph"])
    np.fill_diagonal(graph, 0)
    graph = (graph + whole(old))[mask][:, mask]
    z = float64(z)[mask]
    by_row = ((x[mask] - decoded) ** 2).sum(1) + HYPER.gamma * ((z - graph @ z) ** 2).sum(1)
    return by_row.mean()


@pytest.mark.parametrize("batch_size", [12, 4])
def test_local_loss_is_the_full_formula(literal_client, batch_size):
    """In batches too: every row meets the vectors of all samples, which nothing moves at rate 0."""
    x, mask, params, old = literal_client
    train = local_program(batch_size)
    _, losses = train(params, old, x, mask, 0.0)
    close(losses, np.full(2, local_loss_on_paper(params, old, x, mask)))
    # It falls, from no consistency graph and from no graph at all.
    none = graphs.zeros(12, 2)
    for start in (params, params | {"graph": np.zeros_like(params["graph"])}):
        state, losses = train(start, none, x, mask, 1e-3)
        assert losses[1] < losses[0]
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
        assert np.abs(state.params["graph"] - start["graph"]).max() > 0


def test_latent_vectors_are_the_sum_of_two_encoders_of_which_the_second_is_the_views_own(
    literal_client,
):
    x, _, params, _ = literal_client
    z, z_d, _ = jax.device_get(coded(params, x))
    consensus, specific = (
        np.asarray(jit(apply)(params[name], x)) for name in ("consensus", "specific")
    )
    close(z_d, specific)
    close(z, consensus + specific)


def test_uploaded_graph_is_linear_in_the_latent_vectors(literal_client):
    x, mask, params, _ = literal_client
    diversity = jit(functools.partial(client.diversity_graph, config=LITERAL))
    found = jax.device_get(diversity(params, x, mask))
    _, z_d, _ = jax.device_get(coded(params, x))
    close(found.left @ found.right, (z_d @ params["graph"]) * mask[:, None] * mask[None])
    assert found.left.shape == (12, 3)  # so its rank is that of the latent space


@pytest.mark.parametrize("solve", [True, False])
def test_ridge_graph_is_the_closed_form(solve):
    rng, ridge = np.random.default_rng(0), 0.7
    z = rng.normal(size=(N, 3)).astype(np.float32)
    ridge_graph = jit(functools.partial(client.ridge_graph, solve=solve))
    found = jax.device_get(ridge_graph(z, OLD, np.int32(N), ridge))
    z, old = float64(z), whole(OLD)
    gram = z.T @ z + ridge * N * np.eye(3) if solve else N * np.eye(3)
    expected = (np.eye(N) - old) @ z @ np.linalg.inv(gram) @ z.T
    close(found.left @ found.right, expected)
    assert np.linalg.matrix_rank(expected) == found.left.shape[1] == 3
    np.fill_diagonal(expected, 0)
    close(whole(found), expected)


@pytest.mark.slow
def test_the_published_rate_barely_moves_an_autoencoder(literal_client):
    """Adam's steps are of the size of the rate, so 20 epochs at 1e-6 change nothing to speak of."""
    x, mask, params, _ = literal_client
    params = {name: p for name, p in params.items() if name != "graph"}
    config = dataclasses.replace(LITERAL, pretrain_epochs=20, batch_size=5)

    @jit
    def pretrain(rate):
        hyper = dataclasses.replace(HYPER, pretrain_rate=rate)
        return client.pretrain(KEY, params, x, mask, config, hyper)

    steps = 20 * 3
    small, barely = pretrain(1e-6)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), small, params)
    assert max(jax.tree.leaves(moved)) < 3 * steps * 1e-6
    decoded = decode(params, encode(params, config, x)[0])
    start = client.reconstruction_loss(x, decoded, mask)
    assert barely > 0.99 * start
    assert pretrain(1e-2)[1] < 0.5 * start


# --- Affinity ------------------------------------------------------------------------------------

M = 36  # samples of these graphs; the last two are padding


@functools.cache
def cut(rule):
    config = dataclasses.replace(BASE, affinity=rule, n_neighbours=3)
    where = np.arange(M) < M - 2

    def clusters(refined):
        mean = graphs.scaled(graphs.total(refined), 1 / len(refined))
        return affinity.clusters(KEY, refined, mean, where, config)

    return jit(clusters)


TRUTH = np.arange(M) % K


def agrees(found):
    np.testing.assert_array_equal(found.labels[M - 2 :], -1)
    return adjusted_rand_score(TRUTH[: M - 2], found.labels[: M - 2])


def signed(linked, noise, seed):
    """Positive where linked, negative elsewhere, asymmetric; large values in padding."""
    rng = np.random.default_rng(seed)
    graph = np.where(linked, 1.0, -0.5) + noise * rng.normal(size=(M, M))
    graph[M - 2 :], graph[:, M - 2 :] = 50.0, 50.0
    return jnp.asarray(graph, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["each", "mean", "both", "auto", "absolute"])
def test_planted_blocks_are_found(rule):
    same = TRUTH[:, None] == TRUTH
    # Without the sign, what is not linked must be small.
    refined = [signed(same, 0.2, seed=s) + 0.5 * (rule == "absolute") for s in (0, 1)]
    found = cut(rule)(refined)
    assert agrees(found) == 1 and found.separation > 1.5
    close(np.linalg.norm(found.embedding[: M - 2], axis=1), 1.0)
    assert found.of_each == {"each": 1, "both": 0.5}.get(rule, 0) or rule == "auto"


@pytest.mark.slow
def test_views_that_link_different_pairs_are_bridged():
    """Clusters are grids of 12 = 4 x 3: one view links rows and the other, fainter, columns."""
    same, place = TRUTH[:, None] == TRUTH, np.arange(M) // K
    by_row = same & (place[:, None] // 4 == place // 4)
    by_column = same & (place[:, None] % 4 == place % 4)
    refined = [3 * signed(by_row, 0.1, seed=0), signed(by_column, 0.1, seed=1)]
    each, mean, auto = (cut(rule)(refined) for rule in ("each", "mean", "auto"))
    assert agrees(each) == 1 and each.separation > 2 * mean.separation
    assert agrees(mean) < 1  # its largest entries are the first view's alone
    assert auto.of_each == 1 and agrees(auto) == 1 and auto.separation == each.separation


@pytest.mark.slow
def test_views_that_agree_but_for_noise_are_averaged():
    same = TRUTH[:, None] == TRUTH
    refined = [signed(same, 0.7, seed=s) for s in (0, 1)]
    each, mean, both, auto = (cut(rule)(refined) for rule in ("each", "mean", "both", "auto"))
    assert mean.separation > each.separation
    assert auto.separation == max(mean.separation, both.separation) and agrees(auto) == 1
    assert auto.of_each == (0.5 if both.separation > mean.separation else 0)


@pytest.mark.slow
def test_both_affinities_weigh_the_same():
    """By hand: the mean of the two, the mean graph's brought to the total of the views' own."""
    same = TRUTH[:, None] == TRUTH
    refined = [signed(same, 0.5, seed=s) for s in (0, 1)]
    each, mean, both = (
        np.asarray(to_sparse(jax.tree.map(np.asarray, cut(rule)(refined).affinity)).todense())
        for rule in ("each", "mean", "both")
    )
    close(both, (each + mean * each.sum() / mean.sum()) / 2)


def test_of_two_the_later_counts_if_it_separates_better_by_the_factor():
    def made(separation):
        return affinity.Clusters(*(np.float32(separation),) * 5)

    for later, factor, kept in ((1.04, 1.0, 1.04), (1.04, 1.05, 1.0), (1.06, 1.05, 1.06)):
        close(jit(affinity.better)(made(1.0), made(later), factor).separation, kept)


def test_a_separation_is_of_the_eigenvalues_about_the_number_of_clusters(monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(N, K + 1)).astype(np.float32)
    found = sparse_spectral.Embedding(vectors, np.float32([1.0, 0.9, 0.5, 0.2]))
    monkeypatch.setattr(affinity, "sparse_embedding", lambda *_, **__: found)
    cut = jit(functools.partial(affinity._cut, config=BASE))
    _, rows, separation = cut(KEY, None, EVERYONE)
    close(separation, 0.8 / 0.5)
    close(rows, vectors[:, :K] / np.linalg.norm(vectors[:, :K], axis=1, keepdims=True))


@pytest.mark.parametrize(("mode", "rows"), [("literal", 10), ("robust", 1)])
def test_diversity_weighs_by_the_samples_in_the_literal_mode(mode, rows):
    config = dataclasses.replace(BASE, mode=mode)
    found = jit(lambda mask: server.weighted(2.0, 3.0, mask, config, HYPER))(np.arange(12) < 10)
    close(found, 2 + diversity_weight(config, HYPER) * rows * 3)


@pytest.mark.parametrize(
    ("before", "told", "counted", "kept", "is_last"),
    [
        (0.0, 1.04, [True, False, True], 1.04, False),  # the first round: views are chosen
        (1.0, 1.04, [True, True, False], 1.0, True),
        (1.0, 1.06, [True, True, False], 1.06, False),
    ],
)
def test_a_round_adds_the_mean_of_clean_uploads_and_the_last_separates_no_better(
    monkeypatch, before, told, counted, kept, is_last
):
    """By hand, where separations are told; a sample of padding, and diagonals."""
    cut = []

    def clusters(key, refined, mean, where, config, views):
        cut.append((refined, mean))
        return state.clusters._replace(separation=np.float32(told))

    monkeypatch.setattr(method, "clusters", clusters)
    monkeypatch.setattr(method, "views_that_agree", lambda *_: jnp.array([True, False, True]))
    config = dataclasses.replace(RUNS["average"][0], dense=True)
    algorithm = mgcd(config)
    state = jit(algorithm.init)(KEY, make_federation(planted(RUNS["average"][1])[0], extra=1))[0]
    rng = np.random.default_rng(0)
    uploads = rng.normal(size=(3, N + 1, N + 1)).astype(np.float32)
    clean = uploads * (1 - np.eye(N + 1, dtype=np.float32))
    clean[:, N], clean[:, :, N] = 0, 0
    old = clean[0] * np.float32(0.7)
    state = state._replace(
        graph=old,
        clusters=state.clusters._replace(separation=np.float32(before)),
        kept=np.array([True, True, False]),
    )

    @jit
    def one_round(messages):
        there = (jnp.ones(1),) * 3
        return algorithm.round[0].server(KEY, state, messages, there)[0], cut.pop()

    after, (refined, mean) = one_round(tuple(upload[None] for upload in uploads))
    close(after.graph, old + clean[counted].mean(axis=0))
    close(np.stack(refined), old[None] + clean)
    close(mean, after.graph)
    assert after.clusters.separation == np.float32(kept) and after.finished == is_last
    assert after.kept.tolist() == counted


def test_the_server_trains_on_from_what_it_and_its_optimiser_were(monkeypatch):
    def more(tree):
        return jax.tree.map(lambda x: x + 1, tree)

    def training(key, networks, opt_state, *_):
        return more(networks), more(opt_state), jnp.zeros(1)

    config = dataclasses.replace(RUNS["trained"][0], dense=True)
    algorithm = mgcd(config)
    federation = make_federation(planted(RUNS["trained"][1])[0])
    first = state = jit(lambda: algorithm.init(KEY, federation)[0])()
    monkeypatch.setattr(server, "server_training", training)
    monkeypatch.setattr(server, "refined_graphs", lambda n, c, uploads, old, *_: (uploads, old))
    monkeypatch.setattr(method, "clusters", lambda *_: first.clusters)
    one_round = jit(algorithm.round[0].server)
    for _ in range(2):
        messages = (np.zeros((1, N, N), np.float32),) * 2
        state, _ = one_round(KEY, state, messages, (np.ones(1, np.float32),) * 2)
    for found, start in (
        (state.networks, first.networks),
        (state.opt_state, first.opt_state),
    ):
        jax.tree.map(close, found, more(more(jax.device_get(start))))


def test_clients_draw_networks_of_their_own():
    views = [np.ones((N, 5), np.float32)] * 2
    config = dataclasses.replace(RUNS["literal"][0])
    _, states = jit(mgcd(config).init)(KEY, make_federation(views))
    first, second = (np.asarray(state.params["graph"]) for state in states)
    assert np.abs(first - second).max() > 0.1


# --- Whole runs ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["average", pytest.param("trained", marks=pytest.mark.slow)])
def test_planted_clusters_are_found(name):
    found, (_, truth) = result(name, False), planted(RUNS[name][1])
    for labels in found.labels:
        assert adjusted_rand_score(truth, labels[0]) == 1
    # It ends by itself, after the first round that does not separate by a twentieth better.
    n_rounds = int(found.n_rounds)
    assert n_rounds < ROUNDS and bool(found.state.server.finished)
    separation = np.asarray(found.info["rounds"][0]["server"]["separation"])
    kept = separation[n_rounds - 2]
    assert (separation[1 : n_rounds - 1] > 1.05 * separation[: n_rounds - 2]).all()
    assert separation[n_rounds - 1] <= 1.05 * kept
    np.testing.assert_array_equal(separation[n_rounds:], 0.0)
    close(found.state.server.clusters.separation, kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n != "average" else ()) for n in RUNS],
)
def test_factors_and_padded_whole_graphs_make_the_same_run(name):
    found, dense = result(name, False), result(name, True)
    assert found.n_rounds == dense.n_rounds
    for labels, expected in zip(dense.labels, found.labels, strict=True):
        # Clusters may be numbered otherwise: rounding decides between equal starts of k-means.
        assert adjusted_rand_score(labels[0][:N], expected[0]) == 1
        assert (np.asarray(labels[0][N:]) == -1).all()
    one, other = whole(found.state.server.graph), dense.state.server.graph
    close(other[:N, :N], one, rtol=1e-3, atol=1e-4)
    assert np.abs(other).max() > 0.01
    for nothing in (np.diag(other), other[N:], other[:, N:]):
        np.testing.assert_array_equal(nothing, 0.0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((found.info, dense.info)))


@pytest.mark.slow
def test_literal_runs_all_rounds_within_its_rank():
    found = result("literal", False)
    assert found.n_rounds == ROUNDS
    assert found.state.server.graph.left.shape == (N, BASE.server_hidden + 1)


@pytest.mark.ci
def test_permuting_samples_permutes_graph_and_partition():
    views, _ = planted(RUNS["average"][1])
    order = np.random.default_rng(8).permutation(N)
    turned = program("average", False)(HYPER, make_federation([v[order] for v in views]), KEY)
    found = result("average", False)
    graph = whole(found.state.server.graph)[order][:, order]
    close(whole(turned.state.server.graph), graph, 1e-3, 1e-4)
    assert adjusted_rand_score(found.labels[0][0][order], turned.labels[0][0]) == 1


@pytest.mark.slow
def test_seeds_and_hyperparameters_share_a_program_and_vmap_is_a_loop():
    views, _ = planted(RUNS["trained"][1])
    federation, run = make_federation(views), program("trained", False)
    first = result("trained", False)
    before = TRACES["trained", False]
    keys = jax.random.split(jax.random.key(9), 2)
    alone = [run(HYPER, federation, key) for key in keys]
    other = run(MGCDHyperparams(lam=0.1, tau=0.2, ridge=0.1), federation, KEY)
    assert TRACES["trained", False] == before == 1
    assert not np.allclose(
        other.info["rounds"][0]["server"]["server_loss"],
        first.info["rounds"][0]["server"]["server_loss"],
    )
    again = run(HYPER, federation, KEY)
    jax.tree.map(np.testing.assert_array_equal, again.state.server, first.state.server)
    config = RUNS["trained"][0]
    together = jit(jax.vmap(lambda key: engine.run(mgcd(config, HYPER), federation, key, ROUNDS)))(
        keys
    )
    for i, one in enumerate(alone):
        assert together.n_rounds[i] == one.n_rounds
        # Every start of k-means finds clusters so far apart: rounding tells which one numbers them.
        for labels, expected in zip(together.labels, one.labels, strict=True):
            assert adjusted_rand_score(labels[i][0], expected[0]) == 1
        found = jax.tree.map(lambda x, i=i: x[i], together.state.server.clusters)
        close(found.embedding, one.state.server.clusters.embedding)
        close(found.separation, one.state.server.clusters.separation)


@pytest.mark.slow
def test_an_uploaded_identity_counts_for_nothing():
    """G = I would explain every sample by itself, so no diagonal passes the server."""
    config = dataclasses.replace(RUNS["average"][0], dense=True, affinity="each")
    views, _ = planted(RUNS["average"][1])
    algorithm, federation = mgcd(config), make_federation(views)
    state = algorithm.init(KEY, federation)[0]
    messages = tuple((5 * jnp.eye(N) + 0.1)[None] for _ in views)
    weights = tuple(jnp.ones(1) for _ in views)
    after, _ = jit(algorithm.round[0].server)(KEY, state, messages, weights)
    close(after.graph, 0.1 * (1 - np.eye(N)))


def widest(jaxpr, n):
    """The most axes of n or more that any array of a program has, and such a shape."""
    worst = (0, ())
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            shape = getattr(variable.aval, "shape", ())
            worst = max(worst, (sum(size >= n for size in shape), shape))
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                worst = max(worst, widest(inner, n))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trained", "literal"])
def test_factored_graphs_need_no_array_of_all_pairs(name, monkeypatch):
    n = 600
    # What stands in on other devices than a CPU for few samples, which is in the trace, too.
    monkeypatch.setattr(sparse_spectral, "_DENSE", 0)
    config, dims = RUNS[name]
    federation = make_federation(planted(dims[:2], n=n)[0])

    def axes(**changes):
        algorithm = mgcd(dataclasses.replace(config, **changes))
        traced = jax.make_jaxpr(lambda f, k: engine.run(algorithm, f, k, 1))(federation, KEY)
        return widest(traced.jaxpr, n)[0]

    assert axes() == 1
    if name == "trained":
        assert axes(dense=True) == 2  # so it would be seen


# --- Settings -------------------------------------------------------------------------------------


def test_none_is_what_the_mode_says():
    robust, literal = MGCDConfig(K).resolved(), MGCDConfig(K, mode="literal").resolved()
    assert (robust.server, robust.affinity, robust.latent_dim) == ("average", "auto", 32)
    assert (literal.server, literal.affinity, literal.latent_dim) == ("trained", "mean", 512)
    assert None not in {getattr(literal, name) for name in BY_MODE["literal"]._fields[:-1]}
    assert MGCDConfig(K, mode="literal", latent_dim=7).resolved().latent_dim == 7
    assert literal.resolved() == literal
    for config, expected in ((robust, 1.0), (literal, 1e-3)):
        assert diversity_weight(config, MGCDHyperparams()) == expected
        assert diversity_weight(config, MGCDHyperparams(lam=0.0)) == 0.0


def test_docs_say_what_the_modes_say():
    """The docstrings, which are the flags' help, name the values of the one table."""
    text = " ".join((MGCDConfig.__doc__ + MGCDHyperparams.__doc__).split())
    robust, literal = (BY_MODE[mode]._asdict() for mode in ("robust", "literal"))
    for name, value in robust.items():
        entry = text[text.index(f" {name}: ") :]
        entry = entry[entry.index("None: ") : entry.index(" literal one.")]
        first, second = (f"{v:g}" if isinstance(v, float) else v for v in (value, literal[name]))
        assert entry == f"None: {first} in the robust mode, {second} in the", name


@pytest.mark.slow
def test_clusters_of_all_graphs_are_reported():
    views, truth = planted(RUNS["average"][1])
    config = dataclasses.replace(RUNS["average"][0], report_graphs=True)
    found = jit(lambda f: engine.run(mgcd(config, HYPER), f, KEY, 1))(make_federation(views))
    reported = found.info["rounds"][0]["server"]["labels"]
    assert set(reported) == set(REPORTED)
    assert adjusted_rand_score(truth, reported["consistency"][0]) == 1


# --- Bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        {"mode": "sparse"},
        {"server": "none"},
        {"encoder": "wide"},
        {"affinity": "min"},
        {"contrast": "triplet"},
        {"losses": ("r", "x")},
        {"n_clusters": 1},
        {"latent_dim": 0},
        {"server_hidden": 0},
        {"batch_size": 0},
        {"n_neighbours": 0},
        {"n_init": 0},
        {"pretrain_epochs": -1},
        {"local_epochs": -1},
        {"server_epochs": -1},
        {"rank": 0},
        {"hidden": (8, 0)},
        {"memory_limit": 0},
    ],
)
def test_bad_settings_are_named(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=rf"^{name}: got .*; allowed (is|are) "):
        MGCDConfig(**{"n_clusters": K} | setting)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("gamma", -1.0, "0 or more"),
        ("lam", np.inf, "0 or more"),
        ("tau", 0.0, "above 0"),
        ("ridge", 0.0, "above 0"),
        ("pretrain_rate", np.nan, "above 0"),
        ("local_rate", -1e-3, "above 0"),
        ("server_rate", 0.0, "above 0"),
    ],
)
def test_numbers_out_of_range_are_named(name, value, allowed):
    with pytest.raises(
        ValueError, match=rf"^{name}( \(--\w+\))?: got .*; allowed is a finite number.* {allowed}"
    ):
        mgcd(BASE, MGCDHyperparams(**{name: value}))


@pytest.mark.slow
def test_graphs_that_are_not_finite_end_the_run():
    federation = make_federation(planted(RUNS["literal"][1])[0])
    hyper = dataclasses.replace(HYPER, local_rate=1e30)
    with pytest.raises((RuntimeError, ValueError), match=r"graphs: got NaN .* smaller step sizes"):
        jax.block_until_ready(program("literal", False)(hyper, federation, KEY))


def shapes_of(n, dims):
    """A federation of which only the shapes exist."""

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    cohorts = tuple(
        Cohort(
            (array(1, n, d),),
            array(1, n, dtype=bool),
            array(1, n, dtype=jnp.int32),
            array(1, dtype=jnp.int32),
            (v,),
        )
        for v, d in enumerate(dims)
    )
    return Federation(cohorts, None, tuple(dims), None)


def test_too_much_memory_is_refused_before_it_is_taken():
    def start(**changes):
        config = dataclasses.replace(BASE, batch_size=256, **changes)
        return jax.eval_shape(mgcd(config).init, KEY, shapes_of(50_000, (5, 4)))

    # Five graphs of 10 GB, and blocks of 4 * 256 rows.
    with pytest.raises(
        ValueError,
        match=r"50000 samples in 2 views .* 50\.2 GB; .* 8 GB: .*"
        r"dense=False",
    ):
        start(server="average", dense=True)
    with pytest.raises(ValueError, match="another affinity"):
        start(affinity="absolute")
    with pytest.raises(ValueError, match="smaller batch_size"):
        start(memory_limit=0.1)
    server_state, _ = start()
    assert max(leaf.size for leaf in jax.tree.leaves(server_state)) < 100 * 50_000
    config = dataclasses.replace(BASE, rank=9)
    assert predicted_bytes(config, 100, (5, 4)) < predicted_bytes(config, 200, (5, 4))


def test_federations_that_do_not_fit_are_named():
    views, _ = planted((5, 4))
    init = mgcd(BASE).init
    with pytest.raises(ValueError, match="got one view; MGCD needs two"):
        init(KEY, Federation.from_clients([{0: views[0]}]))
    with pytest.raises(ValueError, match=r"3 samples; allowed is 4 or more \(.*3 clusters"):
        init(KEY, make_federation([v[:3] for v in views]))
    ids = np.arange(N)
    with pytest.raises(ValueError, match="agent 1"):
        Federation.from_agents([(ids, views[0]), (ids + 1, views[1])])
    several = Federation.from_clients([{0: views[0]}, {0: views[0]}, {1: views[1]}])
    with pytest.raises(ValueError, match="held by several clients"):
        init(KEY, several)


@pytest.mark.parametrize("exponent", [-60, -20, 0, 40])
def test_latent_vectors_on_the_sphere_hang_on_no_unit(exponent):
    rng = np.random.default_rng(0)
    z, mask = rng.normal(size=(20, 4)).astype(np.float32), np.arange(20) < 15
    project = jit(on_sphere)
    expected = np.asarray(project(z, mask))
    found = np.asarray(project(z * np.float32(2.0**exponent), mask))
    np.testing.assert_array_equal(found, expected)
    about = z[:15] - z[:15].mean(axis=0)
    on_paper = 2 * about / np.linalg.norm(about, axis=1, keepdims=True)
    np.testing.assert_allclose(expected[:15], on_paper, atol=1e-5)
    assert not np.asarray(project(np.zeros((20, 4), np.float32), mask)).any()
