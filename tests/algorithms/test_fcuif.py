"""FedDMVC and FCUIF: their equations against NumPy and scikit-learn, and planted clusters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fcuif import (
    FCUIFConfig,
    FCUIFHyperparams,
    FedDMVCConfig,
    FedDMVCHyperparams,
    fcuif,
    feddmvc,
)
from jaxfedmvc.algorithms.fcuif import client as client_lib
from jaxfedmvc.algorithms.fcuif import server as server_lib
from jaxfedmvc.algorithms.fcuif.client import Upload
from jaxfedmvc.algorithms.fcuif.networks import extension, network_aligner, network_imputer
from jaxfedmvc.algorithms.pooled.networks import apply
from jaxfedmvc.clustering.kmeans import KMeansResult, means_of
from jaxfedmvc.data import shuffle_places, vertical_partition
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation

# Compiled code runs for milliseconds here and takes seconds to optimise.
jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
K, N = 3, 24
TRUTH = np.arange(N) % K
# Row 6 is held by nobody, four rows by one agent each.
HELD = np.ones((2, N), bool)
HELD[0, [3, 6, 7]] = HELD[1, [0, 6, 11]] = False
REAL, COMPLETE = HELD.any(axis=0), HELD.all(axis=0)
SMALL = {
    "hidden": (16,),
    "latent_dim": 4,
    "pretrain_epochs": 60,
    "local_epochs": 20,
    "batch_size": 16,
    "n_init": 4,
}


def views(seed=0):
    """Two views with three groups each."""
    rng = np.random.default_rng(seed)
    centers = [rng.normal(size=(K, d)) for d in (6, 4)]
    return [c[TRUTH] + 0.05 * rng.normal(size=(N, c.shape[1])) for c in centers]


def vertical(x, held=HELD, fill=0.0):
    """One agent for each view; what an agent lacks is `fill` there."""
    ids = np.where(held, np.arange(len(x[0]))[None], -1).astype(np.int32)
    federation = Federation.from_arrays(
        x, TRUTH, partition=[Part((a,), ids[a : a + 1], np.array([a])) for a in range(len(x))]
    )

    def filled(cohort):
        return cohort.replace(
            views=tuple(jnp.where(cohort.mask[..., None], x, fill) for x in cohort.views)
        )

    return federation.replace(cohorts=tuple(map(filled, federation.cohorts)))


@functools.partial(jit, static_argnames="name")
def program(federation, key, name="fcuif"):
    if name == "fcuif":
        algorithm = fcuif(FCUIFConfig(K, imputer_epochs=20, **SMALL), FCUIFHyperparams(0.1, 0.01))
    else:
        algorithm = feddmvc(FedDMVCConfig(K, **SMALL), FedDMVCHyperparams(0.1, 0.01))
    return engine.run(algorithm, federation, key, 2)


@pytest.fixture(scope="module")
def result():
    return program(vertical(views()), jax.random.key(0))


def uploads(seed=0, width=4):
    """Random encodings and soft clusters of two agents."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(K, 2, width))
    z = centers[TRUTH] + 0.1 * rng.normal(size=(N, 2, width))
    p = rng.dirichlet(np.ones(K), size=(N, 2)) + 3 * np.eye(K)[TRUTH][:, None]
    p = p / p.sum(-1, keepdims=True)
    held = HELD.T
    zeros = held[..., None]
    return Upload(jnp.float32(z * zeros), jnp.float32(p * zeros)), jnp.asarray(held)


# --- Agents ---------------------------------------------------------------------------------------


def test_start_is_glorots_with_gain_of_relu():
    shapes = {"a": (300, (200, 50)), "b": (50, (300,))}
    drawn = jit(lambda key: client_lib.xavier_mlps(key, shapes))(jax.random.key(0))
    for name, layer, shape in (("a", 0, (300, 200)), ("a", 1, (200, 50)), ("b", 0, (50, 300))):
        params = drawn[name]["params"][f"Dense_{layer}"]
        weights, bound = np.asarray(params["kernel"]), 2**0.5 * (6 / sum(shape)) ** 0.5
        assert weights.shape == shape and (np.asarray(params["bias"]) == 0).all()
        assert 0.99 * bound < np.abs(weights).max() <= bound
        np.testing.assert_allclose(weights.std(), bound / 3**0.5, rtol=0.02)


def test_soft_clusters_and_their_sharpened_form():
    rng = np.random.default_rng(0)
    z, mu = rng.normal(size=(N, 4)), rng.normal(size=(K, 4))
    q = 1 / (1 + ((z[:, None] - mu) ** 2).sum(-1))
    q = q / q.sum(1, keepdims=True)
    found = jit(client_lib.soft_assignment)(jnp.float32(z), jnp.float32(mu))
    np.testing.assert_allclose(found, q, rtol=1e-4)
    sharpen = jit(client_lib.sharpen)
    dirty = np.where(REAL[:, None], found, np.float32(np.nan))
    p = np.asarray(sharpen(dirty, REAL))
    expected = q[REAL] ** 2 / q[REAL].sum(0)
    np.testing.assert_allclose(p[REAL], expected / expected.sum(1, keepdims=True), rtol=1e-4)
    assert (p[~REAL] == 0).all()
    assert (np.asarray(sharpen(dirty, np.zeros(N, bool))) == 0).all()
    divergence = jit(client_lib.divergence)(np.float32(q), np.asarray(found)[::-1])
    np.testing.assert_allclose(divergence, (q * np.log(q / q[::-1])).sum(1), rtol=1e-3, atol=1e-5)


def test_first_training_starts_at_the_servers_centres_and_without_targets_reconstructs():
    """Adam's first step has the size of its rate in each number that the loss depends on."""
    config = FedDMVCConfig(K, **(SMALL | {"local_epochs": 1, "batch_size": N}))
    hyper = FedDMVCHyperparams(learning_rate=0.01)
    x = np.float32(views()[0])
    init = functools.partial(client_lib.init_autoencoder, config=config, n_features=x.shape[1])
    networks = jit(init)(jax.random.key(1))
    own, sent = np.full((K, 4), 7, np.float32), np.arange(12, dtype=np.float32).reshape(K, 4) / 12
    target = np.where(np.arange(N)[:, None] < 9, np.eye(K)[TRUTH], 0.0).astype(np.float32)
    step = jit(
        lambda guided, p: client_lib.train(
            jax.random.key(0),
            client_lib.ClientState(networks, own, guided, jnp.zeros(N, jnp.int32)),
            client_lib.Guidance(sent, p),
            x,
            jnp.ones(N, bool),
            config,
            hyper,
        )
    )
    encode = functools.partial(apply, networks["encoder"])
    assigned = jit(lambda mu: client_lib.soft_assignment(encode(x), mu))
    for guided, start in ((False, sent), (True, own)):
        state, losses = step(np.bool_(guided), target)
        assert state.guided
        np.testing.assert_allclose(np.abs(state.centroids - start), 0.01, rtol=0.02)
        untaught, error = step(np.bool_(guided), np.zeros_like(target))
        np.testing.assert_array_equal(untaught.centroids, start)
        q = np.asarray(assigned(start))[:9]
        away = -np.log(q[np.arange(9), TRUTH[:9]]).mean()  # of targets that are certain
        np.testing.assert_allclose(losses[0] - error[0], 0.1 * away, rtol=1e-2)


def test_nothing_is_sent_of_rows_that_an_agent_lacks():
    config = FedDMVCConfig(K, **SMALL)

    @jit
    def sent(key, x):
        networks = client_lib.init_autoencoder(key, config, 6)
        state = client_lib.ClientState(networks, jnp.ones((K, 4)), jnp.bool_(True), None)
        return client_lib.upload(state, x, jnp.asarray(HELD[0]))

    x = np.where(HELD[0][:, None], views()[0], 9.0).astype(np.float32)
    for part in sent(jax.random.key(1), x):
        np.testing.assert_array_equal(np.asarray(part).any(axis=1), HELD[0])


# --- The server -----------------------------------------------------------------------------------


def test_renumbering_is_the_best_matching():
    rng = np.random.default_rng(0)
    match = jit(functools.partial(server_lib.renumbering, n_clusters=5))
    for _ in range(5):
        new, old, where = rng.integers(0, 5, 30), rng.integers(0, 4, 30), rng.random(30) < 0.8
        order = np.asarray(match(new, old, where))
        overlap = np.zeros((5, 5))
        np.add.at(overlap, (new[where], old[where]), 1)
        rows, columns = linear_sum_assignment(-overlap)
        assert sorted(order) == list(range(5))
        assert overlap[order, np.arange(5)].sum() == overlap[rows, columns].sum()


def test_agents_clusters_get_common_numbers():
    turns = ([2, 0, 1], [1, 0, 2])
    p = np.stack([np.eye(K)[TRUTH][:, turn] for turn in turns], axis=1).astype(np.float32)
    p[~COMPLETE] = p[~COMPLETE][:, :, ::-1]  # what does not count must not turn it
    found = np.asarray(jit(server_lib.matched)(p, TRUTH, COMPLETE))
    assert (found[COMPLETE].argmax(-1) == TRUTH[COMPLETE][:, None]).all()
    np.testing.assert_array_equal(np.sort(found, -1), np.sort(p, -1))


def test_the_numbers_that_an_agent_gives_its_clusters_change_nothing_at_first():
    upload, held = uploads()
    find = jit(
        lambda p: server_lib.aggregate(
            jax.random.key(0), upload._replace(p=p), held, None, FedDMVCConfig(K, n_init=4), None
        )
    )
    turned = np.array(upload.p)
    turned[:, 1] = turned[:, 1][:, [2, 0, 1]]
    expected, turned = find(upload.p), find(turned)
    np.testing.assert_array_equal(turned.labels, expected.labels)
    np.testing.assert_allclose(turned.embedding, expected.embedding, rtol=1e-5)


def test_mean_assignment_and_extension():
    upload, held = uploads()
    p = np.asarray(upload.p)
    qbar = np.asarray(jit(server_lib.mean_over_agents)(upload.p, held))
    np.testing.assert_allclose(qbar[COMPLETE], p[COMPLETE].mean(1), rtol=1e-5)
    np.testing.assert_allclose(qbar[3], p[3, 1], rtol=1e-5)
    assert (qbar[6] == 0).all()
    prototypes = np.random.default_rng(1).normal(size=(K, 2, 4))
    found = jit(extension)(qbar, np.float32(prototypes))
    np.testing.assert_allclose(found[:, 1], qbar @ prototypes[:, 1], rtol=1e-3, atol=1e-5)


def test_rows_of_length_one_in_absolute_values():
    z = np.float32([[[1.0, -3.0], [0.0, 0.0]]])
    np.testing.assert_allclose(jit(server_lib.l1_rows)(z), [[[0.25, -0.75], [0, 0]]])


def silhouette_in_numpy(z, held, labels):
    values = []
    for i in np.flatnonzero(labels >= 0):
        distance = np.full(K, np.inf)
        for k in range(K):
            squares = 0.0
            for a in np.flatnonzero(held[i]):
                members = (labels == k) & held[:, a]
                squares += (
                    ((z[i, a] - z[members, a].mean(0)) ** 2).sum() if members.any() else np.inf
                )
            distance[k] = squares**0.5
        a, b = distance[labels[i]], np.delete(distance, labels[i]).min()
        values.append((b - a) / max(a, b) if np.isfinite(b) else 0.0)
    return np.mean(values)


def test_silhouette_counts_what_agents_hold():
    upload, held = uploads()
    score = jit(functools.partial(server_lib.simplified_silhouette, n_clusters=K))
    for labels in (TRUTH, (TRUTH + np.arange(N) // 9) % K, np.where(TRUTH == 2, 0, TRUTH)):
        labels = np.where(REAL, labels, -1)
        expected = silhouette_in_numpy(np.asarray(upload.z, float), np.asarray(held), labels)
        np.testing.assert_allclose(score(upload.z, held, labels), expected, rtol=1e-3, atol=1e-5)
        dirty = jnp.where(held[..., None], upload.z, 50.0)
        np.testing.assert_allclose(score(dirty, held, labels), expected, rtol=1e-3, atol=1e-5)
    assert score(upload.z, held, np.where(REAL, 1, -1)) == 0.0  # a single cluster
    # A cluster of which one agent holds nothing is far from rows that this agent holds.
    lone = np.where(REAL, np.where(np.arange(N) == 3, 2, TRUTH % 2), -1)
    expected = silhouette_in_numpy(np.asarray(upload.z, float), np.asarray(held), lone)
    np.testing.assert_allclose(score(upload.z, held, lone), expected, rtol=1e-3, atol=1e-5)


def test_networks_learn_a_view_from_the_others_prototypes():
    """Where a view's encoding is a function of the cluster, they fill in its values."""
    held, prototypes = HELD.T, np.random.default_rng(0).normal(size=(K, 2, 4))
    p = np.where(held[..., None], np.eye(K)[TRUTH][:, None], 0.0)
    z = np.where(held[..., None], 2 * prototypes[TRUTH] + 1, 0.0)
    config = FCUIFConfig(K, imputer_hidden=(16,), imputer_epochs=300)
    impute = network_imputer(config, FCUIFHyperparams(imputer_rate=0.01))
    arrays = [jnp.float32(x) for x in (z, p, np.eye(K)[TRUTH], prototypes)]
    found = np.asarray(jit(impute)(jax.random.key(0), *arrays, jnp.asarray(held)))
    np.testing.assert_array_equal(found[held], np.float32(z)[held])
    missing = ~held & REAL[:, None]
    expected = 2 * prototypes[TRUTH] + 1
    np.testing.assert_allclose(found[missing], expected[missing], atol=0.05)


@pytest.mark.slow
def test_found_clusters_keep_their_numbers_and_only_complete_rows_teach_at_first():
    upload, held = uploads()
    config = FedDMVCConfig(K, n_init=4)

    @jit
    def twice(key):
        first = server_lib.aggregate(key, upload, held, None, config, None)
        turned = first._replace(targets=first.targets[:, ::-1], centroids=first.centroids[::-1])
        # In the numbers of what was found, as agents send them after a round.
        numbers = jnp.argmax(first.targets, axis=1)
        p = server_lib.matched(upload.p, numbers, jnp.asarray(COMPLETE))
        renumbered = upload._replace(p=p[..., ::-1])
        return first, server_lib.aggregate(key, renumbered, held, turned, config, None)

    first, second = twice(jax.random.key(0))
    np.testing.assert_array_equal(first.guides, COMPLETE)
    np.testing.assert_array_equal(second.guides, REAL)
    assert not first.imputed and second.imputed
    np.testing.assert_allclose(second.targets, first.targets[:, ::-1], atol=1e-5)
    np.testing.assert_allclose(second.centroids, first.centroids[::-1], atol=1e-5)
    for found in (first, second):
        labels = np.asarray(found.labels)
        assert labels[6] == -1 and adjusted_rand_score(TRUTH[REAL], labels[REAL]) == 1.0
        assert (np.asarray(found.embedding)[6] == 0).all()


@pytest.mark.ci
def test_rows_that_were_filled_in_teach_where_they_fit_their_clusters(monkeypatch):
    """k-means is given: the planted clusters of complete rows, and good or bad ones of all rows."""
    upload, held = uploads()
    bad = np.where(COMPLETE, TRUTH, (TRUTH + 1) % K)  # of filled-in rows to the wrong clusters
    config, none = FedDMVCConfig(K), jnp.bool_(False)
    before = server_lib.Clusters(
        jnp.zeros((K, 2, 4)), jnp.eye(K)[TRUTH], jnp.asarray(COMPLETE), None, None, none
    )

    @jit
    def aggregated(good):
        labels = [jnp.where(good, TRUTH, bad), jnp.asarray(TRUTH)]

        def given(key, x, n_clusters, *, where, n_init, centroids=None):
            mine = jnp.where(where, labels.pop(), -1)
            return KMeansResult(means_of(x, mine, K)[0], mine, jnp.float32(0), jnp.int32(1))

        monkeypatch.setattr(server_lib, "kmeans", given)
        impute = lambda key, z, p, qbar, prototypes, held: z  # noqa: E731
        return server_lib.aggregate(jax.random.key(0), upload, held, before, config, impute)

    for good, rows in ((True, REAL), (False, COMPLETE)):
        found = aggregated(good)
        assert found.imputed == good
        np.testing.assert_array_equal(found.guides, rows)
        means = [np.asarray(upload.z)[rows & (TRUTH == k)].mean(axis=0) for k in range(K)]
        np.testing.assert_allclose(found.centroids, means, rtol=1e-4, atol=1e-5)


# --- The methods ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcuif", pytest.param("feddmvc", marks=pytest.mark.slow)])
def test_planted_clusters_are_found_with_rows_missing(name, result):
    found = result if name == "fcuif" else program(vertical(views()), jax.random.key(0), name)
    for labels, held in zip(found.labels, HELD, strict=True):
        labels = np.asarray(labels[0])
        assert (labels[~held] == -1).all()
        assert adjusted_rand_score(TRUTH[held], labels[held]) == 1.0
    labels = np.asarray(found.state.server.clusters.labels)
    assert labels[6] == -1 and adjusted_rand_score(TRUTH[REAL], labels[REAL]) == 1.0
    assert found.info["setup"][0]["server"]["guiding"] == np.float32(COMPLETE.sum() / REAL.sum())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcuif", "feddmvc"])
def test_rows_that_an_agent_lacks_are_never_read(name):
    expected = program(vertical(views()), jax.random.key(0), name)
    for fill in (9.0, np.nan):
        found = program(vertical(views(), fill=fill), jax.random.key(0), name)
        for one, two in zip(found.labels, expected.labels, strict=True):
            np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(
            found.state.server.clusters.embedding, expected.state.server.clusters.embedding
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcuif", "feddmvc"])
def test_the_order_of_rows_decides_nothing(name):
    order = np.random.default_rng(3).permutation(N)
    shuffled = vertical([x[order] for x in views()], HELD[:, order])
    found = program(shuffled, jax.random.key(0), name).state.server.clusters.labels
    assert adjusted_rand_score(TRUTH[order][REAL[order]], np.asarray(found)[REAL[order]]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcuif", "feddmvc"])
def test_fewer_distinct_rows_than_clusters_give_numbers(name):
    x = [np.where((np.arange(N) % 2)[:, None], x[:1], -x[:1]) for x in views()]
    found = program(vertical(x), jax.random.key(0), name)
    leaves = jax.tree.leaves((found.labels, found.state.server))
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in leaves)


@pytest.mark.slow
def test_agents_are_sent_targets_of_rows_that_they_hold_and_follow(result):
    phase = fcuif(FCUIFConfig(K, **SMALL)).round[0]
    state = result.state.server
    for imputed in (False, True):
        guides = jnp.asarray(REAL if imputed else COMPLETE)
        clusters = state.clusters._replace(guides=guides)
        for a, held in enumerate(HELD):
            sent = phase.broadcast(state._replace(clusters=clusters), (a,))
            some = np.asarray(sent.targets).sum(1) > 0
            np.testing.assert_array_equal(some, np.asarray(guides) & held)
            np.testing.assert_array_equal(sent.centroids, clusters.centroids[:, a])


# --- Rows in orders of the agents' own ------------------------------------------------------------


def test_alignment_learns_from_aligned_rows_which_clusters_belong_together():
    """Agents number clusters alike; agent 1 has every second row elsewhere."""
    rng = np.random.default_rng(0)
    n, c, d = 40, 4, 3
    same, truth = np.arange(n) % 2 == 0, rng.integers(c, size=n)
    p = (0.8 * np.eye(c)[truth] + 0.2 * rng.dirichlet(np.ones(c), size=n)).astype(np.float32)
    prototypes = 3 * rng.normal(size=(c, 2, d)).astype(np.float32)
    order = np.arange(n)
    order[~same] = rng.permutation(order[~same])  # agent 1 has sample order[k] in row k
    z, ps = np.einsum("nc,cad->nad", p, prototypes), np.stack([p, p[order]], axis=1)
    assert (truth[order] != truth)[~same].mean() > 0.5
    sent = z.copy()
    sent[:, 1] = z[order, 1]
    config = FCUIFConfig(c, align=True, align_steps=300, latent_dim=d)
    align = jit(network_aligner(config, FCUIFHyperparams(align_rate=0.01)))
    found = align(jax.random.key(0), sent, ps, prototypes, same, ~same)
    np.testing.assert_array_equal(found.places[:, 0], np.arange(n))
    np.testing.assert_array_equal(found.places[same, 1], np.arange(n)[same])
    np.testing.assert_array_equal(found.z[same], sent[same])
    np.testing.assert_array_equal(found.z[:, 0], sent[:, 0])
    np.testing.assert_array_equal(np.argmax(found.p[:, 1], axis=1), truth)
    np.testing.assert_array_equal(truth[np.asarray(found.places[:, 1])], truth[order])
    before, after = (np.abs(x[~same, 1] - z[~same, 1]).mean() for x in (sent, np.asarray(found.z)))
    assert after < 0.25 * before


@pytest.mark.slow
def test_clusters_of_shuffled_rows_are_found_and_come_back_to_their_rows():
    partition = shuffle_places(0, vertical_partition(N, 2), 0.5)
    federation = Federation.from_arrays(views(), TRUTH, partition=partition)
    moved = partition[1].sample_ids[0] != np.arange(N)
    assert 8 <= moved.sum() <= 12
    config = FCUIFConfig(K, imputer_epochs=20, align=True, **SMALL)
    hyper = FCUIFHyperparams(0.1, 0.01, align_rate=0.01)
    result = jit(lambda f: engine.run(fcuif(config, hyper), f, jax.random.key(0), 2))(federation)
    for labels, part in zip(result.labels, partition, strict=True):
        assert adjusted_rand_score(TRUTH[part.sample_ids[0]], np.asarray(labels[0])) == 1.0
    assert result.info["setup"][0]["server"]["guiding"] == np.float32((~moved).mean())
    # Without alignment such rows are refused.
    with pytest.raises(ValueError, match="agent 1: its samples differ"):
        engine.start(fcuif(FCUIFConfig(K, **SMALL)), federation, jax.random.key(0))


def test_rows_that_are_aligned_stay_where_they_are():
    config = FCUIFConfig(K, imputer_epochs=20, align=True, **SMALL)
    algorithm = fcuif(config, FCUIFHyperparams(0.1, 0.01))
    clients = vertical(views())
    started = jit(lambda key: engine.start(algorithm, clients, key))(jax.random.key(0))
    assert np.asarray(started.server.same).all()
    np.testing.assert_array_equal(
        started.server.clusters.places, np.arange(N)[:, None].repeat(2, 1)
    )


def test_more_rows_than_pairs_of_them_fit_are_refused_with_align_only():
    rows = 22361
    ids = np.arange(rows, dtype=np.int32)[None]
    x = [np.ones((rows, 1), np.float32)] * 2
    parts = [Part((a,), ids, np.array([a])) for a in range(2)]
    federation = Federation.from_arrays(x, np.zeros(rows, int), partition=parts)
    small = FCUIFConfig(K, **SMALL)
    with pytest.raises(ValueError, match=r"FCUIF: got 22361 rows, .* allowed is 22360 or fewer"):
        fcuif(dataclasses.replace(small, align=True)).init(jax.random.key(0), federation)
    fcuif(small).init(jax.random.key(0), federation)


def test_a_shuffled_row_has_to_be_held_by_all():
    partition = list(shuffle_places(0, vertical_partition(N, 2), 0.5))
    ids = partition[1].sample_ids.copy()
    ids[0, np.flatnonzero(ids[0] != np.arange(N))[0]] = -1
    third = Part((2,), np.arange(N, dtype=np.int32)[None], np.array([2]))
    x = [*views(), views()[0]]
    parts = [
        partition[0],
        partition[1]._replace(sample_ids=ids),
        third._replace(sample_ids=partition[1].sample_ids),
    ]
    federation = Federation.from_arrays(x, TRUTH, partition=parts)
    with pytest.raises(ValueError, match="which one of them lacks"):
        engine.start(fcuif(FCUIFConfig(K, align=True, **SMALL)), federation, jax.random.key(0))


def test_bytes_are_encodings_and_clusters_up_and_targets_down():
    traffic = engine.traffic(fcuif(FCUIFConfig(K, **SMALL)), vertical(views()))
    assert traffic["setup"] == (2 * 4 * N * (4 + K), 0)
    assert traffic["round"] == (2 * 4 * N * (4 + K), 2 * 4 * (N * K + K * 4))
    assert traffic["finish"] == (0, 2 * 4 * N)


def test_bad_input_is_named():
    for settings in (
        {"n_clusters": 0},
        {"latent_dim": 0},
        {"hidden": (0,)},
        {"batch_size": 0},
        {"n_init": 0},
        {"pretrain_epochs": -1},
        {"local_epochs": -1},
        {"normalise": "l2"},
        {"imputer_hidden": (0,)},
        {"imputer_epochs": -1},
    ):
        with pytest.raises(ValueError, match=f"^{next(iter(settings))}: got"):
            FCUIFConfig(**({"n_clusters": 2} | settings))
    for name, value in {
        "guidance": -1,
        "learning_rate": 0,
        "imputer_rate": 0,
        "align_rate": 0,
        "align_weight": -1,
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: got {value}"):
            fcuif(FCUIFConfig(2), FCUIFHyperparams(**{name: value}))
    algorithm, key = feddmvc(FedDMVCConfig(K, **SMALL)), jax.random.key(0)
    with pytest.raises(ValueError, match="got one agent; FedDMVC needs two"):
        engine.start(algorithm, vertical(views()[:1], HELD[:1]), key)
    halves = np.stack([np.arange(N) < 13, np.arange(N) > 10])
    with pytest.raises(ValueError, match="FedDMVC: 2 samples are held by all agents; allowed is 3"):
        engine.start(algorithm, vertical(views(), halves), key)
    few = np.stack([np.arange(N) < 2, np.ones(N, bool)])
    with pytest.raises(ValueError, match=r"client 0 .* 2 samples; allowed is 3"):
        engine.start(algorithm, vertical(views(), few), key)
