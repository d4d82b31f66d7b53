"""Looping conversations, their loops, and incidents, as replicas publish them; see `rows`."""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import exp
from operator import attrgetter
from typing import Annotated, TypeAlias

import msgspec

from extproc.operator.rows import (
    COUNTS,
    FIRST,
    MAX,
    MIN,
    SUM,
    Document,
    Row,
    fit,
    join,
    merge,
    newest,
)
from extproc.operator.sketch import Sketch
from extproc.store.rules.documents import MAX_DOCUMENT

MINUTES = 60

PACE_SECONDS = 60.0
"""Time constant of the exponential decay of a conversation's pace."""

NoteLabels: TypeAlias = tuple[str, str, str, str, str, str]
"""See `AfterNote.labels`."""

INCIDENT_SECONDS = 300
"""How long a session counts towards an incident after its last failing request."""

SKETCHED = 64
"""Below this number, callers and sessions are counted exactly; above, they are estimated."""

_SKETCH = join(lambda one, other: Sketch([*one, *other], SKETCHED).list_kept())

_NEWEST = newest("newness")

MOST_TIMES = 5

_TIMES = join(lambda one, other: sorted([*one, *other])[-MOST_TIMES:])


class Loop(Row, array_like=True):
    """One loop.

    Attributes:
        detector: the name of its loop_detection entry.
        tenant: hash of the caller, 16 hex digits.
        repeats: what identifies the loop: a fingerprint, or the tools of a cycle.
        session: hash of the session's name; empty if it has none.
        fingerprint: fingerprint of the newest request.
        path, caller: truncated for display.
        tools: the repeated tools.
        first, last: times of the first and last action, in seconds since 1970.
        count: the detector's newest count.
        requests: number of requests by action; in shadow mode, by the action that would have been
            taken.
        size: bytes of their bodies.
        stopped: requests that this loop stopped from being forwarded.
        stopped_size: bytes of their bodies.
        alias, labels, credentials, parts: see `KnownAs`.
        agent: the agent's self-reported id, truncated; empty if it has none.
        strength: strength of the newest evidence, `strong` or `weak`; empty if unknown.
        cause: cause of the newest episode; see `after_notes`.
        after: changes in episodes, by the last two of `NoteLabels`.
        refused_at: the count at which it is refused, as of the newest request; 0 for never.
        refused_left: turns or requests until then.
        refused_within: seconds within which requests must reach the count; 0 for turns.
        result: the first characters of the newest result, if results are shown.
    """

    policy: str
    detector: str
    mode: str
    tenant: str
    repeats: str
    session: str
    fingerprint: Annotated[str, _NEWEST]
    method: str
    path: str
    route: str
    model: str
    tools: Annotated[list[str], _NEWEST]
    caller: Annotated[list[tuple[str, str]], FIRST]
    first: Annotated[float, MIN]
    last: Annotated[float, _NEWEST]
    count: Annotated[int, _NEWEST]
    requests: Annotated[dict[str, int], COUNTS]
    size: Annotated[int, SUM]
    stopped: Annotated[int, SUM]
    stopped_size: Annotated[int, SUM]
    alias: Annotated[str, FIRST] = ""
    labels: Annotated[list[tuple[str, str]], FIRST] = []
    credentials: list[str] = []
    agent: str = ""
    strength: Annotated[str, _NEWEST] = ""
    cause: Annotated[str, FIRST] = ""
    after: Annotated[dict[str, int], COUNTS] = {}
    parts: list[str] = []
    refused_at: Annotated[int, _NEWEST] = 0
    refused_left: Annotated[int, _NEWEST] = 0
    refused_within: Annotated[int, _NEWEST] = 0
    result: Annotated[str, _NEWEST] = ""

    name = property(attrgetter("policy", "detector", "mode", "tenant", "repeats"))

    @property
    def total(self) -> int:
        """The number of requests that were acted on, or would have been."""
        return sum(self.requests.values())

    @property
    def newness(self) -> tuple[bool, float]:
        """Sort key for merging.

        Rows without requests, which only have changes after notes, come last.
        """
        return self.total > 0, self.last


MAX_LOOPS = 8


def _join_loops(one: ConversationRow, other: ConversationRow, _: str) -> list[Loop]:
    loops = [*one.loops, *other.loops] if other.last > one.last else [*other.loops, *one.loops]
    return merge(reversed(loops))[MAX_LOOPS - 1 :: -1]


def _join_paces(one: ConversationRow, other: ConversationRow, _: str) -> float:
    paced = max(one.paced, other.paced)
    return one.find_pace(paced) + other.find_pace(paced)


class ConversationRow(Row, array_like=True):
    """A caller's looping conversation, over all policies and detectors.

    Each request is counted once.

    Attributes:
        tenant: hash of the caller, 16 hex digits. Empty for the shared row of an incident.
        conversation: unique per caller: the hash of the session's name, else `=` and a digest of
            the opening, else `#` and what repeats.
        session: hash of the session's name; empty if unknown.
        agent, path, model, tools: from the newest loop, truncated for display.
        descriptors: (name, hash) of each of the caller's descriptors, for orders.
        loops: the newest loops, one per policy, detector and repetition, newest last. A request may
            be in several.
        first, last: times of the first and last request, in seconds since 1970.
        requests: number of requests that were acted on, or would have been.
        size: bytes of the bodies of forwarded requests.
        cost: cost in nano-dollars of forwarded requests with a price: from the access log, else
            estimated.
        estimated: the estimated part of `cost`.
        priced: bytes of the bodies of requests with a price.
        prompt: tokens of their prompts, from the access log, else estimated.
        times: times of the newest requests, oldest first, in seconds since 1970.
        refused: number of requests that were not forwarded.
        refused_size: bytes of their bodies.
        pace: decaying sum of bytes forwarded, as of `paced`; see PACE_SECONDS.
        action: action on the newest request; `allow` if no policy enforces one.
        shadow: what a shadow policy would have done; empty for nothing.
        tool, failure: the failing tool and its error, see `IncidentRow`; empty if no tool fails.
        failing: last time in an incident; 0 for never.
    """

    tenant: str
    conversation: str
    session: Annotated[str, FIRST] = ""
    agent: Annotated[str, FIRST] = ""
    path: Annotated[str, _NEWEST] = ""
    model: Annotated[str, _NEWEST] = ""
    tools: Annotated[list[str], _NEWEST] = []
    descriptors: Annotated[list[tuple[str, str]], FIRST] = []
    loops: Annotated[list[Loop], _join_loops] = []
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
    times: Annotated[list[float], _TIMES] = []

    name = property(attrgetter("tenant", "conversation"))

    @property
    def forwarded(self) -> int:
        """The number of requests that reached the model."""
        return self.requests - self.refused

    def find_pace(self, now: float) -> float:
        """Bytes forwarded per minute, at `now` in seconds since 1970."""
        return self.pace * exp(min(0.0, self.paced - now) / PACE_SECONDS)

    def find_interval(self) -> float | None:
        """Mean seconds between the newest requests; None with fewer than two."""
        times = self.times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def newness(self) -> tuple[bool, float]:
        """Sort key for merging. Rows without requests, which only have costs, come last."""
        return self.requests > 0, self.last


class Line(msgspec.Struct, array_like=True):
    """A curve: requests acted on per minute, for the `MINUTES` up to `minute`."""

    policy: str
    mode: str
    action: str
    minute: int
    counts: list[int]

    def add(self, minute: int) -> None:
        """Count one request."""
        if minute > self.minute:
            self.counts, self.minute = self.list_counts(minute), minute
        self.counts[-1] += 1

    def list_counts(self, minute: int) -> list[int]:
        """The counts of the hour that ends with `minute`, oldest first."""
        return [*self.counts[:MINUTES], *[0] * min(MINUTES, max(0, minute - self.minute))][
            -MINUTES:
        ]


class LoopDocument(Document, array_like=True):
    """Looping conversations and curves.

    Attributes:
        lines: one curve per policy, mode and action.
        after: changes after notes, summed over all conversations.
    """

    rows: Annotated[list[ConversationRow], SUM]
    lines: Annotated[list[Line], SUM]
    left_out: Annotated[int, SUM] = 0
    after: Annotated[list[tuple[NoteLabels, int]], SUM] = []

    @property
    def loops(self) -> list[Loop]:
        """The loops of all conversations."""
        return [loop for row in self.rows for loop in row.loops]

    def pack(self) -> bytes:
        """See `Document`."""
        packed = super().pack()
        return (
            packed
            if len(packed) <= MAX_DOCUMENT
            else fit(0, lambda _: LoopDocument([], [], len(self.rows)))
        )

    def finish(self, now: float) -> None:
        """See `Document`; aligns the curves to end at `now`."""
        super().finish(now)
        self.lines = merge_lines(self.lines, int(now) // 60)
        added: Counter[NoteLabels] = Counter()
        for labels, count in self.after:
            added[labels] += count
        self.after = list(added.items())


def merge_lines(lines: Iterable[Line], minute: int) -> list[Line]:
    """Merge curves into one per policy, mode and action, for the hour that ends with `minute`."""
    merged: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        key = (line.policy, line.mode, line.action)
        known = merged.setdefault(key, Line(*key, minute, [0] * MINUTES))
        known.counts = [
            one + other for one, other in zip(known.counts, line.list_counts(minute), strict=True)
        ]
    return [merged[key] for key in sorted(merged) if any(merged[key].counts)]


class IncidentRow(Row, array_like=True):
    """An incident: a tool that fails in the same way for many sessions.

    Attributes:
        failure: digest of the error, part of the merge key; never shown.
        began: when enough sessions were affected, in seconds since 1970.
        last: time of the last affected request.
        callers, sessions: hashes in a sketch.
        requests: number of affected requests.
        spared: affected requests that would otherwise have been refused.
    """

    policy: str
    tool: str
    failure: str
    began: Annotated[float, MIN]
    last: Annotated[float, MAX]
    callers: Annotated[list[str], _SKETCH]
    sessions: Annotated[list[str], _SKETCH]
    requests: Annotated[int, SUM]
    spared: Annotated[int, SUM]

    name = property(attrgetter("policy", "tool", "failure"))

    def count_callers(self) -> int:
        """The number of callers; see SKETCHED."""
        return Sketch(self.callers, SKETCHED).count()

    def count_sessions(self) -> int:
        """See `count_callers`."""
        return Sketch(self.sessions, SKETCHED).count()


class IncidentDocument(Document, array_like=True):
    """Incidents, the newest first."""

    rows: Annotated[list[IncidentRow], SUM]
    left_out: Annotated[int, SUM] = 0

    def finish(self, now: float) -> None:
        """See `Document`."""
        super().finish(now)
        self.rows.sort(key=lambda row: -row.began)
