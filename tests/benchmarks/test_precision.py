"""Rounded products against the same computed by hand, wherever they are in a program."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call

from benchmarks import precision
from benchmarks.precision import FORMATS, rounded, rounded_entries
from jaxfedmvc import engine
from jaxfedmvc.algorithms.local_kmeans import LocalKMeansConfig, local_kmeans
from jaxfedmvc.federation import Federation

KEYS = jax.random.split(jax.random.key(0), 2)
A, B = (jax.random.normal(key, (4, 4)) for key in KEYS)
BFLOAT16 = FORMATS["bfloat16"]


def product(a, b, bits=7):
    """By hand."""
    a, b = (lax.reduce_precision(x, 8, bits) for x in (a, b))
    return jnp.matmul(a, b, precision="highest")


@jax.custom_jvp
def with_jvp(a, b):
    return a @ b


@with_jvp.defjvp
def _(primals, tangents):
    return with_jvp(*primals), tangents[0] @ primals[1] + primals[0] @ tangents[1]


@jax.custom_vjp
def with_vjp(a, b):
    return a @ b


with_vjp.defvjp(lambda a, b: (a @ b, (a, b)), lambda ab, g: (g @ ab[1].T, ab[0].T @ g))


def scanned(a, b):
    return lax.scan(lambda x, row: (x @ b, row @ b), a, a)


def until(a, b):
    return lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0] @ b, s[1] + 1), (a, 0))[0]


def branched(a, b):
    return lax.cond(a[0, 0] > 9, lambda x: x, lambda x: x @ b, a)


def by_platform(a, b):
    return lax.platform_dependent(a, b, cpu=jnp.matmul, default=lambda a, b: a - b)


def solved(a, b):
    # A linear system whose solver is a product: `b` is taken for the inverse.
    return lax.custom_linear_solve(lambda x: x, a, lambda _, y: b @ y)


PRODUCT = product(A, B)
THREE = product(product(PRODUCT, B), B)
CASES = {
    "product": (lambda a, b: a @ b, PRODUCT),
    "jit": (jax.jit(lambda a, b: a @ b), PRODUCT),
    "checkpoint": (jax.grad(jax.checkpoint(lambda a, b: jnp.sum(a @ b))), product(A * 0 + 1, B.T)),
    "vmap": (jax.vmap(jnp.dot, (0, None)), PRODUCT),
    "scan": (scanned, (product(THREE, B), PRODUCT)),
    "while": (until, THREE),
    "cond": (branched, PRODUCT),
    "platform": (by_platform, PRODUCT),
    "custom_jvp": (with_jvp, PRODUCT),
    "custom_vjp": (with_vjp, PRODUCT),
    "solve": (solved, product(B, A)),
    "gradient": (jax.grad(lambda a, b: jnp.sum(a @ b)), product(A * 0 + 1, B.T)),
    "of custom_jvp": (jax.grad(lambda a, b: jnp.sum(with_jvp(a, b))), product(A * 0 + 1, B.T)),
    "of custom_vjp": (jax.grad(lambda a, b: jnp.sum(with_vjp(a, b))), product(A * 0 + 1, B.T)),
}


@pytest.mark.parametrize("name", CASES)
def test_rounding_reaches_products_inside(name):
    function, by_hand = CASES[name]
    found = jax.jit(rounded(function))(BFLOAT16, A, B)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, by_hand)
    # float32 is as without, and bfloat16 is not.
    with jax.default_matmul_precision("float32"):
        plain = jax.jit(function)(A, B)
    exact = jax.jit(rounded(function))(FORMATS["float32"], A, B)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), exact, plain)
    assert not np.array_equal(jax.tree.leaves(found)[0], jax.tree.leaves(plain)[0])


def test_entries_are_rounded_as_lax_rounds_them():
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1 + 2**-8, 1 + 3 * 2**-8, 1 - 2**-9, 3.4e38]
    x = jnp.concatenate([jnp.array(edges), 1e3 * jax.random.normal(jax.random.key(1), (1000,))])
    for bits in (23, 7):
        expected = lax.reduce_precision(x, 8, bits)
        np.testing.assert_array_equal(rounded_entries(x, jnp.int32(bits)), expected)
    counts = jnp.arange(3)
    assert rounded_entries(counts, 7) is counts


def test_the_condition_of_a_loop_is_rounded():
    def until(x):
        return lax.while_loop(lambda x: (x @ jnp.ones(1))[0] > 1, lambda x: 0 * x, x)

    x = jnp.full((1, 1), 1 + 2.0**-9)  # which is 1 with seven bits
    assert rounded(until)(BFLOAT16, x) == x and rounded(until)(FORMATS["tf32"], x) == 0


def test_loops_of_a_batch_end_one_by_one():
    def grown(x, b):
        return lax.while_loop(lambda x: jnp.sum(x) < 100, lambda x: x @ b, x)

    x, b = jnp.array([[1.0, 2.0], [60.0, 50.0], [7.0, 9.0]]), jnp.full((2, 2), 1.5)
    found = rounded(jax.vmap(grown, (0, None)))(FORMATS["float32"], x, b)
    np.testing.assert_array_equal(found, jnp.stack([grown(row, b) for row in x]))


def test_products_asked_for_in_full_are_left_alone_unless_all_are_meant():
    def in_full(a, b):
        return jnp.matmul(a, b, precision="highest")

    @jax.default_matmul_precision("highest")
    def within(a, b):
        return a @ b

    for function in (in_full, within):
        np.testing.assert_array_equal(rounded(function)(BFLOAT16, A, B), in_full(A, B))
        found = rounded(function)(FORMATS["bfloat16, all"], A, B)
        np.testing.assert_allclose(found, PRODUCT, rtol=1e-6)


def test_a_product_out_of_reach_is_an_error():
    def called(a, b):
        return linear_call(lambda b, a: a @ b, lambda b, a: a @ b.T, b, a)

    with pytest.raises(NotImplementedError, match="linear_call: got one with products"):
        rounded(called)(BFLOAT16, A, B)


@pytest.mark.ci
def test_a_whole_method_keeps_its_labels_with_all_bits():
    views = np.random.default_rng(0).random((2, 40, 5), np.float32)
    federation = Federation.from_clients([{0: view} for view in views])
    algorithm = local_kmeans(LocalKMeansConfig(2, n_init=2))

    def labels(federation, key):
        return engine.run(algorithm, federation, key, 1).labels

    arguments = (federation, jax.random.key(0))
    found = jax.jit(rounded(labels))(FORMATS["float32"], *arguments)
    for mine, plain in zip(found, jax.jit(labels)(*arguments), strict=True):
        np.testing.assert_array_equal(mine, plain)


def test_clusterings_that_differ_in_names_are_the_same():
    assert precision.same([np.array([0, 0, 1, -1])], [np.array([1, 1, 0, -1])]) == 1.0
    assert precision.same([np.array([0, 0, 1, 1])], [np.array([0, 0, 0, 1])]) == 0.75


def test_a_row_half_written_goes_and_a_second_call_goes_on(tmp_path):
    path = tmp_path / "rows.csv"
    row = {"method": "x", "seed": 0, "device": precision.device(), "acc float32": 0.5}
    precision.append(path, row)
    precision.append(path, row | {"seed": 1, "device": "another"})
    path.write_text(path.read_text() + "x,2,cp")
    assert [r["seed"] for r in precision.rows_of(path)] == ["0"]
    precision.append(path, row | {"seed": 2})
    assert len(list(csv.DictReader(path.open()))) == 3


def test_a_line_of_the_table_has_the_paired_difference():
    row = {f"{what} {name}": "0.5" for what in ("acc", "same") for name in FORMATS}
    rows = [row, row | {"acc bfloat16": "0.7"}]
    assert precision.line_of("x", rows) == (
        "| x | 0.500 +- 0.000 | 0.500 +- 0.000 | +0.000 +- 0.000 | 0.500"
        " | 0.600 +- 0.141 | +0.100 +- 0.141 | 0.500"
        " | 0.500 +- 0.000 | +0.000 +- 0.000 | 0.500 |"
    )
