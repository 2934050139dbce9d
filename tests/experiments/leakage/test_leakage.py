"""The study that reads messages, from its flags to its files."""

import functools
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from experiments.leakage.__main__ import main
from experiments.leakage.models import ModelAttacks, halved, last_model
from experiments.leakage.scenario import LeakageSettings, deal
from experiments.leakage.uploads import forms_of_graphs
from jaxfedmvc import data, engine
from jaxfedmvc.algorithm import Phase
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.fmcsc.client import Update
from jaxfedmvc.federation import single_client
from jaxfedmvc.messages import nbytes
from tests.helpers import binaries


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
        main,
        "--compilation_cache=",
        "--noprogress",
        f"--dataset={toy}",
        f"--output_dir={folder}",
        "--leak_neighbours=5",
        "--leak_fit_epochs=5",
        "--leak_pretrain_epochs=2",
        *arguments,
    )


# --- Messages about samples -----------------------------------------------------------------------


@pytest.mark.ci
def test_a_job_tells_what_messages_give_away(toy, tmp_path):
    folder = tmp_path / "out"
    code, out, err = launch(
        toy,
        folder,
        "--seeds=1",
        "--leak_forms=factors",
        "--leak_insiders=0.4",
        "--algorithm=mgcd,latents",
    )
    assert code == 0, err
    runs = pd.read_csv(folder / "runs.csv").set_index("form")
    assert list(runs.index) == ["factors", "latents"]
    assert runs.loc["factors", "bytes"] == 2 * 60 * 4 * 4  # two factors of 60 samples and rank 4
    assert runs.loc["latents", "bytes"] == 60 * 4 * 4
    assert (runs["subspace"] > 0.999).all()
    assert runs.loc["factors", "insiders"] > 0.3 > runs.loc["factors", "permuted"]
    assert 0.3 < runs.loc["factors", "spread"] < 1 and np.isnan(runs.loc["latents", "spread"])
    assert runs.loc["factors", "acc"] == runs.loc["factors", "upload_acc"] == 1
    assert runs.loc["latents", "acc"] == runs.loc["latents", "upload_acc"] == 1
    command = runs.loc["latents", "command"]
    assert command.startswith("experiments.leakage --algorithm=mgcd,latents --dataset=")
    assert "--leak_forms=factors" in command and "--output_dir" not in command
    assert runs[["device", "jax", "seconds"]].notna().all(axis=None)
    assert runs["membership"].isna().all() and np.isnan(runs.loc["latents", "permuted"])
    assert "rows in disorder" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["forms"]) == list(runs.index) and summary["participants"] == 60
    subspace = summary["forms"]["factors"]["subspace"]
    assert subspace["mean"] == runs.loc["factors", "subspace"] and subspace["std"] == 0
    assert (folder / "leakage.png").read_bytes()[:4] == b"\x89PNG"
    told = pd.read_csv(folder / "methods.csv").set_index("method")
    assert set(told.index) == set(METHODS)
    assert list(told[told["known"] == "measured"].index) == ["mgcd"]
    assert told.index[0] in {"local_kmeans", "local_fmcsc"}  # whose clients send nothing
    assert told.loc["lsimvc", "reveals"] == "All rows are uploaded." and "lsimvc (rows" in out


@pytest.mark.slow
def test_every_form_travels_and_is_decoded_to_a_graph():
    rng = np.random.default_rng(0)
    graph = jnp.asarray(rng.normal(size=(12, 12)), jnp.float32)

    def send(key, sent, state, client):
        return state, graph, {}

    def tell(key, state, messages, weights):
        return messages[0], {}

    plain = Phase(lambda state, view_ids: (), send, tell)
    decoded, sizes = {}, {}
    for name, form in forms_of_graphs(3).items():
        phase = form.change(plain)
        _, wire, _ = phase.client(jax.random.key(0), (), (), single_client({0: np.zeros((1, 1))}))
        stacked = jax.tree.map(lambda x: x[None], wire)
        decoded[name] = np.asarray(phase.server(None, (), (stacked,), (jnp.ones(1),))[0][0])
        sizes[name] = nbytes(wire)
    assert sizes == {
        "factors": 576,
        "dense": 576,
        "top 3": 288,
        "nearest 3": 288,
        "8 bits": 240,
        "2 bits": 132,
        "noise 1x": 576,
        "noise 10x": 576,
        "response 8": 24,
        "response 4": 24,
    }
    assert np.all(decoded["nearest 3"] >= 0) and np.all(np.sum(decoded["top 3"] != 0, axis=1) == 3)
    rms = np.sqrt(np.mean(np.asarray(graph) ** 2))
    for level in (1, 10):
        noise = np.std(decoded[f"noise {level}x"] - graph)
        np.testing.assert_allclose(noise, level * rms, rtol=0.2)


# --- Models ---------------------------------------------------------------------------------------


@pytest.fixture
def models(toy):
    """FMCSC's attacks and the data of a seed."""
    settings = LeakageSettings(leak_insiders=0.4, leak_pretrain_epochs=1)
    return ModelAttacks(3, settings), deal(data.load(str(toy)), 0, None, settings)


def untrained(algorithm, federation, key, rounds=1):
    """A run of FMCSC in which no client trains: every message is its global model, twice."""
    state = engine.start(algorithm, federation, key)
    models = state.server.models
    infos = []
    for cohort in federation.cohorts:
        sent = Update(
            {cohort.view_ids: jax.tree.map(lambda x: 2 * x, models[cohort.view_ids])},
            {cohort.view_ids: jnp.float32(2)},
        )
        shape = (rounds, cohort.n_clients)
        stacked = jax.tree.map(lambda x, s=shape: jnp.broadcast_to(x, (*s, *x.shape)), sent)
        infos.append({"message": stacked})
    labels = tuple(jnp.zeros(cohort.mask.shape, jnp.int32) for cohort in federation.cohorts)
    info = {"rounds": [{"clients": tuple(infos)}]}
    return engine.RunResult(state, labels, info, None, None, jnp.int32(rounds))


@pytest.mark.slow
def test_models_give_prototypes_and_memberships_away(models):
    attacks, scenario = models
    with mock.patch.object(attacks, "run", functools.partial(untrained, attacks.algorithm)):
        found = attacks.scores(scenario, 0)
    # Nobody trained on anything, and three centres of public samples are near to all samples.
    assert abs(found["membership"] - 0.5) < 0.15 and abs(found["calibrated"] - 0.5) < 0.15
    assert found["public_prototypes"] > 0.5 > found["prototypes"]


def test_what_all_models_find_hard_is_no_sign_of_a_stranger(models):
    """Own samples are the hard ones, and the client's model has learned a little of them."""
    attacks, scenario = models
    _, federation = attacks.deal(scenario, 0)
    hard = {"client's": 9.0, "public": 10.0}

    def errors(model, views):
        own = {v: len(x) - len(scenario.views[v]) for v, x in views.items()}
        return {v: np.where(np.arange(len(x)) < own[v], hard[model], 1.0) for v, x in views.items()}

    with (
        mock.patch.object(attacks, "_errors", errors),
        mock.patch("experiments.leakage.models.last_model", lambda sent, *_: sent),
    ):
        n = len(federation.cohorts)
        found = attacks.memberships(federation, scenario.views, ["client's"] * n, ["public"] * n)
    assert found == {"membership": 0.0, "calibrated": 1.0}


def test_a_model_is_read_out_of_the_last_round():
    sent = Update({(0,): jnp.array([[2.0, 4.0], [6.0, 9.0]])}, {(0,): jnp.array([[1, 2], [2, 3]])})
    assert last_model(sent, 0, (0,)) == 3 and last_model(sent, 1, (0,)) == 3


def test_public_samples_train_in_halves():
    known, outside = halved([np.arange(5), 10 * np.arange(5)])
    np.testing.assert_array_equal(known, [[0, 1, 0, 1, 0], [0, 10, 0, 10, 0]])
    np.testing.assert_array_equal(outside, [[2, 3, 4], [20, 30, 40]])


@pytest.mark.slow
def test_fmcscs_messages_are_overheard_whole(models):
    attacks, scenario = models
    _, federation = attacks.deal(scenario, 0)
    result = jax.eval_shape(attacks.run, federation, jax.random.key(0))
    full, *partial = (info["message"] for info in result.info["rounds"][0]["clients"])
    assert set(full.models) == {(0, 1), (0,), (1,)} and full.weights[(0, 1)].shape == (1, 2)
    assert [set(sent.models) for sent in partial] == [{(0,)}, {(1,)}]


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--algorithm=mgcd,none", "algorithm: got 'mgcd,none'; allowed are mgcd, latents, fmcsc"),
        ("--leak_forms=top", "leak_forms: got 'top'; allowed are factors, dense, top 5"),
        ("--leak_insiders=0", "leak_insiders: got 0.0, 0 of 60 participants"),
        ("--leak_neighbours=60", "leak_neighbours: got 60; allowed is below 60"),
        ("--leak_rounds=0", "leak_rounds: got 0; allowed is 1 or more"),
        ("--n_clusters=1", "n_clusters: got 1; allowed is 2 or more"),
    ],
)
def test_bad_flags_end_in_one_line_and_leave_nothing(flag, line, toy, tmp_path):
    code, _, err = launch(toy, tmp_path / "bad", flag)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert line in err and not (tmp_path / "bad").exists()
