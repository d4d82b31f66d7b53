"""A conversation of any API: who says what, and whether the server stores earlier messages.

One pass over a body splits it into messages without decoding their contents. A message is decoded
when it is read, and most messages of a long history never are. Each API's file describes the shape
of its conversations.

Facts about a message are computed once; see `MessageFacts`. A client sends its history with each
request, longer by one turn, so the newest body of each conversation is cached with the facts of its
messages. The cache's key is everything before the first assistant message. The messages after it
are compared byte by byte; from the first difference on, the body is decoded. Messages after a
difference are looked up by their bytes, at any place. The bytes after the newest message, often a
long list of tools, are compared with those of the earlier body. Cached values depend only on equal
bytes, so it does not matter which client sent them, and each reader is charged the units that the
same bytes took at first.

For edits, `locate` finds the same parts by their offsets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from operator import attrgetter
from typing import Any, Final, NamedTuple

from msgspec import MsgspecError, Raw, Struct, ValidationError, defstruct, json
from msgspec.structs import fields
from zlib_ng.zlib_ng import crc32

from extproc.apis.messages import TEXT, Part
from extproc.apis.places import Place
from extproc.bounded import Memo
from extproc.memory import read_memory
from extproc.request.document import (
    ABSENT,
    INSPECTION,
    MAX_STEPS,
    WORTH_COUNTING,
    Document,
    Json,
    NotCounted,
    decode_json,
    open_value,
    walk,
    write_canonical,
)
from extproc.request.notes import hash_words
from extproc.request.patch import AMBIGUOUS, Around, Patch, Value

ASSISTANT: Final = "assistant"
USER: Final = "user"
TOOL: Final = "tool"
OTHER_ROLE: Final = "other"
"""Speakers of a message; any other value was sent by the client."""

_MAX_OLDEST: Final = 100
"""Number of messages, from the start, in which to look for the user's first words."""

TOOLS: Final = "tools"
NO_TOOLS: Final = "no tools"
"""Whether a request offers tools."""

TOOL_KEYS: Final = ("tools", "functions", "toolConfig")
_KEPT_TOOLS: Final = ("cachedContent", "cached_content")
"""Keys that refer to something on the server that may include tools."""

_FORCES: Final = {
    "tool_choice": re.compile(rb'(?!.*"(?:auto|none)")["{]', re.DOTALL),
    "toolConfig": re.compile(
        rb'.*(?:"toolChoice"\s*:\s*\{\s*"(?:any|tool)"|"mode"\s*:\s*"ANY")', re.DOTALL
    ),
    **dict.fromkeys(
        ("response_format", "text", "output_config", "output_format"),
        re.compile(rb'.*"json_schema"', re.DOTALL),
    ),
}
"""Keys that may force a tool or a schema, and how their values begin if they do."""

_get_forcing: Final = attrgetter(*_FORCES)
_get_tools: Final = attrgetter(*TOOL_KEYS)
_get_kept_tools: Final = attrgetter(*_KEPT_TOOLS)

_NAMING_KEYS: Final = ("conversation", "metadata", "prompt_cache_key")
"""Where bodies name a session; see `session_limits`."""

_LONGEST_NOTHING: Final = 8
MAX_OPTION: Final = 10_000_000
"""Maximum of a number of tokens or answers; sums stay exact."""

_MOST_DIGITS: Final = 400
_split: Final = json.Decoder(list[Raw]).decode
_LONGEST_OPTIONS: Final = 4_096
"""Maximum length of an object with options to read, in bytes."""

ASSISTANTS: Final = frozenset({ASSISTANT, "model", "ai"})
_LABELS: Final = frozenset({"role", "type", "id", "name", "status"})

_MOST_BYTES: Final = read_memory().messages * 3 // 8
_MOST_FACTS: Final = read_memory().messages // 8
"""Maximum size in bytes of one generation of the caches of conversations and of messages."""

_MESSAGE_BYTES: Final = 1_200
"""Average memory of a message's facts. Nearly all of it is for assistant messages, with two calls
and their results."""

_LONGEST_KEY: Final = 512
"""Longer messages, in bytes, are looked up by a keyed hash, so that clients cannot construct
collisions."""

_OPENS: Final = b"{"
_decode_raws: Final = json.Decoder(list[Raw]).decode
_END: Final = re.compile(rb"[ \t\r\n]*\]")

_NEW: Final = f"new messages {os.urandom(16).hex()}"
"""A key for the messages to decode. It is random, so no body contains it."""

_KEY: Final = os.urandom(64)
"""The key of the hashes of messages."""


class Before(NamedTuple):
    """The part of the conversation that a body does not contain as messages.

    Attributes:
        after: canonical reference to what the request continues (a response, message or
            conversation); may be empty.
        open_ended: the server appends to a conversation whose end only the server knows.
        in_words: earlier turns, if any, are in the text of the messages.
    """

    after: bytes = b""
    open_ended: bool = False
    in_words: bool = False


NOTHING_BEFORE: Final = Before()
"""For a body that contains its whole history."""


_OBJECTS: Final = (Struct, dict)


def know_nothing(_: Json) -> Before:
    """`look_back` of an API whose requests contain their whole history."""
    return NOTHING_BEFORE


def name_by_role(message: Any) -> str:  # noqa: ANN401  # a struct with a role
    """`name_speaker` of an API in which the role identifies the speaker."""
    role: str | None = message.role
    return ASSISTANT if role in ASSISTANTS else role or OTHER_ROLE


def take_list(value: Json) -> Sequence[Json]:
    """The messages of a list; empty for any other value, and for a list of texts or numbers."""
    if not isinstance(value, list) or not value:
        return ()
    return value if isinstance(value[0], _OBJECTS) or dict in set(map(type, value)) else ()


class Shape:
    """The format of conversations in one API; immutable.

    Attributes:
        path: keys that lead to the messages.
        body: a struct of the relevant keys of a body; all except the first on the path are `Raw`.
        message: a struct of the relevant keys of a message; each needs a default.
        decode: decodes a message.
        name_speaker: returns a message's speaker: ASSISTANT, USER, TOOL or another; empty for a
            thought, which is skipped.
        read: returns the parts of a message, in order; raises NotCounted if it is unreadable or too
            large.
        find_raw: returns the raw value with a message's text and calls; ABSENT if these are in
            several places.
        take: returns the messages in the value at the end of the path; None if that is a list.
        joins: returns whether a message is a call that forms one message with adjacent parallel
            calls; None if each message is separate.
        look_back: returns what a body tells about earlier messages; None if every request contains
            its whole history.
        refers: returns whether an assistant message only refers to one on the server; None if none
            does.
        marks_prefill: returns whether a body marks the assistant message at its end as the start of
            the answer; None if no body does.
        locate: returns places for a note in a message of an edited body; None if there are none.
        mark: bytes, outside of texts, in each body with an assistant message; empty turns off
            caching.
        fallback: other APIs use the key for something else, so those are tried first.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        path: tuple[str, ...],
        body: type[Struct],
        message: type[Struct],
        name_speaker: Callable[[Any], str],
        read: Callable[[Any], list[Part]],
        find_raw: Callable[[Any], Raw],
        take: Callable[[Any], Sequence[Json]] | None = None,
        joins: Callable[[Any], bool] | None = None,
        look_back: Callable[[Any], Before] | None = None,
        locate: Callable[[Patch, Any, Value], list[Place]] | None = None,
        *,
        refers: Callable[[Any], bool] | None = None,
        marks_prefill: Callable[[Any, Any], bool] | None = None,
        mark: bytes = b"",
        fallback: bool = False,
    ) -> None:
        self.path = path
        self.body = body
        self.message = message
        self.decode = json.Decoder(message).decode
        self.name_speaker = name_speaker
        self.read = read
        self.find_raw = find_raw
        self.take = take or take_list
        self.joins = joins
        self.look_back = look_back or know_nothing
        self.locate = locate
        self.refers = refers
        self.marks_prefill = marks_prefill
        self.mark = mark
        self.fallback = fallback
        self._name = ".".join(path).encode() + b":"
        self._start = sha256(_KEY + self._name).copy  # takes half the time of BLAKE2

    def make_facts(self, value: Any) -> MessageFacts:  # noqa: ANN401  # a struct of this shape
        """The facts of a message: at first, only those that divide a conversation into turns."""
        speaker = self.name_speaker(value)
        if speaker != ASSISTANT:
            return MessageFacts(speaker)
        joins, refers = self.joins, self.refers
        return MessageFacts(
            speaker, joins is not None and joins(value), refers is not None and refers(value)
        )

    def find_facts(self, raw: Raw) -> MessageFacts:
        """The facts of a message by its bytes; they may be cached.

        Raises:
            ValueError: it is not an object, or has other types than expected.
        """
        if len(raw) <= _LONGEST_KEY:
            key = self._name + bytes(raw)
        else:
            hashed = self._start()
            hashed.update(raw)
            key = hashed.digest()
        found = _FACTS.get(key)
        if found is None:
            found = self.make_facts(self.decode(raw))
            _FACTS.put(key, found)
        return found


class MessageFacts:
    """Facts about one message, computed lazily and then immutable.

    They depend only on the message's bytes and its API. Readers that depend on more (ignored
    arguments, adjacent messages) store that with their result.

    Attributes:
        speaker: the speaker; empty for a thought.
        joins: see `Shape`.
        refers: see `Shape`.
        spoken: the result of `chain.py`; None if unknown.
        action: the action that `turn.py` reads; None if unknown.
        result: what `turn.py` reads in the messages after it; None if unknown.
    """

    def __init__(self, speaker: str, joins: bool = False, refers: bool = False) -> None:  # noqa: FBT001, FBT002  # a record
        self.speaker = speaker
        self.joins = joins
        self.refers = refers
        self.spoken: object = None
        self.action: object = None
        self.result: object = None


class Beside:
    """The content of a body beside its messages.

    Attributes:
        body: a struct of all shapes' keys.
        behind: the bytes from the end of the newest message on.
        size: length of these bytes plus all raw values.
        hints: a tool may have a read-only hint.
        declares: some tools, and whether one of them may be declared; None if unknown.
        around: the layout around the messages, for edits; None if unknown.
    """

    def __init__(self, body: Any, behind: bytes) -> None:  # noqa: ANN401  # made at run time
        """Copies raw fields so that the body can be freed."""
        self.body = body
        self.behind = behind
        self.size = len(behind)
        self.hints = True
        self.declares: tuple[frozenset[str], bool] | None = None
        self.around: Around | None = None
        for name in body.__struct_fields__:
            value = getattr(body, name)
            if type(value) is Raw and value is not ABSENT:
                setattr(body, name, value.copy())
                self.size += len(value)


class Group:
    """A turn: an assistant message or parallel calls, and the messages after it; immutable.

    Attributes:
        start: index of the first assistant message; -1 if the server stores it, and for messages in
            a text.
        place: index of the last one.
        end: index after the last message.
        answered: other messages follow; otherwise no request ended here.
        facts: those of the first message; None if it has no index.
    """

    def __init__(
        self, start: int, place: int, end: int, facts: MessageFacts | None, *, answered: bool
    ) -> None:
        self.start = start
        self.place = place
        self.end = end
        self.facts = facts
        self.answered = answered


class KnownBody:
    """The newest body of a conversation; immutable.

    A body that continues it shares its lists, and appends to them.

    Attributes:
        data: the body.
        head: everything before the first assistant message.
        count: number of messages; the lists may be longer.
        starts: offset of each message in the body.
        ends: offset after each message.
        facts: facts of each message.
        groups: the turns, oldest first, without the newest, which a longer body may continue.
        grouped: number of these turns.
        newest: the newest turn; None if there is none.
        said: the hash of the user's first words, if the head contains them; empty if unknown.
        transcript: what `chain.py` has read in the first messages, or in all; None if unknown.
        beside: the content of the body beside its messages.
    """

    def __init__(self, data: bytes, head: bytes, earlier: KnownBody | None, count: int) -> None:
        """Start with the first `count` messages of an earlier body with the same head."""
        self.data = data
        self.head = head
        self.count = count
        self.beside: Beside | None = None
        self.transcript: object = None
        self.said = b""
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.facts: list[MessageFacts] = []
        self.groups: list[Group] = []
        self.grouped = 0
        self.newest: Group | None = None
        if earlier is None:
            return
        self.head = earlier.head
        self.said = earlier.said
        if count == earlier.count == len(earlier.facts):
            self.starts, self.ends, self.facts = earlier.starts, earlier.ends, earlier.facts
            self.groups, self.grouped, self.newest = earlier.groups, earlier.grouped, earlier.newest
        else:
            self.starts = earlier.starts[:count]
            self.ends = earlier.ends[:count]
            self.facts = earlier.facts[:count]
            self._group(0)

    def _group(self, first: int) -> None:
        """Divide the messages from an index on into turns."""
        start, place, answered, newest = -1, -1, False, self.newest
        if newest is not None:
            start, place, answered = newest.start, newest.place, newest.answered
        for at in range(first, self.count):
            facts = self.facts[at]
            if facts.speaker != ASSISTANT:
                answered = answered or bool(facts.speaker)
            elif place >= 0 and facts.joins and not answered and self.facts[place].joins:
                place = at
            else:
                if place >= 0:
                    self.groups.append(
                        Group(start, place, at, self.facts[start], answered=answered)
                    )
                    self.grouped += 1
                start, place, answered = at, at, False
        if place >= 0:
            self.newest = Group(start, place, self.count, self.facts[start], answered=answered)

    def find_group(self, number: int) -> Group | None:
        """A turn, 0 being the newest; None if there are fewer."""
        if number == 0:
            return self.newest
        return self.groups[self.grouped - number] if number <= self.grouped else None

    def count_equal(self, data: bytes) -> int:
        """The number of leading messages that equal those of another body with this head."""
        own, count = self.data, self.count
        # The usual case: the conversation has grown
        if data.startswith(own[: self.ends[count - 1]]):
            return count
        low, start = 0, len(self.head)
        while low < count:  # invariant: equal up to `start`, which ends message `low` - 1
            middle = (low + count) // 2
            end = self.ends[middle]
            if end > start and data[start:end] != own[start:end]:
                count = middle
            else:
                low, start = middle + 1, max(start, end)
        return low

    def add(  # noqa: PLR0913  # the messages and their cache
        self,
        data: bytes,
        at: int,
        raws: list[Raw],
        shape: Shape,
        earlier: KnownBody | None,
        *,
        is_new: bool,
    ) -> dict[int, Any]:
        """Append messages of the body.

        Hashing a message takes as long as decoding it, so messages are only looked up if some may
        be cached.

        Args:
            data: the body.
            at: offset after the previous message, with only blanks and commas before the next.
            raws: the messages.
            shape: their shape.
            earlier: an earlier body with other messages here, so these are looked up; None if there
                is none.
            is_new: no body with this head is cached. If the first assistant message is, others are
                looked up, too.

        Returns:
            the messages as structs of the shape, by index, except those whose facts were looked up.

        Raises:
            ValueError: a message is not an object, or has other types than expected.
        """
        first, opened, looks = len(self.head), dict[int, Any](), earlier is not None
        for place, raw in enumerate(raws, self.count):
            start = data.find(_OPENS, at)
            end = start + len(raw)
            if earlier is not None and earlier.has(place, raw):
                facts = earlier.facts[place]
            elif looks:
                facts = shape.find_facts(raw)
            elif is_new and end > first:
                facts, is_new = shape.find_facts(raw), False
                looks = facts.action is not None or facts.spoken is not None
            else:
                value = opened[place] = shape.decode(raw)
                facts = shape.make_facts(value)
            self.starts.append(start)
            self.ends.append(end)
            self.facts.append(facts)
            at = end
        known, self.count = self.count, len(self.facts)
        self._group(known)
        return opened

    def has(self, place: int, raw: Raw) -> bool:
        """Whether the message at a place has these bytes."""
        if place >= self.count or self.ends[place] - self.starts[place] != len(raw):
            return False
        return self.data.startswith(raw, self.starts[place])

    def keeps_spoken(self, earlier: KnownBody, count: int) -> bool:
        """Whether all messages of an earlier body are here; results and later words may differ.

        `count`: number of leading messages that are known to be equal.
        """
        if self.count < earlier.count:
            return False
        for place in range(count, earlier.count):
            facts, speaker = self.facts[place], self.facts[place].speaker
            if facts is not earlier.facts[place]:
                first = speaker == USER and USER not in [
                    before.speaker for before in self.facts[:place]
                ]
                if first or speaker == ASSISTANT or speaker != earlier.facts[place].speaker:
                    return False
        return True


def _measure(_: int, known: KnownBody) -> int:
    beside = known.beside.size if known.beside is not None else 0
    return len(known.head) + len(known.data) + beside + _MESSAGE_BYTES * known.count


_BODIES: Final[Memo[int, KnownBody]] = Memo(_MOST_BYTES, _measure)
"""The cache of conversations, by length and CRC32 of everything before the first assistant message.
A client that can forge another's CRC32 gains nothing: it could send the same bytes and replace the
entry anyway. Without the cache, the benchmark's row "agents that grow, turns vs. decoding" gets 70
% worse."""

_FACTS: Final[Memo[bytes, MessageFacts]] = Memo(
    _MOST_FACTS, lambda key, _: len(key) + _MESSAGE_BYTES
)
"""The cache of messages, by API and bytes, for clients that change their history: its head or older
messages. With neither of the two caches, that row takes 2.5 times as long as with this one."""


class Message:
    """One message, read lazily.

    Attributes:
        shape: see `Shape`.
        speaker: the speaker.
        place: index among the messages.
        joined: earlier calls that were made in parallel with it, newest first.
        units: units for reading its parts, see `Inspection`; 0 if they have not been read.
    """

    def __init__(
        self,
        shape: Shape,
        speaker: str,
        place: int,
        conversation: Conversation | None,
        parts: list[Part] | None = None,
    ) -> None:
        """A message of a conversation, or the `parts` of one that are a message of their own."""
        self.shape = shape
        self.speaker = speaker
        self.place = place
        self.joined: list[Message] | None = None
        self._conversation = conversation
        self._parts = parts
        self.units = 0

    @property
    def value(self) -> Any:  # noqa: ANN401  # of the shape's
        """The message as a struct of the shape; empty for a part of another message."""
        return (
            self.shape.message()
            if self._conversation is None
            else self._conversation.open_message(self.place)
        )

    def divide(self, said: Sequence[tuple[str, str]]) -> list[Message]:
        """Create messages from parts of its text, given as speakers and texts."""
        return [
            Message(self.shape, speaker, self.place, None, [Part(TEXT, text)])
            for speaker, text in said
        ]

    def join(self, older: Message) -> None:
        """Add the preceding call, which was made in parallel."""
        if self.joined is None:
            self.joined = []
        self.joined.append(older)

    def read_parts(self) -> list[Part]:
        """The message's parts, in order.

        Raises:
            NotCounted: it is unreadable or too large.
        """
        parts = self._parts
        if parts is None:
            left = INSPECTION.left
            walk(1)
            conversation = self._conversation
            parts = (
                self.shape.read(self.value)
                if conversation is None
                else conversation.read_parts(self.place)
            )
            if self.joined is not None:
                parts = [
                    part for message in self.joined[::-1] for part in message.read_parts()
                ] + parts
            self._parts = parts
            self.units = left - INSPECTION.left
        return parts

    def take_parts(self) -> list[Part]:
        """Like `read_parts`, but charges the units even if the parts have been read."""
        if self._parts is not None:
            INSPECTION.take(self.units)
        return self.read_parts()

    def list_values(self) -> list[Any]:
        """The values of the message and of parallel calls."""
        return [*[message.value for message in (self.joined or [])[::-1]], self.value]

    def find_whole(self, document: Document) -> Json:
        """The whole message; ABSENT if it has no content.

        Args:
            document: the document that contains it. It refers to the conversation, which must
                therefore not refer to it.

        Raises:
            NotCounted: the body is not JSON, or too large.
        """
        value = document.value()
        for step in self.shape.path:
            value = value[step]
        whole = value[self.place]
        return ABSENT if isinstance(whole, dict) and _says_nothing(whole) else whole


class Conversation:
    """The messages of one request.

    Attributes:
        shape: the format of the messages.
        body: a struct of the keys of all shapes.
        model: the model's name; empty if the request names none.
        before: the part of the conversation that is not in the messages.
        known: these messages in the cache; None if they are not cached.
        transcript: the result of `read_transcript`, or its exception.
        prefilled: the newest message is the start of the answer, and therefore not a turn.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        shape: Shape,
        body: Any,  # noqa: ANN401  # all keys
        messages: Sequence[Any],
        opened: dict[int, Any],
        known: KnownBody | None = None,
        data: bytes = b"",
    ) -> None:
        """`messages` are structs of the shape by index, or values if the whole body was decoded."""
        self.body = body
        self._data = data
        self._first_words: str | None = None
        self._read: dict[int, tuple[list[Part], int]] = {}
        self.known = known
        self.transcript: object = None
        self.prefilled = False
        self.shape = shape
        self.model: str = body.model or ""
        self.before: Before = shape.look_back(body)
        self._messages = messages
        self._opened = opened
        self._count = known.count if known is not None else len(messages)
        self._facts: list[MessageFacts | None] = []
        self._groups: list[Group] = []

    @property
    def elsewhere(self) -> bool:
        """Whether earlier turns are on the server or within a plain prompt, not in messages."""
        return bool(self.before.after) or self.before.in_words

    @property
    def shows_lists(self) -> bool:
        """Whether the keys that are read include all tool lists."""
        return len(self.shape.path) == 1

    def find_offer(self) -> str:
        """`TOOLS` or `NO_TOOLS`, whichever the request offers; empty if unknown."""
        if not self.shows_lists:
            return ""
        if _holds_any(_get_tools(self.body)):
            return TOOLS
        # A server that stores the history may store the tools
        if self.before.after or _holds_any(_get_kept_tools(self.body)):
            return ""
        return NO_TOOLS

    def forces_form(self) -> bool:
        """Whether the client forces a tool or a schema, and so cannot read another answer."""
        for value, forces in zip(_get_forcing(self.body), _FORCES.values(), strict=True):
            if type(value) is Raw and len(value) and forces.match(bytes(value)) is not None:
                return True
        return False

    def find_field(self, key: str) -> Raw | None:
        """The raw value of a body's key; ABSENT if missing, None for a key that is skipped."""
        found = getattr(self.body, key, None)
        return found if type(found) is Raw else None

    def __len__(self) -> int:
        """The number of messages, including thoughts."""
        return self._count

    def read_first_words(self) -> str:
        """The user's first words; empty if none of the first messages is a user's text.

        Raises:
            NotCounted: one of them is unreadable.
        """
        if self._first_words is None:
            self._first_words = self._find_first_words()[0]
        return self._first_words

    def hash_first_words(self) -> bytes:
        """Their hash, for the marks of notes; raises as `read_first_words` does."""
        known = self.known
        if known is not None and known.said:
            return known.said
        words, place = self._find_first_words()
        said = hash_words(words)
        if known is not None and words and known.ends[place] <= len(known.head):
            known.said = said
        return said

    def _find_first_words(self) -> tuple[str, int]:
        """The user's first words, and their message's place.

        They may be cached, so the caller is not charged.
        """
        left = INSPECTION.left
        INSPECTION.begin()
        try:
            for place in range(min(self._count, _MAX_OLDEST)):
                if self.find_facts(place).speaker == USER:
                    read = self.shape.read(self.open_message(place))
                    texts = [open_value(part.value) for part in read if part.kind == TEXT]
                    words = "".join([text for text in texts if isinstance(text, str)])
                    if words:
                        return words, place
        finally:
            INSPECTION.left = left
        return "", 0

    def list_spoken(self) -> list[tuple[str, Any]]:
        """Speakers and messages as structs, oldest first, without thoughts.

        Parallel calls stay separate.

        Raises:
            NotCounted: there are too many messages.
        """
        return [
            (speaker, self.open_message(place))
            for place, speaker in enumerate(self.list_speakers())
            if speaker
        ]

    def list_speakers(self) -> list[str]:
        """The speaker of each message, oldest first; empty for a thought.

        Raises:
            NotCounted: there are too many messages.
        """
        self.check_count()
        return [self.find_facts(place).speaker for place in range(self._count)]

    def find_facts(self, place: int) -> MessageFacts:
        """The facts of the message at a place."""
        if self.known is not None:
            return self.known.facts[place]
        if not self._facts:
            self._facts = [None] * self._count
        found = self._facts[place]
        if found is None:
            found = self._facts[place] = self.shape.make_facts(self.open_message(place))
        return found

    def list_facts(self, start: int, end: int) -> list[MessageFacts]:
        """The facts of messages from one place up to another."""
        return (
            self.known.facts[start:end]
            if self.known is not None
            else [self.find_facts(at) for at in range(start, end)]
        )

    def is_prefilled(self) -> bool:
        """Whether the newest message is the assistant's, so that the model must continue it.

        Raises:
            NotCounted: that message is unreadable.
        """
        for place in range(self._count - 1, -1, -1):
            speaker = self.find_facts(place).speaker
            if speaker:
                return speaker == ASSISTANT
        return False

    def marks_prefill(self) -> bool:
        """Whether the body marks the newest message as the start of the answer."""
        marks = self.shape.marks_prefill
        return marks is not None and marks(self.body, self.open_message(self._count - 1))

    def read_backwards(self) -> Iterator[Message]:
        """The messages without thoughts, newest first; parallel calls are one message.

        Raises:
            NotCounted: there are too many.
        """
        calls: Message | None = None
        for place in range(len(self) - 1, max(len(self) - 1 - MAX_STEPS, -1), -1):
            facts = self.find_facts(place)
            if not facts.speaker:
                continue
            message = Message(self.shape, facts.speaker, place, self)
            if calls is not None:
                if facts.joins:
                    calls.join(message)
                    continue
                yield calls
            calls = message if facts.joins else None
            if calls is None:
                yield message
        if calls is not None:
            yield calls
        self.check_count()

    def find_group(self, number: int) -> Group | None:
        """A turn by number, newest first; None if it is not in the newest MAX_STEPS messages."""
        known, groups = self.known, self._groups
        if known is not None and self._count <= MAX_STEPS:
            return known.find_group(number)
        while len(groups) <= number:
            end = groups[-1].start if groups else self._count
            place, oldest, answered = end - 1, max(self._count - MAX_STEPS, 0), False
            while place >= oldest and (speaker := self.find_facts(place).speaker) != ASSISTANT:
                answered = answered or bool(speaker)
                place -= 1
            if place < oldest:
                return None
            start, older = place, place - 1
            while older >= 0 and self.find_facts(place).joins:
                before = self.find_facts(older)
                if before.joins:
                    start = older
                elif before.speaker:
                    break
                older -= 1
            groups.append(Group(start, place, end, self.find_facts(start), answered=answered))
        return groups[number]

    def open_newest(self) -> Message | None:
        """The newest message that is not a prefill; parallel calls are one message.

        None if there is none.

        Raises:
            NotCounted: there are too many.
        """
        number, end = 0, self._count
        if self.prefilled and (prefill := self.find_group(0)) is not None:
            number, end = 1, prefill.start
        for place in range(end - 1, max(end - 1 - MAX_STEPS, -1), -1):
            speaker = self.find_facts(place).speaker
            if speaker:
                group = self.find_group(number) if speaker == ASSISTANT else None
                return self.open_group(group.start if group is not None else place, place)
        self.check_count()
        return None

    def open_group(self, start: int, place: int) -> Message:
        """The message at a place, joined with parallel calls from `start` on."""
        message = Message(self.shape, self.find_facts(place).speaker, place, self)
        for older in range(place - 1, start - 1, -1):
            if self.find_facts(older).joins:
                message.join(Message(self.shape, ASSISTANT, older, self))
        return message

    def read_once(self, place: int) -> list[Part]:
        """Like `read_parts`, for a reader that caches its own result: the parts are not stored."""
        return (
            self.read_parts(place)
            if place in self._read
            else self.shape.read(self.open_message(place))
        )

    def read_parts(self, place: int) -> list[Part]:
        """The parts of the message at a place. They are read once, but charged each time.

        Raises:
            NotCounted: it is unreadable or too large.
        """
        found = self._read.get(place)
        if found is not None:
            INSPECTION.take(found[1])
            return found[0]
        left = INSPECTION.left
        parts = self.shape.read(self.open_message(place))
        self._read[place] = parts, left - INSPECTION.left
        return parts

    def check_count(self) -> None:
        """Raise NotCounted if there are too many messages."""
        if self._count > MAX_STEPS:
            raise NotCounted("inspect_limit")

    def open_message(self, place: int) -> Any:  # noqa: ANN401  # of the shape's
        """A message as a struct of the shape; empty if its values have unexpected types."""
        value = self._opened.get(place)
        if value is not None:
            return value
        known = self.known
        if known is not None:
            value = decode_json(
                self._data[known.starts[place] : known.ends[place]], self.shape.decode
            )
        else:
            value = self._messages[place]
            if type(value) is not self.shape.message:
                try:
                    value = decode_json(write_canonical(value), self.shape.decode)
                except ValidationError:
                    value = self.shape.message()
        self._opened[place] = value
        return value


class Options(NamedTuple):
    """A request's options for its answer.

    Attributes:
        longest: maximum number of tokens; 0 if it sets none.
        copies: number of answers.
        model: the model; may be empty.
    """

    longest: int
    copies: int
    model: str


class Shapes:
    """The shapes of all APIs; one pass over a body looks for all of them."""

    def __init__(
        self, shapes: Sequence[Shape], longest_answers: Sequence[str], copies: Sequence[str]
    ) -> None:
        """Order the shapes: fallbacks are tried last.

        Args:
            shapes: the shapes of all APIs.
            longest_answers: see `Api`.
            copies: see `Api`.
        """
        self.shapes = sorted(shapes, key=lambda shape: shape.fallback)
        self._longest_answers = [(place, place.split(".")) for place in longest_answers]
        self._copies = [place.split(".") for place in copies]
        options = [keys[0] for _, keys in self._longest_answers] + [
            keys[0] for keys in self._copies
        ]
        self._body: Any = _make_body(self.shapes, options)
        self._decode = json.Decoder(self._body).decode
        self._raw_keys = [field.name for field in fields(self._body) if field.type is Raw]
        self._known = [_KnownShape(shape, self._body) for shape in self.shapes if shape.mark]

    def open_conversation(self, document: Document) -> Conversation:
        """The conversation in a body, in the first shape that matches; shared by all callers.

        Raises:
            NotCounted: there is none, or it is unreadable.
        """
        found: Conversation | NotCounted | None = document.conversation
        if found is None:
            try:
                found = self._open(document)
                found.prefilled = found.is_prefilled() and (
                    document.prefills or found.marks_prefill()
                )
            except NotCounted as failure:
                found = failure.renew()
            document.conversation = found
        INSPECTION.begin()  # afterwards, or the first reader would be charged for all
        if isinstance(found, NotCounted):
            raise found.renew()
        return found

    def hash_first_words(self, document: Document) -> bytes:
        """The hash of the user's first words, for the marks of notes; see `hash_words`.

        If it is cached, the conversation is not opened, because with notes in it nothing else reads
        it. So a body that is ambiguous after the first assistant message may get the hash of the
        conversation that begins like it.

        Raises:
            NotCounted: there is no conversation, or it is unreadable.
        """
        if document.conversation is None:
            data = document.data()
            for known in self._known:
                said = known.recall_first_words(data)
                if said:
                    return said
        return self.open_conversation(document).hash_first_words()

    def find_longest_answer(self, conversation: Conversation) -> int:
        """The largest number of tokens that a request allows for an answer; 0 if it sets none."""
        longest = 0
        for _, keys in self._longest_answers:
            longest = max(longest, _read_number(conversation.body, keys, lenient=False))
        return longest

    def read_options(self, document: Document, places: frozenset[str]) -> Options:
        """A request's options for its answer, even if it contains no conversation.

        Args:
            document: its body.
            places: where to read the length of an answer; empty for all known places.

        Raises:
            NotCounted: it is unreadable.
        """
        try:
            conversation = self.open_conversation(document)
            body, model = conversation.body, conversation.model
        except NotCounted:
            try:
                body = decode_json(document.data(), self._decode)
            except ValidationError:
                body = self._fill_body(document.value())
            model = body.model or ""
        longest = [
            _read_number(body, keys)
            for place, keys in self._longest_answers
            if not places or place in places
        ]
        return Options(max(longest), self._count_copies(body), model)

    def count_copies(self, conversation: Conversation) -> int:
        """The number of answers that a request asks for."""
        return self._count_copies(conversation.body)

    def _count_copies(self, body: Any) -> int:  # noqa: ANN401  # a struct that is made at run time
        copies = prompts = 1
        for keys in self._copies:
            copies = max(copies, _read_number(body, keys))
            prompts = max(prompts, _count_items(getattr(body, keys[0])) if len(keys) == 1 else 1)
        return copies * prompts

    def _open(self, document: Document) -> Conversation:
        data = document.data()
        if not data:
            raise NotCounted("no_messages")
        if len(data) <= WORTH_COUNTING and not document.shortened:
            for known in self._known:
                opens = known.find_list(data)
                if opens is None:
                    continue
                found = known.open_conversation(data, opens)
                if found is not None:
                    return found
                break  # hardly any body has lists of two shapes
        try:
            body = value = decode_json(data, self._decode)
        except ValidationError:
            value = document.value()
            body = self._fill_body(value)
        for shape in self.shapes:
            path = shape.path
            messages = shape.take(
                getattr(body, path[0]) if value is body and len(path) == 1 else _follow(value, path)
            )
            if messages:
                return Conversation(shape, body, messages, {})
        raise NotCounted("no_messages")

    def _fill_body(self, value: Json) -> Json:
        """Add the other keys of a body that was decoded as a whole, as a type is unexpected."""
        given = value if isinstance(value, dict) else {}
        model = given.get("model")
        if isinstance(model, dict | list):
            model = None  # not a name, and possibly slow to write
        named = (
            model if model is None or isinstance(model, str) else write_canonical(model).decode()
        )
        raw = {key: Raw(write_canonical(given[key])) for key in self._raw_keys if key in given}
        return self._body(model=named, **raw)


class _KnownShape:
    """Opens bodies of one shape whose older messages may be cached."""

    def __init__(self, shape: Shape, body: type[Struct]) -> None:
        key = shape.path[0]
        self._shape = shape
        self._key = f'"{key}"'.encode()
        self._opens = re.compile(rf'"{key}"[ \t\r\n]*:[ \t\r\n]*\[[ \t\r\n]*'.encode())
        names = [field.name for field in fields(body) if field.name != "model"]
        keys = [
            ("model", str | None, None),
            *[(name, Raw, ABSENT) for name in names],
            ("new", list[Raw] | None, None),
        ]
        self._decode: Any = json.Decoder(
            defstruct("KnownBody", keys, gc=False, rename={"new": _NEW})
        ).decode
        self._get_typed = attrgetter(
            *[field.name for field in fields(body) if field.name in names and field.type is not Raw]
        )
        self._name = f'"{_NEW}":['.encode()

    def find_list(self, data: bytes) -> re.Match[bytes] | None:
        """Where a body's list of messages may begin: its key, the bracket, and blanks after it.

        None if there is none.
        """
        key = data.find(self._key)
        return self._opens.match(data, key) if key >= 0 else None

    def open_conversation(self, data: bytes, opens: re.Match[bytes]) -> Conversation | None:
        """The conversation in a body; None if it is unusual, or has no assistant message."""
        shape, end = self._shape, opens.end()
        first = data.find(shape.mark, end)
        if first < 0:
            return None
        head = data[:first]
        name, known = self._find_known(head)
        count, beside = 0, None
        if known is not None:
            count, beside = known.count_equal(data), known.beside
            end = known.ends[count - 1] if count else end
        grows = known is not None and count == known.count
        try:
            body, raws = self._decode_rest(data, opens.start(), end, count, beside)
            same = beside is not None and body is beside.body
            if known is not None and grows and same and not raws:
                return Conversation(shape, body, (), {}, known, data)
            made = KnownBody(data, head, known, count)
            opened = made.add(
                data, end, raws, shape, None if grows else known, is_new=known is None
            )
        except (NotCounted, ValueError, RecursionError):
            return None
        if not made.count or _END.match(data, made.ends[-1]) is None:
            return None
        made.beside = beside if same else Beside(body, data[made.ends[-1] :])
        if known is not None and made.keeps_spoken(known, count):
            made.transcript = known.transcript
        _BODIES.put(name, made)
        return Conversation(shape, body, (), opened, made, data)

    def _find_known(self, head: bytes) -> tuple[int, KnownBody | None]:
        """The cache key of a head, and the newest body that begins with it."""
        name = crc32(head) | len(head) << 32
        known = _BODIES.get(name)
        return name, known if known is not None and known.head == head else None

    def recall_first_words(self, data: bytes) -> bytes:
        """The hash of the user's first words in a body; empty if it is not cached."""
        opens = self.find_list(data)
        first = data.find(self._shape.mark, opens.end()) if opens is not None else -1
        if first < 0:
            return b""
        known = self._find_known(data[:first])[1]
        return known.said if known is not None else b""

    def _decode_rest(
        self, data: bytes, key: int, end: int, count: int, beside: Beside | None
    ) -> tuple[Any, list[Raw]]:
        """Decode everything that is not cached.

        Args:
            data: the body.
            key: offset of the messages' key.
            end: offset after the cached messages; one empty object replaces all of them.
            count: number of cached messages.
            beside: the content beside equal messages of another body; None if unknown.

        Returns:
            a struct of the keys beside the messages (that of `beside` if equal), and the uncached
            messages.

        Raises:
            NotCounted: other keys may have messages.
            ValueError: it is not JSON, or has other types than expected.
        """
        view, cached = memoryview(data), b"{}" if count else b""
        if beside is not None and data.endswith(beside.behind, end):
            with suppress(ValueError, RecursionError):  # the list may end earlier
                raws = _decode_raws(
                    b"".join([b"[", cached, view[end : len(data) - len(beside.behind)], b"]"])
                )
                return beside.body, raws[1:] if count else raws
        body = self._decode(b"".join([view[:key], self._name, cached, view[end:]]))
        if body.new is None or any(value is not ABSENT for value in self._get_typed(body)):
            raise NotCounted(AMBIGUOUS)
        raws, body.new = body.new, None
        return body, raws[1:] if count else raws


def find_known(document: Document | None, data: bytes) -> Conversation | None:
    """The conversation in a document with this body, if the offsets of its messages are known."""
    found = document.conversation if document is not None and bytes(document) == data else None
    return found if isinstance(found, Conversation) and found.known is not None else None


def locate_message(conversation: Conversation, place: int) -> tuple[int, int]:
    """The start and end of a message in its body; only for a conversation from `find_known`."""
    known = conversation.known
    if known is None:
        raise NotCounted(AMBIGUOUS)
    return known.starts[place], known.ends[place]


def _make_body(shapes: Sequence[Shape], others: Sequence[str]) -> type[Struct]:
    """A struct of the keys of all shapes and readers, so that one pass over a body finds them."""
    keys: dict[str, Any] = {"model": (str | None, None)}
    for shape in shapes:
        for field in fields(shape.body):
            optional = (Raw, ABSENT) if field.type is Raw else (field.type | None, None)
            keys.setdefault(field.name, optional)
    for key in (*TOOL_KEYS, *_KEPT_TOOLS, *_NAMING_KEYS, *_FORCES, *others):
        keys.setdefault(key, (Raw, ABSENT))
    return defstruct("AnyBody", [(name, *optional) for name, optional in keys.items()], gc=False)


def _says_nothing(message: dict[str, Json]) -> bool:
    """Whether the message names a speaker but has no content."""
    return isinstance(message.get("role"), str) and not any(
        message[key] for key in message.keys() - _LABELS
    )


def _holds_any(values: tuple[Any, ...]) -> bool:
    """Whether one of the keys has a value."""
    return any(value is not ABSENT and _holds(value) for value in values)  # most keys are absent


def _holds(value: Any) -> bool:  # noqa: ANN401  # any value of the key
    if not isinstance(value, Raw):
        return bool(value)
    return len(value) > _LONGEST_NOTHING or b"".join(bytes(value).split()) not in {
        b"",
        b"null",
        b"[]",
        b"{}",
    }


# A struct that is made at run time
def _read_number(body: Any, keys: Sequence[str], *, lenient: bool = True) -> int:  # noqa: ANN401
    """A positive number among a body's options, also as a string, as servers read it; else 0."""
    found = getattr(body, keys[0])
    if found is ABSENT or type(found) is not Raw or len(found) > _LONGEST_OPTIONS:
        return 0
    try:
        number = _follow(open_value(found), tuple(keys[1:]))
        if isinstance(number, Raw):  # with a fraction
            number = float(bytes(number))
        elif lenient and isinstance(number, str) and len(number) <= _MOST_DIGITS:
            number = float(number)
    except (NotCounted, ValueError):  # nested too deeply, or not a number
        return 0
    return int(min(number, MAX_OPTION)) if isinstance(number, (int, float)) and number > 0 else 0


def _count_items(found: object) -> int:
    """The number of prompts in a list of strings or of token lists; a token list is one prompt."""
    if found is ABSENT or not isinstance(found, Raw) or _read_first(found) != b"[":
        return 0
    try:
        items = _split(found)
    except (MsgspecError, ValueError, RecursionError):
        return 0
    return len(items) if items and _read_first(items[0]) in (b'"', b"[") else 0


def _read_first(raw: Raw) -> bytes:
    """The first byte of a value, which tells its type."""
    return bytes(memoryview(raw)[:1])


def _follow(value: Json, path: tuple[str, ...]) -> Json:
    """The value at the end of a path of keys or fields; None if missing."""
    for step in path:
        value = value.get(step) if isinstance(value, dict) else getattr(value, step, None)
    return value
