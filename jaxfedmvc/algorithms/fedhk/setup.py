"""The exchanges of FedHK before the rounds: scales of the views, where to start, which views."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfedmvc import keys
from jaxfedmvc.algorithm import Phase, keep, send_nothing
from jaxfedmvc.algorithms.fedhk.client import standardised
from jaxfedmvc.algorithms.fedhk.model import (
    ClientState,
    Codec,
    PyTree,
    ServerState,
    by_view,
    split_by_view,
    widths,
)
from jaxfedmvc.algorithms.fedhk.settings import FedHKConfig, FedHKHyperparams
from jaxfedmvc.clustering import kmeans, predict
from jaxfedmvc.clustering.kmeans import means_of
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.metrics.contingency import ari_from_contingency, contingency
from jaxfedmvc.metrics.views import LEAST_VIEWS, agreeing, mean_agreement, pairs

# Name of the exchange of summaries, the one that is no sum, as `secure_aggregation` takes it. With
# hkc="minmax" the ranges, which are none either, come before it, and it is "setup[3]".
SUMMARIES = "setup[2]"
# A summary stands for so many samples on average, and at least.
_SAMPLES_OF_A_SUMMARY = 5
_LEAST_OF_A_SUMMARY = 2
# k-means++ starts over the summaries, over all restarts.
_N_INIT = 10
# With fewer rows for each cluster than the first, as many restarts as the second.
_FEW, _STARTS_OF_FEW = 150, 10


def setup_phases(config: FedHKConfig, hyper: FedHKHyperparams, codec: Codec) -> tuple[Phase, ...]:
    """Returns the exchanges before the rounds."""
    ranges = (_ranges(),) if config.hkc == "minmax" else ()
    choice = (_choice(config, hyper),) if config.chooses_views else ()
    basis = (_basis(),) if codec.shares_basis else ()
    summaries = _summaries(config, codec, hyper.limit)
    return (_means(), _variances(), *ranges, summaries, *choice, *basis)


def warn_of_few_summaries(
    config: FedHKConfig, limit: Array | int | None, federation: Federation
) -> None:
    """Warns where clients send fewer summaries than clusters; nothing is looked at while tracing.

    K-means over them then starts clusters at the same place.

    Raises:
      ValueError: They send none.
    """
    if federation.is_traced or isinstance(limit, jax.core.Tracer):
        return
    masks = [c.mask for c in federation.cohorts if federation.holds_all_views(c)]
    wanted = config.n_clusters if limit is None else min(config.n_clusters, int(limit))
    rows = np.concatenate([np.asarray(mask).sum(axis=1) for mask in masks])
    least, average = _sizes(config)
    each = np.clip(rows // average, 1, 2 * config.n_clusters)
    n = int(each[rows >= least].sum())
    if n == 0 and wanted > 1:  # a single centre starts at the mean, whatever was sent
        raise ValueError(
            f"federation: all clients with all views have fewer than {least} samples, so that none"
            f" sends a summary to start from; allowed is one with {least} or more"
        )
    if n < wanted and wanted > 1:
        warnings.warn(
            f"n_clusters: got {wanted}, and the clients with all views send {n} summaries to start"
            f" from, one for every {average} samples of a client: fewer clusters may be found",
            stacklevel=2,
        )


def n_starts(config: FedHKConfig, federation: Federation) -> int:
    """Returns the number of starts: a shape, so that rows are counted with their padding.

    Masks tell nothing while a run is traced, as most are, and a run outside of `jit` has to make as
    many starts as one inside.

    Over the summaries of few rows k-means finds poor starts, however often it is tried; which one
    is good, the objective of all samples tells after the rounds.
    """
    if config.n_restarts is not None:
        return config.n_restarts
    if config.min_cluster_size is not None:
        return 1
    n = sum(c.mask.size for c in federation.cohorts if federation.holds_all_views(c))
    return _STARTS_OF_FEW if n < _FEW * config.n_clusters else 1


def _sizes(config: FedHKConfig) -> tuple[int, int]:
    """Returns how many samples a summary stands for at least and on average."""
    guard = config.min_cluster_size or 0
    return max(guard, _LEAST_OF_A_SUMMARY), max(2 * guard, _SAMPLES_OF_A_SUMMARY)


def _means() -> Phase:
    """Sums the features: the mean of all samples is the origin of everything after."""

    def client(key: Array, sent: tuple, state: ClientState, client: Cohort) -> tuple:
        where = client.mask[:, None]
        sums = {v: jnp.sum(x, axis=0, where=where) for v, x in client.by_view().items()}
        return state, (sums, jnp.sum(client.mask).astype(jnp.float32)), {}

    def server(key: Array, state: ServerState, messages: tuple, weights: tuple) -> tuple:
        totals = by_view([sums for sums, _ in messages])
        counts = by_view([dict.fromkeys(sums, n) for sums, n in messages])
        scales = {
            v: state.scales[v]._replace(origin=totals[v] / jnp.maximum(counts[v], 1.0))
            for v in totals
        }
        return state._replace(counts=counts, scales=scales), {}

    return Phase(send_nothing, client, server, reduce="sum")


def _variances() -> Phase:
    """Sums the squares about the mean, one number for each view."""

    def broadcast(state: ServerState, view_ids: tuple[int, ...]) -> dict[int, Array]:
        return {v: state.scales[v].origin for v in view_ids}

    def client(key: Array, sent: dict, state: ClientState, client: Cohort) -> tuple:
        scales = {v: state.scales[v]._replace(origin=sent[v]) for v in sent}
        where = client.mask[:, None]
        squares = {
            v: jnp.sum(jnp.square(x - sent[v][None]), where=where)
            for v, x in client.by_view().items()
        }
        return dataclasses.replace(state, scales=scales), squares, {}

    def server(key: Array, state: ServerState, messages: tuple, weights: tuple) -> tuple:
        squares = by_view(messages)
        scales = {
            v: state.scales[v]._replace(variance=squares[v] / jnp.maximum(state.counts[v], 1.0))
            for v in squares
        }
        return state._replace(scales=scales), {}

    return Phase(broadcast, client, server, reduce="sum")


def _ranges() -> Phase:
    """Collects the least and greatest values about the origin, for (23)."""

    def client(key: Array, sent: tuple, state: ClientState, client: Cohort) -> tuple:
        where = client.mask[:, None]
        ranges = {}
        for v, x in client.by_view().items():
            x = x - state.scales[v].origin[None]
            low = jnp.min(x, axis=0, where=where, initial=jnp.inf)
            ranges[v] = low, jnp.max(x, axis=0, where=where, initial=-jnp.inf)
        return state, ranges, {}

    def server(key: Array, state: ServerState, messages: tuple, weights: tuple) -> tuple:
        scales = dict(state.scales)
        for part, weight in zip(messages, weights, strict=True):
            where = (weight > 0)[:, None]
            for v, (low, high) in part.items():
                scales[v] = scales[v]._replace(
                    low=jnp.minimum(
                        scales[v].low, jnp.min(low, axis=0, where=where, initial=jnp.inf)
                    ),
                    high=jnp.maximum(
                        scales[v].high, jnp.max(high, axis=0, where=where, initial=-jnp.inf)
                    ),
                )
        return state._replace(scales=scales), {}

    return Phase(send_nothing, client, server)


def _summaries(config: FedHKConfig, codec: Codec, in_use: Array | int | None) -> Phase:
    """Finds where to start, by k-means over the clients' own centres weighted by their counts.

    The paper runs k-means on pooled samples, view by view, whose clusters of different views do not
    belong together.
    """

    def broadcast(state: ServerState, view_ids: tuple[int, ...]) -> tuple[dict, dict]:
        scales = {v: state.scales[v] for v in view_ids}
        variances = {v: scale.variance for v, scale in scales.items()}
        return variances, {v: (scale.low, scale.high) for v, scale in scales.items()}

    def client(key: Array, sent: tuple[dict, dict], state: ClientState, client: Cohort) -> tuple:
        variances, ranges = sent
        scales = {
            v: scale._replace(variance=variances[v], low=ranges[v][0], high=ranges[v][1])
            for v, scale in state.scales.items()
        }
        state = dataclasses.replace(state, scales=scales)
        if not state.holds_all:
            return state, (), {}
        return state, _summarised(key, standardised(scales, client), client.mask, config), {}

    def server(key: Array, state: ServerState, messages: tuple, weights: tuple) -> tuple:
        (message, weight), *_ = [
            (m, w) for m, w in zip(messages, weights, strict=True) if jax.tree.leaves(m)
        ]
        rows, counts = message
        counts = (counts * weight[:, None]).ravel()
        rows, counts = _in_order(rows.reshape(-1, rows.shape[2]), counts)
        (n_restarts,) = state.models.log_objective.shape
        deviations = {v: jnp.sqrt(scale.variance) for v, scale in state.scales.items()}
        of_views = widths(state.scales)

        def in_units(rows: Array) -> dict[int, Array]:
            """Returns rows [..., D] by view, in the features' units again."""
            return {v: x * deviations[v] for v, x in split_by_view(rows, of_views).items()}

        def clusters(key_and_features: tuple[Array, Array]) -> Array:
            key, seen = key_and_features
            found = kmeans(
                key,
                rows * seen[None],
                config.n_clusters,
                weights=counts,
                n_init=max(1, _N_INIT // n_restarts),
                limit=in_use,
            )
            return found.centroids

        # Every start sees all features. Each view is clustered by its own alone, as many times.
        starts = jax.random.split(key, n_restarts)
        seen = jnp.ones((n_restarts, rows.shape[1]))
        if state.of_views:
            tries = len(of_views) * n_restarts
            more = jax.random.split(jax.random.fold_in(key, keys.VIEWS), tries)
            starts = jnp.concatenate([starts, more])
            owner = np.repeat(np.arange(len(of_views)), list(of_views.values()))
            of_try = np.repeat(np.arange(len(of_views)), n_restarts)
            seen = jnp.concatenate([seen, owner[None] == of_try[:, None]])
        # One after another: one program does for all.
        found = jax.lax.map(clusters, (starts, seen))
        found = found.reshape(-1, n_restarts, *found.shape[1:])
        basis, fits = codec.start(in_units(rows), counts, in_units(found[0]))
        own = {v: in_units(found[1 + i])[v] for i, v in enumerate(state.of_views)}
        models = state.models._replace(fit=fits)
        return state._replace(basis=basis, models=models, of_views=own), {}

    return Phase(broadcast, client, server)


def _summarised(key: Array, rows: Array, where: Array, config: FedHKConfig) -> tuple[Array, Array]:
    """Computes a client's summaries: the centres and sizes of small clusters of its samples.

    At most 2c clusters, of five samples on average; those of a single sample are left out: two is
    the least, unless `min_cluster_size` says more, and then clusters have twice that on average.
    What is sent so still tells of few samples each, and is no sum over clients: `private` starts
    without it.

    The sum of a client's rows was sent before, and less the summaries it is the sum of those left
    out, which may be one. With `min_cluster_size` they are as many as it says, or none.

    Args:
      key: PRNG key.
      rows: All views, `client.standardised`, [n, D].
      where: Rows that are not padding, bool [n].
      config: Of the method.

    Returns:
      Centres [2c, D] and numbers of samples [2c], zero for clusters that are left out.
    """
    n_summaries = 2 * config.n_clusters
    least, average = _sizes(config)
    # One start does: twice as many clusters as are wanted need not be the best ones.
    limit = jnp.sum(where) // average
    labels = kmeans(key, rows, n_summaries, where=where, n_init=1, limit=limit).labels
    means, counts = means_of(rows, labels, n_summaries)
    if config.min_cluster_size is not None:
        means, counts = means_of(rows, _none_left_alone(labels, counts, least), n_summaries)
    kept = counts >= least
    return jnp.where(kept[:, None], means, 0.0), counts * kept


def _none_left_alone(labels: Array, counts: Array, least: int) -> Array:
    """Joins small clusters to the smallest of the others where they are of too few rows together.

    They would be left out, and their sum is that of all rows, which is known, less what is sent.

    Args:
      labels: Cluster of each row, int32 [n], -1 for none.
      counts: Rows of each cluster, [clusters].
      least: Rows of a cluster that is sent.
    """
    is_small = counts < least
    n_small = jnp.sum(counts, where=is_small)
    smallest = jnp.argmin(jnp.where(is_small, jnp.inf, counts)).astype(labels.dtype)
    joins = is_small[labels] & (labels >= 0) & (n_small < least)
    return jnp.where(joins, smallest, labels)


def may_leave_out(config: FedHKConfig, n_views: int) -> bool:
    """Returns whether views are chosen, of so many."""
    return config.chooses_views and n_views >= LEAST_VIEWS


def _choice(config: FedHKConfig, hyper: FedHKHyperparams) -> Phase:
    """Leaves out views whose own clusters agree with no other view's.

    A view that is noise counts as much as any other, and costs more than it could give. Clients
    with all views put their samples into the clusters that the server found in each view of the
    summaries, and count for each pair of views how many samples are in which two. These counts add
    up; the adjusted Rand index of a pair's is 0 where the views have nothing in common, give or
    take chance, which is why it is the mean over as many clusterings as there are starts.
    """

    def broadcast(state: ServerState, view_ids: tuple[int, ...]) -> dict[int, Array]:
        return state.of_views if len(view_ids) == len(state.of_views) else {}

    def client(key: Array, sent: dict[int, Array], state: ClientState, client: Cohort) -> tuple:
        if not sent:
            return state, (), {}
        size = config.n_clusters

        def counts(own: dict[int, Array]) -> Array:
            """Counts, for one clustering of each view, the samples of every pair of clusters."""
            labels = jnp.stack(
                [
                    predict(x - state.scales[v].origin[None], own[v], limit=hyper.limit)
                    for v, x in client.by_view().items()
                ]
            )

            def pair(one: Array, other: Array) -> Array:
                return contingency(labels[one], labels[other], size, size, client.mask)

            return jax.vmap(pair)(*pairs(len(labels)))

        return state, jax.vmap(counts)(sent), {}

    def server(key: Array, state: ServerState, messages: tuple, weights: tuple) -> tuple:
        tables = [message for message in messages if jax.tree.leaves(message)]
        if not tables:
            return state, {}
        of_pairs = jax.vmap(jax.vmap(ari_from_contingency))(sum(tables[1:], start=tables[0]))
        agreement = mean_agreement(jnp.mean(of_pairs, axis=0), len(state.of_views))
        kept = agreeing(agreement, hyper.least_agreement)
        weight = jnp.broadcast_to(kept / jnp.sum(kept), state.models.view_weights.shape)
        models = state.models._replace(view_weights=weight)
        return state._replace(models=models), {"agreement": agreement, "kept": kept}

    return Phase(broadcast, client, server, reduce="sum")


def _in_order(rows: Array, counts: Array) -> tuple[Array, Array]:
    """Sorts rows by their content: the order in which the clients came then makes no difference."""
    order = jnp.lexsort((jnp.sum(rows, axis=1), counts))
    return rows[order], counts[order]


def _basis() -> Phase:
    """Sends once what clients need to read and to write compressed centres."""

    def client(key: Array, sent: PyTree, state: ClientState, client: Cohort) -> tuple:
        return dataclasses.replace(state, basis=sent), (), {}

    return Phase(lambda state, view_ids: state.basis, client, keep)
