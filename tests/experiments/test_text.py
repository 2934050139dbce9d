"""How numbers and views are written, and how lines fit a terminal."""

import io
import math
import sys

import numpy as np
import pandas as pd
import pytest

from experiments.lib.text import (
    counted,
    digits,
    in_lines,
    left_out,
    megabytes,
    spread,
    table_lines,
    width_of_terminal,
    wrapped,
)


def test_a_mean_stands_with_its_deviation_where_there_is_one():
    assert spread(0.5, 0.25) == "0.500 +- 0.250"
    assert spread(0.5, math.nan) == "0.500"
    assert spread(math.nan, math.nan) == "-"


def test_numbers_have_few_digits_and_no_exponents():
    shown = [digits(x) for x in (0.0, 9.2e-05, 0.051549, 1, 25.26, 1767.2, 2e9, math.inf, math.nan)]
    assert shown == ["0", "0.000092", "0.0515", "1", "25.3", "1767", "2000000000", "inf", "nan"]
    assert digits(123456, 4) == "123456"


def test_no_bytes_are_told_from_few():
    shown = [megabytes(n) for n in (0, 1, 9_200, 12_345, 3_000_000)]
    assert shown == ["0", "1e-06", "0.0092", "0.012", "3.000"]


def test_things_are_counted():
    assert [counted(n, "run") for n in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]


def test_views_that_were_left_out_are_named():
    assert not list(left_out(3, np.array([True, True])))
    (line,) = left_out(3, np.array([True, False, True]))
    assert line.startswith("seed 3: left out view 1, whose")
    (line,) = left_out(0, np.array([False, True, True, False]))
    assert "left out views 0, 3, whose" in line


@pytest.mark.parametrize("columns", ["40", "200"])
def test_a_pipe_gets_whole_lines_whatever_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert width_of_terminal() is None
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert width_of_terminal() == int(columns)


@pytest.mark.parametrize("width", [None, 5, 30, 44, 200])
def test_a_table_loses_no_number_at_any_width(width):
    """Cells 0 to 11 of six columns under two headings, which take 38 characters each."""
    names = pd.MultiIndex.from_product([["first kind", "second"], ["A", "B", "C"]])
    cells = np.array([f"{i:010d}" for i in range(12)]).reshape(2, 6)
    table = pd.DataFrame(cells, ["x", "yy"], names)
    lines = table_lines(table, width)
    found = [word for line in lines for word in line.split() if word.isdigit()]
    assert sorted(found) == sorted(cells.flat)
    blocks = "\n".join(lines).split("\n\n")
    assert len(blocks) == {None: 1, 5: 6, 30: 4, 44: 2, 200: 1}[width]
    if len(blocks) == 1:
        assert lines == table.to_string().splitlines()
    for block in blocks:  # each names its rows and what its columns are of
        heads, _, *rows = block.splitlines()
        assert heads.split() and [row.split()[0] for row in rows] == ["x", "yy"]
    assert width in (None, 5) or max(map(len, lines)) <= width


def test_blocks_that_do_not_fit_go_to_a_line_of_their_own():
    blocks = ["lead", "a" * 6, "b" * 6, "c" * 30, "d"]
    assert in_lines(blocks) == [[1, 2, 3, 4]]
    assert in_lines(blocks, 16) == [[1, 2], [3], [4]]
    assert in_lines(blocks, 15) == [[1], [2], [3], [4]]


def test_texts_are_wrapped_behind_their_indentation():
    text = "  fmcsc: " + "word " * 9 + "end"
    assert wrapped(text) == [text]
    lines = wrapped(text, 25)
    assert max(map(len, lines)) <= 25 and " ".join(" ".join(lines).split()) == text.strip()
    assert lines[0].startswith("  fmcsc") and all(line.startswith(" " * 6) for line in lines[1:])
