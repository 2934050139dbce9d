"""FMCSC: federated multi-view clustering by synergistic contrast.

Chen et al., "Bridging Gaps: Federated Multi-View Clustering in Heterogeneous Hybrid Views",
NeurIPS 2024. Equation numbers are the paper's. Read `objective.py` beside the paper, equation by
equation, then `method.py` and, for what follows the rounds, `centroids.py`.

Some clients hold all views, the others a part of them (in the paper: one). A "kind" is a subset of
views, written as the tuple of view ids; there is one global model for each kind: f_g for all views,
f_g^v for view v alone, and one more for every other subset that some client holds. Partial clients
with several views are treated as the paper treats single-view ones, which generalises to them
without a new term: z of eq. (7) is then each of their views' low-level feature in turn, averaged.

Where this departs from the paper's text or from its published code, BUILD_NOTES.md says why.
"""

from jaxfedmvc.algorithms.fmcsc.method import fmcsc
from jaxfedmvc.algorithms.fmcsc.model import FMCSCConfig, FMCSCHyperparams

__all__ = ["FMCSCConfig", "FMCSCHyperparams", "fmcsc"]
