"""VertCoHiRF with one Byzantine agent: `python -m experiments.vertcohirf.attack` (appendix A.4).

Four Gaussian clusters at the corners of a simplex, three agents with one informative and one noise
feature each; the named attacker sends false rankings. For every spread sigma the mean ARI over
seeds with its 95 % confidence band, and the mean of the paired differences to the run without
attack. All seeds of a curve's point are one batched program. A study that was killed goes on with
--resume.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.sharding import Mesh
from scipy import stats

from experiments.lib import folder, plots, study
from experiments.lib.command import JobSettings, checked
from experiments.lib.devices import each
from experiments.lib.progress import Progress
from experiments.lib.study import Rows, Study, write_summary
from experiments.lib.text import counted
from jaxfedmvc import checks, engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.vertcohirf import LocalStep, vertcohirf_of_steps
from jaxfedmvc.attacks.byzantine import attacked
from jaxfedmvc.clustering.local import kmeans_method
from jaxfedmvc.data import synthetic
from jaxfedmvc.data.vertical import vertical_partition
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics import host

HONEST = "no attack"
_CORNERS = 4


@dataclasses.dataclass(frozen=True)
class AttackSettings:
    """Settings of the attack study.

    Attributes:
      sigmas: Standard deviations of the clusters.
      attacks: What the attacker sends: random_ranking, inverse_ranking, random_labels or
        all_one_cluster; each is a curve.
      attacker: The one Byzantine agent, 0 to 2.
      samples: Samples of a seed.
      attack_clusters: C of every agent's k-means.
      attack_share: q of every agent; at 0.5 it sees one of its two features.
      attack_repetitions: R of every agent.
      attack_max_iter: Most iterations of a run.
      trials: Seeds of data and run for each point.
      batch: Seeds computed at once, which bounds memory.
    """

    sigmas: tuple[float, ...] = (0.1, 0.2, 0.4, 1.0)
    attacks: tuple[str, ...] = ("random_ranking", "inverse_ranking")
    attacker: int = 2
    samples: int = 1000
    attack_clusters: int = 4
    attack_share: float = 0.5
    attack_repetitions: int = 1
    attack_max_iter: int = 30
    trials: int = 50
    batch: int = 25

    def __post_init__(self) -> None:
        """Raises ValueError that names the setting."""
        if not self.sigmas or not all(0 < sigma < np.inf for sigma in self.sigmas):
            raise checks.wrong("sigmas", self.sigmas, "a list of finite numbers above 0")
        if not 0 <= self.attacker <= 2:
            raise checks.wrong("attacker", self.attacker, "0, 1 or 2")
        checks.at_least(self, 8, "samples")
        checks.at_least(self, 2, "attack_clusters", "trials")
        checks.at_least(self, 1, "attack_repetitions", "attack_max_iter", "batch")


# What else is a flag here.
SEED: study.Groups = {JobSettings: ("seed",)}


@folder.stoppable
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the study that the command line describes."""
    run(study.parse_or_exit(arguments, __doc__, {AttackSettings: None, **SEED}))


def run(asked: Study) -> None:
    """Runs the study; prints, draws and writes what it finds."""
    settings: AttackSettings = checked(partial(asked.read, AttackSettings))
    job: JobSettings = checked(partial(asked.read, JobSettings))
    variants = checked(partial(algorithms, settings))
    seeds = list(range(job.seed, job.seed + settings.trials))
    path = checked(partial(asked.open, "vertcohirf_attack-simplex"))
    rows = checked(lambda: Rows(path / "trials.csv", ("sigma", "variant")))
    made_by = folder.made_by(asked.given(AttackSettings, JobSettings))
    with Progress(asked.folder.progress) as progress:
        measured(settings, variants, seeds, rows, progress, asked.mesh, made_by)
    # As they were written: pandas before 3.1 rounds.
    exact = dict.fromkeys(("sigma", "ari"), float)
    trials = pd.read_csv(path / "trials.csv", converters=exact)
    table = trials.pivot(index="seed", columns=["variant", "sigma"], values="ari")
    scores = {name: table[name][list(settings.sigmas)].to_numpy() for name in variants}
    n = counted(len(seeds), "seed")
    title = f"VertCoHiRF(k-means), attacker is agent {settings.attacker}, {n}"
    xlabel = "sigma, the standard deviation of the clusters"
    plots.attack_bands(path / "attack.png", settings.sigmas, scores, xlabel, "ARI", title)
    found = summarise(settings.sigmas, scores)
    print(f"mean ARI over {n}, +- half the 95 % confidence interval of the mean")
    print(_text(found["mean"].map("{:.4f}".format), found["half_width_95"]))
    differences = found.dropna()
    print("\nattack minus no attack, paired by seed")
    signed = differences["difference"].map("{:+.4f}".format)
    print(_text(signed, differences["difference_half_width_95"]))
    by_sigma: dict[str, dict[str, Any]] = {str(sigma): {} for sigma in settings.sigmas}
    for (sigma, name), row in found.iterrows():
        by_sigma[str(sigma)][name] = row.dropna().to_dict()
    write_summary(path, {"seeds": seeds, "sigmas": settings.sigmas, "ari": by_sigma})
    print(f"\nwritten: {path}/ (trials.csv, summary.json, flags.txt, attack.png)")


def algorithms(settings: AttackSettings) -> dict[str, FederatedAlgorithm]:
    """Returns the protocol without an attack, and with each of them.

    Raises:
      ValueError: A setting is out of range, or an attack is unknown.
    """
    method = kmeans_method(settings.attack_clusters)
    step = LocalStep(method, settings.attack_share, settings.attack_repetitions)
    honest = vertcohirf_of_steps(step)
    attacks = {name: attacked(honest, name, [settings.attacker]) for name in settings.attacks}
    return {HONEST: honest} | attacks


def measured(
    settings: AttackSettings,
    variants: dict[str, FederatedAlgorithm],
    seeds: Sequence[int],
    rows: Rows,
    progress: Progress,
    mesh: Mesh | None = None,
    made_by: Mapping[str, str] = {},
) -> None:
    """Runs the trials that have no row yet, by batches.

    A device of a mesh takes a batch at a time. Every batch is of the same size: the last one begins
    earlier, and what overlaps is the same.
    """
    size = min(settings.batch, len(seeds))
    starts = [min(start, len(seeds) - size) for start in range(0, len(seeds), size)]
    programs = {name: _program(a, settings.attack_max_iter) for name, a in variants.items()}
    places = [
        (sigma, start, name)
        for sigma, start, name in itertools.product(settings.sigmas, starts, variants)
        if rows.left({"sigma": sigma, "variant": name}, seeds[start : start + size])
    ]
    progress.expect(collections.Counter(name for *_, name in places))

    def one_batch(place: tuple[float, int, str]) -> tuple[list[float], float]:
        sigma, start, name = place
        began = time.perf_counter()
        batch = seeds[start : start + size]
        federations = _stacked(sigma, batch, settings.samples)
        labels = programs[name](federations, jax.vmap(jax.random.key)(jnp.array(batch)))
        return _ari(federations, labels), time.perf_counter() - began

    for (sigma, start, name), (ari, took) in zip(
        places, each(one_batch, places, mesh), strict=True
    ):
        each_took = round(took / size, 3)  # compilation included
        for seed, value in zip(seeds[start : start + size], ari, strict=True):
            names = {"sigma": sigma, "variant": name, "seed": seed}
            rows.add({**names, "ari": value, "seconds": each_took, **made_by})
        progress.done(name)


def _stacked(sigma: float, seeds: Sequence[int], n_samples: int) -> Federation:
    """Returns the federations of these seeds on a leading axis."""
    federations = []
    for seed in seeds:
        dataset = synthetic.simplex(seed, sigma, n_samples)
        parts = vertical_partition(n_samples, len(dataset.views))
        federations.append(Federation.from_arrays(dataset.views, dataset.labels, partition=parts))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *federations)


def _program(algorithm: FederatedAlgorithm, rounds: int) -> Any:
    """Compiles `(federations, keys) -> the first agent's clusters [seeds, samples]`."""

    def one(federation: Federation, key: jax.Array) -> jax.Array:
        hidden = federation.without_labels()
        return engine.run(algorithm, hidden, key, rounds).labels[0][0]

    return jax.jit(jax.vmap(one))


def _ari(federations: Federation, labels: jax.Array) -> list[float]:
    """Scores the clusters [seeds, samples] of each seed."""
    assert federations.labels is not None
    truth = np.asarray(federations.labels[0])[:, 0]
    tables = host.client_tables(truth, labels, truth >= 0, (_CORNERS, labels.shape[1]))
    return [host.table_scores(table)["ari"] for table in tables]


def summarise(sigmas: Sequence[float], scores: dict[str, np.ndarray]) -> pd.DataFrame:
    """Returns means and half the widths of their 95 % confidence intervals, by Student's t.

    Args:
      sigmas: What was varied.
      scores: For each variant the ARI [seeds, sigmas].

    Returns:
      A row for each sigma and variant; differences are to no attack, paired by seed.
    """

    def interval(values: np.ndarray) -> tuple[float, float]:
        half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
        return float(np.mean(values)), float(half)

    rows: dict[tuple[float, str], dict[str, float]] = {}
    for s, sigma in enumerate(sigmas):
        for name, values in scores.items():
            mean, half = interval(values[:, s])
            rows[sigma, name] = {"mean": mean, "half_width_95": half}
            if name != HONEST:
                mean, half = interval((values - scores[HONEST])[:, s])
                rows[sigma, name] |= {"difference": mean, "difference_half_width_95": half}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(["sigma", "variant"])


def _text(means: pd.Series, halves: pd.Series) -> str:
    cells = means + " +- " + halves.map("{:.4f}".format)
    sigmas, names = (cells.index.unique(level) for level in cells.index.names)
    return cells.unstack().loc[sigmas, names].rename_axis(None, axis=1).to_string()


if __name__ == "__main__":
    main()
