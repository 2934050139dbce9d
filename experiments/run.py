"""Runs any method on any data: `python -m experiments.run --algorithm=NAME [flags]`.

Prints a line a round and a table in the end, and leaves summary.json, rounds.csv, labels.csv,
flags.txt (give it back as --flagfile) and pictures in a result folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import logging

from experiments.lib import choice, folder
from experiments.lib.command import parse_or_exit


@folder.stoppable
def main(
    arguments: Sequence[str] | None = None, algorithm: str = "fmcsc", description: str | None = None
) -> None:
    """Runs the job that the command line describes.

    Args:
      arguments: The command line without the program's name; that of this process if None.
      algorithm: The method where the command line names none.
      description: What --help begins with; this module's own if None.
    """
    logging.set_verbosity(logging.WARNING)  # jax tells of every backend that is not there
    arguments = sys.argv[1:] if arguments is None else arguments
    text = description or __doc__ or ""
    extra = (choice.ChoiceSettings,)
    choice.run(parse_or_exit(arguments, text, algorithm=algorithm, extra=extra))


if __name__ == "__main__":
    main()
