"""The door without settings: chosen without labels, said in a line, kept; and the study of it."""

import json
import types

import numpy as np
import pandas as pd
import pytest

from experiments import run
from experiments.lib import runner
from experiments.lib.command import parse
from experiments.vertcohirf import unsupervised
from experiments.vertcohirf.choice import TABLE, LocalChoice, choosing, saved
from jaxfedmvc.algorithms.vertcohirf import choice
from jaxfedmvc.engine import Traffic
from tests.helpers import binaries

COMMON = ("--algorithm=vertcohirf", "--compilation_cache=", "--noprogress")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three groups in two views and noise in a third, without labels and with wrong ones."""
    folder = tmp_path_factory.mktemp("data")
    rng, truth = np.random.default_rng(0), np.arange(60) % 3
    views = {f"view_{v}": 9 * np.eye(3)[truth] + rng.normal(size=(60, 3)) for v in range(2)}
    views["view_2"] = rng.normal(size=(60, 3))
    np.savez(folder / "plain.npz", **views)
    np.savez(folder / "wrong.npz", **views, labels=np.arange(60) % 7)
    np.savez(folder / "right.npz", **views, labels=truth)
    return folder


def chooses(*flags):
    return choosing(parse(["--dataset=digits", *flags], algorithm="vertcohirf")) is not None


def test_what_is_given_holds():
    assert chooses() and chooses("--seeds=3", "--level=0", "--local_clusters=auto")
    assert chooses("--n_clusters=4")  # which is told, and no setting of the method
    given = ("--local_clusters=4", "--relaxed=0.8", "--repetitions=2")
    given += ("--feature_share=0.5", "--base=dbscan", "--relaxed_agents=0.5", "--limit=3")
    for flag in given:
        assert not chooses(flag), flag
    assert not chooses("--dataset=multimodal")  # its defaults are the paper's
    command = parse(["--local_clusters=auto", "--repetitions=3"], algorithm="vertcohirf")
    job = choosing(command)
    assert "--repetitions=3" in job.command.flag_lines()
    found = LocalChoice(
        pd.DataFrame({"local_clusters": [2, 5], "relaxed_agents": [np.nan, 0.8]}), 0
    )
    strict, relaxed = (job.applied(found._replace(row=row)) for row in (0, 1))
    assert (strict.config(None, 2).local_clusters, strict.hyperparams().relaxed_agents) == (2, None)
    assert relaxed.config(None, 2).local_clusters == 5
    assert relaxed.hyperparams().relaxed_agents == 0.8 and relaxed.config(None, 2).repetitions == 3


def test_a_number_that_is_told_is_said():
    tried = pd.DataFrame(
        {
            "local_clusters": [2, 5],
            "relaxed_agents": [np.nan, 0.8],
            "clusters": [4, 9],
            "agreement": [0.25, 0.5],
            "bytes_up": [1, 1],
            "bytes_down": [1, 1],
            "seconds": [1.0, 1.0],
        }
    )
    line, _ = LocalChoice(tried, 1, told=7).lines()
    assert line.endswith(
        "what the agents find alone, in 7 clusters as told (ARI 0.500, from 0.250 on)"
    )
    line, _ = LocalChoice(tried, 1).lines()
    assert line.endswith("what the agents find alone (ARI 0.500, from 0.250 on)")


@pytest.mark.parametrize("told", [1, 61])  # one cluster agrees with all trials alike; 60 rows
def test_one_cluster_and_more_than_rows_cannot_be_told(told, data, tmp_path):
    given = (*COMMON, f"--dataset={data / 'right.npz'}", f"--n_clusters={told}")
    code, _, err = binaries.launch(run.main, *given, f"--output_dir={tmp_path / 'out'}")
    assert code == 2, err
    assert err.startswith(f"error: n_clusters: got {told}; allowed is 2 to 60 where"), err
    assert not (tmp_path / "out").exists()


def test_the_flags_of_a_job_begin_the_same_job():
    first = choosing(parse(["--dataset=digits"], algorithm="vertcohirf")).command
    again = choosing(parse(first.flag_lines(), algorithm="vertcohirf")).command
    assert first.flag_lines() == again.flag_lines()


@pytest.mark.ci
def test_settings_are_chosen_and_kept(data, tmp_path, monkeypatch):
    folder, started = tmp_path / "out", []
    monkeypatch.setattr(runner, "run", lambda command, path, found: started.append(command))
    given = (*COMMON, f"--dataset={data / 'wrong.npz'}", f"--output_dir={folder}")
    code, out, err = binaries.launch(run.main, *given)
    assert code == 0, err
    line, sent = out.splitlines()
    assert "local_clusters=3, relaxed (0.8) consensus" in line and "(ARI 1.000" in line
    found = saved(folder)
    assert f"{found.tried['bytes_up'].sum() / 1e6:.3f} MB up" in sent
    assert (found.tried["bytes_up"] > 0).all()
    facts = found.facts()
    assert facts["bytes_choice"]["up"] == found.tried["bytes_up"].sum()
    assert facts["seconds_choice"] > 0
    # The command is the job's that was asked for, and not that of the run that was kept.
    assert "--local_clusters=auto" in started[0].arguments
    assert "--local_clusters=3" not in started[0].arguments
    assert (found.local_clusters, found.relaxed_agents) == (3, 0.8)
    assert list(found.tried["local_clusters"]) == 2 * [2, 3, 4, 5, 6]  # ten samples for each
    # A job that was killed after its choice goes on with it, whatever it would choose now.
    found._replace(row=0).save(folder, "")
    code, out, err = binaries.launch(run.main, *given, "--resume")
    assert (code, out) == (0, ""), err
    first, again = (c.config(7, 3).local_clusters for c in started)
    assert (first, again) == (3, 2)
    assert [c.hyperparams().relaxed_agents for c in started] == [0.8, None]


@pytest.mark.slow
def test_a_job_without_settings_finds_the_groups(data, tmp_path):
    folder = tmp_path / "out"
    given = (*COMMON, f"--dataset={data / 'plain.npz'}", f"--output_dir={folder}")
    code, _, err = binaries.launch(run.main, *given)
    assert code == 0, err
    labels = pd.read_csv(folder / "labels.csv")["agent_0"]
    assert len(np.unique(labels)) == 3
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["local_clusters_tried"]) == 10
    assert "Local number of clusters" in (folder / "report.html").read_text()


def test_without_rounds_there_is_nothing_to_choose_by(data, tmp_path):
    given = (*COMMON, f"--dataset={data / 'right.npz'}", "--rounds=0")
    code, _, err = binaries.launch(run.main, *given, f"--output_dir={tmp_path / 'out'}")
    assert code == 2 and err.startswith("error: rounds: got 0; allowed is 1 or more where")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_labels_do_not_matter(data, tmp_path):
    for name in ("plain", "wrong"):
        given = (*COMMON, f"--dataset={data / name}.npz", f"--output_dir={tmp_path / name}")
        assert binaries.launch(run.main, *given)[0] == 0
    plain, wrong = (
        pd.read_csv(tmp_path / name / TABLE).drop(columns="seconds") for name in ("plain", "wrong")
    )
    pd.testing.assert_frame_equal(plain, wrong, check_exact=True)


@pytest.mark.slow
def test_the_study_scores_the_choice_beside_local_k_means(data, tmp_path):
    file = tmp_path / "out" / "runs.csv"
    given = (f"--sets={data / 'right.npz'}", "--seeds=2")
    common = ("--compilation_cache=", "--noprogress", f"--output_dir={tmp_path / 'out'}")
    code, out, err = binaries.launch(unsupervised.main, *given, *common)
    assert code == 0, err
    runs = pd.read_csv(file)
    assert list(runs.columns) == list(unsupervised.COLUMNS) and len(runs) == 2
    assert (runs["ari"] > 0.9).all() and (runs["tuned_ari"] >= runs["ari"]).all()
    assert (runs["told_ari"] > 0.9).all() and (runs["told_consensus_ari"] > 0.9).all()
    assert (runs["local_mean"] < 0.8).all() and (runs["local_best"] > 0.9).all()
    assert "1.000 +- 0.000" in out and "on 1 of 1 sets" in out
    file.write_text(file.read_text()[:-9])  # killed while the last row was written
    code, again, err = binaries.launch(unsupervised.main, *given, *common, "--resume")
    assert code == 0 and again.partition("\n\n")[2] == out.partition("\n\n")[2], err
    kept = pd.read_csv(file)
    pd.testing.assert_frame_equal(kept.drop(columns="seconds"), runs.drop(columns="seconds"))
    given += (f"--runs_file={file}",)
    code, _, _ = binaries.launch(unsupervised.main, *given, *common[:2], f"--output_dir={file}x")
    assert code == 0 and len(pd.read_csv(file)) == 2  # nothing was left to run
    given = (*given, *common[:2], f"--output_dir={file}y", "--max_rows=50")
    code, _, err = binaries.launch(unsupervised.main, *given)
    assert code == 2 and "with other settings: --max_rows=2000, --max_rows=50 differ" in err
    kept.drop(columns="told_ari").to_csv(tmp_path / "out" / "runs.csv", index=False)
    code, _, err = binaries.launch(unsupervised.main, *given[:2], *common, "--resume")
    assert code == 2 and "lacks told_ari" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--sets=",), "sets: got none"),
        (("--max_rows=2",), "max_rows: got 2"),
        (("--sets=no_such_set",), "no_such_set"),
    ],
)
def test_bad_flags_of_the_study_end_in_one_line(flags, told, tmp_path):
    given = (*flags, f"--output_dir={tmp_path / 'out'}", "--compilation_cache=")
    code, _, err = binaries.launch(unsupervised.main, *given)
    assert code == 2 and told in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_labels_choose_and_what_agreement_does_stand_in_their_columns(monkeypatch):
    """Of three trials the first agrees best, the last with as many clusters, the second is right.

    Two classes against two halves of six samples: pairs 2 of 6, 2.4 by chance, an ARI of -1/9.
    """
    truth, halves = np.arange(6) % 2, np.arange(6) // 3
    labels = {2: np.zeros(6, int), 3: truth, 4: halves}
    sent = np.zeros((2, 6), int)
    tried = [
        choice.Trial(c, None if c == 2 else 0.8, found, sent, Traffic(1, 2))
        for c, found in labels.items()
    ]
    agree = {None: np.array([0.9, 0.1, 0.2]), 2: np.array([0.1, 0.2, 0.9])}
    consensus = {
        None: types.SimpleNamespace(labels=halves, n_clusters=5),
        2: types.SimpleNamespace(labels=truth, n_clusters=2),
    }
    monkeypatch.setattr(choice, "trials", lambda *_, **__: iter(tried))
    monkeypatch.setattr(choice, "agreements", lambda tried, told=None: agree[told])
    monkeypatch.setattr(choice, "common", lambda tried, told=None: consensus[told])
    views = [9.0 * truth[:, None], 9.0 * halves[:, None]]
    found = unsupervised.one_run(None, views, truth, 0)
    scores = {name: value for name, value in found.items() if "ari" in name or "local_" in name}
    assert scores == pytest.approx(
        {
            "local_mean": 4 / 9,
            "local_best": 1,
            "local_clusters": 2,
            "ari": 0,
            "tuned_local_clusters": 3,
            "tuned_ari": 1,
            "consensus_ari": -1 / 9,
            "told_ari": -1 / 9,
            "told_consensus_ari": 1,
        }
    )
    assert np.isnan(found["relaxed_agents"]) and found["tuned_relaxed_agents"] == 0.8
    numbers = ("clusters", "consensus_clusters", "told_clusters", "classes", "samples", "agents")
    assert [found[name] for name in numbers] == [1, 5, 2, 2, 6, 2]


def test_a_table_counts_the_sets_on_which_a_choice_is_as_good():
    """Of two sets one is above the mean of the agents and below the best, the other above both."""
    of_all = {"samples": 6, "agents": 2, "classes": 2, "clusters": 3, "consensus_clusters": 4}
    runs = pd.DataFrame(
        [
            {"set": name, **of_all, **dict.fromkeys(unsupervised._SHOWN, 0.0)}
            | {"local_mean": 0.2, "local_best": 0.5, "ari": ari}
            for name, aris in (("a", (0.3, 0.5)), ("b", (0.6, 0.6)))
            for ari in aris
        ]
    )
    table = unsupervised.summary(runs)
    assert list(table["seeds"]) == [2, 2]
    np.testing.assert_allclose(table["ari_std"], [np.sqrt(0.02), 0], atol=1e-9)
    told = unsupervised.shown(table).splitlines()
    assert "0.400 +- 0.141" in told[2] and told[2].startswith("| a | 6, 2, 2 |")
    line, *others = [line for line in told if "of 2 sets" in line]
    assert line.endswith(
        "at or above the mean of local k-means on 2 of 2 sets, at or above the best agent on 1"
    )
    assert all("on 0 of 2 sets, at or above the best agent on 0" in other for other in others)
