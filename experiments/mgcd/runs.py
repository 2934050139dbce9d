"""Runs of MGCD on the host's side: compiled rounds, scores, references, pictures."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from sklearn.cluster import KMeans, SpectralClustering

from experiments import charts, vertical
from experiments.lib import plots
from jaxfedmvc import engine
from jaxfedmvc.algorithms.mgcd import MGCDConfig, MGCDHyperparams, mgcd
from jaxfedmvc.algorithms.mgcd.method import REPORTED
from jaxfedmvc.algorithms.mgcd.sparse_spectral import to_sparse
from jaxfedmvc.engine.phases import RunState, Traffic
from jaxfedmvc.federation import Federation

REFERENCES = ("k-means, all views", "k-means, best view by ACC", "spectral, all views")
METRICS = ("acc", "nmi", "ari", "purity")
# More samples than this are not clustered spectrally as a reference: it would take too long.
_SPECTRAL_ROWS = 20_000
# What a round's row holds beside the losses and the scores; a server that averages lacks some.
_NUMBERS = ("server_loss", "server_separation", "average_separation", "separation", "norm")


class Preset(NamedTuple):
    """What a mode is run with unless told otherwise."""

    config: dict[str, Any]
    hyperparams: dict[str, float]
    rounds: int


PRESETS = {
    "robust": Preset({"server": "average"}, {}, rounds=5),
    # What the paper prints, but for the step sizes: Adam's 1e-6 of all phases moves no weight by
    # more than 1.6e-4 in its 20 epochs of pre-training on Mfeat.
    "literal": Preset(
        {
            "server": "trained",
            "affinity": "mean",
            "latent_dim": 512,
            "server_hidden": 500,
            "pretrain_epochs": 20,
            "local_epochs": 1,
            "server_epochs": 1,
        },
        {"lam": 1e-3, "pretrain_rate": 1e-3, "local_rate": 1e-4, "server_rate": 1e-4},
        rounds=10,
    ),
}


class Run(NamedTuple):
    """One run: a row for each round, the final clusters [N], and the state after the last round."""

    rounds: list[dict[str, Any]]
    labels: np.ndarray
    state: RunState | None
    seconds: float


class Program:
    """MGCD with one static configuration, compiled once for all seeds and hyper-parameters."""

    def __init__(self, config: MGCDConfig, *, report: bool = True) -> None:
        self.config, self.report = config, report

        def start(hp: MGCDHyperparams, federation: Federation, key: jax.Array) -> RunState:
            algorithm = mgcd(config, hp)
            state = engine.start(algorithm, federation, key)
            return engine.setup(algorithm, federation, key, state)

        def one_round(
            hp: MGCDHyperparams, federation: Federation, key: jax.Array, state: RunState, r: Any
        ) -> Any:
            algorithm = mgcd(config, hp, report=report)
            return engine.one_round(algorithm, federation, key, state, r)

        self._start = jax.jit(start)
        # The old state's memory serves the new one.
        self._round = jax.jit(one_round, donate_argnums=3)

    def traffic(self, federation: Federation) -> dict[str, Traffic]:
        """Bytes of the stages."""
        return engine.traffic(mgcd(self.config), federation)

    def run(
        self,
        federation: Federation,
        truth: np.ndarray | None,
        seed: int,
        rounds: int,
        hyperparams: MGCDHyperparams,
        on_round: Callable[[dict[str, Any]], None] | None = None,
    ) -> Run:
        """Runs until `rounds`, or until the method finds its own end.

        Args:
          federation: One cohort for each view.
          truth: Labels [N], for scores only, or None.
          seed: Of the run.
          rounds: Most rounds.
          hyperparams: Traced.
          on_round: Called with each round's row.

        Raises:
          ValueError: Graphs have become NaN or infinite.
        """
        began = time.perf_counter()
        key, hidden = jax.random.key(seed), federation.without_labels()
        state, _ = self._start(hyperparams, hidden, key)
        rows: list[dict[str, Any]] = []
        for r in range(rounds):
            try:
                state, info = self._round(hyperparams, hidden, key, state, np.int32(r))
                told = jax.device_get(info[0])
            except (RuntimeError, ValueError) as error:  # jax's, with the host's words in it
                if "weight" not in str(error):
                    raise
                raise ValueError(
                    f"round {r + 1}: graphs hold NaN or infinite entries; take smaller step sizes"
                ) from error
            rows.append({"seed": seed, "round": r + 1} | _row(told, truth))
            if on_round is not None:
                on_round(rows[-1])
            if self.config.mode == "robust" and bool(state.server.finished):
                break
        labels = np.asarray(state.server.clusters.labels)
        return Run(rows, labels, state, time.perf_counter() - began)


def _row(info: Mapping[str, Any], truth: np.ndarray | None) -> dict[str, Any]:
    server = info["server"]
    row = {"client_loss": float(np.mean([c["loss"][0] for c in info["clients"]]))}
    row |= {name: float(server[name]) if name in server else None for name in _NUMBERS}
    row["of_each_view"] = bool(server["of_each"])
    for name in REPORTED if "labels" in server else ():
        for metric, value in scores(truth, server["labels"][name]).items():
            row[f"{name}/{metric}"] = value
    return row


def scores(truth: np.ndarray | None, labels: np.ndarray) -> dict[str, float]:
    """ACC, NMI, ARI and purity; NaN without labels."""
    found = vertical.external(truth, labels)
    return {metric: found[metric] for metric in METRICS}


def references(
    views: Sequence[np.ndarray], truth: np.ndarray | None, n_clusters: int, seed: int
) -> dict[str, dict[str, float]]:
    """Scores of what needs no federation, or knows no privacy.

    k-means (10 starts) on each view and on all views side by side, and spectral clustering of the
    10-nearest-neighbour graph of the latter. The best view is chosen by the labels' ACC, for
    every seed: what somebody would reach who knew which view to take.
    """
    joined = np.concatenate(views, axis=1)

    def k_means(x: np.ndarray) -> dict[str, float]:
        found = KMeans(n_clusters, n_init=10, random_state=seed).fit_predict(x)
        return scores(truth, found)

    each = [k_means(view) for view in views]
    found = [k_means(joined), max(each, key=lambda s: s["acc"])]
    if len(joined) <= _SPECTRAL_ROWS:
        method = SpectralClustering(
            n_clusters, affinity="nearest_neighbors", n_neighbors=10, random_state=seed
        )
        with warnings.catch_warnings():
            # A neighbour graph in several parts; what comes of it is the reference all the same.
            warnings.filterwarnings("ignore", message="Graph is not fully connected")
            found.append(scores(truth, method.fit_predict(joined)))
    return dict(zip(REFERENCES, found, strict=False))


def draw(folder: Path, run: Run, truth: np.ndarray | None, title: str) -> None:
    """graph.png and embedding.png of a run whose state was kept."""
    found = run.state.server.clusters  # type: ignore[union-attr]
    affinity = to_sparse(jax.tree.map(np.asarray, found.affinity))
    plots.graph(folder / "graph.png", affinity, run.labels, f"consistency graph, {title}")
    colourings = {"by cluster": run.labels}
    if truth is not None:
        clusters = charts.coloured_as(truth, run.labels)
        colourings = {"by true class": truth, "by cluster": clusters}
    plots.embedding(
        folder / "embedding.png",
        np.asarray(found.embedding),
        colourings,
        np.zeros(len(run.labels), int),
        ["samples"],
        f"t-SNE of the graph's spectral embedding, {title}",
    )


def draw_rounds(
    path: Path, runs: Sequence[Run], rows: Mapping[str, Sequence[Mapping[str, float]]], title: str
) -> None:
    """curves.png: each graph's ACC by round, the losses, and the references as levels."""
    longest = max(len(run.rounds) for run in runs)

    def by_round(name: str) -> np.ndarray:
        values = [[row[name] for row in run.rounds] for run in runs]
        # A run that found its end earlier stays where it ended.
        return np.asarray([v + [v[-1]] * (longest - len(v)) for v in values], float)

    curves = {f"ACC, {name} graph": by_round(f"{name}/acc") for name in REPORTED}
    curves = {name: values for name, values in curves.items() if np.isfinite(values).all()}
    levels = {
        f"ACC, {name}": float(np.mean([s["acc"] for s in scored]))
        for name, scored in rows.items()
        if name in REFERENCES
    }
    losses = {"client loss": by_round("client_loss")}
    if runs[0].rounds[0]["server_loss"] is not None:
        losses["server loss"] = by_round("server_loss")
    losses["separation"] = by_round("separation")
    plots.curves(path, curves, losses, levels, title)
