"""FMCSC: federated multi-view clustering by synergistic contrast.

Chen et al., "Bridging Gaps: Federated Multi-View Clustering in Heterogeneous Hybrid Views",
NeurIPS 2024. Equation numbers are the paper's. Read `method.py` beside algorithm 1 first. What its
exchanges are made of: `settings.py`, the models in `networks.py`, the equations in `objective.py`
and their minimisation in `training.py`, what clients do in `client.py`, what the server makes of it
in `server.py`, noise on the way in `uploads.py`, and what follows the rounds in `centroids.py`, and
in `teaching.py` with its `random_features.py`. `local.py` has no federation.

Some clients hold all views, the others a part of them (in the paper: one). A "kind" is a subset of
views, written as the tuple of view ids; there is one global model for each kind: f_g for all views,
f_g^v for view v alone, and one more for every other subset that some client holds. Partial clients
with several views are treated as the paper treats single-view ones, which generalises to them
without a new term: z of eq. (7) is then each of their views' low-level feature in turn, averaged.

Where this departs from the paper's text or from its published code, BUILD_NOTES.md says why.
"""

from jaxfedmvc.algorithms.fmcsc.local import local_fmcsc
from jaxfedmvc.algorithms.fmcsc.method import fmcsc
from jaxfedmvc.algorithms.fmcsc.settings import FMCSCConfig, FMCSCHyperparams

__all__ = ["FMCSCConfig", "FMCSCHyperparams", "fmcsc", "local_fmcsc"]
