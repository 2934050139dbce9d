"""How numbers are written."""

from __future__ import annotations

import math


def spread(mean: float, deviation: float) -> str:
    """Returns mean +- deviation over seeds; of one seed the mean, and a dash for none."""
    if math.isnan(mean):
        return "-"
    return f"{mean:.3f}" + ("" if math.isnan(deviation) else f" +- {deviation:.3f}")


def counted(n: int, what: str) -> str:
    """Returns a number of things: 1 run, 2 runs."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
