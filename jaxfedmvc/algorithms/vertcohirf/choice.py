"""Chooses VertCoHiRF's local number of clusters, and how agents agree, without labels.

    tried = list(trials(config, hyperparams, federation, key, rounds=100))
    best = tried[best_of(tried)]    # .local_clusters, .relaxed_agents, .labels

The method is run with several settings, and the run is kept whose shared clusters agree best with
the consensus (`jaxfedmvc.algorithms.label_consensus`) of all labels that agents sent in the first
rounds of these runs. Clusters that shatter agree with nothing. All of these lists are messages of
the runs that every peer has received, so each peer computes the same numbers, and nothing else
travels.

The consensus, and which settings are tried, were developed on generated data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.label_consensus import (
    LEAST_SAMPLES,
    MOST_CLUSTERS,
    Consensus,
    LabelConsensusConfig,
    consensus,
    lists_in_order,
)
from jaxfedmvc.algorithms.vertcohirf.method import compact, vertcohirf
from jaxfedmvc.algorithms.vertcohirf.settings import VertCoHiRFConfig, VertCoHiRFHyperparams
from jaxfedmvc.engine import Traffic
from jaxfedmvc.engine.steps import Steps
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.metrics.choice import stability

LOCAL_CLUSTERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
# Thresholds of the agents' consensus; the second is the one that the paper has within an agent.
RELAXED_AGENTS = (None, 0.8)
# How often the clusters of a trial should be refined.
REFINEMENTS = 3
# No consensus is below it, so that none is dropped: the strict consensus by the relaxed program.
_STRICT = -1.0
_CONSENSUS = jax.jit(consensus, static_argnums=(2, 3))
# Of a trial's arrays: smaller ones save less time than their programs take to compile.
_LEAST_CAPACITY = 256


class Trial(NamedTuple):
    """What a run with some settings ended with.

    Attributes:
      local_clusters: C.
      relaxed_agents: As in `VertCoHiRFHyperparams`.
      labels: The shared clusters, int32 [samples].
      sent: What each agent sent in the first round, int32 [agents, samples].
      traffic: Bytes of all messages of the run, of all agents.
      whole: Whether the clusters are as they should be in the end: refined, if they are to be.
    """

    local_clusters: int
    relaxed_agents: float | None
    labels: np.ndarray
    sent: np.ndarray
    traffic: Traffic
    whole: bool = True


def agreements(tried: Sequence[Trial], shared_clusters: int | None = None) -> np.ndarray:
    """Computes for each trial the ARI of its clusters with the consensus of what agents sent.

    Args:
      tried: Of the same samples and agents.
      shared_clusters: As in `common`.

    Returns:
      float [trials], at most 1; about 0 where clusters have no more in common than chance gives.

    Raises:
      ValueError: There is no trial.
    """
    labels = np.asarray(common(tried, shared_clusters).labels)
    return np.array([stability([labels, trial.labels]) for trial in tried])


def common(tried: Sequence[Trial], shared_clusters: int | None = None) -> Consensus:
    """Computes the consensus of all labels that agents sent in the first rounds of the trials.

    Args:
      tried: Of the same samples and agents.
      shared_clusters: How many clusters it is to have; None: as many as agree best.

    Raises:
      ValueError: There is no trial, or `LabelConsensusConfig` refuses the number.
    """
    if not tried:
        raise checks.wrong("tried", [], "one trial or more")
    # Trials with the same C and key begin alike.
    numbers, lists = lists_in_order({trial.local_clusters: trial.sent for trial in tried})
    config = LabelConsensusConfig(local_clusters=numbers, shared_clusters=shared_clusters)
    # Agents that agree with themselves over repetitions may send more labels than C.
    sizes = tuple(max(c, *map(int, lists[:, i].max(axis=1) + 1)) for i, c in enumerate(numbers))
    sizes = tuple(min(size, MOST_CLUSTERS) for size in sizes)
    # One key for all, since every peer computes this for itself.
    return _CONSENSUS(jax.random.key(0), jnp.asarray(lists, jnp.int32), config, sizes)


def best_of(tried: Sequence[Trial], shared_clusters: int | None = None) -> int:
    """Returns the place of the trial of best agreement, the first of several.

    Trials whose clusters are too many pieces to be refined count only where all are.

    Args:
      tried: Of the same samples and agents.
      shared_clusters: As in `common`.

    Raises:
      ValueError: As `common` does.
    """
    whole = np.array([trial.whole for trial in tried])
    agree = agreements(tried, shared_clusters)
    return int(np.argmax(np.where(whole | ~whole.any(), agree, -np.inf)))


def check(
    config: VertCoHiRFConfig, federation: Federation, tried: Sequence[int] = LOCAL_CLUSTERS
) -> list[int]:
    """Returns the numbers of clusters that are tried, in ascending order.

    Those that leave ten samples for each cluster, and 2 in any case.

    Raises:
      ValueError: There is none, or no base clusterer is told one.
    """
    n = int(np.asarray(federation.cohorts[0].mask)[0].sum())
    most = min(max(n // LEAST_SAMPLES, 2), MOST_CLUSTERS)
    numbers = [c for c in sorted(set(tried)) if 1 <= c <= most]
    if not numbers:
        raise checks.wrong("tried", tuple(tried), f"a number from 1 to {most} for {n} samples")
    if config.bases().names() == {"dbscan"}:
        raise checks.wrong("base", "dbscan", "a clusterer that is told its number of clusters")
    return numbers


def trials(
    config: VertCoHiRFConfig,
    hyperparams: VertCoHiRFHyperparams,
    federation: Federation,
    key: jax.Array,
    *,
    rounds: int,
    tried: Sequence[int] = LOCAL_CLUSTERS,
    on_program: Callable[[int, int, str], None] = lambda i, n, name: None,
    on_start: Callable[[int], None] = lambda n: None,
) -> Iterator[Trial]:
    """Runs the method with each local number of clusters and each consensus of the agents.

    A run with what a trial was made with, and with the same key, finds the trial's clusters, but
    for rounding and, where agents have features of different number, for where k-means stops: its
    tolerance is of the mean variance of the features, and of those that agents are padded with,
    too. One program serves all numbers.

    Args:
      config: Static settings; its `local_clusters` does not count.
      hyperparams: Traced settings; a `relaxed_agents` that is not None is the only one tried.
      federation: The data.
      key: Of all runs.
      rounds: Most rounds of a run.
      tried: Numbers of clusters, of which `check` leaves some out for few samples.
      on_program: As in `Steps.compile`.
      on_start: Called with the number of trials once the first programs are compiled.

    Yields:
      A trial for each setting, the strict consensus first.

    Raises:
      ValueError: As `check`, `vertcohirf` and its `init` do.
    """
    numbers = check(config, federation, tried)
    mask = np.asarray(federation.cohorts[0].mask)[0]
    make = partial(_reporting, dataclasses.replace(config, local_clusters=numbers[-1]))
    given = hyperparams.relaxed_agents
    thresholds = RELAXED_AGENTS if given is None else (float(given),)

    def numbers_of(c: int, threshold: float | None) -> VertCoHiRFHyperparams:
        level = _STRICT if threshold is None else threshold
        return dataclasses.replace(hyperparams, limit=c, relaxed_agents=level)

    agents = _of_one_width(config, hyperparams, federation.without_labels())
    steps = Steps(make, numbers_of(numbers[-1], None), agents, client_chunk=1)
    steps.compile(on_program)
    on_start(len(thresholds) * len(numbers))
    for threshold in thresholds:
        for c in numbers:
            these = steps.with_numbers(numbers_of(c, threshold))
            labels, sent, refined, traffic = _one_run(these, agents, key, rounds)
            whole = refined or not config.refinements
            yield Trial(c, threshold, labels[mask], sent[:, mask], traffic, whole)


def _one_run(
    steps: Steps, federation: Federation, key: jax.Array, rounds: int
) -> tuple[np.ndarray, np.ndarray, bool, Traffic]:
    """Returns the clusters [n], what agents sent first [agents, n], if refined, and bytes."""
    state = steps.start(federation, key)
    sent: list[np.ndarray] = []
    exchanged: list[Traffic] = []  # arrays shrink, and with them the messages
    made = 0
    while steps.goes_on(state, made, rounds):
        state, info = steps.one_round(federation, key, state, made)
        exchanged.append(steps.traffic()["round"])
        state = steps.compacted(state)
        sent = sent or [np.asarray(client["labels"])[0] for client in info[0]["clients"]]
        made += 1
    found = steps.evaluate(federation, key, state, max(made - 1, 0))
    exchanged.append(steps.traffic()["finish"])
    traffic = Traffic(sum(e.up for e in exchanged), sum(e.down for e in exchanged))
    refined = bool(np.any(np.asarray(found.state.server.refined) >= 0))
    return found.labels[0][0], np.stack(sent), refined, traffic


def _reporting(config: VertCoHiRFConfig, hyperparams: VertCoHiRFHyperparams) -> FederatedAlgorithm:
    """Returns the method, with the labels that agents send beside what is reported of a round."""
    algorithm = vertcohirf(config, hyperparams)
    clusters, ranking = algorithm.round

    def client(*arguments: Any) -> tuple[Any, Any, Any]:
        state, message, _ = clusters.client(*arguments)
        return state, message, message

    return algorithm._replace(
        round=(clusters._replace(client=client), ranking),
        compact=partial(compact, least=_LEAST_CAPACITY),
    )


def _of_one_width(
    config: VertCoHiRFConfig, hyperparams: VertCoHiRFHyperparams, federation: Federation
) -> Federation:
    """Returns agents padded with zero features to one width, where these change no distance.

    Nor do cosines see them, and agents that are alike share their programs. k-means of an agent
    that is padded has a smaller tolerance, and may go on for longer.
    """
    blind = config.bases().names() == {"kmeans"} and config.similarity == "cosine"
    everything = isinstance(hyperparams.feature_share, float) and hyperparams.feature_share == 1
    if not (blind and everything) or any(len(c.views) > 1 for c in federation.cohorts):
        return federation
    width = max(federation.view_dims)

    def padded(cohort: Cohort) -> Cohort:
        (x,) = cohort.views
        x = jnp.pad(jnp.asarray(x), ((0, 0), (0, 0), (0, width - x.shape[-1])))
        return dataclasses.replace(cohort, views=(x,))

    cohorts = tuple(map(padded, federation.cohorts))
    dims = (width,) * federation.n_views
    return dataclasses.replace(federation, cohorts=cohorts, view_dims=dims)
