"""Plots of studies: grouped bars, lines with error bars, colours that match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment
from sklearn.metrics.cluster import contingency_matrix

from experiments.lib import plots

# x, mean and standard deviation of each point of a line.
Line = Sequence[tuple[float, float, float]]
_ERROR_BARS = "error bars: one standard deviation"


def coloured_as(classes: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Renumbers clusters [n] as the classes [n] that they are matched to, for the eye's sake only.

    Clusters beyond the number of classes get numbers of their own.
    """
    table = contingency_matrix(classes, clusters)
    found = np.unique(clusters)
    matched = dict(zip(*linear_sum_assignment(-table.T), strict=True))
    spare = iter(range(table.shape[0], table.shape[0] + len(found)))
    colour = {c: matched[i] if i in matched else next(spare) for i, c in enumerate(found)}
    return np.asarray([colour[c] for c in clusters])


def bars(
    path: Path,
    panels: Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]],
    ylabel: str,
    title: str,
) -> None:
    """Draws in each panel a group of bars for each set, a bar for each method with its deviation.

    Args:
      path: Where to write, .png.
      panels: `{panel: {set: {method: (mean, std)}}}`; a NaN is marked with an x.
      ylabel: Of the values.
      title: Of the whole picture.
    """
    plt = plots.require_matplotlib()
    names = list(dict.fromkeys(m for sets in panels.values() for ms in sets.values() for m in ms))
    most = max(map(len, panels.values()))
    across = max(11.0, 0.09 * most * len(names))
    longest = max(len(line) for sets in panels.values() for x in sets for line in x.split("\n"))
    is_turned = 0.085 * longest + 0.1 > (across - 1) / most  # or they would run into each other
    down = 3.2 + 0.05 * longest * is_turned
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(across, down * len(panels) + 1),
        layout="constrained",
        squeeze=False,
    )
    colours = plt.get_cmap("tab20")(np.arange(len(names)) % 20)
    width = 0.86 / len(names)
    every = [value for sets in panels.values() for ms in sets.values() for value in ms.values()]
    said = [_ERROR_BARS] if any(deviation > 0 for _, deviation in every) else []
    said += ["x: no value"] if any(np.isnan(mean) for mean, _ in every) else []
    shown = set()
    for axis, (panel, sets) in zip(axes[:, 0], panels.items(), strict=True):
        for i, (name, colour) in enumerate(zip(names, colours, strict=True)):
            places = [x for x, methods in enumerate(sets.values()) if name in methods]
            values = [methods[name] for methods in sets.values() if name in methods]
            if values:
                means, deviations = np.transpose(values)
                at = np.asarray(places) + (i - (len(names) - 1) / 2) * width
                for x in at[np.isnan(means)]:
                    axis.text(x, 0, "x", color=colour, fontsize=8, ha="center", va="bottom")
                axis.bar(
                    at,
                    means,
                    width,
                    yerr=deviations,
                    color=colour,
                    error_kw={"linewidth": 0.8},
                    label=None if name in shown else name,
                )
                shown.add(name)
        axis.set_xticks(range(len(sets)), list(sets))
        if is_turned:
            for text in axis.get_xticklabels():
                text.set(rotation=35, ha="right", rotation_mode="anchor")
        axis.set_xlim(-0.5, len(sets) - 0.5)  # a mark in place of an outer bar stretches no axis
        axis.set_title(panel)
        axis.set_ylabel(ylabel)
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle("\n".join([title, "; ".join(said)] if said else [title]))
    ncols = plots.legend_columns(names, figure.get_figwidth(), 4)
    figure.legend(fontsize=8, loc="outside lower center", ncols=ncols)
    plots.save(figure, path)


def lines(
    path: Path,
    panels: Mapping[str, Mapping[str, Line]],
    xlabel: str,
    ylabel: str,
    title: str,
    log_x: bool = False,
    log_y: bool = False,
    same_y: bool = False,
) -> None:
    """Draws in each panel a line for each series, with error bars; one point is a marker.

    Panels stand in rows of four at most.

    Args:
      path: Where to write, .png.
      panels: `{panel: {series: points}}`; points of infinite x are drawn as a level across.
      xlabel: Of all panels.
      ylabel: Of all panels.
      title: Of the whole picture.
      log_x: Whether x is drawn in logarithms.
      log_y: Whether y is.
      same_y: Whether all panels have one scale, so that a small change looks small.
    """
    plt = plots.require_matplotlib()

    n_rows = -(-len(panels) // 4)
    n_columns = -(-len(panels) // n_rows)
    size = 5.2 * n_columns + 0.6, 4.4 * n_rows + 0.4
    figure, axes = plt.subplots(
        n_rows, n_columns, figsize=size, layout="constrained", squeeze=False, sharey=same_y
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    # From large to small markers: lines that lie upon each other are seen to be several.
    sizes = np.linspace(7.5, 4.0, len(names)) if len(names) > 1 else [5.0]
    styles = {
        name: (f"C{i % 10}", "osD^vPX*<>"[i % 10], size)
        for i, (name, size) in enumerate(zip(names, sizes, strict=True))
    }
    shown = set()
    for axis, (panel, series) in zip(axes.flat, panels.items(), strict=False):
        for name, points in series.items():
            colour, marker, size = styles[name]
            label = None if name in shown else name
            shown.add(name)
            finite = np.asarray(sorted(p for p in points if np.isfinite(p[0])), float)
            if len(finite):
                axis.errorbar(
                    finite[:, 0],
                    finite[:, 1],
                    finite[:, 2],
                    color=colour,
                    marker=marker,
                    capsize=2,
                    linewidth=1.2,
                    markersize=size,
                    label=label,
                )
                label = None
            for _, mean, _ in (p for p in points if not np.isfinite(p[0])):
                axis.axhline(mean, color=colour, linestyle="--", linewidth=1, label=label)
                label = None
        every_x = [point[0] for points in series.values() for point in points]
        if log_x:
            axis.set_xscale("log")
            plots.mark_powers(axis, every_x)
        elif all(x == round(x) for x in every_x if np.isfinite(x)):  # rounds, clients
            axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        if log_y:
            axis.set_yscale("log")
        axis.set_title(panel)
        # A level that has a name of its own needs no other.
        is_limit = any(
            {bool(np.isfinite(x)) for x, *_ in points} == {True, False}
            for points in series.values()
        )
        is_told = "dashed" in xlabel
        axis.set_xlabel(f"{xlabel} (dashed: infinite)" if is_limit and not is_told else xlabel)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel(ylabel)
    every = [point for panel in panels.values() for points in panel.values() for point in points]
    is_spread = any(np.isfinite(x) and deviation > 0 for x, _, deviation in every)
    figure.suptitle(f"{title}\n{_ERROR_BARS}" if is_spread else title)
    ncols = plots.legend_columns(names, figure.get_figwidth(), 4)
    figure.legend(fontsize=8, loc="outside lower center", ncols=ncols)
    plots.save(figure, path)
