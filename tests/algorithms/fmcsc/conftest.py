"""The tiny federation after each of its stages, computed once."""

import functools

import jax
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fmcsc.networks import init_model
from tests.algorithms.fmcsc.tiny import (
    CONFIG,
    DIMS,
    FULL,
    KEY,
    PAIR,
    build,
    exchange,
    jit,
    make_federation,
    round_program,
)


@pytest.fixture(scope="session")
def federation():
    return make_federation()


@pytest.fixture(scope="session")
def started(federation):
    return jit(functools.partial(engine.start, build()))(federation, KEY)


@pytest.fixture(scope="session")
def led(federation, started):
    """After the leader's pre-training."""
    leader = build()._replace(setup=build().setup[:1])
    return jit(functools.partial(engine.setup, leader))(federation, KEY, started)[0]


@pytest.fixture(scope="session")
def pretrained(federation, led):
    everyone = build()._replace(setup=build().setup[1:])
    return jit(functools.partial(engine.setup, everyone))(federation, KEY, led)[0]


@pytest.fixture(scope="session")
def exchanged(federation, pretrained):
    """What each client of the first round returns."""
    return exchange(build(), build().round[0], federation, pretrained)


@pytest.fixture(scope="session")
def rounded(federation, pretrained):
    return round_program()(federation, KEY, pretrained)[0]


@pytest.fixture(scope="session")
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
