"""Envoy's access log comes through the port, beside the requests that it tells about."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from extproc.engine.settlements import Entry
from extproc.ext_proc.access_log import AccessLog
from extproc.pb.als_pb2 import StreamAccessLogsResponse
from extproc.transport.health import ACCESS_LOG
from tests.support.documents import policy
from tests.support.engine import ANY
from tests.support.envoy_logs import log
from tests.support.harness import PATIENCE
from tests.support.service import make_service, sample
from tests.support.transport import Run, Running, until


def _open(made: Running, seconds: float = PATIENCE) -> Any:  # noqa: ANN401  # grpc is untyped
    return made.channel.stream_unary(f"/{ACCESS_LOG}/StreamAccessLogs")(timeout=seconds)


def test_entries_come_through_the_port(run: Run) -> None:  # the fixture
    """One message after the other on one call, whose end is answered."""
    service = make_service(policy("p", ANY))
    taken: list[Entry] = []
    service.access_log = AccessLog(taken.append, service.metrics)

    async def steps(made: Running) -> None:
        call = _open(made)
        await call.write(log({}, {"status": 201}))
        await call.write(log({"status": 202}))
        await call.done_writing()

        assert await call == StreamAccessLogsResponse().SerializeToString()
        assert await call.code() is grpc.StatusCode.OK
        assert [entry.status for entry in taken] == [200, 201, 202]

    run(service, steps)


def test_what_is_no_access_log_ends_its_call_alone(run: Run) -> None:  # the fixture
    """The peer is told why, and the port stays open."""

    async def steps(made: Running) -> None:
        call = _open(made)
        await call.write(b"\xff\xff")

        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await made.check()).status == 1

    run(make_service(policy("p", ANY)), steps)


def test_a_stop_does_not_wait_for_access_logs(run: Run) -> None:  # the fixture
    """Envoy never ends them by itself; nor does this one before the stop is over."""

    async def steps(made: Running) -> None:
        call = _open(made, PATIENCE)
        await call.write(log({}))
        await until(lambda: sample(made.service, "access_log_entries_total", result="taken") > 0)
        async with asyncio.timeout(PATIENCE / 2):
            await made.server.stop(PATIENCE)
        assert await call.code() == grpc.StatusCode.OK

    run(make_service(policy("p", ANY)), steps)
