"""Pictures of results. matplotlib is imported inside: the library runs without it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle as _cycle
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse, stats
from scipy.optimize import isotonic_regression

from jaxfedmvc import files
from jaxfedmvc.algorithms.vertcohirf.hierarchy import Hierarchy


def require_matplotlib() -> Any:
    """Returns matplotlib's pyplot, drawing to files.

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


def save(figure: Any, path: Path) -> None:
    """Writes under another name and renames, so that no half picture is ever left.

    Titles that are wider than what they stand above are broken into lines.
    """
    for text in figure.texts:
        _fit(text, 0.96 * figure.bbox.width)
    for axis in figure.axes:
        place = axis.get_subplotspec()
        if axis.get_title() and place is not None:  # of what is left beside the label of y
            _fit(axis.title, 0.88 * axis.figure.bbox.width / place.get_gridspec().ncols)
    with files.replacing(path, "wb") as file:
        figure.savefig(file, dpi=130, format=path.suffix[1:])
    require_matplotlib().close(figure)


def _fit(title: Any, width: float) -> None:
    """Breaks the lines of a title that is wider than so many pixels."""
    lines = title.get_text().splitlines()
    most = max(map(len, lines), default=0)
    while most > 8 and (taken := title.get_window_extent().width) > width:
        most = min(most - 1, int(most * width / taken))
        title.set_text("\n".join(textwrap.fill(line, max(most, 8)) for line in lines))


def legend_columns(names: Iterable[str], inches: float, most: int) -> int:
    """Returns how many columns of a legend of font size 8 fit side by side, `most` at most."""
    longest = max(map(len, names), default=0)
    return max(1, min(most, int(inches / (0.5 + 0.065 * longest))))


def curves(
    path: Path,
    scores: Mapping[str, np.ndarray],
    losses: Mapping[str, np.ndarray],
    references: Mapping[str, float],
    title: str,
    kept: Sequence[int] = (),
) -> None:
    """Draws scores and losses by round: mean over seeds, with a band of one standard deviation.

    Args:
      path: Where to write, .png.
      scores: For each curve [seeds, rounds] fractions in [0, 1]; if empty, losses stand alone.
      losses: For each curve [seeds, rounds]; may be empty where scores are not.
      references: Levels drawn as dashed lines beside the scores.
      title: Of the whole picture.
      kept: Rounds whose clusters seeds end with, where it is not the last.
    """
    plt = require_matplotlib()
    figure = plt.figure(figsize=(11.5 if scores and losses else 6.4, 4.8), layout="constrained")
    parts = figure.subfigures(1, bool(scores) + bool(losses), squeeze=False)[0]
    right = list(parts[-1].subplots(len(losses), squeeze=False)[:, 0]) if losses else []

    def draw(axis: Any, name: str, runs: np.ndarray, marker: str = "o") -> None:
        rounds = np.arange(1, runs.shape[1] + 1)
        mean = runs.mean(axis=0)
        every = max(1, len(rounds) // 20)  # markers of many rounds hide each other
        (line,) = axis.plot(rounds, mean, marker=marker, markevery=every, label=name)
        if len(runs) > 1:
            spread = runs.std(axis=0, ddof=1)
            colour = line.get_color()
            axis.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.2)
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axis.grid(alpha=0.3)

    if scores:
        left = parts[0].subplots()
        for (name, runs), (marker, _) in zip(scores.items(), _cycle(_STYLES), strict=False):
            draw(left, name, runs, marker)
        for (name, level), style in zip(
            references.items(), _cycle(("--", ":", "-.")), strict=False
        ):
            left.axhline(level, linestyle=style, color="0.3", label=name)
        left.set_ylim(0, 1.02)
        left.set_ylabel("score (fraction)")
        left.set_xlabel("round")
        left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    # Losses of different kinds have nothing to do with each other's scale: a panel each.
    for axis, (name, runs) in zip(right, losses.items(), strict=True):
        draw(axis, name, runs)
        axis.set_ylabel(name)
        axis.ticklabel_format(useOffset=False)
    if right:
        right[-1].set_xlabel("round (losses: mean over clients)")
    for axis in figure.axes:
        for made in set(kept):
            axis.axvline(made, color="0.2", linewidth=1)
    bands = any(len(runs) > 1 for runs in (*scores.values(), *losses.values()))
    said = ["mean", "bands: one standard deviation"] if bands else []
    said += ["upright lines: rounds that are kept"] if kept else []
    figure.suptitle("\n".join([title, "; ".join(said)] if said else [title]))
    save(figure, path)


def embedding(
    path: Path,
    points: np.ndarray,
    colourings: Mapping[str, np.ndarray],
    markers: np.ndarray,
    marker_names: Sequence[str],
    title: str,
    max_points: int = 2000,
    named: str = "",
    called: Callable[[int], str] = str,
) -> np.ndarray:
    """Draws a t-SNE map of the representation, once for each colouring.

    Args:
      path: Where to write, .png.
      points: [n, d].
      colourings: For each panel its title and [n] integers; -1 is drawn grey.
      markers: [n] integers: which marker a point is drawn with.
      marker_names: What each marker stands for.
      title: Of the whole picture.
      max_points: More are thinned out, with a fixed seed; see `thinned`.
      named: What a number of the first colouring is, such as "class": the legend has their colours,
        unless there are more of them than colours.
      called: What such a number is called.

    Returns:
      The places of the points that are drawn, [min(n, max_points), 2].
    """
    plt = require_matplotlib()
    kept = thinned(len(points), max_points)
    points, markers = points[kept], markers[kept]
    colourings = {name: values[kept] for name, values in colourings.items()}
    flat = _flattened(points)
    figure, axes = plt.subplots(
        1,
        len(colourings),
        figsize=(5.6 * len(colourings), 5.6),
        squeeze=False,
        layout="constrained",
    )
    palette = plt.get_cmap("tab10" if max(v.max() for v in colourings.values()) < 10 else "tab20")
    for axis, (name, values) in zip(axes[0], colourings.items(), strict=True):
        for marker, label in enumerate(marker_names):
            chosen = markers == marker
            axis.scatter(
                flat[chosen, 0],
                flat[chosen, 1],
                s=14,
                linewidths=0.4,
                marker="ox^sv"[marker % 5],
                label=label,
                c=[palette(v % palette.N) if v >= 0 else "0.7" for v in values[chosen]],
            )
        axis.set_title(name)
        axis.set_xticks([])
        axis.set_yticks([])

    handles = [_handle("ox^sv"[m % 5], "0.2", name) for m, name in enumerate(marker_names)]
    numbers = next(iter(colourings.values()))
    if named and (of_colours := _handles_of(numbers, palette, named, called)):
        # One kind of points says nothing.
        handles = (handles if len(handles) > 1 else []) + of_colours
    _legend_below(figure, handles, 4 * len(colourings))
    figure.suptitle(title)
    save(figure, path)
    return flat


def _handle(marker: str, colour: Any, label: str) -> Any:
    return require_matplotlib().Line2D(
        [], [], linestyle="", markersize=5, marker=marker, color=colour, label=label
    )


def _handles_of(
    numbers: np.ndarray, palette: Any, named: str, called: Callable[[int], str]
) -> list[Any]:
    """Returns what a legend says of numbers' colours; nothing where colours come twice."""
    found = np.unique(numbers).tolist()
    if found[-1] >= palette.N:
        return []
    return [
        _handle("s", palette(v), f"{named} {called(v)}")
        if v >= 0
        else _handle("s", "0.7", f"no {named}")
        for v in found
    ]


def _legend_below(figure: Any, handles: Sequence[Any], most: int) -> None:
    """Writes a legend below the panels, in `most` columns at most."""
    names = [handle.get_label() for handle in handles]
    ncols = legend_columns(names, figure.get_figwidth(), most)
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=ncols)


def thinned(n: int, most: int) -> np.ndarray:
    """Returns which of n points a picture of `most` shows, ascending; always the same ones."""
    if n <= most:
        return np.arange(n)
    return np.sort(np.random.default_rng(0).choice(n, most, replace=False))


# How curves differ where colours do not: in print, and for the colour-blind.
_STYLES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"), ("P", "--"), ("X", "-."))


def mark_powers(axis: Any, values: Iterable[float]) -> None:
    """Labels powers of ten on a logarithmic x axis, and 2 and 5 between them over few decades."""
    from matplotlib import ticker

    shown = [x for x in values if 0 < x < np.inf]
    # Matplotlib labels every tick between two powers of ten, or none where there is no power.
    decades = np.ptp(np.log10(shown)) if shown else 0.0
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
    axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())


def _flattened(points: np.ndarray) -> np.ndarray:
    """t-SNE of points [n, d], [n, 2]; all at one place where they do not differ."""
    # Without any variance t-SNE would start from NaN, which ends the process in its C code.
    if points.shape[1] > 2 and len(points) > 6 and np.ptp(points, axis=0).any():
        from sklearn.manifold import TSNE  # late: a tenth of a start is spent on importing it

        perplexity = min(30.0, (len(points) - 1) / 3)
        # From principal axes half of the usual steps show the same groups.
        tsne = TSNE(random_state=0, init="pca", perplexity=perplexity, max_iter=500)
        return tsne.fit_transform(points)
    return np.pad(points, ((0, 0), (0, 1)))[:, :2]  # nothing to flatten


def maps(
    path: Path,
    points: Mapping[str, np.ndarray],
    classes: np.ndarray,
    title: str,
    called: Callable[[int], str] = str,
) -> None:
    """Draws t-SNE maps of several representations of the same samples, side by side.

    Of more than 2000 samples some are drawn, always the same; see `thinned`.

    Args:
      path: Where to write, .png.
      points: For each panel its title and points [n, d].
      classes: [n] integers from 0, which samples are coloured by; the legend has their colours,
        unless there are more of them than colours.
      title: Of the whole picture.
      called: What a class is called.
    """
    plt = require_matplotlib()
    kept = thinned(len(classes), 2000)
    figure, axes = plt.subplots(
        1, len(points), figsize=(5.2 * len(points), 5.6), squeeze=False, layout="constrained"
    )
    palette = plt.get_cmap("tab10" if classes.max() < 10 else "tab20")
    for axis, (name, values) in zip(axes[0], points.items(), strict=True):
        flat = _flattened(values[kept])
        axis.scatter(
            flat[:, 0],
            flat[:, 1],
            s=12,
            linewidths=0.3,
            c=[palette(c % palette.N) for c in classes[kept]],
        )
        axis.set_title(name)
        axis.set_xticks([])
        axis.set_yticks([])
    if handles := _handles_of(classes, palette, "class", called):
        _legend_below(figure, handles, 4 * len(points))
    figure.suptitle(title)
    save(figure, path)


def graph(path: Path, affinity: sparse.csr_array, labels: np.ndarray, title: str) -> None:
    """Draws a graph's edge weights as a picture, its vertices ordered by cluster.

    Clusters that hold together are dark blocks on the diagonal; beside the picture stands the share
    of each cluster's edge weight that stays inside.

    Args:
      path: Where to write, .png.
      affinity: Symmetric non-negative weights [n, n].
      labels: Clusters [n], -1 for vertices that are left out.
      title: Of the whole picture.
    """
    plt = require_matplotlib()
    order = np.argsort(labels, kind="stable")[np.sum(labels < 0) :]
    n = len(order)
    place = np.full(len(labels), -1)
    place[order] = np.arange(n)
    edges = affinity.tocoo()
    rows, columns = (place[edges.coords[i]] for i in (0, 1))
    kept = (rows >= 0) & (columns >= 0)
    bins = min(400, n)  # with more vertices, each cell holds the sum of its edges' weights
    picture = np.histogram2d(
        rows[kept], columns[kept], bins=bins, range=((0, n), (0, n)), weights=edges.data[kept]
    )[0]
    found, sizes = np.unique(labels[order], return_counts=True)
    ends = np.cumsum(sizes)
    figure, (axis, beside) = plt.subplots(
        1, 2, figsize=(9.5, 7), layout="constrained", width_ratios=(5, 1), sharey=True
    )
    # A few heavy edges would leave the rest white.
    top = np.quantile(picture[picture > 0], 0.95) if (picture > 0).any() else 1.0
    image = axis.imshow(
        picture, cmap="Greys", vmin=0, vmax=top, extent=(0, n, n, 0), interpolation="nearest"
    )
    for end in ends[:-1]:
        axis.axhline(end, color="C0", linewidth=0.4)
        axis.axvline(end, color="C0", linewidth=0.4)
    middles = ends - sizes / 2
    axis.set_yticks(middles, [str(c) for c in found], fontsize=7)
    axis.set_xlabel(f"{n} samples, ordered by cluster")
    axis.set_ylabel("cluster")
    same = labels[edges.coords[0]] == labels[edges.coords[1]]
    inside = []
    for cluster in found:
        mine = labels[edges.coords[0]] == cluster
        inside.append(edges.data[mine & same].sum() / max(edges.data[mine].sum(), 1e-30))
    beside.barh(middles, inside, height=0.8 * sizes, color="C0")
    beside.set_xlim(0, 1)
    beside.set_xlabel("edge weight\nwithin the cluster")
    beside.grid(axis="x", alpha=0.3)
    figure.colorbar(image, ax=beside, label="edge weight of a cell", extend="max", shrink=0.6)
    figure.suptitle(title)
    save(figure, path)


def attack_bands(
    path: Path,
    x: Sequence[float] | np.ndarray,
    curves: Mapping[str, np.ndarray],
    xlabel: str,
    ylabel: str,
    title: str,
) -> None:
    """Draws curves with 95 % confidence bands of the mean over seeds, by Student's t.

    Args:
      path: Where to write, .png.
      x: [points], what was varied.
      curves: For each its name and [seeds, points]; a single seed has no band.
      xlabel: Of x, with its unit.
      ylabel: Of the curves, with their unit.
      title: Of the whole picture.

    Raises:
      ValueError: The runs of a curve are not [seeds, points].
    """
    x = np.asarray(x, float)
    for name, runs in curves.items():
        if np.ndim(runs) != 2 or np.shape(runs)[1:] != x.shape or len(runs) == 0:
            raise ValueError(
                f"curves[{name!r}]: got shape {np.shape(runs)}; allowed is [seeds, {len(x)}]"
            )
    plt = require_matplotlib()
    figure, axis = plt.subplots(figsize=(7.2, 4.6), layout="constrained")
    for (name, runs), (marker, line) in zip(curves.items(), _cycle(_STYLES), strict=False):
        seeds, mean = len(runs), np.mean(runs, axis=0)
        label = f"{name} ({seeds} seed{'s' if seeds > 1 else ''})"
        (drawn,) = axis.plot(x, mean, marker=marker, linestyle=line, markersize=5, label=label)
        if seeds > 1:
            half = stats.t.ppf(0.975, seeds - 1) * stats.sem(runs, axis=0)
            hue = drawn.get_color()
            axis.fill_between(x, mean - half, mean + half, color=hue, alpha=0.15, linewidth=0)
    if len(x) <= 12:
        axis.set_xticks(x, [f"{value:g}" for value in x])
    axis.grid(alpha=0.3)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(f"{ylabel}\nmean, 95 % confidence band of the mean")
    figure.suptitle(title)
    if curves:
        figure.legend(fontsize=8, loc="outside lower center", ncols=min(3, len(curves)))
    save(figure, path)


def boxes(
    path: Path,
    groups: Mapping[str, Sequence[float]],
    references: Mapping[str, float],
    ylabel: str,
    title: str,
) -> None:
    """Draws a box for each method, its single values beside it, and reference levels across.

    Args:
      path: Where to write, .png.
      groups: For each method its values, such as scores over feature partitions.
      references: Levels drawn as horizontal lines.
      ylabel: Of the values, with their unit.
      title: Of the whole picture.
    """
    plt = require_matplotlib()
    width = max(4.5, 1.1 + 1.05 * len(groups))
    figure, axis = plt.subplots(figsize=(width, 4.6), layout="constrained")
    places = np.arange(1, len(groups) + 1)
    for place, values in zip(places, groups.values(), strict=True):
        box = axis.boxplot(
            [values],
            positions=[place],
            widths=0.55,
            showfliers=False,
            patch_artist=True,
            medianprops={"color": "black", "linewidth": 1.6},
            manage_ticks=False,
        )
        box["boxes"][0].set(facecolor=f"C{place - 1}", alpha=0.35)
        # Few values: show each, spread sideways so that equal ones are seen apart.
        offsets = 0.3 * (np.arange(len(values)) + 0.5) / max(1, len(values)) - 0.15
        axis.scatter(place + offsets, values, s=14, color=f"C{place - 1}", linewidths=0, zorder=3)
    for (name, level), style in zip(references.items(), _cycle(("--", ":", "-.")), strict=False):
        axis.axhline(level, linestyle=style, color="tab:blue", label=f"{name}: {level:.3g}")
    axis.set_xticks(places, list(groups), rotation=30, ha="right", rotation_mode="anchor")
    axis.set_xlim(0.4, len(groups) + 0.6)
    axis.grid(axis="y", alpha=0.3)
    axis.set_ylabel(ylabel)
    figure.suptitle(f"{title}\nboxes: quartiles and median; points: single values")
    if references:
        figure.legend(fontsize=8, loc="outside lower center", ncols=2)
    save(figure, path)


# Of the picture of a hierarchy: columns are 1 apart and 1 high.
_MOST_COLUMNS = 6
_BAR, _GAP, _INCHES = 0.1, 0.008, 2.4
_GREY = (0.72, 0.72, 0.72)


class _Column(NamedTuple):
    """One level as drawn.

    Attributes:
      level: Which.
      n_clusters: Of the level; several may share a block.
      block: Block of each sample, int [n], numbered from top to bottom.
      heights: Of the blocks, in samples.
      texts: What is written beside each block.
      colours: Of the blocks.
    """

    level: int
    n_clusters: int
    block: np.ndarray
    heights: np.ndarray
    texts: list[str]
    colours: list[Any]


def hierarchy(path: Path, hierarchy: Hierarchy, title: str, max_nodes: int = 14) -> None:
    """Draws clusters of every level, and what they fuse into as bands from left to right.

    A block is a cluster, as high as it has samples, with its medoid's id and its size. A colour is
    a final cluster. Where clusters are too many, the smallest final ones share a grey block, and
    at other levels the smallest of each colour share one, as do all below 1 % of the samples. Of
    many levels the first three and the last three are drawn; single samples, level -1, only where
    there are few or nothing else.

    Args:
      path: Where to write, .png.
      hierarchy: What to draw.
      title: Of the whole picture.
      max_nodes: Most clusters of a level with a block of their own, 2 to 40.

    Raises:
      ValueError: `max_nodes` is out of range.
    """
    if not 2 <= max_nodes <= 40:
        raise ValueError(f"max_nodes: got {max_nodes}; allowed are 2 to 40")
    plt = require_matplotlib()
    columns = _columns(hierarchy, max_nodes, plt.get_cmap("tab20"))
    n, most = len(columns[0].block), max(len(column.texts) for column in columns)
    scale = (1 - _GAP * (most - 1)) / n
    size = max(6.0, _INCHES * len(columns)), max(6.0, 1.4 + 0.26 * most)
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    tops = [_tops(column.heights * scale) for column in columns]
    for x, (column, top) in enumerate(zip(columns, tops, strict=True)):
        heights = column.heights * scale
        axis.bar(
            x,
            heights,
            _BAR,
            top,
            align="edge",
            color=column.colours,
            edgecolor=column.colours,
            linewidth=0.8,
        )
        _write_beside(axis, x + _BAR, top + heights / 2, column.texts, 0.155 / (size[1] - 1.1))
        final = " (final)" if x == len(columns) - 1 else ""
        clusters = f"{column.n_clusters} cluster{'s' if column.n_clusters > 1 else ''}"
        axis.text(x, -0.02, f"level {column.level}{final}\n{clusters}", va="bottom", weight="bold")
    for x, (left, right) in enumerate(pairwise(columns)):
        _draw_bands(axis, x + _BAR, left, right, (tops[x].copy(), tops[x + 1].copy()), scale)
        if right.level - left.level > 1:
            skipped = f"levels {left.level + 1} to\n{right.level - 1} left out"
            axis.text(x + 0.58, -0.02, skipped, va="bottom", style="italic", color="0.3")
    axis.set(xlim=(-0.03, size[0] / _INCHES - 0.03), ylim=(1.01, -0.1))
    axis.axis("off")
    figure.suptitle(f"{title}\n{n} samples; beside each block: medoid (samples)", fontsize=11)
    save(figure, path)


def _columns(hierarchy: Hierarchy, max_nodes: int, palette: Any) -> list[_Column]:
    samples = np.flatnonzero(hierarchy.parents >= 0)
    first = -1 if len(samples) <= max_nodes or hierarchy.n_levels == 0 else 0
    levels = list(range(first, max(hierarchy.n_levels, first + 1)))
    if len(levels) > _MOST_COLUMNS:
        levels = levels[: _MOST_COLUMNS // 2] + levels[-_MOST_COLUMNS // 2 :]
    # Of each level: medoids' ids, a sample of each cluster, cluster of each sample, sizes.
    found = [
        np.unique(
            hierarchy.representatives(level)[samples],
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        for level in levels
    ]
    # From top to bottom by final cluster, in it by the cluster of the level before, and so on,
    # large ones first: bands from cluster to cluster never cross.
    keys = [key for ids, _, of, sizes in found for key in (ids[of], -sizes[of])]
    place = np.empty(len(samples), int)
    place[np.lexsort(keys)] = np.arange(len(samples))
    _, _, of, sizes = found[-1]
    n_colours = np.sum(_seen_alone(sizes, max_nodes))
    colour = np.minimum(_rank(sizes)[of], n_colours)
    # tab20 has ten strong colours and then their ten light ones; without its greys.
    hues = [i for i in (*range(0, 20, 2), *range(1, 20, 2)) if i not in (14, 15)]
    colours = [*(palette(hues[i % len(hues)]) for i in range(n_colours)), _GREY]
    final = {int(root): f"cluster {label}: " for label, root in enumerate(hierarchy.roots)}
    columns = []
    for level, (ids, sample, of, sizes) in zip(levels, found, strict=True):
        alone = _seen_alone(sizes, max_nodes)
        left_over = np.bincount(colour[sample][~alone], minlength=n_colours + 1)
        alone |= left_over[colour[sample]] == 1
        start = np.full(len(ids), len(samples))
        np.minimum.at(start, of, place)
        kind = "others" if alone.any() else "clusters"
        order = np.stack([colour[sample], ~alone, np.where(alone, start, 0)])
        rows, member, block = np.unique(order, axis=1, return_index=True, return_inverse=True)
        heights = np.bincount(block, sizes).astype(int)
        names = final if level == levels[-1] else {}
        texts = [
            f"{names.get(int(ids[c]), '')}{ids[c]} ({size})"
            if alone[c]
            else f"{np.sum(block == b)} {kind} ({size} samples)"
            for b, (c, size) in enumerate(zip(member, heights, strict=True))
        ]
        hue = [colours[row] for row in rows[0]]
        columns.append(_Column(level, len(ids), block[of], heights, texts, hue))
    return columns


def _rank(sizes: np.ndarray) -> np.ndarray:
    """Place of each cluster by size, 0 the largest; the first of equals comes first."""
    return np.argsort(np.argsort(-sizes, kind="stable"))


def _seen_alone(sizes: np.ndarray, max_nodes: int) -> np.ndarray:
    """Which clusters get blocks of their own: all, or the largest if no lower than can be seen."""
    if len(sizes) <= max_nodes:
        return np.ones(len(sizes), bool)
    return (_rank(sizes) < max_nodes - 1) & (sizes >= 0.01 * sizes.sum())


def _tops(heights: np.ndarray) -> np.ndarray:
    """Upper edges of blocks of these heights, stacked around the middle of the picture."""
    below = np.cumsum(heights + _GAP)
    return below - heights - _GAP + (1 + _GAP - below[-1]) / 2


def _draw_bands(
    axis: Any, x: float, left: _Column, right: _Column, tops: tuple[Any, Any], scale: float
) -> None:
    """Bands from the blocks of one column to those of the next, stacked in order at either end."""
    t = np.linspace(0, 1, 40)
    bend = t * t * (3 - 2 * t)
    many = len(right.texts)
    pairs, counts = np.unique(left.block * many + right.block, return_counts=True)
    for a, b, height in zip(pairs // many, pairs % many, counts * scale, strict=True):
        top = tops[0][a] + (tops[1][b] - tops[0][a]) * bend
        axis.fill_between(
            x + t * (1 - _BAR), top, top + height, color=left.colours[a], alpha=0.3, linewidth=0.3
        )
        tops[0][a] += height
        tops[1][b] += height


def _write_beside(axis: Any, x: float, middles: np.ndarray, texts: list[str], line: float) -> None:
    """Texts as near to the middles of their blocks as lines of this height fit."""
    down = line * np.arange(len(texts))
    places = isotonic_regression(middles - down).x.clip(0, 1 - down[-1]) + down
    box = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 0.6}
    for middle, place, text in zip(middles, places, texts, strict=True):
        axis.plot([x, x + 0.06], [middle, place], color="0.3", linewidth=0.5)
        axis.text(x + 0.065, place, text, fontsize=8, va="center", bbox=box)
