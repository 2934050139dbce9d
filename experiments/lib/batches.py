"""Batches of runs on the host's side: what a run reports, and how batches are made, saved, split.

No flags: `experiments.sweep` and the tables of papers are built on it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from experiments.ledger import Ledger
from jaxfedmvc import cost, engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.data.partition import Part
from jaxfedmvc.engine import batching as sweep
from jaxfedmvc.engine.batching import Source
from jaxfedmvc.engine.phases import Traffic, chunk_sizes
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.messages.secure import any_unread
from jaxfedmvc.metrics import simplified_silhouette
from jaxfedmvc.metrics.federation import GROUPS, score

PyTree = Any
METRICS = ("acc", "nmi", "ari", "purity", "loss", "silhouette")
# Before the names of columns that hold a number for each round, with blanks between.
ROUNDS = "rounds/"


class Group(NamedTuple):
    """Runs that share one program: they differ in seeds and in numbers that are traced.

    Attributes:
      columns: What names each setting in the tables, one dict a setting.
      hyperparams: For each setting a pytree of numbers, alike in structure.
      make: `hyperparams -> algorithm`.
      source: Data of every seed.
      federation: That of the first seed, to count bytes and to check the mesh.
      seeds: Of the runs.
      rounds: Most rounds.
      n_clusters: K of the scores on the device; None where `rate` scores labels on the host.
      participation: Share for each cohort.
      resample_participants: Whether who takes part is drawn anew every round.
      client_chunk: Clients computed at once.
      rate: `(place of the seed, labels of each cohort) -> scores`, on the host, or None.
      every_round: Whether every round is scored, as if it were the last.
    """

    columns: list[dict[str, str]]
    hyperparams: list[PyTree]
    make: Callable[[PyTree], FederatedAlgorithm]
    source: Source
    federation: Federation
    seeds: list[int]
    rounds: int
    n_clusters: int | None
    participation: list[float]
    resample_participants: bool
    client_chunk: int | None
    rate: Callable[[int, list[np.ndarray]], dict[str, float]] | None
    every_round: bool = False

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(setting, seed's place) of every run; the seeds of a setting lie together."""
        n_settings, n_seeds = len(self.columns), len(self.seeds)
        return [(s, p) for s in range(n_settings) for p in range(n_seeds)]


def outline(views: Sequence[np.ndarray], partition: Sequence[Part]) -> Federation:
    """The federation of a partition with zeros for features, which take no memory.

    For what reads shapes, masks and ids only; `Federation.from_arrays` has the data.
    """
    cohorts = tuple(
        Cohort(
            views=tuple(
                np.broadcast_to(np.float32(0), (*part.sample_ids.shape, views[v].shape[1]))
                for v in part.view_ids
            ),
            mask=jnp.asarray(part.sample_ids >= 0),
            sample_ids=jnp.asarray(part.sample_ids),
            client_ids=jnp.asarray(part.client_ids),
            view_ids=tuple(part.view_ids),
        )
        for part in partition
    )
    return Federation(cohorts, None, tuple(view.shape[1] for view in views), None)


# --- One run --------------------------------------------------------------------------------------


def one_run(group: Group) -> Callable[[PyTree, jax.Array, Federation], dict[str, Any]]:
    """`(hyperparams, key, federation) -> outputs` of a whole run: scalars, and labels to rate."""

    def run(hyperparams: PyTree, key: jax.Array, federation: Federation) -> dict[str, Any]:
        algorithm = group.make(hyperparams)
        result = engine.run(
            algorithm,
            federation,
            key,
            group.rounds,
            participation=group.participation,
            resample_participants=group.resample_participants,
            client_chunk=group.client_chunk,
            n_clusters=group.n_clusters if group.every_round else None,
        )
        loss = last_loss(result.info, result.n_rounds)
        out: dict[str, Any] = {
            "rounds": result.n_rounds,
            "loss": jnp.float32(jnp.nan) if loss is None else loss,
            "nan": _has_nan((result.state.server, result.state.clients, loss)),
            "unread": any_unread(result.info),
        }
        if group.rate is not None:
            return out | {"labels": [labels[0] for labels in result.labels]}
        assert group.n_clusters is not None
        out["silhouette"] = _mean_silhouette(algorithm, federation, result, group)
        if federation.labels is not None:
            took_part = result.state.participants
            out["scores"] = score(federation, result.labels, group.n_clusters, took_part)
        if group.every_round:
            out["by_round"] = result.scores
        return out

    return run


def last_loss(info: Mapping[str, Any], n_rounds: jax.Array) -> jax.Array | None:
    """Mean over clients of the loss that they reported in the last round; None if they do not."""
    reports = told(info["rounds"]) if jax.tree.leaves(info["rounds"]) else []
    losses = [r["loss"] for r in reports if "loss" in r]
    if losses and losses[0].shape[0]:
        last = [loss[jnp.maximum(n_rounds - 1, 0)].ravel() for loss in losses]
        return jnp.mean(jnp.concatenate(last))
    return None


def told(phases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each cohort's clients reported in a round; of several phases the last word counts.

    For phases that everyone takes part in: a leader's has one entry, of its own cohort.
    """
    found: list[dict[str, Any]] = []
    for phase in phases:
        for c, report in enumerate(phase["clients"]):
            report = getattr(report, "inner", report)
            if c == len(found):
                found.append({})
            if isinstance(report, Mapping):
                found[c] |= report
    return found


def _has_nan(tree: PyTree) -> jax.Array:
    """Whether models have become NaN, or a loss has."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.any(jnp.isnan(x)) for x in floats), start=jnp.zeros((), bool))


def _mean_silhouette(
    algorithm: FederatedAlgorithm, federation: Federation, result: engine.RunResult, group: Group
) -> jax.Array:
    """Of every client's own rows on what the method clusters (H), else on its raw views.

    The mean over rows; clients without two clusters do not count. No labels are seen.
    """
    k = group.n_clusters
    assert k is not None
    if algorithm.embed is not None:
        found = engine.embed(algorithm, federation, result.state, client_chunk=group.client_chunk)
    else:
        found = tuple(jnp.concatenate(cohort.views, axis=-1) for cohort in federation.cohorts)
    total, count = jnp.zeros(()), jnp.zeros(())
    for x, labels, cohort in zip(found, result.labels, federation.cohorts, strict=True):
        values = jax.vmap(lambda *client: simplified_silhouette(*client[:2], k, client[2]))(
            x, labels, cohort.mask
        )
        rows = jnp.where(jnp.isnan(values), 0.0, jnp.sum(cohort.mask, axis=1))
        total += jnp.sum(jnp.where(rows > 0, values, 0.0) * rows)
        count += jnp.sum(rows)
    return total / count


# --- A group's program, and what it costs ---------------------------------------------------------


class Prediction(NamedTuple):
    """Bytes that all runs of a batch share, and bytes and FLOPs of each run."""

    shared_bytes: int
    run_bytes: float
    run_flops: float

    def batch_bytes(self, size: int) -> float:
        """Of a batch of so many runs."""
        return self.shared_bytes + size * self.run_bytes


class Program:
    """The batch program of a group; counts how often it was compiled."""

    def __init__(self, group: Group, mesh: Mesh | None = None) -> None:
        self.group, self.mesh = group, mesh
        self.compilations = 0
        self._data: Any = None
        self._prediction: Prediction | None = None
        self._stages: dict[str, Traffic] | None = None
        plain = sweep.batched(one_run(group), group.source.build, mesh)

        def counted(*arguments: Any) -> Any:
            self.compilations += 1
            return plain(*arguments)

        where = {} if mesh is None else {"out_shardings": sweep.sharding(mesh)}
        self._program = jax.jit(counted, **where)
        self._plain = plain

    def traffic(self, rounds: int) -> dict[str, int]:
        """Bytes that all clients send and receive over a run of so many rounds."""
        if self._stages is None:
            self._stages = self._traffic()
        times = {"setup": 1, "round": rounds, "finish": 1}
        return {
            f"bytes_{way}": sum(getattr(self._stages[stage], way) * n for stage, n in times.items())
            for way in ("up", "down")
        }

    def _traffic(self) -> dict[str, Traffic]:
        algorithm = self.group.make(self.group.hyperparams[0])
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.group.federation
        )
        found: dict[str, Traffic] = {}

        def trace(federation: Federation) -> None:
            share = self.group.participation
            found.update(engine.traffic(algorithm, federation, participation=share))

        jax.eval_shape(trace, shapes)  # shapes suffice, and the outline's zeros stay unreal
        return found

    def predicted(self) -> Prediction:
        """What a batch takes, from shapes; nothing is compiled."""
        if self._prediction is None:
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype),
                (self.group.source.shared, self.group.source.by_seed),
            )
            # Tracing takes seconds, so that one batch of two must tell of all others.
            runs = jax.eval_shape(lambda: self._arguments([(0, 0)] * 2))
            found = cost.predict(self._plain, *shapes, *runs)
            shared = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
            self._prediction = Prediction(shared, (found.peak_bytes - shared) / 2, found.flops / 2)
        return self._prediction

    def run(self, runs: Sequence[tuple[int, int]]) -> PyTree:
        """Outputs of these runs, on the host, with a leading axis."""
        arguments = self._arguments(runs)
        if self.mesh is not None:
            arguments = sweep.put(arguments, sweep.sharding(self.mesh, "sweep"))
        return jax.device_get(self._program(*self._placed(), *arguments))

    def _placed(self) -> Any:
        if self._data is None:
            self._data = sweep.place(self.group.source, self.mesh)
        return self._data

    def _arguments(self, runs: Sequence[tuple[int, int]]) -> Any:
        hyper = [self.group.hyperparams[setting] for setting, _ in runs]
        stack = jax.tree.map(lambda *x: np.stack([_number(v) for v in x]), *hyper)
        seeds = np.array([self.group.seeds[place] for _, place in runs], np.int32)
        return stack, seeds, np.array([place for _, place in runs], np.int32)


def _number(value: Any) -> np.ndarray:
    """Whole numbers stay such: a share of 1.0 and a number of 1 mean different things."""
    return np.asarray(value, np.int32 if isinstance(value, int) else np.float32)


def free_bytes() -> int:
    """Memory that a program may take: of the accelerator, else of this machine."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


# --- Batches --------------------------------------------------------------------------------------


def execute(
    groups: Sequence[Group],
    ledger: Ledger,
    *,
    batch: int | None = None,
    mesh: Mesh | None = None,
    on_batch: Callable[[int], None] = lambda n: None,
    write: Callable[[str], None] = print,
) -> int:
    """Makes all runs that the ledger lacks; returns how many programs were compiled.

    Args:
      groups: Of runs with a program each.
      ledger: Receives every batch as it is finished.
      batch: Runs that go together; None plans it by memory, see `planned_batch`. Halved where the
        device reports that its memory is used up.
      mesh: Devices to lay runs and clients out on, or None.
      on_batch: Called with the number of runs that were finished.
      write: Prints a line.

    A run that does not fit the device by itself is recorded as failed.
    """
    share_progress(ledger, len(groups))
    compilations = 0
    for place, group in enumerate(groups):
        runs = group.runs
        if ledger.done(place) == len(runs):
            continue
        program = Program(group, mesh)
        program.traffic(0)
        if place not in ledger.sizes:
            # Kept before the first batch: a resumed job must not plan by another day's memory.
            ledger.add(place, as_the_first(planned_batch(program, batch)), [], 0.0)
        size = ledger.sizes[place]
        while (done := ledger.done(place)) < len(runs):
            part = runs[done : done + size]
            began = time.perf_counter()
            try:
                # The last batch is filled up, so that one program does for all.
                out = program.run(part + part[-1:] * (size - len(part)))
                rows = [row_of(program, run, _of(out, i)) for i, run in enumerate(part)]
            except (jax.errors.JaxRuntimeError, MemoryError) as error:
                if jax.process_count() > 1:
                    raise  # the others wait in this very batch
                if sweep.is_out_of_memory(error) and (smaller := _halved(size, mesh)):
                    size = smaller
                    ledger.add(place, size, [], 0.0)
                    write(f"out of memory: going on with {size} runs at a time")
                    continue
                write(f"a batch broke off ({_first_line(error)}); its runs are made one by one")
                rows = [_alone(program, size, run) for run in part]
            ledger.add(place, size, rows, time.perf_counter() - began)
            on_batch(len(part))
        compilations += program.compilations
        del program
        jax.clear_caches()  # programs take memory, and the next group has its own
    return compilations


def as_the_first(numbers: Any) -> Any:
    """Among several processes, the first one's numbers; all call this at the same point."""
    if jax.process_count() == 1:
        return numbers
    return jax.tree.map(int, multihost_utils.broadcast_one_to_all(numbers))


def share_progress(ledger: Ledger, n_groups: int) -> None:
    """Tells the other processes what the first one's folder holds."""
    mine = [(ledger.done(place), ledger.sizes.get(place, 0)) for place in range(n_groups)]
    for place, (done, size) in enumerate(as_the_first(mine)):
        if size:
            ledger.keep(place, size, done - ledger.done(place))


def _halved(size: int, mesh: Mesh | None) -> int:
    """The next smaller batch; 0 where there is none."""
    least = 1 if mesh is None else mesh.shape["sweep"]
    return max(least, size // 2 // least * least) if size > least else 0


def _alone(program: Program, size: int, run: tuple[int, int]) -> dict[str, Any]:
    """A run by itself, in a batch of copies: its failure is then nobody else's."""
    try:
        return row_of(program, run, _of(program.run([run] * size), 0))
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        return row_of(program, run, None, _first_line(error))


def _of(out: PyTree, i: int) -> PyTree:
    return jax.tree.map(lambda x: x[i], out)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200]


def row_of(
    program: Program, run: tuple[int, int], out: PyTree | None, reason: str = ""
) -> dict[str, Any]:
    """A run's line in runs.csv; scores of a failed run are NaN, its setting is there."""
    group, (setting, place) = program.group, run
    if out is not None and bool(out["nan"]):
        reason = "NaN in the model"
    elif out is not None and bool(out["unread"]):
        reason = "a secure sum cannot be read, or values were clipped: fewer --fraction_bits"
    row: dict[str, Any] = {**group.columns[setting], "seed": group.seeds[place]}
    row["status"] = f"failed: {reason}" if reason else "ok"
    rounds = 0 if out is None else int(out["rounds"])
    row |= {"rounds_made": rounds} | program.traffic(rounds)
    names = dict.fromkeys(METRICS, math.nan)
    if group.rate is not None:
        names["clusters"] = math.nan
    if reason or out is None:
        return row | names | dict.fromkeys(_score_names(group), math.nan)
    row |= names | {"loss": float(out["loss"])}
    if group.rate is not None:
        return row | group.rate(place, [np.asarray(labels) for labels in out["labels"]])
    row["silhouette"] = float(out["silhouette"])
    scores = out.get("scores")
    if scores is None:
        return row | dict.fromkeys(_score_names(group), math.nan)
    row |= {name: float(value) for name, value in scores["all"]["pooled"].items()}
    row |= {f"{g}/{way}/{name}": float(scores[g][way][name]) for g, way, name in _SCORES}
    if group.every_round:
        row |= {
            f"{ROUNDS}{g}/{way}/{name}": _numbers(out["by_round"][g][way][name][:rounds])
            for g, way, name in _SCORES
        }
        row[f"{ROUNDS}bytes"] = _numbers(
            [sum(program.traffic(r + 1).values()) for r in range(rounds)]
        )
    return row


def _numbers(values: Sequence[Any]) -> str:
    """Several numbers as one cell of a table."""
    return " ".join(f"{float(value):.9g}" for value in values)


_SCORES = [
    (group, way, name)
    for group in GROUPS
    for way in ("pooled", "per_client")
    for name in ("acc", "nmi", "ari", "purity")
]


def _score_names(group: Group) -> list[str]:
    if group.rate is not None:
        return []
    names = ["/".join(names) for names in _SCORES]
    return names + [ROUNDS + name for name in (*names, "bytes")] * group.every_round


def planned_batch(program: Program, asked: int | None) -> int:
    """How many runs go together, for a group's program.

    `asked`, or what memory allows by the prediction; on a CPU no more than what caches may hold,
    since runs side by side there only help where a run is too small to keep the cores busy.
    """
    group, mesh = program.group, program.mesh
    least = 1 if mesh is None else mesh.shape["sweep"]
    n_runs = len(group.runs)
    if asked is None:
        found = program.predicted()
        # Shared data lies on every device of a mesh.
        room = (free_bytes() * _SHARE - found.shared_bytes) * least
        asked = max(1, int(room / found.run_bytes))
        if jax.default_backend() == "cpu":
            asked = min(asked, max(1, int(_CPU_CACHE / found.run_bytes)) * least)
    _, size = chunk_sizes(n_runs, asked)
    return -(-size // least) * least


_CPU_CACHE = 2**25  # bytes: of the last level of common processors
# Of free memory: predictions are not exact, and allocators do not pack perfectly.
_SHARE = 0.8
