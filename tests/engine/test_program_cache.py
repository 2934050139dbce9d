"""Programs are traced once a shape and compiled once a text, and calls wait for no more."""

import numpy as np
import pytest

from jaxfedmvc.engine.programs import Noted, Program, Programs


def test_a_program_is_traced_once_for_its_shapes_and_tells_its_note():
    traced = []

    def double(x):
        traced.append(x.shape)
        return Noted({"twice": 2 * x}, x.size)

    programs, program = Programs(), Program("double", double)
    for n in (3, 3, 4):
        found, note = programs.call(program, np.arange(n, dtype=np.float32))
        np.testing.assert_array_equal(found["twice"], 2 * np.arange(n))
        assert note == n
    assert traced == [(3,), (4,)] and len(programs) == 2
    shapes, note = programs.shapes(program, np.zeros(4, np.float32))
    assert shapes["twice"].shape == (4,) and note == 4 and len(traced) == 2


def test_equal_texts_are_compiled_once_and_what_only_hands_on_is_not():
    shared = {}
    programs = [Programs(compiled=shared) for _ in range(2)]
    x = np.arange(3.0, dtype=np.float32)
    for mine in programs:
        for name in ("one", "another"):
            assert mine.call(Program(name, lambda y: y + 1), x)[0][0] == 1
    assert len(shared) == 1
    kept, swapped = programs[0].call(Program("swap", lambda a, b: (b, a)), x, x + 1)[0]
    np.testing.assert_array_equal(kept, x + 1)
    assert swapped is x and len(shared) == 1


def test_who_compiles_ahead_waits_once():
    programs, program, told = Programs(), Program("add", lambda x: x + 1), []
    x = np.zeros(2, np.float32)
    programs.begin(lambda *report: told.append(report))
    programs.shapes(program, x)
    programs.finish()
    waited = programs.seconds
    assert told[0] == (0, 0, "add") and told[-1] == (1, 1, "")
    assert programs.call(program, x)[0][1] == 1 and programs.seconds == waited


def test_who_does_not_compile_ahead_waits_at_the_first_call_of_a_shape():
    programs, program = Programs(ahead=False), Program("add", lambda x: x + 1)
    waited = [0.0]
    for n in (2, 2, 3):
        programs.call(program, np.zeros(n, np.float32))
        waited.append(programs.seconds)
    assert waited[0] < waited[1] == waited[2] < waited[3]


def test_a_walk_aside_tells_the_caller_what_it_found_or_what_went_wrong():
    programs, found = Programs(), []
    programs.walk_aside(lambda: "through", found.append)
    programs.walked()
    programs.walked()
    assert found == ["through"] and not programs.close()

    def broken():
        raise ValueError("no such shape")

    programs.walk_aside(broken, found.append)
    with pytest.raises(ValueError, match="no such shape"):
        programs.walked()
    assert programs.close() and found == ["through"]
