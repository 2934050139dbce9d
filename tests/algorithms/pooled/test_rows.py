"""Preparation of rows with missing views, against NumPy on the observed rows alone."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.preprocessing import minmax_scale, normalize

from jaxfedmvc.algorithms.pooled.rows import blank, is_real, min_max, unit_samples

OBSERVED = np.array([[1, 1], [1, 0], [0, 1], [0, 0], [1, 1]], bool)
RNG = np.random.default_rng(0)
VIEWS = tuple(RNG.normal(size=(5, d)).astype(np.float32) for d in (3, 2))


def dirty(value):
    return tuple(
        jnp.array(np.where(OBSERVED[:, [v]], x, np.float32(value))) for v, x in enumerate(VIEWS)
    )


def expected(scale):
    result = [np.zeros_like(x) for x in VIEWS]
    for v, x in enumerate(VIEWS):
        result[v][OBSERVED[:, v]] = scale(x[OBSERVED[:, v]])
    return result


@pytest.mark.parametrize("value", [np.nan, np.inf, -50.0])
@pytest.mark.parametrize(
    ("prepare", "scale"), [(blank, np.asarray), (unit_samples, normalize), (min_max, minmax_scale)]
)
def test_observed_rows_are_scaled_and_the_others_are_zero(prepare, scale, value):
    for found, right in zip(
        prepare(dirty(value), jnp.array(OBSERVED)), expected(scale), strict=True
    ):
        np.testing.assert_allclose(found, right, atol=1e-5)


def test_constant_features_and_views_without_rows_become_zero():
    views = jnp.full((5, 2), 3.0), jnp.full((5, 1), jnp.nan)
    observed = jnp.array(OBSERVED).at[:, 1].set(False)
    for prepare in (min_max, unit_samples):
        found = prepare(views, observed)
        assert not np.asarray(found[1]).any()
    assert not np.asarray(min_max(views, observed)[0]).any()


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e20])
def test_rows_of_any_magnitude_become_unit_rows(scale):
    x = np.array([[3, 4], [-6, 8]], np.float32) * np.float32(scale)
    (found,) = unit_samples((jnp.asarray(x),), jnp.ones((2, 1), bool))
    np.testing.assert_allclose(found, [[0.6, 0.8], [-0.6, 0.8]], rtol=1e-6)


def test_a_zero_row_stays_zero():
    assert not np.asarray(unit_samples((jnp.zeros((2, 3)),), jnp.ones((2, 1), bool))[0]).any()


def test_real_rows_have_some_view():
    np.testing.assert_array_equal(is_real(jnp.array(OBSERVED)), [True, True, True, False, True])
