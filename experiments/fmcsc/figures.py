"""FMCSC's figures 3 and 6 and table 5: what is read from a run itself and not from its scores."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import base, charts, fmcsc_rows, grid, sweep_report
from experiments import fmcsc_tables as tables
from experiments.ledger import csv_text
from experiments.lib import plots
from experiments.progress import ProgressBar
from experiments.sweep_runs import Group, Program, told
from jaxfedmvc import engine
from jaxfedmvc.federation import Federation


def federation_of(group: Group, place: int) -> Federation:
    """The federation of a group's seed, by the seed's place."""
    one = jax.tree.map(lambda x: jnp.asarray(x[place]), group.source.by_seed)
    return group.source.build(jax.tree.map(jnp.asarray, group.source.shared), one)


def _program(group: Group) -> Callable[[Federation, jax.Array], Any]:
    """`(federation, key) -> (info, embeddings, models)` of the group's first setting, compiled."""
    algorithm = group.make(group.hyperparams[0])

    def run(federation: Federation, key: jax.Array) -> Any:
        result = engine.run(
            algorithm,
            federation,
            key,
            group.rounds,
            participation=group.participation,
            client_chunk=group.client_chunk,
        )
        found = engine.embed(algorithm, federation, result.state, client_chunk=group.client_chunk)
        return result.info, found, result.state.server.models

    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.jit(run).lower(federation_of(group, 0), key).compile()


def figure_3(groups: Sequence[Group], folder: Path) -> dict[str, Any]:
    """t-SNE maps of H of the first client with all views, with and without component A."""
    for dataset in dict.fromkeys(group.columns[0]["set"] for group in groups):
        maps, truth = {}, None
        mine = [group for group in groups if group.columns[0]["set"] == dataset]
        with ProgressBar(len(mine)) as bar:
            for group in mine:
                federation = federation_of(group, 0)
                _, found, _ = _program(group)(federation, jax.random.key(group.seeds[0]))
                c = next(
                    i for i, x in enumerate(federation.cohorts) if federation.holds_all_views(x)
                )
                real = np.asarray(federation.cohorts[c].mask[0])
                maps[fmcsc_rows.ABLATIONS[group.columns[0]["x"]]] = np.asarray(found[c][0])[real]
                assert federation.labels is not None
                truth = np.asarray(federation.labels[c][0])[real]
                bar.advance(1)
        assert truth is not None
        title = f"H of one client with all views, by true class; {dataset}, seed {group.seeds[0]}"
        plots.maps(folder / f"figure3_{dataset}.png", maps, truth, title)
    return {}


def figure_6(groups: Sequence[Group], folder: Path) -> dict[str, Any]:
    """Reconstruction, contrast and total loss of both kinds of clients, by round."""
    rows: list[dict[str, Any]] = []
    with ProgressBar(sum(len(group.seeds) for group in groups)) as bar:
        for group in groups:
            program = _program(group)
            for place, seed in enumerate(group.seeds):
                federation = federation_of(group, place)
                info, _, _ = program(federation, jax.random.key(seed))
                rows += _losses(group, federation, info, seed)
                bar.advance(1)
    base.write(folder / "losses.csv", csv_text(rows))
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for dataset, kind in dict.fromkeys((row["set"], row["kind"]) for row in rows):
        series = panels.setdefault(f"{fmcsc_rows.SETS.get(dataset, dataset)}: {kind} clients", {})
        mine = [row for row in rows if (row["set"], row["kind"]) == (dataset, kind)]
        for preset in dict.fromkeys(row["row"] for row in mine):
            for name in ("total", "reconstruction", "contrast"):
                series[f"{preset}: {name}"] = [
                    (r, float(np.mean(values)), float(np.std(values)))
                    for r in sorted({row["round"] for row in mine})
                    for values in [[x[name] for x in mine if (x["round"], x["row"]) == (r, preset)]]
                ]
    title = "losses after local training"
    charts.lines(folder / "figure6.png", panels, "round", "loss", title, log_y=True)
    return {"rows": rows}


def _losses(
    group: Group, federation: Federation, info: dict[str, Any], seed: int
) -> list[dict[str, Any]]:
    """A row for each round and kind of clients."""
    rows = []
    reports = told(jax.device_get(info["rounds"]))
    for kind, is_full in (("multi-view", True), ("single-view", False)):
        mine = [
            report
            for report, cohort in zip(reports, federation.cohorts, strict=True)
            if federation.holds_all_views(cohort) == is_full and "loss" in report
        ]
        if not mine:
            continue
        parts = {
            name: np.concatenate([r[name] for r in mine], axis=1).mean(axis=1)
            for name in ("reconstruction", "contrast")
        }
        for r in range(group.rounds):
            rows.append(
                {key: group.columns[0][key] for key in ("set", "row")}
                | {"kind": kind, "seed": seed, "round": r + 1}
                | {"total": float(sum(part[r] for part in parts.values()))}
                | {name: float(part[r]) for name, part in parts.items()}
            )
    return rows


def table_5(groups: Sequence[Group], folder: Path) -> dict[str, Any]:
    """Parameters of both kinds of models, work, bytes, and seconds with compilation apart."""
    paper = {row["dataset"]: row for row in tables.read(tables.PUBLISHED / "fmcsc_table5.csv")}
    rows = []
    with ProgressBar(len(groups)) as bar:
        for group in groups:
            began = time.perf_counter()
            program = _program(group)
            compiled = time.perf_counter()
            out = program(federation_of(group, 0), jax.random.key(group.seeds[0]))
            models = jax.block_until_ready(out)[2]
            ended = time.perf_counter()
            sizes = {k: sum(x.size for x in jax.tree.leaves(m)) for k, m in models.items()}
            full = max(sizes, key=len)
            partial = [n for kind, n in sizes.items() if kind != full]
            cost = Program(group)
            traffic = cost.traffic(group.rounds)
            dataset = group.columns[0]["set"]
            published = paper.get(fmcsc_rows.SETS.get(dataset, ""), {})
            rows.append(
                {
                    "set": dataset,
                    "row": group.columns[0]["row"],
                    "parameters_single": f"{min(partial)} to {max(partial)}",
                    "parameters_multi": sizes[full],
                    "paper_parameters": " to ".join(
                        published.get(f"parameters_per_client_{k}", "-")
                        for k in ("single", "multi")
                    ),
                    "gflop": round(cost.predicted().run_flops / 1e9),
                    "megabytes": round(sum(traffic.values()) / 1e6, 3),
                    "compile_seconds": round(compiled - began, 1),
                    "run_seconds": round(ended - compiled, 1),
                    "paper_seconds_rtx3090": published.get("runtime_seconds_rtx3090", "-"),
                    "device": f"{jax.devices()[0].device_kind} ({jax.default_backend()})",
                }
            )
            bar.advance(1)
            jax.clear_caches()
    base.write(folder / "table.csv", csv_text(rows))
    print()
    for name in rows[0]:
        print(f"{name:24s}" + "".join(f"{row[name]!s:>26s}" for row in rows))
    return {"rows": rows}


def draw_ablation(path: Path, table: Sequence[tables.Entry], title: str) -> None:
    """Table 2: ACC of every row of `tables.table_2`, a panel for each set."""
    panels: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    for e in table:
        panel = panels.setdefault(f"{fmcsc_rows.SETS.get(e.set, e.set)}, ACC", {})
        name = e.name.partition(":")[0]
        mean, std = e.scores["acc"]
        left_out = textwrap.fill(fmcsc_rows.ABLATIONS[e.x], 18)
        panel.setdefault(left_out, {})[name] = (mean, float(np.nan_to_num(std)))
    charts.bars(path, panels, "ACC", title)


def draw_temperatures(folder: Path, runs: Sequence[dict[str, str]]) -> None:
    """Figure 2: a heat map of ACC over both temperatures, for each set and preset."""
    for dataset, name in dict.fromkeys((run["set"], run["row"]) for run in runs):
        mine = [
            run | dict(zip(("tau_m", "tau_p"), run["x"].split(), strict=True))
            for run in runs
            if (run["set"], run["row"]) == (dataset, name)
        ]
        values = {t: ",".join(dict.fromkeys(run[t] for run in mine)) for t in ("tau_m", "tau_p")}
        axes = grid.parse("; ".join(f"{t}={texts}" for t, texts in values.items()))
        summary = sweep_report.summarise(mine, list(values), ["acc"])
        for path in sweep_report.draw(folder, summary, axes, "acc"):
            path.rename(folder / f"figure2_{dataset}_{name}.png")


MAKERS: dict[str, Callable[[Sequence[Group], Path], dict[str, Any]]] = {
    "figure3": figure_3,
    "figure6": figure_6,
    "table5": table_5,
}
