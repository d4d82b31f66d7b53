"""Anthropic's messages."""

from __future__ import annotations

from extproc.answers.apis.api import Api, Question, Refusal, frame_json, make_error
from extproc.decision import Framed


def write_error(refusal: Refusal, _: Question) -> Framed:
    """`type` beside `error` (docs.anthropic.com, Errors); clients with a schema take nothing for an error without it."""
    return frame_json(refusal.status, {"type": "error", **make_error(refusal)})


MESSAGES = Api(write_error)
