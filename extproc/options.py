"""A command's options, each declared once, as a field of a frozen dataclass with a parser and a help text."""
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
        default: as a user would write it, or a value that is not a string; REQUIRED for none.
        parse: makes the value from a text; its ValueError says what would be right.
        text: what the option is for.
        metavar: the form of its value.
        gather: for a repeatable flag: joins all given values into one text, or makes the value.
    """
    metadata = {"parse": parse, "help": text, "metavar": metavar, "gather": gather, "default": default}
    return field(default=parse(default) if isinstance(default, str) else default, metadata=metadata)


def switch(text: str) -> Any:  # noqa: ANN401  # as dataclasses.field
    """Declare an option that is off unless it is given; `text` says what it is for."""
    return option(False, parse_switch, text)


def choice(text: str, *words: str, default: str = "") -> Any:  # noqa: ANN401  # as dataclasses.field
    """Declare an option that is one of these words, the first of them by default; `text` says what it is for."""

    def parse(given: str) -> str:
        if given not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return given

    return option(default or words[0], parse, text, "|".join(words))


def parse_switch(text: str) -> bool:
    """Parse a switch, which takes no value as a flag; raises ValueError if it is neither yes nor no."""
    word = text.lower()
    if word not in (*_YES, *_NO):
        raise ValueError("must be true or false")
    return word in _YES


def parse_integer(least: int) -> Callable[[str], int]:
    """Make a parser of whole numbers from `least`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            raise ValueError("must be a positive integer" if least == 1 else f"must be a number from {least}")
        return int(text)

    return parse


def parse_number(fits: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    """Make a parser of numbers that fit; `wanted` describes these."""

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
    return parse_number(lambda seconds: least <= seconds <= most, f"a number of seconds from {least:g} to {most:g}")


def make_type(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Adapt a parser to argparse's `type`."""

    def convert(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, not {text!r}") from None

    return convert


def require_together(chosen: DataclassInstance, needed: Sequence[str], wanting: Sequence[str] = ()) -> None:
    """Raise UsageError, naming them, if only some of the `needed` options are given, or a `wanting` one without all of them."""
    missing = [f"--{name.replace('_', '-')}" for name in needed if not getattr(chosen, name)]
    given = [f"--{name.replace('_', '-')}" for name in (*needed, *wanting) if getattr(chosen, name)]
    if missing and given:
        raise UsageError(f"{given[0]} needs {' and '.join(missing)} as well")


def add_flags(parser: argparse.ArgumentParser, declared: type[Options], prefix: str = "") -> None:
    """Add one flag for each option. Flags that are not given stay out of the namespace.

    If there is a prefix for environment variables, the help also names these.
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
    declared: type[Options], flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, prefix: str = ""
) -> Options:
    """Read options from parsed flags, else the environment, else defaults; raises UsageError, saying what would be right."""
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
