"""The local number of clusters without labels: what single jobs do where no setting is given.

The criterion and the runs are the library's, `jaxfedmvc.algorithms.vertcohirf.choice`; here they
meet the command line and the result folder. The trial runs have the first seed's data and key.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from experiments.lib import page, runner
from experiments.lib.command import Command, parse
from experiments.lib.criterion import cost_line, read_table, spent, write_table
from experiments.lib.hooks import Choosing
from experiments.lib.progress import Progress
from experiments.lib.settings import settings_of
from experiments.lib.text import counted
from jaxfedmvc.algorithms.label_consensus import MOST_CLUSTERS
from jaxfedmvc.algorithms.registry import OF_THE_RUN
from jaxfedmvc.algorithms.vertcohirf import choice

TABLE = "local_clusters.csv"
# Beside the number of clusters, where the user says nothing else: the settings of the study.
_WITH_IT = {"repetitions": "1", "refinements": str(choice.REFINEMENTS)}


class LocalChoice(NamedTuple):
    """The trials, and which of them was chosen.

    Attributes:
      tried: A row for each trial: local_clusters, relaxed_agents (NaN for the strict consensus),
        clusters (how many it ended with), agreement, bytes_up and bytes_down of its messages; of
        a job's, seconds too.
      row: The chosen one.
      told: Number of clusters that the user gave, which the consensus is cut into; None: as many as
        agree best.
    """

    tried: pd.DataFrame
    row: int
    told: int | None = None

    @property
    def local_clusters(self) -> int:
        """C."""
        return int(self.tried["local_clusters"].iloc[self.row])

    @property
    def relaxed_agents(self) -> float | None:
        """Threshold of the agents' consensus; None for the strict one."""
        threshold = float(self.tried["relaxed_agents"].iloc[self.row])
        return None if math.isnan(threshold) else threshold

    def save(self, path: Path, title: str) -> None:
        """Writes local_clusters.csv, which says that the choice is made; there is no picture."""
        write_table(path / TABLE, self.tried, self.row)

    def lines(self) -> Iterator[str]:
        """Yields what was chosen, and why."""
        threshold, row = self.relaxed_agents, self.tried.iloc[self.row]
        consensus = "strict" if threshold is None else f"relaxed ({threshold:g})"
        cut = "" if self.told is None else f", in {counted(self.told, 'cluster')} as told"
        yield (
            f"chosen without labels: local_clusters={self.local_clusters}, {consensus} consensus of"
            f" the agents; of {len(self.tried)} trials its {int(row['clusters'])} shared clusters"
            " agree best with the consensus of what the agents find alone"
            f"{cut} (ARI {row['agreement']:.3f}, from {self.tried['agreement'].min():.3f} on)"
        )
        yield cost_line(self.tried)

    def figures(self) -> list[page.Figure]:
        """Returns the agreement by number of clusters, for the page."""
        names = self.tried["relaxed_agents"].map(
            lambda h: "strict consensus" if math.isnan(h) else f"relaxed consensus, {h:g}"
        )
        values = {
            str(name): np.array([group["agreement"]])
            for name, group in self.tried.groupby(names, sort=False)
        }
        numbers = self.tried["local_clusters"].drop_duplicates().to_numpy(float)
        drawn = page.lines("Local number of clusters", values, {"local clusters": numbers}, "ARI")
        note = (
            f"{self.local_clusters} local clusters: the shared clusters agree best with the"
            " consensus of what the agents find alone; no label is seen"
        )
        return [drawn._replace(note=note)]

    def facts(self) -> dict[str, Any]:
        """Returns all trials, for summary.json."""
        known = self.tried.astype(object).where(self.tried.notna(), None)
        return {"local_clusters_tried": known.to_dict("records")} | spent(self.tried)


def saved(path: Path, told: int | None = None) -> LocalChoice | None:
    """Returns the choice that a folder holds, if it was made, with the number that was told."""
    found = read_table(path / TABLE)
    return None if found is None else LocalChoice(*found, told)


def of_trials(tried: Sequence[choice.Trial], told: int | None = None) -> LocalChoice:
    """Chooses the trial of best agreement, the first of several; see `choice.best_of`."""
    table = pd.DataFrame(
        {
            "local_clusters": [trial.local_clusters for trial in tried],
            "relaxed_agents": np.array([trial.relaxed_agents for trial in tried], float),
            "clusters": [len(np.unique(trial.labels)) for trial in tried],
            "agreement": choice.agreements(tried, told),
            "bytes_up": [trial.traffic.up for trial in tried],
            "bytes_down": [trial.traffic.down for trial in tried],
        }
    )
    return LocalChoice(table, choice.best_of(tried, told), told)


# --- The job --------------------------------------------------------------------------------------


def choosing(command: Command) -> Choosing | None:
    """Returns how a job chooses its local number of clusters; None where it is told.

    It is chosen where --local_clusters=auto is given, and where no setting of the method is. What
    is given holds. --n_clusters is no such setting: it says into how many clusters the consensus is
    cut that the choice goes by.
    """
    flags = command.flags
    own = [*settings_of(command.method.config), *settings_of(command.method.hyperparams)]
    names = {setting.flag for setting in own if setting.name not in OF_THE_RUN}
    given = {name for name in names if flags[name].present}
    asked = flags["local_clusters"].value
    if asked != "auto" and (asked is not None or given):
        return None
    defaults = {name: text for name, text in _WITH_IT.items() if name not in given}
    whole = _with(command, {"local_clusters": "auto"} | defaults)
    return Choosing(
        command=whole,
        plan=partial(_planned, whole),
        data=lambda job: job.data,
        make=partial(_made, whole),
        saved=partial(saved, told=_told(whole)),
        applied=partial(_applied, whole),
    )


def _with(command: Command, flags: dict[str, str]) -> Command:
    more = [f"--{name}={text}" for name, text in flags.items()]
    extra = tuple(type(settings) for settings in command.extra[1:])
    return parse([*command.arguments, *more], algorithm=command.name, extra=extra)


def _applied(command: Command, found: LocalChoice) -> Command:
    chosen = {
        "local_clusters": str(found.local_clusters),
        "relaxed_agents": str(found.relaxed_agents).lower(),
    }
    # The job is still the one that was asked for, of which the choice is a part.
    return _with(command, chosen)._replace(arguments=command.arguments)


def _planned(command: Command) -> runner.Job:
    """Reads the data: everything that can be wrong is found here.

    Raises:
      ValueError, OSError: Says what is wrong.
    """
    runner.start_devices(command.job)
    job = runner.prepare(_with(command, {"local_clusters": "2"}))
    choice.check(job.config, job.federation)
    told, most = _told(command), min(len(job.problems[0].rows), MOST_CLUSTERS)
    # Every clustering has the same agreement, 0, with a consensus of one cluster.
    if told is not None and not 2 <= told <= most:
        raise ValueError(
            f"n_clusters: got {told}; allowed is 2 to {most} where settings are chosen by it, or"
            " --local_clusters"
        )
    if job.command.rounds < 1:
        raise ValueError(
            "rounds: got 0; allowed is 1 or more where settings are chosen by what agents send in"
            " rounds, or --local_clusters"
        )
    return job


def _told(command: Command) -> int | None:
    """Returns the number of clusters that the user gave; that of the labels is not told."""
    given = command.data.n_clusters
    return given if isinstance(given, int) else None


def _made(command: Command, job: runner.Job, progress: Progress) -> LocalChoice:
    made, seconds = [], []
    began = time.perf_counter()
    for trial in choice.trials(
        job.config,
        job.hyperparams,
        job.federation,
        jax.random.key(command.job.seed),
        rounds=command.rounds,
        on_program=progress.compiling,
        on_start=lambda n: progress.expect({"trial": n}),
    ):
        progress.done("trial")
        made.append(trial)
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    found = of_trials(made, _told(command))
    return found._replace(tried=found.tried.assign(seconds=seconds))
