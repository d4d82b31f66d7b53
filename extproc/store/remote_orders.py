"""Orders in Redis or Valkey: three keys in one hash slot, kept by `lua/orders.lua`."""
# interpreted: waits for a network

from __future__ import annotations

from importlib.resources import files

from extproc.errors import StoreError
from extproc.store.aside import Aside
from extproc.store.link import Reply
from extproc.store.orders import MAX_ORDERS, Orders, check_order, refuse_more

_AT_ONCE = 1_000
"""Documents in one portion: some 300 KB, which keeps the server busy for under a millisecond."""

_SCRIPT = (files("extproc.store") / "lua" / "orders.lua").read_text()
_KIND = "orders"


class RemoteOrders:
    """Orders on a server that is asked aside."""

    def __init__(self, aside: Aside) -> None:
        """Nothing is asked yet."""
        self._aside = aside

    async def put(self, book: str, name: str, document: bytes, ttl_ms: int, now: int | None) -> None:
        """Take an order, in place of the one of that name.

        Raises:
            StoreError: it is too long, there are too many, or the server cannot.
        """
        check_order(document)
        if not await self._run(book, "put", name, document, ttl_ms, MAX_ORDERS, now=now):
            raise refuse_more()

    async def drop(self, book: str, name: str, now: int | None) -> bool:
        """Take an order back; whether it stood.

        Raises:
            StoreError: the server cannot.
        """
        return bool(await self._run(book, "drop", name, now=now))

    async def read(self, book: str, known: str, now: int | None) -> Orders | None:
        """Those that have not ended, None where the version is the known one.

        Raises:
            StoreError: the server cannot, or answers something else.
        """
        listed = await self._run(book, "list", known, now=now)
        if not isinstance(listed, list) or not all(isinstance(item, bytes) for item in listed):
            raise _make_error()
        if not listed:
            return None
        version, *names = [bytes(item).decode("utf-8", "replace") for item in listed]
        documents: dict[str, bytes] = {}
        for start in range(0, len(names), _AT_ONCE):
            documents |= await self._fetch(book, names[start : start + _AT_ONCE])
        return Orders(version, documents)

    async def _fetch(self, book: str, names: list[str]) -> dict[str, bytes]:
        command = ("HMGET", self._aside.name_key(_KIND, book, "documents"), *names)
        [found] = await self._aside.ask(book, [command])
        if not isinstance(found, list) or len(found) != len(names):
            raise _make_error()
        return {name: text for name, text in zip(names, found, strict=True) if isinstance(text, bytes)}

    async def _run(self, book: str, what: str, *arguments: str | bytes | int, now: int | None) -> Reply:
        keys = [self._aside.name_key(_KIND, book, part) for part in ("ends", "documents", "version")]
        return await self._aside.run(book, _SCRIPT, keys, what, *arguments, now=now)


def _make_error() -> StoreError:
    return StoreError("the server did not answer with a list of overrides", kind="response")
