"""Normalised-cut spectral clustering of a dense affinity matrix, on padded data.

Shi & Malik, "Normalized cuts and image segmentation", IEEE TPAMI 2000; the conventions are those of
scikit-learn's `spectral_embedding` with `drop_first=False`. Rows (and columns) outside `where` are
padding: their values are never read, and appending them changes results by rounding at most.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc import checks, linalg
from jaxfedmvc.clustering.kmeans import kmeans
from jaxfedmvc.precision import in_32_bits

# Share of the largest edge by which the two directions of an edge may differ.
_ROUNDING = 1e-3


@in_32_bits
def spectral(
    key: Array,
    affinity: ArrayLike,
    n_clusters: int,
    *,
    where: ArrayLike | None = None,
    limit: ArrayLike | None = None,
    n_init: int = 10,
) -> Array:
    """Clusters by k-means the spectral embedding of a graph, of as many components as clusters.

    With fewer selected vertices than clusters every vertex is a cluster of its own.

    Args:
        key: PRNG key of the k-means starts.
        affinity: Symmetric edge weights, non-negative, float32 [n, n]; see `spectral_embedding`.
        n_clusters: Largest number of clusters k, static.
        where: Vertices to cluster, bool [n]; all of them if None.
        limit: Number of clusters and components in use, scalar int >= 1, may be traced; k if None
            or larger than k.
        n_init: Number of k-means++ starts, static.

    Returns:
        Labels below min(k, limit), int32 [n]; -1 outside `where`.

    Raises:
        ValueError: If `n_clusters` or `n_init` is below 1, a `limit` that is not traced is below 1,
            `affinity`, `where` or `limit` has the wrong shape, or `affinity` is concrete and not
            symmetric, or has an edge that is negative or not finite.
    """
    affinity, where = _check_graph(affinity, where)
    checks.whole("n_clusters", n_clusters, 1)
    if limit is None:
        limit = n_clusters
    checks.number("limit", limit, (lambda x: x >= 1, "an integer of 1 or more"))
    used = jnp.minimum(limit, jnp.maximum(where.sum(), 1))
    rows = spectral_embedding(affinity, min(n_clusters, len(where)), where=where)
    rows = jnp.where(jnp.arange(rows.shape[1])[None] < used, rows, 0.0)
    return kmeans(key, rows, n_clusters, where=where, limit=used, n_init=n_init).labels


@in_32_bits
def spectral_embedding(
    affinity: ArrayLike, n_components: int, *, where: ArrayLike | None = None
) -> Array:
    """Finds the smoothest functions on a graph, the relaxed indicators of its normalised cuts.

    The eigenvectors of I - D^-1/2 A D^-1/2 with the smallest eigenvalues, ascending, each divided
    by the square root of the degrees D. Self-loops are left out: they are cut by no partition. A
    vertex without edges has a degree of 1 and an eigenvalue of 1 here, as in scikit-learn. Within
    equal eigenvalues (one zero for each connected component) the basis is arbitrary.

    The dense eigendecomposition takes O(n^3) time and a few copies of [n, n] memory: meant for n up
    to about 2000.

    Args:
        affinity: Symmetric edge weights, non-negative, float32 [n, n]. The diagonal is not read.
        n_components: Number of eigenvectors k, static, at most n.
        where: Vertices of the graph, bool [n]; all of them if None.

    Returns:
        Embedding, float32 [n, k]. Zero in rows outside `where`, and in columns beyond the number of
        selected vertices. In each column the first entry of at least half the largest magnitude
        is positive.

    Raises:
        ValueError: If `affinity` or `where` has the wrong shape, `affinity` is concrete and not
            symmetric, or has an edge that is negative or not finite, or `n_components` is no whole
            number in [1, n].
    """
    affinity, where = _check_graph(affinity, where)
    n = len(where)
    checks.whole("n_components", n_components, 1, n)
    edges = where[:, None] & where[None] & ~jnp.eye(n, dtype=bool)
    affinity = jnp.where(edges, affinity, 0.0)
    if not isinstance(affinity, jax.core.Tracer) and not np.isfinite(affinity).all():
        raise ValueError("affinity must be finite between the vertices of where")
    if not isinstance(affinity, jax.core.Tracer) and (affinity < 0).any():
        raise ValueError(f"affinity must be 0 or more between vertices, got {affinity.min()}")
    # A graph of nearest neighbours is not, unless somebody has made it so. Rounding is no matter.
    if not isinstance(affinity, jax.core.Tracer) and np.any(
        np.abs(affinity - affinity.T) > _ROUNDING * np.max(affinity)
    ):
        raise ValueError(
            "affinity must be symmetric between vertices, such as A + A.T of a graph A"
        )
    degrees = affinity.sum(axis=1)
    roots = jnp.sqrt(jnp.where(degrees > 0, degrees, 1.0))
    # The eigenvalues of a graph are in [0, 2]: those of the padding are put behind them.
    diagonal = jnp.where(where, 1.0, 3.0)
    laplacian = jnp.diag(diagonal) - affinity / roots[:, None] / roots[None]
    vectors = linalg.eigh(laplacian)[1][:, :n_components] / roots[:, None]
    inside = where[:, None] & (jnp.arange(n_components) < where.sum())[None]
    return fix_signs(jnp.where(inside, vectors, 0.0))


def fix_signs(vectors: Array) -> Array:
    """Makes the first entry of at least half the largest magnitude in each column positive.

    Unlike the largest entry itself, this one does not hang on rounding where entries are of equal
    magnitude and opposite sign, as in the second eigenvector of every symmetric graph.
    """
    sizes = jnp.abs(vectors)
    leading = jnp.argmax(sizes >= 0.5 * sizes.max(axis=0, keepdims=True), axis=0, keepdims=True)
    return vectors * jnp.where(jnp.take_along_axis(vectors, leading, axis=0) < 0, -1.0, 1.0)


def _check_graph(affinity: ArrayLike, where: ArrayLike | None) -> tuple[Array, Array]:
    """`affinity` and `where` as arrays of checked shapes."""
    affinity = checks.floats("affinity", affinity)
    if affinity.ndim != 2 or affinity.shape[0] != affinity.shape[1] or not affinity.size:
        raise ValueError(f"affinity must have shape [n, n] with n >= 1, got {affinity.shape}")
    return affinity, checks.mask(where, affinity.shape[:1])
