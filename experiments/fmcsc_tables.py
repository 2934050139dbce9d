"""FMCSC's tables and figures as rows of settings, and what is read from their runs.

A row is a federation (set, ratio, ...) and a setting, given by flags of `experiments.fmcsc` as
text; `sweep_setup` makes groups of runs of them, so that all seeds of a row, and all rows that
differ in traced numbers alone, share a program. Nothing here runs anything.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import base, charts
from experiments.sweep_runs import ROUNDS

PUBLISHED = Path(__file__).parent / "published"
PRESETS = Path(__file__).parent / "presets"
METRICS = ("acc", "nmi", "ari")

# The paper's sets by the names of `data.load`. Multi-Fashion is another draw of its construction.
SETS = {
    "mnist_usps": "MNIST-USPS",
    "bdgp": "BDGP",
    "multi_fashion": "Multi-Fashion",
    "nuswide": "NUSWIDE",
}
RATIOS = ("2:1", "1:1", "1:2")
# Leave out a component, as table 2 does, and what that is.
ABLATIONS = {
    "BCD": "without A, consensus pre-training",
    "ACD": "without B, partial models optimised",
    "ABD": "without C, model contrast",
    "ABC": "without D, weights",
    "ABCD": "all",
    "ABD, idle": "all, partial clients idle in rounds",
    "ABD, branches": "idle too, partial models are branches",
}
_PROTOCOLS = {
    "": {"partial_rounds": "true", "partial_models": "distilled"},
    "idle": {"partial_rounds": "false", "partial_models": "distilled"},
    "branches": {"partial_rounds": "false", "partial_models": "branch"},
}
TEMPERATURES = ("0.1", "0.3", "0.5", "0.7", "1")
EPSILONS = (10, 50, 100, 500)
LOCAL = "local FMCSC"
ALONE = "k-means, each client alone"
POOLED = "k-means, raw views pooled"
REFERENCES = {"local": LOCAL, "alone": ALONE, "pooled": POOLED}

# Between these lines of the README stands table 1.
_MARKS = ("<!-- results: begin -->", "<!-- results: end -->")


class Row(NamedTuple):
    """A row of a table or a point of a figure.

    Attributes:
      set: As `data.load` takes it.
      x: What varies besides the method: the ratio, a share, a number of clients.
      name: Of the method or preset.
      flags: Of `experiments.fmcsc`, as text.
      algorithm: "fmcsc", or the reference `LOCAL` or `ALONE`.
    """

    set: str
    x: str
    name: str
    flags: dict[str, str]
    algorithm: str = "fmcsc"

    @property
    def columns(self) -> dict[str, str]:
        """What names the row's runs in runs.csv."""
        return {"set": self.set, "x": self.x, "row": self.name}


# --- Presets --------------------------------------------------------------------------------------


def flags_of(path: Path) -> dict[str, str]:
    """The flags of a flagfile, without comments."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    pairs = [line.removeprefix("--").split("=", 1) for line in lines if line.startswith("--")]
    return {name: value for name, value in pairs}


def preset(name: str, dataset: str, quick: bool) -> dict[str, str]:
    """Flags of a preset on a set.

    Args:
      name: "paper" or "best".
      dataset: One of `SETS`, or "digits" for what `quick` runs.
      quick: Narrow networks and few epochs, the same protocol.

    Raises:
      ValueError: An unknown preset or set.
    """
    if name not in ("paper", "best"):
        raise ValueError(f"presets: got {name!r}; allowed are paper, best")
    own = PRESETS / f"fmcsc_{dataset}.flags"
    if dataset not in (*SETS, "digits"):
        raise ValueError(f"datasets: got {dataset!r}; allowed are {', '.join(SETS)}, digits")
    flags = flags_of(own)
    if name == "best":
        flags |= flags_of(PRESETS / "fmcsc_best.flags")
        # Epochs of a round, which the paper sets per set, too.
        if (of_set := PRESETS / f"fmcsc_best_{dataset}.flags").exists():
            flags |= flags_of(of_set)
    return flags | (flags_of(PRESETS / "fmcsc_quick.flags") if quick else {})


# --- Rows -----------------------------------------------------------------------------------------


class Wish(NamedTuple):
    """What was asked for.

    Attributes:
      what: "table1", "figure4a" and so on.
      sets: Of `SETS`.
      ratios: Of table 1.
      presets: "paper", "best".
      references: Of table 1, some of `REFERENCES`.
      quick: See `preset`.
      flags: Flags given on the command line, which go before any preset.
    """

    what: str
    sets: Sequence[str]
    ratios: Sequence[str]
    presets: Sequence[str]
    references: Sequence[str]
    quick: bool
    flags: Mapping[str, str]

    def row(self, dataset: str, x: str, name: str, **flags: Any) -> Row:
        """A row of one of the presets, with these flags changed.

        Raises:
          ValueError: The command line gives one of them, too; but for the number of rounds, which
            a table may be read after.
        """
        told = {key: str(value) for key, value in flags.items()}
        if twice := sorted((told.keys() & self.flags.keys()) - {"rounds"}):
            raise ValueError(f"{twice[0]}: {self.what} gives it values of its own; leave it out")
        kept = preset(name, dataset, self.quick) | told | dict(self.flags)
        return Row(dataset, x, name, kept)


def rows(wish: Wish) -> list[Row]:
    """The rows of what was asked for, of all that is made of runs.

    Raises:
      ValueError: An unknown set or preset, or nothing is left to run.
    """
    makers = {
        "table1": _table_1, "table2": _table_2, "table3": _table_3, "figure2": _figure_2,
        "figure4a": _figure_4a, "figure4b": _figure_4b, "figure4c": _figure_4c,
        "figure7": _figure_7, "figurebytes": _figure_bytes, "figure3": _figure_3,
        "figure6": _presets, "table5": _presets,
    }  # fmt: skip
    if not wish.presets and wish.what != "table1":
        raise ValueError("presets: got none; allowed are paper, best")
    if not (found := list(makers[wish.what](wish))):
        raise ValueError("presets: got none, and no ratios or no local or alone among references")
    return found


# Rounds of `best` in table 1: it is read after the paper's 5, and after these.
_MORE_ROUNDS = 10


def _table_1(wish: Wish) -> Iterator[Row]:
    for dataset in wish.sets:
        for ratio in wish.ratios:
            for name in wish.presets:
                more = {"rounds": _MORE_ROUNDS} if name == "best" and not wish.quick else {}
                yield wish.row(dataset, ratio, name, ratio=ratio, **more)
            local = wish.row(dataset, ratio, (wish.presets or ["best"])[-1], ratio=ratio)
            for name in (LOCAL, ALONE):
                if name in wish.references:
                    yield local._replace(name=name, algorithm=name, flags=dict(local.flags))


def _table_2(wish: Wish) -> Iterator[Row]:
    """C is what partial clients do in the rounds: without them it can neither help nor harm."""
    for dataset in wish.sets:
        for name in wish.presets:
            for item in ABLATIONS:
                letters, _, protocol = item.partition(", ")
                yield wish.row(dataset, item, name, components=letters, **_PROTOCOLS[protocol])


def _table_3(wish: Wish) -> Iterator[Row]:
    for dataset in wish.sets:
        for name in wish.presets:
            for share in ("0.5", "0.7", "0.9"):
                yield wish.row(dataset, share, name, participation=share)


def _figure_2(wish: Wish) -> Iterator[Row]:
    """tau_p is partial clients': it is left as it is where they stay out of the rounds."""
    values = TEMPERATURES[::2] if wish.quick else TEMPERATURES
    for dataset in wish.sets:
        for name in wish.presets:
            flags = wish.row(dataset, "", name).flags
            idle = flags.get("partial_rounds") == "false"
            for tau_m in values:
                for tau_p in (flags.get("tau_p", "0.5"),) if idle else values:
                    yield wish.row(dataset, f"{tau_m} {tau_p}", name, tau_m=tau_m, tau_p=tau_p)


def _varied(wish: Wish, flag: str, values: Sequence[Any]) -> Iterator[Row]:
    for dataset in wish.sets:
        for name in wish.presets:
            for value in values:
                yield wish.row(dataset, str(value), name, **{flag: value})


def _figure_4a(wish: Wish) -> Iterator[Row]:
    values = (40, 80, 150) if wish.quick else (50, 100, 150, 200)
    return _varied(wish, "samples_per_client", values)


def _figure_4b(wish: Wish) -> Iterator[Row]:
    return _varied(wish, "n_clients", (6, 12, 24) if wish.quick else (12, 24, 48, 100))


def _figure_7(wish: Wish) -> Iterator[Row]:
    return _varied(wish, "dirichlet", (5, 50, 500))


def _figure_3(wish: Wish) -> Iterator[Row]:
    for dataset in wish.sets:
        for letters in ("BCD", "ABCD"):
            yield wish.row(dataset, letters, wish.presets[-1], components=letters)


def _presets(wish: Wish) -> Iterator[Row]:
    for dataset in wish.sets:
        for name in wish.presets:
            yield wish.row(dataset, "1:1", name)


def _figure_bytes(wish: Wish) -> Iterator[Row]:
    for dataset in wish.sets:
        for name in wish.presets:
            yield wish.row(dataset, "1:1", name, rounds=10 if wish.quick else 50)


# L1 norm that a client's update is scaled down to where epsilon is to mean something.
_CLIP = 10.0


def _figure_4c(wish: Wish) -> Iterator[Row]:
    """Laplace noise of scale 1 / epsilon, and noise that keeps what epsilon promises.

    The first is how the paper's figure can be read: it names neither a bound of the update nor the
    sum over rounds, and without these no epsilon follows from the noise. In the second, replacing
    a whole client changes an upload by 2 `_CLIP` in L1 at most, and epsilon is that of all uploads.
    """
    epsilons = EPSILONS[:2] if wish.quick else EPSILONS
    for dataset in wish.sets:
        for name in wish.presets:
            plain = wish.row(dataset, "inf", name, ratio="2:1")
            yield plain
            # Two of pre-training and a leader's, at most, and the exchanges of every round;
            # centroids are not counted.
            branched = plain.flags.get("partial_models") == "branch"
            exchanges = 2 if plain.flags.get("target") == "global" and not branched else 1
            leads = int(plain.flags.get("leader_epochs", 0)) > 0
            uploads = 2 + leads + exchanges * int(plain.flags["rounds"])
            for epsilon in epsilons:
                noise = {"upload_noise": f"{1 / epsilon:.9g}"}
                yield plain._replace(x=str(epsilon), flags=plain.flags | noise)
            for epsilon in epsilons:
                scale = 2 * _CLIP * uploads / epsilon
                noise = {"upload_noise": f"{scale:.9g}", "upload_clip": str(_CLIP)}
                yield plain._replace(
                    x=str(epsilon), name=f"{name}, clipped", flags=plain.flags | noise
                )


# --- What is read from runs.csv -------------------------------------------------------------------


def value(
    row: Mapping[str, str], metric: str, group: str = "all", after: int | None = None
) -> float:
    """A score of a run, after the last round or after round `after`; NaN where there is none."""
    name = f"{group}/pooled/{metric}"
    if after is None:
        return float(row[name])
    numbers = row[ROUNDS + name].split()
    return float(numbers[after - 1]) if after <= len(numbers) else float("nan")


class Entry(NamedTuple):
    """A line of a table: a mean and a deviation over seeds for each metric."""

    set: str
    x: str
    name: str
    seeds: int
    scores: dict[str, tuple[float, float]]
    bytes: float = float("nan")

    def flat(self) -> dict[str, Any]:
        """As a row of table.csv."""
        flat: dict[str, Any] = {
            "set": self.set, "x": self.x, "row": self.name, "seeds": self.seeds or "",
            "megabytes": "" if np.isnan(self.bytes) else round(self.bytes / 1e6, 1),
        }  # fmt: skip
        for metric, (mean, std) in self.scores.items():
            flat |= {metric: mean, f"{metric}_std": "" if np.isnan(std) else std}
        return flat

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Entry:
        """From a row of table.csv."""
        nan = float("nan")
        scores = {m: (float(row[m]), float(row[f"{m}_std"] or nan)) for m in METRICS}
        size = float(row["megabytes"] or nan) * 1e6
        return cls(row["set"], row["x"], row["row"], int(row["seeds"] or 0), scores, size)


def _of(runs: Sequence[Mapping[str, str]]) -> dict[tuple[str, str, str], list]:
    """Runs by row; those that failed are left out."""
    found: dict[tuple[str, str, str], list] = {}
    for run in runs:
        if run["status"] == "ok":
            found.setdefault((run["set"], run["x"], run["row"]), []).append(run)
    return found


def entry(
    key: tuple[str, str, str],
    runs: Sequence[Mapping[str, str]],
    group: str = "all",
    after: int | None = None,
    way: str = "pooled",
) -> Entry:
    """Mean and population deviation over the seeds of a row."""
    scores = {}
    for metric in METRICS:
        if way == "pooled":
            values = [value(run, metric, group, after) for run in runs]
        else:
            values = [float(run[f"{group}/{way}/{metric}"]) for run in runs]
        # One seed has no spread.
        std = float(np.std(values)) if len(values) > 1 else float("nan")
        scores[metric] = (float(np.mean(values)), std)
    traffic = [
        float(run[f"{ROUNDS}bytes"].split()[after - 1])
        if after
        else float(run["bytes_up"]) + float(run["bytes_down"])
        for run in runs
    ]
    return Entry(*key, len(runs), scores, float(np.mean(traffic)))


def published_1() -> dict[tuple[str, str, str], dict[str, tuple[float, float]]]:
    """Table 1 of the paper, `{(set, ratio, method): {metric: (mean, std)}}`, as fractions."""
    names = {title: name for name, title in SETS.items()}
    found: dict[tuple[str, str, str], dict[str, tuple[float, float]]] = {}
    for row in read(PUBLISHED / "fmcsc_table1.csv"):
        key = (names[row["dataset"]], row["ratio_multi_single"], row["method"])
        pair = (float(row["mean_percent"]) / 100, float(row["std_percent"]) / 100)
        found.setdefault(key, {})[row["metric"].lower()] = pair
    return found


def table_1(runs: Sequence[Mapping[str, str]], references: Sequence[Entry]) -> list[Entry]:
    """For each set and ratio the paper's row and the best other of it, then what was measured."""
    paper = published_1()
    measured = _of(runs)
    result = []
    for dataset, ratio in dict.fromkeys((s, x) for s, x, _ in measured):
        of_cell = {m: v for (s, x, m), v in paper.items() if (s, x) == (dataset, ratio)}
        if of_cell:
            others = [m for m in of_cell if m != "FMCSC"]
            best = max(others, key=lambda m: of_cell[m]["acc"][0])
            for method in ("FMCSC", best):
                result.append(Entry(dataset, ratio, f"paper: {method}", 0, of_cell[method]))
        for (s, x, name), of_row in measured.items():
            if (s, x) != (dataset, ratio):
                continue
            last = min(int(run["rounds_made"]) for run in of_row)
            if name in (LOCAL, ALONE):
                result.append(entry((s, x, name), of_row))
                matched = (s, x, f"{name}, each matched by itself")
                result.append(entry(matched, of_row, way="per_client"))
                continue
            for after in sorted({min(5, last), last}):
                title = f"{name}, R = {after}"
                result.append(entry((s, x, title), of_row, after=after))
                for group, label in (("multi_view", "multi-view"), ("partial_view", "single-view")):
                    key = (s, x, f"{title}: {label} clients")
                    result.append(entry(key, of_row, group, after))
        result += [e for e in references if (e.set, e.x) == (dataset, ratio)]
    return result


def table_2(runs: Sequence[Mapping[str, str]]) -> list[Entry]:
    """The ablation, the paper's item beside ours."""
    names = {title: name for name, title in SETS.items()}
    paper: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for row in read(PUBLISHED / "fmcsc_table2.csv"):
        pair = (float(row["value_percent"]) / 100, float("nan"))
        key = (names[row["dataset"]], row["components_kept"])
        paper.setdefault(key, {})[row["metric"].lower()] = pair
    result = []
    for (dataset, letters, name), of_row in _of(runs).items():
        if (dataset, letters) in paper:
            scores = paper.pop((dataset, letters))
            result.append(Entry(dataset, letters, f"paper: {ABLATIONS[letters]}", 0, scores))
        result.append(entry((dataset, letters, f"{name}: {ABLATIONS[letters]}"), of_row))
    return sorted(
        result, key=lambda e: (e.set, not e.name.startswith("paper"), e.name.split(":")[0])
    )


def table_3(runs: Sequence[Mapping[str, str]]) -> list[Entry]:
    """Participation: clients that took part and clients that did not, the paper's beside ours.

    A share is that of multi-view and of single-view clients, rounded: the two groups can differ a
    little in how many of their clients hold all views.
    """
    names = {title: name for name, title in SETS.items()}
    paper = {
        (names[row["dataset"]], row["participation_rate"], row["client_type"]): float(
            row["ACC_percent"]
        )
        / 100
        for row in read(PUBLISHED / "fmcsc_table3.csv")
    }
    nan = float("nan")
    result = []
    for (dataset, share, name), of_row in _of(runs).items():
        for kind in ("participating", "non-participating"):
            number = paper.pop((dataset, share, kind), None)
            if number is not None:
                scores = {"acc": (number, nan), "nmi": (nan, nan), "ari": (nan, nan)}
                result.append(Entry(dataset, share, f"paper: {kind}", 0, scores))
            group = kind.replace("-", "_")
            result.append(entry((dataset, share, f"{name}: {kind}"), of_row, group))
    return result


def plain(runs: Sequence[Mapping[str, str]]) -> list[Entry]:
    """All rows after their last round, multi-view and single-view clients apart too."""
    result = []
    for (dataset, x, name), of_row in _of(runs).items():
        result.append(entry((dataset, x, name), of_row))
        for group, label in (("multi_view", "multi-view"), ("partial_view", "single-view")):
            result.append(entry((dataset, x, f"{name}: {label} clients"), of_row, group))
    return result


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a .csv."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def of_one_colour(table: Sequence[Entry]) -> list[Entry]:
    """Of table 1: the best other method is another one in every cell; a picture needs one name."""

    def name(e: Entry) -> str:
        is_other = e.name.startswith("paper: ") and e.name != "paper: FMCSC"
        return "paper: best other method" if is_other else e.name

    return [e._replace(name=name(e)) for e in table]


def short(table: Sequence[Entry]) -> list[Entry]:
    """Of table 1, without the rows of one kind of clients."""
    return [e for e in table if not e.name.endswith(" clients")]


# --- What is shown --------------------------------------------------------------------------------


def _cell(score: tuple[float, float]) -> str:
    mean, std = score
    if np.isnan(mean):
        return "-"
    return f"{mean:.3f}" + ("" if np.isnan(std) else f" +- {std:.3f}")


def lines(table: Sequence[Entry]) -> Iterator[str]:
    """The table for the terminal."""
    width = max(len(e.name) for e in table) + 2
    head = "".join(f"{m.upper():>16s}" for m in METRICS)
    varied = max(len(e.x) for e in table) + 2
    yield f"{'set':15s}{'':{varied}s}{'':{width}s}{'seeds':>6s}{head}{'MB':>10s}"
    for e in table:
        cells = "".join(f"{_cell(e.scores[m]):>16s}" for m in METRICS)
        size = "" if np.isnan(e.bytes) else f"{e.bytes / 1e6:.0f}"
        yield f"{e.set:15s}{e.x:{varied}s}{e.name:{width}s}{e.seeds or '':>6}{cells}{size:>10s}"


def markdown(table: Sequence[Entry], x: str) -> str:
    """The table in Markdown."""
    text = [f"| set | {x} | | seeds | ACC | NMI | ARI | MB |", "|---|---|---|---|---|---|---|---|"]
    for e in table:
        cells = " | ".join(_cell(e.scores[m]) for m in METRICS)
        size = "" if np.isnan(e.bytes) else f"{e.bytes / 1e6:.0f}"
        title = SETS.get(e.set, e.set)
        text.append(f"| {title} | {e.x} | {e.name} | {e.seeds or ''} | {cells} | {size} |")
    return "\n".join(text) + "\n"


def around_marks(path: Path) -> tuple[str, str]:
    """What stands before and after the marks of a file.

    Raises:
      ValueError, OSError: There are no marks, or the file cannot be read.
    """
    before, begin, rest = path.read_text().partition(_MARKS[0])
    _, end, after = rest.partition(_MARKS[1])
    if not begin or not end:
        raise ValueError(f"readme: {path} has no lines {_MARKS[0]} and {_MARKS[1]}")
    return before, after


def write_between_marks(path: Path, text: str) -> None:
    """Replaces what stands between the marks of a file.

    Raises:
      ValueError, OSError: There are no marks, or the file cannot be written.
    """
    before, after = around_marks(path)
    base.write(path, f"{before}{_MARKS[0]}\n{text}{_MARKS[1]}{after}")


def draw_bars(path: Path, table: Sequence[Entry], title: str) -> None:
    """ACC and NMI, a group of bars for each set and x."""
    shown = [e for e in table if "clients" not in e.name]
    panels = {
        metric.upper(): {
            f"{SETS.get(s, s)}\n{x}": {
                e.name: (e.scores[metric][0], float(np.nan_to_num(e.scores[metric][1])))
                for e in shown
                if (e.set, e.x) == (s, x) and not np.isnan(e.scores[metric][0])
            }
            for s, x in dict.fromkeys((e.set, e.x) for e in shown)
        }
        for metric in ("acc", "nmi")
    }
    charts.bars(path, panels, "score", title)


def draw_lines(path: Path, table: Sequence[Entry], xlabel: str, title: str, log_x: bool) -> None:
    """ACC against x for each set; x = inf is drawn as a level."""
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for e in table:
        mean, std = e.scores["acc"]
        series = panels.setdefault(SETS.get(e.set, e.set), {})
        series.setdefault(e.name, []).append((float(e.x), mean, std))
    charts.lines(path, panels, xlabel, "ACC", title, log_x)


_KINDS = (("all", ""), ("multi_view", ": multi-view"), ("partial_view", ": single-view"))


def draw_bytes(path: Path, runs: Sequence[Mapping[str, str]], title: str) -> None:
    """ACC after every round against all bytes that had travelled by then, for each set."""
    panels: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for (dataset, _, name), of_row in _of(runs).items():
        series = panels.setdefault(SETS.get(dataset, dataset), {})
        for group, label in _KINDS:
            points = series.setdefault(name + label, [])
            for r in range(int(of_row[0]["rounds_made"])):
                acc = [value(run, "acc", group, r + 1) for run in of_row]
                sent = float(of_row[0][f"{ROUNDS}bytes"].split()[r]) / 1e9
                points.append((sent, float(np.mean(acc)), float(np.std(acc))))
    charts.lines(path, panels, "GB sent and received by all clients", "ACC", title, log_x=True)
