"""One turn of an agent: what the assistant does, and everything behind that up to its next message.

Of a request nothing is read before it is asked for. A turn of an earlier request is reduced to hashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Final, NamedTuple

from msgspec import json

from extproc.apis import find_hints
from extproc.apis.contents import find_wrappers, is_injected, list_texts, read_result, unpack
from extproc.apis.conversation import ASSISTANT, TOOLS, USER, Conversation, Message
from extproc.apis.messages import CALL, OTHER, RESULT, TEXT, Part
from extproc.bounded import Memo
from extproc.decision import STRONG, WEAK
from extproc.detectors.actions import AssistantAction, find_mark, may_hold, number_id, read_action, read_failed_call
from extproc.detectors.alike import leave_out_numbers, open_result
from extproc.detectors.complaints import complains
from extproc.detectors.failures import FATAL, NO_FAILURE, SAID_WITHIN, TRANSIENT, Failure, read_failure
from extproc.detectors.failures import MISSING as NOT_FOUND
from extproc.detectors.results import MAX_NORMALIZED, differ_in_lines, may_be_equal, normalize, normalize_head
from extproc.detectors.scratchpad import unfold
from extproc.detectors.tools import CHANGES, READS, find_role
from extproc.request.clients import CALL_ID_LINE, INJECTED_TAGS
from extproc.request.document import ABSENT, Document, count_left, walk, write_canonical

_NEXT: Final = "\x1e"  # a record separator (ASCII), which texts hardly hold
FAILURE_MARK: Final = "\x15"  # a negative acknowledgement
_DIGEST: Final = 8
_ID: Final = 16

_MARKS: Final = [(f"<{tag}>", f"</{tag}>") for tag in sorted(INJECTED_TAGS)]

_MAX_NORMALIZED_IN_ALL: Final = 6 * MAX_NORMALIZED
"""So much of all the results of a request, in characters; the others are compared as they are."""

_MOST_KNOWN: Final = 4_096
"""This many results are in a generation of those that are known without what changes by itself: by digests, in 2 MB at most."""

MAX_ENTRY: Final = 64
"""Longest entry of a ring, in bytes."""

_FREE: Final = 4
_MOST_NAMES_KEPT: Final = 2
_LONGEST_NAMES_KEPT: Final = 64
"""An action that takes more of the bounds, or has more or longer names, is not kept with a known message."""

_KNOWN: Final = 1
_RETURNED: Final = 2
_ERROR: Final = 4
LONG: Final = 8
PASSING: Final = 16
MISSING: Final = 32
"""Flags of a result: it is long, its failure may pass by itself, or what was looked for is not there."""

_FLAGS: Final[dict[Failure, int]] = {TRANSIENT: PASSING, NOT_FOUND: MISSING}
_EVIDENCE: Final = LONG | PASSING | MISSING | READS | CHANGES

_LONG_RESULT: Final = 200
"""Honest repetition brings back less, in characters."""

HARNESS: Final = frozenset({"system", "developer"})
"""Whose messages in the middle of a conversation are the harness's: reminders that come and go, and are part of no result."""

NUMBERS: Final = re.compile(r"[0-9]+")
_SIX_BITS: Final = 0x3F
_NO_TEXT: Final = 0x80
"""Of bytes that older versions, which expect a name in their place, read as none: UTF-8 has none that begins so."""
_FAILURE: Final = 3
_FAILURE_BITS: Final = 4
"""Bytes that tell failing results apart in an entry, and bytes of six bits that these take there."""

_WORDS_BITS: Final = 11
"""The same of what a user says."""

_ENTRY_NAME: Final = MAX_ENTRY - 1 - 3 * _DIGEST
RAW: Final = 1 + _DIGEST
NORMALIZED: Final = RAW + _DIGEST
REST: Final = NORMALIZED + _DIGEST
"""Offsets in an entry: of the result's hashes, and of what is behind them."""


_NORMAL: Final[Memo[bytes, bytes]] = Memo(_MOST_KNOWN)
"""Digests of results without what changes by itself, by those of the results: who polls sends them again and again."""

_FAILURES: Final[Memo[bytes, bytes]] = Memo(_MOST_KNOWN)
"""The same of failing results without numbers."""

_KINDS: Final[Memo[bytes, Failure]] = Memo(_MOST_KNOWN)
"""How longer results failed, by their digests: of an agent that is stuck they come again and again."""

_WORTH_KEEPING: Final = 512
"""To read a shorter one takes no longer than its digest, in characters."""


class Reading:
    """How the turns of one conversation are read.

    Attributes:
        conversation: it.
        document: in which it stands.
        ignored: names of arguments that are thoughts.
        hints: whether tools only look, by name; None until it is asked for.
        in_text: the newest message is a scratchpad; known when the first turn is.
        left: this many characters of results may still be normalised.
        newest: the newest message; known when the first turn is.
    """

    __slots__ = ("conversation", "document", "hints", "ignored", "in_text", "left", "newest")

    def __init__(self, conversation: Conversation, document: Document, ignored: frozenset[str]) -> None:
        self.conversation = conversation
        self.document = document
        self.ignored = ignored
        self.hints: dict[str, bool] | None = None
        self.left = _MAX_NORMALIZED_IN_ALL
        self.in_text = False
        self.newest: Message | None = None

    def read_turns(self) -> Iterator[Turn]:
        """The turns, the newest first.

        A message of the assistant's that only says something, directly before one that acts, is a thought of that one.
        """
        conversation = self.conversation
        behind: list[Message] = []
        newer: Turn | None = None  # the turn whose message comes next, where nothing stands between
        messages = conversation.read_backwards()
        newest = self.newest = next(messages, None)
        if newest is None:
            return
        unfolded = unfold(newest) if newest.speaker in {USER, ASSISTANT} else [newest]
        self.in_text = len(unfolded) > 1
        for message in chain(unfolded, messages):
            if message.speaker != ASSISTANT:
                behind.append(message)
                newer = None
                continue
            turn = Turn(self, message, behind)
            if newer is not None and _acts(newer) and not _acts(turn):
                continue
            yield turn
            behind, newer = [], turn
        if conversation.elsewhere and behind and not self.document.shortened and not self.in_text:
            yield Turn(self, None, behind)

    def read_words(self) -> str:
        """The user's text in the newest message; empty if that is anything else."""
        newest = self.newest
        if newest is None or newest.speaker != USER:
            return ""
        return "".join(list_texts(newest.read_parts()))


class KnownAction(NamedTuple):
    """What one message of the assistant's does, for later requests that show it as well.

    Attributes:
        ignored: names of arguments that were taken for thoughts.
        names: as of a Turn.
        id: 16 bytes that tell what was done from all else.
        hash: the same in 8 bytes, as of a Turn.
    """

    ignored: frozenset[str]
    names: tuple[str, ...]
    id: bytes
    hash: bytes


class Turn:
    """One turn of a request; nothing of it is read before it is asked for.

    Attributes:
        known: what the assistant did stands in the request.
        answered: something stands behind that.
        in_text: it is a step of a scratchpad; see `scratchpad.py`.
        known_action: what the assistant did, if it is kept for later requests, or was; else None.
    """

    __slots__ = (
        "_action",
        "_behind",
        "_cost",
        "_evidence",
        "_failed",
        "_failure",
        "_failure_id",
        "_head",
        "_ids",
        "_mark",
        "_message",
        "_normal",
        "_normal_id",
        "_normalizes",
        "_reading",
        "_result",
        "_returned",
        "_words",
        "answered",
        "in_text",
        "known",
        "known_action",
    )

    def __init__(self, reading: Reading, message: Message | None, behind: list[Message]) -> None:
        """Take the messages.

        Args:
            reading: how they are read.
            message: the assistant's; None where the server keeps it.
            behind: what follows, the newest first.
        """
        self.known = message is not None
        self.answered = bool(behind)
        self.in_text = reading.in_text
        self._reading = reading
        self._message = message
        self._behind = behind
        self._action: AssistantAction | None = None
        self._cost = -1
        self.known_action: KnownAction | None = None
        if message is not None and message.known is not None and message.joined is None:
            self.known_action = message.known.actions[message.place]
            if self.known_action is not None and self.known_action.ignored != reading.ignored:
                self.known_action = None
        self._evidence = -1
        self._words: bytes | None = None
        self._mark: str | None = None
        self._result: str | None = None
        self._head: str | None = None
        self._normalizes: bool | None = None
        self._normal: str | None = None
        self._normal_id: bytes | None = None
        self._failed = False
        self._failure: Failure | None = None
        self._failure_id: bytes | None = None
        self._returned = False
        self._ids: set[str] = set()

    @property
    def parts(self) -> list[Part]:
        """What stands in the assistant's message. A few parts take nothing of the bounds before results are read."""
        message = self._message
        if message is None:
            return []
        if self._cost >= 0:
            return message.read_parts()
        steps, fractions = count_left()
        parts = message.read_parts()
        steps_left, fractions_left = count_left()
        self._cost = steps - steps_left
        if self._cost > _FREE or fractions != fractions_left:
            self._cost = 0
        walk(-self._cost)
        return parts

    @property
    def said(self) -> str:
        """What the assistant said beside."""
        return "\n".join(list_texts(self.parts)).strip()

    @property
    def action(self) -> AssistantAction:
        """What the assistant did; nothing where that is not known."""
        if self._action is None:
            _, fractions = count_left()
            action = read_action(self.parts, self._reading.ignored) if self.known else _UNKNOWN
            self._action = action if action.names or not self.known else self._read_failed_call() or action
            message, free = self._message, self._cost > 0 and count_left()[1] == fractions
            small = 0 < len(action.names) <= _MOST_NAMES_KEPT and len("".join(action.names)) <= _LONGEST_NAMES_KEPT
            if message is not None and message.known is not None and message.joined is None and free and small:
                spelled = action.spelled
                kept = KnownAction(self._reading.ignored, action.names, digest(spelled, _ID), digest(spelled))
                self.known_action = message.known.actions[message.place] = kept
        return self._action

    def _read_failed_call(self) -> AssistantAction | None:
        """The call that the harness left out of the history, by what it says of it."""
        parts = self._behind[-1].read_parts() if self._behind else []
        text = unpack(parts[0].value) if parts and parts[0].kind == TEXT else ""
        return read_failed_call(text) if isinstance(text, str) else None

    def may_do_as(self, other: Turn) -> bool:
        """False where it is certain, without reading it, that something else was done than in another turn."""
        message = self._message
        if self.known_action is not None:
            return True
        if other._mark is None:  # a part of its action that no request spells otherwise
            other._mark = find_mark(other.action).decode("latin-1")
        if self._action is not None or message is None or message.joined is not None or not other._mark:
            return True
        return may_hold(bytes(message.shape.find_raw(message.value)).decode("latin-1"), other._mark)

    @property
    def names(self) -> tuple[str, ...]:
        """The tools, or the first word of the command."""
        return self.known_action.names if self.known_action is not None else self.action.names

    @property
    def result(self) -> str:
        """Everything behind the action, as one text."""
        if self._result is None:
            self._result = self._read_result()
        return self._result

    @property
    def head(self) -> str:
        """The beginning of that without what changes by itself; see `normalize_head`."""
        if self._head is None:
            self._head = normalize_head(self.result)
        return self._head

    @property
    def normal(self) -> str:
        """All of it without what changes by itself."""
        if self._normal is None:
            self._normal = normalize(self.result) if self.may_normalize() else self.result
        return self._normal

    @property
    def normal_id(self) -> bytes:
        """16 bytes that tell that from others. Those of results that were compared recently are known."""
        if self._normal_id is None:
            text_id = digest(self.result.encode(), _ID)
            found = _NORMAL.get(text_id) if self.may_normalize() else text_id
            if found is None:
                found = digest(self.normal.encode(), _ID)
                _NORMAL.put(text_id, found)
            self._normal_id = found
        return self._normal_id

    def may_normalize(self) -> bool:
        """Whether the bound leaves room for it, of which it takes its part, whether it is known or not."""
        if self._normalizes is None:
            self._reading.left -= min(len(self.result), MAX_NORMALIZED)
            self._normalizes = self._reading.left >= 0
        return self._normalizes

    @property
    def returned(self) -> bool:
        """Tools brought back more than nothing."""
        _ = self.result  # which finds it out
        return self._returned

    @property
    def failed(self) -> bool:
        """What came back is an error."""
        return self.failure != NO_FAILURE

    @property
    def failure(self) -> Failure:
        """How it failed, if it did."""
        if self._failure is None:
            text = self.result  # which finds out whether the API says that it failed
            long = not self._failed and len(text) >= _WORTH_KEEPING
            key = digest(text[:SAID_WITHIN].encode(), _ID) if long else b""
            kind = _KINDS.get(key) if long else None
            if kind is None:
                kind = read_failure(text, failed=self._failed)
                if long:
                    _KINDS.put(key, kind)
            if kind == NO_FAILURE and self.known and not self._returned and not self.names and complains(text):
                kind = FATAL
            self._failure = kind
            return kind
        return self._failure

    @property
    def failure_id(self) -> bytes:
        """A few bytes that tell a failing result from those that are not alike; empty where none failed. See `alike.py`."""
        if self._failure_id is None:
            self._failure_id = self._identify_failure() if self.failed else b""
        return self._failure_id

    def _identify_failure(self) -> bytes:
        text_id = digest(self.result.encode(), _ID)
        found = _FAILURES.get(text_id) if self.may_normalize() else None
        if found is None:
            found = digest((open_result(self.result) + _NEXT + leave_out_numbers(self.normal)).encode(), _FAILURE)
            if self.may_normalize():
                _FAILURES.put(text_id, found)
        return found

    @property
    def action_size(self) -> int:
        """What was done, in bytes."""
        return self.action.size

    @property
    def evidence(self) -> int:
        """What this says about a loop: LONG, PASSING, MISSING of what came back, READS and CHANGES of what was done."""
        if self._evidence < 0:
            reading = self._reading
            if reading.hints is None:
                reading.hints = find_hints(reading.conversation)
            flags = find_role(self.names, reading.hints)
            if self.failed:
                flags = flags & ~CHANGES | _FLAGS.get(self.failure, 0)
                if self.known and not self.names:
                    flags &= ~MISSING  # nothing was looked up
            if len(self.result) >= _LONG_RESULT:
                flags |= LONG
            talks = self.known and not self.names and not self.returned
            if talks and (flags & LONG or self.failed) and reading.conversation.find_offer() == TOOLS:
                flags = flags & ~LONG | PASSING  # what is said by an agent that has tools counts little, whatever it is
            self._evidence = flags
        return self._evidence

    @property
    def words(self) -> bytes:
        """8 bytes of what a user says who answers no call and no action, digits left out; empty where none does."""
        if self._words is None:
            said = [] if self.names or self.returned else self._list_words()
            self._words = digest(" ".join(said).encode()) if said else b""
        return self._words

    def _list_words(self) -> list[str]:
        said: list[str] = []
        for message in self._behind:
            for text in list_texts(message.read_parts()) if message.speaker == USER else ():
                if not is_injected(text.strip()):
                    said += NUMBERS.sub("", strike_injected(text)).casefold().split()
        return said

    def show(self, most: int) -> str:
        """What was done and what came back, in a line for people, each cut to this many characters."""
        action = self.action.spelled.replace(b"\xff", b" | ").decode() if self.known else "unknown"
        return f"{_cut(action, most)} | {_cut(self.result, most)}"

    def identify(self) -> bytes:
        """What this turn has to itself among equal ones: what the assistant wrote, thoughts and ids included."""
        _ = self.result  # which finds it out
        return _encode([self._message.list_values() if self._message is not None else None, sorted(self._ids)])

    @property
    def action_hash(self) -> bytes:
        """What was done, in 8 bytes; zeros where that is not known."""
        if self.known_action is not None:
            return self.known_action.hash
        return digest(self.action.spelled) if self.known else bytes(_DIGEST)

    def reduce(self) -> Reduced:
        """This turn as hashes."""
        raw = digest(self.result.encode())
        return Reduced(
            self.known,
            self._returned,
            self.failed,
            self.action_hash,
            raw,
            raw if self.normal == self.result else digest(self.normal.encode()),
            self.names,
            self.evidence,
            b"" if self.names else self.words,
            self.failure_id if self.failed else b"",
            self.action.size,
        )

    def _read_result(self) -> str:
        """Results in the order of their calls, each once, and then whatever else is said; the harness's own words left out."""
        results: list[tuple[str, str]] = []
        others: list[str] = []
        for part in self.parts:  # what the server itself brought back stands in the assistant's own message
            if part.kind == RESULT:
                results.append(self._read_one(part, len(results)))
        walk(max(self._cost, 0))
        behind = self._behind[::-1]
        for message in [message for message in behind if message.speaker not in HARNESS] or behind:
            for part in message.read_parts():
                if part.kind == RESULT:
                    results.append(self._read_one(part, len(results)))
                else:
                    others.append(strike_injected(_write_said(message, part, self._reading.document)))
        self._returned = any(text for _, text in results)
        if self._returned:
            others = [text for text in others if not is_injected(text)]
        known = [text for text in others if not INJECTED_TAGS.issuperset(find_wrappers(text) or [""])]
        if results or known:
            others = known
        if len(results) > 1:
            places = self.action.places
            ranked = sorted([(places.get(identity, len(places)), text) for identity, text in results])
            results = [("", text) for _, text in dict.fromkeys(ranked)]
        return _NEXT.join([*[text for _, text in results], *[text for text in others if text]])

    def _read_one(self, part: Part, number: int) -> tuple[str, str]:
        """A result, and the id of its call."""
        self._failed = self._failed or part.failed
        if part.id:
            self._ids.add(part.id)
        text = strike_injected(read_result(part.value))
        return part.id or number_id(number), FAILURE_MARK + text if part.failed else text


class Reduced(NamedTuple):
    """A turn as hashes: one of an earlier request, as a ring keeps it.

    Attributes:
        known: as of a Turn.
        returned: tools brought back more than nothing.
        failed: what came back is an error.
        action_hash: of the action, 8 bytes; zeros where it is not known.
        raw: hash of the result.
        normalized: hash of the result without what changes by itself.
        names: as of a Turn; of an earlier request's the first alone.
        evidence: as of a Turn.
        words: as of a Turn.
        failure_id: as of a Turn.
        action_size: as of a Turn; 0 of an earlier request's.
    """

    known: bool
    returned: bool
    failed: bool
    action_hash: bytes
    raw: bytes
    normalized: bytes
    names: tuple[str, ...]
    evidence: int = 0
    words: bytes = b""
    failure_id: bytes = b""
    action_size: int = 0

    def show(self, most: int) -> str:
        """As of a Turn, as far as it was kept."""
        return f"{self.action_hash.hex()} | {self.raw.hex()}"[:most]

    def reduce(self) -> Reduced:
        """Itself."""
        return self


AnyTurn = Turn | Reduced

_UNKNOWN: Final = AssistantAction((), b"", {})

_encode: Final = json.Encoder().encode


def encode_turn(turn: AnyTurn) -> bytes:
    """A turn as an entry of a ring: flags, three hashes, as much of its first name as there is room for, and more hashes."""
    kept = turn if isinstance(turn, Reduced) else turn.reduce()
    flags = _KNOWN * kept.known | _RETURNED * kept.returned | _ERROR * kept.failed | kept.evidence
    failure = _write_bits(kept.failure_id) if kept.failure_id else b""
    rest = kept.names[0].encode()[: _ENTRY_NAME - len(failure)] if kept.names else _write_bits(kept.words)
    return bytes((flags,)) + kept.action_hash + kept.raw + kept.normalized + rest + failure


def decode_turn(entry: bytes) -> Reduced:
    """The turn of an entry that `encode_turn` has made; of an empty one nothing is known."""
    entry = entry or bytes(1 + 3 * _DIGEST)
    flags = entry[0]
    action, raw, normalized = [entry[1 + number * _DIGEST : 1 + (number + 1) * _DIGEST] for number in range(3)]
    rest = entry[REST:]
    name = rest.decode("utf-8", "ignore")
    known, returned, failed = [flags & flag != 0 for flag in (_KNOWN, _RETURNED, _ERROR)]
    names, words = ((name,), b"") if name else ((), _read_bits(rest[:_WORDS_BITS], _DIGEST))
    failure = get_failure_id(entry)
    return Reduced(known, returned, failed, action, raw, normalized, names, flags & _EVIDENCE, words, failure)


def get_failure_id(entry: bytes) -> bytes:
    """That of an entry; empty where nothing failed, or an older version wrote it; no name ends as one does."""
    if not entry or not entry[0] & _ERROR:
        return b""
    rest = entry[REST:]
    if len(rest) == _WORDS_BITS and rest[0] & ~_SIX_BITS == _NO_TEXT:
        return b""
    return _read_bits(rest[-_FAILURE_BITS:], _FAILURE)


def _write_bits(data: bytes) -> bytes:
    """A digest in bytes that are no text, six bits in each."""
    number = int.from_bytes(data, "big")
    return bytes([_NO_TEXT | number >> shift & _SIX_BITS for shift in range(0, 8 * len(data), 6)])


def _read_bits(written: bytes, size: int) -> bytes:
    """The same back, of this size; empty where that is no such thing."""
    if 6 * len(written) < 8 * size or any(byte & ~_SIX_BITS != _NO_TEXT for byte in written):
        return b""
    number = sum([(byte & _SIX_BITS) << 6 * place for place, byte in enumerate(written)])
    return (number & (1 << 8 * size) - 1).to_bytes(size, "big")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def digest(data: bytes, size: int = _DIGEST) -> bytes:
    """Bytes, usually 8, that tell data from other data."""
    return blake2b(data, digest_size=size).digest()


def same_action(one: AnyTurn, other: AnyTurn) -> bool:
    """Whether the same was done, as far as that is known."""
    if isinstance(one, Turn) and isinstance(other, Turn):
        if one.known != other.known or not other.may_do_as(one):
            return False
        if one.known_action is None or other.known_action is None:
            return one.action.spelled == other.action.spelled
        return one.known_action.id == other.known_action.id
    one, other = one.reduce(), other.reduce()
    return one.known == other.known and one.action_hash == other.action_hash


def same_result(one: AnyTurn, other: AnyTurn, *, normalized: bool) -> bool:
    """Whether the same came back; `normalized`: but for what changes by itself."""
    if isinstance(one, Turn) and isinstance(other, Turn):
        if one.result == other.result:
            return True
        if not normalized or not may_be_equal(one.head, other.head):
            return False
        if one.may_normalize() and other.may_normalize() and differ_in_lines(one.result, other.result):
            return False
        return one.normal_id == other.normal_id
    one, other = one.reduce(), other.reduce()
    return one.raw == other.raw or (normalized and one.normalized == other.normalized)


def same_turn(one: AnyTurn, other: AnyTurn, *, normalized: bool) -> bool:
    """Whether two turns are equal; where what was done is not known, something must have come back."""
    return (
        same_action(one, other)
        and (one.known or (one.returned and other.returned))
        and same_result(one, other, normalized=normalized)
    )


def may_fail_alike(one: AnyTurn, other: AnyTurn) -> bool:
    """False where it is certain, without much ado, that two results do not fail alike."""
    if isinstance(one, Turn) and isinstance(other, Turn):
        return open_result(one.result) == open_result(other.result)
    return other.failed


def fail_alike(one: AnyTurn, other: AnyTurn) -> bool:
    """Whether both failed, with the same result but for numbers."""
    return may_fail_alike(one, other) and one.failure_id != b"" and one.failure_id == other.failure_id


def weigh(turns: Sequence[AnyTurn]) -> str:
    """How strong a loop of these turns is."""
    for turn in turns:
        if turn.evidence & LONG or (turn.failed and not turn.evidence & PASSING):
            return STRONG
    return WEAK


def weigh_apart(turns: Sequence[AnyTurn]) -> str:
    """The same for turns with different or unknown actions, which may have looked up different things."""
    return weigh([turn for turn in turns if turn.evidence & LONG or not turn.evidence & MISSING])


def _write_said(message: Message, part: Part, document: Document) -> str:
    """What is said beside results, or what is no text, in one spelling; what a client has a name for, by that name."""
    if part.kind == OTHER and part.value is ABSENT:
        whole = ABSENT if part.name else message.find_whole(document)
        return part.name if whole is ABSENT else write_canonical(whole).decode()
    value = unpack(part.value)
    if part.kind == TEXT:
        return value.strip() if isinstance(value, str) else ""
    return write_canonical(value).decode()


def strike_injected(text: str) -> str:
    """A text without what a harness has put among the words of others, unless it is nothing else."""
    struck = text.partition("\n")[2].strip() if text.startswith(CALL_ID_LINE) else text
    for start, end in _MARKS:
        if struck.find(start) >= 0:
            struck = _strike(struck, start, end).strip()
    return struck or text


def _strike(text: str, start: str, end: str) -> str:
    pieces: list[str] = []
    place = 0
    while (first := text.find(start, place)) >= 0 and (last := text.find(end, first)) >= 0:
        pieces.append(text[place:first])
        place = last + len(end)
    return "".join([*pieces, text[place:]])


def read_turns(conversation: Conversation, document: Document, ignored: frozenset[str]) -> Iterator[Turn]:
    """The turns of the conversation in a document, the newest first."""
    return Reading(conversation, document, ignored).read_turns()


def _acts(turn: Turn) -> bool:
    return any(part.kind == CALL for part in turn.parts)


def leave_out_last(turns: Iterator[Turn]) -> Iterator[Turn]:
    """All turns but the oldest: where older messages are left out, some of the calls that it made at once may be among them."""
    last: Turn | None = None
    for turn in turns:
        if last is not None:
            yield last
        last = turn
