"""Bedrock's Converse: `messages` whose blocks are named by their one key."""
# interpreted: an API each; msgspec makes their Structs of annotations, which compiled classes do not keep

from __future__ import annotations

from extproc.apis.shapes.contents import Block, Reader, read_object, read_string, skip_thought
from extproc.apis.shapes.messages import CALL, RESULT, Part
from extproc.apis.shapes.places import TEXT_PART, Locator, Place, locate_text
from extproc.request.document import ABSENT
from extproc.request.patch import Fields, Patch, Value


def _read_call(block: Block) -> Part:
    call = read_object(block["toolUse"])
    return Part(CALL, call.get("input", ABSENT), read_string(call.get("name")), read_string(call.get("toolUseId")))


def _read_result(block: Block) -> Part:
    result = read_object(block["toolResult"])
    failed = result.get("status") == "error"
    return Part(RESULT, result.get("content", ABSENT), id=read_string(result.get("toolUseId")), failed=failed)


def _locate_result(patch: Patch, fields: Fields, _: Value) -> list[Place]:
    return locate_text(patch, patch.open_fields(fields.get("toolResult")).get("content"), TEXT_PART, result=True)


LOCATORS: dict[str, Locator] = {"toolResult": _locate_result}

BLOCKS: dict[str, Reader] = {
    "toolUse": _read_call,
    "toolResult": _read_result,
    "reasoningContent": skip_thought,
    "cachePoint": skip_thought,
}
