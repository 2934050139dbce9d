"""CoresetKMeans: k-means on features that lie with several agents, by a weighted sample of rows.

THIS IS NO PRIVACY: every agent sends the raw values of all of its features for every drawn sample,
and the server puts them together.

Agents hold the same samples and each its own features. Each agent clusters its features and sends
how much every sample matters to its own clustering, its sensitivity. The server draws samples in
proportion to their summed sensitivities, collects their rows from the agents, clusters them with
weights, and sends each agent its own columns of the centroids. The agent labels its samples by the
nearest of them on its own features: one partition for each agent.

Sources: Huang, Li, Sun & Zhao, "Coresets for vertical federated learning", NeurIPS 2022, for the
protocol; Bachem, Lucic & Krause, "Practical coreset constructions for machine learning", 2017, for
the sensitivities of k-means. As in published comparisons rows are drawn without replacement.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc import checks
from jaxfedmvc.algorithm import (
    FederatedAlgorithm,
    Phase,
    answer_nothing,
    by_agent,
    keep,
    send_nothing,
)
from jaxfedmvc.algorithms.shared.agents import n_features
from jaxfedmvc.clustering import kmeans, predict
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.precision import matmul


@dataclasses.dataclass(frozen=True)
class CoresetKMeansConfig:
    """Static settings of CoresetKMeans.

    Attributes:
      n_clusters: Number of clusters k, of every agent and of the server.
      n_coreset: Number of rows that are drawn and sent; none: a tenth of the samples, rounded down,
        one at least.
      n_init: Starts of every k-means, of which the best is kept.
    """

    n_clusters: int
    n_coreset: int | None = None
    n_init: int = 10

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
          ValueError: Names the setting that is wrong.
        """
        checks.at_least(self, 1, "n_clusters", "n_coreset", "n_init")


@struct.dataclass
class CoresetKMeansHyperparams:
    """Numbers of CoresetKMeans that may be traced.

    Attributes:
      alpha: Weight of distances against sizes of clusters in the sensitivities, 0 or more.
      limit: Number of clusters in use, at most n_clusters and at most the rows drawn, so that one
        program serves a search over the number of clusters; messages keep their size for
        n_clusters; none: all.
    """

    alpha: Array | float = 2.0
    limit: Array | int | None = None


class CoresetState(NamedTuple):
    """State of the server, for a coreset of up to m rows and k clusters.

    Attributes:
      n_drawn: Number of rows of the coreset, int32.
      rows: int32 [m], the drawn rows of the order that all agents share; -1 past the last.
      weights: Their weights, float32 [m], which sum to 1; zero past the last.
      centroids: For each agent, by its view ids, its columns of the centroids, float32 [k, p_a].
      n_centroids: Number of centroids in use, int32; those past the last mean nothing.
    """

    n_drawn: Array
    rows: Array
    weights: Array
    centroids: dict[tuple[int, ...], Array]
    n_centroids: Array


def coreset_kmeans(
    config: CoresetKMeansConfig, hyperparams: CoresetKMeansHyperparams | None = None
) -> FederatedAlgorithm:
    """Returns weighted k-means at the server on raw rows drawn by sensitivity. This is no privacy.

    The exchanges are made in `setup`; a round does nothing, so run it for 0 rounds. Cluster numbers
    mean the same for all agents, but a sample may be nearest to different ones on their features.

    Raises:
      ValueError: A hyper-parameter is out of range. From `init`: as `Federation.check_vertical`,
        or an agent has fewer samples than clusters or than `n_coreset`.
    """
    hyper = checks.settings(config, CoresetKMeansConfig, hyperparams, CoresetKMeansHyperparams)
    rules = {"alpha": checks.NOT_NEGATIVE, "limit": checks.up_to(config.n_clusters)}
    checks.numbers(hyper, rules)
    return FederatedAlgorithm(
        init=partial(_init, config, hyper),
        setup=(_draw(config, hyper), _collect(config, hyper)),
        round=(),
        finish=(Phase(_own_columns, answer_nothing, keep),),
        assign=_assign,
    )


def _warn_of_few_rows(config: CoresetKMeansConfig, mask: Any) -> None:
    """Warns where fewer rows are drawn than there are clusters; not while tracing."""
    if isinstance(mask, jax.core.Tracer):
        return
    n, n_clusters = int(np.asarray(mask)[0].sum()), config.n_clusters
    n_drawn = max(n // 10, 1) if config.n_coreset is None else min(config.n_coreset, n)
    if n_drawn < n_clusters:
        warnings.warn(
            f"n_coreset: {n_drawn} rows are drawn, a centroid each, so that no more than {n_drawn}"
            f" of {n_clusters} clusters are found",
            stacklevel=3,
        )


def _init(
    config: CoresetKMeansConfig,
    hyper: CoresetKMeansHyperparams,
    key: Array,
    federation: Federation,
) -> tuple[CoresetState, tuple[tuple, ...]]:
    """Returns the state before anything was sent.

    With `n_coreset` None there is room for a tenth of all rows with padding; what lies beyond a
    tenth of the samples is sent as zeros and has no weight.
    """
    federation.check_vertical()
    federation.check_rows(config.n_clusters, "as many as clusters, for k-means to start from")
    federation.check_rows(config.n_coreset or 1, "as many as the coreset draws")
    if hyper.limit is None:
        _warn_of_few_rows(config, federation.cohorts[0].mask)
    mask = federation.cohorts[0].mask[0]
    n_samples = jnp.sum(mask, dtype=jnp.int32)
    if config.n_coreset is None:
        capacity, n_drawn = max(1, len(mask) // 10), jnp.maximum(n_samples // 10, 1)
    else:
        capacity = min(config.n_coreset, len(mask))
        n_drawn = jnp.minimum(n_samples, config.n_coreset)
    state = CoresetState(
        n_drawn=n_drawn,
        rows=jnp.full(capacity, -1, jnp.int32),
        weights=jnp.zeros(capacity),
        centroids={
            cohort.view_ids: jnp.zeros((config.n_clusters, n_features(cohort)))
            for cohort in federation.cohorts
        },
        n_centroids=jnp.int32(0),
    )
    return state, ((),) * len(federation.cohorts)


def _draw(config: CoresetKMeansConfig, hyper: CoresetKMeansHyperparams) -> Phase:
    """Returns the first exchange: agents send sensitivities, and the server draws rows by them."""

    def client(key: Array, sent: tuple, state: tuple, client: Cohort) -> Any:
        x = jnp.concatenate(client.views, axis=-1)
        found = kmeans(
            key,
            x,
            config.n_clusters,
            where=client.mask,
            n_init=config.n_init,
            limit=hyper.limit,
        )
        message = sensitivities(x, found.labels, found.centroids, client.mask, hyper.alpha)
        return state, {client.view_ids: message}, {}

    def server(
        key: Array, state: CoresetState, messages: Any, weights: Any
    ) -> tuple[CoresetState, dict]:
        total = sum(by_agent(messages).values())
        drawn = draw_rows(key, total, len(state.rows))
        rows = jnp.where(jnp.arange(len(drawn)) < state.n_drawn, drawn, -1)
        return state._replace(rows=rows, weights=importance_weights(total, rows)), {}

    return Phase(send_nothing, client, server)


def _collect(config: CoresetKMeansConfig, hyper: CoresetKMeansHyperparams) -> Phase:
    """Returns the second exchange: agents send the drawn rows, and the server clusters them."""

    def client(key: Array, rows: Array, state: tuple, client: Cohort) -> Any:
        x = jnp.concatenate(client.views, axis=-1)
        return state, {client.view_ids: jnp.where(rows[:, None] >= 0, x[rows], 0.0)}, {}

    def server(
        key: Array, state: CoresetState, messages: Any, weights: Any
    ) -> tuple[CoresetState, dict]:
        agents = by_agent(messages)
        limit = config.n_clusters if hyper.limit is None else hyper.limit
        n_centroids = jnp.minimum(limit, state.n_drawn)
        found = kmeans(
            key,
            jnp.concatenate(list(agents.values()), axis=1),
            config.n_clusters,
            where=state.rows >= 0,
            n_init=config.n_init,
            weights=state.weights,
            limit=n_centroids,
        )
        ends = np.cumsum([x.shape[1] for x in agents.values()])
        columns = jnp.split(found.centroids, ends[:-1], axis=1)
        centroids = dict(zip(agents, columns, strict=True))
        n_centroids = jnp.minimum(n_centroids, config.n_clusters).astype(jnp.int32)
        return state._replace(centroids=centroids, n_centroids=n_centroids), {}

    return Phase(lambda state, view_ids: state.rows, client, server)


def _own_columns(state: CoresetState, view_ids: tuple[int, ...]) -> dict[str, Array]:
    """Returns an agent's columns of the centroids, and how many centroids are in use."""
    return {"centroids": state.centroids[view_ids], "n_centroids": state.n_centroids}


def _assign(server: CoresetState, state: tuple, client: Cohort) -> Array:
    """Labels an agent's samples by the nearest centroid on its own features."""
    if client.view_ids not in server.centroids:
        raise checks.wrong("view_ids", client.view_ids, f"one of {sorted(server.centroids)}")
    x = jnp.concatenate(client.views, axis=-1)
    labels = predict(x, server.centroids[client.view_ids], limit=server.n_centroids)
    return jnp.where(client.mask, labels, -1)


def sensitivities(
    x: Array, labels: Array, centroids: Array, where: Array, alpha: ArrayLike
) -> Array:
    """Bounds how much each row matters to any k-means clustering (Bachem et al., 2017).

    s(i) = alpha d_i^2 / c + 2 alpha C_b / (|b| c) + 4 n / |b|, with d_i the distance of row i to
    its centroid, b its cluster, C_b = sum over b of d^2, and c = (sum of d^2) / n. A term with a
    denominator of zero is zero.

    Args:
      x: An agent's features [n, p].
      labels: Its clusters, int32 [n].
      centroids: Their centroids [k, p].
      where: Rows that are not padding, bool [n].
      alpha: Weight of the first two terms.

    Returns:
      float32 [n], positive; zero outside `where`.
    """
    x = jnp.where(where[:, None], x, 0.0)
    cost = jnp.where(where, jnp.sum(jnp.square(x - centroids[labels]), axis=1), 0.0)
    # Rows that equal their centroid are off by the rounding of a mean: that is no distance.
    rounding = 8 * jnp.finfo(jnp.float32).eps
    largest = jnp.max(jnp.sum(jnp.square(x), axis=1))
    cost = jnp.where(cost > jnp.square(rounding) * largest, cost, 0.0)
    # Product with one-hot labels, not a scatter: it has a fixed order of summation everywhere.
    member = jax.nn.one_hot(jnp.where(where, labels, -1), len(centroids))
    cluster_size = jnp.sum(member, axis=0)[labels]
    cluster_cost = matmul(cost, member)[labels]
    n = jnp.sum(where)
    mean_cost = _ratio(jnp.sum(cost), n)
    s = (
        alpha * _ratio(cost, mean_cost)
        + 2 * alpha * _ratio(cluster_cost, cluster_size * mean_cost)
        + 4 * _ratio(n, cluster_size)
    )
    return jnp.where(where, s, 0.0)


def draw_rows(key: Array, chances: Array, n_draws: int) -> Array:
    """Draws rows one after another without replacement, in proportion to `chances`.

    They are the rows of largest log(chance) + Gumbel noise (Yellott, 1977), in that order. A row's
    noise derives from its number, so that padding and further draws do not change the first ones.

    Args:
      key: PRNG key.
      chances: Non-negative, float32 [n]; rows of zero come last.
      n_draws: Static number of rows, n at most.

    Returns:
      int32 [n_draws].
    """

    def noise(row: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(key, row), mode="high")

    perturbed = jnp.log(chances) + jax.vmap(noise)(jnp.arange(len(chances)))
    return lax.top_k(perturbed, n_draws)[1]


def importance_weights(sensitivity: Array, rows: Array) -> Array:
    """Computes weights of drawn rows: 1 / s, normalised to sum to 1 (Huang et al., 2022).

    Args:
      sensitivity: s of all rows, float32 [n], positive where drawn.
      rows: Drawn rows, int32 [m]; -1 for none.

    Returns:
      float32 [m]; zero for none.
    """
    inverse = jnp.where(rows >= 0, 1 / sensitivity[rows], 0.0)
    return inverse / jnp.sum(inverse)


def _ratio(numerator: Array, denominator: Array) -> Array:
    """Returns the quotient, and zero where the denominator is zero."""
    safe = jnp.where(denominator > 0, denominator, 1)
    return jnp.where(denominator > 0, numerator / safe, 0.0)
