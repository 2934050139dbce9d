"""What a terminal shows while a job compiles and runs: what is compiled, and the time left."""

from __future__ import annotations

import collections
import sys
import threading
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


# Seconds between two drawings of a bar whose job says nothing, as while it compiles.
_TICK = 1.0
# Shorter work takes what it takes to call a program, which tells nothing of operations.
_SHORT = 0.01


class Progress:
    """A bar on stderr with the time left, reckoned from how long each kind of work has taken.

    Work that has not been met yet is taken to be as fast, for its operations, as what has, so that
    the time left is shown from the first piece on that is not short beside what is to come. Where
    work waits for a program of its own, so will each kind that has not been met.
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
        self._left: collections.Counter[str] | None = None  # until anything is expected
        self._early: collections.Counter[str] = collections.Counter()  # done before that
        self._seconds: dict[str, list[float]] = {}
        self._waited: dict[str, float] = {}
        self._spent = 0.0
        self._efforts: Mapping[str, float] = {}
        self._at_most = False
        self._last = time.perf_counter()
        self._lock = threading.Lock()  # runs on several devices have a thread each
        self._closed = threading.Event()
        if shown and sys.stderr.isatty():  # in a file each drawing would be a line
            threading.Thread(target=self._tick, daemon=True).start()

    def compiling(self, ready: int, n: int, name: str) -> None:
        """Shows what is traced, while `n` is 0, and then how many of n programs are compiled."""
        self._last = time.perf_counter()
        what = f"compiling {min(ready + 1, n)} of {n}" if n else "tracing"
        stage = f": {name.split('/')[0]}" if name else ""
        self._bar.set_postfix_str(f"{what}{stage}")

    def running(self, name: str) -> None:
        """Shows that what was compiled runs, by the time left as soon as anything tells it."""
        with self._lock:
            self._show_running(name)

    def expect(
        self,
        calls: Mapping[str, int],
        efforts: Mapping[str, float] | None = None,
        at_most: bool = False,
    ) -> None:
        """Sets how much work of each kind is left, and what one piece is in operations, if known.

        A kind without operations is taken to be short until it has been met; without any known, all
        kinds are taken to be alike. What was done before anything was expected is subtracted once.
        Work that may end before that is `at_most` so much, and so is the time left.
        """
        with self._lock:
            self._left = collections.Counter(calls) - self._early
            self._early.clear()
            self._efforts = efforts or {}
            self._at_most = at_most
            self._last = time.perf_counter()
            if self._seconds and not any(self._left.values()):
                self._show(self._left)  # the end, where the bar stood at what might have come

    def done(self, kind: str, n: int = 1, waited: float = 0.0) -> None:
        """Counts work of this kind as done; the time since the last call is what it took.

        Seconds that it `waited` for its program are apart, since they say nothing of its pace.
        """
        with self._lock:
            now = time.perf_counter()
            self._seconds.setdefault(kind, []).append(max(0.0, now - self._last - waited) / n)
            self._waited[kind] = self._waited.get(kind, 0.0) + waited
            self._spent += now - self._last
            self._last = now
            if self._left is None:
                self._early[kind] += n
            else:
                self._left[kind] = max(0, self._left[kind] - n)
            self._show_running(kind)

    def _tick(self) -> None:
        while not self._closed.wait(_TICK):
            self._bar.refresh()

    def _show_running(self, name: str) -> None:
        if self._left is None or not self._seconds or self._is_short(self._left):
            self._bar.set_postfix_str(f"running: {name.split('/')[0]}")
        else:
            self._show(self._left)

    def _is_short(self, work: Mapping[str, int]) -> bool:
        """Whether all kinds that have been met are short beside one that is still to be met."""
        met = max((self._efforts.get(kind, 0.0) for kind in self._seconds), default=0.0)
        ahead = (self._efforts.get(k, 0.0) for k, n in work.items() if n and k not in self._seconds)
        return met < _SHORT * max(ahead, default=0.0)

    def _show(self, work: Mapping[str, int]) -> None:
        means = {kind: sum(s[-20:]) / len(s[-20:]) for kind, s in self._seconds.items()}
        known = sum(self._efforts.get(kind, 0.0) for kind in means)
        speed = sum(means[kind] for kind in means if kind in self._efforts) / (known or 1)
        usual = 0.0 if self._efforts else sum(means.values()) / len(means)

        def guess(kind: str) -> float:
            return means.get(kind, self._efforts[kind] * speed if kind in self._efforts else usual)

        # The first wait is the longest: later programs are compiled while earlier ones run.
        waits = list(self._waited.values())[-20:]
        waits = waits[1:] or waits
        to_wait = sum(n > 0 and kind not in means for kind, n in work.items()) / len(waits)
        left = sum(n * guess(kind) for kind, n in work.items()) + to_wait * sum(waits)
        whole = self._spent + left
        self._bar.n = self._spent / whole if whole > 0 else 1.0
        limit = "at most " if self._at_most and left else ""
        self._bar.set_postfix_str(f"{limit}{self._bar.format_interval(left)} left", refresh=False)
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
        self._closed.set()
        self._bar.close()
