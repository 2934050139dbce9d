"""Runs of several groups one after another, by programs that the groups share.

For tables on a CPU: their groups are many and of few runs each, and runs side by side gain nothing
there. A batch program holds a whole run and is compiled for every group; of the programs of `Steps`
most are the same text in all groups, such as pre-training in each row of an ablation.

    execute(groups, ledger, batch=1, program=programs())
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from experiments.lib.batches import Group, Program, mean_silhouette
from experiments.lib.references import told
from experiments.lib.report import losses_of
from jaxfedmvc.checks import has_nan
from jaxfedmvc.engine import Traffic
from jaxfedmvc.engine.programs import compiler_options
from jaxfedmvc.engine.steps import Evaluation, Steps
from jaxfedmvc.federation import Federation
from jaxfedmvc.messages.secure import any_unread
from jaxfedmvc.metrics.host import client_tables

PyTree = Any


class OneByOne(Program):
    """The programs of a group's runs, which the host calls step by step; for one device.

    Attributes:
      group: Whose runs they make, with a number of clusters.
      compilations: 1 once they are compiled.
    """

    def __init__(self, group: Group, compiled: dict[str, Future]) -> None:
        """Prepares the programs; nothing is traced yet.

        Args:
          group: Of runs.
          compiled: By their text the programs of other groups; receives those of this one.
        """
        super().__init__(group)
        self._steps = Steps(
            group.make,
            group.hyperparams[0],
            group.federation,
            participation=group.participation,
            resample_participants=group.resample_participants,
            client_chunk=group.client_chunk,
            compiled=compiled,
        )
        # Another thread may compile them ahead, while bytes are asked for.
        self._compiling, self._is_compiled = threading.Lock(), False
        self._wrong: jax.errors.JaxRuntimeError | MemoryError | None = None

    def run(self, runs: Sequence[tuple[int, int]]) -> PyTree:
        """Makes these runs one after another; returns their outputs with a leading axis."""
        self._of_size(1)
        found = {run: self._one(*run) for run in dict.fromkeys(runs)}
        stack = [found[run] for run in runs]
        return jax.tree.map(lambda *x: np.stack([np.asarray(v) for v in x]), *stack)

    def _one(self, setting: int, place: int) -> dict[str, Any]:
        """Returns what `batches.one_run` returns of a run, on the host."""
        group = self.group
        steps = self._steps.with_numbers(group.hyperparams[setting])
        federation = _federation()(group.source.build, *self._placed(), place)
        hidden, key = federation.without_labels(), jax.random.key(group.seeds[place])
        state, info = steps.setup(hidden, key, steps.start(hidden, key))
        infos, tables, took_part = [info], [], []
        by_round = group.every_round and federation.labels is not None
        found, kept, made = None, None, 0
        most = -np.inf
        while steps.goes_on(state, made, group.rounds):
            state, info = steps.one_round(hidden, key, state, made)
            infos.append(info)
            made += 1
            if not by_round and group.keep_from is None:
                continue
            found = steps.evaluate(hidden, key, state, made - 1)
            if by_round:
                tables.append(self._tables(federation, found))
                took_part.append(state.participants)
            if group.keep_from is None or made < group.keep_from:
                continue
            if (now := told(hidden, found.labels, group.n_clusters)) > most:
                # At once, as the programs give the state's memory away.
                most, kept = now, self._end(federation, found, info) | {"kept": made}
        if found is None:
            found = steps.evaluate(hidden, key, state, max(made - 1, 0))
        out = kept or self._end(federation, found, info if made else None)
        if group.keep_from is not None:
            out.setdefault("kept", made)
        out |= {"rounds": made, "unread": any_unread((infos, found.info))}
        if tables:
            each = jax.tree.map(lambda *x: np.stack(x), *took_part)
            out["by_round"] = {"tables": np.stack(tables), "participants": each}
        return out

    def _end(self, federation: Federation, found: Evaluation, info: Any) -> dict[str, Any]:
        """Returns what there is to say of a run that ends so; `info` is of its last round."""
        hidden, k = federation.without_labels(), self.group.n_clusters
        loss = losses_of(info, federation).get("loss") if info is not None else None
        out = {
            "loss": np.float32(np.nan if loss is None else loss),
            "nan": has_nan((found.state.server, found.state.clients, loss)),
            "silhouette": _silhouette()(hidden, found.embedding, found.labels, k),
            "information": told(hidden, found.labels, k),
        }
        if federation.labels is None:
            return out
        participants = found.state.participants
        return out | {"tables": self._tables(federation, found), "participants": participants}

    def _tables(self, federation: Federation, found: Evaluation) -> np.ndarray:
        k, n_classes = self.group.n_clusters, federation.n_classes
        assert k is not None and n_classes is not None and federation.labels is not None
        cohorts = zip(federation.labels, found.labels, federation.cohorts, strict=True)
        return np.concatenate(
            [client_tables(truth, mine, c.mask, (n_classes, k)) for truth, mine, c in cohorts]
        )

    def _compile(self, size: int, data: Any) -> Steps:
        with self._compiling:
            if self._wrong is not None:
                raise self._wrong  # what failed once fails for every run
            if not self._is_compiled:
                try:
                    self._steps.compile()
                except (jax.errors.JaxRuntimeError, MemoryError) as error:
                    self._wrong = error
                    raise
                self._is_compiled = True
        return self._steps

    def _traffic_of_stages(self) -> Mapping[str, Traffic]:
        try:
            return self._compile(1, None).traffic()
        except (jax.errors.JaxRuntimeError, MemoryError):
            # Bytes follow from shapes alone; the runs will say what is wrong, each in its row.
            self._steps.state_shapes()
            return self._steps.traffic()


# Jitted when first called, since what XLA is told depends on the device that is set by then.
@functools.cache
def _federation() -> Callable[..., Federation]:
    """Returns what builds the federation of one seed, in one program for groups alike."""

    def of_place(build: Any, shared: PyTree, by_seed: PyTree, place: jax.Array) -> Federation:
        return build(shared, jax.tree.map(lambda x: x[place], by_seed))

    return jax.jit(of_place, static_argnums=0, compiler_options=compiler_options(False))


@functools.cache
def _silhouette() -> Callable[..., jax.Array]:
    return jax.jit(mean_silhouette, static_argnums=3, compiler_options=compiler_options(False))


def programs() -> Callable[[Group], OneByOne]:
    """Returns what makes the programs of a job's groups; those of equal shapes in a row share."""
    shared: dict[Any, dict[str, Future]] = {}

    def program(group: Group) -> OneByOne:
        shapes = tuple(np.shape(x) for x in jax.tree.leaves(group.federation))
        if shapes not in shared:
            shared.clear()  # programs take memory
            shared[shapes] = {}
        return OneByOne(group, shared[shapes])

    return program
