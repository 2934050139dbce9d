"""Calls from compiled code back to the host, and scikit-learn's clusterers by way of them."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.buffer_callback import buffer_callback
from jax.typing import ArrayLike

from jaxfedmvc.clustering.kmeans import check_data

if TYPE_CHECKING:
    from sklearn.base import ClusterMixin


def on_host(
    function: Callable[..., Any],
    shapes: Any,
    *arguments: Array,
    instead: Callable[..., Any] | None = None,
) -> Any:
    """Computes `function(*arguments)` in NumPy, inside compiled code.

    May be jitted and vmapped; a batch is worked off one item after the other. On CPU the function
    reads and writes the program's own memory: `jax.pure_callback` copies its arguments by the very
    threads that may all be waiting in callbacks, and then the program stands still for ever, always
    with a single core (https://github.com/jax-ml/jax/issues/24255).

    Args:
        function: Of NumPy arrays, without side effects; it may not call jax.
        shapes: Pytree of `jax.ShapeDtypeStruct`, of what it returns.
        arguments: Arrays.
        instead: What computes the same in jax, for devices other than a CPU, where a call back to
            the host is slow and cannot be exported; None calls back there, too.

    Raises:
        Exception: What the function raises arrives in an error of jax that quotes it; some calls
            make that a `RuntimeError`, some a `ValueError`.
    """

    def in_place(_: Any, out: Any, *buffers: Any) -> None:
        result = function(*(np.asarray(buffer) for buffer in buffers))
        for target, value in zip(jax.tree.leaves(out), jax.tree.leaves(result), strict=True):
            np.asarray(target)[...] = value

    def copied(*arrays: Array) -> Any:
        return jax.pure_callback(function, shapes, *arrays, vmap_method="sequential")

    return lax.platform_dependent(
        *arguments,
        cpu=buffer_callback(in_place, shapes, vmap_method="sequential"),
        default=copied if instead is None else instead,
    )


def host_method(
    make: Callable[[int], ClusterMixin],
) -> Callable[[Array, ArrayLike, ArrayLike | None], Array]:
    """Makes the local method `(key, x, where) -> labels` of a scikit-learn clusterer.

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
        `ValueError` if an array has the wrong shape; whatever the clusterer raises arrives as
        `on_host` says, in words that name the clusterer.
    """

    def fit(seed: np.ndarray, x: np.ndarray, where: np.ndarray) -> np.ndarray:
        selected = np.asarray(where)
        labels = np.full(len(selected), -1, np.int32)
        labels[selected] = _fit(make, int(np.asarray(seed)), np.asarray(x)[selected])
        return labels

    def method(key: Array, x: ArrayLike, where: ArrayLike | None = None) -> Array:
        x, where = check_data(x, where)
        seed = jax.random.bits(key, dtype=jnp.uint32) >> 1
        shape = jax.ShapeDtypeStruct(where.shape, jnp.int32)
        return on_host(fit, shape, seed, x, where)

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
