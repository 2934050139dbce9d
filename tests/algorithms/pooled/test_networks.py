"""What the deep methods share, against a few lines of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import logsumexp

from jaxfedmvc import nn
from jaxfedmvc.algorithms.pooled.networks import (
    apply,
    column_contrast,
    encode,
    fit_autoencoders,
    init_networks,
    neighbours_by_view,
    reconstruction_loss,
    sum_over_pairs,
    unevenness,
)

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
VIEWS = tuple(RNG.normal(size=(7, d)).astype(np.float32) for d in (4, 3))
SEEN = np.array([[1, 1], [1, 0], [0, 1], [1, 1], [1, 1], [1, 1], [0, 0]], bool)
NETWORKS = init_networks(KEY, VIEWS, (6, 5), 2, {"head": (2, (3,))})
ENCODERS, DECODERS = nn.apart(NETWORKS.encoders), nn.apart(NETWORKS.decoders)


def np_mlp(params, x):
    layers = params["params"]
    for i in range(len(layers)):
        x = x @ np.asarray(layers[f"Dense_{i}"]["kernel"]) + np.asarray(
            layers[f"Dense_{i}"]["bias"]
        )
        if i + 1 < len(layers):
            x = np.maximum(x, 0)
    return x


def test_layers_mirror_each_other_and_heads_take_all_views_at_once():
    widths = [
        [layer["kernel"].shape for layer in net["params"].values()]
        for net in (ENCODERS[1], DECODERS[1])
    ]
    assert widths == [[(3, 6), (6, 5), (5, 2)], [(2, 5), (5, 6), (6, 3)]]
    head = NETWORKS.heads["head"]
    z, h = jax.jit(lambda views: (z := encode(NETWORKS, views), apply(head, z)))(VIEWS)
    expected = [np_mlp(p, x) for p, x in zip(ENCODERS.values(), VIEWS, strict=True)]
    np.testing.assert_allclose(z, expected, atol=1e-6)
    np.testing.assert_allclose(h, np_mlp(head, np.stack(expected)), atol=1e-6)


def test_reconstruction_is_the_mean_square_of_what_is_observed():
    z = RNG.normal(size=(2, 7, 2)).astype(np.float32)
    expected = 0.0
    for v, x in enumerate(VIEWS):
        found = np_mlp(DECODERS[v], z[v])
        expected += np.mean((found - x)[SEEN[:, v]] ** 2)
    found = jax.jit(reconstruction_loss)(NETWORKS, VIEWS, z, SEEN)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_autoencoders_learn_from_the_rows_of_the_mask_alone():
    mask = jnp.array(SEEN.all(axis=1))

    @jax.jit
    def run(views):
        state = optax.adam(0.01).init(NETWORKS)
        settings = {"epochs": 200, "batch_size": 3, "learning_rate": 0.01}
        return fit_autoencoders(KEY, NETWORKS, state, views, mask, **settings)

    networks, _, losses = run(VIEWS)
    assert losses[-1] < 0.4 * losses[0]
    other = tuple(np.where(np.asarray(mask)[:, None], x, 9.0).astype(np.float32) for x in VIEWS)
    jax.tree.map(np.testing.assert_array_equal, run(other)[0], networks)
    jax.tree.map(np.testing.assert_array_equal, networks.heads, NETWORKS.heads)


def test_pairs_are_all_v_below_w():
    a = np.array([[1.0], [10.0], [100.0]], np.float32)

    @jax.jit
    def total(tree):
        return sum_over_pairs(lambda x, y: jnp.sum(x[0] + 2 * y[0]) + x[1] * y[1], tree)

    found = total((a, a[:, 0]))
    assert found == sum(
        a[v, 0] + 2 * a[w, 0] + a[v, 0] * a[w, 0] for v, w in [(0, 1), (0, 2), (1, 2)]
    )
    assert total((a[:1], a[:1, 0])) == 0


def test_column_contrast_is_ntxent_of_cosines_of_columns():
    q, other = RNG.uniform(size=(2, 7, 3)).astype(np.float32)
    mask = np.arange(7) < 5
    both = np.concatenate([q[mask].T, other[mask].T])
    both /= np.linalg.norm(both, axis=1, keepdims=True)
    logits = both @ both.T / 0.7
    others = np.where(np.eye(6, dtype=bool), -np.inf, logits)
    positive = np.concatenate([np.diag(logits, 3), np.diag(logits, -3)])
    expected = np.mean(logsumexp(others, axis=1) - positive)
    found = jax.jit(column_contrast)(q, other, mask, 0.7)
    assert found == pytest.approx(expected, rel=1e-5)


def test_unevenness_is_zero_for_even_clusters_and_log_c_for_one():
    even = np.tile(np.eye(3, dtype=np.float32), (2, 1))
    both = jax.jit(jax.value_and_grad(unevenness))
    assert both(even, np.arange(6) < 3)[0] == pytest.approx(0, abs=1e-6)
    value, gradient = jax.tree.map(np.asarray, both(even, np.arange(6) < 1))  # two are empty
    assert value == pytest.approx(np.log(3), rel=1e-6)
    assert np.isfinite(gradient).all() and not gradient[1:].any()
    value, gradient = both(even, np.zeros(6, bool))
    assert value == 0 and not np.asarray(gradient).any()


def test_neighbours_are_the_nearest_in_w_of_those_with_both_views():
    z = RNG.normal(size=(3, 9, 2)).astype(np.float32)
    observed = RNG.uniform(size=(9, 3)) < 0.6
    values, rows = jax.jit(neighbours_by_view, static_argnums=2)(z, observed, 2)
    assert rows.shape == (9, 3, 3, 2)
    for i, v, w in np.ndindex(9, 3, 3):
        products = z[w] @ z[w, i]
        allowed = np.flatnonzero(observed[:, v] & observed[:, w] & observed[i, w])
        expected = allowed[np.argsort(-products[allowed])][:2]
        n = len(expected)
        np.testing.assert_array_equal(rows[i, v, w, :n], expected)
        np.testing.assert_allclose(values[i, v, w, :n], products[expected], rtol=1e-5, atol=1e-6)
        assert np.isneginf(values[i, v, w, n:]).all()


def test_views_of_equal_width_can_be_one_stack():
    views = [VIEWS[0], VIEWS[1], VIEWS[0]]
    apart, stacked = (init_networks(KEY, views, (6, 5), 2, stack=stack) for stack in (False, True))
    assert stacked.encoders.names == stacked.decoders.names == ((0, 2), (1,))
    seen = np.stack([*SEEN.T, SEEN[:, 0]], axis=1)

    @jax.jit
    def computed(networks):
        z = encode(networks, views)
        return z, reconstruction_loss(networks, views, z, seen)

    for found, expected in zip(computed(stacked), computed(apart), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
