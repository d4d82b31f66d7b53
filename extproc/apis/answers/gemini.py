"""Gemini's `generateContent`, of Google's AI Studio and of Vertex AI."""
# interpreted: writes refusals, which is json's time; msgspec makes its Structs of annotations

from __future__ import annotations

from typing import Any

from extproc.apis.answers.api import Api, Completion, Question, Refusal, frame_events, frame_json, make_error
from extproc.decision import Framed

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""What a status is called (google/rpc/code.proto)."""


def write_error(refusal: Refusal, _: Question) -> Framed:
    """A google.rpc.Status (google.aip.dev/193): `code` is the number of the status, the code for programs is a detail."""
    status = _STATUSES.get(refusal.status) or ("FAILED_PRECONDITION" if refusal.status < 500 else "INTERNAL")  # noqa: PLR2004  # HTTP's
    reason = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": refusal.code.upper(), "domain": "loopguard"}
    body = make_error(refusal)
    body["error"] |= {"code": refusal.status, "status": status, "details": [reason]}
    return frame_json(refusal.status, body)


def complete(completion: Completion, _: Question) -> Framed:
    """One content."""
    return frame_json(200, _make_content(completion))


def complete_in_pieces(completion: Completion, question: Question) -> Framed:
    """The same as the only event of a stream, or as the only element of an array, as the query asks."""
    content = _make_content(completion)
    if question.request.read_parameter("alt") == "sse":
        return frame_events([content])
    return frame_json(200, [content])


def _make_content(completion: Completion) -> dict[str, Any]:
    content = {"role": "model", "parts": [{"text": completion.text}]}
    return {
        "candidates": [{"index": 0, "content": content, "finishReason": "STOP"}],
        "usageMetadata": {"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0},
        "modelVersion": completion.model,
        "responseId": completion.name,
    }


CONTENT = Api(write_error, complete)
STREAM = Api(write_error, complete_in_pieces)
OTHERS = Api(write_error)
