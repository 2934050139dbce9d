"""Runs any method on any data: `python -m experiments.run --algorithm=NAME [flags]`.

Prints a line a round and a table in the end, and leaves summary.json, rounds.csv, labels.csv,
flags.txt (give it back as --flagfile) and pictures in a result folder.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    extra = (choice.ChoiceSettings,)
    choice.run(parse_or_exit(arguments, description or __doc__, algorithm=algorithm, extra=extra))


if __name__ == "__main__":
    main()
