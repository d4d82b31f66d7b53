"""The servers of the keys: one server, the primary that Sentinels name, or a cluster.

A layout says which server has which part of the keys. Each shard has connections of its own, by hash tag, which are opened when
needed. This module never decides that a server is down: it raises an error, that shard's breaker drops the connections, and the
next probe finds out again which server has the keys.
"""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
import binascii
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

from extproc.errors import StoreError
from extproc.store.client import Access, connect
from extproc.store.link import Command, ErrorReply, Link, RedisReply, ServerAddress, explain_refusal

SLOTS = 16_384
_SENTINEL_SECONDS = 0.25


def find_slot(text: str) -> int:
    """A cluster's hash slot for a tag."""
    return binascii.crc_hqx(text.encode(), 0) % SLOTS


def spread_tags(tags: int) -> tuple[str, ...]:
    """Hash tags whose slots are spread evenly, so that each of any number of primaries gets its share."""
    width = SLOTS // tags
    return tuple(next(str(n) for n in count() if find_slot(str(n)) // width == share) for share in range(tags))


class ShardServers(Protocol):
    """Connections of one shard, by hash tag; raises only StoreError."""

    tags: Sequence[str]
    """Hash tags over which keys are spread; empty for a single server."""

    def get(self, tag: str) -> Link | None:
        """An open connection to the server with the tag's keys; None if it has to be opened first."""

    async def find(self, tag: str) -> Link:
        """A connection to the server with the tag's keys, opened if necessary."""

    async def at(self, place: ServerAddress) -> Link:
        """A connection to a server that another server named."""

    def move(self, tag: str, place: ServerAddress) -> None:
        """Note that another server has the tag's keys, according to the one that had them."""

    async def learn(self) -> Sequence[int]:
        """Find out which server has which keys; returns the numbers of the shard's own tags, 0 for a single server."""

    def drop(self) -> None:
        """End every connection."""


class Layout(Protocol):
    """How keys are distributed over servers."""

    tags: Sequence[str]
    """Hash tags over which keys are spread; empty for a single server."""

    owners: Sequence[str]
    """The name of each tag's server, empty if unknown. A single server has one."""

    changes: int
    """The number of changes of `owners`."""

    def open(self, owner: str) -> ShardServers:
        """Make the connections of the shard with this name."""


class SingleLayout:
    """A layout of one server, which may change."""

    tags: Sequence[str] = ()
    changes = 0

    def __init__(self, name: str, make: Callable[[], ShardServers]) -> None:
        self.owners: Sequence[str] = (name,)
        self._make = make

    def open(self, owner: str) -> ShardServers:  # noqa: ARG002  # there is one
        """See `Layout`."""
        return self._make()


class SingleServer:
    """One server."""

    tags: Sequence[str] = ()

    def __init__(self, place: ServerAddress, access: Access) -> None:
        self._place = place
        self._access = access
        self._link: Link | None = None

    def get(self, tag: str) -> Link | None:  # noqa: ARG002  # one server has all keys
        """See `ShardServers`."""
        return self._link if self._link is not None and self._link.is_usable() else None

    async def find(self, tag: str) -> Link:
        """See `ShardServers`."""
        link = self.get(tag)
        if link is None:
            self.drop()
            link = self._link = await connect(await self._choose(), self._access)
        return link

    async def at(self, place: ServerAddress) -> Link:
        """See `ShardServers`; only a cluster redirects its clients."""
        raise StoreError(f"the server is part of a cluster and sends us to {place}; use redis+cluster://", kind="cluster")

    def move(self, tag: str, place: ServerAddress) -> None:
        """See `ShardServers`; `at` says what is wrong."""

    async def learn(self) -> Sequence[int]:
        """See `ShardServers`."""
        return (0,)

    def drop(self) -> None:
        """See `ShardServers`."""
        link, self._link = self._link, None
        if link is not None:
            link.drop()

    async def _choose(self) -> ServerAddress:
        return self._place


class SentinelServer(SingleServer):
    """The primary of a service that Sentinels watch over."""

    def __init__(self, sentinels: Sequence[ServerAddress], service: str, access: Access) -> None:
        super().__init__(sentinels[0], access)
        self._sentinels = list(sentinels)
        self._service = service

    async def _choose(self) -> ServerAddress:
        """Ask the Sentinels in turn, starting with another one each time: one that was cut off may name a former primary."""
        errors = []
        for sentinel in list(self._sentinels):
            self._sentinels.append(self._sentinels.pop(0))
            try:
                async with asyncio.timeout(_SENTINEL_SECONDS):
                    return await self._ask(sentinel)
            except StoreError as error:
                errors.append(str(error))
            except TimeoutError:
                errors.append(f"{sentinel}: no answer")
        raise StoreError(f"no Sentinel knows the primary: {'; '.join(errors)}", kind="sentinel")

    async def _ask(self, sentinel: ServerAddress) -> ServerAddress:
        command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        try:
            reply = await _query(sentinel, Access(tls=self._access.tls), command)
        except StoreError as error:
            if error.kind != "auth":
                raise
            reply = await _query(sentinel, Access(self._access.credentials, self._access.tls), command)
        if reply is None:
            raise StoreError(f"{sentinel} does not watch {self._service}", kind="sentinel")
        try:
            host, port = reply  # type: ignore[misc]  # anything may have come
            return ServerAddress(host.decode(), int(port))  # type: ignore[union-attr]
        except (AttributeError, TypeError, ValueError):
            raise StoreError(f"{sentinel} names no server", kind="sentinel") from None


class ClusterLayout:
    """A cluster's layout, as far as its nodes have reported it: every tag's slot belongs to one primary."""

    def __init__(self, seeds: Sequence[ServerAddress], access: Access, tags: int) -> None:
        """Start without knowledge of the slots; any of the seeds can be asked for it."""
        self.tags: Sequence[str] = spread_tags(tags)
        self.owners: Sequence[str] = [""] * tags
        self.changes = 0
        self.places: dict[str, ServerAddress] = {}
        self._slots = [find_slot(tag) for tag in self.tags]  # ascending
        self._seeds = list(seeds)
        self._access = access
        self._known: list[ServerAddress] = []

    def open(self, owner: str) -> ClusterServers:
        """See `Layout`."""
        return ClusterServers(self, self._access, owner)

    def move(self, tag: str, place: ServerAddress) -> None:
        """A tag's keys have moved."""
        self._assign({**self.places, tag: place})

    async def learn(self) -> None:
        """Ask the nodes in turn which of them has which slots; raises StoreError if none answers.

        It starts with another node each time: one that was cut off may not know.
        """
        errors = []
        for place in dict.fromkeys([*self._known, *self._seeds]):
            try:
                async with asyncio.timeout(_SENTINEL_SECONDS):
                    reply = await _query(place, self._access, ("CLUSTER", "SLOTS"))
            except TimeoutError:
                errors.append(f"{place}: no answer")
            except StoreError as error:
                if error.kind == "auth":
                    raise
                errors.append(str(error))
            else:
                try:
                    return self._read(reply, place)
                except (AttributeError, IndexError, TypeError, ValueError):
                    errors.append(f"{place}: does not report its slots")
            self._known = [known for known in self._known if known != place]
        raise StoreError(f"no node of the cluster answers: {'; '.join(errors)}", kind="connection")

    def _read(self, ranges: Any, asked: ServerAddress) -> None:  # noqa: ANN401  # whatever a server answered
        """Read the reply to CLUSTER SLOTS: a list for each range of slots.

        Raises:
            AttributeError, IndexError, TypeError, ValueError: it is something else.
        """
        owners: dict[str, ServerAddress] = {}
        nodes = set()
        for first, last, *listed in ranges:
            tags = self.tags[bisect_left(self._slots, first) : bisect_right(self._slots, last)]
            if tags:
                places = [_read_node(node, asked) for node in listed]
                nodes.update(places)
                owners.update(dict.fromkeys(tags, places[0]))
        self._assign(owners)
        self._known = [*(known for known in dict.fromkeys([*self._known, *nodes]) if known != asked and known in nodes), asked]

    def _assign(self, places: dict[str, ServerAddress]) -> None:
        if places != self.places:
            self.places = places
            self.owners = [str(places[tag]) if tag in places else "" for tag in self.tags]
            self.changes += 1


class ClusterServers:
    """A shard's connections to a cluster: for the keys of one primary, or for those whose server is unknown."""

    def __init__(self, slots: ClusterLayout, access: Access, owner: str) -> None:
        """Start without connections; `owner` is one of the layout's."""
        self.tags = slots.tags
        self._slots = slots
        self._access = access
        self._owner = owner
        self._links: dict[ServerAddress, Link] = {}

    def get(self, tag: str) -> Link | None:
        """See `ShardServers`."""
        place = self._slots.places.get(tag)
        link = self._links.get(place) if place is not None else None
        return link if link is not None and link.is_usable() else None

    async def find(self, tag: str) -> Link:
        """See `ShardServers`."""
        if tag not in self._slots.places:
            await self._slots.learn()
        if tag not in self._slots.places:
            raise _make_orphaned(tag)
        return await self.at(self._slots.places[tag])

    async def at(self, place: ServerAddress) -> Link:
        """See `ShardServers`."""
        link = self._links.get(place)
        if link is None or not link.is_usable():
            if link is not None:
                link.drop()
            link = self._links[place] = await connect(place, self._access)
        return link

    def move(self, tag: str, place: ServerAddress) -> None:
        """See `ShardServers`."""
        self._slots.move(tag, place)

    async def learn(self) -> Sequence[int]:
        """See `ShardServers`."""
        await self._slots.learn()
        own = [number for number, owner in enumerate(self._slots.owners) if owner == self._owner]
        if own and not self._owner:
            raise _make_orphaned(self.tags[own[0]])
        return own

    def drop(self) -> None:
        """See `ShardServers`."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.drop()


async def _query(place: ServerAddress, access: Access, command: Command) -> RedisReply:
    """A server's reply to one command, on a connection of its own; raises StoreError if it is an error."""
    link = await connect(place, access)
    try:
        reply = await link.ask(command)
    finally:
        link.drop()
    if isinstance(reply, ErrorReply):
        raise explain_refusal(reply)
    return reply


def _make_orphaned(tag: str) -> StoreError:
    return StoreError(f"no node of the cluster has slot {find_slot(tag)}", kind="cluster")


def _read_node(node: Any, asked: ServerAddress) -> ServerAddress:  # noqa: ANN401  # whatever a server answered
    """Host, port and more; a node that does not know its own address names none."""
    host, port, *_ = node
    if type(port) is not int:
        raise TypeError
    return ServerAddress(host.decode() if host else asked.host, port)
