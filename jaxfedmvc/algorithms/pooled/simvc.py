"""SiMVC and CoMVC: clustering by a weighted sum of the views' codes, without and with contrast.

    z^v = encoder_v(x^v),  hidden = BN(relu(Lin(sum_v softmax(w)_v z^v))),  A = softmax(Lin(hidden))
    SiMVC:  d(A, K) + 2/(B (B - 1)) sum_{i<j} a_i.a_j + d(M, K),  m_ik = exp(-|a_i - e_k|^2)
    CoMVC:  + delta min_v softmax(w)_v x cross-entropy of a row's views against other clusters' rows

with K the kernel of a batch's hidden rows, and d the divergence of `divergence`. Of the states
after every few epochs, in all runs, the one with the lowest d(A, K) counts: it asks for no label.
Labels are argmax A, and hidden is the embedding.

Source: Trosten, Løkse, Jenssen and Kampffmeyer, "Reconsidering representation alignment for
multi-view clustering", CVPR 2021, and the authors' code. Against that code: a last, smaller batch
makes a step like any other, and counts by its rows where states are compared; statistics of
evaluation are those of all rows in one pass, where theirs run along with training; biases start at
zero. Their gradient clipping is left out, as it never acts there: Adam has used up the iterator of
parameters that it is given. A batch with a single predicted cluster, which has no negatives, ends
training there without a word, and has no contrast here. Rows are taken as they are scaled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.pooled.adapter import Fitted, needs_complete_rows, needs_views, pooled
from jaxfedmvc.algorithms.pooled.networks import batch_norm, init_norm
from jaxfedmvc.algorithms.pooled.rows import blank, is_real
from jaxfedmvc.algorithms.shared.matrices import squared_distances
from jaxfedmvc.losses import l2_normalize, masked_mean
from jaxfedmvc.nn import apply, fit_on, init_mlps
from jaxfedmvc.precision import in_32_bits

PyTree = Any
_EPSILON = 1e-9


@dataclasses.dataclass(frozen=True)
class SiMVCConfig:
    """Static settings of SiMVC.

    Attributes:
      n_clusters: Number of clusters c.
      hidden: Widths of the encoders' hidden layers.
      latent_dim: Width of the views' codes, which are fused.
      head_hidden: Width of the layer between the fused code and the clusters.
      epochs: Passes over the rows in a run.
      check_every: Epochs from one choice of the best state to the next; what remains of `epochs`
        behind the last choice could not be chosen, and is left out.
      batch_size: Rows in a step.
      n_runs: Runs from new starts, of which the best is kept; 1 to see how much runs differ.
      runs_at_once: Runs side by side, in as many kernels as one; none: 1 on a CPU, all on an
        accelerator. It changes rounding.
    """

    n_clusters: int
    hidden: tuple[int, ...] = (512, 512)
    latent_dim: int = 256
    head_hidden: int = 100
    epochs: int = 100
    check_every: int = 4
    batch_size: int = 100
    n_runs: int = 20
    runs_at_once: int | None = None

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 2, "n_clusters", "batch_size")
        checks.at_least(self, 1, "latent_dim", "head_hidden", "check_every", "n_runs")
        checks.at_least(self, 1, "runs_at_once")
        checks.at_least(self, self.check_every, "epochs")
        checks.widths(self, "hidden")


@dataclasses.dataclass(frozen=True)
class CoMVCConfig(SiMVCConfig):
    """Static settings of CoMVC.

    Attributes:
      negatives: Negatives of a row, as a share of all views' rows in a full batch.
    """

    negatives: float = 0.25

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        super().__post_init__()
        rule = (lambda x: (x > 0) & (x <= 1), "a number above 0, up to 1")
        checks.number("negatives", self.negatives, rule)


@struct.dataclass
class SiMVCHyperparams:
    """Numbers of SiMVC that may be traced.

    Attributes:
      learning_rate: Adam's step size.
      rel_sigma: Squared width of the kernel, as a multiple of the median squared distance.
    """

    learning_rate: Array | float = 1e-3
    rel_sigma: Array | float = 0.15


@struct.dataclass
class CoMVCHyperparams(SiMVCHyperparams):
    """Numbers of CoMVC that may be traced.

    Attributes:
      delta: Weight of the contrast; the authors take 20 for CCV and COIL-20.
      tau: Temperature of the contrast.
    """

    delta: Array | float = 0.1
    tau: Array | float = 0.1


def simvc(config: SiMVCConfig, hyperparams: SiMVCHyperparams | None = None) -> FederatedAlgorithm:
    """Returns SiMVC on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: a client does not hold all views,
        or there are fewer samples than clusters.
    """
    hyper = checks.settings(config, SiMVCConfig, hyperparams, SiMVCHyperparams)
    checks.numbers(hyper, {"learning_rate": checks.POSITIVE, "rel_sigma": checks.POSITIVE})
    return pooled(fit, config, hyper, needs_complete_rows("simvc"))


def comvc(config: CoMVCConfig, hyperparams: CoMVCHyperparams | None = None) -> FederatedAlgorithm:
    """Returns CoMVC on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: there is one view only, a client
        does not hold all views, or there are fewer samples than clusters.
    """
    hyper = checks.settings(config, CoMVCConfig, hyperparams, CoMVCHyperparams)
    positive = dict.fromkeys(("learning_rate", "rel_sigma", "tau"), checks.POSITIVE)
    checks.numbers(hyper, {**positive, "delta": checks.NOT_NEGATIVE})

    two = needs_views("comvc", 2, "contrasts views")
    return pooled(fit_comvc, config, hyper, two, needs_complete_rows("comvc"))


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
def fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: SiMVCConfig,
    hyperparams: SiMVCHyperparams,
) -> Fitted:
    """Clusters N complete rows by SiMVC; see `pooled.adapter.Fit`."""
    return _fit(key, views, observed, config, hyperparams, lambda key, params, found, mask: 0.0)


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
def fit_comvc(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: CoMVCConfig,
    hyperparams: CoMVCHyperparams,
) -> Fitted:
    """Clusters N complete rows by CoMVC; see `pooled.adapter.Fit`."""
    n_negatives = max(int(config.negatives * len(views) * config.batch_size), 1)

    def term(key: Array, params: PyTree, found: Found, mask: Array) -> Array:
        # The least weight: no view is aligned with one that the sum does without.
        least = jnp.min(jax.nn.softmax(lax.stop_gradient(params["fusion"])))
        value = contrast(key, found.codes, found.assignments, mask, n_negatives, hyperparams.tau)
        return hyperparams.delta * least * value

    return _fit(key, views, observed, config, hyperparams, term)


# --- Training -------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The best state so far: its criterion, labels [N], and hidden rows [N, head_hidden]."""

    criterion: Array
    labels: Array
    hidden: Array


def _fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: SiMVCConfig,
    hyper: SiMVCHyperparams,
    term: Callable[[Array, PyTree, Found, Array], Array | float],
) -> Fitted:
    """Clusters rows, where `term(key, params, found, mask)` adds to the loss of a batch."""
    x, mask = blank(views, observed), is_real(observed)
    n_checks = config.epochs // config.check_every

    def one_run(key: Array) -> tuple[Kept, Array]:
        key_start, key_steps = jax.random.split(key)
        # As one vector, of which Adam compiles in a fraction of the time of many arrays.
        vector, form = ravel_pytree(start(key_start, [v.shape[1] for v in x], config))

        def loss(vector: Array, x: tuple[Array, ...], mask: Array, key: Array) -> Array:
            params = form(vector)
            found = forward(params, x, mask, config)
            terms = clustering_terms(found, mask, hyper.rel_sigma)
            return jnp.sum(terms) + term(key, params, found, mask)

        def check(carry: Any, number: Array) -> tuple[Any, Array]:
            vector, opt_state, best = carry
            vector, opt_state, _ = fit_on(
                jax.random.fold_in(key_steps, number),
                vector,
                opt_state,
                loss,
                x,
                mask,
                epochs=config.check_every,
                batch_size=config.batch_size,
                learning_rate=hyper.learning_rate,
                keyed=True,
            )
            found = forward(form(vector), x, mask, config)
            value = criterion(found, mask, config.batch_size, hyper.rel_sigma)
            value = jnp.where(jnp.isnan(value), jnp.inf, value)
            labels = jnp.argmax(found.assignments, axis=1).astype(jnp.int32)
            new = Kept(value, labels, found.hidden)
            best = jax.tree.map(lambda a, b: jnp.where(value < best.criterion, a, b), new, best)
            return (vector, opt_state, best), value

        nothing = Kept(
            jnp.float32(jnp.inf),
            jnp.zeros(len(mask), jnp.int32),
            jnp.zeros((len(mask), config.head_hidden)),
        )
        opt_state = optax.adam(hyper.learning_rate).init(vector)
        (_, _, best), trace = lax.scan(check, (vector, opt_state, nothing), jnp.arange(n_checks))
        return best, trace

    together = config.runs_at_once or (1 if jax.default_backend() == "cpu" else config.n_runs)
    starts = jax.random.split(key, config.n_runs)
    # One at a time without vmap, whose products are slower on a CPU.
    runs, traces = lax.map(one_run, starts, batch_size=together if together > 1 else None)
    kept = jnp.argmin(runs.criterion)
    labels = jnp.where(mask, runs.labels[kept], -1)
    return Fitted(labels, jnp.where(mask[:, None], runs.hidden[kept], 0.0), traces[kept])


def criterion(found: Found, mask: Array, batch_size: int, rel_sigma: Array | float) -> Array:
    """Computes d(A, K) in batches of consecutive rows, and their mean by numbers of rows."""
    n_batches = -(-len(mask) // batch_size)

    def batches(x: Array) -> Array:
        x = jnp.pad(x, [(0, n_batches * batch_size - len(x))] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(n_batches, batch_size, *x.shape[1:])

    def one(batch: tuple[Array, Array, Array]) -> Array:
        hidden, assignments, mask = batch
        return divergence(assignments, kernel(hidden, mask, rel_sigma), mask)

    mask = batches(mask)
    values = lax.map(one, (batches(found.hidden), batches(found.assignments), mask))
    sizes = jnp.sum(mask, axis=1)
    return jnp.sum(jnp.where(sizes > 0, values * sizes, 0.0)) / jnp.maximum(jnp.sum(sizes), 1)


# --- The network ----------------------------------------------------------------------------------


class Found(NamedTuple):
    """What the network makes of B rows.

    Attributes:
      codes: z^v, [V, B, latent_dim].
      hidden: [B, head_hidden].
      assignments: A, [B, c].
    """

    codes: Array
    hidden: Array
    assignments: Array


def start(key: Array, widths: list[int], config: SiMVCConfig) -> PyTree:
    """Returns fresh parameters: weights of He et al., N(0, 2/inputs), and equal views."""
    encoder = (*config.hidden, config.latent_dim)
    layers = {f"view_{v}": (width, encoder) for v, width in enumerate(widths)}
    layers["hidden"] = (config.latent_dim, (config.head_hidden,))
    layers["clusters"] = (config.head_hidden, (config.n_clusters,))
    form = jax.eval_shape(lambda: init_mlps(key, layers))
    leaves, tree = jax.tree.flatten(form)
    sizes = [leaf.size if leaf.ndim == 2 else 0 for leaf in leaves]
    draws = jnp.split(jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1])
    drawn = [
        draw.reshape(leaf.shape) * (2 / len(leaf)) ** 0.5 if draw.size else jnp.zeros(leaf.shape)
        for draw, leaf in zip(draws, leaves, strict=True)
    ]
    norm = init_norm(config.head_hidden)
    fusion = jnp.full(len(widths), 1 / len(widths))
    return {**jax.tree.unflatten(tree, drawn), "norm": norm, "fusion": fusion}


def forward(params: PyTree, x: tuple[Array, ...], mask: Array, config: SiMVCConfig) -> Found:
    """Applies the network to B rows of all views, with the batch statistics of the real ones."""
    codes = jnp.stack([jax.nn.relu(apply(params[f"view_{v}"], x_v)) for v, x_v in enumerate(x)])
    fused = jnp.einsum("v,vbd->bd", jax.nn.softmax(params["fusion"]), codes)
    hidden = jax.nn.relu(apply(params["hidden"], fused))
    hidden = batch_norm(hidden, params["norm"], mask)
    logits = apply(params["clusters"], hidden)
    return Found(codes, hidden, jax.nn.softmax(logits))


# --- Terms of the loss ----------------------------------------------------------------------------


def clustering_terms(found: Found, mask: Array, rel_sigma: Array | float) -> Array:
    """Computes the three terms of deep divergence-based clustering, [3]."""
    a = found.assignments
    gram = kernel(found.hidden, mask, rel_sigma)
    corners = jnp.exp(-squared_distances(a, jnp.eye(a.shape[1])))
    return jnp.stack([divergence(a, gram, mask), overlap(a, mask), divergence(corners, gram, mask)])


def kernel(hidden: Array, mask: Array, rel_sigma: Array | float) -> Array:
    """Computes exp(-d^2/(2 s)) of rows [B, d]; s is a multiple of the median d^2, and constant.

    It is the lower median over all pairs of real rows, those of a row with itself too.
    """
    distances = squared_distances(hidden, hidden)
    pairs = mask[:, None] & mask[None]
    ordered = jnp.sort(jnp.where(pairs, lax.stop_gradient(distances), jnp.inf).ravel())
    n_pairs = jnp.sum(mask) ** 2
    median = jnp.where(n_pairs > 0, ordered[jnp.maximum(n_pairs - 1, 0) // 2], 1.0)
    return jnp.exp(-distances / (2 * jnp.maximum(rel_sigma * median, _EPSILON)))


def divergence(a: Array, gram: Array, mask: Array) -> Array:
    """Computes d(A, K) = 2/(c (c - 1)) sum_{k<l} n_kl / sqrt(n_kk n_ll), with n = A^T K A.

    This is the Cauchy-Schwarz divergence of the clusters, before the logarithm and the sign: it is
    low where the kernel sees clusters apart.
    """
    c = a.shape[1]
    a = jnp.where(mask[:, None], a, 0.0)
    n = a.T @ gram @ a
    own = jnp.diagonal(n)
    scale = jnp.sqrt(jnp.maximum(own[:, None] * own[None], _EPSILON**2))
    return 2 / (c * (c - 1)) * jnp.sum(jnp.triu(jnp.maximum(n, _EPSILON) / scale, 1))


def overlap(a: Array, mask: Array) -> Array:
    """Computes the mean of a_i.a_j over pairs i < j of real rows."""
    a = jnp.where(mask[:, None], a, 0.0)
    n = jnp.sum(mask)
    twice = jnp.sum(jnp.sum(a, axis=0) ** 2) - jnp.sum(a * a)
    return twice / jnp.maximum(n * (n - 1), 1)


def contrast(
    key: Array,
    codes: Array,
    assignments: Array,
    mask: Array,
    n_negatives: int,
    tau: Array | float,
) -> Array:
    """Computes the mean cross-entropy of every pair of a row's views against drawn negatives.

    The negatives of a row are drawn with replacement from all views of the rows that are assigned
    to another cluster; without such rows there is no contrast. A last, smaller batch draws as many.

    Args:
      key: Of the draws.
      codes: z^v, [V, B, d].
      assignments: A, [B, c]; its gradient is not taken.
      mask: bool [B].
      n_negatives: Draws for each row and ordered pair of views.
      tau: Temperature of the cosines.
    """
    n_views, n_rows = codes.shape[:2]
    first, second = np.nonzero(~np.eye(n_views, dtype=bool))
    unit = l2_normalize(codes)
    logits = jnp.einsum("vid,wjd->vwij", unit, unit) / tau
    own = jnp.diagonal(logits, axis1=2, axis2=3)[first, second].T  # [B, pairs]
    # By row first, so that appended padding leaves the draws of the others alone.
    draws = jax.random.uniform(key, (n_rows, len(first), n_negatives))
    view, row, n_others = draw_other_clusters(draws, n_views, assignments, mask)
    anchor = jnp.arange(n_rows)[:, None, None]
    negatives = logits[first[None, :, None], view, anchor, row]
    all_of = jnp.concatenate([own[..., None], negatives], axis=2)
    entropy = jnp.mean(jax.nn.logsumexp(all_of, axis=2) - own, axis=1)
    return masked_mean(jnp.where(n_others > 0, entropy, 0.0), mask)


def draw_other_clusters(
    draws: Array, n_views: int, assignments: Array, mask: Array
) -> tuple[Array, Array, Array]:
    """Turns uniform draws [B, ...] into views and rows of other clusters than the row's own.

    Returns:
      The views and the rows, like `draws`, and the number of rows to draw from, [B].
    """
    c = assignments.shape[1]
    clusters = jnp.where(mask, jnp.argmax(assignments, axis=1), c)
    order = jnp.argsort(clusters)  # a cluster's rows are consecutive; padding comes last
    sizes = jnp.bincount(clusters, length=c + 1)[:c]
    before = jnp.cumsum(sizes) - sizes
    own_size, own_first = (x[jnp.minimum(clusters, c - 1)] for x in (sizes, before))
    n_others = jnp.sum(sizes) - own_size

    def like(x: Array) -> Array:
        return x.reshape(-1, *[1] * (draws.ndim - 1))

    drawn = (draws * like(n_others * n_views)).astype(jnp.int32)
    drawn = jnp.clip(drawn, 0, like(jnp.maximum(n_others * n_views - 1, 0)))
    place = drawn // n_views  # among the rows of other clusters, which its own lie between
    place = jnp.where(place < like(own_first), place, place + like(own_size))
    return drawn % n_views, order[jnp.minimum(place, len(order) - 1)], n_others
