"""Comparison methods over the grids that their authors search.

    runs = run_grids(cells, seeds, Path("peers_grid.csv"), progress)
    table = with_best(compare(peers, published), best_of_grid(runs))

Most of them choose from it by labels, and publish the best, which nobody can choose without. A
table of one setting for all sets shows that beside it, and says so.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pandas as pd

from experiments.lib import peers
from experiments.lib.command import parse
from experiments.lib.folder import made_by, settings_of_row
from experiments.lib.peers import Cell
from experiments.lib.progress import Progress
from experiments.lib.study import check_table

# Flags and values. Whole grids of IMVC-CBG and LMVSC. Of HCP-IMSC's 100 settings nine, since a run
# inverts dense matrices of all rows; of FedMVL's 40 000 45, with its demo's penalties.
GRIDS: dict[str, dict[str, tuple[float, ...]]] = {
    "imvc_cbg": {"lambda": (0.001, 0.1, 1, 10), "anchors_per_cluster": (1, 2, 3, 5)},
    "hcp_imsc": {"lambda1": (0.1, 1, 10), "lambda2": (0.1, 1, 10)},
    "lmvsc": {"alpha": (0.01, 1, 100), "n_anchors": (0, 50, 100)},
    "fedmvl": {
        "mu": (1e-5, 1e-4, 1e-3, 0.01, 0.1, 1, 10, 100, 1e3),
        "r": (1.2589, 3.1623, 7.9433, 19.9526, 79.4328),
    },
}
_CELL = ["set", "x", "method"]
_FLAGS = re.compile(r"--(?:" + "|".join({f for grid in GRIDS.values() for f in grid}) + r")=\S+")


def settings(method: str) -> list[list[str]]:
    """Returns the flags of every setting of a method's grid; 0 leaves a flag at its default."""
    grid = GRIDS[method]
    return [
        [f"--{flag}={value:g}" for flag, value in zip(grid, values, strict=True) if value]
        for values in itertools.product(*grid.values())
    ]


def with_grids(
    table: pd.DataFrame,
    cells: Sequence[Cell],
    seeds: Sequence[int],
    peers_file: Path,
    progress: Progress,
) -> pd.DataFrame:
    """Runs what the file beside `peers_file` lacks; adds the best to `peers.compare`'s table.

    Raises:
      ValueError, OSError: That file holds something else, or cannot be written.
    """
    path = beside(peers_file)
    check_table("peers_grid", str(path), peers.COLUMNS)
    return with_best(table, best_of_grid(run_grids(cells, seeds, path, progress)))


def run_grids(
    cells: Sequence[Cell], seeds: Sequence[int], path: Path, progress: Progress
) -> pd.DataFrame:
    """Runs what `path` lacks of the cells whose method has a grid; returns the rows of these runs.

    Rows of other settings, such as of a grid with more values, are no rows of these runs.

    Args:
      cells: Methods on partitions, with their defaults.
      seeds: Of the runs, and of the partitions.
      path: Of peers_grid.csv, with the columns of peers.csv, which is appended to.
      progress: Where runs are counted.
    """
    known = peers.read_peers(path)
    made = known["command"].fillna("").map(settings_of_row)
    done = set(zip(made, known["seed"], strict=True))
    todo: dict[str, list[tuple[Cell, list[int], str]]] = {}
    asked: set[str] = set()
    for cell in cells:
        kind = f"{cell.set} {cell.x} {cell.method}, grid"
        for flags in settings(cell.method) if cell.method in GRIDS else ():
            one = cell._replace(command=parse([*cell.command.arguments, *flags]))
            text = settings_of_row(made_by(one.command.arguments)["command"])
            asked.add(text)
            if missing := [seed for seed in seeds if (text, seed) not in done]:
                todo.setdefault(kind, []).append((one, missing, " ".join(["", *flags])))
    progress.expect({kind: sum(len(seeds) for _, seeds, _ in ones) for kind, ones in todo.items()})
    for kind, ones in todo.items():
        compiled: dict[Any, Any] = {}
        for one, left, said in ones:
            if not peers.run_cell(one, left, path, progress, compiled, kind, said):
                break  # a cell that is refused is so with all settings
        jax.clear_caches()
    found = peers.read_peers(path)
    mine = found["command"].fillna("").map(settings_of_row).isin(asked)
    return found[mine & found["seed"].isin(seeds)]


def best_of_grid(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns of each cell the setting with the highest mean ACC: a choice by labels.

    Args:
      runs: As `run_grids` returns them. Settings with fewer seeds than others of their cell do not
        count.

    Returns:
      set, x, method (its title), `acc_tuned`, `acc_tuned_std` (of samples), `tuned_of` (how many
      settings), `tuned` (the flags of the best).
    """
    lines = []
    ok = runs[runs["status"] == "ok"]
    chosen = ok["command"].map(lambda text: " ".join(_FLAGS.findall(text)))
    for (dataset, x, method), mine in ok.groupby(_CELL, sort=False):
        found = mine["acc"].astype(float).groupby(chosen[mine.index]).agg(["count", "mean", "std"])
        found = found[found["count"] == found["count"].max()]
        best = found["mean"].idxmax()
        line = {"set": dataset, "x": x, "method": peers.TITLES.get(method, method)}
        line |= {"acc_tuned": found["mean"][best], "acc_tuned_std": found["std"][best]}
        lines.append(line | {"tuned_of": len(found), "tuned": best or "defaults"})
    columns = [*_CELL, "acc_tuned", "acc_tuned_std", "tuned_of", "tuned"]
    return pd.DataFrame(lines, columns=columns)


def with_best(table: pd.DataFrame, best: pd.DataFrame) -> pd.DataFrame:
    """Returns the table of `peers.compare` with the columns of `best_of_grid`."""
    merged = table.merge(best, how="left", on=_CELL)
    return merged.assign(tuned=merged["tuned"].fillna(""), tuned_of=merged["tuned_of"].fillna(0))


def beside(path: Path) -> Path:
    """Returns where the grids' runs lie: beside a file peers.csv."""
    return path.with_name(path.stem.replace("peers", "peers_grid") + path.suffix)
