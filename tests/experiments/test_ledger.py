"""What a kill leaves of a sweep is taken up again, and no run counts that is not whole."""

import pytest

from experiments.lib.ledger import Ledger


def rows(*seeds):
    return [{"a": "x", "seed": seed} for seed in seeds]


@pytest.fixture
def kept(tmp_path):
    """The folder of three batches: two runs and one of a group, and one run of another."""
    ledger = Ledger(tmp_path)
    ledger.add(0, 2, rows(0, 1), 10.0, compiling=4.0)
    ledger.add(0, 1, rows(2), 5.0)
    ledger.add(1, 4, rows(3), 2.5, compiling=0.5)
    assert ledger.seconds == 17.5  # those of compilation, too
    return tmp_path


def lines(path):
    return path.read_text().splitlines()


def state(ledger):
    """Seeds of the runs that count, and what is kept of their groups."""
    done = [ledger.done(group) for group in (0, 1, 2)]
    return [int(row["seed"]) for row in ledger.rows], done, ledger.seconds, ledger.sizes


def test_runs_share_the_seconds_in_which_nothing_was_compiled(kept):
    assert lines(kept / "runs.csv") == [
        "a,seed,seconds",
        "x,0,3.0",
        "x,1,3.0",
        "x,2,5.0",
        "x,3,2.0",
    ]
    assert lines(kept / "batches.csv") == [
        "group,size,runs,seconds",
        "0,2,2,10.0",
        "0,1,1,5.0",
        "1,4,1,2.5",
    ]
    assert state(Ledger(kept)) == ([0, 1, 2, 3], [3, 1, 0], 17.5, {0: 1, 1: 4})


def test_a_batch_whose_runs_are_not_all_there_is_made_again(kept):
    """As where the power failed. Nothing after it counts, as runs stand in order of batches."""
    runs, batches = lines(kept / "runs.csv"), lines(kept / "batches.csv")
    (kept / "runs.csv").write_text("\n".join(runs[:3]) + "\nx,2,5")
    found = Ledger(kept)
    assert state(found) == ([0, 1], [2, 0, 0], 10.0, {0: 2})
    assert (lines(kept / "runs.csv"), lines(kept / "batches.csv")) == (runs[:3], batches[:2])
    found.add(0, 1, rows(2), 5.0)
    assert state(Ledger(kept)) == ([0, 1, 2], [3, 0, 0], 15.0, {0: 1})
    (kept / "runs.csv").write_text("\n".join(runs[:2]) + "\n")
    assert state(Ledger(kept)) == ([], [0, 0, 0], 0.0, {})
    assert not (kept / "runs.csv").exists() and not (kept / "batches.csv").exists()


@pytest.mark.parametrize("last", ["", "1,4", "1,4,1,2.", "1,4,1,2.5"])
def test_runs_count_once_the_line_of_their_batch_is_whole(kept, last):
    """A kill comes between the files, or within the line of the second one."""
    runs, batches = lines(kept / "runs.csv"), lines(kept / "batches.csv")
    (kept / "batches.csv").write_text("\n".join(batches[:3]) + "\n" + last)
    assert state(Ledger(kept)) == ([0, 1, 2], [3, 0, 0], 15.0, {0: 1})
    assert (lines(kept / "runs.csv"), lines(kept / "batches.csv")) == (runs[:4], batches[:3])


def test_a_size_that_was_chosen_counts_without_runs(tmp_path):
    Ledger(tmp_path).add(0, 8, [], 0.0)
    assert state(Ledger(tmp_path)) == ([], [0, 0, 0], 0.0, {0: 8})
    assert not (tmp_path / "runs.csv").exists()


def test_files_of_something_else_are_refused(kept):
    for name, text, told in (
        ("batches.csv", "group,size,runs\n0,2,2\n", "line 2 of .*batches.csv' is not one that a"),
        ("batches.csv", "group,size,runs,seconds\n0,2,two,1\n", "line 2 of .*batches.csv'"),
        ("runs.csv", "a,b\n1,2\n", "line 1 of .*runs.csv'"),
        ("batches.csv", None, "batches.csv' is gone, without which no row of runs.csv counts"),
    ):
        path, before = kept / name, (kept / name).read_text()
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(ValueError, match=told):
            Ledger(kept)
        path.write_text(before)
