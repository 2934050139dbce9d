"""FedHK: federated heat-kernel multi-view clustering, whole and compressed."""

from jaxfedmvc.algorithms.fedhk.method import centres, fedhk
from jaxfedmvc.algorithms.fedhk.model import FedHKConfig, FedHKHyperparams

__all__ = ["FedHKConfig", "FedHKHyperparams", "centres", "fedhk"]
