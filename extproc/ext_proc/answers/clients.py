"""Clients that retry a refused request in spite of `x-should-retry: false`, and the status that stops them."""
# interpreted: reads a few headers of refused requests

from __future__ import annotations

from typing import Final, NamedTuple

from extproc.request.http import HttpRequest

_STATUS: Final = 429
"""Too Many Requests, which most clients show as such."""

_FINAL_STATUS: Final = 400
"""Not retried by any client in the table below."""

AUTO_STATUS: Final = f"{_STATUS}, or {_FINAL_STATUS} if the client is known to retry that"


class _Client(NamedTuple):
    """A client that retries a 429 in spite of `x-should-retry: false`.

    Attributes:
        name: for people.
        header: the header by which it is recognized.
        part: part of the header's value; empty for any value.
    """

    name: str
    header: str
    part: bytes


_CLIENTS: Final = (
    _Client("Vercel AI SDK (2 retries)", "user-agent", b"ai-sdk/"),
    _Client("every AWS SDK (2 retries)", "amz-sdk-request", b""),
    _Client("Google Gen AI SDKs, once they are told to retry (4 retries)", "x-goog-api-client", b"google-genai-sdk/"),
    _Client("SDKs made by Fern, such as Cohere's (2 retries)", "x-fern-sdk-name", b""),
)


def choose_status(request: HttpRequest) -> int:
    """The status of a refusal that stops this client from retrying."""
    headers = request.headers
    for client in _CLIENTS:
        value = headers.get(client.header)
        if value is not None and client.part in value:
            return _FINAL_STATUS
    return _STATUS
