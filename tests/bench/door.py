"""The port under attack: the latency of a well-behaved client on its own connection, before and during the attack."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from statistics import quantiles
from time import perf_counter

import trustme

from extproc.transport import http2
from extproc.transport.grpc import frame_message
from extproc.transport.headers import encode
from extproc.transport.health import EXT_PROC
from tests.bench import samples
from tests.bench.attack import ATTACKS, EXPENSIVE, EXPENSIVE_PATH, HANDSHAKES, HELLO, frame
from tests.bench.builds import SOURCES, find_compiled, serve
from tests.bench.processes import command_module, free_port, running
from tests.bench.report import Row, progress

TITLE = "door: p99 of a normal client (60 requests/s, its own connection), before and during attacks on other connections"

_PER_SECOND = 60
_LIMIT_MS = 200
"""Envoy's message timeout, unless it is set."""

_ROUNDS = 6
"""One more than the threshold of samples.policy."""

_EXPENSIVE_SECONDS = 20.0

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
        writer.write(HELLO + frame(http2.WINDOW_UPDATE, 0, 0, (2**30).to_bytes(4, "big")))

    async def measure(self, seconds: float) -> list[float]:
        """Latencies in milliseconds."""
        found = []
        for _ in range(int(seconds * _PER_SECOND)):
            started = perf_counter()
            await self.ask(f"innocent-{self._stream}")
            found.append((perf_counter() - started) * 1000)
            await asyncio.sleep(max(0, 1 / _PER_SECOND - (perf_counter() - started)))
        return found

    async def ask(self, user: str, path: str = samples.PATH) -> bytes:
        """The server's answer to a request of `user`; the request is the same each time."""
        self._stream = number = self._stream + 2
        body = b'{"model":"gpt-4o","input":"%b"}' % user.encode()
        head = samples.headers_message(path, user=user, length=len(body))
        self._writer.write(
            frame(http2.HEADERS, http2.END_HEADERS, number, _BLOCK)
            + frame(http2.DATA, 0, number, frame_message(head))
            + frame(http2.DATA, 0, number, frame_message(samples.body_message(body)))
        )
        answer, ended = b"", 0
        while ended != number:
            ended, data = await self._read()
            answer += data
        self._writer.write(frame(http2.RST_STREAM, 0, number, bytes(4)))
        return answer

    async def _read(self) -> tuple[int, bytes]:
        """The stream that the next frame ends, 0 for none; and its data."""
        head = await self._reader.readexactly(9)
        payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        ended = head[4] & http2.END_STREAM and head[3] == http2.HEADERS
        return int.from_bytes(head[5:], "big") if ended else 0, payload if head[3] == http2.DATA else b""


def run(*, quick: bool) -> list[Row]:
    """Measure the well-behaved client alone and beside every attack, in one run."""
    seconds = 1.5 if quick else 5.0
    with tempfile.TemporaryDirectory() as name:
        directory, port = Path(name), free_port()
        rows = []
        with _serving(directory, port):
            rows += asyncio.run(_compare(port, tuple(ATTACKS), seconds))
        with _serving(directory, port):
            rows += asyncio.run(_find_loops(port, 40 if quick else 120))
        authority = trustme.CA()
        with _serving(directory, port, *_issue(authority, directory)):
            rows += asyncio.run(_compare(port, (HANDSHAKES,), seconds, _trust(authority)))
        return rows


def _serving(directory: Path, port: int, *flags: str) -> AbstractContextManager[int]:
    """A guard with a policy that compares bytes, and one that looks into bodies."""
    policy = directory / "policy.json"
    looking = {"pathExact": EXPENSIVE_PATH, "methods": ["POST"]}
    policies = [samples.policy(window_seconds=60), samples.policy(1, looking, similarity="canonical")]
    policy.write_bytes(samples.bundle(policies))
    command = serve(find_compiled() or SOURCES, policy, port, "--admin", f"127.0.0.1:{free_port()}", *flags)
    return running(command, port, directory / "guard.log")


def _issue(authority: trustme.CA, directory: Path) -> list[str]:
    """The flags of a guard with a certificate of an RSA key, whose handshakes take longest."""
    made = authority.issue_cert("guard.example", key_type=trustme.KeyType.RSA)
    cert, key, trusted = (directory / name for name in ("tls.crt", "tls.key", "ca.crt"))
    cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    key.write_bytes(made.private_key_pem.bytes())
    trusted.write_bytes(authority.cert_pem.bytes())
    return ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(trusted)]


def _trust(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    authority.issue_cert("envoy.example").configure_cert(context)
    context.set_alpn_protocols(["h2"])
    return context


async def _connect(port: int, tls: ssl.SSLContext | None = None) -> _Innocent:
    name = "guard.example" if tls else None
    return _Innocent(*await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=name))


@asynccontextmanager
async def _attacking(name: str, port: int, seconds: float) -> AsyncIterator[dict[str, int]]:
    """Attack while the block runs, and at most that long; what was sent is known afterwards."""
    command = command_module("tests.bench.attack", name, str(port), str(seconds), "1")
    attacking = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    sent: dict[str, int] = {}
    await asyncio.sleep(0.7)  # until it has started
    yield sent
    output, _ = await attacking.communicate()
    sent |= json.loads(output)


async def _compare(port: int, names: Sequence[str], seconds: float, tls: ssl.SSLContext | None = None) -> list[Row]:
    innocent = await _connect(port, tls)
    await innocent.measure(0.5)
    rows = []
    for number, name in enumerate(names, 1):
        progress(f"door: {name}", number, len(names))
        before = _p99(await innocent.measure(seconds))
        async with _attacking(name, port, seconds + 1) as sent:
            during = _p99(await innocent.measure(seconds))
        note = f"{during / before:.1f}x of {before:.1f} ms; {sent['bytes'] / 1e6:.0f} MB on {sent['connections']} connections"
        rows.append(Row(name, during, "ms", _LIMIT_MS, note))
        await asyncio.sleep(1)
    return rows


async def _find_loops(port: int, users: int) -> list[Row]:
    """Loops of many callers, before and while another one has the guard look into expensive bodies."""
    innocent = await _connect(port)
    calm, before = await _loop(innocent, "calm", users)
    async with _attacking(EXPENSIVE, port, _EXPENSIVE_SECONDS) as sent:
        await asyncio.sleep(1)  # which uses up what the attacker has saved
        started = perf_counter()
        caught, during = await _loop(innocent, "busy", users)
        spent = perf_counter() - started
    if spent > _EXPENSIVE_SECONDS - 2:
        raise RuntimeError(f"the loops took {spent:.0f} s, longer than the attack")
    note = f"of {users}; {users - calm} before; {sent['bytes'] / _EXPENSIVE_SECONDS / 1e6:.0f} MB/s of expensive JSON"
    late = sum(latency > _LIMIT_MS for latency in during)
    return [
        Row("one caller's expensive JSON: loops of other callers missed", users - caught, "", 0, note),
        Row(
            "requests of others that time out",
            late,
            "",
            0,
            f"of {len(during)}; {sum(each > _LIMIT_MS for each in before)} before",
        ),
        Row("p99 of others", _p99(during), "ms", _LIMIT_MS, f"{_p99(during) / _p99(before):.1f}x of {_p99(before):.1f} ms"),
    ]


async def _loop(innocent: _Innocent, name: str, users: int) -> tuple[int, list[float]]:
    """How many of the users' loops are refused, and how long each answer took in milliseconds."""
    latencies = []
    answers: dict[int, bytes] = {}
    for _ in range(_ROUNDS):
        for user in range(users):
            started = perf_counter()
            answers[user] = await innocent.ask(f"{name}-{user}", EXPENSIVE_PATH)
            latencies.append((perf_counter() - started) * 1000)
    return sum(b"loop_detected" in answer for answer in answers.values()), latencies


def _p99(latencies: list[float]) -> float:
    return quantiles(latencies, n=100)[98]
