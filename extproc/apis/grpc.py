"""gRPC. Its bodies are not inspected."""
# interpreted: writes refusals

from __future__ import annotations

from extproc.apis.api import Api, Endpoint, Question, Refusal
from extproc.decision import Framed


def write_error(refusal: Refusal, _: Question) -> Framed:
    """Write only the message: Envoy uses the body of an answer to gRPC as `grpc-message`."""
    return Framed(refusal.status, "text/plain", refusal.message.encode())


# Recognized only by content type, as Envoy does for its own answers.
API = Api(content_types={r"application/grpc(?:[+;]|\Z)": Endpoint(write_error)})
