"""Counts in Redis or Valkey: one server, Sentinel or Cluster; TLS, ACL users, Unix sockets.

The counting is done by one Lua script for each window type (`lua/*.lua`), atomically and by the server's clock. A batch is one
write to each server, with one script call per window type, and on a cluster one per window type and hash tag: keys are spread
over `TAGS` tags, so that a batch falls apart into few calls and still reaches every primary.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import hiredis

from extproc.errors import UsageError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import redacted
from extproc.store.connection import Access, Command, Connection, Place, Reply, refusal
from extproc.store.remote import RemoteStore, Shot, Verdict
from extproc.store.topology import Cluster, One, Topology, Watched
from extproc.windows import Count, Hit

TAGS = 16
"""Hash tags that a cluster's keys are spread over: few calls per batch against an even load on the primaries."""

DEFAULT_PREFIX = "loopguard:"
_VERDICT = 5
"""Integers per key in a script's answer."""


class _Script:
    """One Lua file and the SHA-1 that the server knows it by."""

    def __init__(self, name: str) -> None:
        self.text = (files("extproc.store") / "lua" / f"{name}.lua").read_text()
        self.sha = hashlib.sha1(self.text.encode()).hexdigest()  # noqa: S324  # the server's name for it, not a secret


SCRIPTS = {name: _Script(name) for name in ("sliding_ttl", "sliding_log", "fixed")}


class _Call(NamedTuple):
    """One script call: the shots of a batch that share a window type and a hash tag, by their positions in the batch."""

    script: _Script
    tag: str
    shots: Sequence[Shot]
    positions: Sequence[int]


class RedisBackend:
    """See `Backend`."""

    def __init__(self, topology: Topology, prefix: str) -> None:
        """Count on the servers of `topology`; every key starts with `prefix`."""
        self._topology = topology
        self._prefix = prefix

    async def count(self, shots: Sequence[Shot]) -> Sequence[Verdict]:
        """Count every shot; each server gets one write."""
        groups: dict[tuple[str, str], list[int]] = {}
        for position, shot in enumerate(shots):
            groups.setdefault((shot.hit.window_type, self._tag(shot.hit)), []).append(position)
        calls = [
            _Call(SCRIPTS[window_type], tag, [shots[position] for position in positions], positions)
            for (window_type, tag), positions in groups.items()
        ]
        verdicts: list[Verdict] = [_NONE] * len(shots)
        odd = []
        for call, reply in await self._round_trip(calls):
            if isinstance(reply, hiredis.ReplyError):
                odd.append((call, reply))
            else:
                _read(call, reply, verdicts)
        if odd:
            await self._again(odd, verdicts)
        return verdicts

    async def probe(self) -> None:
        """Count once for every hash tag: a server that answers but cannot write is not well."""
        hit = Hit("", "sliding_ttl", 1_000, 2, 0, count_refused=True, count_to=2)
        await self.count([Shot(hit._replace(key=f"probe:{number:02x}")) for number in range(len(self._topology.tags) or 1)])

    def drop(self) -> None:
        """End the connections."""
        self._topology.drop()

    def _tag(self, hit: Hit) -> str:
        """Where the key goes, from the last two digits of its check."""
        tags = self._topology.tags
        return tags[int(hit.key[-2:], 16) % len(tags)] if tags else ""

    async def _round_trip(self, calls: Iterable[_Call]) -> list[tuple[_Call, Reply]]:
        """Make the calls, all servers at the same time."""
        parts: dict[Connection, list[_Call]] = {}
        for call in calls:
            connection = self._topology.ready(call.tag) or await self._topology.open(call.tag)
            parts.setdefault(connection, []).append(call)
        sent = [connection.send([self._command(call) for call in mine]) for connection, mine in parts.items()]
        if len(sent) > 1:
            await asyncio.wait(sent)  # rather than leave one behind whose failure nobody hears
            for answer in sent:
                answer.exception()
        replies = [await answer for answer in sent]
        return [pair for mine, answers in zip(parts.values(), replies, strict=True) for pair in zip(mine, answers, strict=True)]

    async def _again(self, odd: Sequence[tuple[_Call, hiredis.ReplyError]], verdicts: list[Verdict]) -> None:
        """What a server turned down without counting anything, where asking in another way helps.

        Raises:
            StoreError: it does not.
        """
        for call, error in odd:
            word, _, rest = str(error).partition(" ")
            if word == "NOSCRIPT":  # a new primary, or SCRIPT FLUSH
                connection = self._topology.ready(call.tag) or await self._topology.open(call.tag)
                _read(call, await _only(connection, self._command(call, whole=True)), verdicts)
            elif word == "MOVED":
                self._topology.forget()
                connection = await self._topology.at(_place(rest))
                _read(call, await _only(connection, self._command(call, whole=True)), verdicts)
            elif word == "ASK" and len(call.shots) == 1:  # the slot is on its way to another server
                connection = await self._topology.at(_place(rest))
                replies = await connection.send([("ASKING",), self._command(call, whole=True)])
                _read(call, replies[1], verdicts)
            elif word in ("ASK", "TRYAGAIN") and len(call.shots) > 1:  # some keys have gone, some not
                singles = [
                    call._replace(shots=[shot], positions=[position])
                    for shot, position in zip(call.shots, call.positions, strict=True)
                ]
                for single, reply in await self._round_trip(singles):
                    if isinstance(reply, hiredis.ReplyError):
                        await self._again([(single, reply)], verdicts)
                    else:
                        _read(single, reply, verdicts)
            else:
                raise refusal(error)

    def _command(self, call: _Call, *, whole: bool = False) -> Command:
        start = f"{self._prefix}{{{call.tag}}}:" if call.tag else self._prefix
        command: list[str | int] = ["EVAL", call.script.text] if whole else ["EVALSHA", call.script.sha]
        command.append(len(call.shots))
        command += [start + shot.hit.key for shot in call.shots]
        for (_, _, window, threshold, cooldown, count_refused, count_to), times, now in call.shots:
            command += (window, threshold, cooldown, 1 if count_refused else 0, count_to, times, now)
        return tuple(command)


_NONE = Verdict(Count(0, False, 0, 0), 0)


def _read(call: _Call, reply: Reply, verdicts: list[Verdict]) -> None:
    if isinstance(reply, hiredis.ReplyError):
        raise refusal(reply)
    numbers = cast("list[int]", reply)
    for at, position in enumerate(call.positions):
        count, looping, cooldown, span, stands = numbers[_VERDICT * at : _VERDICT * (at + 1)]
        verdicts[position] = Verdict(Count(count, bool(looping), cooldown, span), stands)


async def _only(connection: Connection, command: Command) -> Reply:
    replies = await connection.send([command])
    return replies[0]


def _place(rest: str) -> Place:
    """`ASK 1234 10.0.0.1:6379`, less its first word."""
    host, _, port = rest.rpartition(" ")[2].rpartition(":")
    return Place(host, int(port))


class _Url:
    """A store URL taken apart."""

    def __init__(self, url: str) -> None:
        """Take it apart.

        Raises:
            UsageError: something in it cannot be used.
        """
        self._url = url
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise self.wrong(str(error)) from None
        self.scheme, _, self.kind = parts.scheme.partition("+")
        secret, _, listed = parts.netloc.rpartition("@")
        user, _, password = secret.partition(":")
        self.user, self.password = unquote(user), unquote(password)
        self.hosts = [self._host(item) for item in listed.split(",") if item]
        self.path = unquote(parts.path.strip("/"))
        self.options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.fragment:
            raise self.wrong("it must not contain #; in a password, write %23")
        known = ("prefix", "connections", *(("db",) if self.scheme == "unix" else ()), *(self.tls_options()))
        unknown = [name for name in self.options if name not in known]
        if unknown:
            raise self.wrong(f"unknown option; there are {', '.join(known)}")

    def tls_options(self) -> tuple[str, ...]:
        """Options of the URL that tell about TLS."""
        return ("ca", "cert", "key") if self.scheme == "rediss" else ()

    def _host(self, text: str) -> Place:
        try:
            parts = urlsplit(f"//{text}")
            port = parts.port or (26_379 if self.kind == "sentinel" else 6379)
            return Place(parts.hostname or "localhost", port)
        except ValueError:
            raise self.wrong("what stands behind :// must be HOST:PORT") from None

    def number(self, text: str, what: str, least: int = 0) -> int:
        """An integer out of the URL."""
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise self.wrong(f"{what} must be a number from {least}")
        return int(text)

    def wrong(self, message: str) -> UsageError:
        """An error about this URL that does not show its password."""
        return UsageError(f"cannot use store {redacted(self._url)}: {message}")


def _secret(url: _Url, settings: Settings) -> Callable[[], tuple[str, str]]:
    """User and password; a password file is read at every connect, so that a password can be changed."""
    file = settings.store_password_file

    def read() -> tuple[str, str]:
        password = Path(file).read_text().strip() if file else settings.store_password
        return url.user, url.password or password

    try:
        _, password = read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise UsageError(f"--store-password-file {file}: {reason}") from None
    if url.user and not password:
        raise url.wrong(
            "a user needs a password, here as USER:PASSWORD@, in LOOPGUARD_STORE_PASSWORD or in --store-password-file"
        )
    return read


def _tls(url: _Url) -> ssl.SSLContext | None:
    if url.scheme != "rediss":
        return None
    given = [(name, url.options[name]) for name in url.tls_options() if name in url.options]
    for name, path in given:
        if not Path(path).is_file():
            raise url.wrong(f"{name}: there is no file {path}")
    if "key" in url.options and "cert" not in url.options:
        raise url.wrong("key needs cert")
    try:
        context = ssl.create_default_context(cafile=url.options.get("ca"))
        if "cert" in url.options:
            context.load_cert_chain(url.options["cert"], url.options.get("key"))
    except (ssl.SSLError, OSError) as error:
        raise url.wrong(f"ca, cert and key must be PEM files that belong together ({error.strerror or error})") from None
    return context


def open_redis(url: str, metrics: Metrics, settings: Settings) -> RemoteStore:
    """`redis://`, `rediss://` and `unix://`, with `+sentinel` and `+cluster`; see the README for the forms.

    Raises:
        UsageError: something in the URL cannot be used.
    """
    place = _Url(url)
    prefix = place.options.get("prefix", DEFAULT_PREFIX)
    connections = place.number(place.options.get("connections", "1"), "connections", 1)
    access = Access(_secret(place, settings), _tls(place))
    make = _KINDS[place.kind if place.scheme != "unix" else "unix"]
    backends = [RedisBackend(make(place, access), prefix) for _ in range(connections)]
    return RemoteStore(backends, metrics, settings.store_timeout)


def _single(url: _Url, access: Access) -> Topology:
    if len(url.hosts) != 1:
        raise url.wrong("it takes one HOST:PORT; for several use redis+sentinel:// or redis+cluster://")
    return One(url.hosts[0], replace(access, database=url.number(url.path or "0", "the database")))


def _unix(url: _Url, access: Access) -> Topology:
    if url.hosts or not url.path:
        raise url.wrong("it takes the form unix:///PATH?db=0")
    return One(Place(path=f"/{url.path}"), replace(access, database=url.number(url.options.get("db", "0"), "db")))


def _sentinel(url: _Url, access: Access) -> Topology:
    service, _, database = url.path.partition("/")
    if not url.hosts or not service:
        raise url.wrong(f"it takes the form {url.scheme}+sentinel://HOST1:PORT,HOST2:PORT/SERVICE")
    return Watched(url.hosts, service, replace(access, database=url.number(database or "0", "the database")))


def _cluster(url: _Url, access: Access) -> Topology:
    if not url.hosts or url.path not in ("", "0"):
        raise url.wrong(f"it takes the form {url.scheme}+cluster://HOST1:PORT,HOST2:PORT (a cluster has no databases)")
    if "{" in url.options.get("prefix", ""):
        raise url.wrong("the prefix must not contain {: the hash tag of a cluster's keys is Loopguard's")
    return Cluster(url.hosts, access, TAGS)


_KINDS: Mapping[str, Callable[[_Url, Access], Topology]] = {
    "": _single,
    "unix": _unix,
    "sentinel": _sentinel,
    "cluster": _cluster,
}
