"""Accepts connections: a few per iteration of the event loop, with a bound on those that wait.

A TLS handshake takes a millisecond of the event loop. So a connection waits until its peer has sent something, and then for its
turn, in which a few handshakes begin. Addresses take turns, so one that opens thousands of connections does not delay the
others. If there are too many connections, the address with the most loses one.
"""
# interpreted: waits for sockets, and OpenSSL

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from extproc.logs import RateLimit, make_extra

_LOG = logging.getLogger("loopguard")

_ACCEPTED_PER_TURN: Final = 16
_BEGUN_PER_TURN: Final = 4
_UNDER_WAY: Final = 128
"""Maximum number of concurrent handshakes. During a flood, this delays an honest peer by 100 ms."""

_WAITING: Final = 1_000
_AGAIN_SECONDS: Final = 1.0
"""Pause after which the system may have file descriptors again, in seconds."""


class _WaitingClient(NamedTuple):
    """A connection whose handshake has not begun."""

    socket: socket.socket
    address: str
    timeout: asyncio.TimerHandle


class Acceptor:
    """Accepts connections and hands them on."""

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[socket.socket], Awaitable[object]],
        make_room: Callable[[], bool],
        handshake_seconds: float | None = None,
    ) -> None:
        """Begin to accept. `connect` takes a connection until its handshake is over.

        A peer may be silent for `handshake_seconds` before its handshake. None means no TLS, so no connection waits.
        """
        self.socket = listening
        self._connect = connect
        self._make_room = make_room
        self._seconds = handshake_seconds
        self._silent: dict[int, _WaitingClient] = {}  # by file descriptor, oldest first
        self._lines: dict[str, deque[_WaitingClient]] = {}  # by address, in order
        self._lined = 0
        self._under_way: dict[asyncio.Task[None], _Begun] = {}  # oldest first
        self._scheduled = False
        self._refusals = RateLimit(1)
        self._loop = asyncio.get_running_loop()
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Stop accepting, and close waiting connections. Handshakes under way are finished."""
        if self.socket.fileno() < 0:
            return  # closed before
        self._loop.remove_reader(self.socket)
        self.socket.close()
        for waiting in [*self._silent.values(), *(waiting for line in self._lines.values() for waiting in line)]:
            self._hang_up(waiting)
        self._silent.clear()
        self._lines.clear()
        self._lined = 0

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                connection, peer = self.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptors or memory left
                self._pause(error)
                return
            connection.setblocking(False)
            if not self._make_room():
                connection.close()
                self._log("connection refused, there are too many")
            elif self._seconds is None:
                self._begin(connection, "")
            else:
                self._await_word(connection, str(peer[0]) if isinstance(peer, tuple) else "", self._seconds)

    def _pause(self, error: OSError) -> None:
        self._log("cannot accept connections", error=str(error))
        self._make_room()
        self._loop.remove_reader(self.socket)
        self._loop.call_later(_AGAIN_SECONDS, self._resume)

    def _resume(self) -> None:
        if self.socket.fileno() >= 0:
            self._loop.add_reader(self.socket, self._accept)

    def _log(self, message: str, **more: object) -> None:
        suppressed = self._refusals.admit(self._loop.time())
        if suppressed is not None:
            _LOG.warning(message, extra=make_extra(**more, suppressed=suppressed or None))

    def _await_word(self, connection: socket.socket, address: str, seconds: float) -> None:
        """Let a connection wait for its peer's first bytes."""
        if len(self._silent) + self._lined >= _WAITING:
            self._drop_one()
        number = connection.fileno()
        timeout = self._loop.call_later(seconds, self._give_up, number)
        self._silent[number] = _WaitingClient(connection, address, timeout)
        self._loop.add_reader(connection, self._line_up, number)

    def _give_up(self, number: int) -> None:
        self._hang_up(self._silent.pop(number))

    def _drop_one(self) -> None:
        """Close one connection to make room: the one that was silent longest, else the last in the longest queue."""
        if self._silent:
            self._give_up(next(iter(self._silent)))
            return
        address, line = max(self._lines.items(), key=lambda entry: len(entry[1]))
        self._hang_up(line.pop())
        self._lined -= 1
        if not line:
            del self._lines[address]

    def _hang_up(self, waiting: _WaitingClient) -> None:
        waiting.timeout.cancel()
        self._loop.remove_reader(waiting.socket)
        waiting.socket.close()

    def _line_up(self, number: int) -> None:
        """Queue a connection for its handshake, because the peer has sent something."""
        waiting = self._silent.pop(number)
        self._loop.remove_reader(waiting.socket)
        waiting.timeout.cancel()
        self._lines.setdefault(waiting.address, deque()).append(waiting)
        self._lined += 1
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._begin_some)

    def _begin_some(self) -> None:
        """Begin the handshakes of this turn, address by address."""
        self._scheduled = False
        for _ in range(min(_BEGUN_PER_TURN, self._lined)):
            address, line = next(iter(self._lines.items()))
            waiting = line.popleft()
            self._lined -= 1
            del self._lines[address]
            if line:
                self._lines[address] = line  # behind the others
            if len(self._under_way) >= _UNDER_WAY:
                self._cut_one()
            self._begin(waiting.socket, address)
        if self._lined:
            self._schedule()

    def _cut_one(self) -> None:
        """End the oldest handshake of the address with the most."""
        busiest, _ = Counter(begun.address for begun in self._under_way.values()).most_common(1)[0]
        task, begun = next((task, begun) for task, begun in self._under_way.items() if begun.address == busiest)
        del self._under_way[task]
        with contextlib.suppress(OSError):  # it may be over
            begun.socket.shutdown(socket.SHUT_RDWR)

    def _begin(self, connection: socket.socket, address: str) -> None:
        task = self._loop.create_task(self._finish(connection))
        self._under_way[task] = _Begun(connection, address)
        task.add_done_callback(lambda done: self._under_way.pop(done, None))

    async def _finish(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # TLS counts and logs errors itself
            await self._connect(connection)


class _Begun(NamedTuple):
    """A handshake under way."""

    socket: socket.socket
    address: str
