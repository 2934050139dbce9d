"""The hierarchy on the page: blocks add up, buttons cut where the hierarchy has its levels."""

import numpy as np
import pytest

from experiments.vertcohirf import tree
from jaxfedmvc.algorithms.vertcohirf.hierarchy import NEVER, Hierarchy


def random_hierarchy(n, n_levels, seed):
    """At each level half of the medoids are absorbed by another one that goes on."""
    rng = np.random.default_rng(seed)
    parents, absorbed_at, active = np.arange(n), np.full(n, NEVER), np.arange(n)
    for level in range(n_levels):
        active = rng.permutation(active)
        kept, gone = np.split(active, [len(active) - len(active) // 2])
        parents[gone], absorbed_at[gone] = rng.choice(kept, len(gone)), level
        active = kept
    return Hierarchy(parents, absorbed_at, np.sort(active))


@pytest.mark.parametrize(("n", "n_levels"), [(1, 0), (40, 3), (3000, 10)])
def test_blocks_add_up_and_buttons_are_levels(n, n_levels):
    hierarchy = random_hierarchy(n, n_levels, seed=1)
    figure = tree.figure(hierarchy, np.arange(n) % 3)
    (trace,) = figure.traces
    assert len(set(trace["ids"])) == len(trace["ids"]) <= 1500
    values = dict(zip(trace["ids"], trace["values"], strict=True))
    inside = dict.fromkeys(values, 0)
    for parent, value in zip(trace["parents"], trace["values"], strict=True):
        if parent:
            inside[parent] += value
    assert values["all"] == n
    assert all(inside[node] in (0, values[node]) for node in values)
    sizes = {level.level: level.n_clusters for level in hierarchy.summary()}
    last = max(n_levels - 1, 0)
    assert next(iter(figure.views)) == f"level {last}: {sizes.get(last, n)} clusters"
    for depth, view in enumerate(figure.views):
        level, count = view.removeprefix("level ").removesuffix(" clusters").split(": ")
        assert int(count) == sizes.get(int(level), n)
        assert figure.views[view]["traces"] == [{"maxdepth": depth + 2}]


def test_two_clusters_by_hand():
    # Samples 0 and 1 join at level 0, 2 and 3 too; then 2 joins 0.
    hierarchy = Hierarchy(
        np.array([0, 0, 0, 2, 4]), np.array([NEVER, 0, 1, 0, NEVER]), np.array([0, 4])
    )
    (trace,) = tree.figure(hierarchy, np.array([7, 7, 8, 8, 9])).traces
    blocks = dict(
        zip(trace["ids"], zip(trace["parents"], trace["values"], strict=True), strict=True)
    )
    assert blocks == {
        "all": ("", 5),
        "1/0": ("all", 4),
        "1/4": ("all", 1),
        "0/0": ("1/0", 2),
        "0/2": ("1/0", 2),
        "0/4": ("1/4", 1),
    }
    told = dict(zip(trace["ids"], trace["hovertext"], strict=True))
    assert told["1/0"] == "cluster 0<br>4 samples<br>class 7: 2<br>class 8: 2"
    (trace,) = tree.figure(hierarchy, np.zeros(5, int), lambda c: "age <b> 5").traces
    assert trace["hovertext"][0].endswith("class age &lt;b&gt; 5: 5")
    colours = dict(zip(trace["ids"], trace["marker"]["colors"], strict=True))
    assert colours["0/2"] == colours["1/0"] != colours["1/4"]
