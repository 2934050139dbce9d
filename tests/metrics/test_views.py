"""Which views agree: cases worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from jaxfedmvc.metrics import ari, ari_from_contingency, contingency
from jaxfedmvc.metrics.views import agreeing, mean_agreement, pairs


def test_agreement_is_the_mean_over_the_other_views():
    # Pairs (0,1), (0,2), (0,3), (1,2), (1,3) and (2,3): view 0 agrees by (.9 + .6 + .0) / 3.
    found = mean_agreement(jnp.array([0.9, 0.6, 0.0, 0.3, -0.3, 0.3]), 4)
    np.testing.assert_allclose(found, [0.5, 0.3, 0.4, 0.0], atol=1e-6)


def test_pairs_are_in_order():
    assert [tuple(map(int, pair)) for pair in zip(*pairs(3), strict=True)] == [
        (0, 1),
        (0, 2),
        (1, 2),
    ]


@pytest.mark.parametrize(
    "agreement, least, expected",
    [
        ([0.5, 0.3, 0.09, 0.1], 0.2, [1, 1, 0, 1]),
        ([0.5, 0.3, 0.09, 0.1], 0.0, [1, 1, 1, 1]),
        ([0.5, -0.1, 0.3, 0.2], 0.0, [1, 0, 1, 1]),
        ([0.5, 0.01, 0.02, 0.0], 0.2, [1, 0, 1, 0]),  # two are always left
        ([-0.01, -0.2, -0.03, 0.0], 0.2, [1, 1, 1, 1]),  # nothing agrees with anything
        ([0.5, np.nan, 0.1, 0.2], 0.2, [1, 1, 1, 1]),  # not known
    ],
)
def test_views_that_agree_less_than_a_share_of_the_most_are_left_out(agreement, least, expected):
    found = jax.jit(agreeing)(jnp.array(agreement), least)
    np.testing.assert_array_equal(found, np.array(expected, bool))


def test_rand_index_of_a_table_is_that_of_its_labels():
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 3, 40), rng.integers(0, 4, 40)
    table = contingency(one, other, 3, 4)
    expected = adjusted_rand_score(one, other)
    np.testing.assert_allclose(jax.jit(ari_from_contingency)(table), expected, atol=1e-6)
    found = jax.jit(ari, static_argnums=(2, 3))(one, other, 3, 4)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # Tables of parts of the rows add up.
    parts = [contingency(one[s], other[s], 3, 4) for s in (slice(0, 15), slice(15, 40))]
    np.testing.assert_array_equal(sum(parts), table)
