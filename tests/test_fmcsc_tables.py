"""FMCSC's tables: what rows are made of, what is read from runs, and one of them end to end."""

import csv
import json
import math

import matplotlib.image
import numpy as np
import pytest

from experiments import fmcsc_figures, fmcsc_rows, fmcsc_tables, sweep_runs
from experiments.fmcsc_rows import Wish
from experiments.fmcsc_tables import Entry
from experiments.sweep_runs import Group
from jaxfedmvc import data
from jaxfedmvc.algorithms import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.engine import batching as sweep
from tests.test_sweep_binary import several_of

REPRODUCE = "reproduce_fmcsc"


def wish(what, **changes):
    given = {"sets": ["bdgp"], "ratios": ["2:1"], "presets": ["paper", "best"], "quick": False}
    given |= {"references": list(fmcsc_rows.REFERENCES.values()), "flags": {}}
    return Wish(what, **(given | changes))


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
    rows = fmcsc_rows.rows(wish(what))
    assert len(rows) == n and len({row[:3] for row in rows}) == n
    assert all(row.flags["dataset"] == "bdgp" for row in rows)
    flags = [tuple(sorted(row.flags.items())) for row in rows if row.algorithm == "fmcsc"]
    assert len(set(flags)) == len(flags)  # no row is another one's
    quick = fmcsc_rows.rows(wish(what, sets=["digits"], quick=True, flags={"n_bins": "7"}))
    assert {row.flags["hidden"] for row in quick} == {"64"}
    assert {row.flags["n_bins"] for row in quick} == {"7"}  # the command line comes last


def test_presets_are_one_setting_over_what_the_paper_sets_per_set():
    paper = fmcsc_rows.preset("paper", "bdgp", quick=False)
    assert (paper["local_epochs"], paper["n_clients"], paper["rounds"]) == ("10", "12", "5")
    changed = [
        {
            (name, value)
            for name, value in fmcsc_rows.preset("best", dataset, quick=False).items()
            if fmcsc_rows.preset("paper", dataset, quick=False).get(name) != value
        }
        for dataset in fmcsc_rows.SETS
    ]
    own = [dict(pairs).get("local_epochs") for pairs in changed]
    assert dict(zip(fmcsc_rows.SETS, own, strict=True)) == {
        "mnist_usps": None,
        "bdgp": None,
        "multi_fashion": "50",
        "nuswide": None,
    }
    settings = [{name for name, _ in pairs} - {"local_epochs"} for pairs in changed]
    assert settings[0] == settings[1] == settings[2] == settings[3]
    assert not settings[0] & {"dataset", "n_clients", "ratio", "rounds"}
    with pytest.raises(ValueError, match="presets: got 'mine'; allowed are paper, best"):
        fmcsc_rows.preset("mine", "bdgp", quick=False)
    with pytest.raises(ValueError, match="datasets: got 'iris'; allowed are mnist_usps"):
        fmcsc_rows.preset("best", "iris", quick=False)


@pytest.mark.parametrize(("models", "exchanges"), [("branch", 1), ("distilled", 2)])
def test_epsilon_is_that_of_all_uploads(models, exchanges):
    wished = wish("figure4c", flags={"partial_models": models})
    rows = {(row.x, row.name): row.flags for row in fmcsc_rows.rows(wished)}
    assert "upload_clip" not in rows["50", "best"] and rows["50", "best"]["upload_noise"] == "0.02"
    flags = rows["50", "best, clipped"]
    uploads = 2 + exchanges * int(flags["rounds"])  # f_m, and then any copies
    # One release of L1 sensitivity 2 C with Laplace noise of scale b spends 2 C / b.
    spent = uploads * 2 * float(flags["upload_clip"]) / float(flags["upload_noise"])
    assert spent == pytest.approx(50)


# --- Tables ---------------------------------------------------------------------------------------


def run_of(row, seed, acc, x="1:1", dataset="bdgp", rounds=6):
    """A line of runs.csv whose ACC rises by .01 a round, and is .1 less on single-view clients."""
    line = {"set": dataset, "x": x, "row": row, "seed": str(seed), "status": "ok"}
    line |= {"rounds_made": str(rounds), "bytes_up": "3e6", "bytes_down": "3e6"}
    line["rounds/bytes"] = " ".join(str(1e6 * (r + 1)) for r in range(rounds))
    for group in ("all", "multi_view", "partial_view", "participating", "non_participating"):
        last = acc - 0.1 * (group == "partial_view")
        for metric in ("acc", "nmi", "ari"):
            line[f"{group}/pooled/{metric}"] = line[f"{group}/per_client/{metric}"] = str(last)
            values = [last - 0.01 * (rounds - 1 - r) for r in range(rounds)]
            line[f"rounds/{group}/pooled/{metric}"] = " ".join(map(str, values))
    return line


def test_table_1_reads_the_papers_rounds_and_the_last_ones():
    runs = [run_of("best", seed, acc) for seed, acc in enumerate((0.9, 0.94))]
    runs += [run_of(fmcsc_rows.LOCAL, 0, 0.3, rounds=5)]
    runs += [run_of("best", 3, 0.1) | {"status": "failed: NaN in the model"}]
    reference = Entry(
        "bdgp", "1:1", fmcsc_rows.POOLED, 2, {m: (0.4, 0.0) for m in ("acc", "nmi", "ari")}
    )
    elsewhere = reference._replace(x="2:1")
    table = fmcsc_tables.table_1(runs, [reference, elsewhere])
    by_name = {e.name: e for e in table}
    assert [e.name for e in table][:2] == ["published: FMCSC", "published: FedDMVC"]
    assert by_name["published: FMCSC"].scores["acc"] == (0.919, 0.012)
    assert by_name["best, R = 5"].scores["acc"] == pytest.approx((0.91, 0.02))
    assert by_name["best, R = 6"].scores["acc"] == pytest.approx((0.92, 0.02))
    assert by_name["best, R = 5"].bytes == 5e6 and by_name["best, R = 6"].seeds == 2
    assert by_name["best, R = 6: single-view clients"].scores["acc"][0] == pytest.approx(0.82)
    assert math.isnan(by_name[fmcsc_rows.LOCAL].scores["acc"][1])  # one seed has no spread
    assert by_name[fmcsc_rows.POOLED] == reference and elsewhere not in table
    assert [e.name for e in fmcsc_tables.short(table)][2:4] == ["best, R = 5", "best, R = 6"]
    text = fmcsc_tables.markdown(table, "M : S")
    assert "| BDGP | 1:1 | best, R = 6 | 2 | 0.920 +- 0.020 |" in text
    assert len(list(fmcsc_tables.lines(table))) == 1 + len(table)
    assert [Entry.of({k: str(v) for k, v in e.flat().items()}).name for e in table] == [
        e.name for e in table
    ]


def test_tables_2_and_3_stand_beside_the_papers():
    runs = [run_of("best", 0, 0.9, x=letters) for letters in fmcsc_rows.ABLATIONS]
    table = fmcsc_tables.table_2(runs)
    assert len(table) == 12  # the paper has no idle clients
    paper = next(e for e in table if e.x == "ACD" and e.name.startswith("published"))
    assert paper.scores["acc"][0] == pytest.approx(0.6104) and math.isnan(paper.scores["acc"][1])
    table = fmcsc_tables.table_3([run_of("best", 0, 0.9, x="0.5")])
    assert [e.name for e in table] == [
        "published: participating",
        "best: participating",
        "published: non-participating",
        "best: non-participating",
    ]
    assert table[2].scores["acc"][0] == pytest.approx(0.8592)


def test_the_readme_is_written_between_its_marks_only(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("a\n<!-- results: begin -->\nold\n<!-- results: end -->\nb\n")
    fmcsc_tables.write_between_marks(path, "new\n")
    assert path.read_text() == "a\n<!-- results: begin -->\nnew\n<!-- results: end -->\nb\n"
    path.write_text("nothing")
    with pytest.raises(ValueError, match="has no lines <!-- results: begin"):
        fmcsc_tables.write_between_marks(path, "new\n")


def test_the_table_in_the_readme_is_that_of_the_measured_runs():
    measured = fmcsc_tables.PUBLISHED.parent / "measured"
    runs = fmcsc_tables.read(measured / "fmcsc_table1_runs.csv")
    references = fmcsc_tables.read(measured / "fmcsc_table1_references.csv")
    table = fmcsc_tables.table_1(runs, [Entry.of(row) for row in references])
    text = fmcsc_tables.markdown(fmcsc_tables.short(table), "M : S")
    readme = (fmcsc_tables.PUBLISHED.parents[1] / "README.md").read_text()
    assert text in readme


# --- Figures of runs themselves -------------------------------------------------------------------


@pytest.fixture(scope="module")
def groups():
    """One row of a tiny federation of two views: one program serves all figures."""
    rng = np.random.default_rng(0)
    views = [rng.normal(size=(30, d)).astype(np.float32) for d in (4, 3)]
    labels = np.arange(30) % 2
    parts = [data.hybrid_partition(0, 30, 2, 3, ratio=(1, 2), labels=labels)]
    config = FMCSCConfig(
        2,
        hidden=(),
        latent_dim=2,
        head_hidden=4,
        pretrain_epochs=1,
        local_epochs=1,
        distill_epochs=1,
        n_init=1,
    )
    return [
        Group(
            [{"set": "toy", "x": letters, "row": "best"}],
            [FMCSCHyperparams()],
            lambda hyper, letters=letters: fmcsc(
                FMCSCConfig(**(vars(config) | {"components": letters})), hyper
            ),
            sweep.pooled(views, labels, parts),
            sweep_runs.outline(views, parts[0]),
            [0],
            2,
            2,
            [1.0] * len(parts[0]),
            False,
            1,
            None,
        )
        for letters in ("ABCD",)
    ]


def shown(path):
    return matplotlib.image.imread(path).shape[1] > 300


def test_maps_losses_and_costs(groups, tmp_path, capsys, no_bar, one_program):
    fmcsc_figures.figure_3(groups, tmp_path)
    assert shown(tmp_path / "figure3_toy.png")
    rows = fmcsc_figures.figure_6(groups, tmp_path)["rows"]
    assert shown(tmp_path / "figure6.png") and len(rows) == 2 * 2
    for row in rows:
        assert row["total"] == pytest.approx(row["reconstruction"] + row["contrast"])
    (row,) = fmcsc_figures.table_5(groups, tmp_path)["rows"]
    # Autoencoder 4-2-4: 10 + 12; 3-2-3: 8 + 9; a head of one view, 2-4-2: 22, of both, 4-4-2: 30.
    assert row["parameters_single"] == "39 to 44"
    assert row["parameters_multi"] == 22 + 17 + 2 * 22 + 30
    assert row["gflop"] >= 0 and row["run_seconds"] >= 0 and row["megabytes"] > 0
    assert "parameters_multi" in capsys.readouterr().out


@pytest.fixture
def no_bar(monkeypatch):
    """Progress needs a flag that only binaries parse."""

    class Silent:
        def __init__(self, total):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def advance(self, work):
            pass

    monkeypatch.setattr(fmcsc_figures, "ProgressBar", Silent)


@pytest.fixture
def one_program(monkeypatch):
    """All figures run the same program of a group, which takes its time to compile."""
    programs, compiled = {}, fmcsc_figures._program

    def of(group):
        if id(group) not in programs:
            programs[id(group)] = compiled(group)
        return programs[id(group)]

    monkeypatch.setattr(fmcsc_figures, "_program", of)


# --- End to end -----------------------------------------------------------------------------------


def test_a_figure_end_to_end_and_what_can_be_wrong(tmp_path):
    tiny = (
        "--quick",
        "--presets=best",
        "--hidden=",
        "--latent_dim=3",
        "--head_hidden=4",
        "--pretrain_epochs=1",
        "--local_epochs=1",
        "--distill_epochs=1",
        "--rounds=1",
        "--n_init=1",
        "--centroid_rounds=1",
        "--n_clients=2",
        "--ratio=1:0",
        "--samples_per_client=12",
        "--seeds=1",
        "--noprogress",
        "--compilation_cache=",
        "--components=ACD",
        "--noresample_participants",
    )
    folder = tmp_path / "out"
    job = ("--figure=2", *tiny, f"--output_dir={folder}")
    wrong = {
        (): "table: give either --table or --figure",
        ("--table=1", "--figure=2"): "table: give either --table or --figure",
        ("--table=4",): "table",
        ("--table=1", "--datasets=iris"): "datasets: got 'iris'",
        ("--table=1", "--presets=mine"): "presets: got 'mine'",
        ("--table=1", "--ratios=1-1"): "ratio",
        ("--table=1", "--references=mine"): "references: got 'mine'; allowed are local, alone",
        ("--table=1", "--grid=tau_m=1"): "grid: has no meaning here",
        ("--table=1", "--ratio=1:2"): "ratio: table1 gives it values of its own; leave it out",
        ("--table=2", "--components=ABC"): "components: table2 gives it values of its own",
        ("--figure=3", "--presets="): "presets: got none; allowed are paper, best",
        ("--table=1", "--ratios="): "presets: got none, and no ratios",
        ("--figure=2", "--readme=README.md"): "readme: takes table 1; leave it out",
        ("--table=1", "--readme=pyproject.toml"): "readme: pyproject.toml has no lines",
        ("--table=2", f"--runs_file={folder}/runs.csv"): "holds runs of '0.1 0.5'; table2 is made",
        job: "holds results already",
    }
    from_file = ("--resume", f"--output_dir={folder}", f"--flagfile={folder}/flags.txt")
    (code, out, err), (again, _, _), (told, retold, _), *answers = several_of(
        REPRODUCE, job, (*job, "--resume"), from_file, *wrong
    )
    assert code == 0, err
    assert again == told == 0
    assert "3 runs" in retold
    runs = list(csv.DictReader((folder / "runs.csv").open()))
    assert len(runs) == 3 and {run["status"] for run in runs} == {"ok"}
    assert len({run["x"] for run in runs}) == 3
    assert "temperatures" in (folder / "table.md").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["what"] == "figure2" and summary["quick"] and len(summary["rows"]) == 3 * 3
    assert shown(folder / "figure2_digits_best.png") and "1 programs" in out
    for (code, _, err), message in zip(answers, wrong.values(), strict=True):
        assert code == 2 and message in err
