"""Result folders: made once, never half-written, and opened again where a job goes on."""

from __future__ import annotations

import csv
import errno
import functools
import io
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any, ParamSpec, Protocol

import jax
import pandas as pd
from absl import flags

import jaxfedmvc
from experiments.lib.command import FREE_FLAGS, FolderSettings
from jaxfedmvc.files import locked, write_text

_P = ParamSpec("_P")
_ROOT = Path(__file__).parents[2]
# Holds the fingerprints of a job's data.
_DATA = "data.json"
# Files that say that a folder is another job's, whatever else is missing: rows of other flags must
# not be taken up.
_RESULTS = ("flags.txt", "summary.json", "rounds.csv", "runs.csv", "batches.csv")
# Files of a job from whose results it cannot go on.
_NO_PROGRESS = {".lock", "flags.txt", "rounds.csv", _DATA}
# What a full disk says, a quota that is used up, and a limit on the size of files.
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
# Folders of this process' jobs, and the files that keep others out while they are open.
_held: dict[Path, IO[str]] = {}


class Parsed(Protocol):
    """A parsed command line, of a job (`Command`) or of a study (`Study`)."""

    @property
    def folder(self) -> FolderSettings:
        """Settings of the result folder."""

    @property
    def flags(self) -> flags.FlagValues:
        """All parsed flags."""

    def flag_lines(self) -> list[str]:
        """Returns the flags as a --flagfile takes them."""


def versions() -> dict[str, str]:
    """Returns the versions of packages that affect results."""
    packages = ("jax", "flax", "optax", "scikit-learn")
    ours = {"python": platform.python_version(), "jaxfedmvc": jaxfedmvc.__version__}
    return ours | {p: metadata.version(p) for p in packages}


def device() -> str:
    """Names the device that JAX computes on."""
    return f"{jax.devices()[0].device_kind} ({jax.default_backend()})"


@functools.cache
def commit() -> str:
    """Names the commit of the source tree, with a + where it was changed; empty outside of one.

    As it is when first asked for: a commit that is made during a job is not what made its rows.
    """
    try:
        run = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=10", "--dirty=+"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def made_by(arguments: Sequence[str]) -> dict[str, str]:
    """Returns what a row says of how it was made.

    Args:
      arguments: The command line that makes it; where sets lie and the source tree's own place are
        left out, and what a shell would take apart is quoted.
    """
    command = shlex.join(a for a in arguments if not a.startswith("--data_dir="))
    return {
        "command": command.replace(f"{_ROOT}/", ""),
        "commit": commit(),
        "device": device(),
        "jax": jax.__version__,
    }


# What runs of one cell of a table may differ in.
_FLAG_OF_A_RUN = r"--(?:seeds?|sets|runs_file|output_dir|peers_file)="
_OF_A_RUN = re.compile(rf"(?:'{_FLAG_OF_A_RUN}[^']*'|{_FLAG_OF_A_RUN}\S+) ?")


def settings_of_row(command: str) -> str:
    """Returns the command of a row without its seeds and files: rows of a cell have one of them."""
    return _OF_A_RUN.sub("", command).strip()


def check_settings(
    recorded: pd.DataFrame,
    asked: Iterable[str],
    flags_of: Callable[[Sequence[str]], Iterable[str]],
    what: str,
) -> None:
    """Checks that rows of an earlier job were made with the settings that are asked for now.

    Args:
      recorded: The rows, with their commands.
      asked: The flags of what would be run, seeds aside.
      flags_of: Reads the flags of a row's command in the same way: whole sets of flags are
        compared, since rows may be older than flags whose defaults change nothing.
      what: How the message begins: the file, and what it holds.

    Raises:
      ValueError: Some were made with others.
    """
    wanted = set(asked)
    for text in recorded["command"].fillna("").map(settings_of_row).unique():
        differ = sorted(wanted ^ set(flags_of(shlex.split(text))))
        differ = [line for line in differ if not line.startswith(("--seed=", "--seeds="))]
        if differ:
            raise ValueError(
                f"{what} with other settings: {', '.join(differ)} differ; allowed is another file"
            )


def use_compilation_cache(command: Parsed) -> None:
    """Keeps compiled programs where the flag says, or else where JAX was told to.

    JAX leaves out what compiled in less than a second, which is half of a job's programs, and two
    seconds of its next start: all but the smallest are kept, unless JAX was told otherwise.
    """
    asked = command.folder.compilation_cache
    if asked is None and jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        asked = "~/.cache/jaxfedmvc"
    if asked:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(asked))
    if jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:  # type: ignore[attr-defined]
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.01)


def open_folder(command: Parsed, name: str, data: Mapping[str, str] = {}) -> Path:
    """Makes the result folder with flags.txt in it, or opens that of a job that goes on.

    Args:
      command: The job or the study; its flags are what flags.txt starts it again with.
      name: For a folder of its own under results/, where --output_dir is not given.
      data: The fingerprint of each data set that is read, by what the flags call it; kept in
        data.json, so that a job goes on with the data that it was begun with.

    Raises:
      OSError, ValueError: The folder cannot be written, holds results already, or another process
        writes into it; or --resume is given and the job knows nothing of it, or its data have
        changed.
    """
    if command.folder.resume:
        return _reopened(command, data)
    asked = command.folder.output_dir
    folder = unused(name) if asked is None else Path(asked)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"output_dir: cannot write to {str(folder)!r} ({error.strerror}); give a folder"
            " that can be written"
        ) from error
    if any((folder / name).exists() for name in _RESULTS):
        goes_on = (folder / "flags.txt").exists() and not (folder / "summary.json").exists()
        ends = ", or --resume to go on with what it holds" if goes_on else ""
        raise ValueError(f"output_dir: {str(folder)!r} holds results already; give another{ends}")
    _hold(folder)
    if data:  # before the flags, without which there is no job to go on with
        write_text(folder / _DATA, json.dumps(data, indent=1) + "\n")
    write_text(folder / "flags.txt", "\n".join(command.flag_lines()) + "\n")
    return folder


def _hold(folder: Path) -> None:
    """Keeps other processes out for as long as this one lives.

    Raises:
      ValueError: Another process is in.
    """
    place = folder.resolve()
    if place not in _held:
        try:
            _held[place] = locked(place)
        except ValueError as error:
            raise ValueError(
                f"output_dir: another process writes into {str(folder)!r}; let it end, or give"
                " another folder"
            ) from error


class OtherColumnsError(ValueError):
    """A .csv that is to grow has other columns than the rows, or is no .csv."""


def stoppable(main: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates a program with --resume: one line where Ctrl-C, a full disk or a table ends it."""

    @functools.wraps(main)
    def program(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            main(*args, **kwargs)
        except KeyboardInterrupt:
            sys.exit(stopped())
        except OtherColumnsError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            sys.exit(f"error: output_dir: no room to write ({error.strerror}); {stopped()}")

    return program


def stopped() -> str:
    """Returns what a job says that its user stops: whether there is something to go on with."""
    if not _held:
        return "stopped before the job was begun"
    place = list(_held)[-1]
    go_on = f"--resume with the same flags and --output_dir={shlex.quote(str(place))}"
    names = {file.name for file in place.iterdir() if not file.name.endswith(".partial")}
    if names <= _NO_PROGRESS:
        return f"stopped before anything was saved in its folder; {go_on} begins anew"
    return f"stopped; {go_on} goes on from there"


def unused(name: str) -> Path:
    """Returns a folder that does not exist yet, results/NAME-TIME."""
    first = Path(f"results/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    tries = itertools.chain([first], (first.with_name(f"{first.name}-{i}") for i in range(2, 1000)))
    return next(folder for folder in tries if not folder.exists())


def _reopened(command: Parsed, data: Mapping[str, str]) -> Path:
    if command.folder.output_dir is None:
        raise ValueError("resume: needs --output_dir, the folder of the job that is to go on")
    folder = Path(command.folder.output_dir)
    if not (folder / "flags.txt").is_file():
        raise ValueError(
            f"resume: {str(folder)!r} holds no job (no flags.txt); leave --resume out to begin one"
        )
    text = (folder / "flags.txt").read_text(encoding="utf-8", errors="replace")
    then = by_name(text.splitlines())
    now = by_name(command.flag_lines())

    def is_new(name: str) -> bool:
        """Not in the file, and not given now: as if it had been there."""
        flag = command.flags[name] if name in command.flags else None
        return flag is not None and flag.value == flag.default and name not in then

    different = [
        f"{name} ({then.get(name, 'none')} then, {now.get(name, 'none')} now)"
        for name in sorted((then.keys() | now.keys()) - FREE_FLAGS)
        if then.get(name) != now.get(name) and not is_new(name)
    ]
    if different:
        raise ValueError(
            f"resume: {str(folder)!r} was begun with other flags: {', '.join(different)}; allowed"
            " are the same, as by --flagfile with its flags.txt"
        )
    _check_data(folder, data)
    _hold(folder)
    return folder


def _check_data(folder: Path, data: Mapping[str, str]) -> None:
    """Checks that a job goes on with its data; earlier versions kept no fingerprints of them.

    Raises:
      ValueError: Names the sets that have changed, or the file is damaged.
    """
    if not (folder / _DATA).exists():
        return
    try:
        then = dict(json.loads((folder / _DATA).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"resume: {str(folder / _DATA)!r} does not hold the fingerprints of the job's data;"
            " allowed is the file that the job wrote, or a new folder"
        ) from error
    changed = sorted(name for name in data if data[name] != then.get(name))
    if changed:
        raise ValueError(
            f"resume: {str(folder)!r} was begun with other data: {', '.join(changed)} changed"
            " since; allowed are the same, or a new folder"
        )


def by_name(lines: Iterable[str]) -> dict[str, str]:
    """Returns flags' values as text by name; a line is --rounds=5, --progress or --noprogress."""
    values = {}
    for line in lines:
        name, equals, value = line.removeprefix("--").partition("=")
        if equals:
            values[name] = value
        elif name.startswith("no"):
            values[name.removeprefix("no")] = "false"
        else:
            values[name] = "true"
    return values


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends rows to a .csv under its header; the first ones bring it.

    A last line that a killed process did not write to its end goes first.

    Raises:
      OtherColumnsError: The file has others.
    """
    if path.exists():
        with path.open("r+b") as whole:
            whole.truncate(whole.read().rfind(b"\n") + 1)
    fresh = not path.exists() or not path.stat().st_size
    with path.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        columns = list(rows[0]) if fresh else next(csv.reader(file))
        for row in rows:
            _check_same(path, columns, list(row))
        table = csv.DictWriter(file, columns)
        if fresh:
            table.writeheader()
        table.writerows(rows)


def check_columns(path: Path, columns: Sequence[str]) -> None:
    """Checks before rows of these columns are made that they can be appended to a .csv.

    Raises:
      OtherColumnsError: The file has others.
    """
    found = list(read_appended(path, columns))
    _check_same(path, found, columns)


def _check_same(path: Path, found: Sequence[str], wanted: Sequence[str]) -> None:
    if set(found) == set(wanted):
        return
    lacks = ", ".join(name for name in wanted if name not in found)
    beside = ", ".join(name for name in found if name not in wanted)
    told = "; ".join([f"lacks {lacks}"] * bool(lacks) + [f"has {beside}"] * bool(beside))
    raise OtherColumnsError(
        f"{path} holds something else than this version writes: {told}; give another file or folder"
    )


def read_appended(path: Path, columns: Sequence[str], **options: Any) -> pd.DataFrame:
    """Reads a .csv that `append_rows` wrote, without a row that was not written to its end.

    Args:
      path: Of the file; no rows if it is absent.
      columns: Of the rows, where there are none.
      options: As `pandas.read_csv` takes them.

    Raises:
      OtherColumnsError: The file is no .csv.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if not whole:
            return pd.DataFrame(columns=list(columns))
        return pd.read_csv(io.StringIO(whole), **options)
    except (UnicodeDecodeError, pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        raise OtherColumnsError(
            f"{path} is no .csv ({str(error).splitlines()[0]}); give another file or folder"
        ) from error


def keep_rows(path: Path, chosen: Callable[[pd.DataFrame], pd.Series]) -> None:
    """Cuts a .csv back to chosen rows; a last line that was not written to its end goes, too.

    A file of which nothing goes stays as it is.

    Raises:
      OtherColumnsError: The file has no column of seeds.
    """
    if not path.exists():
        return
    # As text: an id may be "NA" or "007".
    table = read_appended(path, [], dtype=str, keep_default_na=False)
    if table.columns.empty:  # not even its header was written to the end
        path.unlink()
        return
    _check_same(path, [name for name in table if name == "seed"], ["seed"])
    if not table["seed"].str.fullmatch(r"-?\d+").all():
        raise OtherColumnsError(f"{path} has seeds that are no numbers; give another folder")
    kept = chosen(table.astype({"seed": int}))
    if not kept.all() or not path.read_bytes().endswith(b"\n"):
        write_text(path, table[kept].to_csv(index=False))
