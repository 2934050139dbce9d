"""How numbers are written, how lines fit a terminal, and a line that several families write."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd


def spread(mean: float, deviation: float) -> str:
    """Returns mean +- deviation over seeds; of one seed the mean, and a dash for none."""
    if math.isnan(mean):
        return "-"
    return f"{mean:.3f}" + ("" if math.isnan(deviation) else f" +- {deviation:.3f}")


def digits(value: float, n: int = 3) -> str:
    """Returns a number to n digits, of a larger one all before the point; never as 1.8e+03."""
    is_long = abs(value) >= 10**n
    return np.format_float_positional(
        np.round(float(value)) if is_long else float(f"{value:.{n}g}"), trim="-"
    )


def megabytes(n_bytes: float) -> str:
    """Returns bytes in MB, without a unit; two digits of what three places would show as nothing.

    Nothing at all is 0, so that it is told from little.
    """
    mb = n_bytes / 1e6
    return f"{mb:.2g}" if mb < 0.01 else f"{mb:.3f}"


def counted(n: int, what: str) -> str:
    """Returns a number of things: 1 run, 2 runs."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def left_out(seed: int, kept: np.ndarray) -> Iterator[str]:
    """Yields which views a run left out, if any.

    Args:
      seed: Of the run.
      kept: Views that count, bool [V].
    """
    places = np.flatnonzero(~np.asarray(kept, bool))
    if len(places):
        views = ", ".join(map(str, places))
        yield (
            f"seed {seed}: left out view{'s' if len(places) > 1 else ''} {views}, whose clusters"
            " agree with no other view's (--nochoose_views keeps all)"
        )


# --- As wide as the terminal ----------------------------------------------------------------------


def width_of_terminal() -> int | None:
    """Returns the columns of the terminal that stdout is; None where it is a file or a pipe.

    What is not seen at once is left as it is, so that it reads the same whoever's terminal it was
    made in.
    """
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table_lines(table: pd.DataFrame, width: int | None = None) -> list[str]:
    """Returns a table's lines; columns that do not fit stand below, behind the same row names.

    Columns of one heading are parted only where they do not fit by themselves.

    Args:
      table: Of cells that are texts or numbers.
      width: Of a line, in characters; None: as wide as the table.
    """
    headings, n = table.columns.get_level_values(0), table.shape[1]
    ends = [k for k in range(1, n) if headings[k] != headings[k - 1]]
    lines: list[str] = []
    first = 0
    while first < n:
        # As far as it goes, if need be one column.
        places = [n, *reversed(ends), *range(n - 1, first, -1)]
        parts = ((end, table.iloc[:, first:end]) for end in places if end > first)
        for end, part in parts:
            found = part.to_string().splitlines()
            if width is None or end == first + 1 or max(map(len, found)) <= width:
                break
        lines += ["", *found] if lines else found
        first = end
    return lines


def in_lines(blocks: Sequence[str], width: int | None = None) -> list[list[int]]:
    """Returns which blocks stand in each line: as many as fit after the first, which leads it.

    Args:
      blocks: Of one line, of which each further one begins below the end of the first.
      width: Of a line, in characters; None: one line.
    """
    lines: list[list[int]] = [[]]
    taken = indent = len(blocks[0])
    for i, block in enumerate(blocks[1:], start=1):
        if width is not None and lines[-1] and taken + len(block) > width:
            lines.append([])
            taken = indent
        lines[-1].append(i)
        taken += len(block)
    return lines


def wrapped(text: str, width: int | None = None) -> list[str]:
    """Returns the lines of a text; those after the first are indented.

    Args:
      text: A line, whose indentation stays.
      width: Of a line, in characters; None: one line.
    """
    if width is None or len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    return textwrap.wrap(text, max(width, 20), subsequent_indent=indent, break_on_hyphens=False)
