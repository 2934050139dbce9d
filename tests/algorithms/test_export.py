"""Whole runs of every method are lowered for accelerators, of which none has to be there."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType

from jaxfedmvc import engine
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.engine import batching, mesh
from tests.algorithms import test_common as common

# What the programs may call beside XLA's own operations: linear algebra of the device.
LIBRARIES = {
    "cuda": re.compile(r"cusolver_\w+_ffi|cu_lu_pivots_to_permutation"),
    "tpu": re.compile(r"Eigh|Qr|LuDecomposition|ProductOfElementaryHouseholderReflectors"),
}


def methods(in_ci):
    for name in sorted(METHODS):
        yield pytest.param(name, marks=() if name in in_ci else pytest.mark.slow)


def check(exported, platform):
    """Nothing calls the host, nothing is float64, no library of another platform is asked for."""
    text = exported.mlir_module()
    assert exported.platforms == (platform,)
    assert "f64" not in text
    called = set(re.findall(r"custom_call @(\w+)", text))
    shardings = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}
    assert not {c for c in called - shardings if not LIBRARIES[platform].fullmatch(c)}


@pytest.mark.ci
@pytest.mark.parametrize("name", list(methods(["mgcd"])))  # calls the host on a CPU
def test_a_run_and_a_batch_of_runs_are_made_for_accelerators(name):
    lab = common.Lab(name)
    federation, key = lab.federation.without_labels(), jax.random.key(0)

    @jax.jit
    def run(federation, key):
        return engine.run(lab.algorithm, federation, key, common.ROUNDS).labels

    def batch(federation, keys):
        return jax.vmap(run, (None, 0))(federation, keys)

    for platform in LIBRARIES:
        check(export.export(run, platforms=[platform])(federation, key), platform)
        keys = jax.random.split(key)
        check(export.export(jax.jit(batch), platforms=[platform])(federation, keys), platform)


@pytest.mark.ci
@pytest.mark.parametrize("name", list(methods(["e_fkmvc"])))
def test_a_batch_over_a_mesh_is_made_for_accelerators(name):
    """Runs over two devices, and over two more the clients where there may be several alike."""
    lab = common.Lab(name)
    n_clients = 1 if METHODS[name].topology == "vertical" else 2
    over = AbstractMesh((2, n_clients), mesh.AXES, axis_types=(AxisType.Auto,) * 2)

    def shapes(x):
        """Two seeds of as many clients again."""
        shape = (2, n_clients * x.shape[0], *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=mesh.sharding(over, None, "clients"))

    def run(hyperparams, key, federation):
        return engine.run(lab.algorithm, federation, key, common.ROUNDS).labels

    program = batching.batched(run, lambda shared, data: data, over)
    data = jax.tree.map(shapes, lab.federation.without_labels())
    numbers = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=mesh.sharding(over, "sweep"))
    program = jax.jit(program, out_shardings=mesh.sharding(over))
    for platform in LIBRARIES:
        exported = export.export(program, platforms=[platform])((), data, (), numbers, numbers)
        assert exported.nr_devices == 2 * n_clients
        check(exported, platform)
