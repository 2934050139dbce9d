import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from sklearn import cluster, datasets

from jaxfedmvc.clustering.host import host_method

MAKERS = {
    "agglomerative": lambda seed: cluster.AgglomerativeClustering(4, linkage="single"),
    "dbscan": lambda seed: cluster.DBSCAN(0.9, min_samples=4),
    "hdbscan": lambda seed: cluster.HDBSCAN(min_cluster_size=5, copy=True),
    "optics": lambda seed: cluster.OPTICS(min_samples=5),
    "random": lambda seed: cluster.KMeans(5, init="random", n_init=1, random_state=seed),
}
KEY = jax.random.key(3)


def data():
    x, _ = datasets.make_blobs(60, 2, centers=3, cluster_std=0.8, random_state=1)
    x[1:12:5] += [[30.0], [-30.0], [60.0]]  # noise, for those who know it
    where = np.arange(60) % 5 > 0
    return np.where(where[:, None], x, np.nan).astype(np.float32), where


def in_order(labels):
    """Labels 0.. in the order of the given ones, noise apart."""
    clusters = sorted(set(labels.tolist()) - {-1})
    return np.array([clusters.index(label) if label >= 0 else -1 for label in labels])


@pytest.mark.parametrize("name", MAKERS)
def test_equals_sklearn_on_the_selected_rows(name):
    x, where = data()
    seeds = []

    def make(seed):
        seeds.append(seed)
        return MAKERS[name](seed)

    method = host_method(make)
    for run in (method, jax.jit(method)):
        labels = np.asarray(run(KEY, x, where))
        assert labels.dtype == np.int32
        direct = MAKERS[name](seeds[-1]).fit_predict(x[where])
        np.testing.assert_array_equal(labels[where], in_order(direct))
        np.testing.assert_array_equal(labels[~where], -1)
    assert len(set(seeds)) == 1 and 0 <= seeds[0] < 2**31
    if name in ("dbscan", "hdbscan", "optics"):
        assert (labels[where] == -1).any() and labels.max() >= 1


def test_vmap_clusters_each_item_with_its_own_key():
    x, _ = data()
    x = np.stack([np.nan_to_num(x), np.nan_to_num(x) + 1, np.nan_to_num(x)])
    where = np.arange(60)[None] < np.array([[60], [30], [0]])
    keys = jax.random.split(KEY, 3)
    method = jax.jit(host_method(MAKERS["random"]))
    batch = jax.jit(jax.vmap(method))(keys, x, where)
    for i in range(3):
        np.testing.assert_array_equal(batch[i], method(keys[i], x[i], where[i]))
    np.testing.assert_array_equal(batch[2], -1)
    # The key is read: other keys, other starts, other labels.
    others = jax.vmap(method, in_axes=(0, None, None))(jax.random.split(KEY, 5), x[0], where[0])
    assert len(np.unique(others, axis=0)) > 1


def test_labels_follow_the_clusterers_own_order():
    class Odd(cluster.DBSCAN):
        def fit_predict(self, rows):
            return np.array([7, -1, 3, 7, -2])

    labels = host_method(lambda seed: Odd())(KEY, np.ones((5, 1), np.float32))
    np.testing.assert_array_equal(labels, [1, -1, 0, 1, -1])


def test_number_of_clusters_is_capped_and_fewer_than_two_rows_are_not_fitted():
    x, _ = data()
    made = []

    def make(seed):
        made.append(cluster.AgglomerativeClustering(10))
        return made[-1]

    method = jax.jit(host_method(make))
    for n in (0, 1):
        where = np.arange(60) < n
        np.testing.assert_array_equal(method(KEY, np.nan_to_num(x), where), where.astype(int) - 1)
    assert not made
    labels = np.asarray(method(KEY, np.nan_to_num(x), np.arange(60) < 3))
    assert sorted(labels[:3]) == [0, 1, 2] and made[-1].n_clusters == 3
    method(KEY, np.nan_to_num(x), np.ones(60, bool)).block_until_ready()
    assert made[-1].n_clusters == 10


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_errors_name_the_clusterer(wrap):
    x, where = data()
    method = wrap(host_method(lambda seed: cluster.OPTICS(min_samples=50)))
    with pytest.raises(
        RuntimeError, match=r"OPTICS\(min_samples=50\) failed on 48 rows: min_sampl"
    ):
        method(KEY, x, where).block_until_ready()


def test_wrong_shapes_are_named():
    method = host_method(MAKERS["dbscan"])
    with pytest.raises(ValueError, match=r"^x must"):
        method(KEY, np.ones(4))
    with pytest.raises(ValueError, match=r"^where: got"):
        method(KEY, np.ones((4, 2)), np.ones(3, bool))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_a_single_core_does_not_wait_for_itself():
    """A call that waits for programs before it, on one core: `pure_callback` hangs here."""
    program = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, numpy as np
from jaxfedmvc.clustering.host import on_host
one = jax.ShapeDtypeStruct((), jnp.float32)
total = jax.jit(lambda x: on_host(lambda x: np.float32(x.sum()), one, x))
mean = jax.jit(lambda x: x @ x / 1500)
print(total(mean(mean(mean(jnp.ones((1500, 1500)))))))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert float(done.stdout) == 1500**2, done.stderr
