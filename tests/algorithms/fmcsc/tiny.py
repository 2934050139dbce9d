"""A tiny federation, FMCSC on it, and what follows an exchange by hand.

Clients make one step of Adam in every stage, which moves each parameter by
`-rate * g / (|g| + 1e-8)`: a whole exchange can so be followed from the gradients of the losses.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.fmcsc.client import ClientState
from jaxfedmvc.algorithms.fmcsc.networks import features
from jaxfedmvc.algorithms.fmcsc.objective import reconstruction_loss
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation

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
# The state of a client that keeps nothing.
NOTHING = ClientState((), (), ())
BRANCHES = dict(partial_models="branch", partial_rounds=False)


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
    return jax.tree.map(lambda x: x[i], jax.device_get(tree))


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
    for c, cohort in enumerate(jax.device_get(federation.cohorts)):
        for i, client in enumerate(cohort.client_ids):
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
    a, b = jax.device_get((a, b))
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), a, b)))


def round_program(components="ABCD", **changes):
    return jit(functools.partial(engine.one_round, build(components, **changes), round_index=0))


def parts_of(update):
    """The models in an update, without their weights."""
    return {
        kind: jax.tree.map(lambda x, w=update.weights[kind]: x / np.asarray(w), model)
        for kind, model in jax.device_get(update.models).items()
    }


def pretraining_step(model, client):
    def loss(autoencoders):
        out = features(model._replace(autoencoders=autoencoders), client.by_view())
        return reconstruction_loss(out.reconstruction, client.by_view(), client.mask)

    return adam_step(model.autoencoders, jax.grad(loss)(model.autoencoders))
