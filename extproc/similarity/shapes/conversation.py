"""What stands in any API's conversation: messages, and in them texts, calls of tools, results and whatever else.

Nothing of a message is decoded before somebody looks at it, which for most of a long history nobody does. What a model thought
(`thinking`, `reasoning`) is left out wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import Raw, Struct, ValidationError, json

from extproc.similarity.document import (
    ABSENT,
    WORTH_COUNTING,
    Json,
    NotJson,
    check_containers,
    decode_json,
    open_value,
    remove_at,
    walk,
    write_canonical,
)
from extproc.similarity.shapes.structs import OTHER, TEXT, Conversation, Part

ASSISTANTS = frozenset({"assistant", "model", "ai"})

_CACHE_CONTROL = ("*", "cache_control")  # which clients move from message to message

_MAX_WRAPPED = 32
"""A text of more elements is something that somebody says."""

_LONGEST_TAG = 256

_NEWS = ("result", "output", "response", "return", "state", "observ", "page", "screen", "browser", "history", "file", "error",
         "user", "human", "feedback", "query", "question", "answer", "task", "request", "message")  # fmt: skip  # one list

_decode_content = json.Decoder(list[dict[str, Raw]] | str | None).decode


class Shape(NamedTuple):
    """How one API writes a conversation.

    Attributes:
        body: a struct of the body's keys in which a conversation stands, the first of them the one that has to be there.
        open: the conversation in such a body.
    """

    body: type[Struct]
    open: Callable[[Any], Conversation]


Block = dict[str, Json]
Reader = Callable[[Block], Part | None]

READERS: dict[str, Reader] = {}
"""By the `type` of a block, or by the one key that names it: how it is read; None for a thought. Every shape adds its own."""


def read_content(content: Raw) -> list[Part]:
    """What stands in the content of a message, or of a tool's result.

    Raises:
        NotCounted: it cannot be read, or is too much.
    """
    if content is ABSENT:
        return []
    if len(content) > WORTH_COUNTING:
        check_containers(bytes(content))
    try:
        blocks = _decode_content(content)
    except ValidationError:
        return _read_values(decode_json(content))
    except (ValueError, RecursionError):
        raise NotJson from None
    if not isinstance(blocks, list):
        return [] if blocks is None else [Part(TEXT, blocks)]
    walk(len(blocks))
    return [part for part in map(read_block, blocks) if part is not None]


def _read_values(content: Json) -> list[Part]:
    """The same of what is no list of objects."""
    if not isinstance(content, list):
        return [Part(OTHER, content)]
    walk(len(content))
    return [Part(TEXT if isinstance(item, str) else OTHER, item) for item in content]


def read_block(block: Block) -> Part | None:
    """One element of a content; None for a thought."""
    kind = block.get("type")
    if kind is not None:
        reader = READERS.get(text_of(kind))
        if reader is not None:
            return reader(block)
    for key in block:
        reader = READERS.get(key)
        if reader is not None:
            return reader(block)
    return Part(OTHER, block)


def read_text(block: Block) -> Part | None:
    """A block of text, unless it is a thought, which some APIs mark on the text."""
    if "thought" in block and open_value(block["thought"]) is True:
        return None
    text = open_value(block.get("text"))
    if text is None or isinstance(text, str):
        return Part(TEXT, text or "")
    return Part(OTHER, block)


def skip_thought(_: Block) -> None:
    """A thought."""


def is_text(value: Json) -> bool:
    """Whether a value, decoded or not, is a string."""
    if not isinstance(value, Raw):
        return isinstance(value, str)
    view = memoryview(value)
    return bool(view) and view[0] == ord('"')


def text_of(value: Json) -> str:
    """A string, or a number as one; empty for anything else."""
    found = open_value(value)
    if isinstance(found, str):
        return found
    return str(found) if isinstance(found, int) and not isinstance(found, bool) else ""


def is_given(value: Raw) -> bool:
    """Whether a key stands in the body and holds something."""
    return value is not ABSENT and bytes(value) != b"null"


def arguments(value: Json) -> Json:
    """A call's arguments as a value; OpenAI sends them as a string that holds JSON, others as JSON itself.

    Raises:
        NotCounted: it cannot be read, or is too much.
    """
    value = unpack(value)
    if not isinstance(value, str):
        return value
    if len(value) > WORTH_COUNTING:
        check_containers(value)
    try:
        return decode_json(value)
    except NotJson:
        return value.strip() or {}  # some clients send nothing for no arguments


def result_text(value: Json) -> str:
    """What a tool brought back, as text: texts as one, anything else in one spelling."""
    value = unpack(value)
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list):
        walk(len(value))
        texts = [_text_in(item) for item in value]
        if None not in texts:
            return "\n".join([text for text in texts if text]).strip()
        value = remove_at(value, _CACHE_CONTROL)
    if isinstance(value, dict) and len(value) == 1:
        (only,) = value.values()
        if isinstance(only, str):
            return only.strip()
    return write_canonical(value).decode() if value is not None else ""


def _text_in(item: Json) -> str | None:
    """The text of an element of a result; None where it is something else."""
    if isinstance(item, dict):
        item = item.get("text") if item.get("type", "text") in _TEXTS else None
    return item if isinstance(item, str) else None


_TEXTS = frozenset({"text", "input_text", "output_text"})


def unpack(value: Json) -> Json:
    """A value that was left raw, decoded; any other as it is.

    Raises:
        NotCounted: it is not JSON, or too much of it.
    """
    if type(value) is not Raw:
        return value
    if len(value) > WORTH_COUNTING:
        check_containers(bytes(value))
    return open_value(value)


def is_injected(text: str) -> bool:
    """Whether a text beside a result is nothing but elements that the agent's own program puts there, as `<system-reminder>`.

    What is named after something that comes back, or somebody who speaks, is no such thing: `<browser_state>`, `<feedback>`.
    """
    tags = find_wrappers(text)
    return bool(tags) and not any(word in tag.lower() for tag in tags for word in _NEWS)


def find_wrappers(text: str) -> list[str]:
    """The tags of the elements that a text is nothing but; none where it is something else."""
    tags: list[str] = []
    place = 0
    while len(tags) < _MAX_WRAPPED:
        end = text.find(">", place, place + _LONGEST_TAG) if text.startswith("<", place) else -1
        tag = text[place + 1 : end].partition(" ")[0] if end >= 0 else ""
        closing = text.find(f"</{tag}>", end) if tag.replace("-", "_").isidentifier() else -1
        if closing < 0:
            return []
        tags.append(tag)
        place = closing + len(tag) + 3
        while place < len(text) and text[place].isspace():
            place += 1
        if place == len(text):
            return tags
    return []
