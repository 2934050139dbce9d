"""FedHK-Tucker: descent of J, dense least squares, gauges, averages of cores, bytes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fedhk.method import best, centres, e_fkmvc
from jaxfedmvc.algorithms.fedhk.model import whole
from jaxfedmvc.algorithms.fedhk.settings import FedHKHyperparams, FedHKTuckerConfig
from jaxfedmvc.algorithms.fedhk.tucker import (
    feature_basis,
    fedhk_tucker,
    stacked,
    tucker_codec,
)
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation
from jaxfedmvc.tensor import tucker as tk

C, WIDTHS, RESTARTS, ROUNDS = 3, (5, 4, 3), 2, 12
FULL, FEATURES, ALL = (3, 5, 3), (3, 3, 3), (2, 3, 2)
CONFIG = FedHKTuckerConfig(C, n_restarts=RESTARTS)
AVERAGE = FedHKTuckerConfig(C, aggregation="average", n_restarts=RESTARTS)
ALPHAS = jnp.array([jnp.inf, 5.0] * 3)
# log J is of the order of 1 to 3, in float32.
ROUNDING = 3e-6


def federation(seed, partial=True):
    """Three clients of 12 samples with all views; with `partial` one more without view 1."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, C, 48)
    views = [
        (rng.normal(size=(C, d))[truth] + 0.6 * rng.normal(size=(48, d))).astype(np.float32)
        for d in WIDTHS
    ]
    parts = [Part((0, 1, 2), np.arange(36).reshape(3, 12), np.arange(3))]
    if partial:
        parts.append(Part((0, 2), np.arange(36, 48)[None], np.array([3])))
    return Federation.from_arrays(views, partition=parts)


def codec_of(config, ranks, alignment="shared_basis"):
    return tucker_codec(dataclasses.replace(config, ranks=ranks, alignment=alignment))


@functools.cache
def feds():
    """Three data sets, each for both values of alpha."""
    return jax.tree.map(lambda *x: jnp.stack(x), *[federation(i // 2) for i in range(6)])


def begun(algorithm, codec, fed, key):
    """As after the setup, but starts from random samples: poor ones, which differ."""
    state = engine.start(algorithm, fed, key)
    pooled = {
        v: jnp.concatenate(
            [c.by_view()[v].reshape(-1, WIDTHS[v]) for c in fed.cohorts if v in c.view_ids]
        )
        for v in range(len(WIDTHS))
    }
    scales = {
        v: scale._replace(origin=pooled[v].mean(0), variance=pooled[v].var(0).sum())
        for v, scale in state.server.scales.items()
    }
    # The first 36 samples are those of the clients with all views.
    drawn = jnp.stack([jax.random.permutation(k, 36)[:C] for k in jax.random.split(key, RESTARTS)])
    about = {v: x[:36] - scales[v].origin[None] for v, x in pooled.items()}
    basis, fits = codec.start(
        {v: x[::6] for v, x in about.items()}, jnp.ones(6), {v: x[drawn] for v, x in about.items()}
    )
    models = state.server.models._replace(fit=fits)
    server = state.server._replace(scales=scales, basis=basis, models=models)

    def client(old, cohort):
        held = {v: scales[v] for v in cohort.view_ids}, basis if codec.shares_basis else ()
        held = jax.tree.map(lambda x: jnp.broadcast_to(x, (cohort.n_clients, *x.shape)), held)
        return dataclasses.replace(old, scales=held[0], basis=held[1])

    return state._replace(server=server, clients=tuple(map(client, state.clients, fed.cohorts)))


def first_start(state):
    """Without the others, from which it may differ by rounding alone."""
    models = jax.tree.map(lambda x: x[:1], state.server.models)
    return state._replace(server=state.server._replace(models=models))


def assigned(algorithm, fed, state):
    return jnp.concatenate([x.ravel() for x in engine.assign(algorithm, fed, state)])


@functools.cache
def runs(ranks, config=CONFIG, alignment="shared_basis"):
    """All of `feds`: states after the rounds, log J [runs, rounds, starts], and of each run's first
    start the centres and labels. Without ranks E-FKMVC.
    """
    codec = whole() if ranks is None else codec_of(config, ranks, alignment)

    def one(fed, alpha):
        algorithm = e_fkmvc(config, FedHKHyperparams(alpha=alpha), codec)
        key = jax.random.key(1)

        def step(state, r):
            state, info = engine.one_round(algorithm, fed, key, state, r)
            return state, info[0]["server"]["log_objective"]

        state = begun(algorithm, codec, fed, key)
        state, values = jax.lax.scan(step, state, jnp.arange(ROUNDS))
        state = first_start(state)
        return state, values, centres(state.server, codec)[0], assigned(algorithm, fed, state)

    return jax.jit(jax.vmap(one))(feds(), ALPHAS)


def of_start(tree, start=0):
    return jax.tree.map(lambda x: x[start], tree)


def rotation(size, seed):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0].astype("float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [FULL, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (FEATURES, ALL))]
)
def test_no_round_raises_the_objective(ranks):
    _, values, found, labels = runs(ranks)
    assert np.isfinite(values).all()
    assert np.diff(values, axis=1).max() < ROUNDING
    assert (values[:, 0] - values[:, -1]).min() > 0.01  # there was something to lower
    assert all(np.isfinite(part).all() for part in found.values())
    assert set(np.unique(labels)) == set(range(C))


@pytest.mark.slow
def test_full_ranks_are_no_constraint():
    _, values, found, labels = runs(FULL)
    _, expected, expected_centres, expected_labels = runs(None)
    np.testing.assert_allclose(values, expected, atol=1e-3)
    np.testing.assert_allclose(values[:, -1], expected[:, -1], atol=1e-4)
    np.testing.assert_array_equal(labels, expected_labels)
    for v in found:
        np.testing.assert_allclose(found[v], expected_centres[v], atol=2e-3)


@pytest.mark.slow
def test_fewer_ranks_cost_objective():
    full, features, all_modes = (runs(r)[1][:, -1].min(axis=1) for r in (FULL, FEATURES, ALL))
    assert (full < features).all() and features.mean() < all_modes.mean()


@pytest.mark.slow
def test_centres_have_the_ranks_asked_for():
    state, *_ = runs(ALL)
    codec = codec_of(CONFIG, ALL)
    fit, basis = of_start(of_start(state.server.models.fit)), of_start(state.server.basis)
    tensor = stacked_in_basis(codec, fit, basis)
    assert [np.linalg.matrix_rank(tk.unfold(tensor, n), tol=1e-4) for n in range(3)] == list(ALL)


def stacked_in_basis(codec, fit, basis):
    """C of one start with all rows of the basis in every view, so that no rank is cut off."""
    return stacked(codec.centres(fit, basis, dict.fromkeys(range(3), WIDTHS[0])))


def sums(seed):
    """N and W such as clients send, an empty cluster among them; centres; relevance."""
    rng = np.random.default_rng(seed)
    weights = {v: rng.uniform(0.5, 8, C).astype("float32") for v in range(3)}
    weights[1][2] = 0.0
    means = {v: rng.normal(size=(C, d)).astype("float32") for v, d in enumerate(WIDTHS)}
    numerators = {v: weights[v][:, None] * means[v] for v in means}
    old = {v: rng.normal(size=(C, d)).astype("float32") for v, d in enumerate(WIDTHS)}
    return numerators, weights, old, np.array([0.3, 1.0, 0.05], "float32")


@functools.cache
def one_update(ranks):
    """The start from rows and centres, and one update from sums over all clients."""
    codec = codec_of(CONFIG, ranks)

    def update(rows, numerators, weights, old, relevance):
        widths = dict(enumerate(WIDTHS))
        basis, fits = codec.start(rows, jnp.ones(6), jax.tree.map(lambda x: x[None], old))
        fit = of_start(fits)
        sent = codec.compress(numerators, basis)
        new = codec.update(fit, sent, weights, relevance, basis, widths)
        before, after = (stacked_in_basis(codec, x, basis) for x in (fit, new))
        return basis, sent, before, after

    rng = np.random.default_rng(7)
    rows = {v: rng.normal(size=(6, d)).astype("float32") for v, d in enumerate(WIDTHS)}
    compiled = jax.jit(update)
    return lambda *arguments: compiled(rows, *arguments)


def padded_problem(numerators, weights, relevance):
    """Targets and weights of the bound of J on the padded tensor [c, D_max, s], float64."""
    target, strength = np.zeros((2, C, WIDTHS[0], 3))
    for v, d in enumerate(WIDTHS):
        w = np.float64(weights[v])[:, None]
        target[:, :d, v] = numerators[v] / np.where(w > 0, w, 1)
        strength[:, :d, v] = relevance[v] * w
    return target, strength


def test_an_update_is_weighted_least_squares_on_the_padded_tensor():
    numerators, weights, old, relevance = sums(0)
    basis, sent, before, after = one_update(FEATURES)(numerators, weights, old, relevance)
    for v, d in enumerate(WIDTHS):
        np.testing.assert_allclose(sent[v], numerators[v] @ basis[:d], atol=1e-5)
    target, strength = padded_problem(numerators, weights, relevance)
    # All of vec(C) = (I kron B kron I) z at once.
    design = np.einsum("ac,jr,bs->ajbcrs", np.eye(C), np.float64(basis), np.eye(3))
    design = design.reshape(target.size, -1)
    root = np.sqrt(strength).ravel()
    z = np.linalg.lstsq(design * root[:, None], target.ravel() * root, rcond=1e-9)[0]
    least = (design @ z).reshape(target.shape)
    bound = [np.sum(strength * (np.float64(x) - target) ** 2) for x in (before, after, least)]
    assert bound[2] <= bound[1] <= bound[2] + 1e-4 * (bound[0] - bound[2])
    counts = strength > 0
    np.testing.assert_allclose(np.where(counts, after, 0), np.where(counts, least, 0), atol=0.02)
    np.testing.assert_allclose(after[2, :, 1], before[2, :, 1], atol=1e-6)  # empty: it stays


def test_an_update_of_all_modes_lowers_the_weighted_error_from_the_centres_that_it_had():
    for seed in range(5):
        numerators, weights, old, relevance = sums(seed)
        _, _, before, after = one_update(ALL)(numerators, weights, old, relevance)
        target, strength = padded_problem(numerators, weights, relevance)
        bound = [np.sum(strength * (np.float64(x) - target) ** 2) for x in (before, after)]
        assert bound[1] < 0.99 * bound[0]


def test_a_view_of_no_relevance_moves_no_other():
    numerators, weights, old, _ = sums(0)
    changed = numerators | {2: -3 * numerators[2]}

    def moved(relevance):
        relevance = np.array([0.3, 1.0, relevance], "float32")
        found = [one_update(ALL)(x, weights, old, relevance)[3] for x in (numerators, changed)]
        return np.abs(found[0] - found[1])[:, :, :2].max()

    assert moved(1.0) > 0.1 and moved(1e-7) < 1e-3


def test_a_basis_of_features_is_of_the_rows_as_j_weighs_them():
    rng = np.random.default_rng(3)
    rows = {v: rng.normal(size=(6, d)).astype("float32") for v, d in enumerate(WIDTHS)}
    counts = np.array([3, 1, 2, 0, 1, 1], "float32")
    scale = {0: 1.0, 1: 100.0, 2: 0.01}  # units of a view make no difference
    scaled = {v: np.float32(scale[v]) * x for v, x in rows.items()}
    basis = np.asarray(jax.jit(feature_basis, static_argnums=2)(scaled, counts, 3))
    repeated = {v: np.repeat(x, np.int32(counts), axis=0) for v, x in rows.items()}
    columns = [
        np.pad(x, ((0, 0), (0, 5 - x.shape[1]))) / np.linalg.norm(x) for x in repeated.values()
    ]
    left = np.linalg.svd(np.concatenate(columns).T)[0][:, :3]
    np.testing.assert_allclose(basis @ basis.T, left @ left.T, atol=1e-5)


@pytest.mark.slow
def test_rotated_factors_are_the_same_model():
    state, _, found, labels = runs(ALL)
    algorithm = fedhk_tucker(dataclasses.replace(CONFIG, ranks=ALL))
    (core, (clusters, views)), basis = state.server.models.fit, state.server.basis
    turns = [rotation(r, seed) for seed, r in enumerate(ALL)]
    turned = core
    for mode, turn in enumerate(turns):
        turned = jnp.moveaxis(jnp.tensordot(turned, turn, (mode + 2, 0)), -1, mode + 2)
    assert np.abs(turned - core).max() > 0.1
    factors = clusters @ turns[0], views @ turns[2]
    models = state.server.models._replace(fit=(turned, factors))
    server = state.server._replace(models=models, basis=basis @ turns[1])
    at_infinity = jax.tree.map(  # the default of alpha
        lambda x: x[::2], (feds(), state._replace(server=server))
    )
    again = jax.jit(jax.vmap(lambda fed, state: assigned(algorithm, fed, state)))(*at_infinity)
    np.testing.assert_array_equal(again, labels[::2])
    again = jax.vmap(lambda server: centres(server, codec_of(CONFIG, ALL))[0])(server)
    for v in found:
        np.testing.assert_allclose(again[v], found[v], atol=1e-5)


def low_rank_tensor(seed, ranks=ALL):
    rng = np.random.default_rng(seed)
    tensor = rng.normal(size=ranks)
    for mode, size in enumerate((C, WIDTHS[0], 3)):
        factor = np.linalg.qr(rng.normal(size=(size, ranks[mode])))[0]
        tensor = np.moveaxis(np.tensordot(factor, tensor, (1, mode)), 0, mode)
    return tensor.astype(np.float32)


def distance(x, y):
    x, y = np.asarray(x), np.asarray(y)
    return np.linalg.norm(x - y) / np.linalg.norm(y)


reconstruct, procrustes = jax.jit(tk.reconstruct), jax.jit(tk.procrustes)


def mean_form(*forms):
    """What averages of cores and of factors give, the latter orthonormal again."""
    mean = jax.tree.map(lambda *parts: sum(parts) / len(parts), *forms)
    return reconstruct(tk.Tucker(mean.core, tuple(map(jax.jit(tk.polar), mean.factors))))


def test_gauges_must_agree_before_averages():
    tensor = low_rank_tensor(0)
    first = jax.device_get(jax.jit(tk.hosvd, static_argnums=1)(tensor, ALL))
    turns = [rotation(r, seed + 10) for seed, r in enumerate(ALL)]
    core = first.core
    for mode, turn in enumerate(turns):
        core = np.asarray(jax.jit(tk.mode_product, static_argnums=2)(core, turn.T, mode))
    second = tk.Tucker(core, tuple(f @ t for f, t in zip(first.factors, turns, strict=True)))
    assert distance(np.asarray(reconstruct(second)), tensor) < 1e-5
    naive = distance(mean_form(first, second), tensor)
    turned = jax.device_get(procrustes(second, first.factors))
    aligned = distance(mean_form(first, turned), tensor)
    assert naive > 0.3 and aligned < 1e-5


def test_a_client_turns_its_factors_and_the_server_makes_averages_orthonormal():
    """No turn brings F nearer to F' if F^T F' is symmetric and positive."""
    codec = codec_of(AVERAGE, ALL, "procrustes")
    rng = np.random.default_rng(0)
    sizes = tuple(zip((C, WIDTHS[0], 3), ALL, strict=True))
    factors = tuple(np.linalg.qr(rng.normal(size=x))[0].astype("float32") for x in sizes)
    sent = tk.Tucker(rng.normal(size=ALL).astype("float32"), factors)
    own = {v: rng.normal(size=(C, d)).astype("float32") for v, d in enumerate(WIDTHS)}

    @jax.jit
    def of_one_and_three(own, sent):
        found = codec.encode(own, sent, ())
        payloads = [found, jax.tree.map(lambda x: 3 * x, sent)]
        return found, codec.decode(payloads, [jnp.float32(1.0), jnp.float32(3.0)], sent, (), {})

    found, new = jax.tree.map(np.asarray, of_one_and_three(own, sent))
    for factor, old in zip(found.factors, sent.factors, strict=True):
        product = factor.T @ old
        np.testing.assert_allclose(product, product.T, atol=1e-5)
        assert np.linalg.eigvalsh(product).min() > -1e-5
        assert np.abs(factor - old).max() > 0.1  # there was something to turn
    np.testing.assert_allclose(new.core, 0.25 * found.core + 0.75 * sent.core, atol=1e-5)
    for factor, one, other in zip(new.factors, found.factors, sent.factors, strict=True):
        left, _, right = np.linalg.svd(one + 3 * other, full_matrices=False)
        np.testing.assert_allclose(factor, left @ right, atol=1e-5)


@functools.cache
def averaging(alignment):
    """Two clients' centres, weights 1 and 3: their average as the server decodes it."""
    codec = codec_of(AVERAGE, ALL, alignment)
    widths = dict(enumerate(WIDTHS))

    def average(rows, start, both):
        basis, fits = codec.start(rows, jnp.ones(6), jax.tree.map(lambda x: x[None], start))
        fit = of_start(fits)
        payloads = [codec.encode(c, codec.sent(fit, (0, 1, 2)), basis) for c in both]
        weighted = [
            jax.tree.map(lambda x, w=w: w * x, p) for p, w in zip(payloads, (1.0, 3.0), strict=True)
        ]
        new = codec.decode(weighted, [jnp.float32(1.0), jnp.float32(3.0)], fit, basis, widths)
        return basis, fit, payloads, new, codec.centres(new, basis, widths)

    return jax.jit(average)


def three_centres(seed, spread):
    """Those of a start, of low rank up to `spread`, and of two clients near by."""
    rng = np.random.default_rng(seed)
    tensor = low_rank_tensor(seed)
    for v, d in enumerate(WIDTHS):
        tensor[:, d:, v] = 0
    tensors = [tensor + spread * rng.normal(size=tensor.shape) for _ in range(3)]
    return [{v: np.float32(t[:, :d, v]) for v, d in enumerate(WIDTHS)} for t in tensors]


def summaries(seed):
    rng = np.random.default_rng(seed)
    return {v: rng.normal(size=(6, d)).astype("float32") for v, d in enumerate(WIDTHS)}


@pytest.mark.slow
def test_average_of_cores_is_core_of_the_average():
    start, *both = three_centres(0, 1.0)
    basis, fit, payloads, new, _ = averaging("shared_basis")(summaries(0), start, both)
    mean = jax.tree.map(lambda a, b: 0.25 * a + 0.75 * b, *both)
    assert payloads[0].shape == ALL and distance(payloads[0], payloads[1]) > 0.1
    expected = tk.project(filled(fit, basis, mean), basis).core
    np.testing.assert_allclose(new, expected, atol=1e-5)


def test_a_client_without_a_view_leaves_it_as_it_was_sent():
    start, first, second = three_centres(1, 1.0)
    del second[1]
    basis, fit, payloads, *_ = averaging("shared_basis")(summaries(0), start, [first, second])
    expected = tk.project(filled(fit, basis, second), basis).core
    np.testing.assert_allclose(payloads[1], expected, atol=1e-5)


@pytest.mark.parametrize("alignment", ["shared_basis", "procrustes"])
def test_a_fit_stays_where_no_client_has_weight(alignment):
    """As where `quality` is so large that all weights underflow."""
    codec = codec_of(AVERAGE, ALL, alignment)
    whole = three_centres(0, 1.0)[0]
    start = jax.jit(codec.start)
    basis, fits = start(summaries(0), np.ones(6), jax.tree.map(lambda x: x[None], whole))
    fit = of_start(jax.device_get(fits))
    nothing = [jax.tree.map(np.zeros_like, fit)] * 2, [np.float32(0.0)] * 2
    widths = dict(enumerate(WIDTHS))
    found = jax.jit(lambda *told: codec.decode(*told, widths))(*nothing, fit, basis)
    for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(fit), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-5)


def filled(core, basis, held):
    """The tensor as sent, with a client's centres in it; padding has no weight and stays."""
    tensor = np.array(tk.reconstruct(tk.Tucker(core, basis)))
    for v, part in held.items():
        tensor[:, : WIDTHS[v], v] = part
    return tensor


@pytest.mark.slow
def test_averages_of_aligned_forms_are_near_the_form_of_the_average():
    ratios = []
    for seed in range(3):
        start, *both = three_centres(seed, 0.1)
        *_, new, found = averaging("procrustes")(summaries(0), start, both)
        mean = stacked(jax.tree.map(lambda a, b: 0.25 * a + 0.75 * b, *both))
        for factor in new.factors:
            np.testing.assert_allclose(factor.T @ factor, np.eye(factor.shape[1]), atol=1e-5)
        ratios.append(distance(stacked(found), mean) / float(tk.hooi(mean, ALL).error))
    assert max(ratios) < 1.5  # of the error of the form of the averaged, padded tensor


@pytest.mark.slow
def test_averages_of_cores_learn():
    _, values, found, labels = runs(FEATURES, AVERAGE)
    assert np.isfinite(values).all() and all(np.isfinite(part).all() for part in found.values())
    # No promise of averages, but what they do here where views weigh the same.
    assert (values[::2, -1] < values[::2, 0]).all()
    assert set(np.unique(labels)) == set(range(C))


@functools.cache
def traffic(config, ranks, alignment="shared_basis", partial=False):
    codec = None if ranks is None else codec_of(config, ranks, alignment)
    return engine.traffic(e_fkmvc(config, codec=codec), federation(0, partial))


def floats(*method):
    """Numbers that one of three clients sends and receives in a round, for one start."""
    used = traffic(*method)["round"]
    assert used.up % (3 * 4 * RESTARTS) == used.down % (3 * 4 * RESTARTS) == 0
    return used.up // (3 * 4 * RESTARTS), used.down // (3 * 4 * RESTARTS)


@pytest.mark.slow
def test_bytes_of_a_round():
    (r1, r2, r3), d, s = ALL, WIDTHS[0], len(WIDTHS)
    core, factors = r1 * r2 * r3, C * r1 + d * r2 + s * r3
    assert floats(AVERAGE, ALL, "procrustes") == (core + factors + s + 2, core + factors + s)
    assert floats(AVERAGE, ALL) == (core + s + 2, core + s)
    assert floats(CONFIG, ALL) == (C * r2 * s + C * s + s + 2, core + C * r1 + s * r3 + s)
    assert floats(CONFIG, FEATURES) == (C * 3 * s + C * s + s + 2, C * 3 * s + s)


def test_bytes_of_a_client_without_a_view():
    more = (
        traffic(CONFIG, FEATURES, partial=True)["round"].up - traffic(CONFIG, FEATURES)["round"].up
    )
    assert more == 4 * RESTARTS * (2 * (C * 3 + C + 1) + 2)


def test_the_basis_is_sent_once():
    more = traffic(CONFIG, FEATURES)["setup"].down - traffic(CONFIG, None)["setup"].down
    assert more == 3 * 4 * WIDTHS[0] * FEATURES[1]


def test_default_ranks_compress_features_alone_and_always_fit():
    algorithm = fedhk_tucker(FedHKTuckerConfig(2, n_restarts=1))
    server, _ = jax.eval_shape(lambda: algorithm.init(jax.random.key(0), federation(0)))
    core, factors = server.models.fit
    assert core.shape == (1, 2, 4, 3) and factors == ((), ())
    # A single view of more than 2c features: as many as there are clusters suffice.
    single = Federation.from_arrays(
        [np.zeros((12, 9), "float32")], partition=[Part((0,), np.arange(12)[None], np.array([0]))]
    )
    server, _ = jax.eval_shape(lambda: algorithm.init(jax.random.key(0), single))
    assert server.models.fit[0].shape == (1, 2, 2, 1)


@pytest.mark.parametrize(
    ("n_clusters", "n_views", "width", "core", "views"),
    [(1, 3, 5, (1, 3, 3), None), (2, 9, 6, (2, 5, 9), None), (2, 9, 3, (2, 3, 6), (9, 6))],
)
def test_default_ranks_fit_few_clusters_of_many_views(n_clusters, n_views, width, core, views):
    # 2c features would tell (2, 4) no more than eight views apart, and a single cluster two.
    rows = [np.zeros((12, width), "float32")] * n_views
    every = Part(tuple(range(n_views)), np.arange(12)[None], np.array([0]))
    algorithm = fedhk_tucker(FedHKTuckerConfig(n_clusters, n_restarts=1))
    fed = Federation.from_arrays(rows, partition=[every])
    server, _ = jax.eval_shape(lambda: algorithm.init(jax.random.key(0), fed))
    found, (clusters, of_views) = server.models.fit
    assert found.shape == (1, *core) and clusters == ()
    assert (of_views == ()) if views is None else of_views.shape == (1, *views)


@pytest.mark.parametrize(
    "ranks", [(4, 3, 3), (3, 6, 3), (3, 3, 4), (0, 3, 3), (1, 3, 2), (3, 1, 2), (2, -1, 2)]
)
@pytest.mark.parametrize("config", [CONFIG, AVERAGE])
def test_refuses_ranks_that_the_tensor_cannot_have(ranks, config):
    algorithm = fedhk_tucker(dataclasses.replace(config, ranks=ranks))
    with pytest.raises(ValueError, match=r"ranks: got .* features and views \(3, 5, 3\)"):
        algorithm.init(jax.random.key(0), federation(0))


def test_refuses_settings_that_make_no_sense():
    with pytest.raises(ValueError, match=r"alignment: got 'procrustes'; .* aggregation 'stat"):
        FedHKTuckerConfig(C, alignment="procrustes")
    with pytest.raises(ValueError, match="alignment: got 'other'; allowed is 'shared_basis'"):
        FedHKTuckerConfig(C, alignment="other")
    with pytest.raises(ValueError, match=r"ranks: got \(3, 2\); allowed is three"):
        FedHKTuckerConfig(C, ranks=(3, 2))
    for ranks in ((3, 2.5, 2), (3, "2", 2), (3, None, 2)):
        with pytest.raises(ValueError, match=r"ranks: got .*; allowed is three whole numbers"):
            FedHKTuckerConfig(C, ranks=ranks)
    for coefficients in ("minmax", "absmean"):
        with pytest.raises(ValueError, match=f"hkc: got '{coefficients}'; .* with compressed sums"):
            FedHKTuckerConfig(C, hkc=coefficients)
        fedhk_tucker(FedHKTuckerConfig(C, hkc=coefficients, aggregation="average"))


@pytest.mark.slow
def test_a_whole_run_of_aligned_averages_from_the_clients_summaries():
    algorithm = fedhk_tucker(dataclasses.replace(AVERAGE, ranks=ALL, alignment="procrustes"))
    fed = federation(0)
    result = jax.jit(lambda fed, key: engine.run(algorithm, fed, key, 10))(fed, jax.random.key(0))
    values = result.info["rounds"][0]["server"]["log_objective"][: int(result.n_rounds)]
    assert np.isfinite(values).all() and values[-1].min() < values[0].min()
    fit = jax.tree.leaves(best(result.state.server.models).fit)
    assert all(np.isfinite(part).all() for part in fit)
    assert set(np.unique(np.concatenate([x.ravel() for x in result.labels]))) == set(range(C))
