"""A command line becomes a `Command`: which method, on which data, run how.

All flags are generated from dataclasses: those of the data, of the job, of the result folder, and
the method's own config and hyper-parameters, read off `METHODS`. Flags live in a `FlagValues` of
their own, so that several commands can be parsed in one process, as a sweep does.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

from absl import flags, logging

from experiments.lib import settings
from experiments.lib.data import DataSettings, HorizontalSettings, VerticalSettings
from experiments.lib.hooks import Hooks, hooks_of
from jaxfedmvc import checks
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.registry import OF_THE_RUN, Method


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """How a method is run.

    Attributes:
      rounds: Most communication rounds; none: as is usual for the method.
      until_stable: A seed ends when the clusters of three rounds running agree with those of the
        round before: an adjusted Rand index of at least this, such as 0.95. Each round then pays
        for the exchanges that give clusters, too. none: all rounds are made.
      keep_from: A seed keeps the clusters of that round of which a view tells most (information),
        without labels, of the rounds from this one on. Each round then pays for the exchanges that
        give clusters, too. none: those of the last round.
      seed: First seed.
      seeds: Number of seeds: of the partition and of the run.
      participation: Share of the clients that take part; or two: of those with all views, and of
        the others.
      resample_participants: Draw who takes part anew every round.
      client_chunk: Clients computed at once, which bounds memory; none: 1 on a CPU, all on an
        accelerator.
      compact: Shrink the arrays between rounds, for methods whose rounds need ever less.
      secure_aggregation: Hide every client's message in the sum of all, by pairwise masks.
      fraction_bits: With secure aggregation, of the masked sums' fixed-point numbers; sums stay
        below 2^(31 - bits); none: 16.
      in_clear: With secure aggregation, phases that are no sums and are sent as they are, such as
        setup[2].
      mesh: Devices that runs and clients are laid out on, such as sweep:2,clients:4; a single run
        has clients alone.
      precision: Of matrix products, where the device has a choice; sums are float32.
    """

    rounds: int | None = None
    until_stable: float | None = None
    keep_from: int | None = None
    seed: int = 0
    seeds: int = 1
    participation: tuple[float, ...] = (1.0,)
    resample_participants: bool = False
    client_chunk: int | None = None
    compact: bool = True
    secure_aggregation: bool = False
    fraction_bits: int | None = None
    in_clear: tuple[str, ...] = ()
    mesh: str | None = None
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        """Raises ValueError that names the setting."""
        if self.rounds is not None and self.rounds < 0:
            raise ValueError(f"rounds: got {self.rounds}; allowed is 0 or more")
        if self.until_stable is not None and not 0 < self.until_stable <= 1:
            raise ValueError(
                f"until_stable: got {self.until_stable}; allowed is a Rand index above 0, up to 1"
            )
        if self.keep_from is not None and self.keep_from < 1:
            raise ValueError(f"keep_from: got {self.keep_from}; allowed is a round, 1 or more")
        if self.seed < 0 or self.seeds < 1 or self.seed + self.seeds > 2**31:
            raise ValueError(
                f"seed, seeds: got {self.seed} and {self.seeds}; allowed are a first seed of 0 or"
                " more, one seed at least, and the last one below 2^31"
            )
        if self.client_chunk is not None and self.client_chunk < 1:
            raise ValueError(f"client_chunk: got {self.client_chunk}; allowed is 1 or more")
        bits = self.fraction_bits
        if bits is not None and not 0 <= bits <= 31:
            raise ValueError(f"fraction_bits: got {bits}; allowed is 0 to 31")
        for name, value in (("fraction_bits", bits), ("in_clear", self.in_clear or None)):
            if value is not None and not self.secure_aggregation:
                raise ValueError(f"{name}: got {value}; allowed with --secure_aggregation only")

    @property
    def masked_bits(self) -> int:
        """Bits after the point of masked sums."""
        return 16 if self.fraction_bits is None else self.fraction_bits

    @property
    def all_seeds(self) -> list[int]:
        """The seeds of the job."""
        return list(range(self.seed, self.seed + self.seeds))


@dataclasses.dataclass(frozen=True)
class FolderSettings:
    """What a job leaves behind, and what it shows meanwhile; changes no result.

    Attributes:
      output_dir: Result folder; none: results/<method>-<set>-<time>/.
      resume: Go on with a job that was killed, in its --output_dir and with the same flags.
      checkpoint_every: Rounds after which a job is saved; 0: never.
      compilation_cache: Where compiled programs are kept; none: in $JAX_COMPILATION_CACHE_DIR, else
        in ~/.cache/jaxfedmvc; empty: nowhere else than that variable says.
      progress: Show on stderr what is compiled, and a bar with the time left.
    """

    output_dir: str | None = None
    resume: bool = False
    checkpoint_every: int = 1
    compilation_cache: str | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        """Checks the number.

        Raises:
          ValueError: It is below 0.
        """
        if self.checkpoint_every < 0:
            raise ValueError(f"checkpoint_every: got {self.checkpoint_every}; allowed is 0 or more")


@dataclasses.dataclass(frozen=True)
class MethodSettings:
    """Which method is run.

    Attributes:
      algorithm: Name of the method.
    """

    algorithm: str = "fmcsc"


# Flags that change no result: a job may go on with others.
FREE_FLAGS = {
    "checkpoint_every",
    "compilation_cache",
    "coordinator",
    "data_dir",
    "output_dir",
    "process_id",
    "progress",
    "resume",
}
# Flags that flags.txt, which starts the same job elsewhere, leaves out.
NOT_WRITTEN = {"output_dir", "resume", "help"}
# Settings of how data of each kind are split.
SPLITS = {
    "horizontal": HorizontalSettings,
    "pooled": HorizontalSettings,
    "vertical": VerticalSettings,
}


class Command(NamedTuple):
    """A parsed command line.

    Attributes:
      name: Of the method.
      method: Its entry in `METHODS`.
      hooks: What its family adds.
      data: Settings of the data.
      split: `HorizontalSettings` or `VerticalSettings`.
      job: Settings of the job.
      folder: Settings of the result folder.
      extra: An instance of each further dataclass that was asked for, the hooks' first.
      flags: All parsed flags.
      arguments: The command line that they were parsed from.
    """

    name: str
    method: Method
    hooks: Hooks
    data: DataSettings
    split: Any
    job: JobSettings
    folder: FolderSettings
    extra: tuple[Any, ...]
    flags: flags.FlagValues
    arguments: tuple[str, ...]

    @property
    def rounds(self) -> int:
        """Most rounds of a run."""
        return self.method.rounds if self.job.rounds is None else self.job.rounds

    def config(self, n_clusters: int | None, n_clients: int) -> Any:
        """Returns the method's static settings.

        Raises:
          ValueError: The method refuses one, or needs to be told the number of clusters.
        """
        fields = {field.name: field for field in dataclasses.fields(self.method.config)}
        needed = "n_clusters" in fields and fields["n_clusters"].default is dataclasses.MISSING
        if n_clusters is None and needed:
            raise ValueError("n_clusters: the data set has no labels to count; give --n_clusters")
        return settings.read(
            self.flags,
            self.method.config,
            n_clusters=n_clusters,
            n_clients=n_clients,
            rounds=self.rounds,
        )

    def hyperparams(self) -> Any:
        """Returns the method's numbers that may be swept."""
        return settings.read(self.flags, self.method.hyperparams)

    def flag_lines(self) -> list[str]:
        """Returns the flags as a --flagfile takes them."""
        return list(settings.flag_lines(self.flags, NOT_WRITTEN))


def value_of(arguments: Sequence[str], flag: str, default: str | None = None) -> str | None:
    """Returns a flag's value before flags are parsed, for what decides which flags there are.

    Raises:
      ValueError: A flagfile cannot be read.
    """
    try:
        expanded = flags.FlagValues().read_flags_from_files(list(arguments))
    except (flags.Error, OSError) as error:
        moved = "; presets lie in experiments/fmcsc/presets, without fmcsc_ in their names"
        hint = moved if "experiments/presets/" in str(error) else ""
        raise ValueError(f"{error}{hint}") from error
    value = default
    for i, argument in enumerate(expanded):
        name, equals, text = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name == flag:
            value = text if equals else "".join(expanded[i + 1 : i + 2])
    return value


def without(arguments: Sequence[str], names: set[str]) -> list[str]:
    """Returns the arguments without these flags, and without the values that follow them."""
    found, skip = [], False
    for argument in arguments:
        name, equals, _ = argument.lstrip("-").partition("=")
        is_flag = argument.startswith("-")
        is_named = is_flag and name in names
        if not is_named and (is_flag or not skip):
            found.append(argument)
        skip = is_named and not equals
    return found


def _method_of(name: str) -> Method:
    """Returns the entry of a method.

    Raises:
      ValueError: There is none of this name.
    """
    if name not in METHODS:
        raise ValueError(
            f"algorithm: got {name!r}; {checks.meant(name, METHODS)}allowed are"
            f" {', '.join(sorted(METHODS))}"
        )
    return METHODS[name]


def parse(
    arguments: Sequence[str], *, algorithm: str = "fmcsc", extra: Sequence[type] = ()
) -> Command:
    """Parses a command line without the program's name.

    Args:
      arguments: Such as ["--algorithm=mgcd", "--seeds=5"].
      algorithm: Where the command line names none.
      extra: Dataclasses of further flags.

    Raises:
      ValueError: Says what is wrong, in one line.
    """
    name = value_of(arguments, "algorithm", algorithm) or algorithm
    method = _method_of(name)
    if method.topology not in SPLITS:
        raise checks.wrong(f"topology of {name}", method.topology, " or ".join(SPLITS))
    hooks = hooks_of(method)
    groups = [DataSettings, SPLITS[method.topology], JobSettings, FolderSettings]
    further = [*([hooks.settings] if hooks.settings else []), *extra]
    values = define_flags(name, [*groups, *further])
    asked = DataSettings(
        dataset=value_of(arguments, "dataset"), data_dir=value_of(arguments, "data_dir")
    )
    own = {"ratio": "1:0"} if method.complete else {}
    for flag, text in (own | dict(hooks.defaults(asked))).items():
        values.set_default(flag, text)
    take(values, arguments, partial(_unknown, name, hooks))
    of_data, split, job, of_folder = (settings.read(values, group) for group in groups)
    more = tuple(settings.read(values, group) for group in further)
    return Command(
        name, method, hooks, of_data, split, job, of_folder, more, values, tuple(arguments)
    )


def define_flags(name: str, groups: Sequence[type]) -> flags.FlagValues:
    """Defines the flags of a method and of these groups of settings."""
    values, method = flags.FlagValues(), _method_of(name)
    flags.DEFINE_boolean("help", False, "Show all flags.", values, "this program")
    settings.define(values, MethodSettings, "this program")
    values.set_default("algorithm", name)
    values["algorithm"].help = f"The method: {', '.join(sorted(METHODS))}."
    for group in groups:
        settings.define(values, group, heading(group))
    settings.define(values, method.config, f"{name}: static", OF_THE_RUN)
    settings.define(values, method.hyperparams, f"{name}: traced, runs that differ share a program")
    return values


def heading(group: type) -> str:
    """Returns what --help shows the flags of a dataclass under."""
    return group.__name__.removesuffix("Settings").lower()


def take(
    values: flags.FlagValues,
    arguments: Sequence[str],
    unknown: Callable[[flags.UnrecognizedFlagError], str],
) -> None:
    """Gives flags the values of a command line without the program's name.

    Args:
      values: The flags.
      arguments: The command line.
      unknown: Says what is wrong where one of them is no flag.

    Raises:
      ValueError: Says what is wrong, in one line.
    """
    try:
        rest = values(["", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        raise ValueError(unknown(error)) from error
    except (flags.Error, OSError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    if rest:
        raise ValueError(f"unexpected arguments {rest}; everything is a flag")


def _unknown(name: str, hooks: Hooks, error: flags.UnrecognizedFlagError) -> str:
    if error.flagname in hooks.replaced:
        return f"{error.flagname}: is no flag any more; {hooks.replaced[error.flagname]}"
    return f"{error.flagname}: is no flag of {name}{did_you_mean(error)} (--help shows all)"


def did_you_mean(error: flags.UnrecognizedFlagError) -> str:
    """Returns absl's guess which flag was meant, as a part of a sentence; empty without one."""
    _, _, names = str(error).partition("Did you mean: ")  # absl keeps them nowhere else
    return f"; did you mean --{names.split()[0].strip(',')}?" if names else ""


# --- Programs -------------------------------------------------------------------------------------


def fail(error: BaseException) -> NoReturn:
    """Prints an error in one line and leaves with exit code 2."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    sys.exit(2)


def checked(build: Callable[[], Any]) -> Any:
    """Returns `build()`, where a ValueError, a missing file or an absent extra is the user's."""
    try:
        return build()
    except (ValueError, OSError, ImportError) as error:
        fail(error)


def shown(show: Callable[[], Any]) -> Any:
    """Returns `show()`, which prints; leaves with exit code 1 if the reader has left, as `head`."""
    try:
        found = show()
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, nor what Python would flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    return found


def parse_or_exit(
    arguments: Sequence[str] | None,
    description: str | None,
    *,
    algorithm: str = "fmcsc",
    extra: Sequence[type] = (),
) -> Command:
    """Parses as `parse` does; help, or one line about what is wrong, ends the program.

    Args:
      arguments: Those of this process if None.
      description: What --help begins with.
      algorithm: See `parse`.
      extra: See `parse`.
    """
    return or_exit(partial(parse, algorithm=algorithm, extra=extra), arguments, description)


def or_exit(
    parse: Callable[[Sequence[str]], Any], arguments: Sequence[str] | None, description: str | None
) -> Any:
    """Returns `parse(arguments)`; help, or one line about what is wrong, ends the program.

    Args:
      parse: Returns something with `flags`.
      arguments: Those of this process if None.
      description: What --help begins with.
    """
    logging.set_verbosity(logging.WARNING)  # jax tells of every backend that is not there
    arguments = sys.argv[1:] if arguments is None else arguments
    asks = {"--help", "-help", "-h"}
    found = checked(lambda: parse([a for a in arguments if a not in asks]))
    if asks & set(arguments):
        shown(lambda: print(f"{description or ''}\n\n{found.flags.get_help()}"))
        sys.exit(0)
    return found
