"""What all centralised methods must do whatever they compute: the order of rows, few distinct rows,
one view, views that no sample links, shapes that do not agree."""

import functools

import jax
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.pooled import (
    cpspan,
    dsimvc,
    gcfagg,
    hcp_imsc,
    imvc_cbg,
    jpltd,
    lmvsc,
    lsimvc,
    mflvc,
    proimp,
    simvc,
)
from jaxfedmvc.algorithms.registry import configured
from jaxfedmvc.engine import streaming
from tests.algorithms.pooled import planted
from tests.algorithms.pooled.planted import COMPLETE, KEY, OBSERVED, TRUTH, VIEWS, K, N

# The method's function, settings by which it finds the planted clusters, and whether rows may lack
# a view. Networks are small and trained long.
DEEP = {"hidden": (16,), "latent_dim": 8, "batch_size": 16}
METHODS_OF_ROWS = {
    "lsimvc": (lsimvc.fit, {"n_neighbours": 3, "max_iter": 20, "n_init": 4}, True),
    "imvc_cbg": (imvc_cbg.fit, {"max_iter": 6, "n_init": 4, "lam": 0.1}, True),
    "hcp_imsc": (hcp_imsc.fit, {"max_iter": 6, "n_init": 4, "lam1": 0.5, "lam2": 0.7}, True),
    "jpltd": (jpltd.fit, {"dim": 6, "max_iter": 20, "n_init": 4, "lam": 0.5, "theta": 0.05}, True),
    "lmvsc": (lmvsc.fit, {"n_anchors": 5, "max_steps": 50, "n_init": 3}, False),
    "cpspan": (
        cpspan.fit,
        {**DEEP, "pretrain_epochs": 60, "align_epochs": 10, "learning_rate": 0.01},
        True,
    ),
    "dsimvc": (
        dsimvc.fit,
        {
            **DEEP,
            "feature_dim": 6,
            "pretrain_epochs": 20,
            "neighbour_pretrain_epochs": 20,
            "neighbour_epochs": 10,
            "steps": 100,
            "learning_rate": 0.02,
        },
        True,
    ),
    "proimp": (
        proimp.fit,
        {
            **DEEP,
            "hidden": (32,),
            "batch_size": 100,
            "epochs": 60,
            "pretrain_epochs": 45,
            "n_init": 3,
            "learning_rate": 0.01,
        },
        True,
    ),
    "gcfagg": (
        gcfagg.fit,
        {
            **DEEP,
            "feature_dim": 8,
            "attention_hidden": 8,
            "pretrain_epochs": 30,
            "contrast_epochs": 10,
            "learning_rate": 0.01,
        },
        False,
    ),
    "mflvc": (
        mflvc.fit,
        {
            **DEEP,
            "feature_dim": 8,
            "pretrain_epochs": 30,
            "contrast_epochs": 30,
            "tune_epochs": 20,
            "learning_rate": 0.01,
        },
        False,
    ),
    "simvc": (
        simvc.fit,
        {**DEEP, "head_hidden": 8, "epochs": 24, "n_runs": 3, "learning_rate": 0.01},
        False,
    ),
    "comvc": (
        simvc.fit_comvc,
        {**DEEP, "head_hidden": 8, "epochs": 24, "n_runs": 3, "learning_rate": 0.01},
        False,
    ),
}


@functools.cache
def program(name):
    """Compiles a method for the planted rows; one program serves all tests."""
    fit, settings, _ = METHODS_OF_ROWS[name]
    config, hyper = configured(METHODS[name], settings, {"n_clusters": K})
    return jax.jit(lambda views, observed: fit(KEY, views, observed, config, hyper))


def observed_of(name):
    return OBSERVED if METHODS_OF_ROWS[name][2] else COMPLETE


def test_all_centralised_methods_are_here():
    pooled = {name for name, method in METHODS.items() if method.topology == "pooled"}
    assert pooled == set(METHODS_OF_ROWS)


# JPLTD's low-rank tensor is of neighbouring rows: see its docstring.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(METHODS_OF_ROWS) - {"jpltd"}))
def test_the_order_of_rows_decides_nothing(name):
    observed, order = observed_of(name), np.random.default_rng(3).permutation(N)
    expected = np.asarray(program(name)(VIEWS, observed).labels)
    assert adjusted_rand_score(TRUTH, expected) == 1
    found = program(name)(tuple(x[order] for x in VIEWS), observed[order])
    assert adjusted_rand_score(expected[order], found.labels) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS_OF_ROWS)
def test_fewer_distinct_rows_than_clusters_give_numbers(name):
    """A cluster has to be empty, or a copy of another."""
    views = tuple(x[TRUTH == 0][:1].repeat(N, axis=0) for x in VIEWS)
    views = tuple(np.where((np.arange(N) % 2)[:, None], x, -x) for x in views)
    found = jax.tree.map(np.asarray, program(name)(views, observed_of(name)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert found.labels.min() >= 0 and found.labels.max() < K


FAST = {"imvc_cbg", "lmvsc"}


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in METHODS_OF_ROWS]
)
def test_a_second_fit_of_other_rows_compiles_nothing(name, compiled):
    """Outside of `jit`, and with other hyper-parameters, too."""
    fit, settings, _ = METHODS_OF_ROWS[name]
    config, hyper = configured(METHODS[name], settings, {"n_clusters": K})
    keys, observed = jax.random.split(KEY), observed_of(name)
    fit(keys[0], VIEWS, observed, config, hyper)
    first, other = len(compiled), jax.tree.map(lambda number: number * 1.5, hyper)
    found = fit(keys[1], tuple(1 - x for x in VIEWS), observed, config, other)
    assert len(compiled) == first
    assert found.labels.shape == (N,)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["imvc_cbg", "lsimvc"])
def test_a_view_without_rows_does_not_take_the_weight_of_the_others(name):
    """It fits without any error."""
    observed = np.pad(OBSERVED, ((0, 0), (0, 1)))
    found = program(name)((*VIEWS, VIEWS[0]), observed)
    assert adjusted_rand_score(TRUTH, found.labels) == 1
    assert np.asarray(found.trace).min() > 0


# --- What cannot be clustered ---------------------------------------------------------------------


def made(name):
    _, settings, _ = METHODS_OF_ROWS[name]
    config, hyper = configured(METHODS[name], settings, {"n_clusters": K})
    return METHODS[name].make(config, hyper)


def start(name, federation):
    return made(name).init(KEY, federation)


@pytest.mark.parametrize("name", ["comvc", "dsimvc", "mflvc", "proimp"])
def test_one_view_has_nothing_to_contrast(name):
    with pytest.raises(ValueError, match=f"{name} contrasts views, but there is 1; allowed is 2"):
        start(name, planted.federation(COMPLETE[:, :1], VIEWS[:1]))


@pytest.mark.parametrize("name", ["hcp_imsc", "imvc_cbg", "jpltd", "lsimvc"])
def test_views_that_no_sample_links_are_refused(name):
    apart = np.stack([np.arange(N) < 18, np.arange(N) >= 18], axis=1)
    with pytest.raises(ValueError, match=rf"{name}: no sample has views of both \(0,\) and \(1,\)"):
        start(name, planted.federation(apart))
    apart[4] = True
    start(name, planted.federation(apart))


@pytest.mark.parametrize("name", ["imvc_cbg", "lsimvc"])
def test_constant_views_are_refused_and_zeros_in_the_place_of_data_are_not(name):
    constant = planted.federation(OBSERVED, (VIEWS[0], np.ones_like(VIEWS[1])))
    with pytest.raises(ValueError, match=f"{name}: all 5 features of view 1 are constant"):
        start(name, constant)
    with pytest.raises(ValueError, match="are constant"):  # the key alone is traced
        jax.eval_shape(lambda key: made(name).init(key, constant), KEY)
    streaming.start_on_host(made(name), planted.federation(OBSERVED), KEY, 1.0)


@pytest.mark.parametrize("name", METHODS_OF_ROWS)
def test_shapes_that_do_not_agree_are_named(name):
    with pytest.raises(
        ValueError, match=r"observed: has the shape \(35, 2\); allowed is \(36, 2\)"
    ):
        program(name)(VIEWS, COMPLETE[1:])
    with pytest.raises(ValueError, match=r"views\[1\]: has the shape \(35, 5\)"):
        program(name)((VIEWS[0], VIEWS[1][1:]), COMPLETE)


@pytest.mark.parametrize("name", ["hcp_imsc", "jpltd"])
def test_a_view_of_one_feature_whose_rows_would_all_be_one_is_refused(name):
    narrow = planted.federation(COMPLETE, (VIEWS[0], VIEWS[1][:, :1]))
    with pytest.raises(ValueError, match=f"{name}: view 1 has 1 feature; allowed is 2 or more"):
        start(name, narrow)


@pytest.mark.parametrize("name", ["imvc_cbg", "lsimvc"])
def test_fewer_features_than_clusters_are_named(name):
    with pytest.raises(ValueError, match="view 1 has 2 features; allowed is 3 or more"):
        program(name)((VIEWS[0], VIEWS[1][:, :2]), COMPLETE)
