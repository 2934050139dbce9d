"""The text of a sweep's grid, and the settings that it stands for."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments import grid
from experiments.grid import Axis


def test_lists_keep_their_texts():
    assert grid.parse(" tau_m = 0.10, 3e-1 ;hidden=64x64,256x256x512; ratio=1:1 ") == [
        Axis("tau_m", ("0.10", "3e-1")),
        Axis("hidden", ("64x64", "256x256x512")),
        Axis("ratio", ("1:1",)),
    ]


def test_ranges_are_numbers_of_twelve_digits_with_both_ends():
    log, lin = grid.parse("lr=log(1e-4, 1e-2, 3); tau=lin(-0.1,0.5,7)")
    assert log == Axis("lr", ("0.0001", "0.001", "0.01"), 1e-4, 1e-2, "log")
    # 0.0 and 0.3 are 2.8e-17 and 0.30000000000000004 before they are rounded.
    assert lin.values == ("-0.1", "0", "0.1", "0.2", "0.3", "0.4", "0.5")
    assert grid.parse("a=log(1,10,3)")[0].values[1] == "3.16227766017"
    assert grid.parse("a=lin(1,0,2)") == [Axis("a", ("1", "0"), 0.0, 1.0, "lin")]


def test_a_range_in_a_list_and_a_range_of_one_value_are_lists():
    assert grid.parse("a=0,log(1,4,3)") == [Axis("a", ("0", "1", "2", "4"))]
    assert grid.parse("a=lin(2,2,1)") == [Axis("a", ("2",))]


ends = st.floats(1e-6, 1e6)


@settings(max_examples=50, deadline=None, database=None)
@given(ends, ends, st.integers(2, 9))
def test_log_ranges_have_equal_ratios(a, b, n):
    if a > b:
        a, b = b, a
    b *= 1.001  # twelve digits can tell the values apart
    (axis,) = grid.parse(f"x=log({a!r},{b!r},{n})")
    values = np.log([float(v) for v in axis.values])
    np.testing.assert_allclose(values[[0, -1]], [math.log(a), math.log(b)], atol=1e-9)
    np.testing.assert_allclose(np.diff(values), math.log(b / a) / (n - 1), atol=1e-9)


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ("", 1, "name=values, before the end"),
        ("  ", 3, "name=values, before the end"),
        ("a=1;", 5, "name=values, before the end"),
        ("a=1;;b=2", 5, "name=values, before ';'"),
        ("a", 2, "expected '=' before the end"),
        ("a ;b=1", 2, "expected '=' before ';'"),
        ("=1", 1, "expected a name before '='"),
        ("a=", 3, "expected a value before the end"),
        ("tau_m=0.1,,0.3", 11, "expected a value before ','"),
        ("a=1, ;b=1", 5, "expected a value before ';'"),
        ("a=1; a=2", 6, "an axis 'a' already"),
        ("a=1,2, 1", 8, "has the value 1 already"),
        ("a=0.5,lin(0.5,1,2)", 7, "has the value 0.5 already"),
        ("a=lin(1,1,2)", 3, "has the value 1 already"),
        ("a=1,b=2", 6, "axes are separated by ';'"),
        ("a=exp(1,2,3)", 3, "unknown function 'exp'"),
        ("a=(1,2,3)", 3, "unknown function ''"),
        ("a=log()", 3, "log takes 3 numbers, first, last and how many; got 0"),
        ("a=lin(1,2)", 3, "got 2"),
        ("a=lin(1,2,3,4)", 3, "got 4"),
        ("a=lin(1,,3)", 9, "expected a number before ','"),
        ("a=lin(1,x,3)", 9, "expected a number; got 'x'"),
        ("a=lin(1,inf,3)", 9, "no finite range"),
        ("a=lin(1,2,0)", 11, "1 to 10000; got '0'"),
        ("a=lin(1,2,20000)", 11, "1 to 10000; got '20000'"),
        ("a=lin(1,2,2.5)", 11, "1 to 10000; got '2.5'"),
        ("a=lin(1,2,1)", 11, "1 value cannot reach from 1.0 to 2.0"),
        ("a=log(0,1,3)", 7, "positive numbers only; got 0.0"),
        ("a=log(1,-1,3)", 9, "positive numbers only; got -1.0"),
        ("a=log(1,2,3", 6, "'(' without ')'"),
        ("a=log(1,2,3;b=4)", 6, "'(' without ')'"),
        ("a=1)", 4, "')' without '('"),
        ("a=lin((1),2,3)", 7, "a parenthesis within another"),
        ("a=lin(1,2,3)x", 13, "expected ',' or ';' after ')'"),
    ],
)
def test_malformed_text_is_told_where(text, at, says):
    with pytest.raises(ValueError) as caught:
        grid.parse(text)
    message = str(caught.value)
    marked = text[: at - 1] + "^" + text[at - 1 :]
    assert message.startswith(f"grid: at character {at}, at ^ in {marked!r}: ")
    assert says in message and "\n" not in message


def test_of_a_long_text_a_piece_is_shown():
    text = "a=" + ",".join(map(str, range(100))) + ",," + "x" * 200
    with pytest.raises(ValueError, match=r"at character 293, at \^ in '\.{3}.{30}\^.{30}\.{3}'"):
        grid.parse(text)


def test_combinations_are_row_major():
    assert grid.combinations(grid.parse("a=1,2; b=x,y,z; c=lin(3,3,1)")) == [
        {"a": a, "b": b, "c": "3"} for a in "12" for b in "xyz"
    ]


AXES = grid.parse("lr=log(1e-4,1e-2,2); tau=lin(1,3,5); parts=AB,BC,CD; x=5")


def test_draws_are_uniform_in_what_they_are_drawn_from():
    found = grid.draws(AXES, 400, seed=1)
    assert len({tuple(setting.items()) for setting in found}) == 400
    assert all(list(setting) == ["lr", "tau", "parts", "x"] for setting in found)
    lr, tau = ([float(setting[name]) for setting in found] for name in ("lr", "tau"))
    assert min(lr) >= 1e-4 and max(lr) <= 1e-2 and min(tau) >= 1 and max(tau) <= 3
    assert stats.kstest((np.log10(lr) + 4) / 2, "uniform").pvalue > 0.01
    assert stats.kstest((np.asarray(tau) - 1) / 2, "uniform").pvalue > 0.01
    counts = [sum(s["parts"] == part for s in found) for part in ("AB", "BC", "CD")]
    assert stats.chisquare(counts).pvalue > 0.01
    assert {setting["x"] for setting in found} == {"5"}


def test_draws_depend_on_the_seed_alone():
    assert grid.draws(AXES, 3, seed=1) == grid.draws(AXES, 9, seed=1)[:3]
    assert grid.draws(AXES, 3, seed=1) != grid.draws(AXES, 3, seed=2)


def test_draws_of_lists_go_as_far_as_the_grid():
    axes = grid.parse("a=1,2,3;b=4,5")
    found = grid.draws(axes, 6, seed=0)
    assert sorted(map(str, found)) == sorted(map(str, grid.combinations(axes)))
    with pytest.raises(ValueError, match="random: got 7; the grid has only 6 different settings"):
        grid.draws(axes, 7, seed=0)
    with pytest.raises(ValueError, match="random: got 0; allowed is 1 or more"):
        grid.draws(axes, 0, seed=0)
