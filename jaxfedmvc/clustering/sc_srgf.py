"""SC-SRGF: spectral clustering by subspace randomisation and graph fusion, on padded data.

Cai, Huang, Wang & Kwoh, "Spectral clustering by subspace randomization and graph fusion for
high-dimensional data", PAKDD 2020. Nearest-neighbour graphs of the rows in m random subspaces of
the features are diffused through one another, as in similarity network fusion (Wang et al., Nature
Methods 2014), until they agree; their mean is cut by spectral clustering.

Every choice of the largest or nearest few goes to the lower index on ties. Rows outside `where` are
padding: their values are never read, and appending them changes results by rounding at most. Time
is O(n^2 (m p + m K steps) + n^3), memory a few times [m, n, n]: meant for n up to about 2000.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc import checks
from jaxfedmvc.clustering.kmeans import check_data
from jaxfedmvc.clustering.spectral import spectral
from jaxfedmvc.precision import in_32_bits, matmul

# Floats that one step of a blocked loop may take: bounds memory, and small data need one step.
_BLOCK = 2**22


@in_32_bits
def sc_srgf(
    key: Array,
    x: ArrayLike,
    n_clusters: int,
    *,
    where: ArrayLike | None = None,
    limit: ArrayLike | None = None,
    n_graphs: int = 20,
    graphs_limit: ArrayLike | None = None,
    ratio: ArrayLike = 0.5,
    n_neighbours: int = 5,
    n_steps: int = 20,
    alpha: ArrayLike = 1.0,
    n_init: int = 10,
) -> Array:
    """Clusters rows by the fused graph of random subspaces.

    With fewer selected rows than clusters every row is a cluster of its own.

    Args:
        key: PRNG key.
        x: Data, float32 [n, p].
        n_clusters: Largest number of clusters, static.
        where: Rows to cluster, bool [n]; all of them if None.
        limit: Number of clusters in use, scalar int >= 1, may be traced; `n_clusters` if None or
            larger.
        n_graphs: Number of slots for graphs m, static, at least 2.
        graphs_limit: Number of graphs in use, scalar int in [2, m], may be traced; m if None. Time
            and memory are those of m graphs.
        ratio: Share of the features in each subspace, in [0, 1], may be traced.
        n_neighbours: Number of neighbours K of a row, itself included, static.
        n_steps: Number of diffusion steps, static.
        alpha: Weight that each step adds to the self-loops, >= 0, may be traced.
        n_init: Number of k-means++ starts, static.

    Returns:
        Labels, int32 [n]; -1 outside `where`.

    Raises:
        ValueError: If `x` or `where` has the wrong shape, `x` is not of real numbers, or concrete
            and not finite in a selected row, or a number that is not traced is out of its range.
    """
    x, where = check_data(x, where)
    checks.whole("n_graphs", n_graphs, 2)
    checks.number("ratio", ratio, checks.SHARE)
    graph_key, cluster_key = jax.random.split(key)
    features = draw_subspaces(graph_key, x.shape[1], n_graphs, ratio)
    graph = fused_graph(
        x,
        features,
        where=where,
        graphs_limit=graphs_limit,
        n_neighbours=n_neighbours,
        n_steps=n_steps,
        alpha=alpha,
    )
    return spectral(cluster_key, graph, n_clusters, where=where, limit=limit, n_init=n_init)


def draw_subspaces(key: Array, n_features: int, n_subspaces: int, ratio: ArrayLike) -> Array:
    """Draws random subsets of max(1, int(ratio p)) features, without replacement.

    The product is rounded down after an allowance of 1e-6 of itself, so that a ratio of 0.29 takes
    29 of 100 features in spite of float32 (and of float64, where the product is just below 29).
    Subset i depends on `fold_in(key, i)` and not on the number of subsets.

    Args:
        key: PRNG key.
        n_features: Number of features p, static.
        n_subspaces: Number of subsets m, static.
        ratio: Share of the features, in [0, 1], may be traced.

    Returns:
        Features of each subset, bool [m, p].
    """
    size = jnp.floor(jnp.float32(ratio) * n_features * (1 + 1e-6))

    def draw(i: Array) -> Array:
        order = jax.random.permutation(jax.random.fold_in(key, i), n_features)
        return order < jnp.maximum(size, 1)

    return jax.vmap(draw)(jnp.arange(n_subspaces))


def fused_graph(
    x: ArrayLike,
    features: ArrayLike,
    *,
    where: ArrayLike | None = None,
    graphs_limit: ArrayLike | None = None,
    n_neighbours: int = 5,
    n_steps: int = 20,
    alpha: ArrayLike = 1.0,
) -> Array:
    """Finds the graph on which the neighbour graphs of given subspaces agree.

    W_i is the `neighbour_graph` of subspace i and S_i the `strongest_edges` of W_i. Each of
    `n_steps` steps sends every W_i, all at once, to S_i V_i S_i^T + alpha I with V_i the mean of
    the other graphs. With F the mean of all W_i, its rows scaled to sum 1, the result is
    (F + F^T + I) / 2.

    Args:
        x: Data, float32 [n, p].
        features: Features of each of m >= 2 subspaces, bool [m, p].
        where: Rows that are vertices, bool [n]; all of them if None.
        graphs_limit: Number of subspaces in use, the first ones, scalar int in [2, m], may be
            traced; m if None.
        n_neighbours: Number of neighbours K of a row, itself included, static.
        n_steps: Number of steps, static.
        alpha: Weight that each step adds to the self-loops, >= 0, may be traced.

    Returns:
        Symmetric edge weights, float32 [n, n]; zero for rows and columns outside `where`.

    Raises:
        ValueError: If `x`, `features` or `where` has the wrong shape, `x` is not of real numbers,
            or concrete and not finite in a selected row, or a number that is not traced is out of
            its range.
    """
    x, where = check_data(x, where)
    features = jnp.asarray(features, bool)
    p = x.shape[1]
    if features.ndim != 2 or features.shape[1] != p or len(features) < 2:
        raise ValueError(f"features must have shape [m, {p}] with m >= 2, got {features.shape}")
    n_graphs = len(features)
    checks.whole("n_neighbours", n_neighbours, 1)
    checks.whole("n_steps", n_steps, 0)
    checks.number("alpha", alpha, checks.NOT_NEGATIVE)
    if graphs_limit is None:
        graphs_limit = n_graphs
    rule = (
        lambda m: (m >= 2) & (m <= n_graphs) & (m == np.floor(m)),
        f"an integer, 2 to {n_graphs}",
    )
    checks.number("graphs_limit", graphs_limit, rule)
    return _fused(x, features, where, graphs_limit, alpha, n_neighbours, n_steps)


@partial(jax.jit, static_argnums=(5, 6), inline=True)
def _fused(
    x: Array,
    features: Array,
    where: Array,
    graphs_limit: ArrayLike,
    alpha: ArrayLike,
    n_neighbours: int,
    n_steps: int,
) -> Array:
    n, n_graphs = len(x), len(features)
    used = (jnp.arange(n_graphs) < graphs_limit).astype(x.dtype)
    identity = jnp.diag(where.astype(x.dtype))
    block = max(1, _BLOCK // (n * n))

    graphs = lax.map(
        lambda distances: neighbour_graph(distances, where, n_neighbours),
        subspace_distances(x, features),
        batch_size=block,
    )
    edges = lax.map(lambda graph: strongest_edges(graph, n_neighbours), graphs, batch_size=block)

    def add_up(graphs: Array) -> Array:
        # As a product: on CPU a sum over the leading axis takes 50 times as long.
        return jnp.tensordot(used, graphs, 1, precision=lax.Precision.HIGHEST)

    def step(_: Array, graphs: Array) -> Array:
        total = add_up(graphs)

        def fuse(one: tuple[Array, tuple[Array, Array]]) -> Array:
            graph, (neighbours, weights) = one
            others = (total - graph) / (graphs_limit - 1)
            return diffuse(others, neighbours, weights) + alpha * identity

        return lax.map(fuse, (graphs, edges), batch_size=block)

    graphs = lax.fori_loop(0, n_steps, step, graphs)
    mean = add_up(graphs) / graphs_limit
    mean = mean / _or_one(mean.sum(axis=1, keepdims=True))
    return (mean + mean.T + identity) / 2


def subspace_distances(x: Array, features: Array) -> Array:
    """Computes distances [m, n, n] between rows of `x` [n, p] in subspaces `features` [m, p].

    Euclidean ones. Squared differences are summed, not expanded into products: equal rows are at
    distance zero, and one pass over the differences serves all subspaces.
    """
    columns = features.T.astype(x.dtype)

    def from_row(row: Array) -> Array:
        return matmul(jnp.square(x - row[None]), columns)

    squares = lax.map(from_row, x, batch_size=max(1, _BLOCK // x.size))
    return jnp.sqrt(jnp.moveaxis(squares, 2, 0))


def neighbour_graph(distances: Array, where: Array, n_neighbours: int) -> Array:
    """Makes the symmetric K-nearest-neighbour graph with exponential weights.

    A row's K neighbours are the nearest selected rows, itself among them at distance 0. Edges weigh
    exp(-d / (2 sigma)) with sigma the mean of all distances, diagonal included; each row is scaled
    to sum 1 and the matrix averaged with its transpose. With at most K selected rows all are
    neighbours.

    Args:
        distances: Distances, not squared, float32 [n, n].
        where: Selected rows, bool [n].
        n_neighbours: Number of neighbours K, static.

    Returns:
        Edge weights, float32 [n, n]; zero outside `where`.
    """
    n = len(where)
    selected = where[:, None] & where[None]
    pairs = jnp.maximum(jnp.square(where.sum()), 1)
    sigma = jnp.where(selected, distances, 0.0).sum(axis=1).sum() / pairs
    closeness, neighbours = lax.top_k(
        jnp.where(selected, -distances, -jnp.inf), min(n_neighbours, n)
    )
    # Equal rows have sigma = 0 and distances of 0. Unselected rows are at infinity: weight 0.
    weights = jnp.exp(closeness / _or_one(2 * sigma))
    weights = weights / _or_one(weights.sum(axis=1, keepdims=True))
    graph = jnp.zeros_like(distances).at[jnp.arange(n)[:, None], neighbours].set(weights)
    return (graph + graph.T) / 2


def strongest_edges(graph: Array, n_neighbours: int) -> tuple[Array, Array]:
    """Makes the sparse transition matrix S of a graph: its K largest entries a row, of sum 1.

    Args:
        graph: Edge weights, float32 [n, n].
        n_neighbours: Number of entries K, static; n if larger.

    Returns:
        Columns of the entries, int32 [n, min(K, n)], and their values, float32 of the same shape:
        zero in empty rows.
    """
    weights, neighbours = lax.top_k(graph, min(n_neighbours, len(graph)))
    return neighbours, weights / _or_one(weights.sum(axis=1, keepdims=True))


def diffuse(graph: Array, neighbours: Array, weights: Array) -> Array:
    """Computes S V S^T of a symmetric graph V [n, n] and S of `strongest_edges`, in O(n^2 K).

    Symmetric as V is, but for rounding.
    """

    def mix_rows(graph: Array) -> Array:
        # As a loop: fused into one pass, the second product reads its operand in the wrong order.
        def add(k: Array, mixed: Array) -> Array:
            return mixed + weights[:, k, None] * graph[neighbours[:, k]]

        return lax.fori_loop(0, weights.shape[1], add, jnp.zeros_like(graph))

    return mix_rows(mix_rows(graph).T)


def _or_one(values: Array) -> Array:
    """`values` with ones for zeros, to divide by."""
    return jnp.where(values > 0, values, 1.0)
