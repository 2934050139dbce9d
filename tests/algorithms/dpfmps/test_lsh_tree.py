"""Private centres of one table: known answers with the noise off, and what noise does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from jaxfedmvc.algorithms.dpfmps.budget import split
from jaxfedmvc.algorithms.dpfmps.lsh_tree import (
    CAPACITY,
    DEPTH,
    TreeNoise,
    least_count,
    private_centres,
    private_leaves,
    tree_noise,
)
from jaxfedmvc.privacy import laplace_scale

QUIET = TreeNoise(jnp.inf, 0.0, 0.0)
K = 4

FAST = {"xla_llvm_disable_expensive_passes": True}
jit_leaves = jax.jit(private_leaves, static_argnums=2, compiler_options=FAST)
jit_centres = jax.jit(partial(private_centres, n_init=4), static_argnums=2, compiler_options=FAST)
# The number of clusters is traced, too: one program for all tests.
# Of 100 trees at once: a few runs save what it costs to compile it well.
WELL = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}
many_leaves = jax.jit(jax.vmap(private_leaves, (0, None, None, None, None)), compiler_options=WELL)
KEYS = jax.random.split(jax.random.key(0), 100)


def blobs(n=80):
    """K groups far apart in [-1, 1]^3, in unlike directions, and their means."""
    centres = np.array([[0.7, 0.7, 0.0], [-0.7, 0.6, 0.2], [0.0, -0.8, 0.5], [0.4, -0.4, -0.7]])
    noise = np.random.default_rng(0).uniform(-0.05, 0.05, (n, 3))
    x = (centres[np.arange(n) % K] + noise).astype(np.float32)
    return x, np.stack([x[i::K].mean(axis=0) for i in range(K)])


def test_budget_of_a_tree_is_spent_exactly():
    budget = split(1.0, 3, 0.05)
    noise = tree_noise(budget, 6)
    assert noise.count_epsilon * (DEPTH + 1) == pytest.approx(budget.counts, rel=1e-12)
    assert noise.scale_one == laplace_scale(1, budget.sums, 1e-6)
    assert noise.scale_all == laplace_scale(6, budget.sums, 1e-6)
    assert tree_noise(split(np.inf, 3, 0.05), 6) == QUIET


@pytest.mark.parametrize(
    "total, scale_one, expected",
    [
        (1000, 1.0, 28),  # 10 sqrt(2) sqrt(4) = 28.28
        (1000, 50.0, 125),  # 1000 / (2 * 4)
        (1007, 50.0, 125),
        (-30, 50.0, 1),
        (1000, 0.0, 1),
    ],
)
def test_least_count_of_hand_worked_cases(total, scale_one, expected):
    assert least_count(jnp.int32(total), K, 4, scale_one) == expected


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [np.inf, 1e5])
def test_centres_of_separate_groups_are_found(epsilon):
    x, means = blobs()
    noise = tree_noise(split(epsilon, 2, 0.05), 3)
    found = np.asarray(jit_centres(jax.random.key(0), x, K, np.ones(len(x), bool), noise))
    distances = np.linalg.norm(found[:, None] - means[None], axis=2)
    assert distances[linear_sum_assignment(distances)].max() < 0.05


@pytest.mark.slow
def test_leaves_without_noise_hold_all_rows():
    x, means = blobs()
    leaves = many_leaves(KEYS, x, K, np.ones(len(x), bool), QUIET)
    assert leaves.means.shape == (len(KEYS), CAPACITY, 3)
    np.testing.assert_array_equal(leaves.counts.sum(axis=1), len(x))
    mean = (leaves.means * leaves.counts[..., None]).sum(axis=1) / len(x)
    np.testing.assert_allclose(mean, np.tile(x.mean(axis=0), (len(KEYS), 1)), atol=1e-5)
    # A node of three rows or more branches while their signs differ: groups do not mix.
    of_leaves = np.asarray(leaves.means)[np.asarray(leaves.counts) > 0]
    nearest = np.linalg.norm(of_leaves[:, None] - means[None], axis=2).min(axis=1)
    assert np.mean(nearest < 0.15) > 0.99


def test_capacity_bounds_the_tree_and_loses_no_row():
    x = np.random.default_rng(0).uniform(-1, 1, (3 * CAPACITY, 12)).astype(np.float32)
    leaves = jit_leaves(jax.random.key(0), x, K, np.ones(len(x), bool), QUIET)
    assert (leaves.counts > 0).sum() == CAPACITY
    assert leaves.counts.sum() == len(x)
    # The greatest branch first, so that none stays large.
    assert leaves.counts.max() <= 30


def leaves_of_groups(*groups):
    """Leaves of 80 rows by 100 keys without noise: of groups `(rows, where they lie)`."""
    x = np.concatenate([np.tile(np.float32(at), (n, 1)) for n, at in groups])
    # The least count is 80 / (2 K) = 10.
    return many_leaves(KEYS, x, K, np.ones(80, bool), TreeNoise(jnp.inf, 1.0, 0.0))


def test_rows_of_a_dropped_node_are_out_for_good():
    """Eight rows are too few. Others, which part later, may take the place of their node."""
    leaves = leaves_of_groups((40, [0.5, 0, 0]), (32, [0.4, 0.4, 0]), (8, [-0.5, -0.2, 0]))
    counts = np.asarray(leaves.counts)
    np.testing.assert_array_equal(counts.sum(axis=1), 72)
    assert set(np.unique(counts)) == {0, 32, 40, 72}


@pytest.mark.slow
def test_padding_and_vmap_change_nothing():
    x, _ = blobs()
    noise = TreeNoise(0.5, 0.1, 0.3)
    short = many_leaves(KEYS, x, K, np.ones(len(x), bool), noise)
    padded = np.concatenate([x, np.full((7, 3), np.nan, np.float32)])
    for i in range(2):
        long = jit_leaves(KEYS[i], padded, K, np.arange(len(padded)) < len(x), noise)
        np.testing.assert_array_equal(short.counts[i], long.counts)
        np.testing.assert_allclose(short.means[i], long.means, atol=1e-6)
        assert (long.counts > 0).sum() > K


@pytest.mark.slow
def test_empty_nodes_are_counted_with_noise_like_others():
    """A table without rows: were empty nodes told apart, no tree would ever grow a leaf."""
    x, _ = blobs()
    counts = many_leaves(KEYS, x, K, np.zeros(len(x), bool), TreeNoise(0.01, 1.0, 1.0)).counts
    n_leaves = np.asarray((counts > 0).sum(axis=1))
    assert 0 < (n_leaves > 0).mean() < 1
    assert n_leaves.max() > 1  # a node branched
    assert np.isin(np.asarray(counts), np.round(counts)).all()


def leaves_by_recursion(x, directions, least):
    """Sizes and means of the leaves, in the order of their rows."""
    leaves = []

    def grow(rows, level):
        if level == len(directions) or len(rows) < 3 * least:
            leaves.append([len(rows), *x[rows].mean(axis=0)])
            return
        side = x[rows] @ directions[level] > 0
        for child in (rows[~side], rows[side]):
            if len(child) >= least:
                grow(child, level + 1)

    grow(np.arange(len(x)), 0)
    return np.array(leaves).reshape(-1, 1 + x.shape[1])


def test_leaves_are_those_of_a_tree_grown_by_recursion():
    x = np.random.default_rng(4).uniform(-1, 1, (80, 3)).astype(np.float32)
    found = jax.device_get(many_leaves(KEYS, x, K, np.ones(80, bool), TreeNoise(jnp.inf, 0.2, 0.0)))
    least = int(10 * np.sqrt(2 * 3) * 0.2)
    assert least == 4 < 80 // (2 * K)

    @jax.jit
    def drawn(keys):
        draw = jax.vmap(lambda key: jax.random.normal(jax.random.split(key, 3)[0], (DEPTH, 3)))
        return draw(keys)

    whole, dropped = 0, 0
    for means, counts, directions in zip(*found, np.asarray(drawn(KEYS)), strict=True):
        there = counts > 0
        got = np.column_stack([counts[there], means[there]])
        expected = leaves_by_recursion(x.astype(float), directions, least)
        assert len(got) == len(expected) > 3
        # Leaves have no order: the nearest of the expected ones, of which each is met once.
        nearest = np.abs(got[:, None] - expected[None]).max(axis=2).argmin(axis=1)
        assert sorted(nearest) == list(range(len(expected)))
        np.testing.assert_allclose(got, expected[nearest], atol=1e-5)
        # Some are just too small to branch, and some rows were alone.
        whole += (expected[:, 0] == 3 * least - 1).any()
        dropped += expected[:, 0].sum() < 80
    assert whole > 10 and dropped > 10


def test_noise_of_a_mean_has_its_scale():
    """Equal rows never part: one leaf with a mean of sums + Laplace(b), over the count."""
    x = np.tile(np.float32([0.25, -0.5, 0.0]), (80, 1))
    leaves = many_leaves(KEYS, x, K, np.ones(80, bool), TreeNoise(jnp.inf, 0.0, 4.0))
    place = np.argmax(leaves.counts, axis=1)
    assert (np.asarray(leaves.counts).max(axis=1) == 80).all()
    assert (np.asarray(leaves.counts > 0).sum(axis=1) == 1).all()
    errors = 80 * (np.asarray(leaves.means)[np.arange(len(KEYS)), place] - x[0])
    # The mean absolute value is b, and of n draws deviates by b / sqrt(n); four times that.
    sigma = 4.0 / np.sqrt(errors.size)
    assert np.abs(errors).mean() == pytest.approx(4.0, abs=4 * sigma)
    assert np.abs(errors.mean()) < 4 * np.sqrt(2) * sigma


def test_each_level_counts_with_noise_of_its_own():
    """Equal rows go down together while 80 + z >= 3 on each of DEPTH + 1 levels.

    One noise for all levels would be averaged out by whoever sees more than one.
    """
    epsilon = 0.022
    x = np.tile(np.float32([0.25, -0.5, 0.0]), (80, 1))
    leaves = many_leaves(KEYS, x, K, np.ones(80, bool), TreeNoise(epsilon, 0.0, 0.0))
    # No noise on sums: the mean of a leaf without rows is zero.
    has_rows = np.any(leaves.means != 0, axis=2)
    counts = np.where(has_rows, leaves.counts, 0)
    assert (np.count_nonzero(counts, axis=1) <= 1).all()
    lowest = np.exp(-78 * epsilon) / (1 + np.exp(-epsilon))  # P(z <= -78)
    expected = (1 - lowest) ** (DEPTH + 1)
    sigma = np.sqrt(expected * (1 - expected) / len(KEYS))
    assert np.mean(counts.max(axis=1) >= 3) == pytest.approx(expected, abs=4 * sigma)
    # Children without rows are counted with noise, too: no leaf tells that somebody is there.
    assert np.mean(np.any((leaves.counts > 0) & ~has_rows, axis=1)) > 0.5


def test_noises_of_counts_and_sums_have_nothing_in_common():
    """For one cluster the least count is half the total, and the root the only leaf."""
    x = np.tile(np.float32([0.25, -0.5, 0.0]), (80, 1))
    leaves = many_leaves(KEYS, x, 1, np.ones(80, bool), TreeNoise(0.1, 100.0, 4.0))
    assert (np.asarray(leaves.counts > 0).sum(axis=1) == 1).all()
    place = np.arange(len(KEYS)), np.argmax(leaves.counts, axis=1)
    counts = np.asarray(leaves.counts)[place]
    sums = counts[:, None] * np.asarray(leaves.means)[place]
    noises = np.stack([counts - 80, *(sums - 80 * x[0]).T])
    # Of 100 independent pairs a correlation deviates by a tenth.
    off_diagonal = np.corrcoef(noises)[np.triu_indices(4, k=1)]
    assert np.abs(off_diagonal).max() < 0.4


def test_means_stay_in_the_box_and_same_key_gives_same_bits():
    x, _ = blobs()
    arguments = (x, K, np.ones(len(x), bool), TreeNoise(0.5, 1.0, 100.0))
    first, again = (many_leaves(KEYS, *arguments) for _ in range(2))
    assert np.abs(first.means).max() == 1
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.slow
def test_missing_centres_are_drawn_in_the_box():
    x, _ = blobs()
    nobody = np.zeros(len(x), bool)
    first, second = (
        np.asarray(jit_centres(jax.random.key(i), x, K, nobody, QUIET)) for i in range(2)
    )
    assert np.abs([first, second]).max() <= 1
    assert not np.isclose(first, second).any()
    assert len(np.unique(first)) == first.size
