"""OpenAI Responses: `input` is a list of items, of which calls and results are ones of their own."""
# interpreted: an API each; msgspec makes their Structs of annotations, which compiled classes do not keep

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw, Struct

from extproc.apis.shapes.contents import is_given, read_content, read_string
from extproc.apis.shapes.conversation import ASSISTANT, ASSISTANTS, NOBODY, TOOL, Before, Shape, take_list
from extproc.apis.shapes.messages import CALL, OTHER, RESULT, Part
from extproc.apis.shapes.places import INPUT_TEXT_BLOCK, Place, locate_in_content, locate_text
from extproc.request.document import ABSENT, Json, open_value, write_canonical
from extproc.request.patch import Patch, Value

_OUTPUTS_OF_BLOCKS = frozenset({"function_call_output", "custom_tool_call_output"})


class Item(Struct, gc=False):
    """An item of `input`."""

    type: str | None = None
    role: str | None = None
    content: Raw = ABSENT
    call_id: Raw = ABSENT
    id: Raw = ABSENT
    name: Raw = ABSENT
    arguments: Raw = ABSENT
    input: Raw = ABSENT
    action: Raw = ABSENT
    actions: Raw = ABSENT
    operation: Raw = ABSENT
    code: Raw = ABSENT
    queries: Raw = ABSENT
    output: Raw = ABSENT
    error: Raw = ABSENT


class Body(Struct, gc=False):
    """A body with `input`."""

    input: list[Item] | str
    previous_response_id: Raw = ABSENT
    previous_interaction_id: Raw = ABSENT
    conversation: Raw = ABSENT


def _take(value: Json) -> Sequence[Json]:
    """The items, or the one that a text stands for."""
    if isinstance(value, str):
        return [Item(role="user", content=Raw(write_canonical(value)))] if value else []
    return take_list(value)


def _look_back(body: Body) -> Before:
    pointers = [body.previous_response_id, body.previous_interaction_id, body.conversation]
    after = b" ".join([write_canonical(open_value(pointer)) for pointer in pointers if is_given(pointer)])
    return Before(after, open_ended=is_given(body.conversation))


def _name_speaker(item: Item) -> str:
    kind = item.type or ""
    if kind == "reasoning":
        return ""
    if item.role:
        return ASSISTANT if item.role in ASSISTANTS else item.role
    if kind.endswith("_call") or kind == "mcp_approval_request":
        return ASSISTANT
    return TOOL if kind.endswith("_output") else NOBODY


def _is_call(item: Item) -> bool:
    return item.type is not None and item.type.endswith("_call")


def _find_raw(item: Item) -> Raw:
    return _find_input(item) if _is_call(item) else item.content


def _read(item: Item) -> list[Part]:
    if _is_call(item):
        return _read_call(item)
    if item.role and item.content is not ABSENT:
        return read_content(item.content)
    if not item.role and (item.type or "").endswith("_output"):
        return [Part(RESULT, item.output, id=read_string(item.call_id))]
    return [Part(OTHER, ABSENT, "" if item.role else item.type or "")]


def _read_call(item: Item) -> list[Part]:
    """A call, and what the server itself brought back for it."""
    name = read_string(item.name) or (item.type or "").removesuffix("_call")
    identity = read_string(item.id if item.call_id is ABSENT else item.call_id)  # nobody answers to what the server runs
    parts = [Part(CALL, _find_input(item), name, identity)]
    if is_given(item.output) or is_given(item.error):
        parts.append(Part(RESULT, item.output, id=identity, failed=is_given(item.error)))
    return parts


def _find_input(item: Item) -> Raw:
    """What a call is about; each kind has a key of its own for it."""
    for value in (item.arguments, item.input, item.action, item.actions, item.operation, item.code, item.queries):
        if value is not ABSENT:
            return value
    return ABSENT


def _locate(patch: Patch, item: Item, whole: Value) -> list[Place]:
    fields = patch.open_fields(whole)
    if item.role:
        return locate_in_content(patch, fields.get("content"), INPUT_TEXT_BLOCK)
    output = fields.get("output")
    if output is None or not (patch.is_text(output) or item.type in _OUTPUTS_OF_BLOCKS):
        return []
    return locate_text(patch, output, INPUT_TEXT_BLOCK, result=True)


SHAPES = (Shape(("input",), Body, Item, _name_speaker, _read, _find_raw, _take, _is_call, _look_back, locate=_locate),)
