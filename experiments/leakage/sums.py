"""Attacks on sums of rows: E-FKMVC's, one for each cluster of each client.

The quotient of a client's sum and its weight is a mean of few rows, and of one where a cluster
holds no more. A fuzzy sum for a cluster that holds none is the worst: its weight goes to whichever
row is nearest, by a high power of distances, and the quotient is that row. Read are each client's
summaries at the start, by how much the sum of all its rows, which is sent first, exceeds them, its
sums of all rounds, and by how much each differs from the round before, which is a sum over the rows
that came or went. Where sums are added up before anybody reads them, it is the summaries, and what
all clients' rows exceed them by.

Of so many means some are near a row by chance. So beside them stand those of a run on public
samples that are dealt out alike, which anyone can make without any message.
"""

from __future__ import annotations

import jax
import numpy as np

from experiments.leakage.scenario import LeakageSettings, Scenario
from experiments.leakage.uploads import overheard
from jaxfedmvc import engine
from jaxfedmvc.algorithms.fedhk import FedHKConfig, e_fkmvc
from jaxfedmvc.data.partition import hybrid_partition
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics import host

# Rounds at most; the method mostly ends before.
_ROUNDS = 30
# Places in the setup of the sums of all rows, and of the exchange of summaries.
_TOTALS, _SUMMARIES = 0, 2
# A row counts as exposed where a mean has it up to this share of the features' variance. In a view
# of few features any mean is so close to some rows: hence the control.
_CLOSE = 0.01


class SumAttacks:
    """E-FKMVC on the participants, dealt out to clients that hold all views."""

    def __init__(self, n_clusters: int, settings: LeakageSettings, least: int | None) -> None:
        """Prepares the method; compiles nothing yet.

        Args:
          n_clusters: Number of clusters.
          settings: Of the study.
          least: Rows of a cluster below which a client sends nothing of it; None: off.

        Raises:
          ValueError: A setting is out of range.
        """
        self.n_clients = settings.leak_clients
        # One start, which is the default where rows are many: each one more sends sums of its own.
        config = FedHKConfig(n_clusters, n_restarts=1, min_cluster_size=least)
        self.algorithm = e_fkmvc(config)
        recording = self.algorithm._replace(
            setup=tuple(map(overheard, self.algorithm.setup)),
            round=tuple(map(overheard, self.algorithm.round)),
        )
        self.run = jax.jit(lambda federation, key: engine.run(recording, federation, key, _ROUNDS))

    def scores(self, scenario: Scenario, seed: int, summed: bool) -> dict[str, float]:
        """Scores the federation, and how near the means of clients come to their rows.

        Args:
          scenario: The data.
          seed: Of everything random.
          summed: Whether no sum of a single client is read, as with secure aggregation.
        """
        n, key = len(scenario.labels), jax.random.key(seed)
        parts = hybrid_partition(seed, n, len(scenario.views), self.n_clients, ratio=(1, 0))
        federation, public = (
            Federation.from_arrays(views, None, partition=parts)
            for views in (scenario.views, scenario.public_views)
        )
        result = self.run(federation, key)
        (cohort,) = federation.cohorts
        own, others = (told(x, summed) for x in (result, self.run(public, key)))
        found = []
        for v, x in cohort.by_view().items():
            rows = [np.asarray(x[c])[np.asarray(cohort.mask[c])] for c in range(self.n_clients)]
            found.append(
                [
                    *_compared(rows, [of[v] for of in own]),
                    *_compared(rows, [of[v] for of in others]),
                ]
            )
        names = ("prototypes", "exposed", "public_prototypes", "public_exposed")
        labelled = Federation.from_arrays(scenario.views, scenario.labels, partition=parts)
        rated = host.table_scores(host.tables(labelled, result.labels).sum(axis=0))
        return {
            "bytes": engine.traffic(self.algorithm, federation)["round"].up / self.n_clients,
            "nmi": rated["nmi"],
            "acc": rated["acc"],
            **dict(zip(names, map(float, np.mean(found, axis=0)), strict=True)),
        }


def told(result: engine.RunResult, summed: bool) -> list[dict[int, np.ndarray]]:
    """Computes the means that a run's clients give away, of each client by view, [k, d].

    Args:
      result: Of a run in which all clients hold all views.
      summed: Whether no sum of a single client is read.
    """
    scales, n_rounds = result.state.server.scales, int(result.n_rounds)
    setup = result.info["setup"]
    (totals, n_rows), summaries, sums = (
        jax.tree.map(np.asarray, phase["clients"][0]["message"])
        for phase in (setup[_TOTALS], setup[_SUMMARIES], result.info["rounds"][0])
    )
    means, counts = summaries
    by_view = np.split(means, np.cumsum([len(s.origin) for s in scales.values()])[:-1], axis=2)
    found: list[dict[int, np.ndarray]] = []
    for c, count in enumerate(counts):
        found.append({})
        # What the summaries leave out of each client's rows, or of all clients' together.
        whose = slice(None) if summed else slice(c, c + 1)
        for (v, scale), part in zip(scales.items(), by_view, strict=True):
            origin = np.asarray(scale.origin)
            own = part * np.sqrt(np.asarray(scale.variance)) * counts[..., None]
            rest = totals[v] - n_rows[:, None] * origin - own.sum(axis=1)
            left_out = rest[whose].sum(axis=0, keepdims=True)
            n_left_out = (n_rows - counts.sum(axis=1))[whose].sum(keepdims=True)
            of_start = np.concatenate([own[c], left_out]), np.concatenate([count, n_left_out])
            heard = [means_of(*of_start, origin)]
            if not summed:
                numerators, weights = (
                    _with_changes(x[v][:n_rounds, c]) for x in (sums.numerators, sums.weights)
                )
                of_rounds = numerators.reshape(-1, len(origin))
                heard.append(means_of(of_rounds, weights.ravel(), origin))
            found[c][v] = np.concatenate(heard)
    return found


def _with_changes(x: np.ndarray) -> np.ndarray:
    """Returns what is sent in all rounds, [rounds, ...], and its changes from round to round."""
    return np.concatenate([x, np.diff(np.float64(x), axis=0)])


def means_of(sums: np.ndarray, weights: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Computes the means that a client's sums give, and what the server knows without them.

    Args:
      sums: Of rows less the origin, [c, d].
      weights: Of the rows in them, [c]; zero where nothing is sent.
      origin: The mean of all rows, [d].

    Returns:
      Means of what is sent, and the origin; [1 to c + 1, d].
    """
    sent = weights != 0
    return np.concatenate([sums[sent] / weights[sent, None] + origin, origin[None]])


def nearest_errors(x: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """Computes the squared distances of rows [n, d] to the nearest of the guesses [k, d]: [n]."""
    return np.min(np.sum((x[:, None] - guesses[None]) ** 2, axis=-1), axis=1)


def _compared(rows: list[np.ndarray], guesses: list[np.ndarray]) -> tuple[float, float]:
    """Returns R^2 of clients' guesses for their rows, and the share of rows they are close to."""
    errors = np.concatenate(list(map(nearest_errors, rows, guesses)))
    x = np.concatenate(rows)
    variance = np.mean(np.sum((x - x.mean(axis=0)) ** 2, axis=1))
    return float(1 - errors.mean() / variance), float(np.mean(errors < _CLOSE * variance))
