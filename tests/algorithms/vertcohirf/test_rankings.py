"""Rankings and medoids by hand and against scikit-learn's kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics.pairwise import cosine_similarity, laplacian_kernel, rbf_kernel

from jaxfedmvc.algorithms.vertcohirf.rankings import (
    centrality,
    draw_candidates,
    least_rank_sum,
    rank_sum,
    ranked_ids,
)

jit_rank_sum, jit_least, jit_ids = map(jax.jit, (rank_sum, least_rank_sum, ranked_ids))
jit_centrality = jax.jit(centrality, static_argnums=3)


def test_the_medoid_is_chosen_by_summed_ranks_and_not_by_summed_permutations():
    """Lists [2, 0, 1] and [1, 2, 0]: ranks are (1, 2, 0) and (2, 0, 1), sums (3, 2, 1)."""
    codes, everyone, active = np.zeros(3, int), np.ones(3, bool), np.array([10, 11, 12])
    rankings = np.array([[12, 10, 11], [11, 12, 10]])
    total = jit_rank_sum(rankings, codes, everyone, active)
    assert total.tolist() == [3, 2, 1]
    assert jit_least(total, codes, everyone, active).tolist()[0] == 12


def test_who_is_not_listed_ranks_last():
    codes, everyone, active = np.zeros(3, int), np.ones(3, bool), np.arange(3)
    assert jit_rank_sum(np.array([[2, 7, -1]]), codes, everyone, active).tolist() == [3, 3, 0]


def test_an_id_that_is_listed_twice_has_the_better_rank():
    codes, everyone, active = np.zeros(3, int), np.ones(3, bool), np.array([10, 11, 12])
    assert jit_rank_sum(np.array([[10, 11, 10]]), codes, everyone, active).tolist() == [0, 1, 3]


def test_scores_that_differ_by_rounding_rank_by_position():
    codes, everyone = np.zeros(2, int), np.ones(2, bool)
    scores = np.float32([0.5, np.nextafter(np.float32(0.5), np.float32(1))])
    assert jit_ids(scores, codes, everyone, np.array([7, 3])).tolist() == [7, 3]


def example(seed=0, n=30):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    codes = np.sort(rng.integers(0, 4, n)).astype(np.int32)
    return x, rng.permutation(codes).astype(np.int32)


@pytest.mark.parametrize(
    ("similarity", "kernel"),
    [
        ("cosine", cosine_similarity),
        ("rbf", rbf_kernel),
        ("laplacian", laplacian_kernel),
        ("rbf_median", None),
    ],
)
def test_scores_are_mean_similarities(similarity, kernel):
    x, codes = example()
    x[3] = 0.0
    candidates = np.random.default_rng(1).random(len(x)) < 0.8
    found = np.asarray(jit_centrality(x, codes, candidates, similarity))
    for k in range(4):
        members = np.flatnonzero((codes == k) & candidates)
        rows = x[members].astype(np.float64)
        if kernel is None:
            distance = np.sqrt(((rows[:, None] - rows[None]) ** 2).sum(axis=2))
            values = np.exp(-distance / (2 * np.median(distance)))
        else:
            values = kernel(rows)
        np.testing.assert_allclose(found[members], values.mean(axis=1), atol=2e-5)
    assert (found[~candidates] == 0).all()


@pytest.mark.slow
def test_two_members_always_tie_unless_one_is_zero():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 5)).astype(np.float32)
    codes, everyone = np.arange(40) // 2, np.ones(40, bool)
    scores = jit_centrality(x, codes, everyone, "cosine")
    ranking = jit_ids(scores, codes, everyone, np.arange(40))
    np.testing.assert_array_equal(ranking, np.arange(40))
    x[0] = 0.0
    scores = np.asarray(jit_centrality(x, codes, everyone, "cosine"))
    np.testing.assert_allclose(scores[:2], [0, 0.5], atol=1e-6)
    assert jit_ids(scores, codes, everyone, np.arange(40))[:4].tolist() == [1, 0, 2, 3]


def test_ranking_lists_clusters_one_after_another_best_first():
    codes = np.array([1, 0, 1, 0, 1, -1])
    candidates = np.array([True, True, True, True, False, False])
    scores = np.float32([0.1, 0.9, 0.5, 0.3, 0.99, 0.0])
    active = np.array([7, 4, 9, 2, 5, -1])
    assert jit_ids(scores, codes, candidates, active).tolist() == [4, 2, 9, 7, -1, -1]


@pytest.mark.slow
def test_candidates_are_a_shared_random_subset():
    codes = jnp.array([0] * 10 + [1] * 3 + [2] + [-1] * 2)
    active = jnp.arange(16)
    draw = jax.jit(draw_candidates)
    chosen = draw(jax.random.key(0), codes, active, 4)
    counts = [int(chosen[codes == k].sum()) for k in (0, 1, 2, -1)]
    assert counts == [4, 3, 1, 0]
    assert draw_candidates(jax.random.key(0), codes, active, None).sum() == 14
    keys = jax.random.split(jax.random.key(1), 1000)
    times = np.asarray(jax.vmap(lambda key: draw(key, codes, active, 4))(keys)).sum(axis=0)[:10]
    assert (np.abs(times - 400) < 4 * np.sqrt(1000 * 0.4 * 0.6)).all()
