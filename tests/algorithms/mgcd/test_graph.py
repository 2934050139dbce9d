"""Graphs as factors against the same graphs written out in NumPy."""

import jax
import numpy as np
import pytest

from jaxfedmvc.algorithms.mgcd import graph as graphs
from jaxfedmvc.algorithms.mgcd.graph import Factored

N = 7
dense, rows, times, squared_norm = map(
    jax.jit, (graphs.dense, graphs.rows, graphs.times, graphs.squared_norm)
)
of_rank = jax.jit(graphs.of_rank, static_argnums=1)
total = jax.jit(graphs.total)


def factored(rank, seed=0, n=N):
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(n, rank)), rng.normal(size=(rank, n))
    return Factored(np.float32(left), np.float32(right))


def product(graph):
    return np.asarray(graph.left, np.float64) @ np.asarray(graph.right, np.float64)


def whole(graph):
    """By the definition: the product without its diagonal."""
    result = product(graph)
    np.fill_diagonal(result, 0)
    return result


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["factored", "whole"])
def pair(request):
    """A graph in each form, with what it stands for."""
    graph = factored(3)
    expected = whole(graph)
    return (graph if request.param == "factored" else np.float32(expected)), expected


def test_entries_rows_and_products(pair):
    graph, expected = pair
    assert graphs.n_samples(graph) == N
    close(dense(graph), expected)
    index = np.array([4, 0, 4, 6])  # in any order, and twice
    close(rows(graph, index), expected[index])
    x = np.random.default_rng(1).normal(size=(N, 2)).astype(np.float32)
    close(times(graph, x), expected @ x)
    close(squared_norm(graph), (expected**2).sum())
    close(dense(jax.jit(graphs.scaled)(graph, -2.5)), -2.5 * expected)


def test_the_diagonal_is_zero_exactly_and_is_what_is_left_out():
    graph = factored(3)
    close(jax.jit(graphs.diagonal)(graph), np.diag(product(graph)))
    np.testing.assert_array_equal(np.diag(dense(graph)), 0.0)
    np.testing.assert_array_equal(np.diag(rows(graph, np.arange(N))), 0.0)
    np.testing.assert_array_equal(
        jax.jit(graphs.without_diagonal)(np.ones((2, 2))), [[0, 1], [1, 0]]
    )
    # The identity is the graph by which every sample stands for itself: nothing is left of it.
    identity = Factored(np.eye(N), np.eye(N))
    np.testing.assert_array_equal(dense(identity), np.zeros((N, N)))
    np.testing.assert_array_equal(times(identity, np.ones((N, 2))), np.zeros((N, 2)))
    assert squared_norm(identity) == 0


def test_rounding_makes_no_squared_norm_negative():
    scales = np.random.default_rng(0).normal(size=(2, 40, N)).astype(np.float32)
    # Of products that are all diagonal nothing is left but rounding, of either sign.
    for left, right in zip(*scales, strict=True):
        norm = squared_norm(Factored(np.diag(left), np.diag(right)))
        assert 0 <= norm < 1e-4


def test_total_adds_ranks_and_mixes_forms():
    parts = [factored(2, seed=1), factored(3, seed=2), factored(1, seed=3)]
    expected = sum(whole(part) for part in parts)
    added = total(parts)
    assert added.left.shape == (N, 6) and added.right.shape == (6, N)
    close(dense(added), expected)
    mixed = total([parts[0], dense(parts[1]), parts[2]])
    assert mixed.shape == (N, N)
    close(mixed, expected)


@pytest.mark.parametrize("rank", [3, 4, 10])
def test_a_rank_that_suffices_loses_nothing(rank):
    graph = factored(3)
    kept = of_rank(graph, rank)
    assert kept.left.shape == (N, rank)
    np.testing.assert_array_equal(product(kept), product(graph))


@pytest.mark.parametrize("rank_before, rank", [(4, 2), (6, 1), (12, 3), (12, 7), (12, 9)])
def test_of_a_higher_rank_the_best_approximation_is_kept(rank_before, rank):
    """Eckart & Young (1936), also where there are more factors than samples."""
    graph = factored(rank_before, seed=5)
    kept = of_rank(graph, rank)
    assert kept.left.shape == (N, rank)
    u, s, vt = np.linalg.svd(product(graph))
    close(product(kept), (u[:, :rank] * s[:rank]) @ vt[:rank])


def test_a_whole_graph_has_no_rank_to_keep():
    graph = dense(factored(3))
    assert graphs.of_rank(graph, 1) is graph


def test_no_edges():
    assert graphs.zeros(N, None).shape == (N, N)
    none = graphs.zeros(N, 3)
    assert none.left.shape == (N, 3)
    np.testing.assert_array_equal(dense(none), np.zeros((N, N)))
    np.testing.assert_array_equal(dense(of_rank(none, 2)), np.zeros((N, N)))


@pytest.mark.parametrize("first_is_chosen", [True, False])
def test_choose_takes_one_of_two(first_is_chosen):
    first, second = factored(2, seed=1), factored(4, seed=2)
    expected = whole(first if first_is_chosen else second)
    choose = jax.jit(graphs.choose)
    close(dense(choose(first_is_chosen, first, second)), expected)
    as_arrays = choose(first_is_chosen, dense(first), dense(second))
    close(as_arrays, expected)
