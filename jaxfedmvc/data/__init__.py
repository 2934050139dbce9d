"""Multi-view data sets and their division over the clients of a federation."""

from jaxfedmvc.data.datasets import Dataset, check_arrays, load, names
from jaxfedmvc.data.partition import Part, hybrid_partition, parse_ratio

__all__ = [
    "Dataset",
    "Part",
    "check_arrays",
    "hybrid_partition",
    "load",
    "names",
    "parse_ratio",
]
