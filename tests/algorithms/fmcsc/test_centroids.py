"""Common centroids, a leader's and federated ones, and what clients make of them."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import KMeans

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fmcsc import FMCSCHyperparams
from jaxfedmvc.algorithms.fmcsc import centroids as centroids_module
from jaxfedmvc.algorithms.fmcsc.centroids import phases as centroids_of
from jaxfedmvc.algorithms.fmcsc.server import ServerState
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.federation import Cohort
from tests.algorithms.fmcsc.by_numpy import np_features
from tests.algorithms.fmcsc.tiny import (
    CONFIG,
    DIMS,
    FULL,
    KEY,
    NOTHING,
    K,
    at,
    build,
    client_program,
    close,
    jit,
    members,
    real_views,
)


@pytest.fixture(scope="module")
def finished(federation, pretrained):
    return jit(functools.partial(engine.finish, build(), round_index=0))(
        federation, KEY, pretrained
    )[0]


@pytest.mark.slow
def test_only_centroids_travel(federation, pretrained, finished):
    phase, result = build().finish
    assert phase.who == "leader" and result.who == "everyone"
    # In the end every client is sent what it clusters with, and sends nothing.
    view_ids = federation.cohorts[1].view_ids
    sent = result.broadcast(finished.server, view_ids)
    chex.assert_trees_all_equal(sent, (finished.server.models[view_ids], finished.server.centroids))
    assert result.client(KEY, sent, (), at(federation.cohorts[1], 0))[1] == ()
    client = at(federation.cohorts[0], 1)
    sent = phase.broadcast(pretrained.server, FULL)
    _, message, _ = jax.eval_shape(phase.client, KEY, sent, NOTHING, client)
    assert [leaf.shape for leaf in jax.tree.leaves(message)] == [(K, CONFIG.latent_dim)]
    chex.assert_trees_all_equal(finished.server.models, pretrained.server.models)
    # They are means of groups of the leader's rows.
    h = np_features(pretrained.server.models[FULL], real_views(client))["h"]
    groups = np.argmin(((h[:, None] - np.asarray(finished.server.centroids)) ** 2).sum(-1), axis=1)
    assert set(groups) == set(range(K))
    means = np.stack([h[groups == c].mean(axis=0) for c in range(K)])
    np.testing.assert_allclose(finished.server.centroids, means, atol=1e-5)


@pytest.mark.slow
def test_federated_centroids_are_lloyds_on_all_rows(federation, pretrained):
    """From k-means of all clients' own centroids; sums and counts are all that travels."""
    algorithm = build(centroids="federated", centroid_rounds=3)
    clients = engine.start(algorithm, federation, KEY).clients
    state = pretrained._replace(clients=clients)
    first, *steps, last = algorithm.finish
    assert len(steps) == 3 and all(phase.reduce == "sum" for phase in steps)
    ended, _ = jit(functools.partial(engine.finish, algorithm, round_index=0))(
        federation, KEY, state
    )
    begun, _ = jit(
        functools.partial(engine.finish, algorithm._replace(finish=(first,)), round_index=0)
    )(federation, KEY, state)
    rows = [
        np_features(pretrained.server.models[client.view_ids], real_views(client))["h"]
        for _, _, _, client in members(federation)
    ]
    everything, centroids = np.concatenate(rows), np.asarray(begun.server.centroids)
    for _ in range(3):
        nearest = np.argmin(((everything[:, None] - centroids) ** 2).sum(-1), axis=1)
        centroids = np.stack([everything[nearest == k].mean(axis=0) for k in range(K)])
    close(ended.server.centroids, centroids, rtol=1e-3)
    # The first exchange: centroids of a client's own rows, and how many rows each has.
    client = at(federation.cohorts[1], 1)
    sent = first.broadcast(state.server, client.view_ids)
    kept, (own, sizes, number), _ = client_program(first.client)(
        KEY, sent, at(state.clients[1], 1), client
    )
    assert number == client.client_ids
    h = np_features(sent, real_views(client))["h"]
    close(np.asarray(kept.h)[np.asarray(client.mask)], h)
    groups = np.argmin(((h[:, None] - np.asarray(own)) ** 2).sum(-1), axis=1)
    np.testing.assert_array_equal(sizes, np.bincount(groups, minlength=K))
    message = jax.eval_shape(steps[0].client, KEY, own, kept, client)[1]
    assert [x.shape for x in message] == [(K, CONFIG.latent_dim), (K,)]
    assert last.broadcast(ended.server, FULL).shape == (K, CONFIG.latent_dim)
    # A client's rows go to the nearest, padding to none.
    labels = np.asarray(jit(algorithm.assign)(ended.server, kept, client))
    real = np.asarray(client.mask)
    final = np.asarray(ended.server.centroids)
    np.testing.assert_array_equal(
        labels[real], np.argmin(((h[:, None] - final) ** 2).sum(-1), axis=1)
    )
    assert (labels[~real] == -1).all()


def test_no_row_of_h_travels_alone_with_a_least_cluster_size(federation):
    """One row is nearest to the second centroid: its sum is that row, and is not sent."""
    plain, guarded = (
        build(centroids="federated", min_cluster_size=least).finish[1] for least in (None, 2)
    )
    client = at(jax.device_get(federation.cohorts[1]), 0)
    h = np.zeros((len(client.mask), CONFIG.latent_dim), np.float32)
    h[0] = 5
    assert client.mask[0]
    centroids = h[[1, 0]]
    state = NOTHING._replace(h=h)
    _, (sums, sizes), _ = client_program(plain.client)(KEY, centroids, state, client)
    rows = client.mask.sum()
    np.testing.assert_array_equal(sums[1], h[0])
    np.testing.assert_array_equal(sizes, [rows - 1, 1])
    _, (sums, sizes), _ = client_program(guarded.client)(KEY, centroids, state, client)
    np.testing.assert_array_equal(sums[1], 0)
    np.testing.assert_array_equal(sizes, [rows - 1, 0])


@pytest.mark.ci
def test_own_centroids_of_small_clusters_are_not_sent_and_not_counted(federation, pretrained):
    plain, guarded = (
        build(centroids="federated", min_cluster_size=least).finish[0] for least in (None, 4)
    )
    client = at(federation.cohorts[1], 1)  # of six rows: two clusters of four it cannot have
    sent = plain.broadcast(pretrained.server, client.view_ids)
    state = NOTHING._replace(h=jnp.zeros((len(client.mask), CONFIG.latent_dim)))
    _, (own, sizes, _), _ = client_program(plain.client)(KEY, sent, state, client)
    _, (kept, left, _), _ = client_program(guarded.client)(KEY, sent, state, client)
    large = np.asarray(sizes) >= 4
    assert not large.all() and int(sizes.sum()) == 6
    np.testing.assert_array_equal(left, np.where(large, sizes, 0))
    close(kept, np.where(large[:, None], own, 0))


@pytest.mark.parametrize("starts", [1, 3])
def test_the_order_of_clients_makes_no_difference_nor_does_one_that_is_absent(started, starts):
    """Seeds are drawn by place, which would be another one for each order."""
    phase = build(centroids="federated", centroid_starts=starts).finish[0]
    rng = np.random.default_rng(2)
    centroids = rng.normal(size=(6, K, CONFIG.latent_dim)).astype(np.float32)
    sizes = rng.integers(1, 9, size=(6, K)).astype(np.float32)
    server = started.server._replace(starts=np.float32(0))
    place = np.arange(6)
    draw = jit(phase.server)
    found = []
    for order in (np.arange(6), np.array([3, 0, 4, 2, 5, 1])):
        message = centroids[order], sizes[order], place[order]
        found.append(draw(KEY, server, (message,), (np.float32(order < 5),))[0])
    centroids[5], sizes[5] = 50, 90
    message = centroids, sizes, place
    found.append(draw(KEY, server, (message,), (np.float32(place < 5),))[0])
    cohorts = [
        ([x[part] for x in message], np.float32(place[part] < 5)) for part in (place[:3], place[3:])
    ]
    for order in (cohorts, cohorts[::-1]):
        found.append(draw(KEY, server, *zip(*order, strict=True))[0])
    for other in found[1:]:
        chex.assert_trees_all_equal(
            (found[0].centroids, found[0].starts), (other.centroids, other.starts)
        )


def test_a_centroid_without_rows_stays_where_it_is():
    config = dataclasses.replace(CONFIG, centroids="federated", centroid_rounds=1)
    move = centroids_of(config, FMCSCHyperparams())[1].server
    server = ServerState({}, np.float32([[1.0, 1.0], [5.0, 6.0]]))
    sums = np.float32([[2.0, 8.0], [0.0, 0.0]]), np.float32([2.0, 0.0])
    moved, _ = jit(move)(KEY, server, (sums, sums), (1, 1))
    np.testing.assert_array_equal(moved.centroids, [[1.0, 4.0], [5.0, 6.0]])


def test_means_that_are_sent_with_a_guard_are_of_the_rows_that_it_counts(
    federation, pretrained, monkeypatch
):
    """Where k-means stops, its centroids are means of the labels before."""

    def stopped(*arguments, **settings):
        return kmeans(*arguments, **settings)._replace(centroids=jnp.full((3, 4), 9.0))

    monkeypatch.setattr(centroids_module, "kmeans", stopped)
    config = dataclasses.replace(
        CONFIG, n_clusters=3, centroids="federated", centroid_rounds=1, min_cluster_size=1
    )
    phase = centroids_of(config, FMCSCHyperparams(limit=2))[0]
    client = at(jax.device_get(federation.cohorts[1]), 0)
    sent = phase.broadcast(pretrained.server, client.view_ids)
    kept, (means, sizes, _), _ = jit(phase.client)(KEY, sent, NOTHING, client)
    sizes, means = np.asarray(sizes), np.asarray(means)
    assert sizes[2] == 0 and np.all(sizes[:2] > 0)  # clusters beyond the limit have no rows
    rows = np.asarray(kept.h)[np.asarray(client.mask)]
    assert sizes.sum() == len(rows)
    away = ((rows[:, None] - means[None, :2]) ** 2).sum(-1)
    expected = [rows[away.argmin(1) == k].mean(0) for k in range(2)]
    np.testing.assert_allclose(means[:2], expected, atol=1e-5)


def new_clients(view_ids, n=3, rows=9):
    rng = np.random.default_rng(8)
    return Cohort(
        views=tuple(rng.normal(size=(n, rows, DIMS[v])).astype(np.float32) for v in view_ids),
        mask=np.arange(rows) < np.array([9, 6, 7])[:, None],
        sample_ids=np.zeros((n, rows), np.int32),
        client_ids=np.arange(100, 100 + n),
        view_ids=view_ids,
    )


@pytest.mark.slow
@pytest.mark.parametrize("view_ids", [FULL, (2,)])
def test_new_clients_cluster_from_the_centroids(finished, view_ids):
    """They took no part and keep no state; view 2 alone was held by nobody."""
    cohort, algorithm = new_clients(view_ids), build()
    h = jit(jax.vmap(algorithm.embed, (None, None, 0)))(finished.server, (), cohort)
    # The two rows farthest apart: none loses all its rows, of which scikit-learn has other ideas.
    pair = np.unravel_index(np.argmin(h[0] @ h[0].T), (h.shape[1],) * 2)
    passed = h[0, np.array(pair)]
    server = finished.server._replace(centroids=passed)
    assign = jit(jax.vmap(algorithm.assign, (None, None, 0)))
    labels = np.asarray(assign(server, (), cohort))
    for i in range(cohort.n_clients):
        client = at(cohort, i)
        real = np.asarray(client.mask)
        x = np_features(server.models[view_ids], real_views(client))["h"]
        close(np.asarray(h[i])[real], x)
        start = np.asarray(passed, np.float64)
        expected = KMeans(K, init=start, n_init=1, tol=1e-4).fit(x).labels_
        assert set(expected) == set(range(K))
        np.testing.assert_array_equal(labels[i][real], expected)
        assert (labels[i][~real] == -1).all()
    turned = np.asarray(assign(server._replace(centroids=passed[::-1]), (), cohort))
    np.testing.assert_array_equal(turned, np.where(labels < 0, -1, 1 - labels))


def test_views_without_a_model_are_refused(pretrained):
    client = at(new_clients((0, 1)), 0)
    for function in (build().assign, build().embed):
        with pytest.raises(ValueError, match=r"holds views \(0, 1\); there are global models"):
            function(pretrained.server, (), client)


@pytest.mark.parametrize("limit", [None, 2])
def test_of_several_starts_the_one_of_least_inertia_counts(limit):
    """Each start makes Lloyd's steps on all rows; sums, sizes and inertias are all that travels."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(n, CONFIG.latent_dim)).astype(np.float32) for n in (9, 14)]
    k, size = K, K if limit is None else limit + 1
    config = dataclasses.replace(
        CONFIG, n_clusters=size, centroids="federated", centroid_rounds=2, centroid_starts=5
    )
    own, first, _, last = centroids_of(config, FMCSCHyperparams(limit=limit))
    server = ServerState({}, np.zeros((size, 3)), np.zeros((5, size, CONFIG.latent_dim)))
    found = [KMeans(k, n_init=1, random_state=0).fit(x) for x in rows]
    more = ((0, 0), (0, size - k), (0, 0))
    message = (
        np.pad(np.float32([f.cluster_centers_ for f in found]), more),
        np.float32([np.bincount(f.labels_, minlength=size) for f in found]),
        np.arange(2),
    )
    server, _ = jit(own.server)(KEY, server, (message,), (np.ones(2, np.float32),))
    starts = np.asarray(server.starts)[:, :k]
    for _ in range(2):
        replies = []
        for x in rows:
            # As many rows for both clients: one program.
            padded = np.concatenate([x, np.full((16 - len(x), CONFIG.latent_dim), 50, np.float32)])
            client = Cohort((), np.arange(16) < len(x), None, None, ())
            state = NOTHING._replace(h=padded)
            replies.append(client_program(first.client)(KEY, server.starts, state, client)[1])
        total = jax.tree.map(np.add, *jax.device_get(replies))
        server, info = client_program(first.server)(KEY, server, (total,), (2,))
        everything = np.concatenate(rows)
        squares = ((everything[None, :, None] - starts[:, None]) ** 2).sum(-1)
        np.testing.assert_allclose(info["inertia"], squares.min(-1).sum(-1), rtol=1e-4)
        nearest = squares.argmin(-1)
        starts = np.stack(
            [
                [everything[n == j].mean(0) if (n == j).any() else c[j] for j in range(k)]
                for n, c in zip(nearest, starts, strict=True)
            ]
        )
    np.testing.assert_allclose(np.asarray(server.starts)[:, :k], starts, rtol=1e-4, atol=1e-5)
    best = np.argmin(np.asarray(info["inertia"]))
    np.testing.assert_array_equal(server.centroids, np.asarray(server.starts)[best])
    assert last.broadcast(server, FULL).shape == (size, CONFIG.latent_dim)
