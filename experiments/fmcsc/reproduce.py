"""Tables and figures of FMCSC's paper, measured beside it:

    python -m experiments.reproduce --paper=fmcsc --table=1 --datasets=mnist_usps,bdgp --seeds=5

Rows are made of presets (experiments/fmcsc/presets): "paper", algorithm 1 and appendix D.2 with the
departures that docs/methods/fmcsc.md lists, and "best", one setting for all sets. A flag of
`experiments.fmcsc` that is given goes before the presets. On a CPU runs go one by one, elsewhere
they are batched as `experiments.sweep` batches them; --resume goes on with either.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from absl import flags
from sklearn.metrics.cluster import contingency_matrix

from experiments.fmcsc import figures, tables
from experiments.fmcsc.rows import (
    ABSENT,
    POOLED,
    SETS,
    ReproduceSettings,
    Request,
    Row,
    peers,
    rows,
)
from experiments.lib import folder, one_by_one, peers_grid, plots, runner
from experiments.lib import peers as peers_lib
from experiments.lib.batches import Group, execute
from experiments.lib.command import Command, FolderSettings, checked, fail, parse_or_exit
from experiments.lib.data import count_classes, load_clients
from experiments.lib.groups import data_of, data_read, groups_of
from experiments.lib.ledger import Ledger
from experiments.lib.progress import Progress, require_tqdm
from experiments.lib.references import k_means
from experiments.lib.settings import flag_lines, flags_of
from experiments.lib.text import counted
from experiments.sweep import asked_batch, plan
from jaxfedmvc.engine import mesh
from jaxfedmvc.files import write_text
from jaxfedmvc.metrics.host import table_scores

# How x is called in the table.
_X = {
    "table1": "M : S",
    "table2": "components",
    "table3": "participation",
    "figure2": "temperatures",
    "figure4a": "samples per client",
    "figure4b": "clients",
    "figure4c": "epsilon",
    "figure7": "Dirichlet beta",
    "figurebytes": "M : S",
}


class Job(NamedTuple):
    """A parsed command line of `reproduce`.

    Attributes:
      command: With the flags that were given and no others: a default and nothing are not the same
        here, as presets go before the one and not before the other.
      asked: What of the paper is made, with nothing left to defaults.
      rows: What is run for it.
      peers: The comparison methods of table 1.
      seeds: Of the runs.
    """

    command: Command
    asked: ReproduceSettings
    rows: list[Row]
    peers: list[peers_lib.Cell]
    seeds: list[int]

    def open_folder(self, groups: Sequence[Group] = ()) -> Path:
        """Makes the result folder, or opens that of a job that goes on with the same data."""
        name, data = f"reproduce-fmcsc-{self.asked.what}", data_of(groups)
        for cell in self.peers:
            data |= checked(partial(data_read, cell.command.data))
        return checked(partial(folder.open_folder, self.command, name, data))


def job_of(command: Command) -> Job:
    """Returns what a command line asks for.

    Raises:
      ValueError: An unknown set or preset, a flag that has no meaning here, or a README without a
        place for the table.
      OSError: That README cannot be read.
    """
    asked: ReproduceSettings = command.extra[-1].resolved()
    given = flags.FlagValues()
    for name in command.flags:
        if command.flags[name].present:
            given[name] = copy.deepcopy(command.flags[name])
            given[name].default = "not given"  # all of them are to be written
    of_one_run = asked.what in figures.MAKERS
    for name in ("algorithm", "dataset", *["mesh"] * of_one_run):
        if name in given:
            raise ValueError(f"{name}: has no meaning here; leave it out")
    if asked.runs_file and of_one_run:
        raise ValueError(f"runs_file: {asked.what} is not made of runs")
    if asked.readme:
        if asked.what != "table1":
            raise ValueError("readme: takes table 1; leave it out")
        tables.around_marks(Path(asked.readme))
    others = {"help", *flags_of(ReproduceSettings), *flags_of(FolderSettings)}
    of_runs = {
        name: line
        for name in set(given) - others
        for line in flag_lines(given, set(given) - {name})
    }
    of_runs.setdefault("seeds", f"--seeds={2 if asked.quick else 5}")
    if asked.what in ("figure3", "table5"):  # which show one run
        of_runs["seeds"] = "--seeds=1"
    request = Request(asked, of_runs)
    seeds = request.row((asked.datasets or ("digits",))[0], "", "best").command.job.all_seeds
    return Job(command._replace(flags=given), asked, rows(request), peers(request), seeds)


@folder.stoppable
def main(arguments: Sequence[str]) -> None:
    """Runs what the command line asks for."""
    command = parse_or_exit(arguments, __doc__ or "", extra=[ReproduceSettings])
    job = checked(partial(job_of, command))
    folder.use_compilation_cache(command)
    devices = checked(partial(runner.start_devices, command.job))
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    if job.asked.runs_file:
        runs, references = checked(partial(earlier_runs, job))
        show(job, job.open_folder(), runs, references)
    elif job.asked.what in figures.MAKERS:
        show_runs(job)
    else:
        show_scores(job, devices)


def show_runs(job: Job) -> None:
    """Makes a figure or table of what is read from runs themselves."""
    for row in {row.set: row for row in job.rows}.values():
        checked(partial(runner.prepare, row.command))
    if job.asked.dry_run:
        n_runs = sum(row.command.job.seeds for row in job.rows)
        print(f"{counted(n_runs, 'run')}, {counted(len(job.rows), 'program')}")
        return
    path = job.open_folder()
    with Progress(job.command.folder.progress) as progress:
        found = figures.MAKERS[job.asked.what](job.rows, path, progress)
    _summary(job, path, job.rows[0].command.job.all_seeds, found)


def show_scores(job: Job, devices: Any) -> None:
    """Makes a figure or table of the scores of batched runs."""
    asked = job.asked
    if not job.rows:
        show_peers(job, job.open_folder())
        return
    least = 1 if devices is None else devices.shape["sweep"]
    batch = checked(partial(asked_batch, asked.batch, least))
    # To score every round costs nothing to speak of but the time to compile it.
    by_round = not asked.quick or asked.what in ("table1", "figurebytes")
    commands = [row.command for row in job.rows]
    columns = [row.columns | folder.made_by(row.command.arguments) for row in job.rows]
    groups = checked(partial(groups_of, commands, columns, every_round=by_round))
    for group in groups if devices is not None else ():
        checked(partial(mesh.check_mesh, devices, group.federation))
    # On a CPU runs side by side gain nothing, and most of what rows compute is the same in all.
    program = None
    if asked.batch == "auto" and devices is None and jax.default_backend() == "cpu":
        batch, program = 1, one_by_one.programs()
    elif asked.quick and batch is None and devices is None:
        # Small enough; to plan it would compile every program once more.
        batch = len(groups[0].seeds)
    n_runs = sum(len(group.runs) for group in groups)
    size = f"{counted(n_runs, 'run')}, {counted(len(groups), 'program')}"
    if asked.dry_run:
        for line in [f"{size}, one run at a time"] if program else plan(groups, devices, batch):
            print(line)
        return
    path = job.open_folder(groups)
    ledger = checked(partial(Ledger, path))
    with Progress(job.command.folder.progress) as progress:
        progress.write(size)
        execute(groups, ledger, batch=batch, mesh=devices, progress=progress, program=program)
    references = None
    if asked.what == "table1" and "pooled" in asked.references:
        references = pooled_kmeans(job.rows)
        write_text(path / "references.csv", tables.csv_text(references))
    show(job, path, tables.read_runs(path / "runs.csv"), references)
    if job.peers:
        show_peers(job, path)


def show_peers(job: Job, path: Path) -> None:
    """Runs the comparison methods; prints their table, and writes it and a picture of it."""
    with Progress(job.command.folder.progress) as progress:
        file = Path(job.asked.peers_file or path / "peers.csv")
        runs = checked(partial(peers_lib.run_peers, job.peers, job.seeds, file, progress))
        paper = tables.published("table1.csv", ["ratio_multi_single", "method"])
        table = peers_lib.compare(runs, paper)
        if job.asked.peers_grid:
            make = partial(peers_grid.with_grids, table, job.peers, job.seeds, file, progress)
            table = checked(make)
    print("\n" + peers_lib.shown(table, SETS).to_string(index=False))
    table.to_csv(path / "peers_table.csv", index=False)
    whole = set(SETS) - set(job.asked.datasets or ()) == {"nuswide"}
    write_text(path / "peers.md", peers_lib.markdown(table, SETS, ABSENT if whole else None))
    title = peers_lib.title_of("FMCSC's table 1", len(job.seeds), job.asked.peers_training)
    drawn = peers_lib.draw(path / "peers.png", table, SETS, title)
    print(f"\nwritten: {path}/ ({', '.join(['peers_table.csv', 'peers.md', *drawn])})")


def pooled_kmeans(rows: Sequence[Row]) -> pd.DataFrame:
    """Scores k-means on all raw views of the samples that clients hold; no client could run it."""
    lines = []
    for (dataset, ratio), command in {(row.set, row.x): row.command for row in rows}.items():
        scores, seeds = [], command.job.all_seeds
        problems = load_clients(command.data, command.split, seeds)
        for seed, problem in zip(seeds, problems, strict=True):
            ids = [np.ravel(cohort.sample_ids) for cohort in problem.federation.cohorts]
            held = np.setdiff1d(np.concatenate(ids), -1)
            n_clusters = count_classes(command.data, problem.labels)
            assert problem.labels is not None and n_clusters is not None
            clusters = k_means(np.concatenate(problem.views, axis=1)[held], n_clusters, seed)
            scores.append(table_scores(contingency_matrix(problem.labels[held], clusters)))
        line = {"set": dataset, "x": ratio, "row": POOLED, "seeds": len(seeds)}
        lines.append(line | tables.statistics(pd.DataFrame(scores).to_dict("list")))
    return pd.DataFrame(lines, columns=tables.COLUMNS)


def earlier_runs(job: Job) -> tuple[pd.DataFrame, pd.DataFrame | None]:
    """Reads runs of earlier jobs on this one's sets, and the references beside them.

    Raises:
      ValueError, OSError: A file holds something else, or cannot be read; or the files hold a run
        twice, or runs of one cell with unlike settings.
    """
    runs, references = [], []
    mine = list(dict.fromkeys(row.x for row in job.rows))
    for path in map(Path, job.asked.runs_file):
        found = tables.read_runs(path)
        if found.empty or not {"set", "x", "row", "rounds_made"} <= set(found):
            raise ValueError(f"runs_file: {path} holds no runs of this program")
        if others := sorted(set(found["x"]) - set(mine)):
            what, made = job.asked.what, ", ".join(mine)
            raise ValueError(
                f"runs_file: {path} holds runs of {others[0]!r}; {what} is made of {made}"
            )
        runs.append(found)
        beside = path.with_name(path.name.replace("runs", "references"))
        if beside.exists() and beside != path:
            references.append(tables.read_lines(beside))
    sets = {row.set for row in job.rows}
    whole = pd.concat(runs)
    whole = whole[whole["set"].isin(sets)]
    if whole.empty:
        raise ValueError(f"runs_file: holds no runs on {', '.join(sorted(sets))}")
    for cell, mine in whole.groupby(["set", "x", "row"]):
        name = ", ".join(map(str, cell))
        if mine["seed"].duplicated().any():
            raise ValueError(f"runs_file: a seed occurs twice among the runs of {name}")
        if "command" in mine and mine["command"].dropna().map(folder.settings_of_row).nunique() > 1:
            raise ValueError(f"runs_file: the runs of {name} have unlike settings")
    return whole, pd.concat(references) if references else None


def show(job: Job, path: Path, runs: pd.DataFrame, references: pd.DataFrame | None) -> None:
    """Prints the table, and writes it as .csv, Markdown and a picture."""
    what, readme = job.asked.what, job.asked.readme
    failed = runs[runs["status"] != "ok"]
    if len(failed) == len(runs):
        fail(ValueError(f"all {len(failed)} runs failed: {failed['status'].iloc[0]}"))
    if what == "table1":
        table = tables.table_1(runs, references)
    else:
        table = {"table2": tables.table_2, "table3": tables.table_3}.get(what, tables.plain)(runs)
    print("\n" + tables.shown(table, _X[what]).to_string(index=False))
    if len(failed):
        print(f"{counted(len(failed), 'run')} failed; runs.csv says why")
    write_text(path / "table.csv", tables.csv_text(table))
    write_text(path / "table.md", tables.markdown(table, _X[what]))
    draw(what, path, runs, table)
    if readme:
        text = tables.markdown(tables.short(table), _X[what])
        checked(lambda: tables.write_between_marks(Path(readme), text))
    lines = [line.dropna().to_dict() for _, line in table.iterrows()]
    _summary(job, path, sorted({int(seed) for seed in runs["seed"]}), {"rows": lines})


def draw(what: str, path: Path, runs: pd.DataFrame, table: pd.DataFrame) -> None:
    """Draws the table or figure."""
    picture, seeds = path / f"{what}.png", table["seeds"].dropna().astype(int)
    least = f"{seeds.min()} to " if seeds.min() < seeds.max() else ""
    title = f"FMCSC, {what.replace('e', 'e ', 1)}, {least}{counted(seeds.max(), 'seed')}"
    if what == "figurebytes":
        tables.draw_bytes(picture, runs, "FMCSC: accuracy against traffic")
    elif what == "figure2":
        figures.draw_temperatures(path, runs)
    elif what == "table2":
        figures.draw_ablation(picture, table, title)
    elif what in ("table1", "table3"):
        tables.draw_bars(picture, table, title)
    else:
        tables.draw_lines(picture, table, _X[what], title, what in ("figure4c", "figure7"))


def _summary(job: Job, path: Path, seeds: list[int], found: dict[str, Any]) -> None:
    content = {"paper": "fmcsc", "what": job.asked.what, "quick": job.asked.quick, "seeds": seeds}
    content |= {"versions": folder.versions()} | found
    write_text(path / "summary.json", json.dumps(content, indent=1, default=float) + "\n")
    print(f"\nwritten: {path}/ ({', '.join(sorted(file.name for file in path.iterdir()))})")
