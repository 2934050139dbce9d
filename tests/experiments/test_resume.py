"""A job that is killed goes on to the same files."""

import json
import os
import shutil
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from experiments import run
from experiments.lib import runner
from jaxfedmvc import data
from jaxfedmvc.engine import checkpoint
from jaxfedmvc.engine.phases import RunState
from tests.helpers import binaries, kills, pictures

N_KILLS, ROUNDS, SEEDS = 3, 3, 2
HORIZONTAL = ("--n_clients=2", "--ratio=1:0")
TINY = (f"--rounds={ROUNDS}", f"--seeds={SEEDS}", "--n_clusters=3", "--noprogress")
NETWORKS = (
    "--hidden=",
    "--latent_dim=3",
    "--head_hidden=4",
    "--pretrain_epochs=2",
    "--local_epochs=2",
    "--distill_epochs=1",
    "--n_init=2",
    "--components=A",
)


def job(folder, *arguments):
    """Begins the job of the folder or goes on with it: what runs in processes that are killed."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    resume = ["--resume"] * (folder / "flags.txt").exists()
    with open(os.devnull, "w") as sys.stdout:
        run.main([*arguments, f"--output_dir={folder}", *resume])


@pytest.fixture(scope="module", autouse=True)
def unpainted():
    with pictures.unpainted():
        yield


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A file with forty digits in two views."""
    folder = tmp_path_factory.mktemp("data")
    views = {f"view_{v}": x[:40] for v, x in enumerate(data.load("digits").views[1:])}
    np.savez(folder / "digits.npz", labels=data.load("digits").labels[:40], **views)
    return folder / "digits.npz"


@pytest.fixture(scope="module")
def arguments(digits):
    """Flags of the job that is killed at random moments."""
    cache = f"--compilation_cache={digits.parent / 'cache'}"
    return (
        "--algorithm=e_fkmvc",
        "--tol=0",
        *HORIZONTAL,
        *TINY,
        f"--dataset={digits}",
        cache,
    )


@pytest.fixture(scope="module")
def undisturbed(arguments, tmp_path_factory):
    """The folder of a job that nobody killed; its programs are in the cache."""
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    lives = kills.until_done(job, (folder, *arguments), 0, 0, folder / "checkpoint.npz")
    assert [life.exit_code for life in lives] == [0]
    # After the setup and after each round, of every seed, as far as looking every 2 ms can tell.
    assert 1 <= lives[0].changes <= SEEDS * (ROUNDS + 1)
    return folder


def contents(folder):
    """Names, and what must not depend on kills."""
    summary = json.loads((folder / "summary.json").read_text())
    assert min(summary.pop("seconds").values()) > 0
    names = sorted(path.name for path in folder.iterdir())
    texts = [(folder / name).read_bytes() for name in ("rounds.csv", "labels.csv", "flags.txt")]
    return names, json.dumps(summary), texts


@pytest.mark.ci
def test_killed_at_random_moments_the_job_ends_with_the_same_bytes(
    arguments, undisturbed, tmp_path
):
    folder = tmp_path / "out"
    lives = kills.until_done(job, (folder, *arguments), N_KILLS, 3, folder / "checkpoint.npz")
    assert contents(folder) == contents(undisturbed)
    changes = [life.changes for life in lives[:-1]]
    # Some were killed before they had got on, and some between rounds and inside of them.
    assert len(changes) <= N_KILLS and 0 in changes and any(changes), changes


@pytest.fixture
def broken_off(undisturbed, tmp_path):
    """The folder of a job that has not come to its end, with a damaged checkpoint."""
    folder = tmp_path / "out"
    shutil.copytree(undisturbed, folder)
    (folder / "summary.json").unlink()
    (folder / "checkpoint.npz").write_bytes(b"PK")
    return folder


def refusal(folder, *arguments):
    """The one line of a job that will not go on; the folder stays as it is."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, out, err = binaries.launch(run.main, *arguments, "--resume")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


@pytest.mark.ci
def test_other_flags_are_refused_by_name(arguments, broken_off):
    err = refusal(
        broken_off,
        *arguments,
        "--hkc=absmean",
        "--fuzzifier=1.5",
        "--resample_participants",
        "--samples_per_client=9",
        f"--output_dir={broken_off}",
    )
    assert (
        "was begun with other flags: fuzzifier (1.05 then, 1.5 now), hkc (bandwidth then,"
        " absmean now), resample_participants (false then, true now), samples_per_client (none"
        " then, 9 now);"
    ) in err


@pytest.mark.ci
def test_flags_that_change_no_result_may_differ(arguments, broken_off):
    """So that it gets as far as the checkpoint."""
    err = refusal(
        broken_off,
        *arguments,
        "--checkpoint_every=3",
        "--data_dir=elsewhere",
        "--compilation_cache=",
        f"--output_dir={broken_off}",
    )
    assert f"{broken_off / 'checkpoint.npz'}: no checkpoint, or a damaged one" in err


@pytest.mark.ci
def test_other_data_are_refused_by_name(arguments, broken_off, digits):
    """A row is gone; a folder of before, without fingerprints, gets as far as the checkpoint."""
    name = str(digits)
    assert list(json.loads((broken_off / "data.json").read_text())) == [name]
    flags = (*arguments, f"--output_dir={broken_off}")
    assert "no checkpoint, or a damaged one" in refusal(broken_off, *flags)
    kept = digits.read_bytes()
    arrays = dict(np.load(digits))
    try:
        np.savez(digits, **{part: x[:-1] for part, x in arrays.items()})
        err = refusal(broken_off, *flags)
        assert f"resume: '{broken_off}' was begun with other data: {name} changed since" in err
        (broken_off / "data.json").unlink()
        assert "no checkpoint, or a damaged one" in refusal(broken_off, *flags)
    finally:
        digits.write_bytes(kept)


def test_nothing_to_resume(arguments, tmp_path):
    assert "resume: needs --output_dir" in refusal(tmp_path, *arguments)
    err = refusal(tmp_path, *arguments, f"--output_dir={tmp_path}")
    assert f"resume: '{tmp_path}' holds no job (no flags.txt)" in err
    absent = tmp_path / "absent"
    assert "holds no job" in refusal(tmp_path, *arguments, f"--output_dir={absent}")


@pytest.mark.ci
def test_a_finished_job_is_left_alone(arguments, undisturbed):
    """Also where it was killed before it could remove its checkpoint."""
    before = contents(undisturbed)
    (undisturbed / "checkpoint.npz").write_bytes(b"")
    code, out, err = binaries.launch(
        run.main, *arguments, f"--output_dir={undisturbed}", "--resume"
    )
    assert (code, err) == (0, "")
    assert out == f"finished already, nothing is left to do: {undisturbed}/\n"
    assert contents(undisturbed) == before


@pytest.mark.ci
def test_flags_txt_says_nothing_of_resuming(undisturbed):
    text = (undisturbed / "flags.txt").read_text()
    assert "resume" not in text and "output_dir" not in text and "--checkpoint_every=1" in text


class Broken(BaseException):
    """Stands for a SIGKILL right after a checkpoint."""


def break_after(monkeypatch, *numbers):
    """Breaks a job off after checkpoints with these numbers, of all that are saved."""
    save, n_saves = checkpoint.save, []

    def save_and_break(*saved):
        save(*saved)
        n_saves.append(saved)
        if len(n_saves) in numbers:
            raise Broken

    monkeypatch.setattr(checkpoint, "save", save_and_break)


# Command lines; those of compacting jobs save arrays that have shrunk meanwhile.
JOBS = {
    "fmcsc": ("--algorithm=fmcsc", *HORIZONTAL, *NETWORKS),
    "drawn anew": ("--algorithm=e_fkmvc", *HORIZONTAL, "--tol=0", "--resample_participants"),
    "secure": (
        "--algorithm=e_fkmvc",
        *HORIZONTAL,
        "--tol=0",
        "--secure_aggregation",
        "--in_clear=setup[2]",
    ),
    "mgcd": ("--algorithm=mgcd", "--n_neighbours=4", "--latent_dim=4", "--n_init=2"),
    "vertcohirf, compacting": ("--algorithm=vertcohirf", "--feature_share=0.3"),
    "vertcohirf, masked": ("--algorithm=vertcohirf", "--feature_share=0.3", "--nocompact"),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.slow
def test_every_kind_of_job_goes_on(name, digits, tmp_path, monkeypatch):
    arguments = (*JOBS[name], *TINY, f"--dataset={digits}", "--compilation_cache=")
    whole, again = (f"--output_dir={tmp_path / folder}" for folder in ("whole", "again"))
    assert binaries.launch(run.main, *arguments, whole)[0] == 0
    break_after(monkeypatch, 2, 6)  # within the first seed, and within the second
    for resume in ((), ("--resume",)):
        with pytest.raises(Broken):
            binaries.launch(run.main, *arguments, again, *resume)
    assert binaries.launch(run.main, *arguments, again, "--resume")[0] == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")


def stored(folder):
    """A job without programs, whose checkpoint lies in a folder."""
    job = object.__new__(runner._Runner)
    state = RunState(jnp.arange(3.0), (jnp.ones((2, 1)),), (np.array([0, 1]),))
    settings = SimpleNamespace(job=SimpleNamespace(seed=4, keep_from=None))
    job.job = SimpleNamespace(command=settings)
    job.path, job.store, job.compacts = folder, folder / "checkpoint.npz", False
    job.steps = SimpleNamespace(state_shapes=lambda: state)
    job.report = SimpleNamespace(references=[], seconds={"compile": 0.0, "run": 0.0})
    return job, state


def test_what_a_checkpoint_holds_is_taken_up_again(tmp_path):
    """Seconds, too, to which those of the rest are added; labels are of seeds that ended."""
    job, state = stored(tmp_path)
    labels, ended = tmp_path / "labels.csv", "seed,row,cluster\n4,0,1\n"
    meta = {"seed": 5, "made": 2, "rows": [{"round": 1}], "references": [{"a": 1}]}
    meta |= {"seconds": {"compile": 7.0, "run": 8.0}, "labels": len(ended)}
    checkpoint.save(job.store, state, meta)
    labels.write_text(ended + "5,0,1\n5,1")
    seed, made, found, rows = job._reopened()
    assert (seed, made, rows, labels.read_text()) == (5, 2, meta["rows"], ended)
    assert (job.report.references, job.report.seconds) == (meta["references"], meta["seconds"])
    jax.tree.map(np.testing.assert_array_equal, found, state)
    gone = r"labels\.csv' is not as it was when seed 5 began; allowed"
    for damaged, told in (
        (None, gone),
        (b"", gone),
        (ended[:-3].encode(), gone),
        (ended.replace("4,0,1", "4,0,11").encode(), gone),
        (b"a,b\n1,2\n", r"labels\.csv holds something else than this version writes: lacks seed"),
        (b"seed,a\nx,2\n", r"labels\.csv has seeds that are no numbers"),
        (b"\xff\xfe\x00\n", r"labels\.csv is no \.csv \('utf-8' codec"),
        (b"seed,a\n0,1\n0,1,2\n", r"labels\.csv is no \.csv \(Error tokenizing"),
    ):
        labels.unlink() if damaged is None else labels.write_bytes(damaged)
        with pytest.raises(ValueError, match=told):
            job._reopened()


def test_without_a_checkpoint_a_job_begins_anew(tmp_path):
    """What a seed left before it could be saved goes, or its rows would be there twice."""
    job, _ = stored(tmp_path)
    (tmp_path / "labels.csv").write_text("seed,row,cluster\n4,0,1\n")
    assert job._reopened() == (4, 0, None, [])
    assert not (tmp_path / "labels.csv").exists()


@pytest.mark.ci
def test_a_job_that_compacts_goes_on_after_its_last_round(digits, tmp_path, monkeypatch):
    """It makes no round any more, and still tells the bytes of the last, of the rows left then."""
    arguments = (*JOBS["vertcohirf, compacting"], *TINY, "--seeds=1", f"--dataset={digits}")
    arguments += ("--rounds=2", "--local_clusters=2", "--repetitions=1")
    whole, again = (f"--output_dir={tmp_path / folder}" for folder in ("whole", "again"))
    assert binaries.launch(run.main, *arguments, whole)[0] == 0
    rounds = pd.read_csv(tmp_path / "whole" / "rounds.csv")
    assert rounds["bytes_up"].iloc[-1] < rounds["bytes_up"].iloc[0]
    break_after(monkeypatch, 1 + len(rounds))
    with pytest.raises(Broken):
        binaries.launch(run.main, *arguments, again)
    assert binaries.launch(run.main, *arguments, again, "--resume")[0] == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    summary = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert summary["bytes_per_round"] == {
        way: rounds[f"bytes_{way}"].iloc[-1] for way in ("up", "down")
    }


@pytest.mark.ci
def test_rows_of_seeds_that_ended_are_there_or_the_job_does_not_go_on(
    arguments, undisturbed, tmp_path, monkeypatch
):
    """As where the power failed: what was saved last may be there, and not what was before."""
    folder = tmp_path / "out"
    flags = (*arguments, f"--output_dir={folder}")
    break_after(monkeypatch, ROUNDS + 3)  # within the second seed
    with pytest.raises(Broken):
        binaries.launch(run.main, *flags)
    labels = folder / "labels.csv"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-3])
    code, _, err = binaries.launch(run.main, *flags, "--resume")
    assert code == 2 and err.count("\n") == 1, err
    assert "labels.csv' is not as it was when seed 1 began; allowed" in err
    labels.write_bytes(whole + b"1,0,")  # which a kill leaves
    assert binaries.launch(run.main, *flags, "--resume")[0] == 0
    assert contents(folder) == contents(undisturbed)


@pytest.mark.ci
def test_a_seed_ends_when_its_clusters_stay_as_they_are(digits, tmp_path, monkeypatch):
    """Broken off after its second round, it goes on to the same end."""
    arguments = (
        "--algorithm=local_fmcsc",
        *HORIZONTAL,
        "--hidden=",
        "--latent_dim=3",
        "--head_hidden=4",
        "--pretrain_epochs=2",
        "--local_epochs=2",
        "--n_init=2",
        f"--dataset={digits}",
        "--n_clusters=3",
        "--noprogress",
        "--rounds=12",
        "--until_stable=0.9",
        "--learning_rate=1e-5",
    )
    whole, again = (f"--output_dir={tmp_path / folder}" for folder in ("whole", "again"))
    code, out, _ = binaries.launch(run.main, *arguments, whole)
    assert code == 0 and "still change" not in out and "ended by itself" in out
    break_after(monkeypatch, 3)
    with pytest.raises(Broken):
        binaries.launch(run.main, *arguments, again)
    assert binaries.launch(run.main, *arguments, again, "--resume")[0] == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    rounds = pd.read_csv(tmp_path / "whole" / "rounds.csv")
    stays = rounds["agreement"] >= 0.9
    assert 4 <= len(rounds) < 12 and stays[-3:].all() and not stays[-4:].all()
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["rounds_made"] == [len(rounds)] and summary["bytes_finish"] == {
        "up": 0,
        "down": 0,
    }
    code, out, _ = binaries.launch(
        run.main, *arguments, "--rounds=3", f"--output_dir={tmp_path / 'short'}"
    )
    assert code == 0
    assert "seed 0: clusters still change after all 3 rounds (--until_stable=0.9)" in out
    for name, why in (("mgcd", "finds its end itself"), ("label_consensus", "makes no rounds")):
        for flag, value in (("until_stable", "0.9"), ("keep_from", "1")):
            told = (f"--algorithm={name}", "--dataset=digits", f"--{flag}={value}", whole)
            code, _, error = binaries.launch(run.main, *told)
            assert code and f"{flag}: {name} {why}" in error


@pytest.mark.ci
def test_a_seed_keeps_the_round_whose_clusters_a_view_tells_most(digits, tmp_path, monkeypatch):
    """It ends as a run of that many rounds does, also where it was broken off."""
    arguments = ("--algorithm=fmcsc", *HORIZONTAL, *NETWORKS, f"--dataset={digits}")
    arguments += ("--n_clusters=3", "--noprogress", "--learning_rate=0.02", "--seed=4")
    keeps = (*arguments, "--rounds=4", "--keep_from=1")
    whole, again = (f"--output_dir={tmp_path / folder}" for folder in ("whole", "again"))
    code, out, err = binaries.launch(run.main, *keeps, whole)
    assert code == 0, err
    rounds = pd.read_csv(tmp_path / "whole" / "rounds.csv")
    kept = int(rounds["round"][rounds["information"].idxmax()])
    assert 1 < kept < 4  # as this seed has it: neither the first that may be nor the last
    assert f"seed 4: keeps round {kept} of 4" in out
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["rounds_kept"] == [kept] and summary["rounds_made"] == [4]
    n = 4 * summary["n_clients"]
    short = f"--output_dir={tmp_path / 'short'}"
    assert binaries.launch(run.main, *arguments, f"--rounds={kept}", short)[0] == 0
    labels = [(tmp_path / name / "labels.csv").read_bytes() for name in ("whole", "short")]
    assert labels[0] == labels[1]
    found = json.loads((tmp_path / "short" / "summary.json").read_text())
    for way, more in (("up", n * 4), ("down", n * 3)):  # sizes and a sum; shares
        both = found["bytes_per_round"][way] + found["bytes_finish"][way]
        assert summary["bytes_per_round"][way] == both + more
    break_after(monkeypatch, kept + 1)
    with pytest.raises(Broken):
        binaries.launch(run.main, *keeps, again)
    assert binaries.launch(run.main, *keeps, again, "--resume")[0] == 0
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_without_rounds_the_last_exchange_counts_all_the_same(digits, tmp_path):
    """With --until_stable every round counts it; there is none."""
    arguments = ("--algorithm=fmcsc", *HORIZONTAL, *NETWORKS, f"--dataset={digits}")
    arguments += ("--n_clusters=3", "--noprogress", "--rounds=0")
    sent = []
    for name, more in (("plain", ()), ("stable", ("--until_stable=0.9",))):
        folder = tmp_path / name
        code, _, err = binaries.launch(run.main, *arguments, *more, f"--output_dir={folder}")
        assert code == 0, err
        sent.append(json.loads((folder / "summary.json").read_text())["bytes_finish"])
    assert sent[0] == sent[1] and sent[0]["down"] > 0
