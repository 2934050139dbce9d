"""Multi-view data sets and their division over the clients of a federation."""

from jaxfedmvc.data.dataset import Dataset, check_arrays
from jaxfedmvc.data.datasets import load, names
from jaxfedmvc.data.partition import Part, hybrid_partition, parse_ratio
from jaxfedmvc.data.synthetic import blobs, multimodal, simplex
from jaxfedmvc.data.vertical import align_agents, prepare, split_features, vertical_partition

__all__ = [
    "Dataset",
    "Part",
    "align_agents",
    "blobs",
    "check_arrays",
    "hybrid_partition",
    "load",
    "multimodal",
    "names",
    "parse_ratio",
    "prepare",
    "simplex",
    "split_features",
    "vertical_partition",
]
