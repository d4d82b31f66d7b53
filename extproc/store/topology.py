"""Where the keys are: on one server, on the primary that Sentinels name, or spread over a cluster.

A topology hands out connections by hash tag and opens them when they are needed. It never decides that a server is down: it
raises, the store's breaker drops everything, and the next probe asks afresh who is in charge.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Sequence
from itertools import count
from typing import Protocol

import hiredis

from extproc.errors import StoreError
from extproc.store.connection import Access, Connection, Place, Reply, connect, refusal

SLOTS = 16_384
_SENTINEL_SECONDS = 0.25


def slot(text: str) -> int:
    """A cluster's hash slot for a tag."""
    return binascii.crc_hqx(text.encode(), 0) % SLOTS


def spread(tags: int) -> tuple[str, ...]:
    """So many hash tags whose slots are spread evenly, so that any number of primaries gets its share."""
    width = SLOTS // tags
    return tuple(next(str(n) for n in count() if slot(str(n)) // width == share) for share in range(tags))


class Topology(Protocol):
    """Connections by hash tag; raises StoreError and nothing else."""

    tags: Sequence[str]
    """Keys are spread over these; empty for a single server, which needs none."""

    def ready(self, tag: str) -> Connection | None:
        """The open connection to the server that has the tag's keys, if there is one."""
        ...

    async def open(self, tag: str) -> Connection:
        """Open that connection."""
        ...

    async def at(self, place: Place) -> Connection:
        """A connection to a server that another one named."""
        ...

    def forget(self) -> None:
        """Who has which keys is out of date."""
        ...

    def drop(self) -> None:
        """End every connection and forget who is in charge."""
        ...


class One:
    """One server."""

    tags: Sequence[str] = ()

    def __init__(self, place: Place, access: Access) -> None:
        """Nothing is connected yet."""
        self._place = place
        self._access = access
        self._connection: Connection | None = None

    def ready(self, tag: str) -> Connection | None:  # noqa: ARG002  # one server has all keys
        """See `Topology`."""
        return self._connection if self._connection is not None and self._connection.alive else None

    async def open(self, tag: str) -> Connection:  # noqa: ARG002  # one server has all keys
        """See `Topology`."""
        self._connection = connection = await connect(await self._find(), self._access)
        return connection

    async def at(self, place: Place) -> Connection:
        """See `Topology`; only a cluster sends anybody elsewhere."""
        raise StoreError(f"the server is part of a cluster and sends us to {place}; use redis+cluster://", kind="cluster")

    def forget(self) -> None:
        """See `Topology`."""

    def drop(self) -> None:
        """See `Topology`."""
        if self._connection is not None:
            self._connection.drop()

    async def _find(self) -> Place:
        return self._place


class Watched(One):
    """The primary of a service that Sentinels watch over."""

    def __init__(self, sentinels: Sequence[Place], service: str, access: Access) -> None:
        """Nothing is connected yet."""
        super().__init__(sentinels[0], access)
        self._sentinels = list(sentinels)
        self._service = service

    async def _find(self) -> Place:
        """Ask the Sentinels in turn, each time another one first: one that was cut off may name a primary of old."""
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

    async def _ask(self, sentinel: Place) -> Place:
        connection = await connect(sentinel, Access(tls=self._access.tls))
        try:
            reply = await self._query(connection)
            if isinstance(reply, hiredis.ReplyError) and refusal(reply).kind == "auth":
                connection.drop()
                connection = await connect(sentinel, Access(self._access.secret, self._access.tls))
                reply = await self._query(connection)
        finally:
            connection.drop()
        if isinstance(reply, hiredis.ReplyError):
            raise refusal(reply)
        if not isinstance(reply, list):
            raise StoreError(f"{sentinel} does not watch {self._service}", kind="sentinel")
        host, port = reply
        return Place(host.decode(), int(port))

    async def _query(self, connection: Connection) -> Reply:
        replies = await connection.send([("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)])
        return replies[0]


class Cluster:
    """A cluster: every tag's slot belongs to one primary."""

    def __init__(self, seeds: Sequence[Place], access: Access, tags: int) -> None:
        """Nothing is connected yet; any of the seeds may tell who has which slots."""
        self.tags: Sequence[str] = spread(tags)
        self._seeds = list(seeds)
        self._access = access
        self._owners: dict[str, Place] = {}
        self._known: list[Place] = []
        self._connections: dict[Place, Connection] = {}

    def ready(self, tag: str) -> Connection | None:
        """See `Topology`."""
        place = self._owners.get(tag)
        connection = self._connections.get(place) if place is not None else None
        return connection if connection is not None and connection.alive else None

    async def open(self, tag: str) -> Connection:
        """See `Topology`."""
        if tag not in self._owners:
            await self._learn()
        if tag not in self._owners:
            raise StoreError(f"nobody has slot {slot(tag)}", kind="cluster")
        return await self.at(self._owners[tag])

    async def at(self, place: Place) -> Connection:
        """See `Topology`."""
        connection = self._connections.get(place)
        if connection is None or not connection.alive:
            connection = self._connections[place] = await connect(place, self._access)
        return connection

    def forget(self) -> None:
        """See `Topology`."""
        self._owners.clear()

    def drop(self) -> None:
        """See `Topology`."""
        self.forget()
        for connection in self._connections.values():
            connection.drop()
        self._connections.clear()

    async def _learn(self) -> None:
        """Ask the nodes in turn who has which slots, each time another one first: one that was cut off may not know."""
        errors = []
        for place in dict.fromkeys([*self._known, *self._seeds]):
            try:
                async with asyncio.timeout(_SENTINEL_SECONDS):
                    connection = await self.at(place)
                    replies = await connection.send([("CLUSTER", "SLOTS")])
            except (StoreError, TimeoutError) as error:
                errors.append(str(error) or f"{place}: no answer")
            else:
                if isinstance(replies[0], list):
                    return self._read(replies[0], place)
                if isinstance(replies[0], hiredis.ReplyError):
                    raise refusal(replies[0])
            self._known = [known for known in self._known if known != place]
        raise StoreError(f"no node of the cluster answers: {'; '.join(errors)}", kind="connection")

    def _read(self, ranges: Sequence[Sequence[Reply]], asked: Place) -> None:
        nodes = set()
        for first, last, *owners in ranges:
            places = [Place(host.decode() if host else asked.host, port) for host, port, *_ in owners]  # type: ignore[misc,union-attr]
            nodes.update(places)
            for tag in self.tags:
                if first <= slot(tag) <= last:  # type: ignore[operator]
                    self._owners[tag] = places[0]
        self._known = [*(known for known in dict.fromkeys([*self._known, *nodes]) if known != asked and known in nodes), asked]
