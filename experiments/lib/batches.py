"""Batches of runs on the host's side: what a run reports, and how batches are made, saved, halved.

    groups = groups_of(commands, columns)            # experiments.lib.groups
    ledger = Ledger(folder)                          # runs.csv and batches.csv
    execute(groups, ledger, progress=progress)       # makes what the ledger lacks
    ledger.rows                                      # a row a run

A `Group` is a set of runs with one program: they differ in seeds and in numbers that are traced. A
program returns each run's contingency tables, or its labels; scores are computed from them on the
host (`jaxfedmvc.metrics.host`). Sweeps and the tables of papers are built on it.
"""

from __future__ import annotations

import collections
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from experiments.lib.ends import with_ends
from experiments.lib.ledger import Ledger
from experiments.lib.progress import Progress
from experiments.lib.report import client_reports, flattened
from experiments.lib.text import counted
from jaxfedmvc import engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.data.partition import Part
from jaxfedmvc.engine import Traffic, batching
from jaxfedmvc.engine.batching import Source
from jaxfedmvc.engine.mesh import put, sharding
from jaxfedmvc.engine.phases import chunk_sizes
from jaxfedmvc.engine.programs import compiler_options
from jaxfedmvc.engine.steps import as_number
from jaxfedmvc.engine.traffic import of_run
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.messages.secure import any_unread
from jaxfedmvc.metrics import federation as federation_scores
from jaxfedmvc.metrics import host, simplified_silhouette
from jaxfedmvc.metrics.information import information

PyTree = Any
METRICS = (*host.METRICS, "loss", "silhouette", "information")
# What a run of a private method spends.
SPENT = ("epsilon", "delta")
# Before the names of columns that hold a number for each round, with blanks between.
ROUNDS = "rounds/"
# Of free memory: allocators do not pack perfectly.
_SHARE = 0.8
# Bytes of the last level of common processors' caches.
_CPU_CACHE = 2**25
# Programs that are compiled while another one runs.
_AHEAD = 2


class Group(NamedTuple):
    """Runs that share one program: every setting with every seed.

    Attributes:
      columns: For each setting what names it in runs.csv, as text.
      hyperparams: For each setting a pytree of numbers, alike in structure.
      make: `hyperparams -> algorithm`.
      source: Data of every seed.
      federation: That of the first seed, to count bytes, to check the mesh and to tell clients'
        kinds apart; its features are not read.
      seeds: Of the runs.
      rounds: Most rounds.
      n_clusters: K, the width of the contingency tables; None where `rate` scores labels instead.
      participation: Share for each cohort.
      resample_participants: Whether who takes part is drawn anew every round.
      client_chunk: Clients computed at once.
      rate: `(place of the seed, labels of each cohort [clients, rows]) -> columns of runs.csv`, on
        the host; for methods that find the number of clusters themselves.
      every_round: Whether every round is scored, as if it were the last, in columns that begin with
        `ROUNDS`.
      data: The fingerprint of the data set, by its name; nothing of data that no file holds.
      config: The method's static settings.
      spent: For each setting (epsilon, delta) of a run, in columns `SPENT`; delta is NaN where a
        run's server state has it, in its `spent`. None: no such columns.
      keep_from: If given, runs end with the round, from this one on, of whose clusters a view tells
        most, and a column says which; needs `n_clusters`.
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
    resample_participants: bool = False
    client_chunk: int | None = None
    rate: Callable[[int, list[np.ndarray]], dict[str, float]] | None = None
    every_round: bool = False
    data: Mapping[str, str] = {}
    config: Any = None
    spent: list[tuple[float, float]] | None = None
    keep_from: int | None = None

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(setting, seed's place) of every run; the seeds of a setting lie together."""
        n_settings, n_seeds = len(self.columns), len(self.seeds)
        return [(s, p) for s in range(n_settings) for p in range(n_seeds)]


def outline(views: Sequence[np.ndarray], partition: Sequence[Part]) -> Federation:
    """Returns the federation of a partition with zeros for features, which take no memory.

    For what reads shapes, masks and ids only; `Federation.from_arrays` has the data.
    """
    cohorts = tuple(
        Cohort(
            # NumPy's zeros stand in for arrays of JAX, which would take their memory.
            views=tuple(
                np.broadcast_to(np.float32(0), (*part.sample_ids.shape, views[v].shape[1]))  # type: ignore[misc]
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
    """Returns `(hyperparams, key, federation) -> outputs` of a whole run.

    Outputs are "rounds" made, and which was "kept" where the group asks for it; the last "loss",
    whether the model turned "nan" or a secure sum was "unread"; what was "spent", where the
    server's state tells it; and either "labels", or "silhouette", "information", the last "tables"
    and who took part, of the last round and, where the group asks for it, of every round.
    """

    def run(hyperparams: PyTree, key: jax.Array, federation: Federation) -> dict[str, Any]:
        algorithm, k = group.make(hyperparams), group.n_clusters
        labelled = federation.labels is not None

        def told(labels: Sequence[jax.Array]) -> jax.Array:
            assert k is not None
            return information(federation, labels, k)

        result = engine.run(
            algorithm,
            federation,
            key,
            group.rounds,
            participation=group.participation,
            resample_participants=group.resample_participants,
            client_chunk=group.client_chunk,
            n_clusters=k if group.every_round and labelled else None,
            keep=None if group.keep_from is None else told,
            keep_from=group.keep_from or 1,
        )
        ended = result.n_rounds if result.kept is None else result.kept
        loss = last_loss(result.info, ended)
        unknown = jnp.float32(jnp.nan)  # as where a method was done before its first round
        out: dict[str, Any] = {
            "rounds": result.n_rounds if algorithm.round else jnp.int32(0),
            "loss": unknown if loss is None else jnp.where(result.n_rounds > 0, loss, unknown),
            "nan": _has_nan((result.state.server, result.state.clients, loss)),
            "unread": any_unread(result.info),
        }
        if result.kept is not None:
            out["kept"] = result.kept
        if group.spent is not None and hasattr(result.state.server, "spent"):
            out["spent"] = result.state.server.spent
        if k is None:
            return out | {"labels": result.labels}
        embedding = None
        if algorithm.embed is not None:
            chunk = group.client_chunk
            embedding = engine.embed(algorithm, federation, result.state, client_chunk=chunk)
        out["silhouette"] = mean_silhouette(federation, embedding, result.labels, k)
        out["information"] = told(result.labels)
        if labelled:
            out["tables"] = federation_scores.tables(federation, result.labels, k)
            out["participants"] = result.state.participants
        if result.tables is not None:
            out["by_round"] = {"tables": result.tables, "participants": result.participants}
        return out

    return run


def last_loss(info: Mapping[str, Any], n_rounds: jax.Array) -> jax.Array | None:
    """Returns the mean over clients of their last round's loss; None if they report none."""
    reports = client_reports(info["rounds"]) if jax.tree.leaves(info["rounds"]) else []
    losses = [r["loss"] for r in reports if "loss" in r]
    if losses and losses[0].shape[0]:
        last = [loss[jnp.maximum(n_rounds - 1, 0)].ravel() for loss in losses]
        return jnp.mean(jnp.concatenate(last))
    return None


def _has_nan(tree: PyTree) -> jax.Array:
    """Whether models have become NaN, or a loss has."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum((jnp.any(jnp.isnan(x)) for x in floats), start=jnp.zeros((), bool))


def mean_silhouette(
    federation: Federation,
    embedding: Sequence[jax.Array] | None,
    labels: Sequence[jax.Array],
    k: int,
) -> jax.Array:
    """Computes the mean over rows of every client's own silhouette; no labels of data are seen.

    Args:
      federation: The data.
      embedding: For each cohort what the method clusters (H), [clients, rows, d]; None: its views.
      labels: For each cohort the clusters, [clients, rows].
      k: Static number of clusters; clients without two of them do not count.
    """
    if embedding is None:
        embedding = [jnp.concatenate(cohort.views, axis=-1) for cohort in federation.cohorts]
    total, count = jnp.zeros(()), jnp.zeros(())
    for x, mine, cohort in zip(embedding, labels, federation.cohorts, strict=True):
        values = jax.vmap(lambda h, found, mask: simplified_silhouette(h, found, k, mask))(
            x, mine, cohort.mask
        )
        rows = jnp.where(jnp.isnan(values), 0.0, jnp.sum(cohort.mask, axis=1))
        total += jnp.sum(jnp.where(rows > 0, values, 0.0) * rows)
        count += jnp.sum(rows)
    return total / count


# --- A group's program ----------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes on a device: of the data that all runs of a batch share, and of each run."""

    shared: int
    run: int

    def batch(self, size: int) -> int:
        """Returns those of a batch of so many runs."""
        return self.shared + size * self.run


class Program:
    """The batch program of a group, compiled once for each size of a batch.

    Attributes:
      group: Whose runs it makes.
      mesh: Devices that runs and clients are laid out on, or None.
      compilations: How often it was compiled.
      waited: Seconds that calls waited for compilation.
    """

    def __init__(self, group: Group, mesh: Mesh | None = None) -> None:
        """Prepares the program; nothing is read or compiled yet."""
        self.group, self.mesh = group, mesh
        self.compilations, self.waited = 0, 0.0
        self._data: Any = None
        self._compiled: dict[int, Any] = {}
        self._ahead: dict[int, Future] = {}
        self._stages: Mapping[str, Traffic] | None = None
        self._counting = threading.Lock()

    @property
    def least(self) -> int:
        """Runs of the smallest batch: one for each device of the mesh's axis of runs."""
        return 1 if self.mesh is None else self.mesh.shape["sweep"]

    def wait(self, size: int) -> None:
        """Waits until the program for batches of this size is compiled."""
        self._of_size(size)

    def run(self, runs: Sequence[tuple[int, int]]) -> PyTree:
        """Makes these runs; returns their outputs on the host, with a leading axis."""
        program = self._of_size(len(runs))
        return jax.device_get(program(*self._placed(), *self._arguments(runs)))

    def memory(self) -> Memory:
        """Returns what a batch takes, as the compiler planned the smallest one."""
        stats = self._of_size(self.least).memory_analysis()
        leaves = jax.tree.leaves(self._placed())
        shared = sum(x.addressable_shards[0].data.nbytes for x in leaves)
        total = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
        return Memory(shared, max(1, total - shared))

    def traffic(self, rounds: int) -> dict[str, int]:
        """Returns the bytes that all clients send and receive over a run of so many rounds."""
        with self._counting:
            if self._stages is None:
                self._stages = _with_ends(self.group, self._traffic_of_stages())
        sent = of_run(self._stages, rounds)
        return {"bytes_up": sent.up, "bytes_down": sent.down}

    def compile_ahead(self, size: int, compilers: ThreadPoolExecutor) -> None:
        """Has the program for batches of this size compiled while others run; for one device.

        No data are placed for it. What fails then is raised where the program is first needed.
        """
        # What of the caller's settings is its thread's own.
        device = jax.config.jax_default_device  # type: ignore[attr-defined]
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

        def compiled() -> Any:
            with jax.default_device(device), jax.default_matmul_precision(precision):
                self.traffic(0)
                return self._compile(size, batching.shapes(self.group.source))

        self._ahead[size] = compilers.submit(compiled)

    def _traffic_of_stages(self) -> Mapping[str, Traffic]:
        group = self.group
        algorithm = group.make(group.hyperparams[0])
        return engine.traffic(algorithm, group.federation, participation=group.participation)

    def _of_size(self, size: int) -> Any:
        if size not in self._compiled:
            ahead, began = self._ahead.pop(size, None), time.perf_counter()
            found = self._compile(size, self._placed()) if ahead is None else ahead.result()
            self.waited += time.perf_counter() - began
            # One at a time is kept: programs take memory, too.
            self._compiled = {size: found}
            self.compilations += 1
        return self._compiled[size]

    def _compile(self, size: int, data: Any) -> Any:
        program = batching.batched(one_run(self.group), self.group.source.build, self.mesh)
        # Arguments that it does not read lie on the device all the same, and count as memory.
        options: dict[str, Any] = {"keep_unused": True, "compiler_options": compiler_options()}
        if self.mesh is not None:
            options["out_shardings"] = sharding(self.mesh)
        arguments = *data, *self._arguments([(0, 0)] * size)
        return jax.jit(program, **options).lower(*arguments).compile()

    def _placed(self) -> Any:
        if self._data is None:
            self._data = batching.place(self.group.source, self.mesh)
        return self._data

    def _arguments(self, runs: Sequence[tuple[int, int]]) -> Any:
        hyper = [self.group.hyperparams[setting] for setting, _ in runs]
        stack = jax.tree.map(lambda *x: np.stack([as_number(v) for v in x]), *hyper)
        places = np.array([place for _, place in runs], np.int32)
        seeds = np.array(self.group.seeds, np.int32)[places]
        if self.mesh is None:
            return stack, seeds, places
        return put((stack, seeds, places), sharding(self.mesh, "sweep"))


def _with_ends(group: Group, stages: Mapping[str, Traffic]) -> Mapping[str, Traffic]:
    """Returns the bytes of the stages of a group's runs; every round may end with clusters."""
    if group.keep_from is None:
        return stages
    assert group.n_clusters is not None
    return with_ends(stages, group.federation.n_clients, group.n_clusters, kept=True)


def free_bytes() -> int:
    """Returns the memory that a program may take: of the accelerator, else of this machine."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def planned_batch(program: Program, asked: int | None) -> int:
    """Returns how many runs go together, for a group's program.

    `asked`, or what memory allows by the plan of the smallest batch, which is compiled for it
    unless there are no more runs. On a CPU no more than what caches may hold, since runs side by
    side there only help where a run is too small to keep the cores busy.
    """
    n_runs, least = len(program.group.runs), program.least
    if asked is None and n_runs > least:
        memory = program.memory()  # places the data, which then are no longer free
        asked = int(free_bytes() * _SHARE / memory.run)
        if jax.default_backend() == "cpu":
            asked = min(asked, _CPU_CACHE // memory.run)
        asked = max(1, asked) * least
    _, size = chunk_sizes(n_runs, asked or least)
    return -(-size // least) * least


# --- Batches --------------------------------------------------------------------------------------


def execute(
    groups: Sequence[Group],
    ledger: Ledger,
    *,
    batch: int | None = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    program: Callable[[Group], Program] | None = None,
) -> int:
    """Makes all runs that the ledger lacks; returns how many programs were compiled.

    Batches are halved where the device reports that its memory is used up. A run that does not fit
    the device by itself, or breaks off, is recorded as failed, and the others go on.

    Args:
      groups: Of runs with a program each.
      ledger: Receives every batch as it is finished.
      batch: Runs that go together; None plans it by memory, see `planned_batch`.
      mesh: Devices to lay runs and clients out on, or None.
      progress: Shows compilations, finished runs and the time left; None shows nothing.
      program: Makes the program of a group, if not a `Program` of whole batches; needs `batch`.
    """
    _share_progress(ledger, len(groups))
    left = {f"program {i}": len(g.runs) - ledger.done(i) for i, g in enumerate(groups)}
    if progress is not None:
        progress.expect(left)
    compilations = 0
    waiting = [(i, g) for i, g in enumerate(groups) if ledger.done(i) < len(g.runs)]
    ahead: collections.deque[tuple[int, Program]] = collections.deque()
    # Those of one group are compiled by several threads of their own.
    compilers = ThreadPoolExecutor(_AHEAD if program is None else 1)
    try:
        while waiting or ahead:
            while waiting and len(ahead) <= _AHEAD:
                place, group = waiting.pop(0)
                made = Program(group, mesh) if program is None else program(group)
                ahead.append((place, made))
                if mesh is None:
                    made.compile_ahead(_first_size(made, place, ledger, batch), compilers)
            place, made = ahead.popleft()
            if progress is not None:
                progress.compiling(place, len(groups), f"program {place}")
            _execute(made, place, ledger, batch, progress)
            compilations += made.compilations
            del made  # it takes memory
    finally:
        compilers.shutdown(cancel_futures=True)
    jax.clear_caches()
    return compilations


def _first_size(program: Program, place: int, ledger: Ledger, batch: int | None) -> int:
    """Returns the size of the group's program that is needed first: its own, or to plan by."""
    if place in ledger.sizes:
        return ledger.sizes[place]
    return program.least if batch is None else planned_batch(program, batch)


def _execute(
    program: Program, place: int, ledger: Ledger, batch: int | None, progress: Progress | None
) -> None:
    """Makes the runs of a group that the ledger lacks."""
    write = print if progress is None else progress.write
    runs = program.group.runs
    opened = time.perf_counter()
    program.traffic(0)
    if place not in ledger.sizes:
        # Kept before the first batch: a resumed job must not plan by another day's memory.
        began = time.perf_counter()
        size = as_the_first(planned_batch(program, batch))
        ledger.add(place, size, [], time.perf_counter() - began)
    size = ledger.sizes[place]
    prepared = time.perf_counter() - opened  # bytes and plans need compiled programs, too
    while (done := ledger.done(place)) < len(runs):
        part = runs[done : done + size]
        began, waited = time.perf_counter(), program.waited
        try:
            program.wait(size)
            if progress is not None:
                progress.running(f"program {place}")
            # The last batch is filled up, so that one program does for all.
            out = program.run(part + part[-1:] * (size - len(part)))
            rows = [row_of(program, run, _of(out, i)) for i, run in enumerate(part)]
        except (jax.errors.JaxRuntimeError, MemoryError) as error:
            if jax.process_count() > 1:
                raise  # the others wait in this very batch
            if batching.is_out_of_memory(error) and size > program.least:
                size = max(program.least, size // 2 // program.least * program.least)
                ledger.add(place, size, [], 0.0)
                write(f"out of memory: going on with {counted(size, 'run')} at a time")
                continue
            write(f"a batch broke off ({_first_line(error)}); its runs are made one by one")
            rows = [_alone(program, size, run) for run in part]
        ledger.add(place, size, rows, time.perf_counter() - began, program.waited - waited)
        if progress is not None:
            progress.done(f"program {place}", len(part), prepared + program.waited - waited)
            prepared = 0.0


def as_the_first(numbers: Any) -> Any:
    """Returns the first process's numbers; all processes call this at the same point."""
    if jax.process_count() == 1:
        return numbers
    return jax.tree.map(int, multihost_utils.broadcast_one_to_all(numbers))


def _share_progress(ledger: Ledger, n_groups: int) -> None:
    """Tells the other processes what the first one's folder holds."""
    mine = [(ledger.done(place), ledger.sizes.get(place, 0)) for place in range(n_groups)]
    for place, (done, size) in enumerate(as_the_first(mine)):
        if size:
            ledger.keep(place, size, done - ledger.done(place))


def _alone(program: Program, size: int, run: tuple[int, int]) -> dict[str, Any]:
    """Makes a run by itself, in a batch of copies: its failure is then nobody else's."""
    try:
        return row_of(program, run, _of(program.run([run] * size), 0))
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        return row_of(program, run, None, _first_line(error))


def _of(out: PyTree, i: int) -> PyTree:
    return jax.tree.map(lambda x: x[i], out)


def _first_line(error: BaseException) -> str:
    """Returns what an error says first; its name where it says nothing, as Python's MemoryError."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


# --- Rows of runs.csv -----------------------------------------------------------------------------


def row_of(
    program: Program, run: tuple[int, int], out: PyTree | None, reason: str = ""
) -> dict[str, Any]:
    """Returns a run's line in runs.csv; scores of a failed run are NaN, its setting is there."""
    group, (setting, place) = program.group, run
    if out is not None and bool(out["nan"]):
        reason = "NaN in the model"
    elif out is not None and bool(out["unread"]):
        reason = "a secure sum cannot be read, or values were clipped: fewer --fraction_bits"
    rounds = 0 if out is None else int(out["rounds"])
    row: dict[str, Any] = {**group.columns[setting], "seed": group.seeds[place]}
    row |= {"status": f"failed: {reason}" if reason else "ok", "rounds_made": rounds}
    row |= program.traffic(rounds) | dict.fromkeys(METRICS, math.nan)
    if group.keep_from is not None:
        row["round_kept"] = 0 if out is None else int(out["kept"])
    if group.spent is not None:  # by runs that failed, too
        epsilon, delta = group.spent[setting]
        own_delta = math.nan if out is None or "spent" not in out else float(out["spent"][1])
        row |= zip(SPENT, (epsilon, own_delta if math.isnan(delta) else delta), strict=True)
    if group.n_clusters is None:
        row["clusters"] = math.nan
    else:
        row |= flattened(None) | _round_columns(program, None, rounds)
    if reason or out is None:
        return row
    row["loss"] = float(out["loss"])
    if group.n_clusters is None:
        assert group.rate is not None
        return row | group.rate(place, [np.asarray(labels) for labels in out["labels"]])
    row |= {name: float(out[name]) for name in ("silhouette", "information")}
    if "tables" in out:
        scores = _scores_of(group.federation, out["tables"], out["participants"])
        row |= {**scores["all"]["pooled"], **flattened(scores)}
    return row | _round_columns(program, out.get("by_round"), rounds)


def _scores_of(federation: Federation, tables: np.ndarray, participants: PyTree) -> host.Scores:
    """Scores contingency tables [clients, classes, clusters] by groups of clients."""
    return host.group_scores(tables, host.members(federation, participants))


def _round_columns(program: Program, by_round: PyTree | None, rounds: int) -> dict[str, Any]:
    """Returns the scores of every round and the bytes sent until then, one cell a column."""
    if not program.group.every_round:
        return {}
    names = [*flattened(None), "bytes"]
    if by_round is None:
        return dict.fromkeys((ROUNDS + name for name in names), math.nan)
    rows = [
        flattened(_scores_of(program.group.federation, **_of(by_round, r)))
        | {"bytes": sum(program.traffic(r + 1).values())}
        for r in range(rounds)
    ]
    return {ROUNDS + name: " ".join(f"{row[name]:.9g}" for row in rows) for name in names}
