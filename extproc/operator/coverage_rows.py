"""Coverage counts as replicas publish them; see `rows`."""
# interpreted: msgspec makes its classes

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Final

from extproc.operator.rows import MAX, MIN, SUM, Document, Row, merge

REQUESTS: Final = "requests"
UNMATCHED: Final = "unmatched"
UNMATCHED_CALLS: Final = "unmatched model calls"
COUNTED: Final = "counted"
PARTLY: Final = "partly guarded"
UNGUARDED: Final = "not guarded"
EXEMPT: Final = "exempt"
SHARED: Final = "shared caller"
CROWDED: Final = "crowded sessions"
GROWN: Final = "grown input"
DROPPED: Final = "turns dropped"
EVICTED: Final = "entries evicted"
ABSURD: Final = "absurd usage"
UNLOGGED: Final = "entries missing"
"""Reasons of rows, in addition to those of `uncounted_total`."""

ENFORCES_ON_NONE: Final = "enforces_on_none"
"""The finding that `enforce_percent` covers none of the callers."""


class CoverageRow(Row, array_like=True):
    """A count of requests.

    Attributes:
        policy: the policy's id; empty for all requests.
        route: Envoy's route name; empty if unknown or irrelevant.
        detector: the guard that did not count; empty for the whole policy.
        reason: a reason of `uncounted_total`, or one of the constants above.
        recent: requests in the recent window.
        total: requests since the start.
    """

    policy: str
    mode: str
    route: str
    detector: str
    reason: str
    recent: Annotated[int, SUM]
    total: Annotated[int, SUM]

    name = property(attrgetter("policy", "mode", "route", "detector", "reason"))


class CoverageDocument(Document, array_like=True):
    """Coverage counts, which do not expire.

    Attributes:
        since: when counting began, in seconds since 1970.
        seconds: length of the recent window.
    """

    rows: Annotated[list[CoverageRow], SUM]
    since: Annotated[float, MIN]
    seconds: Annotated[float, MAX]
    left_out: Annotated[int, SUM] = 0

    def pack(self) -> bytes:
        """See `Document`; the smallest counts are left out."""
        self.rows.sort(key=lambda row: (bool(row.policy), -row.total))
        return super().pack()

    def finish(self, now: float) -> None:  # noqa: ARG002  # nothing expires
        """See `Document`."""
        self.rows = merge(self.rows)
