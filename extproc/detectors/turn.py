"""One turn of an agent: an assistant message, and everything after it up to the next one.

Requests are read lazily. What is read of a turn is cached with the facts of its messages, for later
readers and requests; see `MessageFacts`. A turn of an earlier request is reduced to hashes.
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
from extproc.apis.conversation import (
    ASSISTANT,
    TOOLS,
    USER,
    Conversation,
    Group,
    Message,
    MessageFacts,
)
from extproc.apis.messages import OTHER, RESULT, TEXT, Part
from extproc.decision import STRONG, WEAK
from extproc.detectors.actions import AssistantAction, number_id, read_action, read_failed_call
from extproc.detectors.alike import leave_out_numbers, open_result
from extproc.detectors.complaints import complains, leave_out_answer
from extproc.detectors.empty import is_empty
from extproc.detectors.failures import (
    FATAL,
    MISSING as NOT_FOUND,
    NO_FAILURE,
    TRANSIENT,
    Failure,
    read_failure,
)
from extproc.detectors.results import (
    MAX_NORMALIZED,
    count_lines,
    differ_in_lines,
    may_be_equal,
    normalize,
    normalize_head,
)
from extproc.detectors.scratchpad import IN_SYSTEM, unfold
from extproc.detectors.tools import CHANGES, READS, find_role
from extproc.looks import look_for
from extproc.request.clients import CALL_ID_LINE, INJECTED_TAGS
from extproc.request.document import (
    ABSENT,
    INSPECTION,
    MAX_STEPS,
    Document,
    open_value,
    write_canonical,
)

_NEXT: Final = "\x1e"  # a record separator (ASCII), which texts rarely contain
FAILURE_MARK: Final = "\x15"  # a negative acknowledgement
_DIGEST: Final = 8

_MARKS: Final = [(f"<{tag}>", f"</{tag}>") for tag in sorted(INJECTED_TAGS)]
_may_be_injected: Final = look_for("|".join([start for start, _ in _MARKS]))

_LEAST_WITH_SYSTEM: Final = 3
"""Messages of a request that has a history in a system message: two of the program and the task."""

_MAX_NORMALIZED_IN_ALL: Final = 6 * MAX_NORMALIZED
"""Maximum length of all results of a request to normalize, in characters; others are compared
unchanged."""

MAX_ENTRY: Final = 64
"""Longest entry of a ring, in bytes."""

_MOST_NAMES_KEPT: Final = 8
_LONGEST_NAMES_KEPT: Final = 256
"""Maximum number and length of the names of an action that is cached with its message."""

_KNOWN: Final = 1
_RETURNED: Final = 2
_ERROR: Final = 4
LONG: Final = 8
PASSING: Final = 16
MISSING: Final = 32
"""Flags of a result: it is long, its failure may be temporary, or something was not found.

Without a failure, MISSING means an empty result of a tool that only reads.
"""

_FLAGS: Final[dict[Failure, int]] = {TRANSIENT: PASSING, NOT_FOUND: MISSING}
_EVIDENCE: Final = LONG | PASSING | MISSING | READS | CHANGES

_LONG_RESULT: Final = 200
"""Minimum length of a long result, in characters; legitimate repetition has shorter ones."""

HARNESS: Final = frozenset({"system", "developer"})
"""Speakers of the harness's messages within a conversation: reminders that come and go, and belong
to no result."""

NUMBERS: Final = re.compile(r"[0-9]+")
_SIX_BITS: Final = 0x3F
_NO_TEXT: Final = 0x80
"""High bits of bytes that may replace a name in an entry: no UTF-8 text begins with them."""
_FAILURE: Final = 3
_FAILURE_BITS: Final = 4
"""Length of a failure's id, in bytes, and its length in an entry, with six bits in each byte."""

_WORDS_BITS: Final = 11
"""Length of the digest of a user's words in an entry, in the same format."""

_ENTRY_NAME: Final = MAX_ENTRY - 1 - 3 * _DIGEST
RAW: Final = 1 + _DIGEST
NORMALIZED: Final = RAW + _DIGEST
REST: Final = NORMALIZED + _DIGEST
"""Offsets in an entry: of the result's hashes, and of the rest."""

_starts: Final = [blake2b(digest_size=size or 1).copy for size in range(17)]


class Reading:
    """Reads the turns of one conversation.

    Attributes:
        conversation: the conversation.
        document: the document that contains it.
        ignored: names of arguments that are thoughts.
        hints: whether tools only read, by name; None until needed.
        left: number of characters of results that may still be normalized.
        newest: the newest message, except a prefill; None if there is none.
        unfolded: the messages of a scratchpad if it is one; else at most itself.
        in_text: it is a scratchpad.
    """

    def __init__(
        self, conversation: Conversation, document: Document, ignored: frozenset[str]
    ) -> None:
        self.conversation = conversation
        self.document = document
        self.ignored = ignored
        self.hints: dict[str, bool] | None = None
        self.left = _MAX_NORMALIZED_IN_ALL
        self.newest = conversation.open_newest()
        self.unfolded = self._unfold()
        self.in_text = len(self.unfolded) > 1

    def _unfold(self) -> list[Message]:
        newest, conversation = self.newest, self.conversation
        if newest is None:
            return []
        shown = unfold(newest) if newest.speaker in {USER, ASSISTANT} else []
        if len(shown) > 1 or len(conversation) < _LEAST_WITH_SYSTEM:
            return shown
        if conversation.find_group(1 if conversation.prefilled else 0) is not None:
            return shown
        left = INSPECTION.left
        data = self.document.data()
        INSPECTION.left = left
        if IN_SYSTEM.encode() not in data:
            return shown
        for message in conversation.read_backwards():
            if message.speaker in HARNESS:
                older = unfold(message, IN_SYSTEM)
                if len(older) > 1:
                    return older
        return shown

    def count_turns(self, most: int) -> int:
        """The number of turns, up to `most`, if all but the newest were answered; -1 if unsure."""
        conversation, first = self.conversation, 1 if self.conversation.prefilled else 0
        if (
            self.in_text
            or conversation.elsewhere
            or self.document.shortened
            or len(conversation) > MAX_STEPS
        ):
            return -1
        for number in range(first, first + most):
            group = conversation.find_group(number)
            if group is None:
                return number - first or -1
            if number > first and not group.answered:
                return -1
        return most

    def read_words(self) -> str:
        """The user's text in the newest message; empty if that is not a user's."""
        newest = self.newest
        if newest is None or newest.speaker != USER:
            return ""
        return "".join(list_texts(newest.read_parts()))

    def count_complaints(self, most: int) -> int:
        """How often the newest messages, all a user's, are the same complaint; up to `most`."""
        same, count = "", 0
        for message in self.conversation.read_backwards():
            said = "".join(list_texts(message.read_parts())) if message.speaker == USER else ""
            said = leave_out_answer(said)
            if count == most or not said or (count and said != same) or not complains(said):
                break
            same = said
            count += 1
        return count


class ShownTurns:
    """The turns of a reading, newest first, read lazily.

    A reading must not refer to its turns, because they refer to it.
    """

    def __init__(self, reading: Reading, most: int) -> None:
        """Begin with the newest turn; `most` is the maximum number of turns to read."""
        self._reading = reading
        self._left = most if reading.newest is not None else 0
        self._number = 1 if reading.conversation.prefilled else 0
        self._newer: Turn | None = None
        self._behind: list[Message] = []
        self._messages: Iterator[Message] = iter(())
        if reading.in_text:
            place = reading.unfolded[0].place
            older = [each for each in reading.conversation.read_backwards() if each.place < place]
            self._messages = chain(reading.unfolded, older)

    def __iter__(self) -> Iterator[Turn]:
        """Turns are read only once."""
        return self

    def __next__(self) -> Turn:
        """The next older turn."""
        while self._left:
            turn, newer = (
                self._read_step() if self._reading.in_text else self._read_shown(),
                self._newer,
            )
            if turn is None:
                break
            if (
                not turn.answered
                and newer is not None
                and (newer.calls or not newer.known)
                and not turn.calls
            ):
                continue  # a thought before the next message
            self._left -= 1
            self._newer = turn
            return turn
        raise StopIteration

    def _read_shown(self) -> Turn | None:
        """The next older turn. The last one may have an unknown action."""
        reading, number = self._reading, self._number
        conversation = reading.conversation
        if number < 0:
            return None
        group = conversation.find_group(number)
        if group is not None:
            self._number += 1
            return Turn(reading, group)
        self._number = -1
        conversation.check_count()
        unknown = conversation.elsewhere
        # Results in the newest message mean that there was an action
        if self._newer is None and reading.newest is not None:
            unknown = unknown or RESULT in [part.kind for part in reading.newest.read_parts()]
        if unknown and not reading.document.shortened:
            oldest = conversation.find_group(number - 1) if number else None
            end = oldest.start if oldest is not None else len(conversation)
            for place in range(end):
                if conversation.find_facts(place).speaker:
                    return Turn(reading, Group(-1, -1, end, None, answered=True))
        return None

    def _read_step(self) -> Turn | None:
        """The next older turn; its messages may be parts of one text."""
        for message in self._messages:
            if message.speaker != ASSISTANT:
                self._behind.append(message)
                continue
            behind, self._behind = self._behind, []
            return Turn(
                self._reading, Group(-1, -1, -1, None, answered=len(behind) > 0), message, behind
            )
        return None


class ActionFacts:
    """The action of a turn, cached with its first message.

    Attributes:
        ignored: names of the arguments that were treated as thoughts.
        messages: facts of the other messages that were read for it.
        names: as in `Turn`.
        hash: as in `Turn`.
        size: length of the action, in bytes.
        calls: as in `Turn`.
        units: units for reading the action; see `Inspection`.
    """

    def __init__(
        self,
        ignored: frozenset[str],
        messages: list[MessageFacts],
        action: AssistantAction,
        units: int,
    ) -> None:
        self.ignored = ignored
        self.messages = messages
        self.names = action.names
        self.hash = digest(action.spelled) if action.spelled else bytes(_DIGEST)
        self.size = action.size
        self.calls = bool(action.places)
        self.units = units


class _Result:
    """Everything after an action.

    Attributes:
        text: all of it, as one text.
        ids: ids of the calls that were answered.
        images: as in `ResultFacts`, as are the following.
        returned: tools returned anything.
        marked: the API marks a result as an error.
        whole: it depends on a whole message, not only on its facts, so it is not cached.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[str] = []
        self.images = b""
        self.returned = False
        self.marked = False
        self.whole = False

    def read(self, part: Part, number: int) -> tuple[str, str]:
        """The id of a result's call, and the result."""
        self.marked = self.marked or part.failed
        if part.id:
            self.ids.append(part.id)
        text = strike_injected(read_result(part.value))
        return part.id or number_id(number), FAILURE_MARK + text if part.failed else text


class ResultFacts:
    """Everything after the action of a turn, cached with the first assistant message.

    Attributes:
        ignored: as in `ActionFacts`.
        messages: facts of the turn's other messages.
        units: units for reading the result, besides those for the action.
        returned: as in `Turn`.
        marked: the API marks a result as an error.
        hash: Python's hash of the result.
        size: length of the result, in characters.
        lines: number of line ends in the result, or -1 if some may be escaped.
        images: a digest of the images beside results; empty if there are none. See `Part`.
        empty: as `is_empty`, and there are no images.
        head: as in `Turn`; None until computed, as are the following.
        opening: as in `Turn`.
        failure: as in `Turn`.
        failure_id: as in `Turn`, of a normalized result.
        raw: as in `Reduced`.
        normalized: as in `Reduced`, of a normalized result.
        words: as in `Turn`.
    """

    def __init__(
        self, ignored: frozenset[str], messages: list[MessageFacts], result: _Result, units: int
    ) -> None:
        self.ignored = ignored
        self.messages = messages
        self.units = units
        self.returned = result.returned
        self.marked = result.marked
        self.hash = hash(result.text)
        self.size = len(result.text)
        self.lines = count_lines(result.text)
        self.images = result.images
        self.empty = not result.images and is_empty(result.text)
        self.head: str | None = None
        self.opening: str | None = None
        self.failure: Failure | None = None
        self.failure_id: bytes | None = None
        self.raw: bytes | None = None
        self.normalized: bytes | None = None
        self.words: bytes | None = None


class Turn:
    """One turn of a request, read lazily.

    Reading the action charges its units; reading the result charges those of both. Each is charged
    once per turn, cached or not.

    Attributes:
        known: the request shows the action.
        referenced: the request refers to the action.
        answered: a message follows before the next assistant message; otherwise no request ended
            with this turn.
    """

    def __init__(
        self,
        reading: Reading,
        group: Group,
        message: Message | None = None,
        behind: list[Message] | None = None,
    ) -> None:
        """In a scratchpad, `message` is the assistant's part, and `behind` what follows it."""
        facts = group.facts
        self.answered = group.answered
        self.referenced = facts is not None and facts.refers
        if self.referenced and group.start < group.place:
            shown = reading.conversation.list_facts(group.start, group.place + 1)
            self.referenced = False not in [each.refers for each in shown if each.joins]
        self.known = (facts is not None or message is not None) and not self.referenced
        self._reading = reading
        self._group = group
        self._did: ActionFacts | None = None
        self._came: ResultFacts | None = None
        self._message = message
        self._behind = behind
        self._action: AssistantAction | None = None
        self._result: _Result | None = None
        self._normalizes: bool | None = None
        self._normal: str | None = None
        self._evidence = -1
        self._reduced: Reduced | None = None

    def _list_others(self, end: int) -> list[MessageFacts]:
        """The facts of the messages after the first one, up to an index."""
        start = self._group.start
        return self._reading.conversation.list_facts(start + 1, end) if end > start + 1 else []

    def _open(self) -> Message | None:
        """The assistant message; None if it is on the server."""
        group = self._group
        if self._message is None and group.place >= 0:
            self._message = self._reading.conversation.open_group(group.start, group.place)
        return self._message

    def _list_behind(self) -> list[Message]:
        """The messages after the assistant's, newest first."""
        if self._behind is None:
            conversation, group = self._reading.conversation, self._group
            places = [
                (at, conversation.find_facts(at).speaker)
                for at in range(group.end - 1, group.place, -1)
            ]
            self._behind = [
                Message(conversation.shape, speaker, at, conversation)
                for at, speaker in places
                if speaker
            ]
        return self._behind

    @property
    def did(self) -> ActionFacts:
        """The action; empty if it is unknown."""
        if self._did is None:
            group, ignored = self._group, self._reading.ignored
            holder = group.facts
            kept = holder.action if holder is not None else None
            if isinstance(kept, ActionFacts) and (
                kept.ignored is ignored or kept.ignored == ignored
            ):
                # Without names, later messages were searched, too
                end = group.place + 1 if kept.names else group.end
                if kept.messages == self._list_others(end):
                    INSPECTION.take(kept.units)
                    self._did = kept
                    return kept
            left = INSPECTION.left
            action = self._action = self._read_action()
            others = self._list_others(group.place + 1 if action.names else group.end)
            made = self._did = ActionFacts(ignored, others, action, left - INSPECTION.left)
            small = (
                len(action.names) <= _MOST_NAMES_KEPT
                and sum([len(name) for name in action.names]) <= _LONGEST_NAMES_KEPT
            )
            if holder is not None and small:
                holder.action = made
        return self._did

    def _read_action(self) -> AssistantAction:
        message = self._open()
        if not self.known or message is None:
            return _UNKNOWN
        action = read_action(message.take_parts(), self._reading.ignored)
        if action.names:
            return action
        behind = self._list_behind()
        parts = behind[-1].take_parts() if behind else []
        text = open_value(parts[0].value) if parts and parts[0].kind == TEXT else ""
        return (read_failed_call(text) if isinstance(text, str) else None) or action

    @property
    def came(self) -> ResultFacts:
        """The result: everything after the action."""
        if self._came is None:
            _ = self.did
            holder, ignored, others = (
                self._group.facts,
                self._reading.ignored,
                self._list_others(self._group.end),
            )
            kept = holder.result if holder is not None else None
            if (
                isinstance(kept, ResultFacts)
                and (kept.ignored is ignored or kept.ignored == ignored)
                and kept.messages == others
            ):
                INSPECTION.take(kept.units)
                self._came = kept
                return kept
            left = INSPECTION.left
            result = self._result = self._read_result()
            self._came = ResultFacts(ignored, others, result, left - INSPECTION.left)
            if holder is not None and not result.whole:
                holder.result = self._came
        return self._came

    @property
    def parts(self) -> list[Part]:
        """The parts of the assistant message."""
        _ = self.did
        message = self._open()
        left = INSPECTION.recall()
        parts = message.read_parts() if message is not None else []
        INSPECTION.left = left
        return parts

    @property
    def said(self) -> str:
        """The text of the assistant message."""
        return "\n".join(list_texts(self.parts)).strip()

    @property
    def action(self) -> AssistantAction:
        """The action in full; empty if it is unknown."""
        _ = self.did
        if self._action is None:
            left = INSPECTION.recall()
            self._action = self._read_action()
            INSPECTION.left = left
        return self._action

    def _open_result(self) -> _Result:
        """The result in full."""
        _ = self.came
        if self._result is None:
            left = INSPECTION.recall()
            self._result = self._read_result()
            INSPECTION.left = left
        return self._result

    @property
    def result(self) -> str:
        """Everything after the action, as one text."""
        return self._open_result().text

    @property
    def names(self) -> tuple[str, ...]:
        """The tools, or the first word of the command."""
        return self.did.names

    @property
    def calls(self) -> bool:
        """Whether the names are of called tools, not words of a text."""
        return self.did.calls

    @property
    def action_hash(self) -> bytes:
        """A hash of the action, 8 bytes; zeros if it is unknown."""
        return self.did.hash

    @property
    def returned(self) -> bool:
        """Whether tools returned anything."""
        return self.came.returned

    @property
    def head(self) -> str:
        """The normalized start of the result; see `normalize_head`."""
        came = self.came
        if came.head is None:
            came.head = normalize_head(self.result)
        return came.head

    @property
    def opening(self) -> str:
        """The start of the result without digits; see `open_result`."""
        came = self.came
        if came.opening is None:
            came.opening = open_result(self.result)
        return came.opening

    @property
    def raw(self) -> bytes:
        """See `Reduced`."""
        came = self.came
        if came.raw is None:
            came.raw = digest(self.result.encode() + came.images)
        return came.raw

    @property
    def normal(self) -> str:
        """The normalized result, or the unchanged one if `may_normalize` is False."""
        if self._normal is None:
            self._normal = normalize(self.result) if self.may_normalize() else self.result
        return self._normal

    @property
    def normalized(self) -> bytes:
        """See `Reduced`."""
        came = self.came
        if not self.may_normalize():
            return self.raw
        if came.normalized is None:
            came.normalized = (
                self.raw
                if self.normal == self.result
                else digest(self.normal.encode() + came.images)
            )
        return came.normalized

    @property
    def normal_id(self) -> bytes:
        """A digest of `normal`, without images."""
        return digest(self.normal.encode()) if self.came.images else self.normalized

    def may_normalize(self) -> bool:
        """Whether the request may still normalize the result; charged even if it is cached."""
        if self._normalizes is None:
            self._reading.left -= min(self.came.size, MAX_NORMALIZED)
            self._normalizes = self._reading.left >= 0
        return self._normalizes

    @property
    def failed(self) -> bool:
        """Whether the result is a failure."""
        return self.failure != NO_FAILURE

    @property
    def failure(self) -> Failure:
        """The kind of failure, if any."""
        came = self.came
        if came.failure is None:
            text = self.result
            came.failure = read_failure(text, failed=came.marked)
            if (
                came.failure == NO_FAILURE
                and self.known
                and not came.returned
                and not self.names
                and complains(text)
            ):
                came.failure = FATAL
        return came.failure

    @property
    def failure_id(self) -> bytes:
        """An id of a few bytes that similar failures share; empty if the result is not a failure.

        See `alike.py`.
        """
        if not self.failed:
            return b""
        came = self.came if self.may_normalize() else None
        if came is not None and came.failure_id is not None:
            return came.failure_id
        found = digest((self.opening + _NEXT + leave_out_numbers(self.normal)).encode(), _FAILURE)
        if came is not None:
            came.failure_id = found
        return found

    @property
    def evidence(self) -> int:
        """Evidence: LONG, PASSING, MISSING of the result; READS, CHANGES of the action."""
        if self._evidence < 0:
            reading, did, came = self._reading, self.did, self.came
            if reading.hints is None:
                reading.hints = find_hints(reading.conversation)
            flags = find_role(did.names, reading.hints)
            if self.failed:
                flags = flags & ~CHANGES | _FLAGS.get(self.failure, 0)
                if self.known and not did.names:
                    flags &= ~MISSING  # nothing was looked up
            elif came.empty and flags & READS:
                flags |= MISSING
            if came.size >= _LONG_RESULT:
                flags |= LONG
            talks = self.known and not did.names and not came.returned
            if (
                talks
                and (flags & LONG or self.failed)
                and reading.conversation.find_offer() == TOOLS
            ):
                flags = flags & ~LONG | PASSING  # text counts little if the agent has tools
            self._evidence = flags
        return self._evidence

    @property
    def words(self) -> bytes:
        """A digest, 8 bytes, of a user's words, without digits; empty if they answer an action."""
        if (
            self.names
            or USER not in [message.speaker for message in self._list_behind()]
            or self.returned
        ):
            return b""
        came = self.came
        if came.words is None:
            said: list[str] = []
            left = INSPECTION.recall()
            for message in self._list_behind():
                for text in list_texts(message.read_parts()) if message.speaker == USER else ():
                    if not is_injected(text.strip()):
                        plain = leave_out_answer(strike_injected(text))
                        said += NUMBERS.sub("", plain).casefold().split()
            INSPECTION.left = left
            came.words = digest(" ".join(said).encode()) if said else b""
        return came.words

    def show(self, most: int) -> str:
        """Action and result in a line for people, each cut to this many characters."""
        action = self.action.spelled.replace(b"\xff", b" | ").decode() if self.known else "unknown"
        return f"{_cut(action, most)} | {_cut(self.result, most)}"

    def identify(self) -> bytes:
        """Distinguishes this turn from equal ones: its place, all that the assistant wrote, ids."""
        message = self._open()
        return _encode(
            [
                self._group.start,
                message.list_values() if message is not None else None,
                sorted(set(self._open_result().ids)),
            ]
        )

    def reduce(self) -> Reduced:
        """This turn as hashes."""
        if self._reduced is None:
            self._reduced = Reduced(
                self.known,
                self.returned,
                self.failed,
                self.action_hash,
                self.raw,
                self.normalized,
                self.names,
                self.evidence,
                self.words,
                self.failure_id,
            )
        return self._reduced

    def _read_result(self) -> _Result:
        """Results in the order of their calls, without duplicates, then other text."""
        made = _Result()
        results: list[tuple[str, str]] = []
        others: list[str] = []
        images: list[bytes] = []
        for part in self.parts:  # results of the server's own tools are in the assistant message
            if part.kind == RESULT:
                results.append(made.read(part, len(results)))
        behind = self._list_behind()[::-1]
        for message in [each for each in behind if each.speaker not in HARNESS] or behind:
            for part in message.take_parts():
                if part.images is not ABSENT:
                    images.append(digest_images(part))
                if part.kind == RESULT:
                    results.append(made.read(part, len(results)))
                else:
                    made.whole |= part.kind == OTHER and part.value is ABSENT
                    others.append(
                        strike_injected(_write_said(message, part, self._reading.document))
                    )
        made.returned = any(text for _, text in results) or len(images) > 0
        made.images = digest(b"".join(sorted(set(images)))) if images else b""
        if made.returned:
            others = [text for text in others if not is_injected(text)]
        known = [
            text for text in others if not INJECTED_TAGS.issuperset(find_wrappers(text) or [""])
        ]
        if results or known:
            others = known
        if len(results) > 1:
            places = self.action.places
            ranked = sorted(
                [(places.get(identity, len(places)), text) for identity, text in results]
            )
            results = [("", text) for _, text in dict.fromkeys(ranked)]
        made.text = _NEXT.join([*[text for _, text in results], *[text for text in others if text]])
        return made


class Reduced(NamedTuple):
    """A turn as hashes, as stored in a ring.

    Attributes:
        known: see `Turn`.
        returned: see `Turn`.
        failed: see `Turn`.
        action_hash: see `Turn`.
        raw: hash of the result.
        normalized: hash of the normalized result.
        names: see `Turn`; from a ring, only the first.
        evidence: see `Turn`.
        words: see `Turn`.
        failure_id: see `Turn`.
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

    def show(self, most: int) -> str:
        """The hashes of action and result in a line; nothing else is stored."""
        return f"{self.action_hash.hex()} | {self.raw.hex()}"[:most]

    def reduce(self) -> Reduced:
        """This turn, already reduced."""
        return self


AnyTurn = Turn | Reduced

_UNKNOWN: Final = AssistantAction((), b"", {})

_encode: Final = json.Encoder().encode


def encode_turn(turn: AnyTurn) -> bytes:
    """A turn as an entry of a ring: flags, three hashes, its first name or words, its failure."""
    kept = turn if isinstance(turn, Reduced) else turn.reduce()
    failure = _write_bits(kept.failure_id) if kept.failure_id else b""
    rest = (
        kept.names[0].encode()[: _ENTRY_NAME - len(failure)]
        if kept.names
        else _write_bits(kept.words)
    )
    flags = _KNOWN * kept.known | _RETURNED * kept.returned | _ERROR * kept.failed | kept.evidence
    return bytes((flags,)) + kept.action_hash + kept.raw + kept.normalized + rest + failure


def decode_turn(entry: bytes) -> Reduced:
    """The turn in an entry from `encode_turn`; an unknown turn for an empty entry."""
    entry = entry or bytes(1 + 3 * _DIGEST)
    flags = entry[0]
    action, raw, normalized = [
        entry[1 + number * _DIGEST : 1 + (number + 1) * _DIGEST] for number in range(3)
    ]
    rest = entry[REST:]
    name = rest.decode("utf-8", "ignore")
    known, returned, failed = [flags & flag != 0 for flag in (_KNOWN, _RETURNED, _ERROR)]
    names, words = ((name,), b"") if name else ((), _read_bits(rest[:_WORDS_BITS], _DIGEST))
    failure = get_failure_id(entry)
    return Reduced(
        known, returned, failed, action, raw, normalized, names, flags & _EVIDENCE, words, failure
    )


def get_failure_id(entry: bytes) -> bytes:
    """The failure id in an entry; empty if nothing failed. No name ends like an id."""
    if not entry or not entry[0] & _ERROR:
        return b""
    rest = entry[REST:]
    if len(rest) == _WORDS_BITS and rest[0] & ~_SIX_BITS == _NO_TEXT:
        return b""
    return _read_bits(rest[-_FAILURE_BITS:], _FAILURE)


def _write_bits(data: bytes) -> bytes:
    """Write a digest in bytes that are not text, with six bits in each."""
    number = int.from_bytes(data, "big")
    return bytes([_NO_TEXT | number >> shift & _SIX_BITS for shift in range(0, 8 * len(data), 6)])


def _read_bits(written: bytes, size: int) -> bytes:
    """Read a digest of this size from `_write_bits`; empty for anything else."""
    if 6 * len(written) < 8 * size or any(byte & ~_SIX_BITS != _NO_TEXT for byte in written):
        return b""
    number = sum([(byte & _SIX_BITS) << 6 * place for place, byte in enumerate(written)])
    return (number & (1 << 8 * size) - 1).to_bytes(size, "big")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def digest(data: bytes, size: int = _DIGEST) -> bytes:
    """A hash of data, `size` bytes long."""
    hashed = _starts[size]()  # a copy is faster than a new hash
    hashed.update(data)
    made: bytes = hashed.digest()
    return made


def same_action(one: AnyTurn, other: AnyTurn) -> bool:
    """Whether the actions are equal, or both unknown."""
    return one.known == other.known and one.action_hash == other.action_hash


def digest_images(part: Part) -> bytes:
    """A digest of a part's images."""
    return digest(
        bytes(part.images) if isinstance(part.images, Raw) else write_canonical(part.images)
    )


def same_result(one: AnyTurn, other: AnyTurn, *, normalized: bool) -> bool:
    """Whether the results are equal; `normalized`: volatile parts aside.

    Images are compared only if both have some.
    """
    if isinstance(one, Turn) and isinstance(other, Turn):
        mine, others = one.came, other.came
        if mine.images != others.images and mine.images and others.images:
            return False
        if mine.hash == others.hash and mine.size == others.size:
            return True
        if not normalized or not may_be_equal(one.head, other.head):
            return False
        if (
            one.may_normalize()
            and other.may_normalize()
            and differ_in_lines(mine.lines, others.lines)
        ):
            return False
        return one.normal_id == other.normal_id
    return one.raw == other.raw or (normalized and one.normalized == other.normalized)


def same_turn(one: AnyTurn, other: AnyTurn, *, normalized: bool) -> bool:
    """Whether two turns are equal; without known actions, tools must have returned something."""
    return (
        same_action(one, other)
        and (one.known or (one.returned and other.returned))
        and same_result(one, other, normalized=normalized)
    )


def may_fail_alike(one: AnyTurn, other: AnyTurn) -> bool:
    """False if a quick check shows that two results are not similar failures."""
    if isinstance(one, Turn) and isinstance(other, Turn):
        return one.opening == other.opening
    return other.failed


def fail_alike(one: AnyTurn, other: AnyTurn) -> bool:
    """Whether both turns failed with the same result, numbers aside."""
    return (
        may_fail_alike(one, other) and one.failure_id != b"" and one.failure_id == other.failure_id
    )


def finds_nothing(turn: AnyTurn) -> bool:
    """Whether a tool that only reads returned an empty result, which is no failure."""
    if isinstance(turn, Turn) and not turn.came.empty:
        return False
    return not turn.failed and turn.evidence & MISSING != 0


def weigh(turns: Sequence[AnyTurn], length: int = 1) -> str:
    """The strength of a loop of these turns; `length`: of the cycle.

    A long result whose volatile parts change is what an agent sees that watches something.
    """
    for place, turn in enumerate(turns):
        if turn.failed and turn.evidence & (LONG | PASSING) != PASSING:
            return STRONG
        if turn.evidence & LONG and all(
            same_result(turn, other, normalized=False) for other in turns[place % length :: length]
        ):
            return STRONG
    return WEAK


def weigh_apart(turns: Sequence[AnyTurn]) -> str:
    """The strength if actions differ or are unknown: look-ups may be of different things."""
    return weigh([turn for turn in turns if turn.evidence & LONG or not turn.evidence & MISSING])


def _write_said(message: Message, part: Part, document: Document) -> str:
    """Text beside results, or other content by its name if it has one, else in canonical form."""
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


def read_turns(
    conversation: Conversation, document: Document, ignored: frozenset[str]
) -> Iterator[Turn]:
    """The turns of the conversation in a document, newest first."""
    return ShownTurns(Reading(conversation, document, ignored), MAX_STEPS)


def leave_out_last(turns: Iterator[Turn]) -> Iterator[Turn]:
    """All turns except the oldest, some of whose calls may be in omitted messages."""
    last: Turn | None = None
    for turn in turns:
        if last is not None:
            yield last
        last = turn
