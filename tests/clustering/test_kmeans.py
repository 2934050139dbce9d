import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare
from sklearn import cluster, datasets

from jaxfedmvc.clustering import kmeans, kmeans_plusplus, lloyd, predict
from jaxfedmvc.clustering.kmeans import means_of

jit_kmeans = jax.jit(kmeans, static_argnames=("n_clusters", "n_init", "max_iter"))
jit_lloyd = jax.jit(lloyd, static_argnames="max_iter")
jit_plusplus = jax.jit(kmeans_plusplus, static_argnums=2)
jit_predict, jit_means = jax.jit(predict), jax.jit(means_of, static_argnums=2)


def blobs(n=60, d=2, k=3, seed=0, std=1.0):
    x, _ = datasets.make_blobs(n, d, centers=k, cluster_std=std, random_state=seed)
    return x.astype(np.float32)


def load(name):
    if name == "blobs":
        return blobs(400, 5, 8, std=2.0), 8
    loader = {
        "iris": datasets.load_iris,
        "wine": datasets.load_wine,
        "digits": datasets.load_digits,
    }
    x, y = loader[name](return_X_y=True)
    if name == "wine":
        x = (x - x.mean(0)) / x.std(0)
    return x[:500].astype(np.float32), len(np.unique(y))


@pytest.mark.parametrize(
    "name",
    ["digits", *(pytest.param(n, marks=pytest.mark.slow) for n in ("blobs", "iris", "wine"))],
)
def test_inertia_matches_sklearn(name):
    x, k = load(name)
    ours = jit_kmeans(jax.random.key(0), x, n_clusters=k)
    theirs = cluster.KMeans(k, n_init=10, random_state=0).fit(x)
    assert ours.inertia <= 1.01 * theirs.inertia_
    chex.assert_shape(ours, [(k, x.shape[1]), (len(x),), (), ()])
    # The parts of one result belong together.
    np.testing.assert_array_equal(ours.labels, jit_predict(x, ours.centroids))
    actual = np.square(x - np.asarray(ours.centroids)[ours.labels]).sum()
    np.testing.assert_allclose(ours.inertia, actual, rtol=1e-5)


@pytest.mark.parametrize("tol, n_iter", [(0.0, 27), (1e-2, 9)])
def test_lloyd_follows_sklearn_from_one_start(tol, n_iter):
    x = 100 * blobs(200, 4, 5, std=4.0)  # large, for the threshold is relative to the variance
    start = x[:5]
    ours = jit_lloyd(x, start, tol=tol)
    theirs = cluster.KMeans(5, init=start, n_init=1, tol=tol, algorithm="lloyd").fit(x)
    np.testing.assert_array_equal(ours.labels, theirs.labels_)
    np.testing.assert_allclose(ours.centroids, theirs.cluster_centers_, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.inertia, theirs.inertia_, rtol=1e-5)
    assert ours.n_iter == theirs.n_iter_ == n_iter


def test_given_centroids_make_one_run_without_a_key():
    x = blobs()
    chex.assert_trees_all_equal(kmeans(None, x, 3, centroids=x[:3]), lloyd(x, x[:3]))


def test_hand_worked_line():
    # From 0 and 1: means 0 and (1 + 5 + 6) / 3 = 4, then {0, 1} and {5, 6}, then nothing moves.
    x = np.float32([[0], [1], [5], [6]])
    result = jit_lloyd(x, x[:2], tol=0.0)
    np.testing.assert_array_equal(result.centroids, [[0.5], [5.5]])
    np.testing.assert_array_equal(result.labels, [0, 0, 1, 1])
    assert result.inertia == 1.0 and result.n_iter == 3
    cut = jit_lloyd(x, x[:2], tol=0.0, max_iter=1)
    np.testing.assert_allclose(cut.centroids, [[0.0], [4.0]], atol=1e-6)
    np.testing.assert_array_equal(cut.labels, [0, 0, 1, 1])
    np.testing.assert_allclose(cut.inertia, 6.0, rtol=1e-6)
    assert cut.n_iter == 1


@pytest.mark.parametrize("garbage", [0.0, 1e6])
def test_padding_changes_nothing(garbage):
    x = blobs(std=3.0)
    padded = np.concatenate([x, np.full((17, 2), garbage, np.float32)])
    where = np.arange(len(padded)) < len(x)
    key = jax.random.key(1)
    plain = jit_kmeans(key, x, n_clusters=4, n_init=1)
    masked = jit_kmeans(key, padded, n_clusters=4, n_init=1, where=where)
    np.testing.assert_array_equal(masked.labels, np.append(plain.labels, np.full(17, -1)))
    np.testing.assert_allclose(masked.centroids, plain.centroids, rtol=1e-5)
    np.testing.assert_allclose(masked.inertia, plain.inertia, rtol=1e-5)
    assert masked.n_iter == plain.n_iter


def test_values_of_masked_rows_are_never_read():
    x, where = blobs(), np.arange(60) % 3 > 0
    first = jit_kmeans(jax.random.key(0), x, n_clusters=3, n_init=2, where=where)
    spoilt = np.where(where[:, None], x, np.nan)
    second = jit_kmeans(jax.random.key(0), spoilt, n_clusters=3, n_init=2, where=where)
    chex.assert_trees_all_equal(first, second)


def test_vmap_equals_loop():
    x = np.stack([blobs(seed=s) for s in range(3)])
    where = np.arange(60)[None] < np.array([[60], [40], [2]])
    keys = jax.random.split(jax.random.key(0), 3)
    run = functools.partial(kmeans, n_clusters=3, n_init=2)
    batched = jax.jit(jax.vmap(lambda key, x, where: run(key, x, where=where)))(keys, x, where)
    batched = jax.device_get(batched)
    for i, key in enumerate(keys):
        alone = jit_kmeans(key, x[i], n_clusters=3, n_init=2, where=where[i])
        chex.assert_trees_all_close(
            type(alone)(*(leaf[i] for leaf in batched)), alone, rtol=1e-5, atol=1e-5
        )


def test_same_key_gives_same_bits_and_traces_once():
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(lambda key, x: kmeans(key, x, 3, n_init=2), n=1))
    x = blobs()
    chex.assert_trees_all_equal(traced(jax.random.key(7), x), traced(jax.random.key(7), x))
    traced(jax.random.key(8), x + 1)


@pytest.mark.parametrize("n_selected", [0, 1, 2, 60])
def test_equal_and_too_few_rows_stay_finite(n_selected):
    where = np.arange(60) < n_selected
    for x in (np.full((60, 2), 3.3, np.float32), blobs()):
        result = jit_kmeans(jax.random.key(0), x, n_clusters=3, n_init=2, where=where)
        chex.assert_tree_all_finite(result)
        np.testing.assert_array_equal(result.labels >= 0, where)
        if n_selected < 3 or np.ptp(x) == 0:
            np.testing.assert_allclose(result.inertia, 0.0, atol=1e-6)
        if n_selected == 0:
            np.testing.assert_array_equal(result.centroids, np.zeros((3, 2)))


def test_empty_cluster_keeps_its_centroid():
    x = blobs()
    start = np.concatenate([x[:2], np.full((1, 2), 1e3, np.float32)])
    result = jax.device_get(jit_lloyd(x, start))
    np.testing.assert_allclose(result.centroids[2], start[2], rtol=1e-6)
    assert set(np.unique(result.labels)) == {0, 1}


def test_tight_clusters_far_from_the_origin():
    # Clusters 1 apart, 0.02 wide, at 1e4: squared norms near 1e8 hide squared distances near 1.
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    near = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])[labels]
    x = (1e4 + near + rng.normal(scale=0.02, size=near.shape)).astype(np.float32)
    result = jit_kmeans(jax.random.key(0), x, n_clusters=3, n_init=2)
    exact = x.astype(np.float64)
    means = np.stack([exact[labels == j].mean(axis=0) for j in range(3)])
    inertia = np.square(exact - means[labels]).sum()
    np.testing.assert_allclose(result.inertia, inertia, rtol=1e-3)
    np.testing.assert_array_equal(jit_predict(x, means), labels)
    np.testing.assert_array_equal(jit_predict(x, result.centroids), result.labels)


def test_first_centre_is_uniform_over_selected_rows():
    x = np.arange(12, dtype=np.float32)[:, None]
    where = np.arange(12) % 3 != 1
    draw = jax.jit(jax.vmap(lambda key: kmeans_plusplus(key, x, 1, where=where)))
    drawn = draw(jax.random.split(jax.random.key(0), 4000)).astype(int).ravel()
    counts = np.bincount(drawn, minlength=12)
    assert counts[~where].sum() == 0
    assert chisquare(counts[where]).pvalue > 0.01


def test_next_centre_follows_squared_distance():
    # With rows 0, 1, 3 and first centre 0 the candidates are rows 1 and 3 with weights 1 : 9. The
    # greedy step prefers 3, which leaves 1, over 1, which leaves 4: row 1 needs both of 2 trials.
    x = jnp.array([[0.0], [1.0], [3.0]])
    draw = jax.jit(jax.vmap(lambda key: kmeans_plusplus(key, x, 2)))
    pairs = np.asarray(draw(jax.random.split(jax.random.key(0), 100_000)))[..., 0]
    second = pairs[pairs[:, 0] == 0, 1]
    rare = (second == 1).sum()
    assert not (second == 0).any()
    assert chisquare([rare, len(second) - rare], len(second) * np.array([0.01, 0.99])).pvalue > 0.01


def test_plusplus_repeats_selected_rows_when_it_runs_out():
    # Row 0 is what an argmax over nothing would return, and is not selected.
    x, where = 3 + np.arange(8, dtype=np.float32)[:, None], np.arange(8) >= 6
    centroids = kmeans_plusplus(jax.random.key(0), x, 5, where=where)
    assert set(np.ravel(centroids).tolist()) == {9.0, 10.0}


@pytest.mark.parametrize("n_copies", [1, 5])
def test_plusplus_finds_every_distinct_row(n_copies):
    x = np.repeat(blobs(6), n_copies, axis=0)
    centroids = jit_plusplus(jax.random.key(0), x, 6)
    np.testing.assert_array_equal(np.unique(centroids, axis=0), np.unique(x, axis=0))


def weighted(n=60):
    """Weights 0 to 3, of mean 1.5."""
    return np.arange(n).astype(np.float32) % 4


@pytest.mark.parametrize("tol", [0.0, 1e-2])
def test_integer_weights_repeat_rows(tol):
    x, weights = blobs(std=3.0), weighted()
    ours = jit_lloyd(x, x[:4], tol=tol, weights=weights)
    copies = weights.astype(int)
    repeated = jit_lloyd(np.repeat(x, copies, axis=0), x[:4], tol=tol)
    np.testing.assert_array_equal(np.repeat(np.asarray(ours.labels), copies), repeated.labels)
    np.testing.assert_allclose(ours.centroids, repeated.centroids, rtol=1e-5)
    np.testing.assert_allclose(ours.inertia, repeated.inertia, rtol=1e-5)
    assert ours.n_iter == repeated.n_iter
    # A row of weight 0 has a label all the same.
    np.testing.assert_array_equal(ours.labels, jit_predict(x, ours.centroids))


def test_weighted_lloyd_follows_sklearn():
    x, weights = blobs(std=3.0), np.random.default_rng(0).exponential(size=60).astype(np.float32)
    ours = jit_lloyd(x, x[:4], tol=0.0, weights=weights)
    theirs = cluster.KMeans(4, init=x[:4], n_init=1, tol=0, algorithm="lloyd").fit(
        x, sample_weight=weights
    )
    np.testing.assert_array_equal(ours.labels, theirs.labels_)
    np.testing.assert_allclose(ours.centroids, theirs.cluster_centers_, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.inertia, theirs.inertia_, rtol=1e-5)


def test_scale_of_the_weights_scales_the_inertia_alone():
    x, weights, key = blobs(std=3.0), weighted(), jax.random.key(0)
    large = jit_kmeans(key, x, n_clusters=4, n_init=2, weights=weights)
    small = jit_kmeans(key, x, n_clusters=4, n_init=2, weights=1e-6 * weights)
    np.testing.assert_array_equal(small.labels, large.labels)
    np.testing.assert_allclose(small.centroids, large.centroids, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(small.inertia, 1e-6 * large.inertia, rtol=1e-5)


def test_the_threshold_is_relative_to_the_weighted_variance():
    """As without weights, see `test_lloyd_follows_sklearn_from_one_start`."""
    x = 100 * blobs(200, 4, 5, std=4.0)
    for scale in (1e-6, 1.0, 1e6):
        weights = np.full(200, scale, np.float32)
        assert jit_lloyd(x, x[:5], tol=1e-2, weights=weights).n_iter == 9


@pytest.mark.slow
def test_rows_of_weight_zero_move_nothing():
    x, where, key = blobs(std=3.0), np.arange(60) % 4 > 0, jax.random.key(0)
    left_out = jit_kmeans(key, x, n_clusters=4, n_init=2, where=where)
    without = jit_kmeans(key, x, n_clusters=4, n_init=2, weights=where.astype(np.float32))
    np.testing.assert_array_equal(np.where(where, without.labels, -1), left_out.labels)
    np.testing.assert_array_equal(without.labels >= 0, True)
    np.testing.assert_allclose(without.centroids, left_out.centroids, rtol=1e-5)
    np.testing.assert_allclose(without.inertia, left_out.inertia, rtol=1e-5)
    spoilt = np.where(where, weighted(), np.nan)
    masked = jit_kmeans(key, x, n_clusters=4, n_init=2, where=where, weights=spoilt)
    none = jit_kmeans(key, x, n_clusters=4, n_init=2, where=where, weights=0 * weighted())
    chex.assert_tree_all_finite((masked, none))
    assert none.inertia == 0


def test_rows_that_weigh_nothing_are_drawn_alike():
    """Not the first row, which may be padding and is zero there."""
    x, where = np.float32([[5], [1], [2]]), np.array([False, True, True])
    weights = np.float32([1, 0, 0])
    draw = jax.jit(jax.vmap(lambda key: kmeans_plusplus(key, x, 2, where=where, weights=weights)))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 400)))
    assert set(np.unique(drawn)) == {1.0, 2.0}
    assert 150 < (drawn[:, 0, 0] == 1).sum() < 250


def test_first_centre_follows_the_weights():
    x, weights = np.arange(12, dtype=np.float32)[:, None], weighted(12)
    draw = jax.jit(jax.vmap(lambda key: kmeans_plusplus(key, x, 1, weights=weights)))
    drawn = draw(jax.random.split(jax.random.key(0), 4000)).astype(int).ravel()
    counts = np.bincount(drawn, minlength=12)
    assert counts[weights == 0].sum() == 0
    positive = weights > 0
    expected = 4000 * weights[positive].astype(float) / weights.sum()
    assert chisquare(counts[positive], expected).pvalue > 0.01


def test_next_centre_follows_weighted_squared_distance():
    # Beside 0 the candidates 1 and 3 have 9 * 1 and 1 * 9. The greedy step prefers 1, which leaves
    # 1 * 4, over 3, which leaves 9 * 1: row 3 needs both of 2 trials.
    x, weights = jnp.array([[0.0], [1.0], [3.0]]), jnp.array([9.0, 9.0, 1.0])
    draw = jax.jit(jax.vmap(lambda key: kmeans_plusplus(key, x, 2, weights=weights)))
    pairs = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))[..., 0]
    second = pairs[pairs[:, 0] == 0, 1]
    rare = (second == 3).sum()
    assert not (second == 0).any()
    assert chisquare([rare, len(second) - rare], len(second) * np.array([0.25, 0.75])).pvalue > 0.01


def test_limit_is_the_number_of_clusters():
    # The number of candidates rises between 2 and 3, 7 and 8, and 20 and 21 clusters.
    slots, keys = 21, jax.random.split(jax.random.key(0), 4)
    x = blobs(std=2.0)
    chex.clear_trace_counter()
    limited = jax.jit(
        chex.assert_max_traces(lambda key, limit: kmeans(key, x, slots, n_init=1, limit=limit), n=1)
    )
    for k in (2, 7, 8):
        for key in keys:
            ours, plain = limited(key, k), jit_kmeans(key, x, n_clusters=k, n_init=1)
            np.testing.assert_array_equal(ours.labels, plain.labels)
            np.testing.assert_allclose(ours.centroids[:k], plain.centroids, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(ours.inertia, plain.inertia, rtol=1e-5)
            chex.assert_tree_all_finite(ours)
    chex.assert_trees_all_equal(limited(keys[0], 0), limited(keys[0], 1))
    chex.assert_trees_all_equal(limited(keys[0], slots + 9), limited(keys[0], slots))


def test_predict_leaves_out_centroids_that_are_not_in_use():
    x, centroids = np.float32([[0], [4.9], [9]]), np.float32([[1], [10], [5]])
    for n, expected in ((1, [0, 0, 0]), (2, [0, 0, 1]), (3, [0, 2, 1])):
        np.testing.assert_array_equal(jit_predict(x, centroids, limit=n), expected)


def test_limit_holds_for_given_centroids():
    x = blobs()
    limited = jit_lloyd(x, x[:5], limit=3)
    plain = jit_lloyd(x, x[:3])
    np.testing.assert_array_equal(limited.labels, plain.labels)
    np.testing.assert_allclose(limited.centroids[3:], x[3:5], rtol=1e-6)


@pytest.mark.slow
def test_draws_from_many_rows_follow_the_weights():
    # More rows than one block of a draw holds, the last block being half empty.
    n, x = 2500, np.arange(2500, dtype=np.float32)[:, None]
    weights = weighted(n) * (1 + np.arange(n) // 1000)
    draw = jax.jit(jax.vmap(lambda key: kmeans_plusplus(key, x, 1, weights=weights)))
    drawn = draw(jax.random.split(jax.random.key(0), 600)).astype(int).ravel()
    assert (weights[drawn] > 0).all()
    groups = (np.arange(n) // 500) * 4 + np.arange(n) % 4
    expected = np.bincount(groups, weights)
    counts = np.bincount(groups[drawn], minlength=len(expected))
    positive = expected > 0
    assert chisquare(counts[positive], 600 * (expected / expected.sum())[positive]).pvalue > 0.01


@pytest.mark.parametrize("n", [1000, 1500])
def test_padding_changes_no_draw_from_many_rows(n):
    x = blobs(n, std=3.0)
    plain = jit_plusplus(jax.random.key(0), x, 8)
    padded = np.concatenate([x, np.full((2600 - n, 2), np.nan, np.float32)])
    where = np.arange(len(padded)) < n
    np.testing.assert_array_equal(jit_plusplus(jax.random.key(0), padded, 8, where=where), plain)


@pytest.mark.parametrize(
    "kwargs, name",
    [
        ({"n_clusters": 0}, "n_clusters"),
        ({"n_clusters": 2.0}, "n_clusters"),
        ({"n_init": 0}, "n_init"),
        ({"max_iter": 0}, "max_iter"),
        ({"x": jnp.ones(4)}, "x"),
        ({"x": jnp.ones((0, 2))}, "x"),
        ({"where": jnp.ones((4, 1), bool)}, "where"),
        ({"centroids": jnp.ones((3, 2))}, "centroids"),
        ({"centroids": jnp.ones((2, 3))}, "centroids"),
        ({"centroids": jnp.array([[jnp.nan, 0.0], [1.0, 1.0]])}, "centroids"),
        ({"key": None}, "key"),
        ({"weights": jnp.ones(3)}, "weights"),
        ({"limit": "2"}, "limit"),
        ({"weights": jnp.array([1.0, -1.0, 1.0, 1.0])}, "weights"),
        ({"weights": jnp.array([1.0, jnp.inf, 1.0, 1.0])}, "weights"),
        ({"limit": jnp.ones(4, int)}, "limit"),
        ({"limit": 1.5}, "limit"),
        ({"tol": float("nan")}, "tol"),
        ({"tol": -1.0}, "tol"),
        ({"tol": "small"}, "tol"),
        ({"x": np.full((4, 2), 1j)}, "x"),
        ({"x": [["a", "b"]]}, "x"),
        ({"x": [[1, 2], [3]]}, "x"),
        ({"x": [[1, 10**20]]}, "x"),
        ({"centroids": np.full((2, 2), 1j)}, "centroids"),
    ],
)
def test_wrong_arguments_are_named(kwargs, name):
    arguments = {"key": jax.random.key(0), "x": jnp.ones((4, 2)), "n_clusters": 2} | kwargs
    with pytest.raises(ValueError, match=f"^{name}(:| must)"):
        kmeans(**arguments)


def test_predict_rejects_centroids_of_other_width_and_without_a_place():
    with pytest.raises(ValueError, match=r"^centroids must be finite"):
        predict(jnp.ones((4, 2)), jnp.array([[jnp.nan, 0.0], [1.0, 1.0]]))
    with pytest.raises(ValueError, match=r"^centroids must have shape \[k, 2\]"):
        predict(jnp.ones((4, 2)), jnp.ones((2, 3)))


def test_means_and_numbers_are_of_the_same_rows():
    x = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    labels = np.arange(30) % 4
    labels[:5] = -1
    x[2] = np.nan  # of no cluster
    means, sizes = jax.device_get(jit_means(x, labels, 5))
    assert sizes.tolist() == [6, 7, 6, 6, 0] and not means[4].any()
    for k in range(4):
        np.testing.assert_allclose(means[k], x[labels == k].mean(axis=0), rtol=1e-5)
    # k-means that stops early: its centroids are of other rows than its labels.
    x = np.random.default_rng(1).normal(size=(200, 2)).astype(np.float32)
    x[0] = 9999.0
    labels = np.asarray(jit_kmeans(jax.random.key(0), x, n_clusters=20, n_init=1).labels)
    means, sizes = jax.device_get(jit_means(x, labels, 20))
    for k in np.flatnonzero(sizes):
        np.testing.assert_allclose(means[k], x[labels == k].mean(axis=0), rtol=1e-4, atol=1e-5)


def test_numbers_that_are_not_finite_are_named():
    x = blobs()
    x[3, 1] = np.nan
    with pytest.raises(ValueError, match="x must be finite"):
        kmeans(jax.random.key(0), x, 3)
    kept = np.arange(len(x)) != 3
    assert kmeans(jax.random.key(0), x, 3, where=kept).labels[3] == -1


def test_centroids_that_are_not_in_use_do_not_blur_those_that_are():
    corners = np.array([[0.0, 0.0], [1.0, 1.0]])
    noise = np.random.default_rng(0).normal(size=(40, 2)) / 10
    x = np.float32(1e4 + np.repeat(corners, 20, axis=0) + noise)
    centroids = np.zeros((8, 2), np.float32)
    centroids[:2] = 1e4 + corners
    np.testing.assert_array_equal(jit_predict(x, centroids, limit=2), np.repeat([0, 1], 20))
