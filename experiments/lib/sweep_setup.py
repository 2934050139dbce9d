"""What a sweep runs: the algorithm's binary, whose flags are the axes, and the groups of runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import grid, sweep_runs
from experiments.base import given, seeds
from experiments.grid import Axis
from experiments.sweep_runs import Group
from jaxfedmvc import data
from jaxfedmvc.algorithms import ALGORITHMS
from jaxfedmvc.engine import batching as sweep

FLAGS = flags.FLAGS

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
    "algorithm",
    "batch",
    "checkpoint_every",
    "compilation_cache",
    "coordinator",
    "data_dir",
    "dry_run",
    "grid",
    "mesh",
    "num_processes",
    "output_dir",
    "precision",
    "process_id",
    "progress",
    "random",
    "resume",
    "seed",
    "seeds",
}
_SEED_OF_DRAWS = 0
# The same set is asked for once for every program.
_load = functools.lru_cache(maxsize=4)(data.load)


# --- The algorithm's binary and its flags ---------------------------------------------------------


def binary_of(algorithm: str) -> tuple[str, dict[str, str]]:
    """Module and flags of an algorithm; methods with a vertical binary in common say which."""
    return _BINARIES.get(algorithm, ("vertcohirf", {}))


def import_binary(argv: Sequence[str]) -> ModuleType:
    """Imports the binary that `argv` asks for, FMCSC's if it does not, and with it its flags.

    Raises:
      ValueError: An unknown algorithm, or a flagfile that cannot be read.
    """
    asked = given(argv, "algorithm", "fmcsc")
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


def check_flags(module: ModuleType) -> None:
    """Checks what only a sweep can say of the binary's flags.

    Raises:
      ValueError: A flag that contradicts --algorithm, or that a sweep has no use for.
    """
    for name, value in binary_of(FLAGS.algorithm)[1].items():
        if FLAGS[name].value.removeprefix("person_") != value:
            raise ValueError(
                f"{name}: got {FLAGS[name].value} with --algorithm={FLAGS.algorithm}; allowed are"
                f" {value}, person_{value}"
            )
    if "level" in FLAGS and FLAGS.level is not None:
        raise ValueError("level: a sweep scores the final clusters; leave it out")


def axis_flags(module: ModuleType) -> set[str]:
    """Names of the flags that may be an axis."""
    names = {
        flag.name
        for name, defined in FLAGS.flags_by_module_dict().items()
        if "experiments" in name
        for flag in defined
    }
    return names - _NO_AXIS - module.no_axis()


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
    known = axis_flags(module)
    for axis in axes:
        if axis.name not in known:
            traced = ", ".join(module.traced())
            traced += " (runs that differ in these share a program), and " if traced else ""
            rest = ", ".join(sorted(known - set(module.traced())))
            raise ValueError(
                f"grid: {FLAGS.algorithm} has no hyper-parameter {axis.name!r}; allowed are"
                f" {traced}{rest}"
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
        static = tuple(sorted((n, v) for n, v in setting.items() if n not in module.traced()))
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
    if hasattr(module, "vertical"):  # what vertical binaries are built on
        return _vertical_group(module, columns, hyperparams)
    from experiments import common  # its flags are those of horizontal binaries only

    dataset, parts, n_clusters = common.load_partitioned(_load)
    federation = sweep_runs.outline(dataset.views, parts[0])
    federation.check_rows(n_clusters, f"as many as the {n_clusters} clusters")
    shares = common.participation_shares(federation)
    over_clients = mesh_sizes().get("clients", 1) > 1
    chunk = FLAGS.client_chunk
    if chunk is not None and chunk < 1:
        raise ValueError(f"client_chunk: got {chunk}; allowed is 1 or more")
    if chunk is None and jax.default_backend() == "cpu" and not over_clients:
        chunk = 1
    return _checked(
        Group(
            columns,
            hyperparams,
            module.maker(n_clusters, federation),
            sweep.pooled(dataset.views, dataset.labels, parts, dealt=over_clients),
            federation,
            seeds(),
            FLAGS.rounds,
            n_clusters,
            shares,
            FLAGS.resample_participants,
            chunk,
            None,
        )
    )


def _vertical_group(
    module: ModuleType, columns: list[dict[str, str]], hyperparams: list[Any]
) -> Group:
    from experiments import vertical  # as above

    everyone = [vertical.agents_of_flags(seed) for seed in seeds()]
    n_clusters = vertical.n_classes(everyone[0])
    hidden = [agents.federation.without_labels() for agents in everyone]

    def rate(place: int, labels: list[np.ndarray]) -> dict[str, float]:
        return vertical.rate(everyone[place], labels)

    try:
        source = sweep.stacked(hidden)
    except ValueError as error:
        raise ValueError(
            "seeds: agents of different seeds hold different numbers of features or samples, as"
            " --overlap makes them; sweep with one seed, or without it"
        ) from error
    return _checked(
        Group(
            columns,
            hyperparams,
            module.maker(n_clusters, hidden[0]),
            source,
            hidden[0],
            seeds(),
            module.rounds(),
            None,
            [1.0] * len(hidden[0].cohorts),
            False,
            None,
            rate,
        )
    )


def _checked(group: Group) -> Group:
    """The group, if its algorithm takes every setting and the data."""
    for hyper in group.hyperparams:
        algorithm = group.make(hyper)
    jax.eval_shape(lambda key: algorithm.init(key, group.federation), jax.random.key(0))
    return group


def mesh_sizes() -> dict[str, int]:
    """Of the flag; empty without one."""
    return {} if FLAGS.mesh is None else sweep.parse_mesh(FLAGS.mesh)


def asked_batch() -> int | None:
    """Of the flag; None for auto.

    Raises:
      ValueError: Not a whole number that the mesh divides.
    """
    if FLAGS.batch == "auto":
        return None
    least = mesh_sizes().get("sweep", 1)
    if not FLAGS.batch.isdecimal() or int(FLAGS.batch) < 1 or int(FLAGS.batch) % least:
        among = "" if least == 1 else f" that the mesh's sweep:{least} divides"
        raise ValueError(f"batch: got {FLAGS.batch!r}; allowed is auto, or a whole number{among}")
    return int(FLAGS.batch)
