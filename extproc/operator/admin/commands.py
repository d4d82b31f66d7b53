"""Reads the commands of rows back, so that a page's buttons give the orders that it shows."""

from __future__ import annotations

import re
import shlex
from typing import Any, NamedTuple

from extproc.engine.orders import GRANT, MAX_SECONDS
from extproc.errors import BadOrderError, UsageError

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")
_TEXTS = {"--caller", "--session", "--fingerprint", "--tool", "--policy", "--budget"}


class Command(NamedTuple):
    """What a command asks for.

    Attributes:
        order: the order, as for `POST /overrides`; empty if the command revokes one.
        revokes: the name of the override that it revokes, else empty.
    """

    order: dict[str, Any]
    revokes: str = ""


def read_command(text: str) -> Command:
    """Parse a command that a row suggests; raises BadOrderError for any other."""
    try:
        _, kind, *flags = shlex.split(text)
        given = dict(zip(flags[::2], flags[1::2], strict=True))
        if kind == "overrides":
            return Command({}, given.get("--revoke", ""))
        order: dict[str, Any] = {"kind": kind}
        for flag, value in given.items():
            order |= _read_flag(kind, flag, value)
    except (ValueError, UsageError):
        raise BadOrderError(f"this is not a command of a row: {text}") from None
    return Command(order)


def _read_flag(kind: str, flag: str, value: str) -> dict[str, Any]:
    if flag == "--for":
        return {"seconds": read_duration(value)}
    if kind == GRANT and flag == "--tool":
        tool, _, calls = value.rpartition("=")
        return {"tools": {tool: int(calls)}}
    name = flag.removeprefix("--").replace("-", "_")
    if flag in _TEXTS:
        return {name: value}
    return {name: int(value) if value.isdecimal() else float(value)}


def read_duration(text: str) -> int:
    """Parse a duration such as `30m` to seconds; raises UsageError."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--for must be a number with a unit, such as 90s, 30m, 2h or 1d, not {text!r}"
        )
    seconds = int(found[1]) * _UNITS[found[2]]
    if seconds > MAX_SECONDS:
        raise UsageError(f"--for is at most {MAX_SECONDS // _UNITS['d']}d, not {text}")
    return seconds
