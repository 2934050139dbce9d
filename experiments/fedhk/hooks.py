"""What FedHK adds to the runner: clients that hold all views, and what protects them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.data import DataSettings
from experiments.lib.hooks import Hooks, SeedResult
from experiments.lib.text import left_out
from jaxfedmvc.algorithms.fedhk import PrivateFedHKConfig, check_fraction_bits, privacy_statement
from jaxfedmvc.algorithms.fedhk.accounting import spent

_PERSONAL = ("proximal", "mix", "gradient")
# Flag -> the static setting that it is of use with, and its values.
_OF_USE = {
    "local_steps": ("aggregation", ("average",)),
    "quality": ("aggregation", ("average",)),
    "personal_steps": ("personal", _PERSONAL),
    "view_mix": ("personal", _PERSONAL),
    "tau": ("personal", ("proximal",)),
    "mix": ("personal", ("mix",)),
    "step_size": ("personal", ("gradient",)),
    "least_agreement": ("choose_views", (None, True)),
}


def _defaults(settings: DataSettings) -> dict[str, str]:
    return {"dataset": settings.dataset or "digits", "n_clients": "8", "ratio": "1:0"}


def _check(commands: Sequence[Any], configs: Sequence[Any]) -> None:
    """Checks that every flag is of use, in one of these settings at least.

    Raises:
      ValueError: Names the setting.
    """
    for name, (setting, values) in _OF_USE.items():
        found = [getattr(config, setting) for config in configs]
        flags = [command.flags[name] for command in commands]
        is_given = any(flag.value != flag.default for flag in flags)
        if is_given and not any(got in values for got in found):
            raise ValueError(
                f"{name}: has no effect with --{setting}={found[0]}; leave it out, or give"
                f" --{setting}={' or '.join(str(v) for v in values if v is not None)}"
            )


def _check_masks(config: Any, hyperparams: Any, fraction_bits: int) -> None:
    """Checks that what is masked are sums, which keep the noise of a private run.

    Raises:
      ValueError: Names the setting.
    """
    if config.hkc == "minmax":
        raise ValueError(
            "hkc: got minmax with masked sums; least and greatest values are no sums, allowed"
            " are bandwidth, absmean"
        )
    if isinstance(config, PrivateFedHKConfig):
        check_fraction_bits(config, hyperparams, fraction_bits)


def _facts(job: Any) -> dict[str, Any]:
    secure = job.command.job.secure_aggregation
    return {"privacy": privacy_statement(job.config, job.hyperparams, secure=secure)}


def _spent(config: Any, hyperparams: Any) -> tuple[float, float] | None:
    return spent(config, hyperparams) if isinstance(config, PrivateFedHKConfig) else None


def _after_seed(folder: Path, result: SeedResult, n_seeds: int) -> Iterator[str]:
    server = getattr(result.server, "inner", result.server)  # masked sums
    if not getattr(server, "of_views", {}):
        return
    yield from left_out(result.seed, np.asarray(server.models.view_weights)[0] > 0)


HOOKS = Hooks(
    defaults=_defaults,
    after_seed=_after_seed,
    check=_check,
    check_masks=_check_masks,
    facts=_facts,
    spent=_spent,
    late_clients=False,
    replaced={
        "method": "give --algorithm=e_fkmvc, fedhk_tucker or fedhk_parafac2",
        "privacy": "give --secure_aggregation, or --algorithm=private_e_fkmvc",
    },
)
