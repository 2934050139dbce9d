"""MGCD's tables 2 to 4 and figures 3 to 5, read from runs and set beside the paper's numbers.

The paper's code is not public, four of its six sets are not at hand as they were used, and it says
neither how many rounds and epochs it ran nor over how many seeds; see docs/methods/mgcd.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.lib import charts, plots, runner
from experiments.lib.command import Command
from experiments.lib.progress import Progress
from experiments.lib.text import spread
from experiments.mgcd.runs import (
    ABLATED,
    ABLATION_SET,
    REPORTED,
    SETS,
    figure_4_rows,
    one_run,
)
from jaxfedmvc.engine.steps import Steps
from jaxfedmvc.metrics.host import METRICS

PUBLISHED = Path(__file__).parent / "published"


# --- Tables ---------------------------------------------------------------------------------------


def published(table: int) -> pd.DataFrame:
    """Returns the paper's rows: set, row and scores; of table 2 MGCD and the best other method."""
    found = pd.read_csv(PUBLISHED / f"table{table}.csv").rename(columns={"PUR": "purity"})
    if table == 2:
        names = {"ACC": "acc", "NMI": "nmi", "ARI": "ari", "PUR": "purity"}
        found = found.replace({"metric": names}).rename(columns={"dataset": "set"})
        found = found.pivot(index=["set", "method"], columns="metric", values="value").reset_index()
        is_own = found["method"] == "MGCD"
        best = found[~is_own].groupby("set")["acc"].idxmax()
        found = pd.concat([found[is_own], found.loc[best]])
        found["row"] = "paper: " + found["method"]
    else:
        found["set"], found["row"] = ABLATION_SET, "paper: " + found["item"].map(ABLATED)
    return found.rename(columns=str.lower)[["set", "row", *METRICS]]


def published_peers() -> pd.DataFrame:
    """Returns all of the paper's table 2 by set, "complete" and method."""
    found = pd.read_csv(PUBLISHED / "table2.csv").replace(
        {"metric": {"ACC": "acc", "NMI": "nmi", "ARI": "ari", "PUR": "purity"}}
    )
    found["set"], found["x"] = found["dataset"].replace(SETS), "complete"
    return found.pivot(index=["set", "x", "method"], columns="metric", values="value")


def summarise(runs: pd.DataFrame, paper: pd.DataFrame | None = None) -> pd.DataFrame:
    """Returns for each set the paper's rows, then the measured ones.

    Args:
      runs: As `runs.run_cells` returns them.
      paper: As `published` returns it.

    Returns:
      set, row, seeds and for each score mean and deviation over seeds.
    """
    groups = runs[runs["acc"].notna()].groupby(["set", "row"], sort=False)[list(METRICS)]
    means = groups.mean().join(groups.std().add_suffix("_std"))
    means.insert(0, "seeds", groups.size())
    measured = means.reset_index()
    place = {name: i for i, name in enumerate(measured["set"].unique())}
    known = paper[paper["set"].isin(place)] if paper is not None else None
    found = pd.concat([known, measured])[measured.columns].astype({"seeds": "Int64"})
    by_set = found["set"].map(place)
    return found.iloc[np.argsort(by_set, kind="stable")].reset_index(drop=True)


def text(found: pd.DataFrame) -> str:
    """Returns a table of `summarise` for the terminal."""
    cells = {
        metric.upper(): [
            spread(mean, std)
            for mean, std in found[[metric, f"{metric}_std"]].itertuples(index=False)
        ]
        for metric in METRICS
    }
    seeds = ["" if pd.isna(n) else str(n) for n in found["seeds"]]
    index = pd.MultiIndex.from_frame(found[["set", "row"]], names=(None, None))
    return pd.DataFrame({"seeds": seeds} | cells, index=index).to_string()


def draw_table(path: Path, found: pd.DataFrame, title: str) -> None:
    """Draws bars of ACC and NMI for each set; an x where a row has no score."""
    panels: dict[str, dict[str, dict[str, tuple[float, float]]]] = {"ACC": {}, "NMI": {}}
    # Published rows and single seeds have no deviation.
    for row in found.fillna({"acc_std": 0.0, "nmi_std": 0.0}).to_dict("records"):
        for panel, metric in (("ACC", "acc"), ("NMI", "nmi")):
            bars = panels[panel].setdefault(row["set"], {})
            bars[row["row"]] = (row[metric], row[f"{metric}_std"])
    charts.bars(path, panels, "score", title)


# --- Figures --------------------------------------------------------------------------------------


def figure_3(
    path: Path, rows: Mapping[str, Command], seed: int, progress: Progress
) -> dict[str, float]:
    """Draws t-SNE maps of what clusterings see: raw views, and both modes' spectral embeddings.

    Returns:
      The ACC of each mode.
    """
    maps, found = {}, {}
    progress.expect({name: command.rounds for name, command in rows.items()})
    for name, command in rows.items():
        job = runner.prepare(command)
        steps = Steps(job.make, job.hyperparams, job.federation)
        rounds, state = one_run(job, steps, seed, progress, name)
        problem, found[name] = job.problems[0], rounds[-1]["acc"]
        maps["raw views side by side"] = np.concatenate(problem.views, axis=1)
        title = f"MGCD, {name} (ACC {found[name]:.3f})"
        maps[title] = np.asarray(state.server.clusters.embedding)
    title = f"t-SNE by true class, {SETS[ABLATION_SET]} for the paper's Aloi, seed {seed}"
    assert problem.labels is not None
    plots.maps(path, maps, problem.labels, title, problem.called)
    return found


def by_round(runs: pd.DataFrame, name: str, column: str) -> charts.Line:
    """Returns round, mean and deviation over seeds; a run that ended earlier stays where it was."""
    wide = runs[runs["row"] == name].pivot(index="round", columns="seed", values=column)
    wide = wide.reindex(range(1, int(runs["round"].max()) + 1)).ffill()
    return list(zip(wide.index, wide.mean(axis=1), wide.std(axis=1), strict=True))


def draw_figure_4(path: Path, runs: pd.DataFrame) -> None:
    """Draws ACC and NMI of the consistency graph and of the mean diversity graph by round."""
    panels = {
        f"{name}: {metric.upper()}": {
            f"{graph} graph": by_round(runs, name, f"{graph}/{metric}") for graph in REPORTED
        }
        for name in figure_4_rows()
        if (runs["row"] == name).any()
        for metric in ("acc", "nmi")
    }
    charts.lines(path, panels, "round", "score", f"MGCD, figure 4 on {SETS[ABLATION_SET]}")


def draw_figure_5(path: Path, runs: pd.DataFrame) -> None:
    """Draws NMI against gamma and lambda, and losses and NMI by round of the printed ones.

    Args:
      path: Folder of figure5_weights.png and figure5_rounds.png.
      runs: Of `figure_5_rows`.
    """
    title = f"MGCD, figure 5 on {SETS[ABLATION_SET]}"
    panels: dict[str, dict[str, charts.Line]] = {}
    found = summarise(runs)
    found[["name", "weight"]] = found["row"].str.split("=", expand=True)
    for name, rows in found.dropna(subset="weight").groupby("name", sort=False):
        points = zip(rows["weight"].astype(float), rows["nmi"], rows["nmi_std"], strict=True)
        panels[name] = {"NMI, literal": list(points)}
    charts.lines(path / "figure5_weights.png", panels, "weight", "NMI", title, log_x=True)
    columns = ("client_loss", "server_loss", "consistency/acc", "consistency/nmi")
    panels = {name: {"literal": by_round(runs, "gamma=100", name)} for name in columns}
    charts.lines(path / "figure5_rounds.png", panels, "round", "value", title)
