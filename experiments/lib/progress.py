"""What a terminal shows while a job compiles and runs: what is compiled, and the time left."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any


def require_tqdm() -> Any:
    """Returns tqdm's bar.

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


class Progress:
    """A bar on stderr with the time left, reckoned from how long each kind of work has taken.

    Work that has not been met yet is taken to be as long as the mean of what has, so that the time
    left is shown from the first piece on and gets better with each new one.
    """

    def __init__(self, shown: bool) -> None:
        """Opens the bar, still empty; `shown` False prints lines only."""
        self._bar = require_tqdm()(
            total=1.0,
            disable=not shown,
            file=sys.stderr,
            mininterval=0.5,
            bar_format="{percentage:3.0f}% |{bar}| {elapsed} gone{postfix}",
        )
        self._left: collections.Counter[str] = collections.Counter()
        self._seconds: dict[str, list[float]] = {}
        self._began = self._last = time.perf_counter()

    def compiling(self, ready: int, n: int, name: str) -> None:
        """Shows how many programs are compiled."""
        seconds = time.perf_counter() - self._began
        self._bar.set_postfix_str(f"compiling {min(ready + 1, n)} of {n}, {seconds:.0f} s")
        self._last = time.perf_counter()

    def expect(self, calls: Mapping[str, int]) -> None:
        """Sets how much work of each kind is left."""
        self._left = collections.Counter(calls)
        self._last = time.perf_counter()

    def done(self, kind: str, n: int = 1) -> None:
        """Counts work of this kind as done; the time since the last call is what it took."""
        now = time.perf_counter()
        self._seconds.setdefault(kind, []).append((now - self._last) / n)
        self._last = now
        self._left[kind] = max(0, self._left[kind] - n)
        self._show()

    def _show(self) -> None:
        means = {kind: sum(s[-20:]) / len(s[-20:]) for kind, s in self._seconds.items()}
        usual = sum(means.values()) / len(means)
        left = sum(n * means.get(kind, usual) for kind, n in self._left.items())
        spent = sum(map(sum, self._seconds.values()))
        self._bar.n = spent / (spent + left) if spent + left > 0 else 1.0
        self._bar.set_postfix_str(f"{self._bar.format_interval(left)} left", refresh=False)
        self._bar.update(0)

    def write(self, line: str) -> None:
        """Prints a line on stdout, above the bar."""
        self._bar.write(line, file=sys.stdout)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
