"""A progress bar with time left, fed from compiled programs."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from absl import flags

flags.DEFINE_bool("progress", True, "Show a progress bar with the time left (on stderr).")


def require_tqdm() -> Any:
    """tqdm's bar.

    Raises:
      ImportError: Says which extra to install.
    """
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "the binaries need tqdm: pip install -e '.[experiments]' in the source tree"
        ) from error
    return tqdm


class ProgressBar:
    """tqdm over units of work; lines written meanwhile do not tear it."""

    def __init__(self, total: float) -> None:
        self._bar: Any = require_tqdm()(
            total=total,
            disable=not flags.FLAGS.progress,
            file=sys.stderr,
            mininterval=0.5,
            bar_format="{percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left",
        )
        self._total = total

    def advance(self, work: float) -> None:
        """Called after each chunk of clients, from the program's callback."""
        # A sum of floats may overshoot the total, and tqdm then drops its bar.
        self._bar.update(min(work, self._total - self._bar.n))

    def write(self, line: str) -> None:
        """Prints a line on stdout, above the bar."""
        self._bar.write(line, file=sys.stdout)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
