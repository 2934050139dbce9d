"""FedDMVC and FCUIF: vertical clustering where the server's clusters teach the agents' encoders.

Read `client.py` and `server.py`, equation by equation, then `method.py`.
"""

from jaxfedmvc.algorithms.fcuif.method import fcuif, feddmvc
from jaxfedmvc.algorithms.fcuif.settings import (
    FCUIFConfig,
    FCUIFHyperparams,
    FedDMVCConfig,
    FedDMVCHyperparams,
)

__all__ = [
    "FCUIFConfig",
    "FCUIFHyperparams",
    "FedDMVCConfig",
    "FedDMVCHyperparams",
    "fcuif",
    "feddmvc",
]
