"""Counts in Redis or Valkey: one server, Sentinel or Cluster; TLS, ACL users, Unix sockets.

The counting is done by one Lua script for each window type (`lua/*.lua`), atomically and by the server's clock. A batch is one
call per window type on one server, and on a cluster one per window type and hash tag: keys are spread over `TAGS` tags, so that
a batch falls apart into few calls and still reaches every primary.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis.asyncio
import redis.exceptions as failures
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from extproc.errors import StoreError, UsageError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import redacted
from extproc.store.remote import RemoteStore, Shot, Verdict
from extproc.windows import Count, Hit

TAGS = 16
"""Hash tags that a cluster's keys are spread over: few calls per batch against an even load on the primaries."""

DEFAULT_PREFIX = "loopguard:"
DEFAULT_POOL = 8

_KINDS: tuple[tuple[type[Exception], str, bool], ...] = (
    (failures.AuthenticationError, "auth", False),
    (failures.NoPermissionError, "auth", False),
    (failures.ReadOnlyError, "read_only", True),
    (failures.OutOfMemoryError, "oom", True),
    (failures.BusyLoadingError, "loading", True),
    (failures.ClusterError, "cluster", True),
    (failures.TimeoutError, "timeout", True),
    (failures.ConnectionError, "connection", True),
    (OSError, "connection", True),
    (failures.ResponseError, "response", True),
    (failures.RedisError, "client", True),
)
"""What an exception of redis-py means: its kind for metrics, and whether waiting may help; the first that fits counts."""

_VERDICT = 5
"""Integers per key in a script's answer."""


class _Client(Protocol):
    """What redis.asyncio.Redis and RedisCluster have in common."""

    def execute_command(self, *arguments: Any) -> Awaitable[Any]: ...  # noqa: ANN401  # as redis-py types it

    def aclose(self) -> Awaitable[None]: ...


class _Script:
    """One Lua file and the SHA-1 that the server knows it by."""

    def __init__(self, name: str) -> None:
        self.text = (files("extproc.store") / "lua" / f"{name}.lua").read_text()
        self.sha = hashlib.sha1(self.text.encode()).hexdigest()  # noqa: S324  # the server's name for it, not a secret


class RedisBackend:
    """See `Backend`; one client for one server, a Sentinel's primary or a cluster."""

    def __init__(self, client: _Client, drop: Callable[[], Awaitable[None]], *, prefix: str, tags: int) -> None:
        """Wrap a client.

        Args:
            client: of redis-py, not connected yet.
            drop: disconnects everything that the client has open.
            prefix: of every key.
            tags: hash tags that keys are spread over; 0 for none.
        """
        self._client = client
        self._drop = drop
        self._prefix = prefix
        self._tags = tags
        self._scripts = {name: _Script(name) for name in ("sliding_ttl", "sliding_log", "fixed")}

    async def count(self, shots: Sequence[Shot]) -> Sequence[Verdict]:
        """Count every shot: one script call per window type, and on a cluster per hash tag, all at the same time."""
        groups: dict[tuple[str, str], list[int]] = {}
        for position, shot in enumerate(shots):
            groups.setdefault((shot.hit.window_type, self._tag(shot.hit)), []).append(position)
        calls = [
            self._call(self._scripts[window_type], tag, [shots[position] for position in positions])
            for (window_type, tag), positions in groups.items()
        ]
        try:
            answers = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        except (failures.RedisError, OSError) as error:
            raise _store_error(error) from error
        verdicts: dict[int, Verdict] = {}
        for positions, answer in zip(groups.values(), answers, strict=True):
            for at, position in enumerate(positions):
                count, looping, cooldown, span, stands = answer[_VERDICT * at : _VERDICT * (at + 1)]
                verdicts[position] = Verdict(Count(count, bool(looping), cooldown, span), stands)
        return [verdicts[position] for position in range(len(shots))]

    async def probe(self) -> None:
        """Count once for every hash tag: a server that answers but cannot write is not well."""
        hit = Hit("probe:", "sliding_ttl", 1_000, 2, 0, count_refused=True, count_to=2)
        await self.count([Shot(hit._replace(key=f"probe:{number:02x}")) for number in range(self._tags or 1)])

    async def reset(self) -> None:
        """Drop the connections."""
        await self._drop()

    async def close(self) -> None:
        """Drop the connections for good."""
        await self._client.aclose()

    def _tag(self, hit: Hit) -> str:
        """Where the key goes, from the last two digits of its check."""
        return f"{{{int(hit.key[-2:], 16) % self._tags}}}" if self._tags else ""

    async def _call(self, script: _Script, tag: str, shots: Sequence[Shot]) -> list[int]:
        keys = [f"{tag}{self._prefix}{shot.hit.key}" for shot in shots]
        arguments: list[int] = []
        for (_, _, window, threshold, cooldown, count_refused, count_to), times, now in shots:
            arguments += (window, threshold, cooldown, 1 if count_refused else 0, count_to, times, now)
        try:
            answer = await self._client.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except failures.NoScriptError:  # a new primary, or SCRIPT FLUSH; nothing has been counted yet
            answer = await self._client.execute_command("EVAL", script.text, len(keys), *keys, *arguments)
        return cast("list[int]", answer)


def _store_error(error: Exception) -> StoreError:
    kind, transient = next((kind, transient) for known, kind, transient in _KINDS if isinstance(error, known))
    return StoreError(f"{type(error).__name__}: {error}", kind=kind, transient=transient)


class _Secret(CredentialProvider):
    """User and password at every connect, so that a rotated password file is read anew."""

    def __init__(self, user: str, password: str, file: str) -> None:
        self._user = user
        self._password = password
        self._file = file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """As AUTH takes them."""
        password = Path(self._file).read_text().strip() if self._file else self._password
        return (self._user, password) if self._user else (password,)


class _Place:
    """A store URL taken apart.

    Attributes:
        hosts: (host, port) pairs, empty for a Unix socket.
        path: what stands behind the hosts, without the slash: a database number, or Sentinel's service.
        options: of the query.
    """

    def __init__(self, url: str, parts: SplitResult, port: int, options: Sequence[str]) -> None:
        self._url = url
        authority = parts.netloc
        secret, _, listed = authority.rpartition("@")
        user, _, password = secret.partition(":")
        self.user, self.password = unquote(user), unquote(password)
        self.hosts = [self._host(item, port) for item in listed.split(",") if item]
        self.path = parts.path.strip("/")
        self.options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = [name for name in self.options if name not in options]
        if unknown:
            raise self.wrong(f"unknown option {unknown[0]}; there are {', '.join(options)}")

    def _host(self, text: str, port: int) -> tuple[str, int]:
        parts = urlsplit(f"//{text}")
        try:
            return parts.hostname or "localhost", parts.port or port
        except ValueError:
            raise self.wrong(f"{text} is not HOST:PORT") from None

    def number(self, text: str, what: str) -> int:
        """A non-negative integer out of the URL."""
        if not text.isdecimal():
            raise self.wrong(f"{what} must be a number, not {text!r}")
        return int(text)

    def wrong(self, message: str) -> UsageError:
        """An error about this URL that does not show its password."""
        return UsageError(f"cannot use store {redacted(self._url)}: {message}")


_OPTIONS = ("prefix", "max_connections")
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def _shared(place: _Place, settings: Settings) -> dict[str, Any]:
    """Arguments of redis-py that every kind of connection takes."""
    secret = _Secret(place.user, place.password or settings.store_password, settings.store_password_file)
    known = bool(place.user or place.password or settings.store_password or settings.store_password_file)
    if settings.store_password_file:
        try:
            secret.get_credentials()
        except OSError as error:
            raise UsageError(f"--store-password-file {settings.store_password_file}: {error.strerror}") from None
    return {
        "credential_provider": secret if known else None,
        # A retry inside the client could count a request twice; deadlines and probes are ours.
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": 1.0,
        "socket_timeout": None,
        "max_connections": place.number(place.options.get("max_connections", str(DEFAULT_POOL)), "max_connections"),
    }


def _tls(place: _Place, scheme: str) -> dict[str, Any]:
    if not scheme.startswith("rediss"):
        return {}
    for name in _TLS_OPTIONS:
        if name in place.options and not Path(place.options[name]).is_file():
            raise place.wrong(f"{name} {place.options[name]} is not a file")
    return {"ssl": True, **{name: place.options[name] for name in _TLS_OPTIONS if name in place.options}}


def open_redis(url: str, metrics: Metrics, settings: Settings) -> RemoteStore:
    """`redis://`, `rediss://` and `unix://`, with `+sentinel` and `+cluster`; see the README for the forms.

    Raises:
        UsageError: something in the URL cannot be used.
    """
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    options = (*_OPTIONS, *(_TLS_OPTIONS if scheme == "rediss" else ()), *(("db",) if scheme == "unix" else ()))
    place = _Place(url, parts, 26379 if kind == "sentinel" else 6379, options)
    shared = {**_shared(place, settings), **_tls(place, scheme)}
    client, drop, tags = _KINDS_OF_SERVER[kind if scheme != "unix" else "unix"](place, shared)
    backend = RedisBackend(client, drop, prefix=place.options.get("prefix", DEFAULT_PREFIX), tags=tags)
    return RemoteStore(backend, metrics, settings.store_timeout)


_Opened = tuple[_Client, Callable[[], Awaitable[None]], int]


def _single(place: _Place, shared: dict[str, Any]) -> _Opened:
    if len(place.hosts) != 1:
        raise place.wrong("it takes one HOST:PORT; for several use redis+sentinel:// or redis+cluster://")
    host, port = place.hosts[0]
    client = redis.asyncio.Redis(host=host, port=port, db=place.number(place.path or "0", "the database"), **shared)
    return client, client.connection_pool.disconnect, 0


def _unix(place: _Place, shared: dict[str, Any]) -> _Opened:
    database = place.number(place.options.get("db", "0"), "db")
    client = redis.asyncio.Redis(unix_socket_path=f"/{place.path}", db=database, **shared)
    return client, client.connection_pool.disconnect, 0


def _sentinel(place: _Place, shared: dict[str, Any]) -> _Opened:
    if not place.hosts or not place.path:
        raise place.wrong("it takes the form redis+sentinel://HOST1:PORT,HOST2:PORT/SERVICE")
    service, _, database = place.path.partition("/")
    sentinels = Sentinel(place.hosts, sentinel_kwargs={"socket_timeout": 0.5, "socket_connect_timeout": 0.5}, **shared)  # type: ignore[no-untyped-call]
    client = sentinels.master_for(service, db=place.number(database or "0", "the database"))
    return client, client.connection_pool.disconnect, 0


def _cluster(place: _Place, shared: dict[str, Any]) -> _Opened:
    if not place.hosts or place.path not in ("", "0"):
        raise place.wrong("it takes the form redis+cluster://HOST1:PORT,HOST2:PORT (a cluster has no databases)")
    nodes = [ClusterNode(host, port) for host, port in place.hosts]
    client = RedisCluster(startup_nodes=nodes, cluster_error_retry_attempts=0, **shared)
    return client, client.aclose, TAGS


_KINDS_OF_SERVER: Mapping[str, Callable[[_Place, dict[str, Any]], _Opened]] = {
    "": _single,
    "unix": _unix,
    "sentinel": _sentinel,
    "cluster": _cluster,
}
