"""The NumPy VertCoHiRF, which tests and benchmarks trust, against cases worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import make_blobs
from sklearn.metrics import adjusted_rand_score

from benchmarks.references.vertcohirf import (
    NEVER,
    choose_medoid,
    dbscan_step,
    kmeans_step,
    mean_cosine,
    noise_apart,
    random_candidates,
    ranks,
    reference,
    relaxed_consensus,
    strict_consensus,
)


def directions(*degrees):
    """Unit vectors [n, 2]."""
    angle = np.radians(np.array(degrees, float))
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def by_hand(*iterations):
    """A local step that returns given labels: for each iteration those of each agent."""
    return lambda agent, iteration, rows: np.array(iterations[iteration][agent])


# Cosine sums of 0, 1, 2. Agent 0 (0, 30, 60 degrees): 2.37, 2.73, 2.37, so ranks 1, 0, 2.
# Agent 1 (40, 0, 10 degrees): 2.63, 2.75, 2.85, so ranks 2, 1, 0. Rank sums 3, 1, 2.
VIEWS = [directions(0, 30, 60, 200, 220, 300), directions(40, 0, 10, 80, 120, 300)]


def test_a_run_worked_by_hand():
    # Codes {3, 4}, {0, 1, 2}, {5}: the active samples are then 3, 1, 5, the order of the codes.
    first = [1, 1, 1, 0, 0, 2], [0, 0, 0, 0, 0, 0]
    # 3 and 1 merge; of two members the one of the smaller active position is the medoid, here 3.
    second = [0, 0, 1], [0, 0, 0]
    third = [0, 1], [0, 0]
    result = reference(VIEWS, by_hand(first, second, third))
    np.testing.assert_array_equal(result.parents, [1, 3, 1, 3, 3, 5])
    np.testing.assert_array_equal(result.absorbed_at, [0, 1, 0, NEVER, 0, NEVER])
    np.testing.assert_array_equal(result.roots, [3, 5])
    np.testing.assert_array_equal(result.labels, [0, 0, 0, 0, 0, 1])
    assert result.active_per_iteration == [6, 3, 2]
    assert result.n_iter == 3  # the idle one counts


def test_stops_at_max_iter():
    steps = by_hand(([1, 1, 1, 0, 0, 2], [0] * 6), ([0, 0, 1], [0, 0, 0]))
    result = reference(VIEWS, steps, max_iter=1)
    assert result.n_iter == 1
    np.testing.assert_array_equal(result.roots, [3, 1, 5])
    np.testing.assert_array_equal(result.labels, [1, 1, 1, 0, 0, 2])
    assert reference(VIEWS, steps, max_iter=2).n_iter == 2


def test_all_merge_and_an_idle_iteration_follows():
    result = reference(VIEWS, lambda agent, iteration, rows: np.zeros(len(rows), int))
    assert result.active_per_iteration == [6, 1]
    np.testing.assert_array_equal(result.labels, 0)


def test_one_agent_can_veto_every_merge():
    result = reference(VIEWS, by_hand(([0] * 6, range(6))))
    assert result.n_iter == 1
    np.testing.assert_array_equal(result.parents, range(6))
    np.testing.assert_array_equal(result.absorbed_at, NEVER)
    np.testing.assert_array_equal(result.labels, range(6))


def test_noise_is_alone_and_vetoes():
    # Agent 1 calls 0 and 3 noise. 4 and 5 are together, 1 and 2 are; codes of noise come last.
    result = reference(VIEWS, by_hand(([0] * 6, [-1, 1, 1, -1, 0, 0])), max_iter=1)
    np.testing.assert_array_equal(result.parents, [0, 1, 1, 3, 4, 4])
    np.testing.assert_array_equal(result.labels, [2, 1, 1, 3, 0, 0])


@pytest.mark.parametrize(
    ("labels", "expected"),
    [([2, -1, 0, -1], [2, 3, 0, 4]), ([-1, -1], [0, 1]), ([1, 0], [1, 0])],
)
def test_noise_apart(labels, expected):
    np.testing.assert_array_equal(noise_apart(np.array(labels)), expected)


def test_ranks_are_summed_and_not_orders():
    # Both agents rank 1, 2, 0: ranks 2, 0, 1 and rank sums 4, 0, 2. The sum of the two lists of
    # positions is 2, 4, 0, by which 2 would win.
    view = directions(50, 0, -20)
    np.testing.assert_array_equal(ranks(mean_cosine(view)), [2, 0, 1])
    assert choose_medoid([view, view], np.arange(3)) == 1


def test_what_differs_by_rounding_only_is_a_tie():
    np.testing.assert_array_equal(
        ranks(np.array([0.5, 0.5 + 1e-15, 0.7, 0.5 - 1e-15])), [1, 2, 0, 3]
    )
    # Three directions 120 degrees apart: all cosine sums are 0.
    np.testing.assert_array_equal(ranks(mean_cosine(directions(17, 137, 257))), [0, 1, 2])


def test_two_members_tie_unless_one_is_zero():
    pair = np.array([[1.0, 2.0], [-3.0, 0.1]])
    np.testing.assert_array_equal(mean_cosine(pair), [1, 1])
    assert choose_medoid([pair, pair[::-1]], np.array([1, 0])) == 1
    half = np.array([[0.0, 0.0], [1.0, 0.0]])
    np.testing.assert_array_equal(mean_cosine(half), [0, 1])
    assert choose_medoid([half], np.array([0, 1])) == 1
    # Ranks 1, 0 and 0, 1: equal sums.
    assert choose_medoid([half, pair], np.array([0, 1])) == 0


def test_mean_cosine_is_a_product_with_the_sum_of_unit_vectors():
    x = np.random.default_rng(0).normal(size=(7, 3))
    x[4] = 0
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    unit = x / np.where(norm > 0, norm, 1)
    np.testing.assert_allclose(mean_cosine(x), unit @ unit.sum(axis=0) / 7, atol=1e-12)


def test_only_candidates_are_ranked_and_chosen():
    # Without 1, the members 0 and 2 are two and tie.
    only = lambda iteration, members: members != 1  # noqa: E731
    assert choose_medoid(VIEWS, np.arange(3)) == 1
    assert choose_medoid(VIEWS, np.arange(3), candidates=only) == 0
    result = reference(VIEWS, by_hand(([0] * 3 + [1] * 3, [0] * 6)), candidates=only, max_iter=1)
    np.testing.assert_array_equal(result.parents[:3], 0)


def test_random_candidates():
    draw = random_candidates(3, seed=0)
    chosen = draw(0, np.arange(10))
    assert chosen.sum() == 3
    np.testing.assert_array_equal(chosen, draw(0, np.arange(10)))
    assert any((draw(i, np.arange(10)) != chosen).any() for i in range(1, 5))
    assert draw(0, np.arange(2)).all()


def test_strict_consensus_is_lexicographic():
    labels = np.array([[1, 0], [0, 1], [1, 0], [0, 0], [1, 10], [1, 9]])
    np.testing.assert_array_equal(strict_consensus(labels), [2, 1, 2, 0, 4, 3])


def test_relaxed_consensus_drops_the_outlier():
    halves, alternating = [0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1]
    labels = np.array([halves, halves, alternating]).T
    # Dropping a half changes nothing; without the third the ARI is 2 f (1 - g) / (f + g - 2 f g)
    # = 4/11 with f = 4/28 and g = 12/28.
    np.testing.assert_array_equal(relaxed_consensus(labels, 0.8), halves)
    np.testing.assert_array_equal(relaxed_consensus(labels, 0.37), halves)
    np.testing.assert_array_equal(relaxed_consensus(labels, 0.36), [0, 1, 0, 1, 2, 3, 2, 3])


def test_relaxed_consensus_drops_the_first_of_equals():
    # All singletons against two pairs: ARI 0 either way.
    labels = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    np.testing.assert_array_equal(relaxed_consensus(labels, 0.8), [0, 1, 0, 1])


@pytest.mark.parametrize(
    "step", [kmeans_step(3, 2, 0.5, seed=0), dbscan_step(5.0, 3), kmeans_step(3, 3, 1, 0, 0.8)]
)
def test_steps_find_clusters_far_apart(step):
    centers = 20.0 * np.array([[0, 0, 0, 0], [1, 2, 1, 2], [2, 1, 2, 1]])
    x, y = make_blobs(60, centers=centers, random_state=0)
    labels = step(0, 0, x)
    assert adjusted_rand_score(y, labels) == 1
    np.testing.assert_array_equal(labels, step(0, 0, x))
    result = reference([x[:, :2], x[:, 2:]], step, max_iter=1)
    assert adjusted_rand_score(y, result.labels) == 1


def test_every_agent_and_iteration_draws_features_of_its_own():
    # Each feature alone splits the rows in its own way, so labels tell which one was drawn.
    x = np.array([[0, 0], [0, 9], [9, 0], [9, 9]], float)
    step = kmeans_step(2, 1, 1, seed=0)
    seen = {(a, e): tuple(step(a, e, x)[[0, 1]]) for a in range(6) for e in range(6)}
    same = [len(set(pair)) == 1 for pair in seen.values()]
    assert 0 < sum(same) < len(same)
    assert len({tuple(len(set(seen[a, e])) for e in range(6)) for a in range(6)}) > 1


def test_dbscan_noise_and_clusters_capped_at_the_rows():
    x = np.array([[0.0], [0.1], [0.2], [9.0], [50.0]])
    np.testing.assert_array_equal(dbscan_step(0.5, 2)(0, 0, x), [0, 0, 0, 1, 2])
    np.testing.assert_array_equal(np.sort(kmeans_step(9, 1, 1.0, 0)(0, 0, x[2:])), [0, 1, 2])
