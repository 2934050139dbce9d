"""The methods, one file each, and the one table of their names."""

from collections.abc import Callable

from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms.coreset_kmeans import coreset_kmeans
from jaxfedmvc.algorithms.distr_kmeans import distr_kmeans
from jaxfedmvc.algorithms.dpfmps import dpfmps, dpfmps_p2est
from jaxfedmvc.algorithms.fedhk import (
    FedHKConfig,
    FedHKHyperparams,
    e_fkmvc,
    fedhk_parafac2,
    fedhk_tucker,
)
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.fmcsc.local import local_fmcsc
from jaxfedmvc.algorithms.local_kmeans import local_kmeans
from jaxfedmvc.algorithms.mgcd import MGCDConfig, MGCDHyperparams, mgcd
from jaxfedmvc.algorithms.vertcohirf import LocalStep, vertcohirf

# Name -> constructor. A new method is one file and one line here.
ALGORITHMS: dict[str, Callable[..., FederatedAlgorithm]] = {
    "coreset_kmeans": coreset_kmeans,
    "distr_kmeans": distr_kmeans,
    "dpfmps": dpfmps,
    "dpfmps_p2est": dpfmps_p2est,
    "e_fkmvc": e_fkmvc,
    "fedhk_parafac2": fedhk_parafac2,
    "fedhk_tucker": fedhk_tucker,
    "fmcsc": fmcsc,
    "local_kmeans": local_kmeans,
    "mgcd": mgcd,
    "vertcohirf": vertcohirf,
}

__all__ = [
    "ALGORITHMS",
    "FMCSCConfig",
    "FMCSCHyperparams",
    "FedHKConfig",
    "FedHKHyperparams",
    "LocalStep",
    "MGCDConfig",
    "MGCDHyperparams",
    "coreset_kmeans",
    "distr_kmeans",
    "dpfmps",
    "dpfmps_p2est",
    "e_fkmvc",
    "fedhk_parafac2",
    "fedhk_tucker",
    "fmcsc",
    "local_fmcsc",
    "local_kmeans",
    "mgcd",
    "vertcohirf",
]
