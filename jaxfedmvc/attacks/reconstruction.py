"""What a message with a row for each sample gives away to the one who reads it.

The reader is honest but curious: it follows the protocol and keeps what it is sent. Whatever a
message is, it is looked at through its leading singular vectors, times their singular values: one
point for each sample. Three questions, answered as a share of variance (R^2, 1 is everything):

    is the client's latent space a linear function of the points?  `linear_r2`
    can features be learned from points, given some samples of both?  `invert`, then `r2`
    how near do a few prototypes come to the samples?  `best_prototype_r2`

Rows outside `where` are padding: their values are never used, and appending them changes results
by rounding at most.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc import checks, linalg
from jaxfedmvc.algorithms.mgcd.client import centred
from jaxfedmvc.algorithms.mgcd.graph import Factored, Graph, n_samples
from jaxfedmvc.nn import apply, fit_on, init_mlp
from jaxfedmvc.precision import matmul

PyTree = Any

# Singular values below this share of the largest are rounding.
_NOTHING = 1e-5
# Of the subspace iteration: columns beside those that are asked for, and passes over the graph.
_OVERSAMPLING = 10
_PASSES = 4
# How many deviations from the mean a point may lie where it is learned from or applied.
_REACH = 4.0


class Singular(NamedTuple):
    """The leading part of a singular value decomposition.

    Attributes:
      vectors: Left singular vectors, float32 [N, r], zero in rows of padding; zero as a whole where
        the singular value is zero within rounding.
      values: Singular values, descending, float32 [r].
    """

    vectors: Array
    values: Array


@dataclasses.dataclass(frozen=True)
class InverterConfig:
    """Of `invert`, all static.

    Attributes:
      hidden: Widths of the network's hidden layers.
      epochs: Passes over the known samples between two snapshots of the network.
      snapshots: How many snapshots are candidates, which is early stopping.
      batch_size: Samples of a step.
      learning_rate: Adam's step size, above 0.
      penalties: Of ridge regression on standardised points, relative to the number of samples, each
        above 0; every one is a candidate.
      held_out: Share of the known samples that choose among candidates, in (0, 1).
    """

    hidden: tuple[int, ...] = (128,)
    epochs: int = 60
    snapshots: int = 3
    batch_size: int = 1024
    learning_rate: float = 3e-3
    penalties: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    held_out: float = 0.2

    def __post_init__(self) -> None:
        """Raises ValueError that names the setting."""
        for name in ("epochs", "snapshots", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed is 1 or more")
        checks.widths(self, "hidden")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate: got {self.learning_rate}; allowed is above 0")
        if not self.penalties or not all(penalty > 0 for penalty in self.penalties):
            raise ValueError(f"penalties: got {self.penalties}; allowed are numbers above 0")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out: got {self.held_out}; allowed is a share in (0, 1)")


class Inverted(NamedTuple):
    """What `invert` makes of points.

    Attributes:
      features: Of the best candidate, float32 [m, D].
      validation: R^2 of each candidate on the held-out known samples: the ridge regressions in the
        order of their penalties, then the network's snapshots; float32 [candidates].
    """

    features: Array
    validation: Array


# --- Points of samples ----------------------------------------------------------------------------


def leading(graph: Graph, rank: int, where: ArrayLike | None = None) -> Singular:
    """Finds the first `rank` left singular vectors and values of a message about N samples.

    Of factors those of `left @ right` WITH its diagonal, which who holds the factors can form;
    exact, through two QR decompositions. Of an array [N, m] by subspace iteration (Halko,
    Martinsson & Tropp, "Finding structure with randomness", 2011, algorithm 4.4) from a fixed
    start, which is exact up to rounding where singular values drop behind the first `rank`, and
    still spans strong directions where they do not.

    Args:
      graph: The message; a matrix [N, m] that is no graph is allowed too.
      rank: r, static, 1 or more; beyond the message's own rank values and vectors are zero.
      where: Real samples, bool [N]; all of them if None. Of a square array it masks columns too.

    Raises:
      ValueError: `rank` below 1.
    """
    checks.whole("rank", rank, 1)
    where = checks.mask(where, (n_samples(graph),))
    found = (
        _of_factors(graph, where)
        if isinstance(graph, Factored)
        else _of_array(jnp.asarray(graph, jnp.float32), rank, where)
    )
    more = max(rank - found.values.shape[0], 0)
    vectors = jnp.pad(found.vectors, ((0, 0), (0, more)))[:, :rank]
    values = jnp.pad(found.values, (0, more))[:rank]
    real = values > _NOTHING * jnp.maximum(values[0], jnp.finfo(jnp.float32).tiny)
    return Singular(jnp.where(where[:, None] & real[None], vectors, 0.0), values)


def _of_factors(graph: Factored, where: Array) -> Singular:
    left = jnp.where(where[:, None], graph.left, 0.0)
    right = jnp.where(where[None], graph.right, 0.0)
    q, of_left = linalg.qr(left)
    _, of_right = linalg.qr(right.T)
    u, values, _ = linalg.svd(matmul(of_left, of_right.T))
    return Singular(matmul(q, u), values)


def _of_array(x: Array, rank: int, where: Array) -> Singular:
    n, m = x.shape
    x = jnp.where(where[:, None], x, 0.0)
    if n == m:
        x = jnp.where(where[None], x, 0.0)
    width = min(rank + _OVERSAMPLING, n, m)
    start = jax.random.normal(jax.random.key(0), (m, width))  # padding changes no row of it

    def better(_: int, basis: Array) -> Array:
        return linalg.qr(matmul(x, linalg.qr(matmul(x.T, basis))[0]))[0]

    basis = lax.fori_loop(0, _PASSES, better, linalg.qr(matmul(x, start))[0])
    # basis^T x = r^T q^T: the decomposition of a small matrix remains.
    _, r = linalg.qr(matmul(x.T, basis))
    u, values, _ = linalg.svd(r.T)
    return Singular(matmul(basis, u), values)


def coordinates(graph: Graph, rank: int, where: ArrayLike | None = None) -> Array:
    """Makes a point for each sample, float32 [N, rank]: the reader's view of a message.

    sqrt(n) U S of `leading`, n the number of real samples, so that points of two federations are
    of one scale. The sign of each column makes its third moment positive: with the order of
    singular values this brings two messages about samples of one population near to one another,
    as far as their singular values are apart and their columns skewed.
    """
    where = checks.mask(where, (n_samples(graph),))
    vectors, values = leading(graph, rank, where)
    sign = jnp.where(jnp.sum(vectors**3, axis=0) < 0, -1.0, 1.0)
    return jnp.sqrt(jnp.sum(where)) * vectors * (sign * values)[None]


# --- Shares of variance ---------------------------------------------------------------------------


def r2(target: ArrayLike, predicted: ArrayLike, where: ArrayLike | None = None) -> Array:
    """Computes 1 - sum ||x - p||^2 / sum ||x - mean||^2 over rows and all columns together.

    1 is exact, 0 as good as the mean of these very rows, and below 0 worse; NaN for a constant.

    Args:
      target: Float32 [n, D].
      predicted: Float32 [n, D].
      where: Rows that count, bool [n]; all of them if None.
    """
    target, predicted = jnp.asarray(target), jnp.asarray(predicted)
    where = checks.mask(where, target.shape[:1])
    error = jnp.sum(jnp.where(where[:, None], target - predicted, 0.0) ** 2)
    spread = jnp.sum(centred(target, where) ** 2)
    return jnp.where(spread > 0, 1 - error / spread, jnp.nan)


def linear_r2(target: ArrayLike, basis: ArrayLike, where: ArrayLike | None = None) -> Array:
    """Computes R^2 of `target` as an affine function of the columns of `basis`, by least squares.

    In-sample, on all rows: it asks what the columns span, and r columns without any meaning reach
    about r / (n - 1).

    Args:
      target: Float32 [n, d].
      basis: Float32 [n, r]; columns may be dependent or zero.
      where: Rows that count, bool [n]; all of them if None.
    """
    target, basis = jnp.asarray(target), jnp.asarray(basis)
    where = checks.mask(where, target.shape[:1])
    target, basis = centred(target, where), centred(basis, where)
    # Directions of the span that are rounding alone must not count as directions.
    q, r = linalg.qr(basis)
    u, values, _ = linalg.svd(r)
    u = jnp.where((values > _NOTHING * values[0])[None], matmul(q, u), 0.0)
    return r2(target, matmul(u, matmul(u.T, target)), where)


def best_prototype_r2(x: ArrayLike, prototypes: ArrayLike, where: ArrayLike | None = None) -> Array:
    """Computes R^2 where each sample is given the prototype that is nearest to it.

    An oracle chooses, which no reader has: an upper bound of what prototypes tell about a sample.

    Args:
      x: Float32 [n, D].
      prototypes: Float32 [k, D].
      where: Rows that count, bool [n]; all of them if None.
    """
    x, prototypes = jnp.asarray(x), jnp.asarray(prototypes)
    distances = jnp.sum((x[:, None] - prototypes[None]) ** 2, axis=-1)
    return r2(x, prototypes[jnp.argmin(distances, axis=1)], where)


# --- Features from points -------------------------------------------------------------------------


def invert(
    key: Array,
    points: ArrayLike,
    features: ArrayLike,
    unknown: ArrayLike,
    config: InverterConfig | None = None,
    where: ArrayLike | None = None,
) -> Inverted:
    """Learns features from points of known samples, and applies it to points of unknown ones.

    Candidates are ridge regressions and snapshots of a network; the one of largest R^2 on the
    held-out part of the KNOWN samples is applied, so that nothing is chosen with what it shall
    guess.

    Args:
      key: Of the held-out part and the network.
      points: Of known samples, float32 [n, r].
      features: Of known samples, float32 [n, D].
      unknown: Points of other samples, float32 [m, r].
      config: The settings; the defaults if None.
      where: Known samples that are real, bool [n]; all of them if None.

    Raises:
      ValueError: Fewer than four known samples, or shapes that do not fit together.
    """
    config = InverterConfig() if config is None else config
    points, features, unknown = (jnp.asarray(a) for a in (points, features, unknown))
    n, r = points.shape
    if n < 4 or features.shape[0] != n or unknown.shape[1] != r:
        raise ValueError(
            f"points: got shapes {points.shape}, {features.shape} and {unknown.shape}; allowed are"
            " [n, r], [n, D] and [m, r] with n of 4 or more"
        )
    where = checks.mask(where, (n,))
    choose_key, init_key, fit_key = jax.random.split(key, 3)
    held_out = _drawn(choose_key, where, config.held_out)
    trained = where & ~held_out

    # What the attacker standardises with is what it trains on.
    count = jnp.sum(trained)
    x_mean, y_mean = (
        jnp.sum(jnp.where(trained[:, None], a, 0.0), axis=0) / count for a in (points, features)
    )
    x_scale = jnp.sqrt(jnp.sum(centred(points, trained) ** 2, axis=0) / count)
    y_scale = jnp.sqrt(jnp.mean(jnp.sum(centred(features, trained) ** 2, axis=0) / count))
    inverse = jnp.where(x_scale > 0, 1 / jnp.where(x_scale > 0, x_scale, 1.0), 0.0)
    y_scale = jnp.where(y_scale > 0, y_scale, 1.0)

    def standardised(a: Array) -> Array:
        # Of a sample far outside what was trained on nothing is known: it must not blow up.
        return jnp.clip((a - x_mean[None]) * inverse[None], -_REACH, _REACH)

    x = jnp.where(where[:, None], standardised(points), 0.0)
    y = jnp.where(where[:, None], (features - y_mean[None]) / y_scale, 0.0)
    # The known samples' rows first: they choose, the others are what is asked for.
    everyone = jnp.concatenate([x, standardised(unknown)])

    guesses = jnp.concatenate(
        [
            _ridges(x, y, everyone, trained, jnp.asarray(config.penalties)),
            _network(init_key, fit_key, x, y, everyone, trained, config),
        ]
    )
    validation = jax.vmap(r2, (None, 0, None))(y, guesses[:, :n], held_out)
    best = guesses[jnp.argmax(validation), n:]
    return Inverted(best * y_scale + y_mean[None], validation)


def _ridges(x: Array, y: Array, everyone: Array, trained: Array, penalties: Array) -> Array:
    """What ridge regression with each penalty says of everyone, [penalties, n + m, D]."""
    x = jnp.where(trained[:, None], x, 0.0)
    values, axes = linalg.eigh(matmul(x.T, x) / jnp.sum(trained))
    target = matmul(axes.T, matmul(x.T, y)) / jnp.sum(trained)
    weights = target[None] / (jnp.maximum(values, 0.0)[None] + penalties[:, None])[..., None]
    return matmul(matmul(everyone, axes)[None], weights)


def _network(
    init_key: Array,
    fit_key: Array,
    x: Array,
    y: Array,
    everyone: Array,
    trained: Array,
    config: InverterConfig,
) -> Array:
    """What each snapshot says of everyone, [snapshots, n + m, D]."""
    params = init_mlp(init_key, x.shape[1], (*config.hidden, y.shape[1]))
    state = optax.adam(config.learning_rate).init(params)

    def loss(params: PyTree, rows: tuple[Array, Array], mask: Array) -> Array:
        errors = jnp.mean((apply(params, rows[0]) - rows[1]) ** 2, axis=-1)
        return jnp.sum(jnp.where(mask, errors, 0.0)) / jnp.maximum(jnp.sum(mask), 1)

    def snapshot(carry: PyTree, i: Array) -> tuple[PyTree, Array]:
        params, state, _ = fit_on(
            jax.random.fold_in(fit_key, i),
            carry[0],
            carry[1],
            loss,
            (x, y),
            trained,
            epochs=config.epochs,
            batch_size=config.batch_size,
            learning_rate=config.learning_rate,
        )
        return (params, state), apply(params, everyone)

    return lax.scan(snapshot, (params, state), jnp.arange(config.snapshots))[1]


# --- Rows -----------------------------------------------------------------------------------------


def _drawn(key: Array, where: Array, share: float) -> Array:
    """A random part of the real rows, this share rounded up, bool [n]; padding changes no draw."""
    draws = jnp.where(where, jax.random.uniform(key, where.shape), jnp.inf)
    place = jnp.argsort(jnp.argsort(draws))
    return where & (place < jnp.ceil(share * jnp.sum(where)))
