"""Incidents as people see them and as replicas publish them; see `rows`."""
# interpreted: msgspec makes its classes

from __future__ import annotations

from typing import Annotated

from extproc.operator.rows import MAX, MIN, SUM, Document, Row, join
from extproc.operator.sketch import Sketch

WINDOW_SECONDS = 300
"""How long a session counts after its last request in the incident."""

SKETCHED = 64
"""Fewer callers and sessions than this are counted exactly, others are estimated."""

_SKETCH = join(lambda one, other: Sketch([*one, *other], SKETCHED).list_kept())


class IncidentRow(Row, array_like=True):
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
    began: Annotated[float, MIN]
    last: Annotated[float, MAX]
    callers: Annotated[list[str], _SKETCH]
    sessions: Annotated[list[str], _SKETCH]
    requests: Annotated[int, SUM]
    spared: Annotated[int, SUM]

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


class IncidentDocument(Document, array_like=True):
    """Incidents, the newest first."""

    rows: Annotated[list[IncidentRow], SUM]
    left_out: Annotated[int, SUM] = 0

    def finish(self, now: float) -> None:
        """See `Document`."""
        super().finish(now)
        self.rows.sort(key=lambda row: -row.began)
