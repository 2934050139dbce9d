"""FedDMVC and FCUIF: agents of a view each learn encodings, taught by clusters of all views.

    setup: every agent trains an autoencoder, and sends its encodings Z^v and soft clusters P^v; the
        server fills in what agents lack, and finds centres C and targets P by k-means
    round: the server sends C_v and P; agents train by P, and send Z^v and P^v; the server as before
    finish: the server sends the labels, the largest of each row's mean P^v

FedDMVC fills in a row that an agent lacks by its prototypes, the row's mean P^v times C_v. FCUIF
does it by a network of the prototypes, and decides after each round whether the rows that were
filled in teach the agents, or complete rows only, as after `setup`: with one round, the default,
this changes nothing yet. With `align` agents may have different samples in the same row; labels and
targets go back to the rows that they belong to.

What an agent sends are encodings of all of its rows, without any noise: no secret.

Sources: Chen et al., "Federated deep multi-view clustering with global self-supervision", ACM MM
2023; Ren et al., "A novel federated multi-view clustering method for unaligned and incomplete data
fusion", Information Fusion 2024; and the one repository of both, 5Martina5/FCUIF. Different here:

- FCUIF's code decides by the accuracy against true labels. Here it is the simplified silhouette of
  the two labelings, in which the values that were filled in do not count.
- It adds up the agents' P^v before their clusters have common numbers. Here they are matched first.
- It scales encodings on the server only; see `normalise`.
- After the first round it renumbers the clusters of P, but not of C, that k-means starts from.
- Its agents train in batches of the file's order, complete rows first, so that some batches have no
  target at all. Here rows are shuffled.
- Its alignment is trained with the first agent's rows shuffled too, which its true A leaves out.

The repository makes one round of 300 epochs; what FedDMVC itself was run with could not be
established, nor whether rows that it extends teach agents: they do, from the second round on; nor
FCUIF's batches of alignment: all aligned rows are one here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, by_agent, keep, send_nothing
from jaxfedmvc.algorithms.fcuif import client as client_lib
from jaxfedmvc.algorithms.fcuif.client import ClientState, Guidance, Upload
from jaxfedmvc.algorithms.fcuif.networks import (
    Aligner,
    Imputer,
    network_aligner,
    network_imputer,
)
from jaxfedmvc.algorithms.fcuif.server import Clusters, aggregate
from jaxfedmvc.algorithms.fcuif.settings import (
    FCUIFConfig,
    FCUIFHyperparams,
    FedDMVCConfig,
    FedDMVCHyperparams,
    check_hyperparams,
)
from jaxfedmvc.algorithms.shared.agents import features, keep_labels, kept_labels, n_features
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.losses import masked_mean
from jaxfedmvc.nn import last

Kind = tuple[int, ...]
# By the compiler's account alignment takes 17 to 21 bytes for each pair of rows and other agent.
_BYTES, _MOST_BYTES = 20, 10e9


class ServerState(NamedTuple):
    """What the server keeps.

    Attributes:
      held: Which rows each agent holds, bool [N], by the agent's views.
      clusters: Of the last exchange.
      same: Which rows are one sample at all agents, bool [N], for `align`; else None.
    """

    held: dict[Kind, Array]
    clusters: Clusters
    same: Array | None = None


def feddmvc(
    config: FedDMVCConfig, hyperparams: FedDMVCHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns FedDMVC for a vertical federation; agents may lack rows.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: as `Federation.check_vertical`, a
        single agent, or fewer samples than clusters at an agent or at all of them together.
    """
    hyper = checks.settings(config, FedDMVCConfig, hyperparams, FedDMVCHyperparams)
    return _federated("FedDMVC", config, hyper, None)


def fcuif(config: FCUIFConfig, hyperparams: FCUIFHyperparams | None = None) -> FederatedAlgorithm:
    """Returns FCUIF for a vertical federation; agents may lack rows, in the same order.

    With `config.align` a row may be another sample at each agent, by its `sample_ids`. That two ids
    are the same is all that the server knows of them. Real nodes refuse such data.

    Raises:
      ValueError: As `feddmvc`; with `align`, a row that is not one sample is not held by all, or
        there are more rows than matrices of all pairs of them fit into 10 GB.
    """
    hyper = checks.settings(config, FCUIFConfig, hyperparams, FCUIFHyperparams)
    aligner = network_aligner(config, hyper) if config.align else None
    return _federated("FCUIF", config, hyper, network_imputer(config, hyper), aligner)


def _federated(
    name: str,
    config: FedDMVCConfig,
    hyper: FedDMVCHyperparams,
    imputer: Imputer | None,
    aligner: Aligner | None = None,
) -> FederatedAlgorithm:
    check_hyperparams(hyper)
    return FederatedAlgorithm(
        init=_build_init(name, config, aligner is not None),
        setup=(
            Phase(
                send_nothing,
                _build_pretrain(config, hyper),
                _build_aggregate(config, imputer, aligner, first=True),
            ),
        ),
        round=(
            Phase(
                _send_guidance,
                _build_train(config, hyper),
                _build_aggregate(config, imputer, aligner, first=False),
            ),
        ),
        finish=(Phase(_send_labels, keep_labels, keep),),
        assign=kept_labels,
        embed=lambda server, state, client: _own_rows(
            server, client.view_ids, server.clusters.embedding
        ),
    )


def _build_init(name: str, config: FedDMVCConfig, align: bool) -> Callable[..., Any]:
    def init(key: Array, federation: Federation) -> tuple[ServerState, tuple[ClientState, ...]]:
        federation.check_vertical(complete=False, aligned=not align)
        if align:
            _check_size(name, federation)
        same = _same_samples(federation)
        _check(name, federation, same, config.n_clusters)
        cohorts, c, d = federation.cohorts, config.n_clusters, config.latent_dim
        n = cohorts[0].mask.shape[1]
        none = jnp.full(n, -1, jnp.int32)
        states = []
        for cohort in cohorts:
            state = ClientState(
                client_lib.init_autoencoder(
                    jax.random.fold_in(key, cohort.client_ids[0]),
                    config,
                    n_features(cohort),
                ),
                jnp.zeros((c, d)),
                jnp.bool_(False),
                none,
            )
            states.append(jax.tree.map(lambda x: x[None], state))
        clusters = Clusters(
            jnp.zeros((c, len(cohorts), d)),
            jnp.zeros((n, c)),
            jnp.zeros(n, bool),
            none,
            jnp.zeros((n, len(cohorts) * d)),
            jnp.bool_(False),
            jnp.tile(jnp.arange(n, dtype=jnp.int32)[:, None], len(cohorts)) if align else None,
        )
        held = {cohort.view_ids: cohort.mask[0] for cohort in cohorts}
        return ServerState(held, clusters, jnp.asarray(same) if align else None), tuple(states)

    return init


def _check_size(name: str, federation: Federation) -> None:
    n, others = federation.cohorts[0].mask.shape[1], max(len(federation.cohorts) - 1, 1)
    most = int((_MOST_BYTES / (_BYTES * others)) ** 0.5)
    if n > most:
        raise ValueError(
            f"{name}: got {n} rows, padding included; with align allowed is {most} or fewer with"
            f" {others + 1} agents (it holds several matrices of that size for each agent)"
        )


def _same_samples(federation: Federation) -> Array:
    """Tells which rows are one sample at all agents that hold them, bool [N]."""
    cohorts = federation.cohorts
    # Numbers are to stay numbers where only the key is traced.
    xp: Any = jnp if federation.is_traced else np
    masks = xp.stack([xp.asarray(cohort.mask)[0] for cohort in cohorts])
    ids = xp.stack([xp.asarray(cohort.sample_ids)[0] for cohort in cohorts])
    one = xp.max(xp.where(masks, ids, -1), axis=0)
    return xp.all(~masks | (ids == one[None]), axis=0)


def _check(name: str, federation: Federation, same: Array, n_clusters: int) -> None:
    if len(federation.cohorts) < 2:
        raise ValueError(f"federation: got one agent; {name} needs two or more, a view each")
    federation.check_rows(n_clusters, "as many as clusters, for k-means to start from")
    if federation.is_traced:
        return
    whole = np.logical_and.reduce([np.asarray(cohort.mask)[0] for cohort in federation.cohorts])
    lost = ~np.asarray(same) & ~whole
    if lost.any():
        raise ValueError(
            f"{name}: agents have different samples in row {np.argmax(lost)}, which one of them"
            " lacks; allowed are such rows where all agents hold one"
        )
    complete = int((whole & np.asarray(same)).sum())
    if complete < n_clusters:
        raise ValueError(
            f"{name}: {complete} samples are held by all agents; allowed is {n_clusters} or more,"
            " as many as clusters"
        )


def _answer(state: ClientState, losses: Array, x: Array, client: Cohort) -> Any:
    """Returns what a client function returns after training."""
    message = client_lib.upload(state, x, client.mask)
    return state, {client.view_ids: message}, {"loss": last(losses)}


def _build_pretrain(config: FedDMVCConfig, hyper: FedDMVCHyperparams) -> Callable[..., Any]:
    def pretrain(key: Array, sent: tuple[()], state: ClientState, client: Cohort) -> Any:
        x = features(client)
        state, losses = client_lib.pretrain(key, state, x, client.mask, config, hyper)
        return _answer(state, losses, x, client)

    return pretrain


def _send_guidance(state: ServerState, view_ids: Kind) -> Guidance:
    """Sends an agent its part of C, and of P the rows that it holds and is to follow."""
    place = sorted(state.held).index(view_ids)
    follows = state.held[view_ids] & _own_rows(state, view_ids, state.clusters.guides)
    targets = _own_rows(state, view_ids, state.clusters.targets)
    targets = jnp.where(follows[:, None], targets, 0.0)
    return Guidance(state.clusters.centroids[:, place], targets)


def _build_train(config: FedDMVCConfig, hyper: FedDMVCHyperparams) -> Callable[..., Any]:
    def train(key: Array, sent: Guidance, state: ClientState, client: Cohort) -> Any:
        x = features(client)
        state, losses = client_lib.train(key, state, sent, x, client.mask, config, hyper)
        return _answer(state, losses, x, client)

    return train


def _build_aggregate(
    config: FedDMVCConfig, imputer: Imputer | None, aligner: Aligner | None, *, first: bool
) -> Callable[..., Any]:
    def find(key: Array, state: ServerState, messages: Any, weights: Any) -> Any:
        agents = by_agent(messages)
        held = jnp.stack([state.held[view_ids] for view_ids in agents], axis=1)
        uploads = Upload(
            *(jnp.stack(parts, axis=1) for parts in zip(*agents.values(), strict=True))
        )
        before = None if first else state.clusters
        found = aggregate(key, uploads, held, before, config, imputer, aligner, state.same)
        guiding = masked_mean(found.guides.astype(jnp.float32), jnp.any(held, axis=1))
        return state._replace(clusters=found), {"guiding": guiding, "imputed": found.imputed}

    return find


def _send_labels(state: ServerState, view_ids: Kind) -> Array:
    return jnp.where(state.held[view_ids], _own_rows(state, view_ids, state.clusters.labels), -1)


def _own_rows(state: ServerState, view_ids: Kind, values: Array) -> Array:
    """Brings values of rows [N, ...] to an agent's own order, if that is another."""
    if state.clusters.places is None:
        return values
    return values[state.clusters.places[:, sorted(state.held).index(view_ids)]]
