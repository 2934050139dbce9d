"""The methods, one file each, and the one table of their names."""

from collections.abc import Callable

from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.local_kmeans import local_kmeans

# Name -> constructor. A new method is one file and one line here.
ALGORITHMS: dict[str, Callable[..., FederatedAlgorithm]] = {
    "fmcsc": fmcsc,
    "local_kmeans": local_kmeans,
}

__all__ = ["ALGORITHMS", "FMCSCConfig", "FMCSCHyperparams", "fmcsc", "local_kmeans"]
