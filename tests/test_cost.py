"""FLOPs against hand counts; bytes against hand counts and against the compiler's own account."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc import cost, engine, losses, nn
from jaxfedmvc.algorithms import distr_kmeans, local_kmeans
from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation

DOT = 2 * 10 * 30 * 20  # [10, 20] @ [20, 30]


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def flops(function, *arguments, **keywords):
    return cost.predict(function, *arguments, **keywords).flops


def account(function, *arguments):
    """What the compiler says that a program holds."""
    memory = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


# --- FLOPs ----------------------------------------------------------------------------------------


def test_flops_of_products():
    assert flops(jnp.matmul, shape(10, 20), shape(20, 30)) == DOT
    assert flops(jax.vmap(jnp.matmul), shape(7, 10, 20), shape(7, 20, 30)) == 7 * DOT
    assert flops(jax.vmap(jnp.matmul, (None, 0)), shape(10, 20), shape(7, 20, 30)) == 7 * DOT
    gradient = jax.grad(lambda w, x: jnp.sum(x @ w))
    assert flops(gradient, shape(20, 30), shape(10, 20)) == DOT  # the product itself is dead


def test_flops_of_elementwise_operations_reductions_and_sorts():
    assert flops(lambda x: jnp.exp(x) * 2 + 1, shape(10, 20)) == 3 * 200
    assert flops(lambda x: x.T.reshape(-1)[:7], shape(10, 20)) == 0
    assert flops(lambda x: jnp.sum(x, axis=1), shape(10, 20)) == 200
    assert flops(jnp.sort, shape(1024)) == 1024 * 10
    assert flops(lambda x: jax.vmap(jnp.sort)(x), shape(5, 1024)) == 5 * 1024 * 10
    assert flops(jax.jit(lambda x: jax.checkpoint(jnp.sin)(x)), shape(9)) == 9
    assert flops(lambda x: (jnp.exp(x), x + 1)[1], shape(9)) == 9  # exp is dead


def test_flops_of_loops():
    def products(length):
        def function(x, w):
            return jax.lax.scan(lambda c, _: (c @ w, None), x, length=length)[0]

        return function

    once = 2 * 10 * 20 * 20
    x, w = shape(10, 20), shape(20, 20)
    assert [flops(products(n), x, w) for n in (1, 5)] == [once, 5 * once]
    assert flops(jax.vmap(products(5), (0, None)), shape(3, 10, 20), w) == 3 * 5 * once
    counted = flops(lambda x, w: jax.lax.fori_loop(0, 5, lambda i, c: c @ w, x), x, w)
    assert counted == 5 * once

    def doubling(x):  # a test is 1 for the comparison, a step 10 for the products
        return jax.lax.while_loop(lambda c: c[0] < 8, lambda c: c * 2, x)

    assert flops(doubling, shape(10)) == 1 * 10 + 2 * 1
    assert flops(doubling, shape(10), while_trips=4) == 4 * 10 + 5 * 1
    assert flops(doubling, shape(10), while_trips=0) == 1
    with pytest.raises(ValueError, match="while_trips: got -1; allowed is 0 or more"):
        flops(doubling, shape(10), while_trips=-1)


def test_flops_of_the_most_expensive_branch():
    def function(flag, x, w):
        return jax.lax.cond(flag, lambda: x @ w @ w, lambda: x + 1)

    flag, x, w = jax.ShapeDtypeStruct((), bool), shape(10, 20), shape(20, 20)
    # The flag becomes the branch's number, which is a conversion and free.
    assert flops(function, flag, x, w) == 2 * 2 * 10 * 20 * 20


# --- Bytes ----------------------------------------------------------------------------------------


def test_bytes_of_simple_programs():
    x, w, v = shape(100, 300), shape(300, 200), shape(200, 50)
    chain = cost.predict(lambda x: jnp.tanh(x) * 2 + 1, x)
    assert chain[1:] == (2 * 120_000, 120_000, 120_000)  # fused, nothing in between
    two = cost.predict(lambda x, w, v: jax.nn.relu(x @ w + 1) @ v, x, w, v)
    assert two.argument_bytes == 120_000 + 240_000 + 40_000
    assert two.output_bytes == 20_000
    assert two.peak_bytes == 400_000 + 20_000 + 80_000  # x @ w, which relu is written over
    unused = cost.predict(lambda x, w: x[0], x, w)
    assert unused[1:] == (121_200, 120_000, 1_200)
    closed_over = jnp.ones((300, 200))
    held = cost.predict(lambda x: x @ closed_over, x)
    assert held[1:] == (440_000, 120_000, 80_000)


def test_bytes_of_keys():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 5))
    assert cost.predict(lambda k: k[:3], keys)[1:] == (40 + 24, 40, 24)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x, w, v: (x @ w) @ v, (shape(100, 300), shape(300, 200), shape(200, 50))),
        (lambda x: jnp.argsort(x, axis=0), (shape(4000, 64),)),
        (jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)), (shape(300, 200), shape(100, 300))),
        (
            lambda x, w: jax.lax.scan(lambda c, _: (c @ w, jnp.sum(c)), x, length=5),
            (shape(100, 300), shape(300, 300)),
        ),
        (
            lambda xs, w: jax.lax.scan(lambda c, x: (c + x @ w, None), jnp.zeros((9, 300)), xs)[0],
            (shape(7, 9, 300), shape(300, 300)),
        ),
    ],
)
def test_bytes_are_the_compilers(function, arguments):
    predicted = cost.predict(function, *arguments).peak_bytes
    assert predicted == pytest.approx(account(function, *arguments), rel=0.001)


def test_training_is_within_20_per_cent_of_the_compilers_account():
    widths = (128, 96, 10, 96, 128, 60)

    def train(keys, x):
        def one(key):
            def loss(params, x, mask):
                rebuilt = nn.apply_mlp(params, widths, x)
                return losses.mean_squared_error(rebuilt, x, mask)

            start, mask = nn.init_mlp(key, 60, widths), jnp.ones(len(x), bool)
            return nn.fit(key, start, loss, x, mask, epochs=3, batch_size=80, learning_rate=0.001)

        return jax.vmap(one)(keys)

    arguments = jax.random.split(jax.random.key(0), 4), jnp.ones((300, 60))
    predicted = cost.predict(train, *arguments).peak_bytes
    assert predicted == pytest.approx(account(train, *arguments), rel=0.2)


@functools.cache
def federation(vertical):
    """240 samples in two views: six clients with 40 of them, or an agent for each view."""
    rng = np.random.default_rng(0)
    truth = np.arange(240) % 4
    views = [rng.normal(size=(4, d))[truth] + rng.normal(size=(240, d)) for d in (60, 40)]
    if vertical:
        return Federation.from_agents([(range(240), view) for view in views])
    ids = np.arange(240, dtype=np.int32).reshape(6, 40)
    return Federation.from_arrays(
        views, truth, partition=[Part((0, 1), ids, np.arange(6, dtype=np.int32))]
    )


METHODS = {"distr_kmeans": distr_kmeans(4), "local_kmeans": local_kmeans(4, 5)}


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("n_runs", [1, 4])
def test_runs_are_within_30_per_cent_of_the_compilers_account(name, n_runs):
    def sweep(federation, keys):
        return jax.vmap(lambda key: engine.run(METHODS[name], federation, key, 2))(keys)

    data = federation(vertical=name == "distr_kmeans")
    arguments = data, jax.random.split(jax.random.key(0), n_runs)
    predicted = cost.predict(sweep, *arguments).peak_bytes
    assert predicted == pytest.approx(account(sweep, *arguments), rel=0.3)
