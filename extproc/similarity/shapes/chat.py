"""OpenAI chat completions, and who speaks the same language: Ollama, Cohere, plain messages."""

from __future__ import annotations

from msgspec import Raw, ValidationError

from extproc.similarity.document import ABSENT, decode_json
from extproc.similarity.shapes.conversation import (
    ASSISTANTS,
    Reader,
    Shape,
    is_given,
    is_text,
    read_content,
    read_text,
    text_of,
)
from extproc.similarity.shapes.structs import (
    CALL,
    RESULT,
    TEXT,
    ChatBody,
    ChatMessage,
    Conversation,
    Part,
    Tool,
    decode_calls,
    decode_tool,
)

_RESULT_ROLES = frozenset({"tool", "function"})


def _open(body: ChatBody) -> Conversation:
    after = bytes(body.thread) if _continues_thread(body) else b""
    return Conversation(reversed(body.messages), _is_assistant, _read, _raw, bool(after), after)


def _continues_thread(body: ChatBody) -> bool:
    """Anthropic keeps the older messages."""
    if body.thread is ABSENT:
        return False
    thread = decode_json(body.thread)
    return isinstance(thread, dict) and "previous_message_id" in thread


def _is_assistant(message: ChatMessage) -> bool:
    return message.role in ASSISTANTS


def _raw(message: ChatMessage) -> Raw:
    if message.function_call is not ABSENT or message.refusal is not ABSENT:
        return ABSENT
    return message.content if message.tool_calls is ABSENT else message.tool_calls


def _read(message: ChatMessage) -> list[Part]:
    if message.role in _RESULT_ROLES:
        return [Part(RESULT, message.content, id=text_of(message.tool_call_id))]
    if message.tool_calls is not ABSENT and is_given(message.tool_calls):
        calls = _read_calls(message)
        return calls if is_text(message.content) else read_content(message.content) + calls
    parts = read_content(message.content)
    if message.refusal is not ABSENT and is_given(message.refusal):
        parts.append(Part(TEXT, message.refusal))
    if message.function_call is not ABSENT and is_given(message.function_call):
        parts.append(_read_function(message))
    return parts


def _read_calls(message: ChatMessage) -> list[Part]:
    try:
        calls = decode_json(message.tool_calls, decode_calls)
    except ValidationError:
        return [Part(CALL, message.tool_calls)]  # of no kind that is known
    parts = []
    for call in calls:
        tool = call.function or call.custom or Tool()
        value = tool.arguments if tool.arguments is not ABSENT else tool.input
        parts.append(Part(CALL, value, tool.name or "", "" if call.id is None else str(call.id)))
    return parts


def _read_function(message: ChatMessage) -> Part:
    """The one call of a message from before there were `tool_calls`."""
    try:
        tool = decode_json(message.function_call, decode_tool)
    except ValidationError:
        return Part(CALL, message.function_call)
    return Part(CALL, tool.arguments, tool.name or "")


SHAPE = Shape(ChatBody, _open)

BLOCKS: dict[str, Reader] = {
    "text": read_text,
    "input_text": read_text,
    "output_text": read_text,
    "refusal": lambda block: Part(TEXT, text_of(block.get("refusal"))),
}
