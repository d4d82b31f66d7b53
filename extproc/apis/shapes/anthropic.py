"""Anthropic messages: a chat whose calls, results and thoughts are blocks of a content."""
# interpreted: an API each; msgspec makes their Structs of annotations, which compiled classes do not keep

from __future__ import annotations

from extproc.apis.shapes.contents import Block, Reader, read_string, skip_thought
from extproc.apis.shapes.messages import CALL, RESULT, Part
from extproc.apis.shapes.places import PLAIN, TEXT_BLOCK, Locator, Place, locate_text
from extproc.request.document import ABSENT, open_value
from extproc.request.patch import Fields, Patch, Value


def _read_call(block: Block) -> Part:
    return Part(CALL, block.get("input", ABSENT), read_string(block.get("name")), read_string(block.get("id")))


def _read_result(block: Block) -> Part:
    failed = "is_error" in block and open_value(block["is_error"]) is True
    return Part(RESULT, block.get("content", ABSENT), id=read_string(block.get("tool_use_id")), failed=failed)


def _locate_result(patch: Patch, fields: Fields, block: Value) -> list[Place]:
    if "content" not in fields:
        return [Place(block, PLAIN, "content", result=True)]
    return locate_text(patch, fields["content"], TEXT_BLOCK, result=True)


LOCATORS: dict[str, Locator] = {"tool_result": _locate_result}

BLOCKS: dict[str, Reader] = {
    "tool_use": _read_call,
    "server_tool_use": _read_call,
    "mcp_tool_use": _read_call,
    "tool_result": _read_result,
    "mcp_tool_result": _read_result,
    "web_search_tool_result": _read_result,
    "web_fetch_tool_result": _read_result,
    "code_execution_tool_result": _read_result,
    "bash_code_execution_tool_result": _read_result,
    "text_editor_code_execution_tool_result": _read_result,
    "thinking": skip_thought,
    "redacted_thinking": skip_thought,
}
