"""What readers of all formats have in common: model calls, whose they are, and what was wrong with lines."""

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
"""What msgspec raises for a line that is not JSON, or not as expected."""

_LONGEST_NAME = 200
_MOST_TOKENS = 10**12  # of one call; more is no count
_SECONDS_UNTIL = 253_402_300_800  # the year 10,000
_MILLISECONDS_FROM = 100_000_000_000
"""Larger numbers are no seconds; neither are they milliseconds from this many times a thousand on."""


class ModelCall(NamedTuple):
    """One call of a model.

    Attributes:
        place: where it stands.
        time: in milliseconds since 1970; 0 if unknown.
        model: empty if unknown.
        usage: its tokens.
        estimated: they are estimated from the number of bytes.
        dollars: what it cost, if the transcript says so.
        identity: from `identify`, the same in every file that contains this call; 0 if the format has none.
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
        project: the folder that the agent works in, or else that of the file.
        agent: the agent's name.
        root: name of the session that counts it, which is another one's for sub-agents; empty if the format does not tell.
    """

    kind: str
    session: str
    project: str
    agent: str
    root: str = ""


class UnknownLineError(Exception):
    """A line that is no part of a conversation as far as its reader knows.

    Attributes:
        name: what it is.
        kind: of problem; see `lines.PROBLEMS`.
    """

    def __init__(self, name: str, kind: str = "unknown_kind") -> None:
        super().__init__(name)
        self.name = name[:_LONGEST_NAME]
        self.kind = kind


def mend_value(value: bytes) -> bytes:
    """A JSON value with halves of surrogate pairs replaced, as in bodies: most programs accept them, and msgspec does not."""
    return mend(value) or value if b"\\ud" in value or b"\\uD" in value else value


def cut_name(name: object) -> str:
    """A name for a report: a text of bounded length."""
    return name[:_LONGEST_NAME] if isinstance(name, str) else ""


def identify(*parts: str | bytes) -> int:
    """A number of 63 bits for a call, from what no other call has; never 0."""
    raw = [part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") for part in parts]
    return int.from_bytes(blake2b(b"\0".join(raw), digest_size=8).digest(), "big") >> 1 or 1


def name_folder(file: str) -> str:
    """The project of a file that names none: its folder."""
    return cut_name(str(Path(file).parent))


def read_time(value: Any) -> int:  # noqa: ANN401  # JSON
    """A time in milliseconds since 1970, from ISO 8601 or a number of seconds, milliseconds or finer; 0 if it is none."""
    if isinstance(value, str):
        if value.isdecimal() and len(value) <= 20:  # noqa: PLR2004  # digits of 64 bits
            return read_time(int(value))
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            return 0
        return round((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return 0
    while value >= _MILLISECONDS_FROM * 1000:
        value /= 1000
    milliseconds = value * 1000 if value < _MILLISECONDS_FROM else value
    return round(milliseconds) if milliseconds < _SECONDS_UNTIL * 1000 else 0


def count_tokens(value: object) -> int:
    """A number of tokens; 0 if it is none."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST_TOKENS else 0


def read_usage(prompt: object, output: object, read: object = 0, written: object = 0) -> Usage:
    """The tokens of a call; those of its prompt include what was read from a cache, and written to one."""
    cached = count_tokens(read), count_tokens(written)
    return Usage(max(0, count_tokens(prompt) - sum(cached)), count_tokens(output), *cached)
