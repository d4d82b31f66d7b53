"""The length of what a model reads of a request: its texts, calls, results and tools, but neither JSON around them nor ids."""

from __future__ import annotations

from typing import Final

from msgspec import Raw

from extproc.apis.contents import read_string
from extproc.apis.conversation import TOOL_KEYS, Conversation
from extproc.apis.messages import TEXT, Part
from extproc.request.document import ABSENT, open_value, write_canonical

CHARACTERS_PER_TOKEN: Final = 4
IMAGE_TOKENS: Final = 250
"""Most APIs charge some hundreds of tokens for an image, whatever its bytes."""

_IMAGE: Final = IMAGE_TOKENS * CHARACTERS_PER_TOKEN
_MOST: Final = 2**20
"""Characters counted one by one; what is longer is estimated by its bytes."""

_MEDIA: Final = ("image", "inlinedata", "inline_data", "filedata", "file_data", "document", "audio", "video", "media")


def count_characters(conversation: Conversation, size: int) -> int:
    """The number of characters of a request's texts and tools, an image counting as 1,000.

    Args:
        conversation: of the request.
        size: length of its body in bytes, with which a very long one is measured.

    Raises:
        NotCounted: it cannot be read.
    """
    total = sum([len(found) for key in TOOL_KEYS if (found := conversation.find_field(key)) is not None])
    total += _count_instructions(conversation)
    for message in conversation.read_backwards():
        for part in message.read_parts():
            total += _count_part(part)
        if total > _MOST:
            return max(total, size)
    return total


def _count_instructions(conversation: Conversation) -> int:
    """What a body says to the model beside its messages."""
    return sum([_count_value(found) for key in _INSTRUCTIONS if (found := conversation.find_field(key)) is not None])


_INSTRUCTIONS: Final = ("system", "instructions", "systemInstruction", "system_instruction")


def _count_part(part: Part) -> int:
    if part.kind == TEXT:
        text = open_value(part.value)
        return len(text) if isinstance(text, str) else 0
    return len(part.name) + _count_value(part.value)


def _count_value(value: object) -> int:
    if value is ABSENT:
        return 0
    if isinstance(value, dict) and _is_media(value):
        return _IMAGE
    if isinstance(value, Raw):
        opened = open_value(value) if len(value) <= _MOST else None
        if isinstance(opened, str):
            return len(opened)
        return len(value) if not isinstance(opened, list) else sum([_count_value(item) for item in opened])
    if isinstance(value, list):
        return sum([_count_value(item) for item in value])
    return len(value) if isinstance(value, str) else len(write_canonical(value))


def _is_media(block: dict[str, object]) -> bool:
    """Whether a block is an image or another file."""
    kind = read_string(block.get("type", "")).lower()
    return any(word in kind or word in key.lower() for word in _MEDIA for key in block)
