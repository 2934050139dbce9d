"""What result folders and rows say of how they were made."""

import errno
import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.lib import folder
from experiments.lib.command import FolderSettings
from experiments.lib.data import fingerprint
from experiments.published import ROOT
from jaxfedmvc import data
from tests.helpers import locks


def test_rows_name_no_place_of_the_machine_that_made_them():
    presets = f"{ROOT}/experiments/fmcsc/presets"
    flags = ["--dataset=digits", "--data_dir=/somewhere", f"--flagfile={presets}/best.flags"]
    said = folder.made_by(flags)
    assert said["command"] == "--dataset=digits --flagfile=experiments/fmcsc/presets/best.flags"
    assert folder.made_by(["--grid=a=1; b=2", "--dirichlet=1"])["command"] == (
        "'--grid=a=1; b=2' --dirichlet=1"
    )
    assert said["jax"] == jax.__version__ and said["commit"] == folder.commit()


@pytest.mark.parametrize(
    ("asked", "told", "kept"),
    [
        (None, None, "~/.cache/jaxfedmvc"),
        (None, "told", "told"),
        ("asked", "told", "asked"),
        ("", "told", "told"),
        ("", None, None),
    ],
)
def test_programs_are_kept_where_the_flag_says_or_else_jax_was_told(asked, told, kept):
    command = SimpleNamespace(folder=FolderSettings(compilation_cache=asked))
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", told)
        folder.use_compilation_cache(command)
        found = jax.config.jax_compilation_cache_dir
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert found == (kept and os.path.expanduser(kept))


def test_a_row_that_a_kill_left_half_written_goes_before_the_next(tmp_path):
    path = tmp_path / "rows.csv"
    folder.append_rows(path, [{"a": 1, "b": 2}])
    path.write_text(path.read_text() + "3,")
    folder.append_rows(path, [{"a": 5, "b": 6}])
    assert path.read_text().split() == ["a,b", "1,2", "5,6"]
    path.write_text("a,")  # killed within the header
    folder.append_rows(path, [{"a": 5, "b": 6}])
    assert path.read_text().split() == ["a,b", "5,6"]
    with pytest.raises(folder.OtherColumnsError, match="lacks c; has b; give another file"):
        folder.append_rows(path, [{"a": 5, "c": 6}])


def test_a_table_of_another_version_ends_a_program_in_a_line(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    folder.check_columns(path, ["a", "b"])  # there is none yet
    path.write_text("a,b\n1,2\n")
    folder.check_columns(path, ["b", "a"])

    @folder.stoppable
    def program():
        folder.check_columns(path, ["a", "b", "c"])

    with pytest.raises(SystemExit) as ended:
        program()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"error: {path} holds something else than this version writes: lacks c; give another file"
        " or folder\n"
    )


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_another_process_writes_into_is_refused(tmp_path, resume):
    options = FolderSettings(output_dir=str(tmp_path / "out"), resume=resume)
    command = SimpleNamespace(folder=options, flags={}, flag_lines=lambda: ["--seeds=2"])
    with locks.held(tmp_path / "out"):
        if resume:
            (tmp_path / "out" / "flags.txt").write_text("--seeds=2\n")
        with pytest.raises(ValueError, match="output_dir: another process writes into"):
            folder.open_folder(command, "job")
    assert folder.open_folder(command, "job") == tmp_path / "out"
    assert (tmp_path / "out" / "flags.txt").read_text() == "--seeds=2\n"


def test_a_job_goes_on_with_its_data_alone(tmp_path):
    def opened(data, resume):
        options = FolderSettings(output_dir=str(tmp_path / "out"), resume=resume)
        command = SimpleNamespace(folder=options, flags={}, flag_lines=lambda: ["--seeds=2"])
        return folder.open_folder(command, "job", data)

    opened({"a": "1", "b": "2"}, False)
    assert opened({"a": "1", "b": "2"}, True) == tmp_path / "out"
    with pytest.raises(ValueError, match=r"was begun with other data: b changed since; allowed"):
        opened({"a": "1", "b": "3"}, True)
    for damaged in ("{", "3"):
        (tmp_path / "out" / "data.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"^resume: .*data\.json' does not hold the fingerp"):
            opened({"a": "1", "b": "2"}, True)
    (tmp_path / "out" / "data.json").unlink()  # as earlier versions left it
    assert opened({"a": "1", "b": "3"}, True) == tmp_path / "out"
    (tmp_path / "out" / "flags.txt").unlink()
    for left in ("runs.csv", "batches.csv", "rounds.csv"):  # rows of a job whose flags are lost
        (tmp_path / "out" / left).write_text("seed\n0\n")
        with pytest.raises(ValueError, match=r"holds results already; give another$"):
            opened({}, False)
        (tmp_path / "out" / left).unlink()
    assert opened({}, False) == tmp_path / "out"


def test_a_job_goes_on_with_its_flags_and_with_later_ones_at_their_defaults(tmp_path):
    """Versions bring flags: one that flags.txt lacks is as it was, unless it is given now."""
    (tmp_path / "flags.txt").write_text("--seeds=2\n--noprogress\n--resample\n--gone=1\n")
    defaults = {"seeds": "1", "later": "auto", "gone": "0", "resample": "false"}

    def refused(**now):
        values = defaults | {"seeds": "2", "resample": "true", "gone": "1"} | now
        command = SimpleNamespace(
            folder=FolderSettings(output_dir=str(tmp_path), resume=True),
            flags={n: SimpleNamespace(value=v, default=defaults[n]) for n, v in values.items()},
            flag_lines=lambda: [f"--{n}={v}" for n, v in values.items()] + ["--progress"],
        )
        try:
            assert folder.open_folder(command, "job") == tmp_path
        except ValueError as error:
            return str(error).partition("other flags: ")[2].partition(";")[0]

    assert refused() is None
    assert refused(later="1") == "later (none then, 1 now)"
    # At its default now, and not then.
    assert refused(seeds="1", gone="0") == "gone (1 then, 0 now), seeds (2 then, 1 now)"
    assert refused(resample="false") == "resample (true then, false now)"


def test_a_fingerprint_tells_values_shapes_and_ids_apart():
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    sets = [
        data.Dataset("a", (x,), None),
        data.Dataset("a", (x + (x == 5),), None),
        data.Dataset("a", (x.reshape(2, 3),), None),
        data.Dataset("a", (x[:, :1], x[:, 1:]), None),
        data.Dataset("a", (x,), np.arange(3)),
        data.Dataset("a", (x,), None, ids=np.arange(3)),
        data.Dataset("a", (x,), None, ids=np.array(["p", "q", "r"], object)),
        data.Dataset("a", (x,), None, ids=np.array(["p", "q", "s"], object)),
        data.Dataset("a", (x,), None, held=np.ones((3, 1), bool)),
    ]
    found = [fingerprint(one) for one in sets]
    assert len(set(found)) == len(sets)
    assert fingerprint(data.Dataset("b", (np.asfortranarray(x),), None)) == found[0]


def test_rows_that_are_kept_keep_their_text(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("seed,id,cluster\n0,NA,1\n0,007,2\n0,,3\n1,None,1\n1,x")
    folder.keep_rows(path, lambda table: table["seed"] < 1)
    assert path.read_text() == "seed,id,cluster\n0,NA,1\n0,007,2\n0,,3\n"
    path.write_text("seed,i")  # a kill left no whole header, so that none is there
    folder.keep_rows(path, lambda table: table["seed"] < 1)
    assert not path.exists()


def test_rows_of_a_cell_have_one_command_but_for_seeds_and_files():
    row = "--algorithm=lsimvc --seeds=1 --ratio=1:1 --peers_file=/a/b.csv --seed=4"
    assert folder.settings_of_row(row) == "--algorithm=lsimvc --ratio=1:1"
    quoted = folder.made_by(["--ratio=1:1", "--output_dir=/a b/c", "--dataset=d e.csv", "--seed=4"])
    assert folder.settings_of_row(quoted["command"]) == "--ratio=1:1 '--dataset=d e.csv'"


@pytest.mark.parametrize(("told", "kept"), [(1.0, 0.01), (5.0, 5.0)])
def test_small_programs_are_kept_too_unless_jax_was_told_otherwise(told, kept):
    command = SimpleNamespace(folder=FolderSettings(compilation_cache=""))
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    try:
        jax.config.update(name, told)
        folder.use_compilation_cache(command)
        assert getattr(jax.config, name) == kept
    finally:
        jax.config.update(name, before)


def test_a_stopped_job_says_whether_there_is_something_to_go_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "_held", {})
    assert folder.stopped() == "stopped before the job was begun"
    monkeypatch.setattr(folder, "_held", {tmp_path: None})
    for name in (".lock", "flags.txt", "data.json", "rounds.csv", ".checkpoint.npz.partial"):
        (tmp_path / name).touch()
    again = f"--resume with the same flags and --output_dir={tmp_path}"
    nothing = "stopped before anything was saved in its folder"
    assert folder.stopped() == f"{nothing}; {again} begins anew"
    (tmp_path / "checkpoint.npz").touch()

    @folder.stoppable
    def study():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match=f"^stopped; {again} goes on from there$"):
        study()


def test_a_full_disk_ends_a_job_in_one_line():
    @folder.stoppable
    def job(number):
        raise OSError(number, os.strerror(number))

    with pytest.raises(SystemExit, match=r"^error: output_dir: no room to write \(No space left"):
        job(errno.ENOSPC)
    with pytest.raises(OSError, match="Input/output error"):
        job(errno.EIO)
