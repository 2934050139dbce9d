"""What the commands share: lists in flags, processes of their own, memory, the machine, results.

Nothing here imports jax. A process that only starts others must stay small: what it has in memory
when it forks counts as its child's peak.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

flags.disclaim_key_flags()  # a flag that is defined here is listed by the help of its command


# --- The command line -----------------------------------------------------------------------------


class _ListOf(flags.ListParser):
    """Reads a list whose entries another parser reads."""

    def __init__(self, entry: flags.ArgumentParser) -> None:
        super().__init__()
        self._entry = entry

    def parse(self, argument: Any) -> list[Any]:
        """Returns the entries; one that is wrong is a ValueError, which absl reports."""
        return [self._entry.parse(x) for x in super().parse(argument)]


def define_list(
    name: str, default: Sequence[Any] | None, help_text: str, entry: flags.ArgumentParser
) -> None:
    """Defines a flag for a list with commas, whose entries a parser of absl's reads and checks."""
    given = None if default is None else list(default)
    flags.DEFINE(_ListOf(entry), name, given, help_text, serializer=flags.CsvListSerializer(","))


def whole(lowest: int) -> flags.IntegerParser:
    """Returns a parser of whole numbers from this one on."""
    return flags.IntegerParser(lower_bound=lowest)


def one_of(names: Sequence[str]) -> flags.EnumParser:
    """Returns a parser of these names."""
    return flags.EnumParser(list(names))


def run(main: Callable[[], None]) -> None:
    """Runs a command that has flags and no other arguments."""

    def without_arguments(arguments: list[str]) -> None:
        if arguments[1:]:
            raise app.UsageError(f"got {' '.join(arguments[1:])!r}; allowed are flags alone")
        main()

    app.run(without_arguments)


def results_to(path: str | None) -> Callable[[Any], None]:
    """Opens a file now, since a bad path must not cost the run; returns what writes JSON to it."""
    try:
        out = open(path, "w") if path else None
    except OSError as error:
        raise SystemExit(
            f"json: got {path!r} ({error.strerror}); allowed is a file that can be written"
        ) from None

    def write(results: Any) -> None:
        if out is not None:
            with out:
                json.dump(results, out, indent=1)

    return write


# --- Tables ---------------------------------------------------------------------------------------

# (key, title, width, decimals) of each column
Columns = Sequence[tuple[str, str, int, int]]


def titles(columns: Columns) -> str:
    """Returns the head of a table."""
    return "".join(f"{title:>{width}s}" for _, title, width, _ in columns)


def cells(found: Mapping[str, Any], columns: Columns) -> str:
    """Returns a line of a table; a dash where there is nothing to say."""
    return "".join(
        f"{found[key]:{w}.{digits}f}" if key in found else f"{'-':>{w}s}"
        for key, _, w, digits in columns
    )


# --- The machine ----------------------------------------------------------------------------------


def processor(cores: int | str) -> str:
    """Names the processor, and how many of its cores are used."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.machine()])[0]}, {cores} of {os.cpu_count()} cores"


def load() -> str:
    """Says how busy the machine is, and what keeps peers to fewer threads than ours."""
    threads = os.environ.get("OMP_NUM_THREADS")
    few = f" (OMP_NUM_THREADS={threads} binds peers, not jax)" if threads else ""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores{few}"


def memory_mb(field: str, of: str = "self/status") -> float:
    """Reads memory that Linux tells of, of this process unless `of` says otherwise.

    Args:
      field: Such as "VmRSS", resident now; "VmHWM", its peak; "RssAnon" and "RssFile", parts of it.
      of: A file under /proc.
    """
    lines = Path("/proc", of).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def peak_mb() -> float:
    """Returns the peak resident memory of this process so far; Linux counts KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def use_cores(n: int) -> None:
    """Keeps this process to n cores (Linux), 0 to all; before imports, which count the cores."""
    if n:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:n])


class Timed(NamedTuple):
    """A call: wall and CPU seconds, and what it returned."""

    seconds: float
    cpu_seconds: float
    result: Any


def timed(call: Callable[[], Any]) -> Timed:
    """Times a call that waits for what it computes; `machine.seconds` waits for jax."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return Timed(time.perf_counter() - wall, time.process_time() - cpu, result)


# --- Processes ------------------------------------------------------------------------------------


class BrokenError(Exception):
    """A process gave no result: one line, and whether it was only too late."""

    def __init__(self, reason: str, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


def spawned(
    module: str,
    argument: str,
    limit: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """Runs a module in a process of its own; yields what it prints as JSON, line by line.

    Args:
      module: To be run.
      argument: On its command line.
      limit: Seconds, after which it is stopped; None for never.
      environment: Variables beside those of this process.

    Raises:
      BrokenError: The process failed, or was stopped.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | (environment or {}),
        )
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(threading.TIMEOUT_MAX if limit is None else max(limit, 0.0), stop)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(("{", "[")):
                    yield json.loads(line)
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        if late.is_set():
            raise BrokenError(f"stopped after {limit:.0f} s, when the time was over", late=True)
        if code:
            errors.seek(0)
            lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
            # One that was killed, for memory mostly, had no time to say so.
            raise BrokenError(lines[-1][:200] if lines and code > 0 else f"exit {code}")


def in_process(module: str, case: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Returns what `--measure` of another command of this folder prints, or why there is nothing.

    Args:
      module: Of this folder.
      case: The measurement to make.
      environment: See `spawned`.

    Returns:
      What was measured; {"failed": one line} if the process broke.
    """
    asked = f"--measure={json.dumps(case)}"
    try:
        *_, found = spawned(f"benchmarks.{module}", asked, environment=environment)
    except BrokenError as error:
        return {"failed": str(error)}
    return found
