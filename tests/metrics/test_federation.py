"""Scores of groups of clients against sklearn on the rows of each group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from sklearn import metrics as sk

from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics import host as scoring

K, CLUSTERS = 3, 4  # more clusters than classes
# Rows of each client, by cohort: all views, view 0, view 1.
ROWS = ((6, 4, 5), (3, 6), (5,))
PARTICIPANTS = ((0, 2), (1,), (0,))
SCORES = ("acc", "nmi", "ari", "purity")


def reference(labels, predicted):
    table = sk.cluster.contingency_matrix(labels, predicted)
    matched = linear_sum_assignment(table, maximize=True)
    return {
        "acc": table[matched].sum() / len(labels),
        "nmi": sk.normalized_mutual_info_score(labels, predicted),
        "ari": sk.adjusted_rand_score(labels, predicted),
        "purity": table.max(axis=0).sum() / len(labels),
    }


@pytest.fixture(scope="module")
def federation():
    n = sum(map(sum, ROWS))
    labels = np.random.default_rng(0).integers(K, size=n)
    views = [np.zeros((n, 2)), np.zeros((n, 1))]
    partition, start, client = [], 0, 0
    for view_ids, counts in zip(((0, 1), (0,), (1,)), ROWS, strict=True):
        ids = np.full((len(counts), 6), -1, np.int32)
        for i, count in enumerate(counts):
            ids[i, :count] = start + np.arange(count)
            start += count
        partition.append(Part(view_ids, ids, client + np.arange(len(counts), dtype=np.int32)))
        client += len(counts)
    return Federation.from_arrays(views, labels, partition=partition)


@pytest.fixture(scope="module")
def predicted(federation):
    """Right in half of the rows; padding is given clusters too."""
    rng = np.random.default_rng(1)
    return tuple(
        jnp.asarray(
            np.where(rng.random(l.shape) < 0.5, (l + 1) % K, rng.integers(CLUSTERS, size=l.shape)),
            jnp.int32,
        )
        for l in map(np.asarray, federation.labels)  # noqa: E741
    )


def clients_of(group):
    """(cohort, place) of the clients of a group."""
    everyone = [(c, i) for c, rows in enumerate(ROWS) for i in range(len(rows))]
    return {
        "all": everyone,
        "multi_view": [(c, i) for c, i in everyone if c == 0],
        "partial_view": [(c, i) for c, i in everyone if c > 0],
        "participating": [(c, i) for c, i in everyone if i in PARTICIPANTS[c]],
        "non_participating": [(c, i) for c, i in everyone if i not in PARTICIPANTS[c]],
    }[group]


def rows_of(federation, predicted, c, i):
    rows = slice(0, ROWS[c][i])
    return np.asarray(federation.labels[c])[i, rows], np.asarray(predicted[c])[i, rows]


def assert_scores(actual, expected):
    assert set(actual) == set(SCORES)
    for name in SCORES:
        np.testing.assert_allclose(actual[name], expected[name], atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def scores(federation, predicted):
    return scoring.score(federation, predicted, PARTICIPANTS)


@pytest.mark.parametrize("group", scoring.GROUPS)
def test_every_group_agrees_with_sklearn(federation, predicted, scores, group):
    rows = [rows_of(federation, predicted, c, i) for c, i in clients_of(group)]
    truth, guess = map(np.concatenate, zip(*rows, strict=True))
    assert_scores(scores[group]["pooled"], reference(truth, guess))
    each = [reference(*pair) for pair in rows]
    mean = {name: np.mean([one[name] for one in each]) for name in SCORES}
    assert_scores(scores[group]["per_client"], mean)


def test_clusters_renamed_by_client_are_right_per_client_and_wrong_pooled(federation):
    shifts = iter(range(6))
    renamed = tuple(
        jnp.stack([(row + next(shifts)) % K for row in labels]) for labels in federation.labels
    )
    scores = scoring.score(federation, renamed, PARTICIPANTS)["all"]
    for name in SCORES:
        np.testing.assert_allclose(scores["per_client"][name], 1.0, atol=1e-6)
        assert scores["pooled"][name] < 0.7


def test_a_group_without_rows_has_no_score_and_everyone_participates_unless_told(
    federation, predicted
):
    full = federation.replace(cohorts=federation.cohorts[:1], labels=federation.labels[:1])
    scores = scoring.score(full, predicted[:1])
    for group in ("partial_view", "non_participating"):
        assert all(np.isnan(x) for x in jax.tree.leaves(scores[group]))
    for group in ("multi_view", "participating"):
        jax.tree.map(np.testing.assert_array_equal, scores[group], scores["all"])
    assert all(np.isfinite(x) for x in jax.tree.leaves(scores["all"]))


def test_a_client_without_rows_counts_nowhere(federation, predicted):
    # Of the cohort that holds view 0, client 0 loses its rows; the group is the other two partial.
    cohort = federation.cohorts[1]
    emptied = federation.replace(
        cohorts=(
            federation.cohorts[0],
            cohort.replace(mask=cohort.mask.at[0].set(False)),
            federation.cohorts[2],
        )
    )
    got = scoring.score(emptied, predicted, PARTICIPANTS)
    rows = [rows_of(federation, predicted, c, i) for c, i in ((1, 1), (2, 0))]
    truth, guess = map(np.concatenate, zip(*rows, strict=True))
    assert_scores(got["partial_view"]["pooled"], reference(truth, guess))
    each = [reference(*pair) for pair in rows]
    assert_scores(
        got["partial_view"]["per_client"],
        {name: np.mean([one[name] for one in each]) for name in SCORES},
    )


def test_scores_need_labels(federation, predicted):
    with pytest.raises(ValueError, match="labels: the federation has none"):
        scoring.score(federation.without_labels(), predicted)


def test_predicted_clusters_have_the_shapes_of_the_labels(federation):
    found = [np.zeros(np.shape(labels), int) for labels in federation.labels]
    scoring.score(federation, found)
    for wrong in ([np.stack([x, x]) for x in found], [x[:1] for x in found], found[:-1]):
        with pytest.raises(ValueError, match="predicted: got 'shapes"):
            scoring.score(federation, wrong)
    for wrong in ([x.astype(float) for x in found], [np.full(x.shape, np.nan) for x in found]):
        with pytest.raises(ValueError, match=r"^predicted: got 'an array of float64'"):
            scoring.score(federation, wrong)
    with pytest.raises(ValueError, match=r"^participants: got .* each of the . cohorts"):
        scoring.score(federation, found, participants=[np.array([0])] * (len(found) + 1))
