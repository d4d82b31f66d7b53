"""The status of a refusal, if it depends on the client and on whether waiting helps."""
# interpreted: runs only for refused requests

from __future__ import annotations

from typing import Final

from extproc.request.clients import CLIENTS, ENDED_BY_NOT_FOUND
from extproc.request.http import HttpRequest

Content = bytes | memoryview | None
"""A request's body; None if it is unreadable."""

_RETRIED: Final = 429
"""Clients wait and retry."""

_FINAL: Final = 400
"""No known client retries, and most agent programs show the message."""


_NOT_FOUND: Final = 404
"""Stops agent programs that retry everything else."""


def choose_status(request: HttpRequest, content: Content, *, final: bool) -> int:
    """The status of a refusal that makes its client stop; `final`: waiting does not help."""
    if (
        final
        and content is not None
        and any(words in bytes(content) for words in ENDED_BY_NOT_FOUND)
    ):
        return _NOT_FOUND
    headers = request.headers
    known = [
        client.retries
        for client in CLIENTS
        if client.header in headers and client.part in headers[client.header]
    ]
    if any(known):
        return _FINAL
    return _FINAL if final and not known else _RETRIED


def describe_status(*, final: bool) -> str:
    """Describe the choice for operators."""
    if final:
        return f"{_FINAL}, or {_RETRIED} for Claude Code, {_NOT_FOUND} for mini-swe-agent"
    return f"{_RETRIED}, or {_FINAL} for clients that retry that"
