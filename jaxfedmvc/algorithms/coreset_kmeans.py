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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms.distr_kmeans import by_agent
from jaxfedmvc.clustering import kmeans, predict
from jaxfedmvc.federation import Cohort, Federation


class CoresetState(NamedTuple):
    """What the server knows, for a coreset of up to m rows and k clusters.

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
    n_clusters: int,
    *,
    n_coreset: int | None = None,
    limit: ArrayLike | None = None,
    alpha: ArrayLike = 2.0,
    n_init: int = 10,
) -> FederatedAlgorithm:
    """Weighted k-means at the server on raw rows drawn by sensitivity. This is no privacy.

    The exchanges are made in `setup`; a round does nothing, so run it for 0 rounds. Cluster numbers
    mean the same for all agents, but a sample may be nearest to different ones on their features.

    Args:
      n_clusters: k, static, for the agents and the server alike.
      n_coreset: Static number of rows drawn; None means a tenth of the samples, rounded down, one
        at least. For None the messages have room for a tenth of all rows with padding; what lies
        beyond a tenth of the samples is sent as zeros and has no weight.
      limit: Number of clusters in use, min(limit, k), where that is traced; all k if None. The
        server uses no more than it has rows. The messages keep their size for k.
      alpha: Weight of distances against sizes of clusters in the sensitivities, traced.
      n_init: Starts of every k-means, static.

    Returns:
      The algorithm. Its `init` raises ValueError as `Federation.check_vertical` does, or where an
      agent has fewer samples than clusters or than `n_coreset`; its exchanges as `kmeans` does for
      a setting that is out of range.

    Raises:
      ValueError: `n_coreset` below 1, or `alpha` below 0 or not finite.
    """
    if n_coreset is not None and n_coreset < 1:
        raise ValueError(f"n_coreset: got {n_coreset}; allowed is 1 or more, or None")
    if not isinstance(alpha, jax.core.Tracer) and not 0 <= np.asarray(alpha) < np.inf:
        raise ValueError(f"alpha: got {alpha}; allowed is a finite number, 0 or more")

    def init(key: Array, federation: Federation) -> tuple[CoresetState, tuple[tuple, ...]]:
        federation.check_vertical()
        federation.check_rows(n_clusters, "as many as clusters, for k-means to start from")
        federation.check_rows(n_coreset or 1, "as many as the coreset draws")
        mask = federation.cohorts[0].mask[0]
        n_samples = jnp.sum(mask, dtype=jnp.int32)
        if n_coreset is None:
            capacity, n_drawn = max(1, len(mask) // 10), jnp.maximum(n_samples // 10, 1)
        else:
            capacity, n_drawn = min(n_coreset, len(mask)), jnp.minimum(n_samples, n_coreset)
        widths = {
            cohort.view_ids: sum(view.shape[-1] for view in cohort.views)
            for cohort in federation.cohorts
        }
        state = CoresetState(
            n_drawn=n_drawn,
            rows=jnp.full(capacity, -1, jnp.int32),
            weights=jnp.zeros(capacity),
            centroids={v: jnp.zeros((n_clusters, width)) for v, width in widths.items()},
            n_centroids=jnp.int32(0),
        )
        return state, ((),) * len(federation.cohorts)

    def send_sensitivities(key: Array, sent: tuple, state: tuple, client: Cohort) -> Any:
        x = jnp.concatenate(client.views, axis=-1)
        found = kmeans(key, x, n_clusters, where=client.mask, n_init=n_init, limit=limit)
        message = sensitivities(x, found.labels, found.centroids, client.mask, alpha)
        return state, {client.view_ids: message}, {}

    def draw(
        key: Array, state: CoresetState, messages: Any, weights: Any
    ) -> tuple[CoresetState, dict]:
        total = sum(by_agent(messages).values())
        drawn = draw_rows(key, total, len(state.rows))
        rows = jnp.where(jnp.arange(len(drawn)) < state.n_drawn, drawn, -1)
        return state._replace(rows=rows, weights=importance_weights(total, rows)), {}

    def send_rows(key: Array, rows: Array, state: tuple, client: Cohort) -> Any:
        x = jnp.concatenate(client.views, axis=-1)
        return state, {client.view_ids: jnp.where(rows[:, None] >= 0, x[rows], 0.0)}, {}

    def cluster_coreset(
        key: Array, state: CoresetState, messages: Any, weights: Any
    ) -> tuple[CoresetState, dict]:
        agents = by_agent(messages)
        n_centroids = jnp.minimum(n_clusters if limit is None else limit, state.n_drawn)
        found = kmeans(
            key,
            jnp.concatenate(list(agents.values()), axis=1),
            n_clusters,
            where=state.rows >= 0,
            n_init=n_init,
            weights=state.weights,
            limit=n_centroids,
        )
        ends = np.cumsum([x.shape[1] for x in agents.values()])
        columns = jnp.split(found.centroids, ends[:-1], axis=1)
        centroids = dict(zip(agents, columns, strict=True))
        n_centroids = jnp.minimum(n_centroids, n_clusters).astype(jnp.int32)
        return state._replace(centroids=centroids, n_centroids=n_centroids), {}

    def own_columns(state: CoresetState, view_ids: tuple[int, ...]) -> dict[str, Array]:
        return {"centroids": state.centroids[view_ids], "n_centroids": state.n_centroids}

    def receive(key: Array, sent: dict, state: tuple, client: Cohort) -> Any:
        return state, (), {}

    def assign(server: CoresetState, state: tuple, client: Cohort) -> Array:
        x = jnp.concatenate(client.views, axis=-1)
        labels = nearest(x, **own_columns(server, client.view_ids))
        return jnp.where(client.mask, labels, -1)

    return FederatedAlgorithm(
        init=init,
        setup=(
            Phase(lambda state, view_ids: (), send_sensitivities, draw),
            Phase(lambda state, view_ids: state.rows, send_rows, cluster_coreset),
        ),
        round=(),
        finish=(Phase(own_columns, receive, lambda key, state, m, w: (state, {})),),
        assign=assign,
    )


def sensitivities(
    x: Array, labels: Array, centroids: Array, where: Array, alpha: ArrayLike
) -> Array:
    """Bound on how much each row matters to any k-means clustering (Bachem et al., 2017).

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
    cluster_cost = jnp.matmul(cost, member, precision=lax.Precision.HIGHEST)[labels]
    n = jnp.sum(where)
    mean_cost = _ratio(jnp.sum(cost), n)
    s = (
        alpha * _ratio(cost, mean_cost)
        + 2 * alpha * _ratio(cluster_cost, cluster_size * mean_cost)
        + 4 * _ratio(n, cluster_size)
    )
    return jnp.where(where, s, 0.0)


def draw_rows(key: Array, chances: Array, n_draws: int) -> Array:
    """Rows drawn one after another without replacement, in proportion to `chances`.

    The rows of largest log(chance) + Gumbel noise (Yellott, 1977), in that order. A row's noise
    derives from its number, so that padding and further draws do not change the first ones.

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
    """Weights of drawn rows: 1 / s, normalised to sum to 1 (Huang et al., 2022).

    Args:
      sensitivity: s of all rows, float32 [n], positive where drawn.
      rows: Drawn rows, int32 [m]; -1 for none.

    Returns:
      float32 [m]; zero for none.
    """
    inverse = jnp.where(rows >= 0, 1 / sensitivity[rows], 0.0)
    return inverse / jnp.sum(inverse)


def nearest(x: Array, centroids: Array, n_centroids: Array) -> Array:
    """Nearest of the first `n_centroids` of the centroids [k, p] for rows [n, p], int32 [n]."""
    used = jnp.arange(len(centroids)) < n_centroids
    # Those not in use become copies of the first, which then stands for them.
    labels = predict(x, jnp.where(used[:, None], centroids, centroids[:1]))
    return jnp.where(labels < n_centroids, labels, 0)


def _ratio(numerator: Array, denominator: Array) -> Array:
    """Their quotient, and zero where the denominator is zero."""
    safe = jnp.where(denominator > 0, denominator, 1)
    return jnp.where(denominator > 0, numerator / safe, 0.0)
