"""scikit-learn's clusterers as base clusterers: compiled programs call the host for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfedmvc.clustering.local import LocalMethod


def host_method(make: Callable[[int], Any]) -> LocalMethod:
    """A base clusterer that fits an estimator of scikit-learn, or of its form, on the host.

    The rows in use are handed to `fit_predict`, one call after another where the program is
    vmapped. An `n_clusters` above the number of rows is lowered to it. Labels are renumbered 0.. in
    the order of their values; negative ones (noise) become -1.

    Args:
      make: `seed -> estimator`, a fresh one; the seed derives from the key, 0 to 2**31 - 1. An
        estimator without randomness may ignore it.

    Returns:
      `(key, x [n, d], where [n]) -> int32 [n]`. Where the estimator fails, so does the program,
      with an error that names the estimator.
    """

    def fit(seed: np.ndarray, x: np.ndarray, where: np.ndarray) -> np.ndarray:
        x, where = np.asarray(x), np.asarray(where)
        labels = np.full(len(x), -1, np.int32)
        n = int(where.sum())
        if n == 0:
            return labels
        estimator = make(int(seed))
        try:
            if (getattr(estimator, "n_clusters", None) or 0) > n:
                estimator.set_params(n_clusters=n)
            found = np.asarray(estimator.fit_predict(x[where]))
        except Exception as error:
            name = type(estimator).__name__
            raise ValueError(
                f"{name} failed on {n} samples of {x.shape[1]} features: {error}"
            ) from error
        names = np.unique(found[found >= 0])
        labels[where] = np.where(found >= 0, np.searchsorted(names, found), -1)
        return labels

    def method(key: Array, x: Array, where: Array) -> Array:
        seed = jax.random.randint(key, (), 0, jnp.iinfo(jnp.int32).max)
        shape = jax.ShapeDtypeStruct(where.shape, jnp.int32)
        return jax.pure_callback(fit, shape, seed, x, where, vmap_method="sequential")

    return method
