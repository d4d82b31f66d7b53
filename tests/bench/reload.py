"""How long a reload of 10,000 policies blocks the event loop.

It runs in a process of its own (`python -m tests.bench.reload POLICIES CHANGES`): the real reloader
    watches real files,
beside a task that sleeps a millisecond at a time and notes how late it wakes.
"""

import asyncio
import gc
import json
import logging
import sys
import tempfile
from bisect import bisect
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter

from extproc.engine.engine import Engine
from extproc.metrics import Metrics
from extproc.reload import Reloader
from extproc.server import SWITCH_SECONDS
from extproc.settings import Settings
from tests.bench import samples
from tests.bench.processes import run_module
from tests.bench.report import Row, progress

TITLE = "reload: 10,000 policies change while requests are served"

_POLICIES = 10_000
_LIMIT_STALL_MS = 50
_LIMIT_SECONDS = 1
_LIMIT_LATE_MS = 3
_NAP = 0.001
_SETTLE = 0.5
_TIMEOUT = 30


def run(*, quick: bool) -> list[Row]:
    progress("reload", 1, 1)
    found = run_module("tests.bench.reload", str(_POLICIES), "3" if quick else "7")
    return [
        Row(
            "longest stall of the loop",
            found["stall_ms"],
            "ms",
            _LIMIT_STALL_MS,
            "median of the reloads",
        ),
        Row(
            "time-weighted median delay of the loop during a reload",
            found["late_ms"],
            "ms",
            _LIMIT_LATE_MS,
        ),
        Row("from change to effect", found["seconds"], "s", _LIMIT_SECONDS),
    ]


class Ticker:
    def __init__(self) -> None:
        self._gaps: list[float] = []

    async def run(self) -> None:
        while True:
            before = perf_counter()
            await asyncio.sleep(_NAP)
            self._gaps.append(perf_counter() - before - _NAP)

    def take(self) -> tuple[float, float]:
        """The gap beyond which half of the time was spent, and the longest, in milliseconds.

        Starts anew.
        """
        gaps, self._gaps = sorted(self._gaps or [0.0]), []
        spent = list(accumulate(gap + _NAP for gap in gaps))
        return gaps[bisect(spent, spent[-1] / 2)] * 1000, gaps[-1] * 1000


def _write(directory: Path, policies: int, version: int) -> None:
    listed = [
        samples.policy(n, {"pathExact": f"/v1/tools/{n:05d}"}, cooldown_seconds=version)
        for n in range(policies)
    ]
    fresh = directory / ".fresh"
    fresh.write_bytes(samples.bundle(listed, version))
    fresh.replace(directory / "policies.json")


async def measure(directory: Path, policies: int, changes: int) -> dict[str, float]:
    _write(directory, policies, 1)
    reloader = Reloader(Settings(policy=(str(directory),)), Metrics())
    serving = samples.service(reloader.engine)
    gc.freeze()  # as the server does once it listens
    ticker, swapped = Ticker(), asyncio.Event()

    def swap(engine: Engine) -> None:
        serving.follow(engine)
        swapped.set()

    tasks = [asyncio.create_task(ticker.run()), asyncio.create_task(reloader.watch(swap))]
    await asyncio.sleep(_SETTLE)
    sys.setswitchinterval(SWITCH_SECONDS)  # as the server does
    stalls, late, seconds = [], [], []
    for version in range(2, changes + 2):
        await asyncio.sleep(1)
        swapped.clear()
        await asyncio.to_thread(_write, directory, policies, version)
        ticker.take()
        started = perf_counter()
        async with asyncio.timeout(_TIMEOUT):
            await swapped.wait()
        seconds.append(perf_counter() - started)
        typical, longest = ticker.take()
        late.append(typical)
        await asyncio.sleep(_SETTLE)  # what the old policies leave is cleared away after the swap
        stalls.append(max(longest, ticker.take()[1]))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found = {"stall_ms": stalls, "late_ms": late, "seconds": seconds}
    return {name: median(values) for name, values in found.items()}


def main(policies: int, changes: int) -> None:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(asyncio.run(measure(Path(directory), policies, changes))))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
