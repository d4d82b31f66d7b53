"""State in Redis or Valkey: one server, Sentinel or Cluster; TLS, ACL users, Unix sockets.

Lua scripts do the work (`lua/*.lua`), atomically and by the server's clock. A batch is one write to each server, with one call
for each script, and on a cluster one for each script and hash tag. Keys are spread over `TAGS` tags: a batch falls apart into
few calls and still reaches every primary.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.credentials import CredentialProvider
from redis.exceptions import ResponseError

from extproc.errors import UsageError
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store import redact_url
from extproc.store.aside import Aside
from extproc.store.client import Access, Command, Link, Place, Reply, explain_refusal
from extproc.store.credentials import Password, Provided
from extproc.store.remote import RemoteStore
from extproc.store.scripts import Call, Script, count_call
from extproc.store.topology import Cluster, One, Topology, Watched
from extproc.windows import Hit

TAGS = 16
"""Hash tags that a cluster's keys are spread over: few calls per batch against an even load on the primaries."""

DEFAULT_PREFIX = "loopguard:"


class _Group:
    """The calls of a batch that share a script and a hash tag, which go as one; and their positions in the batch."""

    __slots__ = ("calls", "positions", "script", "tag")

    def __init__(self, script: Script, tag: str) -> None:
        self.script = script
        self.tag = tag
        self.calls: list[Call] = []
        self.positions: list[int] = []

    def add(self, call: Call, position: int) -> _Group:
        """Take one more."""
        self.calls.append(call)
        self.positions.append(position)
        return self

    def count_keys(self) -> int:
        """Keys of all calls."""
        return sum([len(call.keys) for call in self.calls])

    def split(self) -> list[_Group]:
        """A group for each call; one call that takes several keys goes with its first alone, without which it is nothing."""
        calls = self.calls if len(self.calls) > 1 else [call.narrow() for call in self.calls]
        return [_Group(self.script, self.tag).add(call, position) for call, position in zip(calls, self.positions, strict=True)]


class RedisBackend:
    """See `Backend`."""

    def __init__(self, topology: Topology, prefix: str) -> None:
        """Keep state on the servers of `topology`; every key starts with `prefix`."""
        self._topology = topology
        self._prefix = prefix

    async def call(self, calls: list[Call]) -> list[Any]:
        """Make every call; each server gets one write."""
        answers: list[Any] = [None] * len(calls)
        odd = []
        for group, reply in await self._round_trip(self._group(calls)):
            if isinstance(reply, ResponseError):
                odd.append((group, reply))
            else:
                _read(group, reply, answers)
        for group, error in odd:
            await self._ask_again(group, error, answers)
        return answers

    async def probe(self) -> None:
        """Count once for every hash tag: a server that answers but cannot write is not well."""
        keys = [f"probe:{number:02x}" for number in range(len(self._topology.tags) or 1)]
        hits = [Hit(key, "sliding_ttl", 1_000, 2, 0, count_refused=True, count_to=2) for key in keys]
        await self.call([count_call(hit) for hit in hits])

    async def drop(self) -> None:
        """End the connections."""
        await self._topology.drop()

    def _group(self, calls: list[Call]) -> list[_Group]:
        groups: dict[tuple[str, str], _Group] = {}
        for position, call in enumerate(calls):
            name = call.script.sha, self._tag(call.subject.key)
            group = groups.get(name)
            if group is None:
                group = groups[name] = _Group(call.script, name[1])
            group.add(call, position)
        return list(groups.values())

    def _tag(self, key: str) -> str:
        """Where the key goes, from the last two digits of its check."""
        tags = self._topology.tags
        return tags[int(key[-2:], 16) % len(tags)] if tags else ""

    async def _round_trip(self, groups: Iterable[_Group]) -> list[tuple[_Group, Reply]]:
        """Ask every server before the first is listened to, so that they work at the same time."""
        parts: dict[Link, list[_Group]] = {}
        for group in groups:
            parts.setdefault(await self._topology.find(group.tag), []).append(group)
        answers = [link.exchange([self._command(group) for group in mine]) for link, mine in parts.items()]
        found: list[tuple[_Group, Reply]] = []
        for mine, answer in zip(parts.values(), answers, strict=True):
            found += zip(mine, await answer, strict=True)
        return found

    async def _ask_again(self, group: _Group, error: ResponseError, answers: list[Any]) -> None:
        """What a server turned down without running anything, where asking in another way helps.

        Raises:
            StoreError: it does not.
        """
        word = error.status_code
        if word == "NOSCRIPT":  # a new primary, or SCRIPT FLUSH
            link = await self._topology.find(group.tag)
            _read(group, await link.ask(self._command(group, whole=True)), answers)
        elif word == "MOVED":
            self._topology.forget()
            link = await self._topology.at(_read_place(error))
            _read(group, await link.ask(self._command(group, whole=True)), answers)
        elif word == "ASK" and group.count_keys() == 1:  # the slot is on its way to another server
            link = await self._topology.at(_read_place(error))
            _read(group, await link.ask(("ASKING",), self._command(group, whole=True)), answers)
        elif word in ("ASK", "TRYAGAIN") and group.count_keys() > 1:  # some keys have gone, some not
            for single, reply in await self._round_trip(group.split()):
                if isinstance(reply, ResponseError):
                    await self._ask_again(single, reply, answers)
                else:
                    _read(single, reply, answers)
        else:
            raise explain_refusal(error)

    def _command(self, group: _Group, *, whole: bool = False) -> Command:
        start = f"{self._prefix}{{{group.tag}}}:" if group.tag else self._prefix
        command: list[str | int | bytes] = ["EVAL", group.script.text] if whole else ["EVALSHA", group.script.sha]
        keys = [start + key for call in group.calls for key in call.keys]
        command.append(len(keys))
        command += keys
        first = group.calls[0].arguments
        alike = all(call.arguments == first for call in group.calls)  # as hits of one policy are
        for call in group.calls[:1] if alike else group.calls:
            command += call.arguments
        return tuple(command)


def _read(group: _Group, reply: Reply, answers: list[Any]) -> None:
    if isinstance(reply, ResponseError):
        raise explain_refusal(reply)
    for position, answer in zip(group.positions, group.script.read(reply, len(group.positions)), strict=True):
        answers[position] = answer


def _read_place(error: ResponseError) -> Place:
    """`1234 10.0.0.1:6379`, as behind ASK and MOVED."""
    host, _, port = str(error).rpartition(" ")[2].rpartition(":")
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

    def _parse_place(self, text: str) -> Place:
        try:
            parts = urlsplit(f"//{text}")
            port = parts.port or (26_379 if self.kind == "sentinel" else 6379)
            return Place(parts.hostname or "localhost", port)
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


def open_redis(url: str, metrics: Metrics, settings: Settings) -> RemoteStore:
    """`redis://`, `rediss://` and `unix://`, with `+sentinel` and `+cluster`; see docs/operations.md for the forms.

    Raises:
        UsageError: something in the URL cannot be used.
    """
    parts = _Url(url)
    prefix = parts.options.get("prefix", DEFAULT_PREFIX)
    access = Access(_choose_credentials(parts, settings), _make_tls(parts))
    make_topology = _KINDS[parts.kind if parts.scheme != "unix" else "unix"]
    backend = RedisBackend(make_topology(parts, access), prefix)
    aside = Aside(make_topology(parts, access), prefix)
    return RemoteStore(backend, aside, metrics, settings.store_timeout)


def _make_single(url: _Url, access: Access) -> Topology:
    if len(url.hosts) != 1:
        raise url.explain("it takes one HOST:PORT; for several use redis+sentinel:// or redis+cluster://")
    return One(url.hosts[0], replace(access, database=url.parse_number(url.path or "0", "the database")))


def _make_unix(url: _Url, access: Access) -> Topology:
    if url.hosts or not url.path:
        raise url.explain("it takes the form unix:///PATH?db=0")
    return One(Place(path=f"/{url.path}"), replace(access, database=url.parse_number(url.options.get("db", "0"), "db")))


def _make_sentinel(url: _Url, access: Access) -> Topology:
    service, _, database = url.path.partition("/")
    if not url.hosts or not service:
        raise url.explain(f"it takes the form {url.scheme}+sentinel://HOST1:PORT,HOST2:PORT/SERVICE")
    return Watched(url.hosts, service, replace(access, database=url.parse_number(database or "0", "the database")))


def _make_cluster(url: _Url, access: Access) -> Topology:
    if not url.hosts or url.path not in ("", "0"):
        raise url.explain(f"it takes the form {url.scheme}+cluster://HOST1:PORT,HOST2:PORT (a cluster has no databases)")
    if "{" in url.options.get("prefix", ""):
        raise url.explain("the prefix must not contain {: the hash tag of a cluster's keys is Loopguard's")
    return Cluster(url.hosts, access, TAGS)


_KINDS: Mapping[str, Callable[[_Url, Access], Topology]] = {
    "": _make_single,
    "unix": _make_unix,
    "sentinel": _make_sentinel,
    "cluster": _make_cluster,
}
