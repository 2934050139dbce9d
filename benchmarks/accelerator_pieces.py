"""What `benchmarks.accelerator` measures; it runs this module, once for each piece.

    python -m benchmarks.accelerator_pieces JOB

JOB is an `accelerator.Job` as JSON. Rows are printed as JSON, a line each, as soon as they are
there. Imports of single pieces are theirs: a package that is missing fails no other.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator import PLANS, SEEDS, Job, Row
from benchmarks.commands import processor
from benchmarks.machine import TRIADS, median_seconds, seconds, take_turns, triad, warmed
from benchmarks.roofline import work_of
from jaxfedmvc import data, engine
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.fmcsc import fmcsc as method
from jaxfedmvc.algorithms.registry import configured
from jaxfedmvc.engine import batching
from jaxfedmvc.engine.effort import operations
from jaxfedmvc.engine.phases import chunk_sizes
from jaxfedmvc.engine.programs import compiler_options
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics.federation import tables
from jaxfedmvc.metrics.host import table_scores
from jaxfedmvc.tensor import parafac2, tucker

# Precisions of products, as jax names them.
PRECISIONS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "bfloat16"}
# On NVIDIA's devices jax takes "bfloat16" for TF32; these names leave no choice.
NVIDIA = {"float32": "float32", "tf32": "TF32_TF32_F32", "bfloat16": "BF16_BF16_F32"}

# (tau_m, tau_p, place of the seed)
Run = tuple[float, float, int]


# --- Shared by the measurements -------------------------------------------------------------------


def emit(part: str, status: str = "ok", **row: Any) -> None:
    """Hands a row to the process that asked for the piece."""
    print(json.dumps({"part": part, "status": status, **row}), flush=True)


def peak_mb() -> float | None:
    """Returns the peak of this process's memory on the device; None where it keeps no account."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] / 1e6 if "peak_bytes_in_use" in stats else None


def on_cpu() -> bool:
    """Whether there is no accelerator."""
    return jax.default_backend() == "cpu"


def has_tf32() -> bool:
    """Whether the device multiplies in TF32: NVIDIA's of compute capability 8 or more."""
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))  # others have names
    return capability.replace(".", "").isdigit() and float(capability) >= 8.0


def named(precision: str) -> str:
    """Returns jax's name of a precision of float32's products on this device."""
    return (NVIDIA if has_tf32() else PRECISIONS)[precision]


class Compiled:
    """A compiled program, to be called, and what it says of itself.

    Attributes:
      about: Columns of its rows: precision, compile_seconds, predicted_MB, flops, bytes, kernels,
        and flops_traced.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        precision: str = "float32",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Compiles a function for these arguments, with products of this precision.

        Args:
          function: To be compiled.
          *arguments: Of it.
          precision: A key of `PRECISIONS`.
          options: Of the compiler, beside those that the library gives it.
        """
        began = time.perf_counter()
        with jax.default_matmul_precision(named(precision)):
            traced = jax.jit(function, keep_unused=True).trace(*arguments)
            self._call = traced.lower().compile({**(compiler_options() or {}), **(options or {})})
        took = time.perf_counter() - began
        stats = self._call.memory_analysis()
        sizes = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
        self.about: Row = {
            "precision": precision,
            "compile_seconds": took,
            "predicted_MB": (sizes - stats.alias_size_in_bytes) / 1e6,
            # A check of the count below: twice the multiply-adds, before anything is optimised.
            "flops_traced": 2 * operations(traced.jaxpr),
        }
        try:
            work = work_of(self._call.as_text())
            self.about |= {"flops": work.flops, "bytes": work.bytes, "kernels": work.kernels}
        except (ValueError, KeyError, IndexError) as error:  # a text of a kind not seen before
            self.about["note"] = f"cannot read the program: {error!r}"

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program."""
        return self._call(*arguments)


def tried(function: Callable[[], Any]) -> Any:
    """Returns what a function does, or None where the device's memory does not suffice."""
    try:
        return function()
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not batching.is_out_of_memory(error):
            raise
        return None


# --- Runs of FMCSC --------------------------------------------------------------------------------


class Setting(NamedTuple):
    """FMCSC's runs: the data of `SEEDS` seeds, and settings.

    Attributes:
      data: "mnist_usps", "digits" or "generated".
      source: See `engine.batching`.
      config: As `hyper`, of the method.
      hyper: Its hyper-parameters.
      rounds: Of a run.
    """

    data: str
    source: batching.Source
    config: Any
    hyper: Any
    rounds: int

    @property
    def chunk(self) -> int | None:
        """`client_chunk`: one at a time on a CPU, all elsewhere."""
        return 1 if on_cpu() else None

    def federation(self) -> Federation:
        """Returns the federation of the first seed, on the device."""
        shared, by_seed = batching.place(self.source)
        return self.source.build(shared, jax.tree.map(lambda x: x[0], by_seed))

    def shortened(self, size: str) -> Setting:
        """Returns the same with fewer epochs and a single round, for what needs no whole run."""
        of_pretraining, of_round = PLANS[size]["shortened"]
        config = dataclasses.replace(
            self.config,
            pretrain_epochs=self.config.pretrain_epochs // of_pretraining,
            local_epochs=self.config.local_epochs // of_round,
            distill_epochs=self.config.distill_epochs // of_round,
        )
        return self._replace(config=config, rounds=1)


def preset() -> dict[str, Any]:
    """Reads the paper's settings of FMCSC on MNIST-USPS."""
    file = Path(__file__).parents[1] / "experiments/fmcsc/presets/mnist_usps.flags"
    lines = [line[2:] for line in file.read_text().splitlines() if line.startswith("--")]
    settings: dict[str, Any] = dict(line.split("=", 1) for line in lines)
    settings["hidden"] = tuple(map(int, settings["hidden"].split(",")))
    for name in set(settings) - {"dataset", "ratio", "hidden"}:
        settings[name] = float(settings[name]) if "." in settings[name] else int(settings[name])
    return settings


def setting_of(size: str, data_dir: str | None) -> Setting:
    """Returns FMCSC's runs at a size: the paper's, or small ones of scikit-learn's digits."""
    settings, plan, labels = preset() | PLANS[size]["fmcsc"], PLANS[size], None
    name, rounds = settings.pop("dataset"), settings.pop("rounds")
    n_clients, ratio = settings.pop("n_clients"), data.parse_ratio(settings.pop("ratio"))
    if size != "full":
        name, found = "digits", data.load("digits")
        views, labels = [x[: plan["samples"]] for x in found.views[:2]], found.labels
        labels = None if labels is None else labels[: plan["samples"]]
    else:
        try:
            found = data.load(name, data_dir)
            views, labels = list(found.views), found.labels
        except FileNotFoundError:
            rng = np.random.default_rng(0)
            name, views = "generated", [rng.random((5000, 784), np.float32) for _ in range(2)]
    partitions = [
        data.hybrid_partition(seed, len(views[0]), 2, n_clients, ratio=ratio)
        for seed in range(SEEDS)
    ]
    config, hyper = configured(METHODS["fmcsc"], settings, {"n_clusters": 10})
    return Setting(name, batching.pooled(views, labels, partitions), config, hyper, rounds)


class Batch:
    """The program of some of FMCSC's runs, side by side.

    Attributes:
      setting: Of the runs.
      size: How many.
      compiled: The program.
    """

    def __init__(
        self,
        setting: Setting,
        size: int,
        precision: str = "float32",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Compiles the program; see `Compiled`."""
        self.setting, self.size = setting, size
        self._placed = batching.place(setting.source)
        program = batching.batched(self._one_run, setting.source.build)
        arguments = self._arguments([(0.5, 0.5, 0)] * size)
        self.compiled = Compiled(
            program, *self._placed, *arguments, precision=precision, options=options
        )

    def run(self, runs: Sequence[Run]) -> Any:
        """Makes runs; the last is made again where they are fewer than the program's."""
        runs = [*runs, *[runs[-1]] * (self.size - len(runs))]
        return self.compiled(*self._placed, *self._arguments(runs))

    def acc(self, out: Any, n: int) -> float | None:
        """Returns the mean accuracy of the first n runs; None where the data has no labels."""
        if self.setting.data == "generated":
            return None
        return float(np.mean([table_scores(table)["acc"] for table in np.asarray(out)[:n]]))

    def row(self, n: int, took: float) -> Row:
        """Returns the columns of a row about n runs that took so many seconds."""
        row = {"seconds": took, "rate": n / took, "rate_unit": "runs/s", "peak_MB": peak_mb()}
        return row | {"data": self.setting.data, **self.compiled.about}

    def _one_run(self, hyper: Any, key: jax.Array, federation: Federation) -> Any:
        setting = self.setting
        result = engine.run(
            method(setting.config, hyper),
            federation,
            key,
            setting.rounds,
            client_chunk=setting.chunk,
        )
        if federation.labels is None:
            return result.labels
        return tables(federation, result.labels, setting.config.n_clusters).sum(axis=0)

    def _arguments(self, runs: Sequence[Run]) -> tuple[Any, np.ndarray, np.ndarray]:
        hypers = [self.setting.hyper.replace(tau_m=m, tau_p=p) for m, p, _ in runs]
        stacked = jax.tree.map(lambda *x: np.array(x, np.float32), *hypers)
        seeds = np.array([seed for *_, seed in runs], np.int32)
        return stacked, seeds, seeds


# --- The pieces -----------------------------------------------------------------------------------


def device(job: Job) -> None:
    """Says what jax has found."""
    found = jax.devices()[0]
    stats = found.memory_stats() or {}
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = processor(usable or 1)
    emit(
        "",
        device=cores if found.platform == "cpu" else found.device_kind,
        platform=found.platform,
        processor=cores,
        memory_gb=stats.get("bytes_limit", pages) / 1e9,
        jax=jax.__version__,
        # Where there is one, compile times are those of finding a program in it.
        compilation_cache=bool(jax.config.jax_compilation_cache_dir),  # type: ignore[attr-defined]
    )


def ceilings(job: Job) -> None:
    """Measures matrix products, streaming through memory, and passes of a loop."""
    n, entries = PLANS[job.size]["matmul"], PLANS[job.size]["triad"]
    for name in PRECISIONS:
        if name == "tf32" and not has_tf32():
            emit("matmul tf32", "left out", note="the device has no TF32")
            continue
        a = jax.random.normal(jax.random.key(0), (n, n))
        if name == "bfloat16":
            a = a.astype(jnp.bfloat16)  # and there is nothing to choose from
        product = Compiled(jnp.matmul, a, a, precision="tf32" if name == "tf32" else "float32")
        took = median_seconds(partial(product, a, a), 9)
        rate = 2 * n**3 / took
        row: Row = {"seconds": took, "unit": f"{n} x {n}", "rate": rate, "rate_unit": "FLOP/s"}
        emit(f"matmul {name}", precision=name, **row)
    program, stream = triad(entries)
    took = median_seconds(stream, 9)
    # What the compiler has made of it counts: passes that it fused would stream less.
    moved = work_of(program.as_text()).bytes
    unit = f"{TRIADS} triads of {entries * 4 / 1e6:.0f} MB"
    emit("memory", seconds=took, unit=unit, rate=moved / took, rate_unit="B/s")
    x, passes = jnp.ones(128), 1000
    loop = Compiled(lambda x: jax.lax.fori_loop(0, passes, lambda _, x: jnp.tanh(x), x), x)
    took = median_seconds(lambda: loop(x), 9) / (loop.about.get("kernels") or passes)
    emit("launch", seconds=took, unit="kernel in a loop")


def single_run(job: Job, options: Mapping[str, Any] | None = None) -> Row:
    """Measures a run of FMCSC, compiled with these options."""
    setting = setting_of(job.size, job.data_dir)
    batch = Batch(setting, 1, options=options)
    runs = [(setting.hyper.tau_m, setting.hyper.tau_p, 0)]
    out, took = warmed(partial(batch.run, runs), 3)
    acc = batch.acc(out, 1)
    return {"unit": f"run of {setting.rounds} rounds", "acc": acc, **batch.row(1, took)}


def fmcsc(job: Job) -> None:
    """Measures a run of FMCSC."""
    goal = "5 s on an H100 or H200" if job.size == "full" else None
    emit("run", goal=goal, **single_run(job))


# What XLA may do otherwise on a GPU, beside what the library tells it: products of cuBLAS, chosen
# as that does, and no search for faster ones.
OTHERWISE_COMPILED: dict[str, dict[str, Any]] = {
    "autotuning, as XLA does": {"xla_gpu_autotune_level": 4, "xla_gpu_enable_triton_gemm": True},
    # Products of XLA's own, with tiles that nobody chose.
    "no autotuning": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": True},
    "no expensive passes": {"xla_llvm_disable_expensive_passes": True},
}


def compiling(job: Job) -> None:
    """Measures FMCSC's run again, with other options of the compiler."""
    until, took = time.monotonic() + job.seconds, 0.0
    for name, options in OTHERWISE_COMPILED.items():
        if name in job.have:
            continue
        if on_cpu():
            emit(name, "left out", note="a CPU has options of its own; see benchmarks.compile")
            continue
        if time.monotonic() + took > until:
            emit(name, "skipped", note=f"the last took {took:.0f} s")
            continue
        began = time.monotonic()
        emit(name, **single_run(job, options))
        took = time.monotonic() - began


def batch_size(job: Job, n_runs: int, setting: Setting) -> int:
    """Returns how many runs go together: evened out, as memory holds them, few on a CPU."""
    if on_cpu():
        return chunk_sizes(n_runs, SEEDS)[1]
    run_mb = job.run_mb or Batch(setting, 1).compiled.about["predicted_MB"]
    by_memory = 0.7e3 * job.memory_gb / run_mb
    # Several batches must fit the time, if one run after the other is all that the device can do.
    by_time = job.seconds / 4 / job.run_seconds if job.run_seconds else SEEDS
    return chunk_sizes(n_runs, max(1, int(min(25, by_memory, by_time))))[1]


def sweep(job: Job) -> None:
    """Measures figure 2's grid, tau_m times tau_p times seeds, batch by batch.

    Every batch is timed once, as it takes long, and none comes before the first to warm up.
    """
    until = time.monotonic() + job.seconds
    setting, taus = setting_of(job.size, job.data_dir), PLANS[job.size]["taus"]
    runs = list(itertools.product(taus, taus, range(SEEDS)))
    # Batches of earlier calls are named by their runs, "runs 1-25".
    earlier = {int(part.split("-")[1]): took for part, took in job.have.items() if "-" in part}
    done, total, took = max(earlier, default=0), sum(earlier.values()), 0.0
    batch = None
    size = batch_size(job, len(runs), setting)
    while done < len(runs):
        if time.monotonic() + took > until:
            note = f"{done} of {len(runs)} runs made; {size} at a time take {took:.0f} s"
            emit("all", "skipped", note=note)
            return
        batch = batch or Batch(setting, size)
        mine, out = runs[done : done + size], list[Any]()

        def made(batch: Batch = batch, mine: Sequence[Run] = mine, out: list[Any] = out) -> Any:
            out.append(batch.run(mine))
            return out

        found = tried(partial(seconds, made))
        if found is None and size > 1:
            size, batch = size // 2, None
            continue
        if found is None:
            emit("all", "failed", note="out of memory with a single run")
            return
        took, total, done = found, total + found, done + len(mine)
        acc = batch.acc(out[0], len(mine))
        part, unit = f"runs {done - len(mine) + 1}-{done}", f"{size} runs at a time"
        emit(part, unit=unit, acc=acc, **batch.row(len(mine), took))
    goal = "360 s on an H100 or H200" if job.size == "full" else None
    rate: Row = {"rate": len(runs) / total, "rate_unit": "runs/s"}
    emit("all", seconds=total, unit=f"{len(runs)} runs", goal=goal, **rate)


def batches(job: Job) -> None:
    """Measures runs per second against the number of runs side by side, until that gains little."""
    until = time.monotonic() + job.seconds
    setting = setting_of(job.size, job.data_dir).shortened(job.size)
    before, took = 0.0, 0.0
    for size in PLANS[job.size]["batches"]:
        part = f"{size} at a time"
        if part in job.have:
            before = size / job.have[part]
            continue
        if time.monotonic() + 1.5 * took > until:
            emit(part, "skipped", note=f"the last size took {took:.0f} s")
            return
        began = time.monotonic()
        runs = [(0.5, 0.5, i % SEEDS) for i in range(size)]

        def measured(size: int = size, runs: Sequence[Run] = runs) -> tuple[Batch, float]:
            batch = Batch(setting, size)
            return batch, median_seconds(lambda: batch.run(runs), 3)

        found = tried(measured)
        if found is None:
            emit(part, "left out", note="out of memory")
            return
        batch, each = found
        took = time.monotonic() - began
        emit(part, unit="short runs", **batch.row(size, each))
        if size / each < 1.05 * before:
            return  # saturated
        before = size / each


def precision(job: Job) -> None:
    """Measures runs with coarser products, all seeds at a time, and their accuracy."""
    until = time.monotonic() + job.seconds
    setting = setting_of(job.size, job.data_dir)
    cases = {"": setting}
    if setting.data == "generated":  # of which no accuracy is known
        cases[", digits"] = setting_of("small", None)
    runs, took = [(0.5, 0.5, seed) for seed in range(SEEDS)], 3 * SEEDS * job.run_seconds
    for name, (suffix, of) in itertools.product(PRECISIONS, cases.items()):
        part = name + suffix
        if part in job.have:
            continue
        if name != "float32" and on_cpu():
            why = "a CPU computes float32 whatever it is told; see benchmarks.precision"
            emit(part, "left out", note=why)
            continue
        if name == "tf32" and not has_tf32():
            emit(part, "left out", note="the device has no TF32")
            continue
        if time.monotonic() + took > until:
            emit(part, "skipped", note=f"it may take {took:.0f} s")
            continue
        began = time.monotonic()
        batch = Batch(of, SEEDS, name)
        out, each = warmed(partial(batch.run, runs), 2)
        took = time.monotonic() - began
        unit = f"{SEEDS} runs at a time"
        emit(part, unit=unit, acc=batch.acc(out, SEEDS), **batch.row(SEEDS, each))


def memory(job: Job) -> None:
    """Compares the compiler's account of a round with what the device says was in use.

    The least comes first, since the device only knows the peak of all that went before.
    """
    setting = setting_of(job.size, job.data_dir).shortened(job.size)
    algorithm, key = method(setting.config, setting.hyper), jax.random.key(0)
    federation = setting.federation()
    state = jax.jit(lambda f: engine.start(algorithm, f, key))(federation)
    for chunk in PLANS[job.size]["chunks"]:

        def one_round(federation: Any, state: Any, chunk: int | None = chunk) -> Any:
            return engine.one_round(algorithm, federation, key, state, 0, client_chunk=chunk)[0]

        program = Compiled(one_round, federation, state)
        took = median_seconds(partial(program, federation, state), 3)
        row: Row = {"seconds": took, "unit": "short round", "peak_MB": peak_mb()}
        emit(f"{chunk or 'all'} clients at a time", data=setting.data, **row, **program.about)


def peer(job: Job) -> None:
    """Measures an eager PyTorch loop over clients beside this library, both with TF32."""
    import torch

    from benchmarks.fmcsc import compiled_parts
    from benchmarks.references.fmcsc import torch_loop

    setting = setting_of(job.size, job.data_dir).shortened(job.size)
    federation = setting.federation()
    with jax.default_matmul_precision(named("tf32")):
        ours, compiling, state = compiled_parts(setting.config, federation, setting.chunk)
    where = "GPU" if torch.cuda.is_available() else "CPU"
    for part, theirs in torch_loop(setting.config, federation).items():
        mine = partial(ours[part], federation, state)
        times = take_turns({"ours": mine, "theirs": theirs}, 3, in_a_turn=1)
        took = {who: statistics.median(each) for who, each in times.items()}
        emit(
            part,
            seconds=took["ours"],
            unit="short pre-training" if part == "pretrain" else "short round",
            compile_seconds=compiling[part],
            precision="tf32" if has_tf32() else "float32",
            ratio=took["theirs"] / took["ours"],
            data=setting.data,
            goal="20 x on a GPU" if job.size == "full" else None,
            note=f"torch {torch.__version__} on the {where}: {took['theirs']:.3g} s",
        )


def planted(n: int, equation: str, *shapes: tuple[int, ...]) -> jax.Array:
    """Draws n tensors of random factors, and a tenth of noise on top."""
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    parts = [jax.random.normal(k, (n, *s)) for k, s in zip(keys[1:], shapes, strict=True)]
    x = jnp.einsum(equation, *parts)
    return x + 0.1 * jnp.std(x) * jax.random.normal(keys[0], x.shape)


def decompositions(n: int) -> Iterator[tuple[str, Callable[[Any], Any], jax.Array]]:
    """Yields names, decompositions of a tensor, and n tensors each, as in `benchmarks.tensor`."""
    shape, ranks = (10, 64, 3), (6, 12, 3)
    x = planted(n, "nabc,nia,njb,nkc->nijk", ranks, *zip(shape, ranks, strict=True))
    yield "Tucker", lambda x: tucker.hooi(x, ranks, max_sweeps=20, tol=1e-6).tucker, x
    x = planted(n, "nsir,nsr,njr->nsij", (8, 10, 5), (8, 5), (64, 5))
    yield "PARAFAC2", lambda x: parafac2.parafac2(None, x, 5, max_sweeps=200).parafac2, x


def tensors(job: Job) -> None:
    """Measures batches of Tucker and PARAFAC2 decompositions of planted tensors with noise."""
    for n in PLANS[job.size]["tensors"]:
        for name, decompose, x in decompositions(n):
            if f"{name}, {n}" in job.have:
                continue
            program = Compiled(jax.vmap(decompose), x)
            took = median_seconds(partial(program, x), 3)
            rate = {"rate": n / took, "rate_unit": "tensors/s", "peak_MB": peak_mb()}
            row = {"seconds": took, "unit": f"{n} tensors", "data": "generated", **rate}
            emit(f"{name}, {n}", **row, **program.about)


MEASURES: dict[str, Callable[[Job], None]] = {
    "device": device,
    "ceilings": ceilings,
    "fmcsc": fmcsc,
    "compile": compiling,
    "sweep": sweep,
    "batch": batches,
    "precision": precision,
    "memory": memory,
    "torch": peer,
    "tensors": tensors,
}


if __name__ == "__main__":
    the_job = Job(**json.loads(sys.argv[1]))
    MEASURES[the_job.name](the_job)
