"""The plan for an accelerator: what it writes, and that nothing ends it before its time."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import accelerator
from benchmarks.accelerator import COLUMNS, PIECES, Book, Job, Piece, go
from benchmarks.accelerator_pieces import OTHERWISE_COMPILED
from benchmarks.commands import BrokenError

ROOT = Path(__file__).parents[2]


def command(folder, *arguments):
    asked = [sys.executable, "-m", "benchmarks.accelerator", f"--output_dir={folder}", *arguments]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)


def written(folder):
    with open(folder / "results.csv", newline="") as lines:
        return list(csv.DictReader(lines))


class Plan:
    """Pieces that cost nothing; counts how often each was measured."""

    def __init__(self, **rows):
        self.jobs = []
        self.pieces = [Piece(name, "", (1, 1), self._measuring(of)) for name, of in rows.items()]

    def _measuring(self, of):
        def rows(job):
            self.jobs.append(job)
            yield from of(job) if callable(of) else of

        return rows

    def go(self, folder, **options):
        book = Book(folder, resume=True)
        book.about = {"device": "a device", "memory_gb": 2.0}
        go(self.pieces, book, **{"size": "small", "minutes": 1.0, "tell": print} | options)
        return book

    @property
    def measured(self):
        return [job.name for job in self.jobs]


OK = {"part": "x", "seconds": 2.0, "rate": 3.0, "rate_unit": "runs/s"}


# --- Whole commands -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_small_part_of_the_plan_and_again(tmp_path):
    asked = "--size=tiny", "--only=ceilings,tensors"
    first = command(tmp_path, *asked)
    assert first.returncode == 0, first.stderr
    rows = written(tmp_path)
    assert all(tuple(row) == COLUMNS for row in rows)
    assert {row["piece"] for row in rows} == {"ceilings", "tensors"}
    by_part = {row["part"]: row for row in rows}
    assert by_part["matmul tf32"]["status"] == "left out"
    del by_part["matmul tf32"]
    assert {row["status"] for row in by_part.values()} == {"ok"}
    assert all(float(row["seconds"]) > 0 for row in by_part.values())
    for name in ("Tucker, 2", "PARAFAC2, 2"):
        row = by_part[name]
        for column in ("flops", "bytes", "kernels", "predicted_MB", "compile_seconds", "share"):
            assert float(row[column]) > 0, column
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finished"] == ["ceilings", "tensors"]

    again = command(tmp_path, *asked)
    assert "PARAFAC2, 2" in again.stdout  # the table, and nothing else
    assert written(tmp_path) == rows


@pytest.mark.slow
def test_the_whole_small_plan(tmp_path):
    done = command(tmp_path, "--size=small", "--minutes=30")
    assert done.returncode == 0, done.stderr
    rows = written(tmp_path)
    assert {row["piece"] for row in rows} == {piece.name for piece in PIECES}
    failed = {row["piece"]: row["note"] for row in rows if row["status"] not in ("ok", "left out")}
    assert not failed or failed == {"torch": "ModuleNotFoundError: No module named 'torch'"}
    assert {row["part"] for row in rows if row["piece"] == "sweep"} >= {"all", "runs 1-5"}
    assert all(float(row["acc"]) > 0.15 for row in rows if row["data"] == "digits" and row["acc"])


@pytest.mark.parametrize("flag, text", [("--only=fmcsc,no", "only: got 'no'"), ("--chips=x", "")])
def test_bad_input_is_one_clear_line(tmp_path, flag, text):
    done = command(tmp_path / "new", flag, *(() if text else ("--predict",)))
    assert done.returncode != 0
    assert (text or "chips: got 'x'; allowed is name:float32") in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", OTHERWISE_COMPILED.values())
def test_options_of_the_compiler_have_names_that_it_knows(options):
    assert jax.jit(lambda: 1).lower().compile(options)() == 1
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda: 2).lower().compile({f"{next(iter(options))}_": True})


# --- The plan -------------------------------------------------------------------------------------


def test_what_was_measured_is_not_measured_again(tmp_path):
    plan = Plan(fmcsc=[OK | {"part": "run", "predicted_MB": 5.0}], sweep=[OK])
    plan.go(tmp_path)
    assert plan.measured == ["fmcsc", "sweep"]
    assert (plan.jobs[1].run_mb, plan.jobs[1].run_seconds) == (5.0, 2.0)
    book = plan.go(tmp_path)
    assert plan.measured == ["fmcsc", "sweep"]
    assert [row["seconds"] for row in book.rows] == [2.0, 2.0]


def test_a_piece_that_breaks_is_a_row_and_not_an_end(tmp_path):
    def missing(job):
        yield OK
        import no_such_package  # noqa: F401

    def full(job):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more lines")

    plan = Plan(torch=missing, mgcd=full, clients=[OK])
    book = plan.go(tmp_path)
    found = [(row["piece"], row["status"], row["note"]) for row in book.rows]
    assert found == [
        ("torch", "ok", None),
        ("torch", "failed", "No module named 'no_such_package'"),
        ("mgcd", "failed", "RESOURCE_EXHAUSTED: out of memory"),
        ("clients", "ok", None),
    ]
    plan.go(tmp_path)
    assert plan.measured == ["torch", "mgcd", "clients"]  # failed for good
    assert [row["status"] for row in written(tmp_path)] == ["ok", "failed", "failed", "ok"]


def test_what_does_not_fit_the_time_is_skipped_and_comes_next_time(tmp_path):
    plan = Plan(ceilings=[OK], fmcsc=[OK])
    book = plan.go(tmp_path, minutes=0.5 / 60)
    assert plan.measured == []
    assert [row["status"] for row in book.rows] == ["skipped"] * 2
    assert "of 1 s" in book.rows[0]["note"]
    book = plan.go(tmp_path)
    assert plan.measured == ["ceilings", "fmcsc"]
    assert [(row["piece"], row["status"]) for row in book.latest()] == [
        ("ceilings", "ok"),
        ("fmcsc", "ok"),
    ]


def test_a_piece_goes_on_after_the_parts_that_it_has(tmp_path):
    def parts(job):
        if not job.have:
            yield OK | {"part": "runs 1-2"}
            yield {"part": "all", "status": "skipped", "note": "no time"}
        else:
            yield OK | {"part": "all"}

    plan = Plan(sweep=parts)
    plan.go(tmp_path)
    book = plan.go(tmp_path)
    assert plan.jobs[1].have == {"runs 1-2": 2.0}
    assert [row["status"] for row in book.latest()] == ["ok", "ok"]
    assert book.finished == ["sweep"]


def test_a_piece_that_is_late_is_tried_again(tmp_path):
    def late(job):
        raise BrokenError("stopped", late=True)
        yield

    plan = Plan(mgcd=late)
    assert plan.go(tmp_path).rows[0]["status"] == "skipped"
    plan.go(tmp_path)
    assert plan.measured == ["mgcd", "mgcd"]


def test_a_torn_line_is_left_out(tmp_path):
    plan = Plan(ceilings=[OK], fmcsc=[OK])
    plan.go(tmp_path)
    file = tmp_path / "results.csv"
    file.write_text(file.read_text() + "sweep,runs")
    assert len(Plan().go(tmp_path).rows) == 2
    assert len(written(tmp_path)) == 2


def test_a_table_of_another_kind_is_refused(tmp_path):
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"output_dir: got .*other columns"):
        Book(tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"output_dir: got .*can be written"):
        Book(tmp_path / "results.csv" / "x", resume=True)


def test_a_folder_is_of_one_device_and_one_size(tmp_path, monkeypatch):
    found = {"part": "", "status": "ok", "device": "a device", "platform": "gpu", "memory_gb": 9.0}
    monkeypatch.setattr(accelerator, "own", lambda job: [dict(found)])
    book = Plan(fmcsc=[OK]).go(tmp_path, size="full")
    assert accelerator.device_of(book, "auto")[1] == "full"
    assert book.about["memory_gb"] == 9.0
    with pytest.raises(ValueError, match="results of a device, size full; allowed is another"):
        accelerator.device_of(book, "small")
    found["device"] = "another"
    with pytest.raises(ValueError, match="allowed is another folder for another, size full"):
        accelerator.device_of(book, "auto")


def test_shares_are_of_the_ceilings(tmp_path):
    ceilings = [
        {"part": "matmul float32", "rate": 1e9, "seconds": 1.0},
        {"part": "memory", "rate": 1e6, "seconds": 1.0},
        {"part": "launch", "seconds": 1e-3},
    ]
    work = {"precision": "float32", "flops": 1e9, "bytes": 4e6, "kernels": 10.0, "seconds": 8.0}
    book = Plan(ceilings=ceilings, fmcsc=[{"part": "run"} | work]).go(tmp_path)
    row = book.rows[-1]
    assert (row["roofline_seconds"], row["limit"], row["share"]) == (4.0, "memory", 0.5)


# --- Processes ------------------------------------------------------------------------------------


def test_a_piece_finds_the_benchmark_that_it_measures_beside():
    # Both have the flag --authors, and the piece `torch`, which few machines can run, imports one
    # into the other.
    from benchmarks import fmcsc

    assert "authors" in fmcsc.FLAGS and fmcsc.FLAGS is accelerator.FLAGS


def test_jobs_travel_as_json():
    job = Job("sweep", "full", 3.0, None, {"runs 1-25": 2.0}, 104.0)
    assert Job(**json.loads(json.dumps(job._asdict()))) == job


def test_every_size_has_the_same_entries():
    assert {frozenset(plan) for plan in accelerator.PLANS.values()} == {
        frozenset(accelerator.PLANS["full"])
    }
