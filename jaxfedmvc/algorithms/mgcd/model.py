"""MGCD's states and networks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxfedmvc.algorithms.mgcd.graph import Graph
from jaxfedmvc.algorithms.mgcd.settings import ResolvedConfig
from jaxfedmvc.algorithms.mgcd.sparse_spectral import Neighbours
from jaxfedmvc.nn import apply, init_mlps

PyTree = Any


class ClientState(NamedTuple):
    """Holds what a client keeps.

    Attributes:
      params: Of its networks in the literal mode, () otherwise.
      opt_state: Of the local Adam in the literal mode, () otherwise.
      latent: Z [N, d] in the robust mode, () otherwise.
      labels: Its clusters, int32 [N], once the server has sent them; -1 before.
    """

    params: PyTree
    opt_state: PyTree
    latent: PyTree
    labels: Array


class Clusters(NamedTuple):
    """Holds the result of spectral clustering of consistency graphs.

    Attributes:
      labels: int32 [N], -1 for padding.
      embedding: Leading eigenvectors of the normalised affinity, rows of unit length, [N, K].
      separation: (1 - e_{K+1}) / (1 - e_K) of its eigenvalues, 1 or more: how well K clusters are
        separated compared with K + 1. See `affinity.clusters`.
      of_each: Share of the views' own affinities in the one that was clustered: 1 for their mean, 0
        for that of the mean graph, 1/2 for both.
      affinity: The graph that was clustered, at most (V + 1) k edges a sample; of "absolute" the k
        heaviest of each.
    """

    labels: Array
    embedding: Array
    separation: Array
    of_each: Array
    affinity: Neighbours


class ServerState(NamedTuple):
    """Holds what the server keeps.

    Attributes:
      networks: Of f_pre and f_post, () where the server only averages.
      opt_state: Of their Adam.
      where: Real samples, bool [N].
      graph: The consistency graph G_c.
      clusters: Of the last round; in the robust mode of the last that counted.
      finished: Whether a round of the robust mode separated clusters hardly better than one before.
      kept: Views that count, bool [V]: all before the first round.
    """

    networks: PyTree
    opt_state: PyTree
    where: Array
    graph: Graph
    clusters: Clusters
    finished: Array
    kept: Array


# The clients' networks.


def encoder_widths(config: ResolvedConfig) -> tuple[int, ...]:
    """Returns the widths of E_c and E_d, the output last."""
    return (*config.hidden, config.latent_dim)


def init_autoencoder(key: Array, config: ResolvedConfig, n_features: int) -> PyTree:
    """Draws parameters of E_c, E_d (with `dual`) and D."""
    shapes = {
        "consensus": (n_features, encoder_widths(config)),
        "decoder": (config.latent_dim, (*reversed(config.hidden), n_features)),
    }
    if config.dual:
        shapes["specific"] = n_features, encoder_widths(config)
    return init_mlps(key, shapes)


def encode(params: PyTree, config: ResolvedConfig, x: Array) -> tuple[Array, Array]:
    """Returns Z = Z_c + Z_d and Z_d, both [n, d]; with one encoder both are its output."""
    z_c = apply(params["consensus"], x)
    if not config.dual:
        return z_c, z_c
    z_d = apply(params["specific"], x)
    return z_c + z_d, z_d


def decode(params: PyTree, z: Array) -> Array:
    """Returns D(Z), [n, D_v]."""
    return apply(params["decoder"], z)


def uniform_by_row(key: Array, n: int, width: int, bound: Array | float) -> Array:
    """Draws U(-bound, bound), [n, width]; more rows change none of the first ones."""
    return jax.random.uniform(key, (n, width), minval=-1.0) * bound


# The server's networks: N - hidden - N each, shared by the views.


class Layer(NamedTuple):
    """`relu(x a + b) c + d`: a [N, h], b [h], c [h, N], d [N]."""

    a: Array
    b: Array
    c: Array
    d: Array


def init_layer(key: Array, n: int, n_real: Array, width: int, *, residual: bool) -> Layer:
    """Draws a layer, uniform up to 1 / sqrt(fan-in); the output of a residual one is zero."""
    keys = jax.random.split(key, 4)
    bound = 1 / jnp.sqrt(n_real)
    a = uniform_by_row(keys[0], n, width, bound)
    b = jax.random.uniform(keys[1], (width,), minval=-1.0) * bound
    if residual:
        return Layer(a, b, jnp.zeros((width, n)), jnp.zeros(n))
    out = 1 / width**0.5
    c = uniform_by_row(keys[2], n, width, out).T
    return Layer(a, b, c, uniform_by_row(keys[3], n, 1, out)[:, 0])
