"""What an entry of the table of methods says: everything that a program must know of a method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from flax import struct

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm

Topology = Literal["horizontal", "vertical", "pooled"]

# Settings that a run decides: a method asks for them by having a field of this name.
OF_THE_RUN = ("n_clusters", "n_clients", "rounds")


class Method(NamedTuple):
    """One method; flags, help, axes of sweeps and tables of settings are read off it.

    Attributes:
      make: `(config, hyperparams) -> FederatedAlgorithm`, pure.
      config: A frozen dataclass of static settings: what changes shapes, loop lengths or the
        program. Its docstring says of every field what it is, under "Attributes:". The fields of
        `OF_THE_RUN`, where a method has them, are those of the run.
      hyperparams: A `flax.struct` dataclass of numbers that may be traced: what a sweep batches.
        None as a value switches something off and is another program than a number.
      topology: "horizontal": clients hold samples of their own. "vertical": agents hold the same
        samples, each its own features. "pooled": a centralised peer, whose clients upload their
        rows and pay for them in bytes.
      paper: Key of the paper in docs/references.bib; empty for what has none.
      rounds: Rounds of a run unless told otherwise; 0 for methods that have none.
      complete: Whether every client must hold all views.
      private: Whether what travels has noise, whose epsilon is of one run and covers nothing else.
      alone: Whether what clusters a client's rows is found by that client alone, in the run: rows
        that come later are in no cluster.
      own_labels: Whether agents assign samples each by its own features, so that they may differ.
      shares_secret: Whether agents draw from a secret that the server must not know, which real
        nodes do not support.
    """

    make: Callable[[Any, Any], FederatedAlgorithm]
    config: type
    hyperparams: type
    topology: Topology
    paper: str
    rounds: int
    complete: bool = False
    private: bool = False
    alone: bool = False
    own_labels: bool = False
    shares_secret: bool = False

    @property
    def finds_n_clusters(self) -> bool:
        """Whether the method is told no number of clusters."""
        fields = {field.name: field for field in dataclasses.fields(self.config)}
        return "n_clusters" not in fields or fields["n_clusters"].default is None


@struct.dataclass
class NoHyperparams:
    """Of methods that have no number to sweep."""


def configured(
    method: Method, settings: Mapping[str, Any], of_the_run: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Makes the config and the hyper-parameters of a method.

    Args:
      method: An entry of the table.
      settings: Those that differ from the defaults, of both dataclasses, by name.
      of_the_run: Fields that the run decides, some of `OF_THE_RUN`, for methods that have them.

    Raises:
      ValueError: A setting is not there, is missing, is one that the run decides, or is refused by
        the method.
    """
    # Noise that is calibrated for other rounds than are made would protect less than it says.
    for name in settings:
        if name in of_the_run:
            raise ValueError(f"settings: got {name!r}, which the run decides; leave it out of them")
    fields = [f for c in (method.config, method.hyperparams) for f in dataclasses.fields(c)]
    known = [field.name for field in fields if field.name not in of_the_run]
    if unknown := sorted(settings.keys() - set(known)):  # before what was meant is missing
        meant = checks.meant(unknown[0], known)
        raise ValueError(
            f"settings: got {unknown[0]!r}; {meant}allowed is one of {', '.join(known)}"
        )
    left, made = dict(settings), []
    for dataclass in (method.config, method.hyperparams):
        values = {}
        for field in dataclasses.fields(dataclass):
            if field.name in left:
                values[field.name] = left.pop(field.name)
            elif field.name in of_the_run:
                values[field.name] = of_the_run[field.name]
            elif field.default is dataclasses.MISSING:
                raise ValueError(f"settings: {field.name} is missing")
        made.append(dataclass(**values))
    return made[0], made[1]
