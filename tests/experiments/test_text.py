"""How numbers and views are written."""

import math

import numpy as np

from experiments.lib.text import counted, digits, left_out, spread


def test_a_mean_stands_with_its_deviation_where_there_is_one():
    assert spread(0.5, 0.25) == "0.500 +- 0.250"
    assert spread(0.5, math.nan) == "0.500"
    assert spread(math.nan, math.nan) == "-"


def test_numbers_have_few_digits_and_no_exponents():
    shown = [digits(x) for x in (0.0, 9.2e-05, 0.051549, 1, 25.26, 1767.2, 2e9, math.inf, math.nan)]
    assert shown == ["0", "0.000092", "0.0515", "1", "25.3", "1767", "2000000000", "inf", "nan"]
    assert digits(123456, 4) == "123456"


def test_things_are_counted():
    assert [counted(n, "run") for n in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]


def test_views_that_were_left_out_are_named():
    assert not list(left_out(3, np.array([True, True])))
    (line,) = left_out(3, np.array([True, False, True]))
    assert line.startswith("seed 3: left out view 1, whose")
    (line,) = left_out(0, np.array([False, True, True, False]))
    assert "left out views 0, 3, whose" in line
