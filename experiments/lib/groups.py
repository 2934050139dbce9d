"""From commands to groups of runs: commands that differ in traced numbers alone share a program.

commands = [parse([*arguments, f"--tau_m={t}"], algorithm="fmcsc") for t in (0.3, 0.5)]
groups = groups_of(commands, [{"tau_m": "0.3"}, {"tau_m": "0.5"}])
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.lib import runner
from experiments.lib.batches import Group, outline
from experiments.lib.command import Command, FolderSettings
from experiments.lib.data import DataSettings, count_classes, fingerprint, partitioned
from experiments.lib.ends import check_ends
from experiments.lib.references import internal_scores
from experiments.lib.settings import flags_of
from jaxfedmvc import data, engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.engine import batching, mesh
from jaxfedmvc.engine.steps import as_number
from jaxfedmvc.metrics import host

# The same set is asked for once for every program.
_load = functools.lru_cache(maxsize=4)(data.load)


@functools.lru_cache(maxsize=4)
def _fingerprint(*loaded: Any) -> str:
    return fingerprint(_load(*loaded))


def data_read(settings: DataSettings) -> dict[str, str]:
    """Returns the fingerprint of a set, by its name."""
    loaded = settings.dataset, settings.data_dir, settings.scale, settings.table
    return {str(settings.dataset): _fingerprint(*loaded)}


def data_of(groups: Iterable[Group]) -> dict[str, str]:
    """Returns fingerprints of the groups' data, by set; of one in several forms all of them."""
    found: dict[str, set[str]] = {}
    for group in groups:
        for name, mine in group.data.items():
            found.setdefault(name, set()).add(mine)
    return {name: " ".join(sorted(forms)) for name, forms in found.items()}


def groups_of(
    commands: Sequence[Command],
    columns: Sequence[dict[str, str]],
    *,
    every_round: bool = False,
    with_spent: bool = False,
) -> list[Group]:
    """Groups commands by program: alike in method, data, job and the method's static settings.

    A number that is switched off (None) is another program than a number, and so is a whole number
    where it means something else than a fraction.

    Args:
      commands: Any methods, on any data.
      columns: What names each command's runs in runs.csv.
      every_round: Whether every round is scored, see `Group`.
      with_spent: Whether rows of private methods say what a run spends, see `Group`.

    Raises:
      ValueError, OSError: What is wrong with a setting, or with the data.
    """
    together: dict[Any, list[int]] = {}
    hyperparams = [command.hyperparams() for command in commands]
    for i, (command, hyper) in enumerate(zip(commands, hyperparams, strict=True)):
        traced = {"algorithm", *flags_of(command.method.hyperparams), *flags_of(FolderSettings)}
        static = [(name, command.flags[name].value) for name in command.flags if name not in traced]
        kinds = tuple(as_number(number).dtype for number in jax.tree.leaves(hyper))
        key = (command.name, tuple(sorted(static)), jax.tree.structure(hyper), kinds)
        together.setdefault(key, []).append(i)
    return [
        _group(
            commands[members[0]],
            [columns[i] for i in members],
            [hyperparams[i] for i in members],
            every_round,
            with_spent,
        )
        for members in together.values()
    ]


def _group(
    command: Command,
    columns: list[dict[str, str]],
    hyperparams: list[Any],
    every_round: bool,
    with_spent: bool,
) -> Group:
    if command.data.dataset is None:
        raise ValueError("dataset: none is given; allowed is a named set or a path")
    if command.job.until_stable is not None:
        raise ValueError("until_stable: is for single jobs; runs of a sweep make all their rounds")
    vertical = command.method.topology == "vertical"
    group = (_of_agents if vertical else _of_clients)(command)
    group = group._replace(
        columns=columns,
        hyperparams=hyperparams,
        every_round=every_round,
        keep_from=command.job.keep_from,
    )
    # Whatever the algorithm itself refuses is found here, from shapes.
    for hyper in hyperparams:
        algorithm = group.make(hyper)
    views = [cohort.views for cohort in group.federation.cohorts]
    jax.eval_shape(functools.partial(_start, algorithm, group), views)
    check_ends(command, group.config, algorithm, group.federation)
    if command.job.secure_aggregation:
        runner.check_masks(command, group.config, hyperparams)
        engine.traffic(algorithm, group.federation)  # raises where a message would be read
    if with_spent and (of_run := command.hooks.spent) is not None:
        every = [of_run(group.config, hyper) for hyper in hyperparams]
        group = group._replace(spent=[one for one in every if one is not None] or None)
    return group


def _start(algorithm: FederatedAlgorithm, group: Group, views: Sequence[tuple[Any, ...]]) -> Any:
    """Returns the first states, with these features in the place of the outline's, which are none.

    Traced features are none to look at, while masks and ids stay what they are.
    """
    pairs = zip(group.federation.cohorts, views, strict=True)
    cohorts = tuple(dataclasses.replace(cohort, views=mine) for cohort, mine in pairs)
    federation = dataclasses.replace(group.federation, cohorts=cohorts)
    return engine.start(algorithm, federation, jax.random.key(0), participation=group.participation)


def _of_clients(command: Command) -> Group:
    """Returns a group without settings; the device holds the samples of all seeds once."""
    job = command.job
    runner.check_participation(command)
    if command.split.scale_by == "client":
        raise ValueError(
            "scale_by: got 'client' for a sweep, whose seeds share data; allowed is all"
        )
    dataset, parts = partitioned(command.data, command.split, job.all_seeds, _load)
    federation = outline(dataset.views, parts[0])
    n_clusters = count_classes(command.data, dataset.labels)
    config = command.config(n_clusters, federation.n_clients)
    if n_clusters is None:
        raise ValueError("n_clusters: the data set has no labels to count; give --n_clusters")
    over_clients = (mesh.parse_mesh(job.mesh) if job.mesh else {}).get("clients", 1) > 1
    return Group(
        columns=[],
        hyperparams=[],
        make=runner.maker(command, config, federation),
        source=batching.pooled(dataset.views, dataset.labels, parts, dealt=over_clients),
        federation=federation,
        seeds=job.all_seeds,
        rounds=command.rounds,
        n_clusters=n_clusters,
        participation=runner.participation_shares(federation, job),
        resample_participants=job.resample_participants,
        client_chunk=runner.client_chunk(job, job.mesh),
        data=data_read(command.data),
        config=config,
    )


def _of_agents(command: Command) -> Group:
    """Returns a group without settings; agents find the number of clusters themselves."""
    job = runner.prepare(command)
    hidden = [problem.federation.without_labels() for problem in job.problems]
    try:
        source = batching.stacked(hidden)
    except ValueError as error:
        raise ValueError(
            "seeds: agents of different seeds hold different numbers of features or samples, as"
            " --overlap makes them; sweep with one seed, or without it"
        ) from error

    def rate(place: int, labels: list[np.ndarray]) -> dict[str, float]:
        federation = job.problems[place].federation
        found = internal_scores(federation, labels)
        if federation.labels is not None:
            found |= host.score(federation, labels)["all"]["per_client"]
        return found

    return Group(
        columns=[],
        hyperparams=[],
        make=job.make,
        source=source,
        federation=hidden[0],
        seeds=command.job.all_seeds,
        rounds=command.rounds,
        n_clusters=None,
        participation=job.shares,
        resample_participants=command.job.resample_participants,
        client_chunk=command.job.client_chunk,
        rate=rate,
        data=job.data,
        config=job.config,
    )
