import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import entropy
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics.pairwise import euclidean_distances

from jaxfedmvc import Federation
from jaxfedmvc.metrics import information as info
from jaxfedmvc.metrics.information import RIDGE, information

jitted = jax.jit(information, static_argnums=2)


def of_rows(views, labels, k):
    """The information of one client's rows."""
    federation = Federation.from_clients([dict(enumerate(views))])
    return float(jitted(federation, [np.asarray(labels)[None]], k))


def by_leaving_out(x, labels, shares):
    """Mean log q, each row told by a regression that has never seen it; by scikit-learn."""
    squares = euclidean_distances(x, squared=True)
    gram = np.exp(-squares / (squares.mean() / 2))
    centre = np.eye(len(x)) - 1 / len(x)
    gram = centre @ gram @ centre
    k = len(shares)
    y = np.eye(k)[labels] - np.eye(k)[labels].mean(axis=0)
    found = []
    for i, own in enumerate(labels):
        rest = np.arange(len(x)) != i
        fit = KernelRidge(alpha=RIDGE, kernel="precomputed").fit(gram[np.ix_(rest, rest)], y[rest])
        q = np.maximum(shares + fit.predict(gram[[i]][:, rest])[0], 1 / k)
        found.append(np.log(q[own] / q.sum()))
    return np.mean(found)


def test_each_row_is_told_by_the_others():
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat([0, 1, 2], (14, 9, 7)))
    views = [2 * np.eye(3)[labels] + rng.normal(size=(30, 3)), rng.normal(size=(30, 5))]
    shares = np.array([14, 9, 7]) / 30
    expected = np.mean([by_leaving_out(x, labels, shares) for x in views]) + entropy(shares)
    np.testing.assert_allclose(of_rows(views, labels, 3), expected, atol=2e-5)


def test_clients_add_up_in_any_order_and_padding_is_nothing():
    rng = np.random.default_rng(1)
    labels = [rng.integers(0, 2, n) for n in (12, 20, 16)]
    views = [
        {v: (v + 1) * y[:, None] + rng.normal(size=(len(y), v + 2)) for v in range(2)}
        for y in labels
    ]
    del views[2][0]
    sizes = np.bincount(np.concatenate(labels))
    shares = sizes / sizes.sum()
    told = [
        np.mean([by_leaving_out(x, y, shares) for x in held.values()])
        for held, y in zip(views, labels, strict=True)
    ]
    expected = entropy(shares) + np.average(told, weights=[2 * 12, 2 * 20, 16])
    for order in ([0, 1, 2], [2, 1, 0]):
        federation = Federation.from_clients([views[i] for i in order])
        found = []
        for cohort in federation.cohorts:
            mine = np.full(cohort.mask.shape, 1, np.int32)  # padding is in a cluster, too
            for place, client in enumerate(np.asarray(cohort.client_ids)):
                rows = labels[order[client]]
                mine[place, : len(rows)] = rows
            found.append(mine)
        np.testing.assert_allclose(float(jitted(federation, found, 2)), expected, atol=2e-5)


def test_a_client_alone_sums_what_its_rows_tell():
    rng = np.random.default_rng(3)
    labels, shares = rng.integers(0, 2, 20), np.array([0.5, 0.3, 0.2])
    views = [labels[:, None] + rng.normal(size=(20, d)) for d in (2, 3)]
    expected = sum(20 * by_leaving_out(x, labels, shares) for x in views)
    outside = np.concatenate([labels, [-1, 3]])  # two rows more, in no cluster
    padded = [np.concatenate([x, rng.normal(size=(2, x.shape[1]))]) for x in views]
    for held, mine in ((views, labels), (padded, outside)):
        found = jax.jit(info.sum_log_q)(held, mine, shares)
        np.testing.assert_allclose(found, expected, atol=1e-3)


def test_clusters_that_are_there_tell_most_and_no_more_than_the_bound():
    rng = np.random.default_rng(2)
    true = np.arange(60) % 3
    views = [9 * np.eye(3)[true] + rng.normal(size=(60, 3)) for _ in range(2)]
    merged, drawn = np.minimum(true, 1), rng.permutation(true)
    told = [of_rows(views, y, 3) for y in (true, merged, drawn)]
    most = np.log(3) - np.log(2 - 1 / 3)
    assert most - 0.05 < told[0] <= most + 1e-6
    assert told[0] > told[1] > told[2]
    assert told[2] < 0.05


def test_one_cluster_tells_nothing():
    x = np.random.default_rng(3).normal(size=(20, 2))
    assert of_rows([x], np.zeros(20, int), 1) == pytest.approx(0.0, abs=1e-6)
    # Nor do two, each of which is all that a client knows.
    federation = Federation.from_clients([{0: x}, {0: x + 5.0}])
    found = [np.repeat([[0], [1]], 20, axis=1)]
    assert float(jitted(federation, found, 2)) == pytest.approx(0.0, abs=1e-6)


def test_of_many_rows_the_same_part_is_compared(monkeypatch):
    monkeypatch.setattr(info, "MOST_ROWS", 25)
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 2, 80)
    x = 3.0 * labels[:, None] + rng.normal(size=(80, 2))
    part = np.argsort(np.random.default_rng(0).random(80))[:25]
    shares = np.bincount(labels) / 80
    expected = by_leaving_out(x[part], labels[part], shares) + entropy(shares)
    own = jax.jit(lambda federation, found: information(federation, found, 2))
    found = own(Federation.from_clients([{0: x}]), [labels[None]])
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_array_equal(info._compared(np.arange(120) < 80), part)  # however padded


def test_alike_rows_and_no_rows_are_told():
    labels = np.arange(10) % 2
    assert of_rows([np.ones((10, 3))], labels, 2) <= 0.0
    nowhere = np.full(10, -1)
    assert np.isnan(of_rows([np.ones((10, 3))], nowhere, 2))


@pytest.mark.parametrize(
    ("shape", "k", "message"),
    [((1, 9), 2, r"labels\[0\]: got \(1, 9\)"), ((1, 10), 0, "n_clusters: got 0")],
)
def test_wrong_arguments(shape, k, message):
    federation = Federation.from_clients([{0: jnp.ones((10, 2))}])
    with pytest.raises(ValueError, match=message):
        information(federation, [jnp.zeros(shape, jnp.int32)], k)


def test_labels_that_are_no_integers_or_of_fewer_cohorts_are_refused():
    federation = Federation.from_clients([{0: jnp.ones((10, 2))}])
    with pytest.raises(ValueError, match=r"labels\[0\]: got 'an array of float32'; .* integers"):
        information(federation, [jnp.zeros((1, 10))], 2)
    with pytest.raises(ValueError, match="labels: got '0 arrays'; allowed is one for each of 1"):
        information(federation, [], 2)
