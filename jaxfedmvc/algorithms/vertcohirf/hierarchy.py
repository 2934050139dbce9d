"""Cluster Fusion Hierarchy: which medoid represents a sample at every level of a clustering.

Every iteration merges the active samples into clusters, each of which keeps one of its members, the
medoid, as an active sample of the next iteration. Three vectors over ids 0..n-1 record it all:

  parents      int32 [n], the medoid that absorbed the sample; a sample that none has absorbed is
               its own parent; -1 is padding.
  absorbed_at  int32 [n], the iteration (from 0) in which that was; NEVER for the roots.
  roots        int32 [m], the samples never absorbed, in the order of the final clusters.

A medoid outlives what it absorbs, so absorbed_at grows along every chain of parents. Level e is the
partition after iteration e: links with absorbed_at <= e count and others do not. At level -1 every
sample is alone; at the last level the clusters are the final ones.

Source: "VertCoHiRF: decentralized vertical clustering beyond k-means", algorithm 1 and section 2.3;
Meziani et al., "CoHiRF: hierarchical consensus for interpretable clustering" (2025). Their parents
alone give the last level; `absorbed_at` gives the others.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc import files

NEVER = 2**31 - 1


def follow(parents: ArrayLike, absorbed_at: ArrayLike, level: ArrayLike | None = None) -> Array:
    """Returns the id of the sample that represents each sample at a level, by pointer doubling.

    Args:
      parents: int32 [n].
      absorbed_at: int32 [n].
      level: Scalar integer, may be traced. Below 0 every sample represents itself; from the last
        level on, and if None, the roots represent their clusters.

    Returns:
      int32 [n]; -1 for padding.

    Raises:
      ValueError: A shape is wrong, or, where the values are concrete, they are no hierarchy.
    """
    parents, absorbed_at = _check_links(parents, absorbed_at)
    if level is not None and jnp.ndim(level) != 0:
        raise ValueError(f"level: got shape {jnp.shape(level)}; allowed is a scalar")
    n = len(parents)
    own = jnp.arange(n, dtype=jnp.int32)
    counts = parents >= 0 if level is None else (parents >= 0) & (absorbed_at <= level)
    jump = jnp.where(counts, parents, own)
    # After s doublings a jump spans 2^s links, and no chain has more than n - 1.
    jump = lax.fori_loop(0, n.bit_length(), lambda _, j: j[j], jump)
    return jnp.where(parents >= 0, jump, -1)


def labels_at(
    parents: ArrayLike,
    absorbed_at: ArrayLike,
    roots: ArrayLike | None = None,
    level: ArrayLike | None = None,
) -> Array:
    """Returns dense labels 0.. of the clusters of a level.

    Args:
      parents: int32 [n].
      absorbed_at: int32 [n].
      roots: int32 [m], may be filled up with -1. From the last level on, a label is the position
        of the sample's root in it. If None, and at other levels, labels ascend with the ids of the
        samples that represent the clusters.
      level: As for `follow`.

    Returns:
      int32 [n]; -1 for padding.

    Raises:
      ValueError: A shape is wrong, or, where the values are concrete, they are no hierarchy.
    """
    parents, absorbed_at = _check_links(parents, absorbed_at)
    n = len(parents)
    stands_for = follow(parents, absorbed_at, level)
    label = jnp.cumsum(stands_for == jnp.arange(n), dtype=jnp.int32) - 1
    if roots is not None:
        roots = _check_roots(roots, parents)
        places = jnp.where(roots >= 0, roots, n)
        position = (
            jnp.full(n, -1, jnp.int32)
            .at[places]
            .set(jnp.arange(len(roots), dtype=jnp.int32), mode="drop")
        )
        is_last = level is None or jnp.all((absorbed_at <= level) | (absorbed_at == NEVER))
        label = jnp.where(is_last, position, label)
    return jnp.where(stands_for >= 0, label[stands_for], -1)


class LevelSummary(NamedTuple):
    """Clusters of one level.

    Attributes:
      level: -1 for single samples.
      n_clusters: Number of clusters.
      sizes: Samples of each cluster in the order of the labels, int [n_clusters].
    """

    level: int
    n_clusters: int
    sizes: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Hierarchy:
    """A finished hierarchy on the host.

    Attributes:
      parents: int32 [n].
      absorbed_at: int32 [n].
      roots: int32 [m].
    """

    parents: np.ndarray
    absorbed_at: np.ndarray
    roots: np.ndarray

    def __post_init__(self) -> None:
        """Takes copies as int32, without the -1 that `roots` may be filled up with.

        Raises:
          ValueError: The vectors are no hierarchy, or hold no sample.
        """
        parents, absorbed_at = _check_links(self.parents, self.absorbed_at)
        if not jnp.any(parents >= 0):
            raise ValueError("parents: got no sample; allowed is at least one that is not -1")
        roots = np.array(_check_roots(self.roots, parents))
        object.__setattr__(self, "parents", np.array(parents))
        object.__setattr__(self, "absorbed_at", np.array(absorbed_at))
        object.__setattr__(self, "roots", roots[roots >= 0])

    @property
    def n_levels(self) -> int:
        """Number of iterations up to the last that merged anything; level n_levels - 1 is final."""
        return 1 + int(self.absorbed_at[self.absorbed_at < NEVER].max(initial=-1))

    def representatives(self, level: int | None = None) -> np.ndarray:
        """Returns `follow` of this hierarchy, int32 [n]."""
        return np.asarray(_follow(self.parents, self.absorbed_at, level))

    def labels(self, level: int | None = None) -> np.ndarray:
        """Returns `labels_at` of this hierarchy, int32 [n]."""
        return np.asarray(_labels_at(self.parents, self.absorbed_at, self.roots, level))

    def summary(self) -> tuple[LevelSummary, ...]:
        """Returns number and sizes of the clusters of levels -1, 0, .., n_levels - 1."""
        levels = []
        for level in range(-1, self.n_levels):
            labels = self.labels(level)
            sizes = np.bincount(labels[labels >= 0])
            levels.append(LevelSummary(level, len(sizes), sizes))
        return tuple(levels)

    def to_json(self, path: Path) -> None:
        """Writes the three vectors as lists of integers."""
        fields = {name: value.tolist() for name, value in vars(self).items()}
        files.write_text(path, json.dumps(fields) + "\n")

    @classmethod
    def from_json(cls, path: Path) -> Hierarchy:
        """Reads a file of `to_json`.

        Raises:
          ValueError: The file holds no hierarchy.
        """
        fields = json.loads(path.read_text(encoding="utf-8"))
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(fields, dict) or sorted(fields) != sorted(names):
            raise ValueError(f"path: {path} is no hierarchy; allowed is an object of {names}")
        return cls(**{name: np.array(fields[name], int) for name in names})

    def to_csv(self, path: Path) -> None:
        """Writes a row for each sample: id, parent, absorbed_at (empty for roots), final label."""
        columns = self.parents.tolist(), self.absorbed_at.tolist(), self.labels().tolist()
        with files.replacing(path) as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("id", "parent", "absorbed_at", "label"))
            for i, (parent, at, label) in enumerate(zip(*columns, strict=True)):
                if parent >= 0:
                    writer.writerow((i, parent, "" if at == NEVER else at, label))


_follow = jax.jit(follow)
_labels_at = jax.jit(labels_at)


def _check_links(parents: ArrayLike, absorbed_at: ArrayLike) -> tuple[Array, Array]:
    """Returns both as int32 arrays, their values checked where both are concrete."""
    parents, absorbed_at = _as_ids("parents", parents), _as_ids("absorbed_at", absorbed_at)
    if absorbed_at.shape != parents.shape:
        raise ValueError(
            f"absorbed_at: got shape {absorbed_at.shape}; allowed is that of parents,"
            f" {parents.shape}"
        )
    if any(isinstance(value, jax.core.Tracer) for value in (parents, absorbed_at)):
        return parents, absorbed_at
    above, at = np.asarray(parents), np.asarray(absorbed_at)
    n, own = len(above), np.arange(len(above))
    samples = above >= 0
    known = np.clip(above, 0, max(n - 1, 0))
    wrong = (above < -1) | (above >= n) | (samples & ~samples[known])
    _refuse("parents", wrong, above, f"ids of samples below {n}, or -1 for padding")
    wrong = samples & ((at < 0) | ((at == NEVER) != (above == own)))
    _refuse("absorbed_at", wrong, at, f"{NEVER} for roots, 0 or more for others")
    wrong = samples & (above != own) & (at[known] <= at)
    _refuse("absorbed_at", wrong, at, "less than the parent's")
    return parents, absorbed_at


def _check_roots(roots: ArrayLike, parents: Array) -> Array:
    """Returns the roots as an int32 array, checked to be all roots where both are concrete."""
    roots = _as_ids("roots", roots)
    if not any(isinstance(value, jax.core.Tracer) for value in (roots, parents)):
        values = np.asarray(roots)
        expected = np.flatnonzero(np.asarray(parents) == np.arange(len(parents)))
        if not np.array_equal(np.sort(values[values != -1]), expected):
            raise ValueError(
                f"roots: got {values}; allowed are the samples that are their own"
                f" parents, each once: {expected}"
            )
    return roots


def _as_ids(name: str, value: ArrayLike) -> Array:
    value = jnp.asarray(value)
    if value.ndim != 1 or not (jnp.issubdtype(value.dtype, jnp.integer) or value.size == 0):
        raise ValueError(
            f"{name}: got {value.dtype} of shape {value.shape}; allowed are integers"
            " in one dimension"
        )
    return value.astype(jnp.int32)


def _refuse(name: str, wrong: np.ndarray, values: np.ndarray, allowed: str) -> None:
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ValueError(f"{name}: got {values[i]} for sample {i}; allowed is {allowed}")
