"""What makes a federated algorithm of a centralised method, with one that looks at a row alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.pooled.adapter import Fitted, pooled
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation
from tests.algorithms.pooled import planted
from tests.algorithms.pooled.planted import KEY, TRUTH, VIEWS, N


@dataclasses.dataclass(frozen=True)
class Config:
    """What `pooled` asks for."""

    n_clusters: int = 2


def fit(key, views, observed, config, hyper):
    """The sign of a row's first number, and that number."""
    x = jnp.where(observed[:, 0], views[0][:, 0], 0.0)
    real = jnp.any(observed, axis=1)
    labels = jnp.where(real, (x > 0).astype(jnp.int32), -1)
    return Fitted(labels, x[:, None], jnp.zeros(1))


@functools.partial(jax.jit, static_argnums=(0, 3))
def run_and_embed(algorithm, federation, key, participation=1.0):
    """The run, and the representations of its one cohort."""
    run = engine.run(algorithm, federation, key, 0, participation=participation)
    return run, engine.embed(algorithm, federation, run.state)[0]


def dealt(n_clients=4):
    rows = np.arange(N, dtype=np.int32).reshape(n_clients, -1)
    parts = [Part((0, 1), rows, np.arange(n_clients, dtype=np.int32))]
    return Federation.from_arrays(list(VIEWS), TRUTH, partition=parts), rows


def test_labels_and_representations_come_back_to_their_rows():
    federation, rows = dealt()
    run, embedding = run_and_embed(pooled(fit, Config(), None), federation, KEY)
    np.testing.assert_array_equal(run.labels[0], VIEWS[0][rows, 0] > 0)
    np.testing.assert_array_equal(np.asarray(embedding)[..., 0], VIEWS[0][rows, 0])


def test_rows_come_in_random_order_and_not_in_that_of_files():
    def places(key, views, observed, config, hyper):
        found = fit(key, views, observed, config, hyper)
        return found._replace(embedding=jnp.arange(len(observed), dtype=jnp.float32)[:, None])

    federation, rows = dealt()
    algorithm, orders = pooled(places, Config(), None), []
    for key in jax.random.split(KEY, 2):
        found = np.asarray(run_and_embed(algorithm, federation, key)[1])[..., 0]
        np.testing.assert_array_equal(np.sort(found, axis=None), np.arange(N))
        orders.append(found)
        # Neither do rows of one client stay together, nor are they in its order.
        assert (np.ptp(found, axis=1) >= rows.shape[1]).all() and (np.diff(found) < 0).any()
    assert (orders[0] != orders[1]).any()


def test_who_takes_no_part_gets_no_labels_and_no_other_clients_representation():
    federation, rows = dealt()
    algorithm = pooled(fit, Config(), None)
    run, embedding = run_and_embed(algorithm, federation, KEY, 0.5)
    labels = np.asarray(run.labels[0])
    absent = (labels == -1).all(axis=1)
    assert absent.sum() == 2
    np.testing.assert_array_equal(labels[~absent], VIEWS[0][rows[~absent], 0] > 0)
    found = np.asarray(embedding)
    assert not found[absent].any()
    np.testing.assert_array_equal(found[~absent, :, 0], VIEWS[0][rows[~absent], 0])


@pytest.mark.parametrize("name", ["dsimvc", "imvc_cbg", "lsimvc", "mflvc"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_constant_view_is_refused_where_it_would_decide(name, value):
    """A view with one feature that varies is none."""
    _, rows = dealt()
    parts = [Part((0, 1), rows, np.arange(len(rows), dtype=np.int32))]
    algorithm = METHODS[name].make(METHODS[name].config(planted.K))
    second = np.full_like(VIEWS[1], value)
    federation = Federation.from_arrays([VIEWS[0], second], TRUTH, partition=parts)
    with pytest.raises(ValueError, match=rf"{name}: all \d+ features of view 1 are constant"):
        algorithm.init(KEY, federation)
    second[0, 0] += 1
    federation = Federation.from_arrays([VIEWS[0], second], TRUTH, partition=parts)
    algorithm.init(KEY, federation)


def test_a_sample_that_two_agents_hold_is_refused():
    rows = np.arange(N, dtype=np.int32)[None]
    parts = [Part((v,), rows, np.array([v], np.int32)) for v in range(2)]
    agents = Federation.from_arrays(list(VIEWS), TRUTH, partition=parts)
    with pytest.raises(ValueError, match=r"sample 0 is there twice; allowed .* horizontal"):
        engine.start(pooled(fit, Config(), None), agents, KEY)
    engine.start(pooled(fit, Config(), None), planted.federation(), KEY)
    jax.eval_shape(lambda f: engine.start(pooled(fit, Config(), None), f, KEY), agents)  # no rows
