"""Connections as they come, over real sockets and on both event loops: a flood of one address does not keep another waiting."""

from __future__ import annotations

import asyncio
import itertools
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from extproc.settings import parse_address
from extproc.sockets import open_listening_socket
from extproc.transport import acceptor
from extproc.transport.acceptor import Acceptor
from tests.support.harness import PATIENCE
from tests.support.transport import LOOPS

FLOOD, INNOCENT = "127.0.0.2", "127.0.0.3"


class Place:
    """An acceptor whose handshakes end when they are told to."""

    def __init__(self, seconds: float | None) -> None:
        """Listen."""
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.most = 0
        self.finish = asyncio.Event()
        listening = open_listening_socket(parse_address("127.0.0.1:0"))
        self.where = listening.getsockname()
        self.clients: list[socket.socket] = []
        self.acceptor = Acceptor(listening, self._connect, lambda: True, seconds)

    async def _connect(self, connection: socket.socket) -> None:
        who = connection.getpeername()[0]
        self.begun.append(who)
        self.most = max(self.most, len(self.begun) - len(self.ended))
        over = asyncio.ensure_future(self.finish.wait())
        hung_up = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(connection, 100))
        with connection:
            while not over.done() and not (hung_up.done() and not hung_up.result()):
                await asyncio.wait({over, hung_up}, return_when=asyncio.FIRST_COMPLETED)
                if hung_up.done() and hung_up.result():
                    hung_up = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(connection, 100))
            for task in (over, hung_up):
                task.cancel()
        self.ended.append(who)

    def connect(self, source: str, data: bytes = b"hello") -> socket.socket:
        """A client at that address that has said that much."""
        client = socket.create_connection(self.where, PATIENCE, (source, 0))
        client.sendall(data)
        self.clients.append(client)
        return client

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it."""
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110  # polling is what a bystander can do
                await asyncio.sleep(0.001)

    def close(self) -> None:
        """End everything."""
        self.acceptor.close()
        for client in self.clients:
            client.close()


Run = Callable[..., None]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Run steps beside an acceptor on each event loop."""

    def scenario(steps: Callable[[Place], Awaitable[None]], seconds: float | None = PATIENCE) -> None:
        async def main() -> None:
            place = Place(seconds)
            try:
                await steps(place)
            finally:
                place.finish.set()
                place.close()

        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(main())

    return scenario


def test_an_address_that_floods_does_not_keep_another_waiting(run: Run) -> None:
    """With hundreds of handshakes of one address in line, another's that comes last begins in the next turn."""

    async def steps(place: Place) -> None:
        place.acceptor._scheduled = True  # no turn comes for a while
        for _ in range(500):
            place.connect(FLOOD)
        await place.until(lambda: place.acceptor._lined == 500)
        place.connect(INNOCENT)
        await place.until(lambda: place.acceptor._lined == 501)
        place.acceptor._begin_some()
        await place.until(lambda: INNOCENT in place.begun)

        assert place.begun.index(INNOCENT) < acceptor._BEGUN_PER_TURN

    run(steps)


def test_a_turn_begins_few_handshakes(run: Run) -> None:
    """However many peers have spoken, a turn of the event loop begins no more than its share."""

    async def steps(place: Place) -> None:
        seen = []

        def count() -> None:
            seen.append(len(place.begun))
            if len(place.begun) < 300:
                asyncio.get_running_loop().call_soon(count)

        for _ in range(300):
            place.connect(FLOOD)
        count()
        await place.until(lambda: len(place.begun) == 300)

        assert max(after - before for before, after in itertools.pairwise(seen)) <= acceptor._BEGUN_PER_TURN

    run(steps)


def test_handshakes_under_way_are_bounded_and_the_flood_pays(run: Run) -> None:
    """Past the bound the oldest handshake of the busiest address is cut off, never one of another address."""

    async def steps(place: Place) -> None:
        place.connect(INNOCENT)
        await place.until(lambda: place.begun == [INNOCENT])
        for _ in range(400):
            place.connect(FLOOD)
        await place.until(lambda: len(place.begun) == 401)
        await place.until(lambda: len(place.ended) == 401 - acceptor._UNDER_WAY)

        assert INNOCENT not in place.ended
        assert place.most < 2 * acceptor._UNDER_WAY  # one that is cut off takes a few turns to end

    run(steps)


def test_silent_connections_are_bounded(run: Run) -> None:
    """Past the bound the connection that has been silent longest is closed, and a client that speaks is served."""

    async def steps(place: Place) -> None:
        for _ in range(acceptor._WAITING + 50):
            place.connect(FLOOD, b"")
            await asyncio.sleep(0)  # or the kernel's queue is full
        place.connect(INNOCENT)
        await place.until(lambda: place.begun == [INNOCENT])

        assert len(place.acceptor._silent) <= acceptor._WAITING
        assert [client.recv(1) for client in place.clients[:50]] == [b""] * 50

    run(steps)


def test_in_a_full_line_the_longest_gives_way(run: Run) -> None:
    """With all places taken by one address that has spoken, its last one goes and another address gets its place."""

    async def steps(place: Place) -> None:
        place.acceptor._scheduled = True  # no turn comes for a while
        for _ in range(acceptor._WAITING):
            place.connect(FLOOD)
            await asyncio.sleep(0)  # or the kernel's queue is full
        await place.until(lambda: place.acceptor._lined == acceptor._WAITING)
        place.connect(INNOCENT)
        await place.until(lambda: INNOCENT in place.acceptor._lines)

        assert place.acceptor._lined == acceptor._WAITING

    run(steps)


def test_who_says_nothing_is_let_go(run: Run) -> None:
    """A connection without a first word ends after the time that a handshake may take."""

    async def steps(place: Place) -> None:
        client = place.connect(FLOOD, b"")
        client.setblocking(False)

        assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), PATIENCE) == b""
        assert place.begun == []

    run(steps, 0.05)


@contextmanager
def few_files(more: int) -> Iterator[None]:
    """This many file descriptors are left to this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as next_one:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one.fileno() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_file_descriptors_it_waits_and_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the system has none left that is logged, and connections are accepted once it has some again."""
    monkeypatch.setattr(acceptor, "_AGAIN_SECONDS", 0.05)

    async def steps(place: Place) -> None:
        with few_files(1):
            place.connect(INNOCENT)
            await place.until(lambda: "cannot accept connections" in caplog.messages)
            assert place.begun == []
        await place.until(lambda: place.begun == [INNOCENT])

    run(steps)


def test_answers_wait_for_no_acknowledgement() -> None:
    """What is accepted sends at once, also where a head and a body are written one after the other."""
    with (
        open_listening_socket(parse_address("127.0.0.1:0")) as listening,
        socket.create_connection(listening.getsockname(), PATIENCE),
    ):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
