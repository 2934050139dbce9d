"""Grids of settings times seeds, as few programs as can be:

    python -m experiments.sweep --algorithm=fmcsc --grid="tau_m=0.1,0.5; tau_p=0.1,0.5" --seeds=5

Every flag of `experiments.run` is a flag here, presets (--flagfile) included, and those of data,
job and method may be an axis of the grid. Axes of numbers that are traced share a program; others
group the runs, a program each. Leaves runs.csv (a line a run), summary.csv (a line a setting),
summary.json, flags.txt and a picture in a result folder.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from experiments.lib import folder, grid, page, plots, runner, sweep_report
from experiments.lib.batches import (
    METRICS,
    SPENT,
    Program,
    as_the_first,
    execute,
    free_bytes,
    planned_batch,
)
from experiments.lib.command import (
    FREE_FLAGS,
    Command,
    FolderSettings,
    JobSettings,
    checked,
    fail,
    parse,
    parse_or_exit,
    without,
)
from experiments.lib.grid import Axis
from experiments.lib.groups import Group, data_of, groups_of
from experiments.lib.hooks import family_of
from experiments.lib.ledger import Ledger
from experiments.lib.progress import Progress, require_tqdm
from experiments.lib.settings import flags_of
from experiments.lib.study import write_summary
from experiments.lib.text import counted, width_of_terminal, wrapped
from jaxfedmvc import checks
from jaxfedmvc.engine import mesh
from jaxfedmvc.files import write_text


@dataclasses.dataclass(frozen=True)
class SweepSettings:
    """What is swept, and how runs go together.

    Attributes:
      grid: Axes, such as 'tau_m=0.1,0.5; learning_rate=log(1e-4,1e-2,5); hidden=64x64,256x256'.
      random: So many settings drawn from the grid's axes instead of all; of a range anything in it
        (of whole numbers its values).
      batch: Runs that go together; auto: as memory allows, see --dry_run.
      dry_run: Say what would be run and what it takes, and end; compiles each program for one run.
      coordinator: host:port of process 0, for a sweep over several hosts.
      num_processes: Of the whole sweep, with --coordinator.
      process_id: Of this process, from 0, with --coordinator.
    """

    grid: str | None = None
    random: int | None = None
    batch: str = "auto"
    dry_run: bool = False
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


_SEED_OF_DRAWS = 0


# --- Settings -------------------------------------------------------------------------------------


def settings_of(command: Command, sweep: SweepSettings) -> tuple[list[Axis], list[dict[str, str]]]:
    """Returns the axes, and every setting of the grid as text.

    Raises:
      ValueError: A malformed grid, or an axis that is no flag.
    """
    if sweep.grid is None:
        if sweep.random is not None:
            raise ValueError("random: there are no axes to draw from; give --grid")
        return [], [{}]
    axes = grid.parse(sweep.grid)
    traced = flags_of(command.method.hyperparams)
    static = sorted(_axis_flags(command) - set(traced))
    for axis in axes:
        if axis.name not in (*traced, *static):
            raise ValueError(
                f"grid: {command.name} has no setting {axis.name!r};"
                f" {checks.meant(axis.name, (*traced, *static))}allowed are"
                f" {', '.join(traced) or 'none'} (runs that differ in these share a program),"
                f" {', '.join(static)}"
            )
    if sweep.random is None:
        return axes, grid.combinations(axes)
    drawn = [axis._replace(scale=None) if _takes_whole(command, axis) else axis for axis in axes]
    return axes, grid.draws(drawn, sweep.random, _SEED_OF_DRAWS)


def _takes_whole(command: Command, axis: Axis) -> bool:
    """Whether a flag takes whole numbers only, so that values of a range are drawn, none between.

    What it takes its parser says: of a tuple or an optional number, too.
    """
    try:
        command.flags[axis.name].parser.parse("1.5")
    except ValueError:
        return True
    return False


def _axis_flags(command: Command) -> set[str]:
    """Returns the flags that say what is run: all but those that say how."""
    how = {*flags_of(FolderSettings), *flags_of(SweepSettings), *FREE_FLAGS}
    how |= {"algorithm", "help", "mesh", "precision", "seed", "seeds"}
    if command.hooks.settings is not None:
        how |= set(flags_of(command.hooks.settings))
    return set(command.flags) - how


def commands_of(command: Command, settings: Sequence[dict[str, str]]) -> list[Command]:
    """Returns a command for each setting: the command line, with the setting's flags added.

    Raises:
      ValueError: A value that its flag does not take, or a flag that a sweep has no use for.
    """
    own = command.hooks.settings
    if command.hooks.labels is not None and own is not None and command.extra[0] != own():
        names = ", ".join(flags_of(own))
        raise ValueError(f"{names}: a sweep scores the final clusters; leave it out")
    return [
        parse(
            [*command.arguments, *(f"--{name}={value}" for name, value in setting.items())],
            algorithm=command.name,
            extra=(SweepSettings,),
        )
        for setting in settings
    ]


def asked_batch(batch: str, least: int) -> int | None:
    """Returns the number of the flag; None for auto.

    Raises:
      ValueError: Not a whole number that the mesh divides.
    """
    if batch == "auto":
        return None
    if not batch.isdecimal() or int(batch) < 1 or int(batch) % least:
        among = "" if least == 1 else f" that the mesh's sweep:{least} divides"
        raise ValueError(f"batch: got {batch!r}; allowed is auto, or a whole number{among}")
    return int(batch)


def start_devices(job: JobSettings, sweep: SweepSettings) -> Any:
    """Joins the other processes, and lays devices out; returns the mesh or None.

    Raises:
      ValueError: Flags that do not fit together, or to the devices.
    """
    together = (sweep.coordinator, sweep.num_processes, sweep.process_id)
    if all(x is None for x in together):
        return runner.start_devices(job)
    if sweep.num_processes is None or job.mesh is None or None in together:
        raise ValueError(
            "coordinator: --coordinator, --num_processes, --process_id and --mesh go together"
        )
    sizes = mesh.parse_mesh(job.mesh)
    n_devices = int(np.prod(list(sizes.values())))
    n_here, rest = divmod(n_devices, sweep.num_processes)
    if rest:
        raise ValueError(
            f"mesh: got {job.mesh!r}, {n_devices} devices, which {sweep.num_processes} processes"
            " do not share evenly"
        )
    jax.config.update("jax_num_cpu_devices", n_here)  # without effect on accelerators
    jax.distributed.initialize(*together)
    runner.start_devices(dataclasses.replace(job, mesh=None))
    return mesh.make_mesh(sizes)


# --- The job --------------------------------------------------------------------------------------


def plan(groups: Sequence[Group], devices: Any, batch: int | None, note: str = "") -> Iterator[str]:
    """Yields what --dry_run prints: runs, programs, and the memory that each was compiled for.

    Args:
      groups: Of runs with a program each.
      devices: The mesh, or None.
      batch: Runs that go together; None plans it by memory.
      note: Ends the first line.
    """
    n_runs = sum(len(group.runs) for group in groups)
    yield f"{counted(n_runs, 'run')}, {counted(len(groups), 'program')}{note}"
    yield f"free memory: {free_bytes() / 1e9:.2f} GB on {jax.devices()[0].device_kind}"
    yield f"{'program':>8s}{'runs':>7s}{'batch':>7s}{'MB a batch':>12s}{'MB a run':>10s}"
    for i, group in enumerate(groups):
        program = Program(group, devices)
        memory, size = program.memory(), planned_batch(program, batch)
        yield (
            f"{i:8d}{len(group.runs):7d}{size:7d}{memory.batch(size) / 1e6:12.1f}"
            f"{memory.run / 1e6:10.2f}  {_alike(group) if len(groups) > 1 else ''}".rstrip()
        )


def _alike(group: Group) -> str:
    """Says what all settings of a program have in common."""
    first, *others = group.columns
    return ", ".join(
        f"{name}={value}"
        for name, value in first.items()
        if all(other[name] == value for other in others)
    )


def _one_setting(axes: Sequence[Axis]) -> str:
    return "" if axes else "; no --grid: one setting"


def run(command: Command) -> None:
    """Runs the sweep that a command line describes; bad input ends the program with one line."""
    sweep = command.extra[-1]
    folder.use_compilation_cache(command)
    devices = checked(partial(start_devices, command.job, sweep))
    axes, settings = checked(partial(settings_of, command, sweep))
    commands = checked(partial(commands_of, command, settings))
    groups = checked(partial(groups_of, commands, settings, with_spent=True))
    if command.hooks.check is not None:
        checked(partial(command.hooks.check, commands, [group.config for group in groups]))
    least = 1 if devices is None else devices.shape["sweep"]
    batch = checked(partial(asked_batch, sweep.batch, least))
    for group in groups if devices is not None else ():
        checked(partial(mesh.check_mesh, devices, group.federation))
    leads = jax.process_index() == 0
    if sweep.dry_run:
        for line in plan(groups, devices, batch, _one_setting(axes)):
            if leads:
                print(line)
        return
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    path = _folder(command, leads, groups)
    ledger = checked(partial(Ledger, path))
    if path is None:
        execute(groups, ledger, batch=batch, mesh=devices)
        return
    with Progress(command.folder.progress) as progress:
        n_runs, n_clients = sum(len(g.runs) for g in groups), groups[0].federation.n_clients
        size, programs = counted(n_runs, "run"), counted(len(groups), "program")
        progress.write(f"{size} of {counted(n_clients, 'client')}, {programs}{_one_setting(axes)}")
        if ledger.rows:
            progress.write(f"{len(ledger.rows)} of these runs were made before")
        compilations = execute(groups, ledger, batch=batch, mesh=devices, progress=progress)
    for line in report(path, command, axes, ledger, compilations):
        print(line)


def _folder(command: Command, leads: bool, groups: Sequence[Group]) -> Path | None:
    """Returns the result folder of the process that leads; the others end if it has none."""
    path, wrong = None, None
    if leads:
        stem = command.data.stem
        try:
            path = folder.open_folder(command, f"sweep-{command.name}-{stem}", data_of(groups))
        except (ValueError, OSError) as error:
            wrong = error
    if not as_the_first(int(path is not None)):
        fail(wrong or ValueError("the first process says what is wrong with the folder"))
    return path


def report(
    path: Path, command: Command, axes: Sequence[Axis], ledger: Ledger, compilations: int
) -> Iterator[str]:
    """Writes summary.csv, summary.json and the picture; yields the table and the best settings."""
    runs, names = pd.DataFrame(ledger.rows), [axis.name for axis in axes]
    metrics = [name for name in (*METRICS, "clusters") if name in runs]
    spent = [name for name in SPENT if name in runs]
    summary = sweep_report.summarise(runs, names, metrics, spent)
    part_of = sweep_report.axes_in(family_of(command.method), summary, axes)
    told = "silhouette" if part_of["information"] else "information"
    by = "acc" if summary["acc_mean"].notna().any() else told
    write_text(path / "summary.csv", summary.to_csv(index=False))
    shown = [m for m in metrics if m != "purity" and summary[f"{m}_mean"].notna().any()]
    best = sweep_report.best_lines(summary, names, part_of=part_of)
    best += sweep_report.idle_lines(summary, axes)
    width = width_of_terminal()
    table = sweep_report.table(summary, names, shown, by=by, spent=spent[:1], width=width)
    yield from ("", *table, "", *(line for text in best for line in wrapped(text, width)))
    failed = int((runs["status"] != "ok").sum())
    if failed:
        yield f"{counted(failed, 'run')} failed; runs.csv says why"
    if "round_kept" in runs and failed < len(runs):
        kept = runs.loc[runs["status"] == "ok", "round_kept"].astype(int)
        yield f"rounds that are kept: {kept.min()} to {kept.max()} (round_kept in runs.csv)"
    if spent:
        yield (
            "epsilon and delta are of one run: those of all runs on the same rows, such as seeds"
            " and settings, add up"
        )
    of = f"{command.name} on {command.data.stem}"
    drawn = sweep_report.draw(path, summary, axes, by, of)
    arguments = without(command.arguments, {"output_dir", "resume"})
    content = {
        "algorithm": command.name,
        "dataset": command.data.dataset,
        "runs": len(runs),
        "failed": failed,
        "compilations_here": compilations,
        "seconds": ledger.seconds,
        "best": best,
        "command": arguments,
    }
    write_summary(path, content)
    files = ["runs.csv", "summary.csv", "summary.json", *(picture.name for picture in drawn)]
    if page.is_installed():
        facts = dict[str, Any](runs=len(runs), failed=failed, seconds=round(ledger.seconds, 1))
        facts |= {"device": folder.device(), "best": "\n".join(best)}
        title = f"sweep of {of}"
        text = shlex.join(["python", "-m", "experiments.sweep", *arguments])
        figures = sweep_report.figures(summary, names, shown, by)
        tables = {"Settings, mean over the seeds": sweep_report.titled(summary, metrics)}
        page.write(path / "report.html", title, facts, text, tables, figures)
        files.append("report.html")
    yield f"\n{ledger.seconds:.1f} s, {compilations} compilations in this process"
    yield f"written: {path}/ ({', '.join(files)})"


@folder.stoppable
def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, and runs the sweep."""
    run(parse_or_exit(arguments, __doc__, extra=(SweepSettings,)))


if __name__ == "__main__":
    main()
