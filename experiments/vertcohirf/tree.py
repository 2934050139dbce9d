"""The cluster fusion hierarchy on the page: a tree to look into, and to cut at any level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.lib import page
from jaxfedmvc.algorithms.vertcohirf.hierarchy import Hierarchy

# More blocks than this are too many to be drawn or seen: the lowest levels are left out.
_MOST_NODES = 1500
# Clusters of a smaller share of all samples stand together in one block.
_LEAST_SHARE = 0.005
# A level is drawn if it has so many times the clusters of the one drawn above it.
_MORE = 1.2
_MOST_LEVELS = 8
_ROOT = "all"


def figure(
    hierarchy: Hierarchy, classes: np.ndarray | None = None, called: Callable[[int], str] = str
) -> page.Figure:
    """Returns the clusters of every level within those that they fuse into.

    Args:
      hierarchy: Of a finished run.
      classes: Integer [n], told of each cluster, or None.
      called: What a class is called.
    """
    samples = np.flatnonzero(hierarchy.parents >= 0)
    final = {int(root): label for label, root in enumerate(hierarchy.roots)}
    nodes: dict[str, list[Any]] = {
        name: [] for name in ("ids", "parents", "values", "labels", "hovertext", "colors")
    }

    def add(node: str, parent: str, members: np.ndarray, label: str, colour: str) -> None:
        told = f"{label}<br>{len(members)} samples"
        if classes is not None and len(members):
            found, counts = np.unique(classes[members], return_counts=True)
            largest = np.argsort(-counts, kind="stable")[:4]
            names = [page.plain(called(found[i])) for i in largest]
            told += "".join(
                f"<br>class {c}: {counts[i]}" for c, i in zip(names, largest, strict=True)
            )
        row = (node, parent, len(members), label, told, colour)
        for values, value in zip(nodes.values(), row, strict=True):
            values.append(value)

    add(_ROOT, "", samples, "all samples", page.NO_COLOUR)
    roots = hierarchy.representatives()[samples]
    ids, sizes = np.unique(roots, return_counts=True)
    rank = {int(root): i for i, root in enumerate(ids[np.argsort(-sizes, kind="stable")])}
    block = np.full(len(samples), _ROOT, dtype=object)  # where each sample is drawn
    counts: dict[int, int] = {}  # of the levels that are drawn
    levels = range(max(hierarchy.n_levels, 1) - 1, -1, -1)
    for level in levels:
        medoids = hierarchy.representatives(level)[samples]
        n_clusters = len(np.unique(medoids))
        if counts and n_clusters < _MORE * counts[min(counts)]:
            continue
        made = _blocks(medoids, block, least=_LEAST_SHARE * len(samples))
        if counts and (len(nodes["ids"]) + len(made) > _MOST_NODES or len(counts) == _MOST_LEVELS):
            break
        counts[level] = n_clusters
        below = block.copy()
        for parent, medoid, mine in made:
            node = f"{level}/{parent if medoid is None else medoid}"
            root = int(roots[mine[0]])
            label = f"{len(np.unique(medoids[mine]))} small clusters"
            if medoid is not None:
                label = f"cluster {final[root]}" if level == levels[0] else f"medoid {medoid}"
            colour = page.NO_COLOUR
            if (roots[mine] == root).all():
                colour = page.COLOURS[rank[root] % len(page.COLOURS)]
            add(node, parent, samples[mine], label, colour)
            below[mine] = node
        block = below
    trace = {
        "type": "icicle",
        "branchvalues": "total",
        "ids": nodes["ids"],
        "parents": nodes["parents"],
        "values": nodes["values"],
        "labels": nodes["labels"],
        "hovertext": nodes["hovertext"],
        "hoverinfo": "text",
        "texttemplate": "%{label} (%{value})",
        "marker": {"colors": nodes["colors"], "line": {"width": 1}},
        "leaf": {"opacity": 1},  # or a text's contrast would be that with another colour
        "tiling": {"orientation": "h", "pad": 1},
        "pathbar": {"visible": True},
        "maxdepth": 2,
    }
    views = {
        f"level {level}: {n} clusters": {"traces": [{"maxdepth": depth + 2}], "layout": {}}
        for depth, (level, n) in enumerate(counts.items())
    }
    note = "a click on a block shows what lies in it; a button cuts the tree, as --level does"
    if len(counts) < len(levels):
        note += f"; drawn are the last level and those with {_MORE} times as many clusters"
    return page.Figure("Cluster fusion hierarchy", [trace], {"height": 560}, views, note)


def _blocks(
    medoids: np.ndarray, block: np.ndarray, least: float
) -> list[tuple[str, int | None, np.ndarray]]:
    """Returns (block above, medoid, places of the samples); small clusters of a block together."""
    made: list[tuple[str, int | None, np.ndarray]] = []
    for parent in dict.fromkeys(block):
        inside = np.flatnonzero(block == parent)
        ids, of, sizes = np.unique(medoids[inside], return_inverse=True, return_counts=True)
        small = sizes < least
        if small.sum() == 1:
            small[:] = False
        for c in np.flatnonzero(~small):
            made.append((parent, int(ids[c]), inside[of == c]))
        if small.any():
            made.append((parent, None, inside[small[of]]))
    return made
