"""A plain `prompt`: what went before stands in it in words, if at all."""

from __future__ import annotations

from msgspec import Raw

from extproc.similarity.shapes.conversation import Shape, read_content
from extproc.similarity.shapes.structs import Conversation, PromptBody


def _open(body: PromptBody) -> Conversation:
    return Conversation([body.prompt], _is_assistant, read_content, _raw, elsewhere=True)


def _is_assistant(_: Raw) -> bool:
    return False


def _raw(prompt: Raw) -> Raw:
    return prompt


SHAPE = Shape(PromptBody, _open)
