"""Loops as people see them and as replicas publish them; see `rows`."""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec

from extproc.operator.rows import COUNTS, FIRST, MIN, SUM, Document, Row, fit, newest
from extproc.store.rules.documents import MAX_DOCUMENT

MINUTES = 60

NoteLabels: TypeAlias = tuple[str, str, str, str, str, str]
"""See `AfterNote.labels`."""

_NEWEST = newest("newness")


class Loop(Row, array_like=True):
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

    @property
    def name(self) -> tuple[str, ...]:
        """Identifies the loop."""
        return self.policy, self.detector, self.mode, self.tenant, self.repeats

    @property
    def total(self) -> int:
        """The number of its requests that were acted on, or would have been."""
        return sum(self.requests.values())

    @property
    def newness(self) -> tuple[bool, float]:
        """A row without requests has only seen what came after notes."""
        return self.total > 0, self.last


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


class LoopDocument(Document, array_like=True):
    """Loops, and their curves.

    Attributes:
        lines: one for each policy, mode and action.
        after: changes in all episodes.
    """

    rows: Annotated[list[Loop], SUM]
    lines: Annotated[list[Line], SUM]
    left_out: Annotated[int, SUM] = 0
    after: Annotated[list[tuple[NoteLabels, int]], SUM] = []

    def pack(self) -> bytes:
        """See `Document`."""
        packed = super().pack()
        return packed if len(packed) <= MAX_DOCUMENT else fit(0, lambda _: LoopDocument([], [], len(self.rows)))

    def finish(self, now: float) -> None:
        """See `Document`; curves end now."""
        super().finish(now)
        self.lines = merge_lines(self.lines, int(now) // 60)
        added: Counter[NoteLabels] = Counter()
        for labels, count in self.after:
            added[labels] += count
        self.after = list(added.items())


def merge_lines(lines: Iterable[Line], minute: int) -> list[Line]:
    """One line for each policy, mode and action, for the hour that ends with this minute."""
    merged: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        key = (line.policy, line.mode, line.action)
        known = merged.setdefault(key, Line(*key, minute, [0] * MINUTES))
        known.counts = [one + other for one, other in zip(known.counts, line.list_counts(minute), strict=True)]
    return [merged[key] for key in sorted(merged) if any(merged[key].counts)]
