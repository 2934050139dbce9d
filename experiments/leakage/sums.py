"""Attacks on sums of rows: E-FKMVC's, one for each cluster of each client.

The quotient of a client's sum and its weight is a mean of few rows, and of one where a cluster
holds no more. A fuzzy sum for a cluster that holds none is the worst: its weight goes to whichever
row is nearest, by a high power of distances, and the quotient is that row. Read are the last
round's sums of each client, as without secure aggregation.
"""

from __future__ import annotations

import jax
import numpy as np

from experiments.leakage.scenario import LeakageSettings, Scenario, public_centres
from experiments.leakage.uploads import overheard
from jaxfedmvc import engine
from jaxfedmvc.algorithms.fedhk import FedHKConfig, e_fkmvc
from jaxfedmvc.data.partition import hybrid_partition
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics import host

# Rounds at most; the method mostly ends before.
_ROUNDS = 30
# A row counts as exposed where a mean has it up to this share of the features' variance. In a view
# of few features any mean is so close to some rows: hence the control, public samples' centres.
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
        self.algorithm = e_fkmvc(FedHKConfig(n_clusters, min_cluster_size=least))
        recording = self.algorithm._replace(round=tuple(map(overheard, self.algorithm.round)))
        self.run = jax.jit(lambda federation, key: engine.run(recording, federation, key, _ROUNDS))

    def scores(self, scenario: Scenario, seed: int) -> dict[str, float]:
        """Scores the federation, and how near the sums of clients come to their rows."""
        n = len(scenario.labels)
        parts = hybrid_partition(seed, n, len(scenario.views), self.n_clients, ratio=(1, 0))
        federation = Federation.from_arrays(scenario.views, scenario.labels, partition=parts)
        result = self.run(federation.without_labels(), jax.random.key(seed))
        (cohort,), (heard,) = federation.cohorts, result.info["rounds"][0]["clients"]
        last = int(result.n_rounds) - 1
        sent = jax.tree.map(lambda x: np.asarray(x[last, :, 0]), heard["message"])
        told = []
        for v, x in cohort.by_view().items():
            origin = np.asarray(result.state.server.scales[v].origin)
            clients = zip(x, cohort.mask, sent.numerators[v], sent.weights[v], strict=True)
            errors = [
                nearest_errors(np.asarray(rows)[np.asarray(real)], means_of(sums, weights, origin))
                for rows, real, sums, weights in clients
            ]
            told.append(_told(scenario.views[v], np.concatenate(errors)))
        known = [
            _told(x, nearest_errors(x, centres))
            for x, centres in zip(scenario.views, public_centres(scenario, seed), strict=True)
        ]
        prototypes, exposed = np.mean(told, axis=0)
        public_prototypes, public_exposed = np.mean(known, axis=0)
        found = host.table_scores(host.tables(federation, result.labels).sum(axis=0))
        return {
            "bytes": engine.traffic(self.algorithm, federation)["round"].up / self.n_clients,
            "nmi": found["nmi"],
            "acc": found["acc"],
            "prototypes": float(prototypes),
            "public_prototypes": float(public_prototypes),
            "exposed": float(exposed),
            "public_exposed": float(public_exposed),
        }


def means_of(sums: np.ndarray, weights: np.ndarray, origin: np.ndarray) -> np.ndarray:
    """Computes the means that a client's sums give, and what the server knows without them.

    Args:
      sums: Of rows less the origin, [c, d].
      weights: Of the rows in them, [c]; zero where nothing is sent.
      origin: The mean of all rows, [d].

    Returns:
      Means of what is sent, and the origin; [1 to c + 1, d].
    """
    sent = weights > 0
    return np.concatenate([sums[sent] / weights[sent, None] + origin, origin[None]])


def nearest_errors(x: np.ndarray, guesses: np.ndarray) -> np.ndarray:
    """Computes the squared distances of rows [n, d] to the nearest of the guesses [k, d]: [n]."""
    return np.min(np.sum((x[:, None] - guesses[None]) ** 2, axis=-1), axis=1)


def _told(x: np.ndarray, errors: np.ndarray) -> tuple[float, float]:
    """Returns R^2 of a view's guesses, and the share of rows that they are close to."""
    variance = np.mean(np.sum((x - x.mean(axis=0)) ** 2, axis=1))
    return float(1 - errors.mean() / variance), float(np.mean(errors < _CLOSE * variance))
