"""Looping conversations as replicas publish them; see `rows`."""
# interpreted: msgspec makes its classes

from __future__ import annotations

from math import exp
from typing import Annotated

from extproc.operator.rows import FIRST, MAX, MIN, SUM, Document, Row, newest

PACE_SECONDS = 60.0
"""Time constant of a conversation's pace: what is older counts for little."""

LoopName = tuple[str, str, str, str, str]
"""See `Loop.name`."""

MAX_LOOPS = 8


def _join_loops(one: ConversationRow, other: ConversationRow, _: str) -> list[LoopName]:
    """The newest ones of both."""
    loops = [*one.loops, *other.loops] if other.last > one.last else [*other.loops, *one.loops]
    return list(dict.fromkeys(reversed(loops)))[MAX_LOOPS - 1 :: -1]


def _join_paces(one: ConversationRow, other: ConversationRow, _: str) -> float:
    """As of the later of both times."""
    paced = max(one.paced, other.paced)
    return one.find_pace(paced) + other.find_pace(paced)


_NEWEST = newest("newness")


class ConversationRow(Row, array_like=True):
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
    session: Annotated[str, FIRST] = ""
    agent: Annotated[str, FIRST] = ""
    path: Annotated[str, _NEWEST] = ""
    model: Annotated[str, _NEWEST] = ""
    tools: Annotated[list[str], _NEWEST] = []
    descriptors: Annotated[list[tuple[str, str]], FIRST] = []
    loops: Annotated[list[LoopName], _join_loops] = []
    first: Annotated[float, MIN] = 0.0
    last: Annotated[float, _NEWEST] = 0.0
    requests: Annotated[int, SUM] = 0
    size: Annotated[int, SUM] = 0
    refused: Annotated[int, SUM] = 0
    refused_size: Annotated[int, SUM] = 0
    pace: Annotated[float, _join_paces] = 0.0
    paced: Annotated[float, MAX] = 0.0
    action: Annotated[str, _NEWEST] = ""
    shadow: Annotated[str, _NEWEST] = ""
    tool: Annotated[str, _NEWEST] = ""
    failure: Annotated[str, _NEWEST] = ""
    failing: Annotated[float, MAX] = 0.0
    cost: Annotated[int, SUM] = 0
    estimated: Annotated[int, SUM] = 0
    priced: Annotated[int, SUM] = 0
    prompt: Annotated[int, SUM] = 0

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

    @property
    def newness(self) -> tuple[bool, float]:
        """A row without requests has only seen what some have cost."""
        return self.requests > 0, self.last


class ConversationDocument(Document, array_like=True):
    """Conversations that loop."""

    rows: Annotated[list[ConversationRow], SUM]
    left_out: Annotated[int, SUM] = 0
