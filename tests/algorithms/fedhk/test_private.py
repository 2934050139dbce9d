"""Private E-FKMVC: what a sample can change, the noise on what is sent, what a run spends."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import beta, chi2, kstest
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fedhk.accounting import (
    PrivacySettings,
    check_fraction_bits,
    privacy_settings,
    privacy_statement,
    releases,
    spent,
)
from jaxfedmvc.algorithms.fedhk.client import Samples, local_sums, samples_of
from jaxfedmvc.algorithms.fedhk.method import e_fkmvc
from jaxfedmvc.algorithms.fedhk.model import Model, Scale, ServerState
from jaxfedmvc.algorithms.fedhk.private import (
    Release,
    believed,
    check_sums_fit,
    clip_samples,
    e_fkmvc_with_noise,
    moments,
    moved,
    private_e_fkmvc,
    round_sums,
    sensitivity,
    start_sums,
)
from jaxfedmvc.algorithms.fedhk.settings import (
    FedHKConfig,
    FedHKHyperparams,
    PrivateFedHKConfig,
    PrivateFedHKHyperparams,
)
from jaxfedmvc.engine.steps import Steps
from jaxfedmvc.engine.streaming import run_streaming
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.messages.secure import secure_aggregation
from jaxfedmvc.privacy import gaussian_noise_multiplier, zcdp_noise_multiplier

DIMS, C, M, ROUNDS = (6, 4), 3, 3, 3
CONFIG = FedHKConfig(n_clusters=C, n_restarts=1)
HYPER = FedHKHyperparams(fuzzifier=1.2, alpha=5.0)
KEY = jax.random.key(2)
KINDS = ("moments", "start", "round")


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Programs of this file are compiled for a handful of small runs."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def blobs():
    """Three groups in the unit cube, on three clients of unequal size; padding is NaN."""
    rng = np.random.default_rng(0)
    labels = np.arange(54) % C
    views = []
    for d in DIMS:
        middles = 0.5 + 0.35 * (np.arange(d)[None] % C == np.arange(C)[:, None]) - 0.15
        views.append(np.clip(middles[labels] + 0.05 * rng.normal(size=(54, d)), 0, 1))
    cuts = np.split(np.arange(54), [15, 37])
    of = Federation.from_clients(
        [{v: x[rows] for v, x in enumerate(views)} for rows in cuts], [labels[r] for r in cuts]
    )
    poisoned = [
        c.replace(views=tuple(np.where(c.mask[..., None], x, np.float32(np.nan)) for x in c.views))
        for c in of.cohorts
    ]
    return of.replace(cohorts=tuple(poisoned))


FEDERATION = blobs()


def first_of(tree):
    """The first client, NumPy."""
    return jax.tree.map(lambda x: x[0], jax.device_get(tree))


def settings(z=0.0, **others):
    return PrivacySettings(**{"noise_multiplier": z, "shared_by": M, **others})


@functools.cache
def program(kind="private"):
    """A whole run, compiled once: noise, clip and key are arguments."""

    def run(key, z, clip):
        privacy = settings(z, clip=clip)
        algorithm = e_fkmvc_with_noise(CONFIG, HYPER, privacy)
        if kind == "plain":  # the rounds of the method without privacy, from the same start
            algorithm = e_fkmvc(CONFIG, HYPER)._replace(setup=algorithm.setup, done=None)
        if kind == "secure":
            algorithm = secure_aggregation(
                algorithm, FEDERATION, jax.random.key(9), fraction_bits=20
            )
        result = engine.run(algorithm, FEDERATION, key, ROUNDS)
        state = result.state.server.inner if kind == "secure" else result.state.server
        return result.labels[0], state

    return jax.jit(run)


def agreement(labels):
    mask = np.asarray(FEDERATION.cohorts[0].mask)
    return adjusted_rand_score(np.asarray(FEDERATION.labels[0])[mask], np.asarray(labels)[mask])


# --- Sensitivity ----------------------------------------------------------------------------------


def draw_ratios(key):
    """What one sample changes in each release, in units of its Delta, of one random case."""
    keys = iter(jax.random.split(key, 24))
    rows = 5  # the second last is the sample in question; the last is padding
    case = jax.random.randint(next(keys), (), 0, 5)
    spread = 10 ** jax.random.uniform(next(keys), minval=-2.0, maxval=2.0)
    x = {v: 0.5 + spread * jax.random.normal(next(keys), (rows, d)) for v, d in enumerate(DIMS)}
    x = {v: a.at[-1].set(jnp.nan) for v, a in x.items()}
    scales = {
        v: Scale(
            0.5 + 0.1 * jax.random.normal(next(keys), (d,)),
            10 ** jax.random.uniform(next(keys), minval=-2.0, maxval=2.0),
            jnp.zeros(0),
            jnp.zeros(0),
        )
        for v, d in enumerate(DIMS)
    }
    privacy = settings(clip=10 ** jax.random.uniform(next(keys), minval=-1.0, maxval=1.0))
    exponent = jax.random.uniform(next(keys), minval=-2.0, maxval=1.0)
    hyper = FedHKHyperparams(fuzzifier=1 + 10**exponent, alpha=3.0)
    weights = jax.nn.softmax(5 * jax.random.normal(next(keys), (len(DIMS),)))

    def samples(present):
        mask = jnp.array([True, True, True, present, False])
        client = Cohort(tuple(x.values()), mask, jnp.arange(rows), jnp.int32(0), (0, 1))
        of = samples_of(CONFIG, hyper, scales, client)
        return client, clip_samples(privacy, scales, of)

    centres = {}
    for v, own in ((v, views[3]) for v, views in samples(True)[1].views.items()):
        draws = jax.random.normal(next(keys), (C, DIMS[v]))
        random = jnp.sqrt(scales[v].variance) * draws
        centres[v] = jnp.stack(
            [
                random,
                jnp.broadcast_to(own, random.shape),  # all on the sample
                (100 * random).at[0].set(own),  # one on it, the others far
                100 * random,
                own[None] + 1e-3 * random,
            ]
        )[case]

    def messages(present):
        client, of = samples(present)
        return (
            moments(privacy, client),
            start_sums(privacy, scales, of, centres),
            round_sums(privacy, scales, local_sums(CONFIG, hyper, of, centres, weights)),
        )

    ratios = []
    for kind, one, other in zip(KINDS, messages(True), messages(False), strict=True):
        differences = jax.tree.leaves(jax.tree.map(jnp.subtract, one, other))
        squares = sum(jnp.sum(jnp.square(x)) for x in differences)
        ratios.append(jnp.sqrt(squares) / sensitivity(kind, DIMS))
    return case, jnp.stack(ratios)


def test_no_sample_changes_a_release_by_more_than_its_sensitivity():
    cases, ratios = jax.jit(jax.vmap(draw_ratios))(jax.random.split(jax.random.key(0), 2000))
    cases, ratios = np.asarray(cases), np.asarray(ratios)
    assert np.all(np.isfinite(ratios))
    assert np.all(ratios <= 1 + 1e-5)
    assert np.all(ratios[cases == 0].max(axis=0) > 0.3)  # random centres
    np.testing.assert_allclose(ratios.max(axis=0), 1.0, atol=1e-3)  # the bounds are met


# Centre, variance, origin and view weight that a server sends; honest ones would do.
HUGE = float(np.finfo(np.float32).max)
CRAFTED = np.float32(
    [
        (HUGE, 0.3, 0.5, 0.5),
        (np.inf, 0.3, 0.5, 0.5),
        (np.nan, 0.3, 0.5, 0.5),
        (HUGE, 1e12, -1.0, 0.5),
        (0.1, 1e-38, 0.5, 0.5),
        (HUGE, 0.3, -HUGE, 0.5),
        (0.1, 0.3, 0.5, np.nan),
        (0.1, 0.3, 0.5, np.inf),
    ]
)


def test_no_sample_shows_by_a_nan_whatever_a_server_sends():
    algorithm = e_fkmvc_with_noise(CONFIG, HYPER, settings(0.0))
    server, (states,) = jax.jit(algorithm.init)(KEY, FEDERATION)
    state, client = first_of(states), first_of(FEDERATION.cohorts[0])
    fewer = client.replace(mask=client.mask & (np.arange(len(client.mask)) > 0))

    def messages(crafted, client):
        centre, variance, origin, weight = crafted
        scales = {
            v: s._replace(variance=variance, origin=jnp.full_like(s.origin, origin))
            for v, s in server.scales.items()
        }
        fit = {v: a.at[..., 0, 0].set(centre) for v, a in server.models.fit.items()}
        weights = jnp.full_like(server.models.view_weights, weight)
        models = server.models._replace(fit=fit, view_weights=weights)
        sent = server._replace(scales=scales, models=models)
        start, first = algorithm.setup[1], algorithm.round[0]
        known, told, _ = start.client(KEY, start.broadcast(sent, (0, 1)), state, client)
        # The second round is of a client whose scales are whatever they are.
        rounds = [
            first.client(KEY, first.broadcast(sent, (0, 1)), before, client)[1]
            for before in (known, state.replace(scales=scales))
        ]
        return told, *rounds

    @jax.jit
    @jax.vmap
    def changes(crafted):
        return jax.tree.map(jnp.subtract, messages(crafted, client), messages(crafted, fewer))

    for kind, change in zip(("start", "round", "round"), changes(CRAFTED), strict=True):
        flat = [np.asarray(x).reshape(len(CRAFTED), -1) for x in jax.tree.leaves(change)]
        moved = np.linalg.norm(np.concatenate(flat, axis=1), axis=1)
        assert (moved <= sensitivity(kind, DIMS) * (1 + 1e-4)).all()  # and no NaN


@pytest.mark.parametrize("beta", [1e38, 1e300])
def test_no_sample_shows_by_a_nan_whatever_the_bandwidth(beta):
    """A sample that lies on a centre, whose coefficient overflows."""
    algorithm = e_fkmvc_with_noise(CONFIG, HYPER.replace(beta=beta), settings(0.0))
    server, (states,) = jax.jit(algorithm.init)(KEY, FEDERATION)
    scales = {
        v: s._replace(variance=np.float32(1e-12), origin=np.full_like(s.origin, 0.5))
        for v, s in server.scales.items()
    }
    state, client = first_of(states), first_of(FEDERATION.cohorts[0])
    is_first = np.arange(len(client.mask)) == 0
    on_centre = [np.where(is_first[:, None], np.float32(0.5), x) for x in client.views]
    client = client.replace(views=tuple(on_centre))
    fewer = client.replace(mask=client.mask & ~is_first)
    (phase,) = algorithm.round

    @jax.jit
    def message(client):
        sent = phase.broadcast(server, (0, 1))
        return phase.client(KEY, sent, state.replace(scales=scales), client)[1]

    change = jax.tree.map(np.subtract, *jax.device_get((message(client), message(fewer))))
    flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(change)])
    assert np.linalg.norm(flat) <= sensitivity("round", DIMS) * (1 + 1e-4)


def test_scales_are_brought_into_the_range_of_an_honest_server():
    """The ball about 0.5 of radius 0.5 * 2 in four features; variances from a millionth of that."""
    sent, empty = np.float32([9.0, -9.0, np.nan, 0.6]), np.zeros(0, np.float32)
    believe = jax.jit(functools.partial(believed, settings()))
    for variance, expected in ((1e9, 1.0), (0.3, 0.3), (1e-12, 1e-6), (-1.0, 1e-6)):
        scale = Scale(sent, np.float32(variance), empty, empty)
        found = believe({3: scale})[3]
        np.testing.assert_allclose(found.origin, [1.5, -0.5, 0.0, 0.6], rtol=1e-6)
        np.testing.assert_allclose(found.variance, expected, rtol=1e-5)


def test_sensitivity_of_one_view_by_hand():
    # 16 features: the weight counts half.
    assert sensitivity("moments", (16,)) == pytest.approx(math.sqrt(3))
    assert sensitivity("start", (16,)) == pytest.approx(math.sqrt(1.25))
    assert sensitivity("round", (16,)) == pytest.approx(math.sqrt(1.25))
    assert sensitivity("start", (10, 6)) == pytest.approx(math.sqrt(2 + 0.5))
    assert sensitivity("round", (16, 81)) == pytest.approx(math.sqrt(2 + 1 / 4 + 1 / 9))


# --- What is sent ---------------------------------------------------------------------------------


def send_all(z, keys):
    """Messages of one client in each kind of exchange, for each key."""
    algorithm = e_fkmvc_with_noise(CONFIG, HYPER, settings(z))
    server, states = algorithm.init(KEY, FEDERATION)
    scales = {v: s._replace(variance=jnp.float32(0.3)) for v, s in server.scales.items()}
    server = server._replace(scales=scales)
    state, client = jax.tree.map(lambda x: x[0], (states[0], FEDERATION.cohorts[0]))
    state = state.replace(scales=scales)
    phases = (*algorithm.setup[:2], *algorithm.round)

    def one(key):
        return [p.client(key, p.broadcast(server, (0, 1)), state, client)[1] for p in phases]

    return jax.vmap(one)(keys)


@pytest.mark.ci
def test_what_can_be_told_of_a_sample_is_little_less_than_epsilon():
    """By the likelihood ratio of all messages, of a server that puts a centre on the sample.

    A threshold is chosen on half of the draws; on the others Clopper-Pearson intervals bound
    epsilon from below.
    """
    epsilon, delta, n, width = 1.0, 0.1, 40_000, 2
    z = gaussian_noise_multiplier(epsilon, delta, 3)
    views = {0: np.float32([[9.0] * width, [0.3] * width, [0.6] * width])}
    (cohort,) = (of := Federation.from_clients([views])).cohorts
    config = private(noise="local", start_steps=1, rounds=1, n_clients=1)
    noisy, clean = (
        e_fkmvc_with_noise(config, HYPER, settings(x, shared_by=1, start_steps=1)) for x in (z, 0.0)
    )
    server, (states,) = jax.jit(noisy.init)(KEY, of)
    state, there = first_of(states), first_of(cohort)
    gone = there.replace(mask=there.mask & (np.arange(len(there.mask)) > 0))
    phases = [*zip(KINDS, noisy.setup + noisy.round, clean.setup + clean.round, strict=True)]

    def one(key, has_sample):
        at, client, evidence = server, state, 0.0
        for i, (kind, phase, exact) in enumerate(phases):
            own = jax.random.fold_in(key, i)
            if i:  # norm B about the released mean, where clipping brings the sample
                scale = at.scales[0]
                away = 9.0 - scale.origin
                away *= jnp.minimum(1.0, jnp.sqrt(scale.variance) / jnp.linalg.norm(away))
                fit = at.models.fit[0].at[0, 0].set(away).at[0, 1:].set(-away[None])
                at = at._replace(models=at.models._replace(fit={0: fit}))
            sent = phase.broadcast(at, (0,))
            with_it, without = (exact.client(own, sent, client, x)[1] for x in (there, gone))
            mine = there.replace(mask=jnp.where(has_sample, there.mask, gone.mask))
            client, message, _ = phase.client(own, sent, client, mine)
            at, _ = phase.server(own, at, (message,), (jnp.float32(1.0),))
            squares = [
                sum(
                    jnp.sum(jnp.square(a - b))
                    for a, b in zip(*map(jax.tree.leaves, pair), strict=True)
                )
                for pair in ((message, without), (message, with_it))
            ]
            evidence += (squares[0] - squares[1]) / sensitivity(kind, [width]) ** 2
        return evidence

    keys = jax.random.split(jax.random.key(3), 2 * n)
    told = np.asarray(jax.jit(jax.vmap(one))(keys, jnp.arange(2 * n) % 2 == 1))
    without, with_it = told[0::2], told[1::2]

    def bound(threshold, part):
        hits, errors = (np.sum(x[part] > threshold) for x in (with_it, without))
        power = beta.ppf(0.025, hits, n // 2 - hits + 1) - delta
        return np.log(np.maximum(power, 1e-9) / beta.ppf(0.975, errors + 1, n // 2 - errors))

    first, second = slice(0, n // 2), slice(n // 2, n)
    thresholds = np.quantile(told[:n], np.linspace(0.05, 0.95, 200))
    best = thresholds[np.argmax([bound(x, first) for x in thresholds])]
    assert 0.85 * epsilon < bound(best, second) < epsilon


def test_noise_is_normal_with_the_stated_deviation_in_every_leaf():
    """Of all clients together; of one alone, see what can be told of a sample."""
    z = 0.7
    send = jax.jit(send_all)
    keys = jax.random.split(jax.random.key(5), 400)
    noisy_sent, clean_sent = jax.device_get((send(z, keys), send(0.0, keys)))
    for kind, noisy, clean in zip(KINDS, noisy_sent, clean_sent, strict=True):
        sigma = z * sensitivity(kind, DIMS) / math.sqrt(M)
        drawn = [
            (a - b).astype(np.float64).reshape(len(keys), -1) / sigma
            for a, b in zip(jax.tree.leaves(noisy), jax.tree.leaves(clean), strict=True)
        ]
        for leaf in drawn:
            assert 1e-4 < chi2.cdf(np.sum(leaf**2), leaf.size) < 1 - 1e-4
        drawn = np.concatenate(drawn, axis=1)
        assert kstest(drawn.ravel(), "norm").pvalue > 1e-3
        # Entries are independent.
        correlations = np.corrcoef(drawn.T) - np.eye(drawn.shape[1])
        assert np.abs(correlations).max() < 5 / math.sqrt(len(keys))


def test_messages_hold_the_releases_and_nothing_else():
    algorithm = e_fkmvc_with_noise(CONFIG, HYPER, settings(1.0))
    traffic = engine.traffic(algorithm, FEDERATION)
    s, d = len(DIMS), sum(DIMS)
    assert traffic["setup"].up == 4 * M * ((d + s + 1) + 2 * (C * d + C))
    assert traffic["round"].up == 4 * M * (C * d + C * s + s)  # no n_l, no J_l
    assert traffic["finish"].up == 0
    assert all(p.reduce == "sum" for p in algorithm.setup + algorithm.round)


def test_every_exchange_that_sends_is_counted():
    start_steps = 3  # and two of the messages above
    privacy = settings(1.0, start_steps=start_steps)
    algorithm = e_fkmvc_with_noise(CONFIG, HYPER, privacy)

    def sends(phase):
        alone = algorithm._replace(setup=(phase,), round=(), finish=())
        return engine.traffic(alone, FEDERATION)["setup"].up > 0

    setup, each, finish = (
        sum(sends(phase) for phase in phases)
        for phases in (algorithm.setup, algorithm.round, algorithm.finish)
    )
    assert finish == 0
    assert (
        releases(privacy.start_steps, ROUNDS) == setup + ROUNDS * each == 1 + start_steps + ROUNDS
    )
    assert algorithm.done is None


@jax.jit
def moments_released(z, total, n_clients=float(M), clip=1.0):
    """What the server makes of a release of two views of two features each."""
    scale = Scale(jnp.zeros(2), jnp.float32(0), jnp.zeros(0), jnp.zeros(0))
    model = Model({}, jnp.ones((1, 2)), jnp.zeros(1), jnp.zeros(1))
    state = ServerState({}, {0: scale, 1: scale}, (), model, {})
    server = e_fkmvc_with_noise(CONFIG, HYPER, settings(z, clip=clip)).setup[0].server
    return server(KEY, state, (total,), (n_clients,))[0]


def test_moments_from_a_release_by_hand():
    # 9 samples, sigma = 0.5 sqrt(5), radius 0.5 sqrt(2). The mean 0.2 is 0.2 radii from the origin;
    # of its squared norm 2 (sigma / 9)^2 are noise.
    sums = {0: np.float32([1.8, 0.0]), 1: np.zeros(2, np.float32)}
    new = moments_released(0.5, Release(sums, np.float32(9), {0: 4.5, 1: 0.0}))
    scale, noise = new.scales[0], 2 * (0.25 * 5) / 81
    np.testing.assert_allclose(scale.origin, [0.5 + 0.2 * 0.5 * 2**0.5, 0.5], rtol=1e-5)
    np.testing.assert_allclose(scale.variance, (4.5 / 9 - 0.2**2 + noise) * 0.5, rtol=1e-5)
    # A variance that noise hides is as small as the noise of a mean.
    np.testing.assert_allclose(new.scales[1].variance, 0.5 * 5**0.5 / 9 * 0.5, rtol=1e-5)


@pytest.mark.parametrize(("clip", "share"), [(0.25, 0.25), (3.0, 1.0)])
def test_first_centres_of_views_lie_in_directions_of_their_own(clip, share):
    """Views of the same width too; as far out as a typical sample, and no farther than B."""
    total = Release(dict.fromkeys((0, 1), np.zeros(2)), np.float32(9), {0: 1.0, 1: 1.0})
    new = moments_released(0.0, total, float(M), clip)
    first, second = (np.asarray(new.models.fit[v][0]) for v in (0, 1))
    lengths = [np.linalg.norm(a, axis=1) for a in (first, second)]
    # A ninth of the squared radius, 0.5^2 * 2.
    np.testing.assert_allclose(lengths, share * math.sqrt(0.5 / 9), rtol=1e-5)
    assert np.abs(first - second).max(axis=1).min() > 1e-2 * lengths[0][0]


def test_a_release_of_fewer_clients_than_share_the_noise_is_refused():
    total = Release(dict.fromkeys((0, 1), np.zeros(2)), np.float32(9), {0: 1.0, 1: 1.0})
    assert np.all(np.isnan(moments_released(0.0, total, M - 1.0, 3.0).models.fit[0]))


def test_a_step_of_k_means_measures_every_view_in_its_variance():
    """By hand: in their own units the first view is the nearer to its centre, in theirs the other.

    Of two samples, one of them padding: sums of u = x / B, and g = sqrt(2) / 4^(1/4) times sizes.
    """
    scales = {
        v: Scale(np.zeros(2), np.float32(variance), np.zeros(0), np.zeros(0))
        for v, variance in ((0, 100.0), (1, 1.0))
    }
    x = {0: np.float32([[5.0, 0.0]] * 2), 1: np.float32([[0.0, 0.8]] * 2)}
    centres = {0: np.float32([[5.0, 0.0], [0.0, 0.0]]), 1: np.float32([[0.0, 0.0], [0.0, 0.8]])}
    samples = Samples(x, {}, np.array([True, False]))
    found = jax.jit(functools.partial(start_sums, settings(clip=2.0)))(scales, samples, centres)
    # (5 / 10)^2 is less than 0.8^2, and 5^2 more.
    np.testing.assert_allclose(found.sums[0], [[0, 0], [5 / 20, 0]], rtol=1e-6)
    np.testing.assert_allclose(found.sums[1], [[0, 0], [0, 0.8 / 2]], rtol=1e-6)
    np.testing.assert_allclose(found.weights, [0, 1], rtol=1e-6)


def test_costs_that_noise_hides_count_as_large_as_the_noise():
    """A view whose noisy cost is negative does not lose its weight."""
    scale = Scale(np.zeros(2), np.float32(1.0), np.zeros(0), np.zeros(0))
    fit = {v: np.zeros((1, C, 2), np.float32) for v in (0, 1)}
    model = Model(fit, np.full((1, 2), 0.5), np.zeros(1), np.zeros(1))
    state = ServerState({}, {0: scale, 1: scale}, (), model, {})
    (phase,) = e_fkmvc_with_noise(CONFIG, HYPER, settings(1.0)).round
    sigma = sensitivity("round", (2, 2))
    zeros = {v: np.zeros((C, 2), np.float32) for v in (0, 1)}
    weights = {v: np.zeros(C, np.float32) for v in (0, 1)}
    total = Release(zeros, weights, {0: -7.0, 1: 16 * sigma})
    new, _ = jax.jit(phase.server)(KEY, state, (total,), (np.float32(M),))
    # alpha is 5: C^(-1/4).
    np.testing.assert_allclose(new.models.view_weights, [[2 / 3, 1 / 3]], rtol=1e-5)


def test_rows_are_labelled_as_they_were_clipped():
    """By hand: (3, 4) is nearer to (0.9, 0), and (0.6, 0.8), to which B = 1 brings it, to (0, 0.2).

    Rounds see samples no farther out than B, and make their centres of these.
    """
    of = Federation.from_clients([{0: np.array([[3.0, 4.0], [0.0, 0.0]])}])
    algorithm = e_fkmvc_with_noise(FedHKConfig(2), HYPER, settings(shared_by=1))
    server, (states,) = jax.jit(algorithm.init)(KEY, of)
    state, client = first_of(states), first_of(of.cohorts[0])
    models = server.models._replace(fit={0: np.float32([[[0.9, 0.0], [0.0, 0.2]]])})
    scales = {0: server.scales[0]._replace(variance=np.float32(1.0))}
    ready = server._replace(models=models, scales=scales)
    labels = np.asarray(jax.jit(algorithm.assign)(ready, state, client))
    np.testing.assert_array_equal(labels[:2], [1, 1])


def test_centres_from_a_release_by_hand():
    # Variance 4 and clip 1.5: B = 3. Four features, sigma = 1, g = 0.5.
    scale = Scale(np.zeros(4), np.float32(4.0), np.zeros(0), np.zeros(0))
    previous = np.full((4, 4), 0.7, np.float32)
    model = Model({0: previous[None]}, np.ones((1, 1)), np.zeros(1), np.zeros(1))
    weights = np.float32([10.0, 10.0, 2.9, 10.0])  # g W
    sums = np.float32([[10.0, 0, 0, 0], [0, 40.0, 0, 0], [2.0, 0, 0, 0], [0, 0, 1.0, 0]])  # N / B
    found = jax.jit(functools.partial(moved, settings(clip=1.5)))(
        ServerState({}, {0: scale}, (), model, {}),
        Release({0: sums}, {0: weights}, {}),
        {0: 0.5},
        np.float32(1.0),
    )[0]
    # W = 20 and e = 3 / 20. N / W = 1.5 is shrunk by 1 - 2 e^2 / 1.5^2; 6 lies outside the ball and
    # becomes 3; a weight below 3 sigma, and a centre smaller than its noise, keep what was.
    expected = np.full((4, 4), 0.7)
    expected[0] = [1.5 * (1 - 2 * 0.0225 / 2.25), 0, 0, 0]
    expected[1] = [0, 3 * (1 - 2 * 0.0225 / 9), 0, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# --- What is spent --------------------------------------------------------------------------------


def private(**others):
    return PrivateFedHKConfig(C, **{"rounds": ROUNDS, "n_clients": M, **others})


def test_spent_is_below_the_closed_bound_and_inverts_the_multiplier():
    delta, z, n = 1e-5, 4.0, releases(2, ROUNDS)
    epsilon, same = spent(private(), PrivateFedHKHyperparams(noise_multiplier=z))
    rho = n / (2 * z**2)
    closed = rho + 2 * math.sqrt(rho * math.log(1 / delta))
    assert same == delta
    assert 0.7 * closed < epsilon < closed
    assert zcdp_noise_multiplier(closed, delta, n) == pytest.approx(z)
    assert gaussian_noise_multiplier(epsilon, delta, n) == pytest.approx(z, rel=1e-3)
    assert spent(private(), PrivateFedHKHyperparams(noise_multiplier=0.0))[0] == math.inf


def test_noise_is_calibrated_to_the_budget():
    config = private(dp_epsilon=2.0, start_steps=3, origin=(0.0, 0.5), radius=(2.0,))
    found = privacy_settings(config, PrivateFedHKHyperparams(clip=1.5))
    z = gaussian_noise_multiplier(2.0, 1e-5, 1 + 3 + ROUNDS)
    assert found == PrivacySettings(z, (0.0, 0.5), 2.0, 1.5, shared_by=M, start_steps=3)
    assert spent(config)[0] == pytest.approx(2.0, rel=1e-3) and spent(config)[0] <= 2.0
    assert privacy_settings(private(dp_epsilon=math.inf)).noise_multiplier == 0
    for n_clients in (None, M):  # which local noise is not shared out over
        local = private(noise="local", n_clients=n_clients)
        assert privacy_settings(local).shared_by == 1


def test_more_rounds_than_the_noise_is_calibrated_for_are_refused():
    method = private_e_fkmvc(private(noise="local"))
    steps = Steps(lambda hyper: method, (), FEDERATION)
    hidden = secure_aggregation(method, FEDERATION, KEY, fraction_bits=20)
    for call in (
        lambda: engine.run(method, FEDERATION, KEY, ROUNDS + 1),
        lambda: engine.run(hidden, FEDERATION, KEY, ROUNDS + 1),
        lambda: run_streaming(method, FEDERATION, KEY, ROUNDS + 1, client_chunk=1),
        lambda: engine.one_round(method, FEDERATION, KEY, None, ROUNDS),
        lambda: steps.one_round(FEDERATION, KEY, None, ROUNDS),
    ):
        with pytest.raises(ValueError, match=r"rounds: got 4; allowed is 0 to 3, for which .* noi"):
            call()
    # Of explicit settings nothing is calibrated, and fewer rounds spend less.
    assert e_fkmvc_with_noise(CONFIG, HYPER, settings(1.0)).most_rounds is None
    jax.eval_shape(lambda: engine.run(method, FEDERATION, KEY, ROUNDS - 1).labels)


@pytest.mark.slow
def test_a_private_run_is_one_with_the_calibrated_noise():
    config, hyper = private(), PrivateFedHKHyperparams(fuzzifier=1.2, alpha=5.0)
    method = private_e_fkmvc(config, hyper)
    explicit = e_fkmvc_with_noise(CONFIG, HYPER, privacy_settings(config))
    labels, same = (
        jax.jit(lambda key, a=a: engine.run(a, FEDERATION, key, ROUNDS).labels[0])(KEY)
        for a in (method, explicit)
    )
    np.testing.assert_array_equal(labels, same)


@pytest.mark.slow
def test_the_multiplier_and_the_clip_may_be_traced():
    @jax.jit
    def run(z, clip):
        hyper = PrivateFedHKHyperparams(fuzzifier=1.2, alpha=5.0, noise_multiplier=z, clip=clip)
        return engine.run(private_e_fkmvc(private(), hyper), FEDERATION, KEY, ROUNDS).labels[0]

    np.testing.assert_array_equal(run(0.1, 1.0), program()(KEY, 0.1, 1.0)[0])


def test_a_statement_says_what_is_covered_and_what_is_not():
    told = privacy_statement(private(dp_epsilon=2.0))
    assert told["kind"] == "differential privacy, central noise"
    assert told["epsilon"] == pytest.approx(2, rel=1e-3) and told["delta"] == 1e-5
    n = releases(2, ROUNDS)
    assert f"all {n} releases" in told["covered"] and f"{M} clients" in told["covered"]
    for part in ("clients (all", "number of", "seeds", "ranges", "losses and scores"):
        assert any(part in line for line in told["not_covered"]), part
    local = privacy_statement(private(noise="local", dp_epsilon=math.inf))
    assert "all messages" in local["covered"] and local["epsilon"] is None
    assert privacy_statement(CONFIG) == {"kind": "none"}
    assert any("summaries" in x for x in privacy_statement(CONFIG, secure=True)["not_covered"])


def test_fixed_point_numbers_must_not_round_the_noise_away():
    config, hyper = private(), PrivateFedHKHyperparams(noise_multiplier=0.1)
    # A hundredth of 0.1 / sqrt(3) is 2^-10.8.
    check_fraction_bits(config, hyper, 11)
    with pytest.raises(ValueError, match="fraction_bits: got 10; allowed is 11 or more"):
        check_fraction_bits(config, hyper, 10)
    check_fraction_bits(config, PrivateFedHKHyperparams(noise_multiplier=0.0), 0)


def test_fixed_point_numbers_must_hold_whatever_a_client_sends():
    """Eight rows in an entry of each of three clients, and 9.5 deviations sqrt(3) / sqrt(3)."""
    for z, most in ((0.0, 26), (1.0, 25)):  # log2(3 * 8.008) is 4.6, and log2(3 * 17.508) 5.7
        hyper = PrivateFedHKHyperparams(noise_multiplier=z)
        check_sums_fit(private(), hyper, most, (16,), 8)
        with pytest.raises(ValueError, match=rf"fraction_bits: got {most + 1}; .* {most} or less"):
            check_sums_fit(private(), hyper, most + 1, (16,), 8)


# --- Runs -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_noise_and_clipping_it_is_the_method_without_privacy():
    labels, private = program()(KEY, 0.0, 1e3)
    same, plain = program("plain")(KEY, 0.0, 1e3)
    np.testing.assert_array_equal(labels, same)
    for v in range(len(DIMS)):
        np.testing.assert_allclose(private.models.fit[v], plain.models.fit[v], atol=1e-5)
    for name in ("view_weights", "log_objective"):
        np.testing.assert_allclose(
            getattr(private.models, name), getattr(plain.models, name), rtol=1e-4
        )


@pytest.mark.slow
def test_moments_without_noise_are_those_of_the_pooled_samples():
    _, server = program()(KEY, 0.0, 1.0)
    mask = np.asarray(FEDERATION.cohorts[0].mask)
    for v, x in enumerate(FEDERATION.cohorts[0].views):
        x = np.asarray(x)[mask]
        np.testing.assert_allclose(server.scales[v].origin, x.mean(axis=0), atol=1e-5)
        np.testing.assert_allclose(server.scales[v].variance, x.var(axis=0).sum(), rtol=1e-4)


@pytest.mark.slow
def test_little_noise_leaves_the_clusters():
    labels, server = program()(KEY, 0.1, 1.0)
    assert agreement(labels) > 0.9
    assert np.all(np.asarray(labels)[~np.asarray(FEDERATION.cohorts[0].mask)] == -1)
    for v, scale in server.scales.items():
        lengths = np.linalg.norm(server.models.fit[v][0], axis=1)
        assert np.all(lengths <= np.sqrt(scale.variance) * (1 + 1e-5))


@pytest.mark.slow
def test_huge_noise_gives_finite_models():
    z = gaussian_noise_multiplier(0.01, 1e-5, releases(2, ROUNDS))
    for seed in range(5):
        labels, server = program()(jax.random.key(seed), z, 1.0)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(server.models.fit))
        assert np.all(np.isfinite(server.models.view_weights))
        assert set(np.unique(labels)) <= {-1, *range(C)}


@pytest.mark.slow
def test_secure_sums_change_nothing_but_rounding():
    labels, plain = program()(KEY, 0.1, 1.0)
    same, secure = program("secure")(KEY, 0.1, 1.0)
    np.testing.assert_array_equal(labels, same)
    for v in range(len(DIMS)):
        np.testing.assert_allclose(secure.models.fit[v], plain.models.fit[v], atol=1e-4)


@pytest.mark.slow
def test_a_sum_with_too_little_noise_is_refused():
    algorithm = e_fkmvc_with_noise(CONFIG, HYPER, settings(1.0))

    @jax.jit
    def fits(n_clients):
        server, states = algorithm.init(KEY, FEDERATION)
        state, client = jax.tree.map(lambda x: x[0], (states[0], FEDERATION.cohorts[0]))
        found = []
        for phase in (*algorithm.setup[:2], *algorithm.round):
            sent = phase.broadcast(server, (0, 1))
            state, total, _ = phase.client(KEY, sent, state, client)
            after, _ = phase.server(KEY, server, (total,), (n_clients,))
            found.append(after.models.fit)
            # The next exchange is one whose state is in order.
            server, _ = phase.server(KEY, server, (total,), (jnp.float32(M),))
        return found

    for n_clients, is_right in ((M, np.isfinite), (M - 1, np.isnan)):
        for x in jax.tree.leaves(fits(jnp.float32(n_clients))):
            assert np.all(is_right(x)), x


def test_a_run_that_would_lack_noise_is_refused_before_it_begins():
    algorithm = e_fkmvc_with_noise(CONFIG, HYPER, settings(1.0))
    said = r"participation: got 0\.67; allowed is a share of which 3 clients or more .* here 2"
    with pytest.raises(ValueError, match=said):
        engine.run(algorithm, FEDERATION, KEY, ROUNDS, participation=0.67)
    fewer = e_fkmvc_with_noise(CONFIG, HYPER, settings(1.0, shared_by=2))
    assert len(engine.start(fewer, FEDERATION, KEY, participation=0.67).participants[0]) == 2


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_without_a_model_there_are_no_clusters(wrong):
    """As after a sum that was refused, when a client has dropped out."""
    algorithm = e_fkmvc_with_noise(CONFIG, HYPER, settings(1.0))
    server, (states,) = jax.jit(algorithm.init)(KEY, FEDERATION)
    scales = {v: s._replace(variance=np.float32(0.3)) for v, s in server.scales.items()}
    state, client = first_of(states), first_of(FEDERATION.cohorts[0])
    assign = jax.jit(algorithm.assign)
    for entry in (0.0, wrong):
        of_one = np.array(server.models.fit[1])
        of_one[0, 2, 0] = entry
        fit = server.models.fit | {1: of_one}
        sent = server._replace(scales=scales, models=server.models._replace(fit=fit))
        labels = np.asarray(assign(sent, state, client))[client.mask]
        assert np.all(labels == 0 if np.isfinite(entry) else labels == -1)


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "privacy", "said"),
    [
        ({}, {"clip": 0.0}, "clip: got 0.0"),
        ({}, {"radius": (0.5, -1.0)}, "radius: got -1.0"),
        ({}, {"origin": math.nan}, "origin: got nan"),
        ({}, {"z": -1.0}, "noise_multiplier: got -1.0"),
        ({}, {"z": math.inf}, "noise_multiplier: got inf"),
        ({}, {"shared_by": 0}, "shared_by: got 0"),
        ({}, {"start_steps": 0}, "start_steps: got 0"),
        ({"hkc": "minmax"}, {}, "hkc: got 'minmax'; allowed is 'bandwidth'"),
        ({"aggregation": "average"}, {}, "aggregation: got 'average'; allowed is 'statistics'"),
        ({"personal": "mix"}, {}, "personal: got 'mix'; allowed is 'none'"),
        ({"min_cluster_size": 2}, {}, "min_cluster_size: got 2; allowed is None"),
        ({"n_restarts": 2}, {}, "n_restarts: got 2; allowed is 1"),
    ],
)
def test_what_cannot_be_accounted_is_refused(config, privacy, said):
    with pytest.raises(ValueError, match=said):
        e_fkmvc_with_noise(FedHKConfig(C, **config), HYPER, settings(**privacy))


def test_federations_that_do_not_fit_are_refused():
    rows = np.zeros((4, 2))
    mixed = Federation.from_clients([{0: rows, 1: rows}, {0: rows}])
    for privacy, federation, said in (
        (settings(shared_by=1), mixed, "some clients lack views"),
        (settings(shared_by=M + 1), FEDERATION, "shared_by: got 4; allowed is 1 to 3"),
        (settings(origin=(0.5, 0.5, 0.5)), FEDERATION, r"origin: got .*; allowed is 2 entries"),
    ):
        with pytest.raises(ValueError, match=said):
            e_fkmvc_with_noise(CONFIG, HYPER, privacy).init(KEY, federation)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"dp_epsilon": 0.0}, "dp_epsilon: got 0.0; allowed is more than 0"),
        ({"dp_epsilon": math.nan}, "dp_epsilon: got nan"),
        ({"dp_delta": 2.0}, "dp_delta: got 2.0; allowed is a number between 0 and 1"),
        ({"dp_delta": 0.0}, "dp_delta: got 0.0"),
        ({"noise": "none"}, "noise: got 'none'; allowed is 'central' or 'local'"),
        ({"n_clients": None}, "n_clients: got None; allowed is the number of clients"),
        ({"rounds": -1}, "rounds: got -1; allowed is 0 or more"),
        ({"start_steps": 0}, "start_steps: got 0; allowed is 1 to 1000"),
        ({"start_steps": 10**9}, "start_steps: got 1000000000; allowed"),
        ({"origin": ()}, r"origin: got \(\); allowed is one number, or one for each view"),
        ({"hkc": "absmean"}, "hkc: got 'absmean'; allowed is 'bandwidth'"),
    ],
)
def test_private_settings_out_of_range_are_refused(values, said):
    with pytest.raises(ValueError, match=said):
        private(**values)
