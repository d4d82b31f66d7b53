"""How connections are accepted, over real sockets and on both event loops."""

import asyncio
import itertools
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from extproc.settings import parse_address
from extproc.sockets import BACKLOG, open_listening_socket
from extproc.transport.acceptor import Acceptor
from tests.support.harness import PATIENCE
from tests.support.transport import until

FLOOD, INNOCENT = "127.0.0.2", "127.0.0.3"
# Bounds of handshakes that a turn begins, of all, and of connections
BEGUN_PER_TURN, UNDER_WAY, WAITING = (
    4,
    128,
    1_000,
)


class Place:
    """An acceptor whose handshakes last until either side hangs up."""

    def __init__(self, seconds: float | None) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.most = 0
        self.clients: list[socket.socket] = []
        listening = open_listening_socket(parse_address("127.0.0.1:0"))
        self.where = listening.getsockname()
        self.acceptor = Acceptor(listening, self._connect, lambda: True, seconds)

    async def _connect(self, connection: socket.socket) -> None:
        who = connection.getpeername()[0]
        self.begun.append(who)
        self.most = max(self.most, len(self.begun) - len(self.ended))
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
            await reader.read()
            writer.close()
        finally:  # a handshake that is cut off may fail
            self.ended.append(who)

    def connect(self, source: str, times: int = 1, data: bytes = b"hello") -> None:
        for _ in range(times):
            client = socket.create_connection(self.where, PATIENCE, (source, 0))
            client.sendall(data)
            client.setblocking(False)
            self.clients.append(client)

    def find_closed(self) -> list[int]:
        closed = []
        for number, client in enumerate(self.clients):
            try:
                client.recv(1)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                pass
            closed.append(number)
        return closed


@pytest.fixture
def place(runner: asyncio.Runner, request: pytest.FixtureRequest) -> Iterator[Place]:
    async def make() -> Place:
        return Place(getattr(request, "param", PATIENCE))

    made = runner.run(make())
    yield made
    made.acceptor.close()
    for client in made.clients:
        client.close()


async def test_flood_of_one_address_does_not_delay_another(place: Place) -> None:
    place.connect(FLOOD, 800)
    await until(lambda: len(place.begun) > 800 // 3)  # all are in line by then
    before = len(place.begun)
    place.connect(INNOCENT)
    await until(lambda: INNOCENT in place.begun)

    assert before < 600
    assert place.begun.index(INNOCENT) < before + 10 * BEGUN_PER_TURN


async def test_turn_of_the_loop_begins_few_handshakes(place: Place) -> None:
    seen = []

    def count() -> None:
        seen.append(len(place.begun))
        if len(place.begun) < 300:
            asyncio.get_running_loop().call_soon(count)

    place.connect(FLOOD, 300)
    count()
    await until(lambda: len(place.begun) == 300)

    assert max(after - before for before, after in itertools.pairwise(seen)) <= BEGUN_PER_TURN


async def test_oldest_handshake_of_the_busiest_address_is_cut_off(place: Place) -> None:
    place.connect(INNOCENT)
    await until(lambda: place.begun == [INNOCENT])
    place.connect(FLOOD, 400)
    await until(lambda: len(place.begun) == 401)
    await until(lambda: len(place.ended) == 401 - UNDER_WAY)

    assert INNOCENT not in place.ended
    assert place.most < 2 * UNDER_WAY  # one that is cut off takes a few turns to end


async def test_longest_silent_of_too_many_connections_is_closed(place: Place) -> None:
    for _ in range(WAITING + 50):
        place.connect(FLOOD, data=b"")
        await asyncio.sleep(0)  # or the kernel's queue is full
    place.connect(INNOCENT)
    await until(lambda: place.begun == [INNOCENT])

    assert place.find_closed() == list(range(51))


async def test_full_queue_drops_connections_of_the_busiest_address(place: Place) -> None:
    for _ in range(2):  # the line grows by twelve a turn
        place.connect(FLOOD, 900)
        await until(lambda: len(place.begun) > 900 // 16 * BEGUN_PER_TURN)
    place.connect(INNOCENT)
    await until(lambda: len(place.begun) > 1_300)

    assert INNOCENT in place.begun
    assert len(place.find_closed()) > len(place.ended) + 50


@pytest.mark.parametrize("place", [0.05], indirect=True)
async def test_silent_connection_is_closed_after_its_time(place: Place) -> None:
    place.connect(FLOOD, data=b"")
    await until(lambda: place.find_closed() == [0])

    assert place.begun == []


@contextmanager
def few_files(more: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as next_one:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one.fileno() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_acceptor_waits_for_file_descriptors(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with few_files(1):
        place.connect(INNOCENT)
        await until(lambda: "cannot accept connections" in caplog.messages)
        assert place.begun == []
    await until(lambda: place.begun == [INNOCENT])


def test_accepted_connections_have_nodelay() -> None:
    with (
        open_listening_socket(parse_address("127.0.0.1:0")) as listening,
        socket.create_connection(listening.getsockname(), PATIENCE),
    ):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_backlog_of_the_listening_socket_is_ours(place: Place) -> None:
    most = int(Path("/proc/sys/net/core/somaxconn").read_text(encoding="ascii"))

    information = place.acceptor.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    # tcpi_sacked, which is the backlog of a listening socket
    assert struct.unpack_from("I", information, 28) == (min(BACKLOG, most),)
