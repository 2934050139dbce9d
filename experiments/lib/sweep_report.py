"""What a sweep has found: mean and deviation of each setting, tables, and what ranks them.

A run is a row: a column for each axis, "seed", "status" ("ok", or "failed: " and why), and its
metrics as numbers, NaN or left out where they were not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from experiments.grid import Axis
from experiments.lib import plots_sweep

Row = dict[str, Any]

SCORES = ("acc", "nmi", "ari", "purity")  # these need labels; all at most 1
SMALLER_IS_BETTER = frozenset({"loss"})
_FEWEST = 3  # settings that a correlation is told of


def summarise(rows: Sequence[Row], axes_names: Sequence[str], metrics: Sequence[str]) -> list[Row]:
    """Each setting once, in order of first appearance.

    Args:
      rows: Runs.
      axes_names: Columns that tell settings apart.
      metrics: Columns of numbers.

    Returns:
      For each setting its axes, "n_ok" and "n_failed", and of every metric "<metric>_mean" and
      "<metric>_std" (population form) over the finite values of the runs that are ok; NaN where
      there are none.
    """
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(tuple(row[name] for name in axes_names), []).append(row)
    summary = []
    for setting, mine in runs.items():
        ok = [row for row in mine if row["status"] == "ok"]
        entry: Row = dict(zip(axes_names, setting, strict=True))
        entry |= {"n_ok": len(ok), "n_failed": len(mine) - len(ok)}
        for metric in metrics:
            values = np.asarray([row.get(metric, math.nan) for row in ok], float)
            values = values[np.isfinite(values)]
            entry[f"{metric}_mean"] = float(values.mean()) if len(values) else math.nan
            entry[f"{metric}_std"] = float(values.std()) if len(values) else math.nan
        summary.append(entry)
    return summary


def ranking(summary: Sequence[Row], by: str, smaller_is_better: bool) -> list[int]:
    """Places in `summary` from best to worst by the mean of a metric.

    NaN comes last; ties stay in the order of `summary`.
    """
    values = np.asarray([entry[f"{by}_mean"] for entry in summary], float)
    return [int(i) for i in np.argsort(values if smaller_is_better else -values, kind="stable")]


def table(
    summary: Sequence[Row],
    axes_names: Sequence[str],
    metrics: Sequence[str],
    by: str = "acc",
    most: int = 30,
) -> list[str]:
    """Lines for the terminal: a setting each, the best by mean `by` first.

    Args:
      summary: Of `summarise`.
      axes_names: Columns that tell settings apart.
      metrics: Columns of the table; scores are shown with their deviation over seeds.
      by: What settings are sorted by.
      most: Settings beyond so many are left out, and their number is told.
    """
    order = ranking(summary, by, by in SMALLER_IS_BETTER)
    cells = [["", *axes_names, *(m.upper() if m in SCORES else m for m in metrics), "failed"]]
    for place, i in enumerate(order[:most], 1):
        entry = summary[i]
        values = [_spread(entry, m) if m in SCORES else _plain(entry[f"{m}_mean"]) for m in metrics]
        failed = f"{entry['n_failed']} of {entry['n_ok'] + entry['n_failed']}"
        failed = failed if entry["n_failed"] else "-"
        cells.append([str(place), *(entry[name] for name in axes_names), *values, failed])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in cells]
    if len(order) > most:
        told = f"the best {most} of {len(order)} settings by {_title(by)}"
        lines.append(f"{told}; {len(order) - most} left out")
    return lines


def best_lines(
    summary: Sequence[Row],
    axes_names: Sequence[str],
    by: str = "acc",
    measures: Sequence[str] = ("silhouette", "loss"),
) -> list[str]:
    """The best setting by a score, and what choosing without labels would have come to.

    Args:
      summary: Of `summarise`.
      axes_names: Columns that tell settings apart.
      by: A score that needs labels.
      measures: Metrics that need none; for each a line with the setting that comes first by it,
        that setting's score and rank by score, and one with Spearman's correlation over settings
        between the measure and the score.
    """
    ran = np.asarray([entry["n_ok"] > 0 for entry in summary])
    if not ran.any():
        return ["no run ended well: there is no best setting"]
    score = np.asarray([entry[f"{by}_mean"] for entry in summary], float)
    name = by.upper()
    if not axes_names:
        return [f"mean {name} of the one setting: {_spread(summary[0], by)}{_failures(summary[0])}"]
    head = f"best by {_title(by)} (needs labels)"
    if np.isfinite(score).any():
        entry = summary[ranking(summary, by, False)[0]]
        lines = [f"{head}: {_setting(entry, axes_names)}: {_spread(entry, by)}{_failures(entry)}"]
    else:
        lines = [f"{head}: no setting has one"]
    for measure in measures:
        smaller = measure in SMALLER_IS_BETTER
        head = f"first by {measure} (no labels)"
        values = np.asarray([entry.get(f"{measure}_mean", math.nan) for entry in summary], float)
        if not np.isfinite(values).any():
            lines.append(f"{head}: not measured in any setting")
            continue
        first = ranking(summary, measure, smaller)[0]
        entry = summary[first]
        line = f"{head}: {_setting(entry, axes_names)}: {measure} {_plain(values[first])}"
        if np.isfinite(score[first]):
            rank = 1 + np.sum(score > score[first])
            line += f", {name} {_spread(entry, by)}, rank {rank} of {np.isfinite(score).sum()}"
            line += f" by {name}"
        line += _failures(entry)
        missing = np.sum(ran & ~np.isfinite(values))
        told = f"; not measured in {missing} of {ran.sum()} settings"
        lines.append(line + (told if missing else ""))
        if np.isfinite(score).any():
            lines.append("    " + _correlation(values, score, name, smaller))
    return lines


def draw(
    folder: Path,
    summary: Sequence[Row],
    axes: Sequence[Axis],
    metric: str,
) -> list[Path]:
    """Draws a metric over the settings, as far as a picture can show them.

    One axis of several values makes lines.png, of all scores where `metric` is one of them; more
    make heatmap.png of the two that have most values, the others at the best setting's. Settings
    drawn at random from ranges of several axes are no grid: they make points.png, a panel an axis.

    Args:
      folder: Where to write.
      summary: Of `summarise`.
      axes: What was varied.
      metric: Whose means are drawn.

    Returns:
      The files written; none where no axis has several values, or no setting has the metric.
    """
    if not any(np.isfinite(entry[f"{metric}_mean"]) for entry in summary):
        return []
    varied = [axis for axis in axes if len(_values(axis, summary)) > 1]
    n_seeds = max(entry["n_ok"] + entry["n_failed"] for entry in summary)
    label = metric.upper() if metric in SCORES else metric
    over = f", mean over {n_seeds} seeds" if n_seeds > 1 else ""
    if not varied:
        return []
    if len(varied) == 1:
        path = folder / "lines.png"
        _draw_lines(path, summary, varied[0], metric, over)
    elif any(set(_values(axis, summary)) - set(axis.values) for axis in varied):
        path = folder / "points.png"
        panels = {
            axis.name: plots_sweep.Panel(
                [entry[axis.name] for entry in summary], values, _is_log(axis, values)
            )
            for axis in varied
            for values in [_values(axis, summary)]
        }
        title = f"{label} of random settings"
        plots_sweep.points(path, panels, *_columns(summary, metric), label + over, title)
    else:
        path = folder / "heatmap.png"
        _draw_heat_map(path, summary, varied, metric, label, over)
    return [path]


def _draw_heat_map(
    path: Path,
    summary: Sequence[Row],
    varied: Sequence[Axis],
    metric: str,
    label: str,
    over: str,
) -> None:
    """Of the two axes with most values, in the order of the grid."""
    longest = sorted(varied, key=lambda axis: -len(axis.values))[:2]
    rows, columns = (axis for axis in varied if axis in longest)
    others = [axis.name for axis in varied if axis not in longest]
    smaller = metric in SMALLER_IS_BETTER
    best = summary[ranking(summary, metric, smaller)[0]]
    shape = len(rows.values), len(columns.values)
    means, stds, notes = np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape, "not run")
    for entry in summary:
        if all(entry[name] == best[name] for name in others):
            cell = rows.values.index(entry[rows.name]), columns.values.index(entry[columns.name])
            means[cell], stds[cell] = entry[f"{metric}_mean"], entry[f"{metric}_std"]
            notes[cell] = "none" if entry["n_ok"] else "failed"
    title = f"{label} over {rows.name} and {columns.name}"
    if others:
        title += f"\n{_setting(best, others)}, as in the best setting"
    plots_sweep.heat_map(
        path,
        rows.values,
        columns.values,
        means,
        stds,
        (rows.name, columns.name),
        title,
        label + over,
        smaller,
        notes,
    )


def _draw_lines(path: Path, summary: Sequence[Row], axis: Axis, metric: str, over: str) -> None:
    """Of the metric, and of all other scores where it is a score."""
    shown = [metric]
    if metric in SCORES:
        shown += [m for m in SCORES if m != metric and f"{m}_mean" in summary[0]]
    columns = {m.upper() if m in SCORES else m: _columns(summary, m) for m in shown}
    columns = {name: pair for name, pair in columns.items() if np.isfinite(pair[0]).any()}
    label = "score" if len(columns) > 1 else next(iter(columns))
    texts = [entry[axis.name] for entry in summary]
    plots_sweep.lines(
        path,
        texts,
        {name: means for name, (means, _) in columns.items()},
        {name: stds for name, (_, stds) in columns.items()},
        axis.name,
        label + over,
        f"{', '.join(columns)} over {axis.name}",
        _is_log(axis, texts),
    )


def _columns(summary: Sequence[Row], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Means and deviations of a metric over the settings."""
    means = np.asarray([entry[f"{metric}_mean"] for entry in summary], float)
    return means, np.asarray([entry[f"{metric}_std"] for entry in summary], float)


def _values(axis: Axis, summary: Sequence[Row]) -> list[str]:
    """The axis' values, or those that were drawn instead."""
    found = list(dict.fromkeys(entry[axis.name] for entry in summary))
    return found if set(found) - set(axis.values) else list(axis.values)


def _is_log(axis: Axis, texts: Sequence[str]) -> bool:
    """Whether values stand more evenly in logarithms than as they are."""
    if axis.scale is not None:
        return axis.scale == "log"
    numbers = plots_sweep.numbers(texts)
    if numbers is None or len(numbers) < 3 or numbers.min() <= 0:
        return False
    steps, ratios = np.diff(np.sort(numbers)), np.diff(np.log(np.sort(numbers)))
    return float(ratios.std() / ratios.mean()) < float(steps.std() / steps.mean()) - 1e-9


def _setting(entry: Row, axes_names: Sequence[str]) -> str:
    return ", ".join(f"{name}={entry[name]}" for name in axes_names)


def _title(metric: str) -> str:
    return f"mean {metric.upper() if metric in SCORES else metric}"


def _plain(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "-"


def _spread(entry: Row, metric: str) -> str:
    """Mean and deviation of a score; without the zero before the point that nearly all have."""
    mean, std = entry[f"{metric}_mean"], entry[f"{metric}_std"]
    if not math.isfinite(mean):
        return "-"
    return f"{_short(mean)} +- {_short(std)}"


def _short(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 0.9995 else f"{value:.3f}"


def _failures(entry: Row) -> str:
    n = entry["n_failed"]
    return f" ({n} of {n + entry['n_ok']} runs failed)" if n else ""


def _correlation(values: np.ndarray, score: np.ndarray, name: str, smaller: bool) -> str:
    """Spearman's, with what it would be if the measure ranked as the score does."""
    both = np.isfinite(values) & np.isfinite(score)
    values, score = values[both], score[both]
    head = f"Spearman's correlation with mean {name}:"
    if len(values) < _FEWEST:
        return f"{head} none, fewer than {_FEWEST} settings have both"
    if np.ptp(values) == 0 or np.ptp(score) == 0:
        return f"{head} none, all settings are alike"
    rho = _short(float(stats.spearmanr(values, score).statistic))
    ideal = "-1" if smaller else "1"
    return f"{head} {rho} over {len(values)} settings ({ideal} would rank as {name} does)"
