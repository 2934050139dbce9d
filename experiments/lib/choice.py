"""Jobs that choose a setting without labels: --n_clusters=auto, and what a family chooses.

--n_clusters=auto runs the method with several numbers of clusters.

Each draw leaves a fifth of the rows out, as every client could for itself, and runs the method with
each number. What is compared is how far draws agree, and the silhouette of their clusters; see
`jaxfedmvc.metrics.choice`. Methods with a traced `limit` run all numbers in one program, and those
of whose exchanges only the last ones read it are trained once a draw.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from experiments.lib import criterion, folder, plots, runner
from experiments.lib.command import Command, checked
from experiments.lib.criterion import Choice
from experiments.lib.data import Problem
from experiments.lib.hooks import Choosing
from experiments.lib.progress import Progress, require_tqdm
from experiments.lib.references import has_one_width
from jaxfedmvc import keys
from jaxfedmvc.engine.steps import Evaluation, Steps
from jaxfedmvc.engine.traffic import Traffic, of_run
from jaxfedmvc.federation import Cohort, Federation
from jaxfedmvc.metrics import choice as criteria

_LEFT_OUT = 0.2
# Stages whose results all numbers of clusters share where none of these reads the limit.
_TRAINING = {"start", "setup", "round", "done"}


@dataclasses.dataclass(frozen=True)
class ChoiceSettings:
    """How --n_clusters=auto chooses.

    Attributes:
      clusters_tried: With --n_clusters=auto, the numbers of clusters to choose from; those that a
        client has too few rows for are left out.
      clusters_draws: With --n_clusters=auto, how often a fifth of the rows is left out.
    """

    clusters_tried: tuple[int, ...] = tuple(range(2, 13))
    clusters_draws: int = 4

    def __post_init__(self) -> None:
        """Raises ValueError that names the setting."""
        if len(set(self.clusters_tried)) < 2 or min(self.clusters_tried) < 2:
            raise ValueError(
                f"clusters_tried: got {','.join(map(str, self.clusters_tried))!r}; allowed are two"
                " numbers or more, of 2 or more each"
            )
        if self.clusters_draws < 2:
            raise ValueError(
                f"clusters_draws: got {self.clusters_draws}; allowed is 2 or more, to compare"
            )


def run(command: Command) -> Path:
    """Runs a job, and before it chooses what is to be chosen without labels.

    That is the number of clusters, or what the method's family chooses.

    Returns:
      The result folder.
    """
    choosing = _choosing(command)
    if choosing is None:
        return runner.run(command)
    command = choosing.command
    folder.use_compilation_cache(command)
    plan = checked(choosing.plan)
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    name = f"{command.name}-{command.data.stem}"
    path = checked(partial(folder.open_folder, command, name, choosing.data(plan)))
    found = choosing.saved(path)
    if found is None:
        with Progress(command.folder.progress) as progress:
            found = choosing.make(plan, progress)
            for line in found.lines():
                progress.write(line)
        found.save(path, f"{command.name} on {command.data.stem}")
    return runner.run(choosing.applied(found), path, found)


def _choosing(command: Command) -> Choosing | None:
    if command.data.n_clusters != "auto":
        return None if command.hooks.choosing is None else command.hooks.choosing(command)
    return Choosing(
        command=command,
        plan=lambda: _planned(command, command.extra[-1]),
        data=lambda plan: plan.job.data,
        make=_chosen,
        saved=criterion.saved,
        applied=lambda found: _with_clusters(command, found.n_clusters),
    )


def _with_clusters(command: Command, n_clusters: int) -> Command:
    return command._replace(data=dataclasses.replace(command.data, n_clusters=n_clusters))


class _Plan(NamedTuple):
    """What is run to choose.

    Attributes:
      job: With the least number of clusters.
      drawn: Its federation without a fifth of the rows, for each draw.
      numbers: Of clusters that the method takes.
      notes: Why it does not take the others.
    """

    job: runner.Job
    drawn: list[Federation]
    numbers: list[int]
    notes: list[str]


def _planned(command: Command, settings: ChoiceSettings) -> _Plan:
    """Prepares the choice: everything that can be wrong is found here.

    Raises:
      ValueError: The method finds the number itself, or nothing that clients have in common, or
        takes fewer than two of the numbers.
    """
    if command.method.finds_n_clusters:
        raise ValueError(f"n_clusters: {command.name} finds the number of clusters itself")
    if command.method.private:
        raise ValueError(
            f"n_clusters: got 'auto'; epsilon of {command.name} is of one run, and choosing takes"
            " many on the same rows: give a number"
        )
    if command.job.mesh is not None:
        raise ValueError("mesh: is for a number of clusters that is known; allowed here is none")
    runner.start_devices(command.job)
    job = runner.prepare(_with_clusters(command, min(settings.clusters_tried)))
    algorithm = job.make(job.hyperparams)
    if not (algorithm.setup or algorithm.round or algorithm.finish):
        raise ValueError(
            f"n_clusters: clients of {command.name} exchange nothing, so that their clusters have"
            " nothing in common to choose by; give a number"
        )
    whole = job.federation.without_labels()
    drawn = [
        _thinned(whole, np.random.default_rng((command.job.seed, d)))
        for d in range(settings.clusters_draws)
    ]
    refused = {k: _refusal(job, drawn, k) for k in sorted(set(settings.clusters_tried))}
    numbers = [k for k, reason in refused.items() if reason is None]
    notes = [f"{k} clusters are not tried: {r}" for k, r in refused.items() if r is not None]
    if len(numbers) < 2:
        raise ValueError(
            "clusters_tried: allowed are two numbers that the method takes when a fifth of the rows"
            f" is left out; {notes[0]}"
        )
    return _Plan(job, drawn, numbers, notes)


def _chosen(plan: _Plan, progress: Progress) -> Choice:
    """Runs the method with each number on each draw, and chooses."""
    job, drawn, numbers = plan.job, plan.drawn, plan.numbers
    problem = job.problems[0]
    vertical = job.command.method.topology == "vertical"
    for line in plan.notes:
        progress.write(line)
    progress.write(
        f"choosing from {numbers[0]} to {numbers[-1]} clusters, by {len(drawn)} draws without a"
        " fifth of the rows each"
    )
    labels: dict[int, list[np.ndarray]] = {k: [] for k in numbers}
    silhouettes: dict[int, list[float]] = {k: [] for k in numbers}
    cost = pd.DataFrame(0.0, index=numbers, columns=["bytes_up", "bytes_down", "seconds"])
    began = time.perf_counter()
    for run in _runs(job, drawn, numbers, progress):
        federation, k = drawn[run.draw], run.n_clusters
        labels[k].append(_by_sample(federation, run.labels, len(problem.rows)))
        silhouettes[k].append(criteria.silhouette(_parts(problem, federation, run, vertical)))
        cost.loc[k] += [*run.sent, time.perf_counter() - began]
        began = time.perf_counter()
    tried = pd.DataFrame({"n_clusters": numbers})
    values = np.asarray([silhouettes[k] for k in numbers])
    tried["stability"] = [criteria.stability(labels[k]) for k in numbers]
    tried["silhouette"], tried["silhouette_std"] = values.mean(axis=1), values.std(axis=1, ddof=1)
    for d in range(len(drawn)):
        tried[f"silhouette_{d}"] = values[:, d]
    tried = tried.join(cost, on="n_clusters").astype({"bytes_up": int, "bytes_down": int})
    chosen = criteria.chosen(numbers, tried["stability"], tried["silhouette"])
    return Choice(chosen, tried)


def _thinned(federation: Federation, generator: np.random.Generator) -> Federation:
    """Returns a federation without a fifth of its samples; of one sample all rows go, or none."""
    n = 1 + max(int(np.max(cohort.sample_ids, initial=-1)) for cohort in federation.cohorts)
    kept = generator.random(n) >= _LEFT_OUT

    def thinned(cohort: Cohort) -> Cohort:
        ids = np.asarray(cohort.sample_ids)
        mask = np.asarray(cohort.mask) & kept[ids]
        order = np.argsort(~mask, axis=1, kind="stable")  # padding comes last
        mask, ids = (np.take_along_axis(x, order, axis=1) for x in (mask, ids))
        views = [np.take_along_axis(np.asarray(x), order[..., None], 1) for x in cohort.views]
        return dataclasses.replace(
            cohort,
            views=tuple(jnp.asarray(np.where(mask[..., None], x, 0)) for x in views),
            mask=jnp.asarray(mask),
            sample_ids=jnp.asarray(np.where(mask, ids, -1), jnp.int32),
        )

    return dataclasses.replace(federation, cohorts=tuple(map(thinned, federation.cohorts)))


def _maker(job: runner.Job, n_clusters: int) -> Callable[[Any], Any]:
    federation = job.federation
    config = job.command.config(n_clusters, federation.n_clients)
    return runner.maker(job.command, config, federation)


def _refusal(job: runner.Job, drawn: Sequence[Federation], n_clusters: int) -> str | None:
    """Returns why the method does not take this number of clusters; None if it does."""
    try:
        algorithm = _maker(job, n_clusters)(job.hyperparams)
        for federation in drawn:
            jax.eval_shape(lambda key, f=federation: algorithm.init(key, f), jax.random.key(0))
    except ValueError as error:
        return str(error)
    return None


# --- The runs -------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """What a run ended with.

    Attributes:
      draw: Its rows.
      n_clusters: That it made.
      labels: For each cohort [clients, rows].
      embedding: What all numbers of clusters of the draw are found in, or None: one that differs
        with their number, as spectral ones do, has no silhouettes to compare.
      sent: Bytes of all messages that no run before it counts already.
    """

    draw: int
    n_clusters: int
    labels: list[np.ndarray]
    embedding: list[np.ndarray] | None
    sent: Traffic


def _runs(
    job: runner.Job, drawn: Sequence[Federation], numbers: Sequence[int], progress: Progress
) -> Iterator[_Run]:
    """Makes the runs of all draws and numbers."""
    limited = _limited(job, numbers[-1], progress)
    if limited is None:
        for i, k in enumerate(numbers):
            one = job._replace(make=_maker(job, k))
            steps = runner.steps_of(one, on_call=progress.done)
            steps.compile(progress.compiling)
            for d, federation in enumerate(drawn):
                _expect(steps, job, progress, (len(numbers) - i) * len(drawn) - d, 1)
                found, sent = _whole(steps, job, federation, _key(job, d))
                progress.done("evaluate")
                yield _Run(d, k, found.labels, None, sent)
        return
    steps, with_limit = limited
    trains_once = not steps.stages_that_read("limit") & _TRAINING
    for d, federation in enumerate(drawn):
        key = _key(job, d)
        if trains_once:
            _expect(steps, job, progress, len(drawn) - d, len(numbers))
            state, made = runner.trained(steps, job, federation, key)
        for i, k in enumerate(numbers):
            this = steps.with_numbers(with_limit(k))
            if trains_once:
                found = this.evaluate(federation, key, state, max(made - 1, 0))
                runner.check_masked_sums(job.command.job, found.info)
                sent = steps.traffic()["finish"] if i else of_run(steps.traffic(), made)
            else:
                _expect(steps, job, progress, (len(drawn) - d) * len(numbers) - i, 1)
                found, sent = _whole(this, job, federation, key)
            progress.done("evaluate")
            yield _Run(d, k, found.labels, found.embedding if trains_once else None, sent)


def _key(job: runner.Job, draw: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(job.command.job.seed), keys.CHOICE + draw)


def _limited(
    job: runner.Job, most: int, progress: Progress
) -> tuple[Steps, Callable[[int], Any]] | None:
    """Returns programs for all numbers of clusters, where the method has a limit that is traced."""
    names = {field.name for field in dataclasses.fields(job.hyperparams)}
    if "limit" not in names:
        return None

    def with_limit(k: int) -> Any:
        return dataclasses.replace(job.hyperparams, limit=k)

    try:
        one = job._replace(make=_maker(job, most), hyperparams=with_limit(most))
        steps = runner.steps_of(one, on_call=progress.done)
    except ValueError:
        return None  # forms of the method that do without
    steps.compile(progress.compiling)
    return steps, with_limit


def _expect(steps: Steps, job: runner.Job, progress: Progress, runs: int, evaluations: int) -> None:
    """Tells the bar what is left of the choice: so many runs, each evaluated so often."""
    calls, rounds = steps.calls(), job.command.rounds
    left = {name: n * runs for name, n in calls["setup"].items()}
    left |= {name: n * runs * rounds for name, n in calls["round"].items()}
    left |= {name: n * runs * evaluations for name, n in calls["finish"].items()}
    at_most = steps.algorithm.done is not None  # a choice does not look at rounds
    progress.expect(left | {"evaluate": runs * evaluations}, steps.efforts(), at_most)


def _whole(
    steps: Steps, job: runner.Job, federation: Federation, key: jax.Array
) -> tuple[Evaluation, Traffic]:
    state, made = runner.trained(steps, job, federation, key)
    found = steps.evaluate(federation, key, state, max(made - 1, 0))
    runner.check_masked_sums(job.command.job, found.info)
    return found, of_run(steps.traffic(), made)


# --- What is compared -----------------------------------------------------------------------------


def _by_sample(federation: Federation, labels: Sequence[np.ndarray], n: int) -> np.ndarray:
    """Returns the cluster of every sample [n]; -1 for those that nobody holds in this draw."""
    found = np.full(n, -1)
    for cohort, mine in zip(federation.cohorts, labels, strict=True):
        mask = np.asarray(cohort.mask)
        found[np.asarray(cohort.sample_ids)[mask]] = mine[mask]
    return found


def _parts(
    problem: Problem, federation: Federation, found: _Run, vertical: bool
) -> list[criteria.Rows]:
    """Returns rows and clusters: rows of H where all numbers share one, else of the views."""
    if has_one_width(found.embedding):
        return [
            criteria.Rows({0: h[mask]}, labels[mask])
            for h, labels, mask in zip(
                found.embedding, found.labels, _masks(federation), strict=True
            )
        ]
    if vertical and problem.held is None:
        # One row a sample, with the views of all agents.
        labels = _by_sample(federation, found.labels, len(problem.rows))
        return [criteria.Rows(dict(enumerate(problem.views)), labels)]
    return [
        criteria.Rows({v: np.asarray(x)[mask] for v, x in cohort.by_view().items()}, labels[mask])
        for cohort, labels, mask in zip(
            federation.cohorts, found.labels, _masks(federation), strict=True
        )
    ]


def _masks(federation: Federation) -> list[np.ndarray]:
    return [np.asarray(cohort.mask) for cohort in federation.cohorts]
