"""Histories that are known, so that of the next request only what is new is read.

An agent sends its history again with each request, a turn or two longer. The body up to the new messages, and from their end
on, is byte for byte what it was. Both are known again by their lengths and checksums; no word of them is kept. Whatever is not
known again is read as a whole, and both ways find the same. Who forges a checksum hides calls of its own session, which it
could leave out as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from msgspec import Raw, ValidationError, defstruct, json

from extproc.apis import open_conversation
from extproc.apis.conversation import Conversation, Shape
from extproc.bounded import Memo
from extproc.request.document import ABSENT, MAX_STEPS, Document, NotCounted, count_left, decode_json, walk
from extproc.request.fingerprint import NO_BODY, Body
from extproc.sessions.history import (
    NOTHING,
    RECORD,
    CallHistory,
    Shown,
    Tally,
    list_shown,
    look_at_all,
    read_tool_calls,
    summarize,
)

_LOOSE: Final = 4
"""This many of the newest messages some clients write in another way next time: marks of what is to be cached move along."""

_SMALL: Final = 4_096
"""A body of fewer bytes is read as a whole in the time that it takes to know it again."""

_SIDE_BY_SIDE: Final = 2
"""This many of a session's histories are known, as sub-agents have some of their own."""

_CREDIT: Final = 4
"""This many histories of a session are noted in vain; it takes a tenth of the time in which they are read."""

_MOST_CALLS: Final = 512
_MOST_TOOLS: Final = 24
_MOST_EQUAL: Final = 24
"""Calls of a history that is known, its tools, and those of its calls that have equals."""

_MOST_SESSIONS: Final = 1_024
"""This many are in a generation of those that are known. They take 90 MB under attack, and mostly 2 KB each."""

_OPENING: Final = b"[null"
"""In place of what stands before the gap in an array of messages."""

_between: Final = re.compile(rb"[ \t\r\n,]*").match
_decode_items: Final = json.Decoder(list[Raw]).decode
_Decode: TypeAlias = Callable[[bytes], Any]
_messages_decoders: Final[dict[type, _Decode]] = {}
_body_decoders: Final[dict[str, _Decode]] = {}
"""By what a shape makes of a message, and by its key for them."""


class _KnownBody:
    """A body with a gap for what is new, between two of its messages; never changed.

    Attributes:
        shape: how its API writes it.
        model: that it names.
        start: what stands before the gap.
        end: what stands behind it.
        count: messages before the gap.
        tally: what they show.
        loose: this many of the newest messages stay in the gap.
        offers: what it offers the model, before or behind the gap.
    """

    __slots__ = ("count", "end", "loose", "model", "offers", "shape", "start", "tally")

    def __init__(  # noqa: PLR0913  # a record
        self,
        shape: Shape,
        model: str,
        start: Body,
        end: Body,
        count: int,
        tally: Tally,
        loose: int,
        offers: str,
    ) -> None:
        self.loose = loose
        self.offers = offers
        self.shape = shape
        self.model = model
        self.start = start
        self.end = end
        self.count = count
        self.tally = tally

    def is_in(self, data: bytes) -> bool:
        """Whether this is what a body is, but for the gap."""
        start, gap_end = self.start.length, len(data) - self.end.length
        view = memoryview(data)
        return start <= gap_end and _equals(self.start, view[:start]) and _equals(self.end, view[gap_end:])

    def read(self, data: bytes) -> tuple[Tally, _KnownBody] | None:
        """What a body shows that this is in, and what is known then; None where it has to be read as a whole."""
        before = self.start.length
        text = _OPENING + data[before : len(data) - self.end.length] + b"]"
        tally, left = self.tally, count_left()[1]
        try:
            new = decode_json(text, _find_messages_decoder(self.shape))[1:]
            if self.count + len(new) > MAX_STEPS or None in new:
                return None
            walk(tally.steps)
            shown = look_at_all(self.shape, _leave_out_thoughts(self.shape, new))
        except (NotCounted, ValidationError):
            return None
        settled = len(new) - self.loose
        if settled <= 0 or count_left()[1] != left:
            return tally.add(shown), self
        first = len(shown) - len(_leave_out_thoughts(self.shape, new[settled:]))
        tally = tally.add(shown[:first])
        more = _find_end(text, len(_OPENING), _decode_items(text)[1 : settled + 1]) - len(_OPENING)
        start = self.start.plus(memoryview(data)[before : before + more])
        grown = _KnownBody(self.shape, self.model, start, self.end, self.count + settled, tally, self.loose, self.offers)
        return tally.add(shown[first:]), grown


class _Histories:
    """What is known of one session's.

    Attributes:
        credit: this many more may be noted in vain.
        loose: of the next one that is noted; none where the client may never write a message anew.
    """

    __slots__ = ("_known", "credit", "loose")

    def __init__(self) -> None:
        self._known: list[_KnownBody] = []
        self.credit = _CREDIT
        self.loose = 0

    def read(self, data: bytes) -> CallHistory | None:
        """What a body shows that goes on from a history that is known; None for any other."""
        for place in range(len(self._known)):
            known = self._known[place]
            if known.is_in(data):
                found = known.read(data)
                if found is None:
                    return None
                tally, grown = found
                if grown is not known:
                    del self._known[place]
                    self._note(grown)
                self.credit = min(self.credit + 1, _CREDIT)
                return summarize(tally, known.model, known.offers)
        return None

    def add(self, known: _KnownBody) -> None:
        """Know one more, on credit."""
        self.credit -= 1
        self.loose = _LOOSE
        self._note(known)

    def _note(self, known: _KnownBody) -> None:
        tally = known.tally
        if len(tally.records) <= _MOST_CALLS * RECORD and len(tally.tools) <= _MOST_TOOLS and len(tally.again) <= _MOST_EQUAL:
            self._known = [*self._known[1 - _SIDE_BY_SIDE :], known]


_SESSIONS: Final[Memo[str, _Histories]] = Memo(_MOST_SESSIONS)


def read_known_calls(document: Document, session: str) -> CallHistory:
    """What `history.read_tool_calls` finds, and raises; the name of the session is unique to it."""
    if len(document) < _SMALL:
        return read_tool_calls(document)
    histories = _SESSIONS.get(session)
    found = histories.read(document.data()) if histories is not None else None
    if found is not None:
        return found
    conversation = open_conversation(document)
    left = count_left()[1]
    shown = list_shown(conversation)
    tally = NOTHING.add(shown)
    if tally.records and count_left()[1] == left:
        if histories is None:
            histories = _Histories()
            _SESSIONS.put(session, histories)
        known = _leave_gap(conversation, document.data(), shown, histories.loose) if histories.credit > 0 else None
        if known is not None:
            histories.add(known)
    return summarize(tally, conversation.model, conversation.find_offer())


def _leave_gap(conversation: Conversation, data: bytes, shown: Sequence[Shown], loose: int) -> _KnownBody | None:
    """What will be known of a body that shows this; None where it is unclear where its messages stand."""
    shape = conversation.shape
    if conversation.decoded or conversation.before.after or len(conversation) <= loose:
        return None
    messages = bytes(getattr(decode_json(data, _find_body_decoder(shape.path[0])), shape.path[0]))
    at = data.find(messages)
    if not messages.startswith(b"[") or data.find(messages, at + 1) >= 0:
        return None
    settled = len(conversation) - loose
    start = at + _find_end(messages, 1, _decode_items(messages)[:settled])
    gap_end = at + len(messages) - 1
    tally = NOTHING.add(shown[: len(shown) - len(conversation.list_values(start=settled))])
    before, behind = NO_BODY.plus(data[:start]), NO_BODY.plus(data[gap_end:])
    return _KnownBody(shape, conversation.model, before, behind, settled, tally, loose, conversation.find_offer())


def _equals(known: Body, data: memoryview) -> bool:
    """Whether this many bytes are what is known."""
    body = NO_BODY.plus(data)
    return body.crc32 == known.crc32 and body.adler32 == known.adler32


def _find_end(array: bytes, at: int, items: Sequence[Raw]) -> int:
    """Where the last of an array's items ends, the first of which comes next."""
    for item in items:
        between = _between(array, at)
        at = (between.end() if between is not None else at) + len(item)
    return at


def _leave_out_thoughts(shape: Shape, messages: Sequence[Any]) -> list[Any]:
    return [message for message in messages if shape.name_speaker(message)]


def _find_messages_decoder(shape: Shape) -> _Decode:
    """Of an array whose messages are as the shape has them, or null."""
    decode = _messages_decoders.get(shape.message)
    if decode is None:
        decode = _messages_decoders[shape.message] = json.Decoder(list[shape.message | None]).decode  # type: ignore[name-defined]
    return decode


def _find_body_decoder(key: str) -> _Decode:
    """Of a body of which one key is left as it stands."""
    decode = _body_decoders.get(key)
    if decode is None:
        decode = _body_decoders[key] = json.Decoder(defstruct("Messages", [(key, Raw, ABSENT)])).decode
    return decode
