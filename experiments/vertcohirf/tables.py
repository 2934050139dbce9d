"""The tables of VertCoHiRF's paper, read from trials and set beside the published numbers.

Two selections are reported beside the paper's: label-tuned, the setting of best score (as the paper
does), and unsupervised, the setting of best silhouette, which no label enters. A trial's score is
the mean over agents.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from jax.sharding import Mesh

from experiments.lib.data import Problem
from experiments.lib.folder import read_appended
from experiments.lib.progress import Progress
from experiments.lib.study import Rows
from experiments.lib.text import counted, spread
from experiments.vertcohirf.trials import BASELINES, LOCAL, OBJECTIVES, STEMS, methods
from jaxfedmvc import engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.vertcohirf import LocalStep, vertcohirf_of_steps
from jaxfedmvc.clustering.local import dbscan_method, kmeans_method
from jaxfedmvc.metrics import host

PUBLISHED = Path(__file__).parent / "published"
# Table -> set and score.
TABLES = {
    5 + 2 * i + j: (name, metric)
    for i, name in enumerate(STEMS)
    for j, metric in enumerate(OBJECTIVES)
}
_PAPER = {"collab_mean": "paper_mean", "collab_std": "paper_std", "diff_mean": "paper_diff"}
_OF_A_SEARCH = ["dataset", "method", "seed"]
_TITLES = {"tuned": "label-tuned", "unsupervised": "unsupervised", "paper": "paper"}
# k of the methods that are given one in table 1: the number of classes.
_TABLE_1_K = 6
_TABLE_1_ITERATIONS = 20
_ARI = ("ari_0", "ari_1")


def published(dataset: str, metric: str) -> pd.DataFrame:
    """Returns the paper's numbers of a table, by its names of methods."""
    found = pd.read_csv(PUBLISHED / "tables5_16.csv", index_col="method")
    chosen = (found["dataset"] == dataset) & (found["metric"] == metric)
    return found.loc[chosen, list(_PAPER)].rename(columns=_PAPER)


def best_trials(trials: pd.DataFrame, metric: str, by: str) -> pd.Series:
    """Chooses for each method and seed the trial of best agent-mean `by`.

    Args:
      trials: Of one set, as `trials.read_trials` returns them.
      metric: Score that is reported.
      by: Score that chooses.

    Returns:
      The agents' scores [agents] by (method, seed).
    """
    trials = trials[trials["search"].str.split(":").str[1].isin(("any", by))]
    values = trials[by].map(np.mean).astype(float)
    best = trials.loc[values.groupby([trials["method"], trials["seed"]]).idxmax()]
    return best.set_index(["method", "seed"])[metric].map(np.asarray)


def chosen(trials: pd.DataFrame) -> pd.DataFrame:
    """Returns the trials that the tables rest on, in their order, so few that they can be kept.

    Args:
      trials: As `trials.read_trials` returns them.

    Returns:
      For each set, method and seed the trial of best score by each of `OBJECTIVES`, named in
      "chosen_by", of as many as "tried" says; one that is best by both stands there twice.
    """
    kept = []
    for by in OBJECTIVES:
        mine = trials[trials["search"].str.split(":").str[1].isin(("any", by))]
        groups = mine[by].map(np.mean).astype(float).groupby([mine[name] for name in _OF_A_SEARCH])
        best = mine.loc[groups.idxmax()]
        kept.append(best.assign(chosen_by=by, tried=groups.size().to_numpy()))
    return pd.concat(kept).sort_index(kind="stable").reset_index(drop=True)


def by_seed(dataset: str, trials: pd.DataFrame, metric: str) -> dict[str, list[float]]:
    """Returns for each method and seed the agent-mean score of the trial that is best by it."""
    best = best_trials(trials[trials["dataset"] == dataset], metric, metric).map(np.mean)
    known = best.index.unique("method")
    return {name: best[name].tolist() for name in methods(dataset) if name in known}


def table(dataset: str, metric: str, trials: pd.DataFrame) -> pd.DataFrame:
    """Makes a table: for each method our two selections, and the paper's numbers.

    "Diff" is, for each seed, the median over agents of the chosen trial's score minus that of the
    agent's own local k-means, chosen in the same way.

    Args:
      dataset: One of `STEMS`.
      metric: One of `OBJECTIVES`.
      trials: Of any sets.

    Returns:
      A row for each method, in the order of the paper; NaN where there is no number.
    """
    columns: dict[str, pd.Series] = {}
    for how, by in (("tuned", metric), ("unsupervised", "Silhouette")):
        best = best_trials(trials[trials["dataset"] == dataset], metric, by)
        means = best.map(np.mean).astype(float).groupby("method")
        alone = best.get(LOCAL, pd.Series(dtype=object))
        gains = pd.Series(
            {
                (name, seed): float(np.median(values - alone[seed])) if seed in alone else np.nan
                for (name, seed), values in best.items()
            }
        )
        columns[f"{how}_mean"], columns[f"{how}_std"] = means.mean(), means.std()
        columns[f"{how}_diff"] = gains.groupby(level=0).mean()
        columns.setdefault("seeds", means.size())
    found = pd.DataFrame(columns)
    names = {name: row.published for name, row in methods(dataset).items() if name in found.index}
    paper = published(dataset, metric).reindex(names.values()).set_axis(list(names))
    found = found.loc[list(names)].join(paper).rename_axis("method").reset_index()
    found.insert(0, "metric", metric)
    found.insert(0, "dataset", dataset)
    return found


def text(found: pd.DataFrame) -> str:
    """Returns a table for the terminal."""
    cells = {}
    for how, title in _TITLES.items():
        numbers = found[[f"{how}_mean", f"{how}_std"]].itertuples(index=False)
        cells[title, "mean"] = [spread(mean, std) for mean, std in numbers]
        cells[title, "diff"] = ["-" if np.isnan(x) else f"{x:+.3f}" for x in found[f"{how}_diff"]]
    return pd.DataFrame(cells, index=list(found["method"])).to_string()


def published_table_1() -> pd.DataFrame:
    """Returns the paper's ARI of agents 0 and 1 by method."""
    paper = pd.read_csv(PUBLISHED / "table1.csv", index_col="method")
    return paper[["ARI_agent0", "ARI_agent1"]]


def table_1(
    problem: Problem,
    seeds: Sequence[int],
    path: Path,
    progress: Progress,
    mesh: Mesh | None = None,
    made_by: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Makes table 1 as the paper's was computed: one data set, several runs.

    Args:
      problem: The multimodal set, two agents.
      seeds: Of the runs.
      path: Of the rows, a .csv with method, seed, ari_0 and ari_1; those that are there are kept.
      progress: Where the table is printed, a line as it is ready.
      mesh: Whose devices take a seed each; None: one device.
      made_by: What rows say beside.
    """
    algorithms: dict[str, FederatedAlgorithm] = {}
    for title, name in BASELINES.items():
        method = METHODS[name]
        algorithms[title] = method.make(method.config(_TABLE_1_K), None)
    algorithms["VertCoHiRF"] = vertcohirf_of_steps(
        [LocalStep(dbscan_method(0.35, 5)), LocalStep(kmeans_method(3), 1.0, 2)]
    )
    paper = published_table_1()
    rows = Rows(path, ["method"])
    progress.expect({name: len(rows.left({"method": name}, seeds)) for name in algorithms})
    progress.write(
        f"\ntable 1, ARI of agents 0 and 1, {counted(len(seeds), 'run')} on the data of seed 0"
    )
    progress.write(f"{'':28s}{'agent 0':>16s}{'agent 1':>16s}{'paper':>18s}")
    federation, result = problem.federation, {}
    for name, algorithm in algorithms.items():
        rounds = _TABLE_1_ITERATIONS if name == "VertCoHiRF" else 0
        run = jax.jit(lambda f, key, a=algorithm, r=rounds: engine.run(a, f, key, r).labels)

        def one(seed: int, run: Any = run) -> dict[str, Any]:
            labels = run(federation.without_labels(), jax.random.key(seed))
            scores = [host.table_scores(table)["ari"] for table in host.tables(federation, labels)]
            return {**dict(zip(_ARI, scores, strict=True)), **made_by}

        rows.make({"method": name}, one, seeds, mesh, functools.partial(progress.done, name))
        # As they were written: pandas before 3.1 rounds.
        made = read_appended(path, (), converters=dict.fromkeys(_ARI, float))
        runs = made.query("method == @name")
        found = runs[runs["seed"].isin(seeds)][list(_ARI)]
        mean, std, theirs = found.mean(), found.std(), paper.loc[name].tolist()
        cells = "".join(f"{spread(m, s):>16s}" for m, s in zip(mean, std, strict=True))
        progress.write(f"{name:28s}{cells}{f'{theirs[0]:.3f}, {theirs[1]:.3f}':>18s}")
        result[name] = {"mean": mean.tolist(), "std": std.tolist(), "paper": theirs}
    return result
