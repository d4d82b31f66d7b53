"""Log lines as text or JSON, and limits on their rate."""
# interpreted: subclasses of logging's classes, for a few lines

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Set as AbstractSet
from typing import Any, Literal

LogFormat = Literal["text", "json"]


class RateLimit:
    """Lets through a bounded number of events per second and counts the rest."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._second = -1
        self._passed = 0
        self._suppressed = 0

    def admit(self, now: float) -> int | None:
        """None to drop the event, else the number dropped before it; `now` is monotonic."""
        second = int(now)
        if second != self._second:
            self._second, self._passed = second, 0
        if self._passed >= self._per_second:
            self._suppressed += 1
            return None
        self._passed += 1
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed


class Reminder:
    """Lets one event through per interval and counts those in between."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = float("-inf")
        self._events = 0

    def count(self, now: float) -> int:
        """Count an event; returns 0 to drop it, else the number since the last one let through."""
        self._events += 1
        if now < self._next:
            return 0
        self._next = now + self._seconds
        events, self._events = self._events, 0
        return events


def make_extra(**values: object) -> dict[str, Any]:
    """Logging's `extra=`: fields to print after the message, or as members of the JSON line."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def setup(log_format: LogFormat, level: str) -> None:
    """Send every log line to stderr in the chosen format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Text())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for talker in ("watchfiles", "httpx"):  # they log every change of any file, and every request
        logging.getLogger(talker).setLevel(logging.WARNING)


def _stamp(record: logging.LogRecord) -> str:
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        + f".{int(record.msecs):03d}Z"
    )


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        pairs = "".join(
            f" {name}={_quote(value)}" for name, value in getattr(record, "fields", {}).items()
        )
        line = (
            f"{_stamp(record)} {record.levelname.lower():7} "
            f"{escape_controls(record.getMessage())}{pairs}"
        )
        if not record.exc_info:
            return line
        return "\n".join(
            [line, *map(escape_controls, self.formatException(record.exc_info).split("\n"))]
        )


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _stamp(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return write_json({**line, **getattr(record, "fields", {})})


def _convert_unsupported(value: object) -> object:
    return sorted(value, key=str) if isinstance(value, AbstractSet) else str(value)


def escape_controls(text: str) -> str:
    """Make control characters and invalid UTF-8 visible, so that no text can imitate a log line."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def write_json(value: object, indent: int | None = None) -> str:
    """A value as JSON of printable ASCII; `json` alone leaves DEL as it is."""
    return json.dumps(value, indent=indent, default=_convert_unsupported).replace("\x7f", "\\u007f")


def _quote(value: object) -> str:
    """A plain word as it is; any other value as JSON, as it could be misread or break the line."""
    plain = (
        isinstance(value, str)
        and value
        and value.isprintable()
        and not any(mark in value for mark in ' "=')
    )
    return str(value) if plain else write_json(value)
