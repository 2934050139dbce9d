"""What FMCSC adds to the runner: the digits as its usual set, with networks of their size."""

from __future__ import annotations

from experiments.lib.data import DataSettings
from experiments.lib.hooks import Hooks


def _defaults(settings: DataSettings) -> dict[str, str]:
    if settings.dataset in (None, "digits"):
        return {"dataset": "digits", "hidden": "256,256,512"}
    return {}


HOOKS = Hooks(defaults=_defaults)
