"""Amazon Bedrock's runtime: Converse, and models as they are."""

from __future__ import annotations

from extproc.answers.apis.api import Api, Question, Refusal, frame_json, make_error
from extproc.decision import Framed

_TYPES = {
    400: "ValidationException",
    403: "AccessDeniedException",
    404: "ResourceNotFoundException",
    408: "ModelTimeoutException",
    424: "ModelErrorException",
    429: "ThrottlingException",
    500: "InternalServerException",
    503: "ServiceUnavailableException",
}
"""The errors that its operations know, by status (Bedrock's API reference, Converse)."""


def write_error(refusal: Refusal, _: Question) -> Framed:
    """`message` in the body, and what kind of error it is in a header (smithy.io, AWS restJson1, operation errors)."""
    kind = _TYPES.get(refusal.status) or _TYPES[400 if refusal.status < 500 else 500]  # noqa: PLR2004  # HTTP's
    return frame_json(refusal.status, {"message": refusal.message, **make_error(refusal)}, ("x-amzn-errortype", kind))


INVOKE = Api(write_error)
CONVERSE = Api(write_error)
