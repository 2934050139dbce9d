"""Sizes of MGCD's graphs, and the memory that its server needs."""

from __future__ import annotations

from collections.abc import Sequence

from jaxfedmvc.algorithms.mgcd.settings import ResolvedConfig
from jaxfedmvc.algorithms.shared.agents import n_features
from jaxfedmvc.federation import Federation


def view_dims(federation: Federation) -> list[int]:
    """Returns the number of features of each client."""
    return [n_features(cohort) for cohort in federation.cohorts]


def latent_dims(config: ResolvedConfig, view_dims: Sequence[int]) -> list[int]:
    """Returns the width of each client's latent space."""
    if config.deep:
        return [config.latent_dim] * len(view_dims)
    return [min(config.latent_dim, d) for d in view_dims]


def graph_rank(config: ResolvedConfig, n: int, view_dims: Sequence[int]) -> int:
    """Returns the rank in which a factored consistency graph is kept, at most N.

    In the literal mode with a trained server it is that of f_post's output. Where graphs add up
    from round to round, it is that of the first round's sum, and of a trained server's additions
    of two rounds.
    """
    of_network = config.server_hidden + 1
    if config.rank is not None:
        rank = config.rank
    elif config.mode == "literal" and config.server_trains:
        rank = of_network
    else:
        rank = sum(latent_dims(config, view_dims)) + 4 * of_network * config.server_trains
    return min(rank, n)


def n_edges(config: ResolvedConfig, n_views: int, n: int) -> int:
    """Returns how many edges a sample of n may have in an affinity of so many views."""
    return (n_views + 1) * min(config.n_neighbours, n - 1)


def predicted_bytes(config: ResolvedConfig, n: int, view_dims: Sequence[int]) -> float:
    """Predicts the bytes that the server's side of a round takes at its peak, in float32.

    Counted are the graphs that exist at once, the edges of affinities, the server's networks with
    gradients and Adam's two moments, and the row blocks of a step.
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
    # Index and weight: each view's, the three that are tried, and the stack of these.
    edges = 12.0 * n * n_edges(config, views, n)
    networks = 4 * 4.0 * n * config.server_hidden if config.server_trains else 0.0
    batch = min(config.batch_size, n)
    blocks = (8.0 * views + 2) * batch * n if config.server_trains else 4.0 * batch * n
    return 4.0 * (graphs + edges + networks + blocks)


def check_federation(federation: Federation, config: ResolvedConfig) -> None:
    """Checks that MGCD can run on a federation.

    Raises:
      ValueError: As `Federation.check_vertical`, a single view, no more samples than clusters, or
        more memory on the server's side than the configuration allows.
    """
    federation.check_vertical()
    if len(federation.cohorts) < 2:
        raise ValueError("federation: got one view; MGCD needs two clients or more, a view each")
    federation.check_rows(config.n_clusters + 1, f"more than the {config.n_clusters} clusters")
    n = federation.cohorts[0].mask.shape[1]
    dims = view_dims(federation)
    needed = predicted_bytes(config, n, dims) / 1e9
    if needed > config.memory_limit:
        if config.dense:
            remedy = "dense=False, which keeps graphs as factors,"
        elif config.affinity == "absolute":
            remedy = "another affinity, which needs no N x N numbers,"
        else:
            remedy = "server='average', a smaller batch_size, latent_dim or server_hidden"
        raise ValueError(
            f"memory_limit: {n} samples in {len(dims)} views need about {needed:.3g} GB; allowed"
            f" is {config.memory_limit:.3g} GB: take {remedy} or a higher limit"
        )
