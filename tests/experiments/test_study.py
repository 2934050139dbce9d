"""Studies that are killed go on to the same rows."""

import os
import sys

import jax
import numpy as np
import pandas as pd
import pytest

from experiments.leakage import __main__ as leakage
from experiments.leakage.samples import SampleAttacks
from experiments.lib import folder
from experiments.lib.study import Rows
from experiments.robustness import __main__ as robustness
from experiments.vertcohirf import attack
from tests.helpers import binaries, kills, pictures

KILLS = 12
ATTACK = ("--samples=24", "--trials=5", "--batch=2", "--attack_max_iter=2", "--sigmas=0.1,1")
LEAKAGE = (
    "--algorithm=latents,label_consensus",
    "--seeds=2",
    "--leak_fit_epochs=2",
    "--leak_insiders=.4",
)
ROBUSTNESS = ("--algorithm=vertcohirf", "--hostile_shares=.3", "--seeds=2", "--agent_samples=40")
# Main, its flags, its file of rows, and after how many of them it breaks off.
STUDIES = {
    "attack": (attack.main, ATTACK, "trials.csv", 9),
    "leakage": (leakage.main, LEAKAGE, "runs.csv", 3),
    "robustness": (robustness.main, ROBUSTNESS, "runs.csv", 7),
}


@pytest.fixture(scope="module", autouse=True)
def unpainted():
    with pictures.unpainted():
        yield


@pytest.fixture
def toy(tmp_path):
    """Two views of three well separated groups."""
    rng = np.random.default_rng(0)
    labels = np.arange(60) % 3
    views = {f"view_{v}": rng.normal(size=(60, 4)) + 8 * np.eye(4)[labels] for v in range(2)}
    np.savez(tmp_path / "toy.npz", labels=labels, **views)
    return tmp_path / "toy.npz"


def rows_of(path):
    """Rows without what depends on the clock."""
    return pd.read_csv(path).drop(columns="seconds")


def test_rows_are_made_once(tmp_path):
    path = tmp_path / "runs.csv"
    made, ticks = [], []

    def run(seed):
        made.append(seed)
        return {"acc": seed / 3, "note": ""}

    names = {"form": "2 bits, summed", "share": 0.1 + 0.2}
    rows = Rows(path, [*names])
    rows.make(names, run, [0, 1], None, lambda: ticks.append(0))
    with path.open("a") as file:
        file.write('"2 bits, summed",0.30000000000000004,2,0.6')  # killed while it was written
    rows = Rows(path, [*names])
    assert rows.left(names, [0, 1, 2]) == [2] and rows.left({**names, "share": 0.3}, [0]) == [0]
    rows.make(names, run, [0, 1, 2], None, lambda: ticks.append(0))
    rows.add({**names, "seed": 1, "acc": 0.0, "note": "again"})
    assert made == [0, 1, 2] and len(ticks) == 3
    table = pd.read_csv(path)
    assert list(table["seed"]) == [0, 1, 2] and list(table["acc"]) == [0, 1 / 3, 2 / 3]
    with pytest.raises(ValueError, match=r"output_dir: .*runs\.csv' holds something else"):
        Rows(path, ["data"])


class Broken(BaseException):
    """Stands for a SIGKILL."""


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [pytest.param("attack", marks=pytest.mark.slow), "leakage", "robustness"]
)
def test_a_study_that_breaks_off_goes_on_with_its_rows(name, toy, tmp_path, monkeypatch):
    main, arguments, file, n = STUDIES[name]
    # Its training compiles longest, and tests of the attack itself run it.
    monkeypatch.setattr(SampleAttacks, "of_latents", lambda self, dealt, seed: {"nmi": seed / 3})
    arguments = (*arguments, "--noprogress", "--compilation_cache=")
    arguments += () if name == "attack" else (f"--dataset={toy}",)
    whole, again = tmp_path / "whole", tmp_path / "again"
    code, out, err = binaries.launch(main, *arguments, f"--output_dir={whole}")
    assert code == 0, err
    with monkeypatch.context() as patched:
        append, left = folder.append_rows, [n]

        def append_and_break(path, rows):
            append(path, rows)
            left[0] -= 1
            if not left[0]:
                path.write_bytes(path.read_bytes()[:-9])  # the last row is not whole
                raise Broken

        patched.setattr(folder, "append_rows", append_and_break)
        with pytest.raises(Broken):
            binaries.launch(main, *arguments, f"--output_dir={again}")
    kept = (again / file).read_text().rpartition("\n")[0]
    assert kept.count("\n") == n - 1  # and the header
    code, _, err = binaries.launch(
        main, *arguments, f"--output_dir={again}", "--resume", "--seed=3"
    )
    assert code == 2 and "was begun with other flags: seed (0 then, 3 now)" in err
    code, resumed, err = binaries.launch(main, *arguments, f"--output_dir={again}", "--resume")
    assert code == 0, err
    assert (again / file).read_text().startswith(f"{kept}\n")
    pd.testing.assert_frame_equal(rows_of(again / file), rows_of(whole / file))
    assert resumed == out.replace(str(whole), str(again))
    assert sorted(os.listdir(again)) == sorted(os.listdir(whole))
    if name != "attack":
        np.savez(toy, **{part: x[:-1] for part, x in np.load(toy).items()})
        code, _, err = binaries.launch(main, *arguments, f"--output_dir={again}", "--resume")
        assert code == 2 and f"begun with other data: {toy} changed since" in err


def job(path, *arguments):
    """Begins the study of the folder or goes on: what runs in processes that are killed."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    resume = ["--resume"] * (path / "flags.txt").exists()
    with open(os.devnull, "w") as sys.stdout:
        attack.main([*arguments, f"--output_dir={path}", *resume])


@pytest.mark.slow
def test_killed_at_random_moments_a_study_ends_with_the_same_rows(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = (
        *ATTACK,
        "--trials=20",
        "--noprogress",
        f"--compilation_cache={tmp_path / 'cache'}",
    )
    kills.until_done(job, (whole, *arguments), 0, 0, whole / "trials.csv")
    lives = kills.until_done(job, (killed, *arguments), KILLS, 1, killed / "trials.csv", 0.01)
    assert sum(life.changes > 0 for life in lives[:-1]) > 2
    pd.testing.assert_frame_equal(rows_of(killed / "trials.csv"), rows_of(whole / "trials.csv"))
    assert len(rows_of(killed / "trials.csv")) == 2 * 3 * 20
