"""The lean transport: a thin asyncio shell around `http2.Connection`, serving ext_proc and grpc.health.v1 on one port.

What arrives in one read is answered in one write, so the cost of the sockets falls as load rises. A message that the service
answers at once never becomes a task; one does only to wait for a store or for a throttled request's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
from typing import NamedTuple, cast

from google.protobuf.message import DecodeError

from extproc.errors import ProtocolError
from extproc.logs import fields
from extproc.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.service import Reply, Service, Stream
from extproc.settings import Address
from extproc.transport import grpc_wire
from extproc.transport.health import EXT_PROC, HEALTH, Health
from extproc.transport.http2 import (
    Connection,
    ConnectionEnded,
    DataReceived,
    Headers,
    RequestReceived,
    StreamReset,
    encode,
)
from extproc.transport.sockets import keep_alive, listening_socket

_LOG = logging.getLogger("loopguard")

_HELLO_SECONDS = 10
"""A connection that has not opened a stream by then and never spoke HTTP/2 is closed."""

_GOODBYE_SECONDS = 0.5
_POLL_SECONDS = 0.02
_NOT_GRPC = encode([(b":status", b"415"), (b"content-type", b"text/plain")])
_NOT_GRPC_BODY = b"this port speaks gRPC: envoy.service.ext_proc.v3 and grpc.health.v1\n"


class _Target(NamedTuple):
    """What a request's headers ask for."""

    path: str
    is_grpc: bool
    metadata: tuple[tuple[str, str], ...]


@lru_cache(maxsize=256)
def _target(headers: Headers) -> _Target:
    first = dict(reversed(headers))  # the first of a name wins
    is_grpc = first.get(b":method") == b"POST" and first.get(b"content-type", b"").startswith(b"application/grpc")
    ours = [(name, value) for name, value in headers if name.startswith(b"x-loopguard-")]
    metadata = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in ours)
    return _Target(first.get(b":path", b"").decode("latin-1"), is_grpc, metadata)


class _Call:
    """One gRPC call."""

    __slots__ = ("backlog", "deframer", "ended", "number", "on_message", "started", "stream", "task")

    def __init__(self, number: int, on_message: Callable[[_Peer, _Call, bytes], None]) -> None:
        self.number = number
        self.on_message = on_message
        self.deframer = grpc_wire.Deframer()
        self.started = False  # response headers are out
        self.stream: Stream | None = None
        self.task: asyncio.Task[None] | None = None  # the answer under way, if it takes time
        self.backlog: list[bytes] = []  # messages behind that
        self.ended = False  # the peer has said all it had to say


class _Peer(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: FastServer) -> None:
        self._server = server
        self._http = Connection()
        self._calls: dict[int, _Call] = {}
        self._transport: asyncio.Transport
        self._flushing = False
        self._spoke = False

    @property
    def calls(self) -> int:
        """Calls that are not over."""
        return len(self._calls)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A peer connected."""
        self._transport = cast("asyncio.Transport", transport)  # what a stream server hands out, uvloop's own class included
        keep_alive(transport.get_extra_info("socket"))
        self._server.peers.add(self)
        self._flush()
        asyncio.get_running_loop().call_later(_HELLO_SECONDS, self._check_hello)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # the protocol's signature
        """The peer is gone, and so are all its calls."""
        self._server.peers.discard(self)
        for call in list(self._calls.values()):
            self._drop(call)

    def pause_writing(self) -> None:
        """The peer reads slower than it asks: let it wait."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Whatever came in one read; the answers leave in one write."""
        self._spoke = True
        for event in self._http.receive(data):
            if type(event) is DataReceived:
                self._on_data(event)
            elif type(event) is RequestReceived:
                self._on_request(event)
            elif type(event) is StreamReset:
                call = self._calls.get(event.stream)
                if call is not None:
                    self._drop(call)
            elif type(event) is ConnectionEnded:
                _LOG.info("connection ended for a protocol error", extra=fields(error=event.message, code=event.code))
        self._flush()

    def shut(self) -> None:
        """Ask the peer to open no more calls here."""
        self._http.goaway()
        for call in list(self._calls.values()):
            if call.stream is None:  # a health watch would never end by itself
                self._finish(call, grpc_wire.UNAVAILABLE, "shutting down")
        self._flush()

    def release(self) -> None:
        """End every call with OK, which makes Envoy go on with its request."""
        for call in list(self._calls.values()):
            self._finish(call, grpc_wire.OK)
        self._flush()

    def close(self) -> None:
        """Hang up."""
        self._transport.close()

    def _check_hello(self) -> None:
        if not self._spoke:
            self._transport.close()

    def _flush(self) -> None:
        self._flushing = False
        data = self._http.take()
        if data and not self._transport.is_closing():
            self._transport.write(data)
        if self._http.ended:
            self._transport.close()

    def _flush_soon(self) -> None:
        """Once for everything that becomes ready in this turn of the loop."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _on_request(self, event: RequestReceived) -> None:
        target = _target(event.headers)
        if not target.is_grpc:
            if event.ended:
                self._refuse(event.stream)
            else:
                self._calls[event.stream] = _Call(event.stream, _Peer._ignore)
            return
        handler = _METHODS.get(target.path)
        if handler is None:
            status = grpc_wire.trailers(grpc_wire.UNIMPLEMENTED, "unknown method", only=True)
            self._http.respond(event.stream, status, end=True)
            return
        call = self._calls[event.stream] = _Call(event.stream, handler)
        if handler is _Peer._process:
            call.stream = self._server.service.open(target.metadata)
            call.stream.on_given_up = partial(self._give_up, call)
        if event.ended:
            self._finish(call, grpc_wire.OK)

    def _refuse(self, number: int) -> None:
        self._http.respond(number, _NOT_GRPC)
        self._http.send(number, _NOT_GRPC_BODY, b"")

    def _on_data(self, event: DataReceived) -> None:
        call = self._calls.get(event.stream)
        if call is None:
            return
        if call.on_message is _Peer._ignore:
            if event.ended:
                del self._calls[event.stream]
                self._refuse(event.stream)
            return
        try:
            for message in call.deframer.feed(event.data):
                if call.task is not None:
                    call.backlog.append(message)
                else:
                    call.on_message(self, call, message)
        except ProtocolError as error:
            self._finish(call, error.code, str(error))
            return
        call.ended = event.ended
        if event.ended and call.task is None and event.stream in self._calls:
            self._finish(call, grpc_wire.OK)

    def _process(self, call: _Call, message: bytes) -> None:
        """envoy.service.ext_proc.v3.ExternalProcessor/Process."""
        if call.stream is None or call.number not in self._calls:
            return  # it is over
        reply = call.stream.receive(message)
        if type(reply) is Reply and not reply.hold_ms:
            self._answer(call, reply)
        else:
            call.task = asyncio.get_running_loop().create_task(self._process_later(call, reply))

    async def _process_later(self, call: _Call, reply: Reply | Awaitable[Reply]) -> None:
        settled = reply if isinstance(reply, Reply) else await reply
        if settled.hold_ms:
            self._send(call, settled.first)
            self._flush_soon()
            await self._server.service.holds.wait(settled.hold_ms)
        call.task = None
        self._answer(call, settled)
        try:
            while call.backlog and call.task is None and call.number in self._calls:
                self._process(call, call.backlog.pop(0))
        except ProtocolError as error:
            self._finish(call, error.code, str(error))
        if call.ended and call.task is None and call.number in self._calls:
            self._finish(call, grpc_wire.OK)
        self._flush_soon()

    def _answer(self, call: _Call, reply: Reply) -> None:
        if not reply.done:
            if reply.answer is not None:
                self._send(call, reply.answer)
            return
        if reply.answer is None:
            self._finish(call, grpc_wire.OK)
            return
        if not call.started:
            self._http.respond(call.number, grpc_wire.RESPONSE)
        self._http.send(call.number, grpc_wire.framed(reply.answer), _OK_TRAILERS)
        self._forget(call)

    def _send(self, call: _Call, message: bytes) -> None:
        if not call.started:
            call.started = True
            self._http.respond(call.number, grpc_wire.RESPONSE)
        self._http.send(call.number, grpc_wire.framed(message))

    def _finish(self, call: _Call, status: int, message: str = "") -> None:
        """End a call with a status."""
        if call.started:
            self._http.send(call.number, b"", grpc_wire.trailers(status, message))
        else:
            self._http.respond(call.number, grpc_wire.trailers(status, message, only=True), end=True)
        self._drop(call)

    def _give_up(self, call: _Call) -> None:
        """Nobody waits for the body any more: ending with OK makes Envoy go on with the request."""
        self._finish(call, grpc_wire.OK)
        self._flush_soon()

    def _drop(self, call: _Call) -> None:
        """A call is over while its answer may still be under way."""
        if call.task is not None:
            call.task.cancel()
        self._forget(call)

    def _forget(self, call: _Call) -> None:
        self._calls.pop(call.number, None)
        if call.stream is not None:
            call.stream.close()
            call.stream = None

    def _check(self, call: _Call, message: bytes) -> None:
        """grpc.health.v1.Health/Check."""
        answer = self._health(message)
        if answer.status == HealthCheckResponse.SERVICE_UNKNOWN:
            self._finish(call, grpc_wire.NOT_FOUND, "unknown service")
            return
        self._send(call, answer.SerializeToString())
        self._finish(call, grpc_wire.OK)

    def _watch(self, call: _Call, message: bytes) -> None:
        """grpc.health.v1.Health/Watch."""
        self._health(message)
        service = HealthCheckRequest.FromString(message).service
        call.task = asyncio.get_running_loop().create_task(self._watch_on(call, service))

    async def _watch_on(self, call: _Call, service: str) -> None:
        async for answer in self._server.health.watch(service):
            self._send(call, answer.SerializeToString())
            self._flush_soon()

    def _health(self, message: bytes) -> HealthCheckResponse:
        try:
            request = HealthCheckRequest.FromString(message)
        except DecodeError as error:
            raise ProtocolError("not a HealthCheckRequest", code=grpc_wire.INVALID_ARGUMENT) from error
        return self._server.health.status(request.service)

    def _ignore(self, call: _Call, message: bytes) -> None:
        """The body of a request that is not gRPC."""


_OK_TRAILERS = grpc_wire.trailers(grpc_wire.OK)

_METHODS: dict[str, Callable[[_Peer, _Call, bytes], None]] = {
    f"/{EXT_PROC}/Process": _Peer._process,
    f"/{HEALTH}/Check": _Peer._check,
    f"/{HEALTH}/Watch": _Peer._watch,
}


class FastServer:
    """The same door as `grpcio.GrpcServer`, without grpcio."""

    def __init__(self, service: Service, health: Health) -> None:
        """Nothing listens yet."""
        self.service = service
        self.health = health
        self.peers: set[_Peer] = set()
        self._server: asyncio.Server

    async def start(self, address: Address) -> str:
        """Listen.

        Returns:
            the address, with the real port where 0 was asked for.

        Raises:
            LoopguardError: the address cannot be listened on.
        """
        listening = listening_socket(address)
        loop = asyncio.get_running_loop()
        if address.is_unix:
            self._server = await loop.create_unix_server(lambda: _Peer(self), sock=listening)
            return address.text
        self._server = await loop.create_server(lambda: _Peer(self), sock=listening)
        return f"{address.text.rpartition(':')[0]}:{listening.getsockname()[1]}"

    async def stop(self, grace: float) -> None:
        """Take no more calls, give those in flight `grace` seconds, then end them so that their requests go on."""
        self._server.close()
        for peer in list(self.peers):
            peer.shut()
        await _until(lambda: not any(peer.calls for peer in self.peers), grace)
        for peer in list(self.peers):
            peer.release()
        # A peer that has been asked to leave hangs up by itself once it has read its last answer.
        await _until(lambda: not self.peers, _GOODBYE_SECONDS)
        for peer in list(self.peers):
            peer.close()


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for the condition, or that long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # an event for this would cost every call something
                await asyncio.sleep(_POLL_SECONDS)
