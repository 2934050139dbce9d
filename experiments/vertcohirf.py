"""VertCoHiRF and the vertical baselines: `python -m experiments.vertcohirf [--algorithm=...]`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments import base, vertical
from experiments.base import checked, seeds
from experiments.progress import ProgressBar, require_tqdm
from experiments.vertical import Agents
from jaxfedmvc import engine, plots
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms import ALGORITHMS, local_kmeans
from jaxfedmvc.algorithms.vertcohirf import LocalStep, communication, vertcohirf
from jaxfedmvc.clustering import local
from jaxfedmvc.clustering.local import LocalMethod
from jaxfedmvc.hierarchy import Hierarchy

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(vertical)

_BASES = ("kmeans", "dbscan", "kernel_kmeans", "sc_srgf")
_BASELINES = ("distr_kmeans", "coreset_kmeans", "dpfmps", "dpfmps_p2est", "local_kmeans")

flags.DEFINE_enum("algorithm", "vertcohirf", ["vertcohirf", *_BASELINES], "The method.")
flags.DEFINE_list(
    "base", None,
    f"Base clusterer ({', '.join(_BASES)}) of all agents, or agent:clusterer for each; None:"
    " kmeans, and 0:dbscan,1:kmeans for the multimodal set.",
)  # fmt: skip
flags.DEFINE_integer(
    "local_clusters", None, "C of the base clusterers; None: 3 for multimodal, else K.",
    lower_bound=1,
)  # fmt: skip
flags.DEFINE_integer("repetitions", 2, "R, clusterings of feature subsets by each agent.")
flags.DEFINE_float("feature_share", 1.0, "q, the share of its features that a repetition sees.")
flags.DEFINE_float("relaxed", None, "h of the relaxed local consensus (paper: 0.8); None: strict.")
flags.DEFINE_integer("n_candidates", None, "N_s, members of a cluster that are ranked; None: all.")
flags.DEFINE_enum(
    "similarity", "cosine", ["cosine", "rbf", "laplacian", "rbf_median"], "How medoids are ranked."
)
flags.DEFINE_float("eps", 2.25, "DBSCAN's radius.")
flags.DEFINE_integer("min_samples", 5, "DBSCAN's neighbours of a core sample, itself included.")
flags.DEFINE_float("gamma", 1.0, "Kernel k-means: exp(-gamma d^2).")
flags.DEFINE_integer("n_graphs", 20, "SC-SRGF's subspace graphs.", lower_bound=1)
flags.DEFINE_float("sampling_ratio", 0.5, "SC-SRGF's share of features in a subspace.")
flags.DEFINE_integer("max_iter", 100, "Most iterations.", lower_bound=1)
flags.DEFINE_integer("level", None, "Cut the hierarchy here: 0 is the first iteration's clusters.")
flags.DEFINE_enum(
    "mode", "compacting", ["compacting", "masked"],
    "compacting shrinks the arrays between iterations; masked is one program for a whole run.",
)  # fmt: skip
flags.DEFINE_float("epsilon", 1.0, "Privacy budget of the dpfmps methods.")
flags.DEFINE_integer("n_sketches", None, "Sketches of the dpfmps methods; None: n // 10.")


class Outcome(NamedTuple):
    """One seed's result: each agent's clusters [n], and the hierarchy where there is one."""

    labels: list[np.ndarray]
    hierarchy: Hierarchy | None
    rounds: list[dict[str, int]]


def base_of(agent: int) -> str:
    """The base clusterer of an agent, from the flag.

    Raises:
      ValueError: Unknown, or not one for each agent.
    """
    text = FLAGS.base
    if text is None:
        text = ["0:dbscan", "1:kmeans"] if _is_multimodal() else ["kmeans"]
    named = dict(item.split(":", 1) for item in text if ":" in item)
    others = [item for item in text if ":" not in item]
    name = named.get(str(agent), others[0] if len(others) == 1 else None)
    if name not in _BASES or len(others) > 1:
        raise ValueError(
            f"base: got {','.join(text)!r}, which gives agent {agent} {name}; allowed is one of"
            f" {', '.join(_BASES)} for all, or agent:clusterer for each with commas"
        )
    return name


def method_of(agent: int, n_clusters: int) -> LocalMethod:
    """The agent's base clusterer with its settings, from flags.

    Raises:
      ValueError: A setting is out of range.
    """
    name = base_of(agent)
    for flag in ("eps", "gamma", "min_samples"):
        if not FLAGS[flag].value > 0:
            raise ValueError(f"{flag}: got {FLAGS[flag].value}; allowed is above 0")
    if not 0 < FLAGS.sampling_ratio <= 1:
        raise ValueError(f"sampling_ratio: got {FLAGS.sampling_ratio}; allowed is in (0, 1]")
    if name == "dbscan":
        return local.dbscan_method(FLAGS.eps, FLAGS.min_samples)
    if name == "kernel_kmeans":
        return local.kernel_kmeans_method(n_clusters, FLAGS.gamma)
    if name == "sc_srgf":
        return local.sc_srgf_method(n_clusters, FLAGS.n_graphs, FLAGS.sampling_ratio)
    return local.kmeans_method(n_clusters)


def build(agents: Agents) -> FederatedAlgorithm:
    """The algorithm that the flags describe.

    Raises:
      ValueError: A flag's value is not allowed.
    """
    name, k = FLAGS.algorithm, vertical.n_classes(agents)
    if name in ("dpfmps", "dpfmps_p2est"):
        return ALGORITHMS[name](k, epsilon=FLAGS.epsilon, n_sketches=FLAGS.n_sketches)
    if name != "vertcohirf":
        return ALGORITHMS[name](k)
    n_local = FLAGS.local_clusters or (3 if _is_multimodal() else k)
    steps = [
        LocalStep(
            method_of(agent, n_local), FLAGS.feature_share, FLAGS.repetitions,
            threshold=FLAGS.relaxed,
        )
        for agent in range(len(agents.views))
    ]  # fmt: skip
    return vertcohirf(steps, n_candidates=FLAGS.n_candidates, similarity=FLAGS.similarity)


def _is_multimodal() -> bool:
    return FLAGS.dataset in ("multimodal", "multimodal_table1")


def main() -> None:
    """Runs the job that the flags describe."""
    FLAGS.dataset = FLAGS.dataset or "multimodal"
    base.use_compilation_cache()
    # Everything that can be wrong is found before anything is written.
    everyone = checked(lambda: [vertical.agents_of_flags(seed) for seed in seeds()])
    algorithm = checked(lambda: build(everyone[0]))
    k = vertical.n_classes(everyone[0])
    alone = local_kmeans(k)
    checked(lambda: [alg.init(jax.random.key(0), everyone[0].federation.without_labels())
                     for alg in (algorithm, alone)])  # fmt: skip
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    stem = Path(FLAGS.dataset).stem.lower()
    folder = checked(lambda: base.make_folder(f"{FLAGS.algorithm}-{stem}"))

    run_one = vertcohirf_run(algorithm) if FLAGS.algorithm == "vertcohirf" else one_shot(algorithm)
    run_alone = one_shot(alone)
    rows: dict[str, list[dict[str, float]]] = {}
    began = time.perf_counter()
    with ProgressBar(2 * len(everyone)) as bar:
        bar.write(everyone[0].federation.describe())
        for seed, agents in zip(seeds(), everyone, strict=True):
            key = jax.random.key(seed)
            outcome = run_one(seed, agents, key, folder, bar)
            bar.advance(1)
            labels = cut(outcome)
            name = FLAGS.algorithm
            if FLAGS.level is not None:
                name += f", level {FLAGS.level}"
            rows.setdefault(name, []).append(vertical.rate(agents, labels))
            base.append_rows(folder / "labels.csv", [
                {"seed": seed, "row": i, **{f"agent_{a}": int(x[i]) for a, x in enumerate(labels)}}
                for i in range(len(labels[0]))
            ])  # fmt: skip
            reference = run_alone(seed, agents, key, None, bar).labels
            rows.setdefault("local k-means", []).append(vertical.rate(agents, reference))
            for a, view in enumerate(agents.views):
                one = Agents(agents.federation, [view], agents.labels)
                rows.setdefault(f"local k-means, agent {a}", []).append(
                    vertical.rate(one, [reference[a]])
                )
            bar.advance(1)
    seconds = time.perf_counter() - began
    if outcome.hierarchy is not None:
        _keep_hierarchy(folder, outcome.hierarchy, stem)
    traffic = engine.traffic(algorithm, everyone[0].federation)
    vertical.write_summary(folder, {
        "algorithm": FLAGS.algorithm, "dataset": stem, "n_agents": len(everyone[0].views),
        "n_samples": len(everyone[0].views[0]), "n_clusters": k, "seeds": seeds(),
        "metrics": vertical.statistics(next(iter(rows.values()))),
        "rows": {name: vertical.statistics(scores) for name, scores in rows.items()},
        "bytes_padded": {stage: {"up": t.up, "down": t.down} for stage, t in traffic.items()},
        "seconds": seconds,
    })  # fmt: skip
    print()
    print(f"mean over agents and {len(seeds())} seed{'s' * (len(seeds()) > 1)}; local k-means with"
          f" k = {k} exchanges nothing")  # fmt: skip
    for line in vertical.table(rows):
        print(line)
    if FLAGS.algorithm != "vertcohirf":
        up, down = (sum(getattr(t, way) for t in traffic.values()) for way in ("up", "down"))
        print(f"\nsent {up / 1e6:.3f} MB up, {down / 1e6:.3f} MB down")
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
                n, [int(c) for c in found["n_labels"]],
                *(int(found[x]) for x in ("n_active", "n_clusters", "n_listed", "n_longest")),
            )  # fmt: skip
            row = {
                "seed": seed, "iteration": r, "active": int(found["n_active"]),
                "clusters": int(found["n_clusters"]), "bits_labels": bits.labels,
                "bits_rankings": bits.rankings, "bits_bound": bits.bound,
                "bytes_int32": bits.int32_bytes,
            }  # fmt: skip
            if r == 1:
                bar.write(f"\n{'seed iteration':>14s}{'active':>9s}{'clusters':>10s}{'bits':>13s}"
                          f"{'bound':>13s}{'as int32, kB':>14s}")  # fmt: skip
            bar.write(f"{seed:4d}{r:10d}{row['active']:9d}{row['clusters']:10d}"
                      f"{bits.labels + bits.rankings:13d}{bits.bound:13d}"
                      f"{bits.int32_bytes / 1e3:14.1f}")  # fmt: skip
            rounds.append(row)
            if folder is not None:
                base.append_rows(folder / "rounds.csv", [row])

        hidden = agents.federation.without_labels()
        if FLAGS.mode == "masked":
            result = masked(hidden, key)
            for r in range(int(result.n_rounds)):
                tell(r + 1, None, jax.tree.map(lambda x, r=r: x[r], result.info["rounds"]))
        else:
            result = engine.run_compacting(make, hidden, key, FLAGS.max_iter, on_round=tell)
        state = result.state.server
        hierarchy = Hierarchy(
            np.asarray(state.parents), np.asarray(state.absorbed_at),
            np.asarray(state.active)[: int(state.n_active)],
        )  # fmt: skip
        if rounds[-1]["clusters"] == n > 1:
            bar.write("no two samples were ever labelled alike by all: every sample is its own"
                      " cluster")  # fmt: skip
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


def cut(outcome: Outcome) -> list[np.ndarray]:
    """The labels at the level of the flag; the final ones without it."""
    if FLAGS.level is None or outcome.hierarchy is None:
        return outcome.labels
    return [outcome.hierarchy.labels(FLAGS.level)] * len(outcome.labels)


def _keep_hierarchy(folder: Path, hierarchy: Hierarchy, stem: str) -> None:
    hierarchy.to_json(folder / "hierarchy.json")
    hierarchy.to_csv(folder / "hierarchy.csv")
    title = f"cluster fusion hierarchy, VertCoHiRF on {stem}, seed {seeds()[-1]}"
    plots.hierarchy(folder / "hierarchy.png", hierarchy, title)


if __name__ == "__main__":
    base.launch(main)
