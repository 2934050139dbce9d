"""Who knows what in the study of messages, and what its scores are of, with known answers."""

import collections
import types

import jax
import numpy as np
import pandas as pd
import pytest

from experiments.leakage import __main__ as study
from experiments.leakage import encodings, labels, samples, sums
from experiments.leakage.scenario import LeakageSettings, deal
from experiments.leakage.spreading import Spread
from experiments.lib import charts
from jaxfedmvc.data.dataset import Dataset

SETTINGS = LeakageSettings(leak_insiders=0.25, leak_neighbours=5, leak_clients=2)


@pytest.fixture(scope="module")
def scenario():
    """Features that name their sample and their view; the class is the number modulo four."""
    names = np.arange(41)
    views = tuple(np.stack([names, (v + 1) * names % 7], 1).astype(np.float32) for v in range(2))
    return deal(Dataset("names", views, names % 4), 3, None, SETTINGS)


# --- Who knows what -------------------------------------------------------------------------------


def test_nobody_is_a_participant_and_public(scenario):
    own, public = ([view[:, 0] for view in of] for of in (scenario.views, scenario.public_views))
    for side, federation in ((own, scenario.participants), (public, scenario.public)):
        assert len(side[0]) == 20
        np.testing.assert_array_equal(side[0], side[1])
        held = [np.asarray(cohort.views[0])[0, :, 0] for cohort in federation.cohorts]
        np.testing.assert_array_equal(held, side)
        assert federation.labels is None
    assert len({*own[0], *public[0]}) == 40
    np.testing.assert_array_equal(scenario.labels, own[0] % 4)


def test_insiders_are_participants_whom_nobody_has_to_guess(scenario):
    assert len(scenario.insiders) == 5
    np.testing.assert_array_equal(
        np.sort(np.concatenate([scenario.insiders, scenario.others])), np.arange(20)
    )


def test_attackers_learn_from_what_they_know_and_are_scored_on_the_rest(scenario, monkeypatch):
    asked = []

    def inverted(key, points, known, unknown, truth, config):
        asked.append([np.asarray(x) for x in (points, known, unknown, truth)])
        return len(asked)

    monkeypatch.setattr(samples, "_inverted_r2", inverted)
    monkeypatch.setattr(samples, "_points", lambda message, *_: message)
    x, public = scenario.views[1], scenario.public_views[1]
    keys = jax.random.split(jax.random.key(0), 4)
    upload = samples.Upload(1, 2, -x, -public, None)
    found = samples.attack(keys, scenario, upload, SETTINGS, permuted=True)
    assert [found[name] for name in ("insiders", "shadow", "permuted")] == [1, 2, 3]
    known, others = scenario.insiders, scenario.others
    insiders, shadow, permuted = asked
    for got, wanted in zip(insiders, (-x[known], x[known], -x[others], x[others]), strict=True):
        np.testing.assert_array_equal(got, wanted)
    for got, wanted in zip(shadow, (-public, public, -x, x), strict=True):
        np.testing.assert_array_equal(got, wanted)
    # The control has all points, each of another sample, and the true features.
    rows = np.concatenate([permuted[0], permuted[2]])
    np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(-x, axis=0))
    assert (rows != -x).any()
    np.testing.assert_array_equal(permuted[1], x[known])
    np.testing.assert_array_equal(permuted[3], x[others])


def test_points_beyond_an_uploads_rank_are_zero():
    message = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
    points = np.asarray(samples._points(message, 4, 2))
    assert points.shape == (12, 4) and (points[:, :2] != 0).all() and (points[:, 2:] == 0).all()


def test_features_that_are_spread_are_scored_on_those_who_are_not_known(scenario, monkeypatch):
    """All others guessed at their mean: 0, however well the known ones are known."""
    x, others = scenario.views[0], scenario.others
    guessed = x.copy()
    guessed[others] = x[others].mean(axis=0)
    monkeypatch.setattr(samples, "spread", lambda *_: Spread(guessed, 1.0))
    attacks = types.SimpleNamespace(settings=SETTINGS)
    found = samples.SampleAttacks.spread_r2(attacks, scenario, 0, np.zeros((20, 20)))
    assert found == pytest.approx(0, abs=1e-6)


# --- Sums -----------------------------------------------------------------------------------------


def test_a_clients_means_are_compared_with_its_own_rows_and_with_the_publics(scenario, monkeypatch):
    """Who is told a client's rows knows them all; public rows of other names tell of few."""

    def told(result, summed):
        (cohort,) = result.federation.cohorts
        return [{v: np.asarray(x[c]) for v, x in cohort.by_view().items()} for c in range(2)]

    def run(federation, key):
        (cohort,) = federation.cohorts
        labels = (np.where(cohort.mask, 0, -1),)
        return types.SimpleNamespace(federation=federation, labels=labels)

    monkeypatch.setattr(sums, "told", told)
    attacks = sums.SumAttacks(scenario.n_clusters, SETTINGS, None)
    attacks.run = run
    found = attacks.scores(scenario, 0, summed=False)
    assert found["prototypes"] == found["exposed"] == 1
    assert found["public_prototypes"] < 1 and found["public_exposed"] < 1
    assert found["nmi"] == 0 and found["acc"] == np.bincount(scenario.labels).max() / 20


def test_what_is_near_is_so_on_the_scale_of_the_features():
    """Variance 25 and two guesses that are 0.4 off: near (.16 < .25); 0.6 off is not (.36)."""
    rows = [np.array([[0.0]]), np.array([[10.0]])]
    near, far = ([row + off for row in rows] for off in (0.4, 0.6))
    assert sums._compared(rows, near) == pytest.approx((1 - 0.16 / 25, 1.0))
    assert sums._compared(rows, far) == pytest.approx((1 - 0.36 / 25, 0.0))


# --- Encodings and labels -------------------------------------------------------------------------


def test_encodings_are_those_of_the_last_round():
    z, p = np.arange(12.0).reshape(2, 1, 3, 2), np.arange(6.0).reshape(2, 1, 3, 1)
    upload = {"message": {0: collections.namedtuple("Upload", "z p")(z, p)}}
    result = types.SimpleNamespace(
        info={"rounds": [{"clients": [upload]}]}, labels=[np.zeros((1, 3))]
    )
    (message,), (latent,), _ = encodings.encodings(result)
    np.testing.assert_array_equal(message, [[6, 7, 3], [8, 9, 4], [10, 11, 5]])
    np.testing.assert_array_equal(latent, z[1, 0])


def test_of_lists_of_labels_the_one_of_about_as_many_clusters_is_read(scenario, monkeypatch):
    """Seven clusters: 6 is as near as 8 and comes first, behind the labels of 2, 3, 4 and 5."""
    read = []
    result = types.SimpleNamespace(labels=[np.zeros((1, 20), int)] * 2)

    def attacked_run(run, messages_of, labels_of, *rest):
        message = np.zeros((6, 86))
        message[np.arange(6), 2 + 3 + 4 + 5 + np.arange(6)] = 1
        read.append(labels_of(None, message))
        return {}, result

    monkeypatch.setattr(labels, "_attacked_run", attacked_run)
    found = labels.ListAttacks(SETTINGS).scores(scenario._replace(n_clusters=7), 0)
    np.testing.assert_array_equal(read, [np.arange(6)])
    assert found["bytes"] == 10 * 20  # ten labels of a byte, from one agent to another
    three = types.SimpleNamespace(labels=result.labels[:1] * 3)
    assert labels._bytes_and_scores(scenario, three, 60)["bytes"] == 10  # of six messages


# --- What is shown --------------------------------------------------------------------------------


def test_cells_have_the_sample_deviation_and_a_dash_where_a_seed_has_nothing():
    assert study._cell(pd.Series([0.5, 0.7], name="nmi")) == "0.60 +- 0.14"
    assert study._cell(pd.Series([0.5], name="nmi")) == "0.50"
    assert study._cell(pd.Series([0.5, np.nan], name="nmi")) == "-"
    assert study._cell(pd.Series([10.0, 11.0], name="bytes")) == "10"
    rows = pd.DataFrame(dict.fromkeys(study.SCORES, np.nan), index=range(2))
    found = study._statistics(rows.assign(nmi=[0.5, 0.7]))
    assert list(found) == ["nmi"] and found["nmi"]["per_seed"] == [0.5, 0.7]
    assert found["nmi"]["std"] == pytest.approx(np.sqrt(0.02))


def test_bars_end_at_minus_one_and_what_was_not_asked_has_none(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(charts, "bars", lambda path, panels, *_: drawn.append(panels))
    rows = pd.DataFrame({"form": "a", **dict.fromkeys(study.SCORES, 0.5)}, index=range(2))
    study.draw(tmp_path, rows.assign(shadow=[-3.0, -1.0], spread=[0.5, np.nan]), "")
    bars = drawn[0][""]["a"]
    assert bars["features by shadow, R^2"] == pytest.approx((-1, np.sqrt(2)))
    assert bars["federation, NMI"] == (0.5, 0)
    assert np.isnan(bars["the same by spreading, R^2"][0])
