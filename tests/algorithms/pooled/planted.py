"""Three planted clusters in two views, and what every shallow method must do with them."""

import jax
import numpy as np

from jaxfedmvc.data.partition import Part
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics import accuracy

K, N = 3, 36
KEY = jax.random.key(0)
TRUTH = np.arange(N) % K
_RNG = np.random.default_rng(0)
VIEWS = tuple(
    (2 * _RNG.normal(size=(K, d))[TRUTH] + 0.2 * _RNG.normal(size=(N, d))).astype(np.float32)
    for d in (7, 5)
)
COMPLETE = np.ones((N, 2), bool)
OBSERVED = COMPLETE.copy()
OBSERVED[:9, 0] = OBSERVED[14:23, 1] = False


def padded(array, rows=4, value=np.nan):
    """Rows of padding behind the others."""
    fill = False if array.dtype == bool else value
    return np.concatenate([array, np.full((rows, *array.shape[1:]), fill, array.dtype)])


def finds_the_clusters(found):
    """Checks labels, padding and the form of a result on the planted rows and some padding."""
    labels = np.asarray(found.labels)
    assert labels.dtype == np.int32 and (labels[N:] == -1).all()
    assert accuracy(TRUTH, labels[:N], K, K) == 1
    assert not np.asarray(found.embedding)[N:].any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def never_reads_what_is_not_observed(program, observed=OBSERVED):
    """Checks that NaN and large numbers in the place of missing entries change no bit."""
    expected = program(VIEWS, observed)
    for value in (np.nan, 50.0):
        other = tuple(np.where(observed[:, [v]], x, np.float32(value)) for v, x in enumerate(VIEWS))
        jax.tree.map(np.testing.assert_array_equal, program(other, observed), expected)


def padding_changes_only_rounding(program, observed=OBSERVED, rtol=1e-3):
    """Checks that rows behind the others change nothing; returns the result with them."""
    expected = program(VIEWS, observed)
    found = program(tuple(map(padded, VIEWS)), padded(observed))
    np.testing.assert_array_equal(found.labels[:N], expected.labels)
    np.testing.assert_allclose(found.trace, expected.trace, rtol=rtol)
    finds_the_clusters(found)


def never_rises(trace, rtol=1e-5):
    """Checks that an objective does not grow but for rounding."""
    trace = np.asarray(trace, float)
    assert (np.diff(trace) <= rtol * np.abs(trace[:-1])).all(), np.diff(trace).max()


def federation(observed=COMPLETE, views=VIEWS):
    """The planted rows, with one client for each kind of rows."""
    kinds = sorted(set(map(tuple, observed.tolist())))
    parts = [
        Part(
            tuple(np.flatnonzero(kind).tolist()),
            np.flatnonzero((observed == kind).all(axis=1)).astype(np.int32)[None],
            np.array([client], np.int32),
        )
        for client, kind in enumerate(kinds)
    ]
    return Federation.from_arrays(list(views), TRUTH, partition=parts)


def starts_with_rows(algorithm, n):
    """Starts a method on a federation of one client with n rows, which are never touched."""
    part = Part((0,), np.arange(n, dtype=np.int32)[None], np.zeros(1, np.int32))
    views = [np.zeros((n, 1), np.float32)]
    algorithm.init(KEY, Federation.from_arrays(views, np.zeros(n, int), partition=[part]))
