"""What stands in an LLM request: messages, their text, the tools that were called and what came back.

OpenAI chat completions, OpenAI Responses, Anthropic messages, Gemini, Bedrock's Converse and plain prompts are read alike.
One pass over the body tells its messages apart and leaves their contents as they are; those are decoded when somebody looks at
them, which for most of a long history nobody does.

Left out wherever requests are compared: ids, which are new each time; `cache_control`, which clients move from message to
message; and what a model thought (`reasoning`, `thinking`), which is never the same twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Raw, Struct, ValidationError, json

from extproc.fingerprint import NO_BODY
from extproc.similarity.document import (
    ABSENT,
    Document,
    Json,
    NotCounted,
    NotJson,
    decode_json,
    hook_number,
    open_value,
    walk,
    write_canonical,
    write_number,
)
from extproc.similarity.shapes.conversation import read_block
from extproc.similarity.shapes.structs import CALL, OTHER, RESULT, TEXT, Part

_THOUGHTS = frozenset({"reasoning", "thinking", "redacted_thinking"})
_CALLS = frozenset({"function_call", "custom_tool_call"})
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})
_KNOWN_ITEMS = frozenset({"function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output"})
RESULT_ROLES = frozenset({"tool", "function"})
_NEVER_COMPARED: tuple[tuple[str, ...], ...] = (("id",), ("call_id",), ("tool_use_id",), ("cache_control",), ("status",))
_NEVER_COMPARED_IN_RESULTS = (("*", "cache_control"),)  # whose ids and states are what the tool found out

_NOTHING_SAID = frozenset({"role", "type", "id", "name", "status", "content", "tool_calls", "refusal", "function_call"})


class Tool(Struct, gc=False):
    """What is called by an element of `tool_calls`: a function, or a custom tool, which takes `input`."""

    name: str = ""
    arguments: Json = None
    input: Json = None


class ToolCall(Struct, gc=False):
    """An element of a chat completion's `tool_calls`."""

    id: str | int | None = None
    function: Tool | None = None
    custom: Tool | None = None


class Message(Struct, gc=False):
    """A message of a chat or of Anthropic, or an item of a Responses request: the keys that are compared in any of them."""

    role: str | None = None
    type: str | None = None
    content: Raw = ABSENT  # of a message that somebody says, whatever `content` has made of it
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | int | None = None
    function_call: Tool | None = None
    refusal: str | None = None
    call_id: str | int | None = None
    name: str | None = None
    arguments: Json = None
    input: Json = None
    output: Raw = ABSENT
    parts: Raw = ABSENT  # of a message of Gemini's, in place of `content`


class _Body(Struct, gc=False):
    """The keys of a body in which a conversation stands."""

    model: str | None = None
    messages: list[Message] | None = None
    input: list[Message] | str | None = None
    contents: list[Message] | None = None
    prompt: Raw = ABSENT
    thread: Raw = ABSENT
    previous_response_id: Raw = ABSENT
    conversation: Raw = ABSENT


_decode_body = json.Decoder(_Body, float_hook=hook_number).decode
_decode_content = json.Decoder(list[dict[str, Raw]] | str | None).decode
_decode_message = json.Decoder(Message, float_hook=write_number).decode


class Conversation(NamedTuple):
    """The messages of one request.

    Attributes:
        key: of the body, under which the messages stand.
        model: empty when the request names none.
        messages: the newest last; as values where the whole body was decoded.
        elsewhere: what went before is not in the request: the server keeps it (`previous_response_id`, `conversation`,
            `thread`), or a plain prompt holds it in words.
        after: what it goes on from there (`previous_response_id`, `previous_message_id`) in one spelling; empty where there is
            nothing.
        open_ended: the server appends to a `conversation`, whose end nobody but it knows.
    """

    key: str
    model: str
    messages: list[Json]
    elsewhere: bool = False
    after: bytes = b""
    open_ended: bool = False

    def backwards(self, document: Document) -> Iterator[Message]:
        """The messages from the newest to the oldest, without thoughts; what is of no known kind holds itself as its content.

        Args:
            document: in which they stand.

        Raises:
            NotCounted: one cannot be read.
        """
        messages = self.messages
        for place in range(len(messages) - 1, -1, -1):
            walk(1)
            message = messages[place]
            if type(message) is not Message:
                message = messages[place] = _message(message)
            if self.key == "contents":
                _as_others_write(message)
            if message.role:
                if message.content is ABSENT and not (message.tool_calls or message.function_call or message.refusal):
                    message = self._in_its_own_keys(document, place, message)
            elif message.type in _THOUGHTS:
                continue
            elif message.type not in _KNOWN_ITEMS:
                message = Message(type=OTHER, content=self._whole(document, place))
            yield message

    def _in_its_own_keys(self, document: Document, place: int, message: Message) -> Message:
        """A message without anything that is read here holds itself as its content, unless there is nothing in it."""
        if document.value()[self.key][place].keys() <= _NOTHING_SAID:
            return message
        return Message(role=message.role, content=self._whole(document, place))

    def _whole(self, document: Document, place: int) -> Raw:
        return Raw(write_canonical(document.value()[self.key][place]))


def conversation(document: Document) -> Conversation:
    """The conversation in a body, which everybody who asks shares.

    Raises:
        NotCounted: there is none, or it cannot be read.
    """
    if not len(document):
        raise NotCounted("no_messages")
    body = document.part(_decode_body)
    known: Conversation | None = document.conversation
    if known is None:
        known = document.conversation = _conversation(body)
    return known


def _conversation(body: Json) -> Conversation:
    if isinstance(body, dict):
        body = _body(body)
    if not isinstance(body, _Body):
        raise NotCounted("no_messages")
    model = body.model or ""
    if body.messages:
        after = _previous_message(body.thread)
        return Conversation("messages", model, body.messages, bool(after), after)
    if isinstance(body.input, list) and body.input and not any(isinstance(item, Message | dict) for item in body.input):
        raise NotCounted("no_messages")  # texts or tokens to be embedded
    if body.input:
        messages = [_user(write_canonical(body.input))] if isinstance(body.input, str) else body.input
        after = write_canonical(open_value(body.previous_response_id)) if _given(body.previous_response_id) else b""
        open_ended = _given(body.conversation)
        return Conversation("input", model, messages, bool(after) or open_ended, after, open_ended)
    if body.contents:
        return Conversation("contents", model, body.contents)
    if _given(body.prompt):
        return Conversation("prompt", model, [_user(body.prompt)], elsewhere=True)
    raise NotCounted("no_messages")


def _body(value: dict[str, Json]) -> _Body:
    """A body that was decoded as a whole, as far as it is of the types that a conversation has."""

    def raw(name: str) -> Raw:
        return Raw(write_canonical(value[name])) if name in value else ABSENT

    model, messages, given, contents = (value.get(name) for name in ("model", "messages", "input", "contents"))
    return _Body(
        model if model is None or isinstance(model, str) else write_canonical(model).decode(),
        list(messages) if isinstance(messages, list) else None,
        list(given) if isinstance(given, list) else given if isinstance(given, str) else None,
        list(contents) if isinstance(contents, list) else None,
        raw("prompt"),
        raw("thread"),
        raw("previous_response_id"),
        raw("conversation"),
    )


def _previous_message(thread: Raw) -> bytes:
    """The message of an Anthropic thread that a request goes on from; empty where it carries its history."""
    value = open_value(thread)
    given = value.get("previous_message_id") if isinstance(value, dict) else None
    return b"" if given is None else write_canonical(given)


def _as_others_write(message: Message) -> None:
    """A message of Gemini's under the names that a chat has for them."""
    message.content = message.parts
    message.role = "assistant" if message.role == "model" else message.role or "user"


def _message(value: Json) -> Message:
    """A message that was decoded with the whole body; one of other types than a message's is of no known kind."""
    try:
        return _decode_message(write_canonical(value))
    except ValidationError:
        return Message()


def _given(value: Raw) -> bool:
    return value is not ABSENT and bytes(value) != b"null"


def _user(content: Raw | bytes) -> Message:
    return Message(role="user", content=Raw(content))


def content(message: Message) -> Json:
    """What somebody says in a message, ready for `parts`; None where nobody does."""
    if type(message.content) is not Raw:
        return message.content
    if message.role in RESULT_ROLES or not message.role or message.content is ABSENT:
        return None
    try:
        message.content = _decode_content(message.content)  # no number in it is decoded and charged
    except ValidationError:
        return decode_json(message.content)
    except (ValueError, RecursionError):
        raise NotJson from None
    return message.content


def is_only_text(message: Message, said: Json) -> bool:
    """Whether a message is nothing but the text that it says, as most are."""
    return type(said) is str and not (message.tool_calls or message.function_call or message.refusal)


def parts(message: Message, said: Json) -> Sequence[Part]:
    """What stands in a message, in order; `said` is its `content`."""
    if message.role in RESULT_ROLES:
        return (Part(RESULT, message.content, id=write_id(message.tool_call_id)),)
    if not message.role:
        return (_item(message),)
    found = _content(said)
    if message.refusal:
        found.append(Part(TEXT, message.refusal))
    found += list_chat_calls(message)
    return found


def list_chat_calls(message: Message) -> list[Part]:
    """The calls that stand beside a message's content, as those of a chat completion do."""
    found = []
    if message.tool_calls:
        walk(len(message.tool_calls))
        for call in message.tool_calls:
            tool = call.function or call.custom
            if tool is not None:
                found.append(Part(CALL, tool.arguments if call.function else tool.input, tool.name, write_id(call.id)))
    if message.function_call is not None:
        found.append(Part(CALL, message.function_call.arguments, message.function_call.name))
    return found


def _item(item: Message) -> Part:
    """An item of a Responses request that nobody says."""
    if item.type in _CALLS:
        value = item.arguments if item.type == "function_call" else item.input
        return Part(CALL, value, item.name or "", write_id(item.call_id))
    if item.type in _RESULTS:
        return Part(RESULT, item.output, id=write_id(item.call_id))
    return Part(OTHER, item.content)


def _content(said: Json) -> list[Part]:
    """What stands in the content of a message."""
    if isinstance(said, str):
        return [Part(TEXT, said)]
    if isinstance(said, list) and (not said or isinstance(said[0], dict | str)):
        walk(len(said))
        return [_block(item) for item in said]
    return [] if said is None else [Part(OTHER, said)]  # such as the tokens of a prompt


def _block(block: Json) -> Part:
    """One element of a content, or of a tool's result; a thought is a text without a word."""
    if isinstance(block, str):
        return Part(TEXT, block)
    if not isinstance(block, dict):
        return Part(OTHER, block)
    return read_block(block) or Part(TEXT, "")


def write_id(value: str | int | None) -> str:
    """What connects a result with its call; empty where a client names nothing."""
    return value if isinstance(value, str) else "" if value is None else str(value)


def arguments(value: Json) -> bytes:
    """A call's arguments in one spelling; OpenAI sends them as a string that holds JSON, Anthropic as JSON itself."""
    value = open_value(value)
    if type(value) is not str:
        return write_canonical(value)
    try:
        return write_canonical(decode_json(value))
    except NotJson:
        return value.strip().encode() or b"{}"  # some clients send nothing for no arguments


def result(value: Json) -> bytes:
    """What a tool brought back: texts as one, without the space around it; anything else in one spelling."""
    value = open_value(value)
    if isinstance(value, str):
        return value.strip().encode()
    if isinstance(value, list):
        walk(len(value))
        found = _content(value)
        if all(part.kind == TEXT for part in found):
            return "\n".join([part.value for part in found]).strip().encode()
        return write_canonical(value, _NEVER_COMPARED_IN_RESULTS)
    if isinstance(value, dict) and len(value) == 1:  # as Gemini has a text
        (only,) = value.values()
        if isinstance(only, str):
            return only.strip().encode()
    return write_canonical(value)


def other(value: Json) -> bytes:
    """A short name for what is no text, such as an image: equal names mean equal things but for their ids."""
    value = open_value(value)
    ignored = _NEVER_COMPARED
    if isinstance(value, dict):
        value = {name: open_value(item) for name, item in value.items()}
        if value.get("type") == "item_reference":  # is nothing but its id
            ignored = ()
    sums = NO_BODY.plus(write_canonical(value, ignored))
    return b"%d-%08x%08x" % (sums.length, sums.crc32, sums.adler32)
