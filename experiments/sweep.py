"""Grids of settings times seeds, as few programs as can be:

    python -m experiments.sweep --algorithm=fmcsc --grid="tau_m=0.1,0.5; tau_p=0.1,0.5" --seeds=5

Every flag of the algorithm's own binary is a flag here, presets included, and may be an axis of the
grid. Axes of numbers that are traced share a program; others group the runs, a program each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import base, grid, sweep_report, sweep_runs
from experiments.base import checked, seeds
from experiments.grid import Axis
from experiments.progress import ProgressBar, require_tqdm
from experiments.sweep_runs import Group, Ledger, Program
from jaxfedmvc import plots, sweep
from jaxfedmvc.algorithms import ALGORITHMS
from jaxfedmvc.federation import Federation

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
    "precision", "float32", ["float32", "tf32", "bfloat16"],
    "Of matrix products, where the device has a choice; sums are float32.",
)  # fmt: skip
flags.DEFINE_string("coordinator", None, "host:port of process 0, for a sweep over several hosts.")
flags.DEFINE_integer("num_processes", None, "Of the whole sweep, with --coordinator.")
flags.DEFINE_integer("process_id", None, "Of this process, from 0, with --coordinator.")

# The binary that knows an algorithm's flags, and what it is to be told.
_BINARIES = {
    "e_fkmvc": ("fedhk", {"method": "e_fkmvc"}),
    "fedhk_parafac2": ("fedhk", {"method": "parafac2"}),
    "fedhk_tucker": ("fedhk", {"method": "tucker"}),
    "fmcsc": ("fmcsc", {}),
    "mgcd": ("mgcd", {}),
}
# Flags of the binaries that say how a job is done and not what; no axis of a grid.
_NO_AXIS = {
    "algorithm", "batch", "checkpoint_every", "compilation_cache", "coordinator", "data_dir",
    "dry_run", "grid", "level", "mesh", "mode" , "num_processes", "output_dir", "precision",
    "process_id", "progress", "random", "resume", "seed", "seeds",
}  # fmt: skip
_PRECISIONS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "bfloat16"}
_SEED_OF_DRAWS = 0


# --- The algorithm's binary and its flags ---------------------------------------------------------


def binary_of(algorithm: str) -> tuple[str, dict[str, str]]:
    """Module and flags of an algorithm; methods with a vertical binary in common say which."""
    return _BINARIES.get(algorithm, ("vertcohirf", {}))


def import_binary(argv: Sequence[str]) -> ModuleType:
    """Imports the binary that `argv` asks for, and with it its flags.

    Raises:
      ValueError: An unknown algorithm, or none.
    """
    arguments = FLAGS.read_flags_from_files(list(argv))
    asked = "fmcsc"
    for i, argument in enumerate(arguments):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == "algorithm":
            asked = value if equals else "".join(arguments[i + 1 : i + 2])
    if asked not in ALGORITHMS:
        raise ValueError(f"algorithm: got {asked!r}; allowed are {', '.join(sorted(ALGORITHMS))}")
    name, settings = binary_of(asked)
    module = importlib.import_module(f"experiments.{name}")
    if "algorithm" not in FLAGS:
        flags.DEFINE_string("algorithm", asked, f"One of {', '.join(sorted(ALGORITHMS))}.")
    for flag, value in settings.items():
        FLAGS.set_default(flag, value)
    flags.adopt_module_key_flags(module)
    return module


def axis_flags() -> set[str]:
    """Names of the flags that may be an axis."""
    names = {
        flag.name
        for module, defined in FLAGS.flags_by_module_dict().items()
        if "experiments" in module
        for flag in defined
    }
    return names - _NO_AXIS


@contextlib.contextmanager
def flags_set(values: dict[str, str]) -> Iterator[None]:
    """Sets flags from text as the command line would, and puts them back.

    Raises:
      ValueError: A value that the flag does not take.
    """
    before = {name: dict(FLAGS[name].__dict__) for name in values}
    try:
        for name, text in values.items():
            flag = FLAGS[name]
            flag.present = 0
            if isinstance(flag.value, list) or isinstance(flag.parser, flags.ListParser):
                # A comma would end the value: 256x256x512, a+b.
                text = re.sub(r"(?<=\d)x(?=\d)|\+", ",", text)
            try:
                flag.parse(text)
            except flags.Error as error:
                raise ValueError(f"grid: {name}={text}: {error}") from error
            flag.using_default_value = False
        yield
    finally:
        for name, attributes in before.items():
            FLAGS[name].__dict__.update(attributes)


# --- From flags to groups of runs -----------------------------------------------------------------


def settings_of_flags(module: ModuleType) -> tuple[list[Axis], list[dict[str, str]]]:
    """The axes, and every setting of the grid as text.

    Raises:
      ValueError: A malformed grid or an axis that is no flag.
    """
    if FLAGS.grid is None:
        if FLAGS.random is not None:
            raise ValueError("random: there are no axes to draw from; give --grid")
        return [], [{}]
    axes = grid.parse(FLAGS.grid)
    known = axis_flags()
    for axis in axes:
        if axis.name not in known:
            traced = ", ".join(module.TRACED)
            rest = ", ".join(sorted(known - set(module.TRACED)))
            raise ValueError(
                f"grid: {FLAGS.algorithm} has no hyper-parameter {axis.name!r}; allowed are"
                f" {traced} (runs that differ in these share a program), and {rest}"
            )
    if FLAGS.random is None:
        return axes, grid.combinations(axes)
    return axes, grid.draws(axes, FLAGS.random, _SEED_OF_DRAWS)


def groups_of(module: ModuleType, settings: Sequence[dict[str, str]]) -> list[Group]:
    """The settings by program: alike in everything that is not traced.

    Raises:
      ValueError, OSError: What is wrong with a setting, or with the data.
    """
    together: dict[Any, list[int]] = {}
    hyperparams = []
    for i, setting in enumerate(settings):
        with flags_set(setting):
            hyper = module.hyperparams()
        static = tuple(sorted((n, v) for n, v in setting.items() if n not in module.TRACED))
        # A number that may be None (off) is another program where it is.
        together.setdefault((static, jax.tree.structure(hyper)), []).append(i)
        hyperparams.append(hyper)
    groups = []
    for members in together.values():
        with flags_set(settings[members[0]]):
            columns = [settings[i] for i in members]
            groups.append(_group(module, columns, [hyperparams[i] for i in members]))
    return groups


def _group(module: ModuleType, columns: list[dict[str, str]], hyperparams: list[Any]) -> Group:
    if hasattr(module, "vertical"):
        return _vertical_group(module, columns, hyperparams)
    from experiments import common  # its flags are those of horizontal binaries only

    dataset, parts, n_clusters = common.load_partitioned()
    federation = Federation.from_arrays(dataset.views, dataset.labels, partition=parts[0])
    federation.check_rows(n_clusters, f"as many as the {n_clusters} clusters")
    federation = sweep_runs.outline(federation)
    over_clients = _mesh_sizes().get("clients", 1) > 1
    chunk = FLAGS.client_chunk
    if chunk is None and jax.default_backend() == "cpu" and not over_clients:
        chunk = 1
    return _checked(Group(
        columns, hyperparams, module.maker(n_clusters, federation.without_labels()),
        sweep.pooled(dataset.views, dataset.labels, parts, dealt=over_clients),
        federation, seeds(), FLAGS.rounds, n_clusters,
        common.participation_shares(federation), FLAGS.resample_participants, chunk, None,
    ))  # fmt: skip


def _vertical_group(
    module: ModuleType, columns: list[dict[str, str]], hyperparams: list[Any]
) -> Group:
    from experiments import vertical  # as above

    everyone = [vertical.agents_of_flags(seed) for seed in seeds()]
    n_clusters = vertical.n_classes(everyone[0])
    hidden = [agents.federation.without_labels() for agents in everyone]

    def rate(place: int, labels: list[np.ndarray]) -> dict[str, float]:
        return vertical.rate(everyone[place], labels)

    return _checked(Group(
        columns, hyperparams, module.maker(n_clusters, hidden[0]), sweep.stacked(hidden),
        hidden[0], seeds(), module.rounds(), None, [1.0] * len(hidden[0].cohorts), False, None,
        rate,
    ))  # fmt: skip


def _checked(group: Group) -> Group:
    """The group, if its algorithm takes every setting and the data."""
    for hyper in group.hyperparams:
        algorithm = group.make(hyper)
    hidden = group.federation.without_labels()
    jax.eval_shape(lambda key: algorithm.init(key, hidden), jax.random.key(0))
    return group


def _mesh_sizes() -> dict[str, int]:
    return {} if FLAGS.mesh is None else sweep.parse_mesh(FLAGS.mesh)


def asked_batch() -> int | None:
    """Of the flag; None for auto.

    Raises:
      ValueError: Not a whole number that the mesh divides.
    """
    if FLAGS.batch == "auto":
        return None
    least = _mesh_sizes().get("sweep", 1)
    if not FLAGS.batch.isdecimal() or int(FLAGS.batch) < 1 or int(FLAGS.batch) % least:
        among = "" if least == 1 else f" that the mesh's sweep:{least} divides"
        raise ValueError(f"batch: got {FLAGS.batch!r}; allowed is auto, or a whole number{among}")
    return int(FLAGS.batch)


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
    sizes = _mesh_sizes()
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
    axes, settings = checked(partial(settings_of_flags, module))
    groups = checked(partial(groups_of, module, settings))
    asked = checked(asked_batch)
    if mesh is not None:
        for group in groups:
            checked(partial(sweep.check_mesh, mesh, group.federation))
    if FLAGS.dry_run:
        for line in plan(groups, mesh, asked):
            print(line)
        return
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    leads = jax.process_index() == 0
    stem = Path(FLAGS.dataset).stem.lower()
    folder = checked(lambda: _folder(f"sweep-{FLAGS.algorithm}-{stem}", leads))
    ledger = Ledger(folder, writes=leads)
    began = time.perf_counter()
    n_runs = sum(len(group.runs) for group in groups)
    with ProgressBar(n_runs) as bar:
        bar.advance(len(ledger.rows))
        bar.write(
            f"{n_runs} runs, {len(groups)} programs; {groups[0].federation.n_clients} clients"
        )
        compilations = checked(lambda: sweep_runs.execute(
            groups, ledger, batch=asked, mesh=mesh, on_batch=bar.advance, write=bar.write
        ))  # fmt: skip
    if leads:
        report(folder, axes, ledger.rows, compilations, time.perf_counter() - began)


def _folder(name: str, leads: bool) -> Path:
    """The result folder; processes that do not lead only read it."""
    if leads:
        return base.make_folder(name, FLAGS.resume)
    return Path(FLAGS.output_dir or ".")


def report(
    folder: Path,
    axes: Sequence[Axis],
    rows: Sequence[dict[str, Any]],
    compilations: int,
    seconds: float,
) -> None:
    """Prints the table and the best settings, and writes summary.csv, summary.json, the picture."""
    names = [axis.name for axis in axes]
    metrics = [name for name in (*sweep_runs.METRICS, "clusters") if name in rows[0]]
    summary = sweep_report.summarise(rows, names, metrics)
    labelled = any(np.isfinite(entry["acc_mean"]) for entry in summary)
    by = "acc" if labelled else "silhouette"
    base.write(folder / "summary.csv", sweep_runs.csv_text(summary))
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
        "algorithm": FLAGS.algorithm, "dataset": FLAGS.dataset, "runs": len(rows),
        "failed": len(failed), "compilations": compilations, "best": best, "seconds": seconds,
        "device": device, "versions": base.versions(),
    }  # fmt: skip
    base.write(folder / "summary.json", json.dumps(content, indent=1) + "\n")
    files = ["runs.csv", "summary.csv", "summary.json", *(path.name for path in drawn)]
    print(f"\n{seconds:.1f} s with {compilations} compilations")
    print(f"written: {folder}/ ({', '.join(files)})")


def launch() -> None:
    """Runs the binary: first the flags of the algorithm that is asked for, then all of them."""
    binary = checked(lambda: import_binary(sys.argv))
    base.launch(partial(main, binary))


if __name__ == "__main__":
    launch()
