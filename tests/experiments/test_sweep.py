"""The binary of sweeps: every method's flags are axes, and a killed sweep goes on."""

import csv
import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments import sweep
from experiments.lib import batches, groups, sweep_report
from experiments.lib.command import parse
from experiments.lib.hooks import Hooks
from jaxfedmvc.privacy import gaussian_epsilon
from tests.helpers import binaries, kills, pictures

KILLS = 20
FEDHK = (
    "--algorithm=e_fkmvc",
    "--n_clients=2",
    "--ratio=1:0",
    "--rounds=2",
    "--n_clusters=3",
    "--seeds=2",
    "--noprogress",
)
# Quick to compile; the axes are a number and a static setting.
KMEANS = ("--algorithm=local_kmeans", *FEDHK[1:])
GRID = "--grid=limit=2,3; n_init=1,2"


def launch(*arguments):
    return binaries.launch(sweep.main, *arguments)


@pytest.fixture(scope="module", autouse=True)
def unpainted():
    with pictures.unpainted():
        yield


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Flags of a small set of two views, and of a cache for programs."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    truth = np.arange(40) % 3
    views = {
        f"view_{v}": 3 * rng.normal(size=(3, 4))[truth] + rng.normal(size=(40, 4)) for v in (0, 1)
    }
    np.savez(folder / "toy.npz", labels=truth, **views)
    np.savez(folder / "unlabelled.npz", **views)
    return f"--dataset={folder / 'toy.npz'}", f"--compilation_cache={folder / 'cache'}"


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- A sweep that runs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(toy, tmp_path_factory):
    """Folder and output of a grid of two programs; its settings come from a preset."""
    folder = tmp_path_factory.mktemp("sweep")
    preset = folder / "preset.flags"
    preset.write_text("\n".join(("# as a job would have it", *KMEANS)))
    arguments = (f"--flagfile={preset}", *toy, GRID, "--batch=4", f"--output_dir={folder / 'out'}")
    code, out, err = launch(*arguments)
    assert (code, err) == (0, "")
    return folder / "out", out


@pytest.mark.ci
def test_every_setting_meets_every_seed_in_as_few_programs_as_can_be(swept):
    folder, _ = swept
    rows = rows_of(folder / "runs.csv")
    settings = [(row["limit"], row["n_init"], row["seed"]) for row in rows]
    # The two programs one after the other.
    assert settings == [(k, n, s) for n in "12" for k in "23" for s in "01"]
    assert {row["status"] for row in rows} == {"ok"}
    assert len({row["silhouette"] for row in rows}) >= 4
    assert {"rounds_made", "bytes_up", "silhouette", "multi_view/per_client/nmi"} <= set(rows[0])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["runs"] == 8 and summary["compilations_here"] == 2 and summary["failed"] == 0
    assert not [flag for flag in summary["command"] if flag.startswith("--output_dir")]


@pytest.mark.ci
def test_the_summary_is_mean_and_deviation_over_seeds(swept):
    folder, out = swept
    mine = [
        float(row["acc"])
        for row in rows_of(folder / "runs.csv")
        if (row["limit"], row["n_init"]) == ("2", "2")
    ]
    (entry,) = (
        row
        for row in rows_of(folder / "summary.csv")
        if (row["limit"], row["n_init"]) == ("2", "2")
    )
    assert float(entry["acc_mean"]) == pytest.approx(np.mean(mine))
    assert float(entry["acc_std"]) == pytest.approx(np.std(mine, ddof=1))
    assert "best by mean ACC (needs labels): limit=2, n_init=2: " in out
    assert "first by silhouette (no labels): limit=3, n_init=1: " in out
    names = {"runs.csv", "batches.csv", "summary.csv", "summary.json", "flags.txt"}
    names |= {"data.json", "heatmap.png", "report.html", ".lock"}
    assert {path.name for path in folder.iterdir()} == names


@pytest.mark.slow
def test_a_run_of_a_sweep_is_the_run_of_its_flags(toy, tmp_path):
    from experiments import run

    grid = ("--grid=beta=0.5,2; hkc=bandwidth,minmax", "--batch=4")
    code, _, err = launch(*FEDHK, *toy, *grid, f"--output_dir={tmp_path / 'swept'}")
    assert code == 0, err
    code, _, err = binaries.launch(
        run.main, *FEDHK, *toy, "--beta=2", "--hkc=minmax", f"--output_dir={tmp_path / 'out'}"
    )
    assert code == 0, err
    alone = [row for row in rows_of(tmp_path / "out" / "rounds.csv") if row["round"] == "2"]
    rows = rows_of(tmp_path / "swept" / "runs.csv")
    assert len({row["loss"] for row in rows}) >= 4
    mine = [row for row in rows if (row["beta"], row["hkc"]) == ("2", "minmax")]
    for one, other in zip(mine, alone, strict=True):
        shared = (one.keys() & other.keys()) - {"bytes_up", "bytes_down"}
        assert {"all/pooled/acc", "loss"} <= shared
        for name in shared:
            assert float(one[name]) == pytest.approx(float(other[name]), nan_ok=True, abs=1e-5)


@pytest.mark.slow
def test_what_it_takes_is_said_without_running(toy):
    code, out, err = launch(*KMEANS, *toy, GRID, "--dry_run")
    assert (code, err) == (0, "")
    first, _, header, *lines = out.splitlines()
    assert first == "8 runs, 2 programs" and header.split()[:2] == ["program", "runs"]
    assert [line.split()[:3] for line in lines] == [["0", "4", "4"], ["1", "4", "4"]]
    assert all(float(line.split()[4]) > 0 for line in lines)
    assert len({line.split()[5] for line in lines}) == 2  # what tells the programs apart


@pytest.mark.slow
def test_settings_are_drawn_from_ranges_and_need_no_labels(toy, tmp_path):
    dataset = toy[0].replace("toy.npz", "unlabelled.npz")
    folder = tmp_path / "out"
    code, out, err = launch(
        "--algorithm=local_kmeans",
        "--n_clusters=2",
        "--ratio=1:0",
        "--noprogress",
        dataset,
        toy[1],
        "--grid=n_clients=2,4; samples_per_client=8,10",
        "--random=3",
        "--batch=1",
        f"--output_dir={folder}",
    )
    assert code == 0, err
    rows = rows_of(folder / "runs.csv")
    assert len({(row["n_clients"], row["samples_per_client"]) for row in rows}) == len(rows) == 3
    assert {row["acc"] for row in rows} == {"nan"}
    assert np.isfinite([float(row["silhouette"]) for row in rows]).all()
    assert "best by mean ACC (needs labels): no setting has one" in out


def test_of_a_range_of_whole_numbers_its_values_are_drawn():
    command = parse(["--algorithm=fmcsc", "--dataset=digits"], algorithm="fmcsc")
    asked = sweep.SweepSettings(grid="local_epochs=lin(2,20,10); tau_m=lin(0,1,2)", random=8)
    axes, drawn = sweep.settings_of(command, asked)
    assert {setting["local_epochs"] for setting in drawn} <= set(axes[0].values)
    assert len({setting["tau_m"] for setting in drawn} - {"0", "1"}) == 8


def test_numbers_that_are_off_are_another_program():
    def command(*more):
        return parse([*FEDHK, "--dataset=digits", *more], algorithm="fmcsc")

    arguments = [["--tau_m=0.3"], ["--tau_m=0.5", "--upload_clip=1"], ["--tau_m=0.7"]]
    arguments = [[*a, "--algorithm=fmcsc"] for a in arguments]
    columns = [{"x": str(i)} for i in range(3)]
    found = groups.groups_of([command(*a) for a in arguments], columns, every_round=True)
    assert [[column["x"] for column in group.columns] for group in found] == [["0", "2"], ["1"]]
    assert found[0].n_clusters == 3 and found[0].every_round
    assert [len(group.runs) for group in found] == [4, 2]
    assert batches.Program(found[0]).compilations == 0


def test_what_looks_at_features_does_not_look_at_those_of_an_outline():
    """LSIMVC refuses a constant view, and an outline has zeros for features."""
    flags = ["--algorithm=lsimvc", "--dataset=digits", "--n_clients=3", "--ratio=1:0"]
    (found,) = groups.groups_of([parse(flags)], [{}])
    assert not any(np.any(view) for cohort in found.federation.cohorts for view in cohort.views)


def test_in_a_sweep_those_take_part_who_do_in_a_job():
    flags = ["--algorithm=fmcsc", "--dataset=digits", "--n_clients=12"]
    part = ["--participation=0.5,1", "--resample_participants"]
    whole, some = groups.groups_of([parse(flags), parse([*flags, *part])], [{}, {}])
    assert not whole.resample_participants and set(whole.participation) == {1}
    sizes = [cohort.n_clients for cohort in some.federation.cohorts]
    taking_part = np.multiply(some.participation, sizes)
    assert some.resample_participants and taking_part.tolist() == [3, 2, 2, 2]


def test_whole_numbers_that_mean_something_else_are_another_program():
    values = ("0.5", "1", "1.0")
    commands = [
        parse([f"--feature_share={v}", "--dataset=digits"], algorithm="vertcohirf") for v in values
    ]
    found = groups.groups_of(commands, [{"feature_share": v} for v in values])
    columns = [[column["feature_share"] for column in group.columns] for group in found]
    assert columns == [["0.5", "1.0"], ["1"]]  # shares, and a number of features


@pytest.mark.parametrize(
    ("algorithm", "more", "traced", "static"),
    [
        ("vertcohirf", ["--local_clusters=3"], "feature_share=0.5,1.0", "repetitions=1,2"),
        ("mgcd", ["--latent_dim=2", "--n_neighbours=5"], "ridge=0.1,10", "losses=r+s,r"),
    ],
)
@pytest.mark.slow
def test_vertical_methods_are_swept_alike(toy, tmp_path, algorithm, more, traced, static):
    code, _, err = launch(
        f"--algorithm={algorithm}",
        f"--grid={traced}; {static}",
        "--seeds=2",
        "--batch=4",
        "--noprogress",
        *toy,
        *more,
        f"--output_dir={tmp_path / 'out'}",
    )
    assert code == 0, err
    rows = rows_of(tmp_path / "out" / "runs.csv")
    assert len(rows) == 8 and {row["status"] for row in rows} == {"ok"}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["compilations_here"] == 2
    assert all(0.3 < float(row["acc"]) <= 1 for row in rows)
    assert all(3 <= float(row["clusters"]) <= 40 for row in rows)


@pytest.mark.slow
def test_two_processes_make_the_runs_of_one(toy, tmp_path):
    job = (
        *("--algorithm=local_kmeans", "--n_clients=4", "--ratio=1:0", "--noprogress"),
        *(*toy, "--grid=limit=2,3", "--seeds=3", "--batch=4"),
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        together = (f"--coordinator=127.0.0.1:{free.getsockname()[1]}", "--num_processes=2")
    mesh = ("--mesh=sweep:2", *together, f"--output_dir={tmp_path / 'two'}")
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(binaries.alone, "experiments.sweep", *job, *mesh, f"--process_id={i}")
            for i in range(2)
        ]
    for done in both:
        assert done.result()[0] == 0, done.result()[2]
    code, _, err = launch(*job, f"--output_dir={tmp_path / 'one'}")
    assert code == 0, err
    for one, two in zip(*(rows_of(tmp_path / n / "runs.csv") for n in ("one", "two")), strict=True):
        assert one.keys() == two.keys() and one["limit"] == two["limit"]
        for name in one.keys() - {"status", "seconds"}:
            assert float(one[name]) == pytest.approx(float(two[name]), nan_ok=True, abs=1e-5)


# --- Bad input ------------------------------------------------------------------------------------

WRONG = {
    ("--algorithm=nope",): "algorithm: got 'nope'; allowed are comvc, coreset_kmeans, ",
    ("--grid=tau_x=1",): "has no setting 'tau_x'; did you mean 'tau'? allowed are fuzzifier,",
    ("--grid=seeds=1,2",): "e_fkmvc has no setting 'seeds'",
    ("--grid=beta=0.1,,0.3",): "grid: beta: got '0.1,,0.3'",
    ("--grid=beta=-1",): "beta: got -1",
    ("--grid=n_restarts=few",): "n_restarts=few",
    ("--grid=n_clients=2,60",): "n_clients: got 60; allowed is 1 to 40",
    ("--random=3",): "random: there are no axes to draw from",
    ("--batch=0",): "batch: got '0'; allowed is auto, or a whole number",
    ("--mesh=rows:2",): "mesh: got 'rows:2'; allowed are sweep:m, clients:n",
    ("--coordinator=127.0.0.1:1",): "coordinator: --coordinator, --num_processes, --",
    ("--algorithm=mgcd", "--until_stable=0.9"): "until_stable: is for single jobs",
    ("--algorithm=fmcsc", "--rounds=3", "--keep_from=4"): "keep_from: got 4 with 3 rounds",
    ("--keep_from=2",): "keep_from: e_fkmvc finds its end itself; allowed is none",
    ("--grid=tau=1,3",): "tau: has no effect with --personal=none; leave it out, or give",
    ("--personal=mix", "--grid=mix=0.2,0.5", "--tau=3"): "tau: has no effect with --personal=mix",
    ("--secure_aggregation",): "setup[2]: its server reads single messages",
    ("--secure_aggregation", "--in_clear=setup[2]", "--grid=hkc=minmax"): "hkc: got minmax with",
    (
        "--algorithm=private_e_fkmvc",
        "--secure_aggregation",
        "--fraction_bits=4",
        "--grid=noise_multiplier=0.01,1",
    ): "fraction_bits: got 4; allowed is",
    ("--algorithm=lmvsc", "--participation=0.5"): "participation: got (0.5,) for lmvsc",
    (
        "--algorithm=private_e_fkmvc",
        "--n_clients=4",
        "--ratio=1:0",
        "--participation=0.5",
    ): "allowed is a share of which 4 clients or more take part, here 2",
    ("--algorithm=mgcd", "--participation=0.5"): "for mgcd, which needs every agent's features",
    ("--resume",): "resume: needs --output_dir",
    ("--scale=standard", "--scale_by=client"): "scale_by: got 'client' for a sweep",
    ("--algorithm=vertcohirf", "--level=1"): "level: a sweep scores the final clusters",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_bad_input_is_one_line(toy, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = () if arguments[0].startswith("--algorithm") else FEDHK
    code, out, err = launch(*flags, *toy, *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: ")
    assert WRONG[arguments] in err
    assert not list(tmp_path.iterdir())


def private_flags(toy):
    return ["--algorithm=private_e_fkmvc", *FEDHK[1:], toy[0], "--noise=local"]


def test_rows_say_what_a_private_run_of_their_setting_spends(toy):
    multipliers = ("2", "4")
    flags = [[*private_flags(toy), f"--noise_multiplier={z}"] for z in multipliers]
    columns = [{"noise_multiplier": z} for z in multipliers]
    (group,) = groups.groups_of([parse(f) for f in flags], columns, with_spent=True)
    program = SimpleNamespace(group=group, traffic=lambda rounds: {})
    rows = [batches.row_of(program, run, None, "broke off") for run in group.runs]
    # The moments, two steps of k-means and two rounds.
    spent = [gaussian_epsilon(float(z), 5, 1e-5) for z in multipliers]
    assert [row["epsilon"] for row in rows] == [spent[0]] * 2 + [spent[1]] * 2
    assert {row["delta"] for row in rows} == {1e-5}
    summary = sweep_report.summarise(rows, ["noise_multiplier"], ["acc"], ["epsilon", "delta"])
    assert list(summary["epsilon"]) == spent
    lines = sweep_report.table(summary, ["noise_multiplier"], ["acc"], spent=["epsilon"])
    assert lines[0].split() == ["noise_multiplier", "epsilon", "ACC", "failed"]
    assert lines[1].split()[2] == f"{spent[0]:.3g}"
    plain = groups.groups_of([parse([*FEDHK, toy[0]])], [{}], with_spent=True)
    assert plain[0].spent is None


@pytest.mark.parametrize("spent", [(3.0, 0.25), (np.inf, 0.0)])
def test_rows_of_dpfmps_have_the_delta_of_their_own_run(spent):
    group = batches.Group([{"m": "8"}], [None], *[None] * 3, [0, 1], 0, None, [1.0])
    group = group._replace(spent=[(spent[0], np.nan)], rate=lambda place, labels: {})
    program = SimpleNamespace(group=group, traffic=lambda rounds: {})
    out = {"nan": False, "unread": False, "rounds": 0, "loss": np.nan, "labels": []}
    row = batches.row_of(program, (0, 1), out | {"spent": tuple(map(np.float32, spent))})
    assert (row["epsilon"], row["delta"]) == spent


@pytest.mark.ci
def test_a_sweep_of_dpfmps_says_what_its_settings_spend(toy, tmp_path):
    folder = tmp_path / "out"
    flags = ("--algorithm=dpfmps", "--n_clusters=3", "--n_init=1", "--noprogress", *toy)
    code, out, err = launch(*flags, "--grid=dp_epsilon=1", f"--output_dir={folder}")
    assert (code, err) == (0, "")
    (row,) = rows_of(folder / "summary.csv")
    assert float(row["epsilon"]) == 1 and 0 < float(row["delta"]) <= 1
    assert "epsilon and delta are of one run" in out


def test_a_flag_may_be_of_use_in_some_settings_alone(toy):
    axes = "--grid=personal=none,proximal; tau=1,3"
    code, _, err = launch(*FEDHK, *toy, axes, "--dry_run", "--batch=0")  # refused last
    assert code == 2 and err.startswith("error: batch: got '0'"), err


def test_a_family_may_change_labels_without_flags_of_its_own(toy):
    arguments = [*FEDHK, *toy]
    command = parse(arguments, extra=(sweep.SweepSettings,))
    family = Hooks(labels=lambda settings, server, labels: labels)
    (made,) = sweep.commands_of(command._replace(hooks=family), [{"rounds": "3"}])
    assert made.rounds == 3


@pytest.mark.ci
def test_a_folder_is_gone_on_with_by_the_same_flags_alone(swept, toy):
    folder, _ = swept
    before = (folder / "runs.csv").read_bytes()
    job = (*KMEANS, *toy, GRID, f"--output_dir={folder}")
    code, _, err = launch(*job, "--batch=4", "--resume", "--rounds=9")
    assert code == 2 and "rounds (2 then, 9 now)" in err
    code, _, err = launch(*job)
    assert code == 2 and "holds results already" in err
    code, out, err = launch(*job, "--batch=4", "--resume")
    assert code == 0 and "0 compilations in this process" in out
    assert (folder / "runs.csv").read_bytes() == before


@pytest.mark.ci
def test_a_sweep_does_not_go_on_with_other_data(tmp_path):
    rng = np.random.default_rng(0)
    views = {f"view_{v}": rng.normal(size=(40, 4)) for v in (0, 1)}
    np.savez(tmp_path / "toy.npz", labels=np.arange(40) % 3, **views)
    flags = ("--algorithm=local_kmeans", "--n_clients=2", "--ratio=1:0", "--noprogress")
    flags += (f"--dataset={tmp_path / 'toy.npz'}", f"--output_dir={tmp_path / 'out'}")
    sets = [groups.groups_of([parse([*flags, f"--scale={s}"])], [{}]) for s in ("none", "minmax")]
    (name, both), *rest = groups.data_of([group for of in sets for group in of]).items()
    assert name == str(tmp_path / "toy.npz") and not rest and len(set(both.split())) == 2
    assert launch(*flags)[0] == 0
    assert launch(*flags, "--resume")[0] == 0
    views["view_1"][3, 2] += 1
    np.savez(tmp_path / "toy.npz", labels=np.arange(40) % 3, **views)
    groups._load.cache_clear()  # as another process would begin
    groups._fingerprint.cache_clear()
    code, _, err = launch(*flags, "--resume")
    assert code == 2 and f"begun with other data: {name} changed since" in err


# --- Kills ----------------------------------------------------------------------------------------


def job(folder, *arguments):
    """Begins the sweep of the folder or goes on with it: what runs in processes that are killed."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    resume = ["--resume"] * (folder / "flags.txt").exists()
    with open(os.devnull, "w") as sys.stdout:
        sweep.main([*arguments, f"--output_dir={folder}", *resume])


@pytest.mark.slow
def test_killed_at_random_moments_a_sweep_ends_with_the_same_rows(toy, tmp_path):
    # Quick to trace and to compile: most processes are killed before they get far.
    method = ("--algorithm=local_kmeans", "--n_clients=4", "--ratio=1:0", "--noprogress")
    arguments = (*method, *toy, "--grid=n_clusters=2,3,4", "--seeds=20", "--batch=1")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    kills.until_done(job, (whole, *arguments), 0, 0, whole / "batches.csv")
    lives = kills.until_done(job, (killed, *arguments), KILLS, 1, killed / "batches.csv", 0.01)
    print([life.changes for life in lives])
    assert len(lives) > 10 and sum(life.changes > 0 for life in lives[:-1]) > 3
    assert (killed / "flags.txt").read_bytes() == (whole / "flags.txt").read_bytes()
    for name in ("runs.csv", "summary.csv"):
        mine, expected = (
            [{k: v for k, v in row.items() if "seconds" not in k} for row in rows_of(path / name)]
            for path in (killed, whole)
        )
        assert mine == expected
    assert len(rows_of(killed / "runs.csv")) == 60
    assert not [path for path in os.listdir(killed) if "partial" in path]
