"""VertCoHiRF: vertical clustering without a server, by consensus on labels and rankings.

Agents hold the same samples and each its own features. In every round (1) each agent clusters the
active samples on its own features and sends the labels; samples that all agents label alike form a
consensus cluster; (2) each agent ranks the members of every cluster by how central they are to it
and sends the ranking; the member of least rank sum becomes the cluster's medoid. The medoids are
the active samples of the next round, until nothing merges any more. Only integers travel: labels,
and identifiers (rows of the shared sample order) in an order.

Source: "VertCoHiRF: decentralized vertical clustering beyond k-means". Algorithm 1, sections 2.2
and 2.3; the local step is CoHiRF's (Meziani et al., 2025). Every array over samples keeps its
capacity c and says with `n_active` how much of it is in use, so that one program runs all rounds;
`compact` cuts the capacity on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.vertcohirf.consensus import (
    exact_segment_sum,
    relaxed_consensus,
    segment_sizes,
    strict_consensus,
)
from jaxfedmvc.algorithms.vertcohirf.hierarchy import NEVER, labels_at
from jaxfedmvc.clustering.local import LocalMethod
from jaxfedmvc.federation import Cohort, Federation

Similarity = Literal["cosine", "rbf", "laplacian", "rbf_median"]

# Scores are compared in steps of this share of the greatest possible score, so that hardly any two
# that differ by rounding only are told apart. (Two members of a cluster never are.)
_STEPS = 2**20
# Sums of more rows would not fit the fixed point of `exact_segment_sum`.
_MOST_ROWS = 2**20


class LocalStep(NamedTuple):
    """How an agent clusters its active samples: GetClusters of CoHiRF.

    Attributes:
      method: The base clusterer (BCM), closed over its own settings.
      feature_share: q, the share of its features in (0, 1] that a repetition sees, or a number of
        features as a whole number; at least one feature. Traced.
      repetitions: R, the static number of repetitions.
      limit: If given, only the first `limit` repetitions count: a sweep over R is one program.
      threshold: h of the relaxed local consensus; None for the strict one. Traced.
    """

    method: LocalMethod
    feature_share: ArrayLike = 1.0
    repetitions: int = 1
    limit: ArrayLike | None = None
    threshold: ArrayLike | None = None


class VertCoHiRFState(NamedTuple):
    """What every agent knows, for a capacity of c active samples out of n.

    Attributes:
      active: int32 [c], rows of the active samples in the order of their clusters; -1 past the end.
      n_active: Number of active samples, int32.
      codes: int32 [c], consensus cluster of each active sample, after the first exchange.
      n_codes: Number of consensus clusters, int32.
      candidates: bool [c], whom the agents rank: all, or N_s drawn for each cluster.
      parents: int32 [n], the medoid that absorbed each row, itself if none has; -1 for padding.
      absorbed_at: int32 [n], the round (from 0) in which that was; NEVER if none has.
      n_iter: Rounds made, int32.
      done: Whether the last round merged nothing.
      order: int32 [agents], places of the agents' messages in ascending order of client id.
    """

    active: Array
    n_active: Array
    codes: Array
    n_codes: Array
    candidates: Array
    parents: Array
    absorbed_at: Array
    n_iter: Array
    done: Array
    order: Array


def vertcohirf(
    steps: LocalStep | Sequence[LocalStep],
    *,
    n_candidates: ArrayLike | None = None,
    similarity: Similarity = "cosine",
) -> FederatedAlgorithm:
    """The protocol as two exchanges among peers in each round; run it for `max_iter` rounds.

    `engine.run` stops when a round merges nothing and keeps all arrays at full size: it jits and
    vmaps, for sweeps. `engine.run_compacting` shrinks them between rounds, for many samples.

    Args:
      steps: How an agent clusters: one for all, or one for each agent in the order of view ids.
      n_candidates: N_s, the most members of a cluster that are ranked, drawn at random from a key
        that all agents share; None means all. Traced.
      similarity: How central a member is: summed cosine (linear in the members), or a kernel
        ("rbf" exp(-d^2/p), "laplacian" exp(-|.|_1/p), "rbf_median" exp(-d/(2 median d))) that
        takes O(c^2) memory.

    Returns:
      The algorithm. Its labels are positions among the final medoids, in the order of their
      clusters. Its `init` raises ValueError as `Federation.check_vertical` does, where the number
      of steps is not that of agents or one of these holds several views, and beyond 2^20 samples.

    Raises:
      ValueError: A setting is out of range.
    """
    if similarity not in get_args(Similarity):
        raise ValueError(
            f"similarity: got {similarity!r}; allowed are {', '.join(get_args(Similarity))}"
        )
    _check_at_least_one("n_candidates", n_candidates)
    for step in [steps] if isinstance(steps, LocalStep) else steps:
        _check_step(step)

    def init(key: Array, federation: Federation) -> tuple[VertCoHiRFState, tuple[tuple, ...]]:
        federation.check_vertical()
        n_agents = len(federation.cohorts)
        if not isinstance(steps, LocalStep) and len(steps) != n_agents:
            raise ValueError(
                f"steps: got {len(steps)}; allowed is one, or one for each agent, {n_agents}"
            )
        if not isinstance(steps, LocalStep) and any(
            len(cohort.view_ids) > 1 for cohort in federation.cohorts
        ):
            raise ValueError("steps: got one for each agent, which needs agents of one view each")
        mask = federation.cohorts[0].mask[0]
        n = len(mask)
        if n > _MOST_ROWS:
            raise ValueError(f"federation: got {n} samples; allowed are {_MOST_ROWS} or fewer")
        (active,) = jnp.nonzero(mask, size=n, fill_value=-1)
        ids = jnp.concatenate([cohort.client_ids for cohort in federation.cohorts])
        state = VertCoHiRFState(
            active=active.astype(jnp.int32),
            n_active=jnp.sum(mask, dtype=jnp.int32),
            codes=jnp.zeros(n, jnp.int32),
            n_codes=jnp.int32(0),
            candidates=jnp.zeros(n, bool),
            parents=jnp.where(mask, jnp.arange(n, dtype=jnp.int32), -1),
            absorbed_at=jnp.full(n, NEVER, jnp.int32),
            n_iter=jnp.int32(0),
            done=jnp.bool_(False),
            order=jnp.argsort(ids).astype(jnp.int32),
        )
        return state, ((),) * n_agents

    def known(state: VertCoHiRFState, view_ids: tuple[int, ...]) -> VertCoHiRFState:
        return state

    def send_labels(key: Array, state: VertCoHiRFState, _: tuple, client: Cohort) -> Any:
        where = _in_use(state)
        x = _active_rows(client, state)
        step = steps if isinstance(steps, LocalStep) else steps[client.view_ids[0]]
        labels = local_codes(key, x, where, step)
        return (), {"labels": labels}, {}

    def agree_on_clusters(
        key: Array, state: VertCoHiRFState, messages: Any, weights: Any
    ) -> tuple[VertCoHiRFState, dict[str, Array]]:
        labels = jnp.concatenate([m["labels"] for m in messages])[state.order]
        codes, n_codes = strict_consensus(labels, _in_use(state))
        candidates = draw_candidates(key, codes, state.active, n_candidates)
        after = state._replace(codes=codes, n_codes=n_codes, candidates=candidates)
        info = {
            "n_labels": jnp.max(labels, axis=1) + 1,
            "n_active": state.n_active,
            "n_clusters": n_codes,
            "n_listed": jnp.sum(candidates, dtype=jnp.int32),
            "n_longest": jnp.max(segment_sizes(codes, candidates)),
        }
        return after, info

    def send_rankings(key: Array, state: VertCoHiRFState, _: tuple, client: Cohort) -> Any:
        x = _active_rows(client, state)
        scores = centrality(x, state.codes, state.candidates, similarity)
        ranking = ranked_ids(scores, state.codes, state.candidates, state.active)
        return (), {"ranking": ranking}, {}

    def choose_medoids(
        key: Array, state: VertCoHiRFState, messages: Any, weights: Any
    ) -> tuple[VertCoHiRFState, dict[str, Array]]:
        rankings = jnp.concatenate([m["ranking"] for m in messages])
        total = rank_sum(rankings, state.codes, state.candidates, state.active)
        medoids = least_rank_sum(total, state.codes, state.candidates, state.active)
        after = merge(state, medoids)
        # A run that has ended stays as it is, however many rounds are asked for.
        return jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, after), {}

    def assign(state: VertCoHiRFState, _: tuple, client: Cohort) -> Array:
        return labels_at(state.parents, state.absorbed_at, state.active)

    return FederatedAlgorithm(
        init=init,
        setup=(),
        round=(
            Phase(known, send_labels, agree_on_clusters),
            Phase(known, send_rankings, choose_medoids),
        ),
        finish=(),
        assign=assign,
        done=lambda state: state.done,
        compact=compact,
        peers=True,
    )


# Phase 1: structural consensus.


def local_codes(key: Array, x: Array, where: Array, step: LocalStep) -> Array:
    """GetClusters: consensus of R clusterings of random feature subsets, within one agent.

    Args:
      key: Of this agent and round; repetition r draws from `fold_in(key, r)`.
      x: The agent's active rows [c, p].
      where: Which of them are in use, bool [c].
      step: The agent's settings.

    Returns:
      int32 [c], 0.. in lexicographic order of the repetitions' labels; -1 outside `where`. A
      noise point has a label of its own.
    """

    def repetition(r: Array) -> Array:
        subset_key, method_key = jax.random.split(jax.random.fold_in(key, r))
        subset = feature_subset(subset_key, x.shape[1], step.feature_share)
        # Features left out are zero and not cut out: they add nothing to a distance, and the
        # number of features may then be traced.
        return step.method(method_key, jnp.where(subset, x, 0.0), where)

    repetitions = jnp.arange(step.repetitions)
    if step.repetitions == 1:
        labels = repetition(repetitions[0])[None]
    elif step.limit is None:
        labels = jax.vmap(repetition)(repetitions)
    else:  # one after another, and no more than count
        labels = lax.fori_loop(
            0,
            jnp.minimum(step.limit, step.repetitions),
            lambda r, rows: rows.at[r].set(repetition(r)),
            jnp.zeros((step.repetitions, len(x)), jnp.int32),
        )
    position = jnp.arange(x.shape[0], dtype=jnp.int32)
    labels = jnp.where(labels < 0, jnp.max(labels) + 1 + position[None], labels)
    used = jnp.ones(step.repetitions, bool) if step.limit is None else repetitions < step.limit
    if step.threshold is None or step.repetitions == 1:
        return strict_consensus(labels, where, used)[0]
    return relaxed_consensus(labels, where, used, step.threshold)


def feature_subset(key: Array, n_features: int, share: ArrayLike) -> Array:
    """max(1, int(q p)) of p features without replacement, or min(q, p) for a whole number q.

    Returns:
      bool [p].
    """
    share = jnp.asarray(share)
    if jnp.issubdtype(share.dtype, jnp.integer):
        n = jnp.minimum(share, n_features)
    else:
        # In float32 a product may fall just short: 0.29 of 100 is meant as 29.
        n = jnp.floor(share * n_features + 1e-4).astype(jnp.int32)
    return jax.random.permutation(key, n_features) < jnp.maximum(n, 1)


def draw_candidates(
    key: Array, codes: Array, active: Array, n_candidates: ArrayLike | None
) -> Array:
    """The N_s members of each cluster that are ranked: all, or as many drawn at random.

    Args:
      key: One that all agents share.
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


# Phase 2: representative consensus.


def centrality(x: Array, codes: Array, candidates: Array, similarity: Similarity) -> Array:
    """How central each candidate is to its cluster: mean similarity to the candidates of it.

    score(j) = sum_i s(x_i, x_j) / size over the candidates i of j's cluster, itself included; zero
    vectors have cosine 0. Summed cosines are the product of x_j / |x_j| with one sum of unit
    vectors for each cluster, so that no pair is ever looked at.

    Args:
      x: The agent's active rows [c, p], all features.
      codes: int32 [c].
      candidates: bool [c].
      similarity: Of `Similarity`.

    Returns:
      float32 [c], zero for others than candidates.
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
    # Two members have the same cosine, which rounding must not tear: from |x_1 + x_2|^2, of both.
    nonzero = (norm[:, 0] > 0) & candidates
    ones = segment_sizes(codes, nonzero)[cells.clip(max=len(codes) - 1)]
    of_pair = nonzero + (jnp.sum(jnp.square(sums), axis=1) - ones) / 2
    total = jnp.where(sizes == 2, of_pair, total)
    return jnp.where(candidates, total / jnp.maximum(sizes, 1), 0.0)


def ranked_ids(scores: Array, codes: Array, candidates: Array, active: Array) -> Array:
    """The message of the second exchange: for each cluster its candidates' ids, best first.

    Args:
      scores: float32 [c] within [-1, 1]; scores that are equal but for rounding rank by position.
      codes: int32 [c].
      candidates: bool [c].
      active: int32 [c], ids.

    Returns:
      int32 [c], the lists of clusters 0, 1, .. one after another; -1 past the end. Where a list
      ends follows from the codes, which everybody knows.
    """
    cells = jnp.where(candidates, codes, len(codes))
    steps = -jnp.round(scores * _STEPS).astype(jnp.int32)
    position = jnp.arange(len(codes), dtype=jnp.int32)
    *_, places = lax.sort((cells, steps, position), num_keys=3)
    return jnp.where(position < jnp.sum(candidates), active[places], -1)


def rank_sum(rankings: Array, codes: Array, candidates: Array, active: Array) -> Array:
    """S(m) = sum_a rank_a(m), with rank 0 the best (section 2.2, phase 2).

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
    """ChooseMedByScore: id of the candidate of least S in each cluster, the first of equals.

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


def merge(state: VertCoHiRFState, medoids: Array) -> VertCoHiRFState:
    """UpdateParents, and the medoids as the active samples of the next round, in code order.

    Args:
      state: With the codes of this round.
      medoids: int32 [c] as `least_rank_sum` gives.
    """
    c, n = len(state.active), len(state.parents)
    where = _in_use(state)
    parent = medoids[state.codes]
    rows = jnp.where(where, state.active, n)
    absorbed = jnp.where(where & (parent != state.active), state.active, n)
    return state._replace(
        active=jnp.where(jnp.arange(c) < state.n_codes, medoids, -1),
        n_active=state.n_codes,
        parents=state.parents.at[rows].set(parent, mode="drop"),
        absorbed_at=state.absorbed_at.at[absorbed].set(state.n_iter, mode="drop"),
        n_iter=state.n_iter + 1,
        done=state.n_codes == state.n_active,
    )


def compact(state: VertCoHiRFState) -> VertCoHiRFState:
    """The same state with the capacity cut to the next power of four that holds what is active.

    Few sizes, so that few programs are compiled; on the host, as it reads `n_active`.
    """
    capacity = 16
    while capacity < int(state.n_active):
        capacity *= 4
    return state._replace(
        active=state.active[:capacity],
        codes=state.codes[:capacity],
        candidates=state.candidates[:capacity],
    )


# After the run.


def medoid_rankings(x: ArrayLike, medoids: ArrayLike) -> Array:
    """What an agent sends of new samples: positions of the medoids, nearest first.

    Args:
      x: The agent's features of the new samples [r, p].
      medoids: Its features of the final medoids [m, p], in the order of their clusters.

    Returns:
      int32 [r, m].
    """
    x, medoids = jnp.asarray(x, jnp.float32), jnp.asarray(medoids, jnp.float32)
    if x.ndim != 2 or medoids.ndim != 2 or x.shape[1] != medoids.shape[1]:
        raise ValueError(
            f"x: got {x.shape} beside medoids {medoids.shape}; allowed are [r, p] and [m, p]"
        )
    distance = jnp.sum(jnp.square(x[:, None] - medoids[None]), axis=2)
    return jnp.argsort(distance, axis=1, stable=True).astype(jnp.int32)


def predict(rankings: ArrayLike, rule: Literal["strict", "ranked"] = "strict") -> Array:
    """Clusters of new samples by the consensus of the agents' nearest medoids.

    Args:
      rankings: int32 [agents, r, m] as `medoid_rankings` gives.
      rule: "strict", the rule of the first exchange: a sample joins the cluster whose medoid is
        nearest to it for all agents, and is -1 where they differ. "ranked", the rule of the second:
        the medoid of least rank sum, the first of equals; every sample joins one.

    Returns:
      int32 [r].

    Raises:
      ValueError: Unknown rule, wrong shape.
    """
    rankings = jnp.asarray(rankings, jnp.int32)
    if rankings.ndim != 3:
        raise ValueError(f"rankings: got shape {rankings.shape}; allowed is [agents, r, m]")
    if rule == "strict":
        nearest = rankings[:, :, 0]
        return jnp.where(jnp.all(nearest == nearest[:1], axis=0), nearest[0], -1)
    if rule == "ranked":
        return jnp.argmin(jnp.sum(jnp.argsort(rankings, axis=2), axis=0), axis=1).astype(jnp.int32)
    raise ValueError(f"rule: got {rule!r}; allowed are 'strict' and 'ranked'")


def _active_rows(client: Cohort, state: VertCoHiRFState) -> Array:
    """The agent's features [c, p] of the active samples; zeros past the end."""
    x = jnp.concatenate(client.views, axis=-1)
    return x.at[jnp.where(state.active >= 0, state.active, len(x))].get(mode="fill", fill_value=0.0)


def _in_use(state: VertCoHiRFState) -> Array:
    return jnp.arange(len(state.active)) < state.n_active


class RoundBits(NamedTuple):
    """Communication of one round among all agents.

    Attributes:
      labels: Bits of the labels, A.1.1: (A - 1) n_active ceil(log2 C_a), summed over agents.
      rankings: Bits of the lists of ids, A.1.2, with every list at its true length.
      bound: The bound of proposition 3.1.
      int32_bytes: Bytes of the same messages as int32, padding not sent.
    """

    labels: int
    rankings: int
    bound: int
    int32_bytes: int


def communication(
    n_samples: int,
    n_labels: Sequence[int],
    n_active: int,
    n_clusters: int,
    n_listed: int,
    n_longest: int,
) -> RoundBits:
    """Bits of one round, and the bound of proposition 3.1.

    Args:
      n_samples: n, all samples.
      n_labels: C_a of each agent.
      n_active: Active samples before the round.
      n_clusters: Consensus clusters.
      n_listed: Candidates of all clusters.
      n_longest: Candidates of the cluster that has most: N_s of the proposition.
    """
    agents = len(n_labels)
    links = agents * (agents - 1)
    id_bits = _ceil_log2(n_samples)
    return RoundBits(
        labels=(agents - 1) * n_active * sum(_ceil_log2(c) for c in n_labels),
        rankings=links * n_listed * id_bits,
        bound=links * (n_active * _ceil_log2(max(n_labels)) + n_clusters * n_longest * id_bits),
        int32_bytes=4 * links * (n_active + n_listed),
    )


def _ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


def _kernel_sums(x: Array, cells: Array, candidates: Array, similarity: Similarity) -> Array:
    """Summed kernel values of each candidate with those of its cluster, [c]; O(c^2) memory."""
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
    """Median [c] of all distances within each row's cluster, with the zeros of the diagonal."""
    c = len(cells)
    pair_cells = jnp.where(together, jnp.broadcast_to(cells[:, None], (c, c)), c).ravel()
    ordered_cells, ordered = lax.sort((pair_cells, distance.ravel()), num_keys=2)
    start = jnp.searchsorted(ordered_cells, cells, side="left")
    count = jnp.searchsorted(ordered_cells, cells, side="right") - start
    low, high = start + (count - 1) // 2, start + count // 2
    return (ordered[low.clip(0, c * c - 1)] + ordered[high.clip(0, c * c - 1)]) / 2


def _check_step(step: LocalStep) -> None:
    if step.repetitions < 1:
        raise ValueError(f"repetitions: got {step.repetitions}; allowed is 1 or more")
    _check_at_least_one("limit", step.limit)
    share = step.feature_share
    if not isinstance(share, jax.core.Tracer):
        whole = np.issubdtype(np.asarray(share).dtype, np.integer)
        if not np.all(np.asarray(share) > 0) or (not whole and not np.all(np.asarray(share) <= 1)):
            raise ValueError(
                f"feature_share: got {share}; allowed is a share in (0, 1], or a whole number of"
                " features, 1 or more"
            )
    threshold = step.threshold
    if threshold is not None and not isinstance(threshold, jax.core.Tracer):
        if not np.all(np.abs(np.asarray(threshold)) <= 1):
            raise ValueError(f"threshold: got {threshold}; allowed is a Rand index, -1 to 1")


def _check_at_least_one(name: str, value: ArrayLike | None) -> None:
    if value is None or isinstance(value, jax.core.Tracer):
        return
    if not np.all(np.asarray(value) >= 1):
        raise ValueError(f"{name}: got {value}; allowed is 1 or more")
