"""Clipped and noised uploads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxfedmvc import nn
from jaxfedmvc.algorithms.fmcsc import FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.fmcsc.client import Update, weighted
from jaxfedmvc.algorithms.fmcsc.uploads import add_noise, clip_update, released
from tests.algorithms.fmcsc.tiny import (
    CONFIG,
    FLOOR,
    FULL,
    HYPER,
    KEY,
    PAIR,
    at,
    build,
    client_program,
    close,
    jit,
    parts_of,
)

jit_clip, jit_noise = jit(clip_update), jit(add_noise)


def difference(a, b):
    """All entries of a tree less those of another, in one vector."""
    leaves = jax.tree.leaves(jax.tree.map(np.subtract, *jax.device_get((a, b))))
    return np.concatenate([np.float64(x).ravel() for x in leaves])


def messages(models, weight=1.0):
    """`{what: (message, sent, models of the message, the same as they were sent)}`."""
    sent = jax.device_get({PAIR: models[PAIR], FULL: models[FULL], (1,): None})
    moved = jax.tree.map(lambda x: x + 0.5, {kind: sent[kind] for kind in (PAIR, FULL)})
    before = {kind: sent[kind] for kind in moved}
    update = Update(jax.tree.map(lambda x: weight * x, moved), dict.fromkeys(moved, weight))
    autoencoders = moved[FULL].autoencoders
    return {
        "pre-training": (autoencoders, sent[FULL], autoencoders, sent[FULL].autoencoders),
        "leader": (moved, sent, moved, before),
        "round": (update, sent, moved, before),
    }


@pytest.mark.slow
@pytest.mark.parametrize("what", ["pre-training", "leader", "round"])
def test_an_update_is_scaled_down_to_the_bound(sample, what):
    message, sent, models, before = messages(sample[0])[what]
    update = difference(models, before)
    length = np.abs(update).sum()
    for bound, share in ((length / 4, 0.25), (2 * length, 1.0)):
        found = jit_clip(bound, message, sent)
        if what == "round":
            assert found.weights == message.weights
            found = found.models
        np.testing.assert_allclose(difference(found, before), share * update, atol=1e-6)


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, 3e38])
def test_an_update_without_a_finite_norm_is_zero(wrong):
    received = {FULL: {"a": np.float32([1.0, 2.0]), "b": np.float32([3.0])}}
    trained = {FULL: {"a": np.float32([2.0, wrong]), "b": np.float32([wrong])}}
    message = Update(trained, {FULL: 1.0})
    assert difference(jit_clip(1.0, trained, received), received).tolist() == [0, 0, 0]
    found = jit_clip(1.0, message, received)
    assert found.weights == {FULL: 1.0}
    assert difference(found.models, received).tolist() == [0, 0, 0]


def test_the_norm_is_a_sum_of_sizes_and_noise_comes_on_top():
    """By hand: an update of 3 and -4 has a norm of 7. Noise that is clipped, too, hides less."""
    received = {FULL: {"a": np.float32([1.0, 2.0]), "b": np.float32([5.0])}}
    trained = {FULL: {"a": np.float32([4.0, -2.0]), "b": np.float32([5.0])}}
    clipped = jit_clip(3.5, trained, received)
    np.testing.assert_allclose(difference(clipped, received), [1.5, -2.0, 0.0])
    release = jit(released(FMCSCHyperparams(upload_clip=3.5, upload_noise=100.0)))
    both = release(KEY, trained, received)
    close(both, jit_noise(100.0, KEY, clipped))
    assert np.abs(difference(both, received)).sum() > 35


def test_weights_are_bits_with_a_floor_and_ones_with_a_bound():
    """Weights travel without noise, and tell something of the data."""
    models, bits = {FULL: jnp.ones(2), PAIR: jnp.ones(2)}, {FULL: 2.0, PAIR: FLOOR / 2}
    found = weighted(CONFIG, HYPER, models, bits)
    close(found.weights, {FULL: 2.0, PAIR: FLOOR})
    close(found.models, {FULL: 2 * jnp.ones(2), PAIR: FLOOR * jnp.ones(2)})
    found = weighted(CONFIG, dataclasses.replace(HYPER, upload_clip=1.0), models, bits)
    close(found, Update(models, {FULL: 1.0, PAIR: 1.0}))


@pytest.mark.parametrize("what", ["pre-training", "leader", "round"])
def test_noise_is_laplace_and_times_the_weight(sample, what):
    message, _, models, _ = messages(sample[0], weight=3.0)[what]
    found = jit_noise(2.0, KEY, message)
    noise = difference(parts_of(found) if what == "round" else found, models)
    assert scipy.stats.kstest(noise, scipy.stats.laplace(scale=2.0).cdf).pvalue > 1e-3


@pytest.mark.slow
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
        received = {kind: sent[kind] for kind in update.models}
        norm = np.abs(difference(update.models, received)).sum()
        assert norm == pytest.approx(clip, rel=0.02)  # parameters are rounded to float32
        assert np.abs(difference(parts_of(free), received)).sum() > 10 * clip


def test_a_client_keeps_its_model_without_noise(federation, pretrained):
    """Without epochs a client sends the model that it keeps."""
    config = dataclasses.replace(CONFIG, local_epochs=0)
    phase = fmcsc(config, dataclasses.replace(HYPER, upload_noise=2.0)).round[0]
    client, state = at(federation.cohorts[1], 0), at(pretrained.clients[1], 0)
    sent = phase.broadcast(pretrained.server, client.view_ids)
    kept, update, _ = jit(phase.client)(KEY, sent, state, client)
    close(kept, state, rtol=1e-6)
    noise = difference(parts_of(update)[client.view_ids], state.model)
    assert scipy.stats.kstest(noise, scipy.stats.laplace(scale=2.0).cdf).pvalue > 1e-3


@pytest.mark.parametrize(("noise", "is_drawn"), [(2.0, True), (None, False)])
def test_noise_is_on_the_models_of_every_exchange(
    federation, pretrained, monkeypatch, noise, is_drawn
):
    """With training left out, nothing else is drawn."""
    monkeypatch.setattr(nn, "fit", lambda key, params, *_, **__: (params, jnp.zeros(1)))
    config = dataclasses.replace(CONFIG, leader_epochs=1, target="global")
    algorithm = fmcsc(config, dataclasses.replace(HYPER, upload_noise=noise))
    assert len(algorithm.setup) == 3 and len(algorithm.round) == 2
    for phase in algorithm.setup + algorithm.round:
        client, state = at(federation.cohorts[0], 0), at(pretrained.clients[0], 0)
        sent = phase.broadcast(pretrained.server, FULL)
        program = jax.make_jaxpr(phase.client)(KEY, sent, state, client)
        assert ("random_bits" in str(program)) == is_drawn
