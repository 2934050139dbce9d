"""Where a run ends that looks at its clusters after every round: --until_stable and --keep_from.

Without labels, from what clients count: what that asks of them, and the bytes that it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.lib.command import Command, JobSettings
from experiments.lib.text import counted
from jaxfedmvc import engine
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.engine import Traffic
from jaxfedmvc.federation import Federation

# What clients are asked for by each flag.
_ASKED = {"until_stable": "counts of rows by old and new cluster", "keep_from": "cluster sizes"}


def looks_at_rounds(job: JobSettings) -> bool:
    """Whether every round ends with clusters."""
    return any(getattr(job, name) is not None for name in _ASKED)


def check_ends(
    command: Command, config: Any, algorithm: FederatedAlgorithm, federation: Federation
) -> None:
    """Checks that a method has rounds to choose from, and that clients may give what it takes.

    Args:
      command: With the flags.
      config: The method's static settings.
      algorithm: The method.
      federation: The data, of which shapes are read.

    Raises:
      ValueError: It finds its end itself or makes no rounds, is private, or keeps small counts
        back; or its clients share no clusters, or there is no such round, for --keep_from.
    """
    for name, counts in _ASKED.items():
        if (asked := getattr(command.job, name)) is None:
            continue
        why = ""
        if algorithm.done or not algorithm.round:
            does = "finds its end itself" if algorithm.round else "makes no rounds"
            why = f"{command.name} {does}"
        elif command.method.private:
            why = f"epsilon of {command.name} covers no {counts}"
        elif getattr(config, "min_cluster_size", None) is not None:
            why = f"min_cluster_size keeps small clusters back, and {counts} would tell them"
        elif name == "keep_from" and asked > command.rounds:
            raise ValueError(
                f"keep_from: got {asked} with {counted(command.rounds, 'round')}; allowed is one of"
                " the rounds"
            )
        elif name == "keep_from" and not are_shared(engine.traffic(algorithm, federation)):
            why = f"clients of {command.name} share no clusters"
        if why:
            raise ValueError(f"{name}: {why}; allowed is none")


def are_shared(traffic: Mapping[str, Traffic]) -> bool:
    """Tells whether clients share clusters: without an exchange each has its own."""
    return any(map(any, traffic.values()))


def with_ends(
    stages: Mapping[str, Traffic], n_clients: int, k: int, *, stable: bool = False, kept: bool
) -> dict[str, Traffic]:
    """Returns the bytes of the stages where every round ends with clusters, as its own.

    Args:
      stages: Of a run that finds its clusters once.
      n_clients: Clients.
      k: Clusters.
      stable: Whether clients count rows by old and new cluster.
      kept: Whether they send their clusters' sizes and the sum of log q, for everybody's shares.
    """
    up, down = (a + b for a, b in zip(stages["round"], stages["finish"], strict=True))
    each = 4 * n_clients
    if stable:
        up += each * k**2
    if kept:
        up, down = up + each * (k + 1), down + each * k
    return {**stages, "round": Traffic(up, down), "finish": Traffic(0, 0)}
