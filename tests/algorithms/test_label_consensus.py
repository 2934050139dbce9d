"""The consensus of labels: each formula against plain NumPy, and what the whole exchange finds."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc import engine
from jaxfedmvc.algorithms import LabelConsensusConfig, label_consensus
from jaxfedmvc.algorithms.label_consensus import (
    agent_weights,
    agreement,
    consensus,
    embedding,
    labels_of,
    lists_in_order,
    parts,
)
from jaxfedmvc.clustering import kmeans
from tests.helpers.vertical import federation

NUMBERS = (2, 3, 4)
CONFIG = LabelConsensusConfig(local_clusters=NUMBERS, n_init=2)
KEY = jax.random.key(0)
ALL = np.ones(3, bool)
TRUTH = np.arange(60) % 3

jit_weights = jax.jit(agent_weights, static_argnums=2)
jit_embedding = jax.jit(embedding, static_argnums=(2, 3))


def lists(n_agents=3, n=40, seed=0):
    """Labels of agents that agree less and less, and the last three rows are padding."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(4, size=n)
    made = np.stack(
        [
            [np.where(rng.random(n) < 0.2 * a, rng.integers(c, size=n), truth % c) for c in NUMBERS]
            for a in range(n_agents)
        ]
    )
    made[:, :, -3:] = -1
    return made.astype(np.int32)


def test_agents_count_by_how_much_they_agree_with_the_others():
    made = lists()
    rows = made[..., :-3]
    pairs = [
        [np.mean([adjusted_rand_score(x, y) for x, y in zip(a, b, strict=True)]) for b in rows]
        for a in rows
    ]
    mean = np.array([np.mean([p[b] for b in range(3) if b != a]) for a, p in enumerate(pairs)])
    found = jit_weights(made, ALL, 4)
    np.testing.assert_allclose(found, mean / mean.max(), atol=1e-5)


def test_lists_that_do_not_count_change_no_weight():
    made, used = lists(), np.array([True, True, False])
    other = made.copy()
    other[:, 2, :-3] = np.random.default_rng(1).integers(4, size=(3, 37))
    found = [jit_weights(x, used, 4) for x in (made, other)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("n_agents", [1, 2])
def test_two_agents_count_alike_and_one_has_nobody_to_agree_with(n_agents):
    np.testing.assert_allclose(jit_weights(lists(n_agents), ALL, 4), 1.0)


def test_agents_that_agree_with_nobody_count_alike():
    crossed = np.stack([np.tile([0, 1], 20), np.repeat([0, 1], 20)])[:, None]
    found = jit_weights(crossed, np.ones(1, bool), 2)
    np.testing.assert_allclose(found, 1.0)


def test_components_are_the_singular_vectors_of_the_scaled_graph():
    made = lists()
    edges = np.array([[1.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.7, 0.7, 0.0]])
    found = np.asarray(jit_embedding(made, np.float32(edges), NUMBERS, 4))
    graph = np.concatenate(
        [
            (made[a, i, :-3, None] == np.arange(c)) * edges[a, i]
            for i, c in enumerate(NUMBERS[:2])
            for a in range(3)
        ],
        axis=1,
    )
    scaled = graph / np.sqrt(graph.sum(1))[:, None] / np.sqrt(graph.sum(0))
    left = np.linalg.svd(scaled, full_matrices=False)[0][:, :4]
    np.testing.assert_allclose(np.abs(np.sum(found[:-3] * left, axis=0)), 1.0, atol=1e-3)
    assert (found[-3:] == 0).all()


def test_components_beyond_the_graphs_rank_are_zero():
    one = np.tile([0, 1], 5)[None, None]
    found = np.asarray(jit_embedding(one, np.ones((1, 1)), (2,), 4))
    assert (np.abs(found[:, :2]).max(axis=0) > 0.1).all() and (found[:, 2:] == 0).all()


@pytest.mark.parametrize("used", [[True, True, True], [True, True, False]])
def test_agreement_is_with_the_half_of_each_agents_lists_that_agree_best(used):
    made = lists(n_agents=2)
    labels = np.append(np.arange(37) % 4, [-1] * 3).astype(np.int32)
    scores = [
        [adjusted_rand_score(labels[:-3], x[:-3]) for x, u in zip(a, used, strict=True) if u]
        for a in made
    ]
    expected = np.mean([max(s) for s in scores])  # the half of three, or of two, is one
    found = jax.jit(agreement, static_argnums=(3, 4))(labels, made, np.array(used), 4, 4)
    assert found == pytest.approx(expected, abs=1e-5)


def test_parts_are_of_the_directions_of_the_first_coordinates_alone():
    rng = np.random.default_rng(0)
    first = np.eye(2)[np.arange(30) % 2] + 0.01 * rng.normal(size=(30, 2))
    first[::4] *= 10  # by lengths these would be a part of their own
    rows = np.float32(np.concatenate([first, 100 * rng.normal(size=(30, 2))], axis=1))
    split = jax.jit(parts, static_argnums=4)
    found = np.asarray(split(KEY, rows, np.arange(30) < 28, np.int32(2), 2))
    assert adjusted_rand_score(np.arange(28) % 2, found[:28]) == 1.0
    assert (found[28:] == -1).all()


def test_each_list_is_of_starts_of_its_own():
    """Of rows without clusters, and of one start."""
    x = np.float32(np.random.default_rng(0).uniform(size=(60, 3)))
    config = LabelConsensusConfig(local_clusters=(3, 2), n_init=1)

    @jax.jit
    def both():
        def alone(c):
            return kmeans(jax.random.fold_in(KEY, c), x, 3, n_init=1, limit=c).labels

        return labels_of(KEY, x, jnp.ones(60, bool), config), jax.lax.map(alone, jnp.array([2, 3]))

    np.testing.assert_array_equal(*both())


def test_edges_of_an_agent_weigh_the_root_of_what_it_counts(monkeypatch):
    """And none are of lists with fewer than ten samples for a cluster: 37 are too few for 4."""
    made, edges = lists(), []

    def watched(lists, edges_of_lists, *rest):
        edges.append(edges_of_lists)
        raise InterruptedError  # the rest takes a second

    module = importlib.import_module("jaxfedmvc.algorithms.label_consensus")
    monkeypatch.setattr(module, "embedding", watched)
    with pytest.raises(InterruptedError):
        consensus(KEY, made, CONFIG)
    used = np.array([True, True, False])
    expected = np.sqrt(jit_weights(made, used, 4))
    assert 0.1 < expected.min() < 0.9
    np.testing.assert_allclose(edges[0], expected[:, None] * used, rtol=1e-5)


def test_lists_are_put_in_the_order_of_their_numbers():
    numbers, found = lists_in_order({3: np.full((2, 5), 3), 2: np.full((2, 5), 2)})
    assert numbers == (2, 3)
    np.testing.assert_array_equal(found[:, :, 0], [[2, 3], [2, 3]])


jit_consensus = jax.jit(consensus, static_argnums=2)


def test_few_samples_leave_the_smallest_number():
    made = np.stack([[np.arange(12) % c for c in NUMBERS]] * 2).astype(np.int32)
    found = jit_consensus(KEY, made, CONFIG)
    assert found.n_clusters == 2
    assert np.isneginf(found.agreement[1:]).all()


# --- The whole exchange ---------------------------------------------------------------------------

RUN = jax.jit(engine.run, static_argnums=(0, 3))
METHOD = label_consensus(CONFIG)


def views():
    """Three agents that tell one of three groups each from the rest."""
    rng = np.random.default_rng(0)
    return [8.0 * (TRUTH == a)[:, None] + rng.normal(size=(60, 3)) for a in range(3)]


def test_agents_find_together_what_none_of_them_sees_alone():
    found = RUN(METHOD, federation(views()), KEY, 0)
    assert found.state.server.n_clusters == 3
    assert adjusted_rand_score(TRUTH, found.labels[0][0]) == 1.0


def test_a_number_of_shared_clusters_that_is_given_holds():
    made = np.stack([[np.arange(60) % c for c in NUMBERS]] * 2).astype(np.int32)
    config = LabelConsensusConfig(local_clusters=NUMBERS, shared_clusters=4, n_init=2)
    found = jit_consensus(KEY, made, config)
    assert found.n_clusters == 4 == len(np.unique(found.labels))


def test_a_label_travels_in_a_byte():
    traffic = engine.traffic(METHOD, federation(views()))
    # Each of three agents sends three lists of 60 to two others.
    assert traffic["setup"] == (3 * 2 * 3 * 60, 3 * 2 * 3 * 60)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_clusters": ()}, "local_clusters: got ()"),
        ({"local_clusters": (2, 2)}, "local_clusters: got (2, 2)"),
        ({"local_clusters": (0, 2)}, "local_clusters: got (0, 2)"),
        ({"local_clusters": (2, 128)}, "local_clusters: got (2, 128)"),
        ({"shared_clusters": 0}, "shared_clusters: got 0"),
        ({"shared_clusters": 128}, "shared_clusters: got 128"),
        ({"n_init": 0}, "n_init: got 0"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError) as error:
        LabelConsensusConfig(**settings)
    assert str(error.value).startswith(message)
