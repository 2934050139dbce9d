"""Small vertical federations, and what VertCoHiRF's agents send on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import engine
from jaxfedmvc.algorithms.vertcohirf import LocalStep, vertcohirf_of_steps
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.federation import Federation

N = 48


def by_halves(key, x, where):
    """A clusterer that any other implementation can copy: cells of column 0, two wide."""
    cells = jnp.floor(x[:, 0] / 2).astype(jnp.int32)
    return jnp.where(where, cells - jnp.min(jnp.where(where, cells, 10**6)), -1)


def federation(views, labels=None):
    """One agent for each view."""
    return Federation.from_arrays(
        views, labels, partition=vertical_partition(len(views[0]), len(views))
    )


def make_views(seed, n=N, widths=(3, 2, 4), spread=1.0):
    """Three blobs, seen by as many agents as there are widths; and the truth."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 3, n)
    views = []
    for width in widths:
        centres = 3 * rng.normal(size=(3, width)) + 4
        views.append((centres[truth] + spread * rng.normal(size=(n, width))).astype(np.float32))
    return views, truth


HALVES = vertcohirf_of_steps(LocalStep(by_halves))


@functools.cache
def spied(algorithm):
    """The algorithm with its messages in the info, and its round compiled."""

    def recorded(phase):
        def client(*arguments):
            state, message, _ = phase.client(*arguments)
            return state, message, {"message": message}

        return phase._replace(client=client)

    spy = algorithm._replace(round=tuple(recorded(phase) for phase in algorithm.round))
    return spy, jax.jit(functools.partial(engine.one_round, spy))


def messages(algorithm, fed, key, rounds=4):
    """Every message of every agent, round by round, and the server state after them."""
    spy, step = spied(algorithm)
    state = engine.start(spy, fed, key)
    sent = []
    for r in range(rounds):
        state, info = step(fed, key, state, r)
        sent.append([[c["message"] for c in phase["clients"]] for phase in info])
    return sent, state.server
