"""Sends requests as they are spelled, over HTTP/1.1 and HTTP/2, each on a connection of its own.

HTTP libraries normalize paths, and send no trailers.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import SplitResult

from extproc.cli.probe.spellings import Spelling
from extproc.errors import LoopguardError
from extproc.transport.ask_health import NoAnswerError, read_http2_headers, write_http2_request

_UPSTREAM_TIME = "x-envoy-upstream-service-time"
_TRAILER = ("x-loopguard-probe-trailer", "1")


class ProbeAnswer(NamedTuple):
    """A gateway's answer.

    Attributes:
        status: 0 if there is none.
        reached: the upstream has answered, not Envoy itself.
        error: why there is no answer.
    """

    status: int
    reached: bool = False
    error: str = ""


def send(url: SplitResult, spelling: Spelling, headers: Sequence[tuple[str, str]], seconds: float) -> ProbeAnswer:
    """Send a request and wait for the head of its answer."""
    given = [*headers, *spelling.headers]
    try:
        with _connect(url, seconds, http2=spelling.http2) as connected:
            if spelling.http2:
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
    return ProbeAnswer(answer.status, answer.getheader(_UPSTREAM_TIME) is not None)


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
    given = {name.lower(): value for name, value in headers}
    authority = given.pop("host", url.netloc.rpartition("@")[2])
    pseudo = [(":method", spelling.method), (":scheme", url.scheme), (":path", spelling.path), (":authority", authority)]
    pseudo += [(":protocol", spelling.protocol)] if spelling.protocol else []
    trailers = [_TRAILER] if spelling.trailers else []
    ends = not spelling.protocol
    connected.sendall(write_http2_request([*pseudo, *given.items()], spelling.body, trailers, ends=ends))
    told = read_http2_headers(connected, time.monotonic() + seconds)
    status = told.get(b":status", b"")
    return ProbeAnswer(int(status) if status.isdigit() else 0, _UPSTREAM_TIME.encode() in told)
