"""How much of the traffic is guarded, as replicas publish it; see `rows`."""
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
DROPPED: Final = "turns dropped"
EVICTED: Final = "entries evicted"
ABSURD: Final = "absurd usage"
"""What a row may be about, in addition to the reasons of `uncounted_total`."""

ENFORCES_ON_NONE: Final = "enforces_on_none"
"""The finding about a share of the callers that is none of them."""


class CoverageRow(Row, array_like=True):
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
    recent: Annotated[int, SUM]
    total: Annotated[int, SUM]

    name = property(attrgetter("policy", "mode", "route", "detector", "reason"))


class CoverageDocument(Document, array_like=True):
    """Numbers, which do not expire.

    Attributes:
        since: when counting began, in seconds since 1970.
        seconds: how long ago the recent ones began.
    """

    rows: Annotated[list[CoverageRow], SUM]
    since: Annotated[float, MIN]
    seconds: Annotated[float, MAX]
    left_out: Annotated[int, SUM] = 0

    def pack(self) -> bytes:
        """See `Document`; the smallest numbers are left out."""
        self.rows.sort(key=lambda row: (bool(row.policy), -row.total))
        return super().pack()

    def finish(self, now: float) -> None:  # noqa: ARG002  # nothing ends
        """See `Document`."""
        self.rows = merge(self.rows)
