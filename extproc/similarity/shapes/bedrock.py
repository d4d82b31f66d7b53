"""Bedrock's Converse: `messages` whose blocks are named by their one key."""

from __future__ import annotations

from extproc.similarity.document import ABSENT
from extproc.similarity.shapes.contents import Block, Reader, read_object, read_string, skip_thought
from extproc.similarity.shapes.messages import CALL, RESULT, Part
from extproc.similarity.shapes.places import TEXT_PART, Fields, Locator, Place, Value, locate_in_content, open_fields


def _read_call(block: Block) -> Part:
    call = read_object(block["toolUse"])
    return Part(CALL, call.get("input", ABSENT), read_string(call.get("name")), read_string(call.get("toolUseId")))


def _read_result(block: Block) -> Part:
    result = read_object(block["toolResult"])
    failed = result.get("status") == "error"
    return Part(RESULT, result.get("content", ABSENT), id=read_string(result.get("toolUseId")), failed=failed)


def _locate_result(_: Value, fields: Fields) -> list[Place]:
    return locate_in_content(open_fields(fields["toolResult"]).get("content"), TEXT_PART, result=True)


LOCATORS: dict[str, Locator] = {"toolResult": _locate_result}

BLOCKS: dict[str, Reader] = {
    "toolUse": _read_call,
    "toolResult": _read_result,
    "reasoningContent": skip_thought,
    "cachePoint": skip_thought,
}
