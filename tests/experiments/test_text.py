"""How numbers and views are written."""

import math

import numpy as np

from experiments.lib.text import counted, left_out, spread


def test_a_mean_stands_with_its_deviation_where_there_is_one():
    assert spread(0.5, 0.25) == "0.500 +- 0.250"
    assert spread(0.5, math.nan) == "0.500"
    assert spread(math.nan, math.nan) == "-"


def test_things_are_counted():
    assert [counted(n, "run") for n in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]


def test_views_that_were_left_out_are_named():
    assert not list(left_out(3, np.array([True, True])))
    (line,) = left_out(3, np.array([True, False, True]))
    assert line.startswith("seed 3: left out view 1, whose")
    (line,) = left_out(0, np.array([False, True, True, False]))
    assert "left out views 0, 3, whose" in line
