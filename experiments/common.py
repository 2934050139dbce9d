"""Flags and the main loop that the binaries of horizontal methods share.

A binary adds its own flags, builds its algorithm, and hands it to `main_job`; everything else
(data, partition, rounds, scores, references, files) is the same for all methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import base
from experiments.base import checked, seeds
from experiments.progress import ProgressBar, require_tqdm
from experiments.report import Place, Report
from jaxfedmvc import data, engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.local_kmeans import local_kmeans
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.engine.phases import Progress, RunState
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics.federation import score

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(base)
# Keys of the references; the engine folds small numbers into the same key.
_POOLED, _BOUND = 2**30, 2**30 + 1
_COMPILERS = 4  # programs compiled at once; each takes some hundred MB meanwhile

flags.DEFINE_integer("n_clients", 12, "Clients of all kinds.", lower_bound=1)
flags.DEFINE_string("ratio", "1:1", "Clients with all views : clients with a part of them.")
flags.DEFINE_integer("partial_views", 1, "Views that a partial client holds.", lower_bound=1)
flags.DEFINE_integer("samples_per_client", None, "Samples of each client; None deals out all.")
flags.DEFINE_float("dirichlet", None, "Label skew beta; None deals out at random.")
flags.DEFINE_integer("rounds", 5, "Communication rounds.", lower_bound=1)
flags.DEFINE_list("participation", ["1.0"], "Share taking part; or two: of full-view, of others.")
flags.DEFINE_bool("resample_participants", False, "Draw who takes part anew every round.")
flags.DEFINE_integer(
    "client_chunk",
    None,
    "Clients computed at once; bounds memory. None: 1 on CPU, all on an accelerator.",
)


class Task(NamedTuple):
    """What one binary runs, checked before anything is computed or written."""

    algorithm: FederatedAlgorithm
    federations: list[Federation]  # one for each seed, all of the same shapes
    n_clusters: int
    pooled: np.ndarray  # [n, sum of D_v]: all views of all samples, for the reference only


class Partitioned(NamedTuple):
    """A data set and how each seed deals it out."""

    dataset: data.Dataset
    parts: list[tuple[data.Part, ...]]  # one division for each seed, all of the same shapes
    n_clusters: int


def load_partitioned(load: Callable[..., data.Dataset] = data.load) -> Partitioned:
    """The set of the flags, divided for each seed; read by `load`.

    Raises:
      ValueError, OSError: What is wrong with the flags or the data.
    """
    dataset = load(FLAGS.dataset, FLAGS.data_dir, FLAGS.scale)
    if FLAGS.n_clusters is not None:
        n_clusters = FLAGS.n_clusters
    elif dataset.labels is not None:
        n_clusters = len(np.unique(dataset.labels))
    else:
        raise ValueError("n_clusters: the data set has no labels to count; give --n_clusters")
    parts = [
        data.hybrid_partition(
            seed,
            n_samples=len(dataset.views[0]),
            n_views=len(dataset.views),
            n_clients=FLAGS.n_clients,
            ratio=data.parse_ratio(FLAGS.ratio),
            partial_views=FLAGS.partial_views,
            samples_per_client=FLAGS.samples_per_client,
            dirichlet=FLAGS.dirichlet,
            labels=dataset.labels,
        )
        for seed in seeds()
    ]
    return Partitioned(dataset, parts, n_clusters)


def load_federations() -> tuple[list[Federation], int, np.ndarray]:
    """One federation for each seed, the number of clusters, and the pooled raw views.

    Raises:
      ValueError, OSError: What is wrong with the flags or the data.
    """
    dataset, parts, n_clusters = load_partitioned()
    federations = [
        Federation.from_arrays(dataset.views, dataset.labels, partition=part) for part in parts
    ]
    return federations, n_clusters, np.concatenate(dataset.views, axis=1)


def participation_shares(federation: Federation) -> list[float]:
    """One share for each cohort, from the flag; at least one client of each takes part.

    A share counts over all partial clients: .9 of two cohorts of three are three and two.

    Raises:
      ValueError: Not one or two numbers in (0, 1].
    """
    try:
        shares = [float(text) for text in FLAGS.participation]
    except ValueError:
        shares = []
    if len(shares) not in (1, 2) or not all(0 < share <= 1 for share in shares):
        raise ValueError(
            f"participation: got {','.join(FLAGS.participation)!r}; allowed is one number in"
            " (0, 1], or two with a comma between"
        )
    sizes = np.array([cohort.n_clients for cohort in federation.cohorts])
    full = np.array([federation.holds_all_views(cohort) for cohort in federation.cohorts])
    counts = np.zeros(len(sizes))
    for kind, share in ((full, shares[0]), (~full, shares[-1])):
        counts[kind] = np.diff(np.round(share * np.cumsum(sizes[kind])), prepend=0)
    return [float(share) for share in np.maximum(counts, 1) / sizes]


def prepare(build: Callable[[int, Federation], FederatedAlgorithm]) -> Task:
    """Everything that can be wrong with flags and data, found before anything is written.

    Raises:
      ValueError, OSError, ImportError: What is wrong.
    """
    if FLAGS.client_chunk is not None and FLAGS.client_chunk < 1:
        raise ValueError(f"client_chunk: got {FLAGS.client_chunk}; allowed is 1 or more")
    federations, n_clusters, pooled = load_federations()
    algorithm = build(n_clusters, federations[0])
    for federation in federations:
        federation.check_rows(n_clusters, f"as many as the {n_clusters} clusters")
    # Shapes only: whatever the algorithm itself refuses is found here.
    jax.eval_shape(
        lambda key: algorithm.init(key, federations[0].without_labels()), jax.random.key(0)
    )
    return Task(algorithm, federations, n_clusters, pooled)


def main_job(
    name: str,
    build: Callable[[int, Federation], FederatedAlgorithm],
    cost: Callable[[str, int, int, int], float],
    facts: Callable[[], dict[str, Any]] = dict,
    read: Callable[[list[Any]], list[Any]] = list,
) -> None:
    """Runs `name` on the flags' federations, shows progress, and writes the result folder.

    Args:
      name: Of the algorithm, for folders and titles.
      build: `(n_clusters, federation) -> algorithm`, from the binary's flags; of the federation
        only what all seeds have in common may be used.
      cost: `(stage, phase, views held, views of all) -> work of one client`, in any unit: the time
        left is reckoned from it.
      facts: What summary.json shall hold beside the usual, after the run.
      read: A round's info as the report takes it; raises ValueError where a round went wrong.
    """
    base.use_compilation_cache()
    FLAGS.dataset = FLAGS.dataset or "digits"
    task = checked(lambda: prepare(build))
    federation = task.federations[0]
    shares = checked(lambda: participation_shares(federation))
    setup_work, round_work = _work(task, shares, cost)
    checked(require_tqdm)
    report = checked(
        lambda: Report(FLAGS, name, Path(FLAGS.dataset).stem.lower(), federation, seeds())
    )
    if report.is_finished():
        print(f"finished already, nothing is left to do: {report.folder}/")
        return
    like = jax.eval_shape(_start(task, shares), federation, jax.random.key(0))
    at = checked(lambda: report.reopen(like)) if FLAGS.resume else Place(FLAGS.seed, 0, None)
    total = (FLAGS.seed + FLAGS.seeds - at.seed) * (setup_work + FLAGS.rounds * round_work)
    total -= setup_work * (at.state is not None) + at.made * round_work
    report.traffic = engine.traffic(task.algorithm, federation, participation=shares)
    with ProgressBar(total) as bar:
        bar.write(federation.describe())
        began = time.perf_counter()
        # A program that reports progress is not kept in the compilation cache.
        progress = _progress(bar, federation, cost) if FLAGS.progress else None
        programs = _compile(task, shares, progress)
        report.seconds["compile"] = time.perf_counter() - began
        report.header(bar.write)
        pooled = jnp.asarray(task.pooled)
        for seed, federation in zip(seeds(), task.federations, strict=True):
            if seed >= at.seed:
                made = _one_seed(programs, federation, pooled, at, report, bar.write, read)
                bar.advance((FLAGS.rounds - made) * round_work)
                at = Place(seed + 1, 0, None)
    report.facts = facts()
    for line in report.finish():
        print(line)


def _start(task: Task, shares: list[float]) -> Callable[..., RunState]:
    return partial(engine.start, task.algorithm, participation=shares)


class Programs(NamedTuple):
    """The compiled parts of a run; the same for every seed."""

    start: Callable[..., Any]
    setup: Callable[..., Any]
    one_round: Callable[..., Any]
    evaluate: Callable[..., Any]
    done: Callable[..., Any] | None = None  # where a method finds its own end
    # With labels to score with: scores, and clusterings to compare with.
    rate: Callable[..., Any] | None = None
    alone: Callable[..., Any] | None = None  # no collaboration
    together: Callable[..., Any] | None = None  # no privacy, and no missing view
    bound: Callable[..., Any] | None = None  # where a method has a representation


def _compile(task: Task, shares: list[float], progress: Progress | None) -> Programs:
    """Compiles ahead of time, so that compilation and running are timed apart."""
    chunk = FLAGS.client_chunk
    if chunk is None and jax.default_backend() == "cpu":
        chunk = 1  # measured fastest there: one client's weights stay in the cache
    algorithm, n_clusters = task.algorithm, task.n_clusters
    keywords: dict[str, Any] = {"client_chunk": chunk}

    def setup(federation: Federation, key: jax.Array, state: RunState) -> Any:
        return engine.setup(algorithm, federation, key, state, progress=progress, **keywords)

    def one_round(federation: Federation, key: jax.Array, state: RunState, r: jax.Array) -> Any:
        anew = shares if FLAGS.resample_participants else None
        return engine.one_round(
            algorithm, federation, key, state, r, resample=anew, progress=progress, **keywords
        )

    def evaluate(federation: Federation, key: jax.Array, state: RunState, r: jax.Array) -> Any:
        state, _ = engine.finish(algorithm, federation, key, state, r, **keywords)
        labels = engine.assign(algorithm, federation, state, **keywords)
        result = {"labels": labels}
        if algorithm.embed is not None:
            result["embedding"] = engine.embed(algorithm, federation, state, **keywords)
        return result

    def rate(federation: Federation, key: jax.Array, labels: Any, r: jax.Array) -> Any:
        """Scores with the groups of round r, the run's last."""
        took_part = engine.draw_participants(
            federation, key, shares, r if FLAGS.resample_participants else 0
        )
        return score(federation, labels, n_clusters, took_part)

    def alone(federation: Federation, key: jax.Array) -> Any:
        return engine.run(local_kmeans(n_clusters), federation, key, 0).labels

    def together(federation: Federation, key: jax.Array, pooled: jax.Array) -> Any:
        ids = [cohort.sample_ids for cohort in federation.cohorts]
        held = jnp.zeros(len(pooled), bool)
        for places in ids:
            held = held.at[jnp.where(places < 0, len(pooled), places)].set(True, mode="drop")
        key_pooled = jax.random.fold_in(key, _POOLED)
        labels = kmeans(key_pooled, pooled, n_clusters, where=held, n_init=10).labels
        return tuple(labels[i] for i in ids)

    def bound(federation: Federation, key: jax.Array, embedding: Any) -> Any:
        """One k-means over every client's representation, to compare centroid passing with."""
        masks = [cohort.mask for cohort in federation.cohorts]
        rows = jnp.concatenate([e.reshape(-1, e.shape[-1]) for e in embedding])
        where = jnp.concatenate([mask.ravel() for mask in masks])
        key_bound = jax.random.fold_in(key, _BOUND)
        found = kmeans(key_bound, rows, n_clusters, where=where, n_init=10).labels
        parts = jnp.split(found, np.cumsum([mask.size for mask in masks])[:-1])
        return tuple(part.reshape(m.shape) for part, m in zip(parts, masks, strict=True))

    federation, key, r = task.federations[0], jax.random.key(0), jnp.int32(0)
    start = jax.jit(_start(task, shares))
    state = jax.eval_shape(start, federation, key)
    evaluating = jax.jit(evaluate)  # traced once, here
    shown = jax.eval_shape(evaluating, federation, key, state, r)
    pooled = jax.ShapeDtypeStruct(task.pooled.shape, jnp.float32)
    scored = federation.labels is not None
    with ThreadPoolExecutor(_COMPILERS) as pool:

        def compiled(function: Callable[..., Any], *arguments: Any, donate: Any = ()) -> Any:
            # Tracing holds Python's lock; XLA compiles meanwhile without it.
            program = jax.jit(function, donate_argnums=donate)
            return pool.submit(program.lower(*arguments).compile)

        # The old state's memory serves the new. What takes longest comes first.
        parts = {
            "one_round": compiled(one_round, federation, key, state, r, donate=2),
            "setup": compiled(setup, federation, key, state, donate=2),
            "evaluate": compiled(evaluating, federation, key, state, r),
            "start": compiled(start, federation, key),
        }
        if algorithm.done is not None:
            parts["done"] = compiled(algorithm.done, state.server)
        if scored:
            parts["alone"] = compiled(alone, federation, key)
            parts["together"] = compiled(together, federation, key, pooled)
            parts["rate"] = compiled(rate, federation, key, shown["labels"], r)
            if "embedding" in shown:
                parts["bound"] = compiled(bound, federation, key, shown["embedding"])
        return Programs(**{name: part.result() for name, part in parts.items()})


def _one_seed(
    programs: Programs,
    federation: Federation,
    pooled: jax.Array,
    at: Place,
    report: Report,
    write: Callable[[str], None],
    read: Callable[[list[Any]], list[Any]],
) -> int:
    """Runs one seed, or the rest of it, and reports it; returns the number of its rounds."""
    seed, made, state = at
    key = jax.random.key(seed)
    before, began = report.seconds["run"], time.perf_counter()

    def save() -> None:
        report.seconds["run"] = before + time.perf_counter() - began
        if FLAGS.checkpoint_every and made % FLAGS.checkpoint_every == 0:
            report.save(Place(seed, made, state))

    def is_done() -> bool:
        return made == FLAGS.rounds or bool(made and programs.done and programs.done(state.server))

    def evaluate() -> dict[str, Any]:
        last = jnp.int32(made - 1)
        result = programs.evaluate(federation, key, state, last)
        if programs.rate is not None:
            result["scores"] = programs.rate(federation, key, result["labels"], last)
        return jax.device_get(result)

    if state is None:
        state = programs.start(federation, key)
        state, info = programs.setup(federation, key, state)
        checked(lambda: read(jax.device_get(info)))
        save()
    result: dict[str, Any] = {}
    while not is_done():
        state, info = programs.one_round(federation, key, state, jnp.int32(made))
        made += 1
        result = evaluate()
        told = checked(lambda info=info: read(jax.device_get(info)))
        report.add_round(seed, made, told, result.get("scores"), write)
        save()
    result = result or evaluate()  # nothing yet where the last round was made before a kill
    found = {}
    if programs.rate is not None:
        found["no collaboration"] = programs.alone(federation, key)
        found["pooled k-means"] = programs.together(federation, key, pooled)
    if programs.bound is not None:
        found["pooled k-means on H"] = programs.bound(federation, key, result["embedding"])
    last = jnp.int32(made - 1)
    rated = {name: programs.rate(federation, key, labels, last) for name, labels in found.items()}
    report.add_references(jax.device_get(rated))
    report.last = (federation, result)
    return made


def _progress(
    bar: ProgressBar, federation: Federation, cost: Callable[[str, int, int, int], float]
) -> Progress:
    def advance(stage: str, phase: int, cohort: int, n: int) -> None:
        held = len(federation.cohorts[cohort].view_ids)
        bar.advance(n * cost(stage, phase, held, federation.n_views))

    return advance


def _work(
    task: Task, shares: list[float], cost: Callable[[str, int, int, int], float]
) -> tuple[float, float]:
    """Work of the setup and of one round, of one seed, in the units of `cost`."""
    federation, algorithm = task.federations[0], task.algorithm
    totals = []
    for stage, phases in (("setup", algorithm.setup), ("round", algorithm.round)):
        total = 0.0
        for p, phase in enumerate(phases):
            if phase.who == "leader":
                total += cost(stage, p, federation.n_views, federation.n_views)
                continue
            for cohort, share in zip(federation.cohorts, shares, strict=True):
                n = max(1, round(share * cohort.n_clients))
                total += n * cost(stage, p, len(cohort.view_ids), federation.n_views)
        totals.append(total)
    return totals[0], totals[1]
