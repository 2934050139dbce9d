"""MGCD: graph consistency and diversity for vertical federated multi-view clustering.

Read `client.py` and `server.py` beside the paper, equation by equation, then `method.py`.
"""

from jaxfedmvc.algorithms.mgcd.method import mgcd
from jaxfedmvc.algorithms.mgcd.settings import MGCDConfig, MGCDHyperparams

__all__ = ["MGCDConfig", "MGCDHyperparams", "mgcd"]
