"""Whole runs of every method are lowered for accelerators, of which none has to be there."""

import re

import jax
import pytest
from jax import export

from jaxfedmvc import engine
from jaxfedmvc.algorithms import METHODS
from tests.algorithms import test_common as common

# What the programs may call beside XLA's own operations: linear algebra of the device.
LIBRARIES = {
    "cuda": re.compile(r"cusolver_\w+_ffi|cu_lu_pivots_to_permutation"),
    "tpu": re.compile(r"Eigh|Qr|LuDecomposition|ProductOfElementaryHouseholderReflectors"),
}
IN_CI = ("mgcd",)  # whose program calls the host on a CPU


def methods():
    for name in sorted(METHODS):
        yield pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow)


@pytest.mark.parametrize("name", list(methods()))
def test_a_run_and_a_batch_of_runs_are_made_for_accelerators(name):
    """Nothing calls the host, nothing is float64, no library of another platform is asked for."""
    lab = common.Lab(name)
    federation, key = lab.federation.without_labels(), jax.random.key(0)

    def run(federation, key):
        return engine.run(lab.algorithm, federation, key, common.ROUNDS).labels

    def batch(federation, keys):
        return jax.vmap(run, (None, 0))(federation, keys)

    for platform, allowed in LIBRARIES.items():
        one = export.export(jax.jit(run), platforms=[platform])(federation, key)
        many = export.export(jax.jit(batch), platforms=[platform])(
            federation, jax.random.split(key)
        )
        for exported in (one, many):
            text = exported.mlir_module()
            assert exported.platforms == (platform,)
            assert "f64" not in text
            called = set(re.findall(r"custom_call @(\w+)", text))
            assert not {target for target in called if not allowed.fullmatch(target)}
