"""A conversation's calls, which session limits count, and its place in the chain.

The chain identifies a conversation by its content. A place depends on the user's first message, and
on text and calls of all assistant messages since. Ids, thoughts and results are ignored, because
clients create new ids, and cut thoughts and results from older messages. Each assistant message
adds a link, even if another one follows directly, because some clients keep only their newest
result. Where an API has parallel calls as adjacent messages, they share one link.

Session limits count turns: consecutive assistant messages are one turn.

Results are cached: of each message with its facts, and of the first messages of a conversation with
its newest body; see `conversation.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import Final
from zlib import crc32

from extproc.apis import open_conversation
from extproc.apis.contents import read_arguments
from extproc.apis.conversation import ASSISTANT, USER, Conversation, Message
from extproc.apis.messages import CALL, REFERENCE, RESULT, TEXT, Part
from extproc.detectors.actions import cut_thinking
from extproc.detectors.turn import digest
from extproc.request.clients import SUMMARIES
from extproc.request.document import (
    INSPECTION,
    Document,
    NotCounted,
    open_value,
    walk,
    write_canonical,
)

CALL_DIGEST: Final = 6
TOOL_DIGEST: Final = 4
PAIR_DIGEST: Final = 4
"""Lengths of the digests in a call's record, in bytes: of the call, of its tool's name, and of tool
and arguments."""

_ID: Final = 16
_MOST_SHOWN: Final = 2_000
"""Maximum number of turns; a longer conversation has no place."""

_MOST_PARENTS: Final = 8
"""Maximum number of assistant messages, each with its own link, that a client may add between two
requests."""

_MOST_CALLS_KEPT: Final = 8
_LONGEST_NAMES_KEPT: Final = 256
"""Maximum number of calls, and length of their names, of a message that is cached."""

_NO_CALL: Final = bytes(CALL_DIGEST)
_NO_FIRST_WORDS: Final = bytes(_ID)
"""Replaces a missing first message of the user. Otherwise, the first assistant message could be
mistaken for it."""

_SEPARATOR: Final = b"\xff"  # never in UTF-8
_SUFFIX: Final = b"suffix"
_ANSWER: Final = b"answer"


class CallFacts:
    """One call, independent of the rest of the history; immutable.

    Attributes:
        tool: the tool's name.
        tool_digest: digest of the tool's name.
        named: digest of id, tool and arguments, which only equal calls share; empty without an id.
        first: its record if no equal call precedes it.
        pair: digest of tool and arguments, as a number.
    """

    def __init__(self, part: Part, spelled: bytes) -> None:
        """Compute the digests; `spelled` is the result of `spell`."""
        self.tool = part.name
        self.tool_digest = digest(part.name.encode("utf-8", "surrogateescape"), TOOL_DIGEST)
        self.named = digest(part.id.encode() + _SEPARATOR + spelled, _ID) if part.id else b""
        self.pair = crc32(spelled)
        self.first = self.write(1)

    def write(self, number: int) -> bytes:
        """The record of the call with this number among equal calls, counted from 1."""
        name = digest(b"%b%d" % (self.named, number), CALL_DIGEST) if self.named else _NO_CALL
        return name + self.tool_digest + self.pair.to_bytes(PAIR_DIGEST)


class Spoken:
    """The content of one or several consecutive assistant messages; immutable.

    Attributes:
        hash: hash of text and calls, 16 bytes.
        hashes: the hashes of messages with their own link.
        calls: the calls, in order.
        only_calls: it has calls, or a reference to one, and no text.
        sums_up: a text in it begins like a summary of older messages; see `SUMMARIES`.
        units: units for reading it; see `Inspection`.
        small: it may be cached.
    """

    def __init__(
        self,
        hashes: list[bytes],
        calls: list[CallFacts],
        units: int = 0,
        *,
        only_calls: bool = False,
        sums_up: bool = False,
    ) -> None:
        self.hash = hashes[0] if len(hashes) == 1 else digest(b"".join(hashes), _ID)
        self.hashes = hashes
        self.calls = calls
        self.only_calls = only_calls
        self.sums_up = sums_up
        self.units = units
        self.small = (
            len(calls) <= _MOST_CALLS_KEPT
            and sum([len(call.tool) for call in calls]) <= _LONGEST_NAMES_KEPT
        )


class ChainPlace:
    """A request's place in the chain; all hashes have 16 bytes. Immutable.

    Attributes:
        node: the newest link.
        parents: possible links of earlier requests, newest first; empty before the first assistant
            message.
        near: how many of these are within the newest turn, or directly before it.
        own: the last two turns; empty if there are fewer.
        before: the two turns before the newest; empty if there are fewer. If `answer` is given, the
            turn before the newest, or the node of a window without the user's first message.
        answer: the newest of two turns, or a single one without the user's first message; else
            empty.
        depth: number of turns.
    """

    def __init__(
        self, first_words: bytes, turns: Sequence[Spoken], known: ChainPlace | None = None
    ) -> None:
        """Compute the place from the hash of the user's first message and the assistant's turns.

        `known`: the place after the first of these turns, or after all; None if unknown.
        """
        self.depth = count = len(turns)
        if known is None:
            links, unlinked = [digest(first_words or _NO_FIRST_WORDS, _ID)], turns
        else:
            links, unlinked = known.share(), turns[known.depth :]
        for turn in unlinked:
            for hashed in turn.hashes:
                links.append(digest(links[-1] + hashed, _ID))
        self._links = links
        self._count = len(links)
        self.node = links[-1]
        self.own = _link_last_two(turns, count)
        self.before = (
            known.own
            if known is not None and known.depth == count - 1
            else _link_last_two(turns, count - 1)
        )
        self.answer = b""
        if count == 2 or (count == 1 and not first_words):  # noqa: PLR2004
            self.answer = digest(_ANSWER + turns[-1].hash, _ID)
            self.before = digest(_ANSWER + turns[0].hash, _ID) if count > 1 else self.node
        newest = len(turns[-1].hashes) if turns else 0
        self.parents = links[-2 : -2 - _MOST_PARENTS : -1]
        if newest > _MOST_PARENTS:
            self.parents.append(links[-1 - newest])
        elif newest < len(links) - 1 <= _MOST_PARENTS:
            self.parents.pop()  # many conversations share the user's first message
        self.near = min(newest, len(self.parents))

    @property
    def links(self) -> list[bytes]:
        """The links after each message, oldest first; the first is the user's first message."""
        return self._links[: self._count]

    def share(self) -> list[bytes]:
        """The same list, for a place that appends to it; other places do not see that."""
        return self._links if len(self._links) == self._count else self.links

    def identify(self, kind: int) -> bytes:
        """8 bytes that distinguish the request within its conversation; `kind` is below 256."""
        return bytes((kind,)) + self.node[9:]


def _link_last_two(turns: Sequence[Spoken], end: int) -> bytes:
    """The hash of the last two turns before an index; empty if there are fewer."""
    return digest(_SUFFIX + turns[end - 2].hash + turns[end - 1].hash, _ID) if end > 1 else b""


class Transcript:
    """The assistant's turns in a conversation.

    Attributes:
        count: number of messages in it.
        first: index of the user's first message; -1 if there is none.
        depth: number of turns.
        goes_on: the newest message is the assistant's.
        units: as in `Spoken`.
        before: the place of an earlier transcript with the same first turns; None if unknown.
        counted: the calls of the first turns, or of all, for `sessions/history.py`; None if
            unknown.
        places: results of `find_place`, by whether the newest turn is a prefill.
    """

    def __init__(self, earlier: Transcript | None) -> None:
        """Start empty, or with the turns of an earlier transcript."""
        self.count: int = 0 if earlier is None else earlier.count
        self.first: int = -1 if earlier is None else earlier.first
        self._turns: list[Spoken] = [] if earlier is None else earlier.turns
        self.depth = len(self._turns)
        self.units: int = 0 if earlier is None else earlier.units
        self.before: ChainPlace | None = None if earlier is None else earlier.places.get(False)
        self.counted: object = None if earlier is None else earlier.counted
        self.goes_on = False
        self.places: dict[bool, ChainPlace | None] = {}

    @property
    def turns(self) -> list[Spoken]:
        """The assistant's turns, oldest first; consecutive messages are one.

        A transcript that extends this one appends.
        """
        return self._turns if len(self._turns) == self.depth else self._turns[: self.depth]

    def add(self, turns: list[Spoken]) -> None:
        """Append the newest turns."""
        self._turns.extend(turns)
        self.depth = len(self._turns)


def read_transcript(conversation: Conversation) -> Transcript:
    """The assistant's turns in a conversation, read once and without charging the caller.

    Raises:
        NotCounted: a message is unreadable, or there are too many.
    """
    found = conversation.transcript
    INSPECTION.begin()
    if not isinstance(found, (Transcript, NotCounted)):
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
    """The canonical form of a text, or of a call with tool and arguments.

    A result stands for an unknown call.

    Raises:
        NotCounted: it is unreadable.
    """
    if part.kind == CALL:
        return part.name.encode() + _SEPARATOR + write_canonical(read_arguments(part.value))
    if part.kind == RESULT:
        return _SEPARATOR + _SEPARATOR + part.id.encode()
    value = open_value(part.value)
    return (
        cut_thinking(value).strip().encode() if isinstance(value, str) else write_canonical(value)
    )


def digest_tool(name: str) -> bytes:
    """The digest of a tool's name, 4 bytes, as in records."""
    return digest(name.encode("utf-8", "surrogateescape"), TOOL_DIGEST)


def _read(conversation: Conversation) -> Transcript:
    """Read a conversation. The first messages may be cached, but are charged all the same."""
    known, earlier = conversation.known, None
    if known is not None and isinstance(known.transcript, Transcript):
        earlier = known.transcript
        if earlier.count == len(conversation):
            INSPECTION.take(earlier.units)
            return earlier
    made = Transcript(earlier if earlier is not None and not earlier.goes_on else None)
    left = INSPECTION.left
    INSPECTION.take(made.units)
    conversation.check_count()
    groups = _list_groups(conversation, made)
    made.add([_join_turn(conversation, group) for group in groups])
    if earlier is not None and made.first != earlier.first:
        made.before = None
    made.count, made.units = len(conversation), left - INSPECTION.left
    if known is not None and False not in [spoken.small for group in groups for spoken in group]:
        known.transcript = made
    return made


def _list_groups(conversation: Conversation, made: Transcript) -> list[list[Spoken]]:
    """Group new consecutive assistant messages of a transcript; sets `first` and `goes_on`."""
    groups: list[list[Spoken]] = []
    for place in range(made.count, len(conversation)):
        speaker = conversation.find_facts(place).speaker
        if speaker == ASSISTANT:
            if not made.goes_on:
                groups.append([])
            groups[-1].append(_look_at(conversation, place))
            made.goes_on = True
        elif speaker:
            if speaker == USER and made.first < 0:
                made.first = place
            made.goes_on = False
    return groups


def _join_turn(conversation: Conversation, messages: list[Spoken]) -> Spoken:
    """Join consecutive messages. Parallel calls in adjacent messages get one link."""
    if len(messages) > 1 and conversation.shape.joins is not None:
        joined: list[Spoken] = []
        for only_calls, adjacent in groupby(messages, attrgetter("only_calls")):
            made = list(adjacent)
            joined += [_join(made, at_once=True)] if only_calls and len(made) > 1 else made
        messages = joined
    return _join(messages) if len(messages) > 1 else messages[0]


def _join(messages: list[Spoken], *, at_once: bool = False) -> Spoken:
    """Join consecutive messages; `at_once`: parallel calls, which have one link."""
    calls = [call for message in messages for call in message.calls]
    hashes = [message.hash for message in messages]
    return Spoken([digest(b"".join(hashes), _ID)] if at_once else hashes, calls, only_calls=at_once)


def _look_at(conversation: Conversation, place: int) -> Spoken:
    """Read the message at an index. A small result is cached with the message's facts."""
    facts = conversation.find_facts(place)
    kept = facts.spoken
    if isinstance(kept, Spoken):
        INSPECTION.take(kept.units)
        return kept
    left = INSPECTION.left
    walk(1)
    spoken = _show(conversation.read_once(place), left)
    if spoken.small:
        facts.spoken = spoken
    return spoken


def _show(parts: list[Part], left: int) -> Spoken:
    """The content of a message; `left` is the number of units before it was read."""
    spelled: list[bytes] = []
    calls: list[CallFacts] = []
    for part in parts:
        if part.kind in (TEXT, REFERENCE):
            spelled.append(spell(part))
        elif part.kind == CALL:
            call = spell(part)
            spelled.append(call)
            calls.append(CallFacts(part, call))
    hashed = digest(_SEPARATOR.join([part for part in spelled if part]), _ID)
    only_calls = TEXT not in [part.kind for part in parts] and bool(spelled)
    sums_up = any(part.startswith(SUMMARIES) for part in spelled)
    units = left - INSPECTION.left
    return Spoken([hashed], calls, units, only_calls=only_calls, sums_up=sums_up)


def find_place(conversation: Conversation, *, prefilled: bool) -> ChainPlace | None:
    """A request's place; None if its conversation is unreadable or too long.

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


def begins_with_summary(conversation: Conversation) -> bool:
    """Whether a summary of older messages precedes the assistant's first message."""
    found = False
    with suppress(NotCounted):
        for place in range(len(conversation)):
            speaker = conversation.find_facts(place).speaker
            if found or speaker == ASSISTANT:
                break
            found = speaker == USER and _look_at(conversation, place).sums_up
    INSPECTION.begin()
    return found


def find_place_of_steps(
    conversation: Conversation, messages: Sequence[Message]
) -> ChainPlace | None:
    """The place of a scratchpad, given its messages, newest first; see `scratchpad.py`.

    Its steps are the turns, and the text before them belongs to the user's first message.
    """
    *steps, before = messages
    place = None
    with suppress(NotCounted):
        first = read_transcript(conversation).first
        opening = _look_at(conversation, first).hash if 0 <= first != before.place else b""
        begun = digest(opening + _show(before.read_parts(), 0).hash, _ID)
        said = [step.read_parts() for step in reversed(steps) if step.speaker == ASSISTANT]
        place = ChainPlace(begun, [_show(parts, 0) for parts in said[-_MOST_SHOWN:]])
    INSPECTION.begin()
    return place


def read_place(document: Document) -> ChainPlace | None:
    """Like `find_place`, for a body; None without a conversation, or if it is on the server."""
    try:
        conversation = open_conversation(document)
        return (
            None
            if conversation.elsewhere
            else find_place(conversation, prefilled=conversation.is_prefilled())
        )
    except NotCounted:
        return None
