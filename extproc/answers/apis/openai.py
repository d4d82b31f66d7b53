"""OpenAI, those who speak its language, and everybody whose API is not known."""

from __future__ import annotations

from extproc.answers.apis.api import Api, Question, Refusal, frame_json, make_error
from extproc.decision import Framed


def write_error(refusal: Refusal, _: Question) -> Framed:
    """`error`, whose `message` the SDKs show (`openai._base_client._make_status_error_from_response`)."""
    return frame_json(refusal.status, make_error(refusal))


PLAIN = Api(write_error)
