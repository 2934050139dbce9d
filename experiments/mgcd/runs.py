"""The runs of MGCD's tables and figures: each row is a command line of `experiments.mgcd`.

Every run is appended to runs.csv as it ends; what that file holds already is not run again, and
rows of other settings are refused. After a change of the method itself begin with a new file.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from jax.sharding import Mesh

from experiments.lib import folder, runner
from experiments.lib.command import Command, parse
from experiments.lib.devices import each
from experiments.lib.folder import append_rows, read_appended
from experiments.lib.progress import Progress
from experiments.lib.references import k_means
from experiments.lib.report import losses_of
from experiments.lib.runner import Job
from experiments.mgcd import hooks
from jaxfedmvc.algorithms.mgcd.method import REPORTED
from jaxfedmvc.algorithms.mgcd.settings import LOSSES
from jaxfedmvc.engine import RunState
from jaxfedmvc.engine.steps import Steps
from jaxfedmvc.metrics.host import METRICS

# The paper's sets and what stands for them. ALOI10 is ten of its hundred objects, NoisyMNIST10k is
# made as the 50 000 are; MNIST-USPS is not in the paper.
SETS = {
    "Mfeat": "mfeat",
    "Scene": "scene15",
    "Aloi": "aloi10",
    "NoisyMNIST": "noisymnist10k",
    "MNIST-USPS": "mnist_usps",
}
# Those that could not be had, and how to run them.
_OF_A_FILE = (
    "; with a file of views and labels (.npz or .mat) `experiments.mgcd --dataset=FILE` and"
    " `experiments.run --algorithm=NAME --dataset=FILE --ratio=1:0` run it (`--split=views` in the"
    " place of `--ratio` for vertical methods)"
)
ABSENT = {
    "Animal": "No file of it is to be had here, and of which images and views the paper made it"
    f" could not be established{_OF_A_FILE}",
    "Cifar10": "Its images are public, but which views of them the paper made could not be"
    f" established{_OF_A_FILE}",
}
ABLATION_SET = "Aloi"
ALL_VIEWS = "k-means, all views"
REFERENCES = (ALL_VIEWS, hooks.BEST_VIEW, hooks.SPECTRAL)
WEIGHTS = tuple(10.0**e for e in range(-3, 4))

# Flags of a row.
Row = tuple[str, ...]
MODES: dict[str, Row] = {
    "robust": ("--mode=robust",),
    "literal": (f"--flagfile={Path(__file__).parent / 'presets' / 'literal.flags'}",),
}
TABLE_2: dict[str, Row] = {
    "MGCD, robust, average": MODES["robust"],
    "MGCD, robust, trained": (*MODES["robust"], "--server=trained"),
    "MGCD, literal": MODES["literal"],
    "MGCD, literal, average": (*MODES["literal"], "--server=average"),
}
# The paper's other methods that table 2 compares with.
PEERS = ("mflvc", "gcfagg", "simvc", "comvc", "lmvsc", "fedmvl", "feddmvc", "fcuif")
# Names of the ablations, by the paper's letters.
ABLATED = {
    "A": "without L_r",
    "B": "without L_cl",
    "C": "without L_dd",
    "D": "without L_cl, L_dd",
    "E": "all",
    "a": "one encoder",
    "b": "without f_pre",
    "c": "all",
}

COLUMNS: tuple[str, ...] = ("set", "row", "seed", "round", *METRICS)
COLUMNS += ("client_loss", "server_loss", "separation")
COLUMNS += ("average_separation", "server_separation", "norm", "seconds")
COLUMNS += tuple(f"{graph}/{metric}" for graph in REPORTED for metric in ("acc", "nmi"))
COLUMNS += ("command", "commit", "device", "jax")


# --- Rows -----------------------------------------------------------------------------------------


def _without(*losses: str) -> str:
    return "--losses=" + ",".join(name for name in LOSSES if name not in losses)


_ABLATIONS = {
    3: {
        "A": _without("r"),
        "B": _without("cl"),
        "C": _without("dd"),
        "D": _without("cl", "dd"),
        "E": _without(),
    },
    4: {"a": "--nodual", "b": "--nodistillation", "c": "--dual"},
}


def ablation(table: int) -> dict[str, Row]:
    """Returns the rows of table 3 or 4, in both modes.

    The robust mode's linear encoder is one map whether there are two or one, so "one encoder" is
    its deep encoder's.
    """
    rows = {}
    for item, flag in _ABLATIONS[table].items():
        for mode in ("literal", "robust"):
            deep = ("--encoder=deep",) * (mode == "robust" and item in "ac")
            name = f"{mode}: {ABLATED[item]}" + ", deep" * len(deep)
            rows[name] = (*MODES[mode], "--server=trained", flag, *deep)
    return rows


def figure_4_rows() -> dict[str, Row]:
    """Returns both modes; robust runs stay where they ended."""
    both = {name: ablation(3)[name] for name in ("literal: all", "robust: all")}
    return both | {"MGCD, robust, average": TABLE_2["MGCD, robust, average"]}


def figure_5_rows() -> dict[str, Row]:
    """Returns the literal mode with gamma or lambda from 1e-3 to 1e3, the other as printed."""
    return {
        f"{name}={weight:g}": (*MODES["literal"], f"--{name}={weight:g}")
        for name in ("gamma", "lambda")
        for weight in WEIGHTS
    }


def cells(
    table: int | None,
    figure: int | None,
    sets: Sequence[str],
    names: Sequence[str] | None,
    data_dir: str | None = None,
) -> dict[str, dict[str, Command]]:
    """Returns what a table or a figure needs, `{set: {row: command}}`.

    Args:
      table: 2, 3, 4 or None.
      figure: 3, 4, 5 or None.
      sets: Of table 2, some of `SETS`; all if empty.
      names: Some of the rows, with ; for commas; None: all.
      data_dir: Where sets lie; None: as usual.

    Raises:
      ValueError: An unknown set or row.
    """
    if not set(sets) <= set(SETS) or (sets and table != 2):
        raise ValueError(f"sets: got {','.join(sets)!r}; allowed for table 2 are {list(SETS)}")
    if table is not None:
        rows = TABLE_2 if table == 2 else ablation(table)
    else:
        rows = {3: MODES, 4: figure_4_rows(), 5: figure_5_rows()}[figure or 0]
    chosen = list(rows) if names is None else [name.replace(";", ",") for name in names]
    if not set(chosen) <= set(rows):
        allowed = [name.replace(",", ";") for name in rows]
        raise ValueError(f"methods: got {','.join(names or ())!r}; allowed are {allowed}")
    return {
        dataset: {
            name: command_of(dataset, row, data_dir) for name, row in rows.items() if name in chosen
        }
        for dataset in (sets or (SETS if table == 2 else [ABLATION_SET]))
    }


def command_of(dataset: str, row: Row, data_dir: str | None = None) -> Command:
    """Returns a row on one of `SETS`, an agent for each view."""
    where = () if data_dir is None else (f"--data_dir={data_dir}",)
    data = (f"--dataset={SETS[dataset]}", "--split=views", *where)
    return parse([*data, *row], algorithm="mgcd")


# --- Running --------------------------------------------------------------------------------------


def read_runs(path: Path) -> pd.DataFrame:
    """Reads runs.csv: a row for each round, the final scores in the last; none if it is absent."""
    return read_appended(path, COLUMNS)


def run_cells(
    wanted: Mapping[str, Mapping[str, Command]],
    seeds: Sequence[int],
    path: Path,
    progress: Progress,
    mesh: Mesh | None = None,
) -> pd.DataFrame:
    """Runs what `path` lacks, references included, and returns all rows of these cells.

    Args:
      wanted: `{set: {row: command}}`.
      seeds: Of the runs.
      path: Of runs.csv.
      progress: Where rounds are counted.
      mesh: Whose devices take a seed each; None: one device.

    Raises:
      ValueError: As `one_run`; or `path` holds a row's runs with other settings, or other columns.
    """
    folder.check_columns(path, COLUMNS)
    folder.keep_rows(path, _ended)
    recorded = read_runs(path).dropna(subset="acc")
    for dataset, rows in wanted.items():
        for name, command in rows.items():
            folder.check_settings(
                recorded[(recorded["set"] == dataset) & (recorded["row"] == name)],
                command.flag_lines(),
                lambda arguments: parse(arguments, algorithm="mgcd").flag_lines(),
                f"trials_file: {path} holds runs of {name} on {dataset}",
            )
    done = set(recorded[["set", "row", "seed"]].itertuples(index=False, name=None))
    todo = {
        (dataset, name): [seed for seed in seeds if (dataset, name, seed) not in done]
        for dataset, rows in wanted.items()
        for name in (*rows, *REFERENCES)
    }
    left = {
        f"{dataset}, {name}": command.rounds * len(todo[dataset, name])
        for dataset, rows in wanted.items()
        for name, command in rows.items()
    }
    for dataset, rows in wanted.items():
        for name, command in rows.items():
            if not todo[dataset, name]:
                continue
            kind, seeds_left = f"{dataset}, {name}", todo[dataset, name]
            one = seed_runner(runner.prepare(command), progress, kind)
            progress.expect(left)
            for seed, rounds in zip(seeds_left, each(one, seeds_left, mesh), strict=True):
                made_by = folder.made_by(command.arguments)
                append_rows(path, [_flat(dataset, name, seed, row | made_by) for row in rounds])
                acc, seconds = rounds[-1]["acc"], rounds[-1]["seconds"]
                progress.write(f"{kind}, seed {seed}: ACC {acc:.3f}, {seconds:.0f} s")
            left[kind] = 0  # whatever seeds that ended by themselves have left over
            jax.clear_caches()  # programs of many settings would exhaust the memory maps
        lacking = {name: todo[dataset, name] for name in REFERENCES}
        for seed in sorted({seed for some in lacking.values() for seed in some}):
            of_set = runner.prepare(next(iter(rows.values())))
            made_by = folder.made_by(_of_data(of_set.command))
            references = _references(of_set, seed)
            append_rows(
                path,
                [
                    _flat(dataset, name, seed, row | made_by)
                    for name, row in references
                    if seed in lacking[name]
                ],
            )
    found = read_runs(path)
    names = [(d, name) for d, rows in wanted.items() for name in (*rows, *REFERENCES)]
    mine = pd.MultiIndex.from_frame(found[["set", "row"]]).isin(names)
    return found[mine & found["seed"].isin(seeds)]


def seed_runner(job: Job, progress: Progress, kind: str) -> Callable[[int], list[dict[str, Any]]]:
    """Returns `seed -> rounds` as of `one_run`; seeds share programs, each device its own.

    Args:
      job: The row, with its data, which are the same for all seeds.
      progress: Where rounds are counted.
      kind: Under which name.
    """

    @functools.cache
    def steps_on(device: Any) -> Steps:
        return Steps(job.make, job.hyperparams, job.federation)

    def one(seed: int) -> list[dict[str, Any]]:
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        return one_run(job, steps_on(device), seed, progress, kind)[0]

    return one


def one_run(
    job: Job, steps: Steps, seed: int, progress: Progress, kind: str
) -> tuple[list[dict[str, Any]], RunState]:
    """Runs until the last round, or until the method finds its own end.

    Args:
      job: The row, with its data, which are the same for all seeds.
      steps: Its programs.
      seed: Of the run.
      progress: Where rounds are counted.
      kind: Under which name.

    Returns:
      What runs.csv holds of each round, and the state after the last.

    Raises:
      ValueError: Graphs have become NaN or infinite.
    """
    began, key = time.perf_counter(), jax.random.key(seed)
    problem, federation = job.problems[0], job.federation.without_labels()
    rows: list[dict[str, Any]] = []
    try:
        state = steps.start(federation, key)
        state, _ = steps.setup(federation, key, state)
        while steps.goes_on(state, len(rows), job.command.rounds):
            state, info = steps.one_round(federation, key, state, len(rows))
            losses = {"client_loss": losses_of(info, federation)["loss"]}
            rows.append({"round": len(rows) + 1} | losses | hooks.columns(info, problem))
            progress.done(kind)
    except (RuntimeError, ValueError) as error:  # jax's, with the host's words in it
        if "graphs: got NaN" not in str(error):
            raise
        raise ValueError(
            f"{kind}, round {len(rows) + 1}: graphs hold NaN or infinite entries; take smaller step"
            " sizes"
        ) from error
    seconds = time.perf_counter() - began
    rows = [row | {"seconds": seconds} for row in rows]
    rows[-1] |= hooks.scores(problem.labels, np.asarray(state.server.clusters.labels))
    return rows, state


def _ended(rows: pd.DataFrame) -> pd.Series:
    """Tells which rows are of runs whose last round, the one that is scored, was written."""
    return rows.groupby(["set", "row", "seed"])["acc"].transform(lambda acc: acc.ne("").any())


def _of_data(command: Command) -> list[str]:
    """Returns the flags that say what the data are."""
    return [a for a in command.arguments if a.startswith(("--dataset=", "--split="))]


def _references(job: Job, seed: int) -> list[tuple[str, dict[str, Any]]]:
    problem, k = job.problems[0], job.n_clusters
    assert k is not None
    every = {ALL_VIEWS: k_means(np.concatenate(problem.views, axis=1), k, seed)}
    every |= {name: x[0][0] for name, x in hooks.references(problem, k, seed).items()}
    return [
        (name, {"round": 1} | hooks.scores(problem.labels, labels))
        for name, labels in every.items()
    ]


def _flat(dataset: str, name: str, seed: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of runs.csv; what is not known stays empty."""
    cell = {"set": dataset, "row": name, "seed": seed} | dict(found)
    return {column: "" if pd.isna(cell.get(column)) else cell[column] for column in COLUMNS}
