import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from sklearn import metrics as sk

from jaxfedmvc import metrics

SCORES = ("acc", "nmi", "ari", "purity")
jit_scores = jax.jit(metrics.scores, static_argnums=(2, 3))


def reference(labels, predicted):
    table = sk.cluster.contingency_matrix(labels, predicted)
    matched = linear_sum_assignment(table, maximize=True)
    return {
        "acc": table[matched].sum() / len(labels),
        "nmi": sk.normalized_mutual_info_score(labels, predicted),
        "ari": sk.adjusted_rand_score(labels, predicted),
        "purity": table.max(axis=0).sum() / len(labels),
    }


def assert_scores(actual, expected, atol=1e-5):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, atol=atol, err_msg=name)


@pytest.mark.parametrize("n_classes, n_clusters", [(3, 3), (5, 2), (2, 6), (1, 4)])
@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.9])
def test_agrees_with_sklearn(n_classes, n_clusters, agreement):
    rng = np.random.default_rng(0)
    labels = rng.integers(n_classes, size=60)
    noise = rng.integers(n_clusters, size=60)
    predicted = np.where(rng.random(60) < agreement, (labels + 1) % n_clusters, noise)
    assert_scores(
        jit_scores(labels, predicted, n_classes, n_clusters), reference(labels, predicted)
    )


@pytest.mark.parametrize("minority", [0.5, 0.01, 0.0002])
@pytest.mark.parametrize("flipped", [0.0, 0.3, 1.0])
def test_float32_is_accurate_on_many_skewed_rows(minority, flipped):
    rng = np.random.default_rng(0)
    labels = (rng.random(50_000) < minority).astype(int)
    redrawn = (rng.random(50_000) < minority).astype(int)
    predicted = np.where(rng.random(50_000) < flipped, redrawn, labels)
    assert_scores(jit_scores(labels, predicted, 10, 10), reference(labels, predicted))


def test_float32_is_accurate_on_many_rows_of_ten_classes():
    rng = np.random.default_rng(1)
    labels = rng.integers(10, size=50_000)
    predicted = np.where(rng.random(50_000) < 0.6, labels, rng.integers(10, size=50_000))
    assert_scores(jit_scores(labels, predicted, 10, 10), reference(labels, predicted))


def test_hand_worked_case():
    # Table [[2, 1, 0], [0, 1, 2]]: clusters 0 and 2 match, 2 + 2 of 6 rows; the cluster maxima are
    # 2 + 1 + 2. In nats I = (4 / 6) log 2, H(U) = log 2, H(V) = log 3. Of the 15 pairs, 2 are
    # together in both, 6 in classes, 3 in clusters: (2 - 18 / 15) / ((6 + 3) / 2 - 18 / 15).
    labels, predicted = [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]
    np.testing.assert_array_equal(
        metrics.contingency(labels, predicted, 2, 3), [[2, 1, 0], [0, 1, 2]]
    )
    nmi = 2 / 3 * np.log(2) / ((np.log(2) + np.log(3)) / 2)
    expected = {"acc": 4 / 6, "nmi": nmi, "ari": 0.8 / 3.3, "purity": 5 / 6}
    assert_scores(jit_scores(jnp.array(labels), jnp.array(predicted), 2, 3), expected, atol=1e-6)


@pytest.mark.parametrize(
    "labels, predicted",
    [
        ([1, 1, 1], [2, 2, 2]),
        ([0, 1, 2], [0, 0, 0]),
        ([3, 3, 3], [0, 1, 2]),
        ([0, 1, 2], [2, 0, 1]),
        ([2], [0]),
        ([0, 0, 1, 1], [0, 1, 0, 1]),
    ],
    ids=["both single", "one cluster", "one class", "singletons", "one row", "crossed"],
)
def test_degenerate_labelings_follow_sklearn(labels, predicted):
    labels, predicted = np.array(labels), np.array(predicted)
    assert_scores(jit_scores(labels, predicted, 4, 4), reference(labels, predicted), atol=1e-6)


def test_no_rows_give_nan():
    labels = jnp.zeros(4, int)
    empty = jit_scores(labels, labels, 2, 2, jnp.zeros(4, bool))
    assert all(np.isnan(empty[name]) for name in SCORES)
    assert all(np.isnan(value) for value in jit_scores(labels - 1, labels, 2, 2).values())


@pytest.mark.parametrize("junk", [-1, 0, 99])
def test_mask_selects_rows(junk):
    rng = np.random.default_rng(2)
    labels, predicted = rng.integers(3, size=40), rng.integers(3, size=40)
    where = rng.random(40) < 0.5
    padded = jit_scores(
        np.where(where, labels, junk), np.where(where, predicted, junk), 3, 3, where
    )
    assert_scores(padded, reference(labels[where], predicted[where]))


def test_rows_out_of_range_count_nowhere_whether_they_are_selected_or_not():
    labels, predicted = [-1, 0, 1, 3, 2, 1], [1, -1, 1, 1, 2, 4]
    expected = np.zeros((3, 4))
    expected[1, 1] = expected[2, 2] = 1
    for where in (None, np.ones(6, bool)):
        found = metrics.contingency(np.array(labels), np.array(predicted), 3, 4, where)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_single_functions_and_vmap_equal_scores():
    rng = np.random.default_rng(3)
    labels, predicted = rng.integers(3, size=(4, 30)), rng.integers(5, size=(4, 30))
    where = rng.random((4, 30)) < 0.7
    where[3] = False  # an empty group among others
    batched = jax.jit(jax.vmap(lambda *args: metrics.scores(*args[:2], 3, 5, args[2])))
    batched = batched(labels, predicted, where)
    for i in range(4):
        assert_scores(jit_scores(labels[i], predicted[i], 3, 5, where[i]), _row(batched, i), 1e-6)
    args = labels[0], predicted[0], 3, 5, where[0]
    alone = (metrics.accuracy, metrics.nmi, metrics.ari, metrics.purity)
    assert_scores(dict(zip(SCORES, (f(*args) for f in alone), strict=True)), _row(batched, 0), 1e-6)


@pytest.mark.slow
def test_summed_tables_score_the_union():
    rng = np.random.default_rng(4)
    labels, predicted = rng.integers(3, size=50), rng.integers(3, size=50)
    parts = [metrics.contingency(labels[s], predicted[s], 3, 3) for s in (slice(20), slice(20, 50))]
    assert_scores(
        metrics.scores_from_contingency(parts[0] + parts[1]), reference(labels, predicted)
    )


@pytest.mark.parametrize("seed", range(5))
def test_names_of_clusters_do_not_matter(seed):
    rng = np.random.default_rng(seed)
    labels, predicted = rng.integers(4, size=30), rng.integers(6, size=30)
    renamed = rng.permutation(6)[predicted]
    assert_scores(
        jit_scores(labels, renamed, 4, 6), dict(jit_scores(labels, predicted, 4, 6)), atol=1e-6
    )


# --- Without classes ------------------------------------------------------------------------------

silhouette = jax.jit(metrics.simplified_silhouette, static_argnums=2)


def test_simplified_silhouette_is_numpys_on_the_rows_that_count():
    """Of five clusters two have no rows; padding and rows in no cluster may be anything."""
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(24, 3)).astype(np.float32), rng.choice([0, 1, 3], size=24)
    where = rng.random(24) < 0.8
    outside = np.flatnonzero(where)[:2]
    labels[outside] = [-1, 5]
    x[~where] = x[outside] = np.nan
    rows = np.flatnonzero(where & (labels >= 0) & (labels < 5))
    centroids = {k: x[rows[labels[rows] == k]].mean(axis=0) for k in (0, 1, 3)}
    expected = []
    for i in rows:
        distances = {k: np.linalg.norm(x[i] - c) for k, c in centroids.items()}
        a = distances.pop(labels[i])
        b = min(distances.values())
        expected.append((b - a) / max(a, b))
    found = silhouette(x, labels, 5, where)
    np.testing.assert_allclose(found, np.mean(expected), rtol=1e-5)


def test_simplified_silhouettes_worked_by_hand():
    # Centroids 1 and 11: each row is 1 from its own, and 11, 9, 9, 11 from the other.
    x, labels = np.float32([[0], [2], [10], [12]]), np.array([0, 0, 1, 1])
    expected = np.mean([10 / 11, 8 / 9, 8 / 9, 10 / 11])
    np.testing.assert_allclose(silhouette(x, labels, 2), expected, rtol=1e-6)
    assert silhouette(0 * x, labels, 2) == 0  # neither is near
    assert np.isnan(silhouette(x, 0 * labels, 2)) and np.isnan(silhouette(x, labels - 2, 2))


def test_traces_once():
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(lambda a, b: metrics.scores(a, b, 2, 2), n=1))
    for labels in (jnp.array([0, 1, 1]), jnp.array([1, 1, 0])):
        traced(labels, labels)


@pytest.mark.parametrize(
    "args, name",
    [
        (([0, 1], [0, 1], 0, 2), "n_classes"),
        (([0, 1], [0, 1], 2, 0), "n_clusters"),
        (([[0, 1]], [[0, 1]], 2, 2), "labels"),
        (([[0], [0, 1]], [0, 1], 2, 2), "labels"),
        (([0, 1], [[0], [0, 1]], 2, 2), "predicted"),
        (([0, 1], [0], 2, 2), "predicted"),
        (([0, 1], [0, 1], 2, 2, [True]), "where"),
    ],
)
def test_wrong_arguments_are_named(args, name):
    with pytest.raises(ValueError, match=f"^{name}(:| must)"):
        metrics.scores(*args)


def test_table_must_be_a_matrix():
    with pytest.raises(ValueError, match=r"^table must"):
        metrics.scores_from_contingency(jnp.ones(3))


@pytest.mark.parametrize("table", [np.zeros((0, 3)), np.full((2, 2), 1j), [["a"]]])
def test_a_table_that_is_none_is_named(table):
    with pytest.raises(ValueError, match=r"^table must"):
        metrics.scores_from_contingency(table)


@pytest.mark.parametrize("far", [2**32, 2**31, -(2**32) + 1, np.uint64(2**63)])
def test_numbers_beyond_32_bits_are_out_of_range(far):
    labels = np.array([far, far, 1], np.asarray(far).dtype)
    expected = [[0, 0], [0, 1]]
    np.testing.assert_array_equal(metrics.contingency(labels, [0, 1, 1], 2, 2), expected)
    np.testing.assert_array_equal(metrics.contingency([0, 1, 1], labels, 2, 2), expected)


def test_words_are_no_labels():
    with pytest.raises(ValueError, match=r"^labels must be integers, got <U1"):
        metrics.scores(["a", "b"], [0, 1], 2, 2)


def test_a_list_of_traced_labels():
    found = jax.jit(lambda a: metrics.contingency([a, 1], [0, 1], 2, 2))(1)
    np.testing.assert_array_equal(found, [[0, 0], [1, 1]])


def _row(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def test_a_table_of_integers_has_the_scores_of_its_floats():
    # Sums of products of such counts overflow int32.
    counts = np.array([[60000, 1], [0, 70000]])
    expected = metrics.scores_from_contingency(jnp.asarray(counts, jnp.float32))
    for table in (counts, counts.tolist(), jnp.asarray(counts, jnp.int32)):
        assert_scores(metrics.scores_from_contingency(table), expected, atol=0)
        assert float(metrics.ari_from_contingency(table)) == float(expected["ari"])
    assert float(expected["ari"]) == pytest.approx(0.99997, abs=1e-5)
    with pytest.raises(ValueError, match=r"table must have shape \[n_classes, n_clusters\]"):
        metrics.ari_from_contingency([1, 2])


def test_labels_may_be_of_a_type_too_narrow_for_the_number_of_classes():
    labels = np.array([0, 1, -1, 100], np.int8)
    table = metrics.contingency(labels, labels, 200, 300)
    assert float(table.sum()) == 3 and float(table[100, 100]) == 1
    with pytest.raises(ValueError, match="predicted must be integers, got float32"):
        metrics.contingency(labels, np.zeros(4, np.float32), 2, 2)


def test_a_mask_of_the_silhouette_has_an_entry_for_each_row():
    with pytest.raises(ValueError, match=r"where: got \(1,\); allowed is the shape \(3,\)"):
        metrics.simplified_silhouette(np.zeros((3, 1)), [0, 1, 1], 2, [True])
    with pytest.raises(ValueError, match="labels must be integers, got float32"):
        metrics.simplified_silhouette(np.zeros((3, 1)), [0.5, 1.0, 1.0], 2)


def test_a_silhouette_of_numbers_that_are_not_finite_is_refused_and_none_of_padding():
    x, labels = np.array([[0.0], [1.0], [np.nan]]), [0, 1, 1]
    with pytest.raises(ValueError, match="x must be finite in the rows that count, got NaN"):
        metrics.simplified_silhouette(x, labels, 2)
    assert np.isfinite(metrics.simplified_silhouette(x, labels, 2, [True, True, False]))
