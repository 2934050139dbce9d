"""Tables of one's own: columns of CSV, TSV, Parquet or pandas become views, labels and ids.

    read([Path("patients.csv")], TableOptions("blood=hb,wbc; imaging=img_*", labels="diagnosis"))

Nothing is guessed silently: columns that look like labels or ids are refused until they are named,
cells that are no numbers until a way to encode them is, and what was found under which name is
written down in `Dataset.notes`. A row without any value of a view does not hold it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxfedmvc import checks
from jaxfedmvc.data.dataset import (
    Dataset,
    check_classes,
    check_precision,
    kind_of_labels,
    names_of,
    some,
)

if TYPE_CHECKING:
    import pandas as pd

# Between the cells of a text, and what it is called.
_SEPARATORS = {".csv": (",", "commas"), ".tsv": ("\t", "tabs")}
SUFFIXES = (*_SEPARATORS, ".parquet")
# Columns of these names are no features unless somebody says so.
_LIKE_LABELS = (
    *("label", "labels", "class", "classes", "target", "truth", "gt", "y"),
    *("diagnosis", "outcome", "group", "cluster"),
)
_LIKE_IDS = (
    *("id", "ids", "index", "unnamed: 0", "patient_id", "sample_id"),
    *("patient", "sample", "subject", "subject_id", "pid", "mrn"),
)
# Columns of so many rows are looked at for what cannot be chance.
_MANY_ROWS = 20


@dataclasses.dataclass(frozen=True)
class TableOptions:
    """How tables are read.

    Attributes:
      views: Columns of each view, as "blood=hb,wbc; imaging=img_*"; a name may be a pattern. None:
        one view of all columns of one table, or a view for each of several tables.
      labels: Column of the classes, for scoring only.
      id: Column that several tables are joined on, and that names the rows of the result. Its cells
        are read as text, so that 007 and 7 are two rows.
      categories: What is done about columns of words or of true and false: "refuse", or "onehot",
        a column for each value; refused all the same where most cells are numbers, or of many cells
        more than half differ.
      missing: What is done about empty cells of a view that the row has other values of: "refuse";
        "median", of the column; "lack": the row does not hold this view at all.
    """

    views: str | None = None
    labels: str | None = None
    id: str | None = None
    categories: Literal["refuse", "onehot"] = "refuse"
    missing: Literal["refuse", "median", "lack"] = "refuse"

    def __post_init__(self) -> None:
        """Raises ValueError that names the option."""
        checks.choices(self)
        self.patterns()

    def patterns(self) -> dict[str, list[str]] | None:
        """Returns the patterns of each view's columns; None where `views` names none.

        Raises:
          ValueError: `views` cannot be read, or has a view twice.
        """
        if self.views is None:
            return None
        allowed = "such as 'blood=hb,wbc; imaging=img_*'"
        if not isinstance(self.views, str):
            raise checks.wrong("views", self.views, allowed)
        found: dict[str, list[str]] = {}
        for entry in self.views.split(";"):
            name, equals, columns = (part.strip() for part in entry.partition("="))
            patterns = [pattern.strip() for pattern in columns.split(",") if pattern.strip()]
            if not equals or not name or not patterns or name in found:
                raise checks.wrong("views", self.views, allowed)
            found[name] = patterns
        return found


def require_pandas() -> Any:
    """Returns pandas.

    Raises:
      ImportError: Says how to install it.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("tables need pandas: python -m pip install pandas") from error
    return pandas


def read(paths: Sequence[Path], options: TableOptions) -> Dataset:
    """Reads tables that hold the same samples, or a folder with a table for each client.

    In columns of numbers the words that pandas takes for missing ones (NA, nan, None, ...) are
    empty cells; elsewhere they are words like others, and only nothing is empty. Blanks around
    words and ids do not count.

    Several tables are joined on the column `id`; a row of one that another lacks does not hold the
    other's views. The tables of a folder are clients, by the order of their names; views that a
    client has no column of are not held by it.

    Args:
      paths: One or several files, or one folder of files.
      options: What the columns are.

    Raises:
      ValueError: Names the column or the file that is wrong.
      OSError: A file cannot be read.
      ImportError: pandas, or what it reads Parquet with, is missing.
    """
    if len(paths) == 1 and paths[0].is_dir():
        files = sorted(p for p in paths[0].iterdir() if p.suffix.lower() in SUFFIXES)
        if not files:
            raise ValueError(f"{paths[0]}: has no .csv, .tsv or .parquet file")
        if arrays := sorted(p.name for p in paths[0].iterdir() if p.suffix.lower() == ".npz"):
            raise ValueError(
                f"{paths[0]}: has tables, such as {files[0].name}, and arrays, such as {arrays[0]};"
                " allowed is one kind of file for all clients"
            )
        return _from_clients(paths[0].name, files, options)
    frames = {path.stem: _frame(path, options.id) for path in paths}
    if len(frames) < len(paths):
        raise ValueError(f"dataset: two tables are named {paths[0].stem}")
    if len(paths) == 1:
        frame = frames[paths[0].stem]
        return _dataset(frame, _columns(frame, options), options, paths[0].stem)
    return _joined(frames, options)


def from_frame(
    frame: pd.DataFrame, options: TableOptions = TableOptions(), *, name: str = "table"
) -> Dataset:
    """Makes a data set of a pandas table.

    Args:
      frame: A row for each sample. Its index names the rows, as text, unless it is a plain range or
        `options` names a column that does.
      options: What its columns are.
      name: Of the data set.

    Returns:
      Views [n, D_v], unscaled, with zeros where a row does not hold one; see `Dataset`.

    Raises:
      ValueError: Names the column that is wrong, or that float32 would round away; or `frame` is no
        pandas table.
    """
    if not hasattr(frame, "columns"):
        raise ValueError(f"frame: got a {type(frame).__name__}; allowed is a pandas DataFrame")
    if frame.columns.nlevels > 1:
        raise ValueError(f"{name}: has columns of {frame.columns.nlevels} levels; allowed is one")
    frame = frame.rename(columns=str)
    if frame.columns.has_duplicates:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise ValueError(f"{name}: the column {twice!r} is there twice")
    if not len(frame) or not len(frame.columns):
        raise ValueError(f"{name}: has no row or no column")
    if frame.index.nlevels == 1 and frame.index.hasnans:
        raise ValueError(f"id: {name} has {int(frame.index.isna().sum())} empty cells in its index")
    frame = _stripped(frame)
    if options.id is not None and options.id in frame:
        frame = frame.assign(**{options.id: _as_text(frame[options.id])})
    return _dataset(frame, _columns(frame, options), options, name, is_final=True)


def _as_text(ids: pd.Series) -> pd.Series:
    """Returns ids as text, so that 7 and the word 7 are one; empty cells stay empty."""
    return ids.astype(str).where(ids.notna())


def _dataset(
    frame: pd.DataFrame,
    columns: Mapping[str, Sequence[str]],
    options: TableOptions,
    name: str,
    clients: np.ndarray | None = None,
    *,
    is_final: bool = False,
) -> Dataset:
    """Makes a data set of the columns of each view, and of the client of each row if known.

    Its views are float64, unless they are final: whoever scales them loses nothing of wide ranges
    before the cast.
    """
    notes, views, held = [], [], []
    if not is_final and _is_numbers(frame.columns):
        notes.append(
            f"head: its names are numbers, {some(frame.columns, 6)}: write a line of names above"
            " them if these are a sample, which is left out now"
        )
    for view, names in columns.items():
        encoded, note = _encoded(frame[list(names)], options, view)
        values, there = _filled(encoded, options, view)
        if n_filled := int(encoded[there].isna().any(axis=1).sum()):
            note += f"; {n_filled} of {int(there.sum())} rows have medians in empty cells"
        if is_final:
            check_precision(view, [values[there]], [str(column) for column in encoded])
            beyond = (np.abs(values) > np.finfo(np.float32).max).any(axis=0)
            if beyond.any():
                column = encoded.columns[int(np.argmax(beyond))]
                raise ValueError(
                    f"views: the column {column!r} of view {view} has numbers beyond float32;"
                    f" allowed are some up to {np.finfo(np.float32).max:.3g}: scale it before"
                )
            values = values.astype(np.float32)
        views.append(values)
        held.append(there)
        notes.append(f"view {view}: {values.shape[1]} features of {note}")
    read = {options.labels, options.id}.union(*columns.values())
    if others := [column for column in frame if column not in read]:
        notes.append(f"columns in no view: {some(others)}")
    holds = np.stack(held, axis=1)
    empty = ~holds.any(axis=1)
    keep = ~empty
    if empty.any():
        notes.append(f"{int(empty.sum())} rows have no value of any view and are left out")
    if not keep.any():
        raise ValueError(f"{name}: no row has a value of any view")
    labels = classes = None
    if options.labels is not None:
        labels, classes = _classes(frame[options.labels][keep])
        notes.append(f"labels: column {options.labels}, classes {some(classes)}")
    lacking = int((~holds[keep]).any(axis=1).sum())
    if lacking:
        notes.append(f"{lacking} of {int(keep.sum())} rows lack a view")
    ids = np.flatnonzero(keep)
    if options.id is not None:
        own = frame[[options.id]][keep]
        # Clients number their rows by themselves.
        where = own if clients is None else own.assign(**{"": clients[keep]})
        _check_ids(name, own[options.id], where.duplicated())
        ids = own[options.id].to_numpy(str)
    elif not isinstance(frame.index, require_pandas().RangeIndex):
        own = frame.index[keep].map(str)
        if own.has_duplicates:
            twice = own[own.duplicated()][0]
            raise ValueError(
                f"id: {name} has {twice!r} twice in its index; allowed are different names, or"
                " none: reset_index(drop=True)"
            )
        ids = own.to_numpy(str)
    return Dataset(
        name,
        tuple(view[keep] for view in views),
        labels,
        held=None if holds[keep].all() else holds[keep],
        ids=ids,
        clients=None if clients is None else clients[keep],
        notes=tuple(notes),
        classes=classes,
        view_names=tuple(columns),
    )


# --- Several tables -------------------------------------------------------------------------------


def _frame(path: Path, id_column: str | None) -> pd.DataFrame:
    pandas = require_pandas()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    separator, separators = _SEPARATORS.get(path.suffix.lower(), (None, None))
    hint = f"; cells must be separated by {separators}" if separator else ""
    try:
        frame = (
            _text(path, separator, id_column) if separator else _parquet(path, pandas, id_column)
        )
    except ImportError:
        raise
    except pandas.errors.ParserWarning as error:
        raise ValueError(f"{path}: has rows that are longer than its head{hint}") from error
    except Exception as error:  # pandas and its readers raise a zoo of types on a damaged file
        text = f"{str(error).splitlines()[0]}{hint}"
        raise ValueError(f"{path}: is no readable table ({text})") from error
    frame.columns = [str(column).strip() for column in frame.columns]
    names = frame.columns
    if separator:  # pandas has renamed what is there twice
        first = pandas.read_csv(path, sep=separator, header=None, nrows=1, dtype=str)
        first = first.iloc[0].dropna()
        names = pandas.Index(first.str.strip())
    if names.duplicated().any():
        twice = names[names.duplicated()][0]
        raise ValueError(f"{path}: the column {twice!r} is there twice")
    if not len(frame) or not len(frame.columns):
        raise ValueError(f"{path}: has no row or no column")
    return _stripped(frame)


def _stripped(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns a table whose words have no blanks around them; of blanks alone a cell is empty."""
    is_number = require_pandas().api.types.is_numeric_dtype
    words = [c for c in frame if not is_number(frame[c])]
    return frame.assign(**{c: frame[c].map(_without_blanks) for c in words})


def _without_blanks(cell: Any) -> Any:
    return cell.strip() or None if isinstance(cell, str) else cell


def _text(path: Path, separator: str, id_column: str | None) -> pd.DataFrame:
    """Reads a text of cells; ids are text, and words such as None are words among words."""
    pandas = require_pandas()
    # Blanks alone are an empty cell, in columns of numbers too. Cells beyond the head would make
    # the first ones an index, and all others values of the next column.
    read_csv = functools.partial(
        pandas.read_csv, path, sep=separator, skipinitialspace=True, index_col=False
    )
    head = read_csv(nrows=0).columns
    own = {column: str for column in head if column.strip() == id_column}
    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        frame = read_csv(dtype=own)
    is_number = pandas.api.types.is_numeric_dtype
    words = [c for c in frame if not is_number(frame[c]) or frame[c].isna().all()]
    if words:
        plain = read_csv(dtype=own, keep_default_na=False, na_values=[""])
        frame = frame.assign(**{c: plain[c] for c in words})
    return frame


def _parquet(path: Path, pandas: Any, id_column: str | None) -> pd.DataFrame:
    try:
        frame = pandas.read_parquet(path)
    except ImportError as error:
        raise ImportError(f"{path}: Parquet needs pyarrow: pip install pyarrow") from error
    if id_column in frame:
        frame[id_column] = _as_text(frame[id_column])
    return frame


def _check_ids(name: str, ids: pd.Series, repeated: Any) -> None:
    """Raises ValueError where an id is empty or, as `repeated` says, there twice."""
    if ids.isna().any():
        raise ValueError(f"id: {name} has {int(ids.isna().sum())} empty cells in {ids.name!r}")
    if repeated.any():
        raise ValueError(f"id: {name} has {str(ids[repeated].iloc[0])!r} twice in {ids.name!r}")


def _joined(frames: Mapping[str, pd.DataFrame], options: TableOptions) -> Dataset:
    """Joins tables on their ids; without `views` each of them is a view."""
    if options.id is None:
        raise ValueError("id: several tables are joined on a column of ids; name it with id")
    whole: Any = None
    columns: dict[str, list[str]] = {}
    for name, frame in frames.items():
        if options.id not in frame:
            raise ValueError(f"id: {name} has no column {options.id!r}")
        _check_ids(name, frame[options.id], frame[options.id].duplicated())
        own = [c for c in frame if c != options.id]
        for other, theirs in columns.items():
            if known := [c for c in own if c in theirs]:
                raise ValueError(
                    f"dataset: the column {known[0]!r} is in {other} and in {name}; allowed are the"
                    " id and the labels in several tables, and other columns in one: rename it"
                )
        columns[name] = [c for c in own if c != options.labels]
        if whole is None:
            whole = frame
        elif options.labels in own and options.labels in whole:
            whole = whole.merge(frame, on=options.id, how="outer", suffixes=("", " "))
            again = whole.pop(f"{options.labels} ")
            both = whole[options.labels].notna() & again.notna()
            if (whole[options.labels][both] != again[both]).any():
                raise ValueError(f"labels: tables differ in {options.labels!r} of the same id")
            whole[options.labels] = whole[options.labels].fillna(again)
        else:
            whole = whole.merge(frame, on=options.id, how="outer")
    if options.views is not None:
        columns = _columns(whole, options)
    else:
        _check_given(whole, options)
        for features in columns.values():
            _check_unnamed(features)
        columns = {name: features for name, features in columns.items() if features}
    shared = _shared_ids({name: list(frame[options.id]) for name, frame in frames.items()})
    try:
        found = _dataset(whole, columns, options, "-".join(frames))
    except ValueError as error:
        if not str(error).startswith("labels: "):
            raise
        # Rows without a class may be those that another table has under another id.
        raise ValueError(f"{error} ({'; '.join(shared)})") from error
    return found._replace(notes=(*shared, *found.notes))


def _shared_ids(ids: Mapping[str, list[str]]) -> list[str]:
    """Says of each table how many of its ids the first one has.

    Raises:
      ValueError: A table has no id of any other.
    """
    (first, known), *others = ids.items()
    notes = []
    for name, mine in others:
        if not any(set(mine) & set(theirs) for other, theirs in ids.items() if other != name):
            raise ValueError(
                f"id: none of the {len(mine)} ids of {name}, such as {mine[0]!r}, is in another"
                f" table; {first} has some such as {known[0]!r}; allowed are tables that share"
                " samples, with ids written alike (1 and 1.0 are two ids)"
            )
        shared, n, n_known = set(mine) & set(known), len(mine), len(known)
        note = f"ids: {len(shared)} of the {n} of {name} are in {first}, which has {n_known}"
        if 2 * len(shared) < min(n, n_known):
            here, there = (next(i for i in own if i not in shared) for own in (mine, known))
            note += f"; are {here!r} and {there!r} written alike? (1 and 1.0 are two ids)"
        notes.append(note)
    return notes


def _from_clients(name: str, files: Sequence[Path], options: TableOptions) -> Dataset:
    """Stacks the tables of a folder, a client each."""
    pandas = require_pandas()
    parts = [_frame(file, options.id) for file in files]
    whole = pandas.concat(parts, ignore_index=True)
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    if options.views is None:
        for file, part in zip(files, parts, strict=True):
            absent = [column for column in whole if column not in part]
            if absent:
                raise ValueError(
                    f"{file}: has no column {absent[0]!r}, which other clients have; say with views"
                    " which columns belong together, so that a client may lack a view"
                )
    columns = _columns(whole, options)
    found = _dataset(whole, columns, options, name, owners)
    names = ", ".join(f"{c} {file.name}" for c, file in enumerate(files))
    notes = [f"files, a client each: {names}"]
    for view, own in columns.items():
        none = [f.name for f, part in zip(files, parts, strict=True) if not {*own} & {*part}]
        if none:
            notes.append(f"files without a column of view {view}: {some(none)}")
    return found._replace(notes=(*notes, *found.notes))


# --- Columns --------------------------------------------------------------------------------------


def _columns(frame: pd.DataFrame, options: TableOptions) -> dict[str, list[str]]:
    """Returns the columns of each view."""
    _check_given(frame, options)
    others = {options.labels, options.id}
    free = [column for column in frame.columns if column not in others]
    patterns = options.patterns() or {"0": ["*"]}
    found: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for view, wanted in patterns.items():
        for pattern in wanted:
            if pattern in others:
                raise ValueError(f"views: the column {pattern!r} of view {view} is labels or id")
            if not matching(free, pattern):
                raise ValueError(
                    f"views: {pattern!r} of view {view} matches no column of"
                    f" {_columns_near(pattern, frame)}"
                )
        matched = {column for pattern in wanted for column in matching(free, pattern)}
        mine = [column for column in free if column in matched]
        _check_unnamed([column for column in mine if column not in wanted])
        for column in mine:
            if column in owner:
                raise ValueError(f"views: the column {column!r} is in {owner[column]} and {view}")
            owner[column] = view
        found[view] = mine
    return found


def matching(columns: Sequence[str], pattern: str) -> list[str]:
    """Returns the columns that are meant: the one of this name, else those that the pattern fits.

    As a pattern the name `age [years]` would fit `age y`, and not itself.
    """
    if pattern in columns:
        return [pattern]
    return [column for column in columns if fnmatch.fnmatchcase(column, pattern)]


def _columns_near(name: str, frame: pd.DataFrame) -> str:
    """Returns the first columns for an error, and the one that this name was probably meant for.

    Of a wide table the first ones say nothing of it.
    """
    meant = checks.meant(name, map(str, frame.columns)).strip()
    return some(frame.columns) + (f"; {meant}" if meant else "")


def _check_given(frame: pd.DataFrame, options: TableOptions) -> None:
    """Checks that the columns of labels and ids are there."""
    for option, column in (("labels", options.labels), ("id", options.id)):
        if column is not None and column not in frame:
            raise checks.wrong(option, column, f"a column: {_columns_near(column, frame)}")


def _check_unnamed(columns: Sequence[str]) -> None:
    """Checks that no column that nobody has named looks like labels or ids."""
    for option, like in (("labels", _LIKE_LABELS), ("id", _LIKE_IDS)):
        column = next((c for c in columns if c.lower() in like), None)
        if column is not None:
            raise ValueError(
                f"{option}: the column {column!r} looks like {option} and would be a feature;"
                f" give {option}={column}, or name the features with views"
            )


def _is_numbers(names: Sequence[str]) -> bool:
    """Whether names of columns are numbers as a sample has them, and do not count the columns."""
    numbers = require_pandas().to_numeric(list(names), errors="coerce")
    return not np.isnan(numbers).any() and not (np.diff(numbers) == 1).all()


def _encoded(part: pd.DataFrame, options: TableOptions, view: str) -> tuple[pd.DataFrame, str]:
    """Returns a view's columns as numbers, NaN where a cell is empty, and what was done."""
    pandas = require_pandas()
    words = [c for c in part if not pandas.api.types.is_numeric_dtype(part[c])]
    words += [c for c in part if pandas.api.types.is_bool_dtype(part[c]) and c not in words]
    words = [c for c in words if part[c].notna().any()]  # an empty column has no type
    for name in words:
        _check_words(part[name].dropna(), options, view)
    if imaginary := [c for c in part if pandas.api.types.is_complex_dtype(part[c])]:
        raise ValueError(
            f"views: the column {imaginary[0]!r} of view {view} has complex numbers; allowed are"
            " real ones"
        )
    columns, made = [], 0
    for name in part:
        if name not in words:
            columns.append(part[name].astype(np.float64))
            continue
        dummies = pandas.get_dummies(part[name], prefix=name, dtype=np.float64)
        dummies[part[name].isna()] = np.nan
        made += dummies.shape[1]
        columns.append(dummies)
    found = pandas.concat(columns, axis=1)
    # By places: a value of words, and a column beside them, may be given one name.
    infinite = found.columns[np.isinf(found.to_numpy()).any(axis=0)]
    if len(infinite):
        raise ValueError(f"views: the column {infinite[0]!r} of view {view} has infinite cells")
    note = f"columns {some(part.columns, 6)}"
    if words:
        note += f"; {some(words, 6)} one-hot, {made} columns"
    if counted := [c for c in part if c not in words and _counts(part[c])]:
        note += f"; {some(counted)}: another whole number in every row, which may be no feature"
    return found, note


def _check_words(cells: pd.Series, options: TableOptions, view: str) -> None:
    """Checks that words are to be encoded, and that they are categories.

    Most cells of a category are no numbers, unless its type says that it is one, and in many rows
    it has two cells or more for each word on average.

    Args:
      cells: Of a column, without the empty ones.
      options: What is done about words.
      view: What errors call the view.

    Raises:
      ValueError: Names the column and one of its cells.
    """
    pandas = require_pandas()
    holds_many = cells.map(lambda cell: isinstance(cell, list | dict | np.ndarray))
    if holds_many.any():
        raise ValueError(
            f"views: the column {cells.name!r} of view {view} has cells such as"
            f" {str(cells[holds_many].iloc[0])!r}; allowed is one number or word in a cell: make"
            " columns of it, or leave it out with views"
        )
    text = cells.astype(str)
    is_number = pandas.to_numeric(text, errors="coerce").notna()
    with_points = pandas.to_numeric(text.str.replace(",", "."), errors="coerce").notna()
    has_comma, n_words = with_points & ~is_number, text.nunique()
    is_declared = isinstance(cells.dtype, pandas.CategoricalDtype)
    wrong = ~is_number
    if 2 * with_points.sum() > len(text) and not is_declared:
        allowed = (
            f"its other {int(is_number.sum())} cells are numbers: write these {int(wrong.sum())}"
            " as numbers too, or leave them empty"
        )
        if has_comma.any():
            wrong, allowed = has_comma, "write decimals with points"
        elif not wrong.any():
            allowed = (
                "these are numbers kept as text: convert the column to numbers, or to pandas' type"
                " category if they are categories"
            )
    elif options.categories == "refuse":
        names_rows = n_words == len(text) and options.id is None
        hint = f"id={cells.name} if these name the rows, " if names_rows else ""
        if n_words < len(text) and options.labels is None:
            hint = f"labels={cells.name} if these are classes, "
        allowed = f"allowed are numbers, {hint}or categories=onehot"
    elif len(text) >= _MANY_ROWS and 2 * n_words > len(text):
        hint = f"give id={cells.name} if they name the rows, or " if options.id is None else ""
        allowed = (
            f"its {len(text)} cells are {n_words} different words; allowed are categories of two"
            f" cells or more on average: {hint}leave the column out with views"
        )
    else:
        return
    cell = (text[wrong] if wrong.any() else text).iloc[0]
    raise ValueError(
        f"views: the column {cells.name!r} of view {view} has cells such as {cell!r}; {allowed}"
    )


def _counts(column: pd.Series) -> bool:
    """Whether a column of many rows has whole numbers that are all different, as ids have."""
    cells = column.to_numpy(np.float64)
    return len(cells) >= _MANY_ROWS and column.is_unique and bool((cells % 1 == 0).all())


def _filled(part: pd.DataFrame, options: TableOptions, view: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a view's numbers [n, D], 0 where a row does not hold it, and who holds it [n]."""
    values = part.to_numpy(np.float64)
    empty = np.isnan(values)
    held = ~empty.all(axis=1)
    partly = held & empty.any(axis=1)
    if not held.any():
        raise ValueError(f"views: {view} has no value in any row")
    if partly.any():
        place = int(np.flatnonzero(empty[partly].any(axis=0))[0])
        if options.missing == "refuse":
            raise ValueError(
                f"views: the column {part.columns[place]!r} of view {view} is empty in"
                f" {int(empty[partly][:, place].sum())} rows that have other values of the view;"
                " allowed are missing=median and missing=lack"
            )
        if options.missing == "lack":
            held = held & ~partly
            if not held.any():
                raise ValueError(f"views: no row has all values of view {view}")
        else:
            never = empty[held].all(axis=0)
            if never.any():
                column = part.columns[int(np.argmax(never))]
                raise ValueError(
                    f"views: the column {column!r} of view {view} is empty everywhere; leave it out"
                    " with views"
                )
            middle = np.nanmedian(values[held], axis=0)
            values = np.where(empty, middle, values)
    return np.where(held[:, None], values, 0.0), held


def _classes(column: pd.Series) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns labels 0..K-1 and what they stand for."""
    if column.isna().any():
        raise ValueError(
            f"labels: the column {column.name!r} is empty in {int(column.isna().sum())} of"
            f" {len(column)} rows; allowed are a class in every row, or no labels: leave the option"
            " out and name the features with views"
        )
    kind_of_labels(column.to_numpy())
    codes, names = require_pandas().factorize(column, sort=True)
    check_classes(len(names), len(codes), f"the column {column.name!r}")
    return codes.astype(np.int32), names_of(names)
