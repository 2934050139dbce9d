import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import DBSCAN, OPTICS, AgglomerativeClustering, KMeans

from jaxfedmvc.clustering.host import host_method


def points(n=20):
    rng = np.random.default_rng(0)
    truth = np.arange(n) % 3
    x = rng.normal(size=(n, 2)) + 8 * np.array([[0, 0], [1, 0], [0, 1]])[truth]
    x[0] = 100.0
    return x.astype(np.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: AgglomerativeClustering(3),
        lambda seed: DBSCAN(eps=2.0, min_samples=3),
        lambda seed: OPTICS(min_samples=3, cluster_method="dbscan", eps=2.0),
    ],
    ids=["agglomerative", "dbscan", "optics"],
)
def test_labels_are_the_estimators_under_jit_and_padding(make):
    x = points()
    where = np.arange(20) < 17
    dirty = np.where(where[:, None], x, np.nan)
    labels = jax.jit(host_method(make))(jax.random.key(0), jnp.array(dirty), jnp.array(where))
    expected = make(0).fit_predict(x[where])
    np.testing.assert_array_equal(labels[:17], expected)
    assert labels.dtype == jnp.int32 and (np.asarray(labels)[17:] == -1).all()


def test_vmap_is_a_loop_and_seeds_derive_from_keys():
    seeds = []

    def make(seed):
        seeds.append(seed)
        return KMeans(3, n_init=1, random_state=seed)

    method = host_method(make)
    keys = jax.random.split(jax.random.key(1), 3)
    x = jnp.stack([jnp.array(points())] * 3)
    where = jnp.ones((3, 20), bool)
    together = jax.jit(jax.vmap(method))(keys, x, where)
    first = list(seeds)
    alone = [method(key, points(), np.ones(20, bool)) for key in keys]
    np.testing.assert_array_equal(together, np.stack(alone))
    assert len(set(first)) == 3 and seeds[3:] == first


def test_no_more_clusters_than_rows_and_none_without_rows():
    method = jax.jit(host_method(lambda seed: AgglomerativeClustering(8)))
    few = np.arange(20) < 4
    labels = method(jax.random.key(0), points(), few)
    assert sorted(np.asarray(labels)[:4]) == [0, 1, 2, 3]
    assert (method(jax.random.key(0), points(), np.zeros(20, bool)) == -1).all()


def test_labels_are_renumbered_in_the_order_of_their_values():
    class Odd:
        def fit_predict(self, x):
            return np.array([30, -7, 10] * (len(x) // 3))

    labels = host_method(lambda seed: Odd())(jax.random.key(0), points(18), np.ones(18, bool))
    assert labels[:3].tolist() == [1, -1, 0]


def test_a_failing_estimator_is_named():
    method = host_method(lambda seed: AgglomerativeClustering(3))
    with pytest.raises(Exception, match="AgglomerativeClustering failed on 1 samples"):
        jax.block_until_ready(method(jax.random.key(0), points(), np.arange(20) < 1))
