"""Factors and systems: as NumPy's, and on a CPU one at a time however many are asked for."""

import re

import jax
import numpy as np
import pytest

from jaxfedmvc import linalg

RNG = np.random.default_rng(0)
ROOTS = RNG.normal(size=(2, 3, 6, 6))
MATRICES = (ROOTS @ ROOTS.swapaxes(-1, -2) + np.eye(6)).astype(np.float32)
TARGETS = RNG.normal(size=(2, 3, 6, 2)).astype(np.float32)
# From what a function returns for a symmetric matrix, something that NumPy computes of it.
KNOWN = {
    "inverse": (lambda found: found, np.linalg.inv),
    "solve": (lambda found: found, lambda x: np.linalg.inv(x) @ TARGETS),
    "solve_positive": (lambda found: found, lambda x: np.linalg.inv(x) @ TARGETS),
    "pinv_hermitian": (lambda found: found, np.linalg.inv),
    "eigvalsh": (lambda found: found, np.linalg.eigvalsh),
    "eigh": (lambda found: found[1] * found[0][..., None, :] @ found[1].mT, lambda x: x),
    "svd": (lambda found: found[0] * found[1][..., None, :] @ found[2], lambda x: x),
    "qr": (lambda found: found[0] @ found[1], lambda x: x),
}


def calls(function, *arguments, platform):
    """Returns the shapes of what a program for the platform gives to LAPACK or solves."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    call = r'(?:@lapack_\w+|"stablehlo\.triangular_solve").* : \(tensor<([\dx]+)xf32>'
    return set(re.findall(call, text))


@pytest.mark.parametrize("name", KNOWN)
def test_matrices_are_worked_on_one_after_the_other(name):
    """Two calls with several large matrices at once never end on two cores (jaxlib 0.10.2)."""
    function = jax.vmap(jax.vmap(getattr(linalg, name)))
    arguments = (MATRICES, TARGETS) if name.startswith("solve") else (MATRICES,)
    assert calls(function, *arguments, platform="cpu") == {"6x6"}
    read, known = KNOWN[name]
    expected = known(MATRICES.astype(np.float64))
    found = read(jax.jit(function)(*arguments))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    one = read(jax.jit(getattr(linalg, name))(*(x[0, 0] for x in arguments)))
    np.testing.assert_allclose(one, expected[0, 0], rtol=1e-3, atol=1e-4)


def test_factors_are_thin():
    wide = MATRICES[0, 0, :4]
    assert [x.shape for x in linalg.svd(wide)] == [(4, 4), (4,), (4, 6)]
    assert [x.shape for x in linalg.qr(wide.T)] == [(6, 4), (4, 4)]


def test_other_devices_work_on_all_matrices_at_once():
    function = jax.vmap(jax.vmap(linalg.inverse))
    assert calls(function, MATRICES, platform="tpu") == {"6x6x6"}


def test_axes_of_three_vmaps_keep_their_order():
    """XLA 0.10.2 does not compile every product of batches whose three axes were turned round."""
    x = RNG.normal(size=(2, 4, 3, 5, 2)).astype(np.float32)

    def polar(matrix):
        u, _, vh = linalg.svd(matrix)
        return u @ vh

    u, _, vh = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    found = jax.jit(jax.vmap(jax.vmap(jax.vmap(polar))))(x)
    np.testing.assert_allclose(found, u @ vh, atol=1e-5)
    turned = jax.jit(jax.vmap(jax.vmap(jax.vmap(polar), in_axes=1), in_axes=2))(x)
    np.testing.assert_allclose(turned, np.einsum("abcnm->cbanm", u @ vh), atol=1e-5)


def test_several_targets_of_one_system():
    found = jax.jit(jax.vmap(linalg.solve, in_axes=(None, 0)))(MATRICES[0, 0], TARGETS[0])
    known = np.linalg.inv(MATRICES[0, 0].astype(np.float64)) @ TARGETS[0]
    np.testing.assert_allclose(found, known, rtol=1e-3, atol=1e-4)


def test_gradients_of_batches():
    """The sum of A^-1 has the gradient -(A^-1 1 1^T A^-1)^T, that of the eigenvalues has I."""
    found = jax.jit(jax.grad(lambda x: jax.vmap(linalg.inverse)(x).sum()))(MATRICES[0])
    inverses = np.linalg.inv(MATRICES[0].astype(np.float64))
    known = -np.einsum("ni,nj->nij", inverses.sum(axis=1), inverses.sum(axis=2))
    np.testing.assert_allclose(found, known, rtol=1e-3, atol=1e-4)
    found = jax.jit(jax.vmap(jax.grad(lambda x: linalg.eigvalsh(x).sum())))(MATRICES[0])
    np.testing.assert_allclose(found, np.broadcast_to(np.eye(6), found.shape), atol=1e-4)
