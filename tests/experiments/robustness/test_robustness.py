"""The study of hostile clients, from its flags to its files."""

import re
import types
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from experiments.lib import charts
from experiments.lib.progress import Progress
from experiments.lib.study import Rows
from experiments.robustness import __main__ as study
from experiments.robustness.__main__ import draw, main, markdown, summarised
from experiments.robustness.subjects import (
    MEAN,
    METHODS,
    NOBODY,
    QUICK_RULES,
    RULES,
    Cell,
    RobustnessSettings,
    Subject,
    agents,
    attackers,
    cells,
    clients,
    subject,
)
from jaxfedmvc import data
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.attacks import hostile
from jaxfedmvc.data.dataset import Dataset
from jaxfedmvc.federation import Federation
from jaxfedmvc.messages.robust import Ratio, robust
from jaxfedmvc.metrics import host
from tests.helpers import binaries

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "hostile-clients.md"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Two views of three well separated groups."""
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 3
    views = {f"view_{v}": rng.normal(size=(90, 4)) + 8 * np.eye(4)[labels] for v in range(2)}
    path = tmp_path_factory.mktemp("data") / "toy.npz"
    np.savez(path, labels=labels, **views)
    return path


def launch(toy, *arguments):
    options = ("--compilation_cache=", "--noprogress", f"--dataset={toy}")
    return binaries.launch(main, *options, *arguments)


def mean_method():
    """Clients send their sum and their number of rows; rows are below the mean of all, or above."""

    def client(key, sent, state, client):
        (x,) = client.views
        total = jnp.sum(x, axis=0, where=client.mask[:, None])
        return state, (total, jnp.sum(client.mask).astype(jnp.float32)), {}

    def server(key, state, messages, weights):
        ((total, n),) = messages
        return total / n, {}

    return FederatedAlgorithm(
        init=lambda key, federation: (jnp.zeros(1), (jnp.zeros(6),)),
        setup=(),
        round=(Phase(lambda state, ids: (), client, server, "sum"),),
        finish=(),
        assign=lambda mean, state, client: jnp.where(
            client.mask, (client.views[0] > mean[None])[:, 0].astype(jnp.int32), -1
        ),
    )


def toy_subject(name, settings, dataset, seeds):
    """Six clients with rows around 0 and 4."""
    truth = np.arange(10) % 2
    rng = np.random.default_rng(0)
    views = [{0: 4.0 * truth[:, None] + 0.1 * rng.normal(size=(10, 1))} for _ in range(6)]
    federation = Federation.from_clients(views, [truth] * 6)
    attack = hostile.scaled(50.0, [0])
    return Subject(
        {"alike": dict.fromkeys(seeds, federation)},
        mean_method(),
        1,
        {"scaled": lambda algorithm, ids: hostile.attacked(algorithm, attack, ids)},
        {},
        lambda algorithm, rule: robust(algorithm, rule, ratios={"round[0]": Ratio(0, 1)}),
    )


@pytest.mark.ci
def test_a_study_shows_what_a_rule_saves(toy, tmp_path):
    folder = tmp_path / "out"
    with mock.patch("experiments.robustness.__main__.subject", toy_subject):
        code, out, err = launch(
            toy, f"--output_dir={folder}", "--seeds=2", "--hostile_shares=.2", "--algorithm=mgcd"
        )
    assert code == 0, err
    runs = pd.read_csv(folder / "runs.csv")
    assert len(runs) == 2 * 2 * 6  # seeds, nobody or one of six, and no rule or five
    acc = runs.groupby(["attack", "rule"])["acc"].mean()
    assert (acc[NOBODY] == 1).all() and acc["scaled", MEAN] == 0.5
    assert (acc["scaled"].drop(MEAN) == 1).all()
    assert (folder / "mgcd.png").stat().st_size > 1000
    line = "| scaled | 17% | .50 +- .00 | 1.00 +- .00 |"
    assert line in out and line in (folder / "mgcd.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name != "vertcohirf"])
def test_a_quick_study_of_each_method(method, toy, tmp_path):
    folder = tmp_path / "out"
    arguments = (f"--algorithm={method}", "--hostile_clients=6", "--agent_samples=60")
    code, _, err = launch(toy, f"--output_dir={folder}", "--quick", *arguments)
    assert code == 0, err
    runs = pd.read_csv(folder / "runs.csv")
    assert runs["acc"].notna().all() and set(runs["rule"]) == {MEAN, *QUICK_RULES}


@pytest.mark.slow
def test_what_the_how_to_shows_runs():
    (code,) = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), flags=re.DOTALL)
    names = {}
    exec(code, names)
    found = host.score(names["clients"], names["labels"])
    assert found["all"]["pooled"]["acc"] > 0.7


@pytest.mark.slow
def test_where_no_rule_applies_the_rows_say_so(toy, tmp_path):
    folder = tmp_path / "out"
    code, out, err = launch(
        toy, f"--output_dir={folder}", "--quick", "--algorithm=vertcohirf", "--hostile_agents=3"
    )
    assert code == 0, err
    runs = pd.read_csv(folder / "runs.csv")
    assert runs[runs["rule"] == MEAN]["acc"].notna().all()
    assert runs[runs["rule"] != MEAN]["acc"].isna().all()
    assert "names, which have no mean" in out


def test_cells_and_attackers():
    settings = RobustnessSettings(hostile_shares=(0.2, 0.4), hostile_clients=5)
    found = subject("e_fkmvc", settings, data.load("digits"), [0])
    kinds = cells(found, settings)
    assert [cell.clients for cell in kinds[:2]] == ["alike", "skewed"]
    assert len(kinds) == 2 + 2 * (len(found.attacks | found.collusion) + 1)
    assert Cell("skewed", "claim", 0.2) in kinds and Cell("skewed", "scaled", 0.2) not in kinds
    ids = attackers(found, Cell("alike", "sign flip", 0.4))
    assert ids["sign flip"].tolist() == [3, 4, -1, -1, -1]
    assert (np.asarray(ids["scaled"]) == -1).all()


def test_shares_are_rounded_to_clients_one_at_least():
    toy = types.SimpleNamespace(n_clients=6, federations={"alike": {}}, attacks=["a"], collusion=[])
    found = cells(toy, RobustnessSettings(hostile_shares=(0.05, 0.3, 0.32)))
    assert [cell.share for cell in found] == [0, 1 / 6, 2 / 6]  # .3, 1.8 and 1.9


@pytest.fixture
def names():
    """Samples that are their number; the class is the number of their ten."""
    numbers = np.arange(90)
    views = tuple(v + numbers[:, None].astype(np.float32) for v in (0, 7, 3))
    return Dataset("names", views, numbers // 10)


def test_clients_have_their_own_samples_and_skewed_ones_few_classes(names):
    settings = RobustnessSettings(hostile_clients=3)
    largest = {}
    for kind, skew in (("alike", None), ("skewed", 0.1)):
        federation = clients(settings, names, 0, skew)
        (cohort,), (labels,) = federation.cohorts, federation.labels
        mask = np.asarray(cohort.mask)
        np.testing.assert_array_equal(
            np.asarray(labels)[mask], np.asarray(cohort.views[0])[mask][:, 0] // 10
        )
        of_client = [np.bincount(x[m], minlength=9) for x, m in zip(labels, mask, strict=True)]
        np.testing.assert_array_equal(sum(of_client), 10)
        largest[kind] = np.mean([counts.max() for counts in of_client])
    assert largest["alike"] < 7 < largest["skewed"]


def test_agents_hold_features_of_the_same_samples_with_their_labels(names):
    """All features rise with the number, and so does the class."""
    federation = agents(RobustnessSettings(agent_samples=40), names, 1, 3)
    order = np.argsort(np.asarray(federation.cohorts[0].views[0])[0, :, 0])
    for cohort, labels in zip(federation.cohorts, federation.labels, strict=True):
        x = np.asarray(cohort.views[0])[0, order, 0]
        assert len(x) == 40 and (np.diff(x) > 0).all()
        assert (np.diff(np.asarray(labels)[0, order]) >= 0).all()


def test_every_rules_rows_are_made_by_that_rule(tmp_path, monkeypatch):
    """A program is here the list of its rules, and a score the name of the one that is taken."""

    def one_run(subject, run, cell, rule, seed):
        return dict.fromkeys(study.SCORES, run[rule])

    by_name = {rule: lambda share, rule=rule: rule for rule in RULES}
    monkeypatch.setattr(study, "RULES", by_name)
    monkeypatch.setattr(study, "program", lambda subject, rules: rules or [MEAN])
    monkeypatch.setattr(study, "one_run", one_run)
    monkeypatch.setattr(study, "cells", lambda *_: [Cell("alike", NOBODY, 0.0)])
    rows, method = Rows(tmp_path / "runs.csv", study._CELL), types.SimpleNamespace(guard=robust)
    with Progress(False) as progress:
        study.measured("x", method, RobustnessSettings(), [0, 1], rows, progress)
    runs = pd.read_csv(tmp_path / "runs.csv")
    assert list(runs["rule"].unique()) == [MEAN, *RULES] and len(runs) == 12
    assert (runs["acc"] == runs["rule"]).all()


def test_lines_begin_where_nobody_attacks_clients_of_that_kind(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(charts, "lines", lambda path, panels, *rest, **how: drawn.update(panels))
    names = {"method": "x", "rule": MEAN, "note": "", "seed": 0, "nmi": 0.0, "ari": 0.0}
    rows = [
        names | {"clients": kind, "attack": attack, "share": share, "acc": acc}
        for kind, attack, share, acc in (
            ("alike", NOBODY, 0.0, 0.9),
            ("skewed", NOBODY, 0.0, 0.8),
            ("alike", "claim", 0.5, 0.7),
            ("skewed", "claim", 0.5, 0.6),
        )
    ]
    draw(tmp_path, summarised(pd.DataFrame(rows)), "")
    assert {name: lines[MEAN] for name, lines in drawn.items()} == {
        "claim": [(0, 0.9, 0), (50, 0.7, 0)],
        "claim, skewed clients": [(0, 0.8, 0), (50, 0.6, 0)],
    }


def test_tables():
    names = {"method": "x", "clients": "alike", "attack": NOBODY, "share": 0.0, "note": ""}
    rows = [
        names | {"rule": rule, "seed": seed, "acc": acc, "nmi": 0.0, "ari": 0.0}
        for rule in (MEAN, *RULES)
        for seed, acc in enumerate((0.5, 0.7))
    ]
    summary = summarised(pd.DataFrame(rows))
    assert summary["acc/std"][0] == pytest.approx(np.std([0.5, 0.7], ddof=1))
    assert "| nobody | 0% | .60 +- .14 |" in markdown(summary, "x")


def test_points_of_any_number_of_rules_stand_about_their_place(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(charts, "lines", lambda path, panels, *rest, **how: drawn.append(panels))
    names = {"method": "x", "clients": "alike", "note": "", "seed": 0, "nmi": 0.0, "ari": 0.0}
    rows = [
        names | {"attack": attack, "share": share, "rule": rule, "acc": 0.5}
        for rule in (MEAN, *QUICK_RULES)
        for attack, share in ((NOBODY, 0.0), ("scaled", 0.3))
    ]
    draw(tmp_path, summarised(pd.DataFrame(rows)), "")
    draw(tmp_path, summarised(pd.DataFrame(rows[:2])), "")
    three, one = ({rule: [x for x, *_ in p] for rule, p in d["scaled"].items()} for d in drawn)
    assert one == {MEAN: [0, 30]} and three["trimmed mean"] == [0, 30]
    assert three[MEAN] == pytest.approx([-0.6, 29.4]) and three["median"] == [0.6, 30.6]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--algorithm=kmeans", "algorithm: got 'kmeans'; allowed is fmcsc, e_fkmvc"),
        ("--hostile_shares=1.2", "hostile_shares: got"),
        ("--hostile_clients=2", "hostile_clients: got 2; allowed is 3 or more"),
        ("--assumed_share=0.5", "assumed_share: got 0.5; allowed is 0 or more, below 0.5"),
        ("--algorithm=mgcd,mgcd", "algorithm: got 'mgcd,mgcd'; allowed is each method once"),
        ("--skewed=0", "skewed: got 0.0; allowed is a finite number above 0"),
    ],
)
def test_wrong_flags_are_refused(toy, flag, said):
    code, _, err = launch(toy, flag)
    assert code != 0 and said in str(code) + err
