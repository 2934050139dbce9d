"""What FedHK's methods reach, and at what price: `python -m experiments.fedhk_study`.

Four parts. "methods": every method, and the printed forms, beside k-means on pooled samples and on
those of every client; clients alike and skewed. "bytes": accuracy against what travels, for ranks
of the compressed methods. "personal": global against personal centres, on a real set and on one
whose clients differ by construction. "privacy": accuracy against epsilon. Labels score, and nothing
else.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import base, charts
from experiments.base import checked, seeds
from experiments.lib import plots
from experiments.progress import ProgressBar, require_tqdm
from jaxfedmvc import data, engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms import (
    FedHKConfig,
    FedHKHyperparams,
    e_fkmvc,
    fedhk_parafac2,
    fedhk_tucker,
    local_kmeans,
)
from jaxfedmvc.algorithms.fedhk.private import PrivacySettings, private_e_fkmvc, releases
from jaxfedmvc.clustering import kmeans
from jaxfedmvc.data.dataset import Dataset
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics import scores as scores_of
from jaxfedmvc.metrics.federation import score
from jaxfedmvc.privacy import gaussian_noise_multiplier

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(base)

PARTS = ("methods", "bytes", "personal", "privacy")
METRICS = ("acc", "nmi", "ari")

flags.DEFINE_list("study_parts", list(PARTS), f"Which of {', '.join(PARTS)}.")
flags.DEFINE_list(
    "study_sets", ["digits", "mfeat", "scene15", "bdgp", "mnist_usps"], "Sets of methods."
)
flags.DEFINE_list("rank_sets", ["digits", "mfeat"], "Sets of bytes.")
flags.DEFINE_list("private_sets", ["digits", "mnist_usps"], "Sets of privacy; in [0, 1].")
flags.DEFINE_list("rows", [], "Rows of methods that are run; empty: all.")
flags.DEFINE_integer("study_clients", 8, "Clients, all with all views.", lower_bound=1)
flags.DEFINE_float("skew", 0.3, "Dirichlet concentration of the skewed clients' classes.")
flags.DEFINE_integer("max_rounds", 50, "Most rounds of a run.", lower_bound=1)

Make = Callable[[], FederatedAlgorithm]


def methods(k: int) -> dict[str, Make]:
    """The rows of "methods" for k clusters."""
    plain = FedHKConfig(k)
    average = dataclasses.replace(plain, aggregation="average")
    printed = dataclasses.replace(average, hkc="minmax", centre_rule="printed")
    personal = dataclasses.replace(plain, personal="proximal")
    return {
        "E-FKMVC": lambda: e_fkmvc(plain),
        "E-FKMVC, 8 starts": lambda: e_fkmvc(dataclasses.replace(plain, n_restarts=8)),
        "Tucker": lambda: fedhk_tucker(plain),
        "PARAFAC2, views": lambda: fedhk_parafac2(plain, placement="views"),
        "PARAFAC2, clients": lambda: fedhk_parafac2(plain),
        "PARAFAC2, samples": lambda: fedhk_parafac2(plain, placement="samples"),
        "person, Tucker": lambda: fedhk_tucker(personal),
        "person, PARAFAC2 views": lambda: fedhk_parafac2(personal, placement="views"),
        "average (60), E=1": lambda: e_fkmvc(average),
        "average (60), E=5": lambda: e_fkmvc(dataclasses.replace(average, local_steps=5)),
        "as printed: (23), (30), (60)": lambda: e_fkmvc(printed, FedHKHyperparams(alpha=5.0)),
        "Tucker, procrustes": lambda: fedhk_tucker(average, alignment="procrustes"),
        "k-means of each client": lambda: local_kmeans(k),
    }


def ranks(k: int, dataset: Dataset) -> dict[str, dict[str, Make]]:
    """The series of "bytes"."""
    plain = FedHKConfig(k)
    widths = [view.shape[1] for view in dataset.views]
    return {
        "E-FKMVC": {"whole": lambda: e_fkmvc(plain)},
        "Tucker, R2": {
            str(r): functools.partial(fedhk_tucker, plain, None, (None, r, None))
            for r in (k // 2, k, 2 * k, 4 * k)
            if r <= min(max(widths), k * len(widths))
        },
        "Tucker, (c-2, R2, s-1)": {
            str(r): functools.partial(fedhk_tucker, plain, None, (k - 2, r, len(widths) - 1))
            for r in (k, 2 * k)
            if r <= min(max(widths), (k - 2) * (len(widths) - 1))
        },
        "PARAFAC2 of views, R": {
            str(r): functools.partial(fedhk_parafac2, plain, None, r, "views")
            for r in sorted({2, min(4, *widths), min(6, *widths), min(k, *widths)})
        },
        "PARAFAC2 of clients, R": {
            str(r): functools.partial(fedhk_parafac2, plain, None, r, "clients")
            for r in (k // 2, k)
        },
        "PARAFAC2 of samples, R": {
            str(r): functools.partial(fedhk_parafac2, plain, None, r, "samples")
            for r in (k // 2, k, 3 * k // 2)
        },
    }


def load(name: str) -> Dataset:
    """A named set with labels.

    Raises:
      ValueError: It has none; or as `data.load`.
    """
    dataset = data.load(name, FLAGS.data_dir, FLAGS.scale)
    if dataset.labels is None:
        raise ValueError(f"study_sets: {name} has no labels to score against")
    return dataset


def federation(dataset: Dataset, seed: int, skew: float | None) -> Federation:
    """The set dealt out to clients with all views, all federations of a set in the same shapes."""
    return Federation.from_arrays(
        dataset.views,
        dataset.labels,
        partition=data.hybrid_partition(
            seed,
            n_samples=len(dataset.labels),
            n_views=len(dataset.views),
            n_clients=FLAGS.study_clients,
            ratio=(1, 0),
            dirichlet=skew,
            labels=dataset.labels,
        ),
    )


def drifting(seed: int, drift: float, n_clients: int, rows: int = 60) -> Federation:
    """Four clusters in two views whose centres lie elsewhere on every client, `drift` apart."""
    rng = np.random.default_rng(seed)
    base_centres = [4 * rng.normal(size=(4, d)) for d in (5, 3)]
    clients, labels = [], []
    for _ in range(n_clients):
        truth = rng.permutation(np.arange(rows) % 4)
        views = {}
        for v, centres in enumerate(base_centres):
            moved = centres + drift * rng.normal(size=centres.shape)
            views[v] = moved[truth] + rng.normal(size=(rows, centres.shape[1]))
        clients.append(views)
        labels.append(truth)
    return Federation.from_clients(clients, labels)


@functools.partial(jax.jit, static_argnames=("make", "k", "rounds"))
def run(
    make: Callable[[Any], FederatedAlgorithm],
    hyper: Any,
    federation: Federation,
    key: jax.Array,
    k: int,
    rounds: int,
) -> dict[str, Any]:
    """Scores of a run, and its number of rounds."""
    result = engine.run(make(hyper), federation, key, rounds)
    found = score(federation, result.labels, k)["all"]
    return {"rounds": result.n_rounds} | {
        f"{way}/{name}": found[way][name] for way in found for name in METRICS
    }


@functools.partial(jax.jit, static_argnames="k")
def pooled(key: jax.Array, rows: jax.Array, truth: jax.Array, k: int) -> dict[str, jax.Array]:
    """k-means on all samples in one place, best of 10 by inertia."""
    labels = kmeans(key, rows, k, n_init=10).labels
    return scores_of(truth, labels, k, k)


def of_equal_weight(dataset: Dataset) -> np.ndarray:
    """All views side by side, each divided by its total standard deviation."""
    return np.concatenate([x / np.sqrt(x.var(axis=0).sum()) for x in dataset.views], axis=1)


def kilobytes(algorithm: FederatedAlgorithm, federation: Federation, rounds: float) -> float:
    """What a client sends and receives in a run of so many rounds, in 1000 bytes."""
    counted = engine.traffic(algorithm, federation)
    times = {"setup": 1.0, "round": rounds, "finish": 1.0}
    return sum(n * sum(counted[s]) for s, n in times.items()) / federation.n_clients / 1e3


class Study:
    """Rows of results, written as they come."""

    def __init__(self, folder: Path, bar: ProgressBar) -> None:
        self.folder, self.bar = folder, bar
        self.rows: list[dict[str, Any]] = []

    def cell(
        self,
        part: str,
        name: str,
        make: Callable[[Any], FederatedAlgorithm],
        hyper: Any,
        federations: list[Federation],
        k: int,
        *,
        rounds: int | None = None,
        **about: Any,
    ) -> None:
        """Runs one setting on a federation of each seed, and keeps and prints what it gave."""
        began, rows = time.perf_counter(), []
        for seed, one in zip(seeds(), federations, strict=True):
            key = jax.random.key(seed)
            found = jax.device_get(run(make, hyper, one, key, k, rounds or FLAGS.max_rounds))
            made = int(found.pop("rounds"))
            rows.append(
                {"part": part, "method": name, **about, "seed": seed, "rounds": made}
                | {key: float(value) for key, value in found.items()}
            )
        algorithm = make(hyper)
        for row in rows:
            row["kilobytes"] = kilobytes(algorithm, federations[0], row["rounds"])
        self.keep(part, rows, time.perf_counter() - began)

    def keep(self, part: str, rows: list[dict[str, Any]], seconds: float) -> None:
        """Appends rows of one setting, one for each seed."""
        base.append_rows(self.folder / f"{part}.csv", rows)
        self.rows += rows
        means = {name: np.mean([row[name] for row in rows]) for name in rows[0] if name in _SHOWN}
        spread = np.std([row["pooled/ari"] for row in rows])
        about = " ".join(str(rows[0].get(name, "")) for name in ("set", "clients", "x"))
        self.bar.write(
            f"{about:22s} {rows[0]['method']:30s} ARI {means['pooled/ari']:.3f} +- {spread:.3f}"
            f"  NMI {means['pooled/nmi']:.3f}  ACC {means['pooled/acc']:.3f}  per client"
            f" {means['per_client/ari']:.3f}  {means['rounds']:4.0f} rounds"
            f" {means['kilobytes']:8.1f} kB  {seconds:5.1f} s"
        )
        self.bar.advance(1)

    def of(self, part: str, **about: Any) -> Iterator[dict[str, Any]]:
        """The rows of a part that agree with what is given."""
        for row in self.rows:
            if row["part"] == part and all(row.get(name) == v for name, v in about.items()):
                yield row


_SHOWN = ("pooled/ari", "pooled/nmi", "pooled/acc", "per_client/ari", "rounds", "kilobytes")


def mean_std(rows: Iterator[dict[str, Any]], name: str) -> tuple[float, float]:
    """Mean and deviation over seeds (population form)."""
    values = [row[name] for row in rows]
    return float(np.mean(values)), float(np.std(values))


def study_methods(study: Study, sets: dict[str, Dataset]) -> None:
    """Every method on every set, clients alike and skewed."""
    for name, dataset in sets.items():
        k = len(np.unique(dataset.labels))
        rows, truth = jnp.asarray(of_equal_weight(dataset)), jnp.asarray(dataset.labels)
        truth = jnp.unique(truth, return_inverse=True)[1]
        began = time.perf_counter()
        together = [jax.device_get(pooled(jax.random.key(s), rows, truth, k)) for s in seeds()]
        study.keep(
            "methods",
            [
                {
                    "part": "methods",
                    "method": _POOLED,
                    "set": name,
                    "clients": "pooled",
                    "seed": seed,
                    "rounds": 0,
                }
                | {
                    f"{way}/{m}": float(found[m])
                    for way in ("pooled", "per_client")
                    for m in METRICS
                }
                | {"kilobytes": float("nan")}
                for seed, found in zip(seeds(), together, strict=True)
            ],
            time.perf_counter() - began,
        )
        for method, make in methods(k).items():
            if FLAGS.rows and method not in FLAGS.rows:
                continue
            build = _plain(make)  # one program serves both kinds of clients
            for clients, skew in (("alike", None), ("skewed", FLAGS.skew)):
                dealt = [federation(dataset, seed, skew) for seed in seeds()]
                study.cell("methods", method, build, None, dealt, k, set=name, clients=clients)
            forget_programs()


_POOLED = "k-means, pooled"


def forget_programs() -> None:
    """Lets go of compiled programs: hundreds of them use up a process's memory maps."""
    jax.clear_caches()


def _plain(make: Make) -> Callable[[Any], FederatedAlgorithm]:
    return lambda _: make()


def draw_methods(study: Study, sets: dict[str, Dataset]) -> None:
    """methods.png."""
    panels: dict[str, Any] = {}
    for clients in ("alike", "skewed"):
        panels[f"clients {clients}, {FLAGS.study_clients} of them"] = {
            name: {
                row["method"]: mean_std(
                    study.of("methods", set=name, method=row["method"], clients=row["clients"]),
                    "pooled/ari",
                )
                for row in study.of("methods", set=name)
                if row["clients"] in (clients, "pooled")
            }
            for name in sets
        }
    charts.bars(
        study.folder / "methods.png",
        panels,
        "ARI of pooled labels",
        f"FedHK, mean and deviation over {FLAGS.seeds} seeds",
    )


def study_bytes(study: Study, sets: dict[str, Dataset]) -> None:
    """Ranks of the compressed methods, clients skewed."""
    for name, dataset in sets.items():
        k = len(np.unique(dataset.labels))
        dealt = [federation(dataset, seed, FLAGS.skew) for seed in seeds()]
        for method, makes in ranks(k, dataset).items():
            for rank, make in makes.items():
                study.cell("bytes", method, _plain(make), None, dealt, k, set=name, x=rank)
                forget_programs()


def draw_bytes(study: Study, sets: dict[str, Dataset]) -> None:
    """bytes.png."""
    panels = {}
    for name in sets:
        series: dict[str, list] = {}
        for row in study.of("bytes", set=name, seed=seeds()[0]):
            rows = list(study.of("bytes", set=name, method=row["method"], x=row["x"]))
            sent = float(np.mean([r["kilobytes"] for r in rows]))
            point = (sent, *mean_std(iter(rows), "pooled/ari"))
            series.setdefault(row["method"], []).append(point)
        panels[name] = series
    charts.lines(
        study.folder / "bytes.png",
        panels,
        "sent and received by a client in the run, kB",
        "ARI of pooled labels",
        f"Accuracy against bytes, skewed clients, {FLAGS.seeds} seeds",
        log_x=True,
    )


_DRIFTS = (0.0, 2.0, 3.0, 4.0)
_TAUS = (0.0, 0.1, 1.0, 10.0, 100.0, float("inf"))


def study_personal(study: Study) -> None:
    """Personal centres for every tau, scored within each client; infinite tau is the global."""
    dataset = load("digits")
    worlds: dict[str, tuple[list[Federation], int]] = {
        "digits, skewed": (
            [federation(dataset, seed, FLAGS.skew) for seed in seeds()],
            len(np.unique(dataset.labels)),
        )
    }
    for drift in _DRIFTS:
        worlds[f"drift {drift:g}"] = (
            [drifting(seed, drift, FLAGS.study_clients) for seed in seeds()],
            4,
        )
    makes = {k: _personal(k) for k in {k for _, k in worlds.values()}}
    for name, (dealt, k) in worlds.items():
        for tau in _TAUS:
            hyper = FedHKHyperparams(tau=jnp.float32(tau))
            study.cell("personal", "proximal", makes[k], hyper, dealt, k, set=name, x=tau)


def _personal(k: int) -> Callable[[Any], FederatedAlgorithm]:
    return lambda hyper: e_fkmvc(FedHKConfig(k, personal="proximal"), hyper)


def draw_personal(study: Study) -> None:
    """personal.png."""
    names = list(dict.fromkeys(row["set"] for row in study.of("personal")))
    series = {
        name: [
            (max(tau, 0.03), *mean_std(study.of("personal", set=name, x=tau), "per_client/ari"))
            for tau in _TAUS
        ]
        for name in names
    }
    charts.lines(
        study.folder / "personal.png",
        {f"{FLAGS.study_clients} clients": series},
        "tau, pull towards the global centres (leftmost: 0; dashed: infinite)",
        "mean over clients of ARI, each matched",
        f"Personal against global centres, {FLAGS.seeds} seeds",
        log_x=True,
    )


_EPSILONS = (float("inf"), 100.0, 20.0, 8.0, 4.0, 2.0, 1.0)
_DELTA, _ROUNDS = 1e-5, 5


def study_privacy(study: Study, sets: dict[str, Dataset]) -> None:
    """Five private rounds for every epsilon, noise in the sum and noise of every client."""
    for name, dataset in sets.items():
        k = len(np.unique(dataset.labels))
        dealt = [federation(dataset, seed, None) for seed in seeds()]
        for noise, shared_by in (("central", FLAGS.study_clients), ("local", 1)):
            shape = PrivacySettings(0.0, shared_by=shared_by)
            make = _private(k)
            for epsilon in _EPSILONS:
                n = releases(shape, _ROUNDS)
                z = 0.0
                if np.isfinite(epsilon):
                    z = checked(functools.partial(gaussian_noise_multiplier, epsilon, _DELTA, n))
                hyper = shape.replace(noise_multiplier=jnp.float32(z))
                study.cell(
                    "privacy",
                    f"{noise} noise",
                    make,
                    hyper,
                    dealt,
                    k,
                    rounds=_ROUNDS,
                    set=name,
                    x=epsilon,
                )


def _private(k: int) -> Callable[[Any], FederatedAlgorithm]:
    return lambda settings: private_e_fkmvc(FedHKConfig(k), None, settings)


def draw_privacy(study: Study, sets: dict[str, Dataset]) -> None:
    """privacy.png."""
    panels = {
        name: {
            noise: [
                (
                    epsilon,
                    *mean_std(study.of("privacy", set=name, method=noise, x=epsilon), "pooled/ari"),
                )
                for epsilon in _EPSILONS
            ]
            for noise in ("central noise", "local noise")
        }
        for name in sets
    }
    charts.lines(
        study.folder / "privacy.png",
        panels,
        f"epsilon of the run at delta {_DELTA:g} (dashed: no noise)",
        "ARI of pooled labels",
        f"E-FKMVC, {_ROUNDS} private rounds, {FLAGS.study_clients} clients, {FLAGS.seeds} seeds",
        log_x=True,
    )


def summarise(study: Study) -> list[str]:
    """Writes summary.csv; returns the table of "methods" for the terminal, as Markdown."""
    keys = ("part", "set", "clients", "method", "x")
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in study.rows:
        groups.setdefault(tuple(row.get(key, "") for key in keys), []).append(row)
    lines = []
    for group, rows in groups.items():
        line: dict[str, Any] = dict(zip(keys, group, strict=True)) | {"seeds": len(rows)}
        for name in (f"{way}/{m}" for way in ("pooled", "per_client") for m in METRICS):
            line[f"{name}/mean"], line[f"{name}/std"] = mean_std(iter(rows), name)
        for name in ("rounds", "kilobytes"):
            line[name] = float(np.mean([row[name] for row in rows]))
        lines.append(line)
    with (study.folder / "summary.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(lines[0]))
        table.writeheader()
        table.writerows(lines)
    sets = list(dict.fromkeys(line["set"] for line in lines if line["part"] == "methods"))
    if not sets:
        return []
    text = [
        "",
        f"| ARI of pooled labels | clients | {' | '.join(sets)} |",
        "|---|---|" + "---|" * len(sets),
    ]
    shown: dict[tuple[str, str], dict[str, str]] = {}
    for line in (line for line in lines if line["part"] == "methods"):
        cell = f"{line['pooled/ari/mean']:.3f} +- {line['pooled/ari/std']:.3f}"
        shown.setdefault((line["method"], line["clients"]), {})[line["set"]] = cell
    for (method, clients), cells in shown.items():
        values = " | ".join(cells.get(name, "-") for name in sets)
        text.append(f"| {method} | {clients} | {values} |")
    base.write(study.folder / "methods.md", "\n".join(text[1:]) + "\n")
    return text


def main() -> None:
    """Runs the parts that the flags ask for."""
    base.use_compilation_cache()
    checked(require_tqdm)
    checked(plots.require_matplotlib)
    unknown = [part for part in FLAGS.study_parts if part not in PARTS]
    if unknown or not FLAGS.study_parts:
        base.fail(
            ValueError(f"study_parts: got {FLAGS.study_parts}; allowed are {', '.join(PARTS)}")
        )
    odd = [row for row in FLAGS.rows if row not in methods(2)]
    if odd:
        base.fail(ValueError(f"rows: got {odd}; allowed are {', '.join(methods(2))}"))
    sets = checked(lambda: {n: load(n) for n in FLAGS.study_sets if "methods" in FLAGS.study_parts})
    rank_sets = checked(
        lambda: {n: load(n) for n in FLAGS.rank_sets if "bytes" in FLAGS.study_parts}
    )
    private_sets = checked(
        lambda: {n: load(n) for n in FLAGS.private_sets if "privacy" in FLAGS.study_parts}
    )
    folder = checked(lambda: base.make_folder("fedhk-study"))
    cells = sum(1 + 2 * len(FLAGS.rows or methods(2)) for _ in sets)
    cells += sum(len(m) for d in rank_sets.values() for m in ranks(10, d).values())
    cells += 2 * len(_EPSILONS) * len(private_sets)
    cells += (1 + len(_DRIFTS)) * len(_TAUS) * ("personal" in FLAGS.study_parts)
    with ProgressBar(cells) as bar:
        study = Study(folder, bar)
        if sets:
            study_methods(study, sets)
            draw_methods(study, sets)
        if rank_sets:
            study_bytes(study, rank_sets)
            draw_bytes(study, rank_sets)
        if "personal" in FLAGS.study_parts:
            study_personal(study)
            draw_personal(study)
        if private_sets:
            study_privacy(study, private_sets)
            draw_privacy(study, private_sets)
    for line in summarise(study):
        print(line)
    print(f"written: {folder}/ (summary.csv, *.csv, flags.txt, *.png)")


if __name__ == "__main__":
    base.launch(main)
