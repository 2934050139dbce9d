"""Bad input gets one clear error: what was given, and what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Iterable
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

_Hyperparams = TypeVar("_Hyperparams")

# The usual rules of `numbers`.
POSITIVE = (lambda x: (x > 0) & np.isfinite(x), "a finite number above 0")
SHARE = (lambda x: (x >= 0) & (x <= 1), "from 0 to 1")
NOT_NEGATIVE = (lambda x: (x >= 0) & np.isfinite(x), "a finite number, 0 or more")
ABOVE_ONE = (lambda x: (x > 1) & np.isfinite(x), "a finite number above 1")
BELOW_ONE = (lambda x: (x >= 0) & (x < 1), "0 or more, and below 1")


def wrong(name: str, got: Any, allowed: str) -> ValueError:
    """Returns the error to raise for an argument: its name, its value and what is allowed."""
    return ValueError(f"{name}: got {got!r}; allowed is {allowed}")


def meant(name: str, known: Iterable[str]) -> str:
    """Returns which of the known names was probably meant, as a part of a sentence; else ""."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {close[0]!r}? " if close else ""


def settings(
    config: Any, kind: type, hyperparams: _Hyperparams | None, numbers: type[_Hyperparams]
) -> _Hyperparams:
    """Returns the hyper-parameters of a method, the defaults if None.

    Raises:
      ValueError: One of the two is not of the method's own class.
    """
    hyperparams = numbers() if hyperparams is None else hyperparams
    for name, given, own in (("config", config, kind), ("hyperparams", hyperparams, numbers)):
        if not isinstance(given, own):
            raise wrong(name, given, f"an instance of {own.__name__}")
    return hyperparams


def has_nan(tree: Any) -> bool:
    """Says whether a number of a tree, on the host or on a device, is NaN."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]  # and no keys
    return any(np.isnan(x).any() for x in jax.device_get(floats))


def whole(
    name: str, value: Any, least: int, most: int | None = None, *, optional: bool = False
) -> None:
    """Checks that an argument is a whole number of a range.

    Args:
      name: What the error calls it.
      value: What was given.
      least: Smallest number that is allowed.
      most: Largest; None: there is none.
      optional: Whether None is allowed, too.

    Raises:
      ValueError: It is out of range, or no whole number.
    """
    if optional and value is None:
        return
    allowed = f"{least} or more" if most is None else f"{least} to {most}"
    if optional:
        allowed += ", or None"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise wrong(name, value, f"a whole number, {allowed}")
    if value < least or (most is not None and value > most):
        raise wrong(name, value, allowed)


def number(name: str, value: Any, rule: tuple[Callable[[Any], Any], str]) -> None:
    """Checks that an argument is one real number, and its value where it is not traced.

    Args:
      name: What the error calls it.
      value: What was given.
      rule: (a predicate, what is allowed, in words), such as `POSITIVE`.

    Raises:
      ValueError: It is no scalar, no real number, or breaks the rule. NaN breaks every rule.
    """
    is_right, allowed = rule
    is_traced = isinstance(value, jax.core.Tracer)
    array = value if is_traced else np.asarray(value)
    kinds = (jnp.floating, jnp.integer)
    is_real = array.ndim == 0 and any(jnp.issubdtype(array.dtype, kind) for kind in kinds)
    if not is_real or not (is_traced or is_right(array)):
        raise wrong(name, value, allowed)


def floats(name: str, values: Any) -> jax.Array:
    """Returns real numbers as a float32 array; a cast alone would drop imaginary parts.

    Raises:
      ValueError: They are complex, no numbers, or no array.
    """
    try:
        is_complex = jnp.iscomplexobj(values)
        array = values if is_complex else jnp.asarray(values, jnp.float32)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of real numbers: {error}") from error
    if is_complex:
        raise ValueError(f"{name} must be an array of real numbers, got complex ones")
    return array


def mask(where: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns which rows count as an array of bools of this shape; all of them if None.

    Raises:
      ValueError: `where` has another shape.
    """
    where = jnp.ones(shape, bool) if where is None else jnp.asarray(where, bool)
    if where.shape != shape:
        raise wrong("where", where.shape, f"the shape {shape}")
    return where


def at_least(settings: Any, least: int, *names: str) -> None:
    """Checks that these fields of `settings` are whole numbers, `least` or more.

    None passes where the field's annotation has it, which then says what it means.

    Raises:
      ValueError: Names the first field that is smaller, or no whole number.
    """
    for name in names:
        value = getattr(settings, name)
        if value is None and _may_be_none(settings, name):
            continue
        whole(name, value, least)


def _may_be_none(settings: Any, name: str) -> bool:
    """Whether a field's annotation has None; without an annotation, it may be."""
    hint = get_type_hints(type(settings)).get(name)
    return hint is None or type(None) in get_args(hint)


def widths(settings: Any, name: str) -> None:
    """Checks that a field is a tuple of widths of layers, whole numbers of 1 or more.

    Raises:
      ValueError: Names the field.
    """
    value = getattr(settings, name)
    allowed = "widths of 1 or more, such as (256, 128)"
    if not isinstance(value, tuple | list):
        raise wrong(name, value, allowed)
    for width in value:
        is_whole = isinstance(width, int | np.integer) and not isinstance(width, bool)
        if not is_whole or width < 1:
            raise wrong(name, value, allowed)


def up_to(n_clusters: int) -> tuple[Callable[[Any], Any], str]:
    """Returns the rule of `numbers` for how many of all clusters are in use."""
    return lambda k: (k >= 1) & (k <= n_clusters), f"1 to {n_clusters}, n_clusters"


def choices(settings: Any) -> None:
    """Checks the fields of a dataclass whose annotation is a `Literal`, a `bool` or a `tuple`.

    Of a tuple it checks that there are entries to look at, and no more. Tuples of whole numbers
    have rules of their own, such as `widths`.

    None is right where the annotation has it. Fields of several other types are passed over.

    Raises:
      ValueError: Names the first field with a value that is none of its literals, no bool or no
        tuple.
    """
    hints = get_type_hints(type(settings))
    for field in dataclasses.fields(settings):
        hint, value = hints[field.name], getattr(settings, field.name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kind, *others = (kind for kind in kinds if kind is not NoneType)
        if others or (value is None and NoneType in kinds):
            continue
        allowed = None
        if get_origin(kind) is Literal and value not in get_args(kind):
            allowed = " or ".join(map(repr, get_args(kind)))
        # Whatever is no bool would be true, "no" as well.
        if kind is bool and not isinstance(value, bool | np.bool_):
            allowed = "True or False"
        is_tuple = get_origin(kind) is tuple and int not in get_args(kind)
        if is_tuple and not isinstance(value, Collection):
            allowed = "a tuple"
        if allowed is not None:
            raise wrong(field.name, value, allowed + ", or None" * (NoneType in kinds))


def numbers(settings: Any, rules: dict[str, tuple[Callable[[Any], Any], str]]) -> None:
    """Checks hyper-parameters that are concrete; traced ones pass, and None where it is a choice.

    A traced number has no value to check, and out of its range it may give plausible results
    without a NaN. Whoever traces numbers makes a method with each of them before. An array is no
    number, traced or not: without `vmap` it would be taken for a number for each row or cluster.

    Args:
      settings: A dataclass of numbers.
      rules: Name -> (a predicate of arrays, what is allowed, in words).

    Raises:
      ValueError: Names the first number that breaks its rule. NaN breaks every rule.
    """
    for name, (is_right, allowed) in rules.items():
        value = getattr(settings, name)
        if value is None and _may_be_none(settings, name):
            continue
        if shape := np.shape(value):
            raise wrong(name, f"an array of shape {shape}", "a number: vmap over several")
        if isinstance(value, jax.core.Tracer):
            continue
        array = np.asarray(value)
        kinds = (jnp.floating, jnp.integer, jnp.bool_)  # complex numbers have an order in NumPy
        is_number = any(jnp.issubdtype(array.dtype, kind) for kind in kinds)
        if not is_number or not np.all(is_right(array)):
            # Where Python reserves the name, such as lambda, the flag has it and the field another.
            field = getattr(settings, "__dataclass_fields__", {}).get(name)
            flag = None if field is None else field.metadata.get("flag")
            raise wrong(f"{name} (--{flag})" if flag else name, value, allowed)
