"""The calls of tools that a request's history shows, each under a digest by which it is known again in later requests.

A client sends its history again and again, so a call is told from one that was counted by what it is itself: its id, its tool
and its arguments; of equal ones by how many stand before it. No digest depends on what else the history holds:

- Whoever sends a history again gets the same digests, and whoever appends to it gets them and new ones behind.
- Where a part of the history is gone (it was condensed), the digests of what is left are among those from before. A call is
  never counted twice; nor is an equal one left out, as long as ids tell them apart.
- Calls without ids, or whose ids repeat, are told apart by their number alone: one that is made again after its equals have
  gone from the history is taken for one of them.

A client that changes the arguments of a call that it has made has made another one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Any, Final
from zlib import crc32

from msgspec import Raw, json

from extproc.memo import Memo
from extproc.similarity.document import Document, NotCounted, count_left, walk, write_canonical
from extproc.similarity.patch import Patch
from extproc.similarity.shapes import find_conversation, look_back, open_conversation, read_message
from extproc.similarity.shapes.contents import read_arguments
from extproc.similarity.shapes.conversation import ASSISTANT, Conversation, Shape
from extproc.similarity.shapes.messages import CALL, RESULT, Part

_CALL: Final = 6
_TOOL: Final = 4
_PAIR: Final = 4
RECORD: Final = _CALL + _TOOL + _PAIR
"""Length of a call's record, in bytes: digests of the call, of its tool's name, and of tool and arguments."""

MOST_SPELLED: Final = 2**20
"""So much of names and arguments is read in one history, in bytes: it takes 40 ms at worst."""

_NAMED: Final = 16
_MOST_KNOWN: Final = 8_192
_LONGEST_KEY: Final = 512
_MOST_CALLS: Final = 8
_LONGEST_NAMES: Final = 256
"""So many messages are in a generation of those that are known, by themselves or, if they are longer, by a digest. None has
more calls, or longer names of tools. They take 0.6 KB each, and 60 MB in all if somebody means ill."""

_SHOWN: Final = 64
_LONGEST_MODEL: Final = 256
_SEPARATOR: Final = b"\xff"  # never in UTF-8
_encode: Final = json.Encoder().encode


class ToolCalls:
    """What a request's history shows; never changed.

    Attributes:
        records: RECORD bytes for each call, the oldest first; no two are equal.
        tools: digest and name, cut to 64 characters, of the tools among them, the first to be called first.
        model: that the body names, cut to 256 characters; empty where it names none.
    """

    __slots__ = ("model", "records", "tools")

    def __init__(self, records: bytes, tools: tuple[tuple[bytes, str], ...], model: str) -> None:
        """Keep them as given."""
        self.records = records
        self.tools = tools
        self.model = model


class _Call:
    """One of a history's calls, as far as nothing else in the history matters; never changed.

    Attributes:
        tool: its name.
        tool_digest: of that.
        named: digest of id, tool and arguments, which tell it from all but its equals.
        first: its record where no equal one stands before it.
        pair: digest of tool and arguments.
        size: of tool and arguments, in bytes.
    """

    __slots__ = ("first", "named", "pair", "size", "tool", "tool_digest")

    def __init__(self, part: Part, most: int) -> None:
        """Bring it into one spelling.

        Raises:
            NotCounted: it cannot be read, or has more than `most` bytes.
        """
        spelled = _spell(part, most)
        self.tool = part.name
        self.tool_digest = digest_tool(part.name)
        self.named = _digest(part.id.encode() + _SEPARATOR + spelled, _NAMED)
        self.pair = crc32(spelled).to_bytes(_PAIR)
        self.size = len(spelled)
        self.first = self.write(1)

    def write(self, number: int) -> bytes:
        """The record of the one that has so many equals up to itself."""
        return _digest(b"%b%d" % (self.named, number), _CALL) + self.tool_digest + self.pair


class Shown:
    """What one message shows; never changed.

    Attributes:
        calls: in order.
        size: of their tools and arguments, in bytes.
        steps: that it takes of those which a look into a body may take; see `walk`.
    """

    __slots__ = ("calls", "size", "steps")

    def __init__(self, calls: list[_Call], steps: int) -> None:
        """Sum up the calls' sizes."""
        self.calls = calls
        self.size = sum([call.size for call in calls])
        self.steps = steps


_KNOWN: Final[Memo[bytes, Shown]] = Memo(_MOST_KNOWN)
"""What messages show, by what they are: a history comes again with each request of its agent, and is longer by one turn."""


class Tally:
    """What a history shows as far as it was read; never changed.

    Attributes:
        records: as `ToolCalls` has them.
        tools: the same.
        again: of calls that have equals, their first record and how many there are.
        size: of all tools and arguments, in bytes.
        steps: that it took of those which a look into a body may take.
    """

    __slots__ = ("again", "records", "size", "steps", "tools")

    def __init__(
        self, records: bytes, tools: tuple[tuple[bytes, str], ...], again: dict[bytes, int], size: int, steps: int
    ) -> None:
        """Keep them as given."""
        self.records = records
        self.tools = tools
        self.again = again
        self.size = size
        self.steps = steps

    def add(self, shown: Sequence[Shown]) -> Tally:
        """With what the next messages show."""
        if not shown:
            return self
        size, steps = self.size, self.steps
        tools = dict(self.tools)
        numbers: dict[bytes, int] = {}
        records = [self.records]
        for message in shown:
            size += message.size
            steps += message.steps
            for call in message.calls:
                if call.tool and call.tool_digest not in tools:
                    tools[call.tool_digest] = call.tool[:_SHOWN]
                number = numbers[call.first] = (numbers.get(call.first) or self._count(call.first)) + 1
                records.append(call.first if number == 1 else call.write(number))
        again = {first: number for first, number in numbers.items() if number > 1}
        named = self.tools if len(tools) == len(self.tools) else tuple(tools.items())
        return Tally(b"".join(records), named, {**self.again, **again} if again else self.again, size, steps)

    def _count(self, first: bytes) -> int:
        """How many equals a call has, itself included, by its first record."""
        if not self.records:
            return 0
        at = self.records.find(first)
        while at >= 0 and at % RECORD:
            at = self.records.find(first, at + 1)
        return self.again.get(first, 1) if at >= 0 else 0


NOTHING: Final = Tally(b"", (), {}, 0, 0)


def read_tool_calls(document: Document) -> ToolCalls:
    """The calls that a history shows; where the server keeps the history, a result stands for its call.

    Raises:
        NotCounted: there is no conversation, it cannot be read, or it is too much.
    """
    conversation = open_conversation(document)
    return tell(NOTHING.add(list_shown(conversation)), conversation.model)


def tell(tally: Tally, model: str) -> ToolCalls:
    """What a request's history shows, given the model that its body names."""
    return ToolCalls(tally.records, tally.tools, model[:_LONGEST_MODEL])


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
    """What the assistant's messages show, the oldest first; of calls that the server keeps, their results.

    Raises:
        NotCounted: a message cannot be read, or they are too much.
    """
    shape = conversation.shape
    if conversation.before.after:
        parts = [part for value in conversation.list_values() for part in _read_parts(shape, value)]
        called = {part.id for part in parts if part.kind == CALL}
        alone = [part for part in parts if part.kind == CALL or (part.kind == RESULT and part.id and part.id not in called)]
        return [Shown(_describe(alone, MOST_SPELLED), 0)]
    return look_at_all(shape, conversation.list_values(ASSISTANT), MOST_SPELLED)


def look_at_all(shape: Shape, values: Sequence[Any], most: int) -> list[Shown]:
    """What messages of the assistant's show, in `most` bytes.

    Raises:
        NotCounted: one cannot be read, or they are too much.
    """
    found = []
    for value in values:
        shown = _look(shape, value, most)
        most -= shown.size
        if most < 0:
            raise NotCounted("inspect_limit")
        found.append(shown)
    return found


def _look(shape: Shape, value: Any, most: int) -> Shown:  # noqa: ANN401  # of the shape's
    """What a message shows, in `most` bytes. One that was looked at of late is known, but for one with bounded numbers."""
    key = _encode((shape.path[0], value))
    if len(key) > _LONGEST_KEY:
        key = _digest(key, _NAMED)
    shown = _KNOWN.get(key)
    if shown is not None:
        walk(shown.steps)
        return shown
    steps, fractions = count_left()
    calls = _describe([part for part in _read_parts(shape, value) if part.kind == CALL], most)
    steps_left, fractions_left = count_left()
    shown = Shown(calls, steps - steps_left)
    if fractions_left == fractions and len(calls) <= _MOST_CALLS and sum([len(call.tool) for call in calls]) <= _LONGEST_NAMES:
        _KNOWN.put(key, shown)
    return shown


def _read_parts(shape: Shape, value: Any) -> list[Part]:  # noqa: ANN401  # of the shape's
    walk(1)
    return shape.read(value)


def _describe(parts: list[Part], most: int) -> list[_Call]:
    """Calls in `most` bytes."""
    calls = []
    for part in parts:
        call = _Call(part, most)
        most -= call.size
        calls.append(call)
    return calls


def _spell(part: Part, most: int) -> bytes:
    """Tool and arguments in one spelling; those of a result's call are unknown, and equal to no others.

    Raises:
        NotCounted: it cannot be read, or has more than so many bytes.
    """
    if part.kind == RESULT:
        return _SEPARATOR + _SEPARATOR + part.id.encode()
    value = part.value
    if isinstance(value, Raw | str) and len(value) > most:
        raise NotCounted("inspect_limit")
    spelled = part.name.encode() + _SEPARATOR + write_canonical(read_arguments(value))
    if len(spelled) > most:
        raise NotCounted("inspect_limit")
    return spelled
