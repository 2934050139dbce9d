"""ProImp: prototypes of each view, and attention to them that also fills missing views.

    z^v = encoder_v(x^v),  r = rep(l2 z),  a = softmax(q(LN r) k(LN' p)^T / sqrt(d)),  p rows unit
    r' = a u(LN' p),  p' = a^T u'(LN r),  z* = Lin(l2 r' + l2 r),  p* = l2 p' + l2 p
    loss = NT-Xent(proj z*^v, proj z*^w) + mean_v [H(a^v) + 0.02 entropy(a^v)]
           + from a later epoch NT-Xent of matched p*^v and p*^w, positive logit (m - |s - m|)/tau

with H = log c + sum_k abar_k log abar_k of the mean attention. Prototypes are matched once, by the
attention of rows with both views (Hungarian algorithm). A missing view is what z* would be if the
attention of an observed view went to the missing view's matched prototypes. All views side by side
are clustered by k-means.

Source: Li et al., "Incomplete multi-view clustering via prototype-based imputation", IJCAI 2023,
and the authors' code. That is for two views, where we do as it does, but for these: batch
statistics are those of each view in one pass over all its rows, where theirs run along with
training and mix the views in `rep`; biases start at zero; one count of steps corrects Adam's
moments for all parameters. For more views nothing is published: terms are averaged over pairs of
views and over views, rows with two views or more are trained on, and a missing view is the mean,
scaled to length 1, of what the observed ones give for it. The code's defaults are those for
Scene-15; for MNIST-USPS it has 128 for `latent_dim`, with the second view in [0, 1]. Settings for
BDGP could not be established.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from optax.assignment import hungarian_algorithm

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.pooled.adapter import Fitted, needs_views, pooled
from jaxfedmvc.algorithms.pooled.networks import batch_norm, init_norm, layer_norm
from jaxfedmvc.algorithms.pooled.rows import blank, is_real
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.federation import Federation
from jaxfedmvc.losses import l2_normalize, log_sum_exp, masked_mean, ntxent
from jaxfedmvc.nn import fit_on, init_mlps
from jaxfedmvc.precision import in_32_bits

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ProImpConfig:
    """Static settings of ProImp.

    Attributes:
      n_clusters: Number of clusters c, and of prototypes of each view.
      hidden: Widths of the encoders' hidden layers.
      latent_dim: Width d of codes and prototypes.
      epochs: Passes over the rows with two views or more.
      pretrain_epochs: Those of them before prototypes are matched, and their loss begins.
      batch_size: Rows in a step.
      n_init: Starts of the last k-means, of which the best is kept.
    """

    n_clusters: int
    hidden: tuple[int, ...] = (1024, 1024, 1024)
    latent_dim: int = 256
    epochs: int = 150
    pretrain_epochs: int = 50
    batch_size: int = 1024
    n_init: int = 10

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 2, "n_clusters", "batch_size")
        checks.at_least(self, 1, "latent_dim", "n_init")
        checks.at_least(self, 0, "pretrain_epochs")
        checks.at_least(self, self.pretrain_epochs + 1, "epochs")
        checks.widths(self, "hidden")


@struct.dataclass
class ProImpHyperparams:
    """Numbers of ProImp that may be traced.

    Attributes:
      learning_rate: Adam's step size.
      dropout: Share of units that are dropped behind all hidden layers but the last, below 1.
      tau: Temperature of the contrast of rows.
      tau_prototypes: Temperature of the contrast of prototypes.
      margin: Cosine m up to which matched prototypes are drawn together, and not further.
      sharpness: Weight of the entropy of rows' attention.
    """

    learning_rate: Array | float = 1e-3
    dropout: Array | float = 0.2
    tau: Array | float = 0.5
    tau_prototypes: Array | float = 2.0
    margin: Array | float = 0.75
    sharpness: Array | float = 0.02


def proimp(
    config: ProImpConfig, hyperparams: ProImpHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns ProImp on the rows of all clients. This is no privacy: see `pooled.adapter`.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: there is one view only, or two
        that no client holds both, or there are fewer samples than clusters.
    """
    hyper = checks.settings(config, ProImpConfig, hyperparams, ProImpHyperparams)
    cosine = (lambda x: abs(x) <= 1, "a number from -1 to 1")
    rules = dict.fromkeys(("learning_rate", "tau", "tau_prototypes"), checks.POSITIVE)
    rules |= {"dropout": checks.BELOW_ONE, "margin": cosine, "sharpness": checks.NOT_NEGATIVE}
    checks.numbers(hyper, rules)
    return pooled(fit, config, hyper, needs_views("proimp", 2, "contrasts views"), _needs_pairs)


def _needs_pairs(federation: Federation) -> None:
    if all(len(cohort.view_ids) < 2 for cohort in federation.cohorts):
        raise ValueError(
            "proimp learns from rows with two views or more, but every client holds one;"
            " allowed are some clients with more (such as --ratio=1:1)"
        )
    kinds = [set(cohort.view_ids) for cohort in federation.cohorts]
    for v, w in _pairs(federation.n_views).tolist():
        if not any({v, w} <= kind for kind in kinds):
            raise ValueError(
                f"proimp matches prototypes by rows with both views of a pair, but no client holds"
                f" {v} and {w}; allowed are federations where somebody holds both, for all pairs"
            )


@in_32_bits
@functools.partial(jax.jit, static_argnames="config", inline=True)
def fit(
    key: Array,
    views: tuple[Array, ...],
    observed: Array,
    config: ProImpConfig,
    hyperparams: ProImpHyperparams,
) -> Fitted:
    """Clusters N rows, of which some views are missing; see `pooled.adapter.Fit`."""
    x, real, n_views = standardised(views, observed), is_real(observed), len(views)
    paired = jnp.sum(observed, axis=1) >= 2
    key_start, key_steps, key_means = jax.random.split(key, 3)
    # As one vector, of which Adam compiles in a fraction of the time of many arrays.
    vector, form = ravel_pytree(start(key_start, [v.shape[1] for v in views], config))

    def read_all(vector: Array) -> Read:
        params = form(vector)
        return read(params, encode(params, x, observed), observed)

    def epoch(carry: Any, number: Array) -> tuple[Any, Array]:
        vector, opt_state, match = carry
        late = number >= config.pretrain_epochs
        match = lax.cond(
            number == config.pretrain_epochs,
            lambda: matching(read_all(vector).attention, observed),
            lambda: match,
        )

        def loss(vector: Array, rows: tuple[Any, Array], mask: Array, key: Array) -> Array:
            # Batches of padding alone, and of rows with one view, are not worth computing.
            return lax.cond(jnp.any(mask), some_loss, lambda *_: 0.0, vector, rows, mask, key)

        def some_loss(vector: Array, rows: tuple[Any, Array], mask: Array, key: Array) -> Array:
            params, (x, observed) = form(vector), rows
            seen = observed & mask[:, None]
            factors = dropout_factors(key, len(mask), n_views, config, hyperparams.dropout)
            found = read(params, encode(params, x, seen, factors), seen)
            return batch_loss(params, found, seen, match, late, hyperparams)

        vector, opt_state, losses = fit_on(
            jax.random.fold_in(key_steps, number),
            vector,
            opt_state,
            loss,
            (x, observed),
            paired,
            epochs=1,
            batch_size=config.batch_size,
            learning_rate=hyperparams.learning_rate,
            keyed=True,
        )
        return (vector, opt_state, match), losses[0]

    unmatched = jnp.zeros((n_views, n_views, config.n_clusters, config.n_clusters))
    carry = vector, optax.adam(hyperparams.learning_rate).init(vector), unmatched
    (vector, _, match), trace = lax.scan(epoch, carry, jnp.arange(config.epochs))
    filled = fill(form(vector), read_all(vector), match, observed)
    rows = jnp.where(real[:, None], jnp.concatenate(list(filled), axis=1), 0.0)
    labels = kmeans(key_means, rows, config.n_clusters, where=real, n_init=config.n_init).labels
    return Fitted(labels, rows, trace)


def standardised(views: tuple[Array, ...], observed: Array) -> tuple[Array, ...]:
    """Subtracts from each view its mean over all entries, and divides by their deviation.

    Rows without the view count as zeros in both, as they do in the authors' code.
    """
    real = is_real(observed)[:, None]
    scaled = []
    for v, x in enumerate(blank(views, observed)):
        n = jnp.sum(real) * float(x.shape[1])
        mean = jnp.sum(x) / jnp.maximum(n, 1)
        squares = jnp.sum(jnp.where(real, x - mean, 0.0) ** 2)
        deviation = jnp.sqrt(squares / jnp.maximum(n - 1, 1))
        z = (x - mean) / jnp.where(deviation > 0, deviation, 1.0)
        scaled.append(jnp.where(observed[:, v, None], z, 0.0))
    return tuple(scaled)


# --- The network ----------------------------------------------------------------------------------


def start(key: Array, widths: list[int], config: ProImpConfig) -> PyTree:
    """Returns fresh parameters; those of the views' attention are stacked, [V, ...].

    Fully connected layers are lists of {"kernel", "bias"}, with the "norm" that follows some.
    """
    d, n_views = config.latent_dim, len(widths)
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {
        f"encoder_{v}": (width, (*config.hidden, d)) for v, width in enumerate(widths)
    }
    # Queries, keys, values of prototypes (u), values of rows (u'): see above.
    names = ("query", "key", "value", "row_value")
    shapes |= {f"{name}_{v}": (d, (d,)) for name in names for v in range(n_views)}
    shapes |= {f"prototypes_{v}": (d, (config.n_clusters,)) for v in range(n_views)}
    shapes |= {"rep": (d, (d, d)), "out": (d, (d,))}
    shapes |= {"project_rows": (d, (d, d, d)), "project_prototypes": (d, (d, d, d))}
    drawn = init_mlps(key, shapes)

    def layers(name: str) -> list[dict[str, Any]]:
        found = [drawn[name]["params"][f"Dense_{i}"] for i in range(len(shapes[name][1]))]
        normed = [layer | {"norm": init_norm(*layer["bias"].shape)} for layer in found[:-1]]
        return [*normed, found[-1]]

    def stacked(name: str) -> dict[str, Array]:
        found = [drawn[f"{name}_{v}"]["params"]["Dense_0"] for v in range(n_views)]
        return jax.tree.map(lambda *x: jnp.stack(x), *found)

    norms = {name: init_norm(n_views, d) for name in ("row_norm", "prototype_norm")}
    return {
        "encoders": [layers(f"encoder_{v}") for v in range(n_views)],
        "attention": {name: stacked(name) for name in names} | norms,
        "prototypes": jnp.swapaxes(stacked("prototypes")["kernel"], 1, 2),
        **{name: layers(name) for name in ("rep", "project_rows", "project_prototypes")},
        "out": layers("out")[0],
    }


def linear(layer: PyTree, x: Array) -> Array:
    """Applies one layer to [rows, d]."""
    return x @ layer["kernel"] + layer["bias"][None]


def normed_mlp(layers: PyTree, x: Array, mask: Array, factors: Sequence[Array] = ()) -> Array:
    """Applies layers to [rows, d], with batch norm of the masked rows and ReLU between them.

    Args:
      layers: Of `start`.
      x: [rows, d].
      mask: bool [rows], the rows whose statistics count.
      factors: What the units of the first hidden layers are multiplied with, [rows, width] each.
    """
    for i, layer in enumerate(layers[:-1]):
        x = jax.nn.relu(batch_norm(linear(layer, x), layer["norm"], mask))
        if i < len(factors):
            x = x * factors[i]
    return linear(layers[-1], x)


def dropout_factors(
    key: Array, n_rows: int, n_views: int, config: ProImpConfig, dropout: Array | float
) -> list[list[Array]]:
    """Drops units behind all hidden layers but the last, by view and layer, [n_rows, width] each.

    All are of one draw, by row first: appended rows leave the others alone.
    """
    widths = config.hidden[:-1] * n_views
    draws = jax.random.uniform(key, (n_rows, sum(widths)))
    factors = jnp.where(draws >= dropout, 1 / (1 - dropout), 0.0)
    found = jnp.split(factors, np.cumsum(widths)[:-1], axis=1) if widths else []
    each = len(config.hidden[:-1])
    return [found[v * each : (v + 1) * each] for v in range(n_views)]


def encode(
    params: PyTree, x: tuple[Array, ...], seen: Array, factors: Sequence[Sequence[Array]] = ()
) -> Array:
    """Returns z^v of rows of all views, [V, rows, d]; those that are not seen mean nothing.

    Args:
      params: Of `start`.
      x: [rows, D_v] each.
      seen: bool [rows, V].
      factors: Of `dropout_factors`; none drops nothing.
    """
    return jnp.stack(
        [
            normed_mlp(params["encoders"][v], x_v, seen[:, v], factors[v] if factors else ())
            for v, x_v in enumerate(x)
        ]
    )


class Read(NamedTuple):
    """What attention to the prototypes finds in rows of V views.

    Attributes:
      rows: r, [V, rows, d].
      attention: a, [V, rows, c].
      values: u(LN' p), [V, c, d].
      prototypes: p*, [V, c, d].
    """

    rows: Array
    attention: Array
    values: Array
    prototypes: Array


def read(params: PyTree, z: Array, seen: Array) -> Read:
    """Lets the codes z^v [V, rows, d] attend to the prototypes of their view."""

    def one_view(own: PyTree, z: Array, p: Array, seen: Array) -> Read:
        p = l2_normalize(p)
        r = normed_mlp(params["rep"], l2_normalize(z), seen)
        rows, normed = layer_norm(r, own["row_norm"]), layer_norm(p, own["prototype_norm"])
        logits = linear(own["query"], rows) @ linear(own["key"], normed).T
        attention = jax.nn.softmax(logits / z.shape[1] ** 0.5)
        moved = jnp.where(seen[:, None], attention, 0.0).T @ linear(own["row_value"], rows)
        return Read(r, attention, linear(own["value"], normed), l2_normalize(moved) + p)

    return jax.vmap(one_view)(params["attention"], z, params["prototypes"], seen.T)


def fused(params: PyTree, values: Array, rows: Array) -> Array:
    """Returns z* = Lin(l2 r' + l2 r) of what rows read and of themselves, both [..., d]."""
    x = l2_normalize(values) + l2_normalize(rows)
    return linear(params["out"], x.reshape(-1, x.shape[-1])).reshape(x.shape)


# --- Terms of the loss ----------------------------------------------------------------------------


def batch_loss(
    params: PyTree,
    found: Read,
    seen: Array,
    match: Array,
    late: Array,
    hyper: ProImpHyperparams,
) -> Array:
    """Computes the loss of a batch, the sum of the terms below.

    Args:
      params: All parameters.
      found: What attention finds in the batch.
      seen: Views of each row that are observed and no padding, bool [B, V].
      match: Prototypes of pairs of views that belong together.
      late: Whether prototypes are contrasted, too.
      hyper: Temperatures, margin and sharpness.
    """
    value = row_contrast(params, found, seen, hyper.tau)
    value += attention_terms(found.attention, seen, hyper.sharpness)
    return value + late * prototype_contrast(
        params, found.prototypes, match, hyper.margin, hyper.tau_prototypes
    )


def row_contrast(params: PyTree, found: Read, seen: Array, tau: Array | float) -> Array:
    """Computes the mean over pairs of views of NT-Xent between z* of the rows with both."""
    z = fused(params, found.attention @ found.values, found.rows)
    project = jax.vmap(lambda z, seen: normed_mlp(params["project_rows"], z, seen))
    h = l2_normalize(project(z, seen.T))

    @jax.checkpoint  # or every pair would leave its similarities for the gradient
    def one_pair(pair: Array) -> Array:
        v, w = pair
        return ntxent(h[w], h[v], seen[:, v] & seen[:, w], tau)

    return jnp.mean(lax.map(one_pair, _pairs(len(z))))


def attention_terms(attention: Array, seen: Array, sharpness: Array | float) -> Array:
    """Computes the mean over views of H(a) + sharpness x mean entropy of a row's attention.

    Args:
      attention: a, [V, rows, c].
      seen: bool [rows, V].
      sharpness: Weight of the entropy.
    """

    def one_view(a: Array, seen: Array) -> Array:
        mean = jnp.sum(jnp.where(seen[:, None], a, 0.0), axis=0) / jnp.maximum(jnp.sum(seen), 1)
        balance = math.log(a.shape[1]) + jnp.sum(mean * jnp.log(mean + 1e-12))
        entropy = masked_mean(-jnp.sum(a * jnp.log(a + 1e-8), axis=1), seen)
        return balance + sharpness * entropy

    return jnp.mean(jax.vmap(one_view)(attention, seen.T))


def prototype_contrast(
    params: PyTree, prototypes: Array, match: Array, margin: Array | float, tau: Array | float
) -> Array:
    """Computes the mean over pairs of views of the contrast between matched prototypes.

    NT-Xent of the 2c projected prototypes, where the cosine s of a matched pair counts as
    m - |s - m|: beyond the margin m they are pushed apart again.

    Args:
      params: Of `start`.
      prototypes: p*, [V, c, d].
      match: Of `matching`.
      margin: m.
      tau: Temperature.
    """
    v, w = _pairs(len(prototypes)).T
    turned = jnp.einsum("pkl,pkd->pld", match[v, w], prototypes[v])  # in the order of view w
    both = jnp.concatenate([prototypes[w], turned], axis=1)  # [pairs, 2c, d]
    n = both.shape[1]

    def one_pair(both: Array) -> Array:
        h = normed_mlp(params["project_prototypes"], both, jnp.ones(n, bool))
        h = l2_normalize(h)
        cosines = h @ h.T
        partner = jnp.roll(jnp.eye(n, dtype=bool), n // 2, axis=1)
        logits = jnp.where(partner, margin - jnp.abs(cosines - margin), cosines) / tau
        positive = jnp.sum(jnp.where(partner, logits, 0.0), axis=1)
        return jnp.mean(log_sum_exp(logits, ~jnp.eye(n, dtype=bool)) - positive)

    return jnp.mean(jax.vmap(one_pair)(both))


def _pairs(n_views: int) -> np.ndarray:
    """Returns pairs of views v < w, [pairs, 2]."""
    return np.stack(np.triu_indices(n_views, 1), axis=1)


# --- Prototypes of one view for another -----------------------------------------------------------


def matching(attention: Array, observed: Array) -> Array:
    """Matches prototypes of all views one to one, by the rows that attend to both most.

    Args:
      attention: a, [V, N, c].
      observed: bool [N, V].

    Returns:
      [V, V, c, c], 1 where prototype k of view v is l of view w, else 0; the same for v = w.
    """
    n_views, _, c = attention.shape
    chosen = jax.nn.one_hot(jnp.argmax(attention, axis=2), c) * observed.T[..., None]
    v, w = _pairs(n_views).T
    common = jnp.einsum("pnk,pnl->pkl", chosen[v], chosen[w])

    def one_pair(common: Array) -> Array:
        row, column = hungarian_algorithm(-common)
        return jnp.zeros((c, c)).at[row, column].set(1.0)

    match = lax.map(one_pair, common)
    own = jnp.broadcast_to(jnp.eye(c), (n_views, n_views, c, c))
    return own.at[v, w].set(match).at[w, v].set(jnp.swapaxes(match, 1, 2))


def fill(params: PyTree, found: Read, match: Array, observed: Array) -> Array:
    """Returns z* of all views, [V, N, d] of length 1, with the missing ones from the others."""
    n_views = len(found.rows)

    def one_view(values: Array, match: Array, own: Array, there: Array) -> Array:
        # For each view w that may be observed: its attention in the order of this view.
        moved = jnp.einsum("wnl,wkl->wnk", found.attention, match)
        guesses = l2_normalize(fused(params, moved @ values[None], found.rows))
        use = jnp.where(there[:, None], own[None], observed).T[..., None]
        return l2_normalize(jnp.sum(jnp.where(use, guesses, 0.0), axis=0))

    own = jnp.eye(n_views, dtype=bool)
    return lax.map(lambda x: one_view(*x), (found.values, match, own, observed.T))
