"""What the clients hold: cohorts of clients with the same views, padded and masked.

A `Federation` is a tuple of `Cohort`s. Grouping the clients by the subset of views that they hold
means that no compute is spent on views that are missing, that any subset is allowed, and that
`jax.vmap` over a cohort needs nothing special. Horizontal federations (disjoint samples) and
vertical ones (shared samples, one view each) are the same container.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxfedmvc import checks, keys
from jaxfedmvc.data.dataset import (
    check_arrays,
    check_columns,
    check_precision,
    check_size,
    kind_of_labels,
)
from jaxfedmvc.data.partition import Part
from jaxfedmvc.data.vertical import align_agents, vertical_partition


@struct.dataclass
class Cohort:
    """Clients that hold the same subset of views, stacked on a leading client axis.

    `jax.vmap` over a cohort hands a function ONE client: the same fields without that axis. Where
    a function of this library takes a `client`, it takes a `Cohort` of that form.

    Attributes:
      views: One array [clients, rows, D_v] for each view of `view_ids`, in that order.
      mask: bool [clients, rows]; False marks padding. Everything computed honours it.
      sample_ids: int32 [clients, rows], the row of the pooled data; -1 for padding.
      client_ids: int32 [clients], unique over the federation. A client's randomness derives from
        it, so that neither chunking nor order nor participation changes it.
      view_ids: Which views these are (static).
    """

    views: tuple[jax.Array, ...]
    mask: jax.Array
    sample_ids: jax.Array
    client_ids: jax.Array
    view_ids: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def n_clients(self) -> int:
        """Number of clients; not defined for the one client that `vmap` hands out."""
        return self.client_ids.shape[0]

    def by_view(self) -> dict[int, jax.Array]:
        """Returns the views keyed by view id."""
        return dict(zip(self.view_ids, self.views, strict=True))


def check_views(client: Cohort, widths: Mapping[int, int], *, complete: bool = False) -> None:
    """Checks that a model has the views of a client, which may be another than it was made with.

    Args:
      client: One client, or a stack of them; shapes are read, and no values.
      widths: Features of each view of the model.
      complete: Whether the client must hold all of them.

    Raises:
      ValueError: Names the first view that the model has not, or that has other features there; or
        views are missing.
    """
    known = ", ".join(map(str, sorted(widths)))
    for v, x in client.by_view().items():
        if v not in widths:
            raise ValueError(f"view {v} is none of the model's; allowed are {known}")
        if x.shape[-1] != widths[v]:
            raise ValueError(
                f"view {v} has {x.shape[-1]} features; allowed is {widths[v]}, as when the model"
                " was made"
            )
    if complete and len(client.view_ids) < len(widths):
        raise ValueError(f"client: holds views {client.view_ids}; allowed are all of {known}")


def single_client(views: Mapping[int, Any]) -> Cohort:
    """Makes one client on its own, as `vmap` would hand it out: for `assign`, or on a real node.

    Args:
      views: `{view id: array [rows, D_v]}`.

    Raises:
      ValueError: There is no view, an id is no whole number, row counts differ, a value is NaN or
        infinite.
    """
    _check_by_view("views", views)
    view_ids = tuple(sorted(views))
    check_arrays([views[v] for v in view_ids], names=[str(v) for v in view_ids])
    rows = len(views[view_ids[0]])
    return Cohort(
        views=tuple(jnp.asarray(views[v], jnp.float32) for v in view_ids),
        mask=jnp.ones(rows, bool),
        sample_ids=jnp.arange(rows),
        client_ids=jnp.int32(0),
        view_ids=view_ids,
    )


@struct.dataclass
class Federation:
    """All cohorts, and beside them the labels, which are for scoring only.

    Labels lie outside the cohorts, so that a client function cannot see them; the engine hands
    algorithms `without_labels()`.

    Attributes:
      cohorts: The clients, grouped by the views that they hold.
      labels: One int32 [clients, rows] for each cohort (-1 for padding), or None.
      view_dims: D_v of every view of the federation (static).
      n_classes: Number of distinct labels, None without labels (static).
    """

    cohorts: tuple[Cohort, ...]
    labels: tuple[jax.Array, ...] | None
    view_dims: tuple[int, ...] = struct.field(pytree_node=False)
    n_classes: int | None = struct.field(pytree_node=False)

    @property
    def n_views(self) -> int:
        """Number of views of the whole federation."""
        return len(self.view_dims)

    @property
    def n_clients(self) -> int:
        """Number of clients of all cohorts."""
        return sum(cohort.n_clients for cohort in self.cohorts)

    @property
    def is_traced(self) -> bool:
        """Whether masks have no values to look at, as inside of `jax.jit`."""
        return any(isinstance(cohort.mask, jax.core.Tracer) for cohort in self.cohorts)

    def holds_all_views(self, cohort: Cohort) -> bool:
        """Says whether clients of this cohort are multi-view (full-view) clients."""
        return len(cohort.view_ids) == self.n_views

    def without_labels(self) -> Federation:
        """Returns the federation as algorithms see it."""
        return self.replace(labels=None, n_classes=None)  # type: ignore[attr-defined]

    def check_rows(self, at_least: int, reason: str) -> None:
        """Checks that every client has enough samples; nothing is checked while tracing.

        Raises:
          ValueError: Names the first client with fewer than `at_least`, and the reason.
        """
        if self.is_traced:
            return
        for cohort in self.cohorts:
            counts = np.asarray(cohort.mask).sum(axis=1)
            for client, rows in zip(np.asarray(cohort.client_ids), counts, strict=True):
                if rows < at_least:
                    raise ValueError(
                        f"client {client} (views {cohort.view_ids}) has {rows} samples; allowed is"
                        f" {at_least} or more ({reason})"
                    )

    def check_linked(self, method: str) -> None:
        """Checks that samples link the views: without any, clusters of two views cannot be matched.

        Two views are linked by a sample that has both, or by a third that is linked to both.
        Nothing is checked while tracing.

        Args:
          method: Begins the message.

        Raises:
          ValueError: Names two sets of views that no sample links.
        """
        if self.is_traced:
            return
        held = [np.asarray(c.sample_ids)[np.asarray(c.mask)] for c in self.cohorts]
        apart: list[tuple[set[int], np.ndarray]] = []
        for cohort, ids in zip(self.cohorts, held, strict=True):
            views, others = set(cohort.view_ids), []
            for group in apart:
                if group[0] & views or np.intersect1d(group[1], ids).size:
                    views, ids = views | group[0], np.union1d(ids, group[1])
                else:
                    others.append(group)
            apart = [*others, (views, ids)]
        if len(apart) > 1:
            first, other = sorted(tuple(sorted(views)) for views, _ in apart)[:2]
            raise ValueError(
                f"{method}: no sample has views of both {first} and {other}, so that nothing tells"
                " which of their clusters are the same; allowed are views that samples link, as by"
                " one client with all of them"
            )

    def check_vertical(self, *, complete: bool = True, aligned: bool = True) -> None:
        """Checks that every client is an agent: the same samples as all, and a view of its own.

        Reads no feature; nothing is checked while tracing.

        Args:
          complete: Whether every agent must hold all samples; else a sample that an agent lacks is
            masked there, and lies in the same row on the others.
          aligned: Whether a row must be the same sample on all agents.

        Raises:
          ValueError: Two clients share a view, an agent's samples differ from the others' or
            are not distinct; the message names the agent.
        """
        seen: set[int] = set()
        for cohort in self.cohorts:
            if cohort.n_clients != 1 or set(cohort.view_ids) & seen:
                raise ValueError(
                    f"federation: the views {cohort.view_ids} are held by several clients; in a"
                    " vertical federation each agent holds views of its own"
                )
            seen |= set(cohort.view_ids)
        if self.is_traced:
            return
        first: np.ndarray | None = None
        for cohort in self.cohorts:
            agent, mask = int(np.asarray(cohort.client_ids)[0]), np.asarray(cohort.mask)[0]
            ids = np.where(mask, np.asarray(cohort.sample_ids)[0], -1)
            unique, counts = np.unique(ids[mask], return_counts=True)
            if len(unique) < mask.sum():
                raise ValueError(f"agent {agent}: sample {unique[counts > 1][0]} is there twice")
            known = ids if first is None else first
            if complete and mask.sum() != (known >= 0).sum():
                raise ValueError(
                    f"agent {agent}: its samples differ from the first agent's: it has"
                    f" {mask.sum()} and the first {(known >= 0).sum()}; all agents must hold the"
                    " same samples"
                )
            fits = len(ids) == len(known)
            if fits and aligned:
                compared = np.ones_like(mask) if complete else mask & (known >= 0)
                fits = not (ids != known)[compared].any()
            if not fits:
                raise ValueError(
                    f"agent {agent}: its samples differ from the first agent's, or their order"
                    " does; all agents must hold the same samples in the same rows"
                    " (Federation.from_agents aligns them by id)"
                )
            if complete and (np.sort(ids) != np.sort(known)).any():
                raise ValueError(
                    f"agent {agent}: its samples differ from the first agent's; all agents must"
                    " hold the same samples"
                )
            first = np.where(known >= 0, known, ids)

    def check_features(self) -> None:
        """Checks that every client's features tell samples apart, as only it can see for itself.

        Raises:
          ValueError: All features of a client are constant; the message names it.
        """
        for cohort in self.cohorts:
            masks = np.asarray(cohort.mask)
            for i, agent in enumerate(np.asarray(cohort.client_ids)):
                views = (np.asarray(view)[i][masks[i]] for view in cohort.views)
                rows = np.concatenate(list(views), axis=1)
                if len(rows) > 1 and not np.ptp(rows, axis=0).any():
                    raise ValueError(
                        f"agent {agent}: all of its {rows.shape[1]} features are constant; it can"
                        " tell no samples apart, leave it out"
                    )

    def describe(self, view_names: Sequence[str] | None = None) -> str:
        """Returns a line for each cohort: how many clients, which views, how many samples each.

        Args:
          view_names: What each view is called, such as `Dataset.view_names`; its number if None.

        Raises:
          ValueError: There is not one name for each view.
        """
        names = [*map(str, range(self.n_views))] if view_names is None else [*view_names]
        if len(names) != self.n_views:
            raise checks.wrong("view_names", view_names, f"{self.n_views} names")
        lines = []
        for cohort in self.cohorts:
            rows = np.asarray(cohort.mask).sum(axis=1)
            held = ", ".join(names[v] for v in cohort.view_ids)
            kind = f"view{'' if len(cohort.view_ids) == 1 else 's'} {held}"
            kind = "all views" if self.holds_all_views(cohort) else kind
            plural = "" if cohort.n_clients == 1 else "s"
            least, most = rows.min(), rows.max()
            each = f"{least}" if least == most else f"{least}..{most}"
            lines.append(
                f"{cohort.n_clients} client{plural} with {kind}, "
                f"{each} samples each, {rows.sum()} in all"
            )
        return "\n".join(lines)

    @classmethod
    def from_arrays(
        cls,
        views: Sequence[Any],
        labels: Any | None = None,
        *,
        partition: Sequence[Part],
    ) -> Federation:
        """Splits pooled arrays over clients, as a simulation does.

        Args:
          views: One array [n, D_v] for each view.
          labels: [n] numbers or words, for scoring only, or None.
          partition: For each cohort its `view_ids`, `sample_ids` [clients, rows] (-1 pads) and
            `client_ids` [clients], e.g. from `data.hybrid_partition`.

        Raises:
          ValueError: Row counts differ, a value is NaN or infinite, float32 would round a feature
            away or has no squares of a view, labels are missing or of two kinds, a client is empty,
            a client or a sample or a view is not there, two cohorts hold the same views.
        """
        check_arrays(views, labels)
        check_partition(partition, n_samples=len(views[0]), n_views=len(views))
        check_held(views, partition)
        views = tuple(np.asarray(view, np.float32) for view in views)
        for v, view in enumerate(views):
            check_size(str(v), view)
        n_classes = None
        if labels is not None:
            names, labels = np.unique(np.asarray(labels), return_inverse=True)
            n_classes = len(names)
        cohorts, cohort_labels = [], []
        for part in partition:
            ids = np.asarray(part.sample_ids, np.int32)
            present = ids >= 0
            cohorts.append(
                Cohort(
                    views=tuple(
                        jax.device_put(np.where(present[..., None], views[v][ids], np.float32(0)))
                        for v in part.view_ids
                    ),
                    mask=jax.device_put(present),
                    sample_ids=jax.device_put(ids),
                    client_ids=jax.device_put(np.asarray(part.client_ids, np.int32)),
                    view_ids=tuple(part.view_ids),
                )
            )
            if labels is not None:
                truth = np.where(present, labels[ids], -1).astype(np.int32)
                cohort_labels.append(jax.device_put(truth))
        return cls(
            cohorts=tuple(cohorts),
            labels=tuple(cohort_labels) if labels is not None else None,
            view_dims=tuple(view.shape[1] for view in views),
            n_classes=n_classes,
        )

    @classmethod
    def from_agents(
        cls, agents: Sequence[tuple[Any, Any]], labels: Any | None = None
    ) -> Federation:
        """Makes a vertical federation: agents have the same samples, each features of its own.

        Args:
          agents: For each agent the ids [n] of its samples (whole numbers or strings, in any order)
            and its features [n, p_a]. Rows are brought to the first agent's order.
          labels: [n] numbers or words in the first agent's order, for scoring only, or None.

        Raises:
          ValueError: As `from_arrays`, ids that differ between agents, an id that is there twice,
            an agent whose features are all constant; the message names the agent.
        """
        ids, arrays = align_agents(agents)
        federation = cls.from_arrays(
            arrays, labels, partition=vertical_partition(len(ids), len(arrays))
        )
        federation.check_vertical()
        federation.check_features()
        return federation

    @classmethod
    def from_clients(
        cls, clients: Sequence[Mapping[int, Any]], labels: Sequence[Any] | None = None
    ) -> Federation:
        """Takes data that already lies with its clients.

        Args:
          clients: For each client its views, `{view id: array [rows, D_v]}`. Client ids are the
            places in this sequence; view ids are 0..V-1, each held by somebody.
          labels: For each client its labels [rows], numbers on all or words on all, for scoring
            only; or None.

        Raises:
          ValueError: As `from_arrays`; the message names the client.
        """
        clients = list(clients)  # a generator could be read only once
        if not clients:
            raise ValueError("clients: got none; at least one is needed")
        if labels is not None and len(labels) != len(clients):
            raise ValueError(f"labels: got {len(labels)} arrays for {len(clients)} clients")
        widths: dict[int, int] = {}
        columns: dict[int, tuple[str, ...]] = {}
        starts, n_samples = [], 0
        for i, client in enumerate(clients):
            _check_by_view(f"client {i}", client)
            names = [str(v) for v in client]
            try:
                check_arrays(list(client.values()), None if labels is None else labels[i], names)
                if labels is not None:
                    _check_kind(labels[i], labels[0])
            except ValueError as error:
                raise ValueError(f"client {i}: {error}") from error
            for v, array in client.items():
                columns[v] = check_columns(f"client {i}: view {v}", array, columns.get(v, ()))
                width = np.shape(array)[1]
                if widths.setdefault(v, width) != width:
                    raise ValueError(
                        f"client {i}: view {v} has {width} features; allowed is {widths[v]}, as on"
                        " the clients before"
                    )
            starts.append(n_samples)
            n_samples += len(next(iter(client.values())))
        n_views = len(widths)
        if sorted(widths) != list(range(n_views)):
            raise ValueError(f"clients: views {sorted(widths)} are held; allowed are 0..V-1, each")
        for v in range(n_views):
            check_precision(str(v), [client[v] for client in clients if v in client])
        # Pooled on the host only to share one construction with `from_arrays`; a view that a
        # client does not hold stays zero there and is not gathered.
        pooled = [np.zeros((n_samples, widths[v]), np.float32) for v in range(n_views)]
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, client in enumerate(clients):
            groups.setdefault(tuple(sorted(client)), []).append(i)
            for v, array in client.items():
                pooled[v][starts[i] : starts[i] + len(array)] = array
        partition = []
        for view_ids in sorted(groups, key=lambda ids: (-len(ids), ids)):
            members = groups[view_ids]
            counts = [len(clients[i][view_ids[0]]) for i in members]
            ids = np.full((len(members), max(counts)), -1, np.int32)
            for row, (i, count) in enumerate(zip(members, counts, strict=True)):
                ids[row, :count] = starts[i] + np.arange(count)
            partition.append(Part(view_ids, ids, np.asarray(members, np.int32)))
        return cls.from_arrays(
            pooled, None if labels is None else np.concatenate(labels), partition=partition
        )


def has_features(federation: Federation) -> bool:
    """Tells whether features can be looked at: they are not traced, and not all are zero.

    Runs on the host and on real nodes start from zeros in the place of the data.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(federation.cohorts)):
        return False
    # NumPy's arrays, since those of JAX are computed with in a trace, as of the key alone.
    return any(np.asarray(view).any() for cohort in federation.cohorts for view in cohort.views)


def _check_by_view(name: str, views: Any) -> None:
    """Checks that views come as a dictionary by whole numbers; the error calls it `name`."""
    is_dict = isinstance(views, Mapping)
    if not is_dict or not all(isinstance(v, int | np.integer) for v in views):
        got = f"view ids {list(views)}" if is_dict else f"a {type(views).__name__}"
        allowed = "a dictionary of view ids (0, 1, ...) and arrays"
        raise ValueError(f"{name}: got {got}; allowed is {allowed}")


def _check_kind(labels: Any, first: Any) -> None:
    """Checks that the labels of a client can equal those of the first one.

    Raises:
      ValueError: They are missing, or words where the others are numbers.
    """
    if labels is None:
        raise ValueError("labels: got None; allowed are labels of every client, or of none")
    kind, allowed = kind_of_labels(labels), kind_of_labels(first)
    if kind != allowed:
        raise ValueError(f"labels: got {kind}; allowed are {allowed}, as on client 0")


def check_held(views: Sequence[Any], partition: Iterable[Part]) -> None:
    """Checks that views keep their features in float32, by the rows of those who hold them.

    Raises:
      ValueError: As `check_precision`.
    """
    parts = list(partition)
    for v, view in enumerate(map(np.asanyarray, views)):
        if np.can_cast(view.dtype, np.float32):
            continue
        is_held = np.zeros(len(view), bool)
        for part in parts:
            if v in part.view_ids:
                ids = np.asarray(part.sample_ids)
                is_held[ids[ids >= 0]] = True
        if is_held.any():
            check_precision(str(v), [view if is_held.all() else view[is_held]])


def check_partition(partition: Sequence[Part], n_samples: int, n_views: int) -> None:
    """Checks a division of `n_samples` samples with `n_views` views over clients.

    Raises:
      ValueError: A client is empty or there twice, or has a sample twice; a sample or a view is not
        there; two cohorts hold the same views.
    """
    if not partition:
        raise ValueError("partition: got no cohort; at least one is needed")
    seen_views: set[tuple[int, ...]] = set()
    client_ids: list[int] = []
    for part in partition:
        if not isinstance(part, Part):
            raise checks.wrong(
                "partition",
                f"a {type(part).__name__}",
                "a list of data.Part, such as data.hybrid_partition returns",
            )
        views = tuple(part.view_ids)
        if (
            not views
            or list(views) != sorted(set(views))
            or not 0 <= views[0] <= views[-1] < n_views
        ):
            raise ValueError(
                f"partition: view_ids {views}; allowed is a non-empty increasing tuple from"
                f" 0..{n_views - 1}"
            )
        if views in seen_views:
            raise ValueError(f"partition: two cohorts hold the views {views}; merge them")
        seen_views.add(views)
        try:
            ids = np.asarray(part.sample_ids)
        except ValueError as error:
            raise ValueError(
                f"partition: sample_ids of cohort {views} are rows of different lengths; allowed is"
                " an array [clients, rows], in which -1 fills the end of the shorter ones"
            ) from error
        if ids.ndim != 2 or len(ids) == 0 or len(part.client_ids) != len(ids):
            raise ValueError(
                f"partition: sample_ids of cohort {views} have shape {ids.shape} with"
                f" {len(part.client_ids)} client_ids; allowed is [clients, rows] and [clients],"
                " with one client at least"
            )
        for name, array in (("sample_ids", ids), ("client_ids", np.asarray(part.client_ids))):
            if array.dtype.kind not in "iu":
                raise ValueError(
                    f"partition: {name} of cohort {views} are {array.dtype}; allowed are whole"
                    " numbers of an integer type"
                )
        if ids.size and (ids.max() >= n_samples or ids.min() < -1):
            raise ValueError(
                f"partition: sample_ids of cohort {views} lie in {ids.min()}..{ids.max()}; allowed"
                f" is 0..{n_samples - 1}, and -1 for padding"
            )
        for client, row in zip(part.client_ids, ids, strict=True):
            real = np.sort(row[row >= 0])
            if not len(real):
                raise ValueError(f"partition: client {client} is empty; give it a sample")
            twice = real[1:][np.diff(real) == 0]
            if len(twice):
                raise ValueError(f"partition: client {client} has sample {twice[0]} twice")
        client_ids += [int(c) for c in part.client_ids]
    if len(set(client_ids)) != len(client_ids):
        raise ValueError("partition: client_ids must be unique")
    if not 0 <= min(client_ids) <= max(client_ids) < keys.CLIENT_IDS:
        raise ValueError(
            f"partition: client_ids lie in {min(client_ids)}..{max(client_ids)}; allowed is"
            f" 0..{keys.CLIENT_IDS - 1}"
        )
