"""What a job leaves behind: lines on the terminal, tables, pictures, and files that are whole."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.lib import charts, folder, page, plots, run_page
from experiments.lib.command import Command, without
from experiments.lib.data import Problem
from experiments.lib.hooks import SeedResult
from experiments.lib.references import ALONE, POOLED, has_one_width
from experiments.lib.text import (
    counted,
    digits,
    in_lines,
    megabytes,
    spread,
    table_lines,
    width_of_terminal,
)
from jaxfedmvc.engine import Traffic
from jaxfedmvc.federation import Federation
from jaxfedmvc.files import write_text
from jaxfedmvc.metrics.host import GROUPS, METRICS, WAYS, Scores

_GROUP_TITLES = {
    "all": "all clients",
    "multi_view": "multi-view",
    "partial_view": "partial-view",
    "participating": "took part in this round",
    "non_participating": "took no part in this round",
}
# Of a picture by cluster beside one by class.
MATCHED = "by cluster, in the colour of the class that it matches"
_MOST_SIZES = 20  # clusters whose sizes are printed
Row = dict[str, Any]


class Report:
    """Gathers the results of one job.

    Attributes:
      rows: Lines of rounds.csv, of all seeds.
      references: For each finished seed `{name: scores}`, the method's own first.
      seconds: "compile" and "run".
      figures: For the page, before its own.
    """

    def __init__(self, command: Command, path: Path, problem: Problem, title: str) -> None:
        """Takes the folder and what all seeds have in common."""
        self.command, self.path, self.title = command, path, title
        federation, self.notes = problem.federation, problem.notes
        self.n_samples = _held(federation)
        self.federation = federation
        self.rows: list[Row] = []
        self.references: list[dict[str, Any]] = []
        self.figures: list[page.Figure] = []
        self.seconds = {"compile": 0.0, "run": 0.0}
        self.width = width_of_terminal()  # once, so that rounds stand below their head
        self.is_scored = federation.labels is not None
        self.groups = _shown_groups(command, federation) if self.is_scored else []
        # Agents share their samples, so that each is matched by itself.
        self.way = "per_client" if command.method.topology == "vertical" else "pooled"

    # --- The rounds -------------------------------------------------------------------------------

    def header(self, row: Row) -> Iterator[str]:
        """Yields the head of the rounds' table, whose columns are those of `row`."""
        loss = f"{'loss':>9s} " if "loss" in row else " "
        own = self._own_columns(row)
        titles = [f"{'':10s}{'':{len(loss)}s}"]
        titles += [f"| {_GROUP_TITLES[group]:^27s}" for group in self.groups]
        titles += [f"|{'MB, all clients':>15s}", *(" " * _width(name) for name in own)]
        names = [f"{'seed round':10s}{loss}"]
        names += ["| " + " ".join(f"{m.upper():>6s}" for m in METRICS) for _ in self.groups]
        names += [f"|{'up':>7s} {'down':>7s}", *(f"{name:>{_width(name)}s}" for name in own)]
        for places in in_lines(names, self.width):
            yield from (_part(blocks, places) for blocks in (titles, names))

    def lines(self, row: Row) -> Iterator[str]:
        """Yields a round's line; as many as its columns take on the terminal."""
        loss = f"{row['loss']:9.3f} " if "loss" in row else " "
        blocks = [f"{row['seed']:4d} {row['round']:5d}{loss}"]
        for group in self.groups:
            cells = (_cell(row[f"{group}/{self.way}/{metric}"]) for metric in METRICS)
            blocks.append("| " + " ".join(cells))
        up, down = megabytes(row["bytes_up"]), megabytes(row["bytes_down"])
        blocks.append(f"|{up:>7s} {down:>7s}")
        for name in self._own_columns(row):
            value = "-" if row[name] is None else digits(row[name], 4)
            blocks.append(f"{value:>{_width(name)}s}")
        for places in in_lines(blocks, self.width):
            yield _part(blocks, places)

    def add_round(self, row: Row) -> None:
        """Keeps a round's row, and appends it to rounds.csv."""
        self.rows.append(row)
        folder.append_rows(self.path / "rounds.csv", [row])

    def _own_columns(self, row: Row) -> list[str]:
        return [
            name for name in (*self.command.hooks.shown, "agreement", "information") if name in row
        ]

    # --- A seed -----------------------------------------------------------------------------------

    def add_labels(self, result: SeedResult) -> None:
        """Appends a seed's clusters to labels.csv."""
        problem = result.problem
        if self.command.method.topology == "vertical":
            order = np.argsort(
                [int(np.asarray(c.client_ids)[0]) for c in problem.federation.cohorts]
            )
            places, rows = np.arange(len(problem.rows)), problem.rows
            if problem.repeats is not None:
                more, of = problem.repeats
                places, rows = np.concatenate([places, of]), np.concatenate([rows, more])
            agents = {f"agent_{a}": result.labels[c][0][places] for a, c in enumerate(order)}
            found = pd.DataFrame({"seed": result.seed, "id": places, "row": rows} | agents)
        else:
            of_rows = {"client": result.owners(), "row": result.names()}
            of_rows["cluster"] = result.of_rows(result.labels)
            found = pd.DataFrame({"seed": result.seed} | of_rows)
        path = self.path / "labels.csv"
        found.to_csv(path, mode="a", header=not path.exists(), index=False)

    # --- The end ----------------------------------------------------------------------------------

    def finish(self, last: SeedResult, traffic: Mapping[str, Traffic], facts: Row) -> Iterator[str]:
        """Writes summary and pictures; yields the lines for the terminal."""
        n = len(self.references)
        kept = "last" if self.command.job.keep_from is None else "kept"
        after = f"(after the {kept} round, mean over {counted(n, 'seed')})"
        for title, scores in self._tables().items():
            yield f"\n{title} {after}"
            yield from table_lines(scores, self.width)
        if not self.is_scored:
            yield f"\nno labels, no scores; what the data say of the clusters {after}"
            yield from table_lines(self._internal(), self.width)
            yield "silhouette and number of clusters: the mean over clients, each by itself"
            yield from self._sizes(last)
        yield from self._told()
        summary = self._summary(traffic) | facts
        if failed := summary["failed"]:
            yield f"\nfailed, and in no mean: {', '.join(f'seed {seed}' for seed in failed)}"
        fewest, made = min(summary["rounds_made"]), max(summary["rounds_made"])
        number = f"{made}" if fewest == made else f"{fewest} to {made}"
        if 0 < fewest < self.command.rounds:
            yield f"\nended by itself after {number} of at most {self.command.rounds} rounds"
        up, down = (
            max(summary["bytes_rounds"][way])
            + sum(getattr(traffic[stage], way) for stage in ("setup", "finish"))
            for way in ("up", "down")
        )
        self._draw(last, facts | {"bytes_up": up, "bytes_down": down, "rounds_made": number})
        setup, finish = (megabytes(sum(traffic[stage])) for stage in ("setup", "finish"))
        run = f"{'a run' if fewest == made else 'the longest run'} of {counted(made, 'round')}"
        yield (
            f"\n{run}, all clients: {megabytes(up)} MB up, {megabytes(down)} MB down"
            f" ({setup} before and {finish} after the rounds, both ways)"
        )
        yield from _of_privacy(facts)
        # The last file, as it says that the job is finished.
        write_text(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")
        yield f"compile {self.seconds['compile']:.1f} s, run {self.seconds['run']:.1f} s"
        files = "summary.json, rounds.csv, labels.csv, flags.txt"
        files += ", *.png" if any(self.path.glob("*.png")) else ""
        also = "report.html, " if page.is_installed() else ""
        yield f"written: {self.path}/ ({also}{files})"

    def _tables(self) -> dict[str, pd.DataFrame]:
        """Returns `_scores` in each way that is fair to some row, by titles; none without labels.

        Pooled ones alone would show clients that exchange nothing as far worse than they are.
        """
        if not self.is_scored:
            return {}
        ways = ["per_client"] if self.command.method.topology == "vertical" else list(run_page.WAYS)
        return {run_page.WAYS[way]: self._scores(way) for way in ways}

    def _scores(self, way: str) -> pd.DataFrame:
        """Returns the method and its references as rows; mean +- deviation over the seeds."""
        names = list(self.references[0])
        groups = self.groups
        if any(share < 1 for share in self.command.job.participation):
            groups = [*groups, "participating", "non_participating"]
        lines = {}
        for name in names:
            scores = [reference[name] for reference in self.references]
            cells: dict[Any, str] = {}
            for group in groups:
                for metric in METRICS:
                    values = [s[group][way][metric] for s in scores]
                    cells[_GROUP_TITLES[group], metric.upper()] = _mean_cell(
                        values, len(groups) == 1
                    )
            lines[name] = cells
        table = pd.DataFrame(lines).T
        table.columns = pd.MultiIndex.from_tuples(table.columns)
        if way == "per_client":  # as these are: of each client's rows by themselves
            internal = self._internal()
            internal.columns = pd.MultiIndex.from_product([[_GROUP_TITLES["all"]], internal])
            table = table.join(internal) if len(groups) == 1 else table
        return table

    def _internal(self) -> pd.DataFrame:
        """Returns what needs no labels, in the same rows as `_scores`."""
        return pd.DataFrame(
            {
                metric: {
                    name: cell([r[name]["internal"].get(metric, math.nan) for r in self.references])
                    for name in self.references[0]
                }
                for metric, cell in (
                    ("information", _mean_cell),
                    ("silhouette", _mean_cell),
                    ("clusters", _count_cell),
                )
            }
        )

    def _told(self) -> Iterator[str]:
        """Yields what a view tells of the clusters, and of which seed's most, if of several."""
        cells = self._internal()["information"]
        if shown := [f"{name} {cell}" for name, cell in cells.items() if cell != "-"]:
            yield f"\ninformation (no labels): {', '.join(shown)}"
        told = [r[self.command.name]["internal"].get("information") for r in self.references]
        known = {
            seed: value
            for seed, value in zip(self.command.job.all_seeds, told, strict=False)
            if value is not None and not math.isnan(value)
        }
        if len(known) > 1:
            seed = max(known, key=lambda seed: known[seed])
            yield f"a view tells most of the clusters of seed {seed}: {known[seed]:.3f}"

    def _sizes(self, last: SeedResult) -> Iterator[str]:
        """Yields the sizes of a seed's clusters, of all clients' rows; of agents, each one's."""
        clusters, owners = last.of_rows(last.labels), last.owners()
        found = [("", clusters)]
        if self.command.method.topology == "vertical":
            agents = np.concatenate([c.client_ids for c in last.problem.federation.cohorts])
            found = [(f", agent {a}", clusters[owners == a]) for a in np.sort(agents)]
        for owner, labels in found:
            in_one = labels[labels >= 0]
            sizes = sorted(np.unique(in_one, return_counts=True)[1], reverse=True)
            shown = ", ".join(map(str, sizes[:_MOST_SIZES]))
            if len(sizes) > _MOST_SIZES:
                shown += f" and {len(sizes) - _MOST_SIZES} smaller ones"
            yield f"rows of each cluster, seed {last.seed}{owner}: {shown}"

    def _summary(self, traffic: Mapping[str, Traffic]) -> Row:
        seeds = self.command.job.all_seeds
        rows = {
            name: {
                group: {
                    way: _statistics([r[name][group][way] for r in self.references]) for way in WAYS
                }
                for group in (GROUPS if self.is_scored else ())
            }
            | {"internal": _statistics([r[name]["internal"] for r in self.references])}
            for name in (self.references[0] if self.references else ())
        }
        # The last one's: methods that compact send fewer bytes each time, and a job that goes on
        # after it makes no round itself.
        last_round = next((row for row in reversed(self.rows) if row["round"]), None)
        per_round = traffic["round"]._asdict()
        if last_round is not None:
            per_round = {way: last_round[f"bytes_{way}"] for way in per_round}
        return {
            "algorithm": self.command.name,
            "command": self._arguments(),
            "commit": folder.commit(),
            "data": list(self.notes),
            "dataset": self.command.data.stem,
            "n_clients": self.federation.n_clients,
            "n_samples": self.n_samples,
            "rounds": self.command.rounds,
            "rounds_made": [
                max([r["round"] for r in self.rows if r["seed"] == s], default=0) for s in seeds
            ],
            "seeds": seeds,
            "failed": self._failed(),
            "metrics": rows[self.command.name]["all"][self.way] if self.is_scored else {},
            "groups": rows,
            "bytes_rounds": {
                way: [
                    sum(r[f"bytes_{way}"] for r in self.rows if r["seed"] == s and r["round"])
                    for s in seeds
                ]
                for way in ("up", "down")
            },
            "bytes_per_round": per_round,
            "bytes_setup": traffic["setup"]._asdict(),
            "bytes_finish": traffic["finish"]._asdict(),
            "seconds": self.seconds,
            "device": folder.device(),
            "versions": folder.versions(),
        }

    def _failed(self) -> list[int]:
        """Returns the seeds that no row is in a cluster of, as where the model turned NaN."""
        found = [r[self.command.name]["internal"]["clusters"] for r in self.references]
        seeds = self.command.job.all_seeds[: len(found)]
        return [seed for seed, n in zip(seeds, found, strict=True) if math.isnan(n)]

    def _draw(self, last: SeedResult, facts: Row) -> None:
        self._draw_curves([made for made in facts.get("rounds_kept", ()) if made])
        flat = None
        if has_one_width(last.embedding):
            title = f"t-SNE of the representation, {self.title}, seed {last.seed}"
            flat = _draw_embedding(self.path / "embedding.png", last, title)
        if self.command.hooks.pictures is not None and not last.failed:
            self.command.hooks.pictures(self, last)
        if page.is_installed():
            self._write_page(last, facts, flat)

    def _write_page(self, last: SeedResult, facts: Row, flat: np.ndarray | None) -> None:
        seeds = self.command.job.all_seeds
        up, down = (megabytes(facts[f"bytes_{way}"]) for way in ("up", "down"))
        flags = self.command.flags
        shared = "shared_clusters" in flags and flags["shared_clusters"].value
        found = self.command.method.finds_n_clusters and "found by the method"
        tables = {f"Scores: {title}": scores for title, scores in self._tables().items()}
        tables = tables or {"Clusters without labels, mean over clients": self._internal()}
        told = {
            "clients": self.federation.n_clients,
            "clusters": shared or found or facts["n_clusters"],
            "rounds": f"{facts['rounds_made']} of at most {self.command.rounds}",
            "seeds": f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else seeds[0],
            "MB of all these rounds, up and down": f"{up} and {down}",
            "seconds": ", ".join(f"{name} {s:.1f}" for name, s in self.seconds.items()),
            **_of_choice(facts),
            "device": folder.device(),
            "versions": ", ".join(f"{k} {v}" for k, v in folder.versions().items()),
            "data": "\n".join(self.notes),
        }
        page.write(
            self.path / "report.html",
            self.title,
            told,
            shlex.join(["python", "-m", "experiments.run", *self._arguments()]),
            {f"{heading}, mean over the seeds": table for heading, table in tables.items()},
            [*self.figures, *run_page.figures(self.rows, last, self.way, flat)],
        )

    def _arguments(self) -> list[str]:
        """Returns the command line of the same job, in another folder."""
        others = without(self.command.arguments, {"algorithm", "output_dir", "resume"})
        return [f"--algorithm={self.command.name}", *others]

    def _draw_curves(self, kept: Sequence[int]) -> None:
        """Draws scores and what needs no labels by round, references as levels, and kept rounds."""
        column = partial(run_page.by_round, self.rows)
        made = column("round")
        if made.size == len(made):  # of one round, or none
            return
        scores, losses = {}, {}
        for group in self.groups:
            for metric in ("acc", "nmi") if group == "all" else ("acc",):
                values = column(f"{group}/{self.way}/{metric}")
                if np.isfinite(values).all():
                    scores[f"{metric.upper()}, {_GROUP_TITLES[group]}"] = values
        names = [name for name in self.rows[0] if name.startswith("loss")]
        for name in names[1:] if len(names) > 2 else names[:1]:
            losses[name.replace("_", " ")] = column(name)
        if "information" in self.rows[0]:
            losses["information (nats)"] = column("information")
        levels = {}
        # Clients that exchange nothing name their clusters each for itself.
        apart = "per_client" if self.way == "pooled" else self.way
        for name, way in ((ALONE, apart), (POOLED, self.way)):
            known = [r[name]["all"] for r in self.references if name in r and self.is_scored]
            if known:
                title = f"ACC, {name}" + ", each matched" * (way != self.way)
                levels[title] = float(np.mean([s[way]["acc"] for s in known]))
        if scores or losses:
            title = f"{self.title}, {counted(len(made), 'seed')}"
            title += f"\nscores: {run_page.WAYS[self.way]}" if scores else ""
            plots.curves(self.path / "curves.png", scores, losses, levels, title, kept)


def _draw_embedding(path: Path, result: SeedResult, title: str) -> np.ndarray:
    """Draws the t-SNE of all clients' representations, by class and by cluster; returns it."""
    federation = result.problem.federation
    assert result.embedding is not None
    points, clusters = result.of_rows(result.embedding), result.of_rows(result.labels)
    colourings, named = {"by cluster": clusters}, "cluster"
    called: Callable[[int], str] = str
    if federation.labels is not None:
        classes = result.of_rows(federation.labels)
        colourings = {"by true class": classes, MATCHED: charts.coloured_as(classes, clusters)}
        named, called = "class", result.problem.called
    kinds = (np.full(c.mask.shape, not federation.holds_all_views(c)) for c in federation.cohorts)
    partial = result.of_rows([*kinds]).astype(int)
    names = ["multi-view clients", "partial-view clients"][: 1 + partial.max()]
    return plots.embedding(
        path, points, colourings, partial, names, title, named=named, called=called
    )


def flattened(scores: Scores | None) -> dict[str, float]:
    """Returns scores as columns `group/way/metric`; NaN where nothing is scored."""
    return {
        f"{group}/{way}/{metric}": math.nan if scores is None else float(scores[group][way][metric])
        for group in GROUPS
        for way in WAYS
        for metric in METRICS
    }


def losses_of(info: Sequence[Mapping[str, Any]], federation: Federation) -> dict[str, float]:
    """Returns the mean losses that clients reported last: of all, multi-view and partial ones."""
    values: dict[str, list[np.ndarray]] = {"loss_multi_view": [], "loss_partial_view": []}
    for cohort, report in zip(federation.cohorts, client_reports(info), strict=False):
        if "loss" in report:
            kind = "multi_view" if federation.holds_all_views(cohort) else "partial_view"
            values[f"loss_{kind}"].append(np.ravel(report["loss"]))
    everyone = [part for parts in values.values() for part in parts]
    if not everyone:
        return {}
    means = {name: float(np.mean(np.concatenate(v))) for name, v in values.items() if v}
    return {"loss": float(np.mean(np.concatenate(everyone))), **means}


def client_reports(info: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns what each cohort's clients reported in a round; of several phases the last counts.

    For phases that everyone takes part in: a leader's has one entry, of its own cohort.
    """
    found: list[dict[str, Any]] = []
    for phase in info:
        for c, report in enumerate(phase["clients"]):
            report = getattr(report, "inner", report)
            if c == len(found):
                found.append({})
            if isinstance(report, Mapping):
                found[c] |= report
    return found


def _shown_groups(command: Command, federation: Federation) -> list[str]:
    full = {federation.holds_all_views(cohort) for cohort in federation.cohorts}
    mixed = command.method.topology != "vertical" and len(full) == 2
    return ["all", "multi_view", "partial_view"] if mixed else ["all"]


def _part(blocks: Sequence[str], places: Sequence[int]) -> str:
    """Returns a line of blocks, behind the first one or the room that it takes above."""
    lead = blocks[0] if places[0] == 1 else " " * len(blocks[0])
    return (lead + "".join(blocks[i] for i in places)).rstrip()


def _width(name: str) -> int:
    return max(len(name) + 2, 10)


def _cell(value: float) -> str:
    return f"{'-' if math.isnan(value) else format(value, '.3f'):>6s}"


def _mean_cell(values: Sequence[float], with_deviation: bool = True) -> str:
    if np.isnan(values).any():
        return "-"
    shown = with_deviation and len(values) > 1
    return spread(float(np.mean(values)), float(np.std(values, ddof=1)) if shown else math.nan)


def _count_cell(values: Sequence[float]) -> str:
    """Writes a mean of counts, of which three places say nothing."""
    if np.isnan(values).any():
        return "-"
    deviation = f" +- {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return digits(values[0]) if np.ptp(values) == 0 else f"{np.mean(values):.1f}{deviation}"


def _held(federation: Federation) -> int:
    """Returns how many samples clients hold, each once."""
    ids = [np.asarray(c.sample_ids)[np.asarray(c.mask)] for c in federation.cohorts]
    return len(np.unique(np.concatenate(ids)))


def _of_privacy(facts: Row) -> Iterator[str]:
    """Yields what noise protects and what not, for the terminal; nothing where there is none."""
    privacy = facts.get("privacy", {})
    if "epsilon" in privacy:
        epsilon = "infinite" if privacy["epsilon"] is None else f"{privacy['epsilon']:.3g}"
        yield (
            f"{privacy['kind']}: epsilon {epsilon}, delta {privacy['delta']:.3g}; it covers"
            f" {privacy['covered']} (what else: summary.json)"
        )


def _of_choice(facts: Row) -> dict[str, str]:
    """Returns what a choice of settings cost, for the page; nothing where there was none."""
    if "bytes_choice" not in facts:
        return {}
    up, down = (megabytes(facts["bytes_choice"][way]) for way in ("up", "down"))
    return {"MB of the choice before them, up and down": f"{up} and {down}"}


def _statistics(scores: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Returns mean, sample deviation (None of one seed) and every seed's value."""
    result = {}
    for name in scores[0] if scores else ():
        values = [float(s[name]) for s in scores]
        if not any(math.isnan(v) for v in values):
            result[name] = {
                "mean": float(np.mean(values)),
                "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
                "per_seed": values,
            }
    return result
