"""State in Redis or Valkey: one server, Sentinel or Cluster; TLS, ACL users, Unix sockets.

The scripts in `rules/` do the work, atomically and by the server's clock. A batch is one write to each server, with one call
for each script, and on a cluster one for each script and hash tag. Keys are spread over `TAGS` tags: a batch falls apart into
few calls and still reaches every primary. Each primary of a cluster is a shard of its own, with its own connections.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.credentials import CredentialProvider
from redis.exceptions import ResponseError

from extproc.errors import StoreError, UsageError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import redact_url
from extproc.store.client import Access
from extproc.store.credentials import Password, Provided
from extproc.store.link import Address, Link, Reply, explain_refusal
from extproc.store.pending import Pending
from extproc.store.remote import RemoteStore
from extproc.store.resp import write_keys, write_word
from extproc.store.rules.hit import Hit
from extproc.store.scripts import MAX_WEIGHT, Script, ScriptCall, count_call
from extproc.store.shard import blame_bug
from extproc.store.side_connections import SideConnections
from extproc.store.topology import Layout, One, Slots, Topology, Undivided, Watched

TAGS = 16
"""Hash tags that a cluster's keys are spread over: few calls per batch against an even load on the primaries."""

DEFAULT_PREFIX = "loopguard:"

_ASKING: Final = b"*1\r\n$6\r\nASKING\r\n"


class _Group:
    """Calls of a batch that share a script and a hash tag, which go as one; and their positions in the batch."""

    __slots__ = ("calls", "positions", "script", "tag", "weight")

    def __init__(self, script: Script, tag: str) -> None:
        self.script = script
        self.tag = tag
        self.weight = 0
        self.calls: list[ScriptCall] = []
        self.positions: list[int] = []

    def add(self, call: ScriptCall, position: int) -> _Group:
        """Take one more."""
        self.weight += call.weight
        self.calls.append(call)
        self.positions.append(position)
        return self

    def list_keys(self) -> list[str]:
        """Keys of all calls."""
        keys = []
        for call in self.calls:
            keys.append(call.subject.key)
            if call.others:
                keys += call.others
        return keys

    def list_arguments(self) -> list[int | bytes]:
        """Arguments of all calls, or of one where they are alike, as those of hits of one policy are."""
        first = self.calls[0].arguments
        for call in self.calls:
            if call.arguments != first:
                return [argument for call in self.calls for argument in call.arguments]
        return list(first)

    def split(self) -> list[_Group]:
        """A group for each call; one call that takes several keys goes with its first alone, without which it is nothing."""
        calls = self.calls if len(self.calls) > 1 else [call.narrow() for call in self.calls]
        return [_Group(self.script, self.tag).add(call, position) for call, position in zip(calls, self.positions, strict=True)]


class _Trip(Pending):
    """What a batch waits for: one exchange with each server that has keys of it, all at the same time.

    Attributes:
        answers: as far as they are there, in the order of the calls.
        odd: what servers turned down without running anything.
        away: servers that have not answered yet.
    """

    __slots__ = ("_work", "answers", "away", "odd")

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.answers: list[Any] = [None] * calls
        self.odd: list[tuple[_Group, ResponseError]] = []
        self.away = 0
        self._work: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """See `Pending`."""
        super().cancel()
        if self._work is not None:
            self._work.cancel()

    def fail(self, error: Exception) -> None:
        """There will be no answer."""
        self.settle(None, error if isinstance(error, StoreError) else blame_bug(error))

    def follow(self, work: Coroutine[Any, Any, None]) -> None:
        """Leave the rest to what has to wait for something."""
        self._work = asyncio.get_running_loop().create_task(self._follow(work))

    async def _follow(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  # whoever waits has to hear of it
            self.fail(error)


class RedisBackend:
    """See `Backend`."""

    def __init__(self, topology: Topology, prefix: str) -> None:
        """Keep state on a server of `topology`; every key starts with `prefix`."""
        self._topology = topology
        self._prefix = prefix

    def call(self, calls: list[ScriptCall]) -> Pending:
        """Make every call; each server gets one write, at once where its connection is open."""
        trip = _Trip(len(calls))
        try:
            groups = self._group(calls)
            if not self._send(trip, groups):
                trip.follow(self._connect(trip, groups))
        except Exception as error:  # noqa: BLE001  # as all that goes wrong later
            trip.fail(error)
        return trip

    async def probe(self) -> None:
        """Count once for every hash tag of the shard: a server that answers but cannot write is not well."""
        keys = [f"probe:{number:02x}" for number in await self._topology.learn()]
        hits = [Hit(key, "sliding_ttl", 1_000, 2, 0, count_refused=True, count_to=2) for key in keys]
        if hits:  # else its keys are elsewhere now
            await self.call([count_call(hit) for hit in hits])

    async def drop(self) -> None:
        """End the connections."""
        await self._topology.drop()

    def _group(self, calls: list[ScriptCall]) -> list[_Group]:
        full: list[_Group] = []
        groups: dict[tuple[str, str], _Group] = {}
        group: _Group | None = None
        for position, call in enumerate(calls):
            script, tag = call.script, self._tag(call.subject.key)
            if group is None or group.script is not script or group.tag != tag:  # else as the one before, as nearly always
                group = groups.get((script.sha, tag))
                if group is None:
                    group = groups[script.sha, tag] = _Group(script, tag)
            if group.weight and group.weight + call.weight > MAX_WEIGHT:
                full.append(group)
                group = groups[script.sha, tag] = _Group(script, tag)
            group.add(call, position)
        return [*full, *groups.values()]

    def _tag(self, key: str) -> str:
        tags = self._topology.tags
        return tags[_find_number(key, len(tags))] if tags else ""

    async def _connect(self, trip: _Trip, groups: list[_Group]) -> None:
        """Send once every connection is open.

        Raises:
            StoreError: one could not be opened, or did not stay open.
        """
        for group in groups:
            await self._topology.find(group.tag)
        if not self._send(trip, groups):
            raise StoreError("a connection was lost while others were opened", kind="connection")

    def _send(self, trip: _Trip, groups: list[_Group]) -> bool:
        """Ask every server, so that they work at the same time; False, with nothing sent, where a connection is not open."""
        parts: dict[Link, list[_Group]] = {}
        for group in groups:
            link = self._topology.get(group.tag)
            if link is None:
                return False
            parts.setdefault(link, []).append(group)
        trip.away = len(parts)
        for link, mine in parts.items():
            replies = link.send(b"".join([self._pack(group) for group in mine]), len(mine))
            replies.then(partial(self._take, trip, mine, replies))
        return True

    def _take(self, trip: _Trip, groups: list[_Group], replies: Pending) -> None:
        """A server has answered, or will not."""
        if trip.done:
            return
        try:
            for group, reply in zip(groups, replies.result(), strict=True):
                if isinstance(reply, ResponseError):
                    trip.odd.append((group, reply))
                else:
                    _read(group, reply, trip.answers)
        except Exception as error:  # noqa: BLE001  # a server can answer anything
            trip.fail(error)
            return
        trip.away -= 1
        if trip.away:
            return
        if trip.odd:
            trip.follow(self._finish(trip))
        else:
            trip.settle(trip.answers)

    async def _finish(self, trip: _Trip) -> None:
        for group, error in trip.odd:
            await self._ask_again(group, error, trip.answers)
        trip.settle(trip.answers)

    async def _ask_again(self, group: _Group, error: ResponseError, answers: list[Any]) -> None:
        """What a server turned down without running anything, where asking in another way helps.

        Raises:
            StoreError: it does not.
        """
        word = error.status_code
        if word == "NOSCRIPT":  # a new primary, or SCRIPT FLUSH
            link = await self._topology.find(group.tag)
            [reply] = await link.send(self._pack(group, whole=True), 1)
            _read(group, reply, answers)
        elif word == "MOVED":
            place = _read_place(error)
            self._topology.move(group.tag, place)
            link = await self._topology.at(place)
            [reply] = await link.send(self._pack(group, whole=True), 1)
            _read(group, reply, answers)
        elif word == "ASK" and len(group.list_keys()) == 1:  # the slot is on its way to another server
            link = await self._topology.at(_read_place(error))
            _, reply = await link.send(_ASKING + self._pack(group, whole=True), 2)
            _read(group, reply, answers)
        elif word in ("ASK", "TRYAGAIN") and len(group.list_keys()) > 1:  # some keys have gone, some not
            link = await self._topology.find(group.tag)
            singles = group.split()
            replies = await link.send(b"".join([self._pack(single) for single in singles]), len(singles))
            for single, reply in zip(singles, replies, strict=True):
                if isinstance(reply, ResponseError):
                    await self._ask_again(single, reply, answers)
                else:
                    _read(single, reply, answers)
        else:
            raise explain_refusal(error)

    def _pack(self, group: _Group, *, whole: bool = False) -> bytes:
        """The group's command, as the server reads it."""
        start = f"{self._prefix}{{{group.tag}}}:" if group.tag else self._prefix
        keys, arguments = group.list_keys(), group.list_arguments()
        return b"".join(
            [
                b"*%d\r\n" % (3 + len(keys) + len(arguments)),
                group.script.whole if whole else group.script.by_name,
                write_word(len(keys)),
                write_keys(start, keys),
                *[write_word(argument) for argument in arguments],
            ]
        )


def _read(group: _Group, reply: Reply, answers: list[Any]) -> None:
    if isinstance(reply, ResponseError):
        raise explain_refusal(reply)
    for position, answer in zip(group.positions, group.script.read(reply, len(group.positions)), strict=True):
        answers[position] = answer


def _read_place(error: ResponseError) -> Address:
    """`1234 10.0.0.1:6379`, as behind ASK and MOVED."""
    host, _, port = str(error).rpartition(" ")[2].rpartition(":")
    return Address(host, int(port))


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
            raise self.explain(str(error)) from None
        self.scheme, _, self.kind = parts.scheme.partition("+")
        secret, _, listed = parts.netloc.rpartition("@")
        user, _, password = secret.partition(":")
        self.user, self.password = unquote(user), unquote(password)
        self.hosts = [self._parse_place(item) for item in listed.split(",") if item]
        self.path = unquote(parts.path.strip("/"))
        self.options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.fragment:
            raise self.explain("it must not contain #; in a password, write %23")
        known = ("prefix", "credential_provider", *(("db",) if self.scheme == "unix" else ()), *(self.read_tls_options()))
        unknown = [name for name in self.options if name not in known]
        if unknown:
            raise self.explain(f"unknown option; there are {', '.join(known)}")

    def read_tls_options(self) -> tuple[str, ...]:
        """Options of the URL that tell about TLS."""
        return ("ca", "cert", "key") if self.scheme == "rediss" else ()

    def _parse_place(self, text: str) -> Address:
        try:
            parts = urlsplit(f"//{text}")
            port = parts.port or (26_379 if self.kind == "sentinel" else 6379)
            return Address(parts.hostname or "localhost", port)
        except ValueError:
            raise self.explain("what stands behind :// must be HOST:PORT") from None

    def parse_number(self, text: str, what: str, least: int = 0) -> int:
        """An integer out of the URL."""
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise self.explain(f"{what} must be a number from {least}")
        return int(text)

    def explain(self, message: str) -> UsageError:
        """An error about this URL that does not show its password."""
        return UsageError(f"cannot use store {redact_url(self._url)}: {message}")


def _choose_credentials(url: _Url, settings: Settings) -> CredentialProvider | None:
    """What the URL names, or the password that stands there or in the settings; None where there is neither."""
    name, file = url.options.get("credential_provider"), settings.store_password_file
    password = url.password or ("" if file else settings.store_password)
    if name is not None:
        if url.user or password or file:
            raise url.explain("credential_provider takes the place of a user and a password; name one of them")
        return Provided(name)
    chosen = Password(url.user, password, file)
    if url.user and not chosen.has_password():
        raise url.explain(
            "a user needs a password, here as USER:PASSWORD@, in LOOPGUARD_STORE_PASSWORD or in --store-password-file"
        )
    return chosen if password or file else None


def _make_tls(url: _Url) -> ssl.SSLContext | None:
    if url.scheme != "rediss":
        return None
    given = [(name, url.options[name]) for name in url.read_tls_options() if name in url.options]
    for name, path in given:
        if not Path(path).is_file():
            raise url.explain(f"{name}: there is no file {path}")
    if "key" in url.options and "cert" not in url.options:
        raise url.explain("key needs cert")
    try:
        context = ssl.create_default_context(cafile=url.options.get("ca"))
        if "cert" in url.options:
            context.load_cert_chain(url.options["cert"], url.options.get("key"))
    except (ssl.SSLError, OSError) as error:
        raise url.explain(f"ca, cert and key must be PEM files that belong together ({error.strerror or error})") from None
    return context


class _Shares:
    """See `Shares`; parts are a cluster's hash tags."""

    def __init__(self, layout: Layout, prefix: str) -> None:
        self._layout = layout
        self._prefix = prefix

    @property
    def owners(self) -> Sequence[str]:
        """See `Shares`."""
        return self._layout.owners

    @property
    def changes(self) -> int:
        """See `Shares`."""
        return self._layout.changes

    def find_part(self, key: str) -> int:
        """See `Shares`."""
        return _find_number(key, len(self._layout.tags)) if self._layout.tags else 0

    def reach(self, owner: str) -> RedisBackend:
        """See `Shares`."""
        return RedisBackend(self._layout.open(owner), self._prefix)


def _find_number(key: str, tags: int) -> int:
    """Of a key's hash tag, by the last two digits of its check."""
    return int(key[-2:], 16) % tags


def open_redis(url: str, metrics: Metrics, settings: Settings) -> RemoteStore:
    """`redis://`, `rediss://` and `unix://`, with `+sentinel` and `+cluster`; see docs/operations.md for the forms.

    Raises:
        UsageError: something in the URL cannot be used.
    """
    parts = _Url(url)
    prefix = parts.options.get("prefix", DEFAULT_PREFIX)
    access = Access(_choose_credentials(parts, settings), _make_tls(parts))
    layout = _KINDS[parts.kind if parts.scheme != "unix" else "unix"](parts, access)
    whole = settings.on_store_error == "reject"
    return RemoteStore(_Shares(layout, prefix), SideConnections(layout, prefix), metrics, settings.store_timeout, whole=whole)


def _make_single(url: _Url, access: Access) -> Layout:
    if len(url.hosts) != 1:
        raise url.explain("it takes one HOST:PORT; for several use redis+sentinel:// or redis+cluster://")
    access = replace(access, database=url.parse_number(url.path or "0", "the database"))
    return Undivided(str(url.hosts[0]), lambda: One(url.hosts[0], access))


def _make_unix(url: _Url, access: Access) -> Layout:
    if url.hosts or not url.path:
        raise url.explain("it takes the form unix:///PATH?db=0")
    place = Address(path=f"/{url.path}")
    access = replace(access, database=url.parse_number(url.options.get("db", "0"), "db"))
    return Undivided(str(place), lambda: One(place, access))


def _make_sentinel(url: _Url, access: Access) -> Layout:
    service, _, database = url.path.partition("/")
    if not url.hosts or not service:
        raise url.explain(f"it takes the form {url.scheme}+sentinel://HOST1:PORT,HOST2:PORT/SERVICE")
    access = replace(access, database=url.parse_number(database or "0", "the database"))
    return Undivided(service, lambda: Watched(url.hosts, service, access))


def _make_cluster(url: _Url, access: Access) -> Layout:
    if not url.hosts or url.path not in ("", "0"):
        raise url.explain(f"it takes the form {url.scheme}+cluster://HOST1:PORT,HOST2:PORT (a cluster has no databases)")
    if "{" in url.options.get("prefix", ""):
        raise url.explain("the prefix must not contain {: the hash tag of a cluster's keys is Loopguard's")
    return Slots(url.hosts, access, TAGS)


_KINDS: Mapping[str, Callable[[_Url, Access], Layout]] = {
    "": _make_single,
    "unix": _make_unix,
    "sentinel": _make_sentinel,
    "cluster": _make_cluster,
}
