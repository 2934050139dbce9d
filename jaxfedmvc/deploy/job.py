"""A job: which method with which settings, for how many rounds, and what holds if somebody is late.

name = "first"
method = "e_fkmvc"
rounds = 5
clients = 3

[settings]
n_clusters = 4
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxfedmvc import checks
from jaxfedmvc.algorithm import FederatedAlgorithm
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.fedhk import PrivateFedHKConfig, check_fraction_bits, check_sums_fit
from jaxfedmvc.algorithms.fedhk.accounting import spent
from jaxfedmvc.algorithms.registry import configured
from jaxfedmvc.messages import robust

# Below, the accounting overflows in the end, and nothing is left of the data long before. Beyond,
# nothing is protected.
_LEAST_EPSILON, _MOST_EPSILON = 1e-6, 1000.0


@dataclasses.dataclass(frozen=True)
class Job:
    """What the server asks of all clients; written by whoever starts the federation.

    Attributes:
      name: Of the job, letters, digits, "-" and "_": the same name goes on where it was.
      method: One of `METHODS`, but for DPFMPS.
      clients: Number of clients that the job waits for before it begins.
      settings: Settings of the method that differ from its defaults, by name.
      rounds: Most rounds; the method's own number if None.
      seed: Of the server's randomness; of the clients' too with `keys="shared"`.
      keys: "own": a client's randomness comes from a secret of its own, so that nobody else can
        draw its noise again. "shared": from the seed, so that a run can be repeated to the bit.
      late: What is done about a client that does not answer in time: "wait" for it until
        `patience` is over, or "skip" it after `deadline`, for this exchange alone.
      deadline: Seconds that a client has to answer, compilation included.
      patience: Seconds until a job stops for a client that does not answer; it can go on later. Not
        less than `deadline`, before whose end nobody looks.
      participation: Share of each cohort's clients that take part in the job, drawn once. The
        others take part in no exchange, and find their clusters in the end as late clients do.
      fraction_bits: Bits after the point of secure sums, which the server cannot take apart; None:
        messages travel in clear. See `messages.secure`.
      in_clear: Exchanges whose single messages the server may read all the same, as "setup[2]".
      robust: A rule in the place of sums, as `messages.robust` has it: a table with "rule", the
        rule's own numbers, and "ratios", "centred" and "unguarded", which name exchanges; None:
        plain sums.
    """

    name: str
    method: str
    clients: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rounds: int | None = None
    seed: int = 0
    keys: Literal["own", "shared"] = "own"
    late: Literal["wait", "skip"] = "wait"
    deadline: float = 600.0
    patience: float = 3600.0
    participation: float = 1.0
    fraction_bits: int | None = None
    in_clear: tuple[str, ...] = ()
    robust: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError that names the entry."""
        if not isinstance(self.name, str) or not is_name(self.name):
            raise checks.wrong("name", self.name, "1 to 64 letters, digits, - and _")
        if not isinstance(self.method, str) or self.method not in METHODS:
            raise checks.wrong("method", self.method, " or ".join(METHODS))
        if METHODS[self.method].shares_secret:  # on nodes it would come from the server
            raise ValueError(
                f"method: {self.method} needs a secret that all agents share and that the server"
                " does not know, which nodes do not support"
            )
        _check_numbers(self)
        checks.choices(self)
        if not 0 < self.participation <= 1:
            raise checks.wrong("participation", self.participation, "a share in (0, 1]")
        if self.late == "skip" and METHODS[self.method].topology == "vertical":
            raise ValueError(
                f"late: got 'skip' with {self.method}; allowed is 'wait', since no agent of a"
                " vertical federation can be done without"
            )
        if self.fraction_bits is not None and (self.late == "skip" or self.participation < 1):
            raise ValueError(
                "fraction_bits: secure sums need all clients; allowed with them is late = 'wait'"
                " and participation = 1"
            )
        for name in ("settings", "robust"):
            table = getattr(self, name)
            if not isinstance(table, Mapping) and not (name == "robust" and table is None):
                raise checks.wrong(name, table, "a table of names and values")
        if self.robust is not None and self.fraction_bits is not None:
            raise ValueError(
                "robust: a rule must see each message, which fraction_bits hides; allowed is one"
                " of them"
            )
        config, hyper = self._configured(self.clients)
        if isinstance(config, PrivateFedHKConfig):
            _check_noise(self, config, hyper)
        self.make(self.clients)  # so that wrong settings are found at once

    @property
    def n_rounds(self) -> int:
        """Most rounds of the job."""
        return METHODS[self.method].rounds if self.rounds is None else self.rounds

    def make(self, n_clients: int) -> FederatedAlgorithm:
        """Returns the method with these settings.

        Raises:
          ValueError: A setting is not there, or not of its type, or out of range.
        """
        algorithm = METHODS[self.method].make(*self._configured(n_clients))
        return algorithm if self.robust is None else _guarded(algorithm, self.robust, n_clients)

    def _configured(self, n_clients: int) -> tuple[Any, Any]:
        """Returns the method's config and hyper-parameters."""
        method = METHODS[self.method]
        hints = typing.get_type_hints(method.hyperparams) | typing.get_type_hints(method.config)
        settings = {
            name: _typed(name, value, hints[name]) if name in hints else value
            for name, value in self.settings.items()
        }
        of_the_run = {"n_clients": n_clients, "rounds": self.n_rounds}
        return configured(method, settings, of_the_run)

    def check_sums_fit(self, n_clients: int, view_dims: Sequence[int], rows: int) -> None:
        """Checks that secure sums of central noise can be read, whatever the clients' rows are.

        Args:
          n_clients: Number of clients.
          view_dims: Width of each view.
          rows: Rows of a client at most.

        Raises:
          ValueError: Values of a client may exceed what `fraction_bits` hold.
        """
        config, hyper = self._configured(n_clients)
        is_central = isinstance(config, PrivateFedHKConfig) and config.noise == "central"
        if is_central and self.fraction_bits is not None:
            check_sums_fit(config, hyper, self.fraction_bits, view_dims, rows)

    def setting(self, name: str) -> Any:
        """Returns the value that a setting has in this job.

        `rounds` and `n_clients` are the job's. `dp_epsilon` of a private method is what the run
        spends, which its `noise_multiplier` decides where it has one, and infinite with shared
        keys, of which the server knows the seed and so the noise.

        Raises:
          ValueError: The method has no such setting.
        """
        method = METHODS[self.method]
        if name in ("rounds", "n_clients"):
            return self.n_rounds if name == "rounds" else self.clients
        if name == "dp_epsilon" and issubclass(method.config, PrivateFedHKConfig):
            is_known = self.keys == "shared"
            return math.inf if is_known else spent(*self._configured(self.clients))[0]
        fields = (*dataclasses.fields(method.config), *dataclasses.fields(method.hyperparams))
        for field in fields:
            if field.name == name:
                return self.settings.get(name, field.default)
        raise ValueError(f"{self.method} has no setting {name!r}")

    def to_json(self) -> dict[str, Any]:
        """Returns what goes through JSON."""
        rule = None if self.robust is None else dict(self.robust)
        own = {"settings": dict(self.settings), "in_clear": list(self.in_clear), "robust": rule}
        return dataclasses.asdict(self) | own

    def digest(self) -> str:
        """Returns a hash of everything that both sides must agree on."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def check_folder(self, folder: Path) -> None:
        """Raises ValueError if a folder of results is another job's that has begun."""
        if not (folder / "server.npz").exists():
            return
        text = (folder / "job.json").read_text(encoding="utf-8")
        there = Job.from_json(json.loads(text))
        # By what goes through JSON: a tuple among the settings comes back as a list.
        if there.digest() != self.digest():
            raise ValueError(
                f"folder: {folder} holds another job, or other settings of it; allowed is another"
                " name of the job, or another folder"
            )

    @classmethod
    def from_json(cls, entries: Any) -> Job:
        """Reads a job that came as JSON or TOML, where tuples are lists.

        Raises:
          ValueError: Names the entry that is wrong.
        """
        if not isinstance(entries, Mapping):
            raise checks.wrong("job", entries, "a table of names and values")
        names = [field.name for field in dataclasses.fields(cls)]
        for name in entries:
            if name not in names:
                raise checks.wrong("job", name, f"one of {', '.join(names)}")
        for name in ("name", "method", "clients"):
            if name not in entries:
                raise ValueError(f"job: {name} is missing")
        in_clear = _names("in_clear", entries.get("in_clear", ()))
        return cls(**{**entries, "in_clear": in_clear})

    @classmethod
    def from_toml(cls, path: str | Path) -> Job:
        """Reads a job file.

        Raises:
          ValueError: The file is no TOML, or an entry is wrong; the message names the file.
          OSError: It cannot be read.
        """
        return cls.from_json(read_toml(path))


def is_name(text: str) -> bool:
    """Says whether a job may have this name, which is that of a folder."""
    return re.fullmatch(r"[\w-]{1,64}", text, re.A) is not None


def read_toml(path: str | Path) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
      ValueError: It is none.
      OSError: It cannot be read.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no TOML: {error}") from error


def _check_numbers(job: Job) -> None:
    bits = job.fraction_bits
    if bits is not None and (type(bits) is not int or not 0 <= bits <= 30):
        raise checks.wrong("fraction_bits", bits, "a whole number from 0 to 30")
    for name, least in (("clients", 1), ("rounds", 0), ("seed", 0)):
        value = getattr(job, name)
        if value is None and name == "rounds":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise checks.wrong(name, value, f"a whole number, {least} or more")
    for name in ("deadline", "patience", "participation"):
        value = getattr(job, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise checks.wrong(name, value, "a number above 0")
    if job.patience < job.deadline:
        allowed = f"{job.deadline:g} or more, the deadline, or a shorter deadline"
        raise checks.wrong("patience", job.patience, allowed)


def _check_noise(job: Job, config: PrivateFedHKConfig, hyper: Any) -> None:
    """Checks that the noise of a private method protects what the server reads."""
    if not _LEAST_EPSILON <= config.dp_epsilon <= _MOST_EPSILON and config.dp_epsilon != math.inf:
        allowed = f"{_LEAST_EPSILON:g} to {_MOST_EPSILON:g}, or inf for no noise"
        raise checks.wrong("settings: dp_epsilon", config.dp_epsilon, allowed)
    # Each client has a part of central noise: less than all of them together is not protected.
    if config.noise == "central" and (job.fraction_bits is None or job.in_clear):
        raise ValueError(
            "settings: noise: got 'central', which protects nothing but secure sums of all clients;"
            " allowed with it is fraction_bits without in_clear, and else 'local'"
        )
    if job.fraction_bits is not None:
        check_fraction_bits(config, hyper, job.fraction_bits)


def _names(name: str, given: Any) -> tuple[str, ...]:
    """Returns the names of exchanges in a list."""
    if not isinstance(given, list | tuple) or not all(isinstance(n, str) for n in given):
        raise checks.wrong(name, given, "a list of names such as 'setup[2]'")
    return tuple(given)


def _guarded(
    algorithm: FederatedAlgorithm, table: Mapping[str, Any], n_clients: int
) -> FederatedAlgorithm:
    """Returns the method with its sums made by the rule that a table describes."""
    numbers = dict(table)
    name, ratios = numbers.pop("rule", None), numbers.pop("ratios", {})
    if not isinstance(name, str) or name not in robust.RULES:
        raise checks.wrong("robust: rule", name, " or ".join(robust.RULES))
    named = {
        key: _names(f"robust: {key}", numbers.pop(key, ())) for key in ("centred", "unguarded")
    }
    allowed = "numerators and denominators by exchange, such as {'round[0]': [0, 1]}"
    try:
        known = {str(phase): robust.Ratio(*parts) for phase, parts in ratios.items()}
    except (AttributeError, TypeError) as error:
        raise checks.wrong("robust: ratios", ratios, allowed) from error
    places = [place for ratio in known.values() for place in ratio[:2]]
    limits = [number for ratio in known.values() for number in ratio[2:]]
    if not all(type(p) is int for p in places) or not all(type(x) in (int, float) for x in limits):
        raise checks.wrong("robust: ratios", ratios, allowed)
    parameters = inspect.signature(robust.RULES[name]).parameters
    takes = list(parameters)
    for key, value in numbers.items():
        if key not in takes or type(value) not in (int, float):
            others = ", ".join(["rule", "ratios", "centred", "unguarded", *takes])
            raise checks.wrong(f"robust: {key}", value, f"a number for one of {others}")
    if "share" in takes:
        share = numbers.get("share", parameters["share"].default)
        if 0 <= share * n_clients < 1 - 1e-4:  # as the rules round
            raise ValueError(
                f"robust: share: {share} of {n_clients} clients, rounded down, is nobody; allowed"
                f" is {1 / n_clients:.3g} or more"
            )
    try:
        return robust.robust(algorithm, robust.RULES[name](**numbers), ratios=known, **named)
    except ValueError as error:
        raise ValueError(f"robust: {error}") from error


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Returns a value of a settings file as the field's annotation has it; "none" is None."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    for kind in typing.get_args(hint) if is_union else (hint,):
        origin = typing.get_origin(kind)
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(_typed(name, entry, typing.get_args(kind)[0]) for entry in value)
        if origin is Literal and value in typing.get_args(kind):
            return value
        if kind is type(None) and value in (None, "none"):
            return None
        if isinstance(kind, type) and type(value) is kind:
            return value
    if float in (hint, *typing.get_args(hint)) and type(value) is int and abs(value) < 2**1000:
        return float(value)
    raise checks.wrong(f"settings: {name}", value, str(hint).replace("typing.", ""))
