"""VertCoHiRF with settings chosen without labels, beside local k-means that is told the classes.

    python -m experiments.vertcohirf.unsupervised --sets=digits,Mfeat --seeds=5

For each set and seed (which splits the features of sets of one view, and draws the rows of large
sets) it makes the trial runs of `jaxfedmvc.algorithms.vertcohirf.choice` and scores by ARI:
k-means of each agent with the true number of clusters, the trial that is chosen without labels, the
best trial by labels, which is as far as any choice could come, and the consensus of the labels that
agents sent first, by which the trial is chosen. Local k-means is told the number of clusters, so
the trial that is chosen by the consensus in as many clusters, and that consensus, are scored, too.
Every row is appended to runs.csv as it is made, and --resume goes on with what that holds; so does
another job that is given it as --runs_file.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from sklearn.metrics import adjusted_rand_score

from experiments.lib import folder
from experiments.lib.command import JobSettings, checked, without
from experiments.lib.data import DataSettings, VerticalSettings, fingerprint, load_agents
from experiments.lib.devices import each
from experiments.lib.progress import Progress
from experiments.lib.references import k_means
from experiments.lib.settings import flag_lines
from experiments.lib.study import Study, check_table, parse, parse_or_exit, write_summary
from experiments.lib.text import spread
from experiments.vertcohirf.choice import of_trials
from jaxfedmvc import data
from jaxfedmvc.algorithms.vertcohirf import VertCoHiRFConfig, VertCoHiRFHyperparams, choice
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.federation import Federation

# As `experiments.run` lets a run end.
_ROUNDS = 100
COLUMNS: tuple[str, ...] = ("set", "seed", "samples", "agents", "classes")
COLUMNS += ("local_mean", "local_best")
COLUMNS += ("local_clusters", "relaxed_agents", "clusters", "agreement", "ari")
COLUMNS += ("tuned_local_clusters", "tuned_relaxed_agents", "tuned_ari")
COLUMNS += ("consensus_clusters", "consensus_ari")
COLUMNS += ("told_clusters", "told_ari", "told_consensus_ari")
COLUMNS += ("seconds", "command", "commit", "device", "jax")
_SHOWN = {
    "local_mean": "local k-means, mean",
    "local_best": "best agent",
    "ari": "chosen without labels",
    "tuned_ari": "label-tuned",
    "consensus_ari": "consensus of labels",
    "told_ari": "chosen, told how many",
    "told_consensus_ari": "consensus, told how many",
}


@dataclasses.dataclass(frozen=True)
class UnsupervisedSettings:
    """What is run.

    Attributes:
      sets: Named sets, or paths.
      max_rows: Rows that are drawn of larger sets.
      runs_file: Rows to begin with; new ones are appended to it.
    """

    sets: tuple[str, ...] = ("digits",)
    max_rows: int = 2000
    runs_file: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError that names the setting."""
        if not self.sets:
            raise ValueError("sets: got none; allowed is one or more")
        if self.max_rows < 3:
            raise ValueError(f"max_rows: got {self.max_rows}; allowed is 3 or more")


# Flags that change no row.
_NOT_RECORDED = {
    "compilation_cache",
    "data_dir",
    "noprogress",
    "output_dir",
    "progress",
    "resume",
    "runs_file",
}
# And those that rows of one table may differ in.
_OF_A_RUN = {*_NOT_RECORDED, "mesh", "seed", "seeds", "sets"}
_FLAGS = {
    UnsupervisedSettings: None,
    JobSettings: ("seed", "seeds"),
    DataSettings: ("data_dir",),
}


@folder.stoppable
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, and prints the table."""
    study = parse_or_exit(arguments, __doc__, _FLAGS, {"seeds": "5"})
    settings: UnsupervisedSettings = checked(partial(study.read, UnsupervisedSettings))
    seeds = checked(partial(study.read, JobSettings)).all_seeds
    data_dir = study.read(DataSettings).data_dir
    checked(partial(check_table, "runs_file", settings.runs_file, COLUMNS))
    for name in settings.sets:
        checked(partial(_agents, name, data_dir, seeds[0], settings.max_rows))
    read_sets = {name: fingerprint(data.load(name, data_dir)) for name in settings.sets}
    path = checked(partial(study.open, "vertcohirf-unsupervised", read_sets))
    file = Path(settings.runs_file or path / "runs.csv")
    given = without(sys.argv[1:] if arguments is None else arguments, _NOT_RECORDED)
    made_by = folder.made_by(given)
    folder.check_columns(file, COLUMNS)
    recorded = read(file)
    recorded = recorded[recorded["set"].isin(settings.sets) & recorded["seed"].isin(seeds)]
    checked(partial(check_settings, study, recorded, file))
    done = set(recorded[["set", "seed"]].itertuples(index=False, name=None))
    todo = [(name, s) for name in settings.sets for s in seeds if (name, s) not in done]

    def one(place: tuple[str, int]) -> dict[str, Any]:
        name, seed = place
        return one_run(*_agents(name, data_dir, seed, settings.max_rows), seed)

    with Progress(study.folder.progress) as progress:
        progress.expect({"run": len(todo)})
        for (name, seed), found in zip(todo, each(one, todo, study.mesh), strict=True):
            row = {"set": name, "seed": seed} | found
            row |= made_by
            folder.append_rows(file, [{column: row[column] for column in COLUMNS}])
            jax.clear_caches()  # programs of many runs would exhaust the memory maps
            gc.collect()
            progress.done("run")
            progress.write(
                f"{name}, seed {seed}: local {row['local_mean']:.3f}, best agent"
                f" {row['local_best']:.3f}, chosen {row['ari']:.3f} ({row['clusters']} clusters),"
                f" label-tuned {row['tuned_ari']:.3f}, {row['seconds']:.0f} s"
            )
    runs = read(file)
    table = summary(runs[runs["set"].isin(settings.sets) & runs["seed"].isin(seeds)])
    print("\n" + shown(table))
    write_summary(path, {"seeds": seeds, "table": table.reset_index().to_dict("records")})
    print(f"written: {path}/")


def one_run(
    federation: Federation, views: Sequence[np.ndarray], labels: np.ndarray, seed: int
) -> dict[str, Any]:
    """Returns the scores of one seed.

    Args:
      federation: Agents of one view each.
      views: [n, D_v] of each.
      labels: Classes [n], for scoring.
      seed: Of all runs.
    """
    n_classes = len(np.unique(labels))
    alone = [adjusted_rand_score(labels, k_means(x, n_classes, seed)) for x in views]
    began = time.perf_counter()
    config = VertCoHiRFConfig(repetitions=1, refinements=choice.REFINEMENTS)
    hyper = VertCoHiRFHyperparams()
    key = jax.random.key(seed)
    trials = list(choice.trials(config, hyper, federation, key, rounds=_ROUNDS))
    found = of_trials(trials)
    seconds = time.perf_counter() - began
    scores = [adjusted_rand_score(labels, trial.labels) for trial in trials]
    tuned = int(np.argmax(scores))
    common, told_common = choice.common(trials), choice.common(trials, n_classes)
    told = choice.best_of(trials, n_classes)
    return {
        "samples": len(labels),
        "agents": len(views),
        "classes": n_classes,
        "local_mean": float(np.mean(alone)),
        "local_best": float(max(alone)),
        **found.tried.iloc[found.row].to_dict(),
        "local_clusters": found.local_clusters,
        "clusters": int(found.tried["clusters"].iloc[found.row]),
        "ari": scores[found.row],
        "tuned_local_clusters": trials[tuned].local_clusters,
        "tuned_relaxed_agents": trials[tuned].relaxed_agents,
        "tuned_ari": scores[tuned],
        "consensus_clusters": int(common.n_clusters),
        "consensus_ari": adjusted_rand_score(labels, np.asarray(common.labels)),
        "told_clusters": len(np.unique(trials[told].labels)),
        "told_ari": scores[told],
        "told_consensus_ari": adjusted_rand_score(labels, np.asarray(told_common.labels)),
        "seconds": round(seconds, 1),
    }


def check_settings(study: Study, recorded: pd.DataFrame, path: Path) -> None:
    """Checks that rows of an earlier job were made with the settings of this one.

    Raises:
      ValueError: Some have others.
    """
    folder.check_settings(
        recorded,
        flag_lines(study.flags, _OF_A_RUN),
        lambda arguments: flag_lines(parse(arguments, _FLAGS).flags, _OF_A_RUN),
        f"runs_file: {path} holds rows of these sets and seeds",
    )


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns mean and sample deviation over the seeds of each score, by set in order of rows."""
    groups = runs.groupby("set", sort=False)
    scores = groups[list(_SHOWN)]
    table = scores.mean().join(scores.std(ddof=1).add_suffix("_std"))
    shape = groups[["samples", "agents", "classes"]].first().join(groups.size().rename("seeds"))
    clusters = groups[["clusters", "consensus_clusters"]].mean()
    return shape.join(table).join(clusters)


def shown(table: pd.DataFrame) -> str:
    """Returns the table of `summary` in Markdown, and on how many sets the choice is as good."""
    head = ["set", "samples, agents, classes", *_SHOWN.values(), "clusters, chosen and consensus"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, row in table.iterrows():
        cells = [str(name), f"{row['samples']:.0f}, {row['agents']:.0f}, {row['classes']:.0f}"]
        cells += [spread(row[column], row[f"{column}_std"]) for column in _SHOWN]
        cells.append(f"{row['clusters']:.0f}, {row['consensus_clusters']:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for column in ("ari", "consensus_ari", "told_ari", "told_consensus_ari"):
        mean, best = (int((table[column] >= table[f"local_{x}"]).sum()) for x in ("mean", "best"))
        lines.append(
            f"{_SHOWN[column]}: at or above the mean of local k-means on {mean} of {len(table)}"
            f" sets, at or above the best agent on {best}"
        )
    return "\n".join(lines) + "\n"


def read(path: Path) -> pd.DataFrame:
    """Reads runs.csv; no rows if it is absent."""
    return folder.read_appended(path, COLUMNS)


def _agents(
    name: str, data_dir: str | None, seed: int, most: int
) -> tuple[Federation, list[np.ndarray], np.ndarray]:
    """Returns the agents of a set, their views, and the classes, of `most` rows at most.

    Raises:
      ValueError, OSError: The set cannot be read, or has no labels.
    """
    problem = load_agents(DataSettings(dataset=name, data_dir=data_dir), VerticalSettings(), seed)
    if problem.labels is None:
        raise ValueError(f"sets: {name} has no labels to score by")
    n = len(problem.labels)
    rows = np.sort(np.random.default_rng(seed).permutation(n)[:most])
    views, labels = [x[rows] for x in problem.views], np.asarray(problem.labels)[rows]
    partition = vertical_partition(len(rows), len(views))
    return Federation.from_arrays(views, partition=partition), views, labels


if __name__ == "__main__":
    main()
