"""DPFMPS: vertical k-means under differential privacy, at a server that is not trusted.

Every agent sends k private centres of its own features and private sketches of who is near each
of them. Any combination of one local centre of each agent is a cell of a grid; the server
estimates how many persons are in each cell from the sketches alone, and runs k-means on the grid.
Each agent gets its own columns of the final centres and labels its rows by the nearest of them, so
that each has a partition of its own.

Exchanges: (1) one agent publishes the number of rows, noisy: all agents hold the same rows, and to
ask each of them would cost the budget several times. (2) All are sent that number and send centres
and sketches. (3) All are sent their columns. The sketches are private only to those who do not
know the hash functions: agents hold the key of these in common, the server never sees it.

What is protected, and against what neighbours: see `dpfmps.budget`. The delta that a run reports is
not the paper's sum over agents: these hash alike, and from three agents on their sketches tell far
more together. Three things are outside the guarantee. Each agent scales each of its features to
[-1, 1] by least and greatest value; these ranges are taken to be public or fixed beforehand, for a
range that follows the data moves with one row. Shapes are public, hence the number of rows to ten
where the number of sketches derives from it: set `n_sketches` where it is not. Labels and the
centres in an agent's own units stay with it.

The number of cells is k^A: the method does not scale to many agents, and more than MAX_CELLS cells
are refused.

Departure from the published implementation: for most splits of the features it hands an agent
columns of the final centres that are another agent's. Here they are kept by agent.

Source: Li, Wang and Li, "Differentially private vertical federated clustering", 2023.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, keep, send_nothing
from jaxfedmvc.algorithms.dpfmps import agent, server
from jaxfedmvc.algorithms.dpfmps.budget import split
from jaxfedmvc.algorithms.dpfmps.lsh_tree import tree_noise
from jaxfedmvc.algorithms.dpfmps.settings import (
    MAX_CELLS,
    SIZE_SHARE,
    DPFMPSConfig,
    DPFMPSP2EstConfig,
)
from jaxfedmvc.algorithms.registry import NoHyperparams
from jaxfedmvc.algorithms.shared.agents import n_features
from jaxfedmvc.algorithms.shared.cells import MOST_SUMMED
from jaxfedmvc.federation import Federation


def dpfmps(config: DPFMPSConfig, hyperparams: NoHyperparams | None = None) -> FederatedAlgorithm:
    """Returns differentially private vertical k-means; run it for 0 rounds.

    What a run spends is `budget.spent(budget, size, n_sketches)`, which the server's state and its
    info of the second exchange report. `dp_epsilon` is kept at the delta that they say.

    Raises:
      ValueError: From `init`: as `Federation.check_vertical`, less than two agents, fewer samples
        than clusters, or more than MAX_CELLS cells.
      ImportError: From `init`: epsilon is finite and dp-accounting is not installed.
    """
    checks.settings(config, DPFMPSConfig, hyperparams, NoHyperparams)
    return FederatedAlgorithm(
        init=partial(_init, config),
        setup=(
            Phase(send_nothing, agent.send_size, server.keep_size, who="leader"),
            Phase(
                _send_size_back,
                partial(agent.send_synopsis, config),
                partial(server.cluster_grid, config),
            ),
        ),
        round=(),
        finish=(Phase(_send_columns, agent.keep_columns, keep),),
        assign=agent.assign,
    )


def dpfmps_p2est(
    config: DPFMPSP2EstConfig, hyperparams: NoHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns DPFMPS-P2Est: `dpfmps` with the grid fitted to the marginals of pairs of agents."""
    checks.settings(config, DPFMPSP2EstConfig, hyperparams, NoHyperparams)
    return dpfmps(config, hyperparams)


def _init(
    config: DPFMPSConfig, key: Array, federation: Federation
) -> tuple[server.ServerState, tuple[agent.AgentState, ...]]:
    """Returns the states before anything was sent; shares the budget out."""
    k, n_agents = config.n_clusters, len(federation.cohorts)
    federation.check_vertical()
    federation.check_rows(k, "as many as clusters, for k-means to start from")
    n = federation.cohorts[0].mask.shape[-1]
    if n > MOST_SUMMED:
        raise checks.wrong("federation", n, f"{MOST_SUMMED} samples or fewer")
    if n_agents < 2:
        raise checks.wrong("federation", n_agents, "2 agents or more")
    if k**n_agents > MAX_CELLS:
        raise ValueError(
            f"n_clusters: {k} clusters of {n_agents} agents make {k**n_agents} cells; allowed is"
            f" {MAX_CELLS} or less (take fewer clusters or fewer agents)"
        )
    budget = split(config.dp_epsilon, n_agents, SIZE_SHARE[config.estimator])
    centres, agents = {}, []
    for cohort in federation.cohorts:
        d = n_features(cohort)
        own = jnp.zeros((k, d))
        centres[cohort.view_ids[0]] = own
        state = agent.AgentState(key, budget, tree_noise(budget, d), own)
        agents.append(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state))
    public = jax.tree.map(jnp.asarray, budget)
    nothing = jnp.float32(0), jnp.float32(0)
    return server.ServerState(public, jnp.int32(0), centres, nothing), tuple(agents)


def _send_size_back(state: server.ServerState, view_ids: tuple[int, ...]) -> Array:
    return state.size


def _send_columns(state: server.ServerState, view_ids: tuple[int, ...]) -> Array:
    return state.centres[view_ids[0]]
