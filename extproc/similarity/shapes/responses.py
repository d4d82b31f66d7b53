"""OpenAI Responses: `input` is a list of items, of which calls and results are ones of their own."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Raw

from extproc.similarity.document import ABSENT, write_canonical
from extproc.similarity.shapes.conversation import ASSISTANTS, Shape, is_given, read_content, text_of
from extproc.similarity.shapes.structs import CALL, OTHER, RESULT, Conversation, Item, Part, ResponsesBody


def _open(body: ResponsesBody) -> Conversation:
    items = body.input if isinstance(body.input, list) else [Item(role="user", content=Raw(write_canonical(body.input)))]
    pointers = [body.previous_response_id, body.previous_interaction_id, body.conversation]
    after = b" ".join([bytes(pointer) for pointer in pointers if is_given(pointer)])
    return Conversation(_backwards(items), _is_assistant, _read, _raw, bool(after), after)


def _backwards(items: list[Item]) -> Iterator[list[Item]]:
    """The items without thoughts, each alone but for calls: those that stand side by side were made at once."""
    calls: list[Item] = []
    for item in reversed(items):
        if item.type == "reasoning":
            continue
        if _is_call(item):
            calls.append(item)
            continue
        if calls:
            yield calls
            calls = []
        yield [item]
    if calls:
        yield calls


def _is_call(item: Item) -> bool:
    return item.type is not None and item.type.endswith("_call")


def _is_assistant(items: list[Item]) -> bool:
    item = items[0]
    return item.role in ASSISTANTS if item.role else _is_call(item) or item.type == "mcp_approval_request"


def _raw(items: list[Item]) -> Raw:
    return ABSENT if len(items) > 1 else _called_with(items[0]) if _is_call(items[0]) else items[0].content


def _read(items: list[Item]) -> list[Part]:
    item = items[0]
    if _is_call(item):
        return _read_calls(items)
    if item.role:
        return read_content(item.content)
    if (item.type or "").endswith("_output"):
        return [Part(RESULT, item.output, id=text_of(item.call_id))]
    return [Part(OTHER, item.type)]


def _read_calls(items: list[Item]) -> list[Part]:
    """Calls made at once, the newest first, and what the server itself brought back for them."""
    parts = []
    for item in reversed(items):
        name = text_of(item.name) or (item.type or "").removesuffix("_call")
        parts.append(Part(CALL, _called_with(item), name, text_of(item.call_id)))
        if is_given(item.output) or is_given(item.error):
            parts.append(Part(RESULT, item.output, id=text_of(item.call_id), failed=is_given(item.error)))
    return parts


def _called_with(item: Item) -> Raw:
    """What a call is about; each kind has a key of its own for it."""
    for value in (item.arguments, item.input, item.action, item.actions, item.operation, item.code, item.queries):
        if value is not ABSENT:
            return value
    return ABSENT


SHAPE = Shape(ResponsesBody, _open)
