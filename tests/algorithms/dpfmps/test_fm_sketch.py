"""Sketches of known sets: their distribution, their estimates, the counts of a grid's cells."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import beta, chisquare, geom

from jaxfedmvc.algorithms.dpfmps.budget import (
    GREATEST_VALUE,
    SketchNoise,
    sketch_delta,
    sketch_noise,
    sketches_delta,
    split,
)
from jaxfedmvc.algorithms.dpfmps.fm_sketch import (
    add_noise,
    complement_counts,
    complement_weights,
    estimate_size,
    fit_grid,
    marginals,
    norm_sub,
    sketch_clusters,
)

HASH = jax.random.key(7)
M = 4000
# Four relative standard deviations of an estimate.
TOLERANCE = 4 * 1.04 / np.sqrt(M)

FAST = {"xla_llvm_disable_expensive_passes": True}
# For long runs, which save what it costs to compile them well.
WELL = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}
jit_sketch = jax.jit(sketch_clusters, static_argnums=(3, 4), compiler_options=WELL)
jit_complement = jax.jit(complement_counts, compiler_options=FAST)
jit_marginals = jax.jit(marginals, compiler_options=FAST)
jit_fit = jax.jit(fit_grid, compiler_options=FAST)
jit_noise, jit_size, jit_norm_sub = map(jax.jit, (add_noise, estimate_size, norm_sub))


def size(sketches):
    return np.asarray(jit_size(np.exp2(-np.asarray(sketches, np.float32))))


def partitions(n=600, k=3, n_agents=3):
    """Labels of each agent, mostly alike, and the exact counts of all cells."""
    rng = np.random.default_rng(0)
    common = rng.integers(k, size=n)
    labels = np.stack(
        [np.where(rng.random(n) < 0.3, rng.integers(k, size=n), common) for _ in range(n_agents)]
    ).astype(np.int32)
    counts = np.zeros((k,) * n_agents)
    np.add.at(counts, tuple(labels), 1)
    return labels, counts


@pytest.fixture(scope="module")
def sketched():
    labels, counts = partitions()
    ids = np.arange(labels.shape[1])
    sketches = np.stack([jit_sketch(HASH, ids, row, 3, M) for row in labels])
    return labels, counts, sketches


def test_values_of_one_element_are_geometric():
    sketch = np.asarray(jit_sketch(HASH, np.array([5]), np.array([0]), 1, 20_000))[0]
    counts = np.bincount(np.minimum(sketch, 10), minlength=11)
    assert counts[0] == 0 and sketch.dtype == np.uint8
    expected = 20_000 * np.array([*2.0 ** -np.arange(1, 10), 2.0**-9])
    assert chisquare(counts[1:], expected).pvalue > 1e-3


def test_the_sketch_of_a_union_is_the_greater_one(sketched):
    labels, _, sketches = sketched
    ids = np.arange(labels.shape[1])
    whole = np.asarray(jit_sketch(HASH, ids, np.zeros_like(labels[0]), 3, M))
    for of_agent in sketches:
        np.testing.assert_array_equal(of_agent.max(axis=0), whole[0])
    np.testing.assert_array_equal(whole[1:], 0)  # empty sets


def test_order_and_padding_change_nothing(sketched):
    labels, _, sketches = sketched
    n = labels.shape[1]
    order = np.random.default_rng(1).permutation(n)
    ids = np.append(order, np.full(5, -1)).astype(np.int32)
    padded = np.append(labels[0][order], np.full(5, -1)).astype(np.int32)
    np.testing.assert_array_equal(jit_sketch(HASH, ids, padded, 3, M), sketches[0])


@pytest.mark.slow
@pytest.mark.parametrize("n", [40, 600, 5000])
def test_estimate_of_known_sizes(n):
    sketch = jit_sketch(HASH, np.arange(n), np.zeros(n, np.int32), 1, M)
    # For small sets the estimate is biased by about one element.
    assert size(sketch)[0] == pytest.approx(n, rel=TOLERANCE, abs=1)


def test_estimate_is_unbiased_over_hash_functions():
    """Many sketches of 100 functions each, of the same 500 elements."""
    sketch = np.asarray(jit_sketch(HASH, np.arange(500), np.zeros(500, np.int32), 1, M))
    sizes = size(sketch.reshape(-1, 100))
    deviation = sizes.std() / 500
    assert deviation == pytest.approx(1.04 / np.sqrt(100), rel=0.4)
    assert sizes.mean() == pytest.approx(500, rel=4 * deviation / np.sqrt(len(sizes)))


def test_phantoms_are_elements_of_their_own():
    empty = np.zeros((2, M), np.uint8)
    noise = SketchNoise(np.float32(300), np.int32(0))
    noisy = np.asarray(jit_noise(jax.random.key(0), empty, noise))
    np.testing.assert_allclose(size(noisy), 300, rtol=TOLERANCE)
    assert size(noisy.max(axis=0)) == pytest.approx(600, rel=TOLERANCE)


def test_phantoms_have_the_greatest_of_their_values(monkeypatch):
    """Of k geometric variables the distribution is scipy's to the power of k."""
    noise = SketchNoise(np.float32(5), np.int32(0))
    empty = np.zeros((1, 20_000), np.uint8)
    found = np.asarray(jit_noise(jax.random.key(1), empty, noise))
    at_most = geom(0.5).cdf(np.arange(1, 13)) ** 5
    shares = np.diff([0, *at_most[:-1], 1])
    counts = np.bincount(np.minimum(found.ravel(), 12), minlength=13)
    assert counts[0] == 0 and chisquare(counts[1:], 20_000 * shares).pvalue > 1e-3
    # One phantom's least and greatest values: of words that leave next to nothing on one side.
    words = np.zeros((2, 1, 3), np.uint32)
    words[1, 0] = 0, 1, 1
    words[0, 0, 2] = 2**5  # 2^-28
    monkeypatch.setattr(jax.random, "bits", lambda *_: words)
    one = add_noise(HASH, np.zeros((1, 3), np.uint8), SketchNoise(np.float32(1), np.int32(0)))
    np.testing.assert_array_equal(one, [[1, GREATEST_VALUE, 28]])


def test_a_floor_is_kept_and_no_noise_is_none(sketched):
    sketches = sketched[2][0]
    floored = jit_noise(jax.random.key(0), sketches, SketchNoise(np.float32(0), np.int32(9)))
    np.testing.assert_array_equal(floored, np.maximum(sketches, 9))
    quiet = jit_noise(jax.random.key(0), sketches, SketchNoise(np.float32(0), np.int32(0)))
    np.testing.assert_array_equal(quiet, sketches)


def test_complement_leaves_out_one_cluster():
    sketches = np.random.default_rng(0).integers(0, 9, (4, 6)).astype(np.uint8)
    for c, weights in enumerate(np.asarray(jax.jit(complement_weights)(sketches))):
        others = np.delete(sketches, c, axis=0).max(axis=0)
        np.testing.assert_allclose(weights, 0.5**others)


def test_cells_by_complements_are_the_intersections(sketched):
    labels, counts, sketches = sketched
    n = labels.shape[1]
    found = jit_complement(sketches, np.float32(n), np.float32(0))
    np.testing.assert_allclose(found, counts, atol=TOLERANCE * n)
    # The axes are the agents', in order: exchanging two exchanges the axes.
    swapped = jit_complement(sketches[[1, 0, 2]], np.float32(n), np.float32(0))
    np.testing.assert_allclose(swapped, np.swapaxes(found, 0, 1), atol=0.01)
    assert np.abs(counts - np.swapaxes(counts, 0, 1)).max() > 1


def with_phantoms(sketches, n_phantoms):
    noise = SketchNoise(np.float32(n_phantoms), np.int32(0))
    keys = jax.random.split(jax.random.key(3), len(sketches))
    return np.stack([jit_noise(k, s, noise) for k, s in zip(keys, sketches, strict=True)])


def test_phantoms_are_taken_off_the_cells(sketched):
    labels, counts, sketches = sketched
    n, n_phantoms = labels.shape[1], 50.0
    noisy = with_phantoms(sketches, n_phantoms)
    found = jit_complement(noisy, np.float32(n), np.float32(n_phantoms))
    # All of a union is counted with relative error: persons and 50 for each of 6 sets.
    np.testing.assert_allclose(found, counts, atol=TOLERANCE * (n + 300))
    assert found.min() >= 0


def test_estimate_of_a_hand_worked_case():
    found = jit_size(np.float32([[0.5, 0.25]]))
    np.testing.assert_allclose(found, [0.7213 / (1 + 1.079 / 2) * 2 / 0.75], rtol=1e-6)


def test_counts_are_their_formulas_cell_by_cell(sketched):
    """In float64, of sketches that no agent would send; those of pairs up to one shift for all."""
    sketches = np.random.default_rng(2).integers(1, 12, sketched[2].shape).astype(np.uint8)
    total, n_phantoms = np.float32(900), np.float32(60)

    def size_without(*clusters):
        """D of the union of all clusters but one of each agent, who are given as (agent, one)."""
        union = np.max([np.delete(sketches[a], c, axis=0).max(axis=0) for a, c in clusters], axis=0)
        return 0.7213 / (1 + 1.079 / M) / (0.5**union).mean()

    cells = jit_complement(sketches, total, n_phantoms)
    for cell in np.ndindex(3, 3, 3):
        expected = total - (size_without(*enumerate(cell)) - n_phantoms * 3 * 2)
        assert cells[cell] == pytest.approx(expected, rel=1e-4) and expected > 0
    two_way = jit_marginals(sketches, total, n_phantoms)[1]
    for found, (a, b) in zip(two_way, itertools.combinations(range(3), 2), strict=True):
        sizes = [-size_without((a, i), (b, j)) for i, j in np.ndindex(3, 3)]
        expected = jit_norm_sub(np.float32(sizes), total).reshape(3, 3)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("n_phantoms", [0.0, 50.0])
def test_marginals_are_those_of_the_labels(sketched, n_phantoms):
    labels, counts, sketches = sketched
    n = labels.shape[1]
    noisy = sketches if n_phantoms == 0 else with_phantoms(sketches, n_phantoms)
    found = jit_marginals(noisy, np.float32(n), np.float32(n_phantoms))
    one_way, two_way = jax.device_get(found)
    atol = TOLERANCE * (n + 4 * n_phantoms)
    for agent in range(3):
        np.testing.assert_allclose(one_way[agent], np.bincount(labels[agent]), atol=atol)
    for found, pair in zip(two_way, itertools.combinations(range(3), 2), strict=True):
        (other,) = set(range(3)) - set(pair)
        np.testing.assert_allclose(found, counts.sum(axis=other), atol=atol)
    np.testing.assert_allclose(one_way.sum(axis=1), n, rtol=1e-5)
    np.testing.assert_allclose(two_way.sum(axis=(1, 2)), n, rtol=1e-5)


@pytest.mark.parametrize(
    "values, total, expected",
    [
        # The excess of 2 is taken from the two that stay positive, not from the negative one.
        ([5.0, 3.0, -2.0], 6.0, [4.0, 2.0, 0.0]),
        # A second pass: taking 1 from each makes 0.5 negative.
        ([5.0, 0.5, -2.0], 3.5, [3.5, 0.0, 0.0]),
        # Too little: all get the same, the negative one too.
        ([1.0, 2.0, -1.0], 8.0, [3.0, 4.0, 1.0]),
    ],
)
def test_norm_sub_of_hand_worked_cases(values, total, expected):
    np.testing.assert_allclose(
        jit_norm_sub(np.float32(values), np.float32(total)), expected, atol=1e-6
    )


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-100, 100, width=32), min_size=6, max_size=6), st.floats(1, 200))
def test_norm_sub_gives_counts_of_that_sum(values, total):
    values = np.array(values, np.float32)
    found = np.asarray(jit_norm_sub(values, np.float32(total)))
    assert found.min() >= 0
    assert found.sum() == pytest.approx(total, rel=1e-4)
    # One shift for all that stay positive, and no other would have stayed positive with it.
    shifts = (found - values)[found > 0]
    np.testing.assert_allclose(shifts, shifts[0], atol=1e-3)
    assert (values[found == 0] + shifts[0] <= 1e-3).all()


def test_norm_sub_is_the_nearest_such_vector():
    values = np.random.default_rng(0).normal(2, 5, 8)
    best = minimize(
        lambda v: np.square(v - values).sum(),
        np.full(8, 2.5),
        bounds=[(0, None)] * 8,
        constraints={"type": "eq", "fun": lambda v: v.sum() - 20},
        options={"ftol": 1e-12},
    )
    found = jit_norm_sub(np.float32(values), np.float32(20))
    np.testing.assert_allclose(found, best.x, atol=1e-3)


def exact_marginals(counts):
    axes = set(range(counts.ndim))
    one_way = [counts.sum(axis=tuple(axes - {a})) for a in sorted(axes)]
    pairs = itertools.combinations(sorted(axes), 2)
    two_way = [counts.sum(axis=tuple(axes - set(pair))) for pair in pairs]
    return np.float32(one_way), np.float32(two_way)


def test_fit_to_two_agents_is_their_two_way_counts():
    counts = partitions(n_agents=2)[1]
    found = jit_fit(jax.random.key(0), *exact_marginals(counts), np.float32(600))
    np.testing.assert_allclose(found, counts, atol=0.1)


@pytest.mark.parametrize("n_agents", [3, 4, 5])
def test_fit_comes_near_the_pairs_where_a_product_does_not(n_agents):
    counts = partitions(n_agents=n_agents)[1]
    one_way, two_way = exact_marginals(counts)
    found = np.asarray(jit_fit(jax.random.key(0), one_way, two_way, np.float32(600)))
    assert found.shape == counts.shape and found.min() >= np.float32(1e-5)

    def distance(grid):
        return np.abs(np.asarray(exact_marginals(grid)[1]) - np.asarray(two_way)).sum()

    product = np.float64(600)
    for row in np.asarray(one_way):
        product = np.multiply.outer(product, row / 600)
    assert distance(found) < 0.2 * distance(product)
    assert np.abs(found - counts).sum() < 0.7 * np.abs(product - counts).sum()


@pytest.mark.parametrize("n_agents", [3, 4, 5])
def test_fit_makes_the_steps_that_it_says(n_agents):
    """Pair after pair by hand, from marginals that contradict each other."""
    rng, key, k = np.random.default_rng(n_agents), jax.random.key(2), 3
    pairs = list(itertools.combinations(range(n_agents), 2))
    one_way = 600 * rng.dirichlet(np.ones(k), n_agents)
    two_way = 600 * rng.dirichlet(np.ones(k * k), len(pairs)).reshape(-1, k, k)
    n_steps = {3: 120, 4: 240, 5: 300}[n_agents]

    @jax.jit
    def drawn(steps):
        draw = lambda t: jax.random.randint(jax.random.fold_in(key, t), (), 0, len(pairs))  # noqa: E731
        return jax.vmap(draw)(steps)

    grid = np.float64(600)
    for row in one_way:
        grid = np.multiply.outer(grid, row / 600)
    for t, place in enumerate(np.asarray(drawn(np.arange(n_steps)))):
        part = {3: 0.5 * 0.96**t, 4: 0.5 * 0.95 ** (t // 10) / 9, 5: 0.5 * 0.95 ** (t // 50) / 27}
        away = tuple(set(range(n_agents)) - set(pairs[place]))
        lacks = np.expand_dims(two_way[place] - grid.sum(axis=away), away)
        grid = np.maximum(grid + part[n_agents] * lacks, 1e-5)
    found = jit_fit(key, np.float32(one_way), np.float32(two_way), np.float32(600))
    np.testing.assert_allclose(found, grid, atol=1e-2)


def test_fit_leaves_independent_agents_as_they_are():
    shares = np.array([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    counts = 600 * np.einsum("i,j,k->ijk", *shares)
    found = jit_fit(jax.random.key(1), *exact_marginals(counts), np.float32(600))
    np.testing.assert_allclose(found, counts, rtol=1e-3)


# --- What sketches tell together ------------------------------------------------------------------


@pytest.mark.ci
def test_sketches_of_agents_tell_more_together_than_apart_and_no_more_than_is_said():
    """Clopper-Pearson intervals of how often three agents show a rare value at once.

    Every cluster holds one row, or none: a draw each.
    """
    n_agents, m, level, n_clusters, n_keys = 3, 30, 14, 256, 300
    delta = float(sketch_delta(1e5))
    budget = split(4.0, n_agents, 0.05)
    noise = sketch_noise(budget.memberships, m, delta)
    rows = np.arange(n_clusters)

    @functools.partial(jax.jit, compiler_options=WELL)
    def shown(keys, present):
        def one(key):
            of_all, *own = jax.random.split(key, n_agents + 1)
            labels = jnp.where(present, rows, -1)
            sketches = sketch_clusters(of_all, rows, labels, n_clusters, m)
            noisy = jnp.stack([add_noise(k, sketches, noise) for k in own])
            return jnp.sum(jnp.max(jnp.min(noisy, axis=0), axis=1) >= level)

        return jnp.sum(jax.lax.map(one, keys))

    keys = jax.random.split(jax.random.key(0), n_keys)
    n_draws = n_clusters * n_keys
    with_row, without = int(shown(keys, True)), int(shown(keys[::-1], False))
    least = beta.ppf(0.025, with_row, n_draws - with_row + 1)
    most = beta.ppf(0.975, without + 1, n_draws - without)
    epsilon = n_agents * budget.memberships
    lost = least - np.exp(epsilon) * most
    assert lost > 30 * n_agents * delta
    total = jax.jit(sketches_delta, static_argnums=(1, 2))(epsilon, n_agents, m, noise)
    assert lost < total < 0.1
