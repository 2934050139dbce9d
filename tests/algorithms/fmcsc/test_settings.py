"""FMCSC's settings."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc, local_fmcsc
from tests.algorithms.fmcsc.tiny import CONFIG


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
        {"min_cluster_size": 0, "centroids": "federated"},
        {"min_cluster_size": 2},
        {"centroid_starts": 2},
        {"centroid_starts": 0, "centroids": "federated"},
        {"partial_models": "none"},
        {"partial_rounds": True, "partial_models": "branch"},
        {"partial_models": "branch", "partial_rounds": False, "components": "AD"},
        {"leader_epochs": 1, "components": "BCD"},
    ],
)
def test_a_bad_configuration_is_named(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))}: got .*; allowed is "):
        dataclasses.replace(CONFIG, **change)


POSITIVE = ("learning_rate", "tau_m", "tau_p", "weight_floor", "upload_noise", "upload_clip")


@pytest.mark.parametrize("make", [fmcsc, local_fmcsc])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0.0) for name in POSITIVE),
        ("mask_rate", 0.0),
        ("mask_rate", 1.0),
        ("tau_m", np.nan),
        ("learning_rate", np.inf),
    ],
)
def test_a_bad_hyperparameter_is_named(make, name, value):
    hyper = FMCSCHyperparams(**{name: value})
    with pytest.raises(ValueError, match=f"{name}: got .*; allowed is .*above 0"):
        make(CONFIG, hyper)


def test_traced_hyperparameters_are_not_checked():
    def traced(rate):
        fmcsc(CONFIG, FMCSCHyperparams(learning_rate=rate))
        return rate

    assert jax.jit(traced)(-1.0) == -1.0


def test_defaults_are_those_of_the_paper():
    config, hyper = FMCSCConfig(10), FMCSCHyperparams()
    assert (config.hidden, config.latent_dim, config.batch_size) == ((500, 500, 2000), 20, 256)
    assert (config.pretrain_epochs, config.local_epochs, config.distill_epochs) == (250, 25, 50)
    assert (hyper.learning_rate, hyper.tau_m, hyper.tau_p) == (3e-4, 0.5, 0.5)
    assert set(config.components) == set("ABCD")
