"""Accepts connections, a few per iteration of the event loop.

A TLS handshake takes a millisecond of the event loop, so few of them begin in each iteration. A
connection waits until its peer has sent something, then in the queue of its address. Addresses take
turns, so one that opens thousands of connections does not delay the others. If too many connections
wait, the address with the most loses one.
"""
# interpreted: waits for sockets and OpenSSL

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
_MAX_HANDSHAKES: Final = 128
"""Maximum number of concurrent handshakes. In a flood, an honest peer waits 100 ms."""

_MAX_WAITING: Final = 1_000
_AGAIN_SECONDS: Final = 1.0
"""Pause after an error such as running out of file descriptors."""


class _WaitingClient(NamedTuple):
    """A connection whose handshake has not begun."""

    socket: socket.socket
    address: str
    timeout: asyncio.TimerHandle


class Acceptor:
    """Accepts connections and passes them to `connect`."""

    def __init__(
        self,
        listening: socket.socket,
        connect: Callable[[socket.socket], Awaitable[object]],
        make_room: Callable[[], bool],
        handshake_seconds: float | None = None,
    ) -> None:
        """Begin to accept.

        Args:
            listening: the listening socket.
            connect: starts serving a connection; returns after its handshake.
            make_room: returns whether another connection is allowed.
            handshake_seconds: time for a peer to begin its handshake; None without TLS, so that no
                connection waits.
        """
        self.socket = listening
        self._connect = connect
        self._make_room = make_room
        self._handshake_seconds = handshake_seconds
        self._silent: dict[int, _WaitingClient] = {}  # by file descriptor, oldest first
        self._queues: dict[str, deque[_WaitingClient]] = {}  # by address, in order
        self._queued = 0
        self._handshakes: dict[asyncio.Task[None], _Handshake] = {}  # oldest first
        self._scheduled = False
        self._refusals = RateLimit(1)
        self._loop = asyncio.get_running_loop()
        listening.setblocking(False)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Stop accepting and close waiting connections. Handshakes in progress are finished."""
        if self.socket.fileno() < 0:
            return  # closed before
        self._loop.remove_reader(self.socket)
        self.socket.close()
        for waiting in [
            *self._silent.values(),
            *(waiting for queue in self._queues.values() for waiting in queue),
        ]:
            self._close_waiting(waiting)
        self._silent.clear()
        self._queues.clear()
        self._queued = 0

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
            elif self._handshake_seconds is None:
                self._begin(connection, "")
            else:
                self._await_first_bytes(
                    connection,
                    str(peer[0]) if isinstance(peer, tuple) else "",
                    self._handshake_seconds,
                )

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

    def _await_first_bytes(self, connection: socket.socket, address: str, seconds: float) -> None:
        if len(self._silent) + self._queued >= _MAX_WAITING:
            self._drop_waiting()
        number = connection.fileno()
        timeout = self._loop.call_later(seconds, self._give_up, number)
        self._silent[number] = _WaitingClient(connection, address, timeout)
        self._loop.add_reader(connection, self._enqueue, number)

    def _give_up(self, number: int) -> None:
        self._close_waiting(self._silent.pop(number))

    def _drop_waiting(self) -> None:
        """Close a waiting connection: the longest silent one, else the longest queue's last."""
        if self._silent:
            self._give_up(next(iter(self._silent)))
            return
        address, queue = max(self._queues.items(), key=lambda entry: len(entry[1]))
        self._close_waiting(queue.pop())
        self._queued -= 1
        if not queue:
            del self._queues[address]

    def _close_waiting(self, waiting: _WaitingClient) -> None:
        waiting.timeout.cancel()
        self._loop.remove_reader(waiting.socket)
        waiting.socket.close()

    def _enqueue(self, number: int) -> None:
        """Queue a connection for its handshake: the peer has sent something."""
        waiting = self._silent.pop(number)
        self._loop.remove_reader(waiting.socket)
        waiting.timeout.cancel()
        self._queues.setdefault(waiting.address, deque()).append(waiting)
        self._queued += 1
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._begin_handshakes)

    def _begin_handshakes(self) -> None:
        self._scheduled = False
        for _ in range(min(_BEGUN_PER_TURN, self._queued)):
            address, queue = next(iter(self._queues.items()))
            waiting = queue.popleft()
            self._queued -= 1
            del self._queues[address]
            if queue:
                self._queues[address] = queue  # behind the others
            if len(self._handshakes) >= _MAX_HANDSHAKES:
                self._end_oldest()
            self._begin(waiting.socket, address)
        if self._queued:
            self._schedule()

    def _end_oldest(self) -> None:
        """End the oldest handshake of the address with the most."""
        busiest, _ = Counter(begun.address for begun in self._handshakes.values()).most_common(1)[0]
        task, begun = next(
            (task, begun) for task, begun in self._handshakes.items() if begun.address == busiest
        )
        del self._handshakes[task]
        with contextlib.suppress(OSError):  # it may be over
            begun.socket.shutdown(socket.SHUT_RDWR)

    def _begin(self, connection: socket.socket, address: str) -> None:
        task = self._loop.create_task(self._connect_client(connection))
        self._handshakes[task] = _Handshake(connection, address)
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _connect_client(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # TLS counts and logs errors itself
            await self._connect(connection)


class _Handshake(NamedTuple):
    socket: socket.socket
    address: str
