"""Criteria of a number of clusters: scikit-learn's, cases by hand, and what is chosen by them."""

import numpy as np
import pytest
from sklearn.datasets import make_blobs
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc.metrics import choice
from jaxfedmvc.metrics.choice import Rows


def test_stability_is_the_mean_agreement_on_common_rows():
    rng = np.random.default_rng(0)
    labelings = [np.where(rng.random(60) < 0.8, rng.integers(0, 4, 60), -1) for _ in range(3)]
    expected = []
    for i, j in ((0, 1), (0, 2), (1, 2)):
        both = (labelings[i] >= 0) & (labelings[j] >= 0)
        expected.append(adjusted_rand_score(labelings[i][both], labelings[j][both]))
    np.testing.assert_allclose(choice.stability(labelings), np.mean(expected), atol=1e-12)


def test_the_numbering_of_clusters_does_not_matter():
    labels = np.array([0, 0, 1, 1, 2, -1])
    other = np.array([2, 2, 0, 0, 1, 1])
    assert choice.stability([labels, other]) == 1.0


def test_silhouettes_worked_by_hand():
    # Centroids 1 and 11: rows at 0, 2, 10, 12 are 2 from the other row of their cluster, which is
    # its centroid without them, and 11, 9, 9, 11 from the other centroid.
    rows = np.array([[0.0], [2.0], [10.0], [12.0]])
    expected = np.mean([9 / 11, 7 / 9, 7 / 9, 9 / 11])
    labels = np.array([0, 0, 1, 1])
    assert np.isclose(choice.silhouette([Rows({0: rows}, labels)]), expected)
    # The same rows held by two clients, one padded with a row that counts nowhere.
    padded = np.append(rows[1:], [[99.0]], axis=0)
    parts = [Rows({0: rows[:1]}, labels[:1]), Rows({0: padded}, np.append(labels[1:], -1))]
    assert np.isclose(choice.silhouette(parts), expected)


def test_rows_count_with_the_views_that_they_have():
    rows = np.array([[0.0], [2.0], [10.0], [12.0]])
    labels = np.array([0, 0, 1, 1])
    alone = choice.silhouette([Rows({0: rows}, labels)])
    assert np.isclose(choice.silhouette([Rows({0: 1e6 * rows, 3: rows}, labels)]), alone)
    # View 3 has four rows a cluster, 4/3 from the mean of the other three and 11 or 9 from the
    # other centroid; view 0 two, 2 from the other row. Distances add up as squares.
    both, one = Rows({0: rows, 3: rows[::-1]}, labels), Rows({3: rows[::-1]}, labels)
    ratios = [4 / 3 / np.array([11, 9]), np.hypot(2, 4 / 3) / np.hypot([11, 9], [11, 9])]
    assert np.isclose(choice.silhouette([both, one]), 1 - np.mean(ratios))


def test_views_weigh_alike_however_wide_they_are_and_whatever_lies_outside():
    rng, labels = np.random.default_rng(0), np.arange(12) % 3
    first, second = rng.normal(size=(12, 1)), 3 * rng.normal(size=(12, 1))
    rows = Rows({0: first, 1: second}, labels)
    expected = choice.silhouette([rows])
    wide = Rows({0: first, 1: np.tile(second, 4)}, labels)
    assert np.isclose(choice.silhouette([wide]), expected)
    outside = Rows({0: np.array([[90.0]]), 1: np.array([[0.0]])}, np.array([-1]))
    assert np.isclose(choice.silhouette([rows, outside]), expected)


def test_a_view_that_no_other_row_of_the_cluster_has_does_not_count():
    """Its only holder, in place 0, would be its own centroid; it has no other view, and so 0."""
    view_0 = Rows({0: np.array([[0.0], [4.0], [6.0]])}, np.array([0, 1, 1]))
    view_1 = Rows({1: np.array([[0.0], [2.0], [10.0], [12.0]])}, np.array([0, 0, 1, 1]))
    each = [0, 1 / 2, 2 / 3, 9 / 11, 7 / 9, 7 / 9, 9 / 11]
    assert np.isclose(choice.silhouette([view_0, view_1]), np.mean(each))


@pytest.mark.parametrize("labels", [[0, 0, 0], [-1, -1, -1], [2, 2, -1]])
def test_one_cluster_has_no_silhouette(labels):
    assert np.isnan(choice.silhouette([Rows({0: np.eye(3)}, np.array(labels))]))


def test_two_equal_rows_in_different_clusters_are_in_between():
    assert choice.silhouette([Rows({0: np.ones((2, 1))}, np.array([0, 1]))]) == 0.0


def test_single_rows_are_no_way_to_a_good_mean():
    rows = np.array([[0.0], [0.0], [5.0], [9.0]])
    assert choice.silhouette([Rows({0: rows}, np.arange(4))]) == 0.0
    assert np.isclose(choice.silhouette([Rows({0: rows}, np.array([0, 0, 1, 2]))]), 0.5)


def test_a_cluster_that_nobody_holds_a_view_of_is_far_in_that_view():
    rows = np.array([[0.0], [1.0], [10.0]])
    parts = [Rows({0: rows[:2]}, np.array([0, 0])), Rows({1: rows[2:]}, np.array([1]))]
    assert choice.silhouette(parts) == 0.0


@pytest.mark.filterwarnings("error")
def test_a_view_that_only_rows_outside_clusters_have_does_not_count():
    part = Rows({0: np.array([[0.0], [1.0], [10.0], [11.0]])}, np.array([0, 0, 1, 1]))
    outside = Rows({1: np.array([[5.0], [6.0]])}, np.array([-1, -1]))
    assert choice.silhouette([part, outside]) == choice.silhouette([part])


def test_the_best_silhouette_of_the_stable_numbers_is_chosen():
    stable, silhouettes = np.array([0.9, 0.76, 0.5]), np.array([0.3, 0.4, 0.6])
    assert choice.chosen([2, 3, 4], stable, silhouettes) == 3
    assert choice.chosen([2, 3, 4], stable / 2, silhouettes) == 4  # none is: all count
    assert choice.chosen([2, 3, 4], stable, np.array([0.3, np.nan, 0.6])) == 2
    assert choice.chosen([2, 3], np.array([0.75, 0.9]), np.array([0.4, 0.3])) == 2  # just so


@pytest.mark.parametrize("k", [2, 4, 7])
def test_blobs_are_counted(k):
    from sklearn.cluster import KMeans

    x, _ = make_blobs(300, 6, centers=k, cluster_std=1.5, random_state=3)
    rng, numbers = np.random.default_rng(0), range(2, 10)
    stabilities, silhouettes = [], []
    for n in numbers:
        labelings = []
        for seed in range(3):
            kept = rng.random(len(x)) < 0.8
            labels = np.full(len(x), -1)
            labels[kept] = KMeans(n, n_init=3, random_state=seed).fit_predict(x[kept])
            labelings.append(labels)
        stabilities.append(choice.stability(labelings))
        silhouettes.append(choice.silhouette([Rows({0: x}, labelings[0])]))
    assert choice.chosen(numbers, stabilities, silhouettes) == k


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="labelings: got 1"):
        choice.stability([np.zeros(3, int)])
    with pytest.raises(ValueError, match=r"labelings: got \[2, 3\] rows; allowed is one number"):
        choice.stability([np.zeros(3, int), np.zeros(2, int)])
    with pytest.raises(ValueError, match="silhouettes: no number"):
        choice.chosen([2], np.array([1.0]), np.array([np.nan]))
