"""Runs per second of batched sweeps: `python -m benchmarks.sweep`.

The same FMCSC runs (settings of tau_m times seeds) are made
    (a) one after another with the compiled program of a single run,
    (b) by a process for each run, with the compiled program in jax's cache on disk,
    batched, so many at a time, and as `--batch=auto` of experiments.sweep would choose.
All in one process but (b), taking turns, compile time apart.

    --size=digits   12 clients, 3 views, the digits (default)
    --size=paper    24 clients, MNIST-USPS in the paper's widths; --pretrain_epochs scales it down
    --size=table1   all nine cells of the paper's table 1 on the sets that are there, five seeds, at
                    full length: for an accelerator
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags, logging

from benchmarks import commands
from benchmarks.commands import define_list, whole
from benchmarks.machine import device, take_turns
from experiments import fmcsc
from experiments.lib.batches import Program, planned_batch, row_of
from experiments.lib.command import parse
from experiments.lib.groups import Group, groups_of
from experiments.lib.runner import matmul_precision

FLAGS = flags.FLAGS
flags.DEFINE_enum("size", "digits", ["digits", "paper", "table1"], "What is run.")
define_list("batches", None, "Batch sizes; None: 2,4,8 on a CPU, 1 to 128 elsewhere.", whole(1))
flags.DEFINE_integer("pretrain_epochs", None, "None: 20 for digits, 5 for paper, 250 for table1.")
flags.DEFINE_integer("local_epochs", 5, "Epochs of a round; table1 has the paper's.")
flags.DEFINE_integer("rounds", 2, "Rounds of a run; table1 has 5.")
flags.DEFINE_integer("repeats", 2, "Turns; the median counts.", lower_bound=1)
flags.DEFINE_integer("processes", 2, "Runs of (b); 0 leaves it out.", lower_bound=0)
flags.DEFINE_enum("precision", "float32", ["float32", "tf32", "bfloat16"], "Of matrix products.")
flags.DEFINE_string("json", None, "Also write the numbers to this file.")
flags.DEFINE_bool("alone", False, "Internal: make one run, and end.")

_PRESETS = Path(fmcsc.__file__).parent / "presets"
_TAUS = ("0.1", "0.3", "0.5", "0.7", "1")
# Table 1's sets that are to be had.
_SETS = ("mnist_usps", "bdgp", "multi_fashion")
_RATIOS = ("2:1", "1:1", "1:2")


def group_of(arguments: list[str], taus: tuple[str, ...]) -> Group:
    """Returns the runs of all temperatures with five seeds."""
    arguments = [*arguments, "--seeds=5"]
    commands = [parse([*arguments, f"--tau_m={tau}"], algorithm="fmcsc") for tau in taus]
    (group,) = groups_of(commands, [{"tau_m": tau} for tau in taus])
    return group


def sized_group() -> Group:
    """Returns the runs of --size, five temperatures with five seeds."""
    small = FLAGS.size == "digits"
    sizes = ["--dataset=digits", "--n_clients=12", "--hidden=64", "--pretrain_epochs=20"]
    if not small:
        sizes = [f"--flagfile={_PRESETS / 'mnist_usps.flags'}", "--pretrain_epochs=5"]
    if FLAGS.pretrain_epochs is not None:
        sizes.append(f"--pretrain_epochs={FLAGS.pretrain_epochs}")
    epochs = [f"--local_epochs={FLAGS.local_epochs}", f"--distill_epochs={2 * FLAGS.local_epochs}"]
    return group_of([*sizes, *epochs, f"--rounds={FLAGS.rounds}"], _TAUS)


def process_seconds(n: int) -> list[float]:
    """Measures processes with one run each; a first one, not counted, fills the cache."""
    names = ("size", "local_epochs", "rounds", "precision", "pretrain_epochs")
    given = [f"--{name}={FLAGS[name].value}" for name in names if FLAGS[name].value is not None]
    took = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(n + 1):
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "benchmarks.sweep", "--alone", *given],
                check=True,
                env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache},
            )
            took.append(time.perf_counter() - began)
    return took[1:]


def compare() -> dict[str, Any]:
    """Measures the runs per second of all ways to make the same runs."""
    group = sized_group()
    planner = Program(group)
    auto, memory = planned_batch(planner, None), planner.memory()
    on_cpu = jax.default_backend() == "cpu"
    asked = FLAGS.batches or ([2, 4, 8] if on_cpu else [2**i for i in range(8)])
    sizes = sorted({1, auto, *asked})
    runs = group.runs * -(-max(sizes) // len(group.runs))
    variants: dict[str, Callable[[], Any]] = {}
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
    times = take_turns(variants, FLAGS.repeats)
    took_each = {name: statistics.median(found) for name, found in times.items()}
    single = counts[1] / took_each["1"]
    print(f"{group.federation.n_clients} clients, {memory.run / 1e6:.1f} MB a run")
    print(f"{'':28s}{'runs/s':>9s}{'ratio':>8s}{'first call, s':>15s}")
    rows = []
    for size in sizes:
        rate = counts[size] / took_each[str(size)]
        name = "(a) one after another" if size == 1 else f"batches of {size}"
        name += ", auto" * (size == auto)
        rows.append(
            {
                "name": name,
                "batch": size,
                "runs_per_second": rate,
                "ratio": rate / single,
                "first_call": compiling[size],
            }
        )
        print(f"{name:28s}{rate:9.3f}{rate / single:8.2f}{compiling[size]:15.1f}")
    if FLAGS.processes:
        rate = FLAGS.processes / sum(process_seconds(FLAGS.processes))
        rows.append({"name": "processes", "runs_per_second": rate, "ratio": rate / single})
        print(f"{'(b) a process for each run':28s}{rate:9.3f}{rate / single:8.2f}")
    return {"rows": rows, "bytes_of_a_run": memory.run, "auto": auto}


def table1() -> dict[str, Any]:
    """Measures the seconds of each cell of the paper's table 1, and its mean accuracy."""
    cells = {}
    for name in _SETS:
        for ratio in _RATIOS:
            arguments = [f"--flagfile={_PRESETS / name}.flags", f"--ratio={ratio}"]
            if FLAGS.pretrain_epochs is not None:
                arguments.append(f"--pretrain_epochs={FLAGS.pretrain_epochs}")
            group = group_of(arguments, ("0.5",))
            program = Program(group)
            size = planned_batch(program, None)
            batches = [(group.runs[i : i + size] * size)[:size] for i in range(0, 5, size)]
            program.run(batches[0])  # compiles
            began = time.perf_counter()
            found = [program.run(batch) for batch in batches]
            took = time.perf_counter() - began
            runs = [jax.tree.map(lambda x, i=i: x[i], f) for f in found for i in range(size)]
            acc = [row_of(program, *each)["acc"] for each in zip(group.runs, runs, strict=False)]
            cells[f"{name} {ratio}"] = {"seconds": took, "acc": acc}
            print(f"{name:14s}{ratio}{took:9.1f} s   ACC {np.mean(acc):.3f}")
    return cells


def main() -> None:
    """Measures and prints; see the module's docstring."""
    logging.set_verbosity(logging.WARNING)
    name = matmul_precision(FLAGS.precision, jax.default_backend())
    jax.config.update("jax_default_matmul_precision", name)
    if FLAGS.alone:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        group = sized_group()
        Program(group).run(group.runs[:1])
        return
    write = commands.results_to(FLAGS.json)
    print(f"{device()}; {commands.load()}")
    result = table1() if FLAGS.size == "table1" else compare()
    write({"size": FLAGS.size, "precision": FLAGS.precision} | result)


if __name__ == "__main__":
    commands.run(main)
