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

What is protected, and against what neighbours: see `jaxfedmvc.privacy`. Three things are outside
the guarantee. Each agent scales each of its features to [-1, 1] by least and greatest value; these
ranges are taken to be public or fixed beforehand, for a range that follows the data moves with one
row. Shapes are public, hence the number of rows to ten where the number of sketches derives from
it: give `n_sketches` where it is not. Labels and the centres in an agent's own units stay with it.

The number of cells is k^A: the method does not scale to many agents, and more than MAX_CELLS cells
are refused.

Departure from the published implementation: for most splits of the features it hands an agent
columns of the final centres that are another agent's. Here they are kept by agent.

Source: Li, Wang and Li, "Differentially private vertical federated clustering", 2023.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxfedmvc import privacy
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.dpfmps.fm_sketch import (
    add_noise,
    complement_counts,
    fit_grid,
    marginals,
    sketch_clusters,
)
from jaxfedmvc.algorithms.dpfmps.lsh_tree import (
    TreeNoise,
    best_centroids,
    private_centres,
    tree_noise,
)
from jaxfedmvc.clustering import predict
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.privacy import Budget

Estimator = Literal["complement", "p2est"]

# Most cells of a grid, for which the server holds some numbers for each cluster.
MAX_CELLS = 2**22
# Part of the budget that the number of rows gets.
_SIZE_SHARE = {"complement": 0.05, "p2est": 0.02}
# Added to the count of every cell before k-means.
_LEAST_WEIGHT = 1e-5


class ServerState(NamedTuple):
    """What the server knows.

    Attributes:
      budget: Every mechanism's epsilon; public.
      size: The noisy number of rows, int32, at least 1; 0 before it is published.
      centres: For each agent, by its number, its columns [k, p_a] of the final centres, in the
        agent's scaled units.
    """

    budget: Budget
    size: Array
    centres: dict[int, Array]


class AgentState(NamedTuple):
    """What an agent holds.

    Attributes:
      hash_key: Key of the hash functions, the same for all agents.
      budget: Every mechanism's epsilon.
      tree: Noise of the tree that its centres come from.
      centres: Its columns [k, p_a] of the final centres, scaled; zeros before `finish`.
    """

    hash_key: Array
    budget: Budget
    tree: TreeNoise
    centres: Array


def dpfmps(
    n_clusters: int,
    *,
    epsilon: float = 1.0,
    n_sketches: int | None = None,
    estimator: Estimator = "complement",
    n_init: int = 10,
) -> FederatedAlgorithm:
    """Differentially private vertical k-means; run it for 0 rounds.

    Args:
      n_clusters: k >= 2, static; of the local clusterings and of the final one.
      epsilon: The whole run's; infinite for no noise. What a run spends is
        `privacy.spent(budget, size)`, which the server's info of the second exchange reports.
      n_sketches: m, the hash functions of each sketch; None for a tenth of the rows, padding
        included. The authors' own example takes 4096.
      estimator: How the cells are counted: "complement" from one union for each cell, "p2est" from
        the marginals of pairs of agents, meant for three agents and more.
      n_init: Starts of each k-means.

    Returns:
      The algorithm. Its `init` raises ValueError as `Federation.check_vertical` does, for less
      than two agents, fewer samples than clusters or more than MAX_CELLS cells, and ImportError
      where epsilon is finite and dp-accounting is not installed.

    Raises:
      ValueError: A setting is out of range.
    """
    if n_clusters < 2:
        raise ValueError(f"n_clusters: got {n_clusters}; allowed is 2 or more")
    if not epsilon > 0:
        raise ValueError(
            f"epsilon: got {epsilon}; allowed is more than 0, or infinity for no noise"
        )
    if n_sketches is not None and n_sketches < 1:
        raise ValueError(f"n_sketches: got {n_sketches}; allowed is 1 or more, or None")
    if estimator not in get_args(Estimator):
        raise ValueError(f"estimator: got {estimator!r}; allowed are complement, p2est")
    if n_init < 1:
        raise ValueError(f"n_init: got {n_init}; allowed is 1 or more")

    def sketches_for(n_rows: int) -> int:
        return max(1, n_rows // 10) if n_sketches is None else n_sketches

    def init(key: Array, federation: Federation) -> tuple[ServerState, tuple[AgentState, ...]]:
        federation.check_vertical()
        federation.check_rows(n_clusters, "as many as clusters, for k-means to start from")
        n_agents = len(federation.cohorts)
        if n_agents < 2:
            raise ValueError(f"federation: got {n_agents} agent; allowed is 2 or more")
        if n_clusters**n_agents > MAX_CELLS:
            raise ValueError(
                f"n_clusters: {n_clusters} clusters of {n_agents} agents make"
                f" {n_clusters**n_agents} cells; allowed is {MAX_CELLS} or less (take fewer"
                " clusters or fewer agents)"
            )
        budget = privacy.split(epsilon, n_agents, _SIZE_SHARE[estimator])
        centres, agents = {}, []
        for cohort in federation.cohorts:
            d = sum(view.shape[-1] for view in cohort.views)
            own = jnp.zeros((n_clusters, d))
            centres[cohort.view_ids[0]] = own
            state = AgentState(key, budget, tree_noise(budget, d), own)
            agents.append(jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state))
        public = jax.tree.map(jnp.asarray, budget)
        return ServerState(public, jnp.int32(0), centres), tuple(agents)

    def ask(state: ServerState, view_ids: tuple[int, ...]) -> tuple[()]:
        return ()

    def send_size(key: Array, _: tuple, state: AgentState, client: Cohort) -> Any:
        size = jnp.sum(client.mask) + jax.random.laplace(key) / state.budget.size
        return state, {"size": size.astype(jnp.int32)}, {}

    def keep_size(key: Array, state: ServerState, messages: Any, weights: Any) -> Any:
        (message,) = messages
        return state._replace(size=jnp.maximum(message["size"][0], 1)), {}

    def send_size_back(state: ServerState, view_ids: tuple[int, ...]) -> Array:
        return state.size

    def send_synopsis(key: Array, size: Array, state: AgentState, client: Cohort) -> Any:
        tree_key, phantom_key = jax.random.split(key)
        x = scaled(client)
        m = sketches_for(len(x))
        centres = private_centres(tree_key, x, n_clusters, client.mask, state.tree, n_init=n_init)
        labels = jnp.where(client.mask, predict(x, centres), -1)
        sketches = sketch_clusters(state.hash_key, client.sample_ids, labels, n_clusters, m)
        noise = privacy.sketch_noise(state.budget.memberships, m, privacy.sketch_delta(size))
        sketches = add_noise(phantom_key, sketches, noise)
        # The agent's number is part of the message's structure: it orders the axes of the grid.
        return state, {client.view_ids[0]: {"centres": centres, "sketches": sketches}}, {}

    def cluster_grid(key: Array, state: ServerState, messages: Any, weights: Any) -> Any:
        by_agent = {agent: sent for message in messages for agent, sent in message.items()}
        agents = sorted(by_agent)
        sketches = jnp.concatenate([by_agent[agent]["sketches"] for agent in agents])
        local = [by_agent[agent]["centres"][0] for agent in agents]
        noise = privacy.sketch_noise(
            state.budget.memberships, sketches.shape[-1], privacy.sketch_delta(state.size)
        )
        fit_key, kmeans_key = jax.random.split(key)
        total = state.size.astype(jnp.float32)
        if estimator == "complement":
            counts = complement_counts(sketches, total, noise.n_phantoms)
        else:
            one_way, two_way = marginals(sketches, total, noise.n_phantoms)
            counts = fit_grid(fit_key, one_way, two_way, total)
        final = grid_centres(kmeans_key, local, counts, n_clusters, n_init)
        spent, delta = privacy.spent(state.budget, state.size)
        info = {"epsilon": spent, "delta": delta, "mass": jnp.sum(counts)}
        return state._replace(centres=dict(zip(agents, final, strict=True))), info

    def send_columns(state: ServerState, view_ids: tuple[int, ...]) -> Array:
        return state.centres[view_ids[0]]

    def receive(key: Array, centres: Array, state: AgentState, client: Cohort) -> Any:
        return state._replace(centres=centres), (), {}

    def keep(key: Array, state: ServerState, messages: Any, weights: Any) -> Any:
        return state, {}

    def assign(server: ServerState, state: AgentState, client: Cohort) -> Array:
        return jnp.where(client.mask, predict(scaled(client), state.centres), -1)

    return FederatedAlgorithm(
        init=init,
        setup=(
            Phase(ask, send_size, keep_size, who="leader"),
            Phase(send_size_back, send_synopsis, cluster_grid),
        ),
        round=(),
        finish=(Phase(send_columns, receive, keep),),
        assign=assign,
    )


def dpfmps_p2est(
    n_clusters: int, *, epsilon: float = 1.0, n_sketches: int | None = None, n_init: int = 10
) -> FederatedAlgorithm:
    """DPFMPS-P2Est: `dpfmps` with the grid fitted to the marginals of pairs of agents."""
    return dpfmps(
        n_clusters, epsilon=epsilon, n_sketches=n_sketches, estimator="p2est", n_init=n_init
    )


def scaled(client: Cohort) -> Array:
    """An agent's features [n, p_a], each scaled to [-1, 1] by its range over the agent's rows.

    A constant feature is 0, and so are rows of padding.
    """
    x = jnp.concatenate(client.views, axis=-1)
    where = client.mask[:, None]
    low = jnp.min(jnp.where(where, x, jnp.inf), axis=0, keepdims=True)
    high = jnp.max(jnp.where(where, x, -jnp.inf), axis=0, keepdims=True)
    width = high - low
    unit = (x - low) / jnp.where(width > 0, width, 1.0)
    return jnp.where(where & (width > 0), jnp.clip(2 * unit - 1, -1.0, 1.0), 0.0)


def grid_centres(
    key: Array, local: list[Array], counts: Array, n_clusters: int, n_init: int
) -> list[Array]:
    """Weighted k-means of the cells of a grid.

    Args:
      key: PRNG key.
      local: The local centres [k, p_a] of each agent.
      counts: float32 [k, ..., k], persons in each cell.
      n_clusters: Static.
      n_init: Starts, static.

    Returns:
      The columns [n_clusters, p_a] of the final centres for each agent.
    """
    # A rotation into the span of the local centres, at most k dimensions for an agent, changes no
    # distance and makes wide data cheap.
    bases, coordinates = zip(*(jnp.linalg.qr(centres.T) for centres in local), strict=True)
    cells = jnp.unravel_index(jnp.arange(counts.size), counts.shape)
    points = jnp.concatenate(
        [r.T[place] for r, place in zip(coordinates, cells, strict=True)], axis=1
    )
    weights = counts.reshape(-1) + _LEAST_WEIGHT

    best = best_centroids(key, points, n_clusters, weights, n_clusters, n_init)
    widths = [r.shape[0] for r in coordinates]
    ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
    return [
        jnp.matmul(columns, q.T, precision=lax.Precision.HIGHEST)
        for columns, q in zip(jnp.split(best, ends, axis=1), bases, strict=True)
    ]
