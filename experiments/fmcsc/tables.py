"""FMCSC's tables and figures: what is read from runs of `fmcsc_rows`, and how it is shown."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import base, charts
from experiments.fmcsc_rows import ABLATIONS, ALONE, LOCAL, SETS
from experiments.sweep_runs import ROUNDS

PUBLISHED = Path(__file__).parent / "published"
METRICS = ("acc", "nmi", "ari")

# Between these lines of the README stands table 1.
_MARKS = ("<!-- results: begin -->", "<!-- results: end -->")


# --- What is read from runs.csv -------------------------------------------------------------------


def value(
    row: Mapping[str, str], metric: str, group: str = "all", after: int | None = None
) -> float:
    """A score of a run, after the last round or after round `after`; NaN where there is none."""
    name = f"{group}/pooled/{metric}"
    if after is None:
        return float(row[name])
    numbers = row[ROUNDS + name].split()
    return float(numbers[after - 1]) if after <= len(numbers) else float("nan")


class Entry(NamedTuple):
    """A line of a table: a mean and a deviation over seeds for each metric."""

    set: str
    x: str
    name: str
    seeds: int
    scores: dict[str, tuple[float, float]]
    bytes: float = float("nan")

    def flat(self) -> dict[str, Any]:
        """As a row of table.csv."""
        flat: dict[str, Any] = {
            "set": self.set,
            "x": self.x,
            "row": self.name,
            "seeds": self.seeds or "",
            "megabytes": "" if np.isnan(self.bytes) else round(self.bytes / 1e6, 1),
        }
        for metric, (mean, std) in self.scores.items():
            flat |= {metric: mean, f"{metric}_std": "" if np.isnan(std) else std}
        return flat

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Entry:
        """From a row of table.csv."""
        nan = float("nan")
        scores = {m: (float(row[m]), float(row[f"{m}_std"] or nan)) for m in METRICS}
        size = float(row["megabytes"] or nan) * 1e6
        return cls(row["set"], row["x"], row["row"], int(row["seeds"] or 0), scores, size)


def _of(runs: Sequence[Mapping[str, str]]) -> dict[tuple[str, str, str], list]:
    """Runs by row; those that failed are left out."""
    found: dict[tuple[str, str, str], list] = {}
    for run in runs:
        if run["status"] == "ok":
            found.setdefault((run["set"], run["x"], run["row"]), []).append(run)
    return found


def entry(
    key: tuple[str, str, str],
    runs: Sequence[Mapping[str, str]],
    group: str = "all",
    after: int | None = None,
    way: str = "pooled",
) -> Entry:
    """Mean and population deviation over the seeds of a row."""
    scores = {}
    for metric in METRICS:
        if way == "pooled":
            values = [value(run, metric, group, after) for run in runs]
        else:
            values = [float(run[f"{group}/{way}/{metric}"]) for run in runs]
        # One seed has no spread.
        std = float(np.std(values)) if len(values) > 1 else float("nan")
        scores[metric] = (float(np.mean(values)), std)
    traffic = [
        float(run[f"{ROUNDS}bytes"].split()[after - 1])
        if after
        else float(run["bytes_up"]) + float(run["bytes_down"])
        for run in runs
    ]
    return Entry(*key, len(runs), scores, float(np.mean(traffic)))


def published_1() -> dict[tuple[str, str, str], dict[str, tuple[float, float]]]:
    """Table 1 of the paper, `{(set, ratio, method): {metric: (mean, std)}}`, as fractions."""
    names = {title: name for name, title in SETS.items()}
    found: dict[tuple[str, str, str], dict[str, tuple[float, float]]] = {}
    for row in read(PUBLISHED / "fmcsc_table1.csv"):
        key = (names[row["dataset"]], row["ratio_multi_single"], row["method"])
        pair = (float(row["mean_percent"]) / 100, float(row["std_percent"]) / 100)
        found.setdefault(key, {})[row["metric"].lower()] = pair
    return found


def table_1(runs: Sequence[Mapping[str, str]], references: Sequence[Entry]) -> list[Entry]:
    """For each set and ratio the paper's row and the best other of it, then what was measured."""
    paper = published_1()
    measured = _of(runs)
    result = []
    for dataset, ratio in dict.fromkeys((s, x) for s, x, _ in measured):
        of_cell = {m: v for (s, x, m), v in paper.items() if (s, x) == (dataset, ratio)}
        if of_cell:
            others = [m for m in of_cell if m != "FMCSC"]
            best = max(others, key=lambda m: of_cell[m]["acc"][0])
            for method in ("FMCSC", best):
                result.append(Entry(dataset, ratio, f"published: {method}", 0, of_cell[method]))
        for (s, x, name), of_row in measured.items():
            if (s, x) != (dataset, ratio):
                continue
            last = min(int(run["rounds_made"]) for run in of_row)
            if name in (LOCAL, ALONE):
                result.append(entry((s, x, name), of_row))
                matched = (s, x, f"{name}, each matched by itself")
                result.append(entry(matched, of_row, way="per_client"))
                continue
            for after in sorted({min(5, last), last}):
                title = f"{name}, R = {after}"
                result.append(entry((s, x, title), of_row, after=after))
                for group, label in (("multi_view", "multi-view"), ("partial_view", "single-view")):
                    key = (s, x, f"{title}: {label} clients")
                    result.append(entry(key, of_row, group, after))
        result += [e for e in references if (e.set, e.x) == (dataset, ratio)]
    return result


def table_2(runs: Sequence[Mapping[str, str]]) -> list[Entry]:
    """The ablation, the paper's item beside ours."""
    names = {title: name for name, title in SETS.items()}
    paper: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for row in read(PUBLISHED / "fmcsc_table2.csv"):
        pair = (float(row["value_percent"]) / 100, float("nan"))
        key = (names[row["dataset"]], row["components_kept"])
        paper.setdefault(key, {})[row["metric"].lower()] = pair
    result = []
    for (dataset, letters, name), of_row in _of(runs).items():
        if (dataset, letters) in paper:
            scores = paper.pop((dataset, letters))
            result.append(Entry(dataset, letters, f"published: {ABLATIONS[letters]}", 0, scores))
        result.append(entry((dataset, letters, f"{name}: {ABLATIONS[letters]}"), of_row))
    return sorted(
        result, key=lambda e: (e.set, not e.name.startswith("published"), e.name.split(":")[0])
    )


def table_3(runs: Sequence[Mapping[str, str]]) -> list[Entry]:
    """Participation: clients that took part and clients that did not, the paper's beside ours.

    A share is that of multi-view and of single-view clients, rounded, one client of every view at
    least: of few clients the two groups can differ in how many hold all views.
    """
    names = {title: name for name, title in SETS.items()}
    paper = {
        (names[row["dataset"]], row["participation_rate"], row["client_type"]): float(
            row["ACC_percent"]
        )
        / 100
        for row in read(PUBLISHED / "fmcsc_table3.csv")
    }
    nan = float("nan")
    result = []
    for (dataset, share, name), of_row in _of(runs).items():
        for kind in ("participating", "non-participating"):
            number = paper.pop((dataset, share, kind), None)
            if number is not None:
                scores = {"acc": (number, nan), "nmi": (nan, nan), "ari": (nan, nan)}
                result.append(Entry(dataset, share, f"published: {kind}", 0, scores))
            group = kind.replace("-", "_")
            result.append(entry((dataset, share, f"{name}: {kind}"), of_row, group))
    return result


def plain(runs: Sequence[Mapping[str, str]]) -> list[Entry]:
    """All rows after their last round, multi-view and single-view clients apart too."""
    result = []
    for (dataset, x, name), of_row in _of(runs).items():
        result.append(entry((dataset, x, name), of_row))
        for group, label in (("multi_view", "multi-view"), ("partial_view", "single-view")):
            result.append(entry((dataset, x, f"{name}: {label} clients"), of_row, group))
    return result


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a .csv."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def of_one_colour(table: Sequence[Entry]) -> list[Entry]:
    """Of table 1: the best other method is another one in every cell; a picture needs one name."""

    def name(e: Entry) -> str:
        is_other = e.name.startswith("published: ") and e.name != "published: FMCSC"
        return "published: best other method" if is_other else e.name

    return [e._replace(name=name(e)) for e in table]


def short(table: Sequence[Entry]) -> list[Entry]:
    """Of table 1, without the rows of one kind of clients."""
    return [e for e in table if not e.name.endswith(" clients")]


# --- What is shown --------------------------------------------------------------------------------


def _cell(score: tuple[float, float]) -> str:
    mean, std = score
    if np.isnan(mean):
        return "-"
    return f"{mean:.3f}" + ("" if np.isnan(std) else f" +- {std:.3f}")


def lines(table: Sequence[Entry]) -> Iterator[str]:
    """The table for the terminal."""
    width = max(len(e.name) for e in table) + 2
    head = "".join(f"{m.upper():>16s}" for m in METRICS)
    varied = max(len(e.x) for e in table) + 2
    yield f"{'set':15s}{'':{varied}s}{'':{width}s}{'seeds':>6s}{head}{'MB':>10s}"
    for e in table:
        cells = "".join(f"{_cell(e.scores[m]):>16s}" for m in METRICS)
        size = "" if np.isnan(e.bytes) else f"{e.bytes / 1e6:.0f}"
        yield f"{e.set:15s}{e.x:{varied}s}{e.name:{width}s}{e.seeds or '':>6}{cells}{size:>10s}"


def markdown(table: Sequence[Entry], x: str) -> str:
    """The table in Markdown."""
    text = [f"| set | {x} | | seeds | ACC | NMI | ARI | MB |", "|---|---|---|---|---|---|---|---|"]
    for e in table:
        cells = " | ".join(_cell(e.scores[m]) for m in METRICS)
        size = "" if np.isnan(e.bytes) else f"{e.bytes / 1e6:.0f}"
        title = SETS.get(e.set, e.set)
        text.append(f"| {title} | {e.x} | {e.name} | {e.seeds or ''} | {cells} | {size} |")
    return "\n".join(text) + "\n"


def around_marks(path: Path) -> tuple[str, str]:
    """What stands before and after the marks of a file.

    Raises:
      ValueError, OSError: There are no marks, or the file cannot be read.
    """
    before, begin, rest = path.read_text().partition(_MARKS[0])
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
    base.write(path, f"{before}{_MARKS[0]}\n{text}{_MARKS[1]}{after}")


def draw_bars(path: Path, table: Sequence[Entry], title: str) -> None:
    """ACC and NMI, a group of bars for each set and x."""
    shown = [e for e in table if "clients" not in e.name]
    panels = {
        metric.upper(): {
            f"{SETS.get(s, s)}\n{x}": {
                e.name: (e.scores[metric][0], float(np.nan_to_num(e.scores[metric][1])))
                for e in shown
                if (e.set, e.x) == (s, x) and not np.isnan(e.scores[metric][0])
            }
            for s, x in dict.fromkeys((e.set, e.x) for e in shown)
        }
        for metric in ("acc", "nmi")
    }
    charts.bars(path, panels, "score", title)


def draw_lines(path: Path, table: Sequence[Entry], xlabel: str, title: str, log_x: bool) -> None:
    """ACC against x for each set; x = inf is drawn as a level."""
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for e in table:
        mean, std = e.scores["acc"]
        series = panels.setdefault(SETS.get(e.set, e.set), {})
        series.setdefault(e.name, []).append((float(e.x), mean, std))
    charts.lines(path, panels, xlabel, "ACC", title, log_x)


_KINDS = (("all", ""), ("multi_view", ": multi-view"), ("partial_view", ": single-view"))


def draw_bytes(path: Path, runs: Sequence[Mapping[str, str]], title: str) -> None:
    """ACC after every round against all bytes that had travelled by then, for each set."""
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for (dataset, _, name), of_row in _of(runs).items():
        series = panels.setdefault(SETS.get(dataset, dataset), {})
        for group, label in _KINDS:
            points = series.setdefault(name + label, [])
            for r in range(int(of_row[0]["rounds_made"])):
                acc = [value(run, "acc", group, r + 1) for run in of_row]
                sent = float(of_row[0][f"{ROUNDS}bytes"].split()[r]) / 1e9
                points.append((sent, float(np.mean(acc)), float(np.std(acc))))
    charts.lines(path, panels, "GB sent and received by all clients", "ACC", title, log_x=True)
