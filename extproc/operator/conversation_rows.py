"""Looping conversations as replicas publish them, and how the rows of several replicas are merged.

New fields go behind the others and have a default.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections.abc import Iterable
from math import exp

import msgspec

from extproc.operator.board import KEPT_SECONDS, fit, merge_rows

PACE_SECONDS = 60.0
"""Time constant of a conversation's pace: what is older counts for little."""

LoopName = tuple[str, str, str, str, str]
"""See `Loop.name`."""

MAX_LOOPS = 8


class ConversationRow(msgspec.Struct, array_like=True):
    """One caller's conversation that loops, whichever policies and detectors see it. Each request is counted once.

    Attributes:
        tenant: hash of the caller, 16 hex digits. Empty for the requests of a failing tool that have no row of their own.
        conversation: distinguishes it from others of the caller: the hash of its session's name, else a digest of how it opens
            (after `=`), else what repeats (after `#`).
        session: hash of its session's name, empty if unknown.
        agent, path, model, tools: of the newest loop; cut to what can be shown.
        descriptors: (name, hash) of each, as orders refer to callers.
        loops: names of its rows in the table of loops, the newest last.
        first, last: times of its requests, in seconds since 1970.
        requests: that were acted on, or would have been.
        size: bytes of the bodies of those that were forwarded.
        cost: of those that sessions or budgets price, in nano-dollars: as the access log has it, else estimated.
        estimated: the part of it that is estimated.
        priced: bytes of their bodies.
        prompt: tokens of their prompts, likewise.
        refused: those that were not.
        refused_size: bytes of their bodies.
        pace: bytes forwarded in about the last minute, as of `paced`; see PACE_SECONDS.
        action: of the newest request, `allow` if no policy enforces one.
        shadow: what a shadow policy would have done; empty for nothing.
        tool, failure: how its tool fails, see `IncidentRow`; empty if it does not.
        failing: when it last was part of an incident; 0 for never.
    """

    tenant: str
    conversation: str
    session: str = ""
    agent: str = ""
    path: str = ""
    model: str = ""
    tools: list[str] = []  # msgspec copies a default for each object
    descriptors: list[tuple[str, str]] = []
    loops: list[LoopName] = []
    first: float = 0.0
    last: float = 0.0
    requests: int = 0
    size: int = 0
    refused: int = 0
    refused_size: int = 0
    pace: float = 0.0
    paced: float = 0.0
    action: str = ""
    shadow: str = ""
    tool: str = ""
    failure: str = ""
    failing: float = 0.0
    cost: int = 0
    estimated: int = 0
    priced: int = 0
    prompt: int = 0

    @property
    def name(self) -> tuple[str, str]:
        """Identifies the conversation."""
        return self.tenant, self.conversation

    @property
    def forwarded(self) -> int:
        """The number of requests that reached the model."""
        return self.requests - self.refused

    def find_pace(self, now: float) -> float:
        """Bytes a minute that reach the model; `now` in seconds since 1970."""
        return self.pace * exp(min(0.0, self.paced - now) / PACE_SECONDS)

    def absorb(self, other: ConversationRow) -> None:
        """Add what another replica knows of the same conversation."""
        paced = max(self.paced, other.paced)
        self.pace, self.paced = self.find_pace(paced) + other.find_pace(paced), paced
        loops = [*self.loops, *other.loops] if other.last > self.last else [*other.loops, *self.loops]
        self.loops = list(dict.fromkeys(reversed(loops)))[MAX_LOOPS - 1 :: -1]
        if (other.requests > 0, other.last) > (self.requests > 0, self.last):  # without requests: it has only seen them end
            self.last, self.action, self.shadow = other.last, other.action, other.shadow
            self.tool, self.failure = other.tool, other.failure
            self.tools, self.path, self.model = other.tools, other.path, other.model
        self.first = min(self.first, other.first)
        self.failing = max(self.failing, other.failing)
        self.session, self.agent = self.session or other.session, self.agent or other.agent
        self.requests += other.requests
        self.size += other.size
        self.refused += other.refused
        self.refused_size += other.refused_size
        self.cost += other.cost
        self.estimated += other.estimated
        self.priced += other.priced
        self.prompt += other.prompt


class ConversationDocument(msgspec.Struct, array_like=True):
    """What one replica publishes, or what all of them know; `left_out` did not fit on the board."""

    rows: list[ConversationRow]
    left_out: int = 0

    def pack(self) -> bytes:
        """Pack as many rows as fit on a board; the last ones are left out."""
        rows = self.rows
        return fit(len(rows), lambda kept: ConversationDocument(rows[:kept], len(rows) - kept))

    @classmethod
    def merge(cls, documents: Iterable[ConversationDocument], now: float) -> ConversationDocument:
        """Merge documents, without rows that are too old; `now` in seconds since 1970."""
        every = list(documents)
        rows = merge_rows((row for document in every for row in document.rows), now - KEPT_SECONDS)
        return cls(rows, sum(document.left_out for document in every))
