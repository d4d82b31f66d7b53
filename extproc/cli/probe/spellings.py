"""The ways to send one request that a gateway could route to the same upstream, guarded or not."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

HTTP_2, HTTP_3 = 2, 3

HTTP_3_PLAIN = "HTTP/3"
"""The name of the first request over HTTP/3."""

_LETTER = re.compile(r"[A-Za-z](?=[^/]*$)")


class Spelling(NamedTuple):
    """One request.

    Attributes:
        name: for people.
        alias: its path differs from the policy's: an upstream may not know it.
        chunked: HTTP/1.1 without a length.
        version: of HTTP.
        trailers: the request ends in trailers.
        protocol: of an extended CONNECT (RFC 8441, 9220), which is what an upgrade is over HTTP/2 and HTTP/3; empty for none.
    """

    name: str
    path: str
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    alias: bool = False
    chunked: bool = False
    version: int = 1
    trailers: bool = False
    protocol: str = ""


def list_spellings(path: str, mark: str, big: int) -> Iterator[Spelling]:
    """Every spelling of a request for a path; those over HTTP/3, for which gateways have another listener, come last.

    Args:
        path: without the query.
        mark: makes each body another one, so that a probe is no loop.
        big: the size of the large body, in bytes.
    """

    def write(name: str, size: int = 0) -> bytes:
        message = {"role": "user", "content": f"loopguard probe {mark} {name} {'x' * size}"}
        return json.dumps({"model": "loopguard-probe", "messages": [message]}).encode()

    upgrade = (("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-version", "13"))
    key = (("sec-websocket-key", "bG9vcGd1YXJkLXByb2JlIQ=="),)
    yield Spelling("HTTP/1.1", path, body=write("plain"))
    yield Spelling("HTTP/1.1, chunked", path, body=write("chunked"), chunked=True)
    yield Spelling("HTTP/1.1, trailers", path, body=write("trailers"), chunked=True, trailers=True)
    yield Spelling("large body, chunked", path, body=write("big chunked", big), chunked=True)
    yield Spelling("WebSocket upgrade", path, method="GET", headers=upgrade + key)
    yield from _list_framed(HTTP_2, path, write)
    yield from _list_common(1, path, write, big)
    yield from _list_framed(HTTP_3, path, write)
    for spelling in _list_common(HTTP_3, path, write, big):
        yield spelling._replace(name=f"HTTP/3, {spelling.name}")


def _list_framed(version: int, path: str, write: Callable[[str], bytes]) -> Iterator[Spelling]:
    """What differs between HTTP/1.1 and HTTP/2 or HTTP/3."""
    name = f"HTTP/{version}"
    yield Spelling(name, path, body=write(name), version=version)
    yield Spelling(f"{name}, trailers", path, body=write(f"{name} trailers"), version=version, trailers=True)
    yield Spelling(f"{name}, trailers, no body", path, version=version, trailers=True)
    websocket = (("sec-websocket-version", "13"),)
    yield Spelling(f"WebSocket over {name}", path, method="CONNECT", headers=websocket, version=version, protocol="websocket")


def _list_common(version: int, path: str, write: Callable[..., bytes], big: int) -> Iterator[Spelling]:
    """What every version can spell."""
    zipped = gzip.compress(write(f"gzip {version}"))
    yield Spelling("no body", path, version=version)
    yield Spelling("gzip body", path, headers=(("content-encoding", "gzip"),), body=zipped, version=version)
    yield Spelling("large body", path, body=write(f"big {version}", big), version=version)
    yield Spelling("query", f"{path}?loopguard-probe=1", body=write(f"query {version}"), version=version)
    for name, alias in _list_aliases(path):
        yield Spelling(name, alias, body=write(f"{name} {version}"), alias=True, version=version)


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
