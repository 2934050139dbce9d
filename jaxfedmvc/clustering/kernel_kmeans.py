"""k-means with a Gaussian kernel, by random Fourier features (Rahimi & Recht, 2007)."""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc import checks
from jaxfedmvc.clustering.kmeans import KMeansResult, check_data, kmeans
from jaxfedmvc.precision import in_32_bits, matmul


@in_32_bits
def kernel_kmeans(
    key: Array,
    x: ArrayLike,
    n_clusters: int,
    gamma: ArrayLike,
    *,
    where: ArrayLike | None = None,
    limit: ArrayLike | None = None,
    n_features: int = 500,
    n_init: int = 1,
    max_iter: int = 300,
    tol: float = 1e-4,
) -> KMeansResult:
    """Clusters by k-means on random Fourier features of the kernel exp(-gamma |x - y|^2).

    The first of two keys split from `key` draws the features and the second one the starts.

    Args:
        key: PRNG key.
        x: Data, float32 [n, d].
        n_clusters: Number of clusters k, static.
        gamma: Inverse squared width of the kernel, positive, a scalar that may be traced.
        where: Rows to cluster, bool [n]; all of them if None.
        limit: Number of clusters in use, a scalar integer that may be traced; all k if None.
        n_features: Number of random features D, static. Memory is O(n * D).
        n_init: Number of k-means++ starts, static.
        max_iter: Largest number of Lloyd updates per start, static.
        tol: Convergence threshold of `lloyd`.

    Returns:
        The result of `kmeans`, its centroids [k, D] and inertia in the space of the features.

    Raises:
        ValueError: If `gamma` is no positive scalar, `n_features` is below 1, or another argument
            is one that `kmeans` rejects.
    """
    x, where = check_data(x, where)
    map_key, start_key = jax.random.split(key)
    z = random_fourier_features(map_key, x, gamma, n_features)
    return kmeans(
        start_key,
        z,
        n_clusters,
        where=where,
        n_init=n_init,
        max_iter=max_iter,
        tol=tol,
        limit=limit,
    )


@in_32_bits
def random_fourier_features(key: Array, x: ArrayLike, gamma: ArrayLike, n_features: int) -> Array:
    """Draws features z with E[z(x) . z(y)] = exp(-gamma |x - y|^2) (Rahimi & Recht, 2007).

    Their algorithm 1: z(x) = sqrt(2 / D) cos(x W + b), with W from N(0, 2 gamma) and b uniform on
    [0, 2 pi). Each product deviates from the kernel by O(1 / sqrt(D)).

    Args:
        key: PRNG key. One key is one map, whatever the rows.
        x: Data, float32 [n, d].
        gamma: Inverse squared width of the kernel, positive, a scalar that may be traced.
        n_features: Number of features D, static.

    Returns:
        Features, float32 [n, D].

    Raises:
        ValueError: If `x` has the wrong shape, is not of real numbers, or concrete and not finite,
            `gamma` is no positive scalar or `n_features` is below 1.
    """
    x, _ = check_data(x, None)
    checks.whole("n_features", n_features, 1)
    frequencies, phases = _frequencies(key, x.shape[1], _check_gamma(gamma), n_features)
    return math.sqrt(2 / n_features) * jnp.cos(matmul(x, frequencies) + phases[None])


def _frequencies(key: Array, d: int, gamma: Array, n_features: int) -> tuple[Array, Array]:
    """Frequencies W [d, D] of variance 2 gamma and phases b [D]."""
    w_key, b_key = jax.random.split(key)
    w = jnp.sqrt(2 * gamma) * jax.random.normal(w_key, (d, n_features))
    return w, jax.random.uniform(b_key, (n_features,), maxval=2 * math.pi)


def _check_gamma(gamma: ArrayLike) -> Array:
    checks.number("gamma", gamma, checks.POSITIVE)
    return jnp.asarray(gamma, jnp.float32)
