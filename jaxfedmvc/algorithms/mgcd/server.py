"""MGCD's server: refined graphs, graph contrast and graph diversity, eq. (4) to (6) of the paper.

Networks are trained on blocks of rows, so that what exists at once of factored graphs is a few
times views * batch * N entries; the whole consistency graph is then put together from the
networks' hidden layers, as factors where graphs are factored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfedmvc.algorithms.mgcd import graph as graphs_lib
from jaxfedmvc.algorithms.mgcd.graph import Factored, Graph, rows, times
from jaxfedmvc.algorithms.mgcd.model import (
    Layer,
    PyTree,
    init_layer,
)
from jaxfedmvc.algorithms.mgcd.settings import (
    MGCDHyperparams,
    ResolvedConfig,
    diversity_weight,
)
from jaxfedmvc.losses import l2_normalize, log_sum_exp, masked_mean
from jaxfedmvc.nn import fit_on
from jaxfedmvc.precision import matmul


def graph_contrast(
    refined: Array, mask: Array, tau: Array | float, *, infonce: bool = False
) -> Array:
    """Computes eq. (4): a sample's rows are alike in all views, and unlike other samples' rows.

    As printed it leaves out the first and the last view, and re-uses the index of its anchor. Here
    it runs over pairs of views v < q of all V, each of the two the anchor for a half, and for
    anchor (i, v) the denominator is over the other samples of the batch in all views, v included:

        -1/b sum_i sum_{v<q} 1/2 [ l(i, v, q) + l(i, q, v) ],
        l(i, v, q) = s(g_i^v, g_i^q) / tau - log sum_{j != i, p} exp(s(g_i^v, g_j^p) / tau)

    with s the cosine. The positive is not in the denominator, so the loss may be negative.

    Args:
      refined: Rows of the refined consistency graphs, [V, b, N].
      mask: bool [b].
      tau: Temperature.
      infonce: Whether the positive is in the denominator, too.
    """
    v, b, n = refined.shape
    unit = l2_normalize(refined).reshape(v * b, n)
    similarity = matmul(unit, unit.T) / tau
    others = ~jnp.eye(b, dtype=bool) & mask[None] & mask[:, None]
    allowed = jnp.tile(others, (v, v))
    denominator = log_sum_exp(similarity, allowed).reshape(v, b)
    # positive[v, q, i] = s(g_i^v, g_i^q) / tau
    positive = jnp.diagonal(similarity.reshape(v, b, v, b), axis1=1, axis2=3)
    below = denominator[:, None]
    if infonce:
        below = jnp.logaddexp(below, positive)
    pairs = jnp.where(jnp.eye(v, dtype=bool)[:, :, None], 0.0, positive - below)
    return -masked_mean(0.5 * jnp.sum(pairs, axis=(0, 1)), mask)


def diversity_loss(diversity: Array, mask: Array) -> Array:
    """Computes eq. (5) as a mean over rows.

    For all rows it is sum_{v,q} Tr(G_{d_v} G_{d_q}^T) = ||sum_v G_{d_v}||_F^2.
    With G_{d_v} = G_c^{t-1} + G_d^v - G_{c_v} it is V^2 times the squared distance of the new
    consistency graph from the old one plus the mean of the diversity graphs.

    Args:
      diversity: Rows of the refined diversity graphs, [V, b, N].
      mask: bool [b].
    """
    return masked_mean(jnp.sum(jnp.sum(diversity, axis=0) ** 2, axis=-1), mask)


class Networks(NamedTuple):
    """The server's networks; `pre` is () without distillation."""

    pre: Layer | tuple[()]
    post: Layer


def init_networks(key: Array, config: ResolvedConfig, n: int, n_real: Array) -> Networks:
    """Draws f_pre and f_post; in the robust mode their outputs are zero to begin with."""
    pre_key, post_key = jax.random.split(key)
    residual = config.mode == "robust"
    width = config.server_hidden
    pre = init_layer(pre_key, n, n_real, width, residual=residual) if config.distillation else ()
    return Networks(pre, init_layer(post_key, n, n_real, width, residual=residual))


def _apply(layer: Layer, x: Array) -> Array:
    hidden = jax.nn.relu(matmul(x, layer.a) + layer.b[None, None])
    return matmul(hidden, layer.c) + layer.d[None, None]


def refined_rows(
    networks: Networks, config: ResolvedConfig, diversity: Array, consistency: Array, where: Array
) -> Array:
    """Returns rows of the refined consistency graphs G_{c_v}, [V, b, N].

    Literal: f_post(f_pre(G_d^v) + G_c). Robust: H + f_post(H), H = G_d^v + f_pre(G_d^v) + G_c,
    which starts at G_d^v + G_c, whose mean is the minimum of the diversity loss.

    Args:
      networks: f_pre and f_post.
      config: Which form.
      diversity: Rows of G_d^v, [V, b, N].
      consistency: The same rows of G_c, [b, N].
      where: Real samples, bool [N].
    """
    distilled = diversity
    if isinstance(networks.pre, Layer):
        distilled = _apply(networks.pre, diversity) * where[None, None]
        if config.mode == "robust":
            distilled += diversity
    fused = distilled + consistency[None]
    refined = _apply(networks.post, fused) * where[None, None]
    return fused + refined if config.mode == "robust" else refined


def learned_parts(
    networks: Networks,
    config: ResolvedConfig,
    diversity: Sequence[Graph],
    consistency: Graph,
    where: Array,
) -> list[Factored]:
    """Returns what the networks contribute to each view's refined graph, as factors.

    Literal: f_post(f_pre(G_d^v) + G_c), all of it. Robust: f_pre(G_d^v) + f_post(H). The right
    factors, made of the last layers' weights, are the same for all views. No graph of N x N entries
    is formed unless the graphs are such.
    """
    pre, post = networks
    consistency_at_post = times(consistency, post.a)
    parts = []
    for graph in diversity:
        # What f_post's first layer makes of its input, without that input.
        at_post, of_pre = consistency_at_post, []
        if isinstance(pre, Layer):
            of_pre = [_output(jax.nn.relu(times(graph, pre.a) + pre.b[None]), pre, where)]
            at_post = at_post + matmul(of_pre[0].left, matmul(of_pre[0].right, post.a))
        if config.mode == "robust" or not of_pre:
            at_post = at_post + times(graph, post.a)
        of_post = _output(jax.nn.relu(at_post + post.b[None]), post, where)
        kept = [*of_pre, of_post] if config.mode == "robust" else [of_post]
        parts.append(graphs_lib.side_by_side(kept))
    return parts


def refined_graphs(
    networks: Networks,
    config: ResolvedConfig,
    diversity: Sequence[Graph],
    consistency: Graph,
    average: Graph,
    where: Array,
) -> tuple[list[Graph], Graph]:
    """Returns each view's refined consistency graph G_{c_v}, and their mean, the new G_c.

    The mean's diagonal is zero. In the robust mode it is scaled to the Frobenius norm of the
    average; otherwise it would grow from round to round until it outweighs all that clients send.

    Args:
      networks: f_pre and f_post.
      config: Which form.
      diversity: The clients' graphs.
      consistency: The old G_c.
      average: The old G_c plus the mean of the diversity graphs.
      where: Real samples, bool [N].
    """
    parts = learned_parts(networks, config, diversity, consistency, where)
    left = sum((part.left for part in parts[1:]), start=parts[0].left) / len(parts)
    learned = Factored(left, parts[0].right)
    if config.mode == "literal":
        return list(parts), graphs_lib.dense(learned) if config.dense else learned
    refined = [
        graphs_lib.total([graph, consistency, part])
        for graph, part in zip(diversity, parts, strict=True)
    ]
    new = graphs_lib.total([average, learned])
    ratio = graphs_lib.squared_norm(average) / jnp.maximum(graphs_lib.squared_norm(new), 1e-30)
    return refined, graphs_lib.scaled(new, jnp.sqrt(ratio))


def _output(hidden: Array, layer: Layer, where: Array) -> Factored:
    """Returns `hidden c + d` as factors."""
    left = jnp.concatenate([hidden, jnp.ones((hidden.shape[0], 1))], axis=1)
    right = jnp.concatenate([layer.c, layer.d[None]])
    return Factored(jnp.where(where[:, None], left, 0.0), jnp.where(where[None], right, 0.0))


def server_training(
    key: Array,
    networks: Networks,
    opt_state: PyTree,
    diversity: Sequence[Graph],
    consistency: Graph,
    where: Array,
    config: ResolvedConfig,
    hp: MGCDHyperparams,
) -> tuple[Networks, PyTree, Array]:
    """Minimises eq. (6) over blocks of rows; returns networks, Adam's state and epoch losses."""

    def loss(networks: Networks, index: Array, mask: Array) -> Array:
        contrast, spread = server_losses(
            networks, index, mask, diversity, consistency, where, config, hp
        )
        return weighted(contrast, spread, where, config, hp)

    if not {"cl", "dd"} & set(config.losses):
        return networks, opt_state, jnp.zeros(0)
    return fit_on(
        key,
        networks,
        opt_state,
        loss,
        jnp.arange(where.shape[0]),
        where,
        epochs=config.server_epochs,
        batch_size=config.batch_size,
        learning_rate=hp.server_rate,
    )


def server_losses(
    networks: Networks,
    index: Array,
    mask: Array,
    diversity: Sequence[Graph],
    consistency: Graph,
    where: Array,
    config: ResolvedConfig,
    hp: MGCDHyperparams,
) -> tuple[Array, Array]:
    """Computes eq. (4) and the mean over rows of eq. (5), on the rows `index`."""
    of_views = jnp.stack([rows(graph, index) for graph in diversity])
    of_all = rows(consistency, index)
    refined = refined_rows(networks, config, of_views, of_all, where)
    contrast = graph_contrast(refined, mask, hp.tau, infonce=config.contrast == "infonce")
    return contrast, diversity_loss(of_all[None] + of_views - refined, mask)


def weighted(
    contrast: Array, spread: Array, where: Array, config: ResolvedConfig, hp: MGCDHyperparams
) -> Array:
    """Computes eq. (6), L_cl + lambda L_dd.

    Eq. (5) sums over all rows of the graphs and eq. (4) is a mean over samples. The literal mode
    keeps that, so that the weight of lambda depends on N; the robust one takes the mean over rows.
    """
    value = jnp.float32(0)
    if "cl" in config.losses:
        value += contrast
    if "dd" in config.losses:
        n_rows = jnp.sum(where) if config.mode == "literal" else 1.0
        value += diversity_weight(config, hp) * n_rows * spread
    return value
