"""The port under attack: what an innocent client on a connection of its own waits for its answers, before and meanwhile."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import quantiles
from time import perf_counter

from extproc.transport import http2
from extproc.transport.grpc import frame_message
from extproc.transport.headers import encode
from extproc.transport.health import EXT_PROC
from tests.bench import samples
from tests.bench.attack import ATTACKS, HELLO, frame
from tests.bench.builds import SOURCES, find_compiled, serve
from tests.bench.processes import free_port, running
from tests.bench.report import Row, progress

TITLE = "door: p99 of an innocent client (60 requests/s, a connection of its own), before and during attacks on another"

_PER_SECOND = 60
_LIMIT_MS = 200
"""Envoy's message timeout, unless it is set."""

_BLOCK = encode(
    [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", f"/{EXT_PROC}/Process".encode()),
        (b"content-type", b"application/grpc"),
    ]
)


class _Innocent:
    """A client that asks at a steady pace, each time about another request, and takes down how long the answers take."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._stream = -1
        writer.write(HELLO)

    async def measure(self, seconds: float) -> list[float]:
        """Latencies in milliseconds."""
        found = []
        for _ in range(int(seconds * _PER_SECOND)):
            started = perf_counter()
            await self._ask()
            found.append((perf_counter() - started) * 1000)
            await asyncio.sleep(max(0, 1 / _PER_SECOND - (perf_counter() - started)))
        return found

    async def _ask(self) -> None:
        self._stream = number = self._stream + 2
        head = samples.headers_message(user=f"innocent-{number}", length=0)
        self._writer.write(
            frame(http2.HEADERS, http2.END_HEADERS, number, _BLOCK)
            + frame(http2.DATA, 0, number, frame_message(head))
            + frame(http2.DATA, 0, number, frame_message(samples.body_message(samples.chat_body(number))))
        )
        while await self._read() != number:
            pass
        self._writer.write(frame(http2.RST_STREAM, 0, number, bytes(4)))

    async def _read(self) -> int:
        """The stream that the next frame ends, 0 for none."""
        head = await self._reader.readexactly(9)
        await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        return int.from_bytes(head[5:], "big") if head[4] & http2.END_STREAM and head[3] == http2.HEADERS else 0


def run(*, quick: bool) -> list[Row]:
    """Measure the innocent alone and beside every attack, in one run."""
    seconds = 1.5 if quick else 5.0
    with tempfile.TemporaryDirectory() as name:
        directory, port = Path(name), free_port()
        policy = directory / "policy.json"
        policy.write_bytes(samples.bundle([samples.policy(window_seconds=60)]))
        command = serve(find_compiled() or SOURCES, policy, port, "--admin", f"127.0.0.1:{free_port()}")
        with running(command, port, directory / "guard.log"):
            return asyncio.run(_compare(port, seconds))


async def _compare(port: int, seconds: float) -> list[Row]:
    innocent = _Innocent(*await asyncio.open_connection("127.0.0.1", port))
    await innocent.measure(0.5)
    rows = []
    for number, name in enumerate(ATTACKS, 1):
        progress(f"door: {name}", number, len(ATTACKS))
        before = _p99(await innocent.measure(seconds))
        command = [sys.executable, "-m", "tests.bench.attack", name, str(port), str(seconds + 1), "1"]
        attacking = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        await asyncio.sleep(0.7)  # until it has started
        during = _p99(await innocent.measure(seconds))
        output, _ = await attacking.communicate()
        sent = json.loads(output)
        note = f"{during / before:.1f}x of {before:.1f} ms; {sent['bytes'] / 1e6:.0f} MB on {sent['connections']} connections"
        rows.append(Row(name, during, "ms", _LIMIT_MS, note))
        await asyncio.sleep(1)
    return rows


def _p99(latencies: list[float]) -> float:
    return quantiles(latencies, n=100)[98]
