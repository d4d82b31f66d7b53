"""The reference transport: grpc.aio serving ext_proc and grpc.health.v1 on one port, and the client of the health check."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio

from extproc.errors import LoopguardError, ProtocolError
from extproc.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.service import Service
from extproc.settings import Address
from extproc.transport.grpc import MAX_MESSAGE
from extproc.transport.health import EXT_PROC, HEALTH, Health
from extproc.transport.sockets import listening_socket

_LOG = logging.getLogger("loopguard")

_OPTIONS = [
    # gRPC's own limits (4 MiB a message, 8 KiB of metadata) would fail requests that Envoy is happy with.
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 1 << 20),
    ("grpc.absolute_max_metadata_size", 4 << 20),
    # Two servers on one port would share it in silence.
    ("grpc.so_reuseport", 0),
    # An Envoy whose machine vanished must not hold its streams for hours.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class GrpcServer:
    """A grpc.aio server around a service."""

    def __init__(self, service: Service, health: Health) -> None:
        """Register the handlers; nothing listens yet."""
        self._service = service
        self._server = grpc.aio.server(options=_OPTIONS)
        process = grpc.stream_stream_rpc_method_handler(self._process)  # bytes in, bytes out: the service parses
        self._health = health
        check = grpc.unary_unary_rpc_method_handler(
            self._check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        )
        watch = grpc.unary_stream_rpc_method_handler(
            self._watch, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        )
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(EXT_PROC, {"Process": process}),
                grpc.method_handlers_generic_handler(HEALTH, {"Check": check, "Watch": watch}),
            )
        )

    async def start(self, address: Address) -> str:
        """Listen.

        Returns:
            the address, with the real port where 0 was asked for.

        Raises:
            LoopguardError: the address cannot be listened on.
        """
        # grpc does not say why it cannot listen, and takes a Unix socket away from whoever has it.
        probe = listening_socket(address)
        probe.close()
        try:
            port = self._server.add_insecure_port(address.text)
        except RuntimeError as error:
            raise LoopguardError(f"cannot listen on {address.text}: {error}; choose another with --listen") from None
        await self._server.start()
        return address.text if address.is_unix else f"{address.text.rpartition(':')[0]}:{port}"

    async def stop(self, grace: float) -> None:
        """Take no more streams, give those in flight `grace` seconds, then end them."""
        await self._server.stop(grace)

    async def _process(self, _: Any, context: Any) -> None:  # noqa: ANN401  # grpc is untyped
        stream = self._service.open(context.invocation_metadata() or ())
        call = cast("asyncio.Task[None]", asyncio.current_task())
        # grpc cannot end a call cleanly while it reads: only a stop is worth that. Otherwise the next message ends the call.
        stream.on_given_up = lambda: self._service.released.is_set() and call.cancel()
        try:
            while True:
                data = await context.read()
                if data is grpc.aio.EOF:
                    return
                reply = stream.receive(data)
                if not isinstance(reply, tuple):
                    reply = await reply
                if reply.hold_ms:
                    await context.write(reply.first)
                    await self._service.holds.wait(reply.hold_ms)
                if reply.answer is not None:
                    await context.write(reply.answer)
                if reply.done:
                    return
        except asyncio.CancelledError:
            if not stream.given_up:
                raise
            # Nobody waits for the body any more: ending with OK makes Envoy go on with the request.
        except ProtocolError as error:
            await context.abort(_STATUS[error.code], str(error))
        finally:
            stream.close()

    async def _check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:  # noqa: ANN401  # grpc is untyped
        answer = self._health.status(request.service)
        if answer.status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return answer

    async def _watch(self, request: HealthCheckRequest, _: Any) -> AsyncIterator[HealthCheckResponse]:  # noqa: ANN401  # grpc is untyped
        async for answer in self._health.watch(request.service):
            yield answer


_STATUS = {code.value[0]: code for code in grpc.StatusCode}


def check_health(target: str, timeout: float) -> str:
    """Ask a running server's grpc.health.v1.

    Args:
        target: `host:port` or `unix:/path`.
        timeout: in seconds.

    Returns:
        `SERVING`, another status, or why there was no answer.
    """
    with grpc.insecure_channel(target) as channel:
        check = channel.unary_unary(f"/{HEALTH}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString)
        try:
            answer = check(HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return HealthCheckResponse.ServingStatus.Name(answer.status)
