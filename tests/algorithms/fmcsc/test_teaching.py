"""Classifiers of single views: sums of clients against a regression on all of their rows."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
from sklearn.linear_model import Ridge

from jaxfedmvc import engine
from jaxfedmvc.algorithm import with_phases
from jaxfedmvc.algorithms.fmcsc import FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.fmcsc.random_features import (
    Block,
    patch_features,
    random_features,
    row_features,
)
from jaxfedmvc.algorithms.fmcsc.teaching import PATCH_RIDGE, RIDGE, Sums, check_federation
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation
from tests.algorithms.fmcsc.by_numpy import np_features
from tests.algorithms.fmcsc.tiny import (
    BRANCHES,
    CONFIG,
    DIMS,
    FULL,
    HYPER,
    KEY,
    PAIR,
    K,
    at,
    jit,
    make_federation,
    members,
    real_views,
)

M = 64  # more than all rows
TEACHES = dataclasses.replace(
    CONFIG, teach_features=M, centroids="federated", centroid_rounds=1, **BRANCHES
)
SEVERAL = ((FULL, {3: 8, 0: 5}), (PAIR, {2: 8}))
SINGLE = ((FULL, {3: 8, 0: 5, 5: 6}), ((1,), {1: 7, 4: 6}), ((2,), {2: 8, 6: 5}))


@functools.cache
def taught(config=TEACHES, ridge=RIDGE, several=False):
    """The federation, and the state after the exchanges of the end, of models as they start."""
    hyper = HYPER.replace(teach_ridge=ridge)
    federation, algorithm = make_federation(SEVERAL if several else SINGLE), fmcsc(config, hyper)

    def run(federation):
        state = engine.start(algorithm, federation, KEY)
        state, _ = engine.finish(algorithm, federation, KEY, state, 0)
        return state, engine.assign(algorithm, federation, state)

    return federation, *jit(run)(federation)


jit_features = jit(random_features, static_argnums=0)


def described(one, *rows):
    """Random features of rows, NumPy."""
    return np.asarray(jit_features(M, one.seed, one.blocks, rows))


@functools.cache
def started(config):
    """The state before any exchange, of clients with all views and with single ones."""
    return jit(functools.partial(engine.start, fmcsc(config, HYPER)))(make_federation(SINGLE), KEY)


def clusters(one, *rows):
    scores = described(one, *rows) @ np.asarray(one.weights) + np.asarray(one.shares)
    return scores.argmax(axis=1)


def rows_of(federation, server, kind):
    """Rows, Z and clusters of all clients with all views, NumPy."""
    x, z, labels = [], [], []
    for c, _, _, client in members(federation):
        if federation.cohorts[c].view_ids == FULL:
            views = real_views(client)
            held = {v: views[v] for v in kind}
            x.append(np.concatenate([held[v] for v in kind], axis=1))
            found = np_features(server.models[kind], held)["z"]
            z.append(np.concatenate([found[v] for v in kind], axis=1))
            h = np_features(server.models[FULL], views)["h"]
            away = ((h[:, None] - np.asarray(server.centroids)) ** 2).sum(-1)
            labels.append(away.argmin(axis=1))
    return np.concatenate(x), np.concatenate(z), np.concatenate(labels)


@pytest.mark.ci
@pytest.mark.parametrize("kind", [(0,), (1,), (2,)])
def test_sums_of_clients_are_a_ridge_regression_of_all_rows(kind):
    federation, state, _ = taught()
    one = state.server.taught[kind]
    x, z, labels = rows_of(federation, state.server, kind)
    for block, rows in zip(one.blocks, (x, z), strict=True):
        np.testing.assert_allclose(block.centre, rows.mean(axis=0), atol=1e-5)
        np.testing.assert_allclose(block.scale, rows.var(axis=0).sum() ** -0.5, rtol=1e-4)
    y = np.eye(K)[labels]
    np.testing.assert_allclose(one.shares, y.mean(axis=0), atol=1e-6)
    model = Ridge(RIDGE, fit_intercept=False)
    model.fit(described(one, x, z), y - y.mean(axis=0))
    np.testing.assert_allclose(one.weights, model.coef_.T, atol=2e-4)


@pytest.mark.ci
def test_partial_clients_are_put_where_the_regression_says_and_others_stay():
    federation, state, labels = taught()
    stays, told = [], {}
    for c, i, _, client in members(federation):
        kind, mine = federation.cohorts[c].view_ids, np.asarray(labels[c][i])
        assert (mine[~np.asarray(client.mask)] == -1).all()
        if kind == FULL:
            stays.append(mine[np.asarray(client.mask)])
        else:
            views = real_views(client)
            z = np_features(state.server.models[kind], views)["z"]
            told.setdefault(kind, []).append(
                (views[kind[0]], z[kind[0]], mine[np.asarray(client.mask)])
            )
    for kind, of_clients in told.items():
        x, z, mine = map(np.concatenate, zip(*of_clients, strict=True))
        np.testing.assert_array_equal(mine, clusters(state.server.taught[kind], x, z))
    *_, nearest = rows_of(federation, state.server, (0,))
    np.testing.assert_array_equal(np.concatenate(stays), nearest)


@pytest.mark.slow
def test_what_is_taught_is_learned():
    """With more features than rows and hardly a ridge, every view tells its teachers' clusters."""
    federation, state, _ = taught(ridge=1e-4)
    for kind in ((0,), (1,), (2,)):
        x, z, labels = rows_of(federation, state.server, kind)
        np.testing.assert_array_equal(clusters(state.server.taught[kind], x, z), labels)


def test_random_features_multiply_to_kernels():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
    blocks = tuple(Block(np.full(x.shape[1], 0.3), np.float32(0.4)) for x in rows)
    seed = np.array([1, 2], np.uint32)
    phi = np.asarray(jit_features(40_000, seed, blocks, rows))
    squares = [((0.4 * (x[:, None] - x[None])) ** 2).sum(-1) for x in rows]
    np.testing.assert_allclose(phi @ phi.T, sum(np.exp(-s / 2) for s in squares), atol=0.05)


# --- Images ---------------------------------------------------------------------------------------

SEED = np.array([3, 4], np.uint32)
# Of the smallest networks: what is taught here is of the images themselves.
PATCHES = dataclasses.replace(TEACHES, hidden=(), teach_features=2 * 16, teach_patches=3)
CENTROIDS = np.random.default_rng(5).normal(size=(K, CONFIG.latent_dim)).astype(np.float32)
patches = jit(patch_features, static_argnums=(0, 1))


def images(n, width, seed=0):
    return np.random.default_rng(seed).normal(size=(n, width**2)).astype(np.float32)


def by_loops(x, n_filters, side):
    """As `patch_features`, one image, pattern, part and patch after another."""
    key = jax.random.wrap_key_data(SEED, impl="threefry2x32")
    patterns = np.asarray(jax.random.normal(key, (side, side, n_filters)), float)
    width = int(len(x[0]) ** 0.5)
    bounds = np.round(np.linspace(0, width - side + 1, 5)).astype(int)
    found = np.zeros((len(x), 4, 4, n_filters))
    for i, image in enumerate(x.astype(float)):
        image = image.reshape(width, width)
        for k in range(n_filters):
            pattern = patterns[:, :, k] - patterns[:, :, k].mean()
            pattern /= np.linalg.norm(pattern)
            for a, b in np.ndindex(4, 4):
                likeness = []
                for row in range(bounds[a], bounds[a + 1]):
                    for column in range(bounds[b], bounds[b + 1]):
                        patch = image[row : row + side, column : column + side]
                        patch = patch - patch.mean()
                        norm = np.sqrt((patch**2).sum() + 0.01 * side**2 * image.var())
                        likeness.append(max((pattern * patch).sum() / norm, 0))
                found[i, a, b, k] = np.mean(likeness) ** 0.5
    found = found.reshape(len(x), -1)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def test_features_of_patches_are_those_of_loops():
    x = images(130, 9)  # more than are in memory at once
    found = np.asarray(patches(2, 3, SEED, x))
    assert found.shape == (130, 32)
    some = [0, 1, 129]
    np.testing.assert_allclose(found[some], by_loops(x[some], 2, 3), atol=1e-5)


def test_brightness_and_contrast_of_an_image_tell_nothing_and_one_without_any_has_no_features():
    x = images(3, 9)
    x[2] = 0.3
    found = patches(2, 3, SEED, x)
    np.testing.assert_allclose(patches(2, 3, SEED, 5 * x + 7), found, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), [1, 1, 0], atol=1e-5)


def test_views_of_several_images_share_the_features_and_have_patterns_of_their_own():
    views = {0: images(4, 9), 2: images(4, 9)}
    found = np.asarray(jit(row_features, static_argnums=0)(PATCHES, SEED, (), views, None))
    assert found.shape == (4, 32)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    first, second = np.split(found * np.sqrt(2), 2, axis=1)
    np.testing.assert_allclose(first, by_loops(images(4, 9), 1, 3), atol=1e-5)
    assert np.abs(first - second).max() > 0.05


@functools.cache
def taught_by_images(kind, ridge=PATCH_RIDGE, **settings):
    """24 rows of three images at two clients with all views, and 8 at one with some of them.

    Every other row is taught as in a cluster, whatever the networks, which were not trained, say.
    """
    part = [Part(FULL, np.arange(24).reshape(2, 12), np.arange(2, dtype=np.int32))]
    part.append(Part(kind, np.arange(24, 32).reshape(1, 8), np.array([2], np.int32)))
    views = [images(32, 7, seed) for seed in range(3)]
    run = image_program(dataclasses.replace(PATCHES, **settings))
    return views, *run(Federation.from_arrays(views, partition=part), ridge)


@functools.cache
def image_program(config):
    """One for all ridges."""

    def run(federation, ridge):
        algorithm = fmcsc(config, HYPER.replace(teach_ridge=ridge))
        # Without the exchanges that find centroids, which are given.
        first = len(algorithm.finish) - (4 if config.solves_again else 3)
        algorithm = algorithm._replace(finish=algorithm.finish[first:])

        def labelled(name, phase):
            def client(key, sent, state, client):
                state, *rest = phase.client(key, sent, state, client)
                if state.known:
                    state = state._replace(known=state.known._replace(labels=client.sample_ids % K))
                return state, *rest

            return phase._replace(client=client) if name == "finish[0]" else phase

        algorithm = with_phases(algorithm, labelled)
        state = engine.start(algorithm, federation, KEY)
        server = state.server._replace(centroids=CENTROIDS)
        state, _ = engine.finish(algorithm, federation, KEY, state._replace(server=server), 0)
        return state, engine.assign(algorithm, federation, state)

    return jit(run)


@pytest.mark.ci
def test_images_are_taught_by_a_ridge_regression_on_their_patches():
    views, state, labels = taught_by_images((1,))
    one, known = state.server.taught[1,], state.clients[0].known
    assert one.blocks == ()  # no sums of pixels travel
    seed = one.seed + np.uint32([0, 1])  # of view 1
    phi = np.split(np.asarray(patches(2, 3, seed, views[1])), [24])
    y = np.eye(K)[np.asarray(known.labels).ravel()]
    model = Ridge(PATCH_RIDGE, fit_intercept=False).fit(phi[0], y - y.mean(axis=0))
    np.testing.assert_allclose(one.weights, model.coef_.T, atol=2e-3)
    scores = phi[1] @ np.asarray(one.weights) + y.mean(axis=0)
    np.testing.assert_array_equal(labels[1][0], scores.argmax(axis=1))


@pytest.mark.ci
def test_one_classifier_is_taught_by_the_images_of_all_views():
    """By three images a row; a row of two images has the mean of their scores."""
    several = {"teach_together": True, "partial_models": "distilled", "target": "own"}
    views, state, labels = taught_by_images(PAIR, **several)
    (one,), known = state.server.taught.values(), state.clients[0].known
    assert known.z == {}  # which patches have no use for
    taught, told = zip(
        *(np.split(np.asarray(patches(2, 3, one.seed, x)), [24]) for x in views), strict=True
    )
    y = np.eye(K)[np.asarray(known.labels).ravel()]
    model = Ridge(PATCH_RIDGE, fit_intercept=False)
    model.fit(np.concatenate(taught), np.concatenate([y - y.mean(axis=0)] * 3))
    np.testing.assert_allclose(one.weights, model.coef_.T, atol=2e-3)
    np.testing.assert_allclose(one.shares, y.mean(axis=0), atol=1e-6)
    both = np.asarray(told[PAIR[0]] + told[PAIR[1]]) / 2
    scores = both @ np.asarray(one.weights) + y.mean(axis=0)
    np.testing.assert_array_equal(labels[1][0], scores.argmax(axis=1))


@pytest.mark.ci
@pytest.mark.parametrize(("together", "ridge"), [(False, 3.0), (True, 3.0), (False, 0.1)])
def test_rows_are_taught_again_where_the_others_and_all_views_put_them(together, ridge):
    """Against predictions without a row's own y, by its leverage, of all rows in one place."""
    views, after, labels = taught_by_images((1,), ridge, teach_together=together, teach_again=True)
    seeds = {kind: one.seed for kind, one in after.server.taught.items()}
    y = np.eye(K)[np.arange(24) % K]  # as they were taught first
    shares = y.mean(axis=0)
    seeds = [seeds[()] if together else seeds[v,] + np.uint32([0, v]) for v in range(3)]
    phi = [patches(2, 3, seed, x)[:24] for seed, x in zip(seeds, views, strict=True)]
    phi = np.asarray(phi, float)  # [views, rows, m]
    scores, leverages = np.zeros((24, K)), []
    for x in np.concatenate(phi)[None] if together else phi:
        inverse = np.linalg.inv(x.T @ x + ridge * np.eye(32))
        told = np.tile(y - shares, (len(x) // 24, 1))
        h = np.einsum("nm,mk,nk->n", x, inverse, x).mean()
        said = (x @ inverse @ x.T @ told).reshape(-1, 24, K).mean(axis=0)
        scores += (said - h * (y - shares)) / (1 - h) + shares
        leverages.append(h)
    known = np.asarray(after.clients[0].known.labels).ravel()
    old, new = y.argmax(axis=1), scores.argmax(axis=1)
    assert (new != old).any()
    # With a small ridge each row speaks for itself, and all of them stay.
    is_known = np.mean(leverages) <= 0.25
    assert is_known == (ridge == 3.0)
    np.testing.assert_array_equal(known, new if is_known else old)
    y, told = np.eye(K)[known], np.zeros((24, K))
    for kind, one in after.server.taught.items():
        x = np.concatenate(phi) if together else phi[kind[0]]
        model = Ridge(ridge, fit_intercept=False)
        model.fit(x, np.tile(y - y.mean(axis=0), (len(x) // 24, 1)))
        np.testing.assert_allclose(one.weights, model.coef_.T, atol=2e-3)
        np.testing.assert_allclose(one.shares, y.mean(axis=0), atol=1e-6)
        told += (x @ model.coef_.T).reshape(-1, 24, K).mean(axis=0) + y.mean(axis=0)
    # All views' classifiers have the last word on rows of clients with all views.
    np.testing.assert_array_equal(np.asarray(labels[0]).ravel(), told.argmax(axis=1))


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "together"), [((1,), False), (PAIR, True)])
def test_partial_clients_teach_rows_back_of_which_they_are_sure(kind, together):
    several = {"partial_models": "distilled", "target": "own"} if together else {}
    settings = {"teach_together": together, **several}
    views, state, centroids = taught_by_images(kind, 0.3, **settings)
    _, after, labels = taught_by_images(kind, 0.3, teach_back=True, **settings)
    key = () if together else kind
    one, again = state.server.taught[key], after.server.taught[key]
    y = np.eye(K)[np.asarray(state.clients[0].known.labels).ravel()]
    seeds = [one.seed + np.uint32([0, 0 if together else v]) for v in range(3)]
    phi = [np.asarray(patches(2, 3, seed, x)) for seed, x in zip(seeds, views, strict=True)]
    told = np.mean([phi[v][24:] for v in kind], axis=0)
    scores = told @ np.asarray(one.weights) + y.mean(axis=0)
    is_sure = np.abs(scores[:, 0] - scores[:, 1]) > 0.2
    assert 0 < is_sure.sum() < 8
    found = np.eye(K)[scores.argmax(axis=1)][is_sure]
    teachers = range(3) if together else kind
    x = np.concatenate([*(phi[v][:24] for v in teachers), *(phi[v][24:][is_sure] for v in kind)])
    ys = np.concatenate([*[y] * len(teachers), *[found] * len(kind)]) - y.mean(axis=0)
    weights = np.repeat([1.0, 0.3], [24 * len(teachers), is_sure.sum() * len(kind)])
    model = Ridge(0.3, fit_intercept=False).fit(x, ys, sample_weight=weights)
    np.testing.assert_allclose(again.weights, model.coef_.T, atol=5e-3)
    scores = told @ np.asarray(again.weights) + y.mean(axis=0)
    np.testing.assert_array_equal(labels[1][0], scores.argmax(axis=1))
    # Rows of clients with all views stay with their centroids.
    np.testing.assert_array_equal(after.server.centroids, CENTROIDS)
    np.testing.assert_array_equal(labels[0], centroids[0])
    assert {0, 1} == set(np.ravel(labels[0]).tolist())


def test_views_that_are_no_images_and_features_that_do_not_divide_are_refused():
    federation = make_federation(SINGLE)
    with pytest.raises(
        ValueError, match=r"teach_patches: got 3; allowed is 0 with view 1 of 3 fea"
    ):
        check_federation(PATCHES, federation)
    views = [images(8, 7) for _ in range(3)]
    ids = np.arange(8, dtype=np.int32).reshape(2, 4)
    parts = [Part(FULL, ids[:1], np.array([0])), Part(PAIR, ids[1:], np.array([1]))]
    federation = Federation.from_arrays(views, partition=parts)
    for wrong, message in (
        ({"teach_patches": 5}, r"teach_patches: got 5; allowed is 2 to 4"),
        (
            {"teach_features": 48},
            r"teach_features: got 48; allowed is a multiple of 32 with .* 2 v",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_federation(dataclasses.replace(PATCHES, **wrong), federation)
    with pytest.raises(ValueError, match=r"teach_patches: got 3; allowed is 0 without teach_feat"):
        dataclasses.replace(CONFIG, teach_patches=3)
    with pytest.raises(ValueError, match=r"teach_together: got True; allowed is false without tea"):
        dataclasses.replace(TEACHES, teach_together=True)


# --- Who is taught --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_kind_of_several_views_is_taught_too():
    config = dataclasses.replace(CONFIG, teach_features=4)
    federation, state, labels = taught(config, several=True)
    x, z, _ = rows_of(federation, state.server, PAIR)
    own, of_z = state.server.taught[PAIR].blocks
    assert own.centre.shape == (DIMS[0] + DIMS[2],) and of_z.centre.shape == (8,)
    np.testing.assert_allclose(own.centre, x.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(of_z.centre, z.mean(axis=0), atol=1e-5)
    assert set(np.unique(labels[1])) <= {0, 1}


def test_sums_travel_and_what_is_needed_for_them():
    federation, algorithm, state = make_federation(SINGLE), fmcsc(TEACHES, HYPER), started(TEACHES)
    describe, sum_up, tell = algorithm.finish[-3:]
    client, d = at(federation.cohorts[0], 0), sum(DIMS)
    latent = CONFIG.latent_dim * len(DIMS)

    def sizes(phase, view_ids, client, known):
        sent = phase.broadcast(state.server, view_ids)
        _, message, _ = jax.eval_shape(phase.client, KEY, sent, known, client)
        return [sum(x.size for x in jax.tree.leaves(tree)) for tree in (sent, message)]

    known = at(state.clients[0], 0)
    model = sum(x.size for x in jax.tree.leaves(state.server.models[FULL]))
    # f_g once, branches in it; sums of rows and Z, and two of squares for each view.
    assert sizes(describe, FULL, client, known) == [
        model + K * CONFIG.latent_dim,
        d + latent + 2 * len(DIMS) + 1,
    ]
    blocks = d + latent + len(DIMS) * (2 + 2)  # seeds and scales
    assert sizes(sum_up, FULL, client, known) == [
        blocks,
        len(DIMS) * (M * (M + 1) // 2 + M * K + M) + K,
    ]
    partial, own = at(federation.cohorts[1], 0), (1,)
    nothing = at(state.clients[1], 0)
    for phase in (describe, sum_up):
        assert sizes(phase, own, partial, nothing) == [0, 0]
    assert sizes(tell, own, partial, nothing) == [
        DIMS[1] + CONFIG.latent_dim + 2 + 2 + M * K + K,
        0,
    ]


@pytest.mark.slow
def test_rows_of_small_clusters_are_not_taught():
    federation, state, _ = taught(dataclasses.replace(TEACHES, min_cluster_size=4))
    labels = np.asarray(state.clients[0].known.labels)
    sizes = np.array([[(row == k).sum() for k in range(K)] for row in labels])
    assert ((sizes == 0) | (sizes >= 4)).all()
    real = np.asarray(federation.cohorts[0].mask)
    assert 0 < sizes.sum() < real.sum()  # something was left out
    assert (labels[~real] == -1).all()
    # Nothing that is sent is of the other rows.
    x = np.asarray(federation.cohorts[0].views[0])[labels >= 0]
    block, _ = state.server.taught[0,].blocks
    np.testing.assert_allclose(block.centre, x.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(state.server.taught[0,].shares, sizes.sum(axis=0) / len(x))


@pytest.mark.slow
def test_where_nothing_is_taught_the_nearest_centroids_count():
    nothing = taught(dataclasses.replace(TEACHES, min_cluster_size=8))[2]
    untaught = taught(dataclasses.replace(TEACHES, min_cluster_size=8, teach_features=0))[2]
    chex.assert_trees_all_equal(nothing, untaught)


@pytest.mark.ci
def test_matrices_that_are_no_sums_leave_numbers():
    """As of a rule by entries: with a negative eigenvalue as large as the ridge."""
    config = dataclasses.replace(TEACHES, teach_features=2)
    state = started(config)
    gram = np.float32([1.0, 2.0, 1.0])  # eigenvalues 3 and -1
    sums = {(v,): Sums(gram, np.ones((2, K), np.float32), np.zeros(2)) for v in range(3)}
    solve = fmcsc(config, HYPER.replace(teach_ridge=1.0)).finish[-2].server
    server, _ = jit(solve)(KEY, state.server, ((sums, np.ones(K)), (), ()), (3.0, 2.0, 2.0))
    np.testing.assert_allclose(server.taught[1,].weights, np.full((2, K), 1 / 4), rtol=1e-6)


def test_who_was_not_there_for_the_scales_sends_no_rows():
    federation, algorithm, state = make_federation(SINGLE), fmcsc(TEACHES, HYPER), started(TEACHES)
    phase = algorithm.finish[-2]
    sent = phase.broadcast(state.server, FULL)
    client, mine = at(federation.cohorts[0], 0), at(state.clients[0], 0)
    _, (sums, sizes), _ = jit(phase.client)(KEY, sent, mine, client)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves((sums, sizes)))


def test_what_is_taught_again_is_small_and_of_rows_that_the_server_has_summed():
    config = dataclasses.replace(TEACHES, teach_again=True, teach_back=True)
    federation, algorithm, state = make_federation(SINGLE), fmcsc(config, HYPER), started(config)
    again, tell = algorithm.finish[-2:]
    client, mine = at(federation.cohorts[0], 0), at(state.clients[0], 0)
    mine = mine._replace(known=mine.known._replace(labels=np.zeros_like(mine.known.labels)))
    sent = again.broadcast(state.server, FULL)
    # Who teaches back sends what is of its own view, and was sent a model for its Z.
    sent_back = again.broadcast(state.server, (1,))
    assert sent_back[1] is state.server.models[1,]
    partial, nothing = at(federation.cohorts[1], 0), at(state.clients[1], 0)
    _, message, _ = jax.eval_shape(again.client, KEY, sent_back, nothing, partial)
    sums = [(M * (M + 1) // 2,), (M, K), (M,)]
    assert [x.shape for x in jax.tree.leaves(message)] == sums
    for is_in in (False, True):
        known = mine.known._replace(is_in=np.array(is_in))
        run = jit(again.client)(KEY, sent, mine._replace(known=known), client)
        _, (crosses, sizes, back), _ = run
        assert back == {}
        assert all(x.shape == (M, K) for x in crosses.values()) and len(crosses) == len(DIMS)
        found = [np.asarray(x).any() for x in (*crosses.values(), sizes)]
        assert found == [is_in] * len(found)
    # What the server keeps to solve it again stays there; others are told what they need.
    largest = M * max(K, *(d + CONFIG.latent_dim for d in DIMS))
    for view_ids, kinds in ((FULL, {(0,), (1,), (2,)}), ((1,), {(1,)})):
        told = tell.broadcast(state.server, view_ids)
        assert set(told) == kinds
        assert max(x.size for x in jax.tree.leaves((told, sent))) <= largest < M * M


def test_few_rows_are_warned_of():
    algorithm, federation = fmcsc(TEACHES, HYPER), make_federation(SINGLE)
    with pytest.warns(UserWarning, match="teach_features: got 64, and a client .* has 5 rows"):
        jax.eval_shape(lambda: engine.start(algorithm, federation, KEY))
    parts = [Part(FULL, np.arange(70)[None], np.array([0], np.int32))]
    parts.append(Part((1,), np.arange(70, 134)[None], np.array([1], np.int32)))
    views = [np.ones((134, d), np.float32) for d in DIMS]
    federation = Federation.from_arrays(views, partition=parts)
    check_federation(TEACHES, federation)  # single views are taught, and send nothing
    with pytest.warns(UserWarning, match="a client that teaches has 64 rows"):
        check_federation(dataclasses.replace(TEACHES, teach_back=True), federation)


def test_what_cannot_be_taught_is_refused():
    for wrong, allowed in ((-2, "0 or more"), (3, "an even number"), (2.0, "a whole number")):
        with pytest.raises(ValueError, match=rf"teach_features: got {wrong}; allowed is {allowed}"):
            dataclasses.replace(CONFIG, teach_features=wrong)
    for name in ("teach_again", "teach_back"):
        with pytest.raises(
            ValueError, match=rf"{name}: got True; allowed is false without teach_f"
        ):
            dataclasses.replace(CONFIG, **{name: True})
        with pytest.raises(ValueError, match=rf"{name}: got True; allowed is false with min_clus"):
            dataclasses.replace(TEACHES, min_cluster_size=2, **{name: True})
    with pytest.raises(ValueError, match="teach_ridge: got 0"):
        fmcsc(TEACHES, FMCSCHyperparams(teach_ridge=0.0))
    federation = make_federation(SINGLE)
    one = federation.replace(
        cohorts=tuple(c for c in federation.cohorts if c.view_ids == (1,)), view_dims=DIMS[1:2]
    )
    with pytest.raises(ValueError, match=r"teach_features: got 64; allowed is 0 with a single"):
        check_federation(TEACHES, one)
    for off in ({"upload_noise": 0.1}, {"upload_clip": 1.0}):
        with pytest.raises(ValueError, match=r"teach_features: got 64; .* bound no sums of rows"):
            fmcsc(TEACHES, FMCSCHyperparams(**off))
