"""The status of a refusal, where it depends on whether waiting helps, and on the client."""
# interpreted: reads a few headers of refused requests

from __future__ import annotations

from typing import Final, NamedTuple

from extproc.request.http import HttpRequest

_RETRIED: Final = 429
"""Clients wait and try again."""

_FINAL: Final = 400
"""No client in the table below tries again, and most agent programs show the message."""


class _Client(NamedTuple):
    """A client that is known for what it does with a 429.

    Attributes:
        name: for people.
        header: the header by which it is recognized.
        part: part of the header's value; empty for any value.
    """

    name: str
    header: str
    part: bytes


_IMPATIENT: Final = (
    _Client("Vercel AI SDK (2 retries)", "user-agent", b"ai-sdk/"),
    _Client("every AWS SDK (2 retries)", "amz-sdk-request", b""),
    _Client("Google Gen AI SDKs, once they are told to retry (4 retries)", "x-goog-api-client", b"google-genai-sdk/"),
    _Client("SDKs made by Fern, such as Cohere's (2 retries)", "x-fern-sdk-name", b""),
)
"""They retry it in spite of `x-should-retry: false`."""

_OBEDIENT: Final = (_Client("Claude Code", "user-agent", b"claude-cli/"),)
"""They stop, and show the message."""


def choose_status(request: HttpRequest, *, final: bool) -> int:
    """The status of a refusal that makes its client stop; `final`: waiting does not help."""
    if _is_one_of(_IMPATIENT, request):
        return _FINAL
    return _FINAL if final and not _is_one_of(_OBEDIENT, request) else _RETRIED


def describe_status(*, final: bool) -> str:
    """The same for people."""
    return f"{_FINAL}, or {_RETRIED} for Claude Code" if final else f"{_RETRIED}, or {_FINAL} for clients that retry that"


def _is_one_of(clients: tuple[_Client, ...], request: HttpRequest) -> bool:
    headers = request.headers
    return any(client.header in headers and client.part in headers[client.header] for client in clients)
