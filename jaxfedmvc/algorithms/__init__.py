"""The methods, and the one table of them."""

from jaxfedmvc.algorithms.coreset_kmeans import (
    CoresetKMeansConfig,
    CoresetKMeansHyperparams,
    coreset_kmeans,
)
from jaxfedmvc.algorithms.distr_kmeans import (
    DistrKMeansConfig,
    DistrKMeansHyperparams,
    distr_kmeans,
)
from jaxfedmvc.algorithms.fedhk import FedHKConfig, FedHKHyperparams, e_fkmvc
from jaxfedmvc.algorithms.fmcsc import FMCSCConfig, FMCSCHyperparams, fmcsc
from jaxfedmvc.algorithms.fmcsc.local import local_fmcsc
from jaxfedmvc.algorithms.local_kmeans import (
    LocalKMeansConfig,
    LocalKMeansHyperparams,
    local_kmeans,
)
from jaxfedmvc.algorithms.registry import Method, NoHyperparams

# A new method is one file and one line here.
METHODS: dict[str, Method] = {
    "coreset_kmeans": Method(
        coreset_kmeans, CoresetKMeansConfig, CoresetKMeansHyperparams, "vertical", "", 0
    ),
    "distr_kmeans": Method(
        distr_kmeans, DistrKMeansConfig, DistrKMeansHyperparams, "vertical", "", 0
    ),
    "e_fkmvc": Method(e_fkmvc, FedHKConfig, FedHKHyperparams, "horizontal", "sinaga2025", 50),
    "fmcsc": Method(fmcsc, FMCSCConfig, FMCSCHyperparams, "horizontal", "chen2024", 5),
    "local_fmcsc": Method(local_fmcsc, FMCSCConfig, FMCSCHyperparams, "horizontal", "chen2024", 5),
    "local_kmeans": Method(
        local_kmeans, LocalKMeansConfig, LocalKMeansHyperparams, "horizontal", "", 0
    ),
}
