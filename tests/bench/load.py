"""An HTTP/1.1 load generator: POSTs over keep-alive connections, one in flight on each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from time import perf_counter

from tests.bench import samples

_TENANTS = 1_000
_KEYS = 8
_TIMEOUT = 120


class Client(asyncio.Protocol):
    def __init__(self, requests: Iterator[bytes], statuses: Counter[str]) -> None:
        self._requests = requests
        self._statuses = statuses
        self._received = b""
        self._transport: asyncio.WriteTransport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if end and len(body) >= content_length(head):
            self._received = b""
            self._statuses[head[9:12].decode()] += 1
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)
        if error is not None:
            self._statuses[type(error).__name__] += 1

    def _send(self) -> None:
        assert self._transport is not None
        request = next(self._requests, None)
        if request is None:
            self._transport.close()
            return
        self._transport.write(request)


def request(number: int, length: int) -> bytes:
    """The chat with this number. The same number is the same request."""
    body = samples.chat_body(number, length)
    head = (
        f"POST {samples.PATH} HTTP/1.1\r\nhost: {samples.HOST}\r\nuser-agent: OpenAI/Python 3.54.0\r\n"
        "accept: application/json\r\naccept-encoding: gzip, deflate\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer sk-{number % _KEYS:016}\r\nx-user-id: user-{number % _TENANTS}\r\n"
        f"x-stainless-lang: python\r\nx-stainless-retry-count: 0\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def write_chats(first: int, count: int, length: int = 1024) -> Iterator[bytes]:
    return (request(number, length) for number in range(first, first + count))


def content_length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0] or 0)


async def load(port: int, connections: int, requests: Iterator[bytes], count: int) -> float:
    """Seconds until `count` requests are answered, one in flight on each connection. Raises RuntimeError unless all get 200."""
    loop = asyncio.get_running_loop()
    statuses = Counter[str]()
    clients = [Client(requests, statuses) for _ in range(connections)]
    started = perf_counter()
    async with asyncio.timeout(_TIMEOUT):
        for client in clients:
            await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
        await asyncio.gather(*(client.done for client in clients))
    if statuses != {"200": count}:
        raise RuntimeError(f"{count} requests were answered {dict(statuses)}")
    return perf_counter() - started
