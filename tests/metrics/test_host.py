"""Scores on the host are scikit-learn's, and those inside a program."""

import jax
import numpy as np
import pytest
from sklearn import metrics as sk
from sklearn.metrics.cluster import contingency_matrix

from jaxfedmvc import Federation, data, metrics
from jaxfedmvc.engine import RunResult
from jaxfedmvc.metrics import federation as on_device
from jaxfedmvc.metrics import host

tables_on_device = jax.jit(on_device.tables, static_argnums=2)


@pytest.mark.parametrize(
    "seed", [0, 4, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 3))]
)
def test_scores_of_a_table_are_scikit_learns(seed):
    rng = np.random.default_rng(seed)
    labels, predicted = rng.integers(0, 4, 90), rng.integers(0, 3 + seed, 90)
    found = host.table_scores(contingency_matrix(labels, predicted))
    np.testing.assert_allclose(found["nmi"], sk.normalized_mutual_info_score(labels, predicted))
    np.testing.assert_allclose(found["ari"], sk.adjusted_rand_score(labels, predicted), atol=1e-12)
    device = jax.jit(metrics.scores, static_argnums=(2, 3))(labels, predicted, 4, 3 + seed)
    for name, value in found.items():
        np.testing.assert_allclose(value, device[name], atol=1e-5, err_msg=name)


def test_tables_worked_by_hand():
    right = host.table_scores(np.array([[0, 5], [5, 0]]))
    assert right == {"acc": 1.0, "nmi": 1.0, "ari": 1.0, "purity": 1.0}
    one_cluster = host.table_scores(np.array([[5], [5]]))
    assert one_cluster == {"acc": 0.5, "nmi": 0.0, "ari": 0.0, "purity": 0.5}
    assert all(np.isnan(x) for x in host.table_scores(np.zeros((2, 2))).values())
    assert host.table_scores(np.array([[3]])) == dict.fromkeys(host.METRICS, 1.0)


def test_classes_and_clusters_out_of_range_count_nowhere():
    """They would count in another cell, of another client even."""
    labels, predicted = np.array([[0, 1, 1], [-1, 2, 0]]), np.array([[2, 0, -1], [0, 1, 1]])
    tables = host.client_tables(labels, predicted, np.ones((2, 3), bool), (2, 2))
    assert tables.tolist() == [[[0, 0], [1, 0]], [[0, 1], [0, 0]]]
    for client, table in enumerate(tables):
        count = jax.jit(metrics.contingency, static_argnums=(2, 3))
        np.testing.assert_array_equal(table, count(labels[client], predicted[client], 2, 2))


def test_the_share_of_rows_in_a_cluster_stands_beside_their_scores():
    """Ten rows of two clients, five of them in no cluster; clusters of padding count nowhere."""
    views = [{0: np.ones((6, 1))}, {0: np.ones((4, 1))}]
    federation = Federation.from_clients(views, [np.arange(6) % 2, np.arange(4) % 2])
    predicted = [np.array([[0, 1, 0, -1, -1, -1], [0, 1, -1, -1, 0, 1]])]
    found = host.score(federation, predicted, [np.array([0])])
    assert found["all"]["pooled"] == pytest.approx(dict.fromkeys(host.METRICS, 1.0))
    groups = ("all", "participating", "non_participating")
    assert [found[name]["clustered"] for name in groups] == [{"share": 0.5}] * 3
    assert np.isnan(found["partial_view"]["clustered"]["share"])
    nowhere = host.score(federation, [np.full((2, 6), -1)])["all"]
    assert nowhere["clustered"] == {"share": 0.0} and np.isnan(nowhere["pooled"]["acc"])


def test_what_is_no_federation_or_no_labels_of_one_is_named():
    federation = Federation.from_clients([{0: np.ones((2, 1))}], [np.arange(2)])
    with pytest.raises(ValueError, match="federation: got 'ndarray'; allowed is a Federation"):
        host.score(np.arange(2), np.arange(2))
    result = RunResult(*[None] * 6)
    with pytest.raises(ValueError, match="predicted: got 'RunResult'; allowed is its labels"):
        host.score(federation, result)
    with pytest.raises(ValueError, match=r"shapes \[\(\), .*, \.\.\.\]'; allowed is \[\(1, 2\)\]"):
        host.score(federation, np.zeros(99, int))


def test_groups_are_by_views_and_by_participation_alone():
    """Clients 0 and 1 hold both views, 2 and 3 one; the second of each two takes no part."""
    both, one = {0: np.ones((2, 1)), 1: np.ones((2, 1))}, {1: np.ones((2, 1))}
    federation = Federation.from_clients([both, both, one, one], [np.arange(2)] * 4)
    found = host.members(federation, [np.array([0]), np.array([1])])
    expected = {
        "all": [0, 1, 2, 3],
        "multi_view": [0, 1],
        "partial_view": [2, 3],
        "participating": [0, 3],
        "non_participating": [1, 2],
    }
    assert {name: np.flatnonzero(chosen).tolist() for name, chosen in found.items()} == expected


def test_a_client_without_rows_is_left_out_of_the_mean_over_clients():
    tables = np.array([[[2, 0], [0, 2]], [[0, 0], [0, 0]], [[2, 0], [2, 0]]])
    found = host.group_scores(tables, {"all": np.ones(3, bool)})["all"]
    assert found["per_client"]["acc"] == 0.75
    assert found["pooled"]["acc"] == 0.75


def test_tables_inside_a_program_are_those_of_the_host():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, 60)
    views = [rng.normal(size=(60, d)) for d in (3, 2)]
    parts = data.hybrid_partition(0, n_samples=60, n_views=2, n_clients=6, ratio=(1, 1))
    federation = Federation.from_arrays(views, truth, partition=parts)
    predicted = [np.where(c.mask, rng.integers(0, 4, c.mask.shape), -1) for c in federation.cohorts]
    found = host.tables(federation, predicted)
    np.testing.assert_array_equal(tables_on_device(federation, predicted, 4), found)
    # A client that lost its rows, of which labels and clusters are left.
    first = federation.cohorts[0]
    emptied = first.replace(mask=np.asarray(first.mask) & (np.arange(first.n_clients) > 0)[:, None])
    federation = federation.replace(cohorts=(emptied, *federation.cohorts[1:]))
    expected = found.copy()
    expected[0] = 0
    np.testing.assert_array_equal(host.tables(federation, predicted), expected)
    np.testing.assert_array_equal(tables_on_device(federation, predicted, 4), expected)
