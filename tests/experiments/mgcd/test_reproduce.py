"""MGCD's tables and figures: what they are made of, and that runs are made once."""

from unittest import mock

import numpy as np
import pandas as pd
import pytest

from experiments.lib import runner
from experiments.lib.command import parse
from experiments.mgcd import reproduce, runs, tables
from jaxfedmvc.engine.steps import Steps
from tests.experiments.mgcd.toy import save_toy
from tests.helpers import binaries, pictures

COMMON = ("--compilation_cache=", "--noprogress", "--paper=mgcd")
TINY = ("--server=average", "--hidden=4", "--latent_dim=2", "--pretrain_epochs=1", "--n_init=1")
NAME = "MGCD, literal, average"


@pytest.fixture(scope="module", autouse=True)
def unpainted():
    with pictures.unpainted():
        yield


def launch(*arguments):
    return binaries.launch(reproduce.main, *COMMON, *arguments)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A toy in place of the sets, and a row of the paper that takes seconds."""
    path = save_toy(tmp_path)
    for name in runs.SETS:
        monkeypatch.setitem(runs.SETS, name, str(path))
    tiny = (*runs.MODES["literal"], *TINY, "--rounds=1")
    monkeypatch.setitem(runs.TABLE_2, NAME, tiny)
    monkeypatch.setitem(runs.MODES, "literal", tiny)
    return path


@pytest.mark.ci
def test_a_table_is_run_once_and_read_back(toy, tmp_path):
    arguments = ("--table=2", "--sets=Mfeat", "--peers=", "--seeds=2")
    arguments += (f"--methods={NAME.replace(',', ';')}",)
    own = (*arguments, f"--output_dir={tmp_path / 'one'}")
    code, out, err = launch(*own)
    assert code == 0, err
    made = tmp_path / "one" / "runs.csv"
    rows = pd.read_csv(made)
    made.write_text(made.read_text()[:-9])  # killed while the last row was written
    code, resumed, err = launch(*own, "--resume")
    assert code == 0 and resumed[resumed.index("seeds") :] == out[out.index("seeds") :], err
    pd.testing.assert_frame_equal(*(x.drop(columns="seconds") for x in (pd.read_csv(made), rows)))
    code, _, err = launch(*own, "--resume", "--seed=1")
    assert code == 2 and "was begun with other flags: seed (0 then, 1 now)" in err

    file, before = tmp_path / "runs.csv", made.read_text()
    file.write_text(before)
    arguments += (f"--trials_file={file}",)
    lines = out[out.index("seeds") :].splitlines()
    code, again, err = launch(*arguments, f"--output_dir={tmp_path / 'two'}")
    assert code == 0 and file.read_text() == before, err
    assert again[again.index("seeds") :].splitlines()[:-1] == lines[:-1]
    found = pd.read_csv(tmp_path / "two" / "table.csv", index_col="row")
    assert list(found.index[:2]) == ["paper: MGCD", "paper: FedDMVC"]
    assert found.loc["paper: MGCD", "acc"] == 0.939
    assert np.isnan(found.loc["paper: MGCD", "acc_std"]) and found.loc[NAME, "seeds"] == 2
    assert found.loc[runs.ALL_VIEWS, "acc"] == 1.0
    assert (tmp_path / "two" / "table2.png").exists()
    file.write_text(before.replace("--split=views", "--split=views --scale=none"))
    code, _, err = launch(*arguments, f"--output_dir={tmp_path / 'three'}")
    assert code == 2 and f"trials_file: {file} holds runs of {NAME} on Mfeat with other" in err
    file.write_text(before)
    other = tmp_path / "two" / "table.csv"
    code, _, err = launch(*arguments, f"--trials_file={other}", f"--output_dir={tmp_path / 'no'}")
    assert code == 2 and "holds something else" in err and not (tmp_path / "no").exists()


def test_comparison_methods_are_run_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(runs.SETS, "Mfeat", str(save_toy(tmp_path)))
    table = ("--table=2", "--sets=Mfeat", "--methods=", "--seeds=1")
    code, out, err = launch(*table, "--peers=lmvsc", f"--output_dir={tmp_path / 'one'}")
    assert code == 0 and "LMVSC" in out, err
    made = {path.name for path in (tmp_path / "one").iterdir()}
    assert {"peers.csv", "peers.md", "peers.png", "peers_table.csv"} <= made
    assert not {"runs.csv", "table.csv"} & made
    code, _, err = launch(*table, "--peers=", f"--output_dir={tmp_path / 'two'}")
    assert code == 2 and "methods: got none; allowed is that for table 2 beside" in err


def test_rounds_of_a_run_that_was_cut_off_are_made_again():
    """Twice in the file they would be two values of one round."""
    cells = [("a", 0, "0.5"), ("a", 1, ""), ("b", 1, ""), ("b", 1, "0.7"), ("a", 1, "")]
    rows = pd.DataFrame(cells, columns=["row", "seed", "acc"]).assign(set="Mfeat")
    assert list(runs._ended(rows)) == [True, False, True, True, False]


@pytest.mark.slow
def test_figures_are_drawn(toy, tmp_path):
    code, _, err = launch("--figure=3", "--methods=literal", f"--output_dir={tmp_path / 'three'}")
    assert code == 0, err
    assert (tmp_path / "three" / "figure3.png").exists()
    rounds = {column: [1.0, 2.0, 3.0] for column in runs.COLUMNS}
    rounds |= {"set": "Aloi", "row": "gamma=100", "seed": [0, 0, 1], "round": [1, 2, 1]}
    tables.draw_figure_5(tmp_path, pd.DataFrame(rounds))
    assert {path.name for path in tmp_path.glob("figure5*")} == {
        "figure5_rounds.png",
        "figure5_weights.png",
    }
    tables.draw_figure_4(tmp_path / "figure4.png", pd.DataFrame(rounds | {"row": "robust: all"}))
    assert (tmp_path / "figure4.png").exists()


def test_a_score_that_nobody_published_is_no_bar_of_height_0(tmp_path):
    found = pd.DataFrame(
        {"set": "Aloi", "row": ["paper", "ours"], "acc": [0.5, 0.6], "nmi": [np.nan, 0.7]}
    ).assign(acc_std=[np.nan, 0.1], nmi_std=np.nan)
    with mock.patch.object(tables.charts, "bars") as drawn:
        tables.draw_table(tmp_path / "table2.png", found, "a title")
    panels = drawn.call_args.args[1]
    assert panels["ACC"] == {"Aloi": {"paper": (0.5, 0.0), "ours": (0.6, 0.1)}}
    np.testing.assert_array_equal(panels["NMI"]["Aloi"]["paper"], (np.nan, 0.0))
    assert panels["NMI"]["Aloi"]["ours"] == (0.7, 0.0)


def test_a_run_that_ends_earlier_stays_where_it_was():
    found = pd.DataFrame(
        {"row": "x", "seed": [0, 0, 1], "round": [1, 2, 1], "acc": [0.2, 0.4, 0.6]}
    )
    expected = [(1, 0.4, 0.2 * 2**0.5), (2, 0.5, 0.1 * 2**0.5)]
    np.testing.assert_allclose(tables.by_round(found, "x", "acc"), expected)


def test_the_mean_is_over_the_seeds_of_each_row_and_the_paper_comes_first():
    scores = {metric: [0.2, 0.4, np.nan, 1.0] for metric in ("acc", "nmi", "ari", "purity")}
    found = pd.DataFrame({"set": "Scene", "row": ["a", "a", "a", "b"]} | scores)
    table = tables.summarise(found, tables.published(2)).set_index("row")
    assert list(table.index)[2:] == ["a", "b"] and table.loc["a", "seeds"] == 2
    np.testing.assert_allclose(table.loc["a", ["acc", "acc_std"]].astype(float), [0.3, 0.02**0.5])
    assert "0.300 +- 0.141" in tables.text(table.reset_index())
    assert len(tables.published(3)) == 5 and len(tables.published(4)) == 3


def test_what_the_tables_are_made_of():
    for table, figure in ((2, None), (3, None), (4, None), (None, 3), (None, 4), (None, 5)):
        for rows in runs.cells(table, figure, [], None).values():
            for command in rows.values():  # every one is a valid configuration
                command.config(3, 2), command.hyperparams()
    assert list(runs.cells(2, None, ["Mfeat"], ["MGCD; literal"])["Mfeat"]) == ["MGCD, literal"]
    with pytest.raises(ValueError, match="methods: got 'nothing'"):
        runs.cells(3, None, [], ["nothing"])
    with pytest.raises(ValueError, match="sets: got 'here'"):
        runs.cells(2, None, ["here"], None)
    rows = runs.cells(3, None, [], None)["Aloi"]
    literal = rows["literal: without L_cl"]
    config = literal.config(2, 2).resolved()
    assert (config.losses, config.server, config.latent_dim) == (("r", "s", "dd"), "trained", 512)
    assert literal.rounds == 10 and rows["robust: all"].rounds == 5
    one_encoder = runs.cells(4, None, [], None)["Aloi"]["robust: one encoder, deep"].config(2, 2)
    assert (one_encoder.dual, one_encoder.encoder, one_encoder.mode) == (False, "deep", "robust")


@pytest.mark.parametrize(
    "arguments",
    [("--table=2,3",), ("--table=5",), ("--figure=1",), ("--table=2", "--figure=3"), ()],
)
def test_tables_and_figures_that_there_are_not(arguments, tmp_path):
    code, _, err = launch(f"--output_dir={tmp_path / 'never'}", *arguments)
    assert code == 2 and "allowed for mgcd" in err and not (tmp_path / "never").exists()


@pytest.mark.slow
def test_a_row_is_compiled_once_for_all_seeds_and_needs_no_labels(toy):
    arguments = [f"--dataset={toy}", "--mode=literal", *TINY, "--rounds=2", "--n_neighbours=3"]
    job = runner.prepare(parse(arguments, algorithm="mgcd"))
    problem = job.problems[0]._replace(labels=None)
    job = job._replace(problems=[problem])
    steps, progress = Steps(job.make, job.hyperparams, job.federation), mock.Mock()
    sizes = []
    for seed in (0, 1):
        rounds, state = runs.one_run(job, steps, seed, progress, "row")
        sizes.append(len(steps._programs.compiled))
        assert "consistency/acc" not in rounds[0] and np.isnan(rounds[-1]["acc"])
        assert set(np.asarray(state.server.clusters.labels)) == {0, 1, 2}
    assert sizes[0] == sizes[1] and progress.done.call_count == 4
