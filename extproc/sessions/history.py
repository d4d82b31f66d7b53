"""The calls of tools that a request's history shows, each under digests by which it is known again in later requests.

A client sends its history again and again, so a call is told from one that was counted by what it is itself: its id, its tool
and its arguments; of those whose ids are equal as well, by how many stand before it. No digest depends on what else the history
holds: a client that sends a history again gets the same digests, and one that appends to it gets them and new ones behind.

A call without an id has the digests of its tool and arguments alone, as all its equals have, and so have calls whose ids are
made anew for each request. They are known again by their place; see `store.rules.session`.

A client that changes the arguments of a call that it has made has made another one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Any, Final
from zlib import crc32

from msgspec import json

from extproc.apis import find_conversation, open_conversation
from extproc.apis.contents import read_arguments
from extproc.apis.conversation import ASSISTANT, NO_TOOLS, TOOLS, Conversation, Shape, look_back, read_message
from extproc.apis.messages import CALL, RESULT, Part
from extproc.bounded import Memo
from extproc.request.document import Document, NotCounted, count_left, walk, write_canonical
from extproc.request.patch import Patch
from extproc.store.rules.session import OFFERS_NONE, OFFERS_TOOLS

_CALL: Final = 6
_TOOL: Final = 4
_PAIR: Final = 4
RECORD: Final = _CALL + _TOOL + _PAIR
"""Length of a call's record, in bytes: digests of the call, of its tool's name, and of tool and arguments."""

_NAMED: Final = 16
_MOST_KNOWN: Final = 8_192
_LONGEST_KEY: Final = 512
_MOST_CALLS: Final = 8
_LONGEST_NAMES: Final = 256
"""This many messages are in a generation of those that are known, by themselves or, if they are longer, by a digest. None has
more calls, or longer names of tools. They take 0.6 KB each, and 60 MB in all under attack."""

_OFFERS: Final = {"": 0, TOOLS: OFFERS_TOOLS, NO_TOOLS: OFFERS_NONE}
_SHOWN: Final = 64
_LONGEST_MODEL: Final = 256
_NO_CALL: Final = bytes(_CALL)
_SEPARATOR: Final = b"\xff"  # never in UTF-8
_encode: Final = json.Encoder().encode


class CallHistory:
    """What a request's history shows; never changed.

    Attributes:
        records: RECORD bytes for each call, the oldest first; no two with ids are equal.
        total: the sum of the last digests of all records, as numbers.
        newest: how many the assistant's last turn has.
        tools: digest and name, cut to 64 characters, of the tools among them, the first to be called first.
        model: that the body names, cut to 256 characters; empty where it names none.
        offer: what it offers the model, as in `Step`.
    """

    __slots__ = ("model", "newest", "offer", "records", "tools", "total")

    def __init__(  # noqa: PLR0913  # a record
        self, records: bytes, total: int, newest: int, tools: tuple[tuple[bytes, str], ...], model: str, offer: int
    ) -> None:
        self.offer = offer
        self.newest = newest
        self.total = total
        self.records = records
        self.tools = tools
        self.model = model


class _Call:
    """One of a history's calls, as far as nothing else in the history matters; never changed.

    Attributes:
        tool: its name.
        tool_digest: of that.
        named: digest of id, tool and arguments, which tell it from all but its equals; empty where it has no id.
        first: its record where no equal one stands before it.
        pair: digest of tool and arguments, a number.
    """

    __slots__ = ("first", "named", "pair", "tool", "tool_digest")

    def __init__(self, part: Part) -> None:
        """Bring it into one spelling.

        Raises:
            NotCounted: it cannot be read.
        """
        spelled = _spell(part)
        self.tool = part.name
        self.tool_digest = digest_tool(part.name)
        self.named = _digest(part.id.encode() + _SEPARATOR + spelled, _NAMED) if part.id else b""
        self.pair = crc32(spelled)
        self.first = self.write(1)

    def write(self, number: int) -> bytes:
        """The record of the one that has this many equals up to itself."""
        name = _digest(b"%b%d" % (self.named, number), _CALL) if self.named else _NO_CALL
        return name + self.tool_digest + self.pair.to_bytes(_PAIR)


class Shown:
    """What one message shows; never changed.

    Attributes:
        calls: in order.
        steps: that it takes of those which a look into a body may take; see `walk`.
    """

    __slots__ = ("calls", "steps")

    def __init__(self, calls: list[_Call], steps: int) -> None:
        self.calls = calls
        self.steps = steps


OTHERS: Final = Shown([], 0)
"""What a message shows that is not the assistant's."""

_KNOWN: Final[Memo[bytes, Shown]] = Memo(_MOST_KNOWN)
"""What messages show, by what they are: a history comes again with each request of its agent, and is longer by one turn."""


class Tally:
    """What a history shows as far as it was read; never changed.

    Attributes:
        records: as `CallHistory` has them.
        total: the same.
        newest: the same.
        ended: the assistant's turn is over.
        tools: the same.
        again: of calls with ids that have equals, their first record and how many there are.
        steps: that it took of those which a look into a body may take.
    """

    __slots__ = ("again", "ended", "newest", "records", "steps", "tools", "total")

    def __init__(  # noqa: PLR0913  # a record
        self,
        records: bytes,
        total: int,
        newest: int,
        tools: tuple[tuple[bytes, str], ...],
        again: dict[bytes, int],
        steps: int,
        *,
        ended: bool,
    ) -> None:
        self.ended = ended
        self.newest = newest
        self.records = records
        self.total = total
        self.tools = tools
        self.again = again
        self.steps = steps

    def add(self, shown: Sequence[Shown]) -> Tally:
        """With what the next messages show."""
        if not shown:
            return self
        total, newest, ended, steps = self.total, self.newest, self.ended, self.steps
        tools = dict(self.tools)
        numbers: dict[bytes, int] = {}
        records = [self.records]
        for message in shown:
            if message is OTHERS:
                ended = True
                continue
            newest = len(message.calls) + (0 if ended else newest)
            ended = False
            steps += message.steps
            for call in message.calls:
                total += call.pair
                if call.tool and call.tool_digest not in tools:
                    tools[call.tool_digest] = call.tool[:_SHOWN]
                if not call.named:
                    records.append(call.first)
                    continue
                number = numbers[call.first] = (numbers.get(call.first) or self._count(call.first)) + 1
                records.append(call.first if number == 1 else call.write(number))
        again = {first: number for first, number in numbers.items() if number > 1}
        named = self.tools if len(tools) == len(self.tools) else tuple(tools.items())
        again = {**self.again, **again} if again else self.again
        return Tally(b"".join(records), total, newest, named, again, steps, ended=ended)

    def _count(self, first: bytes) -> int:
        """How many equals a call has, itself included, by its first record."""
        if not self.records:
            return 0
        at = self.records.find(first)
        while at >= 0 and at % RECORD:
            at = self.records.find(first, at + 1)
        return self.again.get(first, 1) if at >= 0 else 0


NOTHING: Final = Tally(b"", 0, 0, (), {}, 0, ended=True)


def read_tool_calls(document: Document) -> CallHistory:
    """The calls that a history shows; where the server keeps the history, a result stands for its call.

    Raises:
        NotCounted: there is no conversation, it cannot be read, or it is too much.
    """
    conversation = open_conversation(document)
    return summarize(NOTHING.add(list_shown(conversation)), conversation.model, conversation.find_offer())


def summarize(tally: Tally, model: str, offers: str) -> CallHistory:
    """What a request's history shows, given the model that its body names and what it offers that."""
    return CallHistory(tally.records, tally.total, tally.newest, tally.tools, model[:_LONGEST_MODEL], _OFFERS[offers])


def find_called(patch: Patch, names: Collection[str]) -> str | None:
    """Which of some tools a history has called last.

    Returns:
        its name; empty where the history has called others alone, or the server keeps it; None where nothing was called.

    Raises:
        NotCounted: the history cannot be read in one way alone, or is too much.
    """
    try:
        shape, given = find_conversation(patch)
    except NotCounted as why:
        if why.reason != "no_messages":
            raise
        return None
    called = "" if look_back(patch, shape).after else None
    for raw, value in patch.open_newest(given):
        message = read_message(patch, shape, raw)
        if shape.name_speaker(message) != ASSISTANT:
            continue
        patch.take_whole(value)
        for part in reversed(_read_parts(shape, message)):
            if part.kind == CALL and part.name in names:
                return part.name
            called = "" if part.kind == CALL else called
    return called


def digest_tool(name: str) -> bytes:
    """4 bytes that tell a tool from others, as records have it."""
    return _digest(name.encode("utf-8", "surrogateescape"), _TOOL)


def _digest(data: bytes, size: int) -> bytes:
    return blake2b(data, digest_size=size).digest()


def list_shown(conversation: Conversation) -> list[Shown]:
    """What messages show, the oldest first; of calls that the server keeps, their results.

    Raises:
        NotCounted: a message cannot be read, or they are too much.
    """
    shape = conversation.shape
    if conversation.before.after:
        parts = [part for value in conversation.list_values() for part in _read_parts(shape, value)]
        called = {part.id for part in parts if part.kind == CALL}
        alone = [part for part in parts if part.kind == CALL or (part.kind == RESULT and part.id and part.id not in called)]
        return [Shown([_Call(part) for part in alone], 0)]
    return look_at_all(shape, conversation.list_values())


def look_at_all(shape: Shape, values: Sequence[Any]) -> list[Shown]:
    """What messages show.

    Raises:
        NotCounted: one cannot be read, or they are too much.
    """
    name_speaker = shape.name_speaker
    return [_look(shape, value) if name_speaker(value) == ASSISTANT else OTHERS for value in values]


def _look(shape: Shape, value: Any) -> Shown:  # noqa: ANN401  # of the shape's
    """What a message shows. One that was read recently is known, but for one with bounded numbers."""
    key = _encode((shape.path[0], value))
    if len(key) > _LONGEST_KEY:
        key = _digest(key, _NAMED)
    shown = _KNOWN.get(key)
    if shown is not None:
        walk(shown.steps)
        return shown
    steps, fractions = count_left()
    calls = [_Call(part) for part in _read_parts(shape, value) if part.kind == CALL]
    steps_left, fractions_left = count_left()
    shown = Shown(calls, steps - steps_left)
    if fractions_left == fractions and len(calls) <= _MOST_CALLS and sum([len(call.tool) for call in calls]) <= _LONGEST_NAMES:
        _KNOWN.put(key, shown)
    return shown


def _read_parts(shape: Shape, value: Any) -> list[Part]:  # noqa: ANN401  # of the shape's
    walk(1)
    return shape.read(value)


def _spell(part: Part) -> bytes:
    """Tool and arguments in one spelling; those of a result's call are unknown, and equal to no others.

    Raises:
        NotCounted: it cannot be read.
    """
    if part.kind == RESULT:
        return _SEPARATOR + _SEPARATOR + part.id.encode()
    return part.name.encode() + _SEPARATOR + write_canonical(read_arguments(part.value))
