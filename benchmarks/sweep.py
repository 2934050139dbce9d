"""Runs per second of batched sweeps: `python -m benchmarks.sweep`.

The same FMCSC runs (settings of tau_m times seeds) are made
    (a) one after another with the compiled program of a single run,
    (b) by a process for each run, with the compiled program in jax's cache on disk,
    batched, so many at a time, and as `--batch=auto` of experiments.sweep would choose.
All in one process but (b), taking turns, compile time apart. "of peak" is the FLOPs of the
prediction from shapes against this machine's measured matmul peak.

    --size=digits   12 clients, 3 views, the digits (default)
    --size=paper    24 clients, MNIST-USPS in the paper's widths; --pretrain_epochs scales it down
    --size=table1   all nine cells of the paper's table 1 on the sets that are there, five seeds, at
                    full length: for an accelerator
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from benchmarks.machine import bandwidth_of, machine_peaks, peak_of, take_turns
from experiments import sweep_runs
from experiments.sweep_runs import Group, Program
from jaxfedmvc import data
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.engine import batching as sweep

FLAGS = flags.FLAGS
flags.DEFINE_enum("size", "digits", ["digits", "paper", "table1"], "What is run.")
flags.DEFINE_list("batches", None, "Batch sizes; None: 2,4,8 on a CPU, 1 to 128 elsewhere.")
flags.DEFINE_integer("pretrain_epochs", None, "None: 20 for digits, 5 for paper, 250 for table1.")
flags.DEFINE_integer("local_epochs", 5, "Epochs of a round; table1 has the paper's.")
flags.DEFINE_integer("rounds", 2, "Rounds of a run; table1 has 5.")
flags.DEFINE_integer("repeats", 2, "Turns; the best counts.", lower_bound=1)
flags.DEFINE_integer("processes", 2, "Runs of (b); 0 leaves it out.", lower_bound=0)
flags.DEFINE_enum("precision", "float32", ["float32", "tf32", "bfloat16"], "Of matrix products.")
flags.DEFINE_string("json", None, "Also write the numbers to this file.")
flags.DEFINE_bool("alone", False, "Internal: make one run, and end.")

_HIDDEN = {"digits": (64,), "paper": (500, 500, 2000)}
_TAUS = (0.1, 0.3, 0.5, 0.7, 1.0)
# Table 1's sets that are to be had: classes, clients and local epochs of the paper.
_CELLS = {"mnist_usps": (10, 24, 25), "bdgp": (5, 12, 10), "multi_fashion": (10, 48, 25)}
_RATIOS = ((2, 1), (1, 1), (1, 2))


def group_of(
    name: str,
    config: FMCSCConfig,
    n_clients: int,
    ratio: tuple[int, int],
    rounds: int,
    taus: tuple[float, ...],
    n_seeds: int,
) -> Group:
    """The runs of all temperatures with all seeds."""
    dataset = data.load(name, FLAGS.data_dir)
    parts = [
        data.hybrid_partition(s, len(dataset.views[0]), len(dataset.views), n_clients, ratio=ratio)
        for s in range(n_seeds)
    ]
    chunk = 1 if jax.default_backend() == "cpu" else None
    return Group(
        [{"tau_m": str(tau)} for tau in taus],
        [FMCSCHyperparams(tau_m=tau) for tau in taus],
        partial(fmcsc, config),
        sweep.pooled(dataset.views, dataset.labels, parts),
        sweep_runs.outline(dataset.views, parts[0]),
        list(range(n_seeds)),
        rounds,
        config.n_clusters,
        [1.0] * len(parts[0]),
        False,
        chunk,
        None,
    )


def sized_group() -> Group:
    """The runs of --size, five temperatures with five seeds."""
    small = FLAGS.size == "digits"
    epochs = FLAGS.pretrain_epochs or (20 if small else 5)
    config = FMCSCConfig(
        10,
        hidden=_HIDDEN[FLAGS.size],
        pretrain_epochs=epochs,
        local_epochs=FLAGS.local_epochs,
        distill_epochs=2 * FLAGS.local_epochs,
        n_init=10,
    )
    name, n_clients = ("digits", 12) if small else ("mnist_usps", 24)
    return group_of(name, config, n_clients, (1, 1), FLAGS.rounds, _TAUS, 5)


def process_seconds(n: int) -> list[float]:
    """Wall times of processes with one run each; a first one, not counted, fills the cache."""
    told = [
        f"--{name}={FLAGS[name].value}" for name in ("size", "local_epochs", "rounds", "precision")
    ]
    for name in ("pretrain_epochs", "data_dir"):
        if FLAGS[name].value is not None:
            told.append(f"--{name}={FLAGS[name].value}")
    took = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(n + 1):
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "benchmarks.sweep", "--alone", *told],
                check=True,
                env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache},
            )
            took.append(time.perf_counter() - began)
    return took[1:]


def compare() -> dict[str, Any]:
    """Runs per second of all ways to make the same runs."""
    group = sized_group()
    auto = sweep_runs.planned_batch(planner := Program(group), None)
    need = planner.predicted()
    on_cpu = jax.default_backend() == "cpu"
    asked = FLAGS.batches or (["2", "4", "8"] if on_cpu else [str(2**i) for i in range(8)])
    sizes = sorted({1, auto, *map(int, asked)})
    runs = group.runs * -(-max(sizes) // len(group.runs))
    variants: dict[str, Callable[[], Any]] = dict(machine_peaks())
    compiling, counts = {}, {}
    for size in sizes:
        program = Program(group)
        began = time.perf_counter()
        program.run(runs[:size])
        compiling[size] = time.perf_counter() - began
        # As many runs for each, as far as that goes: a turn must not be over too soon.
        n_batches = max(1, max(sizes) // size) if on_cpu else 1
        counts[size] = n_batches * size

        def make(program: Program = program, size: int = size, n: int = n_batches) -> None:
            for b in range(n):
                program.run(runs[b * size : b * size + size])

        variants[str(size)] = make
    best = take_turns(variants, FLAGS.repeats)
    peak, bandwidth = peak_of(best.pop("matmul")), bandwidth_of(best.pop("triad"))
    single = counts[1] / best["1"]
    print(
        f"{group.federation.n_clients} clients, {need.run_flops / 1e9:.1f} GFLOP and"
        f" {need.run_bytes / 1e6:.1f} MB a run predicted; matmul peak {peak / 1e9:.0f} GFLOP/s,"
        f" memory {bandwidth / 1e9:.1f} GB/s"
    )
    print(f"{'':28s}{'runs/s':>9s}{'ratio':>8s}{'of peak':>9s}{'first call, s':>15s}")
    rows = []
    for size in sizes:
        rate = counts[size] / best[str(size)]
        name = "(a) one after another" if size == 1 else f"batches of {size}"
        name += ", auto" * (size == auto)
        rows.append(
            {
                "name": name,
                "batch": size,
                "runs_per_second": rate,
                "ratio": rate / single,
                "of_peak": rate * need.run_flops / peak,
                "first_call": compiling[size],
            }
        )
        print(
            f"{name:28s}{rate:9.3f}{rate / single:8.2f}{rate * need.run_flops / peak:9.0%}"
            f"{compiling[size]:15.1f}"
        )
    if FLAGS.processes:
        rate = FLAGS.processes / sum(process_seconds(FLAGS.processes))
        rows.append({"name": "processes", "runs_per_second": rate, "ratio": rate / single})
        print(f"{'(b) a process for each run':28s}{rate:9.3f}{rate / single:8.2f}")
    return {"rows": rows, "peak": peak, "bandwidth": bandwidth, "auto": auto}


def table1() -> dict[str, Any]:
    """Seconds of each cell of the paper's table 1, five seeds, and the mean accuracy."""
    cells = {}
    for name, (n_clusters, n_clients, epochs) in _CELLS.items():
        for ratio in _RATIOS:
            config = FMCSCConfig(
                n_clusters, local_epochs=epochs, pretrain_epochs=FLAGS.pretrain_epochs or 250
            )
            group = group_of(name, config, n_clients, ratio, 5, (0.5,), 5)
            program = Program(group)
            size = sweep_runs.planned_batch(program, None)
            batches = [group.runs[i : i + size] for i in range(0, 5, size)]
            program.run((batches[0] * size)[:size])  # compiles
            began = time.perf_counter()
            found = [program.run((b * size)[:size]) for b in batches]
            took = time.perf_counter() - began
            acc = np.concatenate([f["scores"]["all"]["pooled"]["acc"] for f in found])[:5]
            cells[f"{name} {ratio[0]}:{ratio[1]}"] = {"seconds": took, "acc": acc.tolist()}
            print(f"{name:14s}{ratio[0]}:{ratio[1]}{took:9.1f} s   ACC {acc.mean():.3f}")
    return cells


def main(_: list[str]) -> None:
    """Measures and prints; see the module's docstring."""
    logging.set_verbosity(logging.WARNING)
    names = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "bfloat16"}
    jax.config.update("jax_default_matmul_precision", names[FLAGS.precision])
    if FLAGS.alone:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        group = sized_group()
        Program(group).run(group.runs[:1])
        return
    out = open(FLAGS.json, "w") if FLAGS.json else None  # now: a bad path must not cost the run
    print(f"{jax.devices()[0].device_kind} ({jax.default_backend()}), jax {jax.__version__}")
    result = table1() if FLAGS.size == "table1" else compare()
    if out is not None:
        json.dump({"size": FLAGS.size, "precision": FLAGS.precision} | result, out, indent=1)
        out.close()


if __name__ == "__main__":
    app.run(main)
