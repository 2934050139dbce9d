"""Searches for VertCoHiRF's tables: every method gets the same number of trials.

For each set, seed (which splits the features) and method, `--search_trials` settings are drawn from
the paper's spaces, run, and scored by ARI and by the silhouette on each agent's own features. Every
batch of trials is appended to trials.csv as it is made.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.sharding import Mesh

from experiments.lib import folder, programs
from experiments.lib.data import Problem
from experiments.lib.devices import each
from experiments.lib.folder import append_rows, read_appended
from experiments.lib.progress import Progress
from experiments.lib.references import silhouette
from jaxfedmvc import checks, engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.vertcohirf import LocalStep, vertcohirf_of_steps
from jaxfedmvc.clustering import local
from jaxfedmvc.metrics import host

# The paper's names of its sets, and those of the files.
STEMS = {
    "alizadeh-2000-v2": "alizadeh_2000_v2",
    "chowdary-2006": "chowdary_2006",
    "coil-20": "coil20",
    "garber-2001": "garber_2001",
    "nursery": "nursery",
    "shuttle": "shuttle",
}
# The paper's own variants of VertCoHiRF for each set, beside k-means.
_SECOND_BASE = {
    "alizadeh-2000-v2": "sc_srgf",
    "chowdary-2006": "sc_srgf",
    "coil-20": "dbscan",
    "garber-2001": "sc_srgf",
    "nursery": "kernel_kmeans",
    "shuttle": "dbscan",
}
LOCAL = "KMeans (no collaboration)"
BASELINES = {
    LOCAL: "local_kmeans",
    "Distr.KMeans": "distr_kmeans",
    "CoresetKMeans": "coreset_kmeans",
    "DPFMPS": "dpfmps",
    "DPFMPS-P2Est": "dpfmps_p2est",
}
OBJECTIVES = ("ARI", "Silhouette")
_PUBLISHED_NAMES = {
    "kmeans": "VertCoHiRF(Kmeans)",
    "sc_srgf": "VertCoHiRF(SC-SRGF)",
    "dbscan": "VertCoHiRF(DBSCAN)",
    "kernel_kmeans": "VertCoHiRF(KK)",
}
_MAX_CLUSTERS, _MAX_REPETITIONS, _MAX_GRAPHS, _RELAXED, _MAX_ITER = 30, 10, 30, 0.8, 100
# Above this many samples arrays shrink between iterations instead of staying at full size.
_COMPACT_ABOVE = 2000

Params = dict[str, float]
Space = dict[str, tuple[float, float, bool]]  # name -> low, high, whether a whole number
# (federation, key, settings) -> for each setting and agent its clusters [1, n].
Evaluate = Callable[[Any, Any, list[Params]], list[list[np.ndarray]]]


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """How settings are searched.

    Attributes:
      search_trials: Settings tried for each method and seed.
      search_batch: Settings of one compiled program.
      search: How settings are proposed: random, or tpe, which needs Optuna.
      max_local_clusters: Largest C tried for VertCoHiRF's base clusterers: 30 in the paper's
        tables, 5 in its runs.
      methods: Rows that are run; empty: all.
    """

    search_trials: int = 50
    search_batch: int = 10
    search: Literal["random", "tpe"] = "random"
    max_local_clusters: int = 30
    methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError that names the setting; ImportError without Optuna."""
        checks.at_least(self, 1, "search_trials", "search_batch")
        checks.at_least(self, 2, "max_local_clusters")
        allowed = {name for dataset in STEMS for name in methods(dataset)}
        if not set(self.methods) <= allowed:
            got = ",".join(self.methods)
            raise ValueError(f"methods: got {got!r}; allowed are {sorted(allowed)}")
        if self.search == "tpe":
            _require_optuna()

    def objectives(self) -> Sequence[str]:
        """Returns the scores searched for: random trials serve any, TPE has a study for each."""
        return OBJECTIVES if self.search == "tpe" else ("any",)

    def flag_lines(self) -> list[str]:
        """Returns the flags that make trials what they are."""
        names = ("search", "search_trials", "search_batch", "max_local_clusters")
        return [f"--{name}={getattr(self, name)}" for name in names]

    def name(self, method: str, objective: str) -> str:
        """Names a search in trials.csv: its kind, the score, and the space where it may differ."""
        space = f":C<={self.max_local_clusters}" if method.startswith("VertCoHiRF") else ""
        return f"{self.search}:{objective}{space}"


# --- What is searched -----------------------------------------------------------------------------


class Row(NamedTuple):
    """One row of a table.

    Attributes:
      published: Its name in the paper's tables.
      space: What is searched.
      make: `params -> algorithm`; the values of params may be traced unless `static`.
      rounds: 0 for methods without rounds.
      static: Whether every setting is a program of its own.
    """

    published: str
    space: Space
    make: Callable[[Params], FederatedAlgorithm]
    rounds: int = 0
    static: bool = False


def methods(dataset: str, max_local: int = _MAX_CLUSTERS) -> dict[str, Row]:
    """Returns all rows of a set's tables, in the order of the paper.

    Args:
      dataset: One of `STEMS`.
      max_local: Largest number of clusters that VertCoHiRF's base clusterers are tried with.
    """
    rows = {title: _baseline(title) for title in BASELINES}
    for base in ("kmeans", _SECOND_BASE[dataset]):
        for threshold in (None, _RELAXED) if base != "sc_srgf" else (None,):
            star = "*" if threshold else ""
            rows[f"VertCoHiRF({base}{star})"] = vertcohirf_row(base, threshold, max_local)
    return rows


def _baseline(title: str) -> Row:
    """Returns a baseline, whose number of clusters is searched."""
    method = METHODS[BASELINES[title]]
    space: Space = {"n_clusters": (2, _MAX_CLUSTERS, True)}

    def limited(p: Params) -> FederatedAlgorithm:
        return method.make(method.config(_MAX_CLUSTERS), method.hyperparams(limit=p["n_clusters"]))

    def static(p: Params) -> FederatedAlgorithm:
        return method.make(method.config(int(p["n_clusters"])), None)

    is_static = title.startswith("DPFMPS")
    return Row(title, space, static if is_static else limited, static=is_static)


def vertcohirf_row(base: str, threshold: float | None, max_local: int) -> Row:
    """Returns VertCoHiRF with a base clusterer, its settings searched in the paper's spaces."""
    space: Space = {} if base == "dbscan" else {"n_clusters": (2, max_local, True)}
    space |= {
        "dbscan": {"eps": (0.1, 10.0, False), "min_samples": (2, 50, True)},
        "kernel_kmeans": {"gamma": (0.1, 30.0, False)},
        "sc_srgf": {"n_graphs": (10, _MAX_GRAPHS, True), "ratio": (0.2, 0.8, False)},
        "kmeans": {},
    }[base]
    if base != "sc_srgf":
        space |= {"feature_share": (0.1, 1.0, False), "repetitions": (2, _MAX_REPETITIONS, True)}

    def clusterer(p: Params) -> local.LocalMethod:
        if base == "dbscan":
            return local.dbscan_method(p["eps"], p["min_samples"])
        if base == "kernel_kmeans":
            return local.kernel_kmeans_method(p["n_clusters"], p["gamma"], max_local)
        if base == "sc_srgf":
            return local.sc_srgf_method(
                p["n_clusters"], p["n_graphs"], p["ratio"], max_local, _MAX_GRAPHS
            )
        return local.kmeans_method(p["n_clusters"], max_local)

    def make(p: Params) -> FederatedAlgorithm:
        step = LocalStep(clusterer(p))
        if base != "sc_srgf":
            step = LocalStep(
                step.method, p["feature_share"], _MAX_REPETITIONS, p["repetitions"], threshold
            )
        return vertcohirf_of_steps(step)

    return Row(_PUBLISHED_NAMES[base], space, make, _MAX_ITER)


def _require_optuna() -> Any:
    """Returns Optuna.

    Raises:
      ImportError: Says which extra to install.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError(
            "--search=tpe needs Optuna: pip install -e '.[hpo]' in the source tree"
        ) from error
    return optuna


class Search:
    """Proposes settings in batches: at random, or by Optuna's TPE towards one score."""

    def __init__(self, kind: str, space: Space, seed: int, objective: str) -> None:
        """Begins a search: `kind` is random or tpe, `objective` the score that TPE maximises."""
        self._space, self._objective, self._study = space, objective, None
        self._rng = np.random.default_rng(seed)
        if kind == "tpe":
            optuna = _require_optuna()
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True)
            self._study = optuna.create_study(direction="maximize", sampler=sampler)
            self._distributions = {
                name: optuna.distributions.IntDistribution(int(low), int(high))
                if whole
                else optuna.distributions.FloatDistribution(low, high)
                for name, (low, high, whole) in space.items()
            }

    def ask(self, n: int) -> list[Params]:
        """Returns the next n settings."""
        if self._study is None:
            return [self._drawn() for _ in range(n)]
        self._asked = [self._study.ask(self._distributions) for _ in range(n)]
        return [dict(trial.params) for trial in self._asked]

    def tell(self, scores: Sequence[dict[str, Any]]) -> None:
        """Takes note of the scores that the settings of the last `ask` reached."""
        if self._study is not None:
            for trial, score in zip(self._asked, scores, strict=True):
                self._study.tell(trial, float(np.mean(score[self._objective])))

    def _drawn(self) -> Params:
        """Draws a setting, uniform in its space."""
        return {
            name: int(self._rng.integers(int(low), int(high) + 1))
            if whole
            else float(self._rng.uniform(low, high))
            for name, (low, high, whole) in self._space.items()
        }


# --- Running settings -----------------------------------------------------------------------------


def evaluator(row: Row, n_samples: int) -> Evaluate:
    """Returns a function that runs settings of a row, in as few programs as it can."""
    if row.static:
        return _each_its_program(row)
    if row.rounds and n_samples > _COMPACT_ABOVE:
        return _compacting(row)
    return _one_program(row)


def _each_its_program(row: Row) -> Evaluate:
    @functools.cache
    def program(**params: float) -> Any:
        algorithm = row.make(params)
        return jax.jit(lambda f, key: engine.run(algorithm, f, key, row.rounds).labels)

    return lambda federation, key, settings: [
        [np.asarray(x) for x in program(**p)(federation, key)] for p in settings
    ]


def _compacting(row: Row) -> Evaluate:
    def one(federation: Any, key: Any, p: Params) -> list[np.ndarray]:
        run = engine.run_compacting(row.make, federation, key, row.rounds, hyperparams=_arrays(p))
        return [np.asarray(x) for x in run.labels]

    return lambda federation, key, settings: [one(federation, key, p) for p in settings]


def _one_program(row: Row) -> Evaluate:
    @jax.jit
    def batch(federation: Any, key: Any, settings: Params) -> Any:
        def one(p: Params) -> Any:
            return engine.run(row.make(p), federation, key, row.rounds).labels

        # On a CPU one after another in one program: no setting waits for the slowest.
        if jax.default_backend() == "cpu":
            return jax.lax.map(one, settings)
        return jax.vmap(one)(settings)

    def evaluate(federation: Any, key: Any, settings: list[Params]) -> list[list[np.ndarray]]:
        stacked = jax.tree.map(lambda *values: jnp.stack(values), *map(_arrays, settings))
        labels = [np.asarray(x) for x in batch(federation, key, stacked)]
        return [[x[i] for x in labels] for i in range(len(settings))]

    return evaluate


def _arrays(params: Params) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in params.items()}


def scores(problem: Problem, labels: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """Scores each agent's clusters [1, n] by ARI and silhouette; -1 where that is not defined."""
    own = [silhouette(view, x[0]) for view, x in zip(problem.views, labels, strict=True)]
    tables = host.tables(problem.federation, labels)
    return {
        "ARI": [host.table_scores(table)["ari"] for table in tables],
        "Silhouette": [-1.0 if np.isnan(x) else x for x in own],
    }


# --- trials.csv -----------------------------------------------------------------------------------


class Place(NamedTuple):
    """What tells a search from others in trials.csv."""

    dataset: str
    method: str
    seed: int
    search: str


_AS_JSON = ("params", *OBJECTIVES)
# Seconds are those of a batch, compilation included, divided by its trials.
COLUMNS = (*Place._fields, *_AS_JSON, "clusters", "seconds", "command", "commit", "device", "jax")
# Searches of one set, each with its row and what proposes its settings.
Plan = dict[Place, tuple[Row, Search]]


def read_trials(path: Path) -> pd.DataFrame:
    """Reads trials.csv, scores as lists; no rows if it is not there."""
    return read_appended(path, COLUMNS, converters=dict.fromkeys(_AS_JSON, json.loads))


def plan(dataset: str, settings: SearchSettings, seeds: Sequence[int]) -> Plan:
    """Returns the searches of a set; what they propose does not depend on which rows are run."""
    rows = enumerate(methods(dataset, settings.max_local_clusters).items())
    chosen = [item for item in rows if not settings.methods or item[1][0] in settings.methods]
    return {
        Place(dataset, name, seed, settings.name(name, objective)): (
            row,
            Search(settings.search, row.space, 1000 * seed + number, objective),
        )
        for seed in seeds
        for number, (name, row) in chosen
        for objective in settings.objectives()
    }


def run_trials(
    sets: Iterable[str],
    settings: SearchSettings,
    seeds: Sequence[int],
    load: Callable[[str, int], Problem],
    path: Path,
    progress: Progress,
    mesh: Mesh | None = None,
    command: Sequence[str] = (),
) -> pd.DataFrame:
    """Runs the trials that `path` lacks, appends every batch, and returns all that were asked for.

    An unfinished search is gone through again from its start, with the recorded scores where there
    are any.

    Args:
      sets: Some of `STEMS`.
      settings: Of the searches.
      seeds: Feature splits, which also seed the runs.
      load: `(set, seed) -> problem`.
      path: Of trials.csv.
      progress: Where trials are counted.
      mesh: Whose devices take a part of each batch; None: one device.
      command: What trials say made them; the settings' own flags come after it.

    Raises:
      ValueError: The file holds trials of another search by the same name, or has other columns.
    """
    folder.check_columns(path, COLUMNS)
    plans = [plan(dataset, settings, seeds) for dataset in sets]
    groups = read_trials(path).groupby(list(Place._fields))
    known = {place: found.to_dict("records") for place, found in groups}
    left: collections.Counter[str] = collections.Counter()
    for place in itertools.chain(*plans):
        left[f"{place.dataset}, {place.method}"] += settings.search_trials - len(
            known.get(place, ())
        )
    progress.expect(left)
    load = functools.lru_cache(maxsize=1)(load)
    made_by = folder.made_by([*command, *settings.flag_lines()])
    for searches in plans:
        evaluate: dict[str, Evaluate] = {}
        for place, (row, search) in searches.items():
            problem = load(place.dataset, place.seed)
            if place.method not in evaluate:
                evaluate[place.method] = evaluator(row, len(problem.rows))
            for start in range(0, settings.search_trials, settings.search_batch):
                size = min(settings.search_batch, settings.search_trials - start)
                params = search.ask(size)
                found = known.get(place, [])[start : start + size]
                if [trial["params"] for trial in found] != params[: len(found)]:
                    raise ValueError(
                        f"trials_file: {path} holds another search of {place.method}, seed"
                        f" {place.seed}; give another file, or the same --search_trials and"
                        " --search_batch"
                    )
                if rest := params[len(found) :]:  # all, or what a kill has cut off
                    run = evaluate[place.method]
                    made = _run_batch(problem, run, place.seed, start, rest, mesh)
                    of = place._asdict() | made_by
                    append_rows(path, [of | as_text(trial) for trial in made])
                    progress.done(f"{place.dataset}, {place.method}", len(rest))
                    found = found + made
                search.tell(found)
            programs.make_room()  # DPFMPS has one for each number of clusters
        jax.clear_caches()  # programs of one set serve no other
    trials = read_trials(path)
    places = pd.MultiIndex.from_frame(trials[list(Place._fields)])
    return trials[places.isin(list(itertools.chain(*plans)))]


def _run_batch(
    problem: Problem,
    evaluate: Evaluate,
    seed: int,
    start: int,
    params: list[Params],
    mesh: Mesh | None,
) -> list[dict[str, Any]]:
    key = jax.random.fold_in(jax.random.key(seed), start)
    size = -(-len(params) // (1 if mesh is None else mesh.devices.size))
    parts = [params[i : i + size] for i in range(0, len(params), size)]
    run = functools.partial(evaluate, problem.federation.without_labels(), key)
    began = time.perf_counter()
    found = list(itertools.chain.from_iterable(each(run, parts, mesh)))
    seconds = round((time.perf_counter() - began) / len(params), 3)
    return [
        {"params": p, **scores(problem, labels)}
        | {"clusters": max(len(np.unique(x)) for x in labels), "seconds": seconds}
        for p, labels in zip(params, found, strict=True)
    ]


def as_text(trial: dict[str, Any]) -> dict[str, Any]:
    """Returns a row as it stands in trials.csv."""
    return trial | {name: json.dumps(trial[name]) for name in _AS_JSON}
