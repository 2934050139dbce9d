"""Tables and figures of the papers, measured beside the published numbers:

    python -m experiments.reproduce --paper=fmcsc --table=1 --seeds=5
    python -m experiments.reproduce --check

    --paper=fmcsc       --table=1|2|3|5, --figure=2|3|4a|4b|4c|6|7|bytes
    --paper=mgcd        --table=2|3|4, --figure=3|4|5
    --paper=vertcohirf  --table=1 or 5 to 16, --figure=1|4|5

Each of them has flags of its own: `--paper=fmcsc --help` shows them. FedHK's paper has no
experiment; `python -m experiments.fedhk.study` is ours. `--check` runs nothing: it makes the tables
that the documentation shows again from the rows that came with this checkout, and says what does
not agree, and what is missing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import logging

from experiments.lib.command import checked, shown, value_of


def main_of(arguments: Sequence[str]) -> Callable[[Sequence[str]], None]:
    """Returns `main` of the paper that is asked for.

    Raises:
      ValueError: An unknown paper, or a flagfile that cannot be read.
    """
    papers = sorted(path.parent.name for path in Path(__file__).parent.glob("*/reproduce.py"))
    asked = value_of(arguments, "paper", "vertcohirf")
    if asked not in papers:
        raise ValueError(f"paper: got {asked!r}; allowed are {', '.join(papers)}")
    return importlib.import_module(f"experiments.{asked}.reproduce").main


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the table or figure that the command line asks for."""
    logging.set_verbosity(logging.WARNING)  # jax tells of every backend that is not there
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if {"--help", "-h", "--helpfull"} & set(arguments) and value_of(arguments, "paper") is None:
        print(__doc__)
        return
    if arguments == ["--check"]:
        from experiments.published import check  # it reads what all papers' packages have

        sys.exit(1 if shown(check) else 0)
    checked(lambda: main_of(arguments))(arguments)


if __name__ == "__main__":
    main()
