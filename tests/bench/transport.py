"""One request through the guard's own transport, without a socket: an Envoy's bytes in, the answer's bytes out."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median

from tests.bench import replay, samples
from tests.bench.builds import SOURCES, explain_missing, find_compiled, serve
from tests.bench.envoy_config import Listener, running_envoy
from tests.bench.load import load, write_chats
from tests.bench.processes import free_port, running
from tests.bench.report import Row, progress
from tests.bench.timing import at_one_clock, difference, interleaved, ratio

TITLE = "transport: one request in process, an Envoy's bytes in to the answer's bytes out (POST 1 KB, counts in memory)"

_LIMIT_US = 24
_LIMIT_CHANGING_US = 3
_LIMIT_PAIRED = 1.3
_METADATA = {"same": "0a1b2c3d-4e5f-4071-8293-a4b5c6d7e8f9", "changing": "%REQ(x-request-id)%"}
"""One header of the gRPC stream's metadata: always the same, or another one with each request, of the same length."""


def run(*, quick: bool) -> list[Row]:
    """Record an Envoy, then replay it into both builds in turns."""
    rounds, requests = (5, 1_000) if quick else (15, 2_000)
    compiled = find_compiled()
    builds = {"pure Python": SOURCES} if compiled is None else {"compiled": compiled, "pure Python": SOURCES}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        policy, paired = directory / "policy.json", directory / "paired.json"
        live = samples.policy(window_seconds=3600)
        policy.write_bytes(samples.bundle([live]))
        paired.write_bytes(samples.bundle([live, samples.canary(window_seconds=3600, threshold_identical_requests=3)]))
        progress("transport: recording", 1, 2)
        recordings = _record(directory, policy, requests)
        works: dict[str, Callable[[], float]] = {}
        for build, programs in builds.items():
            ask = stack.enter_context(_replaying(programs, policy, requests, recordings))
            works |= {f"{build}, {recording}": partial(at_one_clock, partial(ask, recording)) for recording in recordings}
            ask = stack.enter_context(_replaying(programs, paired, requests, recordings))
            works[f"{build}, paired"] = partial(at_one_clock, partial(ask, "same"))
        progress("transport: replaying", 2, 2)
        interleaved(2, works)  # warm-up
        found = interleaved(rounds, works)
    return [*_rows(found, "compiled", _LIMIT_US, _LIMIT_CHANGING_US, _LIMIT_PAIRED), *_rows(found, "pure Python")]


def _rows(
    found: Mapping[str, list[float]],
    build: str,
    limit: float | None = None,
    limit_changing: float | None = None,
    limit_paired: float | None = None,
) -> list[Row]:
    same, changing, paired = (f"{build}, {name}" for name in ("same", "changing", "paired"))
    there = same in found
    note = "" if there else explain_missing()
    return [
        Row(f"{build}: one request", median(found[same]) if there else None, "us", limit, note),
        Row(
            f"{build}: a changing header in the stream's metadata, beyond one that is always the same",
            difference(found, changing, same) if there else None, "us", limit_changing, note,
        ),
        Row(
            f"{build}: with a paired shadow policy, vs. the enforcing one alone",
            ratio(found, paired, same) if there else None, "", limit_paired, note,
        ),
    ]  # fmt: skip


def _record(directory: Path, policy: Path, requests: int) -> dict[str, Path]:
    """What an Envoy says to a guard on one connection, one request after the other, with each kind of metadata."""
    guard = free_port()
    between = {name: free_port() for name in _METADATA}
    listeners = {name: Listener(free_port(), name, {"x-trace": value}) for name, value in _METADATA.items()}
    files = {}
    with (
        running(serve(SOURCES, policy, guard, "--admin", "127.0.0.1:0"), guard, directory / "guard.log"),
        running_envoy(directory, listeners, between),
    ):
        for number, (name, listener) in enumerate(listeners.items()):
            sending = load(listener.port, 1, write_chats(number * requests, requests), requests)
            said = asyncio.run(_listen(between[name], guard, sending))
            files[name] = directory / name
            files[name].write_bytes(b"\n".join(map(b64encode, said)))
    return files


async def _listen(port: int, guard: int, traffic: Awaitable[object]) -> list[bytes]:
    """Stand between Envoy and a guard while requests pass; gives what Envoy said, read by read."""
    said: list[bytes] = []

    async def stand_between(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, onward = await asyncio.open_connection("127.0.0.1", guard)
        with suppress(asyncio.CancelledError):  # the recording is over
            await asyncio.gather(_pass_on(reader, onward, said), _pass_on(answers, writer, []))

    server = await asyncio.start_server(stand_between, "127.0.0.1", port)
    await traffic
    server.close()
    return said


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: list[bytes]) -> None:
    while data := await reader.read(2**16):
        said.append(data)
        writer.write(data)


@contextmanager
def _replaying(programs: Path, policy: Path, requests: int, recordings: Mapping[str, Path]) -> Iterator[Callable[[str], float]]:
    """A process of one build; gives a function that replays a recording there and returns microseconds per request."""
    named = [f"{name}={file}" for name, file in recordings.items()]
    command = [str(programs / "python"), "-P", replay.__file__, str(policy), str(requests), *named]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        asked, answers = process.stdin, process.stdout
        assert asked is not None
        assert answers is not None

        def ask(name: str) -> float:
            print(name, file=asked, flush=True)
            return float(answers.readline())

        yield ask
        asked.close()
