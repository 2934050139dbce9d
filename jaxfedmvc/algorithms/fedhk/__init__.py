"""FedHK: federated heat-kernel multi-view clustering, with whole and with compressed centres."""

from jaxfedmvc.algorithms.fedhk.accounting import (
    PrivacySettings,
    check_fraction_bits,
    privacy_settings,
    privacy_statement,
    releases,
    spent,
)
from jaxfedmvc.algorithms.fedhk.method import centres, e_fkmvc
from jaxfedmvc.algorithms.fedhk.parafac2 import fedhk_parafac2
from jaxfedmvc.algorithms.fedhk.private import (
    check_sums_fit,
    e_fkmvc_with_noise,
    private_e_fkmvc,
)
from jaxfedmvc.algorithms.fedhk.settings import (
    FedHKConfig,
    FedHKHyperparams,
    FedHKParafac2Config,
    FedHKTuckerConfig,
    PrivateFedHKConfig,
    PrivateFedHKHyperparams,
)
from jaxfedmvc.algorithms.fedhk.setup import SUMMARIES
from jaxfedmvc.algorithms.fedhk.tucker import fedhk_tucker

__all__ = [
    "SUMMARIES",
    "FedHKConfig",
    "FedHKHyperparams",
    "FedHKParafac2Config",
    "FedHKTuckerConfig",
    "PrivacySettings",
    "PrivateFedHKConfig",
    "PrivateFedHKHyperparams",
    "centres",
    "check_fraction_bits",
    "check_sums_fit",
    "e_fkmvc",
    "e_fkmvc_with_noise",
    "fedhk_parafac2",
    "fedhk_tucker",
    "privacy_settings",
    "privacy_statement",
    "private_e_fkmvc",
    "releases",
    "spent",
]
