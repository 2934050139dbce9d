"""What FedHK adds to the runner: clients that hold all views, and what protects them."""

from __future__ import annotations

from typing import Any

from experiments.lib.data import DataSettings
from experiments.lib.hooks import Hooks
from jaxfedmvc.algorithms.fedhk import PrivateConfig, check_fraction_bits, privacy_statement


def _defaults(settings: DataSettings) -> dict[str, str]:
    return {"dataset": settings.dataset or "digits", "n_clients": "8", "ratio": "1:0"}


def _check(job: Any) -> None:
    """Checks that masked sums keep the noise of a private run.

    Raises:
      ValueError: Names the setting.
    """
    if job.command.job.secure_aggregation:
        if job.config.hkc == "minmax":
            raise ValueError(
                "hkc: got minmax with masked sums; least and greatest values are no sums, allowed"
                " are bandwidth, absmean"
            )
        if isinstance(job.config, PrivateConfig):
            check_fraction_bits(job.config, job.hyperparams, job.command.job.fraction_bits)


def _facts(job: Any) -> dict[str, Any]:
    secure = job.command.job.secure_aggregation
    return {"privacy": privacy_statement(job.config, job.hyperparams, secure=secure)}


HOOKS = Hooks(
    defaults=_defaults,
    check=_check,
    facts=_facts,
    replaced={
        "method": "give --algorithm=e_fkmvc, fedhk_tucker or fedhk_parafac2",
        "privacy": "give --secure_aggregation, or --algorithm=private_e_fkmvc",
    },
)
