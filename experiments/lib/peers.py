"""Comparison methods on the partitions of a paper's table, beside what the paper prints for them.

    runs = run_peers(cells, seeds, Path("peers.csv"), progress)
    table = compare(runs, published)          # our mean +- deviation, the paper's number beside

A cell is a command of `experiments.run`. Every seed's run is appended to peers.csv as it ends, with
the command, commit and device that made it, and what the file holds is not run again. A method that
refuses a cell (too many rows, too few views) has a row that says why.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from sklearn.metrics.cluster import contingency_matrix

from experiments.lib import charts, folder, runner
from experiments.lib.command import Command, parse
from experiments.lib.data import DataSettings, Problem
from experiments.lib.progress import Progress
from experiments.lib.settings import flag_lines, flags_of
from experiments.lib.text import counted, spread
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.engine.traffic import of_run
from jaxfedmvc.metrics.host import METRICS, table_scores

# Names as the papers print them.
TITLES = {
    "comvc": "CoMVC",
    "cpspan": "CPSPAN",
    "dsimvc": "DSIMVC",
    "fcuif": "FCUIF",
    "feddmvc": "FedDMVC",
    "fedmvl": "FedMVL",
    "gcfagg": "GCFAgg",
    "hcp_imsc": "HCP-IMSC",
    "imvc_cbg": "IMVC-CBG",
    "jpltd": "JPLTD",
    "lmvsc": "LMVSC",
    "lsimvc": "LSIMVC",
    "mflvc": "MFLVC",
    "proimp": "ProImp",
    "simvc": "SiMVC",
}
COLUMNS: tuple[str, ...] = ("set", "x", "method", "seed", "status", *METRICS)
COLUMNS += ("rounds", "bytes_up", "bytes_down")
COLUMNS += ("compile_seconds", "seconds", "command", "commit", "device", "jax")
_CELL = ["set", "x", "method"]
_OK = "ok"


class Cell(NamedTuple):
    """A method on a partition.

    Attributes:
      set: As `data.load` takes it.
      x: What the partition is called: a ratio, or "complete".
      method: A name of `METHODS`.
      command: What is run; its seeds do not count.
    """

    set: str
    x: str
    method: str
    command: Command


def cell(
    dataset: str,
    ratio: str,
    method: str,
    n_clients: int,
    data_flags: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> Cell:
    """Returns a method on the samples of clients, of which some hold one view only.

    Vertical methods get an agent for each view, which holds the rows of the clients with its view.

    Args:
      dataset: As `data.load` takes it.
      ratio: Clients with all views : clients with one; "1:0" is complete data.
      method: A name of `METHODS`.
      n_clients: Clients of the partition.
      data_flags: Flags of `DataSettings` beside the set.
      settings: Flags of the method.
    """
    if METHODS[method].topology == "vertical":
        split = ["--split=views"]
        split += [f"--hybrid={ratio}", f"--hybrid_clients={n_clients}"] * (ratio != "1:0")
    else:
        split = [f"--ratio={ratio}", f"--n_clients={n_clients}"]
    arguments = [f"--algorithm={method}", f"--dataset={dataset}", *split, *data_flags, *settings]
    name = "complete" if ratio == "1:0" else ratio
    return Cell(dataset, name, method, parse(arguments))


def check_share(share: float) -> None:
    """Checks a share of the training.

    Raises:
      ValueError: It is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"peers_training: got {share}; allowed is more than 0, at most 1")


def shortened(method: str, share: float) -> list[str]:
    """Returns the flags by which a deep method trains for a share of its default schedule.

    That is a share of all epochs and optimisation steps; a method that makes several runs and keeps
    one makes fewer of them, each whole. Methods without training have no such flags.

    Args:
      method: A name of `METHODS`.
      share: In (0, 1]; 1 is the default schedule.

    Raises:
      ValueError: `share` is not in (0, 1].
    """
    check_share(share)
    if share == 1:
        return []
    fields = dataclasses.fields(METHODS[method].config)
    default: dict[str, Any] = {field.name: field.default for field in fields}
    epochs = [name for name in default if name.endswith("epochs") or name == "steps"]
    names = ["n_runs"] if "n_runs" in default else epochs
    return [f"--{name}={max(1, round(share * default[name]))}" for name in names]


def title_of(table: str, n_seeds: int, share: float) -> str:
    """Returns the title of a table's picture; `share` is that of the training."""
    part = "" if share == 1 else f", {share:g} of the training"
    return f"{table}: comparison methods, {counted(n_seeds, 'seed')}{part}"


def data_flags_of(command: Command) -> list[str]:
    """Returns a command's flags of `DataSettings` but for the set."""
    shared = set(flags_of(DataSettings)) - {"dataset"}
    return list(flag_lines(command.flags, set(command.flags) - shared))


# --- Running --------------------------------------------------------------------------------------


def read_peers(path: Path) -> pd.DataFrame:
    """Reads peers.csv; no rows if it is absent."""
    text = dict.fromkeys((*_CELL, "status", "command", "commit", "device", "jax"), str)
    return folder.read_appended(path, COLUMNS, dtype=text)


def run_peers(
    cells: Sequence[Cell], seeds: Sequence[int], path: Path, progress: Progress
) -> pd.DataFrame:
    """Runs what `path` lacks; returns all rows of these cells and seeds.

    Args:
      cells: What is run.
      seeds: Of the runs, and of the partitions.
      path: Of peers.csv, which is appended to.
      progress: Where runs are counted.

    Raises:
      ValueError: The file holds a cell's runs with other settings, or has other columns.
    """
    folder.check_columns(path, COLUMNS)
    known = read_peers(path)
    for one in cells:
        _check_settings(one, known, path)
    done = set(known[[*_CELL, "seed"]].itertuples(index=False, name=None))
    todo = [(c, [s for s in seeds if (c.set, c.x, c.method, s) not in done]) for c in cells]
    left = {f"{c.set} {c.x} {c.method}": len(missing) for c, missing in todo}
    progress.expect(left)
    for one, missing in todo:
        if missing:
            run_cell(one, missing, path, progress, {}, " ".join(one[:3]))
            jax.clear_caches()  # programs of many methods would exhaust the memory maps
    found = read_peers(path)
    mine = pd.MultiIndex.from_frame(found[_CELL]).isin([(c.set, c.x, c.method) for c in cells])
    return found[mine & found["seed"].isin(seeds)]


def _check_settings(one: Cell, known: pd.DataFrame, path: Path) -> None:
    mine = known[(known[_CELL] == [one.set, one.x, one.method]).all(axis=1)]
    what = f"{path}: holds runs of {one.method} on {one.set} {one.x}"
    folder.check_settings(
        mine, one.command.flag_lines(), lambda arguments: parse(arguments).flag_lines(), what
    )


def run_cell(
    one: Cell,
    seeds: Sequence[int],
    path: Path,
    progress: Progress,
    compiled: dict[Any, Any],
    kind: str,
    setting: str = "",
) -> bool:
    """Runs a cell, appending a row for each seed; returns whether it was not refused.

    Args:
      one: What is run.
      seeds: Of the runs.
      path: What is appended to.
      progress: Where runs are counted.
      compiled: Programs of the same partition by their static settings; is added to.
      kind: As what `progress` expects them.
      setting: What is said of them beside.
    """
    row: dict[str, Any] = {"status": _OK}
    for seed in seeds:
        command = parse([*one.command.arguments, f"--seed={seed}", "--seeds=1"])
        row = {**dict.fromkeys(COLUMNS, ""), "set": one.set, "x": one.x, "method": one.method}
        row |= {"seed": seed, **folder.made_by(command.arguments)}
        try:
            job = runner.prepare(command)
            if job.config not in compiled:  # all seeds' partitions have the same shapes
                compiled[job.config] = runner.steps_of(job)
                compiled[job.config].compile(progress.compiling)
            steps = compiled[job.config].with_numbers(job.hyperparams)
            row |= {"status": _OK} | _one_run(job, steps, seed)
            progress.write(
                f"{kind}{setting}, seed {seed}: ACC {row['acc']:.3f}, {row['seconds']:.1f} s"
            )
        except ValueError as error:
            row["status"] = f"refused: {error}"
            progress.write(f"{kind}: {row['status']}")
        folder.append_rows(path, [row])
        progress.done(kind)
    return row["status"] == _OK


def _one_run(job: runner.Job, steps: Any, seed: int) -> dict[str, Any]:
    key, problem = jax.random.key(seed), job.problems[0]
    federation = problem.federation.without_labels()
    began = time.perf_counter()
    state, made = runner.trained(steps, job, federation, key)
    found = steps.evaluate(federation, key, state, max(made - 1, 0))
    seconds = time.perf_counter() - began
    sent = of_run(steps.traffic(), made)
    moved = {"bytes_up": sent.up, "bytes_down": sent.down}
    numbers = {"rounds": made, "seconds": round(seconds, 2)}
    numbers |= {"compile_seconds": round(steps.seconds, 1)}
    return numbers | moved | sample_scores(problem, found.labels)


def sample_scores(problem: Problem, labels: Sequence[np.ndarray]) -> dict[str, float]:
    """Scores every sample once, whoever holds it; agents must agree on their labels.

    Args:
      problem: With labels.
      labels: For each cohort int [clients, rows].

    Raises:
      ValueError: Two agents give a sample different labels.
    """
    assert problem.labels is not None
    found = np.full(len(problem.labels), -1)
    for cohort, mine in zip(problem.federation.cohorts, labels, strict=True):
        mask = np.asarray(cohort.mask)
        ids, mine = np.asarray(cohort.sample_ids)[mask], np.asarray(mine)[mask]
        if ((found[ids] >= 0) & (found[ids] != mine)).any():
            raise ValueError("agents give samples labels of their own; score each agent's instead")
        found[ids] = mine
    held = found >= 0
    return table_scores(contingency_matrix(problem.labels[held], found[held]))


# --- What is shown --------------------------------------------------------------------------------


def compare(runs: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Returns a line for each cell: our means and deviations, and what the paper prints.

    Args:
      runs: As `run_peers` returns them.
      published: By set, x and the paper's name of the method: scores as fractions.

    Returns:
      set, x, method, seeds, for each metric mean, sample deviation and "published", megabytes (up
      and down), seconds (of a run, compilation apart), and what a method that refused said.
    """
    lines = []
    for (dataset, x, method), mine in runs.groupby(_CELL, sort=False):
        ok, title = mine[mine["status"] == _OK], TITLES.get(method, method)
        line: dict[str, Any] = {"set": dataset, "x": x, "method": title, "seeds": len(ok)}
        paper: Mapping[str, float] = (
            published.loc[(dataset, x, title)].to_dict()
            if (dataset, x, title) in published.index
            else {}
        )
        for metric in METRICS:
            values = ok[metric].astype(float)
            line |= {metric: values.mean(), f"{metric}_std": values.std(ddof=1)}
            line[f"{metric}_published"] = paper.get(metric, np.nan)
        line["megabytes"] = (ok["bytes_up"].astype(float) + ok["bytes_down"].astype(float)).mean()
        line["megabytes"] /= 1e6
        line["seconds"] = ok["seconds"].astype(float).mean()
        line["refused"] = "" if len(ok) else mine["status"].iloc[0].removeprefix("refused: ")
        lines.append(line)
    return pd.DataFrame(lines)


def shown(table: pd.DataFrame, titles: Mapping[str, str]) -> pd.DataFrame:
    """Returns the table of `compare` as text; `titles` are the sets' names."""

    def number(value: float, form: str) -> str:
        return "" if np.isnan(value) else format(value, form)

    columns: dict[str, Any] = {
        "set": table["set"].map(lambda name: titles.get(name, name)),
        "partition": table["x"],
        "method": table["method"],
        "seeds": table["seeds"].astype(str),
    }
    for metric in ("acc", "nmi", "ari"):
        name = metric.upper()
        columns[name] = [
            spread(*pair) for pair in table[[metric, f"{metric}_std"]].itertuples(index=False)
        ]
        if metric == "acc" and "acc_tuned" in table:
            best = table[["acc_tuned", "acc_tuned_std", "tuned_of"]].itertuples(index=False)
            columns["ACC, best of a grid by labels"] = [
                f"{spread(mean, std)} of {n:.0f}" if n else "" for mean, std, n in best
            ]
        columns[f"{name}, published"] = [number(v, ".3f") for v in table[f"{metric}_published"]]
    columns["MB"] = [number(v, ".1f") for v in table["megabytes"]]
    columns["seconds"] = [number(v, ".1f") for v in table["seconds"]]
    return pd.DataFrame(columns)


def markdown(
    table: pd.DataFrame, titles: Mapping[str, str], absent: Mapping[str, str] | None = None
) -> str:
    """Returns the table of `compare` in Markdown, with a line for each refusal below.

    Args:
      table: As `compare` returns it.
      titles: The sets' names.
      absent: Sets of the paper that nobody could run, and why: a line for each, too.
    """
    text = shown(table, titles)
    lines = ["| " + " | ".join(text.columns) + " |", "|---" * text.shape[1] + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in text.to_numpy()]
    refused = table[table["refused"] != ""]
    notes = [
        f"- {line['method']}, {titles.get(line['set'], line['set'])} {line['x']}: {line['refused']}"
        for _, line in refused.iterrows()
    ]
    notes += [f"- {name}: no run. {why}" for name, why in (absent or {}).items()]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def draw(path: Path, table: pd.DataFrame, titles: Mapping[str, str], title: str) -> list[str]:
    """Draws ACC of every method, ours beside the published, a panel for each set and partition.

    Returns:
      The picture's name, or nothing where all methods refused and there is nothing to draw.
    """
    panels: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for (dataset, x), mine in table[table["seeds"] > 0].groupby(["set", "x"], sort=False):
        panel = panels.setdefault(f"ACC, {titles.get(dataset, dataset)} {x}", {})
        for _, line in mine.sort_values("acc").iterrows():
            pair = {"here": (line["acc"], np.nan_to_num(line["acc_std"]))}
            if not np.isnan(line["acc_published"]):
                pair["published"] = (line["acc_published"], 0.0)
            if line.get("tuned_of", 0):
                best = line["acc_tuned"], np.nan_to_num(line["acc_tuned_std"])
                pair["here, best of a grid by labels"] = best
            panel[line["method"]] = pair
    if not panels:
        return []
    charts.bars(path, panels, "ACC", title)
    return [path.name]
