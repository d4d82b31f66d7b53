"""Gemini's `generateContent`, of Google's AI Studio and of Vertex AI."""

from __future__ import annotations

from extproc.answers.apis.api import Api, Question, Refusal, frame_json, make_error
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


CONTENT = Api(write_error)
