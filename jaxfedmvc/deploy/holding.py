"""What a node holds, from the file that its operator wrote: its data, keys and policy.

client = 0
data = "hospital0.npz"          # or .npy, .csv, .tsv; beside this file
ranges = "ranges.csv"           # of the columns of a table: column, least, most
folder = "state"                # states of jobs, and found labels

[views]                         # view id -> array of the .npz, or columns of the table
0 = "blood"
1 = "imaging"

[agrees]
methods = ["fmcsc", "e_fkmvc"]
least_clients = 3

[agrees.settings]               # the least or the most that a setting may be
upload_noise = {least = 0.5}
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfedmvc import checks, keys
from jaxfedmvc.data.dataset import check_arrays, check_precision, some
from jaxfedmvc.data.tables import matching
from jaxfedmvc.deploy import masks
from jaxfedmvc.deploy.job import read_toml
from jaxfedmvc.deploy.policy import Policy


@dataclasses.dataclass(frozen=True)
class Holding:
    """What a node holds.

    Attributes:
      client: Its number.
      views: `{view id: float32 [rows, D_v]}`.
      ids: Ids of the samples [rows], or None.
      labels: For counting alone [rows], or None.
      folder: Where its states and its clusters lie.
      policy: What it agrees to.
      columns: Names of each view's columns, in order; none where data are arrays.
      ranges: Of each column of a table, to whose 0 to 1 it was scaled; None: not scaled.
      identity: Its private key, which signs keys of secure sums; or None.
      identities: Public keys of other clients, which their operators handed over.
    """

    client: int
    views: Mapping[int, np.ndarray]
    ids: np.ndarray | None
    labels: np.ndarray | None
    folder: Path
    policy: Policy
    columns: Mapping[int, Sequence[str]] = dataclasses.field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] | None = None
    identity: Any = None
    identities: Mapping[int, Any] = dataclasses.field(default_factory=dict)

    @property
    def n_rows(self) -> int:
        """Number of samples."""
        return len(next(iter(self.views.values())))

    def hashed_columns(self) -> dict[int, str]:
        """Returns a hash of the columns and ranges of each view that is made of a table's."""
        ranges = self.ranges or {}
        texts = {
            v: json.dumps([[name, *ranges.get(name, ())] for name in names])
            for v, names in self.columns.items()
        }
        return {v: hashlib.sha256(text.encode()).hexdigest() for v, text in texts.items()}


_ENTRIES = (
    *("client", "data", "folder", "views", "ids", "labels", "ranges"),
    *("agrees", "identity", "identities"),
)
_SEPARATORS = {".csv": ",", ".tsv": "\t"}


def load(path: str | Path) -> Holding:
    """Reads a node's file and its data.

    Args:
      path: The TOML file; other paths in it are relative to it.

    Raises:
      ValueError: Names the entry that is wrong, or what is wrong with the data.
      OSError: A file cannot be read.
    """
    path = Path(path)
    told = read_toml(path)
    for name in told:
        if name not in _ENTRIES:
            raise checks.wrong(f"{path}", name, f"one of {', '.join(_ENTRIES)}")
    for name in ("client", "data", "agrees"):
        if name not in told:
            raise ValueError(f"{path}: {name} is missing")
    client, policy = told["client"], Policy.from_toml(told["agrees"])
    if type(client) is not int or not 0 <= client < keys.CLIENT_IDS:
        raise checks.wrong("client", client, f"a whole number from 0 to {keys.CLIENT_IDS - 1}")
    names, file = _names_of(told), path.parent / str(told["data"])
    try:
        given, columns, ids, labels = _read(file, names)
    except FileNotFoundError as error:
        raise ValueError(f"data: {file} is not there") from error
    # A misspelt name would have rows compared by their places, or make a diagnosis a feature.
    for name, array in (("ids", ids), ("labels", labels)):
        if name in told and array is None:
            raise ValueError(f"{name}: {told[name]!r} is no array or column of {file}")
    ranges = _ranges_of(path.parent / str(told["ranges"])) if "ranges" in told else None
    if ranges is not None:
        given = {v: _in_ranges(x, columns.get(v, ()), ranges) for v, x in given.items()}
    check_arrays(list(given.values()), None, [str(v) for v in given])
    for v, x in given.items():
        check_precision(str(v), [x], columns.get(v))
    views = {v: x.astype(np.float32) for v, x in given.items()}
    rows = len(next(iter(views.values())))
    for name, array in (("ids", ids), ("labels", labels)):
        if array is not None and np.shape(array) != (rows,):
            raise ValueError(f"{name}: has shape {np.shape(array)}; allowed is ({rows},)")
    if ids is not None:
        _check_ids(ids, names.ids)
    if labels is not None and policy.share_counts:
        is_lost = np.isnan(labels) if labels.dtype.kind == "f" else labels.astype(str) == ""
        if is_lost.any():  # it would be a class of its own
            raise ValueError(
                f"labels: {int(is_lost.sum())} rows have none in {names.labels}; allowed with"
                " share_counts is one for each row"
            )
    folder = path.parent / str(told.get("folder", "state"))
    identity, identities = _identities_of(told, path.parent)
    if policy.secure and identity is None:
        raise ValueError(f"{path}: identity is missing, which secure sums need")
    return Holding(
        client, views, ids, labels, folder, policy, columns, ranges, identity, identities
    )


def _identities_of(told: Mapping[str, Any], folder: Path) -> tuple[Any, dict[int, Any]]:
    """Returns the node's private key, if it has one, and the public keys of others."""
    public = told.get("identities", {})
    if not isinstance(public, dict) or not all(i.isdecimal() for i in public):
        raise checks.wrong("identities", public, "a table of client numbers and public keys")
    identity = told.get("identity")
    private = None if identity is None else masks.read_identity(folder / str(identity))
    return private, {int(i): masks.read_public(line, int(i)) for i, line in public.items()}


class _Names(NamedTuple):
    """Names of the arrays or columns of a data file.

    Attributes:
      views: An array, or columns, of each view; None: those that the file has.
      ids: Of samples.
      labels: Of classes.
    """

    views: dict[int, str | tuple[str, ...]] | None
    ids: str
    labels: str


class _Data(NamedTuple):
    """What a data file holds: arrays [rows, D_v] of each view, and a table's columns of each."""

    views: dict[int, np.ndarray]
    columns: dict[int, list[str]]
    ids: Any
    labels: Any


def _names_of(told: Mapping[str, Any]) -> _Names:
    """Returns the names in a node's file."""
    views = told.get("views")
    if views is not None:
        if not isinstance(views, dict) or not views or not all(v.isdecimal() for v in views):
            raise checks.wrong("views", views, "a table of view ids (0, 1, ...) and names")
        for name in views.values():
            is_names = isinstance(name, list) and name and all(isinstance(x, str) for x in name)
            if not isinstance(name, str) and not is_names:
                raise checks.wrong("views", name, "a name, or a list of names")
        views = {
            int(v): name if isinstance(name, str) else tuple(name) for v, name in views.items()
        }
    others = [told.get(name, name) for name in ("ids", "labels")]
    for name, value in zip(("ids", "labels"), others, strict=True):
        if not isinstance(value, str):
            raise checks.wrong(name, value, "a name")
    return _Names(views, *others)


def _read(file: Path, names: _Names) -> _Data:
    suffix = file.suffix.lower()
    if suffix == ".npy":
        view, *others = names.views or {0: ""}
        if others:
            raise checks.wrong("views", sorted([view, *others]), "one view for a .npy file")
        return _Data({view: _matrix(_loaded(file), "view")}, {}, None, None)
    if suffix == ".npz":
        return _from_npz(file, names)
    if suffix in _SEPARATORS:
        return _from_table(file, names)
    raise checks.wrong("data", str(file), "a .npz, .npy, .csv or .tsv file")


def _loaded(file: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # whatever damage makes NumPy and zipfile stumble over
        raise ValueError(f"data: {file} cannot be read ({error})") from error


def _from_npz(file: Path, names: _Names) -> _Data:
    archive = _loaded(file)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError(f"data: {file} is no .npz file")
    with archive:
        there, views = archive.files, names.views
        if views is None:
            found = (n for n in there if n.startswith("view_") and n[5:].isdecimal())
            views = {int(n[5:]): n for n in sorted(found, key=lambda n: int(n[5:]))}
        wanted: list[Any] = [*views.values()]
        if not wanted or not set(wanted) <= set(there):
            raise ValueError(
                f"views: {file} has the arrays {', '.join(there)}; wanted are {wanted}"
            )
        wanted += [n for n in (names.ids, names.labels) if n in there]
        try:
            arrays: dict[Any, Any] = {name: archive[name] for name in wanted}
        except Exception as error:  # whatever damage makes NumPy and zipfile stumble over
            raise ValueError(f"data: {file} cannot be read ({error})") from error
    matrices = {v: _matrix(arrays[name], name) for v, name in views.items()}
    return _Data(matrices, {}, arrays.get(names.ids), arrays.get(names.labels))


def _from_table(file: Path, names: _Names) -> _Data:
    """A view of a table is a pattern of column names, or several; without any, all but the rest.

    Columns come in the order of the patterns, and those of one pattern in that of their names: in
    every node's file the same, whatever its own order.
    """
    table, rows = _cells_of(file, "data")
    others, views = {names.ids, names.labels}, names.views
    if views is None:
        views = {0: tuple(sorted(name for name in table if name not in others))}
    columns = {}
    for v, patterns in views.items():
        several = (patterns,) if isinstance(patterns, str) else patterns
        matched = {p: sorted(matching(list(table), p)) for p in several}
        if lost := [p for p, found in matched.items() if not found]:
            head = list(table)
            raise ValueError(f"views: {lost[0]!r} matches no column of {file}, which are {head}")
        columns[v] = list(dict.fromkeys(n for found in matched.values() for n in found))
        if set(columns[v]) & others:
            raise ValueError(f"views: {several} match the columns {columns[v]} of {file}")
        if not columns[v]:
            raise ValueError(f"views: {file} has no column but {', '.join(table)}")
    arrays = {
        v: np.stack([_numbers(file, n, table[n], rows) for n in found], axis=1)
        for v, found in columns.items()
    }
    ids, labels = (np.asarray(table[n]) if n in table else None for n in names[1:])
    return _Data(arrays, columns, ids, labels)


def _cells_of(
    file: Path, entry: str
) -> tuple[dict[str, tuple[str, ...]], list[tuple[int, list[str]]]]:
    """Returns a table's columns by their names, and its lines with their numbers.

    Raises:
      ValueError: It is no table; the message names the entry of the node's file.
    """
    separator = _SEPARATORS[file.suffix.lower()]
    try:
        # A byte order mark, as spreadsheets write it, is no part of the first name.
        with file.open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.reader(opened, delimiter=separator)
            numbered = [(reader.line_num, line) for line in reader if line]  # blank ones are none
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{entry}: {file} is no table in UTF-8 ({error})") from error
    if len(numbered) < 2:
        raise ValueError(f"{entry}: {file} has no row")
    (_, head), *rows = numbered
    head = [name.strip() for name in head]
    for number, line in rows:
        if len(line) != len(head):
            raise ValueError(
                f"{entry}: line {number} of {file} has {len(line)} cells, where its head has"
                f" {len(head)}; cells are separated by {'commas' if separator == ',' else 'tabs'}"
            )
    if twice := [name for name in head if head.count(name) > 1]:
        raise ValueError(f"{entry}: {file} has the column {twice[0]!r} twice")
    cells = ((cell.strip() for cell in line) for _, line in rows)
    return dict(zip(head, zip(*cells, strict=True), strict=True)), rows


def _ranges_of(file: Path) -> dict[str, tuple[float, float]]:
    """Reads the ranges of columns, which all nodes have alike.

    Raises:
      ValueError: Names what is wrong with the file.
    """
    if file.suffix.lower() not in _SEPARATORS:
        raise checks.wrong("ranges", str(file), "a .csv or .tsv file")
    try:
        table, rows = _cells_of(file, "ranges")
    except FileNotFoundError as error:
        raise ValueError(f"ranges: {file} is not there") from error
    wanted = ("column", "least", "most")
    if sorted(table) != sorted(wanted):
        raise ValueError(
            f"ranges: {file} has the columns {list(table)}; allowed are {list(wanted)}"
        )
    numbers = (_numbers(file, name, table[name], rows, "ranges") for name in wanted[1:])
    found: dict[str, tuple[float, float]] = {}
    for column, least, most in zip(table["column"], *numbers, strict=True):
        if column in found:
            raise ValueError(f"ranges: {file} has {column!r} twice")
        if not 0 < most - least < np.inf:
            raise ValueError(
                f"ranges: {column!r} is from {least:g} to {most:g} in {file}; allowed is a least"
                " below the most"
            )
        found[column] = float(least) + 0.0, float(most) + 0.0  # -0 is another text than 0
    return found


def _in_ranges(
    x: np.ndarray, names: Sequence[str], ranges: Mapping[str, tuple[float, float]]
) -> np.ndarray:
    """Returns columns, float64 [rows, D], with the least of each one's range at 0, the most at 1.

    Raises:
      ValueError: A column has no range, or the data are no table.
    """
    if not names:
        raise ValueError("ranges: are of a table's columns; allowed with arrays is none")
    if lost := [name for name in names if name not in ranges]:
        raise ValueError(f"ranges: {lost[0]!r} has none; there are those of {some(ranges)}")
    least, most = np.array([ranges[name] for name in names]).T
    return (x - least) / (most - least)


def _numbers(
    file: Path,
    column: str,
    cells: Sequence[str],
    rows: Sequence[tuple[int, Any]],
    entry: str = "views",
) -> np.ndarray:
    """Returns a column of a table as numbers; an error names the first cell that is none."""
    found = np.empty(len(cells))
    for i, (cell, (line, _)) in enumerate(zip(cells, rows, strict=True)):
        try:
            # Python reads 1_000 as 1000, and digits of other scripts; what was meant, nobody knows.
            found[i] = float(cell if cell.isascii() and "_" not in cell else "no number")
        except ValueError as error:
            raise ValueError(
                f"{entry}: {column} is {cell!r} in line {line} of {file}; allowed is a number, in"
                " every row"
            ) from error
    return found


def _check_ids(ids: np.ndarray, name: str) -> None:
    """Raises ValueError where an id is empty or there twice: clusters stand beside it."""
    known, counts = np.unique(ids, return_counts=True)
    if known.dtype.kind in "US" and not np.char.str_len(known).all():
        raise ValueError(f"ids: one is empty in {name}; allowed is one for each row")
    if (counts > 1).any():
        raise ValueError(f"ids: {str(known[counts > 1][0])!r} is there twice in {name}")


def _matrix(array: Any, name: Any) -> np.ndarray:
    array = np.asarray(array)
    if array.ndim != 2 or array.dtype.kind not in "biuf" or 0 in array.shape:
        raise ValueError(
            f"views: {name} is {array.dtype} of shape {array.shape}; allowed are numbers"
            " [rows, features]"
        )
    return array
