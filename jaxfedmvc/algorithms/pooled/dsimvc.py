"""DSIMVC: complete samples teach, and imputed ones join in by weights that must not do harm.

    z^v = E^v(x^v),  h^v = W(z^v),  q^v = softmax(U(z^v)); all views share W and U
    pair loss: sum over v < w of F(h^v, h^w) + L(q^v, q^w)

    first:   two sets of autoencoders reconstruct complete rows; the second, with heads, goes on
             with the pair loss, and only its neighbours count: they fill what is missing, once
    then:    the first set's encoders, with fresh heads, minimise in each step the pair loss of a
             batch of complete rows and a weighted one of a batch of filled rows
    labels:  argmax of the mean of q^v over the views that a row has

Source: Tang and Liu, "Deep safe incomplete multi-view clustering: Theorem and algorithm", ICML
2022, and the authors' code, github.com/Gasteinh/DSIMVC.

In that code the weights reach F alone, since L of a batch is one number; F of the filled rows is
divided by the size of the batch once more than that of the complete ones; and rows that are filled
anew in training never reach the batches that it runs on. So the weights hardly matter: by default
they are all equal, with the same division, and rows are filled once. The authors' weights, learnt
so that a step with them lowers the loss of the complete rows, are the option "bilevel". That code
looks for neighbours among the 600 nearest rows, also such as lack the view that is compared, and
stops with an error where too few of these will do; here they are sought among all rows that have
both views. It min-max scales what is filled and not all else; here all is. PyTorch's Adam counts
steps for each parameter, so that the heads that neighbours are found by start with a fresh count in
the pair loss. Here they share that of their autoencoders, and their first steps are larger.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import Array, lax

from jaxfedmvc import checks, nn
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.pooled.adapter import Fitted, needs_varied_views, needs_views, pooled
from jaxfedmvc.algorithms.pooled.networks import (
    Networks,
    PyTree,
    apply,
    columns,
    encode,
    fit_autoencoders,
    init_networks,
    neighbours_by_view,
    sum_over_pairs,
    unevenness,
)
from jaxfedmvc.algorithms.pooled.rows import is_real, min_max
from jaxfedmvc.federation import Federation
from jaxfedmvc.losses import l2_normalize, log_sum_exp, masked_mean
from jaxfedmvc.precision import in_32_bits

_MOST = 3.0  # largest squared length of a feature vector in F


@dataclasses.dataclass(frozen=True)
class DSIMVCConfig:
    """Static settings of DSIMVC.

    Attributes:
      n_clusters: Number of clusters.
      hidden: Widths of the encoders' hidden layers; the decoders mirror them.
      latent_dim: Width of z^v, and the heads' hidden width.
      feature_dim: Width of h^v.
      pretrain_epochs: Epochs of reconstruction of the encoders that cluster; the authors take 200
        for Multi-Fashion.
      neighbour_pretrain_epochs: Epochs of reconstruction of the networks that find neighbours.
      neighbour_epochs: Epochs of the pair loss of the latter. The authors take 30 for BDGP, 80 for
        MNIST-USPS, 100 for Multi-Fashion.
      n_neighbours: Rows whose mean fills a missing view.
      steps: Steps of training; the authors take 100, 200 and 300 for these sets.
      batch_size: Rows in one step of training, of each kind.
      weights: Weights of filled rows. "uniform": all equal. "bilevel": learnt, as in the paper.
      weight_hidden: Hidden width of the network that "bilevel" weighs rows by.
      stack_views: Whether networks of views of equal width are trained as one stack; None: on
        accelerators. See `nn.Alike`.
    """

    n_clusters: int
    hidden: tuple[int, ...] = (500, 500, 2000)
    latent_dim: int = 512
    feature_dim: int = 128
    pretrain_epochs: int = 100
    neighbour_pretrain_epochs: int = 200
    neighbour_epochs: int = 100
    n_neighbours: int = 3
    steps: int = 200
    batch_size: int = 256
    weights: Literal["uniform", "bilevel"] = "uniform"
    weight_hidden: int = 100
    stack_views: bool | None = None

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "latent_dim", "feature_dim", "n_neighbours")
        checks.at_least(self, 1, "steps", "batch_size", "weight_hidden")
        checks.at_least(self, 0, "pretrain_epochs", "neighbour_pretrain_epochs", "neighbour_epochs")
        checks.choices(self)
        checks.widths(self, "hidden")


@struct.dataclass
class DSIMVCHyperparams:
    """Numbers of DSIMVC that may be traced.

    Attributes:
      learning_rate: Adam's step size of all networks.
      trial_rate: Size of the step after which weights="bilevel" looks at the complete rows' loss.
      weight_rate: Adam's step size of the network that weighs rows.
    """

    learning_rate: Array | float = 3e-4
    trial_rate: Array | float = 1e-3
    weight_rate: Array | float = 4e-4


def dsimvc(
    config: DSIMVCConfig, hyperparams: DSIMVCHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns DSIMVC on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: there is one view only, or one is
        constant, no client has all views, or there are fewer samples than clusters.
    """
    hyper = checks.settings(config, DSIMVCConfig, hyperparams, DSIMVCHyperparams)
    rates = ("learning_rate", "trial_rate", "weight_rate")
    checks.numbers(hyper, dict.fromkeys(rates, checks.POSITIVE))
    two = needs_views("dsimvc", 2, "contrasts views")
    varied = needs_varied_views("dsimvc", "would draw all clusters into one")
    return pooled(fit, config, hyper, two, _check_complete, varied)


def _check_complete(federation: Federation) -> None:
    if not any(federation.holds_all_views(cohort) for cohort in federation.cohorts):
        raise ValueError(
            "dsimvc learns from complete rows, but no client holds all views; allowed are"
            " federations where some do"
        )


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
def fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: DSIMVCConfig,
    hyperparams: DSIMVCHyperparams,
) -> Fitted:
    """Clusters N rows, of which some views are missing; see `pooled.adapter.Fit`."""
    x, real = min_max(views, observed), is_real(observed)
    complete = jnp.all(observed, axis=1)
    key_init, key_first, key_neighbours, key_train = jax.random.split(key, 4)

    networks = init(key_init, x, config)
    batches: dict[str, Any] = {
        "batch_size": config.batch_size,
        "learning_rate": hyperparams.learning_rate,
    }
    start = optax.adam(hyperparams.learning_rate).init(networks)
    networks, _, first = fit_autoencoders(
        key_first, networks, start, x, complete, epochs=config.pretrain_epochs, **batches
    )
    features, found = neighbour_features(key_neighbours, x, complete, config, hyperparams)
    filled = fill(x, features, observed, config.n_neighbours)

    model = networks._replace(decoders=nn.Alike((), ()))
    rows = complete, real & ~complete
    model, then = train(key_train, model, filled, rows, config, hyperparams)
    _, q = outputs(model, x)  # [V, N, c]
    held = observed.T[:, :, None]
    mean = jnp.sum(q * held, axis=0) / jnp.maximum(jnp.sum(held, axis=0), 1)
    labels = jnp.where(real, jnp.argmax(mean, axis=1).astype(jnp.int32), -1)
    return Fitted(labels, mean, jnp.concatenate([first, found, then]))


def init(key: Array, views: Sequence[Array], config: DSIMVCConfig) -> Networks:
    """Returns fresh autoencoders and heads."""
    heads = {
        "feature": (config.latent_dim, (config.latent_dim, config.feature_dim)),
        "label": (config.latent_dim, (config.latent_dim, config.n_clusters)),
    }
    return init_networks(key, views, config.hidden, config.latent_dim, heads, config.stack_views)


def outputs(networks: Networks, x: Sequence[Array]) -> tuple[Array, Array]:
    """Computes h^v [V, rows, feature_dim] and q^v [V, rows, c]."""
    z = encode(networks, x)
    q = jax.nn.softmax(apply(networks.heads["label"], z))
    return apply(networks.heads["feature"], z), q


# --- The pair loss --------------------------------------------------------------------------------


def feature_terms(z: Array, z_other: Array, mask: Array) -> Array:
    """Computes F of each row: -2 z_i.z'_i + mean_{j != i} (z_i.z'_j)^2, [rows].

    It is the spectral contrastive loss, of vectors that are cut at the length sqrt 3.
    """
    z, z_other = cut(z), cut(z_other)
    others = mask[None] & ~jnp.eye(len(mask), dtype=bool)
    repelled = jnp.sum(jnp.where(others, (z @ z_other.T) ** 2, 0.0), axis=1)
    return repelled / jnp.maximum(jnp.sum(mask) - 1, 1) - 2 * jnp.sum(z * z_other, axis=1)


def cut(z: Array) -> Array:
    """Shortens rows that are longer than sqrt 3 to this length."""
    long = jnp.sum(z * z, axis=1, keepdims=True) >= _MOST
    return jnp.where(long, l2_normalize(z) * _MOST**0.5, z)


def label_loss(q: Array, q_other: Array, mask: Array) -> Array:
    """Computes L: contrast of clusters of two views' assignments [rows, c], and their unevenness.

    A column is drawn to the same cluster's in the other view, away from its own view's others.
    """
    of_view = columns(q, mask), columns(q_other, mask)
    positive = jnp.sum(of_view[0] * of_view[1], axis=1, keepdims=True)
    same = jnp.eye(q.shape[1], dtype=bool)
    logits = jnp.concatenate([jnp.where(same, positive, a @ a.T) for a in of_view])
    contrast = jnp.mean(log_sum_exp(logits, jnp.ones_like(logits, bool))) - jnp.mean(positive)
    contrast = jnp.where(jnp.any(mask), contrast, 0.0)
    return contrast + unevenness(q, mask) + unevenness(q_other, mask)


def pair_loss(h: Array, q: Array, mask: Array, weights: Array | None = None) -> Array:
    """Computes the pair loss of a batch.

    Args:
      h: Features, [V, rows, d].
      q: Assignments, [V, rows, c].
      mask: bool [rows].
      weights: Of filled rows, with sum 1, [rows]. F is divided by the number of rows once more.
    """

    def pair(left: tuple[Array, Array], right: tuple[Array, Array]) -> Array:
        f = feature_terms(left[0], right[0], mask)
        if weights is None:
            term = masked_mean(f, mask)
        else:
            term = jnp.sum(jnp.where(mask, f * weights, 0.0)) / jnp.maximum(jnp.sum(mask), 1)
        return term + label_loss(left[1], right[1], mask)

    return sum_over_pairs(pair, (h, q))


# --- Filling --------------------------------------------------------------------------------------


def neighbour_features(
    key: Array, x: Sequence[Array], complete: Array, config: DSIMVCConfig, hyper: DSIMVCHyperparams
) -> tuple[Array, Array]:
    """Trains networks on complete rows to find neighbours by.

    Returns:
      Unit features of all rows [V, N, feature_dim], and the losses of all epochs.
    """
    key_init, key_first, key_then = jax.random.split(key, 3)
    networks = init(key_init, x, config)
    batches: dict[str, Any] = {
        "batch_size": config.batch_size,
        "learning_rate": hyper.learning_rate,
    }
    state = optax.adam(hyper.learning_rate).init(networks)  # one for both phases
    networks, state, first = fit_autoencoders(
        key_first, networks, state, x, complete, epochs=config.neighbour_pretrain_epochs, **batches
    )

    def loss(networks: Networks, x: tuple[Array, ...], mask: Array) -> Array:
        h, q = outputs(networks, x)
        return pair_loss(l2_normalize(h), q, mask)

    networks, _, then = nn.fit_on(
        key_then,
        networks,
        state,
        loss,
        tuple(x),
        complete,
        epochs=config.neighbour_epochs,
        **batches,
    )
    return l2_normalize(outputs(networks, x)[0]), jnp.concatenate([first, then])


def fill(x: Sequence[Array], features: Array, observed: Array, count: int) -> tuple[Array, ...]:
    """Fills missing views by means over the nearest rows in the views that there are.

    The first of these views gives as many neighbours as are asked for, if it has them, and each
    further one what is still lacking, but one at least.

    Args:
      x: [N, D_v] each.
      features: What neighbours are found by, [V, N, d].
      observed: bool [N, V].
      count: Neighbours to ask for.
    """
    products, rows = neighbours_by_view(features, observed, count)  # [N, V, V, count]
    usable = jnp.isfinite(products)
    have = jnp.zeros(usable.shape[:2], jnp.int32)  # [N, V]
    taken = []
    for w in range(len(x)):
        wanted = jnp.maximum(count - have, 1)
        ranks = jnp.arange(usable.shape[3])[None, None]
        taken.append(usable[:, :, w] & (ranks < wanted[:, :, None]))
        have = have + jnp.sum(taken[-1], axis=2)
    shares = jnp.stack(taken, axis=2) / jnp.maximum(have, 1)[:, :, None, None]

    def of_row(row: tuple[Array, Array]) -> tuple[Array, ...]:
        share, nearest = row
        return tuple(
            jnp.tensordot(share[v], x_v[nearest[v]], axes=2, precision=lax.Precision.HIGHEST)
            for v, x_v in enumerate(x)
        )

    means = lax.map(of_row, (shares, rows), batch_size=64)
    held = observed.T[:, :, None]
    return tuple(jnp.where(held[v], x_v, means[v]) for v, x_v in enumerate(x))


# --- Training -------------------------------------------------------------------------------------


def train(
    key: Array,
    model: Networks,
    x: Sequence[Array],
    kinds: tuple[Array, Array],
    config: DSIMVCConfig,
    hyper: DSIMVCHyperparams,
) -> tuple[Networks, Array]:
    """Trains on complete and filled rows together.

    Args:
      key: PRNG key.
      model: Encoders and heads.
      x: All views of all rows, filled, [N, D_v] each.
      kinds: Which rows are complete, and which are filled, bool [N] each.
      config: Settings.
      hyper: Step sizes.

    Returns:
      The trained model, and the loss of each step, [steps].
    """
    key_complete, key_filled, key_weigher = jax.random.split(key, 3)
    length = config.steps * config.batch_size
    index = tuple(
        passes(key, mask, length).reshape(config.steps, config.batch_size)
        for key, mask in zip((key_complete, key_filled), kinds, strict=True)
    )
    masks = [jnp.repeat(jnp.any(mask), config.batch_size) for mask in kinds]
    adam, weigher_adam = optax.adam(hyper.learning_rate), optax.adam(hyper.weight_rate)
    weigher = nn.init_mlp(key_weigher, config.n_clusters, (config.weight_hidden, 1))

    def step(state: Any, index: Any) -> tuple[Any, Array]:
        model, opt_state, weigher, weigher_state = state
        complete, filled = ([x_v[rows] for x_v in x] for rows in index)

        def complete_loss(model: Networks) -> Array:
            return pair_loss(*outputs(model, complete), masks[0])

        def weights(weigher: PyTree, model: Networks) -> Array:
            return weigh(weigher, outputs(model, filled)[1])

        def loss(model: Networks, weights: Array) -> Array:
            return complete_loss(model) + pair_loss(*outputs(model, filled), masks[1], weights)

        def trial(weigher: PyTree) -> Array:
            gradient = jax.grad(lambda model: loss(model, weights(weigher, model)))(model)
            moved = jax.tree.map(lambda p, g: p - hyper.trial_rate * g, model, gradient)
            return complete_loss(moved)

        if config.weights == "bilevel":
            updates, weigher_state = weigher_adam.update(jax.grad(trial)(weigher), weigher_state)
            weigher = optax.apply_updates(weigher, updates)
            given = lax.stop_gradient(weights(weigher, model))
        else:
            given = jnp.full(config.batch_size, 1 / config.batch_size)
        value, gradient = jax.value_and_grad(loss)(model, given)
        updates, opt_state = adam.update(gradient, opt_state)
        return (optax.apply_updates(model, updates), opt_state, weigher, weigher_state), value

    start: Any = model, adam.init(model), weigher, weigher_adam.init(weigher)
    (model, *_), losses = lax.scan(step, start, index)
    return model, losses


def weigh(weigher: PyTree, q: Array) -> Array:
    """Weighs filled rows by their mean assignments, of q [V, rows, c]; the sum is 1."""
    scores = jax.nn.sigmoid(apply(weigher, jnp.mean(q, axis=0))[:, 0])
    return scores / jnp.maximum(jnp.sum(scores), 1e-12)


def passes(key: Array, mask: Array, length: int) -> Array:
    """Returns as many rows, of one random order after another; int32 [length].

    Without any row it returns what is to be masked.
    """
    n, count = len(mask), jnp.sum(mask)
    count = jnp.where(count > 0, count, length)
    places = jnp.arange(n)

    def write(number: Array, rows: Array) -> Array:
        draws = jax.random.uniform(jax.random.fold_in(key, number), (n,))
        order = jnp.argsort(jnp.where(mask, draws, jnp.inf))
        at = jnp.where(places < count, number * count + places, length)
        return rows.at[at].set(order, mode="drop")

    rows: Array = lax.fori_loop(0, -(-length // count), write, jnp.zeros(length, jnp.int32))
    return rows
