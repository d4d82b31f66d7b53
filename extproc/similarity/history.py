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

from hashlib import blake2b
from typing import Final
from zlib import crc32

from msgspec import Raw

from extproc.similarity.document import Document, NotCounted, write_canonical
from extproc.similarity.shapes import open_conversation
from extproc.similarity.shapes.contents import read_arguments
from extproc.similarity.shapes.conversation import ASSISTANT, Conversation
from extproc.similarity.shapes.messages import CALL, RESULT, Part

_CALL: Final = 6
_TOOL: Final = 4
_PAIR: Final = 4
RECORD: Final = _CALL + _TOOL + _PAIR
"""Length of a call's record, in bytes: digests of the call, of its tool's name, and of tool and arguments."""

_MOST_SPELLED: Final = 2**20
"""So much of names and arguments is read in one history, in bytes: it takes 40 ms at worst."""

_SHOWN: Final = 64
_LONGEST_MODEL: Final = 256
_SEPARATOR: Final = b"\xff"  # never in UTF-8


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


def read_tool_calls(document: Document) -> ToolCalls:
    """The calls that a history shows; where the server keeps the history, a result stands for its call.

    Raises:
        NotCounted: there is no conversation, it cannot be read, or it is too much.
    """
    conversation = open_conversation(document)
    calls = _list_calls(conversation)
    model = conversation.model[:_LONGEST_MODEL]
    if not calls:
        return ToolCalls(b"", (), model)
    tools: dict[str, bytes] = {}
    numbers: dict[bytes, int] = {}
    records = []
    left = _MOST_SPELLED
    for part in calls:
        tool = tools.get(part.name)
        if tool is None:
            tool = tools[part.name] = digest_tool(part.name)
        spelled = _spell(part, left)
        left -= len(spelled)
        call = part.id.encode() + _SEPARATOR + spelled
        number = numbers[call] = numbers.get(call, 0) + 1
        records.append(_digest(b"%b%b%d" % (call, _SEPARATOR, number), _CALL) + tool + crc32(spelled).to_bytes(_PAIR))
    named = tuple([(digest, name[:_SHOWN]) for name, digest in tools.items() if name])
    return ToolCalls(b"".join(records), named, model)


def list_used(document: Document) -> list[str]:
    """The tools that a history uses, the last to be called first; an empty name for calls of which it does not say it.

    Raises:
        NotCounted: as `read_tool_calls`.
    """
    conversation = open_conversation(document)
    used = [part.name for part in reversed(_list_calls(conversation))]
    return list(dict.fromkeys([*used, ""] if conversation.before.after else used))


def digest_tool(name: str) -> bytes:
    """4 bytes that tell a tool from others, as records have it."""
    return _digest(name.encode("utf-8", "surrogateescape"), _TOOL)


def _digest(data: bytes, size: int) -> bytes:
    return blake2b(data, digest_size=size).digest()


def _list_calls(conversation: Conversation) -> list[Part]:
    """The calls, and the results whose calls are not there because the server keeps them; the oldest first."""
    if conversation.before.after:
        found = conversation.list_parts()
        called = {part.id for part in found if part.kind == CALL}
        return [part for part in found if part.kind == CALL or (part.kind == RESULT and part.id and part.id not in called)]
    return [part for part in conversation.list_parts(ASSISTANT) if part.kind == CALL]


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
