"""What the commands share: flags, processes, the clock and the peaks, by known answers."""

import json
import resource
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from benchmarks import commands, machine
from benchmarks.commands import BrokenError, in_process, one_of, spawned, whole
from benchmarks.roofline import work_of

DEFINE = flags.DEFINE


@pytest.fixture
def parsed(monkeypatch):
    """Returns a function that defines a flag `x` and parses a command line."""

    def parse(default, entry, *arguments):
        values = flags.FlagValues()
        define = partial(DEFINE, flag_values=values)
        monkeypatch.setattr(flags, "DEFINE", define)
        commands.define_list("x", default, "", entry)
        values(["command", *arguments])
        return values.x

    return parse


def test_lists_in_flags_are_read_and_checked(parsed):
    assert parsed([1, 20], whole(1)) == [1, 20]
    assert parsed(None, whole(1)) is None
    assert parsed([1], whole(0), "--x=3,0,5") == [3, 0, 5]
    assert parsed(["a"], one_of(["a", "b"]), "--x=b,a") == ["b", "a"]
    for entry, text in ((whole(1), "3,0"), (whole(1), "3,y"), (one_of(["a"]), "b")):
        with pytest.raises(flags.IllegalFlagValueError, match=f"flag --x={text}: "):
            parsed(None, entry, f"--x={text}")


def test_arguments_that_are_no_flags_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(commands.app, "run", lambda main: main(["command", "n=3"]))
    with pytest.raises(commands.app.UsageError, match="got 'n=3'; allowed are flags alone"):
        commands.run(lambda: None)


def test_results_are_written_and_a_bad_path_is_told_at_once(tmp_path):
    commands.results_to(None)([1])
    commands.results_to(str(tmp_path / "x.json"))({"a": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    with pytest.raises(SystemExit, match=r"json: got .*No such file.*; allowed is a file"):
        commands.results_to(str(tmp_path / "no" / "x.json"))


# --- Processes ------------------------------------------------------------------------------------


def test_a_process_is_stopped_in_time():
    with pytest.raises(BrokenError, match="stopped after 0 s") as caught:
        list(spawned("timeit", "import time; time.sleep(60)", 0.2))
    assert caught.value.late


def test_a_process_that_fails_says_why_in_one_line():
    with pytest.raises(BrokenError, match=r"^ZeroDivisionError: division by zero$") as caught:
        list(spawned("timeit", "1 / 0"))
    assert not caught.value.late
    with pytest.raises(BrokenError, match=r"^exit -9$"):
        list(spawned("timeit", "import os; os.kill(os.getpid(), 9)"))


def test_a_measurement_that_breaks_is_told():
    failed = in_process("no_such_command", {})["failed"]
    assert failed.endswith("No module named benchmarks.no_such_command")


# --- The clock and the machine --------------------------------------------------------------------


def test_turns_alternate_and_the_first_is_not_counted():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    times = machine.take_turns(calls, 2, in_a_turn=3)
    assert "".join(order) == "ab" + "aaabbb" * 2
    assert {name: len(found) for name, found in times.items()} == {"a": 6, "b": 6}


def test_a_first_call_is_not_counted_and_its_result_returned(monkeypatch):
    calls, took = iter("abcd"), iter([5.0, 1.0, 2.0])
    monkeypatch.setattr(machine, "seconds", lambda call: (call(), next(took))[1])
    assert machine.warmed(lambda: np.array(ord(next(calls))), 3) == (ord("a"), 2.0)
    assert next(calls, None) is None


def test_a_triad_streams_three_arrays_a_pass_in_place():
    program, call = machine.triad(1000)
    work = work_of(program.as_text())
    assert work.bytes == pytest.approx(3 * 4 * 1000 * machine.TRIADS, rel=0.01)
    np.testing.assert_allclose(call(), 2 - 2.0 ** (1 - machine.TRIADS), rtol=1e-6)
    np.testing.assert_allclose(call(), 2.0, rtol=1e-6)


def test_a_program_is_compiled_and_that_is_timed():
    program, took = machine.compiled(lambda x: x + 1, jnp.zeros(2))
    assert took > 0 and program(jnp.zeros(2)).tolist() == [1.0, 1.0]


def test_memory_is_in_millions_of_bytes():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    assert commands.peak_mb() == pytest.approx(peak, rel=0.01)
    assert 0 < commands.memory_mb("VmRSS") <= commands.memory_mb("VmHWM") + 1
    assert commands.memory_mb("MemTotal", "meminfo") > commands.memory_mb("VmRSS")


def test_peaks_by_hand(monkeypatch):
    monkeypatch.setattr(machine, "matmul_size", lambda: 100)
    assert machine.peak_of(0.5) == 4e6
    assert machine.bandwidth_of(2.0) == 6 * machine.TRIADS * machine.TRIAD_SIZE
