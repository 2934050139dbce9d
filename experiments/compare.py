"""Runs side by side: `python -m experiments.compare results/a results/b ...`.

Folders are those that `experiments.run` leaves behind. Printed is a table, and written to the
folder --to are comparison.csv, runs.csv with a row of each seed, for statistics of your own, and,
where the extra `report` is installed, comparison.html with the scores by round.
Runs on other data, of other seeds, or on data dealt out otherwise are named below the table.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from absl import app, flags

from experiments.lib import folder, page
from experiments.lib.command import SPLITS, checked
from experiments.lib.settings import flags_of
from experiments.lib.text import digits, spread, table_lines, width_of_terminal, wrapped
from jaxfedmvc import checks
from jaxfedmvc.files import write_text
from jaxfedmvc.metrics.host import METRICS

# Scores, the last of which needs no labels.
_SHOWN = (*METRICS, "information")
# Views of a run in a line for the terminal; comparison.csv has all.
_VIEWS_SHOWN = 3
# Flags that say how many clients there are, which is compared by itself.
_NUMBERS = ("n_clients", "agents")
# Columns of rounds.csv that the page draws.
_OF_ROUNDS = ["seed", "round", "bytes_up", "bytes_down", "all/pooled/acc", "all/per_client/acc"]

FLAGS = flags.FLAGS
flags.DEFINE_string("to", None, "Folder to write to; none: results/compare-<time>/.")


def read(path: Path) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
    """Returns a result folder's line of the table, a row of each of its seeds, and its rounds.

    Raises:
      ValueError: The job is not finished, or its files are damaged.
      OSError: There is no such folder.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such folder")
    if not (path / "summary.json").exists():
        raise ValueError(f"{path}: has no summary.json; the job is not finished")
    if not (path / "rounds.csv").exists():
        raise ValueError(f"{path}: has no rounds.csv; allowed are folders of experiments.run")
    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        rounds = pd.read_csv(path / "rounds.csv")
        rounds[_OF_ROUNDS]  # all are there
        data = path / "data.json"  # older runs have none
        hashes = json.loads(data.read_text(encoding="utf-8")) if data.exists() else {}
        line = line_of(summary) | {"content": " ".join(x[:10] for x in hashes.values())}
        given = path / "flags.txt"
        lines = given.read_text(encoding="utf-8").splitlines() if given.exists() else []
        line["dealt"] = dealt(lines)
        return line, runs_of(summary), rounds
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no folder of a run ({error!r})") from error


def line_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the table shows of a run; deviations are those of samples (ddof = 1).

    Megabytes are a run's and, where settings were chosen without labels, those of the choice; its
    seconds, which are mostly compilation, have a column of their own.
    """
    line: dict[str, Any] = {"method": summary["algorithm"], "data": summary["dataset"]}
    line["samples"] = summary.get("n_samples", np.nan)  # older runs do not say
    # "view NAME: 5 features", and no other note on a view.
    views = (note for note in summary["data"] if re.match(r"view .*: \d", note))
    line["views"] = "; ".join(views)
    for metric in _SHOWN:
        values = _per_seed(summary, metric)
        line[metric] = float(np.mean(values)) if values else np.nan
        line[f"{metric}_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else np.nan
    # Clients that exchange nothing number their clusters as they like: only this is fair to them.
    own = summary["groups"].get(summary["algorithm"], {}).get("all", {}).get("per_client", {})
    line["acc_each_matched"] = own.get("acc", {}).get("mean", np.nan)
    made = float(np.mean(summary["rounds_made"]))
    for way in ("up", "down"):
        fixed = summary["bytes_setup"][way] + summary["bytes_finish"][way]
        fixed += summary.get("bytes_choice", {}).get(way, 0)
        line[f"mb_{way}"] = (fixed + np.mean(summary["bytes_rounds"][way])) / 1e6
    seconds = summary["seconds"]
    return line | {
        "clients": summary["n_clients"],
        "clusters": summary.get("n_clusters"),
        "seeds": len(summary["seeds"]),
        "first_seed": summary["seeds"][0],
        "failed": len(summary.get("failed", ())),  # older runs do not say
        "rounds": made,
        "compile_seconds": seconds["compile"],
        "seconds_a_run": seconds["run"] / len(summary["seeds"]),
        "seconds_choice": summary.get("seconds_choice", 0.0),
        "device": summary["device"],
        "command": shlex.join(summary.get("command", ())),
        "commit": summary.get("commit", ""),
    }


def _per_seed(summary: Mapping[str, Any], metric: str) -> list[float]:
    """Returns a score of each seed; none where there is none, as in older runs."""
    scores = summary["metrics"]
    if metric not in METRICS:  # needs no labels
        scores = summary["groups"].get(summary["algorithm"], {}).get("internal", {})
    return list(scores.get(metric, {}).get("per_seed", []))


def dealt(lines: Sequence[str]) -> str:
    """Returns the flags of a flags.txt that say which client holds what, and which take part."""
    values, found = folder.by_name(lines), []
    for split in dict.fromkeys(SPLITS.values()):
        names = [name for name in flags_of(split) if name not in _NUMBERS]
        if any(name in values for name in names):
            found += [f"{name}={values.get(name, 'none')}" for name in names]
    found += [f"{n}={values[n]}" for n in ("participation", "resample_participants") if n in values]
    return "; ".join(found)


def runs_of(summary: Mapping[str, Any]) -> pd.DataFrame:
    """Returns a row of each seed; its seconds are the job's over the number of seeds."""
    line = line_of(summary)
    rows = pd.DataFrame(
        {name: line[name] for name in ("method", "data")} | {"seed": summary["seeds"]}
    )
    for metric in _SHOWN:
        rows[metric] = _per_seed(summary, metric) or np.nan
    for way in ("up", "down"):
        # What is sent beside the rounds is the same for all seeds.
        rounds = np.asarray(summary["bytes_rounds"][way])
        rows[f"mb_{way}"] = line[f"mb_{way}"] + (rounds - rounds.mean()) / 1e6
    rows["rounds"] = summary["rounds_made"]
    kept = ("clients", "compile_seconds", "seconds_choice", "command", "commit", "device")
    rows = rows.assign(seconds=line["seconds_a_run"], **{name: line[name] for name in kept})
    return rows.assign(jax=summary.get("versions", {}).get("jax"))


def shared(lines: pd.DataFrame) -> dict[str, Any]:
    """Returns the data and the numbers of clients and seeds, where all of several runs have one."""
    names = [n for n in ("data", "clients", "seeds") if len(lines) > 1 and lines[n].nunique() == 1]
    return {name: lines[name].iloc[0] for name in names}


def table(lines: pd.DataFrame) -> pd.DataFrame:
    """Returns the table for the terminal and the page, without what is `shared`."""
    shown = lines[["method", "data", "clients", "seeds"]].drop(columns=list(shared(lines)))
    for metric in _SHOWN:
        shown[metric.upper() if metric in METRICS else metric] = [
            spread(mean, std)
            for mean, std in zip(lines[metric], lines[f"{metric}_std"], strict=True)
        ]
    shown["ACC, each client matched"] = [spread(x, np.nan) for x in lines["acc_each_matched"]]
    for name, title in (("mb_up", "MB up"), ("mb_down", "MB down"), ("seconds_a_run", "s a run")):
        shown[title] = [digits(x) for x in lines[name]]
    return shown


def warnings(lines: pd.DataFrame) -> list[str]:
    """Returns what makes runs hard to compare."""
    found = []
    for column, text in (
        ("data", "the data differ"),
        ("samples", "the numbers of samples differ"),
        ("views", "the views differ"),
        ("clients", "the numbers of clients differ"),
        ("clusters", "the numbers of clusters differ"),
        ("seeds", "the numbers of seeds differ"),
        ("first_seed", "the seeds differ, and so who holds what; the first are"),
        ("dealt", "clients hold their samples otherwise"),
        ("device", "devices differ: seconds are not comparable"),
    ):
        if lines[column].nunique() > 1:
            values = [str(value) for value in lines[column].unique()]
            of_parts = column in ("views", "dealt")
            shown = _unshared(values) if of_parts else values
            found.append(f"{text}: {(' | ' if of_parts else ', ').join(shown)}")
    for name, line in lines[lines["failed"] > 0].iterrows():
        n = f"{line['failed']} of {line['seeds']}"
        found.append(f"{name}: {n} seeds failed, and scores that lack one have no mean")
    # Of one name, and yet another file, or scaled otherwise.
    for name, contents in lines.groupby("data")["content"]:
        if contents.nunique() > 1:
            found.append(f"the contents of {name} differ: {', '.join(contents.unique())}")
    return found


def _unshared(values: Sequence[str]) -> list[str]:
    """Returns the first parts of each that not all have, as there may be many of them."""
    views = [value.split("; ") for value in values]
    shared = set(views[0]).intersection(*views[1:])
    own = [[view for view in mine if view not in shared] for mine in views]
    return [
        ("; ".join(mine[:_VIEWS_SHOWN]) or "no others")
        + (f"; ... ({len(mine)})" if len(mine) > _VIEWS_SHOWN else "")
        for mine in own
    ]


def _write_page(
    path: Path, lines: pd.DataFrame, rounds: Mapping[str, pd.DataFrame], notes: Sequence[str]
) -> None:
    """Writes the page: the table, bars, and ACC against what had been sent."""
    known = lines["acc"].dropna()
    figures = [page.bars("ACC", dict(known), "ACC, mean over the seeds")] if len(known) else []
    traces: list[dict[str, Any]] = []
    shown = []
    for k, (name, frame) in enumerate(rounds.items()):
        way = "all/pooled/acc" if frame["all/pooled/acc"].notna().all() else "all/per_client/acc"
        frame = frame.assign(mb=(frame["bytes_up"] + frame["bytes_down"]) / 1e6)
        frame["sent"] = frame.groupby("seed")["mb"].cumsum()
        # A seed that found its end earlier than others stays there.
        sent, score = (
            frame.pivot(index="round", columns="seed", values=column).ffill().mean(axis=1)
            for column in ("sent", way)
        )
        if score.notna().all() and (sent > 0).any():  # a logarithm knows no 0
            trace = {"mode": "lines+markers", "name": page.plain(name), "marker": page.mark(k)}
            traces.append(trace | {"x": sent.to_numpy(), "y": score.to_numpy()})
            shown.append(name)
    title = {"text": "MB of the rounds, all clients, both ways"}
    layout = {
        "xaxis": {"title": title, "type": "log", "dtick": "D2"},
        "yaxis": {"title": {"text": "ACC, mean over the seeds"}},
        "showlegend": True,
    }
    left = [name for name in rounds if name not in shown]
    note = f"without scores by round, or nothing is sent: {', '.join(left)}" if left else ""
    if traces:
        figures.append(page.Figure("ACC against what had been sent", traces, layout, note=note))
    facts = {"runs": len(lines)} | shared(lines) | ({"notes": "\n".join(notes)} if notes else {})
    page.write(
        path,
        "Runs side by side",
        facts,
        "",
        {"Runs; comparison.csv has all": table(lines)},
        figures,
    )


def main(arguments: list[str]) -> None:
    """Reads the folders, prints and writes."""

    def run() -> list[str]:
        paths = [Path(argument) for argument in arguments[1:]]
        if not paths:
            raise checks.wrong("arguments", arguments[1:], "one or more result folders")
        if len(set(paths)) < len(paths):
            raise checks.wrong("arguments", arguments[1:], "each folder once")
        names = [path.name for path in paths]
        if len(set(names)) < len(names):
            names = [str(path) for path in paths]
        read_all = {name: read(path) for name, path in zip(names, paths, strict=True)}
        lines = pd.DataFrame({name: line for name, (line, *_) in read_all.items()}).T
        lines = lines.infer_objects()
        target = folder.unused("compare") if FLAGS.to is None else Path(FLAGS.to)
        if (target / "comparison.csv").exists():
            raise ValueError(f"to: {str(target)!r} holds a comparison already; give another")
        try:
            target.mkdir(parents=True, exist_ok=True)
            write_text(target / "comparison.csv", lines.to_csv(index_label="folder"))
            runs = pd.concat([runs.assign(folder=name) for name, (_, runs, _) in read_all.items()])
            write_text(target / "runs.csv", runs.set_index("folder").to_csv())
        except OSError as error:
            raise OSError(
                f"to: cannot write to {str(target)!r} ({error.strerror}); give a folder that can"
                " be written"
            ) from error
        notes, files = warnings(lines), ["comparison.csv", "runs.csv"]
        if page.is_installed():
            rounds = {name: frame for name, (*_, frame) in read_all.items()}
            _write_page(target / "comparison.html", lines, rounds, notes)
            files.append("comparison.html")
        width = width_of_terminal()
        of_all = [f"{name} of all runs: {value}" for name, value in shared(lines).items()]
        return [
            *table_lines(table(lines), width),
            *of_all,
            *(line for note in notes for line in wrapped(note, width)),
            f"written: {target}/ ({', '.join(files)})",
        ]

    print("\n".join(checked(run)))


if __name__ == "__main__":
    app.run(main, argv=sys.argv)
