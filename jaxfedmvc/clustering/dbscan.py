"""DBSCAN without a matrix of distances, and with scikit-learn's labels.

The rows are put into the order of the leaves of a k-d tree (Bentley, 1975) and cut there into
blocks. A block is compared with those blocks only whose bounding boxes come within `eps` of its
own, the nearest first, a few of them at a time. Memory is thus linear in n, and the time follows
the pairs of rows that have to be looked at: a row is known to be core after `min_samples`
neighbours, and blocks that are already in one cluster are not compared to find that out again.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc import checks
from jaxfedmvc.clustering.kmeans import check_data
from jaxfedmvc.precision import in_32_bits, matmul

_ABREAST = 8  # blocks compared with a block at a time: fewer steps, against more padding
_UNROLLED = 16  # features up to which sums over them are written out


class _Blocks(NamedTuple):
    """The rows in m blocks of b, an order of its own; the last block is filled up with padding.

    Attributes:
        x: Data, float32 [m, b, d]; zero for unselected rows.
        rows: Place of each row in the data as given, int32 [m, b].
        where: Selected rows, bool [m, b].
        low, high: Corners of the bounding boxes, float32 [m, d]; inf, -inf if nothing is selected.
        middle: Median of the selected rows by feature, float32 [m, d]; 0 if there is none.
    """

    x: Array
    rows: Array
    where: Array
    low: Array
    high: Array
    middle: Array


@in_32_bits
def dbscan(
    x: ArrayLike,
    eps: ArrayLike,
    min_samples: ArrayLike,
    *,
    where: ArrayLike | None = None,
    block: int = 128,
) -> Array:
    """Finds density-based clusters by Euclidean distance (Ester, Kriegel, Sander & Xu, 1996).

    A row is core if at least `min_samples` rows, itself included, lie within `eps` of it. Clusters
    are the connected components of the core rows, two of them joined if within `eps`. Another row
    within `eps` of a core row is a border row; what remains is noise.

    The labels are those of `sklearn.cluster.DBSCAN`, not up to their names but equal: clusters are
    numbered in the order of their first core rows, and a border row that several clusters reach
    belongs to the one of the lowest number.

    Squared distances are sums of squared differences in float32. The shorter |x|^2 - 2 x.y + |y|^2
    would lose the digits that decide at the boundary, where |x - y| is much less than |x|. It is
    used with more than 16 features, where it is many times faster, and there x and y are taken
    from the median of a block, so that what is lost is relative to how far a row lies from there
    or to `eps`, whichever is more, and a row far away costs the others nothing. They are compared
    with the largest float32 number up to eps^2, so that where the sums are exact (as on a grid) the
    decision is that of real numbers for `eps` rounded to float32.

    Args:
        x: Data, float32 [n, d], finite in the selected rows.
        eps: Largest distance of neighbours, in the units of `x`, above 0. May be traced. Its square
            and those of distances are float32: from 1e-15 to 1e15 they are numbers above 0.
        min_samples: Neighbours, itself included, that make a row core, at least 1 and below 2^31.
            May be traced.
        where: Rows to cluster, bool [n]; all of them if None. The others count as no one's
            neighbours.
        block: Number of rows compared at a time, static. Labels do not depend on it; memory is
            O(n d + block^2), and time has a term of (n / block)^2.

    Returns:
        Labels, int32 [n]; -1 for noise and for rows outside `where`.

    Raises:
        ValueError: If `x` or `where` has the wrong shape, `x` is not of real numbers or not finite
            in a selected row, `eps` is no scalar or `min_samples` no integer scalar, or if
            `eps` <= 0, `min_samples` is out of its range (values that are traced pass) or
            `block` < 1.
    """
    x, where = check_data(x, where)
    eps = _check_number("eps", eps, np.float32, np.inf, "a number above 0")
    most = np.iinfo(np.int32).max
    allowed = "an integer of at least 1 and below 2^31"
    min_samples = _check_number("min_samples", min_samples, np.int32, most, allowed)
    checks.whole("block", block, 1)
    return _labels(x, where, eps, min_samples, min(block, len(x)))


@partial(jax.jit, static_argnums=4, inline=True)
def _labels(x: Array, where: Array, eps: Array, min_samples: Array, block: int) -> Array:
    n = len(x)
    blocks = _kd_blocks(x, where, block)
    threshold = _floor_square(eps)
    core = _core(blocks, threshold, min_samples)
    cluster = _number(blocks.rows, core, _components(blocks, threshold, core), n)
    labels = _with_border(blocks, threshold, core, cluster, n)
    return jnp.full(n, -1).at[blocks.rows].set(labels, mode="drop")


def _kd_blocks(x: Array, where: Array, block: int) -> _Blocks:
    """Blocks of rows near each other: halves are cut in halves across their widest feature."""
    m = -(-len(x) // block)
    padding = m * block - len(x)
    x = jnp.pad(x, ((0, padding), (0, 0)))
    where = jnp.pad(where, (0, padding))
    position = jnp.arange(len(x))
    depth = (m - 1).bit_length()

    def box(x: Array, where: Array, node: Array) -> tuple[Array, Array]:
        low = jnp.where(where[:, None], x, jnp.inf)
        high = jnp.where(where[:, None], x, -jnp.inf)
        return jax.ops.segment_min(low, node, m), jax.ops.segment_max(high, node, m)

    def cut(level: Array, order: Array) -> Array:
        node = position // (block << (depth - level))
        low, high = box(x[order], where[order], node)
        widest = jnp.argmax(high - low, axis=1)[node]
        # Unselected rows go last, so that they thin out as few blocks as possible.
        key = jnp.where(where[order], x[order, widest], jnp.inf)
        return lax.sort((node, key, order), num_keys=2)[2]

    order = lax.fori_loop(0, depth, cut, position)
    x, where = x[order], where[order]
    shape = (m, block)
    corners = box(x, where, position // block)
    x, where = x.reshape(*shape, -1), where.reshape(shape)
    ordered = jnp.sort(jnp.where(where[:, :, None], x, jnp.inf), axis=1)
    half = where.sum(axis=1)[:, None, None] // 2
    middle = jnp.take_along_axis(ordered, half, axis=1, mode="clip")[:, 0]
    middle = jnp.where(jnp.isfinite(middle), middle, 0.0)
    return _Blocks(x, order.reshape(shape), where, *corners, middle)


def _core(blocks: _Blocks, threshold: Array, min_samples: Array) -> Array:
    """Rows with `min_samples` neighbours, bool [m, b]."""

    def of_block(a: Array) -> Array:
        order, n_steps = _near(blocks, threshold, a, blocks.where.any(axis=1))

        def unfinished(state: tuple[Array, Array]) -> Array:
            step, count = state
            return (step < n_steps) & jnp.any(blocks.where[a] & (count < min_samples))

        def add(state: tuple[Array, Array]) -> tuple[Array, Array]:
            step, count = state
            b = order[step]
            near = _within(blocks, threshold, a, b) & _flat(blocks.where, b, False)[None]
            return step + 1, count + near.sum(axis=1)

        start = jnp.int32(0), jnp.zeros(blocks.where.shape[1], jnp.int32)
        count = lax.while_loop(unfinished, add, start)[1]
        return blocks.where[a] & (count >= min_samples)

    return lax.map(of_block, jnp.arange(len(blocks.x)))


def _components(blocks: _Blocks, threshold: Array, core: Array) -> Array:
    """Connected components of the core rows, each named by one of its places, int32 [m, b].

    A forest of pointers to lower places (Galler & Fischer, 1964), joined at the roots. Every pair
    of blocks is looked at once, until no two of its rows within reach have different roots.
    """
    m, size = core.shape
    places = jnp.arange(m * size).reshape(m, size)

    def join(a: Array, parent: Array) -> Array:
        later = jnp.arange(m) >= a
        order, n_steps = _near(blocks, threshold, a, core[a].any() & core.any(axis=1) & later)

        def join_step(step: Array, parent: Array) -> Array:
            b = jnp.append(a, order[step])
            here, is_core = _flat(places, b, 0), _flat(core, b, False)
            roots = _roots(parent, here)
            parent = parent.at[here].set(roots)  # shorter ways for the next search
            lowest = jnp.min(roots, where=is_core, initial=m * size)
            settled = jnp.all(~is_core | (roots == lowest))

            def unite(parent: Array) -> Array:
                near = _within(blocks, threshold, a, order[step])
                near &= is_core[:size, None] & is_core[None, size:]
                return _unite(parent, roots, near)

            return lax.cond(settled, lambda parent: parent, unite, parent)

        return lax.fori_loop(0, n_steps, join_step, parent)

    parent = lax.fori_loop(0, m, join, places.ravel())
    return _roots(parent, places.ravel()).reshape(m, size)


def _unite(parent: Array, roots: Array, near: Array) -> Array:
    """Joins the trees of `roots` [r + c], those of r rows and of c columns, where `near` [r, c].

    In a round every row points its root to the lowest root it sees, and every column then does the
    same. Of two that move one root the lower wins; what the other saw is left to the next round,
    in which both start from where their root has gone.
    """
    size = len(near)

    def lower(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        parent, old, _ = state
        rows, columns = old[:size], old[size:]
        seen = jnp.min(jnp.where(near, columns[None], len(parent)), axis=1)
        rows = jnp.minimum(rows, seen)
        seen = jnp.min(jnp.where(near, rows[:, None], len(parent)), axis=0)
        new = jnp.concatenate([rows, jnp.minimum(columns, seen)])
        parent = parent.at[old].min(new)
        return parent, _roots(parent, old), jnp.any(new < old)

    return lax.while_loop(lambda state: state[2], lower, (parent, roots, jnp.bool_(True)))[0]


def _roots(parent: Array, places: Array) -> Array:
    """The roots of the trees that `places` are in."""
    return lax.while_loop(
        lambda root: jnp.any(parent[root] != root), lambda root: parent[root], parent[places]
    )


def _number(rows: Array, core: Array, component: Array, n: int) -> Array:
    """Clusters 0, 1, .. in the order of their first core rows, int32 [m, b]; `n` if not core."""
    flat_core, flat = core.ravel(), component.ravel()
    first = jax.ops.segment_min(jnp.where(flat_core, rows.ravel(), n), flat, flat.size)
    is_first = jnp.zeros(n, bool).at[jnp.where(flat_core, first[flat], n)].set(True, mode="drop")
    number = jnp.cumsum(is_first) - 1
    return jnp.where(core, number[first[component]], n)


def _with_border(
    blocks: _Blocks, threshold: Array, core: Array, cluster: Array, none: int
) -> Array:
    """Labels [m, b]: of core rows `cluster`, of others the lowest of a core neighbour, or -1."""

    def of_block(a: Array) -> Array:
        others = blocks.where[a] & ~core[a]
        order, n_steps = _near(blocks, threshold, a, others.any() & core.any(axis=1))

        def lower(step: Array, lowest: Array) -> Array:
            b = order[step]
            near = _within(blocks, threshold, a, b)
            seen = jnp.min(jnp.where(near, _flat(cluster, b, none)[None], none), axis=1)
            return jnp.minimum(lowest, seen)

        lowest = lax.fori_loop(0, n_steps, lower, cluster[a])
        return jnp.where(blocks.where[a] & (lowest < none), lowest, -1)

    return lax.map(of_block, jnp.arange(len(blocks.x)))


def _near(blocks: _Blocks, threshold: Array, a: Array, wanted: Array) -> tuple[Array, Array]:
    """The wanted blocks whose boxes are near that of block a, nearest first.

    Returns:
        Blocks, int32 [steps, abreast], `m` where there are no more, and the number of steps that
        have any.
    """
    m = len(wanted)
    apart = jnp.maximum(blocks.low - blocks.high[a][None], blocks.low[a][None] - blocks.high)
    gap = jnp.sum(jnp.square(jnp.maximum(apart, 0.0)), axis=1)
    # Rounding must not exclude a pair that the distance, rounded as well, includes.
    gap = jnp.where(wanted & (gap <= 1.001 * threshold), gap, jnp.inf)
    order = jnp.argsort(gap)
    n_near = jnp.sum(gap < jnp.inf)
    order = jnp.where(jnp.arange(m) < n_near, order, m)
    abreast = min(_ABREAST, m)
    order = jnp.pad(order, (0, -m % abreast), constant_values=m).reshape(-1, abreast)
    return order, -(-n_near // abreast)


def _flat(values: Array, b: Array, fill: int) -> Array:
    """The rows [k * size] of blocks b [k]; `fill` for blocks that are none."""
    return values.at[b].get(mode="fill", fill_value=fill).reshape(-1, *values.shape[2:])


def _within(blocks: _Blocks, threshold: Array, a: Array, b: Array) -> Array:
    """Whether rows of block a and of blocks b [k] are neighbours, bool [size, k * size].

    It says so of rows outside `where` and of blocks that are none, too: the caller has to look.
    """
    x, y = blocks.x[a], blocks.x[b].reshape(-1, blocks.x.shape[2])
    if x.shape[1] > _UNROLLED:
        x, y = x - blocks.middle[a][None], y - blocks.middle[a][None]
        products = matmul(x, y.T)
        norms = jnp.sum(jnp.square(x), axis=1)[:, None] + jnp.sum(jnp.square(y), axis=1)[None]
        squares = norms - 2 * products
    else:
        # One fused loop over pairs: it is several times faster than a sum over so short an axis.
        squares = jnp.zeros((len(x), len(y)))
        for k in range(x.shape[1]):
            squares += jnp.square(x[:, k][:, None] - y[:, k][None])
    return squares <= threshold


def _floor_square(eps: Array) -> Array:
    """The largest float32 number up to eps^2, by an exact product (Dekker, 1971)."""
    square = eps * eps
    bits = lax.bitcast_convert_type(eps, jnp.int32)
    high = lax.bitcast_convert_type(bits & ~0xFFF, jnp.float32)
    low = eps - high
    error = (high * high - square) + 2 * high * low + low * low
    return jnp.where(error < 0, jnp.nextafter(square, jnp.float32(0.0)), square)


def _check_number(
    name: str, value: ArrayLike, dtype: type[np.generic], most: float, allowed: str
) -> Array:
    """Checked scalar above 0, up to `most`; of a traced one the value cannot be checked."""
    array = value if isinstance(value, jax.core.Tracer) else np.asarray(value)
    fits = array.ndim == 0 and np.can_cast(array.dtype, dtype, "same_kind")
    if not fits or not (isinstance(array, jax.core.Tracer) or 0 < array <= most):
        raise ValueError(f"{name} must be {allowed}, got {value}")
    return jnp.asarray(value, dtype)
