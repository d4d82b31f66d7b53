"""What shapes read and make, as structs: the JSON of each API as far as a conversation stands in it, and its parts.

What is looked at later, if at all, stays raw. Structs are made by msgspec while Python runs, so they stand apart from the code
that is compiled; they cost a fifth of what a named tuple does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Raw, Struct, json

from extproc.similarity.document import ABSENT, Json, write_number

TEXT, CALL, RESULT, OTHER = "text", "call", "result", "other"


class Part(Struct, gc=False):
    """One thing in a message.

    Attributes:
        kind: TEXT, CALL, RESULT or OTHER.
        value: the text, the arguments, the result, or all of what is none of these; may have to be unpacked.
        name: of the tool, where this is a CALL.
        id: what connects a RESULT with its CALL, empty where a client names nothing.
        failed: the API marks the RESULT as an error.
    """

    kind: str
    value: Json
    name: str = ""
    id: str = ""
    failed: bool = False


class Conversation(Struct, gc=False):
    """The messages of one request.

    Attributes:
        messages: the newest first, each as its shape has it.
        is_assistant: whether a message is the model's own.
        read: what stands in a message, in order; raises NotCounted where that cannot be read, or is too much.
        raw: where in a message its text and its calls stand; ABSENT where that is in several places.
        elsewhere: what went before the messages is kept by the server.
        after: what it goes on from there, as it stands in the body; empty where nothing says so.
    """

    messages: Iterable[Any]
    is_assistant: Callable[[Any], bool]
    read: Callable[[Any], list[Part]]
    raw: Callable[[Any], Raw]
    elsewhere: bool = False
    after: bytes = b""


class Tool(Struct, gc=False):
    """What is called: a function, or a custom tool, which takes `input`."""

    name: str | None = None
    arguments: Raw = ABSENT
    input: Raw = ABSENT


class ToolCall(Struct, gc=False):
    """An element of a chat completion's `tool_calls`."""

    id: str | int | None = None
    function: Tool | None = None
    custom: Tool | None = None


class ChatMessage(Struct, gc=False):
    """A message of a chat, of Anthropic's or of Bedrock's; `thinking` is Ollama's, and never compared."""

    role: str | None = None
    content: Raw = ABSENT
    thinking: Raw = ABSENT
    tool_calls: Raw = ABSENT
    tool_call_id: Raw = ABSENT
    function_call: Raw = ABSENT
    refusal: Raw = ABSENT


class ChatBody(Struct, gc=False):
    """A body with `messages`; of an Anthropic thread the server has the older ones."""

    messages: list[ChatMessage]
    thread: Raw = ABSENT


class Item(Struct, gc=False):
    """An item of a Responses request."""

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


class ResponsesBody(Struct, gc=False):
    """A body with `input`."""

    input: list[Item] | str
    previous_response_id: Raw = ABSENT
    previous_interaction_id: Raw = ABSENT
    conversation: Raw = ABSENT


class Content(Struct, gc=False):
    """A message of Gemini's."""

    role: str | None = None
    parts: Raw = ABSENT


class GeminiBody(Struct, gc=False):
    """A body with `contents`."""

    contents: list[Content]


class WrappedGeminiBody(Struct, gc=False):
    """The same inside of a `request`, as Gemini's own command line sends it."""

    request: GeminiBody


class PromptBody(Struct, gc=False):
    """A body with a plain `prompt`, which holds a history in words if at all."""

    prompt: Raw


decode_calls = json.Decoder(list[ToolCall], float_hook=write_number).decode
decode_tool = json.Decoder(Tool, float_hook=write_number).decode
