"""What every binary needs: flags, launching, and a result folder that is never half-written."""

from __future__ import annotations

import csv
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

from experiments import progress as progress_lib

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(progress_lib)

flags.DEFINE_string(
    "dataset",
    None,
    "A named set (digits, mnist_usps, multimodal, ...) or a path to a .npz or .mat; each binary has"
    " its own default.",
)
flags.DEFINE_string("data_dir", None, "Where sets lie; then $JAXFEDMVC_DATA, then ./data.")
flags.DEFINE_enum("scale", "auto", ["auto", "none", "minmax", "standard"], "Scaling of features.")
flags.DEFINE_integer(
    "n_clusters", None, "K; the number of classes where labels are known.", lower_bound=1
)
flags.DEFINE_integer("seed", 0, "First seed.", lower_bound=0, upper_bound=2**31 - 1)
flags.DEFINE_integer("seeds", 1, "Number of seeds: of the partition and of the run.", lower_bound=1)
flags.register_multi_flags_validator(
    ["seed", "seeds"],
    lambda values: values["seed"] + values["seeds"] <= 2**31,
    "seed, seeds: the last seed must be below 2^31",
)
flags.DEFINE_string("output_dir", None, "Result folder; None: results/<algorithm>-<set>-<time>/.")
flags.DEFINE_string(
    "compilation_cache", "~/.cache/jaxfedmvc", "Where compiled programs are kept; empty: nowhere."
)
flags.DEFINE_bool(
    "resume",
    False,
    "Go on with a job that was killed, in its --output_dir and with the same flags (fmcsc, fedhk,"
    " sweep).",
)
flags.DEFINE_integer(
    "checkpoint_every", 1, "Rounds after which a job that can be resumed is saved; 0: never.", 0
)
# Flags that change no result: a job may go on with others.
_FREE = {
    "checkpoint_every",
    "compilation_cache",
    "coordinator",
    "data_dir",
    "output_dir",
    "process_id",
    "progress",
    "resume",
}
# Flags that flags.txt, which starts the same job elsewhere, leaves out.
_NOT_WRITTEN = {"output_dir", "flagfile", "resume"}


def launch(main: Callable[[], None]) -> None:
    """Runs a binary: bad input is one line on stderr and exit code 2, never a traceback."""

    def parse(argv: list[str]) -> list[str]:
        try:
            rest = FLAGS(argv)
            if len(rest) > 1:
                raise flags.Error(f"unexpected arguments {rest[1:]}; everything is a flag")
        except (flags.Error, OSError, ValueError) as error:  # ValueError: a flagfile of no text
            fail(error)
        return rest

    def quiet_main(_: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # jax tells of every backend that is not there
        main()

    app.run(quiet_main, flags_parser=parse)


def given(argv: Sequence[str], flag: str, default: str) -> str:
    """A flag's value before flags are parsed, for what decides which flags there are.

    Raises:
      ValueError: A flagfile that cannot be read.
    """
    try:
        arguments = FLAGS.read_flags_from_files(list(argv))
    except flags.Error as error:
        raise ValueError(str(error)) from error
    value = default
    for i, argument in enumerate(arguments):
        name, equals, text = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == flag:
            value = text if equals else "".join(arguments[i + 1 : i + 2])
    return value


def fail(error: BaseException) -> None:
    """Prints the one line and leaves with exit code 2."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    sys.exit(2)


def checked(build: Callable[[], Any]) -> Any:
    """`build()`, where a ValueError, a missing file or an absent extra is the user's to mend."""
    try:
        return build()
    except (ValueError, OSError, ImportError) as error:
        fail(error)


def seeds() -> list[int]:
    """The seeds of this job."""
    return list(range(FLAGS.seed, FLAGS.seed + FLAGS.seeds))


def use_compilation_cache() -> None:
    """Keeps compiled programs where the flag says."""
    if FLAGS.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(FLAGS.compilation_cache))


def versions() -> dict[str, str]:
    """Of what results depend on."""
    packages = ("jaxfedmvc", "jax", "flax", "optax", "scikit-learn")
    return {"python": platform.python_version()} | {p: metadata.version(p) for p in packages}


def make_folder(name: str, resume: bool = False, given_only: bool = False) -> Path:
    """Makes the result folder and writes flags.txt, which serves as a --flagfile, into it.

    Args:
      name: Of the job, for a folder of its own under results/ where --output_dir is not given.
      resume: Go on in a folder that is there, as `reopen_folder` does.
      given_only: Leave flags that were not given out of flags.txt, where giving a default is not
        the same as giving nothing.

    Raises:
      OSError, ValueError: The folder cannot be written, or holds results already; or --resume is
        given and the job knows nothing of it.
    """
    if resume:
        return reopen_folder(given_only)
    if FLAGS.resume:
        raise ValueError("resume: this job keeps no checkpoints; leave it out")
    asked = FLAGS.output_dir
    folder = Path(asked or f"results/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if asked is None:
        tries = (folder.with_name(f"{folder.name}-{i}") for i in range(2, 1000))
        while folder.exists():
            folder = next(tries)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(
            f"output_dir: cannot write to {str(folder)!r} ({error.strerror}); give a folder"
            " that can be written"
        ) from error
    if any((folder / name).exists() for name in ("rounds.csv", "summary.json", "flags.txt")):
        raise ValueError(f"output_dir: {str(folder)!r} holds results already; give another")
    write(folder / "flags.txt", "\n".join(_flag_lines(given_only)) + "\n")
    return folder


def reopen_folder(given_only: bool = False) -> Path:
    """The folder of --output_dir, for a job that goes on in it; `given_only` as in `make_folder`.

    Raises:
      ValueError: No --output_dir, or no job was begun there, or one with other flags.
    """
    if FLAGS.output_dir is None:
        raise ValueError("resume: needs --output_dir, the folder of the job that is to go on")
    folder = Path(FLAGS.output_dir)
    if not (folder / "flags.txt").is_file():
        raise ValueError(
            f"resume: {str(folder)!r} holds no job (no flags.txt); leave --resume out to begin one"
        )
    then = _named_flags((folder / "flags.txt").read_text().splitlines())
    now = _named_flags(_flag_lines(given_only))

    def is_new(name: str) -> bool:
        """Not in the file, and not given now: as if it had been there."""
        unchanged = FLAGS[name].value == FLAGS[name].default
        return unchanged and not given_only and name not in then

    odd = [
        f"{name} ({then.get(name, 'none')} then, {now.get(name, 'none')} now)"
        for name in sorted((then.keys() | now.keys()) - _FREE)
        if then.get(name) != now.get(name) and not is_new(name)
    ]
    if odd:
        raise ValueError(
            f"resume: {str(folder)!r} was begun with other flags: {', '.join(odd)}; allowed are"
            " the same, as by --flagfile with its flags.txt"
        )
    return folder


def write(path: Path, text: str) -> None:
    """Writes all or nothing."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Appends rows to a .csv under its header; the first ones bring it.

    Raises:
      ValueError: The rows have other columns.
    """
    fresh = not path.exists()
    with path.open("a+", newline="") as file:
        file.seek(0)
        columns = list(rows[0]) if fresh else next(csv.reader(file))
        if any(row.keys() != set(columns) for row in rows):
            raise ValueError(f"{path}: has the columns {columns}, got {list(rows[0])}")
        table = csv.DictWriter(file, columns)
        if fresh:
            table.writeheader()
        table.writerows(rows)


def _named_flags(lines: Iterable[str]) -> dict[str, str]:
    """Values as text by name, of lines such as --rounds=5, --progress or --noprogress."""
    values = {}
    for line in lines:
        name, equals, value = line.removeprefix("--").partition("=")
        if equals:
            values[name] = value
        elif name in FLAGS:
            values[name] = "true"
        else:
            values[name.removeprefix("no")] = "false"
    return values


def _flag_lines(given_only: bool) -> Iterator[str]:
    """The flags of the binaries."""
    for module, defined in sorted(FLAGS.flags_by_module_dict().items()):
        if "experiments" in module:
            for flag in defined:
                if flag.value is None or flag.name in _NOT_WRITTEN:
                    continue
                if flag.present or not given_only:
                    yield flag.serialize()
