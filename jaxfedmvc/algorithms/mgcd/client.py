"""MGCD's client: autoencoder and self-representation, eq. (1) to (3) of the paper.

Source: Sun et al., "Graph consistency and diversity measurement for federated multi-view
clustering", AAAI 2025. Sums over samples are means here, both terms of eq. (3) alike.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxfedmvc.algorithms.mgcd.graph import Factored, Graph, rows, times
from jaxfedmvc.algorithms.mgcd.model import (
    ClientState,
    PyTree,
    decode,
    encode,
    init_autoencoder,
    uniform_by_row,
)
from jaxfedmvc.algorithms.mgcd.settings import MGCDHyperparams, ResolvedConfig
from jaxfedmvc.algorithms.shared.matrices import right_singular_vectors
from jaxfedmvc.linalg import solve_positive
from jaxfedmvc.losses import masked_mean
from jaxfedmvc.nn import fit, fit_on, last
from jaxfedmvc.precision import matmul


def reconstruction_loss(x: Array, x_decoded: Array, mask: Array) -> Array:
    """Computes eq. (1): mean over samples of ||x - D(E_c(x) + E_d(x))||^2."""
    return masked_mean(jnp.sum((x - x_decoded) ** 2, axis=-1), mask)


def self_representation_loss(z: Array, graph_rows: Array, z_all: Array, mask: Array) -> Array:
    """Computes eq. (2): mean over samples of ||z_i - sum_j G_ij z_j||^2, G = G_c + G_d.

    Args:
      z: [b, d], of the samples whose rows these are.
      graph_rows: [b, N], zero at the sample itself.
      z_all: [N, d], of all samples.
      mask: bool [b].
    """
    return masked_mean(jnp.sum((z - matmul(graph_rows, z_all)) ** 2, axis=-1), mask)


def pretrain(
    key: Array, params: PyTree, x: Array, mask: Array, config: ResolvedConfig, hp: MGCDHyperparams
) -> tuple[PyTree, Array]:
    """Minimises eq. (1); returns the parameters and the last epoch's loss.

    Without the reconstruction loss the parameters stay as they are.
    """
    if "r" not in config.losses:
        return params, jnp.float32(0)

    def loss(params: PyTree, x: Array, mask: Array) -> Array:
        z, _ = encode(params, config, x)
        return reconstruction_loss(x, decode(params, z), mask)

    params, losses = fit(
        key,
        params,
        loss,
        x,
        mask,
        epochs=config.pretrain_epochs,
        batch_size=config.batch_size,
        learning_rate=hp.pretrain_rate,
    )
    return params, last(losses)


# Literal mode: gradients of eq. (3).


def local_training(
    key: Array,
    state: ClientState,
    consistency: Graph,
    x: Array,
    mask: Array,
    config: ResolvedConfig,
    hp: MGCDHyperparams,
) -> tuple[ClientState, Array]:
    """Minimises L_r + gamma L_s; returns the state and the loss of each epoch.

    The paper does not say how minibatches go with a graph of all samples. Here the rows of a batch
    meet ALL latent vectors, which are computed at the start of an epoch and held fixed in it;
    gradients flow through the batch's own vectors and its rows of the diversity graph.
    """
    samples = jnp.arange(x.shape[0])

    def epoch(carry: PyTree, number: Array) -> tuple[PyTree, Array]:
        params, opt_state = carry
        z_all = jnp.where(mask[:, None], encode(params, config, x)[0], 0.0)

        def loss(params: PyTree, batch: tuple[Array, Array], batch_mask: Array) -> Array:
            x, index = batch
            z, z_d = encode(params, config, x)
            value = jnp.float32(0)
            if "r" in config.losses:
                x_decoded = decode(params, z)
                value += reconstruction_loss(x, x_decoded, batch_mask)
            if "s" in config.losses:
                of_others = index[:, None] != samples[None]
                diversity = jnp.where(of_others, matmul(z_d, params["graph"]), 0.0)
                graph_rows = rows(consistency, index) + diversity
                value += hp.gamma * self_representation_loss(z, graph_rows, z_all, batch_mask)
            return value

        params, opt_state, losses = fit_on(
            jax.random.fold_in(key, number),
            params,
            opt_state,
            loss,
            (x, samples),
            mask,
            epochs=1,
            batch_size=config.batch_size,
            learning_rate=hp.local_rate,
        )
        return (params, opt_state), losses[0]

    carry = (state.params, state.opt_state)
    (params, opt_state), losses = jax.lax.scan(epoch, carry, jnp.arange(config.local_epochs))
    return state._replace(params=params, opt_state=opt_state), losses


def diversity_graph(params: PyTree, x: Array, mask: Array, config: ResolvedConfig) -> Factored:
    """Returns G_d = f_d(E_d(X)); f_d is one linear layer, so its factors are Z_d and W."""
    _, z_d = encode(params, config, x)
    return Factored(jnp.where(mask[:, None], z_d, 0.0), jnp.where(mask[None], params["graph"], 0.0))


# Robust mode: both problems in closed form.


def latent(
    key: Array,
    x: Array,
    mask: Array,
    width: int,
    config: ResolvedConfig,
    hp: MGCDHyperparams,
) -> tuple[Array, Array]:
    """Returns Z [N, width] on the sphere, and the reconstruction loss.

    Without that loss the encoder is a random one.
    """
    init_key, fit_key = jax.random.split(key)
    if config.encoder == "deep":
        params = init_autoencoder(init_key, config, x.shape[1])
        params, loss = pretrain(fit_key, params, x, mask, config, hp)
        return on_sphere(encode(params, config, x)[0], mask), loss
    x = centred(x, mask)
    if "r" in config.losses:
        axes = principal_axes(x, width)
        z = matmul(x, axes)
        return on_sphere(z, mask), reconstruction_loss(x, matmul(z, axes.T), mask)
    axes = uniform_by_row(init_key, x.shape[1], width, 1.0)
    return on_sphere(matmul(x, axes), mask), jnp.float32(0)


def principal_axes(x: Array, width: int) -> Array:
    """Returns the encoder of the best linear autoencoder, [D_v, width]: eq. (1) in closed form.

    The leading eigenvectors of the covariance (Baldi & Hornik, 1989) of centred x [N, D_v].
    """
    return right_singular_vectors(x, width)


def centred(x: Array, mask: Array) -> Array:
    """Subtracts from x [N, D] its mean over the real rows; the others become zero."""
    mean = jnp.sum(jnp.where(mask[:, None], x, 0.0), axis=0) / jnp.maximum(jnp.sum(mask), 1)
    return jnp.where(mask[:, None], x - mean[None], 0.0)


def on_sphere(z: Array, mask: Array) -> Array:
    """Centres latent vectors and scales them to length sqrt(d).

    Columns then have unit size on average, and no long vector dominates the rows of the graph.
    """
    z = centred(z, mask)
    # In units of the largest number, by a power of two: what counts as zero hangs on no unit.
    _, exponent = jnp.frexp(jax.lax.stop_gradient(jnp.max(jnp.abs(z))))
    z = z * jnp.ldexp(jnp.ones((), z.dtype), -exponent)
    norm = jnp.sqrt(jnp.sum(z * z, axis=1, keepdims=True))
    return jnp.where(norm > 1e-6, z / jnp.maximum(norm, 1e-6), 0.0) * z.shape[1] ** 0.5


def ridge_graph(
    z: Array, consistency: Graph, n_real: Array, ridge: Array | float, *, solve: bool
) -> Factored:
    """Returns the diversity graph that solves eq. (2) with a penalty.

    min over G of ||(I - G_c) Z - G Z||_F^2 + ridge N ||G||_F^2, which is
    G_d = (I - G_c) Z (Z^T Z + ridge N I)^-1 Z^T: ridge regression, on Z, of the part of Z that G_c
    does not explain. Without the penalty there are many solutions where N > d. Its diagonal is
    left out afterwards.

    Args:
      z: [N, d], zero in rows of padding.
      consistency: G_c.
      n_real: Number of samples.
      ridge: lambda_g, relative to the number of samples.
      solve: Whether to solve it; False: the limit of a large penalty, up to its scale,
        (I - G_c) Z Z^T / N.
    """
    unexplained = z - times(consistency, z)
    if not solve:
        return Factored(unexplained, z.T / n_real)
    gram = matmul(z.T, z) + ridge * n_real * jnp.eye(z.shape[1])
    return Factored(unexplained, solve_positive(gram, z.T))
