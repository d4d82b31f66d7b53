"""Bedrock's Converse: `messages` whose blocks are named by their one key."""

from __future__ import annotations

from msgspec import Raw

from extproc.similarity.document import ABSENT, open_value
from extproc.similarity.shapes.conversation import Block, Reader, skip_thought
from extproc.similarity.shapes.structs import CALL, RESULT, Part


def _read_call(block: Block) -> Part:
    call = _read_object(block["toolUse"])
    return Part(CALL, call.get("input", ABSENT), _text(call.get("name")), _text(call.get("toolUseId")))


def _read_result(block: Block) -> Part:
    result = _read_object(block["toolResult"])
    failed = result.get("status") == "error"
    return Part(RESULT, result.get("content", ABSENT), id=_text(result.get("toolUseId")), failed=failed)


def _read_object(value: Raw) -> dict[str, object]:
    found = open_value(value)
    return found if isinstance(found, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


BLOCKS: dict[str, Reader] = {
    "toolUse": _read_call,
    "toolResult": _read_result,
    "reasoningContent": skip_thought,
    "cachePoint": skip_thought,
}
