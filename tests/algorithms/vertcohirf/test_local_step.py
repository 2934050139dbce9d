"""One agent's clustering: feature subsets, repetitions, noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc.algorithms.vertcohirf import VertCoHiRFConfig, VertCoHiRFHyperparams
from jaxfedmvc.algorithms.vertcohirf.local_step import (
    LocalStep,
    feature_subset,
    local_codes,
    make_step,
)
from jaxfedmvc.clustering import local


@pytest.mark.parametrize(
    ("share", "expected"), [(0.29, 29), (0.001, 1), (1.0, 100), (0.508, 50), (7, 7), (500, 100)]
)
def test_number_of_features_of_a_repetition(share, expected):
    assert int(feature_subset(jax.random.key(0), 100, share).sum()) == expected


def test_feature_subsets_are_uniform():
    """Each feature in 2 of 5 of the draws: a binomial count, four standard deviations."""
    keys = jax.random.split(jax.random.key(1), 2000)
    drawn = np.asarray(jax.vmap(lambda key: feature_subset(key, 5, 0.4))(keys)).sum(axis=0)
    assert (np.abs(drawn - 800) < 4 * np.sqrt(2000 * 0.4 * 0.6)).all()


@pytest.mark.slow
def test_repetitions_see_other_features_and_fresh_ones_in_every_round():
    x = jnp.eye(6) + jnp.arange(6.0)[:, None]

    def seen(key, x, where):
        return (x != 0).any(axis=0).astype(jnp.int32)  # one column is one label row

    step = LocalStep(seen, 0.34, 4)
    one = local_codes(jax.random.key(0), x, jnp.ones(6, bool), step)
    other = local_codes(jax.random.key(1), x, jnp.ones(6, bool), step)
    assert one.max() >= 2  # some feature in no subset, others in different ones
    assert not np.array_equal(one, other)


@pytest.mark.slow
def test_noise_points_are_singletons():
    def half_noise(key, x, where):
        return jnp.array([0, 0, -1, -1, 1, 1])

    codes = local_codes(
        jax.random.key(0), jnp.ones((6, 2)), jnp.ones(6, bool), LocalStep(half_noise)
    )
    assert codes.tolist() == [0, 0, 2, 3, 1, 1]


def test_repetitions_beyond_the_limit_have_no_say():
    """Two repetitions at odds: one of them goes, and columns without labels do not outvote it."""
    halves, turns = jnp.arange(6) // 3, jnp.arange(6) % 2
    keys = [jax.random.split(jax.random.fold_in(jax.random.key(0), r))[1] for r in (0, 1)]
    firsts = jnp.stack([jax.random.key_data(key) for key in keys])

    def either(key, x, where):
        return jnp.where(jnp.all(jax.random.key_data(key) == firsts[0]), halves, turns)

    step = LocalStep(either, repetitions=4, limit=2, threshold=0.8)
    codes = local_codes(jax.random.key(0), jnp.ones((6, 2)), jnp.ones(6, bool), step)
    assert codes.tolist() == turns.tolist()


def test_subspaces_of_sc_srgf_have_a_share_of_their_own(monkeypatch):
    told = []
    monkeypatch.setattr(local, "sc_srgf_method", lambda *numbers: told.append(numbers))
    config = VertCoHiRFConfig(3, base=("sc_srgf",), n_graphs=4)
    make_step("sc_srgf", config, VertCoHiRFHyperparams(0.3, sampling_ratio=0.7))
    assert told == [(3, 4, 0.7, None)]


def test_an_agent_without_rows_asks_for_one_cluster_and_never_for_more_than_it_has_rows(
    monkeypatch,
):
    monkeypatch.setattr(local, "sc_srgf", lambda *arguments, limit, **others: limit)
    method = local.sc_srgf_method(3, 2)
    for rows, limit in ((0, 1), (2, 2), (4, 3)):
        assert method(jax.random.key(0), np.zeros((4, 1)), np.arange(4) < rows) == limit
