"""Byzantine agents: property 3.4 for any message, and each of the attacks."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfedmvc import engine
from jaxfedmvc.algorithms.shared.cells import strict_consensus
from jaxfedmvc.algorithms.vertcohirf.hierarchy import labels_at
from jaxfedmvc.algorithms.vertcohirf.rankings import least_rank_sum, rank_sum
from jaxfedmvc.attacks.byzantine import (
    ATTACKS,
    attacked,
    inverse_ranking,
    random_labels,
    random_ranking,
)
from tests.helpers.vertical import HALVES, N, federation, make_views, messages


@settings(max_examples=60, deadline=None)
@given(
    honest=st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=8), min_size=2, max_size=2),
    forged=st.lists(st.integers(-5, 10**6), min_size=8, max_size=8),
    place=st.integers(0, 2),
)
def test_no_message_merges_what_an_honest_agent_tells_apart(honest, forged, place):
    """Property 3.4, for any labels that an attacker may send."""
    rows = [*honest[:place], forged, *honest[place:]]
    codes = np.asarray(_strict(jnp.array(rows, jnp.int32))[0])
    merged = codes[:, None] == codes[None]
    for labels in np.array(honest):
        assert not (merged & (labels[:, None] != labels[None])).any()


@settings(max_examples=60, deadline=None)
@given(
    forged=st.lists(st.integers(-3, 12), min_size=8, max_size=8),
    labels=st.lists(st.integers(0, 2), min_size=8, max_size=8),
)
def test_no_ranking_makes_a_medoid_of_another_clusters_member(forged, labels):
    """Whatever an attacker lists: ids twice, of other clusters, of nobody."""
    codes = jnp.array(np.unique(labels, return_inverse=True)[1], jnp.int32)
    honest = jnp.argsort(codes, stable=True).astype(jnp.int32)
    medoids = np.asarray(_vote(jnp.stack([honest, jnp.array(forged, jnp.int32)]), codes))
    n_codes = int(codes.max()) + 1
    assert np.asarray(codes)[medoids[:n_codes]].tolist() == list(range(n_codes))


@jax.jit
def _vote(rankings, codes):
    everyone, active = jnp.ones(8, bool), jnp.arange(8, dtype=jnp.int32)
    total = rank_sum(rankings, codes, everyone, active)
    return least_rank_sum(total, codes, everyone, active)


_strict = jax.jit(lambda labels: strict_consensus(labels, jnp.ones(8, bool)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(name, marks=() if name == "inverse_ranking" else pytest.mark.slow)
        for name in sorted(ATTACKS)
    ],
)
def test_attackers_merge_nothing_that_honest_agents_separate(attack):
    views, _ = make_views(0)
    (honest,), _ = messages(HALVES, federation(views), jax.random.key(0), 1)
    algorithm = attacked(HALVES, attack, [1])
    (sent,), state = messages(algorithm, federation(views), jax.random.key(0), 1)
    found = np.asarray(labels_at(state.parents, state.absorbed_at, None, 0))
    for agent in (0, 2):
        labels = np.asarray(honest[0][agent]["labels"])[0]
        assert len({*zip(found, labels, strict=True)}) == found.max() + 1
    phase = ATTACKS[attack][0]
    same = [
        all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))
        for a, b in zip(sent[phase], honest[phase], strict=True)
    ]
    assert same == [True, False, True]  # the named attacker alone


@pytest.mark.slow
def test_inverse_ranking_turns_every_list_around():
    views, _ = make_views(0)
    state = engine.start(HALVES, federation(views), jax.random.key(0)).server
    codes = jnp.array([0, 1, 0, 1, 0] + [-1] * (N - 5))
    state = state._replace(codes=codes, candidates=codes >= 0)
    ranking = jnp.array([4, 0, 2, 3, 1] + [-1] * (N - 5))
    turned = inverse_ranking(jax.random.key(0), {"ranking": ranking}, state)
    assert turned["ranking"][:6].tolist() == [2, 0, 4, 1, 3, -1]
    again = inverse_ranking(jax.random.key(0), turned, state)["ranking"]
    np.testing.assert_array_equal(again, ranking)


def test_random_labels_are_as_many_as_the_agent_found_and_of_real_samples():
    labels = jnp.array([0, 2, 1] * 20 + [-1] * 4)
    found = np.asarray(random_labels(jax.random.key(0), {"labels": labels}, None)["labels"])
    assert set(found[:60]) == {0, 1, 2} and (found[60:] == -1).all()
    assert (found != labels).any()


def test_a_random_ranking_lists_every_clusters_candidates_in_any_order():
    codes = jnp.array([0, 1] * 10 + [-1] * 4)
    state = SimpleNamespace(codes=codes, candidates=codes >= 0, active=jnp.arange(24))
    draw = jax.jit(lambda key: random_ranking(key, {}, state)["ranking"])
    one, other = (np.asarray(draw(jax.random.key(seed))) for seed in range(2))
    assert (one != other).any()
    for found in (one, other):
        for code in (0, 1):
            members = found[10 * code : 10 * (code + 1)].tolist()
            assert sorted(members) == list(range(code, 20, 2)) != members


def test_unknown_attack():
    with pytest.raises(ValueError, match="attack: got 'nope'; allowed is random_ranking or"):
        attacked(HALVES, "nope", [0])
