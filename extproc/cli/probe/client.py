"""Sends requests as they are spelled, over HTTP/1.1, HTTP/2 and HTTP/3, each on a connection of its own.

HTTP libraries normalize paths, and send no trailers.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import SplitResult

from extproc.cli.probe.spellings import HTTP_2, HTTP_3, Spelling
from extproc.errors import LoopguardError
from extproc.transport.ask_health import NoAnswerError, read_http2_headers, write_http2_request

_UPSTREAM_TIME = "x-envoy-upstream-service-time"
_TRAILER = ("x-loopguard-probe-trailer", "1")
_HTTP3 = re.compile(r'(?:^|,)\s*h3="([^":]*|\[[^\]"]*\]):([0-9]{1,5})"')
_MOST_PORT = 2**16 - 1

Address = tuple[str, int]


class ProbeAnswer(NamedTuple):
    """A gateway's answer.

    Attributes:
        status: 0 if there is none.
        reached: the upstream has answered, not Envoy itself.
        error: why there is no answer.
        sent: False if this Loopguard cannot send such a request.
        offers: the value of `alt-svc`, which says where a gateway listens for HTTP/3.
    """

    status: int
    reached: bool = False
    error: str = ""
    sent: bool = True
    offers: str = ""


def find_http3(url: SplitResult, offers: str) -> Address | None:
    """Host and UDP port at which `alt-svc` offers HTTP/3 (RFC 7838); None if it does not."""
    found = _HTTP3.search(offers) if url.scheme == "https" else None
    if found is None or int(found[2]) > _MOST_PORT:
        return None
    return found[1].strip("[]") or url.hostname or "", int(found[2])


def send(
    url: SplitResult, spelling: Spelling, headers: Sequence[tuple[str, str]], seconds: float, http3: Address | None = None
) -> ProbeAnswer:
    """Send a request and wait for the head of its answer. `http3` is where to send over HTTP/3."""
    given = [*headers, *spelling.headers]
    try:
        if spelling.version == HTTP_3:
            return _send_http3(http3, url, spelling, given, seconds)
        with _connect(url, seconds, http2=spelling.version == HTTP_2) as connected:
            if spelling.version == HTTP_2:
                return _send_http2(connected, url, spelling, given, seconds)
            return _send_http1(connected, url, spelling, given)
    except TimeoutError:
        return ProbeAnswer(0, error=f"no answer within {seconds:g} s")
    except (OSError, http.client.HTTPException, NoAnswerError, LoopguardError) as error:
        return ProbeAnswer(0, error=str(error) or type(error).__name__)


def _connect(url: SplitResult, seconds: float, *, http2: bool) -> socket.socket:
    host = url.hostname or ""
    plain = socket.create_connection((host, url.port or (443 if url.scheme == "https" else 80)), seconds)
    if url.scheme != "https":
        return plain
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2" if http2 else "http/1.1"])
    encrypted = context.wrap_socket(plain, server_hostname=host)
    if http2 and encrypted.selected_alpn_protocol() != "h2":
        encrypted.close()
        raise NoAnswerError("the gateway does not offer HTTP/2")
    return encrypted


def _send_http1(
    connected: socket.socket, url: SplitResult, spelling: Spelling, headers: Sequence[tuple[str, str]]
) -> ProbeAnswer:
    lines = [f"{spelling.method} {spelling.path} HTTP/1.1"]
    if "host" not in {name.lower() for name, _ in headers}:
        lines.append(f"host: {url.netloc.rpartition('@')[2]}")
    lines += [f"{name}: {value}" for name, value in headers]
    if spelling.chunked:
        lines.append("transfer-encoding: chunked")
    elif spelling.method != "GET":
        lines.append(f"content-length: {len(spelling.body)}")
    head = "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")
    try:
        for part in (head, *_write_body(spelling)):
            connected.sendall(part)
    except (BrokenPipeError, ConnectionResetError):
        pass  # it may have answered before the end of the body
    answer = http.client.HTTPResponse(connected, method=spelling.method)
    answer.begin()
    return ProbeAnswer(answer.status, answer.getheader(_UPSTREAM_TIME) is not None, offers=answer.getheader("alt-svc", ""))


def _write_body(spelling: Spelling) -> Iterator[bytes]:
    if not spelling.chunked:
        yield spelling.body
        return
    yield b"%x\r\n%s\r\n" % (len(spelling.body), spelling.body)
    trailer = "{}: {}\r\n".format(*_TRAILER).encode() if spelling.trailers else b""
    yield b"0\r\n%s\r\n" % trailer


def _send_http2(
    connected: socket.socket, url: SplitResult, spelling: Spelling, headers: Sequence[tuple[str, str]], seconds: float
) -> ProbeAnswer:
    block, trailers = _list_fields(url, spelling, headers)
    connected.sendall(write_http2_request(block, spelling.body, trailers, ends=not spelling.protocol))
    return _read_head(read_http2_headers(connected, time.monotonic() + seconds))


def _send_http3(
    address: Address | None, url: SplitResult, spelling: Spelling, headers: Sequence[tuple[str, str]], seconds: float
) -> ProbeAnswer:
    if address is None:
        raise NoAnswerError("the gateway does not offer HTTP/3")
    try:
        from extproc.cli.probe.http3 import Http3Request, exchange  # noqa: PLC0415  # its library is optional
    except ImportError:
        return ProbeAnswer(0, error="aioquic is not installed: pip install '.[http3]' in a checkout", sent=False)
    block, trailers = (_encode(fields) for fields in _list_fields(url, spelling, headers))
    request = Http3Request(block, spelling.body, trailers, ends=not spelling.protocol)
    return _read_head(exchange(address, (url.hostname or "").encode("idna").decode(), request, seconds))


def _encode(fields: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("utf-8", "surrogateescape")) for name, value in fields]


def _list_fields(
    url: SplitResult, spelling: Spelling, headers: Sequence[tuple[str, str]]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Headers and trailers of a request over HTTP/2 or HTTP/3."""
    given = {name.lower(): value for name, value in headers}
    authority = given.pop("host", url.netloc.rpartition("@")[2])
    pseudo = [(":method", spelling.method), (":scheme", url.scheme), (":path", spelling.path), (":authority", authority)]
    pseudo += [(":protocol", spelling.protocol)] if spelling.protocol else []
    return [*pseudo, *given.items()], [_TRAILER] if spelling.trailers else []


def _read_head(told: Mapping[bytes, bytes]) -> ProbeAnswer:
    status = told.get(b":status", b"")
    return ProbeAnswer(
        int(status) if status.isdigit() else 0,
        _UPSTREAM_TIME.encode() in told,
        offers=told.get(b"alt-svc", b"").decode("latin-1"),
    )
