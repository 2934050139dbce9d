"""Tables and figures of the vertical methods' papers, VertCoHiRF and MGCD, for `reproduce`.

Every trial is appended to trials.csv as it is made; give an unfinished job's file as --trials_file
and what it holds is not run again.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from sklearn.metrics import adjusted_rand_score

from experiments import base, mgcd_tables, vertcohirf_attack, vertical
from experiments import vertcohirf_tables as tables
from experiments.base import checked, seeds
from experiments.lib import plots
from experiments.progress import ProgressBar, require_tqdm
from experiments.vertical import SplitOptions, load_agents
from jaxfedmvc import engine
from jaxfedmvc.algorithms import (
    LocalStep,
    coreset_kmeans,
    distr_kmeans,
    dpfmps,
    dpfmps_p2est,
    local_kmeans,
    vertcohirf,
)
from jaxfedmvc.clustering.local import dbscan_method, kmeans_method

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(vertcohirf_attack)

flags.DEFINE_enum("paper", "vertcohirf", ["vertcohirf", "mgcd"], "Whose tables.")
flags.DEFINE_list("table", [], "Tables; vertcohirf: 1, or any of 5 to 16; mgcd: 2, 3, 4.")
flags.DEFINE_integer(
    "figure",
    None,
    "Figure; vertcohirf: 1 (attack), 4 (number of agents), 5 (box plots); mgcd: 3 (maps), 4 (graphs"
    " by round), 5 (convergence, weights).",
)
flags.DEFINE_integer("search_trials", 50, "Settings tried for each method and seed.", 1)
flags.DEFINE_integer("search_batch", 10, "Settings of one compiled program.", 1)
flags.DEFINE_enum("search", "random", ["random", "tpe"], "How settings are proposed.")
flags.DEFINE_integer(
    "max_local_clusters",
    30,
    "Largest C tried for VertCoHiRF's base clusterers: 30 in the paper's tables, 5 in its runs.",
    2,
)
flags.DEFINE_list("methods", [], "Rows that are run; empty: all. For mgcd's, with ; for commas.")
flags.DEFINE_list("sets", [], "Sets of vertcohirf's figure 5, or of mgcd's table 2; empty: all.")
flags.DEFINE_string(
    "trials_file", None, "Trials (mgcd: runs) to begin with; new ones are appended to it."
)

_FIGURE_4 = ("alizadeh-2000-v2", range(2, 7))
# k of the methods that are given one in table 1: the number of classes.
_TABLE_1_K = 6


def budget(agents: int = 3) -> tables.Budget:
    """What every method is given, from flags; five seeds unless told otherwise."""
    chosen = seeds() if FLAGS["seeds"].present else list(range(FLAGS.seed, FLAGS.seed + 5))
    split = SplitOptions(agents=agents, overlap=0.2)
    return tables.Budget(
        FLAGS.search_trials,
        FLAGS.search_batch,
        FLAGS.search,
        chosen,
        FLAGS.data_dir,
        FLAGS.methods,
        split,
        FLAGS.max_local_clusters,
    )


def what() -> tuple[list[int], int | None]:
    """Tables and figure, from flags.

    Raises:
      ValueError: None is asked for, or one that there is not.
    """
    allowed = {1, *tables.TABLES}
    try:
        wanted = [int(text) for text in FLAGS.table]
    except ValueError:
        wanted = [-1]
    if not set(wanted) <= allowed:
        raise ValueError(f"table: got {','.join(FLAGS.table)!r}; allowed are 1 and 5 to 16")
    if FLAGS.figure not in (None, 1, 4, 5):
        raise ValueError(f"figure: got {FLAGS.figure}; allowed are 1, 4 and 5")
    if bool(wanted) == (FLAGS.figure is not None):
        raise ValueError("table: give either --table or --figure")
    if FLAGS.search == "tpe":
        tables.require_optuna()
    names = {name for dataset in tables.BASES for name in tables.methods(dataset)}
    if not set(FLAGS.methods) <= names:
        raise ValueError(f"methods: got {','.join(FLAGS.methods)!r}; allowed are {sorted(names)}")
    if not set(FLAGS.sets) <= set(tables.STEMS):
        raise ValueError(f"sets: got {','.join(FLAGS.sets)!r}; allowed are {list(tables.STEMS)}")
    return wanted, FLAGS.figure


def searched(sets: Iterable[str], given: tables.Budget, path: Path) -> list[dict[str, str]]:
    """All trials of these sets, those that `path` lacks run now."""
    sets = list(sets)
    studies = len(tables.OBJECTIVES) if given.search == "tpe" else 1
    rows = [
        method
        for dataset in sets
        for method in tables.methods(dataset)
        if not given.only or method in given.only
    ]
    with ProgressBar(len(rows) * len(given.seeds) * given.trials * studies) as bar:
        for dataset in sets:
            checked(lambda name=dataset: tables.run_trials(name, given, path, bar))
    return [
        row
        for row in tables.read_trials(path)
        if int(row["seed"]) in given.seeds
        and row["search"]
        in [tables.search_name(given, row["method"], o) for o in ("any", *tables.OBJECTIVES)]
    ]


def check_trials_file(columns: set[str]) -> None:
    """Checks that trials with these columns can be read from the flag's file, and written to it.

    Raises:
      ValueError, OSError: They cannot.
    """
    if FLAGS.trials_file is None:
        return
    path = Path(FLAGS.trials_file)
    with path.open("a", newline=""):
        pass
    rows = tables.read_trials(path)
    if rows and not columns <= set(rows[0]):
        raise ValueError(f"trials_file: {path} holds something else")
    if path.stat().st_size == 0:
        path.unlink()


def main() -> None:
    """Runs what the flags ask for."""
    if FLAGS.paper == "mgcd":
        mgcd()
    else:
        vertcohirf_paper()


def mgcd() -> None:
    """Tables 2 to 4 and figures 3 to 5 of MGCD."""
    table, figure = checked(what_of_mgcd)
    base.use_compilation_cache()
    chosen = seeds() if FLAGS["seeds"].present else list(range(FLAGS.seed, FLAGS.seed + 5))
    cells = checked(lambda: mgcd_tables.cells(table, figure, FLAGS.sets, FLAGS.methods))
    checked(lambda: check_trials_file({"set", "row", "seed", "round"}))
    for name in cells:
        checked(lambda name=name: mgcd_tables.load(name))
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    label = f"figure{figure}" if figure else f"table{table}"
    folder = checked(lambda: base.make_folder(f"reproduce-mgcd-{label}"))
    path = Path(FLAGS.trials_file or folder / "runs.csv")
    found = checked(lambda: mgcd_tables.report(table, figure, cells, chosen, path, folder))
    vertical.write_summary(folder, {"paper": "mgcd", "what": label, "seeds": chosen} | found)
    print(f"\nwritten: {folder}/")


def what_of_mgcd() -> tuple[int | None, int | None]:
    """MGCD's table or figure, from flags.

    Raises:
      ValueError: None is asked for, or one that there is not.
    """
    if FLAGS.figure is not None and not FLAGS.table and FLAGS.figure in (3, 4, 5):
        return None, FLAGS.figure
    if FLAGS.figure is None and FLAGS.table in (["2"], ["3"], ["4"]):
        return int(FLAGS.table[0]), None
    raise ValueError(
        f"table: got {','.join(FLAGS.table)!r} and figure {FLAGS.figure}; allowed for mgcd is one"
        " of the tables 2, 3 and 4, or one of the figures 3, 4 and 5"
    )


def vertcohirf_paper() -> None:
    """What the flags ask for of VertCoHiRF."""
    wanted, figure = checked(what)
    if figure == 1:
        vertcohirf_attack.main()
        return
    base.use_compilation_cache()
    given = budget()
    sets = {tables.TABLES[t][0]: [] for t in wanted if t != 1} or (
        {name: ["ARI"] for name in FLAGS.sets or tables.STEMS} if figure == 5 else {}
    )
    for t in wanted:
        if t != 1:
            sets[tables.TABLES[t][0]].append(tables.TABLES[t][1])
    checked(lambda: check_trials_file({"dataset", "method", "seed", "search", "params"}))
    for dataset in sets or ([_FIGURE_4[0]] if figure == 4 else []):
        checked(
            lambda name=dataset: load_agents(
                tables.STEMS[name], given.seeds[0], given.split, data_dir=given.data_dir
            )
        )
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    label = f"figure{figure}" if figure else "table" + "_".join(map(str, wanted))
    folder = checked(lambda: base.make_folder(f"reproduce-vertcohirf-{label}"))
    path = Path(FLAGS.trials_file or folder / "trials.csv")
    summary: dict[str, Any] = {
        "trials": given.trials,
        "search": given.search,
        "seeds": given.seeds,
        "max_local_clusters": given.max_local,
    }
    if 1 in wanted:
        with ProgressBar(6 * len(given.seeds)) as bar:
            summary["table 1"] = table_1(given.seeds, bar)
    if figure == 4:
        summary["figure 4"] = figure_4(given, path, folder)
    if sets:
        rows = searched(sets, given, path)
        summary |= report(sets, rows, given, folder)
    vertical.write_summary(folder, summary)
    print(f"\nwritten: {folder}/")


def report(
    sets: dict[str, list[str]], trials: list[dict[str, str]], given: tables.Budget, folder: Path
) -> dict[str, Any]:
    """Prints the tables, writes them as .csv, and draws figure 5's box plots of ARI."""
    everything: dict[str, Any] = {}
    boxes: dict[str, dict[str, list[float]]] = {}
    for dataset, metrics in sets.items():
        for metric in metrics:
            rows = tables.table(dataset, metric, trials)
            print(
                f"\n{dataset}, {metric}: mean over agents, {len(given.seeds)} seeds, best of"
                f" {given.trials} {given.search} settings each"
            )
            for line in tables.lines(rows):
                print(line)
            everything[f"{dataset}, {metric}"] = rows
            if metric == "ARI":
                boxes[dataset] = tables.by_seed(dataset, trials, metric, metric)
    flat = [row for rows in everything.values() for row in rows]
    if flat:
        base.append_rows(folder / "tables.csv", flat)
    for dataset, groups in boxes.items():
        alone = groups.pop(tables.LOCAL, [])
        reference = {"local k-means": float(np.median(alone))} if alone else {}
        if groups:
            plots.boxes(
                folder / f"boxes_{tables.STEMS[dataset]}.png",
                groups,
                reference,
                "ARI",
                f"{dataset}, label-tuned, over feature splits",
            )
    return json.loads(json.dumps(everything, default=float).replace("NaN", "null"))


def figure_4(given: tables.Budget, path: Path, folder: Path) -> dict[str, Any]:
    """ARI against the number of agents, label-tuned, on one set."""
    dataset, counts = _FIGURE_4
    curves: dict[str, list[list[float]]] = {}
    for agents in counts:
        own = path.with_name(f"{path.stem}_{agents}_agents{path.suffix}")
        rows = searched([dataset], budget(agents), own)
        for name, values in tables.by_seed(dataset, rows, "ARI", "ARI").items():
            curves.setdefault(name, []).append(values)
    whole = {name: np.array(v).T for name, v in curves.items() if len(v) == len(counts)}
    plots.attack_bands(
        folder / "figure4.png",
        list(counts),
        whole,
        "agents",
        "ARI",
        f"{dataset}, label-tuned, {len(given.seeds)} feature splits",
    )
    print(f"\n{dataset}: label-tuned ARI for 2 to 6 agents")
    for name, values in curves.items():
        print(f"{name:28s}" + "".join(f"{np.mean(v):8.3f}" for v in values))
    return {name: [[float(x) for x in v] for v in values] for name, values in curves.items()}


def table_1(runs: list[int], bar: ProgressBar) -> dict[str, Any]:
    """The multimodal set as the paper's table was computed: one data set, several runs."""
    agents = load_agents("multimodal_table1", 0, SplitOptions())
    methods = {
        "KMeans (no collaboration)": local_kmeans(_TABLE_1_K),
        "Distr.KMeans": distr_kmeans(_TABLE_1_K),
        "CoresetKMeans": coreset_kmeans(_TABLE_1_K),
        "DPFMPS": dpfmps(_TABLE_1_K),
        "DPFMPS-P2Est": dpfmps_p2est(_TABLE_1_K),
        "VertCoHiRF": vertcohirf(
            [LocalStep(dbscan_method(0.35, 5)), LocalStep(kmeans_method(3), 1.0, 2)]
        ),
    }
    with (tables.PUBLISHED / "vertcohirf_table1.csv").open(newline="") as file:
        published = {row["method"]: row for row in csv.DictReader(file)}
    bar.write(f"\ntable 1, ARI of agents 0 and 1, {len(runs)} runs on the data of seed 0")
    bar.write(f"{'':28s}{'agent 0':>16s}{'agent 1':>16s}{'paper':>18s}")
    result = {}
    for name, algorithm in methods.items():
        rounds = 20 if name == "VertCoHiRF" else 0
        run = jax.jit(lambda f, k, a=algorithm, r=rounds: engine.run(a, f, k, r).labels)
        found = []
        for seed in runs:
            labels = run(agents.federation.without_labels(), jax.random.key(seed))
            found.append([adjusted_rand_score(agents.labels, np.asarray(x[0])) for x in labels])
            bar.advance(1)
        mean, std = np.mean(found, axis=0), np.std(found, axis=0)
        paper = [float(published[name][f"ARI_agent{a}"]) for a in (0, 1)]
        cells = "".join(f"{f'{m:.3f} +- {s:.3f}':>16s}" for m, s in zip(mean, std, strict=True))
        bar.write(f"{name:28s}{cells}{f'{paper[0]:.3f}, {paper[1]:.3f}':>18s}")
        result[name] = {"mean": mean.tolist(), "std": std.tolist(), "paper": paper}
    return result
