"""What stands in an LLM request: messages, their text, the tools that were called and what came back.

OpenAI chat completions, OpenAI Responses, Anthropic messages and plain prompts are read alike. Messages are read from the
newest to the oldest and decoded only when it is their turn: of a long history most are never looked at.

Left out wherever requests are compared: ids, which are new each time; `cache_control`, which clients move from message to
message; and what a model thought (`reasoning`, `thinking`), which is never the same twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from extproc.fingerprint import NO_BODY
from extproc.similarity.document import Document, Head, Json, NotCounted, NotJson, canonical, decoded

_THOUGHTS = frozenset({"reasoning", "thinking", "redacted_thinking"})
_TEXTS = frozenset({"text", "input_text", "output_text", "refusal"})
_CALLS = frozenset({"tool_use", "function_call", "custom_tool_call"})
_RESULTS = frozenset({"tool_result", "function_call_output", "custom_tool_call_output"})
_RESULT_ROLES = frozenset({"tool", "function"})
_NEVER_COMPARED = (("id",), ("call_id",), ("cache_control",), ("status",))
_NEVER_COMPARED_IN_LISTS = tuple(("*", *pointer) for pointer in _NEVER_COMPARED)

TEXT, CALL, RESULT, OTHER = "text", "call", "result", "other"


class Conversation(NamedTuple):
    """The messages of one request.

    Attributes:
        model: empty when the request names none.
        messages: as they stand in the request, the newest last; decoded, or Raw.
        elsewhere: what went before is not in the request: the server keeps it (`previous_response_id`, `conversation`), or a
            plain prompt holds it in words.
    """

    model: str
    messages: Sequence[Json]
    elsewhere: bool = False

    def backwards(self) -> Iterator[dict[str, Json]]:
        """The messages, decoded, from the newest to the oldest, without thoughts.

        Raises:
            NotJson: one cannot be read.
        """
        for message in reversed(self.messages):
            item = decoded(message) if isinstance(message, msgspec.Raw) else message
            if not isinstance(item, dict):
                yield {"type": OTHER, "value": item}
            elif item.get("type") not in _THOUGHTS:
                yield item


class Part(NamedTuple):
    """One thing in a message.

    Attributes:
        kind: TEXT, CALL, RESULT or OTHER.
        value: the text; the arguments; the result; or all of what is none of these.
        name: of the tool, where this is a CALL.
        id: what connects a RESULT with its CALL.
        failed: the RESULT is marked as an error.
    """

    kind: str
    value: Json
    name: str = ""
    id: str = ""
    failed: bool = False


def conversation(document: Document) -> Conversation:
    """The conversation in a body.

    Raises:
        NotCounted: there is none, or it cannot be read.
    """
    head = document.head()
    if isinstance(head, dict):
        head = _head(head)
    if not isinstance(head, Head):
        raise NotCounted("no_messages")
    model = head.model or ""
    if head.messages:
        return Conversation(model, head.messages)
    if head.input:
        messages = [_user(head.input)] if isinstance(head.input, str) else head.input
        elsewhere = _given(head.previous_response_id) or _given(head.conversation)
        return Conversation(model, messages, elsewhere)
    if _given(head.prompt):
        return Conversation(model, [_user(decoded(head.prompt))], elsewhere=True)
    raise NotCounted("no_messages")


def _head(body: dict[str, Json]) -> Head:
    """A body that was decoded already, as far as it is of the types that a conversation has."""

    def raw(name: str) -> msgspec.Raw:
        return msgspec.Raw(canonical(body[name]) if name in body else b"")

    model, messages, given = (body.get(name) for name in ("model", "messages", "input"))
    return Head(
        model if model is None or isinstance(model, str) else canonical(model).decode(),
        messages if isinstance(messages, list) else None,
        given if isinstance(given, list | str) else None,
        raw("prompt"),
        raw("previous_response_id"),
        raw("conversation"),
    )


def _given(value: msgspec.Raw) -> bool:
    return bytes(value) not in (b"", b"null")


def _user(content: Json) -> dict[str, Json]:
    return {"role": "user", "content": content}


def parts(message: dict[str, Json]) -> Iterator[Part]:
    """What stands in one message, or in one item of a Responses request, in order."""
    role = message.get("role")
    if role is None:
        yield _part(message)
        return
    content = message.get("content")
    if role in _RESULT_ROLES:
        yield Part(RESULT, content, id=_text(message.get("tool_call_id")))
        return
    if isinstance(content, str):
        yield Part(TEXT, content)
    elif isinstance(content, list):
        if content and not isinstance(content[0], dict | str):
            yield Part(OTHER, content)  # such as the tokens of a prompt
        else:
            yield from [_part(item) for item in content]
    elif content is not None:
        yield Part(OTHER, content)
    if "refusal" in message and message["refusal"] is not None:
        yield Part(TEXT, message["refusal"])
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        yield _chat_call(call)
    if isinstance(message.get("function_call"), dict):
        yield _called(message["function_call"], "")


def _chat_call(call: Json) -> Part:
    """An element of `tool_calls`: its tool stands under the name of its type, `function` or `custom`."""
    if isinstance(call, dict):
        tool = call.get("function", call.get("custom"))
        if isinstance(tool, dict):
            return _called(tool, _text(call.get("id")))
    return Part(OTHER, call)


def _called(tool: dict[str, Json], identity: str) -> Part:
    return Part(CALL, tool["arguments"] if "arguments" in tool else tool.get("input"), _text(tool.get("name")), identity)


def _part(item: Json) -> Part:
    """A part of a message's content, or an item of a Responses request."""
    if isinstance(item, str):
        return Part(TEXT, item)
    kind = item.get("type") if isinstance(item, dict) else None
    if kind in _TEXTS:
        return Part(TEXT, item.get("text", item.get("refusal")))
    if kind in _CALLS:
        return _called(item, _text(item.get("call_id", item.get("id"))))
    if kind in _RESULTS:
        value = item["output"] if "output" in item else item.get("content")
        return Part(RESULT, value, id=_text(item.get("call_id", item.get("tool_use_id"))), failed=item.get("is_error") is True)
    if kind in _THOUGHTS:
        return Part(TEXT, "")
    return Part(OTHER, item)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def arguments(value: Json) -> bytes:
    """A call's arguments in one spelling; OpenAI sends them as a string that holds JSON, Anthropic as JSON itself."""
    if not isinstance(value, str):
        return canonical(value)
    try:
        return canonical(decoded(value))
    except NotJson:
        return value.strip().encode()


def result(value: Json) -> bytes:
    """What a tool brought back: texts as one, without the space around it; anything else in one spelling."""
    if isinstance(value, str):
        return value.strip().encode()
    if isinstance(value, list):
        found = [_part(item) for item in value]
        if all(part.kind == TEXT and isinstance(part.value, str) for part in found):
            return "\n".join([part.value for part in found]).strip().encode()
        return canonical(value, _NEVER_COMPARED_IN_LISTS)
    return canonical(value)


def other(value: Json) -> bytes:
    """A short name for what is no text, such as an image: equal names mean equal things but for their ids."""
    length, crc32, adler32 = NO_BODY.plus(canonical(value, _NEVER_COMPARED))
    return b"%d-%08x%08x" % (length, crc32, adler32)
