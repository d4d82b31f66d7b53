"""OpenAI's chat and text completions, compatible APIs such as Cohere's, and unknown APIs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Raw, ValidationError, defstruct, json

from extproc.apis.api import (
    Api,
    Changes,
    Completion,
    Endpoint,
    Question,
    ToolList,
    ToolWords,
    frame_events,
    frame_json,
    write_error,
)
from extproc.apis.contents import is_given, read_content, read_string, read_text
from extproc.apis.conversation import NOTHING_BEFORE, USER, Before, Shape, name_by_role
from extproc.apis.messages import CALL, OTHER, RESULT, TEXT, Part
from extproc.apis.places import TEXT_BLOCK, Place, locate_in_content, locate_text
from extproc.apis.usage import find_behind, find_model
from extproc.decision import Framed
from extproc.request.document import (
    ABSENT,
    Json,
    charge,
    decode_json,
    hook_number,
    open_value,
    walk,
    write_canonical,
)
from extproc.request.patch import Fields, Patch, Value

_DEPLOYMENTS: Final = ("/deployments/", "/engines/")
"""Path segments before the model's name, in Azure and in OpenAI's older API."""

_TRUE: Final = b"true"
_SWITCH: Final = "parallel_tool_calls"
_RESULT_ROLES: Final = frozenset({"tool", "function"})


_RAW: Final = (Raw, ABSENT)
ChatMessage: Final[Any] = defstruct(
    "ChatMessage",
    [
        ("role", str | None, None),
        ("content", *_RAW),
        ("thinking", *_RAW),
        ("tool_calls", *_RAW),
        ("tool_call_id", str | int | None, None),
        ("function_call", *_RAW),
        ("refusal", *_RAW),
        ("images", *_RAW),
        ("prefix", *_RAW),
    ],
    gc=False,
)
"""A message of a chat, also Anthropic's or Bedrock's; `thinking` and `images` are Ollama's.
Thinking is never compared."""

ChatBody: Final[Any] = defstruct(
    "ChatBody",
    [("messages", list[ChatMessage]), ("thread", *_RAW), ("continue_final_message", *_RAW)],
    gc=False,
)
"""A body with `messages`. In an Anthropic thread, the server stores the older messages."""

ChatTool: Final[Any] = defstruct(
    "ChatTool",
    [("name", str | None, None), ("arguments", Any, None), ("input", Any, None)],
    gc=False,
)
"""The called function, or a custom tool, which takes `input`."""

ToolCall: Final[Any] = defstruct(
    "ToolCall",
    [
        ("id", str | int | None, None),
        ("function", ChatTool | None, None),
        ("custom", ChatTool | None, None),
    ],
    gc=False,
)
"""An element of `tool_calls`."""

_decode_calls: Final = json.Decoder(list[ToolCall], float_hook=hook_number).decode
_decode_tool: Final = json.Decoder(ChatTool, float_hook=hook_number).decode


def _look_back(body: Json) -> Before:
    if body.thread is ABSENT:
        return NOTHING_BEFORE
    thread = open_value(body.thread)
    given = thread.get("previous_message_id") if isinstance(thread, dict) else None
    return NOTHING_BEFORE if given is None else Before(after=write_canonical(given))


_LONGEST_NOTHING: Final = 8
"""Maximum length of a value without calls or images, in bytes, such as `null` beside a text; ABSENT
has length 0."""


def _find_raw(message: Json) -> Raw:
    if message.function_call is not ABSENT or message.refusal is not ABSENT:
        return ABSENT
    calls: Raw = message.tool_calls
    raw: Raw = message.content if len(calls) <= _LONGEST_NOTHING else calls
    return raw


def _read(message: Json) -> list[Part]:
    role, content = message.role, message.content
    images: Raw = message.images if len(message.images) > _LONGEST_NOTHING else ABSENT
    if role in _RESULT_ROLES:
        identity = "" if message.tool_call_id is None else str(message.tool_call_id)
        return [Part(RESULT, content, "", identity, images=images)]
    if images is not ABSENT and role == USER:
        return [*read_content(content), Part(TEXT, "", images=images)]
    calls, function, refusal = message.tool_calls, message.function_call, message.refusal
    if calls is ABSENT and function is ABSENT and refusal is ABSENT:
        return read_content(content) if role and content is not ABSENT else [Part(OTHER, ABSENT)]
    parts = read_content(content)
    if is_given(refusal):
        parts.append(Part(TEXT, refusal))
    if is_given(calls):
        parts += _read_calls(calls)
    if is_given(function):
        parts.append(_read_function(function))
    return parts if parts or content is not ABSENT else [Part(OTHER, ABSENT)]


def _read_calls(raw: Raw) -> list[Part]:
    """The calls beside a message's content."""
    charge(raw)
    try:
        calls = decode_json(raw, _decode_calls)
    except ValidationError:
        return [Part(CALL, raw)]  # an unknown kind
    if len(calls) > 1:
        walk(len(calls))
    parts = []
    for call in calls:
        tool = call.function or call.custom
        if tool is not None:
            identity = "" if call.id is None else str(call.id)  # empty if the client sends none
            parts.append(
                Part(
                    CALL, tool.arguments if call.function else tool.input, tool.name or "", identity
                )
            )
    return parts


def _read_function(call: Raw) -> Part:
    """The one call of a message in the format before `tool_calls`."""
    charge(call)
    try:
        tool = decode_json(call, _decode_tool)
    except ValidationError:
        return Part(CALL, call)
    return Part(CALL, tool.arguments, tool.name or "")


def _marks_prefill(body: Json, message: Json) -> bool:
    """Whether message (Mistral, DeepSeek) or body (vLLM) says that it starts the answer."""
    return bytes(message.prefix) == _TRUE or bytes(body.continue_final_message) == _TRUE


def _locate(patch: Patch, message: Json, whole: Value) -> list[Place]:
    content = patch.open_fields(whole).get("content")
    if message.role in _RESULT_ROLES:
        return locate_text(patch, content, TEXT_BLOCK, result=True)
    return locate_in_content(patch, content, TEXT_BLOCK)


Prompt: Final[Any] = defstruct("Prompt", [("content", *_RAW)], gc=False)
"""A plain prompt as one message; earlier turns, if any, are in its text."""

TextBody: Final[Any] = defstruct("TextBody", [("prompt", *_RAW)], gc=False)
"""A body with a `prompt`."""


def _take_prompt(value: Json) -> Sequence[Json]:
    prompt = value if isinstance(value, Raw) else Raw(write_canonical(value))
    return [Prompt(prompt)] if is_given(prompt) else []


def _read_prompt(message: Json) -> list[Part]:
    return read_content(message.content)


_USAGE: Final = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
_DONE: Final = "[DONE]"


def complete_chat(completion: Completion, question: Question) -> Framed | None:
    """A chat completion, or its chunks."""
    if question.body is None or not completion.model:
        return None
    if question.read("stream") is True:
        return frame_events(
            _write_chunks(
                completion, _make("chat.completion.chunk", completion), _asks_usage(question)
            )
        )
    message = {"role": "assistant", "content": completion.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return frame_json(
        200, {**_make("chat.completion", completion), "choices": [choice], "usage": _USAGE}
    )


def _write_chunks(
    completion: Completion,
    chunk: dict[str, Any],
    usage: bool,  # noqa: FBT001  # one use
) -> Iterator[str | dict[str, Any]]:
    deltas: list[tuple[dict[str, str], str | None]] = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": completion.text}, None),
        ({}, "stop"),
    ]
    for delta, reason in deltas:
        yield {
            **chunk,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
        }
    if usage:
        yield {**chunk, "choices": [], "usage": _USAGE}
    yield _DONE


def complete_text(completion: Completion, question: Question) -> Framed | None:
    """A text completion, or its only chunk."""
    if question.body is None or not completion.model:
        return None
    choice = {"index": 0, "text": completion.text, "logprobs": None, "finish_reason": "stop"}
    answer = {**_make("text_completion", completion), "choices": [choice]}
    if question.read("stream") is not True:
        return frame_json(200, {**answer, "usage": _USAGE})
    usage = [{**answer, "choices": [], "usage": _USAGE}] if _asks_usage(question) else []
    return frame_events([answer, *usage, _DONE])


def _make(kind: str, completion: Completion) -> dict[str, Any]:
    """The common keys of each piece of an answer."""
    identity = f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{completion.name}"
    return {
        "id": identity,
        "object": kind,
        "created": completion.created,
        "model": completion.model,
    }


def _asks_usage(question: Question) -> bool:
    options = question.read("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


_REFUSES_SWITCH: Final = re.compile(r"(?:\A|[/.:@])o\d")
"""Models that answer 400 to `parallel_tool_calls` with any value: o1, o3-mini, openai/o4-mini and
the like."""


_TAKES_SWITCH: Final = re.compile(r"/(?:completions|responses)\Z")
"""Paths where `parallel_tool_calls` is known. Similar APIs may refuse unknown keys, as Cohere's
does."""


def hold_calls(patch: Patch, fields: Fields, changes: Changes, path: str) -> Changes:
    """See `ToolList.hold`; also used for the Responses API."""
    switch, model = fields.get(_SWITCH), find_model(path, patch.read_text(fields.get("model")))
    if not _TAKES_SWITCH.search(path) or _REFUSES_SWITCH.search(model):
        return changes
    if switch is not None and bytes(patch.read_raw(switch)) == b"false":
        return changes
    return {**changes, _SWITCH: b"false"}


def ask_usage(patch: Patch, fields: Fields) -> Changes:
    """See `Endpoint.ask_usage`."""
    stream, options = fields.get("stream"), fields.get("stream_options")
    if stream is None or bytes(patch.read_raw(stream)) != b"true":
        return {}
    if options is None or patch.is_null(options):
        return {"stream_options": b'{"include_usage":true}'}
    if patch.is_object(options):
        told = patch.open_fields(options).get("include_usage")
        if told is None or bytes(patch.read_raw(told)) != b"true":
            patch.change(options, {"include_usage": b"true"})
    return {}


_CHAT: Final = Endpoint(write_error, complete_chat)

API: Final = Api(
    default=Endpoint(write_error),
    name="openai",
    paths={
        r"/chat/completions\Z": _CHAT._replace(ask_usage=ask_usage),
        r"/completions\Z": Endpoint(write_error, complete_text, ask_usage=ask_usage),
    },
    # OpenAI, with and without its base path, Azure, OpenRouter, Fireworks, Model Studio, gateways.
    samples=(
        "/v1/chat/completions",
        "/v1/completions",
        "/chat/completions",
        "/openai/deployments/x/chat/completions",
        "/openai/v1/chat/completions",
        "/api/v1/chat/completions",
        "/models/chat/completions",
        "/inference/v1/chat/completions",
        "/compatible-mode/v1/chat/completions",
    ),
    keys={("messages", "model"): _CHAT},
    asked=("stream", "stream_options"),
    shapes=(
        Shape(
            ("messages",),
            ChatBody,
            ChatMessage,
            name_by_role,
            _read,
            _find_raw,
            look_back=_look_back,
            locate=_locate,
            marks_prefill=_marks_prefill,
            mark=b'"assistant"',
        ),
        Shape(
            ("prompt",),
            TextBody,
            Prompt,
            lambda _: "user",
            _read_prompt,
            lambda message: message.content,
            _take_prompt,
            look_back=lambda _: Before(in_words=True),
            fallback=True,
        ),
    ),
    blocks={
        "text": read_text,
        "input_text": read_text,
        "output_text": read_text,
        "refusal": lambda block: Part(TEXT, read_string(block.get("refusal"))),
    },
    tool_lists=(
        ToolList("messages", "tools", "tool_choice", hold=hold_calls),
        ToolList("messages", "functions", "function_call"),
    ),
    tool_words=ToolWords(
        wrappers=frozenset({"function", "custom"}),
        modes=frozenset({"required"}),
        allowed=frozenset({"allowed_tools"}),
        schemas=frozenset({"parameters"}),
    ),
    models=dict.fromkeys(_DEPLOYMENTS, lambda path: find_behind(path, *_DEPLOYMENTS)),
    counts={
        "input": ("usage.prompt_tokens",),
        "output": ("usage.completion_tokens",),
        "cached": ("usage.prompt_tokens_details.cached_tokens",),
    },
    events=("usage",),
    answered_by=("model",),
    credentials=("header:authorization", "header:api-key"),
    longest_answers=("max_completion_tokens", "max_tokens"),
    copies=("n", "best_of", "prompt"),
)
