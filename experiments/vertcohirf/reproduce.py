"""Tables and figures of VertCoHiRF's paper, for `python -m experiments.reproduce`.

--table=1, or any of 5 to 16 with commas; --figure=1 is the attack study, 4 ARI against the number
of agents, 5 box plots of ARI over feature splits. Every trial is appended to trials.csv as it is
made, and --resume goes on with what that holds; so does another job that is given it as
--trials_file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from jax.sharding import Mesh

from experiments.lib import folder, plots
from experiments.lib.command import JobSettings, checked
from experiments.lib.data import (
    DataSettings,
    Problem,
    VerticalSettings,
    fingerprint,
    load_agents,
)
from experiments.lib.progress import Progress
from experiments.lib.study import check_table, parse_or_exit, write_summary
from experiments.lib.text import counted
from experiments.vertcohirf import attack, tables
from experiments.vertcohirf.attack import AttackSettings
from experiments.vertcohirf.trials import (
    COLUMNS,
    LOCAL,
    STEMS,
    SearchSettings,
    as_text,
    run_trials,
)
from jaxfedmvc import data
from jaxfedmvc.files import write_text

_FIGURE_4_SET, _FIGURE_4_AGENTS = "alizadeh-2000-v2", (2, 3, 4, 5, 6)
_OVERLAP = 0.2


@dataclasses.dataclass(frozen=True)
class ReproduceSettings:
    """What of the paper is made.

    Attributes:
      paper: Whose tables.
      table: Tables: 1, or any of 5 to 16.
      figure: Figure: 1 (attack), 4 (number of agents) or 5 (box plots).
      sets: Sets of figure 5; empty: all.
      trials_file: Trials to begin with; new ones are appended to it.
    """

    paper: Literal["vertcohirf"] = "vertcohirf"
    table: tuple[int, ...] = ()
    figure: int | None = None
    sets: tuple[str, ...] = ()
    trials_file: str | None = None

    def check(self) -> None:
        """Checks what is asked for.

        Raises:
          ValueError: Nothing, or what there is not; a trials file of something else.
          OSError: That file cannot be written.
        """
        if not set(self.table) <= {1, *tables.TABLES}:
            got = ",".join(map(str, self.table))
            raise ValueError(f"table: got {got!r}; allowed are 1 and 5 to 16")
        if self.figure not in (None, 1, 4, 5):
            raise ValueError(f"figure: got {self.figure}; allowed are 1, 4 and 5")
        if bool(self.table) == (self.figure is not None):
            raise ValueError("table: give either --table or --figure")
        if not set(self.sets) <= set(STEMS):
            raise ValueError(f"sets: got {','.join(self.sets)!r}; allowed are {list(STEMS)}")
        check_table("trials_file", self.trials_file, COLUMNS)

    @property
    def label(self) -> str:
        """Names what is asked for."""
        return f"figure{self.figure}" if self.figure else "table" + "_".join(map(str, self.table))

    @property
    def flag(self) -> str:
        """The flag that asks for it."""
        if self.figure:
            return f"--figure={self.figure}"
        return f"--table={','.join(map(str, self.table))}"

    def scores(self) -> dict[str, list[str]]:
        """Returns the tables that are made of trials, `{set: scores}`."""
        found: dict[str, list[str]] = {}
        for dataset, metric in (tables.TABLES[t] for t in self.table if t != 1):
            found.setdefault(dataset, []).append(metric)
        if self.figure == 5:
            return {name: ["ARI"] for name in self.sets or STEMS}
        return found


_FLAGS = {
    ReproduceSettings: None,
    SearchSettings: None,
    AttackSettings: None,
    JobSettings: ("seed", "seeds"),
    DataSettings: ("data_dir",),
}


@folder.stoppable
def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the tables or the figure that the command line asks for."""
    study = parse_or_exit(arguments, __doc__, _FLAGS, {"seeds": "5"})
    asked: ReproduceSettings = checked(partial(study.read, ReproduceSettings))
    settings: SearchSettings = checked(partial(study.read, SearchSettings))
    seeds = checked(partial(study.read, JobSettings)).all_seeds
    checked(asked.check)
    if asked.figure == 1:
        attack.run(study)
        return
    data_dir = study.read(DataSettings).data_dir
    load = partial(_load, data_dir)
    sets = asked.scores() or ([_FIGURE_4_SET] if asked.figure == 4 else [])
    for dataset in sets:
        checked(partial(load, dataset, seeds[0]))
    read = {name: fingerprint(data.load(STEMS[name], data_dir)) for name in sets}
    path = checked(partial(study.open, f"reproduce-vertcohirf-{asked.label}", read))
    file = Path(asked.trials_file or path / "trials.csv")
    summary: dict[str, Any] = {
        "trials": settings.search_trials,
        "search": settings.search,
        "seeds": seeds,
        "max_local_clusters": settings.max_local_clusters,
    }
    with Progress(study.folder.progress) as progress:
        if 1 in asked.table:
            problem = load_agents(DataSettings(dataset="multimodal_table1"), VerticalSettings(), 0)
            made_by = folder.made_by(["--paper=vertcohirf", "--table=1"])
            own = path / "table1_runs.csv"
            summary["table 1"] = tables.table_1(problem, seeds, own, progress, study.mesh, made_by)
        if asked.figure == 4:
            summary["figure 4"] = figure_4(settings, seeds, load, file, path, progress, study.mesh)
        wanted = asked.scores()
        command = ["--paper=vertcohirf", asked.flag]
        searched = partial(run_trials, wanted, settings, seeds, mesh=study.mesh, command=command)
        trials = checked(partial(searched, load, file, progress))
    summary |= report(wanted, trials, settings, len(seeds), path)
    write_summary(path, summary)
    print(f"\nwritten: {path}/")


def _load(data_dir: str | None, dataset: str, seed: int, agents: int = 3) -> Problem:
    split = VerticalSettings(agents=agents, overlap=_OVERLAP)
    return load_agents(DataSettings(dataset=STEMS[dataset], data_dir=data_dir), split, seed)


def report(
    wanted: dict[str, list[str]],
    trials: pd.DataFrame,
    settings: SearchSettings,
    n_seeds: int,
    path: Path,
) -> dict[str, Any]:
    """Prints the tables, writes them as .csv, and draws figure 5's box plots of ARI."""
    found = {
        (dataset, metric): tables.table(dataset, metric, trials)
        for dataset, metrics in wanted.items()
        for metric in metrics
    }
    for (dataset, metric), table in found.items():
        print(
            f"\n{dataset}, {metric}: mean over agents, {counted(n_seeds, 'seed')}, best of"
            f" {settings.search_trials} {settings.search} settings each\n{tables.text(table)}"
        )
        if metric == "ARI":
            _draw_boxes(path, dataset, trials)
    if found:
        pd.concat(found.values()).to_csv(path / "tables.csv", index=False)
        write_chosen(path / "chosen_trials.csv", trials)
    return {
        f"{dataset}, {metric}": json.loads(table.to_json(orient="records", double_precision=15))
        for (dataset, metric), table in found.items()
    }


def write_chosen(path: Path, trials: pd.DataFrame) -> None:
    """Writes the trials that tables rest on."""
    chosen = [as_text(row) for row in tables.chosen(trials).to_dict("records")]
    write_text(path, pd.DataFrame(chosen).to_csv(index=False))


def _draw_boxes(path: Path, dataset: str, trials: pd.DataFrame) -> None:
    groups = tables.by_seed(dataset, trials, "ARI")
    alone = groups.pop(LOCAL, [])
    if groups:
        plots.boxes(
            path / f"boxes_{Path(STEMS[dataset]).stem}.png",
            groups,
            {"local k-means": float(np.median(alone))} if alone else {},
            "ARI",
            f"{dataset}, label-tuned, over feature splits",
        )


def figure_4(
    settings: SearchSettings,
    seeds: Sequence[int],
    load: Callable[..., Problem],
    file: Path,
    path: Path,
    progress: Progress,
    mesh: Mesh | None = None,
) -> dict[str, Any]:
    """Draws ARI against the number of agents, label-tuned, on one set; returns it by method."""
    curves: dict[str, list[list[float]]] = {}
    for agents in _FIGURE_4_AGENTS:
        own = file.with_name(f"{file.stem}_{agents}_agents{file.suffix}")
        command = ["--paper=vertcohirf", "--figure=4"]
        searched = partial(run_trials, [_FIGURE_4_SET], settings, seeds, mesh=mesh, command=command)
        trials = checked(partial(searched, partial(load, agents=agents), own, progress))
        for name, values in tables.by_seed(_FIGURE_4_SET, trials, "ARI").items():
            curves.setdefault(name, []).append(values)
    whole = {n: np.array(v).T for n, v in curves.items() if len(v) == len(_FIGURE_4_AGENTS)}
    title = f"{_FIGURE_4_SET}, label-tuned, {len(seeds)} feature splits"
    plots.attack_bands(path / "figure4.png", _FIGURE_4_AGENTS, whole, "agents", "ARI", title)
    means = pd.DataFrame({name: np.mean(v, axis=0) for name, v in whole.items()})
    progress.write(f"\n{_FIGURE_4_SET}: label-tuned ARI by number of agents")
    progress.write(means.set_index(pd.Index(_FIGURE_4_AGENTS)).T.to_string(float_format="%.3f"))
    return {name: np.array(values).tolist() for name, values in curves.items()}


if __name__ == "__main__":
    main()
