"""Multi-view data sets and their division over the clients of a federation."""

from jaxfedmvc.data.dataset import Dataset, check_arrays
from jaxfedmvc.data.datasets import load, names, scaled
from jaxfedmvc.data.partition import Part, hybrid_partition, parse_ratio, partition_as_held
from jaxfedmvc.data.synthetic import blobs, multimodal, simplex, unequal
from jaxfedmvc.data.tables import TableOptions, from_frame
from jaxfedmvc.data.vertical import (
    align_agents,
    prepare,
    shuffle_places,
    split_by_importance,
    split_features,
    vertical_partition,
)

__all__ = [
    "Dataset",
    "Part",
    "TableOptions",
    "align_agents",
    "blobs",
    "check_arrays",
    "from_frame",
    "hybrid_partition",
    "load",
    "multimodal",
    "names",
    "parse_ratio",
    "partition_as_held",
    "prepare",
    "scaled",
    "shuffle_places",
    "simplex",
    "split_by_importance",
    "split_features",
    "unequal",
    "vertical_partition",
]
