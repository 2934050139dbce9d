"""Partitions deal every sample out once, in shapes that do not depend on the seed."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfedmvc.data.partition import hybrid_partition, parse_ratio, partition_as_held


def rows_by_client(parts):
    """The samples of each client without padding, by client id."""
    rows = {}
    for part in parts:
        assert part.sample_ids.dtype == part.client_ids.dtype == np.int32
        for client, row in zip(part.client_ids, part.sample_ids, strict=True):
            size = int((row >= 0).sum())
            assert (row[:size] >= 0).all() and (row[size:] == -1).all()
            rows[int(client)] = row[:size]
    return [rows[client] for client in sorted(rows)]


def class_chi_square(parts, labels):
    """Chi-square of the clients' class counts against the same class mix everywhere."""
    n_classes = labels.max() + 1
    counts = np.array([np.bincount(labels[r], minlength=n_classes) for r in rows_by_client(parts)])
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    return ((counts - expected) ** 2 / expected).sum()


@pytest.mark.parametrize(
    ("n_clients", "ratio", "n_full"),
    [
        (24, (2, 1), 16),
        (24, (1, 1), 12),
        (24, (1, 2), 8),
        (24, (1, 0), 24),
        (5, (1, 1), 3),  # 2.5 rounds up
        (5, (1, 3), 1),  # 1.25 rounds down
        (2, (1, 3), 1),  # 0.5 rounds up
    ],
)
def test_ratio_table(n_clients, ratio, n_full):
    parts = hybrid_partition(0, 100, 2, n_clients, ratio=ratio)
    assert parts[0].view_ids == (0, 1)
    np.testing.assert_array_equal(parts[0].client_ids, np.arange(n_full))
    partial = [client for part in parts[1:] for client in part.client_ids]
    assert sorted(partial) == list(range(n_full, n_clients))


def test_subsets_are_dealt_in_turn():
    parts = hybrid_partition(0, 100, 3, 9, ratio=(4, 5), partial_views=2)
    assert [part.view_ids for part in parts] == [(0, 1, 2), (0, 1), (0, 2), (1, 2)]
    clients = [part.client_ids.tolist() for part in parts]
    assert clients == [[0, 1, 2, 3], [4, 7], [5, 8], [6]]


def test_cohorts_without_clients_are_left_out():
    parts = hybrid_partition(0, 100, 5, 4, ratio=(1, 1))
    assert [part.view_ids for part in parts] == [(0, 1, 2, 3, 4), (0,), (1,)]
    (part,) = hybrid_partition(0, 100, 1, 4, ratio=(1, 3))
    assert part.view_ids == (0,) and part.sample_ids.shape == (4, 25)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n_samples=st.integers(1, 90),
    n_views=st.integers(1, 4),
    n_clients=st.integers(1, 20),
    ratio=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    dirichlet=st.sampled_from([None, 1e-12, 0.1, 1.0, 1e6]),
    fixed=st.booleans(),
)
def test_samples_are_dealt_once_in_equal_sizes(
    seed, n_samples, n_views, n_clients, ratio, dirichlet, fixed
):
    n_clients = min(n_clients, n_samples)
    if n_clients * ratio[0] * 2 < sum(ratio):
        ratio = (1, 0)  # too few clients for one to hold all views
    size = n_samples // n_clients if fixed else None
    labels = np.random.default_rng(seed).integers(-1, 4, n_samples)
    kwargs = dict(
        ratio=ratio,
        partial_views=max(1, n_views - 1),
        samples_per_client=size,
        dirichlet=dirichlet,
        labels=labels,
    )
    parts = hybrid_partition(seed, n_samples, n_views, n_clients, **kwargs)
    rows = rows_by_client(parts)
    dealt = np.concatenate(rows)
    assert len(rows) == n_clients
    assert len(set(dealt.tolist())) == len(dealt)
    sizes = sorted({len(row) for row in rows})
    if fixed:
        assert sizes == [size]
    else:
        np.testing.assert_array_equal(np.sort(dealt), np.arange(n_samples))
        assert sizes[0] >= 1 and sizes[-1] - sizes[0] <= 1
    assert {part.sample_ids.shape[1] for part in parts} == {sizes[-1]}
    assert all(
        part.view_ids in itertools.combinations(range(n_views), len(part.view_ids))
        for part in parts
    )


@pytest.mark.parametrize("dirichlet", [None, 0.2])
def test_seed_changes_samples_but_never_shapes(dirichlet):
    labels = np.arange(103) % 4

    def deal(seed):
        return hybrid_partition(seed, 103, 3, 10, ratio=(2, 1), dirichlet=dirichlet, labels=labels)

    def layout(parts):
        return [(p.view_ids, p.sample_ids.shape, p.client_ids.tolist()) for p in parts]

    first = deal(0)
    for one, other in zip(first, deal(0), strict=True):
        np.testing.assert_array_equal(one.sample_ids, other.sample_ids)
    for seed in (1, 2, 3):
        parts = deal(seed)
        assert layout(parts) == layout(first)
        sizes = [(p.sample_ids >= 0).sum(axis=1).tolist() for p in parts]
        assert sizes == [(p.sample_ids >= 0).sum(axis=1).tolist() for p in first]
        assert not np.array_equal(parts[0].sample_ids, first[0].sample_ids)


@pytest.mark.parametrize("seed", range(3))
def test_dirichlet_skews_more_when_smaller(seed):
    labels = np.repeat(np.arange(5), [300, 250, 200, 150, 100])

    def chi_square(beta, size=None):
        parts = hybrid_partition(
            seed, 1000, 2, 10, samples_per_client=size, dirichlet=beta, labels=labels
        )
        return class_chi_square(parts, labels)

    # Under one class mix for all, the statistic has mean 36 and standard deviation 8.5; ten
    # clients of one class each would reach 4000.
    assert class_chi_square(hybrid_partition(seed, 1000, 2, 10), labels) < 70
    assert 10 < chi_square(1e6, size=50) < 70
    # With all samples dealt, the last client also takes up what the others left by chance.
    assert 10 < chi_square(1e6) < 150
    assert chi_square(0.1) > 3 * chi_square(10.0) > 3 * 150


@pytest.mark.parametrize("beta", [0.1, 1.0, 10.0, 1e6])
def test_dirichlet_spread_of_class_counts_is_the_known_one(beta):
    # With classes too large to run out, counts are Dirichlet-multinomial: a client's chi-square
    # against the class shares has mean (K - 1) (m + b) / (1 + b) for m samples.
    n, m, shares = 40_000, 20, np.array([0.3, 0.25, 0.2, 0.15, 0.1])
    labels = np.repeat(np.arange(5), (n * shares).astype(int))
    parts = hybrid_partition(0, n, 2, 400, samples_per_client=m, dirichlet=beta, labels=labels)
    counts = np.array([np.bincount(labels[row], minlength=5) for row in rows_by_client(parts)])
    statistic = ((counts - m * shares) ** 2 / (m * shares)).sum(axis=1).mean()
    np.testing.assert_allclose(statistic, 4 * (m + beta) / (1 + beta), rtol=0.12)


def test_dirichlet_gives_single_class_clients_in_the_limit():
    # Five clients of 20 out of five classes of 100: no class runs out.
    labels = np.repeat(np.arange(5), 100)
    parts = hybrid_partition(0, 500, 2, 5, samples_per_client=20, dirichlet=1e-12, labels=labels)
    assert all(len(set(labels[row])) == 1 for row in rows_by_client(parts))


def test_dirichlet_skews_multi_view_and_partial_clients_alike():
    labels = np.arange(1000) % 10
    largest = np.zeros((40, 10))
    for seed in range(40):
        parts = hybrid_partition(seed, 1000, 2, 10, dirichlet=0.1, labels=labels)
        for client, row in enumerate(rows_by_client(parts)):
            largest[seed, client] = np.bincount(labels[row]).max() / len(row)
    multi, partial = largest[:, :5].mean(), largest[:, 5:].mean()
    assert abs(multi - partial) < 0.06


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": -1}, "seed: got -1; allowed is 0 or more"),
        ({"n_samples": 0}, "n_samples: got 0; allowed is 1 or more"),
        ({"n_views": 1.5}, "n_views: got 1.5; allowed is a whole number, 1 or more"),
        ({"n_clients": 0}, "n_clients: got 0; allowed is 1 to 50"),
        ({"n_clients": 51}, "n_clients: got 51; allowed is 1 to 50"),
        ({"ratio": (0, 1)}, "ratio 0:1 leaves no multi-view client"),
        ({"ratio": (0, 0)}, "ratio 0:0 leaves no multi-view client"),
        ({"ratio": (1, 99)}, "ratio 1:99 leaves no multi-view client among n_clients=6"),
        ({"ratio": (1, -1)}, "each side of ratio: got -1; allowed is 0 or more"),
        ({"ratio": (1, 1, 1)}, "ratio must be two whole numbers"),
        ({"partial_views": 0}, "partial_views: got 0; allowed is 1 to 2"),
        ({"partial_views": 3}, "partial_views: got 3; allowed is 1 to 2"),
        ({"samples_per_client": 0}, "samples_per_client: got 0; allowed is 1 to 8"),
        ({"samples_per_client": 9}, "samples_per_client: got 9; allowed is 1 to 8"),
        ({"ratio": 3}, "ratio must be two whole numbers; got 3"),
        ({"n_views": 1, "partial_views": "x"}, "partial_views: got 'x'; allowed is a whole"),
        ({"dirichlet": 0.0, "labels": np.zeros(50)}, "dirichlet: got 0.0; allowed is a finite"),
        ({"dirichlet": np.nan, "labels": np.zeros(50)}, "dirichlet: got nan; allowed is a finite"),
        ({"dirichlet": "a", "labels": np.zeros(50)}, "dirichlet: got 'a'; allowed is a finite"),
        ({"dirichlet": 1.0}, r"dirichlet needs labels of shape \(50,\); got none"),
        ({"dirichlet": 1.0, "labels": np.zeros(49)}, r"needs labels .*; got shape \(49,\)"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    arguments = {"seed": 0, "n_samples": 50, "n_views": 3, "n_clients": 6} | changes
    with pytest.raises(ValueError, match=message):
        hybrid_partition(**arguments)


def test_parse_ratio():
    assert parse_ratio("2:1") == (2, 1)
    assert parse_ratio(" 10 : 3 ") == (10, 3)
    for text in ("", "2", "2:", "2:1:1", "a:b", "-1:2", "1.5:1", "2/1", 3):
        with pytest.raises(ValueError, match="ratio must be two whole numbers such as '2:1'"):
            parse_ratio(text)


def test_what_rows_hold_is_true_or_false_whatever_numbers_say_so():
    # Row 2 holds both views as row 1 does, and takes no one's place.
    held = np.array([[1, 0], [1, 1], [2, 1]])
    found = partition_as_held(0, held, 2)
    both = partition_as_held(0, held > 0, 2)
    assert sorted(found[0].sample_ids[0]) == [1, 2]
    assert all((a.sample_ids == b.sample_ids).all() for a, b in zip(found, both, strict=True))


def test_clients_of_samples_are_given_for_all_of_them_and_without_a_number():
    held = np.ones((4, 2), bool)
    with pytest.raises(ValueError, match=r"clients: got \(2,\); allowed is shape \(4,\)"):
        partition_as_held(0, held, clients=[0, 1])
    with pytest.raises(ValueError, match="n_clients: got 3; allowed is None"):
        partition_as_held(0, held, 3, clients=[0, 1, 1, 0])
    with pytest.raises(ValueError, match="seed: got 'a'; allowed is a whole number"):
        partition_as_held("a", np.ones((4, 2)), 2)
    with pytest.raises(ValueError, match=r"held: got \(4,\); allowed is a shape"):
        partition_as_held(0, held[:, 0], 2)
    with pytest.raises(ValueError, match=r"held: got \(0, 2\); allowed is a shape .* none of them"):
        partition_as_held(0, held[:0], 1)
    with pytest.raises(ValueError, match="clients: got NaN"):
        partition_as_held(0, held, clients=[0, 1, np.nan, 0])


def test_any_client_may_be_the_one_that_takes_what_is_left():
    # 5 samples of one class make clients of 3 and 2: the 2 are topped up from the other class by
    # whoever comes late, and never by the client that is served first.
    labels = np.array([0] * 5 + [1] * 7)
    mixed = np.zeros(4)
    for seed in range(30):
        parts = hybrid_partition(seed, 12, 1, 4, dirichlet=1e-9, labels=labels)
        mixed += [len(set(labels[row])) > 1 for row in rows_by_client(parts)]
    assert mixed.sum() == 30 and mixed.min() > 0


def test_a_skewed_client_has_its_classes_in_no_order():
    labels = np.arange(200) % 4
    parts = hybrid_partition(0, 200, 1, 2, dirichlet=1e6, labels=labels)
    for row in rows_by_client(parts):
        assert (np.diff(labels[row]) < 0).sum() > 10


def test_clients_of_several_kinds_are_numbered_as_they_are_known():
    held = np.array([[1, 0], [1, 1], [1, 1], [0, 1]], bool)
    first, second, third = partition_as_held(0, held, clients=np.array([0, 1, 2, 3]))
    assert [p.view_ids for p in (first, second, third)] == [(0, 1), (0,), (1,)]
    assert first.client_ids.tolist() == [1, 2] and first.sample_ids.tolist() == [[1], [2]]
    assert second.client_ids.tolist() == [0] and second.sample_ids.tolist() == [[0]]
    assert third.client_ids.tolist() == [3] and third.sample_ids.tolist() == [[3]]


def test_kinds_get_clients_so_that_sizes_differ_least():
    held = np.repeat([[True, True], [True, False], [False, True]], (9, 4, 2), axis=0)
    sizes = [p.sample_ids.shape for p in partition_as_held(0, held, 6)]
    assert sizes == [(3, 3), (2, 2), (1, 2)]


def test_the_seed_decides_which_client_of_its_kind_a_sample_lies_with():
    held = np.ones((40, 2), bool)
    (one,), (again,), (other,) = (partition_as_held(seed, held, 2) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.sample_ids, again.sample_ids)
    assert set(one.sample_ids[0]) != set(other.sample_ids[0])
    assert set(other.sample_ids[0]) != set(range(20))
