"""The one loop over seeds and rounds: any method, with progress, resume, scores and a folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lib import folder, plots
from experiments.lib.command import Command, JobSettings, checked, fail
from experiments.lib.criterion import Found
from experiments.lib.data import Problem, count_classes, load_agents, load_clients
from experiments.lib.ends import are_shared, check_ends, looks_at_rounds, with_ends
from experiments.lib.hooks import SeedResult
from experiments.lib.progress import Progress, require_tqdm
from experiments.lib.references import ALONE, internal_scores, references, told
from experiments.lib.report import Report, flattened, losses_of
from experiments.lib.text import counted
from jaxfedmvc import engine, keys
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.checks import has_nan
from jaxfedmvc.engine import RunState, checkpoint, mesh
from jaxfedmvc.engine.phases import Traffic
from jaxfedmvc.engine.steps import Evaluation, Steps
from jaxfedmvc.federation import Federation
from jaxfedmvc.messages.secure import check_sums, secure_aggregation
from jaxfedmvc.metrics import host
from jaxfedmvc.metrics.choice import stability

_PRECISIONS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": "bfloat16"}
# On GPUs JAX's names of coarse precisions all mean TF32; those of algorithms mean what they say.
_GPU_PRECISIONS = _PRECISIONS | {"tf32": "TF32_TF32_F32", "bfloat16": "BF16_BF16_F32"}


class Job(NamedTuple):
    """A command with its data and its method, checked before anything is computed or written.

    Attributes:
      command: The parsed command line.
      problems: The data of each seed, all of the same shapes.
      n_clusters: K, or None where neither flag nor labels tell.
      config: The method's static settings.
      hyperparams: Its numbers.
      make: `hyperparams -> algorithm`.
      shares: Share of each cohort that takes part.
    """

    command: Command
    problems: list[Problem]
    n_clusters: int | None
    config: Any
    hyperparams: Any
    make: Callable[[Any], FederatedAlgorithm]
    shares: list[float]

    @property
    def federation(self) -> Federation:
        """That of the first seed."""
        return self.problems[0].federation

    @property
    def data(self) -> dict[str, str]:
        """The fingerprint of the first seed's data set, by its name."""
        return {str(self.command.data.dataset): self.problems[0].fingerprint}


def prepare(command: Command) -> Job:
    """Reads the data and builds the method: everything that can be wrong is found here.

    Raises:
      ValueError, OSError, ImportError: Says what is wrong.
    """
    if command.data.dataset is None:
        raise ValueError("dataset: none is given; allowed is a named set or a path")
    seeds = command.job.all_seeds
    if command.method.topology == "vertical":
        problems = [load_agents(command.data, command.split, seed) for seed in seeds]
    else:
        problems = load_clients(command.data, command.split, seeds)
    n_clusters = count_classes(command.data, problems[0].labels)
    federation = problems[0].federation
    shares = participation_shares(federation, command.job)
    check_participation(command)
    config = command.config(n_clusters, federation.n_clients)
    hyperparams = command.hyperparams()
    make = maker(command, config, federation)
    algorithm = make(hyperparams)
    # Shapes only: whatever the algorithm itself refuses is found here.
    for problem in problems:
        start = partial(engine.start, algorithm, problem.federation, participation=shares)
        jax.eval_shape(start, jax.random.key(0))
    job = Job(command, problems, n_clusters, config, hyperparams, make, shares)
    check_ends(command, config, algorithm, federation)
    if command.hooks.check is not None:
        command.hooks.check([command], [config])
    if command.job.secure_aggregation:
        check_masks(command, config, [hyperparams])
        engine.traffic(algorithm, federation)  # raises where a message would be read
    return job


def check_masks(command: Command, config: Any, hyperparams: Sequence[Any]) -> None:
    """Checks that a method's sums survive the fixed point of masks, at all these settings.

    Raises:
      ValueError: They do not.
    """
    if (check := command.hooks.check_masks) is not None:
        for hyper in hyperparams:
            check(config, hyper, command.job.masked_bits)


def check_participation(command: Command) -> None:
    """Checks that a method bears clients that are left out, or come late, if the job has such.

    Raises:
      ValueError: It cannot.
    """
    reasons = {
        "pooled": "gives labels to the rows that it is sent",
        "vertical": "needs every agent's features",
    }
    asked, reason = command.job.participation, reasons.get(command.method.topology)
    if all(share == 1 for share in asked):
        return
    if reason:
        raise ValueError(
            f"participation: got {asked} for {command.name}, which {reason}; allowed is 1"
        )
    if command.job.resample_participants and not command.hooks.late_clients:
        raise ValueError(
            f"resample_participants: who was not in the setup of {command.name} adds nothing to its"
            f" rounds; allowed is none, or participation 1, got {asked}"
        )


def maker(
    command: Command, config: Any, federation: Federation
) -> Callable[[Any], FederatedAlgorithm]:
    """Returns `hyperparams -> algorithm`, under secure aggregation if the job asks for it.

    Raises:
      ValueError: There is nothing to hide in.
    """
    make = partial(command.method.make, config)
    job = command.job
    if not job.secure_aggregation:
        return make
    if any(share < 1 for share in job.participation):
        raise ValueError(f"participation: got {job.participation} with masked sums; allowed is 1")
    for cohort in federation.cohorts:
        if cohort.n_clients < 2:
            raise ValueError(
                f"n_clients: one client alone holds the views {cohort.view_ids}, and a sum over it"
                " hides nothing; two of each kind are needed"
            )
    hide = partial(
        secure_aggregation,
        federation=federation,
        key=jax.random.key(keys.MASKS),
        fraction_bits=job.masked_bits,
        in_clear=job.in_clear,
    )
    return lambda hyperparams: hide(make(hyperparams))


def check_masked_sums(job: JobSettings, info: Sequence[Any]) -> None:
    """Ends the program where a masked sum could not be read; does nothing without masks.

    Args:
      job: Of the run.
      info: What each exchange of a stage returned.
    """
    if not job.secure_aggregation:
        return
    checked(partial(check_sums, info))
    if clipped := sum(int(np.sum(getattr(c, "clipped", 0))) for p in info for c in p["clients"]):
        fail(
            ValueError(
                f"fraction_bits: got {job.masked_bits}, and {clipped} values of messages lie"
                " beyond 2^(31 - bits) / clients; allowed are fewer bits"
            )
        )


def participation_shares(federation: Federation, job: JobSettings) -> list[float]:
    """Returns one share for each cohort; at least one client of each takes part.

    A share counts over all partial clients: .9 of two cohorts of three are three and two.

    Raises:
      ValueError: Not one or two numbers in (0, 1].
    """
    shares = job.participation
    if len(shares) not in (1, 2) or not all(0 < share <= 1 for share in shares):
        raise ValueError(
            f"participation: got {','.join(map(str, shares))!r}; allowed is one number in (0, 1],"
            " or two with a comma between"
        )
    sizes = np.array([cohort.n_clients for cohort in federation.cohorts])
    full = np.array([federation.holds_all_views(cohort) for cohort in federation.cohorts])
    counts = np.zeros(len(sizes))
    for kind, share in ((full, shares[0]), (~full, shares[-1])):
        counts[kind] = np.diff(np.round(share * np.cumsum(sizes[kind])), prepend=0)
    return [float(share) for share in np.maximum(counts, 1) / sizes]


def matmul_precision(precision: str, backend: str) -> str:
    """Returns JAX's name of a precision of products, for the devices of a backend."""
    return (_GPU_PRECISIONS if backend == "gpu" else _PRECISIONS)[precision]


def start_devices(job: JobSettings) -> Any:
    """Sets the precision of products and lays devices out; returns the mesh or None.

    Raises:
      ValueError: The mesh does not fit the devices.
    """
    sizes = {} if job.mesh is None else mesh.parse_mesh(job.mesh)
    n_devices = int(np.prod(list(sizes.values())))
    if n_devices > 1:
        # A CPU counts as one device unless told otherwise, before anybody asks what there is;
        # without effect on accelerators.
        jax.config.update("jax_num_cpu_devices", n_devices)
    precision = matmul_precision(job.precision, jax.default_backend())
    jax.config.update("jax_default_matmul_precision", precision)
    return None if job.mesh is None else mesh.make_mesh(sizes)


def client_chunk(job: JobSettings, devices: Any) -> int | None:
    """Returns how many clients are computed at once."""
    if job.client_chunk is None and devices is None and jax.default_backend() == "cpu":
        return 1  # measured fastest there: one client's weights stay in the cache
    return job.client_chunk


def steps_of(
    job: Job, devices: Any = None, on_call: Callable[[str], None] = lambda name: None
) -> Steps:
    """Returns the programs of a job, on the devices of `start_devices`; nothing is compiled yet."""
    settings = job.command.job
    return Steps(
        job.make,
        job.hyperparams,
        job.federation,
        participation=job.shares,
        resample_participants=settings.resample_participants,
        client_chunk=client_chunk(settings, devices),
        ahead=devices is None,
        on_call=on_call,
    )


def may_end(steps: Steps, job: JobSettings) -> bool:
    """Says whether a run may end before all its rounds are made."""
    return steps.algorithm.done is not None or job.until_stable is not None


def trained(steps: Steps, job: Job, federation: Federation, key: jax.Array) -> tuple[RunState, int]:
    """Makes the setup and all rounds of a run; returns the state after, and how many were made."""
    state, info = steps.setup(federation, key, steps.start(federation, key))
    check_masked_sums(job.command.job, info)
    made = 0
    while steps.goes_on(state, made, job.command.rounds):
        state, info = steps.one_round(federation, key, state, made)
        check_masked_sums(job.command.job, info)
        made += 1
    return state, made


# --- A job ----------------------------------------------------------------------------------------


def run(command: Command, path: Path | None = None, choice: Found | None = None) -> Path:
    """Runs a command from its data to its result folder; shows progress, resumes, scores.

    Bad input ends the program with one line on stderr.

    Args:
      command: The job.
      path: Its folder, if it is open already.
      choice: What was chosen for it without labels, if anything was.

    Returns:
      The result folder.
    """
    folder.use_compilation_cache(command)
    devices = checked(partial(start_devices, command.job))
    if devices is not None and devices.shape["sweep"] > 1:
        fail(
            ValueError(
                f"mesh: got {command.job.mesh!r}; allowed is clients:n, as runs go one by one"
            )
        )
    job = checked(partial(prepare, command))
    if devices is not None:
        checked(partial(mesh.check_mesh, devices, job.federation))
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    stem = command.data.stem
    if path is None:
        path = checked(partial(folder.open_folder, command, f"{command.name}-{stem}", job.data))
    if (path / "summary.json").exists():
        checkpoint.delete(path / _CHECKPOINT)
        print(f"finished already, nothing is left to do: {path}/")
        return path
    with Progress(command.folder.progress) as progress:
        runner = _Runner(job, path, devices, progress, choice)
        try:
            lines = runner.run_all()
        finally:
            runner.steps.close()
    for line in lines:
        print(line)
    return path


_CHECKPOINT = "checkpoint.npz"
# Rounds that must agree with those before them for a seed to end (--until_stable).
_STABLE = 3


class _Runner:
    """The state of a job while it runs."""

    def __init__(
        self, job: Job, path: Path, devices: Any, progress: Progress, choice: Found | None
    ) -> None:
        self.job, self.path, self.devices, self.progress = job, path, devices, progress
        self.choice = choice
        title = f"{job.command.name} on {job.command.data.stem}"
        self.report = Report(job.command, path, job.problems[0], title)
        if choice is not None:
            self.report.figures.extend(choice.figures())
        self.steps = steps_of(job, devices, progress.done)
        self.last: SeedResult  # of the last seed, which is drawn
        self.kept: tuple[int, RunState] | None = None  # of this seed, with --keep_from
        algorithm = self.steps.algorithm
        self.compacts = job.command.job.compact and algorithm.compact is not None
        self.store = path / _CHECKPOINT

    @property
    def command(self) -> Command:
        """That of the job."""
        return self.job.command

    def run_all(self) -> list[str]:
        """Runs the seeds that are left; returns the last lines for the terminal."""
        command, write = self.command, self.progress.write
        at = checked(self._reopened) if command.folder.resume else self._beginning()
        seed, made, state, rows = at
        if state is not None:
            write(f"goes on with seed {seed}, after round {made}")
        for line in self.job.problems[0].notes:
            write(line)
        write(self.job.federation.describe(self.job.problems[0].view_names))
        if command.job.rounds and not self.steps.algorithm.round:
            write(f"rounds: {command.name} exchanges nothing in them; --rounds repeats its result")
        given = command.data.n_clusters is not None and command.method.finds_n_clusters
        if given and self.choice is None:  # a choice says what it was told
            write(
                f"n_clusters: {command.name} finds the number of shared clusters itself;"
                f" {command.data.n_clusters} is that of the references"
                + ("; --shared_clusters sets its own" if "shared_clusters" in command.flags else "")
            )
        expect = partial(self._expect, seed, made, state is not None)
        self._show_again(rows)
        self.steps.compile(self.progress.compiling, until_ready=False, on_walked=expect)
        for seed_now, problem in zip(command.job.all_seeds, self.job.problems, strict=True):
            if seed_now >= seed:
                self._one_seed(seed_now, problem, made, state)
                made, state = 0, None
                self._expect(seed_now + 1, 0, begun=False)
        self.report.seconds["compile"] += self.steps.seconds
        facts = self._facts()
        lines = list(self.report.finish(self.last, self._traffic(), facts))
        checkpoint.delete(self.store)
        return lines

    # --- One seed ---------------------------------------------------------------------------------

    def _one_seed(self, seed: int, problem: Problem, made: int, state: RunState | None) -> None:
        command, steps = self.command, self.steps
        key = jax.random.key(seed)
        federation = self._placed(problem.federation)
        before, began = self.report.seconds["run"], time.perf_counter()
        compiled = steps.seconds

        def count_seconds() -> None:
            compiling = steps.seconds - compiled
            self.report.seconds["run"] = before + time.perf_counter() - began - compiling

        begins = True
        if state is None:
            state = steps.start(federation, key)
            state, info = steps.setup(federation, key, state)
            check_masked_sums(command.job, info)
            begins = steps.goes_on(state, 0, command.rounds)
            count_seconds()
            if begins:
                self._save(seed, 0, state)
        found = None
        if not begins:
            found = self._evaluate(federation, key, state, 0)
            self._add_round(seed, 0, problem, info, found, state)
        elif made and command.job.until_stable is not None:
            found = self._evaluate(federation, key, state, made - 1)
        while steps.goes_on(state, made, command.rounds):
            if self._is_stable(seed):
                break
            earlier = found
            state, info = steps.one_round(federation, key, state, made)
            check_masked_sums(command.job, info)
            made += 1
            found = None if self.compacts else self._evaluate(federation, key, state, made - 1)
            self._add_round(seed, made, problem, info, found, state, earlier)
            self._keep(seed, made, state)
            if self.compacts:
                state = steps.compacted(state)
            count_seconds()
            self._save(seed, made, state)
        least = command.job.until_stable
        if least is not None and made and not self._is_stable(seed):
            self.progress.write(
                f"seed {seed}: clusters still change after all {counted(made, 'round')}"
                f" (--until_stable={least}); --rounds allows more"
            )
        if self.kept is not None:
            n_made = made
            made, state = self.kept
            self.progress.write(
                f"seed {seed}: keeps round {made} of {n_made}, of whose clusters a view tells most"
            )
            found = found if made == n_made else None
        if found is None:  # compacting, an earlier round, or the last was made before a kill
            found = self._evaluate(federation, key, state, max(made - 1, 0))
        self._end_seed(seed, problem, found, state)
        self.kept = None
        count_seconds()

    def _evaluate(
        self, federation: Federation, key: jax.Array, state: RunState, r: int
    ) -> Evaluation:
        found = self.steps.evaluate(federation, key, state, r)
        self.progress.done("evaluate")
        labels = found.labels
        hooks = self.command.hooks
        if hooks.labels is not None:
            labels = hooks.labels(self.command.extra[0], found.state.server, labels)
        if has_nan((found.state.server, found.state.clients)):  # whatever it says is no clustering
            nowhere = [np.full(np.shape(mine), -1, np.int32) for mine in labels]
            return found._replace(labels=nowhere, embedding=None)
        check_masked_sums(self.command.job, found.info)
        return found._replace(labels=labels)

    def _keep(self, seed: int, made: int, state: RunState) -> None:
        """Keeps the state of the last round if a view tells most of its clusters."""
        if self._kept_round(seed) == made:
            # A copy, as the programs give their memory away.
            self.kept = made, jax.tree.map(jnp.array, state)

    def _kept_round(self, seed: int) -> int | None:
        """Returns the first of a seed's rounds of whose clusters a view tells most, if it may."""
        least = self.command.job.keep_from
        if least is None:
            return None
        rows = [r for r in self.report.rows if r["seed"] == seed and r["round"] >= least]
        rows = [r for r in rows if not math.isnan(r["information"])]
        return max(rows, key=lambda row: row["information"])["round"] if rows else None

    def _is_stable(self, seed: int) -> bool:
        """Whether a seed's last rounds left the clusters as they were."""
        least = self.command.job.until_stable
        last = [row.get("agreement") for row in self.report.rows if row["seed"] == seed][-_STABLE:]
        return least is not None and len(last) == _STABLE and all((a or 0) >= least for a in last)

    def _traffic(self) -> dict[str, Traffic]:
        """Returns the bytes of the stages; where every round ends with clusters, as its own."""
        found, job = self.steps.traffic(), self.command.job
        if not self.command.rounds or not looks_at_rounds(job):
            return found
        return with_ends(
            found,
            self.job.federation.n_clients,
            self.job.n_clusters or 1,
            stable=job.until_stable is not None,
            kept=job.keep_from is not None,
        )

    def _add_round(
        self,
        seed: int,
        made: int,
        problem: Problem,
        info: Any,
        found: Any,
        state: RunState,
        earlier: Any = None,
    ) -> None:
        federation = problem.federation
        scores = None
        if found is not None and federation.labels is not None:
            scores = host.score(federation, found.labels, state.participants)
        traffic = self._traffic()["round" if made else "setup"]
        row: dict[str, Any] = {"seed": seed, "round": made}
        row |= losses_of(info, federation) | flattened(scores)
        row |= {"bytes_up": traffic.up, "bytes_down": traffic.down}
        if self.command.job.until_stable is not None:
            both = [x.labels for x in (earlier, found) if x is not None]
            row["agreement"] = self._agreement(*both) if len(both) == 2 else None
        if self.command.job.keep_from is not None:
            assert found is not None
            row["information"] = told(federation, found.labels, self.job.n_clusters)
        if self.command.hooks.columns is not None and made:
            row |= self.command.hooks.columns(info, problem)
        self._show(row)
        self.report.add_round(row)

    def _agreement(self, old: Sequence[np.ndarray], new: Sequence[np.ndarray]) -> float:
        """Returns the Rand index of two clusterings; of clients that share none, their mean."""
        if not are_shared(self.steps.traffic()):
            cohorts = zip(old, new, strict=True)
            each = [stability(both) for a, b in cohorts for both in zip(a, b, strict=True)]
            return float(np.mean(each))
        return stability([_flat(old), _flat(new)])

    def _show(self, row: dict[str, Any]) -> None:
        if not self.report.rows:
            for line in self.report.header(row):
                self.progress.write(line)
        for line in self.report.lines(row):
            self.progress.write(line)

    def _end_seed(self, seed: int, problem: Problem, found: Any, state: RunState) -> None:
        command, k = self.command, self.job.n_clusters
        federation = problem.federation
        rows = [row for row in self.report.rows if row["seed"] == seed]
        result = SeedResult(
            seed, problem, jax.device_get(found.state.server), found.labels, found.embedding, rows
        )
        self.report.add_labels(result)
        if result.failed:
            self.progress.write(f"seed {seed}: failed, NaN in the model; no row is in any cluster")
        elif command.hooks.after_seed is not None:
            for line in command.hooks.after_seed(self.path, result, command.job.seeds):
                self.progress.write(line)
        rivals = {command.name: found.labels}
        if k is not None:
            rivals |= references(problem, k, seed, found.embedding)
            if command.hooks.references is not None:
                rivals |= command.hooks.references(problem, k, seed)
        self.report.references.append(
            {name: self._scored(federation, labels, state, name) for name, labels in rivals.items()}
        )
        self.last = result
        self.progress.done("references")

    def _scored(
        self, federation: Federation, labels: Sequence[np.ndarray], state: RunState, name: str
    ) -> dict[str, Any]:
        """Returns scores, if there are labels, and what clusters say of themselves."""
        internal = {"internal": internal_scores(federation, labels, self.job.n_clusters)}
        is_own = name == self.command.name and not are_shared(self.steps.traffic())
        if name == ALONE or is_own:  # each client's clusters are its own
            internal["internal"]["information"] = math.nan
        if federation.labels is None:
            return internal
        return {**host.score(federation, labels, state.participants), **internal}

    # --- Resuming ---------------------------------------------------------------------------------

    def _beginning(self) -> tuple[int, int, RunState | None, list[dict[str, Any]]]:
        return self.command.job.seed, 0, None, []

    def _save(self, seed: int, made: int, state: RunState | None) -> None:
        every = self.command.folder.checkpoint_every
        if not every or made % every:
            return
        report = self.report
        meta = {
            "seed": seed,
            "made": made,
            "rows": report.rows,
            "references": report.references,
            "seconds": report.seconds,
            "labels": self._size_of_labels(),
        }
        if self.command.job.keep_from is None:
            checkpoint.save(self.store, state, meta)
            return
        meta["kept"], kept = self.kept or (0, state)
        checkpoint.save(self.store, (state, kept), meta)

    def _size_of_labels(self) -> int:
        """Returns the bytes of labels.csv, which between seeds has the rows of those before."""
        path = self.path / "labels.csv"
        return path.stat().st_size if path.exists() else 0

    def _reopened(self) -> tuple[int, int, RunState | None, list[dict[str, Any]]]:
        """Returns where the job of the folder stands, and the rows of its rounds until there.

        Raises:
          ValueError: The checkpoint is damaged, or of another shape than this job's, or labels
            of seeds that ended before it are gone.
        """
        if not self.store.exists():
            (self.path / "labels.csv").unlink(missing_ok=True)
            return self._beginning()
        like = self.steps.state_shapes()
        keeps = self.command.job.keep_from is not None
        both = (like, like) if keeps else like
        saved, meta = checkpoint.restore(self.store, both, any_shape=self.compacts)
        # Copies, as the programs give their memory away.
        state, *kept = [
            jax.tree.map(jnp.array, state)._replace(
                participants=jax.tree.map(np.asarray, state.participants)
            )
            for state in (saved if keeps else [saved])
        ]
        if meta.get("kept"):
            self.kept = meta["kept"], kept[0]
        folder.keep_rows(self.path / "labels.csv", lambda table: table["seed"] < meta["seed"])
        size = meta.get("labels", 0)  # checkpoints of earlier versions do not say
        if size and self._size_of_labels() != size:
            raise ValueError(
                f"resume: {str(self.path / 'labels.csv')!r} is not as it was when seed"
                f" {meta['seed']} began; allowed is the file as the job left it, or a new folder"
            )
        self.report.references = meta["references"]
        self.report.seconds = meta["seconds"]
        return meta["seed"], meta["made"], state, meta["rows"]

    def _show_again(self, rows: Sequence[dict[str, Any]]) -> None:
        """Shows the rounds of a checkpoint; rounds.csv then holds these and no others."""
        (self.path / "rounds.csv").unlink(missing_ok=True)
        for row in rows:
            self._show(row)
            self.report.add_round(row)

    # --- The rest ---------------------------------------------------------------------------------

    def _placed(self, federation: Federation) -> Federation:
        hidden = federation.without_labels()
        if self.devices is None:
            return hidden
        return mesh.put(hidden, mesh.sharding(self.devices, "clients"))

    def _expect(self, seed: int, made: int, begun: bool) -> None:
        """Tells the progress bar what is left, of this seed and those after it."""
        job = self.command.job
        calls, n_left = self.steps.calls(), job.seed + job.seeds - seed
        rounds = n_left * self.command.rounds - made
        n_setups = n_left - begun
        left = {name: n * n_setups for name, n in calls["setup"].items()}
        left |= {name: n * rounds for name, n in calls["round"].items()}
        evaluated = n_left if self.compacts else max(rounds, n_left)
        left |= {name: n * evaluated for name, n in calls["finish"].items()}
        left |= {"evaluate": evaluated, "references": n_left}
        self.progress.expect(left, self.steps.efforts(), may_end(self.steps, job))

    def _facts(self) -> dict[str, Any]:
        job, hooks = self.command.job, self.command.hooks
        facts: dict[str, Any] = {"n_clusters": self.job.n_clusters}
        if job.keep_from is not None:
            facts["rounds_kept"] = [self._kept_round(seed) for seed in job.all_seeds]
        if self.choice is not None:
            facts |= self.choice.facts()
        if job.secure_aggregation:
            facts["secure_aggregation"] = {
                "covered": "where messages are summed, the server sees the sum and no message",
                "not_covered": [
                    f"phases in clear: {', '.join(job.in_clear) or 'none'}",
                    "what a sum itself tells; malicious clients or servers, dropout",
                    "this folder: losses and scores are computed in the clear, and the seed, from"
                    " which masks are drawn, stands in flags.txt",
                ],
            }
        if hooks.facts is not None:
            facts |= hooks.facts(self.job)
        return facts


def _flat(labels: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the clusters of all clients' rows, padding included, one after another."""
    return np.concatenate([np.ravel(mine) for mine in labels])
