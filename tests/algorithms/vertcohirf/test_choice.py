"""VertCoHiRF's choice without labels: it finds structure, and clusters that shatter never win."""

import jax
import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc import engine
from jaxfedmvc.algorithms.vertcohirf import (
    LocalStep,
    VertCoHiRFConfig,
    VertCoHiRFHyperparams,
    choice,
    vertcohirf,
    vertcohirf_of_steps,
)
from jaxfedmvc.engine import Traffic
from tests.helpers.vertical import by_halves, federation

CONFIG, HYPER = VertCoHiRFConfig(repetitions=1), VertCoHiRFHyperparams()
ONCE = jax.jit(engine.run, static_argnums=(0, 3))


def groups(n=90, noise=1, k=3):
    """Two agents that see k groups, as many that see noise, and the truth."""
    rng = np.random.default_rng(0)
    truth = np.arange(n) % k
    views = [8 * np.eye(k)[truth] + rng.normal(size=(n, k)) for _ in range(2)]
    return [*views, *(rng.normal(size=(n, 4)) for _ in range(noise))], truth


# --- The rule -------------------------------------------------------------------------------------


def trial(labels, sent, c=2):
    return choice.Trial(c, None, np.asarray(labels), np.asarray(sent), Traffic(0, 0))


def test_clusters_that_are_degenerate_are_not_chosen():
    truth = np.repeat([0, 1, 2], 20)
    sent = np.stack([truth, np.where(np.arange(60) % 7 == 0, 0, truth)])
    shattered, one = np.arange(60), np.zeros(60, int)
    crumbs = np.where(np.arange(60) < 54, 0, np.arange(60))  # one huge cluster, and single rows
    tried = [trial(x, sent, c=3) for x in (shattered, crumbs, one, truth)]
    found = choice.agreements(tried)
    assert np.argmax(found) == 3 and found[3] > 0.75
    assert found[:3] == pytest.approx(0, abs=0.1)


def test_trials_are_compared_with_the_consensus_of_what_agents_sent():
    truth, rng = np.repeat([0, 1, 2], 20), np.random.default_rng(0)
    sent = [np.where(truth == a, 0, 1) for a in range(3)]  # each tells one group from the rest
    split = [2 * truth + rng.integers(2, size=60) for _ in range(3)]  # seven labels where C is 3
    labels = [truth, sent[0], rng.integers(3, size=60)]
    tried = [trial(x, s, c) for x, s, c in zip(labels, (sent, sent, split), (2, 2, 3), strict=True)]
    found = choice.agreements(tried)
    assert found[0] == 1 and choice.best_of(tried) == 0
    assert found[1:] == pytest.approx([adjusted_rand_score(truth, x) for x in labels[1:]], abs=1e-6)


def test_a_number_of_clusters_that_is_told_decides_between_coarse_and_fine():
    fine = np.repeat([0, 1, 2, 3], 15)
    coarse = fine // 2
    tried = [trial(coarse, [coarse] * 2, c=2), trial(fine, [fine] * 2, c=4)]
    for told, found in ((2, 0), (4, 1)):
        assert choice.best_of(tried, told) == found
        assert int(choice.common(tried, told).n_clusters) == told
        assert choice.agreements(tried, told)[found] == pytest.approx(1)
    with pytest.raises(ValueError, match="shared_clusters: got 128"):
        choice.best_of(tried, 128)


def test_without_trials_there_is_nothing_to_choose():
    with pytest.raises(ValueError, match="tried: got"):
        choice.agreements([])


# --- The agents' consensus ------------------------------------------------------------------------


@pytest.mark.slow
def test_an_agent_that_agrees_with_nobody_is_left_out_of_the_relaxed_consensus():
    cells = np.repeat(np.arange(4), 12)
    views = [np.stack([2.0 * cells + 0.5, np.ones(48)], axis=1) for _ in range(2)]
    noise = np.random.default_rng(1).permutation(48).astype(float)
    views.append(np.stack([noise, np.ones(48)], axis=1))
    agents = federation([view.astype(np.float32) for view in views])

    @jax.jit
    def clusters(threshold):
        algorithm = vertcohirf_of_steps(LocalStep(by_halves), relaxed_agents=threshold)
        return engine.run(algorithm, agents, jax.random.key(0), 1).labels[0][0]

    assert len(np.unique(clusters(-1.0))) > 30  # below any agreement: all agents count
    assert adjusted_rand_score(cells, clusters(0.8)) == 1


def test_thresholds_are_checked():
    with pytest.raises(ValueError, match="relaxed_agents: got 2"):
        vertcohirf(VertCoHiRFConfig(3), VertCoHiRFHyperparams(relaxed_agents=2.0))
    with pytest.raises(ValueError, match="limit: got 0"):
        vertcohirf(VertCoHiRFConfig(3), VertCoHiRFHyperparams(limit=0))
    with pytest.raises(ValueError, match="limit: got 9; allowed is at most 4, local_clusters"):
        vertcohirf(VertCoHiRFConfig(3, local_clusters=4), VertCoHiRFHyperparams(limit=9))
    with pytest.raises(ValueError, match="local_clusters: got 'auto'"):
        vertcohirf(VertCoHiRFConfig(local_clusters="auto"))
    with pytest.raises(ValueError, match="local_clusters: got 'some'"):
        VertCoHiRFConfig(local_clusters="some")


# --- The trials -----------------------------------------------------------------------------------


@pytest.mark.ci
def test_groups_are_found_where_the_strict_consensus_shatters():
    views, truth = groups(noise=2)
    agents = federation([view.astype(np.float32) for view in views], truth)
    key = jax.random.key(1)
    tried = list(choice.trials(CONFIG, HYPER, agents, key, rounds=20, tried=(2, 3, 5, 90)))
    assert [(t.local_clusters, t.relaxed_agents) for t in tried] == [
        (c, h) for h in (None, 0.8) for c in (2, 3, 5)
    ]
    best = tried[int(np.argmax(choice.agreements(tried)))]
    assert (best.local_clusters, best.relaxed_agents) == (3, 0.8)
    assert adjusted_rand_score(truth, best.labels) > 0.95
    strict = next(t for t in tried if t.local_clusters == 3)
    assert len(np.unique(strict.labels)) > 10
    assert best.sent.shape == (4, 90)
    np.testing.assert_array_equal(best.sent, strict.sent)  # the first messages do not differ
    for alone in best.sent[:2]:
        assert adjusted_rand_score(truth, alone) > 0.95


@pytest.mark.slow
def test_agents_of_unequal_quality_do_not_shatter():
    rng, n, k = np.random.default_rng(0), 210, 5
    truth, views = rng.integers(0, k, n), []
    for separation in (1.75, 1.1, 0.85, 0.55, 0.2):
        centres = separation * rng.normal(size=(k, 8))
        views.append((centres[truth] + rng.normal(size=(n, 8))).astype(np.float32))
    agents, key = federation(views), jax.random.key(0)
    strict = ONCE(vertcohirf(VertCoHiRFConfig(k)), agents, key, 100).labels[0][0]
    assert len(np.unique(strict)) > 100
    tried = list(choice.trials(CONFIG, HYPER, agents, key, rounds=100))
    best = tried[int(np.argmax(choice.agreements(tried)))]
    alone = [KMeans(k, n_init=10, random_state=0).fit_predict(view) for view in views]
    scores = [adjusted_rand_score(truth, labels) for labels in (best.labels, strict, *alone)]
    assert scores[0] > np.mean(scores[2:]) + 0.3 and scores[1] < 0.1


@pytest.mark.slow
def test_a_run_with_what_was_chosen_finds_the_clusters_of_the_trial():
    views, _ = groups()
    agents = federation([view.astype(np.float32) for view in views])
    key = jax.random.key(2)
    for found in choice.trials(CONFIG, HYPER, agents, key, rounds=20, tried=(3,)):
        config = VertCoHiRFConfig(local_clusters=found.local_clusters, repetitions=1)
        hyper = VertCoHiRFHyperparams(relaxed_agents=found.relaxed_agents)
        result = ONCE(vertcohirf(config, hyper), agents, key, 20)
        np.testing.assert_array_equal(np.asarray(result.labels[0][0]), found.labels)
        # Arrays as short as these do not shrink: all rounds are alike, and of the run's size.
        a_round = engine.traffic(vertcohirf(config, hyper), agents)["round"]
        rounds = found.traffic.up / a_round.up
        assert rounds == found.traffic.down / a_round.down and rounds in range(1, 20)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["kmeans", "kernel_kmeans", "sc_srgf"])
def test_a_limit_is_a_smaller_number_of_clusters(base):
    views, _ = groups()
    agents = federation([view.astype(np.float32) for view in views])
    key = jax.random.key(3)
    found = [
        ONCE(vertcohirf(VertCoHiRFConfig(local_clusters=c, base=(base,)), hyper), agents, key, 20)
        for c, hyper in ((3, HYPER), (6, VertCoHiRFHyperparams(limit=3)))
    ]
    np.testing.assert_array_equal(found[0].labels[0], found[1].labels[0])


@pytest.mark.parametrize(
    ("config", "tried", "told"),
    [
        (CONFIG, (90, 200), "tried: got .90, 200.; allowed is a number from 1 to 9"),
        (VertCoHiRFConfig(base=("dbscan",)), (2, 3), "base: got 'dbscan'"),
    ],
)
def test_what_cannot_be_tried_is_refused(config, tried, told):
    views, _ = groups()
    agents = federation([view.astype(np.float32) for view in views])
    with pytest.raises(ValueError, match=told):
        next(choice.trials(config, HYPER, agents, jax.random.key(0), rounds=2, tried=tried))


@pytest.mark.parametrize(
    ("similarity", "share", "widths"),
    [("cosine", 1.0, (4, 4)), ("laplacian", 1.0, (2, 4)), ("cosine", 0.5, (2, 4))],
)
def test_agents_are_padded_to_one_width_where_nothing_sees_it(similarity, share, widths):
    """Other similarities divide by the number of features, and subsets would draw from zeros."""
    agents = federation([np.ones((20, 2)), np.ones((20, 4))])
    config = VertCoHiRFConfig(repetitions=1, similarity=similarity)
    found = choice._of_one_width(config, VertCoHiRFHyperparams(share), agents)
    assert tuple(c.views[0].shape[-1] for c in found.cohorts) == found.view_dims == widths
    assert float(found.cohorts[0].views[0].sum()) == 40
