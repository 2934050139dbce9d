"""Flags generated from dataclasses: a field's annotation, default and docstring are the flag.

    define(values, FMCSCConfig)      # one flag a field
    config = read(values, FMCSCConfig, n_clusters=10)

The annotation chooses the parser (bool, int, float, str, `Literal`, tuples of these but bool, each
also with `| None`, and int with a `Literal`), the class docstring's "Attributes:" the help. Array
types in an annotation are passed over: hyper-parameters are numbers on the command line. A field's
metadata may give the flag another name, `{"flag": "lambda"}`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from absl import flags


class Setting(NamedTuple):
    """One field of a dataclass, as a flag.

    Attributes:
      name: Of the field.
      flag: Of the flag.
      kind: Annotation without `None` and array types: a type, a `Literal`, `tuple[T, ...]`, or int
        with a `Literal` as a pair.
      optional: Whether None is a value.
      default: None where the field has no default.
      help: From the docstring of the class.
    """

    name: str
    flag: str
    kind: Any
    optional: bool
    default: Any
    help: str


def settings_of(dataclass: type) -> list[Setting]:
    """Lists the fields of a dataclass as flags.

    Raises:
      TypeError: A field has an annotation that no flag can parse, or no entry in the docstring.
    """
    hints, help_texts = get_type_hints(dataclass), described(dataclass)
    found = []
    for field in dataclasses.fields(dataclass):
        where = f"{dataclass.__name__}.{field.name}"
        kind, optional = _kind(hints[field.name], where)
        if field.name not in help_texts:
            raise TypeError(f"{where}: has no entry under 'Attributes:' in the class docstring")
        default = None if field.default is dataclasses.MISSING else field.default
        flag = field.metadata.get("flag", field.name)
        found.append(Setting(field.name, flag, kind, optional, default, help_texts[field.name]))
    return found


def flags_of(dataclass: type) -> list[str]:
    """Returns the names of a dataclass' flags."""
    return [setting.flag for setting in settings_of(dataclass)]


def described(dataclass: type) -> dict[str, str]:
    """Returns the entries under "Attributes:" of a class and its bases, by field name."""
    found: dict[str, str] = {}
    for base in reversed(dataclass.__mro__):
        text = inspect.cleandoc(base.__dict__.get("__doc__") or "")
        _, _, attributes = text.partition("Attributes:\n")
        for entry in re.split(r"\n(?=  \w)", "\n" + attributes.split("\n\n")[0]):
            if match := re.match(r"\s*([\w, ]+):\s(.*)", entry, re.DOTALL):
                for name in match[1].split(","):
                    found[name.strip()] = " ".join(match[2].split())
    return found


def define(
    values: flags.FlagValues, dataclass: type, module: str, skip: tuple[str, ...] = ()
) -> None:
    """Defines a flag for each field of a dataclass, but for those in `skip`.

    Args:
      values: Where the flags are defined.
      dataclass: With documented fields.
      module: Heading that `--help` shows the flags under.
      skip: Names of fields without a flag.
    """
    for setting in settings_of(dataclass):
        if setting.name in skip:
            continue
        if setting.kind is bool:
            flag: flags.Flag = flags.BooleanFlag(setting.flag, setting.default, setting.help)
            flag.parser = _BooleanParser()
        else:
            parser = _Parser(*_parse_function(setting.kind), setting.optional)
            flag = flags.Flag(parser, _Serializer(), setting.flag, setting.default, setting.help)
        flags.DEFINE_flag(flag, values, module)


def read(values: flags.FlagValues, dataclass: type, **fixed: Any) -> Any:
    """Makes an instance of a dataclass from its flags.

    Args:
      values: Parsed flags.
      dataclass: Whose flags `define` has defined.
      **fixed: Values of fields without a flag; those that the dataclass does not have are left out.

    Raises:
      ValueError: The dataclass refuses a value.
    """
    names = {field.name for field in dataclasses.fields(dataclass)}
    given = {name: value for name, value in fixed.items() if name in names}
    for setting in settings_of(dataclass):
        if setting.name not in given and setting.flag in values:
            given[setting.name] = values[setting.flag].value
    return dataclass(**given)


# --- Parsers --------------------------------------------------------------------------------------


def _kind(hint: Any, where: str) -> tuple[Any, bool]:
    """Returns an annotation without None and array types, and whether None was among them."""
    union = get_origin(hint) in (Union, types.UnionType)
    members = get_args(hint) if union else (hint,)
    simple = [m for m in members if m in (int, float, bool, str)]
    simple += [m for m in members if get_origin(m) in (Literal, tuple)]
    if float in simple and int in simple:
        simple = ["number"]
    if len(simple) == 2 and simple[0] is int and get_origin(simple[1]) is Literal:
        simple = [tuple(simple)]
    if len(simple) != 1:
        raise TypeError(f"{where}: no flag can parse the annotation {hint}")
    return simple[0], type(None) in members


class _Parser(flags.ArgumentParser):
    """Parses text by a function; "none" is None where that is a value."""

    def __init__(self, parse: Any, what: str, optional: bool) -> None:
        self.syntactic_help = f"{what}, or none" if optional else what
        self._parse, self._what, self._optional = parse, what, optional

    def parse(self, argument: Any) -> Any:
        """Returns the value of a text, or a default as it is.

        Raises:
          ValueError: Says what is allowed.
        """
        if not isinstance(argument, str):
            return argument
        if self._optional and argument.lower() == "none":
            return None
        try:
            return self._parse(argument.strip())
        except ValueError as error:
            raise ValueError(f"allowed is {self.syntactic_help}") from error

    def flag_type(self) -> str:
        """Names the kind of value for `--help`."""
        return self._what


class _BooleanParser(flags.BooleanParser):
    """Parses as absl does, and says what is allowed in the words of the other flags."""

    def parse(self, argument: Any) -> bool:
        """Returns the truth of a text.

        Raises:
          ValueError: Says what is allowed.
        """
        try:
            return super().parse(argument)
        except (ValueError, TypeError) as error:
            raise ValueError("allowed is true or false") from error


def _parse_function(kind: Any) -> tuple[Any, str]:
    """Returns a function from text to a value, and what it takes, in words."""
    if kind == "number":
        return _number, "a number"
    if isinstance(kind, tuple):
        (first, one), (second, other) = map(_parse_function, kind)
        return partial(_either, first, second), f"{one} or {other}"
    if kind in (int, float, str):
        return kind, {int: "a whole number", float: "a number", str: "text"}[kind]
    if get_origin(kind) is Literal:
        return _one_of(get_args(kind)), " or ".join(map(str, get_args(kind)))
    inner = get_args(kind)[0]
    parse, what = _parse_function(inner)
    # 256x256 and a+b stand in a grid, where a comma ends the value.
    separator = {int: r",|(?<=\d)x(?=\d)", float: ","}.get(inner, r",|\+")

    def several(text: str) -> tuple:
        return tuple(parse(item.strip()) for item in re.split(separator, text)) if text else ()

    many = "names" if inner is str else f"{what.removeprefix('a ')}s"
    return several, f"{many} with commas"


def _number(text: str) -> int | float:
    """Whole numbers stay such: a share of 1.0 and a number of 1 mean different things."""
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)


def _either(first: Any, second: Any, text: str) -> Any:
    try:
        return first(text)
    except ValueError:
        return second(text)


def _one_of(allowed: tuple) -> Any:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(text)
        return text

    return parse


class _Serializer(flags.ArgumentSerializer):
    """Writes a value as its parser reads it."""

    def serialize(self, value: Any) -> str:
        """Returns the text of a value."""
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# --- For files and documentation ------------------------------------------------------------------


def flag_lines(values: flags.FlagValues, leave_out: set[str]) -> Iterator[str]:
    """Yields the flags that have a value, one a line, as a --flagfile takes them."""
    for name in sorted(values):
        flag = values[name]
        if name in leave_out or flag.value is flag.default is None:
            continue
        yield flag.serialize() if flag.value is not None else f"--{name}=none"
