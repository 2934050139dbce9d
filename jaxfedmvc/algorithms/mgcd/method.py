"""MGCD: vertical clustering by graphs: clients send diversity graphs, the server keeps what agrees.

    setup: every client trains its autoencoder, eq. (1)
    round: the server sends the consistency graph G_c; every client finds the diversity graph G_d
        that explains what G_c does not, eq. (2) and (3), and sends it; the server refines G_c,
        eq. (4) to (6), and clusters it
    finish: the server sends the clusters

What leaves a client is a graph over the samples. It keeps no secrets: the graph of a linear layer
spans the latent space that it is made of, and its factors are that space.

Source: Sun et al., "Graph consistency and diversity measurement for federated multi-view
clustering", AAAI 2025. What its text leaves open or misprints is named where it is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxfedmvc import checks, keys
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, keep, send_nothing
from jaxfedmvc.algorithms.mgcd import client as client_lib
from jaxfedmvc.algorithms.mgcd import graph as graphs_lib
from jaxfedmvc.algorithms.mgcd import server as server_lib
from jaxfedmvc.algorithms.mgcd.affinity import better, clusters, views_that_agree
from jaxfedmvc.algorithms.mgcd.graph import Factored, Graph
from jaxfedmvc.algorithms.mgcd.model import (
    ClientState,
    Clusters,
    ServerState,
    init_autoencoder,
    uniform_by_row,
)
from jaxfedmvc.algorithms.mgcd.settings import (
    MGCDConfig,
    MGCDHyperparams,
    ResolvedConfig,
    check_hyperparams,
)
from jaxfedmvc.algorithms.mgcd.sizes import (
    check_federation,
    graph_rank,
    latent_dims,
    n_edges,
    view_dims,
)
from jaxfedmvc.algorithms.mgcd.sparse_spectral import Neighbours
from jaxfedmvc.algorithms.shared.agents import features, keep_labels, kept_labels
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.losses import masked_mean
from jaxfedmvc.metrics.views import LEAST_VIEWS
from jaxfedmvc.nn import last

# How many times the best separation so far a later round must reach. Smaller gains tell nothing:
# where no affinity separates well, all are near 1.
_IMPROVES = 1.05
# Names of the graphs that `report_graphs` reports.
REPORTED = ("consistency", "diversity", "average")


def mgcd(config: MGCDConfig, hyperparams: MGCDHyperparams | None = None) -> FederatedAlgorithm:
    """Makes the method for a vertical federation, one client for each view.

    The robust mode keeps the clusters of the last round whose affinity separates them better than
    those before, by a twentieth, and is `done` after the first that does not; a trained server
    falls back on the average of a round wherever that separates better. The literal mode runs all
    rounds and takes the last.

    Args:
      config: Static settings.
      hyperparams: Traced settings; the defaults if None.

    Returns:
      The algorithm. Its `init` raises ValueError as `sizes.check_federation` does.

    Raises:
      ValueError: A hyper-parameter is out of range.
    """
    hp = checks.settings(config, MGCDConfig, hyperparams, MGCDHyperparams)
    check_hyperparams(hp)
    settings = config.resolved()
    return FederatedAlgorithm(
        init=_build_init(settings, hp),
        setup=(Phase(send_nothing, _build_prepare(settings, hp), keep),),
        round=(
            Phase(_send_graph, _build_find_diversity(settings, hp), _build_refine(settings, hp)),
        ),
        finish=(Phase(_send_labels, keep_labels, keep),),
        assign=kept_labels,
        embed=_embed,
        done=(lambda state: state.finished) if settings.mode == "robust" else None,
    )


def _build_init(config: ResolvedConfig, hp: MGCDHyperparams) -> Callable[..., Any]:
    def init(key: Array, federation: Federation) -> tuple[ServerState, tuple[ClientState, ...]]:
        check_federation(federation, config)
        where, dims = federation.cohorts[0].mask[0], view_dims(federation)
        states = []
        for cohort, dim, d in zip(federation.cohorts, dims, latent_dims(config, dims), strict=True):
            of_client = jax.random.fold_in(key, cohort.client_ids[0])
            state = _init_client(of_client, config, hp, len(where), dim, d)
            states.append(jax.tree.map(lambda x: jnp.asarray(x)[None], state))
        of_server = jax.random.fold_in(key, keys.SERVER)
        return _init_server(of_server, config, hp, where, dims), tuple(states)

    return init


def _init_server(
    key: Array,
    config: ResolvedConfig,
    hp: MGCDHyperparams,
    where: Array,
    dims: Sequence[int],
) -> ServerState:
    n = where.shape[0]
    networks: Any = ()
    if config.server_trains:
        networks = server_lib.init_networks(key, config, n, jnp.maximum(jnp.sum(where), 1))
    rank = None if config.dense else graph_rank(config, n, dims)
    width = n_edges(config, len(dims), n)
    none_yet = Clusters(
        jnp.full(n, -1, jnp.int32),
        jnp.zeros((n, config.n_clusters)),
        jnp.float32(0),
        jnp.float32(0),
        Neighbours(jnp.zeros((n, width), jnp.int32), jnp.zeros((n, width))),
    )
    return ServerState(
        networks,
        optax.adam(hp.server_rate).init(networks),
        where,
        graphs_lib.zeros(n, rank),
        none_yet,
        jnp.bool_(False),
        jnp.ones(len(dims), bool),
    )


def _init_client(
    key: Array, config: ResolvedConfig, hp: MGCDHyperparams, n: int, n_features: int, d: int
) -> ClientState:
    labels = jnp.full(n, -1, jnp.int32)
    if config.mode == "robust":
        return ClientState((), (), jnp.zeros((n, d)), labels)
    network_key, graph_key = jax.random.split(key)
    params = init_autoencoder(network_key, config, n_features)
    # f_d has no bias: it would add one and the same row to every sample's.
    params["graph"] = uniform_by_row(graph_key, n, d, d**-0.5).T
    return ClientState(params, optax.adam(hp.local_rate).init(params), (), labels)


# Setup: pre-training.


def _build_prepare(config: ResolvedConfig, hp: MGCDHyperparams) -> Callable[..., Any]:
    def prepare(key: Array, _: tuple[()], state: ClientState, client: Cohort) -> Any:
        x, mask = features(client), client.mask
        if config.mode == "robust":
            latent, loss = client_lib.latent(key, x, mask, state.latent.shape[1], config, hp)
            return state._replace(latent=latent), (), {"loss": loss}
        networks = {name: p for name, p in state.params.items() if name != "graph"}
        networks, loss = client_lib.pretrain(key, networks, x, mask, config, hp)
        return state._replace(params=state.params | networks), (), {"loss": loss}

    return prepare


# Round: eq. (2) and (3) at the clients, eq. (4) to (6) at the server.


def _send_graph(state: ServerState, view_ids: tuple[int, ...]) -> Graph:
    return state.graph


def _build_find_diversity(config: ResolvedConfig, hp: MGCDHyperparams) -> Callable[..., Any]:
    def find_diversity(key: Array, graph: Graph, state: ClientState, client: Cohort) -> Any:
        mask, n_real = client.mask, jnp.maximum(jnp.sum(client.mask), 1)
        if config.mode == "robust":
            found = client_lib.ridge_graph(
                state.latent, graph, n_real, hp.ridge, solve="s" in config.losses
            )
            left_over = state.latent - graphs_lib.times(
                graphs_lib.total([graph, found]), state.latent
            )
            loss = masked_mean(jnp.sum(left_over**2, axis=1), mask)
        else:
            x = features(client)
            state, losses = client_lib.local_training(key, state, graph, x, mask, config, hp)
            found = client_lib.diversity_graph(state.params, x, mask, config)
            loss = last(losses)
        message = graphs_lib.dense(found) if config.dense else found
        return state, message, {"loss": loss}

    return find_diversity


def _build_refine(config: ResolvedConfig, hp: MGCDHyperparams) -> Callable[..., Any]:
    robust = config.mode == "robust"

    def refine(key: Array, state: ServerState, messages: Any, weights: Any) -> Any:
        where, old = state.where, state.graph
        uploads = [_cleaned(jax.tree.map(lambda x: x[0], m), where) for m in messages]
        train_key, cut_key = jax.random.split(key)
        views = None
        if config.chooses_views and len(uploads) >= LEAST_VIEWS:
            views = jax.lax.cond(
                state.clusters.separation > 0,  # of a round before
                lambda: state.kept,
                lambda: views_that_agree(cut_key, uploads, where, config, hp.least_agreement),
            )

        def cut(refined: list[Graph], mean: Graph) -> Clusters:
            return clusters(cut_key, refined, mean, where, config, views)

        diversity = _mean(uploads, views)
        average = graphs_lib.total([old, diversity])
        of_average = cut([graphs_lib.total([old, upload]) for upload in uploads], average)
        networks, opt_state, new, found = state.networks, state.opt_state, average, of_average
        info: dict[str, Any] = {"average_separation": of_average.separation}
        if config.server_trains:
            networks, opt_state, losses = server_lib.server_training(
                train_key, networks, opt_state, uploads, old, where, config, hp
            )
            refined, new = server_lib.refined_graphs(networks, config, uploads, old, average, where)
            found = cut(refined, new)
            info |= {"server_loss": last(losses), "server_separation": found.separation}
        if config.server_trains and robust:
            # Without labels the spectrum must tell whether training helped.
            kept = found.separation > of_average.separation
            new, found = graphs_lib.choose(kept, new, average), better(of_average, found)
            info["server_kept"] = kept
        info |= {
            "separation": found.separation,
            "of_each": found.of_each,
            "norm": jnp.sqrt(graphs_lib.squared_norm(new)),
        }
        if config.report_graphs:
            reported = (found, cut(uploads, diversity), of_average)
            info["labels"] = {name: c.labels for name, c in zip(REPORTED, reported, strict=True)}
        if isinstance(old, Factored):
            new = graphs_lib.of_rank(new, old.left.shape[1])
        best = better(state.clusters, found, _IMPROVES) if robust else found
        finished = jnp.bool_(robust) & (best.separation <= state.clusters.separation)
        after = ServerState(
            networks, opt_state, where, new, best, finished, state.kept if views is None else views
        )
        return after, info

    return refine


def _mean(graphs: list[Graph], kept: Array | None) -> Graph:
    """Returns the mean of the graphs that count; of all if None."""
    if kept is None:
        return graphs_lib.scaled(graphs_lib.total(graphs), 1 / len(graphs))
    counted = [graphs_lib.scaled(graph, kept[v]) for v, graph in enumerate(graphs)]
    return graphs_lib.scaled(graphs_lib.total(counted), 1 / jnp.sum(kept))


# Finish: the clusters go to the clients.


def _send_labels(state: ServerState, view_ids: tuple[int, ...]) -> Array:
    return state.clusters.labels


def _embed(server: ServerState, state: ClientState, client: Cohort) -> Array:
    return server.clusters.embedding


def _cleaned(graph: Graph, where: Array) -> Graph:
    """Clears an upload, whatever happened to it on the way, of its diagonal and of padding."""
    if isinstance(graph, Factored):
        return Factored(
            jnp.where(where[:, None], graph.left, 0.0), jnp.where(where[None], graph.right, 0.0)
        )
    return graphs_lib.without_diagonal(jnp.where(where[:, None] & where[None], graph, 0.0))
