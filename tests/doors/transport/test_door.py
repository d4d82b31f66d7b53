"""The port under attack, on both event loops: one connection does not disturb the others."""

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from extproc.ext_proc.service import Service
from extproc.pb.health_pb2 import HealthCheckRequest
from extproc.settings import parse_address
from extproc.transport import http2
from extproc.transport.fast import FastServer
from extproc.transport.grpc import frame_message
from extproc.transport.headers import ENHANCE_YOUR_CALM
from extproc.transport.health import EXT_PROC, HEALTH, Health
from extproc.transport.http2 import Http2Limits, Pool
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.grpc import body, call
from tests.support.harness import PATIENCE
from tests.support.http2 import HELLO, frame, headers as header_frame
from tests.support.messages import headers
from tests.support.service import make_service, sample

pytestmark = pytest.mark.usefixtures("runner")

PROCESS = f"/{EXT_PROC}/Process".encode()


# Values of headers
def opening(stream: int, path: bytes = PROCESS, **fields: Any) -> bytes:  # noqa: ANN401
    return call(stream, path, **fields)


def message(stream: int, content: bytes) -> bytes:
    return body(stream, frame_message(content))


def check(stream: int) -> bytes:
    return opening(stream, f"/{HEALTH}/Check".encode()) + message(
        stream, HealthCheckRequest().SerializeToString()
    )


def ask(stream: int) -> bytes:
    return message(stream, headers("/", end=True).SerializeToString())


class Client:
    """A bare connection, which reads only when asked to."""

    def __init__(self, where: str) -> None:
        host, _, port = where.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE)
        self.socket.setblocking(False)
        self._received = b""

    def fill(self, data: bytes) -> int:
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while sent < len(data):
                sent += self.socket.send(data[sent : sent + 2**20])
        return sent

    async def send(self, data: bytes) -> None:
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self.socket, data), PATIENCE)

    async def read(self) -> tuple[int, int, int, bytes] | None:
        """The next frame: type, flags, stream, payload; None at the end."""
        while len(self._received) < 9 or len(self._received) < 9 + int.from_bytes(
            self._received[:3], "big"
        ):
            more = await asyncio.wait_for(
                asyncio.get_running_loop().sock_recv(self.socket, 65_536), PATIENCE
            )
            if not more:
                return None
            self._received += more
        size, received = int.from_bytes(self._received[:3], "big"), self._received
        self._received = received[9 + size :]
        return (
            received[3],
            received[4],
            int.from_bytes(received[5:9], "big"),
            received[9 : 9 + size],
        )

    async def read_until(self, kind: int, stream: int, flags: int = 0) -> bytes:
        """The payload of the next frame of that kind, with these flags."""
        while (found := await self.read()) is not None:
            if found[0] == kind and found[2] == stream and found[1] & flags == flags:
                return found[3]
        raise AssertionError("the connection was closed")

    async def read_all(self) -> None:
        while await self.read() is not None:
            pass

    async def end(self, stream: int, status: int = 0) -> None:
        """Read until a call has ended with a status."""
        trailers = await self.read_until(http2.HEADERS, stream, http2.END_STREAM)
        assert b"grpc-status\x01%d" % status in trailers

    async def goodbye(self) -> int:
        """The code with which the connection is ended."""
        payload = await self.read_until(http2.GOAWAY, 0)
        return int(struct.unpack(">I", payload[4:8])[0])


class Door:
    """A server that listens, and clients for it."""

    def __init__(self, server: FastServer, where: str) -> None:
        self.server = server
        self.clients: list[Client] = []
        self._where = where

    def connect(self, data: bytes = HELLO) -> Client:
        client = Client(self._where)
        self.clients.append(client)
        assert client.fill(data) == len(data)
        return client

    async def greet(self, data: bytes = HELLO) -> Client:
        client = self.connect(data)
        await client.read_until(http2.SETTINGS, 0, http2.ACK)
        return client

    async def innocent(self) -> None:
        await self.connect(HELLO + check(1)).end(1)


@asynccontextmanager
# Of FastServer
async def open_door(service: Service | None = None, **more: Any) -> AsyncIterator[Door]:  # noqa: ANN401
    health = Health()
    health.set(serving=True)
    server = FastServer(service or make_service(policy("p", ANY)), health, **more)
    made = Door(server, await server.start(parse_address("127.0.0.1:0")))
    try:
        yield made
    finally:
        for client in made.clients:
            client.socket.close()
        await server.stop(0)


@pytest.fixture
def door(runner: asyncio.Runner) -> Iterator[Door]:
    opened = open_door()
    yield runner.run(opened.__aenter__())
    runner.run(opened.__aexit__(None, None, None))


BUSY = {
    "PING": frame(http2.PING, 0, 0, bytes(8)),
    "empty DATA": frame(http2.DATA, 0, 101),
}


@pytest.mark.parametrize("repeated", BUSY.values(), ids=BUSY.keys())
async def test_busy_connection_does_not_delay_others(repeated: bytes) -> None:
    work = Http2Limits().work

    async with open_door(limits=Http2Limits(patience=10 * work, patience_per_second=0)) as door:
        busy = door.connect(HELLO + opening(101))
        assert busy.fill(repeated * (3_000_000 // len(repeated))) > 50 * work * len(repeated)
        ended = asyncio.ensure_future(busy.goodbye())

        await door.innocent()

        assert not ended.done()
        assert await ended == ENHANCE_YOUR_CALM  # after ten turns


async def test_client_that_never_reads_is_no_longer_read() -> None:
    service = make_service(policy("p", ANY, threshold_identical_requests=2, count_refused=True))
    requests = b"".join([opening(number) + ask(number) for number in range(1, 80_000, 2)])

    async with open_door(service) as door:
        mute = door.connect(
            HELLO + frame(http2.WINDOW_UPDATE, 0, 0, (2**31 - 65_536).to_bytes(4, "big"))
        )
        mute.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sending = asyncio.ensure_future(mute.send(requests))
        before, answered = -1.0, 0.0
        while before != answered:
            await asyncio.sleep(0.3)
            before, answered = (
                answered,
                sample(service, "requests_total", policy="p", mode="enforce", action="reject"),
            )
        await door.innocent()

        assert 0 < answered < 30_000
        assert not sending.done()
        sending.cancel()


async def test_messages_behind_a_held_call_are_bounded() -> None:
    service = make_service(policy("p", ANY, action="throttle", threshold_identical_requests=2))
    pool = Pool(2**20)

    async with open_door(service, pool=pool) as door:
        client = door.connect(HELLO + b"".join(opening(number) + ask(number) for number in (1, 3)))
        await client.read_until(http2.DATA, 3)
        assert service.holds.held == 1

        await client.send(body(3, bytes(16_000)) * 60)

        await client.end(3, 8)
        assert service.holds.held == pool.used == 0
        await door.innocent()


async def test_unfinished_messages_of_all_connections_are_bounded() -> None:
    pool = Pool(2**22)
    start = b"\0" + (60 * 2**20).to_bytes(4, "big")

    async with open_door(pool=pool) as door:
        for _ in range(20):
            greedy = door.connect()
            for number in range(1, 200, 2):
                await greedy.send(opening(number) + body(number, start + bytes(16_000)))
            await greedy.send(check(201))
            await greedy.end(201)
        innocent = door.connect(HELLO + opening(1))
        await innocent.send(body(1, ask(1)[9:29]))
        await door.innocent()
        await innocent.send(body(1, ask(1)[29:]))

        await innocent.end(1)
        assert 0 < pool.used < pool.limit


async def test_health_watches_of_a_connection_are_bounded(door: Door) -> None:
    client = door.connect()
    for number in range(1, 202, 2):
        await client.send(opening(number, f"/{HEALTH}/Watch".encode()) + message(number, b""))

    await client.end(201, 8)
    await client.send(check(203))
    await client.end(203)


@pytest.mark.parametrize("said", [b"", HELLO[:-1]])
async def test_connection_without_a_whole_greeting_is_closed(said: bytes) -> None:
    async with open_door(hello_seconds=0.2) as door:
        half, whole = door.connect(said), door.connect()

        await half.read_all()

        await whole.send(check(1))
        await whole.end(1)


async def test_logs_of_protocol_errors_are_rate_limited(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    for _ in range(300):
        await door.connect(b"GET / HTTP/1.1\r\n\r\n").read_all()

    lines = [record for record in caplog.records if "protocol error" in record.getMessage()]
    assert 0 < len(lines) < 150


NUMBERS = range(1, 24_000, 2)
SHUT = frame(http2.SETTINGS, 0, 0, b"\0\x04\0\0\0\0")
BOMB: dict[str, Any] = {f"x-{number}": b"1" for number in range(300)}
# tests/unit/transport has a flood of every kind.
ATTACKS = {
    "a header bomb (CVE-2016-6581)": opening(1, **BOMB),
    "rapid reset (CVE-2023-44487)": b"".join(
        opening(each) + frame(http2.RST_STREAM, 0, each, bytes(4)) for each in NUMBERS
    ),
    "windows that change (CVE-2019-9511)": b"".join(map(opening, range(1, 1_800, 2)))
    + (SHUT + frame(http2.SETTINGS, 0, 0)) * 6_000,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
async def test_attack_ends_only_its_own_connection(door: Door, attack: bytes) -> None:
    innocent, hostile = door.connect(HELLO + opening(1)), door.connect()
    with contextlib.suppress(ConnectionError):  # it is closed before all is sent
        await hostile.send(attack)

    assert await hostile.goodbye() == ENHANCE_YOUR_CALM
    await innocent.send(ask(1))
    await innocent.end(1)


async def test_metadata_of_any_bytes_is_accepted(door: Door) -> None:
    pairs = (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", PROCESS),
        (b"content-type", b"application/grpc"),
    )
    odd = ((b"x-loopguard-\xff", b"\xfe"), (b"x-loopguard-scope", b"not a scope!"))

    await door.connect(HELLO + header_frame(1, pairs=(*pairs, *odd)) + ask(1)).end(1)


async def test_longest_idle_of_too_many_connections_is_closed() -> None:
    async with open_door(make_service(policy("p", ANY), max_connections=5)) as door:
        live = await door.greet(HELLO + opening(1))
        idle = [await door.greet() for _ in range(4)]
        before = asyncio.get_running_loop().time()
        # Uvloop counts milliseconds
        while asyncio.get_running_loop().time() < before + 0.002:  # noqa: ASYNC110
            await asyncio.sleep(0)
        silent = idle.pop(1)
        for client in idle:
            await client.send(frame(http2.PING, 0, 0, bytes(8)))
            await client.read_until(http2.PING, 0)

        await door.innocent()

        assert await silent.goodbye() == http2.NO_ERROR
        await silent.read_all()
        for client in idle:
            await client.send(check(1))
            await client.end(1)
        await live.send(ask(1))
        await live.end(1)


async def test_calls_begun_after_goaway_are_answered() -> None:
    async with open_door(make_service(policy("p", ANY), max_connections=1)) as door:
        old = await door.greet()
        await door.innocent()
        await old.goodbye()
        await old.send(opening(1))
        while door.server.retiring:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.05)
        await old.send(ask(1))

        await old.end(1)


async def test_new_connection_is_refused_where_all_are_busy() -> None:
    async with open_door(make_service(policy("p", ANY), max_connections=2)) as door:
        # One more than the bound makes room for
        live = [await door.greet(HELLO + opening(1)) for _ in range(3)]
        with pytest.raises((AssertionError, ConnectionResetError)):
            await door.innocent()
        for client in live:
            await client.send(ask(1))
            await client.end(1)
