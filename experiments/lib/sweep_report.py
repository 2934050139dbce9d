"""What a sweep has found: mean and deviation of each setting, tables, and what ranks them.

A run is a row: a column for each axis, "seed", "status" ("ok", or "failed: " and why), and its
metrics as numbers, NaN or left out where they were not measured.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.lib import page, plots_sweep
from experiments.lib.data import DataSettings, HorizontalSettings, VerticalSettings
from experiments.lib.grid import Axis
from experiments.lib.text import table_lines
from jaxfedmvc.metrics.host import METRICS as SCORES  # these need labels; all at most 1

SMALLER_IS_BETTER = frozenset({"loss"})
# Settings that are part of a method's loss, by family, or say what it is a loss of: losses of their
# values are different measures. Of methods that are not here a sweep knows no loss.
IN_LOSS = {
    # Temperatures, forms and terms of eq. (8); of contrasts also the rows to tell apart.
    "fmcsc": (
        *("tau_m", "tau_p", "mask_rate", "contrast", "squared_error", "components"),
        *("batch_size", "partial_rounds"),
    ),
    # J = sum_h v_h^alpha sum mu^m KED over the clusters and the views that count.
    "fedhk": (
        *("fuzzifier", "alpha", "beta", "hkc", "n_clusters", "limit", "clip", "placement"),
        *("choose_views", "least_agreement"),
    ),
    # Of vectors of length sqrt(d); eq. (3) in the literal mode.
    "mgcd": ("gamma", "mode", "losses", "encoder", "latent_dim"),
    # The error of reconstruction, and guidance times the divergence from targets for K clusters.
    "fcuif": ("guidance", "n_clusters"),
    # What K components leave over.
    "fedmvl": ("n_clusters",),
}
# More clusters tell more.
_IN_INFORMATION = ("n_clusters",)
# Another set, or another deal of it, is another measure.
_OF_DATA = frozenset(
    field.name
    for settings in (DataSettings, HorizontalSettings, VerticalSettings)
    for field in dataclasses.fields(settings)
) - {"n_clusters"}
_MOST_TICKS = 12  # of an axis of the page
_FEWEST = 3  # settings that a correlation is computed of


def summarise(
    runs: pd.DataFrame | Sequence[Mapping[str, Any]],
    names: Sequence[str],
    metrics: Sequence[str],
    spent: Sequence[str] = (),
) -> pd.DataFrame:
    """Returns each setting once, in order of first appearance.

    Args:
      runs: A row a run.
      names: Columns that tell settings apart.
      metrics: Columns of numbers, or of numbers as text.
      spent: Such columns of what a run costs, whether it is ok or not.

    Returns:
      For each setting its axes, "n_ok" and "n_failed", the most `spent` of its runs, and of every
      metric "<metric>_mean" and "<metric>_std" (sample form, NaN of one) over the finite values of
      the runs that are ok; NaN where there are none.
    """
    runs = pd.DataFrame(runs)
    ok = runs["status"] == "ok"
    values = runs.reindex(columns=list(metrics)).astype(float)
    values = values.where(np.isfinite(values) & ok.to_numpy()[:, None])
    keys = [runs[name] for name in names] or [pd.Series(0, runs.index)]
    columns = {"n_ok": ok.groupby(keys, sort=False).sum()}
    columns["n_failed"] = (~ok).groupby(keys, sort=False).sum()
    for name in spent:
        columns[name] = runs[name].astype(float).groupby(keys, sort=False).max()
    for metric in metrics:
        group = values[metric].groupby(keys, sort=False)
        columns |= {f"{metric}_mean": group.mean(), f"{metric}_std": group.std()}
    return pd.DataFrame(columns).reset_index(drop=not names)


def ranking(summary: pd.DataFrame, by: str) -> list[int]:
    """Returns places in `summary` from best to worst by a metric's mean.

    NaN comes last; ties stay in the order of `summary`.
    """
    smaller = by in SMALLER_IS_BETTER
    return list(summary[f"{by}_mean"].sort_values(ascending=smaller, kind="stable").index)


def table(
    summary: pd.DataFrame,
    names: Sequence[str],
    metrics: Sequence[str],
    by: str = "acc",
    most: int = 30,
    spent: Sequence[str] = (),
    width: int | None = None,
) -> list[str]:
    """Returns lines for the terminal: a setting each, the best by mean `by` first.

    Args:
      summary: Of `summarise`.
      names: Columns that tell settings apart.
      metrics: Columns of the table; scores are shown with their deviation over seeds.
      by: What settings are sorted by.
      most: Settings beyond so many are left out, and their number is said.
      spent: Columns of what a run costs.
      width: Of a line; see `table_lines`.
    """
    best = summary.loc[ranking(summary, by)[:most]]
    cells = best[list(names)].copy()
    for name in spent:
        cells[name] = best[name].map("{:.3g}".format)
    for metric in metrics:
        write = _spread if metric in SCORES else _mean
        cells[_named(metric)] = [write(entry, metric) for _, entry in best.iterrows()]
    cells["failed"] = [
        f"{e.n_failed} of {e.n_ok + e.n_failed}" if e.n_failed else "-" for e in best.itertuples()
    ]
    cells.index = pd.Index(range(1, len(best) + 1))
    lines = table_lines(cells, width)
    if len(summary) > most:
        left = len(summary) - most
        lines.append(
            f"the best {most} of {len(summary)} settings by mean {_named(by)}; {left} left out"
        )
    return lines


def titled(summary: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Returns a summary for the page: its columns by titles, without what no setting has.

    Args:
      summary: Of `summarise`.
      metrics: Of its columns.
    """
    titles = {"n_ok": "runs ended well", "n_failed": "runs failed"}
    for metric in metrics:
        titles |= {f"{metric}_mean": _named(metric), f"{metric}_std": f"{_named(metric)} deviation"}
    return summary.dropna(axis="columns", how="all").rename(columns=titles)


def best_lines(
    summary: pd.DataFrame,
    names: Sequence[str],
    part_of: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Says which setting is best by ACC, and what choosing without labels would have come to.

    For each measure that needs none there is a line with the setting that comes first by it, that
    setting's ACC and rank by ACC, and one with Spearman's correlation over settings between the
    measure and ACC.

    Args:
      summary: Of `summarise`.
      names: Columns that tell settings apart.
      part_of: For measures the columns that change what they measure, see `axes_in`: where there
        are some, no setting is first by it.
    """
    if not summary["n_ok"].any():
        return ["no run ended well: there is no best setting"]
    if not names:
        entry = summary.loc[0]
        return [f"mean ACC of the one setting: {_spread(entry, 'acc')}{_failures(entry)}"]
    means = summary["acc_mean"]
    scored = bool(means.notna().any())
    entry = summary.loc[ranking(summary, "acc")[0]]
    found = f"{_setting(entry, names)}: {_spread(entry, 'acc')}{_failures(entry)}"
    if (n_alike := int((means == entry["acc_mean"]).sum())) > 1:
        found = f"{n_alike} settings are level, of which the first is {found}"
    lines = [f"best by mean ACC (needs labels): {found if scored else 'no setting has one'}"]
    for measure in ("information", "silhouette", "loss"):
        changing = (part_of or {}).get(measure)
        if changing and f"{measure}_mean" in summary and summary[f"{measure}_mean"].notna().any():
            lines.append(
                f"first by {measure} (no labels): none, since what it measures changes with"
                f" {', '.join(changing)}"
            )
            continue
        lines += _chosen_by(summary, names, measure)
    return lines


def axes_in(family: str, summary: pd.DataFrame, axes: Sequence[Axis]) -> dict[str, list[str]]:
    """Returns the axes that were varied and change what a measure measures, for each measure.

    It then ranks no settings.

    Args:
      family: Of the method, see `hooks.family_of`.
      summary: Of `summarise`.
      axes: What was varied.
    """
    parts = {"loss": IN_LOSS.get(family, ()), "information": _IN_INFORMATION}
    varied = [axis.name for axis in axes if summary[axis.name].nunique() > 1]
    return {m: [a for a in varied if a in names or a in _OF_DATA] for m, names in parts.items()}


def idle_lines(summary: pd.DataFrame, axes: Sequence[Axis]) -> list[str]:
    """Says which axes changed no mean of any metric, wherever the other axes stayed as they were.

    Such a number may belong to a part of the method that is switched off.

    Args:
      summary: Of `summarise`.
      axes: What was varied.
    """
    means = [name for name in summary if name.endswith("_mean") and summary[name].notna().any()]
    ran = summary[summary["n_ok"] > 0]
    lines = []
    for axis in axes:
        others = [other.name for other in axes if other is not axis]
        groups = ran.groupby(others or (lambda _: 0), sort=False)
        tried = groups[axis.name].nunique()
        alike = groups[means].nunique(dropna=False).max(axis=1) == 1
        if len(tried) and tried.min() > 1 and alike.all():
            lines.append(f"{axis.name}: all its values gave the same results; is it in use here?")
    return lines


def _chosen_by(summary: pd.DataFrame, names: Sequence[str], measure: str) -> list[str]:
    """Returns the lines about choosing by a measure that needs no labels."""
    head = f"first by {measure} (no labels)"
    score = summary["acc_mean"]
    if f"{measure}_mean" not in summary or summary[f"{measure}_mean"].isna().all():
        return [f"{head}: not measured in any setting"]
    values = summary[f"{measure}_mean"]
    entry = summary.loc[ranking(summary, measure)[0]]
    line = f"{head}: {_setting(entry, names)}: {measure} {_mean(entry, measure)}"
    if math.isfinite(entry["acc_mean"]):
        rank = 1 + (score > entry["acc_mean"]).sum()
        line += f", ACC {_spread(entry, 'acc')}, rank {rank} of {score.count()} by ACC"
    line += _failures(entry)
    ran = summary["n_ok"] > 0
    if missing := (ran & values.isna()).sum():
        line += f"; not measured in {missing} of {ran.sum()} settings"
    return [line, f"    {_correlation(values, score, measure)}"] if score.notna().any() else [line]


def _correlation(values: pd.Series, score: pd.Series, measure: str) -> str:
    """Says Spearman's with ACC, and what it would be if the measure ranked as ACC does."""
    both = pd.DataFrame({"value": values, "score": score}).dropna()
    head = "Spearman's correlation with mean ACC:"
    if len(both) < _FEWEST:
        return f"{head} none, fewer than {_FEWEST} settings have both"
    if (both.nunique() == 1).any():
        return f"{head} none, all settings are alike"
    rho = both["value"].rank().corr(both["score"].rank())
    ideal = "-1" if measure in SMALLER_IS_BETTER else "1"
    return f"{head} {_short(rho)} over {len(both)} settings ({ideal} would rank as ACC does)"


# --- Pictures -------------------------------------------------------------------------------------


def draw(
    folder: Path, summary: pd.DataFrame, axes: Sequence[Axis], metric: str, of: str = ""
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
      of: What was swept, for the title.

    Returns:
      The files written; none where no axis has several values, or no setting has the metric.
    """
    varied = [axis for axis in axes if summary[axis.name].nunique() > 1]
    if not varied or summary[f"{metric}_mean"].isna().all():
        return []
    n_seeds = summary["n_ok"][summary["n_ok"] > 0]
    fewest, most = n_seeds.min(), n_seeds.max()
    counts = f"{most}" if fewest == most else f"{fewest} to {most}"
    over = f", mean over {counts} seeds" if most > 1 else ""
    head = f"{of}: " if of else ""
    if len(varied) == 1:
        path = folder / "lines.png"
        _draw_lines(path, summary, varied[0], metric, over, head)
    elif any(not set(summary[axis.name]) <= set(axis.values) for axis in varied):
        path = folder / "points.png"
        label, title = _named(metric) + over, f"{head}{_named(metric)} of random settings"
        plots_sweep.points(path, summary, varied, metric, label, title)
    else:
        path = folder / "heatmap.png"
        _draw_heat_map(path, summary, varied, metric, over, head)
    return [path]


def figures(
    summary: pd.DataFrame, names: Sequence[str], metrics: Sequence[str], by: str
) -> list[page.Figure]:
    """Returns figures of a page: parallel coordinates of all settings, and a map of two axes.

    Settings that were drawn leave most cells of a map empty: they get none.

    Args:
      summary: As `summarise` returns it.
      names: Columns of the axes.
      metrics: Metrics that have numbers.
      by: The one that settings are coloured by.
    """
    known = summary[np.isfinite(summary[f"{by}_mean"])]
    if known.empty or not names:
        return []
    dimensions = [_dimension(name, known[name]) for name in names]
    dimensions += [
        _of_numbers(_named(metric), known[f"{metric}_mean"].to_numpy()) for metric in metrics
    ]
    line = {"color": known[f"{by}_mean"].to_numpy(), "colorscale": page.GREYS}
    line |= {"showscale": bool(np.ptp(line["color"])), "colorbar": {"title": {"text": _named(by)}}}
    trace = {"type": "parcoords", "dimensions": dimensions, "line": line}
    note = (
        f"a line is a setting, the mean of its seeds, coloured by {_named(by)}; drag along an axis"
    )
    if left := len(summary) - len(known):
        note += f"; without {_named(by)}, and so without a line: {left} of {len(summary)} settings"
    layout = {"height": 480, "margin": {"t": 60, "b": 30, "l": 60, "r": 60}}
    found = [page.Figure("All settings", [trace], layout, note=note)]
    n_cells = math.prod(summary[name].nunique() for name in names)
    if len(names) == 2 and n_cells < 2 * len(summary):
        found.append(_map(summary, names, by))
    return found


def _map(summary: pd.DataFrame, names: Sequence[str], by: str) -> page.Figure:
    """Returns a map of two axes; cells without a number say why they have none."""
    cells = summary.set_index(list(names))
    rows, columns = (_ordered(summary[name]) for name in names)

    def grid(column: str) -> pd.DataFrame:
        return cells[column].unstack().reindex(index=rows, columns=columns)

    values, notes = grid(f"{by}_mean").to_numpy(float), _notes(grid("n_ok")).to_numpy()
    x, y = ([str(value) for value in found] for found in (columns, rows))
    heat = {
        "type": "heatmap",
        "colorbar": {"title": {"text": _named(by)}},
        "z": [page.with_gaps(row) for row in values],
        "x": x,
        "y": y,
        "text": [[_short(v) if np.isfinite(v) else "" for v in row] for row in values],
        "texttemplate": "%{text}",
        "colorscale": page.RANKS,
    }
    layout: dict[str, Any] = {
        axis: {"title": {"text": name}, "type": "category", "showgrid": False}
        for axis, name in zip(("yaxis", "xaxis"), names, strict=True)
    }
    layout["annotations"] = [  # by their places, as Plotly takes a category such as 0.5 for one
        {"x": j, "y": i, "text": notes[i, j], "showarrow": False}
        for i, j in np.argwhere(~np.isfinite(values)).tolist()
    ]
    return page.Figure(_named(by), [heat], layout)


def _notes(n_ok: pd.DataFrame) -> pd.DataFrame:
    """Returns why a cell of a map has no number, by how many of its runs ended well."""
    return n_ok.map(lambda n: "not run" if math.isnan(n) else "none" if n else "failed")


def _ordered(column: pd.Series) -> list[Any]:
    """Returns the values of an axis once each: numbers by size, words as they come."""
    values = column.dropna().drop_duplicates()
    numbers = pd.to_numeric(values, errors="coerce")
    return list(values if numbers.isna().any() else values[numbers.sort_values().index])


def _dimension(name: str, column: pd.Series) -> dict[str, Any]:
    """Returns an axis of parallel coordinates: of numbers, or of words in their order."""
    numbers = pd.to_numeric(column, errors="coerce")
    if numbers.notna().all() and np.isfinite(numbers).all():
        values = numbers.to_numpy(float)
        if values.min() > 0 and values.max() / values.min() >= 100:
            ticks = np.unique(values)
            if len(ticks) > _MOST_TICKS:  # of values that were drawn: they would overlap
                powers = np.arange(np.ceil(np.log10(ticks[0])), np.floor(np.log10(ticks[-1])) + 1)
                ticks = 10.0**powers
            return {
                "label": name,
                "values": np.log10(values),
                "tickvals": np.log10(ticks),
                "ticktext": [f"{v:g}" for v in ticks],
            }
        return _of_numbers(name, values)
    codes, words = pd.factorize(column.astype(str))
    return {
        "label": name,
        "values": codes.astype(float),
        "tickvals": np.arange(len(words), dtype=float),
        "ticktext": list(words),
    }


def _of_numbers(label: str, values: np.ndarray) -> dict[str, Any]:
    """Returns an axis of numbers, with a tick at the only one where all are alike."""
    found = np.unique(values[np.isfinite(values)])
    if len(found) != 1:
        return {"label": label, "values": values, "tickformat": ".3~g"}  # else 1e-5 is 10µ
    # Plotly would make up a range around it, such as an ACC up to 1.05.
    return {"label": label, "values": values, "tickvals": found, "ticktext": [f"{found[0]:.4g}"]}


def _draw_lines(
    path: Path, summary: pd.DataFrame, axis: Axis, metric: str, over: str, head: str
) -> None:
    """Draws the metric, and all other scores where it is a score."""
    shown = [metric, *(m for m in SCORES if m != metric and metric in SCORES)]
    shown = [m for m in shown if f"{m}_mean" in summary and summary[f"{m}_mean"].notna().any()]
    series = {m: _named(m) for m in shown}
    label = ("score" if len(shown) > 1 else _named(metric)) + over
    title = f"{head}{', '.join(series.values())} over {axis.name}"
    plots_sweep.lines(path, summary, axis, series, label, title)


def _draw_heat_map(
    path: Path, summary: pd.DataFrame, varied: Sequence[Axis], metric: str, over: str, head: str
) -> None:
    """Draws the two axes with most values, in the order of the grid."""
    longest = sorted(varied, key=lambda axis: -len(axis.values))[:2]
    rows, columns = (axis for axis in varied if axis in longest)
    others = [axis.name for axis in varied if axis not in longest]
    best = summary.loc[ranking(summary, metric)[0]]
    same = (summary[others] == best[others]).all(axis=1)
    cells = summary[same].set_index([rows.name, columns.name])

    def grid(column: str) -> pd.DataFrame:
        return cells[column].unstack().reindex(index=rows.values, columns=columns.values)

    notes = _notes(grid("n_ok"))
    title = f"{head}{_named(metric)} over {rows.name} and {columns.name}, the best in a frame"
    if others:
        title += f"\n{_setting(best, others)}, as in the best setting"
    plots_sweep.heat_map(
        path,
        grid(f"{metric}_mean"),
        grid(f"{metric}_std"),
        title,
        _named(metric) + over,
        metric in SMALLER_IS_BETTER,
        notes,
    )


# --- Words ----------------------------------------------------------------------------------------


def _setting(entry: pd.Series, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={entry[name]}" for name in names)


def _named(metric: str) -> str:
    return metric.upper() if metric in SCORES else metric


def _mean(entry: pd.Series, metric: str) -> str:
    value = entry[f"{metric}_mean"]
    return f"{value:.4g}" if math.isfinite(value) else "-"


def _spread(entry: pd.Series, metric: str) -> str:
    """Writes mean and deviation, without the zero before the point that nearly all scores have."""
    mean, std = entry[f"{metric}_mean"], entry[f"{metric}_std"]
    if not math.isfinite(mean):
        return "-"
    return f"{_short(mean)} +- {_short(std)}" if math.isfinite(std) else _short(mean)


def _short(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 0.9995 else f"{value:.3f}"


def _failures(entry: pd.Series) -> str:
    n = entry["n_failed"]
    return f" ({n} of {n + entry['n_ok']} runs failed)" if n else ""
