"""An HTTP/1.1 load generator: POSTs over keep-alive connections, one in flight on each."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from time import perf_counter
from typing import Protocol

from tests.bench import samples

_TENANTS = 1_000
_KEYS = 8
_TIMEOUT = 120


class Owner(Protocol):
    """Of connections: hears when one is ready for a request, and counts answers."""

    statuses: Counter[str]

    def ready(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """A keep-alive connection with one request in flight."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport
        self._owner.ready(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if end and len(body) >= int(length[1] if length else 0):
            self._received = b""
            self._owner.statuses[head[9:12].decode()] += 1
            self._owner.ready(self)

    # The base class's signature
    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._owner.lost(self)


class _Load:
    def __init__(self, requests: Iterator[bytes], connections: int) -> None:
        self.statuses: Counter[str] = Counter()
        self.done = asyncio.Event()
        self._requests = requests
        self._left = connections

    def ready(self, connection: Connection) -> None:
        request = next(self._requests, None)
        if request is None:
            connection.transport.close()
        else:
            connection.transport.write(request)

    def lost(self, _: Connection) -> None:
        self._left -= 1
        if not self._left:
            self.done.set()


def request(number: int, length: int) -> bytes:
    """The chat with this number. The same number is the same request."""
    body = samples.chat_body(number, length)
    head = (
        f"POST {samples.PATH} HTTP/1.1\r\nhost: {samples.HOST}\r\nuser-agent: OpenAI/Python "
        "3.54.0\r\n"
        "accept: application/json\r\naccept-encoding: gzip, deflate\r\ncontent-type: "
        "application/json\r\n"
        f"authorization: Bearer sk-{number % _KEYS:016}\r\nx-user-id: user-{number % _TENANTS}\r\n"
        "x-stainless-lang: python\r\nx-stainless-retry-count: 0\r\ncontent-length: "
        f"{len(body)}\r\n\r\n"
    )
    return head.encode() + body


def write_chats(first: int, count: int, length: int = 1024) -> Iterator[bytes]:
    return (request(number, length) for number in range(first, first + count))


async def load(port: int, connections: int, requests: Iterator[bytes], count: int) -> float:
    """Seconds until `count` requests are answered, one in flight on each connection.

    Raises RuntimeError unless all get 200.
    """
    loop, owner = asyncio.get_running_loop(), _Load(requests, connections)
    started = perf_counter()
    async with asyncio.timeout(_TIMEOUT):
        for _ in range(connections):
            await loop.create_connection(lambda: Connection(owner), "127.0.0.1", port)
        await owner.done.wait()
    if owner.statuses != {"200": count}:
        raise RuntimeError(f"{count} requests were answered {dict(owner.statuses)}")
    return perf_counter() - started
