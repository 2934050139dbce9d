"""FMCSC's tables: what rows are made of, what is read from runs, and one of them end to end."""

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pandas as pd
import pytest

from experiments import reproduce
from experiments.fmcsc import figures, tables
from experiments.fmcsc import reproduce as fmcsc_reproduce
from experiments.fmcsc import rows as fmcsc_rows
from experiments.fmcsc.rows import ReproduceSettings, Request, Row
from experiments.lib.command import parse
from experiments.lib.data import Problem
from experiments.lib.progress import Progress
from jaxfedmvc import Federation
from jaxfedmvc.data.partition import Part
from tests.helpers import binaries

ROOT = Path(__file__).parents[3]


def request_for(what, flags=None, **changes):
    kind = "table" if what.startswith("table") else "figure"
    asked = {"datasets": ("bdgp",), "ratios": ("2:1",), "presets": ("paper", "best")}
    settings = ReproduceSettings(**{kind: what.removeprefix(kind)}, **(asked | changes))
    return Request(settings, flags or {})


def values_of(row, *names):
    return [row.command.flags[name].value for name in names]


# --- Rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "n"),
    [
        ("table1", 4),
        ("table2", 14),
        ("table3", 6),
        ("table5", 2),
        ("figure2", 30),
        ("figure3", 2),
        ("figure4a", 8),
        ("figure4b", 8),
        ("figure4c", 18),
        ("figure6", 2),
        ("figure7", 6),
        ("figurebytes", 2),
    ],
)
def test_rows_of_every_table_and_figure(what, n):
    rows = fmcsc_rows.rows(request_for(what))
    assert len(rows) == n and len({row[:3] for row in rows}) == n
    assert all(row.command.data.dataset == "bdgp" for row in rows)
    lines = {tuple(row.command.flag_lines()) for row in rows}
    assert len(lines) == n  # no row is another one's
    bins = {"n_bins": "--n_bins=7"}
    quick = fmcsc_rows.rows(request_for(what, datasets=("digits",), quick=True, flags=bins))
    for row in quick:
        if row.command.name != "local_kmeans":
            assert values_of(row, "hidden", "n_bins") == [(64,), 7]  # the command line comes last


def test_references_of_table_1_share_the_data_and_not_all_settings():
    *_, preset, local, alone = fmcsc_rows.rows(request_for("table1", presets=("best",)))
    assert (local.name, alone.name) == (fmcsc_rows.LOCAL, fmcsc_rows.ALONE)
    assert (local.command.name, alone.command.name) == ("local_fmcsc", "local_kmeans")
    assert local.command.split == alone.command.split == preset.command.split
    assert local.command.config(10, 12).hidden == (256, 256, 512)
    assert alone.command.rounds == 0 and alone.command.config(10, 12).n_init == 10


def test_presets_are_one_setting_over_what_the_paper_sets_per_set():
    def flags(name, dataset):
        command = parse(fmcsc_rows.preset(name, dataset, quick=False))
        return {flag: command.flags[flag].value for flag in command.flags}

    paper = flags("paper", "bdgp")
    assert (paper["local_epochs"], paper["n_clients"], paper["rounds"]) == (10, 12, 5)
    changed = [
        {k: v for k, v in flags("best", name).items() if flags("paper", name)[k] != v}
        for name in fmcsc_rows.SETS
    ]
    own = [settings.pop("local_epochs", None) for settings in changed]
    assert own == [None, None, 50, None]
    assert all(settings == changed[0] for settings in changed)
    assert not changed[0].keys() & {"dataset", "n_clients", "ratio", "rounds"}
    with pytest.raises(ValueError, match="presets: got 'mine'; allowed are paper, best"):
        fmcsc_rows.preset("mine", "bdgp", quick=False)
    with pytest.raises(ValueError, match="datasets: got 'iris'; allowed are mnist_usps"):
        fmcsc_rows.preset("best", "iris", quick=False)


@pytest.mark.parametrize(("models", "exchanges"), [("branch", 1), ("distilled", 2)])
def test_epsilon_is_that_of_all_uploads(models, exchanges):
    asked = request_for(
        "figure4c", presets=("best",), flags={"partial_models": f"--partial_models={models}"}
    )
    rows = {(row.x, row.name): row for row in fmcsc_rows.rows(asked)}
    assert values_of(rows["50", "best"], "upload_noise", "upload_clip") == [0.02, None]
    noise, clip, rounds = values_of(
        rows["50", "best, clipped"], "upload_noise", "upload_clip", "rounds"
    )
    uploads = 2 + exchanges * rounds  # f_m, and then any copies
    # One release of L1 sensitivity 2 C with Laplace noise of scale b spends 2 C / b.
    assert uploads * 2 * clip / noise == pytest.approx(50)


# --- Tables ---------------------------------------------------------------------------------------


def run_of(row, seed, acc, x="1:1", dataset="bdgp", rounds=6, status="ok"):
    """A line of runs.csv whose ACC rises by .01 a round, and is .1 less on single-view clients."""
    line = {"set": dataset, "x": x, "row": row, "seed": str(seed), "status": status}
    line |= {"rounds_made": str(rounds), "bytes_up": "3e6", "bytes_down": "3e6"}
    line["rounds/bytes"] = " ".join(str(1e6 * (r + 1)) for r in range(rounds))
    for group in ("all", "multi_view", "partial_view", "participating", "non_participating"):
        last = acc - 0.1 * (group == "partial_view")
        for metric in ("acc", "nmi", "ari"):
            line[f"{group}/pooled/{metric}"] = line[f"{group}/per_client/{metric}"] = str(last)
            values = [last - 0.01 * (rounds - 1 - r) for r in range(rounds)]
            line[f"rounds/{group}/pooled/{metric}"] = " ".join(map(str, values))
    return line


def runs_file(path, lines):
    pd.DataFrame(lines).to_csv(path, index=False)
    return tables.read_runs(path)


def test_table_1_reads_the_papers_rounds_and_the_last_ones(tmp_path):
    lines = [run_of("best", seed, acc) for seed, acc in enumerate((0.9, 0.94))]
    lines += [run_of(fmcsc_rows.LOCAL, 0, 0.3, rounds=5)]
    lines += [run_of("best", 3, 0.1, status="failed: NaN in the model")]
    reference = {"set": "bdgp", "x": "1:1", "row": fmcsc_rows.POOLED, "seeds": 2}
    reference |= {metric: 0.4 for metric in ("acc", "nmi", "ari")}
    references = pd.DataFrame([reference, reference | {"x": "2:1"}], columns=tables.COLUMNS)
    table = tables.table_1(runs_file(tmp_path / "runs.csv", lines), references)
    assert table["row"].is_unique and set(table["x"]) == {"1:1"}
    assert list(table["row"])[:2] == ["published: FMCSC", "published: FedDMVC"]
    line = table.set_index("row").loc
    assert tuple(line["published: FMCSC", ["acc", "acc_std"]]) == (0.919, 0.012)
    after_5, after_6 = line["best, R = 5"], line["best, R = 6"]
    assert tuple(after_5[["acc", "acc_std"]]) == pytest.approx((0.91, 0.02 * 2**0.5))
    assert tuple(after_6[["acc", "acc_std"]]) == pytest.approx((0.92, 0.02 * 2**0.5))
    assert after_5["megabytes"] == 5 and after_6["seeds"] == 2
    assert line["best, R = 6: single-view clients", "acc"] == pytest.approx(0.82)
    assert math.isnan(line[fmcsc_rows.LOCAL, "acc_std"])  # one seed has no spread
    assert line[fmcsc_rows.POOLED, "acc"] == 0.4
    assert list(tables.short(table)["row"])[2:4] == ["best, R = 5", "best, R = 6"]
    text = tables.markdown(table, "M : S")
    assert "| BDGP | 1:1 | best, R = 6 | 2 | 0.920 +- 0.028 |" in text
    assert len(text.splitlines()) == 2 + len(table)
    path = tmp_path / "table.csv"
    path.write_text(tables.csv_text(table))
    assert tables.markdown(tables.read_lines(path), "M : S") == text


def test_titles_say_how_many_seeds_there_are(tmp_path, monkeypatch):
    lines = [run_of("best", seed, 0.9) for seed in (0, 1)]
    unlike = [*lines, run_of("best", 0, 0.9, x="2:1")]
    titles: list[str] = []
    monkeypatch.setattr(tables, "draw_bars", lambda path, table, title: titles.append(title))
    for kept in (lines[:1], lines, unlike):
        runs = runs_file(tmp_path / "runs.csv", kept)
        none = pd.DataFrame(columns=tables.COLUMNS)
        fmcsc_reproduce.draw("table1", tmp_path, runs, tables.table_1(runs, none))
    assert titles == [f"FMCSC, table 1, {n}" for n in ("1 seed", "2 seeds", "1 to 2 seeds")]


def test_tables_2_and_3_stand_beside_the_papers(tmp_path):
    lines = [run_of("best", 0, 0.9, x=letters) for letters in fmcsc_rows.ABLATIONS]
    table = tables.table_2(runs_file(tmp_path / "runs.csv", lines))
    assert len(table) == 12  # the paper has no idle clients
    paper = table[(table["x"] == "ACD") & table["row"].str.startswith("published")].iloc[0]
    assert paper["acc"] == pytest.approx(0.6104) and math.isnan(paper["acc_std"])
    table = tables.table_3(runs_file(tmp_path / "runs.csv", [run_of("best", 0, 0.9, x="0.5")]))
    assert list(table["row"]) == [
        "published: participating",
        "best: participating",
        "published: non-participating",
        "best: non-participating",
    ]
    assert table["acc"][2] == pytest.approx(0.8592)


def test_table_3_tells_who_takes_part_from_who_does_not(tmp_path):
    lines = [
        run_of("best", seed, 0.9, x="0.5") | {"non_participating/pooled/acc": str(acc)}
        for seed, acc in enumerate((0.2, 0.4))
    ]
    lines.append(run_of("best", 2, 0.0, x="0.5", status="failed: NaN in the model"))
    runs = runs_file(tmp_path / "runs.csv", lines)
    line = tables.table_3(runs).set_index("row").loc
    assert tuple(line["best: participating", ["acc", "acc_std"]]) == (0.9, 0)
    found = tuple(line["best: non-participating", ["seeds", "acc", "acc_std", "megabytes"]])
    assert found == pytest.approx((2, 0.3, np.sqrt(0.02), 6))
    assert list(tables.plain(runs)["seeds"]) == [2, 2, 2]


def test_pooled_k_means_is_of_the_samples_that_clients_hold(monkeypatch):
    """Of six samples a client holds three; who finds their classes scores 1, on those alone."""
    labels, x = np.array([0, 1, 0, 1, 0, 1]), 10.0 * np.arange(6)[:, None]
    parts = [Part((0,), np.array([[5, 2, 3]], np.int32), np.array([0], np.int32))]
    federation = Federation.from_arrays([x], labels, partition=parts)
    problem = Problem(federation, [x], labels, np.arange(6))
    seen = []

    def k_means(rows, n_clusters, seed):
        seen.append((rows[:, 0].tolist(), n_clusters, seed))
        return (rows[:, 0] / 10).astype(int) % 2

    monkeypatch.setattr(fmcsc_reproduce, "load_clients", lambda *_: [problem] * 2)
    monkeypatch.setattr(fmcsc_reproduce, "k_means", k_means)
    row = Row("bdgp", "1:1", "best", parse(["--dataset=digits", "--seed=4", "--seeds=2"]))
    (line,) = fmcsc_reproduce.pooled_kmeans([row]).to_dict("records")
    assert seen == [([20, 30, 50], 2, 4), ([20, 30, 50], 2, 5)]
    assert (line["acc"], line["acc_std"], line["seeds"]) == (1, 0, 2)


def test_a_file_is_written_between_its_marks_only(tmp_path):
    path = tmp_path / "results.md"
    path.write_text("a\n<!-- results: begin -->\nold\n<!-- results: end -->\nb\n")
    tables.write_between_marks(path, "new\n")
    assert path.read_text() == "a\n<!-- results: begin -->\nnew\n<!-- results: end -->\nb\n"
    path.write_text("nothing")
    with pytest.raises(ValueError, match="has no lines <!-- results: begin"):
        tables.write_between_marks(path, "new\n")


@pytest.mark.parametrize("columns", [1, 3])
def test_temperatures_are_drawn_over_one_axis_or_two(tmp_path, columns):
    lines = [
        run_of("best", seed, 0.8, x=f"{tau_m} {tau_p}") | {"acc": str(0.5 + 0.1 * tau_m)}
        for seed in range(2)
        for tau_m in (0.1, 0.5, 1)
        for tau_p in (0.1, 0.5, 1)[:columns]
    ]
    figures.draw_temperatures(tmp_path, runs_file(tmp_path / "runs.csv", lines))
    assert shown(tmp_path / "figure2_bdgp_best.png")


def test_points_over_one_temperature_have_means_and_sample_deviations(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures.charts, "lines", lambda path, panels, *_: drawn.append(panels))
    lines = [
        run_of("best", seed, 0.8, x=f"{tau} 0.5") | {"acc": str(tau + seed / 4)}
        for tau in (0.25, 0.5)
        for seed in range(2)
    ]
    figures.draw_temperatures(tmp_path, runs_file(tmp_path / "runs.csv", lines))
    ((points,),) = (panel.values() for (panel,) in map(dict.values, drawn))
    np.testing.assert_allclose(points, [(t, t + 1 / 8, np.sqrt(1 / 32)) for t in (0.25, 0.5)])


def test_losses_of_a_round_are_of_each_kind_of_clients():
    """Two clients hold both views, and one the second; the mean is over clients."""
    views = [np.arange(6.0)[:, None]] * 2
    parts = [
        Part((0, 1), np.array([[0, 1], [2, 3]], np.int32), np.array([0, 1], np.int32)),
        Part((1,), np.array([[4, 5]], np.int32), np.array([2], np.int32)),
    ]
    federation = Federation.from_arrays(views, partition=parts)
    reports = [
        {"loss": np.ones(n), "reconstruction": np.array(r), "contrast": np.array(c)}
        for n, r, c in ((2, [1.0, 2.0], [4.0, 6.0]), (1, [0.5], [0.25]))
    ]
    found = list(figures._losses([{"clients": reports}], federation))
    assert found == [
        {"kind": "multi-view", "total": 6.5, "reconstruction": 1.5, "contrast": 5},
        {"kind": "single-view", "total": 0.75, "reconstruction": 0.5, "contrast": 0.25},
    ]
    idle = figures._losses([{"clients": [reports[0], {}]}], federation)
    assert [line["kind"] for line in idle] == ["multi-view"]


# --- Figures of runs themselves -------------------------------------------------------------------

TINY = (
    "--hidden=",
    "--latent_dim=2",
    "--head_hidden=4",
    "--pretrain_epochs=1",
    "--local_epochs=1",
    "--distill_epochs=1",
    "--n_init=1",
    "--n_clients=2",
    "--ratio=1:1",
    "--samples_per_client=12",
    "--rounds=2",
    "--seeds=1",
)


def shown(path):
    return matplotlib.image.imread(path).shape[1] > 300


@pytest.fixture
def rows(monkeypatch):
    """One row, whose programs serve all figures: they take their time to compile."""
    compiled = []
    make = figures._steps

    def once(job):
        if not compiled:
            compiled.append(make(job))
        return compiled[0]

    monkeypatch.setattr(figures, "_steps", once)
    return [Row("digits", "ABCD", "best", parse(["--dataset=digits", *TINY]))]


@pytest.mark.slow
def test_maps_losses_and_costs(rows, tmp_path, capsys):
    with Progress(False) as progress:
        figures.figure_3(rows, tmp_path, progress)
        assert shown(tmp_path / "figure3_digits.png")
        lines = figures.figure_6(rows, tmp_path, progress)["rows"]
        assert shown(tmp_path / "figure6.png") and len(lines) == 2 * 2
        for line in lines:
            assert line["total"] == pytest.approx(line["reconstruction"] + line["contrast"])
        (line,) = figures.table_5(rows, tmp_path, progress)["rows"]

    # For D features 5 D + 2 of an autoencoder D-2-D, and 22 of a head 2-4-2; of the joint head of
    # three views, 6-4-2, 38.
    def autoencoder(d):
        return (d + 1) * 2 + (2 + 1) * d

    dims = figures.runner.prepare(rows[0].command).federation.view_dims
    single = sorted(autoencoder(d) + 22 for d in dims)
    assert line["parameters_single"] == f"{single[0]} to {single[-1]}"
    assert line["parameters_multi"] == sum(map(autoencoder, dims)) + 3 * 22 + 38
    assert line["seconds"] >= 0 and line["megabytes"] > 0
    assert "parameters_multi" in capsys.readouterr().out


# --- End to end -----------------------------------------------------------------------------------


def launch(*arguments):
    return binaries.launch(reproduce.main, "--paper=fmcsc", *arguments)


JOB = ("--figure=2", "--quick", "--presets=best", *TINY, "--ratio=1:0")
JOB += ("--centroid_rounds=1", "--rounds=1", "--noprogress")
JOB += ("--compilation_cache=", "--noresample_participants")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Folder, stdout and flags of a finished figure 2."""
    folder = tmp_path_factory.mktemp("reproduce") / "out"
    flags = (*JOB, f"--output_dir={folder}")
    code, out, err = launch(*flags)
    assert code == 0, err
    return folder, out, flags


@pytest.mark.ci
def test_a_figure_end_to_end(job):
    folder, out, _ = job
    runs = list(csv.DictReader((folder / "runs.csv").open()))
    assert len(runs) == 3 and {run["status"] for run in runs} == {"ok"}
    assert len({run["x"] for run in runs}) == 3
    assert "temperatures" in (folder / "table.md").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["what"] == "figure2" and summary["quick"] and len(summary["rows"]) == 3 * 3
    assert shown(folder / "figure2_digits_best.png") and "3 runs, 1 program" in out


@pytest.mark.slow
def test_a_figure_goes_on_with_the_flags_that_were_given(job):
    folder, _, flags = job
    code, out, err = launch("--resume", f"--output_dir={folder}", f"--flagfile={folder}/flags.txt")
    assert code == 0 and "3 runs" in out, err
    for more in ("--n_bins=9", "--batch_size=256"):  # one of them a default
        code, _, err = launch(*flags, "--resume", more)
        assert code == 2 and "was begun with other flags" in err


@pytest.mark.ci
def test_runs_of_earlier_jobs_are_shown_anew(job, tmp_path):
    folder, _, _ = job
    code, out, err = launch(*JOB, f"--runs_file={folder}/runs.csv", f"--output_dir={tmp_path}/new")
    assert code == 0 and "programs" not in out, err
    assert (tmp_path / "new" / "table.csv").read_text() == (folder / "table.csv").read_text()


@pytest.mark.ci
def test_what_a_table_takes_is_said_without_running():
    table = ("--table=1", "--presets=", "--peers=", "--references=alone", "--quick")
    tiny = ("--ratios=1:0", "--n_clients=2", "--samples_per_client=12", "--seeds=3")
    common = ("--noprogress", "--compilation_cache=", "--batch=1")
    code, out, err = launch(*table, *tiny, *common, "--dry_run")
    assert (code, err) == (0, "")
    first, _, header, line = out.splitlines()
    assert first == "3 runs, 1 program" and header.split()[:3] == ["program", "runs", "batch"]
    assert line.split()[:3] == ["0", "3", "1"]


def test_earlier_runs_are_of_these_sets_and_each_counts_once(tmp_path):
    lines = [run_of("best", seed, 0.9) | {"command": f"--a=1 --seed={seed}"} for seed in (0, 1)]
    other = [line | {"set": "elsewhere"} for line in lines]
    path = tmp_path / "runs.csv"
    runs_file(path, lines + other)

    def read(*files):
        row = SimpleNamespace(set=lines[0]["set"], x=lines[0]["x"])
        asked = SimpleNamespace(what="table1", runs_file=files)
        return fmcsc_reproduce.earlier_runs(SimpleNamespace(rows=[row], asked=asked))[0]

    assert set(read(path)["set"]) == {lines[0]["set"]} and len(read(path)) == 2
    with pytest.raises(ValueError, match=r"a seed occurs twice among the runs of .*best"):
        read(path, path)
    runs_file(tmp_path / "b.csv", [run_of("best", 2, 0.9) | {"command": "--a=2 --seed=2"}])
    with pytest.raises(ValueError, match="have unlike settings"):
        read(path, tmp_path / "b.csv")


WRONG = {
    (): "table: give either --table or --figure",
    ("--table=1", "--figure=2"): "table: give either --table or --figure",
    ("--table=4",): "table",
    ("--table=1", "--datasets=iris"): "datasets: got 'iris'",
    ("--table=1", "--presets=mine"): "presets: got 'mine'",
    ("--table=1", "--ratios=1-1"): "ratio",
    ("--table=1", "--references=mine"): "references: got 'mine'; allowed are local, alone",
    ("--table=1", "--grid=tau_m=1"): "grid: is no flag of fmcsc",
    ("--table=1", "--algorithm=mgcd"): "algorithm",
    ("--table=1", "--dataset=bdgp"): "dataset: has no meaning here",
    ("--figure=6", "--mesh=clients:2"): "mesh: has no meaning here",
    ("--table=1", "--batch=0"): "batch: got '0'; allowed is auto",
    ("--table=1", "--ratio=1:2"): "ratio: table1 gives it values of its own; leave it out",
    ("--table=2", "--components=ABC"): "components: table2 gives it values of its own",
    ("--figure=3", "--presets="): "presets: got none; allowed are paper, best",
    ("--table=1", "--ratios="): "presets: got none, and no ratios",
    ("--figure=2", "--readme=README.md"): "readme: takes table 1; leave it out",
    ("--table=1", f"--readme={ROOT}/pyproject.toml"): "pyproject.toml has no lines",
    ("--figure=6", "--runs_file=a.csv"): "runs_file: figure6 is not made of runs",
}


def test_a_figure_may_be_asked_for_with_a_ratio():
    """It has no rows of comparison methods, which are for every ratio of table 1."""
    request = request_for("figure2", {"ratio": "--ratio=1:2"}, peers=None)
    rows = fmcsc_rows.rows(request)
    assert {row.command.flags["ratio"].value for row in rows} == {"1:2"}
    assert fmcsc_rows.peers(request) == []


@pytest.mark.parametrize("flags", WRONG)
def test_what_can_be_wrong(flags):
    code, _, err = launch(*flags)
    assert code == 2 and WRONG[flags] in err and err.count("\n") == 1


@pytest.mark.ci
def test_what_can_be_wrong_with_files(job):
    folder, _, flags = job
    code, _, err = launch(*flags)
    assert code == 2 and "holds results already" in err
    code, _, err = launch("--table=2", f"--runs_file={folder}/runs.csv")
    assert code == 2 and "holds runs of '0.1 0.5'; table2 is made" in err


def test_every_paper_is_found_and_no_other():
    code, _, err = binaries.launch(reproduce.main, "--paper=mine", "--table=1")
    assert code == 2 and "paper: got 'mine'; allowed are fmcsc" in err
    code, out, _ = launch("--help")
    assert code == 0 and "(2 or 3 or 4a or 4b" in out and "--tau_m" in out
