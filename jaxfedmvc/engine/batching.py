"""Many runs as one program: seeds and hyper-parameters are a leading axis of a whole federation.

    program = jax.jit(batched(one_run, source.build))
    place(source, mesh) -> arrays; program(shared, by_seed, hyperparams, seeds, places)

A batch is a flat list of runs, each a setting and a seed: every setting meets the same seeds, and a
batch of any size will do. Data of all seeds lie on the device once, as indices into pooled views
where the seeds only deal samples out differently; a run picks its seed's inside the program.

Over a mesh with the axes "sweep" (runs) and "clients", arrays are laid out, and the algorithms stay
as they are: axes are of type Auto, so that the compiler cuts the vmapped program to pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxfedmvc.data.dataset import check_arrays, check_rows
from jaxfedmvc.data.partition import Part
from jaxfedmvc.engine import phases
from jaxfedmvc.engine.mesh import put, sharding
from jaxfedmvc.federation import Cohort, Federation, check_held, check_partition

PyTree = Any


# --- Data of several seeds ------------------------------------------------------------------------


class Source(NamedTuple):
    """Federations of several seeds, all of the same shapes.

    Attributes:
      shared: Arrays that every seed reads.
      by_seed: Arrays [seeds, clients, ...], or what is sliced like one.
      build: `(shared, one seed's) -> Federation`, pure.
    """

    shared: PyTree
    by_seed: PyTree
    build: Callable[[PyTree, PyTree], Federation]


class _Rows:
    """Rows of a pooled array by sample id [seeds, clients, rows], read when they are sliced.

    So that no more is read of a memory-mapped file than the clients that live here hold.
    """

    def __init__(self, pooled: np.ndarray, ids: np.ndarray, padding: float) -> None:
        self.pooled, self.ids, self.padding = pooled, ids, padding
        self.shape = ids.shape + pooled.shape[1:]
        self.dtype = pooled.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        ids = self.ids[index[:3] if isinstance(index, tuple) else index]
        rows = self.pooled[np.maximum(ids, 0)]
        if not np.isfinite(rows).all():
            raise ValueError("views: some values are NaN or infinite; allowed are finite numbers")
        present = (ids >= 0).reshape(*ids.shape, *(1,) * (rows.ndim - ids.ndim))
        return np.where(present, rows, rows.dtype.type(self.padding))


def pooled(
    views: Sequence[Any],
    labels: Any | None,
    partitions: Sequence[Sequence[Part]],
    *,
    dealt: bool = False,
) -> Source:
    """Arranges seeds that deal the same samples out differently.

    Args:
      views: One array [n, D_v] for each view.
      labels: [n] integers, for scoring only, or None.
      partitions: For each seed as `Federation.from_arrays` takes it, alike in shapes and views.
      dealt: False: the device holds the pooled views, and clients' rows are gathered inside the
        program. True: every client's rows are arrays of their own, and a device or a process of a
        mesh reads and holds those of its own clients only.

    Raises:
      ValueError: As `Federation.from_arrays`, or shapes differ between seeds.
    """
    if dealt:  # values are checked as they are read
        check_rows(views, labels)
    else:
        check_arrays(views, labels)
    first = partitions[0]
    for partition in partitions:
        check_partition(partition, n_samples=len(views[0]), n_views=len(views))
        if _layout(partition) != _layout(first):
            raise ValueError(
                f"partitions: one seed has the views and shapes {_layout(partition)}, the first has"
                f" {_layout(first)}; they must be alike"
            )
    check_held(views, itertools.chain.from_iterable(partitions))
    ids = [np.stack([p[c].sample_ids for p in partitions]) for c in range(len(first))]
    clients = [
        np.stack([np.asarray(p[c].client_ids, np.int32) for p in partitions])
        for c in range(len(first))
    ]
    kinds = tuple(tuple(part.view_ids) for part in first)
    dims = tuple(int(np.shape(view)[1]) for view in views)
    classes, n_classes = None, None
    if labels is not None:
        names, classes = np.unique(np.asarray(labels), return_inverse=True)
        classes, n_classes = classes.astype(np.int32), len(names)

    # A memory-mapped view of float32 stays one.
    everything = tuple(np.asanyarray(view, np.float32) for view in views)
    if not dealt:
        gathered = _Gathered(kinds, dims, n_classes)
        return Source((everything, classes), (tuple(ids), tuple(clients)), gathered)
    rows = tuple(
        tuple(_Rows(everything[v], i, 0.0) for v in kind)
        for kind, i in zip(kinds, ids, strict=True)
    )
    truth = None if classes is None else tuple(_Rows(classes, i, -1) for i in ids)
    by_seed = rows, truth, tuple(ids), tuple(clients)
    return Source((), by_seed, _Dealt(kinds, dims, n_classes))


@dataclass(frozen=True)
class _Dealt:
    """Makes a federation of every client's own rows; equal ones are one function to `jax.jit`."""

    kinds: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    n_classes: int | None

    def __call__(self, _: PyTree, one: PyTree) -> Federation:
        rows, truth, held, names = one
        cohorts = tuple(
            Cohort(tuple(x), mask=i >= 0, sample_ids=i, client_ids=n, view_ids=kind)
            for x, i, n, kind in zip(rows, held, names, self.kinds, strict=True)
        )
        return Federation(cohorts, truth, self.dims, self.n_classes)


@dataclass(frozen=True)
class _Gathered(_Dealt):
    """Makes a federation of pooled views and the ids of the rows that every client holds."""

    def __call__(self, shared: PyTree, one: PyTree) -> Federation:
        all_views, all_labels = shared

        def take(x: Any, i: Any, padding: float) -> Any:
            present = (i >= 0).reshape(*i.shape, *(1,) * (x.ndim - 1))
            return jnp.where(present, x[jnp.maximum(i, 0)], jnp.asarray(padding, x.dtype))

        held, names = one
        rows = [
            tuple(take(all_views[v], i, 0) for v in kind)
            for kind, i in zip(self.kinds, held, strict=True)
        ]
        truth = None if all_labels is None else tuple(take(all_labels, i, -1) for i in held)
        return super().__call__((), (rows, truth, held, names))


def _layout(partition: Sequence[Part]) -> list[tuple]:
    return [(tuple(part.view_ids), np.shape(part.sample_ids)) for part in partition]


def stacked(federations: Sequence[Federation]) -> Source:
    """Arranges seeds with data of their own; where all are equal, one copy serves them all.

    Raises:
      ValueError: Shapes, views or numbers of classes differ between seeds.
    """
    first = federations[0]
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(first)]
    for federation in federations:
        other = [np.shape(leaf) for leaf in jax.tree.leaves(federation)]
        alike = [cohort.view_ids for cohort in federation.cohorts] == [
            cohort.view_ids for cohort in first.cohorts
        ]
        if federation.n_classes != first.n_classes:
            raise ValueError(
                f"federations: one seed has {federation.n_classes} classes, the first"
                f" {first.n_classes}; runs of one program must be alike"
            )
        if not alike or other != shapes:
            raise ValueError(
                f"federations: one seed has arrays of the shapes {other}, the first of {shapes};"
                " runs of one program must be alike"
            )
    by_seed = jax.tree.map(lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *federations)
    if all((x == x[:1]).all() for x in jax.tree.leaves(by_seed)):
        return Source(first, (), lambda shared, _: shared)
    return Source((), by_seed, lambda _, one: one)


# --- The program ----------------------------------------------------------------------------------


def batched(
    one_run: Callable[[PyTree, jax.Array, Federation], PyTree],
    build: Callable[[PyTree, PyTree], Federation],
    mesh: Mesh | None = None,
) -> Callable[[PyTree, PyTree, PyTree, jax.Array, jax.Array], PyTree]:
    """Returns the program of a batch of B runs; pure, to be jitted.

    Args:
      one_run: `(hyperparams, key, federation) -> outputs`, e.g. around `engine.run`.
      build: Of the `Source`.
      mesh: Where runs and clients are laid out; None for one device.

    Returns:
      `(shared, by_seed, hyperparams, seeds, places) -> outputs` with a leading axis [B]:
      hyperparams has leaves [B], seeds int32 [B] become the runs' keys, and places int32 [B] say
      which of the source's seeds a run's data are of.
    """

    def program(
        shared: PyTree, by_seed: PyTree, hyperparams: PyTree, seeds: jax.Array, places: jax.Array
    ) -> PyTree:
        def one(hyperparams: PyTree, seed: jax.Array, data: PyTree) -> PyTree:
            return one_run(hyperparams, jax.random.key(seed), build(shared, data))

        mine = jax.tree.map(lambda x: x[places], by_seed)
        if mesh is not None:
            mine = jax.lax.with_sharding_constraint(mine, sharding(mesh, "sweep", "clients"))
        return phases.batched(one, len(seeds))(hyperparams, seeds, mine)

    return program


# --- Devices and hosts ----------------------------------------------------------------------------


def place(source: Source, mesh: Mesh | None = None) -> tuple[PyTree, PyTree]:
    """Puts the source's arrays on the device, or over the mesh with clients along "clients"."""
    if mesh is None:
        return jax.tree.map(lambda x: jax.device_put(x[...]), (source.shared, source.by_seed))
    return (
        put(source.shared, sharding(mesh)),
        put(source.by_seed, sharding(mesh, None, "clients")),
    )


def shapes(source: Source) -> tuple[PyTree, PyTree]:
    """Returns those of the arrays that `place` puts on one device; nothing is read or placed."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)),
        (source.shared, source.by_seed),
    )


# --- Memory ---------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Says whether an error means that the device's memory is used up."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
