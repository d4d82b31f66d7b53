"""What an open page on the admin port costs requests."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from time import sleep
from typing import NamedTuple

from extproc.operator.admin.html import REFRESH_SECONDS
from tests.bench import samples
from tests.bench.builds import SOURCES, explain_missing, find_compiled, serve
from tests.bench.envoy_config import Listener, running_envoy
from tests.bench.load import load, write_chats
from tests.bench.paced import Meanwhile, run_paced
from tests.bench.processes import apart, free_port, running
from tests.bench.report import Row, progress
from tests.bench.timing import difference, interleaved, process_cpu

TITLE = "page: CPU per request at 1,000 requests/s behind Envoy, while a browser shows the page"

_RATE = 1_000
_LIMIT_US = 3
_LOOPS = 20
_REPEATS = 6
"""One more than the threshold of samples.policy."""

_LOOKS_PER_SECOND = 10
_BROWSERS = _LOOKS_PER_SECOND * REFRESH_SECONDS
"""This many look at once, because what one of them costs is too little to be seen."""


class _Guard(NamedTuple):
    """A guard behind Envoy, with loops in its table."""

    pid: int
    port: int
    admin: int

    def pace(self, seconds: int, first: int, latencies: list[float], meanwhile: Meanwhile | None = None) -> float:
        """Microseconds of CPU for each request, the first of which has this number; notes the p99 in milliseconds."""
        before = process_cpu(self.pid)
        latencies.append(run_paced(self.port, _RATE, seconds, first, meanwhile)[1])
        return (process_cpu(self.pid) - before) / (_RATE * seconds) * 1e6

    def look(self, seconds: float = 0) -> None:
        """Look at the page for that long, at least once; raises RuntimeError if it does not show the loops."""
        for _ in range(max(1, int(seconds * _LOOKS_PER_SECOND))):
            connection = HTTPConnection("127.0.0.1", self.admin, timeout=10)
            connection.request("GET", "/")
            page = connection.getresponse().read()
            connection.close()
            if b"<b>%d</b> in the last hour" % _LOOPS not in page:
                raise RuntimeError(f"the page does not show {_LOOPS} loops")
            sleep(1 / _LOOKS_PER_SECOND)


def run(*, quick: bool) -> list[Row]:
    """Measure seconds without viewers and seconds with many, in turns."""
    rounds, seconds = (3, 2) if quick else (5, 4)
    numbers = iter(range(1 << 20, 1 << 40, 1 << 20))  # every round sends requests that were never sent before
    calm: list[float] = []
    watched: list[float] = []
    with tempfile.TemporaryDirectory() as directory, _guarding(Path(directory)) as guard:
        progress("page: 1,000 requests/s", 1, 1)
        looking = partial(guard.look, seconds)
        works = {
            "closed": lambda: guard.pace(seconds, next(numbers), calm),
            "open": lambda: guard.pace(seconds, next(numbers), watched, looking),
        }
        found = interleaved(rounds, works)
    built = "" if find_compiled() else f"pure Python: {explain_missing()}; "
    many = f"p99 at the client {median(watched):.1f} vs. {median(calm):.1f} ms with {_BROWSERS} browsers"
    return [
        Row(
            f"the page open in a browser, {_LOOPS} loops in it, minus closed",
            difference(found, "open", "closed") / _BROWSERS, "us", _LIMIT_US, f"{built}{many}",
        ),
        Row("closed", median(found["closed"]), "us"),
    ]  # fmt: skip


@contextmanager
def _guarding(directory: Path) -> Iterator[_Guard]:
    """The guard, until the block ends."""
    policy = directory / "policy.json"
    policy.write_bytes(samples.bundle([samples.policy(window_seconds=3600, action="warn")]))
    port, admin, listener = free_port(), free_port(), Listener(free_port(), "guard")
    command = serve(find_compiled() or SOURCES, policy, port, "--admin", f"127.0.0.1:{admin}")
    with (
        running(command, port, directory / "guard.log") as pid,
        running_envoy(directory, {"guard": listener}, {"guard": port}) as proxy,
        apart([pid], [proxy]),
    ):
        for _ in range(_REPEATS):
            asyncio.run(load(listener.port, 1, write_chats(0, _LOOPS), _LOOPS))
        guard = _Guard(pid, listener.port, admin)
        guard.look()  # which reads the template
        yield guard
