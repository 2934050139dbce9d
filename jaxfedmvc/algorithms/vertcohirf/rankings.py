"""Phase 2: each agent ranks the members of every cluster; the least rank sum is the medoid.

Pure functions over c active samples: `codes` int32 [c] are their clusters 0.., -1 for places that
are not in use; `candidates` bool [c] the members that are ranked; `active` int32 [c] the ids.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc.algorithms.shared.cells import exact_segment_sum, segment_sizes
from jaxfedmvc.algorithms.vertcohirf.hierarchy import NEVER
from jaxfedmvc.algorithms.vertcohirf.settings import Similarity

# Scores are compared in steps of this share of the greatest possible score, so that hardly any two
# that differ by rounding only are told apart. (Two members of a cluster never are.)
_STEPS = 2**20


def draw_candidates(
    key: Array, codes: Array, active: Array, n_candidates: ArrayLike | None
) -> Array:
    """Returns the members of each cluster that are ranked: all, or N_s of them drawn at random.

    Args:
      key: A key that all agents share.
      codes: int32 [c]; -1 for rows not in use.
      active: int32 [c], ids; a member's draw derives from its id.
      n_candidates: N_s, or None for all.

    Returns:
      bool [c].
    """
    where = codes >= 0
    if n_candidates is None:
        return where
    draws = jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i)))(active)
    position = jnp.arange(len(codes), dtype=jnp.int32)
    sort_codes = jnp.where(where, codes, len(codes))
    ordered, _, places = lax.sort((sort_codes, draws, position), num_keys=3)
    first = jnp.searchsorted(ordered, ordered, side="left")
    return where & jnp.zeros_like(where).at[places].set(position - first < n_candidates)


def centrality(x: Array, codes: Array, candidates: Array, similarity: Similarity) -> Array:
    """Returns how central each candidate is: its mean similarity to the candidates of its cluster.

    score(j) = sum_i s(x_i, x_j) / size over the candidates i of j's cluster, itself included; zero
    vectors have cosine 0. Summed cosines are the product of x_j / |x_j| with one sum of unit
    vectors for each cluster, so that no pair is ever formed.

    Args:
      x: The agent's active rows [c, p], all features.
      codes: int32 [c].
      candidates: bool [c].
      similarity: Which one.

    Returns:
      float32 [c], zero outside `candidates`.
    """
    cells = jnp.where(candidates, codes, len(codes))
    sizes = segment_sizes(codes, candidates)[cells.clip(max=len(codes) - 1)]
    if similarity != "cosine":
        total = _kernel_sums(x, cells, candidates, similarity)
        return jnp.where(candidates, total / jnp.maximum(sizes, 1), 0.0)
    norm = jnp.linalg.norm(x, axis=1, keepdims=True)
    unit = jnp.where(candidates[:, None], x / jnp.where(norm > 0, norm, 1.0), 0.0)
    sums = exact_segment_sum(unit, cells, len(codes)).at[cells].get(mode="fill", fill_value=0.0)
    total = jnp.sum(unit * sums, axis=1)
    # Two members have the same cosine, and rounding must not tell them apart: it is computed from
    # |x_1 + x_2|^2, which is the same number for both.
    nonzero = (norm[:, 0] > 0) & candidates
    ones = segment_sizes(codes, nonzero)[cells.clip(max=len(codes) - 1)]
    of_pair = nonzero + (jnp.sum(jnp.square(sums), axis=1) - ones) / 2
    total = jnp.where(sizes == 2, of_pair, total)
    return jnp.where(candidates, total / jnp.maximum(sizes, 1), 0.0)


def ranked_ids(scores: Array, codes: Array, candidates: Array, active: Array) -> Array:
    """Returns the message of the second exchange: for each cluster its candidates' ids, best first.

    Args:
      scores: float32 [c] within [-1, 1]; scores that are equal but for rounding rank by position.
      codes: int32 [c].
      candidates: bool [c].
      active: int32 [c], ids.

    Returns:
      int32 [c], the lists of clusters 0, 1, .. one after another; -1 past the end. Where a list
      ends follows from the codes, which all agents know.
    """
    cells = jnp.where(candidates, codes, len(codes))
    steps = -jnp.round(scores * _STEPS).astype(jnp.int32)
    position = jnp.arange(len(codes), dtype=jnp.int32)
    *_, places = lax.sort((cells, steps, position), num_keys=3)
    return jnp.where(position < jnp.sum(candidates), active[places], -1)


def rank_sum(rankings: Array, codes: Array, candidates: Array, active: Array) -> Array:
    """Returns S(m) = sum_a rank_a(m), with rank 0 the best (section 2.2, phase 2).

    Args:
      rankings: int32 [agents, c] as `ranked_ids` gives.
      codes: int32 [c].
      candidates: bool [c].
      active: int32 [c], ids.

    Returns:
      int32 [c]. A candidate that an agent does not list has the rank behind its last.
    """
    c = len(codes)
    sizes = segment_sizes(codes, candidates)
    starts = jnp.cumsum(sizes) - sizes
    order = jnp.argsort(jnp.where(active >= 0, active, NEVER))
    ordered = jnp.where(active >= 0, active, NEVER)[order]

    def ranks(listed: Array) -> Array:
        place = jnp.searchsorted(ordered, listed).clip(max=c - 1)
        known = (listed >= 0) & (ordered[place] == listed)
        place = jnp.where(known, order[place], c)
        # Of an id that is listed twice the better place counts, whatever the order of writing.
        index = jnp.full(c, c, jnp.int32).at[place].min(jnp.arange(c, dtype=jnp.int32), mode="drop")
        return jnp.clip(index - starts[codes], 0, sizes[codes])

    return jnp.sum(jax.vmap(ranks)(rankings), axis=0)


def least_rank_sum(total: Array, codes: Array, candidates: Array, active: Array) -> Array:
    """Returns the id of the candidate of least S in each cluster, the first of equals.

    ChooseMedByScore of the paper.

    Returns:
      int32 [c]: entry k is the medoid of cluster k; -1 past the last cluster.
    """
    c = len(codes)
    cells = jnp.where(candidates, codes, c)
    least = jax.ops.segment_min(total, cells, c)
    best = candidates & (total == least[codes])
    position = jnp.arange(c, dtype=jnp.int32)
    first = jax.ops.segment_min(jnp.where(best, position, c), cells, c)
    return active.at[first].get(mode="fill", fill_value=-1)


def _kernel_sums(x: Array, cells: Array, candidates: Array, similarity: Similarity) -> Array:
    """Returns sums of kernel values of each candidate with its cluster's, [c]; O(c^2) memory."""
    p = x.shape[1]
    together = (cells[:, None] == cells[None]) & candidates[:, None] & candidates[None]
    if similarity == "laplacian":
        kernel = jnp.exp(-lax.map(lambda row: jnp.sum(jnp.abs(x - row[None]), axis=1), x) / p)
    else:
        squared = lax.map(lambda row: jnp.sum(jnp.square(x - row[None]), axis=1), x)
        if similarity == "rbf":
            kernel = jnp.exp(-squared / p)
        else:
            distance = jnp.sqrt(squared)
            median = _median_within(distance, together, cells)[:, None]
            kernel = jnp.exp(-distance / (2 * jnp.where(median > 0, median, 1.0)))
    return jnp.sum(jnp.where(together, kernel, 0.0), axis=1)


def _median_within(distance: Array, together: Array, cells: Array) -> Array:
    """Returns the median [c] of the distances in each row's cluster, with the diagonal's zeros."""
    c = len(cells)
    pair_cells = jnp.where(together, jnp.broadcast_to(cells[:, None], (c, c)), c).ravel()
    ordered_cells, ordered = lax.sort((pair_cells, distance.ravel()), num_keys=2)
    start = jnp.searchsorted(ordered_cells, cells, side="left")
    count = jnp.searchsorted(ordered_cells, cells, side="right") - start
    low, high = start + (count - 1) // 2, start + count // 2
    return (ordered[low.clip(0, c * c - 1)] + ordered[high.clip(0, c * c - 1)]) / 2
