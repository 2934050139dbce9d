"""Multi-view data sets: scikit-learn's digits, generated ones, and files.

Nothing is downloaded. `load` finds a file, brings it to one layout (float32 views with the samples
in rows, labels 0..K-1), checks it and scales it.
"""

import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import loadmat
from scipy.sparse import csc_matrix, issparse

from jaxfedmvc import checks
from jaxfedmvc.data import tables
from jaxfedmvc.data.dataset import (
    Dataset,
    check_arrays,
    check_classes,
    check_precision,
    kind_of_labels,
    names_of,
    some,
)
from jaxfedmvc.data.records import RECORDS, Record, find_record
from jaxfedmvc.data.synthetic import multimodal, unequal
from jaxfedmvc.data.tables import TableOptions

_SUFFIXES = (".npz", ".mat")
_SCALES = ("auto", "none", "minmax", "standard")
_SCALED = {
    "none": "as they are",
    "bytes": "bytes, divided by 255",
    "minmax": "each scaled to [0, 1]",
    "standard": "each scaled to mean 0 and deviation 1",
}
_GENERATED = {"multimodal": "text", "multimodal_table1": "table1"}  # name: variant
_FORMATS = (
    ".npz with view_0.. and labels, .mat with X1.. or a cell array X, and labels Y, tables in .csv,"
    " .tsv or .parquet"
)

# What published .mat files call the cell array (or single matrix) of views, and files the labels.
_MAT_VIEWS = ("x", "data", "fea")
_NUMBERED_VIEW = r"(?:x|view|data)_?(\d+)"
_LABELS = ("labels", "label", "y", "gt", "truth", "truelabel", "gnd")


def names() -> tuple[str, ...]:
    """Returns the documented sets; ``"digits"`` and the ``"multimodal"`` ones need no file."""
    return ("digits", *_GENERATED, *RECORDS)


def load(
    name: str | os.PathLike[str],
    data_dir: str | os.PathLike[str] | None = None,
    scale: str = "auto",
    options: TableOptions = TableOptions(),  # noqa: B008 (frozen)
) -> Dataset:
    """Loads, checks and scales a multi-view data set.

    Args:
      name: ``"digits"``; ``"multimodal"`` or ``"multimodal_table1"``, the variants of
        `synthetic.multimodal` with seed 0; ``"unequal_7"``, `synthetic.unequal` with seed 7, or
        another number; the path of a ``.npz``, ``.mat``, ``.csv``, ``.tsv`` or ``.parquet`` file;
        the paths of several tables with commas between; the path of a folder
        with a ``.npz`` file or a table for each client; or the name of a ``.npz`` or ``.mat`` file
        in the data folder, in any case and without its suffix. Files of the sets in `names` must
        have the published shapes, however they are asked for.
      data_dir: the data folder to search first; then ``$JAXFEDMVC_DATA`` is, then ``./data``.
      scale: ``"minmax"`` maps each feature to [0, 1] and ``"standard"`` to zero mean and unit
        variance, both sending constant features to 0; ``"none"`` keeps the values. ``"auto"`` is
        the usual choice for a named set (bytes of Multi-Fashion / 255; as they are MNIST-USPS, the
        multimodal sets and those from OpenML) and ``"minmax"`` for everything else. Rows that do
        not hold a view count nowhere in its scaling.
      options: what the columns of tables are; of other files only which array the labels are.

    Returns:
      The data set: views [n, D_v] float32, labels [n] int32 or None.

    Raises:
      FileNotFoundError: the file of a named set, or the given path, does not exist.
      ValueError: the name or the scaling is unknown, or the file's content is unusable.
      ImportError: what reads files of this kind (pandas, pyarrow, h5py) is not installed.
    """
    if not isinstance(name, str | os.PathLike):
        raise checks.wrong("name", name, "a name of a data set, or a path")
    name = os.fspath(name)
    if scale not in _SCALES:
        raise ValueError(f"scale must be one of {', '.join(_SCALES)}; got {scale!r}")
    numbered = re.fullmatch(r"unequal_(\d+)", name.lower())
    is_made = numbered or name.lower() in ("digits", *_GENERATED)
    if is_made and options != TableOptions():
        raise ValueError(f"views, id, labels, categories, missing: are for files; {name} is none")
    if name.lower() == "digits":
        dataset, usual = digits_views(), "minmax"
    elif name.lower() in _GENERATED:
        dataset, usual = multimodal(0, _GENERATED[name.lower()]), "none"
    elif numbered:
        dataset, usual = unequal(int(numbered[1])), "minmax"
    elif paths := _own_tables(name):
        dataset, usual = tables.read(paths, options), "minmax"
    else:
        path = Path(name).expanduser()
        is_folder = path.is_dir() and find_record(name) is None
        if not is_folder:
            path = _find(name, data_dir)
        if options != TableOptions(labels=options.labels):
            raise ValueError(
                f"views, id, categories, missing: are for tables; {name} has views of its own"
            )
        if is_folder:
            dataset, record = _read_clients(path, options.labels), None
        else:
            dataset, record = _read(path, options.labels), find_record(path.stem)
        usual = "minmax" if record is None else record.scale
        if record is not None:
            _check_record(path, dataset, record)
    if scale == "auto":
        scale = usual
    held = dataset.held
    if scale in ("none", "bytes"):  # the others bring all numbers into range
        try:
            check_arrays(dataset.views)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if scale == "none":
        for v, view in enumerate(dataset.views):
            check_precision(str(v), [view if held is None else view[held[:, v]]])
    views = [
        scaled(view, scale, None if held is None else held[:, v])
        for v, view in enumerate(dataset.views)
    ]
    notes = (*dataset.notes, f"features: {_SCALED[scale]}")
    return dataset._replace(views=tuple(views), notes=notes)


def digits_views() -> Dataset:
    """Makes three unscaled views of scikit-learn's 1797 handwritten digits of 8x8 pixels.

    Returns:
      Views [1797, 64] pixels in 0..1, [1797, 40] log magnitudes of the 2-D Fourier transform and
      [1797, 72] gradient histograms of unit length; labels [1797].
    """
    from sklearn.datasets import load_digits  # deferred: slow to import

    digits = load_digits()
    images = digits.images / 16.0  # [n, 8, 8]
    n = len(images)
    # The spectrum of a real image is symmetric: rfft2 keeps the half that carries information.
    fourier = np.log1p(np.abs(np.fft.rfft2(images)))  # [n, 8, 5]
    views = (images.reshape(n, -1), fourier.reshape(n, -1), _gradient_histograms(images))
    labels = digits.target.astype(np.int32)
    return Dataset("digits", tuple(view.astype(np.float32) for view in views), labels)


def _gradient_histograms(images: np.ndarray) -> np.ndarray:
    """Orientation histograms [n, 72] of images [n, 8, 8]: 3x3 overlapping cells of 8 bins."""
    dy, dx = np.gradient(images, axis=(1, 2))
    # A gradient and its opposite describe the same edge, so orientations live in [0, pi). The
    # second modulus catches an angle that rounds up to pi itself.
    bins = np.floor(np.arctan2(dy, dx) % np.pi * 8 / np.pi).astype(int) % 8
    votes = np.hypot(dx, dy)[..., None] * np.eye(8)[bins]  # [n, 8, 8, bins]
    corners = [(row, column) for row in (0, 2, 4) for column in (0, 2, 4)]
    cells = [votes[:, r : r + 4, c : c + 4].sum(axis=(1, 2)) for r, c in corners]
    histograms = np.concatenate(cells, axis=1)
    norms = np.linalg.norm(histograms, axis=1, keepdims=True)
    return histograms / np.maximum(norms, np.finfo(float).tiny)


def scaled(view: np.ndarray, scale: str, held: np.ndarray | None = None) -> np.ndarray:
    """Scales every feature of a view by what its rows have; a constant one becomes zero.

    Args:
      view: [n, D]. Computed in float64, so that wide ranges lose nothing before the cast.
      scale: "none", "minmax" or "standard" as in `load`, or "bytes": divided by 255 where there are
        numbers above 1.
      held: bool [n], the rows that count, one at least; others are zeros. None: all.

    Returns:
      float32 [n, D].

    Raises:
      ValueError: An unknown scale, no row that counts, or a number in one that is not finite.
    """
    if scale not in _SCALED:
        raise checks.wrong("scale", scale, " or ".join(map(repr, _SCALED)))
    view = np.asarray(view)
    if held is not None:
        held = np.asarray(held, bool)
        if held.shape != view.shape[:1]:
            raise checks.wrong("held", held.shape, f"the shape {view.shape[:1]}, one per row")
        found = np.zeros(view.shape, np.float32)
        found[held] = scaled(view[held], scale)
        return found
    if view.size == 0:
        raise ValueError("view: has no number in the rows that count; allowed is one row or more")
    x = view.astype(np.float64)
    # A feature with a NaN has no range, and would count as constant.
    if not np.isfinite(x).all():
        raise ValueError("view: has numbers that are NaN or infinite; allowed are finite numbers")
    if scale == "bytes" and x.max() > 1:  # some copies come already divided
        x /= 255.0
    elif scale in ("minmax", "standard"):
        # Ranges and squares of numbers near the ends of float64 are none of its numbers, and the
        # feature would count as constant. To divide by a power of two changes no digit.
        size = np.abs(x).max(axis=0)
        is_extreme = (size > 1e100) | ((size > 0) & (size < 1e-100))
        if is_extreme.any():
            x = np.where(is_extreme, np.ldexp(x, -np.frexp(size)[1]), x)
        low, span = x.min(axis=0), np.ptp(x, axis=0)
        # Constant features are told by their range: their computed deviation may miss zero.
        shift, width = (low, span) if scale == "minmax" else (x.mean(axis=0), x.std(axis=0))
        varies = (span > 0) & (width > 0)  # a deviation of tiny numbers may be zero, too
        x = np.where(varies, (x - shift) / np.where(varies, width, 1.0), 0.0)
    return x.astype(np.float32)


def _check_record(path: Path, dataset: Dataset, record: Record) -> None:
    if text := record.misfit(dataset):
        raise ValueError(
            f"{path}: a file of this name {text} (rename it to load it as another set)"
        )


def _own_tables(name: str) -> list[Path]:
    """Returns the tables that a name means, or a folder of them; nothing where it means none."""
    whole = Path(name).expanduser()
    if whole.is_dir():
        is_own = find_record(name) is None
        has_tables = any(p.suffix.lower() in tables.SUFFIXES for p in whole.iterdir())
        return [whole] if is_own and has_tables else []
    # The name of a file may have commas.
    parts = [whole] if whole.is_file() else [Path(p.strip()).expanduser() for p in name.split(",")]
    others = [path for path in parts if path.suffix.lower() not in tables.SUFFIXES]
    if others and len(others) < len(parts):
        raise checks.wrong(
            "dataset", str(others[0]), f"a table among several: {', '.join(tables.SUFFIXES)}"
        )
    return [] if others else parts


def _find(name: str, data_dir: str | os.PathLike[str] | None) -> Path:
    """Resolves a name to the path of an existing file."""
    path = Path(name).expanduser()
    is_supported = path.suffix.lower() in _SUFFIXES
    if path.is_file():
        if not is_supported:
            raise ValueError(f"{path}: unknown format; accepted: {_FORMATS}")
        return path
    if is_supported:
        raise FileNotFoundError(f"{path}: no such file; accepted formats: {_FORMATS}")

    record = find_record(name)
    stems = (name,) if record is None else record.stems
    choices = (data_dir, os.environ.get("JAXFEDMVC_DATA"), "data")
    folders = [Path(choice).expanduser() for choice in choices if choice]
    for folder in folders:
        if found := _file_in(folder, stems):
            return found
    looked = ", ".join(str(folder.absolute()) for folder in folders)
    if record is None:
        raise ValueError(
            f"unknown data set {name!r}: {checks.meant(name.lower(), names())}known names are "
            f"{', '.join(names())}; a path to a .npz, "
            f".mat, .csv, .tsv or .parquet file, or the name of one of the first two in the data "
            f"folder, also works (looked in {looked})"
        )
    wanted = " or ".join(f"{stem}.npz/.mat" for stem in stems)
    raise FileNotFoundError(
        f"{name}: no {wanted} in {looked}; get {record.source}, and put it there or name its "
        f"folder in $JAXFEDMVC_DATA; accepted formats: {_FORMATS}"
    )


def _file_in(folder: Path, stems: Iterable[str]) -> Path | None:
    """The first file of `folder` named by a stem, earlier stems and ``.npz`` preferred."""
    if not folder.is_dir():
        return None
    # Reversed, so that of two names that differ in case only the alphabetically first one stays.
    files = {path.name.lower(): path for path in sorted(folder.iterdir(), reverse=True)}
    wanted = (stem.lower() + suffix for stem in stems for suffix in _SUFFIXES)
    return next((files[name] for name in wanted if name in files), None)


def _read(path: Path, labels_key: str | None = None) -> Dataset:
    """Reads a file into views [n, D_v] of any real dtype and labels [n] int32; checks them."""
    is_npz = path.suffix.lower() == ".npz"
    content = _content(path)
    try:
        views = _numbered(content, r"view_(\d+)" if is_npz else _NUMBERED_VIEW)
        if not views and not is_npz:
            views = _cells(content)
        if not views:
            raise ValueError(f"no views among {sorted(content)}; accepted: {_FORMATS}")
        key = _labels_key(content, labels_key)
        labels, classes = (None, None) if key is None else _labels(content[key])
        if not is_npz:
            views = _samples_in_rows(views, None if labels is None else len(labels))
        check_arrays(views, labels, unscaled=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    notes = [f"view {v}: {view.shape[1]} features" for v, view in enumerate(views)]
    if classes is not None:
        notes.append(f"labels: array {key}, {len(classes)} classes: {some(classes)}")
    others = [name for name in content if name != key and not re.fullmatch(r"view_\d+", name)]
    if is_npz and others:
        notes.append(f"arrays that are not read: {some(others)}")
    return Dataset(path.stem, tuple(views), labels, notes=tuple(notes), classes=classes)


def _read_clients(folder: Path, labels_key: str | None) -> Dataset:
    """Stacks the clients of a folder, a .npz file each with the views that it holds."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".npz")
    if not files:
        raise ValueError(f"{folder}: has no .npz, .csv, .tsv or .parquet file")
    dims: dict[int, int] = {}
    clients = [_client_views(file, dims) for file in files]
    if sorted(dims) != list(range(len(dims))):
        raise ValueError(f"{folder}: views must be numbered without gaps; got {sorted(dims)}")
    rows = [len(next(iter(views.values()))) for views, _ in clients]
    stacked = []
    for v, width in sorted(dims.items()):
        nothing = [np.zeros((n, width)) for n in rows]
        parts = [views.get(v, x) for (views, _), x in zip(clients, nothing, strict=True)]
        stacked.append(np.concatenate(parts))
    held = np.repeat([[v in views for v in range(len(dims))] for views, _ in clients], rows, axis=0)
    notes = [
        f"files, a client each: {', '.join(f'{c} {file.name}' for c, file in enumerate(files))}"
    ]
    notes += [f"view {v}: {dims[v]} features" for v in sorted(dims)]
    named = [_labels_key(content, labels_key) for _, content in clients]
    keys = [key for key in named if key is not None]
    labels = classes = None
    if keys:
        if len(keys) < len(files):
            raise ValueError(f"{files[named.index(None)]}: has no labels, which other clients have")
        raw = [_dense(content[k]).ravel() for (_, content), k in zip(clients, keys, strict=True)]
        for file, mine in zip(files, raw, strict=True):
            if (kind := kind_of_labels(mine)) != (allowed := kind_of_labels(raw[0])):
                raise ValueError(
                    f"{file}: has labels that are {kind}; allowed are {allowed}, as in"
                    f" {files[0].name}"
                )
        labels, classes = _labels(np.concatenate(raw))
        notes.append(f"labels: array {keys[0]}, {len(classes)} classes: {some(classes)}")
    try:
        check_arrays(stacked, labels, unscaled=True)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return Dataset(
        folder.name,
        tuple(stacked),
        labels,
        held=None if held.all() else held,
        clients=np.repeat(np.arange(len(files)), rows),
        notes=tuple(notes),
        classes=classes,
    )


def _client_views(file: Path, dims: dict[int, int]) -> tuple[dict[int, np.ndarray], dict[str, Any]]:
    """Returns the views of a client and all of its arrays; notes the widths of views in `dims`."""
    content, found = _content(file), {}
    for key, value in content.items():
        if match := re.fullmatch(r"view_(\d+)", key):
            found[int(match[1])] = np.asarray(value)
    try:
        check_arrays(list(found.values()), None, [str(v) for v in found], unscaled=True)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    for v, view in found.items():
        if dims.setdefault(v, view.shape[1]) != view.shape[1]:
            raise ValueError(
                f"{file}: view {v} has {view.shape[1]} features; other clients have {dims[v]}"
            )
    return found, content


def _content(path: Path) -> dict[str, Any]:
    """Returns the arrays of a file by lower-case name."""
    try:
        return _npz_content(path) if path.suffix.lower() == ".npz" else _mat_content(path)
    except ImportError:
        raise
    except Exception as error:  # the decoders raise a zoo of types on a damaged file
        raise ValueError(f"{path}: not a readable {path.suffix} file ({error})") from error


def _npz_content(path: Path) -> dict[str, Any]:
    if not zipfile.is_zipfile(path):  # NumPy would advise to unpickle it
        raise ValueError("it is no whole archive as numpy.savez writes it")
    with np.load(path, allow_pickle=False) as file:
        return _by_name((key, file[key]) for key in file.files)


def _mat_content(path: Path) -> dict[str, Any]:
    """The variables of a .mat file by lower-case name; cell arrays as object arrays."""
    with path.open("rb") as file:
        head = file.read(520)
    # Version 7.3 is HDF5, whose signature MATLAB writes behind a block of 512 bytes of its own.
    if b"\x89HDF\r\n\x1a\n" in (head[:8], head[512:]):
        content = _hdf5_content(path)
    else:
        content = loadmat(path)
    return _by_name((key, x) for key, x in content.items() if not key.startswith(("_", "#")))


def _by_name(arrays: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns arrays by lower-case name; of views and labels, no two may have the same one."""
    found: dict[str, Any] = {}
    for key, value in arrays:
        name = key.lower()
        is_read = name in (*_MAT_VIEWS, *_LABELS) or re.fullmatch(_NUMBERED_VIEW, name)
        if name in found and is_read:
            raise ValueError(f"two arrays are named {name} but for capitals; allowed is one")
        found[name] = value
    return found


def _hdf5_content(path: Path) -> dict[str, Any]:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            f"{path}: MATLAB files of version 7.3 need h5py: pip install h5py"
        ) from error

    def value(item: Any) -> Any:
        if isinstance(item, h5py.Group):
            if "MATLAB_sparse" not in item.attrs:
                return None  # a struct
            shape = (int(item.attrs["MATLAB_sparse"]), len(item["jc"]) - 1)
            return csc_matrix((item["data"][()], item["ir"][()], item["jc"][()]), shape)
        if item.attrs.get("MATLAB_class") == b"char":  # codes of letters, a word in each row
            codes = np.asarray(item[()]).T
            if item.attrs.get("MATLAB_empty") or not codes.size:
                return np.asarray("")
            return np.asarray(["".join(map(chr, row)) for row in np.atleast_2d(codes)])
        if h5py.check_ref_dtype(item.dtype) is None:
            return np.asarray(item[()]).T  # MATLAB stores by columns, which HDF5 reads as rows
        references = item[()].T
        cells = np.empty(references.shape, object)
        for index in np.ndindex(references.shape):
            cells[index] = value(file[references[index]])
        return cells

    with h5py.File(path, "r") as file:
        return {key: value(item) for key, item in file.items() if not key.startswith("#")}


def _dense(value: Any) -> np.ndarray:
    return np.asarray(value.toarray() if issparse(value) else value)


def _numbered(content: Mapping[str, Any], pattern: str) -> list[np.ndarray]:
    """The arrays whose whole name matches `pattern`, in the order of their numbers."""
    keys: dict[int, str] = {}
    for key in content:
        if match := re.fullmatch(pattern, key):
            other = keys.setdefault(int(match[1]), key)
            if other != key:
                raise ValueError(f"{other} and {key} are the same view; allowed is one of them")
    views = {number: _dense(content[key]) for number, key in keys.items()}
    numbers = sorted(views)
    if numbers and (numbers[0] > 1 or numbers[-1] - numbers[0] + 1 != len(numbers)):
        raise ValueError(f"views must be numbered without gaps; got {numbers}")
    return [views[number] for number in numbers]


def _cells(content: Mapping[str, Any]) -> list[np.ndarray]:
    """The views of a cell array, or the one view of a plain matrix."""
    key = next((key for key in _MAT_VIEWS if key in content), None)
    if key is None:
        return []
    value = content[key]
    is_cell = isinstance(value, np.ndarray) and value.dtype == object
    return [_dense(cell) for cell in value.ravel()] if is_cell else [_dense(value)]


def _labels_key(content: Mapping[str, Any], asked: str | None) -> str | None:
    """Returns under which name the labels are, None where there are none."""
    if asked is not None and asked.lower() not in content:
        raise checks.wrong("labels", asked, f"an array: {', '.join(sorted(content))}")
    keys = _LABELS if asked is None else (asked.lower(),)
    return next((key for key in keys if key in content), None)


def _labels(array: Any) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns labels [n] int32 in 0..K-1, of numbers or words, and what each class is called."""
    labels = _words(_dense(array))
    # truelabel{v}: the same labels for every view.
    while labels.dtype == object and labels.size and not isinstance(labels.flat[0], str):
        labels = _dense(labels.flat[0])
    if labels.dtype == object:
        labels = labels.astype(str)
    if labels.dtype.kind == "U":  # a matrix of characters has words of one length
        labels = np.char.strip(labels)
        if (labels == "").any():
            raise ValueError(f"labels: sample {int((labels.ravel() == '').argmax())} has no word")
    if labels.dtype.kind not in "biufU" or max(labels.shape, default=0) != labels.size:
        got = f"{labels.dtype} of shape {labels.shape}"
        raise ValueError(f"labels must be a vector of numbers or words; got {got}")
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise ValueError("labels hold NaN or infinite values")
    classes, codes = np.unique(labels.ravel(), return_inverse=True)
    check_classes(len(classes), len(codes), "the array")
    return codes.astype(np.int32), names_of(classes)


def _words(labels: np.ndarray) -> np.ndarray:
    """Returns MATLAB's cells of words as an array of words; other arrays as they are."""
    if labels.dtype != object or not labels.size:
        return labels
    cells = [np.asarray(cell) for cell in labels.flat]
    if any(cell.dtype.kind != "U" or cell.size > 1 for cell in cells):
        return labels
    return np.asarray(["".join(cell.flat) for cell in cells]).reshape(labels.shape)


def _samples_in_rows(views: Sequence[np.ndarray], n: int | None) -> list[np.ndarray]:
    """Views [n, D_v] from matrices, or stacks of images, with the samples in rows or columns.

    Without labels (`n` None) the number of samples is the one size that all views share.
    """
    shapes = [view.shape for view in views]
    if any(len(shape) < 2 for shape in shapes):
        raise ValueError(f"every view must have at least two dimensions; got shapes {shapes}")
    if any(view.dtype.names for view in views):
        raise ValueError("a view is a struct; allowed are arrays of numbers")
    ends = [{shape[0], shape[-1]} for shape in shapes]
    if n is None:
        shared = set.intersection(*ends)
        if len(shared) != 1:
            raise ValueError(f"without labels, views must share exactly one size; got {shapes}")
        (n,) = shared
    elif not all(n in pair for pair in ends):
        raise ValueError(f"every view must have a side of {n}, one per label; got {shapes}")
    # A view as wide as it is long follows the others, as a file keeps to one orientation.
    sides = {shape[0] == n for shape in shapes if (shape[0] == n) != (shape[-1] == n)}
    if any(shape[0] == shape[-1] for shape in shapes) and len(sides) != 1:
        raise ValueError(f"cannot tell rows from columns in views of shapes {shapes}")
    side = next(iter(sides), True)
    in_rows = [shape[0] == n if shape[0] != shape[-1] else side for shape in shapes]
    return [
        (view if rows else np.moveaxis(view, -1, 0)).reshape(n, -1)
        for view, rows in zip(views, in_rows, strict=True)
    ]
