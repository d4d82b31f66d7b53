"""The length of what a model reads: texts, calls, results and tools, without ids and JSON."""

from __future__ import annotations

import re
from typing import Final

from msgspec import Raw, defstruct, json

from extproc.apis.contents import read_string
from extproc.apis.conversation import TOOL_KEYS, Conversation
from extproc.apis.messages import TEXT, Part
from extproc.request.document import ABSENT, MAX_STEPS, open_value, walk, write_canonical

CHARACTERS_PER_TOKEN: Final = 4
IMAGE_TOKENS: Final = 250
"""Most APIs charge some hundreds of tokens for an image, whatever its size."""

_IMAGE: Final = IMAGE_TOKENS * CHARACTERS_PER_TOKEN
_MOST: Final = 2**20
"""Characters to count individually; longer requests are estimated by their bytes."""

_KEYS: Final = ("system", "instructions", "systemInstruction", "system_instruction")
_SYSTEM: Final = re.compile(rb'"system(?:_?[iI]nstruction)?"\s*:').search
_INSTRUCTIONS: Final = re.compile(rb'"instructions"\s*:').search
_decode_instructions: Final = json.Decoder(
    defstruct("Instructions", [(key, Raw, ABSENT) for key in _KEYS], gc=False)
).decode

_HOLDERS: Final = ("text", "parts")
"""Keys of an object with all the text that a model reads in it."""

_DEEPEST: Final = 4
"""Lists and objects further down are counted as written."""

_MEDIA: Final = (
    "image",
    "inlinedata",
    "inline_data",
    "filedata",
    "file_data",
    "document",
    "audio",
    "video",
    "media",
)


def count_characters(conversation: Conversation, data: bytes) -> int:
    """The number of characters of a request's texts and tools, an image counting as 1,000.

    Args:
        conversation: the request's conversation.
        data: its body, whose length is the measure of a very long one.

    Raises:
        NotCounted: it is unreadable.
    """
    conversation.check_count()
    total = sum(
        [len(found) for key in TOOL_KEYS if (found := conversation.find_field(key)) is not None]
    )
    if _may_instruct(data):
        total += _count_instructions(data)
    for message in conversation.read_backwards():
        for part in message.read_parts():
            total += _count_part(part)
        if total > _MOST:
            return max(total, len(data))
    return total


def _may_instruct(data: bytes) -> bool:
    """Whether a body may have such keys.

    Each pattern begins with a literal, so only its occurrences take time.
    """
    found = data.count(b'"system') + data.count(b'"instructions"')
    return found > MAX_STEPS or (
        found > 0 and (_SYSTEM(data) is not None or _INSTRUCTIONS(data) is not None)
    )


def _count_instructions(data: bytes) -> int:
    """The length of a body's instructions beside its messages.

    Raises:
        NotCounted: it is too large.
    """
    try:
        found = _decode_instructions(data)
    except (ValueError, RecursionError):  # errors of msgspec and Unicode are ValueErrors
        return 0
    return sum([_count_value(getattr(found, key)) for key in _KEYS])


def _count_part(part: Part) -> int:
    if part.kind == TEXT:
        text = open_value(part.value)
        return len(text) if isinstance(text, str) else 0
    return len(part.name) + _count_value(part.value)


def _count_value(value: object, depth: int = 0) -> int:
    if isinstance(value, Raw):
        if value is ABSENT or len(value) > _MOST:
            return len(value)
        value = open_value(value)
    if isinstance(value, str):
        return len(value)
    if depth < _DEEPEST and isinstance(value, list):
        walk(len(value))
        return sum([_count_value(item, depth + 1) for item in value])
    if depth < _DEEPEST and isinstance(value, dict):
        if _is_media(value):
            return _IMAGE
        for key in _HOLDERS:
            if key in value:
                return _count_value(value[key], depth + 1)
    return len(write_canonical(value))


def _is_media(block: dict[str, object]) -> bool:
    """Whether a block is an image or another file."""
    names = " ".join([read_string(block.get("type", "")), *block]).lower()
    return any(word in names for word in _MEDIA)
