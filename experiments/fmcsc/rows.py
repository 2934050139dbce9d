"""FMCSC's tables and figures as rows of settings; `tables` reads their runs.

A row is a federation (set, ratio, ...) and a setting, both as a parsed command line: the preset's
flagfiles, then what the table varies, then what the user gave. Nothing here runs anything.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.lib import settings
from experiments.lib.command import Command, JobSettings, parse
from experiments.lib.data import DataSettings, HorizontalSettings
from experiments.lib.peers import Cell, cell, check_share, data_flags_of, shortened
from jaxfedmvc.data import parse_ratio
from jaxfedmvc.data.records import RECORDS

PRESETS = Path(__file__).parent / "presets"

# The paper's sets by the names of `data.load`. Multi-Fashion is another draw of its construction.
SETS = {
    "mnist_usps": "MNIST-USPS",
    "bdgp": "BDGP",
    "multi_fashion": "Multi-Fashion",
    "nuswide": "NUSWIDE",
}
# The one whose file could not be had, and how to run it.
ABSENT = {
    "NUSWIDE": "Its extract of 5000 images in five views and five classes is not to be had here;"
    f" get {RECORDS['nuswide'].source}, and `--datasets=nuswide` runs it"
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
# The paper's other methods that table 1 compares with.
PEERS = (
    "hcp_imsc",
    "imvc_cbg",
    "dsimvc",
    "lsimvc",
    "proimp",
    "jpltd",
    "cpspan",
    "feddmvc",
    "fcuif",
)
# The sets that the paper shows a figure on, where it does not show all.
_SETS = {"figure2": ("mnist_usps",), "figure3": ("mnist_usps",), "figure4b": ("multi_fashion",)}


class Row(NamedTuple):
    """A row of a table or a point of a figure.

    Attributes:
      set: As `data.load` takes it.
      x: What varies besides the method: the ratio, a share, a number of clients.
      name: Of the method or preset.
      command: What is run for it.
    """

    set: str
    x: str
    name: str
    command: Command

    @property
    def columns(self) -> dict[str, str]:
        """What names the row's runs in runs.csv."""
        return {"set": self.set, "x": self.x, "row": self.name}

    def with_flags(self, *arguments: str, **names: str) -> Row:
        """Returns a row with further flags, under other names."""
        command = parse([*self.command.arguments, *arguments])
        return self._replace(command=command, **names)


@dataclasses.dataclass(frozen=True)
class ReproduceSettings:
    """What of the paper is made.

    Attributes:
      paper: Whose tables.
      table: Table of the paper.
      figure: Figure: 2 temperatures, 3 maps with and without consensus, 4a samples and 4b number of
        clients, 4c privacy, 6 losses, 7 label skew; bytes is ACC against traffic, not in the paper.
      datasets: Some of mnist_usps, bdgp, multi_fashion, nuswide; none: those of the paper's figure,
        or the first three.
      ratios: Of table 1, clients with all views : clients with one; none: all three, with --quick
        1:1.
      presets: paper, best, or both; none: for table 1 and bytes both, for the others best.
      references: Of table 1: local, alone, pooled.
      peers: Of table 1: the paper's comparison methods, as --algorithm names them; none: all, with
        --quick none of them.
      peers_file: File peers.csv of an earlier job: what it holds is not run again, and the rest is
        appended to it.
      peers_training: Share of their default epochs that deep comparison methods train for.
      peers_grid: Also run some comparison methods over the grids that their authors search; the
        best by labels gets a column of its own.
      quick: The same on the digits with narrow networks: a few minutes on a CPU.
      readme: File that table 1 is written into, too, between its marks.
      runs_file: Files runs.csv of earlier jobs: shown anew, nothing is run.
      batch: Runs that go together; auto: one after another on a CPU, else as memory allows, see
        --dry_run.
      dry_run: Say what would be run, and what it takes, and end.
    """

    paper: Literal["fmcsc"] = "fmcsc"
    table: Literal["1", "2", "3", "5"] | None = None
    figure: Literal["2", "3", "4a", "4b", "4c", "6", "7", "bytes"] | None = None
    datasets: tuple[str, ...] | None = None
    ratios: tuple[str, ...] | None = None
    presets: tuple[str, ...] | None = None
    references: tuple[str, ...] = tuple(REFERENCES)
    peers: tuple[str, ...] | None = None
    peers_file: str | None = None
    peers_training: float = 1.0
    peers_grid: bool = False
    quick: bool = False
    readme: str | None = None
    runs_file: tuple[str, ...] = ()
    batch: str = "auto"
    dry_run: bool = False

    @property
    def what(self) -> str:
        """Name of the table or figure."""
        return f"table{self.table}" if self.table else f"figure{self.figure}"

    def resolved(self) -> ReproduceSettings:
        """Returns the settings with what was not given filled in.

        Raises:
          ValueError: Not one table or one figure, or names or ratios that there are not.
        """
        for ratio in self.ratios or ():
            parse_ratio(ratio)
        if (self.table is None) == (self.figure is None):
            raise ValueError("table: give either --table or --figure")
        if not set(self.references) <= set(REFERENCES):
            got = ",".join(self.references)
            raise ValueError(f"references: got {got!r}; allowed are {', '.join(REFERENCES)}")
        if not set(self.peers or ()) <= set(PEERS) or (self.peers and self.what != "table1"):
            got = ",".join(self.peers or ())
            raise ValueError(f"peers: got {got!r}; allowed for table 1 are {', '.join(PEERS)}")
        check_share(self.peers_training)
        both = self.what in ("table1", "figurebytes")
        usual: dict[str, Any] = {
            "datasets": ("digits",) if self.quick else _SETS.get(self.what, tuple(SETS)[:3]),
            "ratios": ("1:1",) if self.quick else RATIOS,
            "presets": ("paper", "best") if both else ("best",),
            "peers": PEERS if self.what == "table1" and not self.quick else (),
        }
        missing = {name: value for name, value in usual.items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)


class Request(NamedTuple):
    """What was asked for.

    Attributes:
      settings: Nothing of which is left to defaults.
      flags: Flags of runs on the command line, name -> "--name=value", which go before any preset.
    """

    settings: ReproduceSettings
    flags: Mapping[str, str]

    def row(self, dataset: str, x: str, name: str, **changes: Any) -> Row:
        """Returns a row of one of the presets, with these flags changed.

        Raises:
          ValueError: The command line gives one of them, too; but for the number of rounds, which
            a table may be read after.
        """
        if twice := sorted((changes.keys() & self.flags.keys()) - {"rounds"}):
            what = self.settings.what
            raise ValueError(f"{twice[0]}: {what} gives it values of its own; leave it out")
        varied = [f"--{flag}={value}" for flag, value in changes.items()]
        files = preset(name, dataset, self.settings.quick)
        return Row(dataset, x, name, parse([*files, *varied, *self.flags.values()]))


def preset(name: str, dataset: str, quick: bool) -> list[str]:
    """Returns the flagfiles of a preset on a set, as arguments.

    Args:
      name: "paper" or "best".
      dataset: One of `SETS`, or "digits" for what `quick` runs.
      quick: Narrow networks and few epochs, the same protocol.

    Raises:
      ValueError: An unknown preset or set.
    """
    if name not in ("paper", "best"):
        raise ValueError(f"presets: got {name!r}; allowed are paper, best")
    if dataset not in (*SETS, "digits"):
        raise ValueError(f"datasets: got {dataset!r}; allowed are {', '.join(SETS)}, digits")
    files = [dataset]
    if name == "best":
        # Epochs of a round last, which the paper sets per set, too.
        files += ["best", f"best_{dataset}"]
    paths = [PRESETS / f"{file}.flags" for file in [*files, *["quick"] * quick]]
    # As one would type it, since rows say by which command they were made.
    here = Path.cwd()
    typed = [path.relative_to(here) if path.is_relative_to(here) else path for path in paths]
    return [f"--flagfile={path}" for path in typed if path.exists()]


# --- Rows -----------------------------------------------------------------------------------------


# What is varied one value at a time: its flag, and values, those of --quick after them.
_VARIED: dict[str, tuple[str, tuple, tuple]] = {
    # .9 of the digits' four clients of a kind leaves nobody out.
    "table3": ("participation", (0.5, 0.7, 0.9), (0.5, 0.7)),
    "figure3": ("components", ("BCD", "ABCD"), ("BCD", "ABCD")),
    "figure4a": ("samples_per_client", (50, 100, 150, 200), (40, 80, 150)),
    "figure4b": ("n_clients", (12, 24, 48, 100), (6, 12, 24)),
    "figure7": ("dirichlet", (5, 50, 500), (5, 50, 500)),
}


def rows(request: Request) -> list[Row]:
    """Returns the rows of what was asked for.

    Raises:
      ValueError: An unknown set or preset, or nothing is left to run.
    """
    asked = request.settings
    if asked.what == "table1":
        found = list(_table_1(request))
        if not found and not peers(request):
            raise ValueError(
                "presets: got none, and no ratios, no peers, or no local or alone among references"
            )
        return found
    if not asked.presets:
        raise ValueError("presets: got none; allowed are paper, best")
    presets = asked.presets[-1:] if asked.what == "figure3" else asked.presets
    cells = itertools.product(asked.datasets or (), presets)
    return [row for dataset, name in cells for row in _of_preset(request, dataset, name)]


def _of_preset(request: Request, dataset: str, name: str) -> Iterator[Row]:
    """Yields the rows of everything but table 1, on one set with one preset."""
    what, quick = request.settings.what, request.settings.quick
    if what in _VARIED:
        flag, *values = _VARIED[what]
        for value in values[quick]:
            yield request.row(dataset, str(value), name, **{flag: value})
    elif what == "table2":
        # C is what partial clients do in the rounds: without them it can neither help nor harm.
        for item in ABLATIONS:
            letters, _, protocol = item.partition(", ")
            yield request.row(dataset, item, name, components=letters, **_PROTOCOLS[protocol])
    elif what == "figure2":
        yield from _figure_2(request, dataset, name)
    elif what == "figure4c":
        yield from _figure_4c(request, dataset, name)
    else:  # figure 6, table 5 and bytes: the preset as it is
        more = {"rounds": 10 if quick else 50} if what == "figurebytes" else {}
        yield request.row(dataset, "1:1", name, **more)


# Rounds of `best` in table 1: it is read after the paper's 5, and after these.
_MORE_ROUNDS = 10


def _table_1(request: Request) -> Iterator[Row]:
    asked = request.settings
    for dataset, ratio in itertools.product(asked.datasets or (), asked.ratios or ()):
        for name in asked.presets or ():
            more = {"rounds": _MORE_ROUNDS} if name == "best" and not asked.quick else {}
            yield request.row(dataset, ratio, name, ratio=ratio, **more)
        like = request.row(dataset, ratio, (asked.presets or ["best"])[-1], ratio=ratio)
        if "local" in asked.references:
            yield like.with_flags("--algorithm=local_fmcsc", name=LOCAL)
        if "alone" in asked.references:
            yield like._replace(name=ALONE, command=_alone(like.command))


def peers(request: Request) -> list[Cell]:
    """Returns the comparison methods of table 1, each on the partitions of its cells."""
    asked, cells = request.settings, []
    if not asked.peers:
        return []  # other tables and figures may be asked for with a ratio
    for dataset, ratio in itertools.product(asked.datasets or (), asked.ratios or ()):
        like = request.row(dataset, ratio, "best", ratio=ratio).command
        for method in asked.peers:
            flags = data_flags_of(like), shortened(method, asked.peers_training)
            cells.append(cell(dataset, ratio, method, like.split.n_clients, *flags))
    return cells


def _alone(command: Command) -> Command:
    """Returns k-means of each client on the data of a command: its own settings are no preset's."""
    groups = (DataSettings, HorizontalSettings, JobSettings)
    shared = {flag for group in groups for flag in settings.flags_of(group)} - {"rounds"}
    lines = settings.flag_lines(command.flags, set(command.flags) - shared)
    return parse(["--algorithm=local_kmeans", *lines])


def _figure_2(request: Request, dataset: str, name: str) -> Iterator[Row]:
    """tau_p is partial clients': it is left as it is where they stay out of the rounds."""
    values = TEMPERATURES[::2] if request.settings.quick else TEMPERATURES
    flags = request.row(dataset, "", name).command.flags
    idle = not flags["partial_rounds"].value
    for tau_m, tau_p in itertools.product(values, [flags["tau_p"].value] if idle else values):
        yield request.row(dataset, f"{tau_m} {tau_p}", name, tau_m=tau_m, tau_p=tau_p)


# L1 norm that a client's update is scaled down to where epsilon is to mean something.
_CLIP = 10.0


def _figure_4c(request: Request, dataset: str, name: str) -> Iterator[Row]:
    """Laplace noise of scale 1 / epsilon, and noise that keeps what epsilon promises.

    The first is how the paper's figure can be read: it names neither a bound of the update nor the
    sum over rounds, and without these no epsilon follows from the noise. In the second, replacing
    a whole client changes an upload by 2 `_CLIP` in L1 at most, and epsilon is that of all uploads.
    """
    plain = request.row(dataset, "inf", name, ratio="2:1")
    yield plain
    # What a client sends at most, a leader's included; centroids are not counted.
    command = plain.command
    algorithm = command.method.make(command.config(1, 1), command.hyperparams())
    uploads = len(algorithm.setup) + len(algorithm.round) * command.rounds
    epsilons = EPSILONS[:2] if request.settings.quick else EPSILONS
    for epsilon in epsilons:
        yield plain.with_flags(f"--upload_noise={1 / epsilon:.9g}", x=str(epsilon))
    for epsilon in epsilons:
        noise = f"--upload_noise={2 * _CLIP * uploads / epsilon:.9g}", f"--upload_clip={_CLIP}"
        yield plain.with_flags(*noise, x=str(epsilon), name=f"{name}, clipped")
