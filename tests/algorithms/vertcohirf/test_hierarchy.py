"""The fusion hierarchy: a worked case, naive pointer chasing as oracle, and files."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfedmvc.algorithms.vertcohirf.hierarchy import NEVER, Hierarchy, follow, labels_at

# Seven samples by hand. Iteration 0 merges {0, 2} under 2 and {3, 5} under 3; iteration 1 merges
# {1, 2} under 1 and {4, 6} under 6; iteration 2 merges {3, 6} under 3, listed before 1.
PARENTS = np.array([2, 1, 1, 3, 6, 3, 3])
ABSORBED_AT = np.array([0, NEVER, 1, NEVER, 1, 0, 2])
ROOTS = np.array([3, 1])
STANDS_FOR = {
    -1: [0, 1, 2, 3, 4, 5, 6],
    0: [2, 1, 2, 3, 4, 3, 6],
    1: [1, 1, 1, 3, 6, 3, 6],
    2: [1, 1, 1, 3, 3, 3, 3],
    None: [1, 1, 1, 3, 3, 3, 3],
}
LABELS = {
    -1: [0, 1, 2, 3, 4, 5, 6],
    0: [1, 0, 1, 2, 3, 2, 4],
    1: [0, 0, 0, 1, 2, 1, 2],
    2: [1, 1, 1, 0, 0, 0, 0],
    None: [1, 1, 1, 0, 0, 0, 0],
}
SEVEN = Hierarchy(PARENTS, ABSORBED_AT, ROOTS)

# One compilation for all levels, and for all hierarchies of a size.
follow_jit = jax.jit(follow)
labels_jit = jax.jit(labels_at)


@pytest.mark.parametrize("level", STANDS_FOR)
def test_every_level_of_seven_samples(level):
    stands_for = follow_jit(PARENTS, ABSORBED_AT, level)
    assert stands_for.dtype == jnp.int32
    np.testing.assert_array_equal(stands_for, STANDS_FOR[level])
    labels = labels_jit(PARENTS, ABSORBED_AT, ROOTS, level)
    assert labels.dtype == jnp.int32
    np.testing.assert_array_equal(labels, LABELS[level])
    np.testing.assert_array_equal(SEVEN.representatives(level), STANDS_FOR[level])
    np.testing.assert_array_equal(SEVEN.labels(level), LABELS[level])


@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_a_chain_of_all_samples_is_followed_to_its_end(n):
    parents = np.minimum(np.arange(n) + 1, n - 1)
    absorbed_at = np.append(np.arange(n - 1), NEVER)
    assert follow(parents, absorbed_at).tolist() == [n - 1] * n


@pytest.mark.parametrize("level", [2, 7, None])
def test_without_roots_final_labels_are_in_order_of_ids(level):
    labels = labels_jit(PARENTS, ABSORBED_AT, None, level)
    np.testing.assert_array_equal(labels, [0, 0, 0, 1, 1, 1, 1])


def test_levels_past_either_end_are_the_ends():
    np.testing.assert_array_equal(SEVEN.labels(-5), LABELS[-1])
    np.testing.assert_array_equal(SEVEN.labels(99), LABELS[2])
    np.testing.assert_array_equal(SEVEN.labels(NEVER), LABELS[2])


def test_padding_has_label_minus_one_and_changes_nothing():
    parents = np.concatenate([PARENTS, [-1, -1]])
    absorbed_at = np.concatenate([ABSORBED_AT, [NEVER, 0]])
    for level, expected in LABELS.items():
        labels = labels_jit(parents, absorbed_at, np.concatenate([ROOTS, [-1]]), level)
        np.testing.assert_array_equal(labels, [*expected, -1, -1])
        stands_for = follow_jit(parents, absorbed_at, level)
        np.testing.assert_array_equal(stands_for, [*STANDS_FOR[level], -1, -1])


def test_the_level_is_traced_and_batches():
    traces = []

    @jax.jit
    def labels(level):
        traces.append(level)
        return labels_at(PARENTS, ABSORBED_AT, ROOTS, level)

    loop = [labels(level) for level in range(-1, 3)]
    assert len(traces) == 1
    batch = jax.vmap(labels)(jnp.arange(-1, 3))
    np.testing.assert_array_equal(batch, np.stack(loop))


@pytest.mark.parametrize("n", [1, 2, 3, 64, 65])
def test_follows_the_longest_chain_there_can_be(n):
    # Sample i is absorbed by i + 1 in iteration i.
    parents = np.minimum(np.arange(n) + 1, n - 1)
    absorbed_at = np.array([*range(n - 1), NEVER])
    np.testing.assert_array_equal(follow_jit(parents, absorbed_at), np.full(n, n - 1))
    half = n // 2 - 1
    expected = np.maximum(np.arange(n), half + 1)
    np.testing.assert_array_equal(follow_jit(parents, absorbed_at, half), expected)


@st.composite
def hierarchies(draw, n=16):
    """Any hierarchy of n rows: a parent is any sample absorbed later; None is padding."""
    at = draw(st.lists(st.sampled_from([0, 1, 2, 3, NEVER, None]), min_size=n, max_size=n))
    at[draw(st.integers(0, n - 1))] = NEVER
    choice = draw(st.lists(st.integers(0, 10**6), min_size=n, max_size=n))
    parents = np.full(n, -1)
    for i in range(n):
        later = [j for j in range(n) if at[i] is not None and at[j] is not None and at[j] > at[i]]
        if at[i] is not None:
            parents[i] = later[choice[i] % len(later)] if at[i] != NEVER else i
    roots = np.array(draw(st.permutations([i for i in range(n) if at[i] == NEVER])))
    return Hierarchy(parents, np.array([NEVER if a is None else a for a in at]), roots)


@settings(max_examples=60, deadline=None)
@given(hierarchies())
def test_follow_is_pointer_chasing_and_levels_are_nested(hierarchy):
    n = len(hierarchy.parents)
    finer = np.arange(n)
    for level in range(-1, 5):
        expected = []
        for i in range(n):
            while hierarchy.absorbed_at[i] <= level and hierarchy.parents[i] >= 0:
                i = hierarchy.parents[i]
            expected.append(i if hierarchy.parents[i] >= 0 else -1)
        np.testing.assert_array_equal(hierarchy.representatives(level), expected)
        labels = hierarchy.labels(level)
        samples = labels >= 0
        np.testing.assert_array_equal(samples, hierarchy.parents >= 0)
        assert set(labels[samples]) == set(range(labels.max() + 1))
        # Same label as before, same label now: each finer cluster lies in one coarser cluster.
        pairs = {*zip(finer[samples], labels[samples], strict=True)}
        assert len(pairs) == len(set(finer[samples]))
        finer = labels
    np.testing.assert_array_equal(hierarchy.roots[labels[samples]], np.array(expected)[samples])
    assert hierarchy.n_levels == 1 + max(
        (at for at in hierarchy.absorbed_at[samples] if at < NEVER), default=-1
    )


def test_summary_counts_clusters_and_sizes():
    levels = SEVEN.summary()
    assert [(s.level, s.n_clusters) for s in levels] == [(-1, 7), (0, 5), (1, 3), (2, 2)]
    assert [s.sizes.tolist() for s in levels] == [[1] * 7, [1, 2, 2, 1, 1], [3, 2, 2], [4, 3]]
    alone = Hierarchy(np.arange(3), np.full(3, NEVER), np.array([2, 0, 1]))
    assert alone.n_levels == 0
    assert [(s.level, s.n_clusters) for s in alone.summary()] == [(-1, 3)]
    np.testing.assert_array_equal(alone.labels(), [1, 2, 0])


PADDED = Hierarchy(np.append(PARENTS, -1), np.append(ABSORBED_AT, NEVER), np.array([3, 1, -1]))


@pytest.mark.parametrize("hierarchy", [SEVEN, PADDED], ids=["seven", "padded"])
def test_json_round_trip(tmp_path, hierarchy):
    path = tmp_path / "hierarchy.json"
    path.write_text("old")
    hierarchy.to_json(path)
    assert list(tmp_path.iterdir()) == [path]
    back = Hierarchy.from_json(path)
    for name in ("parents", "absorbed_at", "roots"):
        value = getattr(back, name)
        assert value.dtype == np.int32
        np.testing.assert_array_equal(value, getattr(hierarchy, name))
    np.testing.assert_array_equal(back.roots, ROOTS)


def test_csv_has_a_row_for_each_sample(tmp_path):
    path = tmp_path / "hierarchy.csv"
    PADDED.to_csv(path)
    assert list(tmp_path.iterdir()) == [path]
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["id", "parent", "absorbed_at", "label"],
        ["0", "2", "0", "1"],
        ["1", "1", "", "1"],
        ["2", "1", "1", "1"],
        ["3", "3", "", "0"],
        ["4", "6", "1", "0"],
        ["5", "3", "0", "0"],
        ["6", "3", "2", "0"],
    ]


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "other.json"
    for content in ({"parents": [0]}, [1, 2]):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"path.*other\.json is no hierarchy"):
            Hierarchy.from_json(path)


@pytest.mark.parametrize(
    ("parents", "absorbed_at", "roots", "match"),
    [
        ([[0]], [NEVER], [0], "parents: got int32 of shape"),
        ([0.0], [NEVER], [0], "parents: got float32"),
        ([0, 1], [NEVER], [0, 1], "absorbed_at: got shape"),
        ([0, 2], [NEVER, 0], [0], "parents: got 2 for sample 1"),
        ([-2, 1], [NEVER, NEVER], [1], "parents: got -2 for sample 0"),
        ([1, -1], [0, NEVER], [], "parents: got 1 for sample 0"),
        ([0, 1], [NEVER, 0], [0], "absorbed_at: got 0 for sample 1"),
        ([0, 0], [NEVER, NEVER], [0], f"absorbed_at: got {NEVER} for sample 1"),
        ([0, 0], [NEVER, -1], [0], "absorbed_at: got -1 for sample 1"),
        ([1, 2, 2], [3, 3, NEVER], [2], "absorbed_at: got 3 for sample 0"),
        ([1, 0], [0, 0], [], "absorbed_at: got 0 for sample 0"),
        ([0, 0], [NEVER, 0], [1], "roots: got"),
        ([0, 1], [NEVER, NEVER], [0], "roots: got"),
        ([0, 1], [NEVER, NEVER], [0, 1, 1], "roots: got"),
        ([-1, -1], [NEVER, NEVER], [], "parents: got no sample"),
    ],
)
def test_what_is_no_hierarchy_is_refused(parents, absorbed_at, roots, match):
    with pytest.raises(ValueError, match=match):
        Hierarchy(np.array(parents), np.array(absorbed_at), np.array(roots, int))


def test_a_level_is_a_scalar():
    with pytest.raises(ValueError, match="level: got shape"):
        follow(PARENTS, ABSORBED_AT, np.array([0, 1]))


def test_a_hierarchy_keeps_its_own_copies():
    parents = PARENTS.copy()
    hierarchy = Hierarchy(parents, ABSORBED_AT, ROOTS)
    parents[:] = 0
    np.testing.assert_array_equal(hierarchy.parents, PARENTS)
