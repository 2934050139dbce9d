"""Tables are prepared, split over agents and aligned by id, all as can be worked out by hand."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfedmvc.data import (
    align_agents,
    hybrid_partition,
    prepare,
    shuffle_places,
    split_by_importance,
    split_features,
    vertical_partition,
)
from jaxfedmvc.federation import Federation

# Preparation


def test_prepare_by_hand():
    # Columns: a number, a constant, three categories (of 3 levels, of 2, of 1).
    x = [
        [1, 7, 0, 5, 2],
        [3, 7, 1, 5, 2],
        [1, 7, 0, 5, 2],  # the first row again
        [1, 7, 2, 9, 2],
        [3, 7, 2, 9, 2],
    ]
    features, labels = prepare(x, [10, 11, 12, 13, 14], categorical=(2, 3, 4))
    raw = np.array([[1, 0, 0, 0], [3, 1, 0, 0], [1, 0, 1, 1], [3, 0, 1, 1]], float)
    z = (raw - raw.mean(0)) / raw.std(0)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, z, atol=1e-6)
    np.testing.assert_array_equal(labels, [10, 11, 13, 14])


def test_categories_of_ten_levels_are_dropped():
    category, number = np.arange(20) % 10, np.arange(20)
    features, labels = prepare(np.stack([category, number], 1), None, categorical=[0])
    assert features.shape == (20, 1) and labels is None
    nine = np.stack([np.arange(20) % 9, number], 1)
    assert prepare(nine, None, categorical=[0])[0].shape == (20, 8 + 1)


def test_nursery_gives_nineteen_features():
    levels = (3, 5, 4, 4, 3, 2, 3, 3)
    x = np.indices(levels).reshape(8, -1).T  # the set has every combination once, but for two
    assert prepare(x, None, categorical=range(8))[0].shape[1] == 19


def test_shuffling_moves_rows_with_their_labels():
    x = np.random.default_rng(0).normal(size=(50, 3))
    x[20:25] = x[:5]
    plain, labels = prepare(x, np.arange(50))
    shuffled, moved = prepare(x, np.arange(50), seed=3)
    assert len(plain) == 45 and (moved != labels).any()
    order = np.argsort(moved)
    np.testing.assert_array_equal(moved[order], labels)
    np.testing.assert_array_equal(shuffled[order], plain)
    np.testing.assert_array_equal(prepare(x, None, seed=3)[0], shuffled)
    assert (prepare(x, np.arange(50), seed=4)[1] != moved).any()


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (np.ones(3), {}, "view x must be a non-empty array"),
        ([[1.0], [np.nan]], {}, "view x has 1 values that are NaN"),
        (np.ones((3, 2)), {}, "x: none of its 2 columns is left"),
        (np.eye(3), {"categorical": [3]}, "column of categorical: got 3; allowed is 0 to 2"),
        (np.eye(3), {"categorical": [-1]}, "column of categorical: got -1"),
        (np.eye(3), {"categorical": 1}, "^categorical: got 1; allowed is a sequence"),
        (np.eye(3), {"seed": -1}, "seed: got -1; allowed is 0 or more"),
    ],
)
def test_prepare_refuses(x, kwargs, message):
    with pytest.raises(ValueError, match=message):
        prepare(x, None, **kwargs)


# The split of features


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n_features=st.integers(1, 40),
    n_agents=st.integers(1, 6),
    order=st.sampled_from(["random", "sequential"]),
    overlap=st.sampled_from([0.0, 0.2, 1.0]),
    max_overlap=st.sampled_from([0.0, 0.3, 1.0]),
    overlap_order=st.sampled_from(["random", "ascending"]),
)
def test_every_feature_has_one_owner_and_copies_keep_to_the_cap(
    seed, n_features, n_agents, order, overlap, max_overlap, overlap_order
):
    n_agents = min(n_agents, n_features)
    base = split_features(seed, n_features, n_agents, order=order)
    sizes = [len(own) for own in base]
    assert sizes == [len(group) for group in np.array_split(np.arange(n_features), n_agents)]
    np.testing.assert_array_equal(np.sort(np.concatenate(base)), np.arange(n_features))
    if order == "sequential":
        np.testing.assert_array_equal(np.concatenate(base), np.arange(n_features))
    split = split_features(
        seed,
        n_features,
        n_agents,
        order=order,
        overlap=overlap,
        max_overlap=max_overlap,
        overlap_order=overlap_order,
    )
    for own, features in zip(base, split, strict=True):
        np.testing.assert_array_equal(features[: len(own)], own)
        assert len(set(features.tolist())) == len(features)
        copies, cap = len(features) - len(own), int(max_overlap * len(own))
        if overlap == 1:  # everything is offered, so the cap or the supply is reached
            assert copies == min(cap, n_features - len(own))
        else:
            assert copies <= (cap if overlap else 0)


def test_ascending_copies_by_hand():
    split = split_features(
        0, 12, 3, order="sequential", overlap=1.0, max_overlap=0.5, overlap_order="ascending"
    )
    copies = [features[4:].tolist() for features in split]
    assert copies == [[4, 5], [0, 1], [0, 1]]


@pytest.mark.parametrize("overlap_order", ["random", "ascending"])
def test_which_features_are_copied(overlap_order):
    n = 300
    counts = np.zeros(30)
    for seed in range(n):
        for features in split_features(
            seed, 30, 3, order="sequential", overlap=0.5, overlap_order=overlap_order
        ):
            counts[features[10:]] += 1
    first, last = counts[:10].sum(), counts[20:].sum()
    total = 3 * 3 * n  # ten offers and more at one half fill a cap of three almost surely
    assert 0.99 * total < counts.sum() <= total
    if overlap_order == "random":  # all features alike
        np.testing.assert_allclose(counts, total / 30, rtol=0.35)
    else:  # agents 1 and 2 take from group 0, agent 0 from group 1
        assert first > 0.6 * total and last < 0.03 * total


def test_splits_differ_by_seed_only():
    first = split_features(0, 20, 3, overlap=0.2)
    for a, b in zip(first, split_features(0, 20, 3, overlap=0.2), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first[0][:7] != split_features(1, 20, 3)[0]).any()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((0, 2, 3), {}, "n_agents: got 3 for 2 features.* an agent with no features"),
        ((0, 2, 0), {}, "n_agents: got 0; allowed is 1 or more"),
        ((0, 0, 1), {}, "n_features: got 0; allowed is 1 or more"),
        ((-1, 2, 1), {}, "seed: got"),
        ((0, 4, 2), {"order": "sorted"}, "order must be one of random, sequential; got 'sorted'"),
        ((0, 4, 2), {"overlap_order": "x"}, "overlap_order must be one of random, ascending"),
        ((0, 4, 2), {"overlap": 1.5}, "overlap: got 1.5; allowed is from 0 to 1"),
        ((0, 4, 2), {"overlap": "a"}, "overlap: got 'a'; allowed is from 0 to 1"),
        ((0, 4, 2), {"max_overlap": float("nan")}, "max_overlap: got nan; allowed is from 0 to 1"),
    ],
)
def test_split_refuses(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        split_features(*args, **kwargs)


# Federations


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 40),
    st.lists(st.floats(1e-4, 100.0), min_size=1, max_size=6),
)
def test_by_importance_every_feature_has_one_owner_and_every_agent_one_feature(seed, n, weights):
    weights = weights[:n]
    agents = split_by_importance(seed, n, weights)
    assert len(agents) == len(weights) and min(map(len, agents)) >= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(agents)), np.arange(n))
    again = split_by_importance(seed, n, weights)
    assert all(np.array_equal(a, b) for a, b in zip(agents, again, strict=True))


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.2, 0.6, 1.2), (30.0, 10.0)])
def test_shares_have_the_moments_of_the_dirichlet_distribution(weights):
    """Mean a_i / A and variance m (1 - m) / (A + 1), within four standard errors of 600 draws."""
    n, draws = 3000, 600
    shares = np.array(
        [[len(own) / n for own in split_by_importance(s, n, weights)] for s in range(draws)]
    )
    mean = np.array(weights) / sum(weights)
    variance = mean * (1 - mean) / (1 + sum(weights))
    assert (np.abs(shares.mean(axis=0) - mean) < 4 * np.sqrt(variance / draws)).all()
    spread = shares.var(axis=0, ddof=1)
    fourth = ((shares - shares.mean(axis=0)) ** 4).mean(axis=0)
    error = np.sqrt((fourth - spread**2) / draws)
    # Features drawn by these shares add a binomial's variance, mean / n at most.
    assert (np.abs(spread - variance) < 4 * error + mean / n).all()


def test_tiny_weights_give_one_agent_all_but_the_first_features():
    sizes = [sorted(map(len, split_by_importance(s, 50, [1e-4] * 4))) for s in range(20)]
    assert sizes.count([1, 1, 1, 47]) >= 18


@pytest.mark.parametrize(
    ("n", "weights", "told"),
    [
        (2, (1.0, 1.0, 1.0), "weights: got (3,) for 2 features"),
        (5, (), "weights: got (0,)"),
        (5, (1.0, 0.0), "weights: got"),
        (5, (1.0, float("nan")), "weights: got"),
    ],
)
def test_importances_that_are_none_are_refused(n, weights, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        split_by_importance(0, n, weights)


def test_vertical_partition_makes_a_federation():
    views = [np.full((5, 2), 1.0), np.arange(15.0).reshape(5, 3)]
    fed = Federation.from_arrays(views, np.arange(5), partition=vertical_partition(5, 2))
    assert [cohort.view_ids for cohort in fed.cohorts] == [(0,), (1,)]
    for agent, (cohort, view) in enumerate(zip(fed.cohorts, views, strict=True)):
        assert cohort.client_ids.tolist() == [agent]
        np.testing.assert_array_equal(cohort.sample_ids, np.arange(5)[None])
        np.testing.assert_array_equal(cohort.views[0], view[None])
    with pytest.raises(ValueError, match="n_agents: got 0; allowed is 1 or more"):
        vertical_partition(5, 0)


@pytest.mark.parametrize(
    "names", [[40, 10, 30, 20], ["d", "a", "c", "b"], [2**64 - 1, 2**64 - 4, 2**64 - 2, 2**64 - 3]]
)
@pytest.mark.parametrize("kind", [np.array, list, lambda ids: np.array(ids, object)])
def test_alignment_follows_the_first_agent(names, kind):
    x = np.arange(8.0).reshape(4, 2)
    order = np.array([2, 0, 3, 1])
    ids, arrays = align_agents([(kind(names), x), (kind([names[i] for i in order]), 10 * x[order])])
    assert ids == names
    np.testing.assert_array_equal(arrays[0], x)
    np.testing.assert_array_equal(arrays[1], 10 * x)


def test_aligned_agents_make_a_federation():
    x = np.arange(8.0).reshape(4, 2)
    fed = Federation.from_agents([(list("dacb"), x), (list("abcd"), x)])
    np.testing.assert_array_equal(fed.cohorts[1].views[0][0], x[[3, 0, 2, 1]])


X = np.ones((3, 2))


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ([], "agents: got none"),
        ([X, X], r"agent 0: got a ndarray; allowed is a pair \(ids, features\), of which"),
        ([([], np.ones((0, 2)))], "agent 0: no ids"),
        ([([1, 2, 3], X), ([], X)], "agent 1: no ids"),
        ([([1, 2, 3], X), ([3, 2, 3], X)], "agent 1: id 3 is there twice"),
        ([(["a", "b", "a"], X)], "agent 0: id 'a' is there twice"),
        ([([1, 2, 3], X), ([1, 2], X[:2])], r"agent 1: .* differ from agent 0's: 1 missing \(3\);"),
        (
            [([1, 2], X[:2]), ([2, 1], X[:2]), ([1, 2, 3], X)],
            r"agent 2: .* agent 0's: 1 extra \(3\);",
        ),
        (
            [(np.arange(9), np.ones((9, 1))), (np.arange(9) + 5, np.ones((9, 1)))],
            r"agent 1: .* 5 missing \(0, 1, 2, ...\), 5 extra \(9, 10, 11, ...\);",
        ),
        (
            [([1, 2, 3], X), (["1", "2", "3"], X)],
            r"3 missing \(1, 2, 3\), 3 extra \('1', '2', '3'\)",
        ),
        ([([1, 2, 3], X), ([1, 2], X)], "agent 1: got 2 ids for 3 rows"),
        ([([1.0, 2.0, 3.0], X)], r"agent 0: ids must be whole numbers or strings; got 1\.0"),
        ([(np.array([[1, 2, 3]]), X)], r"agent 0: ids must be .*; got \[1, 2, 3\]"),
        ([([1, 2, 3], X), ([1, 2, 3], X[0])], "view of agent 1 must be a non-empty array"),
        ([([1, 2, 3], X), ([1, 2, 3], X * np.inf)], "view of agent 1 has 6 values that are NaN"),
    ],
)
def test_alignment_refuses(agents, message):
    with pytest.raises(ValueError, match=message):
        align_agents(agents)


def test_ids_and_the_index_of_features_agree():
    pd = pytest.importorskip("pandas", reason="pandas is not installed: the extra experiments")
    features = pd.DataFrame({"hb": [1.0, 2.0, 3.0]}, index=list("cab"))
    ids, (x,) = align_agents([(features.index, features)])
    assert ids == list("cab") and x.ravel().tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="agent 0: row 0 is 'c' in the index of its features; al"):
        align_agents([(list("abc"), features)])
    series = pd.Series(["x", "y", "z"], index=list("abc"))
    with pytest.raises(ValueError, match="agent 0: features: row 0 is 'c' in its index; allowed"):
        align_agents([(series, features)])
    # An index that only counts names nothing, as where ids were a column.
    assert align_agents([([2, 0, 1], features.reset_index(drop=True))])[0] == [2, 0, 1]


def test_a_share_of_places_is_shuffled_at_all_agents_but_the_first():
    partition = vertical_partition(50, 3)
    found = shuffle_places(0, partition, 0.4)
    np.testing.assert_array_equal(found[0].sample_ids, partition[0].sample_ids)
    moved = [part.sample_ids[0] != np.arange(50) for part in found]
    for part, mine in zip(found, moved, strict=True):
        assert sorted(part.sample_ids[0]) == list(range(50)) and mine.sum() <= 20
    assert (moved[1] | moved[2]).sum() <= 20 and moved[1].sum() > 14
    assert np.flatnonzero(moved[1]).max() >= 20  # not the first rows alone
    assert (found[1].sample_ids != found[2].sample_ids).any()
    with pytest.raises(ValueError, match=r"share: got 1\.5; allowed is from 0 to 1"):
        shuffle_places(0, partition, 1.5)
    with pytest.raises(ValueError, match="share: got 'a'; allowed is from 0 to 1"):
        shuffle_places(0, partition, "a")
    with pytest.raises(ValueError, match="seed: got -1"):
        shuffle_places(-1, partition, 0.5)
    # Of a part of several clients only the first one's samples were moved.
    with pytest.raises(ValueError, match=r"parts of \[2, 2\] clients; allowed is one agent a part"):
        shuffle_places(0, hybrid_partition(0, 20, 1, 2) * 2, 0.5)
    with pytest.raises(ValueError, match=r"parts of \[\] clients"):
        shuffle_places(0, (), 0.5)


def test_shares_of_places_are_rounded_to_whole_samples():
    """Two of three, where 1.8 are asked for: they change places for every second seed."""
    found = [shuffle_places(seed, vertical_partition(3, 2), 0.6)[1] for seed in range(20)]
    moved = [(part.sample_ids[0] != np.arange(3)).sum() for part in found]
    assert set(moved) == {0, 2}
