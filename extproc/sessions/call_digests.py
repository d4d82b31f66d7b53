"""Digests of what session limits count: what `serve --record` keeps of a request, so that limits can decide again without it.

A digest has the tool calls that are new, the request's place in the chain if nothing else names its session, and what the
session's ledgers said when the request came: money, failures, and whether the request was taken back. Ids and arguments of
calls are keyed hashes, as in `detectors/digests.py`; a tool's name is written once, if it is plain.

A client sends its calls again with each request, so a digest only has those behind a list that was recorded, and that list's
id. From time to time, and whenever a history does not go on from the one before it, all calls are written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from extproc.bounded import LRU
from extproc.detectors.chain import ChainPlace, digest_tool
from extproc.detectors.digests import (
    NOT_RECORDED,
    DamagedDigestError,
    DigestParts,
    Hider,
    UnknownTurnsError,
    find_hider,
    is_plain_tool,
    open_digest,
    seal_digest,
)
from extproc.detectors.turn import digest
from extproc.sessions.history import RECORD, CallHistory
from extproc.store.rules.session import MAX_MONEY, NO_ID

_VERSION: Final = 1
_SIZE: Final = 8
_ID: Final = 6
_TOOL: Final = 10
_PAIR: Final = 14
"""Where id, tool, and digest of tool and arguments end in a call's record."""

_SHAPE: Final = 4
_MOST_TOOLS: Final = 250
_NEW_TOOL: Final = 254
_NEW_HIDDEN_TOOL: Final = 255
_HIDDEN_TOOL: Final = 4
_MOST_CALLS: Final = 500
"""Maximum number of calls in a digest; a history that shows more when it is written whole is not recorded."""

_FEW_SINCE: Final = 32
_MOST_NEWEST: Final = 255
_MOST_LEDGERS: Final = 3
_MOST_ERRORS: Final = 2**16 - 1
_MOST_REASON: Final = 40
_REASON: Final = re.compile("[a-z][a-z_]{0,39}")
INSPECT_LIMIT: Final = "inspect_limit"
UNKNOWN: Final = -1
"""The cost of a session whose ledger was not asked."""

_HIDES: Final = "#"
"""Precedes the hash of a name that is not plain."""


# Flags of a digest, in its second and third byte.
_WHOLE, _PLACED, _PARENT, _OWN, _BEFORE, _FOLLOWS, _UNREADABLE = 1, 2, 4, 8, 16, 32, 64
_OFFER, _REJECTED, _REFUSED, _LEDGERS = 3, 4, 8, 16

# Flags of a ledger.
_SHARED, _ERRORS, _NOT_ASKED = 1, 2, 4


class KnownLedger:
    """What a session's ledger said when a request came.

    Attributes:
        shape: see `SessionGuard.shape`.
        cost: settled, in nano-dollars; `UNKNOWN` if the ledger was not asked.
        reserved: for calls that were open before this one, in nano-dollars.
        errors: consecutive failures.
        ended: number of consecutive failures that has killed the session; 0 if they have not.
        shared: it is the ledger of excess sessions.
    """

    __slots__ = ("cost", "ended", "errors", "reserved", "shape", "shared")

    def __init__(  # noqa: PLR0913  # a record
        self, shape: bytes, cost: int, reserved: int = 0, errors: int = 0, ended: int = 0, *, shared: bool = False
    ) -> None:
        self.ended = ended
        self.shape = shape
        self.cost = cost
        self.reserved = reserved
        self.errors = errors
        self.shared = shared


class WrittenCalls:
    """The list of calls that was recorded of a conversation; never changed.

    Attributes:
        records: of the calls.
        count: their number.
        id: of the list.
        tools: digests of the tools in it, in the order of their first calls.
        since: number of calls since the list was written whole.
        place: of the newest request; None if not recorded.
        secret: the key of the hashes.
    """

    __slots__ = ("count", "id", "place", "records", "secret", "since", "tools")

    def __init__(  # noqa: PLR0913  # a record
        self, records: bytes, identity: bytes, tools: list[bytes], since: int, place: ChainPlace | None, secret: bytes
    ) -> None:
        self.records = records
        self.count = len(records) // RECORD
        self.id = identity
        self.tools = tools
        self.since = since
        self.place = place
        self.secret = secret


class ShownCalls:
    """What a request shows to session limits.

    Attributes:
        history: its calls.
        unreadable: why they could not be read; empty if they could.
        place: its place in the chain, if its session has no name; else None.
        size: of what was inspected, in bytes, or of the body if that was too long; 0 if something else made it unreadable.
        hides: the name of a tool is unknown.
        rejected: policies decided to refuse it.
        refused: it was refused in the end.
        ledgers: of its sessions, by shape.
    """

    __slots__ = ("hides", "history", "ledgers", "place", "refused", "rejected", "size", "unreadable")

    def __init__(self, history: CallHistory, place: ChainPlace | None, size: int, unreadable: str = "") -> None:
        self.history = history
        self.unreadable = unreadable
        self.place = place
        self.size = size
        self.hides = False
        self.rejected = self.refused = False
        self.ledgers: dict[bytes, KnownLedger] = {}

    @property
    def is_too_long(self) -> bool:
        """Whether it was too long to be inspected."""
        return self.unreadable == INSPECT_LIMIT and self.size > 0


def write_calls(shown: ShownCalls, ledgers: Sequence[KnownLedger], known: Any, secret: bytes) -> str:  # noqa: ANN401  # KnownMessages
    """Record what session limits have counted.

    Args:
        shown: of the request; its own `ledgers` are not used.
        ledgers: of its sessions.
        known: the cache entry of its messages; None if they are not cached.
        secret: of the hash key.
    """
    ledgers = ledgers[:_MOST_LEDGERS]
    first, parts = _write_shown(shown, known, secret)
    second = shown.history.offer | _REJECTED * shown.rejected | _REFUSED * shown.refused | _LEDGERS * len(ledgers)
    parts += [_write_ledger(ledger) for ledger in ledgers]
    return seal_digest(bytes((_VERSION, first, second)) + shown.size.to_bytes(4, "big") + b"".join(parts))


def _write_shown(shown: ShownCalls, known: Any, secret: bytes) -> tuple[int, list[bytes]]:  # noqa: ANN401  # KnownMessages
    """The first flags, and the parts between size and ledgers."""
    history = shown.history
    if shown.unreadable:
        return _write_unreadable(shown.unreadable)
    last: WrittenCalls | None = known.counted if known is not None else None
    count = len(history.records) // RECORD
    if last is not None and (last.secret != secret or not history.records.startswith(last.records)):
        last = None
    if last is not None and count <= _MOST_CALLS and last.since + count - last.count > max(_FEW_SINCE, count // 2):
        last = None
    added = count if last is None else count - last.count
    if added > _MOST_CALLS or history.newest > _MOST_NEWEST:
        return _write_unreadable(NOT_RECORDED)
    hider = find_hider(secret)
    first = _WHOLE if last is None else 0
    parts = [bytes((history.newest,)) + (last.id if last is not None else b"")]
    place = shown.place
    if place is not None:
        follows = last is not None and place.follows(last.place)
        first |= _PLACED | _FOLLOWS * follows | _PARENT * bool(place.parent) | _OWN * bool(place.own)
        first |= _BEFORE * bool(place.before)
        before_it = b"" if follows else hider.hide_place(place.parent, place.before)
        parts.append(place.depth.to_bytes(2, "big") + hider.hide_place(place.node, place.own) + before_it)
    tools = last.tools if last is not None else list[bytes]()
    calls = b""
    if added:
        tools = tools.copy()
        calls = _write_entries(history, count - added, tools, hider)
        if len(tools) > _MOST_TOOLS:
            return _write_unreadable(NOT_RECORDED)
    parts.append(added.to_bytes(2, "big") + calls)
    if known is not None:
        identity = digest((last.id if last is not None else b"") + b"".join(parts[1:]))
        since = 0 if last is None else last.since + added
        known.counted = WrittenCalls(history.records, identity, tools, since, place, secret)
    return first, parts


def _write_unreadable(why: str) -> tuple[int, list[bytes]]:
    reason = why.encode("ascii", "replace")[:_MOST_REASON]
    return _UNREADABLE, [bytes((len(reason),)) + reason]


def _write_entries(history: CallHistory, first: int, tools: list[bytes], hider: Hider) -> bytes:
    """The calls from an index on; adds their tools to those of the list."""
    records, names, entries = history.records, dict(history.tools), list[bytes]()
    for at in range(first * RECORD, len(records), RECORD):
        tool = records[at + _ID : at + _TOOL]
        entries.append(records[at + _PAIR : at + RECORD])
        if tool in tools:
            entries.append(bytes((tools.index(tool),)))
        else:
            tools.append(tool)
            name = names.get(tool, "")
            if is_plain_tool(name) and digest_tool(name) == tool:
                entries.append(bytes((_NEW_TOOL, len(name))) + name.encode())
            else:
                entries.append(bytes((_NEW_HIDDEN_TOOL,)) + hider.hide(tool)[:_HIDDEN_TOOL])
        call = records[at : at + _ID]
        entries.append(call if call == NO_ID else hider.hide(call)[:_ID])
        entries.append(hider.hide(records[at + _TOOL : at + _PAIR])[: _PAIR - _TOOL])
    return b"".join(entries)


def _write_ledger(ledger: KnownLedger) -> bytes:
    cost, reserved = _write_amount(ledger.cost), _write_amount(ledger.reserved)
    failed = ledger.errors > 0 or ledger.ended > 0
    flags = _SHARED * ledger.shared | _ERRORS * failed | _NOT_ASKED * (ledger.cost == UNKNOWN)
    errors = b""
    if failed:
        errors = min(ledger.errors, _MOST_ERRORS).to_bytes(2, "big") + min(ledger.ended, _MOST_ERRORS).to_bytes(2, "big")
    return ledger.shape + bytes((flags, len(cost) << 4 | len(reserved))) + cost + reserved + errors


def _write_amount(amount: int) -> bytes:
    """A number of up to 64 bits, without zeros in front."""
    amount = max(0, amount)
    return amount.to_bytes((amount.bit_length() + 7) // 8, "big")


class _List:
    """The newest part of a list of calls, and the list before it."""

    __slots__ = ("before", "place", "records", "tools")

    def __init__(
        self, before: _List | None, records: bytes, tools: tuple[tuple[bytes, str], ...], place: ChainPlace | None
    ) -> None:
        self.before = before
        self.records = records
        self.tools = tools
        self.place = place

    def join(self) -> bytes:
        """The records of all calls."""
        parts: list[bytes] = []
        each: _List | None = self
        while each is not None:
            parts.append(each.records)
            each = each.before
        return b"".join(parts[::-1])


class CallReader:
    """Reads digests in the order of their requests, and puts the lists of calls together."""

    def __init__(self, most: int) -> None:
        """Start without any; keeps the newest `most` lists."""
        self._lists: LRU[bytes, _List] = LRU(most)

    def read(self, text: str) -> ShownCalls:
        """A digest; its calls are unreadable with `NOT_RECORDED` if there were too many.

        Raises:
            DamagedDigestError: it is none.
            UnknownTurnsError: it continues calls that are not known.
        """
        return self._read(open_digest(text))

    def _read(self, parts: DigestParts) -> ShownCalls:
        version, first, second = parts.take(3)
        if version != _VERSION or second & _OFFER == _OFFER:
            raise DamagedDigestError
        size = parts.take_number(4)
        if first & _UNREADABLE:
            reason = parts.take(parts.take_number(1)).decode("ascii", "replace")
            if _REASON.fullmatch(reason) is None:
                raise DamagedDigestError
            shown = ShownCalls(CallHistory(b"", 0, 0, (), "", 0), None, size, reason)
        else:
            shown = self._read_shown(parts, first, second & _OFFER, size)
        shown.rejected, shown.refused = second & _REJECTED != 0, second & _REFUSED != 0
        for _ in range(second // _LEDGERS):
            ledger = _read_ledger(parts)
            shown.ledgers.setdefault(ledger.shape, ledger)
        if not parts.is_over:
            raise DamagedDigestError
        return shown

    def _read_shown(self, parts: DigestParts, first: int, offer: int, size: int) -> ShownCalls:
        newest, begins = parts.take_number(1), parts.tell()
        start = b"" if first & _WHOLE else parts.take(_SIZE)
        before = self._lists.use(start) if start else None
        if start:
            begins += _SIZE
            if before is None:
                raise UnknownTurnsError
        place = _read_place(parts, first, before) if first & _PLACED else None
        records, tools, hides = _read_entries(parts, before.tools if before is not None else ())
        listed = _List(before, records, tools, place)
        self._lists.put(digest(start + parts.cut(begins)), listed)
        joined = listed.join()
        total = sum([int.from_bytes(joined[at + _TOOL : at + _PAIR], "big") for at in range(0, len(joined), RECORD)])
        if newest * RECORD > len(joined):
            raise DamagedDigestError
        shown = ShownCalls(CallHistory(joined, total, newest, tools, "", offer), place, size)
        shown.hides = hides
        return shown


def _read_place(parts: DigestParts, first: int, before: _List | None) -> ChainPlace:
    depth, node = parts.take_number(2), parts.take(_SIZE) * 2  # as long as live ones
    own = parts.take(_SIZE) * 2 if first & _OWN else b""
    if first & _FOLLOWS:
        last = before.place if before is not None else None
        if last is None:
            raise DamagedDigestError
        return ChainPlace.restore(node, last.node, own, last.own, depth)
    parent, earlier = [parts.take(_SIZE) * 2 if first & flag else b"" for flag in (_PARENT, _BEFORE)]
    return ChainPlace.restore(node, parent, own, earlier, depth)


def _read_entries(
    parts: DigestParts, known: tuple[tuple[bytes, str], ...]
) -> tuple[bytes, tuple[tuple[bytes, str], ...], bool]:
    """New calls as records, all tools, and whether the name of one is unknown."""
    tools, records = list(known), list[bytes]()
    for _ in range(parts.take_number(2)):
        since, number = parts.take(1), parts.take_number(1)
        if number == _NEW_TOOL:
            name = parts.take(parts.take_number(1)).decode("ascii", "replace")
            if not is_plain_tool(name):
                raise DamagedDigestError
            tools.append((digest_tool(name), name))
            number = len(tools) - 1
        elif number == _NEW_HIDDEN_TOOL:
            hidden = parts.take(_HIDDEN_TOOL)
            tools.append((hidden, f"{_HIDES}{hidden.hex()}"))
            number = len(tools) - 1
        if number >= len(tools):
            raise DamagedDigestError
        call, pair = parts.take(_ID), parts.take(_PAIR - _TOOL)
        records.append(call + tools[number][0] + pair + since)
    listed = known if len(tools) == len(known) else tuple(tools)
    return b"".join(records), listed, len([name for _, name in tools if name.startswith(_HIDES)]) > 0


def _read_ledger(parts: DigestParts) -> KnownLedger:
    shape = parts.take(_SHAPE)
    flags, sizes = parts.take(2)
    if flags & ~(_SHARED | _ERRORS | _NOT_ASKED) or sizes >> 4 > _SIZE or sizes & 15 > _SIZE:
        raise DamagedDigestError
    cost, reserved = parts.take_number(sizes >> 4), parts.take_number(sizes & 15)
    if flags & _NOT_ASKED:
        cost = UNKNOWN
    errors, ended = [parts.take_number(2) if flags & _ERRORS else 0 for _ in range(2)]
    return KnownLedger(shape, min(cost, MAX_MONEY), min(reserved, MAX_MONEY), errors, ended, shared=flags & _SHARED != 0)
