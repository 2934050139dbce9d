"""What a multi-view data set is, and what must be true of its arrays."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Dataset(NamedTuple):
    """Views of the same samples, row by row.

    Attributes:
      name: stem of the file the data came from, or the name of a set that needs no file.
      views: one float32 array [n, D_v] per view.
      labels: [n] int32 classes 0..K-1, or None when the file has none.
      held: [n, V] bool, which rows hold which views; views are zero where a row does not. None: all
        rows hold all views.
      ids: [n] what each row is called; its place if None.
      clients: [n] int, the client that each row lies with; None: nobody has dealt them out yet.
      notes: what was found under which name, a line each.
      classes: what each of the K classes is called in the data; its number if None.
      view_names: what each view is called in the data; its number if None.
    """

    name: str
    views: tuple[np.ndarray, ...]
    labels: np.ndarray | None
    held: np.ndarray | None = None
    ids: np.ndarray | None = None
    clients: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    classes: tuple[str, ...] | None = None
    view_names: tuple[str, ...] | None = None


# Sums of squares of larger numbers leave float32's range.
_LARGEST = 1e15
# Squares of differences between smaller numbers are zero in float32, and all rows are alike.
_SMALLEST = 1e-15
# Rounding by this share of a feature's standard deviation changes no clustering.
_PRECISE = 1e-3
# What varies by less than this share of its size is constant but for float64's own rounding.
_CONSTANT = 1e-12
# Sets of fewer rows may have as many classes as rows.
_FEW_ROWS = 20


def some(names: Any, most: int = 12) -> str:
    """Returns names for a text, and dots for those beyond the first ones."""
    known = [str(name) for name in names]
    return ", ".join(known[:most]) + (", ..." if len(known) > most else "")


def names_of(classes: Any) -> tuple[str, ...]:
    """Returns what classes are called; whole numbers have no point, whatever type held them."""
    return tuple(
        str(int(c)) if isinstance(c, float | np.floating) and c.is_integer() else str(c)
        for c in classes
    )


def check_classes(n_classes: int, n_rows: int, what: str) -> None:
    """Checks that labels are classes, and no measurements.

    Raises:
      ValueError: There are more of them than half of the rows.
    """
    if n_rows >= _FEW_ROWS and 2 * n_classes > n_rows:
        raise ValueError(
            f"labels: {what} has {n_classes} different values in {n_rows} rows; allowed are classes"
            " of two rows or more on average"
        )


def check_arrays(
    views: Sequence[Any],
    labels: Any = None,
    names: Sequence[str] | None = None,
    *,
    unscaled: bool = False,
) -> None:
    """Checks that views, and labels if any, describe the same samples with usable numbers.

    Args:
      views: arrays [n, D_v].
      labels: array [n], or None.
      names: what errors call the views; their places if None.
      unscaled: whether features are still to be scaled, in float64, whose numbers are usable then.

    Raises:
      ValueError: there are no views; a view is not a non-empty 2-D array of finite real numbers
        whose squares float32 can add up; the views differ in their number of rows, or are tables
        that name them in another order; or the labels are not one per row, all numbers or all
        words.
    """
    if len(views) == 0:
        raise ValueError("no views: at least one array [n, D] is needed")
    names = names or [str(i) for i in range(len(views))]
    tables = {f"view {name}": view for name, view in zip(names, views, strict=True)}
    for name, view in tables.items():
        if view is None or hasattr(view, "toarray"):  # as SciPy's sparse matrices have
            got = "None" if view is None else f"a {type(view).__name__}, which is sparse"
            raise ValueError(f"{name}: got {got}; allowed is an array [n, D]")
        check_unmasked(name, view)
    check_order(tables | {"labels": labels})
    arrays = [np.asarray(view) for view in views]
    for name, view in zip(names, arrays, strict=True):
        if view.ndim != 2 or view.size == 0:
            raise ValueError(f"view {name} must be a non-empty array [n, D]; got {view.shape}")
        # The latter are bfloat16 and its like, which are not NumPy's own.
        if view.dtype.kind not in "biuf" and not np.can_cast(view.dtype, np.float32):
            raise ValueError(f"view {name} must hold real numbers; got dtype {view.dtype}")
        kind = np.float64 if unscaled else np.float32
        with np.errstate(over="ignore"):
            finite = np.isfinite(view.astype(kind, copy=False))
        if bad := view.size - int(finite.sum()):
            raise ValueError(
                f"view {name} has {bad} values that are NaN or infinite (in {kind.__name__});"
                " allowed are finite numbers"
            )
        if unscaled:
            continue
        if (largest := max(abs(float(view.min())), abs(float(view.max())))) > _LARGEST:
            raise ValueError(
                f"view {name} has numbers up to {largest:.3g}; allowed are some up to"
                f" {_LARGEST:g}, whose squares float32 can add up: scale the features"
            )
    check_rows(arrays, labels)


def check_unmasked(name: str, array: Any) -> None:
    """Checks that no value of an array is masked.

    Args:
      name: What errors call the array.
      array: Of any kind.

    Raises:
      ValueError: Some are; whoever takes the array for a plain one would count them.
    """
    if np.ma.is_masked(array):
        raise ValueError(
            f"{name} has {np.ma.count_masked(array)} values that are masked, and what lies under"
            " the mask would count; allowed are finite numbers"
        )


def check_order(tables: Mapping[str, Any]) -> None:
    """Checks that pandas' tables of the same rows do not name them in different orders.

    Rows are taken by place, whatever the index says. What is no table of pandas has no names.

    Args:
      tables: What errors call each of them, and tables, series or arrays [n, ...].

    Raises:
      ValueError: Names the first row of which two indices say different things.
    """
    seen: dict[str, Any] = {}
    for name, table in tables.items():
        if not hasattr(table, "iloc"):
            continue
        for other, known in seen.items():
            if table.index.equals(known):
                continue
            mine, others = ([str(row) for row in index] for index in (table.index, known))
            place = _apart(mine, others)
            if place is not None:
                raise ValueError(
                    f"{name}: row {place} is {mine[place]!r} in its index; allowed is"
                    f" {others[place]!r}, as in {other}: rows are taken by place, so bring the"
                    " tables to one order, or leave the index out (to_numpy())"
                )
        seen[name] = table.index


def check_columns(name: str, table: Any, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Checks that a table has the columns of others of its view, in the same order.

    Args:
      name: What errors call the table.
      table: Of pandas or its like; what has no columns by name passes.
      known: What the others' columns are called; none: nobody has said.

    Returns:
      What is known with this table.

    Raises:
      ValueError: Names the first column that is another one.
    """
    names = tuple(map(str, getattr(table, "columns", ())))
    place = _apart(names, known)
    if place is not None:
        raise ValueError(
            f"{name}: column {place} is {names[place]!r}; allowed is {known[place]!r}, as in the"
            " first table of the view"
        )
    return names if not known or (names and _counts(known)) else tuple(known)


def _apart(names: Sequence[str], others: Sequence[str]) -> int | None:
    """Returns the first place at which names differ; None where they agree or one has no names.

    Names that only count, from 0 on, are none, unless the others are the same ones in disorder.
    """
    if len(names) != len(others):  # which is refused elsewhere
        return None
    pairs = zip(names, others, strict=True)
    place = next((i for i, (mine, other) in enumerate(pairs) if mine != other), None)
    if place is None or (set(names) != set(others) and (_counts(names) or _counts(others))):
        return None
    return place


def _counts(names: Sequence[str]) -> bool:
    return all(name == str(i) for i, name in enumerate(names))


def check_size(name: str, view: np.ndarray) -> None:
    """Checks that a view of all samples has numbers whose squares float32 can hold, or zeros alone.

    Args:
      name: What errors call the view.
      view: float32 [n, D].

    Raises:
      ValueError: The largest of its numbers is too small.
    """
    largest = max(abs(float(view.min())), abs(float(view.max())))
    if 0 < largest < _SMALLEST:
        raise ValueError(
            f"view {name} has no numbers beyond {largest:.3g}; allowed are some of {_SMALLEST:g} or"
            " more, whose squares float32 can hold: scale the features"
        )


def check_rows(views: Sequence[Any], labels: Any = None) -> None:
    """Checks that views, and labels if any, are of the same samples; reads no feature.

    Args:
      views: arrays [n, D_v].
      labels: array [n], or None.

    Raises:
      ValueError: the views differ in their number of rows, or the labels are not one per row, all
        numbers or all words.
    """
    rows = [len(view) for view in views]
    if len(set(rows)) > 1:
        raise ValueError(f"views must have the same number of rows; got {rows}")
    if labels is not None:
        if np.shape(labels) != (rows[0],):
            raise ValueError(f"labels must have shape ({rows[0]},); got {np.shape(labels)}")
        kind_of_labels(labels)


def check_precision(name: str, parts: Sequence[Any], columns: Sequence[str] | None = None) -> None:
    """Checks that a view keeps its features when it becomes float32.

    A feature that varies little around a large number, such as seconds since 1970, does not.

    Args:
      name: What errors call the view.
      parts: Its rows, an array [rows, D] for each client, or one in all.
      columns: What errors call its columns; their places if None.

    Raises:
      ValueError: Some number is rounded by more than a thousandth of the standard deviation of its
        column, and the column is not constant.
    """
    arrays = [np.asarray(part) for part in parts]
    if all(np.can_cast(x.dtype, np.float32) for x in arrays):
        return
    low = np.min([x.min(axis=0) for x in arrays], axis=0).astype(np.float64)
    high = np.max([x.max(axis=0) for x in arrays], axis=0).astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinite numbers are refused elsewhere
        size, span = np.maximum(np.abs(low), np.abs(high)), high - low
    # Two passes over the numbers tell most columns apart: float32 has 24 bits, above its smallest
    # number, and the standard deviation of n numbers is their range by the root of 2 n, or more.
    rounding = np.maximum(2.0**-24 * size, 2.0**-150)
    least = span / np.sqrt(2 * sum(map(len, arrays)))
    is_doubtful = (span > _CONSTANT * size) & (rounding > _PRECISE * least)
    for column in map(int, np.flatnonzero(is_doubtful)):
        x = np.concatenate([array[:, column] for array in arrays]).astype(np.float64)
        error, allowed = np.abs(x - x.astype(np.float32)).max(), _PRECISE * x.std()
        if error > allowed:
            raise ValueError(
                f"view {name}: column {column if columns is None else repr(columns[column])}: got"
                f" numbers that float32 rounds by up to {error:.3g}; allowed is {allowed:.3g}, a"
                " thousandth of their standard deviation: subtract the mean, or scale, before"
            )


def kind_of_labels(labels: Any, name: str = "labels") -> str:
    """Returns what labels [n] are, "numbers" or "words"; errors call them `name`.

    Raises:
      ValueError: Some are missing or neither, or there are both, which would never be equal.
    """
    # A list of words and NaN would become an array of words, 'nan' among them.
    array = np.asarray(labels, None if hasattr(labels, "dtype") else object)
    if array.dtype != object:
        missing = array != array
        kinds = {"numbers" if array.dtype.kind in "biuf" else "words"}
    else:
        of_each = np.asarray([_kind(label) for label in array])
        missing = of_each == ""
        kinds = set(of_each[~missing].tolist())
    if missing.any():
        raise ValueError(
            f"{name}: got {array[missing].tolist()[0]} in {int(missing.sum())} of {len(array)}"
            " rows; allowed is a number or a word in each"
        )
    if len(kinds) > 1:
        raise ValueError(f"{name}: got numbers and words; allowed are either of them alone")
    return kinds.pop()


def _kind(label: Any) -> str:
    """Says whether a label is one of the numbers or of the words; nothing where neither."""
    if isinstance(label, str | bytes):
        return "words"
    is_number = isinstance(label, numbers.Real | np.bool_) and label == label
    return "numbers" if is_number else ""
