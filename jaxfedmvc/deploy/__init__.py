"""The same methods on real nodes: what is simulated is what is deployed.

`job` says what is to run, `plan` what each side must know of the others, `exchanges` what travels
and when; `node` is one client with its own file, `server` walks through the exchanges. None of them
knows a transport: the server is given a function that sends bytes to clients and returns what came
back. `flower` is such a transport.
"""

from jaxfedmvc.deploy.job import Job
from jaxfedmvc.deploy.node import Node
from jaxfedmvc.deploy.server import Server, Stopped
from jaxfedmvc.deploy.wire import Refused

__all__ = ["Job", "Node", "Refused", "Server", "Stopped"]
