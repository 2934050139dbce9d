"""Flags made of dataclasses: what each annotation parses, help, files of flags, every method's."""

import dataclasses
import importlib
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from flax import struct

from experiments.lib import runner, settings, study
from experiments.lib.command import FolderSettings, JobSettings, define_flags, parse
from experiments.lib.data import (
    DataSettings,
    HorizontalSettings,
    VerticalSettings,
    load_clients,
)
from experiments.lib.hooks import Hooks, hooks_of
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.registry import OF_THE_RUN
from tests.helpers import binaries


@dataclasses.dataclass(frozen=True)
class Base:
    """What others inherit.

    Attributes:
      whole: A whole number, whose help goes on
        for a second line.
      left, right: Two fields in one entry.
    """

    whole: int = 3
    left: float = 0.5
    right: float | None = None


@dataclasses.dataclass(frozen=True)
class Everything(Base):
    """Every kind of annotation.

    Attributes:
      right: Said anew: by the heir.
      text: A text.
      maybe_text: A text, or none.
      switch: On or off.
      mode: One of two.
      maybe_mode: One of two, or none.
      widths: Whole numbers.
      rates: Numbers.
      names: Names.
      maybe_names: Names, or none.
      renamed: Its flag has another name.

    Notes: are no entry.
    """

    text: str = "a"
    maybe_text: str | None = None
    switch: bool = True
    mode: Literal["fast", "slow"] = "fast"
    maybe_mode: Literal["fast", "slow"] | None = None
    widths: tuple[int, ...] = (4, 5)
    rates: tuple[float, ...] = ()
    names: tuple[str, ...] = ("b",)
    maybe_names: tuple[str, ...] | None = None
    renamed: float = dataclasses.field(default=1.0, metadata={"flag": "lambda"})


@struct.dataclass
class Numbers:
    """Numbers that may be traced.

    Attributes:
      rate: Of learning.
      limit: At most so many; none: all.
      share_or_count: A share of 1.0 is all, a number of 1 is one.
    """

    rate: jax.Array | float = math.inf
    limit: jax.Array | int | None = None
    share_or_count: jax.Array | float | int = 1.0


def defined(*dataclasses_):
    values = flags.FlagValues()
    for dataclass in dataclasses_:
        settings.define(values, dataclass, "here")
    return values


def parsed(dataclass, *arguments):
    values = defined(dataclass)
    values(["", *arguments])
    return settings.read(values, dataclass)


# --- Parsers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--whole=-7", "whole", -7),
        ("--left=1e-3", "left", 1e-3),
        ("--left=inf", "left", math.inf),
        ("--right=2", "right", 2.0),
        ("--right=none", "right", None),
        ("--text=none", "text", "none"),
        ("--text=a,b c", "text", "a,b c"),
        ("--maybe_text=None", "maybe_text", None),
        ("--maybe_text=some", "maybe_text", "some"),
        ("--noswitch", "switch", False),
        ("--switch=true", "switch", True),
        ("--mode=slow", "mode", "slow"),
        ("--mode= slow", "mode", "slow"),
        ("--maybe_mode=slow", "maybe_mode", "slow"),
        ("--maybe_mode=none", "maybe_mode", None),
        ("--widths=256,256, 512", "widths", (256, 256, 512)),
        ("--widths=256x256", "widths", (256, 256)),
        ("--widths=", "widths", ()),
        ("--rates=1e-3,2", "rates", (1e-3, 2.0)),
        ("--rates=1e+3,2", "rates", (1e3, 2.0)),
        ("--names=a+b", "names", ("a", "b")),
        ("--names=a box,b", "names", ("a box", "b")),
        ("--maybe_names=none", "maybe_names", None),
        ("--maybe_names=", "maybe_names", ()),
        ("--lambda=4", "renamed", 4.0),
    ],
)
def test_every_annotation_has_its_parser(argument, name, value):
    found = getattr(parsed(Everything, argument), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--rate=0.5", "rate", 0.5),
        ("--limit=4", "limit", 4),
        ("--limit=none", "limit", None),
        ("--share_or_count=1", "share_or_count", 1),
        ("--share_or_count=1.0", "share_or_count", 1.0),
        ("--share_or_count=-1", "share_or_count", -1),
    ],
)
def test_array_types_are_passed_over_and_whole_numbers_stay_whole(argument, name, value):
    found = getattr(parsed(Numbers, argument), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--whole=1.5", "whole.*1.5.*a whole number"),
        ("--whole=none", "whole.*none.*a whole number"),
        ("--left=much", "left.*much.*a number"),
        ("--right=much", "right.*much.*a number, or none"),
        ("--mode=middling", "mode.*middling.*fast or slow"),
        ("--maybe_mode=middling", "maybe_mode.*middling.*fast or slow, or none"),
        ("--widths=4,x", "widths.*4,x.*whole numbers with commas"),
        ("--rates=1x2", "rates.*1x2.*numbers with commas"),
        ("--switch=perhaps", "switch=perhaps: allowed is true or false"),
    ],
)
def test_what_cannot_be_parsed_says_what_is_allowed(argument, message):
    with pytest.raises(flags.IllegalFlagValueError, match=message):
        parsed(Everything, argument)


def test_defaults_are_those_of_the_dataclass():
    assert parsed(Everything) == Everything()
    assert parsed(Numbers) == Numbers()


def test_a_default_may_be_set_as_text():
    values = defined(Everything)
    for name, text in (("widths", "1x2"), ("mode", "slow"), ("right", "0.25"), ("switch", "false")):
        values.set_default(name, text)
    values([""])
    found = settings.read(values, Everything)
    assert found == Everything(widths=(1, 2), mode="slow", right=0.25, switch=False)


def test_a_dataclass_is_read_with_fixed_values_for_fields_without_a_flag():
    values = flags.FlagValues()
    settings.define(values, Everything, "here", skip=("whole", "text"))
    values([""])
    assert "whole" not in values and "left" in values
    assert settings.read(values, Everything, whole=9, unknown=1) == Everything(whole=9)
    # What is fixed stays so where there is a flag of that name, too.
    values(["", "--left=2"])
    assert settings.read(values, Everything, left=4.0, whole=3) == Everything(left=4.0)


# --- Help -----------------------------------------------------------------------------------------


def test_help_is_the_entry_of_the_docstring_and_heirs_have_that_of_their_bases():
    help_texts = settings.described(Everything)
    assert help_texts["whole"] == "A whole number, whose help goes on for a second line."
    assert help_texts["left"] == "Two fields in one entry."
    assert help_texts["right"] == "Said anew: by the heir."
    assert help_texts["renamed"] == "Its flag has another name."
    assert "Notes" not in help_texts
    shown = " ".join(defined(Everything).get_help().split())
    assert "--lambda: Its flag has another name. (default: '1.0') (a number)" in shown
    assert "--mode: One of two. (default: 'fast') (fast or slow)" in shown


def test_a_field_that_nobody_describes_and_one_that_no_flag_parses_are_errors():
    @dataclasses.dataclass
    class Silent:
        """Says nothing."""

        rate: float = 1.0

    @dataclasses.dataclass
    class Odd:
        """An annotation of two kinds.

        Attributes:
          rate: Of what.
        """

        rate: dict = dataclasses.field(default_factory=dict)

    with pytest.raises(TypeError, match=r"Silent\.rate: has no entry"):
        settings.settings_of(Silent)
    with pytest.raises(TypeError, match=r"Odd\.rate: no flag can parse"):
        settings.settings_of(Odd)


# --- Files of flags -------------------------------------------------------------------------------


def test_flag_lines_start_the_same_job_again(tmp_path):
    arguments = (
        "--widths=7x8",
        "--rates=0.1,inf",
        "--names=a,b",
        "--maybe_names=",
        "--noswitch",
        "--right=0.1",
        "--maybe_mode=slow",
        "--lambda=1e-9",
        "--text=two words",
    )
    values = defined(Everything)
    values(["", *arguments])
    lines = list(settings.flag_lines(values, leave_out={"whole"}))
    assert not any(line.startswith("--whole") for line in lines)
    assert not any("maybe_text" in line for line in lines)  # None as it was
    path = tmp_path / "flags.txt"
    path.write_text("\n".join(lines))
    again = defined(Everything)
    again(["", f"--flagfile={path}"])
    assert settings.read(again, Everything) == settings.read(values, Everything)


def test_flag_lines_say_none_where_a_number_is_switched_off():
    values = defined(Everything)
    values.set_default("right", "0.5")
    values(["", "--right=none"])
    assert "--right=none" in settings.flag_lines(values, set())


# --- Every method's -------------------------------------------------------------------------------

_JOB = {"n_clusters": 3, "n_clients": 4, "rounds": 5}


@pytest.mark.parametrize("dataclass", [DataSettings, JobSettings, FolderSettings])
def test_every_setting_of_a_job_is_described(dataclass):
    assert all(len(setting.help) > 10 for setting in settings.settings_of(dataclass))


@pytest.mark.parametrize("name", METHODS)
def test_every_field_of_a_method_is_a_flag_of_its_own_with_help(name):
    method = METHODS[name]
    split = VerticalSettings if method.topology == "vertical" else HorizontalSettings
    of_family = [hooks_of(method).settings] if hooks_of(method).settings else []
    # A name that two of them have raises DuplicateFlagError.
    values = define_flags(name, [DataSettings, split, JobSettings, FolderSettings, *of_family])
    for dataclass in (method.config, method.hyperparams):
        for setting in settings.settings_of(dataclass):
            if setting.name in OF_THE_RUN:
                continue
            assert values[setting.flag].help == setting.help
            # A sentence that can be read alone.
            assert len(setting.help) > 10 and setting.help.endswith("."), setting.name


@pytest.mark.parametrize("name", METHODS)
def test_defaults_of_a_method_come_back_from_their_own_flag_lines(name):
    method = METHODS[name]
    values = define_flags(name, [])
    values([""])
    again = define_flags(name, [])
    again(["", *settings.flag_lines(values, {"help"})])
    for dataclass in (method.config, method.hyperparams):
        found = settings.read(again, dataclass, **_JOB)
        names = {field.name for field in dataclasses.fields(dataclass)}
        plain = dataclass(**{field: value for field, value in _JOB.items() if field in names})
        assert dataclasses.astuple(found) == dataclasses.astuple(plain)


def test_an_unknown_flag_is_an_error_with_a_guess():
    with pytest.raises(ValueError, match="tau_n: is no flag of fmcsc; did you mean --tau_m"):
        parse(["--tau_n=0.5"], algorithm="fmcsc")


def test_a_method_of_another_package_has_no_additions_of_ours():
    """Neither those of a family of its module's name, nor what is no family."""

    def make(config, hyperparams=None):
        raise AssertionError("nothing is made")

    for module in ("mgcd", "lib", "elsewhere.algorithms.mgcd"):
        make.__module__ = module
        assert hooks_of(METHODS["mgcd"]._replace(make=make)) == Hooks()
    assert hooks_of(METHODS["mgcd"]) != Hooks()


def test_a_topology_that_there_is_none_of_is_named(monkeypatch):
    entry = METHODS["fmcsc"]._replace(topology="sideways")
    monkeypatch.setitem(METHODS, "mine", entry)
    text = "topology of mine: got 'sideways'; allowed is horizontal or pooled or vertical"
    with pytest.raises(ValueError, match=text):
        parse([], algorithm="mine")


def test_names_of_precisions_mean_what_they_say_on_every_device():
    assert [runner.matmul_precision(p, "cpu") for p in ("float32", "tf32", "bfloat16")] == [
        "float32",
        "tensorfloat32",
        "bfloat16",
    ]
    # Known to JAX, too, and lowered as such for CUDA.
    for precision, text in (("tf32", "tf32"), ("bfloat16", "bf16")):
        with jax.default_matmul_precision(runner.matmul_precision(precision, "gpu")):
            product = jax.jit(lambda x: x @ x).trace(jnp.ones((4, 4)))
        assert text in product.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("fedhk.study", ()),
        ("leakage.__main__", ()),
        ("reproduce", ("--paper=mgcd",)),
        ("reproduce", ("--paper=vertcohirf",)),
        ("robustness.__main__", ()),
        ("vertcohirf.attack", ()),
        ("vertcohirf.unsupervised", ()),
    ],
)
def test_precision_is_a_flag_of_studies_too(name, arguments):
    main = importlib.import_module(f"experiments.{name}").main
    code, out, _ = binaries.launch(main, *arguments, "--help")
    assert code == 0 and "--precision" in out


def test_the_precision_of_a_study_holds_once_its_command_line_is_read():
    before = jax.config.jax_default_matmul_precision
    try:
        study.parse_or_exit(("--precision=bfloat16",), None, {JobSettings: ("seed",)})
        assert jax.config.jax_default_matmul_precision == "bfloat16"
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def test_clients_may_scale_by_their_own_rows_alone():
    given = DataSettings(dataset="digits", scale="minmax")
    (problem,) = load_clients(given, HorizontalSettings(scale_by="client"), [0])
    for cohort in problem.federation.cohorts:
        for x in map(np.asarray, cohort.views):
            for rows, mask in zip(x, np.asarray(cohort.mask), strict=True):
                low, high = rows[mask].min(axis=0), rows[mask].max(axis=0)
                assert (low == 0).all() and set(high) <= {0.0, 1.0} and 1.0 in high
    pooled = load_clients(given, HorizontalSettings(), [0])[0].federation.cohorts[0].views[0]
    assert not np.array_equal(pooled, problem.federation.cohorts[0].views[0])
    with pytest.raises(ValueError, match="scale_by: got 'client' with --scale=auto"):
        load_clients(DataSettings(dataset="digits"), HorizontalSettings(scale_by="client"), [0])
