"""What a job leaves behind: the table on the terminal, and the files of the result folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import base, charts
from experiments.lib import plots
from experiments.sweep_runs import told
from jaxfedmvc.engine import checkpoint
from jaxfedmvc.engine.phases import RunState, Traffic
from jaxfedmvc.federation import Federation
from jaxfedmvc.metrics.federation import GROUPS

METRICS = ("acc", "nmi", "ari", "purity")
WAYS = {"pooled": "pooled labels, one matching", "per_client": "mean over clients, each matched"}
# What the terminal shows; the files hold every group.
_SHOWN = {"all": "all clients", "multi_view": "multi-view", "partial_view": "partial-view"}
Scores = Mapping[str, Mapping[str, Mapping[str, Any]]]


class Place(NamedTuple):
    """Where a job stands: so many rounds of this seed are made, and all of the seeds before it."""

    seed: int
    made: int
    state: RunState | None  # None: before the setup


class Report:
    """Gathers results of one job; one folder, nothing overwritten, nothing half-written.

    Attributes:
      seconds: "compile" and "run", filled in by the job.
      traffic: Bytes of each stage, filled in by the job.
      last: Federation and evaluation of the last seed, for the map.
      facts: Further entries of summary.json, filled in by the job.
    """

    def __init__(
        self,
        values: flags.FlagValues,
        algorithm: str,
        dataset: str,
        federation: Federation,
        seeds: list[int],
    ) -> None:
        """Makes the folder, or opens it again where the flags ask to resume.

        Raises:
          ImportError: matplotlib, which the pictures need in the end, is not installed.
          OSError, ValueError: The folder cannot be written, or holds results already; or it does
            not hold this job, to resume it.
        """
        plots.require_matplotlib()
        self._versions = base.versions()
        self._values, self._algorithm, self._dataset = values, algorithm, dataset
        self._federation, self._seeds = federation, seeds
        self.seconds = {"compile": 0.0, "run": 0.0}
        self.traffic: dict[str, Traffic] = {}
        self.last: tuple[Federation, dict[str, Any]] = (federation, {})
        self.facts: dict[str, Any] = {}
        self._references: list[Mapping[str, Scores]] = []
        self._scores: dict[int, list[Scores]] = {seed: [] for seed in seeds}
        self._losses: dict[int, list[dict[str, float]]] = {seed: [] for seed in seeds}
        self.folder = base.make_folder(f"{algorithm}-{dataset}", resume=values.resume)
        self._store = self.folder / "checkpoint.npz"
        self._history: dict[str, Any] = {}

    # Where a killed job goes on.

    def is_finished(self) -> bool:
        """Whether the folder, opened again, holds all that the job leaves behind."""
        finished = (self.folder / "summary.json").exists()
        if finished:
            checkpoint.delete(self._store)
        return finished

    def save(self, place: Place) -> None:
        """Writes a checkpoint; all numbers go through JSON to the same bits."""
        history = {
            "losses": [self._losses[seed] for seed in self._seeds],
            "scores": [self._scores[seed] for seed in self._seeds],
            "references": self._references,
            "seconds": self.seconds,
        }
        told = {"seed": place.seed, "made": place.made, "history": history}
        checkpoint.save(self._store, place.state, told)

    def reopen(self, like: RunState) -> Place:
        """Where the job of the folder stands; the header then shows its rounds until there.

        Raises:
          ValueError: The checkpoint is damaged, or of another shape than `like`.
        """
        if not self._store.exists():
            (self.folder / "rounds.csv").unlink(missing_ok=True)
            return Place(self._seeds[0], 0, None)
        state, told = checkpoint.restore(self._store, like)
        self._history = told["history"]
        # A copy, as the programs give its memory away.
        return Place(told["seed"], told["made"], jax.tree.map(jnp.array, state))

    def _replay(self, write: Callable[[str], None]) -> None:
        """Reports the rounds of a checkpoint again; rounds.csv then holds these and no others."""
        (self.folder / "rounds.csv").unlink(missing_ok=True)
        history = self._history
        everyone = zip(self._seeds, history["losses"], history["scores"], strict=True)
        for seed, losses, scores in everyone:
            for i, values in enumerate(losses):
                self._add(seed, i + 1, values, scores[i] if scores else None, write)
        self._references = list(history["references"])
        for name, value in history["seconds"].items():
            self.seconds[name] += value

    # The rounds.

    def header(self, write: Callable[[str], None]) -> None:
        """Prints the head of the rounds' table, and the rounds of a job that goes on."""
        groups, names = _head(_SHOWN)
        write(f"{'':10s}{'loss':>9s} {groups}|  MB, all clients")
        write(f"{'seed round':10s}{'':>9s} {names}|     up    down")
        if self._history:
            self._replay(write)

    def add_round(
        self,
        seed: int,
        round_number: int,
        info: Any,
        scores: Scores | None,
        write: Callable[[str], None],
    ) -> None:
        """Prints a round's line and appends it to rounds.csv."""
        losses = _losses(info, self._federation)
        self._add(seed, round_number, losses, None if scores is None else _floats(scores), write)

    def _add(
        self,
        seed: int,
        round_number: int,
        losses: dict[str, float],
        scores: Scores | None,
        write: Callable[[str], None],
    ) -> None:
        self._losses[seed].append(losses)
        if scores is not None:
            self._scores[seed].append(scores)
        row: dict[str, Any] = {"seed": seed, "round": round_number} | losses
        for group in GROUPS:
            for way in WAYS:
                for name in METRICS:
                    value = math.nan if scores is None else float(scores[group][way][name])
                    row[f"{group}/{way}/{name}"] = value
        row |= {"bytes_up": self.traffic["round"].up, "bytes_down": self.traffic["round"].down}
        base.append_rows(self.folder / "rounds.csv", [row])
        up, down = (row[f"bytes_{way}"] / 1e6 for way in ("up", "down"))
        cells = "".join(_cells(scores, group, "pooled") for group in _SHOWN)
        write(f"{seed:4d} {round_number:5d}{losses['loss']:9.3f} {cells}|{up:7.3f} {down:7.3f}")

    def add_references(self, references: Mapping[str, Scores]) -> None:
        """Takes one seed's reference clusterings; none without labels."""
        self._references.append({name: _floats(scores) for name, scores in references.items()})

    # The end.

    def finish(self) -> Iterator[str]:
        """Writes summary and pictures; yields the lines for the terminal."""
        final = [self._scores[seed][-1] for seed in self._seeds if self._scores[seed]]
        rows = {self._algorithm: final}
        for name in self._references[0] if self._references else ():
            rows[name] = [references[name] for references in self._references]
        if not final:
            yield "no labels: nothing is scored"
        shown = dict(_SHOWN)
        if any(float(share) < 1 for share in self._values.participation):
            shown |= {
                "participating": "took part in this round",
                "non_participating": "took no part in this round",
            }
        groups, names = _head(shown)
        for way, title in WAYS.items() if final else ():
            yield ""
            yield f"{title} (last round, mean over {len(final)} seed{'s' * (len(final) > 1)})"
            yield f"{'':19s} {groups}|"
            yield f"{'':19s} {names}|"
            for name, scores in rows.items():
                cells = "".join(_cells(_mean(scores), group, way) for group in shown)
                yield f"{name:19s} {cells}|"
        self._draw(final, rows)
        summary = self._summary(final, rows)
        # The last file, as it says that the job is finished.
        base.write(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        checkpoint.delete(self._store)
        yield ""
        yield f"compile {self.seconds['compile']:.1f} s, run {self.seconds['run']:.1f} s"
        yield f"written: {self.folder}/ (summary.json, rounds.csv, flags.txt, *.png)"

    def _summary(self, final: list[Scores], rows: Mapping[str, list[Scores]]) -> dict[str, Any]:
        bytes_of = {stage: {"up": t.up, "down": t.down} for stage, t in self.traffic.items()}
        return {
            "algorithm": self._algorithm,
            "dataset": self._dataset,
            "n_clients": self._federation.n_clients,
            "n_clusters": self._n_clusters(),
            "rounds": self._values.rounds,
            "rounds_made": [len(self._losses[seed]) for seed in self._seeds],
            "seeds": self._seeds,
            "metrics": _statistics(final, "all", "pooled"),
            "groups": {
                name: {
                    group: {way: _statistics(scores, group, way) for way in WAYS}
                    for group in GROUPS
                }
                for name, scores in rows.items()
            },
            "bytes_per_round": bytes_of["round"],
            "bytes_setup": bytes_of["setup"],
            "bytes_finish": bytes_of["finish"],
            "seconds": self.seconds,
            "device": f"{jax.devices()[0].device_kind} ({jax.default_backend()})",
            "versions": self._versions,
        } | self.facts

    def _n_clusters(self) -> int:
        return self._values.n_clusters or self._federation.n_classes

    def _draw(self, final: list[Scores], rows: Mapping[str, list[Scores]]) -> None:
        title = f"{self._algorithm} on {self._dataset}, {len(self._seeds)} seed(s)"
        scores = {}
        shown = dict(_SHOWN)
        if len(self._federation.cohorts) == 1:  # all clients are of one kind
            shown = {"all": shown["all"]}
        for group, name in shown.items() if final else ():
            for metric in ("acc", "nmi") if group == "all" else ("acc",):
                runs = [
                    [s[group]["pooled"][metric] for s in self._scores[seed]] for seed in self._seeds
                ]
                runs = _even(runs)
                if np.isfinite(runs).all():
                    scores[f"{metric.upper()}, {name}"] = runs
        levels = {}
        for name, runs in rows.items():
            if name in ("no collaboration", "pooled k-means"):
                mean = _mean(runs)["all"]
                levels[f"ACC, {name}"] = float(mean["pooled"]["acc"])
                if name == "no collaboration":  # one matching for all is hard on it
                    levels[f"ACC, {name}, each matched"] = float(mean["per_client"]["acc"])
        names = self._losses[self._seeds[0]][0]
        losses = {
            name.replace("_", " "): _even(
                [[r[name] for r in self._losses[seed]] for seed in self._seeds]
            )
            for name in names
            if (name == "loss") == (len(self._federation.cohorts) == 1)
        }
        plots.curves(self.folder / "curves.png", scores, losses, levels, title)
        federation, result = self.last
        if "embedding" in result:
            self._draw_map(federation, result)

    def _draw_map(self, federation: Federation, result: Mapping[str, Any]) -> None:
        real = [np.asarray(cohort.mask) for cohort in federation.cohorts]
        points = np.concatenate([e[m] for e, m in zip(result["embedding"], real, strict=True)])
        clusters = np.concatenate([p[m] for p, m in zip(result["labels"], real, strict=True)])
        colourings = {"by cluster": clusters}
        if federation.labels is not None:
            truth = [np.asarray(t)[m] for t, m in zip(federation.labels, real, strict=True)]
            classes = np.concatenate(truth)
            clusters = charts.coloured_as(classes, clusters)
            colourings = {"by true class": classes, "by cluster": clusters}
        partial = np.concatenate(
            [
                np.full(m.sum(), not federation.holds_all_views(cohort))
                for cohort, m in zip(federation.cohorts, real, strict=True)
            ]
        ).astype(int)
        names = ["multi-view clients", "partial-view clients"][: 1 + partial.max()]
        plots.embedding(
            self.folder / "embedding.png",
            points,
            colourings,
            partial,
            names,
            f"t-SNE of the representation, {self._algorithm} on {self._dataset},"
            f" seed {self._seeds[-1]}",
        )


def _even(runs: list[list[float]]) -> np.ndarray:
    """[seeds, rounds]; a run that found its end earlier than others stays where it ended."""
    longest = max(map(len, runs))
    return np.asarray([run + [run[-1]] * (longest - len(run)) for run in runs], float)


def _head(shown: Mapping[str, str]) -> tuple[str, str]:
    """Names of groups and of their metrics, in the width of `_cells`."""
    names = "| " + " ".join(f"{name.upper():>6s}" for name in METRICS)
    return "".join(f"| {name:^27s}" for name in shown.values()), names * len(shown)


def _cells(scores: Scores | None, group: str, way: str) -> str:
    """The four metrics of a group, in a fixed width."""
    if scores is None:
        return "| " + " ".join(["     -"] * len(METRICS))
    values = [float(scores[group][way][name]) for name in METRICS]
    return "| " + " ".join(f"{'-' if math.isnan(v) else format(v, '.3f'):>6s}" for v in values)


def _floats(scores: Scores) -> Scores:
    """As Python's own numbers, which JSON keeps to the bit."""
    return jax.tree.map(float, scores)


def _mean(scores: list[Scores]) -> Scores:
    return jax.tree.map(lambda *values: float(np.mean(values)), *scores)


def _statistics(scores: list[Scores], group: str, way: str) -> dict[str, Any]:
    """Mean, standard deviation (over seeds, population form) and every seed's value."""
    result = {}
    for name in METRICS if scores else ():
        values = [float(s[group][way][name]) for s in scores]
        if any(math.isnan(v) for v in values):
            continue
        result[name] = {
            "mean": float(np.mean(values)),
            "std": float(np.std(values)),
            "per_seed": values,
        }
    return result


def _losses(info: Any, federation: Federation) -> dict[str, float]:
    """Mean losses that clients reported last: of all, multi-view and partial clients."""
    values: dict[str, list[np.ndarray]] = {"multi_view": [], "partial_view": []}
    for cohort, reported in zip(federation.cohorts, told(info), strict=True):
        if "loss" not in reported:
            continue
        kind = "multi_view" if federation.holds_all_views(cohort) else "partial_view"
        values[kind].append(np.asarray(reported["loss"]))
    means = {f"loss_{k}": float(np.mean(np.concatenate(v))) for k, v in values.items() if v}
    everyone = np.concatenate([part for parts in values.values() for part in parts])
    return {"loss": float(np.mean(everyone)), **means}
