"""Settings of a sweep from one line of text: `tau_m=0.1,0.3; lr=log(1e-4,1e-2,7)`.

Axes stand between semicolons, an axis' values between commas. `log(a,b,n)` and `lin(a,b,n)` stand
for n values from a to b, both included, in equal ratios and in equal steps. Values stay text: the
flag that an axis is named after parses them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from sklearn.model_selection import ParameterGrid, ParameterSampler

_SPACED: dict[str, Callable[..., np.ndarray]] = {"lin": np.linspace, "log": np.geomspace}
_MOST = 10_000  # values of a range: a slip of the finger is not to fill the memory
_BETWEEN = re.compile(r",(?![^(]*\))")  # commas outside parentheses
_RANGE = re.compile(r"(lin|log)\s*\(([^,]+),([^,]+),\s*(\d{1,9})\s*\)", re.ASCII)


class Axis(NamedTuple):
    """What one flag is set to.

    Attributes:
      name: Of the flag.
      values: As the flag's parser takes them; all differ.
      scale: "log" or "lin" where the axis is one range of several values; else None.
    """

    name: str
    values: tuple[str, ...]
    scale: str | None = None


def parse(text: str) -> list[Axis]:
    """Returns the axes that a text describes, in its order.

    Args:
      text: Such as `tau_m=0.1,0.3; lr=log(1e-4,1e-2,7); hidden=64x64,256x256`. Space around names,
        values and numbers does not count. Numbers of ranges are written to 12 digits.

    Raises:
      ValueError: Names the axis and what is wrong with it.
    """
    axes: dict[str, Axis] = {}
    for part in text.split(";"):
        name, equals, values = (piece.strip() for piece in part.partition("="))
        if not (name and equals):
            raise _wrong("axis", part.strip(), "name=values, with ';' between axes")
        if name in axes:
            raise ValueError(f"grid: there are two axes {name}; give its values in one")
        axes[name] = _axis(name, values)
    return list(axes.values())


def combinations(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Returns every setting of the grid as `{name: value}`; the last axis varies fastest."""
    # By number, since ParameterGrid goes through axes in the order of their keys.
    found = ParameterGrid({i: axis.values for i, axis in enumerate(axes)})
    return [{axis.name: values[i] for i, axis in enumerate(axes)} for values in found]


def draws(axes: Sequence[Axis], n: int, seed: int) -> list[dict[str, str]]:
    """Returns random settings that all differ.

    Args:
      axes: Axes of a single range are drawn uniformly within it, `log` in logarithms; of other axes
        one of the values is drawn, all equally likely.
      n: How many settings.
      seed: Same seed, same settings.

    Raises:
      ValueError: `n` is less than 1 or more than there are settings.
    """
    continuous = any(axis.scale for axis in axes)
    most = math.inf if continuous else math.prod(len(axis.values) for axis in axes)
    if not 1 <= n <= most:
        raise ValueError(f"random: got {n}; allowed is 1 to {most}, all settings of the grid")
    found: dict[tuple[str, ...], None] = {}
    spaces = {i: _space(axis) for i, axis in enumerate(axes)}
    # Without a range it draws without replacement; else numbers of 12 digits may meet again.
    for drawn in ParameterSampler(spaces, 2 * n if continuous else n, random_state=seed):
        values = (drawn[i] for i in range(len(axes)))
        found[tuple(v if isinstance(v, str) else _written(v) for v in values)] = None
    if len(found) < n:
        raise ValueError(f"random: got {n}; the ranges are too narrow for so many settings")
    names = [axis.name for axis in axes]
    return [dict(zip(names, values, strict=True)) for values in list(found)[:n]]


def _space(axis: Axis) -> Any:
    """Returns what ParameterSampler draws from: values, or a distribution."""
    if axis.scale is None:
        return axis.values
    low, high = sorted((float(axis.values[0]), float(axis.values[-1])))
    return stats.loguniform(low, high) if axis.scale == "log" else stats.uniform(low, high - low)


def _axis(name: str, text: str) -> Axis:
    items = [item.strip() for item in _BETWEEN.split(text)]
    if any(not item or "=" in item for item in items):
        raise _wrong(name, text, "values with ',' between, and ';' before the next axis")
    values = [v for item in items for v in _values(name, item)]
    numbers = [_as_number(value) for value in values]
    for value, number in zip(values, numbers, strict=True):
        if numbers.count(number) > 1:
            raise ValueError(f"grid: {name} has the value {value} twice")
    # Beside other values a range is part of a list, and one value is no range to draw from.
    is_range = len(items) == 1 < len(values)
    return Axis(name, tuple(values), text[:3] if is_range else None)


def _as_number(text: str) -> float | str:
    """Returns what tells values apart: 1 and 1.0 are one, words are themselves."""
    try:
        return float(text)
    except ValueError:
        return text


def _values(name: str, text: str) -> list[str]:
    """Returns the values that a function stands for; other texts are values themselves."""
    if "(" not in text and ")" not in text:
        return [text]
    match = _RANGE.fullmatch(text)
    if match is None:
        raise _wrong(name, text, "lin(first,last,n) or log(first,last,n)")
    scale, n = match[1], int(match[4])
    try:
        first, last = (float(_written(float(number))) for number in match.group(2, 3))
    except ValueError:
        raise _wrong(name, text, "numbers for the first and the last value") from None
    if not math.isfinite(last - first) or (scale == "log" and min(first, last) <= 0):
        raise _wrong(name, text, "finite numbers, and above 0 for log")
    if not 1 <= n <= _MOST or (n == 1 and first != last):
        raise _wrong(name, text, f"2 to {_MOST} values from {first} to {last}")
    numbers = _SPACED[scale](first, last, n)
    if scale == "lin":  # what is left of a zero after rounding
        numbers[np.abs(numbers) < 1e-13 * np.max(np.abs(numbers))] = 0.0
    texts = [_written(x) for x in numbers]
    whole = [text.lstrip("-").isdecimal() for text in texts]
    # Some flags take 1 for something else than 1.0: numbers of one range are of one kind.
    ending = "" if all(whole) else ".0"
    return [text + ending * is_whole for text, is_whole in zip(texts, whole, strict=True)]


def _written(number: float) -> str:
    """Returns a number to 12 digits; whole ones so that flags of whole numbers take them."""
    return f"{number + 0.0:.12g}"  # never -0


def _wrong(name: str, got: str, allowed: str) -> ValueError:
    return ValueError(f"grid: {name}: got {got!r}; allowed is {allowed}")
