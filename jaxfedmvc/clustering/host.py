"""scikit-learn's clusterers inside compiled code, as calls back to the host."""

from collections.abc import Callable
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from sklearn.base import ClusterMixin

from jaxfedmvc.clustering.kmeans import check_data


def host_method(
    make: Callable[[int], ClusterMixin],
) -> Callable[[Array, ArrayLike, ArrayLike | None], Array]:
    """The local method `(key, x, where) -> labels` of a scikit-learn clusterer.

    The method may be jitted and vmapped; a batch is clustered one item after the other. Only the
    selected rows reach the clusterer. A single row is cluster 0 and no row is fitted at all, for
    many clusterers refuse fewer than two. A parameter `n_clusters` larger than the number of
    selected rows is lowered to it; all other parameters are left alone, so one that asks for more
    rows than there are (`min_samples` of OPTICS) is an error.

    Args:
        make: Called with a seed, an integer in [0, 2^31) that is a function of the key, for every
            run anew; returns the clusterer. One without random choices ignores the seed.

    Returns:
        The method, of a PRNG key, rows float32 [n, d] and the mask of the selected rows, bool [n]
        or None for all. Its labels are int32 [n]: 0, 1, .. in the order of the clusterer's own
        labels, and -1 for what it calls noise and for rows that are not selected. The method raises
        `ValueError` if an array has the wrong shape, and whatever the clusterer raises arrives as a
        `RuntimeError` that names it (jax wraps it in its own, a subclass of `RuntimeError`).
    """

    def on_host(seed: ArrayLike, x: ArrayLike, where: ArrayLike) -> np.ndarray:
        selected = np.asarray(where)
        labels = np.full(len(selected), -1, np.int32)
        labels[selected] = _fit(make, int(np.asarray(seed)), np.asarray(x)[selected])
        return labels

    def method(key: Array, x: ArrayLike, where: ArrayLike | None = None) -> Array:
        x, where = check_data(x, where)
        seed = jax.random.bits(key, dtype=jnp.uint32) >> 1
        shape = jax.ShapeDtypeStruct(where.shape, jnp.int32)
        return jax.pure_callback(on_host, shape, seed, x, where, vmap_method="sequential")

    return method


def _fit(make: Callable[[int], ClusterMixin], seed: int, rows: np.ndarray) -> np.ndarray:
    """Labels 0.. of `rows`, -1 for noise."""
    if len(rows) < 2:
        return np.zeros(len(rows), np.int32)
    estimator = make(seed)
    try:
        n_clusters = estimator.get_params(deep=False).get("n_clusters")
        if isinstance(n_clusters, Integral) and int(n_clusters) > len(rows):
            estimator.set_params(n_clusters=len(rows))
        found = np.asarray(estimator.fit_predict(rows))
    except Exception as error:
        raise RuntimeError(f"{estimator!r} failed on {len(rows)} rows: {error}") from error
    # Some mark kinds of noise by -2 and -3.
    clusters = np.unique(found[found >= 0])
    return np.where(found >= 0, np.searchsorted(clusters, found), -1)
