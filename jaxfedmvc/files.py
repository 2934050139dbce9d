"""Writes files whole or not at all: whenever the process dies, a path is old or new."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def partial_path(path: str | os.PathLike[str]) -> Path:
    """Returns the temporary name beside `path` that is renamed once it is complete."""
    path = Path(path)
    return path.with_name(f".{path.name}.partial")


@contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a temporary file that takes the place of `path` when the block ends without an error.

    Args:
      path: Of the file; it is replaced if it exists.
      mode: "w" for text in UTF-8, or "wb".
    """
    partial = partial_path(path)
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    with partial.open(mode, **text) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes text to `path`, all or nothing."""
    with replacing(path) as file:
        file.write(text)
