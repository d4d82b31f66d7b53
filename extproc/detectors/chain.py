"""What a request shows of its conversation: the calls that session limits count, and the conversation's place in the chain.

That place depends on the user's first message, and on text and calls of all assistant messages since. Ids, thoughts and
results do not count, because clients make new ids, and cut thoughts and results from older messages. There is a link of the
chain behind each assistant message, even if another one follows directly, because some clients keep only their newest
result. Where an API writes calls that were made at once as adjacent messages, one link is behind all of them.

Session limits count turns: consecutive messages of the assistant are one.

What the messages of an earlier body showed is cached; see `conversation.py`. Messages of other bodies are cached one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import Any, Final
from zlib import crc32

from msgspec import json

from extproc.apis import open_conversation
from extproc.apis.contents import read_arguments
from extproc.apis.conversation import ASSISTANT, USER, Conversation, Shape
from extproc.apis.messages import CALL, REFERENCE, RESULT, TEXT, Part
from extproc.bounded import Memo
from extproc.detectors.actions import cut_thinking
from extproc.detectors.turn import digest
from extproc.request.document import INSPECTION, Document, NotCounted, open_value, walk, write_canonical

CALL_DIGEST: Final = 6
TOOL_DIGEST: Final = 4
PAIR_DIGEST: Final = 4
"""Lengths of the digests in a call's record, in bytes: of the call, of its tool's name, and of tool and arguments."""

_ID: Final = 16
_MOST_SHOWN: Final = 2_000
"""Maximum number of turns; a longer conversation has no place."""

_MOST_PARENTS: Final = 8
"""Maximum number of an answer's messages, each with a link of its own, that a client may add between two requests."""

_MOST_KNOWN: Final = 8_192
_LONGEST_KEY: Final = 512
_MOST_CALLS: Final = 8
_LONGEST_NAMES: Final = 256
"""Bounds of the cache of messages: their number in each of two generations; the longest key, in bytes, beyond which a hash
replaces it; and the calls of a message and the length of their names. A message takes 0.7 KB, all take 60 MB under attack."""

_MOST_CALLS_KEPT: Final = 2
_LONGEST_NAMES_KEPT: Final = 64
"""Maximum number of calls, and length of their names, of a message whose content is cached with its conversation."""

_NO_CALL: Final = bytes(CALL_DIGEST)
_NO_FIRST_WORDS: Final = bytes(_ID)
"""Stands for the user's first message, or the assistant's first one would be taken for it."""

_SEPARATOR: Final = b"\xff"  # never in UTF-8
_SUFFIX: Final = b"suffix"
_encode: Final = json.Encoder().encode


class CountedCall:
    """One call, regardless of the rest of the history; never changed.

    Attributes:
        tool: the tool's name.
        tool_digest: digest of the tool's name.
        named: digest of id, tool and arguments, which only equal calls share; empty without an id.
        first: its record if no equal call precedes it.
        pair: digest of tool and arguments, as a number.
    """

    __slots__ = ("first", "named", "pair", "tool", "tool_digest")

    def __init__(self, part: Part, spelled: bytes) -> None:
        """Compute the digests; `spelled` is the result of `spell`."""
        self.tool = part.name
        self.tool_digest = digest(part.name.encode("utf-8", "surrogateescape"), TOOL_DIGEST)
        self.named = digest(part.id.encode() + _SEPARATOR + spelled, _ID) if part.id else b""
        self.pair = crc32(spelled)
        self.first = self.write(1)

    def write(self, number: int) -> bytes:
        """The record of the call with this number, from 1 on, among equal calls."""
        name = digest(b"%b%d" % (self.named, number), CALL_DIGEST) if self.named else _NO_CALL
        return name + self.tool_digest + self.pair.to_bytes(PAIR_DIGEST)


class ShownMessage:
    """What an assistant message shows, or several consecutive ones; never changed.

    Attributes:
        hash: hash of its text and calls, 16 bytes.
        hashes: those of the messages with a link of their own.
        calls: its calls, in order.
        only_calls: it has calls, or a reference to one, and no text.
        units: units that it takes to read; see `Inspection`.
    """

    __slots__ = ("calls", "hash", "hashes", "only_calls", "units")

    def __init__(self, hashes: list[bytes], calls: list[CountedCall], units: int = 0, *, only_calls: bool = False) -> None:
        self.hash = hashes[0] if len(hashes) == 1 else digest(b"".join(hashes), _ID)
        self.hashes = hashes
        self.calls = calls
        self.only_calls = only_calls
        self.units = units


_KNOWN: Final[Memo[bytes, ShownMessage]] = Memo(_MOST_KNOWN)


class ChainPlace:
    """A request's place in the chain; all hashes have 16 bytes. Never changed.

    Attributes:
        links: behind each message that it shows, oldest first; the first one stands for the user's first message.
        node: the newest link.
        parents: links at which an earlier request may stand, newest first; empty if the assistant has not said anything.
        near: how many of these are behind the newest turn's messages, or directly before that turn.
        own: the last two turns; empty if there are fewer.
        before: the last two turns without the newest; empty if there are fewer.
        depth: number of turns.
    """

    __slots__ = ("before", "depth", "links", "near", "node", "own", "parents")

    def __init__(self, first_words: bytes, turns: Sequence[ShownMessage], known: ChainPlace | None = None) -> None:
        """Compute the place from the hash of the user's first message, and from the assistant's turns.

        `known`: the place without the newest turn, if an earlier request stood there; None if unknown.
        """
        self.depth = count = len(turns)
        if known is None:
            self.links = [digest(first_words or _NO_FIRST_WORDS, _ID)]
            unlinked = turns
        else:
            self.links = known.links.copy()
            unlinked = turns[known.depth :]
        for turn in unlinked:
            for hashed in turn.hashes:
                self.links.append(digest(self.links[-1] + hashed, _ID))
        self.node = self.links[-1]
        self.own = _link_last_two(turns, count)
        self.before = known.own if known is not None else _link_last_two(turns, count - 1)
        if known is not None:
            self.parents, self.near = [known.node], 1
            return
        newest = len(turns[-1].hashes) if turns else 0
        self.parents = self.links[-2 : -2 - _MOST_PARENTS : -1]
        if newest > _MOST_PARENTS:
            self.parents.append(self.links[-1 - newest])
        elif newest < len(self.links) - 1 <= _MOST_PARENTS:
            self.parents.pop()  # the user's first message tells no conversations apart
        self.near = min(newest, len(self.parents))

    def identify(self, kind: int) -> bytes:
        """8 bytes that distinguish the request from others of its conversation; `kind` is below 256."""
        return bytes((kind,)) + self.node[9:]


def _link_last_two(turns: Sequence[ShownMessage], end: int) -> bytes:
    """The hash of the last two turns before an index; empty if there are fewer."""
    return digest(_SUFFIX + turns[end - 2].hash + turns[end - 1].hash, _ID) if end > 1 else b""


class Transcript:
    """What a conversation shows.

    Attributes:
        first: index of the user's first message; -1 if there is none.
        turns: the assistant's turns, oldest first; consecutive messages are one turn.
        goes_on: the newest message is the assistant's.
        units: as in `ShownMessage`.
        before: the place without the newest turn; None if unknown.
        places: results of `find_place`, by whether the newest turn is a prefill and does not count.
    """

    __slots__ = ("before", "first", "goes_on", "places", "turns", "units")

    def __init__(self, earlier: Transcript | None) -> None:
        """Start empty, or with the turns of an earlier transcript."""
        self.first: int = -1 if earlier is None else earlier.first
        self.turns: list[ShownMessage] = [] if earlier is None else earlier.turns.copy()
        self.goes_on = False
        self.units = 0
        self.before: ChainPlace | None = None if earlier is None else earlier.places.get(False)
        self.places: dict[bool, ChainPlace | None] = {}


def read_transcript(conversation: Conversation) -> Transcript:
    """What a conversation shows. It is read only once, and takes no units of its callers.

    Raises:
        NotCounted: a message cannot be read, or there are too many.
    """
    found: Transcript | NotCounted | None = conversation.transcript
    INSPECTION.begin()
    if found is None:
        try:
            found = _read(conversation)
        except NotCounted as failure:
            found = failure.renew()
        conversation.transcript = found
        INSPECTION.begin()
    if isinstance(found, NotCounted):
        raise found.renew()
    return found


def spell(part: Part) -> bytes:
    """A text, or a call with tool and arguments, in canonical spelling; a result stands for an unknown call, unlike any other.

    Raises:
        NotCounted: it cannot be read.
    """
    if part.kind == CALL:
        return part.name.encode() + _SEPARATOR + write_canonical(read_arguments(part.value))
    if part.kind == RESULT:
        return _SEPARATOR + _SEPARATOR + part.id.encode()
    value = open_value(part.value)
    return cut_thinking(value).strip().encode() if isinstance(value, str) else write_canonical(value)


def digest_tool(name: str) -> bytes:
    """The digest of a tool's name, 4 bytes, as in records."""
    return digest(name.encode("utf-8", "surrogateescape"), TOOL_DIGEST)


def _read(conversation: Conversation) -> Transcript:
    """Read a conversation. Turns of earlier requests may be cached, but take as many units."""
    known, earlier = conversation.known, conversation.earlier
    if known is not None and known.transcript is not None:
        again: Transcript = known.transcript
        INSPECTION.take(again.units)
        return again
    before: Transcript | None = earlier.transcript if earlier is not None else None
    if before is not None and before.goes_on:
        before = None
    left = INSPECTION.left
    if before is not None:
        INSPECTION.take(before.units)
    made = Transcript(before)
    begins = len(earlier.ends) if earlier is not None and before is not None else 0
    groups = _list_groups(conversation, begins, made)
    made.turns += [_join(group) if group[1:] else group[0] for group in groups]
    if len(groups) != 1:
        made.before = None
    made.units = left - INSPECTION.left
    if known is not None:
        spoken = zip(known.speakers[begins:], known.shown[begins:], strict=True)
        if all(shown is not None for speaker, shown in spoken if speaker == ASSISTANT):  # all are small enough
            known.transcript = made
    return made


def _list_groups(conversation: Conversation, begins: int, made: Transcript) -> list[list[ShownMessage]]:
    """Group consecutive assistant messages from an index on; sets `first` and `goes_on` of the transcript.

    In a group, calls that were made at once are one message.
    """
    groups: list[list[ShownMessage]] = []
    joins = conversation.shape.joins is not None
    conversation.check_count()
    for place in range(begins, len(conversation)):
        speaker = conversation.name_speaker(place)
        if speaker == ASSISTANT:
            message = _look_at(conversation, place)
            if not made.goes_on:
                groups.append([])
            groups[-1].append(message)
            made.goes_on = True
        elif speaker:
            if speaker == USER and made.first < 0:
                made.first = place
            made.goes_on = False
    return [_join_calls(group) for group in groups] if joins else groups


def _join_calls(messages: list[ShownMessage]) -> list[ShownMessage]:
    """Join adjacent messages that consist of calls, which were made at once."""
    joined: list[ShownMessage] = []
    for only_calls, adjacent in groupby(messages, attrgetter("only_calls")):
        made = list(adjacent)
        joined += [_join(made, at_once=True)] if only_calls and len(made) > 1 else made
    return joined


def _join(messages: list[ShownMessage], *, at_once: bool = False) -> ShownMessage:
    """Join consecutive messages; those of calls that were made `at_once` have one link."""
    calls = [call for message in messages for call in message.calls]
    hashes = [message.hash for message in messages]
    return ShownMessage([digest(b"".join(hashes), _ID)] if at_once else hashes, calls, only_calls=at_once)


def _look_at(conversation: Conversation, place: int) -> ShownMessage:
    """Read the message at an index. The result is cached with the conversation if it is small."""
    known = conversation.known
    kept: ShownMessage | None = known.shown[place] if known is not None else None
    if kept is not None:
        INSPECTION.take(kept.units)
        return kept
    if known is not None and conversation.has_read(place):  # usually the newest, in which a detector has looked for loops
        left = INSPECTION.left
        walk(1)
        shown = _show(conversation.read_parts(place), left)
    else:
        shown = _look(conversation.shape, conversation.open_message(place))
    small = len(shown.calls) <= _MOST_CALLS_KEPT and sum([len(call.tool) for call in shown.calls]) <= _LONGEST_NAMES_KEPT
    if known is not None and small:
        known.shown[place] = shown
    return shown


def _look(shape: Shape, value: Any) -> ShownMessage:  # noqa: ANN401  # of the shape's
    """Read a message. Recent ones are cached, but take as many units."""
    key = _encode(value)  # with all keys of the shape, so no message of another shape has the same
    if len(key) > _LONGEST_KEY:
        key = digest(key, _ID)
    shown = _KNOWN.get(key)
    if shown is not None:
        INSPECTION.take(shown.units)
        return shown
    left = INSPECTION.left
    walk(1)
    shown = _show(shape.read(value), left)
    calls = shown.calls
    if len(calls) <= _MOST_CALLS and sum([len(call.tool) for call in calls]) <= _LONGEST_NAMES:
        _KNOWN.put(key, shown)
    return shown


def _show(parts: list[Part], left: int) -> ShownMessage:
    """What a message with these parts shows; `left` is the number of units before it was read."""
    spelled: list[bytes] = []
    calls: list[CountedCall] = []
    for part in parts:
        if part.kind in (TEXT, REFERENCE):
            spelled.append(spell(part))
        elif part.kind == CALL:
            call = spell(part)
            spelled.append(call)
            calls.append(CountedCall(part, call))
    hashed = digest(_SEPARATOR.join([part for part in spelled if part]), _ID)
    only_calls = TEXT not in [part.kind for part in parts] and bool(spelled)
    return ShownMessage([hashed], calls, left - INSPECTION.left, only_calls=only_calls)


def find_place(conversation: Conversation, *, prefilled: bool) -> ChainPlace | None:
    """A request's place; None if its conversation cannot be read, or is too long.

    Args:
        conversation: the request's conversation.
        prefilled: the newest message is the start of the model's next answer.
    """
    try:
        shown = read_transcript(conversation)
    except NotCounted:
        return None
    if prefilled in shown.places:
        return shown.places[prefilled]
    turns, place = shown.turns[:-1] if prefilled else shown.turns, None
    if len(turns) <= _MOST_SHOWN:
        with suppress(NotCounted):
            opening = _look_at(conversation, shown.first).hash if shown.first >= 0 else b""
            place = ChainPlace(opening, turns, None if prefilled else shown.before)
        INSPECTION.begin()
    shown.places[prefilled] = place
    return place


def read_place(document: Document) -> ChainPlace | None:
    """Like `find_place`, for a body; also None if it has no conversation, or the server keeps earlier turns."""
    try:
        conversation = open_conversation(document)
        return None if conversation.elsewhere else find_place(conversation, prefilled=conversation.is_prefilled())
    except NotCounted:
        return None
