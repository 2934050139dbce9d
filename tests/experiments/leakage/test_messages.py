"""What is read in the messages of the methods beside MGCD and FMCSC, with known answers."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.leakage.encodings import EncodingAttacks, factors, followed
from experiments.leakage.labels import (
    LabelAttacks,
    ListAttacks,
    first_messages,
    lists,
    nearness,
    places,
)
from experiments.leakage.samples import Upload, attack
from experiments.leakage.scenario import LeakageSettings, deal
from experiments.leakage.spreading import alike, harmonic, spread
from experiments.leakage.sums import SumAttacks, means_of, nearest_errors, told
from jaxfedmvc import engine
from jaxfedmvc.algorithms.fedhk.model import Scale, Sums
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


# --- Graphs ---------------------------------------------------------------------------------------


def test_features_spread_along_a_path_in_equal_steps():
    path = np.diag(np.ones(4), 1)
    path += path.T
    known = np.array([0, 4])
    found = harmonic(path, known, np.array([[0.0, 8.0], [4.0, 0.0]]))
    np.testing.assert_allclose(
        found.features, [[0, 8], [1, 6], [2, 4], [3, 2], [4, 0]], rtol=1e-4, atol=1e-4
    )
    # Left out, the other end is all there is: as far off the mean, on the wrong side.
    np.testing.assert_allclose(found.validation, -3, rtol=1e-4)


def test_leaving_out_a_known_sample_is_what_it_says():
    rng = np.random.default_rng(0)
    graph = rng.random((9, 9))
    graph += graph.T
    features = rng.normal(size=(5, 2))
    features -= features.mean(axis=0)  # a mean that leaves nobody out, for the ties
    found = harmonic(graph, np.arange(5), features)
    missed = 0.0
    for i in range(5):
        rest = np.delete(np.arange(5), i)
        missed += np.sum((harmonic(graph, rest, features[rest]).features[i] - features[i]) ** 2)
    np.testing.assert_allclose(found.validation, 1 - missed / np.sum(features**2), rtol=1e-4)


def test_a_sample_that_nobody_knows_of_is_guessed_at_the_mean():
    graph = np.zeros((4, 4))
    graph[0, 1] = graph[1, 0] = 1
    found = harmonic(graph, np.array([0, 2]), np.array([[2.0], [4.0]]))
    np.testing.assert_allclose(found.features[:, 0], [2, 2, 4, 3], atol=1e-4)
    nothing = harmonic(np.zeros((4, 4)), np.array([0, 2]), np.array([[2.0], [4.0]]))
    np.testing.assert_allclose(nothing.features[:, 0], [2, 3, 4, 3], atol=1e-4)


def test_rows_that_are_alike_are_joined():
    rows = np.array([[1.0, 0], [2, 0.1], [0, 1], [0.1, 3], [0, 0]])
    edges = alike(rows, 1)
    assert edges[0, 1] == edges[2, 3] == 2 and not np.diag(edges).any()
    np.testing.assert_array_equal(edges, edges.T)
    assert edges[4].sum() == 1 and edges.sum() == 10  # nothing is like no row


@pytest.mark.parametrize("told_by", ["edges", "rows"])
def test_known_samples_say_which_graph_to_spread_over(told_by):
    place = np.repeat(np.arange(5), 10)  # five groups of ten, of features 0 to 4
    if told_by == "edges":
        joined = place[:, None] == place[None]
    else:  # each group with the next: rows of a group are alike, and none of its edges is inside
        joined = (place[:, None] + 1) % 5 == place[None]
    message = joined - 1.0 * np.eye(50) * joined
    known = np.arange(0, 50, 2)
    found = spread(message, known, place[known, None].astype(float), 3)
    np.testing.assert_allclose(found.features[:, 0], place, atol=1e-3)
    assert found.validation > 0.99


# --- Sums -----------------------------------------------------------------------------------------


def test_a_row_alone_in_a_sum_is_found_and_nothing_where_nothing_is_sent():
    x = np.array([[1.0, 0.0], [3.0, 0.0], [5.0, 4.0]])
    sums, weights = np.array([[1.0, 1.0], [2.0, 2.0]]), np.array([0.5, 1.0])
    origin = np.array([3.0, 2.0])
    # Means (5, 4) and (5, 4): the third row is one of them, and the others are near the origin.
    np.testing.assert_allclose(nearest_errors(x, means_of(sums, weights, origin)), [8, 4, 0])
    np.testing.assert_allclose(nearest_errors(x, means_of(sums, 0 * weights, origin)), [8, 4, 8])


def test_means_of_summaries_and_of_all_rounds_are_read():
    """Two clients and a view of two features, about (1, 1) and in units of two.

    The summaries leave a row of the one, (9, 1), and two of the other out, (2, 0) and (4, -2): what
    the sums of all rows exceed them by.
    """
    scales = {0: Scale(jnp.ones(2), jnp.float32(4.0), jnp.zeros(0), jnp.zeros(0))}
    state = types.SimpleNamespace(server=types.SimpleNamespace(scales=scales))
    means = np.array([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    summaries = (means, np.array([[3.0, 0.0], [0.0, 0.0]]))
    totals = ({0: np.array([[3 * 3 + 9, 3 * 1 + 1], [6, -2]])}, np.array([4.0, 2.0]))
    # Three rounds are recorded, of which two were made: [rounds, clients, starts, clusters, ...].
    numerators = np.zeros((3, 2, 1, 1, 2))
    numerators[:, 0, 0, 0] = [[2, 2], [4, 0], [9, 9]]
    weights = np.zeros((3, 2, 1, 1))
    weights[:, 0, 0, 0] = [0.5, 2.0, 1.0]
    sums = Sums({0: numerators}, {0: weights}, {}, jnp.ones(()), jnp.ones(()))

    def heard(message):
        return {"clients": ({"message": message},)}

    info = {"setup": [heard(totals), {}, heard(summaries)], "rounds": [heard(sums)]}
    result = engine.RunResult(state, (), info, None, None, jnp.int32(2))
    one, other = told(result, summed=False)
    # Of the summary, of the row that is in none, of either round, and of what came in the second:
    # (2, -2) with 1.5.
    means = [[3, 1], [9, 1], [1, 1], [5, 5], [3, 1], [7 / 3, -1 / 3], [1, 1]]
    np.testing.assert_allclose(one[0], means)
    np.testing.assert_allclose(other[0], [[3, -1], [1, 1], [1, 1]])
    # Of a sum over both clients only what is left out of both can be told: three rows.
    one, other = told(result, summed=True)
    np.testing.assert_allclose(one[0], [[3, 1], [5, -1 / 3], [1, 1]])
    np.testing.assert_allclose(other[0], [[5, -1 / 3], [1, 1]])


@pytest.mark.slow
def test_a_guard_and_secure_aggregation_expose_fewer_rows(scenario):
    attacks = [SumAttacks(3, SETTINGS, least) for least in (None, 5)]
    open_, guarded = (a.scores(scenario, 0, summed=False) for a in attacks)
    summed = attacks[0].scores(scenario, 0, summed=True)
    assert guarded["exposed"] <= open_["exposed"] and guarded["prototypes"] > 0
    assert summed["exposed"] <= open_["exposed"] and summed["prototypes"] < open_["prototypes"]
    # What other samples' means tell is less.
    assert open_["public_prototypes"] < open_["prototypes"]
    assert open_["acc"] == guarded["acc"] == summed["acc"] == 1
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
def test_every_list_of_labels_is_overheard(scenario):
    attacks = ListAttacks(SETTINGS)
    messages = lists(attacks.run(scenario.participants, jax.random.key(0)))
    for message in messages:
        assert message.shape == (80, 86)  # 2 + 3 + 4 + 5 + 6 + 8 + 10 + 12 + 16 + 20
        np.testing.assert_array_equal(message.sum(axis=1), 10)
        np.testing.assert_array_equal(message[:, :2].sum(axis=1), 1)


@pytest.mark.slow
def test_labels_and_places_of_every_sample_are_overheard(scenario):
    attacks = LabelAttacks(3, SETTINGS)
    messages = first_messages(attacks.run(scenario.participants, jax.random.key(0)))
    for message in messages:
        assert len(message) == 80 and message.shape[1] >= 4
        np.testing.assert_array_equal(message[:, 1:].sum(axis=1), 1)
        assert message[:, 0].min() == 0 and message[:, 0].max() == 1
