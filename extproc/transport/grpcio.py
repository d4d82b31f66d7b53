"""The reference transport: grpc.aio serving ext_proc, Envoy's access log and grpc.health.v1."""
# interpreted: grpcio takes all of the time

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, cast

import grpc
import grpc.aio

from extproc.errors import LoopguardError, ProtocolError
from extproc.ext_proc.judging import Reply
from extproc.ext_proc.service import Service
from extproc.ext_proc.stream import Stream
from extproc.pb.als_pb2 import StreamAccessLogsResponse
from extproc.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.settings import Address, SubjectName
from extproc.sockets import open_listening_socket
from extproc.transport.grpc import MAX_MESSAGE
from extproc.transport.health import ACCESS_LOG, EXT_PROC, HEALTH, Health
from extproc.transport.tls import Certificates, Pem, make_name

_LOG = logging.getLogger("loopguard")

_LAST_SECONDS = 1.0
"""How long an answered call waits for Envoy to end it during shutdown. gRPC closes a connection
with its last call, and the close may overtake that call's status. Envoy keeps the call open while
it waits for the upstream.
"""

_OPTIONS = [
    # gRPC's own limits (4 MiB per message, 8 KiB of metadata) would refuse requests that Envoy
    # accepts.
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 1 << 20),
    ("grpc.absolute_max_metadata_size", 4 << 20),
    # Two servers on one port would share it silently.
    ("grpc.so_reuseport", 0),
    # The streams of an Envoy whose machine has vanished must not stay open for hours.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Silent connections end as on the other transport; gRPC's default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
]


class _Writer:
    """Serializes the writes of one call, because grpc allows one at a time."""

    def __init__(self, context: Any) -> None:  # noqa: ANN401  # grpc is untyped
        self._context = context
        self._lock = asyncio.Lock()
        self._pushes: set[asyncio.Task[None]] = set()

    async def write(self, messages: Iterable[bytes]) -> None:
        async with self._lock:
            for message in messages:
                await self._context.write(message)

    def push(self, messages: Iterable[bytes]) -> None:
        """Write messages in a task, while the call waits for its next message."""
        push = asyncio.create_task(self.write(messages))
        self._pushes.add(push)
        push.add_done_callback(self._pushes.discard)


class GrpcServer:
    """A grpc.aio server around a service."""

    def __init__(self, service: Service, health: Health) -> None:
        """Register the handlers, without listening yet."""
        self._service = service
        most = ("grpc.max_allowed_incoming_connections", service.settings.max_connections)
        self._server = grpc.aio.server(options=[*_OPTIONS, most])
        # Bytes in, bytes out: the service parses
        process = grpc.stream_stream_rpc_method_handler(self._process)
        log_access = grpc.stream_unary_rpc_method_handler(
            self._log_access, None, StreamAccessLogsResponse.SerializeToString
        )
        self._endless: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._health = health
        self._certificates: Certificates | None = None
        check = grpc.unary_unary_rpc_method_handler(
            self._check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        )
        watch = grpc.unary_stream_rpc_method_handler(
            self._watch, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(EXT_PROC, {"Process": process}),
                grpc.method_handlers_generic_handler(ACCESS_LOG, {"StreamAccessLogs": log_access}),
                grpc.method_handlers_generic_handler(HEALTH, {"Check": check, "Watch": watch}),
            )
        )

    async def start(self, address: Address, certificates: Certificates | None = None) -> str:
        """Listen, with mutual TLS if there are certificates; returns the real address."""
        # grpc gives no reason if it cannot listen, and would take over a Unix socket in use.
        probe = open_listening_socket(address)
        probe.close()
        try:
            if certificates is None:
                port = self._server.add_insecure_port(address.text)
            else:
                self._certificates = certificates
                port = self._server.add_secure_port(address.text, _make_credentials(certificates))
        except RuntimeError as error:
            raise LoopguardError(
                f"cannot listen on {address.text}: {error}; choose another with --listen"
            ) from None
        await self._server.start()
        return address.text if address.is_unix else f"{address.text.rpartition(':')[0]}:{port}"

    async def stop(self, grace: float) -> None:
        """Refuse new streams, end logs and watches, wait `grace` seconds, end other streams."""
        self._is_stopping = True
        for call in self._endless:
            call.cancel()
        await self._server.stop(grace)

    async def _check_peer(self, context: Any) -> None:  # noqa: ANN401  # grpc is untyped
        """End the call of a client without an allowed name, unchecked in grpc's handshake."""
        if self._certificates is not None and not self._certificates.admits(
            read_names(context.auth_context())
        ):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "no --tls-client-san is among your certificate's names",
            )

    async def _process(self, _: Any, context: Any) -> None:  # noqa: ANN401  # grpc is untyped
        await self._check_peer(context)
        stream = Stream(self._service, context.invocation_metadata() or ())
        call = cast("asyncio.Task[None]", asyncio.current_task())
        writer = _Writer(context)

        def give_up() -> None:
            if stream.carries:
                writer.push(stream.take_handed_on())
            elif self._service.released:
                # grpc cannot end a call cleanly while it reads; only a shutdown justifies that.
                # Else the next message ends it.
                call.cancel()

        stream.on_given_up = give_up
        try:
            await self._converse(stream, writer, context)
        except asyncio.CancelledError:
            if not stream.given_up:
                raise
            # Stop waiting for the body: after status OK, Envoy continues the request.
        except ProtocolError as error:
            await context.abort(_STATUS[error.code], str(error))
        finally:
            stream.close()

    async def _converse(self, stream: Stream, writer: _Writer, context: Any) -> None:  # noqa: ANN401  # grpc is untyped
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as patience:
                while (data := await context.read()) is not grpc.aio.EOF:
                    reply = stream.receive(data)
                    if not await self._answer(
                        stream, writer, reply if isinstance(reply, Reply) else await reply
                    ):
                        continue
                    if self._health.serving:
                        return
                    if patience.when() is None:
                        patience.reschedule(asyncio.get_running_loop().time() + _LAST_SECONDS)

    async def _answer(self, stream: Stream, writer: _Writer, reply: Reply) -> bool:
        """Carry out a reply; returns whether the call is over."""
        if reply.hold_ms:
            if reply.first:
                await writer.write([reply.first])
            await self._service.holds.wait(reply.hold_ms)
            stream.end_hold()
        if reply.answer is not None:
            await writer.write([reply.join_answer(), *reply.rest])
        return reply.done

    async def _log_access(
        self,
        messages: AsyncIterator[bytes],
        context: Any,  # noqa: ANN401  # grpc is untyped
    ) -> StreamAccessLogsResponse:
        await self._check_peer(context)
        try:
            with self._until_stop():
                async for message in messages:
                    self._service.access_log.receive(message)
        except ProtocolError as error:
            await context.abort(_STATUS[error.code], str(error))
        return StreamAccessLogsResponse()

    async def _check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:  # noqa: ANN401  # grpc is untyped
        await self._check_peer(context)
        answer = self._health.status(request.service)
        if answer.status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return answer

    async def _watch(
        self,
        request: HealthCheckRequest,
        context: Any,  # noqa: ANN401  # grpc is untyped
    ) -> AsyncIterator[HealthCheckResponse]:
        await self._check_peer(context)
        with self._until_stop():
            async for answer in self._health.watch(request.service):
                yield answer
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details("shutting down")

    @contextmanager
    def _until_stop(self) -> Iterator[None]:
        """Wrap a handler that never ends by itself, so that `stop` ends it.

        A call ends when its handler returns, but not when it is cancelled.
        """
        call = cast("asyncio.Task[None]", asyncio.current_task())
        self._endless.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
        finally:
            self._endless.discard(call)


_STATUS = {code.value[0]: code for code in grpc.StatusCode}


_SAN_KINDS = {"peer_dns": "DNS", "peer_uri": "URI", "peer_ip": "IP Address"}


def read_names(properties: Mapping[str, Iterable[bytes]]) -> list[SubjectName]:
    """The subjectAltNames in gRPC's authentication context."""
    return [
        make_name(kind, value.decode("latin-1"))
        for name, kind in _SAN_KINDS.items()
        for value in properties.get(name, ())
    ]


def _make_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Credentials that follow the files: gRPC's threads call `fetch` at every handshake."""
    given = certificates.pem

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        newest = certificates.pem
        if newest is given:
            return None  # unchanged
        given = newest
        return _configure(newest)

    return grpc.dynamic_ssl_server_credentials(
        _configure(given), fetch, require_client_authentication=True
    )


def _configure(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], pem.authorities)
