"""Settings of DPFMPS, and what they may be."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxfedmvc import checks

Estimator = Literal["complement", "p2est"]

# Most cells of a grid, for which the server holds some numbers for each cluster.
MAX_CELLS = 2**22
# Part of the budget that the number of rows gets.
SIZE_SHARE = {"complement": 0.05, "p2est": 0.02}


@dataclasses.dataclass(frozen=True)
class DPFMPSConfig:
    """Static settings of DPFMPS.

    Attributes:
      n_clusters: Number of clusters k of the local clusterings and of the final one, 2 or more.
      dp_epsilon: Privacy budget epsilon of the whole run, above 0; inf: no noise. The delta that
        goes with it is reported, and grows with the number of agents to a hundredth and more.
      n_sketches: Number of hash functions of each sketch (the authors' example takes 4096); none: a
        tenth of the rows, padding included.
      estimator: How cells are counted: complement, from one union for each cell; p2est, from the
        marginals of pairs of agents, meant for three agents and more.
      n_init: Starts of every k-means, of which the best is kept.
    """

    n_clusters: int
    dp_epsilon: float = 1.0
    n_sketches: int | None = None
    estimator: Estimator = "complement"
    n_init: int = 10

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 2, "n_clusters")
        checks.at_least(self, 1, "n_sketches", "n_init")
        checks.choices(self)
        rule = (lambda x: x > 0, "more than 0, or infinity for no noise")
        checks.number("dp_epsilon", self.dp_epsilon, rule)

    def sketches(self, n_rows: int) -> int:
        """Returns the number of hash functions for so many rows, padding included."""
        return max(1, n_rows // 10) if self.n_sketches is None else self.n_sketches


@dataclasses.dataclass(frozen=True)
class DPFMPSP2EstConfig(DPFMPSConfig):
    """Static settings of DPFMPS-P2Est: those of DPFMPS with the other estimator by default."""

    estimator: Estimator = "p2est"
