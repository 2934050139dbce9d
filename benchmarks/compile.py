"""What a job's programs cost before they run: `python -m benchmarks.compile [flags]`.

The flags are those of `experiments.run`. Prints for each program the seconds that tracing and
lowering take, the core-seconds of XLA, and counts that no busy machine can move: lines of
StableHLO, instructions of the compiled program, fusions, and draws of random bits. Nothing is read
from a compilation cache.

    python -m benchmarks.compile                             # the default job of `make run`
    python -m benchmarks.compile --algorithm=mgcd --dataset=digits --n_agents=3
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.extend
import pandas as pd
from absl import logging

from experiments.lib import runner
from experiments.lib.command import checked, parse_or_exit
from jaxfedmvc.engine.programs import Traced

# What `make run` gives to `experiments.fmcsc`.
_PRESETS = Path(__file__).parents[1] / "experiments" / "fmcsc" / "presets"
DEFAULT = tuple(f"--flagfile={_PRESETS / name}.flags" for name in ("best", "best_digits"))
COUNTS = ("lines", "instructions", "fusions", "draws")


def programs_of(arguments: Sequence[str]) -> list[Traced]:
    """Traces the programs of a command of `experiments.run`, as its runner makes them."""
    command = parse_or_exit(arguments, __doc__ or "")
    return runner.steps_of(checked(lambda: runner.prepare(command))).programs()


def draws(jaxpr: Any) -> int:
    """Counts the places in a program that draw random bits."""
    return sum(e.primitive.name in ("random_bits", "threefry2x32") for e in _equations(jaxpr))


def _equations(jaxpr: Any) -> Iterator[Any]:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in inner.eqns:
        yield equation
        for sub in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _equations(sub)


def costs(programs: Sequence[Traced], compiled: bool = True) -> list[dict[str, Any]]:
    """Lowers programs, and compiles them if asked to; returns the seconds and counts of each.

    One of the same text as another is not compiled: "as" names the other.
    """
    found: list[dict[str, Any]] = []
    first: dict[str, str] = {}
    for program in programs:
        began = time.perf_counter()
        lowered = program.traced.lower()
        lowering = time.perf_counter() - began
        row = {"program": program.name, "trace s": program.seconds, "lower s": lowering, "as": ""}
        row |= dict.fromkeys(COUNTS, 0) | {"compile core-s": 0.0}
        text = lowered.as_text()
        if text in first:
            found.append(row | {"as": first[text]})
            continue
        first[text] = program.name
        made = ""
        if compiled:
            began = time.process_time()
            executable = lowered.compile(program.options)
            row["compile core-s"] = time.process_time() - began
            made = executable.as_text()
        counts = (
            text.count("\n"),
            made.count(" = "),
            made.count(" fusion("),
            draws(program.traced.jaxpr),
        )
        found.append(row | dict(zip(COUNTS, counts, strict=True)))
    return found


def main(arguments: Sequence[str]) -> None:
    """Prints the table, the most costly program first, and the sums below."""
    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_enable_compilation_cache", False)
    table = pd.DataFrame(costs(programs_of(arguments)))
    table = table.sort_values("compile core-s", ascending=False)
    table.loc["all"] = table.sum(numeric_only=True)
    table.loc["all", ["program", "as"]] = "all", ""
    print(table.astype(dict.fromkeys(COUNTS, int)).to_string(index=False, float_format="%.2f"))


if __name__ == "__main__":
    main(sys.argv[1:] or DEFAULT)
