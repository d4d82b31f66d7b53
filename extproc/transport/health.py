"""grpc.health.v1: reports this process's health."""
# interpreted: answers probes; mypyc has no asynchronous generators

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from extproc.pb.health_pb2 import HealthCheckResponse

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
ACCESS_LOG = "envoy.service.accesslog.v3.AccessLogService"
HEALTH = "grpc.health.v1.Health"


class Health:
    """The health state and its watchers."""

    def __init__(self) -> None:
        self.serving = False
        self._changed = asyncio.Event()

    def set(self, *, serving: bool) -> None:
        """Change the state and wake the watchers."""
        self.serving = serving
        self._changed.set()
        self._changed = asyncio.Event()

    def status(self, service: str) -> HealthCheckResponse:
        """The answer for a service name; empty for the whole server."""
        if service not in ("", EXT_PROC, HEALTH):
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        serving = HealthCheckResponse.SERVING if self.serving else HealthCheckResponse.NOT_SERVING
        return HealthCheckResponse(status=serving)

    async def watch(self, service: str) -> AsyncIterator[HealthCheckResponse]:
        """Yield the answer now and at each change, without end."""
        last = None
        while True:
            changed = self._changed
            answer = self.status(service)
            if answer != last:
                last = answer
                yield answer
            await changed.wait()
