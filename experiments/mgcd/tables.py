"""MGCD's tables 2 to 4 and figures 3 to 5, measured beside the paper's numbers.

The paper's code is not public, four of its six sets are not at hand as they were used, and it says
neither how many rounds and epochs it ran nor over how many seeds; see BUILD_NOTES.md. Every run is
appended to runs.csv as it ends; what that file holds already is not run again, so after a change of
a preset begin with a new file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from experiments import base, charts, mgcd_runs
from experiments.lib import plots
from experiments.mgcd_runs import METRICS, PRESETS, Program
from experiments.progress import ProgressBar
from experiments.vertical import Agents, SplitOptions, load_agents
from jaxfedmvc.algorithms.mgcd import MGCDConfig, MGCDHyperparams
from jaxfedmvc.algorithms.mgcd.model import LOSSES

PUBLISHED = Path(__file__).parent / "published"
FLAGS = flags.FLAGS

# The paper's sets and what stands for them. ALOI10 is ten of its hundred objects, NoisyMNIST10k is
# made as the 50 000 are; MNIST-USPS is not in the paper.
SETS = {
    "Mfeat": "mfeat",
    "Scene": "scene15",
    "Aloi": "aloi10",
    "NoisyMNIST": "noisymnist10k",
    "MNIST-USPS": "mnist_usps",
}
_ABLATION_SET = "Aloi"
_WEIGHTS = tuple(10.0**e for e in range(-3, 4))


class Setting(NamedTuple):
    """One row of a table: a mode, and what differs from its preset."""

    mode: str
    config: dict[str, Any] = {}  # noqa: RUF012, never changed
    hyperparams: dict[str, float] = {}  # noqa: RUF012
    rounds: int | None = None

    def settings(self, n_clusters: int) -> MGCDConfig:
        """The static configuration."""
        return MGCDConfig(
            n_clusters, **({"mode": self.mode} | PRESETS[self.mode].config | self.config)
        )

    def numbers(self) -> MGCDHyperparams:
        """The traced ones."""
        return MGCDHyperparams(**(PRESETS[self.mode].hyperparams | self.hyperparams))

    def most_rounds(self) -> int:
        """How many rounds it runs at most."""
        return self.rounds or PRESETS[self.mode].rounds


_TRAINED = {"server": "trained"}
TABLE_2 = {
    "MGCD, robust, average": Setting("robust"),
    "MGCD, robust, trained": Setting("robust", _TRAINED),
    "MGCD, literal": Setting("literal"),
    "MGCD, literal, average": Setting("literal", {"server": "average"}),
}


def _without(*losses: str, **config: Any) -> dict[str, Any]:
    kept = tuple(name for name in LOSSES if name not in losses)
    return _TRAINED | {"losses": kept} | config


_ABLATIONS = {
    3: {
        "A": _without("r"),
        "B": _without("cl"),
        "C": _without("dd"),
        "D": _without("cl", "dd"),
        "E": _without(),
    },
    4: {"a": _without(dual=False), "b": _without(distillation=False), "c": _without()},
}
_NAMES = {
    "A": "without L_r",
    "B": "without L_cl",
    "C": "without L_dd",
    "D": "without L_cl, L_dd",
    "E": "all",
    "a": "one encoder",
    "b": "without f_pre",
    "c": "all",
}


def ablation(table: int) -> dict[str, Setting]:
    """The rows of table 3 or 4, in both modes.

    The robust mode's linear encoder is one map whether there are two or one, so "one encoder" is
    its deep encoder's.
    """
    rows = {}
    for item, config in _ABLATIONS[table].items():
        for mode in ("literal", "robust"):
            deep = {"encoder": "deep"} if mode == "robust" and item in "ac" and table == 4 else {}
            rows[f"{mode}: {_NAMES[item]}" + (", deep" if deep else "")] = Setting(
                mode, config | deep
            )
    return rows


def cells(
    table: int | None, figure: int | None, sets: Sequence[str], rows: Sequence[str]
) -> dict[str, dict[str, Setting]]:
    """What a table or figure needs, `{set: {row: setting}}`.

    Args:
      table: 2, 3, 4 or None.
      figure: 3, 4, 5 or None.
      sets: Of table 2, some of `SETS`; all if empty.
      rows: Some of the rows, with ; for commas; all if empty.

    Raises:
      ValueError: An unknown set or row.
    """
    if not set(sets) <= set(SETS) or (sets and table != 2):
        raise ValueError(f"sets: got {','.join(sets)!r}; allowed for table 2 are {list(SETS)}")
    if table == 2:
        settings = TABLE_2
    elif table is not None:
        settings = ablation(table)
    else:
        settings = {3: {}, 4: figure_4_settings(), 5: figure_5_settings()}[figure]  # type: ignore[index]
    names = [row.replace(";", ",") for row in rows]
    if not set(names) <= set(settings):
        allowed = [row.replace(",", ";") for row in settings]
        raise ValueError(f"methods: got {','.join(rows)!r}; allowed are {allowed}")
    kept = {row: s for row, s in settings.items() if not names or row in names}
    return {name: kept for name in (sets or (SETS if table == 2 else [_ABLATION_SET]))}


def report(
    table: int | None,
    figure: int | None,
    wanted: Mapping[str, Mapping[str, Setting]],
    seeds: Sequence[int],
    path: Path,
    folder: Path,
) -> dict[str, Any]:
    """Runs, prints, writes and draws a table or a figure; returns what summary.json shall hold."""
    if figure == 3:
        return {"seeds": [seeds[0]], "acc": figure_3(folder, seeds[0])}
    rows = run_cells(wanted, seeds, path)
    found = summarise(rows, list(published(table)) if table else ())
    print()
    for line in lines(found):
        print(line)
    base.append_rows(folder / "table.csv", found)
    if table:
        title = f"MGCD, table {table}, {len(seeds)} seeds; bars without one are the paper's"
        draw_table(folder / f"table{table}.png", found, title)
    elif figure == 4:
        draw_figure_4(folder / "figure4.png", rows)
    else:
        draw_figure_5(folder, rows)
    return {"rows": found}


def run_cells(
    cells: Mapping[str, Mapping[str, Setting]], seeds: Sequence[int], path: Path
) -> list[dict[str, str]]:
    """Runs what `path` lacks and returns all rows of these cells.

    Args:
      cells: `{set: {name: setting}}`.
      seeds: Of the runs.
      path: runs.csv: a row for each round of each run, and one for each reference.
    """
    total = sum(s.most_rounds() for rows in cells.values() for s in rows.values()) * len(seeds)
    with ProgressBar(total) as bar:
        for name, settings in cells.items():
            agents = load(name)
            for row, setting in settings.items():
                program = Program(setting.settings(n_classes(agents)))
                for seed in seeds:
                    if not _has(path, name, row, seed):
                        _run_one(program, setting, agents, (name, row, seed), path, bar)
                    else:
                        bar.advance(setting.most_rounds())
                jax.clear_caches()  # programs of many settings would exhaust the memory maps
            for seed in seeds:
                if not _has(path, name, mgcd_runs.REFERENCES[0], seed):
                    found = mgcd_runs.references(
                        agents.views, agents.labels, n_classes(agents), seed
                    )
                    rows = [_flat(name, row, seed, 1, scored, {}) for row, scored in found.items()]
                    base.append_rows(path, rows)
    return [
        row
        for row in read(path)
        if int(row["seed"]) in seeds
        and row["set"] in cells
        and (row["row"] in cells[row["set"]] or row["row"] in mgcd_runs.REFERENCES)
    ]


def _run_one(
    program: Program,
    setting: Setting,
    agents: Agents,
    cell: tuple[str, str, int],
    path: Path,
    bar: ProgressBar,
) -> None:
    run = program.run(
        agents.federation,
        agents.labels,
        cell[2],
        setting.most_rounds(),
        setting.numbers(),
        lambda _: bar.advance(1),
    )
    bar.advance(setting.most_rounds() - len(run.rounds))
    final = mgcd_runs.scores(agents.labels, run.labels)
    rows = []
    for r, told in enumerate(run.rounds):
        is_last = r == len(run.rounds) - 1
        rows.append(_flat(*cell, r + 1, final if is_last else {}, told | {"seconds": run.seconds}))
    base.append_rows(path, rows)
    bar.write(f"{cell[0]}, {cell[1]}, seed {cell[2]}: ACC {final['acc']:.3f}, {run.seconds:.0f} s")


_TOLD = (
    "client_loss",
    "server_loss",
    "separation",
    "average_separation",
    "server_separation",
    "norm",
    "seconds",
    "consistency/acc",
    "consistency/nmi",
    "diversity/acc",
    "diversity/nmi",
    "average/acc",
    "average/nmi",
)


def _flat(
    name: str, row: str, seed: int, r: int, final: Mapping[str, float], told: Mapping[str, Any]
) -> dict[str, Any]:
    """A row of runs.csv; the final scores stand in a run's last one."""
    flat: dict[str, Any] = {"set": name, "row": row, "seed": seed, "round": r}
    flat |= {metric: final.get(metric, "") for metric in METRICS}
    return flat | {key: told.get(key, "") for key in _TOLD}


def read(path: Path) -> list[dict[str, str]]:
    """The rows of runs.csv; none where it is not there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _has(path: Path, name: str, row: str, seed: int) -> bool:
    return any(
        (r["set"], r["row"], r["seed"]) == (name, row, str(seed)) and r["acc"] for r in read(path)
    )


def load(name: str) -> Agents:
    """One of `SETS`, an agent for each view.

    Raises:
      ValueError, OSError: It cannot be loaded.
    """
    return load_agents(SETS[name], 0, SplitOptions(), data_dir=FLAGS.data_dir, split="views")


def n_classes(agents: Agents) -> int:
    """K."""
    return len(np.unique(agents.labels))


# What is reported.


def published(table: int) -> Iterator[dict[str, Any]]:
    """The paper's rows, `{"set", "row", "acc", ...}`; of table 2 MGCD and the best other one."""
    with (PUBLISHED / f"mgcd_table{table}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    if table != 2:
        for row in rows:
            name = "paper: " + _NAMES[row["item"]]
            yield {"set": _ABLATION_SET, "row": name} | _lower(row)
        return
    for name in dict.fromkeys(row["dataset"] for row in rows):
        of_set = [row for row in rows if row["dataset"] == name]
        others = [r for r in of_set if r["metric"] == "ACC" and r["method"] != "MGCD"]
        best = max(others, key=lambda r: float(r["value"]))["method"]
        for method in ("MGCD", best):
            values = {r["metric"]: r["value"] for r in of_set if r["method"] == method}
            yield {"set": name, "row": f"paper: {method}"} | _lower(values)


def _lower(values: Mapping[str, str]) -> dict[str, float]:
    return {m: float(values["PUR" if m == "purity" else m.upper()]) for m in METRICS}


def summarise(
    rows: Sequence[Mapping[str, str]], paper: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """For each set the paper's rows, then the measured ones: mean and deviation over seeds."""
    groups: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        if row["acc"]:
            groups.setdefault((row["set"], row["row"]), []).append(row)
    measured = [
        {"set": name, "row": title, "seeds": len(found)}
        | {m: float(np.mean([float(r[m]) for r in found])) for m in METRICS}
        | {f"{m}_std": float(np.std([float(r[m]) for r in found])) for m in METRICS}
        for (name, title), found in groups.items()
    ]
    sets = dict.fromkeys(row["set"] for row in measured)
    blank = {f"{m}_std": "" for m in METRICS}
    result = []
    for name in sets:
        result += [{"seeds": ""} | dict(row) | blank for row in paper if row["set"] == name]
        result += [row for row in measured if row["set"] == name]
    return result


def lines(table: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table for the terminal."""
    yield f"{'set':12s}{'':38s}{'seeds':>6s}" + "".join(f"{m.upper():>16s}" for m in METRICS)
    for row in table:
        cells = ""
        for m in METRICS:
            spread = "" if row[f"{m}_std"] == "" else f" +- {row[f'{m}_std']:.3f}"
            cells += f"{f'{row[m]:.3f}{spread}':>16s}"
        yield f"{row['set']:12s}{row['row']:38s}{row['seeds']!s:>6s}{cells}"


def draw_table(path: Path, table: Sequence[Mapping[str, Any]], title: str) -> None:
    """Bars of ACC and NMI for each set."""
    panels: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for metric in ("acc", "nmi"):
        of_sets = panels.setdefault(metric.upper(), {})
        for row in table:
            spread = 0.0 if row[f"{metric}_std"] == "" else row[f"{metric}_std"]
            of_sets.setdefault(row["set"], {})[row["row"]] = (row[metric], spread)
    charts.bars(path, panels, "score", title)


# Figures.


def figure_3(folder: Path, seed: int) -> dict[str, float]:
    """t-SNE maps of what clusterings see: raw views, and the spectral embeddings of both modes."""
    agents = load(_ABLATION_SET)
    maps = {"raw views side by side": np.concatenate(agents.views, axis=1)}
    found = {}
    for mode in ("literal", "robust"):
        setting = Setting(mode)
        program = Program(setting.settings(n_classes(agents)), report=False)
        run = program.run(
            agents.federation, agents.labels, seed, setting.most_rounds(), setting.numbers()
        )
        found[mode] = mgcd_runs.scores(agents.labels, run.labels)["acc"]
        maps[f"MGCD, {mode} (ACC {found[mode]:.3f})"] = np.asarray(
            run.state.server.clusters.embedding
        )
    plots.maps(
        folder / "figure3.png",
        maps,
        agents.labels,
        f"t-SNE by true class, {SETS[_ABLATION_SET]} for the paper's Aloi, seed {seed}",
    )
    return found


def figure_4_settings() -> dict[str, Setting]:
    """Both modes; robust runs stay where they ended."""
    return {
        "literal: all": ablation(3)["literal: all"],
        "robust: all": ablation(3)["robust: all"],
        "MGCD, robust, average": TABLE_2["MGCD, robust, average"],
    }


def draw_figure_4(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """ACC and NMI of the consistency graph and of the mean diversity graph by round."""
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    last = max(int(row["round"]) for row in rows)
    for title in figure_4_settings():
        for graph in ("consistency", "diversity", "average"):
            for metric in ("acc", "nmi"):
                runs: dict[str, list[float]] = {}
                for row in rows:
                    if row["row"] == title:
                        runs.setdefault(row["seed"], []).append(float(row[f"{graph}/{metric}"]))
                even = np.asarray([v + [v[-1]] * (last - len(v)) for v in runs.values()])
                panel = panels.setdefault(f"{title}: {metric.upper()}", {})
                panel[f"{graph} graph"] = [
                    (r + 1, float(even[:, r].mean()), float(even[:, r].std())) for r in range(last)
                ]
    charts.lines(path, panels, "round", "score", f"figure 4 on {SETS[_ABLATION_SET]}")


def figure_5_settings() -> dict[str, Setting]:
    """The literal mode with gamma or lambda from 1e-3 to 1e3, the other as printed."""
    rows = {f"gamma={w:g}": {"gamma": w} for w in _WEIGHTS}
    rows |= {f"lambda={w:g}": {"lam": w} for w in _WEIGHTS}
    return {name: Setting("literal", hyperparams=numbers) for name, numbers in rows.items()}


def draw_figure_5(folder: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """NMI against gamma and lambda, and losses and NMI against rounds of the printed ones."""
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for row in summarise(rows):
        name, _, value = row["row"].partition("=")
        if value:
            point = (float(value), row["nmi"], row["nmi_std"])
            panels.setdefault(name, {}).setdefault("NMI, literal", []).append(point)
    title = f"figure 5 on {SETS[_ABLATION_SET]}"
    charts.lines(folder / "figure5_weights.png", panels, "weight", "NMI", title, log_x=True)
    of_run = [row for row in rows if row["row"] == "gamma=100"]
    panels = {}
    for name in ("client_loss", "server_loss", "consistency/acc", "consistency/nmi"):
        points = {}
        for row in of_run:
            points.setdefault(int(row["round"]), []).append(float(row[name]))
        panels[name] = {
            "literal": [(r, float(np.mean(v)), float(np.std(v))) for r, v in sorted(points.items())]
        }
    charts.lines(folder / "figure5_rounds.png", panels, "round", "value", title)
