"""Pictures of a metric over the settings of a sweep; the plotting libraries are imported inside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.lib import plots
from experiments.lib.grid import Axis

# Colour (told apart by the colour-blind, Okabe and Ito), marker, its size, and line. Purity is
# often accuracy: later curves leave to be seen what they lie upon.
_STYLES = (
    ("#0072B2", "o", 9.0, "-"),
    ("#D55E00", "s", 7.0, "--"),
    ("#009E73", "^", 6.0, "-."),
    ("#CC79A7", "D", 3.5, ":"),
)
_INCHES = 0.078  # width of a character of the labels
_CELL = 0.84, 0.56  # of a heat map, in inches
_FEW = 12  # values that get a tick each


def heat_map(
    path: Path,
    means: pd.DataFrame,
    stds: pd.DataFrame,
    title: str,
    label: str,
    smaller_is_better: bool = False,
    notes: pd.DataFrame | None = None,
) -> None:
    """Draws a cell for each pair of values, with mean and deviation; the best has a frame.

    Deviations that are all 0, those of a single seed, are not written.

    Args:
      path: Where to write, .png.
      means: Rows and columns are the values of two axes, which name them; NaN is hatched.
      stds: Alike.
      title: Of the whole picture.
      label: Of the colours.
      smaller_is_better: Bright colours are the better ones either way.
      notes: Texts for the cells that are NaN; None: "failed".
    """
    plt = plots.require_matplotlib()
    import seaborn
    from matplotlib.patches import Rectangle

    across, down = _labels(means.columns), _labels(means.index)
    turned = _width(across) > _CELL[0] - 0.1
    beside, below = 1.9 + _width(down), 1.5 + 0.7 * turned * _width(across)
    width, height = _CELL[0] * len(across) + beside, _CELL[1] * len(down) + below
    figure, axis = plt.subplots(figsize=(max(4.6, width), max(3.0, height)), layout="constrained")
    values, spread = means.to_numpy(float), stds.to_numpy(float)
    pattern = ".3f" if 0.1 <= np.nanmax(np.abs(values), initial=0.0) < 100 else ".3g"
    texts = np.vectorize(lambda x: format(x, pattern), otypes=[object])(values)
    if np.nanmax(spread, initial=0.0) > 0:
        added = [f"\n± {x:{pattern}}" if math.isfinite(x) else "" for x in spread.flat]
        texts += np.asarray(added, object).reshape(spread.shape)
    seaborn.heatmap(
        means.astype(float),
        annot=texts,
        fmt="",
        annot_kws={"fontsize": 9, "linespacing": 1.15},
        cmap="viridis_r" if smaller_is_better else "viridis",
        linewidths=1.2,
        xticklabels=across,
        yticklabels=down,
        cbar_kws={"label": label, "pad": 0.02},
        ax=axis,
    )
    mesh = axis.collections[0]
    for text in axis.texts:  # seaborn writes white on greens that are too light for it
        j, i = (int(place) for place in text.get_position())
        light = seaborn.utils.relative_luminance(mesh.cmap(mesh.norm(values[i, j])))
        text.set_color("0.1" if light > 0.2 else "white")
    axis.patch.set(facecolor="0.93", edgecolor="0.75", hatch="///")
    for i, j in np.argwhere(np.isnan(values)):
        note = "failed" if notes is None else notes.iloc[i, j]
        box = {"facecolor": "0.93", "linewidth": 0, "pad": 1.5}
        axis.text(
            j + 0.5, i + 0.5, note, ha="center", va="center", fontsize=9, color="0.25", bbox=box
        )
    if not np.isnan(values).all():
        best = np.nanmin(values) if smaller_is_better else np.nanmax(values)
        frame = dict[str, Any](fill=False, linewidth=2.6, edgecolor="#D55E00", zorder=3)
        for i, j in np.argwhere(values == best):
            axis.add_patch(Rectangle((j + 0.03, i + 0.03), 0.94, 0.94, **frame))
    axis.tick_params(length=0)
    axis.tick_params(axis="y", rotation=0)
    axis.tick_params(axis="x", rotation=0)
    if turned:
        _turn(axis)
    figure.suptitle(title, fontsize=11)
    plots.save(figure, path)


def lines(
    path: Path,
    summary: pd.DataFrame,
    varied: Axis,
    series: Mapping[str, str],
    ylabel: str,
    title: str,
) -> None:
    """Draws a line for each metric over the values of one axis, with bars of one deviation.

    Args:
      path: Where to write, .png.
      summary: Settings with "<metric>_mean" and "<metric>_std"; where all metrics are NaN, it is
        marked as failed.
      varied: The axis; values that are not all numbers stand beside each other in order.
      series: Metric -> name.
      ylabel: Of the values.
      title: Of the whole picture.
    """
    plt = plots.require_matplotlib()
    texts = list(dict.fromkeys(summary[varied.name]))
    categories = _numbers(texts) is None
    width = max(5.2, 1.6 + 0.75 * len(texts)) if categories else 7.2
    figure, axis = plt.subplots(figsize=(width, 4.6), layout="constrained")
    places = _place(axis, summary[varied.name], varied, width - 1.0)
    summary = summary.iloc[np.argsort(places, kind="stable")]
    places = np.sort(places)
    # Beside each other, so that bars of one category can be told apart.
    shifts = (np.arange(len(series)) - (len(series) - 1) / 2) * (0.12 if categories else 0.0)
    for (metric, name), shift, (colour, marker, size, line) in zip(
        series.items(), shifts, _STYLES, strict=False
    ):
        axis.errorbar(
            places + shift,
            summary[f"{metric}_mean"].to_numpy(),
            summary[f"{metric}_std"].to_numpy(),
            color=colour,
            marker=marker,
            markersize=size,
            linestyle="none" if categories else line,
            linewidth=1.6,
            elinewidth=1.1,
            capsize=3,
            label=name,
        )
    columns = [f"{metric}_mean" for metric in series]
    for place in places[summary[columns].isna().all(axis=1)]:
        axis.axvline(place, color="0.6", linestyle=":", linewidth=1)
        axis.annotate(
            "failed", (place, 0.02), xycoords=axis.get_xaxis_transform(), rotation=90, ha="right"
        )
    turned = [text.get_text() for text in axis.get_xticklabels() if text.get_rotation()]
    if turned:  # room for them below the axes
        figure.set_figheight(4.6 + 0.57 * _width(turned))
    _label_y(axis, ylabel, summary[[f"{metric}_std" for metric in series]])
    figure.suptitle(title, fontsize=11)
    if len(series) > 1:
        figure.legend(fontsize=9, loc="outside lower center", ncols=4, frameon=False)
    plots.save(figure, path)


def points(
    path: Path,
    summary: pd.DataFrame,
    axes: Sequence[Axis],
    metric: str,
    ylabel: str,
    title: str,
) -> None:
    """Draws a panel for each axis: every setting as a point, by its value there and its mean.

    Args:
      path: Where to write, .png.
      summary: Settings with "<metric>_mean" and "<metric>_std", and "n_ok"; where the mean is NaN,
        there is a cross below.
      axes: What was varied.
      metric: What is drawn.
      ylabel: Of the means.
      title: Of the whole picture.
    """
    plt = plots.require_matplotlib()
    across = min(3, len(axes))
    down = math.ceil(len(axes) / across)
    size = 1 + 3.6 * across, 0.6 + 3.2 * down
    figure, grid = plt.subplots(
        down, across, figsize=size, layout="constrained", sharey=True, squeeze=False
    )
    means, stds = (summary[f"{metric}_{kind}"].to_numpy() for kind in ("mean", "std"))
    absent = np.isnan(means)
    failed = (summary["n_ok"].to_numpy()[absent] == 0).all()
    for axis, varied in zip(grid.flat, axes, strict=False):
        places = _place(axis, summary[varied.name], varied, 3.4)
        axis.errorbar(
            places,
            means,
            stds,
            color=_STYLES[0][0],
            marker="o",
            markersize=5,
            linestyle="none",
            elinewidth=0.8,
            alpha=0.6,
        )
        axis.plot(
            places[absent],
            np.full(absent.sum(), 0.03),
            transform=axis.get_xaxis_transform(),
            color="0.3",
            marker="x",
            linestyle="none",
            label="failed" if failed else f"no {metric}, or failed",
        )
    for axis in grid.flat[len(axes) :]:
        axis.set_visible(False)
    for axis in grid[:, 0]:
        _label_y(axis, ylabel, stds)
    if absent.any():
        marks = grid.flat[0].get_lines()[-1:]
        figure.legend(handles=marks, fontsize=9, loc="outside lower center", frameon=False)
    figure.suptitle(title, fontsize=11)
    plots.save(figure, path)


def _place(axis: Any, texts: pd.Series, varied: Axis, inches: float) -> np.ndarray:
    """Returns the places of texts on the x axis of this width, which gets its scale and ticks."""
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel(varied.name, fontsize=11)
    present = list(dict.fromkeys(texts))
    drawn = not set(present) <= set(varied.values)
    found = present if drawn else [v for v in varied.values if v in present]
    values = _numbers(found)
    if values is not None:
        found = [found[i] for i in np.argsort(values, kind="stable")]
        values = np.sort(values)
    is_log = values is not None and _is_log(values, varied.scale)
    at = np.arange(len(found)) if values is None else np.log(values) if is_log else values
    gaps = np.diff(at) / max(np.ptp(at), 1e-300)
    names, few = _labels(found), len(found) <= _FEW and not drawn
    # Few numbers that are orders apart would run into each other, as 0, 1e-4 and 1 do.
    if values is None or (few and gaps.min(initial=1.0) < 0.03):
        axis.set_xticks(range(len(found)), names)
        axis.set_xlim(-0.5, len(found) - 0.5)
        if _width(names) > inches / len(found) - 0.1:
            _turn(axis)
        return np.asarray([found.index(text) for text in texts], float)
    if is_log:
        axis.set_xscale("log")
    if few:
        axis.set_xticks(values, names)
        axis.minorticks_off()
        if _width(names) > gaps.min(initial=1.0) * 0.9 * inches - 0.1:
            _turn(axis)
    elif is_log:
        plots.mark_powers(axis, values)
    return texts.astype(float).to_numpy()


def _is_log(values: np.ndarray, scale: str | None) -> bool:
    """Whether sorted numbers stand more evenly in logarithms than as they are."""
    if scale is not None or len(values) < 3 or values.min() <= 0:
        return scale == "log"
    steps, ratios = np.diff(values), np.diff(np.log(values))
    return bool(ratios.std() / ratios.mean() < steps.std() / steps.mean() - 1e-9)


def _numbers(texts: Sequence[str]) -> np.ndarray | None:
    """Returns the finite numbers that all texts are, or None."""
    values = pd.to_numeric(pd.Series(list(texts)), errors="coerce").to_numpy(float)
    return values if np.isfinite(values).all() else None


def _labels(texts: Sequence[str]) -> list[str]:
    """Writes numbers to three digits where that tells them apart; other texts as they are."""
    values = _numbers(texts)
    short = list(texts) if values is None else [f"{value:.3g}" for value in values]
    return short if len(set(short)) == len(set(texts)) else list(texts)


def _width(names: Sequence[str]) -> float:
    """Returns the inches that the longest label takes."""
    return _INCHES * max(map(len, names))


def _label_y(axis: Any, label: str, stds: Any) -> None:
    """Names the y axis, and what error bars stand for, where there are any to be seen."""
    bars = "\nbars: one standard deviation" if np.any(np.asarray(stds) > 0) else ""
    axis.set_ylabel(label + bars, fontsize=10)


def _turn(axis: Any) -> None:
    """Turns the labels of the x axis that would run into each other."""
    for text in axis.get_xticklabels():
        text.set(rotation=35, ha="right", rotation_mode="anchor")
