"""Which methods apply to a data set, what they would send, and what that reveals:
`python -m experiments.advise --dataset=...`.

Every method of the table is built for the data, from shapes alone, so that what a method refuses is
its own word: too few rows for a client, one view where it needs two, rows without a view. Nothing
is trained. Bytes are those of a run with the method's defaults, of all clients; a method that finds
its own end may make fewer rounds. Nothing here says which
method finds the better clusters: see the page "Choose a method" of the documentation.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import pandas as pd

from experiments.lib import runner
from experiments.lib.command import SPLITS, checked, parse
from experiments.lib.data import DataSettings, HorizontalSettings, VerticalSettings
from experiments.lib.progress import Progress, require_tqdm
from experiments.lib.study import Study, parse_or_exit
from experiments.lib.text import digits, width_of_terminal, wrapped
from jaxfedmvc import data
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.reveals import KINDS, Reveals, reveals
from jaxfedmvc.engine.traffic import of_run


@dataclasses.dataclass(frozen=True)
class AdviseSettings:
    """What the parties are, and what they agree to.

    Attributes:
      holds: What a party holds: rows of its own; a view of all rows; or everything lies in one
        place. any: all that the data allow.
      server: Whether there is a server that all parties send to.
      at_most: What may travel at most; see the last column of the table.
    """

    holds: Literal["any", "rows", "views", "all"] = "any"
    server: bool = True
    at_most: Literal["nothing", "noise", "sums", "models", "labels", "codes", "rows"] = "rows"

    def excludes(self, name: str, told: Reveals, peers: bool | None = None) -> str:
        """Returns why a method is none for these parties; empty where it may be one."""
        wanted = {"rows": "horizontal", "views": "vertical", "all": "pooled"}.get(self.holds)
        topology = METHODS[name].topology
        if wanted is not None and topology != wanted:
            return f"is for {topology} data"
        # Where all may travel, so may what nobody has described yet.
        most = "unknown" if self.at_most == "rows" else self.at_most
        if list(KINDS).index(told.kind) > list(KINDS).index(most):
            return f"sends {KINDS[told.kind]}"
        if peers is False and not self.server and told.kind != "nothing":
            return "needs a server"
        return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the methods that apply and those that do not; arguments of the process if None."""
    groups = (AdviseSettings, DataSettings, HorizontalSettings, VerticalSettings)
    study = parse_or_exit(arguments, __doc__, dict.fromkeys(groups), leaves_folder=False)
    asked = checked(lambda: study.read(AdviseSettings))
    checked(require_tqdm)
    checked(lambda: _check_data(study.read(DataSettings)))
    with Progress(study.folder.progress) as progress:
        progress.expect(dict.fromkeys(METHODS, 1))
        fits, not_fit = [], []
        for name in METHODS:
            found, why = _tried(name, asked, study)
            if why:
                not_fit.append((name, why))
            else:
                fits.append(found)
            progress.done(name)
    print(report(fits, not_fit, width_of_terminal()))


def _check_data(settings: DataSettings) -> None:
    """Reads the data once by themselves: what is wrong with them is not a method's fault."""
    if settings.dataset is None:
        raise ValueError("dataset: none is given; allowed is a named set or a path")
    found = data.load(settings.dataset, settings.data_dir, settings.scale, settings.table)
    if settings.n_clusters == "auto" or (settings.n_clusters is None and found.labels is None):
        why = (
            "is auto" if settings.n_clusters else "none is given, and there are no labels to count"
        )
        raise ValueError(
            f"n_clusters: {why}; messages are sized by it: give a number, as --n_clusters=10"
        )


def _tried(name: str, asked: AdviseSettings, study: Study) -> tuple[dict[str, Any], str]:
    """Builds a method for the data; returns its line, and why it does not apply, if so."""
    method = METHODS[name]
    told = reveals(name, method)
    if why := asked.excludes(name, told):
        return {}, why
    # A default is not passed on: methods have defaults of their own.
    given = study.given(DataSettings, SPLITS[method.topology])
    try:
        command = parse([f"--algorithm={name}", "--compilation_cache=", *given])
        job = runner.prepare(command)
        steps = runner.steps_of(job)
        if why := asked.excludes(name, told, steps.algorithm.peers):
            return {}, why
        steps.programs()
    except ValueError as error:
        return {}, " ".join(str(error).split())
    up, down = of_run(steps.traffic(), command.rounds)
    line = {
        "method": name,
        "data": method.topology,
        "server": "no" if steps.algorithm.peers or told.kind == "nothing" else "yes",
        "rounds": command.rounds,
        "MB up": up / 1e6,
        "MB down": down / 1e6,
        "sends": told.kind,
        "which reveals": told.text,
    }
    return line, ""


def report(
    fits: list[dict[str, Any]], not_fit: list[tuple[str, str]], width: int | None = None
) -> str:
    """Returns the table of methods that apply, what tells least first, and the others' reasons.

    Args:
      fits: A line of the table each.
      not_fit: Methods with their reasons.
      width: That texts are wrapped to; None: a line each.
    """
    lines = []
    if fits:
        table = pd.DataFrame(fits)
        order = table["sends"].map(list(KINDS).index)
        table = table.assign(order=order).sort_values(["order", "MB up"]).drop(columns="order")
        texts = zip(table["method"], table.pop("which reveals"), strict=True)
        lines += [table.to_string(index=False, float_format=digits), ""]
        told = _told_once(texts)
        lines += [line for text in told for line in wrapped(text, width)]
    else:
        lines.append("no method applies")
    if not_fit:
        lines += ["", "do not apply:"]
        told = _told_once(not_fit)
        lines += [line for text in told for line in wrapped(f"  {text}", width)]
    return "\n".join(lines)


def _told_once(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each text, with the methods that it is true of."""
    methods: dict[str, list[str]] = {}
    for method, text in texts:
        methods.setdefault(text, []).append(method)
    return [f"{', '.join(names)}: {text}" for text, names in methods.items()]


if __name__ == "__main__":
    main(sys.argv[1:])
