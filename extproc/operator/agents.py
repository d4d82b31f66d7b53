"""Agents in the reports of sessions: those that requests name, and sessions that seem to be agents of another one.

Some programs start agents without telling so. Their sessions are linked afterwards, for reports: what the user said first in
one was an argument of a tool call in the history of the other.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

import msgspec

from extproc.apis import open_conversation
from extproc.apis.conversation import ASSISTANT, USER
from extproc.apis.messages import CALL, TEXT
from extproc.bounded import LRU
from extproc.request.document import Document, NotCounted, open_value

MAX_SHOWN: Final = 64
"""Agents of a session that are shown, the newest; its counts include all."""

ACTIVE_SECONDS: Final = 60
"""An agent is shown as active for this long after a request."""

_CALLERS: Final = 256
_SESSIONS: Final = 64
"""Callers whose new sessions are remembered until they can be linked, and sessions of each."""

_SHORTEST: Final = 16
"""Characters of a task; shorter texts are too often equal by chance."""

_TEXTS: Final = 16
_DIGEST: Final = 8
_DEEPEST: Final = 32


class AgentRow(msgspec.Struct, array_like=True):
    """An agent of a session.

    Attributes:
        name: hash of its name.
        parent: the same of the agent that started it, according to its first request; empty if the session did.
        depth: levels below the session; 0 if unknown, because the policy does not limit agents.
        began: when it was seen first, in seconds since 1970.
        last: when its newest request came.
        requests: how many this replica has seen.
        refused: the limit that refused its newest request; empty for none.
    """

    name: str
    parent: str
    depth: int
    began: float
    last: float
    requests: int = 0
    refused: str = ""

    def absorb(self, other: AgentRow) -> None:
        """Add what another replica knows of the same agent."""
        if other.last > self.last:
            self.last, self.refused = other.last, other.refused
        self.began, self.depth = min(self.began, other.began), max(self.depth, other.depth)
        self.requests += other.requests


def merge_agents(rows: Iterable[AgentRow]) -> list[AgentRow]:
    """One row for each agent, oldest first."""
    merged: dict[str, AgentRow] = {}
    for row in sorted(rows, key=lambda row: row.began):
        if (known := merged.get(row.name)) is None:
            merged[row.name] = msgspec.structs.replace(row)
        else:
            known.absorb(row)
    return list(merged.values())[-MAX_SHOWN:]


def order_tree(rows: Sequence[AgentRow]) -> list[tuple[int, AgentRow]]:
    """Agents with their levels below the session, each behind its parent, and once, whatever parents clients claim."""
    known = {row.name for row in rows}
    children: dict[str, list[AgentRow]] = {}
    for row in rows:
        children.setdefault(row.parent if row.parent in known and row.parent != row.name else "", []).append(row)
    ordered: list[tuple[int, AgentRow]] = []
    placed: set[str] = set()

    def place(first: Sequence[AgentRow]) -> None:
        waiting = [(1, row) for row in reversed(first)]
        while waiting:
            level, row = waiting.pop()
            if row.name not in placed:
                placed.add(row.name)
                ordered.append((level, row))
                waiting += [(level + 1, child) for child in reversed(children.get(row.name, ()))]

    place(children.get("", ()))
    for row in rows:  # of a circle, the one that came first stands for its root
        place([row] if row.name not in placed else [])
    return ordered


class SpawnLinks:
    """Notices sessions whose first words were an argument of another session's tool call."""

    def __init__(self) -> None:
        self._begun: LRU[str, LRU[bytes, str]] = LRU(_CALLERS)

    def note(self, tenant: str, session: str, document: Document, *, begins: bool) -> list[str]:
        """Note a request of a session that nothing names; returns sessions that it has started, by its newest calls."""
        known = self._begun.use(tenant)
        try:
            if begins:
                if known is None:
                    known = LRU(_SESSIONS)
                    self._begun.put(tenant, known)
                for digest in _read_first_words(document):
                    known.put(digest, session)
                return []
            called = _read_newest_arguments(document) if known else []
        except NotCounted:
            return []
        found = [known.peek(digest) for digest in called] if known is not None else []
        return [other for other in dict.fromkeys(found) if other is not None and other != session]


def _read_first_words(document: Document) -> list[bytes]:
    """Digests of what users have said in a conversation that begins."""
    spoken = open_conversation(document)
    texts = [
        open_value(part.value)
        for speaker, value in spoken.list_spoken()
        if speaker == USER
        for part in spoken.shape.read(value)
        if part.kind == TEXT
    ]
    return _digest(texts)


def _read_newest_arguments(document: Document) -> list[bytes]:
    """Digests of the texts among the arguments of the calls in the assistant's newest message."""
    for message in open_conversation(document).read_backwards():
        if message.speaker == ASSISTANT:
            return _digest([text for part in message.read_parts() if part.kind == CALL for text in _list_texts(part.value)])
    return []


def _list_texts(value: Any) -> list[str]:  # noqa: ANN401  # JSON
    """The texts in arguments, on their first level."""
    opened = open_value(value)
    if isinstance(opened, str):
        try:
            opened = msgspec.json.decode(opened)
        except msgspec.DecodeError:
            return []
    return [text for text in opened.values() if isinstance(text, str)] if isinstance(opened, dict) else []


def _digest(texts: Iterable[Any]) -> list[bytes]:
    long = (text.strip() for text in texts if isinstance(text, str) and len(text) >= _SHORTEST)
    return [blake2b(text.encode("utf-8", "replace"), digest_size=_DIGEST).digest() for text in islice(long, _TEXTS)]
