"""Detects session names that change with every request, and therefore name no session.

A new conversation has a new name and an empty history. If a client sends a new name with every
request, its histories continue under other names. After `MOST_IN_A_ROW` such requests of a caller,
without any name used again, the key is ignored. Callers are judged separately, and only digests are
stored.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from msgspec import json

from extproc.apis import open_conversation
from extproc.apis.conversation import ASSISTANT
from extproc.request.document import Document, NotCounted

MOST_IN_A_ROW: Final = 8
TRIED_AGAIN: Final = 1_000
"""An ignored key is tried again after this many requests: the client may have been fixed."""

_CALLERS: Final = 256
_NAMES: Final = 512
_SHOWN: Final = 64
_LOOKED_AT: Final = 4
"""Number of a caller's newest names and turns to compare, and of a history's newest turns to read.

Identical runs are told from a run with changing names by names that are used again.
"""

_DIGEST: Final = 8
_encode: Final = json.Encoder().encode


class CallerNames:
    """The names of one caller under one key.

    Attributes:
        newest: the newest turn seen under each name; oldest name first.
        shown: the name under which each of the newest turns was first seen.
        row: number of consecutive names whose history another name had shown.
        left: number of requests for which the key is still ignored.
    """

    def __init__(self) -> None:
        self.newest: dict[str, bytes] = {}
        self.shown: dict[bytes, str] = {}
        self.row = 0
        self.left = 0


class ChangingNames:
    """Recent session names of one policy's callers.

    Attributes:
        callers: names by caller and key.
        finds_any: a changing key has been found.
    """

    def __init__(self) -> None:
        self.callers: dict[tuple[str, str], CallerNames] = {}
        self.finds_any = False

    def passes_over(self, caller: str, key: str) -> bool:
        """Whether to ignore a caller's names under this key. Call it once per request."""
        names = self.callers.get((caller, key))
        if names is None or not names.left:
            return False
        names.left -= 1
        if not names.left:
            del self.callers[caller, key]
        return True

    def note(self, caller: str, key: str, name: str, document: Document | None) -> bool:
        """Record a request; whether its key has just been found to change with every request."""
        names = self.callers.get((caller, key))
        if names is None:
            if len(self.callers) >= _CALLERS:
                self.callers.clear()  # changing names will be detected again
            names = self.callers[caller, key] = CallerNames()
        again = name in names.newest
        if names.left or (again and not names.row):
            return False
        turns = _list_newest(document)
        newest = turns[0] if turns else b""
        if again:
            # Repeating the same turn is a retry
            names.row = names.row if names.newest[name] == newest else 0
            return False
        if any(names.shown.get(turn, name) != name for turn in turns[1:]):
            names.row += 1
        names.newest[name] = newest
        if len(names.newest) > _NAMES:
            del names.newest[next(iter(names.newest))]
        if newest:
            names.shown.setdefault(newest, name)
        if len(names.shown) > _SHOWN:
            del names.shown[next(iter(names.shown))]
        if names.row < MOST_IN_A_ROW:
            return False
        names.left, names.row, self.finds_any = TRIED_AGAIN, 0, True
        return True


def _list_newest(document: Document | None) -> list[bytes]:
    """Digests of the newest assistant messages, newest first; empty if they are unreadable."""
    if document is None:
        return []
    found = []
    try:
        messages = open_conversation(document).read_backwards()
        for message in messages:
            if message.speaker != ASSISTANT:
                continue
            said = [(part.kind, part.id, part.name, part.value) for part in message.read_parts()]
            found.append(blake2b(_encode(said), digest_size=_DIGEST).digest())
            if len(found) == _LOOKED_AT:
                break
    except NotCounted:
        return found
    return found
