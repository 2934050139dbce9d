"""Nodes in this process, in place of a network."""

import dataclasses

import numpy as np

from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.deploy import Job, Node
from tests.algorithms import test_common as common

# Agents of the others need a secret that the server does not know.
DEPLOYED = [name for name in sorted(METHODS) if name not in ("dpfmps", "dpfmps_p2est")]

NODE = """
client = {client}
data = "data{client}.npz"
folder = "state{client}"
[agrees]
methods = [{methods}]
least_clients = {least}
shared_keys = {shared}
share_counts = {counts}
{more}
"""


def write_node(folder, client, views, methods, labels=None, **options):
    """Writes a node's data and file; returns the file's path."""
    arrays = {f"view_{v}": x for v, x in views.items()}
    if labels is not None:
        arrays["labels"] = labels
    np.savez(folder / f"data{client}.npz", **arrays)
    filled = {"least": 2, "shared": "true", "counts": "true", "more": ""} | options
    text = NODE.format(client=client, methods=", ".join(f'"{m}"' for m in methods), **filled)
    path = folder / f"node{client}.toml"
    path.write_text(text)
    return path


def write_nodes(folder, federation, methods, **options):
    """Writes a node for each client of a federation, with its labels."""
    paths = {}
    for c, cohort in enumerate(federation.cohorts):
        for k, client in enumerate(np.asarray(cohort.client_ids).tolist()):
            real = np.asarray(cohort.mask[k])
            views = {
                v: np.asarray(x[k])[real]
                for v, x in zip(cohort.view_ids, cohort.views, strict=True)
            }
            labels = np.asarray(federation.labels[c][k])[real]
            paths[client] = write_node(folder, client, views, methods, labels, **options)
    return paths


class Local:
    """Nodes that are called one after another; `lose` and `change` stand for a bad network.

    Attributes:
      handles: Node by identity.
      log: `(identity, request, reply)` of everything.
    """

    def __init__(self, nodes):
        self.handles = {100 + i: node for i, node in enumerate(nodes)}
        self.log = []
        self.lose = lambda identity, request: False
        self.change = lambda identity, reply: reply

    def nodes(self):
        return list(self.handles)

    def ask(self, requests, seconds):
        replies = {}
        for identity, request in requests.items():
            if identity in self.handles and not self.lose(identity, request):
                reply = self.change(identity, self.handles[identity].handle(request))
                self.log.append((identity, request, reply))
                replies[identity] = reply
        return replies


def nodes_of(paths):
    return [Node(path) for path in paths.values()]


def job_of(method, clients, name="job", small=None, **options):
    """The method as the common tests have it, small; or with the settings of `small`."""
    kinds = METHODS[method].config, METHODS[method].hyperparams
    fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    given = {"n_clusters": common.K, "noise": "local"}  # central noise is for secure sums
    given |= common.SMALL.get(method, {}) if small is None else small
    settings = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given.items()
        if name in fields
    }
    defaults = {"rounds": common.ROUNDS, "seed": 7, "keys": "shared"}
    return Job(name, method, clients, settings, **(defaults | options))
