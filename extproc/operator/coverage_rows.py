"""How much of the traffic is guarded, as replicas publish it.

New fields go behind the others and have a default.
"""
# interpreted: msgspec makes its classes

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from extproc.operator.board import fit

REQUESTS: Final = "requests"
UNMATCHED: Final = "unmatched"
UNMATCHED_CALLS: Final = "unmatched model calls"
COUNTED: Final = "counted"
PARTLY: Final = "partly guarded"
UNGUARDED: Final = "not guarded"
EXEMPT: Final = "exempt"
SHARED: Final = "shared caller"
CROWDED: Final = "crowded sessions"
DROPPED: Final = "turns dropped"
EVICTED: Final = "entries evicted"
ABSURD: Final = "absurd usage"
"""What a row may be about, in addition to the reasons of `uncounted_total`."""

ENFORCES_ON_NONE: Final = "enforces_on_none"
"""The finding about a share of the callers that is none of them."""


class CoverageRow(msgspec.Struct, array_like=True):
    """One number.

    Attributes:
        policy: id; empty for all requests.
        route: Envoy's name, empty where that is unknown or does not matter.
        detector: the guard that does not count; empty for all of the policy.
        reason: one of `uncounted_total`, or what else the row is about.
        recent: requests of the last minutes.
    """

    policy: str
    mode: str
    route: str
    detector: str
    reason: str
    recent: int
    total: int

    @property
    def name(self) -> tuple[str, ...]:
        """Identifies the row."""
        return self.policy, self.mode, self.route, self.detector, self.reason


class CoverageDocument(msgspec.Struct, array_like=True):
    """What one replica publishes, or what all replicas know.

    Attributes:
        since: when counting began, in seconds since 1970.
        seconds: how long ago the recent ones began.
        left_out: rows that did not fit on the board.
    """

    rows: list[CoverageRow]
    since: float
    seconds: float
    left_out: int = 0

    def pack(self) -> bytes:
        """As many rows as fit on a board; the smallest numbers are left out."""
        rows = sorted(self.rows, key=lambda row: (bool(row.policy), -row.total))
        return fit(len(rows), lambda kept: CoverageDocument(rows[:kept], self.since, self.seconds, len(rows) - kept))

    @classmethod
    def merge(cls, documents: Iterable[CoverageDocument], now: float) -> CoverageDocument:  # noqa: ARG003  # nothing ends
        """Merge documents."""
        every = list(documents)
        merged: dict[tuple[str, ...], CoverageRow] = {}
        for row in [row for document in every for row in document.rows]:
            known = merged.setdefault(row.name, msgspec.structs.replace(row, recent=0, total=0))
            known.recent += row.recent
            known.total += row.total
        return cls(
            list(merged.values()),
            min(document.since for document in every),
            max(document.seconds for document in every),
            sum(document.left_out for document in every),
        )
