"""Grids of settings times seeds, as few programs as can be:

    python -m experiments.sweep --algorithm=fmcsc --grid="tau_m=0.1,0.5; tau_p=0.1,0.5" --seeds=5

Every flag of the algorithm's own binary is a flag here, presets included, and may be an axis of the
grid. Axes of numbers that are traced share a program; others group the runs, a program each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import base, sweep_report, sweep_runs, sweep_setup
from experiments.base import checked
from experiments.grid import Axis
from experiments.ledger import Ledger, csv_text
from experiments.lib import plots
from experiments.progress import ProgressBar, require_tqdm
from experiments.sweep_runs import Group, Program
from experiments.sweep_setup import asked_batch, groups_of, mesh_sizes, settings_of_flags
from jaxfedmvc.engine import batching as sweep

FLAGS = flags.FLAGS

flags.DEFINE_string(
    "grid", None, "Axes: 'tau_m=0.1,0.5; learning_rate=log(1e-4,1e-2,5); hidden=64x64,256x256'."
)
flags.DEFINE_integer(
    "random", None, "So many settings drawn from the grid's axes instead of all.", lower_bound=1
)
flags.DEFINE_string(
    "batch", "auto", "Runs that go together; auto: as memory allows, see --dry_run."
)
flags.DEFINE_bool("dry_run", False, "Say what would be run, and what it takes, and end.")
flags.DEFINE_string(
    "mesh", None, "Devices that runs and clients are laid out on: sweep:2,clients:4"
)
flags.DEFINE_enum(
    "precision",
    "float32",
    ["float32", "tf32", "bfloat16"],
    "Of matrix products, where the device has a choice; sums are float32.",
)
flags.DEFINE_string("coordinator", None, "host:port of process 0, for a sweep over several hosts.")
flags.DEFINE_integer("num_processes", None, "Of the whole sweep, with --coordinator.")
flags.DEFINE_integer("process_id", None, "Of this process, from 0, with --coordinator.")

_PRECISIONS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "bfloat16"}


# --- Devices --------------------------------------------------------------------------------------


def start_devices() -> Any:
    """Joins the other processes, makes devices, and lays them out; the mesh or None.

    Raises:
      ValueError: Flags that do not fit together, or to the devices.
    """
    together = (FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
    if any(x is not None for x in together):
        if None in together or FLAGS.mesh is None:
            raise ValueError(
                "coordinator: --coordinator, --num_processes, --process_id and --mesh go together"
            )
    sizes = mesh_sizes()
    n_devices = int(np.prod(list(sizes.values()) or [1]))
    n_here, rest = divmod(n_devices, FLAGS.num_processes or 1)
    if rest:
        raise ValueError(
            f"mesh: got {FLAGS.mesh!r}, {n_devices} devices, which {FLAGS.num_processes} processes"
            " do not share evenly"
        )
    if n_here > 1:
        # A CPU counts as one device unless told otherwise; without effect on accelerators.
        jax.config.update("jax_num_cpu_devices", n_here)
    if FLAGS.coordinator is not None:
        jax.distributed.initialize(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id)
    jax.config.update("jax_default_matmul_precision", _PRECISIONS[FLAGS.precision])
    return sweep.make_mesh(sizes) if sizes else None


# --- The job --------------------------------------------------------------------------------------


def plan(groups: Sequence[Group], mesh: Any, asked: int | None) -> Iterator[str]:
    """What --dry_run prints: runs, programs, and memory and work of each, from shapes alone."""
    n_runs = sum(len(group.runs) for group in groups)
    yield f"{n_runs} runs, {len(groups)} compilations"
    free = sweep_runs.free_bytes()
    yield f"free memory: {free / 1e9:.2f} GB on {jax.devices()[0].device_kind}"
    yield (
        f"{'program':>8s}{'runs':>7s}{'batch':>7s}{'MB a batch':>12s}{'MB a run':>10s}"
        f"{'GFLOP a run':>13s}"
    )
    for i, group in enumerate(groups):
        program = Program(group, mesh)
        size = sweep_runs.planned_batch(program, asked)
        found = program.predicted()
        yield (
            f"{i:8d}{len(group.runs):7d}{size:7d}{found.batch_bytes(size) / 1e6:12.1f}"
            f"{found.run_bytes / 1e6:10.2f}{found.run_flops / 1e9:13.3g}"
        )


def main(module: ModuleType) -> None:
    """Runs the sweep that the flags describe."""
    base.use_compilation_cache()
    mesh = checked(start_devices)
    module.defaults()
    checked(partial(sweep_setup.check_flags, module))
    axes, settings = checked(partial(settings_of_flags, module))
    groups = checked(partial(groups_of, module, settings))
    asked = checked(asked_batch)
    if mesh is not None:
        for group in groups:
            checked(partial(sweep.check_mesh, mesh, group.federation))
    leads = jax.process_index() == 0
    if FLAGS.dry_run:
        for line in checked(lambda: list(plan(groups, mesh, asked))) if leads else ():
            print(line)
        return
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    folder = _folder(f"sweep-{FLAGS.algorithm}-{Path(FLAGS.dataset).stem.lower()}", leads)
    ledger = Ledger(folder)
    n_runs = sum(len(group.runs) for group in groups)
    with ProgressBar(n_runs) as bar:
        bar.advance(len(ledger.rows))
        write = bar.write if leads else lambda line: None
        n_clients = groups[0].federation.n_clients
        write(f"{n_runs} runs of {n_clients} clients, {len(groups)} programs")
        compilations = checked(
            lambda: sweep_runs.execute(
                groups, ledger, batch=asked, mesh=mesh, on_batch=bar.advance, write=write
            )
        )
    if folder is not None:
        report(folder, axes, ledger, compilations)


def _folder(name: str, leads: bool) -> Path | None:
    """The result folder of the process that leads; the others end if it has none."""
    folder, wrong = None, None
    if leads:
        try:
            folder = base.make_folder(name, FLAGS.resume)
        except (ValueError, OSError) as error:
            wrong = error
    if not sweep_runs.as_the_first(int(folder is not None)):
        base.fail(wrong or ValueError("the first process says what is wrong with the folder"))
    return folder


def report(folder: Path, axes: Sequence[Axis], ledger: Ledger, compilations: int) -> None:
    """Prints the table and the best settings, and writes summary.csv, summary.json, the picture."""
    rows, seconds = ledger.rows, ledger.seconds
    names = [axis.name for axis in axes]
    metrics = [name for name in (*sweep_runs.METRICS, "clusters") if name in rows[0]]
    summary = sweep_report.summarise(rows, names, metrics)
    labelled = any(np.isfinite(entry["acc_mean"]) for entry in summary)
    by = "acc" if labelled else "silhouette"
    base.write(folder / "summary.csv", csv_text(summary))
    shown = [
        m for m in metrics if m != "purity" and np.isfinite([e[f"{m}_mean"] for e in summary]).any()
    ]
    print()
    for line in sweep_report.table(summary, names, shown, by=by):
        print(line)
    best = sweep_report.best_lines(summary, names, by="acc")
    print()
    for line in best:
        print(line)
    failed = [row for row in rows if row["status"] != "ok"]
    if failed:
        print(f"{len(failed)} runs failed; runs.csv says why")
    drawn = sweep_report.draw(folder, summary, axes, by)
    device = f"{jax.devices()[0].device_kind} ({jax.default_backend()})"
    content = {
        "algorithm": FLAGS.algorithm,
        "dataset": FLAGS.dataset,
        "runs": len(rows),
        "failed": len(failed),
        "compilations_here": compilations,
        "seconds": seconds,
        "best": best,
        "device": device,
        "versions": base.versions(),
    }
    base.write(folder / "summary.json", json.dumps(content, indent=1) + "\n")
    files = ["runs.csv", "summary.csv", "summary.json", *(path.name for path in drawn)]
    print(f"\n{seconds:.1f} s, {compilations} compilations in this process")
    print(f"written: {folder}/ ({', '.join(files)})")


def launch() -> None:
    """Runs the binary: first the flags of the algorithm that is asked for, then all of them."""
    binary = checked(lambda: sweep_setup.import_binary(sys.argv))
    base.launch(partial(main, binary))


if __name__ == "__main__":
    launch()
