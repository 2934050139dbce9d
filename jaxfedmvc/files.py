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
def replacing(
    path: str | os.PathLike[str], mode: str = "w", *, private: bool = False
) -> Iterator[IO[Any]]:
    """Opens a temporary file that takes the place of `path` when the block ends without an error.

    Args:
      path: Of the file; it is replaced if it exists.
      mode: "w" for text in UTF-8, or "wb".
      private: Whether nobody but the owner may read it, from the moment that it is there.
    """
    partial = partial_path(path)
    if private:
        partial.unlink(missing_ok=True)  # whoever has it open would read what is written
    text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        with open(partial, mode, opener=_private if private else None, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:  # what a full disk raises does not say which
            error.filename = os.fspath(path)
        raise
    os.replace(partial, path)
    _sync_folder(Path(path).parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)


def _sync_folder(folder: Path) -> None:
    """Has the new name outlive a loss of power, where folders can be opened."""
    if os.name == "posix":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def locked(folder: Path) -> IO[str]:
    """Takes a folder for this process, and makes it; who holds the file that is returned has it.

    Where the system, or the file system, has no such locks nothing is taken.

    Raises:
      ValueError: Another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("w", encoding="utf-8")
    if os.name == "posix":
        import fcntl

        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise ValueError(f"folder: {folder} is in use by another process") from error
        except OSError:
            pass  # such as a network's file system without locks
    return file


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes text to `path`, all or nothing."""
    with replacing(path) as file:
        file.write(text)


def check_private(path: Path, name: str) -> None:
    """Checks that nobody but its owner may open a file, as ssh does of its keys.

    On Windows nothing is checked, whose modes say nothing of other users.

    Args:
      path: Of the file.
      name: What the error calls it.

    Raises:
      ValueError: The group or others may.
      OSError: It is not there.
    """
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ValueError(
            f"{name}: other users of this machine may open {path}; allowed is its owner alone:"
            f" chmod 600 {path}"
        )
