"""FMCSC's losses and weights against NumPy."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

from jaxfedmvc.algorithms.fmcsc.networks import features
from jaxfedmvc.algorithms.fmcsc.objective import (
    distillation_loss,
    hide_features,
    multi_view_loss,
    multi_view_weight,
    partial_view_loss,
    partial_view_weight,
    reconstruction_loss,
)
from tests.algorithms.fmcsc.by_numpy import (
    np_bits,
    np_features,
    np_model_contrast,
    np_ntxent,
    np_paper_contrast,
    np_partial_bits,
    np_reconstruction,
)
from tests.algorithms.fmcsc.tiny import CONFIG, FULL, KEY, PAIR, TAU_M, jit

features_of = jit(features)
reconstruction = jit(reconstruction_loss, static_argnums=3)
multi_weight, partial_weight = (
    jit(f, static_argnums=0) for f in (multi_view_weight, partial_view_weight)
)


def test_reconstruction_is_the_mean_square_of_real_rows_summed_over_views(sample):
    models, views, mask, real = sample
    out = features_of(models[FULL], views)
    expected = np_reconstruction(np_features(models[FULL], real), real)
    assert reconstruction(out.reconstruction, views, mask) == pytest.approx(expected, rel=1e-5)
    decoded = np_features(models[FULL], real)["reconstruction"]
    printed = sum(float(np.mean(np.sum((decoded[v] - x) ** 2, axis=1))) for v, x in real.items())
    found = reconstruction(out.reconstruction, views, mask, "sum")
    assert found == pytest.approx(printed, rel=1e-5)


@pytest.mark.parametrize("contrast", ["paper", "ntxent"])
def test_multi_view_loss(sample, contrast):
    models, views, mask, real = sample
    config = dataclasses.replace(CONFIG, contrast=contrast)
    out = np_features(models[FULL], real)
    term = np_paper_contrast if contrast == "paper" else np_ntxent
    expected = np_reconstruction(out, real)
    expected += sum(term(out["h"], h_view, 0.3) for h_view in out["h_views"].values())
    found = jit(multi_view_loss, static_argnums=0)(config, 0.3, models[FULL], views, mask)
    assert found == pytest.approx(expected, rel=1e-5)


def test_partial_view_loss_on_two_views(sample):
    models, views, mask, real = sample
    out = np_features(models[PAIR], real)
    h_global = features_of(models["other pair"], views).h
    contrast = [
        np_model_contrast(out["h"], np.asarray(h_global)[mask], z, 0.3) for z in out["z"].values()
    ]
    assert len(contrast) == 2
    expected = np_reconstruction(out, real) + np.mean(contrast)
    both = jit(jax.value_and_grad(partial_view_loss, argnums=4), static_argnums=0)
    found, gradient = both(CONFIG, 0.3, models[PAIR], views, h_global, mask)
    assert found == pytest.approx(expected, rel=1e-5)
    np.testing.assert_array_equal(gradient, 0.0)  # the global model's output is a constant


def test_distillation_loss_sums_over_models(sample):
    models, views, mask, real = sample
    target = np.random.default_rng(4).normal(size=(8, CONFIG.latent_dim)).astype(np.float32)
    expected = 0.0
    for name in (PAIR, "other pair"):
        out = np_features(models[name], real)
        expected += np.mean((out["h"] - target[mask]) ** 2) + np_reconstruction(out, real)
    received = {"first": models[PAIR], "second": models["other pair"]}
    loss = jit(distillation_loss, static_argnums=0)
    found = loss(CONFIG, received, views, target, mask)
    assert found == pytest.approx(expected, rel=1e-5)
    printed = dataclasses.replace(CONFIG, squared_error="sum")
    expected = 0.0
    for name in (PAIR, "other pair"):
        out = np_features(models[name], real)
        expected += np.sum((out["h"] - target[mask]) ** 2)
        errors = [out["reconstruction"][v] - real[v] for v in PAIR]
        expected += sum(np.mean(np.sum(error**2, axis=1)) for error in errors)
    found = loss(printed, received, views, target, mask)
    assert found == pytest.approx(expected, rel=1e-5)


def test_weights_are_bits_of_real_rows(sample):
    models, views, mask, real = sample
    out, partial = features_of(models[FULL], views), features_of(models[PAIR], views)
    full_bits = np_features(models[FULL], real)
    expected = sum(np_bits(full_bits["h"], h_view) for h_view in full_bits["h_views"].values())
    assert multi_weight(CONFIG, out, mask) == pytest.approx(expected, rel=1e-4)
    h_global = features_of(models["other pair"], views).h
    expected = np_partial_bits(np_features(models[PAIR], real), np.asarray(h_global)[mask])
    found = partial_weight(CONFIG, partial, h_global, mask)
    assert found == pytest.approx(expected, rel=1e-4)
    # Seven bins are other bits than ten.
    fewer = multi_weight(dataclasses.replace(CONFIG, n_bins=7), out, mask)
    assert abs(fewer - multi_weight(CONFIG, out, mask)) > 1e-2


def test_hidden_features_are_a_share_and_the_same_behind_padding():
    views = {
        v: 1.0 + np.arange(200 * d, dtype=np.float32).reshape(200, d) for v, d in ((0, 9), (2, 5))
    }
    hidden = jax.device_get(jit(hide_features)(KEY, views, 0.3))
    zeros = {v: x == 0 for v, x in hidden.items()}
    for v, x in hidden.items():
        np.testing.assert_array_equal(x[~zeros[v]], views[v][~zeros[v]])
    everything = np.concatenate([z.ravel() for z in zeros.values()])
    # 2800 draws: four standard deviations about the mean.
    assert abs(everything.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / everything.size)
    assert not np.array_equal(zeros[0][:, :5], zeros[2])
    fewer = jit(hide_features)(KEY, {v: x[:50] for v, x in views.items()}, 0.3)
    chex.assert_trees_all_equal(fewer, {v: x[:50] for v, x in hidden.items()})


def test_losses_see_what_is_left_and_reconstruct_all(sample):
    models, views, mask, real = sample
    left = {v: np.where(np.arange(x.shape[1]) > 0, x, np.float32(0)) for v, x in views.items()}
    out = np_features(models[FULL], {v: x[mask] for v, x in left.items()})
    expected = np_reconstruction(out, real)
    expected += sum(np_paper_contrast(out["h"], h, TAU_M) for h in out["h_views"].values())
    value = jit(functools.partial(multi_view_loss, CONFIG))(TAU_M, models[FULL], views, mask, left)
    assert value == pytest.approx(expected, rel=1e-4)
    pair = np_features(models[PAIR], {v: x[mask] for v, x in left.items()})
    expected = np.mean((pair["h"] - out["h"]) ** 2) + np_reconstruction(pair, real)
    target = np.zeros((8, CONFIG.latent_dim), np.float32)
    target[mask] = out["h"]
    value = jit(functools.partial(distillation_loss, CONFIG))(
        {PAIR: models[PAIR]}, views, target, mask, left
    )
    assert value == pytest.approx(expected, rel=1e-4)
