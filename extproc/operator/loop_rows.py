"""Loops as people see them and as replicas publish them, and how the rows of several replicas are merged.

New fields go behind the others and have a default.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from extproc.operator.board import KEPT_SECONDS, fit
from extproc.store.rules.documents import MAX_DOCUMENT

MINUTES = 60

NoteLabels: TypeAlias = tuple[str, str, str, str, str, str]
"""See `AfterNote.labels`."""


class Loop(msgspec.Struct, array_like=True):
    """One loop.

    Attributes:
        detector: the name of its loop_detection entry.
        tenant: hash of the caller, 16 hex digits.
        repeats: what makes requests parts of it: a fingerprint, or the tools of a cycle.
        session: hash of the session's name, empty if it has none.
        fingerprint: of the newest request.
        path, caller: cut to what can be shown.
        tools: that are called again and again.
        first, last: when it was acted on, in seconds since 1970.
        count: what its detector counts.
        requests: that were acted on, or would have been, by action.
        size: bytes of their bodies.
        stopped: of these, the ones that were not forwarded because of this loop.
        stopped_size: bytes of their bodies.
        alias, labels, credentials, parts: see `KnownAs`.
        agent: the id that the agent has given itself, empty for none; cut to what can be shown.
        strength: of the newest request's evidence, `strong` or `weak`; empty if unknown.
        cause: of the newest episode; see `after_notes`.
        after: changes in episodes, by the last two of the labels.
    """

    policy: str
    detector: str
    mode: str
    tenant: str
    repeats: str
    session: str
    fingerprint: str
    method: str
    path: str
    route: str
    model: str
    tools: list[str]
    caller: list[tuple[str, str]]
    first: float
    last: float
    count: int
    requests: dict[str, int]
    size: int
    stopped: int
    stopped_size: int
    alias: str = ""
    labels: list[tuple[str, str]] = []  # msgspec copies a default for each object
    credentials: list[str] = []
    agent: str = ""
    strength: str = ""
    cause: str = ""
    after: dict[str, int] = {}
    parts: list[str] = []

    @property
    def name(self) -> tuple[str, ...]:
        """Identifies the loop."""
        return self.policy, self.detector, self.mode, self.tenant, self.repeats

    @property
    def total(self) -> int:
        """The number of its requests that were acted on, or would have been."""
        return sum(self.requests.values())

    def absorb(self, other: Loop) -> None:
        """Add another replica's row of the same loop."""
        if (other.total > 0, other.last) > (self.total > 0, self.last):  # that has none has only seen what came after
            self.last, self.count, self.fingerprint = other.last, other.count, other.fingerprint
            self.strength, self.tools = other.strength, other.tools
        self.first = min(self.first, other.first)
        self.caller = self.caller or other.caller
        self.alias, self.labels = self.alias or other.alias, self.labels or other.labels
        for action, requests in other.requests.items():
            self.requests[action] = self.requests.get(action, 0) + requests
        self.cause = self.cause or other.cause
        for name, changes in other.after.items():
            self.after[name] = self.after.get(name, 0) + changes
        self.size += other.size
        self.stopped += other.stopped
        self.stopped_size += other.stopped_size


class Line(msgspec.Struct, array_like=True):
    """A curve: requests acted on in each of the `MINUTES` that end with `minute`."""

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
        """The hour that ends with this minute, oldest first."""
        return [*self.counts[:MINUTES], *[0] * min(MINUTES, max(0, minute - self.minute))][-MINUTES:]


class LoopDocument(msgspec.Struct, array_like=True):
    """What one replica publishes, or what all of them know.

    Attributes:
        lines: one for each policy, mode and action.
        left_out: loops that did not fit on the board.
        after: changes in all episodes.
    """

    rows: list[Loop]
    lines: list[Line]
    left_out: int = 0
    after: list[tuple[NoteLabels, int]] = []

    def pack(self) -> bytes:
        """As many loops as fit on a board; the last ones are left out."""
        rows = self.rows
        packed = fit(len(rows), lambda kept: LoopDocument(rows[:kept], self.lines, len(rows) - kept, self.after))
        return packed if len(packed) <= MAX_DOCUMENT else fit(0, lambda _: LoopDocument([], [], len(rows)))

    @classmethod
    def merge(cls, documents: Iterable[LoopDocument], now: float) -> LoopDocument:
        """Merge documents; curves end at `now`, in seconds since 1970."""
        every = list(documents)
        added: Counter[NoteLabels] = Counter()
        for document in every:
            for labels, count in document.after:
                added[labels] += count
        return cls(
            merge_loops((row for document in every for row in document.rows), now - KEPT_SECONDS),
            merge_lines((line for document in every for line in document.lines), int(now) // 60),
            sum(document.left_out for document in every),
            list(added.items()),
        )


def merge_loops(rows: Iterable[Loop], since: float) -> list[Loop]:
    """One row for each loop that was acted on since then."""
    merged: dict[tuple[str, ...], Loop] = {}
    for row in rows:
        if row.last < since:
            continue
        if (known := merged.get(row.name)) is None:
            merged[row.name] = msgspec.structs.replace(row, requests=dict(row.requests), after=dict(row.after))
        else:
            known.absorb(row)
    return list(merged.values())


def merge_lines(lines: Iterable[Line], minute: int) -> list[Line]:
    """One line for each policy, mode and action, for the hour that ends with this minute."""
    merged: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        key = (line.policy, line.mode, line.action)
        known = merged.setdefault(key, Line(*key, minute, [0] * MINUTES))
        known.counts = [one + other for one, other in zip(known.counts, line.list_counts(minute), strict=True)]
    return [merged[key] for key in sorted(merged) if any(merged[key].counts)]
