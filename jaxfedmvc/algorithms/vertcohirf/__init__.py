"""VertCoHiRF: vertical clustering by consensus on labels and rankings, without a server.

Read `method.py` beside algorithm 1 of the paper; `local_step.py` and `rankings.py` are its phases.
"""

from jaxfedmvc.algorithms.vertcohirf.local_step import LocalStep
from jaxfedmvc.algorithms.vertcohirf.method import hierarchy_of, vertcohirf, vertcohirf_of_steps
from jaxfedmvc.algorithms.vertcohirf.settings import VertCoHiRFConfig, VertCoHiRFHyperparams

__all__ = [
    "LocalStep",
    "VertCoHiRFConfig",
    "VertCoHiRFHyperparams",
    "hierarchy_of",
    "vertcohirf",
    "vertcohirf_of_steps",
]
