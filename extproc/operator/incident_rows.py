"""Incidents as people see them and as replicas publish them, and how the rows of several replicas are merged.

New fields go behind the others and have a default.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from extproc.operator.board import KEPT_SECONDS, fit
from extproc.operator.sketch import Sketch

WINDOW_SECONDS = 300
"""How long a session counts after its last request in the incident."""

SKETCHED = 64
"""Fewer callers and sessions than this are counted exactly, others are estimated."""


class IncidentRow(msgspec.Struct, array_like=True):
    """A tool that fails in the same way for many sessions.

    Attributes:
        failure: digest of what it says, to merge rows by; never shown.
        began: when there were enough sessions, in seconds since 1970.
        last: when a request was last part of it.
        callers, sessions: hashes, as a sketch keeps them.
        requests: that were part of it.
        spared: of these, the ones that would have been refused.
    """

    policy: str
    tool: str
    failure: str
    began: float
    last: float
    callers: list[str]
    sessions: list[str]
    requests: int
    spared: int

    @property
    def name(self) -> tuple[str, str, str]:
        """Identifies the incident."""
        return self.policy, self.tool, self.failure

    def count_callers(self) -> int:
        """The number of callers, perhaps estimated; see SKETCHED."""
        return Sketch(self.callers, SKETCHED).count()

    def count_sessions(self) -> int:
        """See `count_callers`."""
        return Sketch(self.sessions, SKETCHED).count()


class IncidentDocument(msgspec.Struct, array_like=True):
    """What one replica publishes, or what all of them know; `left_out` did not fit on the board."""

    rows: list[IncidentRow]
    left_out: int = 0

    def pack(self) -> bytes:
        """Pack as many rows as fit on a board; the last ones are left out."""
        rows = self.rows
        return fit(len(rows), lambda kept: IncidentDocument(rows[:kept], len(rows) - kept))

    @classmethod
    def merge(cls, documents: Iterable[IncidentDocument], now: float) -> IncidentDocument:
        """Merge documents; the newest incident comes first."""
        merged: dict[tuple[str, str, str], IncidentRow] = {}
        left_out = 0
        for document in documents:
            left_out += document.left_out
            for row in document.rows:
                known = merged.get(row.name)
                if row.last >= now - KEPT_SECONDS:
                    merged[row.name] = row if known is None else _join(known, row)
        return cls(sorted(merged.values(), key=lambda row: -row.began), left_out)


def _join(one: IncidentRow, other: IncidentRow) -> IncidentRow:
    return IncidentRow(
        one.policy,
        one.tool,
        one.failure,
        min(one.began, other.began),
        max(one.last, other.last),
        Sketch([*one.callers, *other.callers], SKETCHED).list_kept(),
        Sketch([*one.sessions, *other.sessions], SKETCHED).list_kept(),
        one.requests + other.requests,
        one.spared + other.spared,
    )
