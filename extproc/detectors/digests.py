"""Digests of turns: what `serve --record` keeps of a conversation, so that `turns` can decide again without its texts.

A digest has an entry for each turn: keyed hashes of action, result and words, flags, and the names of tools. A client sends its
history again with each request, so a digest only has the turns that are new, and says behind which turn of which earlier digest
they belong. No two digests have the same number. A list of turns that this process has not recorded yet is written whole, and
so is every list from time to time, because logs are rotated.

What a process has recorded is kept with the messages; see `KnownMessages`. A turn is recorded again if any byte of its messages
has changed, or if anything else has come behind them.

A digest is at most `LONGEST` characters long, whatever a client sends. It is written as base64. A text that begins with a
hyphen stands for a missing digest: it is the reason for which `turns` did not count the request.
"""

from __future__ import annotations

import os
import re
from base64 import b64decode
from binascii import Error as Base64Error
from binascii import b2a_base64
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b, blake2s
from itertools import count
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from extproc.apis.conversation import KnownMessages
from extproc.bounded import LRU, Memo
from extproc.detectors.arguments import is_for_thinking
from extproc.detectors.base import Memory
from extproc.detectors.chain import ChainPlace, find_place
from extproc.detectors.loops import MAX_TURNS, History, KeptTurn
from extproc.detectors.results import MAX_NORMALIZED
from extproc.detectors.turn import AnyTurn, Reading, Reduced, Turn
from extproc.request.document import Document, NotCounted, start_looking
from extproc.request.hash_key import HashKey

LONGEST: Final = 8_192
"""Maximum length of a digest, in characters."""

NOT_RECORDED: Final = "not_recorded"
"""The reason why a request is not counted whose digest does not have what a policy compares."""

_VERSION: Final = 2
_MISSING: Final = "-"
_PURPOSE: Final = b"turn digests"
_SIZE: Final = 8
_NONE: Final = bytes(_SIZE)
_BYTES: Final = [bytes((number,)) for number in range(256)]
"""Looking bytes up is faster than making them."""

_CHECK: Final = 4
_SHAPE: Final = 4
_FAILURE: Final = 3
_LONG_ACTION: Final = 60
"""Minimum size of an action that is recorded as long, as in `similar_turns.py`, which needs no other size."""

_ENOUGH: Final = (MAX_TURNS + 1) * MAX_NORMALIZED

_MOST_SINCE: Final = MAX_TURNS
"""Number of turns after which a list is written whole again."""

_MOST_PLACES: Final = 2_048
_LONGEST_NAMES: Final = 128
_LONGEST_NAME: Final = 64
_TOOL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,63}")
_COMMAND: Final = re.compile(r"[a-z][a-z_.+-]{0,31}")
"""Names that are recorded: of tools, and words of a text that begin an action. Of others, a keyed hash is."""

_THINKS: Final = "think"

# Flags of an entry, in its second byte.
_CHANGED: Final = 1
_SPOKE: Final = 2
_FAILED: Final = 4
_LONG: Final = 8
_UNREADABLE: Final = 16
_HIDES: Final = 32
_KNOWN: Final = 64
_RETURNED: Final = 128

_UNREADABLE_ENTRY: Final = bytes((2, 0, _UNREADABLE))

# Flags of a digest, in its second byte.
_ELSEWHERE: Final = 1
_AFTER: Final = 2
_IN_TEXT: Final = 4
_PREFILLED: Final = 8
_SHORTENED: Final = 16
_PLACED: Final = 32
_WHOLE: Final = 64
_FOLLOWS: Final = 128

# Those in its third byte, above `History.find_newest`.
_KEEPS: Final = 3
_KEEPS_NONE: Final = 2
_IDENTIFIED: Final = 4
_NESTED: Final = 8
_PARENT: Final = 16
_OWN: Final = 32
_BEFORE: Final = 64

_HEAD: Final = Struct(f">3B{_SHAPE}sIQ")
"""Version, flags, shape, size of the document, and number of the digest."""

_NUMBERS: Final = count(int.from_bytes(os.urandom(_SIZE - 1), "big"))
"""Numbers of digests, unlike those of other processes."""


class DamagedDigestError(Exception):
    """A digest that `write_digest` has not written."""


class UnknownTurnsError(Exception):
    """A digest continues turns that are not in the log."""


class Hider:
    """Hashes hashes with the key, so that texts cannot be guessed from them.

    What is hashed is a key for this purpose and a value, which together fit in one block; BLAKE2's own keys take a block more.
    A block of BLAKE2s takes less time than one of BLAKE2b.
    """

    __slots__ = ("_places", "_start")

    def __init__(self, secret: bytes) -> None:
        self._start = blake2s(HashKey(secret).start(_PURPOSE, 32).digest(), digest_size=_SIZE).copy
        self._places: Memo[bytes, bytes] = Memo(_MOST_PLACES)

    def hide(self, value: bytes) -> bytes:
        """The keyed hash of a hash."""
        hashed = self._start()  # a copy takes less time than a new one
        hashed.update(value)
        made: bytes = hashed.digest()
        return made

    def hide_place(self, node: bytes, own: bytes) -> bytes:
        """The keyed hashes of two parts of a `ChainPlace`; `parent` and `before` of the next are the same."""
        if not node:
            return b""
        parts = node + own
        hidden = self._places.get(parts)
        if hidden is None:
            hidden = self.hide(node) + self.hide(own) if own else self.hide(node)
            self._places.put(parts, hidden)
        return hidden


class _Mark:
    """What was recorded of one turn; branches of a conversation share it.

    Attributes:
        place: index of the assistant's newest message in it.
        end: index of the message behind the turn's last one.
        entry: its entry.
        before: the mark of the turn before; None if a list begins with this one.
        digest: number of the digest that has it.
        count: number of entries there up to this one.
        since: number of entries since a list was written whole.
        request: where the digest's request is in the chain; None if unknown.
    """

    __slots__ = ("before", "count", "digest", "end", "entry", "place", "request", "since")

    def __init__(self, place: int, end: int, entry: bytes) -> None:
        self.place = place
        self.end = end
        self.entry = entry
        self.before: _Mark | None = None
        self.digest = self.count = self.since = 0
        self.request: ChainPlace | None = None


class _Context:
    """On what entries depend besides messages. Entries of the same object can be used again.

    Attributes:
        hider: hashes with the key.
        ignored: see `Reading`.
        hints: see `Reading`.
        offer: see `Conversation.find_offer`.
    """

    __slots__ = ("hider", "hints", "ignored", "offer")

    def __init__(self, hider: Hider, reading: Reading) -> None:
        self.hider = hider
        self.ignored = reading.ignored
        self.hints = reading.hints or {}
        self.offer = reading.conversation.find_offer()

    def is_of(self, hider: Hider, reading: Reading) -> bool:
        """Whether one made of these, with the same arguments ignored, is equal."""
        hints = reading.hints or {}
        return self.hider is hider and self.hints == hints and self.offer == reading.conversation.find_offer()


@lru_cache(64)
def find_shape(ignored: frozenset[str]) -> bytes:
    """A digest of the setting on which the entries depend: the names of arguments that are thoughts."""
    return blake2b("\0".join(sorted(ignored)).encode("utf-8", "surrogatepass"), digest_size=_SHAPE).digest()


@lru_cache(4)
def find_hider(secret: bytes) -> Hider:
    """What hides with the hash key's secret."""
    return Hider(secret)


def is_plain_tool(name: str) -> bool:
    """Whether the name of a tool is recorded as it is."""
    return _TOOL.fullmatch(name) is not None


@lru_cache(512)
def _is_plain(name: str, calls: bool) -> bool:  # noqa: FBT001  # as `_write_entry`
    """Whether a short name is recorded as it is."""
    return (_TOOL if calls else _COMMAND).fullmatch(name) is not None


def write_missing(reason: str) -> str:
    """What stands for the digest of a request that `turns` did not count."""
    return _MISSING + reason


def write_digest(  # noqa: PLR0913  # all that is recorded
    histories: Sequence[History], shape: bytes, key: HashKey, memory: Memory | None, size: int, most: int
) -> str:
    """Record the history that detectors have judged.

    Args:
        histories: the history, as often as it was read.
        shape: see `find_shape`.
        key: for the hashes.
        memory: what is kept of the request for its session; None if that is unknown.
        size: of the document, in bytes.
        most: if older messages were left out of it, the maximum length of a body to inspect; else 0.

    Returns:
        the digest, or the reason for a missing one.
    """
    readings = [history.reading for history in histories]
    reading = readings[0] if readings else None
    if reading is None or any(each is None or each.left < 0 for each in readings):  # some results were not compared in full
        return write_missing(NOT_RECORDED)
    reading.left = _ENOUGH
    start_looking()
    try:
        return _write(histories[0], reading, shape, find_hider(key.secret), memory, size, most)
    except NotCounted:  # more of the history is read than for a verdict
        return write_missing(NOT_RECORDED)
    finally:
        start_looking()


def _write(  # noqa: PLR0913  # as `write_digest`
    history: History, reading: Reading, shape: bytes, hider: Hider, memory: Memory | None, size: int, most: int
) -> str:
    newest = history.at(0)
    keeps = history.find_newest()
    first = _ELSEWHERE * history.elsewhere | _AFTER * bool(history.after) | _SHORTENED * (most > 0)
    first |= _IN_TEXT * reading.in_text | _PREFILLED * (keeps > 0 or history.is_prefilled())
    second = keeps if keeps >= 0 else _KEEPS_NONE
    parts: list[bytes] = []
    if most:
        parts.append(most.to_bytes(4, "big"))
    if memory is not None and memory.identity:
        second |= _IDENTIFIED
        parts.append(hider.hide(memory.identity))
    times, words = history.count_nested() if newest is None or not newest.known else (0, b"")
    if times:
        second |= _NESTED
        parts.append(bytes((times,)) + hider.hide(words))
    place = memory.place if memory is not None else _find_place(history, keeps)
    number = next(_NUMBERS)
    last, entries = _list_entries(history, reading, hider, number, place)
    if last is not None:
        parts.append(last.digest.to_bytes(_SIZE, "big"))
        parts.append(_BYTES[last.count])
    else:
        first |= _WHOLE
    if place is not None:
        first |= _PLACED
        second |= _PARENT * bool(place.parent) | _OWN * bool(place.own) | _BEFORE * bool(place.before)
        parts.append(place.depth.to_bytes(2, "big"))
        parts.append(hider.hide_place(place.node, place.own))
        if last is not None and place.follows(last.request):
            first |= _FOLLOWS
        else:
            parts.append(hider.hide_place(place.parent, place.before))
    parts.append(_BYTES[len(entries)])
    parts += entries
    return seal_digest(_HEAD.pack(_VERSION, first, second, shape, size, number) + b"".join(parts))


def _find_place(history: History, keeps: int) -> ChainPlace | None:
    in_text = keeps >= 0 and history.reading is not None and history.reading.in_text
    if history.reading is None or history.elsewhere or in_text:
        return None
    return find_place(history.reading.conversation, prefilled=keeps > 0)


def _list_entries(
    history: History, reading: Reading, hider: Hider, number: int, request: ChainPlace | None
) -> tuple[_Mark | None, list[bytes]]:
    """The newest mark to continue, None for none, and the entries behind it, which get marks of the digest with a number."""
    newest = history.at(0)
    if newest is None:
        return None, []
    newest.reduce()  # which looks for hints
    known = reading.conversation.known
    if known is None or reading.in_text or history.elsewhere:
        context = _Context(hider, reading)
        return None, [_pack(turn, context) for turn in history.newest(MAX_TURNS)[::-1]]
    context, mark = _recall(known, hider, reading)
    added: list[_Mark] = []  # the newest first
    end = len(known.ends)
    for at in range(MAX_TURNS):
        turn = history.at(at)
        if not isinstance(turn, Turn):
            mark = None
            break
        begins, place = turn.span
        while mark is not None and mark.place > place:
            mark = mark.before
        if mark is not None and mark.place == place and mark.end == end:
            break
        added.append(_Mark(place, end, _pack(turn, context)))
        end = begins
    else:
        mark = None  # what was recorded is no longer looked at
    since = mark.since + len(added) if mark is not None else 0
    if since > _MOST_SINCE:
        since = 0
        while mark is not None and len(added) < MAX_TURNS:
            added.append(_Mark(mark.place, mark.end, mark.entry))
            mark = mark.before
        mark = None
    last = mark
    added.reverse()
    for new in added:
        new.before, new.digest, new.since, new.request = mark, number, since, request
        new.count = mark.count + 1 if mark is not None and mark is not last else 1
        mark = new
    known.digests.append((context, mark))
    return last, [new.entry for new in added]


def _recall(known: KnownMessages, hider: Hider, reading: Reading) -> tuple[_Context, _Mark | None]:
    """The context as it was kept, and the newest mark of messages that are the same here. Takes both from what is kept."""
    others: list[tuple[_Context, _Mark | None]] = []
    found: tuple[_Context, _Mark | None] | None = None
    earlier: list[tuple[_Context, _Mark | None]] = known.digests or []  # of a body with which others may go on, too
    for last, newest in earlier:
        mark = newest
        while mark is not None and mark.end > known.same:
            mark = mark.before
        if last.ignored is not reading.ignored:
            others.append((last, mark))
        elif last.is_of(hider, reading):
            found = last, mark
    known.digests = others
    known.same = len(known.ends)
    return found or (_Context(hider, reading), None)


def _pack(turn: AnyTurn, context: _Context) -> bytes:
    """The entry of a turn, with its length; it is kept with the turn's messages."""
    known = turn.known_result if isinstance(turn, Turn) else None
    if known is not None and known.context is context:
        return known.entry
    try:
        entry = _write_entry(turn.reduce(), context.hider, calls=isinstance(turn, Turn) and turn.calls)
    except NotCounted:
        entry = _UNREADABLE_ENTRY
    known = turn.known_result if isinstance(turn, Turn) else None
    if known is not None:
        known.context, known.entry = context, entry
    return entry


def _write_entry(kept: Reduced, hider: Hider, *, calls: bool) -> bytes:
    """An entry; `calls`: the names are of tools that were called."""
    parts = [_BYTES[kept.evidence], b""]
    if kept.known:
        parts.append(hider.hide(kept.action_hash))
    parts.append(hider.hide(kept.raw))
    flags = _KNOWN * kept.known | _RETURNED * kept.returned
    if kept.normalized != kept.raw:
        flags |= _CHANGED
        parts.append(hider.hide(kept.normalized))
    if kept.words:
        flags |= _SPOKE
        parts.append(hider.hide(kept.words))
    if kept.failure_id:
        flags |= _FAILED
        parts.append(hider.hide(kept.failure_id)[:_FAILURE])
    if kept.action_size >= _LONG_ACTION:
        flags |= _LONG
    left = _LONGEST_NAMES
    for name in kept.names:
        safe = len(name) <= _LONGEST_NAME and _is_plain(name, calls)
        shown = name if safe else _THINKS if is_for_thinking(name) else f"#{hider.hide(name.encode()).hex()}"
        left -= len(shown) + 1
        if not safe or left < 0:
            flags |= _HIDES
        if left < 0:
            break
        parts.append(_BYTES[len(shown)])
        parts.append(shown.encode())
    parts[1] = _BYTES[flags]
    entry = b"".join(parts)
    return _BYTES[len(entry)] + entry


class RecordedTurn(NamedTuple):
    """A turn of a digest.

    Attributes:
        turn: the turn; None if it could not be read.
        hides: some names of its tools are unknown.
    """

    turn: Reduced | None
    hides: bool


class Digest(NamedTuple):
    """A digest that was read.

    Attributes:
        shape: see `find_shape`.
        size: of the document, in bytes.
        most: maximum length of a body to inspect, if older messages were left out; else 0.
        flags: of the first and of the second byte.
        identity: see `KeptTurn`.
        nested: see `History.count_nested`.
        place: in the chain; None if unknown.
        turns: that are looked at, the oldest first.
    """

    shape: bytes
    size: int
    most: int
    flags: tuple[int, int]
    identity: bytes
    nested: tuple[int, bytes]
    place: ChainPlace | None
    turns: tuple[RecordedTurn, ...]


class DigestParts:
    """The parts of a digest, read one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        self._at += size
        if self._at > len(self._data):
            raise DamagedDigestError
        return self._data[self._at - size : self._at]

    def take_number(self, size: int) -> int:
        """The next bytes as a number."""
        return int.from_bytes(self.take(size), "big")

    def tell(self) -> int:
        """How many bytes were read."""
        return self._at

    def cut(self, start: int) -> bytes:
        """The bytes from an offset on that were read."""
        return self._data[start : self._at]

    @property
    def is_over(self) -> bool:
        """Whether everything was read."""
        return self._at == len(self._data)


def seal_digest(written: bytes) -> str:
    """A digest as text, with a checksum; see `open_digest`."""
    return b2a_base64(written + crc32(written).to_bytes(_CHECK, "big"), newline=False).decode()


def open_digest(text: str) -> DigestParts:
    """The parts of a digest; raises DamagedDigestError if it is not as it was written."""
    try:
        data = b64decode(text, validate=True)
    except (Base64Error, ValueError):
        raise DamagedDigestError from None
    if len(text) > LONGEST or len(data) < _CHECK or crc32(data[:-_CHECK]).to_bytes(_CHECK, "big") != data[-_CHECK:]:
        raise DamagedDigestError
    return DigestParts(data[:-_CHECK])


class _Known(NamedTuple):
    """What is known of a digest that others may continue.

    Attributes:
        place: of its request in the chain; None if unknown.
        turns: those that it continues, and its own.
        earlier: number of the former.
    """

    place: ChainPlace | None
    turns: tuple[RecordedTurn, ...]
    earlier: int


class DigestReader:
    """Reads digests in the order of their requests, and puts the lists of turns together."""

    def __init__(self, most: int) -> None:
        """Start without any; keeps what the newest `most` digests have."""
        self._known: LRU[int, _Known] = LRU(most)

    def read(self, text: str) -> Digest:
        """A digest.

        Raises:
            NotCounted: it stands for a missing one.
            DamagedDigestError: it is none.
            UnknownTurnsError: it continues turns that are not known.
        """
        if text.startswith(_MISSING):
            raise NotCounted(text[1:] if re.fullmatch("[a-z][a-z_]{0,39}", text[1:]) else NOT_RECORDED)
        return self._read(open_digest(text))

    def _read(self, parts: DigestParts) -> Digest:
        version, first, second = parts.take(3)
        if version != _VERSION:
            raise DamagedDigestError
        shaped, size, number = parts.take(_SHAPE), parts.take_number(4), parts.take_number(_SIZE)
        most = parts.take_number(4) if first & _SHORTENED else 0
        identity = parts.take(_SIZE) if second & _IDENTIFIED else b""
        nested = (parts.take_number(1), parts.take(_SIZE)) if second & _NESTED else (0, b"")
        last, earlier = (None, ()) if first & _WHOLE else self._find_earlier(parts.take_number(_SIZE), parts.take_number(1))
        if first & _FOLLOWS and last is None:
            raise DamagedDigestError
        place = _read_place(parts, second, last if first & _FOLLOWS else None) if first & _PLACED else None
        turns = (*earlier, *[_unpack(DigestParts(parts.take(parts.take_number(1)))) for _ in range(parts.take_number(1))])
        if not parts.is_over or second & _KEEPS > _KEEPS_NONE:
            raise DamagedDigestError
        self._known.put(number, _Known(place, turns, len(earlier)))
        return Digest(shaped, size, most, (first, second), identity, nested, place, turns[-MAX_TURNS:])

    def _find_earlier(self, number: int, count: int) -> tuple[ChainPlace | None, tuple[RecordedTurn, ...]]:
        """The place of the digest with a number, and the turns up to this many of its own."""
        known = self._known.use(number)
        if known is None:
            raise UnknownTurnsError
        if not 0 < count <= len(known.turns) - known.earlier:
            raise DamagedDigestError
        return known.place, known.turns[: known.earlier + count][-MAX_TURNS:]


def _read_place(parts: DigestParts, flags: int, last: ChainPlace | None) -> ChainPlace:
    """A place in the chain; `last`: of the request before, if it follows that."""
    depth, node = parts.take_number(2), parts.take(_SIZE)
    own = parts.take(_SIZE) if flags & _OWN else b""
    if last is not None:
        return ChainPlace.restore(node, last.node, own, last.own, depth)
    parent, before = [parts.take(_SIZE) if flags & flag else b"" for flag in (_PARENT, _BEFORE)]
    return ChainPlace.restore(node, parent, own, before, depth)


def _unpack(parts: DigestParts) -> RecordedTurn:
    """The turn of an entry."""
    evidence, flags = parts.take(2)
    if flags & _UNREADABLE:
        return RecordedTurn(None, hides=True)
    known, returned, failed, changed, spoke = [flags & flag != 0 for flag in (_KNOWN, _RETURNED, _FAILED, _CHANGED, _SPOKE)]
    action, raw = parts.take(_SIZE) if known else _NONE, parts.take(_SIZE)
    normalized = parts.take(_SIZE) if changed else raw
    words = parts.take(_SIZE) if spoke else b""
    failure = parts.take(_FAILURE) if failed else b""
    names: list[str] = []
    while not parts.is_over:
        try:
            names.append(parts.take(parts.take_number(1)).decode("ascii"))
        except UnicodeDecodeError:
            raise DamagedDigestError from None
    size = _LONG_ACTION if flags & _LONG else 0
    turn = Reduced(known, returned, failed, action, raw, normalized, tuple(names), evidence, words, failure, size)
    return RecordedTurn(turn, hides=flags & _HIDES != 0)


class RecordedHistory(History):
    """The turns of a recorded request."""

    def __init__(self, digest: Digest, turns: Iterator[AnyTurn]) -> None:
        first, _ = digest.flags
        super().__init__(turns, elsewhere=first & _ELSEWHERE != 0, after=b"known" if first & _AFTER else b"")
        self.place = digest.place
        self._digest = digest

    def count_nested(self) -> tuple[int, bytes]:
        """See `History`."""
        return self._digest.nested

    def is_prefilled(self) -> bool:
        """See `History`."""
        return self._digest.flags[0] & _PREFILLED != 0

    def find_newest(self) -> int:
        """See `History`."""
        keeps = self._digest.flags[1] & _KEEPS
        return -1 if keeps == _KEEPS_NONE else keeps

    def keep(self, *, named: bool) -> KeptTurn | None:
        """See `History`.

        Raises:
            NotCounted: the request did not name its session when it was recorded.
        """
        place = self.find_newest()
        turn = self.at(place) if place >= 0 else None
        if turn is None:
            return None
        if named and not self._digest.identity:
            raise NotCounted(NOT_RECORDED)
        in_text = self._digest.flags[0] & _IN_TEXT != 0
        kept = KeptTurn(self, place, turn.reduce(), None, in_text=in_text)
        kept.identity = self._digest.identity if named else b""
        return kept


def find_other_key(digests: Mapping[bytes, Digest | NotCounted], ignored: frozenset[str], most: int) -> str:
    """The key of a detector whose value differs from the recorded one, so that it would see other turns; empty for none.

    Args:
        digests: by shape.
        ignored: the detector's `ignore_arguments`.
        most: its `max_inspect_bytes`.
    """
    found = digests.get(find_shape(ignored), digests.get(b""))
    if found is None:
        return "ignore_arguments"
    if isinstance(found, NotCounted):
        return ""
    return "max_inspect_bytes" if found.size > most or (found.most or most) != most else ""


class RecordedDocument(Document):
    """The body of a recorded request, of which only its turns are known."""

    def __init__(self, digests: dict[bytes, Digest | NotCounted], most: int) -> None:
        """Take the digests, or why there are none, by shape; an empty one stands for any.

        `most`: maximum length of a body to inspect, in bytes.
        """
        super().__init__(b"")
        self.recorded = self
        self._digests = digests
        self._most = most

    def open_history(self, ignored: frozenset[str], *, named: bool) -> History:
        """The turns, for a detector that ignores these arguments; `named`: it has rules for tools by name.

        Raises:
            NotCounted: they were recorded with other settings, or not counted then.
        """
        found = self._digests.get(find_shape(ignored), self._digests.get(b""))
        if isinstance(found, NotCounted):
            raise found.renew()
        if found is None or find_other_key(self._digests, ignored, self._most):
            raise NotCounted(NOT_RECORDED)
        if named and any(turn.hides for turn in found.turns):
            raise NotCounted(NOT_RECORDED)
        return RecordedHistory(found, _read_turns(found.turns))

    def data(self) -> bytes:
        """See `Document`; raises NotCounted."""
        raise NotCounted("no_body")


def _read_turns(turns: Sequence[RecordedTurn]) -> Iterator[AnyTurn]:
    """The turns, the newest first; raises NotCounted where one could not be read."""
    for recorded in turns[::-1]:
        if recorded.turn is None:
            raise NotCounted(NOT_RECORDED)
        yield recorded.turn
