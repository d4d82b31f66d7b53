"""Reads the contents of messages and results: texts, tool calls, results and others.

A model's thoughts (`thinking`, `reasoning`) are always skipped. Comparisons also skip values that
differ each time: ids, and `cache_control`, which clients move from message to message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Raw, ValidationError, json

from extproc.apis.messages import OTHER, TEXT, Part
from extproc.request.document import (
    ABSENT,
    INSPECTION,
    WORTH_COUNTING,
    Json,
    NotJson,
    check_containers,
    check_members,
    decode_json,
    open_value,
    remove_at,
    walk,
    write_canonical,
)
from extproc.request.fingerprint import NO_BODY

_CACHE_CONTROL: Final = ("*", "cache_control")  # for results; their ids and states are content
_NEVER_COMPARED: Final[tuple[tuple[str, ...], ...]] = (
    ("id",),
    ("call_id",),
    ("tool_use_id",),
    ("cache_control",),
    ("status",),
)

_NULL: Final = b"null"

_MAX_WRAPPED: Final = 32
"""Maximum number of elements in a text of the harness; a text with more counts as a person's."""

_LONGEST_TAG: Final = 256

_FEW_MEMBERS: Final = 5
_MEMBER: Final = 2
"""Number of members of most blocks, and units per member of a larger one."""

_NEWS: Final = (
    "result",
    "output",
    "response",
    "return",
    "state",
    "observ",
    "page",
    "screen",
    "browser",
    "history",
    "file",
    "error",
    "user",
    "human",
    "feedback",
    "query",
    "question",
    "answer",
    "task",
    "request",
    "message",
)

_decode_content: Final = json.Decoder(list[dict[str, Raw]] | str).decode


Block = dict[str, Json]
Reader = Callable[[Block], Part | None]

READERS: Final[dict[str, Reader]] = {}
"""Readers of blocks, by `type` or by the one key that names the block; None means a thought. Each
API adds its own."""


def read_content(content: Raw) -> list[Part]:
    """The parts in the content of a message or of a tool's result.

    Raises:
        NotCounted: it is unreadable or too large.
    """
    if not is_given(content):
        return []
    if len(content) > WORTH_COUNTING:
        check_members(bytes(content))
    try:
        blocks = decode_json(content, _decode_content)
    except ValidationError:
        return _read_values(decode_json(content))
    if not isinstance(blocks, list):
        return [Part(TEXT, blocks)]
    walk(len(blocks))
    parts = []
    for block in blocks:
        part = read_block(block)
        if part is not None:
            parts.append(part)
    return parts


def _read_values(content: Json) -> list[Part]:
    """The parts of a value that is not a list of objects.

    A list of other values, such as tokens, is one part.
    """
    if not isinstance(content, list) or (content and not isinstance(content[0], str | dict)):
        return [Part(OTHER, content)]
    walk(len(content))
    return [part for part in map(_read_value, content) if part is not None]


def _read_value(item: Json) -> Part | None:
    if isinstance(item, dict):
        return read_block(item)
    return Part(TEXT if isinstance(item, str) else OTHER, item)


def read_block(block: Block) -> Part | None:
    """The part in one element of a content; None for a thought."""
    if len(block) > _FEW_MEMBERS:
        INSPECTION.take(_MEMBER * len(block))
    kind = block.get("type")
    if kind is not None:
        reader = READERS.get(read_string(kind))
        if reader is not None:
            return reader(block)
    for key in block:
        reader = READERS.get(key)
        if reader is not None:
            return reader(block)
    return Part(OTHER, block)


def read_text(block: Block) -> Part | None:
    """A block of text; None for a thought, which some APIs mark on the text."""
    if "thought" in block and open_value(block["thought"]) is True:
        return None
    text = open_value(block.get("text"))
    if text is None or isinstance(text, str):
        return Part(TEXT, text or "")
    return Part(OTHER, block)


def skip_thought(_: Block) -> None:
    """The reader of thoughts."""


def read_string(value: Json) -> str:
    """A string, or a number as a string; empty for other values."""
    found = open_value(value)
    if isinstance(found, str):
        return found
    return str(found) if isinstance(found, int) and not isinstance(found, bool) else ""


def read_object(value: Json) -> dict[str, Json]:
    """An object; empty for other values."""
    found = open_value(value)
    return found if isinstance(found, dict) else {}


def is_given(value: Raw) -> bool:
    """Whether a key is in the body and not empty."""
    return value is not ABSENT and (len(value) != len(_NULL) or bytes(value) != _NULL)


def read_arguments(value: Json) -> Json:
    """A call's arguments as a value.

    OpenAI sends them as JSON in a string, others as plain JSON.

    Raises:
        NotCounted: they are unreadable or too large.
    """
    value = open_value(value)
    if not isinstance(value, str):
        return value
    if len(value) > WORTH_COUNTING:
        check_containers(value)
    try:
        return decode_json(value)
    except NotJson:
        return value.strip() or {}  # some clients send an empty string


def read_result(value: Json) -> str:
    """A tool's result as text: texts are joined, other values are canonical JSON."""
    value = open_value(value)
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list):
        walk(len(value))
        texts = [_read_one(item) for item in value]
        if None not in texts:
            return "\n".join([text for text in texts if text]).strip()
        value = remove_at(value, _CACHE_CONTROL)
    if isinstance(value, dict) and len(value) == 1:
        (only,) = value.values()
        if isinstance(only, str):
            return only.strip()
    return write_canonical(value).decode() if value is not None else ""


def _read_one(item: Json) -> str | None:
    """The text in an element of a result; None for anything else."""
    if isinstance(item, dict):
        kind = item.get("type", "text")
        item = item.get("text") if isinstance(kind, str) and kind in _TEXTS else None
    return item if isinstance(item, str) else None


_TEXTS: Final = frozenset({"text", "input_text", "output_text"})


def name_other(value: Json) -> bytes:
    """A short digest of a value that is not text, such as an image.

    Equal digests mean equal values, ids aside.
    """
    value = open_value(value)
    ignored = _NEVER_COMPARED
    if isinstance(value, dict):
        value = {name: open_value(item) for name, item in value.items()}
        if value.get("type") == "item_reference":  # has only an id
            ignored = ()
    sums = NO_BODY.plus(write_canonical(value, ignored))
    return b"%d-%08x%08x" % (sums.length, sums.crc32, sums.adler32)


def list_texts(parts: list[Part]) -> list[str]:
    """The texts among the parts of a message.

    Raises:
        NotCounted: one of them is unreadable.
    """
    texts = [open_value(part.value) for part in parts if part.kind == TEXT]
    return [text for text in texts if isinstance(text, str)]


def is_injected(text: str) -> bool:
    """Whether a text beside a result is only elements of the harness, such as `<system-reminder>`.

    Elements named after a result or a speaker, such as `<browser_state>` and `<feedback>`, are not
    the harness's.
    """
    tags = find_wrappers(text)
    return bool(tags) and not any(word in tag.lower() for tag in tags for word in _NEWS)


def find_wrappers(text: str) -> list[str]:
    """The tags of a text that consists only of elements; empty for any other text."""
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
