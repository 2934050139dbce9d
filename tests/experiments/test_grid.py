"""The text of a sweep's grid, and the settings that it stands for."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.lib import grid
from experiments.lib.grid import Axis


def test_lists_keep_their_texts():
    assert grid.parse(" tau_m = 0.10, 3e-1 ;hidden=64x64,256x256x512; ratio=1:1 ") == [
        Axis("tau_m", ("0.10", "3e-1")),
        Axis("hidden", ("64x64", "256x256x512")),
        Axis("ratio", ("1:1",)),
    ]


def test_ranges_are_numbers_of_twelve_digits_with_both_ends():
    log, lin = grid.parse("lr=log(1e-4, 1e-2, 3); tau=lin(-0.1,0.5,7)")
    assert log == Axis("lr", ("0.0001", "0.001", "0.01"), "log")
    # 0.0 and 0.3 are 2.8e-17 and 0.30000000000000004 before they are rounded.
    assert lin.scale == "lin" and lin.values == ("-0.1", "0.0", "0.1", "0.2", "0.3", "0.4", "0.5")
    assert grid.parse("a=log(1,10,3)")[0].values[1] == "3.16227766017"
    # Whole numbers are written as such where all are: a flag may take 1 for another thing than 1.0.
    assert grid.parse("a=lin(0.5,1,2)")[0].values == ("0.5", "1.0")
    assert grid.parse("a=lin(1,0,2)") == [Axis("a", ("1", "0"), "lin")]


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
    ("text", "says"),
    [
        ("", "axis: got ''; allowed is name=values"),
        ("a=1;", "axis: got ''"),
        ("a=1;;b=2", "axis: got ''"),
        ("b=1; a", "axis: got 'a'"),
        ("=1", "axis: got '=1'"),
        ("a=", "a: got ''; allowed is values with ','"),
        ("tau_m=0.1,,0.3", "tau_m: got '0.1,,0.3'; allowed is values"),
        ("a=1, ;b=1", "a: got '1,'; allowed is values"),
        ("a=1; a=2", "there are two axes a"),
        ("a=1,2, 1", "a has the value 1 twice"),
        ("a=1,2,1.0", "a has the value 1 twice"),
        ("a=0.5,lin(0.5,1,2)", "a has the value 0.5 twice"),
        ("a=lin(1,1,2)", "a has the value 1 twice"),
        ("a=1,b=2", "a: got '1,b=2'; allowed is values with ',' between, and ';'"),
        ("a=exp(1,2,3)", "a: got 'exp(1,2,3)'; allowed is lin(first,last,n) or log("),
        ("a=(1,2,3)", "got '(1,2,3)'; allowed is lin(first,last,n)"),
        ("a=log()", "got 'log()'; allowed is lin(first,last,n)"),
        ("a=lin(1,2)", "got 'lin(1,2)'; allowed is lin(first,last,n)"),
        ("a=lin(1,2,3,4)", "got 'lin(1,2,3,4)'; allowed is lin(first,last,n)"),
        ("a=lin(1,,3)", "allowed is lin(first,last,n)"),
        ("a=lin(1,2,2.5)", "allowed is lin(first,last,n)"),
        ("a=log(1,2,3", "allowed is lin(first,last,n)"),
        ("a=log(1,2,3;b=4)", "allowed is lin(first,last,n)"),
        ("a=1)", "got '1)'; allowed is lin(first,last,n)"),
        ("a=lin(1,2,3)x", "allowed is lin(first,last,n)"),
        ("a=lin(1,x,3)", "allowed is numbers for the first and the last value"),
        ("a=lin((1),2,3)", "allowed is numbers for the first and the last value"),
        ("a=lin(1,inf,3)", "allowed is finite numbers"),
        ("a=log(0,1,3)", "allowed is finite numbers, and above 0 for log"),
        ("a=log(1,-1,3)", "allowed is finite numbers, and above 0 for log"),
        ("a=lin(1,2,0)", "allowed is 2 to 10000 values from 1.0 to 2.0"),
        ("a=lin(1,2,1)", "allowed is 2 to 10000 values from 1.0 to 2.0"),
        ("a=lin(1,2,20000)", "allowed is 2 to 10000 values"),
    ],
)
def test_what_is_wrong_is_said_of_the_axis(text, says):
    with pytest.raises(ValueError) as caught:
        grid.parse(text)
    message = str(caught.value)
    assert message.startswith("grid: ") and says in message and "\n" not in message


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


def test_draws_depend_on_the_seed():
    assert grid.draws(AXES, 3, seed=1) == grid.draws(AXES, 3, seed=1)
    assert grid.draws(AXES, 3, seed=1) != grid.draws(AXES, 3, seed=2)


def test_draws_of_lists_go_as_far_as_the_grid():
    axes = grid.parse("a=1,2,3;b=4,5")
    found = grid.draws(axes, 6, seed=0)
    assert sorted(map(str, found)) == sorted(map(str, grid.combinations(axes)))
    with pytest.raises(
        ValueError, match="random: got 7; allowed is 1 to 6, all settings of the grid"
    ):
        grid.draws(axes, 7, seed=0)
    with pytest.raises(ValueError, match="random: got 0; allowed is 1 to 6"):
        grid.draws(axes, 0, seed=0)
