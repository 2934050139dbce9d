"""VertCoHiRF: vertical clustering without a server, by consensus on labels and rankings.

Agents hold the same samples and each its own features. In every round (1) each agent clusters the
active samples on its own features and sends the labels; samples that all agents label alike form a
consensus cluster; (2) each agent ranks the members of every cluster by how central they are to it
and sends the ranking; the member of least rank sum becomes the cluster's medoid. The medoids are
the active samples of the next round, until nothing merges any more. Only integers travel: labels,
and identifiers (rows of the shared sample order) in an order.

Source: "VertCoHiRF: decentralized vertical clustering beyond k-means". Algorithm 1, sections 2.2
and 2.3; the local step is CoHiRF's (Meziani et al., 2025). Every array over samples keeps its
capacity c and says with `n_active` how much of it is in use, so that one program runs all rounds;
`compact` cuts the capacity on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.shared.cells import MOST_SUMMED, segment_sizes, strict_consensus
from jaxfedmvc.algorithms.vertcohirf.consensus import relaxed_consensus
from jaxfedmvc.algorithms.vertcohirf.hierarchy import NEVER, Hierarchy, labels_at
from jaxfedmvc.algorithms.vertcohirf.local_step import (
    LocalStep,
    check_step,
    local_codes,
    make_step,
)
from jaxfedmvc.algorithms.vertcohirf.rankings import (
    centrality,
    draw_candidates,
    least_rank_sum,
    rank_sum,
    ranked_ids,
)
from jaxfedmvc.algorithms.vertcohirf.refinement import (
    MOST_CLUSTERS,
    nearest_clusters,
    of_least_rank_sum,
)
from jaxfedmvc.algorithms.vertcohirf.settings import (
    Similarity,
    VertCoHiRFConfig,
    VertCoHiRFHyperparams,
    check_hyperparams,
)
from jaxfedmvc.checks import wrong
from jaxfedmvc.federation import Cohort, Federation

# Agent (its view id) -> how it clusters.
StepOf = Callable[[int], LocalStep]


class VertCoHiRFState(NamedTuple):
    """Holds what every agent knows, for a capacity of c active samples out of n.

    Attributes:
      active: int32 [c], rows of the active samples in the order of their clusters; -1 past the end.
      n_active: Number of active samples, int32.
      codes: int32 [c], consensus cluster of each active sample, after the first exchange.
      n_codes: Number of consensus clusters, int32.
      candidates: bool [c], the samples that are ranked: all, or N_s drawn for each cluster.
      parents: int32 [n], the medoid that absorbed each row, itself if none has; -1 for padding.
      absorbed_at: int32 [n], the round (from 0) in which that was; NEVER if none has.
      n_iter: Rounds made, int32.
      done: Whether the last round merged nothing.
      order: int32 [agents], places of the agents' messages in ascending order of client id.
      refined: int32 [n], refined cluster of each row; -1 for padding, and before refinement.
    """

    active: Array
    n_active: Array
    codes: Array
    n_codes: Array
    candidates: Array
    parents: Array
    absorbed_at: Array
    n_iter: Array
    done: Array
    order: Array
    refined: Array


def vertcohirf(
    config: VertCoHiRFConfig, hyperparams: VertCoHiRFHyperparams | None = None
) -> FederatedAlgorithm:
    """Makes the protocol from settings, with base clusterers by name.

    Args:
      config: Static settings.
      hyperparams: Traced settings; the defaults if None.

    Returns:
      The algorithm, see `vertcohirf_of_steps`. Its `init` raises ValueError also where
      `config.base` does not name one clusterer for each agent.

    Raises:
      ValueError: A setting is out of range, or a base clusterer needs a number of clusters and
        none is known.
    """
    hp = checks.settings(config, VertCoHiRFConfig, hyperparams, VertCoHiRFHyperparams)
    check_hyperparams(hp)
    bases = config.bases()
    steps = {name: make_step(name, config, hp) for name in bases.names()}

    def check(federation: Federation) -> None:
        config.check_agents(len(federation.cohorts))
        if bases.of_agent:
            _check_one_view_each("base", federation)

    return _protocol(lambda agent: steps[bases.of(agent)], check, config, hp)


def vertcohirf_of_steps(
    steps: LocalStep | Sequence[LocalStep],
    *,
    relaxed_agents: Array | float | None = None,
    n_candidates: Array | int | None = None,
    similarity: Similarity = "cosine",
) -> FederatedAlgorithm:
    """Makes the protocol from local steps, which may hold any clusterer.

    Run it for the most rounds that it may take. `engine.run` stops when a round merges nothing and
    keeps all arrays at full size: it jits and vmaps, for sweeps. `engine.run_compacting` shrinks
    them between rounds, for many samples.

    Args:
      steps: How an agent clusters: one for all, or one for each agent in the order of view ids.
      relaxed_agents: As in `VertCoHiRFHyperparams`.
      n_candidates: As in `VertCoHiRFHyperparams`.
      similarity: As in `VertCoHiRFConfig`.

    Returns:
      The algorithm: two exchanges among peers in each round. Its labels are positions among the
      final medoids, in the order of their clusters. Its `init` raises ValueError as
      `Federation.check_vertical` does, where the number of steps is not that of agents or one of
      these holds several views, and beyond 2^20 samples.

    Raises:
      ValueError: A setting is out of range.
    """
    hp = VertCoHiRFHyperparams(relaxed_agents=relaxed_agents, n_candidates=n_candidates)
    check_hyperparams(hp)
    for step in [steps] if isinstance(steps, LocalStep) else steps:
        check_step(step)

    def check(federation: Federation) -> None:
        if isinstance(steps, LocalStep):
            return
        n_agents = len(federation.cohorts)
        if len(steps) != n_agents:
            raise wrong("steps", len(steps), f"one, or one for each agent, {n_agents}")
        _check_one_view_each("steps", federation)

    def step_of(agent: int) -> LocalStep:
        return steps if isinstance(steps, LocalStep) else steps[agent]

    return _protocol(step_of, check, VertCoHiRFConfig(similarity=similarity), hp)


def _check_one_view_each(name: str, federation: Federation) -> None:
    """Raises ValueError where an agent, which its view names, holds several of them."""
    if any(len(cohort.view_ids) > 1 for cohort in federation.cohorts):
        raise ValueError(f"{name}: got one for each agent, which needs agents of one view each")


def _protocol(
    step_of: StepOf,
    check: Callable[[Federation], None],
    config: VertCoHiRFConfig,
    hp: VertCoHiRFHyperparams,
) -> FederatedAlgorithm:
    """Returns algorithm 1, given how each agent clusters and a check of the agents."""
    return FederatedAlgorithm(
        init=_build_init(check),
        setup=(),
        round=(
            Phase(_everything, _build_send_labels(step_of), _build_agree_on_clusters(hp)),
            Phase(_everything, _build_send_ranking(config), _choose_medoids),
        ),
        finish=(Phase(_everything, _send_nearest_clusters, _refine),) * config.refinements,
        assign=_assign,
        done=lambda state: state.done,
        compact=compact,
        peers=True,
    )


# The parts of the protocol, in the order in which they run.


def _build_init(check: Callable[[Federation], None]) -> Callable[..., Any]:
    def init(key: Array, federation: Federation) -> tuple[VertCoHiRFState, tuple[tuple, ...]]:
        federation.check_vertical()
        check(federation)
        mask = federation.cohorts[0].mask[0]
        n = len(mask)
        if n > MOST_SUMMED:
            raise wrong("federation", n, f"{MOST_SUMMED} samples or fewer")
        (active,) = jnp.nonzero(mask, size=n, fill_value=-1)
        ids = jnp.concatenate([cohort.client_ids for cohort in federation.cohorts])
        state = VertCoHiRFState(
            active=active.astype(jnp.int32),
            n_active=jnp.sum(mask, dtype=jnp.int32),
            codes=jnp.zeros(n, jnp.int32),
            n_codes=jnp.int32(0),
            candidates=jnp.zeros(n, bool),
            parents=jnp.where(mask, jnp.arange(n, dtype=jnp.int32), -1),
            absorbed_at=jnp.full(n, NEVER, jnp.int32),
            n_iter=jnp.int32(0),
            done=jnp.bool_(False),
            order=jnp.argsort(ids).astype(jnp.int32),
            refined=jnp.full(n, -1, jnp.int32),
        )
        return state, ((),) * len(federation.cohorts)

    return init


def _everything(state: VertCoHiRFState, view_ids: tuple[int, ...]) -> VertCoHiRFState:
    """Returns the state: every peer knows all of it."""
    return state


def _build_send_labels(step_of: StepOf) -> Callable[..., Any]:
    def send_labels(key: Array, state: VertCoHiRFState, _: tuple, client: Cohort) -> Any:
        x = _active_rows(client, state)
        labels = local_codes(key, x, _in_use(state), step_of(client.view_ids[0]))
        return (), {"labels": labels}, {}

    return send_labels


def _build_agree_on_clusters(hp: VertCoHiRFHyperparams) -> Callable[..., Any]:
    def agree_on_clusters(
        key: Array, state: VertCoHiRFState, messages: Any, weights: Any
    ) -> tuple[VertCoHiRFState, dict[str, Array]]:
        labels = jnp.concatenate([m["labels"] for m in messages])[state.order]
        codes, n_codes = _consensus(labels, _in_use(state), hp.relaxed_agents)
        candidates = draw_candidates(key, codes, state.active, hp.n_candidates)
        after = state._replace(codes=codes, n_codes=n_codes, candidates=candidates)
        info = {
            "n_labels": jnp.max(labels, axis=1) + 1,
            "n_active": state.n_active,
            "n_clusters": n_codes,
            "n_listed": jnp.sum(candidates, dtype=jnp.int32),
            "n_longest": jnp.max(segment_sizes(codes, candidates)),
        }
        return after, info

    return agree_on_clusters


def _consensus(labels: Array, where: Array, threshold: ArrayLike | None) -> tuple[Array, Array]:
    """Returns the clusters [c] that the agents' labels [agents, c] agree on, and their number."""
    if threshold is None:
        return strict_consensus(labels, where)
    codes = relaxed_consensus(labels, where, jnp.ones(len(labels), bool), threshold)
    return codes, jnp.max(codes) + 1


def _build_send_ranking(config: VertCoHiRFConfig) -> Callable[..., Any]:
    def send_ranking(key: Array, state: VertCoHiRFState, _: tuple, client: Cohort) -> Any:
        x = _active_rows(client, state)
        scores = centrality(x, state.codes, state.candidates, config.similarity)
        ranking = ranked_ids(scores, state.codes, state.candidates, state.active)
        return (), {"ranking": ranking}, {}

    return send_ranking


def _choose_medoids(
    key: Array, state: VertCoHiRFState, messages: Any, weights: Any
) -> tuple[VertCoHiRFState, dict[str, Array]]:
    rankings = jnp.concatenate([m["ranking"] for m in messages])
    total = rank_sum(rankings, state.codes, state.candidates, state.active)
    medoids = least_rank_sum(total, state.codes, state.candidates, state.active)
    after = merge(state, medoids)
    # A run that has ended stays as it is, however many rounds are asked for.
    return jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, after), {}


def _assign(state: VertCoHiRFState, _: tuple, client: Cohort) -> Array:
    return _clusters(state)


def _send_nearest_clusters(key: Array, state: VertCoHiRFState, _: tuple, client: Cohort) -> Any:
    x = jnp.concatenate(client.views, axis=-1)
    return (), {"nearest": nearest_clusters(x, _clusters(state))}, {}


def _refine(
    key: Array, state: VertCoHiRFState, messages: Any, weights: Any
) -> tuple[VertCoHiRFState, dict[str, Array]]:
    labels = _clusters(state)
    nearest = jnp.concatenate([message["nearest"] for message in messages])
    refined = of_least_rank_sum(nearest, labels)
    refined = jnp.where(state.n_active <= MOST_CLUSTERS, refined, -1)
    return state._replace(refined=refined), {}


def _clusters(state: VertCoHiRFState) -> Array:
    """Returns the clusters [n] of all rows, refined if they are; -1 for padding."""
    merged = labels_at(state.parents, state.absorbed_at, state.active)
    return jnp.where(state.refined >= 0, state.refined, merged)


def merge(state: VertCoHiRFState, medoids: Array) -> VertCoHiRFState:
    """Points merged samples to their medoids, the active samples of the next round (UpdateParents).

    Args:
      state: With the codes of this round.
      medoids: int32 [c] as `least_rank_sum` gives.
    """
    c, n = len(state.active), len(state.parents)
    where = _in_use(state)
    parent = medoids[state.codes]
    rows = jnp.where(where, state.active, n)
    absorbed = jnp.where(where & (parent != state.active), state.active, n)
    return state._replace(
        active=jnp.where(jnp.arange(c) < state.n_codes, medoids, -1),
        n_active=state.n_codes,
        parents=state.parents.at[rows].set(parent, mode="drop"),
        absorbed_at=state.absorbed_at.at[absorbed].set(state.n_iter, mode="drop"),
        n_iter=state.n_iter + 1,
        done=state.n_codes == state.n_active,
        refined=jnp.full_like(state.refined, -1),
    )


def hierarchy_of(state: VertCoHiRFState) -> Hierarchy:
    """Returns the cluster fusion hierarchy of a run that has ended; on the host.

    Args:
      state: The server's state after the last round, of capacity c for n samples, compacted or not.
    """
    return Hierarchy(
        np.asarray(state.parents),
        np.asarray(state.absorbed_at),
        np.asarray(state.active)[: int(state.n_active)],
    )


def compact(state: VertCoHiRFState, least: int = 16) -> VertCoHiRFState:
    """Returns the state with the capacity cut to 16, 64, 256, .. that holds the active samples.

    Few sizes, so that few programs are compiled. Runs on the host, as it reads `n_active`.

    Args:
      state: Of a run.
      least: Smallest size; each further one is four times as large.
    """
    capacity = least
    while capacity < int(state.n_active):
        capacity *= 4
    return state._replace(
        active=state.active[:capacity],
        codes=state.codes[:capacity],
        candidates=state.candidates[:capacity],
    )


def _active_rows(client: Cohort, state: VertCoHiRFState) -> Array:
    """Returns the agent's features [c, p] of the active samples; zeros past the end."""
    x = jnp.concatenate(client.views, axis=-1)
    return x.at[jnp.where(state.active >= 0, state.active, len(x))].get(mode="fill", fill_value=0.0)


def _in_use(state: VertCoHiRFState) -> Array:
    return jnp.arange(len(state.active)) < state.n_active
