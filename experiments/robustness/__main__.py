"""Accuracy against the share of hostile clients, for each rule: `python -m experiments.robustness`.

The methods run on one set, plain and under every robust reduction of `messages.robust`, attacked in
the rounds by a growing share of the clients, and by nobody: what a rule costs then stands beside
what it saves, on clients that are alike and on skewed ones. E-FKMVC is attacked at its start, too,
which no rule guards. VertCoHiRF's labels have no mean: its rows say so, and show what its own
consensus bears. Labels score, and nothing else. A study that was killed goes on with --resume.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.sharding import Mesh

from experiments.lib import charts, folder
from experiments.lib.command import JobSettings, checked
from experiments.lib.data import DataSettings, fingerprint
from experiments.lib.progress import Progress
from experiments.lib.study import Rows, parse_or_exit, write_summary
from experiments.robustness.subjects import (
    MEAN,
    METHODS,
    NOBODY,
    QUICK_METHODS,
    QUICK_RULES,
    RULES,
    Cell,
    RobustnessSettings,
    Subject,
    attackers,
    cells,
    program,
    subject,
)
from jaxfedmvc import data
from jaxfedmvc.data.dataset import Dataset
from jaxfedmvc.files import write_text
from jaxfedmvc.metrics import host

SCORES = ("acc", "nmi", "ari")
_CELL = ["method", "clients", "attack", "share", "rule"]
_FLAGS = {
    RobustnessSettings: None,
    DataSettings: ("dataset", "data_dir", "scale"),
    JobSettings: ("seed", "seeds"),
}


@folder.stoppable
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the study that the command line describes; that of this process if it is None."""
    defaults = {"dataset": "digits", "seeds": "5"}
    study = parse_or_exit(arguments, __doc__, _FLAGS, defaults)
    settings, source, job = checked(lambda: [study.read(group) for group in _FLAGS])
    seeds = job.all_seeds
    if settings.quick:
        settings, seeds = quick(settings), seeds[:1]
    dataset = checked(lambda: _labelled(source))
    read = {source.dataset or dataset.name: fingerprint(dataset)}
    path = checked(lambda: study.open(f"robustness-{dataset.name}", read))
    rows = checked(lambda: Rows(path / "runs.csv", _CELL))
    made_by = folder.made_by(study.given(*_FLAGS))
    with Progress(study.folder.progress) as progress:
        for name in settings.algorithm:
            chosen = checked(partial(subject, name, settings, dataset, seeds))
            measured(name, chosen, settings, seeds, rows, progress, study.mesh, made_by)
            jax.clear_caches()
    runs = pd.read_csv(path / "runs.csv")
    told = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    report(path, runs, f"{dataset.name}, {told}")
    write_summary(path, {"dataset": dataset.name, "seeds": seeds, "runs": len(runs)})
    print(f"written: {path}/ (runs.csv, summary.csv, summary.json, flags.txt, *.md, *.png)")


def quick(settings: RobustnessSettings) -> RobustnessSettings:
    """Returns settings of a small run; methods that are asked for by name stay."""
    return dataclasses.replace(
        settings,
        algorithm=QUICK_METHODS if settings.algorithm == METHODS else settings.algorithm,
        hostile_shares=(0.3,),
        agent_samples=min(settings.agent_samples, 200),
    )


def _labelled(source: DataSettings) -> Dataset:
    dataset = data.load(source.dataset or "digits", source.data_dir, source.scale)
    if dataset.labels is None:
        raise ValueError(f"dataset: {dataset.name} has no labels to score against")
    return dataset


def measured(
    name: str,
    subject: Subject,
    settings: RobustnessSettings,
    seeds: Sequence[int],
    rows: Rows,
    progress: Progress,
    mesh: Mesh | None = None,
    made_by: Mapping[str, str] = {},
) -> None:
    """Makes all runs of a method that have no row yet, seeds at once on a mesh."""
    chosen = QUICK_RULES if settings.quick else tuple(RULES)
    plain = program(subject, None)
    rules = [RULES[rule](settings.assumed_share) for rule in chosen]
    guarded = None if subject.guard is None else program(subject, rules)
    asked = cells(subject, settings)
    names = {
        rule: [{"method": name, **cell._asdict(), "rule": rule} for cell in asked]
        for rule in (MEAN, *chosen)
    }
    left = {rule: sum(len(rows.left(of, seeds)) for of in names[rule]) for rule in names}
    progress.expect({f"{name}/{rule}": n for rule, n in left.items()})
    for place, rule in enumerate((MEAN, *chosen)):
        run = plain if rule == MEAN else guarded
        if run is not None and place < 2 and left[rule]:  # all rules are the same program
            progress.compiling(place, 2, name)
        for cell, of in zip(asked, names[rule], strict=True):
            one = partial(_row, subject, run, cell, max(place - 1, 0), made_by)
            rows.make(of, one, seeds, mesh, partial(progress.done, f"{name}/{rule}"))


def _row(
    subject: Subject,
    run: Callable[..., Any] | None,
    cell: Cell,
    rule: int,
    made_by: Mapping[str, str],
    seed: int,
) -> dict[str, Any]:
    """Returns what a seed's row says beside what names it, NaN where the rule has no program."""
    if run is None:
        unknown = dict.fromkeys((*SCORES, "seconds"), np.nan)
        return {**unknown, "note": subject.why_not, **made_by}
    return {**one_run(subject, run, cell, rule, seed), "note": "", **made_by}


def one_run(
    subject: Subject, run: Callable[..., Any], cell: Cell, rule: int, seed: int
) -> dict[str, float]:
    """Returns the scores of one seed, and how many seconds they took, compilation included.

    Args:
      subject: The method.
      run: Its program.
      cell: Who attacks how.
      rule: Index of the rule that guards it, where one does.
      seed: Of the partition and of the run.
    """
    began = time.perf_counter()
    federation, key = subject.federations[cell.clients][seed], jax.random.key(seed)
    labels = run(federation, key, attackers(subject, cell), jnp.int32(rule))
    pooled = host.score(federation, labels)["all"]["pooled"]
    scores = {score: pooled[score] for score in SCORES}
    return scores | {"seconds": round(time.perf_counter() - began, 3)}


# --- What is shown --------------------------------------------------------------------------------


def report(path: Path, runs: pd.DataFrame, title: str) -> None:
    """Writes summary.csv, and of each method a table, which is printed, and a picture."""
    summary = summarised(runs)
    write_text(path / "summary.csv", summary.to_csv(index=False))
    draw(path, summary, title)
    for method in summary["method"].unique():
        text = markdown(summary, method)
        write_text(path / f"{method}.md", text)
        print(f"\n{method}, {title}: ACC, mean +- sample deviation\n\n{text}")


def summarised(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns mean and deviation over seeds (sample form) of every cell, a line each."""
    of_cell = runs.groupby(_CELL, sort=False)
    table = {"seeds": of_cell.size()}
    for score in SCORES:
        table |= {f"{score}/mean": of_cell[score].mean(), f"{score}/std": of_cell[score].std()}
    return pd.DataFrame(table | {"note": of_cell["note"].first()}).reset_index()


def markdown(summary: pd.DataFrame, method: str) -> str:
    """Returns ACC as a table with a line for each attack and share, and a column for each rule."""
    mine = summary[summary["method"] == method]
    rules = [rule for rule in (MEAN, *RULES) if (mine["rule"] == rule).any()]
    lines = [["attack", "share", *rules], ["---"] * (2 + len(rules))]
    for (kind, attack, share), rows in mine.groupby(["clients", "attack", "share"], sort=False):
        of_rule = rows.set_index("rule")
        cells = [_text(of_rule["acc/mean"][rule], of_rule["acc/std"][rule]) for rule in rules]
        lines.append([_title(kind, attack), f"{share:.0%}", *cells])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = mine["note"].dropna()
    return table + "".join(f"\n-: {note}\n" for note in dict.fromkeys(notes) if note)


def _title(clients: str, attack: str) -> str:
    return attack if clients == "alike" else f"{attack}, {clients} clients"


def _text(mean: float, deviation: float) -> str:
    if np.isnan(mean):
        return "-"
    spread = "" if np.isnan(deviation) else f" +- {deviation:.2f}".replace("0.", ".")
    return f"{mean:.2f}".replace("0.", ".") + spread


def draw(path: Path, summary: pd.DataFrame, title: str) -> None:
    """Draws a picture of each method: a panel for each attack, a line for each rule."""
    for method, rows in summary.groupby("method", sort=False):
        quiet = rows[rows["attack"] == NOBODY]
        panels = {}
        attacks = rows[rows["attack"] != NOBODY].groupby(["clients", "attack"], sort=False)
        for (kind, attack), lines in attacks:
            both = pd.concat([quiet[quiet["clients"] == kind], lines]).dropna(subset="acc/mean")
            of_rules = both.groupby("rule", sort=False)
            panels[_title(kind, attack)] = {
                str(rule): _points(of, place - (len(of_rules) - 1) / 2)
                for place, (rule, of) in enumerate(of_rules)
            }
        charts.lines(
            path / f"{method}.png",
            panels,
            "attackers, % of the clients (rules side by side)",
            "ACC",
            f"{method}, {title}",
            same_y=True,
        )


def _points(rows: pd.DataFrame, shift: float) -> charts.Line:
    """Returns points a little beside their place: rules of the same ACC can be told apart."""
    deviations = rows["acc/std"].fillna(0.0)  # of one seed
    places = 100 * rows["share"] + 0.6 * shift
    return list(zip(places, rows["acc/mean"], deviations, strict=True))


if __name__ == "__main__":
    main()
