"""What the documentation shows of our tables is what the rows give."""

import os
import re
import subprocess
import sys

import pandas as pd
import pytest

from experiments import published, reproduce, run
from tests.helpers import binaries


def test_every_table_is_that_of_its_rows():
    code, out, err = binaries.launch(reproduce.main, "--check")
    assert code == 0, out + err
    assert "40 tables, 33 files of rows: 0 errors" in out
    assert "table1_runs.csv: rows without seconds" in out and "no whole run of" in out


@pytest.mark.parametrize("name", ["unsupervised.csv", "unsupervised_generated.csv"])
def test_what_vertcohirf_reaches_without_labels_is_said_as_measured(name):
    runs = published.unsupervised.read(published.VERTCOHIRF / name)
    table = published.unsupervised.summary(runs)
    mean, best = ((table["ari"] >= table[name]).sum() for name in ("local_mean", "local_best"))
    page = (published.ROOT / "docs/methods/vertcohirf.md").read_text()
    assert f"on {mean} of {len(table)} sets, at or above the best agent on {best}" in page


@pytest.mark.parametrize(
    "page", sorted((published.ROOT / "docs/methods").glob("*.md")), ids=lambda page: page.stem
)
def test_a_table_has_a_header_for_each_column(page):
    # A bar inside code, or behind a backslash, divides nothing.
    lines = re.sub(r"`[^`\n]*`|\\\|", "", page.read_text(encoding="utf-8")).splitlines()
    width = 0
    for line in lines:
        cells = line.count("|") if line.startswith("|") else 0
        assert not cells or not width or cells == width, line
        width = cells


def ablation():
    (shown,) = (shown for shown in published.SHOWN if shown.mark == "FMCSC, ablation")
    return shown


def test_a_page_that_shows_another_number_or_a_line_too_many_is_named():
    first, *rest = ablation().lines()
    said = list(published.absent(ablation()._replace(lines=lambda: ["| a | .999 |", *rest])))
    assert said == [
        "docs/results.md, FMCSC, ablation: the rows give '| a | .999 |'",
        f"docs/results.md, FMCSC, ablation: the rows do not give {first!r}",
    ]
    (said,) = published.absent(ablation()._replace(lines=lambda: [*rest, first]))
    assert said.endswith("another order")


def test_pieces_of_lines_stand_anywhere_on_a_page():
    pieces = ["no weights (ABC) |*| .854 |", "no weights (ABC) |*| .855 |"]
    shown = ablation()._replace(lines=lambda: pieces, whole=False)
    assert [".855" in line for line in published.absent(shown)] == [True]


def test_tables_are_written_below_their_heads(tmp_path, monkeypatch):
    page = "a\n<!-- t: begin -->\n| x |\n|---|\n| 1 |\n| 2 |\n<!-- t: end -->\nb\n"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "p.md").write_text(page)
    shown = published.Shown("p.md", "t", lambda: ["| 3 |"])
    monkeypatch.setattr(published, "ROOT", tmp_path)
    monkeypatch.setattr(published, "SHOWN", (shown,))
    published.write()
    assert shown.path.read_text() == page.replace("| 1 |\n| 2 |", "| 3 |")
    assert not list(published.absent(shown))
    with pytest.raises(ValueError, match="no table between <!-- u: begin -->"):
        published.around(page, "u")


@pytest.mark.parametrize(
    ("commands", "seeds", "said"),
    [
        (("--seed=0 --tau=1", "--tau=1 --seed=1 --seeds=1"), "01", None),
        (("--seed=0 --tau=1", "--seed=1 --tau=2"), "01", "unlike settings: --tau=1; --tau=2"),
        (("--tau=1", "--tau=1"), "00", "a seed occurs twice"),
    ],
)
def test_a_cell_has_one_setting_and_each_seed_once(commands, seeds, said, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "ROOT", tmp_path)
    path = tmp_path / "runs.csv"
    pd.DataFrame({"set": "a", "seed": list(seeds), "command": commands}).to_csv(path, index=False)
    found = list(published.mixed(published.Rows(path, ("set",))))
    assert found == ([] if said is None else [f"runs.csv, a: {said}"])


def test_a_run_that_failed_is_in_no_mean_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "ROOT", tmp_path)
    path = tmp_path / "runs.csv"
    for status, said in (("failed: NaN", ["runs.csv, a: 1 of 2 runs failed"]), ("refused: x", [])):
        table = pd.DataFrame({"set": "a", "seed": [0, 1], "status": ["ok", status]})
        table.to_csv(path, index=False)
        assert list(published.mixed(published.Rows(path, ("set",)))) == said


def test_rows_of_papers_that_nobody_has_run_are_listed(tmp_path, monkeypatch):
    """Their own methods are left out, and what ran with a share of the training is said so."""
    monkeypatch.setattr(published, "ROOT", tmp_path)
    cells = pd.MultiIndex.from_tuples(
        ("a", x, method) for x in ("1:1", "2:1") for method in ("FMCSC", "MFLVC", "LMVSC")
    )
    paper = pd.DataFrame({"acc": 0.5}, index=cells)
    whole, short = [("a", "1:1", "lmvsc")], [("a", "1:1", "mflvc"), ("a", "2:1", "lmvsc")]
    for name, ran in (("fmcsc", (whole, short)), ("mgcd", (whole + short, []))):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(published, name.upper(), tmp_path / name)
        for file, rows in zip(("peers.csv", "peers_short.csv"), ran, strict=True):
            table = pd.DataFrame(rows, columns=["set", "x", "method"])
            table.to_csv(tmp_path / name / file, index=False)
    monkeypatch.setattr(published, "published_fmcsc", lambda: paper)
    monkeypatch.setattr(published.mgcd, "published_peers", lambda: paper)
    assert list(published.missing()) == [
        "fmcsc/peers.csv, a 1:1: no whole run of MFLVC (a tenth was run)",
        "fmcsc/peers.csv, a 2:1: no whole run of MFLVC, LMVSC (a tenth was run)",
        "mgcd/peers.csv, a 2:1: no whole run of MFLVC",
    ]


def test_errors_are_pages_and_mixed_cells_and_not_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(published, "SHOWN", ("p",))
    monkeypatch.setattr(published, "ROWS", ("r",))
    for name in ("absent", "mixed", "unsaid"):
        monkeypatch.setattr(published, name, lambda of, name=name: [f"{name} of {of}"])
    monkeypatch.setattr(published, "missing", lambda: ["a cell"])
    assert published.check() == 2
    assert capsys.readouterr().out.splitlines() == [
        "1 tables, 1 files of rows: 2 errors",
        "  absent of p",
        "  mixed of r",
        "missing, which is no error: 2",
        "  unsaid of r",
        "  a cell",
    ]


def test_help_without_a_paper_tells_of_all_of_them(capsys):
    reproduce.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"--paper={paper} " in out for paper in ("fmcsc", "mgcd", "vertcohirf"))
    assert "--check" in out


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (reproduce.main, ["--check"]),
        (reproduce.main, ["--paper=mgcd", "--help"]),
        (run.main, ["--help"]),
    ],
)
def test_a_reader_that_leaves_is_no_error(main, arguments, monkeypatch, capfd):
    """Nor is it one when Python flushes what is left, as it does at its end."""
    for name in ("SHOWN", "ROWS"):
        monkeypatch.setattr(published, name, ())
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit, match=r"^1$"):
            main(arguments)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", ["reproduce --check", "reproduce --paper=mgcd --help", "run --help"]
)
def test_a_reader_that_leaves_gets_no_traceback(arguments):
    command = [sys.executable, "-m", *f"experiments.{arguments}".split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=published.ROOT, text=True, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 1
