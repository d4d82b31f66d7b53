"""One turn of an agent: what the assistant does, and everything after that up to its next message.

Requests are read on demand. A turn of an earlier request is reduced to hashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Final, NamedTuple

from msgspec import Raw, json

from extproc.apis import find_hints
from extproc.apis.contents import find_wrappers, is_injected, list_texts, read_result
from extproc.apis.conversation import ASSISTANT, TOOLS, USER, Conversation, KnownMessages, Message
from extproc.apis.messages import CALL, OTHER, RESULT, TEXT, Part
from extproc.bounded import Memo
from extproc.decision import STRONG, WEAK
from extproc.detectors.actions import AssistantAction, find_mark, may_hold, number_id, read_action, read_failed_call
from extproc.detectors.alike import leave_out_numbers, open_result
from extproc.detectors.complaints import complains
from extproc.detectors.failures import FATAL, NO_FAILURE, TRANSIENT, Failure, read_failure
from extproc.detectors.failures import MISSING as NOT_FOUND
from extproc.detectors.results import MAX_NORMALIZED, count_lines, differ_in_lines, may_be_equal, normalize, normalize_head
from extproc.detectors.scratchpad import unfold
from extproc.detectors.tools import CHANGES, READS, find_role
from extproc.looks import look_for
from extproc.request.clients import CALL_ID_LINE, INJECTED_TAGS
from extproc.request.document import ABSENT, INSPECTION, MAX_STEPS, STEP, Document, open_value, write_canonical

_NEXT: Final = "\x1e"  # a record separator (ASCII), which texts rarely contain
FAILURE_MARK: Final = "\x15"  # a negative acknowledgement
_DIGEST: Final = 8
_ID: Final = 16

_MARKS: Final = [(f"<{tag}>", f"</{tag}>") for tag in sorted(INJECTED_TAGS)]
_may_be_injected: Final = look_for("|".join([start for start, _ in _MARKS]))

_MAX_NORMALIZED_IN_ALL: Final = 6 * MAX_NORMALIZED
"""Maximum length of all results of a request to normalize, in characters; others are compared unchanged."""

_MOST_KNOWN: Final = 4_096
"""Number of results in each of two generations of a cache, by digests: 2 MB at most."""

MAX_ENTRY: Final = 64
"""Longest entry of a ring, in bytes."""

_FREE: Final = 20 * STEP
_MOST_NAMES_KEPT: Final = 2
_LONGEST_NAMES_KEPT: Final = 64
"""Maximum units that a cached action takes, and number and length of its names."""

_KNOWN: Final = 1
_RETURNED: Final = 2
_ERROR: Final = 4
LONG: Final = 8
PASSING: Final = 16
MISSING: Final = 32
"""Flags of a result: it is long, its failure may be temporary, or something was not found."""

_FLAGS: Final[dict[Failure, int]] = {TRANSIENT: PASSING, NOT_FOUND: MISSING}
_EVIDENCE: Final = LONG | PASSING | MISSING | READS | CHANGES

_LONG_RESULT: Final = 200
"""Minimum length of a long result, in characters; legitimate repetition has shorter ones."""

_AS_USUAL: Final = 2
"""Messages of most turns: the assistant's, and what came back."""

LONGEST_START: Final = 192
"""Number of characters at the start of a result that are cached: twice what `open_result` returns, and more than a head."""

HARNESS: Final = frozenset({"system", "developer"})
"""Speakers of the harness's messages within a conversation: reminders that come and go, and are not part of any result."""

NUMBERS: Final = re.compile(r"[0-9]+")
_SIX_BITS: Final = 0x3F
_NO_TEXT: Final = 0x80
"""High bits of bytes that can stand in place of a name in an entry: no UTF-8 text begins with one."""
_FAILURE: Final = 3
_FAILURE_BITS: Final = 4
"""Length of the id of a failure, in bytes, and its length in an entry, which has six bits of it in each byte."""

_WORDS_BITS: Final = 11
"""Length of the digest of a user's words in an entry, in the same format."""

_ENTRY_NAME: Final = MAX_ENTRY - 1 - 3 * _DIGEST
RAW: Final = 1 + _DIGEST
NORMALIZED: Final = RAW + _DIGEST
REST: Final = NORMALIZED + _DIGEST
"""Offsets in an entry: of the result's hashes, and of what is behind them."""


_NORMAL: Final[Memo[bytes, bytes]] = Memo(_MOST_KNOWN)
"""A cache of digests of normalized results, by digests of the results, because polling agents send these repeatedly."""

_FAILURES: Final[Memo[bytes, bytes]] = Memo(_MOST_KNOWN)
"""A cache of ids of failures, by digests of the results."""


_starts: Final = [blake2b(digest_size=size or 1).copy for size in range(_ID + 1)]


class Reading:
    """Reads the turns of one conversation.

    Attributes:
        conversation: the conversation.
        document: the document that contains it.
        ignored: names of arguments that are thoughts.
        hints: whether tools only read, by name; None until they are needed.
        in_text: the newest message is a scratchpad; known when the first turn is.
        left: number of characters of results that may still be normalized.
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

    def read_turns(self) -> Iterator[Turn]:  # noqa: C901, PLR0912  # a generator within a generator is slow
        """The turns, newest first.

        An assistant's message without calls, directly before one with calls, is a thought of the latter.
        """
        conversation = self.conversation
        behind: list[Message] = []
        shown = False
        newer: Turn | None = None  # the turn whose message comes next, if nothing is in between
        messages = conversation.read_backwards()
        newest = self.newest = next(messages, None)
        if conversation.prefilled and newest is not None:
            newest = self.newest = next(messages, None)
        if newest is None:
            return
        unfolded = unfold(newest) if newest.speaker in {USER, ASSISTANT} else [newest]
        self.in_text = len(unfolded) > 1
        known = conversation.known
        if len(conversation) > MAX_STEPS or conversation.shape.joins is not None or conversation.elsewhere or self.in_text:
            known = None
        for message in chain(unfolded, messages):
            if message.speaker != ASSISTANT:
                behind.append(message)
                newer = None
                continue
            turn = Turn(self, message, behind)
            if newer is not None and (_acts(newer) or not newer.known) and not _acts(turn):
                continue
            yield turn
            behind, newer, shown = [], turn, True
            if known is not None:
                break
        if known is not None and newer is not None:  # the messages of older turns are only made if they are needed
            end, speakers = newer.span[0], known.speakers
            for place in range(end - 1, -1, -1):
                speaker = speakers[place]
                if speaker == ASSISTANT:
                    turn = Turn(self, None, [], place, end)
                    end = place
                    if newer is not None and _acts(newer) and not _acts(turn):
                        continue
                    yield turn
                    newer = turn
                elif speaker:
                    newer = None
            return
        unknown = conversation.elsewhere or (not shown and _holds_results(behind[:1]))
        if behind and unknown and not self.document.shortened and not self.in_text:
            yield Turn(self, None, behind)

    def read_words(self) -> str:
        """The user's text in the newest message; empty if that is not a user's."""
        newest = self.newest
        if newest is None or newest.speaker != USER:
            return ""
        return "".join(list_texts(newest.read_parts()))


class KnownAction:
    """The action in an assistant's message, cached for later requests that contain the message; never changed.

    Attributes:
        ignored: names of the arguments that were treated as thoughts; see `share_names`.
        names: as in `Turn`.
        id: digest of the action, 16 bytes.
        hash: digest of the action, 8 bytes, as in `Turn`.
        size: length of the action, in bytes.
        calls: as in `Turn`.
        mark: see `find_mark`; None if not known yet.
    """

    __slots__ = ("calls", "hash", "id", "ignored", "mark", "names", "size")

    def __init__(self, ignored: frozenset[str], action: AssistantAction) -> None:
        self.ignored = ignored
        self.names = action.names
        self.id = digest(action.spelled, _ID)
        self.hash = digest(action.spelled)
        self.size = action.size
        self.calls = bool(action.places)
        self.mark: str | None = None


class KnownResult:
    """What came after the action of a turn, cached for later requests that contain the same messages.

    Attributes:
        ignored: as in `KnownAction`.
        serials: of the turn's messages; see `KnownMessages`.
        units: units that it takes to read the result, without those for messages behind the assistant's; see `Inspection`.
        heard: units for these.
        returned: as in `Turn`.
        hash: Python's hash of the result.
        size: length of the result, in characters.
        images: as in `Turn`.
        start: of the result, as much as `normalize_head` and `open_result` need.
        overwrites: there is a carriage return in the result.
        escapes: there is a backslash in the result.
        lines: number of line ends in the result; -1 if they were not counted yet.
        head: as in `Turn`; None if not known yet, as everything below.
        opening: as in `Turn`.
        failure: as in `Turn`.
        failure_id: as in `Turn`, of a normalized result.
        normal_id: as in `Turn`, of a normalized result.
        result_id: as in `Turn`.
        raw: as in `Reduced`.
        normalized: as in `Reduced`, of a normalized result.
    """

    __slots__ = (
        "escapes",
        "failure",
        "failure_id",
        "hash",
        "head",
        "heard",
        "ignored",
        "images",
        "lines",
        "normal_id",
        "normalized",
        "opening",
        "overwrites",
        "raw",
        "result_id",
        "returned",
        "serials",
        "size",
        "start",
        "units",
    )

    def __init__(  # noqa: PLR0913  # a record
        self,
        ignored: frozenset[str],
        serials: list[int],
        units: int,
        heard: int,
        result: str,
        images: bytes,
        *,
        returned: bool,
    ) -> None:
        """Take a result."""
        self.ignored = ignored
        self.serials = serials
        self.units = units
        self.heard = heard
        self.returned = returned
        self.hash = hash(result)
        self.size = len(result)
        self.images = images
        self.start = result[:LONGEST_START]
        self.overwrites = "\r" in result
        self.escapes = "\\" in result
        self.lines = -1
        self.head: str | None = None
        self.opening: str | None = None
        self.failure: Failure | None = None
        self.failure_id: bytes | None = None
        self.normal_id: bytes | None = None
        self.result_id: bytes | None = None
        self.raw: bytes | None = None
        self.normalized: bytes | None = None

    def is_of(self, known: KnownMessages, place: int, end: int, ignored: frozenset[str]) -> bool:
        """Whether it is of the turn with these messages. The assistant's is known to be the same."""
        serials = self.serials
        if len(serials) != end - place or serials[-1] != known.serials[end - 1]:
            return False
        if len(serials) > _AS_USUAL and serials != known.serials[place:end]:
            return False
        return self.ignored is ignored


class Turn:
    """One turn of a request, which is read on demand.

    Attributes:
        known: the request shows what the assistant did.
        in_text: it is a step of a scratchpad; see `scratchpad.py`.
        known_action: what the assistant did, if it is kept for later requests, or was; else None.
    """

    __slots__ = (
        "_action",
        "_behind",
        "_bounded",
        "_cost",
        "_end",
        "_evidence",
        "_failed",
        "_failure",
        "_failure_id",
        "_head",
        "_ids",
        "_images",
        "_kept",
        "_lacks",
        "_mark",
        "_message",
        "_needs_whole",
        "_normal",
        "_normal_id",
        "_normalizes",
        "_opening",
        "_place",
        "_reading",
        "_reduced",
        "_result",
        "_result_id",
        "_returned",
        "_taken",
        "_words",
        "in_text",
        "known",
        "known_action",
    )

    def __init__(
        self, reading: Reading, message: Message | None, behind: list[Message], place: int = -1, end: int = -1
    ) -> None:
        """Take the messages, or their indexes.

        Args:
            reading: reads them.
            message: the assistant's; None if the server keeps it, or if there is a `place`.
            behind: what follows, newest first.
            place: index of the assistant's message in a cached conversation.
            end: index behind the last message.
        """
        self.known = place >= 0 or (message is not None and not message.is_reference())
        self.in_text = reading.in_text
        self._reading = reading
        self._message = message
        self._behind: list[Message] | None = behind
        known = reading.conversation.known
        if message is None and place >= 0:
            self._behind = None
        elif message is None or message.known is None or message.joined is not None:
            known = None
        else:
            place, end = message.place, (behind[0].place if behind else message.place) + 1
        self._place = place
        self._end = end
        self._action: AssistantAction | None = None
        self._cost = -1
        self._bounded = False  # it takes units to read the action, besides those of its message
        self.known_action: KnownAction | None = None
        self._kept: KnownResult | None = None
        self._taken = -1
        self._needs_whole = False
        if known is not None:
            ignored = reading.ignored
            kept: KnownAction | None = known.actions[place]
            if kept is not None and kept.ignored is ignored:
                self.known_action = kept
            result: KnownResult | None = known.results[place]
            if result is not None and result.is_of(known, place, end, ignored):
                self._kept = result
        self._evidence = -1
        self._words: bytes | None = None
        self._mark: str | None = None
        self._lacks = ""  # a mark that its action is known not to have
        self._result: str | None = None
        self._result_id: bytes | None = None
        self._opening: str | None = None
        self._head: str | None = None
        self._normalizes: bool | None = None
        self._normal: str | None = None
        self._normal_id: bytes | None = None
        self._reduced: Reduced | None = None
        self._failed = False
        self._failure: Failure | None = None
        self._failure_id: bytes | None = None
        self._returned = False
        self._images = b""
        self._ids: set[str] = set()

    @property
    def referenced(self) -> bool:
        """Whether the request refers to what the assistant did."""
        return self._message is not None and not self.known

    @property
    def answered(self) -> bool:
        """Whether something follows."""
        return bool(self._list_behind())

    @property
    def stands_alone(self) -> bool:
        """Whether nothing follows before the assistant's next message, so that no request ended with this turn."""
        if self._behind is not None:
            return not self._behind
        name = self._reading.conversation.name_speaker
        return not "".join([name(place) for place in range(self._place + 1, self._end)])

    def _open(self) -> Message | None:
        """The assistant's message; None if the server keeps it."""
        if self._message is None and self._place >= 0:
            conversation = self._reading.conversation
            self._message = Message(conversation.shape, ASSISTANT, self._place, conversation)
        return self._message

    def _list_behind(self) -> list[Message]:
        """The messages behind the assistant's, newest first."""
        if self._behind is None:
            shape, conversation = self._reading.conversation.shape, self._reading.conversation
            places = [(place, conversation.name_speaker(place)) for place in range(self._end - 1, self._place, -1)]
            self._behind = [Message(shape, speaker, place, conversation) for place, speaker in places if speaker]
        return self._behind

    @property
    def parts(self) -> list[Part]:
        """What stands in the assistant's message. A few parts take no units before results are read."""
        message = self._open()
        if message is None:
            return []
        if self._cost >= 0:
            return message.read_parts()
        left = INSPECTION.left
        parts = message.read_parts()
        self._cost = left - INSPECTION.left
        if self._cost > _FREE:
            self._cost = 0
        INSPECTION.take(-self._cost)
        return parts

    @property
    def said(self) -> str:
        """The text in the assistant's message."""
        return "\n".join(list_texts(self.parts)).strip()

    @property
    def action(self) -> AssistantAction:
        """What the assistant did; nothing if that is unknown."""
        if self._action is None:
            left = INSPECTION.left
            action = read_action(self.parts, self._reading.ignored) if self.known else _UNKNOWN
            self._action = action if action.names or not self.known else self._read_failed_call() or action
            self._bounded = INSPECTION.left != left
            message, free = self._open(), self._cost > 0 and not self._bounded
            small = 0 < len(action.names) <= _MOST_NAMES_KEPT and len("".join(action.names)) <= _LONGEST_NAMES_KEPT
            if message is not None and message.known is not None and message.joined is None and free and small:
                kept = KnownAction(self._reading.ignored, action)
                self.known_action = message.known.actions[message.place] = kept
        return self._action

    def _read_failed_call(self) -> AssistantAction | None:
        """The call that the harness left out of the history, according to its report; None if there is none."""
        if self._taken > 0:
            _ = self.result  # for which the messages that are read here may have been counted
        behind = self._list_behind()
        parts = behind[-1].read_parts() if behind else []
        text = open_value(parts[0].value) if parts and parts[0].kind == TEXT else ""
        return read_failed_call(text) if isinstance(text, str) else None

    def may_do_as(self, other: Turn) -> bool:
        """False if a check without decoding shows that the action differs from another turn's."""
        if self.known_action is not None:
            return True
        message, mark = self._open(), other._mark
        if mark is None:  # a part of its action that no request spells otherwise
            known = other.known_action
            mark = known.mark if known is not None else None
            if mark is None:
                mark = find_mark(other.action).decode("latin-1")
                known = other.known_action  # which is there now, if the action is kept
                if known is not None:
                    known.mark = mark
            other._mark = mark
        if self._action is not None or message is None or message.joined is not None or not mark:
            return True
        if mark == self._lacks:
            return False
        if message.known is not None:  # a check without decoding the message
            written = self._reading.conversation.show_raw(message.place)
            if not may_hold(written.decode("latin-1"), mark):
                self._lacks = mark
                return False
        if may_hold(bytes(message.shape.find_raw(message.value)).decode("latin-1"), mark):
            return True
        self._lacks = mark
        return False

    @property
    def names(self) -> tuple[str, ...]:
        """The tools, or the first word of the command."""
        return self.known_action.names if self.known_action is not None else self.action.names

    @property
    def calls(self) -> bool:
        """Whether the names are of tools that were called, and not words of a text."""
        return self.known_action.calls if self.known_action is not None else bool(self.action.places)

    @property
    def span(self) -> tuple[int, int]:
        """The indexes of the assistant's first and last message in the turn, the same for most; -1 if the server has them."""
        message = self._message
        if message is None:
            return self._place, self._place
        return message.joined[-1].place if message.joined is not None else message.place, message.place

    @property
    def result(self) -> str:
        """Everything after the action, as one text."""
        if self._result is None:
            if self._taken > 0:
                INSPECTION.take(-self._taken)
            self._taken = 0
            self._result = self._read_result() if self._kept is not None else self._read_new_result()
        return self._result

    def _read_new_result(self) -> str:
        """The result, which is cached with the conversation if reading it again takes as many units."""
        known = self._reading.conversation.known
        if known is None or self._place < 0:
            return self._read_result()
        heard = self._list_heard()
        taken = sum([message.units for message in heard])
        left = INSPECTION.left
        result = self._read_result()
        if self._cost > 0 and not self._bounded and not self._needs_whole:
            serials, all_heard = known.serials[self._place : self._end], sum([message.units for message in heard])
            own = left - INSPECTION.left + taken - all_heard
            images, returned = self._images, self._returned
            kept = KnownResult(self._reading.ignored, serials, own, all_heard, result, images, returned=returned)
            self._kept = known.results[self._place] = kept
        return result

    def _recall(self) -> KnownResult | None:
        """What is cached of the result, or was just read. It takes as many units as the result itself."""
        kept = self._kept
        if kept is None:
            _ = self.result
            return self._kept
        if self._taken < 0:
            taken = kept.units + kept.heard
            if self._behind is not None:  # some may have been read before
                taken -= sum([message.units for message in self._list_heard()])
            self._taken = taken
            INSPECTION.take(taken)
        return kept

    @property
    def size(self) -> int:
        """The length of the result, in characters."""
        kept = self._recall()
        return kept.size if kept is not None else len(self.result)

    @property
    def lines(self) -> int:
        """The number of line ends in the result, or -1 if some may be escaped."""
        kept = self._recall()
        if kept is None:
            return count_lines(self.result)
        if kept.lines < 0 and not kept.escapes:
            kept.lines = count_lines(self.result)
        return kept.lines

    def returns_same(self, other: Turn) -> bool:
        """Whether the results are equal."""
        mine, others = self._recall(), other._recall()
        if mine is None or others is None:
            return self.result == other.result
        return mine.hash == others.hash and mine.size == others.size

    @property
    def head(self) -> str:
        """The start of the result without volatile parts; see `normalize_head`."""
        if self._head is None:
            kept = self._recall()
            if kept is None:
                self._head = normalize_head(self.result)
            else:
                if kept.head is None:
                    kept.head = normalize_head(kept.start, kept.size, overwrites=kept.overwrites)
                self._head = kept.head
        return self._head

    @property
    def opening(self) -> str:
        """The start of the result without digits; see `open_result`."""
        if self._opening is None:
            kept = self._recall()
            if kept is None:
                self._opening = open_result(self.result)
            else:
                if kept.opening is None:
                    kept.opening = open_result(kept.start)
                self._opening = kept.opening
        return self._opening

    @property
    def result_id(self) -> bytes:
        """A digest of `result`, 16 bytes."""
        if self._result_id is None:
            kept = self._recall()
            found = kept.result_id if kept is not None else None
            if found is None:
                found = digest(self.result.encode(), _ID)
                if kept is not None:
                    kept.result_id = found
            self._result_id = found
        return self._result_id

    @property
    def normal(self) -> str:
        """The result without volatile parts, or unchanged if `may_normalize` is False."""
        if self._normal is None:
            self._normal = normalize(self.result) if self.may_normalize() else self.result
        return self._normal

    @property
    def normal_id(self) -> bytes:
        """A digest of `normal`, 16 bytes; those of recently compared results are cached."""
        if self._normal_id is None:
            kept, bounded = self._recall(), not self.may_normalize()
            found = self.result_id if bounded else kept.normal_id if kept is not None else None
            if found is None:
                found = _NORMAL.get(self.result_id)
            if found is None:
                normal = self.normal
                found = self.result_id if normal == self.result else digest(normal.encode(), _ID)
                _NORMAL.put(self.result_id, found)
            if kept is not None and not bounded:
                kept.normal_id = found
            self._normal_id = found
        return self._normal_id

    def may_normalize(self) -> bool:
        """Whether the bound leaves room for the result, which uses up its part even if it is cached."""
        if self._normalizes is None:
            self._reading.left -= min(self.size, MAX_NORMALIZED)
            self._normalizes = self._reading.left >= 0
        return self._normalizes

    @property
    def returned(self) -> bool:
        """Whether tools returned anything."""
        kept = self._recall()  # which reads the result if it is not cached
        return kept.returned if kept is not None else self._returned

    @property
    def images(self) -> bytes:
        """A digest of the images beside results; empty for none. See `Part`."""
        kept = self._recall()
        return kept.images if kept is not None else self._images

    @property
    def failed(self) -> bool:
        """Whether the result is a failure."""
        return self.failure != NO_FAILURE

    @property
    def failure(self) -> Failure:
        """How it failed, if it did."""
        if self._failure is None:
            kept = self._recall()
            if kept is not None and kept.failure is not None:
                self._failure = kept.failure
                return kept.failure
            text = self.result  # which sets `_failed`: the API says so
            kind = read_failure(text, failed=self._failed)
            if kind == NO_FAILURE and self.known and not self._returned and not self.names and complains(text):
                kind = FATAL
            self._failure = kind
            if kept is not None:
                kept.failure = kind
            return kind
        return self._failure

    @property
    def failure_id(self) -> bytes:
        """An id of a few bytes that similar failures share; empty if the result is no failure. See `alike.py`."""
        if self._failure_id is None:
            self._failure_id = self._identify_failure() if self.failed else b""
        return self._failure_id

    def _identify_failure(self) -> bytes:
        kept = self._recall() if self.may_normalize() else None
        if kept is not None and kept.failure_id is not None:
            return kept.failure_id
        found = _FAILURES.get(self.result_id) if self.may_normalize() else None
        if found is None:
            found = digest((self.opening + _NEXT + leave_out_numbers(self.normal)).encode(), _FAILURE)
            if self.may_normalize():
                _FAILURES.put(self.result_id, found)
        if kept is not None:
            kept.failure_id = found
        return found

    @property
    def action_size(self) -> int:
        """The length of the action, in bytes."""
        return (self.known_action or self.action).size

    @property
    def evidence(self) -> int:
        """The evidence for a loop: flags LONG, PASSING and MISSING of the result, READS and CHANGES of the action."""
        if self._evidence < 0:
            reading = self._reading
            if reading.hints is None:
                reading.hints = find_hints(reading.conversation)
            flags = find_role(self.names, reading.hints)
            if self.failed:
                flags = flags & ~CHANGES | _FLAGS.get(self.failure, 0)
                if self.known and not self.names:
                    flags &= ~MISSING  # nothing was looked up
            if self.size >= _LONG_RESULT:
                flags |= LONG
            talks = self.known and not self.names and not self.returned
            if talks and (flags & LONG or self.failed) and reading.conversation.find_offer() == TOOLS:
                flags = flags & ~LONG | PASSING  # what is said by an agent that has tools counts little, whatever it is
            self._evidence = flags
        return self._evidence

    @property
    def words(self) -> bytes:
        """A digest, 8 bytes, of what a user says, without digits; empty if there is nothing, or if it answers an action."""
        if self._words is None:
            said = self._list_words() if self._may_be_spoken_to() and not self.names and not self.returned else []
            self._words = digest(" ".join(said).encode()) if said else b""
        return self._words

    def _may_be_spoken_to(self) -> bool:
        """Whether a user says something, and no tool is known to be called: a check without reading what the calls are."""
        if self.known_action is not None or USER not in [message.speaker for message in self._list_behind()]:
            return False
        return not _acts(self)

    def _list_words(self) -> list[str]:
        said: list[str] = []
        _ = self.result  # for which the messages that are read here may have been counted
        for message in self._list_behind():
            for text in list_texts(message.read_parts()) if message.speaker == USER else ():
                if not is_injected(text.strip()):
                    said += NUMBERS.sub("", strike_injected(text)).casefold().split()
        return said

    def show(self, most: int) -> str:
        """Action and result in a line for people, each cut to this many characters."""
        action = self.action.spelled.replace(b"\xff", b" | ").decode() if self.known else "unknown"
        return f"{_cut(action, most)} | {_cut(self.result, most)}"

    def identify(self) -> bytes:
        """What distinguishes this turn from equal ones: all that the assistant wrote, including thoughts, and ids."""
        _ = self.result  # which collects the ids
        message = self._open()
        return _encode([message.list_values() if message is not None else None, sorted(self._ids)])

    @property
    def action_hash(self) -> bytes:
        """What was done, in 8 bytes; zeros where that is not known."""
        if self.known_action is not None:
            return self.known_action.hash
        return digest(self.action.spelled) if self.known else bytes(_DIGEST)

    def reduce(self) -> Reduced:
        """This turn as hashes."""
        if self._reduced is not None:
            return self._reduced
        kept = self._recall()
        raw, normalized = self._hash_result(kept)
        made = Reduced(
            self.known,
            kept.returned if kept is not None else self._returned,
            self.failed,
            self.action_hash,
            raw,
            normalized,
            self.names,
            self.evidence,
            b"" if self.names else self.words,
            self.failure_id if self.failed else b"",
            (self.known_action or self.action).size,
        )
        self._reduced = made
        return made

    def _hash_result(self, kept: KnownResult | None) -> tuple[bytes, bytes]:
        """Hashes of the result, and of the result without volatile parts; other replicas compare them, too."""
        if kept is not None and kept.raw is not None and kept.normalized is not None and self.may_normalize():
            return kept.raw, kept.normalized
        raw = digest(self.result.encode() + self.images)
        normalized = raw if self.normal == self.result else digest(self.normal.encode() + self.images)
        if kept is not None and self.may_normalize():
            kept.raw, kept.normalized = raw, normalized
        return raw, normalized

    def _list_heard(self) -> list[Message]:
        """The messages behind the assistant's that are read, oldest first: the harness's only if there are no others."""
        behind = self._list_behind()[::-1]
        return [message for message in behind if message.speaker not in HARNESS] or behind

    def _read_result(self) -> str:
        """Results in the order of their calls, each once, then anything else that was said, except by the harness."""
        results: list[tuple[str, str]] = []
        others: list[str] = []
        images: list[bytes] = []
        for part in self.parts:  # results of the server's own tools are in the assistant's message
            if part.kind == RESULT:
                results.append(self._read_one(part, len(results)))
        INSPECTION.take(max(self._cost, 0))
        for message in self._list_heard():
            for part in message.read_parts():
                if part.images is not ABSENT:
                    images.append(digest_images(part))
                if part.kind == RESULT:
                    results.append(self._read_one(part, len(results)))
                else:
                    self._needs_whole |= part.kind == OTHER and part.value is ABSENT
                    others.append(strike_injected(_write_said(message, part, self._reading.document)))
        self._returned = any(text for _, text in results) or len(images) > 0
        self._images = digest(b"".join(sorted(set(images)))) if images else b""
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
        """The id of a result's call, and the result."""
        self._failed = self._failed or part.failed
        if part.id:
            self._ids.add(part.id)
        text = strike_injected(read_result(part.value))
        return part.id or number_id(number), FAILURE_MARK + text if part.failed else text


class Reduced(NamedTuple):
    """A turn as hashes: one of an earlier request, as a ring keeps it.

    Attributes:
        known: see `Turn`.
        returned: see `Turn`.
        failed: see `Turn`.
        action_hash: see `Turn`.
        raw: hash of the result.
        normalized: hash of the result without volatile parts.
        names: see `Turn`; from a ring, only the first.
        evidence: see `Turn`.
        words: see `Turn`.
        failure_id: see `Turn`.
        action_size: see `Turn`; from a ring, 0.
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
        """The hashes of action and result in a line, because only these were kept."""
        return f"{self.action_hash.hex()} | {self.raw.hex()}"[:most]

    def reduce(self) -> Reduced:
        """This turn, because it is reduced already."""
        return self


AnyTurn = Turn | Reduced

_UNKNOWN: Final = AssistantAction((), b"", {})

_encode: Final = json.Encoder().encode


def encode_turn(turn: AnyTurn) -> bytes:
    """A turn as an entry of a ring: flags, three hashes, as much of its first name as fits, or its words, and its failure."""
    kept = turn if isinstance(turn, Reduced) else turn.reduce()
    failure = _write_bits(kept.failure_id) if kept.failure_id else b""
    rest = kept.names[0].encode()[: _ENTRY_NAME - len(failure)] if kept.names else _write_bits(kept.words)
    flags = _KNOWN * kept.known | _RETURNED * kept.returned | _ERROR * kept.failed | kept.evidence
    return bytes((flags,)) + kept.action_hash + kept.raw + kept.normalized + rest + failure


def decode_turn(entry: bytes) -> Reduced:
    """The turn in an entry that `encode_turn` has made; an unknown turn for an empty entry."""
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
    """The failure id in an entry; empty if nothing failed. No name ends like an id."""
    if not entry or not entry[0] & _ERROR:
        return b""
    rest = entry[REST:]
    if len(rest) == _WORDS_BITS and rest[0] & ~_SIX_BITS == _NO_TEXT:
        return b""
    return _read_bits(rest[-_FAILURE_BITS:], _FAILURE)


def _write_bits(data: bytes) -> bytes:
    """Write a digest in bytes that are no text, six bits in each."""
    number = int.from_bytes(data, "big")
    return bytes([_NO_TEXT | number >> shift & _SIX_BITS for shift in range(0, 8 * len(data), 6)])


def _read_bits(written: bytes, size: int) -> bytes:
    """Read a digest of this size that `_write_bits` wrote; empty if it is something else."""
    if 6 * len(written) < 8 * size or any(byte & ~_SIX_BITS != _NO_TEXT for byte in written):
        return b""
    number = sum([(byte & _SIX_BITS) << 6 * place for place, byte in enumerate(written)])
    return (number & (1 << 8 * size) - 1).to_bytes(size, "big")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def digest(data: bytes, size: int = _DIGEST) -> bytes:
    """A hash of data, `size` bytes long."""
    hashed = _starts[size]()  # a copy takes less time than a new one
    hashed.update(data)
    made: bytes = hashed.digest()
    return made


def same_action(one: AnyTurn, other: AnyTurn) -> bool:
    """Whether the actions are equal, or both unknown."""
    if isinstance(one, Turn) and isinstance(other, Turn):
        if one.known != other.known or not other.may_do_as(one):
            return False
        if one.known_action is None or other.known_action is None:
            return one.action.spelled == other.action.spelled
        return one.known_action.id == other.known_action.id
    one, other = one.reduce(), other.reduce()
    return one.known == other.known and one.action_hash == other.action_hash


def digest_images(part: Part) -> bytes:
    """A digest of a part's images."""
    return digest(bytes(part.images) if isinstance(part.images, Raw) else write_canonical(part.images))


def same_result(one: AnyTurn, other: AnyTurn, *, normalized: bool) -> bool:
    """Whether the results are equal; `normalized`: except for volatile parts. Only turns that both have images compare them."""
    if isinstance(one, Turn) and isinstance(other, Turn):
        if one.images != other.images and one.images and other.images:
            return False
        if one.returns_same(other):
            return True
        if not normalized or not may_be_equal(one.head, other.head):
            return False
        if one.may_normalize() and other.may_normalize() and differ_in_lines(one.lines, other.lines):
            return False
        return one.normal_id == other.normal_id
    one, other = one.reduce(), other.reduce()
    return one.raw == other.raw or (normalized and one.normalized == other.normalized)


def same_turn(one: AnyTurn, other: AnyTurn, *, normalized: bool) -> bool:
    """Whether two turns are equal; if their actions are unknown, tools must have returned something."""
    return (
        same_action(one, other)
        and (one.known or (one.returned and other.returned))
        and same_result(one, other, normalized=normalized)
    )


def may_fail_alike(one: AnyTurn, other: AnyTurn) -> bool:
    """False if a fast check shows that two results are not similar failures."""
    if isinstance(one, Turn) and isinstance(other, Turn):
        return one.opening == other.opening
    return other.failed


def fail_alike(one: AnyTurn, other: AnyTurn) -> bool:
    """Whether both turns failed with the same result, except for numbers."""
    return may_fail_alike(one, other) and one.failure_id != b"" and one.failure_id == other.failure_id


def weigh(turns: Sequence[AnyTurn]) -> str:
    """The strength of a loop of these turns."""
    for turn in turns:
        if turn.evidence & LONG or (turn.failed and not turn.evidence & PASSING):
            return STRONG
    return WEAK


def weigh_apart(turns: Sequence[AnyTurn]) -> str:
    """The strength if actions are different or unknown, so that failed look-ups may be of different things."""
    return weigh([turn for turn in turns if turn.evidence & LONG or not turn.evidence & MISSING])


def _write_said(message: Message, part: Part, document: Document) -> str:
    """Text beside results, or other content in canonical spelling, or by its name if it has one."""
    if part.kind == OTHER and part.value is ABSENT:
        whole = ABSENT if part.name else message.find_whole(document)
        return part.name if whole is ABSENT else write_canonical(whole).decode()
    value = open_value(part.value)
    if part.kind == TEXT:
        return value.strip() if isinstance(value, str) else ""
    return write_canonical(value).decode()


def strike_injected(text: str) -> str:
    """A text without what a harness has injected; unchanged if there is nothing else."""
    struck = text.partition("\n")[2].strip() if text.startswith(CALL_ID_LINE) else text
    for start, end in _MARKS if _may_be_injected(struck) else ():
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
    """The turns of the conversation in a document, newest first."""
    return Reading(conversation, document, ignored).read_turns()


def _acts(turn: Turn) -> bool:
    return any(part.kind == CALL for part in turn.parts)


def _holds_results(messages: list[Message]) -> bool:
    """Whether there are results among messages before the assistant's first one, so that it called something before."""
    return RESULT in [part.kind for message in messages for part in message.read_parts()]


def leave_out_last(turns: Iterator[Turn]) -> Iterator[Turn]:
    """All turns except the oldest, some of whose calls may be in older messages that were left out."""
    last: Turn | None = None
    for turn in turns:
        if last is not None:
            yield last
        last = turn
