"""What FedHK's methods reach, and at what price: `python -m experiments.fedhk.study`.

Four parts. "methods": every method, and the printed forms, beside k-means on pooled samples and on
those of every client; clients alike and skewed. "bytes": accuracy against what travels, for ranks
of the compressed methods. "personal": global against personal centres, on a real set and on one
whose clients differ by construction. "privacy": accuracy against epsilon. Labels score, and nothing
else. A study that was killed goes on with --resume.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from jax.sharding import Mesh
from sklearn.metrics.cluster import contingency_matrix

from experiments.lib import charts, folder
from experiments.lib.batches import Group, execute
from experiments.lib.command import JobSettings, checked, parse
from experiments.lib.data import DataSettings, fingerprint
from experiments.lib.groups import groups_of
from experiments.lib.ledger import Ledger
from experiments.lib.progress import Progress
from experiments.lib.references import k_means
from experiments.lib.study import parse_or_exit
from experiments.lib.text import counted, spread
from jaxfedmvc import checks, data
from jaxfedmvc.algorithms.fedhk import FedHKConfig, FedHKHyperparams, e_fkmvc, releases
from jaxfedmvc.data.dataset import Dataset
from jaxfedmvc.engine import batching, mesh
from jaxfedmvc.federation import Federation
from jaxfedmvc.files import write_text
from jaxfedmvc.metrics import host
from jaxfedmvc.privacy import gaussian_noise_multiplier

PARTS = ("methods", "bytes", "personal", "privacy")
POOLED = "k-means of pooled samples"
# The rows of "methods", as flags of `experiments.run`.
ROWS = {
    "E-FKMVC": "--algorithm=e_fkmvc",
    "E-FKMVC with 8 starts": "--algorithm=e_fkmvc --n_restarts=8",
    "Tucker": "--algorithm=fedhk_tucker",
    "PARAFAC2 of views": "--algorithm=fedhk_parafac2 --placement=views",
    "PARAFAC2 of clients": "--algorithm=fedhk_parafac2",
    "PARAFAC2 of samples": "--algorithm=fedhk_parafac2 --placement=samples",
    "personal Tucker": "--algorithm=fedhk_tucker --personal=proximal",
    "personal PARAFAC2 of views": (
        "--algorithm=fedhk_parafac2 --placement=views --personal=proximal"
    ),
    "average (60) E=1": "--algorithm=e_fkmvc --aggregation=average",
    "average (60) E=5": "--algorithm=e_fkmvc --aggregation=average --local_steps=5",
    "as printed (23) (30) (60)": (
        "--algorithm=e_fkmvc --aggregation=average --hkc=minmax --centre_rule=printed --alpha=5"
    ),
    "Tucker by procrustes": "--algorithm=fedhk_tucker --aggregation=average --alignment=procrustes",
    "k-means of each client": "--algorithm=local_kmeans",
}
_DRIFTS = (0.0, 2.0, 3.0, 4.0)
_DRIFTING_CLUSTERS = 4
_TAUS = (0.0, 0.1, 1.0, 10.0, 100.0, float("inf"))
_EPSILONS = (float("inf"), 100.0, 20.0, 8.0, 4.0, 2.0, 1.0)
_DELTA, _PRIVATE_ROUNDS, _START_STEPS = 1e-5, 5, 2


@dataclasses.dataclass(frozen=True)
class StudySettings:
    """What is studied.

    Attributes:
      study_parts: Which of methods, bytes, personal, privacy.
      study_sets: Sets of the part methods.
      rank_sets: Sets of the part bytes.
      private_sets: Sets of the part privacy, with features in [0, 1].
      rows: Rows of the part methods that are run; empty: all.
      study_clients: Clients, all with all views.
      skew: Dirichlet concentration of the skewed clients' classes.
      max_rounds: Most rounds of a run; private runs make 5.
      batch: Runs that go together; none: 1 on a CPU, else as memory allows.
    """

    study_parts: tuple[str, ...] = PARTS
    study_sets: tuple[str, ...] = ("digits", "mfeat", "scene15", "bdgp", "mnist_usps")
    rank_sets: tuple[str, ...] = ("digits", "mfeat")
    private_sets: tuple[str, ...] = ("digits", "mnist_usps")
    rows: tuple[str, ...] = ()
    study_clients: int = 8
    skew: float = 0.3
    max_rounds: int = 50
    batch: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError that names the setting."""
        for name, allowed in (("study_parts", PARTS), ("rows", tuple(ROWS))):
            if unknown := [item for item in getattr(self, name) if item not in allowed]:
                raise ValueError(f"{name}: got {unknown}; allowed are {', '.join(allowed)}")
        if not self.study_parts:
            raise ValueError(f"study_parts: got none; allowed are {', '.join(PARTS)}")
        checks.at_least(self, 1, "study_clients", "max_rounds", "batch")


_FLAGS = {StudySettings: None, DataSettings: ("data_dir", "scale"), JobSettings: ("seed", "seeds")}


# --- What is run ----------------------------------------------------------------------------------

# What names a run, and the flags that it is made with.
Cell = tuple[dict[str, str], list[str]]


def _cell(part: str, dataset: str, clients: str, method: str, x: Any, *flags: str) -> Cell:
    names = {"part": part, "set": dataset, "clients": clients, "method": method, "x": str(x)}
    return names, [f"--dataset={dataset}", *flags]


def cells(settings: StudySettings, sets: Mapping[str, Dataset]) -> Iterator[Cell]:
    """Yields the runs on sets, of all parts; later flags go before earlier ones.

    Args:
      settings: Of the study.
      sets: All sets that it needs, by name.
    """
    skewed = f"--dirichlet={settings.skew}"
    for name in settings.study_sets if "methods" in settings.study_parts else ():
        for method in settings.rows or ROWS:
            own = ROWS[method].split()
            yield _cell("methods", name, "alike", method, "", *own)
            yield _cell("methods", name, "skewed", method, "", *own, skewed)
    for name in settings.rank_sets if "bytes" in settings.study_parts else ():
        for method, x, text in ranks(sets[name]):
            yield _cell("bytes", name, "skewed", method, x, *text.split(), skewed)
    for tau in _TAUS if "personal" in settings.study_parts else ():
        pulled = ("--algorithm=e_fkmvc", "--personal=proximal", f"--tau={tau}", skewed)
        yield _cell("personal", "digits", "skewed", "proximal", tau, *pulled)
    for name in settings.private_sets if "privacy" in settings.study_parts else ():
        for noise in ("central", "local"):
            for epsilon in _EPSILONS:
                private = _private_flags(noise, epsilon)
                yield _cell("privacy", name, "alike", f"{noise} noise", epsilon, *private)


def _private_flags(noise: str, epsilon: float) -> list[str]:
    """Returns the flags of a private run; noise is a traced number, so that all share a program."""
    z = 0.0
    if np.isfinite(epsilon):
        z = gaussian_noise_multiplier(epsilon, _DELTA, releases(_START_STEPS, _PRIVATE_ROUNDS))
    return [
        "--algorithm=private_e_fkmvc",
        f"--noise={noise}",
        f"--noise_multiplier={z}",
        f"--start_steps={_START_STEPS}",
        f"--rounds={_PRIVATE_ROUNDS}",
    ]


def ranks(dataset: Dataset) -> Iterator[tuple[str, str, str]]:
    """Yields the series of "bytes": method, rank, flags."""
    assert dataset.labels is not None
    k, s = len(np.unique(dataset.labels)), len(dataset.views)
    widths = [view.shape[1] for view in dataset.views]
    yield "E-FKMVC", "whole", "--algorithm=e_fkmvc"
    tucker, parafac2 = "--algorithm=fedhk_tucker", "--algorithm=fedhk_parafac2"
    for r in (k // 2, k, 2 * k, 4 * k):
        if r <= min(max(widths), k * s):
            yield "Tucker, R2", str(r), f"{tucker} --ranks={k},{r},{s}"
    for r in (k, 2 * k):
        if r <= min(max(widths), (k - 2) * (s - 1)):
            yield "Tucker, (c-2, R2, s-1)", str(r), f"{tucker} --ranks={k - 2},{r},{s - 1}"
    for placement, values in (
        ("views", sorted({2, *(min(r, *widths) for r in (4, 6, k))})),
        ("clients", (k // 2, k)),
        ("samples", (k // 2, k, 3 * k // 2)),
    ):
        for r in values:
            flags = f"{parafac2} --placement={placement} --rank={r}"
            yield f"PARAFAC2 of {placement}, R", str(r), flags


def drifting(seed: int, drift: float, n_clients: int, rows: int = 60) -> Federation:
    """Returns four clusters in two views whose centres every client has moved by `drift`."""
    rng = np.random.default_rng(seed)
    base_centres = [4 * rng.normal(size=(_DRIFTING_CLUSTERS, d)) for d in (5, 3)]
    clients, labels = [], []
    for _ in range(n_clients):
        truth = rng.permutation(np.arange(rows) % _DRIFTING_CLUSTERS)
        views = {}
        for v, centres in enumerate(base_centres):
            moved = centres + drift * rng.normal(size=centres.shape)
            views[v] = moved[truth] + rng.normal(size=(rows, centres.shape[1]))
        clients.append(views)
        labels.append(truth)
    return Federation.from_clients(clients, labels)


def drifting_group(settings: StudySettings, seeds: list[int], drift: float) -> Group:
    """Returns the runs of "personal" on clients that differ by construction."""
    federations = [drifting(seed, drift, settings.study_clients) for seed in seeds]
    # One start, as the digits of this part make: their rows are many, these 120 for each cluster.
    config = FedHKConfig(_DRIFTING_CLUSTERS, personal="proximal", n_restarts=1)
    command = folder.made_by(
        [
            "experiments.fedhk.study",
            "--study_parts=personal",
            f"--study_clients={settings.study_clients}",
            f"--max_rounds={settings.max_rounds}",
            f"--seed={seeds[0]}",
            f"--seeds={len(seeds)}",
        ]
    )
    return Group(
        columns=[
            _cell("personal", f"drift {drift:g}", "drifting", "proximal", t)[0] | command
            for t in _TAUS
        ],
        hyperparams=[FedHKHyperparams(tau=tau) for tau in _TAUS],
        make=partial(e_fkmvc, config),
        source=batching.stacked(federations),
        federation=federations[0],
        seeds=seeds,
        rounds=settings.max_rounds,
        n_clusters=_DRIFTING_CLUSTERS,
        participation=[1.0] * len(federations[0].cohorts),
    )


def load_sets(settings: StudySettings, source: DataSettings) -> dict[str, Dataset]:
    """Returns the sets of the parts that are asked for, by name.

    Raises:
      ValueError, OSError: One cannot be read, or has no labels.
    """
    of_part = {
        "methods": settings.study_sets,
        "bytes": settings.rank_sets,
        "personal": ("digits",),
        "privacy": settings.private_sets,
    }
    names = {name for part in settings.study_parts for name in of_part[part]}
    sets = {name: data.load(name, source.data_dir, source.scale) for name in sorted(names)}
    for name, dataset in sets.items():
        if dataset.labels is None:
            raise ValueError(f"study_sets: {name} has no labels to score against")
    return sets


def plan(
    settings: StudySettings, source: DataSettings, job: JobSettings, sets: Mapping[str, Dataset]
) -> list[Group]:
    """Returns all runs, by programs.

    Raises:
      ValueError, OSError, ImportError: Says what is wrong.
    """
    shared = [
        f"--n_clients={settings.study_clients}",
        "--ratio=1:0",
        f"--rounds={settings.max_rounds}",
        f"--client_chunk={settings.study_clients}",
        f"--seed={job.seed}",
        f"--seeds={job.seeds}",
        f"--scale={source.scale}",
        *([f"--data_dir={source.data_dir}"] if source.data_dir else []),
    ]
    chosen = list(cells(settings, sets))
    commands = [parse([*shared, *flags]) for _, flags in chosen]
    named = [names | folder.made_by([*shared, *flags]) for names, flags in chosen]
    groups = groups_of(commands, named)
    for drift in _DRIFTS if "personal" in settings.study_parts else ():
        groups.append(drifting_group(settings, job.all_seeds, drift))
    return groups


def check_devices(settings: StudySettings, groups: Sequence[Group], devices: Mesh) -> None:
    """Raises ValueError unless a mesh divides batches of runs and the clients of all runs."""
    least = devices.shape["sweep"]
    if settings.batch is not None and settings.batch % least:
        raise checks.wrong("batch", settings.batch, f"multiples of the mesh's sweep:{least}")
    for group in groups:
        mesh.check_mesh(devices, group.federation)


# --- What comes of it -----------------------------------------------------------------------------

_CELL = ["part", "set", "clients", "method", "x"]
_SCORES = [f"{way}/{metric}" for way in host.WAYS for metric in ("acc", "nmi", "ari")]


def finished_runs(rows: Sequence[Mapping[str, Any]], n_clients: int) -> pd.DataFrame:
    """Returns the runs of a ledger that are ok, a line each."""
    runs = pd.DataFrame(rows)
    runs = runs[runs["status"] == "ok"]
    sent = runs[["bytes_up", "bytes_down"]].astype(float).sum(axis=1)
    numbers = {name: runs[f"all/{name}"].astype(float) for name in _SCORES}
    numbers |= {"rounds": runs["rounds_made"].astype(float), "kilobytes": sent / n_clients / 1e3}
    return runs[[*_CELL, "seed"]].assign(**numbers)


def pooled_runs(
    settings: StudySettings, sets: Mapping[str, Dataset], seeds: list[int]
) -> pd.DataFrame:
    """Returns k-means on all samples in one place, views scaled to equal weight, as such lines."""
    rows = []
    for name in settings.study_sets if "methods" in settings.study_parts else ():
        dataset = sets[name]
        assert dataset.labels is not None
        scaled = [x / np.sqrt(x.var(axis=0).sum()) for x in dataset.views]
        for seed in seeds:
            n_clusters = len(np.unique(dataset.labels))
            found = k_means(np.concatenate(scaled, axis=1), n_clusters, seed)
            scores = host.table_scores(contingency_matrix(dataset.labels, found))
            names: dict[str, Any] = _cell("methods", name, "pooled", POOLED, "")[0]
            # One place is one client.
            scores = {column: scores[column.split("/")[1]] for column in _SCORES}
            rows.append(names | {"seed": seed, "rounds": 0, "kilobytes": np.nan} | scores)
    return pd.DataFrame(rows)


def summarised(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns mean and deviation over seeds (sample form) of every cell, a line each."""
    of_cell = runs.groupby(_CELL, sort=False)
    table = {"seeds": of_cell.size()}
    for name in _SCORES:
        table[f"{name}/mean"] = of_cell[name].mean()
        table[f"{name}/std"] = of_cell[name].std()
    table |= {name: of_cell[name].mean() for name in ("rounds", "kilobytes")}
    return pd.DataFrame(table).reset_index()


def markdown(summary: pd.DataFrame) -> str:
    """Returns the part "methods" as a table with a column for each set."""
    part = summary[summary["part"] == "methods"]
    means, deviations = part["pooled/ari/mean"], part["pooled/ari/std"]
    text = [spread(m, d) for m, d in zip(means, deviations, strict=True)]
    table = part.assign(text=text).pivot_table(
        "text", ["method", "clients"], "set", aggfunc="first", sort=False, fill_value="-"
    )
    lines = [
        ["ARI of pooled labels", "clients", *table.columns],
        ["---"] * (2 + len(table.columns)),
        *([*names, *values] for names, values in zip(table.index, table.to_numpy(), strict=True)),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(path: Path, summary: pd.DataFrame, settings: StudySettings, n_seeds: int) -> None:
    """Draws a picture of each part: methods.png, bytes.png, personal.png, privacy.png."""
    parts = dict(list(summary.groupby("part")))
    ari, clients = "ARI of pooled labels", f"{settings.study_clients} clients"
    if "methods" in parts:
        of_methods = {
            f"clients {kind}, {settings.study_clients} of them": {
                name: _points(rows[rows["clients"].isin([kind, "pooled"])])
                for name, rows in parts["methods"].groupby("set", sort=False)
            }
            for kind in ("alike", "skewed")
        }
        title = f"FedHK, mean over {counted(n_seeds, 'seed')}"
        charts.bars(path / "methods.png", of_methods, ari, title)
    if "bytes" in parts:
        xlabel = "sent and received by a client in the run, kB"
        title = f"Accuracy against bytes, skewed clients, {counted(n_seeds, 'seed')}"
        panels = _by_set(parts["bytes"].assign(x=parts["bytes"]["kilobytes"]))
        charts.lines(path / "bytes.png", panels, xlabel, ari, title, log_x=True)
    if "personal" in parts:
        xlabel = "tau, pull towards the global centres (leftmost: 0; dashed: infinite)"
        part = parts["personal"].assign(x=parts["personal"]["x"].astype(float).clip(lower=0.03))
        panels = {clients: _lines(part, "set", "per_client/ari")}
        ylabel = "mean over clients of ARI, each matched"
        title = f"Personal against global centres, {counted(n_seeds, 'seed')}"
        charts.lines(path / "personal.png", panels, xlabel, ylabel, title, log_x=True)
    if "privacy" in parts:
        xlabel = f"epsilon of the run at delta {_DELTA:g} (dashed: no noise)"
        title = f"E-FKMVC, {_PRIVATE_ROUNDS} private rounds, {clients}, {counted(n_seeds, 'seed')}"
        panels = _by_set(parts["privacy"])
        charts.lines(path / "privacy.png", panels, xlabel, ari, title, log_x=True)


def _points(rows: pd.DataFrame) -> dict[str, tuple[float, float]]:
    columns = (rows["method"], rows["pooled/ari/mean"], rows["pooled/ari/std"])
    return {method: (mean, std) for method, mean, std in zip(*columns, strict=True)}


def _by_set(part: pd.DataFrame) -> dict[str, dict[str, charts.Line]]:
    return {name: _lines(rows, "method") for name, rows in part.groupby("set", sort=False)}


def _lines(rows: pd.DataFrame, by: str, score: str = "pooled/ari") -> dict[str, charts.Line]:
    columns = ["x", f"{score}/mean", f"{score}/std"]
    return {
        name: [tuple(point) for point in line[columns].astype(float).to_numpy()]
        for name, line in rows.groupby(by, sort=False)
    }


# --- The program ----------------------------------------------------------------------------------


def report(path: Path, runs: pd.DataFrame, settings: StudySettings, n_seeds: int) -> None:
    """Writes and prints the tables, and draws the pictures."""
    summary = summarised(runs)
    write_text(path / "summary.csv", summary.to_csv(index=False))
    shown = {f"{name}/mean": name for name in _SCORES} | {"rounds": "rounds", "kilobytes": "kB"}
    for part, rows in summary.groupby("part", sort=False):
        columns = ["set", "clients", "method", "x", *shown]
        print(f"\n{part}, means over {counted(n_seeds, 'seed')}")
        print(rows[columns].rename(columns=shown).round(3).to_string(index=False))
    if (summary["part"] == "methods").any():
        write_text(path / "methods.md", markdown(summary))
        print(f"\n{markdown(summary)}")
    draw(path, summary, settings, n_seeds)


@folder.stoppable
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts that the command line asks for; that of this process if it is None."""
    study = parse_or_exit(arguments, __doc__, _FLAGS, over_clients=True)
    settings, source, job = checked(lambda: [study.read(group) for group in _FLAGS])
    sets = checked(lambda: load_sets(settings, source))
    groups = checked(lambda: plan(settings, source, job, sets))
    if study.mesh is not None:
        checked(partial(check_devices, settings, groups, study.mesh))
    read = {name: fingerprint(dataset) for name, dataset in sets.items()}
    path = checked(lambda: study.open("fedhk-study", read))
    ledger = checked(partial(Ledger, path))
    least = 1 if study.mesh is None else study.mesh.shape["sweep"]
    batch = least if settings.batch is None and jax.default_backend() == "cpu" else settings.batch
    with Progress(study.folder.progress) as progress:
        execute(groups, ledger, batch=batch, mesh=study.mesh, progress=progress)
    runs = finished_runs(ledger.rows, settings.study_clients)
    pooled = pooled_runs(settings, sets, job.all_seeds)
    if len(pooled):
        write_text(path / "pooled.csv", pooled.to_csv(index=False))
    report(path, pd.concat([pooled, runs]), settings, job.seeds)
    if failed := len(ledger.rows) - len(runs):
        print(f"{counted(failed, 'run')} failed; runs.csv says why")
    print(f"written: {path}/ (summary.csv, runs.csv, flags.txt, *.png)")


if __name__ == "__main__":
    main()
