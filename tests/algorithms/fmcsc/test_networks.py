"""FMCSC's models against NumPy."""

import itertools

import chex
import jax
import numpy as np
import pytest

from jaxfedmvc import nn
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig
from jaxfedmvc.algorithms.fmcsc.networks import branch, features, init_model, init_models
from tests.algorithms.fmcsc.by_numpy import np_features
from tests.algorithms.fmcsc.tiny import CONFIG, FULL, KEY, PAIR, at, close, jit

features_of = jit(features)


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
    out = features_of(models[kind], views)
    close(out._asdict(), np_features(models[kind], views))
    np.testing.assert_allclose(np.linalg.norm(out.h, axis=1), 1.0, atol=1e-5)
    assert set(out.h_views) == (set(FULL) if kind == FULL else set())


def test_joint_input_is_in_the_order_of_view_ids(sample):
    """Whatever order the dictionaries of a caller have."""
    models, views, _, _ = sample
    model = models[FULL]
    turned = model._replace(autoencoders={v: model.autoencoders[v] for v in (2, 0, 1)})
    turned_views = {v: views[v] for v in (1, 2, 0)}
    # Within a program: the arguments of one are put in order.
    found, expected = (
        jit(lambda m=m, x=x: features(m, x).h)()
        for m, x in ((turned, turned_views), (model, views))
    )
    np.testing.assert_array_equal(found, expected)


def test_partial_models_start_as_f_g_without_the_other_views():
    models = jit(lambda key: init_models(key, CONFIG, (4, 3, 5), {FULL, PAIR, (1,)}))(KEY)
    whole, d, apply = models[FULL], CONFIG.latent_dim, jit(nn.apply)
    z = np.random.default_rng(0).normal(size=(6, len(FULL) * d)).astype(np.float32)
    for kind in (PAIR, (1,)):
        chex.assert_trees_all_equal(
            models[kind].autoencoders, {v: whole.autoencoders[v] for v in kind}
        )
        held = np.repeat(np.isin(FULL, kind), d)
        alone = apply(models[kind].joint_head, z[:, held])
        close(alone, apply(whole.joint_head, z * held))


def test_a_branch_is_what_one_view_alone_tells_of_h(federation, pretrained):
    client = at(federation.cohorts[0], 0)
    model = pretrained.server.models[FULL]
    whole = features_of(model, client.by_view())
    for v in FULL:
        part = branch(model, v)
        chex.assert_trees_all_equal_shapes(part, pretrained.server.models[v,])
        alone = features_of(part, {v: client.by_view()[v]})
        norm = np.linalg.norm(whole.h_views[v], axis=1, keepdims=True)
        np.testing.assert_allclose(alone.h, whole.h_views[v] / norm, rtol=1e-4, atol=1e-6)
        chex.assert_trees_all_close(alone.reconstruction[v], whole.reconstruction[v], rtol=1e-5)
