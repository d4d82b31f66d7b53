"""State in this process, for one replica; every other store is tested against it.

Bounded in entries and in bytes: beyond `max_entries` or the memory for counts, expired entries are
dropped first, then the least recently used. Everything is O(1) amortised, and no operation stalls
the event loop. Entries are spread over many small dicts ("shards"), because growing one dict of a
million entries takes 30 ms, and because finding the oldest entry of a large dict means stepping
over the gaps that older ones left.

A shard keeps one dict for each lifetime (the window, or a longer cooldown), in order of last use.
Within such a dict the order of use is the order of expiry, so the front is both the next to expire
and the least recently used.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from time import monotonic_ns, time_ns
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from extproc.bounded import LRU
from extproc.errors import UsageError
from extproc.memory import read_memory
from extproc.metrics import Metrics
from extproc.settings import Settings
from extproc.store.memory_budgets import KeptBudget, MemoryBudgets
from extproc.store.memory_chains import MemoryChains
from extproc.store.pushes import AnyPush
from extproc.store.rules.back_to_back import NAME, Begin, End, Interval, State, begin, end
from extproc.store.rules.budget import UNUSED, BudgetState, Take
from extproc.store.rules.chain import Trail, follow
from extproc.store.rules.documents import MemoryDocuments
from extproc.store.rules.ring import Push, push
from extproc.store.rules.root import RootSearch, find_root
from extproc.store.rules.session import (
    Ledger,
    Limits,
    Question,
    Settlement,
    Standing,
    Step,
    enter,
    move_step,
)
from extproc.store.rules.take_back import (
    CHAIN,
    TakeBack,
    take_from_chain,
    take_from_log,
    take_from_tally,
)
from extproc.store.rules.tree import Tree
from extproc.store.rules.windows import UNCOUNTED, Count, Hit, Tally, log, read_log_times, tally

DEFAULT_MAX_ENTRIES = 1_000_000
_SHARD_ENTRIES: Final = 1024
_SWEEP_EVERY: Final = 16
"""Number of insertions between two searches for expired entries, most of which find none."""

_SWEEP: Final = 2 * _SWEEP_EVERY
"""Maximum number of expired entries to remove from a dict at once.

It is more than were inserted, so sweeping overtakes inserting.
"""

_MEAN_BYTES: Final = 1_024
"""Memory for each of `max_entries`. A count takes 300 bytes; a log or a ring can take thousands."""

_OVERHEAD: Final = 176
"""Bytes of an entry beside its key and its state: two objects, and a slot in a dict."""

_PARTS: Final = 4
"""Unpacked ledgers and budgets use one of this many parts of the memory, chains another."""

_UNPACKED: Final = 4_096
_UNPACKED_SHARE: Final = 32
_UNPACKED_BYTES: Final = 40_960
"""Maximum number of unpacked ledgers, and of unpacked budgets; the share of a small store's entries
that they may be; and the maximum size of each, in bytes."""

_COMPARE_MS: Final = 100
"""How often the calendar is read: reading it takes longer than a rule."""

_RECENT_MS: Final = 60_000
"""A ledger that let a request through within this time stays unpacked.

With too many sessions, packing and unpacking would cost more than it saves.
"""

# A packed Tally costs 64 bytes, a tuple of ints twice that, and the garbage collector never visits
# it. Every entry but a log begins with the time of its last use, and the time until which it is
# kept regardless of its lifetime.
_TIMES: Final = struct.Struct("<qq")
_LEDGER: Final = struct.Struct("<qqI")
"""These times, and the length of the session's tree of agents, which stands before the ledger."""

_BUDGET: Final = struct.Struct("<qqqqqq")
_BUDGET_SIZE: Final = _BUDGET.size
_TALLY: Final = struct.Struct("<qqqI")
_RUN: Final = struct.Struct("<qqI")
"""The time of the last use, the end of the cooldown, and the count at the oldest interval."""

_INTERVAL: Final = struct.Struct(f"<qq{NAME}s")
_MAX_COUNT: Final = 2**32 - 1

_monotonic_ns: Final = monotonic_ns  # compiled code reads a module's constant fastest

_Entry: TypeAlias = bytes | bytearray
_Shard: TypeAlias = dict[int, dict[str, _Entry]]  # lifetime in ms -> key -> entry


def _read_clock() -> int:
    return _monotonic_ns() // 1_000_000


def _read_calendar() -> int:
    return time_ns() // 1_000_000


class MemoryStore:
    """The `memory://` store; see `Store`."""

    def __init__(
        self,
        metrics: Metrics,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        clock: Callable[[], int] = _read_clock,
        max_bytes: int = 0,
    ) -> None:
        """Start empty.

        Args:
            metrics: metrics of the process.
            max_entries: maximum number of entries.
            clock: returns the time in milliseconds.
            max_bytes: maximum memory for all state; 0 for a share of this process's memory.
        """
        most = min(max_entries * _MEAN_BYTES, max_bytes or read_memory().share("counts"))
        self._clock = clock
        self._calendar = _read_calendar if clock is _read_clock else clock
        self._compared = -_COMPARE_MS
        self._ahead = 0  # calendar time minus clock time
        self._max_entries = max_entries
        self._max_bytes = most - most // _PARTS  # with chains
        self._shards: list[_Shard] = [{} for _ in range(max(1, max_entries // _SHARD_ENTRIES))]
        self._most_unpacked = min(
            _UNPACKED, max_entries // _UNPACKED_SHARE, most // _PARTS // _UNPACKED_BYTES
        )
        self._unpacked: LRU[str, Ledger] = LRU(self._most_unpacked)  # ledgers kept unpacked
        self._entries = 0  # including unpacked ledgers
        self._bytes = 0
        self._puts = 0
        self._hand = 0
        self._chains = MemoryChains(most // _PARTS, metrics.store_evictions.inc)
        self._budgets = MemoryBudgets(self._most_unpacked, self._unpack_budget, self._pack_budget)
        self.documents = MemoryDocuments(clock)
        self._evictions = metrics.store_evictions
        metrics.store_entries.set_function(self.__len__)

    def __len__(self) -> int:
        """The number of entries, some of which may have expired."""
        return self._entries + len(self._chains) + len(self._budgets)

    @property
    def size(self) -> int:
        """Bytes of all entries and chains, without unpacked ledgers and budgets."""
        return self._bytes + self._chains.size

    def hit(self, hits: Sequence[Question], now: int | None = None) -> list[Any]:
        """Count every hit once; answers at once, and never raises StoreError."""
        moment = self._clock() if now is None else now
        if hits and isinstance(hits[-1], Take):
            return self._hit_and_take(hits if isinstance(hits, list) else list(hits), moment, now)
        return [
            self._count(hit, moment) if isinstance(hit, Hit) else self._answer(hit, moment)
            for hit in hits
        ]

    def push(self, pushes: Sequence[AnyPush], now: int | None = None) -> list[list[bytes] | Trail]:
        """Push every entry once; answers at once, and never raises StoreError."""
        moment = self._clock() if now is None else now
        answers: list[list[bytes] | Trail] = []
        turns = 0
        for pushed in pushes:
            if isinstance(pushed, Push):
                answers.append(self._push(pushed, moment))
            elif isinstance(pushed, RootSearch):
                answers.append([self._find_root(pushed, moment)])
            else:
                answers.append(follow(self._chains.get, self._chains.put, pushed, moment))
                turns += 1
        if turns:
            self._chains.sweep(moment, turns)
        return answers

    # A Store's signature
    async def share_secret(self, name: str, secret: bytes) -> bytes:  # noqa: ARG002
        """See `Store`; this process is the only replica."""
        return secret

    def health(self) -> str:
        """Always `ok`."""
        return "ok"

    async def start(self) -> None:
        """Do nothing: there is no server."""

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    def _answer(
        self, asked: Step | Begin | Settlement | TakeBack | End | Take, now: int
    ) -> Standing | Count:
        if isinstance(asked, TakeBack):
            return self._take_back(asked)
        if isinstance(asked, Take):
            raise TypeError("takes come last")
        if not isinstance(asked, Step):
            if isinstance(asked, Begin):
                return self._begin(asked, now)
            return self._end(asked) if isinstance(asked, End) else self._settle(asked, now)
        if asked.search is None:
            return self._step(asked, now)
        root = self._find_root(asked.search, now)
        standing = self._step(move_step(asked, root), now)
        standing.root = root
        return standing

    def _hit_and_take(self, hits: list[Question], moment: int, now: int | None) -> list[Any]:
        """Answer questions that end in takes, which use calendar time."""
        today = self._read_calendar(moment) if now is None else now
        answers: list[Any] = []
        for place, hit in enumerate(hits):
            if isinstance(hit, Hit):
                answers.append(self._count(hit, moment))
            elif not isinstance(hit, Take):
                answers.append(self._answer(hit, moment))
            elif place == len(hits) - 1 and hit.start < 0:  # usually
                answers.append(self._budgets.take_one(hit, moment, today))
            else:
                takes = [take for take in hits[place:] if isinstance(take, Take)]
                return answers + self._budgets.ask(takes, moment, today)
        return answers

    def _read_calendar(self, moment: int) -> int:
        """The calendar time at the clock's time `moment`."""
        if not 0 <= moment - self._compared < _COMPARE_MS:
            self._ahead, self._compared = self._calendar() - moment, moment
        return moment + self._ahead

    def _unpack_budget(self, take: Take) -> BudgetState:
        """Take out a budget's state, even if another limit stored it under another lifetime."""
        entry = self._take(take.key, take.lifetime_ms)
        if entry is None:
            for lifetime in list(self._shards[hash(take.key) % len(self._shards)]):
                entry = entry or self._take(take.key, lifetime)
        if not isinstance(entry, bytes) or len(entry) != _BUDGET_SIZE:
            return UNUSED
        first: int
        second: int
        third: int
        fourth: int
        _, _, first, second, third, fourth = _BUDGET.unpack(entry)
        return first, second, third, fourth

    def _pack_budget(self, budget: KeptBudget) -> None:
        take, moment = budget.take, budget.moment
        self._put(
            take.key, take.lifetime_ms, _BUDGET.pack(moment, budget.until, *budget.state), moment
        )

    def _count(self, hit: Hit, now: int) -> Count:
        window = hit.window_ms
        entry = self._take(hit.key, window)
        if entry is None and hit.cooldown_ms > window:
            entry = self._take(hit.key, hit.cooldown_ms)
        if hit.window_type == "sliding_log":
            entry, count = log(entry if isinstance(entry, bytearray) else None, hit, now)
        else:
            state, count = tally(_read_tally(entry) if isinstance(entry, bytes) else None, hit, now)
            entry = _TALLY.pack(state[2], state[3], state[1], min(state[0], _MAX_COUNT))
        self._put(
            hit.key,
            hit.cooldown_ms if count.cooldown_ms and hit.cooldown_ms > window else window,
            entry,
            now,
        )
        return count

    def _take_back(self, asked: TakeBack) -> Count:
        if asked.kind == CHAIN:
            self._chains.change(asked.key, take_from_chain)
            return UNCOUNTED
        for entries in self._shards[hash(asked.key) % len(self._shards)].values():
            entry = entries.get(asked.key)
            if isinstance(entry, bytearray):
                before = len(entry)
                take_from_log(entry)
                self._bytes += len(entry) - before
            elif entry is not None:
                count, first, last, cooling_until = take_from_tally(_read_tally(entry))
                entries[asked.key] = _TALLY.pack(last, cooling_until, first, count)
        return UNCOUNTED

    def _begin(self, asked: Begin, now: int) -> Count:
        entry = self._take(asked.key, asked.lifetime_ms)
        known = _read_intervals(entry) if isinstance(entry, bytes) else None
        state, count = begin(known, asked, now)
        self._put(asked.key, asked.lifetime_ms, _write_intervals(now, state), now)
        return count

    def _end(self, asked: End) -> Count:
        for entries in self._shards[hash(asked.key) % len(self._shards)].values():
            entry = entries.get(asked.key)
            if isinstance(entry, bytes):
                state = end(_read_intervals(entry), asked)
                entries[asked.key] = _write_intervals(_read_times(entry)[0], state)
                self._bytes += len(entries[asked.key]) - len(entry)
        return UNCOUNTED

    def _step(self, asked: Step, now: int) -> Standing:
        limits, key = asked.limits, asked.key
        ledger = self._unpacked.use(key)
        # Usually; it stays unpacked
        if ledger is not None and not ledger.is_over(limits, now) and not ledger.is_large():
            return ledger.take_step(asked, now)
        ledger = self._take_ledger(key, limits, now)
        if ledger is None:
            ledger = Ledger(None, now, asked.earlier, self._enter(asked, now))
        standing = ledger.take_step(asked, now)
        self._keep_ledger(key, ledger, now)
        return standing

    def _settle(self, asked: Settlement, now: int) -> Standing:
        ledger = self._take_ledger(asked.key, asked.limits, now)
        if ledger is None:
            return Standing(retry=True)
        standing = ledger.settle(asked, now)
        self._keep_ledger(asked.key, ledger, now)
        return standing

    def _enter(self, asked: Step, now: int) -> int:
        """Begin a session of the caller; returns how often its idle time is halved."""
        lifetime = asked.limits.idle_ms
        entry = self._take(asked.caller, lifetime)
        begun, halvings = enter(
            bytes(entry[_TIMES.size :]) if entry is not None else None, asked.limits, now
        )
        self._put(asked.caller, lifetime, _TIMES.pack(now, 0) + begun, now)
        return halvings

    def _take_ledger(self, key: str, limits: Limits, now: int) -> Ledger | None:
        """Take out a session's ledger, to be changed and put back; None if there is none."""
        ledger = self._unpacked.use(key)
        if ledger is None:
            entry = self._take(key, limits.idle_ms)
            if entry is None:
                return None
            ledger = _open_ledger(bytes(entry), now)
        if not ledger.is_over(limits, now):
            return ledger
        self._drop_unpacked(key)
        return None

    def _keep_ledger(self, key: str, ledger: Ledger, now: int) -> None:
        """Put back a ledger: unpacked, unless it is large or there is no room."""
        unpacked = self._unpacked
        if unpacked.peek(key) is not None:
            if ledger.is_large():
                self._drop_unpacked(key)
                self._put_away(key, ledger, now)
        elif ledger.is_large() or (
            len(unpacked) >= self._most_unpacked and not self._make_room(now)
        ):
            self._put_away(key, ledger, now)
        else:
            unpacked.put(key, ledger)
            self._entries += 1

    def _drop_unpacked(self, key: str) -> None:
        if self._unpacked.drop(key) is not None:
            self._entries -= 1

    def _make_room(self, now: int) -> bool:
        """Pack the oldest ledger, unless it was used recently; returns whether there is room."""
        if not self._unpacked:
            return False
        oldest = self._unpacked.find_oldest()
        ledger = self._unpacked.peek(oldest)
        if ledger is None or now - ledger.last < _RECENT_MS:
            return False
        self._drop_unpacked(oldest)
        self._put_away(oldest, ledger, now)
        return True

    def _put_away(self, key: str, ledger: Ledger, now: int) -> None:
        tree = ledger.tree.pack() if ledger.tree is not None else b""
        self._put(
            key,
            ledger.idle_ms,
            b"".join([_LEDGER.pack(ledger.last, 0, len(tree)), tree, ledger.pack()]),
            now,
        )

    def _push(self, pushed: Push, now: int) -> list[bytes]:
        entry = self._take(pushed.key, pushed.ttl_ms)
        ring = (_read_times(entry)[0], bytes(entry[_TIMES.size :])) if entry is not None else None
        (last, records), entries = push(ring, pushed, now)
        self._put(pushed.key, pushed.ttl_ms, _TIMES.pack(last, 0) + records, now)
        return entries

    def _find_root(self, asked: RootSearch, now: int) -> bytes:
        own, parents = [
            self._take_value(key, asked.ttl_ms, now) for key in (asked.key, asked.parent_key)
        ]
        root = find_root(own, parents, asked)
        for key, value in ((asked.parent_key, parents), (asked.key, root)):
            if value is not None:
                self._put(key, asked.ttl_ms, _TIMES.pack(now, 0) + value, now)
        return root

    def _take_value(self, key: str, lifetime: int, now: int) -> bytes | None:
        entry = self._take(key, lifetime)
        if entry is None or abs(now - _read_times(entry)[0]) >= lifetime:
            return None
        return bytes(entry[_TIMES.size :])

    def _take(self, key: str, lifetime: int) -> _Entry | None:
        entries = self._shards[hash(key) % len(self._shards)].get(lifetime)
        entry = entries.pop(key, None) if entries is not None else None
        if entry is not None:
            self._entries -= 1
            self._bytes -= len(entry) + len(key) + _OVERHEAD
        return entry

    def _put(self, key: str, lifetime: int, entry: _Entry, now: int) -> None:
        """Store an entry as the most recently used, and make room for it."""
        shard = self._shards[hash(key) % len(self._shards)]
        entries = shard.get(lifetime)
        if entries is None:
            entries = shard[lifetime] = {}
        entries[key] = entry
        self._entries += 1
        self._bytes += len(entry) + len(key) + _OVERHEAD
        self._puts += 1
        if self._entries > self._max_entries or self.size > self._max_bytes:
            self._sweep(now)
            while (
                self._entries > self._max_entries or self.size > self._max_bytes
            ) and self._entries - len(self._unpacked) > 1:
                self._evict(shard, key)
        elif not self._puts % _SWEEP_EVERY:
            self._sweep(now)

    def _sweep(self, now: int) -> None:
        """Remove expired entries from the fronts of one shard; the next call takes the next."""
        self._hand = (self._hand + 1) % len(self._shards)
        shard = self._shards[self._hand]
        for lifetime in list(shard):
            entries = shard[lifetime]
            for _ in range(_SWEEP):
                key = next(iter(entries), None)
                if key is None:
                    del shard[lifetime]
                    break
                last, lasts_until = _read_times(entries[key])
                if now < max(last + lifetime, lasts_until):
                    break
                self._take(key, lifetime)

    def _evict(self, shard: _Shard, newest: str) -> None:
        """Drop the least recently used entry other than the newest, in this shard or the next."""
        position = self._hand
        while True:
            fronts = [
                (_read_times(entries[key])[0], lifetime, key)
                for lifetime, entries in shard.items()
                for key in itertools.islice(entries, 1)
                if key != newest
            ]
            if fronts:
                _, lifetime, key = min(fronts)
                self._take(key, lifetime)
                self._evictions.inc()
                return
            position = (position + 1) % len(self._shards)
            shard = self._shards[position]


def _open_ledger(entry: bytes, now: int) -> Ledger:
    size: int
    _, _, size = _LEDGER.unpack_from(entry)
    start = _LEDGER.size
    ledger = Ledger(entry[start + size :], now)
    if size:
        ledger.tree = Tree(entry[start : start + size])
    return ledger


def _read_tally(entry: bytes) -> Tally:
    last, cooling_until, first, number = _TALLY.unpack(entry)
    return number, first, last, cooling_until


def _read_intervals(entry: bytes) -> State:
    _, cooling_until, oldest = _RUN.unpack_from(entry)
    intervals: list[Interval] = list(_INTERVAL.iter_unpack(entry[_RUN.size :]))
    return oldest, cooling_until, intervals


def _write_intervals(last: int, state: State) -> bytes:
    oldest, cooling_until, intervals = state
    packed = [_INTERVAL.pack(*each) for each in intervals]
    return b"".join([_RUN.pack(last, cooling_until, min(oldest, _MAX_COUNT)), *packed])


def _read_times(entry: _Entry) -> tuple[int, int]:
    """When the entry was last used, and until when it is kept regardless of its lifetime."""
    return read_log_times(entry) if isinstance(entry, bytearray) else _TIMES.unpack_from(entry)


def open_memory(url: str, metrics: Metrics, _: Settings) -> MemoryStore:
    """Open `memory://` with `?max_entries=N`; raises UsageError for any other URL."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    limit = options.pop("max_entries", str(DEFAULT_MAX_ENTRIES))
    if parts.netloc or parts.path.strip("/") or options:
        raise UsageError(
            f"cannot use store {url!r}: it takes the form memory://?max_entries=1000000"
        )
    if not limit.isdecimal() or int(limit) < 1:
        raise UsageError(f"cannot use store {url!r}: max_entries must be a positive integer")
    return MemoryStore(metrics, int(limit))
