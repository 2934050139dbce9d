"""Attacks on labels and rankings: of methods in which no number of a feature travels.

Of VertCoHiRF the first round is read, in which all samples are active: an agent's label of each,
and its place in the list of its consensus cluster. Later rounds tell the same of ever fewer
samples, and medoids are identifiers. A peer knows all of it; what one agent sends is attacked
alone, as with other methods. Where clusters are refined, an agent's lists of every sample's nearest
clusters are read, too. The consensus of labels has one exchange, an agent's lists of labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.leakage.samples import Upload, attacked, rated
from experiments.leakage.scenario import LeakageSettings, Scenario
from experiments.leakage.uploads import overheard
from jaxfedmvc import engine
from jaxfedmvc.algorithms.label_consensus import LabelConsensusConfig, label_consensus
from jaxfedmvc.algorithms.vertcohirf import (
    VertCoHiRFConfig,
    VertCoHiRFHyperparams,
    vertcohirf,
)

# Rounds at most; the method ends before, where nothing merges any more.
_ROUNDS = 30
# Messages are widened to a multiple of so many columns.
_COLUMNS = 32
# Of clusters, of the lists that the consensus of labels sends.
_NUMBERS = sorted(LabelConsensusConfig().local_clusters)


class LabelAttacks:
    """VertCoHiRF among the participants' agents, one for each view."""

    def __init__(
        self,
        n_clusters: int,
        settings: LeakageSettings,
        relaxed_agents: float | None = None,
        refinements: int = 0,
    ) -> None:
        """Prepares the method; compiles nothing yet.

        Args:
          n_clusters: Of each agent.
          settings: Of the study.
          relaxed_agents: As in `VertCoHiRFHyperparams`.
          refinements: As in `VertCoHiRFConfig`.

        Raises:
          ValueError: A setting is out of range.
        """
        self.settings = settings
        self.algorithm = vertcohirf(
            VertCoHiRFConfig(n_clusters, refinements=refinements),
            VertCoHiRFHyperparams(relaxed_agents=relaxed_agents),
        )
        recording = self.algorithm._replace(
            round=tuple(map(overheard, self.algorithm.round)),
            finish=tuple(map(overheard, self.algorithm.finish)),
        )
        self.run = jax.jit(lambda federation, key: engine.run(recording, federation, key, _ROUNDS))

    def scores(self, scenario: Scenario, seed: int) -> dict[str, float]:
        """Scores the attacks on the labels and rankings of a run, and the run itself."""
        found, result = _attacked_run(
            self.run, first_messages, _labels_of, scenario, seed, self.settings
        )
        traffic = engine.traffic(self.algorithm, scenario.participants)
        up = traffic["round"].up + traffic["finish"].up
        return found | _bytes_and_scores(scenario, result, up)


class ListAttacks:
    """The consensus of labels among the participants' agents; its defaults, an agent a view."""

    def __init__(self, settings: LeakageSettings) -> None:
        """Prepares the method with its defaults; compiles nothing yet."""
        self.settings, self.algorithm = settings, label_consensus()
        recording = self.algorithm._replace(setup=tuple(map(overheard, self.algorithm.setup)))
        self.run = jax.jit(lambda federation, key: engine.run(recording, federation, key, 0))

    def scores(self, scenario: Scenario, seed: int) -> dict[str, float]:
        """Scores the attacks on the labels of a run, and the run itself."""
        # Of the lists, the one whose number is nearest to that of the classes.
        c = min(_NUMBERS, key=lambda c: abs(c - scenario.n_clusters))
        start = sum(_NUMBERS[: _NUMBERS.index(c)])

        def labels_of(key: Any, message: np.ndarray) -> np.ndarray:
            return np.argmax(message[:, start : start + c], axis=1)

        found, result = _attacked_run(self.run, lists, labels_of, scenario, seed, self.settings)
        up = engine.traffic(self.algorithm, scenario.participants)["setup"].up
        return found | _bytes_and_scores(scenario, result, up)


def lists(result: engine.RunResult) -> list[np.ndarray]:
    """Reads what each agent tells of its samples: the indicators of all its labels, [n, labels]."""
    (phase,) = result.info["setup"]
    sent = [next(iter(client["message"].values())) for client in phase["clients"]]
    return [
        np.concatenate(
            [np.eye(c)[row] for c, row in zip(_NUMBERS, np.asarray(x)[0], strict=True)], 1
        )
        for x in sent
    ]


def _attacked_run(
    run: Callable[..., engine.RunResult],
    messages_of: Callable[[engine.RunResult], list[np.ndarray]],
    labels_of: Callable[[Any, np.ndarray], np.ndarray],
    scenario: Scenario,
    seed: int,
    settings: LeakageSettings,
) -> tuple[dict[str, float], engine.RunResult]:
    """Returns the scores of the attacks on a run's messages, and the run."""
    key, public_key, attack_key = jax.random.split(jax.random.key(seed), 3)
    result = run(scenario.participants, key)
    held, public = messages_of(result), messages_of(run(scenario.public, public_key))
    # Columns of zeros for labels that nobody gives: few programs for all messages.
    widest = max(message.shape[1] for message in [*held, *public])
    rank = -(-widest // _COLUMNS) * _COLUMNS
    padded = [
        [np.pad(m, ((0, 0), (0, rank - m.shape[1]))) for m in sent] for sent in (held, public)
    ]
    uploads = [
        Upload(v, rank, message, of_public, None)
        for v, (message, of_public) in enumerate(zip(*padded, strict=True))
    ]
    return attacked(attack_key, scenario, uploads, labels_of, settings, permuted=True), result


def _bytes_and_scores(scenario: Scenario, result: engine.RunResult, up: int) -> dict[str, float]:
    """Returns the bytes of a message from one agent to another, and the run's scores."""
    n_agents = len(result.labels)
    bytes_of_one = up / (n_agents * (n_agents - 1))
    return {"bytes": bytes_of_one} | rated(scenario.labels, result.labels[0][0])


def first_messages(result: engine.RunResult) -> list[np.ndarray]:
    """Reads what each agent tells of its samples in the first round, as a matrix [n, 1 + labels].

    The first column is the sample's place in its list from 0 to 1, best first; then the label's
    indicators; then, for each refinement, how near each shared cluster is, 0 where it is not listed
    and 1 for the nearest.
    """
    by_phase = [
        [jax.tree.map(lambda x: np.asarray(x[0, 0]), info) for info in phase["clients"]]
        for phase in result.info["rounds"]
    ]
    matrices = []
    for clustered, ranked in zip(*by_phase, strict=True):
        labels = clustered["message"]["labels"]
        place = places(ranked["message"]["ranking"], ranked["sent"].codes)
        matrices.append(np.concatenate([place[:, None], np.eye(labels.max() + 1)[labels]], axis=1))
    for phase in result.info["finish"]:
        for agent, info in enumerate(phase["clients"]):
            nearest = np.asarray(info["message"]["nearest"][0])
            matrices[agent] = np.concatenate([matrices[agent], nearness(nearest)], axis=1)
    return matrices


def nearness(nearest: np.ndarray) -> np.ndarray:
    """Computes [n, clusters] of lists [n, listed]: 1 for the nearest, less for the next, then 0."""
    n, listed = nearest.shape
    found = np.zeros((n, int(nearest.max()) + 1))
    found[np.arange(n)[:, None], nearest] = 1 - np.arange(listed)[None] / listed
    return found


def places(ranking: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Computes each sample's place in the list of its cluster, from 0, the first, to 1.

    Args:
      ranking: Samples, the lists of clusters 0, 1, .. one after another, [n].
      codes: Cluster of each sample, [n].
    """
    sizes = np.bincount(codes)
    starts = np.cumsum(sizes) - sizes
    place = np.empty(len(codes))
    place[ranking] = np.arange(len(codes))
    return (place - starts[codes]) / np.maximum(sizes[codes] - 1, 1)


def _labels_of(key: Any, message: np.ndarray) -> np.ndarray:
    return np.argmax(message[:, 1:], axis=1)
