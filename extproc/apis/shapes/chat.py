"""OpenAI chat completions, and who speaks the same language: Ollama, Cohere, plain messages."""
# interpreted: an API each; msgspec makes their Structs of annotations, which compiled classes do not keep

from __future__ import annotations

from msgspec import Raw, Struct, ValidationError, json

from extproc.apis.shapes.contents import Reader, is_given, read_content, read_string, read_text
from extproc.apis.shapes.conversation import ASSISTANT, ASSISTANTS, NOBODY, NOTHING_BEFORE, Before, Shape
from extproc.apis.shapes.messages import CALL, OTHER, RESULT, TEXT, Part
from extproc.apis.shapes.places import TEXT_BLOCK, Place, locate_in_content, locate_text
from extproc.request.document import ABSENT, Json, decode_json, hook_number_in_part, open_value, walk, write_canonical
from extproc.request.patch import Patch, Value

_RESULT_ROLES = frozenset({"tool", "function"})


class Message(Struct, gc=False):
    """A message of a chat, of Anthropic's or of Bedrock's; `thinking` is Ollama's, and never compared."""

    role: str | None = None
    content: Raw = ABSENT
    thinking: Raw = ABSENT
    tool_calls: Raw = ABSENT
    tool_call_id: str | int | None = None
    function_call: Raw = ABSENT
    refusal: Raw = ABSENT


class Body(Struct, gc=False):
    """A body with `messages`; of an Anthropic thread the server has the older ones."""

    messages: list[Message]
    thread: Raw = ABSENT


class Tool(Struct, gc=False):
    """What is called: a function, or a custom tool, which takes `input`."""

    name: str | None = None
    arguments: Json = None
    input: Json = None


class ToolCall(Struct, gc=False):
    """An element of `tool_calls`."""

    id: str | int | None = None
    function: Tool | None = None
    custom: Tool | None = None


_decode_calls = json.Decoder(list[ToolCall], float_hook=hook_number_in_part).decode
_decode_tool = json.Decoder(Tool, float_hook=hook_number_in_part).decode


def _look_back(body: Body) -> Before:
    if body.thread is ABSENT:
        return NOTHING_BEFORE
    thread = open_value(body.thread)
    given = thread.get("previous_message_id") if isinstance(thread, dict) else None
    return NOTHING_BEFORE if given is None else Before(after=write_canonical(given))


def _name_speaker(message: Message) -> str:
    return ASSISTANT if message.role in ASSISTANTS else message.role or NOBODY


def _find_raw(message: Message) -> Raw:
    if message.function_call is not ABSENT or message.refusal is not ABSENT:
        return ABSENT
    return message.content if message.tool_calls is ABSENT else message.tool_calls


def _read(message: Message) -> list[Part]:
    if message.role in _RESULT_ROLES:
        return [Part(RESULT, message.content, id=_write_id(message.tool_call_id))]
    if message.tool_calls is not ABSENT or message.function_call is not ABSENT or message.refusal is not ABSENT:
        return _read_beside(message)
    if not message.role or message.content is ABSENT:
        return [Part(OTHER, ABSENT)]
    return read_content(message.content)


def _read_beside(message: Message) -> list[Part]:
    """The same where something may stand beside the content."""
    calls = _read_calls(message)
    parts = read_content(message.content)
    if message.refusal is not ABSENT and is_given(message.refusal):
        parts.append(Part(TEXT, message.refusal))
    return parts + calls if parts or calls or message.content is not ABSENT else [Part(OTHER, ABSENT)]


def _read_calls(message: Message) -> list[Part]:
    """The calls that stand beside a message's content."""
    parts = []
    if message.tool_calls is not ABSENT and is_given(message.tool_calls):
        try:
            calls = decode_json(message.tool_calls, _decode_calls)
        except ValidationError:
            return [Part(CALL, message.tool_calls)]  # of no kind that is known
        if len(calls) > 1:
            walk(len(calls))
        parts = [_read_call(call) for call in calls if call.function or call.custom]
    if message.function_call is not ABSENT and is_given(message.function_call):
        parts.append(_read_function(message.function_call))
    return parts


def _read_call(call: ToolCall) -> Part:
    tool = call.function or call.custom or Tool()
    return Part(CALL, tool.arguments if call.function else tool.input, tool.name or "", _write_id(call.id))


def _write_id(value: str | int | None) -> str:
    """What connects a result with its call; empty where a client names nothing."""
    return value if isinstance(value, str) else "" if value is None else str(value)


def _read_function(call: Raw) -> Part:
    """The one call of a message from before there were `tool_calls`."""
    try:
        tool = decode_json(call, _decode_tool)
    except ValidationError:
        return Part(CALL, call)
    return Part(CALL, tool.arguments, tool.name or "")


def _locate(patch: Patch, message: Message, whole: Value) -> list[Place]:
    content = patch.open_fields(whole).get("content")
    if message.role in _RESULT_ROLES:
        return locate_text(patch, content, TEXT_BLOCK, result=True)
    return locate_in_content(patch, content, TEXT_BLOCK)


SHAPES = (Shape(("messages",), Body, Message, _name_speaker, _read, _find_raw, look_back=_look_back, locate=_locate),)

BLOCKS: dict[str, Reader] = {
    "text": read_text,
    "input_text": read_text,
    "output_text": read_text,
    "refusal": lambda block: Part(TEXT, read_string(block.get("refusal"))),
}
