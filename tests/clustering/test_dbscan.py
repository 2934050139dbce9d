import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn import cluster, datasets

from jaxfedmvc.clustering.dbscan import _floor_square, _roots, _unite, dbscan

jit_dbscan = jax.jit(dbscan, static_argnames="block")


def run(x, eps, min_samples, where=None, block=32):
    """Labels by one program for each shape of `x` and each block."""
    x, where = np.asarray(x, np.float32), np.ones(len(x), bool) if where is None else where
    return jit_dbscan(x, np.float32(eps), np.int32(min_samples), where=where, block=block)


def run_small(x, eps, min_samples):
    """Labels of up to 24 rows of up to 2 features, padded to share a program."""
    padding = (0, 24 - len(x)), (0, 2 - x.shape[1])
    where = np.arange(24) < len(x)
    return run(np.pad(x, padding), eps, min_samples, where, block=5)[: len(x)]


def reference(x, eps, min_samples, where=None):
    """scikit-learn's labels, in float64, of the selected rows."""
    where = np.ones(len(x), bool) if where is None else where
    labels = np.full(len(x), -1)
    if where.any():
        model = cluster.DBSCAN(eps=float(np.float32(eps)), min_samples=min_samples)
        labels[where] = model.fit_predict(np.asarray(x, np.float64)[where])
    return labels


def shuffled_line(n, seed=0):
    """Points one apart in a random order: every cluster has to be put together from far rows."""
    return np.random.default_rng(seed).permutation(n)[:, None].astype(np.float32)


def make(name):
    """Data, eps, min_samples and the numbers of clusters and of noise rows to be found."""
    rng = np.random.default_rng(0)
    if name == "blobs":
        x, _ = datasets.make_blobs(300, 4, centers=5, random_state=0)
        return x, 1.2, 5, 7, 118
    if name == "moons with noise":
        x, _ = datasets.make_moons(250, noise=0.05, random_state=0)
        return np.concatenate([x, rng.uniform(-2, 3, (50, 2))]), 0.15, 4, 2, 45
    if name == "duplicates":
        return np.repeat(rng.integers(0, 6, (60, 3)), 5, axis=0), 1.0, 10, 10, 80
    if name == "all noise":
        return rng.uniform(0, 100, (300, 3)), 0.5, 2, 0, 300
    if name == "all core":
        return rng.normal(size=(300, 3)), 0.01, 1, 300, 0
    if name == "one cluster":
        return rng.normal(size=(300, 3)), 10.0, 5, 1, 0
    if name == "line":
        return shuffled_line(300), 1.0, 3, 1, 0
    if name == "many features":
        x, _ = datasets.make_blobs(200, 40, centers=4, random_state=0)
        return x + 1e3, 7.5, 5, 4, 30
    assert name == "one row"
    return np.zeros((1, 2)), 1.0, 2, 0, 1


NAMES = [
    "blobs",
    "moons with noise",
    "duplicates",
    "all noise",
    "all core",
    "one cluster",
    pytest.param("line", marks=pytest.mark.slow),
    pytest.param("many features", marks=pytest.mark.slow),
    "one row",
]


@pytest.mark.parametrize("name", NAMES)
def test_labels_equal_those_of_sklearn(name):
    x, eps, min_samples, n_clusters, n_noise = make(name)
    x = x.astype(np.float32)
    # Further features of zeros change no distance, and data of as many rows share a program.
    labels = run(np.pad(x, ((0, 0), (0, max(4 - x.shape[1], 0)))), eps, min_samples)
    chex.assert_shape(labels, (len(x),))
    chex.assert_type(labels, np.int32)
    np.testing.assert_array_equal(labels, reference(x, eps, min_samples))
    assert (labels.max() + 1, (labels < 0).sum()) == (n_clusters, n_noise)


grid = st.lists(st.integers(0, 12), min_size=48, max_size=48)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    coordinates=grid,
    selected=st.lists(st.booleans(), min_size=24, max_size=24),
    square=st.sampled_from([1, 2, 3, 4, 5, 8, 10, 13, 18, 25]),
    min_samples=st.integers(1, 6),
)
def test_masked_grids_equal_sklearn_at_the_boundary(coordinates, selected, square, min_samples):
    # Squared distances are integers, and many of them the nearest to eps^2 that there are.
    where = np.array(selected)
    x = np.array(coordinates, np.float32).reshape(24, 2)
    spoilt = np.where(where[:, None], x, np.nan).astype(np.float32)
    eps = np.float32(np.sqrt(square))
    labels = run(spoilt, eps, min_samples, where, block=5)
    np.testing.assert_array_equal(labels, reference(x, eps, min_samples, where))


@pytest.mark.parametrize("n, d, top, squares", [(300, 3, 12, (1, 2, 3)), (200, 40, 1, (9, 10, 11))])
def test_distances_keep_their_digits_far_from_the_origin(n, d, top, squares):
    # At 2^20 the square of a coordinate has no digit left for a distance of 1.
    x = np.random.default_rng(0).integers(0, top + 1, (n, d)).astype(np.float32)
    for square in squares:
        labels = run(x + 2.0**20, np.sqrt(square), 3)
        np.testing.assert_array_equal(labels, reference(x, np.sqrt(square), 3))
        assert labels.min() == -1 and labels.max() >= 0


def test_a_row_far_away_costs_the_others_no_digits():
    """From the middle of a box that is 10 000 wide, squares of 1e8 would drown those of eps."""
    x = np.random.default_rng(0).normal(size=(120, 20)).astype(np.float32)
    x[7] = 1e4
    for eps in (4.0, 5.0):
        np.testing.assert_array_equal(run(x, eps, 5, block=128), reference(x, eps, 5))


def test_threshold_is_the_square_of_eps_rounded_down():
    eps = np.sqrt(np.arange(1, 2000), dtype=np.float32)
    exact = eps.astype(np.float64) ** 2  # its 48 digits fit into float64
    threshold = np.asarray(jax.jit(_floor_square)(eps))
    assert np.all(threshold <= exact)
    assert np.all(exact < np.nextafter(threshold, np.float32(np.inf)))


def test_hand_worked_line():
    # Cores are 1 and 11 with two neighbours each. Rows at 0, 2, 10 and 12 are their borders, 6 is
    # noise. Row 0 (at 12) is no core, so cluster 0 is that of row 2, the first core row.
    x = np.array([12.0, 0.0, 1.0, 6.0, 11.0, 2.0, 10.0])[:, None]
    labels = run_small(x, 1.0, 3)
    np.testing.assert_array_equal(labels, [1, 0, 0, -1, 1, 0, 1])


@pytest.mark.parametrize("swap", [False, True])
def test_border_between_two_clusters_joins_the_lower_number(swap):
    # Row 0, at 0, reaches the cores at -1 and 1 but has only three of four neighbours.
    left, right = [-1.0, -1.5, -1.6, -1.7], [1.0, 1.5, 1.6, 1.7]
    x = np.array([0.0, *(right + left if swap else left + right)], np.float32)[:, None]
    labels = run_small(x, 1.0, 4)
    np.testing.assert_array_equal(labels, [0] + [0] * 4 + [1] * 4)


def test_a_border_row_joins_the_lower_number_though_the_other_cluster_is_nearer():
    """It is compared with the eight nearest blocks first, all of them of cluster 1."""
    near, far = np.linspace(0.5, 0.57, 8), np.linspace(1.1, 1.12, 3)
    lower = -np.append(0.99, np.linspace(1.1, 1.19, 10))
    x = np.concatenate([lower, near, far, [0.0]])[:, None]
    assert len(x) == 23  # row 22 has ten in reach, itself among them
    labels = run(x, 1.0, 11, block=1)
    np.testing.assert_array_equal(labels, [0] * 11 + [1] * 11 + [0])


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 8, 1000])
def test_labels_do_not_depend_on_the_block(block):
    x, eps, min_samples, _, _ = make("moons with noise")
    expected = run(x, eps, min_samples)
    np.testing.assert_array_equal(run(x, eps, min_samples, block=block), expected)


def test_winding_clusters_of_many_small_blocks_equal_sklearn():
    # Sites of a lattice near its percolation threshold: clusters wind, meet themselves behind many
    # blocks, and are put together from several sides at once.
    sites = np.stack(np.meshgrid(np.arange(15), np.arange(20)), axis=2).reshape(300, 2)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x, where = rng.permutation(sites), rng.random(300) < 0.6
        labels = run(x, 1.0, 2, where, block=8)
        np.testing.assert_array_equal(labels, reference(x, 1.0, 2, where))


def test_unite_keeps_every_join():
    # Trees with several of the rows and columns in them: a root may be claimed from many sides.
    n_rows, n_columns = 6, 10
    unite, roots_of = jax.jit(_unite), jax.jit(_roots)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        roots = np.sort(rng.choice(16, 7, replace=False))
        parent = np.arange(16, dtype=np.int32)
        old = rng.choice(roots, 16).astype(np.int32)
        near = rng.random((n_rows, n_columns)) < 0.1
        rows, columns = np.nonzero(near)
        edges = sparse.coo_array((np.ones(len(rows)), (old[rows], old[n_rows:][columns])), (16, 16))
        _, expected = sparse.csgraph.connected_components(edges, directed=False)
        found = np.asarray(roots_of(unite(parent, old, near), parent))
        np.testing.assert_array_equal(
            found[:, None] == found[None], expected[:, None] == expected[None]
        )


def test_padding_in_the_middle_changes_nothing_and_is_never_read():
    x, eps, min_samples, _, _ = make("blobs")
    x = x[:267]
    where = np.insert(np.ones(len(x), bool), np.repeat([0, 100, len(x)], 11), False)
    expected = np.full(len(where), -1)
    expected[where] = reference(x.astype(np.float32), eps, min_samples)
    for garbage in (np.nan, np.inf, 0.0):
        padded = np.full((len(where), 4), garbage, np.float32)
        padded[where] = x
        labels = run(padded, eps, min_samples, where)
        np.testing.assert_array_equal(labels, expected)


def test_no_selected_row():
    np.testing.assert_array_equal(
        run(np.full((24, 2), np.nan), 1.0, 1, where=np.zeros(24, bool), block=5), np.full(24, -1)
    )


@pytest.mark.slow
def test_vmap_equals_loop():
    x = np.stack([datasets.make_moons(60, noise=0.1, random_state=s)[0] for s in range(4)])
    x = x.astype(np.float32)
    where = np.arange(60)[None] < np.array([[60], [40], [55], [0]])
    eps = np.array([0.2, 0.3, 0.05, 0.2], np.float32)
    min_samples = np.array([3, 5, 2, 1])

    def one(x, where, eps, min_samples):
        return dbscan(x, eps, min_samples, where=where, block=8)

    batched = jax.jit(jax.vmap(one))(x, where, eps, min_samples)
    for i, labels in enumerate(batched):
        expected = reference(x[i], eps[i], min_samples[i], where[i])
        np.testing.assert_array_equal(labels, expected)


def test_hyper_parameters_are_traced():
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(lambda *args: dbscan(*args, block=8), n=1))
    for eps, min_samples in [(1.0, 3), (0.5, 1)]:
        traced.lower(shuffled_line(20), eps, min_samples)


def test_numbers_that_are_not_traced_may_be_used_within_jit():
    labels = jax.eval_shape(lambda x: dbscan(x, 1.0, 3), shuffled_line(20))
    chex.assert_shape(labels, (20,))


def test_memory_is_far_from_quadratic():
    n = 2**16
    shapes = (jax.ShapeDtypeStruct(s, t) for s, t in [((n, 2), "f4"), ((), "f4"), ((), "i4")])
    program = jit_dbscan.lower(*shapes, block=64).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 200 * n  # of pairs: n / 8 bits times n


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": np.zeros(3)}, "x must have shape"),
        ({"x": np.zeros((0, 2))}, "x must have shape"),
        ({"where": np.ones(3, bool)}, "where: got"),
        ({"eps": 0.0}, "eps must be a number above 0, got 0.0"),
        ({"eps": np.nan}, "eps must be a number above 0, got nan"),
        ({"eps": np.ones(2)}, "eps must be a number"),
        ({"min_samples": 0}, r"min_samples must be an integer of at least 1 and .*, got 0"),
        ({"min_samples": 2.5}, r"min_samples must be an integer of at least 1 and .*, got 2\.5"),
        ({"min_samples": np.ones(2, int)}, "min_samples must be an integer"),
        ({"min_samples": 10**12}, "min_samples must be .* below 2\\^31, got 10{12}"),
        ({"min_samples": np.int64(10**12)}, "min_samples must be .* got 10{12}"),
        ({"min_samples": 10**30}, "min_samples must be .* got 10{30}"),
        ({"eps": "a"}, "eps must be a number above 0, got a"),
        ({"eps": None}, "eps must be a number above 0, got None"),
        ({"x": np.full((4, 2), 1j)}, "x must be an array of real numbers, got complex ones"),
        ({"block": 0}, "block: got 0; allowed is 1 or more"),
    ],
)
def test_bad_input_is_refused(change, message):
    arguments = {"x": np.zeros((4, 2)), "eps": 1.0, "min_samples": 2} | change
    with pytest.raises(ValueError, match=message):
        dbscan(**arguments)
