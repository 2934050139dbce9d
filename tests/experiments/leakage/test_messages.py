"""What is read in the messages of the methods beside MGCD and FMCSC, with known answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.leakage.encodings import EncodingAttacks, factors, followed
from experiments.leakage.labels import LabelAttacks, first_messages, nearness, places
from experiments.leakage.samples import Upload, attack
from experiments.leakage.scenario import LeakageSettings, deal
from experiments.leakage.sums import SumAttacks, means_of, nearest_errors
from jaxfedmvc.data.dataset import Dataset

SETTINGS = LeakageSettings(
    leak_insiders=0.4,
    leak_neighbours=5,
    leak_fit_epochs=1,
    leak_pretrain_epochs=1,
    leak_clients=3,
)


@pytest.fixture(scope="module")
def scenario():
    """Two views of three groups, dealt out."""
    rng = np.random.default_rng(0)
    labels = np.arange(160) % 3
    views = [rng.normal(size=(160, 6)) + 4 * np.eye(6)[labels] for _ in range(2)]
    dataset = Dataset("toy", tuple(view.astype(np.float32) for view in views), labels)
    return deal(dataset, 0, None, SETTINGS)


# --- Rows -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_upload_of_features_gives_them_away_and_one_of_noise_nothing(scenario):
    x, n = scenario.views[0], len(scenario.labels)
    keys = jax.random.split(jax.random.key(0), 6)
    noise = np.random.default_rng(1).normal(size=(2, n, 6)).astype(np.float32)
    features = attack(keys, scenario, Upload(0, 6, x, scenario.public_views[0], x), SETTINGS, True)
    assert features["subspace"] > 0.999 and features["insiders"] > 0.95
    assert features["permuted"] < 0.2
    random = attack(keys, scenario, Upload(0, 6, *noise, x), SETTINGS, True)
    assert abs(random["subspace"] - random["chance"]) < 0.1 and random["insiders"] < 0.1
    nothing = attack(
        keys, scenario, Upload(0, 6, x, scenario.public_views[0], None), SETTINGS, False
    )
    assert np.isnan(nothing["subspace"]) and nothing["insiders"] == features["insiders"]


@pytest.mark.slow
def test_fedmvls_factor_is_worked_out_of_an_agents_messages(scenario):
    attacks = EncodingAttacks("fedmvl", 3, SETTINGS)
    sent = factors(attacks.run(scenario.participants, jax.random.key(0)))
    for message, latent in zip(sent.messages, sent.latents, strict=True):
        assert message.shape == (80, 3) and np.ptp(latent) > 0
        np.testing.assert_allclose(message, latent, atol=1e-3 * np.max(latent))
    # The multiplier is not small: without it the last message is another thing.
    pulls = jnp.stack([jnp.ones((1, 1)), 3 * jnp.ones((1, 1))])
    np.testing.assert_allclose(followed(pulls, jnp.zeros((2, 1, 1)), 0.5), [[4.0]])


@pytest.mark.parametrize("name", ["feddmvc", "fcuif"])
def test_encodings_and_soft_labels_of_every_row_are_overheard(name, scenario):
    attacks = EncodingAttacks(name, 3, SETTINGS)
    sent = jax.eval_shape(
        lambda f, k: attacks.read(attacks.run(f, k)), scenario.participants, jax.random.key(0)
    )
    assert [m.shape for m in sent.messages] == [(80, 13)] * 2
    assert [z.shape for z in sent.latents] == [(80, 10)] * 2 and sent.labels.shape == (80,)


# --- Sums -----------------------------------------------------------------------------------------


def test_a_row_alone_in_a_sum_is_found_and_nothing_where_nothing_is_sent():
    x = np.array([[1.0, 0.0], [3.0, 0.0], [5.0, 4.0]])
    sums, weights = np.array([[1.0, 1.0], [2.0, 2.0]]), np.array([0.5, 1.0])
    origin = np.array([3.0, 2.0])
    # Means (5, 4) and (5, 4): the third row is one of them, and the others are near the origin.
    np.testing.assert_allclose(nearest_errors(x, means_of(sums, weights, origin)), [8, 4, 0])
    np.testing.assert_allclose(nearest_errors(x, means_of(sums, 0 * weights, origin)), [8, 4, 8])


@pytest.mark.slow
def test_a_guard_exposes_fewer_rows_of_fewer_clients(scenario):
    open_, guarded = (SumAttacks(3, SETTINGS, least).scores(scenario, 0) for least in (None, 5))
    assert guarded["exposed"] <= open_["exposed"] and guarded["prototypes"] > 0
    assert open_["acc"] == guarded["acc"] == 1
    # A round of three clients: N, W and C of two views, n and J.
    assert open_["bytes"] == guarded["bytes"] == 4 * (2 * (3 * 6 + 3 + 1) + 2)


# --- Labels ---------------------------------------------------------------------------------------


def test_places_in_lists_of_clusters():
    ranking, codes = np.array([3, 0, 4, 1, 2]), np.array([0, 1, 2, 0, 0])
    np.testing.assert_array_equal(places(ranking, codes), [0.5, 0, 0, 0, 1])


def test_nearness_follows_the_order_of_a_list():
    found = nearness(np.array([[2, 0], [0, 1]], np.uint8))
    np.testing.assert_array_equal(found, [[0.5, 0, 1], [1, 0.5, 0]])


@pytest.mark.slow
def test_lists_of_nearest_clusters_are_overheard_too(scenario):
    attacks = (LabelAttacks(3, SETTINGS, 0.8, n) for n in (0, 2))
    plain, refined = (
        first_messages(a.run(scenario.participants, jax.random.key(0))) for a in attacks
    )
    for before, after in zip(plain, refined, strict=True):
        np.testing.assert_array_equal(after[:, : before.shape[1]], before)
        lists = after[:, before.shape[1] :]
        np.testing.assert_allclose(lists.sum(axis=1), 2 * (1 + 0.75 + 0.5 + 0.25))


@pytest.mark.slow
def test_labels_and_places_of_every_sample_are_overheard(scenario):
    attacks = LabelAttacks(3, SETTINGS)
    messages = first_messages(attacks.run(scenario.participants, jax.random.key(0)))
    for message in messages:
        assert len(message) == 80 and message.shape[1] >= 4
        np.testing.assert_array_equal(message[:, 1:].sum(axis=1), 1)
        assert message[:, 0].min() == 0 and message[:, 0].max() == 1
