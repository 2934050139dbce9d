"""FMCSC's tables and figures as rows of settings; `fmcsc_tables` reads their runs.

A row is a federation (set, ratio, ...) and a setting, given by flags of `experiments.fmcsc` as
text; `sweep_setup` makes groups of runs of them, so that all seeds of a row, and all rows that
differ in traced numbers alone, share a program. Nothing here runs anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PRESETS = Path(__file__).parent / "presets"

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
        "table1": _table_1,
        "table2": _table_2,
        "table3": _table_3,
        "figure2": _figure_2,
        "figure4a": _figure_4a,
        "figure4b": _figure_4b,
        "figure4c": _figure_4c,
        "figure7": _figure_7,
        "figurebytes": _figure_bytes,
        "figure3": _figure_3,
        "figure6": _presets,
        "table5": _presets,
    }
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
    """.9 of the digits' four clients of a kind leaves nobody out."""
    shares = ("0.5", "0.7") if wish.quick else ("0.5", "0.7", "0.9")
    for dataset in wish.sets:
        for name in wish.presets:
            for share in shares:
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
