"""What a sweep has finished, in files that a kill at any moment leaves usable."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from experiments.lib import folder as folders
from jaxfedmvc.files import write_text


class Ledger:
    """runs.csv and batches.csv of a folder; what a killed job has left of them is taken up again.

    Both only grow, by a batch at a time. A batch counts once its line in batches.csv is whole, and
    runs.csv is cut back to the batches that count. A line without runs says what size was chosen.

    Attributes:
      rows: Finished runs as dicts of text, in order.
      seconds: Of all finished batches.
      sizes: The batch size of each group, by the group's place, as it was last.
    """

    def __init__(self, folder: Path | None) -> None:
        """Reads what is there; None for a process that leaves reading and writing to another.

        Raises:
          ValueError: A file holds something else, and not what a kill can have left of it.
        """
        self.folder = folder
        self.sizes: dict[int, int] = {}
        self.rows: list[dict[str, Any]] = []
        self.seconds = 0.0
        self._done: dict[int, int] = {}
        if folder is None:
            return
        rows, n_batches = _whole_rows(folder / "runs.csv"), 0
        if rows and not {"seed", "seconds"} <= rows[0].keys():
            raise _damaged(folder / "runs.csv", 1)
        if rows and not (folder / "batches.csv").exists():  # a line of it is older than any run
            raise ValueError(
                f"output_dir: {str(folder / 'batches.csv')!r} is gone, without which no row of"
                " runs.csv counts; allowed is the folder as the job left it, or a new one"
            )
        for line, batch in enumerate(_whole_rows(folder / "batches.csv"), start=2):
            try:
                group, size, n = (int(batch[name]) for name in ("group", "size", "runs"))
                seconds = float(batch["seconds"])
            except (KeyError, TypeError, ValueError) as error:
                raise _damaged(folder / "batches.csv", line) from error
            if sum(self._done.values()) + n > len(rows):
                break
            n_batches += 1
            self.keep(group, size, n)
            self.seconds += seconds
        self.rows = rows[: sum(self._done.values())]
        _cut(folder / "runs.csv", len(self.rows))  # first: it must never be there alone
        _cut(folder / "batches.csv", n_batches)

    def done(self, group: int) -> int:
        """Returns the number of finished runs of a group."""
        return self._done.get(group, 0)

    def add(
        self,
        group: int,
        size: int,
        rows: list[dict[str, Any]],
        seconds: float,
        compiling: float = 0.0,
    ) -> None:
        """Keeps a finished batch of a program for `size` runs.

        Args:
          group: Its place.
          size: That the program is for.
          rows: Of its runs; each took its share of the seconds without compilation.
          seconds: Of the batch as a whole.
          compiling: How many of these it waited for the program.
        """
        rows = [row | {"seconds": round((seconds - compiling) / len(rows), 3)} for row in rows]
        batch = {"group": group, "size": size, "runs": len(rows), "seconds": round(seconds, 3)}
        if self.folder is not None:
            if rows:
                folders.append_rows(self.folder / "runs.csv", rows)
            folders.append_rows(self.folder / "batches.csv", [batch])
        self.rows += [{name: str(value) for name, value in row.items()} for row in rows]
        self.seconds += seconds
        self.keep(group, size, len(rows))

    def keep(self, group: int, size: int, n: int) -> None:
        """Counts `n` more runs of a group as finished, and takes note of its batch size."""
        self.sizes[group] = size
        self._done[group] = self.done(group) + n


def _whole_lines(path: Path) -> list[str]:
    """Returns the lines of a file, without a last one that was not written to its end."""
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [line for line in file if line.endswith("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"output_dir: {str(path)!r} is no text; allowed is the file as the job left it, or a"
            " new folder"
        ) from error


def _whole_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(_whole_lines(path)))


def _damaged(path: Path, line: int) -> ValueError:
    return ValueError(
        f"output_dir: line {line} of {str(path)!r} is not one that a sweep wrote; allowed is the"
        " file as the job left it, or a new folder"
    )


def _cut(path: Path, n_rows: int) -> None:
    """Leaves the header and the first rows; a file without rows goes."""
    if n_rows:
        write_text(path, "".join(_whole_lines(path)[: 1 + n_rows]))
    else:
        path.unlink(missing_ok=True)
