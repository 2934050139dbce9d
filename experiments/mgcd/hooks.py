"""What MGCD adds to the runner: scores of each graph, references, and pictures of the graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from sklearn.cluster import SpectralClustering

from experiments.lib import charts, plots
from experiments.lib.data import DataSettings, Problem
from experiments.lib.hooks import Hooks, SeedResult
from experiments.lib.references import k_means
from experiments.lib.report import MATCHED, Report
from experiments.lib.text import left_out
from jaxfedmvc import data
from jaxfedmvc.algorithms.mgcd.method import REPORTED
from jaxfedmvc.algorithms.mgcd.sparse_spectral import to_sparse
from jaxfedmvc.metrics import host

SPECTRAL, BEST_VIEW = "spectral, all views", "k-means, best view by ACC"
# More samples than this are not clustered spectrally as a reference: it would take too long.
_SPECTRAL_ROWS = 20_000
# What the server reports of a round; one that averages lacks some.
_NUMBERS = ("server_loss", "server_separation", "average_separation", "separation", "norm")


def _defaults(settings: DataSettings) -> dict[str, str]:
    usual = {"report_graphs": "true"}
    if settings.dataset is not None:
        return usual
    try:
        data.load("mfeat", settings.data_dir, "none")
    except (OSError, ValueError):
        return usual | {"dataset": "digits"}
    return usual | {"dataset": "mfeat"}


def columns(info: Any, problem: Problem) -> dict[str, float]:
    """Returns what rounds.csv holds of a round beside what it holds for all methods."""
    server = info[0]["server"]
    row = {name: float(server[name]) if name in server else float("nan") for name in _NUMBERS}
    row["of_each_view"] = float(server["of_each"])
    scored = "labels" in server and problem.labels is not None
    for name in REPORTED if scored else ():
        for metric, value in scores(problem.labels, server["labels"][name]).items():
            row[f"{name}/{metric}"] = value
    return row


def scores(truth: np.ndarray | None, labels: np.ndarray) -> dict[str, float]:
    """Computes ACC, NMI, ARI and purity of clusters [N]; NaN without labels."""
    if truth is None:
        return dict.fromkeys(host.METRICS, float("nan"))
    classes = np.unique(truth, return_inverse=True)[1]
    found = np.unique(labels, return_inverse=True)[1]
    everyone = np.ones((1, len(found)), bool)
    shape = (int(classes.max()) + 1, int(found.max()) + 1)
    return host.table_scores(host.client_tables(classes[None], found[None], everyone, shape)[0])


def references(problem: Problem, n_clusters: int, seed: int) -> dict[str, list[np.ndarray]]:
    """Returns clusterings that need no federation, or know no privacy.

    k-means of the one view that labels say is best, for every seed, which is what somebody would
    reach who knew which view to take; and spectral clustering of the 10-nearest-neighbour graph of
    all views side by side.
    """
    n_agents = len(problem.federation.cohorts)
    found = {}
    if problem.labels is not None:
        each = [k_means(view, n_clusters, seed) for view in problem.views]
        best = max(each, key=lambda labels: scores(problem.labels, labels)["acc"])
        found[BEST_VIEW] = [best[None]] * n_agents
    if len(problem.rows) <= _SPECTRAL_ROWS:
        method = SpectralClustering(
            n_clusters,
            affinity="nearest_neighbors",
            n_neighbors=min(10, len(problem.rows)),
            random_state=seed,
        )
        with warnings.catch_warnings():
            # A neighbour graph in several parts; what comes of it is the reference all the same.
            warnings.filterwarnings("ignore", message="Graph is not fully connected")
            labels = method.fit_predict(np.concatenate(problem.views, axis=1))
        found[SPECTRAL] = [labels.astype(np.int32)[None]] * n_agents
    return found


def _after_seed(folder: Path, result: SeedResult, n_seeds: int) -> Iterator[str]:
    server = getattr(result.server, "inner", result.server)  # masked sums
    yield from left_out(result.seed, np.asarray(server.kept))


def _pictures(report: Report, result: SeedResult) -> None:
    """Draws the consistency graph, its spectral embedding, and each graph's ACC by round."""
    clusters, labels = result.server.clusters, result.labels[0][0]
    title = f"{report.title}, seed {result.seed}"
    affinity = to_sparse(jax.tree.map(np.asarray, clusters.affinity))
    plots.graph(report.path / "graph.png", affinity, labels, f"consistency graph, {title}")
    colourings = {"by cluster": labels}
    truth = result.problem.labels
    if truth is not None:
        colourings = {"by true class": truth, MATCHED: charts.coloured_as(truth, labels)}
    plots.embedding(
        report.path / "embedding.png",
        np.asarray(clusters.embedding),
        colourings,
        np.zeros(len(labels), int),
        ["samples"],
        f"t-SNE of the graph's spectral embedding, {title}",
        named="cluster" if truth is None else "class",
        called=str if truth is None else result.problem.called,
    )


HOOKS = Hooks(
    defaults=_defaults,
    replaced={"transport": "give --dense for graphs as N x N numbers"},
    columns=columns,
    shown=("separation", *(f"{name}/acc" for name in REPORTED)),
    references=references,
    after_seed=_after_seed,
    pictures=_pictures,
)
