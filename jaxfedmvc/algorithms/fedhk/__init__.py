"""FedHK: federated heat-kernel multi-view clustering, with whole and with compressed centres."""

from jaxfedmvc.algorithms.fedhk.method import centres, e_fkmvc
from jaxfedmvc.algorithms.fedhk.model import FedHKConfig, FedHKHyperparams
from jaxfedmvc.algorithms.fedhk.parafac2 import fedhk_parafac2
from jaxfedmvc.algorithms.fedhk.private import PrivacySettings, private_e_fkmvc
from jaxfedmvc.algorithms.fedhk.tucker import fedhk_tucker

__all__ = [
    "FedHKConfig",
    "FedHKHyperparams",
    "PrivacySettings",
    "centres",
    "e_fkmvc",
    "fedhk_parafac2",
    "fedhk_tucker",
    "private_e_fkmvc",
]
