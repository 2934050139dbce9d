"""How numbers are written, and a line that several families write."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np


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
