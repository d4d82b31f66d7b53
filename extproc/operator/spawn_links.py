"""Links sessions to the sessions that seem to have started them as agents, for reports.

Some programs start agents without naming the parent. But the first user message of such a session
was an argument of a tool call in its parent's history.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

from msgspec import DecodeError, json

from extproc.apis import open_conversation
from extproc.apis.conversation import ASSISTANT, USER
from extproc.apis.messages import CALL, TEXT
from extproc.bounded import LRU
from extproc.request.document import Document, NotCounted, open_value

_CALLERS: Final = 256
_SESSIONS: Final = 64
"""Maximum callers, and sessions of each, that are remembered for linking."""

_SHORTEST: Final = 16
"""Minimum length of a task in characters; shorter texts are too often equal by chance."""

_TEXTS: Final = 16
_DIGEST: Final = 8


class SpawnLinks:
    """Finds sessions whose first user message was an argument of another session's tool call."""

    def __init__(self) -> None:
        self._begun: LRU[str, LRU[bytes, str]] = LRU(_CALLERS)

    def note(self, tenant: str, session: str, document: Document, *, begins: bool) -> list[str]:
        """Note a request of an unnamed session; returns the sessions that its new calls started."""
        known = self._begun.use(tenant)
        try:
            if begins:
                if known is None:
                    known = LRU(_SESSIONS)
                    self._begun.put(tenant, known)
                # The user messages of a new conversation
                spoken = open_conversation(document)
                texts = [
                    open_value(part.value)
                    for speaker, value in spoken.list_spoken()
                    if speaker == USER
                    for part in spoken.shape.read(value)
                    if part.kind == TEXT
                ]
                for digest in _digest([text for text in texts if isinstance(text, str)]):
                    known.put(digest, session)
                return []
            if known is None:
                return []
            found = [known.peek(digest) for digest in _read_newest_arguments(document)]
        except NotCounted:
            return []
        return [other for other in dict.fromkeys(found) if other is not None and other != session]


def _read_newest_arguments(document: Document) -> list[bytes]:
    """Digests of the text arguments of the tool calls in the assistant's newest message."""
    for message in open_conversation(document).read_backwards():
        if message.speaker == ASSISTANT:
            return _digest(
                [
                    text
                    for part in message.read_parts()
                    if part.kind == CALL
                    for text in _list_texts(part.value)
                ]
            )
    return []


def _list_texts(value: Any) -> list[str]:  # noqa: ANN401  # JSON
    opened = open_value(value)
    if isinstance(opened, str):
        try:
            opened = json.decode(opened)
        except DecodeError:
            return []
    return (
        [text for text in opened.values() if isinstance(text, str)]
        if isinstance(opened, dict)
        else []
    )


def _digest(texts: list[str]) -> list[bytes]:
    long = [text.strip() for text in texts if len(text) >= _SHORTEST][:_TEXTS]
    return [blake2b(text.encode("utf-8", "replace"), digest_size=_DIGEST).digest() for text in long]
