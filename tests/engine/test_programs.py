"""The default job's programs stay as small as they are; counts do not depend on the machine."""

import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compile import DEFAULT, costs, draws, programs_of
from jaxfedmvc.engine.effort import operations


@functools.cache
def table(compiled=False):
    return costs(programs_of(DEFAULT), compiled)


# Bounds are a tenth above what was when they were written.
def test_the_default_job_is_no_longer_than_it_was():
    assert sum(row["lines"] for row in table()) < 22_700  # 20 655
    assert sum(row["draws"] for row in table()) < 15  # 9
    assert max(row["lines"] for row in table()) < 5_900  # 5 353


@pytest.mark.slow
def test_the_default_job_compiles_to_no_more_than_it_did():
    assert sum(row["instructions"] for row in table(compiled=True)) < 37_500  # 34 080


def test_what_is_alike_is_compiled_once():
    alike = {row["program"]: row["as"] for row in table() if row["as"]}
    # Pre-training by the leader and by everyone, and Lloyd's steps, are not even traced again.
    names = [row["program"] for row in table()]
    assert names.count("setup/0/clients0") == names.count("finish/1/server") == 1
    assert not {"setup/1/clients0", "finish/2/server", "finish/3/clients2"} & set(names)
    # Clients that receive nothing.
    assert alike["round/0/clients1"] == "setup/0/clients1"


def test_operations_of_loops_and_products():
    def program(x):
        def body(carry, _):
            return carry @ x, None  # 4 x 4 x 4

        return jax.lax.scan(body, x, None, length=5)[0] + 1.0

    traced = jax.jit(program).trace(jnp.zeros((4, 4)))
    assert operations(traced.jaxpr) == 5 * 64 + 16
    values = jax.jit(lambda x: jnp.linalg.svd(x, compute_uv=False)).trace(jnp.zeros((2, 6, 3)))
    assert operations(values.jaxpr) == 2 * 6 * 3 * 3


def test_draws_are_counted_inside_loops():
    def program(key):
        return jax.lax.map(lambda k: jax.random.normal(k, (3,)), jax.random.split(key, 2))

    assert draws(jax.make_jaxpr(program)(jax.random.key(0))) == 1
