"""Tables and figures of FMCSC's paper, measured beside it; see `reproduce`.

    python -m experiments.reproduce --paper=fmcsc --table=1 --datasets=mnist_usps,bdgp --seeds=5

Rows are made of presets (experiments/presets): "paper", algorithm 1 and appendix D.2 taken at their
word, and "best", one setting for all sets. A flag of `experiments.fmcsc` that is given goes before
the presets. Runs are batched as `experiments.sweep` batches them, --resume included.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import base, common, fmcsc_figures, fmcsc_rows, sweep_runs, sweep_setup
from experiments import fmcsc as binary
from experiments import fmcsc_tables as tables
from experiments import sweep as sweeps
from experiments.base import checked
from experiments.fmcsc_rows import Row, Wish
from experiments.fmcsc_tables import Entry
from experiments.ledger import Ledger, csv_text
from experiments.lib import plots
from experiments.progress import ProgressBar, require_tqdm
from experiments.sweep_runs import Group
from jaxfedmvc import data
from jaxfedmvc.algorithms import local_kmeans
from jaxfedmvc.algorithms.fmcsc import local as local_fmcsc

FLAGS = flags.FLAGS

flags.DEFINE_enum("paper", "fmcsc", ["fmcsc"], "Whose tables.")
flags.DEFINE_enum("table", None, ["1", "2", "3", "5"], "Table of the paper.")
flags.DEFINE_enum(
    "figure",
    None,
    ["2", "3", "4a", "4b", "4c", "6", "7", "bytes"],
    "Figure: 2 temperatures, 3 maps with and without consensus, 4a samples and 4b number of"
    " clients, 4c privacy, 6 losses, 7 label skew; bytes is ACC against traffic, not in the paper.",
)
flags.DEFINE_list("datasets", [], "Some of mnist_usps, bdgp, multi_fashion, nuswide.")
flags.DEFINE_list("ratios", list(fmcsc_rows.RATIOS), "Of table 1.")
flags.DEFINE_list("presets", [], "paper, best, or both; table 1 and bytes: both, the others: best.")
flags.DEFINE_list("references", list(fmcsc_rows.REFERENCES), "Of table 1: local, alone, pooled.")
flags.DEFINE_bool(
    "quick", False, "The same on the digits with narrow networks: a few minutes on a CPU."
)
flags.DEFINE_string("readme", None, "Writes table 1 between this file's marks, too.")
flags.DEFINE_list("runs_file", [], "runs.csv of earlier jobs: shown anew, nothing is run.")
flags.DEFINE_enum("algorithm", "fmcsc", ["fmcsc"], "Of the runs; there is one.")

# The sets that the paper shows a figure on; three sets where it shows all.
_SETS = {"figure2": ["mnist_usps"], "figure3": ["mnist_usps"], "figure4b": ["multi_fashion"]}
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
# Flags of this module and of jobs in general, which are not settings of a run.
_NOT_OF_A_RUN = {
    "algorithm",
    "batch",
    "checkpoint_every",
    "compilation_cache",
    "data_dir",
    "datasets",
    "dry_run",
    "figure",
    "flagfile",
    "output_dir",
    "paper",
    "precision",
    "presets",
    "progress",
    "quick",
    "ratios",
    "readme",
    "references",
    "resume",
    "runs_file",
    "seed",
    "seeds",
    "table",
}


def wish() -> Wish:
    """What is asked for, from flags.

    Raises:
      ValueError: Not one table or one figure; a set or a preset that there is not; a flag of sweeps
        that has no meaning here; a README without a place for the table.
      OSError: That README cannot be read.
    """
    if (FLAGS.table is None) == (FLAGS.figure is None):
        raise ValueError("table: give either --table or --figure")
    for name in ("grid", "random", "mesh", "coordinator", "dataset"):
        if FLAGS[name].value is not None:
            raise ValueError(f"{name}: has no meaning here; leave it out")
    what = f"table{FLAGS.table}" if FLAGS.table else f"figure{FLAGS.figure}"
    if FLAGS.datasets:
        sets = FLAGS.datasets
    elif FLAGS.quick:
        sets = ["digits"]
    else:
        sets = _SETS.get(what, ["mnist_usps", "bdgp", "multi_fashion"])
    both = ["paper", "best"] if what in ("table1", "figurebytes") else ["best"]
    ratios = ["1:1"] if FLAGS.quick and not FLAGS["ratios"].present else FLAGS.ratios
    for ratio in ratios:
        data.parse_ratio(ratio)
    if not set(FLAGS.references) <= set(fmcsc_rows.REFERENCES):
        got = ",".join(FLAGS.references)
        raise ValueError(f"references: got {got!r}; allowed are {', '.join(fmcsc_rows.REFERENCES)}")
    references = [fmcsc_rows.REFERENCES[name] for name in FLAGS.references]
    presets = FLAGS.presets if FLAGS["presets"].present else both
    if FLAGS.readme:
        if what != "table1":
            raise ValueError("readme: takes table 1; leave it out")
        tables.around_marks(Path(FLAGS.readme))
    given = {
        # absl writes booleans as --name and --noname.
        flag.name: str(flag.value).lower() if flag.boolean else flag.serialize().partition("=")[2]
        for module, defined in FLAGS.flags_by_module_dict().items()
        if "experiments" in module
        for flag in defined
        if flag.present and flag.name not in _NOT_OF_A_RUN
    }
    return Wish(what, sets, ratios, presets, references, FLAGS.quick, given)


def seeds() -> list[int]:
    """Five, or two of a quick job, unless told otherwise."""
    if FLAGS["seeds"].present:
        return base.seeds()
    return list(range(FLAGS.seed, FLAGS.seed + (2 if FLAGS.quick else 5)))


def main() -> None:
    """Runs what the flags ask for."""
    asked = checked(wish)
    FLAGS.seeds = len(seeds())
    base.use_compilation_cache()
    checked(sweeps.start_devices)
    if asked.quick and jax.default_backend() == "cpu":
        # A program runs for seconds here; optimising it takes more than half a minute.
        jax.config.update("jax_disable_most_optimizations", True)
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    custom = asked.what in fmcsc_figures.MAKERS
    rows = checked(lambda: fmcsc_rows.rows(asked))
    if FLAGS.runs_file:
        known = checked(lambda: _known([Path(name) for name in FLAGS.runs_file], asked, rows))
        show(asked, checked(_folder), *known)
        return
    for name in asked.sets:
        checked(lambda name=name: data.load(name, FLAGS.data_dir, FLAGS.scale))
    # To score every round costs nothing to speak of but the time to compile it.
    by_round = not asked.quick or asked.what in ("table1", "figurebytes")
    groups = checked(lambda: groups_of(rows, by_round))
    size = checked(sweep_setup.asked_batch)
    if asked.quick and size is None:
        size = len(seeds())  # small enough; a prediction would trace every program once more
    if FLAGS.dry_run:
        for line in sweeps.plan(groups, None, size):
            print(line)
        return
    folder = checked(_folder)
    if custom:
        found = fmcsc_figures.MAKERS[asked.what](groups, folder)
        _summary(folder, asked, seeds()[: None if asked.what == "figure6" else 1], found)
        return
    ledger = Ledger(folder)
    with ProgressBar(sum(len(group.runs) for group in groups)) as bar:
        bar.advance(len(ledger.rows))
        bar.write(f"{sum(len(g.runs) for g in groups)} runs, {len(groups)} programs")
        sweep_runs.execute(groups, ledger, batch=size, on_batch=bar.advance, write=bar.write)
    wanted = asked.what == "table1" and fmcsc_rows.POOLED in asked.references
    references = pooled_kmeans(asked) if wanted else []
    if references:
        base.write(folder / "references.csv", csv_text([e.flat() for e in references]))
    show(asked, folder, ledger.rows, references)


def groups_of(rows: Sequence[Row], every_round: bool) -> list[Group]:
    """Groups of runs, one for every program; scored after every round, or after the last alone.

    Raises:
      ValueError, OSError: What is wrong with a row's flags, or with the data.
    """
    names = {id(row.flags): row for row in rows}
    assert len(names) == len(rows)
    groups: list[Group] = []
    for algorithm in dict.fromkeys(row.algorithm for row in rows):
        mine = [row.flags for row in rows if row.algorithm == algorithm]
        for group in sweep_setup.groups_of(binary, mine):
            columns = [names[id(flags)].columns for flags in group.columns]
            with sweep_setup.flags_set(group.columns[0]):
                changes = _as(algorithm, group)
            groups.append(group._replace(columns=columns, every_round=every_round, **changes))
    return groups


def _as(algorithm: str, group: Group) -> dict[str, Any]:
    """What of a group is another method's."""
    k = group.n_clusters
    assert k is not None
    if algorithm == fmcsc_rows.LOCAL:
        config = binary.config(k)
        return {"make": lambda hyper: local_fmcsc(config, hyper)}
    if algorithm == fmcsc_rows.ALONE:
        return {"make": lambda hyper: local_kmeans(k), "rounds": 0}
    return {}


def pooled_kmeans(asked: Wish) -> list[Entry]:
    """k-means on all raw views of the samples that clients hold, which no client could run."""
    from sklearn.cluster import KMeans

    from jaxfedmvc import metrics

    found = []
    for dataset, x in itertools.product(asked.sets, asked.ratios):
        settings = (
            fmcsc_rows.preset("paper", dataset, asked.quick) | {"ratio": x} | dict(asked.flags)
        )
        with sweep_setup.flags_set(settings):
            loaded, parts, k = common.load_partitioned()
        features = np.concatenate(loaded.views, axis=1)
        scores = []
        for seed, part in zip(seeds(), parts, strict=True):
            ids = np.concatenate([p.sample_ids.ravel() for p in part])
            held = np.unique(ids[ids >= 0])
            model = KMeans(k, n_init=10, random_state=seed)
            clusters = model.fit_predict(features[held])
            _, truth = np.unique(loaded.labels[held], return_inverse=True)
            scores.append(metrics.scores(truth, clusters, int(truth.max()) + 1, k))
        means = {
            m: (float(np.mean([s[m] for s in scores])), float(np.std([s[m] for s in scores])))
            for m in tables.METRICS
        }
        found.append(Entry(dataset, x, fmcsc_rows.POOLED, len(scores), means))
    return found


def _known(
    paths: Sequence[Path], asked: Wish, rows: Sequence[Row]
) -> tuple[list[dict[str, Any]], list[Entry]]:
    """Runs of earlier jobs, and the references beside them.

    Raises:
      ValueError, OSError: A file holds something else, or cannot be read.
    """
    if asked.what in fmcsc_figures.MAKERS:
        raise ValueError(f"runs_file: {asked.what} is not made of runs")
    runs: list[dict[str, Any]] = []
    references: list[Entry] = []
    for path in paths:
        found = tables.read(path)
        if not found or not {"set", "x", "row", "rounds_made"} <= set(found[0]):
            raise ValueError(f"runs_file: {path} holds no runs of this program")
        if others := sorted({run["x"] for run in found} - {row.x for row in rows}):
            mine = ", ".join(dict.fromkeys(row.x for row in rows))
            raise ValueError(
                f"runs_file: {path} holds runs of {others[0]!r}; {asked.what} is made of {mine}"
            )
        runs += found
        beside = path.with_name(path.name.replace("runs", "references"))
        if beside.exists() and beside != path:
            references += [Entry.of(row) for row in tables.read(beside)]
    return runs, references


def show(
    asked: Wish, folder: Path, runs: Sequence[dict[str, Any]], references: Sequence[Entry]
) -> None:
    """Prints the table, and writes it as .csv, Markdown and a picture."""
    if asked.what == "table1":
        table = tables.table_1(runs, references)
    elif asked.what == "table2":
        table = tables.table_2(runs)
    elif asked.what == "table3":
        table = tables.table_3(runs)
    else:
        table = tables.plain(runs)
    failed = [run for run in runs if run["status"] != "ok"]
    if not table:
        base.fail(ValueError(f"all {len(failed)} runs failed: {failed[0]['status']}"))
    print()
    for line in tables.lines(table):
        print(line)
    if failed:
        print(f"{len(failed)} runs failed; runs.csv says why")
    base.write(folder / "table.csv", csv_text([e.flat() for e in table]))
    text = tables.markdown(table, _X[asked.what])
    base.write(folder / "table.md", text)
    picture = folder / f"{asked.what}.png"
    numbers = sorted({e.seeds for e in table if e.seeds})
    n_seeds = " to ".join(str(n) for n in dict.fromkeys((numbers[0], numbers[-1])))
    title = f"FMCSC, {asked.what.replace('e', 'e ', 1)}, {n_seeds} seeds"
    if asked.what == "figurebytes":
        tables.draw_bytes(picture, runs, "FMCSC: accuracy against traffic")
    elif asked.what == "figure2":
        fmcsc_figures.draw_temperatures(folder, runs)
    elif asked.what == "table2":
        fmcsc_figures.draw_ablation(picture, table, title)
    elif asked.what.startswith("table"):
        drawn = tables.of_one_colour(table) if asked.what == "table1" else table
        tables.draw_bars(picture, drawn, title)
    else:
        tables.draw_lines(
            picture, table, _X[asked.what], title, asked.what in ("figure4c", "figure7")
        )
    if FLAGS.readme and asked.what == "table1":
        checked(
            lambda: tables.write_between_marks(
                Path(FLAGS.readme), tables.markdown(tables.short(table), _X[asked.what])
            )
        )
    numbers = sorted({int(run["seed"]) for run in runs})
    _summary(folder, asked, numbers, {"rows": [e.flat() for e in table]})


def _folder() -> Path:
    what = f"table{FLAGS.table}" if FLAGS.table else f"figure{FLAGS.figure}"
    return base.make_folder(f"reproduce-fmcsc-{what}", FLAGS.resume, given_only=True)


def _summary(folder: Path, asked: Wish, numbers: list[int], found: dict[str, Any]) -> None:
    content = {"paper": "fmcsc", "what": asked.what, "quick": asked.quick, "seeds": numbers}
    content |= {"versions": base.versions()} | found
    text = json.dumps(content, indent=1, default=float).replace("NaN", "null")
    base.write(folder / "summary.json", text + "\n")
    print(f"\nwritten: {folder}/ ({', '.join(sorted(p.name for p in folder.iterdir()))})")
