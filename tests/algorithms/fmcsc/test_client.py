"""What FMCSC's clients do, against a step of Adam along the gradient of each loss."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from jaxfedmvc import engine, nn
from jaxfedmvc.algorithms.fmcsc import fmcsc
from jaxfedmvc.algorithms.fmcsc.networks import features
from jaxfedmvc.algorithms.fmcsc.objective import (
    distillation_loss,
    hide_features,
    multi_view_loss,
    partial_view_loss,
    reconstruction_loss,
)
from jaxfedmvc.algorithms.fmcsc.training import fit_autoencoders, fit_copies, fit_multi_view
from jaxfedmvc.federation import Cohort
from tests.algorithms.fmcsc.by_numpy import np_features, np_paper_contrast, np_reconstruction
from tests.algorithms.fmcsc.tiny import (
    CONFIG,
    FULL,
    HYPER,
    KEY,
    NOTHING,
    PAIR,
    TAU_M,
    TAU_P,
    adam_step,
    at,
    build,
    client_program,
    close,
    exchange,
    jit,
    largest_difference,
    members,
    parts_of,
    pretraining_step,
    real_views,
)


def test_the_message_of_pretraining_is_autoencoders_only(federation, started):
    for c, place, _, client in members(federation):
        phase = build().setup[1]
        sent = phase.broadcast(started.server, client.view_ids)
        state = at(started.clients[c], place)
        _, message, _ = jax.eval_shape(phase.client, KEY, sent, state, client)
        expected = started.server.models[client.view_ids].autoencoders
        chex.assert_trees_all_equal_shapes_and_dtypes(message, expected)


@pytest.mark.slow
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
    chex.assert_trees_all_equal(own[2][0].model.joint_head, started.server.models[PAIR].joint_head)


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
            assert state == NOTHING and info["loss"] == pytest.approx(float(value), rel=1e-4)
            close(parts_of(update)[FULL], model, atol=1e-4)


def test_copies_of_partial_models_are_drawn_to_the_own_representation(
    federation, pretrained, exchanged
):
    """Eq. (6): the target is H of the model that the client has just trained."""

    def step(received, own, client):
        views = client.by_view()
        target = features(own, views).h

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


@pytest.mark.slow
def test_the_target_of_the_copies_may_be_the_new_global_model(federation, pretrained, exchanged):
    """Two exchanges: first f_m alone, as ever; then copies, towards H of what f_g is by now."""
    algorithm = build(target="global")
    first, second = algorithm.round
    client, models = at(federation.cohorts[0], 0), pretrained.server.models
    sent = first.broadcast(pretrained.server, FULL)
    assert set(sent) == {FULL} and first.broadcast(pretrained.server, PAIR) == {}
    _, update, info = client_program(first.client)(KEY, sent, NOTHING, client)
    assert set(update.models) == {FULL} and set(info) == {
        "loss",
        "reconstruction",
        "contrast",
        "weight",
    }
    alone = client_program(first.client)(jax.random.fold_in(KEY, 3), sent, NOTHING, client)[1]
    close(parts_of(alone)[FULL], parts_of(exchanged[3][1])[FULL], rtol=1e-5)

    def step(received, full):
        target = features(full, client.by_view()).h

        def loss(models):
            return distillation_loss(CONFIG, models, client.by_view(), target, client.mask)

        return adam_step(received, jax.grad(loss)(received))

    new = parts_of(alone)[FULL]
    sent = second.broadcast(pretrained.server._replace(models=models | {FULL: new}), FULL)
    _, update, info = jit(second.client)(KEY, sent, NOTHING, client)
    received = {kind: model for kind, model in models.items() if kind != FULL}
    close(parts_of(update), jit(step)(received, new), atol=1e-4)
    assert set(info) == {"distillation"} and set(update.models) == set(received)
    assert set(second.broadcast(pretrained.server, PAIR)) == {PAIR}
    # Without B there is nothing to fit.
    assert len(build("ACD", target="global").round) == 1


def test_what_is_minimised_sees_what_is_left_and_the_settings_reach_the_loop(sample, monkeypatch):
    """Caught where it is handed to the training loop, which is followed by tests of its own."""
    models, views, mask, _ = sample
    caught = []

    def fit(key, params, loss, rows, mask, keyed=False, **settings):
        caught.append((loss(params, rows, mask, *[key] * keyed), settings))
        return params, np.zeros(1)

    monkeypatch.setattr(nn, "fit", fit)
    config = dataclasses.replace(CONFIG, batch_size=5, least_steps=3)
    hyper = dataclasses.replace(HYPER, mask_rate=0.5)
    client = Cohort(tuple(views.values()), mask, None, None, FULL)
    target = np.random.default_rng(4).normal(size=(8, CONFIG.latent_dim)).astype(np.float32)
    full, pair = models[FULL], {PAIR: models[PAIR]}

    @jit
    def minimised(full, pair, target, client):
        fit_autoencoders(config, hyper, KEY, full, client, 7)
        fit_multi_view(config, hyper, KEY, full, client, 8)
        fit_copies(config, hyper, KEY, pair, target, client, 9)
        return [value for value, _ in caught]

    @jit
    def expected(full, pair, target, views):
        seen = hide_features(KEY, views, 0.5)
        out = features(full, views)
        return (
            reconstruction_loss(out.reconstruction, views, mask),
            multi_view_loss(CONFIG, TAU_M, full, views, mask, seen),
            distillation_loss(CONFIG, pair, views, target, mask, seen),
        )

    values = minimised(full, pair, target, client)
    settings = tuple(settings for _, settings in caught)
    np.testing.assert_allclose(values, expected(full, pair, target, views), rtol=1e-5)
    same = {"batch_size": 5, "learning_rate": HYPER.learning_rate, "least_steps": 3}
    assert settings == tuple({"epochs": epochs, **same} for epochs in (7, 8, 9))


@pytest.mark.slow
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


def test_a_partial_client_trains_its_own_model_against_the_global_one(
    federation, pretrained, exchanged
):
    def step(model, received, client):
        views = client.by_view()
        h_global = features(received, views).h

        def loss(model):
            return partial_view_loss(CONFIG, TAU_P, model, views, h_global, client.mask)

        value, gradient = jax.value_and_grad(loss)(model)
        return value, adam_step(model, gradient)

    step = jit(step)
    for c, place, i, client in members(federation):
        if c > 0:
            state, update, info = exchanged[i]
            received = pretrained.server.models[client.view_ids]
            value, model = step(at(pretrained.clients[c], place).model, received, client)
            assert info["loss"] == pytest.approx(float(value), rel=1e-4)
            close(state.model, model, atol=1e-4)
            close(parts_of(update)[client.view_ids], state.model)
            assert set(update.models) == set(update.weights) == {client.view_ids}


def test_a_partial_client_that_has_trained_nothing_starts_from_the_global_model(
    federation, started, pretrained
):
    """It was not drawn for pre-training, or a leader has trained all models since."""
    algorithm = build()
    assert not any(np.any(state.started) for state in started.clients[1:])
    assert all(np.all(state.started) for state in pretrained.clients[1:])
    client, sent = at(federation.cohorts[2], 0), pretrained.server.models[PAIR]
    train = client_program(algorithm.round[0].client)
    new = at(started.clients[2], 0)
    as_sent = new._replace(model=sent, started=np.bool_(True))
    states = [train(KEY, {PAIR: sent}, state, client)[0] for state in (new, as_sent)]
    chex.assert_trees_all_close(*states, rtol=1e-6)
    led = build(leader_epochs=1).setup
    autoencoders = led[1].broadcast(started.server, PAIR)
    kept, _, _ = jit(led[1].client)(KEY, autoencoders, new, client)
    assert not kept.started


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


@pytest.mark.slow
def test_distillation_leaves_the_own_model_alone(federation, pretrained, exchanged):
    """No gradient reaches the target: with and without B the client's own model is the same."""
    algorithm = build("ACD")
    found = exchange(algorithm, algorithm.round[0], federation, pretrained, cohorts=[0])
    for i in (0, 3, 5):
        close(found[i][1].models[FULL], exchanged[i][1].models[FULL], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("components", "matters"),
    [pytest.param("ABD", False, marks=pytest.mark.slow), ("ABCD", True)],
)
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


@pytest.mark.slow
def test_with_federated_centroids_the_model_is_kept_beside_h(federation, pretrained, exchanged):
    algorithm = build(centroids="federated")
    client, phase = at(federation.cohorts[1], 0), algorithm.round[0]
    start = at(engine.start(algorithm, federation, KEY).clients[1], 0)
    state = start._replace(model=at(pretrained.clients[1], 0).model, started=np.bool_(True))
    key = jax.random.fold_in(KEY, int(client.client_ids))
    sent = phase.broadcast(pretrained.server, client.view_ids)
    after, update, _ = jit(phase.client)(key, sent, state, client)
    kept, expected, _ = exchanged[int(client.client_ids)]
    close(after.model, kept.model, rtol=1e-5)
    close(update, expected, rtol=1e-5)
    np.testing.assert_array_equal(after.h, state.h)
