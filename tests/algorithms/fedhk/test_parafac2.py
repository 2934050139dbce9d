"""FedHK-PARAFAC2: descent of J, a round in NumPy, invariance to clusters' order, messages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import engine
from jaxfedmvc.algorithms.fedhk.client import local_sums, samples_of
from jaxfedmvc.algorithms.fedhk.method import e_fkmvc
from jaxfedmvc.algorithms.fedhk.model import whole
from jaxfedmvc.algorithms.fedhk.parafac2 import clients_codec, fedhk_parafac2, views_codec
from jaxfedmvc.algorithms.fedhk.settings import FedHKHyperparams, FedHKParafac2Config
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation

C, WIDTHS, RESTARTS, ROUNDS = 3, (5, 4, 3), 2, 12
R, D, S = 2, sum(WIDTHS), len(WIDTHS)
CONFIG = FedHKParafac2Config(C, n_restarts=RESTARTS)
SAMPLEWISE = FedHKParafac2Config(C, hkc="absmean", n_restarts=RESTARTS)
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


@functools.cache
def feds(partial):
    """Three data sets, each for both values of alpha."""
    return jax.tree.map(lambda *x: jnp.stack(x), *[federation(i // 2, partial) for i in range(6)])


def has_partial(rank, config):
    """With the client that lacks a view all takes longer to compile: it is in some cases only."""
    return rank == R and config == CONFIG


def method(placement, rank, config, alpha=jnp.inf):
    """Algorithm and codec; E-FKMVC for the placement "none"."""
    hyper = FedHKHyperparams(alpha=alpha)
    if placement == "none":
        return e_fkmvc(config, hyper), whole()
    config = dataclasses.replace(config, rank=rank, placement=placement)
    codec = clients_codec if placement == "clients" else views_codec
    return fedhk_parafac2(config, hyper), codec(config)


@functools.cache
def begun(placement, rank, config):
    """As after the setup, for each of `feds`; from random samples: poor starts, which differ."""
    algorithm, codec = method(placement, rank, config)

    def one(fed):
        key = jax.random.key(1)
        state = engine.start(algorithm, fed, key)
        pooled = {
            v: jnp.concatenate(
                [c.by_view()[v].reshape(-1, WIDTHS[v]) for c in fed.cohorts if v in c.view_ids]
            )
            for v in range(S)
        }
        scales = {
            v: scale._replace(origin=pooled[v].mean(0), variance=pooled[v].var(0).sum())
            for v, scale in state.server.scales.items()
        }
        # The first 36 samples are those of the clients with all views.
        about = {v: x[:36] - scales[v].origin[None] for v, x in pooled.items()}
        keys = jax.random.split(key, RESTARTS)
        drawn = jnp.stack([jax.random.permutation(k, 36)[:C] for k in keys])
        basis, fits = codec.start(
            {v: x[::6] for v, x in about.items()},
            jnp.ones(6),
            {v: x[drawn] for v, x in about.items()},
        )
        models = state.server.models._replace(fit=fits)
        server = state.server._replace(scales=scales, basis=basis, models=models)

        def client(old, cohort):
            held = {v: scales[v] for v in cohort.view_ids}, basis if codec.shares_basis else ()
            n = cohort.n_clients
            held = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), held)
            return dataclasses.replace(old, scales=held[0], basis=held[1])

        clients = tuple(map(client, state.clients, fed.cohorts))
        return state._replace(server=server, clients=clients)

    return jax.jit(jax.vmap(one))(feds(has_partial(rank, config)))


@functools.cache
def rounds(placement, rank, config):
    """`(feds, states, n) -> states, log J [runs, n, starts], labels of the first start`."""

    def run(fed, state, alpha, n):
        algorithm, _ = method(placement, rank, config, alpha)
        key = jax.random.key(2)

        def step(r, carry):
            state, values = carry
            state, info = engine.one_round(algorithm, fed, key, state, r)
            return state, values.at[r].set(info[0]["server"]["log_objective"])

        state, values = jax.lax.fori_loop(0, n, step, (state, jnp.zeros((100, RESTARTS))))
        # Starts may differ by rounding alone: labels are of the first.
        models = jax.tree.map(lambda x: jnp.stack([x[0]] * RESTARTS), state.server.models)
        last = state._replace(server=state.server._replace(models=models))
        last, _ = engine.finish(algorithm, fed, key, last, n)
        labels = engine.assign(algorithm, fed, last)
        return state, values, jnp.concatenate([x.reshape(-1, 12) for x in labels])

    compiled = jax.jit(jax.vmap(run, (0, 0, 0, None)))

    def call(states, n, fed=None):
        fed = feds(has_partial(rank, config)) if fed is None else fed
        states = jax.tree.map(np.asarray, states)  # without weak types: one program for all
        states, values, labels = compiled(fed, states, ALPHAS, jnp.int32(n))
        return states, np.asarray(values)[:, :n], np.asarray(labels)

    return call


@functools.cache
def runs(placement, rank, config):
    return rounds(placement, rank, config)(begun(placement, rank, config), ROUNDS)


CASES = [("clients", R, CONFIG), ("clients", C, CONFIG), ("clients", R, SAMPLEWISE)]
CASES += [("views", R, CONFIG), ("views", C, CONFIG)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_round_raises_the_objective(case):
    state, values, labels = runs(*case)
    assert np.isfinite(values).all()
    assert np.diff(values, axis=1).max() < ROUNDING
    assert (values[:, 0] - values[:, -1]).min() > 0.01  # there was something to lower
    leaves = jax.tree.leaves((state.server.models.fit, [client.basis for client in state.clients]))
    assert all(np.isfinite(leaf).all() for leaf in leaves)  # the client without a view included
    assert set(np.unique(labels)) == set(range(C))


@pytest.mark.slow
def test_one_client_of_full_rank_is_not_constrained():
    fed = feds(partial=False)
    (cohort,) = fed.cohorts
    mask = cohort.mask & (jnp.arange(3) == 0)[None, :, None]  # the others have no samples
    fed = fed.replace(cohorts=(cohort.replace(mask=mask),))
    _, values, labels = rounds("clients", C, CONFIG)(begun("clients", C, CONFIG), 100, fed)
    _, expected, expected_labels = rounds("none", C, CONFIG)(begun("none", C, CONFIG), 100, fed)
    np.testing.assert_allclose(values[:, 0], expected[:, 0], atol=1e-5)
    np.testing.assert_allclose(values[:, -1], expected[:, -1], atol=1e-3)
    np.testing.assert_array_equal(labels[:, 0], expected_labels[:, 0])


@functools.cache
def one_round():
    """States before and after the third round of clients' slices."""
    advance = rounds("clients", R, CONFIG)
    before, *_ = advance(begun("clients", R, CONFIG), 2)
    return before, advance(before, 1)[0]


def f64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def sweep_in_numpy(slices, h, q, root):
    """A weighted sweep over slices (s, what it was, mean, weights): P and s of each, H and Q."""
    q_root = q * root[:, None]
    h_sum, q_sum, squares, kept = 0, 0, 0, []
    for s, fitted, mean, w in slices:
        target = fitted + w / w.max() * (mean - fitted)
        left, _, right = np.linalg.svd(
            (target * root) @ q_root @ np.diag(s) @ h.T, full_matrices=False
        )
        p = left @ right
        y = p.T @ target
        gram = (h.T @ h) * (q_root.T @ q_root)
        s = np.linalg.solve(gram, np.diag(h.T @ (y * root) @ q_root))
        h_sum = h_sum + w.max() * (y * root) @ q_root @ np.diag(s)
        squares = squares + w.max() * np.outer(s, s)
        kept.append((w.max(), p, y, s))
    h = h_sum @ np.linalg.inv((q_root.T @ q_root) * squares)
    for peak, _, y, s in kept:
        q_sum = q_sum + peak * y.T @ h @ np.diag(s)
    return [(p, s) for _, p, _, s in kept], h, q_sum @ np.linalg.inv((h.T @ h) * squares)


@pytest.fixture(scope="module")
def drawn():
    """Of one start: algorithm, data, server and clients, the first three with random factors."""
    rng = np.random.default_rng(0)
    config = dataclasses.replace(CONFIG, n_restarts=1)
    algorithm, _ = method("clients", R, config, alpha=2.0)
    fed = federation(0)
    server, (clients, last) = jax.jit(algorithm.init)(jax.random.key(0), fed)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    h, q = draw(1, R, R), {v: draw(1, d, R) for v, d in enumerate(WIDTHS)}
    variances = dict(enumerate(np.float32([1.0, 4.0, 0.25])))
    scales = {v: scale._replace(variance=variances[v]) for v, scale in server.scales.items()}
    fit = server.models.fit._replace(h=h, q=q)
    models = server.models._replace(fit=fit, view_weights=np.float32([[0.5, 0.2, 0.3]]))
    weights = {v: rng.uniform(1, 3, (3, 1, C)).astype(np.float32) for v in range(S)}
    weights[1][2] = 0  # as if the last one did not hold view 1
    own = clients.basis._replace(
        projection=np.linalg.qr(draw(3, 1, C, R))[0],
        scales=draw(3, 1, R),
        h=np.stack([h] * 3),
        q={v: np.stack([x] * 3) for v, x in q.items()},
        numerators={v: draw(3, 1, C, d) * weights[v][..., None] for v, d in enumerate(WIDTHS)},
        weights=weights,
    )
    server = server._replace(scales=scales, models=models)
    return algorithm, fed, server, (dataclasses.replace(clients, basis=own), last)


def test_exchanges_of_a_round_make_a_weighted_sweep(drawn):
    algorithm, fed, server, (clients, _) = drawn
    _, second, third = algorithm.round

    @jax.jit
    def sweep(server, clients):
        key, add = jax.random.key(0), lambda tree: jax.tree.map(lambda x: x.sum(axis=0), tree)
        for phase in (second, third):
            sent = phase.broadcast(server, (0, 1, 2))
            many = jax.vmap(phase.client, (None, None, 0, 0))
            clients, messages, _ = many(key, sent, clients, fed.cohorts[0])
            server, _ = phase.server(key, server, (add(messages),), (jnp.float32(3),))
        return server.models.fit, clients.basis

    fit, found = jax.tree.map(lambda x: np.asarray(x), sweep(server, clients))
    own = jax.tree.map(lambda x: np.asarray(x[:, 0], np.float64), clients.basis)
    h, q = server.models.fit.h[0], np.concatenate([x[0] for x in server.models.fit.q.values()])
    relevance = (np.array([0.5, 0.2, 0.3]) / 0.5) ** 2
    root = np.repeat(np.sqrt(0.25 / np.array([1.0, 4.0, 0.25])), WIDTHS)  # the greatest is 1
    slices = []
    for i in range(3):
        fitted = own.projection[i] @ h @ np.diag(own.scales[i]) @ q.T
        w = np.concatenate(
            [np.outer(own.weights[v][i], [relevance[v]] * d) for v, d in enumerate(WIDTHS)], 1
        )
        sums = np.concatenate(
            [own.numerators[v][i] / np.maximum(own.weights[v][i], 1)[:, None] for v in range(S)], 1
        )
        slices.append((own.scales[i], fitted, np.where(w > 0, sums, fitted), w))
    swept, h, q = sweep_in_numpy(slices, h, q, root)
    for i, (p, s) in enumerate(swept):
        np.testing.assert_allclose(found.projection[i, 0], p, atol=1e-3)
        np.testing.assert_allclose(found.scales[i, 0], s, rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(fit.h[0], h, atol=1e-3 * np.abs(h).max())
    np.testing.assert_allclose(np.concatenate([*fit.q.values()], 1)[0], q, rtol=1e-2, atol=1e-2)


def test_weights_of_views_that_a_client_lacks_or_that_are_left_out(drawn):
    """The former do not enter its objective; the latter stay zero."""
    algorithm, fed, server, clients = drawn
    key, phase, fit = jax.random.key(0), algorithm.round[0], server.models.fit
    state, client = jax.tree.map(lambda x: x[0], (clients[1], fed.cohorts[1]))
    own = state.basis._replace(projection=jnp.eye(C, R)[None], scales=jnp.ones((1, R)))

    @jax.jit
    def objective(weights):
        sent = (fit.h, fit.q), weights[None]
        return phase.client(key, sent, dataclasses.replace(state, basis=own), client)[1][2]

    one, same, other = map(
        objective, np.float32([[0.5, 0.2, 0.3], [0.5, 0.4, 0.3], [0.5, 0.2, 0.1]])
    )
    assert one == same and one > 1.1 * other

    without_one = np.float32([[0.5, 0.0, 0.5]])
    server = server._replace(models=server.models._replace(view_weights=without_one))
    costs = {v: jnp.full(1, 1.0 + v) for v in range(S)}
    message, weights = (costs, jnp.ones(1), jnp.ones(1)), jnp.ones(1)
    after, _ = jax.jit(phase.server)(key, server, (message,), (weights,))
    found = after.models.view_weights[0]
    # (31): of alpha = 2 the weights are as 1 / C.
    np.testing.assert_allclose(found, [0.75, 0.0, 0.25], rtol=1e-5)


def test_views_of_no_relevance_move_no_common_factor():
    """Nor do those with few rows: the weight of a slice is what its bound weighs most."""
    rng = np.random.default_rng(0)
    codec = views_codec(FedHKParafac2Config(C, rank=R, placement="views"))
    h, q, s = (rng.normal(size=x).astype(np.float32) for x in ((R, R), (C, R), (S, R)))
    targets = {v: rng.normal(size=(C, R)).astype(np.float32) for v in range(S)}
    widths = dict(enumerate(WIDTHS))

    @jax.jit
    def update(last, relevance, count):
        weights = dict.fromkeys(range(S), jnp.ones(C)) | {2: jnp.full(C, count)}
        numerators = {v: x * weights[v][:, None] for v, x in (targets | {2: last}).items()}
        h_new, q_new, s_new = codec.update((h, q, s), numerators, weights, relevance, {}, widths)
        return h_new, q_new, s_new[:2]

    def moved(relevance, count):
        relevance = np.float32([1.0, 1.0, relevance])
        found = [update(x, relevance, np.float32(count)) for x in (targets[2], -3 * targets[2])]
        return max(np.abs(x - y).max() for x, y in zip(*found, strict=True))

    assert moved(1.0, 1.0) > 0.1
    assert moved(1e-7, 1.0) < 1e-3
    assert moved(1.0, 1e-7) < 1e-3


def test_directions_of_views_are_of_rows_as_often_as_they_count():
    codec = views_codec(FedHKParafac2Config(1, rank=1, placement="views"))
    rows = {0: jnp.array([[2.0, 0.0], [0.0, 1.0]]), 1: jnp.array([[0.0, 2.0], [1.0, 0.0]])}
    centres = {v: x[None, :1] for v, x in rows.items()}
    basis = jax.jit(lambda counts: codec.start(rows, counts, centres)[0])(jnp.array([1.0, 9.0]))
    for v in rows:  # the square of the second row counts nine times 1, that of the first 4
        np.testing.assert_allclose(np.abs(basis[v][:, 0]), rows[v][1], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 4))]
)
def test_a_round_is_a_weighted_sweep_over_the_clients_centres(run):
    before, after = (jax.tree.map(lambda x: x[run], state) for state in one_round())
    pick = lambda tree: f64(jax.tree.map(lambda x: x[0], tree))  # noqa: E731 (the first start)
    fit, new = pick(before.server.models.fit), pick(after.server.models.fit)
    h, q = fit.h, np.concatenate(list(fit.q.values()))
    v = pick(after.server.models.view_weights)
    alpha = float(ALPHAS[run])
    relevance = np.ones(S) if np.isinf(alpha) else (v / v.max()) ** alpha
    delta = np.concatenate(
        [
            np.full(d, 1 / float(scale.variance))
            for d, scale in zip(WIDTHS, before.server.scales.values(), strict=True)
        ]
    )
    root = np.sqrt(delta / delta.max())
    slices = []
    for old_states, states in zip(before.clients, after.clients, strict=True):
        for i in range(len(old_states.took_part)):
            old, own = (pick(jax.tree.map(lambda x: x[i], s.basis)) for s in (old_states, states))  # noqa: B023
            fitted = old.projection @ h @ np.diag(old.scales) @ q.T
            w = np.concatenate(
                [relevance[k] * np.outer(own.weights[k], np.ones(d)) for k, d in enumerate(WIDTHS)],
                1,
            )
            plenty = np.concatenate(
                [own.numerators[k] / np.maximum(own.weights[k], 1e-30)[:, None] for k in range(S)],
                1,
            )
            mean = np.where(w > 0, plenty, fitted)
            slices.append((old, own, fitted, mean, w))
    assert len(slices) == 4 and (slices[3][4][:, 5:9] == 0).all()  # the one without view 1

    # Bounds of J before and after, and the sweep: P and s of each slice, H, then Q.
    new_q = np.concatenate(list(new.q.values()))
    bound = np.zeros(2)
    for _, own, fitted, mean, w in slices:
        fits = fitted, own.projection @ new.h @ np.diag(own.scales) @ new_q.T
        bound += [np.sum(w * root**2 * (x - mean) ** 2) for x in fits]
    swept, h, q = sweep_in_numpy(
        [(old.scales, fitted, mean, w) for old, _, fitted, mean, w in slices], h, q, root
    )
    for (_, own, *_), (p, s) in zip(slices, swept, strict=True):
        np.testing.assert_allclose(own.projection, p, atol=2e-3)
        np.testing.assert_allclose(own.scales, s, rtol=5e-3, atol=2e-3)
    np.testing.assert_allclose(new.h, h, atol=5e-3)
    np.testing.assert_allclose(new_q, q, atol=5e-3)
    assert bound[1] < bound[0]


@pytest.mark.slow
def test_a_clients_order_of_clusters_makes_no_difference_to_the_others():
    state, _ = one_round()
    order = np.array([2, 0, 1])
    own = state.clients[0].basis
    turned = own._replace(projection=own.projection.at[:, 1].set(own.projection[:, 1][:, :, order]))
    clients = (dataclasses.replace(state.clients[0], basis=turned), state.clients[1])
    straight, values, labels = rounds("clients", R, CONFIG)(state, 5)
    other, other_values, other_labels = rounds("clients", R, CONFIG)(
        state._replace(clients=clients), 5
    )
    # The spread that completes P of lacking rank is small, but has an order.
    for x, y in zip(
        *(jax.tree.leaves(s.server.models.fit) for s in (straight, other)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(values, other_values, atol=1e-4)
    np.testing.assert_array_equal(labels[:, [0, 2, 3]], other_labels[:, [0, 2, 3]])
    np.testing.assert_array_equal(labels[:, 1], order[other_labels[:, 1]])


@pytest.mark.slow
def test_terms_of_clients_add_up():
    state = jax.tree.map(lambda x: x[0], one_round()[0])
    fed, key = jax.tree.map(lambda x: x[0], feds(partial=True)), jax.random.key(0)
    _, second, third = method("clients", R, CONFIG)[0].round

    @jax.jit
    def messages(states, clients, server):
        """Of all clients, of both exchanges, and what the server makes of them in one or more."""

        def one(state, client):
            state, terms, _ = second.client(key, second.broadcast(server, (0, 1, 2)), state, client)
            h = server.models.fit.h
            return terms, third.client(key, h, state, client)[1]

        terms, q_terms = jax.vmap(one)(states, clients)
        each = [jax.tree.map(lambda x: x[i], (terms, q_terms)) for i in range(3)]  # noqa: B023
        pair = jax.tree.map(jnp.add, each[0], each[1])

        def served(parts):
            weights = (jnp.float32(1.0),) * len(parts)
            after, _ = second.server(key, server, tuple(p[0] for p in parts), weights)
            return third.server(key, after, tuple(p[1] for p in parts), weights)[0].models.fit

        return served(each), served([pair, each[2]]), server.models.fit

    apart, together, before = messages(state.clients[0], fed.cohorts[0], state.server)
    assert np.abs(apart.h - before.h).max() > 1e-3
    for x, y in zip(jax.tree.leaves(apart), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_centres_of_views_lie_in_the_span_that_is_sent_once():
    state, *_ = runs("views", R, CONFIG)
    _, codec = method("views", R, CONFIG)
    fit, basis = jax.tree.map(lambda x: x[0, 0], state.server.models.fit), state.server.basis
    basis = {v: x[0] for v, x in basis.items()}
    found = codec.centres(fit, basis, dict(enumerate(WIDTHS)))
    for v, p in basis.items():
        np.testing.assert_allclose(p.T @ p, np.eye(R), atol=1e-5)
        np.testing.assert_allclose(found[v] @ p @ p.T, found[v], atol=1e-5)
        assert np.linalg.norm(found[v]) > 0.1
        h, q, s = fit
        np.testing.assert_allclose(found[v], (p @ h @ np.diag(s[v]) @ q.T).T, atol=1e-5)


@pytest.mark.slow
def test_compressed_sums_are_the_sums_in_the_basis():
    algorithm, codec = method("views", R, CONFIG)
    hyper = FedHKHyperparams()
    state = jax.tree.map(lambda x: x[0], runs("views", R, CONFIG)[0])
    fed = jax.tree.map(lambda x: x[0], feds(partial=True))

    @jax.jit
    def both(server, state, client):
        """Of the client without view 1: what it sends, and what it would without a codec."""
        phase = algorithm.round[0]
        sent = phase.broadcast(server, client.view_ids)
        message = phase.client(jax.random.key(0), sent, state, client)[1]
        fit = jax.tree.map(lambda x: x[0], sent[0])
        centres = codec.centres(fit, state.basis, {0: WIDTHS[0], 2: WIDTHS[2]})
        samples = samples_of(CONFIG, hyper, state.scales, client)
        return message, local_sums(CONFIG, hyper, samples, centres, sent[1][0])

    one = jax.tree.map(lambda x: x[0], (state.clients[1], fed.cohorts[1]))
    message, plain = both(state.server, *one)
    assert list(message.numerators) == [0, 2]
    for v in (0, 2):
        compressed = plain.numerators[v] @ state.server.basis[v]
        np.testing.assert_allclose(message.numerators[v][0], compressed, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(message.weights[v][0], plain.weights[v], rtol=1e-5)
        np.testing.assert_allclose(message.costs[v][0], plain.costs[v], rtol=1e-5)


def exchanged(n_clusters, placement):
    """Shapes of the leaves that a client is sent and sends, for every exchange of a round."""
    algorithm, _ = method(placement, R, FedHKParafac2Config(n_clusters, n_restarts=RESTARTS))
    fed, key, seen = federation(0, partial=False), jax.random.key(0), []

    def watched(phase):
        def client(key, sent, state, client):
            new = phase.client(key, sent, state, client)
            seen.append([[x.shape for x in jax.tree.leaves(part)] for part in (sent, new[1])])
            return new

        return phase._replace(client=client)

    watched_round = algorithm._replace(round=tuple(map(watched, algorithm.round)))
    jax.eval_shape(
        lambda: engine.one_round(watched_round, fed, key, engine.start(algorithm, fed, key), 0)
    )
    return seen


@pytest.mark.parametrize("n_clusters", [3, 4])
def test_what_is_a_clients_own_never_travels(n_clusters):
    k, square = RESTARTS, (RESTARTS, R, R)
    assert exchanged(n_clusters, "clients") == [
        [[square, *((k, d, R) for d in WIDTHS), (k, S)], [(k,)] * (S + 2)],
        [[(k, S), (S,)], [square, square]],
        [[square], [(k, D, R)]],
    ]


def test_messages_of_views():
    k, c = RESTARTS, C
    sent = [(k, R, R), (k, c, R), (k, S, R), (k, S)]
    assert exchanged(c, "views") == [[sent, [(k, c, R)] * S + [(k, c)] * S + [(k,)] * (S + 2)]]


@functools.cache
def traffic(placement, partial=False):
    return engine.traffic(method(placement, R, CONFIG)[0], federation(0, partial))


def test_bytes_of_a_round():
    def floats(placement):
        used = traffic(placement)["round"]
        return used.up / (3 * 4), used.down / (3 * 4)

    up, down = floats("clients")
    assert up == RESTARTS * (D * R + 2 * R**2 + S + 2)
    # View weights go out twice, and once what distances in the views are relative to.
    assert down == RESTARTS * (D * R + 2 * R**2 + 2 * S) + S
    up, down = floats("views")
    assert up == RESTARTS * (C * R * S + C * S + S + 2)
    assert down == RESTARTS * (R**2 + C * R + S * R + S)


@pytest.mark.slow
def test_bytes_of_the_setup_and_of_a_client_without_a_view():
    none, clients, views = (traffic(p)["setup"] for p in ("none", "clients", "views"))
    assert clients.up == views.up == none.up
    assert clients.down - none.down == 3 * 4 * RESTARTS * (C * R + R)  # P and s to begin with
    assert views.down - none.down == 3 * 4 * D * R
    more = traffic("clients", True)["round"].up - traffic("clients")["round"].up
    assert more == 4 * RESTARTS * (D * R + 2 * R**2 + 2 + 2)
    more = traffic("views", True)["round"].up - traffic("views")["round"].up
    assert more == 4 * RESTARTS * (2 * (C * R + C + 1) + 2)


def test_refuses_what_makes_no_sense():
    with pytest.raises(ValueError, match=r"aggregation: got 'average'; .* PARAFAC2 is fitted to s"):
        FedHKParafac2Config(C, aggregation="average")
    with pytest.raises(ValueError, match="placement: got 'rows'; allowed is 'clients' or 'views'"):
        FedHKParafac2Config(C, placement="rows")
    for coefficients in ("minmax", "absmean"):
        with pytest.raises(ValueError, match=f"hkc: got '{coefficients}'; .* with compressed sums"):
            FedHKParafac2Config(C, hkc=coefficients, placement="views")


@pytest.mark.parametrize(
    ("placement", "clusters", "rank", "largest"),
    [
        ("clients", 3, 4, 3),
        ("clients", 13, 13, 12),
        ("views", 4, 4, 3),
        ("views", 2, 3, 2),
    ],
)
def test_refuses_ranks_that_the_slices_cannot_have(placement, clusters, rank, largest):
    algorithm = fedhk_parafac2(FedHKParafac2Config(clusters, rank=rank, placement=placement))
    with pytest.raises(ValueError, match=f"rank: got {rank}; allowed is 1 to {largest}, the num"):
        algorithm.init(jax.random.key(0), federation(0))


@pytest.mark.parametrize("rank", [0, 1.5])
def test_refuses_what_is_no_rank(rank):
    with pytest.raises(ValueError, match=f"rank: got {rank}; allowed is .*1 or more"):
        FedHKParafac2Config(3, rank=rank)


def test_default_ranks_are_the_largest():
    fed = federation(0)
    for clusters, of_clients, of_views in ((3, 3, 3), (4, 4, 3), (13, 12, 3)):
        shapes = []
        for placement in ("clients", "views"):
            algorithm = fedhk_parafac2(
                FedHKParafac2Config(clusters, placement=placement, n_restarts=1)
            )
            shapes.append(jax.eval_shape(algorithm.init, jax.random.key(0), fed)[0])
        assert shapes[0].models.fit.h.shape == (1, of_clients, of_clients)
        assert shapes[1].models.fit[0].shape == (1, of_views, of_views)


@pytest.mark.slow
def test_clients_begin_with_the_same_centres_and_end_with_their_own():
    algorithm, _ = method("clients", R, CONFIG)

    def start(fed):
        key = jax.random.key(0)
        return engine.setup(algorithm, fed, key, engine.start(algorithm, fed, key))[0]

    first = jax.jit(jax.vmap(start))(feds(partial=True))
    for cohort in first.clients:
        for name in ("projection", "scales"):
            mine = np.asarray(getattr(cohort.basis, name))
            server = np.asarray(getattr(first.server.basis, name))[:, None]
            np.testing.assert_array_equal(mine, np.broadcast_to(server, mine.shape))
    last, values, labels = rounds("clients", R, CONFIG)(first, ROUNDS)
    assert np.diff(values, axis=1).max() < ROUNDING
    assert (values[:, -1] < values[:, 0] - 0.01).all()
    assert set(np.unique(labels)) == set(range(C))
    own = np.asarray(last.clients[0].basis.projection)
    assert np.abs(own[:, 0] - own[:, 1]).max(axis=(1, 2, 3)).min() > 0.01
