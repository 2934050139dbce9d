"""Devices, laid out along two axes: "sweep" for runs and "clients" for the clients of a run."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxfedmvc.federation import Federation

PyTree = Any
AXES = ("sweep", "clients")


def parse_mesh(text: str) -> dict[str, int]:
    """Reads e.g. "sweep:2,clients:4".

    Raises:
      ValueError: Not `axis:size` with commas, an unknown axis, one twice, a size below 1.
    """
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = item.strip().partition(":")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"mesh: got {text!r}; allowed are sweep:m, clients:n, or both with a comma, with"
                " whole numbers of 1 or more"
            )
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """Makes a mesh of the devices of all processes.

    Args:
      sizes: As `parse_mesh` returns them; an axis that is not there has size 1.

    Raises:
      ValueError: It does not take all devices, or asks for more than there are.
    """
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    n_devices = jax.device_count()
    if np.prod(shape) != n_devices:
        raise ValueError(
            f"mesh: {dict(zip(AXES, shape, strict=True))} takes {np.prod(shape)} devices, and there"
            f" are {n_devices}; the product must be that"
        )
    # Explicit axes, the default, would ask every algorithm for its arrays' layout.
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_mesh(mesh: Mesh, federation: Federation) -> None:
    """Checks that clients divide evenly over the mesh.

    Raises:
      ValueError: Names the cohort whose clients do not.
    """
    n = mesh.shape["clients"]
    for cohort in federation.cohorts:
        if cohort.n_clients % n:
            raise ValueError(
                f"mesh: clients:{n} does not divide the {cohort.n_clients} clients with the views"
                f" {cohort.view_ids}; take a divisor, or other n_clients"
            )


def sharding(mesh: Mesh | AbstractMesh, *axes: str | None) -> NamedSharding:
    """Lays leading axes of arrays along these axes of the mesh; none: a copy everywhere."""
    return NamedSharding(mesh, PartitionSpec(*axes))


def put(tree: PyTree, where: NamedSharding) -> PyTree:
    """Makes global arrays; each process reads of every array only what its own devices hold."""

    def array(x: Any) -> jax.Array:
        return jax.make_array_from_callback(x.shape, where, lambda index: np.asarray(x[index]))

    return jax.tree.map(array, tree)
