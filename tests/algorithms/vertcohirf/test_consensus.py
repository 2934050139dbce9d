import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc.algorithms.shared.cells import strict_consensus
from jaxfedmvc.algorithms.vertcohirf.consensus import ari_of_refinement, relaxed_consensus

strict = jax.jit(strict_consensus)
relaxed = jax.jit(relaxed_consensus)
C = 12  # one shape for all: one compilation


def codes_by_numpy(labels):
    """Indices of the distinct rows in lexicographic order."""
    return np.unique(np.asarray(labels).T, axis=0, return_inverse=True)[1].ravel()


def relaxed_by_numpy(labels, threshold):
    columns = list(range(len(labels)))
    codes = codes_by_numpy(labels[columns])
    while len(columns) > 1:
        without = [codes_by_numpy(labels[[c for c in columns if c != i]]) for i in columns]
        agreement = [adjusted_rand_score(codes, other) for other in without]
        worst = int(np.argmin(np.round(agreement, 6)))
        if agreement[worst] >= threshold:
            break
        columns.pop(worst)
        codes = without[worst]
    return codes


@pytest.mark.parametrize("seed", range(4))
def test_ari_of_refinement_is_scikit_learns(seed):
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 2 + seed % 2, C)
    fine = codes_by_numpy(np.stack([coarse, rng.integers(0, 2, C)]))
    value = ari_of_refinement(jnp.array(fine), jnp.array(coarse), jnp.ones(C, bool))
    np.testing.assert_allclose(value, adjusted_rand_score(fine, coarse), atol=1e-6)


@pytest.mark.parametrize(
    ("fine", "coarse", "expected"),
    [
        (np.arange(C), np.arange(C), 1.0),
        (np.zeros(C), np.zeros(C), 1.0),
        (np.arange(C), np.zeros(C), 0.0),
    ],
)
def test_ari_of_trivial_partitions(fine, coarse, expected):
    value = ari_of_refinement(
        jnp.array(fine, jnp.int32), jnp.array(coarse, jnp.int32), jnp.ones(C, bool)
    )
    assert value == expected


def test_ari_of_large_groups_is_scikit_learns():
    """Groups of nearly 50 000 rows, whose pairs are more than a 32-bit product holds."""
    n = 50_000
    coarse = (np.arange(n) < n // 100).astype(np.int32)
    parts = (np.arange(n) < 5000).astype(np.int32)
    fine = np.unique(2 * coarse + parts, return_inverse=True)[1].astype(np.int32)
    value = ari_of_refinement(jnp.array(fine), jnp.array(coarse), jnp.ones(n, bool))
    expected = adjusted_rand_score(fine, coarse)
    assert 0 < expected < 0.9
    np.testing.assert_allclose(value, expected, atol=1e-4)


def test_ari_of_one_row_is_one():
    assert ari_of_refinement(jnp.zeros(1, int), jnp.zeros(1, int), jnp.ones(1, bool)) == 1.0


def test_relaxed_consensus_drops_the_column_at_odds():
    """Three repetitions agree on two halves, the fourth alternates: it is the one to go."""
    halves = np.arange(C) // (C // 2)
    labels = np.stack([halves, np.arange(C) % 2, 1 - halves, halves]).astype(np.int32)
    codes = relaxed(labels, np.ones(C, bool), np.ones(4, bool), 0.8)
    np.testing.assert_array_equal(codes, halves)
    strictly = strict_consensus(jnp.array(labels), jnp.ones(C, bool))[1]
    assert strictly == 4


def test_of_two_columns_equally_at_odds_the_first_goes_and_at_a_threshold_of_1_none_that_agrees():
    halves, turns = np.arange(C) // (C // 2), np.arange(C) % 2
    labels = np.stack([halves, turns, halves, turns]).astype(np.int32)
    first = np.array([True, True, False, False])
    np.testing.assert_array_equal(relaxed(labels, np.ones(C, bool), first, 0.8), turns)
    # Without any one of them the others say the same; without two they would not.
    codes = relaxed(labels, np.ones(C, bool), np.ones(4, bool), 1.0)
    np.testing.assert_array_equal(codes, codes_by_numpy(labels))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threshold", [0.3, 0.8])
def test_relaxed_consensus_is_the_plain_transcription(seed, threshold):
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 3, C)
    noise = rng.random((4, C)) < 0.15
    labels = np.where(noise, rng.integers(0, 3, (4, C)), truth).astype(np.int32)
    codes = relaxed(labels, np.ones(C, bool), np.ones(4, bool), threshold)
    np.testing.assert_array_equal(codes, relaxed_by_numpy(labels, threshold))


def test_relaxed_consensus_keeps_one_column_at_least():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, (4, C)).astype(np.int32)
    codes = relaxed(labels, np.ones(C, bool), np.ones(4, bool), 1.1)  # nothing is good enough
    assert any(np.array_equal(codes, codes_by_numpy(labels[[i]])) for i in range(4))


def test_relaxed_consensus_of_fewer_columns_is_that_of_the_columns_in_use():
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 2, (4, C)).astype(np.int32)
    used = np.array([True, True, True, False])
    codes = relaxed(labels, np.ones(C, bool), used, 0.8)
    np.testing.assert_array_equal(codes, relaxed_by_numpy(labels[:3], 0.8))
