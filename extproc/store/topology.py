"""Which server has which keys: a single server, the primary that Sentinels name, or a cluster.

A layout maps hash tags to servers. Each shard opens its own connections when needed. This module
never decides that a server is
down: it raises an error, the shard's breaker drops the connections, and the next probe looks up the
    servers again.
"""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.cluster import ClusterNode, NodesManager
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from extproc.errors import StoreError
from extproc.store.client import LOOK_SECONDS, Access, AnyLink, close_pool
from extproc.store.link import ServerAddress, explain

_MOST_SHOWN = 3


def spread_tags(tags: int) -> tuple[str, ...]:
    """Hash tags with evenly spread slots, so that every primary gets its share."""
    width = REDIS_CLUSTER_HASH_SLOTS // tags
    return tuple(
        next(str(n) for n in count() if key_slot(b"%d" % n) // width == share)
        for share in range(tags)
    )


class Layout:
    """Maps keys to servers; this class is for a single server, or the primary that Sentinels name.

    Attributes:
        tags: hash tags over which keys are spread; empty for a single server.
        owners: the name of each tag's server, empty if unknown; one item for a single server.
        changes: the number of changes of `owners`.
        places: the server with each tag's keys, if it is known.
    """

    def __init__(self, name: str, access: Access, pool: ConnectionPool | None) -> None:
        self.tags: Sequence[str] = ()
        self.owners: Sequence[str] = (name,)
        self.changes = 0
        self.places = {"": ServerAddress(name)}
        self.access = access
        self.pools = {self.places[""]: pool} if pool is not None else {}

    def open_pool(self, place: ServerAddress) -> ConnectionPool:
        """redis-py's connections to a server; raises StoreError for an unknown one."""
        if place not in self.pools:
            raise StoreError(
                f"the server is part of a cluster and redirects to {place}; use redis+cluster://",
                kind="cluster",
            )
        return self.pools[place]

    async def locate(self, tag: str) -> ServerAddress:
        """The server with a tag's keys; raises StoreError."""
        return self.places[tag]

    def move(self, tag: str, place: ServerAddress) -> None:
        """Note a redirection: a tag's keys have moved."""

    async def learn(self) -> None:
        """Look up which server has which keys; redis-py asks Sentinels at every connect."""

    async def close(self) -> None:
        """Close redis-py's connections."""
        await asyncio.gather(*map(close_pool, self.pools.values()))


class _Node(ClusterNode):
    """A node that is asked for slots, with a deadline."""

    # See redis-py
    async def execute_command(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        """See redis-py."""
        async with asyncio.timeout(LOOK_SECONDS):
            return await super().execute_command(*arguments, **options)

    async def disconnect(self) -> None:
        """See redis-py, which would wait for the peer."""
        for connection in self._connections:
            await connection.disconnect(nowait=True)


class ClusterLayout(Layout):
    """The layout of a cluster, as its nodes report it: each slot belongs to one primary."""

    def __init__(self, seeds: Sequence[ServerAddress], access: Access, tags: int) -> None:
        """Start with unknown slots, which any of the seeds can report."""
        super().__init__("", access, None)
        self.tags = spread_tags(tags)
        self.owners = [""] * tags
        self.places = {}
        self._seeds = list(seeds)
        self._known: list[ServerAddress] = []

    def open_pool(self, place: ServerAddress) -> ConnectionPool:
        """See `Layout`."""
        if place not in self.pools:
            self.pools[place] = self.access.make_pool(place)
        return self.pools[place]

    async def locate(self, tag: str) -> ServerAddress:
        """See `Layout`."""
        if tag not in self.places:
            await self.learn()
        if tag not in self.places:
            raise StoreError(
                f"no node of the cluster has slot {key_slot(tag.encode())}", kind="cluster"
            )
        return self.places[tag]

    def move(self, tag: str, place: ServerAddress) -> None:
        """See `Layout`."""
        self._assign({**self.places, tag: place})

    async def learn(self) -> None:
        """Have redis-py ask the nodes for the slots; raises StoreError if none answers.

        Any may be first, because a partitioned node has an outdated view. They are asked over
        separate connections. The URL's nodes are always among them: in Kubernetes, a restart may
        give every node a new address.
        """
        arguments = {**self.access.arguments, "connection_class": self.access.kind}
        places = dict.fromkeys([*self._known, *self._seeds])
        nodes: list[ClusterNode] = [_Node(place.host, place.port, **arguments) for place in places]
        manager = NodesManager(
            nodes,
            require_full_coverage=False,
            connection_kwargs=arguments,
            dynamic_startup_nodes=False,
        )
        try:
            await manager.initialize()
        except Exception as error:  # noqa: BLE001  # a server can answer anything
            found = explain(error, ", ".join(map(str, list(places)[:_MOST_SHOWN])))
            kind = "auth" if found.kind == "auth" else "connection"
            raise StoreError(f"no node of the cluster answers: {found}", kind=kind) from None
        finally:
            await manager.aclose("startup_nodes")
        owners = {tag: manager.slots_cache.get(key_slot(tag.encode())) for tag in self.tags}
        self._assign(
            {
                tag: ServerAddress(nodes[0].host, int(nodes[0].port))
                for tag, nodes in owners.items()
                if nodes
            }
        )
        self._known = [
            ServerAddress(node.host, int(node.port)) for node in manager.nodes_cache.values()
        ]

    def _assign(self, places: dict[str, ServerAddress]) -> None:
        if places != self.places:
            self.places = places
            self.owners = [str(places[tag]) if tag in places else "" for tag in self.tags]
            self.changes += 1


class ShardServers:
    """A shard's connections for requests, opened when needed.

    Attributes:
        tags: the layout's.
    """

    def __init__(self, layout: Layout, owner: str) -> None:
        """Start without connections; `owner` is one of the layout's."""
        self.tags = layout.tags
        self._layout = layout
        self._owner = owner
        self._links: dict[ServerAddress, AnyLink] = {}

    def get(self, tag: str) -> AnyLink | None:
        """An open connection to the server with the tag's keys, if there is one."""
        place = self._layout.places.get(tag)
        link = self._links.get(place) if place is not None else None
        return link if link is not None and link.is_usable() else None

    async def find(self, tag: str) -> AnyLink:
        """A connection to the server with the tag's keys; raises StoreError."""
        return await self.at(await self._layout.locate(tag))

    async def at(self, place: ServerAddress) -> AnyLink:
        """A connection to a server that another server named; raises StoreError."""
        link = self._links.get(place)
        if link is None or not link.is_usable():
            if link is not None:
                link.drop()
            link = self._links[place] = await self._layout.access.open(
                self._layout.open_pool(place)
            )
        return link

    def move(self, tag: str, place: ServerAddress) -> None:
        """Note a redirection: the tag's keys have moved."""
        self._layout.move(tag, place)

    async def learn(self) -> Sequence[int]:
        """Look up which server has which keys; returns the numbers of the shard's own tags.

        That is 0 for a single server.

        Raises StoreError.
        """
        await self._layout.learn()
        own = [number for number, owner in enumerate(self._layout.owners) if owner == self._owner]
        if own and not self._owner:
            await self._layout.locate(self.tags[own[0]])
        return own

    def drop(self) -> None:
        """Drop all connections."""
        links, self._links = list(self._links.values()), {}
        for link in links:
            link.drop()
