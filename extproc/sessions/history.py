"""The tool calls in a request's history, with digests by which later requests recognize them.

A client sends its history again and again. So a call that was counted is recognized by its own properties: its id, tool and
arguments and, among calls with equal ids, the number of those before it. No digest depends on the rest of the history: a client
that sends a history again gets the same digests, and one that appends to it gets new ones at the end.

Calls without an id, or with an id made anew for each request, have only the digests of tool and arguments in common. They are
recognized by their position; see `store.rules.session`.

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
"""Length of a call's record, in bytes: its digests, and the number of steps since the call before it; see `session.RECORD`."""

_MOST_STEPS: Final = 255
_STEPS: Final = [bytes([steps]) for steps in range(_MOST_STEPS + 1)]

_OFFERS: Final = {"": 0, TOOLS: OFFERS_TOOLS, NO_TOOLS: OFFERS_NONE}
_SHOWN: Final = 64
_MOST_RESULTS: Final = 16
_LONGEST_RESULT: Final = 2**11
"""Number of messages, and bytes of each, in which to look for errors: these are only shown to people."""

_BEGINS_AS_ERROR: Final = re.compile(
    rb"""\s*(?:\[\s*\{\s*(?:"type"\s*:\s*"text"\s*,\s*)?"text"\s*:\s*)?"\W{0,8}(?:error|traceback|exception|fail)""",
    re.IGNORECASE,
).match

_IN_MARKS: Final = b"error"
"""In all of `ERROR_MARKS`; most results are without it."""

_FEW: Final = 8
"""Number of turns, and of calls, that a request adds to a known history at most, if those are looked up in it one by one."""

_LONGEST_COMPARED: Final = 2**16
"""Maximum length of what follows a history to leave out clocks and numbers of attempts in it, in bytes."""

_FORK: Final = 7
_encode: Final = json.Encoder().encode

_LONGEST_MODEL: Final = 256
_LONGEST_ANSWER: Final = 131_072
"""Tokens. No text answer has more, whatever a request allows."""

DEFAULT_ANSWER: Final = 1_000
"""Tokens of an answer whose length the request does not limit, for the estimate of its cost."""


class CallHistory:
    """The calls and tools in a request's history; never changed.

    Attributes:
        records: RECORD bytes for each call, oldest first; no two with ids are equal.
        total: the sum of the digests of tool and arguments of all records, as numbers.
        newest: number of calls in the assistant's last turn, which is a step.
        tools: digest and name, cut to 64 characters, of each called tool, in the order of their first calls.
        model: the model's name in the body, cut to 256 characters; empty if missing.
        offer: whether the request offers tools, as in `Step`.
        answer: the number of tokens that the request allows for its answers; 0 if it does not say, and asks for one.
        failed: number of the newest results that are errors: marked as such, or a tool's text that begins like one.
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
        """The largest number of calls of each tool in one answer, by the tool's digest."""
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
    """The calls in a history. If the server keeps the history, a result stands for its call.

    Raises:
        NotCounted: there is no conversation, it cannot be read, or it is too large.
    """
    conversation = open_conversation(document)
    calls = _NO_CALLS.add(_read_kept(conversation)) if conversation.before.after else _count(read_transcript(conversation))
    offer, model = _OFFERS[conversation.find_offer()], conversation.model[:_LONGEST_MODEL]
    copies = count_copies(conversation)
    answer = min(find_longest_answer(conversation), _LONGEST_ANSWER) or (DEFAULT_ANSWER if copies > 1 else 0)
    failed = _count_failed(conversation) if calls.records else 0
    return CallHistory(calls.records, calls.total, calls.newest, calls.tools, model, offer, answer * copies, failed)


class _Calls:
    """The calls in the first turns of a history, which later requests continue; never changed.

    Attributes:
        turns: number of turns.
        steps: number of turns since the one with the newest call.
        records, total, newest, tools: as in `CallHistory`.
    """

    def __init__(  # noqa: PLR0913  # a record
        self, turns: int, steps: int, records: bytes, total: int, newest: int, tools: tuple[tuple[bytes, str], ...]
    ) -> None:
        self.turns = turns
        self.steps = steps
        self.records = records
        self.total = total
        self.newest = newest
        self.tools = tools

    def add(self, turns: Sequence[Spoken]) -> _Calls:
        """These calls and those of the turns behind them."""
        steps, total, known, newest = self.steps, self.total, b"", 0
        tools = dict(self.tools)
        parts = [self.records]
        numbers: dict[bytes, int] = {}
        for turn in turns:
            steps = min(steps + 1, _MOST_STEPS)
            newest = len(turn.calls)
            for call in turn.calls:
                total += call.pair
                if call.tool_digest != known:  # many call the same tool again
                    known = call.tool_digest
                    if call.tool and known not in tools:
                        tools[known] = call.tool[:_SHOWN]
                number = numbers[call.first] = numbers.get(call.first, 0) + 1
                parts.append(call.first if number == 1 else call.write(number))
                parts.append(_STEPS[steps])
                steps = 0
        records = b"".join(parts)
        return _Calls(self.turns + len(turns), steps, records, total, newest if records else 0, tuple(tools.items()))

    def has_any(self, turns: Sequence[Spoken]) -> bool:
        """Whether a call of these turns may have been made before, so that it needs another number; in doubt it has."""
        return any(call.first in self.records for turn in turns for call in turn.calls if call.named)


_NO_CALLS: Final = _Calls(0, 0, b"", 0, 0, ())


def _count(shown: Transcript) -> _Calls:
    """The calls in a transcript. Those of its first turns may be known from an earlier request."""
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
    """8 bytes that tell how a request continues its history: its messages since the newest of the assistant.

    The first byte is `offer`, because a request without tools may be asked aside. Ids do not count, nor do clocks and numbers
    of attempts: a request that is sent again continues in the same way. Empty if these messages cannot be read.
    """
    said: list[bytes] = []
    try:
        conversation = open_conversation(document)
        for message in conversation.read_backwards():
            if message.speaker != ASSISTANT:
                said.append(_encode([(part.kind, part.name, part.value, part.images) for part in message.read_parts()]))
            elif said:  # else it is the start of the answer
                break
    except NotCounted:
        return b""
    finally:
        INSPECTION.begin()
    joined = b"".join(said)
    told = leave_out_moving(joined) if len(joined) <= _LONGEST_COMPARED else joined
    return bytes((offer,)) + digest(place.node + told, _FORK)


def _count_failed(conversation: Conversation) -> int:
    """The number of errors among the newest results, found without decoding them."""
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


def _read_kept(conversation: Conversation) -> list[Spoken]:
    """The calls in a request whose server keeps the history; results stand for calls that only the server has."""
    shape = conversation.shape
    parts = [part for _, value in conversation.list_spoken() for part in _read_parts(shape, value)]
    called = {part.id for part in parts if part.kind == CALL}
    alone = [part for part in parts if part.kind == CALL or (part.kind == RESULT and part.id and part.id not in called)]
    return [Spoken([b""], [CallFacts(part, spell(part)) for part in alone])]


def _read_parts(shape: Shape, value: Any) -> list[Part]:  # noqa: ANN401  # of the shape's
    walk(1)
    return shape.read(value)
