"""What VertCoHiRF adds to the runner: bits by iteration, and the cluster fusion hierarchy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib import plots
from experiments.lib.data import DataSettings, Problem, is_multimodal
from experiments.lib.hooks import Hooks, SeedResult
from experiments.lib.report import Report
from experiments.vertcohirf import choice, tree
from jaxfedmvc.algorithms.vertcohirf.communication import communication
from jaxfedmvc.algorithms.vertcohirf.method import hierarchy_of

# What the paper clusters the two generated modalities with.
_MULTIMODAL = {"base": "0:dbscan,1:kmeans", "local_clusters": "3"}


@dataclasses.dataclass(frozen=True)
class LevelSettings:
    """Where the hierarchy is cut.

    Attributes:
      level: Cut the hierarchy here: 0 is the first iteration's clusters, -1 every sample for
        itself; none: the final clusters.
    """

    level: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a level below -1."""
        if self.level is not None and self.level < -1:
            raise ValueError(f"level: got {self.level}; allowed is -1 or more")


def _defaults(settings: DataSettings) -> dict[str, str]:
    name = settings.dataset or "multimodal"
    if not is_multimodal(name):
        return {}
    own = {} if name.lower() == "multimodal" else {"eps": "0.35"}
    return {"dataset": name} | _MULTIMODAL | own


def _columns(info: Any, problem: Problem) -> dict[str, float]:
    found = info[0]["server"]
    bits = communication(
        len(problem.rows),
        [int(c) for c in found["n_labels"]],
        *(int(found[x]) for x in ("n_active", "n_clusters", "n_listed", "n_longest")),
    )
    return {
        "active": int(found["n_active"]),
        "clusters": int(found["n_clusters"]),
        "bits_labels": bits.labels,
        "bits_rankings": bits.rankings,
        "bits_bound": bits.bound,
        "bytes_int32": bits.int32_bytes,
    }


def _labels(settings: LevelSettings, state: Any, labels: list[np.ndarray]) -> list[np.ndarray]:
    if settings.level is None:
        return labels
    cut = hierarchy_of(state).labels(settings.level)
    return [np.asarray(cut, np.int32)[None]] * len(labels)


def _after_seed(folder: Path, result: SeedResult, n_seeds: int) -> Iterator[str]:
    hierarchy = hierarchy_of(result.server)
    stem = "hierarchy" if n_seeds == 1 else f"hierarchy_seed{result.seed}"
    hierarchy.to_json(folder / f"{stem}.json")
    hierarchy.to_csv(folder / f"{stem}.csv")
    if hierarchy.n_levels and result.rounds[-1]["clusters"] == len(result.problem.rows) > 1:
        yield "no two samples were ever labelled alike by all: every sample is its own cluster"


def _pictures(report: Report, result: SeedResult) -> None:
    title = f"cluster fusion hierarchy, {report.title}, seed {result.seed}"
    if np.any(np.asarray(result.server.refined) >= 0):
        title += "\nbefore its clusters are refined"
    found = hierarchy_of(result.server)
    plots.hierarchy(report.path / "hierarchy.png", found, title)
    problem = result.problem
    report.figures.append(tree.figure(found, problem.labels, problem.called))


HOOKS = Hooks(
    defaults=_defaults,
    settings=LevelSettings,
    replaced={
        "max_iter": "give --rounds",
        "mode": "give --nocompact for arrays of one size, where masked was given",
    },
    columns=_columns,
    shown=("active", "clusters", "bits_labels", "bits_rankings", "bits_bound"),
    labels=_labels,
    after_seed=_after_seed,
    pictures=_pictures,
    choosing=choice.choosing,
)
