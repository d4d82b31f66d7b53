"""The tool calls in a request's history, with digests by which later requests recognize them.

Clients send their history with every request. A call that was counted is recognized by its id, tool
and arguments and, if several calls have equal ids, by its number among them. A digest depends on
nothing else in the history: the same history has the same digests, and a longer one adds digests at
the end.

Calls without an id, or with a new id in each request, share only the digest of tool and arguments.
They are recognized by their position; see `store.rules.session`.

A client that changes the arguments of an earlier call has made another call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from msgspec import json

from extproc.apis import ERROR_MARKS, count_copies, find_longest_answer, open_conversation
from extproc.apis.conversation import (
    ASSISTANT,
    NO_TOOLS,
    TOOL,
    TOOLS,
    Conversation,
    Shape,
)
from extproc.apis.messages import CALL, RESULT, Part
from extproc.detectors.chain import (
    CALL_DIGEST,
    PAIR_DIGEST,
    TOOL_DIGEST,
    CallFacts,
    ChainPlace,
    Spoken,
    Transcript,
    read_transcript,
    spell,
)
from extproc.detectors.prompt import leave_out_moving
from extproc.detectors.turn import digest
from extproc.request.document import ABSENT, INSPECTION, Document, NotCounted, walk
from extproc.store.rules.session import OFFERS_NONE, OFFERS_TOOLS

RECORD: Final = CALL_DIGEST + TOOL_DIGEST + PAIR_DIGEST + 1
"""Length of a call's record in bytes: its digests, and the number of steps since the previous call;
see `session.RECORD`."""

_MOST_STEPS: Final = 255
_STEPS: Final = [bytes([steps]) for steps in range(_MOST_STEPS + 1)]

_OFFERS: Final = {"": 0, TOOLS: OFFERS_TOOLS, NO_TOOLS: OFFERS_NONE}
_SHOWN: Final = 64
_MOST_RESULTS: Final = 16
_LONGEST_RESULT: Final = 2**11
"""Number of messages to search for errors, and maximum length of each. The errors are only
displayed."""

_BEGINS_AS_ERROR: Final = re.compile(
    rb"""\s*(?:\[\s*\{\s*(?:"type"\s*:\s*"text"\s*,\s*)?"text"\s*:\s*)?"\W{0,8}(?:error|traceback|exception|fail)""",
    re.IGNORECASE,
).match

_IN_MARKS: Final = b"error"
"""Part of all `ERROR_MARKS`; most results do not contain it."""

_FEW: Final = 8
"""Up to this many new turns and calls are looked up one by one in a known history."""

_LONGEST_COMPARED: Final = 2**16
"""Maximum length in bytes of a continuation in which clocks and attempt numbers are ignored."""

_FORK: Final = 7
_encode: Final = json.Encoder().encode

_LONGEST_MODEL: Final = 256
_LONGEST_ANSWER: Final = 131_072
"""Tokens. No text answer is longer, whatever the request's limit."""

DEFAULT_ANSWER: Final = 1_000
"""Tokens assumed for an answer, to estimate its cost, if the request sets no limit."""


class CallHistory:
    """The calls and tools in a request's history; immutable.

    Attributes:
        records: RECORD bytes for each call, oldest first; records of calls with ids are distinct.
        total: the sum of all digests of tool and arguments, as numbers.
        newest: number of calls in the assistant's last turn, which is a step.
        tools: digest and name, cut to 64 characters, of each called tool, by first call.
        model: the model's name in the body, cut to 256 characters; empty if missing.
        offer: whether the request offers tools, as in `Step`.
        answer: maximum tokens of all answers; 0 if the request asks for one answer and sets no
            limit.
        failed: number of errors among the newest results: marked as such, or text that begins like
            one.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        records: bytes,
        total: int,
        newest: int,
        tools: tuple[tuple[bytes, str], ...],
        model: str,
        offer: int,
        answer: int = 0,
        failed: int = 0,
    ) -> None:
        self.answer = answer
        self.failed = failed
        self.offer = offer
        self.newest = newest
        self.total = total
        self.records = records
        self.tools = tools
        self.model = model

    def find_batches(self) -> dict[bytes, int]:
        """The most calls of each tool in one answer, by the tool's digest."""
        largest: dict[bytes, int] = {}
        batch: dict[bytes, int] = {}
        records = self.records
        for at in range(0, len(records), RECORD):
            if records[at + RECORD - 1]:
                batch = {}
            tool = records[at + CALL_DIGEST : at + CALL_DIGEST + TOOL_DIGEST]
            batch[tool] = number = batch.get(tool, 0) + 1
            if number > largest.get(tool, 0):
                largest[tool] = number
        return largest


def read_tool_calls(document: Document) -> CallHistory:
    """The calls in a history. If the server stores the history, results stand for their calls.

    Raises:
        NotCounted: there is no conversation, it is unreadable, or it is too large.
    """
    conversation = open_conversation(document)
    calls = (
        _NO_CALLS.add(_read_stored(conversation))
        if conversation.before.after
        else _count(read_transcript(conversation))
    )
    offer, model = _OFFERS[conversation.find_offer()], conversation.model[:_LONGEST_MODEL]
    copies = count_copies(conversation)
    answer = min(find_longest_answer(conversation), _LONGEST_ANSWER) or (
        DEFAULT_ANSWER if copies > 1 else 0
    )
    failed = _count_failed(conversation) if calls.records else 0
    return CallHistory(
        calls.records, calls.total, calls.newest, calls.tools, model, offer, answer * copies, failed
    )


class _Calls:
    """The calls in the first turns of a history, for later requests that extend it; immutable.

    Attributes:
        turns: number of turns.
        steps: number of turns since the one with the newest call.
        records, total, newest, tools: as in `CallHistory`.
    """

    def __init__(  # noqa: PLR0913  # a record
        self,
        turns: int,
        steps: int,
        records: bytes,
        total: int,
        newest: int,
        tools: tuple[tuple[bytes, str], ...],
    ) -> None:
        self.turns = turns
        self.steps = steps
        self.records = records
        self.total = total
        self.newest = newest
        self.tools = tools

    def add(self, turns: Sequence[Spoken]) -> _Calls:
        """Append the calls of later turns."""
        steps, total, known, newest = self.steps, self.total, b"", 0
        tools = dict(self.tools)
        parts = [self.records]
        numbers: dict[bytes, int] = {}
        for turn in turns:
            steps = min(steps + 1, _MOST_STEPS)
            newest = len(turn.calls)
            for call in turn.calls:
                total += call.pair
                if call.tool_digest != known:  # often the same tool again
                    known = call.tool_digest
                    if call.tool and known not in tools:
                        tools[known] = call.tool[:_SHOWN]
                number = numbers[call.first] = numbers.get(call.first, 0) + 1
                parts.append(call.first if number == 1 else call.write(number))
                parts.append(_STEPS[steps])
                steps = 0
        records = b"".join(parts)
        return _Calls(
            self.turns + len(turns),
            steps,
            records,
            total,
            newest if records else 0,
            tuple(tools.items()),
        )

    def has_any(self, turns: Sequence[Spoken]) -> bool:
        """Whether some call of these turns may be a repetition, which needs a number."""
        return any(
            call.first in self.records for turn in turns for call in turn.calls if call.named
        )


_NO_CALLS: Final = _Calls(0, 0, b"", 0, 0, ())


def _count(shown: Transcript) -> _Calls:
    """Count the calls in a transcript, starting from what an earlier request has counted."""
    turns, known = shown.turns, shown.counted
    if isinstance(known, _Calls):
        more = turns[known.turns :]
        if not more:
            return known
        few = len(more) <= _FEW and sum([len(turn.calls) for turn in more]) <= _FEW
        made = known.add(more) if few and not known.has_any(more) else _NO_CALLS.add(turns)
    else:
        made = _NO_CALLS.add(turns)
    shown.counted = made
    return made


def digest_continuation(document: Document, place: ChainPlace, offer: int) -> bytes:
    """A digest of a request's messages after the newest of the assistant.

    The first of its 8 bytes is `offer`, because clients ask side questions without tools. Ids,
    clocks and attempt numbers are ignored, so a retry has the same digest. Empty if the messages
    are unreadable.
    """
    said: list[bytes] = []
    try:
        conversation = open_conversation(document)
        for message in conversation.read_backwards():
            if message.speaker != ASSISTANT:
                said.append(
                    _encode(
                        [
                            (part.kind, part.name, part.value, part.images)
                            for part in message.read_parts()
                        ]
                    )
                )
            elif said:  # an assistant message at the end is a prefill
                break
    except NotCounted:
        return b""
    finally:
        INSPECTION.begin()
    joined = b"".join(said)
    told = leave_out_moving(joined) if len(joined) <= _LONGEST_COMPARED else joined
    return bytes((offer,)) + digest(place.node + told, _FORK)


def _count_failed(conversation: Conversation) -> int:
    """Count the errors among the newest results, without decoding them."""
    failed = messages = 0
    find_raw = conversation.shape.find_raw
    for place in range(len(conversation) - 1, -1, -1):
        speaker = conversation.find_facts(place).speaker
        if speaker == ASSISTANT or messages == _MOST_RESULTS:
            break
        if not speaker:
            continue
        messages += 1
        raw = find_raw(conversation.open_message(place))
        if raw is ABSENT or len(raw) > _LONGEST_RESULT:
            continue
        data = bytes(raw)
        marks = sum([data.count(mark) for mark in ERROR_MARKS]) if _IN_MARKS in data else 0
        failed += marks or (speaker == TOOL and _BEGINS_AS_ERROR(data) is not None)
    return failed


def _read_stored(conversation: Conversation) -> list[Spoken]:
    """The calls in a request whose server stores the history.

    Results stand for calls that only the server has.
    """
    shape = conversation.shape
    parts = [part for _, value in conversation.list_spoken() for part in _read_parts(shape, value)]
    called = {part.id for part in parts if part.kind == CALL}
    alone = [
        part
        for part in parts
        if part.kind == CALL or (part.kind == RESULT and part.id and part.id not in called)
    ]
    return [Spoken([b""], [CallFacts(part, spell(part)) for part in alone])]


def _read_parts(shape: Shape, value: Any) -> list[Part]:  # noqa: ANN401  # a shape's value
    walk(1)
    return shape.read(value)
