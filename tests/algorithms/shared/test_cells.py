import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfedmvc.algorithms.shared.cells import exact_segment_sum, segment_sizes, strict_consensus

strict = jax.jit(strict_consensus)
C = 12  # one shape for all: one compilation


def codes_by_numpy(labels):
    """Indices of the distinct rows in lexicographic order."""
    return np.unique(np.asarray(labels).T, axis=0, return_inverse=True)[1].ravel()


@pytest.mark.parametrize("seed", range(5))
def test_strict_consensus_is_the_rank_of_distinct_rows(seed):
    labels = np.random.default_rng(seed).integers(0, 3, (3, C)).astype(np.int32)
    codes, n = strict(labels, np.ones(C, bool), np.ones(3, bool))
    expected = codes_by_numpy(labels)
    np.testing.assert_array_equal(codes, expected)
    assert n == expected.max() + 1


def test_padding_and_columns_that_do_not_count_change_nothing():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (3, C)).astype(np.int32)
    where = rng.random(C) < 0.6
    used = np.array([True, False, True])
    codes, n = strict(labels, where, used)
    expected = codes_by_numpy(labels[[0, 2]][:, where])
    np.testing.assert_array_equal(np.asarray(codes)[where], expected)
    assert (np.asarray(codes)[~where] == -1).all() and n == expected.max() + 1


def test_no_row_in_use_gives_no_cluster():
    codes, n = strict(np.zeros((3, C), np.int32), np.zeros(C, bool), np.ones(3, bool))
    assert n == 0 and (np.asarray(codes) == -1).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=C, max_size=C), min_size=3, max_size=3))
def test_two_rows_are_together_only_if_every_column_agrees(rows):
    labels = np.array(rows, np.int32)
    codes = np.asarray(strict(labels, np.ones(C, bool), np.ones(3, bool))[0])
    together = (labels[:, :, None] == labels[:, None, :]).all(axis=0)
    np.testing.assert_array_equal(codes[:, None] == codes[None], together)


def test_segment_sums_are_equal_bit_for_bit_in_any_order():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (300, 3)).astype(np.float32)
    cells = rng.integers(0, 4, 300)
    order = rng.permutation(300)
    one = exact_segment_sum(jnp.array(x), jnp.array(cells), 4)
    other = exact_segment_sum(jnp.array(x[order]), jnp.array(cells[order]), 4)
    np.testing.assert_array_equal(one, other)
    expected = np.stack([x[cells == k].astype(np.float64).sum(axis=0) for k in range(4)])
    np.testing.assert_allclose(one, expected, atol=300 * 2.0**-21)


def test_segment_sizes():
    codes = jnp.array([0, 2, 2, -1, 0, 0])
    assert segment_sizes(codes, codes >= 0).tolist() == [3, 0, 2, 0, 0, 0]
