"""Figures of a run's page: rounds with bytes, the embedding, confusion, every client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.lib import charts, page, plots
from experiments.lib.hooks import SeedResult
from jaxfedmvc.metrics import host

# Scores that are drawn by round.
_METRICS = ("acc", "nmi", "ari")
# How clusters are matched to classes.
WAYS = {"pooled": "pooled labels, one matching", "per_client": "mean over clients, each matched"}


def figures(
    rounds: Sequence[Mapping[str, Any]], last: SeedResult, way: str, flat: np.ndarray | None
) -> list[page.Figure]:
    """Returns the figures of the page.

    Args:
      rounds: Rows of rounds.csv.
      last: The last seed's run, which is drawn.
      way: "pooled" or "per_client", how scores are matched.
      flat: Its representation in the plane [n, 2], or None.
    """
    found = _curves(rounds, way)
    if flat is not None:
        found.append(_map(flat, last))
    if last.problem.federation.labels is not None:
        found += _by_client(last, way)
    return found


def by_round(rounds: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Returns a column of rounds.csv [seeds, rounds]; a seed that ended before others stays there.

    Args:
      rounds: Rows of rounds.csv.
      name: Of the column.
    """
    runs: dict[int, list[Any]] = {}
    for row in rounds:
        runs.setdefault(row["seed"], []).append(row[name])
    longest = max(map(len, runs.values()), default=0)
    return np.asarray([run + run[-1:] * (longest - len(run)) for run in runs.values()], float)


def _curves(rounds: Sequence[Mapping[str, Any]], way: str) -> list[page.Figure]:
    """Returns scores and losses by round, and by what had been sent until then."""
    column = partial(by_round, rounds)
    made = column("round")
    if made.size == len(made):  # of one round, or none
        return []
    # A seed that has ended sends nothing more.
    goes_on = np.diff(made, axis=1, prepend=-1) > 0
    sent = np.cumsum(goes_on * (column("bytes_up") + column("bytes_down")) / 1e6, axis=1)
    x = {"rounds": made.max(axis=0), "MB of the rounds, both ways": sent.mean(axis=0)}
    drawn = {metric.upper(): column(f"all/{way}/{metric}") for metric in _METRICS}
    drawn = {name: values for name, values in drawn.items() if np.isfinite(values).all()}
    heading = f"Scores by round: {WAYS[way]}"
    found = [page.lines(heading, drawn, x, "score")] if drawn else []
    names = [name for name in rounds[0] if name.startswith("loss")]
    # With clients of one kind their loss is the loss of all.
    names = names if len(names) > 2 else names[:1]
    losses = {name.replace("_", " "): column(name) for name in names}
    losses = {name: values for name, values in losses.items() if np.isfinite(values).all()}
    found += [page.lines("Loss by round", losses, x, "loss")] if losses else []
    if "information" in rounds[0] and np.isfinite(told := column("information")).all():
        title = "What a view tells of clusters, by round"
        found.append(page.lines(title, {"information": told}, x, "nats"))
    return found


def _map(flat: np.ndarray, last: SeedResult) -> page.Figure:
    """Returns the representation in the plane, coloured by cluster and by class."""
    federation = last.problem.federation
    clusters = last.of_rows(last.labels)
    colourings = {"clusters": clusters}
    told = [
        f"client {owner}, row {row}, cluster {cluster}"
        for owner, row, cluster in zip(last.owners(), last.names().tolist(), clusters, strict=True)
    ]
    if federation.labels is not None:
        classes = last.of_rows(federation.labels)
        colourings = {"clusters": charts.coloured_as(classes, clusters), "classes": classes}
        told = [
            f"{text}, class {last.problem.called(c)}" for text, c in zip(told, classes, strict=True)
        ]
    kept = plots.thinned(len(clusters), len(flat))
    note = f"t-SNE, seed {last.seed}"
    if federation.labels is not None:
        note += "; colours of clusters are those of the classes they match"
    if len(kept) < len(clusters):
        note += f"; {len(kept)} of {len(clusters)} rows"
    chosen = {name: values[kept] for name, values in colourings.items()}
    names = {"clusters": clusters[kept]}
    titles = {"classes": last.problem.called}
    hover = [told[i] for i in kept]
    return page.scatter("Representation", flat, chosen, hover, note, names, titles)


def _by_client(last: SeedResult, way: str) -> list[page.Figure]:
    """Returns the confusion of classes and clusters, and the score of each client."""
    federation, of_agents = last.problem.federation, way != "pooled"
    tables, cohorts = host.tables(federation, last.labels), federation.cohorts
    clients = np.concatenate([np.asarray(c.client_ids) for c in cohorts])
    # Of agents none holds all views.
    full = [of_agents or federation.holds_all_views(c) for c in cohorts]
    kinds = np.repeat(np.where(full, "", " (partial)"), [c.n_clients for c in cohorts])
    order = np.argsort(clients)
    names = {f"{clients[i]}{kinds[i]}": host.table_scores(tables[i])["acc"] for i in order}
    seed, title, whose = f", seed {last.seed}", "Classes and clusters", "client"
    shown = tables.sum(axis=0)
    if of_agents:
        title, whose = f"{title} of the first agent", "agent"
        shown = tables[order[0]]
    figures = []
    if shown.shape[0] * shown.shape[1] <= 2500:
        figures.append(page.confusion(f"{title}{seed}", shown, last.problem.called))
    note = f"each {whose} with a matching of its own"
    return [*figures, page.bars(f"ACC of every {whose}{seed}", names, "ACC", note, whose)]
