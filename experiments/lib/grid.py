"""Settings of a sweep from one line of text: `tau_m=0.1,0.3; lr=log(1e-4,1e-2,7)`.

Axes stand between semicolons, an axis' values between commas. `log(a,b,n)` and `lin(a,b,n)` stand
for n values from a to b, both included, in equal ratios and in equal steps. Values stay text: the
flag that an axis is named after parses them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

_RANGES: dict[str, Callable[..., np.ndarray]] = {"lin": np.linspace, "log": np.geomspace}
_MOST = 10_000  # values of a range: a slip of the finger is not to fill the memory
_TRIES = 100  # for each random setting: enough to find every one of a grid that is drawn out
_SHOWN = 30  # characters on either side of the one that a message points at


class Axis(NamedTuple):
    """What one flag is set to.

    Attributes:
      name: Of the flag.
      values: As the flag's parser takes them; all differ.
      low: Of the range, where the axis is a single range of several values; else None.
      high: The same.
      scale: "log" or "lin", the same.
    """

    name: str
    values: tuple[str, ...]
    low: float | None = None
    high: float | None = None
    scale: str | None = None


def parse(text: str) -> list[Axis]:
    """The axes that `text` describes, in its order.

    Args:
      text: Such as `tau_m=0.1,0.3; lr=log(1e-4,1e-2,7); hidden=64x64,256x256`. Space around names,
        values and numbers does not count. Numbers of ranges are written as floats of 12 digits.

    Raises:
      ValueError: `text` is malformed; the message points at the character, counted from 1.
    """
    _check_parentheses(text)
    axes: list[Axis] = []
    for start, stop in _split(text, 0, len(text), ";"):
        if start == stop:
            raise _error(text, stop, f"expected an axis, name=values, before {_next(text, stop)}")
        equals = text.find("=", start, stop)
        if equals < 0:
            raise _error(text, stop, f"expected '=' before {_next(text, stop)}")
        name = text[start:equals].strip()
        if not name:
            raise _error(text, equals, "expected a name before '='")
        if name in (axis.name for axis in axes):
            raise _error(text, start, f"there is an axis {name!r} already")
        axes.append(_axis(text, name, equals + 1, stop))
    return axes


def combinations(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every setting of the grid as `{name: value}`; the last axis varies fastest."""
    names = [axis.name for axis in axes]
    product = itertools.product(*(axis.values for axis in axes))
    return [dict(zip(names, values, strict=True)) for values in product]


def draws(axes: Sequence[Axis], n: int, seed: int) -> list[dict[str, str]]:
    """Random settings that all differ; the first ones are the same whatever `n` is.

    Args:
      axes: Axes of a single range are drawn uniformly within it, `log` in logarithms; of other axes
        one of the values is drawn, all equally likely.
      n: How many settings.
      seed: Same seed, same settings.

    Raises:
      ValueError: `n` is less than 1 or more than there are settings.
    """
    if n < 1:
        raise ValueError(f"random: got {n}; allowed is 1 or more settings")
    rng = np.random.default_rng(seed)
    found: dict[tuple[str, ...], None] = {}
    for _ in range(_TRIES * n):
        found[tuple(_draw(rng, axis) for axis in axes)] = None
        if len(found) == n:
            names = [axis.name for axis in axes]
            return [dict(zip(names, values, strict=True)) for values in found]
    raise ValueError(f"random: got {n}; the grid has only {len(found)} different settings")


def _draw(rng: np.random.Generator, axis: Axis) -> str:
    if axis.low is None or axis.high is None:
        return axis.values[rng.integers(len(axis.values))]
    if axis.scale == "log":
        return _written(math.exp(rng.uniform(math.log(axis.low), math.log(axis.high))))
    return _written(rng.uniform(axis.low, axis.high))


def _axis(text: str, name: str, start: int, stop: int) -> Axis:
    """The axis of the values in `text[start:stop]`."""
    values: list[str] = []
    ranges = []
    spans = list(_split(text, start, stop, ","))
    for first, last in spans:
        value = text[first:last]
        if not value:
            raise _error(text, last, f"expected a value before {_next(text, last)}")
        if "=" in value:
            at = text.index("=", first)
            raise _error(text, at, "a second '=' in one axis; axes are separated by ';'")
        new = [value]
        if "(" in value:
            ranges.append(_range(text, first, last))
            new = ranges[-1].values
        for written in new:
            if written in values:
                raise _error(text, first, f"axis {name!r} has the value {written} already")
            values.append(written)
    # Beside other values a range is part of a list, and one value is no range to draw from.
    if ranges and len(spans) == 1 and len(values) > 1:
        return Axis(name, tuple(values), ranges[0].low, ranges[0].high, ranges[0].scale)
    return Axis(name, tuple(values))


class _Range(NamedTuple):
    """What a function stands for."""

    values: list[str]
    low: float
    high: float
    scale: str


def _range(text: str, start: int, stop: int) -> _Range:
    """The numbers of the function in `text[start:stop]`."""
    opened, closed = text.index("(", start), text.index(")", start)
    scale = text[start:opened].strip()
    if scale not in _RANGES:
        raise _error(text, start, f"unknown function {scale!r}; allowed are log(a,b,n), lin(a,b,n)")
    if closed != stop - 1:
        raise _error(text, closed + 1, "expected ',' or ';' after ')'")
    spans = list(_split(text, opened + 1, closed, ","))
    if len(spans) != 3:
        got = 0 if not text[opened + 1 : closed].strip() else len(spans)
        raise _error(text, start, f"{scale} takes 3 numbers, first, last and how many; got {got}")
    first, last = (_number(text, *span) for span in spans[:2])
    if not math.isfinite(last - first):
        raise _error(text, spans[1][0], f"no finite range from {first} to {last}")
    for number, (at, _) in zip((first, last), spans[:2], strict=True):
        if scale == "log" and number <= 0:
            raise _error(text, at, f"log takes positive numbers only; got {number}")
    at, end = spans[2]
    if not re.fullmatch(r"\d{1,9}", text[at:end], re.ASCII) or not 1 <= int(text[at:end]) <= _MOST:
        raise _error(text, at, f"expected how many values, 1 to {_MOST}; got {text[at:end]!r}")
    n = int(text[at:end])
    if n == 1 and first != last:
        raise _error(text, at, f"1 value cannot reach from {first} to {last}; allowed is 2 or more")
    numbers = _RANGES[scale](first, last, n)
    if scale == "lin":  # what is left of a zero after rounding
        numbers[np.abs(numbers) < 1e-13 * np.max(np.abs(numbers))] = 0.0
    values = [_written(x) for x in numbers]
    return _Range(values, min(first, last), max(first, last), scale)


def _number(text: str, start: int, stop: int) -> float:
    """The number in `text[start:stop]`, to as many digits as it is written back with."""
    if start == stop:
        raise _error(text, stop, f"expected a number before {_next(text, stop)}")
    try:
        return float(_written(float(text[start:stop])))
    except ValueError:
        raise _error(text, start, f"expected a number; got {text[start:stop]!r}") from None


def _written(number: float) -> str:
    """A float to 12 significant digits; whole numbers so that flags of whole numbers take them."""
    return repr(float(f"{number:.12g}") + 0.0).removesuffix(".0")  # never -0.0


def _check_parentheses(text: str) -> None:
    """Raises unless every parenthesis is closed within its axis, and none is within another."""
    opened = -1
    for at, character in enumerate(text):
        if character == "(" and opened >= 0:
            raise _error(text, at, "a parenthesis within another")
        if character == "(":
            opened = at
        elif character == ")" and opened < 0:
            raise _error(text, at, "')' without '('")
        elif character == ")":
            opened = -1
        elif character == ";" and opened >= 0:
            break
    if opened >= 0:
        raise _error(text, opened, "'(' without ')'")


def _split(text: str, start: int, stop: int, separator: str) -> Iterator[tuple[int, int]]:
    """Spans of `text[start:stop]` between separators outside parentheses, without outer space.

    An empty span is where the separator or the end is that came too early.
    """
    inside = False
    for at in range(start, stop + 1):
        if at == stop or (text[at] == separator and not inside):
            last = start + len(text[start:at].rstrip())
            yield (at, at) if last == start else (last - len(text[start:last].lstrip()), last)
            start = at + 1
        else:
            inside = text[at] == "(" or (inside and text[at] != ")")


def _next(text: str, at: int) -> str:
    """What stands there, for a message."""
    rest = text[at:].lstrip()
    return repr(rest[0]) if rest else "the end"


def _error(text: str, at: int, message: str) -> ValueError:
    """Points at a character with a caret before it, in one line."""
    before, after = text[:at], text[at:]
    if len(before) > _SHOWN:
        before = "..." + before[-_SHOWN:]
    if len(after) > _SHOWN:
        after = after[:_SHOWN] + "..."
    return ValueError(f"grid: at character {at + 1}, at ^ in {before + '^' + after!r}: {message}")
