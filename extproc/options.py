"""A command's options, each declared once as a dataclass field with a parser and a help text."""
# interpreted: reads options, once

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from math import nan
from typing import TYPE_CHECKING, Any, TypeVar

from extproc.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
Value = TypeVar("Value")

REQUIRED: Any = MISSING
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off", "")

ENVIRONMENT_ONLY = "environment only"
"""Replaces a flag's metavar: other users can see a command line, so secrets have no flag."""


def option(
    default: Any,  # noqa: ANN401  # as dataclasses.field
    parse: Callable[[str], Any],
    text: str,
    metavar: str = "",
    *,
    gather: Callable[[list[str]], Any] | None = None,
) -> Any:  # noqa: ANN401  # as dataclasses.field
    """Declare an option.

    Args:
        default: a string as a user would write it, or a value of another type; REQUIRED for none.
        parse: converts a string; its ValueError describes a valid one.
        text: the help text.
        metavar: the form of its value.
        gather: for a repeatable flag: joins all given values into one string, or makes the value.
    """
    metadata = {
        "parse": parse,
        "help": text,
        "metavar": metavar,
        "gather": gather,
        "default": default,
    }
    return field(default=parse(default) if isinstance(default, str) else default, metadata=metadata)


def switch(text: str) -> Any:  # noqa: ANN401  # as dataclasses.field
    """Declare an option that is off unless given; `text` is its help."""
    return option(False, parse_switch, text)


# As dataclasses.field
def choice(text: str, *words: str, default: str = "") -> Any:  # noqa: ANN401
    """Declare an option that takes one of these words, by default the first; `text` is its help."""

    def parse(given: str) -> str:
        if given not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return given

    return option(default or words[0], parse, text, "|".join(words))


def parse_switch(text: str) -> bool:
    """Parse the environment variable of a switch, whose flag takes no value; raises ValueError."""
    word = text.lower()
    if word not in (*_YES, *_NO):
        raise ValueError("must be true or false")
    return word in _YES


def parse_integer(least: int) -> Callable[[str], int]:
    """Make a parser of whole numbers from `least`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            raise ValueError(
                "must be a positive integer" if least == 1 else f"must be a number from {least}"
            )
        return int(text)

    return parse


def parse_number(fits: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    """Make a parser of numbers that pass `fits`; `wanted` describes these."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = nan
        if not fits(number):
            raise ValueError(f"must be {wanted}")
        return number

    return parse


def parse_seconds(least: float, most: float) -> Callable[[str], float]:
    """Make a parser of numbers of seconds in this range."""
    return parse_number(
        lambda seconds: least <= seconds <= most, f"a number of seconds from {least:g} to {most:g}"
    )


def make_type(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Adapt a parser to argparse's `type`."""

    def convert(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, not {text!r}") from None

    return convert


def require_together(
    chosen: DataclassInstance, needed: Sequence[str], wanting: Sequence[str] = ()
) -> None:
    """Raise UsageError if `needed` options are given in part, or a `wanting` one without them."""
    missing = [f"--{name.replace('_', '-')}" for name in needed if not getattr(chosen, name)]
    given = [f"--{name.replace('_', '-')}" for name in (*needed, *wanting) if getattr(chosen, name)]
    if missing and given:
        raise UsageError(f"{given[0]} needs {' and '.join(missing)} as well")


def add_flags(parser: argparse.ArgumentParser, declared: type[Options], prefix: str = "") -> None:
    """Add a flag for each option, named with its environment variable if these have a `prefix`.

    Flags that are not given stay out of the namespace.
    """
    for item in fields(declared):
        if item.metadata["metavar"] == ENVIRONMENT_ONLY:
            continue
        text = _describe(item) + (f" [{prefix}{item.name.upper()}]" if prefix else "")
        more: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": text}
        if item.metadata["parse"] is parse_switch:
            more["action"] = "store_true"
        else:
            more["metavar"] = item.metadata["metavar"]
            more["action"] = "store" if item.metadata["gather"] is None else "append"
        if item.metadata["default"] is REQUIRED:
            more["required"] = True
        parser.add_argument(_name_flag(item), **more)


def _name_flag(item: Field[Any]) -> str:
    return "--" + item.name.replace("_", "-")


def _describe(item: Field[Any]) -> str:
    default = item.metadata["default"]
    shown = "" if default in (False, (), "", None, REQUIRED) else f" (default {default})"
    return f"{item.metadata['help']}{shown}"


def read_options(
    declared: type[Options],
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    prefix: str = "",
) -> Options:
    """Read options from flags, the environment or defaults; UsageError shows a valid form."""
    values: dict[str, Any] = {}
    for item in fields(declared):
        variable = prefix + item.name.upper()
        if item.name in flags:
            given, origin = flags[item.name], _name_flag(item)
        elif environ is not None and variable in environ:
            given, origin = environ[variable], variable
        else:
            continue
        if isinstance(given, list):
            given = item.metadata["gather"](given)
        try:
            values[item.name] = item.metadata["parse"](given) if isinstance(given, str) else given
        except ValueError as error:
            raise UsageError(f"{origin} {error}, not {given!r}") from None
    return declared(**values)
