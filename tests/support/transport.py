"""Transports in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import uvloop

from extproc.ext_proc.service import Service
from extproc.pb.health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.server import Transport
from extproc.settings import parse_address
from extproc.transport.fast import FastServer
from extproc.transport.grpcio import GrpcServer
from extproc.transport.health import EXT_PROC, HEALTH, Health
from tests.support.documents import policy
from tests.support.harness import PATIENCE
from tests.support.service import make_service

TRANSPORTS: dict[str, Callable[[Service, Health], Transport]] = {
    "fast": FastServer,
    "grpcio": GrpcServer,
}


class Running:
    def __init__(
        self,
        server: Transport,
        service: Service,
        health: Health,
        channel: grpc.aio.Channel,
        where: str,
    ) -> None:
        self.server = server
        self.service = service
        self.health = health
        self.channel = channel
        self.where = where

    def process(self, **more: Any) -> Any:  # noqa: ANN401  # grpc is untyped
        return self.channel.stream_stream(f"/{EXT_PROC}/Process")(timeout=PATIENCE, **more)

    def check(self, service: str = "") -> Any:  # noqa: ANN401  # grpc is untyped
        call = self.channel.unary_unary(
            f"/{HEALTH}/Check", HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString
        )
        return call(HealthCheckRequest(service=service), timeout=PATIENCE)


@asynccontextmanager
async def open_running(name: str, service: Service | None = None) -> AsyncIterator[Running]:
    service = service or make_service(policy("p", {"pathPrefix": "/"}))
    health = Health()
    server = TRANSPORTS[name](service, health)
    where = await server.start(parse_address("127.0.0.1:0"))
    health.set(serving=True)
    async with grpc.aio.insecure_channel(where, [("grpc.max_metadata_size", 1 << 20)]) as channel:
        try:
            yield Running(server, service, health, channel, where)
        finally:
            await server.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # what is waited for knows no events
            await asyncio.sleep(0.01)


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
