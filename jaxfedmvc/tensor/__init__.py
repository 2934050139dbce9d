"""Low-rank tensor decompositions on one device, as pure functions of arrays.

`tucker` holds the Tucker decomposition (HOSVD, HOOI), `parafac2` the PARAFAC2 decomposition of
ragged slices. Both have a `reconstruct`, and so the modules are exported and not their functions:
`tucker.hooi(x, ranks)`, `parafac2.parafac2(key, slices, rank)`.
"""

from jaxfedmvc.tensor import parafac2, tucker

__all__ = ["parafac2", "tucker"]
