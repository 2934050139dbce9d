"""What a choice without labels leaves behind; of the number of clusters, a picture, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd

from experiments.lib import page, plots
from experiments.lib.text import megabytes
from jaxfedmvc.files import write_text
from jaxfedmvc.metrics.choice import LEAST_STABILITY

_TABLE, _PICTURE = "n_clusters.csv", "n_clusters.png"
_CHOSEN = "chosen"


class Found(Protocol):
    """What was chosen before a job runs, whatever it is."""

    def save(self, path: Path, title: str) -> None:
        """Writes it to the job's folder, the table that `read_table` reads last.

        Args:
          path: The folder.
          title: Of pictures: the method and the data.
        """

    def lines(self) -> Iterator[str]:
        """Yields what was chosen, and why, for the terminal."""

    def figures(self) -> list[page.Figure]:
        """Returns the criteria for the page."""

    def facts(self) -> dict[str, Any]:
        """Returns entries of summary.json, those of `spent` among them."""


def spent(tried: pd.DataFrame) -> dict[str, Any]:
    """Returns what a choice cost beside the run that is kept, for summary.json.

    Args:
      tried: With the columns bytes_up, bytes_down and seconds, the programs' compilation included.
    """
    moved = {way: int(tried[f"bytes_{way}"].sum()) for way in ("up", "down")}
    return {"bytes_choice": moved, "seconds_choice": float(tried["seconds"].sum())}


def cost_line(tried: pd.DataFrame) -> str:
    """Returns what a choice cost, for the terminal."""
    cost = spent(tried)
    up, down = (megabytes(cost["bytes_choice"][way]) for way in ("up", "down"))
    return (
        f"the trials' messages, all clients: {up} MB up, {down} MB down"
        f" ({cost['seconds_choice']:.1f} s, compilation included)"
    )


def write_table(path: Path, tried: pd.DataFrame, row: int) -> None:
    """Writes what was tried, with a mark at the chosen row: as long as it is absent, nothing is."""
    write_text(path, tried.assign(**{_CHOSEN: np.arange(len(tried)) == row}).to_csv(index=False))


def read_table(path: Path) -> tuple[pd.DataFrame, int] | None:
    """Returns what was tried and the place of the chosen row; None where no choice was made."""
    if not path.exists():
        return None
    table = pd.read_csv(path)
    return table.drop(columns=_CHOSEN), int(np.argmax(table[_CHOSEN]))


class Choice(NamedTuple):
    """Criteria of the numbers of clusters that were tried.

    Attributes:
      n_clusters: The chosen number.
      tried: A row for each number, with the columns n_clusters, stability, silhouette (the mean of
        the draws), silhouette_std, silhouette_0 and so on of each draw, and bytes_up, bytes_down
        and seconds of its trials; what all numbers share counts with the first.
    """

    n_clusters: int
    tried: pd.DataFrame

    @property
    def is_unstable(self) -> bool:
        """Whether the clusters of no number come back."""
        return bool((self.tried["stability"] < LEAST_STABILITY).all())

    def save(self, path: Path, title: str) -> None:
        """Writes n_clusters.png and then n_clusters.csv, which says that the choice is made."""
        _draw(path / _PICTURE, self, title)
        row = int(np.argmax(self.tried["n_clusters"] == self.n_clusters))
        write_table(path / _TABLE, self.tried, row)

    def lines(self) -> Iterator[str]:
        """Yields the table and the chosen number for the terminal."""
        yield f"{'clusters':>9s}{'stability':>11s}{'silhouette':>18s}"
        for row in self.tried.itertuples():
            mark = "  <- chosen" if row.n_clusters == self.n_clusters else ""
            silhouette = f"{row.silhouette:.3f} +- {row.silhouette_std:.3f}"
            yield f"{row.n_clusters:9d}{row.stability:11.3f}{silhouette:>18s}{mark}"
        if self.is_unstable:
            yield (
                f"no number of clusters is stable (ARI {LEAST_STABILITY} when a fifth of the rows"
                " is left out): take this one with caution"
            )
        yield cost_line(self.tried)

    def facts(self) -> dict[str, Any]:
        """Returns the criteria of all numbers, for summary.json."""
        return {"n_clusters_tried": self.tried.to_dict("records")} | spent(self.tried)

    def figures(self) -> list[page.Figure]:
        """Returns the two criteria for the page, each on a scale of its own."""
        draws = [
            name for name in self.tried if name.startswith("silhouette_") and name[11:] != "std"
        ]
        x = {"clusters": self.tried["n_clusters"].to_numpy(float)}
        note = f"{self.n_clusters} clusters: {_rule()}; no label is seen"
        if self.is_unstable:
            note += ". Here no number is stable, so that all of them count"
        heading = "Number of clusters"
        silhouette, stability = (
            page.lines(f"{heading}: {name}", {name: self.tried[columns].to_numpy().T}, x, y_title)
            for name, columns, y_title in (
                ("silhouette", draws, "silhouette"),
                ("stability", ["stability"], "stability (ARI)"),
            )
        )
        return [silhouette, stability._replace(note=note)]


def _rule() -> str:
    return (
        "the best silhouette among numbers whose clusters come back with an ARI of"
        f" {LEAST_STABILITY} when a fifth of the rows is left out"
    )


def saved(path: Path) -> Choice | None:
    """Returns the choice that a folder holds, if it was made."""
    found = read_table(path / _TABLE)
    if found is None:
        return None
    tried, row = found
    return Choice(int(tried["n_clusters"].iloc[row]), tried)


def _draw(path: Path, choice: Choice, title: str) -> None:
    plt = plots.require_matplotlib()
    # A panel each: on the scale of stability the silhouettes, which decide, would be one flat line.
    figure, (upper, lower) = plt.subplots(2, sharex=True, figsize=(7.2, 5.6), layout="constrained")
    tried = choice.tried
    numbers = tried["n_clusters"].to_numpy()
    mean, spread = tried["silhouette"].to_numpy(), tried["silhouette_std"].to_numpy()
    (line,) = upper.plot(numbers, mean, marker="o", label="mean of the draws, with one deviation")
    upper.fill_between(numbers, mean - spread, mean + spread, color=line.get_color(), alpha=0.2)
    upper.set_ylabel("silhouette")
    lower.plot(numbers, tried["stability"], marker="s", color="C1", label="mean of pairs of draws")
    lower.axhline(LEAST_STABILITY, linestyle=":", color="0.4", label="least that is stable")
    lower.set_ylim(min(0.0, float(tried["stability"].min()) - 0.05), 1.05)
    lower.set_ylabel("stability (ARI)")
    lower.set_xlabel("clusters")
    for axis in (upper, lower):
        axis.axvline(choice.n_clusters, linestyle="--", color="0.4", label="chosen")
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axis.grid(alpha=0.3)
    handles = {line.get_label(): line for axis in (upper, lower) for line in axis.get_lines()}
    figure.legend(handles=handles.values(), fontsize=8, loc="outside lower center", ncols=2)
    figure.suptitle(f"{title}: {choice.n_clusters} clusters chosen, no label seen")
    plots.save(figure, path)
