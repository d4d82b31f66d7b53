"""The default transport: sockets and tasks around `grpc.GrpcConnection`.

Messages that arrive in one read are answered in one write, so the cost of the sockets falls as load
rises. A message that the service answers at once does not become a task. Tasks only wait for a
store or for the delay of a throttled request.

Connections take turns. After a bounded amount of work, or a large read, a connection stops reading
until the next iteration of the event loop, so that it does not delay the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from heapq import nsmallest
from operator import attrgetter
from typing import Final, cast

from google.protobuf.message import DecodeError

from extproc.errors import ProtocolError
from extproc.ext_proc.judging import Later, Reply
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.logs import RateLimit, make_extra
from extproc.pb.als_pb2 import StreamAccessLogsResponse
from extproc.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.settings import Address
from extproc.sockets import keep_alive, open_listening_socket
from extproc.store.pending import Listener
from extproc.transport import grpc
from extproc.transport.acceptor import Acceptor
from extproc.transport.grpc import Call, HalfClosed, MessageReceived
from extproc.transport.headers import Cache
from extproc.transport.health import ACCESS_LOG, EXT_PROC, HEALTH, Health
from extproc.transport.http2 import Http2Limits, Pool
from extproc.transport.tls import Certificates

_LOG = logging.getLogger("loopguard")

_LARGE_READ: Final = 65_536
"""After a read of this size other connections come first; uvloop would read up to 32 times."""

_MAX_WATCHES: Final = 100
"""Maximum number of health watches per connection; Envoy opens none."""

_LINES_PER_SECOND: Final = 5
_GOODBYE_SECONDS: Final = 0.5
"""Time for a peer to read the last bytes before the connection is closed."""

_POLL_SECONDS: Final = 0.02

_RETIRED_SECONDS: Final = 1.0
"""Time for a peer to close its connection after a GOAWAY."""

_RETIRED_AT_ONCE: Final = 100
"""A GOAWAY goes to 1/100 of all connections at a time, because finding idle ones visits each."""

_PROCESS: Final = f"/{EXT_PROC}/Process".encode()
_CHECK: Final = f"/{HEALTH}/Check".encode()
_WATCH: Final = f"/{HEALTH}/Watch".encode()
_LOG_ACCESS: Final = f"/{ACCESS_LOG}/StreamAccessLogs".encode()
_METHODS: Final = {_PROCESS: False, _LOG_ACCESS: False, _CHECK: True, _WATCH: True}

_LOGGED: Final = StreamAccessLogsResponse().SerializeToString()

_ENTRY_WORK: Final = 4
"""Cost of an access log entry, in frames."""


class _Serving(Listener):
    """The work for one call: an ext_proc stream and the answer it waits for, or a health watch.

    Attributes:
        stream: the stream; None for a watch.
        task: the task that the answer waits for, or the watch itself; cancelled if the call ends
            first.
    """

    def __init__(self, peer: _Peer, call: Call, stream: Stream | None) -> None:
        self.peer = peer
        self.call = call
        self.stream = stream
        self.task: asyncio.Task[None] | Later | None = None

    def hear(self) -> None:
        """The store has answered."""
        if isinstance(self.task, Later):
            self.peer.settle(self, self.task)


class _Peer(asyncio.Protocol):
    """One connection; `heard` is the time at which the peer last sent something."""

    def __init__(self, server: FastServer) -> None:
        self._server = server
        self._grpc = grpc.GrpcConnection(_METHODS, server.limits, server.cache, server.pool)
        self._serving: dict[int, _Serving] = {}
        self._watches = 0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._hello: asyncio.TimerHandle
        self._scheduled = False  # a turn begins in the next iteration of the event loop
        self._resting = False  # reading is paused until then
        self._stalled = False  # the peer reads too slowly
        self._leaving = False  # further data from the peer is dropped
        self.heard = self._loop.time()

    @property
    def calls(self) -> int:
        return len(self._grpc.calls)

    @property
    def decides(self) -> bool:
        """Whether any call will end by itself; access logs last as long as the connection."""
        return any(call.method != _LOG_ACCESS for call in self._grpc.calls.values())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A stream server passes this type, or uvloop's own
        self._transport = cast("asyncio.Transport", transport)
        keep_alive(transport.get_extra_info("socket"))
        self._server.peers.add(self)
        self._hello = self._loop.call_later(self._server.hello_seconds, self._check_hello)
        self._flush()

    # The protocol's signature
    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """End all calls: the peer has disconnected."""
        self._server.peers.discard(self)
        self._server.retiring.discard(self)
        self._hello.cancel()
        self._grpc.close()
        self._drop_all()

    def pause_writing(self) -> None:
        """Stop reading: the peer does not read its answers."""
        self._stalled = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Continue: the peer has caught up."""
        self._stalled = False
        self._resting = True
        self._schedule()

    def data_received(self, data: bytes) -> None:
        """Process new and remaining data for one turn; send the answers in one write."""
        connection = self._grpc
        self.heard = self._loop.time()
        connection.receive(data, self.heard)
        if not self._stalled:
            while (event := connection.next_event()) is not None:
                if isinstance(event, MessageReceived):
                    self._on_message(event.call, event.message)
                elif isinstance(event, HalfClosed):
                    self._end(event.call)
                else:
                    self._drop(event.call.number)
        self._flush()
        more = connection.unfinished or len(data) >= _LARGE_READ
        if not (more or self._resting) or self._stalled or self._transport.is_closing():
            return
        if more:
            self._resting = True
            self._transport.pause_reading()
            self._schedule()
        else:
            self._resting = False
            self._transport.resume_reading()

    def shut(self) -> None:
        """Tell the peer to open no more calls."""
        self._grpc.shut()
        for number, serving in list(self._serving.items()):
            if serving.stream is None:  # a health watch would never end by itself
                self._finish(self._grpc.calls[number], grpc.UNAVAILABLE, "shutting down")
        self._flush()

    def release(self) -> None:
        """End every call with OK, so that Envoy continues, or an error if OK would lose a body."""
        for call in list(self._grpc.calls.values()):
            serving = self._serving.get(call.number)
            if serving is not None and serving.stream is not None and serving.stream.carries:
                self._finish(call, grpc.UNAVAILABLE, "shutting down")
            else:
                self._end(call)
        self._flush()

    def retire(self) -> None:
        """Send an idle peer a GOAWAY and close the connection after a pause.

        Streams opened meanwhile are served.
        """
        self._server.retiring.add(self)
        self.shut()
        self._loop.call_later(_RETIRED_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._server.retiring.discard(self)
        if not self.calls:  # else the connection is in use again
            self._transport.close()

    def close(self) -> None:
        self._transport.close()

    def _check_hello(self) -> None:
        if not self._grpc.settled:
            self._transport.close()

    def _schedule(self) -> None:
        """Begin a turn in the event loop's next iteration, for all that is ready by then."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._scheduled = False
        self.data_received(b"")

    def _flush(self) -> None:
        data = self._grpc.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)
        if self._grpc.error is not None and not self._leaving:
            self._leave(self._grpc.error)

    def _leave(self, error: ProtocolError) -> None:
        """Close after a protocol error, with a pause for the peer to read the reason."""
        self._leaving = True
        self._server.log_error(error)
        self._grpc.close()
        self._drop_all()
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        self._loop.call_later(_GOODBYE_SECONDS, self._transport.close)

    def _on_message(self, call: Call, message: bytes) -> None:
        try:
            if call.method == _PROCESS:
                self._process(call, message)
            elif call.method == _LOG_ACCESS:
                self._grpc.charge(self._server.service.access_log.receive(message) * _ENTRY_WORK)
            elif call.method == _CHECK:
                self._check_health(call, message)
            else:
                self._watch_health(call, message)
        except ProtocolError as error:
            self._finish(call, error.code, str(error))

    def _process(self, call: Call, message: bytes) -> None:
        serving = self._serving.get(call.number)
        if serving is None:
            opened = Stream(self._server.service, call.metadata)
            opened.on_given_up = partial(self._give_up, call, opened)
            serving = self._serving[call.number] = _Serving(self, call, opened)
        stream = serving.stream
        if stream is None:
            return
        reply = stream.receive(message)
        if isinstance(reply, Reply) and not reply.hold_ms:
            self._answer(call, reply)
            return
        self._grpc.pause(call)
        if isinstance(reply, Later):
            serving.task = reply
            reply.notify(serving)
        else:
            # The loop's create_task would make up a name.
            serving.task = asyncio.Task(
                self._process_later(call, serving, reply), loop=self._loop, name="answer"
            )

    def settle(self, serving: _Serving, later: Later) -> None:
        """The store has answered."""
        call, reply = serving.call, later.finish()
        if reply.hold_ms:
            serving.task = asyncio.Task(
                self._process_later(call, serving, reply), loop=self._loop, name="answer"
            )
            return
        serving.task = None
        self._answer(call, reply)
        self._grpc.resume(call)
        self._schedule()

    async def _process_later(
        self, call: Call, serving: _Serving, reply: Reply | Awaitable[Reply]
    ) -> None:
        settled = reply if isinstance(reply, Reply) else await reply
        if settled.hold_ms:
            if settled.first:
                self._grpc.send(call, settled.first)
                self._schedule()
            await self._server.service.holds.wait(settled.hold_ms)
            if serving.stream is not None:
                serving.stream.end_hold()
        serving.task = None
        self._answer(call, settled)
        self._grpc.resume(call)
        self._schedule()

    def _answer(self, call: Call, reply: Reply) -> None:
        if reply.rest and reply.answer is not None:
            self._grpc.send_all(call, [reply.answer, *reply.rest], last=reply.done)
            if reply.done:
                self._drop(call.number)
        elif reply.done:
            if reply.answer is None:
                self._grpc.finish(call, grpc.OK)
            else:
                self._grpc.answer(call, reply.answer)
            self._drop(call.number)
        elif reply.answer is not None:
            self._grpc.send(call, reply.answer)

    def _finish(self, call: Call, status: int, message: str = "") -> None:
        """End a call with a status, and stop the work for it."""
        self._grpc.finish(call, status, message)
        self._drop(call.number)

    def _end(self, call: Call) -> None:
        if call.method == _LOG_ACCESS:
            self._grpc.answer(call, _LOGGED)
        else:
            self._finish(call, grpc.OK)

    def _give_up(self, call: Call, stream: Stream) -> None:
        """Stop waiting for the body: after status OK, Envoy continues the request.

        In duplex mode, pass the body on first.
        """
        for message in stream.take_handed_on():
            self._grpc.send(call, message)
        if not stream.carries:
            self._finish(call, grpc.OK)
        self._schedule()

    def _drop(self, number: int) -> None:
        """Drop a call that is over; its answer may not be sent yet."""
        serving = self._serving.pop(number, None)
        if serving is None:
            return
        if serving.task is not None:
            serving.task.cancel()
        if serving.stream is None:
            self._watches -= 1
        else:
            serving.stream.close()

    def _drop_all(self) -> None:
        for number in list(self._serving):
            self._drop(number)

    def _check_health(self, call: Call, message: bytes) -> None:
        answer = self._server.health.status(parse_check(message).service)
        if answer.status == HealthCheckResponse.SERVICE_UNKNOWN:
            self._grpc.finish(call, grpc.NOT_FOUND, "unknown service")
        else:
            self._grpc.answer(call, answer.SerializeToString())

    def _watch_health(self, call: Call, message: bytes) -> None:
        service = parse_check(message).service
        if self._watches >= _MAX_WATCHES:
            raise ProtocolError("too many watches", code=grpc.RESOURCE_EXHAUSTED)
        serving = self._serving[call.number] = _Serving(self, call, None)
        self._watches += 1
        serving.task = self._loop.create_task(self._watch_on(call, service))

    async def _watch_on(self, call: Call, service: str) -> None:
        async for answer in self._server.health.watch(service):
            self._grpc.send(call, answer.SerializeToString())
            self._schedule()


def parse_check(message: bytes) -> HealthCheckRequest:
    """Parse a health check; raises ProtocolError if the bytes are not a HealthCheckRequest."""
    try:
        return HealthCheckRequest.FromString(message)
    except DecodeError as error:
        raise ProtocolError("not a HealthCheckRequest", code=grpc.INVALID_ARGUMENT) from error


class FastServer:
    """Has the interface of `grpcio.GrpcServer`, without grpcio.

    Attributes:
        cache: header fields of all connections.
        pool: bytes that all connections may buffer.
        hello_seconds: time within which a new connection must speak HTTP/2.
        retiring: peers that were sent a GOAWAY.
    """

    def __init__(
        self,
        service: Service,
        health: Health,
        limits: Http2Limits | None = None,
        pool: Pool | None = None,
        hello_seconds: float = 10,
    ) -> None:
        self.service = service
        self.health = health
        self.limits = limits or Http2Limits()
        self.cache = Cache()
        self.pool = pool or Pool()
        self.hello_seconds = hello_seconds
        self.peers: set[_Peer] = set()
        self.retiring: set[_Peer] = set()
        self._errors = RateLimit(_LINES_PER_SECOND)
        self._acceptor: Acceptor

    async def start(self, address: Address, certificates: Certificates | None = None) -> str:
        """Listen, with mutual TLS if there are certificates; returns the real address."""
        listening = open_listening_socket(address)
        loop = asyncio.get_running_loop()
        tls = certificates.make_listen_options(self.hello_seconds) if certificates else {}
        connect = partial(loop.connect_accepted_socket, lambda: _Peer(self), **tls)
        self._acceptor = Acceptor(
            listening, connect, self._make_room, self.hello_seconds if certificates else None
        )
        return (
            address.text
            if address.is_unix
            else f"{address.text.rpartition(':')[0]}:{listening.getsockname()[1]}"
        )

    def _make_room(self) -> bool:
        """Whether another connection is allowed.

        Above the limit, the longest idle ones get a GOAWAY.
        """
        most = self.service.settings.max_connections
        if len(self.peers) < most:
            return True
        share = max(1, most // _RETIRED_AT_ONCE)
        if not self.retiring:
            idle = (peer for peer in self.peers if not peer.calls)
            for peer in nsmallest(share, idle, key=attrgetter("heard")):
                peer.retire()
        return len(self.peers) < most + share

    async def stop(self, grace: float) -> None:
        """Refuse new calls, wait `grace` seconds for open ones, then end them with OK."""
        self._acceptor.close()
        for peer in list(self.peers):
            peer.shut()
        await _wait_until(lambda: not any(peer.decides for peer in self.peers), grace)
        for peer in list(self.peers):
            peer.release()
        # After a GOAWAY, the peer closes the connection itself once it has read its last answer.
        await _wait_until(lambda: not self.peers, _GOODBYE_SECONDS)
        for peer in list(self.peers):
            peer.close()

    def log_error(self, error: ProtocolError) -> None:
        """Log a protocol error, at a limited rate."""
        suppressed = self._errors.admit(asyncio.get_running_loop().time())
        if suppressed is not None:
            extra = make_extra(error=str(error), code=error.code, suppressed=suppressed or None)
            _LOG.info("connection ended for a protocol error", extra=extra)


async def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # an event for this would slow every call down
                await asyncio.sleep(_POLL_SECONDS)
