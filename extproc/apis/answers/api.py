"""What an API is to whoever answers in place of the model behind it."""
# interpreted: writes refusals, which is json's time; msgspec makes its Structs of annotations

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from extproc.apis.model_names import find_model
from extproc.decision import Framed
from extproc.request.document import WORTH_COUNTING
from extproc.request.http import HttpRequest

JSON = "application/json"
EVENTS = "text/event-stream"

_LONGEST_VALUE = 4_096
"""Of the body, in bytes; those that are asked for are short."""

_MOST_VALUES = 1_000_000
"""In a body that is looked into: passing over as many takes 10 ms."""

_ABSENT = msgspec.Raw()


class Body(msgspec.Struct, gc=False):
    """What a request's body says about the answer that its client waits for; all of it raw, because clients send anything.

    Attributes:
        model: that is asked.
        stream: the answer is wanted in pieces.
        stream_options: of OpenAI's APIs.
        messages: of a chat.
        contents: of a chat with Gemini.
        anthropic_version: of a message to Anthropic's models on Bedrock.
        jsonrpc: version of that protocol.
        id: under which it is answered.
    """

    model: msgspec.Raw = _ABSENT
    stream: msgspec.Raw = _ABSENT
    stream_options: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    contents: msgspec.Raw = _ABSENT
    anthropic_version: msgspec.Raw = _ABSENT
    jsonrpc: msgspec.Raw = _ABSENT
    id: msgspec.Raw = _ABSENT


_decode = msgspec.json.Decoder(Body).decode


class Question:
    """What a client has asked, as far as the answer depends on it.

    Attributes:
        request: without its body.
        body: None where nobody could look into it, or where it is no JSON object.
    """

    def __init__(self, request: HttpRequest, content: bytes | memoryview | None) -> None:
        """Look into the body, where that may be done."""
        self.request = request
        self.body = _read_body(content) if content is not None else None

    def has(self, *keys: str) -> bool:
        """Whether the body has all these keys."""
        return self.body is not None and all(bytes(getattr(self.body, key)) for key in keys)

    def read(self, key: str) -> Any:  # noqa: ANN401  # JSON
        """A short value of the body, None where it is not there or cannot be read."""
        if not self.has(key) or len(getattr(self.body, key)) > _LONGEST_VALUE:
            return None
        try:
            return msgspec.json.decode(getattr(self.body, key))
        except (ValueError, RecursionError):
            return None

    @property
    def model(self) -> str:
        """See `find_model`."""
        named = self.read("model")
        return find_model(self.request.path, named if isinstance(named, str) else "")


def _read_body(content: bytes | memoryview) -> Body | None:
    if len(content) > WORTH_COUNTING and bytes(content).count(b",") > _MOST_VALUES:
        return None
    try:
        return _decode(content)
    except (ValueError, RecursionError):  # msgspec's and Unicode's errors are ValueErrors
        return None


class Refusal(NamedTuple):
    """Why a request is refused.

    Attributes:
        status: of HTTP.
        message: for models and people, with the code in it: some SDKs show nothing else.
        reason: as it stands in `X-Fairvisor-Reason`.
        code: for programs.
        detail: the same once more, for those who know Loopguard; empty for none.
    """

    status: int
    message: str
    reason: str
    code: str
    detail: Mapping[str, object]


class Completion(NamedTuple):
    """An answer as if of the model.

    Attributes:
        text: that it says.
        model: as the client calls it.
        name: of this one answer, which no other has.
        created: when, in seconds since 1970.
    """

    text: str
    model: str
    name: str
    created: int


class Api(NamedTuple):
    """How an API answers.

    Attributes:
        write_error: a refusal as the API writes its errors.
        complete: an answer of the model, whole or in pieces as it was asked for; None where that cannot be told, or where the
            API has no such answers.
    """

    write_error: Callable[[Refusal, Question], Framed]
    complete: Callable[[Completion, Question], Framed | None] = lambda _completion, _question: None


def make_error(refusal: Refusal) -> dict[str, Any]:
    """The body that OpenAI's clients understand, and everybody who was told of it; other APIs add to it."""
    error = {"message": refusal.message, "type": refusal.reason, "param": None, "code": refusal.code}
    return {"error": error, "detail": refusal.detail} if refusal.detail else {"error": error}


def frame_json(status: int, body: object, *headers: tuple[str, str]) -> Framed:
    """A body of JSON, and headers beside it."""
    return Framed(status, JSON, json.dumps(body).encode(), headers)


def frame_events(events: Iterable[str | Mapping[str, Any]], *, named: bool = False) -> Framed:
    """A stream of server-sent events, all of them at once.

    Args:
        events: what stands in each, texts as they are.
        named: each is called what its `type` says.
    """
    lines = []
    for event in events:
        if named and not isinstance(event, str):
            lines.append(f"event: {event['type']}\n")
        lines.append(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n")
    return Framed(200, EVENTS, "".join(lines).encode())
