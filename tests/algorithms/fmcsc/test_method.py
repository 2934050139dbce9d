"""FMCSC against its equations, computed apart: in NumPy, by loops over clients, by hand.

Clients make one step of Adam in every stage here, which moves each parameter by
`-rate * g / (|g| + 1e-8)`: a whole exchange can so be followed from the gradients of the losses.
"""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans

from jaxfedmvc import data, engine
from jaxfedmvc.algorithms import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.fmcsc.model import branch, features, init_model
from jaxfedmvc.algorithms.fmcsc.objective import (
    distillation_loss,
    hide_features,
    multi_view_loss,
    multi_view_weight,
    partial_view_loss,
    partial_view_weight,
    reconstruction_loss,
)
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Cohort, Federation

K = 2
DIMS = (4, 3, 2)
FULL, PAIR = (0, 1, 2), (0, 2)
RATE, TAU_M, TAU_P, FLOOR = 0.01, 0.5, 0.7, 0.3
# Widths at which no layer dies; see the note on rounding in test_common.py.
CONFIG = FMCSCConfig(
    K,
    hidden=(16,),
    latent_dim=4,
    head_hidden=16,
    pretrain_epochs=1,
    local_epochs=1,
    distill_epochs=1,
    batch_size=16,
    n_init=2,
)
HYPER = FMCSCHyperparams(RATE, TAU_M, TAU_P, FLOOR)
KEY = jax.random.key(5)
CLIENTS = ((FULL, {3: 8, 0: 5, 5: 6}), ((1,), {1: 7, 4: 6}), (PAIR, {2: 8, 6: 5}))

jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


# --- Tools ----------------------------------------------------------------------------------------


def make_federation(clients=CLIENTS):
    rng = np.random.default_rng(1)
    partition, start = [], 0
    for view_ids, members in clients:
        ids = np.full((len(members), 8), -1, np.int32)
        for row, n in zip(ids, members.values(), strict=True):
            row[:n] = start + np.arange(n)
            start += n
        partition.append(Part(view_ids, ids, np.array(list(members), np.int32)))
    return Federation.from_arrays([rng.normal(size=(start, d)) for d in DIMS], partition=partition)


@functools.cache
def build(components="ABCD", **changes):
    return fmcsc(dataclasses.replace(CONFIG, components=components, **changes), HYPER)


@functools.cache
def client_program(client):
    return jit(client)


def at(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def exchange(algorithm, phase, federation, state, cohorts=None):
    """Every client alone, one after another: `{client id: (state, message, info)}`."""
    found = {}
    for c in range(len(federation.cohorts)) if cohorts is None else cohorts:
        cohort = federation.cohorts[c]
        sent = phase.broadcast(state.server, cohort.view_ids)
        for i, client in enumerate(np.asarray(cohort.client_ids)):
            found[int(client)] = client_program(phase.client)(
                jax.random.fold_in(KEY, client), sent, at(state.clients[c], i), at(cohort, i)
            )
    return found


def members(federation):
    """`(cohort, place, client id, client)` of every client."""
    for c, cohort in enumerate(federation.cohorts):
        for i, client in enumerate(np.asarray(cohort.client_ids)):
            yield c, i, int(client), at(cohort, i)


def real_views(client):
    """Rows without padding, NumPy."""
    real = np.asarray(client.mask)
    return {v: np.asarray(x)[real] for v, x in client.by_view().items()}


def mean(trees, weights=None):
    return jax.tree.map(lambda *x: np.average(np.stack(x), axis=0, weights=weights), *trees)


def adam_step(params, gradient):
    return jax.tree.map(lambda p, g: p - RATE * g / (jnp.abs(g) + 1e-8), params, gradient)


def close(actual, expected, rtol=1e-4, atol=1e-5):
    chex.assert_trees_all_close(
        *jax.tree.map(lambda x: np.asarray(x, np.float64), (actual, expected)),
        rtol=rtol,
        atol=atol,
    )


def largest_difference(a, b):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), a, b)))


@pytest.fixture(scope="module")
def federation():
    return make_federation()


@pytest.fixture(scope="module")
def started(federation):
    return jit(functools.partial(engine.start, build()))(federation, KEY)


@pytest.fixture(scope="module")
def led(federation, started):
    """After the leader's pre-training."""
    leader = build()._replace(setup=build().setup[:1])
    return jit(functools.partial(engine.setup, leader))(federation, KEY, started)[0]


@pytest.fixture(scope="module")
def pretrained(federation, led):
    everyone = build()._replace(setup=build().setup[1:])
    return jit(functools.partial(engine.setup, everyone))(federation, KEY, led)[0]


@pytest.fixture(scope="module")
def exchanged(federation, pretrained):
    """What each client of the first round returns."""
    return exchange(build(), build().round[0], federation, pretrained)


@functools.cache
def round_program(components="ABCD", **changes):
    return jit(functools.partial(engine.one_round, build(components, **changes), round_index=0))


@pytest.fixture(scope="module")
def rounded(federation, pretrained):
    return round_program()(federation, KEY, pretrained)[0]


# --- NumPy's account of the model and of its losses -----------------------------------------------


def np_mlp(params, x):
    layers = sorted(params["params"])
    for name in layers:
        x = x @ np.asarray(params["params"][name]["kernel"], np.float64)
        x = x + np.asarray(params["params"][name]["bias"])
        x = x if name == layers[-1] else np.maximum(x, 0)
    return x


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def np_features(model, views):
    z = {v: np_mlp(ae.encoder, views[v]) for v, ae in model.autoencoders.items()}
    return {
        "z": z,
        "reconstruction": {v: np_mlp(ae.decoder, z[v]) for v, ae in model.autoencoders.items()},
        "h_views": {v: np_mlp(head, z[v]) for v, head in model.view_heads.items()},
        "h": unit(np_mlp(model.joint_head, np.concatenate([z[v] for v in sorted(z)], axis=1))),
    }


def np_reconstruction(out, views):
    return sum(np.mean((out["reconstruction"][v] - views[v]) ** 2) for v in out["z"])


def np_paper_contrast(h, h_view, tau):
    n, total = len(h), 0.0
    for i in range(n):
        s = [unit(h[i]) @ unit(h_view[j]) / tau for j in range(n)]
        total += np.log(sum(np.exp(s[j]) for j in range(n) if j != i)) - s[i]
    return total / n


def np_ntxent(h, h_view, tau):
    rows, n, total = np.concatenate([h_view, h]), len(h), 0.0
    for i in range(2 * n):
        s = rows @ rows[i] / tau
        total += np.log(sum(np.exp(s[j]) for j in range(2 * n) if j != i)) - s[(i + n) % (2 * n)]
    return total / (2 * n)


def np_model_contrast(h, h_global, z, tau):
    positive = np.exp([unit(a) @ unit(b) / tau for a, b in zip(h, h_global, strict=True)])
    negative = np.exp([unit(a) @ unit(b) / tau for a, b in zip(h, z, strict=True)])
    return -np.mean(np.log(positive / (positive + negative)))


def np_bits(a, b, n_bins=10):
    joint, _, _ = np.histogram2d(a.ravel(), b.ravel(), bins=n_bins)
    joint /= joint.sum()
    expected = joint.sum(axis=1, keepdims=True) * joint.sum(axis=0, keepdims=True)
    some = joint > 0
    return np.sum(joint[some] * np.log2(joint[some] / expected[some]))


def np_partial_bits(out, h_global):
    own = np.mean([np_bits(out["h"], z) for z in out["z"].values()])
    return np_bits(out["h"], h_global) - own


@pytest.fixture(scope="module")
def sample():
    """Eight rows, the last two padding with values that must not count; two models of a kind."""
    rng = np.random.default_rng(2)
    views = {v: rng.normal(size=(8, d)).astype(np.float32) for v, d in enumerate(DIMS)}
    mask = np.arange(8) < 6
    make = jit(functools.partial(init_model, config=CONFIG, view_dims=DIMS, kind=FULL))
    pair = jit(functools.partial(init_model, config=CONFIG, view_dims=DIMS, kind=PAIR))
    models = {FULL: make(jax.random.key(0)), PAIR: pair(jax.random.key(1))}
    models["other pair"] = pair(jax.random.key(2))
    return models, views, mask, {v: x[mask].astype(np.float64) for v, x in views.items()}


# --- The model ------------------------------------------------------------------------------------


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(("kind", "millions"), [((0,), 3.4), ((0, 1), 6.7)])
def test_parameters_at_the_size_of_the_paper(kind, millions):
    config = FMCSCConfig(10)
    model = jax.eval_shape(lambda key: init_model(key, config, (784, 784), kind), KEY)
    assert count(model) / 1e6 == pytest.approx(millions, abs=0.1)
    widths = (784, 500, 500, 2000, 20, 2000, 500, 500, 784)
    by_hand = sum((a + 1) * b for a, b in itertools.pairwise(widths))
    assert count(model.autoencoders) == len(kind) * by_hand
    heads = [(20 * len(kind) + 1) * 256 + 257 * 20]
    heads += [21 * 256 + 257 * 20] * (2 if len(kind) == 2 else 0)
    assert count(model) - count(model.autoencoders) == sum(heads)


@pytest.mark.parametrize("kind", [FULL, PAIR])
def test_features_are_those_of_numpy(sample, kind):
    models, views, _, _ = sample
    out = features(CONFIG, models[kind], views)
    close(out._asdict(), np_features(models[kind], views))
    np.testing.assert_allclose(np.linalg.norm(out.h, axis=1), 1.0, atol=1e-5)
    assert set(out.h_views) == (set(FULL) if kind == FULL else set())


def test_joint_input_is_in_the_order_of_view_ids(sample):
    """Whatever order the dictionaries of a caller have."""
    models, views, _, _ = sample
    model = models[FULL]
    turned = model._replace(autoencoders={v: model.autoencoders[v] for v in (2, 0, 1)})
    found = features(CONFIG, turned, {v: views[v] for v in (1, 2, 0)})
    np.testing.assert_array_equal(found.h, features(CONFIG, model, views).h)


# --- Losses and weights ---------------------------------------------------------------------------


def test_reconstruction_is_the_mean_square_of_real_rows_summed_over_views(sample):
    models, views, mask, real = sample
    out = features(CONFIG, models[FULL], views)
    expected = np_reconstruction(np_features(models[FULL], real), real)
    assert reconstruction_loss(out.reconstruction, views, mask) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("contrast", ["paper", "ntxent"])
def test_multi_view_loss(sample, contrast):
    models, views, mask, real = sample
    config = dataclasses.replace(CONFIG, contrast=contrast)
    out = np_features(models[FULL], real)
    term = np_paper_contrast if contrast == "paper" else np_ntxent
    expected = np_reconstruction(out, real)
    expected += sum(term(out["h"], h_view, 0.3) for h_view in out["h_views"].values())
    found = multi_view_loss(config, 0.3, models[FULL], views, mask)
    assert found == pytest.approx(expected, rel=1e-5)


def test_partial_view_loss_on_two_views(sample):
    models, views, mask, real = sample
    out = np_features(models[PAIR], real)
    h_global = features(CONFIG, models["other pair"], views).h
    contrast = [
        np_model_contrast(out["h"], np.asarray(h_global)[mask], z, 0.3) for z in out["z"].values()
    ]
    assert len(contrast) == 2
    expected = np_reconstruction(out, real) + np.mean(contrast)
    found, gradient = jax.value_and_grad(partial_view_loss, argnums=4)(
        CONFIG, 0.3, models[PAIR], views, h_global, mask
    )
    assert found == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(gradient, 0.0)  # the global model's output is a constant


def test_distillation_loss_sums_over_models(sample):
    models, views, mask, real = sample
    target = np.random.default_rng(4).normal(size=(8, CONFIG.latent_dim)).astype(np.float32)
    expected = 0.0
    for name in (PAIR, "other pair"):
        out = np_features(models[name], real)
        expected += np.mean((out["h"] - target[mask]) ** 2) + np_reconstruction(out, real)
    received = {kind: models[kind] for kind in (PAIR, "other pair")}
    found = distillation_loss(CONFIG, received, views, target, mask)
    assert found == pytest.approx(expected, rel=1e-5)


def test_weights_are_bits_of_real_rows(sample):
    models, views, mask, real = sample
    out, partial = features(CONFIG, models[FULL], views), features(CONFIG, models[PAIR], views)
    full_bits = np_features(models[FULL], real)
    expected = sum(np_bits(full_bits["h"], h_view) for h_view in full_bits["h_views"].values())
    assert multi_view_weight(CONFIG, out, mask) == pytest.approx(expected, rel=1e-4)
    h_global = features(CONFIG, models["other pair"], views).h
    expected = np_partial_bits(np_features(models[PAIR], real), np.asarray(h_global)[mask])
    found = partial_view_weight(CONFIG, partial, h_global, mask)
    assert found == pytest.approx(expected, rel=1e-4)
    # Seven bins are other bits than ten.
    fewer = multi_view_weight(dataclasses.replace(CONFIG, n_bins=7), out, mask)
    assert abs(fewer - multi_view_weight(CONFIG, out, mask)) > 1e-2


# --- Pre-training ---------------------------------------------------------------------------------


def pretraining_step(model, client):
    def loss(autoencoders):
        out = features(CONFIG, model._replace(autoencoders=autoencoders), client.by_view())
        return reconstruction_loss(out.reconstruction, client.by_view(), client.mask)

    return adam_step(model.autoencoders, jax.grad(loss)(model.autoencoders))


def test_the_leader_alone_pretrains_first(federation, started, led):
    """Client 0, of lowest id among those with all views; only autoencoders come from it."""
    (place,) = np.flatnonzero(np.asarray(federation.cohorts[0].client_ids) == 0)
    assert place != 0
    message = jit(pretraining_step)(started.server.models[FULL], at(federation.cohorts[0], place))
    assert set(led.server.models) == {FULL, PAIR, (0,), (1,), (2,)}
    for kind, model in led.server.models.items():
        close(model.autoencoders, {v: message[v] for v in kind})
        chex.assert_trees_all_equal(model.joint_head, started.server.models[kind].joint_head)
        chex.assert_trees_all_equal(model.view_heads, started.server.models[kind].view_heads)
    chex.assert_trees_all_equal(led.clients, started.clients)


def test_everyone_pretrains_from_the_leader_and_the_mean_is_taken(federation, led, pretrained):
    step, messages = jit(pretraining_step), {}
    for _, _, i, client in members(federation):
        messages[i] = step(led.server.models[client.view_ids], client)
    holders = {
        kind: [i for _, _, i, client in members(federation) if set(kind) <= set(client.view_ids)]
        for kind in led.server.models
    }
    assert sorted(holders[(0,)]) == [0, 2, 3, 5, 6] and sorted(holders[FULL]) == [0, 3, 5]
    for kind, model in pretrained.server.models.items():
        expected = mean([{v: messages[i][v] for v in kind} for i in holders[kind]])
        close(model.autoencoders, expected)
    for c, place, i, _ in members(federation):
        if c > 0:  # partial clients keep what they trained
            close(at(pretrained.clients[c], place).autoencoders, messages[i])


def test_the_message_of_pretraining_is_autoencoders_only(federation, started):
    for c, place, _, client in members(federation):
        phase = build().setup[1]
        sent = phase.broadcast(started.server, client.view_ids)
        state = at(started.clients[c], place)
        _, message, _ = jax.eval_shape(phase.client, KEY, sent, state, client)
        expected = started.server.models[client.view_ids].autoencoders
        chex.assert_trees_all_equal_shapes_and_dtypes(message, expected)


def test_without_a_every_client_starts_on_its_own(federation, started):
    """With no epoch of training the start itself is sent."""
    with_a, without = (build(c, pretrain_epochs=0) for c in ("ABCD", "BCD"))
    assert [phase.who for phase in with_a.setup] == ["leader", "everyone"]
    assert [phase.who for phase in without.setup] == ["everyone"]
    same = exchange(with_a, with_a.setup[1], federation, started)
    own = exchange(without, without.setup[0], federation, started)
    for _, _, i, client in members(federation):
        theirs = started.server.models[client.view_ids].autoencoders
        chex.assert_trees_all_equal(same[i][1], theirs)
        assert largest_difference(own[i][1], theirs) > 0.1
    assert largest_difference(own[3][1], own[5][1]) > 0.1
    # Views of one client start differently too; only autoencoders are the client's own.
    assert own[2][0].joint_head is not None
    chex.assert_trees_all_equal(own[2][0].joint_head, started.server.models[PAIR].joint_head)


# --- Rounds ---------------------------------------------------------------------------------------


def parts_of(update):
    """The models in an update, without their weights."""
    return {
        kind: jax.tree.map(lambda x, w=update.weights[kind]: x / w, model)
        for kind, model in update.models.items()
    }


def test_a_multi_view_client_trains_its_model_from_the_global_one(
    federation, pretrained, exchanged
):
    def step(model, client):
        def loss(model):
            return multi_view_loss(CONFIG, TAU_M, model, client.by_view(), client.mask)

        value, gradient = jax.value_and_grad(loss)(model)
        return value, adam_step(model, gradient)

    step = jit(step)
    for c, _, i, client in members(federation):
        if c == 0:
            state, update, info = exchanged[i]
            value, model = step(pretrained.server.models[FULL], client)
            assert state == () and info["loss"] == pytest.approx(float(value), rel=1e-4)
            close(parts_of(update)[FULL], model, atol=1e-4)


def test_copies_of_partial_models_are_drawn_to_the_own_representation(
    federation, pretrained, exchanged
):
    """Eq. (6): the target is H of the model that the client has just trained."""

    def step(received, own, client):
        views = client.by_view()
        target = features(CONFIG, own, views).h

        def loss(models):
            return distillation_loss(CONFIG, models, views, target, client.mask)

        value, gradient = jax.value_and_grad(loss)(received)
        return value, adam_step(received, gradient)

    client = at(federation.cohorts[0], 0)
    _, update, info = exchanged[3]
    received = {k: m for k, m in pretrained.server.models.items() if k != FULL}
    trained = parts_of(update)
    value, copies = jit(step)(received, trained.pop(FULL), client)
    assert info["distillation"] == pytest.approx(float(value), rel=1e-4)
    assert set(copies) == {(0,), (1,), (2,), PAIR}
    close(trained, copies, atol=1e-4)


def test_the_target_of_the_copies_may_be_the_new_global_model(federation, pretrained, exchanged):
    """Two exchanges: first f_m alone, as ever; then copies, towards H of what f_g is by now."""
    algorithm = build(target="global")
    first, second = algorithm.round
    client, models = at(federation.cohorts[0], 0), pretrained.server.models
    sent = first.broadcast(pretrained.server, FULL)
    assert set(sent) == {FULL} and first.broadcast(pretrained.server, PAIR) == {}
    _, update, info = client_program(first.client)(KEY, sent, (), client)
    assert set(update.models) == {FULL} and set(info) == {
        "loss",
        "reconstruction",
        "contrast",
        "weight",
    }
    alone = client_program(first.client)(jax.random.fold_in(KEY, 3), sent, (), client)[1]
    close(parts_of(alone)[FULL], parts_of(exchanged[3][1])[FULL], rtol=1e-5)

    def step(received, full):
        target = features(CONFIG, full, client.by_view()).h

        def loss(models):
            return distillation_loss(CONFIG, models, client.by_view(), target, client.mask)

        return adam_step(received, jax.grad(loss)(received))

    new = parts_of(alone)[FULL]
    sent = second.broadcast(pretrained.server._replace(models=models | {FULL: new}), FULL)
    _, update, info = jit(second.client)(KEY, sent, (), client)
    received = {kind: model for kind, model in models.items() if kind != FULL}
    close(parts_of(update), jit(step)(received, new), atol=1e-4)
    assert set(info) == {"distillation"} and set(update.models) == set(received)
    assert set(second.broadcast(pretrained.server, PAIR)) == {PAIR}
    # Without B there is nothing to fit.
    assert len(build("ACD", target="global").round) == 1


def test_the_leader_may_train_all_models_before_the_rounds(federation, pretrained):
    """A step of eq. (8) on f_g, then one of eq. (6) on models that begin with f_g's encoders."""
    algorithm = build(leader_epochs=1)
    phase = algorithm.setup[2]
    assert len(algorithm.setup) == 3 and phase.who == "leader"
    client = at(federation.cohorts[0], 1)  # client 0, of the lowest id
    views, sent = client.by_view(), pretrained.server.models

    @jit
    def by_hand(sent):
        def loss(model):
            return multi_view_loss(CONFIG, TAU_M, model, views, client.mask)

        own = adam_step(sent[FULL], jax.grad(loss)(sent[FULL]))
        starts = {
            kind: model._replace(autoencoders={v: own.autoencoders[v] for v in kind})
            for kind, model in sent.items()
            if kind != FULL
        }
        target = features(CONFIG, own, views).h

        def distillation(models):
            return distillation_loss(CONFIG, models, views, target, client.mask)

        return {FULL: own, **adam_step(starts, jax.grad(distillation)(starts))}

    _, message, _ = jit(phase.client)(KEY, sent, (), client)
    close(message, by_hand(sent), atol=1e-4)
    alone = algorithm._replace(setup=(phase,))
    after, _ = jit(functools.partial(engine.setup, alone))(federation, KEY, pretrained)
    close(after.server.models, message, rtol=1e-3, atol=1e-4)  # no key is drawn from
    chex.assert_trees_all_equal(after.clients, pretrained.clients)


def test_partial_clients_may_stay_out_of_the_rounds(federation, pretrained, exchanged):
    algorithm = build(partial_rounds=False)
    broadcast = algorithm.round[0].broadcast
    assert broadcast(pretrained.server, PAIR) == {} == broadcast(pretrained.server, (1,))
    assert set(broadcast(pretrained.server, FULL)) == set(pretrained.server.models)
    phase, client = algorithm.round[0], at(federation.cohorts[1], 0)
    state = at(pretrained.clients[1], 0)
    kept, nothing, _ = phase.client(KEY, {}, state, client)
    assert kept is state and jax.tree.leaves(nothing) == []
    mine = [update for i, (_, update, _) in exchanged.items() if i in CLIENTS[0][1]]
    total = jax.tree.map(lambda *x: sum(x), *mine)
    server, _ = phase.server(KEY, pretrained.server, (total, nothing, nothing), (3, 2, 2))
    for kind, model in server.models.items():
        expected = mean(
            [parts_of(update)[kind] for update in mine], [float(u.weights[kind]) for u in mine]
        )
        close(model, expected, rtol=1e-3, atol=1e-4)
    both = [engine.traffic(a, federation)["round"] for a in (algorithm, build())]
    assert both[0].up < both[1].up and both[0].down < both[1].down


BRANCHES = dict(partial_models="branch", partial_rounds=False)


def test_a_branch_is_what_one_view_alone_tells_of_h(federation, pretrained):
    client = at(federation.cohorts[0], 0)
    model = pretrained.server.models[FULL]
    whole = jit(functools.partial(features, CONFIG))(model, client.by_view())
    for v in FULL:
        part = branch(model, v)
        chex.assert_trees_all_equal_shapes(part, pretrained.server.models[v,])
        alone = jit(functools.partial(features, CONFIG))(part, {v: client.by_view()[v]})
        norm = np.linalg.norm(whole.h_views[v], axis=1, keepdims=True)
        np.testing.assert_allclose(alone.h, whole.h_views[v] / norm, rtol=1e-4, atol=1e-6)
        chex.assert_trees_all_close(alone.reconstruction[v], whole.reconstruction[v], rtol=1e-5)


def test_partial_models_may_be_branches_of_the_new_global_model(federation, pretrained, exchanged):
    algorithm = build(**BRANCHES)
    (phase,) = algorithm.round
    server, client = pretrained.server, at(federation.cohorts[0], 0)
    assert set(phase.broadcast(server, FULL)) == {FULL}
    assert phase.broadcast(server, (1,)) == {} == phase.broadcast(server, PAIR)
    _, update, _ = client_program(phase.client)(
        jax.random.fold_in(KEY, 3), phase.broadcast(server, FULL), (), client
    )
    assert set(update.models) == {FULL}
    new = parts_of(update)[FULL]
    close(new, parts_of(exchanged[3][1])[FULL], rtol=1e-5)
    nothing = ({}, {})
    after, _ = phase.server(KEY, server, (update, *(type(update)(*nothing),) * 2), (1, 2, 2))
    assert set(after.models) == {FULL, (0,), (1,), (2,)}
    for v in FULL:
        close(after.models[v,], branch(new, v), rtol=1e-4)


def test_partial_clients_pre_train_nothing_where_partial_models_are_branches(federation, started):
    algorithm = build(**BRANCHES)
    phase, server = algorithm.setup[1], started.server
    client = at(federation.cohorts[1], 0)
    assert phase.broadcast(server, (1,)) == () == phase.broadcast(server, PAIR)
    state, nothing, info = phase.client(KEY, (), (), client)
    assert (state, nothing, info) == ((), {}, {})
    full = {v: jax.tree.map(lambda x: 3 * x, server.models[FULL].autoencoders[v]) for v in FULL}
    after, _ = phase.server(KEY, server, (full, {}, {}), (2, 0, 0))
    new = after.models[FULL]
    close(new.autoencoders, jax.tree.map(lambda x: x / 2, full), rtol=1e-5)
    for v in FULL:
        chex.assert_trees_all_equal(after.models[v,], branch(new, v))


def test_the_leader_trains_no_copies_where_partial_models_are_branches(federation, pretrained):
    algorithm = build(leader_epochs=1, **BRANCHES)
    phase, client = algorithm.setup[2], at(federation.cohorts[0], 1)
    sent = phase.broadcast(pretrained.server, FULL)
    assert set(sent) == {FULL}
    _, message, _ = client_program(phase.client)(KEY, sent, (), client)
    assert set(message) == {FULL}
    stacked = jax.tree.map(lambda x: x[None], message)
    after, _ = phase.server(KEY, pretrained.server, (stacked,), (1,))
    chex.assert_trees_all_equal(after.models[1,], branch(message[FULL], 1))


def test_branches_are_for_one_view_each_and_take_no_uploads(federation):
    with pytest.raises(ValueError, match=r"partial_models: got 'branch' .* views \(0, 2\), .*;"):
        build(**BRANCHES).init(KEY, federation)
    with pytest.raises(ValueError, match="partial_rounds: got True; allowed is False with"):
        dataclasses.replace(CONFIG, partial_models="branch")
    assert len(build("ACD", **BRANCHES).round) == 1  # B off: models for one view stay as they were
    server = build("ACD", **BRANCHES).init(KEY, federation)[0]
    assert set(server.models) == {FULL, PAIR, (0,), (1,), (2,)}


def test_hidden_features_are_a_share_and_the_same_behind_padding():
    views = {
        v: 1.0 + np.arange(200 * d, dtype=np.float32).reshape(200, d) for v, d in ((0, 9), (2, 5))
    }
    hidden = jit(hide_features)(KEY, views, 0.3)
    zeros = {v: np.asarray(x) == 0 for v, x in hidden.items()}
    for v, x in hidden.items():
        np.testing.assert_array_equal(np.asarray(x)[~zeros[v]], views[v][~zeros[v]])
    everything = np.concatenate([z.ravel() for z in zeros.values()])
    # 2800 draws: four standard deviations about the mean.
    assert abs(everything.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / everything.size)
    assert not np.array_equal(zeros[0][:, :5], zeros[2])
    fewer = jit(hide_features)(KEY, {v: x[:50] for v, x in views.items()}, 0.3)
    chex.assert_trees_all_equal(fewer, {v: x[:50] for v, x in hidden.items()})


def test_losses_see_what_is_left_and_reconstruct_all(sample):
    models, views, mask, real = sample
    left = {v: x.at[:, 0].set(0.0) for v, x in jax.tree.map(jnp.asarray, views).items()}
    out = np_features(models[FULL], {v: np.asarray(x)[mask] for v, x in left.items()})
    expected = np_reconstruction(out, real)
    expected += sum(np_paper_contrast(out["h"], h, TAU_M) for h in out["h_views"].values())
    value = jit(functools.partial(multi_view_loss, CONFIG))(TAU_M, models[FULL], views, mask, left)
    assert value == pytest.approx(expected, rel=1e-4)
    pair = np_features(models[PAIR], {v: np.asarray(x)[mask] for v, x in left.items()})
    expected = np.mean((pair["h"] - out["h"]) ** 2) + np_reconstruction(pair, real)
    target = np.zeros((8, CONFIG.latent_dim), np.float32)
    target[mask] = out["h"]
    value = jit(functools.partial(distillation_loss, CONFIG))(
        {PAIR: models[PAIR]}, views, target, mask, left
    )
    assert value == pytest.approx(expected, rel=1e-4)


def test_features_are_hidden_in_training_on_multi_view_clients_only(federation, pretrained):
    masked = fmcsc(CONFIG, dataclasses.replace(HYPER, mask_rate=0.5)).round[0]
    for c, expected in ((0, True), (1, False)):
        client, state = at(federation.cohorts[c], 0), at(pretrained.clients[c], 0)
        sent = masked.broadcast(pretrained.server, client.view_ids)
        new = [
            parts_of(client_program(phase.client)(KEY, sent, state, client)[1])
            for phase in (masked, build().round[0])
        ]
        for kind in new[0]:
            assert (largest_difference(new[0][kind], new[1][kind]) > 1e-3) == expected


# --- Privacy --------------------------------------------------------------------------------------


def test_uploads_are_clipped_in_l1_and_averaged_plainly(federation, pretrained):
    clip = 0.05
    hyper = dataclasses.replace(HYPER, upload_clip=clip)
    for c in (0, 1):
        client, state = at(federation.cohorts[c], 0), at(pretrained.clients[c], 0)
        phase = fmcsc(CONFIG, hyper).round[0]
        sent = phase.broadcast(pretrained.server, client.view_ids)
        _, update, _ = jit(phase.client)(KEY, sent, state, client)
        _, free, _ = client_program(build().round[0].client)(KEY, sent, state, client)
        assert {float(weight) for weight in update.weights.values()} == {1.0}
        moved = jax.tree.map(jnp.subtract, update.models, {k: sent[k] for k in update.models})
        norm = sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(moved))
        assert norm == pytest.approx(clip, rel=0.02)  # parameters are rounded to float32
        unclipped = jax.tree.map(jnp.subtract, parts_of(free), {k: sent[k] for k in update.models})
        assert sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(unclipped)) > 10 * clip


def test_noise_on_uploads_is_laplace_and_the_clients_own(federation, pretrained):
    hyper = dataclasses.replace(HYPER, upload_noise=2.0)
    phase = fmcsc(CONFIG, hyper).round[0]
    client, state = at(federation.cohorts[1], 0), at(pretrained.clients[1], 0)
    sent = phase.broadcast(pretrained.server, client.view_ids)
    kept, update, _ = jit(phase.client)(KEY, sent, state, client)
    plain, free, _ = client_program(build().round[0].client)(KEY, sent, state, client)
    close(kept, plain, rtol=1e-5)  # what stays is not noised
    noise = jax.tree.map(jnp.subtract, parts_of(update), parts_of(free))
    drawn = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(noise)])
    assert scipy.stats.kstest(drawn, scipy.stats.laplace(scale=2.0).cdf).pvalue > 1e-3
    setup = fmcsc(CONFIG, hyper).setup[1]
    sent = setup.broadcast(pretrained.server, client.view_ids)
    noisy = jit(setup.client)(KEY, sent, state, client)[1]
    assert (
        largest_difference(
            noisy, client_program(build().setup[1].client)(KEY, sent, state, client)[1]
        )
        > 1
    )


def test_a_partial_client_trains_its_own_model_against_the_global_one(
    federation, pretrained, exchanged
):
    def step(model, received, client):
        views = client.by_view()
        h_global = features(CONFIG, received, views).h

        def loss(model):
            return partial_view_loss(CONFIG, TAU_P, model, views, h_global, client.mask)

        value, gradient = jax.value_and_grad(loss)(model)
        return value, adam_step(model, gradient)

    step = jit(step)
    for c, place, i, client in members(federation):
        if c > 0:
            state, update, info = exchanged[i]
            received = pretrained.server.models[client.view_ids]
            value, model = step(at(pretrained.clients[c], place), received, client)
            assert info["loss"] == pytest.approx(float(value), rel=1e-4)
            close(state, model, atol=1e-4)
            close(parts_of(update)[client.view_ids], state)
            assert set(update.models) == set(update.weights) == {client.view_ids}


def bits_by_hand(federation, pretrained, exchanged):
    """`{client id: {kind: bits}}`."""
    found = {}
    for _, _, i, client in members(federation):
        views, bits = real_views(client), {}
        for kind, model in parts_of(exchanged[i][1]).items():
            out = np_features(model, views)
            if kind == FULL:
                bits[kind] = sum(np_bits(out["h"], h_view) for h_view in out["h_views"].values())
            else:
                received = np_features(pretrained.server.models[kind], views)["h"]
                bits[kind] = np_partial_bits(out, received)
        found[i] = bits
    return found


def test_weights_are_bits_with_a_floor_and_models_are_averaged_by_them(
    federation, pretrained, exchanged, rounded
):
    bits = bits_by_hand(federation, pretrained, exchanged)
    weights = {
        i: {kind: max(b, FLOOR) for kind, b in by_kind.items()} for i, by_kind in bits.items()
    }
    below = [b < FLOOR for by_kind in bits.values() for b in by_kind.values()]
    assert any(below) and not all(below)  # or the floor would not be tried
    for i, (_, update, info) in exchanged.items():
        close(update.weights, weights[i], rtol=1e-3)
        own = max(update.models, key=len)
        assert info["weight"] == pytest.approx(bits[i][own], rel=1e-3, abs=1e-4)
    for kind, model in rounded.server.models.items():
        sent = [
            (parts_of(u)[kind], weights[i][kind])
            for i, (_, u, _) in exchanged.items()
            if kind in u.models
        ]
        assert len(sent) == {FULL: 3, PAIR: 5, (0,): 3, (1,): 5, (2,): 3}[kind]
        models, shares = zip(*sent, strict=True)
        close(model, mean(models, weights=shares), rtol=1e-3, atol=1e-4)


def test_reported_losses_are_those_of_the_trained_model(federation, exchanged):
    for _, _, i, client in members(federation):
        if client.view_ids != FULL:
            continue
        _, update, info = exchanged[i]
        views = real_views(client)
        out = np_features(parts_of(update)[FULL], views)
        contrast = sum(np_paper_contrast(out["h"], out["h_views"][v], TAU_M) for v in FULL)
        assert info["contrast"] == pytest.approx(contrast, rel=1e-3)
        assert info["reconstruction"] == pytest.approx(np_reconstruction(out, views), rel=1e-3)


def test_partial_clients_keep_their_model_and_see_nobody_elses_update(
    federation, pretrained, exchanged, rounded
):
    """A client's step does not change when another client's samples do; the global models do."""
    for c, place, i, _ in members(federation):
        if c > 0:
            close(at(rounded.clients[c], place), exchanged[i][0])

    def other_data(cohort, place):
        views = tuple(x.at[place].multiply(-2.0) for x in cohort.views)
        return cohort.replace(views=views)

    full, one, pair = federation.cohorts
    changed = federation.replace(cohorts=(other_data(full, 1), other_data(one, 0), pair))
    after = round_program()(changed, KEY, pretrained)[0]
    chex.assert_trees_all_equal(at(after.clients[1], 1), at(rounded.clients[1], 1))
    chex.assert_trees_all_equal(after.clients[2], rounded.clients[2])
    assert largest_difference(at(after.clients[1], 0), at(rounded.clients[1], 0)) > 1e-3
    for kind in (FULL, (1,)):
        found = largest_difference(after.server.models[kind], rounded.server.models[kind])
        assert found > 1e-3


def test_aggregation_of_identical_models_is_that_model(federation, pretrained):
    """Without epochs and without C every client returns what it was sent, at its own weight."""
    after = round_program("ABD", local_epochs=0, distill_epochs=0)(federation, KEY, pretrained)[0]
    close(after.server.models, pretrained.server.models, rtol=1e-5, atol=1e-6)


def test_without_d_models_are_averaged_plainly(federation, pretrained):
    """Without epochs copies are the global model, and partial clients send what they keep."""
    after = round_program("ABC", local_epochs=0, distill_epochs=0)(federation, KEY, pretrained)[0]
    before = pretrained.server.models
    for c, kind in ((1, (1,)), (2, PAIR)):
        kept = [at(pretrained.clients[c], i) for i in (0, 1)]
        assert largest_difference(*kept) > 1e-3
        close(after.server.models[kind], mean([before[kind]] * 3 + kept), atol=1e-6)
    for kind in (FULL, (0,), (2,)):
        close(after.server.models[kind], before[kind], atol=1e-6)


def test_without_b_multi_view_clients_send_their_own_model_only(federation, pretrained):
    algorithm = build("ACD")
    found = exchange(algorithm, algorithm.round[0], federation, pretrained, cohorts=[0])
    assert all(set(found[i][1].models) == {FULL} for i in (0, 3, 5))
    assert all("distillation" not in found[i][2] for i in (0, 3, 5))
    assert set(algorithm.round[0].broadcast(pretrained.server, FULL)) == {FULL}
    after = round_program("ACD")(federation, KEY, pretrained)[0]
    for kind, model in after.server.models.items():
        if kind in ((0,), (2,)):  # nobody sent these
            chex.assert_trees_all_equal(model, pretrained.server.models[kind])
        else:
            assert largest_difference(model, pretrained.server.models[kind]) > 1e-3


def test_distillation_leaves_the_own_model_alone(federation, pretrained, exchanged):
    """No gradient reaches the target: with and without B the client's own model is the same."""
    algorithm = build("ACD")
    found = exchange(algorithm, algorithm.round[0], federation, pretrained, cohorts=[0])
    for i in (0, 3, 5):
        close(found[i][1].models[FULL], exchanged[i][1].models[FULL], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("components", "matters"), [("ABD", False), ("ABCD", True)])
def test_what_a_partial_client_keeps_matters_with_c_only(
    federation, pretrained, components, matters
):
    algorithm = build(components)
    other = pretrained._replace(clients=jax.tree.map(lambda x: x + 0.3, pretrained.clients))
    before, after = (
        exchange(algorithm, algorithm.round[0], federation, s, cohorts=[2])
        for s in (pretrained, other)
    )
    sent = pretrained.server.models[PAIR]
    for i in (2, 6):
        if matters:
            assert largest_difference(before[i][1].models, after[i][1].models) > 1e-2
            continue
        chex.assert_trees_all_equal(before[i], after[i])
        # It only reconstructs: what no reconstruction trains stays the global model's.
        model = parts_of(before[i][1])[PAIR]
        close(model.joint_head, sent.joint_head)
        client = at(federation.cohorts[2], {2: 0, 6: 1}[i])
        close(model.autoencoders, pretraining_step(sent, client), atol=1e-4)


def test_what_is_sent_down_is_what_will_be_trained(pretrained):
    broadcast = build().round[0].broadcast
    assert set(broadcast(pretrained.server, FULL)) == set(pretrained.server.models)
    assert set(broadcast(pretrained.server, PAIR)) == {PAIR}
    assert set(broadcast(pretrained.server, (1,))) == {(1,)}


def test_numbers_that_may_be_swept_are_traced(federation, pretrained):
    """vmap over every leaf of the hyper-parameters is a loop over them."""
    config = dataclasses.replace(CONFIG, components="ACD")
    full, pair = at(federation.cohorts[0], 0), at(federation.cohorts[2], 0)

    def updates(hyper):
        phase = fmcsc(config, hyper).round[0]
        state = at(pretrained.clients[2], 0)
        result = []
        for client, kept in ((full, ()), (pair, state)):
            sent = phase.broadcast(pretrained.server, client.view_ids)
            result.append(phase.client(KEY, sent, kept, client)[1:])
        return result

    values = FMCSCHyperparams(
        learning_rate=jnp.array([0.01, 0.02, 0.01, 0.01]),
        tau_m=jnp.array([0.5, 0.5, 0.1, 0.5]),
        tau_p=jnp.array([0.5, 0.5, 0.5, 0.1]),
        weight_floor=jnp.array([1e-3, 1e-3, 1e-3, 9.0]),
    )
    together, alone = jit(jax.vmap(updates))(values), jit(updates)
    for i in range(4):
        close(at(together, i), alone(at(values, i)), rtol=1e-3, atol=1e-4)
    (_, full_info), (pair_update, pair_info) = together
    assert full_info["loss"][2] != full_info["loss"][0] == full_info["loss"][3]
    assert pair_info["loss"][3] != pair_info["loss"][0] == pair_info["loss"][2]
    assert pair_update.weights[PAIR][3] == 9.0 > pair_update.weights[PAIR][0]
    first, second = (at(pair_update.models, i) for i in (0, 1))
    assert largest_difference(first, second) > 1e-3


# --- Who takes part -------------------------------------------------------------------------------


def test_who_takes_no_part_has_no_influence():
    federation = make_federation(CLIENTS[:2])
    algorithm, shares = build("ACD"), [0.67, 0.5]

    @jit
    def train(federation):
        start = engine.start(algorithm, federation, KEY, participation=shares)
        state, _ = engine.setup(algorithm, federation, KEY, start)
        return start, engine.one_round(algorithm, federation, KEY, state, 0)[0]

    start, result = train(federation)
    took = [np.asarray(places) for places in result.participants]
    assert [len(places) for places in took] == [2, 1]

    def turned(who):
        cohorts = []
        for cohort, places in zip(federation.cohorts, took, strict=True):
            chosen = np.isin(np.arange(cohort.n_clients), places) == (who == "participants")
            views = tuple(jnp.where(chosen[:, None, None], -2 * x, x) for x in cohort.views)
            cohorts.append(cohort.replace(views=views))
        return federation.replace(cohorts=tuple(cohorts))

    chex.assert_trees_all_equal(train(turned("others"))[1], result)
    _, changed = train(turned("participants"))
    for kind in (FULL, (1,)):
        assert largest_difference(changed.server.models[kind], result.server.models[kind]) > 1e-3
    # Who takes no part keeps its initial state.
    (other,) = {0, 1} - set(took[1].tolist())
    chex.assert_trees_all_equal(at(result.clients[1], other), at(start.clients[1], other))
    assert largest_difference(*(at(x.clients[1], 1 - other) for x in (result, start))) > 1e-3


def test_the_federation_needs_a_client_with_all_views():
    with pytest.raises(ValueError, match="no client holds all 3 views"):
        engine.start(build(), make_federation(CLIENTS[1:]), KEY)


# --- Clustering -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(federation, pretrained):
    return jit(functools.partial(engine.finish, build(), round_index=0))(
        federation, KEY, pretrained
    )[0]


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
    _, message, _ = jax.eval_shape(phase.client, KEY, sent, (), client)
    assert [leaf.shape for leaf in jax.tree.leaves(message)] == [(K, CONFIG.latent_dim)]
    chex.assert_trees_all_equal(finished.server.models, pretrained.server.models)
    # They are means of groups of the leader's rows.
    h = np_features(pretrained.server.models[FULL], real_views(client))["h"]
    groups = np.argmin(((h[:, None] - np.asarray(finished.server.centroids)) ** 2).sum(-1), axis=1)
    assert set(groups) == set(range(K))
    means = np.stack([h[groups == c].mean(axis=0) for c in range(K)])
    np.testing.assert_allclose(finished.server.centroids, means, atol=1e-5)


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
    kept, (own, sizes), _ = client_program(first.client)(KEY, sent, at(state.clients[1], 1), client)
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


def test_with_federated_centroids_the_model_is_kept_beside_h(federation, pretrained, exchanged):
    algorithm = build(centroids="federated")
    client, phase = at(federation.cohorts[1], 0), algorithm.round[0]
    start = at(engine.start(algorithm, federation, KEY).clients[1], 0)
    state = start._replace(model=at(pretrained.clients[1], 0))
    key = jax.random.fold_in(KEY, int(client.client_ids))
    sent = phase.broadcast(pretrained.server, client.view_ids)
    after, update, _ = jit(phase.client)(key, sent, state, client)
    model, expected, _ = exchanged[int(client.client_ids)]
    close(after.model, model, rtol=1e-5)
    close(update, expected, rtol=1e-5)
    np.testing.assert_array_equal(after.h, state.h)


def new_clients(view_ids, n=3, rows=9):
    rng = np.random.default_rng(8)
    return Cohort(
        views=tuple(
            jnp.asarray(rng.normal(size=(n, rows, DIMS[v])), jnp.float32) for v in view_ids
        ),
        mask=jnp.arange(rows)[None] < jnp.array([9, 6, 7])[:, None],
        sample_ids=jnp.zeros((n, rows), jnp.int32),
        client_ids=jnp.arange(100, 100 + n),
        view_ids=view_ids,
    )


@pytest.mark.parametrize("view_ids", [FULL, (2,)])
def test_new_clients_cluster_from_the_centroids(finished, view_ids):
    """They took no part and keep no state; view 2 alone was held by nobody."""
    cohort, algorithm = new_clients(view_ids), build()
    h = jit(jax.vmap(algorithm.embed, (None, None, 0)))(finished.server, (), cohort)
    passed = h[0, :K]  # none of them loses all its rows, of which scikit-learn has other ideas
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


def test_views_without_a_model_are_refused(finished):
    client = at(new_clients((0, 1)), 0)
    for function in (build().assign, build().embed):
        with pytest.raises(ValueError, match=r"holds views \(0, 1\); there are global models"):
            function(finished.server, (), client)


# --- Configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"n_clusters": 0},
        {"latent_dim": 0},
        {"head_hidden": 0},
        {"batch_size": 0},
        {"n_bins": 0},
        {"n_init": 0},
        {"pretrain_epochs": -1},
        {"local_epochs": -1},
        {"distill_epochs": -1},
        {"hidden": (4, 0)},
        {"contrast": "cosine"},
        {"components": "ABX"},
        {"leader_epochs": -1},
        {"target": "joint"},
        {"centroids": "first"},
        {"centroid_rounds": 0},
        {"partial_models": "none"},
    ],
)
def test_a_bad_configuration_is_named(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"{name}: got .*; allowed"):
        dataclasses.replace(CONFIG, **change)


def test_defaults_are_those_of_the_paper():
    config, hyper = FMCSCConfig(10), FMCSCHyperparams()
    assert (config.hidden, config.latent_dim, config.batch_size) == ((500, 500, 2000), 20, 256)
    assert (config.pretrain_epochs, config.local_epochs, config.distill_epochs) == (250, 25, 50)
    assert (hyper.learning_rate, hyper.tau_m, hyper.tau_p) == (3e-4, 0.5, 0.5)
    assert set(config.components) == set("ABCD")


# --- All of it ------------------------------------------------------------------------------------


def accuracy(cohorts, labels, truth, k):
    """Share of all clients' samples under one matching of clusters to classes."""
    table = np.zeros((k, k), int)
    for cohort, found in zip(cohorts, labels, strict=True):
        real = np.asarray(cohort.mask)
        np.add.at(table, (np.asarray(found)[real], truth[np.asarray(cohort.sample_ids)[real]]), 1)
    return table[linear_sum_assignment(-table)].sum() / table.sum()


def test_it_learns_one_clustering_of_blobs_that_every_view_sees_differently():
    rng = np.random.default_rng(0)
    truth = np.arange(108) % 3
    source = 6 * np.array([[1, 0], [-0.5, 0.8], [-0.5, -0.8]])[truth] + rng.normal(size=(108, 2))
    views = [source @ rng.normal(size=(2, 5)) + 0.3 * rng.normal(size=(108, 5)) for _ in range(3)]
    views = [(x - x.min(axis=0)) / np.ptp(x, axis=0) for x in views]
    federation = Federation.from_arrays(views, partition=data.hybrid_partition(0, 108, 3, 6))
    assert len(federation.cohorts) == 4
    config = FMCSCConfig(
        3,
        hidden=(32,),
        latent_dim=6,
        head_hidden=32,
        pretrain_epochs=60,
        local_epochs=30,
        distill_epochs=60,
        n_init=10,
    )
    algorithm = fmcsc(config, FMCSCHyperparams(learning_rate=3e-3))

    def begin(federation):
        state = engine.start(algorithm, federation, KEY)
        return engine.setup(algorithm, federation, KEY, state)[0]

    def evaluate(federation, state):
        return engine.assign(
            algorithm, federation, engine.finish(algorithm, federation, KEY, state, 0)[0]
        )

    one_round = jit(functools.partial(engine.one_round, algorithm))
    evaluate, state = jit(evaluate), jit(begin)(federation)
    before = accuracy(federation.cohorts, evaluate(federation, state), truth, 3)
    for r in range(4):
        state, _ = one_round(federation, KEY, state, r)
    after = accuracy(federation.cohorts, evaluate(federation, state), truth, 3)
    assert after > 0.9 > before, (before, after)
