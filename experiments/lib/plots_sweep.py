"""Pictures of a metric over the settings of a sweep. matplotlib is imported inside."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.lib import plots

# Told apart by the colour-blind (Okabe and Ito), and in print by marker and line.
_STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#56B4E9", "v", "-"),
    ("#E69F00", "P", "--"),
)
_INCHES = 0.078  # width of a character of the labels, in inches
_CELL = 0.84, 0.56  # of a heat map, in inches
_FEW = 12  # values that get a tick each, whatever their distances


class Panel(NamedTuple):
    """Values on an x axis.

    Attributes:
      x: Of each setting.
      values: The different ones, in the order in which texts that are no numbers stand.
      log: Whether numbers stand in logarithms.
    """

    x: Sequence[str]
    values: Sequence[str]
    log: bool


def numbers(texts: Sequence[str]) -> np.ndarray | None:
    """The finite numbers that all texts are, or None."""
    try:
        values = np.asarray([float(text) for text in texts])
    except ValueError:
        return None
    return values if np.isfinite(values).all() else None


def heat_map(
    path: Path,
    rows: Sequence[str],
    columns: Sequence[str],
    means: np.ndarray,
    stds: np.ndarray,
    names: tuple[str, str],
    title: str,
    label: str,
    smaller_is_better: bool = False,
    notes: np.ndarray | str = "failed",
) -> None:
    """A cell for each pair of values, with mean and deviation; the best has a frame.

    Deviations that are all 0, those of a single seed, are not written.

    Args:
      path: Where to write, .png.
      rows: Values of the first axis, from top to bottom.
      columns: Values of the second, from left to right.
      means: [rows, columns]; cells that are NaN are hatched.
      stds: [rows, columns].
      names: Of the two axes.
      title: Of the whole picture.
      label: Of the colours.
      smaller_is_better: Bright colours are the better ones either way.
      notes: What is written into the cells that are NaN, one text or [rows, columns].

    Raises:
      ValueError: `means` or `stds` are not [rows, columns].
    """
    for name, array in (("means", means), ("stds", stds)):
        if np.shape(array) != (len(rows), len(columns)):
            raise ValueError(
                f"{name}: got shape {np.shape(array)}; allowed is [{len(rows)}, {len(columns)}]"
            )
    plt = plots.require_matplotlib()
    from matplotlib.patches import Rectangle

    across, down = _labels(columns), _labels(rows)
    turned = max(map(len, across)) * _INCHES > _CELL[0] - 0.1
    beside = 1.9 + _INCHES * max(map(len, down))
    below = 1.5 + (0.7 * _INCHES * max(map(len, across)) if turned else 0.0)
    size = max(4.6, _CELL[0] * len(columns) + beside), max(3.0, _CELL[1] * len(rows) + below)
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    finite = np.isfinite(means)
    image = axis.imshow(
        np.ma.masked_array(means, ~finite),
        cmap="viridis_r" if smaller_is_better else "viridis",
        aspect="auto",
    )
    notes = np.broadcast_to(notes, np.shape(means))
    pattern, spread = _pattern(means[finite]), np.any(stds[finite] > 0)
    for (i, j), mean in np.ndenumerate(means):
        if finite[i, j]:
            text = f"{mean:{pattern}}" + (f"\n± {stds[i, j]:{pattern}}" if spread else "")
            axis.text(
                j,
                i,
                text,
                ha="center",
                va="center",
                fontsize=9,
                linespacing=1.15,
                color=_ink(image.to_rgba(mean)),
            )
            continue
        axis.add_patch(
            Rectangle(
                (j - 0.5, i - 0.5),
                1,
                1,
                facecolor="0.93",
                edgecolor="0.75",
                hatch="///",
                linewidth=0,
            )
        )
        axis.text(
            j,
            i,
            notes[i, j],
            ha="center",
            va="center",
            fontsize=9,
            color="0.25",
            bbox={"facecolor": "0.93", "linewidth": 0, "pad": 1.5},
        )
    if finite.any():
        best = np.nanargmin(means) if smaller_is_better else np.nanargmax(means)
        i, j = np.unravel_index(best, np.shape(means))
        axis.add_patch(
            Rectangle(
                (j - 0.47, i - 0.47),
                0.94,
                0.94,
                fill=False,
                linewidth=2.6,
                edgecolor="#D55E00",
                zorder=3,
            )
        )
    # White lines between cells.
    axis.set_xticks(np.arange(1, len(columns)) - 0.5, minor=True)
    axis.set_yticks(np.arange(1, len(rows)) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.2)
    axis.tick_params(which="both", length=0)
    axis.spines[:].set_visible(False)
    axis.set_yticks(range(len(rows)), down)
    axis.set_xticks(range(len(columns)), across)
    if turned:
        _turn(axis)
    axis.set_ylabel(names[0], fontsize=11)
    axis.set_xlabel(names[1], fontsize=11)
    bar = figure.colorbar(image, ax=axis, label=label, pad=0.02)
    bar.outline.set_visible(False)
    wrapped = [textwrap.fill(line, int(size[0] / 0.095)) for line in title.splitlines()]
    figure.suptitle("\n".join(wrapped), fontsize=11)
    plots.save(figure, path)


def lines(
    path: Path,
    x: Sequence[str],
    means: Mapping[str, np.ndarray],
    stds: Mapping[str, np.ndarray],
    xlabel: str,
    ylabel: str,
    title: str,
    log_x: bool = False,
) -> None:
    """A line for each series over the values of one axis, with bars of one deviation.

    Args:
      path: Where to write, .png.
      x: Values of the axis; where they are not all numbers, they stand beside each other in order.
      means: For each series its means [len(x)]; NaN is marked as failed where all series have it.
      stds: For each series its deviations [len(x)].
      xlabel: Name of the axis.
      ylabel: Of the values.
      title: Of the whole picture.
      log_x: Whether numbers stand in logarithms.

    Raises:
      ValueError: A series has not as many values as `x`.
    """
    for name, array in (*means.items(), *stds.items()):
        if np.shape(array) != (len(x),):
            raise ValueError(f"{name}: got shape {np.shape(array)}; allowed is [{len(x)}]")
    plt = plots.require_matplotlib()
    categories = numbers(x) is None
    width = 7.2 if not categories else max(5.2, 1.6 + 0.75 * len(x))
    figure, axis = plt.subplots(figsize=(width, 4.6), layout="constrained")
    places = _place(axis, Panel(x, x, log_x), width - 1.0)
    order = np.argsort(places, kind="stable")
    # Beside each other, so that bars of one category can be told apart.
    shifts = (np.arange(len(means)) - (len(means) - 1) / 2) * (0.12 if categories else 0.0)
    for (name, mean), shift, (colour, marker, line) in zip(
        means.items(), shifts, cycle(_STYLES), strict=False
    ):
        axis.errorbar(
            places[order] + shift,
            np.asarray(mean)[order],
            np.asarray(stds[name])[order],
            color=colour,
            marker=marker,
            linestyle="none" if categories else line,
            markersize=6,
            linewidth=1.6,
            elinewidth=1.1,
            capsize=3,
            label=name,
        )
    for place in places[np.isnan(list(means.values())).all(axis=0)]:
        axis.axvline(place, color="0.6", linestyle=":", linewidth=1)
        axis.text(
            place,
            0.02,
            "failed",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=9,
            color="0.35",
            transform=axis.get_xaxis_transform(),
            bbox={"facecolor": "white", "linewidth": 0, "pad": 1},
        )
    axis.set_xlabel(xlabel, fontsize=11)
    axis.set_ylabel(ylabel + _bars(list(stds.values())), fontsize=10)
    axis.set_title(title, fontsize=11)
    if len(means) > 1:
        figure.legend(fontsize=9, loc="outside lower center", ncols=4, frameon=False)
    plots.save(figure, path)


def points(
    path: Path,
    panels: Mapping[str, Panel],
    means: np.ndarray,
    stds: np.ndarray,
    ylabel: str,
    title: str,
) -> None:
    """A panel for each axis: every setting as a point, by its value there and its mean.

    Args:
      path: Where to write, .png.
      panels: For each axis what every setting has there.
      means: [settings]; those that are NaN are left out.
      stds: [settings].
      ylabel: Of the means.
      title: Of the whole picture.
    """
    plt = plots.require_matplotlib()
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    figure, grid = plt.subplots(
        down,
        across,
        figsize=(1 + 3.6 * across, 0.6 + 3.2 * down),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axis, (name, panel) in zip(grid.flat, panels.items(), strict=False):
        places = _place(axis, panel, 3.4)
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
        axis.set_xlabel(name, fontsize=11)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    for axis in grid[:, 0]:
        axis.set_ylabel(ylabel + _bars(stds), fontsize=10)
    figure.suptitle(title, fontsize=11)
    plots.save(figure, path)


def _place(axis: Any, panel: Panel, inches: float) -> np.ndarray:
    """Places of `panel.x` on the x axis of this width, which gets its scale and its ticks."""
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    found = list(dict.fromkeys(panel.values))
    values = numbers(found)
    if values is not None:
        found = [found[i] for i in np.argsort(values, kind="stable")]
        values = np.sort(values)
    names = _labels(found)
    lengths = np.asarray([len(name) for name in names]) * _INCHES
    # Few numbers that are orders apart would run into each other, as 0, 1e-4 and 1 do.
    crowded = values is not None and not panel.log and len(values) <= _FEW and _crowded(values)
    if values is None or crowded:
        axis.set_xticks(range(len(found)), names)
        axis.set_xlim(-0.5, len(found) - 0.5)
        if lengths.max() > inches / len(found) - 0.1:
            _turn(axis)
        return np.asarray([float(found.index(text)) for text in panel.x])
    if panel.log:
        axis.set_xscale("log")
    # Ticks at the values themselves, where there is room for them.
    at = np.log(values) if panel.log else values
    gaps = np.diff(at) / max(np.ptp(at), 1e-300) * 0.9 * inches
    if np.all(gaps > (lengths[1:] + lengths[:-1]) / 2 + 0.1):
        axis.set_xticks(values, names)
        axis.minorticks_off()
    return np.asarray([float(text) for text in panel.x])


def _crowded(values: np.ndarray) -> bool:
    """Whether sorted numbers are orders apart, and some too near to each other to be seen apart."""
    sizes = np.abs(values[values != 0])
    orders = bool(sizes.max(initial=1e-300) >= 100 * sizes.min(initial=1e300))
    return orders and bool(np.min(np.diff(values), initial=1e300) < 0.03 * np.ptp(values))


def _bars(stds: Any) -> str:
    """What error bars stand for, where there are any to be seen."""
    return "\nbars: one standard deviation" if np.any(np.asarray(stds) > 0) else ""


def _turn(axis: Any) -> None:
    """Turns the labels of the x axis that would run into each other."""
    for text in axis.get_xticklabels():
        text.set(rotation=35, ha="right", rotation_mode="anchor")


def _labels(texts: Sequence[str]) -> list[str]:
    """Numbers to three digits where they can still be told apart; other texts as they are."""
    values = numbers(texts)
    short = list(texts) if values is None else [f"{value:.3g}" for value in values]
    return short if len(set(short)) == len(set(texts)) else list(texts)


def _pattern(values: np.ndarray) -> str:
    """How numbers of this size are written."""
    largest = np.max(np.abs(values), initial=0.0)
    return ".3f" if 0.1 <= largest < 100 else ".3g"


def _ink(rgba: Sequence[float]) -> str:
    """Black or white, whichever can be read on the colour: by its relative luminance."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgba[:3]]
    return "black" if np.dot(linear, (0.2126, 0.7152, 0.0722)) > 0.18 else "white"
