"""What the documentation shows must run, and what it names must be there."""

import importlib
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import adjusted_rand_score

from experiments.fedhk.__main__ import translated
from experiments.lib.choice import ChoiceSettings
from experiments.lib.command import parse
from experiments.lib.runner import prepare
from experiments.sweep import SweepSettings, settings_of
from jaxfedmvc import METHODS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    page
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
    if not {"_build", "generated"} & set(page.parts)
)
# Binary -> its method where no --algorithm is given.
BINARIES = {
    "run": "fmcsc",
    "sweep": "fmcsc",
    "fmcsc": "fmcsc",
    "fedhk": "e_fkmvc",
    "vertcohirf": "vertcohirf",
    "mgcd": "mgcd",
}


def code_blocks(page):
    """Returns the Python blocks of a page, in order."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def shown_commands():
    """Returns (binary, arguments) of the commands that the pages show for any method."""
    found = []
    for page in PAGES:
        # The notebook keeps commands of its day; the method that is added there is not in METHODS.
        if "notebook" in page.parts or page.name == "add-a-method.md":
            continue
        text = page.read_text().replace("\\\n", " ").replace("=NAME", "=fmcsc")
        for binary, rest in re.findall(r"python -m experiments\.([\w.]+)(.*)$", text, re.MULTILINE):
            line = rest.partition("`")[0].strip()
            if binary in BINARIES and "..." not in line:
                arguments = shlex.split(line, comments=True)
                found.append(pytest.param(binary, arguments, id=f"{binary} {line}"))
    return found


def run_blocks(page, choose=lambda code: True):
    """Runs the chosen blocks of a page in one session; returns its names."""
    names: dict = {}
    for place, code in enumerate(code_blocks(page)):
        if choose(code):
            exec(compile(code, f"{page}[{place}]", "exec"), names)
    return names


def relative_name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.slow
def test_tutorial_runs_and_collaboration_helps(capsys):
    names = run_blocks(DOCS / "tutorial.md")
    assert names["alone_found"]["pooled"]["ari"] < 0.3
    found = names["score"](names["federation"], names["result"].labels)
    assert found["all"]["pooled"]["ari"] > 0.5
    # Three groups in both hospitals.
    for labels in names["found"].labels:
        assert len(set(labels[labels >= 0].tolist())) == 3
    assert "fuzzifier 1.05" in capsys.readouterr().out


def test_arrays_become_federations(capsys):
    run_blocks(DOCS / "how-to" / "own-data.md", lambda code: "Federation" in code)
    printed = capsys.readouterr().out
    assert "4 clients with all views, 50 samples each" in printed  # two thirds of six clients
    assert "1 client with view 1, 95 samples each" in printed


@pytest.mark.slow
def test_vertical_agents_with_clusterers_of_their_own_find_the_six_clusters():
    names = run_blocks(DOCS / "how-to" / "vertical.md")
    truth = names["data"].load("multimodal").labels
    assert adjusted_rand_score(truth, names["result"].labels[0][0]) == 1.0


@pytest.mark.slow
def test_messages_under_masks_and_noise_still_cluster():
    names = run_blocks(DOCS / "how-to" / "private-runs.md", lambda code: "noisy" in code)
    (labels,), (truth,) = names["labels"], names["clients"].labels
    real = np.asarray(truth) >= 0
    assert adjusted_rand_score(np.asarray(truth)[real], np.asarray(labels)[real]) > 0.5


@pytest.mark.slow
def test_quantised_graphs_still_cluster():
    names = run_blocks(DOCS / "how-to" / "private-runs.md", lambda code: "quantised" in code)
    assert adjusted_rand_score(names["digits"].labels, names["labels"]) > 0.6


@pytest.mark.slow
def test_a_batch_of_tensors_is_decomposed_at_once(capsys):
    run_blocks(DOCS / "methods" / "fedhk.md")
    assert "(64, 6, 12, 3)" in capsys.readouterr().out


@pytest.mark.slow
def test_the_estimators_of_the_page_find_the_groups(capsys):
    names = run_blocks(DOCS / "how-to" / "estimator.md", lambda code: "lsimvc" not in code)
    assert (
        names["found"].score(
            names["hospitals"],
            [names["kinds"][r] for r in (slice(120), slice(120, 220), slice(220, 300))],
        )
        > 0.95
    )


def test_the_tables_of_the_page_are_read_by_its_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    names = ["hb", "wbc", "img_0", "img_1"]
    table = pd.DataFrame(rng.random((40, 4)), columns=names).assign(diagnosis=list("abab") * 10)
    table.insert(0, "patient", range(40))
    table.loc[30:, ["img_0", "img_1"]] = np.nan
    table.to_csv("patients.csv", index=False)
    table[["patient", "hb"]].to_csv("clinic.csv", index=False)
    table[["patient", "wbc"]].iloc[10:].to_csv("genes.csv", index=False)
    Path("hospitals").mkdir()
    sites = table.drop(columns="patient")
    sites[:20].to_csv("hospitals/a.csv", index=False)
    sites[20:30].drop(columns=["img_0", "img_1"]).to_csv("hospitals/b.csv", index=False)
    page = (DOCS / "how-to" / "own-data.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"python -m experiments\.run(.*(?:\.csv|hospitals/).*)$", page, re.MULTILINE)
    found = []
    for line in lines:
        problem = prepare(parse(shlex.split(line))).problems[0]
        cohorts = problem.federation.cohorts
        found.append({c.view_ids: int(np.asarray(c.mask).sum()) for c in cohorts})
    assert found == [{(0, 1): 30, (0,): 10}, {(0, 1): 30, (0,): 10}, {(0, 1): 20, (0,): 10}]


@pytest.mark.parametrize(("binary", "arguments"), shown_commands())
def test_shown_commands_are_understood(binary, arguments, monkeypatch):
    monkeypatch.chdir(ROOT)  # presets
    arguments = [a for a in arguments if a != "--help"]
    if binary == "fedhk":
        arguments = translated(arguments)
    extra = (SweepSettings if binary == "sweep" else ChoiceSettings,)
    command = parse(arguments, algorithm=BINARIES[binary], extra=extra)
    command.config(n_clusters=3, n_clients=4)
    command.hyperparams()
    if binary == "sweep":
        assert settings_of(command, command.extra[-1])[1]


@pytest.mark.parametrize("page", PAGES, ids=relative_name)
def test_links_to_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=relative_name)
def test_names_of_the_library_are_there(page):
    for target in re.findall(r"\{py:\w+\}`~?(jaxfedmvc[\w.]*)`", page.read_text()):
        module, _, name = target.rpartition(".")
        assert is_module(target) or hasattr(importlib.import_module(module), name), target


def is_module(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_its_paper_and_its_settings_in_the_docs(name):
    if METHODS[name].paper:
        keys = re.findall(r"@\w+\{(\w+),", (DOCS / "references.bib").read_text())
        assert METHODS[name].paper in keys, "the method's paper is not in docs/references.bib"
    pages = "\n".join(page.read_text() for page in (DOCS / "methods").glob("*.md"))
    # A reference without a federation has the settings of its method.
    is_there = f"{{settings}} {name}\n" in pages or name == "local_fmcsc"
    assert is_there, f"no page under docs/methods has the block ```{{settings}} {name}"
