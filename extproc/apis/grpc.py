"""gRPC, whose bodies are not looked into."""
# interpreted: writes refusals

from __future__ import annotations

from extproc.apis.api import Api, Endpoint, Question, Refusal
from extproc.decision import Framed


def write_error(refusal: Refusal, _: Question) -> Framed:
    """Words alone: Envoy makes the body of an answer to gRPC its `grpc-message`."""
    return Framed(refusal.status, "text/plain", refusal.message.encode())


# By the content type alone, as Envoy does for its own answers.
API = Api(content_types={r"application/grpc(?:[+;]|\Z)": Endpoint(write_error)})
