"""Seconds that somebody measured with the authors' own program, read from a file.

Their program is not part of this one; README.md beside this file says how to run it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

# Here, since two of the benchmarks have this flag and one of them imports the other.
flags.DEFINE_string(
    "authors", None, "Seconds of the authors' own FMCSC; see benchmarks/references/README.md."
)


class Authors(NamedTuple):
    """One run of the authors' program.

    Attributes:
      dataset: As `--dataset` of the experiments names it.
      seconds: Wall time of the run.
      device: That it ran on.
      note: What else should stand beside the number; "" for nothing.
    """

    dataset: str
    seconds: float
    device: str
    note: str = ""

    def beside(self, seconds: float, device: str) -> str:
        """Returns a line with both times and their ratio; other devices are said to be others."""
        other = "" if device == self.device else "; the devices differ, and the ratio is theirs too"
        note = f" ({self.note})" if self.note else ""
        return (
            f"the authors' program, {self.dataset}: {self.seconds:.1f} s on {self.device}{note};"
            f" ours {seconds:.1f} s on {device}: {self.seconds / seconds:.1f} x{other}"
        )


def read_authors(path: str | Path) -> Authors:
    """Reads a file of TOML with `dataset`, `seconds`, `device` and perhaps `note`.

    Raises:
      ValueError: It cannot be read, a name is missing or unknown, or a value is not what it should
        be; the message begins with "authors:".
    """
    try:
        told: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"authors: {path} cannot be read: {error}") from None
    needed, known = {"dataset", "seconds", "device"}, set(Authors._fields)
    if not needed <= set(told) <= known:
        raise ValueError(
            f"authors: {path} has {', '.join(sorted(told)) or 'nothing'}; needed are"
            f" {', '.join(sorted(needed))}, allowed {', '.join(sorted(known))}"
        )
    if told["dataset"] != "mnist_usps":
        raise ValueError(
            f"authors: dataset is {told['dataset']!r}; allowed is 'mnist_usps', as ours is"
        )
    seconds = told["seconds"]
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError(f"authors: seconds is {seconds!r}; allowed is a number above 0")
    texts = {name: str(value) for name, value in told.items() if name != "seconds"}
    return Authors(seconds=float(seconds), **texts)
