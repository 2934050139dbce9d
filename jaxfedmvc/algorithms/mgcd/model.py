"""MGCD's settings, states and networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxfedmvc.algorithms.mgcd.graph import Graph
from jaxfedmvc.algorithms.mgcd.sparse_spectral import Neighbours
from jaxfedmvc.nn import apply_mlp, init_mlp

PyTree = Any

Mode = Literal["robust", "literal"]
Server = Literal["trained", "average"]
Encoder = Literal["linear", "deep"]
Affinity = Literal["auto", "each", "mean", "absolute"]
Contrast = Literal["printed", "infonce"]
LOSSES = ("r", "s", "cl", "dd")


@dataclasses.dataclass(frozen=True)
class MGCDConfig:
    """What changes shapes, loop lengths or the form of the method.

    Attributes:
      n_clusters: Clusters of the spectral clustering, 2 or more.
      mode: "literal" is the paper's method, trained by gradients as printed; "robust" solves the
        clients' two problems in closed form and lets the server's networks start at the average.
      server: "trained" minimises eq. (6); "average" adds the mean of the diversity graphs to the
        consistency graph, which is the minimum of the diversity loss.
      losses: Those of `LOSSES` that are on: reconstruction, self-representation, graph contrast,
        graph diversity.
      dual: Two encoders whose outputs add up, or one. A linear encoder is one map either way.
      distillation: Whether the server has f_pre.
      encoder: Of the robust mode: "linear" is the closed-form optimum of a linear autoencoder,
        "deep" is trained as in the paper and then left alone. The literal mode's is deep.
      latent_dim: d; a linear encoder of a view with fewer features has as many as these.
      hidden: Widths of the deep encoders' hidden layers; the decoder mirrors them.
      server_hidden: Width of the hidden layer of f_pre and f_post.
      pretrain_epochs: Of eq. (1), once.
      local_epochs: Of eq. (3), each round of the literal mode.
      server_epochs: Of eq. (6), each round.
      batch_size: Samples of a step, at clients and server.
      contrast: Eq. (4) as "printed", or with the positive in the denominator, "infonce".
      affinity: How spectral clustering reads the consistency graphs. "each": the k largest positive
        entries of every row of each view's graph, averaged; "mean": those of the views' mean graph;
        "auto": of the two the one that separates clusters better; "absolute": (|G| + |G^T|) / 2 of
        the mean graph, which needs N x N numbers.
      n_neighbours: k of the affinity.
      dense: Graphs as N x N arrays, or as factors.
      rank: Of the factored consistency graph; None for what loses nothing in the first rounds.
      n_init: Starts of k-means.
      memory_limit: Bytes that the server's graphs and networks may take; more is refused before it
        is tried.
    """

    n_clusters: int
    mode: Mode = "robust"
    server: Server = "average"
    losses: tuple[str, ...] = LOSSES
    dual: bool = True
    distillation: bool = True
    encoder: Encoder = "linear"
    latent_dim: int = 32
    hidden: Sequence[int] = (500, 500, 2000)
    server_hidden: int = 64
    pretrain_epochs: int = 20
    local_epochs: int = 5
    server_epochs: int = 5
    batch_size: int = 256
    contrast: Contrast = "printed"
    affinity: Affinity = "auto"
    n_neighbours: int = 10
    dense: bool = False
    rank: int | None = None
    n_init: int = 20
    memory_limit: float = 8e9

    def __post_init__(self) -> None:
        """Checks what does not depend on data.

        Raises:
          ValueError: Names the setting, its value and what is allowed.
        """
        choices = {
            "mode": Mode,
            "server": Server,
            "encoder": Encoder,
            "affinity": Affinity,
            "contrast": Contrast,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r}; allowed are"
                    f" {', '.join(get_args(allowed))}"
                )
        if self.n_clusters < 2:
            raise ValueError(f"n_clusters: got {self.n_clusters}; allowed is 2 or more")
        if not set(self.losses) <= set(LOSSES):
            raise ValueError(f"losses: got {self.losses}; allowed are any of {', '.join(LOSSES)}")
        at_least_one = (
            "latent_dim",
            "server_hidden",
            "batch_size",
            "n_neighbours",
            "n_init",
        )
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed is 1 or more")
        for name in ("pretrain_epochs", "local_epochs", "server_epochs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed is 0 or more")
        if any(width < 1 for width in self.hidden):
            raise ValueError(f"hidden: got {self.hidden}; allowed are widths of 1 or more")
        if not self.memory_limit > 0:
            raise ValueError(f"memory_limit: got {self.memory_limit}; allowed is above 0")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank: got {self.rank}; allowed is 1 or more, or None")

    @property
    def deep(self) -> bool:
        """Whether clients train networks."""
        return self.mode == "literal" or self.encoder == "deep"

    @property
    def server_trains(self) -> bool:
        """Whether the server has networks."""
        return self.server == "trained"


@struct.dataclass
class MGCDHyperparams:
    """What may be swept: scalars that are traced.

    Attributes:
      gamma: Weight of self-representation in eq. (3).
      lam: Weight of the diversity loss in eq. (6): of its sum over all rows in the literal mode, of
        its mean over rows in the robust one.
      tau: Temperature of the graph contrast.
      ridge: lambda_g of the closed-form self-representation, relative to the number of samples.
      pretrain_rate: Adam's step size for eq. (1).
      local_rate: For eq. (3).
      server_rate: For eq. (6).
    """

    gamma: Array | float = 100.0
    lam: Array | float = 1.0
    tau: Array | float = 0.5
    ridge: Array | float = 1.0
    pretrain_rate: Array | float = 1e-3
    local_rate: Array | float = 1e-4
    server_rate: Array | float = 1e-4


class ClientState(NamedTuple):
    """What a client holds.

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
    """What spectral clustering made of consistency graphs.

    Attributes:
      labels: int32 [N], -1 for padding.
      embedding: Leading eigenvectors of the normalised affinity, rows of unit length, [N, K].
      separation: (1 - e_{K+1}) / (1 - e_K) of its eigenvalues, 1 or more: how well K clusters are
        cut apart compared with K + 1. See `affinity.clusters`.
      of_each: Whether the affinity is the mean of the views' own.
      affinity: What was cut, at most V k edges a sample; of "absolute" the k heaviest of each.
    """

    labels: Array
    embedding: Array
    separation: Array
    of_each: Array
    affinity: Neighbours


class ServerState(NamedTuple):
    """What the server knows.

    Attributes:
      networks: Of f_pre and f_post, () where the server only averages.
      opt_state: Of their Adam.
      where: Real samples, bool [N].
      graph: The consistency graph G_c.
      clusters: Of the last round; of the best round so far in the robust mode.
      finished: Whether a round of the robust mode separated clusters no better than one before.
    """

    networks: PyTree
    opt_state: PyTree
    where: Array
    graph: Graph
    clusters: Clusters
    finished: Array


# The clients' networks.


def encoder_widths(config: MGCDConfig) -> tuple[int, ...]:
    """Of E_c and E_d, the output last."""
    return (*config.hidden, config.latent_dim)


def init_autoencoder(key: Array, config: MGCDConfig, n_features: int) -> PyTree:
    """Fresh parameters of E_c, E_d (with `dual`) and D."""
    c_key, d_key, o_key = jax.random.split(key, 3)
    params = {
        "consensus": init_mlp(c_key, n_features, encoder_widths(config)),
        "decoder": init_mlp(o_key, config.latent_dim, (*reversed(config.hidden), n_features)),
    }
    if config.dual:
        params["specific"] = init_mlp(d_key, n_features, encoder_widths(config))
    return params


def encode(params: PyTree, config: MGCDConfig, x: Array) -> tuple[Array, Array]:
    """Z = Z_c + Z_d and Z_d, both [n, d]; with one encoder both are its output."""
    z_c = apply_mlp(params["consensus"], encoder_widths(config), x)
    if not config.dual:
        return z_c, z_c
    z_d = apply_mlp(params["specific"], encoder_widths(config), x)
    return z_c + z_d, z_d


def decode(params: PyTree, config: MGCDConfig, z: Array, n_features: int) -> Array:
    """D(Z), [n, D_v]."""
    return apply_mlp(params["decoder"], (*reversed(config.hidden), n_features), z)


def uniform_by_row(key: Array, n: int, width: int, bound: Array | float) -> Array:
    """U(-bound, bound), [n, width], every row drawn with its number: more rows change none."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(n))
    return jax.vmap(lambda k: jax.random.uniform(k, (width,), minval=-1.0))(keys) * bound


# The server's networks: N - hidden - N each, shared by the views.


class Layer(NamedTuple):
    """`relu(x a + b) c + d`: a [N, h], b [h], c [h, N], d [N]."""

    a: Array
    b: Array
    c: Array
    d: Array


def init_layer(key: Array, n: int, n_real: Array, width: int, *, residual: bool) -> Layer:
    """Fresh parameters, uniform up to 1 / sqrt(fan-in); of a residual one the output is zero."""
    keys = jax.random.split(key, 4)
    bound = 1 / jnp.sqrt(n_real)
    a = uniform_by_row(keys[0], n, width, bound)
    b = jax.random.uniform(keys[1], (width,), minval=-1.0) * bound
    if residual:
        return Layer(a, b, jnp.zeros((width, n)), jnp.zeros(n))
    out = 1 / width**0.5
    c = uniform_by_row(keys[2], n, width, out).T
    return Layer(a, b, c, uniform_by_row(keys[3], n, 1, out)[:, 0])


def last(losses: Array) -> Array:
    """The last epoch's loss; 0 where there was no epoch."""
    return losses[-1] if losses.shape[0] else jnp.float32(0)


# Sizes.


def latent_dims(config: MGCDConfig, view_dims: Sequence[int]) -> list[int]:
    """Width of each client's latent space."""
    if config.deep:
        return [config.latent_dim] * len(view_dims)
    return [min(config.latent_dim, d) for d in view_dims]


def graph_rank(config: MGCDConfig, n: int, view_dims: Sequence[int]) -> int:
    """Rank in which a factored consistency graph is kept, at most N.

    Literal and trained it is that of f_post's output. Where graphs add up from round to round, it
    is that of the first round's sum, and of a trained server's additions of two rounds.
    """
    of_network = config.server_hidden + 1
    if config.rank is not None:
        rank = config.rank
    elif config.mode == "literal" and config.server_trains:
        rank = of_network
    else:
        rank = sum(latent_dims(config, view_dims)) + 4 * of_network * config.server_trains
    return min(rank, n)


def predicted_bytes(config: MGCDConfig, n: int, view_dims: Sequence[int]) -> float:
    """Bytes that the server's side of a round takes at its peak, about; float32.

    Counted: the graphs that are there at once, the server's networks with gradients and Adam's two
    moments, and the row blocks of a step.
    """
    views = len(view_dims)
    if config.dense:
        # Each upload and its guided form, the new graph, and two more of a trained server.
        graphs = n * n * (2.0 * (views + config.server_trains) + 1)
    else:
        rank = graph_rank(config, n, view_dims)
        widest = rank + sum(latent_dims(config, view_dims)) + 2 * (config.server_hidden + 1)
        graphs = 2.0 * n * (4 * widest + 2 * sum(latent_dims(config, view_dims)))
    if config.affinity == "absolute":
        graphs += 3.0 * n * n
    networks = 4 * 4.0 * n * config.server_hidden if config.server_trains else 0.0
    batch = min(config.batch_size, n)
    blocks = (8.0 * views + 2) * batch * n if config.server_trains else 4.0 * batch * n
    return 4.0 * (graphs + networks + blocks)
