"""docs/how-to/add-a-method.md, followed to the letter: one file, one line, and all works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "add-a-method.md"
NAME = "federated_kmeans"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The page's file, and a module that adds its line to the registry."""
    folder = tmp_path_factory.mktemp("method")
    file, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / f"{NAME}.py").write_text(file)
    (folder / "register_method.py").write_text(
        f"from {NAME} import *\n"
        "from jaxfedmvc.algorithms import METHODS\n"
        "from jaxfedmvc.algorithms.registry import Method\n" + line
    )
    return folder


def run(plugin, *command, **settings):
    environment = os.environ | {
        "PYTHONPATH": f"{plugin}{os.pathsep}{ROOT}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "MPLBACKEND": "agg",
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        **settings,
    )


def binary(plugin, module, *arguments):
    start = f"import register_method; from experiments.{module} import main; main()"
    job = (f"--algorithm={NAME}", "--dataset=digits", "--n_clients=4", "--noprogress")
    done = run(plugin, "-c", start, *job, "--compilation_cache=", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ci
def test_it_runs_and_is_scored(plugin, tmp_path):
    out = binary(plugin, "run", "--rounds=8", f"--output_dir={tmp_path}/out")
    assert NAME in out and "pooled k-means" in out
    rounds = pd.read_csv(tmp_path / "out" / "rounds.csv")
    assert list(rounds["round"]) == list(range(1, 9))
    # Lloyd's steps never raise the cost, and the clusters are those of handwritten digits.
    assert (rounds["loss"].diff().dropna() <= 1e-4).all()
    assert rounds["all/pooled/acc"].iloc[-1] > 0.4
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "summary.json",
        "rounds.csv",
        "labels.csv",
        "flags.txt",
        "data.json",
        ".lock",
        "curves.png",
        "report.html",
    }


@pytest.mark.slow
def test_a_wrong_number_is_named(plugin):
    start = "import register_method; from experiments.run import main; main()"
    job = (f"--algorithm={NAME}", "--dataset=digits", "--noprogress", "--inertia=1.5")
    done = run(plugin, "-c", start, *job)
    assert done.returncode != 0
    assert "inertia: got 1.5; allowed is from 0 up to, but not including, 1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_help_shows_its_settings(plugin):
    out = binary(plugin, "run", "--help")
    assert "--inertia: Share of the old centroid that a step keeps" in " ".join(out.split())


@pytest.mark.slow
def test_it_sweeps_over_its_own_hyperparameter(plugin, tmp_path):
    binary(
        plugin,
        "sweep",
        "--grid=inertia=0,0.5",
        "--seeds=2",
        "--rounds=2",
        f"--output_dir={tmp_path}/out",
    )
    runs = pd.read_csv(tmp_path / "out" / "runs.csv")
    assert len(runs) == 4 and set(runs["inertia"]) == {0.0, 0.5}


@pytest.mark.slow
def test_it_goes_on_where_it_was_broken_off(plugin, tmp_path):
    arguments = ("--rounds=4", f"--output_dir={tmp_path}/out")
    binary(plugin, "run", *arguments, "--checkpoint_every=2")
    before = (tmp_path / "out" / "rounds.csv").read_bytes()
    stop = (
        "import register_method, os, experiments.lib.runner as runner\n"
        "from jaxfedmvc.engine import checkpoint\n"
        "save, seen = checkpoint.save, []\n"
        "def save_and_die(*arguments):\n"
        "    save(*arguments); seen.append(1)\n"
        "    if len(seen) == 3: os.kill(os.getpid(), 9)\n"
        "checkpoint.save = save_and_die\n"
        "from experiments.run import main; main()\n"
    )
    job = (f"--algorithm={NAME}", "--dataset=digits", "--n_clients=4", "--noprogress")
    again = ("--compilation_cache=", "--rounds=4", f"--output_dir={tmp_path}/again")
    assert run(plugin, "-c", stop, *job, *again).returncode == -9
    assert not (tmp_path / "again" / "summary.json").exists()
    binary(plugin, "run", "--rounds=4", f"--output_dir={tmp_path}/again", "--resume")
    assert (tmp_path / "again" / "rounds.csv").read_bytes() == before


@pytest.mark.slow
def test_it_passes_the_tests_of_every_method(plugin):
    files = (
        "tests/algorithms/test_common.py",
        "tests/deploy/test_equal.py",
        "tests/experiments/test_settings.py",
        "tests/test_signatures.py",
    )
    done = run(
        plugin,
        "-m",
        "pytest",
        "-p",
        "register_method",
        "-p",
        "no:cacheprovider",
        "-rA",
        "-m",
        "",
        *files,
        "-k",
        NAME,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert all(f"PASSED {file}" in done.stdout for file in files)
