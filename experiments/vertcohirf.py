"""VertCoHiRF and the vertical baselines: `python -m experiments.vertcohirf [--algorithm=...]`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments import base, vertical
from experiments.base import checked, seeds
from experiments.lib import plots
from experiments.progress import ProgressBar, require_tqdm
from experiments.vertical import Agents
from jaxfedmvc import engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms import ALGORITHMS, local_kmeans
from jaxfedmvc.algorithms.vertcohirf.hierarchy import Hierarchy
from jaxfedmvc.algorithms.vertcohirf.method import LocalStep, communication, vertcohirf
from jaxfedmvc.clustering import local
from jaxfedmvc.clustering.local import LocalMethod
from jaxfedmvc.federation import Federation

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(vertical)

_BASES = ("kmeans", "dbscan", "kernel_kmeans", "sc_srgf")
_BASELINES = ("distr_kmeans", "coreset_kmeans", "dpfmps", "dpfmps_p2est", "local_kmeans")

flags.DEFINE_enum("algorithm", "vertcohirf", ["vertcohirf", *_BASELINES], "The method.")
flags.DEFINE_list(
    "base",
    None,
    f"Base clusterer ({', '.join(_BASES)}) of all agents, or agent:clusterer for each; None:"
    " kmeans, and 0:dbscan,1:kmeans for the multimodal set.",
)
flags.DEFINE_integer(
    "local_clusters",
    None,
    "C of the base clusterers; None: 3 for multimodal, else K, the number of classes if labelled.",
    lower_bound=1,
)
flags.DEFINE_integer(
    "repetitions", 2, "R, clusterings of feature subsets by each agent; 1 for sc_srgf."
)
flags.DEFINE_float(
    "feature_share", 1.0, "q, the share of its features that a repetition sees; 1 for sc_srgf."
)
flags.DEFINE_float("relaxed", None, "h of the relaxed local consensus (paper: 0.8); None: strict.")
flags.DEFINE_integer("n_candidates", None, "N_s, members of a cluster that are ranked; None: all.")
flags.DEFINE_enum(
    "similarity", "cosine", ["cosine", "rbf", "laplacian", "rbf_median"], "How medoids are ranked."
)
flags.DEFINE_float(
    "eps",
    None,
    "DBSCAN's radius; None: 2.25, but 0.35 for multimodal_table1.",
)
flags.DEFINE_integer("min_samples", 5, "DBSCAN's neighbours of a core sample, itself included.")
flags.DEFINE_float("gamma", 1.0, "Kernel k-means: exp(-gamma d^2).")
flags.DEFINE_integer("n_graphs", 20, "SC-SRGF's subspace graphs.", lower_bound=1)
flags.DEFINE_float("sampling_ratio", 0.5, "SC-SRGF's share of features in a subspace.")
flags.DEFINE_integer("max_iter", 100, "Most iterations.", lower_bound=1)
flags.DEFINE_integer(
    "level",
    None,
    "Cut the hierarchy here: 0 is the first iteration's clusters, -1 every sample for itself.",
    -1,
)
flags.DEFINE_enum(
    "mode",
    "compacting",
    ["compacting", "masked"],
    "compacting shrinks the arrays between iterations; masked is one program for a whole run.",
)
flags.DEFINE_float("epsilon", 1.0, "Privacy budget of the dpfmps methods.")
flags.DEFINE_integer("n_sketches", None, "Sketches of the dpfmps methods; None: n // 10.")


class Outcome(NamedTuple):
    """One seed's result: each agent's clusters [n], and the hierarchy where there is one."""

    labels: list[np.ndarray]
    hierarchy: Hierarchy | None
    rounds: list[dict[str, int]]


def base_of(agent: int, n_agents: int) -> str:
    """The base clusterer of an agent, from the flag.

    Raises:
      ValueError: Unknown, not one for each agent, or for agents that there are not.
    """
    text = FLAGS.base
    if text is None:
        two = vertical.is_multimodal(FLAGS.dataset) and FLAGS.split != "features"
        text = ["0:dbscan", "1:kmeans"] if two else ["kmeans"]
    pairs = [item.split(":", 1) for item in text if ":" in item]
    named = {key: name for key, name in pairs}
    if len(named) < len(pairs) or not set(named) <= {str(a) for a in range(n_agents)}:
        raise ValueError(
            f"base: got {','.join(text)!r}; allowed are the agents 0 to {n_agents - 1}, each once"
        )
    others = [item for item in text if ":" not in item]
    name = named.get(str(agent), others[0] if len(others) == 1 else None)
    if name not in _BASES or len(others) > 1:
        raise ValueError(
            f"base: got {','.join(text)!r}, which gives agent {agent} {name}; allowed is one of"
            f" {', '.join(_BASES)} for all, or agent:clusterer for each with commas"
        )
    return name


# Flags of numbers that runs of one program may differ in; the baselines have none.
TRACED = (
    "feature_share",
    "relaxed",
    "n_candidates",
    "eps",
    "min_samples",
    "gamma",
    "sampling_ratio",
)


def defaults() -> None:
    """What flags say that are not given."""
    FLAGS.dataset = FLAGS.dataset or "multimodal"


def traced() -> tuple[str, ...]:
    """Flags of numbers that runs of one program may differ in."""
    return TRACED if FLAGS.algorithm == "vertcohirf" else ()


def no_axis() -> set[str]:
    """Flags that the algorithm does not read, or that say how a job is shown."""
    own = {
        "base",
        "local_clusters",
        "repetitions",
        "n_graphs",
        "max_iter",
        "similarity",
        *TRACED,
    }
    noise = {"epsilon", "n_sketches"}
    unread = noise if FLAGS.algorithm == "vertcohirf" else own
    if FLAGS.algorithm in ("local_kmeans", "distr_kmeans", "coreset_kmeans"):
        unread = own | noise
    return unread | {"level", "mode"}


def rounds() -> int:
    """Most rounds of a run; the baselines have none."""
    return FLAGS.max_iter if FLAGS.algorithm == "vertcohirf" else 0


def hyperparams() -> dict[str, float | None]:
    """The numbers that may be swept, from flags; None is another program than a number.

    Raises:
      ValueError: A setting is out of range.
    """
    values = {name: FLAGS[name].value for name in TRACED}
    if values["eps"] is None:
        values["eps"] = 0.35 if FLAGS.dataset.lower() == "multimodal_table1" else 2.25
    for name in ("eps", "gamma", "min_samples"):
        if not 0 < values[name] < np.inf:
            raise ValueError(f"{name}: got {values[name]}; allowed is a finite number above 0")
    if not 0 < values["sampling_ratio"] <= 1:
        raise ValueError(f"sampling_ratio: got {FLAGS.sampling_ratio}; allowed is in (0, 1]")
    return values


def method_of(
    name: str, n_clusters: int | None, n_graphs: int, hyper: Mapping[str, Any]
) -> LocalMethod:
    """A base clusterer with its settings.

    Raises:
      ValueError: The number of clusters is not known.
    """
    if n_clusters is None and name != "dbscan":
        raise ValueError("local_clusters: the data set has no labels to count; give it")
    if name == "dbscan":
        return local.dbscan_method(hyper["eps"], hyper["min_samples"])
    if name == "kernel_kmeans":
        return local.kernel_kmeans_method(n_clusters, hyper["gamma"])
    if name == "sc_srgf":
        return local.sc_srgf_method(n_clusters, n_graphs, hyper["sampling_ratio"])
    return local.kmeans_method(n_clusters)


def maker(
    k: int | None, federation: Federation
) -> Callable[[dict[str, float | None]], FederatedAlgorithm]:
    """`hyperparams -> algorithm`, all else from flags.

    Raises:
      ValueError: A flag's value is not allowed.
    """
    name, n_agents = FLAGS.algorithm, federation.n_clients
    if name != "vertcohirf" and k is None:
        raise ValueError("n_clusters: the data set has no labels to count; give --n_clusters")
    if name != "vertcohirf" and FLAGS.level is not None:
        raise ValueError(f"level: {name} has no hierarchy to cut; leave it out")
    if name in ("dpfmps", "dpfmps_p2est"):
        fixed = ALGORITHMS[name](k, epsilon=FLAGS.epsilon, n_sketches=FLAGS.n_sketches)
        return lambda _: fixed
    if name != "vertcohirf":
        return lambda _: ALGORITHMS[name](k)
    n_local = FLAGS.local_clusters or (3 if vertical.is_multimodal(FLAGS.dataset) else k)
    bases = [base_of(agent, n_agents) for agent in range(n_agents)]
    repetitions, similarity, n_graphs = FLAGS.repetitions, FLAGS.similarity, FLAGS.n_graphs

    def make(hyper: dict[str, float | None]) -> FederatedAlgorithm:
        steps = []
        for base_name in bases:
            method = method_of(base_name, n_local, n_graphs, hyper)
            # SC-SRGF draws subspaces of its own.
            steps.append(
                LocalStep(method)
                if base_name == "sc_srgf"
                else LocalStep(
                    method, hyper["feature_share"], repetitions, threshold=hyper["relaxed"]
                )
            )
        return vertcohirf(steps, n_candidates=hyper["n_candidates"], similarity=similarity)

    make(hyperparams())
    return make


def build(agents: Agents) -> FederatedAlgorithm:
    """The algorithm that the flags describe.

    Raises:
      ValueError: A flag's value is not allowed.
    """
    return maker(vertical.n_classes(agents), agents.federation)(hyperparams())


def main() -> None:
    """Runs the job that the flags describe."""
    defaults()
    base.use_compilation_cache()
    # Everything that can be wrong is found before anything is written.
    everyone = checked(lambda: [vertical.agents_of_flags(seed) for seed in seeds()])
    algorithm = checked(lambda: build(everyone[0]))
    k = vertical.n_classes(everyone[0])
    # Without K there is nothing to compare with: only VertCoHiRF needs none.
    alone = None if k is None else local_kmeans(k)
    hidden = everyone[0].federation.without_labels()
    checked(lambda: [alg.init(jax.random.key(0), hidden) for alg in (algorithm, alone) if alg])
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    stem = Path(FLAGS.dataset).stem.lower()
    folder = checked(lambda: base.make_folder(f"{FLAGS.algorithm}-{stem}"))

    run_one = vertcohirf_run(algorithm) if FLAGS.algorithm == "vertcohirf" else one_shot(algorithm)
    run_alone = None if alone is None else one_shot(alone)
    name = FLAGS.algorithm if FLAGS.level is None else f"{FLAGS.algorithm}, level {FLAGS.level}"
    rows: dict[str, list[dict[str, float]]] = {name: []}
    began = time.perf_counter()
    with ProgressBar(2 * len(everyone)) as bar:
        bar.write(everyone[0].federation.describe())
        for seed, agents in zip(seeds(), everyone, strict=True):
            key = jax.random.key(seed)
            outcome = run_one(seed, agents, key, folder, bar)
            bar.advance(1)
            labels = cut(outcome, bar)
            rows[name].append(vertical.rate(agents, labels))
            base.append_rows(
                folder / "labels.csv",
                [
                    {"seed": seed, "id": i, "row": int(agents.rows[i])}
                    | {f"agent_{a}": int(x[i]) for a, x in enumerate(labels)}
                    for i in range(len(labels[0]))
                ],
            )
            if outcome.hierarchy is not None:
                stem_of = "hierarchy" if len(everyone) == 1 else f"hierarchy_seed{seed}"
                outcome.hierarchy.to_json(folder / f"{stem_of}.json")
                outcome.hierarchy.to_csv(folder / f"{stem_of}.csv")
            if run_alone is not None:
                reference = run_alone(seed, agents, key, None, bar).labels
                rows.setdefault("local k-means", []).append(vertical.rate(agents, reference))
                for a, view in enumerate(agents.views):
                    one = agents._replace(views=[view])
                    rows.setdefault(f"local k-means, agent {a}", []).append(
                        vertical.rate(one, [reference[a]])
                    )
            bar.advance(1)
    seconds = time.perf_counter() - began
    traffic = engine.traffic(algorithm, everyone[0].federation)
    vertical.write_summary(
        folder,
        {
            "algorithm": FLAGS.algorithm,
            "dataset": stem,
            "n_agents": len(everyone[0].views),
            "n_samples": len(everyone[0].views[0]),
            "n_clusters": k,
            "seeds": seeds(),
            "metrics": vertical.statistics(rows[name]),
            "rows": {title: vertical.statistics(scores) for title, scores in rows.items()},
            "bytes_padded": {stage: {"up": t.up, "down": t.down} for stage, t in traffic.items()},
            "seconds": seconds,
        },
    )
    compared = "" if k is None else f"; local k-means with k = {k} exchanges nothing"
    print(f"\nmean over agents and {len(seeds())} seed{'s' * (len(seeds()) > 1)}{compared}")
    for line in vertical.table(rows):
        print(line)
    if FLAGS.algorithm != "vertcohirf":
        up, down = (sum(getattr(t, way) for t in traffic.values()) for way in ("up", "down"))
        print(f"\nsent {up / 1e3:.1f} kB up, {down / 1e3:.1f} kB down")
    if outcome.hierarchy is not None:
        title = f"cluster fusion hierarchy, VertCoHiRF on {stem}, seed {seeds()[-1]}"
        plots.hierarchy(folder / "hierarchy.png", outcome.hierarchy, title)
    print(f"\n{seconds:.1f} s with compilation; written: {folder}/")


Runner = Callable[[int, Agents, jax.Array, Path | None, ProgressBar], Outcome]


def vertcohirf_run(algorithm: FederatedAlgorithm) -> Runner:
    """Runs all iterations of one seed, and tells of each."""
    masked = jax.jit(lambda federation, key: engine.run(algorithm, federation, key, FLAGS.max_iter))

    def make(_: None) -> FederatedAlgorithm:
        return algorithm

    def run(
        seed: int, agents: Agents, key: jax.Array, folder: Path | None, bar: ProgressBar
    ) -> Outcome:
        n = len(agents.views[0])
        rounds: list[dict[str, int]] = []

        def tell(r: int, _: Any, info: Any) -> None:
            found = info[0]["server"]
            bits = communication(
                n,
                [int(c) for c in found["n_labels"]],
                *(int(found[x]) for x in ("n_active", "n_clusters", "n_listed", "n_longest")),
            )
            row = {
                "seed": seed,
                "iteration": r,
                "active": int(found["n_active"]),
                "clusters": int(found["n_clusters"]),
                "bits_labels": bits.labels,
                "bits_rankings": bits.rankings,
                "bits_bound": bits.bound,
                "bytes_int32": bits.int32_bytes,
            }
            if r == 1:
                bar.write(
                    f"\n{'seed iteration':>14s}{'active':>9s}{'clusters':>10s}{'bits':>13s}"
                    f"{'bound':>13s}{'as int32, kB':>14s}"
                )
            bar.write(
                f"{seed:4d}{r:10d}{row['active']:9d}{row['clusters']:10d}"
                f"{bits.labels + bits.rankings:13d}{bits.bound:13d}"
                f"{bits.int32_bytes / 1e3:14.1f}"
            )
            rounds.append(row)
            if folder is not None:
                base.append_rows(folder / "rounds.csv", [row])

        hidden = agents.federation.without_labels()
        if FLAGS.mode == "masked":
            bar.write("one program for the whole run: it tells of its iterations when it ends")
            result = masked(hidden, key)
            for r in range(int(result.n_rounds)):
                tell(r + 1, None, jax.tree.map(lambda x, r=r: x[r], result.info["rounds"]))
        else:
            result = engine.run_compacting(make, hidden, key, FLAGS.max_iter, on_round=tell)
        state = result.state.server
        hierarchy = Hierarchy(
            np.asarray(state.parents),
            np.asarray(state.absorbed_at),
            np.asarray(state.active)[: int(state.n_active)],
        )
        if rounds[-1]["clusters"] == n > 1:
            bar.write(
                "no two samples were ever labelled alike by all: every sample is its own cluster"
            )
        shared = np.asarray(result.labels[0][0])
        return Outcome([shared] * len(agents.views), hierarchy, rounds)

    return run


def one_shot(algorithm: FederatedAlgorithm) -> Runner:
    """Runs a method without rounds."""
    program = jax.jit(lambda federation, key: engine.run(algorithm, federation, key, 0).labels)

    def run(
        seed: int, agents: Agents, key: jax.Array, folder: Path | None, bar: ProgressBar
    ) -> Outcome:
        labels = program(agents.federation.without_labels(), key)
        return Outcome([np.asarray(x[0]) for x in labels], None, [])

    return run


def cut(outcome: Outcome, bar: ProgressBar) -> list[np.ndarray]:
    """The labels at the level of the flag; the final ones without it."""
    if FLAGS.level is None or outcome.hierarchy is None:
        return outcome.labels
    last = outcome.hierarchy.n_levels - 1
    if FLAGS.level > last:
        bar.write(f"level {FLAGS.level}: the last one is {last}, whose clusters are the final ones")
    return [outcome.hierarchy.labels(FLAGS.level)] * len(outcome.labels)


if __name__ == "__main__":
    base.launch(main)
