"""A load generator that keeps a pace: `python -m tests.bench.paced PORT RATE SECONDS FIRST_NUMBER`.

Every request is sent when it is due, whether earlier ones were answered or not, and its latency
    counts from that moment: a
server that stops for a while is charged for every request of that time. Prints latencies in
milliseconds by quantile, and counts by status.
"""

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import cast

from tests.bench.load import Connection, request
from tests.bench.processes import command_module

_BODY_BYTES = 1024
_CONNECTIONS = 128
_TIMEOUT = 60
QUANTILES = (0.5, 0.99, 0.999)

Meanwhile = Callable[[], None]


def run_paced(
    port: int, rate: int, seconds: int, first: int, meanwhile: Meanwhile | None = None
) -> list[float]:
    """Latencies in milliseconds by quantile, at a pace that another process keeps.

    Raises RuntimeError unless all get 200.
    """
    command = command_module("tests.bench.paced", *map(str, (port, rate, seconds, first)))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if meanwhile is not None:
            meanwhile()
        found = json.loads(process.stdout.read())
    if found["statuses"] != {"200": rate * seconds}:
        raise RuntimeError(f"{rate * seconds} requests were answered {found['statuses']}")
    return cast("list[float]", found["milliseconds"])


class _Pace:
    """The idle connections, what waits for one, and when requests in flight were due."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.total = -1
        self.done = asyncio.Event()
        self._idle: list[Connection] = []
        self._due: dict[Connection, float] = {}
        self._waiting: list[tuple[int, float]] = []

    def send(self, number: int, due: float) -> None:
        if self._idle:
            self._write(self._idle.pop(), number, due)
        else:
            self._waiting.append((number, due))

    def _write(self, connection: Connection, number: int, due: float) -> None:
        self._due[connection] = due
        connection.transport.write(request(number, _BODY_BYTES))

    def ready(self, connection: Connection) -> None:
        if connection in self._due:
            self.latencies.append(perf_counter() - self._due.pop(connection))
            self.check()
        if self._waiting:
            self._write(connection, *self._waiting.pop(0))
        else:
            self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        self.statuses["lost"] += self._due.pop(connection, None) is not None
        self.check()

    def check(self) -> None:
        if sum(self.statuses.values()) == self.total:
            self.done.set()


async def paced(port: int, rate: int, seconds: float, first: int) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    pace, total = _Pace(), int(rate * seconds)
    for _ in range(_CONNECTIONS):
        await loop.create_connection(lambda: Connection(pace), "127.0.0.1", port)
    gc.freeze()
    gc.disable()
    started, sent = perf_counter() + 0.1, 0
    print("started", flush=True)
    async with asyncio.timeout(seconds + _TIMEOUT):
        while sent < total:
            while sent < total and started + sent / rate <= perf_counter():
                pace.send(first + sent, started + sent / rate)
                sent += 1
            await asyncio.sleep(max(0.0, started + sent / rate - perf_counter()))
        pace.total = total
        pace.check()
        await pace.done.wait()
    found = sorted(pace.latencies)
    quantiles = [
        found[min(len(found) - 1, int(len(found) * quantile))] * 1000 for quantile in QUANTILES
    ]
    return {"statuses": dict(pace.statuses), "milliseconds": quantiles}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(paced(*map(int, sys.argv[1:5])))))
