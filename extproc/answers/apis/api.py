"""What an API is to whoever answers in place of the model behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from extproc.decision import Framed

JSON = "application/json"

_ABSENT = msgspec.Raw()


class Question(msgspec.Struct, gc=False):
    """What a request's body says about the answer that its client waits for; all of it raw, because clients send anything.

    Attributes:
        model: that is asked.
        stream: the answer is wanted in pieces.
        messages: of a chat.
        contents: of a chat with Gemini.
        jsonrpc: version of that protocol.
        id: under which it is answered.
    """

    model: msgspec.Raw = _ABSENT
    stream: msgspec.Raw = _ABSENT
    messages: msgspec.Raw = _ABSENT
    contents: msgspec.Raw = _ABSENT
    jsonrpc: msgspec.Raw = _ABSENT
    id: msgspec.Raw = _ABSENT


UNKNOWN = Question()
"""Of a body that nobody could look into."""

_decode = msgspec.json.Decoder(Question).decode


def read_question(content: bytes | memoryview | None) -> Question:
    """What a body asks for; UNKNOWN where it is not known, or no JSON object."""
    if content is None:
        return UNKNOWN
    try:
        return _decode(content)
    except (ValueError, RecursionError):  # msgspec's and Unicode's errors are ValueErrors
        return UNKNOWN


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


class Api(NamedTuple):
    """How an API answers.

    Attributes:
        write_error: a refusal as the API writes its errors.
    """

    write_error: Callable[[Refusal, Question], Framed]


def make_error(refusal: Refusal) -> dict[str, Any]:
    """The body that OpenAI's clients understand, and everybody who was told of it; other APIs add to it."""
    error = {"message": refusal.message, "type": refusal.reason, "param": None, "code": refusal.code}
    return {"error": error, "detail": refusal.detail} if refusal.detail else {"error": error}


def frame_json(status: int, body: Mapping[str, Any], *headers: tuple[str, str]) -> Framed:
    """A body of JSON, and headers beside it."""
    return Framed(status, JSON, json.dumps(body).encode(), headers)
