"""Runs a centralised method as a federation in which every client uploads its rows.

THIS IS NO PRIVACY: what a client sends are its raw data. The methods are here to be compared with,
and pay for what they see in bytes.

    setup: every client sends its rows, which of them are padding, and its id; the server clusters
        all rows as one set
    finish: the server sends all clients that hold the same views the labels of all of them

A centralised method is a pure function `fit(key, views, observed, config, hyperparams) -> Fitted`
of all rows, each with the views of the client that it comes from. It compiles once for shapes and
settings, outside of `jit`, too. The rows come in random order, since several published methods
batch or start in the order of files that lie sorted by class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfedmvc.algorithm import FederatedAlgorithm, Phase, keep, send_nothing
from jaxfedmvc.algorithms.pooled.rows import check_widths
from jaxfedmvc.federation import Cohort, Federation, has_features

Kind = tuple[int, ...]


class Fitted(NamedTuple):
    """What a centralised method finds in N rows.

    Attributes:
      labels: int32 [N]; -1 for rows without any observed view, which are padding.
      embedding: The representation that was clustered, or soft clusters, [N, d].
      trace: The objective, or the loss, after each iteration or epoch, [steps].
    """

    labels: Array
    embedding: Array
    trace: Array


# `(key, views: [N, D_v] each, observed: bool [N, V], config, hyper) -> Fitted`. Entries of views
# that are not observed are never read, and rows without any observed view are padding. Shapes are
# checked, and no values, which may be traced: that they are finite, that there are as many rows as
# clusters and what else `init` asks of a federation is the caller's part; a method that needs
# complete rows takes a view that one of them lacks for zeros.
Fit = Callable[[Array, tuple[Array, ...], Array, Any, Any], Fitted]


class PooledState(NamedTuple):
    """State of the server, by the views that clients hold.

    Attributes:
      clients: Who took part, int32 [clients], ascending; -1 behind the last.
      labels: Their labels, int32 [clients, rows]; -1 before `setup` and for padding.
      embedding: Their representations, [clients, rows, d].
    """

    clients: dict[Kind, Array]
    labels: dict[Kind, Array]
    embedding: dict[Kind, Array]


def pooled(
    fit: Fit,
    config: Any,
    hyper: Any,
    *checks: Callable[[Federation], None],
) -> FederatedAlgorithm:
    """Makes a federated algorithm of a centralised method, to be run for 0 rounds.

    Who does not take part gets no labels (-1), other than with federated methods: there is no
    model to assign new rows by.

    Args:
      fit: The method.
      config: Its static settings, with `n_clusters`.
      hyper: Its traced settings.
      *checks: Each raises ValueError where the method cannot work on a federation.

    Returns:
      The algorithm. Its `init` raises ValueError as the checks do, where there are fewer samples
      than clusters, and where two clients hold the same sample.
    """

    def init(key: Array, federation: Federation) -> tuple[PooledState, tuple[Array, ...]]:
        _check_samples(federation, config.n_clusters)
        for check in checks:
            check(federation)
        shapes = {c.view_ids: c.mask.shape for c in federation.cohorts}
        n = sum(clients * rows for clients, rows in shapes.values())
        found = jax.eval_shape(
            lambda key, views, observed: fit(key, views, observed, config, hyper),
            key,
            tuple(jax.ShapeDtypeStruct((n, d), jnp.float32) for d in federation.view_dims),
            jax.ShapeDtypeStruct((n, federation.n_views), jnp.bool_),
        )
        server = PooledState(
            {kind: jnp.full(shape[0], -1, jnp.int32) for kind, shape in shapes.items()},
            {kind: jnp.full(shape, -1, jnp.int32) for kind, shape in shapes.items()},
            {kind: jnp.zeros((*shape, found.embedding.shape[1])) for kind, shape in shapes.items()},
        )
        return server, tuple(jnp.full(shape, -1, jnp.int32) for shape in shapes.values())

    def find(key: Array, state: PooledState, messages: Any, weights: Any) -> Any:
        views, observed, client = _stacked(messages, weights)
        key_order, key_fit = jax.random.split(key)
        order = _shuffled(key_order, jnp.any(observed, axis=1), client)
        found = fit(key_fit, tuple(x[order] for x in views), observed[order], config, hyper)
        back = jnp.argsort(order)
        new = _dealt_out(state, messages, found.labels[back], found.embedding[back])
        return new, {"loss": found.trace[-1], "trace": found.trace}

    return FederatedAlgorithm(
        init=init,
        setup=(Phase(send_nothing, _upload, find),),
        round=(),
        finish=(Phase(_send_labels, _receive, keep),),
        assign=_assign,
        embed=_embed,
    )


def _check_samples(federation: Federation, n_clusters: int) -> None:
    """Raises ValueError for too few samples, or one that is there twice, as agents hold it."""
    if federation.is_traced:
        return
    ids = [np.asarray(c.sample_ids)[np.asarray(c.mask)] for c in federation.cohorts]
    found, counts = np.unique(np.concatenate(ids), return_counts=True)
    needs_samples("n_clusters", n_clusters)(federation)
    n = int(counts.sum())
    if n < 2:
        raise ValueError(f"federation: has {n} sample in all; allowed are 2 or more")
    if (counts > 1).any():
        raise ValueError(
            f"federation: sample {found[counts > 1][0]} is there twice; allowed for a centralised"
            " method is a horizontal federation, where one client holds all views of a sample that"
            " are known"
        )


def _upload(key: Array, sent: tuple[()], state: Array, client: Cohort) -> Any:
    views = {v: jnp.where(client.mask[:, None], x, 0.0) for v, x in client.by_view().items()}
    return state, {"client": client.client_ids, "mask": client.mask, "views": views}, {}


def _stacked(messages: Any, weights: Any) -> tuple[list[Array], Array, Array]:
    """Returns all rows as one set: the views [N, D_v], observed [N, V], and whose row it is [N]."""
    widths = {v: x.shape[-1] for m in messages for v, x in m["views"].items()}
    views: dict[int, list[Array]] = {v: [] for v in sorted(widths)}
    observed, clients = [], []
    for message, weight in zip(messages, weights, strict=True):
        mask = (message["mask"] & (weight > 0)[:, None]).reshape(-1)
        for v, parts in views.items():
            x = message["views"].get(v)
            parts.append(
                jnp.zeros((len(mask), widths[v])) if x is None else x.reshape(len(mask), widths[v])
            )
        held = jnp.array([v in message["views"] for v in views])
        observed.append(mask[:, None] & held[None])
        clients.append(jnp.repeat(message["client"], message["mask"].shape[1]))
    stacked = [jnp.concatenate(parts) for parts in views.values()]
    return stacked, jnp.concatenate(observed), jnp.concatenate(clients)


def _shuffled(key: Array, present: Array, client: Array) -> Array:
    """Returns the rows in random order, padding last, int32 [N].

    By client id and then place before they are shuffled: neither cohorts, nor padding, nor the
    order in which data were filed decide where a row comes.
    """
    by_client = jnp.argsort(jnp.where(present, client, jnp.iinfo(jnp.int32).max))
    draws = jax.random.uniform(key, client.shape)
    return by_client[jnp.argsort(jnp.where(present[by_client], draws, jnp.inf))]


def _dealt_out(state: PooledState, messages: Any, labels: Array, embedding: Array) -> PooledState:
    """Returns the state with what was found for all rows [N, ...], in the order of `_stacked`."""
    new = PooledState(*(dict(field) for field in state))
    start = 0
    for message in messages:
        kind, (n, rows) = tuple(sorted(message["views"])), message["mask"].shape
        mine = slice(start, start := start + n * rows)
        by_id = jnp.argsort(message["client"])
        found = message["client"], labels[mine], embedding[mine]
        for field, values in zip(new, found, strict=True):
            old = field[kind]
            field[kind] = old.at[:n].set(values.reshape(n, *old.shape[1:])[by_id])
    return new


def _send_labels(state: PooledState, view_ids: Kind) -> dict[str, Array]:
    """Sends all clients that hold these views the labels of all of them."""
    return {"clients": state.clients[view_ids], "labels": state.labels[view_ids]}


def _receive(key: Array, sent: dict[str, Array], state: Array, client: Cohort) -> Any:
    return _own(sent["clients"], sent["labels"], client, -1), (), {}


def _own(clients: Array, values: Array, client: Cohort, none: int) -> Array:
    """Picks a client's entry of `values` [clients, ...]; `none` where it is not among them."""
    mine = clients == client.client_ids
    return jnp.where(jnp.any(mine), values[jnp.argmax(mine)], none)


def _assign(server: PooledState, labels: Array, client: Cohort) -> Array:
    return jnp.where(client.mask, labels, -1)


def _embed(server: PooledState, labels: Array, client: Cohort) -> Array:
    kind = client.view_ids
    found = _own(server.clients[kind], server.embedding[kind], client, 0)
    return jnp.where(client.mask[:, None], found, 0.0)


# --- What several methods can work on -------------------------------------------------------------


def needs_samples(setting: str, least: int) -> Callable[[Federation], None]:
    """Returns a check that there are as many samples in all as a setting says; not while tracing.

    Args:
      setting: Its name.
      least: Its value.
    """

    def check(federation: Federation) -> None:
        if federation.is_traced:
            return
        n = sum(int(np.asarray(cohort.mask).sum()) for cohort in federation.cohorts)
        if n < least:
            raise ValueError(f"{setting}: got {least} for {n} samples in all; allowed is no more")

    return check


def needs_complete_rows(method: str) -> Callable[[Federation], None]:
    """Returns a check that every client holds all views."""

    def check(federation: Federation) -> None:
        for cohort in federation.cohorts:
            if not federation.holds_all_views(cohort):
                raise ValueError(
                    f"{method} needs complete rows, but clients hold the views {cohort.view_ids}"
                    f" of {federation.n_views}; allowed are clients with all views (--ratio=1:0,"
                    " where the job deals out the rows)"
                )

    return check


def needs_linked_views(method: str) -> Callable[[Federation], None]:
    """Returns a check of `Federation.check_linked`."""
    return lambda federation: federation.check_linked(method)


def needs_varied_views(
    method: str, why: str = "would be taken for the best of views"
) -> Callable[[Federation], None]:
    """Returns a check that some feature of every view varies; see `federation.has_features`.

    Args:
      method: Its name.
      why: What a constant view would do.
    """

    def check(federation: Federation) -> None:
        if not has_features(federation):
            return
        for v, width in enumerate(federation.view_dims):
            holders = [c for c in federation.cohorts if v in c.view_ids]
            rows = [np.asarray(c.by_view()[v])[np.asarray(c.mask)] for c in holders]
            if not np.ptp(np.concatenate(rows), axis=0).any():
                raise ValueError(
                    f"{method}: all {width} features of view {v} are constant; it can tell no"
                    f" samples apart and {why}, leave it out"
                )

    return check


def needs_views(method: str, least: int, why: str) -> Callable[[Federation], None]:
    """Returns a check that there are as many views."""

    def check(federation: Federation) -> None:
        if federation.n_views < least:
            raise ValueError(
                f"{method} {why}, but there is {federation.n_views}; allowed is {least} or more"
            )

    return check


def needs_at_most(
    method: str, rows: Callable[[int], int], why: str
) -> Callable[[Federation], None]:
    """Returns a check that there are no more rows in all, padding included; not while tracing.

    Args:
      method: Its name.
      rows: The most, for a number of views.
      why: Ends the message.
    """

    def check(federation: Federation) -> None:
        if federation.is_traced:
            return
        masks = [cohort.mask for cohort in federation.cohorts]
        n, most = sum(mask.size for mask in masks), rows(federation.n_views)
        if n > most:
            padding = n - sum(int(np.asarray(mask).sum()) for mask in masks)
            raise ValueError(
                f"{method}: got {n} rows, of which {padding} are padding; allowed is {most} or"
                f" fewer with {federation.n_views} view{'s' * (federation.n_views > 1)} ({why})"
            )

    return check


def needs_features(method: str, least: int, why: str) -> Callable[[Federation], None]:
    """Returns a check that every view has as many features."""
    return lambda federation: check_widths(method, federation.view_dims, least, why)
