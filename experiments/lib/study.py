"""Programs that run no single method, such as tables, figures and studies: flags and folders.

    study = parse_or_exit(arguments, __doc__, {AttackSettings: None, JobSettings: ("seed",)})
    settings = study.read(AttackSettings)
    path = study.open("attack")

Flags are fields of documented dataclasses, as everywhere, in a `FlagValues` of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from jax.sharding import Mesh

from experiments.lib import folder as folders
from experiments.lib import plots, settings
from experiments.lib.command import (
    NOT_WRITTEN,
    FolderSettings,
    JobSettings,
    checked,
    did_you_mean,
    heading,
    or_exit,
    take,
)
from experiments.lib.devices import each
from experiments.lib.progress import require_tqdm
from experiments.lib.runner import start_devices
from jaxfedmvc.engine.mesh import parse_mesh
from jaxfedmvc.files import write_text

# A dataclass of flags -> the fields that are flags here; None: all.
Groups = Mapping[type, Sequence[str] | None]
_OF_THE_FOLDER = ("output_dir", "compilation_cache", "resume")

# Flags that earlier versions took from all binaries, whether or not they had a use for them.
_UNUSED: tuple[str, ...] = ("dataset", "scale", "n_clusters", "checkpoint_every", "split", "agents")
_UNUSED += ("feature_order", "overlap", "max_overlap", "overlap_order", "categorical")


class Study(NamedTuple):
    """A parsed command line of a program with flags of its own.

    Attributes:
      flags: All parsed flags.
      folder: Settings of the result folder.
      mesh: Devices that --mesh lays out, or None.
    """

    flags: flags.FlagValues
    folder: FolderSettings
    mesh: Mesh | None = None

    def read(self, dataclass: type) -> Any:
        """Returns an instance of a dataclass, made of its flags.

        Raises:
          ValueError: The dataclass refuses a value.
        """
        return settings.read(self.flags, dataclass)

    def flag_lines(self) -> list[str]:
        """Returns the flags as a --flagfile takes them."""
        return list(settings.flag_lines(self.flags, NOT_WRITTEN))

    def given(self, *groups: type) -> list[str]:
        """Returns those flags of dataclasses that the command line gave."""
        known = {flag for group in groups for flag in settings.flags_of(group)}
        given = {name for name in known if name in self.flags and self.flags[name].present}
        return list(settings.flag_lines(self.flags, set(self.flags) - given))

    def open(self, name: str, data: Mapping[str, str] = {}) -> Path:
        """Makes the result folder, and turns on the cache of compiled programs.

        Args:
          name: For a folder of its own under results/, where --output_dir is not given.
          data: Fingerprints of what is read, see `folder.open_folder`.

        Raises:
          OSError, ValueError, ImportError: Says what is wrong with the folder, or which extra
            the program lacks.
        """
        require_tqdm()
        plots.require_matplotlib()
        folders.use_compilation_cache(self)
        return folders.open_folder(self, name, data)


def parse(
    arguments: Sequence[str],
    groups: Groups,
    defaults: Mapping[str, str] = {},
    *,
    leaves_folder: bool = True,
) -> Study:
    """Parses a command line without the program's name.

    Args:
      arguments: Such as ["--trials=5"].
      groups: Dataclasses of the flags; --precision and --mesh come with those of a job.
      defaults: Flag -> text, where the default differs from the dataclass'.
      leaves_folder: Whether the program leaves a result folder, whose flags it then has: with
        --resume it must go on with a job that was killed.

    Raises:
      ValueError: Says what is wrong, in one line.
    """
    values = flags.FlagValues()
    flags.DEFINE_boolean("help", False, "Show all flags.", values, "this program")
    of_the_folder = ("progress", *_OF_THE_FOLDER * leaves_folder)
    more: dict[type, tuple[str, ...]] = {FolderSettings: of_the_folder}
    if names_of_job := groups.get(JobSettings):
        more[JobSettings] = (*names_of_job, "precision", "mesh")
    for group, names in {**groups, **more}.items():
        every = [setting.name for setting in settings.settings_of(group)]
        skip = tuple(name for name in every if names is not None and name not in names)
        settings.define(values, group, heading(group), skip)
    for flag, text in defaults.items():
        values.set_default(flag, text)
    take(values, arguments, _unknown)
    return Study(values, settings.read(values, FolderSettings))


def _unknown(error: flags.UnrecognizedFlagError) -> str:
    if error.flagname in _UNUSED:
        return f"{error.flagname}: is no flag here; it had no effect here; leave it out"
    return f"{error.flagname}: is no flag here{did_you_mean(error)} (--help shows all)"


def parse_or_exit(
    arguments: Sequence[str] | None,
    description: str | None,
    groups: Groups,
    defaults: Mapping[str, str] = {},
    *,
    leaves_folder: bool = True,
    over_clients: bool = False,
) -> Study:
    """Parses as `parse` does, sets --precision and lays out devices.

    Help, or one line about what is wrong, ends the program.

    Args:
      arguments: Those of this process if None.
      description: What --help begins with.
      groups: See `parse`.
      defaults: See `parse`.
      leaves_folder: See `parse`.
      over_clients: Whether --mesh may lay out the clients of a run, too, and not runs alone.
    """
    parse_here = partial(parse, groups=groups, defaults=defaults, leaves_folder=leaves_folder)
    study = or_exit(parse_here, arguments, description)
    return checked(lambda: _with_devices(study, over_clients)) if JobSettings in groups else study


def _with_devices(study: Study, over_clients: bool) -> Study:
    """Sets --precision and lays devices out, before anything is computed.

    Raises:
      ValueError: The mesh does not fit the devices, or lays out clients where runs are whole.
    """
    job: JobSettings = study.read(JobSettings)
    if job.mesh is not None and not over_clients and "clients" in parse_mesh(job.mesh):
        raise ValueError(
            f"mesh: got {job.mesh!r}; allowed here is sweep:n: n runs at once, each whole on a"
            " device"
        )
    return study._replace(mesh=start_devices(job))


def check_table(flag: str, file: str | None, columns: Sequence[str]) -> None:
    """Checks that a .csv, where a flag names one, has these columns or is new, and can grow.

    Raises:
      ValueError, OSError: It has others, or cannot be written.
    """
    if file is None:
        return
    path = Path(file)
    with path.open("a"):
        pass  # it can grow
    if not path.stat().st_size:
        path.unlink()
        return
    try:
        folders.check_columns(path, columns)
    except folders.OtherColumnsError as error:
        raise ValueError(f"{flag}: {error}") from error


class Rows:
    """Rows of a study in a .csv: each is appended as it is made, and what is there is kept."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        """Reads the rows that are there.

        Args:
          path: Of the file.
          names: Columns that name a run.

        Raises:
          ValueError: The file holds something else.
        """
        self._path, self._names = path, (*names, "seed")
        made = folders.read_appended(path, self._names, dtype=str, keep_default_na=False)
        if not set(self._names) <= set(made):
            raise ValueError(f"output_dir: {str(path)!r} holds something else than rows of runs")
        self._made = set(made[[*self._names]].itertuples(index=False, name=None))

    def left(self, names: Mapping[str, Any], seeds: Sequence[int]) -> list[int]:
        """Returns the seeds whose run of these names has no row yet."""
        return [seed for seed in seeds if self._key({**names, "seed": seed}) not in self._made]

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends a row, unless there is one of its run."""
        if (key := self._key(row)) not in self._made:
            folders.append_rows(self._path, [row])
            self._made.add(key)

    def make(
        self,
        names: Mapping[str, Any],
        run: Callable[[int], Mapping[str, Any]],
        seeds: Sequence[int],
        mesh: Mesh | None,
        done: Callable[[], None],
    ) -> None:
        """Makes the runs of seeds that have no row yet, and appends each as it is made.

        Args:
          names: Of the runs.
          run: `seed -> what else is in the row`; on a mesh from several threads at once.
          seeds: Of the runs.
          mesh: Whose devices take a run each, or None.
          done: Called after each row.
        """
        left = self.left(names, seeds)
        for seed, found in zip(left, each(run, left, mesh), strict=True):
            self.add({**names, "seed": seed, **found})
            done()

    def _key(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in self._names)


def write_summary(path: Path, content: Mapping[str, Any]) -> None:
    """Writes summary.json: the content, and what results depend on."""
    made_by = {"commit": folders.commit(), "device": folders.device()}
    summary = {**content, **made_by, "versions": folders.versions()}
    write_text(path / "summary.json", json.dumps(summary, indent=1) + "\n")
