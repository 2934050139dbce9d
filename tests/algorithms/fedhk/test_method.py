"""E-FKMVC: its federation against pooled data and a plain implementation, and its promises."""

import dataclasses
import functools
import itertools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fedhk import (
    SUMMARIES,
    FedHKConfig,
    FedHKHyperparams,
    FedHKParafac2Config,
    e_fkmvc,
)
from jaxfedmvc.algorithms.fedhk import centres as centres_of
from jaxfedmvc.algorithms.fedhk import heat_kernel as hk
from jaxfedmvc.algorithms.fedhk.client import (
    Samples,
    gradient_step,
    local_step,
    local_sums,
    nearest,
    personalised,
)
from jaxfedmvc.algorithms.fedhk.method import best, best_start
from jaxfedmvc.algorithms.fedhk.model import Averages, Model, Scale, ServerState, Sums, whole
from jaxfedmvc.algorithms.fedhk.rounds import broadcast, guarded, statistics_round
from jaxfedmvc.algorithms.fedhk.setup import _none_left_alone
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation
from jaxfedmvc.messages.secure import check_sums, secure_aggregation

C, WIDTHS, CLIENTS, ROWS = 3, (4, 3), 4, 24
D, S, N = sum(WIDTHS), len(WIDTHS), 48
KEY, SECRETS = jax.random.key(0), jax.random.key(99)
COEFFICIENTS = ["bandwidth", "minmax", "absmean"]


# --- Data, and the method in plain double precision -----------------------------------------------


def make_views(seed=0, spread=1.0):
    """Three groups of 24, 14 and 10 samples, not quite apart, far from the origin."""
    rng = np.random.default_rng(seed)
    truth = np.repeat(np.arange(C), [24, 14, 10])
    views = []
    for width in WIDTHS:
        means = 2.5 * rng.normal(size=(C, width)) + 20
        views.append((means[truth] + spread * rng.normal(size=(N, width))).astype(np.float32))
    return views, truth


def shares(kind):
    """Rows of each client: alike, or one class for most of them and sizes 24, 14, 9 and 1."""
    if kind == "iid":
        return np.array_split(np.random.default_rng(1).permutation(N), CLIENTS)
    return np.split(np.arange(N), [24, 38, 47])


def pad(rows, length=ROWS):
    return np.stack([np.append(r, np.full(length - len(r), -1)) for r in rows]).astype(np.int32)


def federation(views, rows, length=ROWS, spoiled=False):
    """Clients with all views, padded to one length; with NaN as padding if `spoiled`."""
    part = Part(tuple(range(len(views))), pad(rows, length), np.arange(len(rows), dtype=np.int32))
    made = Federation.from_arrays(views, partition=[part])
    if not spoiled:
        return made
    (cohort,) = made.cohorts
    torn = tuple(np.where(cohort.mask[..., None], x, np.float32(np.nan)) for x in cohort.views)
    return made.replace(cohorts=(cohort.replace(views=torn),))


def pooled(views):
    return federation(views, [np.arange(len(views[0]))], len(views[0]))


def by_sample(labels, fed):
    """Labels in the order of the pooled samples."""
    found = np.full(N, -1)
    for own, cohort in zip(labels, fed.cohorts, strict=True):
        mask = np.asarray(cohort.mask)
        assert (np.asarray(own)[~mask] == -1).all()
        found[np.asarray(cohort.sample_ids)[mask]] = np.asarray(own)[mask]
    return found


def started(views, coefficients="bandwidth", rows=(0, 24, 38)):
    """A server state with one start at these samples."""
    scales, fit = {}, {}
    for v, x in enumerate(views):
        origin = x.mean(axis=0, dtype=np.float64).astype(np.float32)
        centred = x - origin
        ranged = centred if coefficients == "minmax" else centred[:, :0]
        variance = np.float32(np.square(centred).sum() / len(x))
        scales[v] = Scale(
            *map(jnp.asarray, (origin, variance, ranged.min(axis=0), ranged.max(axis=0)))
        )
        fit[v] = jnp.asarray(centred[list(rows)][None])
    nothing = np.full(1, np.inf, np.float32)
    weights = np.full((1, len(views)), 1 / len(views), np.float32)
    model = Model(fit, weights, nothing, nothing)
    counts = {v: np.float32(len(x)) for v, x in enumerate(views)}
    return ServerState(counts, scales, (), model, {})


def plain_data(views, coefficients, beta=1.0):
    """Views about their means, and delta of each sample and feature, in double precision."""
    centred, deltas = [], []
    for x in views:
        x = x.astype(float)
        d = x.shape[1]
        if coefficients == "bandwidth":
            delta = np.full(x.shape, beta / (2 * x.var(axis=0).sum()))
        elif coefficients == "minmax":
            delta = (x - x.min(axis=0)) / np.ptp(x, axis=0) / d
        else:
            delta = np.abs(x - x.mean(axis=0)) / d
        centred.append(x - x.mean(axis=0))
        deltas.append(delta)
    return centred, deltas


def plain_exponents(views, centres, deltas):
    return [
        (delta[:, None] * (x[:, None] - a[None]) ** 2).sum(axis=2)
        for x, a, delta in zip(views, centres, deltas, strict=True)
    ]


def plain_pass(views, deltas, centres, v, m, alpha, held=None):
    """One pass over samples: memberships, N, W and C; `held` [n, s] says who has which view."""
    held = np.ones((len(views[0]), len(views)), bool) if held is None else held
    phi = plain_exponents(views, centres, deltas)
    ked = [np.where(held[:, [h]], 1 - np.exp(-p), 0) for h, p in enumerate(phi)]
    power = np.ones(len(v)) if np.isinf(alpha) else v**alpha
    total = sum(p * d for p, d in zip(power, ked, strict=True))
    mu = np.maximum(total / total.max(axis=1, keepdims=True), 1e-7) ** (-1 / (m - 1))
    mu = (mu / mu.sum(axis=1, keepdims=True)) ** m
    costs = np.array([(mu * d).sum() for d in ked])
    omega = [mu * np.exp(-p) * held[:, [h]] for h, p in enumerate(phi)]
    numerators = [w.T @ (delta * x) for w, delta, x in zip(omega, deltas, views, strict=True)]
    weights = [w.T @ delta for w, delta in zip(omega, deltas, strict=True)]
    return {
        "labels": total.argmin(axis=1),
        "N": numerators,
        "W": weights,
        "costs": costs,
        "powers": mu,
        "log_objective": np.log((power * costs).sum()),
    }


def plain_view_weights(costs, alpha):
    share = costs ** (-1 / (alpha - 1))
    return share / share.sum()


def plain_step(views, deltas, centres, v, m, alpha, held=None):
    """A round of the centralised algorithm."""
    found = plain_pass(views, deltas, centres, v, m, alpha, held)
    moved = [n / w for n, w in zip(found["N"], found["W"], strict=True)]
    return moved, plain_view_weights(found["costs"], alpha), found["log_objective"]


def plain_local(views, deltas, centres, v, m, alpha):
    """Memberships, centres, and view weights by the distances to the new centres."""
    found = plain_pass(views, deltas, centres, v, m, alpha)
    moved = [n / w for n, w in zip(found["N"], found["W"], strict=True)]
    phis = plain_exponents(views, moved, deltas)
    costs = np.array([(found["powers"] * (1 - np.exp(-phi))).sum() for phi in phis])
    return moved, plain_view_weights(costs, alpha)


@functools.cache
def program(config):
    """One round from a given server state, and the labels after it.

    `known` [clients] of each cohort says who was there when the scales were sent; all if None.
    """

    @jax.jit
    def step(fed, server, hyper, known):
        algorithm = e_fkmvc(config, hyper)
        state = engine.start(algorithm, fed, KEY)
        clients = tuple(
            states.replace(
                scales=jax.tree.map(
                    lambda new, old, k=k: jax.vmap(lambda o, k: jnp.where(k, new, o))(old, k),
                    {v: server.scales[v] for v in cohort.view_ids},
                    states.scales,
                )
            )
            for states, cohort, k in zip(state.clients, fed.cohorts, known, strict=True)
        )
        state, _ = engine.one_round(
            algorithm, fed, KEY, state._replace(server=server, clients=clients), 0
        )
        return state.server.models, engine.assign(algorithm, fed, state)

    def call(fed, server, hyper, known=None):
        everyone = tuple(np.ones(cohort.n_clients, bool) for cohort in fed.cohorts)
        return step(fed, server, hyper, known or everyone)

    return call


def hyperparams(**values):
    """As arrays, so that a new value is no new program."""
    made = FedHKHyperparams(**values)
    return jax.tree.map(jnp.float32, made)


def plain_start(server):
    return [np.asarray(a[0], float) for a in server.models.fit.values()]


# --- Federated is centralised ---------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [np.inf, 5.0])
@pytest.mark.parametrize(
    "coefficients",
    [pytest.param(c, marks=pytest.mark.slow if c != "bandwidth" else ()) for c in COEFFICIENTS],
)
def test_federation_computes_what_one_client_with_all_samples_does(coefficients, alpha):
    """Model and log J of every round, whoever holds what; and those of the plain algorithm."""
    views, _ = make_views()
    step, hyper = program(FedHKConfig(C, coefficients)), hyperparams(fuzzifier=1.2, alpha=alpha)
    feds = [pooled(views), *(federation(views, shares(kind)) for kind in ("iid", "sorted"))]
    servers = [started(views, coefficients)] * 3
    plain_views, deltas = plain_data(views, coefficients)
    plain, v = plain_start(servers[0]), np.full(S, 1 / S)
    objectives = []
    for _ in range(6):
        found = [step(fed, server, hyper) for fed, server in zip(feds, servers, strict=True)]
        servers = [
            server._replace(models=models)
            for server, (models, _) in zip(servers, found, strict=True)
        ]
        plain, v, objective = plain_step(plain_views, deltas, plain, v, 1.2, alpha)
        objectives.append(objective)
        for models, _ in found:
            chex.assert_trees_all_close(models.fit, found[0][0].fit, rtol=1e-4, atol=3e-4)
            np.testing.assert_allclose(models.log_objective, objective, atol=1e-4)
            np.testing.assert_allclose(models.view_weights[0], v, rtol=1e-4)
            chex.assert_trees_all_close(
                [a[0] for a in models.fit.values()], plain, rtol=1e-3, atol=1e-3
            )
    assert all(later < earlier for earlier, later in itertools.pairwise(objectives))
    expected = plain_pass(plain_views, deltas, plain, v, 1.2, alpha)["labels"]
    assert set(expected) == set(range(C))
    for fed, (_, labels) in zip(feds, found, strict=True):
        np.testing.assert_array_equal(by_sample(labels, fed), expected)


def test_a_client_counts_in_the_views_that_it_holds_and_in_no_other():
    views, _ = make_views(1)
    rows = np.random.default_rng(2).permutation(N)
    held = np.ones((N, S), bool)
    held[rows[24:36], 1] = held[rows[36:], 0] = False
    parts = [
        Part((0, 1), rows[:24].reshape(2, 12), np.array([0, 1])),
        Part((0,), rows[None, 24:36], np.array([2])),
        Part((1,), rows[None, 36:], np.array([3])),
    ]
    fed = Federation.from_arrays(views, partition=parts)
    server = started(views, "minmax")
    server = server._replace(models=server.models._replace(view_weights=jnp.array([[0.3, 0.7]])))
    step, hyper = program(FedHKConfig(C, "minmax")), hyperparams(fuzzifier=1.2, alpha=5.0)
    models, labels = step(fed, server, hyper)
    plain_views, deltas = plain_data(views, "minmax")
    plain, v, objective = plain_step(
        plain_views, deltas, plain_start(server), np.array([0.3, 0.7]), 1.2, 5.0, held
    )
    chex.assert_trees_all_close([a[0] for a in models.fit.values()], plain, atol=1e-3)
    np.testing.assert_allclose(models.view_weights[0], v, rtol=1e-4)
    np.testing.assert_allclose(models.log_objective, objective, atol=1e-4)
    expected = plain_pass(plain_views, deltas, plain, v, 1.2, 5.0, held)["labels"]
    np.testing.assert_array_equal(by_sample(labels, fed), expected)
    # Other samples of the client without view 1: view 1 does not notice.
    whole, left, right = fed.cohorts
    changed = left.replace(views=(left.views[0][:, ::-1] + 1,))
    other, _ = step(fed.replace(cohorts=(whole, changed, right)), server, hyper)
    chex.assert_trees_all_equal(other.fit[1], models.fit[1])
    assert np.abs(other.fit[0] - models.fit[0]).max() > 1e-2


def test_a_client_that_joins_after_the_setup_adds_nothing_and_is_assigned():
    views, _ = make_views()
    rows, server = shares("iid"), started(views)
    fed = federation(views, rows)
    hyper = hyperparams(fuzzifier=1.2)
    known = (np.arange(CLIENTS) != 2,)
    models, labels = program(FedHKConfig(C))(fed, server, hyper, known)
    data = plain_data(views, "bandwidth")
    others = np.concatenate([rows[i] for i in (0, 1, 3)])
    mine = [[x[others] for x in part] for part in data]
    plain, v, objective = plain_step(*mine, plain_start(server), np.full(S, 1 / S), 1.2, np.inf)
    chex.assert_trees_all_close([a[0] for a in models.fit.values()], plain, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(models.log_objective, objective, atol=1e-4)
    expected = plain_pass(*data, plain, v, 1.2, np.inf)["labels"]
    np.testing.assert_array_equal(by_sample(labels, fed), expected)


def test_without_a_client_that_holds_all_views_nothing_ties_the_clusters():
    views, _ = make_views()
    parts = [
        Part((v,), np.arange(N).reshape(2, 24)[[v]], np.array([v], np.int32)) for v in range(S)
    ]
    fed = Federation.from_arrays(views, partition=parts)
    with pytest.raises(ValueError, match="no client holds all views"):
        e_fkmvc(FedHKConfig(C)).init(KEY, fed)


def test_setup_finds_the_scales_of_the_pooled_samples():
    views, _ = make_views()
    algorithm = e_fkmvc(FedHKConfig(C, "minmax"))
    algorithm = algorithm._replace(setup=algorithm.setup[:3])

    @jax.jit
    def scales(fed):
        return engine.setup(algorithm, fed, KEY, engine.start(algorithm, fed, KEY))[0].server

    server = scales(federation(views, shares("sorted"), spoiled=True))
    expected = started(views, "minmax")
    chex.assert_trees_all_close(server.scales, expected.scales, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal(server.counts, expected.counts)


def test_scales_of_a_view_are_of_those_who_hold_it():
    """By hand: of two clients one lacks the second view, and counts there nowhere."""
    of = Federation.from_clients(
        [{0: np.array([[1.0], [3.0]]), 1: np.array([[5.0], [9.0]])}, {0: np.array([[8.0]])}]
    )
    algorithm = e_fkmvc(FedHKConfig(1))
    algorithm = algorithm._replace(setup=algorithm.setup[:2])

    @jax.jit
    def scales(fed):
        return engine.setup(algorithm, fed, KEY, engine.start(algorithm, fed, KEY))[0].server

    server = scales(of)
    assert (server.counts[0], server.counts[1]) == (3, 2)
    for v, mean, variance in ((0, 4.0, (9 + 1 + 16) / 3), (1, 7.0, 4.0)):
        np.testing.assert_allclose(server.scales[v].origin, [mean])
        np.testing.assert_allclose(server.scales[v].variance, variance, rtol=1e-6)


def test_what_a_client_that_is_absent_would_say_before_the_rounds_counts_nowhere():
    views, _ = make_views()
    algorithm = e_fkmvc(FedHKConfig(C, "minmax", n_restarts=1))
    server, _ = jax.jit(algorithm.init)(KEY, federation(views, shares("iid")))
    server = server._replace(scales=started(views, "minmax").scales)
    _, _, ranges, summaries, *_ = algorithm.setup
    there = np.float32([1.0, 0.0])
    blank = server._replace(
        scales={v: s._replace(low=s.low + 99, high=s.high - 99) for v, s in server.scales.items()}
    )
    told = {
        v: (np.float32([[0.0] * d, [-500.0] * d]), np.float32([[1.0] * d, [500.0] * d]))
        for v, d in enumerate(WIDTHS)
    }
    found, _ = jax.jit(ranges.server)(KEY, blank, (told,), (there,))
    for scale in found.scales.values():
        assert np.all(scale.low == 0) and np.all(scale.high == 1)
    rows = np.random.default_rng(0).normal(size=(2, 2 * C, D)).astype(np.float32)
    rows[1] += 50
    counts = np.full((2, 2 * C), 5.0, np.float32)
    start = jax.jit(summaries.server)
    absent, _ = start(KEY, server, ((rows, counts),), (there,))
    silent, _ = start(KEY, server, ((rows, counts * there[:, None]),), (np.ones(2, np.float32),))
    chex.assert_trees_all_equal(absent.models.fit, silent.models.fit)
    turned, _ = start(KEY, server, ((rows[::-1], counts[::-1]),), (there[::-1],))
    chex.assert_trees_all_equal(absent.models.fit, turned.models.fit)  # nor does their order
    assert (
        max(
            np.abs(a / np.sqrt(server.scales[v].variance)).max()
            for v, a in jax.device_get(absent.models.fit).items()
        )
        < 10
    )


def test_no_summary_is_of_one_sample_and_starts_are_in_units_of_the_features():
    """By hand: ten samples about the origin and one far from them; a variance of 9."""
    x = np.append(np.linspace(-1, 1, 20).reshape(10, 2), [[90.0, 90.0]], axis=0)
    of = Federation.from_clients([{0: x}])
    algorithm = e_fkmvc(FedHKConfig(2, n_restarts=1))
    server, (state,) = jax.jit(algorithm.init)(KEY, of)
    scales = {0: server.scales[0]._replace(variance=jnp.float32(9.0))}
    phase, server = algorithm.setup[2], server._replace(scales=scales)
    sent = phase.broadcast(server, (0,))
    one = jax.tree.map(lambda a: a[0], jax.device_get((state, of.cohorts[0])))
    _, (means, counts), _ = jax.jit(phase.client)(KEY, sent, *one)
    place = int(np.argmax(counts))
    assert sorted(counts.tolist()) == [0, 0, 0, 10]
    np.testing.assert_allclose(means[place], x[:10].mean(axis=0) / 3, atol=1e-6)
    assert not np.delete(means, place, axis=0).any()
    rows = np.float32([[[0, 0], [1, 1], [0, 0], [0, 0]]])
    sizes = np.full((1, 4), 5.0, np.float32)
    after, _ = jax.jit(phase.server)(KEY, server, ((rows, sizes),), (np.ones(1, np.float32),))
    found = np.sort(np.asarray(after.models.fit[0][0]), axis=0)
    np.testing.assert_allclose(found, [[0, 0], [3, 3]], atol=1e-5)


def test_weights_of_views_travel_with_the_views():
    server = started(make_views()[0])
    models = server.models._replace(view_weights=jnp.array([[0.3, 0.7]]))
    fits, weights = broadcast(whole(), server._replace(models=models), (1,))
    assert set(fits) == {1} and np.array_equal(weights, np.float32([[0.7]]))


# --- The objective --------------------------------------------------------------------------------


def test_views_weigh_in_a_fit_as_in_the_objective_and_its_change_is_told():
    """By hand: variances 2 and 5, costs 4 and 1. A codec that tells of relevance: delta v^alpha."""

    def told(fit, numerators, weights, relevance, *_):
        return {v: jnp.full_like(a, relevance[v]) for v, a in fit.items()}

    phase = statistics_round(FedHKConfig(C), hyperparams(alpha=3.0), whole()._replace(update=told))
    server = started(make_views()[0])
    scales = {v: s._replace(variance=jnp.float32(2 + 3 * v)) for v, s in server.scales.items()}
    models = server.models._replace(log_objective=jnp.ones(1))
    nothing = jax.tree.map(np.zeros_like, models.fit)
    weights = {v: np.ones((1, C), np.float32) for v in range(S)}
    costs = {0: np.float32([4.0]), 1: np.float32([1.0])}
    one = np.ones(1, np.float32)
    sums = Sums(nothing, weights, costs, one, one)
    new, _ = jax.jit(phase.server)(
        KEY, server._replace(scales=scales, models=models), (sums,), (jnp.float32(1),)
    )
    # v is C^(-1/2), that is 1/3 and 2/3; the present objective is that of the weights before.
    np.testing.assert_allclose(new.models.view_weights, [[1 / 3, 2 / 3]], rtol=1e-5)
    first, second = (np.asarray(a)[0, 0, 0] for a in new.models.fit.values())
    ratio = second / first
    assert ratio == pytest.approx((2 / 5) * 2**3, rel=1e-5)
    np.testing.assert_allclose(new.models.log_objective, [np.log(5 / 8)], rtol=1e-5)
    np.testing.assert_allclose(new.models.change, [1 - np.log(5 / 8)], rtol=1e-5)


def test_a_run_ends_when_every_start_does():
    done = e_fkmvc(FedHKConfig(C), FedHKHyperparams(tol=1e-3)).done
    server = started(make_views()[0])
    for changes, expected in (([0.0, 1e-2], False), ([1e-3, 0.0], True)):
        models = server.models._replace(change=jnp.array(changes))
        assert done(server._replace(models=models)) == expected


def test_far_from_all_centres_the_weighted_exponents_tell():
    """By hand: all KED are 1. 36 + 121 / 4 is less than 64 + 81 / 4, and without weights more."""
    samples = Samples(
        dict.fromkeys((0, 1), np.float32([[10.0]])),
        dict.fromkeys((0, 1), np.float32(1)),
        np.ones(1, np.float32),
    )
    centres = {0: np.float32([[4.0], [2.0]]), 1: np.float32([[-1.0], [1.0]])}
    for weights, expected in (((2 / 3, 1 / 3), 0), ((1 / 2, 1 / 2), 1)):
        found = jax.jit(nearest)(hyperparams(alpha=2.0), samples, centres, np.float32(weights))
        assert found.tolist() == [expected]
    # Who was not there for the end has nothing of its own, and takes the model's weights as well.
    of = Federation.from_clients([dict.fromkeys((0, 1), np.full((2, 1), 10.0))])
    method = e_fkmvc(FedHKConfig(2, personal="mix", n_restarts=1), hyperparams(alpha=2.0))
    server, (state,) = jax.jit(method.init)(KEY, of)
    scales = {v: s._replace(variance=jnp.float32(0.5)) for v, s in server.scales.items()}
    fit = {v: a[None] for v, a in centres.items()}
    models = server.models._replace(fit=fit, view_weights=jnp.array([[2 / 3, 1 / 3]]))
    state, client = jax.tree.map(lambda a: a[0], jax.device_get((state, of.cohorts[0])))
    labels = jax.jit(method.assign)(server._replace(models=models, scales=scales), state, client)
    assert labels[client.mask].tolist() == [0, 0]


@functools.cache
def descent(rule):
    """log J over five local steps, and the model after them; for a batch of settings."""
    config = FedHKConfig(C, "minmax", rule)

    def one(views, deltas, centres, m, alpha):
        samples = Samples(views, deltas, jnp.ones(len(views[0]), bool))
        hyper = FedHKHyperparams(fuzzifier=m, alpha=alpha)

        def step(carry, _):
            costs = local_sums(config, hyper, samples, *carry).costs
            objective = hk.log_objective(jnp.stack(list(costs.values())), carry[1], alpha)
            return local_step(config, hyper, samples, *carry), objective

        return jax.lax.scan(step, (centres, jnp.full(S, 1 / S)), None, length=6)[1]

    return jax.jit(jax.vmap(one))


def random_settings(seed, batch, minmax):
    rng = np.random.default_rng(seed)
    views = {v: rng.normal(size=(batch, 12, d)) for v, d in enumerate(WIDTHS)}
    if minmax:
        deltas = {
            v: (x - x.min(1, keepdims=True)) / np.ptp(x, axis=1, keepdims=True) / x.shape[2]
            for v, x in views.items()
        }
    else:
        scale = 10.0 ** rng.uniform(-2, 1, (batch, 1, 1))
        deltas = {v: scale * rng.uniform(size=x.shape) ** 2 for v, x in views.items()}
    centres = {v: x[:, :C] + 0.3 * rng.normal(size=x[:, :C].shape) for v, x in views.items()}
    m = 1 + 10.0 ** rng.uniform(-1.3, 0.5, batch)
    alpha = np.where(rng.uniform(size=batch) < 0.3, np.inf, 1 + 10.0 ** rng.uniform(-1, 1.3, batch))
    return jax.tree.map(np.float32, (views, deltas, centres, m, alpha))


@pytest.mark.parametrize("minmax", [False, True])
def test_the_stationary_rule_never_raises_the_objective(minmax):
    objective = descent("stationary")(*random_settings(0, 256, minmax))
    rises = np.diff(objective, axis=1)
    assert np.isfinite(objective).all()
    assert rises.max() < 1e-5
    assert rises.min() < -0.1


def test_the_printed_rule_raises_the_objective_at_times():
    rises = np.diff(descent("printed")(*random_settings(0, 256, True)), axis=1)
    assert (rises > 1e-4).any(axis=1).sum() > 10


@pytest.mark.parametrize("per_sample", [False, True])
def test_gradient_steps_are_those_of_automatic_differentiation(per_sample):
    """(62), (63). Memberships are at their best, so that J moves with them to second order only."""
    views, _ = make_views(3)
    plain_views, deltas = plain_data(views, "minmax" if per_sample else "bandwidth")
    server = started(views)
    centres = {v: a[0] for v, a in server.models.fit.items()}
    samples = Samples(
        {v: jnp.asarray(x, jnp.float32) for v, x in enumerate(plain_views)},
        {
            v: jnp.asarray(delta if per_sample else delta[0, 0], jnp.float32)
            for v, delta in enumerate(deltas)
        },
        jnp.arange(N) < N - 5,
    )
    weights, n = jnp.array([0.4, 0.6]), N - 5

    def objective(centres, weights, alpha, fixed):
        phis = {v: hk.exponents(x, centres[v], samples.deltas[v]) for v, x in samples.views.items()}
        keds = {v: hk.kernel_distance(phi) for v, phi in phis.items()}
        powers = jnp.where(jnp.isinf(alpha), 1.0, weights ** jnp.where(jnp.isinf(alpha), 1, alpha))
        mu = hk.memberships(powers[0] * keds[0] + powers[1] * keds[1], 1.4)
        mu = hk.powered(jax.lax.stop_gradient(mu) if fixed else mu, 1.4, samples.mask)
        return powers[0] * jnp.sum(mu * keds[0]) + powers[1] * jnp.sum(mu * keds[1])

    @jax.jit
    def both(alpha, eta):
        hyper = FedHKHyperparams(fuzzifier=1.4, alpha=alpha, step_size=eta)
        # The rule of the local steps does not matter here.
        config = FedHKConfig(C, "minmax", "printed")
        expected = [
            jax.grad(objective, (0, 1))(centres, weights, alpha, fixed) for fixed in (True, False)
        ]
        return gradient_step(config, hyper, samples, centres, weights), expected

    for alpha in (2.0, 5.0, np.inf):
        eta = 2.0
        (moved, lowered), expected = jax.device_get(both(np.float32(alpha), np.float32(eta)))
        for slopes, slope in expected:
            found = {v: (centres[v] - moved[v]) * n / eta for v in centres}
            chex.assert_trees_all_close(found, slopes, rtol=1e-3, atol=3e-4)
            assert max(np.abs(a).max() for a in slopes.values()) > 0.03
            if np.isinf(alpha):
                np.testing.assert_array_equal(lowered, weights)
            else:
                kept = np.maximum(weights - eta * slope / n, 1e-3)
                np.testing.assert_allclose(lowered, kept / kept.sum(), rtol=1e-4)


# --- Sums over few rows ---------------------------------------------------------------------------


def test_a_fuzzy_sum_for_a_cluster_without_rows_is_the_nearest_row_and_a_guard_keeps_it_back():
    """The far centre gets next to no weight, and that from one row; 24 rows hold the near one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 2)).astype(np.float32)
    x[7] = [3.5, 0.0]
    samples = Samples({0: x}, {0: np.float32(0.05)}, np.ones(24, bool))
    centres = {0: np.float32([[0.0, 0.0], [9.0, 0.0]])}
    summed = jax.jit(lambda *args: local_sums(FedHKConfig(2), FedHKHyperparams(), *args))
    sums = jax.device_get(summed(samples, centres, np.ones(1, np.float32)))
    assert sums.weights[0][1] < 0.1
    np.testing.assert_allclose(sums.numerators[0][1] / sums.weights[0][1], x[7], atol=0.02)
    kept = jax.device_get(jax.jit(guarded(2))(KEY, sums, ()))
    np.testing.assert_array_equal(kept.numerators[0][1], 0)
    assert kept.weights[0][1] == 0
    np.testing.assert_array_equal(kept.numerators[0][0], sums.numerators[0][0])
    chex.assert_trees_all_equal(kept[2:], sums[2:])


@pytest.mark.slow
def test_with_a_least_cluster_size_no_summary_stands_for_fewer():
    views, _ = make_views()
    fed = federation(views, shares("iid"))
    for least, found in ((None, 2), (4, 4)):
        algorithm = e_fkmvc(FedHKConfig(C, min_cluster_size=least))
        server, (states,) = algorithm.init(KEY, fed)
        scales = started(views).scales
        server = server._replace(scales=scales)
        phase = algorithm.setup[2]
        state, client = (jax.tree.map(lambda x: x[0], tree) for tree in (states, fed.cohorts[0]))
        state = dataclasses.replace(state, scales=scales)
        sent = phase.broadcast(server, (0, 1))
        _, (rows, counts), _ = jax.jit(phase.client)(KEY, sent, state, client)
        counts = np.asarray(counts)
        assert counts.max() > 0 and counts[counts > 0].min() >= found
        assert not np.asarray(rows)[counts == 0].any()


def test_a_row_far_from_all_others_is_not_what_the_summaries_leave_of_a_sum():
    """Two clusters of 24 rows, of which one is that row: the sum of all less the other gives it."""
    views, _ = make_views()
    views = [np.concatenate([x[:1] + 1e3, x[1:]]) for x in views]
    algorithm = e_fkmvc(FedHKConfig(C, min_cluster_size=5))
    fed = federation(views, [np.arange(ROWS)])
    server, (states,) = algorithm.init(KEY, fed)
    scales = started(views).scales
    state, client = (jax.tree.map(lambda x: x[0], tree) for tree in (states, fed.cohorts[0]))
    state = dataclasses.replace(state, scales=scales)
    sent = algorithm.setup[2].broadcast(server._replace(scales=scales), (0, 1))
    _, (_, counts), _ = jax.jit(algorithm.setup[2].client)(KEY, sent, state, client)
    assert np.sum(counts) in (0, *range(5, 20), 24)


@pytest.mark.parametrize(
    ("counts", "joined"),
    [
        ([7, 5, 9, 0], [7, 5, 9, 0]),
        ([7, 1, 9, 0], [8, 0, 9, 0]),
        ([6, 2, 9, 2], [10, 0, 9, 0]),
        ([8, 3, 2, 0], [8, 3, 2, 0]),  # those that are left out are five
        ([5, 4, 5, 0], [9, 0, 5, 0]),
    ],
)
def test_rows_in_no_summary_are_as_many_as_a_summary_needs(counts, joined):
    labels = np.append(np.repeat(np.arange(4), counts), [-1, -1]).astype(np.int32)
    found = jax.jit(_none_left_alone, static_argnums=2)(labels, np.float32(counts), 5)
    np.testing.assert_array_equal(found[-2:], -1)
    np.testing.assert_array_equal(np.bincount(found[:-2], minlength=4), joined)


def test_clients_with_fewer_rows_than_a_sum_needs_are_refused():
    views, _ = make_views()
    algorithm = e_fkmvc(FedHKConfig(C, min_cluster_size=2))
    with pytest.raises(ValueError, match=r"client 3 .* has 1 samples; allowed is 2 or more"):
        algorithm.init(KEY, federation(views, shares("sorted")))


@pytest.mark.parametrize(
    "change",
    [{"min_cluster_size": 0}]
    + [{"min_cluster_size": 2} | more for more in ({"hkc": "minmax"}, {"aggregation": "average"})],
)
def test_a_least_cluster_size_needs_sums_of_weights_of_one_at_most(change):
    with pytest.raises(ValueError, match=r"min_cluster_size: got .*; allowed is"):
        FedHKConfig(C, **change)
    with pytest.raises(ValueError, match="min_cluster_size: got 2; allowed is None with PARAFAC2"):
        FedHKParafac2Config(C, min_cluster_size=2)


# --- Averages of centres --------------------------------------------------------------------------


def test_average_of_one_round_by_hand():
    """(60), (61), (101): every client's own step, weighted by its size and quality."""
    views, _ = make_views(4)
    rows, server = shares("iid"), started(views)
    step = program(FedHKConfig(C, aggregation="average", local_steps=2))
    plain_views, deltas = plain_data(views, "bandwidth")
    for kappa in (0.0, 3.0):
        models, _ = step(
            federation(views, rows), server, hyperparams(fuzzifier=1.3, alpha=4.0, quality=kappa)
        )
        total, sums, weight_sum, objectives = 0.0, [0.0] * S, 0.0, 0.0
        for own in rows:
            mine = [x[own] for x in plain_views], [delta[own] for delta in deltas]
            centres, v = plain_start(server), np.full(S, 1 / S)
            for _ in range(2):
                centres, v = plain_local(*mine, centres, v, 1.3, 4.0)
            objective = np.exp(plain_pass(*mine, centres, v, 1.3, 4.0)["log_objective"])
            omega = len(own) * np.exp(-kappa * objective / len(own))
            sums = [a + omega * b for a, b in zip(sums, centres, strict=True)]
            weight_sum = weight_sum + omega * v
            total, objectives = total + omega, objectives + objective
        chex.assert_trees_all_close(
            [a[0] for a in models.fit.values()], [a / total for a in sums], rtol=1e-3, atol=1e-3
        )
        np.testing.assert_allclose(models.view_weights[0], weight_sum / total, rtol=1e-4)
        np.testing.assert_allclose(models.log_objective, np.log(objectives), atol=1e-4)


def test_averages_count_stale_centres_and_sums_do_not():
    """Only one client of 14 samples in 48 has the second class: the others hold its centre back."""
    views, truth = make_views(5, spread=0.05)
    fed, server = federation(views, shares("sorted")), started(views)
    start = {v: np.array(a) for v, a in server.models.fit.items()}
    for a in start.values():
        a[:, 1] += np.float32(0.4)
    server = server._replace(models=server.models._replace(fit=start))
    hyper = hyperparams(fuzzifier=1.05)
    averaged, _ = program(FedHKConfig(C, aggregation="average", local_steps=2))(fed, server, hyper)
    summed, _ = program(FedHKConfig(C))(fed, server, hyper)
    averaged, summed = jax.device_get((averaged.fit, summed.fit))
    for v, x in enumerate(views):
        mean = (x - np.asarray(server.scales[v].origin))[truth == 1].mean(axis=0)
        np.testing.assert_allclose(summed[v][0, 1], mean, atol=0.01)
        held_back = start[v][0, 1] * 34 / 48 + mean * 14 / 48
        np.testing.assert_allclose(averaged[v][0, 1], held_back, atol=0.01)


def test_averages_of_a_view_are_over_those_who_hold_it():
    """By hand: clients of weight 6 and 2, of which the second lacks the second view."""
    (phase,) = e_fkmvc(FedHKConfig(C, aggregation="average")).round
    server = started(make_views()[0])
    ones = {v: np.ones((1, C, d), np.float32) for v, d in enumerate(WIDTHS)}
    first = Averages(
        {0: 6 * ones[0], 1: 12 * ones[1]},
        {0: np.float32([3.0]), 1: np.float32([3.0])},
        np.float32([6.0]),
        np.float32([5.0]),
    )
    second = Averages(
        {0: 10 * ones[0]}, {0: np.float32([1.8])}, np.float32([2.0]), np.float32([3.0])
    )
    models = server.models._replace(log_objective=jnp.zeros(1))
    state = server._replace(models=models)
    there = (np.float32(1), np.float32(1))
    new, _ = jax.jit(phase.server)(KEY, state, (first, second), there)
    np.testing.assert_allclose(new.models.fit[0], 2 * ones[0], rtol=1e-6)
    np.testing.assert_allclose(new.models.fit[1], 2 * ones[1], rtol=1e-6)
    # 4.8 / 8 and 3 / 6, which do not add up to 1.
    np.testing.assert_allclose(new.models.view_weights, [[0.6 / 1.1, 0.5 / 1.1]], rtol=1e-5)
    np.testing.assert_allclose(new.models.change, [np.log(8)], rtol=1e-5)


# --- Personal centres -----------------------------------------------------------------------------


@functools.cache
def personal(kind):
    config = FedHKConfig(C, personal=kind, personal_steps=8)
    return jax.jit(lambda hyper, *rest: personalised(config, hyper, *rest))


def one_client(rows, spread=1.0):
    """Samples of a client, the same for the plain functions, and the global centres."""
    views, truth = make_views(6, spread)
    plain_views, deltas = plain_data(views, "bandwidth")
    own = np.isin(np.arange(N), rows)
    samples = Samples(
        {
            v: jnp.asarray(np.where(own[:, None], x, 0), jnp.float32)
            for v, x in enumerate(plain_views)
        },
        {v: jnp.float32(delta[0, 0]) for v, delta in enumerate(deltas)},
        jnp.asarray(own),
    )
    centres = {
        v: jnp.asarray(np.stack([x[truth == k].mean(axis=0) for k in range(C)]) + 0.2, jnp.float32)
        for v, x in enumerate(plain_views)
    }
    return samples, ([x[own] for x in plain_views], [delta[own] for delta in deltas]), centres


def test_limits_of_personal_centres():
    samples, mine, anchor = one_client(np.arange(0, N, 3))
    weights = jnp.array([0.35, 0.65])
    own, v = [np.asarray(a, float) for a in anchor.values()], np.asarray(weights, float)
    for _ in range(8):
        own, v = plain_local(*mine, own, v, 1.3, 3.0)

    def found(kind, **values):
        hyper = hyperparams(fuzzifier=1.3, alpha=3.0, **values)
        return personal(kind)(hyper, samples, anchor, weights)

    chex.assert_trees_all_equal(found("proximal", tau=np.inf), (anchor, weights))
    mixed, kept = found("mix", mix=1.0)
    chex.assert_trees_all_close(mixed, anchor, rtol=1e-6)
    np.testing.assert_allclose(kept, weights, rtol=1e-6)
    for kind, values in (("proximal", {"tau": 0.0}), ("mix", {"mix": 0.0})):
        moved, local = found(kind, view_mix=0.0, **values)
        chex.assert_trees_all_close(list(moved.values()), own, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(local, v, rtol=1e-3)
    # Shares of views that stay the global ones are those by which the centres are found, too.
    own_at_global = [np.asarray(a, float) for a in anchor.values()]
    for _ in range(8):
        own_at_global, _ = plain_local(*mine, own_at_global, np.asarray(weights, float), 1.3, 3.0)
    moved, kept = found("proximal", tau=0.0)
    chex.assert_trees_all_close(list(moved.values()), own_at_global, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(kept, weights, rtol=1e-6)
    assert np.abs(own_at_global[0] - own[0]).max() > 1e-2
    # The pull is towards the global centres, not towards those of the step before.
    own_weights, pulled = (
        np.asarray(weights, float),
        [np.asarray(x, float) for x in anchor.values()],
    )
    for _ in range(8):
        sums = plain_pass(*mine, pulled, own_weights, 1.3, 3.0)
        shared = [w / (w + w.mean()) for w in sums["W"]]
        pulled = [
            share * n / w + (1 - share) * np.asarray(x)
            for share, n, w, x in zip(shared, sums["N"], sums["W"], anchor.values(), strict=True)
        ]
        phis = plain_exponents(mine[0], pulled, mine[1])
        costs = np.array([(sums["powers"] * (1 - np.exp(-phi))).sum() for phi in phis])
        own_weights = plain_view_weights(costs, 3.0)
    moved, _ = found("proximal", tau=1.0, view_mix=0.0)
    chex.assert_trees_all_close(list(moved.values()), pulled, rtol=1e-3, atol=1e-3)
    # In between: on the line for (102), nearer with a stronger pull for the proximal steps.
    halves, _ = found("mix", mix=0.5, view_mix=0.0)
    for v_id, a in halves.items():
        np.testing.assert_allclose(a, (np.asarray(anchor[v_id]) + own[v_id]) / 2, atol=1e-3)
    _, half = found("mix", mix=0.5, view_mix=0.5)
    between, mid = [np.asarray(a, float) for a in anchor.values()], np.asarray(weights, float)
    for _ in range(8):
        between, local = plain_local(*mine, between, mid, 1.3, 3.0)
        mid = (np.asarray(weights, float) + local) / 2
    np.testing.assert_allclose(half, mid, rtol=1e-3)
    gaps = [
        sum(((np.asarray(a) - anchor[v_id]) ** 2).sum() for v_id, a in moved.items())
        for moved, _ in (
            found("proximal", view_mix=0.0, tau=tau) for tau in (0.0, 0.1, 1.0, 10.0, 1e3)
        )
    ]
    assert sorted(gaps, reverse=True) == gaps and gaps[-1] < 1e-3 * gaps[0]


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_a_client_keeps_the_global_centre_of_a_cluster_that_it_has_no_sample_of(tau):
    samples, _, anchor = one_client(np.arange(24), spread=0.1)
    moved, _ = personal("proximal")(
        hyperparams(fuzzifier=1.05, tau=tau), samples, anchor, jnp.full(S, 1 / S)
    )
    for v, a in jax.device_get(moved).items():
        np.testing.assert_allclose(a[1:], anchor[v][1:], atol=1e-5)
        assert np.abs(a[0] - anchor[v][0]).min() > 0.1


@pytest.mark.parametrize("kind", ["mix", "gradient"])
def test_a_client_leaves_the_share_of_the_views_that_it_lacks(kind):
    samples, _, anchor = one_client(np.arange(0, N, 3))
    alone = Samples({1: samples.views[1]}, {1: samples.deltas[1]}, samples.mask)
    _, weights = personal(kind)(
        hyperparams(fuzzifier=1.3, alpha=3.0, view_mix=0.0, step_size=1.0),
        alone,
        {1: anchor[1]},
        jnp.array([0.3]),
    )
    np.testing.assert_allclose(weights, 0.3, rtol=1e-5)


# --- Messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, up",
    [
        (FedHKConfig(C, n_restarts=1), C * D + C * S + S + 2),
        (FedHKConfig(C, n_restarts=3), 3 * (C * D + C * S + S + 2)),
        (FedHKConfig(C, "minmax", n_restarts=1), 2 * C * D + S + 2),
        (FedHKConfig(C, "absmean", n_restarts=2), 2 * (2 * C * D + S + 2)),
        (FedHKConfig(C, aggregation="average", n_restarts=1), C * D + S + 2),
    ],
)
def test_bytes_are_those_of_the_closed_forms(config, up):
    views, _ = make_views()
    fed = federation(views, shares("iid"), 12)
    traffic = engine.traffic(e_fkmvc(config), fed)
    ranges = 2 * D if config.hkc == "minmax" else 0
    # Sums and their count, one sum of squares for each view, summaries with theirs.
    assert traffic["setup"].up == 4 * CLIENTS * (D + S + 1 + ranges + 2 * C * (D + 1))
    assert traffic["setup"].down == 4 * CLIENTS * (D + S + ranges)
    assert traffic["round"].up == 4 * CLIENTS * up
    assert traffic["round"].down == 4 * CLIENTS * config.n_restarts * (C * D + S)
    assert traffic["finish"].up == 0
    assert traffic["finish"].down == 4 * CLIENTS * (C * D + S + 1)


# --- Whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objectives", "place"),
    [
        ([2.0, 1.0, 1.0 - 1e-6], 1),  # the same clusters twice: rounding decides nothing
        ([2.0, 1.0, 0.99], 2),
        ([np.nan, 3.0, 2.0], 2),
        ([np.inf, np.inf, np.inf], 0),
    ],
)
def test_the_first_of_the_best_starts_counts(objectives, place):
    n = len(objectives)
    models = Model({}, np.ones((n, 2)), np.float32(objectives), np.zeros(n))
    assert jax.jit(best_start)(models) == place
    assert jax.jit(best)(models, np.arange(n)) == place


WHOLE = FedHKConfig(C, personal="proximal", personal_steps=3, n_restarts=2)
ROUNDS = 60


@functools.cache
def whole_run():
    return jax.jit(lambda fed, hyper: engine.run(e_fkmvc(WHOLE, hyper), fed, KEY, ROUNDS))


def run(views, kind="sorted", **values):
    fed = federation(views, kind if isinstance(kind, list) else shares(kind))
    return fed, whole_run()(fed, hyperparams(**values))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["iid", "sorted"])
def test_recovers_groups_that_lie_apart(kind):
    views, truth = make_views(7, spread=0.2)
    fed, result = run(views, kind)
    labels = by_sample(result.labels, fed)
    assert len({*zip(labels, truth, strict=True)}) == C == len(set(labels))
    found, weights = centres_of(result.state.server)
    np.testing.assert_allclose(weights, 1 / S)
    for v, x in enumerate(views):
        for k in range(C):
            np.testing.assert_allclose(
                found[v][labels[truth == k][0]], x[truth == k].mean(0), atol=0.1
            )


@pytest.mark.slow
def test_ends_by_the_tolerance_and_the_objective_never_rises():
    views, _ = make_views(8, spread=2.0)
    # The first change is infinite, the second is not: a large tolerance makes two rounds.
    assert run(views, tol=1e9)[1].n_rounds == 2
    for alpha in (np.inf, 5.0):
        _, result = run(views, alpha=alpha, fuzzifier=1.2)
        n = int(result.n_rounds)
        objective = np.asarray(result.info["rounds"][0]["server"]["log_objective"])
        assert 2 < n < ROUNDS
        assert np.diff(objective[:n], axis=0).max() < 5e-6
        assert (np.abs(objective[n - 1] - objective[n - 2]) <= 1e-6).all()
        np.testing.assert_array_equal(result.state.server.models.log_objective, objective[n - 1])
        assert not objective[n:].any()  # rounds that were not made


@pytest.mark.slow
def test_values_of_padding_change_no_bit():
    views, _ = make_views(9)
    _, result = run(views)
    torn = federation(views, shares("sorted"), spoiled=True)
    other = whole_run()(torn, hyperparams())
    chex.assert_trees_all_equal(other.labels, result.labels)
    chex.assert_trees_all_equal(other.state, result.state)


def test_personal_centres_of_a_run():
    """An infinite pull leaves every client the global centres, none lets them go."""
    views, _ = make_views(10)
    _, tied = run(views, tau=np.inf)
    server, (state,) = tied.state.server, tied.state.clients
    place = int(np.argmin(server.models.log_objective))
    assert state.took_part.all()
    for v in range(S):
        for own in state.personal[v]:
            np.testing.assert_array_equal(own, server.models.fit[v][place])
    _, loose = run(views, tau=0.0)
    chex.assert_trees_all_equal(loose.state.server, server)
    spread = [np.ptp(a, axis=0).max() for a in loose.state.clients[0].personal.values()]
    assert min(spread) > 0.1


CASES = ["duplicates", "constant features", "all constant", "outlier", "one-sample clients"]


@pytest.mark.parametrize("case", CASES)
def test_degenerate_samples_give_finite_models(case):
    views, _ = make_views(11)
    kind = "sorted"
    if case == "duplicates":
        views = [np.repeat(x[[0, 24]], 24, axis=0) for x in views]
    elif case == "constant features":
        views = [np.where(np.arange(x.shape[1]) == 1, np.float32(5), x) for x in views]
    elif case == "all constant":
        views = [np.full_like(x, 3) for x in views]
    elif case == "outlier":
        views = [x.copy() for x in views]
        views[0][5] = 1e6
    else:
        kind = [np.array([0, 2]), np.array([1]), np.array([30]), np.array([40])]
    for m, alpha, tau in ((1.05, np.inf, 10.0), (1.001, 1.001, 0.0), (10.0, 30.0, np.inf)):
        fed, result = run(views, kind, fuzzifier=m, alpha=alpha, tau=tau)
        chex.assert_tree_all_finite((result.state.server, result.state.clients))
        own, mask = np.asarray(result.labels[0]), np.asarray(fed.cohorts[0].mask)
        assert ((own[mask] >= 0) & (own[mask] < C)).all() and (own[~mask] == -1).all()
        if case == "duplicates" and m < 2:
            labels = by_sample(result.labels, fed)
            assert len(set(labels[:24])) == len(set(labels[24:])) == 1
            assert labels[0] != labels[24]


@pytest.mark.slow
def test_secure_sums_give_the_same_clusters():
    """The summaries are read one by one; all else is sums, hidden by masks."""
    views, _ = make_views(12)
    fed, plain = run(views)
    hidden = secure_aggregation(
        e_fkmvc(WHOLE), fed, SECRETS, fraction_bits=18, in_clear=[SUMMARIES]
    )
    result = jax.jit(lambda fed: engine.run(hidden, fed, KEY, ROUNDS))(fed)
    check_sums(result.info["setup"])
    n = int(result.n_rounds)
    check_sums(jax.tree.map(lambda x: x[:n], result.info["rounds"]))
    clipped = [info["clients"][0].clipped for info in result.info["setup"][:2]]
    assert not np.any(clipped)
    assert not result.info["rounds"][0]["clients"][0].clipped.any()
    np.testing.assert_array_equal(result.labels[0], plain.labels[0])
    chex.assert_trees_all_close(
        centres_of(result.state.server.inner), centres_of(plain.state.server), atol=1e-2
    )


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"fuzzifier": 1.0}, r"fuzzifier: got 1.0; .* more than 1: .* farthest centre"),
        ({"fuzzifier": 1 + 1e-9}, r"fuzzifier: got 1\.000000001; .* 1\.000001 at least"),
        ({"fuzzifier": np.inf}, "fuzzifier: got inf"),
        ({"alpha": 1.0}, r"alpha: got 1.0; .* more than 1, .* linear in the view weights"),
        ({"alpha": 0.5}, r"alpha: got 0.5; .* concave"),
        ({"alpha": -2.0}, "alpha: got -2.0"),
        ({"tau": -0.1}, r"tau: got -0.1; allowed is 0 or more"),
        ({"tau": np.nan}, "tau: got nan"),
        ({"beta": 0.0}, "beta: got 0.0; allowed is a finite number above 0"),
        ({"tol": -1.0}, "tol: got -1.0"),
        ({"mix": 1.5}, "mix: got 1.5; allowed is from 0 to 1"),
        ({"view_mix": -0.5}, "view_mix: got -0.5; allowed is from 0 to 1"),
        ({"step_size": 0.0}, "step_size: got 0.0; allowed is a finite number above 0"),
        ({"limit": 0}, "limit: got 0; allowed is 1 to 3, n_clusters"),
        ({"limit": 4}, "limit: got 4; allowed is 1 to 3, n_clusters"),
        ({"quality": -1.0}, "quality: got -1.0; allowed is a finite number, 0 or more"),
        ({"fuzzifier": jnp.array([1.1, 0.9])}, "fuzzifier"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(values, reason):
    with pytest.raises(ValueError, match=reason):
        e_fkmvc(FedHKConfig(C), FedHKHyperparams(**values))


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"hkc": "mean"}, "hkc: got 'mean'; allowed is 'bandwidth' or 'minmax' or 'abs"),
        (
            {"centre_rule": "right"},
            "centre_rule: got 'right'; allowed is 'stationary' or 'pr",
        ),
        ({"aggregation": "sum"}, "aggregation: got 'sum'; allowed is 'statistics' or 'average'"),
        (
            {"personal": "own"},
            "personal: got 'own'; allowed is 'none' or 'proximal' or 'mix",
        ),
        ({"n_restarts": 0}, "n_restarts: got 0; allowed is 1 or more"),
        ({"local_steps": 0}, "local_steps: got 0"),
        ({"personal_steps": -1}, "personal_steps: got -1"),
        ({"n_clusters": 0}, "n_clusters: got 0; allowed is 1 or more"),
    ],
)
def test_settings_out_of_range_are_refused(values, reason):
    with pytest.raises(ValueError, match=reason):
        FedHKConfig(**{"n_clusters": C, **values})


@pytest.mark.parametrize(
    "config, starts",
    [
        (FedHKConfig(2), 1),
        (FedHKConfig(3), 10),
        (FedHKConfig(3, n_restarts=2), 2),
        (FedHKConfig(3, min_cluster_size=2), 1),
    ],
)
def test_there_are_more_starts_where_rows_are_few(config, starts):
    """Four clients with 75 rows each, most of them padding, hold 150 for each of two clusters."""
    fed = federation(make_views()[0], shares("iid"), 75)
    server, _ = jax.eval_shape(e_fkmvc(config).init, KEY, fed)
    assert server.models.log_objective.shape == (starts,)


def test_more_clusters_than_samples_are_refused():
    views, _ = make_views()
    with pytest.raises(ValueError, match="n_clusters: got 49 for 48 samples in all"):
        e_fkmvc(FedHKConfig(49)).init(KEY, federation(views, shares("sorted")))


def test_who_asks_for_more_clusters_than_summaries_is_warned():
    """Of 24, 14, 9 and 1 samples a client sends 4, 2, 1 and none."""
    fed = federation(make_views()[0], shares("sorted"))
    with pytest.warns(UserWarning, match=r"got 8, .* send 7 summaries .* every 5 samples"):
        e_fkmvc(FedHKConfig(8)).init(KEY, fed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        e_fkmvc(FedHKConfig(7)).init(KEY, fed)
        e_fkmvc(FedHKConfig(8), FedHKHyperparams(limit=7)).init(KEY, fed)
        # No client sends more than two for each cluster; guarded ones stand for more samples.
        e_fkmvc(FedHKConfig(1)).init(KEY, fed)
    part = federation(make_views()[0], shares("iid"))
    with pytest.warns(UserWarning, match=r"got 5, .* send 4 summaries .* every 8 samples"):
        e_fkmvc(FedHKConfig(5, min_cluster_size=4)).init(KEY, part)


def test_who_has_no_summary_to_start_from_is_told():
    rows = [{0: np.full((1, 2), i % 2, np.float32)} for i in range(6)]
    with pytest.raises(ValueError, match="have fewer than 2 samples, so that none sends a summary"):
        engine.start(e_fkmvc(FedHKConfig(2)), Federation.from_clients(rows), KEY)


def test_rows_beyond_every_kernel_go_to_the_nearest_centre():
    x = np.linspace(0.0, 0.1, 20, dtype=np.float32)[:, None] + 0.8 * (np.arange(20)[:, None] % 2)
    algorithm = e_fkmvc(FedHKConfig(2))
    server = started([np.repeat(x, 3, 1), np.repeat(x, 2, 1)], rows=(8, 9))  # in the middles
    far = np.float32([[-90.0], [-9.0], [-3.0], [0.1], [0.8], [4.0], [9.0], [90.0]])
    rows = Federation.from_clients([{0: np.repeat(far, 3, 1), 1: np.repeat(far, 2, 1)}])
    _, states = jax.jit(algorithm.init)(KEY, rows)
    one = jax.tree.map(lambda x: x[0], jax.device_get((states[0], rows.cohorts[0])))
    found = np.asarray(jax.jit(algorithm.assign)(server, *one))
    assert len(set(found[:4])) == len(set(found[4:])) == 1 and found[0] != found[-1]


def test_a_traced_array_is_no_hyper_parameter_and_a_mapped_number_is_one():
    def made(fuzzifier):
        e_fkmvc(FedHKConfig(C), FedHKHyperparams(fuzzifier=fuzzifier))
        return fuzzifier

    many = np.float32([1.01, 1.05])
    np.testing.assert_array_equal(jax.vmap(made)(many), many)
    with pytest.raises(ValueError, match=r"fuzzifier: got 'an array of shape \(2,\)'"):
        jax.jit(made)(many)
