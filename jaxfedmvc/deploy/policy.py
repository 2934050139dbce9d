"""What a node agrees to: its operator writes it down, and no job can change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfedmvc import checks
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.deploy.job import Job
from jaxfedmvc.deploy.wire import Refused


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a node agrees to; its operator writes it, and no job can change it.

    Attributes:
      methods: Names of the methods that the node takes part in. A "pooled" one uploads all rows.
      least_clients: Clients that a job must have.
      least_rows: Rows of its own below which the node takes part in nothing.
      shared_keys: Whether the job's seed may be the source of this node's randomness, which lets
        whoever knows it draw the node's noise again.
      share_counts: Whether the table of this node's labels against clusters is sent after a job.
      share_information: Whether the sizes of this node's clusters are, and how much its views tell
        of them; see `metrics.information`.
      most_bytes: Of one request, of the padding that a plan adds to this node's rows, and of the
        initial states of all its clients.
      most_jobs: Jobs whose states lie in the node's folder, finished ones included; a further one
        is refused until some were removed.
      secure: Whether sums must be secure, and over `least_clients` of each kind.
      in_clear: Exchanges of secure jobs whose messages the server may read all the same.
      settings: For each setting named, the `least` and the `most` that a job may have; a job whose
        value is none ("off") is refused, and so is one of a method without that setting. `rounds`
        and `n_clients` bound those of any job, `dp_epsilon` what a private method's run spends.
    """

    methods: tuple[str, ...]
    least_clients: int = 2
    least_rows: int = 1
    shared_keys: bool = False
    share_counts: bool = False
    share_information: bool = False
    most_bytes: int = 2**30
    most_jobs: int = 1000
    secure: bool = False
    in_clear: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError that names the entry."""
        if not self.methods or not all(isinstance(m, str) and m in METHODS for m in self.methods):
            raise checks.wrong(
                "agrees.methods", list(self.methods), f"some of {', '.join(METHODS)}"
            )
        for name in ("least_clients", "least_rows", "most_bytes", "most_jobs"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise checks.wrong(f"agrees.{name}", value, "a whole number, 1 or more")
        for name in ("shared_keys", "share_counts", "share_information", "secure"):
            if type(getattr(self, name)) is not bool:
                raise checks.wrong(f"agrees.{name}", getattr(self, name), "true or false")
        if not isinstance(self.settings, Mapping):
            raise checks.wrong("agrees.settings", self.settings, "a table")
        for name, bounds in self.settings.items():
            is_right = isinstance(bounds, Mapping) and set(bounds) <= {"least", "most"} and bounds
            if not is_right or any(type(x) not in (int, float) for x in bounds.values()):
                raise checks.wrong(f"agrees.settings.{name}", bounds, "{least = ..., most = ...}")
        # Of a misspelt one the node would insist on what no job can have.
        of_methods = (c for m in self.methods for c in (METHODS[m].config, METHODS[m].hyperparams))
        known = {field.name for c in of_methods for field in dataclasses.fields(c)}
        for name in self.settings.keys() - known - {"rounds", "n_clients"}:
            allowed = ", ".join(sorted(known | {"rounds", "n_clients"}))
            raise checks.wrong("agrees.settings", name, f"one of {allowed}")

    @classmethod
    def from_toml(cls, entries: Any) -> Policy:
        """Reads the table `agrees` of a node's file, where tuples are lists.

        Raises:
          ValueError: Names the entry that is wrong.
        """
        if not isinstance(entries, dict) or "methods" not in entries:
            raise ValueError("agrees.methods is missing, a list of names")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in entries:
            if name not in known:
                raise checks.wrong("agrees", name, f"one of {', '.join(known)}")
        lists = {name: entries[name] for name in ("methods", "in_clear") if name in entries}
        for name, given in lists.items():
            if not isinstance(given, list) or not all(isinstance(entry, str) for entry in given):
                raise checks.wrong(f"agrees.{name}", given, "a list of names")
        return cls(**(entries | {name: tuple(given) for name, given in lists.items()}))

    def check(self, job: Job, n_clients: int, n_rows: int) -> None:
        """Refuses a job that asks for more than the operator agreed to.

        Raises:
          Refused: Says what is wanted and what is allowed; no data.
        """
        if job.method not in self.methods:
            raise Refused(
                "policy", f"method: {job.method}; this node agrees to {', '.join(self.methods)}"
            )
        if n_clients < self.least_clients:
            raise Refused(
                "policy", f"clients: {n_clients}; this node wants {self.least_clients} or more"
            )
        if n_rows < self.least_rows:
            raise Refused("policy", "rows: this node has fewer than its operator wants for a job")
        if job.keys == "shared" and not self.shared_keys:
            raise Refused("policy", "keys: shared; this node draws from its own secret")
        if self.secure and job.fraction_bits is None:
            raise Refused("policy", "fraction_bits: none; this node wants secure sums")
        readable = set(job.in_clear) - set(self.in_clear)
        if job.fraction_bits is not None and readable:
            raise Refused("policy", f"in_clear: {sorted(readable)}; not agreed to by this node")
        for name, bounds in self.settings.items():
            try:
                value = n_clients if name == "n_clients" else job.setting(name)
            except ValueError as error:
                raise Refused("policy", f"{error}; this node insists on it") from error
            low, high = bounds.get("least", -np.inf), bounds.get("most", np.inf)
            is_number = type(value) in (int, float)
            if not is_number or not low <= value <= high:
                wanted = f"{low} to {high}" if low > -np.inf and high < np.inf else None
                wanted = wanted or (f"{low} or more" if high == np.inf else f"{high} or less")
                raise Refused("policy", f"{name}: {value}; this node wants {wanted}")
