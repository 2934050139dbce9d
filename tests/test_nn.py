"""The network against NumPy, and the training loop against Adam written out."""

import functools
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfedmvc import nn

N, D = 7, 3
RATE = 0.05


def numpy_adam(start, gradients_of, steps, rate=RATE):
    """Adam (Kingma & Ba, 2015, algorithm 1); `gradients_of(params, step)`."""
    params, m, v = start.astype(float), np.zeros(start.shape), np.zeros(start.shape)
    for t in range(1, steps + 1):
        g = gradients_of(params, t - 1)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        params = params - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return params


def regression_loss(w, rows, mask):
    """Mean over real rows of the squared residual."""
    squares = (rows["x"] @ w - rows["y"]) ** 2
    return jnp.sum(jnp.where(mask, squares, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def regression_gradient(w, x, y):
    return 2 * x.T @ (x @ w - y) / len(x)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, D)).astype(np.float32)
    return x, (x @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=N)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("epochs", "batch_size"))
def fit(key, w, x, y, mask, rate, epochs, batch_size):
    return nn.fit(
        key,
        w,
        regression_loss,
        {"x": x, "y": y},
        mask,
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=rate,
    )


def padded(x, y, extra):
    """Rows of garbage behind the real ones."""
    garbage = 100.0 * np.ones((extra, x.shape[1]), np.float32)
    mask = np.arange(len(x) + extra) < len(x)
    return np.concatenate([x, garbage]), np.concatenate([y, -garbage[:, 0]]), mask


def test_one_batch_is_adam_on_all_rows(data):
    x, y = data
    w = np.array([0.3, 0.0, -0.1], np.float32)
    trained, values = fit(jax.random.key(0), w, x, y, np.ones(N, bool), RATE, 5, N)
    expected = numpy_adam(w, lambda w, _: regression_gradient(w, x, y), 5)
    np.testing.assert_allclose(trained, expected, rtol=1e-4)
    # The loss of an epoch is that before its step.
    before = [numpy_adam(w, lambda w, _: regression_gradient(w, x, y), t) for t in range(5)]
    np.testing.assert_allclose(values, [np.mean((x @ p - y) ** 2) for p in before], rtol=1e-5)


def flat(batches):
    return list(chain.from_iterable(batches))


def visited(key, n_real, n_rows, batch_size, epochs, **options):
    """The rows that each batch of each epoch was given, [epochs][batches][rows]."""
    seen = []

    def loss(w, rows, mask):
        jax.debug.callback(lambda r, m: seen.append(r[m].tolist()), rows, mask, ordered=True)
        return jnp.sum(jnp.where(mask, rows * w, 0.0))

    @jax.jit
    def train(key):
        rows = jnp.arange(n_rows)
        settings = {"epochs": epochs, "batch_size": batch_size, "learning_rate": RATE, **options}
        return nn.fit(key, jnp.zeros(()), loss, rows, rows < n_real, **settings)

    jax.block_until_ready(train(key))
    jax.effects_barrier()
    n_batches = len(seen) // epochs
    return [seen[e * n_batches : (e + 1) * n_batches] for e in range(epochs)]


@pytest.mark.parametrize(("n_real", "n_rows"), [(7, 7), (6, 10), (1, 5)])
def test_every_real_row_is_visited_once_an_epoch(n_real, n_rows):
    epochs = visited(jax.random.key(3), n_real, n_rows, 3, 4)
    for batches in epochs:
        assert sorted(flat(batches)) == list(range(n_real))
        full, rest = divmod(n_real, 3)
        sizes = [3] * full + [rest] * (rest > 0)
        assert [len(b) for b in batches if b] == sizes


def test_batches_are_shuffled_anew_every_epoch_by_the_key_alone():
    orders = [flat(b) for b in visited(jax.random.key(3), 7, 7, 3, 4)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders == [flat(b) for b in visited(jax.random.key(3), 7, 11, 3, 4)]
    assert orders != [flat(b) for b in visited(jax.random.key(4), 7, 7, 3, 4)]


@pytest.mark.parametrize(("n_real", "n_rows", "passes"), [(3, 3, 4), (4, 10, 2), (10, 10, 1)])
def test_few_rows_are_gone_through_until_there_are_enough_steps(n_real, n_rows, passes):
    """Batches of three, four steps: as many passes as the real rows need, each in an own order."""
    key = jax.random.key(3)
    epochs = visited(key, n_real, n_rows, 3, 5, least_steps=4)
    for batches in epochs:
        steps = [b for b in batches if b]
        assert sorted(flat(steps)) == sorted(list(range(n_real)) * passes)
        assert len(steps) == passes * -(-n_real // 3) >= 4
    if passes == 1:
        assert epochs == visited(key, n_real, n_rows, 3, 5)
    elif n_rows > 3:
        orders = {tuple(flat(batches)[k : k + n_real]) for batches in epochs for k in (0, n_real)}
        assert len(orders) > len(epochs)


def test_every_step_has_a_key_of_its_own():
    def loss(w, rows, mask, key):
        return jnp.sum(jnp.where(mask, rows, 0.0)) * 0 + w * jax.random.uniform(key)

    def values(n_rows, epochs, n_real=2, **options):
        options |= {"epochs": epochs, "batch_size": 3, "learning_rate": 0.0, "keyed": True}

        @jax.jit
        def train(key):
            rows, mask = jnp.ones(n_rows), jnp.arange(n_rows) < n_real
            return nn.fit(key, jnp.ones(()), loss, rows, mask, **options)[1]

        return np.asarray(train(jax.random.key(1)))

    one, three = values(2, 6), values(2, 6, least_steps=3)
    # The mean of three draws, of which the first is that of one pass; padding changes none.
    others = three * 3 - one
    assert len(np.unique(np.round(np.concatenate([one, others]), 5))) == 12
    assert np.all((others > 0) & (others < 2))
    np.testing.assert_allclose(values(7, 6, least_steps=3), three, rtol=1e-6)
    # The second of two batches; and none has a key that an epoch is shuffled by.
    second = values(6, 6, n_real=6) * 2 - one
    shuffles = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(jax.random.key(1), i)))
    drawn = jax.jit(shuffles)(np.arange(12))
    assert len(np.unique(np.round(np.concatenate([one, second, drawn]), 5))) == 24


def test_minibatches_are_adam_on_each_batch(data):
    x, y = data
    w = np.array([0.3, 0.0, -0.1], np.float32)
    epochs = visited(jax.random.key(5), N, N, 3, 4)
    batches = flat(epochs)
    trained, values = fit(jax.random.key(5), w, x, y, np.ones(N, bool), RATE, 4, 3)

    def gradient(w, step):
        return regression_gradient(w, x[batches[step]], y[batches[step]])

    np.testing.assert_allclose(trained, numpy_adam(w, gradient, 12), rtol=1e-4)
    # The loss of an epoch is the mean over rows, each under the weights that its batch met.
    for e in range(4):
        squares = []
        for step in range(3 * e, 3 * e + 3):
            before, rows = numpy_adam(w, gradient, step), batches[step]
            squares += list((x[rows] @ before - y[rows]) ** 2)
        np.testing.assert_allclose(values[e], np.mean(squares), rtol=1e-5)


# Batches without padding: 3 of 7 rows, then a single batch of all.
@pytest.mark.parametrize(("batch_size", "extra"), [(3, 1), (3, 2), (3, 8), (7, 1), (7, 9), (20, 5)])
def test_padding_changes_nothing(data, batch_size, extra):
    x, y = data
    w = np.zeros(D, np.float32)
    args = (RATE, 4, batch_size)
    trained, values = fit(jax.random.key(1), w, x, y, np.ones(N, bool), *args)
    more, more_values = fit(jax.random.key(1), w, *padded(x, y, extra), *args)
    assert np.abs(trained).max() > 0.1
    np.testing.assert_allclose(more, trained, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(more_values, values, rtol=1e-5)


@pytest.mark.parametrize("least_steps", [1, 2])
def test_padding_changes_nothing_where_a_loss_draws_for_each_place(data, least_steps):
    """Rows that are a single batch keep their places; others than the last may be masked, too."""
    x, y = data

    def loss(w, rows, mask, key):
        seen = rows["x"] * (jax.random.uniform(key, rows["x"].shape) < 0.7)
        return regression_loss(w, rows | {"x": seen}, mask)

    @jax.jit
    def train(x, y, mask):
        options = {"epochs": 4, "batch_size": N, "learning_rate": RATE}
        options |= {"keyed": True, "least_steps": least_steps}
        key, rows = jax.random.key(1), {"x": x, "y": y}
        return nn.fit(key, jnp.zeros(D), loss, rows, mask.at[2].set(False), **options)

    trained, values = train(x, y, np.ones(N, bool))
    more, more_values = train(*padded(x, y, 2))
    assert np.abs(trained).max() > 0.1
    np.testing.assert_allclose(more, trained, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(more_values, values, rtol=1e-5)


@pytest.mark.parametrize("batch_size", [3, 7])
def test_without_a_real_row_nothing_is_learnt(data, batch_size):
    x, y = data
    w = np.array([0.3, 0.0, -0.1], np.float32)
    trained, values = fit(jax.random.key(1), w, x, y, np.zeros(N, bool), RATE, 4, batch_size)
    np.testing.assert_array_equal(trained, w)
    np.testing.assert_array_equal(values, 0.0)


def test_no_epochs_leave_the_parameters(data):
    w = np.array([0.3, 0.0, -0.1], np.float32)
    trained, values = fit(jax.random.key(1), w, *data, np.ones(N, bool), RATE, 0, 3)
    np.testing.assert_array_equal(trained, w)
    assert values.shape == (0,)


@pytest.mark.parametrize(
    ("name", "value"), [("epochs", -1), ("batch_size", 0), ("batch_size", 2.5), ("least_steps", 0)]
)
def test_numbers_that_make_no_training_are_named(data, name, value):
    settings = {"epochs": 2, "batch_size": 3, "learning_rate": RATE, name: value}
    rows = {"x": data[0], "y": data[1]}
    with pytest.raises(ValueError, match=f"^{name}: got {value}; allowed is"):
        nn.fit(jax.random.key(0), np.zeros(D), regression_loss, rows, np.ones(N, bool), **settings)


def test_rows_may_be_numpys(data):
    """In batches, too; `fit` above hands them over as arrays of a trace."""
    x, y = data
    w, mask, settings = np.zeros(D, np.float32), np.ones(N, bool), (RATE, 2, 3)
    found, losses = nn.fit(
        jax.random.key(1),
        w,
        regression_loss,
        {"x": x, "y": y},
        mask,
        epochs=2,
        batch_size=3,
        learning_rate=RATE,
    )
    expected, expected_losses = fit(jax.random.key(1), w, x, y, mask, *settings)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)


def test_adam_is_kept_between_calls(data):
    x, y = data
    w = np.array([0.3, 0.0, -0.1], np.float32)
    loss, mask = regression_loss, np.ones(N, bool)

    @functools.partial(jax.jit, static_argnames="epochs")
    def on(w, opt_state, epochs):
        return nn.fit_on(
            jax.random.key(0),
            w,
            opt_state,
            loss,
            {"x": x, "y": y},
            mask,
            epochs=epochs,
            batch_size=N,
            learning_rate=RATE,
        )

    fresh = optax.adam(RATE).init(w)
    first, kept, first_value = on(w, fresh, 1)
    second, _, second_value = on(first, kept, 1)
    together, _, values = on(w, fresh, 2)
    np.testing.assert_allclose(second, together, rtol=1e-6)
    np.testing.assert_allclose([*first_value, *second_value], values, rtol=1e-6)
    # A fresh Adam makes another step.
    assert np.abs(on(first, fresh, 1)[0] - together).max() > 1e-4


def test_learning_rate_may_be_swept(data):
    x, y = data
    w, rates = np.zeros(D, np.float32), np.array([0.01, 0.05, 0.2], np.float32)
    args = (jax.random.key(1), w, x, y, np.ones(N, bool))
    swept, _ = jax.vmap(lambda rate: fit(*args, rate, 4, 3))(rates)
    for rate, together in zip(rates, swept, strict=True):
        np.testing.assert_allclose(together, fit(*args, rate, 4, 3)[0], rtol=1e-5)
    assert np.ptp(swept, axis=0).min() > 1e-2


init_mlp = jax.jit(nn.init_mlp, static_argnums=(1, 2))
apply = jax.jit(nn.apply)


def test_mlp_is_dense_layers_with_relu_between():
    params = jax.device_get(init_mlp(jax.random.key(0), 4, (6, 5, 2)))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape).astype(p.dtype), params)
    x = rng.normal(size=(7, 4)).astype(np.float32)
    h, layers = x.astype(float), jax.tree.map(np.asarray, params["params"])
    for i in range(3):
        h = h @ layers[f"Dense_{i}"]["kernel"] + layers[f"Dense_{i}"]["bias"]
        h = np.maximum(h, 0) if i < 2 else h
    assert (h < 0).any()  # no ReLU after the last layer
    np.testing.assert_allclose(apply(params, x), h, rtol=1e-5, atol=1e-6)


def test_initial_weights_are_uniform_within_the_root_of_the_fan_in():
    layer = init_mlp(jax.random.key(2), 25, (40,))["params"]["Dense_0"]
    kernel = np.asarray(layer["kernel"])
    assert kernel.shape == (25, 40)
    assert 0.195 < np.abs(kernel).max() <= 0.2  # 1 / sqrt(25)
    # Uniform: a quarter of the mass in each quarter of the range; 1000 draws, 4 deviations.
    share = np.histogram(kernel, bins=4, range=(-0.2, 0.2))[0] / kernel.size
    np.testing.assert_allclose(share, 0.25, atol=4 * (0.25 * 0.75 / 1000) ** 0.5)
    np.testing.assert_array_equal(layer["bias"], 0.0)


def test_networks_of_equal_shapes_are_stacked_and_compute_as_they_do_apart():
    shapes = {"a": (3, (5, 2)), "b": (4, (5, 2)), "c": (3, (5, 2))}
    networks = jax.jit(lambda key: nn.init_mlps(key, shapes))(jax.random.key(0))
    rng = np.random.default_rng(0)
    x = {name: rng.normal(size=(6, n)).astype(np.float32) for name, (n, _) in shapes.items()}
    stacked = nn.alike(networks)
    assert stacked.names == (("a", "c"), ("b",))
    assert nn.alike(networks, stack=False).names == (("a",), ("b",), ("c",))
    jax.tree.map(np.testing.assert_array_equal, nn.apart(stacked), networks)
    expected = {name: apply(networks[name], x[name]) for name in shapes}

    for form in (stacked, networks):
        found = jax.jit(lambda form, x: nn.each(nn.apply, form, x))(form, x)
        assert set(found) == set(shapes)
        for name in shapes:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_networks_are_stacked_on_accelerators_unless_that_is_chosen(monkeypatch):
    assert [nn.stacks(choice) for choice in (None, True, False)] == [False, True, False]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [nn.stacks(choice) for choice in (None, True, False)] == [True, True, False]
