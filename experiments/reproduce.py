"""Tables and figures of the papers, measured beside the published numbers:

    python -m experiments.reproduce --paper=fmcsc --table=1 --seeds=5

Each paper's module has the flags: `reproduce_fmcsc` for fmcsc, `reproduce_vertical` for vertcohirf
and mgcd; `--paper=... --help` shows them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from experiments import base

_MODULES = {
    "fmcsc": "reproduce_fmcsc",
    "mgcd": "reproduce_vertical",
    "vertcohirf": "reproduce_vertical",
}


def module_of(argv: Sequence[str]) -> ModuleType:
    """Imports the module of the paper that `argv` asks for, and with it its flags.

    Raises:
      ValueError: An unknown paper, or a flagfile that cannot be read.
    """
    asked = base.given(argv, "paper", "vertcohirf")
    if asked not in _MODULES:
        raise ValueError(f"paper: got {asked!r}; allowed are {', '.join(_MODULES)}")
    return importlib.import_module(f"experiments.{_MODULES[asked]}")


if __name__ == "__main__":
    base.launch(base.checked(lambda: module_of(sys.argv)).main)
