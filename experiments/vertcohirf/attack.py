"""VertCoHiRF with one Byzantine agent, after the paper's appendix A.4.

`python -m experiments.vertcohirf_attack`: four Gaussian clusters at the corners of a simplex, three
agents with one informative and one noise feature each; the named attacker sends false rankings. For
every spread sigma the mean ARI over seeds with its 95 % confidence band, and the mean of the paired
differences to the run without attack. All seeds of a curve's point are one batched program.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from scipy import stats

from experiments import base, vertical
from experiments.base import checked, seeds
from experiments.lib import plots
from experiments.progress import ProgressBar, require_tqdm
from jaxfedmvc import engine, metrics
from jaxfedmvc.algorithms.vertcohirf import LocalStep, vertcohirf
from jaxfedmvc.attacks.byzantine import attacked
from jaxfedmvc.clustering.local import kmeans_method
from jaxfedmvc.data import synthetic
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.federation import Federation

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(base)

flags.DEFINE_list("sigmas", ["0.1", "0.2", "0.4", "1.0"], "Standard deviations of the clusters.")
flags.DEFINE_list("attacks", ["random_ranking", "inverse_ranking"], "What the attacker sends.")
flags.DEFINE_integer("attacker", 2, "The one Byzantine agent, 0 to 2.", 0, 2)
flags.DEFINE_integer("samples", 1000, "Samples.", lower_bound=8)
flags.DEFINE_integer("attack_clusters", 4, "C of every agent's k-means.", lower_bound=2)
flags.DEFINE_float("attack_share", 0.5, "q of every agent: at 0.5 one of its two features.")
flags.DEFINE_integer("attack_repetitions", 1, "R of every agent.", lower_bound=1)
flags.DEFINE_integer("attack_max_iter", 30, "Most iterations.", lower_bound=1)
flags.DEFINE_integer("trials", 50, "Seeds of data and run for each point.", lower_bound=2)
flags.DEFINE_integer("batch", 25, "Seeds computed at once; bounds memory.", lower_bound=1)


def sigmas() -> list[float]:
    """The spreads, from the flag.

    Raises:
      ValueError: Not numbers above 0.
    """
    try:
        values = [float(text) for text in FLAGS.sigmas]
    except ValueError:
        values = []
    if not values or not all(0 < value < np.inf for value in values):
        raise ValueError(f"sigmas: got {','.join(FLAGS.sigmas)!r}; allowed are numbers above 0")
    return values


def stacked(sigma: float, trials: list[int]) -> Federation:
    """The federations of these seeds on a leading axis."""
    federations = []
    for trial in trials:
        dataset = synthetic.simplex(trial, sigma, FLAGS.samples)
        parts = vertical_partition(FLAGS.samples, len(dataset.views))
        federations.append(Federation.from_arrays(dataset.views, dataset.labels, partition=parts))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *federations)


def main() -> None:
    """Runs the study that the flags describe."""
    base.use_compilation_cache()
    spreads = checked(sigmas)
    method = kmeans_method(FLAGS.attack_clusters)
    honest = checked(
        lambda: vertcohirf(LocalStep(method, FLAGS.attack_share, FLAGS.attack_repetitions))
    )
    variants = {"no attack": honest} | checked(
        lambda: {name: attacked(honest, name, [FLAGS.attacker]) for name in FLAGS.attacks}
    )
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    checked(lambda: synthetic.simplex(0, spreads[0], FLAGS.samples))
    folder = checked(lambda: base.make_folder("vertcohirf_attack-simplex"))
    first = seeds()[0]
    trials = list(range(first, first + FLAGS.trials))
    chunks = [trials[i : i + FLAGS.batch] for i in range(0, len(trials), FLAGS.batch)]
    # Every chunk of the same size: the last one begins earlier and its overlap is dropped.
    size = min(FLAGS.batch, len(trials))

    def program(name: str):
        def one(federation: Federation, key: jax.Array) -> jax.Array:
            labels = engine.run(variants[name], federation, key, FLAGS.attack_max_iter).labels[0][0]
            truth = federation.labels[0][0]  # type: ignore[index]
            return metrics.ari(truth, labels, 4, FLAGS.samples)

        return jax.jit(jax.vmap(one))

    programs = {name: program(name) for name in variants}
    scores = {name: np.zeros((len(trials), len(spreads))) for name in variants}
    with ProgressBar(len(spreads) * len(chunks) * len(variants)) as bar:
        for s, sigma in enumerate(spreads):
            for chunk in chunks:
                block = trials[-size:] if len(chunk) < size else chunk
                federation = stacked(sigma, block)
                keys = jax.vmap(jax.random.key)(jnp.array(block))
                for name, run in programs.items():
                    values = np.asarray(run(federation, keys))
                    places = [trial - first for trial in block]
                    scores[name][places, s] = values
                    bar.advance(1)
            for name, values in scores.items():
                rows = [
                    {"sigma": sigma, "variant": name, "seed": trial, "ari": values[i, s]}
                    for i, trial in enumerate(trials)
                ]
                base.append_rows(folder / "trials.csv", rows)
    plots.attack_bands(
        folder / "attack.png",
        spreads,
        scores,
        "sigma",
        "ARI",
        f"VertCoHiRF(k-means), attacker is agent {FLAGS.attacker}, {len(trials)} seeds",
    )
    summary = {}
    print(f"mean ARI over {len(trials)} seeds, +- half the 95 % confidence interval of the mean")
    print(f"{'sigma':>7s}" + "".join(f"{name:>24s}" for name in variants))
    for s, sigma in enumerate(spreads):
        cells = [_interval(values[:, s]) for values in scores.values()]
        print(f"{sigma:7.2f}" + "".join(f"{f'{m:.4f} +- {h:.4f}':>24s}" for m, h in cells))
        summary[str(sigma)] = {
            name: {"mean": m, "half_width_95": h}
            for name, (m, h) in zip(scores, cells, strict=True)
        }
    print("\nattack minus no attack, paired by seed")
    for s, sigma in enumerate(spreads):
        cells = []
        for name in list(variants)[1:]:
            m, h = _interval(scores[name][:, s] - scores["no attack"][:, s])
            summary[str(sigma)][name] |= {"difference": m, "difference_half_width_95": h}
            cells.append(f"{f'{m:+.4f} +- {h:.4f}':>24s}")
        print(f"{sigma:7.2f}{'':24s}" + "".join(cells))
    vertical.write_summary(folder, {"seeds": trials, "sigmas": spreads, "ari": summary})
    print(f"\nwritten: {folder}/ (trials.csv, summary.json, flags.txt, attack.png)")


def _interval(values: np.ndarray) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval by Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return float(np.mean(values)), float(half)


if __name__ == "__main__":
    base.launch(main)
