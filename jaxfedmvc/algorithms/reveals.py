"""What the messages of each method are, and what they tell of single rows.

The figures behind the sentences are those of `experiments.leakage`; the documentation's page on
comparison methods has them.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxfedmvc.algorithms.registry import Method

# What travels, from what tells least of single rows to what tells most.
KINDS = {
    "nothing": "nothing",
    "noise": "numbers under noise that is calibrated to hide a row",
    "sums": "sums over rows",
    "models": "networks and centres",
    "labels": "a label or a rank for each row",
    "codes": "several numbers for each row",
    "rows": "rows as they are",
    "unknown": "what jaxfedmvc/algorithms/reveals.py does not say",
}


class Reveals(NamedTuple):
    """What a method's messages tell.

    Attributes:
      kind: One of `KINDS`.
      text: What that tells of single rows, in a sentence.
    """

    kind: str
    text: str


_ROWS = Reveals("rows", "All rows are uploaded.")
_NOTHING = Reveals("nothing", "Nothing leaves a client.")
_DPFMPS = Reveals(
    "noise",
    "Differential privacy of a sample, with a large delta from three agents on; but for the ranges"
    " of features and the number of rows.",
)
_CODES = Reveals(
    "codes",
    "A code and soft labels for each row: most of the features, to who knows some of the rows.",
)
REVEALS = {
    "coreset_kmeans": Reveals(
        "rows", "Drawn rows are sent as they are; of the others, how much each matters."
    ),
    "distr_kmeans": Reveals(
        "labels", "A label for each row and the centroids of an agent, to the server."
    ),
    "dpfmps": _DPFMPS,
    "dpfmps_p2est": _DPFMPS,
    "e_fkmvc": Reveals(
        "sums",
        "Sums by cluster, centres of a few rows each at the start, and how many rows are in which"
        " clusters of two views; a cluster of one row is that row, which min_cluster_size keeps"
        " back; what two rounds' sums differ by may be one, too. Each of several starts sends its"
        " own sums.",
    ),
    "fcuif": _CODES,
    "feddmvc": _CODES,
    "fedhk_parafac2": Reveals("sums", "As e_fkmvc, in a shared model of the centres."),
    "fedhk_tucker": Reveals("sums", "As e_fkmvc, in a shared basis of the features."),
    "fedmvl": Reveals("codes", "A factor for each row, which the server works out."),
    "fmcsc": Reveals(
        "models",
        "Networks and centres; whether a row was among a client's, a little. With teach_features"
        " rows, unless sums are secure.",
    ),
    "label_consensus": Reveals(
        "labels",
        "Ten labels for each row, of 2 to 20 clusters, to all agents: two fifths of the features,"
        " to who knows some of the rows.",
    ),
    "local_fmcsc": _NOTHING,
    "local_kmeans": _NOTHING,
    "mgcd": Reveals(
        "codes",
        "A graph of all rows: as much as codes do, seven tenths of it with ten edges a row.",
    ),
    "private_e_fkmvc": Reveals(
        "noise", "Differential privacy of a row, with the guarantee that the run states."
    ),
    "vertcohirf": Reveals(
        "labels",
        "Labels of all rows and ranked ids, and where clusters are refined those nearest to a row,"
        " to all agents: two fifths of the features, to who knows some of the rows.",
    ),
}


def reveals(name: str, method: Method) -> Reveals:
    """Returns what the messages of a method of the table tell."""
    if method.topology == "pooled":
        return _ROWS
    return REVEALS.get(name, Reveals("unknown", "Not known: the method has no entry in REVEALS."))
