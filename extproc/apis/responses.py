"""OpenAI's Responses API: `input` is a list of items, with calls and results as separate items."""
# interpreted: msgspec creates Structs from annotations, which compiled classes do not keep

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Raw, Struct

from extproc.apis.api import (
    Api,
    Completion,
    Endpoint,
    Question,
    ToolList,
    ToolWords,
    frame_events,
    frame_json,
    write_error,
)
from extproc.apis.contents import is_given, read_content, read_string
from extproc.apis.conversation import (
    ASSISTANT,
    ASSISTANTS,
    OTHER_ROLE,
    TOOL,
    Before,
    Shape,
    take_list,
)
from extproc.apis.messages import CALL, OTHER, REFERENCE, RESULT, Part
from extproc.apis.openai import hold_calls
from extproc.apis.places import INPUT_TEXT_BLOCK, Place, locate_in_content, locate_text
from extproc.decision import Framed
from extproc.request.document import ABSENT, Json, charge, open_value, walk, write_canonical
from extproc.request.patch import Patch, Value

_REASONING = "rs_"
"""The prefix of ids of thoughts."""

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
    outputs: Raw = ABSENT
    results: Raw = ABSENT
    result: Raw = ABSENT
    error: Raw = ABSENT


class ResponsesBody(Struct, gc=False):
    """A body with `input`."""

    input: list[Item] | str
    previous_response_id: Raw = ABSENT
    previous_interaction_id: Raw = ABSENT
    conversation: Raw = ABSENT


def _take(value: Json) -> Sequence[Json]:
    """The items; a string is one item."""
    if isinstance(value, str):
        return [Item(role="user", content=Raw(write_canonical(value)))] if value else []
    return take_list(value)


def _look_back(body: ResponsesBody) -> Before:
    pointers = [body.previous_response_id, body.previous_interaction_id, body.conversation]
    after = b" ".join(
        [write_canonical(open_value(pointer)) for pointer in pointers if is_given(pointer)]
    )
    return Before(after, open_ended=is_given(body.conversation))


def _is_reference(item: Item) -> bool:
    """Whether an item is only the id of one on the server; its type may be omitted."""
    return item.type == "item_reference" or (
        item.type is None and item.role is None and item.id is not ABSENT
    )


def _name_speaker(item: Item) -> str:
    kind = item.type or ""
    if kind == "reasoning":
        return ""
    if _is_reference(item):
        return "" if read_string(item.id).startswith(_REASONING) else ASSISTANT
    if item.role:
        return ASSISTANT if item.role in ASSISTANTS else item.role
    if kind.endswith("_call") or kind == "mcp_approval_request":
        return ASSISTANT
    return TOOL if kind.endswith("_output") else OTHER_ROLE


def _is_call(item: Item) -> bool:
    return item.type is not None and item.type.endswith("_call")


def _joins(item: Item) -> bool:
    return _is_call(item) or _is_reference(item)


def _find_raw(item: Item) -> Raw:
    return _find_input(item) if _is_call(item) else item.content


def _read(item: Item) -> list[Part]:
    if _is_call(item):
        return _read_call(item)
    if _is_reference(item):
        return [Part(REFERENCE, item.id)]
    if item.role and item.content is not ABSENT:
        return read_content(item.content)
    if not item.role and (item.type or "").endswith("_output"):
        return [Part(RESULT, item.output, id=read_string(item.call_id))]
    return [Part(OTHER, ABSENT, "" if item.role else item.type or "")]


def _read_call(item: Item) -> list[Part]:
    """A call, and the result if the server ran it."""
    name = read_string(item.name) or (item.type or "").removesuffix("_call")
    # Calls that the server ran have no call id
    identity = read_string(item.id if item.call_id is ABSENT else item.call_id)
    given: Json = _find_input(item)
    walk(2)
    charge(given)
    returned: Json = next(
        (
            value
            for value in (item.output, item.outputs, item.results, item.result)
            if is_given(value)
        ),
        ABSENT,
    )
    if item.type == "web_search_call":
        given, returned = _divide_search(given)
    elif is_given(item.outputs):
        returned = _join_logs(open_value(item.outputs))
    parts = [Part(CALL, given, name, identity)]
    if returned is not ABSENT or is_given(item.error):
        parts.append(Part(RESULT, returned, id=identity, failed=is_given(item.error)))
    return parts


def _divide_search(action: Raw) -> tuple[Json, Json]:
    """A web search, and the sources it found; ABSENT if they are not included."""
    found = open_value(action)
    if not isinstance(found, dict) or not found.get("sources"):
        return action, ABSENT
    sources = found.pop("sources")
    return found, sources


def _join_logs(outputs: Json) -> Json:
    """The outputs of code as one text if they are texts; else unchanged."""
    given = outputs if isinstance(outputs, list) else [None]
    logs = [output.get("logs") if isinstance(output, dict) else None for output in given]
    texts = [text for text in logs if isinstance(text, str)]
    return "\n".join(texts) if len(texts) == len(given) else outputs


def _find_input(item: Item) -> Raw:
    """The raw input of a call; each kind of call has its own key for it."""
    for value in (
        item.arguments,
        item.input,
        item.action,
        item.actions,
        item.operation,
        item.code,
        item.queries,
    ):
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


_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}


def complete(completion: Completion, question: Question) -> Framed | None:
    """A response with one message, or the events of its stream."""
    if question.body is None or not completion.model:
        return None
    if question.read("stream") is True:
        events = enumerate(_write_events(completion))
        return frame_events(
            ({**event, "sequence_number": number} for number, event in events), named=True
        )
    return frame_json(200, _make_response(completion, "completed"))


def _write_events(completion: Completion) -> Iterator[dict[str, Any]]:
    """The events in a model's order (platform.openai.com, Streaming events)."""
    message = _make_message(completion, "completed")
    started = {**_make_message(completion, "in_progress"), "content": []}
    (part,) = message["content"]
    item = {"output_index": 0, "item_id": message["id"], "content_index": 0}
    for status in ("created", "in_progress"):
        yield {"type": f"response.{status}", "response": _make_response(completion, "in_progress")}
    yield {"type": "response.output_item.added", "output_index": 0, "item": started}
    yield {"type": "response.content_part.added", **item, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **item, "delta": completion.text, "logprobs": []}
    yield {"type": "response.output_text.done", **item, "text": completion.text, "logprobs": []}
    yield {"type": "response.content_part.done", **item, "part": part}
    yield {"type": "response.output_item.done", "output_index": 0, "item": message}
    yield {"type": "response.completed", "response": _make_response(completion, "completed")}


def _make_response(completion: Completion, status: str) -> dict[str, Any]:
    completed = status == "completed"
    return {
        "id": f"resp_{completion.name}",
        "object": "response",
        "created_at": completion.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": completion.model,
        "output": [_make_message(completion, status)] if completed else [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": _USAGE if completed else None,
    }


def _make_message(completion: Completion, status: str) -> dict[str, Any]:
    text = {"type": "output_text", "text": completion.text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{completion.name}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [text],
    }


_TOOLS = ToolList("input", "tools", "tool_choice", hold=hold_calls)

API = Api(
    name="openai",
    paths={
        r"/responses\Z": Endpoint(write_error, complete, websocket=True),
        r"/responses/input_tokens\Z": Endpoint(write_error, asks_model=False),
    },
    # OpenAI, Azure OpenAI, Codex with an account.
    samples=(
        "/v1/responses",
        "/responses",
        "/openai/v1/responses",
        "/openai/responses",
        "/backend-api/codex/responses",
    ),
    asked=("stream",),
    shapes=(
        Shape(
            ("input",),
            ResponsesBody,
            Item,
            _name_speaker,
            _read,
            _find_raw,
            _take,
            _joins,
            _look_back,
            locate=_locate,
            refers=_is_reference,
            mark=b'"function_call"',
        ),
    ),
    # Without a conversation, it continues one on the server
    tool_lists=(_TOOLS, _TOOLS._replace(beside="")),
    tool_words=ToolWords(
        groups={"namespace": "tools"},
        servers=frozenset({"mcp"}),
        called={"computer_use": "computer"},
    ),
    counts={
        "input": ("usage.input_tokens", "response.usage.input_tokens"),
        "output": ("usage.output_tokens", "response.usage.output_tokens"),
        "cached": (
            "usage.input_tokens_details.cached_tokens",
            "response.usage.input_tokens_details.cached_tokens",
        ),
    },
    events=("usage", "response.usage"),
    answered_by=("model", "response.model"),
    credentials=("header:authorization", "header:api-key"),
    longest_answers=("max_output_tokens",),
)
