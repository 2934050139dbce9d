"""Fetches the benchmark tables of the vertical experiments from OpenML, once, into the data folder.

    python -m jaxfedmvc.data.openml nursery [--data_dir=FOLDER]

This is the one place of the library that uses the network.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfedmvc import files
from jaxfedmvc.data.dataset import Dataset, check_arrays, names_of
from jaxfedmvc.data.records import RECORDS, find_record

# A class of two samples, which the 12 958 published rows of nursery leave out.
_DROPPED_CLASS = {"nursery": "recommend"}


def fetch(name: str, data_dir: str | None = None) -> Path:
    """Fetches a set from OpenML and writes it where `load` finds it.

    The file has the features as `view_0`, float32 with categories coded 0.. in the order in which
    OpenML declares them, and `labels`, int32. It appears when it is complete, and replaces one that
    is there.

    Args:
      name: name of a set that is at OpenML, such as ``"nursery"``, in any case.
      data_dir: folder to write to, made if need be; by default ``$JAXFEDMVC_DATA``, or else
        ``./data``.

    Returns:
      The path of the file.

    Raises:
      ValueError: the name is unknown, or what OpenML sent is not the documented set.
      OSError: OpenML cannot be reached, or the file not be written.
    """
    record = find_record(name)
    if record is None or record.openml_id is None:
        known = [key for key, record in RECORDS.items() if record.openml_id is not None]
        raise ValueError(f"name must be one of {', '.join(known)}; got {name!r}")
    stem, origin = record.stems[0], f"{name}: OpenML's data set {record.openml_id}"
    try:
        table = _download(record.openml_id)
    except OSError as error:
        raise OSError(f"{origin} could not be fetched, is there a network? ({error})") from error
    x, target = np.asarray(table.data), np.asarray(table.target)
    if stem in _DROPPED_CLASS:
        kept = target != _DROPPED_CLASS[stem]
        x, target = x[kept], target[kept]
    classes, codes = np.unique(target, return_inverse=True)
    labels = codes.astype(np.int32)
    dataset = Dataset(stem, (x.astype(np.float32),), labels, classes=names_of(classes))
    try:
        check_arrays(dataset.views, labels)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None
    if text := record.misfit(dataset):
        raise ValueError(f"{origin} {text}")
    folder = Path(data_dir or os.environ.get("JAXFEDMVC_DATA") or "data").expanduser()
    return _write(folder / f"{stem}.npz", view_0=dataset.views[0], labels=labels)


def _download(number: int) -> Any:
    """The features [n, p] with coded categories and the target [n] of a set, as arrays."""
    from sklearn.datasets import fetch_openml  # deferred: slow to import

    # As arrays and by this parser: data frames, and the faster parser, would need pandas.
    return fetch_openml(data_id=number, as_frame=False, parser="liac-arff")


def _write(path: Path, **arrays: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path, "wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `fetch` as the command line says; the program ends with the text of an error."""
    parser = argparse.ArgumentParser(description="Fetches a benchmark table from OpenML.")
    parser.add_argument("name", help="name of the set")
    parser.add_argument("--data_dir", help="then $JAXFEDMVC_DATA, then ./data")
    options = parser.parse_args(arguments)
    try:
        print(fetch(options.name, options.data_dir))
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
