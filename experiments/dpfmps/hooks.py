"""What DPFMPS adds to the runner: the epsilon and delta that a run has spent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.lib.hooks import Hooks, SeedResult
from jaxfedmvc.algorithms.dpfmps.settings import DPFMPSConfig
from jaxfedmvc.files import write_text


def _after_seed(folder: Path, result: SeedResult, n_seeds: int) -> Iterator[str]:
    """Writes privacy.json; delta hangs on the noisy number of rows, so that every seed has one."""
    epsilon, delta = (float(x) for x in result.server.spent)
    if math.isinf(epsilon):
        return
    told = {
        "epsilon": epsilon,
        "delta": delta,
        "neighbours": "tables of which one has one row more; replacing one costs more",
        "covered": "all messages of all agents together, if one does not know their common secret",
        "not_covered": [
            "the ranges that features are scaled by",
            "the padded number of rows, where n_sketches derives from it",
            "labels, if published",
            "several runs on the same rows, such as seeds: epsilon and delta are of one and add up",
            "the low bits of floating-point noise",
        ],
    }
    stem = "privacy" if n_seeds == 1 else f"privacy_seed{result.seed}"
    write_text(folder / f"{stem}.json", json.dumps(told, indent=2) + "\n")
    yield (
        f"seed {result.seed}: differential privacy of a row, epsilon {epsilon:.3g}, delta"
        f" {delta:.2g} (what else: {stem}.json)"
    )


def _spent(config: DPFMPSConfig, hyperparams: Any) -> tuple[float, float]:
    return config.dp_epsilon, math.nan  # each run's own delta


HOOKS = Hooks(after_seed=_after_seed, spent=_spent)
