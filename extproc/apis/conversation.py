"""A conversation of any API: who says what, and whether the server keeps earlier messages.

One pass over a body splits it into messages without decoding their contents. A message is decoded only when it is read, and
most messages of a long history never are. Each API's file describes the shape of its conversations.

A client sends its history again with each request, longer by a turn. So conversations are cached. The key is everything before
the assistant's first message; the bytes after it are compared piece by piece, up to the first difference, and only the rest is
decoded. Behind the difference, messages with the same index are compared one by one. The bytes behind the newest message, which
often are a long list of tools, are compared with those of the body before. What is cached depends only on bytes that are equal,
so it does not matter which client sent them.

To edit a body, `locate` finds the same parts by their offsets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

from msgspec import MsgspecError, Raw, Struct, ValidationError, defstruct, json
from msgspec.structs import fields
from zlib_ng.zlib_ng import crc32

from extproc.apis.messages import TEXT, Part
from extproc.apis.places import Place
from extproc.bounded import Memo
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
from extproc.request.patch import AMBIGUOUS, Patch, Value

ASSISTANT: Final = "assistant"
USER: Final = "user"
TOOL: Final = "tool"
OTHER_ROLE: Final = "other"
"""Speakers of a message; any other value was sent by the client."""

_MAX_OLDEST: Final = 100
"""Number of messages, from the start, in which to look for the user's first words."""

TOOLS: Final = "tools"
NO_TOOLS: Final = "no tools"
"""Whether a request offers its model tools."""

TOOL_KEYS: Final = ("tools", "functions", "toolConfig")
_KEPT_TOOLS: Final = ("cachedContent", "cached_content")
"""Keys that refer to something on the server that may include tools."""

_get_tools: Final = attrgetter(*TOOL_KEYS)
_get_kept_tools: Final = attrgetter(*_KEPT_TOOLS)

_NAMING_KEYS: Final = ("conversation", "metadata", "prompt_cache_key")
"""Where bodies name a session; see `session_limits`."""

_LONGEST_NOTHING: Final = 8
MAX_OPTION: Final = 10_000_000
"""Larger numbers of tokens and of answers count as this, so that sums stay exact."""

_MOST_DIGITS: Final = 400
_split: Final = json.Decoder(list[Raw]).decode
_LONGEST_OPTIONS: Final = 4_096
"""Maximum length of an object with options, in bytes; only short ones are read."""

ASSISTANTS: Final = frozenset({ASSISTANT, "model", "ai"})
_LABELS: Final = frozenset({"role", "type", "id", "name", "status"})

_MOST_BYTES: Final = 32 * 2**20
"""Size of each of two generations of the cache of conversations, in bytes."""

_MESSAGE_BYTES: Final = 1_200
"""Average memory of a cached message besides its bytes. The assistant's, half of them, take nearly all of it, for two calls and
what came back."""

_PIECE: Final = 2_048
_FINE: Final = 4
"""Minimum size of a piece, in bytes, except of the newest messages, which are pieces of any size: clients change them."""

_SOUGHT: Final = 128
_TRIES: Final = 8
"""Length of the start of a piece to search for, in bytes, and number of times that it may be found where the rest differs."""

_OPENS: Final = b"{"
_decode_raws: Final = json.Decoder(list[Raw]).decode
_END: Final = re.compile(rb"[ \t\r\n]*\]")

_NEW: Final = f"new messages {os.urandom(16).hex()}"
"""A key for the messages to decode, which is secret so that no body contains it."""


class Before(NamedTuple):
    """The part of the conversation that a body does not show as messages.

    Attributes:
        after: reference to what the request continues (a response, a message, a conversation) in canonical spelling, or empty.
        open_ended: the server appends to a conversation whose end only the server knows.
        in_words: earlier turns, if any, are in the text of the messages.
    """

    after: bytes = b""
    open_ended: bool = False
    in_words: bool = False


NOTHING_BEFORE: Final = Before()
"""For a body that shows its whole history."""


_OBJECTS: Final = (Struct, dict)


def know_nothing(_: Json) -> Before:
    """`look_back` of an API whose requests show their whole history."""
    return NOTHING_BEFORE


def name_by_role(message: Any) -> str:  # noqa: ANN401  # a struct with a role
    """`name_speaker` of an API whose messages say all by their role."""
    role: str | None = message.role
    return ASSISTANT if role in ASSISTANTS else role or OTHER_ROLE


def take_list(value: Json) -> Sequence[Json]:
    """The messages of a list; empty if the value is not a list, or is a list of texts or numbers."""
    if not isinstance(value, list) or not value:
        return ()
    return value if isinstance(value[0], _OBJECTS) or dict in set(map(type, value)) else ()


class Shape:
    """How one API writes a conversation; never changed.

    Attributes:
        path: keys that lead to the messages.
        body: a struct of the relevant keys of a body; all but the first on the path are `Raw`.
        message: a struct of the relevant keys of a message; each needs a default.
        decode: decodes a message.
        name_speaker: returns who says a message: ASSISTANT, USER, TOOL or another; empty for a thought, which is skipped.
        read: returns the parts of a message, in order; raises NotCounted if it cannot be read or is too large.
        find_raw: returns the raw value with a message's text and calls; ABSENT if these are in several places.
        take: returns the messages in the value at the end of the path; None if that is a list.
        joins: returns whether a message is a call that belongs together with adjacent calls, made at once; None if each
            message is separate.
        look_back: returns what a body says about earlier messages; None if every request shows its whole history.
        refers: returns whether a message of the assistant's only refers to one that the server keeps; None if none does.
        marks_prefill: returns whether a body marks the assistant's message at its end as the start of the answer; None if no
            body does.
        locate: returns where a note can be put into a message of an edited body; None if no note can be put there.
        mark: what each body with a message of the assistant's has in it, outside of texts; empty if nothing is known of bodies.
        fallback: other APIs use the key for something else, so those are tried first.
    """

    __slots__ = (
        "body",
        "decode",
        "fallback",
        "find_raw",
        "joins",
        "locate",
        "look_back",
        "mark",
        "marks_prefill",
        "message",
        "name_speaker",
        "path",
        "read",
        "refers",
        "take",
    )

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


_Piece: TypeAlias = tuple[int, bytes, int]
"""The offset of a piece's end, its bytes, and the number of messages up to its end."""


class Beside:
    """What a body has beside its messages.

    Attributes:
        body: a struct of all shapes' keys.
        behind: the bytes from the end of the newest message on.
        size: length of these bytes, and of the values of keys that are kept.
        hints: a tool may say whether it only reads.
        declares: some tools, and whether one of them may be declared; None if that is unknown.
    """

    __slots__ = ("behind", "body", "declares", "hints", "size")

    def __init__(self, body: Any, behind: bytes) -> None:  # noqa: ANN401  # made at run time
        """Take a struct, which then keeps no more of the request's bytes than it needs, and the bytes behind the messages."""
        self.body = body
        self.behind = behind
        self.size = len(behind)
        self.hints = True
        self.declares: tuple[frozenset[str], bool] | None = None
        for name in body.__struct_fields__:
            value = getattr(body, name)
            if type(value) is Raw and value is not ABSENT:
                setattr(body, name, value.copy())
                self.size += len(value)


_SERIALS: Final = count()


class KnownMessages:
    """What is cached of a conversation. Lists, except `pieces`, have an entry for each message.

    Attributes:
        head: everything before the assistant's first message.
        starts: offset of its first byte in the body.
        ends: offset of the byte after it.
        speakers: its speaker.
        shown: what `chain.py` reads in it; None if unknown.
        actions: what `turn.py` reads in it; None if unknown.
        results: what `turn.py` reads in the messages behind it; None if unknown.
        serials: a number that only it and equal messages of later bodies, with the same index, have.
        said: the hash of the user's first words, if the head has them; empty if unknown.
        pieces: the bytes from the assistant's first message to the end of the newest message.
        transcript: what `chain.py` reads in all of them; None if unknown.
        beside: what the body has beside them; None only while they are read.
    """

    __slots__ = (
        "actions", "beside", "ends", "head", "pieces", "results", "said", "serials", "shown", "speakers", "starts",
        "transcript",
    )  # fmt: skip

    def __init__(self, earlier: KnownMessages | None, count: int) -> None:
        """Copy this many messages of an earlier body with the same head."""
        self.beside: Beside | None = None
        self.head = b""
        self.said: bytes = earlier.said if earlier is not None else b""
        self.starts: list[int] = earlier.starts[:count] if earlier is not None else []
        self.ends: list[int] = earlier.ends[:count] if earlier is not None else []
        self.speakers: list[str] = earlier.speakers[:count] if earlier is not None else []
        self.shown: list[Any] = earlier.shown[:count] if earlier is not None else []
        self.actions: list[Any] = earlier.actions[:count] if earlier is not None else []
        self.results: list[Any] = earlier.results[:count] if earlier is not None else []
        self.serials: list[int] = earlier.serials[:count] if earlier is not None else []
        self.pieces: list[_Piece] = []
        self.transcript: Any = None

    def add(self, raws: list[Raw], shape: Shape, earlier: KnownMessages | None, first: int) -> list[Any]:
        """Add new messages. Those that are equal to an earlier body's, with the same index, show what they showed there.

        Args:
            raws: the messages.
            shape: their shape.
            earlier: what is cached of the earlier body; None if nothing is.
            first: the offset of the first piece, before which both bodies are equal.

        Returns:
            the messages as structs of the shape; None for those that are equal.

        Raises:
            ValueError: a message is no object, or has other types than expected.
        """
        values: list[Any] = []
        pieces, at, start = earlier.pieces if earlier is not None else [], 0, first
        for number, raw in enumerate(raws, len(self.speakers)):
            equal = False
            while at < len(pieces) and pieces[at][2] <= number:
                start = pieces[at][0]
                at += 1
            if earlier is not None and at < len(pieces):
                begins = earlier.starts[number] - start
                behind = raw if begins >= 0 else bytes(raw)[-begins:]
                equal = len(raw) == earlier.ends[number] - earlier.starts[number]
                equal = equal and pieces[at][1].startswith(behind, max(begins, 0))
            value = None if equal else shape.decode(raw)
            values.append(value)
            same = earlier if equal else None
            self.speakers.append(shape.name_speaker(value) if same is None else same.speakers[number])
            self.shown.append(None if same is None else same.shown[number])
            self.actions.append(None if same is None else same.actions[number])
            self.results.append(None if same is None else same.results[number])
            self.serials.append(next(_SERIALS) if same is None else same.serials[number])
        return values

    def copy(self, earlier: KnownMessages, start: int, end: int, moved: int) -> None:
        """Add messages of an earlier body, which stand here this many bytes further back."""
        self.starts += [at + moved for at in earlier.starts[start:end]]
        self.ends += [at + moved for at in earlier.ends[start:end]]
        self.speakers += earlier.speakers[start:end]
        self.shown += earlier.shown[start:end]
        self.actions += earlier.actions[start:end]
        self.results += earlier.results[start:end]
        self.serials += earlier.serials[start:end]

    def keeps_spoken(self, earlier: KnownMessages, count: int) -> bool:
        """Whether all messages of an earlier body are here, and at most results and later words of users have changed.

        `count`: number of messages that are known to be the same, from the first one on.
        """
        last, speakers = len(earlier.serials), self.speakers
        if len(speakers) < last:
            return False
        for number in range(count, last):
            if self.serials[number] != earlier.serials[number]:
                speaker = speakers[number]
                first = speaker == USER and USER not in speakers[:number]
                if first or speaker == ASSISTANT or speaker != earlier.speakers[number]:
                    return False
        return True

    def place(self, data: bytes, at: int, raws: list[Raw]) -> int:
        """Find where messages are.

        Args:
            data: the body.
            at: offset behind the messages before them.
            raws: the messages: objects, decoded from that offset on, so that only spaces and commas are between them.

        Returns:
            the offset behind them.
        """
        for raw in raws:
            start = data.find(_OPENS, at)
            at = start + len(raw)
            self.starts.append(start)
            self.ends.append(at)
        return at

    def cut(self, data: bytes, first: int, pieces: list[_Piece]) -> bool:
        """Cut the messages' bytes into pieces. Small ones that are no longer the newest are merged.

        Args:
            data: the body.
            first: offset of the first piece.
            pieces: the pieces of cached messages that are at the same offsets.

        Returns:
            whether there are messages, and the body's list ends behind them.
        """
        if not self.ends or _END.match(data, self.ends[-1]) is None:
            return False
        at, count, fine = first, 0, len(self.ends) - _FINE
        for piece in pieces:
            if piece[0] - at < _PIECE:
                break
            self.pieces.append(piece)
            at, count = piece[0], piece[2]
        for number in range(count, len(self.ends)):
            end = self.ends[number]
            if end > at and (end - at >= _PIECE or number >= fine):
                self.pieces.append((end, data[at:end], number + 1))
                at = end
        return True


def _measure(_: int, known: KnownMessages) -> int:
    beside = known.beside.size if known.beside is not None else 0
    return len(known.head) + (known.pieces[-1][0] if known.pieces else 0) + beside + _MESSAGE_BYTES * len(known.ends)


_KNOWN: Final[Memo[int, KnownMessages]] = Memo(_MOST_BYTES, _measure)
"""The cache of conversations, by length and CRC32 of everything before the assistant's first message. A client that can forge
the CRC32 of another one's can also send the same, which replaces what is cached as well."""


class Message:
    """One message, which is read on demand.

    Attributes:
        shape: see `Shape`.
        speaker: who says it.
        place: index among the messages.
        joined: calls before it that were made at once with it, newest first.
        known: the cached conversation; None if there is none.
        units: units that it took to read its parts, see `Inspection`; 0 if they were not read.
    """

    __slots__ = ("_conversation", "_parts", "joined", "known", "place", "shape", "speaker", "units")

    def __init__(
        self, shape: Shape, speaker: str, place: int, conversation: Conversation | None, parts: list[Part] | None = None
    ) -> None:
        """Refer to a message of a conversation; without one, `parts` are the message, which is part of another one."""
        self.shape = shape
        self.speaker = speaker
        self.place = place
        self.joined: list[Message] | None = None
        self._conversation = conversation
        self._parts = parts
        self.known: KnownMessages | None = conversation.known if conversation is not None else None
        self.units = 0

    @property
    def value(self) -> Any:  # noqa: ANN401  # of the shape's
        """The message as a struct of the shape; empty for a part of another message."""
        return self.shape.message() if self._conversation is None else self._conversation.open_message(self.place)

    def divide(self, said: Sequence[tuple[str, str]]) -> list[Message]:
        """Make messages from parts of its text, given as speakers and texts."""
        return [Message(self.shape, speaker, self.place, None, [Part(TEXT, text)]) for speaker, text in said]

    def join(self, older: Message) -> None:
        """Add the preceding call, which was made at once with this one."""
        if self.joined is None:
            self.joined = []
        self.joined.append(older)

    def read_parts(self) -> list[Part]:
        """The message's parts, in order.

        Raises:
            NotCounted: it cannot be read, or is too large.
        """
        parts = self._parts
        if parts is None:
            left = INSPECTION.left
            walk(1)
            conversation = self._conversation
            parts = self.shape.read(self.value) if conversation is None else conversation.read_parts(self.place)
            if self.joined is not None:
                parts = [part for message in self.joined[::-1] for part in message.read_parts()] + parts
            self._parts = parts
            self.units = left - INSPECTION.left
        return parts

    def is_reference(self) -> bool:
        """Whether the server keeps what the assistant did, and the message only refers to it."""
        refers = self.shape.refers
        return refers is not None and False not in [refers(value) for value in self.list_values()]

    def list_values(self) -> list[Any]:
        """The message's value, and those of the calls that were made at once with it."""
        return [*[message.value for message in (self.joined or [])[::-1]], self.value]

    def find_whole(self, document: Document) -> Json:
        """The whole message; ABSENT if it says nothing.

        Args:
            document: the document that contains it. It refers to the conversation, which must therefore not refer to it.

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
        known: the cache entry of these messages; None if they are not cached.
        earlier: the cache entry of an earlier body in which the assistant's messages are the same as here, and this one has
            more; None if there is none.
        transcript: the result of `read_transcript`, or its exception.
        prefilled: the newest message is known to be the start of the answer, so it is no turn.
    """

    __slots__ = (
        "_data", "_first_words", "_messages", "_read", "before", "body", "earlier", "known", "model", "prefilled",
        "shape", "transcript",
    )  # fmt: skip

    def __init__(self, shape: Shape, messages: Sequence[Any], body: Any, model: str, data: bytes = b"") -> None:  # noqa: ANN401  # of all keys
        """Store messages as structs of the shape, as values if the whole body was decoded, or as None if they are cached."""
        self.body = body
        self._data = data
        self._first_words: str | None = None
        self._read: dict[int, tuple[list[Part], int]] = {}
        self.known: KnownMessages | None = None
        self.earlier: KnownMessages | None = None
        self.transcript: Any = None
        self.prefilled = False
        self.shape = shape
        self.model = model
        self.before: Before = shape.look_back(body)
        self._messages = messages if isinstance(messages, list) else list(messages)

    @property
    def elsewhere(self) -> bool:
        """Whether earlier turns are not in the messages: the server keeps them, or a plain prompt contains them."""
        return bool(self.before.after) or self.before.in_words

    @property
    def shows_lists(self) -> bool:
        """Whether the keys that are read include all lists of tools."""
        return len(self.shape.path) == 1

    def find_offer(self) -> str:
        """Whether the request offers tools: `TOOLS` or `NO_TOOLS`; empty if unknown."""
        if not self.shows_lists:
            return ""
        if _holds_any(_get_tools(self.body)):
            return TOOLS
        if self.before.after or _holds_any(_get_kept_tools(self.body)):  # a server that keeps the history may keep the tools
            return ""
        return NO_TOOLS

    def find_field(self, key: str) -> Raw | None:
        """The raw value of a key of the body, ABSENT if missing; None for a key that is skipped."""
        found = getattr(self.body, key, None)
        return found if type(found) is Raw else None

    def read_backwards(self) -> Iterator[Message]:
        """The messages from the newest to the oldest, without thoughts.

        Raises:
            NotCounted: there are too many.
        """
        return self._read_each() if self.shape.joins is None else self._read_joined(self.shape.joins)

    def __len__(self) -> int:
        """The number of messages, including thoughts."""
        return len(self._messages)

    def read_first_words(self) -> str:
        """The user's first words; empty if none of the first messages is a user's text.

        Raises:
            NotCounted: one of them cannot be read.
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
        """The user's first words, and the place of their message; they may be cached, so they take no units of the caller."""
        left = INSPECTION.left
        INSPECTION.begin()
        try:
            for place in range(min(len(self._messages), _MAX_OLDEST)):
                if self.name_speaker(place) == USER:
                    read = self.shape.read(self.open_message(place))
                    texts = [open_value(part.value) for part in read if part.kind == TEXT]
                    words = "".join([text for text in texts if isinstance(text, str)])
                    if words:
                        return words, place
        finally:
            INSPECTION.left = left
        return "", 0

    def list_spoken(self) -> list[tuple[str, Any]]:
        """Speakers and their messages, oldest first and without thoughts, as structs of the shape. Calls stay separate.

        Raises:
            NotCounted: there are too many messages.
        """
        return [(speaker, self.open_message(place)) for place, speaker in enumerate(self.list_speakers()) if speaker]

    def list_speakers(self) -> list[str]:
        """The speaker of each message, the oldest first; empty for a thought.

        Raises:
            NotCounted: there are too many messages.
        """
        self.check_count()
        if self.known is not None:
            return self.known.speakers
        return [self.name_speaker(place) for place in range(len(self._messages))]

    def name_speaker(self, place: int) -> str:
        """The speaker of the message at a place; empty for a thought."""
        if self.known is not None:
            return self.known.speakers[place]
        return self.shape.name_speaker(self.open_message(place))

    def is_prefilled(self) -> bool:
        """Whether the newest message is the assistant's, so that the model has to continue it.

        Raises:
            NotCounted: that message cannot be read.
        """
        for place in range(len(self._messages) - 1, -1, -1):
            speaker = self.name_speaker(place)
            if speaker:
                return speaker == ASSISTANT
        return False

    def marks_prefill(self) -> bool:
        """Whether the body marks the newest message as the start of the answer."""
        marks = self.shape.marks_prefill
        return marks is not None and marks(self.body, self.open_message(len(self._messages) - 1))

    def _read_each(self) -> Iterator[Message]:
        count = len(self._messages)
        for place in range(count - 1, max(count - 1 - MAX_STEPS, -1), -1):
            speaker = self.name_speaker(place)
            if speaker:
                yield Message(self.shape, speaker, place, self)
        self.check_count()

    def _read_joined(self, joins: Callable[[Any], bool]) -> Iterator[Message]:
        """Like `read_backwards`, with adjacent calls that were made at once as one message."""
        calls: Message | None = None
        for message in self._read_each():
            joined = joins(message.value)
            if joined and calls is not None:
                calls.join(message)
                continue
            if calls is not None:
                yield calls
            calls = message if joined else None
            if not joined:
                yield message
        if calls is not None:
            yield calls

    def has_read(self, place: int) -> bool:
        """Whether the parts of the message at a place were read."""
        return place in self._read

    def read_parts(self, place: int) -> list[Part]:
        """The parts of the message at a place. They are read only once, but take as many units each time.

        Raises:
            NotCounted: it cannot be read, or is too large.
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
        """Check the number of messages; raises NotCounted if there are too many."""
        if len(self._messages) > MAX_STEPS:
            raise NotCounted("inspect_limit")

    def show_raw(self, place: int) -> bytes:
        """A message as it is written; empty if it is not cached."""
        return self._data[self.known.starts[place] : self.known.ends[place]] if self.known is not None else b""

    def open_message(self, place: int) -> Any:  # noqa: ANN401  # of the shape's
        """A message as a struct of the shape; empty if its values have unexpected types."""
        value = self._messages[place]
        if type(value) is self.shape.message:
            return value
        if self.known is not None:
            raw = self._data[self.known.starts[place] : self.known.ends[place]]
            value = self._messages[place] = decode_json(raw, self.shape.decode)
            return value
        try:
            return decode_json(write_canonical(value), self.shape.decode)
        except ValidationError:
            return self.shape.message()


class Options(NamedTuple):
    """What a request says about its answer.

    Attributes:
        longest: number of tokens that it allows; 0 if it does not say.
        copies: number of answers that it asks for.
        model: empty for none.
    """

    longest: int
    copies: int
    model: str


class Shapes:
    """The shapes of all APIs; one pass over a body looks for all of them."""

    def __init__(self, shapes: Sequence[Shape], longest_answers: Sequence[str], copies: Sequence[str]) -> None:
        """Order the shapes: fallbacks are tried last.

        Args:
            shapes: the shapes of all APIs.
            longest_answers: see `Api`.
            copies: see `Api`.
        """
        self.shapes = sorted(shapes, key=lambda shape: shape.fallback)
        self._longest_answers = [(place, place.split(".")) for place in longest_answers]
        self._copies = [place.split(".") for place in copies]
        options = [keys[0] for _, keys in self._longest_answers] + [keys[0] for keys in self._copies]
        self._body: Any = _make_body(self.shapes, options)
        self._decode = json.Decoder(self._body).decode
        self._raw_keys = [field.name for field in fields(self._body) if field.type is Raw]
        self._known = [_KnownShape(shape, self._body) for shape in self.shapes if shape.mark]

    def open_conversation(self, document: Document) -> Conversation:
        """The conversation in a body, in the first shape that matches; all callers share it.

        Raises:
            NotCounted: there is none, or it cannot be read.
        """
        found: Conversation | NotCounted | None = document.conversation
        if found is None:
            try:
                found = self._open(document)
                found.prefilled = found.is_prefilled() and (document.prefills or found.marks_prefill())
            except NotCounted as failure:
                found = failure.renew()
            document.conversation = found
        INSPECTION.begin()  # behind it, or the first reader would pay for all
        if isinstance(found, NotCounted):
            raise found.renew()
        return found

    def hash_first_words(self, document: Document) -> bytes:
        """The hash of the user's first words, for the marks of notes; see `hash_words`.

        If it is cached, the conversation is not opened: with notes, nothing else reads it. So a body that is ambiguous behind
        the assistant's first message may get the hash of the conversation that begins like it.

        Raises:
            NotCounted: there is no conversation, or it cannot be read.
        """
        if document.conversation is None:
            data = document.data()
            for known in self._known:
                said = known.recall_first_words(data)
                if said:
                    return said
        return self.open_conversation(document).hash_first_words()

    def find_longest_answer(self, conversation: Conversation) -> int:
        """The number of tokens that a request allows for its answer, at any of these places; 0 if it does not say."""
        return max([_read_number(conversation.body, keys, lenient=False) for _, keys in self._longest_answers])

    def read_options(self, document: Document, places: frozenset[str]) -> Options:
        """What a request says about its answer, also if there is no conversation in it.

        Args:
            document: its body.
            places: the only ones at which the length of an answer is read; empty for all that are known.

        Raises:
            NotCounted: it cannot be read.
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
        longest = [_read_number(body, keys) for place, keys in self._longest_answers if not places or place in places]
        return Options(max(longest), self._count_copies(body), model)

    def count_copies(self, conversation: Conversation) -> int:
        """The number of answers that a request asks for."""
        return self._count_copies(conversation.body)

    def _count_copies(self, body: Any) -> int:  # noqa: ANN401  # a struct that is made at run time
        copies = [_read_number(body, keys) for keys in self._copies]
        prompts = [_count_items(getattr(body, keys[0])) for keys in self._copies if len(keys) == 1]
        return max(1, *copies) * max(1, *prompts)

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
                break  # hardly any body has lists of two shapes, and it can be long
        try:
            body = value = decode_json(data, self._decode)
        except ValidationError:
            value = document.value()
            body = self._fill_body(value)
        for shape in self.shapes:
            path = shape.path
            messages = shape.take(getattr(body, path[0]) if value is body and len(path) == 1 else _follow(value, path))
            if messages:
                return Conversation(shape, messages, body, body.model or "")
        raise NotCounted("no_messages")

    def _fill_body(self, value: Json) -> Json:
        """Add the other keys of a body that was decoded as a whole, because a value in it has an unexpected type."""
        given = value if isinstance(value, dict) else {}
        model = given.get("model")
        if isinstance(model, dict | list):
            model = None  # names no model, and may take long to spell
        named = model if model is None or isinstance(model, str) else write_canonical(model).decode()
        raw = {key: Raw(write_canonical(given[key])) for key in self._raw_keys if key in given}
        return self._body(model=named, **raw)


class _KnownShape:
    """Reads bodies of one shape whose older messages may be cached."""

    def __init__(self, shape: Shape, body: type[Struct]) -> None:
        key = shape.path[0]
        self._shape = shape
        self._key = f'"{key}"'.encode()
        self._opens = re.compile(rf'"{key}"[ \t\r\n]*:[ \t\r\n]*\[[ \t\r\n]*'.encode())
        names = [field.name for field in fields(body) if field.name != "model"]
        keys = [("model", str | None, None), *[(name, Raw, ABSENT) for name in names], ("new", list[Raw] | None, None)]
        self._decode: Any = json.Decoder(defstruct("KnownBody", keys, gc=False, rename={"new": _NEW})).decode
        self._get_typed = attrgetter(*[field.name for field in fields(body) if field.name in names and field.type is not Raw])
        self._name = f'"{_NEW}":['.encode()

    def find_list(self, data: bytes) -> re.Match[bytes] | None:
        """Where a body's list of messages may begin, from its key to the bracket and spaces behind that; None for none."""
        key = data.find(self._key)
        return self._opens.match(data, key) if key >= 0 else None

    def open_conversation(self, data: bytes, opens: re.Match[bytes]) -> Conversation | None:
        """The conversation in a body; None if the body has anything unexpected, or no message of the assistant's."""
        shape, key, end, count = self._shape, opens.start(), opens.end(), 0
        first = data.find(shape.mark, end)
        if first < 0:
            return None
        head = data[:first]
        name = crc32(head) | first << 32
        known = _KNOWN.get(name)
        if known is not None and known.head != head:
            known = None
        matched: list[_Piece] = []
        for piece in known.pieces if known is not None else ():
            if not data.startswith(piece[1], matched[-1][0] if matched else first):
                break
            matched.append(piece)
            end, count = piece[0], piece[2]
        beside = known.beside if known is not None else None
        around = self._read_around(data, opens.end(), first, matched, known) if known is not None else None
        if around is not None and beside is not None:
            body: Any = beside.body
            made, values = around
        else:
            try:
                body, raws = self._decode_rest(data, key, end, count, beside)
                made = KnownMessages(known, count)
                values = [None] * count + made.add(raws, shape, known, first)
            except (NotCounted, ValueError, RecursionError):
                return None
            made.place(data, end, raws)
        if not made.cut(data, first, matched):
            return None
        made.beside = beside if beside is not None and beside.body is body else Beside(body, data[made.ends[-1] :])
        if known is not None and known.beside is made.beside and count == len(known.ends) == len(made.ends):
            made = known
        made.head = head if known is None else known.head
        _KNOWN.put(name, made)
        conversation = Conversation(shape, values, body, body.model or "", data)
        conversation.known = made
        conversation.earlier = known if known is not None and made.keeps_spoken(known, count) else None
        return conversation

    def recall_first_words(self, data: bytes) -> bytes:
        """The hash of the user's first words in a body; empty if it is not cached."""
        opens = self.find_list(data)
        first = data.find(self._shape.mark, opens.end()) if opens is not None else -1
        if first < 0:
            return b""
        head = data[:first]
        known = _KNOWN.get(crc32(head) | first << 32)
        return known.said if known is not None and known.head == head else b""

    def _read_around(
        self, data: bytes, opens: int, first: int, matched: list[_Piece], known: KnownMessages
    ) -> tuple[KnownMessages, list[Any]] | None:
        """Decode only messages that have changed, and those behind the cached ones, if cached pieces are between them.

        Args:
            data: the body.
            opens: offset behind the bracket that opens the messages.
            first: offset of the first cached piece.
            matched: the cached pieces at the same offsets.
            known: what is cached.

        Returns:
            all messages, and those that were decoded as structs; None if cached pieces are not there again, or if anything else
            has changed.
        """
        pieces, beside, number = known.pieces, known.beside, len(matched)
        if beside is None or number + 1 >= len(pieces) or len(pieces[number + 1][1]) < _PIECE:
            return None
        end, count = (matched[-1][0], matched[-1][2]) if matched else (opens, 0)
        tail = len(data) - len(beside.behind)
        again = _find_again(data, end, pieces[number + 1][1]) if tail > end and data.endswith(beside.behind) else -1
        if again < 0:
            return None
        behind, begins, last = again, pieces[number][2], number + 1
        while last < len(pieces) and data.startswith(pieces[last][1], behind):
            behind += len(pieces[last][1])
            last += 1
        ends = pieces[last - 1][2]
        if behind > tail:
            return None
        view = memoryview(data)
        try:
            changed = _decode_raws(b"".join([b"[{}" if count else b"[", view[end:again], b"]"]))
            newer = _decode_raws(b"".join([b"[{}", view[behind:tail], b"]"]))
            if count:
                del changed[0]
            del newer[0]
            if len(changed) != begins - count:
                return None
            made = KnownMessages(known, count)
            values = [None] * count + made.add(changed, self._shape, known, first)
            made.place(data, end, changed)
            made.copy(known, begins, ends, behind - known.ends[ends - 1])
            values += [None] * (ends - begins)
            values += made.add(newer, self._shape, known, first)
            made.place(data, behind, newer)
        except (NotCounted, ValueError, RecursionError):
            return None
        return made, values

    def _decode_rest(self, data: bytes, key: int, end: int, count: int, beside: Beside | None) -> tuple[Any, list[Raw]]:
        """Decode what is not cached.

        Args:
            data: the body.
            key: offset of the messages' key.
            end: offset behind the cached messages, for all of which an empty object stands.
            count: number of the cached messages.
            beside: what another body with equal messages, up to there, had beside them; None if that is unknown.

        Returns:
            a struct of the keys beside the messages, that of `beside` if they are equal, and the messages that are not cached.

        Raises:
            NotCounted: other keys may have messages.
            ValueError: it is not JSON, or has other types than expected.
        """
        view, cached = memoryview(data), b"{}" if count else b""
        if beside is not None and data.endswith(beside.behind, end):
            with suppress(ValueError, RecursionError):  # if the list ends earlier
                raws = _decode_raws(b"".join([b"[", cached, view[end : len(data) - len(beside.behind)], b"]"]))
                return beside.body, raws[1:] if count else raws
        body = self._decode(b"".join([view[:key], self._name, cached, view[end:]]))
        if body.new is None or any(value is not ABSENT for value in self._get_typed(body)):
            raise NotCounted(AMBIGUOUS)
        raws, body.new = body.new, None
        return body, raws[1:] if count else raws


def _find_again(data: bytes, start: int, piece: bytes) -> int:
    """The offset of a piece of another body in a body, from a place on; -1 if it is not there."""
    begins = piece[:_SOUGHT]
    at, tries = data.find(begins, start), _TRIES
    while at >= 0 and not data.startswith(piece, at):
        tries -= 1
        at = data.find(begins, at + 1) if tries else -1
    return at


def find_known(document: Document | None, data: bytes) -> Conversation | None:
    """The conversation in a document with this body, if the offsets of its messages are known; no other list in it is one."""
    found = document.conversation if document is not None and bytes(document) == data else None
    return found if isinstance(found, Conversation) and found.known is not None else None


def locate_message(conversation: Conversation, place: int) -> tuple[int, int]:
    """The offsets of a message in its body, and behind it; only of a conversation that `find_known` returns."""
    known = conversation.known
    if known is None:
        raise NotCounted(AMBIGUOUS)
    return known.starts[place], known.ends[place]


def _make_body(shapes: Sequence[Shape], others: Sequence[str]) -> type[Struct]:
    """Make a struct of the keys of all shapes, and others, so that one pass over a body shows which ones it has."""
    keys: dict[str, Any] = {"model": (str | None, None)}
    for shape in shapes:
        for field in fields(shape.body):
            optional = (Raw, ABSENT) if field.type is Raw else (field.type | None, None)
            keys.setdefault(field.name, optional)
    for key in (*TOOL_KEYS, *_KEPT_TOOLS, *_NAMING_KEYS, *others):
        keys.setdefault(key, (Raw, ABSENT))
    return defstruct("AnyBody", [(name, *optional) for name, optional in keys.items()], gc=False)


def _says_nothing(message: dict[str, Json]) -> bool:
    """Whether the message names a speaker but has no content."""
    return isinstance(message.get("role"), str) and not any(message[key] for key in message.keys() - _LABELS)


def _holds_any(values: tuple[Any, ...]) -> bool:
    """Whether one of the keys has a value."""
    return any(value is not ABSENT and _holds(value) for value in values)  # most keys are absent


def _holds(value: Any) -> bool:  # noqa: ANN401  # as the key has it
    """Whether the key has a value."""
    if not isinstance(value, Raw):
        return bool(value)
    return len(value) > _LONGEST_NOTHING or b"".join(bytes(value).split()) not in {b"", b"null", b"[]", b"{}"}


def _read_number(body: Any, keys: Sequence[str], *, lenient: bool = True) -> int:  # noqa: ANN401  # a struct that is made at run time
    """A positive number among the options of a body, also in a text, as lenient servers read it; 0 for anything else."""
    found = getattr(body, keys[0])
    if found is ABSENT or type(found) is not Raw or len(found) > _LONGEST_OPTIONS:
        return 0
    try:
        number = _follow(open_value(found), tuple(keys[1:]))
        if isinstance(number, Raw):  # with a fraction
            number = float(bytes(number))
        elif lenient and isinstance(number, str) and len(number) <= _MOST_DIGITS:
            number = float(number)
    except (NotCounted, ValueError):  # nested too deeply to be options, or no number
        return 0
    return int(min(number, MAX_OPTION)) if isinstance(number, (int, float)) and number > 0 else 0


def _count_items(found: object) -> int:
    """The number of prompts in a list of texts, or of lists of tokens; a list of tokens is one."""
    if found is ABSENT or not isinstance(found, Raw) or _read_first(found) != b"[":
        return 0
    try:
        items = _split(found)
    except (MsgspecError, ValueError, RecursionError):
        return 0
    return len(items) if items and _read_first(items[0]) in (b'"', b"[") else 0


def _read_first(raw: Raw) -> bytes:
    """The first byte of a value, which says what it is."""
    return bytes(memoryview(raw)[:1])


def _follow(value: Json, path: tuple[str, ...]) -> Json:
    """The value at the end of a path of keys or fields; None if missing."""
    for step in path:
        value = value.get(step) if isinstance(value, dict) else getattr(value, step, None)
    return value
