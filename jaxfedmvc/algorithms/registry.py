"""What an entry of the table of methods says: everything that a program must know of a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from flax import struct

from jaxfedmvc.algorithm import FederatedAlgorithm

Topology = Literal["horizontal", "vertical", "pooled"]


class Method(NamedTuple):
    """One method; flags, help, axes of sweeps and tables of settings are read off it.

    Attributes:
      make: `(config, hyperparams) -> FederatedAlgorithm`, pure.
      config: A frozen dataclass of static settings: what changes shapes, loop lengths or the
        program. Its docstring says of every field what it is, under "Attributes:". The fields
        `n_clusters`, `n_clients` and `rounds`, where a method has them, are those of the run.
      hyperparams: A `flax.struct` dataclass of numbers that may be traced: what a sweep batches.
        None as a value switches something off and is another program than a number.
      topology: "horizontal": clients hold samples of their own. "vertical": agents hold the same
        samples, each its own features. "pooled": a centralised peer, whose clients upload their
        rows and pay for them in bytes.
      paper: Key of the paper in docs/references.bib; empty for what has none.
      rounds: Rounds of a run unless told otherwise; 0 for methods that have none.
    """

    make: Callable[[Any, Any], FederatedAlgorithm]
    config: type
    hyperparams: type
    topology: Topology
    paper: str
    rounds: int


@struct.dataclass
class NoHyperparams:
    """Of methods that have no number to sweep."""
