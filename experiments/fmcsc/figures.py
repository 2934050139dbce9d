"""FMCSC's figures 3 and 6 and table 5: what is read from runs themselves, not from their scores.

And the pictures of figure 2 and table 2, which are drawn from runs.csv.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from experiments.fmcsc.rows import ABLATIONS, SETS, Row
from experiments.fmcsc.tables import PUBLISHED
from experiments.lib import charts, plots, plots_sweep, runner
from experiments.lib.data import Problem
from experiments.lib.folder import made_by
from experiments.lib.progress import Progress
from experiments.lib.report import client_reports
from jaxfedmvc.engine.steps import Evaluation, Steps
from jaxfedmvc.engine.traffic import of_run
from jaxfedmvc.federation import Federation
from jaxfedmvc.files import write_text

# What a maker adds to summary.json.
Facts = dict[str, Any]


class Run(NamedTuple):
    """One seed of a row, after its last round.

    Attributes:
      row: What was run.
      seed: Of the run.
      problem: Its data.
      infos: Of each round what was reported in its phases.
      found: Labels, embedding, state.
      steps: Its programs.
      seconds: Without tracing and compiling.
    """

    row: Row
    seed: int
    problem: Problem
    infos: list[list[Any]]
    found: Evaluation
    steps: Steps
    seconds: float


def _runs(rows: Sequence[Row], progress: Progress) -> Iterator[Run]:
    """Makes the runs of all rows and seeds."""
    progress.expect({"runs": sum(row.command.job.seeds for row in rows)})
    for i, row in enumerate(rows):
        job, settings = runner.prepare(row.command), row.command.job
        progress.compiling(i, len(rows), row.name)
        steps = _steps(job)
        for seed, problem in zip(settings.all_seeds, job.problems, strict=True):
            federation, key = problem.federation.without_labels(), jax.random.key(seed)
            infos, compiling, began = [], steps.seconds, time.perf_counter()
            state, _ = steps.setup(federation, key, steps.start(federation, key))
            for r in range(row.command.rounds):
                state, info = steps.one_round(federation, key, state, r)
                infos.append(info)
            found = steps.evaluate(federation, key, state, max(row.command.rounds - 1, 0))
            seconds = time.perf_counter() - began - (steps.seconds - compiling)
            progress.done("runs")
            yield Run(row, seed, problem, infos, found, steps, seconds)
        jax.clear_caches()


def _steps(job: runner.Job) -> Steps:
    """Returns the compiled programs of a row."""
    steps = runner.steps_of(job)
    steps.compile()
    return steps


# --- Figures 3 and 6, table 5 ---------------------------------------------------------------------


def figure_3(rows: Sequence[Row], folder: Path, progress: Progress) -> Facts:
    """Draws t-SNE maps of H of the first client with all views, with and without component A."""
    maps: dict[str, dict[str, np.ndarray]] = {}
    truth: dict[str, np.ndarray] = {}
    called: dict[str, Callable[[int], str]] = {}
    for run in _runs(rows, progress):
        federation, dataset = run.problem.federation, run.row.set
        full = [federation.holds_all_views(cohort) for cohort in federation.cohorts]
        c = full.index(True)
        real = np.asarray(federation.cohorts[c].mask[0])
        assert run.found.embedding is not None and federation.labels is not None
        maps.setdefault(dataset, {})[ABLATIONS[run.row.x]] = run.found.embedding[c][0][real]
        called[dataset] = run.problem.called
        truth[dataset] = np.asarray(federation.labels[c][0])[real]
    for dataset, points in maps.items():
        title = f"H of one client with all views, by true class; {dataset}, seed {run.seed}"
        path = folder / f"figure3_{dataset}.png"
        plots.maps(path, points, truth[dataset], title, called[dataset])
    return {}


def figure_6(rows: Sequence[Row], folder: Path, progress: Progress) -> Facts:
    """Draws reconstruction, contrast and total loss of both kinds of clients, by round."""
    lines = [
        {"set": run.row.set, "row": run.row.name, "seed": run.seed, "round": r + 1}
        | losses
        | made_by(run.row.command.arguments)
        for run in _runs(rows, progress)
        for r, info in enumerate(run.infos)
        for losses in _losses(info, run.problem.federation)
    ]
    table = pd.DataFrame(lines)
    write_text(folder / "losses.csv", table.to_csv(index=False))
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for (dataset, kind, preset), mine in table.groupby(["set", "kind", "row"], sort=False):
        series = panels.setdefault(f"{SETS.get(dataset, dataset)}: {kind} clients", {})
        by_round = mine.groupby("round")
        for name in ("total", "reconstruction", "contrast"):
            means, stds = by_round[name].mean(), by_round[name].std()
            series[f"{preset}: {name}"] = list(zip(means.index, means, stds, strict=True))
    title = "FMCSC: losses after local training, mean over the seeds"
    charts.lines(folder / "figure6.png", panels, "round", "loss", title, log_y=True)
    return {"rows": lines}


def _losses(info: list[Any], federation: Federation) -> Iterator[dict[str, Any]]:
    """Yields a round's losses of each kind of clients, means over those that report them."""
    reports = zip(client_reports(info), federation.cohorts, strict=True)
    known = [(report, federation.holds_all_views(c)) for report, c in reports if "loss" in report]
    for kind, is_full in (("multi-view", True), ("single-view", False)):
        if mine := [report for report, full in known if full == is_full]:
            parts = {
                name: float(np.concatenate([report[name] for report in mine]).mean())
                for name in ("reconstruction", "contrast")
            }
            yield {"kind": kind, "total": sum(parts.values())} | parts


def table_5(rows: Sequence[Row], folder: Path, progress: Progress) -> Facts:
    """Writes parameters of both kinds of models, bytes, and seconds with compilation apart."""
    paper = pd.read_csv(PUBLISHED / "table5.csv", index_col="dataset", dtype=str)
    lines = []
    for run in _runs(rows, progress):
        models = run.found.state.server.models
        sizes = {kind: sum(x.size for x in jax.tree.leaves(m)) for kind, m in models.items()}
        full = max(sizes, key=len)
        single = [size for kind, size in sizes.items() if kind != full]
        sent = sum(of_run(run.steps.traffic(), len(run.infos)))
        published = paper.reindex([SETS.get(run.row.set)]).fillna("-").iloc[0]
        parameters = (published[f"parameters_per_client_{kind}"] for kind in ("single", "multi"))
        lines.append(
            {
                "set": run.row.set,
                "row": run.row.name,
                "seed": run.seed,
                "parameters_single": f"{min(single)} to {max(single)}",
                "parameters_multi": sizes[full],
                "paper_parameters": " to ".join(parameters),
                "megabytes": round(sent / 1e6, 3),
                "compile_seconds": round(run.steps.seconds, 1),
                "seconds": round(run.seconds, 1),
                "paper_seconds_rtx3090": published["runtime_seconds_rtx3090"],
            }
            | made_by(run.row.command.arguments)
        )
    table = pd.DataFrame(lines)
    write_text(folder / "table.csv", table.to_csv(index=False))
    shown = table.drop(columns=["command", "commit", "jax"])
    progress.write("\n" + shown.T.to_string(header=False))
    return {"rows": lines}


MAKERS: dict[str, Callable[[Sequence[Row], Path, Progress], Facts]] = {
    "figure3": figure_3,
    "figure6": figure_6,
    "table5": table_5,
}


# --- Pictures of runs.csv -------------------------------------------------------------------------


def draw_ablation(path: Path, table: pd.DataFrame, title: str) -> None:
    """Draws table 2: ACC of every row of `tables.table_2`, a panel for each set."""
    panels: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for line in table.fillna({"acc_std": 0.0}).itertuples():
        panel = panels.setdefault(f"{SETS.get(line.set, line.set)}, ACC", {})
        name = line.row.partition(":")[0]
        left_out = textwrap.fill(ABLATIONS[line.x], 18)
        panel.setdefault(left_out, {})[name] = (line.acc, line.acc_std)
    charts.bars(path, panels, "ACC", title)


def draw_temperatures(folder: Path, runs: pd.DataFrame) -> None:
    """Draws figure 2: ACC over both temperatures, or over tau_m alone, for each set and preset."""
    taus = runs["x"].str.split(expand=True)
    scores = runs.assign(tau_m=taus[0], tau_p=taus[1], acc=runs["acc"].astype(float))
    for (dataset, name), mine in scores.groupby(["set", "row"], sort=False):
        cells = mine.groupby(["tau_m", "tau_p"], sort=False)["acc"]
        means, stds = (x.unstack(sort=False) for x in (cells.mean(), cells.std()))
        path = folder / f"figure2_{dataset}_{name}.png"
        seeds = mine["seed"].nunique()
        label = f"ACC, mean over {seeds} seeds" if seeds > 1 else "ACC"
        title = f"{SETS.get(dataset, dataset)}, {name}"
        if means.shape[1] == 1:
            points = zip(means.index.astype(float), means.iloc[:, 0], stds.iloc[:, 0], strict=True)
            charts.lines(
                path, {title: {label: list(points)}}, "tau_m", "ACC", "FMCSC: ACC over tau_m"
            )
        else:
            title = f"FMCSC: ACC over tau_m and tau_p, {title}"
            plots_sweep.heat_map(path, means, stds, title, label)
