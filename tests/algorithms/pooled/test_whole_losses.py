"""What the deep methods minimise, phase by phase, against NumPy in float64.

Steps of Adam are next to nothing, so that a run's losses are those of its first parameters.
"""

from itertools import permutations

import jax
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from scipy.special import log_softmax, logsumexp, softmax
from sklearn.cluster import KMeans

from jaxfedmvc import nn
from jaxfedmvc.algorithms.pooled import cpspan, dsimvc, gcfagg, mflvc, proimp, simvc
from jaxfedmvc.algorithms.pooled.networks import init_networks
from tests.algorithms.fmcsc.tiny import jit  # compiles fast, runs slowly
from tests.algorithms.pooled.planted import COMPLETE, KEY, OBSERVED, VIEWS, K, N, padded

STILL = 1e-12
WIDTHS = {"hidden": (6,), "latent_dim": 5, "stack_views": False}
BOTH = OBSERVED.all(axis=1)


def run(module, observed, config, hyper):
    """Fits rows with NaN where there is no view, and four rows of padding."""
    dirty = tuple(
        padded(np.where(observed[:, [v]], x, np.float32(np.nan))) for v, x in enumerate(VIEWS)
    )
    found = jit(lambda x, o: module.fit(KEY, x, o, config, hyper))(dirty, padded(observed))
    return jax.tree.map(np.asarray, found)


def jostled(params):
    """Adds noise to all numbers, so that no bias is 0 and no factor 1."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.float32(np.asarray(x) + rng.normal(size=x.shape) / 3), params)


def given(monkeypatch, module, heads=None):
    """Has a method start at networks that are known here, others at each call; returns these."""
    drawn = [
        jit(lambda key: init_networks(key, VIEWS, (6,), 5, heads))(jax.random.key(i))
        for i in range(2)
    ]
    made = [jostled(networks) for networks in drawn]
    calls = iter(made)
    monkeypatch.setattr(module, "init_networks", lambda *arguments, **options: next(calls))
    return made


def unit(x, axis=-1):
    return x / np.linalg.norm(x, axis=axis, keepdims=True)


def mlp(params, x):
    layers = [params["params"][name] for name in sorted(params["params"])]
    for i, layer in enumerate(layers):
        x = x @ np.asarray(layer["kernel"], float) + np.asarray(layer["bias"], float)
        x = np.maximum(x, 0) if i + 1 < len(layers) else x
    return x


def codes(networks, views=VIEWS):
    return [mlp(p, x) for p, x in zip(nn.apart(networks.encoders).values(), views, strict=True)]


def reconstruction(networks, views, observed):
    decoders, total = nn.apart(networks.decoders), 0.0
    for v, (x, z) in enumerate(zip(views, codes(networks, views), strict=True)):
        total += np.mean((x - mlp(decoders[v], z))[observed[:, v]] ** 2)
    return total


def nt_xent(a, b, tau, attention=None):
    """Mean over all 2n anchors; all others are in the denominator, the positive unscaled."""
    rows, n, total = np.concatenate([a, b]), len(a), 0.0
    for i in range(2 * n):
        logits = rows @ rows[i] / tau
        positive = logits[(i + n) % (2 * n)]
        if attention is not None:
            logits = logits * (1 - np.tile(attention[i % n], 2))
            logits[(i + n) % (2 * n)] = positive
        total += logsumexp(np.delete(logits, i)) - positive
    return total / (2 * n)


def layer_norm(x, norm):
    x = x - x.mean(axis=1, keepdims=True)
    return x / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]


def batch_norm(x, norm, where):
    x = x - x[where].mean(axis=0)
    return x / np.sqrt(x[where].var(axis=0) + 1e-5) * norm["scale"] + norm["bias"]


def unevenness(q):
    p = q.mean(axis=0)
    return np.log(len(p)) + np.sum(p * np.log(p))


def min_max(x):
    return (x - x.min(axis=0)) / (x.max(axis=0) - x.min(axis=0))


@pytest.mark.slow
def test_mflvc(monkeypatch):
    heads = {"feature": (5, (4,)), "label": (5, (K,))}
    networks, _ = given(monkeypatch, mflvc, heads)
    config = mflvc.MFLVCConfig(
        K,
        feature_dim=4,
        pretrain_epochs=1,
        contrast_epochs=1,
        tune_epochs=1,
        batch_size=99,
        n_init=10,
        **WIDTHS,
    )
    found = run(mflvc, COMPLETE, config, mflvc.MFLVCHyperparams(STILL))
    z = codes(networks)
    h = [unit(mlp(networks.heads["feature"], x)) for x in z]
    logits = [mlp(networks.heads["label"], x) for x in z]
    q = [softmax(x, axis=1) for x in logits]
    first = reconstruction(networks, VIEWS, COMPLETE)
    columns = nt_xent(unit(q[0], 0).T, unit(q[1], 0).T, 1.0)
    then = first + nt_xent(h[0], h[1], 0.5) + columns + unevenness(q[0]) + unevenness(q[1])
    last = 0.0
    for features, assigned in zip(h, q, strict=True):
        clusters = KMeans(K, n_init=20, random_state=0).fit_predict(min_max(features))
        shared = np.zeros((K, K))
        np.add.at(shared, (clusters, assigned.argmax(axis=1)), 1)
        totals = [sum(shared[k, p[k]] for k in range(K)) for p in permutations(range(K))]
        assert totals.count(max(totals)) == 1  # or names would be a matter of the solver
        named = linear_sum_assignment(-shared)[1][clusters]
        last -= log_softmax(assigned, axis=1)[np.arange(N), named].mean()
    np.testing.assert_allclose(found.trace, [first, then, last], rtol=1e-4)
    np.testing.assert_allclose(found.embedding[:N], (q[0] + q[1]) / 2, atol=1e-5)
    np.testing.assert_array_equal(found.labels[:N], (q[0] + q[1]).argmax(axis=1))


@pytest.mark.slow
def test_gcfagg(monkeypatch):
    config = gcfagg.GCFAggConfig(
        K,
        feature_dim=4,
        attention_hidden=3,
        pretrain_epochs=1,
        contrast_epochs=1,
        batch_size=99,
        n_init=1,
        **WIDTHS,
    )
    networks = jostled(jit(lambda key: gcfagg.init(key, VIEWS, config))(KEY))
    monkeypatch.setattr(gcfagg, "init", lambda *arguments: networks)
    found = run(gcfagg, COMPLETE, config, gcfagg.GCFAggHyperparams(STILL, dropout=0.0))
    heads, z = networks.heads, codes(networks)

    rows = np.concatenate(z, axis=1)
    queries, keys, values = np.split(mlp(heads["queries_keys_values"], rows), 3, axis=1)
    attention = softmax(queries @ keys.T / np.sqrt(rows.shape[1]), axis=1)
    rows = layer_norm(rows + mlp(heads["attended"], attention @ values), heads["norm_attention"])
    inner = np.maximum(mlp(heads["forward_in"], rows), 0)
    rows = layer_norm(rows + mlp(heads["forward_out"], inner), heads["norm_forward"])
    common = unit(mlp(heads["common"], rows))
    h = [unit(mlp(heads["view"], x)) for x in z]
    first = reconstruction(networks, VIEWS, COMPLETE)
    then = first + sum(nt_xent(x, common, 0.5, attention) for x in h)
    np.testing.assert_allclose(found.trace, [first, then], rtol=1e-4)
    np.testing.assert_allclose(found.embedding[:N], common, atol=1e-4)


def scaled(observed=OBSERVED):
    """Minimum and maximum of what is observed; zero elsewhere."""
    views = []
    for v, x in enumerate(VIEWS):
        there, y = observed[:, v], np.zeros(x.shape)
        y[there] = min_max(x[there].astype(float))
        views.append(y)
    return views


@pytest.mark.slow
def test_cpspan(monkeypatch):
    networks, _ = given(monkeypatch, cpspan)
    config = cpspan.CPSPANConfig(
        K,
        pretrain_epochs=1,
        align_epochs=1,
        batch_size=99,
        prototypes="code",
        n_init=1,
        **WIDTHS,
    )
    hyper = cpspan.CPSPANHyperparams(STILL, STILL, instance_weight=0.5, prototype_weight=0.25)
    found = run(cpspan, OBSERVED, config, hyper)
    x = scaled()
    a, b = (z[BOTH] for z in codes(networks, x))
    first = reconstruction(networks, x, OBSERVED)  # both views have as many rows
    instances = np.mean((1 - np.sum(unit(a) * unit(b), axis=1)) ** 2)
    prototypes = np.mean((1 - unit(a, 0).T @ unit(b, 0)) ** 2)
    then = first + 0.5 * instances + 0.25 * prototypes
    np.testing.assert_allclose(found.trace, [first, then], rtol=1e-4)


def spectral_terms(z, other):
    """F of each row; lengths are cut at the root of 3."""
    z, other = (
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True) / 3**0.5, 1) for x in (z, other)
    )
    products = z @ other.T
    n, own = len(z), np.diag(products)
    return -2 * own + ((products**2).sum(axis=1) - own**2) / (n - 1)


def label_loss(q, other):
    total, (a, b) = 0.0, (unit(x, 0).T for x in (q, other))
    for one, two in ((a, b), (b, a)):
        for k in range(K):
            positive = one[k] @ two[k]
            negatives = [one[k] @ one[j] for j in range(K) if j != k]
            total += logsumexp([positive, *negatives]) - positive
    return total / (2 * K) + unevenness(q) + unevenness(other)


@pytest.mark.slow
def test_dsimvc(monkeypatch):
    heads = {"feature": (5, (5, 4)), "label": (5, (5, K))}
    model, finder = given(monkeypatch, dsimvc, heads)
    n_complete = int(BOTH.sum())
    assert n_complete == N - n_complete  # a batch of either kind holds all rows of the kind
    config = dsimvc.DSIMVCConfig(
        K,
        feature_dim=4,
        pretrain_epochs=1,
        neighbour_pretrain_epochs=1,
        neighbour_epochs=1,
        steps=1,
        batch_size=n_complete,
        **WIDTHS,
    )
    found = run(dsimvc, OBSERVED, config, dsimvc.DSIMVCHyperparams(STILL))
    x = scaled()

    def outputs(networks, views):
        z = codes(networks, views)
        q = [softmax(mlp(networks.heads["label"], y), axis=1) for y in z]
        return [mlp(networks.heads["feature"], y) for y in z], q

    h, q = outputs(finder, x)
    h = [unit(y) for y in h]
    complete = np.repeat(BOTH[:, None], 2, axis=1)
    losses = [reconstruction(networks, x, complete) for networks in (model, finder)]
    terms = spectral_terms(h[0][BOTH], h[1][BOTH])
    losses.append(terms.mean() + label_loss(q[0][BOTH], q[1][BOTH]))
    # A row that lacks a view takes the mean of the three nearest rows with both.
    filled = [y.copy() for y in x]
    for v in range(2):
        for i in np.flatnonzero(~OBSERVED[:, v]):
            products = np.where(BOTH, h[1 - v] @ h[1 - v][i], -np.inf)
            filled[v][i] = x[v][np.argsort(-products)[:3]].mean(axis=0)
    h, q = outputs(model, filled)
    step = spectral_terms(h[0][BOTH], h[1][BOTH]).mean() + label_loss(q[0][BOTH], q[1][BOTH])
    others = spectral_terms(h[0][~BOTH], h[1][~BOTH]).mean() / n_complete
    losses.append(step + others + label_loss(q[0][~BOTH], q[1][~BOTH]))
    np.testing.assert_allclose(found.trace, losses, rtol=1e-4)
    _, q = outputs(model, x)
    mean = sum(y * OBSERVED[:, [v]] for v, y in enumerate(q)) / OBSERVED.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.embedding[:N], mean, atol=1e-5)
    np.testing.assert_array_equal(found.labels[:N], mean.argmax(axis=1))


def normed_mlp(layers, x, where):
    """Batch norm by the rows of `where`, and ReLU, between layers."""
    for layer in layers[:-1]:
        x = np.maximum(batch_norm(linear(layer, x), layer["norm"], where), 0)
    return linear(layers[-1], x)


def linear(layer, x):
    return x @ np.asarray(layer["kernel"], float) + np.asarray(layer["bias"], float)


@pytest.mark.slow
def test_proimp(monkeypatch):
    config = proimp.ProImpConfig(
        K, hidden=(6, 6), latent_dim=5, epochs=2, pretrain_epochs=1, batch_size=99, n_init=1
    )
    widths = [x.shape[1] for x in VIEWS]
    params = jostled(jit(lambda key: proimp.start(key, widths, config))(KEY))
    monkeypatch.setattr(proimp, "start", lambda *arguments: params)
    found = run(proimp, OBSERVED, config, proimp.ProImpHyperparams(STILL, dropout=0.0))
    x = []
    for v, view in enumerate(VIEWS):
        view = np.where(OBSERVED[:, [v]], view, 0).astype(float)
        x.append(np.where(OBSERVED[:, [v]], (view - view.mean()) / view.std(ddof=1), 0))

    def read(observed):
        """What rows, attention, values and prototypes are, view by view."""
        result = []
        for v, view in enumerate(x):
            own = jax.tree.map(lambda y, v=v: y[v], params["attention"])
            p, there = unit(np.asarray(params["prototypes"][v], float)), observed[:, v]
            r = normed_mlp(params["encoders"][v], view, there)
            r = normed_mlp(params["rep"], unit(r), there)
            rows, named = layer_norm(r, own["row_norm"]), layer_norm(p, own["prototype_norm"])
            logits = linear(own["query"], rows) @ linear(own["key"], named).T
            a = softmax(logits / 5**0.5, axis=1)
            moved = a[there].T @ linear(own["row_value"], rows)[there]
            result.append((r, a, linear(own["value"], named), unit(moved) + p))
        return result

    def common(values, r):
        return linear(params["out"], unit(values) + unit(r))

    trained = read(np.repeat(BOTH[:, None], 2, axis=1))
    h = [unit(normed_mlp(params["project_rows"], common(a @ u, r), BOTH)) for r, a, u, _ in trained]
    first = nt_xent(h[0][BOTH], h[1][BOTH], 0.5)
    for _, a, _, _ in trained:
        entropy = -np.sum(a[BOTH] * np.log(a[BOTH]), axis=1).mean()
        first += unevenness(a[BOTH]) / 2 + 0.01 * entropy

    everything = read(OBSERVED)
    shared = np.zeros((K, K))
    np.add.at(shared, tuple(a[BOTH].argmax(axis=1) for _, a, _, _ in everything), 1)
    of_first, of_second = linear_sum_assignment(-shared)
    partner = of_first[np.argsort(of_second)]  # of the second view's prototypes
    both = np.concatenate([trained[1][3], trained[0][3][partner]])
    rows = unit(normed_mlp(params["project_prototypes"], both, np.ones(2 * K, bool)))
    contrast = 0.0
    for i in range(2 * K):
        logits = rows @ rows[i] / 2
        other = (i + K) % (2 * K)
        logits[other] = 0.375 - abs(logits[other] - 0.375)
        contrast += (logsumexp(np.delete(logits, i)) - logits[other]) / (2 * K)
    np.testing.assert_allclose(found.trace, [first, first + contrast], rtol=1e-4)

    # A missing view reads its own prototypes by the other view's attention.
    (r0, a0, u0, _), (r1, a1, u1, _) = everything
    z0 = np.where(OBSERVED[:, [0]], common(a0 @ u0, r0), common(a1 @ u0[partner], r1))
    z1 = np.where(OBSERVED[:, [1]], common(a1 @ u1, r1), common(a0[:, partner] @ u1, r0))
    expected = np.concatenate([unit(z0), unit(z1)], axis=1)
    np.testing.assert_allclose(found.embedding[:N], expected, atol=1e-3)


@pytest.mark.slow
def test_simvc(monkeypatch):
    config = simvc.SiMVCConfig(
        K,
        hidden=(6, 7),
        latent_dim=5,
        head_hidden=4,
        epochs=1,
        check_every=1,
        batch_size=99,
        n_runs=1,
    )
    widths = [x.shape[1] for x in VIEWS]
    params = jostled(jit(lambda key: simvc.start(key, widths, config))(KEY))
    monkeypatch.setattr(simvc, "start", lambda *arguments: params)
    found = run(simvc, COMPLETE, config, simvc.SiMVCHyperparams(STILL))
    share = softmax(params["fusion"])
    fused = sum(share[v] * np.maximum(mlp(params[f"view_{v}"], x), 0) for v, x in enumerate(VIEWS))
    hidden = np.maximum(mlp(params["hidden"], fused), 0)
    hidden = batch_norm(hidden, params["norm"], np.ones(N, bool))
    a = softmax(mlp(params["clusters"], hidden), axis=1)
    squares = np.sum((hidden[:, None] - hidden[None]) ** 2, axis=2)
    median = np.sort(squares.ravel())[(N * N - 1) // 2]
    n = a.T @ np.exp(-squares / (2 * 0.15 * median)) @ a
    pairs = [n[k, m] / np.sqrt(n[k, k] * n[m, m]) for k in range(K) for m in range(k)]
    np.testing.assert_allclose(found.trace, [np.mean(pairs)], rtol=1e-4)
    np.testing.assert_allclose(found.embedding[:N], hidden, atol=1e-4)
    np.testing.assert_array_equal(found.labels[:N], a.argmax(axis=1))
