"""The binary that reads messages, from its flags to its files."""

import csv
import json

import jax
import numpy as np
import pytest

from experiments import leakage
from tests import binaries


@pytest.fixture(scope="module", autouse=True)
def small_programs():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Two views of three well separated groups."""
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 3
    views = {f"view_{v}": rng.normal(size=(120, 4)) + 8 * np.eye(4)[labels] for v in range(2)}
    path = tmp_path_factory.mktemp("data") / "toy.npz"
    np.savez(path, labels=labels, **views)
    return path


def launch(toy, folder, *arguments):
    return binaries.launch(
        leakage, "--compilation_cache=", "--noprogress", f"--dataset={toy}",
        f"--output_dir={folder}", "--leak_neighbours=5", "--leak_fit_epochs=5",
        "--leak_pretrain_epochs=2", *arguments,
    )  # fmt: skip


def test_a_job_tells_what_messages_give_away(toy, tmp_path):
    folder = tmp_path / "out"
    code, out, err = launch(
        toy, folder, "--seeds=1", "--leak_forms=factors,response 4", "--leak_insiders=0.4"
    )
    assert code == 0, err
    with (folder / "runs.csv").open(newline="") as file:
        rows = {row["form"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["factors", "response 4", "latents", "fmcsc"]
    scores = {name: {k: float(v) for k, v in r.items() if k != "form"} for name, r in rows.items()}
    assert scores["factors"]["bytes"] == 2 * 60 * 4 * 4  # two factors of 60 samples and rank 4
    assert scores["response 4"]["bytes"] == 60 * 8
    assert scores["latents"]["bytes"] == 60 * 4 * 4
    assert scores["factors"]["subspace"] > 0.999 and scores["latents"]["subspace"] > 0.999
    assert scores["response 4"]["subspace"] < 0.9
    assert scores["factors"]["insiders"] > 0.3 > scores["factors"]["permuted"]
    assert scores["factors"]["acc"] == scores["factors"]["upload_acc"] == 1
    assert np.isnan(scores["fmcsc"]["insiders"]) and 0 < scores["fmcsc"]["membership"] < 1
    assert np.isnan(scores["latents"]["membership"])
    assert "'-' since nothing travels for a sample" in out and "rows in disorder" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["forms"]) == set(rows) and summary["participants"] == 60
    assert (folder / "leakage.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--attacked=mgcd,none", "attacked: got 'mgcd,none'; allowed are mgcd, latents, fmcsc"),
        ("--leak_forms=top", "leak_forms: got 'top'; allowed are factors, dense, top 5"),
        ("--leak_insiders=0", "leak_insiders: got 0.0, 0 of 60 participants"),
        ("--n_clusters=1", "n_clusters: got 1; allowed is 2 or more"),
    ],
)
def test_bad_flags_end_in_one_line_and_leave_nothing(flag, line, toy, tmp_path):
    code, _, err = launch(toy, tmp_path / "bad", flag)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert line in err and not (tmp_path / "bad").exists()
