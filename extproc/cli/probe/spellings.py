"""The ways to send one request that a gateway could route to the same upstream, guarded or not."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

_LETTER = re.compile(r"[A-Za-z](?=[^/]*$)")


class Spelling(NamedTuple):
    """One request.

    Attributes:
        name: for people.
        alias: its path differs from the policy's: an upstream may not know it.
        chunked: HTTP/1.1 without a length.
        http2: over HTTP/2; otherwise, HTTP/1.1.
        trailers: the request ends in trailers.
        protocol: of an extended CONNECT (RFC 8441), which is what an upgrade is over HTTP/2; empty for none.
    """

    name: str
    path: str
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    alias: bool = False
    chunked: bool = False
    http2: bool = False
    trailers: bool = False
    protocol: str = ""


def list_spellings(path: str, mark: str, big: int) -> Iterator[Spelling]:
    """Every spelling of a request for a path.

    Args:
        path: without the query.
        mark: makes each body another one, so that a probe is no loop.
        big: the size of the large body, in bytes.
    """

    def write(name: str, size: int = 0) -> bytes:
        message = {"role": "user", "content": f"loopguard probe {mark} {name} {'x' * size}"}
        return json.dumps({"model": "loopguard-probe", "messages": [message]}).encode()

    yield Spelling("HTTP/1.1", path, body=write("plain"))
    yield Spelling("HTTP/1.1, chunked", path, body=write("chunked"), chunked=True)
    yield Spelling("HTTP/1.1, trailers", path, body=write("trailers"), chunked=True, trailers=True)
    yield Spelling("HTTP/2", path, body=write("http2"), http2=True)
    yield Spelling("HTTP/2, trailers", path, body=write("http2 trailers"), http2=True, trailers=True)
    yield Spelling("HTTP/2, trailers, no body", path, http2=True, trailers=True)
    yield Spelling("no body", path)
    yield Spelling("gzip body", path, headers=(("content-encoding", "gzip"),), body=gzip.compress(write("gzip")))
    yield Spelling("large body", path, body=write("big", big))
    yield Spelling("large body, chunked", path, body=write("big chunked", big), chunked=True)
    upgrade = (("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-version", "13"))
    key = (("sec-websocket-key", "bG9vcGd1YXJkLXByb2JlIQ=="),)
    yield Spelling("WebSocket upgrade", path, method="GET", headers=upgrade + key)
    version = upgrade[-1:]
    yield Spelling("WebSocket over HTTP/2", path, method="CONNECT", headers=version, http2=True, protocol="websocket")
    yield Spelling("query", f"{path}?loopguard-probe=1", body=write("query"))
    for name, alias in _list_aliases(path):
        yield Spelling(name, alias, body=write(name), alias=True)


def list_names() -> list[str]:
    """The names of all requests."""
    return [spelling.name for spelling in list_spellings("/a/b", "", 0)]


def _list_aliases(path: str) -> Iterator[tuple[str, str]]:
    """Other spellings of a path, which some servers read as the same."""
    head, _, last = path.rpartition("/")
    yield "//", f"/{path}"
    yield "trailing slash", path.removesuffix("/") if last == "" and head else f"{path}/"
    yield "/./", f"/.{path}"
    yield "/../", f"/loopguard-probe/..{path}"
    if _LETTER.search(path):
        yield "percent-encoded letter", _LETTER.sub(lambda found: f"%{ord(found[0]):02X}", path, count=1)
        yield "upper case", path.upper()
    if head:
        yield "%2F", f"{head}%2F{last}"
