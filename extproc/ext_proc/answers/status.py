"""The status of a refusal, where it depends on whether waiting helps, and on the client."""
# interpreted: reads a few headers of refused requests

from __future__ import annotations

from typing import Final

from extproc.request.clients import CLIENTS
from extproc.request.http import HttpRequest

_RETRIED: Final = 429
"""Clients wait and try again."""

_FINAL: Final = 400
"""No known client tries again, and most agent programs show the message."""


def choose_status(request: HttpRequest, *, final: bool) -> int:
    """The status of a refusal that makes its client stop; `final`: waiting does not help."""
    headers = request.headers
    known = [client.retries for client in CLIENTS if client.header in headers and client.part in headers[client.header]]
    if any(known):
        return _FINAL
    return _FINAL if final and not known else _RETRIED


def describe_status(*, final: bool) -> str:
    """The same for people."""
    return f"{_FINAL}, or {_RETRIED} for Claude Code" if final else f"{_RETRIED}, or {_FINAL} for clients that retry that"
