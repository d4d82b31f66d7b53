"""Whether the store keeps what must outlive it, and whether it has lost its keys.

What windows count is soon forgotten anyway. What a caller has used of a day's budget, that a circuit breaker waits for an
operator, and that a caller is blocked or a session killed must not be lost when the server restarts. So each server has a mark,
random bytes that the first replica puts there and that never expire. If a replica finds another mark than before, the server
has been emptied, or replaced by an empty one. A replica that starts takes the mark that it finds.
"""
# interpreted: waits for a network

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from time import time
from typing import Final, Protocol, runtime_checkable

from extproc.errors import StoreError
from extproc.logs import make_extra
from extproc.metrics import Metrics

_LOG = logging.getLogger("loopguard")

_LOOK_SECONDS: Final = 2.0
_LOOKS_BETWEEN: Final = 30
"""Between two questions for persistence."""

EMPTIED: Final = "the store was emptied: budgets are full again, circuit breakers closed, and blocks, kills and grants gone"

_DIGITS: Final = 13
"""A mark is the time, in this many digits, and random ones."""

NOTHING, SNAPSHOTS, LOG, UNKNOWN = "nothing", "snapshots", "log", "unknown"
"""What a server keeps when it restarts: everything (an append-only log), what it had at its last snapshot, or nothing."""

_FROM_LEAST: Final = (NOTHING, UNKNOWN, SNAPSHOTS, LOG)


@runtime_checkable
class KeepingStore(Protocol):
    """A store on servers."""

    async def share_marks(self, mark: bytes) -> dict[str, bytes]:
        """The mark of each server, by a name of it: the one that it has, else `mark`, which it then keeps.

        Raises StoreError if a server is unavailable.
        """

    async def read_persistence(self) -> list[str]:
        """What each server keeps when it restarts; raises StoreError if one is unavailable."""


class StoreCare:
    """Looks after the store, for people.

    Attributes:
        persistence: the least that one of its servers keeps; empty before the first answer, and for a store in memory.
        emptied: when it was found to be emptied, in seconds since 1970; 0 if it was not, since this process began.
        since: when the oldest of its marks was set, likewise.
        emit: is called when it was emptied, with what is known.
    """

    def __init__(self, store: object, metrics: Metrics) -> None:
        """Look after a store, if it is one on servers."""
        self.persistence = ""
        self.emptied = self.since = 0.0
        self.emit: Callable[[Mapping[str, object]], None] = lambda _: None
        self._store = store if isinstance(store, KeepingStore) else None
        self._counter = metrics.store_emptied
        self._known: dict[str, bytes] = {}

    async def run(self) -> None:
        """Look again and again until cancelled."""
        looks = 0
        while self._store is not None:
            await asyncio.sleep(_LOOK_SECONDS)
            looks += 1
            try:
                await self.look(asks=not self.persistence or looks % _LOOKS_BETWEEN == 0)
            except Exception:  # noqa: BLE001  # no error may affect requests
                _LOG.exception("the store cannot be looked after")

    async def look(self, *, asks: bool = True) -> None:
        """Compare the marks, and ask what the servers keep; what is unavailable is looked at again later."""
        if self._store is None:
            return
        now = time()
        try:
            found = await self._store.share_marks(f"{int(now * 1000):0{_DIGITS}d}-{secrets.token_hex(8)}".encode())
            if asks:
                self.persistence = min(await self._store.read_persistence(), key=_FROM_LEAST.index, default="")
        except StoreError:
            return
        emptied = [name for name, mark in found.items() if self._known.get(name, mark) != mark]
        before = self.since
        self._known.update(found)
        self.since = min(map(_read_time, self._known.values()), default=0.0)
        if emptied:
            self.emptied = now
            self._counter.inc()
            told = {"servers": len(emptied), "of": len(found), "kept_since": before}
            _LOG.error(EMPTIED, extra=make_extra(**told))
            self.emit(told)


def _read_time(mark: bytes) -> float:
    digits = mark[:_DIGITS]
    return int(digits) / 1000 if digits.isdigit() else 0.0


def judge_persistence(info: str, points: str | None) -> str:
    """What a server keeps, given `INFO persistence` and its `save` setting; None if it does not tell that."""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    if "aof_enabled" not in fields:
        return UNKNOWN
    if fields["aof_enabled"] == "1" and fields.get("aof_last_write_status", "ok") == "ok":
        return LOG
    if points is None:
        return UNKNOWN
    return SNAPSHOTS if points and fields.get("rdb_last_bgsave_status", "ok") == "ok" else NOTHING


def read_settings(reply: object) -> str | None:
    """The value in the answer of `CONFIG GET` for one setting; None if there is none."""
    found: Sequence[object] = reply if isinstance(reply, list) else ()
    return found[1].decode() if len(found) > 1 and isinstance(found[1], bytes) else None
