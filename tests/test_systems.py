"""Linear systems: known answers, and on a CPU one at a time however many are asked for at once."""

import re

import jax
import numpy as np
import pytest

from jaxfedmvc import systems

RNG = np.random.default_rng(0)
ROOTS = RNG.normal(size=(2, 3, 6, 6))
MATRICES = (ROOTS @ ROOTS.swapaxes(-1, -2) + np.eye(6)).astype(np.float32)
TARGETS = RNG.normal(size=(2, 3, 6, 2)).astype(np.float32)


def solved(function, *arguments, platform):
    """Returns the shapes of the triangular matrices that a program for the platform solves with."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    call = r'(?:@lapack_strsm_ffi|"stablehlo\.triangular_solve").* : \(tensor<([\dx]+)xf32>'
    return re.findall(call, text)


@pytest.mark.parametrize("name", ["inverse", "solve", "solve_positive"])
def test_systems_are_solved_one_after_the_other(name):
    """Two solves of several large systems at once never end on two cores (jaxlib 0.10.2)."""
    function = jax.vmap(jax.vmap(getattr(systems, name)))
    arguments = (MATRICES,) if name == "inverse" else (MATRICES, TARGETS)
    assert set(solved(function, *arguments, platform="cpu")) == {"6x6"}
    expected = np.linalg.inv(MATRICES.astype(np.float64))
    if name != "inverse":
        expected = expected @ TARGETS
    np.testing.assert_allclose(jax.jit(function)(*arguments), expected, rtol=1e-3, atol=1e-4)
    one = jax.jit(getattr(systems, name))(*(x[0, 0] for x in arguments))
    np.testing.assert_allclose(one, expected[0, 0], rtol=1e-3, atol=1e-4)


def test_other_devices_solve_all_systems_at_once():
    function = jax.vmap(jax.vmap(systems.inverse))
    assert set(solved(function, MATRICES, platform="tpu")) == {"2x3x6x6"}
