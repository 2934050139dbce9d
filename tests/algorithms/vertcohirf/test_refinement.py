"""Refined clusters: ranks by hand and by a plain implementation, and what a run makes of them."""

import jax
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc import engine
from jaxfedmvc.algorithms.vertcohirf import (
    VertCoHiRFConfig,
    VertCoHiRFHyperparams,
    choice,
    hierarchy_of,
    vertcohirf,
)
from jaxfedmvc.algorithms.vertcohirf.prediction import medoid_rankings, predict
from jaxfedmvc.algorithms.vertcohirf.refinement import (
    LISTED,
    MOST_CLUSTERS,
    nearest_clusters,
    of_least_rank_sum,
)
from jaxfedmvc.engine import Traffic
from tests.helpers.vertical import federation

jit_nearest, jit_least, jit_rankings = map(
    jax.jit, (nearest_clusters, of_least_rank_sum, medoid_rankings)
)


def plain(views, labels):
    """The same in NumPy, with the ranks of all clusters written out."""
    found = np.unique(labels)
    total = np.zeros((len(labels), len(found)), int)
    for x in views:
        means = np.stack([x[labels == k].mean(axis=0) for k in found])
        distances = np.square(x[:, None] - means[None]).sum(axis=2)
        total += np.minimum(np.argsort(np.argsort(distances, axis=1), axis=1), LISTED)
    least = total.min(axis=1)
    return np.array(
        [
            own if total[i, np.searchsorted(found, own)] == least[i] else found[total[i].argmin()]
            for i, own in enumerate(labels)
        ]
    )


def test_clusters_are_listed_by_the_distance_to_their_means():
    x = np.float32([[0.0], [2.0], [10.0], [12.0], [3.9], [99.0]])
    labels = np.array([0, 0, 2, 2, 5, -1])  # means 1, 11 and 3.9; the last row is padding
    found = np.asarray(jit_nearest(x, labels))
    assert found.shape == (6, LISTED) and found.dtype == np.uint8
    np.testing.assert_array_equal(
        found[:, :3], [[0, 5, 2], [0, 5, 2], [2, 5, 0], [2, 5, 0], [5, 0, 2], [0, 0, 0]]
    )


def test_new_samples_join_refined_clusters_by_the_means_over_them():
    rng = np.random.default_rng(3)
    truth = np.arange(160) % 4
    views = [6 * rng.normal(size=(4, 3))[truth] + rng.normal(size=(160, 3)) for _ in range(3)]
    old, new = np.arange(160) < 120, np.arange(160) >= 120
    labels = truth[old]
    for _ in range(2):
        lists = [jit_nearest(np.float32(x[old]), labels) for x in views]
        labels = np.asarray(jit_least(np.stack(lists), labels))
    refined = labels
    means = [np.stack([x[old][refined == k].mean(axis=0) for k in range(4)]) for x in views]
    found = [
        jax.jit(predict, static_argnums=1)(
            np.stack([jit_rankings(x[rows], m) for x, m in zip(views, means, strict=True)]),
            "ranked",
        )
        for rows in (old, new)
    ]
    # Four clusters are listed whole, so the rule of new samples is that of the refinement.
    assert np.mean(np.asarray(found[0]) == refined) > 0.98  # equal but for ties
    assert adjusted_rand_score(truth[new], found[1]) > 0.9


def test_the_least_rank_sum_takes_a_sample_and_its_own_cluster_among_equals():
    nearest = np.array(
        [
            [[0, 1, 2, 3], [1, 0, 2, 3], [7, 6, 5, 4], [0, 0, 0, 0]],
            [[1, 0, 2, 3], [0, 1, 2, 3], [7, 6, 5, 4], [0, 0, 0, 0]],
            [[2, 1, 0, 3], [0, 1, 2, 3], [6, 5, 7, 4], [0, 0, 0, 0]],
        ],
        np.uint8,
    )
    # Ranks of clusters 0, 1, 2: 0 + 1 + 2, 1 + 0 + 1, 2 + 2 + 0; then 1 + 0 + 0 of 0 is least; then
    # 7 has 0 + 0 + 2 and 6 has 1 + 1 + 0, and the sample is in 6.
    labels = np.array([0, 2, 6, -1])
    np.testing.assert_array_equal(jit_least(nearest, labels), [1, 0, 6, -1])
    labels[2] = 7
    assert np.asarray(jit_least(nearest, labels))[2] == 7


def test_refinement_is_that_of_the_plain_implementation():
    rng = np.random.default_rng(0)
    views = [rng.normal(size=(60, d)).astype(np.float32) for d in (2, 3, 5)]
    labels = rng.integers(0, 9, 60)
    expected = plain(views, labels)
    assert (expected != labels).any()

    def refined(pad):
        padded = [np.pad(x, ((0, pad), (0, 0)), constant_values=np.nan) for x in views]
        own = np.pad(labels, (0, pad), constant_values=-1)
        return np.asarray(jit_least(np.stack([jit_nearest(x, own) for x in padded]), own))

    np.testing.assert_array_equal(refined(0), expected)
    np.testing.assert_array_equal(refined(7)[:60], expected)
    np.testing.assert_array_equal(refined(7)[60:], -1)


# --- Runs -----------------------------------------------------------------------------------------


def unequal_agents(n=210, k=5):
    """Agents of unequal quality, and the truth."""
    rng = np.random.default_rng(0)
    truth, views = rng.integers(0, k, n), []
    for separation in (1.75, 1.1, 0.85, 0.55):
        centres = separation * rng.normal(size=(k, 8))
        views.append((centres[truth] + rng.normal(size=(n, 8))).astype(np.float32))
    return views, truth


@pytest.fixture(scope="module")
def runs():
    """Results without refinement and with it, of the same key; and the truth."""
    views, truth = unequal_agents()
    agents, hyper = federation(views), VertCoHiRFHyperparams(relaxed_agents=0.8)
    found = {}
    for n in (0, 3):
        algorithm = vertcohirf(VertCoHiRFConfig(5, repetitions=1, refinements=n), hyper)
        found[n] = jax.jit(engine.run, static_argnums=(0, 3))(
            algorithm, agents, jax.random.key(0), 20
        )
    return found, truth, views


@pytest.mark.slow
def test_refined_clusters_are_nearer_to_the_truth_and_the_hierarchy_stays(runs):
    found, truth, _ = runs
    plain_run, refined = (found[n].labels[0][0] for n in (0, 3))
    before, after = (adjusted_rand_score(truth, labels) for labels in (plain_run, refined))
    assert after > before + 0.05
    tree, same = (hierarchy_of(found[n].state.server) for n in (0, 3))
    np.testing.assert_array_equal(tree.parents, same.parents)
    np.testing.assert_array_equal(found[0].state.server.refined, -1)


@pytest.mark.slow
def test_a_run_refines_as_often_as_it_is_told(runs):
    found, _, views = runs
    labels = np.asarray(found[0].labels[0][0])
    for _ in range(3):
        labels = plain(views, labels)
    np.testing.assert_array_equal(found[3].labels[0][0], labels)


def test_a_refinement_sends_four_bytes_a_sample_to_every_peer():
    views, _ = unequal_agents()
    agents = federation(views)
    none, three = (
        engine.traffic(vertcohirf(VertCoHiRFConfig(5, refinements=n)), agents)["finish"]
        for n in (0, 3)
    )
    assert none.up == 0 and three.up == 3 * 4 * 210 * 4 * 3


@pytest.mark.slow
def test_more_clusters_than_are_refined_stay_as_they_are():
    rng = np.random.default_rng(0)
    views = [rng.normal(size=(300, 2)).astype(np.float32) for _ in range(5)]
    labels = {}
    for n in (0, 1):
        algorithm = vertcohirf(VertCoHiRFConfig(8, refinements=n))
        result = jax.jit(engine.run, static_argnums=(0, 3))(
            algorithm, federation(views), jax.random.key(0), 20
        )
        labels[n] = np.asarray(result.labels[0][0])
    assert len(np.unique(labels[0])) > MOST_CLUSTERS
    np.testing.assert_array_equal(labels[0], labels[1])


# --- The choice -----------------------------------------------------------------------------------


def test_pieces_that_were_not_refined_are_chosen_only_where_there_is_nothing_else():
    sent = np.array([[0, 0, 0, 1, 1, 1]])
    good, bad = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 0, 1, 0, 1])

    def trial(labels, whole):
        return choice.Trial(2, None, labels, sent, Traffic(0, 0), whole)

    assert choice.best_of([trial(bad, True), trial(good, False)]) == 0
    assert choice.best_of([trial(bad, False), trial(good, False)]) == 1
    assert choice.best_of([trial(bad, True), trial(good, True)]) == 1


def test_refinements_are_checked():
    for n in (-1, 10**9):  # each would be an exchange, made before anybody can refuse the job
        with pytest.raises(ValueError, match=f"refinements: got {n}; allowed is 0 to 1000"):
            VertCoHiRFConfig(3, refinements=n)
