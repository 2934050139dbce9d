"""Federated multi-view clustering in JAX.

Read `algorithm.py` (the two types that every method is made of), then a method under
`algorithms/`, then `engine/run.py`, which runs it.
"""

from jaxfedmvc import data, engine
from jaxfedmvc.algorithm import FederatedAlgorithm, Phase
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.engine import run
from jaxfedmvc.federation import Cohort, Federation, single_client
from jaxfedmvc.metrics.host import score

__all__ = [
    "METHODS",
    "Cohort",
    "FederatedAlgorithm",
    "Federation",
    "Phase",
    "data",
    "engine",
    "run",
    "score",
    "single_client",
]

__version__ = "0.2.0.dev0"
