"""Votes of rounds: renumbered one to one, weighted, of clients that number alike and of others."""

import numpy as np
import pytest

from jaxfedmvc.clustering import votes

# Two cohorts, of two clients with four rows and of one with three; -1 is padding.
TRUTH = [np.array([[0, 0, 1, 2], [1, 1, 2, -1]]), np.array([[0, 1, 2]])]


def other_numbers(labels, numbers):
    """The same clusters with other numbers."""
    return [np.where(mine >= 0, np.asarray(numbers)[mine], -1) for mine in labels]


def equal(found, wanted):
    return all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_numbers_of_a_round_do_not_matter():
    held = votes.start(TRUTH, 3)
    assert equal(votes.leaders(held), [np.full_like(mine, -1) for mine in TRUTH])
    for numbers in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        held = votes.cast(held, other_numbers(TRUTH, numbers), 1.0)
    assert equal(votes.leaders(held), TRUTH)
    np.testing.assert_array_equal(held[0][0, 0], [3, 0, 0])
    assert not held[0][1, 3].any()  # padding has no votes


def test_most_weight_decides():
    """Worked by hand: one row is elsewhere in the second round, which weighs half, then again."""
    strayed = [mine.copy() for mine in TRUTH]
    strayed[0][0, 1] = 2
    held = votes.cast(votes.start(TRUTH, 3), TRUTH, 1.0)
    held = votes.cast(held, other_numbers(strayed, (2, 1, 0)), 0.5)
    np.testing.assert_array_equal(held[0][0, 1], [1, 0, 0.5])
    assert equal(votes.leaders(held), TRUTH)
    held = votes.cast(held, strayed, 0.75)
    assert equal(votes.leaders(held), strayed)


def test_the_server_sees_the_sum_of_tables_alone():
    """A client whose rows alone would be renumbered otherwise follows all."""
    first = [np.array([[0, 0, 1, 1], [0, 0, 0, 1]])]
    second = [np.array([[1, 1, 0, 0], [1, 1, 1, 1]])]
    held = votes.cast(votes.start(first, 2), first, 1.0)
    tables = votes.table(votes.leaders(held)[0], second[0], 2)
    np.testing.assert_array_equal(tables, [[[0, 2], [2, 0]], [[0, 3], [0, 1]]])
    np.testing.assert_array_equal(votes.renumbered(tables.sum(axis=0)), [1, 0])
    found = votes.cast(held, second, 2.0)
    assert equal(votes.leaders(found), [np.array([[0, 0, 1, 1], [0, 0, 0, 0]])])


def test_clients_that_share_no_numbers_renumber_their_own():
    labels = [np.array([[0, 0, 1], [0, 1, 1]])]
    swapped = [np.array([[1, 1, 0], [0, 1, 1]])]  # of the first client alone
    held = votes.cast(votes.start(labels, 2), labels, 1.0, shared=False)
    held = votes.cast(held, swapped, 1.0, shared=False)
    np.testing.assert_array_equal(held[0].max(axis=-1), 2)
    assert equal(votes.leaders(held), labels)


def test_many_noisy_rounds_find_what_each_of_them_blurs():
    """Majority of twenty clusterings, each wrong on three rows of ten: Condorcet's jury."""
    rng, truth = np.random.default_rng(0), np.arange(300).reshape(3, 100) % 4
    held = votes.start([truth], 4)
    for r in range(20):
        labels = np.where(rng.random(truth.shape) < 0.3, rng.integers(4, size=truth.shape), truth)
        held = votes.cast(held, other_numbers([labels], rng.permutation(4)), 1 / (r + 5))
    (found,) = votes.leaders(held)
    numbers = votes.renumbered(votes.table(truth, found, 4).sum(axis=0))
    assert np.mean(numbers[found] == truth) > 0.99


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([np.zeros((2, 3), int), TRUTH[1]], "labels: got [(2, 3), (1, 3)]"),
        ([TRUTH[0] + 1, TRUTH[1]], "labels: got 3; allowed is -1 to 2"),
    ],
)
def test_what_cannot_be_votes_is_refused(labels, told):
    with pytest.raises(ValueError) as error:
        votes.cast(votes.start(TRUTH, 3), labels, 1.0)
    assert told in str(error.value)
