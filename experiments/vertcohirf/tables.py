"""The tables of VertCoHiRF's paper: every method searched with the same budget.

For each set, seed (which splits the features) and method, `--trials` settings are drawn from the
paper's spaces, run, and scored by the mean over agents of ARI and of the silhouette on the agent's
own features. Two selections are reported beside the paper's: label-tuned, the setting of best score
(as the paper does), and unsupervised, the setting of best silhouette, which no label enters.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.metrics import adjusted_rand_score

from experiments import base
from experiments.progress import ProgressBar
from experiments.vertical import Agents, SplitOptions, load_agents, silhouette
from jaxfedmvc import engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms import (
    LocalStep,
    coreset_kmeans,
    distr_kmeans,
    dpfmps,
    dpfmps_p2est,
    local_kmeans,
    vertcohirf,
)
from jaxfedmvc.clustering import local

PUBLISHED = Path(__file__).parent / "published"
# Table -> set and score; the paper's names of the sets are those of its tables.
TABLES = {
    5 + 2 * i + j: (name, metric)
    for i, name in enumerate(
        ["alizadeh-2000-v2", "chowdary-2006", "coil-20", "garber-2001", "nursery", "shuttle"]
    )
    for j, metric in enumerate(["ARI", "Silhouette"])
}
STEMS = {
    "alizadeh-2000-v2": "alizadeh_2000_v2",
    "chowdary-2006": "chowdary_2006",
    "coil-20": "coil20",
    "garber-2001": "garber_2001",
    "nursery": "nursery",
    "shuttle": "shuttle",
}
# The paper's own variants of VertCoHiRF for each set.
BASES = {
    "alizadeh-2000-v2": ("kmeans", "sc_srgf"),
    "chowdary-2006": ("kmeans", "sc_srgf"),
    "coil-20": ("kmeans", "dbscan"),
    "garber-2001": ("kmeans", "sc_srgf"),
    "nursery": ("kmeans", "kernel_kmeans"),
    "shuttle": ("kmeans", "dbscan"),
}
LOCAL = "KMeans (no collaboration)"
OBJECTIVES = ("ARI", "Silhouette")
_PUBLISHED_NAMES = {
    "kmeans": "VertCoHiRF(Kmeans)",
    "sc_srgf": "VertCoHiRF(SC-SRGF)",
    "dbscan": "VertCoHiRF(DBSCAN)",
    "kernel_kmeans": "VertCoHiRF(KK)",
}
_PAPER = ("collab_mean", "collab_std", "diff_mean")
_MAX_CLUSTERS, _MAX_REPETITIONS, _MAX_GRAPHS, _RELAXED, _MAX_ITER = 30, 10, 30, 0.8, 100
# Above this many samples arrays shrink between iterations instead of staying at full size.
_COMPACT_ABOVE = 2000

Params = dict[str, float]
Space = dict[str, tuple[float, float, bool]]  # name -> low, high, whether a whole number


class Method(NamedTuple):
    """One row of a table.

    Attributes:
      published: Its name in the paper's tables.
      space: What is searched.
      make: `params -> algorithm`; the values of params may be traced unless `host`.
      rounds: 0 for methods without rounds.
      host: Whether the settings are static, so that every setting is a program of its own.
    """

    published: str
    space: Space
    make: Callable[[Params], FederatedAlgorithm]
    rounds: int = 0
    host: bool = False


def methods(dataset: str, max_local: int = _MAX_CLUSTERS) -> dict[str, Method]:
    """All rows of a set's tables, in the order of the paper.

    Args:
      dataset: As in `TABLES`.
      max_local: Largest number of clusters that VertCoHiRF's base clusterers are tried with.
    """
    clusters: Space = {"n_clusters": (2, _MAX_CLUSTERS, True)}

    def with_limit(method: Callable[..., FederatedAlgorithm]) -> Callable[..., Any]:
        return lambda p: method(_MAX_CLUSTERS, limit=p["n_clusters"])

    rows = {
        LOCAL: Method(LOCAL, clusters, with_limit(local_kmeans)),
        "Distr.KMeans": Method("Distr.KMeans", clusters, with_limit(distr_kmeans)),
        "CoresetKMeans": Method("CoresetKMeans", clusters, with_limit(coreset_kmeans)),
        "DPFMPS": Method("DPFMPS", clusters, lambda p: dpfmps(int(p["n_clusters"])), host=True),
        "DPFMPS-P2Est": Method(
            "DPFMPS-P2Est", clusters, lambda p: dpfmps_p2est(int(p["n_clusters"])), host=True
        ),
    }
    for clusterer in BASES[dataset]:
        for threshold in (None, _RELAXED) if clusterer != "sc_srgf" else (None,):
            star = "*" if threshold else ""
            rows[f"VertCoHiRF({clusterer}{star})"] = vertcohirf_method(
                clusterer, threshold, max_local
            )
    return rows


def vertcohirf_method(clusterer: str, threshold: float | None, max_local: int) -> Method:
    """VertCoHiRF with a base clusterer, its settings searched in the paper's spaces."""
    space: Space = {} if clusterer == "dbscan" else {"n_clusters": (2, max_local, True)}
    space |= {
        "dbscan": {"eps": (0.1, 10.0, False), "min_samples": (2, 50, True)},
        "kernel_kmeans": {"gamma": (0.1, 30.0, False)},
        "sc_srgf": {"n_graphs": (10, _MAX_GRAPHS, True), "ratio": (0.2, 0.8, False)},
        "kmeans": {},
    }[clusterer]
    if clusterer != "sc_srgf":
        space |= {"feature_share": (0.1, 1.0, False), "repetitions": (2, _MAX_REPETITIONS, True)}

    def make(p: Params) -> FederatedAlgorithm:
        if clusterer == "sc_srgf":
            method = local.sc_srgf_method(
                p["n_clusters"], p["n_graphs"], p["ratio"], max_local, _MAX_GRAPHS
            )
            return vertcohirf(LocalStep(method))
        method = {
            "dbscan": lambda: local.dbscan_method(p["eps"], p["min_samples"]),
            "kernel_kmeans": lambda: local.kernel_kmeans_method(
                p["n_clusters"], p["gamma"], max_local
            ),
            "kmeans": lambda: local.kmeans_method(p["n_clusters"], max_local),
        }[clusterer]()
        return vertcohirf(
            LocalStep(method, p["feature_share"], _MAX_REPETITIONS, p["repetitions"], threshold)
        )

    return Method(_PUBLISHED_NAMES[clusterer], space, make, _MAX_ITER)


# Running trials.


def draw(rng: np.random.Generator, space: Space) -> Params:
    """A setting, uniform in its space."""
    return {
        name: int(rng.integers(low, high + 1)) if whole else float(rng.uniform(low, high))
        for name, (low, high, whole) in space.items()
    }


def require_optuna() -> Any:
    """Optuna.

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
        """Args as the flags; TPE needs Optuna."""
        self._space, self._objective, self._study = space, objective, None
        self._rng = np.random.default_rng(seed)
        if kind == "tpe":
            optuna = require_optuna()
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
        """The next n settings."""
        if self._study is None:
            return [draw(self._rng, self._space) for _ in range(n)]
        self._asked = [self._study.ask(self._distributions) for _ in range(n)]
        return [dict(trial.params) for trial in self._asked]

    def tell(self, scores: list[dict[str, Any]]) -> None:
        """What the settings of the last `ask` reached."""
        if self._study is not None:
            for trial, score in zip(self._asked, scores, strict=True):
                self._study.tell(trial, float(np.mean(score[self._objective])))


def evaluator(method: Method, n_samples: int) -> Callable[..., list[list[np.ndarray]]]:
    """`(federation, key, settings) -> for each setting the clusters of each agent`."""
    if method.host:
        programs: dict[str, Any] = {}

        def one_by_one(federation: Any, key: Any, settings: list[Params]) -> Any:
            found = []
            for p in settings:
                if str(p) not in programs:
                    algorithm = method.make(p)
                    programs[str(p)] = jax.jit(
                        lambda f, k, a=algorithm: engine.run(a, f, k, 0).labels
                    )
                found.append(_plain(programs[str(p)](federation, key)))
            return found

        return one_by_one
    if method.rounds and n_samples > _COMPACT_ABOVE:

        def compacting(federation: Any, key: Any, settings: list[Params]) -> Any:
            return [
                _plain(
                    engine.run_compacting(
                        method.make, federation, key, method.rounds, hyperparams=_arrays(p)
                    ).labels
                )
                for p in settings
            ]

        return compacting

    @jax.jit
    def batch(federation: Any, key: Any, settings: Params) -> Any:
        def one(p: Params) -> Any:
            return engine.run(method.make(p), federation, key, method.rounds).labels

        # On a CPU one after another in one program: no setting waits for the slowest.
        if jax.default_backend() == "cpu":
            return jax.lax.map(one, settings)
        return jax.vmap(one)(settings)

    def batched(federation: Any, key: Any, settings: list[Params]) -> Any:
        stacked = jax.tree.map(lambda *values: jnp.stack(values), *map(_arrays, settings))
        labels = [np.asarray(x) for x in batch(federation, key, stacked)]
        return [[x[i, 0] for x in labels] for i in range(len(settings))]

    return batched


def _arrays(params: Params) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in params.items()}


def _plain(labels: Any) -> list[np.ndarray]:
    return [np.asarray(x)[0] for x in labels]


def scores(agents: Agents, labels: list[np.ndarray]) -> dict[str, list[float]]:
    """ARI and silhouette of each agent; -1 where a silhouette is not defined."""
    shared = all(np.array_equal(x, labels[0]) for x in labels[1:])
    first = adjusted_rand_score(agents.labels, labels[0])
    ari = [first if shared else adjusted_rand_score(agents.labels, x) for x in labels]
    own = [silhouette(view, x) for view, x in zip(agents.views, labels, strict=True)]
    return {
        "ARI": [float(x) for x in ari],
        "Silhouette": [-1.0 if np.isnan(x) else x for x in own],
    }


class Budget(NamedTuple):
    """What every method is given.

    Attributes:
      trials: Settings tried for each seed.
      batch: Settings of one program.
      search: "random" or "tpe".
      seeds: Feature splits, which also seed the runs.
      data_dir: Where sets lie.
      only: Rows of the table that are run; all if empty.
      split: How features are split.
      max_local: As for `methods`.
    """

    trials: int
    batch: int
    search: str
    seeds: list[int]
    data_dir: str | None
    only: list[str]
    split: SplitOptions
    max_local: int


def search_name(budget: Budget, method: str, objective: str) -> str:
    """What tells searches apart in a trials file: the kind, the score, and the space where it may
    differ.
    """
    space = f":C<={budget.max_local}" if method.startswith("VertCoHiRF") else ""
    return f"{budget.search}:{objective}{space}"


def run_trials(dataset: str, budget: Budget, path: Path, bar: ProgressBar) -> None:
    """Runs the trials of a set that `path` (.csv) does not hold yet, and appends every batch.

    A random search serves both scores with the same trials; TPE has a study for each. An unfinished
    search is gone through again from its start, with the recorded scores where there are any.
    """
    recorded: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in read_trials(path):
        if row["dataset"] == dataset:
            recorded.setdefault((row["method"], row["seed"], row["search"]), []).append(row)
    everything = methods(dataset, budget.max_local)
    chosen = {name: m for name, m in everything.items() if not budget.only or name in budget.only}
    evaluate: dict[str, Any] = {}
    for seed in budget.seeds:
        agents = load_agents(STEMS[dataset], seed, budget.split, data_dir=budget.data_dir)
        federation, n = agents.federation.without_labels(), len(agents.views[0])
        for name, method in chosen.items():
            place = list(everything).index(name)  # settings do not depend on which rows are run
            if name not in evaluate:
                evaluate[name] = evaluator(method, n)
            for objective in OBJECTIVES if budget.search == "tpe" else ("any",):
                search = search_name(budget, name, objective)
                old = recorded.get((name, str(seed), search), [])
                propose = Search(budget.search, method.space, 1000 * seed + place, objective)
                for start in range(0, budget.trials, budget.batch):
                    size = min(budget.batch, budget.trials - start)
                    settings = propose.ask(size)
                    known = old[start : start + size]
                    bar.advance(size)
                    if [json.loads(row["params"]) for row in known] == settings:
                        propose.tell([{o: json.loads(r[o]) for o in OBJECTIVES} for r in known])
                        continue
                    if known:
                        raise ValueError(
                            f"trials_file: {path} holds another search of {name}, seed {seed};"
                            " give another file, or the same --search_trials and --search_batch"
                        )
                    key = jax.random.fold_in(jax.random.key(seed), start)
                    found = evaluate[name](federation, key, settings)
                    told = [scores(agents, labels) for labels in found]
                    propose.tell(told)
                    rows = [
                        {
                            "dataset": dataset,
                            "method": name,
                            "seed": seed,
                            "search": search,
                            "params": json.dumps(p),
                            "ARI": json.dumps(s["ARI"]),
                            "Silhouette": json.dumps(s["Silhouette"]),
                            "clusters": max(len(np.unique(x)) for x in labels),
                        }
                        for p, s, labels in zip(settings, told, found, strict=True)
                    ]
                    base.append_rows(path, rows)
    jax.clear_caches()  # programs of one set serve no other


def read_trials(path: Path) -> list[dict[str, str]]:
    """Rows of a trials file; none if it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# Tables.


def table(dataset: str, metric: str, trials: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Rows of a table: for each method our two selections, and the paper's numbers.

    "Diff" is, for each seed, the median over agents of the chosen trial's score minus that of the
    agent's own local k-means, chosen in the same way.
    """
    best = {
        how: _chosen(dataset, trials, metric, by)
        for how, by in (("tuned", metric), ("unsupervised", "Silhouette"))
    }
    published = {
        row["method"]: row
        for row in _read(PUBLISHED / "vertcohirf_tables5_16.csv")
        if (row["dataset"], row["metric"]) == (dataset, metric)
    }
    rows = []
    for name, method in methods(dataset).items():
        if not best["tuned"].get(name):
            continue
        row: dict[str, Any] = {"dataset": dataset, "metric": metric, "method": name}
        for how, chosen in best.items():
            collab = [np.mean(values) for values in chosen[name].values()]
            row |= {f"{how}_mean": np.mean(collab), f"{how}_std": np.std(collab)}
            local_scores = chosen.get(LOCAL, {})
            diff = [
                np.median(np.subtract(values, local_scores[seed]))
                for seed, values in chosen[name].items()
                if seed in local_scores
            ]
            row[f"{how}_diff"] = np.mean(diff) if diff else np.nan
        row["seeds"] = len(best["tuned"][name])
        paper = published.get(method.published, {})
        row |= {f"paper_{x}": paper.get(x) for x in _PAPER}
        rows.append(row)
    return rows


def _chosen(
    dataset: str, trials: list[dict[str, str]], metric: str, by: str
) -> dict[str, dict[str, list[float]]]:
    """Method -> seed -> the agents' scores in the trial of best agent-mean `by`."""
    best: dict[tuple[str, str], tuple[float, list[float]]] = {}
    for row in trials:
        if row["dataset"] != dataset or row["search"].split(":")[1] not in ("any", by):
            continue
        value = float(np.mean(json.loads(row[by])))
        place = (row["method"], row["seed"])
        if place not in best or value > best[place][0]:
            best[place] = (value, json.loads(row[metric]))
    result: dict[str, dict[str, list[float]]] = {}
    for (name, seed), (_, values) in best.items():
        result.setdefault(name, {})[seed] = values
    return result


def by_seed(
    dataset: str, trials: list[dict[str, str]], metric: str, by: str
) -> dict[str, list[float]]:
    """Method -> for each seed the agent-mean score of the trial of best `by`."""
    chosen = _chosen(dataset, trials, metric, by)
    return {
        name: [float(np.mean(chosen[name][seed])) for seed in sorted(chosen[name])]
        for name in methods(dataset)
        if name in chosen
    }


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table for the terminal."""
    head = f"{'':28s}{'label-tuned':>16s}{'diff':>8s}{'unsupervised':>16s}{'diff':>8s}"
    yield head + f"{'paper':>16s}{'diff':>8s}"
    for row in rows:
        text = f"{row['method']:28s}"
        for how in ("tuned", "unsupervised"):
            spread = f"{row[f'{how}_mean']:.3f} +- {row[f'{how}_std']:.3f}"
            text += f"{spread:>16s}{row[f'{how}_diff']:>+8.3f}"
        if row["paper_collab_mean"] is not None:
            mean, std, diff = (float(row[f"paper_{x}"]) for x in _PAPER)
            text += f"{f'{mean:.3f} +- {std:.3f}':>16s}{diff:>+8.3f}"
        yield text


def _read(path: Path) -> list[Mapping[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
