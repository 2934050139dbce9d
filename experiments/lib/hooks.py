"""What a family of methods may add to the runner: other defaults, flags, columns, pictures.

A family is a package of `jaxfedmvc.algorithms`; its additions, where it has any, are `HOOKS` in
`experiments/<family>/hooks.py`. A method without them runs all the same.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.lib.data import DataSettings, Problem
from jaxfedmvc.algorithms.registry import Method


class SeedResult(NamedTuple):
    """What one seed's run ended with.

    Attributes:
      seed: Of the run.
      problem: Its data.
      server: The server state after the last round and `finish`.
      labels: For each cohort int32 [clients, rows].
      embedding: For each cohort [clients, rows, d], or None.
      rounds: Rows of rounds.csv.
    """

    seed: int
    problem: Problem
    server: Any
    labels: list[np.ndarray]
    embedding: list[np.ndarray] | None
    rounds: list[dict[str, Any]]

    @property
    def failed(self) -> bool:
        """Whether no row is in any cluster, as after a model has turned NaN."""
        return all((mine < 0).all() for mine in self.labels)

    def of_rows(self, values: Sequence[Any]) -> np.ndarray:
        """Returns what each cohort has [clients, rows, ...] of all rows in one, without padding."""
        masks = [np.asarray(cohort.mask) for cohort in self.problem.federation.cohorts]
        return np.concatenate([np.asarray(x)[m] for x, m in zip(values, masks, strict=True)])

    def owners(self) -> np.ndarray:
        """Returns the client of each row, in the order of `of_rows`."""
        cohorts = self.problem.federation.cohorts
        ids = (np.asarray(cohort.client_ids)[:, None] for cohort in cohorts)
        return self.of_rows(
            [np.broadcast_to(i, c.mask.shape) for i, c in zip(ids, cohorts, strict=True)]
        )

    def names(self) -> np.ndarray:
        """Returns what the data set calls each row, in the order of `of_rows`."""
        return self.problem.rows[
            self.of_rows([c.sample_ids for c in self.problem.federation.cohorts])
        ]


class Choosing(NamedTuple):
    """What is chosen without labels before a job runs.

    Attributes:
      command: The job, as its folder keeps it.
      plan: Prepares the choice; raises ValueError or OSError for everything that can be wrong.
      data: `plan -> {set: fingerprint}`, the data that were read for it.
      make: `(plan, progress) -> criterion.Found`.
      saved: `folder -> criterion.Found`, the choice that a folder holds; None if it holds none.
      applied: `found -> command`, the job with what was chosen.
    """

    command: Any
    plan: Callable[[], Any]
    data: Callable[[Any], Mapping[str, str]]
    make: Callable[[Any, Any], Any]
    saved: Callable[[Path], Any]
    applied: Callable[[Any], Any]


class Hooks(NamedTuple):
    """Additions of a family; every one may be left out.

    Attributes:
      defaults: `data settings as given -> {flag: text}`, defaults that differ from the
        dataclasses' for this family or this set.
      settings: A dataclass of further flags, as `settings.define` takes it.
      replaced: Flags of earlier versions -> what replaces them, for the error message.
      columns: `(a round's info, problem) -> numbers`, further columns of rounds.csv, the same ones
        in every round.
      shown: Those of these columns that the terminal shows.
      labels: `(settings, server state, labels) -> labels` to be scored instead.
      references: `(problem, K, seed) -> {name: labels of each cohort}`, clusterings to compare
        with beside the usual ones.
      after_seed: `(folder, result, number of seeds) -> lines` for the terminal; writes the family's
        own files.
      pictures: `(report, result of the last seed)`, draws the family's own pictures in the end;
        a report has `path`, `title`, all `rows` of rounds.csv and `references`.
      check: `(commands, configs)` of a job, one of each, or of all settings of a sweep; raises
        ValueError where the method and the job do not go together.
      check_masks: `(config, hyperparams, fraction bits)`, of jobs and sweeps under secure
        aggregation; raises ValueError where fixed-point sums are not what the method needs.
      facts: `(job) -> entries` of summary.json.
      spent: `(config, hyperparams) -> (epsilon, delta)` of a run, for rows of sweeps; None of a
        method that is not private, and delta NaN where the run's server state `spent` tells it.
      choosing: `(command) -> Choosing`, what single jobs choose without labels; None for nothing.
      late_clients: Whether clients that were not in the setup add to the rounds.
    """

    defaults: Callable[[DataSettings], Mapping[str, str]] = lambda settings: {}
    settings: type | None = None
    replaced: Mapping[str, str] = {}
    columns: Callable[[Any, Problem], dict[str, float]] | None = None
    shown: Sequence[str] = ()
    labels: Callable[[Any, Any, list[np.ndarray]], list[np.ndarray]] | None = None
    references: Callable[[Problem, int, int], dict[str, list[np.ndarray]]] | None = None
    after_seed: Callable[[Path, SeedResult, int], Iterable[str]] | None = None
    pictures: Callable[[Any, SeedResult], None] | None = None
    check: Callable[[Sequence[Any], Sequence[Any]], None] | None = None
    check_masks: Callable[[Any, Any, int], None] | None = None
    facts: Callable[[Any], dict[str, Any]] | None = None
    spent: Callable[[Any, Any], tuple[float, float] | None] | None = None
    choosing: Callable[[Any], Choosing | None] | None = None
    late_clients: bool = True


def family_of(method: Method) -> str:
    """Returns the package, or the module, of `jaxfedmvc.algorithms` that a method comes from."""
    parts = method.make.__module__.split(".")
    return parts[parts.index("algorithms") + 1] if "algorithms" in parts else parts[-1]


def hooks_of(method: Method) -> Hooks:
    """Returns what the family of a method adds; nothing for methods of other packages.

    A module of somebody's own may have the name of a family, or of what is no family here.
    """
    if not method.make.__module__.startswith("jaxfedmvc."):
        return Hooks()
    name = f"experiments.{family_of(method)}.hooks"
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    return importlib.import_module(name).HOOKS if found else Hooks()
