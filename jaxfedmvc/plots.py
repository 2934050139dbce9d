"""Pictures of results. matplotlib is imported inside: the library runs without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle as _cycle
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.manifold import TSNE


def require_matplotlib() -> Any:
    """matplotlib's pyplot, drawing to files.

    Raises:
      ImportError: Says which extra to install.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "plots need matplotlib: pip install -e '.[experiments]' in the source tree"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    """Writes under another name and renames, so that no half picture is ever left."""
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=130, format=path.suffix[1:])
    partial.rename(path)
    require_matplotlib().close(figure)


def curves(
    path: Path,
    scores: Mapping[str, np.ndarray],
    losses: Mapping[str, np.ndarray],
    references: Mapping[str, float],
    title: str,
) -> None:
    """Scores and losses against rounds: mean over seeds, with a band of one standard deviation.

    Args:
      path: Where to write, .png.
      scores: For each curve [seeds, rounds] fractions in [0, 1]; may be empty.
      losses: For each curve [seeds, rounds].
      references: Levels drawn as dashed lines beside the scores.
      title: Of the whole picture.
    """
    plt = require_matplotlib()
    n_losses = max(1, len(losses))
    figure = plt.figure(figsize=(11.5, 4.8), layout="constrained")
    grid = figure.add_gridspec(n_losses, 2)
    left = figure.add_subplot(grid[:, 0])
    right = [figure.add_subplot(grid[i, 1]) for i in range(n_losses)]

    def draw(axis: Any, name: str, runs: np.ndarray) -> None:
        rounds = np.arange(1, runs.shape[1] + 1)
        mean, spread = runs.mean(axis=0), runs.std(axis=0)
        (line,) = axis.plot(rounds, mean, marker="o", label=name)
        axis.fill_between(rounds, mean - spread, mean + spread, color=line.get_color(), alpha=0.2)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)

    for name, runs in scores.items():
        draw(left, name, runs)
    for (name, level), style in zip(references.items(), _cycle(("--", ":", "-.")), strict=False):
        left.axhline(level, linestyle=style, color="0.3", label=name)
    left.set_ylim(0, 1.02)
    left.set_ylabel("score (fraction)")
    left.set_xlabel("round")
    if scores or references:
        left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    # Losses of different kinds have nothing to do with each other's scale: a panel each.
    for axis, (name, runs) in zip(right, losses.items(), strict=False):
        draw(axis, name, runs)
        axis.set_ylabel(name)
    right[-1].set_xlabel("round (losses: last epoch, mean over clients)")
    figure.suptitle(title)
    _save(figure, path)


def embedding(
    path: Path,
    points: np.ndarray,
    colourings: Mapping[str, np.ndarray],
    markers: np.ndarray,
    marker_names: Sequence[str],
    title: str,
    max_points: int = 2000,
) -> None:
    """A t-SNE map of the representation, drawn once for each colouring.

    Args:
      path: Where to write, .png.
      points: [n, d].
      colourings: For each panel its title and [n] integers; -1 is drawn grey.
      markers: [n] integers: which marker a point is drawn with.
      marker_names: What each marker stands for.
      title: Of the whole picture.
      max_points: More are thinned out, with a fixed seed.
    """
    plt = require_matplotlib()
    if len(points) > max_points:
        kept = np.sort(np.random.default_rng(0).choice(len(points), max_points, replace=False))
        points, markers = points[kept], markers[kept]
        colourings = {name: values[kept] for name, values in colourings.items()}
    if points.shape[1] > 2 and len(points) > 6:
        perplexity = min(30.0, (len(points) - 1) / 3)
        flat = TSNE(random_state=0, init="pca", perplexity=perplexity).fit_transform(points)
    else:  # nothing to flatten
        flat = np.pad(points, ((0, 0), (0, 1)))[:, :2]
    figure, axes = plt.subplots(
        1, len(colourings), figsize=(5.6 * len(colourings), 5.6), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    palette = plt.get_cmap("tab10" if max(v.max() for v in colourings.values()) < 10 else "tab20")
    for axis, (name, values) in zip(axes[0], colourings.items(), strict=True):
        for marker, label in enumerate(marker_names):
            chosen = markers == marker
            axis.scatter(
                flat[chosen, 0], flat[chosen, 1], s=14, linewidths=0.4,
                marker="ox^sv"[marker % 5], label=label,
                c=[palette(v % palette.N) if v >= 0 else "0.7" for v in values[chosen]],
            )  # fmt: skip
        axis.set_title(name)
        axis.set_xticks([])
        axis.set_yticks([])
    handles, names = axes[0][0].get_legend_handles_labels()
    legend = figure.legend(handles, names, fontsize=8, loc="outside lower center", ncols=5)
    for handle in legend.legend_handles:
        handle.set_color("0.2")
    figure.suptitle(title)
    _save(figure, path)
