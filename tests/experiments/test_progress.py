"""What the bar says of the time left, by a clock of the test's own."""

import io
import sys
import time

import pytest

from experiments.lib import progress as module
from experiments.lib.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def shown(bar):
    return bar._bar.postfix


def test_waiting_for_a_program_is_not_taken_for_the_pace_of_runs(clock):
    """But every program that is to come is waited for, too."""
    with Progress(True) as bar:
        bar.expect({"program 0": 2, "program 1": 4, "program 2": 4})
        bar.compiling(0, 3, "program 0")
        clock[0] += 20.0
        bar.running("program 0")
        assert shown(bar) == "running: program 0"
        clock[0] += 3.0
        bar.done("program 0", waited=20.0)
        assert shown(bar) == "01:07 left"  # nine runs of three seconds, and two programs
        clock[0] += 3.0
        bar.done("program 0")
        assert shown(bar) == "01:04 left"
        bar.compiling(1, 3, "program 1")
        assert shown(bar) == "compiling 2 of 3: program 1"
        clock[0] += 5.0
        bar.running("program 1")
        assert shown(bar) == "01:04 left"
        clock[0] += 3.0
        bar.done("program 1", waited=5.0)  # was compiled while others ran, and so will the next be
        assert shown(bar) == "00:26 left"


def test_the_bar_counts_every_run_of_a_batch(clock):
    with Progress(True) as bar:
        bar.expect({"program 0": 16})
        clock[0] += 8.0
        bar.done("program 0", 8)
        assert shown(bar) == "00:08 left" and bar._bar.n == 0.5


def test_work_that_may_end_by_itself_takes_so_long_at_most(clock):
    with Progress(True) as bar:
        bar.expect({"round": 100}, at_most=True)
        clock[0] += 3.0
        bar.done("round")
        assert shown(bar) == "at most 04:57 left" and bar._bar.n == 0.01
        bar.expect({"round": 0}, at_most=True)  # it was done after this one
        assert shown(bar) == "00:00 left" and bar._bar.n == 1


def test_kinds_not_met_yet_are_guessed_by_their_operations(clock):
    with Progress(True) as bar:
        bar.expect({"setup": 1, "round": 10}, {"setup": 4.0, "round": 2.0})
        clock[0] += 2.0
        bar.done("setup")
        assert shown(bar) == "00:10 left"


def test_short_work_tells_nothing_of_long_work(clock):
    """A key that is folded in a tenth of a second made hours of an epoch."""
    efforts = {"key": 10.0, "setup": 1e6, "round": 2e6}
    with Progress(True) as bar:
        bar.expect({"key": 3, "setup": 1, "round": 10}, efforts)
        clock[0] += 0.1
        bar.done("key")
        assert shown(bar) == "running: key"
        clock[0] += 2.0
        bar.done("setup")
        assert (
            shown(bar) == "00:42 left"
        )  # ten rounds at 2.1 s for a million operations, and two keys


def test_a_terminal_sees_the_time_go_on_while_a_program_compiles(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(module, "_TICK", 0.01)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(True) as bar:
        bar.compiling(0, 2, "start")
        until = time.monotonic() + 60
        while sys.stderr.getvalue().count("compiling 1 of 2: start") < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
