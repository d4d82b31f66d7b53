"""Shared by readers of all formats: model calls, their context, and conversions."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from extproc.cli.packed import FilePlace
from extproc.request.document import mend
from extproc.sessions.rates import Usage

NO_USAGE = Usage(0, 0)
BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec for a line that is not JSON, or not as expected."""

_LONGEST_NAME = 200
_MOST_TOKENS = 10**12  # larger values are not the count of a call
_SECONDS_UNTIL = 253_402_300_800  # the year 10,000
_MILLISECONDS_FROM = 100_000_000_000
"""Numbers below this are seconds; below a thousand times as much, milliseconds; and so on."""


class ModelCall(NamedTuple):
    """One call of a model.

    Attributes:
        place: its file and line.
        time: in milliseconds since 1970; 0 if unknown.
        model: empty if unknown.
        usage: its tokens.
        estimated: whether the tokens are estimated from bytes.
        dollars: its cost, if the transcript has it.
        identity: from `identify`, equal in every file with this call; 0 if the format has none.
    """

    place: FilePlace
    time: int = 0
    model: str = ""
    usage: Usage = NO_USAGE
    estimated: bool = False
    dollars: float | None = None
    identity: int = 0


class About(NamedTuple):
    """Whose calls they are.

    Attributes:
        kind: the format's name.
        session: the conversation's name in its file.
        project: the agent's working folder, else the folder of the file.
        agent: the agent's name.
        root: name of the root session, which differs for sub-agents; empty if unknown.
    """

    kind: str
    session: str
    project: str
    agent: str
    root: str = ""


class UnknownLineError(Exception):
    """A line that its reader does not understand.

    Attributes:
        name: a description.
        kind: the kind of problem; see `lines.PROBLEMS`.
    """

    def __init__(self, name: str, kind: str = "unknown_kind") -> None:
        super().__init__(name)
        self.name = name[:_LONGEST_NAME]
        self.kind = kind


def mend_value(value: bytes) -> bytes:
    """Replace lone surrogates, as in bodies: most programs accept them, but msgspec does not."""
    return mend(value) or value if b"\\ud" in value or b"\\uD" in value else value


def cut_name(name: object) -> str:
    """A name of bounded length, for a report; empty for anything but a string."""
    return name[:_LONGEST_NAME] if isinstance(name, str) else ""


def identify(*parts: str | bytes) -> int:
    """Hash the unique parts of a call to 63 bits; never 0."""
    raw = [
        part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") for part in parts
    ]
    return int.from_bytes(blake2b(b"\0".join(raw), digest_size=8).digest(), "big") >> 1 or 1


def name_folder(file: str) -> str:
    """The project of a file without one: its folder."""
    return cut_name(str(Path(file).parent))


def read_time(value: Any) -> int:  # noqa: ANN401  # JSON
    """Convert ISO 8601, or a number of seconds or finer units, to milliseconds; 0 if invalid."""
    if isinstance(value, str):
        if value.isdecimal() and len(value) <= 20:  # noqa: PLR2004  # digits of 64 bits
            return read_time(int(value))
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            return 0
        return round(
            (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1000
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return 0
    while value >= _MILLISECONDS_FROM * 1000:
        value /= 1000
    milliseconds = value * 1000 if value < _MILLISECONDS_FROM else value
    return round(milliseconds) if milliseconds < _SECONDS_UNTIL * 1000 else 0


def count_tokens(value: object) -> int:
    """A number of tokens, or 0 if invalid."""
    return (
        int(value)
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value < _MOST_TOKENS
        else 0
    )


def read_usage(prompt: object, output: object, read: object = 0, written: object = 0) -> Usage:
    """The tokens of a call; `prompt` includes those read from and written to a cache."""
    cached = count_tokens(read), count_tokens(written)
    return Usage(max(0, count_tokens(prompt) - sum(cached)), count_tokens(output), *cached)
