"""The guard that keeps sums over few rows back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfedmvc.messages import min_cluster_size
from jaxfedmvc.messages.clusters import large_only

KEY = jax.random.key(0)


def test_a_sum_over_one_row_is_the_row_and_is_not_sent_with_the_guard():
    rows = jax.random.normal(KEY, (6, 3))
    member = jax.nn.one_hot(jnp.array([0, 1, 1, 2, 2, 2]), 4)
    message = member.T @ rows, jnp.sum(member, axis=0)
    np.testing.assert_allclose(message[0][0], rows[0], rtol=1e-6)
    for least in (1, 2, 3):
        sums, sizes = min_cluster_size(least)(KEY, message, ())
        large = np.array([1, 2, 3, 0]) >= least
        np.testing.assert_array_equal(sizes, np.where(large, [1, 2, 3, 0], 0))
        np.testing.assert_array_equal(sums, np.where(large[:, None], message[0], 0))


def test_every_array_of_a_cluster_is_set_to_zero_with_its_size():
    sizes = jnp.array([[3.0, 1.0], [np.nan, 2.0]])  # two starts of two clusters
    sums = {"a": jnp.full((2, 2, 5), np.inf), "n": jnp.full((2, 2), 7)}
    kept, left = large_only(sums, sizes, 2)
    np.testing.assert_array_equal(left, [[3, 0], [0, 2]])
    np.testing.assert_array_equal(kept["n"], [[7, 0], [0, 7]])
    assert kept["n"].dtype == jnp.int32
    assert np.isinf(kept["a"]).all(axis=2).tolist() == [[True, False], [False, True]]
    assert not np.isnan(kept["a"]).any()


def test_what_comes_after_the_sizes_stays():
    message = jnp.array([[1.0], [2.0]]), jnp.array([1.0, 5.0])
    sums, sizes, third, fourth = min_cluster_size(2)(KEY, (*message, jnp.ones(1), {"n": 9}), ())
    assert sums.tolist() == [[0.0], [2.0]] and sizes.tolist() == [0.0, 5.0]
    assert third.tolist() == [1.0] and fourth == {"n": 9}


def test_a_least_size_below_one_is_refused():
    with pytest.raises(ValueError, match="least: got 0; allowed is 1 or more"):
        min_cluster_size(0)


def test_a_least_size_that_is_no_number_is_refused():
    for least in (float("nan"), 2.5, "two", None):
        with pytest.raises(ValueError, match=f"least: got {least!r}; allowed is a whole number"):
            min_cluster_size(least)


@pytest.mark.parametrize(
    ("message", "got"),
    [
        ({"sums": np.ones((2, 3)), "sizes": np.ones(2)}, "'dict'"),
        ((np.ones((2, 3)),), "'tuple'"),
        ((np.ones((3, 2)), np.ones(2)), r"'sums of shape \(3, 2\)'; .* axes of the sizes, \(2,\)"),
    ],
)
def test_a_message_without_sums_and_sizes_is_refused(message, got):
    with pytest.raises(ValueError, match=f"^message: got {got}"):
        min_cluster_size(2)(KEY, message, ())
