"""FMCSC's tables: what is read from the runs of `rows`, and how it is shown beside the paper's.

Runs are a table as runs.csv holds it, all cells text. What is shown is a table with the columns
`COLUMNS`: a line for each mean over seeds, and for each number of the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.fmcsc.rows import ABLATIONS, ALONE, LOCAL, SETS
from experiments.lib import charts
from experiments.lib.batches import ROUNDS
from experiments.lib.text import spread
from jaxfedmvc.files import write_text

PUBLISHED = Path(__file__).parent / "published"
METRICS = ("acc", "nmi", "ari")
COLUMNS = ["set", "x", "row", "seeds", "megabytes"]
COLUMNS += [name for metric in METRICS for name in (metric, f"{metric}_std")]
_CELL = ["set", "x", "row"]
# Groups of clients, and how they are called.
KINDS = {"all": "", "multi_view": ": multi-view", "partial_view": ": single-view"}

Line = dict[str, Any]

# Between these lines of a file stands table 1.
_MARKS = ("<!-- results: begin -->", "<!-- results: end -->")


# --- Files ----------------------------------------------------------------------------------------


def read_runs(path: Path) -> pd.DataFrame:
    """Reads runs.csv."""
    return pd.read_csv(path, dtype=str)


def read_lines(path: Path) -> pd.DataFrame:
    """Reads a table with the columns `COLUMNS`."""
    return pd.read_csv(path, dtype=dict.fromkeys(_CELL, str))


def csv_text(table: pd.DataFrame) -> str:
    """Returns a table with the columns `COLUMNS` as .csv."""
    return table.round({"megabytes": 1}).astype({"seeds": "Int64"}).to_csv(index=False)


def published(name: str, index: list[str]) -> pd.DataFrame:
    """Returns a table of the paper: scores as fractions, by the set's name and further columns."""
    found = pd.read_csv(PUBLISHED / name, dtype=dict.fromkeys(index, str))
    found["dataset"] = found["dataset"].map({title: key for key, title in SETS.items()})
    if "metric" not in found:
        found["metric"], found["value_percent"] = "acc", found["ACC_percent"]
    values = [name for name in ("value_percent", "mean_percent", "std_percent") if name in found]
    wide = found.assign(metric=found["metric"].str.lower()).pivot_table(
        index=["dataset", *index], columns="metric", values=values, sort=False
    )
    ending = {"value_percent": "", "mean_percent": "", "std_percent": "_std"}
    wide.columns = pd.Index([f"{metric}{ending[value]}" for value, metric in wide.columns])
    return wide / 100


# --- Lines ----------------------------------------------------------------------------------------


def by_round(runs: pd.DataFrame, name: str, after: int) -> np.ndarray:
    """Returns a column's number after round `after` of each run; NaN where there is none."""
    return runs[ROUNDS + name].str.split().str[after - 1].astype(float).to_numpy()


def statistics(scores: Mapping[str, np.ndarray]) -> Line:
    """Returns mean and sample deviation of each score; one seed has no spread."""
    means = {name: np.mean(values) for name, values in scores.items()}
    stds = {name: np.std(v, ddof=1) if len(v) > 1 else np.nan for name, v in scores.items()}
    return means | {f"{name}_std": std for name, std in stds.items()}


def mean_line(
    runs: pd.DataFrame,
    row: str,
    group: str = "all",
    after: int | None = None,
    way: str = "pooled",
) -> Line:
    """Returns a line of the table: the statistics of a row over its seeds.

    Args:
      runs: Of one row.
      row: What the line is called.
      group: Of clients.
      after: Round; None: the last one.
      way: "pooled" or "per_client".
    """

    def values(name: str) -> np.ndarray:
        return by_round(runs, name, after) if after else runs[name].astype(float).to_numpy()

    traffic = values("bytes") if after else values("bytes_up") + values("bytes_down")
    line = {"set": runs["set"].iloc[0], "x": runs["x"].iloc[0], "row": row, "seeds": len(runs)}
    line["megabytes"] = traffic.mean() / 1e6
    return line | statistics({metric: values(f"{group}/{way}/{metric}") for metric in METRICS})


def kind_lines(runs: pd.DataFrame, row: str, after: int | None = None) -> list[Line]:
    """Returns the lines of a row: of all clients, of multi-view and of single-view ones."""
    return [
        mean_line(runs, f"{row}{kind} clients" if kind else row, group, after)
        for group, kind in KINDS.items()
    ]


def _published_line(dataset: str, x: str, name: str, scores: pd.Series) -> Line:
    return {"set": dataset, "x": x, "row": f"published: {name}"} | scores.to_dict()


def rows_of(runs: pd.DataFrame) -> Iterator[tuple[tuple[str, str, str], pd.DataFrame]]:
    """Yields the finished runs of each row, rows in the order of their first runs."""
    return iter(runs[runs["status"] == "ok"].groupby(_CELL, sort=False))


def _table(lines: list[Line]) -> pd.DataFrame:
    return pd.DataFrame(lines, columns=COLUMNS)


# --- Tables ---------------------------------------------------------------------------------------


def table_1(runs: pd.DataFrame, references: pd.DataFrame | None = None) -> pd.DataFrame:
    """Returns for each set and ratio the paper's line and the best other of it, then ours."""
    paper = published("table1.csv", ["ratio_multi_single", "method"])
    lines: list[Line] = []
    for (dataset, ratio), cell in runs[runs["status"] == "ok"].groupby(["set", "x"], sort=False):
        if (dataset, ratio) in paper.index:
            methods = paper.loc[dataset, ratio]
            for method in ("FMCSC", methods["acc"].drop("FMCSC").idxmax()):
                lines.append(_published_line(dataset, ratio, method, methods.loc[method]))
        for name, mine in cell.groupby("row", sort=False):
            if name in (LOCAL, ALONE):
                alone = mean_line(mine, f"{name}, each matched by itself", way="per_client")
                lines += [mean_line(mine, name), alone]
                continue
            last = mine["rounds_made"].astype(int).min()
            for after in sorted({min(5, last), last}):
                lines += kind_lines(mine, f"{name}, R = {after}", after)
        if references is not None:
            here = (references["set"] == dataset) & (references["x"] == ratio)
            lines += references[here].to_dict("records")
    return _table(lines)


def table_2(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the ablation, the paper's item beside ours."""
    paper = published("table2.csv", ["components_kept"])
    lines = []
    for (dataset, letters, name), mine in rows_of(runs):
        if (dataset, letters) in paper.index:
            scores = paper.loc[(dataset, letters)]
            lines.append(_published_line(dataset, letters, ABLATIONS[letters], scores))
            paper = paper.drop((dataset, letters))  # once for both presets
        lines.append(mean_line(mine, f"{name}: {ABLATIONS[letters]}"))
    table = _table(lines)
    preset = table["row"].str.partition(":")[0]
    order = table.assign(ours=preset != "published", preset=preset)
    return table.loc[order.sort_values(["set", "ours", "preset"], kind="stable").index]


def table_3(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns participation: clients that took part and clients that did not, the paper's beside.

    A share is that of multi-view and of single-view clients, rounded, one client of every view at
    least: of few clients the two groups can differ in how many hold all views.
    """
    paper = published("table3.csv", ["participation_rate", "client_type"])
    lines = []
    for (dataset, share, name), mine in rows_of(runs):
        for kind in ("participating", "non-participating"):
            if (place := (dataset, share, kind)) in paper.index:
                lines.append(_published_line(dataset, share, kind, paper.loc[place]))
                paper = paper.drop(place)
            lines.append(mean_line(mine, f"{name}: {kind}", kind.replace("-", "_")))
    return _table(lines)


def plain(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns all rows after their last round, multi-view and single-view clients apart too."""
    return _table([line for key, mine in rows_of(runs) for line in kind_lines(mine, key[2])])


def short(table: pd.DataFrame) -> pd.DataFrame:
    """Leaves the rows of one kind of clients out of table 1."""
    return table[~table["row"].str.endswith(" clients")]


# --- What is shown --------------------------------------------------------------------------------


def shown(table: pd.DataFrame, x: str) -> pd.DataFrame:
    """Returns a table as text, mean +- deviation and titles of sets; `x` heads its column."""

    def number(value: float) -> str:
        return "" if np.isnan(value) else f"{value:.0f}"

    text = {"set": table["set"].map(lambda name: SETS.get(name, name)), x: table["x"]}
    text |= {"": table["row"], "seeds": table["seeds"].map(number)}
    for metric in METRICS:
        pairs = zip(table[metric], table[f"{metric}_std"], strict=True)
        text[metric.upper()] = [spread(*pair) for pair in pairs]
    return pd.DataFrame(text | {"MB": table["megabytes"].map(number)})


def markdown(table: pd.DataFrame, x: str) -> str:
    """Returns the table in Markdown."""
    text = shown(table, x)
    head = "| " + " | ".join(text.columns) + " |\n" + "|---" * text.shape[1] + "|\n"
    body = "".join("| " + " | ".join(cells) + " |\n" for cells in text.to_numpy())
    return head.replace("|  |", "| |") + body


def around_marks(path: Path) -> tuple[str, str]:
    """Returns what stands before and after the marks of a file.

    Raises:
      ValueError, OSError: There are no marks, or the file cannot be read.
    """
    before, begin, rest = path.read_text(encoding="utf-8").partition(_MARKS[0])
    _, end, after = rest.partition(_MARKS[1])
    if not begin or not end:
        raise ValueError(f"readme: {path} has no lines {_MARKS[0]} and {_MARKS[1]}")
    return before, after


def write_between_marks(path: Path, text: str) -> None:
    """Replaces what stands between the marks of a file.

    Raises:
      ValueError, OSError: There are no marks, or the file cannot be written.
    """
    before, after = around_marks(path)
    write_text(path, f"{before}{_MARKS[0]}\n{text}{_MARKS[1]}{after}")


# --- Pictures -------------------------------------------------------------------------------------


def draw_bars(path: Path, table: pd.DataFrame, title: str) -> None:
    """Draws ACC and NMI, a group of bars for each set and x."""
    drawn = table[~table["row"].str.contains("clients")]
    # The best other method differs by cell, and a colour needs one name.
    other = "published: (?!FMCSC$|.*participating$).*"
    drawn = drawn.replace({"row": {other: "published: best other method"}}, regex=True)
    panels: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for metric in ("acc", "nmi"):
        panel = panels.setdefault(metric.upper(), {})
        for (dataset, x), mine in drawn.groupby(["set", "x"], sort=False):
            known = mine[mine[metric].notna()].fillna({f"{metric}_std": 0.0})
            panel[f"{SETS.get(dataset, dataset)}\n{x}"] = {
                name: (mean, std)
                for name, mean, std in known[["row", metric, f"{metric}_std"]].to_numpy()
            }
    charts.bars(path, panels, "score", title)


def draw_lines(path: Path, table: pd.DataFrame, xlabel: str, title: str, log_x: bool) -> None:
    """Draws ACC against x for each set; x = inf is drawn as a level."""
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for (dataset, name), mine in table.groupby(["set", "row"], sort=False):
        series = panels.setdefault(SETS.get(dataset, dataset), {})
        points = zip(mine["x"].astype(float), mine["acc"], mine["acc_std"], strict=True)
        series[name] = list(points)
    charts.lines(path, panels, xlabel, "ACC", title, log_x)


def draw_bytes(path: Path, runs: pd.DataFrame, title: str) -> None:
    """Draws ACC after every round against all bytes that had travelled by then, for each set."""
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for (dataset, _, name), mine in rows_of(runs):
        series = panels.setdefault(SETS.get(dataset, dataset), {})
        for group, kind in KINDS.items():
            series[name + kind] = [
                (by_round(mine, "bytes", after)[0] / 1e9, acc.mean(), pd.Series(acc).std())
                for after in range(1, int(mine["rounds_made"].iloc[0]) + 1)
                for acc in [by_round(mine, f"{group}/pooled/acc", after)]
            ]
    charts.lines(path, panels, "GB sent and received by all clients", "ACC", title, log_x=True)
